"""A small MoE layer as two CUDA graphs: one of its forward, one of its backward."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moeblaze_ref.core import checks
from moeblaze_ref.nn.torch_layer import MoELayer, MoEOutput
from moeblaze_ref.nn.torch_transforms import (
    check_backward,
    refuse_forward_mode,
    refuse_transform,
    tracing,
    transforms_active,
)
from moeblaze_ref.runtime.torch_capture import capture

WARM_UP = 3  # steps before the captures: they compile the kernels, and cuBLAS takes its workspace


def graphed(layer: MoELayer, x: Tensor) -> MoELayer:
    """Capture the layer's forward and backward as CUDA graphs, which its calls replay from now on.

    Parameters
    ----------
    layer : MoELayer
        On a CUDA device. It is changed in place. After ``eval()`` it launches its kernels as before, at any shape, if
        it was graphed in training mode, and the other way round; so does a copy of it.
    x : Tensor (..., d)
        An example: later inputs have its shape, dtype and device, and may need a gradient if it does.

    Returns
    -------
    MoELayer
        The layer itself.

    Raises
    ------
    ValueError, TypeError
        If the layer or x is not as above, or as the layer raises.
    RuntimeError
        If a capture fails. The layer then launches its kernels as before.

    Notes
    -----
    Outputs last until the next forward, gradients until the next backward. What would read overwritten memory raises
    RuntimeError: a backward that is not the first one after its forward and before the next forward, a call with
    weights that have moved, a backward while a weight's ``.grad`` is the graphs' memory. ``topk_experts`` and
    `keep_routing` are refused. Policy and autocast are those of the capture. The graphs hold about the peak memory of a
    step, until the layer is gone.
    """
    if not isinstance(layer, MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}, but only a MoELayer can be graphed")
    checks.check_type("x", x, Tensor)
    if x.device.type != "cuda":
        raise ValueError(f"x is on {x.device}, but CUDA graphs need a CUDA device")
    layer.graphs = None  # those of before go now, for none may go during a capture
    layer.graphs = LayerGraphs(layer, x)
    return layer


class LayerGraphs:
    """The two graphs of a layer, and the tensors that they read and write.

    Nothing here refers to the layer, so the graphs go with the last reference to it, without the garbage collector.
    Parameters are those of `graphed`.

    Attributes
    ----------
    training : bool
        The layer's mode in which calls replay the graphs.
    """

    def __init__(self, layer: MoELayer, x: Tensor):
        self.training = layer.training
        self._x = x.detach().clone().requires_grad_(x.requires_grad)  # each input is copied over it
        self._tensors = layer.tensors
        # The same memory under other tensors: to autograd the parameters may belong to the stream of an earlier step.
        self._aliases = {name: _alias(tensor) for name, tensor in self._tensors.items()}
        self._turn = 0  # of the last forward or backward, each of which overwrites what the one before left
        self._forward_graph, self._backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.device(x.device), torch.enable_grad():
            self._capture(layer, _stream(x.device), torch.cuda.graph_pool_handle())

    def _capture(self, layer: MoELayer, stream: torch.cuda.Stream, pool: Any) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._warm_up(layer)
        with capture(self._forward_graph, pool, stream):
            result = self._launch(layer)
        self._outputs = [output.detach() for output in result]
        with capture(self._backward_graph, pool, stream) if result.out.requires_grad else nullcontext():
            self._gradients = self._differentiate(result[:3])

    def _warm_up(self, layer: MoELayer) -> None:
        """Run a step, and make the gradients of its outputs, which the backward reads."""
        *outputs, _ = self._launch(layer)
        self._d_outputs = [torch.ones_like(output) for output in outputs]
        self._differentiate(outputs)

    def _launch(self, layer: MoELayer) -> MoEOutput:
        """Run the layer's kernels on ``_x``, over the aliases."""
        aliases = {f"layer.{name}": alias for name, alias in self._aliases.items()}
        output: MoEOutput = functional_call(_Launch(layer), aliases, (self._x,))
        return output

    def _differentiate(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of x and of the layer's tensors, from ``_d_outputs``; None for what needs none."""
        tensors = self._x, *self._aliases.values()
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        # The losses of a router in torch need no gradient if neither x nor the router does.
        pairs = [pair for pair in zip(outputs, self._d_outputs, strict=True) if pair[0].requires_grad]
        needing, d_outputs = zip(*pairs, strict=True) if pairs else ((), ())
        gradients = iter(torch.autograd.grad(needing, leaves, d_outputs) if leaves else ())
        return [next(gradients) if tensor.requires_grad else None for tensor in tensors]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the layer, and one from a file, has none

    def __call__(self, x: Tensor, tensors: dict[str, Tensor]) -> MoEOutput:
        """The layer's output for x, by replay.

        Parameters
        ----------
        x : Tensor (..., d)
        tensors : dict of str to Tensor
            The layer's, as `RoutedExperts.tensors` names them.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            If x or the tensors are not those that the graphs were captured for.
        """
        checks.check_type("x", x, Tensor)
        if transforms_active() or tracing():
            refuse_transform(MoELayer.__name__)
        self._check_x(x)
        self._check_tensors(tensors)
        outputs = _Replay.apply(self, x, *tensors.values())  # type: ignore[no-untyped-call]  # torch has no type for it
        return MoEOutput(*outputs)

    def _check_x(self, x: Tensor) -> None:
        for what in ("shape", "dtype", "device"):
            found, expected = getattr(x, what), getattr(self._x, what)
            if found != expected:
                raise ValueError(f"x has {what} {_said(found)}, but the layer was graphed for {_said(expected)}")
        self._check_needs("x", x, self._gradients[0])

    def _check_tensors(self, tensors: dict[str, Tensor]) -> None:
        if changed := sorted(tensors.keys() ^ self._aliases.keys()):
            raise RuntimeError(f"{changed[0]} has come or gone since the layer was graphed: graph the layer again")
        for (name, tensor), gradient in zip(tensors.items(), self._gradients[1:], strict=True):
            if tensor.data_ptr() != self._aliases[name].data_ptr():
                raise RuntimeError(f"{name} has moved since the layer was graphed: graph the layer again")
            self._check_needs(name, tensor, gradient)

    def _check_needs(self, name: str, tensor: Tensor, gradient: Tensor | None) -> None:
        if gradient is None and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} needs a gradient, but did not when the layer was graphed: graph it again")

    def forward(self, x: Tensor) -> tuple[int, list[Tensor]]:
        """Replay the forward on x. Returns the turn that `backward` asks for, and the outputs."""
        self._turn += 1
        self._x.copy_(x)
        self._forward_graph.replay()
        return self._turn, [output.detach() for output in self._outputs]

    def backward(self, turn: int, d_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward of the forward of this turn. Returns the gradients of x and of the layer's tensors.

        Raises
        ------
        RuntimeError
            If another forward or backward has overwritten what it needs, or it would overwrite a weight's ``.grad``.
        """
        if turn != self._turn:
            raise RuntimeError(
                "the graphed layer has run since this forward: each forward has one backward, before the next forward"
            )
        self._check_grads()
        self._turn += 1
        for static, d_output in zip(self._d_outputs, d_outputs, strict=True):
            static.zero_() if d_output is None else static.copy_(d_output)
        self._backward_graph.replay()
        return [None if gradient is None else gradient.detach() for gradient in self._gradients]

    def _check_grads(self) -> None:
        """No weight's ``.grad`` is what the backward writes, as it is after a backward that found none."""
        for (name, tensor), gradient in zip(self._tensors.items(), self._gradients[1:], strict=True):
            if gradient is not None and tensor.grad is not None and tensor.grad.data_ptr() == gradient.data_ptr():
                raise RuntimeError(
                    f"{name}.grad is memory that this backward overwrites: call zero_grad before each backward of a "
                    f"graphed layer, or, to add gradients up, set each .grad to zeros of its own before the first"
                )


class _Launch(nn.Module):
    """The layer's kernels as a module, whose tensors `functional_call` replaces: no hook and no graph of the layer."""

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> MoEOutput:
        """`MoELayer.launch` over the tensors that the layer has now."""
        return self.layer.launch(x, self.layer.weights)


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _said(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one on which a device's layers are captured: cuBLAS takes a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it


class _Replay(torch.autograd.Function):
    """The two graphs as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, graphs: LayerGraphs, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.turn, outputs = graphs.forward(x)
        ctx.mark_non_differentiable(outputs[-1])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward(MoELayer.__name__, d_outputs)
        return None, *ctx.graphs.backward(ctx.turn, d_outputs[:3])

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        refuse_forward_mode(MoELayer.__name__)
