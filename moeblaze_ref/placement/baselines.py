"""Baseline placements that MoETuner is compared with, on the same profile.

Each takes a profile and the number of GPUs. Loads are balanced layer by layer; only `exflow` looks at transitions.
"""

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.placement import annealing
from moeblaze_ref.placement.bounds import Bounds, equal
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.maps import Placement, check_gpus
from moeblaze_ref.placement.trace import Profile


def contiguous(profile: Profile, num_gpus: int) -> Placement:
    """Megatron-LM: the first E / G experts on GPU 0, the next on GPU 1, ...; rounded where G does not divide E."""
    check_gpus(num_gpus, profile.E)
    return _every_layer(profile, np.arange(profile.E) * num_gpus // profile.E, num_gpus)


def round_robin(profile: Profile, num_gpus: int) -> Placement:
    """Expert e on GPU e mod G."""
    check_gpus(num_gpus, profile.E)
    return _every_layer(profile, np.arange(profile.E) % num_gpus, num_gpus)


def _every_layer(profile, gpus, num_gpus):
    return Placement(np.tile(gpus.astype(np.int32), (profile.layers, 1)), num_gpus, profile.model)


def greedy(profile: Profile, num_gpus: int, bounds: Bounds | None = None) -> Placement:
    """Longest-first packing: the expert with the most tokens first, each to the GPU with the fewest so far.

    ``bounds`` are of the experts per GPU and layer; by default `bounds.equal`.

    Raises
    ------
    ValueError
        If there are more GPUs than experts, or no layer can be spread within the bounds.
    """
    check_gpus(num_gpus, profile.E)
    bounds = bounds or equal(profile.E, num_gpus)
    bounds.check_feasible(profile.E, num_gpus)
    packed = np.stack([pack(load, num_gpus, bounds) for load in profile.P])
    return Placement(packed, num_gpus, profile.model)


def pack(load: np.ndarray, num_bins: int, bounds: Bounds) -> np.ndarray:
    """The bin of every item of ``load`` (n,), heaviest first into the lightest bin that may take it; (n,) int32."""
    bins = np.empty(len(load), np.int32)
    filled, count = np.zeros(num_bins), np.zeros(num_bins, int)
    for left, item in zip(range(len(load), 0, -1), np.argsort(-load, kind="stable"), strict=True):
        short = count < bounds.least
        must = short if (bounds.least - count[short]).sum() >= left else np.ones(num_bins, bool)
        allowed = np.flatnonzero(must & (count < bounds.most))
        lightest = allowed[np.argmin(filled[allowed])]
        bins[item] = lightest
        filled[lightest] += load[item]
        count[lightest] += 1
    return bins


def eplb(
    profile: Profile, num_gpus: int, replicas: int | None = None, num_nodes: int = 1, num_groups: int | None = None
):
    """DeepSeek's expert-parallel load balancer: groups to nodes, replicas of hot experts, replicas to GPUs.

    G is a multiple of the nodes. ``replicas`` are copies of experts in a layer, all counted, a multiple of G: E (the
    default) only packs. Groups of E / num_groups neighbouring experts stay on one node; by default every expert is one.
    Where the nodes do not divide the groups, its global policy counts all GPUs as one node.

    Returns
    -------
    array (layers, E, G) float64
        The share of each expert's tokens that each GPU serves: an expert's replicas share them evenly.

    Raises
    ------
    ValueError, TypeError
        If one number does not divide the other as said, or there are fewer replicas than experts.
    """
    check_gpus(num_gpus, profile.E)
    replicas = profile.E if replicas is None else checks.check_int("replicas", replicas, profile.E)
    num_groups = profile.E if num_groups is None else num_groups
    check_groups(profile.E, num_gpus, num_nodes, num_groups)
    _check_multiple("replicas", replicas, "num_gpus", num_gpus)
    if num_groups % num_nodes:
        num_nodes = 1
    return np.stack([_eplb_layer(load, num_gpus, replicas, num_nodes, num_groups) for load in profile.P])


def check_groups(num_experts: int, num_gpus: int, num_nodes: int = 1, num_groups: int = 1) -> None:
    """Nodes divide the GPUs, and groups the experts, as `eplb` needs it: an error names the numbers."""
    _check_multiple("num_gpus", num_gpus, "num_nodes", checks.check_int("num_nodes", num_nodes, 1))
    _check_multiple("E", num_experts, "num_groups", checks.check_int("num_groups", num_groups, 1))


def _check_multiple(name, number, by, divisor):
    if number % divisor:
        raise ValueError(f"{name} is {number}, but it must be a multiple of {by} = {divisor}")


def _eplb_layer(load, num_gpus, replicas, num_nodes, num_groups):
    """Shares (E, G) of one layer."""
    shares = np.zeros((len(load), num_gpus))
    group = np.arange(len(load)) * num_groups // len(load)  # (E,)
    node = pack(np.bincount(group, load), num_nodes, equal(num_groups, num_nodes))[group]  # (E,)
    gpus = num_gpus // num_nodes
    for n in range(num_nodes):
        experts = np.flatnonzero(node == n)
        copies = replicate(load[experts], replicas // num_nodes)  # (experts of the node,)
        each = np.repeat(load[experts] / copies, copies)  # (replicas of the node,)
        gpu = n * gpus + pack(each, gpus, equal(len(each), gpus))
        np.add.at(shares, (np.repeat(experts, copies), gpu), np.repeat(1 / copies, copies))
    return shares


def replicate(load: np.ndarray, replicas: int, most: float = np.inf) -> np.ndarray:
    """Return the copies of each of n experts, (n,) int: one each, then one more for the largest load per copy.

    No expert has more than ``most``.
    """
    copies = np.ones(len(load), int)
    for _ in range(replicas - len(load)):
        copies[np.argmax(np.where(copies < most, load / copies, -1))] += 1
    return copies


def exflow(
    profile: Profile, num_gpus: int, steps: int = annealing.STEPS, seed: int = 0, deadline: Deadline | None = None
) -> Placement:
    """ExFlow's objective: as many transitions as possible stay on their GPU.

    All GPUs have equally many experts; their load is ignored. Its authors solve an integer program; here only the
    objective is theirs, and `annealing.anneal` searches, without a bound, until the deadline.

    Raises
    ------
    ValueError
        If there are more GPUs than experts, or the profile has no R.
    """
    start = contiguous(profile, num_gpus)
    different = 1.0 - np.eye(num_gpus)
    return annealing.anneal(profile, start, different, np.inf, tail=0.0, steps=steps, seed=seed, deadline=deadline)
