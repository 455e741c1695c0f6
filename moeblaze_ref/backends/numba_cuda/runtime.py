"""Where the Numba kernels run, and the few host operations that they need there.

Numba decides between the GPU and its simulator once, when ``numba.cuda`` is first imported.
So this module decides first, and everything else takes ``cuda`` from here:

    from moeblaze_ref.backends.numba_cuda.runtime import cuda
"""

import contextlib
import os
import sys
from contextvars import ContextVar

import numpy as np

from moeblaze_ref.core.contract import Arrays
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.runtime.source import Size

POISON = -559038737  # 0xDEADBEEF; no token, expert or position is negative


def _has_nvvm() -> bool:
    """Return True if Numba's compiler for the GPU is installed."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvvm")
    except DynamicLibNotFoundError:
        return False
    return True


def _choose_executor() -> tuple[str, str]:
    """("cuda" or "simulator", why)."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        return "simulator", "NUMBA_ENABLE_CUDASIM is set"
    if cuda_device_count() == 0:
        return "simulator", "there is no CUDA device"
    if not _has_nvvm():
        return "simulator", "libnvvm is missing: pip install 'moeblaze_ref[gpu]'"
    return "cuda", "there is a CUDA device"


def _import_cuda(executor: str, reason: str):
    """``numba.cuda`` for this executor.

    Raises
    ------
    ImportError
        If numba-cuda is not installed.
    RuntimeError
        If ``numba.cuda`` was imported earlier for the other executor: that cannot be undone.
    """
    if executor == "simulator":
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # a course launches small grids
    # numba-cuda in place of Numba's own numba.cuda. A Python that started before its installation has not done it yet.
    import _numba_cuda_redirector  # noqa: F401
    from numba.core import config

    config.reload_config()  # numba reads the variables when it is imported, which may have happened already
    from numba import cuda

    loaded = "simulator" if "numba.cuda.simulator_init" in sys.modules else "cuda"
    if loaded != executor:
        raise RuntimeError(
            f"numba.cuda was imported before moeblaze_ref.backends.numba_cuda and runs on {loaded!r}, but {executor!r} "
            f"is needed ({reason}): import moeblaze_ref.backends.numba_cuda first, or start Python with "
            f"NUMBA_ENABLE_CUDASIM={int(executor == 'simulator')}"
        )
    return cuda


EXECUTOR, EXECUTOR_REASON = _choose_executor()
cuda = _import_cuda(EXECUTOR, EXECUTOR_REASON)
if EXECUTOR == "simulator":
    from moeblaze_ref.backends.numba_cuda.simulator import run_threads_one_at_a_time

    run_threads_one_at_a_time()

DTYPES = ("float32",)  # what the floating-point stages compute in
ARRAYS = Arrays("array", DTYPES)
THREADS = 128 if EXECUTOR == "cuda" else 8  # of a block; sums over a block are trees, which need a power of two
ZERO = np.float32(0.0)  # where sums begin: a bare 0.0 would be float64 to Numba, and make the sum so


def blocks_for(elements: int) -> int:
    """Blocks of THREADS threads that have a thread for every element."""
    return -(-elements // THREADS)


def launch(kernel, blocks: int | Size, threads: int | Size, *arguments, shared_bytes: int = 0):
    """Run ``kernel`` on a grid of ``blocks`` blocks of ``threads`` threads, one-dimensional if these are numbers.

    A kernel takes its shared memory as ``cuda.shared.array(0, dtype)``, of the size given here.

    On the GPU a kernel takes no None: what an ungated layer lacks arrives as an empty tuple. A
    grid without blocks, which CUDA refuses, is nothing to do.
    """
    if blocks == 0:
        return
    passed = [() if argument is None else argument for argument in arguments]
    kernel[blocks, threads, 0, shared_bytes](*passed)


def to_device(array):
    """``array`` where kernels can take it: numpy arrays are copied, arrays of the GPU are viewed.

    Raises
    ------
    TypeError
        If the simulator is given anything but a numpy array.
    """
    if isinstance(array, np.ndarray):
        return cuda.to_device(np.ascontiguousarray(array))
    if EXECUTOR == "simulator":
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"the array is a {kind}, but Numba's simulator takes numpy arrays only")
    return cuda.as_cuda_array(array)


def all_to_device(*arrays):
    """Each array as `to_device` has it; None stays None."""
    return [None if array is None else to_device(array) for array in arrays]


def to_caller(like, *arrays):
    """Device arrays in the kind of ``like``: copied to numpy arrays, or viewed as CuPy arrays; None stays None."""
    if isinstance(like, np.ndarray):
        return tuple(None if array is None else array.copy_to_host() for array in arrays)
    import cupy

    return tuple(None if array is None else cupy.asarray(array) for array in arrays)


def written_back(array, on_device):
    """``array`` with what kernels wrote to it where `to_device` put it; None stays None."""
    if isinstance(array, np.ndarray):
        array[...] = on_device.copy_to_host()
    return array


_poisoning = ContextVar("poisoning", default=False)


@contextlib.contextmanager
def poisoned_outputs():
    """Context in which every output starts as POISON or NaN, so that an element no kernel wrote is seen."""
    token = _poisoning.set(True)
    try:
        yield
    finally:
        _poisoning.reset(token)


def int32_output(shape):
    """A device array (``shape``, int32) for a kernel to fill."""
    if _poisoning.get():
        return cuda.to_device(np.full(shape, POISON, dtype=np.int32))
    return cuda.device_array(shape, dtype=np.int32)


def float32_output(shape):
    """A device array (``shape``, float32) for a kernel to fill."""
    if _poisoning.get():
        return cuda.to_device(np.full(shape, np.nan, dtype=np.float32))
    return cuda.device_array(shape, dtype=np.float32)


def per_element(kernel, like, shape, *operands):
    """A float32 array (``shape``) of the kind of ``like``, of which a thread of the kernel computes each element.

    The kernel takes the operands where `to_device` puts them, then the array.
    """
    result = float32_output(shape)
    launch(kernel, blocks_for(result.size), THREADS, *all_to_device(*operands), result)
    return to_caller(like, result)[0]
