"""The comparison: bounds of every dtype, the tensor that it names, and what no bound passes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case
from moeblaze_ref.verify.comparisons import EXPECT, RUN, compare

EXACT = {"a": np.ones(1000), "b": np.full(1000, 2.0)}


def off(**errors):
    """The exact results, each tensor off by a relative error."""
    return {name: array * (1 + errors.get(name, 0.0)) for name, array in EXACT.items()}


def test_the_error_of_the_worst_tensor_is_shown():
    error, bound = compare(off(b=1e-6), EXACT, "float32")
    assert error == pytest.approx(1e-6) and bound == 1e-5


@pytest.mark.parametrize("wrong", [np.full(1000, np.nan), np.zeros(1000), np.full(1000, np.inf)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_nan_zeros_and_infinity_pass_no_bound(wrong, dtype):
    error, bound = compare(EXACT | {"b": wrong}, EXACT, dtype, baseline=off(a=1e-3, b=1e-3))
    assert not error <= bound


def test_narrow_types_may_be_twice_as_wrong_as_torch():
    baseline = off(a=1e-3, b=2e-3)
    error, bound = compare(off(a=1.9e-3, b=1e-3), EXACT, "bfloat16", baseline)
    assert (error, bound) == pytest.approx((1.9e-3, 2e-3)) and error <= bound
    error, bound = compare(off(a=2.1e-3), EXACT, "bfloat16", baseline)
    assert error > bound


def test_the_least_bound_is_for_small_tensors_only():
    exact, small = np.ones(1000), np.ones(255)
    assert compare({"a": exact}, {"a": exact}, "float16", {"a": exact})[1] == 0.0
    assert compare({"a": small}, {"a": small}, "float16", {"a": small})[1] == 2.0**-9
    assert compare({"a": small}, {"a": small}, "bfloat16", {"a": small})[1] == 2.0**-6


@pytest.mark.parametrize("stage", RUN)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_torch_in_a_narrow_type_is_a_fair_baseline(stage, activation):
    """It loses what its mantissa loses, and the same tensors come out."""
    case = make_case(67, 24, 40, 8, 2, activation=activation).astype(ml_dtypes.bfloat16)
    exact, baseline = (EXPECT[stage](case, dtype) for dtype in (torch.float64, torch.bfloat16))
    for direction in exact:
        assert exact[direction].keys() == baseline[direction].keys()
        error, _ = compare(baseline[direction], exact[direction], "bfloat16", baseline[direction])
        assert error < 2.0**-5
    if stage != "gating":
        assert compare(baseline["backward"], exact["backward"], "bfloat16", baseline["backward"])[0] > 2.0**-12


def test_both_sides_name_the_same_tensors():
    from moeblaze_ref.backends.registry import BACKENDS

    for activation in ("swiglu", "silu"):
        case = make_case(11, 8, 24, 4, 2, activation=activation)
        for stage, run in RUN.items():
            found, exact = run(BACKENDS["numpy"].open(stage), case), EXPECT[stage](case, torch.float64)
            assert {d: r.keys() for d, r in found.items()} == {d: r.keys() for d, r in exact.items()}
    assert comparisons.RUN.keys() == comparisons.EXPECT.keys()
