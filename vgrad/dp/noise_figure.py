"""The picture of the error that schemes of noise leave at a budget."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vgrad import checks
from vgrad.dp.noising import Noising, band_inv_mf, band_mf, blt, independent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vgrad.dp.plan import Plan


def plot_noise(
    plan: "Plan", schemes: Sequence[Noising] | None, epsilons: Sequence[float]
) -> "Figure":
    """Draw the root losses of schemes for the numbers of a plan."""
    figures = checks.package("matplotlib.figure", "demo")
    ticker = checks.package("matplotlib.ticker", "demo")
    run: dict[str, Any] = {"dataset_size": plan.dataset_size, "delta": plan.delta}
    run |= {"steps": plan.steps - plan.earlier_steps, "max_norm": 1.0}
    run |= {"sampling_rate": plan.sampling_rate}
    if schemes is None:
        schemes = _usual(plan)
    figure = figures.Figure(figsize=(9.5, 4.6), layout="constrained")
    figure.suptitle(
        f"Noise in sums of gradients: {plan.dataset_size:,} samples, "
        f"{run['steps']:,} steps of {plan.expected_batch_size:g}, delta {plan.delta:g}"
    )
    left, right = figure.subplots(1, 2)
    first: list[float] = []
    for scheme in schemes:
        plans = [type(plan).for_epsilon(e, noise=scheme, **run) for e in epsilons]
        label = f"{described(scheme)}: {plans[0].sampling}, {plans[0].neighbours}"
        line = "o-" if plans[0].neighbours == "add_or_remove_one" else "s--"
        losses = [*map(root_loss, plans)]
        first = first or losses
        left.plot(epsilons, losses, line, label=label)
        ratios = [loss / other for loss, other in zip(losses, first, strict=True)]
        right.plot(epsilons, ratios, line)
    left.set(yscale="log", ylabel="root loss, in max_norm / expected_batch_size")
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    right.set(ylabel=f"root loss over the one of {described(schemes[0])}")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="epsilon, of the relation named")
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def described(scheme: Noising) -> str:
    """Return the call that makes a scheme, without its coefficients."""
    size = "" if scheme.scheme == "independent" else scheme.size
    return f"{scheme.scheme}({size})"


def root_loss(plan: "Plan") -> float:
    """Return the root mean squared noise of a prefix sum of the plan's own steps.

    It is in units of the clipped gradient of one sample in the mean of a batch.
    """
    fitted = plan.fitted
    # A plan accounts for independent noise step by step.
    joint = fitted.sensitivity() if plan.noise.correlated else 1.0
    errors = fitted.errors(fitted.steps)
    return plan.noise_multiplier * joint * math.sqrt(errors.mean())


def _usual(plan: "Plan") -> list[Noising]:
    """Return the schemes that the rate and the size of batches allow."""
    schemes = [independent()]
    schemes += [band_mf(b) for b in (2, 4, 8) if b * plan.sampling_rate <= 1]
    batch = plan.expected_batch_size
    if batch >= 1 and math.isclose(batch, round(batch), rel_tol=1e-9):
        schemes += [band_inv_mf(4), blt(2)]
    return schemes
