"""MegaBlocks for torch models: the raw CUDA block-sparse stage under autograd, on a GPU or, slowly, on a CPU.

Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5. Router and dispatch are those of `torch_layer.MoELayer`, so the
two layers differ by their experts alone: here routed rows are copied into padded bins, and what lies between the
projections is a block-sparse matrix.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import block_sparse
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.nn.torch_layer import (
    KernelMoE,
    MoEOutput,
    aligned,
    give_up,
    is_the_last_backward,
    wanted_by,
)
from moeblaze_ref.nn.torch_transforms import check_backward, refuse_forward_mode
from moeblaze_ref.runtime.torch_bridge import bridge_to
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.systems.megablocks import FLOATS, Saved


class Layout(NamedTuple):
    """What a layer saves of the tensors that the stages leave for the backward, and how it gets them back.

    Parameters
    ----------
    pack : callable
        (kept, x, wg) to what is saved, tensors by name; ``kept`` has token_expert_indices and `megablocks.Saved`.
    unpack : callable
        What was saved to ``kept``, without what the backward computes again.
    """

    pack: Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
    unpack: Callable[[dict[str, Tensor]], dict[str, Tensor]]


_AS_IT_IS = Layout(lambda kept, x, wg: kept, lambda kept: kept)


class BlockSparseMoE(KernelMoE):
    """A mixture of experts that drops no token and pads each expert to whole blocks: MegaBlocks as an ``nn.Module``.

    Parameters
    ----------
    d, h, E, k, activation, renormalize, device, dtype
        As in `RoutedExperts`; the dtype is float32, bfloat16 or float16.
    block : int
        Rows and columns of a block; it divides h.
    rung : str, optional
        One of ``raw_cuda.block_sparse.RUNGS``. Default: the fastest for the dtype, d, the block size and the device.

    Attributes
    ----------
    executor : str or None
        What ran the last forward: "cuda", "simt", or None before the first.

    Raises
    ------
    ValueError
        If a size is below 1, k > E, block does not divide h, or a name is unknown.
    TypeError
        If a size is no integer, or the dtype is not allowed.

    Notes
    -----
    The host waits for the GPU once a forward: it must know P, the number of padded rows, to allocate them. The
    published system waits there too; no CUDA graph can capture the layer.

    As `MoELayer`, it works under ``torch.autocast``, ``torch.no_grad`` and ``torch.utils.checkpoint``, for which
    `keep_routing` keeps the choice of experts, and a second derivative raises. The backward frees what the forward kept
    piece by piece (`megablocks.backward` says where), unless ``retain_graph`` asks for another, which gives the same
    bits.

    Kept are x, the choice, the gates, the bins, the topology, and the padded rows x_rows, a, b, y_swi and y
    (``memory.accounting`` states the bytes). act(a), which the published system leaves to autograd to keep, is computed
    again.

    MegaBlocks, sections 4 and 5.
    """

    _layout: Layout = _AS_IT_IS

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        renormalize: bool = False,
        block: int = block_sparse.BLOCK,
        rung: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d, h, E, k, activation, renormalize, device, dtype)
        self.block = sparse_contracts.check_block(block, h)
        self.rung = rung if rung is None else checks.check_name("rung of block_sparse", rung, block_sparse.RUNGS)

    def _run(self, x: Tensor, weights: MoEWeights, topk_experts: Tensor | None) -> MoEOutput:
        options = _Options(self.k, self.activation, self.renormalize, self.block, self.rung, self._layout)
        return self._apply_node(_BlockSparse, options, x, *weights, topk_experts)

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        return f"{super().extra_repr()}, block={self.block}, rung={self.rung or 'default'}"


class _Options(NamedTuple):
    """What the layer is told besides tensors."""

    k: int
    activation: str
    renormalize: bool
    block: int
    rung: str | None
    layout: Layout


class _BlockSparse(torch.autograd.Function):
    """The router, the dispatch and MegaBlocks' experts as one node of autograd's graph."""

    @staticmethod
    def forward(ctx, options, x, wg, w1, w2, w3, topk_experts):
        bridge = bridge_to(x.device)
        k, activation, renormalize, block, rung, layout = options
        with bridge.running():
            array, *weights, replayed = bridge.arrays([x, wg, w1, w2, w3, topk_experts])
            dispatch, gates, *losses = raw_layer.route(
                array, MoEWeights(*weights), k, activation, renormalize, replayed, bridge.executor
            )
            out, saved = block_sparse.forward(
                array, *weights[1:], dispatch, gates, activation, block, bridge.executor, rung
            )
            arrays = {"token_expert_indices": dispatch.token_expert_indices, **saved.tensors()}
            kept = dict(zip(arrays, bridge.tensors(arrays.values()), strict=True))
            out, *losses = bridge.tensors([out, *losses])
        chosen = kept["token_expert_indices"].view(x.shape[0], k)
        kept = layout.pack(kept, x, wg)
        ctx.options, ctx.kept = options, tuple(kept)
        ctx.save_for_backward(x, wg, w1, w2, w3, *kept.values())
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)  # a loss that nobody uses costs nothing
        return out, *losses, chosen

    @staticmethod
    def backward(ctx, d_out, d_load_balancing_loss, d_router_z_loss, _):
        check_backward("BlockSparseMoE", (d_out, d_load_balancing_loss, d_router_z_loss))
        x, *tensors = ctx.saved_tensors
        k, activation, renormalize, block, rung, layout = ctx.options
        unpacked = layout.unpack(dict(zip(ctx.kept, tensors[4:], strict=True)))
        floats = [tensor for name, tensor in unpacked.items() if name in FLOATS]
        d_out = torch.zeros_like(x) if d_out is None else aligned(d_out.contiguous())
        wanted, bridge = set(wanted_by(ctx)), bridge_to(x.device)
        with bridge.running(), checks.trusted():  # autograd vouches for what it kept, and for d_out's shape and dtype
            d_out, *d_losses = bridge.arrays([d_out, d_load_balancing_loss, d_router_z_loss])
            x, *arrays = bridge.arrays([x, *tensors[:4], *unpacked.values()])
            weights = MoEWeights(*arrays[:4])
            kept = dict(zip(unpacked, arrays[4:], strict=True))
            saved, chosen = Saved.of(kept, k, block, activation), kept["token_expert_indices"].reshape(x.shape[0], k)
            if last := is_the_last_backward():
                give_up(floats)
            del tensors, unpacked, arrays, kept, floats
            of_experts = wanted - {"d_wg"}
            if wanted & {"d_x", "d_wg"}:
                of_experts.add("d_gates")  # through which the router hears of the output
            experts = block_sparse.backward(d_out, saved, *weights[1:], of_experts, last, bridge.executor, rung)
            d_x, d_wg = raw_layer.router_gradients(
                experts.d_gates,
                x,
                weights,
                chosen,
                renormalize,
                *[0.0 if d_loss is None else d_loss for d_loss in d_losses],
                wanted=wanted,
                executor=bridge.executor,
            )
            if d_x is not None:
                d_x += experts.d_x
            gradients = bridge.tensors([d_x, d_wg, experts.d_w1, experts.d_w2, experts.d_w3])
        return None, *gradients, None

    @staticmethod
    def jvp(ctx, *_):
        refuse_forward_mode("BlockSparseMoE")
