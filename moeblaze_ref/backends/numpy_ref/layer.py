"""The whole MoE layer of the specification: the body of ``moeblaze_ref.systems.layer`` over these stages."""

from moeblaze_ref.backends.numpy_ref import (
    DTYPES,
    activation,
    combine,
    dispatch,
    expert_down,
    expert_up,
    gating,
    router,
)
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import Gradients, LayerOutput

_STAGES = layer.Stages(router, gating, dispatch, expert_up, activation, expert_down, combine)


def forward(x, weights, k, activation="swiglu", policy="minimal", renormalize=False, topk_experts=None) -> LayerOutput:
    """One MoE layer, as `moeblaze_ref.systems.layer.forward` describes; ndarrays of float64 or float32."""
    return layer.forward(_STAGES, DTYPES, x, weights, k, activation, policy, renormalize, topk_experts)


def backward(
    d_out,
    saved,
    weights,
    d_load_balancing_loss=0.0,
    d_router_z_loss=0.0,
    overwrite=False,
    wanted=Gradients._fields,
) -> Gradients:
    """Every gradient, as `moeblaze_ref.systems.layer.backward` describes; ndarrays of float64 or float32."""
    d_losses = d_load_balancing_loss, d_router_z_loss
    return layer.backward(_STAGES, DTYPES, d_out, saved, weights, *d_losses, overwrite, wanted)
