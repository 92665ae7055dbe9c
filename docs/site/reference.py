"""The reference: a page for each public package, with each public name once.

A name that several packages have is described where it belongs and listed where else it
is found, under both names in the index.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, get_origin

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from prose import plain, underlined

PACKAGES = (
    "vgrad",
    "vgrad.training",
    "vgrad.attribution",
    "vgrad.curvature",
    "vgrad.dp",
    "vgrad.dp.audit",
    "vgrad.dp.noising",
    "vgrad.ensemble",
    "vgrad.optim",
    "vgrad.optim.schedules",
    "vgrad.precision",
    "vgrad.compiled",
    "vgrad.distributed",
    "vgrad.ops",
    "vgrad.testing",
    "vgrad.typing",
)

INDEX = """
The docstrings, package by package.

.. toctree::
   :maxdepth: 2

"""
MODULE = ".. automodule:: {}\n   :no-members:\n\n"
ALIAS = """
   * - .. py:function:: {}
          :no-typesetting:

       ``{}``
     - {}
"""

ALIASES: dict[str, str] = {}
"""Where the names are described that are listed on other pages, too."""


def public(package: str) -> list[str]:
    """Return the public names of a package that are no modules."""
    module = importlib.import_module(package)
    return [name for name in module.__all__ if not inspect.ismodule(vars(module)[name])]


def homes() -> dict[tuple[str, int], str]:
    """Return where each public name belongs: to the innermost package that has it."""
    found: dict[tuple[str, int], str] = {}
    for package in sorted(PACKAGES, key=lambda name: -name.count(".")):
        for name in public(package):
            value = getattr(importlib.import_module(package), name)
            found.setdefault((name, id(value)), f"{package}.{name}")
    return found


def write(folder: Path) -> None:
    """Write the pages; one that has not changed is kept."""
    found = homes()
    texts = {f"{package}.rst": page(package, found) for package in PACKAGES}
    names = "\n".join(f"   {name}" for name in PACKAGES)
    texts["index.rst"] = f"{underlined('Reference', '=')}{INDEX}{names}\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def page(package: str, found: dict[tuple[str, int], str]) -> str:
    """Return the page of a package: its docstring, then each name in full.

    Names that are described on another page, or by torch, are listed at the end.
    """
    module = importlib.import_module(package)
    own, listed, borrowed = [], "", ""
    for name in public(package):
        value = getattr(module, name)
        home = found[name, id(value)]
        if getattr(value, "__module__", "").startswith("torch"):
            borrowed += ALIAS.format(name, name, f"``torch.func.{name}``")
        elif home == f"{package}.{name}":
            own.append(name)
        else:
            ALIASES[f"{package}.{name}"] = home
            listed += ALIAS.format(name, name, f":py:obj:`{home}`")
    text = f"{underlined(package, '=')}\n{MODULE.format(package)}"
    text += f".. currentmodule:: {package}\n"
    text += "".join(described(module, name) for name in own)
    if package == "vgrad":
        text += f"\n{underlined('Transforms of samples', '-')}\n"
        text += MODULE.format("vgrad.persample") + f".. currentmodule:: {package}\n"
    if listed or borrowed:
        text += f"\n{underlined('Described elsewhere', '-')}\n"
        text += f".. list-table::\n   :class: names\n{listed}{borrowed}"
    return text


def described(module: ModuleType, name: str) -> str:
    """Return what makes autodoc describe a name."""
    value = getattr(module, name)
    if inspect.isclass(value):
        return f"\n.. autoclass:: {name}\n   :members:\n   :special-members: __call__\n"
    if inspect.isroutine(value):
        return f"\n.. autofunction:: {name}\n"
    text = "\n".join(f"   {line}" for line in comment(module, name))
    shown = re.sub(r"\b(\w+\.)+", "", repr(value)) if get_origin(value) else ""
    return f"\n.. py:data:: {name}\n   :value: {shown}\n\n{text}\n"


def comment(module: ModuleType, name: str) -> list[str]:
    """Return the string below a value, in the file that defines it."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if name in {each.name for each in node.names}:
                return comment(importlib.import_module(node.module), name)
    found = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
    return found.get(("", name), [])


def skipped(app: Sphinx, kind: str, name: str, value: Any, skip: bool, options: Any):
    """Leave out the fields of named tuples, which the docstring of the class has."""
    return True if type(value).__name__ == "_tuplegetter" else None


def unsigned(app: Sphinx, kind: str, name: str, value: Any, *_: Any):
    """Leave out how to make a protocol, of which none is made."""
    return ("", None) if kind == "class" and Protocol in value.__bases__ else None


def escaped(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list):
    """Escape a docstring before napoleon reads it."""
    lines[:] = plain("\n".join(lines)).split("\n")


def followed(app: Sphinx, module: str, name: str) -> str | None:
    """Return where the source of a value is that does not know it itself."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    home = getattr(value, "__module__", None) or ""
    return None if home.startswith("vgrad") else module


def setup(app: Sphinx) -> None:
    """Tell autodoc what to leave out and what is text."""
    app.connect("autodoc-skip-member", skipped)
    app.connect("viewcode-follow-imported", followed)
    app.connect("autodoc-process-signature", unsigned)
    app.connect("autodoc-process-docstring", escaped, priority=100)
