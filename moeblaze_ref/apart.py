"""Judge a kernel in a process of its own: whatever the kernel does, the process that asked goes on.

For the exercises a server is started once and imports the judge; each judgement is a fork of it, which costs
milliseconds. Who asks need not import the judge, nor torch.
"""

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_SECONDS = 120  # of a judgement, the compiler included
SHOWN_BYTES = 2000  # of what a kernel prints
_DIVISION = "an integer division by zero?"
_CAUSES = {
    signal.SIGFPE: _DIVISION,
    signal.SIGILL: _DIVISION,  # one that the compiler has seen
    signal.SIGSEGV: "a local array that is larger than a thread's stack, an endless recursion, or exit(...)?",
    signal.SIGKILL: "no memory left?",
}


class Verdict(NamedTuple):
    """What a `judge.Report` says.

    Parameters
    ----------
    first_problem : str
        The first case that is wrong, and how; empty if none is.
    report : str
        All cases, with what was counted.
    document : dict
        The report as JSON takes it.
    """

    first_problem: str
    report: str
    document: dict[str, Any]


def examine(kernel: str, task: str, limit: float = LIMIT_SECONDS, **options: Any) -> Verdict:
    """`judge.examine` of a kernel that is named, where Numba runs as it would here.

    Parameters
    ----------
    kernel, task
        As of `judge.examine`; the kernel is none in memory.
    limit : float
        Seconds after which the judgement is given up.
    **options
        As of `judge.examine`, but for ``cases``.

    Returns
    -------
    Verdict

    Raises
    ------
    ValueError, TypeError, OSError
        As `judge.examine`.
    TimeoutError
        If there is no verdict within the limit, as of a kernel that never ends.
    ChildProcessError
        If the process that judged was ended, as by an integer division by zero.

    Notes
    -----
    What the kernel prints goes to stderr in the end, up to `SHOWN_BYTES`. A script calls this under
    ``if __name__ == "__main__"``: `multiprocessing` imports the script in the other process.
    """
    return _ask(multiprocessing.get_context("spawn"), limit, os.curdir, kernel, task, options)


def examine_text(file: str, text: str, kernel: str, task: str, limit: float = LIMIT_SECONDS, **options: Any) -> Verdict:
    """The same of a kernel's text, over the cases that are small enough for a simulator, where Numba runs in its own.

    Parameters
    ----------
    file, text : str
        What the kernel's file is called, for messages: NAME.cu or NAME.py; and what is in it.
    kernel : str
        The kernel's name.
    task, limit, **options
        As of `examine`.

    Returns
    -------
    Verdict

    Raises
    ------
    ValueError, TypeError, OSError, TimeoutError, ChildProcessError
        As `examine`.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file).write_text(text)
        return _ask(_server(), limit, folder, f"{file}:{kernel}", task, options | {"small": True})


@functools.cache
def _server() -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moeblaze_ref.simulated", "moeblaze_ref.numba_cuda", "moeblaze_ref.judge"])
    return context


def _ask(context: BaseContext, limit: float, *question: Any) -> Verdict:
    receiving, sending = context.Pipe(duplex=False)
    with receiving, _shown(context) as printed:
        process = context.Process(target=_answer, args=(sending, printed, *question))
        process.start()
        sending.close()
        try:
            return _verdict(process, receiving, limit)
        finally:
            process.kill()
            process.join()


@contextmanager
def _shown(context: BaseContext) -> Iterator[Connection]:
    """Where a process may print: in the end the beginning of it goes to stderr, with how much more there was."""
    receiving, printed = context.Pipe(duplex=False)
    beginning = bytearray()
    left_out = 0

    def read():
        nonlocal left_out
        while part := os.read(receiving.fileno(), 2**16):
            room = SHOWN_BYTES - len(beginning)
            beginning.extend(part[:room])
            left_out += max(len(part) - room, 0)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield printed
    finally:
        printed.close()
        reader.join(timeout=5)  # unless the kernel has left a process of its own behind
        receiving.close()
        more = f"\n... and {left_out:,} bytes more\n" if left_out else ""
        sys.stderr.write(beginning.decode(errors="replace") + more)


def _answer(sending: Connection, printed: Connection, folder: str, kernel: str, task: str, options: dict[str, Any]):
    """The other process: sends the verdict, or the error that there is in its place."""
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    os.chdir(folder)  # so that messages name the file alone
    found = _found(kernel, task, options)
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # what a kernel's printf has written
    sending.send(found)  # who asked then ends this process


def _found(kernel: str, task: str, options: dict[str, Any]) -> Verdict | Exception:
    from moeblaze_ref.judge import examine

    try:
        report = examine(kernel, task, **options)
    except (ValueError, TypeError, OSError) as error:
        return error
    except KeyboardInterrupt:
        return ChildProcessError("the kernel raises KeyboardInterrupt, as only Ctrl-C should")
    return Verdict(report.first_problem, str(report), report.as_dict())


def _verdict(process: multiprocessing.process.BaseProcess, receiving: Connection, limit: float) -> Verdict:
    if not receiving.poll(limit):
        raise TimeoutError(f"there is no verdict after {limit:g} seconds, the limit: does a loop never end?")
    try:
        found = receiving.recv()
    except EOFError:
        process.join()
        raise ChildProcessError(f"the kernel ended the process that judged it, {_how(process.exitcode)}") from None
    if isinstance(found, Exception):
        raise found
    return found


def _how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"with status {status}"
    name = signal.Signals(-status)
    return f"by {name.name}: {_CAUSES[name]}" if name in _CAUSES else f"by {name.name}"
