"""Exercises: the question, the reader's starting point and the solution."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeblaze_ref.core.config import PRESETS, MoEConfig
from moeblaze_ref.course.exercises.kernels import Kernel

KINDS = {
    "predict": "Predict a number",
    "numba": "Fill the hole, Numba",
    "cuda": "Fill the hole, raw CUDA",
    "bug": "Find the planted bug",
    "construct": "Construct an example",
}


@dataclass(frozen=True)
class Asked:
    """One number that a reader predicts, or one thing that a reader constructs.

    Parameters
    ----------
    unit : str
        What it counts, the answers that there are, or its shape.
    formula : str
        The solution: Python, in the names that the exercise gives.
    """

    unit: str
    formula: str


class _Answered:
    """The cell of an exercise that calls ``function`` with an answer for each name in ``asked``."""

    name: str
    function: str
    given: dict[str, Any]
    asked: dict[str, Asked]
    steps: tuple[str, ...]
    language = "python"

    @property
    def unsolved(self) -> str:
        """The cell as the reader finds it."""
        return self._stated_as((), {name: "..." for name in self.asked})

    @property
    def solution(self) -> str:
        """The cell with the right formulas."""
        return self._stated_as(self.steps, {name: asked.formula for name, asked in self.asked.items()})

    def cell(self, text: str) -> str:
        """The notebook's cell: the text itself."""
        return text

    def _stated_as(self, steps: tuple[str, ...], said: dict[str, str]) -> str:
        given = [f"{name} = {_stated(value)}" for name, value in self.given.items()]
        lines = [f"    {name}={said[name]},  # {asked.unit}" for name, asked in self.asked.items()]
        return "\n".join([*given, *steps, f"{self.function}(", f'    "{self.name}",', *lines, ")"])


@dataclass(frozen=True)
class Prediction(_Answered):
    """Numbers that the reader states before the project computes them.

    Parameters
    ----------
    name, title, question, hint, why : str
        ``question``, ``hint`` and ``why`` are Markdown; the last tells what the solution shows.
    given : dict
        What the numbers depend on, by the names of the cell: layers, numbers, lists, arrays of whole numbers.
    asked : dict of Asked
    truth : callable
        Takes what is given by name and returns every number that is asked for, or the right answer.
    computed_by : str
        The project's function that ``truth`` takes them from.
    steps : tuple of str
        Lines of the solution that come before its formulas.
    """

    name: str
    title: str
    question: str
    given: dict[str, Any]
    asked: dict[str, Asked]
    truth: Callable[..., dict[str, float | str]]
    computed_by: str
    hint: str
    why: str
    steps: tuple[str, ...] = ()

    kind = "predict"
    function = "predict"
    noun, call = "prediction", "calls predict(...)"


@dataclass(frozen=True)
class Construction(_Answered):
    """An example that the reader constructs: several answers are right, and the project checks each.

    Parameters
    ----------
    name, title, question, given, asked, hint, why, steps
        As of a `Prediction`.
    check : callable
        Takes what is given and the answers, by name. Returns one sentence that says what is wrong, empty if nothing is.
        Raises ValueError or TypeError if an answer has the wrong form.
    checked_by : str
        The project's function that ``check`` compares with.
    """

    name: str
    title: str
    question: str
    given: dict[str, Any]
    asked: dict[str, Asked]
    check: Callable[..., str]
    checked_by: str
    hint: str
    why: str
    steps: tuple[str, ...] = ()

    kind = "construct"
    function = "construct"
    noun, call = "construction", "calls construct(...)"


def _stated(value: Any) -> str:
    """A value as a cell writes it."""
    if not isinstance(value, MoEConfig):
        return f"{value:_}" if isinstance(value, int) else repr(value)
    (name,) = (name for name, preset in PRESETS.items() if preset.config == value)
    return f'preset("{name}").config'


@dataclass(frozen=True)
class KernelExercise:
    """A kernel with a hole or a planted bug, for the checker.

    Parameters
    ----------
    name, title, question, hint, why : str
        As of a `Prediction`.
    kind : str
        "numba", "cuda" or "bug".
    task : str
        What the kernel must do, one of ``checker.CONTRACTS``.
    kernel : Kernel
        The right one.
    changes : tuple of (str, str)
        Lines of the solution, and what the reader finds in their place.
    budgets : tuple of str
        As of `checker.examine`.

    Raises
    ------
    ValueError
        If some lines are not in the solution, or there more than once.
    """

    name: str
    title: str
    kind: str
    question: str
    task: str
    kernel: Kernel
    changes: tuple[tuple[str, str], ...]
    budgets: tuple[str, ...]
    hint: str
    why: str

    noun, call = "kernel", "begins with %%check"

    def __post_init__(self):
        for old, _ in self.changes:
            if self.solution.count(old) != 1:
                raise ValueError(f"{self.name}: the solution has {old!r} {self.solution.count(old)} times, not once")

    @property
    def language(self) -> str:
        """``c++`` or ``python``."""
        return self.kernel.language

    @property
    def solution(self) -> str:
        """The right kernel's whole text."""
        return self.kernel.text

    @property
    def file(self) -> str:
        """The file name of the reader's cell in compiler messages."""
        return f"{self.name}.{'cu' if self.language == 'c++' else 'py'}"

    @property
    def unsolved(self) -> str:
        """The kernel as the reader finds it."""
        text = self.solution
        for old, new in self.changes:
            text = text.replace(old, new)
        return text

    def cell(self, text: str) -> str:
        """The notebook's cell that hands a kernel to the checker."""
        return f"%%check {self.name}\n{text.rstrip()}"


Exercise = Prediction | Construction | KernelExercise


@dataclass(frozen=True)
class Sheet:
    """The exercises of one notebook of the course, or a sheet of its own.

    Parameters
    ----------
    course : str
        File name of the notebook without its ending, which is the sheet's too. A sheet of its own has no number.
    title : str
    exercises : tuple of Exercise
    """

    course: str
    title: str
    exercises: tuple[Exercise, ...]

    @property
    def number(self) -> int | None:
        """Number of the notebook; None of a sheet of its own."""
        number = self.course.partition("_")[0]
        return int(number) if number.isdecimal() else None
