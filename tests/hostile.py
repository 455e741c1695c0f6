"""What the tests of the guard need: checkers that lack a protection, and a look at the processes of the machine."""

import functools
import os
import signal
import time
import types
from contextlib import suppress
from pathlib import Path

from moeblaze_ref.verify import guard, in_subprocess, landlock, seccomp

SUPERVISE = in_subprocess._supervise


def supervise_unchecked(*args):
    """The checker's processes, if they refused no Python text."""
    from moeblaze_ref.verify.checker import kernels

    kernels.check_source = lambda *_: None
    SUPERVISE(*args)


def supervise_without(lacking, *args):
    """The checker's processes on a system without Landlock, filters of system calls, or all else that it can refuse."""
    refuse = lambda *_: False
    if "landlock" in lacking:
        landlock.keep_files = landlock.keep_signals_inside = refuse
    if "seccomp" in lacking:
        seccomp.refuse_calls = refuse
        seccomp.ask_before_starts = lambda: -1
    if "else" in lacking:
        guard._prctl = lambda *_: -1
        guard._drop_capabilities = guard._lower = refuse
    SUPERVISE(*args)


without_landlock = functools.partial(supervise_without, "landlock")
where_all_is_refused = functools.partial(supervise_without, "landlock, seccomp and all else")


def supervise_until(path, *args):
    """The checker's processes: time is over as soon as a file exists, in their temporary folder unless absolute."""
    _, _, _, folder, _ = args
    seconds = lambda: time.monotonic() + 10**6 * Path(folder, path).exists()
    guard.time = types.SimpleNamespace(monotonic=seconds, sleep=time.sleep)
    SUPERVISE(*args)


def supervise_with_a_clock_that_stands(*args):
    """The checker's processes where the one that watches the time does not run: a fifth of it may be CPU time."""
    guard.time = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)
    os.cpu_count = lambda: 0.2
    SUPERVISE(*args)


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


def running(name, mark):
    """The processes with this name and the mark, such as the child of a kernel that sleeps as the mark says."""
    return [process for process in processes_of(mark) if _status(process).startswith(f"Name:\t{name}\n")]


def stopped(name, mark):
    """One of these processes, which is stopped now; None if there is none."""
    for process in running(name, mark):
        with suppress(ProcessLookupError):  # it has ended
            os.kill(process, signal.SIGSTOP)
            return process


def parent_of(process):
    """The parent of a process."""
    _, _, after = _status(process).partition("\nPPid:\t")
    return int(after.partition("\n")[0])


def _status(process):
    try:
        return Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return ""


def until(holds, limit=120):
    """Wait until a function returns what is true, and return that; what it returned last after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
