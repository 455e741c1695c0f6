"""Run ``moeblaze paper``: choose items, measure them on a GPU, draw the records."""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import Progress

from moeblaze_ref.core import figures, provenance, records
from moeblaze_ref.papers import items, results
from moeblaze_ref.papers.item import Item
from moeblaze_ref.papers.results import Recorded


def chosen(ids: Sequence[str], gpu: bool, record: Path | None, plot: Path | None = None) -> list[Item]:
    """Return the items that are asked for.

    Raises
    ------
    ValueError
        If there is no such item, one is to be measured that is not measured on a GPU, a file is named without --gpu, or
        pictures are asked for of items that have none.
    """
    found = items.chosen(ids)
    if record and not gpu:
        raise ValueError("--record needs what --gpu measures: add --gpu")
    if gpu and not ids:
        raise ValueError(f"--gpu measures items by name: {', '.join(measurable())}")
    for item in found:
        if gpu and item.measured_by is None:
            raise ValueError(f"{item.id} is not measured on a GPU. Measured are: {', '.join(measurable())}")
    if plot and not any(item.drawn_by for item in found):
        drawn = ", ".join(item.id for item in items.ITEMS.values() if item.drawn_by)
        raise ValueError(f"there is no picture of {', '.join(item.id for item in found)}. Drawn are: {drawn}")
    return found


def measurable() -> list[str]:
    """Return the ids of the items that are measured on a GPU."""
    return [item.id for item in items.ITEMS.values() if item.measured_by]


def measure(
    found: Sequence[Item], record: Path | None, progress_bar: Callable[[], Progress], force: bool = False
) -> Recorded:
    """Measure items on this GPU, one after the other, and return what is recorded then.

    The runs are added to the file ``record``, by default a temporary one. With ``force`` they replace a file of another
    kind.

    Raises
    ------
    ValueError, OSError
        If there is no GPU, or the file cannot take runs of it.
    """
    from moeblaze_ref.bench import plan  # which takes torch along

    device = plan.gpu()
    with tempfile.TemporaryDirectory() as folder:
        path = record or Path(folder, "paper.json")
        results.check_place(path, force)
        for item in found:
            jobs = item.jobs(device, results.earlier_rows(path, item.id, force))
            with progress_bar() as progress:
                for _ in progress.track(results.record(path, item.id, jobs, force), len(jobs), description=item.id):
                    pass
        return Recorded([path])


def check_plots(found: Sequence[Item], folder: Path, record: Path | None = None, force: bool = False):
    """Check that pictures of the recorded runs and of runs here may be written, and that ``record`` is none of them.

    Raises
    ------
    ValueError, OSError
        As in `records.check_distinct` and `figures.check`.
    """
    recorded, here = Recorded(), results.device_name(provenance.environment()["device"])
    of_items = (item.plot_names([*(device for device, _ in recorded.runs(item.id)), here]) for item in found)
    names = list(itertools.chain.from_iterable(of_items))
    records.check_distinct({"--record": [record], "--plots": figures.pictures(folder, names)})
    figures.check(folder, names, force)


def write_plots(found: Sequence[Item], recorded: Recorded, folder: Path, force: bool = False) -> list[Path]:
    """Write the pictures of the items into a folder; return the files. Errors as in `figures.save_all`."""
    return figures.save_all(
        {name: plot for item in found for name, plot in item.plots(recorded).items()}, folder, force
    )
