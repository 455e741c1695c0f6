"""Sets as bits, 64 members a word. Compiled by Numba for the CPU."""

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

ZERO, ONE = np.uint64(0), np.uint64(1)


def packed(mask: np.ndarray) -> np.ndarray:
    """Sets as bits, (n, words) uint64, from a mask (n, members): member m is bit m % 64 of word m // 64."""
    n, members = mask.shape
    whole = np.zeros((n, -(-max(members, 1) // 64) * 64), bool)
    whole[:, :members] = mask
    return np.packbits(whole, axis=1, bitorder="little").view(np.uint64)


@intrinsic
def _population(typing, word):
    """The number of bits of a word that are 1: one instruction."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@numba.njit(cache=True, nogil=True, inline="always")
def bits_set(word):
    """The number of bits of a word (uint64) that are 1, int64."""
    return np.int64(_population(word))  # type: ignore[call-arg]  # Numba itself passes `typing`


@numba.njit(cache=True, nogil=True)
def size(words):
    """Members of a set."""
    count = 0
    for word in words:
        count += bits_set(word)
    return count


@numba.njit(cache=True, nogil=True, inline="always")
def clear(sets, n):
    """Empty set n."""
    for w in range(sets.shape[1]):
        sets[n, w] = ZERO


@numba.njit(cache=True, nogil=True, inline="always")
def has(sets, n, member):
    """Return True if set n has a member."""
    return sets[n, member >> 6] >> np.uint64(member & 63) & ONE != ZERO


@numba.njit(cache=True, nogil=True, inline="always")
def put(sets, n, member):
    """Put a member into set n."""
    sets[n, member >> 6] |= ONE << np.uint64(member & 63)


@numba.njit(cache=True, nogil=True)
def flip(sets, n, member):
    """Put a member into set n, or take it out if it is there."""
    sets[n, member >> 6] ^= ONE << np.uint64(member & 63)
