"""Dispatch as Numba kernels: bit-equal to the specification, at any shape, and only if every kernel is right."""

import ctypes
import os
import sys

import numpy as np
import processes
import pytest
from helpers import assert_same_dispatch
from simulator import counted_launch, rerun, stated_launch

from moeblaze_ref.backends.numba_cuda import dispatch, runtime
from moeblaze_ref.backends.numba_cuda.dispatch import EMPTY, THREADS
from moeblaze_ref.backends.numba_cuda.runtime import POISON, cuda
from moeblaze_ref.backends.numpy_ref import dispatch as reference
from moeblaze_ref.core import checks, devices, stage_contracts
from moeblaze_ref.verify.cases import GOLDEN_TOPK_EXPERTS, random_topk

SEVERAL_TILES = 2 * THREADS + 3  # no tile divides it


def poisoned_build(topk_experts, num_experts):
    """`build`, its outputs being poisoned before the launches."""
    with runtime.poisoned_outputs():
        return dispatch.build(topk_experts, num_experts)


def assert_right(topk_experts, num_experts):
    """`build` is the specification, bit for bit."""
    expected = reference.build_by_sort(topk_experts, num_experts)
    assert_same_dispatch(poisoned_build(topk_experts, num_experts), expected)


def python(*arguments, **environment):
    """Run a fresh interpreter without Numba's variables; the completed process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return processes.run([sys.executable, *arguments], env=clean | environment)


# The stage


@pytest.mark.parametrize(
    "num_tokens, num_experts, k",
    [
        (1, 1, 1),
        (1, 5, 5),  # one token, every expert
        (THREADS, 3, 2),  # one full tile
        (THREADS + 1, 3, 3),  # k = E, and one token in the last tile
        (3 * THREADS, 2, 1),  # full tiles only
        (SEVERAL_TILES, 4, 2),
        (3, SEVERAL_TILES, 2),  # several tiles of experts, most of them empty
    ],
)
def test_shapes(num_tokens, num_experts, k):
    assert_right(random_topk(num_tokens, num_experts, k), num_experts)


@pytest.mark.parametrize("pattern", ["zipf", "hot", "empty"])
def test_uneven_experts(pattern):
    assert_right(random_topk(SEVERAL_TILES, 4, 1, pattern), 4)


def test_the_input_may_be_read_only_and_is_not_shared():
    topk_experts = GOLDEN_TOPK_EXPERTS.copy()
    topk_experts.flags.writeable = False
    result = poisoned_build(topk_experts, 4)
    assert_same_dispatch(result, reference.build(GOLDEN_TOPK_EXPERTS, 4))
    assert not np.shares_memory(result.token_expert_indices, topk_experts)


# The steps


def steps(stage, topk_experts, num_experts):
    """The results of the public steps, each made from those before it."""
    dense_map = stage.dense_map(topk_experts, num_experts)
    lengths = stage.expert_lengths(dense_map)
    offsets = stage.expert_offsets(lengths)
    locations = stage.location_map(dense_map, offsets)
    as_printed = stage.write_indices(dense_map, locations, topk_experts)
    return dense_map, lengths, offsets, *stage.route_indices(dense_map, offsets, topk_experts), locations, *as_printed


@pytest.mark.parametrize("num_tokens", [0, 1, SEVERAL_TILES])
def test_each_step_is_the_specifications(num_tokens):
    topk_experts = random_topk(num_tokens, 3, 2)
    with runtime.poisoned_outputs():
        results = steps(dispatch, topk_experts, 3)
    for result, truth in zip(results, steps(reference, topk_experts, 3), strict=True):
        np.testing.assert_array_equal(result, truth, strict=True)


def test_offsets_of_the_most_experts():
    lengths = np.random.default_rng(0).integers(0, 2**20, checks.MAX_EXPERTS, dtype=np.int32)
    np.testing.assert_array_equal(dispatch.expert_offsets(lengths), reference.expert_offsets(lengths), strict=True)


def test_build_checks_its_input_once(monkeypatch):
    checked = []
    for owner, name in ((checks, "check_topk_experts"), (stage_contracts, "check_route_indices")):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: checked.append(name))
    dispatch.build(GOLDEN_TOPK_EXPERTS, 4)
    assert checked == ["check_topk_experts"]


def test_the_steps_have_the_kernels_limits():
    with pytest.raises(ValueError, match="num_experts is 2000, but it must be 1..1024"):
        dispatch.dense_map(GOLDEN_TOPK_EXPERTS, 2000)


# Planted faults: each of these kernels, in the place of the right one, must make the comparison fail


@cuda.jit
def maps_to_the_next_expert(topk_experts, dense_map):
    first = cuda.blockIdx.x * THREADS
    token = first + cuda.threadIdx.x
    if token < topk_experts.shape[0]:
        for expert in range(dense_map.shape[1]):
            dense_map[token, expert] = EMPTY
        for j in range(topk_experts.shape[1]):
            dense_map[token, (topk_experts[token, j] + 1) % dense_map.shape[1]] = token


@cuda.jit
def counts_the_first_tile_only(dense_map, lengths):
    if cuda.threadIdx.x == 0:
        count = 0
        for token in range(min(THREADS, dense_map.shape[0])):
            if dense_map[token, cuda.blockIdx.x] != EMPTY:
                count += 1
        lengths[cuda.blockIdx.x] = count


@cuda.jit
def offsets_off_by_one(lengths, offsets):
    if cuda.threadIdx.x == 0:
        offsets[0] = 0
        for expert in range(lengths.shape[0]):
            offsets[expert + 1] = offsets[expert] + lengths[expert]
        offsets[1] += 1


@cuda.jit
def offsets_without_the_end(lengths, offsets):
    if cuda.threadIdx.x == 0:
        offsets[0] = 0
        for expert in range(lengths.shape[0] - 1):
            offsets[expert + 1] = offsets[expert] + lengths[expert]


@cuda.jit
def routes_of_zeros(dense_map, offsets, topk_experts, expert_token_indices, token_index_map):
    if cuda.blockIdx.x == 0:
        for slot in range(cuda.threadIdx.x, token_index_map.shape[0], THREADS):
            expert_token_indices[slot] = 0
            token_index_map[slot] = 0


@cuda.jit
def routes_nothing(dense_map, offsets, topk_experts, expert_token_indices, token_index_map):
    pass


@cuda.jit
def routes_without_the_last_token(dense_map, offsets, topk_experts, expert_token_indices, token_index_map):
    if cuda.threadIdx.x == 0:
        position = offsets[cuda.blockIdx.x]
        for token in range(dense_map.shape[0] - 1):
            for j in range(topk_experts.shape[1]):
                if topk_experts[token, j] == cuda.blockIdx.x:
                    expert_token_indices[position] = token
                    token_index_map[token * topk_experts.shape[1] + j] = position
                    position += 1


@cuda.jit
def routes_that_forget_earlier_tiles(dense_map, offsets, topk_experts, expert_token_indices, token_index_map):
    if cuda.threadIdx.x == 0:
        position = offsets[cuda.blockIdx.x]
        for token in range(dense_map.shape[0]):
            if token % THREADS == 0:
                position = offsets[cuda.blockIdx.x]
            for j in range(topk_experts.shape[1]):
                if topk_experts[token, j] == cuda.blockIdx.x:
                    expert_token_indices[position] = token
                    token_index_map[token * topk_experts.shape[1] + j] = position
                    position += 1


@pytest.mark.parametrize(
    "kernel, fault",
    [
        ("dense_map_kernel", maps_to_the_next_expert),
        ("expert_lengths_kernel", counts_the_first_tile_only),
        ("expert_offsets_kernel", offsets_off_by_one),
        ("expert_offsets_kernel", offsets_without_the_end),
        ("route_indices_kernel", routes_of_zeros),
        ("route_indices_kernel", routes_nothing),
        ("route_indices_kernel", routes_without_the_last_token),
        ("route_indices_kernel", routes_that_forget_earlier_tiles),
    ],
    ids=lambda value: value if isinstance(value, str) else value.py_func.__name__,
)
def test_a_planted_fault_is_caught(monkeypatch, kernel, fault):
    monkeypatch.setattr(dispatch, kernel, fault)
    with pytest.raises(AssertionError):
        assert_right(random_topk(SEVERAL_TILES, 3, 2), 3)


@cuda.jit
def locations_that_forget_earlier_tiles(dense_map, offsets, location_map):
    if cuda.threadIdx.x == 0:
        location = offsets[cuda.blockIdx.x]
        for token in range(dense_map.shape[0]):
            if token % THREADS == 0:
                location = offsets[cuda.blockIdx.x]
            location_map[token, cuda.blockIdx.x] = location
            if dense_map[token, cuda.blockIdx.x] != EMPTY:
                location += 1


@cuda.jit
def locations_of_zeros(dense_map, offsets, location_map):
    for token in range(cuda.threadIdx.x, dense_map.shape[0], THREADS):
        location_map[token, cuda.blockIdx.x] = 0


@cuda.jit
def writes_without_the_last_entry(dense_map, location_map, topk_experts, expert_token_indices, token_index_map):
    k, entries = topk_experts.shape[1], dense_map.shape[0] * dense_map.shape[1]
    entry = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    token, expert = entry // dense_map.shape[1], entry % dense_map.shape[1]
    if entry < entries - dense_map.shape[1] and dense_map[token, expert] != EMPTY:
        expert_token_indices[location_map[token, expert]] = token
        for j in range(k):
            if topk_experts[token, j] == expert:
                token_index_map[token * k + j] = location_map[token, expert]


@pytest.mark.parametrize(
    "kernel, fault",
    [
        ("location_map_kernel", locations_that_forget_earlier_tiles),
        ("location_map_kernel", locations_of_zeros),
        ("write_indices_kernel", routes_nothing),
        ("write_indices_kernel", writes_without_the_last_entry),
    ],
    ids=lambda value: value if isinstance(value, str) else value.py_func.__name__,
)
def test_a_planted_fault_of_the_steps_as_printed_is_caught(monkeypatch, kernel, fault):
    monkeypatch.setattr(dispatch, kernel, fault)
    with pytest.raises((AssertionError, ValueError)):
        test_each_step_is_the_specifications(SEVERAL_TILES)


# What the kernels' headers claim


def test_the_kernels_move_the_bytes_that_their_headers_state(monkeypatch):
    if runtime.EXECUTOR == "cuda":  # only the simulator can count
        return rerun(f"{__file__}::test_the_kernels_move_the_bytes_that_their_headers_state")
    L, E, k = SEVERAL_TILES, THREADS + 1, 3
    sizes = {"L": L, "E": E, "k": k, "R": L * k, "THREADS": THREADS}
    launched = []

    def checked_launch(kernel, blocks, threads, *arrays, shared_bytes=0):
        counted = counted_launch(kernel, blocks, threads, arrays, shared_bytes)
        assert counted == stated_launch(kernel, sizes), kernel.py_func.__name__
        launched.append(kernel)

    monkeypatch.setattr(dispatch, "launch", checked_launch)
    assert_right(random_topk(L, E, k), E)
    assert launched == [
        dispatch.dense_map_kernel,
        dispatch.expert_lengths_kernel,
        dispatch.expert_offsets_kernel,
        dispatch.route_indices_kernel,
    ]
    launched.clear()
    topk_experts = random_topk(L, 5, k)
    sizes["E"] = 5
    steps(dispatch, topk_experts, 5)
    assert launched[3:5] == [dispatch.location_map_kernel, dispatch.write_indices_kernel]


# The runtime


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
        poisoned_build(GOLDEN_TOPK_EXPERTS, 4)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)


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
