"""MoETuner's first integer program (arXiv 2502.06643, ILP 1): the experts of a layer into clusters of equal load.

x[c, e] = 1 if expert e is in cluster c; minimise sum_c |T_c - mean T|, T_c = sum_e x[c, e] P[e]. The printed form lacks
two constraints that are here: each expert is in exactly one cluster, and a cluster has at most so many experts. Each
layer starts from a packing, and from a bound that needs no solver: where the two meet, the solver has nothing to do.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.placement.baselines import pack
from moeblaze_ref.placement.bounds import Bounds, equal
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.maps import check_gpus
from moeblaze_ref.placement.solver import DEFAULT_SOLVER, TIME_LIMIT, check_time_limit, minimise, new_model, total


@dataclass(frozen=True, eq=False)
class Clusters:
    """The clusters that ILP 1 found.

    Parameters
    ----------
    of_expert : array (layers, E) int32
        Cluster of each expert.
    objective : array (layers,)
        sum_c |T_c - mean T|, tokens.
    bound : array (layers,)
        Proven: no clusters do better.
    most : array (layers,)
        max_c T_c, tokens.
    least_most : array (layers,)
        Proven: no clusters that deviate as little have a smaller maximum.
    seconds : float
    cut : bool
        Whether the time limit ended a solver, so that another run may find other clusters.
    """

    of_expert: np.ndarray
    objective: np.ndarray
    bound: np.ndarray
    most: np.ndarray
    least_most: np.ndarray
    seconds: float
    cut: bool = False

    @property
    def gap(self) -> float:
        """Largest excess of a layer's fullest cluster over the best possible load, as a fraction of the latter.

        Not of ILP 1's objective: that is often 0 or near it, so that a share of it says little; see `proven` for it.
        """
        return float(np.max(self.most / np.maximum(self.least_most, 1) - 1, initial=0.0))

    @property
    def proven(self) -> bool:
        """Every layer's deviation is proven to be the least."""
        return bool((self.objective <= self.bound + 1e-6).all())


def cluster_experts(
    P: np.ndarray,
    num_clusters: int,
    bounds: Bounds | None = None,
    solver: str = DEFAULT_SOLVER,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
) -> Clusters:
    """ILP 1: the clusters of every layer whose loads differ least, of those the ones with the smallest maximum.

    Parameters
    ----------
    P : array (layers, E) int64
        Tokens of each expert.
    num_clusters : int
        G.
    bounds : Bounds, optional
        Experts of a cluster; by default `bounds.equal`. The paper's form is `bounds.printed`.
    solver : str
        One of ``solver.SOLVERS``.
    time_limit : float
        Seconds for all layers. Solvers get work that takes less: each layer that packing does not solve gets its share.
    seed : int
        The same seed finds the same clusters, unless the time limit ends a solver.

    Raises
    ------
    ValueError, TypeError
        If there are more clusters than experts, the bounds are infeasible, or there is no such solver.
    """
    checks.check_array("P", P, 2, ("int64",))
    _, E = P.shape
    check_gpus(num_clusters, E)
    check_time_limit(time_limit)
    bounds = bounds or equal(E, num_clusters)
    bounds.check_feasible(E, num_clusters)
    began = time.perf_counter()
    deadline, order = Deadline(time_limit), np.argsort(-P, axis=1, kind="stable")
    packed = [_packed(load[heaviest], num_clusters, bounds) for load, heaviest in zip(P, order, strict=True)]
    seconds = time_limit / max(sum(one.improvable for one in packed), 1)
    solve = partial(minimise, solver=solver, seconds=seconds, deadline=deadline, seed=seed)
    found = [_improved(one, bounds, solve, deadline) if one.improvable else one for one in packed]
    of_expert = np.empty(P.shape, np.int32)
    np.put_along_axis(of_expert, order, np.stack([one.clusters for one in found]), axis=1)
    objective, bound, most, least_most = np.array(
        [(one.deviation / num_clusters, one.bound / num_clusters, one.most, one.least_most) for one in found]
    ).T
    return Clusters(of_expert, objective, bound, most, least_most, time.perf_counter() - began, deadline.cut)


@dataclass(frozen=True, eq=False)
class _Packed:
    """The clusters of one layer, and what is proven of them."""

    p: np.ndarray  #: (E,) loads, heaviest first
    G: int
    clusters: np.ndarray  #: (E,) cluster of each expert
    bound: int  #: of the deviation
    least_most: int  #: of the fullest cluster

    @property
    def deviation(self) -> int:
        return _deviation(self.p, self.clusters, self.G)

    @property
    def most(self) -> int:
        return _sums(self.p, self.clusters, self.G).max()

    @property
    def improvable(self) -> bool:
        return self.deviation > self.bound or self.most > self.least_most


def _packed(p, G, bounds):
    clusters = _exchange(p, pack(p, G, bounds), G)
    return _Packed(p, G, clusters, deviation_bound(p, G, bounds), most_bound(p, G, bounds))


def _improved(packed, bounds, solve, deadline):
    """Solve ILP 1 with its printed objective, then for the smallest maximum among clusters that deviate as little."""
    if packed.deviation > packed.bound and not deadline.over():
        layer = _Layer(packed.p, packed.G, bounds, packed.bound)
        clusters, proven = _solved(layer, layer.deviation, _deviation, packed, solve)
        packed = replace(packed, clusters=clusters, bound=max(packed.bound, proven))
    if packed.deviation <= packed.bound and packed.most > packed.least_most and not deadline.over():
        layer = _Layer(packed.p, packed.G, bounds, packed.bound)
        layer.model.add_linear_constraint(layer.deviation <= packed.bound)
        layer.model.add_linear_constraint(layer.most >= packed.G * packed.least_most)
        clusters, proven = _solved(layer, layer.most, lambda *of: _sums(*of).max(), packed, solve)
        packed = replace(packed, clusters=clusters, least_most=max(packed.least_most, -(-proven // packed.G)))
    return packed


def _sums(p, clusters, G):
    return np.bincount(clusters, p, minlength=G).astype(np.int64)  # (G,)


def _deviation(p, clusters, G):
    """G * sum_c |T_c - mean T|: an integer."""
    return int(np.abs(G * _sums(p, clusters, G) - p.sum()).sum())


def deviation_bound(p: np.ndarray, G: int, bounds: Bounds) -> int:
    """G * sum_c |T_c - mean T| is at least this, by arithmetic alone, for loads ``p`` (E,), heaviest first.

    Two facts: sums are integers, so that all equal the mean only if G divides their total; and an expert with more
    than the mean (and its bounds' least company) puts its cluster over the mean, however the others are placed.
    """
    remainder = int(p.sum()) % G
    over = np.maximum(G * p - p.sum(), 0).sum()
    return int(max(2 * remainder * (G - remainder), 2 * over, 2 * (G * _heaviest_cluster(p, bounds) - p.sum())))


def most_bound(p: np.ndarray, G: int, bounds: Bounds) -> int:
    """max_c T_c is at least this: the mean rounded up, or the heaviest expert with its least company."""
    return max(-(-int(p.sum()) // G), _heaviest_cluster(p, bounds))


def _heaviest_cluster(p, bounds):
    company = max(bounds.least - 1, 0)
    return int(p[0] + p[len(p) - company :].sum())


def _exchange(p, clusters, G):
    """Swap two experts of different clusters while that brings the sums closer to their mean."""
    clusters, E = clusters.copy(), len(p)
    differ = p[:, None] - p[None]  # (E, E): what e's cluster loses to f's
    for _ in range(E * E):
        off = (G * _sums(p, clusters, G) - p.sum())[clusters]  # (E,)
        now = np.abs(off)[:, None] + np.abs(off)[None]
        then = np.abs(off[:, None] - G * differ) + np.abs(off[None] + G * differ)
        gain = np.where(clusters[:, None] != clusters[None], now - then, 0)
        e, f = divmod(int(gain.argmax()), E)
        if gain[e, f] <= 0:
            break
        clusters[e], clusters[f] = clusters[f], clusters[e]
    return clusters


class _Layer:
    """The model of ILP 1: loads heaviest first, all sums times G, so that the mean is an integer."""

    def __init__(self, p, G, bounds, least_deviation):
        self.model, self.G, self.E = new_model(), G, len(p)
        add, tokens = self.model.add_linear_constraint, int(p.sum())
        self.x = [[self.model.add_binary_variable() for _ in range(self.E)] for _ in range(G)]
        off = [self.model.add_integer_variable(lb=0, ub=G * tokens) for _ in range(G)]
        self.most = self.model.add_integer_variable(lb=0, ub=G * tokens)
        for e in range(self.E):
            add(total(self.x[c][e] for c in range(G)) == 1)
            for c in range(e + 1, G):  # clusters are alike: the first expert names cluster 0, and so on
                add(self.x[c][e] == 0)
        for c in range(G):
            sum_c = total(int(G * p[e]) * self.x[c][e] for e in range(self.E))
            add(lb=bounds.least, ub=bounds.most, expr=total(self.x[c]))
            add(off[c] >= sum_c - tokens)
            add(off[c] >= tokens - sum_c)
            add(self.most >= sum_c)
        self.deviation = total(off)
        add(self.deviation >= least_deviation)

    def start(self, clusters):
        """Values of x for known clusters, numbered by their first expert."""
        _, first, inverse = np.unique(clusters, return_index=True, return_inverse=True)
        named = np.argsort(np.argsort(first))[inverse]
        return {self.x[c][e]: float(named[e] == c) for c in range(self.G) for e in range(self.E)}

    def clusters(self, values):
        """(E,) int32."""
        x = np.array([[values[self.x[c][e]] for e in range(self.E)] for c in range(self.G)])
        return x.argmax(axis=0).astype(np.int32)


def _solved(layer, objective, value, packed, solve):
    """(clusters, proven bound): the solver's if their ``value`` is below that of those known, by its objective."""
    layer.model.minimize(objective)
    found = solve(layer.model, start=layer.start(packed.clusters))
    if found is None:
        return packed.clusters, 0
    better = min(packed.clusters, layer.clusters(found.values), key=lambda one: value(packed.p, one, packed.G))
    return better, found.bound
