"""Every exercise fails as it is found and is right once solved; every bad answer is told what is wrong with it."""

import itertools
import math
import pkgutil
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from types import ModuleType

import nbformat
import pytest
from cheating_kernels import ALMOST, BY_OTHER_MEANS, CHEATING, RIGHT_TOO
from IPython.core.interactiveshell import InteractiveShell
from serial_kernels import SERIAL
from test_notebooks import ROOT, execute
from traitlets.config import Config

from moeblaze_ref.course.exercises import Unsolved, notebooks
from moeblaze_ref.course.exercises.desk import Desk
from moeblaze_ref.course.exercises.exercise import KINDS, Construction, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import cuda_source, helpers
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS
from moeblaze_ref.verify import guard, in_subprocess
from moeblaze_ref.verify.checker.budgets import DIVISION, MEANS

FILES = notebooks.files(ROOT / "notebooks")
KERNELS = [name for name, exercise in EXERCISES.items() if isinstance(exercise, KernelExercise)]
PREDICTIONS = [name for name, exercise in EXERCISES.items() if isinstance(exercise, Prediction)]
CONSTRUCTIONS = [name for name, exercise in EXERCISES.items() if isinstance(exercise, Construction)]
# What is said of an exercise as it is found, by its kind. A hole is found wrong: it compiles, and harms nothing.
FOUND = dict.fromkeys(KINDS, r"\[.*\] is .*, but must be|depends on the order of threads") | {
    "predict": r"is still \.\.\.",
    "construct": r"is still \.\.\.",
    "torch": "but must be|saves .* bytes, but|more than the account|nonzero.* makes a shape|the fullest expert gets",
}


@pytest.fixture(scope="module")
def shell():
    """A shell that has run the first cell of a sheet."""
    quiet = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell(config=quiet, user_module=ModuleType("sheet"))
    assert shell.run_cell(notebooks.SETUP_TO_CONSTRUCT).success
    return shell


def answer_cell(kind, name):
    """The code cell of an exercise, from the notebook's file."""
    (sheet,) = (sheet.course for sheet in SHEETS if name in {exercise.name for exercise in sheet.exercises})
    cells = nbformat.read(ROOT / "notebooks" / kind / f"{sheet}.ipynb", as_version=4).cells
    return next(cell.source for cell in cells if cell.id == f"{name}-answer")


# Every exercise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXERCISES)
def test_as_it_is_found_it_fails(shell, name):
    found = shell.run_cell(answer_cell("exercises", name)).error_in_exec
    assert isinstance(found, Unsolved)
    assert re.search(FOUND[EXERCISES[name].kind], str(found))


@pytest.mark.parametrize("name", EXERCISES)
def test_its_solution_is_right(shell, name):
    found = shell.run_cell(answer_cell("solutions", name))
    assert found.error_in_exec is None and found.result.data.startswith("**Right")


@pytest.mark.parametrize("name", KERNELS)
def test_a_right_kernel_of_which_one_thread_does_the_work_is_refused(name):
    with pytest.raises(Unsolved, match="too serial: .*; (one thread does work|the other threads do nothing)"):
        Desk().check(name, changed(EXERCISES[name].solution, SERIAL[name]))
    assert {budget.split()[0] for budget in EXERCISES[name].division} == {*DIVISION}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_cheats_is_refused(name):
    with pytest.raises(Unsolved) as error:
        Desk().check(name, changed(EXERCISES[name].solution, CHEATING[name]))
    assert "does not compile" not in str(error.value)


@pytest.mark.parametrize("name", BY_OTHER_MEANS)
def test_a_right_kernel_that_works_by_other_means_is_refused(name):
    with pytest.raises(Unsolved, match="by other means: "):
        Desk().check(name, changed(EXERCISES[name].solution, BY_OTHER_MEANS[name]))


@pytest.mark.parametrize("name", ALMOST)
def test_what_the_exercise_is_about_is_seen(name):
    change, says = ALMOST[name]
    with pytest.raises(Unsolved, match=says):
        Desk().check(name, changed(EXERCISES[name].solution, [change]))


def test_a_copy_into_a_stage_that_is_still_read_is_seen():
    """One copy more is under way than there are other stages."""
    text = EXERCISES["async-copies"].solution.replace("step < STAGES - 1;", "step < STAGES;")
    text = text.replace("step + STAGES - 1", "step + STAGES").replace(
        "cp_async_wait<STAGES - 1>", "cp_async_wait<STAGES>"
    )
    with pytest.raises(Unsolved, match=r"depends on the order of threads \(seed \d\): y\[0, 0\] is"):
        Desk().check("async-copies", text)


@pytest.mark.parametrize("name", RIGHT_TOO)
def test_a_solution_may_have_other_words(name):
    Desk().check(name, changed(EXERCISES[name].solution, RIGHT_TOO[name]))


def test_each_means_is_what_some_exercise_is_about():
    bound = {budget.split()[0] for name in BY_OTHER_MEANS for budget in EXERCISES[name].budgets}
    assert {*MEANS} <= bound


def changed(text, changes):
    """The text with each part replaced; it has each of them once."""
    for part, in_its_place in changes:
        assert text.count(part) == 1, part
        text = text.replace(part, in_its_place)
    return text


@pytest.mark.parametrize("name", PREDICTIONS + CONSTRUCTIONS)
def test_an_answer_fits_the_page_and_what_it_is_compared_with_exists(name):
    for kind in ("exercises", "solutions"):
        assert max(map(len, answer_cell(kind, name).splitlines())) <= 100
    exercise = EXERCISES[name]
    pkgutil.resolve_name(exercise.computed_by if name in PREDICTIONS else exercise.checked_by)


def test_there_are_enough_of_each_kind():
    kinds = Counter(exercise.kind for exercise in EXERCISES.values())
    assert (
        kinds["numba"] >= 15
        and kinds["cuda"] >= 15
        and kinds["bug"] >= 6
        and kinds["torch"] == 8
        and kinds.keys() == KINDS.keys()
    )
    assert len(EXERCISES) >= 60
    assert len(EXERCISES) == sum(len(sheet.exercises) for sheet in SHEETS), "names are unique"


@pytest.mark.parametrize("course", ["06_hopper", "07_megablocks"])
def test_the_sheets_about_kernels_have_kernels_to_write(course):
    (sheet,) = (sheet for sheet in SHEETS if sheet.course == course)
    assert sum(exercise.kind in ("cuda", "numba") for exercise in sheet.exercises) >= 4


def test_no_two_kernels_are_near_copies():
    """What a reader writes in one hole is in no other one: the holes of a task have at most one line in common."""
    holes = {name: hole(EXERCISES[name]) for name in KERNELS if EXERCISES[name].kind != "bug"}
    for one, other in itertools.combinations(holes, 2):
        assert len(holes[one] & holes[other]) <= 1, (one, other)


def hole(exercise):
    """The lines of the solution that a reader has to write, without those that every kernel has."""
    lines = {line.strip() for line in exercise.solution.splitlines()}
    return (
        lines - {line.strip() for line in exercise.unsolved.splitlines()} - {"cuda.syncthreads()", "__syncthreads();"}
    )


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_a_budget_for_what_it_writes(name):
    assert any(budget.startswith(("written", "sectors")) for budget in EXERCISES[name].budgets)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_notebooks_are_written_from_the_sheets(path):
    """By python -m moeblaze_ref.course.exercises.notebooks."""
    assert path.read_text() == FILES[path]
    notebook = nbformat.reads(FILES[path], as_version=4)
    nbformat.validate(notebook)
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for target in re.findall(r"\]\(([^)]+)\)", "\n".join(texts)):
        assert (path.parent / target).is_file(), target


@pytest.mark.parametrize("name", [*KERNELS, "fused-expert"])
def test_the_cell_above_a_kernel_opens_the_editor(name):
    (sheet,) = (sheet for sheet in SHEETS if EXERCISES[name] in sheet.exercises)
    cells = notebooks.exercise_notebook(sheet).cells
    (answer,) = (at for at, cell in enumerate(cells) if cell.id == f"{name}-answer")
    assert cells[answer - 1].source == f'edit("{name}")'


def test_no_other_notebook_lies_among_them():
    assert {path for kind in ("exercises", "solutions") for path in (ROOT / "notebooks" / kind).iterdir()} == {*FILES}


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_of_the_course_leads_to_its_exercises(path):
    (title,) = (sheet.title for sheet in SHEETS if sheet.course == path.stem)
    assert f"# {int(path.stem[:2])}. {title}\n" in nbformat.read(path, as_version=4).cells[0].source
    (cell,) = (cell for cell in nbformat.read(path, as_version=4).cells if f"exercises/{path.name}" in cell.source)
    assert re.match(r"## (?:\d+\. )?Exercises\n", cell.source)


# Predictions ---------------------------------------------------------------------------------------------------------


X = 134_217_728  # of first-wall; its routed_x is 2**30
HIDDEN = 402_653_184  # of second-wall


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("first-wall", {"x": X, "routed_x": X}, "routed_x is 134,217,728, which is less than what the project"),
        ("first-wall", {"x": X, "routed_x": 2**60}, "routed_x is 1,152,921,504,606,846,976, which is more than what"),
        ("first-wall", {"x": X, "routed_x": 0}, "routed_x is 0, which is not what the project computes"),
        ("first-wall", {"x": X + 1, "routed_x": 0}, "x is 134,217,729, which is nearly, but not exactly, what"),
        ("first-wall", {"x": X, "routed_x": ...}, "routed_x is still ..."),
        ("first-wall", {"x": X, "routed_x": Fraction(1, 2)}, "routed_x is 0.5, which is less than what the project"),
        ("first-wall", {"x": 0.125, "routed_x": 1}, "x is 0.125, as if in GiB, but bytes are asked for"),
        ("first-wall", {"x": X, "routed_x": 1074}, "routed_x is 1,074, as if in MB, but bytes"),
        ("longer-steps", {"times": 2.6}, "times is 2.6, which is more than what"),
        (
            "second-wall",
            {"hidden": HIDDEN, "larger": "hiden"},
            "larger is 'hiden', which is not right ('routed_x' or 'hidden')",
        ),
    ],
)
def test_the_first_wrong_answer_is_named(name, said, message):
    with pytest.raises(Unsolved) as error:
        Desk().predict(name, **said)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("routed_x", "factor"),
    [(2**29 + 1, "below 2"), (2**29, "below 10"), (2**23, "below 1,000"), (9, "of 1,000 or more")],
)
def test_how_far_a_prediction_is_off_is_said_roughly(routed_x, factor):
    with pytest.raises(Unsolved, match=f"less than what the project computes, by a factor {factor}\n"):
        Desk().predict("first-wall", x=X, routed_x=routed_x)


def test_a_number_that_is_not_whole_may_be_rounded():
    assert Desk().predict("longer-steps", times=2.58)


NO_WORD = r"larger is .* \(\w+\), but it must be 'routed_x' or 'hidden'"


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("first-wall", {"x": 1}, "first-wall asks for x, routed_x, but was given x"),
        ("first-wall", {}, "but was given nothing"),
        ("first-wall", {"x": "many", "routed_x": 2}, r"x is 'many' \(str\), but it must be a number"),
        ("first-wall", {"x": X, "routed_x": math.nan}, "routed_x is nan, but it must be finite"),
        ("first-wall", {"x": 1, "routed_x": ...}, r"routed_x is still ...: put your prediction in its place \(bytes\)"),
        ("first-wall", {"x": [1], "routed_x": 2}, r"x is \[1\] \(list\), but it must be a number"),
        *(("second-wall", {"hidden": HIDDEN, "larger": said}, NO_WORD) for said in (None, 1, ["routed_x"])),
    ],
)
def test_what_is_no_prediction_is_no_failure(name, said, message):
    desk = Desk()
    with pytest.raises(Unsolved, match=message):
        desk.predict(name, **said)
    assert not desk.failures


# Constructions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("missing-pair", [2, 3, 0, 1, 1, 2, 0, 3], "token_expert_indices has 8 entries, but five tokens with two"),
        (
            "missing-pair",
            [2, 3, 0, 1, 1, 2, 0, 3, 0, 3],
            r"token_expert_indices\[4\] is 1, which is not the expert of token 2",
        ),
        ("missing-pair", [0] * 10, r"token_expert_indices\[0\] is 0, which is not the expert of token 0 in slot 0"),
        ("lost-expert", [[0, 1], [1, 0]], r"finds tokens of every expert that has some: it counts \[1, 1, 0, 0\]"),
        ("lost-expert", [[0, 1]], "topk_experts has one token, but the routing must have at least two"),
        ("printed-maximum", [0, 1, 2], "the printed form gives 8, but it must be less than 8"),
        ("printed-maximum", [2, 1, 0], "the printed form gives 16, but it must be less than 8"),
        ("printed-maximum", [0, 0, 1], r"gpus is \[0, 0, 1\], but each of the GPUs"),
        ("exactly-one", [[1, 0, 0], [0, 1, 1]], "every expert is in exactly one cluster"),
        ("exactly-one", [[0, 0, 0], [0, 0, 0]], "cluster 0 has no expert"),
        ("exactly-one", [[1, 0, 0], [0, 0, 0]], "cluster 1 has no expert"),
        ("exactly-one", [[1, 1, 0], [1, 0, 0]], "the objective is 4, but it must be below 3, the best with"),
        ("exactly-one", [[2, 0, 0], [0, 1, 1]], "x must hold 0 and 1 only"),
        ("fit-it", [8, 3], "ZeRO 3 gathers all weights"),
        ("fit-it", [1, 2], r"the peak is 119\.3 GB, in the backward, but it must be at most 80"),
        ("fit-it", [8, 0], r"the peak is 84\.2 GB, in the optimizer, but it must be at most 80"),
        ("full-tiles", [[0, 1]] * 4, r"the test finds 'stale gradient': the experts have \[4, 4, 0, 0\] rows"),
        ("full-tiles", [[0, 1], [2, 3]], r"the test finds 'last tile lost': the experts have \[1, 1, 1, 1\] rows"),
        ("small-and-hard", [[0, 1]], "'last expert skipped' passes, though it is wrong"),
        ("small-and-hard", [[0, 1], [2, 3]], "'stale gradient' passes, though it is wrong"),
    ],
)
def test_an_example_that_does_not_do_what_is_asked_counts_as_a_failure(name, said, message):
    desk, (asked,) = Desk(), EXERCISES[name].asked
    with pytest.raises(Unsolved, match=message):
        desk.construct(name, **{asked: said})
    assert desk.failures[name] == 1


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("exactly-one", "x", "x must be a list of whole numbers with 2 dimension"),
        ("exactly-one", [[0.5, 1, 0], [0, 1, 0]], "x must be a list of whole numbers with 2 dimension"),
        ("exactly-one", [[0, 1, 0]], r"x has shape \(1, 3\), but it must be \(2, 3\)"),
        ("exactly-one", [[0, 1, 0], [1]], "x has rows of different lengths, but they must have one length"),
        ("exactly-one", [], "x is empty, but it must hold at least one whole number"),
        ("printed-maximum", [1, 0], r"gpus has shape \(2,\), but it must be \(3,\)"),
        ("printed-maximum", [[0, 1, 2]], "gpus must be a list of whole numbers with 1 dimension"),
        ("lost-expert", [[0, 1, 2]], r"topk_experts has shape \(1, 3\), but it must be \(any, 2\)"),
        ("lost-expert", [[0, 4], [1, 2]], r"topk_experts\[0, 1\] is 4, but there are only 4 experts"),
        ("lost-expert", [[0, 0], [1, 2]], "topk_experts"),
        ("lost-expert", [[0, 2**32 + 1], [1, 2]], r"topk_experts\[0, 1\] is 4294967297, but there are only 4 experts"),
        ("lost-expert", [[0, 1], [2]], "topk_experts has rows of different lengths"),
        ("lost-expert", [], "topk_experts is empty"),
        ("lost-expert", [[]], "topk_experts is empty"),
        ("lost-expert", [[0, 2**70], [1, 2]], "topk_experts must be a list of whole numbers with 2 dimension"),
        ("missing-pair", [], "token_expert_indices is empty"),
        ("fit-it", [4], r"division has shape \(1,\), but it must be \(2,\)"),
        ("fit-it", [3, 1], "expert is 3, but it must be a divisor of the 8 GPUs"),
        ("fit-it", [4, 4], "zero is 4, but it must be"),
        ("full-tiles", [[0, 1, 2]], r"topk_experts has shape \(1, 3\), but it must be \(any, 2\)"),
        ("full-tiles", [[0, 0]], "topk_experts"),
        ("full-tiles", [[0, 1]] * 65, "topk_experts has 65 tokens, but there may be 64 at most"),
        ("small-and-hard", [[0, 4]], r"topk_experts\[0, 1\] is 4, but there are only 4 experts"),
        ("small-and-hard", [[0, 3]] * 5, "topk_experts has 5 tokens, but there may be 4 at most"),
        ("missing-pair", ..., "token_expert_indices is still ...: put your construction in its place"),
    ],
)
def test_an_answer_of_the_wrong_form_is_no_failure(name, said, message):
    desk, (asked,) = Desk(), EXERCISES[name].asked
    with pytest.raises(Unsolved, match=message):
        desk.construct(name, **{asked: said})
    assert not desk.failures


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lost-expert", [[3, 2], [0, 1], [0, 2]]),
        ("exactly-one", [[0, 0, 1], [0, 0, 1]]),
        ("exactly-one", [[0, 1, 0], [0, 0, 1]]),
        ("fit-it", [8, 1]),
        ("full-tiles", [[0, 1], [2, 3]] * 4),
        ("full-tiles", [[1, 3]] * 8 + [[0, 2]] * 4),
        ("small-and-hard", [[3, 1]]),
        ("small-and-hard", [[0, 3], [0, 1], [3, 0]]),
    ],
)
def test_other_examples_are_right_too(name, said):
    (asked,) = EXERCISES[name].asked
    assert Desk().construct(name, **{asked: said}).data.startswith("**Right.**")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("announced-tokens", {"tokens": 5, "entries": 12}, {"tokens": 6}),
        ("uncounted-token", {"expert_2": 1, "expert_3": 2, "rows": 8}, {"expert_2": 2}),
        ("uncounted-token", {"expert_2": 1, "expert_3": 2, "rows": 8}, {"rows": 10}),
        ("d-for-h", {"buffer_if_d": 393_216 * 10**6, "hidden_if_h": 98_304 * 10**6, "symbol": "h"}, {"symbol": "d"}),
        (
            "three-statements",
            {"section_3_1": 1, "section_5_2": 1, "algorithm_1": 3, "difference": 2 * 262_144 * 4096 * 2},
            {"section_5_2": 3},
        ),
        ("expanded-gradient", {"gathered": 2**27, "expanded": 2**29}, {"expanded": 2**27}),
    ],
)
def test_the_papers_errors_by_hand(name, right, wrong):
    assert Desk().predict(name, **right)
    with pytest.raises(Unsolved, match=next(iter(wrong))):
        Desk().predict(name, **(right | wrong))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("zeros-pass", {"largest": 0.0556, "error": 1}, {"largest": 0.05}),
        ("zeros-pass", {"largest": 0.0556, "error": 1}, {"error": 0}),
        ("times-the-bound", {"bound": 0.0062, "units": 1.5, "float32_bound": 1e-5}, {"bound": 0.0031}),
        ("times-the-bound", {"bound": 0.0062, "units": 1.5, "float32_bound": 1e-5}, {"units": 3}),
        ("times-the-bound", {"bound": 0.0062, "units": 1.5, "float32_bound": 1e-5}, {"float32_bound": 4.2e-7}),
    ],
)
def test_weak_tests_and_bounds_by_hand(name, right, wrong):
    assert Desk().predict(name, **right)
    with pytest.raises(Unsolved, match=next(iter(wrong))):
        Desk().predict(name, **(right | wrong))


# Hints and solutions -------------------------------------------------------------------------------------------------


def test_the_second_failure_brings_the_first_hint_and_each_further_one_the_next():
    desk, hints = Desk(), EXERCISES["second-wall"].hints
    assert len(hints) == 2
    said = ["hint() gives a hint, solution() the solution.", *hints, hints[-1]]
    for number, part in enumerate(said):
        with pytest.raises(Unsolved) as error:
            desk.predict("second-wall", hidden=1, larger="hidden")
        assert part in str(error.value)
        assert [hint in str(error.value) for hint in hints] == [hint == part for hint in hints], number
    with pytest.raises(Unsolved) as other:
        desk.predict("capacity", capacity=1, dropped=1, padding=1)
    assert said[0] in str(other.value), "failures are counted for each exercise"


def test_hints_come_one_after_the_other_by_call_or_by_error():
    desk, hints = Desk(), EXERCISES["second-wall"].hints
    for number, hint in enumerate((*hints, hints[-1]), start=1):
        assert desk.hint("second-wall").data == f"**Hint {min(number, 2)} of 2.** {hint}"
    assert EXERCISES["capacity"].hints[0] in desk.hint("capacity").data
    for _ in range(2):
        with pytest.raises(Unsolved) as error:
            desk.predict("capacity", capacity=1, dropped=1, padding=1)
    assert f"Hint 2 of 2: {EXERCISES['capacity'].hints[1]}" in str(error.value), "the first has been shown"


def test_hint_and_solution_of_the_last_exercise_or_of_a_named_one():
    desk = Desk()
    with pytest.raises(ValueError, match="no exercise has been tried yet"):
        desk.hint()
    with pytest.raises(Unsolved):
        desk.predict("first-wall", x=..., routed_x=...)
    assert EXERCISES["first-wall"].hints[0] in desk.hint().data
    assert "layer.R * layer.d" in desk.solution().data
    assert EXERCISES["combine"].solution.rstrip() in desk.solution("combine").data


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda desk: desk.hint("combin"), "unknown exercise 'combin'. Did you mean 'combine'?"),
        (lambda desk: desk.solution("combin"), "Did you mean 'combine'?"),
        (lambda desk: desk.check("combin", ""), "Did you mean 'combine'?"),
        (lambda desk: desk.predict("combine", out=1), "combine is a kernel: its cell begins with %%check"),
        (lambda desk: desk.check("first-wall", ""), "first-wall is a prediction: its cell calls predict"),
        (lambda desk: desk.construct("first-wall", x=1), "first-wall is a prediction: its cell calls predict"),
        (lambda desk: desk.predict("exactly-one", x=1), "exactly-one is a construction: its cell calls construct"),
        (lambda desk: desk.construct("exactly-won", x=1), "Did you mean 'exactly-one'?"),
    ],
)
def test_an_exercise_that_there_is_not(ask, message):
    with pytest.raises(ValueError) as error:
        ask(Desk())
    assert message in str(error.value)


def test_a_notebook_shows_the_message_alone():
    assert Unsolved("a is 1")._render_traceback_() == ["Unsolved: a is 1"]


# Kernels that are not merely wrong -----------------------------------------------------------------------------------


def verdict(name, old="", new=""):
    """What is said of a solution with a change in it."""
    text = EXERCISES[name].solution
    assert not old or text.count(old) == 1
    with pytest.raises(Unsolved) as error:
        Desk().check(name, text.replace(old, new) if old else new)
    return str(error.value)


def line_of(name, part):
    """The line in the cell, the magic being the first."""
    lines = EXERCISES[name].cell(EXERCISES[name].solution).splitlines()
    return next(number for number, line in enumerate(lines, start=1) if part in line)


def test_a_cuda_kernel_that_does_not_compile():
    said = verdict("missing-barrier", "int count = 0;", "int count = none;")
    line = line_of("missing-barrier", "int count = 0;")
    assert "missing-barrier.cu does not compile" in said
    assert f"missing-barrier.cu:{line}:17: error: ‘none’ was not declared" in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("void expert_lengths(", "void mine(", "'expert_lengths' is wanted, but missing-barrier.cu has mine"),
        ("int* lengths,", "int* length,", "unknown parameter 'length'. Did you mean 'lengths'?"),
        ("const int* dense_map", "int* dense_map", "parameter dense_map is an input: const int* dense_map"),
        ('extern "C" ', "", 'it must be declared extern "C" __global__ void NAME(...)'),
        ("lengths[expert] = count;", "lengths[expert + E] = count;", "16 bytes (missing-barrier.cu, line {line})"),
        (
            "lengths[expert] = count;",
            "memset(lengths, 0, 4 * (E + 1)); lengths[expert] = count;",
            "16 bytes (missing-barrier.cu, line {line})",
        ),
        ("lengths[expert] = count;", "if (E > 0) __trap();", "__trap"),
        ("int count = 0;", "int count = 1 / (L - L);", "the kernel ended the process that checked it, by SIG"),
        ("int count = 0;", "int count = 0; exit(0);", "the kernel ended the process that checked it, "),
        ("int count = 0;", "int count = L > 0 && dense_map[0] > L;", "over budget: read is"),
    ],
)
def test_cuda_kernels_that_fit_nothing_or_do_harm(old, new, message):
    assert message.format(line=line_of("missing-barrier", old)) in verdict("missing-barrier", old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("total = ZERO", "total = (ZERO", "SyntaxError: '(' was never closed (combine.py, line {line})"),
        ("total = ZERO", "total = zero", "NameError: name 'zero' is not defined (combine.py, line {line})"),
        ("total = ZERO", "total = 1 // (k - k)", "ZeroDivisionError"),
        ("def combine_kernel", "def kernel", "'combine_kernel' is wanted, but combine.py has kernel"),
        ("token_index_map, out", "token_index_mp, out", "'token_index_mp'. Did you mean 'token_index_map'?"),
        ("@cuda.jit\n", "", "it must be a kernel: a function under @cuda.jit"),
        ("out[token, column] =", "out[token + 1, column] =", "out-of-bounds access to out, which has shape (13, 8)"),
        ("from moeblaze_ref", "raise SystemExit(3)\nfrom moeblaze_ref", "with status 3"),
        ("from moeblaze_ref", "import sys; sys.exit(3)\nfrom moeblaze_ref", "combine.py, line 2: imports sys, but"),
        ("from moeblaze_ref", "raise KeyboardInterrupt\nfrom moeblaze_ref", "the kernel raises KeyboardInterrupt"),
    ],
)
def test_numba_kernels_that_fit_nothing_or_do_harm(old, new, message):
    assert message.format(line=line_of("combine", "total = ZERO")) in verdict("combine", old, new)


@pytest.mark.parametrize(
    ("name", "old", "new", "failures"),
    [
        ("missing-barrier", "int count = 0;", "int count = none;", 0),
        ("missing-barrier", "int* lengths,", "int* length,", 0),
        ("combine", "total = ZERO", "total = (ZERO", 0),
        ("combine", "from moeblaze_ref", "import sys\nfrom moeblaze_ref", 0),
        ("missing-barrier", "int count = 0;", "int count = 1;", 1),
        ("missing-barrier", "int count = 0;", "int count = 0; exit(0);", 1),
    ],
)
def test_code_that_does_not_compile_or_fit_is_no_failure(name, old, new, failures):
    """It uses up no hint, as an answer of the wrong form does not."""
    desk, text = Desk(), EXERCISES[name].solution
    with pytest.raises(Unsolved):
        desk.check(name, text.replace(old, new, 1))
    assert desk.failures[name] == failures


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing-barrier", "missing-barrier.cu has no kernel:"),
        ("combine", "'combine_kernel' is wanted, but combine.py has no kernel"),
    ],
)
def test_an_empty_cell(name, message):
    assert verdict(name, new="").startswith(message)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("rank-and-write", "base + rank.exclusive", "expert_token_offsets[expert] + rank.exclusive", "two warps"),
        ("share-the-row", "for (int p = threadIdx.x; p < d; p += THREADS)", "if (int p = threadIdx.x; p < d)", "wider"),
        ("in-order", "counts[1024]", "counts[16]", "more experts than lanes"),
        ("next-best", "|| (ordered == last.ordered && e > last.expert)", "", "equal logits"),
        (
            "tree-sum",
            "        cuda.syncthreads()\n        half",
            "            cuda.syncthreads()\n        half",
            "every barrier",
        ),
    ],
)
def test_a_mistake_that_tiny_cases_forgive_is_found(name, old, new, message):
    assert message in verdict(name, old, new)


CUT = rf"(?=counts 0\ncounts)(?s:.{{{in_subprocess.SHOWN_BYTES}}})\n\.\.\. and [\d,]{{5,}} bytes more\n"


@pytest.mark.parametrize(
    ("name", "old", "more", "shown"),
    [
        ("missing-barrier", "int count = 0;", ' printf("counts %d\\n", count);', CUT),
        ("combine", "total = ZERO", "; print('counts', token)", CUT),
        ("missing-barrier", "int count = 0;", ' if (L == 1 && threadIdx.x == 0) printf("hello");', "(hello)+"),
        ("combine", "total = ZERO", "; print('hello' if element + out.size == 8 else '', end='')", "(hello)+"),
    ],
)
def test_the_little_that_a_kernel_prints_is_shown_and_more_is_cut_short(capsys, name, old, more, shown):
    Desk().check(name, EXERCISES[name].solution.replace(old, old + more))
    assert re.fullmatch(shown, capsys.readouterr().err)


def test_a_kernel_that_never_ends_is_given_up():
    endless = EXERCISES["combine"].solution.replace("total = ZERO", "while True: pass")
    with pytest.raises(TimeoutError, match="no verdict after 0.5 seconds, the limit: does a loop never end?"):
        in_subprocess.examine_text("combine.py", endless, "combine_kernel", "combine", guard.Limits(0.5))


def test_a_right_kernel_that_asks_for_too_much():
    """One that reads x anew for every result, where the row should be shared."""
    wasteful = EXERCISES["share-the-row"].solution.replace("x_row[p] *", "x[token * d + p] *")
    with pytest.raises(Unsolved, match="over budget: read of x is .*, but read of x <= 4 R d allows"):
        Desk().check("share-the-row", wasteful)


def test_the_notebooks_own_process_goes_on():
    """After a kernel that ends its process, in a real notebook, which need not wait for torch."""
    crash = "raise SystemExit(1)\n" + EXERCISES["combine"].solution
    cells = [
        "import os, sys; print(os.getpid(), 'torch' in sys.modules)",
        notebooks.SETUP,
        EXERCISES["combine"].cell(crash),
        EXERCISES["combine"].cell(EXERCISES["combine"].solution),
        "print(os.getpid(), 'torch' in sys.modules)",
    ]
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    made[2].metadata["tags"] = ["raises-exception"]
    ran = execute(nbformat.v4.new_notebook(cells=made), ROOT / "notebooks")
    first, _, crashed, right, last = ran.cells
    assert crashed.outputs[-1].ename == "Unsolved" and "with status 1" in "".join(crashed.outputs[-1].traceback)
    assert right.outputs[-1].data["text/markdown"].startswith("**Right, within budget.**")
    assert first.outputs == last.outputs


# The sheets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("change", ("w4", ""), "whose-weights: the solution has 'w4' 0 times, not once"),
        ("difficulty", 4, "whose-weights: difficulty is 4, but it must be 1 to 3"),
        ("hints", "One hint.", "whose-weights: hints is 'One hint.', but it must be a tuple of at least 2 hints"),
        ("hints", ("One.",), r"whose-weights: hints is \('One.',\), but it must be a tuple of at least 2 hints"),
    ],
)
def test_an_exercise_that_is_stated_wrongly_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(EXERCISES["whose-weights"], **{field: value})


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_sheet_shows_how_difficult_each_exercise_is(path):
    (sheet,) = (sheet for sheet in SHEETS if sheet.course == path.stem)
    for exercise in sheet.exercises:
        assert f"{KINDS[exercise.kind]}. Difficulty {exercise.difficulty} of 3.*" in FILES[path]


def test_what_a_kernel_uses_of_the_headers_is_shown():
    used = helpers(EXERCISES["rank-and-write"].solution)
    names = ("block_exclusive_sum(", "struct BlockScan", "// Which of a token's", "warp_max")
    assert [name in used for name in names] == [
        True, True, True, False,
    ]  # fmt: skip
    assert helpers('#include "common.cuh"\n// infinity\n') == ""


def test_a_variable_gets_another_name_in_code_alone():
    text = EXERCISES["transposed-blocks"].solution  # of the project's kernel, whose `block` is the checker's `side`
    assert "padded_offsets[expert] // side" in text and "// block" not in text
    assert "a block for each expert" in text and "# number of the expert's first block" in text


def test_sources_are_the_projects_own():
    text = cuda_source("gating/1_naive.cu", "BEST", "next_best")
    assert text.startswith('#include "common.cuh"\n#include "scalar.cuh"\n\nconstexpr int BEST')
    assert "Choice next_best(" in text and "softmax_top_k(" not in text
