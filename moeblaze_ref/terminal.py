"""What the commands show: the cross-check table, progress bars, and plots written to files."""

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from moeblaze_ref.check import Row, passed
from moeblaze_ref.coverage import Line
from moeblaze_ref.memory import plots as memory_plots

DPI = 150


def progress_bar(*extra_columns) -> Progress:
    """A bar on standard error, so that --json stays clean; it disappears when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, *extra_columns, console=Console(stderr=True), transient=True)


def run_with_bar(title: str, jobs: list[Callable[[], list[Row]]]) -> list[Row]:
    """The rows of every job, in order, under a progress bar."""
    with progress_bar() as progress:
        return [row for job in progress.track(jobs, description=title) for row in job()]


# Short headings: with the longest cells, all but the shape fit into 80 columns.
COLUMNS = ("stage", "way", "backend, rung", "dtype", "n", "error", "bound", "result")
NUMBERS = ("n", "error", "bound")


def check_table(rows: list[Row], every_shape: bool = False) -> Table:
    """The cross-check: a line for the worst of the n shapes of each kind of row, or for every shape."""
    groups = [[row] for row in rows] if every_shape else _by_kind(rows)
    lines = [_cells(max(group, key=_badness), len(group)) for group in groups]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, name in enumerate(COLUMNS):
        width = max([len(name), *(len(line[column]) for line in lines)])
        table.add_column(name, justify="right" if name in NUMBERS else "left", min_width=width)
    table.add_column("shape" if every_shape else "worst shape", no_wrap=True)  # the one that may be cut
    for line in lines:
        table.add_row(*line)
    return table


def coverage_table(lines: list[Line]) -> Table:
    """How many checks have each value of an option, or why none has, by backend; 0 is a gap."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("stage", "option", "value", *lines[0].cells):
        table.add_column(name, no_wrap=True)
    for line in lines:
        cells = (Text("0", style="bold red") if cell == 0 else str(cell) for cell in line.cells.values())
        table.add_row(line.stage, line.option, line.value, *cells)
    return table


def _cells(row: Row, shapes: int) -> list[str | Text]:
    where = f"{row.backend} {row.rung}" if row.rung else row.backend
    bound = "-" if row.bound is None else f"{row.bound:.2g}"
    numbers = str(shapes), _number(row.error), bound
    return [row.stage, row.direction, where, row.dtype, *numbers, _result(row), row.shape or "-"]


def _by_kind(rows: list[Row]) -> list[list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.stage, row.direction, row.backend, row.rung, row.dtype), []).append(row)
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
    missing = sorted({row.backend for row in rows if not row.available and row.rung is None})
    left_out = sorted({f"{row.backend} {row.rung}" for row in rows if not row.available and row.rung})
    text = f"{len(checked) - failed} passed, {failed} failed"
    if missing:
        text += f"; unavailable here: {', '.join(missing)} (moeblaze doctor says why)"
    if left_out:
        text += f"; not for this GPU: {', '.join(left_out)}"
    return Text(text, style="bold green" if passed(rows) else "bold red")


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as PNG, making the folder if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    return path


def write_memory_plots(config, accounts, assumptions, folder: Path) -> list[Path]:
    """Both memory plots of a configuration."""
    return [
        save(memory_plots.stacked_bars(accounts), folder, "memory_by_tensor"),
        save(memory_plots.bytes_against_tokens(config, assumptions), folder, "memory_against_tokens"),
    ]


def write_placement_plots(trials, curve, folder: Path) -> list[Path]:
    """The load of every GPU and load against crossings, both of the first split, of `moeblaze place`."""
    from moeblaze_ref.placement import plots

    first = [trial for trial in trials if trial.seed == trials[0].seed]
    return [
        save(plots.heat_map(first), folder, "load_by_gpu"),
        save(plots.load_against_crossings(first, curve), folder, "load_against_crossings"),
    ]
