"""Run untrusted code in a forked process, with limits, and end all processes that it started.

The process gets a session of its own, no capabilities, and no open file but its output and one pipe. It ends when the
process that watches it ends. The watcher is the *subreaper* of its descendants: it also finds a process whose parent
has ended, and a process that has called ``setsid``. `supervise` does the same for the watcher, so that the code ends
even if the watcher is killed.

`verify.landlock` keeps the code from writing files, from signals to processes outside, and from their memory.
`verify.seccomp` refuses the network, and other calls that act on processes outside. Where a system lacks Landlock,
`keep_others_out` closes the memory of the processes that call it. `verify.starts` makes the code ask before it starts a
process: it never has more than it may, and starts none while all are ended.

`Ended.refused` names what a system has refused. Without Linux only the process group is ended, and only time is
limited.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from moeblaze_ref.core.units import GIB, MIB
from moeblaze_ref.verify import landlock, seccomp, starts

POLL_SECONDS = 0.1  # between two looks at memory and processes, unless there are many more processes before
WAKE_SECONDS = 0.005  # between two looks at whether the process has ended, and at how many processes the machine has
NO_NETWORK = "no network, and no other calls that act on other processes (seccomp)"
KILL_SECONDS = 30  # that the kernel may take to end killed processes
MOST_SENT = 16 * MIB  # bytes through the pipe
RESIDENT_BYTES = 8 * GIB  # unless the machine has less than twice that

# linux/prctl.h and linux/capability.h
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 3, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2  # root reads files of others, as it did


def half_of_memory() -> int:
    """Half of the machine's memory, in bytes; `RESIDENT_BYTES` where the system does not tell."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return RESIDENT_BYTES
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Limits(NamedTuple):
    """Limits of the resources that code may use."""

    #: Of time. Each process may use as many of CPU time on every core: more, and the time is over too.
    seconds: float
    #: Memory that the process and its descendants hold together, looked at every `POLL_SECONDS`. Files in memory, of
    #: ``memfd_create`` and of /dev/shm, count too.
    resident_bytes: int = min(RESIDENT_BYTES, half_of_memory())
    processes: int = 64  #: how many these are; a compiler is four
    file_bytes: int = GIB  #: of the largest file that it may write


class Ended(NamedTuple):
    """The way in which code ended."""

    sent: bytes  #: what came through its pipe
    status: int  #: its exit status, or minus the signal that ended it
    refused: tuple[str, ...]  #: parts of the confinement that the system has refused


Send = Callable[[bytes], Any]


def run(work: Callable[[Send], None], limits: Limits, folder: str, gone: Iterable[Any] = ()) -> Ended:
    """Fork, call the work there with a function that sends bytes, and end everything that it started.

    The process and its children put temporary files into the folder (``TMPDIR``); the caller removes it. ``gone`` are
    sentinels of the processes that wait for the result: if one of them ends, the work is ended too.

    Raises
    ------
    TimeoutError
        If the work takes longer than it may.
    ChildProcessError
        If it holds more memory, has more descendants, or sends more than it may.
    ConnectionAbortedError
        If a process of ``gone`` has ended.
    """
    refused = _refused({"finding processes whose parent has ended (subreaper)": _become_subreaper})
    reading, writing = os.pipe()
    ours, theirs = socket.socketpair()
    with _list_of_children() as children, ours, contextlib.ExitStack() as opened:
        opened.callback(os.close, reading)
        watcher, child = os.getpid(), os.fork()
        if child == 0:
            _leave(partial(_work, work, writing, theirs, limits, folder, watcher))
        os.close(writing)
        theirs.close()
        ours.settimeout(limits.seconds)  # TimeoutError, should the process not get as far as its listener
        try:
            listener = opened.enter_context(starts.received(ours))
            told, status = _watch(child, reading, listener, limits, list(gone))
        finally:
            _end(child, children)
    if status == -signal.SIGXCPU:
        raise _out_of_time(limits)
    first, _, sent = told.partition(b"\n")
    return Ended(sent, status, (*refused, *json.loads(first or b"[]")))


def supervise(work: Callable[[], Any]) -> int:
    """Fork, do the work there, and end every process that is left, even if the fork was killed.

    SIGTERM goes on to the process that works, which also gets it if this one is killed. It then ends what it started.
    Returns its exit status, or minus the signal that ended it.
    """
    _become_subreaper()
    with _list_of_children() as children:
        supervisor, child = os.getpid(), os.fork()
        if child == 0:
            _end_with(supervisor, signal.SIGTERM)
            _leave(work)
        signal.signal(signal.SIGTERM, lambda *_: _kill(child, signal.SIGTERM))
        _, status = os.waitpid(child, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself now
        _end(child, children)
    return os.waitstatus_to_exitcode(status)


def keep_others_out() -> bool:
    """Let no other process of this user open this one's memory or files under /proc; False if the system refuses."""
    return _prctl(_PR_SET_DUMPABLE, 0) == 0


_lock = threading.Lock()
_before: list[int] = []  # for each thread inside: whether the process could be opened when the thread came


@contextlib.contextmanager
def others_kept_out() -> Iterator[None]:
    """`keep_others_out` as long as a thread is inside."""
    with _lock:
        _before.append(_prctl(_PR_GET_DUMPABLE))
        keep_others_out()
    try:
        yield
    finally:
        with _lock:
            if _before.pop() == 1:  # of the first: all others found the process closed
                _prctl(_PR_SET_DUMPABLE, 1)


# ---- in the process ------------------------------------------------------------------------------


def _leave(work: Callable[[], Any]):
    """Do the work of a forked process and end it."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what a kernel's printf has written
        os._exit(status & 0xFF)


def _work(
    work: Callable[[Send], None], writing: int, channel: socket.socket, limits: Limits, folder: str, watcher: int
):
    """Confine this process and tell what the system refuses of that, in a first line; then do the work."""
    pipe = os.dup2(writing, 3, inheritable=False)
    with channel:
        refused = _confine(pipe, channel, limits, folder, watcher)
    _write(pipe, json.dumps(refused).encode() + b"\n")
    work(partial(_write, pipe))


def _write(pipe: int, data: bytes):
    while data:
        data = data[os.write(pipe, data) :]


def _confine(pipe: int, channel: socket.socket, limits: Limits, folder: str, watcher: int) -> list[str]:
    """Drop what the code must not have: the pipe is its only open file beyond input, output and errors.

    The caller closes the channel, which is open too. Returns what the system has refused.
    """
    os.setsid()
    _prctl(_PR_SET_DUMPABLE, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for file in map(int, os.listdir("/dev/fd")):
        if file > pipe and file != channel.fileno():
            with contextlib.suppress(OSError):  # the listing's own is closed
                os.close(file)
    tempfile.tempdir = folder
    os.environ |= dict.fromkeys(("TMPDIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"), folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cpu_seconds = int(limits.seconds * (os.cpu_count() or 1)) + 1
    steps: dict[str, Callable[[], bool]] = {
        "the end with the process that watches (PR_SET_PDEATHSIG)": partial(_end_with, watcher, signal.SIGKILL),
        "no new rights (PR_SET_NO_NEW_PRIVS)": lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1) == 0,
        "no capabilities (capset)": _drop_capabilities,
        "no writing to files, and no memory of other processes (Landlock of Linux 6.2)": partial(
            landlock.keep_files, landlock.opened(folder)
        ),
        "no signals to other processes (Landlock of Linux 6.12)": landlock.keep_signals_inside,
        NO_NETWORK: seccomp.refuse_calls,
        "processes that are counted before they start (seccomp of Linux 5.19)": partial(starts.hand_over, channel),
        "a limit of CPU time (RLIMIT_CPU)": partial(_lower, resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
        "a limit of file sizes (RLIMIT_FSIZE)": partial(_lower, resource.RLIMIT_FSIZE, limits.file_bytes),
        "no core dumps (RLIMIT_CORE)": partial(_lower, resource.RLIMIT_CORE, 0),
    }
    return _refused(steps)


def _refused(steps: dict[str, Callable[[], bool]]) -> list[str]:
    """Take the steps, and return the names of the steps that the system refuses."""
    return [name for name, step in steps.items() if not step()]


def _end_with(parent: int, number: signal.Signals) -> bool:
    """Get this signal when the parent ends."""
    done = _prctl(_PR_SET_PDEATHSIG, number) == 0
    if os.getppid() != parent:
        os._exit(1)  # it ended before it could be told so
    return done


def _lower(kind: int, most: int, at_last: int | None = None) -> bool:
    """Set a limit of the process, unless it has a lower one, which it may not raise.

    A process that uses more CPU time than ``most`` gets SIGXCPU. It is killed above ``at_last``, by default the same.
    """
    _, hard = resource.getrlimit(kind)
    soft, hard = (
        limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        for limit in (most, most if at_last is None else at_last)
    )
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


def _drop_capabilities() -> bool:
    """Root without these is a user like another: it cannot look into the processes that watch and compare."""
    if sys.platform != "linux":
        return False
    kept = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3), (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets):
        return False
    effective, permitted, *_ = sets
    return libc.capset(header, (ctypes.c_uint32 * 6)(effective & kept, permitted & kept)) == 0


def _become_subreaper() -> bool:
    """Become the parent of descendants whose parent ends."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def _prctl(option: int, value: int = 0) -> int:
    """Call ``prctl``: -1 if the system refuses."""
    return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) if sys.platform == "linux" else -1


# ---- from outside --------------------------------------------------------------------------------


def _out_of_time(limits: Limits) -> TimeoutError:
    return TimeoutError(f"there is no verdict after {limits.seconds:g} seconds, the limit: does a loop never end?")


def _watch(child: int, reading: int, listener: int | None, limits: Limits, gone: list[Any]) -> tuple[bytes, int]:
    """Collect what the process sends until it ends, or breaks a limit. Returns that, and how it ended."""
    os.set_blocking(reading, False)
    sent, deadline = bytearray(), time.monotonic() + limits.seconds
    sources = [reading, *gone] if listener is None else [reading, listener, *gone]
    next_look, seen = time.monotonic() + POLL_SECONDS, _processes_of_machine()
    places = limits.processes - 1  # for processes that may start before the next look
    while True:
        with _open_files_needed():
            ready = wait(sources, max(min(WAKE_SECONDS, deadline - time.monotonic()), 0))
        ended, status = os.waitpid(child, os.WNOHANG)
        if reading in ready and not _receive(reading, sent):
            sources.remove(reading)  # it has closed its end, or has ended
        if ended:
            _receive(reading, sent)
            return bytes(sent), os.waitstatus_to_exitcode(status)
        if any(source in ready for source in gone):
            raise ConnectionAbortedError("the process that asked has ended")
        if time.monotonic() >= deadline:
            raise _out_of_time(limits)
        places = starts.allow(listener, places)
        starting = not places and starts.asked(listener)
        now, processes = time.monotonic(), _processes_of_machine()
        if now >= next_look or starting or processes > seen + limits.processes:  # whatever the process sends meanwhile
            places = _look(limits, starting)
            next_look, seen = now + POLL_SECONDS, processes


def _receive(reading: int, sent: bytearray) -> bool:
    """Take what is in the pipe; False if no one can write to it any more."""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reading, 2**16):
            sent.extend(part)
            if len(sent) > MOST_SENT:
                raise ChildProcessError(f"the kernel's process has sent more than {MOST_SENT:,} bytes, the limit")
        return False
    return True


def _processes_of_machine() -> int:
    """How many processes there are, in microseconds: Linux counts them as links of /proc; elsewhere 0.

    Code that forks without end makes thousands in `POLL_SECONDS`, and to end them takes minutes.
    """
    try:
        return os.stat("/proc").st_nlink
    except OSError:
        return 0


def _look(limits: Limits, starting: int) -> int:
    """Check the limits of all descendants, waiting starts included. Return how many more processes may start."""
    with _open_files_needed():
        processes = _descendants(os.getpid())
    _check_size(processes, starting, limits)
    return limits.processes - len(processes)


@contextlib.contextmanager
def _open_files_needed() -> Iterator[None]:
    """Raise ChildProcessError if the system refuses: the code may have lowered the watcher's limit of open files.

    /proc then does not open (EMFILE), and the system call poll takes no file descriptor (EINVAL).
    """
    try:
        yield
    except OSError as error:
        raise ChildProcessError(f"the code's processes cannot be watched any more ({error}), so they end") from None


def _check_size(processes: dict[int, int], starting: int, limits: Limits):
    number = len(processes) + starting
    if number > limits.processes:
        raise ChildProcessError(f"the code has {number} processes, but {limits.processes} is the limit")
    held, limit = sum(processes.values()) + _bytes_of_files_in_memory(processes), limits.resident_bytes
    if held > limit:
        raise ChildProcessError(
            f"the code's processes hold {held / MIB:,.0f} MiB of memory, but {limit / MIB:,.0f} MiB is the limit"
        )


@contextlib.contextmanager
def _list_of_children() -> Iterator[int]:
    """A file that lists this process's children. It is open before the code runs, which may lower limits; else -1."""
    try:
        file = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    except OSError:  # a system without it
        yield -1
        return
    try:
        yield file
    finally:
        os.close(file)


def _end(child: int, children: int):
    """Kill the process, its group and all descendants, and wait until they are gone.

    Where the code must ask before it starts a process, no one answers any more, and none starts meanwhile.
    If the descendants cannot be listed, kill the children until there are none: each kill makes children of theirs
    ours.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    list_them: Callable[[], Iterable[int]] = partial(_descendants, os.getpid())
    deadline = time.monotonic() + KILL_SECONDS
    while _reap() and time.monotonic() < deadline:
        try:
            processes = list_them()
        except OSError as error:
            print(f"the processes of the kernel cannot be listed ({error}); its children are ended", file=sys.stderr)
            list_them = partial(_read_children, children)
            continue
        for process in processes:
            _kill(process, signal.SIGKILL)
        time.sleep(0.001)


def _read_children(file: int) -> list[int]:
    """The children that an open list names; none if there is no list."""
    return [*map(int, os.pread(file, MIB, 0).split())] if file >= 0 else []


def _kill(process: int, number: signal.Signals):
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process, number)


def _reap() -> bool:
    """Collect the children that have ended; False if there is none left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _descendants(root: int) -> dict[int, int]:
    """The bytes of memory that each descendant of a process holds.

    Raises
    ------
    OSError
        If the system does not let this process look.
    """
    parents, resident = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            *_, after_name = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")
            fields = after_name.split()  # proc(5): the first is the state, the third field of the file
            process = int(name)
            parents[process], resident[process] = int(fields[1]), int(fields[21]) * resource.getpagesize()
    found: set[int] = set()
    added = {root}
    while added:
        added = {process for process, parent in parents.items() if parent in added} - found
        found |= added
    return {process: resident[process] for process in found}


def _bytes_of_files_in_memory(processes: Iterable[int]) -> int:
    """The bytes of all files in memory that processes have open or mapped, each file once.

    What a process has mapped and touched is among the bytes that it holds, too: it counts twice.
    """
    found = {}
    for process in processes:
        for path in (*_open_files(process), *_mapped_files(process)):
            with contextlib.suppress(OSError):  # it is closed meanwhile
                file = os.stat(path)
                found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(found.values())


_IN_MEMORY = "/memfd:", "/dev/shm/"


def _open_files(process: int) -> Iterator[str]:
    """The links under /proc to the files in memory that a process has open."""
    folder = f"/proc/{process}/fd"
    with contextlib.suppress(OSError):  # the process has ended
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith(_IN_MEMORY):
                    yield f"{folder}/{name}"


def _mapped_files(process: int) -> Iterator[str]:
    """The links under /proc to the files in memory that a process has mapped; only root may follow them."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            if path.startswith(_IN_MEMORY):
                yield f"/proc/{process}/map_files/{addresses}"
