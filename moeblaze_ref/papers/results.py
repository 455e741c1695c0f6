"""The files of what was measured for the papers' items: docs/results/paper_*.json.

A file is of one GPU. It holds, for each item, its runs; a run holds the rows of each finished job, so that a run that
was interrupted goes on where it stopped. Runs that did not finish are kept and not shown.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moeblaze_ref import provenance, records

DOCS = Path(__file__).parents[2] / "docs"
FILES = "paper_*.json"
SAME = ("versions", "commit")  # of all parts of a run, and the code

Rows = list[dict[str, Any]]
Run = dict[str, Any]  # versions, commit, code, clocks, finished, jobs: the rows of each


class Recorded:
    """Every finished run of every item, of all files.

    Parameters
    ----------
    files : iterable of Path, optional
        Default: those of docs/results; there are none where the documentation is not installed.

    Raises
    ------
    ValueError
        If a file is not of this kind: the message names the file and the element.
    """

    def __init__(self, files: Iterable[Path] | None = None):
        found = sorted((DOCS / "results").glob(FILES)) if files is None else files
        self._files = [load(path) for path in found]

    def runs(self, item: str) -> Iterator[tuple[str, Rows]]:
        """Yield each finished run of an item, file by file: the short name of its device, and its rows."""
        for found in self._files:
            for run in found["items"].get(item, []):
                if run["finished"]:
                    yield device_name(found["device"]), [row for rows in run["jobs"] for row in rows]

    def rows(self, item: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each row of an item's finished runs, with the short name of its device."""
        for device, rows in self.runs(item):
            yield from ((device, row) for row in rows)


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
    for item, runs in found["items"].items():
        for number, run in enumerate(records.check_list(f"{path.name}: {item}", runs)):
            records.check_object(f"{path.name}: {item}[{number}]", run, {*SAME, "clocks", "finished", "jobs"})
    return found


def check_place(path: Path, force: bool = False):
    """Check that a run of this device may be written here.

    Parameters
    ----------
    path : Path
    force : bool
        Allow to replace a file of another kind.

    Raises
    ------
    ValueError, OSError
        If the file cannot be written, is no regular file, is of another kind, or holds runs of another device.
    """
    records.check_regular(path)
    records.check_writable(path, load, force)
    here, there = provenance.environment()["device"], _existing(path, force)["device"]
    if there != here:
        raise ValueError(f"{path} holds runs of {there}, but here is {here}: name another file")


def _existing(path: Path, force: bool) -> dict[str, Any]:
    """What a file holds; of no file, or an empty one, that it holds nothing of this device."""
    return records.earlier(path, load, force) or {"device": provenance.environment()["device"], "items": {}}


def record(path: Path, item: str, jobs: Sequence[Callable[[], Rows]], force: bool = False) -> Iterator[Rows]:
    """Run the jobs of an item and write the rows of each to a file as soon as they are there.

    Parameters
    ----------
    path : Path
        Other items and finished runs in it stay. An unfinished run of this item goes on, if it is of this very device,
        commit and versions.
    item : str
    jobs : sequence of callable
    force : bool
        Replace a file of another kind.

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
    yield from run["jobs"]
    for job in jobs[len(run["jobs"]) :]:
        rows = job()
        run["jobs"].append(rows)
        run["clocks"] = provenance.clocks()
        records.write(path, content, load, force)
        yield rows
    run["finished"] = True
    records.write(path, content, load, force)
