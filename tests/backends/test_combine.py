"""The gate-weighted sum of each token's expert outputs, against a loop over slots and autograd; its checks."""

import numpy as np
import pytest
import torch
from helpers import RAGGED, SHAPES

from moeblaze_ref.backends.numpy_ref import combine as stage
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.verify.cases import relative_error


def make_inputs(shape):
    """y, gates and the Dispatch of a random choice with the shape's routing."""
    rng = np.random.default_rng(4)
    dispatch = build_by_sort(shape.topk_experts(), shape.E)
    y, gates = rng.standard_normal((dispatch.R, shape.d)), rng.uniform(0.1, 1.0, (shape.L, shape.k))
    return y, gates, dispatch


def token_and_gate(gates, dispatch):
    """The token (R,) and the gate (R,) of every row in expert order, found by walking the experts' groups."""
    tokens, row_gates = [], []
    for position, token in enumerate(dispatch.expert_token_indices):
        expert = np.searchsorted(dispatch.expert_token_offsets, position, side="right") - 1
        chosen = dispatch.token_expert_indices[token * dispatch.k : (token + 1) * dispatch.k]
        tokens.append(token)
        row_gates.append(gates[token, np.flatnonzero(chosen == expert)[0]])
    return np.array(tokens), np.array(row_gates)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_sums_every_row_into_its_token(shape):
    y, gates, dispatch = make_inputs(shape)
    truth = np.zeros((shape.L, shape.d))
    tokens, row_gates = token_and_gate(gates, dispatch)
    np.add.at(truth, tokens, row_gates[:, None] * y)
    assert relative_error(stage.forward(y, gates, dispatch), truth) < 1e-14


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_agrees_with_autograd(shape):
    y, gates, dispatch = make_inputs(shape)
    d_out = np.random.default_rng(5).standard_normal((shape.L, shape.d))
    ty, tgates = (torch.tensor(t, requires_grad=True) for t in (y, gates))
    slots = torch.tensor(dispatch.token_index_map.reshape(gates.shape)).long()
    (tgates[..., None] * ty[slots]).sum(dim=1).backward(torch.tensor(d_out))
    d_y, d_gates = stage.backward(d_out, y, gates, dispatch)
    assert relative_error(d_y, ty.grad) < 1e-14
    assert relative_error(d_gates, tgates.grad) < 1e-14


def test_float32_stays_float32_and_near():
    y, gates, dispatch = make_inputs(RAGGED)
    narrow = y.astype(np.float32), gates.astype(np.float32)
    truth = stage.forward(*(t.astype(np.float64) for t in narrow), dispatch)
    out = stage.forward(*narrow, dispatch)
    assert out.dtype == np.float32 and relative_error(out, truth) < 1e-6


def test_no_tokens():
    y, gates, dispatch = make_inputs(RAGGED._replace(L=0))
    out = stage.forward(y, gates, dispatch)
    assert out.shape == (0, RAGGED.d)
    assert [gradient.shape for gradient in stage.backward(out, y, gates, dispatch)] == [y.shape, gates.shape]


Y, GATES, DISPATCH = make_inputs(RAGGED)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(y=Y[:-1]), ValueError, r"y has shape \(110, 12\), but it must be \(R=111, d\)"),
        (dict(y=np.full_like(Y, np.nan)), ValueError, r"y\[0, 0\] is nan"),
        (dict(y=Y.astype(np.float16)), TypeError, "y has dtype float16"),
        (dict(y=Y[:, 0]), ValueError, "must have 2 dimensions"),
        (dict(gates=GATES[:, :2]), ValueError, r"gates has shape \(37, 2\), but it must be \(L=37, k=3\)"),
        (dict(gates=GATES.astype(np.float32)), TypeError, "gates has dtype float32, but it must be float64"),
        (dict(gates=np.full_like(GATES, np.inf)), ValueError, r"gates\[0, 0\] is inf"),
        (dict(dispatch="sorted"), TypeError, "dispatch is a str, but it must be a Dispatch"),
    ],
)
def test_bad_input(change, error, message):
    operands = dict(y=Y, gates=GATES, dispatch=DISPATCH) | change
    with pytest.raises(error, match=message):
        stage.forward(**operands)
    with pytest.raises(error, match=message):
        stage.backward(np.ones((RAGGED.L, RAGGED.d)), **operands)


def test_bad_output_gradient():
    with pytest.raises(ValueError, match=r"d_out has shape \(36, 12\), but it must be \(L=37, d=12\)"):
        stage.backward(np.ones((36, 12)), Y, GATES, DISPATCH)
    with pytest.raises(ValueError, match=r"d_out\[0, 0\] is nan"):
        stage.backward(np.full((37, 12), np.nan), Y, GATES, DISPATCH)
