"""The router's products in every backend: the gradient of x joins that of the experts."""

import numpy as np
import pytest
import torch
from over_simt import SimtTensors

from moeblaze_ref.backends.numba_cuda import router as numba_router
from moeblaze_ref.backends.numpy_ref import router as reference
from moeblaze_ref.backends.raw_cuda import router as raw_router
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.torch_bridge import from_numpy, to_numpy
from moeblaze_ref.runtime.torch_executor import SHORT_DEPTH
from moeblaze_ref.verify.cases import relative_error

DEEP = 2 * SHORT_DEPTH  # experts, of whose sums a library may make parts


def operands(num_experts, dtype=np.float32, L=19, d=24):
    """d_logits (L, E), wg (d, E) and the experts' d_x (L, d)."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((L, num_experts), (d, num_experts), (L, d))]


@pytest.mark.parametrize("stage", [reference, numba_router, raw_router], ids=["numpy", "numba", "simt"])
def test_the_gradient_of_x_is_added_to_that_of_the_experts_in_place(stage):
    d_logits, wg, d_x = operands(7)
    alone = stage.input_gradient(d_logits, wg)
    exact = d_logits.astype(np.float64) @ wg.astype(np.float64).T
    assert relative_error(alone, exact) < 1e-6
    expected = d_x.astype(np.float64) + exact
    assert stage.input_gradient(d_logits, wg, d_x) is d_x
    assert relative_error(d_x, expected) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_experts", [7, DEEP])
@pytest.mark.parametrize("executor", [SimtExecutor(), SimtTensors()], ids=["simt", "torch"])
def test_the_sum_is_rounded_once(executor, num_experts, dtype):
    """The nearest numbers to the exact sums, but for ties that float32 makes; two roundings miss many."""
    d_logits, wg, d_x = operands(num_experts, dtype)
    exact = d_x.astype(np.float64) + d_logits.astype(np.float64) @ wg.astype(np.float64).T
    tensors = [from_numpy(array) for array in (d_logits, wg, d_x)] if executor.name == "idle" else (d_logits, wg, d_x)
    found = raw_router.input_gradient.unchecked(*tensors, executor=executor)
    found = to_numpy(found) if torch.is_tensor(found) else found
    assert found.dtype == dtype
    if dtype == "float32":
        assert relative_error(found, exact) < 1e-6
    else:
        assert np.mean(found != exact.astype(dtype)) < 0.01


def test_a_gradient_of_another_shape_is_refused():
    d_logits, wg, d_x = operands(7)
    with pytest.raises(ValueError, match=r"d_x has shape \(18, 24\), but it must be \(L=19, d=24\)"):
        raw_router.input_gradient(d_logits, wg, d_x[:18])
