"""The picture of the error that schemes of noise leave at a budget."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vgrad import checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """The root losses of plans with one scheme, by epsilon."""

    scheme: str
    kind: str  # its sampling and its relation
    losses: list[float]
    line: str


def draw(title: str, epsilons: Sequence[float], curves: Sequence[Curve]) -> "Figure":
    """Draw root losses, and their ratios to the first curve."""
    figures = checks.package("matplotlib.figure", "demo")
    ticker = checks.package("matplotlib.ticker", "demo")
    figure = figures.Figure(figsize=(9.5, 4.6), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    first = curves[0]
    for curve in curves:
        label = f"{curve.scheme}: {curve.kind}"
        left.plot(epsilons, curve.losses, curve.line, label=label)
        pairs = zip(curve.losses, first.losses, strict=True)
        right.plot(epsilons, [loss / other for loss, other in pairs], curve.line)
    left.set(yscale="log", ylabel="root loss, in max_norm / expected_batch_size")
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    right.set(ylabel=f"root loss over the one of {first.scheme}")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="epsilon, of the relation named")
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure
