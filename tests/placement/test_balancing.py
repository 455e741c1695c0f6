"""The balance of a batch among copies, beside OR-Tools' linear program."""

import numpy as np
import pytest
from ortools.linear_solver import pywraplp

from moeblaze_ref.placement.balancing import balanced


def least_maximum(counts, held):
    """The fullest GPU's load in the linear program."""
    solver = pywraplp.Solver.CreateSolver("PDLP" if held.sum() > 10_000 else "GLOP")
    fullest = solver.NumVar(0, solver.infinity(), "fullest")
    served = {(e, g): solver.NumVar(0, solver.infinity(), "") for e, g in np.argwhere(held).tolist()}
    total = counts.sum()
    for e, count in enumerate(counts):
        if held[e].any():
            solver.Add(sum(served[e, g] for g in np.flatnonzero(held[e]).tolist()) == float(count / total))
    for g in range(held.shape[1]):
        solver.Add(sum(served[e, g] for e in np.flatnonzero(held[:, g]).tolist()) <= fullest)
    solver.Minimize(fullest)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return fullest.solution_value() * total


def drawn(seed, more):
    """Counts as skewed as routing, and copies of experts: one each, and more with that probability."""
    random = np.random.default_rng(seed)
    E, G = int(random.integers(2, 65)), int(random.integers(2, 17))
    held = random.random((E, G)) < more
    held[np.arange(E), random.integers(0, G, E)] = True
    counts = random.zipf(1.3, E).clip(max=10**5) * (random.random(E) < 0.9)
    counts[0] += 1
    return counts, held


@pytest.mark.parametrize("more", [0.0, 0.05, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_fullest_gpu_has_as_little_as_in_the_linear_program(seed, more):
    counts, held = drawn(seed, more)
    served = balanced(counts, held)
    np.testing.assert_allclose(served.sum(axis=1), counts, rtol=1e-12, atol=1e-14 * counts.sum())
    assert (served >= 0).all() and not served[~held].any()
    assert served.sum(axis=0).max() <= 1.01 * least_maximum(counts, held)


def test_tokens_move_along_a_chain_of_copies():
    """GPU 0 is too full, and shares no expert with GPU 3: each GPU passes some on to the next."""
    held = np.eye(4, dtype=bool) | np.eye(4, k=1, dtype=bool)
    served = balanced(np.array([100, 0, 0, 0]), held)
    np.testing.assert_allclose(served.sum(axis=0), [50, 50, 0, 0], atol=0.1)
    served = balanced(np.array([90, 30, 0, 0]), held)
    np.testing.assert_allclose(served.sum(axis=0), [45, 45, 30, 0], atol=0.1)


def test_a_map_may_lie_in_memory_in_any_order():
    counts, held = drawn(0, 0.2)
    np.testing.assert_array_equal(balanced(counts, np.asfortranarray(held)), balanced(counts, held))


def test_experts_with_one_copy_stay():
    held = np.array([[True, False], [False, True], [True, True]])
    np.testing.assert_allclose(balanced(np.array([7, 1, 2]), held), [[7, 0], [0, 1], [0, 2]])
    assert not balanced(np.zeros(3), held).any()


@pytest.mark.parametrize(
    ("counts", "held", "message"),
    [
        ([1, -2], np.ones((2, 2), bool), r"counts\[1\] is -2.0, but it must be a number of tokens, at least 0"),
        ([1, np.nan], np.ones((2, 2), bool), r"counts\[1\] is nan, but it must be a number of tokens, at least 0"),
        ([1, 2, 3], np.ones((2, 2), bool), r"counts has shape \(3,\), but it must be \(E=2\)"),
        ([1, 5], np.array([[True], [False]]), "expert 1 has 5 tokens, but no GPU has a copy of it"),
    ],
)
def test_bad_input(counts, held, message):
    with pytest.raises(ValueError, match=message):
        balanced(np.array(counts), held)
    with pytest.raises(TypeError, match="held"):
        balanced(np.array(counts), held.astype(int))
