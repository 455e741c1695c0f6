"""The editor of the kernel exercises without a page: verdicts, messages on their lines, the stepper, the bundle."""

import hashlib
import json
import re
import shutil
import struct
import threading

import pytest
from IPython.display import Markdown
from test_cli import moeblaze

from moeblaze_ref.core.paths import PACKAGE, ROOT
from moeblaze_ref.course import exercises
from moeblaze_ref.course.editor import KernelEditor, messages
from moeblaze_ref.course.exercises.desk import Desk, Unsolved
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS
from moeblaze_ref.verify import recording

FOLDER = PACKAGE / "course" / "editor"
CUDA, NUMBA, CAPSTONE = (EXERCISES[name] for name in ("missing-barrier", "combine", "fused-expert"))


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    """Each test keeps its own texts."""
    monkeypatch.setenv("MOEBLAZE_PROGRESS", str(tmp_path / "progress.json"))


class SaysAtOnce(Desk):
    """A desk whose verdict is known beforehand: a text, or an error to raise."""

    def __init__(self, verdict):
        super().__init__()
        self.verdict = verdict

    def check_text(self, name, text, stop=()):
        self.checked = name, text
        if isinstance(self.verdict, BaseException):
            raise self.verdict
        return Markdown(self.verdict)


class WaitsForStop(Desk):
    """A desk whose check ends by the button alone."""

    def check_text(self, name, text, stop=()):
        (button,) = stop
        assert not button.poll(), "it was not pressed yet"
        waiting.set()
        try:
            button.recv()
        except EOFError:
            raise KeyboardInterrupt from None


waiting = threading.Event()


def press(editor, what, text=None):
    """What the page sends when a button is pressed; returns when it is done."""
    editor._handle_custom_msg({"do": what} | ({} if text is None else {"text": text}), [])
    if what != "stop":
        editor.wait()


def line_of(text, part):
    (number,) = (number for number, line in enumerate(text.splitlines(), start=1) if part in line)
    return number


# ---- the check -----------------------------------------------------------------------------------------


def test_it_opens_with_the_unsolved_kernel_and_hints_are_of_it():
    editor = exercises.edit("missing-barrier")
    assert (editor.text, editor.language, editor.limit) == (CUDA.unsolved, "c++", 120)
    assert any(hint in exercises.hint().data for hint in CUDA.hints)
    assert exercises.edit("combine").language == "python"
    assert exercises.edit("fused-expert").text == CAPSTONE.unsolved


def test_a_text_outlives_its_editor_until_the_exercise_is_reset(tmp_path, monkeypatch):
    editor = KernelEditor("combine", SaysAtOnce("right"))
    editor.text = "typed"  # by the page
    assert KernelEditor("combine", Desk()).text == "typed"
    press(editor, "check", "checked")
    again = KernelEditor("combine", Desk())
    assert (again.text, again.unsolved) == ("checked", NUMBA.unsolved)
    assert KernelEditor("missing-barrier", Desk()).text == CUDA.unsolved

    (sheet,) = (ROOT / "notebooks" / "exercises" / f"{one.course}.ipynb" for one in SHEETS if NUMBA in one.exercises)
    shutil.copy(sheet, tmp_path)
    assert moeblaze("course", "reset", "combine", "--folder", tmp_path).exit_code == 0
    assert KernelEditor("combine", Desk()).text == NUMBA.unsolved


def test_a_kept_file_that_is_no_text_is_said_and_stays(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MOEBLAZE_PROGRESS", str(tmp_path / "progress.json"))
    path = tmp_path / "drafts" / "combine.txt"
    path.parent.mkdir()
    path.write_bytes(b"typed \xff")
    editor = KernelEditor("combine", Desk())
    assert editor.text == NUMBA.unsolved
    assert f"your text of combine cannot be read from {path}: " in capsys.readouterr().err
    editor.text = "typed again"
    assert "your text of combine is not kept: " in capsys.readouterr().err
    assert path.read_bytes() == b"typed \xff"


def test_a_text_that_cannot_be_kept_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MOEBLAZE_PROGRESS", str(tmp_path / "file" / "progress.json"))
    (tmp_path / "file").touch()
    editor = KernelEditor("combine", SaysAtOnce("right"))
    editor.text = "mine"
    assert "your text of combine is not kept" in capsys.readouterr().err and editor.text == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("combin", "unknown exercise 'combin'. Did you mean 'combine'?"),
        ("first-wall", "first-wall is a prediction: its cell calls predict"),
    ],
)
def test_an_exercise_without_a_kernel_is_refused(name, message):
    with pytest.raises(ValueError) as error:
        exercises.edit(name)
    assert message in str(error.value)


def test_run_hands_the_text_of_the_page_to_the_check():
    desk = SaysAtOnce("**Right, within budget.** Why.\n\n```text\n<1> right\n```")
    editor = KernelEditor("combine", desk)
    press(editor, "check", "mine")
    assert desk.checked == ("combine", "mine") and editor.text == "mine"
    assert editor.right and editor.doing == "" and editor.marks == []
    assert "<strong>Right, within budget.</strong> Why." in editor.verdict and "&lt;1&gt; right" in editor.verdict


def test_a_wrong_kernel_is_shown_on_its_line_with_the_hint_below():
    said = "L=1 (one token): IndexError (combine.py, line 7)\n\nHint: <b>none</b>"
    editor = KernelEditor("combine", SaysAtOnce(Unsolved(said)))
    press(editor, "check", NUMBA.unsolved)
    assert not editor.right and editor.verdict.endswith("Hint: &lt;b&gt;none&lt;/b&gt;</pre>")
    assert [(one["line"], one["message"]) for one in editor.marks] == [(7, said.partition("\n\n")[0])]


def test_stop_ends_the_check_and_a_second_run_waits_for_its_end():
    editor = KernelEditor("combine", WaitsForStop())
    waiting.clear()
    editor.run("check", "first")
    assert waiting.wait(60) and editor.doing == "check"
    editor.run("check", "second")
    assert editor.text == "first", "the second is not begun"
    press(editor, "stop")
    editor.wait()
    assert editor.doing == "" and "You stopped it" in editor.verdict and not editor.marks


def test_an_unexpected_error_is_shown_too():
    editor = KernelEditor("combine", SaysAtOnce(RuntimeError("no compiler")))
    press(editor, "check", "")
    assert editor.verdict == "<pre>RuntimeError: no compiler</pre>" and editor.doing == ""


def test_an_action_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="unknown action 'format'. Valid: check, step"):
        KernelEditor("combine", Desk()).run("format", "")


def test_a_check_of_its_own_process_says_the_line_of_the_text():
    """Lines count from the first of the text; the magic's count from its cell's."""
    editor = KernelEditor("combine", Desk())
    press(editor, "check", NUMBA.solution.replace("total = ZERO", "total = none"))
    assert [one["line"] for one in editor.marks] == [line_of(NUMBA.solution, "total = ZERO")]
    assert "NameError" in editor.verdict


# ---- messages on lines -----------------------------------------------------------------------------------

COMPILED = """mine.cu does not compile:
mine.cu: In function 'void mine(int*)':
mine.cu:4:5: error: 'x' was not declared
    4 |     x;
include/common.cuh:9:1: error: not of this file
mine.cu:5:1: fatal error: no end
mine.cu:2:1: warning: strange"""


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        (COMPILED, [(4, "'x' was not declared"), (5, "no end"), (2, "strange")]),
        ("L=1: kernel mine, thread (0, 0, 0): out-of-bounds write (mine.cu, line 4)", [(4, "L=1: kernel mine")]),
        ("L=1: __syncthreads at mine.cu:4 is not reached by all", [(4, "L=1: __syncthreads")]),
        ("mine.cu, line 2: imports os, but the file of a kernel may", [(2, "mine.cu, line 2")]),
        ("L=1: out[0] is 3, but must be 4", []),
    ],
)
def test_a_verdict_is_on_the_lines_that_it_names(said, lines):
    found = messages.of_verdict(said, "mine.cu")
    assert [line for line, _, _ in found] == [line for line, _ in lines]
    assert all(one.message.startswith(begin) for one, (_, begin) in zip(found, lines, strict=True))
    assert [one.severity for one in found] == ["error"] * min(len(found), 2) + ["warning"] * (len(found) - 2)


@pytest.mark.parametrize("exercise", [CUDA, NUMBA], ids=lambda exercise: exercise.language)
def test_the_line_that_declares_a_kernel_is_found(exercise):
    number = messages.declaration(exercise.solution, exercise.entry)
    assert re.search(rf"(void|def) {exercise.entry}\(", exercise.solution.splitlines()[number - 1])
    assert messages.declaration("", "mine") == 1


# ---- the stepper -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepped():
    """An editor that has recorded a kernel with a race, in a process of its own."""
    editor = KernelEditor("missing-barrier", Desk())
    press(editor, "step", CUDA.unsolved)
    return editor


def test_a_race_is_on_both_of_its_lines(stepped):
    found = {one["line"] for one in stepped.marks}
    wrote, read = line_of(CUDA.unsolved, "counts[threadIdx.x] = "), line_of(CUDA.unsolved, "+= counts[")
    assert found == {wrote, read}
    assert stepped.verdict.startswith("<pre>race on counts[") and not stepped.right


def test_the_page_moves_through_the_steps_of_a_warp(stepped):
    assert stepped.warps[:2] == ["block 0, warp 0", "block 0, warp 1"] == [stepped.warp, stepped.warps[1]]
    seen = []
    for number in (1, stepped.steps):
        stepped.step = number
        width, _ = struct.unpack(">II", stepped.picture[16:24])
        assert stepped.picture.startswith(b"\x89PNG") and width == 1100
        assert f"step {number} of {stepped.steps}" in stepped.alt
        assert stepped.line in stepped.lanes and sum(stepped.lanes.values()) <= 32
        seen.append((stepped.picture, stepped.line))
    assert len(dict(seen)) == 2 and seen[0][1] != seen[1][1]
    stepped.warp = "block 0, warp 1"
    assert stepped.step == 1 and "block 0, warp 1" in stepped.alt


def test_the_next_run_takes_the_stepper_away(monkeypatch, stepped):
    editor = KernelEditor("missing-barrier", Desk())
    monkeypatch.setattr(recording, "record", lambda *_, **__: stepped._stepper.record)
    press(editor, "step", CUDA.unsolved)
    assert editor.warps and editor.picture and editor.line

    def refused(*_, **__):
        raise ValueError("missing-barrier.cu does not compile:\nmissing-barrier.cu:7:17: error: no such name")

    monkeypatch.setattr(recording, "record", refused)
    press(editor, "step", "none")
    assert editor.warps == [] and editor.picture == b"" and editor.line is None
    assert editor.marks == [{"line": 7, "severity": "error", "message": "no such name"}]


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("L=13 (small): lengths[2] is 1, but must be 3 (expert 2); 1 of 4", "lengths[expert] = count;"),
        ("L=13 (small): lengths[9] is 1, but must be 3", None),
        ("L=13 (small): lengths[1, 2] is 1, but must be 3", None),
        ("L=13 (small): dense_map[0, 0] is 1, but must be 3", None),
        ("L=13 (small): counts[0] is 1, but must be 3", None),
        ("too serial: threads is 1, but threads >= R asks for 2", None),
    ],
)
def test_a_wrong_element_is_on_the_line_that_wrote_it(stepped, said, part):
    found = messages.of_element(stepped._stepper.record, said, CUDA.file)
    assert found == ([(line_of(CUDA.unsolved, part), "error", said)] if part else [])


def test_a_wrong_verdict_without_a_line_is_where_a_launch_shows_its_cause(monkeypatch, stepped):
    said = "L=13 (small): depends on the order of threads (seed 1): lengths[2] is 1, but in their natural order 3"
    editor = KernelEditor("missing-barrier", SaysAtOnce(Unsolved(f"{said}\n\nhint() gives a hint")))
    asked = []
    monkeypatch.setattr(recording, "record", lambda *_, **options: asked.append(options) or stepped._stepper.record)
    press(editor, "check", CUDA.unsolved)
    lines = [line_of(CUDA.unsolved, part) for part in ("lengths[expert] = ", "counts[threadIdx.x] = ", "+= counts[")]
    assert {mark["line"] for mark in editor.marks} == {*lines}
    assert asked[0]["shape"] == said, "the launch is on the case that failed"


def test_a_verdict_without_any_line_is_on_the_kernel(monkeypatch):
    def fails(*_, **__):
        raise TimeoutError

    editor = KernelEditor("missing-barrier", SaysAtOnce(Unsolved("L=1: too serial: accesses is 9")))
    monkeypatch.setattr(recording, "record", fails)
    press(editor, "check", CUDA.unsolved)
    (mark,) = editor.marks
    assert mark["line"] == line_of(CUDA.unsolved, "__global__") and mark["message"] == "L=1: too serial: accesses is 9"


def test_a_fault_is_on_its_line():
    editor = KernelEditor("missing-barrier", Desk())
    wild = CUDA.solution.replace("lengths[expert]", "lengths[expert + 1000]")
    assert wild != CUDA.solution
    press(editor, "step", wild)
    (fault,) = editor.marks
    assert fault["line"] == line_of(wild, "lengths[expert + 1000]") and "out-of-bounds write" in fault["message"]
    assert editor.warps


def test_a_capstone_is_launched_as_its_header_says():
    editor = KernelEditor("fused-expert", Desk())
    press(editor, "step", CAPSTONE.solutions["bronze"])
    assert not editor.verdict and editor.warps[0] == "block 0, warp 0" and "expert_up" in editor.alt


def test_a_numba_kernel_has_no_stepper():
    editor = KernelEditor("combine", Desk())
    press(editor, "step", NUMBA.solution)
    assert "the stepper is for CUDA kernels" in editor.verdict and editor.warps == []


# ---- the bundle -----------------------------------------------------------------------------------------

BUNDLE = (FOLDER / "bundle.js").read_text()
PACKAGES = {
    path.removeprefix("node_modules/"): package["version"]
    for path, package in json.loads((FOLDER / "package-lock.json").read_text())["packages"].items()
    if path and not package.get("dev") and not package.get("optional")
}


def test_the_bundle_is_built_from_the_committed_source():
    """By make editor."""
    source = hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in ("editor.js", "package-lock.json")))
    assert BUNDLE.partition("\n")[0].endswith(f"with sha256 {source.hexdigest()}")


def test_the_licences_of_all_packages_in_the_bundle_are_kept():
    licences = (FOLDER / "bundle.LICENSE.txt").read_text()
    heads = re.findall(r"^(@?[\w./-]+) (\d[\w.]*)$", licences, re.MULTILINE)
    assert dict(heads) == PACKAGES and licences.count("Permission is hereby granted, free of charge") == len(PACKAGES)


def test_the_packages_have_exact_versions_and_the_bundle_loads_nothing():
    asked = json.loads((FOLDER / "package.json").read_text())
    versions = {**asked["dependencies"], **asked["devDependencies"]}
    assert versions and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values())
    assert not re.search(r"""(?:^|[;}])import[\s{(*"]|\bfetch\(|XMLHttpRequest|@import|url\(\s*["']?http""", BUNDLE)


def test_the_bundle_keeps_the_wheel_small():
    assert len(BUNDLE) < 700_000
