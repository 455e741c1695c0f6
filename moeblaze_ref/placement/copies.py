"""Which copy of an expert a token uses, where experts have several.

The rule needs no word from other GPUs: a token's choice depends on its experts, on the GPU where the token is, and on
its number in that GPU's batch. `parallel.layer` sends tokens by the same rule, so what is counted here is what it
sends.

A trace does not say on which GPUs its tokens were. By convention token t of a trace is on GPU t % G, where it is number
t // G of the batch (`sources`).
"""

import numba
import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import INTEGERS, RoutingTrace
from moeblaze_ref.placement.maps import Copies, check_nodes


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
    check_nodes(num_nodes, G)
    for name, array, rank, limit, what in (("topk", topk, 2, E, "experts"), ("source", source, 1, G, "GPUs")):
        checks.check_array(name, array, rank, INTEGERS, contiguous=False)
        checks.check_index(name, array, limit, what)
    checks.check_shape("source", source, {"T": len(topk)})
    nowhere = checks.first(~held.any(axis=1))
    if nowhere:
        raise ValueError(f"expert {nowhere[0]} is on no GPU, but every expert needs one")
    return _choose(topk, source, *gpus_of(held), G // num_nodes)


def routes(trace: RoutingTrace, copies: Copies) -> np.ndarray:
    """The GPU that serves each token's choices in every layer, (tokens, layers, k) int32, by `choose`.

    Raises
    ------
    ValueError
        If the map is of other layers or experts than the trace.
    """
    copies.check_fits(trace.topk.shape[1], trace.num_experts)
    source = sources(trace.tokens, copies.num_gpus)
    of_layers = [choose(trace.topk[:, l], source, held, copies.num_nodes) for l, held in enumerate(copies.held)]
    return np.stack(of_layers, axis=1)


def gpus_of(held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The GPUs of each expert, ascending, (E, G) int64, and how many of them are copies, (E,) int64."""
    return np.argsort(~held, axis=1, kind="stable"), held.sum(axis=1)


@numba.njit(cache=True, nogil=True)
def _choose(topk, source, gpus, count, per_node):
    tokens, k = topk.shape
    G = gpus.shape[1]
    chosen, batch = np.empty((tokens, k), np.int32), np.zeros(G, np.int64)
    for t in range(tokens):
        own = source[t]
        choose_of_token(topk[t], own, batch[own], gpus, count, per_node, chosen[t])
        batch[own] += 1
    return chosen


@numba.njit(cache=True, nogil=True)
def choose_of_token(experts, own, number, gpus, count, per_node, chosen):
    """Write the GPUs of one token's experts into ``chosen`` (k,); ``gpus`` and ``count`` are of `gpus_of`."""
    chosen[:] = -1
    for j, e in enumerate(experts):
        if count[e] == 1:
            chosen[j] = gpus[e, 0]
    for j, e in enumerate(experts):
        if count[e] > 1:
            chosen[j] = _nearest(gpus[e, : count[e]], own, number + e, per_node, chosen)


@numba.njit(cache=True, nogil=True)
def _nearest(copies, own, turn, per_node, chosen):
    """The GPU of number ``turn`` among the nearest copies, counted round and round."""
    distances = np.empty(len(copies), np.int64)
    for c, gpu in enumerate(copies):
        distances[c] = 0 if gpu == own else 1 if gpu // per_node == own // per_node else 2
        for other in chosen:
            if other >= 0:
                distances[c] = min(
                    distances[c], 0 if gpu == other else 1 if gpu // per_node == other // per_node else 2
                )
    nearest = distances == distances.min()
    left = turn % nearest.sum()
    for c, gpu in enumerate(copies):
        if nearest[c]:
            if left == 0:
                return gpu
            left -= 1
    return -1
