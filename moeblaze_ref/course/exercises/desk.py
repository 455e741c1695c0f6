"""Check a reader's answers: a wrong one raises, from the second on with a hint. The solution is shown on request."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from IPython.display import Markdown

from moeblaze_ref.core import checks
from moeblaze_ref.core.units import GB, GIB, KIB, MB, MIB
from moeblaze_ref.course.exercises.exercise import CodeExercise, Construction, Exercise, Prediction, WithKernel
from moeblaze_ref.course.exercises.sheets import EXERCISES
from moeblaze_ref.course.notebook.markdown import cell_text, table
from moeblaze_ref.verify import guard, in_subprocess

FAILURES_BEFORE_HINT = 2
LIMITS = guard.Limits(in_subprocess.LIMIT_SECONDS)  # of a kernel, and of each process of a torch project
TOLERANCE = 0.01  # of a prediction that is no whole number
FACTORS = (2, 10, 1_000)  # how far a wrong prediction is off, as a reader is told
OTHER_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "MB": MB, "GB": GB}


class Unsolved(AssertionError):
    """Raised for a wrong answer. Notebooks show the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return [f"Unsolved: {self}"]


class Desk:
    """The exercises that one reader has tried, with the failures of each."""

    def __init__(self, limits: guard.Limits = LIMITS, on_solved: Callable[[str], Any] = lambda _: None):
        self.limits = limits  # of a kernel
        self.on_solved = on_solved  # called with the name of an exercise that is solved
        self.failures: Counter[str] = Counter()
        self.hints_shown: Counter[str] = Counter()
        self.last: Exercise | None = None

    def predict(self, name: str, **said: Any) -> Markdown:
        """Compare predictions with what the project computes; return what was right, and what it shows.

        ``said`` has a number, or one of the answers that there are, for each of those asked for.

        Raises
        ------
        Unsolved
            If one differs; the first of them is named. What is no answer, such as a text in place of a number, does not
            count as a failure.
        ValueError
            If there is no such exercise.
        """
        exercise = self._open(name, Prediction)
        _check_answers(exercise, said)
        truth = exercise.truth(**exercise.given)
        for key, asked in exercise.asked.items():
            _check_kind(key, said[key], truth[key], asked.unit)
        for key, asked in exercise.asked.items():
            if wrong := _wrong(key, said[key], truth[key], asked.unit):
                raise self._unsolved(wrong)
        self.on_solved(name)
        rows = [
            {"number": f"`{key}`", "predicted": cell_text(said[key]), "computed": cell_text(truth[key]), "": asked.unit}
            for key, asked in exercise.asked.items()
        ]
        by = f"Computed by `{exercise.computed_by}`."
        return Markdown(f"**Right.** {by}\n\n{table(rows).data}\n\n{exercise.why}")

    def construct(self, name: str, **said: Any) -> Markdown:
        """Check an example, ``said`` for each name that is asked for; return what the example shows.

        Raises
        ------
        Unsolved
            If the example does not do what is asked; the message says why. An answer of the wrong form does not count
            as a failure.
        ValueError
            If there is no such exercise.
        """
        exercise = self._open(name, Construction)
        _check_answers(exercise, said)
        try:
            problem = exercise.check(**exercise.given, **said)
        except (ValueError, TypeError) as error:
            raise Unsolved(str(error)) from None
        if problem:
            raise self._unsolved(problem)
        self.on_solved(name)
        return Markdown(f"**Right.** Checked by `{exercise.checked_by}`.\n\n{exercise.why}")

    def check(self, name: str, text: str) -> Markdown:
        """Check the code in a cell, the text below the magic ``%%check NAME``.

        Return the report, case by case, and what the exercise shows.

        Raises
        ------
        Unsolved
            If the code does not compile or fit, is wrong or over budget, does not end, or ends its process. Code that
            does not compile or fit does not count as a failure.
        ValueError
            If there is no such exercise.
        """
        return self.check_text(name.strip(), f"\n{text}")  # the magic is line 1: compilers count as the reader does

    def check_text(self, name: str, text: str, stop: Iterable[Connection] = ()) -> Markdown:
        """Check a text, as `check` does; ``stop`` and KeyboardInterrupt are those of `examine_text`."""
        exercise = self._open(name, CodeExercise)
        try:
            found = exercise.examine(text, self.limits, stop)
        except (ValueError, TypeError) as error:
            raise Unsolved(str(error)) from None
        except OSError as error:
            raise self._unsolved(str(error)) from None
        finally:
            self.last = exercise  # in a thread: another may have been tried meanwhile
        if found.problem:
            raise self._unsolved(found.problem)
        self.on_solved(exercise.name)
        for level in found.levels:
            self.on_solved(f"{exercise.name}/{level}")
        return Markdown(f"**{found.praise}.** {exercise.why}\n\n```text\n{found.report}\n```")

    def kernel(self, name: str) -> WithKernel:
        """The exercise of a kernel, from now on the one tried last; the error is that of `check`."""
        exercise: WithKernel = self._open(name, WithKernel)
        return exercise

    def hint(self, name: str | None = None) -> Markdown:
        """Return the next hint of an exercise, by default of the one tried last. The last hint comes again."""
        number, text = self._next_hint(self._asked_for(name))
        return Markdown(f"**{number}.** {text}")

    def solution(self, name: str | None = None) -> Markdown:
        """The solution of an exercise, by default of the one tried last."""
        exercise = self._asked_for(name)
        return Markdown(f"```{exercise.language}\n{exercise.solution.rstrip()}\n```\n\n{exercise.why}")

    def _open(self, name: str, kind: Any) -> Any:
        """The exercise, from now on the one tried last."""
        exercise = EXERCISES[checks.check_name("exercise", name, EXERCISES)]
        if not isinstance(exercise, kind):
            raise ValueError(f"{name} is a {exercise.noun}: its cell {exercise.call}")
        self.last = exercise
        return exercise

    def _asked_for(self, name: str | None) -> Exercise:
        if name is not None:
            return EXERCISES[checks.check_name("exercise", name, EXERCISES)]
        if self.last is None:
            raise ValueError("no exercise has been tried yet: run its cell, or name it, as in hint('NAME')")
        return self.last

    def _unsolved(self, problem: str) -> Unsolved:
        """The failure of the exercise tried last; unless it is the first, with the next hint."""
        last = self._asked_for(None)
        self.failures[last.name] += 1
        if self.failures[last.name] < FAILURES_BEFORE_HINT:
            return Unsolved(f"{problem}\n\nhint() gives a hint, solution() the solution.")
        number, text = self._next_hint(last)
        return Unsolved(f"{problem}\n\n{number}: {text}\nsolution() shows the solution.")

    def _next_hint(self, exercise: Exercise) -> tuple[str, str]:
        """The number of the next hint, in words, and the hint; the last one again if there are no more."""
        shown = self.hints_shown[exercise.name] = min(self.hints_shown[exercise.name] + 1, len(exercise.hints))
        return f"Hint {shown} of {len(exercise.hints)}", exercise.hints[shown - 1]


def _check_answers(exercise: Prediction | Construction, said: dict[str, Any]):
    """Check that the reader has answered every question, and no other."""
    if said.keys() != exercise.asked.keys():
        asked = ", ".join(exercise.asked)
        raise Unsolved(f"{exercise.name} asks for {asked}, but was given {', '.join(said) or 'nothing'}")
    for key, question in exercise.asked.items():
        if said[key] is ...:
            raise Unsolved(f"{key} is still ...: put your {exercise.noun} in its place ({question.unit})")


def _check_kind(name: str, said: Any, truth: float | str, unit: str):
    """Check that an answer is a word where the truth is a word, else a number."""
    if isinstance(truth, str):
        if not isinstance(said, str):
            raise Unsolved(f"{name} is {said!r} ({type(said).__name__}), but it must be {unit}")
        return
    try:
        checks.check_number(name, said)
    except (ValueError, TypeError) as error:
        raise Unsolved(str(error)) from None


def _wrong(name: str, said: Any, truth: float | str, unit: str) -> str:
    """Return what is wrong with one prediction, or an empty text."""
    if isinstance(truth, str):
        return "" if said == truth else f"{name} is {said!r}, which is not right ({unit})"
    if math.isclose(said, truth, rel_tol=0 if isinstance(truth, int) else TOLERANCE):
        return ""
    for other, size in OTHER_UNITS.items() if unit == "bytes" else ():
        if math.isclose(said * size, truth, rel_tol=TOLERANCE):
            return f"{name} is {cell_text(said)}, as if in {other}, but bytes are asked for"
    return f"{name} is {cell_text(said)}, which is {_how_far(said, truth)}"


def _how_far(said: float, truth: float) -> str:
    """Return how far a prediction is off, too roughly to compute the truth from it."""
    if math.isclose(said, truth, rel_tol=TOLERANCE):
        return "nearly, but not exactly, what the project computes"
    if said * truth <= 0:
        return "not what the project computes"
    factor = max(said / truth, truth / said)
    size = next((f"below {bound:,}" for bound in FACTORS if factor < bound), f"of {FACTORS[-1]:,} or more")
    side = "more" if said > truth else "less"
    return f"{side} than what the project computes, by a factor {size}"
