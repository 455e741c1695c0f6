"""The exercises as a course of nbgrader: its own commands run on the export, and the points are right."""

import ast
import json
import os
import re
import sys

import nbformat
import processes
import pytest
from test_cli import moeblaze

from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course import exercises
from moeblaze_ref.course.exercises import Unsolved, notebooks, require_solved, submission
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS
from moeblaze_ref.course.site.path import MINUTES

NBGRADER = ROOT / "build" / "nbgrader"  # where `make build/nbgrader` installs it
SHEET = "05_smart_checkpoint"  # predictions, and a kernel
(ONE,) = (sheet for sheet in SHEETS if sheet.course == SHEET)
POINTS = sum(MINUTES[exercise.kind] for exercise in ONE.exercises)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The folder of an export."""
    folder = tmp_path_factory.mktemp("course")
    done = moeblaze("course", "export", folder)
    assert done.exit_code == 0 and f"{len(SHEETS)} assignments and nbgrader_config.py" in done.stdout
    return folder


def cleared(source):
    """What nbgrader makes of an answer: each solution region becomes an empty line."""
    return re.sub(r"^(?:#|//) BEGIN SOLUTION\n.*?^(?:#|//) END SOLUTION$", "", source, flags=re.DOTALL | re.MULTILINE)


def cells_of(path):
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.course)
def test_a_link_of_a_sheet_becomes_its_words_and_the_path_of_what_is_there(course, sheet):
    path = course / "source" / sheet.course / f"{sheet.course}.ipynb"
    texts = [cell.source for cell in cells_of(path).values() if cell.cell_type == "markdown"]
    assert not [text for text in texts if re.search(r"\]\((?!https?:)", text)]
    paths = [found for text in texts for found in re.findall(r"\(((?:docs|notebooks)/[^)#]*)", text)]
    assert paths and not [path for path in paths if not (ROOT / path).is_file()]


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.course)
def test_a_source_has_each_question_locked_each_answer_open_and_a_test_with_points(course, sheet):
    path = course / "source" / sheet.course / f"{sheet.course}.ipynb"
    nbformat.validate(nbformat.read(path, as_version=4))
    cells = cells_of(path)
    marks = {name: cell.metadata["nbgrader"] for name, cell in cells.items()}
    assert all(mark["schema_version"] == 3 and mark["grade_id"] == name for name, mark in marks.items())
    assert all(re.fullmatch(r"[\w-]+", name) for name in marks)
    for exercise in sheet.exercises:
        question, answer, test = (marks[exercise.name + part] for part in ("", "-answer", "-test"))
        assert (question["locked"], question["solution"], question["grade"]) == (True, False, False)
        assert (answer["locked"], answer["solution"], answer["grade"]) == (False, True, False)
        assert (test["locked"], test["solution"], test["grade"]) == (True, False, True)
        assert test["points"] == MINUTES[exercise.kind]
    editors = [name for name, cell in cells.items() if cell.source.startswith("edit(")]
    assert all(marks[name]["locked"] for name in editors)
    assert len(marks) == 2 + 3 * len(sheet.exercises) + len(editors)
    text = "\n".join(cell.source for cell in cells.values() if cell.cell_type == "markdown")
    assert "solutions/" not in text and not re.search(r"\]\((?!https?:)", text), "a link that leads out of the course"


@pytest.mark.parametrize("name", EXERCISES)
def test_without_its_solution_an_answer_is_the_unsolved_one_and_with_it_the_solution(course, name):
    exercise = EXERCISES[name]
    (sheet,) = (sheet.course for sheet in SHEETS if exercise in sheet.exercises)
    source = cells_of(course / "source" / sheet / f"{sheet}.ipynb")[f"{name}-answer"].source
    assert cleared(source).split() == exercise.cell(exercise.unsolved).split()
    text = re.sub(
        r"^(?:#|//) (?:BEGIN|END) SOLUTION\n?", "", source.removeprefix(exercise.cell("")).lstrip(), flags=re.M
    )
    if exercise.language == "python":
        unsolved, *statements = ast.parse(text).body
        assert unsolved.value.value.strip() == exercise.unsolved.strip()
        assert [*map(ast.dump, statements)] == [*map(ast.dump, ast.parse(exercise.solution).body)]
    else:
        comment = re.compile(r"/\*.*?\*/", re.DOTALL)
        assert comment.sub("", text).split() == comment.sub("", exercise.solution).split()


def test_an_export_replaces_nothing(course):
    config = course / "nbgrader_config.py"
    before = config.read_text()
    config.write_text("mine")
    done = moeblaze("course", "export", course)
    assert done.exit_code == 2 and "is there already: name a folder without an earlier export" in done.output
    assert config.read_text() == "mine"
    config.write_text(before)


def test_a_test_passes_after_a_right_answer_alone(monkeypatch):
    monkeypatch.setattr(exercises, "_solved", set())  # other tests have solved it, perhaps
    with pytest.raises(Unsolved):
        exercises.predict("crossings", fullest=0, crossing=0)
    with pytest.raises(Unsolved, match="no cell above answers crossings right"):
        require_solved("crossings")
    with pytest.raises(ValueError, match="Did you mean 'crossings'"):
        require_solved("crossing")
    crossings = EXERCISES["crossings"]
    exercises.predict("crossings", **crossings.truth(**crossings.given))
    require_solved("crossings")


def run(course, *arguments):
    """What Python prints with these arguments in the folder of the course, where it finds nbgrader."""
    paths = {"PATH": f"{NBGRADER / 'bin'}{os.pathsep}{os.environ['PATH']}", "JUPYTER_CONFIG_DIR": str(course / "home")}
    paths["PYTHONPATH"] = f"{NBGRADER}{os.pathsep}{ROOT}"
    done = processes.run([sys.executable, *arguments], cwd=course, limit=300, env=os.environ | paths)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


GRADES = f"""
import json
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    found = {{one.student.id: (one.score, one.max_score) for one in book.assignment_submissions("{SHEET}")}}
print(json.dumps(found))
"""


def test_nbgrader_generates_the_assignment_and_grades_what_is_submitted(course):
    """The submission solves all exercises, the kernel too, but for one."""
    assert NBGRADER.is_dir(), "nbgrader is not installed: run `make build/nbgrader`"
    run(course, "-m", "nbgrader", "generate_assignment", SHEET)
    notebook = nbformat.read(course / "release" / SHEET / f"{SHEET}.ipynb", as_version=4)
    solved = {cell.id: cell.source for cell in notebooks.solution_notebook(ONE).cells}
    unsolved = ONE.exercises[0]
    for cell in notebook.cells:
        if exercise := EXERCISES.get(cell.id.removesuffix("-answer")):
            assert cell.cell_type == "markdown" or cell.source.split() == exercise.cell(exercise.unsolved).split()
            if cell.cell_type == "code" and exercise != unsolved:
                cell.source = solved[cell.id]
    submitted = course / "submitted" / "student" / SHEET / f"{SHEET}.ipynb"
    submitted.parent.mkdir(parents=True)
    nbformat.write(notebook, submitted)
    assert submission.read(submitted).exercises == [one.name for one in ONE.exercises], (
        "`moeblaze course grade` reads it"
    )
    run(course, "-m", "nbgrader", "autograde", SHEET)
    assert json.loads(run(course, "-c", GRADES)) == {"student": [POINTS - MINUTES[unsolved.kind], POINTS]}
