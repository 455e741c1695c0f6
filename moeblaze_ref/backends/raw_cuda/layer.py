"""The whole MoE layer from the raw CUDA stages: the body of ``moeblaze_ref.systems.layer`` over these stages."""

import functools
from collections.abc import Collection
from types import ModuleType
from typing import Any

from moeblaze_ref.backends.raw_cuda import activation as activation_stage
from moeblaze_ref.backends.raw_cuda import combine, dispatch, expert_down, expert_up, gating, gemm, router
from moeblaze_ref.core import checks
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import Gradients, LayerOutput, MoEWeights, Routed, Saved

# Of both projections; the other stages run their default version. "as_printed" is the default version, but for the
# output.
VERSIONS = expert_up.VERSIONS | expert_down.SUMMED_VERSIONS


def default_version(dtype: str, d: int, h: int, executor: Executor) -> str:
    """The fastest version that computes in this dtype at these widths on this executor's device.

    Never ``gemm.TF32``: whoever has float32 in mind gets it, and less only by name.
    """
    version = gemm.portable_version(dtype, d, h)
    return "7_persistent" if version == "3_mma" and executor.capability == (9, 0) else version


def forward(
    x: Array,
    weights: MoEWeights,
    k: int,
    activation: str = "swiglu",
    policy: str = "minimal",
    renormalize: bool = False,
    topk_experts: Array | None = None,
    executor: Executor | None = None,
    version: str | None = None,
) -> LayerOutput:
    """One MoE layer, as `moeblaze_ref.systems.layer.forward` describes.

    Parameters
    ----------
    x : array (L, d), float32, float16 or bfloat16
        A numpy array runs on the SIMT executor, a CuPy array on the GPU; so do all others.
    weights, k, activation, policy, renormalize, topk_experts
        As in `moeblaze_ref.systems.layer.forward`.
    executor : Executor, optional
        Another executor for arrays of that kind.
    version : str, optional
        One of ``VERSIONS``. Default: `default_version`. ``as_printed`` runs the paper's forward: `expert_up.forward` on
        the default version, then `expert_down.summed_forward`. It has no y, so policy ``conventional`` keeps none.

    Returns
    -------
    LayerOutput
        Losses and gates are float32.

    Raises
    ------
    ValueError, TypeError
        As `moeblaze_ref.systems.layer.forward`, or if the version is unknown or does not compute in this dtype.
    """
    stages = stages_for(x, weights, executor, version)
    return layer.forward(stages, gemm.WIDE, x, weights, k, activation, policy, renormalize, topk_experts)


def backward(
    d_out: Array,
    saved: Saved,
    weights: MoEWeights,
    d_load_balancing_loss: float | Array = 0.0,
    d_router_z_loss: float | Array = 0.0,
    overwrite: bool = False,
    wanted: Collection[str] = Gradients._fields,
    executor: Executor | None = None,
    version: str | None = None,
) -> Gradients:
    """Every gradient, as `moeblaze_ref.systems.layer.backward` describes; executor and version as in `forward`."""
    checks.check_type("saved", saved, Saved)
    stages = stages_for(saved.x, weights, executor, version)
    d_losses = d_load_balancing_loss, d_router_z_loss
    return layer.backward(stages, gemm.WIDE, d_out, saved, weights, *d_losses, overwrite, wanted)


def route(
    x: Array,
    weights: MoEWeights,
    k: int,
    activation: str = "swiglu",
    renormalize: bool = False,
    topk_experts: Array | None = None,
    executor: Executor | None = None,
) -> Routed:
    """Who goes where, by which gates, as `moeblaze_ref.systems.layer.route` describes; executor as in `forward`."""
    stages = stages_for(x, weights, executor, None)
    return layer.route(stages, gemm.WIDE, x, weights, k, activation, renormalize, topk_experts)


def router_gradients(
    d_gates: Array,
    x: Array,
    weights: MoEWeights,
    topk_experts: Array,
    renormalize: bool = False,
    d_load_balancing_loss: float | Array = 0.0,
    d_router_z_loss: float | Array = 0.0,
    wanted: Collection[str] = Gradients._fields,
    executor: Executor | None = None,
) -> tuple[Array | None, Array | None]:
    """d_x through the router alone, and d_wg, as `systems.layer.router_gradients`; executor as in `forward`."""
    stages, d_losses = stages_for(x, weights, executor, None), (d_load_balancing_loss, d_router_z_loss)
    return layer.router_gradients(stages, d_gates, x, weights.wg, topk_experts, renormalize, *d_losses, wanted)


def stages_for(x: Array, weights: MoEWeights, executor: Executor | None, version: str | None) -> layer.Stages:
    """The stages with the executor and the version already chosen."""
    checks.check_type("weights", weights, MoEWeights)
    executor = executor or executor_for(x)
    kind = _SummedStages if version in expert_down.SUMMED_VERSIONS else _Stages
    if version is None or kind is _SummedStages:
        version = default_version(checks.dtype_of(x), *weights.w1.shape[1:], executor)
    return _bound_stages(executor, version, kind)


class _Stages(layer.Stages):
    """Stages of which the last may have y in parts, where the whole would cost a step its peak."""

    def output(self, tensors, w3, dispatch, gates, kept):
        in_parts = None if "y" in kept else self.expert_down.output_in_parts(tensors["y_swi"], w3, gates, dispatch)
        return super().output(tensors, w3, dispatch, gates, kept) if in_parts is None else in_parts


class _SummedStages(layer.Stages):
    """Stages of which the last sums over a token's experts in its epilogue, as the paper prints it: y never exists."""

    def output(self, tensors, w3, dispatch, gates, kept):
        y_swi = tensors["y_swi"] if "y_swi" in kept else tensors.pop("y_swi")
        return self.expert_down.summed_forward(y_swi, w3, gates, dispatch, version=expert_down.SUMMED_VERSION)


@functools.cache
def _bound_stages(executor, version, kind) -> layer.Stages:
    return kind(
        router=_Bound(router, executor=executor),
        gating=_Bound(gating, executor=executor),
        dispatch=_Bound(dispatch, executor=executor),
        expert_up=_Bound(expert_up, executor=executor, version=version),
        activation=_Bound(activation_stage, executor=executor),
        expert_down=_Bound(expert_down, executor=executor, version=version),
        combine=_Bound(combine, executor=executor),
    )


class _Bound:
    """A stage whose functions are called with these options, and without the checks of their contracts."""

    def __init__(self, module: ModuleType, **options: Any):
        self._module, self._options = module, options

    def __getattr__(self, name: str):
        function = getattr(self._module, name)
        return functools.partial(getattr(function, "unchecked", function), **self._options)
