"""Grade the notebooks of a folder: each exercise of each submission gets a verdict, and nothing of them runs unguarded.

Kernels and torch projects are checked as ``%%check`` checks them. What ``predict`` and ``construct`` are given is found
by running the other cells in a confined process (`verify.guard`), and compared in this one.
"""

import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from moeblaze_ref.core.units import GIB
from moeblaze_ref.course.exercises.answers import read_answers, send_answers
from moeblaze_ref.course.exercises.desk import Desk, Unsolved
from moeblaze_ref.course.exercises.exercise import CodeExercise, Prediction
from moeblaze_ref.course.exercises.sheets import EXERCISES
from moeblaze_ref.course.exercises.submission import Submission, read
from moeblaze_ref.verify import guard, in_subprocess

LIMITS = guard.Limits(in_subprocess.LIMIT_SECONDS, resident_bytes=2 * GIB)
VERDICTS = ("right", "wrong", "unsolved", "missing", "stopped", "unreadable")


class Grade(NamedTuple):
    """The verdict on one exercise of one submission."""

    submission: str  #: path of the notebook below the folder
    exercise: str  #: its name; empty of a notebook that cannot be read
    kind: str  #: one of `exercise.KINDS`
    verdict: str  #: one of `VERDICTS`
    level: str  #: that a right capstone has reached, one of `exercise.LEVELS`; empty of all others
    message: str  #: why; empty of a right answer


def submissions(folder: Path) -> list[Path]:
    """The notebooks below a folder, without the copies that Jupyter keeps.

    Raises
    ------
    ValueError
        If there is no such folder, or no notebook in it.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found = sorted(
        path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts and path.is_file()
    )
    if not found:
        raise ValueError(f"{folder} has no notebook (*.ipynb)")
    return found


def open_network() -> bool:
    """Return True if this system lets a submission reach the network, which the guard otherwise refuses."""
    return guard.NO_NETWORK in _run((), LIMITS).refused


def jobs_of(limits: guard.Limits) -> int:
    """How many submissions to grade at once: one a core, and together at most half of the machine's memory."""
    return max(1, min(os.cpu_count() or 1, guard.half_of_memory() // limits.resident_bytes))


def grade(folder: Path, limits: guard.Limits = LIMITS, jobs: int = 1) -> Iterator[Grade]:
    """Grade the notebooks below a folder, in the order of their paths.

    Parameters
    ----------
    folder : Path
    limits : guard.Limits
        Of one kernel, of each process of a torch project, and of all other cells of a notebook together.
    jobs : int
        Submissions that are graded at once.

    Raises
    ------
    ValueError
        As `submissions`.
    """
    paths = submissions(folder)
    names = [str(path.relative_to(folder)) for path in paths]
    found = [_read(path) for path in paths]  # before one runs, since it can change the modes of the others
    with ThreadPoolExecutor(jobs) as pool:
        for grades in pool.map(lambda name, submission: [*_grades(name, submission, limits)], names, found):
            yield from map(_harmless, grades)


def _harmless(grade: Grade) -> Grade:
    """Return the grade with control characters as escapes.

    A file name may also have line ends, and bytes that are no character: those of another encoding become \\udcfc.
    """
    name, *others = grade
    return Grade(in_subprocess.harmless(name, keep=""), *map(in_subprocess.harmless, others))


def _read(path: Path) -> Submission | str:
    """Return the submission, or why there is none."""
    try:
        submission = read(path)
    except (ValueError, OSError) as error:
        return str(error)
    return submission if submission.exercises else "no cell answers an exercise"


def _grades(name: str, submission: Submission | str, limits: guard.Limits) -> Iterator[Grade]:
    if isinstance(submission, str):
        yield Grade(name, "", "", "unreadable", "", submission)
        return
    answers = _answers(submission, limits)
    for exercise in submission.exercises:
        yield Grade(name, exercise, EXERCISES[exercise].kind, *_verdict(submission, exercise, answers, limits))


def _answers(submission: Submission, limits: guard.Limits) -> dict[str, dict[str, Any]]:
    """Return the cells' answers by exercise; if the cells were stopped, the reason for each exercise."""
    if not submission.answered:
        return {}
    try:
        return read_answers(_run(submission.cells, limits).sent)
    except (TimeoutError, ChildProcessError) as error:
        return {name: {"stopped": str(error)} for name in submission.answered}


def _run(cells: tuple[str, ...], limits: guard.Limits) -> guard.Ended:
    """Run cells confined. What they need is imported once for all submissions."""
    work = functools.partial(send_answers, cells)
    return in_subprocess.confined(work, limits, preload=[send_answers.__module__])


class _Verdict(NamedTuple):
    """The last fields of a `Grade`."""

    verdict: str
    level: str
    message: str


def _verdict(submission: Submission, name: str, answers: dict[str, dict[str, Any]], limits: guard.Limits) -> _Verdict:
    """The verdict on one exercise."""
    if isinstance(EXERCISES[name], CodeExercise):
        return _of_code(name, submission.codes.get(name), limits)
    match answers.get(name):
        case {"said": said}:
            return _of_answer(name, said)
        case {"error": error}:
            return _Verdict("wrong", "", error)
        case {"stopped": why}:
            return _Verdict("stopped", "", why)
    missing = "no cell answers it" if name not in submission.answered else "its cell did not run to the answer"
    return _Verdict("missing", "", missing)


def _of_answer(name: str, said: dict[str, Any]) -> _Verdict:
    desk = Desk()
    ask = desk.predict if isinstance(EXERCISES[name], Prediction) else desk.construct
    try:
        ask(name, **said)
    except Unsolved as wrong:
        return _Verdict("unsolved" if any(value is ... for value in said.values()) else "wrong", "", _first(wrong))
    except Exception as error:  # an answer that no check expects
        return _Verdict("wrong", "", f"{type(error).__name__}: {error}")
    return _Verdict("right", "", "")


def _of_code(name: str, text: str | None, limits: guard.Limits) -> _Verdict:
    exercise = EXERCISES[name]
    if text is None:
        return _Verdict("missing", "", "no cell answers it")
    if text.split() == exercise.unsolved.split():
        return _Verdict("unsolved", "", f"the {exercise.noun} is as it was found")
    solved: list[str] = []
    try:
        Desk(limits, on_solved=solved.append).check(name, text)
    except Unsolved as wrong:
        stopped = isinstance(wrong.__cause__ or wrong.__context__, TimeoutError | ChildProcessError)
        return _Verdict("stopped" if stopped else "wrong", "", _first(wrong))
    return _Verdict("right", solved[-1].removeprefix(name).removeprefix("/"), "")


def _first(wrong: Unsolved) -> str:
    """The message without the hint below it."""
    return str(wrong).partition("\n\n")[0]


def totals(grades: Iterable[Grade]) -> dict[str, dict[str, int]]:
    """The number of verdicts of each submission, by verdict."""
    found: dict[str, dict[str, int]] = {}
    for one in grades:
        counts = found.setdefault(one.submission, dict.fromkeys(VERDICTS, 0))
        counts[one.verdict] += 1
    return found
