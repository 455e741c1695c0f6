"""Tables of checks for the terminal."""

import math

from rich import box
from rich.table import Table
from rich.text import Text

from moeblaze_ref.verify.check import Row, passed
from moeblaze_ref.verify.coverage import Cell, Line

# Short headings: with the longest cells, all but the shape fit into 80 columns.
COLUMNS = ("stage", "way", "backend, version", "dtype", "n", "error", "bound", "result")
NUMBERS = ("n", "error", "bound")


def check_table(rows: list[Row], every_shape: bool = False) -> Table:
    """The cross-check: a line for the worst of the n shapes of each kind of row, or for every shape."""
    groups = [[row] for row in rows] if every_shape else _by_kind(rows)
    lines = [_cells(max(group, key=_badness), len(group)) for group in groups]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, name in enumerate(COLUMNS):
        width = max([len(name), *(len(line[column]) for line in lines)])
        table.add_column(name, justify="right" if name in NUMBERS else "left", min_width=width, no_wrap=True)
    table.add_column(_cut("shape" if every_shape else "worst shape"))  # Rich narrows this one: no other may wrap
    for *others, shape in lines:
        table.add_row(*others, _cut(str(shape)))
    return table


def _cut(text: str) -> Text:
    """A text on one line, cut where its column ends."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def coverage_table(lines: list[Line]) -> Table:
    """Table of checks per kernel file, option value and backend, or the reason for none; 0 is a gap."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("stage", "option", "value"):
        table.add_column(name, no_wrap=True)
    for name in lines[0].cells:
        table.add_column(name)
    for line in lines:
        table.add_row(line.stage, line.option, line.value, *map(_of_kernels, line.cells.values()))
    return table


def _of_kernels(cell: Cell) -> Text:
    """The least and the largest number of the kernel files that have one, then the reasons of the others."""
    numbers = sorted({number for number in cell.values() if not isinstance(number, str)})
    reasons = sorted({reason for reason in cell.values() if isinstance(reason, str)})
    parts = ["-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))] if numbers else []
    return Text("; ".join(parts + reasons), style="bold red" if 0 in numbers else "")


def _cells(row: Row, shapes: int) -> list[str | Text]:
    where = f"{row.backend} {row.version}" if row.version else row.backend
    bound = "-" if row.bound is None else f"{row.bound:.2g}"
    numbers = str(shapes), _number(row.error), bound
    return [row.stage, row.direction, where, row.dtype, *numbers, _result(row), row.shape or "-"]


def _by_kind(rows: list[Row]) -> list[list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.stage, row.direction, row.backend, row.version, row.dtype), []).append(row)
    return list(groups.values())


def _badness(row: Row) -> tuple[bool, float]:
    """Failures above passes, larger errors above smaller ones; NaN is the largest."""
    error = 0.0 if row.error is None else row.error
    return not row.ok, math.inf if math.isnan(error) else error


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if value == round(value, 0) else f"{value:.1e}"


def _result(row: Row) -> Text:
    if not row.available:
        return Text("absent", style="yellow")
    return Text("pass", style="green") if row.ok else Text("FAIL", style="bold red")


def verdict(rows: list[Row]) -> Text:
    """One sentence: how many passed, failed, could not run."""
    checked = [row for row in rows if row.available]
    failed = sum(not row.ok for row in checked)
    missing = sorted({row.backend for row in rows if not row.available and row.version is None})
    left_out = sorted({f"{row.backend} {row.version}" for row in rows if not row.available and row.version})
    text = f"{len(checked) - failed} passed, {failed} failed"
    if missing:
        text += f"; unavailable here: {', '.join(missing)} (moeblaze doctor says why)"
    if left_out:
        text += f"; not for this GPU: {', '.join(left_out)}"
    return Text(text, style="bold green" if passed(rows) else "bold red")
