"""The down-projection: the hidden rows times each expert's w3, and its backward, as Numba kernels.

    y_swi (R, h), w3 (E, h, d), Dispatch
      forward:           y (R, d), one kernel
      hidden_gradients:  d_out (L, d) -> d_a, d_b, gate * y_swi (R, h) and d_gates (L, k), one kernel
      weight_gradient:   gate * y_swi -> d_w3 (E, h, d), one kernel

Sources: MoEBlaze (arXiv 2601.05296), sections 3.2 and 5, for the gathered output gradient;
SonicMoE (arXiv 2512.14080) for the gate's gradient from <dOut W3^T, Y_swi>, which needs no
saved expert output, and for gate * Y_swi as the operand of dW3.

Kernels over routed rows walk the slots (token, j), not the positions in expert order: slot by
slot, token_expert_indices says whose w3 it is and token_index_map where the row lies, and the
token is slot // k. All kernels are naive, but for one sum over a block. Each output element has
one writer and each sum one order: same input, same bits.
"""

import functools

from numba import float32

from moeblaze_ref.backends.numba_cuda.activation import NONLINEARITY
from moeblaze_ref.backends.numba_cuda.runtime import (
    ARRAYS,
    THREADS,
    ZERO,
    all_to_device,
    cuda,
    float32_output,
    launch,
    per_element,
    to_caller,
    written_back,
)
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.contract import implements


@cuda.jit
def expert_down_kernel(y_swi, w3, token_expert_indices, token_index_map, y):
    """Multiply every hidden row by its expert's w3.

    Source        MoEBlaze, section 5: Y_swi W3
    Grid          ceil(R d / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 8 R d + 8 R d h; writes 4 R d
    """
    num_routed, d = y.shape
    element = cuda.grid(1)
    slot, column = element // d, element % d
    if slot < num_routed:
        expert, position = token_expert_indices[slot], token_index_map[slot]
        total = ZERO
        for i in range(y_swi.shape[1]):
            total += y_swi[position, i] * w3[expert, i, column]
        y[position, column] = total


@functools.cache
def d_hidden_kernel(activation):
    """The kernel of d_a, d_b, gate * y_swi and d_gates for one activation, a constant in it."""
    act, slope = NONLINEARITY[activation]
    gated = is_gated(activation)

    @cuda.jit
    def kernel(d_out, gates, a, b, w3, token_expert_indices, token_index_map, d_a, d_b, gated_y, d_gates):
        """Take a token's output gradient back through w3, the gate and the activation, for one of its rows.

        <d_out, w3> of a hidden element is used while it is in a register: scaled by the gate it
        becomes d_a and d_b, and its product with y_swi is the element's share of the gate's gradient,
        which the block sums. y_swi is rebuilt from a and b, so neither it nor an expert output is read.
        Neighbouring threads read w3 4 d bytes apart, since it enters transposed.

        Source        MoEBlaze, sections 3.2 and 5: dB = dY_swi * SiLU(A), dA = dY_swi * B * SiLU'(A);
                      SonicMoE: dgate = <dOut W3^T, Y_swi>
        Grid          R blocks of THREADS threads, a block for each slot
        Shared bytes  4 THREADS
        Global bytes  reads 12 R THREADS + 8 R d h + 4 G R h; writes 4 R h (1 + G) + 4 R
                      G is 2 if gated, else 1
        """
        shares = cuda.shared.array(0, float32)  # THREADS float32
        thread, slot = cuda.threadIdx.x, cuda.blockIdx.x
        token, j = slot // gates.shape[1], slot % gates.shape[1]
        expert, position = token_expert_indices[slot], token_index_map[slot]
        gate = gates[token, j]

        share = ZERO
        for hidden in range(thread, a.shape[1], THREADS):
            d_ungated = ZERO  # dY' = dOut_gathered W3^T, before the gate: SonicMoE's dA'
            for i in range(d_out.shape[1]):
                d_ungated += d_out[token, i] * w3[expert, hidden, i]
            d_y = gate * d_ungated
            a_value = a[position, hidden]
            y = act(a_value)
            if gated:
                b_value = b[position, hidden]
                d_a[position, hidden] = d_y * b_value * slope(a_value)
                d_b[position, hidden] = d_y * y
                y *= b_value
            else:
                d_a[position, hidden] = d_y * slope(a_value)
            gated_y[position, hidden] = gate * y
            share += d_ungated * y

        # A tree: each round adds the upper half of what is left to the lower half.
        shares[thread] = share
        cuda.syncthreads()
        half = THREADS // 2
        while half > 0:
            if thread < half:
                shares[thread] += shares[thread + half]
            cuda.syncthreads()
            half //= 2
        if thread == 0:
            d_gates[token, j] = shares[0]

    return kernel


@cuda.jit
def d_w3_kernel(gated_y, d_out, expert_token_indices, expert_token_offsets, d_w3):
    """Sum (gate * y_swi)^T d_out over each expert's rows, d_out gathered; an expert without rows gets zeros.

    Source        MoEBlaze, section 5: dW3 = (gate * Y_swi)^T dOut
    Grid          ceil(E h d / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 8 E d h + 12 R d h; writes 4 E d h
    """
    num_experts, h, d = d_w3.shape
    element = cuda.grid(1)
    expert, row, column = element // (h * d), element // d % h, element % d
    if expert < num_experts:
        total = ZERO
        for position in range(expert_token_offsets[expert], expert_token_offsets[expert + 1]):
            total += gated_y[position, row] * d_out[expert_token_indices[position], column]
        d_w3[expert, row, column] = total


@implements(stage_contracts.EXPERT_DOWN, ARRAYS)
def forward(y_swi, w3, dispatch):
    operands = y_swi, w3, dispatch.token_expert_indices, dispatch.token_index_map
    return per_element(expert_down_kernel, y_swi, (dispatch.R, w3.shape[2]), *operands)


@implements(stage_contracts.EXPERT_DOWN_D_HIDDEN, ARRAYS)
def hidden_gradients(d_out, gates, a, b, w3, dispatch, activation, y_swi=None, overwrite=False):
    """y_swi is checked and not read: the kernel has a and b in registers, and rebuilds y_swi by one product. The thread
    that overwrites an element has read it.
    """
    inputs = all_to_device(d_out, gates, a, b, w3, dispatch.token_expert_indices, dispatch.token_index_map)
    _, _, on_device_a, on_device_b, *_ = inputs
    if overwrite:
        d_a, d_b = on_device_a, on_device_b
    else:
        d_a, d_b = (None if like is None else float32_output(like.shape) for like in (a, b))
    gated_y, d_gates = float32_output(a.shape), float32_output(gates.shape)
    outputs = d_a, d_b, gated_y, d_gates
    launch(d_hidden_kernel(activation), dispatch.R, THREADS, *inputs, *outputs, shared_bytes=4 * THREADS)
    if overwrite:
        return written_back(a, d_a), written_back(b, d_b), *to_caller(a, gated_y, d_gates)
    return to_caller(a, *outputs)


@implements(stage_contracts.EXPERT_DOWN_D_W3, ARRAYS)
def weight_gradient(gated_y, d_out, dispatch):
    operands = gated_y, d_out, dispatch.expert_token_indices, dispatch.expert_token_offsets
    return per_element(d_w3_kernel, d_out, (dispatch.E, gated_y.shape[1], d_out.shape[1]), *operands)
