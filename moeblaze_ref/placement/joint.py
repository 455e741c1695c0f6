"""Balance and crossings in one search, beyond the paper.

MoETuner's first program fixes clusters before it sees affinity.

Many clusterings balance a layer almost equally well. Among the placements whose fullest GPU stays under a limit, this
looks for few crossings and a fast slowest pair, by simulated annealing over whole placements (`annealing.anneal`). It
starts from longest-first packing, the most even of the baselines. Where the model says that a baseline's placement is
faster all the same, the slowest pair gets more weight, and in the end `joint` returns that placement.

A heuristic: no integer program, and nothing is proven. Load and crossings in one program would be products of two
choices for every pair of experts in neighbouring layers and of GPUs, (E / G)**2 times as many as in ILP 2.
"""

from collections.abc import Collection

from moeblaze_ref.core import checks
from moeblaze_ref.placement import annealing, baselines
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.simulate import Cluster, step
from moeblaze_ref.placement.trace import Profile

# Chosen on random halves of other seeds, 100 and up, than those that are published.
# The slowest pair's part of what a transition costs, see annealing.anneal: the less, the fewer crossings there are, and
# the more, the faster is the step. Tried in this order until no baseline is faster.
TAILS = (0.1, 0.15, 0.2, 0.3, 0.6)
LIMIT = 1.02  # of a layer's fullest GPU over the mean
LIMITS = (1.005, 1.01, 1.02, 1.03, 1.045, 1.06, 1.09, 1.13, 1.2)  # of the curve


def joint(
    profile: Profile,
    on: Cluster,
    limit: float = LIMIT,
    bounds: Bounds | None = None,
    steps: int = annealing.STEPS,
    seed: int = 0,
    others: Collection[Placement] = (),
    deadline: Deadline | None = None,
) -> Placement:
    """Return a placement under a load limit, with few crossings, and by the model no slower than any baseline's.

    What `search` finds with the first of ``TAILS`` with which none of `baseline_placements` and of ``others``, such as
    MoETuner's, is faster by the model; if there is none, the fastest of those, which may exceed the limit. It is so on
    the profile alone, not on other tokens. Searches are cut at ``deadline``.

    Raises
    ------
    ValueError, TypeError
        As `search`, or if one of ``others`` is of another model or other sizes.
    """
    for other in others:
        other.check_fits(profile.layers, profile.E, profile.model)
    check_limit(limit)
    deadline = deadline or Deadline()
    known = baseline_placements(profile, on.num_gpus, bounds, steps, seed, deadline).values()
    best = fastest(profile, on, [*known, *others])
    for tail in TAILS:
        if deadline.over():
            break
        found = search(profile, on, limit, bounds, steps, seed, tail, deadline)
        if step(profile, found.shares(), on).ms <= step(profile, best.shares(), on).ms:
            return found
    return best


def search(
    profile: Profile,
    on: Cluster,
    limit: float = LIMIT,
    bounds: Bounds | None = None,
    steps: int = annealing.STEPS,
    seed: int = 0,
    tail: float = TAILS[0],
    deadline: Deadline | None = None,
) -> Placement:
    """Search as `joint` does, without the comparison with baselines: under the limit, if packing is.

    No layer's fullest GPU exceeds ``limit``, 1 or more, times the mean, nor the packing's where that is no more even.
    The packing to start with is within the bounds, by default `bounds.equal`, and its numbers of experts stay. Steps,
    seed and ``tail``, the slowest pair's part of what a transition costs, are of `annealing.anneal`.

    Raises
    ------
    ValueError, TypeError
        If there are more GPUs than experts, the profile has no R, or a number is out of range.
    """
    check_limit(limit)
    packed = baselines.greedy(profile, on.num_gpus, bounds)
    return annealing.anneal(profile, packed, on.cost, limit, tail, steps, seed, deadline)


def check_limit(limit: float):
    """``limit`` is of a fullest GPU over the mean: a finite number from 1 on."""
    if checks.check_number("limit", limit) < 1:
        raise ValueError(f"limit is {limit}, but no load can be more even than 1")


def baseline_placements(
    profile: Profile,
    num_gpus: int,
    bounds: Bounds | None = None,
    steps: int = annealing.STEPS,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> dict[str, Placement]:
    """Return the placements of the baselines that need no solver and place every expert once, by name.

    ``steps`` and ``seed`` are of `baselines.exflow`'s annealing. `baselines.eplb` without replicas is `greedy` on one
    node.
    """
    return {
        "greedy": baselines.greedy(profile, num_gpus, bounds),
        "contiguous": baselines.contiguous(profile, num_gpus),
        "round-robin": baselines.round_robin(profile, num_gpus),
        "exflow": baselines.exflow(profile, num_gpus, steps, seed, deadline),
    }


def fastest(profile: Profile, on: Cluster, placements: list[Placement]) -> Placement:
    """Return the placement with the shortest modelled step; the first of equals."""
    return min(placements, key=lambda placement: step(profile, placement.shares(), on).ms)
