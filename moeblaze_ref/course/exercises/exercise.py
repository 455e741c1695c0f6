"""Exercises: the question, the reader's starting point and the solution."""

import itertools
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

from moeblaze_ref.core.config import PRESETS, MoEConfig
from moeblaze_ref.course.exercises.kernels import Kernel
from moeblaze_ref.verify import guard, in_subprocess

KINDS = {
    "predict": "Predict a number",
    "numba": "Fill the hole, Numba",
    "cuda": "Fill the hole, raw CUDA",
    "bug": "Find the planted bug",
    "construct": "Construct an example",
    "torch": "Write it in torch",
    "capstone": "Capstone",
}
LEVELS = ("bronze", "silver", "gold")  #: of a capstone, from the easiest
HARDEST = 3  # difficulty of an exercise, from 1
LEAST_HINTS = 2  # of an exercise: they come in steps


@dataclass(frozen=True)
class Asked:
    """One number that a reader predicts, or one thing that a reader constructs."""

    unit: str  #: what it counts, the answers that there are, or its shape
    formula: str  #: the solution: Python, in the names that the exercise gives


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The statement of an exercise; line breaks of its Markdown are spaces, except those between paragraphs."""

    name: str
    title: str
    difficulty: int  #: 1 to ``HARDEST``
    question: str  #: Markdown, like the next two
    hints: tuple[str, ...]  #: each says more than the one before
    why: str  #: what the solution shows

    def __post_init__(self):
        if self.difficulty not in range(1, HARDEST + 1):
            raise ValueError(f"{self.name}: difficulty is {self.difficulty}, but it must be 1 to {HARDEST}")
        if isinstance(self.hints, str) or len(self.hints) < LEAST_HINTS:
            raise ValueError(
                f"{self.name}: hints is {self.hints!r}, but it must be a tuple of at least {LEAST_HINTS} hints"
            )
        object.__setattr__(self, "question", _joined(self.question))
        object.__setattr__(self, "hints", tuple(map(_joined, self.hints)))
        object.__setattr__(self, "why", _joined(self.why))


def _joined(text: str) -> str:
    """The text with one line for each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@dataclass(frozen=True, kw_only=True)
class _Answered(_Stated):
    """An exercise whose cell calls the function of its kind with an answer for each name in ``asked``."""

    given: dict[str, Any]  #: what the answers depend on, by the names of the cell: layers, numbers, lists
    asked: dict[str, Asked]
    steps: tuple[str, ...] = ()  #: lines of the solution that come before its formulas

    kind: ClassVar[str]
    language: ClassVar[str] = "python"

    @property
    def call(self) -> str:
        """The action of the cell, in words."""
        return f"calls {self.kind}(...)"

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
        return "\n".join([*given, *steps, f"{self.kind}(", f'    "{self.name}",', *lines, ")"])


@dataclass(frozen=True, kw_only=True)
class Prediction(_Answered):
    """Numbers that the reader states before the project computes them."""

    truth: Callable[..., dict[str, float | str]]  #: of what is given, by name: every answer that is asked for
    computed_by: str  #: the project's function that ``truth`` takes them from

    kind = "predict"
    noun = "prediction"


@dataclass(frozen=True, kw_only=True)
class Construction(_Answered):
    """An example that the reader constructs: several answers are right, and the project checks each.

    ``check`` takes what is given and the answers, by name. It returns one sentence that says what is wrong, empty if
    nothing is, and raises ValueError or TypeError if an answer has the wrong form.
    """

    check: Callable[..., str]
    checked_by: str  #: the project's function that ``check`` compares with

    kind = "construct"
    noun = "construction"


def _stated(value: Any) -> str:
    """A value as a cell writes it."""
    if not isinstance(value, MoEConfig):
        return f"{value:_}" if isinstance(value, int) else repr(value)
    (name,) = (name for name, preset in PRESETS.items() if preset.config == value)
    return f'preset("{name}").config'


class Checked(NamedTuple):
    """The verdict on a reader's code."""

    problem: str  #: the first case that is wrong, and how; empty if none is
    report: str  #: all cases, with what was counted
    praise: str = "Right, within budget"  #: of code that is right
    levels: tuple[str, ...] = ()  #: those of `LEVELS` that a capstone has reached, from the easiest


class CodeExercise(_Stated, ABC):
    """An exercise whose cell is code below ``%%check NAME``, which a confined process runs."""

    call = "begins with %%check"

    def cell(self, text: str) -> str:
        """The notebook's cell that hands the code to its check."""
        return f"%%check {self.name}\n{text.rstrip()}"

    @abstractmethod
    def examine(self, text: str, limits: guard.Limits, stop: Iterable[Connection] = ()) -> Checked:
        """Check a reader's code, the text below the first line of its cell; ``stop`` is that of `examine_text`.

        Raises
        ------
        ValueError, TypeError, OSError
            If the code does not compile or fit, does not end, or ends its process.
        """


def as_found(name: str, solution: str, changes: Iterable[tuple[str, str]]) -> str:
    """Return the text that a reader finds, from a solution and its changes.

    A change is lines of the solution, ``...`` for any between, and what the reader finds in their place.

    Raises
    ------
    ValueError
        If the lines to change are not in the solution, or there more than once.
    """
    found = solution
    for right, unsolved in changes:
        parts = re.findall("\n(?:.*\n)*?".join(map(re.escape, right.split("\n...\n"))), solution)
        if len(parts) != 1:
            raise ValueError(f"{name}: the solution has {right!r} {len(parts)} times, not once")
        found = found.replace(parts[0], unsolved)
    return found


@dataclass(frozen=True, kw_only=True)
class KernelExercise(CodeExercise):
    """A kernel with a hole or a planted bug, for the checker.

    Raises
    ------
    ValueError
        As `as_found`.
    """

    kind: str  #: "numba", "cuda" or "bug"
    task: str  #: what the kernel must do, one of ``checker.CONTRACTS``
    kernel: Kernel  #: the right one
    change: tuple[str, str]  #: lines of the solution, ``...`` for any between, and what the reader finds in their place
    budgets: tuple[str, ...]  #: of memory, as of `checker.examine`
    division: tuple[str, ...]  #: budgets of how the threads divide the work
    rounded_once: bool = False  #: True if the check compares bits, as of `checker.prepare`

    noun = "kernel"

    def __post_init__(self):
        super().__post_init__()
        as_found(self.name, self.solution, [self.change])

    @property
    def language(self) -> str:
        """``c++`` or ``python``."""
        return self.kernel.language

    @property
    def entry(self) -> str:
        """The name of the function that is launched."""
        return self.kernel.name

    @property
    def launch(self) -> dict[str, str | None]:
        """Options of the checker."""
        return self.kernel.launch

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
        return as_found(self.name, self.solution, [self.change])

    def examine(self, text: str, limits: guard.Limits, stop: Iterable[Connection] = ()) -> Checked:
        """Check a kernel by `checker.examine`."""
        options = {"budgets": (*self.budgets, *self.division), "rounded_once": self.rounded_once, **self.launch}
        verdict = in_subprocess.examine_text(self.file, text, self.entry, self.task, limits, stop, **options)
        return Checked(verdict.first_problem, verdict.report)


@dataclass(frozen=True, kw_only=True)
class TorchExercise(CodeExercise):
    """A function or class of torch, which a project compares with the truth.

    Raises
    ------
    ValueError
        As `as_found`.
    """

    project: str  #: a module of `exercises.projects`, a dot, and a project of it, as in "function.SWIGLU"
    solution: str
    changes: tuple[tuple[str, str], ...]  #: each as the ``change`` of a `KernelExercise`

    kind, noun, language = "torch", "torch project", "python"

    def __post_init__(self):
        super().__post_init__()
        as_found(self.name, self.solution, self.changes)

    @property
    def unsolved(self) -> str:
        """The cell as the reader finds it, below its first line."""
        return as_found(self.name, self.solution, self.changes)

    def examine(self, text: str, limits: guard.Limits, stop: Iterable[Connection] = ()) -> Checked:
        """Check the text, run it on every case of the project, and compare."""
        from moeblaze_ref.course.exercises.projects.session import Session
        from moeblaze_ref.verify.torch_cells import Cell

        module, _, name = self.project.partition(".")
        project = pkgutil.resolve_name(f"moeblaze_ref.course.exercises.projects.{module}:{name}")
        cell, session = Cell(f"{self.name}.py", text, project.defines, project.refused), Session(limits, stop)
        cell.check()
        verdict = session.verdict(project.rows(cell, session))
        return Checked(verdict.first_problem, verdict.report, "Right")


@dataclass(frozen=True, kw_only=True)
class Capstone(CodeExercise):
    """A kernel of the reader's own, with budgets of three levels."""

    task: str  #: one of ``checker.CONTRACTS``
    entry: str  #: the name of the function that is launched
    cases: Callable[[], list[Any]]  #: of `verify.cases`
    division: tuple[str, ...]  #: budgets of how the threads divide the work, the same for every level
    levels: dict[str, tuple[str, ...]]  #: budgets of memory, by level of `LEVELS`
    unsolved: str  #: the kernel as the reader finds it
    solutions: dict[str, str]  #: one for each level

    kind, noun, language = "capstone", "capstone", "c++"
    launch: ClassVar[dict[str, str | None]] = {}  #: the kernel's header states it

    @property
    def file(self) -> str:
        """The file name of the reader's cell in compiler messages."""
        return f"{self.name}.cu"

    @property
    def solution(self) -> str:
        """The solution of the highest level."""
        return self.solutions[LEVELS[-1]]

    def examine(self, text: str, limits: guard.Limits, stop: Iterable[Connection] = ()) -> Checked:
        """Check a kernel by `checker.examine`, and say which levels it reaches, and how far the next one is."""
        verdict = in_subprocess.examine_text(
            self.file,
            text,
            self.entry,
            self.task,
            limits,
            stop,
            budgets=self.division,
            levels=self.levels,
            cases=self.cases(),
        )
        if verdict.first_problem:
            return Checked(verdict.first_problem, verdict.report)
        missed = {level: _missed(level, verdict.document["results"]) for level in LEVELS}
        reached = tuple(itertools.takewhile(lambda level: not missed[level], LEVELS))
        if not reached:
            return Checked(f"right, but no {LEVELS[0]}: {missed[LEVELS[0]]}", verdict.report)
        further = "\n".join(f"{level} is missed. {problem}" for level, problem in missed.items() if problem)
        return Checked("", f"{further}\n{verdict.report}".lstrip(), f"Right: {reached[-1]}", reached)


def _missed(level: str, results: list[dict[str, Any]]) -> str:
    """The first case that is over a level's budgets, and by how much; empty if none is."""
    return next((f"{one['case']}: {one['missed'][level]}" for one in results if one["missed"][level]), "")


WithKernel = KernelExercise | Capstone  #: a kernel, which the editor opens
Exercise = Prediction | Construction | WithKernel | TorchExercise


@dataclass(frozen=True)
class Sheet:
    """The exercises of one notebook of the course, or a sheet of its own, which has no number."""

    course: str  #: file name of the notebook without its ending, which is the sheet's too
    title: str
    exercises: tuple[Exercise, ...]
    readers: str = ""  #: of a sheet of its own: what it is for, Markdown

    @property
    def number(self) -> int | None:
        """Number of the notebook; None of a sheet of its own."""
        number = self.course.partition("_")[0]
        return int(number) if number.isdecimal() else None
