"""Rules of Linux (Landlock) that keep untrusted code from writing files, and from signals to other processes.

Under either rule the code can open the memory of no process outside.

References: landlock(7), linux/landlock.h.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from glob import glob
from typing import NamedTuple

from moeblaze_ref.runtime.simt import cache

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # numbers of system calls
_GET_VERSION, _PATH_BENEATH = 1, 1
_SCOPE_SIGNAL = 1 << 1
_FILES_VERSION = 3  # of Linux 6.2, the first that keeps files from being emptied

_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE, _REFER, _TRUNCATE = (1 << bit for bit in (1, 4, 5, 13, 14))
_MAKE = sum(1 << bit for bit in range(6, 13))  # devices, folders, files, sockets, pipes and links
_WRITING_A_FILE = _WRITE_FILE | _TRUNCATE
_WRITING = _WRITING_A_FILE | _REMOVE_DIR | _REMOVE_FILE | _REFER | _MAKE


class Opened(NamedTuple):
    """A file or folder that code may write, and why."""

    path: str  #: with the wildcards of `glob`
    reason: str


def opened(folder: str) -> list[Opened]:
    """The paths that a reader's kernel may write, a folder for temporary files too. It may read what the user may."""
    found = [
        Opened(folder, "temporary files of compilers, of CuPy and of CUDA"),
        Opened("/dev/null", "compilers and shells write there"),
        Opened("/dev/zero", "shared memory without a name is mapped from it"),
        Opened("/proc/self/task", "CUDA names its threads: it writes /proc/PID/task/TID/comm"),
        Opened("/dev/nvidia*", "CUDA opens the GPU, nvidiactl, nvidia-uvm and nvidia-uvm-tools to write"),
        Opened("/dev/dxg", "CUDA opens the GPU through it on WSL"),
    ]
    with suppress(cache.SimtUnavailable):  # no cache can be made here, so nothing is written there
        found.append(Opened(str(cache.folder()), "compiled kernels"))
    return found


def keep_files(opened: Iterable[Opened]) -> bool:
    """Keep this process and the processes that it starts from writing any other file; False if the system refuses."""
    if _version() < _FILES_VERSION:
        return False
    ruleset = _ruleset(_WRITING)
    if ruleset < 0:
        return False
    for entry in opened:
        for path in glob(entry.path):
            _allow(ruleset, path, _WRITING if os.path.isdir(path) else _WRITING_A_FILE)
    return _restrict(ruleset)


def keep_signals_inside() -> bool:
    """Keep this process and the processes that it starts from sending signals to others; False if the system refuses.

    Beside rules of files, rules that do not mention files would refuse to move them between folders. These allow it.
    """
    ruleset = _ruleset(_REFER, 0, _SCOPE_SIGNAL)
    if ruleset < 0:
        return False
    _allow(ruleset, "/", _REFER)
    return _restrict(ruleset)


def _version() -> int:
    return _call(_CREATE_RULESET, None, 0, _GET_VERSION)


def _ruleset(*handled: int) -> int:
    """The file of a new set of rules, or -1."""
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    return _call(_CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)


def _allow(ruleset: int, path: str, rights: int):
    """Allow these rights below a path.

    The path stays open. A rule belongs to an inode, and one of /proc is forgotten once nothing uses it.
    """
    file = os.open(path, os.O_PATH)
    _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, file), 0)


def _restrict(ruleset: int) -> bool:
    done = _call(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _call(number: int, *arguments) -> int:
    return ctypes.CDLL(None).syscall(number, *arguments) if sys.platform == "linux" else -1
