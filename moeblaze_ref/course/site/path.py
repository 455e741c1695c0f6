"""The course's path: how long each notebook takes, measured, and its exercises, estimated; written into docs/path.md.

``python -m moeblaze_ref.course.site.path --record docs/results/course_cpu.json`` runs the notebooks in their order, as
a reader does who has compiled nothing yet; without ``--record`` the page is written from the record that is there.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

from moeblaze_ref.core import documents, provenance, records
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.course.exercises.sheets import SHEETS
from moeblaze_ref.course.notebook.execution import execute
from moeblaze_ref.course.notebook.outputs import NOTEBOOKS

DOCUMENT, RECORD = DOCS / "path.md", DOCS / "results" / "course_cpu.json"
NAMES = ("notebook", "to read", "first run", "exercises", "to solve")
KEYS = ("rows", "cores", "device", "versions", "commit")
COMMAND = "site.path"  # in its record
WORDS_A_MINUTE = 130  # of a text with formulas and tables, read slowly
# An estimate, for each kind of exercise.
MINUTES = {"predict": 5, "numba": 15, "cuda": 15, "bug": 10, "construct": 10, "torch": 30, "capstone": 120}


def measure() -> dict[str, Any]:
    """Seconds of every notebook's first run, in order, with nothing compiled before the first of them."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MOEBLAZE_CACHE"] = cache
        rows = [{"notebook": path.name, "seconds": _seconds(path)} for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    return {"cores": os.cpu_count(), "rows": rows}


def _seconds(path: Path) -> float:
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    execute(notebook, path.parent)
    return time.perf_counter() - begin


def reading_minutes(path: Path) -> int:
    """Return the minutes to read a notebook, with questions and folded answers, in steps of five."""
    cells = nbformat.read(path, as_version=4).cells
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    return 5 * -(-words // (5 * WORDS_A_MINUTE))


def exercise_minutes(course: str) -> list[int]:
    """Return the estimated minutes of each exercise of a notebook, by its kind."""
    return [MINUTES[one.kind] for sheet in SHEETS if sheet.course == course for one in sheet.exercises]


def fill(text: str, found: Mapping[str, Any]) -> str:
    """The page with the times of a record that `records.read` gave, of ``KEYS``.

    Raises
    ------
    ValueError
        If the record lacks a notebook.
    """
    return documents.fill(text, {"times": lambda: _block(found)})


def _block(found):
    seconds = {row["notebook"]: row["seconds"] for row in found["rows"]}
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    if missing := [path.name for path in paths if path.name not in seconds]:
        raise ValueError(f"the record has no time of {', '.join(missing)}")
    lines = [
        [_link(path), f"{reading_minutes(path)} min", _rounded(seconds[path.name]), *_exercises(path.stem)]
        for path in paths
    ]
    total = sum(reading_minutes(path) for path in paths), sum(seconds[path.name] for path in paths)
    lines += [[sheet.title, "", "", *_exercises(sheet.course)] for sheet in SHEETS if sheet.number is None]
    minutes = [minutes for sheet in SHEETS for minutes in exercise_minutes(sheet.course)]
    lines.append(["all", f"{total[0]} min", _rounded(total[1]), str(len(minutes)), f"{sum(minutes)} min"])
    where = "\n".join([*documents.place(found), f"- cores: {found['cores']}"])
    return "\n\n".join([documents.table(NAMES, lines), where])


def _exercises(course):
    """Return a link to the exercises with their number and estimated minutes."""
    minutes = exercise_minutes(course)
    return f"[{len(minutes)}](../notebooks/exercises/{course}.ipynb)", f"{sum(minutes)} min"


def _link(path: Path) -> str:
    title = nbformat.read(path, as_version=4).cells[0].source.partition("\n")[0].removeprefix("# ")
    return f"[{title}](../notebooks/{path.name})"


def _rounded(seconds: float) -> str:
    """Round to whole seconds below a minute, and to tens above."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(10 * round(seconds / 10), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def main():
    """The command."""
    parser = argparse.ArgumentParser(description="Write how long the notebooks take into docs/path.md.")
    parser.add_argument("--record", help="measure first, and write the times here, too")
    parser.add_argument("--force", action="store_true", help="replace a file there that is no record")
    given = parser.parse_args()
    try:
        found = _measured(records.file_named(given.record), given.force) if given.record else records.read(RECORD, KEYS)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), found))


def _measured(record: Path, force: bool) -> dict[str, Any]:
    provenance.check_place(record, COMMAND, force)
    return provenance.record(record, COMMAND, measure(), force)


if __name__ == "__main__":
    main()
