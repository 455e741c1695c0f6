"""The down-projection: the hidden rows times each expert's w3, and its backward without a kept output.

Sources: MoEBlaze (arXiv 2601.05296), sections 3.2 and 5, for the gathered output gradient;
SonicMoE (arXiv 2512.14080) for the gate's gradient from <dOut W3^T, Y_swi>, which needs no
saved expert output.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref.dispatch import expert_groups
from moeblaze_ref.core import stage_contracts


def forward(y_swi, w3, dispatch):
    """Every routed row's expert output, not yet weighted by its gate, in expert order.

    Parameters
    ----------
    y_swi : ndarray (R, h), float64 or float32
        Hidden activations in expert order, finite.
    w3 : ndarray (E, h, d)
    dispatch : Dispatch

    Returns
    -------
    y : ndarray (R, d)

    Raises
    ------
    ValueError
        If shapes disagree or a value is not finite.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.

    Notes
    -----
    MoEBlaze, section 5: Y_swi W3. The sum into (L, d) is the combine stage.
    """
    stage_contracts.check_expert_down_forward(y_swi, w3, dispatch, DTYPES)
    y = np.empty((dispatch.R, w3.shape[2]), dtype=y_swi.dtype)  # (R, d)
    for expert, group, _ in expert_groups(dispatch):
        y[group] = y_swi[group] @ w3[expert]
    return y


def summed_forward(y_swi, w3, gates, dispatch):
    """The layer's output with the sum over a token's experts fused into the product, as the paper prints it.

    Parameters
    ----------
    y_swi : ndarray (R, h), float64 or float32
        Hidden activations in expert order, finite.
    w3 : ndarray (E, h, d)
    gates : ndarray (L, k)
        The dtype of ``y_swi``.
    dispatch : Dispatch

    Returns
    -------
    out : ndarray (L, d)
        A token's rows are added in the order of its experts; `combine.forward` adds them in the order of the slots.

    Raises
    ------
    ValueError
        If shapes disagree or a value is not finite.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.

    Notes
    -----
    MoEBlaze, section 3.1: no array of size (R, d) exists. A token has at most one row of an expert.
    """
    stage_contracts.check_expert_down_output(y_swi, w3, gates, dispatch, DTYPES, (str(y_swi.dtype),))
    gate = _gate_of_row(gates, dispatch)  # (R, 1)
    out = np.zeros((dispatch.L, w3.shape[2]), dtype=y_swi.dtype)  # (L, d)
    for expert, group, tokens in expert_groups(dispatch):
        out[tokens] += gate[group] * (y_swi[group] @ w3[expert])
    return out


def _gate_of_row(gates, dispatch):
    """The gates in expert order, (R, 1)."""
    gate = np.empty((dispatch.R, 1), dtype=gates.dtype)
    gate[dispatch.token_index_map] = gates.reshape(-1, 1)
    return gate


def hidden_gradients(d_out, gates, a, b, w3, dispatch, activation, y_swi=None, overwrite=False):
    """From the layer's output gradient (L, d) back through gates, w3 and the activation.

    Parameters
    ----------
    d_out : ndarray (L, d)
        Gradient of the layer's output; gathered by index, never expanded to (R, d).
    gates : ndarray (L, k)
    a : ndarray (R, h), float64 or float32
        Of relu y_swi may take its place, with the same results.
    b : ndarray (R, h) or None
        None exactly for the ungated activations.
    w3 : ndarray (E, h, d)
    dispatch : Dispatch
    activation : str
        One of ``config.ACTIVATIONS``.
    y_swi : ndarray (R, h), optional
        The hidden activations if they were kept; rebuilt from a and b if not.
    overwrite : bool
        Write d_a and d_b over a and b, which must be writable, and return those arrays.

    Returns
    -------
    d_a : ndarray (R, h)
    d_b : ndarray (R, h) or None
        None for the ungated activations.
    gated_y : ndarray (R, h)
        gate * y_swi, which `weight_gradient` takes.
    d_gates : ndarray (L, k)

    Raises
    ------
    ValueError
        If shapes disagree, a value is not finite, the activation is unknown, b is missing or superfluous, or an array
        to write over is read-only.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.

    Notes
    -----
    With dY' = dOut_gathered W3^T, SonicMoE's dA': dgate = <dY', Y_swi> per row, dY_swi = gate * dY' (MoEBlaze,
    section 5; SonicMoE for dgate and the operand gate * Y_swi of dW3).
    """
    operands = d_out, gates, a, b, y_swi, w3, dispatch, activation
    stage_contracts.check_expert_down_hidden_gradients(*operands, overwrite, DTYPES)
    if y_swi is None:
        y_swi = activation_stage.forward(a, b, activation)  # (R, h)
    gate = _gate_of_row(gates, dispatch)  # (R, 1)
    d_ungated = np.empty_like(a)  # (R, h), dY'
    for expert, group, tokens in expert_groups(dispatch):
        d_ungated[group] = d_out[tokens] @ w3[expert].T
    d_gate = (d_ungated * y_swi).sum(axis=1)  # (R,), in expert order
    d_a, d_b = activation_stage.backward(gate * d_ungated, a, b, activation)
    if overwrite:
        d_a, d_b = _written_over(a, d_a), _written_over(b, d_b)
    return d_a, d_b, gate * y_swi, d_gate[dispatch.token_index_map].reshape(gates.shape)


def _written_over(array, gradient):
    if array is not None:
        array[...] = gradient
    return array


def weight_gradient(gated_y, d_out, dispatch):
    """Gradient of w3; d_out is gathered again.

    Parameters
    ----------
    gated_y : ndarray (R, h), float64 or float32
        gate * y_swi in expert order, from `hidden_gradients`.
    d_out : ndarray (L, d)
        Gradient of the layer's output.
    dispatch : Dispatch

    Returns
    -------
    d_w3 : ndarray (E, h, d)
        Zeros for an expert without rows.

    Raises
    ------
    ValueError, TypeError
        As `forward`.

    Notes
    -----
    MoEBlaze, section 5: dW3 = (gate * Y_swi)^T dOut_gathered.
    """
    stage_contracts.check_expert_down_weight_gradient(gated_y, d_out, dispatch, DTYPES)
    d_w3 = np.empty((dispatch.E, gated_y.shape[1], d_out.shape[1]), dtype=gated_y.dtype)  # (E, h, d)
    for expert, group, tokens in expert_groups(dispatch):
        d_w3[expert] = gated_y[group].T @ d_out[tokens]
    return d_w3
