"""The files of what was measured for the papers' items: docs/results/paper_*.json.

A file is of one GPU. It holds, for each item, its runs; a run holds the rows of each finished job, so that a run that
was interrupted goes on where it stopped, and the seconds that each job took, which earlier files lack. Runs that did
not finish are kept and not shown.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from moeblaze_ref.core import provenance, records
from moeblaze_ref.core.paths import DOCS

FILES = "paper_*.json"
SAME = ("versions", "commit")  # of all parts of a run, and the code

# The columns of each row of an item: the names in it, and the numbers that the claims and pictures read.
COLUMNS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "moeblaze-3.1": (("preset", "kernel"), ("ms",)),
    "moeblaze-4.2": (("preset", "kernel"), ("ms",)),
    "moeblaze-fig4": (("preset", "activation", "system"), ("step_ms",)),
    "moeblaze-fig6": (("preset", "activation", "system"), ("step_ms",)),
    "megablocks-fig2": (
        ("variant", "seed", "shape", "precision", "tokens_of_step"),
        ("steps", "loss", "held_out_loss", "seconds_at", "seconds"),
    ),
    "megablocks-fig5": (("n", "tile"), ("ms", "tflops")),
    "megablocks-order": (("n", "tile", "band"), ("ms",)),
    "megablocks-fig9": (("model", "product"), ("pct_of_bmm",)),
    "megablocks-fig10": (("model", "E"), ("ms", "sequential_ms", "graph_ms", "sequential_graph_ms")),
}

Rows = list[dict[str, Any]]


class Source(NamedTuple):
    """The origin of a number."""

    device: str  #: its short name, see `device_name`
    commit: str  #: of this project, whole


class Run(NamedTuple):
    """A finished run of an item, and its rows."""

    source: Source
    rows: Rows


class Recorded:
    """Every finished run of every item, of all files.

    By default the files are those of docs/results; there are none where the documentation is not installed.

    Raises
    ------
    ValueError
        If a file is not of this kind: the message names the file and the element.
    """

    def __init__(self, files: Iterable[Path] | None = None):
        self._files = [load(path) for path in (recorded_files() if files is None else files)]

    def finished(self, item: str) -> Iterator[Run]:
        """Yield each finished run of an item, file by file."""
        for found in self._files:
            yield from _finished(found, item)

    def runs(self, item: str) -> Iterator[tuple[str, Rows]]:
        """Yield the short name of the device and the rows of each run of `finished`."""
        for run in self.finished(item):
            yield run.source.device, run.rows

    def rows(self, item: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each row of an item's finished runs, with the short name of its device."""
        for device, rows in self.runs(item):
            yield from ((device, row) for row in rows)


def _finished(content: dict[str, Any], item: str) -> Iterator[Run]:
    """Yield each finished run of an item in a file."""
    for run in content["items"].get(item, []):
        if run["finished"]:
            source = Source(device_name(content["device"]), run["commit"])
            yield Run(source, [row for rows in run["jobs"] for row in rows])


def recorded_files() -> list[Path]:
    """Return the files of docs/results, by name."""
    return sorted((DOCS / "results").glob(FILES))


def device_name(device: str) -> str:
    """Return the short name of a device: "H100" of a GPU, "CPU" of a processor."""
    name, *memory = device.split(",")
    if not memory:
        return "CPU"
    words = name.split()
    return next((word for word in words if word[:1] in "HAB" and word[1:].isdigit()), words[-1])


def load(path: Path) -> dict[str, Any]:
    """Return what a file holds.

    Raises
    ------
    OSError, ValueError
        If there is no such file, or it is not of this kind.
    """
    found = records.read(path, {"device", "items"})
    _check(f"{path.name}: device", found["device"], str, "a text")
    _check(f"{path.name}: items", found["items"], dict, "an object")
    for item, runs in found["items"].items():
        for number, run in enumerate(records.check_list(f"{path.name}: {item}", runs)):
            _check_run(f"{path.name}: {item}[{number}]", item, run)
    return found


def _check_run(place: str, item: str, run: Any):
    records.check_object(place, run, {*SAME, "clocks", "finished", "jobs"})
    _check(f"{place}: commit", run["commit"], str, "a text")
    for job, rows in enumerate(records.check_list(f"{place}: jobs", run["jobs"])):
        for number, row in enumerate(records.check_list(f"{place}: jobs[{job}]", rows)):
            _check_row(f"{place}: jobs[{job}][{number}]", item, row)


def _check_row(place: str, item: str, row: Any):
    """Check a row's columns; one that says in a message why it has no numbers needs none."""
    names, numbers = COLUMNS.get(item, ((), ()))
    needed = {*names} if isinstance(row, dict) and "message" in row else {*names, *numbers}
    records.check_object(place, row, needed)


def _check(place: str, found: Any, kind: type, words: str):
    if not isinstance(found, kind):
        raise ValueError(f"{place} is {found!r}, but it must be {words}")


def check_place(path: Path, force: bool = False):
    """Check that a run of this device may be written here; with ``force`` in the place of a file of another kind.

    Raises
    ------
    ValueError, OSError
        If the file cannot be written, is not a regular file, is of another kind, or holds runs of another device.
    """
    records.check_regular(path)
    records.check_writable(path, load, force)
    here, there = provenance.environment()["device"], _existing(path, force)["device"]
    if there != here:
        raise ValueError(f"{path} holds runs of {there}, but here is {here}: name another file")


def _existing(path: Path, force: bool) -> dict[str, Any]:
    """Return what a file holds. A missing or empty file counts as one of this device without runs."""
    return records.earlier(path, load, force) or {"device": provenance.environment()["device"], "items": {}}


def earlier_rows(path: Path, item: str, force: bool = False) -> Rows:
    """Return the rows of an item's finished runs in a file that a run is to be added to; arguments as in `record`."""
    return [row for run in _finished(_existing(path, force), item) for row in run.rows]


def record(path: Path, item: str, jobs: Sequence[Callable[[], Rows]], force: bool = False) -> Iterator[Rows]:
    """Run the jobs of an item and write the rows of each to a file as soon as they are there.

    Other items and finished runs in the file stay. An unfinished run of this item goes on, if it is of this very
    device, commit and versions. With ``force`` a file of another kind is replaced.

    Yields
    ------
    list of dict
        The rows of each job, those of an earlier part of this run too.
    """
    content, here = _existing(path, force), provenance.environment()
    runs = content["items"].setdefault(item, [])
    same = {name: here[name] for name in (*SAME, "code")}
    if not (runs and not runs[-1]["finished"] and all(runs[-1].get(name) == same[name] for name in same)):
        runs.append(same | {"clocks": here["clocks"], "finished": False, "jobs": []})
    run = runs[-1]
    seconds = run.setdefault("seconds", [None] * len(run["jobs"]))
    yield from run["jobs"]
    for job in jobs[len(run["jobs"]) :]:
        began = perf_counter()
        rows = job()
        seconds.append(perf_counter() - began)
        run["jobs"].append(rows)
        run["clocks"] = provenance.clocks()
        records.write(path, content, load, force)
        yield rows
    run["finished"] = True
    records.write(path, content, load, force)
