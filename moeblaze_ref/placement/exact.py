"""Exact references of both integer programs: exhaustive search, and a dynamic program over permutations.

Slow and sure, for few experts and few GPUs: what the solvers find must be as good.
"""

from itertools import product

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.links import SMALL, all_permutations, pair_times

MAX_CLUSTERINGS = 2_000_000


def best_clusters(load: np.ndarray, num_clusters: int, bounds: Bounds) -> tuple[float, int]:
    """ILP 1 of one layer by trying everything: (least sum_c |T_c - mean T|, the least max_c T_c among those).

    Parameters
    ----------
    load : array (E,) int64
        Tokens of each expert.
    num_clusters : int
        G: G**E may be at most ``MAX_CLUSTERINGS``.
    bounds : Bounds
        Experts of a cluster.

    Raises
    ------
    ValueError
        If there is too much to try, or the bounds are infeasible.
    """
    bounds.check_feasible(len(load), num_clusters)
    if num_clusters ** len(load) > MAX_CLUSTERINGS:
        raise ValueError(f"{num_clusters}**{len(load)} clusterings are too many to try: at most {MAX_CLUSTERINGS:,}")
    found = []
    for clusters in product(range(num_clusters), repeat=len(load)):
        sizes = np.bincount(clusters, minlength=num_clusters)
        if sizes.min() >= bounds.least and sizes.max() <= bounds.most:
            T = np.bincount(clusters, load, minlength=num_clusters)
            found.append((int(np.abs(num_clusters * T - load.sum()).sum()), int(T.max())))
    deviation, most = min(found)
    return deviation / num_clusters, most


def best_gpu_assignment(C: np.ndarray, cost: np.ndarray, sizes: np.ndarray) -> float:
    """ILP 2 by dynamic programming, layer by layer: the least sum of the slowest pairs' times.

    A state holds the GPUs of the last layer's clusters, one of G! permutations, and how many experts every GPU hosts so
    far. Of all ways to one state only the cheapest matters.

    Parameters
    ----------
    C : array (layers - 1, G, G)
        Tokens that go from cluster to cluster; G at most ``links.SMALL``.
    cost : array (G, G)
        Of a token on each link; 0 on the diagonal.
    sizes : array (layers, G)
        Experts of each cluster.

    Raises
    ------
    ValueError
        If there are too many GPUs, or no assignment gives every GPU its share of the experts.
    """
    G = sizes.shape[1]
    checks.check_int("G", G, 1, SMALL)
    least, most = sizes.sum() // G, -(-sizes.sum() // G)
    orders = all_permutations(G)  # (G!, G): cluster of each GPU
    cheapest = _spread({(0,) * G: np.zeros(len(orders))}, sizes[0][orders], most)
    for flow, size in zip(C, sizes[1:], strict=True):
        times = pair_times(flow, cost)  # (G!, G!)
        arrived = {hosted: (value[:, None] + times).min(axis=0) for hosted, value in cheapest.items()}
        cheapest = _spread(arrived, size[orders], most)
    ends = [value.min() for hosted, value in cheapest.items() if min(hosted) >= least]
    if not ends:
        raise ValueError(f"infeasible: no assignment gives every GPU {least} to {most} experts")
    return float(min(ends))


def _spread(values, added, most):
    """States after a layer: each permutation adds its clusters' sizes (G!, G) to what the GPUs host."""
    after: dict[tuple[int, ...], np.ndarray] = {}
    for hosted, value in values.items():
        for order, total in enumerate(np.array(hosted) + added):
            if total.max() <= most:
                state = after.setdefault(tuple(total.tolist()), np.full(len(added), np.inf))
                state[order] = min(state[order], value[order])
    return after
