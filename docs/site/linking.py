"""Links from code in prose to the reference: `vgrad.clipped_grad`, `dp.Plan`."""

import re
from collections import defaultdict

from docutils import nodes
from sphinx.application import Sphinx

from reference import ALIASES

NAME = re.compile(r"(\w+(?:\.\w+)*)(?:\(\))?")
TELLING = re.compile(r".*[a-z][._]\w|[A-Z][a-z]+[A-Z].*")
"""A word alone is often a parameter's: `step`, `scale`, `loss`."""


def link(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Make a link of each literal that is the name of one thing described."""
    described = app.env.domains.python_domain.objects
    ends = defaultdict(list)
    for name in described.keys() - ALIASES.keys():
        if described[name].objtype == "module":
            ends[name].append(name)
        elif not described[name].aliased:
            parts = name.split(".")
            for start in range(len(parts)):
                ends[".".join(parts[start:])].append(name)
    for literal in list(tree.findall(nodes.literal)):
        named = NAME.fullmatch(literal.astext())
        if not named or inside_of_a_link(literal):
            continue
        name, here = named[1], f"{page.removeprefix('reference/')}.{named[1]}"
        if isinstance(literal.parent.parent, nodes.list_item) and here in described:
            name = here  # the docstring of a package lists what is in it
        elif not TELLING.match(name):
            continue
        found = ends[ALIASES.get(name, name)]
        if len(found) == 1:
            entry = described[found[0]]
            page_of = app.builder.get_relative_uri(page, entry.docname)
            to = nodes.reference(internal=True, refuri=f"{page_of}#{entry.node_id}")
            literal.replace_self(to)
            to += literal


def inside_of_a_link(node: nodes.Node) -> bool:
    """Return whether a node is part of a link, or of a heading."""
    while node := node.parent:
        if isinstance(node, nodes.reference | nodes.title):
            return True
    return False


def setup(app: Sphinx) -> None:
    """Link once all pages are read."""
    app.connect("doctree-resolved", link)
