"""Files of what was measured or trained: proven writable before the work, there whole or not at all, and read with
errors that name the element.

Every file that a user names is written by `replace`, and `check_writable` decides what may be there before:

- nothing, or an empty file;
- a file of the kind that the command writes, which the command's own loader reads. It is replaced;
- another file only with ``force``, the option ``--force`` of the commands;
- a character device or a pipe, such as /dev/stdout. It is written through, and stays what it is.

A link is followed to the file that it leads to. A file that is replaced passes its mode on, and its owner where the
system permits that. A file with several names (hard links) is refused, because only the named one would change. With
``force`` it is replaced, and its other names keep what was there. `check_distinct` keeps two options of a command from
naming one file.
"""

import errno
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from moeblaze_ref.core import unfinished

Load = Callable[[Path], Any]  # reads a file of one kind; raises ValueError or TypeError if it is of another
_pipes: dict[
    tuple[int, int], int
] = {}  # descriptors of the pipes that `check_writable` has opened, by device and inode


def check_writable(path: Path, load: Load, force: bool = False) -> None:
    """Check that a file may be written here; make its folder if need be.

    Parameters
    ----------
    path : Path
    load : callable
        Reads a file of the kind that is to be written.
    force : bool
        Allow to replace a regular file of any kind. Its other hard links keep what was there.

    Raises
    ------
    ValueError
        If the path is a folder, a block device or a socket, a pipe that no process reads, or a file of another kind
        or with several hard links that is not to be replaced.
    OSError
        If the folder or the file cannot be written, or links lead in circles. The message names ``path``.
    """
    target = _target(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, but a file is to be written: name one in it")
    if is_stream(path):
        _check_stream(path)
        return
    with naming(path):
        _open_beside(target)
    if target.exists() and not force:
        _check_links(path)
        _check_kind(path, load)


def file_named(text: str) -> Path:
    """Return the path of a file that is to be written.

    Parameters
    ----------
    text : str
        As the user wrote it: a `Path` forgets a slash at the end.

    Raises
    ------
    ValueError
        If it ends in a slash, or in a slash and a dot, as the name of a folder does.
    """
    if text.endswith(("/", "/.")):
        raise ValueError(f"{text} ends as a folder's name does, but a file is to be written: name one in it")
    return Path(text)


def _open_beside(path: Path) -> None:
    """Make the folder if it is missing. Check that it takes a new file, and that an existing ``path`` is writable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    if path.exists():
        path.open("a").close()


def _target(path: Path) -> Path:
    """Return the path without links; OSError if they lead in circles."""
    with naming(path), suppress(FileNotFoundError):
        path.stat()
    return Path(os.path.realpath(path))


def check_distinct(outputs: Mapping[str, Iterable[Path | None]]) -> None:
    """Check that no two options of a command name one file, or one a file and the other a folder of that name.

    Parameters
    ----------
    outputs : mapping
        The files that each option names, by the option. None stands for an option that is not given.

    Raises
    ------
    ValueError
        If two do, by links too. A character device such as /dev/null may be named twice.
    OSError
        If links lead in circles.
    """
    named = [(option, path) for option, paths in outputs.items() for path in paths if path is not None]
    for (one, path), (other, second) in itertools.combinations(named, 2):
        if one != other and _collide(path, second):
            raise ValueError(f"{one} writes {path}, and {other} writes {second}: name two files")


def _collide(path: Path, other: Path) -> bool:
    first, second = _target(path), _target(other)
    if path.exists() and other.exists():
        return path.samefile(other) and not path.is_char_device()
    return first == second or first in second.parents or second in first.parents


def _check_links(path: Path) -> None:
    names = path.stat().st_nlink
    if names > 1:
        raise ValueError(
            f"{path} has {names} names (hard links), and the others would not change with it: name another file, or "
            "replace this one by --force"
        )


def _check_kind(path: Path, load: Load) -> None:
    """An empty file holds nothing that could be lost."""
    if path.stat().st_size == 0:
        return
    try:
        load(path)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} exists, and this command did not write it: {error}. Name another one, or replace it by --force"
        ) from None


def is_stream(path: Path) -> bool:
    """Return True for a device, a pipe or a socket, and for the file that this process prints to."""
    return path.exists() and (not (path.is_file() or path.is_dir()) or _descriptor_of(path) is not None)


def _descriptor_of(path: Path) -> int | None:
    """Standard output or standard error, if the path leads there: a redirected /dev/stdout is a regular file."""
    return next((number for number in (1, 2) if _leads_to(path, number)), None)


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:  # the descriptor is closed
        return False


def _check_stream(path: Path) -> None:
    mode = path.stat().st_mode
    if not (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or _descriptor_of(path) is not None):
        kind = "block device" if stat.S_ISBLK(mode) else "socket"
        raise ValueError(f"{path} is a {kind}, but only a file, a character device or a pipe can be written: name one")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written: permission denied")
    if _descriptor_of(path) is None and stat.S_ISFIFO(mode):
        _open_pipe(path)


def _open_pipe(path: Path) -> None:
    """Open a pipe for what is written later: if it were closed until then, its reader would see the end."""
    if (key := _key(path)) in _pipes:
        return
    try:
        _pipes[key] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise ValueError(f"{path} is a pipe that no process reads: start its reader first, or name a file") from None


def _key(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def check_regular(path: Path) -> None:
    """Check that what exists here is a regular file, for what is read again and changed.

    Raises
    ------
    ValueError
        If a folder, a device, a pipe or a socket is there.
    """
    if path.exists() and (is_stream(path) or not path.is_file()):
        raise ValueError(f"{path} is not a regular file, but it must be one: it is read again. Name another path")


def write(path: Path, content: dict[str, Any], load: Load | None = None, force: bool = False) -> None:
    """Write ``content`` as JSON, making the folder if need be; parameters and errors as in `replace`.

    By default any JSON object is replaced.
    """
    text = json.dumps(content, indent=1) + "\n"
    replace(path, lambda part: part.write_text(text), load or (lambda found: read(found, ())), force)


def replace(path: Path, write: Callable[[Path], Any], load: Load, force: bool = False) -> None:
    """Let ``write`` fill a file beside ``path``, see it onto the disk, and give it that name.

    A kill at any moment leaves at ``path`` what was there before, or all of what is new. A character device or a pipe
    is written through instead.

    Parameters
    ----------
    path : Path
    write : callable
        Takes the path of the file to fill.
    load, force
        As in `check_writable`.

    Raises
    ------
    ValueError
        As in `check_writable`.
    OSError
        If it cannot be written; what was there before stays.
    """
    check_writable(path, load, force)
    with naming(path):
        if is_stream(path):
            _write_through(path, write)
        else:
            _replace_file(_target(path), write)  # a link stays one


def _write_through(path: Path, write: Callable[[Path], Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        write(whole)
        with whole.open("rb") as source, _opened(path) as target:
            shutil.copyfileobj(source, target)


def _opened(path: Path) -> BinaryIO:
    """A stream to write to; what this process prints to goes on where the last line ended."""
    if (descriptor := _descriptor_of(path)) is not None:
        sys.stdout.flush()
        return open(os.dup(descriptor), "wb")
    if path.is_fifo():
        pipe = _pipes.pop(_key(path))
        os.set_blocking(pipe, True)
        return open(pipe, "wb")
    return path.open("wb")


def _replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    with unfinished.beside(path) as part:
        write(part)
        to_disk(part)
        if path.exists():
            unfinished.pass_on(path.stat(), part)
        os.replace(part, path)
        to_disk(path.parent)


def earlier(path: Path, load: Load, force: bool = False) -> Any | None:
    """Return what a file holds that is to be added to; None if it holds nothing, or is replaced by ``force``.

    Parameters are as in `check_writable`. It raises what ``load`` raises.
    """
    if not path.exists() or is_stream(path) or path.stat().st_size == 0:
        return None
    try:
        return load(path)
    except (ValueError, TypeError):
        if force:
            return None
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Re-raise an OSError with the path of the file that cannot be written.

    The system names no file when a disk is full, and it may name a temporary file, so only its reason is kept.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from None


def to_disk(path: Path) -> None:
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
        If it is not a JSON object, or lacks a key.
    """
    return check_object(path.name, parse(path.name, path.read_bytes()), keys)


def parse(name: str, text: str | bytes) -> Any:
    """The value that JSON text stands for.

    Raises
    ------
    ValueError
        If it is not JSON, not even text, or nested too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def check_object(name: str, found: object, keys: Collection[str]) -> dict[str, Any]:
    """``found`` if it is an object with these keys."""
    if not isinstance(found, dict):
        wanted = f"have {', '.join(sorted(keys))}" if keys else "be one"
        raise ValueError(f"{name} is not a JSON object, but it must {wanted}")
    if missing := keys - found.keys():
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    return found


def check_list(name: str, found: object) -> list[Any]:
    """``found`` if it is a list."""
    if not isinstance(found, list):
        raise ValueError(f"{name} is not a list")
    return found
