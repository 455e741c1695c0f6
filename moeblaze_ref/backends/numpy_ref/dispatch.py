"""Token dispatch: from each token's experts to each expert's tokens, as indices alone.

Source: MoEBlaze (arXiv 2601.05296), section 4. The four index structures (4.1) are built
without sorting, in three steps (4.2): a dense token-expert map, the experts' lengths and
offsets, and the positions by a tile-wise scan down each expert's column. `build_by_sort`
reaches the same structures by a stable sort, for comparison only.
"""

from collections.abc import Iterator

import numpy as np

from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import EMPTY, Dispatch

TILE = 256  # tokens that one scan covers: one per thread of a block, in the kernels


def dense_map(topk_experts, num_experts):
    """Step 1: a row for each token, a column for each expert.

    Parameters
    ----------
    topk_experts : ndarray (L, k), int32, C-contiguous
        Expert ids of each token, distinct within a row.
    num_experts : int
        E.

    Returns
    -------
    ndarray (L, E), int32
        Entry (i, e) is i if token i goes to expert e, else ``EMPTY``: L * E * 4 bytes.

    Raises
    ------
    ValueError
        If an id is out of range or doubled, k > E, or R = L * k exceeds 2**31 - 1024.
    TypeError
        If the dtype is not int32.

    Notes
    -----
    MoEBlaze, section 4.2, step 1.
    """
    checks.check_topk_experts(topk_experts, num_experts)
    num_tokens = topk_experts.shape[0]
    tokens = np.arange(num_tokens, dtype=np.int32)[:, None]  # (L, 1)
    routed = np.full((num_tokens, num_experts), EMPTY, dtype=np.int32)
    routed[tokens, topk_experts] = tokens
    return routed


def expert_lengths(dense_map):
    """Step 2a: how many tokens each expert gets.

    Parameters
    ----------
    dense_map : ndarray (L, E), int32
        As made by the function of that name.

    Returns
    -------
    ndarray (E,), int32

    Raises
    ------
    ValueError
        If the rank is not 2.
    TypeError
        If the dtype is not int32.

    Notes
    -----
    MoEBlaze, section 4.2, step 2.
    """
    stage_contracts.check_dense_map(dense_map)
    return (dense_map != EMPTY).sum(axis=0, dtype=np.int32)


def expert_offsets(lengths):
    """Step 2b: where each expert's group begins: the exclusive prefix sum of the lengths, and R at its end.

    Parameters
    ----------
    lengths : ndarray (E,), int32

    Returns
    -------
    ndarray (E + 1,), int32

    Raises
    ------
    ValueError
        If a length is negative or their sum R exceeds 2**31 - 1024.
    TypeError
        If the dtype is not int32.

    Notes
    -----
    MoEBlaze, section 4.2, step 2.
    """
    stage_contracts.check_lengths(lengths)
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)  # (E + 1,)


def exclusive_scan(flags):
    """How many flags are set before each place.

    Parameters
    ----------
    flags : ndarray (n,), bool

    Returns
    -------
    ndarray (n,), int32

    Raises
    ------
    ValueError
        If the rank is not 1.
    TypeError
        If the dtype is not bool.
    """
    checks.check_array("flags", flags, rank=1, dtypes=("bool",), contiguous=False)
    return np.cumsum(flags, dtype=np.int32) - flags


def route_indices(dense_map, offsets, topk_experts):
    """Step 3: the final position of every routed row.

    Down each expert's column, tile by tile, a token's position is the expert's offset, plus
    the routed tokens of the tiles above, plus those before it in its own tile.

    Parameters
    ----------
    dense_map : ndarray (L, E), int32
        From step 1.
    offsets : ndarray (E + 1,), int32
        From step 2.
    topk_experts : ndarray (L, k), int32, C-contiguous
        Tells which of its k slots a token used for an expert.

    Returns
    -------
    expert_token_indices : ndarray (R,), int32
        Token ids grouped by expert, ascending inside an expert.
    token_index_map : ndarray (R,), int32
        Position of slot (token, j) in expert_token_indices, row-major (L, k).

    Raises
    ------
    ValueError
        If topk_experts is not valid, or the map or the offsets are not what steps 1 and 2 make of it.
    TypeError
        If a dtype is not int32.

    Notes
    -----
    MoEBlaze, section 4.2, step 3.
    """
    stage_contracts.check_route_indices(dense_map, offsets, topk_experts)
    num_tokens, num_experts = dense_map.shape
    expert_token_indices = np.empty(topk_experts.size, dtype=np.int32)  # (R,)
    token_index_map = np.empty(topk_experts.shape, dtype=np.int32)  # (L, k)
    for expert in range(num_experts):
        base = offsets[expert]
        for start in range(0, num_tokens, TILE):
            tile = dense_map[start : start + TILE, expert]  # (TILE,), shorter at the end
            routed = tile != EMPTY
            tokens = tile[routed]
            positions = base + exclusive_scan(routed)[routed]
            slots = (topk_experts[tokens] == expert).argmax(axis=1)
            expert_token_indices[positions] = tokens
            token_index_map[tokens, slots] = positions
            base += np.int32(len(tokens))
    return expert_token_indices, token_index_map.ravel()


def location_map(dense_map, offsets):
    """Step 3 as printed, first phase: where each token goes in the order of each expert.

    Parameters
    ----------
    dense_map : ndarray (L, E), int32
        From step 1.
    offsets : ndarray (E + 1,), int32
        From step 2.

    Returns
    -------
    ndarray (L, E), int32
        Entry (i, e) is offsets[e] plus the number of tokens before i that go to expert e: the position of token i if
        it goes there too. The dense map says whether it does.

    Raises
    ------
    ValueError
        If the rank of the map is not 2, or the offsets are not what step 2 makes of it.
    TypeError
        If a dtype is not int32.

    Notes
    -----
    MoEBlaze, section 4.2, step 3: the exclusive scan of each column, plus the expert's offset. `route_indices` does
    both phases at once.
    """
    stage_contracts.check_location_map(dense_map, offsets)
    routed = dense_map != EMPTY  # (L, E)
    earlier = routed.cumsum(axis=0, dtype=np.int32) - routed  # (L, E)
    return offsets[:-1] + earlier


def write_indices(dense_map, location_map, topk_experts):
    """Step 3 as printed, second phase: every routed entry of the map writes its token id to its location.

    Parameters
    ----------
    dense_map : ndarray (L, E), int32
        From step 1.
    location_map : ndarray (L, E), int32
        From the first phase.
    topk_experts : ndarray (L, k), int32, C-contiguous
        Tells which of its k slots a token used for an expert.

    Returns
    -------
    expert_token_indices, token_index_map : ndarray (R,), int32
        As `route_indices`.

    Raises
    ------
    ValueError
        If topk_experts is not valid, or a map is not what the steps before make of it.
    TypeError
        If a dtype is not int32.

    Notes
    -----
    MoEBlaze, section 4.2, step 3.
    """
    stage_contracts.check_write_indices(dense_map, location_map, topk_experts)
    expert_token_indices = np.empty(topk_experts.size, dtype=np.int32)  # (R,)
    tokens = np.arange(len(topk_experts))[:, None]  # (L, 1)
    locations = location_map[tokens, topk_experts]  # (L, k)
    expert_token_indices[locations] = dense_map[tokens, topk_experts]
    return expert_token_indices, locations.ravel()


def build(topk_experts, num_experts) -> Dispatch:
    """The four index structures by the paper's three steps, without sorting.

    Parameters
    ----------
    topk_experts : ndarray (L, k), int32, C-contiguous
        Expert ids of each token, distinct within a row; L = 0 is valid.
    num_experts : int
        E.

    Returns
    -------
    Dispatch

    Raises
    ------
    ValueError, TypeError
        As `dense_map`.

    Notes
    -----
    MoEBlaze, sections 4.1 and 4.2.
    """
    routed = dense_map(topk_experts, num_experts)  # (L, E)
    offsets = expert_offsets(expert_lengths(routed))  # (E + 1,)
    expert_token_indices, token_index_map = route_indices(routed, offsets, topk_experts)  # (R,), (R,)
    return Dispatch(expert_token_indices, offsets, topk_experts.flatten(), token_index_map, topk_experts.shape[1])


def build_by_sort(topk_experts, num_experts) -> Dispatch:
    """The same structures by a stable sort of the R expert ids: the oracle of every `build`.

    Parameters, result and errors are those of `build`.
    """
    checks.check_topk_experts(topk_experts, num_experts)
    k = topk_experts.shape[1]
    chosen = topk_experts.flatten()  # (R,)
    order = np.argsort(chosen, kind="stable")  # (R,) slots in expert order
    rank = np.empty(chosen.size, dtype=np.int32)  # (R,) the inverse permutation
    rank[order] = np.arange(chosen.size, dtype=np.int32)
    offsets = np.searchsorted(chosen[order], np.arange(num_experts + 1))  # (E + 1,)
    return Dispatch((order // k).astype(np.int32), offsets.astype(np.int32), chosen, rank, k)


def build_part(topk_experts, num_experts, num_routed) -> Dispatch:
    """The same structures where some experts of a token are elsewhere: of the rows that are here, by a stable sort.

    Parameters
    ----------
    topk_experts : ndarray (L, k), int32, C-contiguous
        Expert ids of each token, distinct within a row, or ``EMPTY`` in the place of one that is elsewhere.
    num_experts : int
        E; 0 if every expert is elsewhere.
    num_routed : int
        R, the ids that are not ``EMPTY``.

    Returns
    -------
    Dispatch
        A partial one.

    Raises
    ------
    ValueError, TypeError
        As `checks.check_part`.
    """
    checks.check_part(topk_experts, num_experts, num_routed)
    chosen = topk_experts.flatten()  # (L * k,)
    order = np.argsort(chosen, kind="stable")[chosen.size - num_routed :]  # (R,) slots in expert order: EMPTY is first
    positions = np.full(chosen.size, EMPTY, np.int32)  # (L * k,)
    positions[order] = np.arange(num_routed, dtype=np.int32)
    offsets = np.searchsorted(chosen[order], np.arange(num_experts + 1)).astype(np.int32)  # (E + 1,)
    k = topk_experts.shape[1]
    return Dispatch((order // k).astype(np.int32), offsets, chosen, positions, k)


def expert_groups(dispatch) -> Iterator[tuple[int, slice, np.ndarray]]:
    """The experts in turn, each with its place in the expert order and its token ids.

    Parameters
    ----------
    dispatch : Dispatch

    Raises
    ------
    ValueError, TypeError
        At the first step, if it is no Dispatch or its arrays do not fit each other.

    Yields
    ------
    expert : int
    group : slice
        The rows of this expert in any (R, ...) tensor in expert order.
    tokens : ndarray (rows,), int32
        The rows of x or out that they stand for; distinct within an expert.
    """
    checks.check_dispatch(dispatch)
    offsets = dispatch.expert_token_offsets
    for expert in range(dispatch.E):
        group = slice(offsets[expert], offsets[expert + 1])
        yield expert, group, dispatch.expert_token_indices[group]
