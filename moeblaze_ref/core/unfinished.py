"""Temporary files, each beside the path that it is for, while a process fills them.

A process locks a file while it fills the file. A killed process leaves an unlocked file, and the next write into its
folder removes it.
"""

import fcntl
import os
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

NAME = ".moeblaze-{}.part"  # with 16 hexadecimal digits


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Make a file beside ``path`` under a name that nothing has, and remove it in the end unless it was renamed.

    Parameters
    ----------
    path : Path
        In a folder that is there.

    Yields
    ------
    Path
        Of the new file. It has the mode that the umask leaves, or is its owner's alone if it is to replace a file.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    _remove_abandoned(path.parent)
    part = path.with_name(NAME.format(secrets.token_hex(8)))
    mode = 0o600 if path.exists() else 0o666  # what is there may be for its owner's eyes alone
    with _removed_on_sigterm(part), open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        try:
            _lock(file)
            yield part
        finally:
            part.unlink(missing_ok=True)


def _lock(file: BinaryIO) -> None:
    """Lock a file. Where the file system has no locks, `_remove_abandoned` removes nothing either."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned(folder: Path) -> None:
    """Remove the files that killed processes left in a folder."""
    for part in folder.glob(NAME.format("[0-9a-f]" * 16)):
        with suppress(OSError):
            if stat.S_ISREG(part.lstat().st_mode):
                _remove_unlocked(part)


def _remove_unlocked(part: Path) -> None:
    """Remove a file, or raise OSError if another process fills it."""
    with part.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()


@contextmanager
def _removed_on_sigterm(part: Path) -> Iterator[None]:
    """Remove a file if SIGTERM ends this process meanwhile, unless the program handles the signal itself."""
    handled = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    if handled or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        part.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pass_on(replaced: os.stat_result, part: Path) -> None:
    """Copy the mode of the replaced file to the new file, and its group and owner where the system permits that."""
    for owner in ((-1, replaced.st_gid), (replaced.st_uid, -1)):
        with suppress(PermissionError):
            os.chown(part, *owner)
    part.chmod(stat.S_IMODE(replaced.st_mode))
