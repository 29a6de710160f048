"""Tables of Markdown pages: one is made of rows, or written again between two marks when the results change.

The marks are the lines ``<!-- table: NAME -->`` and ``<!-- end of the table -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_END: Final = "<!-- end of the table -->"
_START: Final = "<!-- table: {} -->"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; whatever the cells contain, it has these rows and columns."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_escaped, row))} |" for row in rows)]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def with_tables(page: str, made: Mapping[str, str]) -> str:
    """Return a page whose marked tables are replaced; a mark without a table of this name is left as it is."""
    for name, table in made.items():
        marked = re.compile(rf"({re.escape(_START.format(name))}\n).*?({re.escape(_END)})", re.DOTALL)
        page = marked.sub(lambda match, table=table: f"{match[1]}\n{table}\n{match[2]}", page)  # type: ignore[misc]
    return page


def marked_names(page: str) -> list[str]:
    """Return the names of the marked tables of a page, in their order."""
    return re.findall(rf"{_START.format('(.+?)')}\n.*?{re.escape(_END)}", page, re.DOTALL)
