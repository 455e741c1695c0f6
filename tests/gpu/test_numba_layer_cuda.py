"""The Numba layer on a CUDA device: real sizes, arrays that stay there, the same bits every time."""

import numpy as np
import pytest
from helpers import Shape
from test_layer_backends import layer_errors, run_layer

from moeblaze_ref.backends.numba_cuda import layer
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify.comparisons import BOUNDS

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

LARGE = Shape(2048, 256, 512, 8, 2, "zipf")


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("routing", ["zipf", "hot"])
def test_real_sizes(activation, routing):
    assert np.max(layer_errors(LARGE._replace(routing=routing), activation)) <= BOUNDS["float32"]


def test_twenty_runs_give_the_same_bits():
    case = LARGE.case().astype(np.float32)
    first, _ = run_layer("numba", case)
    for _ in range(20):
        for one, other in zip(run_layer("numba", case)[0], first, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("overwrite", [False, True], ids=["kept", "overwritten"])
@pytest.mark.parametrize("policy", POLICIES)
def test_cupy_arrays_stay_on_the_device(policy, overwrite):
    import cupy

    case = LARGE.case().astype(np.float32)
    expected, _ = run_layer("numba", case, policy)
    x, d_out = cupy.asarray(case.x), cupy.asarray(case.d_out)
    weights = type(case.weights)(*map(cupy.asarray, case.weights))
    output = layer.forward(x, weights, LARGE.k, policy=policy, renormalize=False)
    assert all(isinstance(tensor, cupy.ndarray) for tensor in output.saved.tensors().values())
    gradients = layer.backward(d_out, output.saved, weights, 0.7, 0.3, overwrite=overwrite)
    for one, other in zip((*output[:3], *gradients), expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(one), other)
