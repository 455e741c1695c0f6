"""Fixed capacity: who is dropped, padded batches and their gradients, the torch layer, and what the waste comes to."""

import operator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import SHAPES, Shape, routings, with_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moeblaze_ref.backends.numpy_ref import block_sparse, capacity, dispatch, gating, router
from moeblaze_ref.core.config import ACTIVATIONS, MoEConfig
from moeblaze_ref.core.structures import EMPTY, CapacityBins, Dispatch, Gating
from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.lm.train import capture, language_loss, router_loss, train
from moeblaze_ref.memory import rows, waste
from moeblaze_ref.memory.accounting import Assumptions, account
from moeblaze_ref.memory.measured import measured
from moeblaze_ref.nn import oracle, systems, torch_capacity
from moeblaze_ref.nn.systems import SYSTEMS, system
from moeblaze_ref.nn.torch_capacity import CapacityMoE
from moeblaze_ref.nn.torch_layer import MoEOutput, keep_routing
from moeblaze_ref.systems.capacity import DROP_POLICIES, Saved, check_bins, expert_capacity
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS, make_case, relative_error

BOUNDS = {"float64": 1e-12, "float32": 1e-5}


# Who is dropped


class Filled(NamedTuple):
    """The bins of either room, as numpy."""

    slots: np.ndarray  # (E, C)
    rows: np.ndarray  # (R,)


def fill_by_numpy(topk_experts, num_experts, gates, rows, policy):
    bins = capacity.fill(dispatch.build(topk_experts, num_experts), gates, rows, policy)
    check_bins(bins)
    assert (bins.E, bins.C, bins.R, bins.L) == (num_experts, rows, topk_experts.size, len(topk_experts))
    assert bins.slots.dtype == bins.rows.dtype == np.int32
    return Filled(bins.slots, bins.rows)


def fill_by_torch(topk_experts, num_experts, gates, rows, policy):
    routing = oracle.Routing(None, None, torch.from_numpy(topk_experts).long(), torch.from_numpy(gates))
    bins = torch_capacity.fill(routing, num_experts, rows, policy)
    assert bins.lengths.tolist() == np.bincount(topk_experts.ravel(), minlength=num_experts).tolist()
    return Filled(bins.slots.numpy(), bins.rows.numpy().ravel())


ROOMS = {"numpy": fill_by_numpy, "torch": fill_by_torch}

# Five tokens, by hand. Slot 2 i + j of token i:  0->2 1->3   2->0 3->1   4->0 5->3   6->1 7->2   8->0 9->3
GATES = np.array([[0.6, 0.4], [0.5, 0.5], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]])
EQUAL = np.full((5, 2), 0.5)
GOLDEN = [
    # Expert 0 is chosen by tokens 1, 2 and 4 with gates .5, .9 and .8; expert 3 by 0, 2 and 4 with .4, .1 and .2.
    ("by_gate", GATES, [[4, 8], [6, 3], [0, 7], [1, 9]]),  # slots 2 and 5 are dropped
    ("by_gate", GATES, [[4], [6], [0], [1]]),
    ("by_gate", GATES, [[4, 8, 2], [6, 3, -1], [0, 7, -1], [1, 9, 5]]),
    ("by_gate", EQUAL, [[2, 4], [3, 6], [0, 7], [1, 5]]),  # the lower token id
    ("by_gate", EQUAL, [[2], [3], [0], [1]]),
    # Expert 1 is token 3's first choice and token 1's second: token 3 arrives first.
    ("by_arrival", GATES, [[2, 4], [6, 3], [0, 7], [1, 5]]),  # slots 8 and 9 are dropped
    ("by_arrival", GATES, [[2], [6], [0], [1]]),
    ("by_arrival", EQUAL, [[2, 4, 8], [6, 3, -1], [0, 7, -1], [1, 5, 9]]),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("policy", "gates", "slots"), GOLDEN)
def test_who_is_dropped_by_hand(room, policy, gates, slots):
    bins = ROOMS[room](GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS, gates, len(slots[0]), policy)
    assert bins.slots.tolist() == slots
    rows = [slot for expert in slots for slot in expert]
    assert bins.rows.tolist() == [rows.index(slot) if slot in rows else EMPTY for slot in range(10)]


def test_rows_by_hand():
    bins = fill_by_numpy(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS, GATES, 2, "by_gate")
    assert bins.rows.tolist() == [4, 6, -1, 3, 0, -1, 2, 5, 1, 7]


def test_what_is_lost_by_hand():
    built = dispatch.build(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
    lost = capacity.dropped(capacity.fill(built, GATES, 1, "by_gate"), built)  # slots 0, 1, 4 and 6 stay
    assert (lost.slots, lost.tokens, lost.of_experts.tolist()) == (6, 2, [2, 1, 1, 2])  # tokens 1 and 4
    lost = capacity.dropped(capacity.fill(built, GATES, 3, "by_gate"), built)
    assert (lost.slots, lost.tokens, lost.of_experts.tolist()) == (0, 0, [0, 0, 0, 0])


def best_claims(topk_experts, num_experts, gates, rows, policy):
    """The slots that each expert keeps, by the definition: sort its slots, take the first C."""
    k = topk_experts.shape[1]
    key = {
        "by_gate": lambda slot: (-gates[slot // k, slot % k], slot // k),
        "by_arrival": lambda slot: (slot % k, slot // k),
    }[policy]
    chosen = topk_experts.ravel()
    return [sorted((s for s in range(chosen.size) if chosen[s] == e), key=key)[:rows] for e in range(num_experts)]


def assert_filled(bins, topk_experts, num_experts, gates, rows, policy):
    best = best_claims(topk_experts, num_experts, gates, rows, policy)
    assert bins.slots.shape == (num_experts, rows)
    for expert, kept in enumerate(best):
        assert len(kept) <= rows
        assert bins.slots[expert].tolist() == kept + [EMPTY] * (rows - len(kept))
    filled = bins.slots.ravel()
    every = [*filled[filled != EMPTY].tolist(), *(bins.rows == EMPTY).nonzero()[0].tolist()]
    assert sorted(every) == list(range(topk_experts.size))  # kept or dropped, once
    kept = (bins.rows != EMPTY).nonzero()[0]
    assert filled[bins.rows[kept]].tolist() == kept.tolist()
    if rows >= np.bincount(topk_experts.ravel(), minlength=num_experts).max(initial=0):
        assert kept.size == topk_experts.size


@settings(deadline=None, max_examples=60)
@given(
    routings(max_tokens=40, max_experts=8),
    st.integers(0, 30),
    st.sampled_from(list(DROP_POLICIES)),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_the_best_claims_are_kept(routed, rows, policy, values, seed):
    topk_experts, num_experts = routed
    gates = np.random.default_rng(seed).integers(0, values, topk_experts.shape) / values  # many ties
    for fill in ROOMS.values():
        bins = fill(topk_experts, num_experts, gates, rows, policy)
        assert_filled(bins, topk_experts, num_experts, gates, rows, policy)


# The experts, against a dense definition


def dense_definition(x, w1, w2, w3, topk_experts, gates, activation, kept):
    """Every expert on every token, weighted by the gates of the slots that are kept and by zero elsewhere."""
    k = topk_experts.shape[1]
    weights = torch.zeros(len(x), w1.shape[0], dtype=x.dtype)  # (L, E)
    for slots in kept:
        for slot in slots:
            token, j = divmod(slot, k)
            weights[token, topk_experts[token, j]] = gates[token, j]
    b = None if w2 is None else torch.einsum("ld,edh->elh", x, w2)
    y = torch.einsum("elh,ehd->eld", oracle.activate(torch.einsum("ld,edh->elh", x, w1), b, activation), w3)
    return torch.einsum("le,eld->ld", weights, y)


def leaf(array):
    return None if array is None else torch.tensor(array, dtype=torch.float64, requires_grad=True)


class Step(NamedTuple):
    """A step of the specification's experts."""

    routed: Gating
    built: Dispatch
    out: np.ndarray
    saved: Saved
    gradients: capacity.Gradients


def run_specification(case, *options, renormalize=False):
    routed = gating.forward(case.logits, case.k, renormalize)
    built, experts = dispatch.build(routed.topk_experts, case.E), case.weights[1:]
    out, saved = capacity.forward(case.x, *experts, built, routed.gates, case.activation, *options)
    return Step(routed, built, out, saved, capacity.backward(case.d_out, saved, *experts))


def errors_of_experts(case, factor, policy, dtype="float64"):
    """The relative error of out and of every gradient of the specification, by name."""
    case = case.astype(dtype)
    routed, _, out, _, gradients = run_specification(case, factor, policy)
    rows = expert_capacity(routed.topk_experts.size, case.E, factor)
    kept = best_claims(routed.topk_experts, case.E, routed.gates, rows, policy)
    leaves = [leaf(array) for array in (case.x, *case.weights[1:], routed.gates)]
    x, *weights, gates = leaves
    expected = dense_definition(x, *weights, routed.topk_experts, gates, case.activation, kept)
    present = [one for one in leaves if one is not None]
    true = iter(torch.autograd.grad(expected, present, torch.tensor(case.d_out, dtype=torch.float64)))
    assert out.dtype == dtype
    errors = {"out": relative_error(out, expected.detach().numpy())}
    for name, one, found in zip(gradients._fields, leaves, gradients, strict=True):
        assert (one is None) == (found is None)
        if one is not None:
            assert found.dtype == dtype
            errors[name] = relative_error(found, next(true).numpy())
    return errors


@pytest.mark.parametrize("policy", DROP_POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_out_and_gradients_are_the_dense_definitions(activation, policy):
    case = Shape(37, 12, 20, 5, 3, "zipf").case(activation)
    errors = errors_of_experts(case, 0.7, policy)
    assert all(error < 1e-12 for error in errors.values()), errors


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25])
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_every_shape_agrees_with_the_dense_definition(shape, factor):
    for policy in DROP_POLICIES:
        for dtype, bound in BOUNDS.items():
            errors = errors_of_experts(shape.case(), factor, policy, dtype)
            assert all(error < bound for error in errors.values()), (policy, dtype, errors)


def test_a_dropped_slot_adds_nothing_and_its_gate_has_no_gradient():
    case = make_case(40, 8, 16, 5, 2, "hot")
    _, _, out, saved, gradients = run_specification(case, 0.5)
    lost = (saved.bins.rows == EMPTY).reshape(40, 2)
    assert lost.all(axis=1).any() and lost.any(axis=1).sum() > lost.all(axis=1).sum()
    assert ((out == 0).all(axis=1) == lost.all(axis=1)).all()
    assert ((gradients.d_gates == 0) == lost).all()


def test_no_tokens_give_empty_results():
    case = make_case(0, 8, 16, 4, 2)
    _, built, out, saved, gradients = run_specification(case)
    assert out.shape == (0, 8) and saved.bins.slots.shape == (4, 0)
    assert gradients.d_x.shape == (0, 8) and gradients.d_gates.shape == (0, 2)
    for d_weight, weight in zip(gradients[1:4], case.weights[1:], strict=True):
        assert d_weight.shape == weight.shape and not d_weight.any()
    assert capacity.dropped(saved.bins, built)[:2] == (0, 0)


# The torch layer


def layer_of(case, factor=1.0, policy="by_gate", dtype="float64", **options):
    """A CapacityMoE with the weights of a case."""
    _, d, h = case.weights.w1.shape
    dtype = getattr(torch, dtype)
    layer = CapacityMoE(d, h, case.E, case.k, case.activation, case.renormalize, factor, policy, dtype=dtype, **options)
    state = {name: torch.tensor(w).to(dtype) for name, w in case.weights._asdict().items() if w is not None}
    layer.load_state_dict(state)
    return layer


D_LOSSES = (0.7, 0.3)


def results_of_layer(layer, case):
    """out, both losses and every gradient of a torch layer, by name, as numpy in float64."""
    x = torch.tensor(case.x).to(layer.w1.dtype).requires_grad_()
    result = systems.run(layer, x)
    leaves = {"d_x": x, **{f"d_{name}": parameter for name, parameter in layer.named_parameters()}}
    outputs = (result.out, result.load_balancing_loss, result.router_z_loss)
    d_outputs = [torch.tensor(d, dtype=one.dtype) for d, one in zip((case.d_out, *D_LOSSES), outputs, strict=True)]
    found = dict(zip(leaves, torch.autograd.grad(outputs, leaves.values(), d_outputs), strict=True))
    found |= dict(zip(MoEOutput._fields[:3], outputs, strict=True))
    return {name: tensor.detach().double().numpy() for name, tensor in found.items()}


def results_of_specification(case, factor, policy):
    """The same of the numpy stages, in float64."""
    step = run_specification(case, factor, policy, renormalize=case.renormalize)
    routed, gradients, logits = step.routed, step.gradients, case.logits
    d_logits = gating.backward(gradients.d_gates, logits, routed.topk_experts, case.renormalize, *D_LOSSES)
    found = gradients._asdict()
    del found["d_gates"]
    found["d_x"] = found["d_x"] + router.input_gradient(d_logits, case.weights.wg)
    found["d_wg"] = router.weight_gradient(d_logits, case.x)
    found["out"] = step.out
    found["load_balancing_loss"] = gating.load_balancing_loss(routed.probs, routed.topk_experts)
    found["router_z_loss"] = gating.router_z_loss(logits)
    lost = capacity.dropped(step.saved.bins, step.built)
    return {name: array for name, array in found.items() if array is not None}, lost


def assert_same(found, expected, bound):
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert found.keys() == expected.keys() and all(error < bound for error in errors.values()), errors


@pytest.mark.parametrize("policy", DROP_POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_torch_layer_is_the_specification(activation, policy):
    case = replace(Shape(37, 12, 20, 5, 3, "zipf").case(activation), renormalize=policy == "by_gate")
    for dtype, bound in BOUNDS.items():
        rounded = case.astype(dtype).astype("float64")
        layer = layer_of(rounded, 0.7, policy, dtype)
        expected, lost = results_of_specification(rounded, 0.7, policy)
        assert_same(results_of_layer(layer, rounded), expected, bound)
        assert lost.slots > 0
        assert (layer.dropped_slots.item(), layer.lost_tokens.item()) == (lost.slots, lost.tokens)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_the_torch_layer(shape):
    case = shape.case()
    for policy, factor in zip(DROP_POLICIES, (0.4, 1.25), strict=True):
        expected, _ = results_of_specification(case, factor, policy)
        assert_same(results_of_layer(layer_of(case, factor, policy), case), expected, 1e-12)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_without_drops_it_is_the_oracle(activation):
    case = Shape(41, 8, 16, 8, 2, "zipf").case(activation)
    layer = layer_of(case, case.E / case.k)
    plain = oracle.OracleMoE(8, 16, 8, 2, activation, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert_same(results_of_layer(layer, case), results_of_layer(plain, case), 1e-12)
    assert layer.dropped_slots.item() == layer.lost_tokens.item() == 0
    case = replace(case, x=np.ones_like(case.x))  # one token, many times: the longest queues that there are
    layer(torch.tensor(case.x))
    assert layer.dropped_slots.item() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_lose_at_most_twice_what_the_oracle_loses(dtype):
    case = Shape(131, 16, 24, 8, 2, "zipf").case()
    case = case.astype(np.float32)
    layer = layer_of(case, 4.0, dtype=dtype)
    plain = oracle.OracleMoE(16, 24, 8, 2, dtype=getattr(torch, dtype))
    plain.load_state_dict(layer.state_dict())
    x = torch.tensor(case.x).to(getattr(torch, dtype))
    exact = oracle.OracleMoE(16, 24, 8, 2, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    routing = plain(x)[1]
    replayed = oracle.route(x.double(), exact.wg, 2, topk_experts=routing.topk_experts)
    truth = oracle.experts(x.double(), replayed, exact.w1, exact.w2, exact.w3).detach().numpy()
    ours, theirs = (relative_error(out.detach().double().numpy(), truth) for out in (layer(x).out, plain(x)[0]))
    assert layer.dropped_slots.item() == 0
    assert ours <= 2 * theirs


def test_the_same_input_gives_the_same_bits():
    case = Shape(131, 16, 8, 16, 4, "zipf").case()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (results_of_layer(layer_of(case, 0.8), case) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_the_host_waits_for_nothing():
    """Fake tensors have no values: whatever would read one, and so wait for a GPU, raises."""
    with FakeTensorMode():
        for policy in DROP_POLICIES:
            layer = CapacityMoE(16, 24, 5, 3, drop_policy=policy)
            x = torch.randn(37, 16, requires_grad=True)
            result = layer(x)
            (result.out.sum() + result.load_balancing_loss + result.router_z_loss).backward()
            assert layer.dropped_slots.shape == layer.lost_tokens.shape == ()
        with pytest.raises(DynamicOutputShapeException):
            oracle.expert_order(layer(x).topk_experts.long(), 5)


def test_no_tokens_give_no_losses():
    layer = CapacityMoE(8, 16, 4, 2)
    result = layer(torch.zeros(3, 0, 8))
    assert result.out.shape == (3, 0, 8) and result.topk_experts.shape == (0, 2)
    assert result.load_balancing_loss.item() == result.router_z_loss.item() == 0.0
    (result.out.sum() + result.load_balancing_loss + result.router_z_loss).backward()
    assert all(not parameter.grad.any() for parameter in layer.parameters())
    assert layer.dropped_slots.item() == layer.lost_tokens.item() == 0


def test_a_lost_token_does_not_hear_of_a_broken_one():
    layer = CapacityMoE(4, 8, 2, 1, capacity_factor=0.1, drop_policy="by_arrival")  # one row an expert
    torch.nn.init.zeros_(layer.wg)  # all go to expert 0, where token 0 arrives first
    x = torch.ones(6, 4)
    x[0] = float("nan")
    out = layer(x, torch.zeros(6, 1, dtype=torch.int32)).out
    assert out[0].isnan().all() and not out[1:].any()


def test_a_replayed_choice_and_checkpointing():
    case = Shape(37, 12, 20, 5, 3).case()
    layer = layer_of(case, 0.6)
    x = torch.tensor(case.x, requires_grad=True)
    result = layer(x)
    dropped = layer.dropped_slots
    again = layer(x.flip(0), result.topk_experts.flip(0))
    assert relative_error(again.out.flip(0).detach().numpy(), result.out.detach().numpy()) < 1e-12
    assert torch.equal(layer.dropped_slots, dropped)
    expected = torch.autograd.grad(result.out.square().sum(), [x, *layer.parameters()])
    out = checkpoint(layer, x, use_reentrant=False, context_fn=keep_routing).out
    found = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_autocast_computes_in_its_dtype():
    layer, x = CapacityMoE(16, 24, 5, 3), torch.randn(37, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
    exact = layer(x, result.topk_experts)
    assert result.out.dtype == torch.bfloat16 and result.router_z_loss.dtype == torch.float32
    assert 1e-4 < relative_error(result.out.detach().float().numpy(), exact.out.detach().numpy()) < 0.05
    wide = CapacityMoE(16, 24, 5, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert wide(x.double()).out.dtype == torch.float64  # which autocast leaves alone


# Planted faults


def without_the_last_row(take):
    def faulty(matrix, index):
        taken = 1 * take(matrix, index)  # a copy
        taken[-1] = 0
        return taken

    return faulty


def higher_id_first_by_numpy(gates):
    return (gates.size - 1) - np.argsort(-gates.ravel()[::-1], kind="stable")


def higher_id_first_by_torch(routing, policy):
    flat = routing.gates.detach().flatten()
    return flat.numel() - 1 - flat.flip(0).argsort(descending=True, stable=True)


def one_row_fewer(fill):
    return lambda choice, other, rows, policy: fill(choice, other, rows - 1, policy)


def without_gates(function):
    return lambda rows, bins, gates=None: function(rows, bins)


def zeros_of(function):
    return lambda *arguments: function(*arguments) * 0


def gates_alike(function):
    return lambda y, bins, gates: function(y, bins, gates.mean() + 0 * gates)


FAULTS = {
    "numpy: the last row is lost": (capacity, "_take", without_the_last_row(capacity._take)),
    "numpy: padding and drops read a row": (capacity, "_take", operator.getitem),  # the last for EMPTY
    "numpy: ties to the higher id": ("claims", "by_gate", higher_id_first_by_numpy),
    "numpy: the lowest gates stay": ("claims", "by_gate", lambda gates: np.argsort(gates, axis=None, kind="stable")),
    "numpy: token after token": ("claims", "by_arrival", lambda gates: np.arange(gates.size)),
    "numpy: a row too few": (capacity.fill, "unchecked", one_row_fewer(capacity.fill.unchecked)),
    "numpy: the gradient is not weighted": (capacity.gather, "unchecked", without_gates(capacity.gather.unchecked)),
    "numpy: the output is not weighted": (capacity.scatter, "unchecked", without_gates(capacity.scatter.unchecked)),
    "numpy: gates get no gradient": (capacity.gate_gradient, "unchecked", zeros_of(capacity.gate_gradient.unchecked)),
    "torch: the last row is lost": (torch_capacity, "_take", without_the_last_row(torch_capacity._take)),
    "torch: padding and drops read a row": (torch_capacity, "_take", operator.getitem),  # the last for EMPTY
    "torch: ties to the higher id": (torch_capacity, "_claims", higher_id_first_by_torch),
    "torch: token after token": (
        torch_capacity,
        "_claims",
        lambda routing, policy: torch.arange(routing.gates.numel()),
    ),
    "torch: a row too few": (torch_capacity, "fill", one_row_fewer(torch_capacity.fill)),
    "torch: zeros": (torch_capacity, "padded_experts", zeros_of(torch_capacity.padded_experts)),
    "torch: all gates alike": (torch_capacity, "combine", gates_alike(torch_capacity.combine)),
}


def examine(room):
    """The hand-made routings, then one random layer, of one room alone."""
    for policy, gates, slots in GOLDEN:
        test_who_is_dropped_by_hand(room, policy, gates, slots)
    case = Shape(37, 12, 20, 5, 3, "zipf").case()
    for policy in DROP_POLICIES:
        if room == "numpy":
            errors = errors_of_experts(case, 0.7, policy)
            assert all(error < 1e-12 for error in errors.values()), errors
        else:
            expected, _ = results_of_specification(case, 0.7, policy)
            assert_same(results_of_layer(layer_of(case, 0.7, policy), case), expected, 1e-12)


@pytest.mark.parametrize("room", ROOMS)
def test_the_examination_passes_what_is_right(room):
    examine(room)


def plant(fault, monkeypatch):
    """Switch a fault in, and return its room."""
    owner, name, faulty = FAULTS[fault]
    if owner == "claims":
        monkeypatch.setitem(capacity._CLAIMS, name, faulty)
    else:
        monkeypatch.setattr(owner, name, faulty)
    return fault.partition(":")[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    with pytest.raises((AssertionError, IndexError, ValueError)):
        examine(plant(fault, monkeypatch))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_of_the_stage_catches_a_planted_fault(fault, monkeypatch):
    jobs = check.plan(["capacity"], [plant(fault, monkeypatch)])
    assert any(not row.ok for job in jobs for row in job())


def test_the_check_compares_what_is_dropped(monkeypatch):
    right = capacity.dropped
    monkeypatch.setattr(capacity, "dropped", lambda bins, dispatch: right(bins, dispatch)._replace(tokens=0))
    assert not check.passed(check.run(["capacity"], ["numpy"], [Shape(37, 12, 20, 5, 1, "zipf").case()]))


# What the waste comes to


def test_rows_of_the_three_systems_by_hand():
    counts = (300, 0, 20, 128)
    dropped = rows.capacity_rows(counts, 112)
    assert (dropped.kept, dropped.dropped, dropped.padding) == ((112, 0, 20, 112), (188, 0, 0, 16), (0, 112, 92, 0))
    blocks = rows.megablocks_rows(counts)
    assert (blocks.stored, blocks.dropped, blocks.padding) == ((384, 0, 128, 128), (0, 0, 0, 0), (84, 0, 108, 0))
    ours = rows.moeblaze_rows(counts)
    assert (ours.kept, ours.dropped, ours.padding) == (counts, (0, 0, 0, 0), (0, 0, 0, 0))


def test_a_report_by_hand():
    config = MoEConfig(L=10, d=3, h=8, E=4, k=2, dtype="float32")
    found = waste.compare(config, (9, 0, 4, 7), capacity_factor=1.0, block=4)  # C = 5
    assert list(found) == ["capacity", "megablocks", "moeblaze"]
    assert [one.dropped_rows for one in found.values()] == [6, 0, 0]
    assert [one.padding_rows for one in found.values()] == [6, 4, 0]
    assert found["capacity"].expert_flops == (0, 5 * 432, 432, 0)  # 18 * 3 * 8 = 432 FLOPs a row
    # x, a, b, act(a) and y_swi, a token's number and a mask of one byte: (3 + 4 * 8) * 4 + 4 + 1 = 145 bytes a row
    assert found["capacity"].expert_bytes == (0, 5 * 145, 145, 0)
    # x, a, b, y_swi and y, and a slot's number: (2 * 3 + 3 * 8) * 4 + 4 = 124 bytes a row
    assert (found["megablocks"].flops, found["megablocks"].bytes) == (4 * 432, 4 * 124)
    assert (found["moeblaze"].flops, found["moeblaze"].bytes) == (0, 0)
    assert [one.share for one in found.values()] == [6 / 14, 4 / 20, 0.0]
    assert waste.step_flops_per_row(config.replace(activation="relu")) == 12 * 3 * 8
    nothing = waste.compare(config.replace(L=0), (0, 0, 0, 0), block=4)
    assert [(one.share, one.flops, one.bytes) for one in nothing.values()] == [(0.0, 0, 0)] * 3


@pytest.mark.parametrize(
    ("activation", "capacity_bytes", "megablocks_bytes"),
    [("swiglu", (3 + 4 * 8) * 2 + 5, (2 * 3 + 3 * 8) * 2 + 4), ("silu", (3 + 2 * 8) * 2 + 5, (2 * 3 + 2 * 8) * 2 + 4)]
    + [("relu", (3 + 8) * 2 + 5, (2 * 3 + 2 * 8) * 2 + 4), ("relu2", (3 + 2 * 8) * 2 + 5, (2 * 3 + 2 * 8) * 2 + 4)]
    + [("reglu", (3 + 3 * 8) * 2 + 5, (2 * 3 + 3 * 8) * 2 + 4)],
)
def test_bytes_of_a_row_by_hand(activation, capacity_bytes, megablocks_bytes):
    config = MoEConfig(L=10, d=3, h=8, E=4, k=2, activation=activation)
    assert waste.kept_bytes_per_row(config, "capacity") == capacity_bytes
    assert waste.kept_bytes_per_row(config, "megablocks", block=4) == megablocks_bytes


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("factor", [0.5, 1.25])
def test_the_rows_and_flops_of_the_report_are_what_is_counted(activation, factor):
    case = make_case(53, 8, 16, 6, 2, "zipf", activation=activation)
    topk_experts, block = case.topk_experts, 8
    config = MoEConfig(53, 8, 16, 6, 2, activation, "float64")
    counts = np.bincount(topk_experts.ravel(), minlength=6).tolist()
    found = waste.compare(config, counts, factor, block)
    built, gates = dispatch.build(topk_experts, 6), gating.forward(case.logits, 2).gates

    operands = case.x, *case.weights[1:], built, gates, activation
    saved = {
        "capacity": capacity.forward(*operands, factor)[1],
        "megablocks": block_sparse.forward(*operands, block)[1],
    }
    lost = capacity.dropped(saved["capacity"].bins, built)
    assert found["capacity"].rows.dropped == tuple(lost.of_experts) and found["capacity"].dropped_rows == lost.slots
    for name, one in saved.items():
        slots = one.bins.slots.ravel()
        assert found[name].padding_rows == (slots == EMPTY).sum()
        assert sum(found[name].rows.stored) == slots.size

    layer = layer_of(case, factor)
    x_rows = torch.tensor(saved["capacity"].x_rows, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        weights = torch_capacity.MoEWeights(*layer.weights)
        torch_capacity.padded_experts(x_rows, weights, activation).sum().backward()
    assert counter.get_total_flops() == sum(found["capacity"].rows.stored) * waste.step_flops_per_row(config)


def kept_by_hooks(config, system, **assumptions):
    """What the torch layer of a system keeps, as autograd's hooks see it."""
    return measured(account(config, system, assumptions=Assumptions(**assumptions))).kept_bytes


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_capacity_layer_keeps_the_bytes_that_the_report_says(activation, dtype):
    config, even = MoEConfig(48, 8, 24, 6, 2, activation, dtype), (16,) * 6
    base = kept_by_hooks(config, "capacity", counts=even, capacity_factor=1.0)
    for factor, padding in ((1.25, 6 * 4), (2.0, 6 * 16)):
        found = waste.compare(config, even, factor, block=8)["capacity"]
        assert found.padding_rows == padding and found.bytes > 0
        kept = kept_by_hooks(config, "capacity", counts=even, capacity_factor=factor)
        assert kept - base == found.bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_the_block_sparse_layer_keeps_the_bytes_that_the_report_says(activation, dtype):
    config, block = MoEConfig(16, 8, 24, 3, 2, activation, dtype), 8
    whole, uneven = (16, 8, 8), (15, 9, 8)  # 4 blocks without padding, and 5 with 1 + 7 rows of it
    found = waste.compare(config, uneven, block=block)["megablocks"]
    assert found.padding_rows == 8 and waste.compare(config, whole, block=block)["megablocks"].bytes == 0
    one_block_more = 4 * (1 + 3 * 3)  # of the topology: an offset, and three indices of each of its h / 8 = 3 blocks
    base, kept = (kept_by_hooks(config, "megablocks", counts=counts, block=block) for counts in (whole, uneven))
    assert kept - base == found.bytes + one_block_more


def test_the_table_has_a_row_a_system():
    table = waste.waste_table(waste.compare(MoEConfig(10, 3, 8, 4, 2), (9, 0, 4, 7), 1.0, 4))
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["capacity", "megablocks", "moeblaze"]
    assert cells[1:4] == [["6", "0", "0"], ["6", "4", "0"], ["42.9%", "20.0%", "0.0%"]]


def test_the_table_states_flops_in_billions_and_bytes_in_a_unit_of_their_own():
    config = MoEConfig(8192, 64, 128, 4, 2)  # 18 d h = 147,456 FLOPs a row
    wastes = waste.compare(config, (8192, 1024, 4096, 3072), 1.0, 128)
    capacity, megablocks, _ = wastes.values()
    assert (capacity.padding_rows, megablocks.padding_rows) == (4096, 0)
    table = waste.waste_table(wastes)
    assert [column.header for column in table.columns][4:] == ["wasted GFLOP a step", "wasted MiB kept"]
    flops, kept = (list(column.cells) for column in table.columns[4:])
    assert flops == ["0.604", "0.000", "0.000"]  # 4,096 * 147,456 = 0.604e9, and 0.5625 * 2**30
    assert kept == ["4.520", "0.000", "0.000"]  # 4,096 rows that keep (64 + 4 * 128) * 2 + 5 bytes each


# Systems by name


def test_one_argument_swaps_the_system_in_a_model():
    config = LMConfig(d=16, h=16, E=4, k=2, layers=2, heads=2, sequence=8)
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    factories = {"oracle": "oracle", "all rows": system("capacity", capacity_factor=2.0), "capacity": "capacity"}
    torch.manual_seed(0)
    state = MoETransformer(config).state_dict()
    seen = {}
    for name, factory in factories.items():
        model = MoETransformer(config, factory).double()
        model.load_state_dict(state)  # one state fits all
        output = model(tokens[:, :-1])
        (language_loss(output, tokens[:, 1:]) + router_loss(output)).backward()
        layers = capture(model, tokens)
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        seen[name] = [output.logits.detach().numpy(), gradients.numpy(), layers[1].gates, layers[1].topk_experts]
    for found, expected in zip(seen["all rows"], seen["oracle"], strict=True):
        assert relative_error(found, expected) < 1e-12
    assert relative_error(seen["capacity"][0], seen["oracle"][0]) > 1e-6  # some are dropped


def test_every_system_has_one_interface():
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    outputs, options = [], {"capacity": {"capacity_factor": 2.0}, "megablocks": {"block": 8}}
    options["megablocks_memory_optimized"] = options["megablocks"]
    for name in SYSTEMS:
        torch.manual_seed(0)
        layer = system(name, **options.get(name, {}))(8, 16, 4, 2)
        result = systems.run(layer, x)
        replayed = systems.run(layer, x, result.topk_experts.flip(0))
        assert result.topk_experts.dtype == torch.int32
        assert torch.equal(replayed.topk_experts, result.topk_experts.flip(0))
        losses = result.load_balancing_loss + result.router_z_loss
        (gradient,) = torch.autograd.grad(losses, layer.wg)
        outputs.append([tensor.detach().numpy() for tensor in (result.out, replayed.out, losses, gradient)])
    for found in outputs[1:]:
        for mine, expected in zip(found, outputs[0], strict=True):
            assert relative_error(mine, expected) < 1e-5


def test_training_takes_a_system_by_name():
    tiny = LMConfig(d=16, h=16, E=4, k=2, layers=1, heads=2, sequence=8)
    named, given = (train(tiny, 2, batch=2, moe=moe).losses for moe in ("capacity", CapacityMoE))
    assert named == given
    assert named != train(tiny, 2, batch=2).losses


@pytest.mark.parametrize(
    "make",
    [
        lambda: system("capacty"),
        lambda: MoETransformer(LMConfig(), "capacty"),
        lambda: train(LMConfig(), 1, moe="capacty"),
    ],
)
def test_an_unknown_system_is_met_with_the_nearest(make):
    with pytest.raises(ValueError, match="unknown system 'capacty'. Did you mean 'capacity'"):
        make()


@pytest.mark.parametrize(("rows", "factor", "expected"), [(10, 1.1, 11), (30, 0.1, 3), (7, 1.0, 7), (9, 1 / 3, 3)])
def test_a_factor_is_the_decimal_number_that_was_typed(rows, factor, expected):
    assert expert_capacity(rows, 1, factor) == expected


def test_a_token_without_a_gate_puts_out_nobody():
    layer = CapacityMoE(2, 2, 1, 1, capacity_factor=0.25, drop_policy="by_gate")
    gates = torch.tensor([[0.1], [0.4], [torch.nan], [0.2]])
    routing = oracle.Routing(gates, gates, torch.zeros(4, 1, dtype=torch.int64), gates)
    bins = torch_capacity.fill(routing, 1, 2, layer.drop_policy)
    assert bins.slots.tolist() == [[1, 3]]


# Bad input

CASE = make_case(5, 4, 6, 4, 2)
BUILT = dispatch.build(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
BINS = capacity.fill(BUILT, GATES, 2, "by_gate")


def forward_with(x=CASE.x, factor=1.0, policy="by_gate", gates=GATES):
    return capacity.forward(x, *CASE.weights[1:], BUILT, gates, "swiglu", factor, policy)


def backward_with(d_out=CASE.d_out, **weights):
    given = dict(zip(("w1", "w2", "w3"), CASE.weights[1:], strict=True)) | weights
    return capacity.backward(d_out, forward_with()[1], **given)


def gather_with(x=CASE.x, gates=None, slots=BINS.slots, rows=BINS.rows):
    return capacity.gather(x, CapacityBins(slots, rows, 2), gates)


def compare_with(counts=(5, 5, 0, 0), h=6, **options):
    return waste.compare(MoEConfig(5, 4, h, 4, 2), counts, **options)


NAN, WIDE, (_, W1, W2, W3) = float("nan"), MoEConfig(5, 4, 8, 4, 2), CASE.weights
BAD_VALUES = [
    (lambda: forward_with(factor=0), "capacity_factor is 0.0, but it must be above 0"),
    (lambda: forward_with(factor=-1.5), "capacity_factor is -1.5, but it must be above 0"),
    (lambda: forward_with(factor=NAN), "capacity_factor is nan, but it must be finite"),
    (lambda: forward_with(factor=float("inf")), "capacity_factor is inf, but it must be finite"),
    (lambda: forward_with(factor=1e12), r"for E = 4 experts C = 2500000000000, but int32 .* lower the capacity"),
    (lambda: forward_with(factor=1e300), r"C = 2\.[45]\de\+300, but int32 indices allow at most"),
    (lambda: expert_capacity(8, 4, 0), "capacity_factor is 0.0, but it must be above 0"),
    (lambda: expert_capacity(-1, 4, 1.0), "R is -1, but it must be >= 0"),
    (lambda: expert_capacity(8, 0, 1.0), "E is 0, but it must be >= 1"),
    (lambda: forward_with(policy="by_gates"), "unknown drop policy 'by_gates'. Did you mean 'by_gate'"),
    (lambda: forward_with(with_value(CASE.x, (3, 1), np.nan)), r"x\[3, 1\] is nan, but x must be finite"),
    (lambda: forward_with(with_value(CASE.x, (0, 2), np.inf)), r"x\[0, 2\] is inf, but x must be finite"),
    (lambda: forward_with(CASE.x[:4]), r"x has shape \(4, 4\), but it must be \(L=5, d\)"),
    (lambda: forward_with(gates=GATES[:, :1]), r"gates has shape \(5, 1\), but it must be \(L=5, k=2\)"),
    (lambda: forward_with(gates=with_value(GATES, (2, 0), np.nan)), r"gates\[2, 0\] is nan"),
    (lambda: capacity.fill(BUILT, GATES, -1), "capacity is -1, but it must be >= 0"),
    (lambda: capacity.fill(BUILT, GATES, 2, "arrival"), "Did you mean 'by_arrival'"),
    (lambda: backward_with(CASE.d_out[:3]), "d_out has shape"),
    (lambda: gather_with(CASE.x[:3]), "x has shape"),
    (lambda: capacity.scatter(np.zeros((4, 3, 4)), BINS), r"y has shape \(4, 3, 4\), .*\(E=4, C=2, d\)"),
    (
        lambda: gather_with(rows=with_value(BINS.rows, 3, 8)),
        r"rows\[3\] is 8, but it must be one of the 8 reserved rows, or -1",
    ),
    (lambda: gather_with(rows=with_value(BINS.rows, 3, -2)), r"rows\[3\] is -2, but it must be"),
    (lambda: gather_with(rows=with_value(BINS.rows, 3, 2)), r"rows\[3\] is 2, but slots\[1, 0\] is 6: it must be 3"),
    (
        lambda: gather_with(rows=with_value(BINS.rows, 3, EMPTY)),
        r"slots\[1, 1\] is 3, but rows\[3\] is -1: it must be 3, or slots\[1, 1\] must be -1",
    ),
    (
        lambda: gather_with(slots=with_value(BINS.slots, (1, 0), 99)),
        r"slots\[1, 0\] is 99, but it must be one of the 10 routed slots, or -1",
    ),
    (lambda: gather_with(gates=GATES[:3]), r"gates has shape \(3, 2\), but it must be \(L=5, k=2\)"),
    (lambda: backward_with(w1=W1[:1]), r"w1 has shape \(1, 4, 6\), but it must be \(E=4"),
    (lambda: backward_with(w2=None), "w2 is None, but swiglu is gated: pass w2"),
    (lambda: backward_with(w2=W2[..., :3]), r"w2 has shape \(4, 4, 3\)"),
    (lambda: backward_with(w1=with_value(W1, (2, 1, 0), np.nan)), r"w1\[2, 1, 0\] is nan, but w1 must be finite"),
    (
        lambda: capacity.dropped(BINS, dispatch.build(GOLDEN_TOPK_EXPERTS[:4], 4)),
        "bins has L = 5, but the dispatch has L = 4",
    ),
    (lambda: compare_with(capacity_factor=NAN), "capacity_factor is"),
    (lambda: compare_with((5, 5, 0)), "counts has 3 entries"),
    (lambda: compare_with(block=0), "block is 0"),
    (lambda: compare_with(h=8, block=3), "h is 8, but it must be a multiple of the block size 3"),
    (
        lambda: waste.kept_bytes_per_row(WIDE, "megablock"),
        "unknown padding system 'megablock'. Did you mean 'megablocks'",
    ),
    (lambda: rows.megablocks_rows([3, 4], 0), "block is 0, but it must be >= 1"),
    (lambda: rows.megablocks_rows([3, -4]), r"counts\[1\] is -4, but it must be >= 0"),
    (lambda: rows.capacity_rows([3, 4], -1), "capacity is -1, but it must be >= 0"),
]
BAD_TYPES = [
    (lambda: forward_with(factor="much"), "capacity_factor is 'much'"),
    (lambda: forward_with(factor=True), "capacity_factor is True, but it must be a number"),
    (lambda: forward_with(factor="1.25"), "capacity_factor is '1.25' .str., but it must be a number"),
    (lambda: expert_capacity(8, 4, torch.tensor(1.25)), "capacity_factor is tensor"),
    (lambda: capacity.fill(BUILT, GATES, 1.5), "capacity is 1.5"),
    (lambda: capacity.backward(CASE.d_out, None, *CASE.weights[1:]), "saved is None"),
    (lambda: capacity.gather(CASE.x, BUILT), "bins is a Dispatch, but it must be a CapacityBins"),
    (
        lambda: capacity.scatter(np.zeros((4, 2, 4)), BINS, GATES.astype(np.float32)),
        "gates has dtype float32, but it must be float64",
    ),
    (lambda: backward_with(w3=W3.astype(np.float32)), "w3 has dtype float32"),
    (lambda: gather_with(slots=BINS.slots.astype(np.int64)), "slots has dtype int64"),
    (lambda: rows.capacity_rows([3, 4], 1.5), "capacity is 1.5"),
    (lambda: rows.moeblaze_rows([3.0, 4]), r"counts\[0\] is 3.0"),
]


@pytest.mark.parametrize(
    ("error", "call", "message"), [(ValueError, *row) for row in BAD_VALUES] + [(TypeError, *row) for row in BAD_TYPES]
)
def test_bad_input_says_what_is_allowed(error, call, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({"capacity_factor": 0}, (), ValueError, "capacity_factor is 0.0, but it must be above 0"),
        ({"capacity_factor": float("nan")}, (), ValueError, "capacity_factor is nan"),
        ({"capacity_factor": float("inf")}, (), ValueError, "capacity_factor is inf"),
        ({"capacity_factor": 1e12}, (torch.zeros(5, 8),), ValueError, "lower the capacity factor"),
        ({"drop_policy": "by_gat"}, (), ValueError, "unknown drop policy 'by_gat'. Did you mean 'by_gate'"),
        ({"k": 5}, (), ValueError, "k is 5, but there are only 4 experts"),
        ({"dtype": torch.int32}, (), TypeError, "dtype is torch.int32, but it must be torch.float64 or"),
        ({}, ([1.0],), TypeError, "x is a list, but it must be a Tensor"),
        ({}, (torch.zeros(5, 8).double(),), TypeError, "wg is torch.float32, but x is torch.float64"),
        ({}, (torch.zeros(5, 7),), ValueError, r"x has shape \(5, 7\), but it must be \(..., d=8\)"),
        ({}, (torch.zeros(5, 8, device="meta"),), ValueError, "x is on meta, but CapacityMoE runs on cuda or cpu"),
        ({}, (torch.zeros(5, 8), torch.zeros(5, 2, dtype=torch.int32)), ValueError, "names expert 0 twice"),
    ],
)
def test_bad_input_of_the_torch_layer(options, arguments, error, message):
    with pytest.raises(error, match=message):
        CapacityMoE(**({"d": 8, "h": 16, "E": 4, "k": 2} | options))(*arguments)


def test_the_torch_layer_says_what_it_is():
    assert repr(CapacityMoE(8, 16, 4, 2, drop_policy="by_arrival")) == (
        "CapacityMoE(d=8, h=16, E=4, k=2, activation=swiglu, renormalize=False, capacity_factor=1.25, "
        "drop_policy=by_arrival)"
    )
