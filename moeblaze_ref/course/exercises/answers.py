"""The answers of a submission's cells, found by running them in a confined process.

The server of `grading` imports this module, and then forks a process for each submission.
"""

import ast
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

from moeblaze_ref.course import exercises
from moeblaze_ref.course.exercises.sheets import EXERCISES

MOST_CHARACTERS = 500  # of an error
CELL_SECONDS = 10  # of one cell that answers by calling predict or construct
_CALLS = ("predict", "construct")


def answered_in(cell: str) -> Iterator[str]:
    """The exercises that a cell answers by calling ``predict`` or ``construct``."""
    try:
        nodes = [*ast.walk(ast.parse(cell))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # it answers nothing
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in _CALLS:
                if (name := _first_argument(node)) in EXERCISES:
                    yield name


def _first_argument(call: ast.Call) -> str:
    """The text that ``predict`` or ``construct`` gets as the name of the exercise; empty if it is no plain text."""
    for value in [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""


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
        except BaseException as error:  # a submission may raise anything
            for name in answered_in(cell):
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
    """Return the last answer to each exercise that `send_answers` sent: its ``said``, or its ``error``.

    Other lines are dropped.
    """
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
