"""One launch of a reader's CUDA kernel on a case of its task, recorded in a confined process."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeblaze_ref.runtime.record import LaunchRecord, RecordingExecutor
from moeblaze_ref.runtime.record_bytes import pack, unpack
from moeblaze_ref.runtime.simt.executor import KernelFault
from moeblaze_ref.verify import guard, in_subprocess

LIMIT = 100_000  # records


def record(
    file: str,
    text: str,
    kernel: str,
    task: str,
    limits: guard.Limits,
    shape: str = "",
    stop: Iterable[Connection] = (),
    **options: Any,
) -> LaunchRecord:
    """Record a launch on one of the small cases; the arguments and errors are those of `in_subprocess.examine_text`.

    Parameters
    ----------
    shape : str
        The case: the one with whose shape this text begins, else the first.

    Notes
    -----
    What the kernel does to end its process raises ChildProcessError. A fault ends the record, which says so.
    """
    work = functools.partial(_send, file, text, kernel, task, shape, options)
    sent, status, _ = in_subprocess.confined(work, limits, stop)
    kind, _, told = sent.partition(b"\n")
    if kind == b"record":
        return unpack(told)
    if kind == b"error":
        raise ValueError(told.decode(errors="replace"))
    raise ChildProcessError(f"the kernel ended the process that ran it, {in_subprocess.how_it_ended(status)}")


# ---- in the confined process -----------------------------------------------------------------------


def _send(file: str, text: str, kernel: str, task: str, shape: str, options: dict[str, Any], send: guard.Send):
    os.chdir(tempfile.gettempdir())  # so that messages name the file alone
    Path(file).write_text(text)
    try:
        told = b"record\n" + pack(_recorded(f"{file}:{kernel}", task, shape, options))
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        told = f"error\n{error}".encode()
    send(told)


def _recorded(kernel: str, task: str, shape: str, options: dict[str, Any]) -> LaunchRecord:
    from moeblaze_ref.verify.checker import prepare
    from moeblaze_ref.verify.checker.runners import launch_cuda

    exam = prepare(kernel, task, backend="simt", small=True, **options)
    steps = [first for first, _ in exam.cases]
    step = next((step for step in steps if shape.startswith(step.problem.case.shape)), steps[0])
    trial, executor = exam.terms.open(), RecordingExecutor(limit=LIMIT)
    found: Any = trial.kernel  # of a .cu file: simt takes no other
    with contextlib.suppress(KernelFault):
        launch_cuda(executor, found, *trial.call(step.problem, step.outputs[0]))
    return executor.launches[-1]
