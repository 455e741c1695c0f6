"""Token dispatch: from each token's experts to each expert's tokens, as indices alone.

Source: MoEBlaze (arXiv 2601.05296), section 4. The four index structures (4.1) are built
without sorting, in three steps (4.2): a dense token-expert map, the experts' lengths and
offsets, and the positions by a tile-wise scan down each expert's column. `build_by_sort`
reaches the same structures by a stable sort, for comparison only.
"""

from collections.abc import Iterator

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import EMPTY, Dispatch

TILE = 256  # tokens that one scan covers: one per thread of a block, in the kernels


@implements(stage_contracts.DENSE_MAP, ARRAYS)
def dense_map(topk_experts, num_experts):
    num_tokens = topk_experts.shape[0]
    tokens = np.arange(num_tokens, dtype=np.int32)[:, None]  # (L, 1)
    routed = np.full((num_tokens, num_experts), EMPTY, dtype=np.int32)
    routed[tokens, topk_experts] = tokens
    return routed


@implements(stage_contracts.EXPERT_LENGTHS, ARRAYS)
def expert_lengths(dense_map):
    return (dense_map != EMPTY).sum(axis=0, dtype=np.int32)


@implements(stage_contracts.EXPERT_OFFSETS, ARRAYS)
def expert_offsets(lengths):
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


@implements(stage_contracts.ROUTE_INDICES, ARRAYS)
def route_indices(dense_map, offsets, topk_experts):
    """Down each expert's column, tile by tile, a token's position is the expert's offset, plus
    the routed tokens of the tiles above, plus those before it in its own tile.
    """
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


@implements(stage_contracts.LOCATION_MAP, ARRAYS)
def location_map(dense_map, offsets):
    routed = dense_map != EMPTY  # (L, E)
    earlier = routed.cumsum(axis=0, dtype=np.int32) - routed  # (L, E)
    return offsets[:-1] + earlier


@implements(stage_contracts.WRITE_INDICES, ARRAYS)
def write_indices(dense_map, location_map, topk_experts):
    expert_token_indices = np.empty(topk_experts.size, dtype=np.int32)  # (R,)
    tokens = np.arange(len(topk_experts))[:, None]  # (L, 1)
    locations = location_map[tokens, topk_experts]  # (L, k)
    expert_token_indices[locations] = dense_map[tokens, topk_experts]
    return expert_token_indices, locations.ravel()


@implements(stage_contracts.BUILD, ARRAYS)
def build(topk_experts, num_experts) -> Dispatch:
    """Build the structures by the paper's three steps."""
    routed = dense_map.unchecked(topk_experts, num_experts)  # (L, E)
    offsets = expert_offsets.unchecked(expert_lengths.unchecked(routed))  # (E + 1,)
    expert_token_indices, token_index_map = route_indices.unchecked(routed, offsets, topk_experts)  # (R,), (R,)
    return Dispatch(expert_token_indices, offsets, topk_experts.flatten(), token_index_map, topk_experts.shape[1])


@implements(stage_contracts.BUILD_BY_SORT, ARRAYS)
def build_by_sort(topk_experts, num_experts) -> Dispatch:
    """The oracle of every `build`."""
    k = topk_experts.shape[1]
    chosen = topk_experts.flatten()  # (R,)
    order = np.argsort(chosen, kind="stable")  # (R,) slots in expert order
    rank = np.empty(chosen.size, dtype=np.int32)  # (R,) the inverse permutation
    rank[order] = np.arange(chosen.size, dtype=np.int32)
    offsets = np.searchsorted(chosen[order], np.arange(num_experts + 1))  # (E + 1,)
    return Dispatch((order // k).astype(np.int32), offsets.astype(np.int32), chosen, rank, k)


@implements(stage_contracts.BUILD_PART, ARRAYS)
def build_part(topk_experts, num_experts, num_routed) -> Dispatch:
    """Build the structures by a stable sort."""
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
        Not checked: the stages have checked it.

    Yields
    ------
    expert : int
    group : slice
        The rows of this expert in any (R, ...) tensor in expert order.
    tokens : ndarray (rows,), int32
        The rows of x or out that they stand for; distinct within an expert.
    """
    offsets = dispatch.expert_token_offsets
    for expert in range(dispatch.E):
        group = slice(offsets[expert], offsets[expert + 1])
        yield expert, group, dispatch.expert_token_indices[group]
