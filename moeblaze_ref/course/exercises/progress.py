"""Which exercises one reader has solved, and when: a file of JSON in the user's own folder.

A level of a capstone is kept beside it, as NAME/LEVEL.
"""

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import platformdirs

from moeblaze_ref.core import checks, records
from moeblaze_ref.course.exercises.exercise import LEVELS
from moeblaze_ref.course.exercises.sheets import EXERCISES


def file() -> Path:
    """Return the file: $MOEBLAZE_PROGRESS, or progress.json in moeblaze_ref of the user's state folder."""
    named = os.environ.get("MOEBLAZE_PROGRESS")
    return Path(named) if named else platformdirs.user_state_path("moeblaze_ref") / "progress.json"


def solved() -> dict[str, str]:
    """The days, as 2026-01-31, on which exercises were solved first, by name.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    return {name: day for name, day in _noted().items() if name in EXERCISES}


def levels() -> dict[str, str]:
    """The highest level of each capstone that was reached, one of `exercise.LEVELS`, by name.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    noted = _noted()
    return {name: level for level in LEVELS for name in EXERCISES if f"{name}/{level}" in noted}


def _noted() -> dict[str, str]:
    """The days by exercise and by NAME/LEVEL."""
    path = file()
    if not path.exists():
        return {}
    noted = {name: day for name, day in records.read(path, ()).items() if _exercise(name) in EXERCISES}
    for name, day in noted.items():
        _check_day(path, name, day)
    return noted


def _check_day(path: Path, name: str, day: Any) -> None:
    try:
        datetime.date.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: {name} is {day!r}, but it must be a day such as 2026-01-31") from None


def _exercise(name: str) -> str:
    return name.partition("/")[0]


def note(name: str) -> None:
    """Note that an exercise or a level (NAME/LEVEL) was solved today, unless it was before.

    Where that cannot be written, say so on stderr.
    """
    try:
        records.write(file(), {name: datetime.date.today().isoformat()} | _noted())
    except (OSError, ValueError) as error:
        print(f"that {name} is solved is not kept: {error}", file=sys.stderr)


def forget(name: str) -> None:
    """Forget that an exercise was solved, and its levels.

    Raises
    ------
    ValueError
        If there is no such exercise.
    """
    checks.check_name("exercise", name, EXERCISES)
    records.write(file(), {other: day for other, day in _noted().items() if _exercise(other) != name})
