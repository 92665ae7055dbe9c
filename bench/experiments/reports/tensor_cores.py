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
    for each in timed.values():
        losses = {
            (row["precision"], row["variant"]): row["loss"] for row in each["rows"]
        }
        compare(losses)
    gaps = [_gap(each) for each in timed.values()]
    seen.append(
        f"{', '.join(timed)}: the loss of a batch in low precision is within "
        f"{max(gaps):.2%} of that in float32."
    )
    if "resumed" in results:
        found = results["resumed"]
        assert 0 < found["epochs_after"] < found["epochs"], "nothing was interrupted"
        equal = found["resumed"] and found["losses"] == found["resumed_losses"]
        assert equal, "a resumed cross-validation differs from one that ran to its end"
        seen.append(
            f"A cross-validation that was interrupted in its second fold, with "
            f"{found['epochs_after']} of {found['epochs']} epochs left, ended with all "
            f"bits of one that was not."
        )
    for net, found in folded.items():
        worst = min(_last(found))
        chance = 1 / found["classes"]
        assert worst > 2 * chance, (
            f"{net}: accuracy {worst:.1%} in a fold, chance is {chance:.1%}"
        )
        seen.append(
            f"{net}: accuracy {statistics.mean(_last(found)):.1%} as a mean over "
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
    for net, found in timed.items():
        for variant in (PLAIN, LAST):
            base = minutes(found, FLOAT32, variant)
            cells = []
            for name in names:
                own = minutes(found, name, variant)
                cells.append(f"{own:.2f} ({base / own:.2f} x)")
            odd = misaligned = ""
            if variant == PLAIN:
                odd = ", ".join(f"{_odd(found, name):.2f}" for name in names)
                misaligned = f"{found['alignment']['misaligned']:.1%}"
            title = f"{net}, {found['side']}, {found['batch']}"
            cells = [title, variant, *cells, odd, misaligned]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_padding(results), ""]
    lines += [
        "| net, data | samples | accuracy by fold | mean | s |",
        "|---|---|---|---|---|",
    ]
    for net, found in folded.items():
        scores = ", ".join(f"{each:.1%}" for each in _last(found))
        mean = statistics.mean(_last(found))
        lines.append(
            f"| {net}, {found['data']} | {found['samples']} | {scores} | {mean:.1%} | "
            f"{found['seconds']:.1f} |"
        )
    return "\n".join([*lines, "", *_missing(names)])


def _padding(results: Results) -> list[str]:
    """Return the report's lines on two widths of a net, and their times."""
    found = results.get("padding")
    if found is None:
        return []
    names = list(dict.fromkeys(row["precision"] for row in found["rows"]))
    lines = [f"| CNN, {found['side']} pixels, batch {found['batch']} | misaligned | "]
    lines[0] += " | ".join(f"{name}, ms" for name in names) + " | advice |"
    lines.append("|---|---|" + "---|" * (len(names) + 1))
    for width in found["widths"]:
        said = found["alignment"][str(width)]
        times = [f"{_seconds(found, n, width) * 1e3:.1f}" for n in names]
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
            own = [minutes(each, name, variant) for each in timed.values()]
            if ratio:
                base = [minutes(each, FLOAT32, PLAIN) for each in timed.values()]
                own = [b / o for b, o in zip(base, own, strict=True)]
            heights[label] = own
        _grouped(axes, [_tick(net, each) for net, each in timed.items()], heights)
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
    ticks = [_tick(net, each) for net, each in timed.items()]
    _grouped(
        axes,
        ticks,
        {name: [_odd(each, name) for each in timed.values()] for name in names},
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
    found = results["padding"]
    names = list(dict.fromkeys(row["precision"] for row in found["rows"]))
    heights = {}
    for width in found["widths"]:
        share = found["alignment"][str(width)]["misaligned"]
        label = f"width {width}: {share:.0%} of the work misaligned"
        heights[label] = [_seconds(found, name, width) * 1e3 for name in names]
    _grouped(axes, names, heights, first=3)
    axes.set_ylim(0, 1.3 * max(map(max, heights.values())))
    title = f"Padding, CNN at {found['side']} pixels, batch {found['batch']}"
    finish(axes, title, "", "ms per step")


def _draw_folds(axes: Axes, folded: dict[str, Result]) -> None:
    """Draw the accuracy of each fold after the last epoch."""
    for place, found in enumerate(folded.values()):
        scores = [100 * each for each in _last(found)]
        count = len(scores)
        at = [place + 0.4 * (fold + 0.5) / count - 0.2 for fold in range(count)]
        colour, marker = COLOURS[place], MARKERS[place]
        axes.plot(at, scores, color=colour, marker=marker, linestyle="")
        mean = statistics.mean(scores)
        axes.hlines(mean, place - 0.3, place + 0.3, color=colour)
    found = next(iter(folded.values()))
    axes.axhline(100 / found["classes"], color="grey", linewidth=0.8, label="chance")
    ticks = [net.replace(", ", "\n") for net in folded]
    axes.set_xticks(range(len(folded)), ticks, fontsize="small")
    axes.set(xlim=(-0.6, len(folded) - 0.4), ylim=(0, 102))
    title = f"{len(_last(found))} folds: {found['data']}"
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
        paired = any(each.endswith(LAST) for each in heights)
        colour = COLOURS[first + (order // 2 if paired else order)]
        hatch = "////" if last else None
        axes.bar(
            at, values, width, color=colour, hatch=hatch, edgecolor="white", label=label
        )
    axes.set_xticks(range(len(ticks)), ticks, fontsize="x-small")


def minutes(found: Result, precision: str, variant: str) -> float:
    """Return how long an epoch takes."""
    return _seconds(found, precision, variant) * EPOCH / found["batch"] / 60


def _seconds(found: Result, precision: str, variant: str | int) -> float:
    key = precision, variant
    rows = found["rows"]
    return next(r["seconds"] for r in rows if (r["precision"], r["variant"]) == key)


def _odd(found: Result, precision: str) -> float:
    """Return the time of a sample in the odd batch over that in the full one."""
    odd, full = (_seconds(found, precision, each) for each in (ODD, PLAIN))
    return odd / (found["batch"] - 1) / (full / found["batch"])


def _losses(found: Result) -> dict[tuple[str, str], float]:
    return {(row["precision"], row["variant"]): row["loss"] for row in found["rows"]}


def _gap(found: Result) -> float:
    """Return the largest distance of a loss from float32's."""
    gaps, losses = [], _losses(found)
    for (_, variant), loss in losses.items():
        expected = losses[FLOAT32, ODD if variant == ODD else PLAIN]
        gaps.append(abs(loss - expected) / expected)
    return max(gaps)


def _tick(net: str, found: Result) -> str:
    name = net.replace("-B", "\nB").replace(", ", "\n").replace(" V", "\nV")
    return f"{name}\n{found['side']} px"


def _precisions(timed: dict[str, Result]) -> list[str]:
    first = next(iter(timed.values()))
    return list(dict.fromkeys(row["precision"] for row in first["rows"]))


def _missing(names: list[str]) -> list[str]:
    """Say what was not timed."""
    missing = ", ".join(each for each in CLOSE if each not in names)
    reason = "this device has no instructions for it, or no kernels that use them"
    return [f"Not timed: {missing} ({reason})"] if missing else []


def _timed(results: Results) -> dict[str, Result]:
    return {e["net"]: e for e in results.values() if "rows" in e and "net" in e}


def _folded(results: Results) -> dict[str, Result]:
    return {each["net"]: each for each in results.values() if "scores" in each}


def _last(found: Result) -> list[float]:
    """Return the accuracy of each fold after the last epoch."""
    return [scores[-1] for scores in found["scores"]]
