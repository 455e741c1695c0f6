"""What a Numba kernel's header states of a launch, and what the simulator counts."""

import os
import re
import subprocess
import sys

from headers import evaluate

from moeblaze_ref.numba_cuda import runtime

HEADER = re.compile(
    r"Grid +(.+?) blocks? of (.+?) threads\b.*\n +Shared bytes +(.+)\n +Global bytes +reads (.+); writes (.+)"
)


def stated_launch(kernel, sizes):
    """(blocks, threads, shared bytes, bytes read, bytes written) by the header's formulas, such as "4 L E + 4 R"."""
    return tuple(evaluate(formula, sizes) for formula in HEADER.search(kernel.py_func.__doc__).groups())


def counted_launch(kernel, blocks, threads, arguments, shared_bytes):
    """The same of a launch on the simulator; all arrays are int32 or float32, other arguments pass as they are."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    reads, writes = [], []  # appending is atomic, counting would not be

    class CountingArray(FakeCUDAArray):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

        def __setitem__(self, index, value):
            writes.append(index)
            super().__setitem__(index, value)

    counting = [CountingArray(a._ary) if isinstance(a, FakeCUDAArray) else a for a in arguments]
    runtime.launch(kernel, blocks, threads, *counting, shared_bytes=shared_bytes)
    return blocks, threads, shared_bytes, 4 * len(reads), 4 * len(writes)


def rerun(test):
    """Run one test, such as "tests/test_x.py::test_y", in a fresh interpreter on the simulator, and expect it to pass."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    pytest = [sys.executable, "-m", "pytest", test]
    done = subprocess.run(pytest, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
