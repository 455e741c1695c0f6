"""The combine: each token gathers its k expert outputs, weights them by its gates and sums them.

Sources: MoEBlaze (arXiv 2601.05296), section 3.1, for the reduction into (L, d); SonicMoE
(arXiv 2512.14080) for gather-and-sum instead of a scatter, which needs no atomics.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.core import checks, stage_contracts


def forward(y, gates, dispatch):
    """The layer's output: the gate-weighted sum of each token's expert outputs.

    Parameters
    ----------
    y : ndarray (R, d), float64 or float32
        Expert outputs in expert order, finite.
    gates : ndarray (L, k)
        The dtype of ``y``.
    dispatch : Dispatch

    Returns
    -------
    out : ndarray (L, d)
        Summed in the order j = 0, ..., k - 1: always the same bits.

    Raises
    ------
    ValueError
        If shapes disagree or a value is not finite.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.
    """
    stage_contracts.check_combine(y, gates, dispatch, DTYPES)
    out = np.zeros((dispatch.L, y.shape[1]), dtype=y.dtype)  # (L, d)
    positions = dispatch.token_index_map.reshape(gates.shape)  # (L, k) into the expert order
    for j in range(dispatch.k):
        out += gates[:, j, None] * y[positions[:, j]]
    return out


def backward(d_out, y, gates, dispatch):
    """Gradients of the expert outputs and the gates, the textbook way: it needs y kept.

    The layer does without: ``expert_down.hidden_gradients`` finds the same gate gradients from y_swi
    and never writes the (R, d) gradient that this function returns.

    Parameters
    ----------
    d_out : ndarray (L, d)
    y, gates, dispatch
        As they went into `forward`.

    Returns
    -------
    d_y : ndarray (R, d)
        gate * d_out of the row's token, in expert order.
    d_gates : ndarray (L, k)
        <d_out, y> per slot.

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_combine(y, gates, dispatch, DTYPES)
    checks.check_tensor("d_out", d_out, {"L": dispatch.L, "d": y.shape[1]}, (str(y.dtype),))
    d_y = np.empty_like(y)  # (R, d)
    d_gates = np.empty_like(gates)  # (L, k)
    positions = dispatch.token_index_map.reshape(gates.shape)  # (L, k) into the expert order
    for j in range(dispatch.k):
        d_y[positions[:, j]] = gates[:, j, None] * d_out
        d_gates[:, j] = (d_out * y[positions[:, j]]).sum(axis=1)
    return d_y, d_gates
