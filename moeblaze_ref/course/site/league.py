"""The tables of docs/league.md, from the records of ``moeblaze league`` in docs/results.

``python -m moeblaze_ref.course.site.league`` writes them.
"""

from pathlib import Path
from typing import Any

from moeblaze_ref.bench import LEAGUE_PRESETS
from moeblaze_ref.core import documents, provenance
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.core.units import MIB

DOCUMENT = DOCS / "league.md"
RECORDS = DOCS / "results"
COMMAND = "league"
NONE = "–"  # in the place of a number that there is not

Record = dict[str, Any]


def records() -> list[Record]:
    """Return every record of the league."""
    return [provenance.load_of(COMMAND, path) for path in sorted(Path(RECORDS).glob("league_*.json"))]


def verdicts(record: Record) -> str:
    """Return a row for each layer: what its check found."""
    headings = ["layer", "verdict", "largest error / bound", "same bits", "CUDA graph", "past 2^31 elements"]
    return documents.table(headings, [_verdict(row) for row in record["checks"]], words=2)


def _verdict(row: dict[str, Any]) -> list[str]:
    if row["dtype"] is None:
        return [row["layer"], f"not checked: {row['first_problem']}", *[NONE] * 4]
    said = "right" if row["right"] else f"wrong: {row['what']}; {'; '.join(row['first_problem'].splitlines())}"
    said += f"; not supported: {', '.join(row['not_supported'])}" if row["not_supported"] else ""
    error = NONE if row["largest_error"] is None else f"{row['largest_error']:.2f}"
    bits = {True: "yes", False: "no", None: NONE}[row["deterministic"]]
    return [row["layer"], said, error, bits, "yes" if row["graphs"] else "no", ", ".join(row["large"]) or NONE]


def times(record: Record) -> str:
    """Return milliseconds of a step: the worse median of two runs."""
    return _by_shape(record, lambda row: f"{max(row['step_ms']):.2f}")


def kept(record: Record) -> str:
    """Return MiB that live from the forward to the backward."""
    return _by_shape(record, lambda row: f"{row['kept_bytes'] / MIB:,.0f}")


def peaks(record: Record) -> str:
    """Return the most MiB of a step."""
    return _by_shape(record, lambda row: f"{row['peak_bytes'] / MIB:,.0f}")


def _by_shape(record: Record, cell: Any) -> str:
    rows = record["times"]
    shapes, layers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("preset", "layer"))
    cells = {(row["layer"], row["preset"]): cell(row) for row in rows if not row["problem"]}
    table = [[layer, *(cells.get((layer, shape), NONE) for shape in shapes)] for layer in layers]
    return documents.table(["layer", *shapes], table, words=1)


def problems(record: Record) -> str:
    """Return what kept a layer from being timed, one line each."""
    lines = [f"- {row['preset']}, {row['layer']}: `{row['problem']}`" for row in record["times"] if row["problem"]]
    return "\n".join(lines) or "Every layer that was checked was timed on every shape above."


def missing(record: Record) -> list[str]:
    """Return the shapes of the league that a record has no times of."""
    there = {row["preset"] for row in record["times"]}
    return [name for name in LEAGUE_PRESETS if name not in there]


def unchecked(record: Record) -> list[str]:
    """Return the layers that a record has times of, and no verdict on."""
    checked = {row["layer"] for row in record["checks"]}
    return list(dict.fromkeys(row["layer"] for row in record["times"] if row["layer"] not in checked))


def results() -> str:
    """Return the tables of every record, one GPU after the other."""
    return "\n\n".join(_of_record(record) for record in records()) or "No run is recorded yet."


def _of_record(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [
        f"### {record['device'].partition(',')[0]}",
        f"With {versions}; commit {record['commit'][:8]}.",
        verdicts(record),
        "Milliseconds of a step, forward and backward:",
        times(record),
        "Kept from the forward to the backward, in MiB:",
        kept(record),
        "The most that a step allocates, in MiB, weights excluded:",
        peaks(record),
        problems(record),
        *(
            f"Not {done} yet: {', '.join(names)}."
            for done, names in {"timed": missing(record), "checked": unchecked(record)}.items()
            if names
        ),
    ]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with its tables written anew."""
    return documents.fill(text, {"results": results})


if __name__ == "__main__":
    DOCUMENT.write_text(page(DOCUMENT.read_text()))
