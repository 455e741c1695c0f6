"""Exercises of notebook 01: the router, and what a fixed capacity makes of its choice."""

from moeblaze_ref.backends.numba_cuda import gating
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, cuda_kernel, numba_source
from moeblaze_ref.memory.accounting import dropped_and_padded
from moeblaze_ref.systems.capacity import expert_capacity

GATING = cuda_kernel("gating/1_naive.cu", "softmax_top_k", "token_of_thread", "Choice", "BEST", "next_best")

SOFTMAX = (
    """\
import math

import numpy as np

from moeblaze_ref.backends.numba_cuda.runtime import ZERO, cuda

INFINITY = np.float32(np.inf)


"""
    + numba_source(gating.next_best)
    + """


@cuda.jit
def softmax_top_k(logits, probs, topk_experts, gates):
    \"\"\"Choose k experts, best first, and write the softmax of the row.

    Grid          ceil(L / THREADS) blocks of THREADS threads, a thread for each token
    \"\"\"
    num_tokens, num_experts = logits.shape
    token = cuda.grid(1)
    if token < num_tokens:
        expert, peak = next_best(logits, token, -1, INFINITY)
        total = ZERO
        for e in range(num_experts):
            total += math.exp(logits[token, e] - peak)
        for e in range(num_experts):
            probs[token, e] = math.exp(logits[token, e] - peak) / total
        logit = peak
        for j in range(topk_experts.shape[1]):
            topk_experts[token, j] = expert
            gates[token, j] = math.exp(logit - peak) / total
            expert, logit = next_best(logits, token, expert, logit)
"""
)

BUTTERFLY = """\
#include "common.cuh"

struct Candidate {
    int ordered;  // the logit as an integer in the same order
    int expert;
};

// The best of the lanes' candidates: the largest logit, of equal ones the lowest expert. Every lane gets it.
__device__ Candidate best_of_warp(Candidate best) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const int ordered = __shfl_xor_sync(FULL_WARP, best.ordered, step);
        const int expert = __shfl_xor_sync(FULL_WARP, best.expert, step);
        if (ordered > best.ordered || (ordered == best.ordered && expert < best.expert)) best = {ordered, expert};
    }
    return best;
}

// A warp has a token. Lane l has the experts l, l + 32, l + 64, ...
extern "C" __global__ void softmax_top_k(const float* logits, float* probs, int* topk_experts, float* gates, int L,
                                         int E, int k) {
    const int token = blockIdx.x * (THREADS / WARP) + warp_id();
    if (token >= L) return;
    const float* const row = logits + token * E;
    Candidate last = {0x7fffffff, -1};
    float peak = 0.0f;
    for (int j = 0; j < k; ++j) {
        Candidate mine = {-0x7fffffff - 1, E};
        for (int e = lane_id(); e < E; e += WARP) {
            const int ordered = to_ordered(row[e]);
            const bool after = ordered < last.ordered || (ordered == last.ordered && e > last.expert);
            if (after && ordered > mine.ordered) mine = {ordered, e};
        }
        last = best_of_warp(mine);
        if (j == 0) peak = from_ordered(last.ordered);
        if (lane_id() == 0) {
            topk_experts[token * k + j] = last.expert;
            gates[token * k + j] = expf(from_ordered(last.ordered) - peak);
        }
    }
    float sum = 0.0f;
    for (int e = lane_id(); e < E; e += WARP) sum += expf(row[e] - peak);
    const float scale = 1.0f / warp_sum(sum);
    for (int e = lane_id(); e < E; e += WARP) probs[token * E + e] = expf(row[e] - peak) * scale;
    if (lane_id() == 0)
        for (int j = 0; j < k; ++j) gates[token * k + j] *= scale;
}
"""


def _capacity(counts, factor):
    capacity = expert_capacity(sum(counts), len(counts), factor)
    dropped, padding = dropped_and_padded(counts, capacity)
    return {"capacity": capacity, "dropped": dropped, "padding": padding}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="capacity",
        title="A fixed capacity under skew",
        difficulty=1,
        question="""The router sends `counts[e]` rows to expert `e`. A system with a fixed capacity reserves `C =
            ceil(factor * R / E)` rows for each expert. How large is `C`, how many rows does the system drop because
            their expert is full, and how many reserved rows stay empty?""",
        given={"counts": [70, 30, 8, 0, 12, 40], "factor": 1.25},
        steps=("C = math.ceil(factor * sum(counts) / len(counts))",),
        asked={
            "capacity": Asked("rows of each expert", "C"),
            "dropped": Asked("rows", "sum(max(n - C, 0) for n in counts)"),
            "padding": Asked("rows", "sum(max(C - n, 0) for n in counts)"),
        },
        truth=_capacity,
        computed_by="moeblaze_ref.memory.accounting.dropped_and_padded",
        hints=(
            "Compute `C` first. The other two compare each count with it.",
            "`R` is `sum(counts)`. An expert with `n` rows drops `max(n - C, 0)` and leaves `max(C - n, 0)` empty.",
        ),
        why="""The system drops rows of full experts, while reserved rows of other experts stay empty. One capacity
            cannot fit all experts.""",
    ),
    KernelExercise(
        name="next-best",
        title="The k best without sorting",
        difficulty=2,
        kind="cuda",
        question="""A thread chooses the `k` best experts of its token, best first. It copies and sorts nothing:
            `next_best` walks along the row and finds the best of those experts that come *after* the last choice. Write
            the body of its loop. The kernel compares logits as integers in the same order (`to_ordered`); of equal
            logits the lower id comes first.""",
        task="gating",
        kernel=GATING,
        change=(
            "        const int ordered = to_ordered(logits[e]);\n...\n"
            "        if (after && ordered > best.ordered) best = {e, ordered};\n",
            "        // Your part: expert e is the best so far if it comes after `last`, before `best`.\n",
        ),
        budgets=("read of logits <= 4 L E (k + 2)", "written <= 4 L E + 12 R"),
        division=("accesses <= (k + 3) E + 4 k", "barriers <= 0", "threads >= L"),
        hints=(
            "An expert must pass two tests: it comes after `last`, and it is better than `best`.",
            """Expert `e` comes after `last` if its logit is smaller, or equal and its id higher. Among those, keep the
            largest: `best = {e, ordered}`.""",
        ),
        why="""The kernel reads the row once for each choice and twice for the softmax. It stores nothing in between, so
            `k` and `E` may be any size.""",
    ),
    KernelExercise(
        name="gates-of-all",
        title="Gates that always sum to one",
        difficulty=1,
        kind="bug",
        question="""A gate is the softmax probability of its expert *among all experts*, so a token's `k` gates sum to
            less than one, unless `k = E`. In this kernel they always sum to one. Find the line and correct it. (With
            `RENORMALIZE = 1` the kernel divides gates by their sum; the checker tests a kernel that names it with both
            values.)""",
        task="gating",
        kernel=GATING,
        change=("RENORMALIZE ? 1.0f / sum_of_chosen : prob_scale", "1.0f / sum_of_chosen"),
        budgets=("read of logits <= 4 L E (k + 2)", "written <= 4 L E + 12 R"),
        division=("accesses <= (k + 3) E + 4 k", "barriers <= 0", "threads >= L"),
        hints=(
            "The gates are right up to a factor, which differs from token to token.",
            "The report names `gates`, not `probs`. Which factor scales the gates, and which the probabilities?",
        ),
        why="""Renormalised gates are a choice of the model, not an error; Mixtral has them. A kernel for both kinds of
            model has the choice as a parameter, `RENORMALIZE`. Without it a kernel is right for one kind alone.""",
    ),
    KernelExercise(
        name="stable-softmax",
        title="A softmax that does not overflow",
        difficulty=1,
        kind="numba",
        question="""A thread has a token, and `peak` is the largest of its logits. Write the token's softmax into
            `probs[token, e]`, and leave its denominator in `total`. Some logits of the checker's cases are near 200,
            where `exp` has no float32 result.""",
        task="gating",
        kernel=Kernel("softmax_top_k", SOFTMAX),
        change=(
            "        total = ZERO\n...\n            probs[token, e] = math.exp(logits[token, e] - peak) / total\n",
            "        total = 1  # Your part: the denominator, then probs[token, e] of every expert e.\n",
        ),
        budgets=("read of logits <= 4 L E (k + 3)", "written <= 4 L E + 8 R"),
        division=("accesses <= (k + 4) E + 2 k", "barriers <= 0", "threads >= L"),
        hints=(
            "A softmax does not change if the same number is subtracted from all logits of the row.",
            """Subtract `peak`: then no exponent is above 0, and the largest term is 1. The first loop adds up
            `math.exp(logits[token, e] - peak)`, the second one divides each of these terms by `total`. Write each
            probability once.""",
        ),
        why="""Without the subtraction the kernel is right for small logits only. Every softmax that is used in practice
            subtracts the peak, so it needs the row twice: once for the peak, and once for the sum.""",
    ),
    KernelExercise(
        name="butterfly",
        title="The best of 32 lanes in five steps",
        difficulty=2,
        kind="cuda",
        question="""A warp has a token, and each lane has found the best of its own experts. Find the best of all lanes,
            so that every lane gets it. Use no shared memory and no barrier: `__shfl_xor_sync(FULL_WARP, value, step)`
            gives a lane the `value` of the lane whose number differs in the bit `step`. If two logits are equal, the
            lower expert is better.""",
        task="gating",
        kernel=Kernel("softmax_top_k", BUTTERFLY, grid="ceil(32 L / THREADS)"),
        change=(
            "    for (int step = WARP / 2; step > 0; step /= 2) {\n...\n    }\n    return best;\n",
            "    // Your part: in each of five steps, take the other lane's candidate if it is better.\n"
            "    return best;\n",
        ),
        budgets=("read of logits <= 4 L E (k + 2)", "written <= 4 L E + 12 R", "exchanges <= 10 k + 5"),
        division=(
            "accesses <= (k + 3) ceil(E / 32) + 4 k",
            "barriers <= 0",
            "threads >= L min(E, 32)",
        ),
        hints=(
            "The steps are 16, 8, 4, 2 and 1. After the first one, lanes `l` and `l + 16` agree.",
            """A step needs two shuffles, of `best.ordered` and of `best.expert`. All lanes call both, and compare after
            that: a shuffle inside of an `if` would leave lanes out.""",
        ),
        why="""Five exchanges between registers replace 32 candidates in shared memory and a barrier. `warp_sum` and
            `warp_max` of the project are this loop, with another operation.""",
    ),
)
