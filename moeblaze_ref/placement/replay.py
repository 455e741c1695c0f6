"""Replay a stream of traffic under a map, batch by batch: load, D, N and the modelled time of each batch's step.

The tokens of a trace come in their order, in batches of equally many. The map stays, or is fitted anew to the last
tokens again and again: then the experts that move are charged to the step in which they move. Nothing is charged for
the search, which runs beside the traffic.

Where experts have copies, a dispatch says which one a token uses:

- ``even``: each copy with the same probability. D and N are expected values.
- ``rule``: `copies.choose`, by which no GPU needs a word from another one.
- ``balanced``: with the probabilities that make the batch's fullest GPU least (`balancing.balanced`). GPUs must add up
  the batch's counts first, which is not charged. D and N are expected values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import methods, traffic
from moeblaze_ref.placement.balancing import balanced
from moeblaze_ref.placement.copies import Routes, routes
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.moves import aligned, expert_seconds, held, moves
from moeblaze_ref.placement.simulate import balance, loads
from moeblaze_ref.placement.trace import Profile, counts, profile
from moeblaze_ref.placement.traffic import Runtime

BATCH, WINDOW = 1024, 4096  # tokens
RULE = "rule"

# The map that is fitted to the tokens before a token of the stream, from the number of that token.
Fit = Callable[[int], Placement | Copies]


@dataclass(frozen=True)
class Traffic:
    """Load, traffic and modelled time of some tokens under a map."""

    load: float  #: the fullest GPU over the mean, mean over layers
    distinct_gpus: float  #: D, of a token in a layer
    distinct_nodes: float  #: N
    ms: float  #: of the modelled step that brings tokens home


@dataclass(frozen=True)
class Batch(Traffic):
    """One batch of a stream. ``ms`` is without the moves."""

    first: int  #: the number of its first token
    moved: int  #: experts that GPUs fetched before it
    moves_ms: float


@dataclass(frozen=True, eq=False)
class Stream:
    """A trace in batches.

    Parameters
    ----------
    trace : RoutingTrace
    costs : Runtime
        Of the step that brings tokens home, and the links.
    expert_bytes : int
        Of one expert of one layer: 3 * d * h * 2.
    batch : int
        Tokens of a batch. What fills no whole batch at the end is left out.
    window : int
        Tokens that a map is fitted to. The first map is fitted to the first ones, and the replay begins behind them.

    Raises
    ------
    ValueError, TypeError
        If a number is below 1, or no batch is left behind the window.
    """

    trace: RoutingTrace
    costs: Runtime
    expert_bytes: int
    batch: int = BATCH
    window: int = WINDOW

    def __post_init__(self) -> None:
        for name in ("batch", "window", "expert_bytes"):
            checks.check_int(name, getattr(self, name), 1)
        if self.window + self.batch > self.trace.tokens:
            raise ValueError(
                f"the trace has {self.trace.tokens} tokens, but a window of {self.window} and one batch of "
                f"{self.batch} need {self.window + self.batch}"
            )

    def firsts(self) -> range:
        """The number of the first token of each batch."""
        return range(self.window, self.trace.tokens - self.batch + 1, self.batch)

    def part(self, first: int, tokens: int) -> RoutingTrace:
        """The tokens from ``first`` on."""
        number = np.arange(self.trace.tokens)
        return self.trace.of((first <= number) & (number < first + tokens))

    def fit(self, method: str, options: methods.Options) -> Fit:
        """How a method of `methods.METHODS` fits a map to the window before a token; each map is found once."""
        checks.check_name("method", method, methods.METHODS)

        @cache
        def fitted(end: int) -> Placement | Copies:
            sample = profile(self.part(end - self.window, self.window))
            return mapped(method, methods.fit(method, sample, self.costs.on, options))

        return fitted

    def check_every(self, every: int | None) -> None:
        """Maps are fitted between batches: ``every`` is None or a multiple of the batch."""
        if every is not None and checks.check_int("every", every, 1) % self.batch:
            raise ValueError(f"every is {every}, but it must be a multiple of the batch of {self.batch} tokens")


def mapped(method: str, fitted: methods.Fitted) -> Placement | Copies:
    """The map of a method, or a ValueError where it has none."""
    if fitted.placement is None:
        raise ValueError(f"{method} has no map: its tokens choose at random among replicas. eplb-nearest has one")
    return fitted.placement


def replay(stream: Stream, fit: Fit, every: int | None = None, dispatch: str = RULE) -> list[Batch]:
    """Replay a stream, batch by batch.

    Parameters
    ----------
    stream : Stream
    fit : callable
        `Stream.fit`, or any function from the number of a token to a map.
    every : int, optional
        Tokens after which the map is fitted anew; by default never.
    dispatch : str
        One of ``DISPATCHES``.

    Raises
    ------
    ValueError, TypeError
        If the batch does not divide ``every``, or there is no such dispatch.
    """
    stream.check_every(every)
    on, link_s = stream.costs.on, expert_seconds(stream.costs.on, stream.expert_bytes)
    placement, found = fit(stream.window), []
    for first in stream.firsts():
        moved, seconds, served = 0, 0.0, first - stream.window
        if every is not None and served and served % every == 0:
            before, placement = held(placement), aligned(held(placement), fit(first), on.num_nodes)
            moved, seconds = moves(before, held(placement), link_s)
        seen = observe(stream.part(first, stream.batch), placement, stream.costs, dispatch)
        found.append(Batch(**vars(seen), first=first, moved=moved, moves_ms=1e3 * seconds))
    return found


def observe(
    trace: RoutingTrace, placement: Placement | Copies, costs: Runtime, dispatch: str = RULE, of: int | None = None
) -> Traffic:
    """Return load, traffic and modelled time of a trace's tokens under a map, all tokens at once.

    Parameters
    ----------
    trace : RoutingTrace
    placement : Placement or Copies
    costs : Runtime
    dispatch : str
        One of ``DISPATCHES``; all are the same where no expert has a copy.
    of : int, optional
        Tokens of the modelled step; by default those of the trace.

    Raises
    ------
    ValueError
        If there is no such dispatch, or the map is of other layers or experts than the trace.
    """
    chosen = DISPATCHES[checks.check_name("dispatch", dispatch, DISPATCHES)]
    placement.check_fits(trace.topk.shape[1], trace.num_experts)
    seen, shares = chosen(trace, placement) if isinstance(placement, Copies) else _even(trace, placement)
    load = loads(Profile(*counts(seen.topk, seen.num_experts), seen.tokens), shares)
    D, N = traffic.distinct(seen, shares, costs.on.num_nodes)
    step = traffic.step(load, traffic.visits(seen, shares), seen.tokens, costs, seen.tokens if of is None else of)
    return Traffic(float(balance(load).mean()), D, N, step.ms)


def _even(trace: RoutingTrace, placement: Placement | Copies) -> tuple[RoutingTrace | Routes, np.ndarray]:
    return trace, placement.shares()


def _by_rule(trace: RoutingTrace, placement: Copies) -> tuple[RoutingTrace | Routes, np.ndarray]:
    chosen = routes(trace, placement)
    return chosen, chosen.shares()


def _balanced(trace: RoutingTrace, placement: Copies) -> tuple[RoutingTrace | Routes, np.ndarray]:
    shares, (P, _) = placement.shares(), counts(trace.topk, trace.num_experts)
    for l, of_experts in enumerate(P):
        used = of_experts > 0
        shares[l, used] = balanced(of_experts, placement.held[l])[used] / of_experts[used, None]
    return trace, shares


# How tokens choose among copies, by name: what is counted, and the shares of GPUs.
DISPATCHES: dict[str, Callable[[RoutingTrace, Copies], tuple[RoutingTrace | Routes, np.ndarray]]] = {
    "even": _even,
    RULE: _by_rule,
    "balanced": _balanced,
}
