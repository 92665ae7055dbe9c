"""What Sphinx reads: pages, tutorials and results, laid out in one folder."""

import re
import shutil
from pathlib import Path

import gallery
import results
from prose import underlined

AROUND = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages that stand beside `docs/` and end the list."""


DOCUMENTATION = "\n## Documentation\n"
"""The heading of the README above its list of pages."""


def lay_out(root: Path, folder: Path) -> None:
    """Write the sources of the site below a folder; what has not changed is kept."""
    source = folder / "source"
    pages = {path.name: path.read_text() for path in (root / "docs").glob("*.md")}
    pages |= {name: (root / path).read_text() for path, name in AROUND.items()}
    pages["index.md"] = front((root / "README.md").read_text(), pages["index.md"])
    texts = {source / name: linked(text) for name, text in pages.items()}
    texts[source / "index.md"] += toctrees(texts[source / "index.md"])
    for path in (root / "tutorials").glob("*.py"):
        texts[folder / "tutorials" / path.name] = gallery.translated(path.read_text())
    texts[folder / "tutorials" / "GALLERY_HEADER.rst"] = (
        underlined("Tutorials", "=")
        + "\nEach is a script of ``tutorials/`` that runs by itself, in seconds.\n"
    )
    for path, text in results.pages(root).items():
        texts[source / "benchmarks" / path] = text
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    kept = {path.resolve() for path in texts}
    made = [*source.glob("*.md"), *(source / "benchmarks").rglob("*.md")]
    for path in [*made, *(folder / "tutorials").iterdir()]:
        if path.resolve() not in kept:
            path.unlink()
    pictures = {"bench/results": "benchmarks", "docs/images": "images"}
    for there, here in pictures.items():
        for path in [*(root / there).rglob("*.png"), *(root / there).rglob("*.svg")]:
            copy = source / here / path.relative_to(root / there)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def front(readme: str, index: str) -> str:
    """Return the front page: the README, whose list of pages gives way to the index."""
    above, _ = readme.split(DOCUMENTATION)
    _, lists = index.split("\nTo begin with:\n")
    return f"{above}{DOCUMENTATION}\nTo begin with:\n{lists}"


def linked(text: str) -> str:
    """Point links to files of the repository at the pages made of them."""
    text = text.replace("](../bench/results/", "](benchmarks/")
    text = text.replace("](bench/results/", "](benchmarks/")
    text = text.replace("](../bench/README.md", "](benchmarks/index.md")
    text = re.sub(r"\]\((?:\.\./)?tutorials\)", "](tutorials/index.rst)", text)
    text = text.replace("](../vgrad)", "](reference/index.rst)")
    text = re.sub(r"\]\((?:\.\./)?tutorials/(\w+)\.py\)", r"](tutorials/\1.rst)", text)
    for path, name in AROUND.items():
        text = text.replace(f"](../{path}", f"]({name}")
    return text.replace("](docs/", "](")


LISTED = re.compile(r"^(.+):\n\n((?:\* .*\n(?:  .*\n)*)+)", flags=re.M)
"""The line above a list of pages, and the list."""


def toctrees(front: str) -> str:
    """Return the trees of pages behind the lists of the front page.

    The line above a list is its caption.
    """
    _, lists = front.split(DOCUMENTATION)
    blocks = [
        results.tree(re.findall(r"^\* \[.*?\]\(([\w/]+)\.", pages, flags=re.M), caption)
        for caption, pages in LISTED.findall(lists)
    ]
    last = [name.removesuffix(".md") for name in AROUND.values()]
    return "\n" + "\n".join([*blocks, results.tree(last, "The project")])
