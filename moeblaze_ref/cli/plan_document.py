"""Writes docs/plan.md: the output of each of its commands, and what a GPU measured.

A block with a command is followed by the block of its output. Run ``python -m moeblaze_ref.cli.plan_document``.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from moeblaze_ref.cli.app import app
from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS

PAGE = DOCS / "plan.md"
RECORD = DOCS / "results" / "plan_h200.json"
COLUMNS = 100
_COMMAND = re.compile(r"```text\nmoeblaze (.*)\n```\n\n<!-- begin (\w+) -->")


def page(text: str) -> str:
    """The page with every block written anew."""
    commands = {name: command for command, name in _COMMAND.findall(text)}
    outputs = {name: lambda command=command: output(command) for name, command in commands.items()}
    return documents.fill(text, {**outputs, "measured": lambda: measured(json.loads(RECORD.read_text()))})


def output(command: str) -> str:
    """Return the output of a command as a block of text.

    Raises
    ------
    ValueError
        If it fails.
    """
    result = CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(app, shlex.split(command))
    if result.exit_code:
        raise ValueError(f"moeblaze {command} ended with status {result.exit_code}: {result.stderr}")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    return "\n".join(["```text", *_without_doubled_blanks(lines), "```"])


def _without_doubled_blanks(lines: list[str]) -> list[str]:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n").split("\n")


def measured(record: dict[str, Any]) -> str:
    """A row for each case of a record: kept bytes, and how far each planned peak is from the allocator's."""
    rows = [[*_case(row), f"{row['kept_bytes']:,}", _equal(row), *_deviations(row)] for row in record["rows"]]
    columns = ["model", "layers", "attention", "experts", "tokens", "kept bytes", "storages"]
    table = documents.table([*columns, "forward", "backward", "optimizer"], rows, words=4)
    return "\n".join([*documents.place(record), "", table])


def _case(row: dict[str, Any]) -> list[str]:
    return [row["model"], str(row["layers"]), row["attention"], row["experts"], f"{row['sequence']:,}"]


def _equal(row: dict[str, Any]) -> str:
    return "equal" if row["same_storages"] else f"{row['planned_kept_bytes'] - row['kept_bytes']:+,} bytes"


def _deviations(row: dict[str, Any]) -> list[str]:
    if row["peaks"] is None:
        return ["out of memory"] * 3
    return [f"{row['planned_peaks'][phase] / number - 1:+.2%}" for phase, number in row["peaks"].items()]


def write(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(path.read_text()))


if __name__ == "__main__":
    write()
