"""A reader's texts in the editor: a file for each exercise, in a folder beside the file of the progress."""

import sys
from pathlib import Path

from moeblaze_ref.core import records
from moeblaze_ref.course.exercises import progress


def file(name: str) -> Path:
    """Return the file of an exercise's text."""
    return progress.file().with_name("drafts") / f"{name}.txt"


def read(name: str) -> str | None:
    """Return what was last written for an exercise; None if nothing was, or if it is forgotten.

    A file that is no text stays as it is, and stderr says so: `keep` does not write over it either.
    """
    path = file(name)
    try:
        return path.read_text() if path.exists() else None
    except (OSError, ValueError) as error:
        print(f"your text of {name} cannot be read from {path}: {error}; remove or rename the file", file=sys.stderr)
        return None


def keep(name: str, text: str) -> None:
    """Keep a text in place of the one before. Where it cannot be written, say so on stderr."""
    try:
        records.replace(file(name), lambda part: part.write_text(text), Path.read_text)
    except (OSError, ValueError) as error:
        print(f"your text of {name} is not kept: {error}", file=sys.stderr)


def forget(name: str) -> None:
    """Forget the text of an exercise, if there is one."""
    file(name).unlink(missing_ok=True)
