"""Experts with biases, whose weights lie as a model stores them: the specification of `nn.experts` there.

Sources: gpt-oss in transformers 5.23 for the biases; MoEBlaze (arXiv 2601.05296), sections 3.2 and 5, and SonicMoE
(arXiv 2512.14080) for the backward, which needs no kept expert output: an expert's output is y + bias, so a gate's
gradient is <d_out, y> + <d_out, bias>, and y is not needed for either.
"""

from typing import NamedTuple

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref import combine, expert_down
from moeblaze_ref.backends.numpy_ref.dispatch import expert_groups
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.layouts import Layout
from moeblaze_ref.core.structures import Dispatch


class Parameters(NamedTuple):
    """Weights and biases, or their gradients, as a layout stores them; a bias may be None."""

    gate_up: np.ndarray  # in the shape of the layout, as is down
    down: np.ndarray
    gate_up_bias: np.ndarray | None  # (E, G h), in the order of gate_up's columns
    down_bias: np.ndarray | None  # (E, d)


class Gradients(NamedTuple):
    """Gradients that `backward` returns."""

    d_x: np.ndarray  # (L, d)
    parameters: Parameters
    d_gates: np.ndarray  # (L, k)


def forward(
    x: np.ndarray, weights: Parameters, dispatch: Dispatch, gates: np.ndarray, activation: str, layout: Layout
) -> np.ndarray:
    """Return the sums (L, d) of gate * (y + bias) over each token's experts.

    Parameters
    ----------
    x : array (L, d)
    weights : Parameters
    dispatch : Dispatch
    gates : array (L, k)
    activation : str
        One of ``config.EXPERT_ACTIVATIONS``.
    layout : Layout
    """
    y = np.empty((dispatch.R, x.shape[1]), x.dtype)  # (R, d)
    w3 = _along_depth(weights.down, layout)  # (E, h, d)
    for expert, group, tokens in expert_groups(dispatch):
        a, b = _projections(x[tokens], weights, expert, activation, layout)
        y[group] = activation_stage.forward.unchecked(a, b, activation) @ w3[expert]
        if weights.down_bias is not None:
            y[group] += weights.down_bias[expert]
    return combine.forward.unchecked(y, gates, dispatch)


def backward(
    d_out: np.ndarray,
    x: np.ndarray,
    weights: Parameters,
    dispatch: Dispatch,
    gates: np.ndarray,
    activation: str,
    layout: Layout,
) -> Gradients:
    """Return every gradient for d_out (L, d); the other arguments are those of `forward`.

    Experts without rows have gradients of 0.
    """
    found = _zeros_like(weights)
    d_x, d_gate = np.zeros_like(x), np.empty(dispatch.R, gates.dtype)
    gate_of_row = expert_down.gate_of_row(gates, dispatch)  # (R, 1)
    w3, d_w3 = _along_depth(weights.down, layout), _along_depth(found.down, layout)
    for expert, group, tokens in expert_groups(dispatch):
        a, b = _projections(x[tokens], weights, expert, activation, layout)
        y_swi, gate = activation_stage.forward.unchecked(a, b, activation), gate_of_row[group]
        d_ungated = d_out[tokens] @ w3[expert].T  # (rows, h)
        d_gate[group] = (d_ungated * y_swi).sum(axis=1)
        if weights.down_bias is not None and found.down_bias is not None:
            d_gate[group] += d_out[tokens] @ weights.down_bias[expert]
            found.down_bias[expert] = (gate * d_out[tokens]).sum(axis=0)
        d_w3[expert] = (gate * y_swi).T @ d_out[tokens]
        d_hidden = activation_stage.backward.unchecked(gate * d_ungated, a, b, activation)
        d_x[tokens] += _up_gradients(d_hidden, x[tokens], weights, found, expert, activation, layout)
    return Gradients(d_x, found, d_gate[dispatch.token_index_map].reshape(gates.shape))


def _zeros_like(weights: Parameters) -> Parameters:
    biases = [None if bias is None else np.zeros_like(bias) for bias in (weights.gate_up_bias, weights.down_bias)]
    return Parameters(np.zeros_like(weights.gate_up), np.zeros_like(weights.down), *biases)


def _up_gradients(d_hidden, rows, weights, found, expert, activation, layout):
    """Fill the gradients of an expert's up-projections; return those of its rows (rows, d)."""
    d_rows = np.zeros_like(rows)
    pairs = zip(_up(weights.gate_up, activation, layout), _up(found.gate_up, activation, layout), strict=True)
    for (w, d_w), d in zip(pairs, d_hidden, strict=False):  # an ungated activation has no d_b
        d_w[expert] = rows.T @ d
        d_rows += d @ w[expert].T
    if weights.gate_up_bias is not None:
        for d_bias, d in zip(_up_bias(found.gate_up_bias, activation, layout), d_hidden, strict=False):
            d_bias[expert] = d.sum(axis=0)
    return d_rows


def _projections(rows, weights, expert, activation, layout):
    """a and b (rows, h) of an expert's rows; b is None for the ungated activations."""
    found = [rows @ w[expert] for w in _up(weights.gate_up, activation, layout)]
    if weights.gate_up_bias is not None:
        biases = _up_bias(weights.gate_up_bias, activation, layout)
        found = [sums + bias[expert] for sums, bias in zip(found, biases, strict=True)]
    return found if len(found) == 2 else (found[0], None)


def _up(gate_up, activation, layout):
    """w1 and w2, or w1 alone: views (E, d, h)."""
    stored = layout.stored(gate_up) if is_gated(activation) else (gate_up,)
    return [_along_depth(w, layout) for w in stored]


def _up_bias(bias, activation, layout):
    """The biases of a and b: views (E, h). A bias is the weight of an input that is 1."""
    matrix = bias[:, :, None] if layout.transposed else bias[:, None, :]
    return [w[:, 0] for w in _up(matrix, activation, layout)]


def _along_depth(w, layout):
    """A weight with the depth of its product first: a view."""
    return w.swapaxes(1, 2) if layout.transposed else w
