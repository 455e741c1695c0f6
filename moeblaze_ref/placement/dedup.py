"""Few distinct GPUs and nodes a token, at a load that lasts: the search for runtimes that bring tokens home.

Layers do not depend on each other here, so each is searched alone (`unions.anneal_layer`). It minimises D, plus N where
there are nodes, plus the load. The load of the sample alone would mislead: experts that are used together are also used
by the same sequences, and other tokens come from other sequences. So the load that counts is a mean over random samples
of the sequences, whose differences are stretched by ``STRETCH``. Every GPU keeps as many experts as longest-first
packing gives it. A heuristic: nothing is proven.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import parent_process

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import baselines
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.simulate import balance
from moeblaze_ref.placement.simulate import loads as loads_of
from moeblaze_ref.placement.trace import Profile
from moeblaze_ref.placement.traffic import Runtime, step, visits
from moeblaze_ref.placement.unions import COLD, HOT, anneal_layer, token_sets

# Chosen on random halves of other seeds, 100 and up, than those that are published.
SAMPLES, STRETCH = 32, 2.0
LOAD_WEIGHTS = (3.0, 6.0, 12.0)  # tried in this order until the step is no slower than packing's
NODE_WEIGHT = 2.0
SWAPS = 2500  # tried an expert
PIECES = 64  # of a trace that does not say which sequence a token belongs to
MARGIN = 0.002  # of a step: what the model must save on the sample, so that other tokens are no slower


def dedup(
    profile: Profile,
    costs: Runtime,
    bounds: Bounds | None = None,
    swaps: int = SWAPS,
    seed: int = 0,
    deadline: float = np.inf,
) -> Placement:
    """Return a placement with few distinct GPUs and nodes a token, or the packing if the model says that it is faster.

    What `search` finds with the first of ``LOAD_WEIGHTS`` whose step `traffic.step` models as shorter than that of
    longest-first packing by ``MARGIN``; if there is none, the packing. It is so by the mean of the samples of the load,
    not on other tokens.

    Parameters
    ----------
    profile : Profile
        With the trace that it counts.
    costs : Runtime
        Of the modelled step; its links say which GPUs are one node.
    bounds : Bounds, optional
        Of the packing, by default `bounds.equal`.
    swaps : int
        Swaps tried in a layer, for each of its experts.
    seed : int
        The same seed finds the same placement, unless the time limit cuts the search.
    deadline : float
        Of `time.perf_counter`: there the search is cut.

    Raises
    ------
    ValueError, TypeError
        If the profile has no trace, there are more GPUs than experts, or a number is out of range.
    """
    packed = baselines.greedy(profile, costs.on.num_gpus, bounds)
    least = _step_ms(profile, packed, costs, seed) * (1 - MARGIN)
    for load_weight in LOAD_WEIGHTS:
        found = search(profile, packed, costs.on.num_nodes, load_weight, swaps, seed, deadline)
        if _step_ms(profile, found, costs, seed) <= least:
            return found
        if time.perf_counter() > deadline:
            break
    return packed


def search(
    profile: Profile,
    start: Placement,
    num_nodes: int = 1,
    load_weight: float = LOAD_WEIGHTS[0],
    swaps: int = SWAPS,
    seed: int = 0,
    deadline: float = np.inf,
) -> Placement:
    """Search every layer from ``start``, without the comparison of steps.

    ``load_weight`` is what the fullest GPU's load over the mean counts for, in distinct GPUs a token. A layer whose
    search begins after the deadline stays as it was. Other parameters as in `dedup`.

    Raises
    ------
    ValueError, TypeError
        As `dedup`, or if the start is of other sizes.
    """
    trace = profile.traced()
    start.check_fits(profile.layers, profile.E, profile.model)
    checks.check_positive("load_weight", load_weight)
    steps = checks.check_int("swaps", swaps, 0) * profile.E
    G = start.num_gpus
    used = sampled_loads(trace, SAMPLES, STRETCH, seed) * G  # (samples, layers, E)
    share = trace.topk.shape[2] / profile.E  # of the tokens, that an expert has in the mean

    def layer(l):
        sets = token_sets(trace.topk[:, l], profile.E)
        return anneal_layer(
            start.assignment[l].astype(np.int64),
            sets,
            np.ascontiguousarray(used[:, l].T),
            G,
            G // num_nodes,
            load_weight,
            NODE_WEIGHT if num_nodes > 1 else 0.0,
            max(trace.tokens, 1),
            HOT * share,
            COLD * share,
            steps,
            1000 * seed + l,
            deadline,
        )

    with ThreadPoolExecutor(1 if parent_process() else os.cpu_count()) as threads:
        found = [gpus for gpus, _ in threads.map(layer, range(profile.layers))]
    return Placement(np.stack(found).astype(np.int32), G, start.model)


def sampled_loads(trace: RoutingTrace, samples: int, stretch: float, seed: int) -> np.ndarray:
    """Each expert's share of the rows of random samples of the sequences, (samples, layers, E) float64.

    A sample draws as many sequences as there are, with repetition. The mean over the samples is that of the trace
    itself, and what a sample differs by from it is ``stretch`` times as much as drawn. A trace without `seq` is cut
    into ``PIECES``.
    """
    tokens, layers, k = trace.topk.shape
    seq = np.arange(tokens) * PIECES // max(tokens, 1) if trace.seq is None else trace.seq
    _, sequence = np.unique(seq, return_inverse=True)
    number, E = int(sequence.max(initial=0)) + 1, trace.num_experts
    drawn = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), samples).astype(np.float64)
    shares = np.empty((samples, layers, E))
    for l in range(layers):
        counts = np.bincount((sequence[:, None] * E + trace.topk[:, l]).ravel(), minlength=number * E).reshape(-1, E)
        each, whole = drawn @ counts, counts.sum(axis=0) / max(tokens * k, 1)
        each /= np.maximum(each.sum(axis=1, keepdims=True), 1)
        shares[:, l] = whole + stretch * (each - each.mean(axis=0))
    return shares


def _step_ms(profile, placement, costs, seed):
    """The modelled step with the loads of other samples than those that were searched."""
    trace = profile.traced()
    shares = placement.shares()
    rows = trace.tokens * trace.topk.shape[2]
    sampled = sampled_loads(trace, SAMPLES, STRETCH, seed + 2**31)
    fullest = np.mean([balance((part[:, None, :] @ shares)[:, 0]) for part in sampled], axis=0)  # (layers,)
    T = loads_of(profile, shares)
    even = np.full_like(T, rows / placement.num_gpus) * fullest[:, None]  # all as full as the fullest
    return step(even, visits(trace, shares), trace.tokens, costs).ms
