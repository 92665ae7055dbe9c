"""Plain text, with code in backticks, as reStructuredText has it."""

import re

MARKUP = re.compile(
    r"(``.*?``|`[^`]*`|^ *>>>.*?(?:\n *\n|\Z))|[*|](?=\S)", flags=re.M | re.S
)
"""Code and examples, or else what starts emphasis or a substitution."""


def underlined(title: str, mark: str) -> str:
    """Return a title as reStructuredText has it."""
    return f"{title}\n{mark * len(title)}\n"


def plain(text: str) -> str:
    """Escape what is markup to Sphinx, outside of code and of examples.

    Docstrings are plain text with code in backticks.
    """
    return MARKUP.sub(lambda found: found[1] or f"\\{found[0]}", text)
