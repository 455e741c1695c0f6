"""Which exercises one reader has solved, and when: a file of JSON in the user's own folder."""

import datetime
import os
import sys
from pathlib import Path

import platformdirs

from moeblaze_ref.core import checks, records
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
    path = file()
    if not path.exists():
        return {}
    return {name: str(day) for name, day in records.read(path, ()).items() if name in EXERCISES}


def note(name: str) -> None:
    """Note that an exercise was solved today, unless it was before. Where that cannot be written, say so on stderr."""
    try:
        records.write(file(), {name: datetime.date.today().isoformat()} | solved())
    except (OSError, ValueError) as error:
        print(f"that {name} is solved is not kept: {error}", file=sys.stderr)


def forget(name: str) -> None:
    """Forget that an exercise was solved.

    Raises
    ------
    ValueError
        If there is no such exercise.
    """
    checks.check_name("exercise", name, EXERCISES)
    records.write(file(), {other: day for other, day in solved().items() if other != name})
