"""Writes `docs/models.md` from the entries: `python -m tests.zoo.table`."""

from collections import Counter
from pathlib import Path

from tests.zoo import (
    branching,
    features,
    handmade,
    modules,
    of_diffusers,
    of_geometric,
    of_peft,
    of_timm,
    of_transformers,
)
from tests.zoo.entries import Entry, Exact, Impossible, Refused, Unclear, Wrong

SECTIONS: dict[str, tuple[str, list[Entry]]] = {
    "Architectures by hand": ("", handmade.ENTRIES),
    "Modules": ("", modules.ENTRIES),
    "Python that looks at values": ("", branching.ENTRIES),
    "Features of torch": ("", features.ENTRIES),
    "transformers": (of_transformers.LIBRARY, of_transformers.ENTRIES),
    "peft": (of_peft.LIBRARY, of_peft.ENTRIES),
    "diffusers": (of_diffusers.LIBRARY, of_diffusers.ENTRIES),
    "timm": (of_timm.LIBRARY, of_timm.ENTRIES),
    "PyTorch Geometric": (of_geometric.LIBRARY, of_geometric.ENTRIES),
}
"""Titles, the library that each needs, and its entries."""

HEAD = """\
# Models that run

Each row is a model in use, tiny and with random weights, and is a test: gradients,
norms and clipped sums of `strategy="auto"` against plain autograd on the unmodified
module, sample by sample in float64, to 1e-9 of the largest entry where no other
tolerance is given. *Recorded* and *vmap* are the strategies that answer. What is
*refused* raises an error that says why, and each strategy that it advises is exact.
`make zoo` runs all of it in an environment of its own; `python -m tests.zoo.table`
writes this page.
"""


def told(entry: Entry) -> str:
    """Say in a cell what comes of an entry."""
    match entry.today:
        case Exact(strategy, why, loops):
            cell = f"exact, {strategy}" + (f": {why}" if why else "")
            if entry.tolerance > 1e-9:
                cell += f", to {entry.tolerance:.0e}"
            if loops:
                cell += f"; sample by sample in {', '.join(f'`{op}`' for op in loops)}"
            return cell
        case Refused(why, op):
            return f"refused: {f'`{op}` ' if op else ''}{why}"
        case Impossible(why):
            return f"not by plain autograd either: {why}"
        case Unclear(why, op, loop):
            cell = f"**fails**: {f'`{op}` ' if op else ''}{why}"
            return cell + (f'; the advised `strategy="loop"`: {loop}' if loop else "")
        case Wrong(why):
            return f"**wrong**: {why}"


def page() -> str:
    """Return the page."""
    every = [entry.today for _, entries in SECTIONS.values() for entry in entries]
    kinds = Counter(type(today).__name__ for today in every)
    counts = (
        f"{len(every)} models: {kinds['Exact']} exact, {kinds['Refused']} refused, "
        f"{kinds['Unclear']} fail with an error that does not help, "
        f"{kinds['Wrong']} are wrong; plain autograd cannot run "
        f"{kinds['Impossible']} either."
    )
    lines = [HEAD, counts]
    for title, (_, entries) in SECTIONS.items():
        lines += ["", f"## {title}", "", "| model | today |", "|---|---|"]
        lines += [f"| {entry.name} | {told(entry)} |" for entry in entries]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).parents[2].joinpath("docs", "models.md").write_text(page())
