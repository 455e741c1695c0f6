"""Tables and lists in Markdown."""

import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Number
from typing import Any

from IPython.display import Markdown


def table(rows: Sequence[dict[str, Any]]) -> Markdown:
    """One line a row; the first row's keys are the columns, and its numbers decide which are flush right.

    Raises
    ------
    ValueError
        If there is no row.
    """
    if not rows:
        raise ValueError("rows is empty, but a table must hold at least one row")
    first = rows[0]
    rules = ["---:" if _is_number(cell) else "---" for cell in first.values()]
    lines = [list(first), rules, *([cell_text(row[name]) for name in first] for row in rows)]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def _is_number(cell):
    return isinstance(cell, Number) and not isinstance(cell, bool)


def cell_text(cell: Any) -> str:
    """A cell of a table: whole numbers with commas, others to four digits."""
    if not _is_number(cell):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, Integral) else f"{float(cell):,.4g}"


def bullets(lines: Iterable[str]) -> Markdown:
    """A list of plain sentences, in which ``*`` and ``_`` are themselves."""
    return Markdown("\n".join("- " + re.sub(r"([*_])", r"\\\1", line) for line in lines))
