"""The MoE layer for torch models: the raw CUDA stages under autograd, on a GPU or, slowly, on a CPU.

On a GPU the stages run on torch's own tensors, on torch's stream. On a CPU arrays pass between torch and the
stages without a copy, and the same kernels run on the SIMT executor, or nothing does: plain
torch is another layer (`oracle.OracleMoE`) and never steps in.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.types import Device

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.routers import Router, Shared
from moeblaze_ref.core.structures import Array
from moeblaze_ref.nn import routers, torch_node, torch_operands
from moeblaze_ref.nn.launch_plans import planned
from moeblaze_ref.nn.routed_experts import RoutedExperts, Weights
from moeblaze_ref.nn.torch_experts import SEPARATE, ExpertOperands, RoutedByCaller
from moeblaze_ref.nn.torch_node import Backward, Forward, Operands, System, has_backward
from moeblaze_ref.nn.torch_operands import DTYPES as DTYPES
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import MoEWeights

if TYPE_CHECKING:
    from moeblaze_ref.nn.torch_graphs import LayerGraphs  # which imports this module

log = logging.getLogger(__name__)


class MoEOutput(NamedTuple):
    """What a layer returns."""

    out: Tensor  # (..., d), as x
    load_balancing_loss: Tensor  # () float32
    router_z_loss: Tensor  # () float32
    topk_experts: Tensor  # (L, k) int32


class MoEModule(RoutedExperts):
    """What every system's torch layer has in common: its checks, autocast, replayed routing and its output.

    A system says in ``dtypes`` what it computes in, and in ``_run`` how. Its constructor is that of `RoutedExperts`.
    """

    dtypes: tuple[torch.dtype, ...] = DTYPES

    def forward(self, x: Tensor, topk_experts: Tensor | None = None) -> MoEOutput:
        """The layer's output for the tokens x.

        Parameters
        ----------
        x : Tensor (..., d)
            Of the dtype and on the device of the weights.
        topk_experts : Tensor (L, k), int32, optional
            A routing to replay in place of the router's own choice.

        Raises
        ------
        ValueError
            If a shape, a device or a replayed expert is not allowed.
        TypeError
            If x is no tensor, or a dtype is not allowed or differs from that of the weights.
        RuntimeError
            If nothing can run the kernels here, or under a transform of ``torch.func``, ``torch.export`` or
            ``torch.jit.trace``.
        """
        if torch.compiler.is_compiling():
            from moeblaze_ref.nn import torch_uncompiled

            torch_uncompiled.refuse_export(type(self).__name__)
            output: MoEOutput = torch_uncompiled.run(self._forward, x, topk_experts)
            return output
        return self._forward(x, topk_experts)

    def _forward(self, x: Tensor, topk_experts: Tensor | None) -> MoEOutput:
        return self.launch(x, self.weights, topk_experts)

    def launch(self, x: Tensor, weights: Weights, topk_experts: Tensor | None = None) -> MoEOutput:
        """`forward` with wg, w1, w2 and w3 in place of the layer's own, without hooks and graphs."""
        name = type(self).__name__
        torch_operands.check_call(x, name)
        named = dict(zip(MoEWeights._fields, weights, strict=True))
        torch_operands.check_kinds(x, named, name, self.dtypes)
        _check_shapes(*weights)
        torch_operands.check_width(x, weights[0].shape[0])
        tokens, operands = torch_operands.cast(x, named)
        rows = torch_operands.aligned(torch_operands.rows_of(tokens))
        operands = [None if w is None else torch_operands.aligned(w.contiguous()) for w in operands]
        checks.check_routed_rows(rows.shape[0], self.k)
        replayed = _next_routing(rows.shape[0], self.k)
        topk_experts = replayed if topk_experts is None else _checked_routing(topk_experts, tokens, self)
        result = self._run(rows, MoEWeights(*operands), topk_experts)
        _remember_routing(result.topk_experts)
        return result._replace(out=self.with_shared(rows, result.out).reshape(x.shape))

    def _run(self, x: Tensor, weights: MoEWeights[Tensor], topk_experts: Tensor | None) -> MoEOutput:
        """The output for checked tokens x (L, d), contiguous like the weights and of their dtype."""
        raise NotImplementedError


class KernelMoE(MoEModule):
    """A system over the raw CUDA stages, as one node of autograd's graph, in float32, bfloat16 or float16.

    Attributes
    ----------
    executor : str or None
        What ran the last forward: "cuda", "simt", or None before the first.

    Raises
    ------
    ValueError, TypeError
        As `RoutedExperts`, or if E or k is more than the kernels take.
    """

    executor: str | None = None

    @property
    def has_launch_plans(self) -> bool:
        """Whether calls may replay launch plans on a GPU."""
        return True

    def _check_sizes(self, **sizes: int) -> None:
        super()._check_sizes(**sizes)
        checks.check_kernel_limits(sizes["E"], sizes["k"])

    def launch(self, x: Tensor, weights: Weights, topk_experts: Tensor | None = None) -> MoEOutput:
        """Run `MoEModule.launch`; a call with the same layouts as an earlier one is not checked again."""
        unusual = topk_experts is not None or self._is_unusual(x, weights)
        layouts = None if unusual else torch_operands.layouts_of([x, *weights, None])
        if layouts is None or (type(self), self.k, layouts) not in _passed:
            result = super().launch(x, weights, topk_experts)
            if layouts is not None and torch_operands.in_place(x, *weights):
                _passed[type(self), self.k, layouts] = True
            return result
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        operands = MoEWeights(*weights)
        result = MoEOutput(*self._on_kernels(self._system(rows, operands), rows, operands, None, layouts))
        return result if x.ndim == 2 else result._replace(out=result.out.reshape(x.shape))

    def _is_unusual(self, x: Tensor, weights: Weights) -> bool:
        """Whether a call may need more than its kernels, or something besides its tensors' layouts decides about it."""
        return (
            self.shared_expert is not None
            or not self.router.plain
            or not torch_operands.are_plain(x, weights)
            or torch_operands.casts_or_refuses(x)
            or _replay.get() is not None
            or bool(_tapes.get())
        )

    def _run(self, x: Tensor, weights: MoEWeights[Tensor], topk_experts: Tensor | None) -> MoEOutput:
        if self.router.plain:
            return MoEOutput(*self._on_kernels(self._system(x, weights), x, weights, topk_experts))
        routing = self.route(x, weights.wg, topk_experts)

        def run(rows: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
            operands = ExpertOperands(*weights[1:], gates)
            return self._on_kernels(self._experts(rows, operands), rows, operands, chosen.int())[0]

        out = routers.weighed(x, routing, self.router, run)
        loads = routers.loads_of(routing.topk_experts, weights.wg.shape[1])
        return MoEOutput(out, *routers.router_losses(routing, loads), routing.topk_experts.int())

    def _on_kernels(
        self,
        system: System[Operands],
        x: Tensor,
        operands: Operands,
        topk_experts: Tensor | None,
        layouts: Any = None,
    ) -> Sequence[Tensor]:
        """Run a system as one node, and note what ran it. The layouts are as in `launch_plans.planned`."""
        name = type(self).__name__
        if self.has_launch_plans:
            system = planned(system, layouts)
        outputs, executor = torch_node.run(system, name, x, operands, topk_experts)
        if executor != self.executor:
            log.info("%s(%s) runs on %s", name, self.extra_repr(), executor)
            self.executor = executor
        return outputs

    def _system(self, x: Tensor, weights: MoEWeights[Tensor]) -> System[MoEWeights[Array]]:
        """Return the system that routes x by a softmax and runs it."""
        raise NotImplementedError

    def _experts(self, x: Tensor, operands: ExpertOperands[Tensor]) -> System[ExpertOperands[Array]]:
        """Return the system that runs x by a routing and gates that are given."""
        raise NotImplementedError


class MoELayer(KernelMoE):
    """A mixture of experts that keeps no routed buffer: MoEBlaze as an ``nn.Module``.

    Parameters
    ----------
    d, h, E, k, activation, renormalize, device, dtype, router, shared
        As in `RoutedExperts`; the dtype is float32, bfloat16 or float16. Kernels compute the softmax router, plain
        torch each other router and the shared expert.
    policy : str
        What to keep for the backward, one of ``config.POLICIES``. Without gradients nothing is kept.
    version : str, optional
        One of ``raw_cuda.layer.VERSIONS``. Default: the fastest for the dtype and the widths. Only ``3_mma_tf32``,
        which is never the default, computes in less than the dtype: float32 operands are rounded to 10 bits of
        mantissa.

    Attributes
    ----------
    executor : str or None
        What ran the last forward: "cuda", "simt", or None before the first.
    graphs : torch_graphs.LayerGraphs or None
        What calls replay, once `torch_graphs.graphed` has captured the layer; None launches its kernels again.

    Notes
    -----
    Works under ``torch.autocast``, ``torch.no_grad`` and ``torch.utils.checkpoint``, for which `keep_routing` keeps the
    choice of experts. Autocast casts x and the weights, and the cast copies, whole sets of weights, are kept until the
    backward: weights that are narrow themselves cost none. A second derivative raises, and so do ``torch.export`` and
    the transforms of ``torch.func``; ``torch.compile`` compiles what is around the layer.

    The backward overwrites what the forward kept and frees it piece by piece, unless ``retain_graph`` asks for another
    backward. Kernel files are read once: edits are not followed. The host never waits for the GPU, but to check a
    routing that is given, so once a step has compiled the kernels, a CUDA graph can capture the next. A small layer,
    which waits for the host, is faster as two graphs: `torch_graphs.graphed` makes them. Capture whole steps by
    `torch_capture.capture`: under ``torch.cuda.graph`` alone Python's garbage collector may invalidate the capture.

    Under torch's FakeTensorMode no kernel runs, and all tensors are allocated, saved and freed as with memory.

    MoEBlaze, sections 3 and 5.
    """

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        policy: str = "minimal",
        renormalize: bool = False,
        version: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        router: Router | str | None = None,
        shared: Shared | None = None,
    ):
        super().__init__(d, h, E, k, activation, renormalize, device, dtype, router=router, shared=shared)
        self.policy = checks.check_name("policy", policy, POLICIES)
        self.version = (
            version if version is None else checks.check_name("version of layer", version, raw_layer.VERSIONS)
        )
        self.graphs: LayerGraphs | None = None

    def _forward(self, x: Tensor, topk_experts: Tensor | None) -> MoEOutput:
        if self.graphs is None or self.graphs.training != self.training:
            return self.launch(x, self.weights, topk_experts)
        if topk_experts is not None or _tapes.get() or _replay.get() is not None:
            raise ValueError("a graphed layer chooses the experts itself: it takes no topk_experts and no keep_routing")
        return self.graphs(x, self.tensors)

    def _policy_for(self, x: Tensor, operands: tuple[Tensor | None, ...]) -> str:
        return self.policy if has_backward(x, operands) else "inputs"

    def _system(self, x: Tensor, weights: MoEWeights[Tensor]) -> System[MoEWeights[Array]]:
        return _MoEBlaze(self.k, self.activation, self._policy_for(x, weights), self.renormalize, self.version)

    def _experts(self, x: Tensor, operands: ExpertOperands[Tensor]) -> System[ExpertOperands[Array]]:
        policy = self._policy_for(x, operands)
        return RoutedByCaller(self.activation, policy, SEPARATE, self.version, partial=False)

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        return f"{super().extra_repr()}, policy={self.policy}, version={self.version or 'default'}"


class _MoEBlaze(NamedTuple):
    """The raw CUDA layer as a `System`."""

    k: int
    activation: str
    policy: str
    renormalize: bool
    version: str | None

    def forward(self, bridge: Bridge, x: Array, weights: MoEWeights[Array], topk_experts: Array | None) -> Forward:
        k, activation, policy, renormalize, version = self
        stages = raw_layer.stages_for(x, weights, bridge.executor, version)
        *outputs, kept = layer.forward(stages, x, weights, k, activation, policy, renormalize, topk_experts)
        saved = bridge.by_name(kept.tensors())
        del saved["x"]
        out, balance, z = bridge.tensors(outputs)
        return Forward(out, balance, z, saved["token_expert_indices"].view(-1, k), saved)

    def backward(self, bridge: Bridge, given: Backward[MoEWeights[Array]]) -> Sequence[Array | None]:
        k, activation, policy, renormalize, version = self
        kept = layer.Saved.of(given.x, given.arrays, k, activation, policy, renormalize)
        stages = raw_layer.stages_for(given.x, given.weights, bridge.executor, version)
        gradients = layer.backward(
            stages, given.d_out, kept, given.weights, overwrite=given.last, wanted=given.wanted, **given.d_losses
        )
        return gradients[:5]


# ---- checks --------------------------------------------------------------------------------


class _Bounded(dict[Any, bool]):
    """Keys of the calls that have passed; all are forgotten when there are too many."""

    def __setitem__(self, key: Any, value: bool) -> None:
        if len(self) >= 4096:
            self.clear()
        super().__setitem__(key, value)


_passed = _Bounded()


def _check_shapes(wg: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor) -> None:
    """The weights fit each other; a rank may have fewer experts than its router knows."""
    checks.check_shape("wg", wg, {"d": None, "E": None})
    d = wg.shape[0]
    checks.check_shape("w1", w1, {"E": None, "d": d, "h": None})
    E, _, h = w1.shape
    if w2 is not None:
        checks.check_shape("w2", w2, {"E": E, "d": d, "h": h})
    checks.check_shape("w3", w3, {"E": E, "h": h, "d": d})


def _checked_routing(topk_experts: Tensor, x: Tensor, layer: MoEModule) -> Tensor:
    """A routing given by the caller."""
    num_experts = layer.wg.shape[1]
    routing = torch_operands.checked_routing("topk_experts", topk_experts, x, layer.k, num_experts, (torch.int32,))
    checks.check_array("topk_experts", topk_experts, rank=2, dtypes=("int32",))  # contiguous
    return routing


# ---- routing that survives activation checkpointing ------------------------------------------

_tapes: ContextVar[tuple[list[Tensor], ...]] = ContextVar("tapes", default=())  # that record the choices made now
_replay: ContextVar[Iterator[Tensor] | None] = ContextVar("replay", default=None)  # the choices made before


def keep_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for ``torch.utils.checkpoint``: the recomputation replays the choice of experts and makes no new one.

    Returns
    -------
    forward_context, recompute_context
        As the argument ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` returns them.
        Each call of an `MoEModule` in the region costs the 4 L k bytes of its choice. A recomputation that calls more
        layers than the forward did, or on another number of tokens, raises RuntimeError.
    """
    tape: list[Tensor] = []
    return _Setting(_tapes, lambda: (*_tapes.get(), tape)), _Setting(_replay, lambda: iter(tape))


class _Setting(AbstractContextManager[None]):
    """A context variable with another value, anew each time that the context is entered."""

    def __init__(self, variable: ContextVar[Any], make: Callable[[], Any]):
        self._variable, self._make = variable, make
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> None:
        self._tokens.append(self._variable.set(self._make()))

    def __exit__(self, *exception: object) -> None:
        self._variable.reset(self._tokens.pop())


def _remember_routing(topk_experts: Tensor) -> None:
    for tape in _tapes.get():
        tape.append(topk_experts)


def _next_routing(num_tokens: int, k: int) -> Tensor | None:
    """The choice that the same call made in the forward; None outside a recomputation."""
    replay = _replay.get()
    if replay is None:
        return None
    routing = next(replay, None)
    if routing is None:
        raise RuntimeError("the recomputation calls more MoE layers than the forward did: it must repeat the forward")
    if routing.shape != (num_tokens, k):
        raise RuntimeError(
            f"the recomputation routes {num_tokens} tokens to {k} experts each, but the forward's choice has shape "
            f"{tuple(routing.shape)}: it must repeat the forward"
        )
    return routing
