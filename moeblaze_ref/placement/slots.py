"""Search one layer's copies of experts and their GPUs at once, by simulated annealing over the slots of the GPUs.

Every GPU has as many slots, and each holds one expert. A step swaps the experts of two slots, or gives the slot of an
expert that has other copies to another expert. Only tokens that use one of the two experts choose anew, by the rule of
`copies.choose`, so every count is exact. Compiled by Numba for the CPU.
"""

from typing import NamedTuple

import numba
import numpy as np

from moeblaze_ref.placement.annealing import now
from moeblaze_ref.placement.bits import flip, has, put, size
from moeblaze_ref.placement.copies import choose_of_token, homes_of, new_sets, visits_of_token
from moeblaze_ref.placement.unions import FINE

NO_SLOT = -1
CLOCK = 32  # steps between two looks at the clock: each counts many tokens


class Tokens(NamedTuple):
    """The choices of one layer's tokens, and their GPUs: T tokens, k experts each, Q sequences."""

    topk: np.ndarray  #: (T, k) int64
    own: np.ndarray  #: (T,) int64, the token's GPU
    number: np.ndarray  #: (T,) int64, its number in the batch of that GPU
    sequence: np.ndarray  #: (T,) int64, 0 to Q - 1
    users: np.ndarray  #: (T * k,) int64, the tokens of expert 0, of expert 1, and so on
    first: np.ndarray  #: (E + 1,) int64, where the tokens of each expert begin


class Objective(NamedTuple):
    """The objective that a search minimises: D + node_weight * N + load_weight * load.

    The load is the fullest GPU's over the mean, a mean over samples of the sequences.
    """

    near: np.ndarray  #: (G, words) uint64, of `copies.neighbours`
    weights: np.ndarray  #: (Q, samples), what a row of a sequence adds to a GPU's load in a sample
    node_weight: float
    load_weight: float


@numba.njit(cache=True, nogil=True)
def _held(slots, num_experts, near):
    """The GPUs of each expert as a set, (E, words) uint64."""
    held = np.zeros((num_experts, near.shape[1]), np.uint64)
    for gpu in range(len(slots)):
        for e in slots[gpu]:
            put(held, e, gpu)
    return held


@numba.njit(cache=True, nogil=True)
def _added(T, rows, weights):
    """The loads T (samples, G) with some more rows (Q, G) of the sequences."""
    T = T.copy()
    for q in range(len(rows)):
        for gpu in range(rows.shape[1]):
            if rows[q, gpu]:
                for s in range(len(T)):
                    T[s, gpu] += rows[q, gpu] * weights[q, s]
    return T


@numba.njit(cache=True, nogil=True)
def _fullest(T):
    """The fullest GPU's load, a mean over the samples."""
    total = 0.0
    for s in range(len(T)):
        most = T[s, 0]
        for gpu in range(T.shape[1]):
            most = max(most, T[s, gpu])
        total += most
    return total / len(T)


@numba.njit(cache=True, nogil=True)
def _count(held, tokens, objective):
    """Count afresh: each token's GPUs (T, k), how many GPUs and nodes they are (T, 2), and rows (Q, G)."""
    near, chosen = objective.near, np.empty(tokens.topk.shape, np.int32)
    visits, rows = np.empty((len(chosen), 2), np.int64), np.zeros((len(objective.weights), len(near)), np.int64)
    homes, sets = homes_of(held), new_sets(near)
    for t, experts in enumerate(tokens.topk):
        choose_of_token(experts, tokens.own[t], tokens.number[t], held, homes, near, sets, chosen[t])
        visits[t] = visits_of_token(chosen[t], near, sets)
        for gpu in chosen[t]:
            rows[tokens.sequence[t], gpu] += 1
    return chosen, visits, rows


@numba.njit(cache=True, nogil=True)
def value(slots, num_experts, tokens, objective):
    """Return the objective of `anneal_slots`, counted afresh: (the value, D, N, load). Parameters are as there."""
    _, visits, rows = _count(_held(slots, num_experts, objective.near), tokens, objective)
    load = _fullest(_added(np.zeros((objective.weights.shape[1], len(slots))), rows, objective.weights))
    D, N = visits[:, 0].sum() / len(visits), visits[:, 1].sum() / len(visits)
    return D + objective.node_weight * N + objective.load_weight * load, D, N, load


@numba.njit(cache=True, nogil=True)
def _step(slots, held, T):
    """A random step: slot i of GPU g, and slot j of GPU h or ``NO_SLOT`` for another expert's copy, and its expert.

    Every other step is of the fullest GPU of a random sample. The first GPU is ``NO_SLOT`` if the step is not possible.
    """
    G, each = slots.shape
    g, i, h, j = np.random.randint(G), np.random.randint(each), np.random.randint(G), np.random.randint(each)
    if np.random.random() < 0.5:
        h = T[np.random.randint(len(T))].argmax()
    e, f = slots[g, i], slots[h, j]
    if np.random.random() < 0.5:
        h = NO_SLOT
        possible = size(held[e]) > 1
    else:
        possible = g != h and not has(held, e, h)
    if not possible or has(held, f, g):
        g = NO_SLOT
    return g, i, h, j, f


@numba.njit(cache=True, nogil=True)
def _exchange(held, e, f, g, h):
    """Expert e goes from g to h, and f from h to g; another time, and all is as before."""
    flip(held, e, g)
    flip(held, f, g)
    if h != NO_SLOT:
        flip(held, e, h)
        flip(held, f, h)


@numba.njit(cache=True, nogil=True)
def _uses(experts, e):
    for expert in experts:
        if expert == e:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _choose_anew(e, f, held, tokens, near, sets, chosen, again, visits, changed, rows):
    """Let the tokens of experts e and f choose anew.

    Writes the choices of those that choose otherwise into ``again``, how many GPUs and nodes they visit into
    ``visits``, which tokens they are into ``changed``, and how many more rows each sequence has on each GPU into
    ``rows`` (Q, G). Returns how many tokens these are.
    """
    count, homes = 0, homes_of(held)
    rows[:] = 0
    for expert in (e, f):
        for at in range(tokens.first[expert], tokens.first[expert + 1]):
            t = tokens.users[at]
            if expert == f and _uses(tokens.topk[t], e):
                continue  # it has chosen anew already
            choose_of_token(tokens.topk[t], tokens.own[t], tokens.number[t], held, homes, near, sets, again[count])
            differs = False
            for j in range(again.shape[1]):
                if chosen[t, j] != again[count, j]:
                    rows[tokens.sequence[t], chosen[t, j]] -= 1
                    rows[tokens.sequence[t], again[count, j]] += 1
                    differs = True
            if differs:
                changed[count], visits[count] = t, visits_of_token(again[count], near, sets)
                count += 1
    return count


@numba.njit(cache=True, nogil=True)
def _more(visits, new_visits, changed):
    """How many more GPUs and nodes the tokens visit that chose anew."""
    of_gpus = of_nodes = 0
    for at, t in enumerate(changed):
        of_gpus += new_visits[at, 0] - visits[t, 0]
        of_nodes += new_visits[at, 1] - visits[t, 1]
    return of_gpus, of_nodes


@numba.njit(cache=True, nogil=True)
def anneal_slots(slots, num_experts, tokens, objective, hot, cold, steps, seed, deadline):
    """Try steps from one placement to another: always taken if that lowers what `Objective` says, else by chance.

    Parameters
    ----------
    slots : array (G, size) int64
        Where to begin: the experts of each GPU, all different, and each expert on one GPU or more.
    num_experts : int
        E.
    tokens : Tokens
    objective : Objective
    hot, cold : float
        Temperatures at both ends.
    steps, seed : int
        Steps tried. The same seed finds the same placement.
    deadline : float
        Of `time.perf_counter`: there the search is cut.

    Returns
    -------
    slots : array (G, size) int64
        Never of a larger value than at the beginning.
    change : float
        Of the value, carried along from step to step.
    """
    np.random.seed(seed)
    near, each = objective.near, len(tokens.topk)
    slots, held, sets = slots.copy(), _held(slots, num_experts, near), new_sets(near)
    chosen, visits, rows = _count(held, tokens, objective)
    T = _added(np.zeros((objective.weights.shape[1], len(slots))), rows, objective.weights)
    again, new_visits, changed, load = (
        np.empty_like(chosen),
        np.empty_like(visits),
        np.empty(each, np.int64),
        _fullest(T),
    )
    best, change, least = slots.copy(), 0.0, 0.0
    for s in range(steps):
        if s % CLOCK == 0 and now() > deadline:
            break
        g, i, h, j, f = _step(slots, held, T)
        if g == NO_SLOT:
            continue
        e = slots[g, i]
        _exchange(held, e, f, g, h)
        changes = changed[: _choose_anew(e, f, held, tokens, near, sets, chosen, again, new_visits, changed, rows)]
        D, N = _more(visits, new_visits, changes)
        after = _added(T, rows, objective.weights)
        worse = (D + objective.node_weight * N) / each + objective.load_weight * (_fullest(after) - load)
        if worse > -hot * (cold / hot) ** (s / steps) * np.log(np.random.random()):
            _exchange(held, e, f, g, h)  # back again
            continue
        slots[g, i] = f
        if h != NO_SLOT:
            slots[h, j] = e
        for at, t in enumerate(changes):
            chosen[t], visits[t] = again[at], new_visits[at]
        T, load, change = after, _fullest(after), change + worse
        if change < least and s >= FINE * steps:
            best[:], least = slots, change
    return (slots, change) if change < least else (best, least)
