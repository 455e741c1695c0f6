"""Clusters on GPUs: the slowest pair of every transition, a bound on it, and a first guess for ILP 2.

C[l, c1, c2] tokens go from cluster c1 in layer l to cluster c2 in layer l + 1; ``gpus`` (layers, G) says which GPU each
cluster is on, a permutation in every layer; ``cost`` (G, G) is a token's time on each link, 0 on the diagonal.
"""

from itertools import combinations, permutations

import numpy as np

from moeblaze_ref.placement.deadlines import Deadline

SMALL = 5  # GPUs: 120 permutations


def on_gpus(C: np.ndarray, gpus: np.ndarray) -> np.ndarray:
    """C by GPUs instead of clusters, (layers - 1, G, G)."""
    clusters = np.argsort(gpus, axis=1)  # (layers, G): cluster of each GPU
    rows = np.take_along_axis(C, clusters[:-1, :, None], axis=1)
    return np.take_along_axis(rows, clusters[1:, None, :], axis=2)


def slowest(C: np.ndarray, gpus: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """The time of the slowest pair in every transition, (layers - 1,)."""
    return (on_gpus(C, gpus) * cost).max(axis=(1, 2), initial=0)


def all_permutations(G: int) -> np.ndarray:
    """Every order of G numbers, (G!, G)."""
    return np.array(list(permutations(range(G))))


def pair_times(flow: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """The slowest pair of one transition (G, G) for every cluster on every GPU on both sides, (G!, G!)."""
    orders = all_permutations(len(flow))  # cluster of each GPU
    after = flow[:, orders].swapaxes(0, 1)  # (G!, G, G): columns by GPU
    return np.stack([(after[:, before] * cost).max(axis=(1, 2)) for before in orders])


def pair_bounds(C: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return a lower bound on each transition's time, (layers - 1,), each for itself.

    Up to ``SMALL`` GPUs every permutation is tried. Beyond, every link counts as the fastest: what may stay on a GPU is
    then a matching of clusters, so at best the largest flows that share no cluster; the next one must travel.
    """
    if cost.shape[0] <= SMALL:
        return np.array([pair_times(flow, cost).min() for flow in C])
    fastest = cost[~np.eye(len(cost), dtype=bool)].min()
    return np.array([fastest * matching(flow)[1] for flow in C])


def matching(flow: np.ndarray) -> tuple[np.ndarray, float]:
    """(the cluster before that each cluster after stays with (G,), the largest flow that cannot stay)."""
    G, crossing = len(flow), 0
    stays, used = np.full(G, -1), np.zeros(G, bool)
    for before, after in zip(*np.unravel_index(np.argsort(-flow, axis=None, kind="stable"), flow.shape), strict=True):
        if not used[before] and stays[after] < 0:
            stays[after], used[before] = before, True
        elif not crossing:
            crossing = flow[before, after]
    return stays, crossing


def chain(
    C: np.ndarray, cost: np.ndarray, sizes: np.ndarray, hosted: tuple[int, int], deadline: Deadline
) -> np.ndarray:
    """A good guess: each layer follows the largest flows of the one before, then clusters swap GPUs while that helps.

    Parameters
    ----------
    C, cost : array
        As above.
    sizes : array (layers, G)
        Experts of each cluster.
    hosted : (int, int)
        The fewest and the most experts of a GPU over all layers; what is outside is mended before anything else.
    deadline : Deadline
        No layer is swept after it.

    Returns
    -------
    array (layers, G) int32
        Its GPUs may still host too few or too many: look.
    """
    G = sizes.shape[1]
    gpus = np.empty((len(C) + 1, G), np.int32)
    gpus[0] = np.arange(G)
    for layer, flow in enumerate(C):
        gpus[layer + 1] = gpus[layer, matching(flow)[0]]
    while _swap_sweep(C, cost, sizes, hosted, gpus, deadline):
        pass
    return gpus


def experts_hosted(gpus: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Experts of each GPU over all layers, (G,)."""
    return np.bincount(gpus.ravel(), sizes.ravel(), minlength=gpus.shape[1]).astype(int)


def misplaced(hosted_now: np.ndarray, hosted: tuple[int, int]) -> int:
    """Experts over and under what the GPUs may host."""
    least, most = hosted
    return int(np.maximum(hosted_now - most, 0).sum() + np.maximum(least - hosted_now, 0).sum())


def _swap_sweep(C, cost, sizes, hosted, gpus, deadline) -> bool:
    """Try every swap of two clusters' GPUs in every layer, in place; whether one helped."""
    helped = False
    for layer in range(len(gpus)):
        if deadline.over():
            return False
        around = slice(max(layer - 1, 0), layer + 1)  # the transitions before and after
        window = slice(max(layer - 1, 0), layer + 2)
        for first, second in combinations(range(gpus.shape[1]), 2):
            pair, swapped = [first, second], [second, first]
            now = _badness(C[around], cost, gpus[window], sizes, hosted, gpus)
            gpus[layer, pair] = gpus[layer, swapped]
            if _badness(C[around], cost, gpus[window], sizes, hosted, gpus) < now:
                helped = True
            else:
                gpus[layer, pair] = gpus[layer, swapped]
    return helped


def _badness(C, cost, window, sizes, hosted, gpus):
    return misplaced(experts_hosted(gpus, sizes), hosted), slowest(C, window, cost).sum()
