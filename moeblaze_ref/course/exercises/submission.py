"""A notebook that somebody has solved: the answers in it, found without running anything, or by running it confined."""

import ast
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from moeblaze_ref.course import exercises
from moeblaze_ref.course.exercises.exercise import CodeExercise
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS

MOST_BYTES = 16 * 2**20  # of a notebook
MOST_CHARACTERS = 500  # of an error
CELL_SECONDS = 10  # of one cell that answers by calling predict or construct
_MAGIC = "%%check "
_CALLS = ("predict", "construct")


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
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path.name} has {size:,} bytes, but a submission has at most {MOST_BYTES:,}")
    try:
        notebook = nbformat.read(path, as_version=4)
        code = [str(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    except Exception as error:  # whatever nbformat makes of a file that is no notebook
        raise ValueError(f"{path.name} is no notebook: {type(error).__name__}: {error}") from None
    codes = dict(found for cell in code if (found := _code(cell)))
    cells = tuple(_without_magics(cell) for cell in code if not cell.startswith(_MAGIC))
    answered = tuple(name for cell in cells for name in _names(cell))
    return Submission(codes, answered, cells)


def _code(cell: str) -> tuple[str, str] | None:
    """The exercise and the text of a cell that begins with ``%%check``; None of another, or of no such exercise."""
    first, _, text = cell.partition("\n")
    name = first.removeprefix(_MAGIC).strip()
    if first.startswith(_MAGIC) and isinstance(EXERCISES.get(name), CodeExercise):
        return name, text
    return None


def _without_magics(cell: str) -> str:
    return "\n".join("" if line.startswith(("%", "!")) else line for line in cell.splitlines())


def _names(cell: str) -> Iterator[str]:
    """The exercises that a cell answers by calls."""
    try:
        nodes = [*ast.walk(ast.parse(cell))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # it answers nothing
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=called), args=[ast.Constant(value=str(name))]) if called in _CALLS:
                if name in EXERCISES:
                    yield name


# ---- in a confined process ------------------------------------------------------------------------------


def send_answers(cells: tuple[str, ...], send: Callable[[bytes], Any]) -> None:
    """Run the cells one after another; send what each call of ``predict`` or ``construct`` is given, a line of JSON.

    A cell may take `CELL_SECONDS`. If one raises, the error is sent for the exercises that it answers.
    """

    def told(name: Any, **said: Any) -> None:
        _send_line(send, name=str(name), said={key: _plain(value) for key, value in said.items()})

    for call in _CALLS:  # in this process alone: the first cell of a sheet imports them
        setattr(exercises, call, told)
    namespace: dict[str, Any] = {"__name__": "submission", "predict": told, "construct": told}
    signal.signal(signal.SIGALRM, _stop)
    for number, cell in enumerate(cells):
        signal.alarm(CELL_SECONDS)
        try:
            exec(compile(cell, f"cell {number}", "exec"), namespace)
        except BaseException as error:  # whatever a submission does
            for name in _names(cell):
                _send_line(send, name=name, error=f"{type(error).__name__}: {error}"[:MOST_CHARACTERS])
        finally:
            signal.alarm(0)


def _send_line(send: Callable[[bytes], Any], **line: Any):
    send(json.dumps(line).encode() + b"\n")


def _stop(*_: Any):
    raise TimeoutError(f"the cell takes longer than {CELL_SECONDS} seconds")


def _plain(value: Any) -> Any:
    """The value as JSON has it, null for ``...``; a text that names the type of what JSON does not have."""
    if value is ...:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return value


def read_answers(sent: bytes) -> dict[str, dict[str, Any]]:
    """What `send_answers` sent, the last of each exercise: its ``said``, or its ``error``. Other lines are dropped."""
    answers: dict[str, dict[str, Any]] = {}
    for line in sent.splitlines():
        match _json(line):
            case {"name": str(name), "said": dict(said)}:
                answers[name] = {"said": {key: ... if value is None else value for key, value in said.items()}}
            case {"name": str(name), "error": str(error)}:
                answers[name] = {"error": error}
    return answers


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
