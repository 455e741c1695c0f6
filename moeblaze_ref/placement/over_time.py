"""Experiments over time: maps evaluated on other traffic than they were fitted to, and streams with new maps.

`shift_jobs` fits each method to traffic of one kind and evaluates it on traffic of every kind. `stream_jobs` replays a
trace under each method, with a new map after some tokens or never.
"""

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import methods
from moeblaze_ref.placement.maps import Copies
from moeblaze_ref.placement.replay import DISPATCHES, RULE, Batch, Stream, Traffic, mapped, observe, replay
from moeblaze_ref.placement.simulate import STEP_TOKENS
from moeblaze_ref.placement.trace import profile, split
from moeblaze_ref.placement.traffic import Runtime

THIRDS = ("first third", "middle third", "last third")


# Kinds of traffic -----------------------------------------------------------------------------------------------------


def by_kind(trace: RoutingTrace) -> np.ndarray:
    """The kind of text of each token, (tokens,) str: `seq_kind` of its sequence."""
    if trace.seq_kind is None or trace.seq is None:
        raise ValueError("the trace has no seq_kind, but traffic is told apart by it: use --by third")
    return trace.seq_kind[trace.seq]


def by_third(trace: RoutingTrace) -> np.ndarray:
    """The third of its sequence in which each token stands, (tokens,) str: token i of n is in third 3 * i // n."""
    if trace.seq is None:
        raise ValueError("the trace has no seq, but thirds of sequences are asked for")
    _, first, inverse, number = np.unique(trace.seq, return_index=True, return_inverse=True, return_counts=True)
    place = np.arange(trace.tokens) - first[inverse]
    return np.array(THIRDS)[3 * place // number[inverse]]


LABELS: dict[str, Callable[[RoutingTrace], np.ndarray]] = {"kind": by_kind, "third": by_third}


def changes(trace: RoutingTrace) -> list[tuple[int, str]]:
    """Where a stream of a trace begins another kind of text: (number of the token, kind); empty if unknown."""
    if trace.seq_kind is None or trace.seq is None:
        return []
    kind = by_kind(trace)
    begins = np.flatnonzero(np.append(True, kind[1:] != kind[:-1])).tolist()
    return [(first, str(kind[first])) for first in begins]


# Fitted on one kind, evaluated on another -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift(Traffic):
    """A method on held-out traffic of one kind, fitted to traffic of another or the same kind."""

    method: str
    fitted: str  #: the kind that it was fitted to
    evaluated: str  #: the kind that it was evaluated on
    seed: int  #: of the split of the sequences


@dataclass(frozen=True, eq=False)
class ShiftJob:
    """Fit a method to one kind in one half of the sequences, evaluate it on every kind in the other half."""

    trace: RoutingTrace
    by: str  #: one of ``LABELS``
    kinds: tuple[str, ...]  #: on which it is evaluated
    method: str
    fitted: str
    seed: int
    costs: Runtime
    options: methods.Options

    def __call__(self) -> list[Shift]:
        """A row for each kind."""
        sample, held_out = split(self.trace, self.seed)
        fitted = methods.fit(self.method, profile(self._of(sample, self.fitted)), self.costs.on, self.options)
        placement = mapped(self.method, fitted)
        return [
            Shift(
                **vars(observe(self._of(held_out, kind), placement, self.costs, of=STEP_TOKENS)),
                method=self.method,
                fitted=self.fitted,
                evaluated=kind,
                seed=self.seed,
            )
            for kind in self.kinds
        ]

    def _of(self, trace: RoutingTrace, kind: str) -> RoutingTrace:
        chosen = LABELS[self.by](trace) == kind
        if not chosen.any():
            raise ValueError(f"split {self.seed} has a half without traffic of kind {kind!r}: leave it out by --kinds")
        return trace.of(chosen)


def shift_jobs(
    trace: RoutingTrace,
    by: str,
    kinds: Sequence[str],
    named: Collection[str],
    seeds: int,
    costs: Runtime,
    options: methods.Options,
) -> list[ShiftJob]:
    """A job for each method, each kind to fit to, and each of the seeds 0, 1, and so on.

    ``kinds`` are chosen of the trace's; none: all of them.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown, the trace lacks what tells its kinds apart, or it has fewer than two of them.
    """
    labels = LABELS[checks.check_name("way to tell traffic apart", by, LABELS)](trace)
    known = np.unique(labels).tolist()
    chosen = tuple(checks.check_name("kind of traffic", kind, known) for kind in kinds) or tuple(known)
    if len(set(chosen)) < 2:
        raise ValueError(f"the traffic is of kind {', '.join(chosen)} alone, but two kinds are compared")
    checks.check_int("seeds", seeds, 1)
    split(trace, 0)
    return [
        ShiftJob(trace, by, chosen, method, kind, seed, costs, options)
        for method in methods.named(named)
        for kind in chosen
        for seed in range(seeds)
    ]


@dataclass(frozen=True)
class Loss(Traffic):
    """Medians over seeds of a method, fitted to one kind and evaluated on another, and what the shift loses."""

    method: str
    fitted: str
    evaluated: str
    lost_load: float  #: median over seeds of the load above that of the map fitted to the evaluated kind
    lost_gpus: float  #: the same of D
    lost_nodes: float  #: the same of N
    lost_share: float  #: the same of the step's time, as a share


def losses(rows: Sequence[Shift]) -> list[Loss]:
    """A row for each method and pair of kinds, those of the same kind too, in the order of the rows."""
    of = {(row.method, row.fitted, row.evaluated, row.seed): row for row in rows}
    seeds = sorted({seed for *_, seed in of})
    return [
        _loss([(of[method, fitted, evaluated, seed], of[method, evaluated, evaluated, seed]) for seed in seeds])
        for method, fitted, evaluated in dict.fromkeys(key[:3] for key in of)
    ]


def _loss(pairs: list[tuple[Shift, Shift]]) -> Loss:
    """Medians over pairs of a row and the row of the same seed that was fitted to the evaluated kind."""

    def middle(value: Callable[[Shift, Shift], float]) -> float:
        return statistics.median(value(here, same) for here, same in pairs)

    here, _ = pairs[0]
    return Loss(
        load=middle(lambda here, _: here.load),
        distinct_gpus=middle(lambda here, _: here.distinct_gpus),
        distinct_nodes=middle(lambda here, _: here.distinct_nodes),
        ms=middle(lambda here, _: here.ms),
        method=here.method,
        fitted=here.fitted,
        evaluated=here.evaluated,
        lost_load=middle(lambda here, same: here.load - same.load),
        lost_gpus=middle(lambda here, same: here.distinct_gpus - same.distinct_gpus),
        lost_nodes=middle(lambda here, same: here.distinct_nodes - same.distinct_nodes),
        lost_share=middle(lambda here, same: here.ms / same.ms - 1),
    )


# Streams --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A stream under one method, one time between maps, and one dispatch."""

    method: str
    every: int | None  #: tokens after which the map is fitted anew; None: never
    dispatch: str | None  #: None where no expert has copies
    batches: list[Batch]

    def as_dict(self) -> dict[str, Any]:
        """Return what a record holds: the means of a `Summary`, and each batch."""
        return summary(self) | {"batches": [asdict(batch) for batch in self.batches]}


def summary(found: Replayed) -> dict[str, Any]:
    """Means over the batches of a stream: ``ms`` is of a step without moves, ``moves_ms`` what moves add to it."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(batch, name) for batch in found.batches)

    means = {name: mean(name) for name in ("load", "distinct_gpus", "distinct_nodes", "ms", "moves_ms")}
    return {
        **{"method": found.method, "every": found.every, "dispatch": found.dispatch},
        **means,
        "worst_load": max(batch.load for batch in found.batches),
        "total_ms": means["ms"] + means["moves_ms"],
        "moved": sum(batch.moved for batch in found.batches),
    }


@dataclass(frozen=True, eq=False)
class StreamJob:
    """Replay a stream under one method, for every time between maps and every dispatch. Maps are found once."""

    stream: Stream
    method: str
    every: tuple[int | None, ...]
    dispatches: tuple[str, ...]
    options: methods.Options

    def __call__(self) -> list[Replayed]:
        """A row for each time between maps, and for each dispatch if the method makes copies."""
        fit = self.stream.fit(self.method, self.options)
        copied = isinstance(fit(self.stream.window), Copies)
        return [
            Replayed(self.method, every, dispatch, replay(self.stream, fit, every, dispatch or RULE))
            for every in self.every
            for dispatch in (self.dispatches if copied else (None,))
        ]


def stream_jobs(
    stream: Stream,
    named: Collection[str],
    every: Collection[int],
    dispatches: Collection[str],
    options: methods.Options,
) -> list[StreamJob]:
    """A job a method: without new maps, then with one after each number of ``every`` tokens.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown, or the batch does not divide a number of ``every``.
    """
    for tokens in every:
        stream.check_every(tokens)
    chosen = tuple(dict.fromkeys(checks.check_name("dispatch", name, DISPATCHES) for name in dispatches))
    times = (None, *dict.fromkeys(every))
    return [StreamJob(stream, method, times, chosen, options) for method in methods.named(named)]
