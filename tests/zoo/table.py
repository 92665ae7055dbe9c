"""Writes `docs/models.md` from the entries: `python -m tests.zoo.table`."""

from collections import Counter
from pathlib import Path

from tests.zoo import (
    by_hand,
    of_diffusers,
    of_e3nn,
    of_geometric,
    of_peft,
    of_timm,
    of_transformers,
)
from tests.zoo.entries import Entry, Exact, Impossible, Refused

SECTIONS: dict[str, tuple[str, list[Entry]]] = {
    "Architectures by hand": ("", by_hand.HANDMADE),
    "Modules": ("", by_hand.MODULES),
    "Python that looks at values": ("", by_hand.BRANCHING),
    "Features of torch": ("", by_hand.FEATURES),
    "transformers": (of_transformers.LIBRARY, of_transformers.ENTRIES),
    "peft": (of_peft.LIBRARY, of_peft.ENTRIES),
    "diffusers": (of_diffusers.LIBRARY, of_diffusers.ENTRIES),
    "timm": (of_timm.LIBRARY, of_timm.ENTRIES),
    "e3nn": (of_e3nn.LIBRARY, of_e3nn.ENTRIES),
    "PyTorch Geometric": (of_geometric.LIBRARY, of_geometric.ENTRIES),
}
"""Titles, the library that each needs, and its entries."""

KINDS = ["recorded", "recorded in parts", "vmap", "loop"]
KINDS += ["refused", "not by autograd either"]
"""The columns; the first four are exact."""

HEAD = """\
# Models that run

Each row is a model in use, tiny and with random weights, and is a test: gradients,
norms and clipped sums of `strategy="auto"` against plain autograd on the unmodified
module, sample by sample in float64, to 1e-9 of the largest entry where no other
tolerance is given. The route is the strategy that `explain` shows, *recorded*, *vmap*
or *loop*, with the reason where it is not the first. Samples are recorded *in parts*
where they take different branches. A *refused* model raises an error that says why;
each strategy that it advises is exact. `make zoo` runs these tests in an environment
of its own; `python -m tests.zoo.table` writes this page.
"""


def told(entry: Entry) -> tuple[str, str, str]:
    """Return the column in which an entry counts, what comes of it, and the route."""
    match entry.today:
        case Exact(strategy, why, op, loops, splits):
            kind = strategy + " in parts" * splits
            route = kind + ": " * bool(why) + f"`{op}` " * bool(op) + why
            if loops:
                route += f"; sample by sample in {', '.join(f'`{op}`' for op in loops)}"
            near = f", to {entry.tolerance:.0e}" * (entry.tolerance > 1e-9)
            return kind, f"exact{near}", route
        case Refused(why):
            return "refused", f"refused: {why}", ""
        case Impossible(why):
            return "not by autograd either", f"not by plain autograd either: {why}", ""


def page() -> str:
    counts = {
        title: Counter(told(entry)[0] for entry in entries)
        for title, (_, entries) in SECTIONS.items()
    }
    every = sum(counts.values(), Counter())
    exact = sum(every[each] for each in KINDS[:4])
    able = every.total() - every[KINDS[-1]]
    lines = [
        HEAD,
        f"Exact under `auto` are {exact} of {every.total()}, or "
        f"{exact / every.total():.1%}; {exact / able:.1%} of what plain autograd runs.",
        "",
        f"| | {' | '.join(KINDS)} |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    for title, found in {**counts, "all": every}.items():
        cells = " | ".join(str(found[each] or "") for each in KINDS)
        lines.append(f"| {title} | {cells} |")
    for title, (_, entries) in SECTIONS.items():
        lines += ["", f"## {title}", "", "| model | today | route |", "|---|---|---|"]
        for entry in entries:
            _, today, route = told(entry)
            lines.append(f"| {entry.name} | {today} | {route} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).parents[2].joinpath("docs", "models.md").write_text(page())
