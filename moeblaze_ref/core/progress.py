"""Progress bars on standard error."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

Row = TypeVar("Row")


def bar(*extra_columns: ProgressColumn) -> Progress:
    """A bar on standard error, so that --json stays clean; it disappears when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, *extra_columns, console=Console(stderr=True), transient=True)


def run_with_bar(title: str, jobs: Sequence[Callable[[], Iterable[Row]]]) -> list[Row]:
    """The rows of every job, in order, under a progress bar."""
    with bar() as progress:
        return [row for job in progress.track(jobs, description=title) for row in job()]
