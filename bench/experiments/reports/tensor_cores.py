"""What the experiment on tensor cores found: asserted, as a table and as a figure."""

import statistics
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments.drawing import COLOURS, MARKERS, finish
from bench.experiments.study import Result, Results

FLOAT32 = "float32"
PLAIN, LAST, ODD = "as it is", "channels last", "a sample less"
EPOCH = 50_000
"""Images of an epoch, as many as CIFAR-10 has for training."""

CLOSE = {FLOAT32: 0.001, "TF32": 0.01, "float16": 0.01, "bfloat16": 0.08}
"""How far the loss of a batch may be from that in float32, relative to it.

After 50 layers with batch norm over few values, bfloat16's 8 bits leave 4 %.
"""


def compare(losses: Mapping[tuple[str, str], float]) -> None:
    """Assert that contenders compute one loss: rows and channels-last as plain ones.

    A batch with a sample less has a loss of its own in float32.
    """
    for (precision, variant), loss in losses.items():
        expected = losses[FLOAT32, ODD if variant == ODD else PLAIN]
        gap = abs(loss - expected) / expected
        assert gap < CLOSE[precision], (
            f"{precision}, {variant}: loss {loss:.5f}, {expected:.5f} in float32"
        )


def check(results: Results) -> list[str]:
    """Assert that losses agree, folds learn, and a run that went on has all bits."""
    seen = []
    timed, folded = _timed(results), _folded(results)
    for result in timed.values():
        losses = {
            (row["precision"], row["variant"]): row["loss"] for row in result["rows"]
        }
        compare(losses)
    gaps = [_gap(result) for result in timed.values()]
    seen.append(
        f"{', '.join(timed)}: the loss of a batch in low precision is within "
        f"{max(gaps):.2%} of that in float32."
    )
    if "resumed" in results:
        rerun = results["resumed"]
        assert 0 < rerun["epochs_after"] < rerun["epochs"], "nothing was interrupted"
        equal = rerun["resumed"] and rerun["losses"] == rerun["resumed_losses"]
        assert equal, "a resumed cross-validation differs from one that ran to its end"
        seen.append(
            f"A cross-validation that was interrupted in its second fold, with "
            f"{rerun['epochs_after']} of {rerun['epochs']} epochs left, ended with all "
            f"bits of one that was not."
        )
    for net, result in folded.items():
        worst = min(_last(result))
        chance = 1 / result["classes"]
        assert worst > 2 * chance, (
            f"{net}: accuracy {worst:.1%} in a fold, chance is {chance:.1%}"
        )
        seen.append(
            f"{net}: accuracy {statistics.mean(_last(result)):.1%} as a mean over "
            f"folds, {worst:.1%} in the worst."
        )
    return seen


def table(results: Results) -> str:
    """Return times and gains, then the padding, then the folds."""
    timed, folded = _timed(results), _folded(results)
    names = _precisions(timed)
    lines = [
        f"Minutes for an epoch of {EPOCH:,} images, and how many times as fast as "
        f"float32 in the same order of memory. The last column is the share of the "
        f"work in products with a size that is no multiple of 8, by "
        f"`alignment_report`; the one before is the time of a sample in a batch with "
        f"a sample less over that in the batch, by precision.",
        "",
        "| net, pixels, batch | order | "
        + " | ".join(names)
        + " | a sample less | misaligned |",
        "|---|---|" + "---|" * (len(names) + 2),
    ]
    for net, result in timed.items():
        for variant in (PLAIN, LAST):
            base = minutes(result, FLOAT32, variant)
            cells = []
            for name in names:
                duration = minutes(result, name, variant)
                cells.append(f"{duration:.2f} ({base / duration:.2f} x)")
            slowdown = misaligned = ""
            if variant == PLAIN:
                slowdown = ", ".join(f"{_slowdown(result, name):.2f}" for name in names)
                misaligned = f"{result['alignment']['misaligned']:.1%}"
            title = f"{net}, {result['side']}, {result['batch']}"
            cells = [title, variant, *cells, slowdown, misaligned]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_padding(results), ""]
    lines += [
        "| net, data | samples | accuracy by fold | mean | s |",
        "|---|---|---|---|---|",
    ]
    for net, result in folded.items():
        scores = ", ".join(f"{score:.1%}" for score in _last(result))
        mean = statistics.mean(_last(result))
        lines.append(
            f"| {net}, {result['data']} | {result['samples']} | {scores} | "
            f"{mean:.1%} | {result['seconds']:.1f} |"
        )
    return "\n".join([*lines, "", *_missing(names)])


def _padding(results: Results) -> list[str]:
    """Return the report's lines on two widths of a net, and their times."""
    result = results.get("padding")
    if result is None:
        return []
    names = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    lines = [f"| CNN, {result['side']} pixels, batch {result['batch']} | misaligned | "]
    lines[0] += " | ".join(f"{name}, ms" for name in names) + " | advice |"
    lines.append("|---|---|" + "---|" * (len(names) + 1))
    for width in result["widths"]:
        said = result["alignment"][str(width)]
        times = [f"{_seconds(result, n, width) * 1e3:.1f}" for n in names]
        advice = "; ".join(said["advice"]) or "nothing to pad"
        cells = [f"width {width}", f"{said['misaligned']:.1%}", *times, advice]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(results: Results, figure: Figure) -> None:
    """Draw times of an epoch, gains, what padding brings, and folds."""
    timed, folded = _timed(results), _folded(results)
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    top, gains = above.subplots(1, 2)
    names = _precisions(timed)
    bars = {
        f"{name}{', ' + variant if variant == LAST else ''}": (name, variant)
        for name in names
        for variant in (PLAIN, LAST)
    }
    for axes, ratio in ((top, False), (gains, True)):
        heights = {}
        for label, (name, variant) in bars.items():
            durations = [minutes(result, name, variant) for result in timed.values()]
            if ratio:
                base = [minutes(result, FLOAT32, PLAIN) for result in timed.values()]
                durations = [b / o for b, o in zip(base, durations, strict=True)]
            heights[label] = durations
        _grouped(axes, [_tick(net, result) for net, result in timed.items()], heights)
    top.set_yscale("log")
    top.set_ylim(top=4 * top.get_ylim()[1])
    unit = f"minutes per epoch of {EPOCH:,} images"
    finish(top, "Training time", "", unit, legend=False)
    top.legend(fontsize="x-small", ncols=len(names), loc="upper left")
    gains.axhline(1, color="grey", linewidth=0.8)
    finish(gains, "Gain", "", "times as fast as float32 as it is", legend=False)
    left, middle, right = below.subplots(1, 3)
    _draw_odd(left, timed, names)
    _draw_padding(middle, results)
    _draw_folds(right, folded)
    figure.suptitle("; ".join(_missing(names)))


def _draw_odd(axes: Axes, timed: dict[str, Result], names: list[str]) -> None:
    """Draw what a sample costs in a batch that is no multiple of 8."""
    ticks = [_tick(net, result) for net, result in timed.items()]
    _grouped(
        axes,
        ticks,
        {
            name: [_slowdown(result, name) for result in timed.values()]
            for name in names
        },
    )
    axes.axhline(1, color="grey", linewidth=0.8)
    finish(
        axes,
        "A batch with a sample less: no multiple of 8",
        "",
        "time of a sample, times that in the full batch",
        legend=False,
    )


def _draw_padding(axes: Axes, results: Results) -> None:
    """Draw times of a misaligned net and of a padded one."""
    result = results["padding"]
    names = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    heights = {}
    for width in result["widths"]:
        share = result["alignment"][str(width)]["misaligned"]
        label = f"width {width}: {share:.0%} of the work misaligned"
        heights[label] = [_seconds(result, name, width) * 1e3 for name in names]
    _grouped(axes, names, heights, first=3)
    axes.set_ylim(0, 1.3 * max(map(max, heights.values())))
    title = f"Padding, CNN at {result['side']} pixels, batch {result['batch']}"
    finish(axes, title, "", "ms per step")


def _draw_folds(axes: Axes, folded: dict[str, Result]) -> None:
    """Draw the accuracy of each fold after the last epoch."""
    for place, result in enumerate(folded.values()):
        scores = [100 * score for score in _last(result)]
        count = len(scores)
        at = [place + 0.4 * (fold + 0.5) / count - 0.2 for fold in range(count)]
        colour, marker = COLOURS[place], MARKERS[place]
        axes.plot(at, scores, color=colour, marker=marker, linestyle="")
        mean = statistics.mean(scores)
        axes.hlines(mean, place - 0.3, place + 0.3, color=colour)
    result = next(iter(folded.values()))
    axes.axhline(100 / result["classes"], color="grey", linewidth=0.8, label="chance")
    ticks = [net.replace(", ", "\n") for net in folded]
    axes.set_xticks(range(len(folded)), ticks, fontsize="small")
    axes.set(xlim=(-0.6, len(folded) - 0.4), ylim=(0, 102))
    title = f"{len(_last(result))} folds: {result['data']}"
    finish(axes, title, "", "accuracy (%) by fold, and mean")


def _grouped(
    axes: Axes,
    ticks: list[str],
    heights: dict[str, list[float]],
    *,
    first: int = 0,
) -> None:
    """Draw a group of bars for each tick; pairs of labels share a colour."""
    width = 0.84 / len(heights)
    for order, (label, values) in enumerate(heights.items()):
        at = [place + (order + 0.5) * width - 0.42 for place in range(len(ticks))]
        last = label.endswith(LAST)
        paired = any(text.endswith(LAST) for text in heights)
        colour = COLOURS[first + (order // 2 if paired else order)]
        hatch = "////" if last else None
        axes.bar(
            at, values, width, color=colour, hatch=hatch, edgecolor="white", label=label
        )
    axes.set_xticks(range(len(ticks)), ticks, fontsize="x-small")


def minutes(result: Result, precision: str, variant: str) -> float:
    """Return how long an epoch takes."""
    return _seconds(result, precision, variant) * EPOCH / result["batch"] / 60


def _seconds(result: Result, precision: str, variant: str | int) -> float:
    key = precision, variant
    rows = result["rows"]
    return next(r["seconds"] for r in rows if (r["precision"], r["variant"]) == key)


def _slowdown(result: Result, precision: str) -> float:
    """Return the time of a sample in the odd batch over that in the full one."""
    odd_seconds, full = (
        _seconds(result, precision, variant) for variant in (ODD, PLAIN)
    )
    return odd_seconds / (result["batch"] - 1) / (full / result["batch"])


def _losses(result: Result) -> dict[tuple[str, str], float]:
    return {(row["precision"], row["variant"]): row["loss"] for row in result["rows"]}


def _gap(result: Result) -> float:
    """Return the largest distance of a loss from float32's."""
    gaps, losses = [], _losses(result)
    for (_, variant), loss in losses.items():
        expected = losses[FLOAT32, ODD if variant == ODD else PLAIN]
        gaps.append(abs(loss - expected) / expected)
    return max(gaps)


def _tick(net: str, result: Result) -> str:
    name = net.replace("-B", "\nB").replace(", ", "\n").replace(" V", "\nV")
    return f"{name}\n{result['side']} px"


def _precisions(timed: dict[str, Result]) -> list[str]:
    first = next(iter(timed.values()))
    return list(dict.fromkeys(row["precision"] for row in first["rows"]))


def _missing(names: list[str]) -> list[str]:
    """Say what was not timed."""
    missing = ", ".join(name for name in CLOSE if name not in names)
    reason = "this device has no instructions for it, or no kernels that use them"
    return [f"Not timed: {missing} ({reason})"] if missing else []


def _timed(results: Results) -> dict[str, Result]:
    return {e["net"]: e for e in results.values() if "rows" in e and "net" in e}


def _folded(results: Results) -> dict[str, Result]:
    return {result["net"]: result for result in results.values() if "scores" in result}


def _last(result: Result) -> list[float]:
    """Return the accuracy of each fold after the last epoch."""
    return [scores[-1] for scores in result["scores"]]
