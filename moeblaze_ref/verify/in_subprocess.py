"""Check a kernel in a process of its own, so that a kernel that crashes or hangs does not end the caller.

There are four processes:

- The caller asks for the check.
- The supervisor watches the next two.
- The comparing process makes the inputs. It computes the expected outputs when the kernel and all processes that the
  kernel started have ended.
- The kernel's process is a fork of the comparing process under `guard.run`. It runs the reader's code.

The last two share only the memory of the outputs, and a pipe through which the kernel's process sends its counts.

For the exercises a server is started once and imports the checker; each check is a fork of it, which costs
milliseconds. The caller need not import the checker or torch.
"""

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from moeblaze_ref.core import folders
from moeblaze_ref.runtime.simt import cache
from moeblaze_ref.verify import guard

LIMIT_SECONDS = 120  # of a kernel's launches, the compiler included
PREPARING_SECONDS = 120  # beyond that limit, for the inputs and the comparison
SHOWN_BYTES = 2000  # of what a kernel prints
# Modules that the server of the checker's processes imports before it forks, in this order.
PRELOADED = ("verify.closed", "backends.simulated", "backends.numba_cuda", "verify.checker", "verify.torch_cells")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Work(Protocol[T_co]):
    """Work for a process of its own; it can be pickled."""

    def __call__(self, limits: guard.Limits, folder: str) -> T_co:
        """Return what the process that asked is sent."""


_DIVISION = "an integer division by zero?"
_CAUSES = {
    signal.SIGFPE: _DIVISION,
    signal.SIGILL: _DIVISION,  # a division that the compiler has seen
    signal.SIGSEGV: "a local array that is larger than a thread's stack, an endless recursion, or exit(...)?",
    signal.SIGKILL: "no memory left?",
}


class Verdict(NamedTuple):
    """Verdict of a `checker.Report`."""

    first_problem: str  #: the first case that is wrong, and how; empty if none is
    report: str  #: all cases, with what was counted
    document: dict[str, Any]  #: the report as JSON takes it, and what the system ``refused`` of the confinement


def examine(kernel: str, task: str, limit: float = LIMIT_SECONDS, **options: Any) -> Verdict:
    """`checker.examine` of a kernel that is named, where Numba runs as it would here.

    The kernel is none in memory; kernel and task are named as for `checker.examine`. The options are those of
    `checker.examine`, but for ``cases``. The check is stopped after ``limit`` seconds.

    Raises
    ------
    ValueError, TypeError, OSError
        As `checker.examine`.
    TimeoutError
        If there is no verdict within the limit, as of a kernel that never ends.
    ChildProcessError
        If the process that checked the kernel was ended, as by an integer division by zero, or used more than
        `guard.Limits` allow.

    Notes
    -----
    What the kernel prints goes to stderr in the end, up to `SHOWN_BYTES`. A script calls this under
    ``if __name__ == "__main__"``: `multiprocessing` imports the script in the other process.
    """
    question = _Question(kernel, task, options)
    return _ask(multiprocessing.get_context("spawn"), guard.Limits(limit), functools.partial(_examined, question))


def examine_text(
    file: str, text: str, kernel: str, task: str, limits: guard.Limits, stop: Iterable[Connection] = (), **options: Any
) -> Verdict:
    """The same of a kernel's text, over the cases that are small enough for a simulator, where Numba runs in its own.

    ``file`` is what the kernel's file is called, for messages: NAME.cu or NAME.py. ``text`` is what is in it, and
    ``kernel`` the kernel's name. The other arguments and the errors are those of `examine`.

    Raises
    ------
    KeyboardInterrupt
        If something can be received from a connection of ``stop``, or its other end is closed.
    """
    question = _Question(f"{file}:{kernel}", task, options | {"small": True}, text)
    return _ask(_server(), limits, functools.partial(_examined, question), stop)


def confined(
    work: Callable[[guard.Send], None],
    limits: guard.Limits,
    stop: Iterable[Connection] = (),
    preload: Sequence[str] = (),
) -> guard.Ended:
    """`guard.run` of a function that can be pickled, in a process that nothing of this one's memory reaches.

    ``preload`` names modules that the server imports too, if this call starts it. Each later process has them then.

    Raises
    ------
    TimeoutError, ChildProcessError
        As `guard.run`.
    KeyboardInterrupt
        As `examine_text`.
    """
    return _ask(_server(preload), limits, functools.partial(_run, work), stop)


class _Question(NamedTuple):
    """A kernel to examine."""

    #: Of `checker.prepare`.
    kernel: str
    task: str
    options: dict[str, Any]
    text: str | None = None  #: what is in the file of the kernel, if the file has yet to be written


def _server(more: Sequence[str] = ()) -> ForkServerContext:
    """The context whose server has imported `PRELOADED`, and these modules if it has not started yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(f"moeblaze_ref.{module}" for module in PRELOADED), *more])
    return context


def _ask(
    context: ForkServerContext | SpawnContext, limits: guard.Limits, work: _Work[T], stop: Iterable[Connection] = ()
) -> T:
    """Start the processes that supervise and work, and return or raise what they say."""
    receiving, sending = context.Pipe()  # of sockets, which no process can open by their names under /proc
    with guard.others_kept_out(), receiving, _shown(context) as printed, _temporary_folder() as folder:
        process = context.Process(target=_supervise, args=(sending, printed, limits, folder, work))
        process.start()
        sending.close()
        try:
            ready = wait([receiving, *stop], limits.seconds + PREPARING_SECONDS)
            if not ready:
                raise TimeoutError(f"there is no verdict after {limits.seconds + PREPARING_SECONDS:g} seconds")
            if receiving not in ready:
                raise KeyboardInterrupt  # a button in place of Ctrl-C
            found = receiving.recv()
        except EOFError:
            process.join()
            raise ChildProcessError(f"the process that compares has ended, {how_it_ended(process.exitcode)}") from None
        except BaseException:
            process.terminate()  # it ends what it started first
            raise
        finally:
            process.join(guard.KILL_SECONDS)
            process.kill()
            process.join()
    if isinstance(found, Exception):
        raise found
    return found


@contextmanager
def _temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="moeblaze-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str):
    """Remove the temporary folder, and what killed compilers have left in the cache; say what could not be removed."""
    left = [folders.remove(folder)]
    with suppress(cache.SimtUnavailable):  # no cache can be made here, so nothing was
        left += cache.remove_unfinished(folder)
    for line in filter(None, left):
        print(line, file=sys.stderr)


@contextmanager
def _shown(context: BaseContext) -> Iterator[Connection]:
    """Capture a process' prints; at the end, write the first part to stderr and the length of the rest."""
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
        sys.stderr.write(harmless(beginning.decode(errors="replace")) + more)


def harmless(text: str, keep: str = "\n\t") -> str:
    """Return the text without what steers a terminal: control characters other than ``keep`` as escapes."""
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


# ---- the processes that supervise and compare -----------------------------------------------------


def _supervise(sending: Connection, printed: Connection, limits: guard.Limits, folder: str, work: _Work[Any]):
    """Work in a fork, end as it ends, and leave nothing of it."""
    os.setsid()  # what ends the group of the process that asked, Ctrl-C too, leaves this one time to clear up
    guard.keep_others_out()
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    status = guard.supervise(lambda: _answer(sending, limits, folder, work))
    _remove(folder)  # the process that asked may have ended
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _answer(sending: Connection, limits: guard.Limits, folder: str, work: _Work[Any]):
    """Send what the work returns, or the error that there is in its place."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        found = work(limits, folder)
    except (ValueError, TypeError, OSError) as error:
        found = error
    sending.send(found)


def _run(work: Callable[[guard.Send], None], limits: guard.Limits, folder: str) -> guard.Ended:
    return guard.run(work, limits, folder, [_sentinel()])


def _sentinel() -> int:
    """The sentinel of the process that asks: when that has ended, this one ends too."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("untrusted code runs in a process of its own alone")
    return parent.sentinel


def _examined(question: _Question, limits: guard.Limits, folder: str) -> Verdict:
    kernel, task, options, text = question
    if text is not None:
        os.chdir(folder)  # so that messages name the file alone
        Path(kernel.partition(":")[0]).write_text(text)
    return _examine(limits, folder, kernel, task, options)


def _examine(limits: guard.Limits, folder: str, kernel: str, task: str, options: dict[str, Any]) -> Verdict:
    import torch

    from moeblaze_ref.verify.checker import claims, prepare

    torch.set_num_threads(1)  # more would be none after the fork, and gain nothing on arrays so small
    exam = prepare(kernel, task, numba_runner=_numba_runner, **options)
    sent, status, refused = guard.run(lambda send: claims.send_launches(exam, send), limits, folder, [_sentinel()])
    said = claims.read_launches(exam, sent)
    if said is None:
        raise ChildProcessError(f"the kernel ended the process that checked it, {how_it_ended(status)}")
    report = exam.report(*said)
    text, document = str(report), report.as_dict()
    if refused:
        text += f"\nthis system did not confine the kernel fully. It refuses: {'; '.join(refused)}"
    return Verdict(report.first_problem, text, document | {"refused": refused})


def _numba_runner() -> str:
    """Return where Numba runs. Asks in a process of its own, because an initialised CUDA does not survive a fork."""
    from moeblaze_ref.verify.checker.runners import runner_of

    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(runner_of, "numba").result()


def how_it_ended(status: int | None) -> str:
    """Describe how a process ended."""
    if status is None or status >= 0:
        return f"with status {status}"
    name = signal.Signals(-status)
    return f"by {name.name}: {_CAUSES[name]}" if name in _CAUSES else f"by {name.name}"
