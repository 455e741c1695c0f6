"""What a Numba kernel's header states of a launch, and what the simulator counts."""

import functools
import inspect
import os
import sys

import processes

from moeblaze_ref.core.kernel_headers import evaluate, in_docstring


def stated_launch(kernel, sizes):
    """(blocks, threads, shared bytes, bytes read, bytes written) by the header's formulas, such as "4 L E + 4 R"."""
    header = in_docstring(kernel.py_func.__doc__)
    columns = ("grid", "block", "shared bytes", "bytes read", "bytes written")
    return tuple(evaluate(header[column], sizes) for column in columns)


def counted_launches(monkeypatch, *stages):
    """What stages launch on the simulator from here on, as (kernel, what `stated_launch` returns of it)."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    from moeblaze_ref.backends.numba_cuda import runtime
    from moeblaze_ref.backends.numba_cuda.simulator import CountingArray

    launches, run = [], runtime.launch

    def launch(kernel, blocks, threads, *arguments, shared_bytes=0):
        passed = [CountingArray(a._ary) if isinstance(a, FakeCUDAArray) else a for a in arguments]
        run(kernel, blocks, threads, *passed, shared_bytes=shared_bytes)
        arrays = [a for a in passed if isinstance(a, CountingArray)]
        counts = sum(a.read_bytes for a in arrays), sum(a.written_bytes for a in arrays)
        launches.append((kernel, (blocks, threads, shared_bytes, *counts)))

    for module in (runtime, *stages):
        monkeypatch.setattr(module, "launch", launch, raising=False)
    return launches


def kernels_as_stated(launches, sizes):
    """The kernels of counted launches, each as its header states for these sizes; the next launches begin anew."""
    for kernel, counted in launches:
        assert counted == stated_launch(kernel, sizes), (kernel.py_func.__name__, kernel.py_func.__doc__)
    kernels = [kernel for kernel, _ in launches]
    launches.clear()
    return kernels


def only_simulated(test):
    """A test that counts, as only the simulator can: where Numba has the GPU, it runs in a process without it."""

    @functools.wraps(test)
    def run(**fixtures):
        from moeblaze_ref.backends.numba_cuda import runtime

        if runtime.EXECUTOR == "cuda":
            rerun(f"{inspect.getfile(test)}::{test.__name__}")
        else:
            test(**fixtures)

    return run


def rerun(test):
    """Run one test, such as "tests/test_x.py::test_y", in a fresh interpreter on the simulator; it must pass."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    pytest = [sys.executable, "-m", "pytest", test]
    done = processes.run(pytest, env=environment)
    assert done.returncode == 0, done.stdout
