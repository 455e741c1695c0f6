"""The up-projection: rows of x, gathered by index, times each expert's w1 and w2, as Numba kernels.

    x (L, d), w1, w2 (E, d, h), Dispatch
      forward:          a, b, y_swi (R, h), one kernel
      input_gradient:   d_a, d_b (R, h) -> d_x (L, d), one kernel
      weight_gradient:  d_a -> d_w1, or d_b -> d_w2 (E, d, h), one kernel

Sources: MoEBlaze (arXiv 2601.05296), sections 3.1 (no buffer of routed inputs), 3.2 (the k
gradients of a token are summed on the fly) and 5 (one pass over x for both GEMMs).

No kernel sees routed rows in memory: each finds its rows of x through expert_token_indices at
the moment that it needs them. The forward works in expert order, where the rows of one expert
are neighbours: a tile of them shares the expert's weights, and both go through shared memory.
The backward's kernels are naive, one thread an output element, and ask for every operand anew.
Each output element has one writer and each sum one order: same input, same bits.
"""

import functools

from numba import float32

from moeblaze_ref.backends.numba_cuda.activation import NONLINEARITY
from moeblaze_ref.backends.numba_cuda.runtime import (
    ARRAYS,
    EXECUTOR,
    ZERO,
    all_to_device,
    cuda,
    float32_output,
    launch,
    per_element,
    to_caller,
)
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import HIDDEN, only

TILE = 16 if EXECUTOR == "cuda" else 5  # rows and columns of a tile; a thread has one element of each


@functools.cache
def expert_up_kernel(activation):
    """The kernel of `forward` for one activation, a constant in it: Numba drops the branch that is not taken."""
    act, _ = NONLINEARITY[activation]
    gated = is_gated(activation)

    @cuda.jit
    def kernel(x, w1, w2, expert_token_indices, expert_token_offsets, a, b, y_swi):
        """Project one expert's rows by w1 and w2, TILE rows at a time, and activate the sums in registers.

        Threads load the tiles together: the gather of x is this load and nothing more. Each element
        in shared memory is then used TILE times, an element of x by both projections.

        Source        MoEBlaze, sections 3.1 and 5 (Algorithm 1): A = X W1, B = X W2, Y_swi = SiLU(A) * B
        Grid          E C blocks of TILE TILE threads, a block for each expert and TILE columns of h
        Shared bytes  4 TILE TILE (1 + G)
        Global bytes  reads 4 R d C + 4 G d h tiles + 4 R C TILE + 8 E C TILE TILE; writes 4 R h (1 + G)
                      C is ceil(h / TILE), tiles are the row tiles of all experts, G is 2 if gated, else 1
        """
        area = TILE * TILE
        tiles = cuda.shared.array(0, float32)  # 1 + G tiles, one after another
        x_tile, w1_tile, w2_tile = tiles[:area], tiles[area : 2 * area], tiles[2 * area :]
        row, column = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE  # this thread's place in each tile
        here = row * TILE + column
        d, h = w1.shape[1], w1.shape[2]
        column_tiles = (h + TILE - 1) // TILE
        expert = cuda.blockIdx.x // column_tiles
        hidden = cuda.blockIdx.x % column_tiles * TILE + column  # its column of a, b and y_swi

        end = expert_token_offsets[expert + 1]
        for first in range(expert_token_offsets[expert], end, TILE):
            position = first + row
            live = position < end  # the last tile may have fewer rows
            token = expert_token_indices[position] if live else 0
            a_sum = b_sum = ZERO
            for step in range(0, d, TILE):
                # Zeros beyond the edges add nothing to the sums.
                x_tile[here] = x[token, step + column] if live and step + column < d else ZERO
                inside = step + row < d and hidden < h
                w1_tile[here] = w1[expert, step + row, hidden] if inside else ZERO
                if gated:
                    w2_tile[here] = w2[expert, step + row, hidden] if inside else ZERO
                cuda.syncthreads()  # the tiles are full
                for i in range(TILE):
                    x_value = x_tile[row * TILE + i]
                    a_sum += x_value * w1_tile[i * TILE + column]
                    if gated:
                        b_sum += x_value * w2_tile[i * TILE + column]
                cuda.syncthreads()  # all have read before one loads the next tiles
            if live and hidden < h:
                a[position, hidden] = a_sum
                if gated:
                    b[position, hidden] = b_sum
                    y_swi[position, hidden] = act(a_sum) * b_sum
                else:
                    y_swi[position, hidden] = act(a_sum)

    return kernel


@functools.cache
def d_x_kernel(gated):
    """The kernel of d_x for gated or ungated layers, a constant in it."""

    @cuda.jit
    def kernel(d_a, d_b, w1, w2, token_expert_indices, token_index_map, d_x):
        """Sum the gradients of a token's k rows on the fly, in the order of its slots.

        Neighbouring threads read w1 and w2 4 h bytes apart, since both enter transposed.

        Source        MoEBlaze, sections 3.2 and 5: dX = dA W1^T + dB W2^T
        Grid          ceil(L d / THREADS) blocks of THREADS threads, a thread for each element
        Shared bytes  0
        Global bytes  reads 8 R d + 8 G R d h; writes 4 L d
                      G is 2 if gated, else 1
        """
        num_tokens, d = d_x.shape
        element = cuda.grid(1)
        token, column = element // d, element % d
        if token < num_tokens:
            k = token_index_map.shape[0] // num_tokens
            total = ZERO
            for slot in range(token * k, (token + 1) * k):
                expert, position = token_expert_indices[slot], token_index_map[slot]
                for i in range(d_a.shape[1]):
                    total += d_a[position, i] * w1[expert, column, i]
                    if gated:
                        total += d_b[position, i] * w2[expert, column, i]
            d_x[token, column] = total

    return kernel


@cuda.jit
def d_w_kernel(d_hidden, x, expert_token_indices, expert_token_offsets, d_w):
    """Sum x^T d_hidden over each expert's rows: d_w1 from d_a, or d_w2 from d_b.

    An expert without rows gets zeros.

    Source        MoEBlaze, section 5: dW1 = X^T dA, dW2 = X^T dB
    Grid          ceil(E d h / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 8 E d h + 12 R d h; writes 4 E d h
    """
    num_experts, d, h = d_w.shape
    element = cuda.grid(1)
    expert, row, column = element // (d * h), element // h % d, element % h
    if expert < num_experts:
        total = ZERO
        for position in range(expert_token_offsets[expert], expert_token_offsets[expert + 1]):
            total += x[expert_token_indices[position], row] * d_hidden[position, column]
        d_w[expert, row, column] = total


@implements(stage_contracts.EXPERT_UP, ARRAYS)
def forward(x, w1, w2, dispatch, activation, stores=HIDDEN):
    num_experts, _, h = w1.shape
    a, y_swi = float32_output((dispatch.R, h)), float32_output((dispatch.R, h))
    b = None if w2 is None else float32_output((dispatch.R, h))
    groups = all_to_device(dispatch.expert_token_indices, dispatch.expert_token_offsets)
    launch(
        expert_up_kernel(activation),
        num_experts * -(-h // TILE),
        TILE * TILE,
        *all_to_device(x, w1, w2),
        *groups,
        a,
        b,
        y_swi,
        shared_bytes=4 * TILE * TILE * (2 if w2 is None else 3),
    )
    return to_caller(x, *only(stores, a, b, y_swi))


@implements(stage_contracts.EXPERT_UP_D_X, ARRAYS)
def input_gradient(d_a, d_b, w1, w2, dispatch):
    """Rows are summed over the slots of a token in their order: always the same bits."""
    operands = d_a, d_b, w1, w2, dispatch.token_expert_indices, dispatch.token_index_map
    return per_element(d_x_kernel(w2 is not None), d_a, (dispatch.L, w1.shape[1]), *operands)


@implements(stage_contracts.EXPERT_UP_D_W, ARRAYS)
def weight_gradient(d_hidden, x, dispatch):
    operands = d_hidden, x, dispatch.expert_token_indices, dispatch.expert_token_offsets
    return per_element(d_w_kernel, x, (dispatch.E, x.shape[1], d_hidden.shape[1]), *operands)
