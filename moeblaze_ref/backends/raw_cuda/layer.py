"""The whole MoE layer from the raw CUDA stages: the body of ``moeblaze_ref.systems.layer`` over these stages."""

import functools
from collections.abc import Callable, Collection

from moeblaze_ref.backends.raw_cuda import activation as activation_stage
from moeblaze_ref.backends.raw_cuda import combine, dispatch, expert_down, expert_up, gating, gemm, packed, router
from moeblaze_ref.backends.raw_cuda.biases import NONE, Biases
from moeblaze_ref.core.arrays import dtype_of
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.contract import bodies, implements
from moeblaze_ref.core.layouts import Layout
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import ExpertWeights, Gradients, LayerOutput, MoEWeights, Saved, Stages

# Of both projections; the other stages run their default version. "as_printed" is the default version, but for the
# output.
VERSIONS = expert_up.VERSIONS | expert_down.SUMMED_VERSIONS


def default_version(dtype: str, d: int, h: int, executor: Executor) -> str:
    """The fastest version that computes in this dtype at these widths on this executor's device.

    Never ``gemm.TF32``: float32 inputs get float32 products unless the caller names that version.
    """
    version = gemm.portable_version(dtype, d, h)
    return "7_persistent" if version == "3_mma" and executor.capability == (9, 0) else version


@implements(layer.FORWARD, gemm.ARRAYS)
def forward(
    x: Array,
    weights: MoEWeights[Array],
    k: int,
    activation: str = "swiglu",
    policy: str = "minimal",
    renormalize: bool = False,
    topk_experts: Array | None = None,
    executor: Executor | None = None,
    version: str | None = None,
) -> LayerOutput:
    """A numpy array runs on the SIMT executor, a CuPy array on the GPU; so do all others. Losses and gates are float32.

    The version is by default `default_version`. ``as_printed`` runs the paper's forward: `expert_up.forward` on the
    default version, then `expert_down.summed_forward`. It has no y, so policy ``conventional`` keeps none.
    """
    executor = executor or executor_for(x)
    # The router's logits are not the caller's: they are checked where they are used.
    stages = stages_for(x, weights, executor, version)
    stages = stages.with_gating(forward=functools.partial(gating.forward, executor=executor))
    stages = stages._replace(choice=_fused(functools.partial(gating.forward_with_losses, executor=executor)))
    return layer.forward(stages, x, weights, k, activation, policy, renormalize, topk_experts)


@implements(layer.BACKWARD, gemm.ARRAYS)
def backward(
    d_out: Array,
    saved: Saved,
    weights: MoEWeights[Array],
    d_load_balancing_loss: float | Array = 0.0,
    d_router_z_loss: float | Array = 0.0,
    overwrite: bool = False,
    wanted: Collection[str] = Gradients._fields,
    executor: Executor | None = None,
    version: str | None = None,
) -> Gradients:
    """Executor and version as in `forward`."""
    stages = stages_for(saved.x, weights, executor or executor_for(saved.x), version)
    d_losses = d_load_balancing_loss, d_router_z_loss
    return layer.backward(stages, d_out, saved, weights, *d_losses, overwrite, wanted)


def packed_stages_for(
    x: Array,
    weights: ExpertWeights,
    activation: str,
    layout: Layout,
    executor: Executor,
    version: str | None = None,
    biases: Biases = NONE,
) -> Stages:
    """The same for weights of a layout: w1 is gate_up, w3 is down, and there is no w2. The biases are one call's."""
    version = version or default_version(dtype_of(x), *layout.widths(weights.w1, is_gated(activation)), executor)
    how = _stages(executor, version, False, dtype_of(x)), layout, activation, executor, version
    return packed.replaced(*how) if biases is NONE else packed.with_biases(*how, biases)


def stages_for(x: Array, weights: ExpertWeights, executor: Executor, version: str | None = None) -> Stages:
    """The stages without their checks, with the executor and the version already chosen."""
    summed = version in expert_down.SUMMED_VERSIONS
    if version is None or summed:
        _, d, h = weights.w1.shape
        version = default_version(dtype_of(x), d, h, executor)
    return _stages(executor, version, summed, dtype_of(x))


@functools.cache
def _stages(executor: Executor, version: str, summed: bool, dtype: str) -> Stages:
    """The stages of a layer whose router's products are of this dtype."""
    stages = Stages(
        bodies(layer.RouterStage, router, executor=executor),
        bodies(layer.GatingStage, gating, executor=executor),
        bodies(layer.DispatchStage, dispatch, executor=executor),
        bodies(layer.ExpertUpStage, expert_up, executor=executor, version=version),
        bodies(layer.ActivationStage, activation_stage, executor=executor),
        bodies(layer.ExpertDownStage, expert_down, executor=executor, version=version),
        bodies(layer.CombineStage, combine, executor=executor),
        _fused(functools.partial(gating.forward_with_losses.unchecked, executor=executor)),
        _summed(executor) if summed else _in_parts(executor, version),
        functools.partial(gemm.tokens_in_sectors, executor, version),
    )
    return stages.with_gating(backward=functools.partial(stages.gating.backward, dtype=dtype))


def _fused(forward: Callable[..., tuple[Array, ...]]) -> layer.Choosing:
    """A choice by `gating.forward_with_losses`; a routing that is given takes the steps one by one."""

    def choice(stages, logits, k, renormalize, topk_experts):
        if topk_experts is not None:
            return layer.choose_in_steps(stages, logits, k, renormalize, topk_experts)
        return layer.Choice(*forward(logits, k, renormalize))

    return choice


def _in_parts(executor: Executor, version: str) -> layer.Output:
    """An output that may have y in parts, where the whole would cost a step its peak."""
    in_parts = functools.partial(expert_down.output_in_parts.unchecked, executor=executor, version=version)

    def output(stages, tensors, w3, dispatch, gates, kept):
        out = None if "y" in kept else in_parts(tensors["y_swi"], w3, gates, dispatch)
        return layer.store_and_combine(stages, tensors, w3, dispatch, gates, kept) if out is None else out

    return output


def _summed(executor: Executor) -> layer.Output:
    """An output that sums over a token's experts in its epilogue, as the paper prints it: y never exists."""
    summed = functools.partial(expert_down.summed_forward.unchecked, executor=executor)

    def output(stages, tensors, w3, dispatch, gates, kept):
        y_swi = tensors["y_swi"] if "y_swi" in kept else tensors.pop("y_swi")
        return summed(y_swi, w3, gates, dispatch)

    return output
