"""Dispatch on a CUDA device: raw CUDA through CuPy, and the Numba kernels on the same device."""

from dataclasses import replace

import numpy as np
import pytest
from test_dispatch import LIMITS

from moeblaze_ref.backends.numpy_ref import dispatch as reference
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import dispatch
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import checks
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify.cases import GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS, random_topk
from moeblaze_ref.verify.check import differing_elements

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

every_version = pytest.mark.parametrize("version", dispatch.VERSIONS)

SHAPES = [*LIMITS, (3001, 130, 8, "uniform"), (1_048_576, 128, 8, "empty")]


@pytest.mark.parametrize(
    ("backend", "version"), [*(("cuda", version) for version in dispatch.VERSIONS), ("numba", None)]
)
@pytest.mark.parametrize(("num_tokens", "num_experts", "k", "routing"), SHAPES)
def test_the_same_bits_as_the_sort(backend, version, num_tokens, num_experts, k, routing):
    topk_experts = random_topk(num_tokens, num_experts, k, routing)
    found = BACKENDS[backend].open("dispatch", version).build(topk_experts, num_experts)
    assert differing_elements(found, build_by_sort(topk_experts, num_experts)) == 0


@every_version
def test_twenty_runs_give_the_same_bits(version):
    import cupy

    topk_experts = cupy.asarray(random_topk(20_000, 64, 6, "zipf"))
    first = dispatch.build(topk_experts, 64, version=version).map(cupy.asnumpy)
    assert differing_elements(first, build_by_sort(topk_experts.get(), 64)) == 0
    for _ in range(20):
        assert differing_elements(dispatch.build(topk_experts, 64, version=version).map(cupy.asnumpy), first) == 0


def test_a_device_array_is_checked_before_the_launch():
    import cupy

    with pytest.raises(ValueError, match=r"topk_experts\[0, 1\] is 9, but there are only 8 experts"):
        dispatch.build(cupy.asarray([[0, 9]], dtype=cupy.int32), 8)
    with pytest.raises(ValueError, match=r"topk_experts\[1\] names expert 5 twice"):
        dispatch.build(cupy.asarray([[0, 1], [5, 5]], dtype=cupy.int32), 8)


@every_version
def test_the_result_stays_on_the_device(version):
    import cupy

    found = dispatch.build(cupy.asarray(GOLDEN_TOPK_EXPERTS), GOLDEN_NUM_EXPERTS, version=version)
    assert all(isinstance(array, cupy.ndarray) for array in found.arrays().values())
    expected = build_by_sort(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
    assert differing_elements(found.map(cupy.asnumpy), expected) == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 1000])
def test_the_steps_of_numba_take_and_give_device_arrays(num_tokens):
    import cupy

    from moeblaze_ref.backends.numba_cuda import dispatch as numba_dispatch

    chosen = random_topk(num_tokens, 6, 3)
    on_device = cupy.asarray(chosen)
    dense_map = numba_dispatch.dense_map(on_device, 6)
    offsets = numba_dispatch.expert_offsets(numba_dispatch.expert_lengths(dense_map))
    found = dense_map, offsets, *numba_dispatch.route_indices(dense_map, offsets, on_device)
    expected_map = reference.dense_map(chosen, 6)
    expected_offsets = reference.expert_offsets(reference.expert_lengths(expected_map))
    expected = expected_map, expected_offsets, *reference.route_indices(expected_map, expected_offsets, chosen)
    for array, truth in zip(found, expected, strict=True):
        assert isinstance(array, cupy.ndarray)
        np.testing.assert_array_equal(array.get(), truth, strict=True)
    with pytest.raises(ValueError, match=r"offsets\[0\] is 1, but it must be 0"):
        numba_dispatch.route_indices(dense_map, offsets + 1, on_device)


def test_a_dispatch_on_the_device_that_contradicts_itself_is_refused():
    import cupy

    right = build_by_sort(random_topk(60, 7, 3, "zipf"), 7).map(cupy.asarray)
    checks.check_dispatch(right)
    positions = right.token_index_map.copy()
    positions[5] = positions[80]
    with pytest.raises(ValueError, match=rf"token_index_map\[5\] is {int(positions[5])}"):
        checks.check_dispatch(replace(right, token_index_map=positions))


def test_an_edited_header_is_compiled_again(tmp_path, monkeypatch):
    import cupy

    from moeblaze_ref.runtime.cupy import CupyExecutor

    monkeypatch.setattr("moeblaze_ref.runtime.source.kernels_dir", lambda: tmp_path)
    (tmp_path / "include").mkdir()
    text = '#include "value.cuh"\nextern "C" __global__ void f(int* out) { out[0] = VALUE; }'
    for value in (10, 20):
        (tmp_path / "include" / "value.cuh").write_text(f"constexpr int VALUE = {value};")
        out = cupy.zeros(1, cupy.int32)
        CupyExecutor().load("test.cu", text=text).launch("f", 1, 1, out=out)
        assert int(out[0]) == value


def test_arrays_are_poisoned_on_request():
    import cupy

    from moeblaze_ref.runtime.cupy import CupyExecutor

    fresh = CupyExecutor(poisoned=True).empty((1000,), "float32")
    assert bool(cupy.isnan(fresh).all())
    assert np.all(cupy.asnumpy(CupyExecutor(poisoned=True).empty((1000,), "int32")) < -1)
