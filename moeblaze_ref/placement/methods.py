"""Every method on the same trace: fitted to a sample of its sequences, evaluated on the held-out ones."""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import annealing, baselines
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.ilp import moetuner
from moeblaze_ref.placement.joint import LIMIT, LIMITS, check_limit, joint, search
from moeblaze_ref.placement.maps import Placement, check_gpus
from moeblaze_ref.placement.simulate import STEP_TOKENS, Cluster, balance, cross_share, loads, step, transitions
from moeblaze_ref.placement.solver import DEFAULT_SOLVER, SOLVERS, TIME_LIMIT, check_installed, check_time_limit
from moeblaze_ref.placement.trace import Profile, profile, split


@dataclass(frozen=True)
class Options:
    """Options of the methods that solve a program or search."""

    bounds: Bounds | None = None  #: experts of a layer on a GPU; by default as equal as can be
    solver: str = DEFAULT_SOLVER  #: one of ``solver.SOLVERS``
    time_limit: float = TIME_LIMIT  #: seconds of each of MoETuner's programs
    limit: float = LIMIT  #: of `joint`: a layer's fullest GPU over the mean
    steps: int = annealing.STEPS  #: of the annealing, in `joint` and `exflow`
    spare: int = 1  #: copies of experts on each GPU beyond E / G, of EPLB with replicas

    def __post_init__(self):
        checks.check_name("solver", self.solver, SOLVERS)
        check_time_limit(self.time_limit)
        check_limit(self.limit)
        checks.check_int("steps", self.steps, 0)
        checks.check_int("spare", self.spare, 1)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A method's result on a profile."""

    shares: np.ndarray  #: (layers, E, G), the share of each expert's tokens that each GPU serves
    placement: Placement | None  #: None where experts are replicated
    #: Of `moetuner`, on what it was fitted to: the larger of ``load_gap`` and of what ILP 2's objective may be above
    #: its least. None where nothing is proven.
    gap: float | None = None
    #: What the fullest GPU's load may be above the least, in the worst layer: not ILP 1's own objective, the deviation
    #: from the mean, which may be unproven where this is small.
    load_gap: float | None = None


def _placed(placement: Placement, gap: float | None = None, load_gap: float | None = None) -> Fitted:
    return Fitted(placement.shares(), placement, gap, load_gap)


def _eplb(sample: Profile, on: Cluster, spare: int) -> np.ndarray:
    per_gpu = -(-sample.E // on.num_gpus) + spare
    return baselines.eplb(sample, on.num_gpus, per_gpu * on.num_gpus, on.num_nodes)


def _packed_by_eplb(sample: Profile, on: Cluster, options: Options) -> Fitted:
    shares = _eplb(sample, on, spare=0)
    if sample.E % on.num_gpus:  # the last GPUs' places are filled with replicas
        return Fitted(shares, None)
    return _placed(Placement(shares.argmax(axis=2).astype(np.int32), on.num_gpus, sample.model))


def _moetuner(sample: Profile, on: Cluster, options: Options) -> Fitted:
    found = moetuner(sample, on, options.bounds, options.solver, options.time_limit)
    return _placed(found.placement, found.gap, found.clusters.gap)


def _joint(sample: Profile, on: Cluster, options: Options) -> Fitted:
    """Never slower by the model than any other method that places each expert once: those with a solver are solved."""
    found = [fit(sample, on, options).placement for fit in (_packed_by_eplb, _moetuner)]
    others = [placement for placement in found if placement is not None]
    return _placed(joint(sample, on, options.limit, options.bounds, options.steps, others=others))


METHODS: dict[str, Callable[[Profile, Cluster, Options], Fitted]] = {
    "contiguous": lambda sample, on, options: _placed(baselines.contiguous(sample, on.num_gpus)),
    "round-robin": lambda sample, on, options: _placed(baselines.round_robin(sample, on.num_gpus)),
    "greedy": lambda sample, on, options: _placed(baselines.greedy(sample, on.num_gpus, options.bounds)),
    "eplb": _packed_by_eplb,
    "eplb-replicas": lambda sample, on, options: Fitted(_eplb(sample, on, options.spare), None),
    "exflow": lambda sample, on, options: _placed(baselines.exflow(sample, on.num_gpus, options.steps)),
    "moetuner": _moetuner,
    "joint": _joint,
}


def named(texts: Iterable[str]) -> tuple[str, ...]:
    """The methods that texts name, each a name or several with commas; "all" is all of them.

    An unknown name is a ValueError that proposes the nearest one.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    if "all" in names:
        return tuple(METHODS)
    return tuple(dict.fromkeys(checks.check_name("method", name, METHODS) for name in names))


@dataclass(frozen=True)
class Row:
    """A method's numbers: on one split, or their medians over several."""

    method: str
    balance_mean: float  #: the fullest GPU's load over the mean, over layers
    balance_worst: float
    cross_share: float  #: of transitions between layers, those that change GPU
    step_ms: float  #: of the modelled step
    solve_s: float  #: of the method
    gap: float | None  #: as in `Fitted`
    load_gap: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for a record, without arrays."""
        return {name: value for name, value in vars(self).items() if name not in ("fitted", "load")}


@dataclass(frozen=True, eq=False)
class Trial(Row):
    """One method on one split."""

    seed: int | None  #: of the split; None if it was evaluated on what it was fitted to
    token_tail_ms: float  #: of the modelled step, slowest GPUs and slowest pairs: ``step_ms`` is their sum
    transfer_tail_ms: float
    fitted: Fitted
    load: np.ndarray  #: (layers, G), held-out tokens that each GPU got


def try_method(
    method: str, seed: int | None, fit: Callable[[], Fitted], held_out: Profile, on: Cluster, tokens: int
) -> list[Trial]:
    """Fit a method to a sample, and evaluate it on what was held out: one trial."""
    began = time.perf_counter()
    fitted = fit()
    seconds = time.perf_counter() - began
    load = loads(held_out, fitted.shares)
    each, model = balance(load), step(held_out, fitted.shares, on, tokens)
    trial = Trial(
        method=method,
        seed=seed,
        balance_mean=float(each.mean()),
        balance_worst=float(each.max()),
        cross_share=cross_share(transitions(held_out, fitted.shares)),
        step_ms=model.ms,
        token_tail_ms=1e3 * float(model.compute_s.sum()),
        transfer_tail_ms=1e3 * float(model.transfer_s.sum()),
        solve_s=seconds,
        gap=fitted.gap,
        load_gap=fitted.load_gap,
        fitted=fitted,
        load=load,
    )
    return [trial]


def jobs(
    trace: RoutingTrace,
    on: Cluster,
    methods: Collection[str] = tuple(METHODS),
    splits: int = 1,
    options: Options = Options(),
    tokens: int = STEP_TOKENS,
) -> list[Callable[[], list[Trial]]]:
    """A job for every method on every split: random halves of the sequences, seeds 0, 1, and so on.

    Each returns a list of one Trial. Without splits the methods are fitted to the whole trace, and evaluated on it too.
    ``tokens`` are those of the modelled step.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown, the solver is not installed, there are more GPUs than experts, the bounds are infeasible,
        or the trace has no tokens or too few sequences to split.
    """
    methods = named(methods)
    check_installed(options.solver)
    checks.check_int("splits", splits, 0)
    checks.check_int("tokens", tokens, 1)
    check_gpus(on.num_gpus, trace.num_experts)
    if options.bounds is not None:
        options.bounds.check_feasible(trace.num_experts, on.num_gpus)
    if not trace.tokens:
        raise ValueError("the trace has no tokens: there is nothing to place by")
    seeds: list[int | None] = [*range(splits)] or [None]
    halves = [(trace, trace) if seed is None else split(trace, seed) for seed in seeds]
    pairs = [tuple(map(profile, pair)) for pair in halves]
    return [
        partial(try_method, method, seed, partial(METHODS[method], sample, on, options), held_out, on, tokens)
        for seed, (sample, held_out) in zip(seeds, pairs, strict=True)
        for method in methods
    ]


def curve(
    trace: RoutingTrace,
    on: Cluster,
    options: Options = Options(),
    limits: Sequence[float] = LIMITS,
    tokens: int = STEP_TOKENS,
) -> list[Callable[[], list[Trial]]]:
    """Jobs for the Pareto curve of load against crossings: the search of `joint` under each limit, without baselines.

    The trace's first split decides: fitted to one half of the sequences, evaluated on the other.
    """
    sample, held_out = map(profile, split(trace, 0))
    fits = [partial(_searched, sample, on, limit, options) for limit in limits]
    return [partial(try_method, "joint", 0, fit, held_out, on, tokens) for fit in fits]


def _searched(sample: Profile, on: Cluster, limit: float, options: Options) -> Fitted:
    return _placed(search(sample, on, limit, options.bounds, options.steps))


def medians(trials: list[Trial]) -> list[Row]:
    """A row a method, in the order of their first trials; gaps are null where a method proves nothing."""
    rows = []
    for method in dict.fromkeys(trial.method for trial in trials):
        of_method = [trial for trial in trials if trial.method == method]
        names = (field.name for field in fields(Row) if field.name != "method")
        numbers: dict[str, Any] = {name: _median([getattr(trial, name) for trial in of_method]) for name in names}
        rows.append(Row(method, **numbers))
    return rows


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def fastest_map(trials: list[Trial]) -> Placement:
    """Return the placement with the shortest modelled step, among those of the first split.

    Raises
    ------
    ValueError
        If none of the methods places every expert exactly once.
    """
    first = [trial for trial in trials if trial.seed == trials[0].seed]
    placed = [(trial.step_ms, trial.fitted.placement) for trial in first if trial.fitted.placement is not None]
    if not placed:
        raise ValueError("no map to write: the methods chosen replicate experts, but a map has each exactly once")
    return min(placed, key=lambda one: one[0])[1]
