"""How the checker runs a kernel once: on the SIMT executor, on a GPU, or by Numba."""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeblaze_ref.runtime import cupy_executor
from moeblaze_ref.runtime.record import RecordingExecutor
from moeblaze_ref.runtime.simt.build import SimtCompileError
from moeblaze_ref.runtime.simt.cache import SimtUnavailable
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.source import Size
from moeblaze_ref.verify.checker.budgets import DIVISION, MEANS, QUANTITIES
from moeblaze_ref.verify.checker.contracts import Arrays
from moeblaze_ref.verify.checker.kernels import CudaKernel, NumbaKernel
from moeblaze_ref.verify.checker.report import Counts

_COMPILED_COPY = re.compile(r"\S+\.cubin\.cu")  # CuPy's name for the file
_NOT_SIMULATED = re.compile(r"'FakeCUDAModule' object has no attribute '(?P<name>\w+)'")
_SIMULATED_THREAD = re.compile(r"tid=\[(?P<thread>.*?)\] ctaid=\[(?P<block>.*?)\](?:: )?(?P<message>.*)", re.DOTALL)


class Fault(Exception):
    """The kernel did what a GPU would not survive, or did not let itself be compiled there."""


@dataclass(frozen=True)
class Runner:
    """A place to run kernels in."""

    #: (kernel, constants, (grid, block, shared bytes), arguments, order) -> `Counts`; writes the outputs in place.
    #: Arguments are numpy arrays and whole numbers by parameter.
    run: Callable[..., Counts]
    orders: tuple[str, ...]  #: what tells one run from the next on the same input; each must give the same bits
    what_differs: str  #: what is wrong with a kernel of which they do not
    quantities: tuple[str, ...]  #: those of `QUANTITIES` that are counted there


def _simt(kernel: CudaKernel, constants: dict[str, Any], launch: tuple[Size, Size, int], arguments: Arrays, order: int):
    """``order`` is the seed of the threads' order; 0 is their natural one."""
    executor = SimtExecutor(seed=order)
    try:
        with executor.recording() as reports:
            launch_cuda(executor, kernel, constants, launch, arguments)
    except KernelFault as fault:
        again = "out-of-bounds" in str(fault)  # an endless loop, say, might not end this time
        line = _line_outside(kernel, constants, launch, arguments, order) if again else ""
        raise Fault(f"{fault}{line}") from None
    (report,) = reports
    buffers = report.buffers.items()
    return {
        "read": {name: traffic.read_bytes for name, traffic in buffers},
        "written": {name: traffic.written_bytes for name, traffic in buffers},
        "sectors": {name: traffic.read_sectors + traffic.written_sectors for name, traffic in buffers},
        "conflicts": {"shared memory": report.shared.bank_conflicts},
        **_work(report.work, DIVISION | MEANS),
    }


def _work(work: Any, quantities: Iterable[str]) -> Counts:
    """Return the quantities of a `simt.executor.Work` or a `simulator.Work`: how the threads divided the work."""
    return {quantity: {"all memory": getattr(work, quantity)} for quantity in quantities}


def _line_outside(kernel: CudaKernel, constants, launch: tuple[Size, Size, int], arguments: Arrays, order: int) -> str:
    """Return the line at which a kernel accesses memory outside its arrays, or an empty text."""
    executor = RecordingExecutor(seed=order)
    with contextlib.suppress(KernelFault, SimtUnavailable):
        launch_cuda(executor, kernel, constants, launch, arguments)
    found = executor.launches[-1].outside(kernel.file) if executor.launches else None
    return f" ({kernel.file}, line {found.line})" if found else ""


def launch_cuda(
    executor: Any, kernel: CudaKernel, constants, launch: tuple[Size, Size, int], arguments: dict[str, Any]
):
    """Compile a kernel and launch it on one of the executors.

    Raises
    ------
    ValueError
        If the compiler of the SIMT executor refuses it.
    """
    grid, block, shared_bytes = launch
    try:
        module = executor.load(kernel.file, text=kernel.text, **constants)
    except SimtCompileError as error:
        _, _, compilers = str(error).partition("\n")
        raise ValueError(f"{kernel.file} does not compile:\n{compilers}") from None
    module.launch(kernel.name, grid, block, shared_bytes, **arguments)


def _cuda(kernel: CudaKernel, constants: dict[str, Any], launch: tuple[Size, Size, int], arguments: Arrays, order: int):
    """A GPU counts nothing; ``order`` is the number of the run."""
    import cupy

    executor = cupy_executor()
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    try:
        moved = {name: executor.from_numpy(array) for name, array in arrays.items()}
        launch_cuda(executor, kernel, constants, launch, arguments | moved)
        for name, array in arrays.items():
            np.copyto(array, executor.to_numpy(moved[name]))
    except cupy.cuda.compiler.CompileException as error:
        message = _COMPILED_COPY.sub(kernel.file, str(error))
        raise ValueError(f"{kernel.file} does not compile:\n{message}") from None
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise Fault(f"{error}; on simt the fault names block, thread and address") from None
    return {}


def _simulated(kernel: NumbaKernel, constants, launch: tuple[Size, Size, int], arguments: Arrays, order: int):
    """Numba's simulator; ``order`` is NATURAL, REVERSE or TURNS of `numba_cuda.simulator`."""
    from moeblaze_ref.backends.numba_cuda.simulator import CountingArray, watched

    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    moved = {name: CountingArray(array.copy(), name) for name, array in arrays.items()}
    with watched(order) as work:
        _launch_numba(kernel, launch, arguments, moved)
    return {
        "read": {name: array.read_bytes for name, array in moved.items()},
        "written": {name: array.written_bytes for name, array in moved.items()},
        **_work(work, DIVISION),
    }


def _numba_on_gpu(kernel: NumbaKernel, constants, launch: tuple[Size, Size, int], arguments: Arrays, order: int):
    """A GPU counts nothing; ``order`` is the number of the run."""
    from moeblaze_ref.backends.numba_cuda import runtime

    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    _launch_numba(kernel, launch, arguments, {name: runtime.to_device(array) for name, array in arrays.items()})
    return {}


def _launch_numba(kernel: NumbaKernel, launch: tuple[Size, Size, int], arguments: Arrays, moved: dict[str, Any]):
    """Launch on the arrays that were moved to the device, and copy them back."""
    from moeblaze_ref.backends.numba_cuda import runtime

    grid, block, shared_bytes = launch
    try:
        runtime.launch(kernel.kernel, grid, block, *(arguments | moved).values(), shared_bytes=shared_bytes)
        for name, array in moved.items():
            np.copyto(arguments[name], array.copy_to_host())
    except Exception as error:  # whatever a reader's function does when it is run
        raise Fault(_numba_message(error) + _line_of(error, kernel.kernel.py_func)) from error


def _numba_message(error: Exception) -> str:
    """The simulator's message, with block and thread named as the SIMT executor names them."""
    missing = _NOT_SIMULATED.search(str(error))
    if missing:
        return (
            f"Numba's simulator has no cuda.{missing['name']}, nor any function of a warp: use cuda.syncthreads() and "
            "shared memory"
        )
    place = _SIMULATED_THREAD.match(str(error))
    if not place:
        return f"{type(error).__name__}: {error}"
    return f"block ({place['block']}), thread ({place['thread']}): {type(error).__name__}: {place['message']}"


def _line_of(error: Exception, function: Callable) -> str:
    """Return the line of the kernel's file at which the error arose, or an empty text."""
    file = function.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if lines else ""


_SEEDS = ("their natural order", "seed 1", "seed 2", "seed 3")
_TURNS = ("their natural order", "their reverse order", "alternating at every write")
_RUNS = ("the first run", "the second run")
_BY_ORDER, _BY_RUN = "depends on the order of threads", "differs between runs on the same input"
RUNNERS = {
    "simt": Runner(_simt, _SEEDS, _BY_ORDER, tuple(QUANTITIES)),
    "cuda": Runner(_cuda, _RUNS, _BY_RUN, ()),
    "numba": Runner(_numba_on_gpu, _RUNS, _BY_RUN, ()),
    "simulator": Runner(_simulated, _TURNS, _BY_ORDER, ("read", "written", *DIVISION)),
}


def runner_of(backend: str) -> str:
    """Return the one of ``RUNNERS`` for a backend: Numba's kernels run in its simulator, unless there is a GPU."""
    if backend != "numba":
        return backend
    from moeblaze_ref.backends.numba_cuda import runtime

    return "numba" if runtime.EXECUTOR == "cuda" else "simulator"
