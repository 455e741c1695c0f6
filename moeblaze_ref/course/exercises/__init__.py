"""The exercises of the course: predict, fill a hole, find a bug, construct an example; every answer is checked.

A notebook of ``notebooks/exercises`` begins with

    %load_ext moeblaze_ref.course.exercises
    from moeblaze_ref.course.exercises import edit, hint, predict, solution

`sheets` states the exercises, and `notebooks` writes the notebooks from them.
"""

from typing import Any

from moeblaze_ref.core import checks
from moeblaze_ref.course.exercises import progress
from moeblaze_ref.course.exercises.desk import Desk, Unsolved
from moeblaze_ref.course.exercises.sheets import EXERCISES

__all__ = [
    "Unsolved",
    "construct",
    "edit",
    "hint",
    "load_ipython_extension",
    "predict",
    "require_solved",
    "solution",
]

_solved: set[str] = set()  # in this process


def _note(name: str) -> None:
    _solved.add(name)
    progress.note(name)


_desk = Desk(on_solved=_note)
predict, construct, hint, solution = _desk.predict, _desk.construct, _desk.hint, _desk.solution


def require_solved(name: str) -> None:
    """Check that an answer of this process was right. nbgrader runs this below each exercise.

    Raises
    ------
    Unsolved
        If none was.
    ValueError
        If there is no such exercise.
    """
    if checks.check_name("exercise", name, EXERCISES) not in _solved:
        raise Unsolved(f"no cell above answers {name} right")


def edit(name: str) -> Any:
    """Open the editor of a kernel's exercise; the errors are those of `course.editor.KernelEditor`."""
    from moeblaze_ref.course.editor import KernelEditor

    return KernelEditor(name, _desk)


def load_ipython_extension(shell: Any) -> None:
    """Add the magic ``%%check NAME``, which hands its cell to the checker."""
    shell.register_magic_function(_desk.check, "cell", "check")
