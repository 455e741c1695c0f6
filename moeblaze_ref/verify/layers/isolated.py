"""Run code that may crash or hang in a process of its own, and take what it yields meanwhile."""

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from moeblaze_ref.verify.layers.faults import in_a_line

LOOK_AFTER = 0.2  # seconds, whether the process is there


def isolated(work: Callable[..., Iterable[Any]], *arguments: Any, seconds: float) -> Iterator[Any]:
    """Yield what a function yields in another process. End that process and all processes that it started.

    Parameters
    ----------
    work : callable
        Can be pickled, as what it yields.
    *arguments
        Of the function.
    seconds : float
        Until the process is ended.

    Raises
    ------
    TimeoutError
        If it is not done within the limit.
    ChildProcessError
        If the process ended before the function did.
    ValueError, TypeError
        If the function raises one; another error of it is a ChildProcessError.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, work, arguments, os.getcwd()))
    process.start()
    sending.close()
    try:
        yield from _received(receiving, process, time.monotonic() + seconds, seconds)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        receiving.close()


def _received(receiving: Connection, process: Any, deadline: float, seconds: float) -> Iterator[Any]:
    while True:
        while not receiving.poll(LOOK_AFTER):
            if not process.is_alive() and not receiving.poll():  # what it started may hold the pipe open
                raise _ended(process)
            if time.monotonic() > deadline:
                raise TimeoutError(f"it was not done after {seconds:g} seconds, the limit")
        try:
            kind, value = receiving.recv()
        except EOFError:
            raise _ended(process) from None
        if kind == "done":
            return
        if kind == "error":
            raise value
        yield value


def _ended(process: Any) -> ChildProcessError:
    process.join()
    return ChildProcessError(f"its process ended, {_how(process.exitcode)}")


def _how(exitcode: int) -> str:
    return f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"with status {exitcode}"


def _work(sending: Connection, work: Callable[..., Iterable[Any]], arguments: tuple[Any, ...], folder: str) -> None:
    """Send what the work yields, then how it ended."""
    os.setsid()
    os.dup2(2, 1)  # what a layer prints is no part of a table or of JSON
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)  # a module of the folder in which the command was typed
    try:
        for value in work(*arguments):
            sending.send(("value", value))
        sending.send(("done", None))
    except (ValueError, TypeError) as error:
        sending.send(("error", _plain(error)))
    except BaseException as error:  # sys.exit is one
        sending.send(("error", ChildProcessError(in_a_line(error))))


def _plain(error: ValueError | TypeError) -> Exception:
    """The same error with its words alone; of a kind that is made otherwise, a ValueError with them."""
    try:
        return type(error)(*map(str, error.args))
    except TypeError:  # such as JSONDecodeError
        return ValueError(in_a_line(error))
