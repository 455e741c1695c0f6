"""Every method on the same trace: fitted to a sample of its sequences, evaluated on the held-out ones."""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import annealing, baselines, dedup_copies, traffic
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.copies import Routes, routes
from moeblaze_ref.placement.counted import Counted
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.dedup import SWAPS, dedup
from moeblaze_ref.placement.ilp import moetuner
from moeblaze_ref.placement.joint import LIMIT, LIMITS, check_limit, joint, search
from moeblaze_ref.placement.maps import Copies, Placement, check_gpus
from moeblaze_ref.placement.simulate import STEP_TOKENS, Cluster, balance, cross_share, loads, step, transitions
from moeblaze_ref.placement.solver import DEFAULT_SOLVER, SOLVERS, TIME_LIMIT, check_installed, check_time_limit
from moeblaze_ref.placement.trace import Profile, counts, profile, split
from moeblaze_ref.placement.traffic import Runtime

# Objectives of the default search, by name, and the row's time by which the map to write is chosen: of tokens that come
# home after every layer, or that hop from the GPU of an expert to that of the next layer's.
OBJECTIVES = {"dedup": "runtime_ms", "hops": "step_ms"}
# GPUs above which a method is not tried, and why.
LARGEST = {
    "exflow": (32, "its search counts G * G pairs of GPUs for every swap"),
    "moetuner": (32, "its second program has (layers - 1) * G**4 rows"),
    "joint": (32, "it solves moetuner's programs"),
}


MOST_SEED = 1_000_000  # of a search: layers make seeds of their own of it

# Methods that need the choices of tokens, not their counts alone.
FOLLOWING = ("exflow", "moetuner", "joint", "dedup", "dedup-copies")
# Methods whose maps hold copies of experts.
COPYING = ("eplb-nearest", "dedup-copies")

Traffic = RoutingTrace | Counted


@dataclass(frozen=True)
class Options:
    """Options of the methods that solve a program or search."""

    bounds: Bounds | None = None  #: experts of a layer on a GPU; by default as equal as can be
    solver: str = DEFAULT_SOLVER  #: one of ``solver.SOLVERS``
    time_limit: float = TIME_LIMIT  #: seconds of each method
    limit: float = LIMIT  #: of `joint`: a layer's fullest GPU over the mean
    steps: int = annealing.STEPS  #: of the annealing, in `joint` and `exflow`
    swaps: int = SWAPS  #: of `dedup`, in a layer, and of the first search of `dedup-copies`
    copy_steps: int = dedup_copies.STEPS  #: of `dedup-copies`, in a layer
    budget: int | None = None  #: experts of a layer on a GPU, where experts have copies; by default E / G and one more
    nodes: int | None = None  #: by which EPLB packs; by default those of the links
    groups: int | None = None  #: of experts, which EPLB keeps on one node; by default every expert is one
    seed: int = 0  #: of each solver and search
    costs: Runtime | None = None  #: of the step that brings tokens home; by default the measured ones on the same links

    def __post_init__(self):
        checks.check_name("solver", self.solver, SOLVERS)
        check_time_limit(self.time_limit)
        check_limit(self.limit)
        checks.check_int("steps", self.steps, 0)
        checks.check_int("swaps", self.swaps, 0)
        checks.check_int("copy_steps", self.copy_steps, 0)
        checks.check_int("seed", self.seed, 0, MOST_SEED)

    def runtime(self, on: Cluster) -> Runtime:
        """The costs of the step that brings tokens home."""
        return self.costs or Runtime(on)

    def experts_per_gpu(self, num_experts: int, num_gpus: int) -> int:
        """Experts of a layer on a GPU, where experts have copies."""
        return -(-num_experts // num_gpus) + 1 if self.budget is None else self.budget

    def check_fits(self, num_experts: int, num_gpus: int) -> None:
        """The bounds, the budget, the nodes and the groups are possible for so many experts and GPUs."""
        if self.bounds is not None:
            self.bounds.check_feasible(num_experts, num_gpus)
        if self.budget is not None:
            dedup_copies.check_budget(self.budget, num_experts, num_gpus)
        baselines.check_groups(
            num_experts, num_gpus, 1 if self.nodes is None else self.nodes, 1 if self.groups is None else self.groups
        )


@dataclass(frozen=True, eq=False)
class Fitted:
    """A method's result on a profile."""

    shares: np.ndarray  #: (layers, E, G), the share of each expert's tokens that each GPU serves
    placement: Placement | Copies | None  #: None where a token chooses at random among replicas
    #: Of `moetuner`, on what it was fitted to: the larger of ``load_gap`` and of what ILP 2's objective may be above
    #: its least. None where nothing is proven.
    gap: float | None = None
    #: How far the fullest GPU's load may be above the least, in the worst layer. It is not ILP 1's own objective, the
    #: deviation from the mean, which may be unproven where this is small.
    load_gap: float | None = None
    cut: bool = False  #: whether the time limit ended a search or a solver, so that another run may find another map
    skipped: str = ""  #: why a program was not solved; empty if it was, or there is none

    @property
    def status(self) -> str:
        """Return "solved" if a solver brought it to its gap, else "heuristic"."""
        return "heuristic" if self.gap is None or self.skipped else "solved"


def _placed(
    placement: Placement | Copies, gap: float | None = None, load_gap: float | None = None, cut: bool = False
) -> Fitted:
    return Fitted(placement.shares(), placement, gap, load_gap, cut)


def _searched(options: Options, search: Callable[[Deadline], Placement | Copies]) -> Fitted:
    """Let a search run until the time limit, which it gets as a deadline."""
    deadline = Deadline(options.time_limit)
    placement = search(deadline)
    return _placed(placement, cut=deadline.cut)


def _eplb(sample: Profile, on: Cluster, options: Options, per_gpu: int) -> np.ndarray:
    nodes = on.num_nodes if options.nodes is None else options.nodes
    return baselines.eplb(sample, on.num_gpus, per_gpu * on.num_gpus, nodes, options.groups)


def _packed_by_eplb(sample: Profile, on: Cluster, options: Options) -> Fitted:
    shares = _eplb(sample, on, options, -(-sample.E // on.num_gpus))
    if sample.E % on.num_gpus:  # the last GPUs' places are filled with replicas
        return Fitted(shares, None)
    return _placed(Placement(shares.argmax(axis=2).astype(np.int32), on.num_gpus, sample.model))


def _replicated_by_eplb(sample: Profile, on: Cluster, options: Options) -> np.ndarray:
    return _eplb(sample, on, options, options.experts_per_gpu(sample.E, on.num_gpus))


def _nearest_of_eplb(sample: Profile, on: Cluster, options: Options) -> Fitted:
    """EPLB's map, from which tokens choose by our rule; two copies of an expert on one GPU count as one.

    Of counts alone the choice is unknown, and copies share an expert's tokens evenly.
    """
    return _placed(Copies(_replicated_by_eplb(sample, on, options) > 0, on.num_nodes, sample.model))


def _moetuner(sample: Profile, on: Cluster, options: Options) -> Fitted:
    found = moetuner(sample, on, options.bounds, options.solver, options.time_limit, options.seed)
    shares, skipped = found.placement.shares(), found.gpus.skipped
    return Fitted(shares, found.placement, found.gap, found.clusters.gap, found.cut, skipped)


def _joint(sample: Profile, on: Cluster, options: Options) -> Fitted:
    """Never slower by the model than any other method that places each expert once: those with a solver are solved."""
    deadline, options = Deadline(options.time_limit), replace(options, time_limit=options.time_limit / 2)
    found = [method(sample, on, options) for method in (_packed_by_eplb, _moetuner)]
    others = [one.placement for one in found if isinstance(one.placement, Placement)]
    steps, within, seed = options.steps, options.bounds, options.seed
    placement = joint(sample, on, options.limit, within, steps, seed, others, deadline)
    return _placed(placement, cut=deadline.cut or any(one.cut for one in found))


def _exflow(sample: Profile, on: Cluster, options: Options) -> Fitted:
    exflow = baselines.exflow
    return _searched(options, lambda deadline: exflow(sample, on.num_gpus, options.steps, options.seed, deadline))


def _dedup(sample: Profile, on: Cluster, options: Options) -> Fitted:
    costs, within, swaps, seed = options.runtime(on), options.bounds, options.swaps, options.seed
    return _searched(options, lambda deadline: dedup(sample, costs, within, swaps, seed, deadline))


def _dedup_copies(sample: Profile, on: Cluster, options: Options) -> Fitted:
    G, nodes, steps, swaps, seed = on.num_gpus, on.num_nodes, options.copy_steps, options.swaps, options.seed
    budget, search = options.experts_per_gpu(sample.E, G), dedup_copies.dedup_copies
    return _searched(options, lambda deadline: search(sample, G, budget, nodes, steps, swaps, seed, deadline))


METHODS: dict[str, Callable[[Profile, Cluster, Options], Fitted]] = {
    "contiguous": lambda sample, on, options: _placed(baselines.contiguous(sample, on.num_gpus)),
    "round-robin": lambda sample, on, options: _placed(baselines.round_robin(sample, on.num_gpus)),
    "greedy": lambda sample, on, options: _placed(baselines.greedy(sample, on.num_gpus, options.bounds)),
    "eplb": _packed_by_eplb,
    "eplb-replicas": lambda sample, on, options: Fitted(_replicated_by_eplb(sample, on, options), None),
    "eplb-nearest": _nearest_of_eplb,
    "exflow": _exflow,
    "moetuner": _moetuner,
    "joint": _joint,
    "dedup": _dedup,
    "dedup-copies": _dedup_copies,
}


def fit(method: str, sample: Profile, on: Cluster, options: Options = Options()) -> Fitted:
    """Fit a method to a profile. What the method must compile does not count for its time limit."""
    compile_search(method)
    return METHODS[method](sample, on, options)


@cache
def compile_search(method: str) -> None:
    """Compile what a method searches with, once in a process, by a search without steps."""
    tiny = RoutingTrace(np.tile(np.arange(2, dtype=np.int16), (2, 2, 1)), 4)
    METHODS[method](profile(tiny), Cluster(np.ones((2, 2)), 1, 1.0), Options(steps=0, swaps=0, copy_steps=0))


def named(texts: Iterable[str]) -> tuple[str, ...]:
    """The methods that texts name, each a name or several with commas; "all" is all of them.

    An unknown name is a ValueError that proposes the nearest one.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    if "all" in names:
        return tuple(METHODS)
    return tuple(dict.fromkeys(checks.check_name("method", name, METHODS) for name in names))


def too_large(methods: Iterable[str], num_gpus: int) -> dict[str, str]:
    """Return why methods are not tried on so many GPUs, by name: one line each."""
    return {
        name: f"{name} is not tried on {num_gpus} GPUs, but on at most {LARGEST[name][0]}: {LARGEST[name][1]}"
        for name in methods
        if name in LARGEST and num_gpus > LARGEST[name][0]
    }


def not_tried(methods: Iterable[str], trace: Traffic, num_gpus: int) -> dict[str, str]:
    """Return why methods are not tried on a trace and so many GPUs, by name: one line each."""
    unknown = "the record has counts alone, but it needs the experts that each token chose"
    following = [name for name in methods if isinstance(trace, Counted) and name in FOLLOWING]
    return too_large(methods, num_gpus) | {name: f"{name} is not tried: {unknown}" for name in following}


@dataclass(frozen=True)
class Row:
    """A method's numbers: on one split, or their medians over several."""

    method: str
    balance_mean: float  #: the fullest GPU's load over the mean, over layers
    balance_worst: float
    # None where the record has counts alone: these figures depend on which experts a token chose.
    cross_share: float | None  #: of transitions between layers, those that change GPU
    step_ms: float | None  #: of the modelled step
    solve_s: float  #: of the method
    gap: float | None  #: as in `Fitted`
    load_gap: float | None
    distinct_gpus: float | None  #: D, of a token in a layer
    distinct_nodes: float | None  #: N
    runtime_ms: float | None  #: of the modelled step that brings tokens home
    batch_256: float | None  #: the fullest GPU's load over the mean in batches of so many tokens; None for too few
    batch_1024: float | None
    batch_4096: float | None
    batch_16384: float | None
    cut: bool  #: as in `Fitted`: of any split
    skipped: str  #: as in `Fitted`: of any split
    status: str  #: solved, to its gap, or heuristic: of any split

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for a record, without arrays."""
        return {name: value for name, value in vars(self).items() if name not in ("fitted", "load")}


@dataclass(frozen=True, eq=False)
class Trial(Row):
    """One method on one split."""

    seed: int | None  #: of the split; None if it was evaluated on what it was fitted to
    search_seed: int  #: of the method
    token_tail_ms: float | None  #: of the modelled step, slowest GPUs and slowest pairs: ``step_ms`` is their sum
    transfer_tail_ms: float | None
    fitted: Fitted
    load: np.ndarray  #: (layers, G), held-out tokens that each GPU got


@dataclass(frozen=True, eq=False)
class Job:
    """A method to fit and to evaluate on one split. It travels to other processes, so it makes the profiles itself.

    Parameters
    ----------
    method : str
        One of ``METHODS``, or the search of `joint` alone if there is a ``limit``.
    trace : RoutingTrace or Counted
    seed : int or None
        Of the split. None: fitted to the whole trace, and evaluated on it too.
    on : Cluster
    options : Options
    tokens : int
        Of the modelled steps.
    limit : float, optional
        Of the search: see `curve`.
    """

    method: str
    trace: Traffic
    seed: int | None
    on: Cluster
    options: Options
    tokens: int
    limit: float | None = None

    def __call__(self) -> list[Trial]:
        """Fit and evaluate: one trial."""
        sample, held_out = _halves(self.trace, self.seed)
        compile_search(self.method)
        began = time.perf_counter()
        fitted = self._fit(sample)
        seconds = time.perf_counter() - began
        return [self._evaluate(fitted, held_out, seconds)]

    def _fit(self, sample: Profile) -> Fitted:
        if self.limit is None:
            return fit(self.method, sample, self.on, self.options)
        options = self.options
        return _placed(search(sample, self.on, self.limit, options.bounds, options.steps, options.seed))

    def _evaluate(self, fitted: Fitted, held_out: Profile, seconds: float) -> Trial:
        counted, shares = held_out, fitted.shares
        followed: dict[str, float | None] = dict.fromkeys(FOLLOWED)
        if held_out.trace is not None:
            counted, trace, shares = _served(fitted, held_out)
            followed = self._followed(counted, trace, shares)
        load = loads(counted, shares)
        each = balance(load)
        return Trial(
            method=self.method,
            seed=self.seed,
            search_seed=self.options.seed,
            balance_mean=float(each.mean()),
            balance_worst=float(each.max()),
            solve_s=seconds,
            gap=fitted.gap,
            load_gap=fitted.load_gap,
            cut=fitted.cut,
            skipped=fitted.skipped,
            status=fitted.status,
            fitted=fitted,
            load=load,
            **followed,
        )

    def _followed(self, counted: Profile, trace: RoutingTrace | Routes, shares: np.ndarray) -> dict[str, float | None]:
        """Return the figures that depend on which experts each token chose, by the names of `Trial`."""
        model = step(counted, shares, self.on, self.tokens)
        costs, visited = self.options.runtime(self.on), traffic.visits(trace, shares)
        home = traffic.step(loads(counted, shares), visited, trace.tokens, costs, self.tokens)
        D, N = traffic.distinct(trace, shares, self.on.num_nodes)
        batches = traffic.batch_loads(trace, shares)
        return {
            "cross_share": cross_share(transitions(counted, shares)),
            "step_ms": model.ms,
            "token_tail_ms": 1e3 * float(model.compute_s.sum()),
            "transfer_tail_ms": 1e3 * float(model.transfer_s.sum()),
            "distinct_gpus": D,
            "distinct_nodes": N,
            "runtime_ms": home.ms,
        } | {f"batch_{size}": batches.get(size) for size in traffic.BATCHES}


FOLLOWED = (
    *("cross_share", "step_ms", "token_tail_ms", "transfer_tail_ms", "distinct_gpus", "distinct_nodes", "runtime_ms"),
    *(f"batch_{size}" for size in traffic.BATCHES),
)


def _served(fitted: Fitted, held_out: Profile) -> tuple[Profile, RoutingTrace | Routes, np.ndarray]:
    """Return what is counted under a placement: (layers and GPUs or experts, tokens, shares of GPUs).

    Tokens choose among the copies of a map by its rule, and are counted on the GPUs that they chose.
    """
    trace = held_out.traced()
    if not isinstance(fitted.placement, Copies):
        return held_out, trace, fitted.shares
    chosen = routes(trace, fitted.placement)
    return Profile(*counts(chosen.topk, chosen.num_experts), trace.tokens), chosen, chosen.shares()


@lru_cache(maxsize=1)
def _halves(trace: Traffic, seed: int | None) -> tuple[Profile, Profile]:
    """The profiles to fit to and to evaluate on."""
    if seed is None:
        whole = _profile(trace)
        return whole, whole
    sample, held_out = _split(trace, seed)
    return _profile(sample), _profile(held_out)


def _split(trace: Traffic, seed: int) -> tuple[Traffic, Traffic]:
    return trace.halves(seed) if isinstance(trace, Counted) else split(trace, seed)


def _profile(trace: Traffic) -> Profile:
    return trace.profile() if isinstance(trace, Counted) else profile(trace)


def jobs(
    trace: Traffic,
    on: Cluster,
    methods: Collection[str] = tuple(METHODS),
    splits: int = 1,
    options: Options = Options(),
    tokens: int = STEP_TOKENS,
    seeds: int = 1,
) -> list[Job]:
    """A job for every method on every split: random halves of the sequences, seeds 0, 1, and so on.

    Each returns a list of one Trial. With several ``seeds`` each is searched with that of the options, the next, and so
    on. Without splits the methods are fitted to the whole trace, and evaluated on it too.
    ``tokens`` are those of the modelled step.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown, a method is not tried on so many GPUs, the solver is not installed, there are more GPUs
        than experts, the bounds are infeasible, or the trace has no tokens or too few sequences to split.
    """
    methods = named(methods)
    for reason in not_tried(methods, trace, on.num_gpus).values():
        raise ValueError(reason)
    check_installed(options.solver)
    checks.check_int("splits", splits, 0)
    checks.check_int("tokens", tokens, 1)
    check_gpus(on.num_gpus, trace.num_experts)
    options.check_fits(trace.num_experts, on.num_gpus)
    if not trace.tokens:
        raise ValueError("the trace has no tokens: there is nothing to place by")
    if splits:
        _split(trace, 0)
    halves: list[int | None] = [*range(splits)] or [None]
    searches = [replace(options, seed=options.seed + n) for n in range(checks.check_int("seeds", seeds, 1))]
    return [Job(method, trace, half, on, each, tokens) for half in halves for each in searches for method in methods]


def curve(
    trace: Traffic,
    on: Cluster,
    options: Options = Options(),
    limits: Sequence[float] = LIMITS,
    tokens: int = STEP_TOKENS,
) -> list[Job]:
    """Jobs for the Pareto curve of load against crossings: the search of `joint` under each limit, without baselines.

    The trace's first split decides: fitted to one half of the sequences, evaluated on the other.
    """
    return [Job("joint", trace, 0, on, options, tokens, limit) for limit in limits]


def medians(trials: list[Trial]) -> list[Row]:
    """A row a method, in the order of their first trials; gaps are null where a method proves nothing."""
    rows = []
    for method in dict.fromkeys(trial.method for trial in trials):
        of_method = [trial for trial in trials if trial.method == method]
        names = (field.name for field in fields(Row) if field.name not in ("method", "cut", "skipped", "status"))
        numbers: dict[str, Any] = {name: _median([getattr(trial, name) for trial in of_method]) for name in names}
        cut, skipped = any(trial.cut for trial in of_method), max(trial.skipped for trial in of_method)
        status = min(trial.status for trial in of_method)  # heuristic, if any is
        rows.append(Row(method, cut=cut, skipped=skipped, status=status, **numbers))
    return rows


def first_of(trials: list[Trial]) -> list[Trial]:
    """The trials of the first split that have the first seed of the searches: one a method."""
    first = trials[0].seed, trials[0].search_seed
    return [trial for trial in trials if (trial.seed, trial.search_seed) == first]


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def fastest_map(
    trials: list[Trial], objective: str = "dedup", with_copies: bool = False, even: bool = False
) -> Placement | Copies:
    """Return the placement with the shortest modelled step of the objective, among those of the first split.

    Of counts alone it is the placement whose load is most even.

    Maps with copies need more memory, so they count only ``with_copies``, or where there is no other map. If ``even``,
    maps with as many experts on each GPU go before others.

    Raises
    ------
    ValueError
        If there is no such objective, or none of the methods has a map.
    """
    time_of = OBJECTIVES[checks.check_name("objective", objective, OBJECTIVES)]
    if trials[0].runtime_ms is None:
        time_of = "balance_mean"  # of counts alone no step is known
    first = first_of(trials)
    placed = [
        (getattr(trial, time_of), trial.fitted.placement) for trial in first if trial.fitted.placement is not None
    ]
    if not placed:
        raise ValueError("no map to write: tokens choose at random among the copies of the methods chosen")
    if even:
        placed = [one for one in placed if np.ptp(one[1].sizes()) == 0] or placed
    single = [one for one in placed if isinstance(one[1], Placement)]
    return min(placed if with_copies or not single else single, key=lambda one: one[0])[1]
