"""Tutorials as sphinx-gallery takes them: title, headings, and a run that is strict."""

import multiprocessing
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from prose import plain, underlined

CELL = re.compile(r"^# %% (.*)\n((?:#(?: .*)?\n)*)", flags=re.M)
SENTENCE = re.compile(r"(.+?[^.])\.(?: (.*))?")

MAIN = """\
# sphinx_gallery_start_ignore
__spec__, __file__ = None, __import__("sys").argv[0]
# sphinx_gallery_end_ignore
"""
"""What processes that a tutorial starts need to find its functions."""


def translated(script: str) -> str:
    """Return a tutorial whose title and cells are those of sphinx-gallery.

    The first line of the docstring becomes the title. Of a line `# %% Sentence. More`
    the sentence becomes a heading, if it ends there, and the rest goes with the
    comments below it.
    """
    _, docstring, code = script.split('"""', 2)
    title, text = docstring.split("\n", 1)
    title = underlined(title.removesuffix("."), "=")
    text = re.sub(r":\n\n    ", "::\n\n    ", plain(text))  # an indented block is code
    if not CELL.search(code):  # what a script of one cell prints would come before it
        code = f"# %% The script.\n{code.lstrip()}"
    first, _, code = CELL.sub(cell, code).lstrip().partition("\n\n")
    return f'r"""\n{title}{text}"""\n\n{first}\n\n{MAIN}\n{code}'


def cell(found: re.Match[str]) -> str:
    """Return the start of a cell, with its text in lines of their own."""
    line, comments = found.groups()
    text = "\n".join([line, *(each[2:] for each in comments.splitlines())])
    first, *lines = plain(text).split("\n")
    if sentence := SENTENCE.fullmatch(first):
        first = f"{underlined(sentence[1], '-')}\n{sentence[2] or ''}"
    text = "\n".join(["%%", first, *lines]).strip()
    return "\n".join(f"# {each}".rstrip() for each in text.split("\n")) + "\n\n"


def fresh(settings: dict[str, Any], script: str | Path) -> None:
    """Let each tutorial start as a script does, with warnings as errors."""
    # Processes start as those of a script; a worker of the gallery has its own way.
    multiprocessing.set_start_method("spawn", force=True)
    warnings.simplefilter("error")
    # A figure is shown by whoever runs the script with a window to show it in.
    warnings.filterwarnings("ignore", message=".*non-interactive")


def originals(app: Sphinx, exception: Exception | None) -> None:
    """Let readers download the tutorials themselves."""
    for path in Path(app.outdir, "_downloads").glob("*/*.py"):
        shutil.copy(Path(app.confdir).parent / "tutorials" / path.name, path)


def setup(app: Sphinx) -> None:
    """Put the tutorials in their places once all is written."""
    app.connect("build-finished", originals)
