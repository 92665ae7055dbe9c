"""Losses that write into their own tensors or differentiate.

Clipped sums of programs as their authors write them: message passing, a decoder, a scan
with a cache; a net for a Laplace equation, forces of a potential, a gradient penalty, a
step of MAML by hand. `python -m bench.programs` writes a table with the time of plain
SGD on the same batch and, over that, of clipped sums: by `strategy="auto"`, its replay,
a loop, and `vmap(grad)` of the same loss by `torch.func`. Each is compared with a
float64 loop of plain autograd first, and all are interleaved.
"""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import vgrad
from tests import oracle

RESULTS = Path(__file__).parent / "results/cpu_1_thread/programs.md"
ROUNDS, MAX_NORM = 21, 1.0


class Program(NamedTuple):
    """A loss of one sample, which takes a whole batch as well after `joined`."""

    loss: Callable[..., Tensor]
    params: dict[str, Tensor]
    batch: tuple[Tensor, ...]
    by_func: Callable[..., Tensor] | None = None  # the same by `torch.func`
    joined: Callable[..., tuple] = lambda *batch: batch


def convolves(p: dict, b: dict, x: Tensor, edges: Tensor) -> Tensor:
    """A graph convolution with self-loops, as `GCNConv` of PyTorch Geometric."""
    loops = torch.arange(len(x))
    source, target = torch.cat([edges, torch.stack([loops, loops])], 1)
    degree = torch.zeros(len(x), dtype=x.dtype)
    degree.scatter_add_(0, target, torch.ones(len(target), dtype=x.dtype))
    scale = degree.rsqrt()
    for name in ("first", "second"):
        h = F.linear(x, p[name])[source] * (scale[source] * scale[target])[:, None]
        out = torch.zeros(len(x), h.shape[1], dtype=x.dtype)
        x = out.scatter_add_(0, target[:, None].expand_as(h), h).tanh()
    return x.square().sum()


def decodes(p: dict, b: dict, x: Tensor) -> Tensor:
    """A recurrent decoder that writes the scores of each position."""
    steps, scores = x.shape[-2], len(p["out"])
    h = torch.zeros(*x.shape[:-2], len(p["past"]), dtype=x.dtype)
    out = torch.empty(*x.shape[:-1], scores, dtype=x.dtype)
    for t in range(steps):
        h = torch.tanh(F.linear(x[..., t, :], p["input"]) + F.linear(h, p["past"]))
        out[..., t, :] = F.linear(h, p["out"])
    return out.logsumexp(-1).sum()


def scans(p: dict, b: dict, x: Tensor) -> Tensor:
    """A selective scan with a cache of its last inputs and state, as Mamba's."""
    steps, width = x.shape[-2], p["taps"].shape[1]
    u = F.linear(x, p["input"])
    cache = torch.zeros(*u.shape[:-2], width - 1 + steps, u.shape[-1], dtype=x.dtype)
    cache[..., width - 1 :, :] = u
    u = sum(cache[..., k : k + steps, :] * p["taps"][:, k] for k in range(width))
    reads, state = F.linear(u, p["reads"]), torch.zeros((), dtype=x.dtype)
    last_state = torch.zeros(*u.shape[:-2], *p["decay"].shape, dtype=x.dtype)
    out = torch.empty_like(u)
    for t in range(steps):
        now = u[..., t, :, None]
        state = state * torch.sigmoid(p["decay"]) + now * F.silu(now)
        out[..., t, :] = (state * reads[..., t, None, :]).sum(-1)
    last_state.copy_(state)
    return out.tanh().sum() + last_state.square().sum()


def slopes(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output.sum(), inputs, create_graph=True)


def net(p: dict, x: Tensor) -> Tensor:
    """A number for each row of `[..., I]`."""
    h = F.linear(x, p["first"]).tanh()
    return F.linear(F.linear(h, p["second"]).tanh(), p["head"])[..., 0]


def solves(p: dict, b: dict, x: Tensor) -> Tensor:
    """The residual of a Laplace equation at a point of three dimensions."""
    (gradient,) = slopes(net(p, x.requires_grad_()), x)
    parts = [slopes(gradient[..., i], x)[0][..., i] for i in range(x.shape[-1])]
    return (sum(parts) + x.prod(-1)).square().sum()


def solves_by_func(p: dict, b: dict, x: Tensor) -> Tensor:
    hessian = torch.func.jacfwd(torch.func.grad(lambda x: net(p, x)))(x)
    return (hessian.trace() + x.prod()).square()


def energy(p: dict, places: Tensor) -> Tensor:
    """The energy of atoms, from bumps of all distances."""
    away = places[..., :, None, :] - places[..., None, :, :]
    distances = (away.square().sum(-1, keepdim=True) + 0.1).sqrt()
    bumps = torch.exp(-(distances - torch.linspace(0, 3, p["first"].shape[1])).square())
    return net(p, bumps.sum(-2)).sum(-1)


def pulls(p: dict, b: dict, places: Tensor, forces: Tensor) -> Tensor:
    """The error of the forces of a potential."""
    (slope,) = slopes(energy(p, places.requires_grad_()), places)
    return (slope + forces).square().sum()


def pulls_by_func(p: dict, b: dict, places: Tensor, forces: Tensor) -> Tensor:
    slope = torch.func.grad(lambda x: energy(p, x))(places)
    return (slope + forces).square().sum()


def judges(p: dict, b: dict, real: Tensor, mixed: Tensor) -> Tensor:
    """A critic with a gradient penalty."""
    (slope,) = slopes(net(p, mixed.requires_grad_()), mixed)
    return (net(p, real) + 10 * (slope.norm(dim=-1) - 1).square()).sum()


def judges_by_func(p: dict, b: dict, real: Tensor, mixed: Tensor) -> Tensor:
    slope = torch.func.grad(lambda x: net(p, x))(mixed)
    return net(p, real) + 10 * (slope.norm() - 1).square()


def misses(p: dict, x: Tensor, y: Tensor) -> Tensor:
    h = (x @ p["first"].mT).tanh() @ p["second"].mT
    return ((h.tanh() @ p["head"].mT)[..., 0] - y).square().mean(-1)


def adapts(p: dict, b: dict, x: Tensor, y: Tensor) -> Tensor:
    """The error of a task after a step on its first half."""
    weights = {n: w.expand(*x.shape[:-2], *w.shape) for n, w in p.items()}
    (x, later), (y, target) = x.chunk(2, -2), y.chunk(2, -1)
    steps = slopes(misses(weights, x, y), *weights.values())
    weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), steps, strict=True)}
    return misses(weights, later, target).sum()


def adapts_by_func(p: dict, b: dict, x: Tensor, y: Tensor) -> Tensor:
    (x, later), (y, target) = x.chunk(2), y.chunk(2)
    steps = torch.func.grad(misses)(p, x, y)
    return misses({n: w - 0.1 * steps[n] for n, w in p.items()}, later, target)


def programs(size: int, width: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the programs by name, for batches of this size."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype) / shape[-1] ** 0.5

    def graph(x: Tensor, edges: Tensor) -> tuple:  # of all graphs
        first = torch.arange(size)[:, None, None] * steps
        return x.flatten(0, 1), (edges + first).transpose(0, 1).flatten(1)

    x, edges = noise(size, steps, width), torch.randint(steps, (size, 2, 3 * steps))
    square = noise(width, width)
    layers = {"first": square, "second": noise(width, width)}
    cell = {
        "input": square,
        "past": noise(width, width),
        "out": noise(2 * width, width),
    }
    scan = {"input": square, "taps": noise(width, 4), "reads": noise(8, width)}

    def layers_of(inputs: int) -> dict[str, Tensor]:
        heads = {"second": noise(width, width), "head": noise(1, width)}
        return {"first": noise(width, inputs)} | heads

    wide, many = layers_of(width), 2 * size
    points = torch.randn(many, 3, dtype=dtype)
    atoms = torch.randn(2, size, 8, 3, dtype=dtype)
    pictures = torch.randn(2, many, width, dtype=dtype)
    tasks = torch.randn(size, 10, 8, dtype=dtype), torch.randn(size, 10, dtype=dtype)
    scan |= {"decay": noise(width, 8)}
    return {
        "graph convolution": Program(convolves, layers, (x, edges), joined=graph),
        "decoder": Program(decodes, cell, (x,)),
        "scan with a cache": Program(scans, scan, (x,)),
        "Laplacian": Program(solves, layers_of(3), (points,), solves_by_func),
        "forces": Program(pulls, layers_of(16), (*atoms,), pulls_by_func),
        "gradient penalty": Program(judges, wide, (*pictures,), judges_by_func),
        "step of MAML": Program(adapts, layers_of(8), tasks, adapts_by_func),
    }


def contenders(program: Program) -> dict[str, Callable[[], Any]]:
    """Return plain SGD, and the clipped sum in several ways."""
    loss, params, batch, by_func, joined = program
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}

    def plain() -> Any:
        total = loss(leaves, {}, *joined(*(item.detach() for item in batch)))
        return torch.autograd.grad(total, [*leaves.values()])

    def mapped() -> dict[str, Tensor]:
        gradients = grads(params, {}, *batch)
        squares = [grad.flatten(1).square().sum(1) for grad in gradients.values()]
        factors = (MAX_NORM / sum(squares).sqrt()).clamp(max=1)
        return {name: torch.tensordot(factors, g, 1) for name, g in gradients.items()}

    clip = vgrad.clipped_grad(loss, max_norm=MAX_NORM, verify=False)
    loop = vgrad.clipped_grad(loss, max_norm=MAX_NORM, strategy="loop")
    replay = vgrad.compile(clip)
    ways = {
        "SGD": plain,
        "auto": lambda: clip(params, {}, *batch).grads,
        "replayed": lambda: replay(params, {}, *batch).grads,
        "loop": lambda: loop(params, {}, *batch).grads,
    }
    if by_func is None:
        return ways
    in_dims = (None, None, *[0] * len(batch))
    grads = torch.func.vmap(torch.func.grad(by_func), in_dims)
    return ways | {"torch.func": mapped}


def checked(program: Program) -> dict[str, Callable[[], Any]]:
    """Return the contenders, whose numbers are those of a loop in float64."""
    args = oracle.in_double((program.params, program.batch))
    grads = oracle.loss_gradients(program.loss, args[0], {}, args[1])
    expected = oracle.clipped(grads, MAX_NORM)
    ways = contenders(program)
    for name, run in ways.items():
        for _ in range(1 if name == "loop" else 3):
            result = run()
        for key, value in expected.items() if name != "SGD" else ():
            assert oracle.error(result[key], value) < 1e-4, (name, key)
    return ways


def main() -> None:
    """Write the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    heads, rows = ("auto", "replayed", "loop", "torch.func"), []
    for name, program in programs(32, 64, 16, torch.float32).items():
        ways = checked(program)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS):
            for way, run in ways.items():
                if way == "loop" and number % 4:
                    continue
                start = time.process_time()
                run()
                times[way].append(time.process_time() - start)
        medians = {way: statistics.median(spent) for way, spent in times.items()}
        plain = medians["SGD"]
        cells = [f"{medians[e] / plain:.1f}" if e in medians else "" for e in heads]
        rows.append((name, f"{plain * 1e3:.1f}", *cells))
    lines = [("", "SGD, ms", *heads), ("---", *["---:"] * 5), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    RESULTS.write_text(f"""\
# Losses that write or differentiate

Clipped sums over plain SGD, {platform.machine()}, one thread, CPU time, medians of
{ROUNDS} rounds of all in turn (`python -m bench.programs`).

{text}
""")


if __name__ == "__main__":
    main()
