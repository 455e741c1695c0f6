"""The combine: each token gathers its k expert outputs, weights them by its gates and sums them, as Numba kernels.

    y (R, d), gates (L, k), Dispatch
      forward:   out (L, d), one kernel
      backward:  d_y (R, d), one kernel; d_gates (L, k), one kernel: the textbook way

Sources: MoEBlaze (arXiv 2601.05296), section 3.1, for the reduction into (L, d); SonicMoE
(arXiv 2512.14080) for gather-and-sum instead of a scatter, which needs no atomics: each output
element has one writer, which adds in the order of the slots.
"""

from moeblaze_ref.backends.numba_cuda.runtime import ARRAYS, ZERO, cuda, per_element
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements


@cuda.jit
def combine_kernel(y, gates, token_index_map, out):
    """Sum gate * y over each token's slots.

    Source        MoEBlaze, section 3.1; gather-and-sum: SonicMoE
    Grid          ceil(L d / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 12 R d; writes 4 L d
    """
    num_tokens, d = out.shape
    element = cuda.grid(1)
    token, column = element // d, element % d
    if token < num_tokens:
        k = gates.shape[1]
        total = ZERO
        for j in range(k):
            total += gates[token, j] * y[token_index_map[token * k + j], column]
        out[token, column] = total


@cuda.jit
def d_y_kernel(d_out, gates, token_index_map, d_y):
    """Send gate * d_out to each of a token's rows: the (R, d) gradient that the layer does without.

    Source        the textbook backward of MoEBlaze, section 3.1
    Grid          ceil(R d / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 12 R d; writes 4 R d
    """
    num_routed, d = d_y.shape
    element = cuda.grid(1)
    slot, column = element // d, element % d
    if slot < num_routed:
        token, j = slot // gates.shape[1], slot % gates.shape[1]
        d_y[token_index_map[slot], column] = gates[token, j] * d_out[token, column]


@cuda.jit
def d_gates_kernel(d_out, y, token_index_map, d_gates):
    """Multiply each expert output by its token's gradient: the row-wise dot product, which needs y kept.

    Source        the textbook backward of MoEBlaze, section 3.1
    Grid          ceil(R / THREADS) blocks of THREADS threads, a thread for each slot
    Shared bytes  0
    Global bytes  reads 4 R + 8 R d; writes 4 R
    """
    num_tokens, k = d_gates.shape
    slot = cuda.grid(1)
    if slot < num_tokens * k:
        token, position = slot // k, token_index_map[slot]
        total = ZERO
        for column in range(y.shape[1]):
            total += d_out[token, column] * y[position, column]
        d_gates[token, slot % k] = total


@implements(stage_contracts.COMBINE, ARRAYS)
def forward(y, gates, dispatch):
    """Rows are summed in the order j = 0, ..., k - 1: always the same bits."""
    return per_element(combine_kernel, y, (dispatch.L, y.shape[1]), y, gates, dispatch.token_index_map)


@implements(stage_contracts.COMBINE_BACKWARD, ARRAYS)
def backward(d_out, y, gates, dispatch):
    d_y = per_element(d_y_kernel, y, y.shape, d_out, gates, dispatch.token_index_map)
    return d_y, per_element(d_gates_kernel, y, gates.shape, d_out, y, dispatch.token_index_map)
