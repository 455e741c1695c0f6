"""Experts without a router: the layer's second half for a routing that the caller gives, under autograd.

The ids and weights of the chosen experts are arguments, such as another project's router makes them. Everything after
the choice is `torch_layer.MoELayer`'s: the dispatch, the kernels, and what is kept for the backward.

Source: MoEBlaze (arXiv 2601.05296), sections 3 and 5.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, is_gated
from moeblaze_ref.core.structures import Array
from moeblaze_ref.nn import torch_node, torch_operands
from moeblaze_ref.nn.routed_experts import either
from moeblaze_ref.nn.torch_node import Backward, Forward, has_backward
from moeblaze_ref.nn.torch_operands import DTYPES
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems import layer

log = logging.getLogger(__name__)

NAME = "moeblaze_ref.nn.experts"  # in messages
IDS = (torch.int64, torch.int32)
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def experts(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor] | Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weights: Tensor,
    activation: str = "swiglu",
    policy: str = "minimal",
    version: str | None = None,
) -> Tensor:
    """Return the weighted sum of each token's chosen experts.

    Parameters
    ----------
    x : Tensor (..., d)
        L tokens, float32, bfloat16 or float16.
    gate_up : tuple of two Tensors (E, d, h)
        Of the gate and of the up-projection; a single one of them for the ungated activations. Contiguous, of the dtype
        of x; so is ``down``.
    down : Tensor (E, h, d)
        Of the down-projection.
    topk_index : Tensor (L, k), int64 or int32
        Expert ids in 0..E-1, distinct in a row.
    topk_weights : Tensor (L, k), float32, bfloat16 or float16
        What each chosen expert's output is multiplied by.
    activation : str
        One of ``config.ACTIVATIONS``.
    policy : str
        What to keep for the backward, one of ``config.POLICIES``. Without gradients nothing is kept.
    version : str, optional
        As in `MoELayer`.

    Returns
    -------
    out : Tensor (..., d)
        As x. It has gradients for x, the weights and ``topk_weights``, each in the dtype and layout of its tensor.

    Raises
    ------
    ValueError
        If a shape, device, layout or expert id is not allowed, or a name is unknown.
    TypeError
        If an operand is no tensor, or has another dtype.
    RuntimeError
        If nothing can run the kernels here, or under a transform of ``torch.func``, ``torch.export`` or
        ``torch.jit.trace``.

    Notes
    -----
    Works under autocast, `torch.utils.checkpoint` and FakeTensorMode as `MoELayer` does. The host waits for the device
    to check the ids. The weights are never copied, but by autocast: one that is not contiguous, or begins at no
    multiple of 16 bytes, is refused.
    """
    arguments = x, gate_up, down, topk_index, topk_weights, activation, policy, version
    if torch.compiler.is_compiling():
        from moeblaze_ref.nn import torch_uncompiled

        if torch.compiler.is_exporting():
            torch_uncompiled.refuse_export(NAME)
        out: Tensor = torch_uncompiled.run(_run, *arguments)
        return out
    return _run(*arguments)


class ExpertOperands(NamedTuple):
    """What the experts take besides x; each has a gradient."""

    w1: Tensor  # (E, d, h)
    w2: Tensor | None  # (E, d, h); None for the ungated activations
    w3: Tensor  # (E, h, d)
    topk_weights: Tensor  # (L, k)


def _run(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor] | Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weights: Tensor,
    activation: str,
    policy: str,
    version: str | None,
) -> Tensor:
    torch_operands.check_call(x, NAME)
    _check_names(activation, policy, version)
    weights = _named(gate_up, down, activation)
    torch_operands.check_kinds(x, weights, NAME, DTYPES)
    _check_shapes(x, weights)
    tokens, (w1, w2, w3) = torch_operands.cast(x, weights)
    assert w1 is not None and w3 is not None  # as `_named` has found
    k = _check_routing_weights(topk_weights, x)
    checks.check_kernel_limits(w1.shape[0], k)
    routing = torch_operands.checked_routing("topk_index", topk_index, x, k, w1.shape[0], IDS)
    operands = ExpertOperands(w1, w2, w3, topk_weights.contiguous())
    rows = torch_operands.aligned(torch_operands.rows_of(tokens))
    system = RoutedByCaller(activation, policy if has_backward(rows, operands) else "inputs", version)
    outputs, executor = torch_node.run(system, NAME, rows, operands, routing)
    log.debug("%s runs on %s", NAME, executor)
    return outputs[0].reshape(x.shape)


class RoutedByCaller(NamedTuple):
    """The experts' half of the raw CUDA layer as a `System`: its routing and gates are given."""

    activation: str
    policy: str
    version: str | None

    def forward(self, bridge: Bridge, x: Array, operands: ExpertOperands, topk_experts: Array | None) -> Forward:
        """Dispatch the tokens as they were routed, and run the experts."""
        stages = raw_layer.stages_for(x, operands, bridge.executor, self.version)
        dispatch = stages.dispatch.build(topk_experts, operands.w1.shape[0])
        gates = bridge.executor.cast(operands.topk_weights, "float32")
        out, kept = layer.run_experts(stages, x, operands, dispatch, gates, self.activation, self.policy)
        return Forward(bridge.tensor(out), None, None, None, bridge.by_name(dispatch.arrays() | kept))

    def backward(self, bridge: Bridge, given: Backward) -> Sequence[Array | None]:
        """Return d_x and the gradient of each operand."""
        x, operands, executor = given.x, given.weights, bridge.executor
        stages = raw_layer.stages_for(x, operands, executor, self.version)
        given.arrays["gates"] = executor.cast(operands.topk_weights, "float32")
        k = operands.topk_weights.shape[1]
        kept = layer.Saved.of(x, given.arrays, k, self.activation, self.policy, renormalize=False)
        d_x, _, *d_weights, d_gates = layer.expert_gradients(
            stages, given.d_out, kept, operands, given.last, given.wanted
        )
        d_topk_weights = executor.cast(d_gates, checks.dtype_of(operands.topk_weights))
        return d_x, *d_weights, d_topk_weights if "d_topk_weights" in given.wanted else None


# ---- checks --------------------------------------------------------------------------------


def _check_names(activation: str, policy: str, version: str | None) -> None:
    checks.check_name("activation", activation, ACTIVATIONS)
    checks.check_name("policy", policy, POLICIES)
    if version is not None:
        checks.check_name("version of experts", version, raw_layer.VERSIONS)


def _named(gate_up: tuple[Tensor, Tensor] | Tensor, down: Tensor, activation: str) -> dict[str, Tensor | None]:
    """w1, w2 and w3 by the names that the caller knows."""
    named: dict[str, Any] = {"gate_up": gate_up, "no second projection": None, "down": down}
    if is_gated(activation):
        if not (isinstance(gate_up, tuple) and len(gate_up) == 2):
            raise TypeError(f"gate_up is a {type(gate_up).__name__}, but for {activation} it must be a tuple of two")
        named = {"gate_up[0]": gate_up[0], "gate_up[1]": gate_up[1], "down": down}
    for name, tensor in named.items():
        if tensor is not None:
            checks.check_type(name, tensor, Tensor)
    return named


def _check_shapes(x: Tensor, weights: torch_operands.Named) -> None:
    """The weights fit each other and x, and lie as the kernels read them."""
    (first, w1), (second, w2), (last, w3) = weights.items()
    assert w1 is not None and w3 is not None
    checks.check_shape(first, w1, {"E": None, "d": None, "h": None})
    E, d, h = w1.shape
    for name, size in {"E": E, "d": d, "h": h}.items():
        checks.check_int(name, size, at_least=1)
    if w2 is not None:
        checks.check_shape(second, w2, {"E": E, "d": d, "h": h})
    checks.check_shape(last, w3, {"E": E, "h": h, "d": d})
    torch_operands.check_width(x, d)
    for name, weight in weights.items():
        if weight is not None:
            _check_in_place(name, weight)


def _check_in_place(name: str, weight: Tensor) -> None:
    """The kernels can read the weight where it is: a copy of a weight would cost as much as the weight."""
    if not weight.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {weight.stride()}), and no copy of a weight is made")
    if not torch_operands.is_aligned(weight):
        raise ValueError(f"{name} begins at no multiple of 16 bytes, and no copy of a weight is made")


def _check_routing_weights(topk_weights: Tensor, x: Tensor) -> int:
    """Return k, of checked routing weights."""
    checks.check_type("topk_weights", topk_weights, Tensor)
    if topk_weights.dtype not in WEIGHTS:
        raise TypeError(f"topk_weights has dtype {topk_weights.dtype}, but it must be {either(WEIGHTS)}")
    if topk_weights.device != x.device:
        raise ValueError(f"topk_weights is on {topk_weights.device}, but x is on {x.device}")
    checks.check_shape("topk_weights", topk_weights, {"L": x.numel() // x.shape[-1], "k": None})
    return topk_weights.shape[1]
