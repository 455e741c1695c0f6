"""Every router of ``core.routers``: choice, gates, the gradients, and the update of the selection bias.

Sources: MoEBlaze (arXiv 2601.05296), section 2; DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, for sigmoids, groups and
the selection bias, which Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664) updates.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.backends.numpy_ref.gating import softmax, softmax_backward, top_k
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements

BEST_OF_GROUP = {"max": 1, "top2": 2}  # experts whose scores add up to that of their group


def _sigmoid(logits):
    small = np.exp(-np.abs(logits))  # at most 1: no logit overflows
    return np.where(logits >= 0, 1, small) / (1 + small)


def _scores(logits, router):
    """One score for each token and expert, (L, E); ``softmax_of_chosen`` chooses by its logits."""
    return _sigmoid(logits) if router.scores == "sigmoid" else softmax.unchecked(logits)


@implements(stage_contracts.CHOOSE, ARRAYS)
def choose(logits, k, router, selection_bias=None):
    compared = logits if router.compares_logits else _scores(logits, router)  # (L, E)
    if selection_bias is not None:
        compared = compared + selection_bias
    return top_k.unchecked(_in_kept_groups(compared, router), k)


def _in_kept_groups(compared, router):
    """The same numbers (L, E), but -inf in the groups that a token does not keep."""
    num_tokens, num_experts = compared.shape
    grouped = compared.reshape(num_tokens, router.groups, num_experts // router.groups)
    best_first = -np.sort(-grouped, axis=2)
    group_scores = best_first[:, :, : BEST_OF_GROUP[router.group_score]].sum(axis=2)  # (L, groups)
    lost = np.ones(group_scores.shape, dtype=bool)
    np.put_along_axis(lost, top_k.unchecked(group_scores, router.groups_kept), False, axis=1)
    return np.where(lost[:, :, None], -np.inf, grouped).reshape(num_tokens, num_experts)


def _chosen_scores(logits, topk_experts, router):
    """The score (L, k) of each chosen expert."""
    if router.scores == "softmax_of_chosen":
        return softmax.unchecked(np.take_along_axis(logits, topk_experts, axis=1))
    return np.take_along_axis(_scores(logits, router), topk_experts, axis=1)


@implements(stage_contracts.WEIGH, ARRAYS)
def weigh(logits, topk_experts, router):
    gates = _chosen_scores(logits, topk_experts, router)
    if router.renormalize:
        gates = gates / (gates.sum(axis=1, keepdims=True) + router.epsilon)
    return router.scale * gates


@implements(stage_contracts.WEIGH_BACKWARD, ARRAYS)
def backward(d_gates, logits, topk_experts, router):
    scores = _chosen_scores(logits, topk_experts, router)  # (L, k)
    d_scores = router.scale * d_gates
    if router.renormalize:
        d_scores = _quotient_backward(d_scores, scores, router.epsilon)
    if router.scores == "softmax_of_chosen":
        return _into_rows(softmax_backward.unchecked(d_scores, scores), topk_experts, logits)
    if router.scores == "sigmoid":
        return _into_rows(d_scores * scores * (1 - scores), topk_experts, logits)
    return softmax_backward.unchecked(_into_rows(d_scores, topk_experts, logits), softmax.unchecked(logits))


def _quotient_backward(d_quotients, scores, epsilon):
    """Gradient of scores (L, k) from that of scores / (their sum + epsilon)."""
    total = scores.sum(axis=1, keepdims=True) + epsilon
    of_total = (d_quotients * scores / total).sum(axis=1, keepdims=True)
    return (d_quotients - of_total) / total


def _into_rows(values, topk_experts, logits):
    """Zeros (L, E), but the values (L, k) at the chosen experts."""
    rows = np.zeros_like(logits)
    np.put_along_axis(rows, topk_experts, values, axis=1)
    return rows


@implements(stage_contracts.LOGIT_BIAS_GRADIENT, ARRAYS)
def logit_bias_gradient(d_logits):
    return d_logits.sum(axis=0)


@implements(stage_contracts.UPDATE_SELECTION_BIAS, ARRAYS)
def update_selection_bias(selection_bias, loads, rate):
    below_mean = np.sign(loads.sum() - len(loads) * loads)  # -1, 0 or 1: integers have no rounding
    return selection_bias + selection_bias.dtype.type(rate) * below_mean.astype(selection_bias.dtype)
