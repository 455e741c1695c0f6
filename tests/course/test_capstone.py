"""The capstone: its three levels, what a kernel below them is told, and that one thread alone gets none."""

import json
import re

import pytest
from test_cli import moeblaze
from test_grading import graded, notebook

from moeblaze_ref.course.exercises import Unsolved, progress
from moeblaze_ref.course.exercises.desk import Desk
from moeblaze_ref.course.exercises.exercise import LEVELS
from moeblaze_ref.course.exercises.sheets import EXERCISES
from moeblaze_ref.verify.checker.budgets import DIVISION

NAME = "fused-expert"
CAPSTONE = EXERCISES[NAME]


@pytest.mark.parametrize("level", LEVELS)
def test_a_reference_solution_reaches_its_level_and_no_higher_one(level):
    solved = []
    shown = Desk(on_solved=solved.append).check(NAME, CAPSTONE.solutions[level]).data
    reached = LEVELS[: LEVELS.index(level) + 1]
    assert shown.startswith(f"**Right: {level}.**") and solved == [NAME, *(f"{NAME}/{one}" for one in reached)]
    further = re.findall(r"^(\w+) is missed\. .*: over budget: .* too many", shown, re.MULTILINE)
    assert further == list(LEVELS[len(reached) :])


def changed(level, *changes):
    text = CAPSTONE.solutions[level]
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


SERIAL = (
    ("    const int row = threadIdx.x /", "    if (threadIdx.x) return;\n    for (int t = 0; t < THREADS; ++t) {\n"
     "    const int row = t /"),
    ("threadIdx.x % (COLUMNS / CORNER)", "t % (COLUMNS / CORNER)"),
    ("a_sums[i][j], b_sums[i][j]);\n", "a_sums[i][j], b_sums[i][j]);\n    }\n"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("bronze", *SERIAL), "too serial: .*; (one thread does work|the other threads do nothing)"),
        (changed("bronze", ("w2_expert[at];", "w2_expert[at];\n                if (j == 0) a_sums[i][j] += 0.0f * "
                            "((const volatile float*)w1_expert)[at];")),
         "right, but no bronze: .*: over budget: read of w1 is"),
        (changed("silver", ("ceil(h / 64)  THREADS", "1  THREADS")), "is never written"),
    ],
)  # fmt: skip
def test_a_kernel_below_bronze_is_told_why(text, message):
    with pytest.raises(Unsolved, match=message):
        Desk().check(NAME, text)


def test_the_budgets_fall_from_level_to_level():
    assert tuple(CAPSTONE.levels) == tuple(CAPSTONE.solutions) == LEVELS
    assert {budget.split()[0] for budget in CAPSTONE.division} == {*DIVISION}
    for budgets in CAPSTONE.levels.values():
        assert [budget.partition(" <=")[0] for budget in budgets] == [
            "read of x", "read of w1", "read of w2", "written",
        ]  # fmt: skip


def test_the_level_is_graded_and_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBLAZE_PROGRESS", str(tmp_path / "progress.json"))
    notebook(tmp_path / "folder" / "one.ipynb", CAPSTONE.cell(CAPSTONE.solutions["silver"]))
    found = graded(tmp_path / "folder")[NAME]
    assert (found.kind, found.verdict, found.level, found.message) == ("capstone", "right", "silver", "")
    for name in (NAME, f"{NAME}/bronze", f"{NAME}/silver", "first-wall"):
        progress.note(name)
    rows = {row["exercise"]: row for row in json.loads(moeblaze("course", "list", "--json").stdout)}
    assert rows[NAME]["level"] == "silver" and rows["first-wall"]["level"] is None
    assert {*progress.solved()} == {NAME, "first-wall"}
    progress.forget(NAME)
    assert progress.levels() == {} and [*progress.solved()] == ["first-wall"]
