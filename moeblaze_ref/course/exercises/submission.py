"""A notebook that somebody has solved: the answers in it, found without running anything."""

from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from moeblaze_ref.course.exercises.answers import answered_in
from moeblaze_ref.course.exercises.exercise import CodeExercise
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS

MOST_BYTES = 16 * 2**20  # of a notebook
_MAGIC = "%%check "


@dataclass(frozen=True)
class Submission:
    """The answers of one notebook, the last of each exercise."""

    codes: dict[str, str] = field(default_factory=dict)  #: the text below ``%%check NAME``, by the exercise's name
    answered: tuple[str, ...] = ()  #: names of the exercises that a cell answers by ``predict`` or ``construct``
    cells: tuple[str, ...] = ()  #: all other code of the notebook, in its order

    @property
    def exercises(self) -> list[str]:
        """The exercises of every sheet of which the notebook answers one; without those of other notebooks."""
        found = {*self.codes, *self.answered}
        names = ([one.name for one in sheet.exercises] for sheet in SHEETS)
        return [name for sheet in names if found.intersection(sheet) for name in sheet]


def read(path: Path) -> Submission:
    """Read a notebook. Nothing of it runs.

    Raises
    ------
    ValueError
        If it is no notebook, or larger than `MOST_BYTES`.
    OSError
        If it cannot be read.
    """
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link, but a submission is a file")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path.name} has {size:,} bytes, but a submission has at most {MOST_BYTES:,}")
    code = [str(cell.source) for cell in read_notebook(path).cells if cell.cell_type == "code"]
    codes = dict(found for cell in code if (found := _code(cell)))
    cells = tuple(_without_magics(cell) for cell in code if not cell.startswith(_MAGIC))
    answered = tuple(name for cell in cells for name in answered_in(cell))
    return Submission(codes, answered, cells)


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Read a file as a notebook of nbformat's version 4.

    Raises
    ------
    ValueError
        If it is no notebook.
    OSError
        If it cannot be read.
    """
    try:
        return nbformat.read(path, as_version=4)
    except OSError:
        raise
    except Exception as error:  # nbformat may raise any error for a file that is no notebook
        raise ValueError(f"{path.name} is not a notebook: {type(error).__name__}: {error}") from None


def _code(cell: str) -> tuple[str, str] | None:
    """The exercise and the text of a cell that begins with ``%%check``; None of another, or of no such exercise."""
    first, _, text = cell.partition("\n")
    name = first.removeprefix(_MAGIC).strip()
    if first.startswith(_MAGIC) and isinstance(EXERCISES.get(name), CodeExercise):
        return name, text
    return None


def _without_magics(cell: str) -> str:
    """The cell without IPython's own lines; ``%time`` runs what follows it."""
    lines = (line.removeprefix("%time ").lstrip() if line.startswith("%time ") else line for line in cell.splitlines())
    return "\n".join("" if line.startswith(("%", "!")) else line for line in lines)
