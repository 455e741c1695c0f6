"""The file of a benchmark's results: several runs of one commit on one device, with where and how they were taken."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from moeblaze_ref import doors, provenance
from moeblaze_ref.bench import KINDS, counters, ladder, layer, stages

Result = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs"
RECORDED = DOCS / "results" / "bench_h200.json"  # what the documents and the notebooks show
LADDER = RECORDED.with_name("ladder_h200.json")
COUNTERS = RECORDED.with_name("counters_h200.json")
ROWS = {"layer": layer.Row, "ladder": ladder.Row, "counters": counters.Row}  # of the other kinds: stages.Row
PLACE = ("device", "versions", "commit")  # what all runs of one file share


def result(kind: str, rows: Sequence[dict[str, Any]], clocks: str | None, repetitions: int) -> Result:
    """One run.

    Parameters
    ----------
    kind : str
        One of ``bench.KINDS``.
    rows : sequence of dict
        See `layer.Row`, `stages.Row`, `ladder.Row` and `counters.Row`.
    clocks : str or None
        Under load, as `Gpu.clocks` says.
    repetitions : int
        Of each row.

    Returns
    -------
    dict
        {device, clocks, versions, commit, runs, rows}. ``runs`` holds {kind, clocks, repetitions} of each run; a row's
        "run" is its place there.
    """
    run = {"kind": kind, "clocks": clocks, "repetitions": repetitions}
    return provenance.environment() | {"clocks": clocks, "runs": [run], "rows": [{"run": 0} | row for row in rows]}


def check_place(path: Path):
    """A file that exists holds runs of this commit on this device, so that a run of now may be added.

    Raises
    ------
    ValueError
        If it does not.
    """
    if not path.exists():
        return
    earlier, here = load(path), provenance.environment()
    for name in PLACE:
        if earlier[name] != here[name]:
            raise ValueError(
                f"{path} holds runs with {name} {earlier[name]}, but here it is {here[name]}: name another file"
            )


def add(path: Path, new: Result):
    """Write a run into a file, after the runs that it holds already."""
    if path.exists():
        earlier = load(path)
        rows = [row | {"run": row["run"] + len(earlier["runs"])} for row in new["rows"]]
        new = earlier | {"runs": earlier["runs"] + new["runs"], "rows": earlier["rows"] + rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(new, indent=1) + "\n")


def load(path: Path) -> Result:
    """What a file holds.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is no file of this kind, or a row lacks a column.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not among the results: nothing was timed on a GPU yet")
    found = json.loads(path.read_text())
    if missing := {"device", "clocks", "versions", "commit", "runs", "rows"} - found.keys():
        raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}")
    for number, row in enumerate(found["rows"]):
        kind = doors.check_name(f"kind of rows[{number}]", row.get("kind"), KINDS)
        expected = {"run", *(field.name for field in fields(ROWS.get(kind, stages.Row)))}
        if missing := expected - row.keys():
            raise ValueError(f"{path.name}: rows[{number}] has no {', '.join(sorted(missing))}")
    return found


def rows_of(found: Result, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind, of all runs."""
    return [row for row in found["rows"] if row["kind"] == kind]
