"""Search one layer for few distinct GPUs and nodes a token, under the load of several samples, by simulated annealing.

A token visits a GPU if one of its experts is there. So the visits to a GPU are the size of a union: of the sets of
tokens that its experts have. Sets are bits, 64 tokens a word. A swap of two experts changes two unions, which are made
afresh: the count is exact, not a sum over pairs of experts. Compiled by Numba for the CPU.
"""

import numba
import numpy as np

from moeblaze_ref.placement.annealing import CLOCK, now
from moeblaze_ref.placement.bits import packed, size

HOT, COLD = 0.8, 0.024  # temperatures at both ends, in visits a token, times an expert's mean share of the tokens
FINE = 0.7  # of the steps: after them the best placement so far is kept


def token_sets(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """The tokens of each expert, as bits (E, words) uint64, from the choices (tokens, k) of one layer."""
    tokens = len(chosen)
    has = np.zeros((num_experts, tokens), bool)
    has[chosen, np.arange(tokens)[:, None]] = True
    return packed(has)


@numba.njit(cache=True)
def _union(sets, members, out):
    """Write the union of the sets of some experts into ``out`` (words,)."""
    out[:] = 0
    for member in members:
        row = sets[member]
        for w in range(len(out)):
            out[w] |= row[w]


@numba.njit(cache=True)
def _fullest(T, fullest, g, h, at_g, at_h):
    """The fullest GPU's load of each sample, (samples,), once g and h have the loads given instead of T's."""
    after = np.maximum(np.maximum(fullest, at_g), at_h)
    for s in range(len(after)):
        if T[g, s] >= fullest[s] or T[h, s] >= fullest[s]:  # the fullest GPU itself changes
            after[s] = max(at_g[s], at_h[s])
            for gpu in range(len(T)):
                if gpu != g and gpu != h:
                    after[s] = max(after[s], T[gpu, s])
    return after


@numba.njit(cache=True)
def _members(gpus, num_gpus):
    """(experts of each GPU (G, most), how many each has (G,), the place of each expert on its GPU (E,))."""
    sizes = np.bincount(gpus, minlength=num_gpus)
    members, place, filled = np.zeros((num_gpus, sizes.max()), np.int64), np.zeros_like(gpus), np.zeros_like(sizes)
    for e, gpu in enumerate(gpus):
        place[e] = filled[gpu]
        members[gpu, filled[gpu]] = e
        filled[gpu] += 1
    return members, sizes, place


@numba.njit(cache=True)
def value(gpus, sets, loads, num_gpus, per_node, load_weight, node_weight, tokens):
    """Return the objective of `anneal_layer`, counted afresh: (D + node_weight * N + load_weight * load, D, N, load).

    Parameters are those of `anneal_layer`.
    """
    members, sizes, _ = _members(gpus, num_gpus)
    T, union = np.zeros((num_gpus, loads.shape[1])), np.empty(sets.shape[1], np.uint64)
    of_gpus, of_nodes, load = 0, 0, 0.0
    for gpu in range(num_gpus):
        _union(sets, members[gpu, : sizes[gpu]], union)
        of_gpus += size(union)
    for node in range(num_gpus // per_node):
        _union(sets, np.flatnonzero(gpus // per_node == node), union)
        of_nodes += size(union)
    for e, gpu in enumerate(gpus):
        T[gpu] += loads[e]
    for s in range(loads.shape[1]):
        load += T[:, s].max() / loads.shape[1]
    D, N = of_gpus / tokens, of_nodes / tokens
    return D + node_weight * N + load_weight * load, D, N, load


@numba.njit(cache=True)
def _visits_to_node(unions, first, per_node, g, at_g, h, at_h, union):
    """Tokens that visit the node of GPUs ``first`` and on, once g and h have the unions given instead of theirs."""
    union[:] = 0
    for gpu in range(first, first + per_node):
        row = at_g if gpu == g else at_h if gpu == h else unions[gpu]
        for w in range(len(union)):
            union[w] |= row[w]
    return size(union)


@numba.njit(cache=True, nogil=True)
def anneal_layer(
    gpus, sets, loads, num_gpus, per_node, load_weight, node_weight, tokens, hot, cold, steps, seed, deadline
):
    """Swap experts of one layer, always if that lowers D + node_weight * N + load_weight * load, else by chance.

    Parameters
    ----------
    gpus : array (E,) int64
        Where to begin: the GPU of each expert. Each GPU keeps its number of experts.
    sets : array (E, words) uint64
        Of `token_sets`.
    loads : array (E, samples) float64
        Each expert's load in some samples of tokens, over the mean of a GPU. The load that counts is the fullest GPU's:
        its mean over the samples.
    num_gpus, per_node : int
        G, and how many neighbouring GPUs are a node.
    load_weight, node_weight : float
        What the load and N count for, in distinct GPUs a token.
    tokens : int
        Tokens of the sets.
    hot, cold : float
        Temperatures at both ends.
    steps, seed : int
        Swaps tried. The same seed finds the same placement.
    deadline : float
        Of `time.perf_counter`: there the search is cut.

    Returns
    -------
    gpus : array (E,) int64
        Never of a larger value than at the beginning.
    change : float
        Of the value, carried along from swap to swap.
    """
    np.random.seed(seed)
    E, W = sets.shape
    gpus = gpus.copy()
    members, sizes, place = _members(gpus, num_gpus)
    unions, T = np.zeros((num_gpus, W), np.uint64), np.zeros((num_gpus, loads.shape[1]))
    for gpu in range(num_gpus):
        _union(sets, members[gpu, : sizes[gpu]], unions[gpu])
    for e, gpu in enumerate(gpus):
        T[gpu] += loads[e]
    at_g, at_h, union = np.empty(W, np.uint64), np.empty(W, np.uint64), np.empty(W, np.uint64)
    of_gpus = np.array([size(words) for words in unions])
    of_nodes = np.array(
        [
            _visits_to_node(unions, n * per_node, per_node, -1, at_g, -1, at_h, union)
            for n in range(num_gpus // per_node)
        ]
    )
    fullest = np.array([T[:, s].max() for s in range(loads.shape[1])])
    best, change, least = gpus.copy(), 0.0, 0.0
    for s in range(steps):
        if s % CLOCK == 0 and now() > deadline:
            break
        e, f = np.random.randint(E), np.random.randint(E)
        g, h = gpus[e], gpus[f]
        if g == h:
            continue
        members[g, place[e]], members[h, place[f]] = f, e
        _union(sets, members[g, : sizes[g]], at_g)
        _union(sets, members[h, : sizes[h]], at_h)
        T_g, T_h = T[g] - loads[e] + loads[f], T[h] - loads[f] + loads[e]
        after = _fullest(T, fullest, g, h, T_g, T_h)
        to_g, to_h, a, b = size(at_g), size(at_h), g // per_node, h // per_node
        to_a, to_b = of_nodes[a], of_nodes[b]
        if a != b:
            to_a = _visits_to_node(unions, a * per_node, per_node, g, at_g, h, at_h, union)
            to_b = _visits_to_node(unions, b * per_node, per_node, g, at_g, h, at_h, union)
        more = to_g + to_h - of_gpus[g] - of_gpus[h] + node_weight * (to_a + to_b - of_nodes[a] - of_nodes[b])
        worse = more / tokens + load_weight * (after - fullest).mean()
        if worse > -hot * (cold / hot) ** (s / steps) * np.log(np.random.random()):
            members[g, place[e]], members[h, place[f]] = e, f  # back again
            continue
        gpus[e], gpus[f] = h, g
        place[e], place[f] = place[f], place[e]
        unions[g], unions[h], T[g], T[h], fullest = at_g, at_h, T_g, T_h, after
        of_gpus[g], of_gpus[h], of_nodes[a], of_nodes[b] = to_g, to_h, to_a, to_b
        change += worse
        if change < least and s >= FINE * steps:
            best[:], least = gpus, change
    return (gpus, change) if change < least else (best, least)
