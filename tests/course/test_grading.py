"""A folder of submissions is graded: right, wrong, unsolved, hostile; nothing of them is left."""

import contextlib
import csv
import datetime
import inspect
import json
import os
import re
import socket
import sys
import uuid
from pathlib import Path

import nbformat
import processes
import pytest
from test_cli import moeblaze

from moeblaze_ref.cli import course
from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course.exercises import grading, progress, submission
from moeblaze_ref.course.exercises.desk import Desk, Unsolved
from moeblaze_ref.course.exercises.grading import Grade
from moeblaze_ref.course.exercises.sheets import EXERCISES
from moeblaze_ref.verify import guard, in_subprocess

SHEETS = ROOT / "notebooks"


def notebook(path, *cells):
    """Write a notebook of these code cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)


def kernel(name, old="", new=""):
    """The cell of a kernel exercise: solved, or with a change of the solution."""
    text = EXERCISES[name].solution
    assert not old or text.count(old) == 1
    return EXERCISES[name].cell(text.replace(old, new) if old else text)


def graded(folder, **options):
    return {one.exercise: one for one in grading.grade(folder, **options)}


def test_a_solved_sheet_is_right_and_one_as_it_is_found_is_unsolved(tmp_path):
    for kind in ("exercises", "solutions"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "00.ipynb").write_bytes((SHEETS / kind / "00_memory_wall.ipynb").read_bytes())
    grades = list(grading.grade(tmp_path, jobs=2))
    assert {(one.submission, one.verdict) for one in grades} == {
        ("exercises/00.ipynb", "unsolved"),
        ("solutions/00.ipynb", "right"),
    }
    assert len(grades) == 2 * len(EXERCISES_OF_00)


EXERCISES_OF_00 = [name for name in EXERCISES if name in (SHEETS / "exercises/00_memory_wall.ipynb").read_text()]
PREDICTED = 'predict("first-wall", x={}, routed_x={})'


NAMED = "predict(name='first-wall', x=134_217_728, routed_x=2**30)"


@pytest.mark.parametrize(
    ("cells", "exercise", "verdict", "message"),
    [
        ([PREDICTED.format(134_217_728, 2**30)], "first-wall", "right", ""),
        (["import numpy", PREDICTED.format("numpy.int64(134_217_728)", 2**30)], "first-wall", "right", ""),
        ([PREDICTED.format(134_217_728, 2)], "first-wall", "wrong", "routed_x is 2, which is less than what"),
        ([PREDICTED.format(1, 1), PREDICTED.format(134_217_728, 2**30)], "first-wall", "right", ""),
        ([NAMED], "first-wall", "right", ""),
        (["import moeblaze_ref.course.exercises as ex", "ex." + NAMED], "first-wall", "right", ""),
        (["%time " + NAMED], "first-wall", "right", ""),
        (["%time 1 / 0\n" + NAMED], "first-wall", "wrong", "ZeroDivisionError: division by zero"),
        ([PREDICTED.format("...", 1)], "first-wall", "unsolved", "x is still ..."),
        (["x = 1 / 0", PREDICTED.format(134_217_728, 2**30)], "first-wall", "right", ""),
        ([PREDICTED.format("1 / 0", 1)], "first-wall", "wrong", "ZeroDivisionError: division by zero"),
        ([PREDICTED.format("object()", 1)], "first-wall", "wrong", r"x is 'a object' \(str\), but it must be a number"),
        ([PREDICTED.format("'" + "a" * 99 + "'", 1)], "first-wall", "wrong", "but it must be a number"),
        (['predict("first-wall")'], "first-wall", "wrong", "but was given nothing"),
        ([PREDICTED.format(1, 1)], "second-wall", "missing", "no cell answers it"),
        (['if False:\n    predict("first-wall")'], "first-wall", "missing", "its cell did not run to the answer"),
        (["import os; os._exit(0)", PREDICTED.format(1, 1)], "first-wall", "missing", "its cell did not run to"),
        (["while True: pass", PREDICTED.format(1, 1)], "first-wall", "wrong", "which is less than"),
        (['construct("lost-expert", topk_experts=[[3, 2], [0, 1], [0, 2]])'], "lost-expert", "right", ""),
        ([kernel("combine")], "combine", "right", ""),
        ([kernel("combine", "total = ZERO", "total = ZERO + 1")], "combine", "wrong", "must be"),
        ([kernel("combine", "total = ZERO", "while True: pass")], "combine", "stopped", "no verdict after 15 seconds"),
        ([EXERCISES["combine"].cell(EXERCISES["combine"].unsolved)], "combine", "unsolved", "as it was found"),
        ([kernel("combine")], "slot-order", "missing", "no cell answers it"),
        ([kernel("new-activation")], "new-activation", "right", ""),
        ([kernel("new-activation", "2 * positive", "positive")], "new-activation", "wrong", r"d_x\[\d, \d\] is "),
        ([kernel("saved-bytes", "kept = {}", "while True: pass")], "saved-bytes", "stopped", "no verdict after 15"),
        ([EXERCISES["graph-safe"].cell(EXERCISES["graph-safe"].unsolved)], "graph-safe", "unsolved",
         "the torch project is as it was found"),
    ],
)  # fmt: skip
def test_each_answer_has_its_verdict(cells, exercise, verdict, message, tmp_path):
    notebook(tmp_path / "one.ipynb", *cells)
    found = graded(tmp_path, limits=guard.Limits(15))[exercise]
    assert found[:4] == ("one.ipynb", exercise, EXERCISES[exercise].kind, verdict)
    assert (re.search(message, found.message) is not None) if message else not found.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "one.ipynb is not a notebook"),
        ("{}", "one.ipynb is not a notebook"),
        ('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "no cell answers an exercise"),
        ("[" * 100_000, "one.ipynb is not a notebook"),
    ],
)
def test_what_is_no_submission_is_unreadable(text, message, tmp_path):
    (tmp_path / "one.ipynb").write_text(text)
    (found,) = grading.grade(tmp_path)
    assert found.verdict == "unreadable" and message in found.message


def test_a_submission_that_takes_away_the_others_changes_no_verdict(tmp_path, monkeypatch):
    for name in ("a", "b"):
        notebook(tmp_path / f"{name}.ipynb", 'construct("lost-expert", topk_experts=[[3, 2], [0, 1], [0, 2]])')
    run = grading._run
    monkeypatch.setattr(grading, "_run", lambda *given: (tmp_path / "b.ipynb").unlink(missing_ok=True) or run(*given))
    found = {one.submission: one.verdict for one in grading.grade(tmp_path) if one.exercise == "lost-expert"}
    assert found == {"a.ipynb": "right", "b.ipynb": "right"}


def test_a_link_is_no_submission_and_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "one.ipynb").symlink_to(tmp_path / "secret")
    (found,) = grading.grade(tmp_path)
    assert found.verdict == "unreadable" and found.message == "one.ipynb is a link, but a submission is a file"


@pytest.mark.parametrize("name", ["M\udcfcller.ipynb", "Müller.ipynb"])  # the first has a byte that is no UTF-8
def test_a_name_in_any_encoding_is_graded(name, tmp_path, monkeypatch):
    notebook(tmp_path / "in" / name, PREDICTED.format(134_217_728, 2**30))
    assert moeblaze("course", "grade", tmp_path / "in", "--out", tmp_path / "x.csv").exit_code == 0
    first, *_ = csv.DictReader((tmp_path / "x.csv").read_text("utf-8").splitlines())
    assert first["submission"] == name.replace("\udcfc", r"\udcfc") and first["verdict"] == "right"


def test_a_check_may_take_as_long_as_in_the_notebook():
    assert inspect.signature(course.grade).parameters["limit"].default == in_subprocess.LIMIT_SECONDS


@pytest.mark.parametrize("option", ["--memory=inf", "--memory=1e300", "--limit=10000000000"])
def test_a_limit_that_no_machine_has_is_refused(option, tmp_path):
    notebook(tmp_path / "one.ipynb", "1")
    done = moeblaze("course", "grade", tmp_path, "--out", tmp_path / "x.csv", option)
    assert done.exit_code == 2 and option.partition("=")[0] in done.output and not (tmp_path / "x.csv").exists()


def test_a_submission_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "MOST_BYTES", 10)
    notebook(tmp_path / "one.ipynb", "1")
    (found,) = grading.grade(tmp_path)
    assert found.verdict == "unreadable" and "but a submission has at most 10" in found.message


# Hostile submissions -------------------------------------------------------------------------------------------------

OUTSIDE = "import pathlib; pathlib.Path({!r}).write_text('harm')"
SOCKET = "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(('127.0.0.1', {}))"
FORKS = "import os\nwhile True:\n    os.fork()"
MEMORY = "held = []\nfor block in range(400): held.append(b'1' * 2**28)"
SIGNAL = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"


def hostile_cells(outside, port):
    """The code of hostile submissions, by what they try."""
    return {
        "an endless loop": "while True: pass",
        "a fork bomb": FORKS,
        "100 GB of memory": MEMORY,
        "a file writer": OUTSIDE.format(str(outside)),
        "a socket": SOCKET.format(port),
        "a signal": SIGNAL,
        "an endless loop in finally": "def loop():\n    try:\n        while True: pass\n    finally: loop()\nloop()",
    }


@contextlib.contextmanager
def listening():
    """A port of this machine, and a function that tells whether someone has connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def connected():
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                return True
            return False

        yield server.getsockname()[1], connected


def left_with(mark):
    """The processes that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (mark.encode() in path.read_bytes())
    return found


def test_thirty_submissions_of_which_some_are_hostile(tmp_path):
    """In 10 minutes, with no process or file left; the answers of all others have their verdicts."""
    folder, outside, mark = tmp_path / "submissions", tmp_path / "harmed", str(uuid.uuid4())
    right, wrong = PREDICTED.format(134_217_728, 2**30), PREDICTED.format(1, 1)
    for number in range(21):
        notebook(folder / f"student {number}" / "00.ipynb", right if number % 2 else wrong)
    with listening() as (port, connected):
        for name, cell in hostile_cells(outside, port).items():
            notebook(folder / name / "00.ipynb", f"{cell}\n{right}")
        notebook(folder / "a kernel" / "a.ipynb", kernel("combine", "total = ZERO", "while True: pass"))
        notebook(
            folder / "a kernel" / "b.ipynb", kernel("missing-barrier", "int count = 0;", "int count = 0; exit(0);")
        )
        out = tmp_path / "grades.csv"
        command = [
            sys.executable,
            "-m",
            "moeblaze_ref",
            "course",
            "grade",
            str(folder),
            "--out",
            str(out),
            "--limit",
            "15",
        ]
        done = processes.run(command, limit=600, env=os.environ | {"MOEBLAZE_TEST_MARK": mark})
        assert done.returncode == 0, done.stderr
        assert not connected()
    assert not outside.exists() and not left_with(mark)
    rows = [Grade(**row) for row in csv.DictReader(out.read_text().splitlines())]
    verdicts = {(row.submission.split("/")[0], row.exercise): row.verdict for row in rows}
    assert len({row.submission for row in rows}) == 30
    for number in range(21):
        assert verdicts[f"student {number}", "first-wall"] == ("right" if number % 2 else "wrong")
    assert verdicts["a file writer", "first-wall"] == verdicts["a socket", "first-wall"] == "wrong"
    assert verdicts["a fork bomb", "first-wall"] == "stopped"
    assert verdicts["100 GB of memory", "first-wall"] in ("stopped", "wrong")  # by our limit, or by the system's
    assert verdicts["a kernel", "combine"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--out", "x.csv"], "there is no folder nowhere"),
        (["empty", "--out", "x.csv"], "has no notebook"),
        (
            ["full", "--out", "there.csv"],
            "there.csv exists, and this command did not write it: its first line is not",
        ),
    ],
)
def test_a_folder_that_cannot_be_graded(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.csv").write_text("mine")
    notebook(tmp_path / "full" / "one.ipynb", PREDICTED.format(1, 1))
    done = moeblaze("course", "grade", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
    assert (tmp_path / "there.csv").read_text() == "mine" and not (tmp_path / "x.csv").exists()


def test_a_message_is_no_formula_of_a_spreadsheet(tmp_path):
    odd = "class Odd(Exception): pass\nOdd.__name__ = '=cmd()'\ndef fail(): raise Odd"
    notebook(tmp_path / "=one.ipynb", odd, PREDICTED.format("fail()", 1))
    assert moeblaze("course", "grade", tmp_path, "--out", tmp_path / "x.csv").exit_code == 0
    messages = [row["message"] for row in csv.DictReader((tmp_path / "x.csv").read_text().splitlines())]
    assert any(message.startswith("'=cmd()") for message in messages)
    assert not [message for message in messages if message.startswith("=")]
    assert "\n'=one.ipynb," in (tmp_path / "x.csv").read_text() and "\n=" not in (tmp_path / "x.csv").read_text()


CONTROL = re.compile(r"[^\n\r -~¡-\U0010ffff]")  # ESC, BEL and the others; csv ends its lines by \r\n
RAISES = "raise ValueError('\\033[2J\\a\\x9b1m')\n"


@pytest.mark.parametrize(
    ("cell", "exercise", "message"),
    [
        (f"def fail():\n    {RAISES}" + PREDICTED.format("fail()", 1), "first-wall", r"ValueError: \x1b[2J\x07\x9b1m"),
        (EXERCISES["saved-bytes"].cell(RAISES), "saved-bytes", r"ValueError: \x1b[2J\x07\x9b1m"),
        (kernel("missing-barrier", "int count = 0;", "int count = 0; \x1b[2J\a"), "missing-barrier", r"\x1b"),
    ],
)
def test_a_message_cannot_steer_a_terminal(cell, exercise, message, tmp_path):
    notebook(tmp_path / "one.ipynb", cell)
    assert moeblaze("course", "grade", tmp_path, "--out", tmp_path / "x.csv").exit_code == 0
    text = (tmp_path / "x.csv").read_text("utf-8")
    assert not CONTROL.search(text)
    assert message in next(row["message"] for row in csv.DictReader(text.splitlines()) if row["exercise"] == exercise)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("=cmd\x1b[2J", r"=cmd\x1b[2J"),
        ("one\nright two\ttabs", r"one\nright two\ttabs"),
        ("\u202eleft", r"\u202eleft"),
        ("[bold]é[]b", "[bold]é[]b"),
    ],
)
def test_a_name_cannot_steer_a_terminal_or_the_table(name, shown, tmp_path):
    notebook(tmp_path / "in" / name / "one.ipynb", PREDICTED.format(1, 1))
    done = moeblaze("course", "grade", tmp_path / "in", "--out", tmp_path / "x.csv")
    assert done.exit_code == 0 and f"{shown}/one.ipynb" in done.stdout and not CONTROL.search(done.stdout)
    text = (tmp_path / "x.csv").read_text("utf-8")
    assert f"{shown}/one.ipynb" in text and not CONTROL.search(text)


def test_where_the_network_is_open_it_must_be_allowed(tmp_path, monkeypatch):
    notebook(tmp_path / "one.ipynb", PREDICTED.format(134_217_728, 2**30))
    monkeypatch.setattr(grading, "open_network", lambda: True)
    refused = moeblaze("course", "grade", tmp_path, "--out", tmp_path / "x.csv")
    assert refused.exit_code == 2 and "--allow-network" in refused.output
    assert moeblaze("course", "grade", tmp_path, "--out", tmp_path / "x.csv", "--allow-network").exit_code == 0
    assert "one.ipynb,first-wall,predict,right," in (tmp_path / "x.csv").read_text()


# Progress ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A reader without progress, and a copy of the notebooks in the folder where the reader stands."""
    monkeypatch.setenv("MOEBLAZE_PROGRESS", str(tmp_path / "own" / "progress.json"))
    monkeypatch.chdir(tmp_path)
    for path in (SHEETS / "exercises").glob("0*.ipynb"):
        (tmp_path / "moeblaze_course" / "notebooks" / "exercises").mkdir(parents=True, exist_ok=True)
        (tmp_path / "moeblaze_course" / "notebooks" / "exercises" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "own" / "progress.json"


def test_what_is_solved_is_listed_until_it_is_reset(own):
    desk = Desk(on_solved=progress.note)
    with pytest.raises(Unsolved):
        desk.predict("first-wall", x=1, routed_x=1)
    assert not progress.solved() and not own.exists()
    desk.predict("first-wall", x=134_217_728, routed_x=2**30)
    rows = {row["exercise"]: row for row in json.loads(moeblaze("course", "list", "--json").stdout)}
    assert rows.keys() == EXERCISES.keys() and rows["first-wall"]["solved"] == datetime.date.today().isoformat()
    assert [name for name, row in rows.items() if row["solved"]] == ["first-wall"]
    assert {name: row["difficulty"] for name, row in rows.items()} == {
        name: exercise.difficulty for name, exercise in EXERCISES.items()
    }
    listed = moeblaze("course", "list").stdout
    assert f"1 of {len(EXERCISES)} solved" in listed and "difficulty" in listed

    path = Path("moeblaze_course/notebooks/exercises/00_memory_wall.ipynb")
    before = path.read_text()
    path.write_text(before.replace("routed_x=...", "routed_x=2**30"))
    assert path.read_text() != before
    assert "first-wall is as it was found" in moeblaze("course", "reset", "first-wall").stdout
    assert path.read_text() == before and not progress.solved()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reset", "first-wal"], "Did you mean 'first-wall'?"),
        (["reset", "first-wall", "--folder", "nowhere"], "there is no nowhere/00_memory_wall.ipynb; `moeblaze lab`"),
        (["reset", "first-wall", "--folder", "old"], "00_memory_wall.ipynb is not a notebook: ValidationError"),
        (["reset", "first-wall", "--folder", "binary"], "00_memory_wall.ipynb is not a notebook: UnicodeDecodeError"),
    ],
)
def test_what_cannot_be_reset(own, arguments, message):
    for folder, text in {"old": b"{}", "binary": b"\xf7"}.items():
        Path(folder).mkdir()
        (Path(folder) / "00_memory_wall.ipynb").write_bytes(text)
    done = moeblaze("course", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "progress.json is not a JSON object, but it must be one"),
        ('{"first-wall": 3}', "first-wall is 3, but it must be a day such as 2026-01-31"),
        ('{"first-wall": "\\ud800"}', r"first-wall is '\ud800', but it must be a day"),
    ],
)
def test_a_damaged_file_of_progress_is_named(own, text, message):
    own.parent.mkdir()
    own.write_text(text)
    done = moeblaze("course", "list")
    assert done.exit_code == 2 and "progress.json" in done.output and message in " ".join(done.output.split())


def test_a_folder_in_place_of_the_file_of_progress_is_named(own):
    own.mkdir(parents=True)
    done = moeblaze("course", "list")
    assert done.exit_code == 2 and "progress.json: Is a directory" in "".join(done.output.splitlines())
