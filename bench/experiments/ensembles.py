"""Ensembles: a loop over modules, `vmap` and vgrad against the number of members.

Forward pass and training step (gradients, SGD with momentum) of MLPs and CNNs, as in
the article on functorch: with one batch for all members, and with one for each.
"""

from functools import partial

from matplotlib.figure import Figure

from bench.experiments import drawing
from bench.experiments.measuring import side_by_side
from bench.experiments.study import Piece, Place, Result, Results, Show, Study
from bench.models import SETTINGS as MODELS
from bench.test_ensemble import SMALL, checked, prepared

EXACT = 1e-8
EQUAL = "equality"
NETS = {SMALL[1]: "MLP", MODELS["simple-cnn"].title: "CNN"}
"""Settings of the bench, and short names."""

KINDS = ("forward", "training step")
BATCHES = {False: "one batch for all", True: "one batch each"}
NAMES = ("loop", "vmap", "vgrad")
CASES = [(net, kind, apart) for net in NETS for kind in KINDS for apart in BATCHES]


def title(net: str, kind: str, apart: bool) -> str:
    return f"{NETS[net]}, {kind}, {BATCHES[apart]}"


def pieces(place: Place) -> list[Piece]:
    """See that all are equal, then one piece for each net and number of members."""
    sizes = {
        SMALL[1]: place.pick(
            tiny=[1, 2], small=[1, 2, 4, 8, 16, 32, 64, 128], full=[1, 4, 16, 64, 128]
        ),
        MODELS["simple-cnn"].title: place.pick(
            tiny=[1], small=[1, 2, 4], full=[1, 4, 16, 64, 128]
        ),
    }
    rounds = place.pick(tiny=1, small=5, full=15)
    timed = [
        Piece(f"{NETS[net]}, E = {count}", partial(_timed, place, net, count, rounds))
        for net, counts in sizes.items()
        for count in counts
    ]
    return [Piece(EQUAL, partial(_errors, place)), *timed]


def _errors(place: Place, show: Show) -> Result:
    """Compare with the loop, in float64."""
    errors: Result = {}
    for done, case in enumerate(CASES, start=1):
        net, kind, apart = case
        errors[title(*case)] = {
            name: checked(kind, name, net, place.device, per_member=apart)
            for name in NAMES
            if name != "loop"
        }
        show(done / len(CASES))
    return errors


def _timed(place: Place, net: str, members: int, rounds: int, show: Show) -> Result:
    result: Result = {"net": net, "members": members, "seconds": {}}
    cases = [case for case in CASES if case[0] == net]
    for done, (_, kind, apart) in enumerate(cases, start=1):
        runs = {
            name: prepared(kind, name, net, members, place.device, per_member=apart)
            for name in NAMES
        }
        times = side_by_side(runs, place.device, rounds=rounds)
        result["seconds"][title(net, kind, apart)] = {
            name: spent["seconds"] for name, spent in times.items()
        }
        show(done / len(cases))
    return result


def check(results: Results) -> list[str]:
    """Compare outputs, and parameters after three steps, with the loop's."""
    worst = 0.0
    for case, errors in results[EQUAL].items():
        for name, error in errors.items():
            assert error < EXACT, f"{name}, {case}: relative error {error:.2g}"
            worst = max(worst, error)
    return [
        f"outputs, and parameters after three steps, equal the loop's to {worst:.1g}"
    ]


def table(results: Results) -> str:
    """How many times as fast as the loop."""
    rows = [
        [case, result["members"], f"{1e3 * seconds['loop']:.3g}", *_gains(seconds)]
        for result in _sizes(results)
        for case, seconds in result["seconds"].items()
    ]
    others = [f"{name}, times as fast" for name in NAMES[1:]]
    return drawing.markdown(["", "members", "loop, ms", *others], rows)


def _gains(seconds: dict[str, float]) -> list[str]:
    return [f"{seconds['loop'] / seconds[name]:.2f}" for name in NAMES[1:]]


def _sizes(results: Results) -> list[Result]:
    return [result for name, result in results.items() if name != EQUAL]


def draw(results: Results, figure: Figure) -> None:
    """Draw the speed-up over the loop against the number of members."""
    panels = figure.subplots(len(NETS), len(KINDS), sharey="row")
    for net, row in zip(NETS, panels, strict=True):
        sizes = [result for result in _sizes(results) if result["net"] == net]
        members = [result["members"] for result in sizes]
        for kind, axes in zip(KINDS, row, strict=True):
            for apart, dashes in zip(BATCHES, ("-", "--"), strict=True):
                seconds = [
                    result["seconds"][title(net, kind, apart)] for result in sizes
                ]
                for number, name in enumerate(NAMES[1:]):
                    gains = [spent["loop"] / spent[name] for spent in seconds]
                    label = f"{name}, {BATCHES[apart]}"
                    drawing.line(axes, members, gains, label, number, linestyle=dashes)
            axes.axhline(1, color="black", linewidth=0.8)
            drawing.by_powers(axes, members)
            first = (net, kind) == CASES[0][:2]
            y = "times as fast as the loop"
            drawing.finish(axes, f"{net}, {kind}", "members", y, legend=first)

        row[0].set_ylim(bottom=0)  # which ends the scaling of both


STUDY = Study(
    "Ensembles on random data against a loop over modules",
    pieces,
    check,
    table,
    draw,
    figsize=(11, 8),
)
