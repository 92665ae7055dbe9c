"""The tables and the picture of `bench.launches`, and its aims."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from matplotlib.figure import Figure

from bench.launches import (
    EAGER,
    PRECISIONS,
    REPLAY,
    SGD,
    SGD_STEP,
    STEP,
    STEP_REPLAY,
    VMAP,
    WITH_TF32,
)
from bench.models import COUNTED, MODELLED, SETTINGS

Report = dict[str, Any]
GPU = "H100"
"""The GPU of the aims."""

SMALL = 30
"""Launches of plain SGD below which a net may take more of them."""


def ratios(
    report: Report,
    value: Callable[[dict[str, Any]], float],
    over: tuple[str, str],
    precision: str,
    nets: Iterable[str] | None = None,
) -> dict[str, float]:
    """Return a value of one call over that of another, by net, where both ran."""
    result = {}
    for net in report["counts"] if nets is None else nets:
        rows = report["counts"].get(net, {}).get(precision, {})
        above, below = (rows.get(name) for name in over)
        if ran(above) and ran(below):
            result[net] = value(above) / value(below)
    return result


def ran(row: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Return whether a call was counted."""
    return row is not None and "refused" not in row


def launches(row: dict[str, Any]) -> float:
    return row["launches"]


def seconds(row: dict[str, Any], gpu: str = GPU) -> float:
    return row["seconds"][gpu]


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


class Aim(NamedTuple):
    """Something to be reached: at most so much, and how much it is now."""

    name: str
    limit: float
    now: float
    where: str = ""


def aims(report: Report) -> list[Aim]:
    """Return the aims, each with its value now."""
    plain = PRECISIONS[0]
    of_sgd = ratios(report, launches, (EAGER, SGD), plain)
    of_vmap = ratios(report, launches, (EAGER, VMAP), plain)
    steps = ratios(report, launches, (STEP, SGD_STEP), plain)
    replays = ratios(report, launches, (REPLAY, EAGER), plain)
    replays |= {
        f"{net}, step": ratio
        for net, ratio in ratios(report, launches, (STEP_REPLAY, STEP), plain).items()
    }
    tiny = {
        net for net in of_sgd if report["counts"][net][plain][SGD]["launches"] < SMALL
    }
    result = [
        Aim("launches of a clipped sum / SGD's, mean", 2.6, mean(of_sgd.values())),
        _worst("the same, worst net", 3.8, of_sgd, of_sgd.keys() - tiny),
        _worst(f"the same, nets of fewer than {SMALL}", 4.5, of_sgd, tiny),
        _worst("launches of a clipped sum / vmap's", 1.25, of_vmap),
        Aim("launches of a private step / SGD step's, mean", 2.2, mean(steps.values())),
        _worst("launches of a replay / eager's", 1.0, replays),
        _worst("waits of a clipped sum or private step", 1, _largest(report, _waits)),
        _worst("copies between host and device", 0, _largest(report, _copies)),
    ]
    compiled = {
        net: rows["float32"][EAGER]["kernels"] / rows["float32"][SGD]["kernels"]
        for net, rows in report["kernels"].items()
    }
    if compiled:
        result.append(_worst("kernels of Inductor / of compiled SGD", 1.3, compiled))
    for precision, limit in zip(PRECISIONS, (1.5, 1.6, 1.7, 1.7), strict=True):
        took = ratios(report, seconds, (EAGER, SGD), precision, MODELLED)
        name = f"modelled time / SGD's, {len(took)} nets, {precision}, mean"
        result.append(Aim(name, limit, mean(took.values())))
    return result


def _worst(
    name: str, limit: float, values: dict[str, float], nets: Iterable[str] | None = None
) -> Aim:
    chosen = {net: values[net] for net in (values if nets is None else nets)}
    if not chosen:
        return Aim(name, limit, math.nan)
    net = max(chosen, key=lambda key: chosen[key])
    return Aim(name, limit, chosen[net], net if chosen[net] else "")


def _largest(
    report: Report, value: Callable[[dict[str, Any]], int]
) -> dict[str, float]:
    return {
        f"{net}, {precision}, {name}": value(rows[name])
        for net, kinds in report["counts"].items()
        for precision, rows in kinds.items()
        for name in (EAGER, REPLAY, STEP, STEP_REPLAY)
        if ran(rows.get(name))
    }


def _waits(row: dict[str, Any]) -> int:
    return row["waits"]


def _copies(row: dict[str, Any]) -> int:
    return row["to_host"] + row["to_device"]


def markdown(report: Report) -> str:
    """Return the aims, and tables of launches, of modelled time and of kernels."""
    about = report["about"]
    rates = "; ".join(
        f"{gpu} " + " / ".join(f"{rate / 1e12:g}" for rate in of.values())
        for gpu, of in about["flops_per_second"].items()
    )
    widths = ", ".join(
        f"{gpu} {width / 1e12:g}" for gpu, width in about["bytes_per_second"].items()
    )
    commits: dict[str, list[str]] = {}
    for net, commit in report["commits"].items():
        commits.setdefault(commit, []).append(net)
    runs = "; ".join(
        f"commit {commit}: {', '.join(of)}" for commit, of in commits.items()
    )
    lines = [
        f"Made by `make launches` on {about['date']}, torch {about['torch']}, {runs}. "
        f"Counts are exact; times are modelled: {about['formula']}. "
        f"TFLOP/s in half precision / TF32 / float32 / float64: {rates}. TB/s: "
        f"{widths}. Of both, {about['share']:.0%} are assumed. Means are geometric.",
        "",
        "**Aims**",
        "",
        *_table(
            ["", "at most", "now", "", "worst"],
            (
                [aim.name, f"{aim.limit:g}", f"{aim.now:.3g}", *_met(aim)]
                for aim in aims(report)
            ),
        ),
    ]
    for precision in PRECISIONS:
        lines += ["", f"**Launches, {precision}**", "", *_launches(report, precision)]
    for precision in PRECISIONS:
        title = f"**Modelled time over SGD's, {precision}: A100, H100, H200**"
        lines += ["", title, "", *_modelled(report, precision)]
    lines += [
        "",
        "**Kernels of Inductor** by its rules for GPUs, and calls of other kernels",
        "",
        *_kernels(report),
    ]
    missing = [net for net in COUNTED if net not in report["counts"]]
    if missing:
        lines += ["", f"Not counted yet: {', '.join(missing)}."]
    refused = [
        f"* {net}, {precision}, {name}: {row['refused']}"
        for net, kinds in report["counts"].items()
        for precision, rows in kinds.items()
        for name, row in rows.items()
        if "refused" in row
    ]
    return "\n".join([*lines, *([""] if refused else []), *refused]) + "\n"


ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs/on_a_gpu.md", ROOT / "README.md")
"""The pages with a part of the tables."""


def filled(text: str, report: Report) -> str:
    """Return a page with the counts between its marks, `<!-- counted -->` and so on."""
    parts = {"counted": _counted, "modelled": _means, "launches": _sentence}
    for mark, part in parts.items():
        if f"<!-- {mark} -->" in text:
            before, _, rest = text.partition(f"<!-- {mark} -->\n")
            _, _, after = rest.partition("<!-- end -->")
            lines = "\n".join(["", *part(report), ""])
            text = f"{before}<!-- {mark} -->\n{lines}\n<!-- end -->{after}"
    return text


def _counted(report: Report) -> list[str]:
    """Return the launches of each net in few columns."""
    names = (SGD, VMAP, EAGER, REPLAY)
    body = []
    pairs = (EAGER, SGD), (VMAP, SGD), (STEP, SGD_STEP)
    over = [ratios(report, launches, pair, PRECISIONS[0]) for pair in pairs]
    for net, kinds in report["counts"].items():
        rows = kinds[PRECISIONS[0]]
        cells = [
            f"{rows[name]['launches']:,}" if ran(rows.get(name)) else _why(rows, name)
            for name in names
        ]
        cells += [f"{column[net]:.2f}" if net in column else "" for column in over]
        body.append([SETTINGS[net].title, *cells])
    means = [f"{mean(column.values()):.2f}" for column in over]
    body.append(["geometric mean", *[""] * len(names), *means])
    head = ["launches", "plain SGD", "vmap", "vgrad", "replayed"]
    head += ["vgrad / SGD", "vmap / SGD", "private step / SGD step"]
    return _table(head, body)


def _means(report: Report) -> list[str]:
    """Return the means of modelled times."""
    body = []
    for precision in PRECISIONS:
        cells = []
        for name in (VMAP, EAGER):
            for gpu in report["about"]["flops_per_second"]:
                took = partial(seconds, gpu=gpu)
                over = ratios(report, took, (name, SGD), precision, MODELLED)
                cells.append(f"{mean(over.values()):.2f}")
        body.append([precision, *cells])
    gpus = tuple(report["about"]["flops_per_second"])
    head = ["", *(f"{name}, {gpu}" for name in ("vmap", "vgrad") for gpu in gpus)]
    return _table(head, body)


def _sentence(report: Report) -> list[str]:
    """Return the comparison of the README."""
    plain, half = PRECISIONS[0], PRECISIONS[2]
    clipped = ratios(report, launches, (EAGER, SGD), plain)
    vmap = ratios(report, launches, (VMAP, SGD), plain)
    step = ratios(report, launches, (STEP, SGD_STEP), plain)
    took = [
        mean(ratios(report, seconds, (name, SGD), kind, MODELLED).values())
        for kind in (plain, half)
        for name in (EAGER, VMAP)
    ]
    return [
        "On a GPU each kernel launch costs time. A clipped sum launches "
        f"{mean(clipped.values()):.1f} times as many kernels",
        "as plain SGD's forward and backward pass (`vmap(grad)` with a plain clip: "
        f"{mean(vmap.values()):.1f}). A private",
        f"step launches {mean(step.values()):.1f} times as many as an SGD step, mostly "
        "for noise. These are geometric",
        f"means of {len(clipped)} nets in eager mode. Modelled on an {GPU}, the sum "
        f"takes {took[0]:.1f} times SGD's time in",
        f"float32 (vmap: {took[1]:.1f}) and {took[2]:.1f} times under autocast (vmap: "
        f"{took[3]:.1f});",
        "[On a GPU](docs/on_a_gpu.md) has the tables.",
    ]


def _met(aim: Aim) -> tuple[str, str]:
    if math.isnan(aim.now):
        return "not counted", ""
    return "met" if aim.now <= aim.limit * (1 + 1e-9) else "missed", aim.where


def _launches(report: Report, precision: str) -> list[str]:
    names = (SGD, VMAP, EAGER, REPLAY, SGD_STEP, STEP, STEP_REPLAY)
    if precision.endswith("TF32"):
        names = WITH_TF32
    head = ["net", *names, "sum / SGD", "sum / vmap", "step / SGD step"]
    head += ["waits", "copies"]
    body = []
    pairs = (EAGER, SGD), (EAGER, VMAP), (STEP, SGD_STEP)
    over = [ratios(report, launches, pair, precision) for pair in pairs]
    for net, kinds in report["counts"].items():
        rows = kinds[precision]
        cells = [
            f"{rows[name]['launches']:,}" if ran(rows.get(name)) else _why(rows, name)
            for name in names
        ]
        cells += [f"{column[net]:.2f}" if net in column else "" for column in over]
        clipped = [rows[name] for name in (EAGER, STEP) if ran(rows.get(name))]
        cells += [", ".join(str(_waits(row)) for row in clipped)]
        cells += [", ".join(str(_copies(row)) for row in clipped)]
        body.append([SETTINGS[net].title, *cells])
    means = [f"{mean(column.values()):.2f}" if column else "" for column in over]
    body.append(["**mean**", *[""] * len(names), *means, "", ""])
    return _table(head, body)


def _why(rows: dict[str, Any], name: str) -> str:
    return "refused" if name in rows else "not counted"


def _modelled(report: Report, precision: str) -> list[str]:
    gpus = tuple(report["about"]["flops_per_second"])
    names = (VMAP, EAGER) if precision.endswith("TF32") else (VMAP, EAGER, REPLAY)
    body = []
    for net in MODELLED:
        rows = report["counts"].get(net, {}).get(precision, {})
        if SGD not in rows:
            continue
        base = rows[SGD]["seconds"]
        cells = [f"{1e3 * base[GPU]:.3f}"]
        for name in names:
            took = rows[name]["seconds"] if ran(rows.get(name)) else {}
            times = [f"{took[gpu] / base[gpu]:.2f}" for gpu in took]
            cells.append(", ".join(times) or _why(rows, name))
        body.append([SETTINGS[net].title, *cells])
    means = []
    for name in names:
        over = [
            ratios(report, partial(seconds, gpu=gpu), (name, SGD), precision, MODELLED)
            for gpu in gpus
        ]
        means.append(", ".join(f"{mean(column.values()):.2f}" for column in over))
    body.append(["**mean**", "", *means])
    return _table(["net", f"SGD, ms, {GPU}", *names], body)


def _kernels(report: Report) -> list[str]:
    body = []
    for net, kinds in report["kernels"].items():
        cells = []
        for rows in kinds.values():
            base, clipped = rows[SGD], rows[EAGER]
            kernels = [row["kernels"] for row in (base, clipped)]
            cells += [*map(str, kernels), f"{kernels[1] / kernels[0]:.2f}"]
        body.append([SETTINGS[net].title, *cells])
    head = ["net"]
    for precision in PRECISIONS[::2]:
        head += [f"SGD, {precision}", "clipped sum", "ratio"]
    return _table(head, body)


def _table(head: list[str], body: Iterable[list[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def draw(report: Report) -> Figure:
    """Draw launches over those of plain SGD, and the modelled time over its time."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, 1)
    precision = PRECISIONS[0]
    titles = "Launches of a clipped sum", f"Modelled time of a clipped sum, {GPU}"
    for axes, value, title, nets in zip(
        panels,
        (launches, seconds),
        titles,
        (tuple(report["counts"]), MODELLED),
        strict=True,
    ):
        drawn = [net for net in nets if net in report["counts"]]
        marks = ((VMAP, precision), (EAGER, precision))
        if value is launches:
            marks += ((REPLAY, precision),)
        else:
            marks += ((VMAP, PRECISIONS[2]), (EAGER, PRECISIONS[2]))
        for place, (name, kind) in enumerate(marks):
            of = ratios(report, value, (name, SGD), kind, drawn)
            label = name if value is launches else f"{name}, {kind}"
            where = [drawn.index(net) + 0.16 * place - 0.24 for net in of]
            axes.bar(where, list(of.values()), width=0.15, label=label)
        axes.set_yscale("log")
        axes.set_xticks(range(len(drawn)), drawn, rotation=40, ha="right")
        axes.set_ylabel("over plain SGD")
        axes.set_title(f"{title} ({precision})" if value is launches else title)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.legend(fontsize=8)
    return figure
