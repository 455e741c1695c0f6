"""A fixed expert capacity: how many rows an expert has, who is dropped, and what the stage accepts, in every room.

Sources: GShard (arXiv 2006.16668), section 2.2 and algorithm 1; Switch Transformer (arXiv 2101.03961), section 2.2;
MegaBlocks (arXiv 2211.15841), section 2, which sets out to remove it.
"""

import math
from fractions import Fraction

from moeblaze_ref import doors
from moeblaze_ref.structures import EMPTY, CapacityBins

# Whom an expert keeps when more rows are routed to it than it has.
DROP_POLICIES = {
    "by_gate": "its highest gates, ties to the lower token id",
    "by_arrival": "who comes first: all first choices by token id, then all second choices, and so on",
}

DEFAULT_FACTOR = 1.25  # Switch Transformer's


def expert_capacity(num_rows: int, num_experts: int, capacity_factor: float) -> int:
    """C = ceil(capacity_factor * L * k / E), rows reserved for each expert (GShard, Switch; MegaBlocks section 2)."""
    # The decimal number that was typed: 1.1 as a binary fraction is a little more, and 1.1 * 10 would round up to 12.
    return math.ceil(Fraction(str(capacity_factor)) * num_rows / num_experts)


def check_options(capacity_factor, drop_policy):
    """A finite factor above 0, and a known drop policy."""
    doors.check_positive("capacity_factor", capacity_factor)
    doors.check_name("drop policy", drop_policy, DROP_POLICIES)


def check_capacity(capacity, num_experts):
    """C rows for each expert, whose E * C numbers fit int32."""
    doors.check_int("capacity", capacity, at_least=0)
    if num_experts * capacity > doors.MAX_ROUTED_ROWS:
        raise ValueError(
            f"E * C = {num_experts} * {capacity} = {num_experts * capacity} rows are reserved, but int32 indices "
            f"allow at most 2**31 - 1 = {doors.MAX_ROUTED_ROWS}: lower the capacity factor"
        )


@doors.unless_trusted
def check_fill(dispatch, gates, capacity, drop_policy, dtypes):
    """A Dispatch, the gates (L, k) of its tokens, rows of an expert and who is dropped."""
    doors.check_dispatch(dispatch)
    doors.check_tensor("gates", gates, {"L": dispatch.L, "k": dispatch.k}, dtypes)
    check_capacity(capacity, dispatch.E)
    doors.check_name("drop policy", drop_policy, DROP_POLICIES)


def check_bins(bins):
    """CapacityBins whose slots and rows are each other's inverse."""
    doors.check_type("bins", bins, CapacityBins)
    doors.check_int("bins.k", bins.k, at_least=1)
    doors.check_array("slots", bins.slots, rank=2, dtypes=("int32",))
    doors.check_array("rows", bins.rows, rank=1, dtypes=("int32",))
    doors.check_int("E, the first extent of slots,", bins.E, at_least=1)
    if bins.R % bins.k:
        raise ValueError(f"bins has R = {bins.R} routed rows, but R must be a multiple of k = {bins.k}")
    _check_inverse(bins)


@doors.scans
def _check_inverse(bins):
    """Every slot that is kept lies in its row, and every other row is padding."""
    reserved = bins.E * bins.C
    outside = (bins.rows < EMPTY) | (bins.rows >= reserved)
    if bool(outside.any()):
        (slot,) = doors.first(outside)
        raise ValueError(
            f"rows[{slot}] is {int(bins.rows[slot])}, but it must be one of the {reserved} reserved rows, or {EMPTY}"
        )
    kept = bins.rows != EMPTY
    wrong = kept.copy()
    wrong[kept] = bins.slots.reshape(-1)[bins.rows[kept]] != kept.nonzero()[0]
    if bool(wrong.any()):
        (slot,) = doors.first(wrong)
        row = int(bins.rows[slot])
        expert, place = divmod(row, bins.C)
        raise ValueError(
            f"rows[{slot}] is {row}, but slots[{expert}, {place}] is {int(bins.slots[expert, place])}: it must be {slot}"
        )
    filled, count = int((bins.slots != EMPTY).sum()), int(kept.sum())
    if filled != count:
        raise ValueError(f"slots holds {filled} slots, but rows keeps {count}: every other row must be {EMPTY}")


def check_same_sizes(bins, dispatch):
    """The bins are of as many tokens, experts and choices as the Dispatch."""
    for name in ("L", "E", "k"):
        if getattr(bins, name) != getattr(dispatch, name):
            raise ValueError(
                f"bins has {name} = {getattr(bins, name)}, but the dispatch has {name} = {getattr(dispatch, name)}"
            )


def _check_gates(gates, bins, like):
    if gates is not None:
        doors.check_tensor("gates", gates, {"L": bins.L, "k": bins.k}, (doors.dtype_of(like),))


@doors.unless_trusted
def check_gather(x, bins, gates, dtypes):
    """x (L, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    doors.check_tensor("x", x, {"L": bins.L, "d": None}, dtypes)
    _check_gates(gates, bins, x)


@doors.unless_trusted
def check_scatter(y, bins, gates, dtypes):
    """y (E, C, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    doors.check_tensor("y", y, {"E": bins.E, "C": bins.C, "d": None}, dtypes)
    _check_gates(gates, bins, y)


@doors.unless_trusted
def check_gate_gradient(d_out, y, bins, dtypes):
    """d_out (L, d) and y (E, C, d) belong to the bins."""
    check_scatter(y, bins, None, dtypes)
    doors.check_tensor("d_out", d_out, {"L": bins.L, "d": y.shape[2]}, (doors.dtype_of(y),))
