"""What the experiment on privacy found: asserted, as a table and as a figure."""

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments.drawing import COLOURS, MEBIBYTE, by_powers, finish
from bench.experiments.study import Result, Results

TORCH = "torch's backward and SGD"
EXACT = 1e-9
"""Float64 leaves about 1e-14; ReLUs and nets of 50 layers make more of it."""


def check(results: Results) -> list[str]:
    """Assert that privacy is granted, and costs accuracy: the more of it, the more."""
    seen = []
    for net, runs in _by_net(results, "accuracies").items():
        private = sorted(
            (run for run in runs if run["epsilon"]), key=lambda run: run["epsilon"]
        )
        for run in private:
            spent, limit = run["spent"], run["epsilon"]
            assert 0 < spent <= limit, f"{net}: epsilon {spent}, at most {limit} asked"
        plain = _plain(runs)
        free, upper, lower = map(_mean, (plain, private[-1], private[0]))
        chance = 1 / plain["classes"]
        assert free > 3 * chance, f"{net}: accuracy {free:.3f} where chance is {chance}"
        assert upper > lower, (
            f"{net}: accuracy {lower:.3f} with the smallest epsilon, {upper:.3f} with "
            f"the largest"
        )
        for run in private:
            noise = 2 * (_spread(plain) + _spread(run)) + 0.02
            assert _mean(run) <= free + noise, (
                f"{net}: accuracy {_mean(run):.3f} with epsilon {run['epsilon']:g}, "
                f"{free:.3f} without privacy"
            )
        seen.append(
            f"{net}: accuracy {free:.1%} without privacy, {upper:.1%} with epsilon "
            f"{private[-1]['epsilon']:g}, {lower:.1%} with epsilon "
            f"{private[0]['epsilon']:g} (means over seeds); no plan spends more than "
            f"its epsilon."
        )
    for net, (result,) in _by_net(results, "times").items():
        error = result["error"]
        assert error < EXACT, f"{net}: clipped sum has a relative error of {error:.2g}"
        seen.append(
            f"{net}: the clipped sum is that of the float64 loop (error {error:.1g})."
        )
    return seen


def table(results: Results) -> str:
    """Return accuracies, then times and memory."""
    lines = ["| net, data | epsilon | spent | noise | accuracy (mean, sd over seeds) |"]
    lines += ["|---|---|---|---|---|"]
    for net, runs in _by_net(results, "accuracies").items():
        for run in sorted(runs, key=lambda run: -(run["epsilon"] or 1e9)):
            private = run["epsilon"] is not None
            epsilon = f"{run['epsilon']:g}" if private else "no privacy"
            spent = f"{run['spent']:.3f}" if private else ""
            noise = f"{run['noise_multiplier']:.2f}" if private else ""
            name = f"{net}{', batch norm' if run['batch_norm'] else ''}, {run['data']}"
            accuracy = f"{_mean(run):.1%}, {_spread(run):.1%}"
            lines.append(f"| {name} | {epsilon} | {spent} | {noise} | {accuracy} |")
        run = runs[0]
        lines[-1] += "\n"
        lines += [
            f"{net}: {run['steps']} steps of {run['expected_batch']:.0f} expected "
            f"samples from {run['train']}, {run['held_out']} held out, delta "
            f"{run['delta']:g}, {len(run['accuracies'])} seeds.",
            "",
        ]
    lines += ["| net, batch | step | ms | times torch's | MiB | times torch's |"]
    lines += ["|---|---|---|---|---|---|"]
    for net, (result,) in _by_net(results, "times").items():
        memory = result["memory"]
        for name, ratio in _ratios(result).items():
            ms = result["times"][name]["seconds"] * 1e3
            line = f"| {net}, {result['batch']} | {name} | {ms:.1f} | {ratio:.2f} |"
            if name in memory:
                peak, plain = (memory[n]["peak_bytes"] for n in (name, TORCH))
                line += f" {peak / MEBIBYTE:.1f} | {peak / plain:.2f} |"
            else:
                line += " | |"
            lines.append(line)
    return "\n".join(lines)


def draw(results: Results, figure: Figure) -> None:
    """Draw accuracy against epsilon, and the cost of a step."""
    trained, timed = (_by_net(results, key) for key in ("accuracies", "times"))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    budgets: set[float] = set()
    for place, (net, runs) in enumerate(trained.items()):
        colour = COLOURS[place]
        private = sorted(
            (run for run in runs if run["epsilon"]), key=lambda run: run["epsilon"]
        )
        budgets |= {run["epsilon"] for run in private}
        left.errorbar(
            [run["epsilon"] for run in private],
            [100 * _mean(run) for run in private],
            [100 * _spread(run) for run in private],
            color=colour,
            marker="o",
            capsize=3,
            label=f"{net}, private",
        )
        unchanged = [run for run in runs if run["batch_norm"]]
        for run, style in ((_plain(runs), "--"), *((run, ":") for run in unchanged)):
            mean, spread = 100 * _mean(run), 100 * _spread(run)
            norm = "batch norm" if run["batch_norm"] else "group norm"
            label = f"{net}, no privacy, {norm}"
            left.axhline(mean, color=colour, linestyle=style, label=label)
            left.axhspan(mean - spread, mean + spread, color=colour, alpha=0.1)
    chance = 100 / next(iter(trained.values()))[0]["classes"]
    left.axhline(chance, color="grey", linewidth=0.8, label="chance")
    by_powers(left, sorted(budgets))
    left.set_xticks(sorted(budgets), [f"{budget:g}" for budget in sorted(budgets)])
    left.set_ylim(0, 102)
    delta = next(iter(trained.values()))[0]["delta"]
    finish(
        left,
        "Accuracy on held-out images",
        f"epsilon (delta {delta:g}); more is less private",
        "accuracy (%), mean and sd over seeds",
        legend=False,
    )
    left.legend(fontsize="x-small", loc="lower right", framealpha=0.8)
    _bars(middle, timed, {net: _ratios(steps[0]) for net, steps in timed.items()})
    finish(middle, "Time of a step", "", "seconds, times torch's backward and SGD")
    memory = {}
    for net, (result,) in timed.items():
        base = result["memory"][TORCH]["peak_bytes"]
        memory[net] = {
            n: need["peak_bytes"] / base for n, need in result["memory"].items()
        }
    _bars(right, timed, memory)
    finish(right, "Memory of a step", "", "peak bytes, times torch's backward and SGD")
    sets = dict.fromkeys(runs[0]["data"] for runs in trained.values())
    figure.suptitle(", ".join(sets))


def _bars(axes: Axes, timed: dict, ratios: dict[str, dict[str, float]]) -> None:
    """Draw a group of bars for each net."""
    names = list(dict.fromkeys(n for row in ratios.values() for n in row))
    names.remove(TORCH)
    width = 0.8 / len(names)
    for order, name in enumerate(names):
        there = [at for at, row in enumerate(ratios.values()) if name in row]
        at = [place + (order + 0.5) * width - 0.4 for place in there]
        heights = [row[name] for row in ratios.values() if name in row]
        colour = COLOURS[order + 1]
        drawn = axes.bar(at, heights, 0.92 * width, color=colour, label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize="x-small", padding=1)
    ticks = [f"{net}\nbatch {timed[net][0]['batch']}" for net in ratios]
    axes.set_xticks(range(len(ratios)), ticks, fontsize="small")
    axes.axhline(1, color="grey", linewidth=0.8)
    highest = max(max(row.values()) for row in ratios.values())
    axes.set_ylim(0, 1.35 * highest)


def _by_net(results: Results, key: str) -> dict[str, list[Result]]:
    """Group the results that have a key."""
    groups: dict[str, list[Result]] = {}
    for result in results.values():
        if key in result:
            groups.setdefault(result["net"], []).append(result)
    return groups


def _plain(runs: list[Result]) -> Result:
    return next(r for r in runs if r["epsilon"] is None and not r["batch_norm"])


def _mean(run: Result) -> float:
    return statistics.mean(run["accuracies"])


def _spread(run: Result) -> float:
    return statistics.stdev(run["accuracies"])


def _ratios(result: Result) -> dict[str, float]:
    """Return seconds over the seconds of torch's step."""
    times = result["times"]
    base = times[TORCH]["seconds"]
    return {name: spent["seconds"] / base for name, spent in times.items()}
