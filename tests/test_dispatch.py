"""Dispatch in every backend: the same bits, the invariants, and faults that cannot pass."""

import numpy as np
import pytest
from helpers import assert_invariants, routings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.cases import GOLDEN_DISPATCH, GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS, random_topk
from moeblaze_ref.check import differing_elements
from moeblaze_ref.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.paths import kernels_dir
from moeblaze_ref.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.raw_cuda.runtime.simt import KernelFault, SimtExecutor

HERE = ("numpy", "numba", "simt")  # the backends that need no GPU


def build(backend, topk_experts, num_experts):
    """A backend's Dispatch as numpy arrays, its outputs poisoned before they are written."""
    rung = next(iter(BACKENDS[backend].rungs("dispatch")))
    return BACKENDS[backend].open("dispatch", rung).build(topk_experts, num_experts)


@pytest.mark.parametrize("backend", HERE)
def test_the_papers_example(backend):
    found = build(backend, GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
    assert differing_elements(found, GOLDEN_DISPATCH) == 0


SIZES = {"numpy": (400, 40), "numba": (20, 6), "simt": (700, 40)}  # most tokens and experts


@pytest.mark.parametrize("backend", HERE)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_invariants_of_random_routings(backend, data):
    most_tokens, most_experts = SIZES[backend]
    topk_experts, num_experts = data.draw(routings(most_tokens, most_experts))
    topk_experts = topk_experts[:, :32].copy()  # the kernels' limit
    assert_invariants(build(backend, topk_experts, num_experts), topk_experts, num_experts)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "routing"),
    [
        (0, 7, 3, "uniform"),
        (1, 1024, 32, "uniform"),
        (300, 1024, 32, "zipf"),
        (257, 1, 1, "uniform"),
        (1000, 32, 32, "uniform"),
        (4096, 64, 6, "hot"),
        (65_536, 16, 4, "zipf"),
    ],
)
def test_the_raw_kernels_at_their_limits(num_tokens, num_experts, k, routing):
    topk_experts = random_topk(num_tokens, num_experts, k, routing)
    found = build("simt", topk_experts, num_experts)
    assert differing_elements(found, build_by_sort(topk_experts, num_experts)) == 0


def test_the_plain_build_gives_the_same_bits():
    topk_experts = random_topk(5000, 16, 4, "zipf")
    found = raw_dispatch.build(topk_experts, 16, executor=SimtExecutor(instrumented=False))
    assert differing_elements(found, build_by_sort(topk_experts, 16)) == 0


@pytest.mark.parametrize("seed", range(1, 6))
def test_every_order_of_threads_gives_the_same_bits(seed):
    topk_experts = random_topk(600, 8, 3, "zipf")
    found = raw_dispatch.build(topk_experts, 8, executor=SimtExecutor(seed=seed))
    assert differing_elements(found, build_by_sort(topk_experts, 8)) == 0


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1000, 16, 4), (513, 8, 1), (70, 300, 32)])
def test_the_kernels_ask_for_the_bytes_that_their_header_states(num_tokens, num_experts, k):
    L, E, R, THREADS = num_tokens, num_experts, num_tokens * k, raw_dispatch.THREADS
    stated = {
        "dense_map": (4 * R, 4 * L * E + 8 * R),
        "expert_lengths": (4 * L * E, 4 * E),
        "expert_offsets": (4 * E, 4 * E + 4),
        "route_indices": (4 * L * E + 4 * E * THREADS + 2 * R * (k + 1), 8 * R),
    }
    executor = SimtExecutor()
    with executor.recording() as launches:
        raw_dispatch.build(random_topk(L, E, k, "zipf"), E, executor=executor)
    assert {launch.kernel: (launch.read_bytes, launch.written_bytes) for launch in launches} == stated
    assert [launch.kernel for launch in launches] == list(stated)


# ---- planted faults ------------------------------------------------------------------------

# name: (text in the kernel file or common.cuh, what takes its place)
FAULTS = {
    "writes zeros": ("expert_token_indices[position] = token;", "expert_token_indices[position] = 0;"),
    "writes nothing": ("token_index_map[token * k + slot] = position;", ""),
    "writes past its buffer": (
        "const int position = base + rank.exclusive;",
        "const int position = base + rank.exclusive + 1;",
    ),
    "drops the last token": ("token < L && dense_map", "token < L - 1 && dense_map"),
    "reads the wrong expert": ("rows[slot / k * E + expert] =", "rows[slot / k * E + (expert + 1) % E] ="),
    "offset off by one": ("[expert] = base + scan.exclusive;", "[expert] = base + scan.exclusive + (expert > 0);"),
    "no last offset": ("expert_token_offsets[E] = base;", ";"),
    "forgets earlier tiles": ("        base += rank.total;\n", ""),
    "forgets earlier experts": ("        base += scan.total;\n", ""),
    "map not cleared": ("rows[entry] = EMPTY;", ";"),
    "inclusive scan": ("return inclusive - value;", "return inclusive;"),
    "counts empty entries": ("* E + expert] != EMPTY;", "* E + expert] >= EMPTY;"),
    "wrong slot": ("while (experts_of_token[j] != expert) ++j;", ";"),
    "missing barrier after clearing the map": ("    __syncwarp();\n", ""),
    "missing barrier before the totals are read": (
        "= below_in_warp + value;\n    __syncthreads();",
        "= below_in_warp + value;",
    ),
    "missing barrier before the totals are written again": (
        "    __syncthreads();  // warp_totals may",
        "    // warp_totals may",
    ),
}


class Planted(SimtExecutor):
    """An executor whose dispatch file has one fault in it."""

    def __init__(self, fault, seed):
        super().__init__(seed=seed)
        right, wrong = FAULTS[fault]
        text = (kernels_dir() / "dispatch/1_dense_map.cu").read_text()
        header = (kernels_dir() / "include/common.cuh").read_text().replace("#pragma once", "")
        text = text.replace('#include "common.cuh"', header)
        assert text.count(right) >= 1, f"the kernels no longer hold {right!r}: update the fault"
        self.faulty_text = text.replace(right, wrong)

    def load(self, file, **constants):
        return super().load(file, text=self.faulty_text, **constants)


def caught(fault, seed):
    """Whether a fault raises or changes the result."""
    topk_experts = random_topk(700, 300, 3, "zipf")  # several tiles of tokens and of experts
    try:
        found = raw_dispatch.build(topk_experts, 300, executor=Planted(fault, seed))
    except KernelFault:
        return True
    return differing_elements(found, build_by_sort(topk_experts, 300)) > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    assert caught(fault, seed=1)


def test_the_same_input_without_a_fault_passes():
    topk_experts = random_topk(700, 300, 3, "zipf")
    found = raw_dispatch.build(topk_experts, 300, executor=SimtExecutor(seed=1))
    assert differing_elements(found, build_by_sort(topk_experts, 300)) == 0


def test_writing_past_a_buffer_names_the_buffer_and_the_thread():
    topk_experts = np.zeros((40, 1), np.int32)
    with pytest.raises(
        KernelFault,
        match=r"kernel route_indices, block \(0, 0, 0\), thread \(39, 0, 0\): .*of expert_token_indices, which has 160 bytes",
    ):
        raw_dispatch.build(topk_experts, 1, executor=Planted("writes past its buffer", 0))


# ---- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(
    ("topk_experts", "num_experts", "error", "message"),
    [
        ([[0, 9]], 8, ValueError, r"topk_experts\[0, 1\] is 9, but there are only 8 experts \(valid: 0..7\)"),
        ([[0, 1], [-1, 2]], 8, ValueError, r"topk_experts\[1, 0\] is -1, but there are only 8 experts"),
        ([[0, 1], [5, 5]], 8, ValueError, r"topk_experts\[1\] names expert 5 twice"),
        ([[0, 1, 2]], 2, ValueError, r"k is 3, but there are only 2 experts"),
        ([0, 1], 2, ValueError, r"topk_experts has shape \(2,\), but it must have 2 dimensions"),
    ],
)
def test_bad_choices_are_refused(backend, topk_experts, num_experts, error, message):
    with pytest.raises(error, match=message):
        build(backend, np.array(topk_experts, np.int32), num_experts)


@pytest.mark.parametrize("backend", HERE)
def test_bad_arrays_are_refused(backend):
    with pytest.raises(TypeError, match="topk_experts has dtype int64, but it must be int32"):
        build(backend, GOLDEN_TOPK_EXPERTS.astype(np.int64), 4)
    with pytest.raises(ValueError, match="topk_experts is not C-contiguous"):
        build(backend, np.asfortranarray(GOLDEN_TOPK_EXPERTS), 4)
    with pytest.raises(TypeError, match="topk_experts is a list"):
        BACKENDS[backend].stage("dispatch").build([[0, 1]], 4)


@pytest.mark.parametrize("backend", HERE)
def test_read_only_choices_are_fine(backend):
    fixed = GOLDEN_TOPK_EXPERTS.copy()
    fixed.flags.writeable = False
    assert differing_elements(build(backend, fixed, 4), GOLDEN_DISPATCH) == 0


@pytest.mark.parametrize("backend", ["numba", "simt"])
def test_the_kernels_limits_are_named(backend):
    with pytest.raises(ValueError, match="num_experts is 2000, but it must be 1..1024"):
        build(backend, np.zeros((1, 1), np.int32), 2000)
    with pytest.raises(ValueError, match="k is 40, but it must be 1..32"):
        build(backend, random_topk(1, 64, 40), 64)


def test_too_many_rows_are_refused_before_anything_is_allocated():
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**31, 1), (0, 4))
    with pytest.raises(ValueError, match="not C-contiguous|2147483648, but int32 indices allow at most"):
        raw_dispatch.build(wide, 4)
