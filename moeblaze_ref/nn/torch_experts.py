"""Experts without a router: the layer's second half for a routing that the caller gives, under autograd.

The ids and weights of the chosen experts are arguments, such as another project's router makes them. Everything after
the choice is `torch_layer.MoELayer`'s: the dispatch, the kernels, and what is kept for the backward.

The weights stay as a model stores them: the kernels read them where they lie, and write the gradients alike.

Source: MoEBlaze (arXiv 2601.05296), sections 3 and 5.
"""

import functools
import logging
from collections.abc import Collection, Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.raw_cuda import packed
from moeblaze_ref.backends.raw_cuda.biases import NONE, Biases
from moeblaze_ref.backends.raw_cuda.dispatch import build_open
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import EXPERT_ACTIVATIONS, POLICIES, is_gated
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.core.structures import A_co, Array
from moeblaze_ref.nn import torch_node, torch_operands
from moeblaze_ref.nn.given_ids import local_ids
from moeblaze_ref.nn.launch_plans import planned
from moeblaze_ref.nn.routed_experts import either
from moeblaze_ref.nn.torch_node import Backward, Forward, has_backward
from moeblaze_ref.nn.torch_operands import DTYPES
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems import layer

log = logging.getLogger(__name__)

NAME = "moeblaze_ref.nn.experts"  # in messages
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
SEPARATE = "separate"  # the layout of `MoELayer`


def experts(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor] | Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weights: Tensor,
    activation: str = "swiglu",
    policy: str = "minimal",
    layout: str = "linear",
    version: str | None = None,
    first: int | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's chosen experts.

    Parameters
    ----------
    x : Tensor (..., d)
        L tokens, float32, bfloat16 or float16.
    gate_up : Tensor
        The gate and the up-projection, in the shape of the layout. Contiguous, of the dtype of x; so is ``down``.
    down : Tensor
        The down-projection, in the shape of the layout.
    topk_index : Tensor (L, k), int64 or int32
        Expert ids in 0..E-1, distinct in a row. With ``first`` also others, which need not be distinct.
    topk_weights : Tensor (L, k), float32, bfloat16 or float16
        What each chosen expert's output is multiplied by.
    activation : str
        One of ``config.EXPERT_ACTIVATIONS``. ``clamped_swiglu`` is gpt-oss's: g * sigmoid(1.702 g) * (u + 1), for a
        gate g of at most 7 and a second projection u in -7..7. Where a finite one is clamped its gradient is 0.
    policy : str
        What to keep for the backward, one of ``config.POLICIES``. Without gradients nothing is kept.
    layout : str
        How the weights are stored; h is the width of an expert, and the ungated activations have no second half.

        - ``linear``: gate_up (E, 2h, d), the gate's h rows first; down (E, d, h). As an ``nn.Linear``'s: Mixtral,
          Qwen3, DeepSeek-V3 and most others in transformers.
        - ``matmul``: gate_up (E, d, 2h), the gate's h columns first; down (E, h, d). Llama 4.
        - ``interleaved``: the same, but columns of the gate and of the up-projection alternate. gpt-oss.
        - ``separate``: gate_up is a tuple of two (E, d, h), or one for the ungated activations; down (E, h, d).
          `MoELayer`.
    version : str, optional
        In ``separate`` as in `MoELayer`. In the other layouts one of ``packed.VERSIONS``.
    first : int, optional
        The id of the first expert that is here, where others are on other ranks. Ids outside
        ``first``..``first + E - 1`` are skipped: they add nothing to the output, and their weights have a gradient of
        0. transformers numbers the experts of a rank from 0 and gives all others the id E: ``first=0``. Room is
        allocated for all L * k rows.
    gate_up_bias : Tensor (E, 2h), optional
        Of the dtype of x, in the order of gate_up's columns (of its rows in ``linear``); (E, h) for the ungated
        activations. Not in layout ``separate``; nor is ``down_bias``.
    down_bias : Tensor (E, d), optional
        Of the dtype of x.

    Returns
    -------
    out : Tensor (..., d)
        As x. It has gradients for x, the weights, the biases and ``topk_weights``, each in the dtype and layout of its
        tensor.

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
    Works under autocast, `torch.utils.checkpoint` and FakeTensorMode as `MoELayer` does. Only autocast copies weights:
    the function refuses a weight that is not contiguous, or whose address is not a multiple of 16 bytes. Biases save
    nothing for the backward: the sums that need them are computed again.

    On a CPU an id that is not allowed raises at once. On a GPU the host does not wait to check the ids, so a CUDA graph
    can capture a step. A token with an id that is not allowed then gets no expert: its output and gradients are 0. The
    next call raises if the GPU has found such a token by then. `check_given_ids` waits for the GPU and raises.
    """
    routing = topk_index, topk_weights
    arguments = x, gate_up, down, *routing, activation, policy, layout, version, first, gate_up_bias, down_bias
    if torch.compiler.is_compiling():
        from moeblaze_ref.nn import torch_uncompiled

        torch_uncompiled.refuse_export(NAME)
        out: Tensor = torch_uncompiled.run(_run, *arguments)
        return out
    return _run(*arguments)


class Experts(nn.Module):
    """Experts without a router, as an ``nn.Module``: `experts` with weights of its own.

    Parameters
    ----------
    E, d, h : int
        Experts, model width, expert width.
    activation, policy, layout, version
        As in `experts`; the layout is one of ``linear``, ``matmul`` and ``interleaved``.
    device, dtype : optional
        Of the parameters.
    bias : bool
        Have the parameters gate_up_bias and down_bias; they begin as 0.

    Raises
    ------
    ValueError
        If a size is below 1, or a name is unknown.
    TypeError
        If a size is no integer, or the dtype is not allowed.
    """

    def __init__(
        self,
        E: int,
        d: int,
        h: int,
        activation: str = "swiglu",
        policy: str = "minimal",
        layout: str = "linear",
        version: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        bias: bool = False,
    ):
        super().__init__()
        _check_sizes(E, d, h)
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(f"dtype is {dtype}, but it must be {either(DTYPES)}")
        checks.check_type("bias", bias, bool)
        checks.check_name("layout", layout, LAYOUTS)
        _check_names(activation, policy, layout, version)
        self.activation, self.policy, self.layout, self.version = activation, policy, layout, version
        up, down = LAYOUTS[layout].shapes(E, d, h, is_gated(activation))
        self.gate_up = nn.Parameter(torch.randn(up, device=device, dtype=dtype) * d**-0.5)
        self.down = nn.Parameter(torch.randn(down, device=device, dtype=dtype) * h**-0.5)
        self.gate_up_bias, self.down_bias = [
            nn.Parameter(torch.zeros(E, width, device=device, dtype=dtype)) if bias else None
            for width in (h * (1 + is_gated(activation)), d)
        ]

    def forward(self, x: Tensor, topk_index: Tensor, topk_weights: Tensor, first: int | None = None) -> Tensor:
        """The output (..., d) for x (..., d) and a routing (L, k), as `experts` takes them."""
        names = self.activation, self.policy, self.layout, self.version
        biases = self.gate_up_bias, self.down_bias
        return experts(x, self.gate_up, self.down, topk_index, topk_weights, *names, first, *biases)

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        E = self.gate_up.shape[0]
        d, h = LAYOUTS[self.layout].widths(self.gate_up, is_gated(self.activation))
        sizes = f"E={E}, d={d}, h={h}, bias={self.down_bias is not None}"
        choices = f"activation={self.activation}, policy={self.policy}, layout={self.layout}"
        return f"{sizes}, {choices}" + (f", version={self.version}" if self.version else "")


class ExpertOperands(NamedTuple, Generic[A_co]):
    """Operands of the experts besides x, as they are stored; each has a gradient."""

    w1: A_co  # of the gate, or gate_up
    w2: A_co | None  # of the up-projection; None if w1 has both, or for the ungated activations
    w3: A_co  # down
    topk_weights: A_co  # (L, k)
    gate_up_bias: A_co | None = None  # in the order of gate_up's columns
    down_bias: A_co | None = None  # (E, d)


def _run(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor] | Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weights: Tensor,
    activation: str,
    policy: str,
    layout: str,
    version: str | None,
    first: int | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    torch_operands.check_call(x, NAME)
    _check_names(activation, policy, layout, version)
    weights = _named(gate_up, down, activation, layout)
    biases = _named_biases(gate_up_bias, down_bias, layout)
    torch_operands.check_kinds(x, {**weights, **biases}, NAME, DTYPES)
    _check_weights(x, weights, activation, layout)
    _check_biases(biases, weights, activation, layout)
    tokens, (w1, w2, w3, *cast_biases) = torch_operands.cast(x, {**weights, **biases})
    assert w1 is not None and w3 is not None  # as `_named` has found
    k = _check_routing_weights(topk_weights, x)
    checks.check_kernel_limits(w1.shape[0], k)
    if first is not None:
        first = checks.check_int("first", first, at_least=0, at_most=torch.iinfo(torch.int32).max)
    routing = local_ids(topk_index, x, k, w1.shape[0], first)
    in_place = [bias if bias is None else torch_operands.aligned(bias.contiguous()) for bias in cast_biases]
    operands = ExpertOperands(w1, w2, w3, topk_weights.contiguous(), *in_place)
    rows = torch_operands.aligned(torch_operands.rows_of(tokens))
    policy = policy if has_backward(rows, operands) else "inputs"
    system = RoutedByCaller(activation, policy, layout, version, partial=True)
    outputs, executor = torch_node.run(planned(system), NAME, rows, operands, routing)
    log.debug("%s runs on %s", NAME, executor)
    return outputs[0].reshape(x.shape)


class RoutedByCaller(NamedTuple):
    """The experts' half of the raw CUDA layer as a `System`: its routing and gates are given."""

    activation: str
    policy: str
    layout: str
    version: str | None
    partial: bool  # some ids may be EMPTY

    def forward(self, bridge: Bridge, x: Array, operands: ExpertOperands[Array], topk_experts: Array | None) -> Forward:
        """Dispatch the tokens as they were routed, and run the experts."""
        stages = self._stages(x, operands, bridge.executor, _biases(operands))
        E = operands.w1.shape[0]
        build = functools.partial(build_open, executor=bridge.executor) if self.partial else stages.dispatch.build
        dispatch = build(topk_experts, E)
        gates = bridge.executor.cast(operands.topk_weights, "float32")
        out, kept = layer.run_experts(stages, x, operands, dispatch, gates, self.activation, self.policy)
        return Forward(bridge.tensor(out), None, None, None, bridge.by_name(dispatch.arrays() | kept))

    def backward(self, bridge: Bridge, given: Backward[ExpertOperands[Array]]) -> Sequence[Array | None]:
        """Return d_x and the gradient of each operand."""
        x, operands, executor = given.x, given.weights, bridge.executor
        biases = _biases(operands, given.wanted)
        stages = self._stages(x, operands, executor, biases)
        given.arrays["gates"] = executor.cast(operands.topk_weights, "float32")
        k = operands.topk_weights.shape[1]
        kept = layer.Saved.of(x, given.arrays, k, self.activation, self.policy, renormalize=False)
        d_x, _, *d_weights, d_gates = layer.expert_gradients(
            stages, given.d_out, kept, operands, given.last, given.wanted
        )
        wanted = "d_topk_weights" in given.wanted
        d_topk_weights = executor.cast(d_gates, checks.dtype_of(operands.topk_weights)) if wanted else None
        return d_x, *d_weights, d_topk_weights, biases.gradients.get("up"), biases.gradients.get("down")

    def _stages(self, x: Array, operands: ExpertOperands[Array], executor: Executor, biases: Biases) -> layer.Stages:
        """The stages for weights of this layout."""
        if self.layout == SEPARATE:
            return raw_layer.stages_for(x, operands, executor, self.version)
        layout = LAYOUTS[self.layout]
        return raw_layer.packed_stages_for(x, operands, self.activation, layout, executor, self.version, biases)


def _biases(operands: ExpertOperands[Array], wanted: Collection[str] = ()) -> Biases:
    """The biases as the stages take them; ``wanted`` are names of gradients such as d_down_bias."""
    up, down = operands.gate_up_bias, operands.down_bias
    if up is None and down is None:
        return NONE
    names = {"up": "d_gate_up_bias", "down": "d_down_bias"}
    return Biases(up, down, [name for name, gradient in names.items() if gradient in wanted])


# ---- checks --------------------------------------------------------------------------------


def _check_names(activation: str, policy: str, layout: str, version: str | None) -> None:
    checks.check_name("activation", activation, EXPERT_ACTIVATIONS)
    checks.check_name("policy", policy, POLICIES)
    checks.check_name("layout", layout, (*LAYOUTS, SEPARATE))
    if layout == "interleaved" and not is_gated(activation):
        raise ValueError(f"{activation} is not gated, so nothing alternates: its layout is linear, matmul or separate")
    if version is not None:
        versions = raw_layer.VERSIONS if layout == SEPARATE else packed.VERSIONS
        checks.check_name(f"version of experts in layout {layout}", version, versions)


def _named(
    gate_up: tuple[Tensor, Tensor] | Tensor, down: Tensor, activation: str, layout: str
) -> dict[str, Tensor | None]:
    """w1, w2 and w3 by the names that the caller knows."""
    named: dict[str, Any] = {"gate_up": gate_up, "no second projection": None, "down": down}
    if layout == SEPARATE and is_gated(activation):
        if not (isinstance(gate_up, tuple) and len(gate_up) == 2):
            raise TypeError(f"gate_up is {checks.kind(gate_up)}, but in layout separate it must be a tuple of two")
        named = {"gate_up[0]": gate_up[0], "gate_up[1]": gate_up[1], "down": down}
    for name, tensor in named.items():
        if name != "no second projection":
            checks.check_type(name, tensor, Tensor)
    return named


def _named_biases(gate_up_bias: Tensor | None, down_bias: Tensor | None, layout: str) -> dict[str, Tensor | None]:
    """The biases by the names that the caller knows."""
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, bias in biases.items():
        if bias is None:
            continue
        checks.check_type(name, bias, Tensor)
        if layout == SEPARATE:
            raise ValueError(f"layout separate has no {name}: the layouts with biases are {', '.join(LAYOUTS)}")
    return biases


def _check_biases(biases: torch_operands.Named, weights: torch_operands.Named, activation: str, layout: str) -> None:
    """The biases fit weights that are checked."""
    if layout == SEPARATE:
        return
    gate_up = weights["gate_up"]
    assert gate_up is not None
    gated = is_gated(activation)
    d, h = LAYOUTS[layout].widths(gate_up, gated)
    widths = {"gate_up_bias": ("2h" if gated else "h", h * (1 + gated)), "down_bias": ("d", d)}
    for name, (symbol, width) in widths.items():
        if (bias := biases[name]) is not None:
            checks.check_shape(name, bias, {"E": gate_up.shape[0], symbol: width})


def _check_weights(x: Tensor, weights: torch_operands.Named, activation: str, layout: str) -> None:
    """The weights fit each other and x, and lie as the kernels read them."""
    d = _check_separate(weights) if layout == SEPARATE else _check_packed(weights, activation, layout)
    torch_operands.check_width(x, d)
    for name, weight in weights.items():
        if weight is not None:
            _check_in_place(name, weight)


def _check_separate(weights: torch_operands.Named) -> int:
    """Return d, of weights that fit each other."""
    (first, w1), (second, w2), (last, w3) = weights.items()
    assert w1 is not None and w3 is not None
    checks.check_shape(first, w1, {"E": None, "d": None, "h": None})
    E, d, h = w1.shape
    _check_sizes(E, d, h)
    if w2 is not None:
        checks.check_shape(second, w2, {"E": E, "d": d, "h": h})
    checks.check_shape(last, w3, {"E": E, "h": h, "d": d})
    return d


def _check_packed(weights: torch_operands.Named, activation: str, layout: str) -> int:
    """The same of weights as a model stores them."""
    gate_up, down = weights["gate_up"], weights["down"]
    assert gate_up is not None and down is not None
    gated, lies = is_gated(activation), LAYOUTS[layout]
    columns = "2h" if gated else "h"
    axes = ("E", columns, "d") if lies.transposed else ("E", "d", columns)
    checks.check_shape("gate_up", gate_up, dict.fromkeys(axes))
    extent = gate_up.shape[axes.index(columns)]
    if gated and extent % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}, but 2h = {extent} must be even: {layout} has both")
    E, (d, h) = gate_up.shape[0], lies.widths(gate_up, gated)
    _check_sizes(E, d, h)
    checks.check_shape("down", down, {"E": E, "d": d, "h": h} if lies.transposed else {"E": E, "h": h, "d": d})
    return d


def _check_sizes(E: int, d: int, h: int) -> None:
    checks.check_int("E", E, at_least=1, at_most=checks.MAX_EXPERTS)
    for name, size in {"d": d, "h": h}.items():
        checks.check_int(name, size, at_least=1)


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
    torch_operands.check_strided("topk_weights", topk_weights)
    checks.check_shape("topk_weights", topk_weights, {"L": x.numel() // x.shape[-1], "k": None})
    return topk_weights.shape[1]
