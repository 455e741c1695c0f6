"""Files of what was measured or trained: proven writable before the work, there whole or not at all, and read with
errors that name the element.
"""

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_writable(path: Path):
    """A file can be written here: its folder is made if need be, and takes one; a file that exists can be changed.

    Raises
    ------
    ValueError
        If the path is a folder.
    OSError
        If the folder or the file cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder, but a file is to be written: name one in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    if path.exists():
        path.open("a").close()


def write(path: Path, content: dict[str, Any]):
    """Write ``content``, making the folder if need be.

    Raises
    ------
    OSError
        As `replace`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n"))


def replace(path: Path, write: Callable[[Path], Any]):
    """Let ``write`` fill a file beside ``path``, see it onto the disk, and give it that name.

    A kill at any moment leaves at ``path`` what was there before, or all of what is new.

    Raises
    ------
    OSError
        If it cannot be written; what was there before stays.
    """
    path = path.resolve()  # a link stays one
    part = path.with_name(f"{path.name}.part")  # a killed process leaves it, and the next one writes over it
    try:
        with naming(path):
            write(part)
            to_disk(part)
            os.replace(part, path)
            to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What keeps a file from being written, as an OSError that says which: a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from None


def to_disk(path: Path):
    """Wait until a file, or the names in a folder, would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """The object that a file holds.

    Parameters
    ----------
    path : Path
    keys : collection of str
        What it must have.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is no JSON, no object, or lacks a key.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or not even text
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    return check_object(path.name, found, keys)


def check_object(name: str, found: Any, keys: Collection[str]) -> dict[str, Any]:
    """``found`` if it is an object with these keys."""
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object, but it must have {', '.join(sorted(keys))}")
    if missing := keys - found.keys():
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    return found


def check_list(name: str, found: Any) -> list[Any]:
    """``found`` if it is a list."""
    if not isinstance(found, list):
        raise ValueError(f"{name} is no list")
    return found
