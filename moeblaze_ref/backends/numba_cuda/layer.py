"""The whole MoE layer from the Numba stages: the body of ``moeblaze_ref.systems.layer`` over these stages."""

import functools

from moeblaze_ref.backends.numba_cuda import activation, combine, dispatch, expert_down, expert_up, gating, router
from moeblaze_ref.backends.numba_cuda.runtime import ARRAYS
from moeblaze_ref.core.contract import implements
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import Gradients, LayerOutput


@implements(layer.FORWARD, ARRAYS)
def forward(x, weights, k, activation="swiglu", policy="minimal", renormalize=False, topk_experts=None) -> LayerOutput:
    """With CuPy arrays nothing leaves the GPU between the stages."""
    return layer.forward(_stages(), x, weights, k, activation, policy, renormalize, topk_experts)


@implements(layer.BACKWARD, ARRAYS)
def backward(
    d_out,
    saved,
    weights,
    d_load_balancing_loss=0.0,
    d_router_z_loss=0.0,
    overwrite=False,
    wanted=Gradients._fields,
) -> Gradients:
    d_losses = d_load_balancing_loss, d_router_z_loss
    return layer.backward(_stages(), d_out, saved, weights, *d_losses, overwrite, wanted)


@functools.cache
def _stages() -> layer.Stages:
    return layer.stages_of(router, gating, dispatch, expert_up, activation, expert_down, combine)
