"""MegaBlocks' experts, forward and backward, over the block-sparse stage of any backend, and what is kept in between.

Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5: no token is dropped, and no expert is padded beyond its last
block. The stage does the work; this file says what follows what, and what survives from forward to backward:
the routed rows, the experts' outputs for the gradient of the gates, and everything between the two.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moeblaze_ref.core import checks
from moeblaze_ref.core.contract import Arguments, Contract, Tensor, Value
from moeblaze_ref.core.sparse_contracts import EXPERTS, EXPERTS_BACKWARD, check_block, check_experts_backward, check_w2
from moeblaze_ref.core.stage_contracts import NO_GATE, Dtypes
from moeblaze_ref.core.structures import Array, Dispatch, PaddedBins, Topology

FLOATS = ("gates", "x_rows", "a", "b", "y_swi", "y")  # what is kept besides indices


@dataclass(eq=False)
class Saved:
    """Tensors that the forward saves for the backward: no weights.

    Parameters
    ----------
    bins : PaddedBins
    topology : Topology
    gates : array (L, k)
    x_rows : array (P, d)
        Rows of x in the bins.
    a, b, y_swi : array (nnz, block, block)
        The tensors between the projections, padding included; b is None for the ungated activations. If y_swi is None,
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
        """The tensors of ``FLOATS`` by name; b is None for ungated activations, and what is not kept is None."""
        return {name: getattr(self, name) for name in FLOATS}

    def release(self) -> None:
        """Drop the references to all `floats`, so that their last user frees them."""
        for name in FLOATS:
            setattr(self, name, None)

    @classmethod
    def of(cls, tensors: Mapping[str, Array], k: int, block: int, activation: str) -> "Saved":
        """The inverse of `tensors`."""
        floats: dict[str, Any] = {name: tensors.get(name) for name in FLOATS}
        bins = PaddedBins.of(tensors, k=k, block=block)
        return cls(bins, Topology.of(tensors, block=block), **floats, activation=activation)


class Gradients(NamedTuple):
    """Gradients from the backward; None for a gradient that was not wanted."""

    d_x: Array | None  # (L, d), through the experts alone
    d_w1: Array | None  # (E, d, h)
    d_w2: Array | None  # (E, d, h); None for the ungated activations too
    d_w3: Array | None  # (E, h, d)
    d_gates: Array | None  # (L, k)


class SparseStages(NamedTuple):
    """A backend's functions of the stage block_sparse, without their checks."""

    pad: Callable[..., PaddedBins]
    build_topology: Callable[..., Topology]
    padded_gather: Callable[..., Array]
    padded_scatter: Callable[..., Array]
    gate_gradient: Callable[..., Array]
    sdd: Callable[..., Array]
    dsd: Callable[..., Array]
    dds: Callable[..., Array]
    activate: Callable[..., Array]
    activate_backward: Callable[..., tuple[Array, Array | None]]


def _check_forward(given: Arguments) -> None:
    check_block(given["block"], given["w1"].shape[2])


def _check_backward(
    d_out: Array,
    saved: Saved,
    w1: Array,
    w2: Array | None,
    w3: Array,
    dtypes: Dtypes,
    wanted: Collection[str] = (),
    release: bool = False,
) -> None:
    checks.check_type("saved", saved, Saved)
    if saved.x_rows is None:
        return  # it has been released, as `backward` says
    for name in wanted:
        checks.check_name("gradient", name, Gradients._fields)
    checks.check_array("saved.x_rows", saved.x_rows, 2, dtypes)
    h = saved.topology.shape[1] // saved.bins.E
    check_experts_backward(saved.bins, saved.x_rows, saved.activation, h, d_out, w1, w2, w3)


FORWARD = Contract(
    "Run every token through its experts: gather, SDD, activation, DSD, scatter.",
    (*EXPERTS, Value("block", "int", "Rows and columns of a block; it divides h")),
    (Tensor("out", "L d"), Value("saved", "Saved")),
    "MegaBlocks, section 4.1, and its pseudo-code of a dropless MoE",
    before=check_w2,
    after=_check_forward,
    errors=NO_GATE + ", the block size does not divide h",
)
BACKWARD = Contract(
    "Return every gradient, from that of the output.",
    EXPERTS_BACKWARD,
    (Value("gradients", "Gradients"),),
    "MegaBlocks, section 5.1: the backward needs SDD with a transposed dense operand, DSD of either transpose, and DDS",
    whole=_check_backward,
    errors=" with what was saved",
)
BACKWARD_OF_WANTED = replace(
    BACKWARD,
    arguments=(
        *EXPERTS_BACKWARD,
        Value("wanted", "collection of str", "Names in `Gradients`; a product that nothing wanted needs is left out"),
        Value(
            "release",
            "bool",
            "Free piece by piece what ``saved`` holds besides indices: a second backward then raises RuntimeError",
        ),
    ),
    errors=BACKWARD.errors + ", a wanted gradient is unknown",
)


def forward(
    stages: SparseStages,
    x: Array,
    w1: Array,
    w2: Array | None,
    w3: Array,
    dispatch: Dispatch,
    gates: Array,
    activation: str,
    block: int,
) -> tuple[Array, Saved]:
    """Run `FORWARD` over a backend's functions; the arguments have been checked."""
    _, d, h = w1.shape
    bins = stages.pad(dispatch, block)
    topology = stages.build_topology(bins, h)
    x_rows = stages.padded_gather(x, bins)  # (P, d)
    a = stages.sdd(x_rows, w1, topology)  # (nnz, block, block)
    b = None if w2 is None else stages.sdd(x_rows, w2, topology)
    y_swi = stages.activate(a, b, activation)
    y = stages.dsd(y_swi, topology, w3.reshape(-1, d))  # (P, d)
    out = stages.padded_scatter(y, bins, gates)
    return out, Saved(bins, topology, gates, x_rows, a, b, y_swi, y, activation)


def backward(
    stages: SparseStages,
    d_out: Array,
    saved: Saved,
    w1: Array,
    w2: Array | None,
    w3: Array,
    wanted: Collection[str] = Gradients._fields,
    release: bool = False,
) -> Gradients:
    """Run `BACKWARD` over a backend's functions; the arguments have been checked.

    What dies where, if it is released; a weight gradient is born at each ``->``:

    1. y gives d_gates, and dies; the gates weight d_y, and die.
    2. y_swi, kept or computed again, and d_y -> d_w3; y_swi dies. d_y gives d_y_swi, and dies.
    3. a and b give d_a and d_b, and die with d_y_swi.
    4. d_a, d_b -> d_x: (P, d) rows of each projection, which die within.
    5. x_rows, d_a -> d_w1; d_a dies. x_rows, d_b -> d_w2; both die.

    Raises
    ------
    RuntimeError
        If an earlier backward has released what ``saved`` held.
    """
    if saved.x_rows is None:
        raise RuntimeError("an earlier backward has released what the forward kept: run the forward again")
    bins, topology, kept = saved.bins, saved.topology, saved.floats()
    if release:
        saved.release()

    def if_wanted(name: str, gradient: Callable[..., Array], *operands: Any, **options: Any) -> Array | None:
        return gradient(*operands, **options) if name in wanted else None

    def weight_gradient(d_values: Array) -> Array:
        return stages.dds(kept["x_rows"], d_values, topology, transpose_lhs=True, parts=bins.E)

    d_gates = if_wanted("d_gates", stages.gate_gradient, d_out, kept.pop("y"), bins)
    d_y = stages.padded_gather(d_out, bins, kept.pop("gates"))  # (P, d)
    y_swi = kept.pop("y_swi")
    if y_swi is None:
        y_swi = if_wanted("d_w3", stages.activate, kept["a"], kept["b"], saved.activation)
    d_w3 = if_wanted("d_w3", stages.dsd, y_swi, topology, d_y, transpose_lhs=True)  # (E h, d)
    del y_swi
    d_y_swi = stages.sdd(d_y, w3.reshape(-1, w3.shape[2]), topology, transpose_rhs=True)  # (nnz, block, block)
    del d_y
    d_a, d_b = stages.activate_backward(d_y_swi, kept.pop("a"), kept.pop("b"), saved.activation)
    del d_y_swi
    d_x = if_wanted("d_x", _input_gradient, stages, d_a, d_b, w1, w2, saved)
    d_w1 = if_wanted("d_w1", weight_gradient, d_a)
    del d_a
    d_w2 = None if d_b is None else if_wanted("d_w2", weight_gradient, d_b)
    return Gradients(d_x, d_w1, d_w2, None if d_w3 is None else d_w3.reshape(w3.shape), d_gates)


def _input_gradient(
    stages: SparseStages, d_a: Array, d_b: Array | None, w1: Array, w2: Array | None, saved: Saved
) -> Array:
    """d_x (L, d): the rows of both projections, summed."""
    d_rows = stages.dsd(d_a, saved.topology, w1, transpose_rhs=True)  # (P, d)
    if d_b is not None:
        d_rows += stages.dsd(d_b, saved.topology, w2, transpose_rhs=True)
    return stages.padded_scatter(d_rows, saved.bins)
