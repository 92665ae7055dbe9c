"""Tables as text: a line is a row, and ` | ` divides its cells."""

import re


def rows(text: str) -> list[list[str]]:
    r"""Read the cells of each line; a line that ends in `\` goes on in the next."""
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [line.strip().split(" | ") for line in lines if line.strip()]
