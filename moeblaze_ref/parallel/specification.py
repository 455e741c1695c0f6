"""A trip between ranks, in numpy: the specification of kernels_cuda/parallel/trip.cu.

Which copy of an expert a token uses is specified by `placement.copies.choose`.
"""

import numpy as np

from moeblaze_ref.core.structures import EMPTY


def first_slots(homes: np.ndarray) -> np.ndarray:
    """The ranks (L, k) of tokens' experts, but ``EMPTY`` where an earlier slot of the token is for the same rank."""
    earlier = np.tril(homes[:, :, None] == homes[:, None, :], -1).any(axis=2)
    return np.where(earlier, EMPTY, homes)


def make_room(ranks: np.ndarray, words: np.ndarray, num_ranks: int, rows: int) -> tuple[np.ndarray, ...]:
    """Give every rank room for the same number of rows.

    Parameters
    ----------
    ranks : array (L, k)
        By `first_slots`.
    words : array (L, n)
        That travel with each token's row.
    num_ranks : int
        G.
    rows : int
        For each rank.

    Returns
    -------
    tokens : array (G * rows,)
        Of each row; ``EMPTY`` of a spare one.
    words : array (G * rows, n)
        The same.
    places : array (L, k)
        The row of each slot; ``EMPTY`` of a slot without one, and of all if a rank has too little room.
    overflowed : array () bool
        A rank has too little room.
    """
    tokens, places = np.full((num_ranks, rows), EMPTY), np.full(ranks.shape, EMPTY)
    of_rows, overflowed = np.full((num_ranks, rows, words.shape[1]), EMPTY), False
    for rank in range(num_ranks):
        slots = np.argwhere(ranks == rank)
        overflowed |= len(slots) > rows
        for place, (token, j) in enumerate(slots[:rows]):
            tokens[rank, place], of_rows[rank, place] = token, words[token]
            places[token, j] = rank * rows + place
    if overflowed:
        places[:] = EMPTY
    return tokens.ravel(), of_rows.reshape(-1, words.shape[1]), places, np.array(overflowed)


def find_places(arrived: np.ndarray, here: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the experts of rows that have arrived.

    Parameters
    ----------
    arrived : array (rows, 2k) int32
        Numbers of copies, ``rank * E + expert``, then the bits of gates.
    here : array (G * E,)
        The place on this rank of each copy's expert, ``EMPTY`` if the copy is elsewhere.
    room : int
        For so many choices of experts of this rank.

    Returns
    -------
    places : array (rows, k)
        ``EMPTY`` of experts elsewhere; all are if the choices lack room.
    gates : array (rows, k) float32
    overflowed : array () bool
        The choices lack room.
    """
    numbers, gates = np.split(arrived, 2, axis=1)
    places = np.append(here, EMPTY)[numbers]  # EMPTY is -1: that of the last
    overflowed = (places != EMPTY).sum() > room
    return np.where(overflowed, EMPTY, places), np.ascontiguousarray(gates).view(np.float32), overflowed
