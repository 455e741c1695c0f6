"""The record of a training run: one JSON object a line, in a file that outlives a kill."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeblaze_ref.core import checks, records


class Log:
    """Lines with a step each, appended as they come; the first ones stand in place of what the path held.

    ``lines`` are the lines of the file.
    """

    def __init__(self, path: Path, lines: Sequence[dict[str, Any]]):
        self.path, self.lines = path, list(lines)
        records.replace(path, lambda part: part.write_text(_text(lines)), read)

    def add(self, *lines: dict[str, Any]):
        """Append lines: a reader of the file meanwhile sees all of them or none.

        Raises
        ------
        OSError
            If they cannot be written.
        """
        with records.naming(self.path), self.path.open("a") as file:
            file.write(_text(lines))
        self.lines += lines


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last one that a kill has cut in two.

    Raises
    ------
    OSError
        If there is no such file, or it may not be read.
    ValueError, TypeError
        If there is no line, one is not a JSON object with a whole number as its step, or the losses are not of step 1,
        2 and so on: the message has the line's number or the step.
    """
    *whole, _ = path.read_text().split("\n")
    if not whole:
        raise ValueError(f"{path} holds no whole line, but a log has at least one")
    lines = [_fields(f"{path}, line {number}", line) for number, line in enumerate(whole, start=1)]
    for expected, step in enumerate((line["step"] for line in lines if "loss" in line), start=1):
        if step != expected:
            raise ValueError(f"{path} has the loss of step {step} where that of step {expected} must be")
    return lines


def _fields(name: str, line: str) -> dict[str, Any]:
    found = records.parse(name, line)
    checks.check_int(f"{name}: step", records.check_object(name, found, {"step"})["step"], at_least=0)
    return found


def _text(lines: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(fields) + "\n" for fields in lines)
