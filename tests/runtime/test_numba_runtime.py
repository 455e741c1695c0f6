"""Where the Numba kernels run: the choice of the executor, poisoned outputs, the count of the devices."""

import ctypes
import os
import sys
import threading

import processes
import pytest
from hostile import until
from simulator import only_simulated

from moeblaze_ref.backends.numba_cuda import dispatch, runtime, simulator
from moeblaze_ref.backends.numba_cuda.runtime import POISON, cuda
from moeblaze_ref.core import devices
from moeblaze_ref.verify.cases import GOLDEN_TOPK_EXPERTS


def python(*arguments, **environment):
    """Run a fresh interpreter without Numba's variables; the completed process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return processes.run([sys.executable, *arguments], env=clean | environment)


SAY_EXECUTOR = (
    "from moeblaze_ref.backends import numba_cuda; print(numba_cuda.EXECUTOR, '|', numba_cuda.EXECUTOR_REASON)"
)


def test_the_package_itself_does_not_import_numba():
    done = python("-c", "import moeblaze_ref.core.devices, sys; print('numba' in sys.modules, 'torch' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize("first", ["", "import numba; numba.njit(lambda n: n)(1); "])
def test_without_a_gpu_the_simulator_runs_even_if_numba_was_imported_first(first):
    done = python("-c", first + SAY_EXECUTOR, CUDA_VISIBLE_DEVICES="")
    assert done.stdout.strip() == "simulator | there is no CUDA device", done.stderr


def test_numba_cuda_imported_first_for_the_other_executor_is_an_error_that_says_what_to_do():
    done = python("-c", "import numba.cuda; " + SAY_EXECUTOR, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert (
        "RuntimeError: numba.cuda was imported before moeblaze_ref.backends.numba_cuda and runs on 'cuda'"
        in done.stderr
    )
    assert "start Python with NUMBA_ENABLE_CUDASIM=1" in done.stderr


def test_the_simulator_can_be_asked_for():
    done = python("-c", "import numba.cuda; " + SAY_EXECUTOR, NUMBA_ENABLE_CUDASIM="1")
    assert done.stdout.strip() == "simulator | NUMBA_ENABLE_CUDASIM is set", done.stderr


@pytest.mark.parametrize(
    "gpus, has_nvvm, executor, reason",
    [
        (1, True, "cuda", "there is a CUDA device"),
        (1, False, "simulator", "libnvvm is missing: pip install 'moeblaze_ref[gpu]'"),
        (0, True, "simulator", "there is no CUDA device"),
    ],
)
def test_the_choice_of_the_executor(monkeypatch, gpus, has_nvvm, executor, reason):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setattr(runtime, "cuda_device_count", lambda: gpus)
    monkeypatch.setattr(runtime, "_has_nvvm", lambda: has_nvvm)
    assert runtime._choose_executor() == (executor, reason)


def test_outputs_are_poisoned_on_request_alone():
    with runtime.poisoned_outputs():
        assert (runtime.int32_output((2, 3)).copy_to_host() == POISON).all()
        assert runtime._poisoning.get()
    assert not runtime._poisoning.get()
    assert runtime.int32_output((2, 3)).copy_to_host().shape == (2, 3)


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError):
        runtime.to_device([1, 2])


def test_a_launch_leaves_pythons_thread_switching_as_it_was():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    try:
        dispatch.build(GOLDEN_TOPK_EXPERTS, 4)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)


@only_simulated
def test_the_threads_of_a_block_run_one_after_another_from_barrier_to_barrier():
    seen = []

    def kernel():
        seen.append(cuda.threadIdx.x)
        cuda.syncthreads()
        seen.append(cuda.threadIdx.x)

    runtime.launch(cuda.jit(kernel), 1, 4)
    assert seen == [*range(4), *range(4)]


@only_simulated
def test_a_thread_that_raises_ends_those_that_wait_for_it():
    waiting = threading.active_count()

    def kernel():
        if cuda.threadIdx.x == 2:
            raise IndexError("no such row")
        cuda.syncthreads()

    with pytest.raises(IndexError, match=r"tid=\[2, 0, 0\] ctaid=\[0, 0, 0\]: no such row"):
        runtime.launch(cuda.jit(kernel), 1, 4)
    assert until(lambda: threading.active_count() == waiting, limit=30)


class FakeDriver:
    """libcuda.so.1 as far as counting goes: each call returns a CUDA status."""

    def __init__(self, init_status, count_status, devices):
        self.cuInit = lambda flags: init_status
        self.count_status, self.devices = count_status, devices

    def cuDeviceGetCount(self, pointer):
        pointer._obj.value = self.devices
        return self.count_status


@pytest.mark.parametrize(
    "driver, count",
    [(FakeDriver(0, 0, 3), 3), (FakeDriver(0, 0, 0), 0), (FakeDriver(100, 0, 3), 0), (FakeDriver(0, 3, 3), 0)],
)
def test_the_driver_counts_the_devices(monkeypatch, driver, count):
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    assert devices.cuda_device_count.__wrapped__() == count


def test_without_a_driver_there_are_no_devices(monkeypatch):
    def no_such_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_such_library)
    assert devices.cuda_device_count.__wrapped__() == 0


def test_the_threads_of_the_simulator_replace_nothing_of_pythons_own():
    """A forked process calls private methods of all threads: one of ours in the place of ``_stop`` waited for ever."""
    replaced = {
        name for kind in (simulator._Turn, simulator._Carrier) for name in {*vars(kind)} & {*vars(threading.Thread)}
    }
    assert replaced <= {"__doc__", "__init__", "__module__", "run"}
