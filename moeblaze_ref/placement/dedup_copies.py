"""Copies of experts and their GPUs at once: few distinct GPUs and nodes a token, at a load that lasts.

A copy on a GPU that a token visits anyway saves a visit, and copies of a hot expert share its load. Two searches follow
each other in every layer. The first takes every copy for an expert of its own, whose tokens are those of some of the
GPUs, and places it as `dedup` does (`placed`). The second changes which experts have copies, and where
(`slots.anneal_slots`). It counts what the rule of `copies.choose` sends. The load that counts is that of `dedup`: a
mean over random samples of the sequences, whose differences are stretched. A heuristic: nothing is proven.
"""

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import unions
from moeblaze_ref.placement.baselines import replicate
from moeblaze_ref.placement.copies import neighbours, sources
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.dedup import NODE_WEIGHT, SAMPLES, STRETCH, SWAPS, sample_weights, search_layers
from moeblaze_ref.placement.maps import Copies, check_gpus, check_nodes
from moeblaze_ref.placement.slots import Objective, Tokens, anneal_slots
from moeblaze_ref.placement.trace import Profile

# Chosen on random halves of other seeds, 100 and up, than those that are published; the weight of the load was raised
# after one of those.
FIRST_WEIGHT, LOAD_WEIGHT = 6.0, 24.0  # of the load, in the first search and in the second
HOT, COLD = 0.03, 0.001  # temperatures of the second, in visits a token, times an expert's mean share of the tokens
STEPS = 3000  # of the second, tried in a layer
COUNTED = 32_768  # tokens at most that a search counts: every n-th of a longer trace


def dedup_copies(
    profile: Profile,
    num_gpus: int,
    budget: int,
    num_nodes: int = 1,
    steps: int = STEPS,
    swaps: int = SWAPS,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> Copies:
    """Return a placement with copies that has few distinct GPUs and nodes a token, and an even load.

    Every GPU holds ``budget`` experts of each layer, or all if there are fewer. The search minimises
    D + NODE_WEIGHT * N + LOAD_WEIGHT * load; on one node the term of N is left out.

    Parameters
    ----------
    profile : Profile
        With the trace that it counts.
    num_gpus : int
        G.
    budget : int
        Experts of a layer on a GPU, copies too.
    num_nodes : int
        Nodes of equally many neighbouring GPUs.
    steps, swaps : int
        Tried in a layer: swaps of the first search, steps of the second.
    seed : int
        The same seed finds the same placement, unless the time limit cuts the search.
    deadline : Deadline, optional
        There the search is cut.

    Raises
    ------
    ValueError, TypeError
        If the profile has no trace, the budget is below one copy of each expert, the nodes do not divide the GPUs, or
        a number is out of range.
    """
    trace, E = thinned(profile.traced(), COUNTED), profile.E
    check_gpus(checks.check_int("num_gpus", num_gpus, 1), E)
    check_nodes(num_nodes, num_gpus)
    check_budget(budget, E, num_gpus)
    checks.check_int("steps", steps, 0)
    checks.check_int("swaps", swaps, 0)
    sequence, weights = sample_weights(trace, SAMPLES, STRETCH, seed)
    node_weight = NODE_WEIGHT if num_nodes > 1 else 0.0
    objective = Objective(neighbours(num_gpus, num_nodes), weights * num_gpus, node_weight, LOAD_WEIGHT)
    first = objective._replace(load_weight=FIRST_WEIGHT)
    share = trace.topk.shape[2] / E  # of the tokens, that an expert has in the mean

    def layer(l: int, deadline: float) -> np.ndarray:
        tokens = tokens_of(trace.topk[:, l], E, num_gpus, sequence)
        of_layer = 1000 * seed + l
        start = placed(profile.P[l], tokens, first, num_nodes, min(budget, E), swaps, of_layer, deadline)
        slots, _ = anneal_slots(start, E, tokens, objective, HOT * share, COLD * share, steps, of_layer, deadline)
        return (slots[:, :, None] == np.arange(E)).any(axis=1).T  # (E, G)

    held = np.stack(search_layers(layer, range(profile.layers), deadline or Deadline()))
    return Copies(held, num_nodes, profile.model)


def check_budget(budget: int, num_experts: int, num_gpus: int) -> None:
    """The GPUs have room for one copy of each expert.

    Raises
    ------
    ValueError, TypeError
        If they have not, or the budget is no whole number.
    """
    if checks.check_int("budget", budget, 1) * num_gpus < num_experts:
        raise ValueError(
            f"budget is {budget}: {budget} experts on each of {num_gpus} GPUs are {budget * num_gpus}, but a layer has "
            f"{num_experts}; the least budget is {-(-num_experts // num_gpus)}"
        )


def thinned(trace: RoutingTrace, most: int) -> RoutingTrace:
    """Every n-th token of a trace, so that they are at most ``most``."""
    return trace.of(np.arange(trace.tokens) % max(-(-trace.tokens // most), 1) == 0)


def placed(
    load: np.ndarray,
    tokens: Tokens,
    objective: Objective,
    num_nodes: int,
    each: int,
    swaps: int,
    seed: int,
    deadline: float,
) -> np.ndarray:
    """The experts of each GPU, (G, ``each``) int64, found as though each copy were an expert of its own.

    Experts have copies by their load (E,), and a copy has the tokens of equally many neighbouring GPUs. So the load is
    shared evenly, which the rule of `copies.choose` does not promise. Other parameters as in `slots.anneal_slots`.
    """
    G, (T, k) = len(objective.near), tokens.topk.shape
    number = replicate(load, G * each, most=G)  # of copies, (E,)
    first, expert = np.cumsum(number) - number, np.repeat(np.arange(len(load)), number)
    copy = first[tokens.topk] + tokens.own[:, None] * number[tokens.topk] // G  # (T, k)
    sequences, parts = len(objective.weights), len(expert)
    used = np.bincount((tokens.sequence[:, None] * parts + copy).ravel(), minlength=sequences * parts)
    share = k / parts
    gpus, _ = unions.anneal_layer(
        dealt(load / number, expert, G),
        unions.token_sets(copy, parts),
        np.ascontiguousarray((objective.weights.T @ used.reshape(sequences, parts)).T),
        G,
        G // num_nodes,
        objective.load_weight,
        objective.node_weight,
        max(T, 1),
        unions.HOT * share,
        unions.COLD * share,
        swaps,
        seed,
        deadline,
    )
    return without_doubles([expert[gpus == gpu] for gpu in range(G)], np.argsort(-load / number, kind="stable"))


def dealt(load: np.ndarray, expert: np.ndarray, num_gpus: int) -> np.ndarray:
    """The GPU of each copy to begin with, (copies,) int64: the hottest first, all dealt in turn.

    ``load`` (E,) is that of one copy, and ``expert`` (copies,) says of which expert it is.
    """
    gpus = np.empty(len(expert), np.int64)
    gpus[np.argsort(-load[expert], kind="stable")] = np.arange(len(expert)) % num_gpus
    return gpus


def without_doubles(experts: list[np.ndarray], hottest: np.ndarray) -> np.ndarray:
    """The experts of each GPU, (G, each) int64, with the hottest others in the place of those that it has twice."""
    return np.array([list(dict.fromkeys([*found, *hottest]))[: len(found)] for found in experts], np.int64)


def tokens_of(topk: np.ndarray, num_experts: int, num_gpus: int, sequence: np.ndarray) -> Tokens:
    """Return one layer's choices (tokens, k) as `slots.anneal_slots` reads them; `sources` gives each token's GPU."""
    source, k = sources(len(topk), num_gpus).astype(np.int64), topk.shape[1]
    chosen = topk.ravel().astype(np.int64)
    first = np.append(0, np.cumsum(np.bincount(chosen, minlength=num_experts)))
    users = np.argsort(chosen, kind="stable") // k
    number = np.arange(len(topk)) // num_gpus
    return Tokens(chosen.reshape(-1, k), source, number, sequence, users, first)
