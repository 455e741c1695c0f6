"""relu's backward from y_swi alone: the same bits as from a, in numpy and every version of the raw CUDA kernels.

The Numba kernels are compared in test_layer_backends.
"""

import numpy as np
import pytest
from planted import Quick

from moeblaze_ref.backends.numpy_ref import layer as numpy_layer
from moeblaze_ref.backends.raw_cuda import expert_down, expert_up
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.verify.cases import make_case

SIZES = {"L": 37, "d": 16, "h": 24, "E": 5, "k": 2}  # no tile divides the rows of an expert
WIDE = {"L": 70, "d": 128, "h": 128, "E": 3, "k": 2}  # what 7_persistent takes

# version of the expert kernels (None: numpy), dtype, sizes
VERSIONS = [
    (None, "float64", SIZES),
    (None, "float32", SIZES),
    *((version, "float32", SIZES) for version in ("1_naive", "2_tiled", "3_mma_tf32")),
    *((version, "bfloat16", SIZES) for version in ("1_naive", "2_tiled", "3_mma")),
    ("7_persistent", "bfloat16", WIDE),
]


def zeros_and_signs(case):
    """The case with tokens whose a is 0 and -0: there the slope is 0 by definition."""
    case.x[:2] = [[0.0], [-0.0]]
    return case


def run(version, case, policy, overwrite):
    """Output, losses and every gradient of the layer, and the names of what it kept."""
    layer, how = (raw_layer, {"executor": Quick(), "version": version}) if version else (numpy_layer, {})
    output = layer.forward(case.x, case.weights, case.k, "relu", policy, **how)
    kept = tuple(output.saved.intermediates)
    gradients = layer.backward(case.d_out, output.saved, case.weights, 0.7, 0.3, overwrite=overwrite, **how)
    return [*output[:3], *gradients], kept


def test_every_version_of_the_expert_kernels_is_in_the_list():
    assert {version for version, *_ in VERSIONS if version} == {*expert_up.VERSIONS} == {*expert_down.VERSIONS}


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize(("version", "dtype", "sizes"), VERSIONS)
def test_y_swi_alone_gives_the_bits_of_a(version, dtype, sizes, overwrite):
    case = zeros_and_signs(make_case(**sizes, routing="zipf", activation="relu")).astype(dtype)
    expected, kept = run(version, case, "conventional", overwrite)
    assert "a" in kept
    for policy in POLICIES:
        found, kept = run(version, case, policy, overwrite)
        if policy in ("paper", "minimal"):
            assert kept == ("y_swi",)
        for one, other in zip(found, expected, strict=True):
            assert (one is None and other is None) or np.array_equal(one, other)
            assert one is None or np.asarray(one, dtype=np.float64).any()


def test_a_y_swi_that_is_damaged_is_seen():
    case = make_case(**SIZES, routing="zipf", activation="relu")
    output = numpy_layer.forward(case.x, case.weights, case.k, "relu", "minimal")
    expected = numpy_layer.backward(case.d_out, output.saved, case.weights)
    output.saved.intermediates["y_swi"][-1] = 0.0
    found = numpy_layer.backward(case.d_out, output.saved, case.weights)
    for name in ("d_x", "d_w1", "d_w3", "d_gates"):
        assert not np.array_equal(getattr(found, name), getattr(expected, name)), name
