"""The router: softmax over the experts, the top k of each token, and the two auxiliary losses.

Sources: MoEBlaze (arXiv 2601.05296), section 2, for the gate; Switch Transformer
(arXiv 2101.03961) for the load-balancing loss; ST-MoE (arXiv 2202.08906) for the router
z-loss.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Gating


@implements(stage_contracts.TOP_K, ARRAYS)
def top_k(logits, k):
    """The choice is made by logits, which the softmax orders alike: probabilities that round to the same float would
    add ties that the logits do not have.
    """
    best_first = np.argsort(-logits, axis=1, kind="stable")  # (L, E)
    return best_first[:, :k].astype(np.int32, order="C")


@implements(stage_contracts.SOFTMAX, ARRAYS)
def softmax(logits):
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))  # (L, E), the largest is 1
    return weights / weights.sum(axis=1, keepdims=True)


@implements(stage_contracts.GATING, ARRAYS)
def forward(logits, k, renormalize=False):
    topk_experts = top_k.unchecked(logits, k)  # (L, k)
    probs = softmax.unchecked(logits)  # (L, E)
    gates = np.take_along_axis(probs, topk_experts, axis=1)  # (L, k)
    if renormalize:
        gates = gates / gates.sum(axis=1, keepdims=True)
    return Gating(probs, topk_experts, gates)


@implements(stage_contracts.SOFTMAX_BACKWARD, ARRAYS)
def softmax_backward(d_probs, probs):
    mean = (d_probs * probs).sum(axis=1, keepdims=True)  # (L, 1)
    return probs * (d_probs - mean)


@implements(stage_contracts.GATING_BACKWARD, ARRAYS)
def backward(d_gates, logits, topk_experts, renormalize=False, d_load_balancing_loss=0.0, d_router_z_loss=0.0):
    probs = softmax.unchecked(logits)  # (L, E)
    d_logits = _gates_backward(d_gates, logits, probs, topk_experts, renormalize)
    d_logits += load_balancing_loss_backward.unchecked(probs, topk_experts, d_load_balancing_loss)
    d_logits += router_z_loss_backward.unchecked(logits, d_router_z_loss)
    return d_logits


def _gates_backward(d_gates, logits, probs, topk_experts, renormalize):
    into_row = np.zeros_like(probs)  # (L, E)
    if renormalize:
        gates = softmax.unchecked(np.take_along_axis(logits, topk_experts, axis=1))  # (L, k)
        np.put_along_axis(into_row, topk_experts, softmax_backward.unchecked(d_gates, gates), axis=1)
        return into_row
    np.put_along_axis(into_row, topk_experts, d_gates, axis=1)
    return softmax_backward.unchecked(into_row, probs)


def _expert_share(probs, topk_experts):
    """f_e: the share of the R routed rows that goes to each expert, (E,); zeros if there are none."""
    counts = np.bincount(topk_experts.ravel(), minlength=probs.shape[1])
    return (counts / max(topk_experts.size, 1)).astype(probs.dtype)


@implements(stage_contracts.LOAD_BALANCING_LOSS, ARRAYS)
def load_balancing_loss(probs, topk_experts):
    num_tokens, num_experts = probs.shape
    mean_probs = probs.sum(axis=0) / max(num_tokens, 1)  # (E,)
    return num_experts * (_expert_share(probs, topk_experts) * mean_probs).sum()


@implements(stage_contracts.LOAD_BALANCING_LOSS_BACKWARD, ARRAYS)
def load_balancing_loss_backward(probs, topk_experts, d_loss=1.0):
    num_tokens, num_experts = probs.shape
    scale = float(d_loss) * num_experts / max(num_tokens, 1)
    d_probs = np.broadcast_to(scale * _expert_share(probs, topk_experts), probs.shape)  # (L, E), every row alike
    return softmax_backward.unchecked(d_probs, probs)


def _logsumexp(logits):
    peak = logits.max(axis=1, keepdims=True)  # (L, 1)
    return peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))


@implements(stage_contracts.ROUTER_Z_LOSS, ARRAYS)
def router_z_loss(logits):
    return np.square(_logsumexp(logits)).sum() / max(len(logits), 1)


@implements(stage_contracts.ROUTER_Z_LOSS_BACKWARD, ARRAYS)
def router_z_loss_backward(logits, d_loss=1.0):
    scale = 2.0 * float(d_loss) / max(len(logits), 1)
    return scale * _logsumexp(logits) * softmax.unchecked(logits)  # (L, 1) * (L, E)
