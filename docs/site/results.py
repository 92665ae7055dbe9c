"""The benchmarks as pages: the tables of `bench/results`, as they are there."""

import ast
import json
import re
from pathlib import Path


def pages(root: Path) -> dict[Path, str]:
    """Return the text of each page, by its path below the one of all benchmarks."""
    folder = root / "bench" / "results"
    texts: dict[Path, str] = {}
    rows: list[str] = []
    listed: dict[Path, list[str]] = {}
    for path in sorted(folder.rglob("*.md")):
        name, text = path.relative_to(folder), path.read_text()
        if not text.startswith("# "):
            title = path.stem.replace("_", " ").capitalize()
            text = f"# {title}\n\n{about(root, path.stem)}\n\n{text}"
        title = text.split("\n", 1)[0].removeprefix("# ")
        if path.with_suffix(".png").exists():
            text += f"\n![{title}]({path.stem}.png)\n"
        # The name of a table is bold there; here it is a heading, for links to it.
        texts[name] = re.sub(r"^\*\*(.+)\*\*$", r"## \1", text, flags=re.M)
        facts = " | ".join(measured(path.with_suffix(".json")))
        rows.append(f"| [{title}]({name.as_posix()}) | {facts} |")
        listed.setdefault(name.parent, []).append(name.with_suffix("").as_posix())
    title, rest = (root / "bench" / "README.md").read_text().split("\n", 1)
    rest = rest.replace("](../docs/", "](../").replace("](results/", "](")
    head = ["| results | processor | threads | torch | date |", f"|{' --- |' * 5}"]
    table = "\n".join(["```{table}", ":class: measured", "", *head, *rows, "```"])
    trees = "\n".join(
        tree(names, folder.as_posix().replace("_", " ").replace("/", ", "))
        for folder, names in listed.items()
    )
    texts[Path("index.md")] = f"{title}\n\n{table}\n{rest}\n{trees}"
    return texts


def about(root: Path, suite: str) -> str:
    """Return the docstring of a suite; nothing for results of another kind."""
    path = root / "bench" / f"test_{suite}.py"
    text = path.read_text() if path.exists() else ""
    return ast.get_docstring(ast.parse(text)) or ""


def measured(path: Path) -> tuple[str, ...]:
    """Return processor, threads, torch and date, as far as results tell them."""
    found = json.loads(path.read_text()) if path.exists() else []
    if isinstance(found, dict):
        found = [found.get("settings") or found["about"]]
    found = [{"processor": each.get("device", ""), **each} for each in found]
    names = ("processor", "threads", "torch", "date")
    told = [sorted({str(each.get(name, "")) for each in found}) for name in names]
    return tuple(", ".join(each) for each in told)


def tree(names: list[str], caption: str = "") -> str:
    """Return a toctree that shows in the sidebar alone."""
    options = f":caption: {caption}\n" if caption else ""
    lines = "\n".join(names)
    return f"```{{toctree}}\n:hidden:\n{options}\n{lines}\n```\n"
