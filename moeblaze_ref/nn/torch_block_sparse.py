"""MegaBlocks for torch models: the raw CUDA block-sparse stage under autograd, on a GPU or, slowly, on a CPU.

Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5. Router and dispatch are those of `torch_layer.MoELayer`, so the
two layers differ by their experts alone: here routed rows are copied into padded bins, and what lies between the
projections is a block-sparse matrix.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.types import Device

from moeblaze_ref.backends.raw_cuda import block_sparse
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.core.routers import Router, Shared
from moeblaze_ref.core.structures import Array
from moeblaze_ref.nn.torch_experts import ExpertOperands
from moeblaze_ref.nn.torch_layer import KernelMoE
from moeblaze_ref.nn.torch_node import Backward, Forward, System
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems import layer, megablocks
from moeblaze_ref.systems.layer import MoEWeights


class MegaBlocks(NamedTuple):
    """The router, the dispatch and MegaBlocks' experts as a `System`."""

    k: int
    activation: str
    renormalize: bool
    block: int
    version: str | None

    def forward(self, bridge: Bridge, x: Array, weights: MoEWeights[Array], topk_experts: Array | None) -> Forward:
        k, activation, renormalize, block, version = self
        stages = raw_layer.stages_for(x, weights, bridge.executor)
        dispatch, gates, *losses = layer.route(stages, x, weights.wg, k, renormalize, topk_experts)
        sparse = block_sparse.stages_for(x, block, bridge.executor, version)
        out, kept = megablocks.forward(sparse, x, *weights[1:], dispatch, gates, activation, block)
        saved = bridge.by_name({"token_expert_indices": dispatch.token_expert_indices, **kept.tensors()})
        out, balance, z = bridge.tensors([out, *losses])
        return Forward(out, balance, z, saved["token_expert_indices"].view(-1, k), saved)

    def backward(self, bridge: Bridge, given: Backward[MoEWeights[Array]]) -> Sequence[Array | None]:
        x, wanted = given.x, given.wanted
        weights = given.weights
        chosen = given.arrays["token_expert_indices"].reshape(len(x), self.k)
        of_experts = wanted - {"d_wg"}
        if wanted & {"d_x", "d_wg"}:
            of_experts.add("d_gates")  # through which the router hears of the output
        experts = _experts_backward(self, bridge, given, self.k, weights[1:], of_experts)
        stages, gradients = raw_layer.stages_for(x, weights, bridge.executor), (experts.d_x, experts.d_gates)
        d_x, d_wg = layer.router_gradients(
            stages, *gradients, x, weights.wg, chosen, self.renormalize, wanted=wanted, **given.d_losses
        )
        return d_x, d_wg, experts.d_w1, experts.d_w2, experts.d_w3


class MegaBlocksExperts(NamedTuple):
    """MegaBlocks' experts as a `System`, for a routing and gates that are given."""

    activation: str
    block: int
    version: str | None

    def forward(self, bridge: Bridge, x: Array, operands: ExpertOperands[Array], topk_experts: Array | None) -> Forward:
        weights, executor = operands[:3], bridge.executor
        dispatch = raw_layer.stages_for(x, operands, executor).dispatch.build(topk_experts, operands.w1.shape[0])
        sparse = block_sparse.stages_for(x, self.block, executor, self.version)
        gates = operands.topk_weights
        out, kept = megablocks.forward(sparse, x, *weights, dispatch, gates, self.activation, self.block)
        saved = kept.tensors()
        del saved["gates"]  # an operand
        return Forward(bridge.tensor(out), None, None, None, bridge.by_name(saved))

    def backward(self, bridge: Bridge, given: Backward[ExpertOperands[Array]]) -> Sequence[Array | None]:
        operands = given.weights
        given.arrays["gates"] = gates = operands.topk_weights
        of_experts = {"d_gates" if name == "d_topk_weights" else name for name in given.wanted}
        found = _experts_backward(self, bridge, given, gates.shape[1], operands[:3], of_experts)
        return found.d_x, found.d_w1, found.d_w2, found.d_w3, found.d_gates, None, None


def _experts_backward(
    system: MegaBlocks | MegaBlocksExperts,
    bridge: Bridge,
    given: Backward[Any],
    k: int,
    weights: tuple[Array, Array | None, Array],
    wanted: set[str],
) -> megablocks.Gradients:
    """The experts' gradients; what was kept is freed piece by piece if this backward is the last."""
    kept = megablocks.Saved.of(given.arrays, k, system.block, system.activation)
    given.arrays.clear()
    sparse = block_sparse.stages_for(given.d_out, system.block, bridge.executor, system.version)
    return megablocks.backward(sparse, given.d_out, kept, *weights, wanted, given.last)


class BlockSparseMoE(KernelMoE):
    """A mixture of experts that drops no token and pads each expert to whole blocks: MegaBlocks as an ``nn.Module``.

    Parameters
    ----------
    d, h, E, k, activation, renormalize, device, dtype, router, shared
        As in `RoutedExperts`; the dtype is float32, bfloat16 or float16. Kernels compute the softmax router, plain
        torch each other router and the shared expert.
    block : int
        Rows and columns of a block; it divides h.
    version : str, optional
        One of ``raw_cuda.block_sparse.VERSIONS``. Default: the fastest for the dtype, d, the block size and the device.

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

    Under torch's FakeTensorMode no kernel runs, and all tensors are allocated, saved and freed as with memory. P is
    then that of routed rows that spread over the experts as evenly as integers allow.

    MegaBlocks, sections 4 and 5.
    """

    _kind = MegaBlocks
    _kind_of_experts = MegaBlocksExperts

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        renormalize: bool = False,
        block: int = block_sparse.BLOCK,
        version: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        router: Router | str | None = None,
        shared: Shared | None = None,
    ):
        super().__init__(d, h, E, k, activation, renormalize, device, dtype, router=router, shared=shared)
        self.block = sparse_contracts.check_block(block, h)
        self.version = (
            version if version is None else checks.check_name("version of block_sparse", version, block_sparse.VERSIONS)
        )

    def _system(self, x: Tensor, weights: MoEWeights[Tensor]) -> System[MoEWeights[Array]]:
        return self._kind(self.k, self.activation, self.renormalize, self.block, self.version)

    def _experts(self, x: Tensor, operands: ExpertOperands[Tensor]) -> System[ExpertOperands[Array]]:
        return self._kind_of_experts(self.activation, self.block, self.version)

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        return f"{super().extra_repr()}, block={self.block}, version={self.version or 'default'}"
