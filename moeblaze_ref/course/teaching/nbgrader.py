"""The sheets of exercises as a course of nbgrader.

``nbgrader generate_assignment SHEET`` turns ``source/SHEET/SHEET.ipynb`` into the notebook that students get, and
``nbgrader autograde SHEET`` runs what they submit. In a source notebook each answer holds both texts of the exercise:
the unsolved one as a comment, and the solution below it. The marks of the comment lie in solution regions, which
nbgrader removes. So students get the cell of the sheet, whatever its language is.
"""

import posixpath
import re
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from moeblaze_ref.course.exercises import notebooks
from moeblaze_ref.course.exercises.exercise import Exercise, Sheet
from moeblaze_ref.course.exercises.sheets import SHEETS
from moeblaze_ref.course.notebook import outputs
from moeblaze_ref.course.site.path import MINUTES
from moeblaze_ref.verify.in_subprocess import LIMIT_SECONDS

CONFIG = f'''\
"""The configuration of nbgrader for the exercises of moeblaze_ref; `moeblaze course export` wrote it."""

import os

c = get_config()
c.CourseDirectory.course_id = "moeblaze"
c.ClearSolutions.code_stub = {{"python": ""}}  # a cell without its solution is the unsolved exercise
c.Execute.timeout = {2 * LIMIT_SECONDS}  # seconds of a cell

# What submissions solve is not noted as your own progress.
os.environ["MOEBLAZE_PROGRESS"] = os.path.abspath("progress_of_submissions.json")
'''
TEST = """\
from moeblaze_ref.course.exercises import require_solved

require_solved("{name}")"""
FOLDER = "notebooks/exercises"  # of the sheets, whose links are relative to it
_LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?!https?:)(?P<path>[^)]*)\)")
COMMENTS = {"python": ("#", "'''", "'''"), "c++": ("//", "/*", "*/")}  # of a line, and around lines


def source_notebook(sheet: Sheet) -> NotebookNode:
    """The sheet as nbgrader's source: questions are locked, and a test with points follows each answer."""
    notebook = notebooks.exercise_notebook(sheet)
    answered = {f"{one.name}-answer": one for one in sheet.exercises}
    cells = []
    for cell in notebook.cells:
        if exercise := answered.get(cell.id):
            cell.source = exercise.cell(_both_texts(exercise))
            test = new_code_cell(TEST.format(name=exercise.name), id=f"{exercise.name}-test")
            cells += [_marked(cell, solution=True), _marked(test, points=MINUTES[exercise.kind])]
        else:
            if cell.cell_type == "markdown":
                cell.source = _without_links(cell.source)
            cells.append(_marked(cell))
    notebook.cells = cells
    return notebook


def _both_texts(exercise: Exercise) -> str:
    """The unsolved text in a comment whose marks are solution regions, and the solution."""
    line, start, end = COMMENTS[exercise.language]
    begins, ends = f"{line} BEGIN SOLUTION", f"{line} END SOLUTION"
    return "\n".join(
        [begins, start, ends, exercise.unsolved.rstrip(), begins, end, exercise.solution.rstrip(), ends],
    )


def _without_links(text: str) -> str:
    """The text of a cell that lies in no folder of the course: no paragraph on the solutions, links as words and paths.

    A path is that of the project: ``[one page](../../docs/cuda.md)`` becomes ``one page (docs/cuda.md)``.
    """
    paragraphs = [one for one in text.split("\n\n") if "(../solutions/" not in one]
    return _LINK.sub(_words_and_path, "\n\n".join(paragraphs))


def _words_and_path(link: re.Match[str]) -> str:
    path = posixpath.normpath(f"{FOLDER}/{link['path']}")
    return f"{link['words']} ({path})"


def _marked(cell: NotebookNode, solution: bool = False, points: int | None = None) -> NotebookNode:
    """The cell with nbgrader's metadata: an answer, a test with points, or locked text."""
    grade = {} if points is None else {"points": points}
    cell.metadata["nbgrader"] = {
        "schema_version": 3,
        "grade_id": cell.id,
        "grade": points is not None,
        "solution": solution,
        "locked": not solution,
        "task": False,
        **grade,
    }
    return cell


def files() -> dict[str, str]:
    """The text of each file of the course, by its path."""
    sources = {f"source/{sheet.course}/{sheet.course}.ipynb": outputs.text(source_notebook(sheet)) for sheet in SHEETS}
    return sources | {"nbgrader_config.py": CONFIG}


def export(folder: Path) -> list[Path]:
    """Write the course into a folder, and return what was written.

    Raises
    ------
    ValueError
        If one of the files is there already; nothing is written then.
    OSError
        If the folder cannot be written.
    """
    made = {folder / name: text for name, text in files().items()}
    if there := [path for path in made if path.exists()]:
        raise ValueError(f"{there[0]} is there already: name a folder without an earlier export")
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(made)
