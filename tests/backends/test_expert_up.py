"""The up-projection and its gradients against row-by-row torch, the buffer that it must not hold, its checks."""

import tracemalloc

import numpy as np
import pytest
import torch
from helpers import RAGGED, SHAPES

from moeblaze_ref.backends.numpy_ref import expert_up as stage
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.nn import oracle
from moeblaze_ref.verify.cases import random_topk, relative_error


def make_inputs(shape, activation="swiglu"):
    """x, w1, w2 and the Dispatch of a random choice with the shape's routing."""
    case = shape.case(activation)
    dispatch = build_by_sort(shape.topk_experts(), shape.E)
    return case.x, case.weights.w1, case.weights.w2, dispatch


def torch_up(x, w1, w2, dispatch, activation):
    """a, b, y_swi in torch with one matrix per routed row, and the leaves that collect gradients."""
    leaves = [None if t is None else torch.tensor(t, requires_grad=True) for t in (x, w1, w2)]
    tx, tw1, tw2 = leaves
    slot = torch.tensor(dispatch.token_index_map.argsort())  # (R,) which (token, j) each position holds
    expert = torch.tensor(dispatch.token_expert_indices).long()[slot]
    routed = tx[slot // dispatch.k]
    a = torch.einsum("rd,rdh->rh", routed, tw1[expert])
    b = None if tw2 is None else torch.einsum("rd,rdh->rh", routed, tw2[expert])
    y_swi = oracle.ACTIVATION[activation](a)
    return a, b, y_swi if b is None else y_swi * b, leaves


def backward(d_a, d_b, x, w1, w2, dispatch):
    """d_x, d_w1 and d_w2, as the layer asks for them."""
    d_w1, d_w2 = (None if d is None else stage.weight_gradient(d, x, dispatch) for d in (d_a, d_b))
    return stage.input_gradient(d_a, d_b, w1, w2, dispatch), d_w1, d_w2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_agrees_with_torch(shape, activation):
    x, w1, w2, dispatch = make_inputs(shape, activation)
    a, b, y_swi = stage.forward(x, w1, w2, dispatch, activation)
    ta, tb, ty, leaves = torch_up(x, w1, w2, dispatch, activation)
    d_a, d_b = np.random.default_rng(1).standard_normal((2, dispatch.R, shape.h))
    ta.backward(torch.tensor(d_a), retain_graph=True)
    results, truths = [a, y_swi], [ta.detach(), ty.detach()]
    if is_gated(activation):
        tb.backward(torch.tensor(d_b))
        results.append(b)
        truths.append(tb.detach())
    else:
        assert b is None
        d_b = None
    gradients = backward(d_a, d_b, x, w1, w2, dispatch)
    assert (gradients[2] is None) == (w2 is None)
    results += [g for g in gradients if g is not None]
    truths += [leaf.grad for leaf in leaves if leaf is not None]
    for result, truth in zip(results, truths, strict=True):
        assert relative_error(result, truth) < 1e-12


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_tokens(activation):
    shape = RAGGED._replace(L=0)
    x, w1, w2, dispatch = make_inputs(shape, activation)
    a, b, y_swi = stage.forward(x, w1, w2, dispatch, activation)
    assert a.shape == y_swi.shape == (0, shape.h)
    d_x, d_w1, _ = backward(a, b, x, w1, w2, dispatch)
    assert d_x.shape == (0, shape.d) and d_w1.shape == w1.shape and not d_w1.any()


def test_an_expert_without_tokens_gets_zero_gradients():
    shape = RAGGED._replace(k=2, routing="empty")
    x, w1, w2, dispatch = make_inputs(shape)
    a, b, _ = stage.forward(x, w1, w2, dispatch, "swiglu")
    _, d_w1, d_w2 = backward(a, b, x, w1, w2, dispatch)
    assert not d_w1[:2].any() and not d_w2[:2].any()
    assert all(d_w1[e].any() and d_w2[e].any() for e in range(2, shape.E))


def test_no_buffer_of_routed_rows():
    """With wide rows, all that either pass allocates stays below half of one (R, d) array."""
    L, d, h, E, k = 1024, 256, 2, 16, 4
    rng = np.random.default_rng(0)
    x, (w1, w2) = rng.standard_normal((L, d)), rng.standard_normal((2, E, d, h))
    dispatch = build_by_sort(random_topk(L, E, k), E)
    tracemalloc.start()
    try:
        a, b, _ = stage.forward(x, w1, w2, dispatch, "swiglu")
        forward_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        backward(a, b, x, w1, w2, dispatch)
        backward_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    routed_bytes = L * k * d * x.itemsize
    assert 0 < forward_peak < routed_bytes / 2
    assert 0 < backward_peak < routed_bytes / 2


def test_gradient_of_x_is_the_same_to_the_bit_every_time():
    x, w1, w2, dispatch = make_inputs(SHAPES[8])
    a, b, _ = stage.forward(x, w1, w2, dispatch, "swiglu")
    first, again = (stage.input_gradient(a, b, w1, w2, dispatch) for _ in range(2))
    assert np.array_equal(first, again)


X, W1, W2, DISPATCH = make_inputs(RAGGED)
NAN_X = np.where(np.arange(X.size).reshape(X.shape) == 13, np.nan, X)  # x[1, 1]

BAD_OPERANDS = [
    (dict(x=X[:-1]), ValueError, r"x has shape \(36, 12\), but it must be \(L=37, d\)"),
    (dict(x=X[0]), ValueError, "x has shape .* 2 dimensions"),
    (dict(x=NAN_X), ValueError, r"x\[1, 1\] is nan"),
    (dict(x=X.astype(np.float16)), TypeError, "x has dtype float16"),
    (dict(w1=W1[:-1]), ValueError, r"w1 has shape \(4, 12, 20\), but it must be \(E=5, d(=12)?, h(=20)?\)"),
    (dict(w1=W1[..., 1:]), ValueError, r"w\d has shape \(5, 12, \d+\), but it must be \(E=5, d(=12)?, h=\d+\)"),
    (dict(w1=W1.astype(np.float32)), TypeError, "w1 has dtype float32, but it must be float64"),
    (dict(w2=W2[..., 1:]), ValueError, r"w2 has shape \(5, 12, 19\), but it must be \(E=5, d=12, h=20\)"),
    (dict(w2=np.full_like(W2, np.inf)), ValueError, r"w2\[0, 0, 0\] is inf"),
    (dict(dispatch=None), TypeError, "dispatch is a NoneType, but it must be a Dispatch"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_OPERANDS)
def test_bad_operands(change, error, message):
    operands = dict(x=X, w1=W1, w2=W2, dispatch=DISPATCH) | change
    with pytest.raises(error, match=message):
        stage.forward(**operands, activation="swiglu")
    hidden, x = np.ones((DISPATCH.R, RAGGED.h)), operands.pop("x")
    with pytest.raises(error, match=message):
        stage.weight_gradient(hidden, x, operands["dispatch"])
        stage.input_gradient(hidden, hidden, **operands)


def test_bad_activation_and_partner():
    with pytest.raises(ValueError, match="Did you mean 'swiglu'"):
        stage.forward(X, W1, W2, DISPATCH, "swigul")
    with pytest.raises(ValueError, match="w2 is None, but reglu is gated"):
        stage.forward(X, W1, None, DISPATCH, "reglu")
    with pytest.raises(ValueError, match="relu2 is not gated: w2 must be None"):
        stage.forward(X, W1, W2, DISPATCH, "relu2")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(d_b=None), ValueError, "d_b is None, but the layer is gated"),
        (dict(w2=None), ValueError, "the layer is not gated: d_b must be None"),
        (dict(d_a=np.ones((110, 20))), ValueError, r"d_a has shape \(110, 20\), but it must be \(R=111, h\)"),
        (dict(d_b=np.ones((111, 19))), ValueError, r"d_b has shape \(111, 19\), but it must be \(R=111, h=20\)"),
        (dict(d_b=np.ones((111, 20), np.float32)), TypeError, "d_b has dtype float32"),
        (dict(d_a=np.full((111, 20), np.nan)), ValueError, r"d_a\[0, 0\] is nan"),
    ],
)
def test_bad_gradients(change, error, message):
    hidden = np.ones((DISPATCH.R, RAGGED.h))
    with pytest.raises(error, match=message):
        stage.input_gradient(**(dict(d_a=hidden, d_b=hidden, w1=W1, w2=W2, dispatch=DISPATCH) | change))


@pytest.mark.parametrize(
    ("d_hidden", "error", "message"),
    [
        (np.ones((110, 20)), ValueError, r"d_hidden has shape \(110, 20\), but it must be \(R=111, h\)"),
        (np.ones((111, 20), np.float32), TypeError, "d_hidden has dtype float32, but it must be float64"),
        (np.full((111, 20), np.nan), ValueError, r"d_hidden\[0, 0\] is nan"),
    ],
)
def test_bad_gradients_for_a_weight(d_hidden, error, message):
    with pytest.raises(error, match=message):
        stage.weight_gradient(d_hidden, X, DISPATCH)


@pytest.mark.parametrize(
    ("field", "change", "error", "message"),
    [
        ("expert_token_indices", lambda v: v + 1, ValueError, r"but there are only 37 tokens \(valid: 0..36\)"),
        ("token_expert_indices", lambda v: v - 5, ValueError, "but there are only 5 experts"),
        ("token_index_map", lambda v: v - 1, ValueError, r"is -1, but there are only 111 routed rows"),
        ("token_index_map", lambda v: v[:-1], ValueError, r"token_index_map has shape \(110,\)"),
        ("expert_token_offsets", lambda v: v[::-1].copy(), ValueError, r"expert_token_offsets\[0\] is 111"),
        ("expert_token_offsets", lambda v: v[[0, 2, 1, 3, 4, 5]], ValueError, "offsets never decrease"),
        ("expert_token_offsets", lambda v: v[:1], ValueError, "expert_token_offsets, is 0"),
        ("token_index_map", lambda v: v.astype(np.int64), TypeError, "token_index_map has dtype int64"),
        ("k", lambda v: 2, ValueError, "must be a multiple of k = 2"),
        ("k", lambda v: 0, ValueError, "dispatch.k is 0"),
    ],
)
def test_a_damaged_dispatch_is_refused(field, change, error, message):
    fields = DISPATCH.arrays() | {"k": DISPATCH.k}
    damaged = type(DISPATCH)(**(fields | {field: change(fields[field])}))
    with pytest.raises(error, match=message):
        stage.forward(X, W1, W2, damaged, "swiglu")
