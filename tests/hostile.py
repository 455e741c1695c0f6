"""What the tests of the guard need: a checker that refuses no text, and a look at the processes of the machine."""

import os
import time
from pathlib import Path

from moeblaze_ref import apart

CHECKED_ANSWER = apart._answer


def answer_unchecked(*args):
    """The process that compares, if it refused no Python text."""
    from moeblaze_ref.judge import kernels

    kernels.check_source = lambda *_: None
    CHECKED_ANSWER(*args)


def processes_of(mark):
    """The other processes whose command line or environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if mark.encode() in told and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def sleeps(mark):
    """The child of a kernel that sleeps for so many seconds as the mark says, once it does."""
    return [process for process in processes_of(mark) if _read(process, "comm") == "sleep\n"]


def children_of(parent):
    """The processes whose parent this is."""
    found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [process for process in found if f"\nPPid:\t{parent}\n" in _read(process, "status")]


def _read(process, name):
    try:
        return Path(f"/proc/{process}/{name}").read_text()
    except OSError:  # it has ended
        return ""


def until(holds, limit=120):
    """Wait until a function returns what is true, and return that; what it returned last after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
