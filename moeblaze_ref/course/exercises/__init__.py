"""The exercises of the course: predict, fill a hole, find a bug, construct an example; every answer is checked.

A notebook of ``notebooks/exercises`` begins with

    %load_ext moeblaze_ref.course.exercises
    from moeblaze_ref.course.exercises import edit, hint, predict, solution

`sheets` states the exercises, and `notebooks` writes the notebooks from them.
"""

from typing import Any

from moeblaze_ref.course.exercises import progress
from moeblaze_ref.course.exercises.desk import Desk, Unsolved

__all__ = ["Unsolved", "construct", "edit", "hint", "load_ipython_extension", "predict", "solution"]

_desk = Desk(on_solved=progress.note)
predict, construct, hint, solution = _desk.predict, _desk.construct, _desk.hint, _desk.solution


def edit(name: str) -> Any:
    """Open the editor of a kernel's exercise; the errors are those of `course.editor.KernelEditor`."""
    from moeblaze_ref.course.editor import KernelEditor

    return KernelEditor(name, _desk)


def load_ipython_extension(shell: Any) -> None:
    """Add the magic ``%%check NAME``, which hands its cell to the checker."""
    shell.register_magic_function(_desk.check, "cell", "check")
