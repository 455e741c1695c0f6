"""Search over whole placements: experts of a layer swap GPUs, under a limit on the load, by simulated annealing.

Clusters that follow each other over many layers may sit on other GPUs before a layer than after it. No swap of two
experts mends that, so now and then two GPUs exchange all they have, from a random layer to the last: the loads stay,
and one transition changes. The number of experts on a GPU stays too, if all have as many. Compiled by Numba for the
CPU: millions of swaps are tried in a second.
"""

import time

import numba
import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.trace import Profile

STEPS = 30_000_000
HOT, COLD = 0.2, 0.005  # temperatures at both ends, in tokens of the profile
RELABEL = 100  # swaps between two relabellings
CLOCK = 1024  # steps between two looks at the clock
FINE = 0.8  # of the steps: after them the best placement so far is kept


def anneal(
    profile: Profile,
    start: Placement,
    cost: np.ndarray,
    limit: float,
    tail: float = 0.5,
    steps: int = STEPS,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> Placement:
    """The placement of least crossings that swaps lead to.

    Parameters
    ----------
    profile : Profile
        With R.
    start : Placement
        Where to begin.
    cost : array (G, G) float64
        Of one transition from GPU to GPU; 0 on the diagonal. 1 elsewhere counts crossings.
    limit : float
        No layer's fullest GPU exceeds this times the mean, nor what it has in ``start``, if that is more.
    tail : float
        From 0 to 1, what counts of a transition: 0 all pairs' tokens alike, 1 the slowest pair alone.
    steps : int
        Swaps tried.
    seed : int
        The same seed finds the same placement, unless the deadline cuts the search.
    deadline : Deadline, optional
        There the search is cut, and the best placement so far counts.

    Returns
    -------
    Placement
        Never of more cost than ``start``.

    Raises
    ------
    ValueError
        If the profile has no R, or the sizes do not fit.
    """
    start.check_fits(profile.layers, profile.E, profile.model)
    checks.check_shape("cost", cost, {"G": start.num_gpus, "G ": start.num_gpus})
    checks.check_int("steps", steps, 0)
    R = profile.transitions()
    T = np.stack([np.bincount(a, p, start.num_gpus) for a, p in zip(start.assignment, profile.P, strict=True)])
    most = np.maximum(limit * T.mean(axis=1), T.max(axis=1))  # (layers,)
    rng, deadline = np.random.default_rng(seed), deadline or Deadline()
    found = _anneal(
        start.assignment.copy(),
        profile.P.astype(np.float64),
        R.astype(np.float64),
        np.asarray(cost, np.float64),
        tail,
        most,
        T,
        steps,
        max(profile.tokens, 1),
        int(rng.integers(2**31)),
        deadline.at,
    )
    deadline.over()
    return Placement(found, start.num_gpus, start.model)


@numba.njit(cache=True)
def now():
    """Return `time.perf_counter` inside compiled code."""
    with numba.objmode(seconds="float64"):
        seconds = time.perf_counter()
    return seconds


@numba.njit(cache=True)
def _flows(a, R, G):
    """(to, came, C): what expert e of layer l sends to GPU g, what it gets from GPU g, and what GPUs send to GPUs."""
    layers, E = a.shape
    to, came = np.zeros((layers, E, G)), np.zeros((layers, E, G))
    C = np.zeros((layers + 1, G, G))  # C[l + 1] leaves layer l; the first and the last stay empty
    for l in range(layers - 1):
        for e in range(E):
            for f in range(E):
                to[l, e, a[l + 1, f]] += R[l, e, f]
                came[l + 1, f, a[l, e]] += R[l, e, f]
                C[l + 1, a[l, e], a[l + 1, f]] += R[l, e, f]
    return to, came, C


@numba.njit(cache=True)
def _time(C, cost, tail):
    """Return a transition's cost: all pairs' times and, with weight ``tail``, the slowest pair's in place of each."""
    G = len(C)
    every, slowest = 0.0, 0.0
    for g in range(G):
        for h in range(G):
            time = C[g, h] * cost[g, h]
            every += time
            slowest = max(slowest, time)
    return (1 - tail) * every + tail * G * (G - 1) * slowest


@numba.njit(cache=True)
def _shift(C_in, C_out, came, to, e, f, g, h):
    """Update the transitions (G, G) before and after for expert e moving from g to h and f from h to g, in place."""
    for gpu in range(len(C_in)):
        arriving, leaving = came[e, gpu] - came[f, gpu], to[e, gpu] - to[f, gpu]
        C_in[gpu, g] -= arriving
        C_in[gpu, h] += arriving
        C_out[g, gpu] -= leaving
        C_out[h, gpu] += leaving


@numba.njit(cache=True)
def _exchange(x, g, h):
    """Swap two columns of every matrix (n, rows, G); in place."""
    for matrix in x:
        for row in matrix:
            row[g], row[h] = row[h], row[g]


@numba.njit(cache=True)
def _relabel(a, T, to, came, C, times, cost, tail, temperature):
    """Let two GPUs exchange all experts from a random layer on, by Boltzmann's chance; return the change of cost."""
    layers, G = len(a), len(cost)
    l, g, h = np.random.randint(1, layers), np.random.randint(G), np.random.randint(G)
    flows = C[l:].copy()
    _exchange(flows, g, h)
    _exchange(flows[1:].transpose(0, 2, 1), g, h)
    after = np.array([_time(flow, cost, tail) for flow in flows])
    change = (after - times[l:]).sum()
    if change > 0 and np.random.random() >= np.exp(-change / temperature):
        return 0.0
    C[l:] = flows
    times[l:] = after
    _exchange(T[None, l:], g, h)
    _exchange(to[l - 1 :], g, h)
    _exchange(came[l + 1 :], g, h)
    for row in a[l:]:
        for e in range(len(row)):
            row[e] = h if row[e] == g else g if row[e] == h else row[e]
    return change


@numba.njit(cache=True, nogil=True)  # other threads go on, as one that gives signs of life
def _anneal(a, P, R, cost, tail, most, T, steps, tokens, seed, deadline):
    """Swap experts e and f of a random layer: always if that is faster, else by Boltzmann's chance."""
    np.random.seed(seed)
    layers, E = a.shape
    to, came, C = _flows(a, R, len(cost))
    times = np.array([_time(flow, cost, tail) for flow in C])
    best, value, least = a.copy(), 0.0, 0.0
    for s in range(steps):
        if s % CLOCK == 0 and now() > deadline:
            break
        temperature = tokens * HOT * (COLD / HOT) ** (s / steps)
        if s % RELABEL == 0 and layers > 1:
            value += _relabel(a, T, to, came, C, times, cost, tail, temperature)
        l, e, f = np.random.randint(layers), np.random.randint(E), np.random.randint(E)
        g, h = a[l, e], a[l, f]
        if g == h:
            continue
        moved = P[l, e] - P[l, f]  # tokens from g to h
        if T[l, g] - moved > most[l] or T[l, h] + moved > most[l]:
            continue
        _shift(C[l], C[l + 1], came[l], to[l], e, f, g, h)
        before, after = _time(C[l], cost, tail), _time(C[l + 1], cost, tail)
        change = before + after - times[l] - times[l + 1]
        if change > 0 and np.random.random() >= np.exp(-change / temperature):
            _shift(C[l], C[l + 1], came[l], to[l], f, e, g, h)  # back again
            continue
        a[l, e], a[l, f] = h, g
        T[l, g] -= moved
        T[l, h] += moved
        times[l], times[l + 1] = before, after
        value += change
        for q in range(E):
            if l > 0:
                to[l - 1, q, g] += R[l - 1, q, f] - R[l - 1, q, e]
                to[l - 1, q, h] += R[l - 1, q, e] - R[l - 1, q, f]
            if l < layers - 1:
                came[l + 1, q, g] += R[l, f, q] - R[l, e, q]
                came[l + 1, q, h] += R[l, e, q] - R[l, f, q]
        if value < least and s >= FINE * steps:
            best[:] = a
            least = value
    return a if value < least else best
