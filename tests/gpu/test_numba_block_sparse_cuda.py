"""The block-sparse layer in Numba on a CUDA device: whole blocks of 128, arrays that stay there, the same bits."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import Shape
from sparse_cases import PRODUCTS, Run, assert_any_mask, assert_any_parts
from test_numba_block_sparse import check_layer, make_inputs, run_layer

from moeblaze_ref.backends.numba_cuda import block_sparse
from moeblaze_ref.core.devices import cuda_device_count

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

LARGE, BLOCK = Shape(2048, 256, 512, 8, 2, "zipf"), 128


@pytest.mark.parametrize("routing", ["zipf", "hot"])
def test_real_sizes(routing):
    check_layer(LARGE._replace(routing=routing), BLOCK)


@pytest.mark.parametrize("check", [assert_any_mask, assert_any_parts])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_is_the_dense_one_whatever_is_stored(product, check):
    check(product, Run("numba", None, "float32", (1, 8, BLOCK)))


def test_cupy_arrays_stay_on_the_device():
    import cupy

    case, inputs = LARGE.case().astype(np.float32), make_inputs(LARGE, BLOCK)
    chosen, gates = inputs["dispatch"], inputs["gates"]
    expected, _ = run_layer(block_sparse, case, chosen, gates, BLOCK)
    weights = type(case.weights)(*map(cupy.asarray, case.weights))
    case = replace(case, x=cupy.asarray(case.x), weights=weights, d_out=cupy.asarray(case.d_out))
    found, saved = run_layer(block_sparse, case, chosen.map(cupy.asarray), cupy.asarray(gates), BLOCK)
    assert all(isinstance(tensor, cupy.ndarray) for tensor in saved.tensors().values())
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(one), other)
