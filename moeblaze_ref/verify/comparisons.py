"""Expected results of every floating-point stage: plain torch, differentiated by autograd.

For every stage there are two functions of a case: one runs the stage, the other the oracle in
a given dtype; both return {direction: {tensor: array}}. The oracle starts from the very
numbers that the stage was given, already rounded, so only the stage's own rounding counts.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeblaze_ref.backends.numpy_ref import activation as reference_activation
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import block_sparse, expert_down, gemm
from moeblaze_ref.core.layouts import Layout
from moeblaze_ref.core.structures import EMPTY, CapacityBins, Dispatch
from moeblaze_ref.nn import oracle
from moeblaze_ref.nn.systems import SYSTEMS, system
from moeblaze_ref.nn.torch_layer import keep_routing
from moeblaze_ref.systems.capacity import MAX
from moeblaze_ref.systems.layer import intermediates
from moeblaze_ref.verify.cases import (
    Case,
    capacities,
    equal_gates_case,
    every_activation,
    every_choice,
    logit_cases,
    many_blocks_case,
    many_choices_case,
    many_passes_case,
    many_terms_case,
    many_tiles_case,
    many_tokens_case,
    paired_options,
    relative_error,
    renormalised,
    single_gradients,
    standard_cases,
    whole_block_case,
    whole_block_cases,
    wide_block_cases,
)
from moeblaze_ref.verify.packed import PackedLayer

Arrays = dict[str, np.ndarray]
Results = dict[str, Arrays]  # by direction
Expect = Callable[[Case, torch.dtype], Results]  # what the oracle makes of a case in a dtype

FIRST_VERSION = "1_naive"  # compiles fastest

# tf32 keeps 10 bits of a float's mantissa: each factor is off by at most 2^-11, a product of two by 2^-10, and a sum of
# products by no more unless they cancel. The layer multiplies what it has multiplied before: twice that.
TF32_PRODUCT = 2.0**-10
BOUNDS = {"int32": 0.0, "float64": 1e-12, "float32": 1e-5, "tf32": TF32_PRODUCT, "tf32 twice": 2 * TF32_PRODUCT}
# For the narrow types the bound is twice the error of plain torch in the same dtype; below
# FEW_ELEMENTS that ratio is noise, and this is the least bound.
SMALL_TENSOR_BOUNDS = {"bfloat16": 2.0**-6, "float16": 2.0**-9} | {
    name: 2 * BOUNDS[name]
    for name in ("tf32", "tf32 twice")  # few sums may cancel more than many do
}
FEW_ELEMENTS = 256


def precision(stage: str, version: str | None, dtype: str) -> str:
    """Return what a stage multiplies in: its dtype, or tf32, or "tf32 twice" for the layer's two products."""
    if version != gemm.TF32:
        return dtype
    return "tf32 twice" if stage == "layer" else "tf32"


def compare(found: Arrays, exact: Arrays, dtype: str, baseline: Arrays | None = None) -> tuple[float, float]:
    """Error and bound of the tensor that is closest to its bound, or furthest beyond it.

    The exact results are those of float64; the dtype is what the stage computed in: `precision`. The narrow ones need
    a baseline, the results of plain torch in that dtype.
    """
    pairs = [(relative_error(found[name], exact[name]), bound_of(name, exact, dtype, baseline or {})) for name in exact]
    return max(pairs, key=badness)


def bound_of(name: str, exact: Arrays, dtype: str, baseline: Arrays) -> float:
    """Largest relative error that the tensor of this name may have; arguments as in `compare`."""
    bound = BOUNDS[dtype] if dtype in BOUNDS else 2.0 * relative_error(baseline[name], exact[name])
    return max(bound, SMALL_TENSOR_BOUNDS.get(dtype, 0.0)) if exact[name].size < FEW_ELEMENTS else bound


def badness(pair: tuple[float, float]) -> float:
    """Order (error, bound) from the best to the worst; NaN is the worst."""
    error, bound = pair
    if np.isnan(error):
        return np.inf
    if error <= bound:
        return error / bound if bound else 0.0
    return error / bound if bound else np.inf


# ---- between numpy and torch ---------------------------------------------------------------


def _leaf(array: np.ndarray | None, dtype: torch.dtype) -> Any:
    """A tensor that autograd differentiates by; gates and logits keep at least float32, as in the kernels."""
    if array is None:
        return None
    exact = torch.tensor(np.asarray(array, np.float64))
    narrow = array.dtype in (np.float16, ml_dtypes.bfloat16)
    return exact.to(dtype if narrow or dtype.itemsize >= 4 else torch.float32).requires_grad_()


def _leaves(dtype: torch.dtype, *arrays: np.ndarray | None) -> list[Any]:
    """Each array as `_leaf` has it."""
    return [_leaf(array, dtype) for array in arrays]


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def _present(**tensors: Any) -> dict[str, Any]:
    """Return the tensors that the activation has: an ungated layer lacks b and w2."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _arrays(**tensors: Tensor | None) -> Arrays:
    return {name: _array(tensor) for name, tensor in _present(**tensors).items()}


def _gradients(outputs: dict[str, Tensor], d_outputs: dict[str, Any], inputs: dict[str, Tensor]) -> Arrays:
    """``d_<name>`` of every input by autograd, from the gradients of the outputs."""
    return _gradients_from(outputs, _cotangents(outputs, d_outputs), inputs)


def _cotangents(outputs: dict[str, Tensor], d_outputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of the outputs that autograd tracks, in the outputs' dtypes and on their devices."""
    return {
        name: torch.as_tensor(np.asarray(d_outputs[name], np.float64)).to(out)
        for name, out in outputs.items()
        if out.requires_grad
    }


def _gradients_from(
    outputs: dict[str, Tensor], cotangents: dict[str, Tensor], inputs: dict[str, Tensor], retain_graph: bool = False
) -> Arrays:
    """Return the gradients from the cotangents of `_cotangents`."""
    of_inputs = [outputs[name] for name in cotangents]
    found = torch.autograd.grad(of_inputs, [*inputs.values()], [*cotangents.values()], retain_graph)
    return {f"d_{name}": _array(gradient) for name, gradient in zip(inputs, found, strict=True)}


def _random(shape: tuple[int, ...], dtype, case: Case, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, case.step]).standard_normal(shape).astype(dtype)


def _order(case: Case) -> oracle.ExpertOrder:
    return oracle.expert_order(torch.from_numpy(case.topk_experts).long(), case.E)


# ---- gating ----------------------------------------------------------------------------------


def run_gating(stage: Any, case: Case) -> Results:
    """Choice, probabilities, gates and both losses; gradient of the logits through all of these."""
    logits = case.logits
    found = stage.forward(logits, case.k, case.renormalize)
    forward = {"probs": found.probs, "gates": found.gates, "topk_experts": found.topk_experts}
    if case.L == 0:
        return {"forward": forward}  # the mean over no tokens has no gradient
    exact = oracle.decide(_leaf(logits, torch.float64), case.k)
    chosen = _array(exact.probs).astype(logits.dtype), case.topk_experts
    forward["load_balancing_loss"] = stage.load_balancing_loss(*chosen)
    forward["router_z_loss"] = stage.router_z_loss(logits)
    d_logits = stage.backward(d_gates(case), logits, case.topk_experts, case.renormalize, *case.d_losses)
    return {"forward": forward, "backward": {"d_logits": d_logits}}


def expect_gating(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_gating`. The forward chooses the experts; the losses and the backward take them."""
    leaf = _leaf(case.logits, dtype)
    choice = oracle.decide(leaf, case.k, case.renormalize)
    forward = _arrays(probs=choice.probs, gates=choice.gates, topk_experts=choice.topk_experts)
    if case.L == 0:
        return {"forward": forward}
    routing = oracle.decide(leaf, case.k, case.renormalize, torch.from_numpy(case.topk_experts))
    losses = _losses_of(routing)
    d_outputs = {"gates": d_gates(case)} | dict(zip(losses, case.d_losses, strict=True))
    backward = _gradients({"gates": routing.gates} | losses, d_outputs, {"logits": leaf})
    return {"forward": forward | _arrays(**losses), "backward": backward}


def _losses_of(routing: oracle.Routing) -> dict[str, Tensor]:
    return {
        "load_balancing_loss": oracle.load_balancing_loss(routing),
        "router_z_loss": oracle.router_z_loss(routing),
    }


def d_gates(case: Case) -> np.ndarray:
    """Gradient of the gates, (L, k), at least float32."""
    return _random((case.L, case.k), case.logits.dtype, case, seed=1)


# ---- expert_up -------------------------------------------------------------------------------


def run_expert_up(stage: Any, case: Case) -> Results:
    """a, b and y_swi; gradients of x, w1 and w2 from those of a and b."""
    dispatch, (_, w1, w2, _) = dispatch_of(case), case.weights
    forward, (d_a, d_b) = run_forward(stage, case), d_hidden(case)
    d_x = stage.input_gradient(d_a, d_b, w1, w2, dispatch)
    d_w1, d_w2 = (None if d is None else stage.weight_gradient(d, case.x, dispatch) for d in (d_a, d_b))
    return forward | {"backward": _present(d_x=d_x, d_w1=d_w1, d_w2=d_w2)}


def run_forward(stage: Any, case: Case) -> Results:
    """Run the forward of expert_up alone: the teaching versions have no backward."""
    _, w1, w2, _ = case.weights
    a, b, y_swi = stage.forward(case.x, w1, w2, dispatch_of(case), case.activation)
    return {"forward": _present(a=a, b=b, y_swi=y_swi)}


def expect_forward(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_forward`."""
    return {"forward": expect_expert_up(case, dtype)["forward"]}


def expect_expert_up(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_expert_up`."""
    inputs = _present(x=_leaf(case.x, dtype), w1=_leaf(case.weights.w1, dtype), w2=_leaf(case.weights.w2, dtype))
    a, b = oracle.expert_up(inputs["x"], _order(case), inputs["w1"], inputs.get("w2"))
    y_swi = oracle.activate(a, b, case.activation)
    d_a, d_b = d_hidden(case)
    return {
        "forward": _arrays(a=a, b=b, y_swi=y_swi),
        "backward": _gradients(_present(a=a, b=b), {"a": d_a, "b": d_b}, inputs),
    }


def d_hidden(case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    """Gradients of a and b, (R, h); that of b is None if the activation is not gated."""
    shape = (case.L * case.k, case.weights.w1.shape[2])
    d_b = None if case.weights.w2 is None else _random(shape, case.x.dtype, case, seed=3)
    return _random(shape, case.x.dtype, case, seed=2), d_b


# ---- expert_down -----------------------------------------------------------------------------


def run_expert_down(stage: Any, case: Case) -> Results:
    """y from y_swi; gradients of a, b, the gates and w3 from that of the layer's output."""
    dispatch, w3 = dispatch_of(case), case.weights.w3
    a, b, y_swi, gates = hidden(case)
    y = stage.forward(y_swi, w3, dispatch)
    given = case.d_out, gates, a, b, w3, dispatch, case.activation, None, case.overwrite
    d_a, d_b, gated_y, d_gates = stage.hidden_gradients(*given)
    d_w3 = stage.weight_gradient(gated_y, case.d_out, dispatch)
    return {"forward": {"y": y}, "backward": _present(d_a=d_a, d_b=d_b, d_gates=d_gates, d_w3=d_w3)}


def expect_expert_down(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_expert_down`."""
    order, w3 = _order(case), _leaf(case.weights.w3, dtype)
    a, b, y_swi, gates = _leaves(dtype, *hidden(case))
    inputs = _present(a=a, b=b, gates=gates, w3=w3)
    out = oracle.combine(oracle.expert_down(oracle.activate(a, b, case.activation), order, w3), gates, order)
    return {
        "forward": _arrays(y=oracle.expert_down(y_swi, order, w3)),
        "backward": _gradients({"out": out}, {"out": case.d_out}, inputs),
    }


def run_summed(stage: Any, case: Case) -> Results:
    """The output from y_swi and the gates, where the product sums over a token's experts: there is no backward."""
    dispatch, (*_, y_swi, gates) = dispatch_of(case), hidden(case)
    return {"forward": {"out": stage.summed_forward(y_swi, case.weights.w3, gates, dispatch)}}


def expect_summed(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_summed`."""
    *_, y_swi, gates = _leaves(dtype, *hidden(case))
    order = _order(case)
    out = oracle.combine(oracle.expert_down(y_swi, order, _leaf(case.weights.w3, dtype)), gates, order)
    return {"forward": _arrays(out=out)}


def hidden(case: Case) -> tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
    """a, b, y_swi (R, h) of a case, rounded to its dtype, and its gates (L, k), at least float32."""
    exact = case.astype(np.float64)
    x, _, w1, w2, _ = _leaves(torch.float64, exact.x, *exact.weights)
    up, gate = oracle.expert_up(x, _order(case), w1, w2)
    a, b = _array(up), None if gate is None else _array(gate)
    y_swi = reference_activation.forward(a, b, case.activation)
    dtype = case.x.dtype
    return a.astype(dtype), None if b is None else b.astype(dtype), y_swi.astype(dtype), gates_of(case)


def gates_of(case: Case) -> np.ndarray:
    """Probabilities (L, k) of the case's own choice, at least float32: what the stages after the router are given."""
    x, wg = _leaves(torch.float64, *(array.astype(np.float64) for array in (case.x, case.weights.wg)))
    gates = oracle.route(x, wg, case.k, topk_experts=torch.from_numpy(case.topk_experts)).gates
    return _array(gates).astype(case.logits.dtype)


# ---- combine and the layer -------------------------------------------------------------------


def run_combine(stage: Any, case: Case) -> Results:
    """The output from y and the gates; gradients of both."""
    dispatch, y, gates = dispatch_of(case), expert_output(case), gates_of(case)
    d_y, d_gates = stage.backward(case.d_out, y, gates, dispatch)
    return {"forward": {"out": stage.forward(y, gates, dispatch)}, "backward": {"d_y": d_y, "d_gates": d_gates}}


def expect_combine(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_combine`."""
    inputs = {"y": _leaf(expert_output(case), dtype), "gates": _leaf(gates_of(case), dtype)}
    out = oracle.combine(inputs["y"], inputs["gates"], _order(case))
    return {"forward": _arrays(out=out), "backward": _gradients({"out": out}, {"out": case.d_out}, inputs)}


def run_combine_in_parts(stage: Any, case: Case) -> Results:
    """Run the combine as a whole, and again into one half of the columns after the other.

    That is the output again, and the sum without gates, which is what the gradient of x is of its rows.
    """
    results, dispatch = run_combine(stage, case), dispatch_of(case)
    halves = tuple(map(np.ascontiguousarray, np.array_split(expert_output(case), 2, axis=1)))
    in_parts = {"out_in_parts": gates_of(case), "sum_in_parts": None}
    found = {name: stage.forward_in_parts(halves, gates, dispatch) for name, gates in in_parts.items()}
    return results | {"forward": results["forward"] | found}


def expect_combine_in_parts(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_combine_in_parts`."""
    results, ones = expect_combine(case, dtype), np.ones_like(gates_of(case))
    summed = oracle.combine(_leaf(expert_output(case), dtype), _leaf(ones, dtype), _order(case))
    found = {"out_in_parts": results["forward"]["out"]} | _arrays(sum_in_parts=summed)
    return results | {"forward": results["forward"] | found}


def expert_output(case: Case) -> np.ndarray:
    """The experts' outputs y (R, d) that the combine is given."""
    return _random((case.L * case.k, case.x.shape[1]), case.x.dtype, case, seed=4)


def run_layer(stage: Any, case: Case) -> Results:
    """The whole layer's output, what it saves for backward, and the gradients that the case asks for."""
    options = case.activation, case.policy, case.renormalize, case.replayed
    result = stage.forward(case.x, case.weights, case.k, *options)
    saved = {name: np.array(stage.to_numpy(array)) for name, array in result.saved.intermediates.items()}
    found = stage.backward(
        case.d_out, result.saved, case.weights, *_d_losses(case), case.overwrite, (*case.wanted, "d_gates")
    )
    losses = {"load_balancing_loss": result.load_balancing_loss, "router_z_loss": result.router_z_loss}
    forward = {"out": result.out} | (losses if case.L else {})
    return {"forward": forward | _named_saved(saved), "backward": _present(**found._asdict())}


def expect_saving_layer(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_layer`: those of `expect_layer`, and the tensors that the policy saves."""
    results = expect_layer(case, dtype)
    return results | {"forward": results["forward"] | _named_saved(_saved_tensors(case, dtype))}


def expect_saving_summed_layer(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_layer` on a version whose last product sums over experts: it has no y to save."""
    results = expect_saving_layer(case, dtype)
    return results | {"forward": {name: array for name, array in results["forward"].items() if name != "saved_y"}}


def _named_saved(tensors: Arrays) -> Arrays:
    return {f"saved_{name}": array for name, array in tensors.items()}


@torch.no_grad()
def _saved_tensors(case: Case, dtype: torch.dtype) -> Arrays:
    """The tensors between x and out that the case's policy saves. The backward reads not all of them."""
    x, w1, w3 = (_leaf(array, dtype) for array in (case.x, case.weights.w1, case.weights.w3))
    w2, order = _leaf(case.weights.w2, dtype), _order(case)
    a, b = oracle.expert_up(x, order, w1, w2)
    y_swi = oracle.activate(a, b, case.activation)
    tensors = {"routed_x": x[order.token], "a": a, "b": b, "act_a": oracle.activate(a, None, case.activation)}
    tensors |= {"y_swi": y_swi, "y": oracle.expert_down(y_swi, order, w3)}
    return _arrays(**{name: tensors[name] for name in intermediates(case.policy, case.activation)})


def expect_layer(
    case: Case, dtype: torch.dtype, topk_experts: Tensor | None = None, mask: Tensor | None = None
) -> Results:
    """Expected results of `run_layer`, with the case's choice of experts or a given one.

    A slot that is False in the mask (L, k) adds nothing.
    """
    x, wg, w1, w2, w3 = _leaves(dtype, case.x, *case.weights)
    chosen = torch.from_numpy(case.topk_experts) if topk_experts is None else topk_experts
    routing = oracle.route(x, wg, case.k, case.renormalize, chosen)
    weighting = routing if mask is None else routing._replace(gates=routing.gates * mask)
    outputs = {"out": oracle.experts(x, weighting, w1, w2, w3, case.activation)}
    d_outputs: dict[str, Any] = {"out": case.d_out}
    if case.L:  # the mean over no tokens has no gradient
        losses = _losses_of(routing)
        outputs, d_outputs = outputs | losses, d_outputs | dict(zip(losses, _d_losses(case), strict=True))
    inputs = {name: t for name, t in _present(x=x, wg=wg, w1=w1, w2=w2, w3=w3).items() if f"d_{name}" in case.wanted}
    backward = _gradients(outputs, d_outputs, inputs | {"gates": routing.gates})
    return {"forward": _arrays(**outputs), "backward": backward}


# ---- block_sparse ----------------------------------------------------------------------------


def sparse_block(h: int) -> int:
    """A block size that divides h: MegaBlocks' own, or one so small that groups of a few tokens fill more than one."""
    return math.gcd(h, 8) if h % block_sparse.BLOCK else block_sparse.BLOCK


def block_of(case: Case) -> int:
    """The block size of a case: its own, or `sparse_block`."""
    return case.block or sparse_block(case.weights.w1.shape[2])


_OF_EXPERTS = "small", "two tiles along h", "two tiles along d", "relu of zeros", "geglu, paper", "hot expert"
# By stage, or by kernel file, names of the cases that run first: each shows faults that those before it do not.
FIRST_CASES: dict[str, tuple[str, ...]] = {
    "gating": (
        "small",
        "equal logits",
        "logits far from 0",
        "equal logits of 40 experts",
        "as many experts a token as lanes of a warp",
    ),
    "dispatch": ("small", "hot expert", "two tiles along E", "more tokens than a bitmap's pass"),
    "expert_up": (*_OF_EXPERTS, "two tiles along h, ungated"),
    "expert_down": _OF_EXPERTS,
    "block_sparse": ("small", "relu of zeros", "blocks of 136", "geglu, paper", "blocks of 256"),
    # Its blocks cost most. The scan, which needs two tiles along E, is the same in every version.
    "block_sparse/1_naive": ("small", "two tiles along E", "relu of zeros"),
}


def extended(stage: str, version: str | None, cases: list[Case]) -> list[Case]:
    """Return the cases, and the cases that the check adds for a version of a stage.

    The gating gets `logit_cases`, too, and each case with renormalised gates, and many terms of the losses. The gating
    and the dispatch get as many experts a token as there can be, the dispatch many tokens, too. The layer gets every
    activation under every policy, too, and each gradient alone. The capacity gets each, and one with equal gates, under
    every factor and drop policy. The block-sparse stage gets whole blocks of MegaBlocks' own size and wider ones, too;
    its 7_persistent gets only blocks that its tiles divide. Kernels that all versions share, the sums of the gating and
    the layer's fused gating, get many tokens in the first version, where they take least time.
    """
    if stage == "gating":
        many_tokens = [many_tokens_case()] if version == FIRST_VERSION else []
        cases = [*cases, *logit_cases(), many_choices_case()]
        return [*cases, *renormalised(cases), many_terms_case(), *many_tokens]
    if stage == "dispatch":
        return [*cases, many_choices_case(), many_tokens_case()]
    if stage == "layer":
        many_tokens = [many_passes_case()] if version == FIRST_VERSION else []
        return [*cases, *every_choice(L=5, d=8, h=8, E=3, k=2), *single_gradients(), *many_tokens]
    if stage == "capacity":
        return [one for case in [equal_gates_case(), *cases] for one in capacities(case)]
    if stage != "block_sparse":
        return cases
    added = whole_block_cases() if version == gemm.HOPPER else [whole_block_case()]
    return fitting(stage, version, [*cases, *wide_block_cases(), *added])


def fitting(stage: str, version: str | None, cases: list[Case]) -> list[Case]:
    """Return those of the cases that a version of a stage can run."""
    if (stage, version) == ("block_sparse", gemm.HOPPER):
        return [case for case in cases if block_of(case) % block_sparse.HOPPER_BLOCK == 0]
    return cases


def turn(stage: str, version: str | None, case: Case) -> int:
    """Return a case's place among the first cases of a version of a stage; all other cases have the last place."""
    first = FIRST_CASES.get(f"{stage}/{version}", FIRST_CASES.get(stage, ()))
    return first.index(case.name) if case.name in first else len(first)


def overflowing(stage: str, multiprocessors: int) -> list[Case]:
    """Cases of more tiles than a GPU has multiprocessors, of whole blocks, too, for block_sparse."""
    cases = [many_tiles_case(multiprocessors)]
    return [*cases, many_blocks_case(multiprocessors)] if stage == "block_sparse" else cases


def run_block_sparse(stage: Any, case: Case) -> Results:
    """The output of MegaBlocks' experts and every gradient through them."""
    return _run_experts(stage, case, block_of(case))


def _run_experts(stage: Any, case: Case, *options: Any) -> Results:
    (_, w1, w2, w3), gates = case.weights, gates_of(case)
    out, saved = stage.forward(case.x, w1, w2, w3, dispatch_of(case), gates, case.activation, *options)
    found = stage.backward(case.d_out, saved, w1, w2, w3)
    return {"forward": {"out": out}, "backward": _present(**found._asdict())}


def run_packed(stage: Any, case: Case, layout: Layout) -> Results:
    """The output and every gradient of the same experts, whose weights lie as a model stores them."""
    return _run_experts(PackedLayer(stage, layout), case, case.policy)


def expect_experts(case: Case, dtype: torch.dtype, mask: Tensor | None = None) -> Results:
    """Expected results of the experts alone, independent of their storage, the gates given.

    A slot that is False in the mask (L, k) adds nothing.
    """
    (_, w1, w2, w3), order = case.weights, _order(case)
    given = _present(x=case.x, w1=w1, w2=w2, w3=w3, gates=gates_of(case))
    inputs = {name: _leaf(array, dtype) for name, array in given.items()}
    a, b = oracle.expert_up(inputs["x"], order, inputs["w1"], inputs.get("w2"))
    y = oracle.expert_down(oracle.activate(a, b, case.activation), order, inputs["w3"])
    gates = inputs["gates"] if mask is None else inputs["gates"] * mask
    outputs = {"out": oracle.combine(y, gates, order)}
    return {"forward": _arrays(**outputs), "backward": _gradients(outputs, {"out": case.d_out}, inputs)}


# ---- capacity --------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Routed rows that fit into a fixed capacity, by the definition."""

    bins: CapacityBins
    mask: np.ndarray  #: (L, k) bool


def kept(case: Case, topk_experts: np.ndarray, gates: np.ndarray) -> Kept:
    """Sort each expert's slots by their claim and keep the first C, with loops in place of `capacity.fill`."""
    chosen, k = topk_experts.ravel(), case.k
    claim = {
        "by_gate": lambda slot: (-gates.flat[slot], slot // k),
        "by_arrival": lambda slot: (slot % k, slot // k),
    }[case.drop_policy]
    queues = [sorted(np.flatnonzero(chosen == expert), key=claim) for expert in range(case.E)]
    C = max(map(len, queues))
    if case.capacity_factor != MAX:
        C = math.ceil(Fraction(str(case.capacity_factor)) * case.L * k / case.E)
    slots, rows = np.full((case.E, C), EMPTY, np.int32), np.full(chosen.size, EMPTY, np.int32)
    for expert, queue in enumerate(queues):
        for place, slot in enumerate(queue[:C]):
            slots[expert, place], rows[slot] = slot, expert * C + place
    return Kept(CapacityBins(slots, rows, k), (rows != EMPTY).reshape(case.L, k))


def dropped_by_definition(case: Case, mask: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Return how many slots and whole tokens are lost, and the slots (E,) by expert."""
    lost = ~mask
    of_experts = np.bincount(case.topk_experts[lost], minlength=case.E)
    return int(lost.sum()), int(lost.all(axis=1).sum()), of_experts


def run_capacity(stage: Any, case: Case) -> Results:
    """The output of experts with C rows each, and every gradient through them."""
    return _run_experts(stage, case, case.capacity_factor, case.drop_policy)


def expect_capacity(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_capacity`: the gate of a dropped slot counts as 0."""
    return expect_experts(case, dtype, torch.from_numpy(kept(case, case.topk_experts, gates_of(case)).mask))


def dispatch_of(case: Case) -> Dispatch:
    """The index structures of the case's own choice."""
    return build_by_sort(case.topk_experts, case.E)


# ---- the torch layer -------------------------------------------------------------------------


class TorchLayer(NamedTuple):
    """A layer that is checked as a whole."""

    system: str  #: one of ``systems.SYSTEMS``
    backends: tuple[str, ...]  #: the backends that run it
    #: The options of its constructor that it takes from a case, besides the activation and renormalisation.
    options: Callable[[Case], dict[str, Any]]
    expect: Expect  #: what its results must equal
    cases: Callable[[], list[Case]]  #: returns its cases

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that it computes in."""
        layer: Any = SYSTEMS[self.system]  # one of the classes, with dtypes
        return tuple(str(dtype).removeprefix("torch.") for dtype in layer.dtypes)


def torch_layer_of(device: str, case: Case, which: str = "torch_layer") -> nn.Module:
    """One of ``TORCH_LAYERS`` on a device, of the case's sizes, options and dtype.

    Its weights are the case's; they are float32 if autocast is to cast them.
    """
    of_kind = TORCH_LAYERS[which]
    make = system(of_kind.system, renormalize=case.renormalize, device=device, **of_kind.options(case))
    _, d, h = case.weights.w1.shape
    layer = make(d, h, case.E, case.k, case.activation)
    for weight, array in case.weights._asdict().items():
        setattr(layer, weight, None if array is None else nn.Parameter(_stored_tensor(array, case, device)))
    return layer


class TensorMemory:
    """The tensors of a layer's steps, by name: a step's overwrite those of the step before, the very same objects."""

    def __init__(self):
        self._held: dict[str, Tensor] = {}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """Return the held tensor of this name with these numbers; hold the given one if none of this shape is held."""
        held = self._held.setdefault(name, tensor)
        if (held.shape, held.dtype, held.device) != (tensor.shape, tensor.dtype, tensor.device):
            held = self._held[name] = tensor
        if held is not tensor:
            with torch.no_grad():
                held.copy_(tensor)
        return held


def step_of_torch_layer(layer: nn.Module, case: Case, memory: TensorMemory) -> Results:
    """Return the layer's results and the wanted gradients.

    The case's numbers overwrite those of the step before: in the layer's weights, as an optimizer does, and in the
    input, a given routing and the outputs' gradients, which the memory holds.
    """
    parameters = dict(layer.named_parameters())
    device = parameters["wg"].device
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_exact_tensor(getattr(case.weights, name), device))
    tensors = {"x": memory.place("x", _stored_tensor(case.x, case, device))} | parameters
    for name, tensor in tensors.items():
        tensor.requires_grad_(f"d_{name}" in case.wanted)
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    with _casting(case, device):
        result = _call(layer, tensors["x"], case, memory)
    losses = {"load_balancing_loss": result.load_balancing_loss, "router_z_loss": result.router_z_loss}
    outputs = {"out": result.out} | losses
    d_outputs = {"out": case.d_out} | dict(zip(losses, _d_losses(case), strict=True))
    forward = {"out": result.out} | (losses if case.L else {})
    cotangents = {name: memory.place(f"d_{name}", d) for name, d in _cotangents(outputs, d_outputs).items()}
    backward = _gradients_from(outputs, cotangents, leaves, retain_graph=not case.overwrite)
    return {"forward": _arrays(**forward), "backward": backward}


def is_cast(case: Case) -> bool:
    """Return True if autocast casts the case, which it does for narrow types alone."""
    return case.autocast and case.x.dtype.itemsize == 2


def _casting(case: Case, device: torch.device) -> AbstractContextManager:
    dtype = getattr(torch, str(case.x.dtype)) if is_cast(case) else None
    return torch.autocast(device.type, dtype, enabled=is_cast(case))


def _stored_tensor(array: np.ndarray, case: Case, device: str | torch.device) -> Tensor:
    """The array's numbers in its own dtype, or in float32 if autocast is to cast them."""
    tensor = _exact_tensor(array, device)
    return tensor.float() if is_cast(case) else tensor


def _call(layer: nn.Module, x: Tensor, case: Case, memory: TensorMemory) -> Any:
    """The layer's results for x, under the case's routing if that is given, checkpointed if it is to be kept."""
    given = case.replayed
    replayed = None if given is None else memory.place("topk_experts", torch.from_numpy(given).to(x.device))
    if not case.keep_routing:
        return layer(x, replayed)
    return checkpoint(layer, x, replayed, use_reentrant=False, context_fn=keep_routing)


def run_torch_layer(device: str, case: Case, which: str = "torch_layer") -> Results:
    """Run one of ``TORCH_LAYERS`` on a device; return its output and all gradients."""
    return step_of_torch_layer(torch_layer_of(device, case, which), case, TensorMemory())


def expect_torch_layer(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of `run_torch_layer`, without the gates' gradient: the gates stay inside the layer."""
    return _without_gates(expect_layer(case, dtype))


def expect_plain_torch(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of a torch layer whose router computes in the case's dtype, however narrow."""
    return _without_gates(expect_layer(case, dtype, _routing_by_torch(case).topk_experts))


def expect_torch_capacity(case: Case, dtype: torch.dtype) -> Results:
    """Expected results of a torch layer with the gates of dropped slots at 0."""
    routing = _routing_by_torch(case)
    mask = kept(case, routing.topk_experts.numpy(), _array(routing.gates)).mask
    return _without_gates(expect_layer(case, dtype, routing.topk_experts, torch.from_numpy(mask)))


def _routing_by_torch(case: Case) -> oracle.Routing:
    """Return the given routing, by default plain torch's in the case's dtype."""
    x, wg = (_exact_tensor(array, "cpu") for array in (case.x, case.weights.wg))
    replayed = None if case.replayed is None else torch.from_numpy(case.replayed)
    return oracle.route(x, wg, case.k, case.renormalize, replayed)


def _without_gates(expected: Results) -> Results:
    del expected["backward"]["d_gates"]
    return expected


def _without_policies() -> list[Case]:
    return [*every_activation(), *paired_options(), *single_gradients()]


def _in_blocks() -> list[Case]:
    """Whole blocks, too, which Hopper's tiles need, and wider ones than any tile."""
    return [*_without_policies(), whole_block_case(), *wide_block_cases()]


KERNELS, PLAIN = ("simt", "cuda"), ("torch",)
_with_policies = lambda: [*every_choice(), *paired_options(), *single_gradients()]
_of_capacities = lambda: [*extended("capacity", None, standard_cases()), *_without_policies()]
# The options that a case chooses of a layer.
_nothing: Callable[[Case], dict[str, Any]] = lambda case: {}
_policy = lambda case: {"policy": case.policy}
_block = lambda case: {"block": block_of(case)}
_capacity = lambda case: {"capacity_factor": case.capacity_factor, "drop_policy": case.drop_policy}
# By the name of the check.
TORCH_LAYERS: dict[str, TorchLayer] = {
    "torch_layer": TorchLayer("moeblaze", KERNELS, _policy, expect_torch_layer, _with_policies),
    "torch_block_sparse": TorchLayer("megablocks", KERNELS, _block, expect_torch_layer, _in_blocks),
    "torch_memory_optimized": TorchLayer(
        "megablocks_memory_optimized", KERNELS, _block, expect_torch_layer, _in_blocks
    ),
    "torch_capacity": TorchLayer("capacity", PLAIN, _capacity, expect_torch_capacity, _of_capacities),
    "torch_dynamic_capacity": TorchLayer("dynamic_capacity", PLAIN, _nothing, expect_plain_torch, _without_policies),
    "torch_sequential": TorchLayer("sequential", PLAIN, _nothing, expect_plain_torch, _without_policies),
}


def _exact_tensor(array: np.ndarray, device: str | torch.device) -> Tensor:
    """The array's numbers in its own dtype, which torch does not take from numpy if it is bfloat16."""
    return torch.tensor(np.asarray(array, np.float64), device=device).to(getattr(torch, str(array.dtype)))


def _d_losses(case: Case) -> tuple[float, float]:
    """Gradients of the load-balancing loss and of the z-loss: none of the mean over no tokens."""
    return case.d_losses if case.L else (0.0, 0.0)


RUN: dict[str, Callable[[Any, Case], Results]] = {
    "gating": run_gating,
    "expert_up": run_expert_up,
    "expert_down": run_expert_down,
    "combine": run_combine,
    "layer": run_layer,
    "block_sparse": run_block_sparse,
    "capacity": run_capacity,
}
EXPECT: dict[str, Expect] = {
    "gating": expect_gating,
    "expert_up": expect_expert_up,
    "expert_down": expect_expert_down,
    "combine": expect_combine,
    "layer": expect_saving_layer,
    "block_sparse": expect_experts,
    "capacity": expect_capacity,
}


# Checks of these versions of a stage alone: the function that runs the version, and the expected results.
_OF_VERSIONS: dict[tuple[str, str | None], tuple[Callable[[Any, Case], Results], Expect]] = {
    ("combine", "2_vector"): (run_combine_in_parts, expect_combine_in_parts),
    **{("expert_up", version): (run_forward, expect_forward) for version in gemm.TEACHING},
    **{("expert_down", version): (run_summed, expect_summed) for version in expert_down.SUMMED_VERSIONS},
    **{("layer", version): (run_layer, expect_saving_summed_layer) for version in expert_down.SUMMED_VERSIONS},
}


def comparison(stage: str, version: str | None) -> tuple[Callable[[Any, Case], Results], Expect]:
    """Return what runs a stage on a version, and what its results must equal."""
    return _OF_VERSIONS.get((stage, version)) or (RUN[stage], EXPECT[stage])
