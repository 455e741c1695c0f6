"""Fixed expert capacity: every expert has C rows, so all experts multiply as one batch, and what finds no row is lost.

Sources: GShard (arXiv 2006.16668), section 2.2 and algorithm 1; Switch Transformer (arXiv 2101.03961), section 2.2.
It is what MegaBlocks (arXiv 2211.15841), section 2, sets out to remove: rows over C are dropped, rows below it padded.

`fill` decides who has which row; the rest moves rows, multiplies them, and never asks why a row is empty.
"""

from typing import NamedTuple

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import EMPTY, CapacityBins
from moeblaze_ref.systems import capacity as shared
from moeblaze_ref.systems.capacity import Saved
from moeblaze_ref.systems.megablocks import Gradients

# Who has which row ----------------------------------------------------------------------------------------------------

# All slots of the gates (L, k), those with the better claim first; slot (token, j) is number token * k + j.
_CLAIMS = {
    "by_gate": lambda gates: np.argsort(-gates, axis=None, kind="stable"),
    "by_arrival": lambda gates: np.arange(gates.size).reshape(gates.shape).ravel(order="F"),
}
assert _CLAIMS.keys() == shared.DROP_POLICIES.keys()


@implements(shared.FILL, ARRAYS)
def fill(dispatch, gates, capacity, drop_policy="by_gate"):
    claims = _CLAIMS[drop_policy](gates)  # (R,) slots
    experts, offsets = dispatch.token_expert_indices, dispatch.expert_token_offsets
    queues = claims[np.argsort(experts[claims], kind="stable")]  # (R,) slots by expert, the best claim first
    place = np.empty(dispatch.R, np.int32)  # (R,) of each slot in the queue of its expert
    place[queues] = np.arange(dispatch.R) - np.repeat(offsets[:-1], np.diff(offsets))
    kept = place < capacity
    rows = np.where(kept, experts * np.int32(capacity) + place, EMPTY).astype(np.int32)  # (R,)
    slots = np.full(dispatch.E * capacity, EMPTY, np.int32)  # (E C,)
    slots[rows[kept]] = kept.nonzero()[0]
    return CapacityBins(slots.reshape(dispatch.E, capacity), rows, dispatch.k)


class Dropped(NamedTuple):
    """Counts of slots and tokens that got no row."""

    slots: int  # routed rows that are lost
    tokens: int  # tokens that lost all of their k slots, so that out is zero
    of_experts: np.ndarray  # (E,) int64, slots by the expert that had no row for them


@implements(shared.DROPPED, ARRAYS)
def dropped(bins, dispatch):
    lost = (bins.rows == EMPTY).reshape(dispatch.L, dispatch.k)  # (L, k)
    losers = dispatch.token_expert_indices[lost.ravel()]  # one entry a dropped slot
    of_experts = np.bincount(losers, minlength=dispatch.E)
    return Dropped(int(lost.sum()), int(lost.all(axis=1).sum()), of_experts)


# Rows into bins and back ----------------------------------------------------------------------------------------------


def _take(matrix, index):
    """Rows of a matrix (n, d) by an index of any shape; zeros where it is ``EMPTY``."""
    rows = np.zeros((*index.shape, matrix.shape[1]), matrix.dtype)
    filled = index != EMPTY
    rows[filled] = matrix[index[filled]]
    return rows


@implements(shared.GATHER, ARRAYS)
def gather(x, bins, gates=None):
    rows = _take(x, bins.slots // bins.k)  # (E, C, d); EMPTY is its own quotient
    return rows if gates is None else rows * _take(gates.reshape(-1, 1), bins.slots)


@implements(shared.SCATTER, ARRAYS)
def scatter(y, bins, gates=None):
    """Rows are summed in the order j = 0, ..., k - 1: always the same bits."""
    rows = y.reshape(-1, y.shape[2])  # (E C, d)
    out = np.zeros((bins.L, y.shape[2]), y.dtype)  # (L, d)
    for j, index in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        taken = _take(rows, index)  # (L, d)
        out += taken if gates is None else gates[:, j, None] * taken
    return out


@implements(shared.GATE_GRADIENT, ARRAYS)
def gate_gradient(d_out, y, bins):
    rows = y.reshape(-1, y.shape[2])  # (E C, d)
    d_gates = np.empty((bins.L, bins.k), y.dtype)  # (L, k)
    for j, index in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        d_gates[:, j] = (d_out * _take(rows, index)).sum(axis=1)
    return d_gates


# The layer ------------------------------------------------------------------------------------------------------------


@implements(shared.FORWARD, ARRAYS)
def forward(
    x, w1, w2, w3, dispatch, gates, activation, capacity_factor=shared.DEFAULT_FACTOR, drop_policy="by_gate"
) -> tuple[np.ndarray, Saved]:
    capacity = shared.rows_reserved(dispatch, capacity_factor)
    bins = fill.unchecked(dispatch, gates, capacity, drop_policy)
    x_rows = gather.unchecked(x, bins)  # (E, C, d)
    a = x_rows @ w1  # (E, C, h)
    b = None if w2 is None else x_rows @ w2  # (E, C, h)
    y_swi = activation_stage.forward.unchecked(a, b, activation)  # (E, C, h), zero where x_rows is
    y = y_swi @ w3  # (E, C, d)
    out = scatter.unchecked(y, bins, gates)
    return out, Saved(bins, gates, x_rows, a, b, y_swi, y, activation)


@implements(shared.BACKWARD, ARRAYS)
def backward(d_out, saved, w1, w2, w3) -> Gradients:
    bins = saved.bins
    d_gates = gate_gradient.unchecked(d_out, saved.y, bins)
    d_y = gather.unchecked(d_out, bins, saved.gates)  # (E, C, d)
    d_w3 = saved.y_swi.mT @ d_y  # (E, h, d)
    d_a, d_b = activation_stage.backward.unchecked(d_y @ w3.mT, saved.a, saved.b, saved.activation)  # (E, C, h) each
    d_w1, d_w2 = (None if d is None else saved.x_rows.mT @ d for d in (d_a, d_b))  # (E, d, h) each
    d_rows = d_a @ w1.mT  # (E, C, d)
    if d_b is not None:
        d_rows += d_b @ w2.mT
    d_x = scatter.unchecked(d_rows, bins)
    return Gradients(d_x, d_w1, d_w2, d_w3, d_gates)
