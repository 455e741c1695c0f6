"""MegaBlocks' experts, forward and backward, over the block-sparse stage of any backend, and what is kept in between.

Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5: no token is dropped, and no expert is padded beyond its last
block. The stage does the work; this file says what follows what, and what survives from forward to backward:
the routed rows, the experts' outputs for the gradient of the gates, and everything between the two.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_ref.core import checks, sparse_contracts, stage_contracts
from moeblaze_ref.core.structures import Array, Dispatch, PaddedBins, Topology

FLOATS = ("gates", "x_rows", "a", "b", "y_swi", "y")  # what is kept besides indices


@dataclass(eq=False)
class Saved:
    """What the forward keeps for the backward: no weights.

    Parameters
    ----------
    bins : PaddedBins
    topology : Topology
    gates : array (L, k)
    x_rows : array (P, d)
        Rows of x in the bins.
    a, b, y_swi : array (nnz, block, block)
        What lies between the projections, padding included; b is None for the ungated activations. If y_swi is None,
        the backward computes it again from a and b.
    y : array (P, d)
        The experts' outputs, for the gradient of the gates.
    activation : str
    """

    bins: PaddedBins
    topology: Topology
    gates: Array
    x_rows: Array
    a: Array
    b: Array | None
    y_swi: Array | None
    y: Array
    activation: str

    def tensors(self) -> dict[str, Array]:
        """Every array that is kept, by name."""
        present = {name: array for name, array in self.floats().items() if array is not None}
        return self.bins.arrays() | self.topology.arrays() | present

    def floats(self) -> dict[str, Array | None]:
        """Those of ``FLOATS``, by name; b is None for the ungated activations, and what is not kept is None."""
        return {name: getattr(self, name) for name in FLOATS}

    def give_up(self):
        """Let go of all `floats`: whoever has taken them frees them."""
        for name in FLOATS:
            setattr(self, name, None)

    @classmethod
    def of(cls, tensors: Mapping[str, Array], k: int, block: int, activation: str) -> "Saved":
        """What `tensors` took apart, put together again."""
        floats = {name: tensors.get(name) for name in FLOATS}
        bins = PaddedBins.of(tensors, k=k, block=block)
        return cls(bins, Topology.of(tensors, block=block), **floats, activation=activation)


class Gradients(NamedTuple):
    """What the backward returns; None for what was not wanted."""

    d_x: Array | None  # (L, d), through the experts alone
    d_w1: Array | None  # (E, d, h)
    d_w2: Array | None  # (E, d, h); None for the ungated activations too
    d_w3: Array | None  # (E, h, d)
    d_gates: Array | None  # (L, k)


def forward(
    stage: Any,
    dtypes: tuple[str, ...],
    x: Array,
    w1: Array,
    w2: Array | None,
    w3: Array,
    dispatch: Dispatch,
    gates: Array,
    activation: str,
    block: int,
) -> tuple[Array, Saved]:
    """Every token through its experts: gather, SDD, activation, DSD, scatter.

    Parameters
    ----------
    stage : module
        The backend's ``block_sparse``, and ``dtypes``, the names of those that it computes in.
    x : array (L, d)
        Tokens, finite; L = 0 is valid.
    w1 : array (E, d, h)
    w2 : array (E, d, h) or None
        None exactly for the ungated activations.
    w3 : array (E, h, d)
    dispatch : Dispatch
        Of these L tokens over these E experts.
    gates : array (L, k)
    activation : str
        One of ``config.ACTIVATIONS``.
    block : int
        Rows and columns of a block; it divides h.

    Returns
    -------
    out : array (L, d)
    saved : Saved

    Raises
    ------
    ValueError
        If shapes disagree, the block size does not divide h, a value is not finite, the activation is unknown, or w2 is
        missing or superfluous.
    TypeError
        If a dtype is not allowed or dispatch is no Dispatch.

    Notes
    -----
    MegaBlocks, section 4.1, and its pseudo-code of a dropless MoE.
    """
    stage_contracts.check_experts(x, w1, w2, w3, dispatch, gates, activation, dtypes)
    _, d, h = w1.shape
    block = sparse_contracts.check_block(block, h)
    with checks.trusted_values():
        bins = stage.pad(dispatch, block)
        topology = stage.build_topology(bins, h)
        x_rows = stage.padded_gather(x, bins)  # (P, d)
        a = stage.sdd(x_rows, w1, topology)  # (nnz, block, block)
        b = None if w2 is None else stage.sdd(x_rows, w2, topology)
        y_swi = stage.activate(a, b, activation)
        y = stage.dsd(y_swi, topology, w3.reshape(-1, d))  # (P, d)
        out = stage.padded_scatter(y, bins, gates)
    return out, Saved(bins, topology, gates, x_rows, a, b, y_swi, y, activation)


def backward(
    stage: Any,
    dtypes: tuple[str, ...],
    d_out: Array,
    saved: Saved,
    w1: Array,
    w2: Array | None,
    w3: Array,
    wanted: Collection[str] = Gradients._fields,
    give_up: bool = False,
) -> Gradients:
    """Every gradient, from that of the output.

    Parameters
    ----------
    stage : module
        The backend's ``block_sparse``, and ``dtypes``, the names of those that it computes in.
    d_out : array (L, d)
        Finite.
    saved : Saved
        From `forward`; it is not changed, so a second backward gives the same again, unless ``give_up``.
    w1, w2, w3
        As they went into `forward`.
    wanted : collection of str
        Names in `Gradients`; the product that nobody wants is not computed.
    give_up : bool
        What ``saved`` holds besides indices is freed piece by piece: a second backward with it raises.

    Returns
    -------
    Gradients

    Raises
    ------
    ValueError, TypeError
        If d_out or a weight is not finite, or does not fit what was saved, or a wanted gradient is unknown.
    RuntimeError
        If an earlier backward has given up what ``saved`` held.

    Notes
    -----
    What dies where, if it is given up; a weight gradient is born at each ``->``:

    1. y gives d_gates, and dies; the gates weight d_y, and die.
    2. y_swi, kept or computed again, and d_y -> d_w3; y_swi dies. d_y gives d_y_swi, and dies.
    3. a and b give d_a and d_b, and die with d_y_swi.
    4. d_a, d_b -> d_x: (P, d) rows of each projection, which die within.
    5. x_rows, d_a -> d_w1; d_a dies. x_rows, d_b -> d_w2; both die.

    MegaBlocks, section 5.1: the backward needs SDD with a transposed dense operand, DSD of either transpose, and DDS.
    """
    _check_backward(dtypes, d_out, saved, w1, w2, w3, wanted)
    bins, topology, kept = saved.bins, saved.topology, saved.floats()
    if give_up:
        saved.give_up()

    def if_wanted(name, gradient, *operands, **options):
        return gradient(*operands, **options) if name in wanted else None

    def weight_gradient(d_values):
        return stage.dds(kept["x_rows"], d_values, topology, transpose_lhs=True, parts=bins.E)

    with checks.trusted_values():
        d_gates = if_wanted("d_gates", stage.gate_gradient, d_out, kept.pop("y"), bins)
        d_y = stage.padded_gather(d_out, bins, kept.pop("gates"))  # (P, d)
        y_swi = kept.pop("y_swi")
        if y_swi is None:
            y_swi = if_wanted("d_w3", stage.activate, kept["a"], kept["b"], saved.activation)
        d_w3 = if_wanted("d_w3", stage.dsd, y_swi, topology, d_y, transpose_lhs=True)  # (E h, d)
        del y_swi
        d_y_swi = stage.sdd(d_y, w3.reshape(-1, w3.shape[2]), topology, transpose_rhs=True)  # (nnz, block, block)
        del d_y
        d_a, d_b = stage.activate_backward(d_y_swi, kept.pop("a"), kept.pop("b"), saved.activation)
        del d_y_swi
        d_x = if_wanted("d_x", _input_gradient, stage, d_a, d_b, w1, w2, saved)
        d_w1 = if_wanted("d_w1", weight_gradient, d_a)
        del d_a
        d_w2 = None if d_b is None else if_wanted("d_w2", weight_gradient, d_b)
    return Gradients(d_x, d_w1, d_w2, None if d_w3 is None else d_w3.reshape(w3.shape), d_gates)


def _input_gradient(stage, d_a, d_b, w1, w2, saved):
    """d_x (L, d): the rows of both projections, summed."""
    d_rows = stage.dsd(d_a, saved.topology, w1, transpose_rhs=True)  # (P, d)
    if d_b is not None:
        d_rows += stage.dsd(d_b, saved.topology, w2, transpose_rhs=True)
    return stage.padded_scatter(d_rows, saved.bins)


@checks.unless_trusted
def _check_backward(dtypes, d_out, saved, w1, w2, w3, wanted):
    checks.check_type("saved", saved, Saved)
    if saved.x_rows is None:
        raise RuntimeError("an earlier backward has given up what the forward kept: run the forward again")
    for name in wanted:
        checks.check_name("gradient", name, Gradients._fields)
    checks.check_array("saved.x_rows", saved.x_rows, 2, dtypes)
    stage_contracts.check_experts_backward(d_out, w1, w2, w3, saved, saved.topology.shape[1] // saved.bins.E)
