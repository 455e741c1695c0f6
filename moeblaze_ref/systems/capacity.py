"""A fixed expert capacity: how many rows an expert has, who is dropped, and what the stage accepts, in every room.

Sources: GShard (arXiv 2006.16668), section 2.2 and algorithm 1; Switch Transformer (arXiv 2101.03961), section 2.2;
MegaBlocks (arXiv 2211.15841), section 2, which sets out to remove it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from moeblaze_ref.core import checks
from moeblaze_ref.core.contract import ROUTING, Arguments, Contract, Structure, Tensor, Value
from moeblaze_ref.core.sparse_contracts import (
    EXPERTS,
    EXPERTS_BACKWARD,
    WEIGHTS_OF_ROWS,
    check_experts_backward,
    check_w2,
)
from moeblaze_ref.core.stage_contracts import DISPATCH, NO_GATE, Dtypes
from moeblaze_ref.core.structures import EMPTY, Array, CapacityBins, Dispatch

# Whom an expert keeps when more rows are routed to it than it has.
DROP_POLICIES = {
    "by_gate": "its highest gates, ties to the lower token id",
    "by_arrival": "who comes first: all first choices by token id, then all second choices, and so on",
}

DEFAULT_FACTOR = 1.25  # Switch Transformer's
MAX = "max"  # in place of a factor: the smallest capacity that drops nothing (Tutel, arXiv 2206.03382)


def expert_capacity(num_rows: int, num_experts: int, capacity_factor: float | str) -> int:
    """C = ceil(capacity_factor * L * k / E), rows reserved for each expert (GShard, Switch; MegaBlocks section 2).

    Parameters
    ----------
    num_rows : int
        L * k, not negative.
    num_experts : int
        E, at least 1.
    capacity_factor : float or str
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


def rows_reserved(dispatch: Dispatch, capacity_factor: float | str) -> int:
    """Return C for this routing, by `capacity_for`."""
    offsets = dispatch.expert_token_offsets
    return capacity_for((offsets[1:] - offsets[:-1]).tolist(), capacity_factor)


def check_factor(capacity_factor: float | str) -> None:
    """A finite number above 0, or ``MAX``."""
    if isinstance(capacity_factor, str):
        if capacity_factor != MAX:
            raise TypeError(f"capacity_factor is {capacity_factor!r} (str), but it must be a number or {MAX!r}")
        return
    if isinstance(capacity_factor, bool):
        raise TypeError(f"capacity_factor is {capacity_factor}, but it must be a number")
    checks.check_float("capacity_factor", capacity_factor)
    checks.check_positive("capacity_factor", capacity_factor)


def check_options(capacity_factor: float | str, drop_policy: str) -> None:
    """A finite factor above 0, and a known drop policy."""
    check_factor(capacity_factor)
    checks.check_name("drop policy", drop_policy, DROP_POLICIES)


def check_capacity(capacity: int, num_experts: int) -> None:
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


def _check_fill(given: Arguments) -> None:
    check_capacity(given["capacity"], given["dispatch"].E)
    checks.check_name("drop policy", given["drop_policy"], DROP_POLICIES)


def _check_reserved(given: Arguments) -> None:
    check_options(given["capacity_factor"], given["drop_policy"])
    check_capacity(rows_reserved(given["dispatch"], given["capacity_factor"]), given["dispatch"].E)


def check_bins(bins: CapacityBins) -> None:
    """CapacityBins whose slots and rows are each other's inverse."""
    checks.check_type("bins", bins, CapacityBins)
    checks.check_int("bins.k", bins.k, at_least=1)
    checks.check_array("slots", bins.slots, rank=2, dtypes=("int32",))
    checks.check_array("rows", bins.rows, rank=1, dtypes=("int32",))
    checks.check_int("E, the first extent of slots,", bins.E, at_least=1)
    if bins.R % bins.k:
        raise ValueError(f"bins has R = {bins.R} routed rows, but R must be a multiple of k = {bins.k}")
    _check_inverse(bins)


def _check_inverse(bins: CapacityBins) -> None:
    """Every slot that is kept lies in its row, and every other row is padding."""
    _check_range("rows", bins.rows, bins.E * bins.C, "reserved rows")
    _check_range("slots", bins.slots, bins.R, "routed slots")
    kept = bins.rows != EMPTY
    wrong = kept.copy()
    wrong[kept] = bins.slots.reshape(-1)[bins.rows[kept]] != kept.nonzero()[0]
    if (slot := checks.first_place(wrong)) is not None:
        row = int(bins.rows[slot])
        expert, place = divmod(row, bins.C)
        raise ValueError(
            f"rows[{slot}] is {row}, but slots[{expert}, {place}] is {int(bins.slots[expert, place])}: it must be "
            f"{slot}"
        )
    slots = bins.slots.reshape(-1)
    stray = slots != EMPTY
    stray[stray] = bins.rows[slots[stray]] != stray.nonzero()[0]
    if (at := checks.first_place(stray)) is not None:
        slot, (expert, place) = int(slots[at]), divmod(at, bins.C)
        raise ValueError(
            f"slots[{expert}, {place}] is {slot}, but rows[{slot}] is {int(bins.rows[slot])}: it must be {at}, "
            f"or slots[{expert}, {place}] must be {EMPTY}"
        )


def _check_range(name: str, array: Array, size: int, what: str) -> None:
    """Every element is one of so many, or ``EMPTY``."""
    if at := checks.first((array < EMPTY) | (array >= size)):
        place = ", ".join(map(str, at))
        raise ValueError(f"{name}[{place}] is {int(array[at])}, but it must be one of the {size} {what}, or {EMPTY}")


def _check_dropped(bins: CapacityBins, dispatch: Dispatch, dtypes: Dtypes) -> None:
    """The bins are of as many tokens, experts and choices as the Dispatch."""
    checks.check_dispatch(dispatch)
    check_bins(bins)
    for name in ("L", "E", "k"):
        if getattr(bins, name) != getattr(dispatch, name):
            raise ValueError(
                f"bins has {name} = {getattr(bins, name)}, but the dispatch has {name} = {getattr(dispatch, name)}"
            )


def _check_backward(d_out: Array, saved: "Saved", w1: Array, w2: Array | None, w3: Array, dtypes: Dtypes) -> None:
    checks.check_type("saved", saved, Saved)
    check_experts_backward(saved.bins, saved.x_rows, saved.activation, saved.a.shape[2], d_out, w1, w2, w3)


@dataclass(frozen=True, eq=False)
class Saved:
    """Tensors that the forward saves for the backward: no weights.

    Parameters
    ----------
    bins : CapacityBins
    gates : array (L, k)
    x_rows : array (E, C, d)
        Rows of x in the bins.
    a, b, y_swi : array (E, C, h)
        The tensors between the projections, padding included; b is None for the ungated activations.
    y : array (E, C, d)
        The experts' outputs, for the gradient of the gates.
    activation : str
    """

    bins: CapacityBins
    gates: Array
    x_rows: Array
    a: Array
    b: Array | None
    y_swi: Array
    y: Array
    activation: str

    def tensors(self) -> dict[str, Array]:
        """Every array that is kept, by name."""
        floats = {name: getattr(self, name) for name in ("gates", "x_rows", "a", "b", "y_swi", "y")}
        return self.bins.arrays() | {name: array for name, array in floats.items() if array is not None}


# ---- declared ----------------------------------------------------------------------------------------------------

BINS = Structure("bins", "CapacityBins", check_bins, "L k E C")
DROP_POLICY = Value("drop_policy", "str", "One of ``capacity.DROP_POLICIES``")

FILL = Contract(
    "Return bins of C rows each: which slots every expert keeps, and where.",
    (
        DISPATCH,
        Tensor(
            "gates",
            "L k",
            text="By which ``by_gate`` ranks, as the layer weighs with them: renormalised, if its gates are",
        ),
        Value("capacity", "int", "C, rows of an expert"),
        DROP_POLICY,
    ),
    (
        Value(
            "bins",
            "CapacityBins",
            "The rows of an expert go to the C best claims on it, in their order; the others are dropped",
        ),
    ),
    "``by_arrival`` is GShard's algorithm 1 for any k, without its coin for the second expert: one pass over the first "
    "choices of all tokens, then one over the second choices, ...; for k = 1 it is Switch Transformer's. ``by_gate`` "
    "ranks the rows of each expert by themselves; V-MoE (arXiv 2106.05974), section 4, ranks whole tokens instead",
    after=_check_fill,
    errors=", capacity is negative, E * C exceeds 2**31 - 1024, the policy is unknown",
)
DROPPED = Contract(
    "Return how many slots and whole tokens are lost, and by which experts.",
    (BINS, Structure("dispatch", "Dispatch", checks.check_dispatch, "", "From which ``fill`` made the bins")),
    (Value("dropped", "Dropped"),),
    "MegaBlocks, section 2: rows over C are dropped",
    whole=_check_dropped,
    errors="either is not valid or they do not belong together",
)
GATHER = Contract(
    "Return rows of x copied into the bins, times their gates if there are any; padding is zero.",
    (Tensor("x", "L d"), BINS, WEIGHTS_OF_ROWS),
    (Tensor("rows", "E C d"),),
    "GShard, section 2.2: the dispatch, there a product with a one-hot mask (L, E, C). With gates it is the gradient "
    "of ``scatter`` by y",
)
SCATTER = Contract(
    "Return each token's sum of its rows in the bins, times its gates if there are any; a dropped slot adds nothing.",
    (Tensor("y", "E C d"), BINS, WEIGHTS_OF_ROWS),
    (Tensor("out", "L d", text="Zero for a token whose slots are all dropped"),),
    "GShard, section 2.2: the combine. Without gates it is the gradient of ``gather``",
)
GATE_GRADIENT = Contract(
    "Return the gradient of the gates: <d_out, y> of each slot, 0 where it is dropped.",
    (Tensor("d_out", "L d"), Tensor("y", "E C d", text="As it went into ``scatter``"), BINS),
    (Tensor("d_gates", "L k", ROUTING),),
    "GShard, section 2.2",
    first="y",
)
FORWARD = Contract(
    "Run every token through those of its experts that have a row for it.",
    (
        *EXPERTS,
        Value(
            "capacity_factor",
            "float or str",
            'C as a multiple of L * k / E; E / k drops nothing, whatever the routing. With "max", C is the most rows '
            "of any expert",
        ),
        DROP_POLICY,
    ),
    (
        Tensor(
            "out",
            "L d",
            text="A dropped slot adds nothing, and the gates of a token's other slots stay as they are: with "
            "renormalised gates, those of a token that lost a slot no longer sum to one",
        ),
        Value("saved", "Saved"),
    ),
    "GShard, algorithm 1, divides the gates by their sum before it drops, as here; some libraries divide after, which "
    "would give a token that lost a slot the full weight of the others",
    before=check_w2,
    after=_check_reserved,
    errors=NO_GATE + ", the factor is not a finite number above 0, E * C exceeds 2**31 - 1024, the policy is unknown",
)
BACKWARD = Contract(
    "Return every gradient, from that of the output.",
    EXPERTS_BACKWARD,
    (
        Value(
            "gradients",
            "Gradients",
            "A dropped slot gets and gives none: its gate's gradient is 0. Where the gates were renormalised, the "
            "router still hears of it through the sum that divides the others",
        ),
    ),
    "GShard, section 2.2",
    whole=_check_backward,
    errors=" with what was saved",
)
