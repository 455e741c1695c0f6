"""The up-projection: rows of x, gathered by index, times each expert's w1 and w2.

Source: MoEBlaze (arXiv 2601.05296), sections 3.1 (no buffer of routed inputs), 3.2 (the k
gradients of a token are summed on the fly) and 5 (one pass over x for both GEMMs).
A numpy product needs its rows together, so one expert's rows are gathered at a time; a
kernel gathers one tile at a time. Neither holds the (R, d) buffer.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref.dispatch import expert_groups
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.structures import HIDDEN, only


def forward(x, w1, w2, dispatch, activation, stores=HIDDEN):
    """Both projections of every routed row and its hidden activation, in expert order.

    Parameters
    ----------
    x : ndarray (L, d), float64 or float32
        Tokens, never permuted; finite.
    w1 : ndarray (E, d, h)
    w2 : ndarray (E, d, h) or None
        None exactly for the ungated activations.
    dispatch : Dispatch
        Of these L tokens over these E experts.
    activation : str
        One of ``config.ACTIVATIONS``.
    stores : collection of str
        Which of a (and b with it) and y_swi to return; the others are None.

    Returns
    -------
    a : ndarray (R, h)
        x w1.
    b : ndarray (R, h) or None
        x w2; None for the ungated activations.
    y_swi : ndarray (R, h)
        act(a) * b, or act(a).

    Raises
    ------
    ValueError
        If shapes disagree, a value is not finite, the activation is unknown, or w2 is missing or superfluous.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.

    Notes
    -----
    MoEBlaze, sections 3.1 and 5 (Algorithm 1).
    """
    stage_contracts.check_expert_up_forward(x, w1, w2, dispatch, activation, stores, DTYPES)
    gated = w2 is not None
    a = np.empty((dispatch.R, w1.shape[2]), dtype=x.dtype)  # (R, h)
    b = np.empty_like(a) if gated else None  # (R, h)
    for expert, group, tokens in expert_groups(dispatch):
        rows = x[tokens]  # (rows, d)
        a[group] = rows @ w1[expert]
        if gated:
            b[group] = rows @ w2[expert]
    return only(stores, a, b, activation_stage.forward(a, b, activation))


def input_gradient(d_a, d_b, w1, w2, dispatch):
    """Gradient of x; the k gradients of a token are summed as they arise.

    Parameters
    ----------
    d_a : ndarray (R, h), float64 or float32
        Gradient of a, in expert order, finite.
    d_b : ndarray (R, h) or None
        Gradient of b; None exactly if w2 is None.
    w1, w2, dispatch
        As they went into `forward`.

    Returns
    -------
    d_x : ndarray (L, d)
        Summed over the experts of a token in ascending expert id: always the same bits.

    Raises
    ------
    ValueError, TypeError
        As `forward`.

    Notes
    -----
    MoEBlaze, sections 3.2 and 5: dX = dA W1^T + dB W2^T.
    """
    stage_contracts.check_expert_up_input_gradient(d_a, d_b, w1, w2, dispatch, DTYPES)
    d_x = np.zeros((dispatch.L, w1.shape[1]), dtype=d_a.dtype)  # (L, d)
    for expert, group, tokens in expert_groups(dispatch):
        d_rows = d_a[group] @ w1[expert].T  # (rows, d)
        if w2 is not None:
            d_rows += d_b[group] @ w2[expert].T
        d_x[tokens] += d_rows  # an expert names a token once, so no row is added to twice
    return d_x


def weight_gradient(d_hidden, x, dispatch):
    """Gradient of w1 from that of a, or of w2 from that of b; x is gathered again.

    Parameters
    ----------
    d_hidden : ndarray (R, h), float64 or float32
        d_a or d_b, in expert order, finite.
    x, dispatch
        As they went into `forward`.

    Returns
    -------
    d_w : ndarray (E, d, h)
        d_w1 or d_w2; zeros for an expert without rows.

    Raises
    ------
    ValueError, TypeError
        As `forward`.

    Notes
    -----
    MoEBlaze, section 5: dW1 = X^T dA, dW2 = X^T dB. One call for each, so that d_a can be freed before d_w2 is born.
    """
    stage_contracts.check_expert_up_weight_gradient(d_hidden, x, dispatch, DTYPES)
    d_w = np.empty((dispatch.E, x.shape[1], d_hidden.shape[1]), dtype=x.dtype)  # (E, d, h)
    for expert, group, tokens in expert_groups(dispatch):
        d_w[expert] = x[tokens].T @ d_hidden[group]
    return d_w
