"""The file of a benchmark's results: several runs of one commit on one device, with where and how they were taken."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from moeblaze_ref.bench import KINDS, counters, first_step, growth, host, ladder, launched, layer, layouts, stages
from moeblaze_ref.core import checks, provenance, records
from moeblaze_ref.core.paths import DOCS

Result = dict[str, Any]
RECORDED = DOCS / "results" / "bench_h200.json"  # what the documents and the notebooks show
LADDER = RECORDED.with_name("ladder_h100.json")
COUNTERS = RECORDED.with_name("counters_h100.json")
SYSTEMS = RECORDED.with_name("systems_h200.json")  # beside MegaBlocks and a fixed capacity
ROWS = {
    "layer": layer.Row,
    "ladder": ladder.Row,
    "host": host.Row,
    "launched": launched.Row,
    "first_step": first_step.Row,
    "layouts": layouts.Row,
    "growth": growth.Row,
    "counters": counters.Row,
}  # of the other kinds: stages.Row
PLACE = ("device", "versions", "commit")  # what all runs of one file share
HEAD = {*PLACE, "clocks", "runs", "rows"}
RUN = {"kind", "clocks", "repetitions"}


def result(kind: str, rows: Sequence[dict[str, Any]], clocks: str | None, repetitions: int) -> Result:
    """One run of a kind of ``bench.KINDS``, with its rows and the clocks under load, as `Gpu.clocks` says them.

    Returns
    -------
    dict
        {device, clocks, versions, commit, code, runs, rows}. ``runs`` holds {kind, clocks, repetitions} of each run; a
        row's "run" is its place there.
    """
    run = {"kind": kind, "clocks": clocks, "repetitions": repetitions}
    return provenance.environment() | {"clocks": clocks, "runs": [run], "rows": [{"run": 0} | row for row in rows]}


def check_place(path: Path, force: bool = False):
    """Check that a run may be added to the file: it is writable and holds runs of this commit and device only.

    With ``force`` a file of another kind may be replaced.

    Raises
    ------
    ValueError, OSError
        If it may not.
    """
    records.check_writable(path, load, force)
    earlier, here = records.earlier(path, load, force), provenance.environment()
    if earlier is None:
        return
    for name in (*PLACE, "code"):
        if earlier.get(name) != here[name]:
            raise ValueError(
                f"{path} holds runs with {name} {earlier.get(name)}, but here it is {here[name]}: name another file"
            )


def add(path: Path, new: Result, force: bool = False):
    """Write a run into a file, after those that it holds already; with ``force`` in place of another kind of file."""
    if earlier := records.earlier(path, load, force):
        rows = [row | {"run": row["run"] + len(earlier["runs"])} for row in new["rows"]]
        new = earlier | {"runs": earlier["runs"] + new["runs"], "rows": earlier["rows"] + rows}
    records.write(path, new, load, force)


def load(path: Path) -> Result:
    """Load a result file.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is no file of this kind: the message names the file and the element.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not among the results: nothing was timed on a GPU yet")
    found = records.read(path, HEAD)
    runs, rows = (records.check_list(f"{path.name}: {name}", found[name]) for name in ("runs", "rows"))
    for number, run in enumerate(runs):
        records.check_object(f"{path.name}: runs[{number}]", run, RUN)
    return found | {"rows": [_row(f"{path.name}: rows[{number}]", row, len(runs)) for number, row in enumerate(rows)]}


def _row(name: str, row: Any, num_runs: int) -> dict[str, Any]:
    """A row as it was recorded, with None in columns that came later."""
    records.check_object(name, row, {"kind", "run"})
    kind = checks.check_name(f"kind of {name}", str(row["kind"]), KINDS)
    if row["run"] not in range(num_runs):
        raise ValueError(f"{name} is of run {row['run']!r}, but the file has {num_runs} runs")
    columns = fields(ROWS.get(kind, stages.Row))
    later = {column.name: column.default for column in columns if column.default is not MISSING}
    return later | records.check_object(name, row, {column.name for column in columns} - later.keys())


def rows_of(found: Result, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind, of all runs."""
    return [row for row in found["rows"] if row["kind"] == kind]
