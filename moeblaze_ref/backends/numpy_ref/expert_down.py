"""The down-projection: the hidden rows times each expert's w3, and its backward without a kept output.

Sources: MoEBlaze (arXiv 2601.05296), sections 3.2 and 5, for the gathered output gradient;
SonicMoE (arXiv 2512.14080) for the gate's gradient from <dOut W3^T, Y_swi>, which needs no
saved expert output.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref.dispatch import expert_groups
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements


@implements(stage_contracts.EXPERT_DOWN, ARRAYS)
def forward(y_swi, w3, dispatch):
    y = np.empty((dispatch.R, w3.shape[2]), dtype=y_swi.dtype)  # (R, d)
    for expert, group, _ in expert_groups(dispatch):
        y[group] = y_swi[group] @ w3[expert]
    return y


@implements(stage_contracts.EXPERT_DOWN_SUMMED, ARRAYS)
def summed_forward(y_swi, w3, gates, dispatch):
    """A token's rows are added in the order of its experts; `combine.forward` adds them in the order of the slots."""
    gate = gate_of_row(gates, dispatch)  # (R, 1)
    out = np.zeros((dispatch.L, w3.shape[2]), dtype=y_swi.dtype)  # (L, d)
    for expert, group, tokens in expert_groups(dispatch):
        out[tokens] += gate[group] * (y_swi[group] @ w3[expert])
    return out


def gate_of_row(gates, dispatch):
    """The gates in expert order, (R, 1)."""
    gate = np.empty((dispatch.R, 1), dtype=gates.dtype)
    gate[dispatch.token_index_map] = gates.reshape(-1, 1)
    return gate


@implements(stage_contracts.EXPERT_DOWN_D_HIDDEN, ARRAYS)
def hidden_gradients(d_out, gates, a, b, w3, dispatch, activation, y_swi=None, overwrite=False):
    if y_swi is None:
        y_swi = activation_stage.forward.unchecked(a, b, activation)  # (R, h)
    gate = gate_of_row(gates, dispatch)  # (R, 1)
    d_ungated = np.empty_like(a)  # (R, h), dY'
    for expert, group, tokens in expert_groups(dispatch):
        d_ungated[group] = d_out[tokens] @ w3[expert].T
    d_gate = (d_ungated * y_swi).sum(axis=1)  # (R,), in expert order
    d_a, d_b = activation_stage.backward.unchecked(gate * d_ungated, a, b, activation)
    if overwrite:
        d_a, d_b = _written_over(a, d_a), _written_over(b, d_b)
    return d_a, d_b, gate * y_swi, d_gate[dispatch.token_index_map].reshape(gates.shape)


def _written_over(array, gradient):
    if array is not None:
        array[...] = gradient
    return array


@implements(stage_contracts.EXPERT_DOWN_D_W3, ARRAYS)
def weight_gradient(gated_y, d_out, dispatch):
    d_w3 = np.empty((dispatch.E, gated_y.shape[1], d_out.shape[1]), dtype=gated_y.dtype)  # (E, h, d)
    for expert, group, tokens in expert_groups(dispatch):
        d_w3[expert] = gated_y[group].T @ d_out[tokens]
    return d_w3
