"""The record of a training run: one JSON object a line, in a file that outlives a kill."""

import json
from pathlib import Path
from typing import Any

from moeblaze_ref import records
from moeblaze_ref.lm.checkpoint import replace


class Log:
    """Lines with a step each, appended as they come.

    Parameters
    ----------
    path : Path
        What a run has written there stays as far as it was saved.
    through : int
        The last step that is kept; later lines, and one that a kill has cut in two, are removed. A fresh run keeps
        none: -1.

    Attributes
    ----------
    lines : list of dict
        All that the file holds.
    """

    def __init__(self, path: Path, through: int):
        self.path = path
        self.lines = [line for line in read(path) if line["step"] <= through]
        text = "".join(_line(fields) for fields in self.lines)
        replace(path, lambda part: part.write_text(text))

    def add(self, fields: dict[str, Any]):
        """Append one line."""
        with self.path.open("a") as file:
            file.write(_line(fields))
        self.lines.append(fields)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last one that a kill has cut in two; none if there is no file.

    Raises
    ------
    ValueError
        If a line is no JSON object with a step: the message has its number.
    """
    *whole, _ = path.read_text().split("\n") if path.exists() else [""]
    return [_fields(f"{path}, line {number}", line) for number, line in enumerate(whole, start=1)]


def _fields(name: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from None
    return records.check_object(name, found, {"step"})


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(fields) + "\n"
