"""Exercises of notebook 08: the losses of the router."""

import numpy as np

from moeblaze_ref.backends.numba_cuda import gating as gating_kernels
from moeblaze_ref.backends.numpy_ref import gating
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, cuda_kernel, numba_source

D_LOGITS = cuda_kernel(
    "gating/1_naive.cu",
    "d_logits",
    *("token_of_thread", "Exponentials", "exponentials", "logsumexp", "exponentials_of_chosen", "share_of"),
)

OF_LOSSES = f"""\
import math

import numpy as np
from numba import float32

from moeblaze_ref.backends.numba_cuda.runtime import ZERO, cuda

INFINITY, TWO = np.float32(np.inf), np.float32(2.0)


{numba_source(gating_kernels.exponentials)}


@cuda.jit
def d_logits(d_gates, logits, topk_experts, shares, d_load_balancing_loss, d_router_z_loss, d_logits):
    \"\"\"Add up all that reaches the logits of a token: through the gates, and from both losses.

    Grid          ceil(L / THREADS) blocks of THREADS threads, a thread for each token
    \"\"\"
    num_tokens, num_experts = logits.shape
    token = cuda.grid(1)
    if token < num_tokens:
        peak, total = exponentials(logits, token)
        z = TWO / num_tokens * d_router_z_loss[0] * (peak + math.log(total))
        balance = float32(num_experts) / num_tokens * d_load_balancing_loss[0]
        mean = ZERO  # of what reaches the gates
        for j in range(topk_experts.shape[1]):
            mean += d_gates[token, j] * math.exp(logits[token, topk_experts[token, j]] - peak) / total
        mean_share = ZERO
        for e in range(num_experts):
            mean_share += shares[e] * math.exp(logits[token, e] - peak) / total
        for e in range(num_experts):
            slope = z - mean + balance * (shares[e] - mean_share)
            d_logits[token, e] = slope * math.exp(logits[token, e] - peak) / total
        for j in range(topk_experts.shape[1]):
            expert = topk_experts[token, j]
            d_logits[token, expert] += d_gates[token, j] * math.exp(logits[token, expert] - peak) / total
"""


def _losses(E, L):
    tokens, zeros = np.arange(L, dtype=np.int32), np.zeros((L, E))
    collapsed = zeros.copy()
    collapsed[:, 0] = 1.0  # a router that is sure
    return {
        "even": float(gating.load_balancing_loss(zeros + 1 / E, tokens[:, None] % E)),
        "collapsed": float(gating.load_balancing_loss(collapsed, 0 * tokens[:, None])),
    }


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="balance-loss",
        title="The balancing loss, balanced and collapsed",
        difficulty=2,
        question="""`balance = E * sum_e f_e P_e`: `f_e` is the share of the routed rows that expert `e` got, `P_e` the
            mean probability that the router gave it. What is it if both are spread evenly over all experts? And if
            every token goes to expert 0, with probability 1?""",
        given={"E": 8, "L": 64},
        asked={"even": Asked("the loss", "1.0"), "collapsed": Asked("the loss", "E")},
        truth=_losses,
        computed_by="moeblaze_ref.backends.numpy_ref.gating.load_balancing_loss",
        hints=(
            "Put the two cases into the formula, term by term.",
            "Evenly: each `f_e` and each `P_e` is `1 / E`, and there are `E` terms.",
        ),
        why="""The factor `E` makes 1 the value of balance whatever the number of experts, and collapse costs `E`. But 1
            is not the least. Where choices and probabilities favour different experts, the loss falls below it, as in
            notebook 1.""",
    ),
    KernelExercise(
        name="loss-is-a-mean",
        title="A z-loss that is too strong",
        difficulty=1,
        kind="bug",
        question="""The router z-loss is the *mean* over the tokens of `logsumexp(logits)` squared, so a token's part of
            its gradient is `2 / L * z * p`. In this kernel the gradient grows with the number of tokens. It is right
            only for one token.""",
        task="gating.backward",
        kernel=D_LOGITS,
        change=("2.0f * per_token * d_router_z_loss[0]", "2.0f * d_router_z_loss[0]"),
        budgets=("written <= 4 L E + 4 R",),
        division=("accesses <= 7 E + 12 k + 3", "barriers <= 0", "threads >= L"),
        hints=(
            "By which factor is the gradient too large?",
            "`per_token` is `1 / L`. Which of the two losses uses it?",
        ),
        why="""A z-loss that is too strong causes no error: it trains a slightly worse router. Only a gradient check
            finds it.""",
    ),
    KernelExercise(
        name="softmax-mean",
        title="The way through the softmax",
        difficulty=2,
        kind="cuda",
        question="""Through a softmax, `d_logit = p * (d_p - mean)`, where `mean` is the sum of `p * d_p`. For the
            gates, `d_p` is `d_gates[token * k + j]` for the chosen experts and 0 for all others. So the mean runs over
            the chosen experts alone. Compute `mean`; `share_of(of_gates, row[chosen[j]])` is `p` of the `j`-th choice.
            Subtract `shift` from each `d_p`. It is 0 unless the gates are renormalised; there it keeps digits.""",
        task="gating.backward",
        kernel=D_LOGITS,
        change=(
            "    for (int j = 0; j < k; ++j) mean += (d_gates[token * k + j] - shift) * "
            "share_of(of_gates, row[chosen[j]]);\n",
            "    // Your part: add p * d_p of each of the k choices to the mean.\n",
        ),
        budgets=("written <= 4 L E + 4 R", "read of d_gates <= 8 R + 4 L"),
        division=("accesses <= 7 E + 12 k + 3", "barriers <= 0", "threads >= L"),
        hints=(
            "Only chosen experts have a `d_p` that is not 0, so the loop has `k` turns.",
            "Loop over `j` and add `(d_gates[token * k + j] - shift)` times the share of that choice's logit.",
        ),
        why="""Experts that were not chosen get a gradient, too, through the denominator: the mean is subtracted from
            every expert's `d_p`.""",
    ),
    KernelExercise(
        name="balance-gradient",
        title="What the balancing loss does to a logit",
        difficulty=3,
        kind="numba",
        question="""The balancing loss is `E * sum_e f_e P_e`, where `P_e` is the mean over the tokens of `p_e`. The
            shares `f_e` are counts, so no gradient goes through them. A token's `p_e` therefore has the gradient
            `balance * shares[e]`, and the softmax turns it into a gradient of the logits. Add it to `slope`, which is
            multiplied by `p_e` in the next line. `p_e` is `math.exp(logits[token, e] - peak) / total`.""",
        task="gating.backward",
        kernel=Kernel("d_logits", OF_LOSSES),
        change=(
            "        mean_share = ZERO\n...\n            slope = z - mean + balance * (shares[e] - mean_share)\n",
            "        for e in range(num_experts):\n"
            "            slope = z - mean  # Your part: and what the balancing loss adds, which needs a loop before.\n",
        ),
        budgets=("read of logits <= 4 (4 L E + 2 R)", "written <= 4 L E + 4 R"),
        division=("accesses <= 7 E + 9 k + 2", "barriers <= 0", "threads >= L"),
        hints=(
            "Through a softmax, `d_logit = p * (d_p - mean)`, where `mean` is the sum of `p * d_p` over all experts.",
            """Compute `mean_share`, the sum of `shares[e] * p_e` over all experts, in a loop of its own. Then add
            `balance * (shares[e] - mean_share)` to the slope of expert `e`.""",
        ),
        why="""The gradient lowers the logits of experts with more than the mean share, and raises the others. If all
            shares are equal, it is 0.""",
    ),
)
