"""Progress bars on standard error."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

Row = TypeVar("Row")


def bar(*extra_columns: ProgressColumn) -> Progress:
    """A bar on standard error, so that --json stays clean; it disappears when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, *extra_columns, console=Console(stderr=True), transient=True)


def run_with_bar(title: str, jobs: Sequence[Callable[[], Iterable[Row]]], processes: int = 1) -> list[Row]:
    """The rows of every job, in order, under a progress bar.

    With several ``processes`` the jobs run in new processes, to which they are pickled.
    """
    return [row for rows in each_with_bar(title, jobs, processes) for row in rows]


def each_with_bar(title: str, jobs: Sequence[Callable[[], Iterable[Row]]], processes: int = 1) -> Iterator[list[Row]]:
    """Yield the same, job by job, as they are done."""
    with bar() as progress:
        yield from progress.track(_run(jobs, processes), total=len(jobs), description=title)


def _run(jobs: Sequence[Callable[[], Iterable[Row]]], processes: int) -> Iterator[list[Row]]:
    if processes == 1:
        yield from (_rows(job) for job in jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        # Jobs that travel together share what they have in common, such as a trace.
        yield from pool.map(_rows, jobs, chunksize=max(len(jobs) // (8 * processes), 1))


def _rows(job: Callable[[], Iterable[Row]]) -> list[Row]:
    return list(job())
