"""Dispatch without sorting: the three steps of MoEBlaze, section 4.2, as Numba kernels.

    topk_experts (L, k)
      1.  dense_map (L, E): token i where i is routed to e, else EMPTY
      2a. lengths (E,): count each column
      2b. expert_token_offsets (E + 1,): scan the lengths
      3.  expert_token_indices, token_index_map (R,): scan each column, then write

No atomics and no warp operations: each element has one writer, so the result is the same,
bit for bit, from run to run, and every kernel runs on the simulator too. The price is the
dense map: L * E * 4 bytes, which is 1 GiB at L = 2**20, E = 256. Memory bounds every kernel,
and the map is nearly all of what they move: written once, read twice.
"""

import numpy as np
from numba import int32

from moeblaze_ref.backends.numba_cuda.runtime import (
    ARRAYS,
    THREADS,
    all_to_device,
    blocks_for,
    cuda,
    int32_output,
    launch,
    to_caller,
    to_device,
)
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import EMPTY, STRUCTURES, Dispatch

SHARED_BYTES = 4 * THREADS  # of the kernels that use any: one int32 a thread


# Step 1: the dense token-expert map


@cuda.jit
def dense_map_kernel(topk_experts, dense_map):
    """Lay out who is routed to whom: dense_map[i, e] = i if token i chose expert e, else EMPTY.

    Source        MoEBlaze, section 4.2, step 1
    Grid          ceil(L / THREADS) blocks of THREADS threads, a block for each tile of tokens
    Shared bytes  0
    Global bytes  reads 4 R; writes 4 L E + 4 R
    """
    num_tokens, k = topk_experts.shape
    num_experts = dense_map.shape[1]
    thread = cuda.threadIdx.x
    first = cuda.blockIdx.x * THREADS
    tile = min(THREADS, num_tokens - first)

    # The whole block clears the tile, neighbouring threads writing neighbouring entries.
    for entry in range(thread, tile * num_experts, THREADS):
        dense_map[first + entry // num_experts, entry % num_experts] = EMPTY
    cuda.syncthreads()  # a mark must not be cleared by a slower thread

    if thread < tile:
        token = first + thread
        for j in range(k):
            dense_map[token, topk_experts[token, j]] = token


# Step 2: how many tokens each expert has, and where its group starts


@cuda.jit
def expert_lengths_kernel(dense_map, lengths):
    """Count the tokens of each expert: its column's entries that are not EMPTY.

    Down a column, neighbouring threads read 4 E bytes apart: from E = 8 on, every entry
    asks for a 32-byte sector of its own. Step 3 reads the map in the same way.

    Source        MoEBlaze, section 4.2, step 2
    Grid          E blocks of THREADS threads, a block for each expert
    Shared bytes  4 THREADS
    Global bytes  reads 4 L E; writes 4 E
    """
    counts = cuda.shared.array(0, int32)  # THREADS int32
    thread = cuda.threadIdx.x
    expert = cuda.blockIdx.x

    count = 0
    for token in range(thread, dense_map.shape[0], THREADS):
        if dense_map[token, expert] != EMPTY:
            count += 1
    counts[thread] = count
    cuda.syncthreads()

    # A tree: each round adds the upper half of what is left to the lower half.
    half = THREADS // 2
    while half > 0:
        if thread < half:
            counts[thread] += counts[thread + half]
        cuda.syncthreads()
        half //= 2
    if thread == 0:
        lengths[expert] = counts[0]


@cuda.jit(device=True)
def exclusive_scan(value, scratch):
    """(sum of ``value`` over the lower threads of the block, sum over all its threads).

    ``scratch`` is shared memory for THREADS int32. After the round with reach r, a thread
    holds the sum of the 2 r values that end at its own: log2(THREADS) rounds (Hillis, Steele).
    """
    thread = cuda.threadIdx.x
    scratch[thread] = value
    cuda.syncthreads()
    reach = 1
    while reach < THREADS:
        left = scratch[thread - reach] if thread >= reach else 0
        cuda.syncthreads()  # all have read before one writes
        scratch[thread] += left
        cuda.syncthreads()
        reach *= 2
    before = scratch[thread] - value
    total = scratch[THREADS - 1]
    cuda.syncthreads()  # all have read before the next tile's values come in
    return before, total


@cuda.jit
def expert_offsets_kernel(lengths, offsets):
    """Turn lengths into offsets: offsets[e] is the sum of the lengths before e, offsets[E] is R.

    Source        MoEBlaze, section 4.2, step 2
    Grid          1 block of THREADS threads, which scans THREADS experts at a time
    Shared bytes  4 THREADS
    Global bytes  reads 4 E; writes 4 E + 4
    """
    scratch = cuda.shared.array(0, int32)  # THREADS int32
    thread = cuda.threadIdx.x
    num_experts = lengths.shape[0]

    start = 0
    for first in range(0, num_experts, THREADS):
        expert = first + thread
        length = lengths[expert] if expert < num_experts else 0
        before, total = exclusive_scan(length, scratch)
        if expert < num_experts:
            offsets[expert] = start + before
        start += total
    if thread == 0:
        offsets[num_experts] = start


# Step 3: the position of every routed row in the expert order


@cuda.jit
def route_indices_kernel(dense_map, offsets, topk_experts, expert_token_indices, token_index_map):
    """Rank the tokens of each expert, and write both directions of the route.

    A token's position is its expert's offset + how many lower tokens chose that expert.

    Source        MoEBlaze, section 4.2, step 3
    Grid          E blocks of THREADS threads, a block for each expert, which scans THREADS tokens at a time
    Shared bytes  4 THREADS
    Global bytes  reads 4 L E + 4 E THREADS + 4 R k; writes 8 R
    """
    scratch = cuda.shared.array(0, int32)  # THREADS int32
    thread = cuda.threadIdx.x
    expert = cuda.blockIdx.x
    num_tokens, k = topk_experts.shape

    start = offsets[expert]
    for first in range(0, num_tokens, THREADS):
        token = first + thread
        routed = 1 if token < num_tokens and dense_map[token, expert] != EMPTY else 0
        before, total = exclusive_scan(routed, scratch)
        if routed:
            position = start + before
            expert_token_indices[position] = token
            for j in range(k):
                if topk_experts[token, j] == expert:
                    token_index_map[token * k + j] = position
        start += total


# Step 3 as printed: a location map, then a kernel of its own that writes


@cuda.jit
def location_map_kernel(dense_map, offsets, location_map):
    """Store where each token goes in the order of each expert: the offset + how many lower tokens chose the expert.

    Source        MoEBlaze, section 4.2, step 3, first phase
    Grid          E blocks of THREADS threads, a block for each expert, which scans THREADS tokens at a time
    Shared bytes  4 THREADS
    Global bytes  reads 4 L E + 4 E THREADS; writes 4 L E
    """
    scratch = cuda.shared.array(0, int32)  # THREADS int32
    thread = cuda.threadIdx.x
    expert = cuda.blockIdx.x
    num_tokens = dense_map.shape[0]

    start = offsets[expert]
    for first in range(0, num_tokens, THREADS):
        token = first + thread
        routed = 1 if token < num_tokens and dense_map[token, expert] != EMPTY else 0
        before, total = exclusive_scan(routed, scratch)
        if token < num_tokens:
            location_map[token, expert] = start + before
        start += total


@cuda.jit
def write_indices_kernel(dense_map, location_map, topk_experts, expert_token_indices, token_index_map):
    """Move each routed entry's token id to its location, and the location to the token's slot.

    Source        MoEBlaze, section 4.2, step 3, second phase
    Grid          ceil(L E / THREADS) blocks of THREADS threads, a thread for each entry of the map
    Shared bytes  0
    Global bytes  reads 4 L E + 4 R + 4 R k; writes 8 R
    """
    num_tokens, k = topk_experts.shape
    num_experts = dense_map.shape[1]
    entry = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if entry < num_tokens * num_experts:
        token, expert = entry // num_experts, entry % num_experts
        if dense_map[token, expert] != EMPTY:
            location = location_map[token, expert]
            expert_token_indices[location] = token
            for j in range(k):
                if topk_experts[token, j] == expert:
                    token_index_map[token * k + j] = location


# The steps on the host. They take arrays on the device, which were checked before


def _make_map(topk_experts, num_experts):
    """Step 1: the dense map (L, E) of topk_experts (L, k)."""
    num_tokens = topk_experts.shape[0]
    result = int32_output((num_tokens, num_experts))
    launch(dense_map_kernel, blocks_for(num_tokens), THREADS, topk_experts, result)
    return result


def _count(dense_map):
    """Step 2a: the lengths (E,) of the dense map (L, E)."""
    num_experts = dense_map.shape[1]
    lengths = int32_output(num_experts)
    launch(expert_lengths_kernel, num_experts, THREADS, dense_map, lengths, shared_bytes=SHARED_BYTES)
    return lengths


def _scan(lengths):
    """Step 2b: the offsets (E + 1,) of the lengths (E,)."""
    offsets = int32_output(lengths.shape[0] + 1)
    launch(expert_offsets_kernel, 1, THREADS, lengths, offsets, shared_bytes=SHARED_BYTES)
    return offsets


def _route(dense_map, offsets, topk_experts):
    """Step 3: expert_token_indices and token_index_map, each (R,)."""
    num_routed = topk_experts.shape[0] * topk_experts.shape[1]
    outputs = int32_output(num_routed), int32_output(num_routed)
    inputs = dense_map, offsets, topk_experts
    launch(route_indices_kernel, dense_map.shape[1], THREADS, *inputs, *outputs, shared_bytes=SHARED_BYTES)
    return outputs


# The steps and the stage, as the specification has them: checked arrays of the caller's kind


@implements(stage_contracts.DENSE_MAP_IN_KERNELS, ARRAYS)
def dense_map(topk_experts, num_experts):
    return to_caller(topk_experts, _make_map(to_device(topk_experts), num_experts))[0]


@implements(stage_contracts.EXPERT_LENGTHS, ARRAYS)
def expert_lengths(dense_map):
    return to_caller(dense_map, _count(to_device(dense_map)))[0]


@implements(stage_contracts.EXPERT_OFFSETS, ARRAYS)
def expert_offsets(lengths):
    return to_caller(lengths, _scan(to_device(lengths)))[0]


@implements(stage_contracts.ROUTE_INDICES, ARRAYS)
def route_indices(dense_map, offsets, topk_experts):
    return to_caller(topk_experts, *_route(*all_to_device(dense_map, offsets, topk_experts)))


@implements(stage_contracts.LOCATION_MAP, ARRAYS)
def location_map(dense_map, offsets):
    result, inputs = int32_output(dense_map.shape), all_to_device(dense_map, offsets)
    launch(location_map_kernel, dense_map.shape[1], THREADS, *inputs, result, shared_bytes=SHARED_BYTES)
    return to_caller(dense_map, result)[0]


@implements(stage_contracts.WRITE_INDICES, ARRAYS)
def write_indices(dense_map, location_map, topk_experts):
    inputs = all_to_device(dense_map, location_map, topk_experts)
    outputs = int32_output(inputs[2].size), int32_output(inputs[2].size)
    launch(write_indices_kernel, blocks_for(inputs[0].size), THREADS, *inputs, *outputs)
    return to_caller(topk_experts, *outputs)


@implements(stage_contracts.BUILD_IN_KERNELS, ARRAYS)
def build(topk_experts, num_experts) -> Dispatch:
    """Build by the three steps of section 4.2. Returns numpy arrays for numpy input and for L = 0; otherwise CuPy
    arrays, the token_expert_indices being a view of ``topk_experts``.
    """
    num_tokens, k = topk_experts.shape
    if num_tokens == 0:
        return _empty(num_experts, k)

    chosen = to_device(topk_experts)
    routed = _make_map(chosen, num_experts)  # (L, E)
    offsets = _scan(_count(routed))  # (E + 1,)
    expert_token_indices, token_index_map = _route(routed, offsets, chosen)  # (R,), (R,)
    arrays = expert_token_indices, offsets, chosen.reshape(num_tokens * k), token_index_map
    structures = dict(zip(STRUCTURES, to_caller(topk_experts, *arrays), strict=True))
    return Dispatch(**structures, k=k)


def _empty(num_experts: int, k: int) -> Dispatch:
    """The Dispatch of no token: CUDA knows no empty grid and no empty array."""
    no_rows = np.empty(0, dtype=np.int32)
    return Dispatch(no_rows, np.zeros(num_experts + 1, dtype=np.int32), no_rows, no_rows, k)
