"""MoETuner's second integer program (arXiv 2502.06643, ILP 2): clusters onto GPUs, over all layers at once.

y[l, c, g] = 1 if cluster c of layer l is on GPU g; minimise the sum over transitions of the slowest pair's time, max
over g1 != g2 of C[l, c1, c2] / bandwidth[g1, g2], every GPU hosting as many experts as the others over all layers. It
starts from a chain of matchings, and from a bound that needs no solver (`links`). As printed, equation 8 has its sums
over clusters inside the maximum, which leaves no index to take it over: here the maximum is over pairs of GPUs.
"""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.links import chain, experts_hosted, misplaced, pair_bounds, slowest
from moeblaze_ref.placement.solver import (
    DEFAULT_SOLVER,
    TIME_LIMIT,
    Infeasible,
    check_time_limit,
    minimise,
    new_model,
    total,
)

EXACT = 1e7  # no known objective is more in whole numbers: with larger ones HiGHS has proven what is wrong
# Constraints: above, or after the deadline, the start and its bound are the result. Fewer are tried in a short time,
# which making them would fill: so many for each of its seconds.
MAX_ROWS, ROWS_A_SECOND = 400_000, 10_000


@dataclass(frozen=True, eq=False)
class GpuAssignment:
    """The GPU of every cluster, as ILP 2 found it.

    Parameters
    ----------
    gpus : array (layers, G) int32
        GPU of each cluster.
    objective : float
        Sum over transitions of the slowest pair's tokens, each link's in those of the fastest link.
    bound : float
        Proven: nothing does better.
    seconds : float
    skipped : str
        Why the solver found nothing or was not asked, so that the start counts; empty if that is not so.
    cut : bool
        Whether the time limit ended it, so that another run may find another assignment.
    """

    gpus: np.ndarray
    objective: float
    bound: float
    seconds: float
    skipped: str = ""
    cut: bool = False

    @property
    def gap(self) -> float:
        """Gap of the objective to the proven bound, as a fraction of the objective."""
        return max(self.objective - self.bound, 0) / self.objective if self.objective else 0.0


def assign_gpus(
    C: np.ndarray,
    cost: np.ndarray,
    sizes: np.ndarray,
    solver: str = DEFAULT_SOLVER,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
) -> GpuAssignment:
    """ILP 2: the GPU of every cluster in every layer, so that the slowest pairs are as fast as can be.

    Parameters
    ----------
    C : array (layers - 1, G, G) int64
        Tokens that go from cluster to cluster.
    cost : array (G, G) float64
        A token's time on each link over that on the fastest, 0 on the diagonal: `simulate.Cluster.cost`.
    sizes : array (layers, G) int64
        Experts of each cluster: every GPU hosts E * layers / G of them in all, rounded down or up.
    solver : str
        One of ``solver.SOLVERS``.
    time_limit : float
        Seconds. The solver gets work that takes less.
    seed : int
        The same seed finds the same assignment, unless the time limit ends it.

    Raises
    ------
    ValueError
        If no assignment gives every GPU as many experts, there is no such solver, or the time limit is out of range.
    """
    layers, G = sizes.shape
    checks.check_shape("C", C, {"layers - 1": layers - 1, "G": G, "G ": G})
    checks.check_shape("cost", cost, {"G": G, "G ": G})
    check_time_limit(time_limit)
    began, deadline = time.perf_counter(), Deadline(time_limit)
    hosted = int(sizes.sum() // G), int(-(-sizes.sum() // G))
    gpus = chain(C, cost, sizes, hosted, deadline)
    fits = misplaced(experts_hosted(gpus, sizes), hosted) == 0
    known = slowest(C, gpus, cost).sum() if fits else cost.max(initial=0) * C.max(axis=(1, 2), initial=0).sum()
    scale = min(1 if (cost == np.round(cost)).all() else 1000, EXACT / max(known, 1))  # times are whole numbers then
    least = np.floor(scale * pair_bounds(C, cost)).astype(np.int64)  # (layers - 1,)
    bound, skipped = int(least.sum()), ""
    if not fits or scale * slowest(C, gpus, cost).sum() >= bound + 1:
        # A pair that takes longer than all transitions of the known assignment is in no better one.
        time_of = np.minimum(np.floor(scale * cost * C[..., None, None]), np.ceil(scale * known))
        solve = partial(minimise, solver=solver, seconds=time_limit, deadline=deadline, seed=seed)
        most_rows = min(MAX_ROWS, int(ROWS_A_SECOND * time_limit))
        gpus, bound, skipped = _solve(
            C, cost, time_of, sizes, hosted, gpus if fits else None, least, solve, deadline, most_rows
        )
    seconds = time.perf_counter() - began
    return GpuAssignment(gpus, float(slowest(C, gpus, cost).sum()), bound / scale, seconds, skipped, deadline.cut)


def _solve(C, cost, time_of, sizes, hosted, start, least, solve, deadline, most_rows):
    """Solve ILP 2: (GPU of each cluster, bound, empty), or the start, its bound, and why it was not solved."""
    model = _Model(C, time_of, sizes, hosted, least)
    why = ""
    if deadline.over():
        why = "ILP 2 was not solved: the time limit was over"
    elif model.rows > most_rows:
        why = f"ILP 2 was not solved: it has {model.rows:,} rows, but at most {most_rows:,} are tried in the time limit"
    if why and start is not None:
        return start, int(least.sum()), why
    try:
        model.build()
        found = solve(model.model, start=model.start(start))
    except Infeasible:
        raise ValueError(
            f"infeasible: no assignment of these clusters gives every GPU {hosted[0]} to {hosted[1]} experts over all "
            f"layers (ILP 2's constraint on memory); bring the bounds on experts per GPU closer together"
        ) from None
    if found is None and start is None:
        raise ValueError(
            "ILP 2 found no assignment within the time limit; raise it, or use equal bounds on experts per GPU"
        )
    if found is None:
        return start, int(least.sum()), "ILP 2 was not solved: its solver found nothing within the time limit"
    gpus = model.gpus(found.values)
    if start is not None and slowest(C, start, cost).sum() <= slowest(C, gpus, cost).sum():
        gpus = start
    return gpus, max(int(least.sum()), found.bound), ""


class _Model:
    """The model of ILP 2, with the product of two binaries y y' written as y + y' - 1.

    ``time`` (layers - 1, G, G, G, G) holds C[l, c1, c2] times the cost of (g1, g2) in whole numbers, or what is as bad
    as that; z[l] is at least ``least``[l], so that a constraint matters only where the time is more.
    """

    def __init__(self, C, time, sizes, hosted, least):
        self.C, self.time, self.sizes, self.hosted, self.least = C, time, sizes, hosted, least
        self.matters = time > least[:, None, None, None, None]
        self.rows = int(self.matters.sum())
        self.model = new_model()

    def build(self):
        """Variables, constraints and objective."""
        (layers, G), model = self.sizes.shape, self.model
        add, every = model.add_linear_constraint, range(G)
        self.y = [[[model.add_binary_variable() for _ in every] for _ in every] for _ in range(layers)]
        for y in self.y:
            for i in every:
                add(total(y[i]) == 1)
                add(total(y[c][i] for c in every) == 1)
        for g in every:
            held = total(int(self.sizes[l, c]) * self.y[l][c][g] for l in range(layers) for c in every)
            add(lb=self.hosted[0], ub=self.hosted[1], expr=held)
        most = self.time.max(axis=(1, 2, 3, 4), initial=0)
        z = [model.add_integer_variable(lb=int(low), ub=int(high)) for low, high in zip(self.least, most, strict=True)]
        for l, c1, c2, g1, g2 in zip(*self.matters.nonzero(), strict=True):
            more = int(self.time[l, c1, c2, g1, g2] - self.least[l])
            add(z[l] >= int(self.least[l]) + more * (self.y[l][c1][g1] + self.y[l + 1][c2][g2] - 1))
        model.minimize(total(z))

    def start(self, gpus):
        """Values of y for a known assignment."""
        if gpus is None:
            return None
        layers, G = gpus.shape
        every = range(G)
        return {
            self.y[layer][c][g]: float(gpus[layer, c] == g) for layer in range(layers) for c in every for g in every
        }

    def gpus(self, values):
        """(layers, G) int32."""
        return (
            np.array([[[values[y] for y in row] for row in layer] for layer in self.y]).argmax(axis=2).astype(np.int32)
        )
