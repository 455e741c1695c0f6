"""A layer over ranks, what its trips need besides the stages: launches kernels_cuda/parallel/.

Nothing here is checked, and the host never waits. A token's row travels with 2k words: the numbers of its copies, which
are ``rank * E + expert``, then the bits of its gates. Words that are ``EMPTY`` belong to no token.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import dtype_of, size_of
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, KernelArguments, ceil_div, widest_pack
from moeblaze_ref.runtime.source import Module

THREADS = 128
MOST_WORDS = checks.MAX_ROUTED_ROWS  # that the kernels number: two of a slot


class Copies(NamedTuple):
    """Which of G ranks hold which of E experts, on the device."""

    sole: Array  #: (E,) int32, the rank of an expert that one rank holds; EMPTY if several do
    held: Array  #: (E, G) bool
    num_nodes: int  #: of equally many neighbouring ranks


class Room(NamedTuple):
    """Rows for every rank, as many for each, and what travels with them."""

    copies: Dispatch  #: of the tokens over the ranks; no slot has a row if a rank has too little room
    words: Array  #: (G * rows, 2k) int32
    overflowed: Array  #: () bool, a rank has too little room


class Places(NamedTuple):
    """The places, on this rank, of the experts of rows that have arrived, and the gates."""

    here: Array  #: (rows, k) int32, EMPTY of experts elsewhere; all are if the choices lack room
    gates: Array  #: (rows, k) float32
    overflowed: Array | None  #: () bool, the choices lack room; None if they need none


def check_words(rows: int, k: int) -> None:
    """The words of so many rows can be numbered.

    Raises
    ------
    ValueError
        If they are too many.
    """
    if 2 * k * rows > MOST_WORDS:
        raise ValueError(
            f"{rows} rows travel with 2 k = {2 * k} words each, which are {2 * k * rows}, but the kernels number at "
            f"most 2**31 - 1024 = {MOST_WORDS}"
        )


def choose_ranks(
    topk_experts: Array, gates: Array, copies: Copies, rank: int, executor: Executor
) -> tuple[Array, Array]:
    """Choose the copies that this rank's tokens use, by the rule of `placement.copies.choose`.

    Parameters
    ----------
    topk_experts : array (L, k) int32
    gates : array (L, k) float32
    copies : Copies
    rank : int
        This one.
    executor : Executor

    Returns
    -------
    ranks : array (L, k) int32
        Where each slot's row goes; EMPTY if an earlier slot of the token has it there.
    words : array (L, 2k) int32
        That travel with each token's row.
    """
    L, k = topk_experts.shape
    E, G = copies.held.shape
    ranks, words = executor.empty((L, k), "int32"), executor.empty((L, 2 * k), "int32")
    sets = 2 * ceil_div(G, 32) + ceil_div(copies.num_nodes, 32)
    operands = {"topk_experts": topk_experts, "gates": gates, "sole": copies.sole, "held": copies.held}
    sizes = {"here": rank, "L": L, "E": E, "k": k}
    launch = partial(_trip(executor, G, copies.num_nodes).launch, "choose_ranks", shared_bytes=4 * THREADS * sets)
    _over(L, launch, **operands, ranks=ranks, words=words, **sizes)
    return ranks, words


def make_room(found: Dispatch, words: Array, rows: int, noted: Array, executor: Executor) -> Room:
    """Give every rank room for the same number of rows.

    Parameters
    ----------
    found : Dispatch
        Of L tokens over G ranks, by `dispatch.build_part` of the ranks of `choose_ranks`. Rows beyond the last rank's
        may be unwritten: they are not read.
    words : array (L, 2k) int32
    rows : int
        For each rank.
    noted : array () bool
        Set to True if a rank has too little room.
    executor : Executor
    """
    G, k, R = found.E, found.k, found.slots
    empty = partial(executor.empty, dtype="int32")
    copies = replace(
        found,
        expert_token_indices=empty((G * rows,)),
        expert_token_offsets=empty((G + 1,)),
        token_index_map=empty((R,)),
    )
    room = Room(copies, empty((G * rows, 2 * k)), executor.empty((), "bool"))
    launch = _trip(executor, G).launch
    offsets: KernelArguments = {"offsets": found.expert_token_offsets}
    overflowed: KernelArguments = {"overflowed": room.overflowed}
    made: KernelArguments = {"offsets_of_room": copies.expert_token_offsets, **overflowed}
    launch("make_room", grid=1, block=THREADS, **offsets, **made, noted=noted, rows=rows)
    given = {"tokens": found.expert_token_indices, "words": words}
    made = {"tokens_of_room": copies.expert_token_indices, "words_of_room": room.words}
    _over(2 * k * G * rows, partial(launch, "fill_rows"), **offsets, **given, **made, rows=rows, k=k)
    slots = {"ranks": found.token_expert_indices, "token_index_map": found.token_index_map, **overflowed}
    _over(R, partial(launch, "move_slots"), **offsets, **slots, map_of_room=copies.token_index_map, rows=rows, R=R)
    return room


class Limit(NamedTuple):
    """How many choices of experts of a rank have room."""

    choices: int
    noted: Array  #: () bool, set to True if they are more


def find_places(arrived: Array, here: Array, executor: Executor, limit: Limit | None = None) -> Places:
    """Find the experts of rows that have arrived.

    Parameters
    ----------
    arrived : array (rows, 2k) int32
        Their words.
    here : array int32
        The place on this rank of each copy's expert, EMPTY if the copy is elsewhere.
    executor : Executor
    limit : Limit, optional
        Default: all choices have room.
    """
    rows, k = arrived.shape[0], arrived.shape[1] // 2
    slots, launch = rows * k, _trip(executor).launch
    blocks = ceil_div(slots, THREADS)
    places, gates = executor.empty((rows, k), "int32"), executor.empty((rows, k), "float32")
    counts = executor.empty((blocks,), "int32")
    of_slots = {"places": places, "gates": gates, "counts": counts, "slots": slots, "k": k}
    _over(slots, partial(launch, "find_places"), arrived=arrived, here=here, **of_slots)
    if limit is None:
        return Places(places, gates, None)
    overflowed = executor.empty((), "bool")
    said: KernelArguments = {"overflowed": overflowed, "noted": limit.noted, "room": limit.choices}
    launch("sum_counts", grid=1, block=THREADS, counts=counts, blocks=blocks, **said)
    _over(slots, partial(launch, "withhold"), overflowed=overflowed, places=places, slots=slots)
    return Places(places, gates, overflowed)


def gather(rows: Array, tokens: Array, executor: Executor) -> Array:
    """Gather tokens' rows (L, n), one for each of ``tokens``: zeros where it is EMPTY."""
    n, dtype = rows.shape[1], dtype_of(rows)
    found, pack = executor.empty((len(tokens), n), dtype), widest_pack(rows, n)
    if elements := size_of(found):
        module = executor.load("block_sparse/rows.cu", **gemm.constants(dtype), PACK=pack)
        operands: KernelArguments = {
            "x": rows,
            "gates": executor.empty((0,), "float32"),
            "slots": tokens,
            "rows": found,
        }
        sizes = {"P": len(tokens), "d": n, "k": 1, "weighted": 0}
        module.launch("padded_gather", **gemm.per_element(elements // pack), **operands, **sizes)
    return found


def sum_rows(rows: Array, copies: Dispatch, executor: Executor) -> Array:
    """Sum the rows (R, n) of each token, one for each rank: (L, n)."""
    out = executor.empty((copies.L, rows.shape[1]), dtype_of(rows))
    gemm.sum_rows(executor, rows, copies.token_index_map, copies.k, out)
    return out


def batch_rows(shares: Array, tokens: int, executor: Executor) -> Array:
    """The rows of each expert from this rank, and its tokens, (E + 1,) float64: what the ranks add up.

    Parameters
    ----------
    shares : array (E,) float32
        Each expert's part of this rank's rows; not read if there are no tokens.
    tokens : int
        L of this rank.
    executor : Executor
    """
    E = len(shares)
    rows = executor.empty((E + 1,), "float64")
    _over(E + 1, partial(_batch(executor).launch, "batch_rows"), shares=shares, rows=rows, tokens=tokens, E=E)
    return rows


def batch_shares(rows: Array, tokens: int, executor: Executor) -> tuple[Array, Array]:
    """Each expert's part (E,) float32 of all ranks' rows, and this rank's part () float32 of their tokens.

    Parameters
    ----------
    rows : array (E + 1,) float64
        The sum over the ranks of `batch_rows`.
    tokens : int
        L of this rank.
    executor : Executor
    """
    E = len(rows) - 1
    shares, part = executor.empty((E,), "float32"), executor.empty((), "float32")
    made = {"shares": shares, "part": part}
    _over(E + 1, partial(_batch(executor).launch, "batch_shares"), rows=rows, **made, tokens=tokens, E=E)
    return shares, part


def weigh_losses(load_balancing_loss: Array, router_z_loss: Array, part: Array, executor: Executor) -> Array:
    """Both losses, () float32 each, times this rank's part () float32 of the tokens: (2,) float32."""
    losses = executor.empty((2,), "float32")
    given: KernelArguments = {"load_balancing_loss": load_balancing_loss, "router_z_loss": router_z_loss, "part": part}
    _batch(executor).launch("weigh_losses", grid=1, block=THREADS, **given, losses=losses)
    return losses


def _over(elements: int, launch: Any, **arguments: Any) -> None:
    """Launch with a thread for each element; nothing if there is none."""
    if elements:
        launch(grid=ceil_div(elements, THREADS), block=THREADS, **arguments)


def _trip(executor: Executor, ranks: int = 1, nodes: int = 1) -> Module:
    return executor.load("parallel/trip.cu", THREADS=THREADS, RANKS=ranks, NODES=nodes)


def _batch(executor: Executor) -> Module:
    return executor.load("parallel/batch.cu", THREADS=THREADS)
