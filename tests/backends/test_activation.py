"""The eight activations and their slopes in every backend: torch and central differences, a fault, wrong operands."""

import numpy as np
import pytest
import torch
from expert_stages import RAGGED, assert_caught, call, every_fault, refusals
from headers import assert_as_stated, stated

from moeblaze_ref.backends.numpy_ref import activation as stage
from moeblaze_ref.backends.raw_cuda import activation as raw
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.config import ACTIVATIONS, GATED_ACTIVATIONS, is_gated
from moeblaze_ref.nn.activations import ACTIVATION
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.verify.cases import relative_error

ROWS, WIDTH = 37, 11


def numbers(activation, scale=1.0, dtype=np.float64):
    """a and b (None if ungated) and d_y, from far below zero to far above."""
    rng = np.random.default_rng(3)
    a, b, d_y = (scale * rng.standard_normal((3, ROWS, WIDTH))).astype(dtype)
    return a, b if is_gated(activation) else None, d_y


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_torch(activation, scale):
    a, b, d_y = numbers(activation, scale)
    ta, tb = (None if t is None else torch.tensor(t, requires_grad=True) for t in (a, b))
    ty = ACTIVATION[activation](ta)
    ty = ty if tb is None else ty * tb
    ty.backward(torch.tensor(d_y))
    d_a, d_b = stage.backward(d_y, a, b, activation)
    assert relative_error(stage.forward(a, b, activation), ty.detach()) < 1e-14
    assert relative_error(d_a, ta.grad) < 1e-14
    if b is None:
        assert d_b is None
    else:
        assert relative_error(d_b, tb.grad) < 1e-14


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slope_is_the_central_difference(activation):
    a, b, d_y = numbers(activation)
    step = 1e-6
    rise = stage.forward(a + step, b, activation) - stage.forward(a - step, b, activation)
    assert relative_error(stage.backward(d_y, a, b, activation)[0], d_y * rise / (2 * step)) < 1e-8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_stays_float32_and_near(activation):
    a, b, d_y = numbers(activation, 2.0, np.float32)
    wide = [None if t is None else t.astype(np.float64) for t in (d_y, a, b)]
    results = [stage.forward(a, b, activation), *stage.backward(d_y, a, b, activation)]
    truths = [stage.forward(*wide[1:], activation), *stage.backward(*wide, activation)]
    for result, truth in zip(results, truths, strict=True):
        if truth is not None:
            assert result.dtype == np.float32
            assert relative_error(result, truth) < 1e-6


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_act_is_the_activation_with_a_unit_partner(activation):
    a, _, _ = numbers(activation)
    assert np.array_equal(stage.act(a, activation), stage.forward(a, np.ones_like(a), activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_inputs_saturate_without_nan(activation):
    a = np.array([[-1e4, -50.0, 0.0, 50.0, 1e4]], dtype=np.float32)
    b = np.ones_like(a) if is_gated(activation) else None
    with np.errstate(over="raise", invalid="raise"):
        y = stage.forward(a, b, activation)
        d_a, _ = stage.backward(np.ones_like(a), a, b, activation)
    power = 2 if activation == "relu2" else 1
    assert_at_limits(y, np.maximum(a, 0.0) ** power)
    assert_at_limits(d_a[0, [0, 4]], np.array([0.0, 2e4 if power == 2 else 1.0]))


def assert_at_limits(found, limits):
    """Relatively near each limit, but for zeros, which exp(-50) never reaches."""
    zero = limits == 0.0
    np.testing.assert_allclose(found[~zero], limits[~zero], rtol=1e-6)
    np.testing.assert_allclose(found[zero], 0.0, atol=1e-15)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_rows(activation):
    a = np.empty((0, 4))
    b = a if is_gated(activation) else None
    assert stage.forward(a, b, activation).shape == (0, 4)
    assert stage.backward(a, a, b, activation)[0].shape == (0, 4)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_numba_far_from_zero_do_not_overflow(name):
    far = np.array([[-1e4, -90.0, 90.0, 1e4]], np.float32)
    reached = np.square(far) if name == "relu2" else far
    found = call("numba", "activation", "act", dict(a=far, activation=name))
    np.testing.assert_allclose(found[far > 0], reached[far > 0], rtol=1e-7)
    np.testing.assert_allclose(found[far < 0], 0.0, atol=1e-30)  # not all reach it: exp(-90) is a number


@pytest.mark.parametrize("dtype", gemm.WIDE)
@pytest.mark.parametrize("function", ACTIVATIONS)
def test_the_activation_alone_on_simt(function, dtype):
    case, executor = RAGGED.astype(dtype), SimtExecutor()
    a = case.x
    with executor.recording() as launches:
        found = raw.act(a, function, executor=executor)
    expected = stage.act(a.astype(np.float64), function)
    assert relative_error(found, expected) <= {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    symbols = {"R": a.shape[0], "h": a.shape[1], "s": a.dtype.itemsize}
    assert_as_stated(*launches, stated("activation/1_elementwise.cu"), symbols)


def test_what_lies_between_rows_is_neither_read_nor_written():
    executor, pitch = SimtExecutor(), 24
    whole = np.random.default_rng(5).standard_normal((ROWS, pitch)).astype(np.float32)
    a = whole[:, :WIDTH]
    with executor.recording() as launches:
        found = raw.act(a, "gelu", executor=executor)
    assert relative_error(found, stage.act(a.astype(np.float64), "gelu")) <= 1e-6
    assert np.array_equal(found, raw.act(np.ascontiguousarray(a), "gelu", executor=executor))
    assert found.strides == a.strides
    symbols = {"R": ROWS, "h": WIDTH, "s": a.itemsize}
    assert_as_stated(*launches, stated("activation/1_elementwise.cu"), symbols)


A = np.ones((2, 3))
NAN_AT_10 = np.array([[1.0, 1.0, 1.0], [np.nan, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("a", "b", "activation", "error", "message"),
    [
        (A, A, "swigloo", ValueError, "Did you mean 'swiglu'"),
        (A, None, "swiglu", ValueError, "b is None, but swiglu is gated"),
        (A, A, "silu", ValueError, "silu is not gated: b must be None"),
        (NAN_AT_10, None, "silu", ValueError, r"a\[1, 0\] is nan"),
        (A, np.full((2, 3), np.inf), "reglu", ValueError, r"b\[0, 0\] is inf"),
        (A, A[:, :2], "swiglu", ValueError, r"b has shape \(2, 2\), but it must be \(R=2, h=3\)"),
        (A[0], None, "silu", ValueError, "must have 2 dimensions"),
        (A.astype(int), None, "silu", TypeError, "a has dtype int64"),
        (A, A.astype(np.float32), "swiglu", TypeError, "b has dtype float32, but it must be float64"),
        ([[1.0]], None, "silu", TypeError, "a is a list"),
    ],
)
def test_bad_input_of_forward_and_backward(a, b, activation, error, message):
    with pytest.raises(error, match=message):
        stage.forward(a, b, activation)
    with pytest.raises(error, match=message):
        stage.backward(np.ones((2, 3)), a, b, activation)


@refusals(
    "activation",
    {"act": dict(a=np.float32(A), activation="swiglu")},
    [
        (dict(activation="gello"), ValueError, "Did you mean 'gelu'"),
        (dict(activation="seglu"), ValueError, "unknown activation 'seglu'. Did you mean"),
        (dict(a=np.float32(NAN_AT_10)), ValueError, r"a\[1, 0\] is nan"),
    ],
)
def test_bad_input_of_act(refused, error, message):
    with pytest.raises(error, match=message):
        refused()


@pytest.mark.parametrize(
    ("d_y", "error", "message"),
    [
        (A[:1], ValueError, r"d_y_swi has shape \(1, 3\), but it must be \(R=2, h=3\)"),
        (A.astype(np.float32), TypeError, "d_y_swi has dtype float32"),
        (NAN_AT_10, ValueError, r"d_y_swi\[1, 0\] is nan"),
    ],
)
def test_bad_gradient(d_y, error, message):
    with pytest.raises(error, match=message):
        stage.backward(d_y, A, A, "swiglu")


FAULTS = {
    "numba": {
        "zeros": ("nonlinearity(a[row, column])", "ZERO"),
        "last row dropped": ("if row < a.shape[0]:", "if row < a.shape[0] - 1:"),
    },
}


@every_fault(FAULTS)
def test_a_planted_fault_is_caught(file, change):
    assert_caught("activation", file, change)
