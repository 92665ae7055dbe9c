"""Curvature and attribution beside five libraries: `python -m bench.attribution`.

curvlinops, laplace-torch (with BackPACK and ASDL), kronfluence, dattri and TRAK, where
they are installed, next to plain torch and vgrad, on a perceptron and a transformer of
linear layers without biases. Each contender is compared with a loop of plain autograd
in float64 on a small net of the same kind, then timed in turn with the others of its
row, one thread, in float32; its memory is the peak of a process of its own. Peers go
into a folder of their own, on `PYTHONPATH`, as some want other versions:

    pip install --target FOLDER --no-deps curvlinops-for-pytorch backpack-for-pytorch \\
        einops einconv unfoldNd linear_operator gpytorch jaxtyping wadler_lindig \\
        laplace-torch asdfghjkl dattri kronfluence opt_einsum accelerate psutil traker

Names of rows measure these alone; the table is of all that were measured.
"""

import argparse
import datetime
import json
import math
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import memory
from bench.attribution_peers import (
    DAMPING,
    PRECISION,
    SHIFT,
    Build,
    Problem,
    backpack_product,
    curvlinops_kronecker,
    curvlinops_product,
    dattri_fit,
    dattri_grad_dot,
    dattri_logra,
    dattri_scores,
    dattri_trak,
    func_diagonal,
    func_grad_dot,
    func_jacobian,
    func_product,
    joined,
    kronfluence_fit,
    kronfluence_scores,
    laplace_diagonal,
    laplace_evidence,
    laplace_jacobian,
    laplace_kronecker,
    laplace_predictive,
    traker,
    vgrad_cg,
    vgrad_diagonal,
    vgrad_ekfac_scores,
    vgrad_evidence,
    vgrad_grad_dot,
    vgrad_jacobian,
    vgrad_kronecker,
    vgrad_logra,
    vgrad_predictive,
    vgrad_product,
    vgrad_trak,
)

RESULTS = Path(__file__).parent / "results/cpu_1_thread/attribution.json"
SECONDS, ROUNDS = 4.0, (3, 15)
"""Of a row on one net, and the fewest and most rounds in it."""

EXACT, CLOSE = 1e-8, 1e-3
"""What a result may differ by in float64, and in float32 where that raises."""

LIBRARIES = {
    "curvlinops-for-pytorch": "curvlinops",
    "laplace-torch": "laplace-torch",
    "backpack-for-pytorch": "BackPACK",
    "asdfghjkl": "ASDL",
    "kronfluence": "kronfluence",
    "dattri": "dattri",
    "traker": "TRAK",
}


class Block(nn.Module):
    """Attention and a perceptron, whose parameters are those of linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, (width,)
        layer = partial(nn.Linear, bias=False)
        self.query, self.key = layer(width, width), layer(width, width)
        self.value, self.out = layer(width, width), layer(width, width)
        self.up, self.down = layer(width, 2 * width), layer(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, self.width)
        layers = (self.query, self.key, self.value)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for layer in layers
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((weights @ v).transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, self.width))))


class Transformer(nn.Module):
    """Two blocks on a sequence of vectors, and classes of their mean."""

    def __init__(self, inputs: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width, bias=False)
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)).mean(-2))


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair, bias=False), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Size(NamedTuple):
    """A net and its data: N training samples, Q queries."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    samples: int
    queries: int
    batch_size: int
    dim: int
    side: int

    def problem(self, dtype: torch.dtype) -> Problem:
        torch.manual_seed(0)
        model = self.build().to(dtype).eval()
        train, queries = (
            (torch.randn(n, *self.shape).to(dtype), torch.randint(self.classes, (n,)))
            for n in (self.samples, self.queries)
        )
        return Problem(model, train, queries, self.batch_size, self.dim, self.side)


SMALL = {
    "perceptron": Size(lambda: perceptron(6, 5, 3), (6,), 3, 24, 4, 12, 1024, 64),
    "transformer": Size(
        lambda: Transformer(4, 6, 2, 3), (5, 4), 3, 24, 4, 12, 1024, 64
    ),
}
TIMED = {
    "perceptron": Size(
        lambda: perceptron(256, 256, 10), (256,), 10, 1024, 64, 256, 512, 16
    ),
    "transformer": Size(
        lambda: Transformer(16, 64, 4, 10), (32, 16), 10, 256, 16, 64, 512, 16
    ),
}


# References: loops of plain autograd, whose parts are dense matrices.


def jacobian(p: Problem, inputs: Tensor) -> Tensor:
    """Return [B, K, P]."""
    rows = []
    for x in inputs:
        outputs = p.model(x[None])[0]
        grads = [torch.autograd.grad(k, p.params, retain_graph=True) for k in outputs]
        rows.append(torch.stack([joined(grad, 0) for grad in grads]))
    return torch.stack(rows)


def gradients(p: Problem, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return [B, P]."""
    rows = []
    for x, y in zip(*data, strict=True):
        loss = F.cross_entropy(p.model(x[None]), y[None])
        rows.append(joined(torch.autograd.grad(loss, p.params), 0))
    return torch.stack(rows)


def dense_ggn(p: Problem) -> Tensor:
    rows, prob = jacobian(p, p.train[0]), p.model(p.train[0]).softmax(1).detach()
    inner = prob.diag_embed() - prob[:, :, None] * prob[:, None]
    return torch.einsum("nkp,nkl,nlq->pq", rows, inner, rows) / len(rows)


def sides(p: Problem, loss: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs [N, T, I] of each layer and gradients [N, T, O] at its outputs."""
    calls: list[tuple[Tensor, Tensor]] = []
    layers = [module for module in p.model.modules() if isinstance(module, nn.Linear)]
    hooks = [
        layer.register_forward_hook(lambda _, x, y: calls.append((x[0], y)))
        for layer in layers
    ]
    value = loss(p.model(p.train[0])).sum()
    grads = torch.autograd.grad(value, [y for _, y in calls])
    for hook in hooks:
        hook.remove()
    pairs = zip(calls, grads, strict=True)
    return [
        (
            x.detach().reshape(len(x), -1, x.shape[-1]),
            g.reshape(len(g), -1, g.shape[-1]),
        )
        for (x, _), g in pairs
    ]


def dense_kfac(p: Problem) -> list[tuple[Tensor, Tensor]]:
    """Return S [O, O] and A [I, I] of the GGN, divided once by the positions."""
    count, prob = len(p.train[0]), p.model(p.train[0]).softmax(1).detach()
    root = prob.sqrt()
    columns = root.diag_embed() - root[:, :, None] * prob[:, None]
    left: list[Any] = [0] * len(p.params)
    right: list[Any] = list(left)
    for k in range(prob.shape[1]):
        for i, (a, g) in enumerate(sides(p, lambda out, k=k: out * columns[:, k])):
            left[i] = left[i] + torch.einsum("nto,ntp->op", g, g) / count
            right[i] = torch.einsum("nti,ntj->ij", a, a) / count / a.shape[1]
    return list(zip(left, right, strict=True))


def kfac_product(p: Problem) -> Tensor:
    blocks, vectors = dense_kfac(p), p.vector.values()
    return joined([s @ v @ a for (s, a), v in zip(blocks, vectors, strict=True)], 0)


def dense_ekfac(p: Problem) -> Tensor:
    """Return the empirical Fisher matrix by EK-FAC, [P, P]."""
    target = p.train[1]
    blocks = []
    for a, g in sides(p, lambda out: F.cross_entropy(out, target, reduction="sum")):
        _, right = torch.linalg.eigh(torch.einsum("nti,ntj->ij", a, a))
        _, left = torch.linalg.eigh(torch.einsum("nto,ntp->op", g, g))
        gradients = torch.einsum("nto,nti->noi", g, a)
        values = (left.mT @ gradients @ right).square().mean(0).flatten()
        basis = torch.kron(left, right)
        blocks.append(basis * values @ basis.mT)
    return torch.block_diag(*blocks)


def scores(p: Problem, matrix: Tensor, damping: float = DAMPING) -> Tensor:
    damped = matrix + damping * torch.eye(len(matrix)).to(matrix)
    solved = torch.linalg.solve(damped, gradients(p, p.train).mT)
    return gradients(p, p.queries) @ solved


def dense_hessian(p: Problem) -> Tensor:
    loss = F.cross_entropy(p.model(p.train[0]), p.train[1])
    grads = torch.autograd.grad(loss, p.params, create_graph=True)
    flat = torch.cat([grad.flatten() for grad in grads])
    rows = [torch.autograd.grad(e, p.params, retain_graph=True) for e in flat]
    return torch.stack([joined(row, 0) for row in rows])


def dense_trak(p: Problem) -> Tensor:
    """Scores of gradients that are not projected."""
    features, probs = [], []
    for x, y in zip(*map(torch.cat, zip(p.queries, p.train, strict=True)), strict=True):
        logp = p.model(x[None]).log_softmax(1)[0, y]
        margin = logp - (-logp.expm1()).log()
        features.append(joined(torch.autograd.grad(margin, p.params), 0))
        probs.append(logp.detach().exp())
    phi, count = torch.stack(features), len(p.queries[0])
    kernel = phi[count:].mT @ phi[count:] + DAMPING * torch.eye(phi.shape[1]).to(phi)
    solved = torch.linalg.solve(kernel, phi[count:].mT)
    return phi[:count] @ solved * (1 - torch.stack(probs[count:]))


def dense_posterior(p: Problem) -> tuple[Tensor, Tensor]:
    """Return the evidence of K-FAC's Gaussian and the queries' covariance."""
    count = len(p.train[0])
    blocks = [count * torch.kron(s, a) for s, a in dense_kfac(p)]
    precision = torch.block_diag(*blocks)
    precision.diagonal().add_(PRECISION)
    fit = -F.cross_entropy(p.model(p.train[0]), p.train[1], reduction="sum").detach()
    prior = PRECISION * joined(p.params, 0).square().sum()
    evidence = fit - (precision.logdet() - len(precision) * math.log(PRECISION)) / 2
    rows = jacobian(p, p.queries[0])
    covariance = rows @ torch.linalg.solve(precision, rows.mT)
    return evidence - prior / 2, covariance


def relative(result: Tensor, expected: Tensor) -> float:
    result, expected = result.double().reshape(expected.shape), expected.double()
    return float((result - expected).norm() / expected.norm())


def uncorrelated(result: Tensor, expected: Tensor) -> float:
    """Return one minus the correlation, over 30: projections are not the same ones."""
    pair = torch.stack([result.double().flatten(), expected.double().flatten()])
    return (1 - float(torch.corrcoef(pair)[0, 1])) / 30


def of_products(features: Tensor, expected: Tensor) -> float:
    """Compare inner products of features with those of gradients."""
    return uncorrelated(features.double() @ features.double().mT, expected)


class Row(NamedTuple):
    """A quantity, its reference, and who computes it."""

    title: str
    reference: Callable[[Problem], Tensor]
    contenders: dict[str, Build]
    leading: int = 0
    error: Callable[[Tensor, Tensor], float] = relative
    exact: float = EXACT
    close: float = CLOSE
    queries: int | None = None
    dense: str = ""
    """A contender with a matrix [P, P], which is not timed."""

    def problem(self, size: "Size", dtype: torch.dtype) -> Problem:
        if self.queries:
            size = size._replace(queries=min(size.queries, self.queries))
        return size.problem(dtype)


EIGEN = dict(damping=DAMPING)
ITERATED = dict(regularization=SHIFT, max_iter=10)
ROWS = {
    "jacobian": Row(
        "Jacobians of the queries, `[Q, K, P]`",
        lambda p: jacobian(p, p.queries[0]),
        {
            "vgrad": vgrad_jacobian,
            "vmap(jacrev)": func_jacobian,
            "laplace-torch": laplace_jacobian("CurvlinopsGGN"),
            "laplace-torch, BackPACK": laplace_jacobian("BackPackGGN"),
        },
        leading=2,
    ),
    "product": Row(
        "GGN times a vector",
        lambda p: dense_ggn(p) @ joined(p.vector, 0),
        {
            "vgrad": vgrad_product,
            "torch.func": func_product,
            "curvlinops": curvlinops_product,
            "BackPACK": backpack_product,
        },
    ),
    "diagonal": Row(
        "diagonal of the GGN",
        lambda p: dense_ggn(p).diagonal(),
        {
            "vgrad": vgrad_diagonal,
            "vmap(jacrev)": func_diagonal,
            "laplace-torch": laplace_diagonal("CurvlinopsGGN", 16),
            "laplace-torch, BackPACK": laplace_diagonal("BackPackGGN"),
            "laplace-torch, ASDL": laplace_diagonal("AsdlGGN"),
        },
    ),
    "kfac": Row(
        "K-FAC of the GGN",
        kfac_product,
        {
            "vgrad": vgrad_kronecker("kfac", empirical=False),
            "curvlinops": curvlinops_kronecker("KFACLinearOperator", "type-2"),
            "laplace-torch": laplace_kronecker("CurvlinopsGGN"),
            "laplace-torch, BackPACK": laplace_kronecker("BackPackGGN"),
            "laplace-torch, ASDL": laplace_kronecker("AsdlGGN"),
        },
    ),
    "ekfac": Row(
        "EK-FAC of the empirical Fisher",
        lambda p: dense_ekfac(p) @ joined(p.vector, 0),
        {
            "vgrad": vgrad_kronecker("ekfac", empirical=True),
            "curvlinops": curvlinops_kronecker("EKFACLinearOperator", "empirical"),
            "kronfluence": kronfluence_fit,
            "dattri": dattri_fit,
        },
    ),
    "influence": Row(
        "influence `[Q, N]` by EK-FAC that is fitted",
        lambda p: scores(p, dense_ekfac(p)),
        {
            "vgrad": vgrad_ekfac_scores,
            "kronfluence": kronfluence_scores("ekfac"),
            "dattri": dattri_scores("IFAttributorEKFAC", **EIGEN),
        },
    ),
    "dot": Row(
        "inner products of gradients `[Q, N]`",
        lambda p: gradients(p, p.queries) @ gradients(p, p.train).mT,
        {
            "vgrad": vgrad_grad_dot,
            "vmap(grad)": func_grad_dot,
            "kronfluence": kronfluence_scores("identity"),
            "dattri": dattri_grad_dot,
        },
    ),
    "hessian": Row(
        "influence `[1, N]` by the Hessian",
        lambda p: scores(p, dense_hessian(p), SHIFT),
        {
            "vgrad": vgrad_cg,
            "dattri, explicit": dattri_scores(
                "IFAttributorExplicit", full_batch=True, regularization=SHIFT
            ),
            "dattri, CG": dattri_scores("IFAttributorCG", full_batch=True, **ITERATED),
        },
        exact=1e-4,
        queries=1,
        dense="dattri, explicit",
    ),
    "trak": Row(
        "TRAK `[Q, N]`, 512 projections",
        dense_trak,
        {"vgrad": vgrad_trak, "dattri": dattri_trak, "TRAK": traker},
        error=uncorrelated,
        exact=CLOSE,
    ),
    "logra": Row(
        "LoGra, 16 x 16 projections of each layer",
        lambda p: gradients(p, p.train) @ gradients(p, p.train).mT,
        {"vgrad": vgrad_logra, "dattri": dattri_logra},
        error=of_products,
        exact=CLOSE,
    ),
    "evidence": Row(
        "Laplace's log marginal likelihood, with the fit",
        lambda p: dense_posterior(p)[0],
        {
            "vgrad": vgrad_evidence,
            "laplace-torch": laplace_evidence("CurvlinopsGGN"),
            "laplace-torch, BackPACK": laplace_evidence("BackPackGGN"),
            "laplace-torch, ASDL": laplace_evidence("AsdlGGN"),
        },
    ),
    "predictive": Row(
        "Laplace's covariance of the queries, `[Q, K, K]`",
        lambda p: dense_posterior(p)[1],
        {
            "vgrad": vgrad_predictive,
            "laplace-torch": laplace_predictive("CurvlinopsGGN"),
            "laplace-torch, BackPACK": laplace_predictive("BackPackGGN"),
            "laplace-torch, ASDL": laplace_predictive("AsdlGGN"),
        },
    ),
}


def refusal(row: Row, name: str, size: Size) -> str | None:
    """Return how a contender raises or is wrong on the small net; None if it is right.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    expected = row.reference(row.problem(size, torch.float64))
    reason = ""
    for dtype, allowed in ((torch.float64, row.exact), (torch.float32, row.close)):
        try:
            result = row.contenders[name](row.problem(size, dtype))()
            error = row.error(joined(result, row.leading), expected)
        except Exception as raised:
            if name == "vgrad" or isinstance(raised, ModuleNotFoundError):
                raise
            said = (str(raised).strip().splitlines() or [""])[-1]
            reason = f"raises {type(raised).__name__}: {said[:90]}"
            continue
        if error <= allowed:
            return None
        assert name != "vgrad", f"{row.title}: wrong, by {error:.2g}"
        return f"wrong, by {error:.2g}"
    return reason


def seconds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return medians of all in turn; they have run before."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end, number = time.process_time() + SECONDS, 0
    while number < ROUNDS[0] or (number < ROUNDS[1] and time.process_time() < end):
        number += 1
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def peak(key: str, net: str, name: str) -> int:
    """Return the bytes that a contender needs above its problem, in this process."""
    torch.set_num_threads(1)
    row = ROWS[key]
    run = row.contenders[name](row.problem(TIMED[net], torch.float32))
    run()
    return int(memory.above_base(run, "cpu")["peak_bytes"])


def refused(key: str, net: str) -> dict[str, str]:
    """Check the contenders of a row; return reasons not to time some of them."""
    row, reasons = ROWS[key], {}
    for name in row.contenders:
        try:
            reason = refusal(row, name, SMALL[net])
        except ModuleNotFoundError as missing:
            reason = f"{missing.name} is not installed"
        if name == row.dense:
            reason = reason or "right, with `[P, P]` numbers"
        if reason is not None:
            reasons[name] = reason
    return reasons


def timed(key: str, size: Size, reasons: dict[str, str]) -> dict[str, float]:
    """Time the other contenders of a row."""
    row, runs = ROWS[key], {}
    for name in row.contenders.keys() - reasons.keys():
        runs[name] = row.contenders[name](row.problem(size, torch.float32))
        runs[name]()
    return seconds({name: runs[name] for name in row.contenders if name in runs})


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def markdown(measured: dict[str, Any]) -> str:
    """Return a table, times and memory of each row over those of vgrad."""
    settings, versions = measured["settings"], measured["versions"]
    rows = measured["rows"].values()
    commits, earlier = (
        ", ".join(dict.fromkeys(row[key] for row in rows))
        for key in ("commit", "measured")
    )
    lines = [
        "# Curvature and attribution",
        "",
        f"Times of commit {commits}, checks and memory of {earlier}: one thread of "
        f"{settings['processor']}, torch",
        f"{settings['torch']}, CPU time, medians of rounds of all in turn, float32 "
        "(`python -m bench.attribution`).",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "A contender that raises or is wrong on the small net is not timed.",
    ]
    for net, size in TIMED.items():
        count = sum(p.numel() for p in size.build().parameters())
        lines += [
            "",
            f"## {net.capitalize()}: {count:,} parameters, N = {size.samples}, "
            f"Q = {size.queries}, K = {size.classes}",
            "",
            "| | | ms | over vgrad | MiB |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
        for row in rows:
            if row["net"] != net:
                continue
            title = ROWS[row["row"]].title
            for name in ROWS[row["row"]].contenders:
                if name in row["seconds"]:
                    took, bytes_ = row["seconds"][name], row["bytes"].get(name)
                    ratio = took / row["seconds"].get("vgrad", math.nan)
                    mib = "" if bytes_ is None else f"{bytes_ / 2**20:.0f}"
                    cells = (f"{took * 1e3:.1f}", f"{ratio:.2f}", mib)
                else:
                    cells = (row["refused"].get(name, ""), "", "")
                lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
                title = ""
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure rows, keep them and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attribution", description=__doc__
    )
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--net", choices=list(TIMED))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--times", action="store_true", help="time again, without checks and memory"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measured = json.loads(args.out.read_text()) if args.out.exists() else {"rows": {}}
    measured["settings"] = {
        "processor": platform.machine(),
        "threads": 1,
        "torch": torch.__version__,
        "date": f"{datetime.date.today()}",
    }
    measured["versions"] = {}
    for package, name in LIBRARIES.items():
        try:
            measured["versions"][name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    for key in args.rows or ROWS:
        for net in [args.net] if args.net else TIMED:
            name = f"{key}, {net}"
            row = measured["rows"].get(name, {}) if args.times else {}
            if not row:
                row = {"row": key, "net": net, "refused": refused(key, net)}
                right = [n for n in ROWS[key].contenders if n not in row["refused"]]
                peaks = [memory.in_fresh_process(peak, key, net, n) for n in right]
                row["bytes"] = dict(zip(right, peaks, strict=True))
                row["measured"] = commit()
            row["seconds"] = timed(key, TIMED[net], row["refused"])
            row["commit"] = commit()
            measured["rows"][name] = row
            order = [f"{key}, {net}" for key in ROWS for net in TIMED]
            measured["rows"] = {
                k: measured["rows"][k] for k in order if k in measured["rows"]
            }
            args.out.write_text(json.dumps(measured, indent=1) + "\n")
            print(name, row["seconds"], row["refused"], flush=True)
    args.out.with_suffix(".md").write_text(markdown(measured))


if __name__ == "__main__":
    main()
