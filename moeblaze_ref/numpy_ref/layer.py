"""The whole MoE layer, forward and backward, and what is kept in between.

Source: MoEBlaze (arXiv 2601.05296), sections 3 and 5. The stages do the work; this file
decides only what survives from forward to backward, which is the memory wall.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moeblaze_ref import doors, stage_doors
from moeblaze_ref.config import POLICIES, is_gated
from moeblaze_ref.numpy_ref import DTYPES, combine, expert_down, expert_up, gating
from moeblaze_ref.numpy_ref import activation as activation_stage
from moeblaze_ref.numpy_ref import dispatch as dispatch_stage
from moeblaze_ref.structures import Dispatch

# The intermediates that each policy keeps, besides x, the Dispatch and the gates. The backward
# reads a, b and y_swi and rebuilds those that are missing; `conventional` also keeps what
# plain autograd would keep and this backward never reads: routed_x, act_a and y.
INTERMEDIATES = {
    "conventional": ("routed_x", "a", "b", "act_a", "y_swi", "y"),
    "paper": ("a", "b", "y_swi"),
    "minimal": ("a", "b"),
    "inputs": (),
}
assert INTERMEDIATES.keys() == POLICIES.keys()


class MoEWeights(NamedTuple):
    """The layer's parameters, all of one dtype."""

    wg: np.ndarray  # (d, E) router
    w1: np.ndarray  # (E, d, h)
    w2: np.ndarray | None  # (E, d, h); None for the ungated activations
    w3: np.ndarray  # (E, h, d)


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward keeps for the backward: no weights, and no router probabilities.

    Parameters
    ----------
    x : ndarray (L, d)
        The layer's input itself, not a copy.
    dispatch : Dispatch
        The routing; it is never decided again.
    gates : ndarray (L, k)
    intermediates : dict of str to ndarray
        Those that the policy keeps: ``INTERMEDIATES``, less the ones that the activation does not have.
    activation, policy : str
    renormalize : bool
    """

    x: np.ndarray
    dispatch: Dispatch
    gates: np.ndarray
    intermediates: dict[str, np.ndarray]
    activation: str
    policy: str
    renormalize: bool

    def tensors(self) -> dict[str, np.ndarray]:
        """Every array that is kept, by name."""
        return {"x": self.x, **self.dispatch.arrays(), "gates": self.gates, **self.intermediates}


class LayerOutput(NamedTuple):
    """What the forward returns."""

    out: np.ndarray  # (L, d)
    load_balancing_loss: np.floating
    router_z_loss: np.floating
    saved: Saved


class Gradients(NamedTuple):
    """What the backward returns."""

    d_x: np.ndarray  # (L, d)
    d_wg: np.ndarray  # (d, E)
    d_w1: np.ndarray  # (E, d, h)
    d_w2: np.ndarray | None  # (E, d, h); None for the ungated activations
    d_w3: np.ndarray  # (E, h, d)
    d_gates: np.ndarray  # (L, k)


def _check(x, weights, k, activation):
    doors.check_type("weights", weights, MoEWeights)
    stage_doors.check_layer(x, weights, k, activation, DTYPES)


def _what_autograd_keeps(x, dispatch, a, activation):
    """The two tensors that the stages never write: the routed inputs, and act(a) unless it is y_swi itself."""
    routed_x = x[dispatch.expert_token_indices]  # (R, d): the first memory wall
    return {"routed_x": routed_x, "act_a": activation_stage.act(a, activation) if is_gated(activation) else None}


def forward(x, weights, k, activation="swiglu", policy="minimal", renormalize=False):
    """One MoE layer: route, dispatch, expert MLPs, combine.

    Parameters
    ----------
    x : ndarray (L, d), float64 or float32
        Tokens, finite; L = 0 is valid.
    weights : MoEWeights
        Of the dtype of ``x``, finite.
    k : int
        Experts per token, 1..E.
    activation : str
        One of ``config.ACTIVATIONS``.
    policy : str
        What to keep for the backward, one of ``config.POLICIES``; it changes no result.
    renormalize : bool
        Divide the chosen gates of a token by their sum.

    Returns
    -------
    LayerOutput
        out (L, d), load_balancing_loss, router_z_loss, saved.

    Raises
    ------
    ValueError
        If shapes disagree, k > E, a value is not finite, an activation or policy is unknown, or w2 is missing
        or superfluous.
    TypeError
        If a dtype is not allowed, or ``weights`` is no MoEWeights.

    Notes
    -----
    MoEBlaze, sections 2, 3.1 and 5 (Algorithm 1).
    """
    doors.check_name("policy", policy, POLICIES)
    _check(x, weights, k, activation)
    logits = x @ weights.wg  # (L, E)
    probs, topk_experts, gates = gating.forward(logits, k, renormalize)
    dispatch = dispatch_stage.build(topk_experts, weights.wg.shape[1])
    a, b, y_swi = expert_up.forward(x, weights.w1, weights.w2, dispatch, activation)  # each (R, h)
    y = expert_down.forward(y_swi, weights.w3, dispatch)  # (R, d)
    out = combine.forward(y, gates, dispatch)  # (L, d)
    intermediates = {"a": a, "b": b, "y_swi": y_swi, "y": y}
    if policy == "conventional":
        intermediates |= _what_autograd_keeps(x, dispatch, a, activation)
    kept = {name: intermediates[name] for name in INTERMEDIATES[policy] if intermediates[name] is not None}
    return LayerOutput(
        out,
        gating.load_balancing_loss(probs, topk_experts),
        gating.router_z_loss(logits),
        Saved(x, dispatch, gates, kept, activation, policy, renormalize),
    )


def _rebuild(saved, weights):
    """a, b and y_swi: kept ones as they are, or a and b computed again; y_swi is None if only a and b were kept."""
    kept = saved.intermediates
    if "a" in kept:
        return kept["a"], kept.get("b"), kept.get("y_swi")
    return expert_up.forward(saved.x, weights.w1, weights.w2, saved.dispatch, saved.activation)


def _router_backward(d_gates, saved, weights, d_load_balancing_loss, d_router_z_loss):
    """d_logits (L, E) from the gates and both losses; the (L, E) probabilities are computed again."""
    logits = saved.x @ weights.wg  # (L, E)
    probs = gating.softmax(logits)  # (L, E)
    topk_experts = saved.dispatch.token_expert_indices.reshape(saved.gates.shape)  # (L, k)
    return (
        gating.backward(d_gates, probs, topk_experts, saved.renormalize)
        + gating.load_balancing_loss_backward(probs, topk_experts, d_load_balancing_loss)
        + gating.router_z_loss_backward(logits, d_router_z_loss)
    )


def backward(d_out, saved, weights, d_load_balancing_loss=0.0, d_router_z_loss=0.0):
    """Every gradient of the layer, from those of its output and of its two losses.

    Parameters
    ----------
    d_out : ndarray (L, d)
        The dtype of x, finite.
    saved : Saved
        From `forward`; it is not changed, so a second backward gives the same again.
    weights : MoEWeights
        Those of the forward, unchanged since.
    d_load_balancing_loss, d_router_z_loss : float
        Gradients of the two losses.

    Returns
    -------
    Gradients
        d_x, d_wg, d_w1, d_w2 (None if ungated), d_w3, d_gates: the same bits under every policy. d_gates is the
        gradient of the gates that `forward` returned in ``saved``, after renormalisation if there was one.

    Raises
    ------
    ValueError, TypeError
        As `forward`, and if a loss gradient is no finite number.

    Notes
    -----
    MoEBlaze, sections 3.2 and 5; the gates as in SonicMoE.
    """
    doors.check_type("saved", saved, Saved)
    _check(saved.x, weights, saved.dispatch.k, saved.activation)
    doors.check_number("d_load_balancing_loss", d_load_balancing_loss)
    doors.check_number("d_router_z_loss", d_router_z_loss)
    a, b, y_swi = _rebuild(saved, weights)
    d_a, d_b, d_gates, d_w3 = expert_down.backward(
        d_out, saved.gates, a, b, weights.w3, saved.dispatch, saved.activation, y_swi
    )
    d_x, d_w1, d_w2 = expert_up.backward(d_a, d_b, saved.x, weights.w1, weights.w2, saved.dispatch)
    d_logits = _router_backward(d_gates, saved, weights, d_load_balancing_loss, d_router_z_loss)  # (L, E)
    d_x += d_logits @ weights.wg.T
    return Gradients(d_x, saved.x.T @ d_logits, d_w1, d_w2, d_w3, d_gates)
