"""Few distinct GPUs and nodes a token, at a load that lasts: the search for runtimes that bring tokens home.

Layers do not depend on each other here, so each is searched alone (`unions.anneal_layer`). It minimises D, plus N where
there are nodes, plus the load. The load of the sample alone would mislead: experts that are used together are also used
by the same sequences, and other tokens come from other sequences. So the load that counts is a mean over random samples
of the sequences, whose differences are stretched by ``STRETCH``. Every GPU keeps as many experts as longest-first
packing gives it. A heuristic: nothing is proven.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import parent_process
from typing import Any

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import baselines
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.simulate import balance
from moeblaze_ref.placement.trace import Profile
from moeblaze_ref.placement.traffic import Runtime, step, visits
from moeblaze_ref.placement.unions import COLD, HOT, anneal_layer, token_sets

# Chosen on random halves of other seeds, 100 and up, than those that are published.
SAMPLES, STRETCH = 64, 1.41  # two halves differ by twice the variance of one
LOAD_WEIGHTS = (4.0, 6.0, 10.0, 16.0)  # tried in this order until the step is no slower than packing's
NODE_WEIGHT = 0.5
SWAPS = 120_000  # tried in a layer
SLICES = 64  # of a trace that does not say which sequence a token belongs to
MARGIN = 0.001  # of the time: what the model must save on the sample, so that other tokens are no slower
CAUTION = 2.0  # by which samples are stretched where maps are compared
# Of the time: what may be lost where there are nodes. The model does not see what a lower N saves in runtimes
# that send a row once to a node, and its slowest pair may depend on one busy expert alone.
NODE_SLACK = 0.005


def dedup(
    profile: Profile,
    costs: Runtime,
    bounds: Bounds | None = None,
    swaps: int = SWAPS,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> Placement:
    """Return a placement with few distinct GPUs and nodes a token, by the model no slower than packing.

    It is what `search` finds with the first of ``LOAD_WEIGHTS``, if its step (`traffic.step`) is shorter than that of
    longest-first packing by ``MARGIN``; with several nodes it may be longer by ``NODE_SLACK``. If not, each layer that
    is longer by itself is searched again with the next weight. After the last weight these layers keep the packing. It
    is so by the mean of samples of the sequences, not on other tokens.

    Parameters
    ----------
    profile : Profile
        With the trace that it counts.
    costs : Runtime
        Of the modelled step; its links say which GPUs are one node.
    bounds : Bounds, optional
        Of the packing, by default `bounds.equal`.
    swaps : int
        Swaps tried in a layer.
    seed : int
        The same seed finds the same placement, unless the time limit cuts the search.
    deadline : Deadline, optional
        There the search is cut.

    Raises
    ------
    ValueError, TypeError
        If the profile has no trace, there are more GPUs than experts, or a number is out of range.
    """
    deadline = deadline or Deadline()
    packed = baselines.greedy(profile, costs.on.num_gpus, bounds)
    slack = NODE_SLACK if costs.on.num_nodes > 1 else -MARGIN
    began = deadline.left()
    most = _layers_ms(profile, packed, costs, seed) * (1 + slack)
    deadline.keep_back(began - deadline.left())  # for one more comparison
    best, left = packed, np.arange(profile.layers)
    for load_weight in LOAD_WEIGHTS:
        if deadline.over():
            break
        found = search(profile, packed, costs.on.num_nodes, load_weight, swaps, seed, deadline, left)
        best = _with_layers(best, found, left)
        excess = _layers_ms(profile, best, costs, seed) - most
        if excess.sum() <= 0:
            return best
        left = np.flatnonzero(excess > 0)
    return _with_layers(best, packed, left)


def _with_layers(placement, other, layers):
    """A placement that has some layers of another."""
    assignment = placement.assignment.copy()
    assignment[layers] = other.assignment[layers]
    return Placement(assignment, placement.num_gpus, placement.model)


def search(
    profile: Profile,
    start: Placement,
    num_nodes: int = 1,
    load_weight: float = LOAD_WEIGHTS[0],
    swaps: int = SWAPS,
    seed: int = 0,
    deadline: Deadline | None = None,
    layers: Sequence[int] | np.ndarray | None = None,
) -> Placement:
    """Search layers from ``start``, by default all of them, without the comparison of steps.

    ``load_weight`` is what the fullest GPU's load over the mean counts for, in distinct GPUs a token. Each layer has
    its share of the time that is left. Other parameters as in `dedup`.

    Raises
    ------
    ValueError, TypeError
        As `dedup`, or if the start is of other sizes.
    """
    trace = profile.traced()
    start.check_fits(profile.layers, profile.E, profile.model)
    checks.check_positive("load_weight", load_weight)
    checks.check_int("swaps", swaps, 0)
    chosen = list(range(profile.layers) if layers is None else layers)
    G = start.num_gpus
    used = sampled_loads(trace, SAMPLES, STRETCH, seed) * G  # (samples, layers, E)
    share = trace.topk.shape[2] / profile.E  # of the tokens, that an expert has in the mean

    def layer(l, deadline):
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
            swaps,
            1000 * seed + l,
            deadline,
        )

    found = start.assignment.copy()
    for l, (gpus, _) in zip(chosen, search_layers(layer, chosen, deadline or Deadline()), strict=True):
        found[l] = gpus
    return Placement(found, G, start.model)


def search_layers(search: Callable[[int, float], Any], layers: Sequence[int], deadline: Deadline) -> list[Any]:
    """Search layers in threads: each has its share of the time that is left, and gets the end of it."""
    threads = 1 if parent_process() else os.cpu_count() or 1

    def one(place):
        left, rounds = deadline.left(), -(-(len(layers) - place) // threads)
        end = deadline.at - left + left / rounds
        found = search(layers[place], end)
        deadline.over(end)
        return found

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(len(layers))))


def sampled_loads(trace: RoutingTrace, samples: int, stretch: float, seed: int) -> np.ndarray:
    """Each expert's share of the rows of random samples of the sequences, (samples, layers, E) float64.

    The samples are those of `sample_weights`.
    """
    layers, E = trace.topk.shape[1], trace.num_experts
    sequence, weights = sample_weights(trace, samples, stretch, seed)
    shares = np.empty((samples, layers, E))
    for l in range(layers):
        used = (sequence[:, None] * E + trace.topk[:, l]).ravel()
        shares[:, l] = weights.T @ np.bincount(used, minlength=len(weights) * E).reshape(-1, E)
    return shares


def sample_weights(trace: RoutingTrace, samples: int, stretch: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence of each token (tokens,), and what its row counts in random samples of them, (Q, samples).

    A sample draws as many sequences as there are, with repetition. The rows of a sample count 1 together. The mean over
    the samples is that of the trace itself, and what a sample differs by from it is ``stretch`` times as much as drawn.
    A trace without `seq` is cut into ``SLICES``.
    """
    tokens, _, k = trace.topk.shape
    seq = np.arange(tokens) * SLICES // max(tokens, 1) if trace.seq is None else trace.seq
    _, sequence = np.unique(seq, return_inverse=True)
    number = int(sequence.max(initial=0)) + 1
    drawn = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), samples).astype(np.float64).T
    each = drawn / np.maximum(k * np.bincount(sequence, minlength=number) @ drawn, 1)  # (Q, samples)
    return sequence, 1 / max(tokens * k, 1) + stretch * (each - each.mean(axis=1, keepdims=True))


def _layers_ms(profile, placement, costs, seed):
    """The modelled step, layer by layer, with the loads of other samples than those that were searched."""
    trace, G = profile.traced(), placement.num_gpus
    shares = placement.shares()
    sampled = sampled_loads(trace, SAMPLES, CAUTION, seed + 2**31)
    fullest = np.mean([balance((part[:, None, :] @ shares)[:, 0]) for part in sampled], axis=0)  # (layers,)
    rows = np.outer(fullest, np.full(G, trace.tokens * trace.topk.shape[2] / G))  # all as full as the fullest
    found = step(rows, visits(trace, shares), trace.tokens, costs)
    return 1e3 * (found.compute_s + found.transfer_s)
