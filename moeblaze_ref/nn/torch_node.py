"""One node of autograd's graph for every layer that runs kernels: a system says what to run and what to save.

The node saves tensors, frees them in the last backward, and refuses second derivatives, forward mode and batches of
gradients. A `System` runs the kernels.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from moeblaze_ref.core.arrays import has_values
from moeblaze_ref.core.structures import Array
from moeblaze_ref.nn.torch_operands import aligned
from moeblaze_ref.nn.torch_transforms import check_backward, refuse_forward_mode
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.torch_bridge import Bridge

# A NamedTuple of what a system takes besides x: tensors or None. Each has a gradient, ``d_`` and its name.
Operands = TypeVar("Operands", bound=tuple[Any, ...])


class Forward(NamedTuple):
    """Results of a system's forward.

    A system without a router has no losses, and no choice of its own.
    """

    out: Tensor  # (L, d)
    load_balancing_loss: Tensor | None  # () float32
    router_z_loss: Tensor | None  # () float32
    topk_experts: Tensor | None  # (L, k) int32
    saved: dict[str, Tensor]  # for the backward, by name, besides x and the operands
    counts: Any = None  # numbers of the host for the backward


class Backward(NamedTuple, Generic[Operands]):
    """Arguments of a system's backward."""

    d_out: Array  # (L, d), contiguous
    d_losses: dict[str, Any]  # arrays () float32: d_load_balancing_loss and d_router_z_loss, where they are not zero
    x: Array  # (L, d)
    weights: Operands  # of the type that the forward was given
    arrays: dict[str, Array]  # what the forward saved; a float that leaves the dict is freed, if this is the last
    counts: Any  # as the forward returned them
    wanted: set[str]  # names of gradients
    last: bool  # no other backward follows: what was saved may be overwritten


class System(Protocol[Operands]):
    """A layer's kernels, forward and backward, on the arrays of a bridge that is running."""

    def forward(self, bridge: Bridge, x: Array, weights: Operands, topk_experts: Array | None) -> Forward:
        """Run the layer on x (L, d), with a routing (L, k) that is given or None."""

    def backward(self, bridge: Bridge, given: Backward[Operands]) -> Sequence[Array | None]:
        """Return d_x and the gradient of each operand, such as d_wg; None for a gradient that is not wanted."""


def run(
    system: System[Operands], layer: str, x: Tensor, weights: Operands, topk_experts: Tensor | None
) -> tuple[Sequence[Tensor], str]:
    """Run a system as one node.

    Parameters
    ----------
    system : System
    layer : str
        The name of the layer, for messages.
    x : Tensor (L, d)
    weights : Operands
        Such as `MoEWeights`. Like x the weights are contiguous, of one dtype, and begin at multiples of 16 bytes.
    topk_experts : Tensor (L, k) or None
        A routing that is given, such as one to replay; of integers that the system takes.

    Returns
    -------
    outputs : sequence of Tensor
        The output, the load-balancing loss, the router z-loss and the choice of experts; None where the system has
        none.
    executor : str
        The name of the executor that ran the kernels.
    """
    bridge = _bridge_of(x)
    outputs = _Node.apply(system, layer, bridge, type(weights), topk_experts, x, *weights)  # type: ignore[no-untyped-call]
    return outputs, bridge.executor.name


def _bridge_of(x: Tensor) -> Bridge:
    """Return the bridge of a tensor's device, or a `FakeBridge`, which runs no kernel, if the tensor has no memory."""
    if has_values(x):
        return bridge_to(x.device)
    from moeblaze_ref.runtime.torch_fake import FakeBridge

    return FakeBridge(x)


def has_backward(x: Tensor, weights: tuple[Tensor | None, ...]) -> bool:
    """Return True if autograd will want a gradient of one of a node's tensors."""
    return torch.is_grad_enabled() and any([t.requires_grad for t in (x, *weights) if t is not None])


_LOSSES = ("d_load_balancing_loss", "d_router_z_loss")


class _Node(torch.autograd.Function):
    """The node; ``kind`` is the type of the operands."""

    @staticmethod
    def forward(
        ctx: Any,
        system: System[Any],
        layer: str,
        bridge: Bridge,
        kind: type[Any],
        topk_experts: Tensor | None,
        x: Tensor,
        *operands: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        with bridge.running():
            routing, array, *weights = bridge.arrays([topk_experts, x, *operands])
            *outputs, saved, ctx.counts = system.forward(bridge, array, kind(*weights), routing)
        ctx.system, ctx.layer, ctx.bridge, ctx.kind, ctx.names = system, layer, bridge, kind, tuple(saved)
        ctx.save_for_backward(x, *operands, *saved.values())
        if outputs[3] is not None:
            ctx.mark_non_differentiable(outputs[3])
        ctx.set_materialize_grads(False)  # an output without a gradient costs nothing
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward(ctx.layer, d_outputs)
        x, *tensors = ctx.saved_tensors
        d_out, d_balance, d_z, _ = d_outputs
        d_out = torch.zeros_like(x) if d_out is None else aligned(d_out.contiguous())
        names = ("x", *ctx.kind._fields)
        wanted = {f"d_{name}" for name, needed in zip(names, ctx.needs_input_grad[5:], strict=True) if needed}
        last = not torch._C._autograd._get_current_graph_task_keep_graph()  # without retain_graph no other can follow
        bridge = ctx.bridge
        with bridge.running():
            count = len(ctx.kind._fields)
            d_out, d_balance, d_z, x, *others = bridge.arrays([d_out, d_balance, d_z, x, *tensors])
            weights, saved = ctx.kind(*others[:count]), others[count:]
            del others
            if last:
                _release(tensors[count:])
            d_losses = {name: d for name, d in zip(_LOSSES, (d_balance, d_z), strict=True) if d is not None}
            arrays = dict(zip(ctx.names, saved, strict=True))
            del saved  # the system frees what it takes out of the dict
            given = Backward(d_out, d_losses, x, weights, arrays, ctx.counts, wanted, last)
            gradients = ctx.system.backward(bridge, given)
            return *[None] * 5, *bridge.tensors(gradients)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        refuse_forward_mode(ctx.layer)


def _release(tensors: Sequence[Tensor]) -> None:
    """Take the floats' memory from tensors that autograd holds until the end of the backward.

    The indices stay: the choice of experts is an output too.
    """
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.new_empty(0)
