"""Removing a folder that untrusted code has filled."""

import itertools
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(path: str | Path) -> str:
    """Remove a folder and its content, or the link or file in its place. Links are not followed.

    Folders may be nested to any depth, and their modes may forbid access. Each folder is opened from its parent, and
    only a few are open at a time.

    Returns
    -------
    str
        One line that says what could not be removed and why; empty if all is gone.
    """
    path = Path(path)
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        return _line(path, error)
    try:
        errors = _remove(path.name, parent)
    finally:
        os.close(parent)
    return _line(path, errors[0]) if errors else ""


def _line(path: Path, error: OSError) -> str:
    return f"{path} cannot be removed: {error.strerror}"


def _remove(name: str, parent: int) -> list[OSError]:
    """Remove an entry of an open folder. Returns what failed, the cause first."""
    try:
        if not _is_folder(name, parent):
            os.unlink(name, dir_fd=parent)
            return []
        folder = _open(name, parent)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [error]
    try:
        errors = _empty(folder)
    finally:
        os.close(folder)
    return errors + _failures(os.rmdir, name, dir_fd=parent)


def _empty(folder: int) -> list[OSError]:
    """Empty a folder: each folder below moves into one new folder at the top, so none is deep when its turn comes."""
    collected = uuid4().hex
    try:
        os.mkdir(collected, 0o700, dir_fd=folder)
        top = _open(collected, folder)
    except OSError as error:
        return [error]
    try:
        errors = _flatten(folder, top, keep=collected)
    finally:
        os.close(top)
    return errors + _failures(os.rmdir, collected, dir_fd=folder)


def _flatten(folder: int, top: int, keep: str) -> list[OSError]:
    """Empty a folder but for ``keep``, by way of ``top``."""
    numbers = itertools.count()
    waiting: deque[str] = deque()
    errors = _clear([name for name in os.listdir(folder) if name != keep], folder, top, numbers, waiting)
    while waiting:
        name = waiting.popleft()
        try:
            inner = _open(name, top)
        except OSError as error:
            errors.append(error)
            continue
        try:
            errors += _clear(os.listdir(inner), inner, top, numbers, waiting)
        finally:
            os.close(inner)
        errors += _failures(os.rmdir, name, dir_fd=top)
    return errors


def _clear(names: list[str], folder: int, top: int, numbers: Iterator[int], waiting: deque[str]) -> list[OSError]:
    """Remove these files of a folder, and move these folders to the top, where they wait under a number."""
    errors = []
    for name in names:
        try:
            if _is_folder(name, folder):
                _open_to_owner(name, folder)  # a folder that moves must be writable
                number = str(next(numbers))
                os.rename(name, number, src_dir_fd=folder, dst_dir_fd=top)
                waiting.append(number)
            else:
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            errors.append(error)
    return errors


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _open(name: str, parent: int) -> int:
    """Open a folder, whatever its mode is."""
    with suppress(PermissionError):  # the owner then is another, and opening it says so
        _open_to_owner(name, parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def _open_to_owner(name: str, parent: int) -> None:
    """Give the owner all rights to a folder. What has become a link meanwhile is not followed."""
    if not hasattr(os, "O_PATH"):
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    file = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{file}", 0o700)
    finally:
        os.close(file)


def _failures(call: Callable[..., None], *arguments: Any, **options: Any) -> list[OSError]:
    try:
        call(*arguments, **options)
    except OSError as error:
        return [error]
    return []
