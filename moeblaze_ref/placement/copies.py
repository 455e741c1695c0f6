"""Which copy of an expert a token uses, where experts have several.

The rule needs no word from other GPUs: a token's choice depends on its experts, on the GPU where the token is, and on
its number in that GPU's batch. `parallel.layer` sends tokens by the same rule, so what is counted here is what it
sends.

A trace does not say on which GPUs its tokens were. By convention token t of a trace is on GPU t % G, where it is number
t // G of the batch (`sources`).
"""

from dataclasses import dataclass

import numba
import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import INTEGERS, RoutingTrace
from moeblaze_ref.placement.bits import ONE, bits_set, clear, has, packed, put, size
from moeblaze_ref.placement.maps import Copies, check_nodes

VISITED, NEAR = 0, 1  # sets of a token: its own GPU and those that it chose, and all GPUs of their nodes


def sources(tokens: int, num_gpus: int) -> np.ndarray:
    """The GPU of each token of a trace, (tokens,) int32: token t is on GPU t % G."""
    return np.arange(tokens, dtype=np.int32) % num_gpus


def choose(topk: np.ndarray, source: np.ndarray, held: np.ndarray, num_nodes: int = 1) -> np.ndarray:
    """Choose the copy that each token uses of each of its experts, in one layer.

    First every expert with a single copy takes it. Then the others choose, in the order j = 0, ..., k - 1. Each
    chooses among its nearest copies. The distance of a copy is

    - 0 if its GPU is the token's own, or one that an expert of the token has chosen already;
    - 1 if its node is the token's own, or one of a GPU that was chosen already;
    - 2 otherwise.

    Of n copies that are equally near, in the order of their GPUs, it is number (t + e) % n: e is the expert, and t the
    token's number among the tokens of its GPU.

    Parameters
    ----------
    topk : array (T, k) of integers
        The experts of each token.
    source : array (T,) of integers
        The GPU where each token is. Tokens of one GPU stand in the order of its batch.
    held : array (E, G) bool
        Whether GPU g has a copy of expert e.
    num_nodes : int
        Nodes of equally many neighbouring GPUs.

    Returns
    -------
    array (T, k) int32
        The GPU of the copy.

    Raises
    ------
    TypeError, ValueError
        If an expert or a GPU does not exist, an expert has no copy, or the nodes do not divide the GPUs.
    """
    checks.check_array("held", held, 2, ("bool",), contiguous=False)
    E, G = held.shape
    checks.check_int("num_gpus", G, 1)
    check_nodes(num_nodes, G)
    for name, array, rank, limit, what in (("topk", topk, 2, E, "experts"), ("source", source, 1, G, "GPUs")):
        checks.check_array(name, array, rank, INTEGERS, contiguous=False)
        checks.check_index(name, array, limit, what)
    checks.check_shape("source", source, {"T": len(topk)})
    nowhere = checks.first(~held.any(axis=1))  # type: ignore[arg-type]  # not a scalar
    if nowhere:
        raise ValueError(f"expert {nowhere[0]} is on no GPU, but every expert needs one")
    return _choose(topk, source, packed(held), neighbours(G, num_nodes))


@dataclass(frozen=True, eq=False)
class Routes:
    """A trace with GPUs in the place of experts: those that serve each token's choices, which may be the same."""

    topk: np.ndarray  #: (tokens, layers, k) int32
    num_experts: int  #: G

    @property
    def tokens(self) -> int:
        """Tokens of the trace."""
        return len(self.topk)

    def shares(self) -> np.ndarray:
        """Each GPU serves its own rows, (layers, G, G) float64."""
        return np.tile(np.eye(self.num_experts), (self.topk.shape[1], 1, 1))


def routes(trace: RoutingTrace, copies: Copies) -> Routes:
    """The GPUs that serve the tokens of a trace, by `choose`.

    Raises
    ------
    ValueError
        If the map is of other layers or experts than the trace.
    """
    copies.check_fits(trace.topk.shape[1], trace.num_experts)
    source = sources(trace.tokens, copies.num_gpus)
    of_layers = [choose(trace.topk[:, l], source, held, copies.num_nodes) for l, held in enumerate(copies.held)]
    return Routes(np.stack(of_layers, axis=1), copies.num_gpus)


def neighbours(num_gpus: int, num_nodes: int) -> np.ndarray:
    """The GPUs of each GPU's node as a set, (G, words) uint64 of `bits.packed`."""
    node = np.arange(num_gpus) * num_nodes // num_gpus
    return packed(node[:, None] == node)


@numba.njit(cache=True, nogil=True)
def _choose(topk, source, held, near):
    tokens, k = topk.shape
    chosen, batch = np.empty((tokens, k), np.int32), np.zeros(len(near), np.int64)
    homes, sets = homes_of(held), new_sets(near)
    for t in range(tokens):
        own = source[t]
        choose_of_token(topk[t], own, batch[own], held, homes, near, sets, chosen[t])
        batch[own] += 1
    return chosen


@numba.njit(cache=True, nogil=True)
def homes_of(held):
    """The GPU of each expert that has a single copy, (E,) int32; -1 for the others."""
    homes = np.empty(len(held), np.int32)
    for e in range(len(held)):
        homes[e] = _nth(held, e, held, e, 0) if size(held[e]) == 1 else -1
    return homes


@numba.njit(cache=True, nogil=True)
def new_sets(near):
    """Room for the two sets of GPUs that a token needs while it chooses, (2, words)."""
    return np.empty((2, near.shape[1]), np.uint64)


@numba.njit(cache=True, nogil=True, inline="always")
def choose_of_token(experts, own, number, held, homes, near, sets, chosen):
    """Write the GPUs of one token's experts into ``chosen`` (k,).

    ``held`` (E, words) has the GPUs of each expert, ``homes`` is of `homes_of`, and ``near`` of `neighbours`. ``own``
    is the token's GPU, and ``number`` its number in that GPU's batch. ``sets`` is of `new_sets`.
    """
    clear(sets, VISITED)
    put(sets, VISITED, own)
    for j in range(len(experts)):
        chosen[j] = homes[experts[j]]
        if chosen[j] >= 0:
            put(sets, VISITED, chosen[j])
    for j in range(len(experts)):
        e = experts[j]
        if homes[e] < 0:
            chosen[j] = _nth(held, e, sets, VISITED, number + e)
            if chosen[j] < 0:
                _set_near(own, near, sets, chosen)
                chosen[j] = _nth(held, e, sets, NEAR, number + e)
            if chosen[j] < 0:
                chosen[j] = _nth(held, e, held, e, number + e)
            put(sets, VISITED, chosen[j])


@numba.njit(cache=True, nogil=True, inline="always")
def _set_near(own, near, sets, chosen):
    """Make ``NEAR`` the GPUs on nodes of a token's own GPU and of those that it has chosen already."""
    for w in range(near.shape[1]):
        sets[NEAR, w] = near[own, w]
    for gpu in chosen:
        if gpu >= 0:
            for w in range(near.shape[1]):
                sets[NEAR, w] |= near[gpu, w]


@numba.njit(cache=True, nogil=True)
def visits_of_token(chosen, near, sets):
    """How many GPUs and nodes a token goes to that chose these GPUs (k,)."""
    clear(sets, VISITED)
    clear(sets, NEAR)
    gpus = nodes = 0
    for gpu in chosen:
        gpus += not has(sets, VISITED, gpu)
        put(sets, VISITED, gpu)
        nodes += not has(sets, NEAR, gpu)
        for w in range(near.shape[1]):
            sets[NEAR, w] |= near[gpu, w]
    return gpus, nodes


@numba.njit(cache=True, nogil=True, inline="always")
def _nth(these, i, those, j, turn):
    """The member of number ``turn``, counted round and round, of what two sets have in common, or -1 for nothing."""
    common = 0
    for w in range(these.shape[1]):
        common += bits_set(these[i, w] & those[j, w])
    if common == 0:
        return -1
    left = turn % common
    for w in range(these.shape[1]):
        word = these[i, w] & those[j, w]
        if left < bits_set(word):
            for _ in range(left):
                word &= word - ONE
            return 64 * w + bits_set((word & ~(word - ONE)) - ONE)
        left -= bits_set(word)
    return -1
