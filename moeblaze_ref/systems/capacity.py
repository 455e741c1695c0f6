"""A fixed expert capacity: how many rows an expert has, who is dropped, and what the stage accepts, in every room.

Sources: GShard (arXiv 2006.16668), section 2.2 and algorithm 1; Switch Transformer (arXiv 2101.03961), section 2.2;
MegaBlocks (arXiv 2211.15841), section 2, which sets out to remove it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import EMPTY, CapacityBins

# Whom an expert keeps when more rows are routed to it than it has.
DROP_POLICIES = {
    "by_gate": "its highest gates, ties to the lower token id",
    "by_arrival": "who comes first: all first choices by token id, then all second choices, and so on",
}

DEFAULT_FACTOR = 1.25  # Switch Transformer's
MAX = "max"  # in place of a factor: the smallest capacity that drops nothing (Tutel, arXiv 2206.03382)


def expert_capacity(num_rows: int, num_experts: int, capacity_factor: float) -> int:
    """C = ceil(capacity_factor * L * k / E), rows reserved for each expert (GShard, Switch; MegaBlocks section 2).

    Parameters
    ----------
    num_rows : int
        L * k, not negative.
    num_experts : int
        E, at least 1.
    capacity_factor : float
        Finite, above 0. ``MAX`` needs the experts' counts: `capacity_for`.

    Raises
    ------
    ValueError, TypeError
        If a number is out of range or no number.
    """
    checks.check_int("R", num_rows, at_least=0)
    checks.check_int("E", num_experts, at_least=1)
    check_factor(capacity_factor)
    if capacity_factor == MAX:
        raise ValueError("capacity_factor is 'max', but that needs the experts' counts: use capacity_for")
    # The decimal number that was typed: 1.1 as a binary fraction is a little more, and 1.1 * 10 would round up to 12.
    return math.ceil(Fraction(str(capacity_factor)) * num_rows / num_experts)


def capacity_for(counts: Sequence[int], capacity_factor: float | str) -> int:
    """C for the rows that are routed to each expert: the most of them if the factor is ``MAX``, else `expert_capacity`.

    Parameters
    ----------
    counts : sequence of int
        Routed rows of each expert, E entries.
    capacity_factor : float or str
        Finite and above 0, or ``MAX``.

    Raises
    ------
    ValueError, TypeError
        If there is no expert, or the factor is out of range or neither a number nor ``MAX``.

    Notes
    -----
    MegaBlocks, section 3, compares with Tutel's dynamic capacity, which drops nothing.
    """
    check_factor(capacity_factor)
    return max(counts) if capacity_factor == MAX else expert_capacity(sum(counts), len(counts), capacity_factor)


def check_factor(capacity_factor):
    """A finite number above 0, or ``MAX``."""
    if isinstance(capacity_factor, str):
        if capacity_factor != MAX:
            raise TypeError(f"capacity_factor is {capacity_factor!r} (str), but it must be a number or {MAX!r}")
        return
    if isinstance(capacity_factor, bool):
        raise TypeError(f"capacity_factor is {capacity_factor}, but it must be a number")
    checks.check_float("capacity_factor", capacity_factor)
    checks.check_positive("capacity_factor", capacity_factor)


def check_options(capacity_factor, drop_policy):
    """A finite factor above 0, and a known drop policy."""
    check_factor(capacity_factor)
    checks.check_name("drop policy", drop_policy, DROP_POLICIES)


def check_capacity(capacity, num_experts):
    """C rows for each expert, whose E * C numbers fit int32."""
    checks.check_int("capacity", capacity, at_least=0)
    if num_experts * capacity > checks.MAX_ROUTED_ROWS:
        raise ValueError(
            f"E * C rows are reserved, for E = {num_experts} experts C = {_in_short(capacity)}, but int32 indices "
            f"allow at most 2**31 - 1024 = {checks.MAX_ROUTED_ROWS}: lower the capacity factor"
        )


def _in_short(number: int) -> str:
    """A number that may have hundreds of digits."""
    digits = str(number)
    return digits if len(digits) <= 20 else f"{digits[0]}.{digits[1:3]}e+{len(digits) - 1}"


@checks.unless_trusted
def check_fill(dispatch, gates, capacity, drop_policy, dtypes):
    """A Dispatch, the gates (L, k) of its tokens, rows of an expert and who is dropped."""
    checks.check_dispatch(dispatch)
    checks.check_tensor("gates", gates, {"L": dispatch.L, "k": dispatch.k}, dtypes)
    check_capacity(capacity, dispatch.E)
    checks.check_name("drop policy", drop_policy, DROP_POLICIES)


def check_bins(bins):
    """CapacityBins whose slots and rows are each other's inverse."""
    checks.check_type("bins", bins, CapacityBins)
    checks.check_int("bins.k", bins.k, at_least=1)
    checks.check_array("slots", bins.slots, rank=2, dtypes=("int32",))
    checks.check_array("rows", bins.rows, rank=1, dtypes=("int32",))
    checks.check_int("E, the first extent of slots,", bins.E, at_least=1)
    if bins.R % bins.k:
        raise ValueError(f"bins has R = {bins.R} routed rows, but R must be a multiple of k = {bins.k}")
    _check_inverse(bins)


@checks.scans
def _check_inverse(bins):
    """Every slot that is kept lies in its row, and every other row is padding."""
    _check_range("rows", bins.rows, bins.E * bins.C, "reserved rows")
    _check_range("slots", bins.slots, bins.R, "routed slots")
    kept = bins.rows != EMPTY
    wrong = kept.copy()
    wrong[kept] = bins.slots.reshape(-1)[bins.rows[kept]] != kept.nonzero()[0]
    if bool(wrong.any()):
        (slot,) = checks.first(wrong)
        row = int(bins.rows[slot])
        expert, place = divmod(row, bins.C)
        raise ValueError(
            f"rows[{slot}] is {row}, but slots[{expert}, {place}] is {int(bins.slots[expert, place])}: it must be "
            f"{slot}"
        )
    slots = bins.slots.reshape(-1)
    stray = slots != EMPTY
    stray[stray] = bins.rows[slots[stray]] != stray.nonzero()[0]
    if bool(stray.any()):
        (row,) = checks.first(stray)
        slot, (expert, place) = int(slots[row]), divmod(int(row), bins.C)
        raise ValueError(
            f"slots[{expert}, {place}] is {slot}, but rows[{slot}] is {int(bins.rows[slot])}: it must be {int(row)}, "
            f"or slots[{expert}, {place}] must be {EMPTY}"
        )


def _check_range(name, array, size, what):
    """Every element is one of so many, or ``EMPTY``."""
    outside = (array < EMPTY) | (array >= size)
    if bool(outside.any()):
        at = checks.first(outside)
        place = ", ".join(map(str, at))
        raise ValueError(f"{name}[{place}] is {int(array[at])}, but it must be one of the {size} {what}, or {EMPTY}")


def check_same_sizes(bins, dispatch):
    """The bins are of as many tokens, experts and choices as the Dispatch."""
    for name in ("L", "E", "k"):
        if getattr(bins, name) != getattr(dispatch, name):
            raise ValueError(
                f"bins has {name} = {getattr(bins, name)}, but the dispatch has {name} = {getattr(dispatch, name)}"
            )


def _check_gates(gates, bins, like):
    if gates is not None:
        checks.check_tensor("gates", gates, {"L": bins.L, "k": bins.k}, (checks.dtype_of(like),))


@checks.unless_trusted
def check_gather(x, bins, gates, dtypes):
    """x (L, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    checks.check_tensor("x", x, {"L": bins.L, "d": None}, dtypes)
    _check_gates(gates, bins, x)


@checks.unless_trusted
def check_scatter(y, bins, gates, dtypes):
    """y (E, C, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    checks.check_tensor("y", y, {"E": bins.E, "C": bins.C, "d": None}, dtypes)
    _check_gates(gates, bins, y)


@checks.unless_trusted
def check_gate_gradient(d_out, y, bins, dtypes):
    """d_out (L, d) and y (E, C, d) belong to the bins."""
    check_scatter(y, bins, None, dtypes)
    checks.check_tensor("d_out", d_out, {"L": bins.L, "d": y.shape[2]}, (checks.dtype_of(y),))


@checks.unless_trusted
def check_backward(d_out, saved, w1, w2, w3):
    """d_out (L, d) and the experts' weights are of the sizes and the dtype of what was saved."""
    stage_contracts.check_experts_backward(d_out, w1, w2, w3, saved, saved.a.shape[2])
