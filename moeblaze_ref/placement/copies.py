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
from moeblaze_ref.placement.maps import Copies, check_nodes
from moeblaze_ref.placement.unions import bits_set

MOST_GPUS = 64  # their sets are bits of one word
ZERO, ONE = np.uint64(0), np.uint64(1)


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
    checks.check_int("num_gpus", G, 1, MOST_GPUS)
    check_nodes(num_nodes, G)
    for name, array, rank, limit, what in (("topk", topk, 2, E, "experts"), ("source", source, 1, G, "GPUs")):
        checks.check_array(name, array, rank, INTEGERS, contiguous=False)
        checks.check_index(name, array, limit, what)
    checks.check_shape("source", source, {"T": len(topk)})
    nowhere = checks.first(~held.any(axis=1))
    if nowhere:
        raise ValueError(f"expert {nowhere[0]} is on no GPU, but every expert needs one")
    return _choose(topk, source, bits_of(held), nodes_of(G, num_nodes), G)


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


def bits_of(mask: np.ndarray) -> np.ndarray:
    """Sets of GPUs as bits, (n,) uint64, from a mask (n, G)."""
    return (mask.astype(np.uint64) << np.arange(mask.shape[1], dtype=np.uint64)).sum(axis=1, dtype=np.uint64)


def nodes_of(num_gpus: int, num_nodes: int) -> np.ndarray:
    """The GPUs of each node as bits, (nodes,) uint64."""
    return bits_of(np.arange(num_gpus) * num_nodes // num_gpus == np.arange(num_nodes)[:, None])


@numba.njit(cache=True, nogil=True)
def _choose(topk, source, held, nodes, num_gpus):
    tokens, k = topk.shape
    chosen, batch = np.empty((tokens, k), np.int32), np.zeros(num_gpus, np.int64)
    for t in range(tokens):
        own = source[t]
        choose_of_token(topk[t], ONE << np.uint64(own), batch[own], held, nodes, chosen[t])
        batch[own] += 1
    return chosen


@numba.njit(cache=True, nogil=True)
def choose_of_token(experts, own, number, held, nodes, chosen):
    """Write the GPUs of one token's experts into ``chosen`` (k,), and return them as bits.

    ``held`` (E,), ``nodes`` and ``own`` are GPUs as bits; ``number`` is the token's number in its GPU's batch.
    """
    taken = ZERO
    for j, e in enumerate(experts):
        if held[e] & (held[e] - ONE) == ZERO:  # a single copy
            chosen[j] = bits_set(held[e] - ONE)
            taken |= held[e]
    for j, e in enumerate(experts):
        if held[e] & (held[e] - ONE) != ZERO:
            copy = _nth(_nearest(held[e], taken | own, nodes), number + e)
            chosen[j] = bits_set(copy - ONE)
            taken |= copy
    return taken


@numba.njit(cache=True, nogil=True)
def _nearest(copies, visited, nodes):
    """Copies on a GPU that is visited, else on a node that is visited, else all."""
    if copies & visited:
        return copies & visited
    near = ZERO
    for node in nodes:
        if visited & node:
            near |= copies & node
    return near if near else copies


@numba.njit(cache=True, nogil=True)
def _nth(gpus, turn):
    """The bit of number ``turn``, counted round and round."""
    for _ in range(turn % bits_set(gpus)):
        gpus &= gpus - ONE
    return gpus & ~(gpus - ONE)
