"""Judge a kernel in a process of its own: whatever the kernel does, the process that asked goes on.

A server is started once and imports the judge; each judgement is a fork of it, which costs milliseconds. Who asks need
not import the judge, nor torch.
"""

import functools
import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_SECONDS = 60  # of a judgement, the compiler included
_DIVISION = "an integer division by zero?"
_CAUSES = {
    signal.SIGFPE: _DIVISION,
    signal.SIGILL: _DIVISION,  # one that the compiler has seen
    signal.SIGSEGV: "a local array that is larger than a thread's stack, or an endless recursion?",
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
    """

    first_problem: str
    report: str


def examine(file: str, text: str, kernel: str, task: str, limit: float = LIMIT_SECONDS, **options: Any) -> Verdict:
    """`judge.examine` of a kernel's text, over the cases that are small enough for a simulator.

    Parameters
    ----------
    file, text : str
        What the kernel's file is called, for messages: NAME.cu or NAME.py; and what is in it.
    kernel : str
        The kernel's name.
    task : str
        One of ``judge.CONTRACTS``.
    limit : float
        Seconds after which the judgement is given up.
    **options
        As of `judge.examine`, but for ``cases``; Numba kernels are judged in the simulator.

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
    A script calls it under ``if __name__ == "__main__"``: `multiprocessing` imports the script in the other process.
    """
    receiving, sending = _context().Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, receiving:
        (Path(folder) / file).write_text(text)
        process = _context().Process(target=_answer, args=(sending, folder, f"{file}:{kernel}", task, options))
        process.start()
        sending.close()
        try:
            return _verdict(process, receiving, limit)
        finally:
            process.kill()
            process.join()


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moeblaze_ref.simulated", "moeblaze_ref.numba_cuda", "moeblaze_ref.judge"])
    return context


def _answer(sending: Connection, folder: str, kernel: str, task: str, options: dict[str, Any]):
    """The other process: sends the verdict, or the error that there is in its place."""
    from moeblaze_ref.backends import BACKENDS
    from moeblaze_ref.cases import standard_cases, telling_cases
    from moeblaze_ref.check import in_reach
    from moeblaze_ref.judge import examine

    os.chdir(folder)  # so that messages name the file alone
    cases = in_reach(BACKENDS["numba"], standard_cases()) + telling_cases()
    try:
        report = examine(kernel, task, cases=cases, **options)
        sending.send(Verdict(report.first_problem, str(report)))
    except (ValueError, TypeError, OSError) as error:
        sending.send(error)


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
