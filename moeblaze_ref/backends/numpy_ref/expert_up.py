"""The up-projection: rows of x, gathered by index, times each expert's w1 and w2.

Source: MoEBlaze (arXiv 2601.05296), sections 3.1 (no buffer of routed inputs), 3.2 (the k
gradients of a token are summed on the fly) and 5 (one pass over x for both GEMMs).
A numpy product needs its rows together, so one expert's rows are gathered at a time; a
kernel gathers one tile at a time. Neither holds the (R, d) buffer.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref.dispatch import expert_groups
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import HIDDEN, only


@implements(stage_contracts.EXPERT_UP, ARRAYS)
def forward(x, w1, w2, dispatch, activation, stores=HIDDEN):
    a = np.empty((dispatch.R, w1.shape[2]), dtype=x.dtype)  # (R, h)
    b = None if w2 is None else np.empty_like(a)  # (R, h)
    for expert, group, tokens in expert_groups(dispatch):
        rows = x[tokens]  # (rows, d)
        a[group] = rows @ w1[expert]
        if b is not None:
            b[group] = rows @ w2[expert]
    return only(stores, a, b, activation_stage.forward.unchecked(a, b, activation))


@implements(stage_contracts.EXPERT_UP_D_X, ARRAYS)
def input_gradient(d_a, d_b, w1, w2, dispatch):
    """Rows are summed over the experts of a token in ascending expert id: always the same bits."""
    d_x = np.zeros((dispatch.L, w1.shape[1]), dtype=d_a.dtype)  # (L, d)
    for expert, group, tokens in expert_groups(dispatch):
        d_rows = d_a[group] @ w1[expert].T  # (rows, d)
        if w2 is not None:
            d_rows += d_b[group] @ w2[expert].T
        d_x[tokens] += d_rows  # an expert names a token once, so no row is added to twice
    return d_x


@implements(stage_contracts.EXPERT_UP_D_W, ARRAYS)
def weight_gradient(d_hidden, x, dispatch):
    d_w = np.empty((dispatch.E, x.shape[1], d_hidden.shape[1]), dtype=x.dtype)  # (E, d, h)
    for expert, group, tokens in expert_groups(dispatch):
        d_w[expert] = x[tokens].T @ d_hidden[group]
    return d_w
