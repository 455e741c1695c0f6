"""The router: softmax over the experts, the top k of each token, and the two auxiliary losses.

Sources: MoEBlaze (arXiv 2601.05296), section 2, for the gate; Switch Transformer
(arXiv 2101.03961) for the load-balancing loss; ST-MoE (arXiv 2202.08906) for the router
z-loss.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import Gating


def top_k(logits, k):
    """Ids of the k largest logits of every token.

    Parameters
    ----------
    logits : ndarray (L, E), float64 or float32
    k : int
        1..E.

    Returns
    -------
    ndarray (L, k), int32, C-contiguous
        Best first, ties to the lower expert id.

    Raises
    ------
    ValueError
        If k > E, the rank is not 2, or a logit is NaN or infinite.
    TypeError
        If a dtype is not allowed or k is not an integer.

    Notes
    -----
    The choice is made by logits, which the softmax orders alike: probabilities that
    round to the same float would add ties that the logits do not have.
    """
    stage_contracts.check_gating_forward(logits, k, DTYPES)
    best_first = np.argsort(-logits, axis=1, kind="stable")  # (L, E)
    return best_first[:, :k].astype(np.int32, order="C")


def softmax(logits):
    """Probabilities of the experts, each row summing to one.

    Parameters
    ----------
    logits : ndarray (L, E), float64 or float32

    Returns
    -------
    ndarray (L, E)

    Raises
    ------
    ValueError
        If the rank is not 2 or a logit is NaN or infinite.
    TypeError
        If the dtype is not allowed.
    """
    stage_contracts.check_logits(logits, DTYPES)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))  # (L, E), the largest is 1
    return weights / weights.sum(axis=1, keepdims=True)


def forward(logits, k, renormalize=False):
    """Probabilities, chosen experts and gates of every token.

    Parameters
    ----------
    logits : ndarray (L, E), float64 or float32
        x wg, finite.
    k : int
        Experts per token, 1..E.
    renormalize : bool
        Divide the chosen gates of a token by their sum.

    Returns
    -------
    Gating
        probs (L, E), topk_experts (L, k) int32, gates (L, k).

    Raises
    ------
    ValueError, TypeError
        As `top_k`.

    Notes
    -----
    MoEBlaze, section 2: TopK(softmax(x Wg)), Wg of shape (d, E).
    """
    topk_experts = top_k(logits, k)  # (L, k)
    probs = softmax(logits)  # (L, E)
    gates = np.take_along_axis(probs, topk_experts, axis=1)  # (L, k)
    if renormalize:
        gates = gates / gates.sum(axis=1, keepdims=True)
    return Gating(probs, topk_experts, gates)


def _softmax_backward(d_probs, probs):
    """Gradient through the softmax of a row; all (L, E), or (L, k) over the chosen."""
    mean = (d_probs * probs).sum(axis=1, keepdims=True)  # (L, 1)
    return probs * (d_probs - mean)


def backward(d_gates, logits, topk_experts, renormalize=False, d_load_balancing_loss=0.0, d_router_z_loss=0.0):
    """Gradient of the logits from those of the gates and of both losses.

    Parameters
    ----------
    d_gates : ndarray (L, k)
        The dtype of ``logits``.
    logits : ndarray (L, E), float64 or float32
        Those of `forward`.
    topk_experts : ndarray (L, k), int32
        As `forward` chose them; the choice itself has no gradient.
    renormalize : bool
        As in `forward`.
    d_load_balancing_loss, d_router_z_loss : float or ndarray ()
        Gradients of the losses.

    Returns
    -------
    d_logits : ndarray (L, E)

    Raises
    ------
    ValueError
        If shapes disagree, an expert id is out of range or doubled, or a value is not finite.
    TypeError
        If a dtype is not allowed.

    Notes
    -----
    MoEBlaze, section 2. Renormalised gates are a softmax over the chosen logits alone: the other experts get no
    gradient from them.
    """
    stage_contracts.check_gating_backward(d_gates, logits, topk_experts, d_load_balancing_loss, d_router_z_loss, DTYPES)
    probs = softmax(logits)  # (L, E)
    d_logits = _gates_backward(d_gates, logits, probs, topk_experts, renormalize)
    d_logits += load_balancing_loss_backward(probs, topk_experts, d_load_balancing_loss)
    d_logits += router_z_loss_backward(logits, d_router_z_loss)
    return d_logits


def _gates_backward(d_gates, logits, probs, topk_experts, renormalize):
    into_row = np.zeros_like(probs)  # (L, E)
    if renormalize:
        gates = softmax(np.take_along_axis(logits, topk_experts, axis=1))  # (L, k)
        np.put_along_axis(into_row, topk_experts, _softmax_backward(d_gates, gates), axis=1)
        return into_row
    np.put_along_axis(into_row, topk_experts, d_gates, axis=1)
    return _softmax_backward(into_row, probs)


def _expert_share(probs, topk_experts):
    """f_e: the share of the R routed rows that goes to each expert, (E,); zeros if there are none."""
    counts = np.bincount(topk_experts.ravel(), minlength=probs.shape[1])
    return (counts / max(topk_experts.size, 1)).astype(probs.dtype)


def load_balancing_loss(probs, topk_experts):
    """Switch loss E * sum_e f_e P_e: f_e the share of routed rows, P_e the mean probability.

    Parameters
    ----------
    probs : ndarray (L, E), float64 or float32
    topk_experts : ndarray (L, k), int32

    Returns
    -------
    scalar of the dtype of ``probs``
        1 for a perfectly balanced router, 0 for no tokens.

    Raises
    ------
    ValueError, TypeError
        As `backward`.

    Notes
    -----
    Switch Transformer's auxiliary loss, with the R = L * k routed rows of a top-k router in place of its L.
    """
    stage_contracts.check_routing(probs, topk_experts, DTYPES)
    num_tokens, num_experts = probs.shape
    mean_probs = probs.sum(axis=0) / max(num_tokens, 1)  # (E,)
    return num_experts * (_expert_share(probs, topk_experts) * mean_probs).sum()


def load_balancing_loss_backward(probs, topk_experts, d_loss=1.0):
    """Gradient of the logits from that of `load_balancing_loss`; the shares f_e are constants.

    Parameters
    ----------
    probs, topk_experts
        As in `load_balancing_loss`.
    d_loss : float
        Gradient of the loss.

    Returns
    -------
    d_logits : ndarray (L, E)

    Raises
    ------
    ValueError, TypeError
        As `backward`, and if ``d_loss`` is no finite number.
    """
    stage_contracts.check_routing(probs, topk_experts, DTYPES)
    d_loss = checks.check_number("d_loss", d_loss)
    num_tokens, num_experts = probs.shape
    scale = d_loss * num_experts / max(num_tokens, 1)
    d_probs = np.broadcast_to(scale * _expert_share(probs, topk_experts), probs.shape)  # (L, E), every row alike
    return _softmax_backward(d_probs, probs)


def _logsumexp(logits):
    peak = logits.max(axis=1, keepdims=True)  # (L, 1)
    return peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))


def router_z_loss(logits):
    """ST-MoE's mean over tokens of logsumexp(logits)**2, which keeps the logits small.

    Parameters
    ----------
    logits : ndarray (L, E), float64 or float32

    Returns
    -------
    scalar of the dtype of ``logits``
        0 for no tokens.

    Raises
    ------
    ValueError, TypeError
        As `softmax`.
    """
    stage_contracts.check_logits(logits, DTYPES)
    return np.square(_logsumexp(logits)).sum() / max(len(logits), 1)


def router_z_loss_backward(logits, d_loss=1.0):
    """Gradient of the logits from that of `router_z_loss`.

    Parameters
    ----------
    logits : ndarray (L, E), float64 or float32
    d_loss : float
        Gradient of the loss.

    Returns
    -------
    d_logits : ndarray (L, E)

    Raises
    ------
    ValueError, TypeError
        As `softmax`, and if ``d_loss`` is no finite number.
    """
    stage_contracts.check_logits(logits, DTYPES)
    scale = 2.0 * checks.check_number("d_loss", d_loss) / max(len(logits), 1)
    return scale * _logsumexp(logits) * softmax(logits)  # (L, 1) * (L, E)
