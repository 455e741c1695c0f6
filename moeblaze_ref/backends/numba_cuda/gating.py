"""The router as Numba kernels: softmax, top k, both auxiliary losses, and their gradients.

    logits (L, E)
      forward:   probs (L, E), topk_experts and gates (L, k), one kernel
      backward:  d_logits (L, E) from d_gates (L, k) and the gradients of both losses, one kernel
    losses:      a kernel leaves one term a block, a second one adds the terms up

Sources: MoEBlaze (arXiv 2601.05296), section 2, for the gate; Switch Transformer
(arXiv 2101.03961) for the load-balancing loss; ST-MoE (arXiv 2202.08906) for the router
z-loss.

A thread has a token and walks along its row. Each output element has one writer and each sum
one order: same input, same bits.
"""

import math

import numpy as np
from numba import float32, int32

from moeblaze_ref.backends.numba_cuda.runtime import (
    ARRAYS,
    THREADS,
    all_to_device,
    blocks_for,
    cuda,
    float32_output,
    int32_output,
    launch,
    to_caller,
    to_device,
)
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.arrays import library_of
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Gating

ZERO, INFINITY = np.float32(0.0), np.float32(np.inf)  # a bare 0.0 would be float64 to Numba
SHARED_BYTES = 4 * THREADS  # of the kernels that sum over a block: one number a thread


# The gate


@cuda.jit(device=True)
def next_best(logits, token, last_expert, last_logit):
    """(expert, logit) of the token's best expert after the last one: a smaller logit, or the same and a higher id."""
    expert, best = -1, -INFINITY
    for e in range(logits.shape[1]):
        logit = logits[token, e]
        after = logit < last_logit or (logit == last_logit and e > last_expert)
        if after and logit > best:
            expert, best = e, logit
    return expert, best


@cuda.jit
def softmax_top_k_kernel(logits, renormalize, probs, topk_experts, gates):
    """Choose k experts, best first, and lay out the softmax of the row.

    The first choice has the largest logit: less it, no exponent exceeds 0 and nothing overflows.

    Source        MoEBlaze, section 2: TopK(softmax(x Wg))
    Grid          ceil(L / THREADS) blocks of THREADS threads, a thread for each token
    Shared bytes  0
    Global bytes  reads 4 L E k + 8 L E + 4 R; writes 4 L E + 12 R
    """
    num_tokens, num_experts = logits.shape
    token = cuda.grid(1)
    if token < num_tokens:
        expert, logit = -1, INFINITY
        peak = sum_of_chosen = ZERO
        for j in range(topk_experts.shape[1]):
            expert, logit = next_best(logits, token, expert, logit)
            if j == 0:
                peak = logit
            weight = math.exp(logit - peak)
            topk_experts[token, j] = expert
            gates[token, j] = weight
            sum_of_chosen += weight

        total = ZERO
        for e in range(num_experts):
            total += math.exp(logits[token, e] - peak)
        for e in range(num_experts):
            probs[token, e] = math.exp(logits[token, e] - peak) / total
        for j in range(topk_experts.shape[1]):
            gates[token, j] = gates[token, j] / (sum_of_chosen if renormalize else total)


# Sums over all tokens


@cuda.jit(device=True)
def block_sum(value, scratch):
    """The sum of ``value`` over the threads of the block; ``scratch`` is shared memory for THREADS values.

    A tree: each round adds the upper half of what is left to the lower half.
    """
    thread = cuda.threadIdx.x
    scratch[thread] = value
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if thread < half:
            scratch[thread] += scratch[thread + half]
        cuda.syncthreads()
        half //= 2
    return scratch[0]


@cuda.jit
def expert_shares_kernel(topk_experts, num_rows, shares):
    """Count the routed rows of each expert, as a share of all.

    Source        Switch Transformer, section 2.2: f_e, here over R rows
    Grid          E blocks of THREADS threads, a block for each expert
    Shared bytes  4 THREADS
    Global bytes  reads 4 R E; writes 4 E
    """
    scratch = cuda.shared.array(0, int32)  # THREADS int32
    num_tokens, k = topk_experts.shape
    expert = cuda.blockIdx.x
    count = 0
    for slot in range(cuda.threadIdx.x, num_tokens * k, THREADS):
        if topk_experts[slot // k, slot % k] == expert:
            count += 1
    count = block_sum(count, scratch)
    if cuda.threadIdx.x == 0:
        shares[expert] = float32(count) / num_rows


@cuda.jit
def sum_terms_kernel(terms, scale, total):
    """Add up what the blocks of a loss have left: total = scale * the sum of its N terms.

    Source        Switch Transformer, section 2.2, and ST-MoE: their means over all tokens
    Grid          1 block of THREADS threads
    Shared bytes  4 THREADS
    Global bytes  reads 4 N; writes 4
    """
    scratch = cuda.shared.array(0, float32)  # THREADS float32
    part = ZERO
    for i in range(cuda.threadIdx.x, terms.shape[0], THREADS):
        part += terms[i]
    part = block_sum(part, scratch)
    if cuda.threadIdx.x == 0:
        total[0] = scale * part


# The load-balancing loss


@cuda.jit(device=True)
def mean_share(probs, shares, token):
    """sum_e f_e p_e of a token."""
    mean = ZERO
    for e in range(shares.shape[0]):
        mean += probs[token, e] * shares[e]
    return mean


@cuda.jit
def load_balancing_terms_kernel(probs, shares, terms):
    """Sum f_e p_e over the experts and over the tokens of a block, for each block.

    Source        Switch Transformer, section 2.2: E sum of f_e P_e, here with the sum over tokens outside
    Grid          ceil(L / THREADS) blocks of THREADS threads, a thread for each token
    Shared bytes  4 THREADS
    Global bytes  reads 8 L E; writes 4 N
    """
    scratch = cuda.shared.array(0, float32)  # THREADS float32
    token = cuda.grid(1)
    term = block_sum(mean_share(probs, shares, token) if token < probs.shape[0] else ZERO, scratch)
    if cuda.threadIdx.x == 0:
        terms[cuda.blockIdx.x] = term


# The router z-loss


@cuda.jit(device=True)
def exponentials(logits, token):
    """(peak, sum of exp(logit - peak)) of a token's row, peak being its largest logit."""
    peak = -INFINITY
    for e in range(logits.shape[1]):
        peak = max(peak, logits[token, e])
    total = ZERO
    for e in range(logits.shape[1]):
        total += math.exp(logits[token, e] - peak)
    return peak, total


@cuda.jit
def router_z_terms_kernel(logits, terms):
    """Sum logsumexp(logits)**2 over the tokens of a block, for each block.

    Source        ST-MoE, router z-loss
    Grid          ceil(L / THREADS) blocks of THREADS threads, a thread for each token
    Shared bytes  4 THREADS
    Global bytes  reads 8 L E; writes 4 N
    """
    scratch = cuda.shared.array(0, float32)  # THREADS float32
    token = cuda.grid(1)
    z = ZERO
    if token < logits.shape[0]:
        peak, total = exponentials(logits, token)
        z = peak + math.log(total)
    term = block_sum(z * z, scratch)
    if cuda.threadIdx.x == 0:
        terms[cuda.blockIdx.x] = term


# The gradient of the logits


@cuda.jit(device=True)
def exponentials_of_chosen(logits, topk_experts, token):
    """The peak of the chosen experts' logits, and the sum of their exponentials, as in `exponentials`."""
    peak = -INFINITY
    for j in range(topk_experts.shape[1]):
        peak = max(peak, logits[token, topk_experts[token, j]])
    total = ZERO
    for j in range(topk_experts.shape[1]):
        total += math.exp(logits[token, topk_experts[token, j]] - peak)
    return peak, total


@cuda.jit
def d_logits_kernel(d_gates, logits, topk_experts, shares, d_losses, scales, renormalize, d_logits):
    """Carry the gradients of gates and losses through the softmax: p (d_p - mean of d_p).

    Of the gates, d_p is 0 for who was not chosen. Renormalised gates are a softmax over the chosen experts: the others
    get nothing, and of all d_p that of the best choice is taken away, whose gate may be near 1. Of the balancing loss,
    d_p is its share times a constant. The z-loss adds 2 p logsumexp.
    The bytes are those without renormalisation.

    Source        MoEBlaze, section 2; Switch Transformer, section 2.2; ST-MoE, router z-loss
    Grid          ceil(L / THREADS) blocks of THREADS threads, a thread for each token
    Shared bytes  0
    Global bytes  reads 24 L E + 28 R + 16 L; writes 4 L E + 4 R
    """
    num_tokens, num_experts = logits.shape
    token = cuda.grid(1)
    if token < num_tokens:
        peak, total = exponentials(logits, token)
        balance, z = d_losses[0] * scales[0], d_losses[1] * scales[1] * (peak + math.log(total))
        mean_share = ZERO
        for e in range(num_experts):
            mean_share += shares[e] * (math.exp(logits[token, e] - peak) / total)

        gate_peak, gate_total, shift = peak, total, ZERO
        if renormalize:
            gate_peak, gate_total = exponentials_of_chosen(logits, topk_experts, token)
            shift = d_gates[token, 0]
        mean = ZERO
        for j in range(topk_experts.shape[1]):
            logit = logits[token, topk_experts[token, j]]
            mean += (d_gates[token, j] - shift) * (math.exp(logit - gate_peak) / gate_total)

        for e in range(num_experts):
            slope = z + balance * (shares[e] - mean_share) - (ZERO if renormalize else mean)
            d_logits[token, e] = slope * (math.exp(logits[token, e] - peak) / total)
        for j in range(topk_experts.shape[1]):
            expert = topk_experts[token, j]
            gate = math.exp(logits[token, expert] - gate_peak) / gate_total
            d_logits[token, expert] += gate * (d_gates[token, j] - shift - (mean if renormalize else ZERO))


# The stage, on the host


@implements(stage_contracts.GATING_IN_KERNELS, ARRAYS)
def forward(logits, k, renormalize=False):
    num_tokens, num_experts = logits.shape
    probs = float32_output((num_tokens, num_experts))
    topk_experts, gates = int32_output((num_tokens, k)), float32_output((num_tokens, k))
    outputs = probs, topk_experts, gates
    launch(softmax_top_k_kernel, blocks_for(num_tokens), THREADS, to_device(logits), bool(renormalize), *outputs)
    return Gating(*to_caller(logits, *outputs))


@implements(stage_contracts.GATING_BACKWARD_IN_KERNELS, ARRAYS)
def backward(d_gates, logits, topk_experts, renormalize=False, d_load_balancing_loss=0.0, d_router_z_loss=0.0):
    d_losses = d_load_balancing_loss, d_router_z_loss
    num_tokens, num_experts = logits.shape
    d_logits = float32_output(logits.shape)
    scales = np.array([num_experts, 2.0], np.float32) / np.float32(max(num_tokens, 1))
    inputs = all_to_device(d_gates, logits, topk_experts)
    losses = to_device(_pair_like(logits, *d_losses)), to_device(scales), bool(renormalize)
    shares = _expert_shares(topk_experts, num_experts)
    launch(d_logits_kernel, blocks_for(num_tokens), THREADS, *inputs, shares, *losses, d_logits)
    return to_caller(logits, d_logits)[0]


def _pair_like(like, first, second):
    """Two numbers as a float32 array (2,) of the kind of ``like``; the host does not wait for arrays of the GPU."""
    pair = library_of(like).empty(2, dtype="float32")
    pair[0], pair[1] = first, second
    return pair


def _expert_shares(topk_experts, num_experts):
    """f_e: the share of the R routed rows that goes to each expert, (E,) on the device; zeros if there are none."""
    shares = float32_output(num_experts)
    num_rows = np.float32(max(topk_experts.size, 1))
    arguments = to_device(topk_experts), num_rows, shares
    launch(expert_shares_kernel, num_experts, THREADS, *arguments, shared_bytes=SHARED_BYTES)
    return shares


def _mean_of_terms(like, kernel, *inputs, factor=1.0):
    """factor / L * the sum of the terms that a kernel leaves for the rows of ``like``: a scalar of its kind."""
    terms, total = float32_output(blocks_for(len(like))), float32_output(1)
    launch(kernel, blocks_for(len(like)), THREADS, *inputs, terms, shared_bytes=SHARED_BYTES)
    scale = np.float32(factor / max(len(like), 1))
    launch(sum_terms_kernel, 1, THREADS, terms, scale, total, shared_bytes=SHARED_BYTES)
    return to_caller(like, total)[0].reshape(())


@implements(stage_contracts.LOAD_BALANCING_LOSS_IN_KERNELS, ARRAYS)
def load_balancing_loss(probs, topk_experts):
    num_experts = probs.shape[1]
    inputs = to_device(probs), _expert_shares(topk_experts, num_experts)
    return _mean_of_terms(probs, load_balancing_terms_kernel, *inputs, factor=num_experts)


@implements(stage_contracts.ROUTER_Z_LOSS_IN_KERNELS, ARRAYS)
def router_z_loss(logits):
    return _mean_of_terms(logits, router_z_terms_kernel, to_device(logits))
