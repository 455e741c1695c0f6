"""Fixed expert capacity: every expert has C rows, so all experts multiply as one batch, and what finds no row is lost.

Sources: GShard (arXiv 2006.16668), section 2.2 and algorithm 1; Switch Transformer (arXiv 2101.03961), section 2.2.
It is what MegaBlocks (arXiv 2211.15841), section 2, sets out to remove: rows over C are dropped, rows below it padded.

`fill` decides who has which row; the rest moves rows, multiplies them, and never asks why a row is empty.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import EMPTY, CapacityBins
from moeblaze_ref.systems import capacity as shared
from moeblaze_ref.systems.megablocks import Gradients

# Who has which row ----------------------------------------------------------------------------------------------------

# All slots of the gates (L, k), those with the better claim first; slot (token, j) is number token * k + j.
_CLAIMS = {
    "by_gate": lambda gates: np.argsort(-gates, axis=None, kind="stable"),
    "by_arrival": lambda gates: np.arange(gates.size).reshape(gates.shape).ravel(order="F"),
}
assert _CLAIMS.keys() == shared.DROP_POLICIES.keys()


def fill(dispatch, gates, capacity, drop_policy="by_gate"):
    """Bins of C rows each: which slots every expert keeps, and where.

    Parameters
    ----------
    dispatch : Dispatch
    gates : ndarray (L, k), float64 or float32
        By which ``by_gate`` ranks, as the layer weighs with them: renormalised, if its gates are.
    capacity : int
        C, rows of an expert.
    drop_policy : str
        One of ``capacity.DROP_POLICIES``.

    Returns
    -------
    CapacityBins
        The rows of an expert go to the C best claims on it, in their order; the others are dropped.

    Raises
    ------
    ValueError
        If shapes disagree, a gate is not finite, capacity is negative, E * C exceeds 2**31 - 1024, or the policy is
        unknown.
    TypeError
        If a dtype is not allowed, dispatch is no Dispatch, or capacity is no integer.

    Notes
    -----
    ``by_arrival`` is GShard's algorithm 1 for any k, without its coin for the second expert: one pass over the first
    choices of all tokens, then one over the second choices, ...; for k = 1 it is Switch Transformer's. ``by_gate``
    ranks the rows of each expert by themselves; V-MoE (arXiv 2106.05974), section 4, ranks whole tokens instead.
    """
    shared.check_fill(dispatch, gates, capacity, drop_policy, DTYPES)
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
    """What found no row."""

    slots: int  # routed rows that are lost
    tokens: int  # tokens that lost all of their k slots, so that out is zero
    of_experts: np.ndarray  # (E,) int64, slots by the expert that had no row for them


def dropped(bins, dispatch):
    """How many slots and whole tokens are lost, and by which experts.

    Parameters
    ----------
    bins : CapacityBins
    dispatch : Dispatch
        From which `fill` made the bins.

    Returns
    -------
    Dropped

    Raises
    ------
    ValueError, TypeError
        As `checks.check_dispatch` and ``capacity.check_bins``, or if the two do not belong together.
    """
    checks.check_dispatch(dispatch)
    shared.check_bins(bins)
    shared.check_same_sizes(bins, dispatch)
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


def gather(x, bins, gates=None):
    """Rows of x copied into the bins, times their gates if there are any; padding is zero.

    Parameters
    ----------
    x : ndarray (L, d), float64 or float32
    bins : CapacityBins
    gates : ndarray (L, k), optional

    Returns
    -------
    rows : ndarray (E, C, d)

    Raises
    ------
    ValueError, TypeError
        As ``capacity.check_gather``.

    Notes
    -----
    GShard, section 2.2: the dispatch, there a product with a one-hot mask (L, E, C). With gates it is the gradient of
    `scatter` by y.
    """
    shared.check_gather(x, bins, gates, DTYPES)
    rows = _take(x, bins.slots // bins.k)  # (E, C, d); EMPTY is its own quotient
    return rows if gates is None else rows * _take(gates.reshape(-1, 1), bins.slots)


def scatter(y, bins, gates=None):
    """Each token's sum of its rows in the bins, times its gates if there are any; a dropped slot adds nothing.

    Parameters
    ----------
    y : ndarray (E, C, d), float64 or float32
    bins : CapacityBins
    gates : ndarray (L, k), optional

    Returns
    -------
    out : ndarray (L, d)
        Summed in the order j = 0, ..., k - 1: always the same bits. Zero for a token whose slots are all dropped.

    Raises
    ------
    ValueError, TypeError
        As ``capacity.check_scatter``.

    Notes
    -----
    GShard, section 2.2: the combine. Without gates it is the gradient of `gather`.
    """
    shared.check_scatter(y, bins, gates, DTYPES)
    rows = y.reshape(-1, y.shape[2])  # (E C, d)
    out = np.zeros((bins.L, y.shape[2]), y.dtype)  # (L, d)
    for j, index in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        taken = _take(rows, index)  # (L, d)
        out += taken if gates is None else gates[:, j, None] * taken
    return out


def gate_gradient(d_out, y, bins):
    """Gradient of the gates: <d_out, y> of each slot, 0 where it is dropped.

    Parameters
    ----------
    d_out : ndarray (L, d)
    y : ndarray (E, C, d)
        As it went into `scatter`.
    bins : CapacityBins

    Returns
    -------
    d_gates : ndarray (L, k)

    Raises
    ------
    ValueError, TypeError
        As ``capacity.check_gate_gradient``.
    """
    shared.check_gate_gradient(d_out, y, bins, DTYPES)
    rows = y.reshape(-1, y.shape[2])  # (E C, d)
    d_gates = np.empty((bins.L, bins.k), y.dtype)  # (L, k)
    for j, index in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        d_gates[:, j] = (d_out * _take(rows, index)).sum(axis=1)
    return d_gates


# The layer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward keeps for the backward: no weights.

    Parameters
    ----------
    bins : CapacityBins
    gates : ndarray (L, k)
    x_rows : ndarray (E, C, d)
        Rows of x in the bins.
    a, b, y_swi : ndarray (E, C, h)
        What lies between the projections, padding included; b is None for the ungated activations.
    y : ndarray (E, C, d)
        The experts' outputs, for the gradient of the gates.
    activation : str
    """

    bins: CapacityBins
    gates: np.ndarray
    x_rows: np.ndarray
    a: np.ndarray
    b: np.ndarray | None
    y_swi: np.ndarray
    y: np.ndarray
    activation: str

    def tensors(self) -> dict[str, np.ndarray]:
        """Every array that is kept, by name."""
        floats = {name: getattr(self, name) for name in ("gates", "x_rows", "a", "b", "y_swi", "y")}
        return self.bins.arrays() | {name: array for name, array in floats.items() if array is not None}


def forward(
    x, w1, w2, w3, dispatch, gates, activation, capacity_factor=shared.DEFAULT_FACTOR, drop_policy="by_gate"
) -> tuple[np.ndarray, Saved]:
    """Every token through those of its experts that have a row for it.

    Parameters
    ----------
    x : ndarray (L, d), float64 or float32
        Tokens, finite; L = 0 is valid.
    w1 : ndarray (E, d, h)
    w2 : ndarray (E, d, h) or None
        None exactly for the ungated activations.
    w3 : ndarray (E, h, d)
    dispatch : Dispatch
        Of these L tokens over these E experts.
    gates : ndarray (L, k)
    activation : str
        One of ``config.ACTIVATIONS``.
    capacity_factor : float or str
        C as a multiple of L * k / E; E / k drops nothing, whatever the routing. With "max", C is the most rows of any
        expert.
    drop_policy : str
        One of ``capacity.DROP_POLICIES``.

    Returns
    -------
    out : ndarray (L, d)
        A dropped slot adds nothing, and the gates of a token's other slots stay as they are: with renormalised gates,
        those of a token that lost a slot no longer sum to one.
    saved : Saved

    Raises
    ------
    ValueError
        If shapes disagree, the factor is not a finite number above 0, E * C exceeds 2**31 - 1024, a value is not
        finite, a name is unknown, or w2 is missing or superfluous.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.

    Notes
    -----
    GShard, algorithm 1, divides the gates by their sum before it drops, as here; some libraries divide after, which
    would give a token that lost a slot the full weight of the others.
    """
    stage_contracts.check_experts(x, w1, w2, w3, dispatch, gates, activation, DTYPES)
    shared.check_options(capacity_factor, drop_policy)
    capacity = shared.capacity_for(np.diff(dispatch.expert_token_offsets).tolist(), capacity_factor)
    shared.check_capacity(capacity, dispatch.E)
    with checks.trusted_values():
        bins = fill(dispatch, gates, capacity, drop_policy)
        x_rows = gather(x, bins)  # (E, C, d)
        a = x_rows @ w1  # (E, C, h)
        b = None if w2 is None else x_rows @ w2  # (E, C, h)
        y_swi = activation_stage.forward(*map(_as_rows, (a, b)), activation).reshape(a.shape)  # zero where x_rows is
        y = y_swi @ w3  # (E, C, d)
        out = scatter(y, bins, gates)
    return out, Saved(bins, gates, x_rows, a, b, y_swi, y, activation)


def backward(d_out, saved, w1, w2, w3) -> Gradients:
    """Every gradient, from that of the output.

    Parameters
    ----------
    d_out : ndarray (L, d)
        Finite.
    saved : Saved
        From `forward`; it is not changed.
    w1, w2, w3
        As they went into `forward`.

    Returns
    -------
    Gradients
        A dropped slot gets and gives none: its gate's gradient is 0. Where the gates were renormalised, the router
        still hears of it through the sum that divides the others.

    Raises
    ------
    ValueError, TypeError
        If d_out or a weight is not finite, or does not fit what was saved.
    """
    checks.check_type("saved", saved, Saved)
    bins = saved.bins
    shared.check_backward(d_out, saved, w1, w2, w3)
    with checks.trusted_values():
        d_gates = gate_gradient(d_out, saved.y, bins)
        d_y = gather(d_out, bins, saved.gates)  # (E, C, d)
        d_w3 = saved.y_swi.mT @ d_y  # (E, h, d)
        d_hidden = activation_stage.backward(*map(_as_rows, (d_y @ w3.mT, saved.a, saved.b)), saved.activation)
        d_a, d_b = (None if d is None else d.reshape(saved.a.shape) for d in d_hidden)  # (E, C, h) each
        d_w1, d_w2 = (None if d is None else saved.x_rows.mT @ d for d in (d_a, d_b))  # (E, d, h) each
        d_rows = d_a @ w1.mT  # (E, C, d)
        if d_b is not None:
            d_rows += d_b @ w2.mT
        d_x = scatter(d_rows, bins)
    return Gradients(d_x, d_w1, d_w2, d_w3, d_gates)


def _as_rows(values):
    """(E, C, h) as (E C, h): the activation does not ask whose rows these are."""
    return None if values is None else values.reshape(-1, values.shape[-1])
