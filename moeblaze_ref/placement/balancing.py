"""Balance a batch among copies of experts: the linear program of a dispatch, solved by filling up.

A batch asks for some tokens of each expert, and an expert's copies may share its tokens as they like. The program asks
for the shares whose fullest GPU has least. Here the sum of the squared loads is minimised instead, one expert after the
other. The loads with the least squares also have the least maximum. Where the fullest GPUs could have less, tokens
could move from them to emptier GPUs, perhaps by way of others. That would lessen the squares too.
"""

import numba
import numpy as np

from moeblaze_ref.core import checks

TOLERANCE = 1e-4  # of the mean load: what a pass over all experts may still change
PASSES = 10_000


def balanced(counts: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the tokens of each expert that each GPU serves, (E, G) float64, with the least load of the fullest GPU.

    Parameters
    ----------
    counts : array (E,)
        Tokens of each expert in a batch, at least 0.
    held : array (E, G) bool
        Where each expert has a copy.

    Raises
    ------
    ValueError, TypeError
        If a count is negative or not finite, an expert with tokens is on no GPU, or an array has another shape.

    Notes
    -----
    The shares are whole numbers only by chance: a dispatch rounds them.
    """
    checks.check_array("held", held, 2, ("bool",), contiguous=False)
    counts = np.asarray(counts, np.float64)
    checks.check_shape("counts", counts, {"E": held.shape[0]})
    wrong = ~(np.isfinite(counts) & (counts >= 0))
    if wrong.any():
        (expert,) = checks.first(wrong)
        raise ValueError(f"counts[{expert}] is {counts[expert]}, but it must be a number of tokens, at least 0")
    nowhere = (counts > 0) & ~held.any(axis=1)
    if nowhere.any():
        (expert,) = checks.first(nowhere)
        raise ValueError(f"expert {expert} has {counts[expert]:g} tokens, but no GPU has a copy of it")
    return _filled(counts, np.ascontiguousarray(held), TOLERANCE * counts.sum() / held.shape[1])


@numba.njit(cache=True, nogil=True)
def _filled(counts, held, tolerance):
    """Give each expert's tokens to the emptiest of its GPUs, again and again, until nothing moves."""
    E, G = held.shape
    served, load = np.zeros((E, G)), np.zeros(G)
    for _ in range(PASSES):
        moved = 0.0
        for e in range(E):
            gpus = np.flatnonzero(held[e])
            others = load[gpus] - served[e, gpus]
            order = np.argsort(others)
            level = _level(others[order], counts[e])
            for i in order:
                g, new = gpus[i], max(level - others[i], 0.0)
                moved = max(moved, abs(new - served[e, g]))
                load[g] += new - served[e, g]
                served[e, g] = new
        if moved <= tolerance:
            break
    return served


@numba.njit(cache=True, nogil=True)
def _level(heights, amount):
    """The level that an amount of water reaches over ascending heights."""
    level = amount
    for n in range(1, len(heights) + 1):
        level = (amount + heights[:n].sum()) / n
        if n == len(heights) or level <= heights[n]:
            break
    return level
