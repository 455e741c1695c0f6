"""Dispatch on a CUDA device: raw CUDA through CuPy, and the Numba kernels on the same device."""

import numpy as np
import pytest

from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.cases import GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS, random_topk
from moeblaze_ref.check import differing_elements
from moeblaze_ref.devices import cuda_device_count
from moeblaze_ref.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.raw_cuda import dispatch

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

every_rung = pytest.mark.parametrize("rung", dispatch.RUNGS)

SHAPES = [
    (0, 7, 3, "uniform"),
    (1, 1024, 32, "uniform"),
    (257, 1, 1, "uniform"),
    (300, 1024, 32, "zipf"),
    (3001, 130, 8, "uniform"),
    (4096, 64, 6, "hot"),
    (65_536, 16, 4, "zipf"),
    (1_048_576, 128, 8, "empty"),
]


@pytest.mark.parametrize(("backend", "rung"), [*(("cuda", rung) for rung in dispatch.RUNGS), ("numba", None)])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k", "routing"), SHAPES)
def test_the_same_bits_as_the_sort(backend, rung, num_tokens, num_experts, k, routing):
    topk_experts = random_topk(num_tokens, num_experts, k, routing)
    found = BACKENDS[backend].open("dispatch", rung).build(topk_experts, num_experts)
    assert differing_elements(found, build_by_sort(topk_experts, num_experts)) == 0


@every_rung
def test_twenty_runs_give_the_same_bits(rung):
    import cupy

    topk_experts = cupy.asarray(random_topk(20_000, 64, 6, "zipf"))
    first = dispatch.build(topk_experts, 64, rung=rung).map(cupy.asnumpy)
    assert differing_elements(first, build_by_sort(topk_experts.get(), 64)) == 0
    for _ in range(20):
        assert differing_elements(dispatch.build(topk_experts, 64, rung=rung).map(cupy.asnumpy), first) == 0


def test_a_device_array_is_checked_at_the_door():
    import cupy

    with pytest.raises(ValueError, match=r"topk_experts\[0, 1\] is 9, but there are only 8 experts"):
        dispatch.build(cupy.asarray([[0, 9]], dtype=cupy.int32), 8)
    with pytest.raises(ValueError, match=r"topk_experts\[1\] names expert 5 twice"):
        dispatch.build(cupy.asarray([[0, 1], [5, 5]], dtype=cupy.int32), 8)


@every_rung
def test_the_result_stays_on_the_device(rung):
    import cupy

    found = dispatch.build(cupy.asarray(GOLDEN_TOPK_EXPERTS), GOLDEN_NUM_EXPERTS, rung=rung)
    assert all(isinstance(array, cupy.ndarray) for array in found.arrays().values())
    expected = build_by_sort(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
    assert differing_elements(found.map(cupy.asnumpy), expected) == 0


def test_arrays_are_poisoned_on_request():
    import cupy

    from moeblaze_ref.raw_cuda.runtime.cupy import CupyExecutor

    fresh = CupyExecutor(poisoned=True).empty((1000,), "float32")
    assert bool(cupy.isnan(fresh).all())
    assert np.all(cupy.asnumpy(CupyExecutor(poisoned=True).empty((1000,), "int32")) < -1)
