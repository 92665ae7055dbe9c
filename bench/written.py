"""Losses that write into tensors of their own: `python -m bench.written`.

Clipped sums of three programs as their authors write them: message passing, a decoder
and a scan with a cache. The table has the time of plain SGD on the same batch, and of
the clipped sum as `strategy="auto"` and a loop compute it, each over SGD, interleaved.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import vgrad


class Program(NamedTuple):
    """A loss of one sample, which takes a whole batch as well after `joined`."""

    loss: Callable[..., Tensor]
    params: dict[str, Tensor]
    batch: tuple[Tensor, ...]
    joined: Callable[..., tuple] = lambda *batch: batch


def convolves(p: dict, b: dict, x: Tensor, edges: Tensor) -> Tensor:
    """A graph convolution with self-loops, as `GCNConv` of PyTorch Geometric."""
    own = torch.arange(len(x))
    source, target = torch.cat([edges, torch.stack([own, own])], 1)
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
    kept = torch.zeros(*u.shape[:-2], *p["decay"].shape, dtype=x.dtype)
    out = torch.empty_like(u)
    for t in range(steps):
        now = u[..., t, :, None]
        state = state * torch.sigmoid(p["decay"]) + now * F.silu(now)
        out[..., t, :] = (state * reads[..., t, None, :]).sum(-1)
    kept.copy_(state)
    return out.tanh().sum() + kept.square().sum()


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
    return {
        "graph convolution": Program(convolves, layers, (x, edges), graph),
        "decoder": Program(decodes, cell, (x,)),
        "scan with a cache": Program(scans, scan | {"decay": noise(width, 8)}, (x,)),
    }


def contenders(program: Program) -> dict[str, Callable[[], Any]]:
    """Return plain SGD, and the clipped sum at once and in a loop."""
    loss, params, batch, joined = program
    leaves = {name: each.clone().requires_grad_() for name, each in params.items()}

    def plain() -> Any:
        total = loss(leaves, {}, *joined(*batch))
        return torch.autograd.grad(total, [*leaves.values()])

    clip = vgrad.clipped_grad(loss, max_norm=1.0)
    loop = vgrad.clipped_grad(loss, max_norm=1.0, strategy="loop")
    return {
        "SGD": plain,
        "auto": lambda: clip(params, {}, *batch),
        "loop": lambda: loop(params, {}, *batch),
    }


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| | SGD, ms | auto | loop |\n| --- | --- | --- | --- |")
    for name, program in programs(32, 64, 16, torch.float32).items():
        runs = contenders(program)
        times: dict[str, list[float]] = {each: [] for each in runs}
        for _ in range(23):
            for each, run in runs.items():
                start = time.perf_counter()
                run()
                times[each].append(time.perf_counter() - start)
        plain, *others = (statistics.median(each[2:]) for each in times.values())
        ratios = " | ".join(f"{other / plain:.1f}" for other in others)
        print(f"| {name} | {plain * 1e3:.1f} | {ratios} |")


if __name__ == "__main__":
    main()
