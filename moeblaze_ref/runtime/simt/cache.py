"""The folder of compiled kernels: each file is there whole or not at all, and a damaged one is built again.

A file's name says what it was built from. Its last line, the seal, is the SHA-256 of its name and of all bytes before.
What was cut, emptied, or built from something else therefore counts as absent, and is never loaded: the loader of a cut
library would end the process. The seal is a comment of C++; libraries and precompiled headers may end in any bytes.
What cannot be read, a link that leads nowhere, a pipe and an empty folder count as absent too.
"""

import functools
import hashlib
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeblaze_ref.core import folders, records

ENDINGS = (".so", ".hpp", ".gch")
SEAL_BYTES = len("\n// \n") + 2 * hashlib.sha256().digest_size


class SimtUnavailable(RuntimeError):
    """The SIMT executor cannot run here; the message says what to install or to set."""


def folder() -> Path:
    """Return the folder: simt in $MOEBLAZE_CACHE, or in moeblaze_ref of the user's cache folder. Make it if need be.

    Raises
    ------
    SimtUnavailable
        If it cannot be made, or nothing says where the user's cache folder is.

    Notes
    -----
    An empty variable counts as not set. So does a relative $XDG_CACHE_HOME, as the XDG base directory specification
    demands, and a relative $HOME.
    """
    named = os.environ.get("MOEBLAZE_CACHE")
    path = (Path(named) if named else _caches_of_user() / "moeblaze_ref") / "simt"
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def _caches_of_user() -> Path:
    return _absolute("XDG_CACHE_HOME") or (_absolute("HOME") or _home_by_password_database()) / ".cache"


def _absolute(variable: str) -> Path | None:
    """Return the path that an environment variable names; None if it names none, or a relative one."""
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else None


def _home_by_password_database() -> Path:
    with suppress(KeyError):  # a container may run under a number that no user has
        home = pwd.getpwuid(os.getuid()).pw_dir
        if os.path.isabs(home):
            return Path(home)
    raise SimtUnavailable(
        f"there is no folder for compiled kernels: HOME is not set, and user {os.getuid()} has no home folder; "
        "set MOEBLAZE_CACHE to a folder"
    )


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """Return a file of the cache; if it is absent or damaged, make it.

    Parameters
    ----------
    name : str
        Made from everything that decides the content.
    make : callable
        Takes the path of the file to make, in an empty folder of its own.

    Raises
    ------
    SimtUnavailable
        If the file must be made, and the folder cannot be written, or a folder that is not empty has the file's name.
    """
    path = folder() / name
    if not is_whole(path):
        with _writing(path.parent):
            _remove_empty_folder(path)
            _make(path, make)
    return path


def discard(path: Path) -> None:
    """Remove a file of the cache, so that it is made again.

    Raises
    ------
    SimtUnavailable
        If the folder cannot be written.
    """
    with _writing(path.parent):
        path.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Return True if a readable file is there, with the seal that it was written with under this name."""
    try:
        return path.is_file() and _has_seal(path, _state(path.stat()))
    except OSError:
        return False


def _state(found: os.stat_result) -> tuple[int, ...]:
    """Return a tuple that differs after every change of a file."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@functools.cache
def _has_seal(path: Path, state: tuple[int, ...]) -> bool:
    """Read a file once for each of its states: a precompiled header has 20 MB, and each compilation asks for it."""
    whole = path.read_bytes()
    return whole[-SEAL_BYTES:] == _seal(path.name, whole[:-SEAL_BYTES])


def _remove_empty_folder(path: Path) -> None:
    """Remove an empty folder at a file's path. Raise SimtUnavailable if it has content, which may be needed."""
    if not path.is_dir() or path.is_symlink():
        return
    try:
        path.rmdir()
    except OSError as error:
        raise SimtUnavailable(
            f"{path} is a folder, but a compiled file must be there ({error.strerror}); remove it, or set "
            "MOEBLAZE_CACHE to another folder"
        ) from None


def summary() -> str:
    """Read every file of the cache and say in one sentence how many there are, and how many of them are damaged.

    Raises
    ------
    SimtUnavailable
        If the folder cannot be made or listed.
    """
    try:
        found = [path for path in folder().iterdir() if path.suffix in ENDINGS]
    except OSError as error:
        raise SimtUnavailable(
            f"the folder of compiled kernels {folder()} cannot be listed ({error}); set MOEBLAZE_CACHE to another "
            "folder"
        ) from None
    damaged = sum(not is_whole(path) for path in found)
    what = f", {damaged} of them damaged or of an earlier version: they are built again when needed" if damaged else ""
    return f"compiled files in {folder()}: {len(found)}{what}"


def _seal(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0" + content).hexdigest()
    return f"\n// {digest}\n".encode()


def _make(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file atomically: other processes see the whole file or none, also after a kill or a loss of power."""
    with _unfinished(path.parent) as scratch:
        made = Path(scratch, path.name)
        make(made)
        content = made.read_bytes()
        made.write_bytes(content + _seal(path.name, content))
        records.to_disk(made)
        os.replace(made, path)
        records.to_disk(path.parent)


def _unfinished(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder in the cache to build in, named after this process's folder for temporary files."""
    return tempfile.TemporaryDirectory(dir=cache, prefix=f"{Path(tempfile.gettempdir()).name}-")


def remove_unfinished(temporary: str) -> list[str]:
    """Remove what killed processes have left in the cache, if this was their folder for temporary files.

    Returns
    -------
    list of str
        A line for each folder that could not be removed.
    """
    left = [folders.remove(path) for path in folder().glob(f"{Path(temporary).name}-*")]
    return [*filter(None, left)]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SimtUnavailable(
            f"the folder of compiled kernels {path} cannot be written ({error}); set MOEBLAZE_CACHE to another folder"
        ) from None
