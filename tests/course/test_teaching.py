"""The lecturer's pages: minutes of sections that add up to the path's, and mistakes of exercises that there are."""

import re

import nbformat
import pytest

from moeblaze_ref.core.paths import DOCS, ROOT
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS
from moeblaze_ref.course.site import teaching
from moeblaze_ref.course.site.path import reading_minutes

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOTES = teaching.DOCUMENT.read_text()


def test_the_minutes_are_those_of_the_notebooks():
    """`make docs` writes them."""
    assert teaching.page(NOTES) == NOTES
    assert re.findall(r"<!-- begin minutes_(\d\d) -->", NOTES) == [path.stem[:2] for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_minutes_of_sections_add_up_to_those_of_the_path(path):
    minutes = teaching.section_minutes(path)
    assert sum(minutes.values()) == reading_minutes(path)
    assert f"| {reading_minutes(path)} min |" in (DOCS / "path.md").read_text()
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    assert list(minutes)[1:] == re.findall(r"^## (.*)$", text, re.MULTILINE)


def test_minutes_follow_the_words(tmp_path, monkeypatch):
    cells = ["# A title", "## One\n\n" + "word " * 300, "more " * 100, "## Two\n\n" + "word " * 100]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    monkeypatch.setattr(teaching, "reading_minutes", lambda path: 10)
    assert teaching.section_minutes(tmp_path / "a.ipynb") == {"the beginning": 0, "One": 8, "Two": 2}


@pytest.mark.parametrize("sheet", [sheet for sheet in SHEETS if sheet.number is not None], ids=lambda one: one.course)
def test_the_notes_of_a_notebook_have_mistakes_of_its_own_exercises(sheet):
    notes = NOTES.partition(f"\n## {sheet.number}. {sheet.title}\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w-]+)` \| .+ \| .+ \|$", notes, re.MULTILINE)
    assert named and {*named} <= {exercise.name for exercise in sheet.exercises}
    assert "**Ask often:**" in notes and named == sorted(named, key=list(EXERCISES).index)


def test_the_term_has_twelve_weeks_with_every_notebook_and_sheet():
    plan = (DOCS / "teaching.md").read_text().partition("## One term")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", plan, re.MULTILINE) == [str(week) for week in range(1, 13)]
    for sheet in SHEETS:
        assert f"(../notebooks/exercises/{sheet.course}.ipynb)" in plan
    assert all(f"(../notebooks/{path.name})" in plan for path in NOTEBOOKS)
