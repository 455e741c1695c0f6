"""The measure of error and the cases themselves: what must fail every bound does, and nothing is tiny or huge."""

import math

import numpy as np
import pytest
from helpers import SHAPES

from moeblaze_ref.cases import ROUTINGS, random_topk, relative_error
from moeblaze_ref.numpy_ref import layer


def test_relative_error_is_relative():
    ref = 1e-30 * np.arange(1.0, 5.0)
    assert relative_error(ref, ref) == 0.0
    assert relative_error(np.zeros(4), ref) == pytest.approx(1.0)
    assert relative_error(2.0 * ref, ref) == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_and_anything_against_zero_fail_every_bound():
    assert not relative_error([np.nan, 1.0], [1.0, 1.0]) < math.inf
    assert not relative_error([1.0, 1.0], [np.nan, 1.0]) < math.inf
    assert not relative_error([np.inf, 1.0], [np.inf, 1.0]) < math.inf
    assert not relative_error([1e-100], [0.0]) < math.inf
    assert relative_error([0.0], [0.0]) == relative_error([], []) == 0.0


def test_shapes_are_never_broadcast():
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.ones((1, 3)), np.ones((2, 3)))


def test_routings_are_what_they_claim():
    counts = {name: np.bincount(random_topk(400, 8, 2, name).ravel(), minlength=8).tolist() for name in ROUTINGS}
    assert counts["hot"][-1] == 400
    assert counts["empty"][:4] == [0, 0, 0, 0] and min(counts["empty"][4:]) > 0
    assert counts["zipf"][0] > 4 * counts["zipf"][-1]
    assert min(counts["uniform"]) > 50


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cases_are_routed_as_they_claim(shape):
    case = shape.case()
    lengths = np.bincount(case.topk_experts.ravel(), minlength=shape.E)
    if shape.routing == "hot":
        assert lengths[-1] == shape.L
    elif shape.routing == "empty":
        assert not lengths[: shape.E // 2].any() and lengths[shape.E // 2 :].all()
    elif shape.routing == "zipf":
        assert lengths[0] > 3 * lengths[-1]
    elif shape.L > 1:
        assert lengths.all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_of_order_one(shape):
    case = shape.case()
    output = layer.forward(case.x, case.weights, shape.k)
    gradients = layer.backward(case.d_out, output.saved, case.weights, 1.0, 1.0)
    for tensor in (output.out, *gradients):
        assert 1e-2 < np.sqrt(np.mean(np.square(tensor))) < 1e2
