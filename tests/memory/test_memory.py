"""Memory accounting: hand-computed bytes, formulas against autograd, tables, JSON and plots."""

import io
import json
import math

import numpy as np
import pytest
import torch
from helpers import assert_told_apart_in_grey
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from rich.console import Console
from torch.multiprocessing.reductions import StorageWeakRef

from moeblaze_ref.backends.numpy_ref import layer
from moeblaze_ref.core.config import ACTIVATIONS, ITEMSIZE, POLICIES, PRESETS, MoEConfig, is_gated, preset
from moeblaze_ref.core.routers import Router
from moeblaze_ref.core.structures import STRUCTURES
from moeblaze_ref.core.units import GB, GIB, KIB, MIB, UNITS, unit_for
from moeblaze_ref.memory import measure, plots, report
from moeblaze_ref.memory.accounting import (
    GPU_CAPACITIES,
    SYSTEMS,
    VARIANTS,
    Assumptions,
    account,
    accounts,
    dropped_and_padded,
    largest_tokens,
    megablocks_step_account,
    ratio,
    step_account,
    tiles,
    uniform_counts,
)
from moeblaze_ref.memory.measured import Measured, measured
from moeblaze_ref.nn.oracle import OracleMoE
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.nn.torch_capacity import CapacityMoE
from moeblaze_ref.systems.capacity import expert_capacity
from moeblaze_ref.systems.layer import MoEWeights

SMALL = MoEConfig(L=6, d=4, h=8, E=3, k=2)  # swiglu, bfloat16: worked out by hand below
BLOCKS = Assumptions(block=8)  # that divide every h of the small layers
COUNTS = (6, 4, 2)

# No token, one token, k = 1, k = E, one expert, more experts than rows, sizes that nothing divides.
SHAPES = [(0, 8, 4, 3, 2), (1, 8, 8, 4, 2), (7, 8, 4, 3, 1), (7, 8, 4, 3, 3), (5, 4, 4, 1, 1), (9, 8, 4, 64, 2)]
ODD = (37, 16, 24, 5, 2)
TOPOLOGY = ("row_offsets", "column_indices", "row_indices", "column_offsets", "transpose_indices")


def by_name(one):
    return {tensor.name: tensor for tensor in one.tensors}


def kept_sizes(one):
    """Bytes of every kept tensor, by name."""
    return {tensor.name: tensor.bytes for tensor in one.tensors if tensor.kept}


def oracle(config, renormalize=False):
    """The oracle layer of a configuration and an input for it."""
    module = OracleMoE(config.d, config.h, config.E, config.k, config.activation, renormalize)
    return module.to(getattr(torch, config.dtype)), input_of(config)


def input_of(config):
    return torch.randn(config.L, config.d, dtype=getattr(torch, config.dtype), requires_grad=True)


# Worked out by hand --------------------------------------------------------------------------------------------------


def test_the_papers_routed_buffer_and_intermediates():
    rows = by_name(account(preset("paper-deepseek").config, "conventional"))
    assert (rows["routed_x"].formula, rows["routed_x"].bytes) == ("L*k*d*2", 98_304_000_000)
    assert rows["routed_x"].shape == (8_000_000, 6144)
    assert (rows["a"].formula, rows["a"].bytes) == ("L*k*h*2", 4 * 98_304_000_000)
    kept = kept_sizes(account(preset("conf3").config, "moeblaze", "paper"))
    assert [kept[name] for name in ("a", "b", "y_swi")] == [2_147_483_648] * 3  # 6.4e9 bytes together


def test_small_conventional():
    one = account(SMALL, "conventional")
    assert kept_sizes(one) == {
        "x": 6 * 4 * 2,
        "probs": 6 * 3 * 4,
        "topk_experts": 12 * 8,
        "slot": 12 * 8,
        "token": 12 * 8,
        "routed_x": 12 * 4 * 2,
        "a": 12 * 8 * 2,
        "act_a": 12 * 8 * 2,
        "b": 12 * 8 * 2,
        "y_swi": 12 * 8 * 2,
        "y": 12 * 4 * 2,
        "gate_rows": 12 * 2,
        "weighted": 12 * 4 * 2,
    }
    assert one.kept_bytes == 1488


def test_small_capacity_drops_and_pads():
    one = account(SMALL, "capacity", assumptions=Assumptions(COUNTS, capacity_factor=1))
    assert one.symbols["C"] == 4
    assert kept_sizes(one) == {
        "x": 48,
        "logits": 72,
        "probs": 72,
        "topk_experts": 6 * 2 * 8,
        "token_of_row": 3 * 4 * 4,
        "is_padding": 3 * 4,
        "routed_x": 3 * 4 * 4 * 2,
        **dict.fromkeys(("a", "act_a", "b", "y_swi"), 3 * 4 * 8 * 2),
        "row_of_slot": 6 * 2 * 4,
        "is_dropped": 6 * 2,
        "y": 6 * 2 * 4 * 2,
        "gates_narrow": 6 * 2 * 2,
        "shares": 3 * 4,
        "logsumexp": 6 * 4,
    }
    (note,) = one.notes
    assert "C = ceil(1*L*k/E) = 4 rows per expert" in note and "the given counts" in note
    assert "2 of 12 routed rows are dropped, and 2 rows are padding" in note


def test_small_megablocks_pads_to_tiles():
    one = account(SMALL, "megablocks_published", assumptions=Assumptions(COUNTS))
    assert (one.symbols["T"], one.symbols["W"]) == (3, 1)
    assert kept_sizes(one) == {
        "x": 48,
        "probs": 72,
        "gates": 48,
        "row_order": 48,
        "row_experts": 48,
        "bins": 12,
        "padded_bins": 12,
        "row_offsets": 16,
        **dict.fromkeys(("column_indices", "row_indices", "transpose_indices"), 12),
        "column_offsets": 16,
        "routed_x": 3 * 128 * 4 * 2,
        **dict.fromkeys(("a", "act_a", "b", "y_swi"), 3 * 128 * 128 * 2),
        "y": 3 * 128 * 4 * 2,
    }
    assert "no row is dropped, and 372 rows are padding" in one.notes[0]


def test_small_megablocks_keeps_no_activation():
    """Groups of 6, 4 and 2 rows in blocks of 4: 2 + 1 + 1 of them, each 2 blocks wide."""
    one = account(SMALL, "megablocks", assumptions=Assumptions(COUNTS, block=4))
    assert (one.symbols["T"], one.symbols["W"], one.symbols["S"]) == (4, 2, 4)
    assert kept_sizes(one) == {
        "x": 48,
        "gates": 48,
        "token_expert_indices": 12 * 4,
        "padded_offsets": 4 * 4,
        "slots": 16 * 4,
        "rows": 12 * 4,
        "row_offsets": 5 * 4,
        **dict.fromkeys(("column_indices", "row_indices", "transpose_indices"), 8 * 4),
        "column_offsets": 7 * 4,
        "routed_x": 16 * 4 * 2,
        **dict.fromkeys(("a", "b", "y_swi"), 8 * 4 * 4 * 2),
        "y": 16 * 4 * 2,
    }
    assert one.peak_bytes == one.kept_bytes + 12 * 4 + 4 * 4 + 12 * 4 + 48  # the rest of the dispatch, and out
    assert "no row is dropped, and 4 rows are padding" in one.notes[0]


def test_small_megablocks_step():
    """The peak is where d_b is made: beside indices and d_w3 live routed_x, a, b and the hidden blocks' gradients."""
    one = megablocks_step_account(SMALL, Assumptions(COUNTS, block=4))
    indices = 12 * 4 + 4 * 4 + 16 * 4 + 12 * 4 + 5 * 4 + 3 * 8 * 4 + 7 * 4
    x, d_out, d_gates, d_w3, routed_x, hidden = 48, 48, 48, 192, 128, 256
    assert one.peak_bytes == x + indices + d_out + d_gates + d_w3 + routed_x + 5 * hidden
    left = {"x", "token_expert_indices", "padded_offsets", "slots", "rows", *TOPOLOGY}
    assert kept_sizes(one).keys() == left | {"d_out", "d_x", "d_wg", "d_w1", "d_w2", "d_w3"}


def test_padding_costs_whole_blocks():
    """One row more in another expert's group: a block row, and all that is laid out by blocks."""
    even, odd = (account(SMALL, "megablocks", assumptions=Assumptions(c, block=4)) for c in ((4, 4, 4), (5, 4, 3)))
    assert (even.symbols["T"], odd.symbols["T"]) == (3, 4)
    block_row = 4 * 4 + 4 + 3 * 2 * 4 + 2 * (4 * 4 * 2) + 3 * (2 * 4 * 4 * 2)
    assert odd.kept_bytes - even.kept_bytes == block_row


def test_the_published_megablocks_keeps_more_than_ours():
    """act(a) and the probabilities; the indices of both are small."""
    config = preset("conf4").config
    ours, theirs = (kept_sizes(account(config, system)) for system in ("megablocks", "megablocks_published"))
    large = {"x", "routed_x", "a", "b", "y_swi", "y"}
    assert {name: theirs[name] for name in large} == {name: ours[name] for name in large}
    assert theirs["act_a"] == ours["a"] and "act_a" not in ours and "probs" not in ours


@pytest.mark.parametrize(("name", "goal"), [("conf3", 7.0), ("qwen3", 2.1), ("mixtral", 4.1)])
def test_the_peak_of_a_step_is_below_its_goal(name, goal):
    """Weights excluded, gradients included."""
    one = step_account(preset(name).config.replace(dtype="bfloat16"), "minimal")
    assert 0.9 * goal < one.peak_bytes / GIB <= goal


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wide_y_exists_in_halves_unless_it_is_kept(policy):
    config = preset("qwen3").config.replace(dtype="bfloat16")
    halved, whole = (by_name(step_account(config, policy, version)) for version in ("7_persistent", "3_mma"))
    kept = policy == "conventional"
    assert halved["y"].bytes == whole["y"].bytes / (1 if kept else 2)
    assert (whole["y_swi"].until, halved["y_swi"].until) == {
        "conventional": ("gate_terms", "gate_terms"),
        "paper": ("gate_terms", "gate_terms"),
        "minimal": ("y", "out"),
        "inputs": ("y", "out"),
    }[policy]
    note = "moeblaze: y is counted whole; 7_persistent has 1,024 of its 2,048 columns at one time"
    assert (note in account(config, "moeblaze", policy).notes) == (not kept)
    assert len(account(preset("conf3").config, "moeblaze", policy).notes) == 1, "there d is no wider than h"


@pytest.mark.parametrize(
    ("policy", "peak"),
    [
        ("conventional", 256 + 96 + 4 * 192 + 96 + 48),  # in the forward: routed_x, the four (R, h), y and out
        ("paper", 256 + 48 + 4 * 192 + 3 * 48),  # d_out; a, b, y_swi, gated_y; d_gates and how it is made
        # d_out, d_gates, d_x, the weights' and d_b
        ("minimal", 256 + 48 + 48 + 48 + 3 * 192 + 192),
        ("inputs", 256 + 48 + 48 + 48 + 3 * 192 + 192),
    ],
)
def test_small_step(policy, peak):
    """Beside the 256 bytes that every policy keeps, as in `test_small_moeblaze`."""
    one = step_account(SMALL, policy)
    assert one.peak_bytes == peak
    ends = {"d_out", "d_x", "d_wg", "d_w1", "d_w2", "d_w3"}
    assert kept_sizes(one).keys() == {"x", "gates", *STRUCTURES} | ends


@pytest.mark.parametrize("activation", ["swiglu", "relu", "relu2"])
@pytest.mark.parametrize("policy", [*POLICIES, "megablocks"])
def test_a_step_begins_with_its_forward(policy, activation):
    config = MoEConfig(*ODD, activation)
    if policy == "megablocks":
        forward, step = account(config, policy, assumptions=BLOCKS), megablocks_step_account(config, BLOCKS)
        assert step.peak_bytes > forward.peak_bytes
    else:
        forward, step = account(config, "moeblaze", policy), step_account(config, policy)
    assert step.peak_bytes >= forward.peak_bytes
    formulas = [tensor.formula.replace("H", "h") for tensor in step.tensors]  # of hidden rows with gaps and without
    assert formulas[: len(forward.tensors)] == [tensor.formula for tensor in forward.tensors]
    assert ("d_w2" in by_name(step)) == is_gated(activation)
    assert all(eval(tensor.formula, {}, step.symbols) == tensor.bytes for tensor in step.tensors)
    assert all(tensor.until is None or tensor.until in by_name(step) for tensor in step.tensors)


@pytest.mark.parametrize(("policy", "kept", "peak"), [("paper", 832, 976), ("minimal", 640, 928), ("inputs", 256, 544)])
def test_small_moeblaze(policy, kept, peak):
    """x 48, gates 48, indices 3 * 48 + 16; then a, b, y_swi of 192 each; the peak is there or freed beside y, 96."""
    one = account(SMALL, "moeblaze", policy)
    assert one.kept_bytes == kept
    # y is the last large tensor to be born: beside it live what is kept and, if it is not kept, y_swi; out is 48.
    assert one.peak_bytes == peak


def test_small_moeblaze_conventional_keeps_what_the_others_avoid():
    kept = kept_sizes(account(SMALL, "moeblaze", "conventional"))
    extra = {"routed_x": 96, "a": 192, "b": 192, "act_a": 192, "y_swi": 192, "y": 96}
    assert kept == kept_sizes(account(SMALL, "moeblaze", "inputs")) | extra


def test_ungated_layers_have_no_b():
    for system, policy in VARIANTS:
        assert "b" not in by_name(account(SMALL.replace(activation="gelu"), system, policy, BLOCKS))


def test_uniform_routing_and_capacity():
    assert uniform_counts(MoEConfig(L=7, d=1, h=1, E=4, k=2)) == (4, 4, 3, 3)
    assert expert_capacity(100, 10, 1.1) == 11  # in binary, 1.1 * 10 would be a little more than 11
    assert expert_capacity(100, 10, 1.01) == 11
    assert expert_capacity(0, 10, 1.25) == 0
    assert [tiles(rows) for rows in (0, 1, 128, 129)] == [0, 1, 1, 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1), st.integers(0, 300))
def test_dropped_and_padded_balance(counts, capacity):
    dropped, padded = dropped_and_padded(counts, capacity)
    assert sum(counts) - dropped + padded == len(counts) * capacity
    assert (dropped == 0) == (max(counts) <= capacity) and (padded == 0) == (min(counts) >= capacity)


# Formula and number ---------------------------------------------------------------------------------------------------

BYTES = ITEMSIZE | {"int32": 4, "int64": 8, "bool": 1}


def whole_blocks(config):
    """Blocks of 128, or the largest smaller ones that divide h."""
    return Assumptions(block=math.gcd(config.h, 128))


@pytest.mark.parametrize("name", PRESETS)
def test_every_formula_evaluates_to_its_bytes(name):
    for one in accounts(preset(name).config, assumptions=whole_blocks(preset(name).config)):
        paper = {symbol: getattr(one.config, symbol) for symbol in "LdhEk"}
        assert one.symbols.items() >= paper.items()
        for tensor in one.tensors:
            value = eval(tensor.formula, {"__builtins__": {}}, one.symbols)
            assert value == tensor.bytes == math.prod(tensor.shape) * BYTES[tensor.dtype] > 0, tensor


def test_totals_are_the_sums_of_the_rows():
    for one in accounts(SMALL, assumptions=BLOCKS):
        assert one.kept_bytes == sum(kept_sizes(one).values())
        assert one.kept_bytes + one.transient_bytes == sum(tensor.bytes for tensor in one.tensors)
        assert one.kept_bytes < one.peak_bytes <= one.kept_bytes + one.transient_bytes
        assert len(by_name(one)) == len(one.tensors)


@pytest.mark.parametrize(("system", "policy"), VARIANTS)
def test_more_tokens_never_cost_less(system, policy):
    config = MoEConfig(L=0, d=8, h=16, E=5, k=3)
    sizes = [account(config.replace(L=tokens), system, policy, BLOCKS) for tokens in range(300)]
    for fewer, more in zip(sizes, sizes[1:], strict=False):
        assert fewer.kept_bytes <= more.kept_bytes and fewer.peak_bytes <= more.peak_bytes
    assert sizes[0].kept_bytes < sizes[-1].kept_bytes


@pytest.mark.parametrize(("system", "policy"), VARIANTS)
def test_largest_tokens_is_exact(system, policy):
    config = MoEConfig(L=1, d=8, h=16, E=5, k=3)
    for capacity in (10**6, 10**6 + 1, 80 * GB):
        limit = largest_tokens(config, system, policy, capacity, BLOCKS)
        assert account(config.replace(L=limit), system, policy, BLOCKS).peak_bytes <= capacity
        assert account(config.replace(L=limit + 1), system, policy, BLOCKS).peak_bytes > capacity


def test_largest_tokens_stops_at_the_int32_indices():
    config = MoEConfig(L=1, d=1, h=1, E=2, k=2, activation="relu")
    assert largest_tokens(config, "moeblaze", "inputs", 10**15) == (2**31 - 1024) // 2


def test_largest_tokens_ignores_given_counts_but_not_the_capacity_factor():
    limits = [
        largest_tokens(SMALL, "capacity", None, GB, Assumptions(counts, factor))
        for counts, factor in ((None, 1), (COUNTS, 1), (None, 2))
    ]
    assert limits[0] == limits[1] > limits[2]


def test_ratio():
    conventional, minimal = account(SMALL, "conventional"), account(SMALL, "moeblaze", "minimal")
    assert ratio(minimal, conventional) == 640 / 1488
    nothing = account(SMALL.replace(L=0), "conventional")
    assert math.isnan(ratio(nothing, nothing))


# Formula against measurement ------------------------------------------------------------------------------------------


def expected_storages(one):
    """Dtype and bytes of what an account says is kept, in the order of `found_storages`."""
    return sorted((tensor.dtype, tensor.bytes) for tensor in one.tensors if tensor.kept and tensor.bytes)


def found_storages(module, *arguments):
    return sorted((kept.dtype, kept.bytes) for kept in measure.kept_storages(module, *arguments) if kept.bytes)


def check_against_autograd(config, renormalize):
    """Every kept storage, the sum and the peak, to the byte."""
    expected = account(config, "conventional", assumptions=Assumptions(router=Router(renormalize=renormalize)))
    module, x = oracle(config, renormalize)
    assert found_storages(module, x) == expected_storages(expected)
    assert measure.kept_bytes(module, x) == expected.kept_bytes
    assert measure.peak_bytes(module, x) == expected.peak_bytes


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_conventional_is_what_autograd_keeps(activation, dtype, renormalize):
    check_against_autograd(MoEConfig(*ODD, activation, dtype), renormalize)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_conventional_is_what_autograd_keeps_of_odd_shapes(shape, activation):
    check_against_autograd(MoEConfig(*shape, activation, "bfloat16"), renormalize=False)


@pytest.mark.parametrize("factor", [0.4, 1.25])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_capacity_is_what_autograd_keeps(activation, dtype, renormalize, factor):
    for shape in ((0, *ODD[1:]), (1, *ODD[1:]), ODD):
        config = MoEConfig(*shape, activation, dtype)
        assumptions = Assumptions(capacity_factor=factor, router=Router(renormalize=renormalize))
        one = account(config, "capacity", assumptions=assumptions)
        sizes = (config.d, config.h, config.E, config.k, activation, renormalize)
        layer = CapacityMoE(*sizes, capacity_factor=factor, dtype=getattr(torch, dtype))
        assert found_storages(layer, input_of(config)) == expected_storages(one)


# Routed rows of each expert: zipf, one that has all, whole blocks of 8, a row more than that and less, none.
ROUTED = [(37, 20, 10, 4, 3), (37, 37, 0, 0, 0), (16, 16, 16, 16, 10), (17, 15, 1, 37, 4), (0, 0, 0, 0, 0)]


@pytest.mark.parametrize("counts", ROUTED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_megablocks_is_what_autograd_keeps(activation, dtype, counts):
    E, k = len(counts), 2
    config = MoEConfig(sum(counts) // k, 16, 24, E, k, activation, dtype)
    layer = BlockSparseMoE(config.d, config.h, E, k, activation, block=8, dtype=getattr(torch, dtype))
    one = account(config, "megablocks", assumptions=Assumptions(counts, block=8))
    assert found_storages(layer, input_of(config), measure.routing_of(counts, k)) == expected_storages(one)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moeblaze_is_what_the_specification_keeps(activation, dtype, policy):
    config = MoEConfig(*ODD, activation, dtype)
    L, d, h, E = config.L, config.d, config.h, config.E
    rng = np.random.default_rng(0)
    shapes = {"wg": (d, E), "w1": (E, d, h), "w2": (E, d, h) if config.gated else None, "w3": (E, h, d)}
    weights = {name: shape and rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    x = rng.standard_normal((L, d)).astype(dtype)
    saved = layer.forward(x, MoEWeights(**weights), config.k, activation, policy).saved
    found = {name: (array.shape, str(array.dtype), array.nbytes) for name, array in saved.tensors().items()}
    kept = (tensor for tensor in account(config, "moeblaze", policy).tensors if tensor.kept)
    assert {tensor.name: (tensor.shape, tensor.dtype, tensor.bytes) for tensor in kept} == found


def test_what_runs_here_is_measured_beside_its_account():
    config = MoEConfig(37, 16, 24, 5, 2, dtype="float32")
    found = [measured(one) for one in accounts(config, assumptions=Assumptions((37, 20, 10, 4, 3), block=8))]
    assert [one.account.label for one in found if one.kept_bytes is None] == ["megablocks_published", "sonicmoe"]
    assert len(found) == len(VARIANTS)
    assert all(one.kept_bytes in (None, one.account.kept_bytes) for one in found)


@pytest.mark.parametrize(
    ("config", "system", "remark"),
    [
        (SMALL, "megablocks_published", "no layer here computes it so"),
        (SMALL.replace(dtype="float64"), "megablocks", "the layer does not compute in float64"),
        (SMALL.replace(dtype="float64"), "capacity", ""),
        (preset("conf4").config, "conventional", "too much work for a CPU"),
    ],
)
def test_what_cannot_be_measured_says_why(config, system, remark):
    one = measured(account(config, system, assumptions=BLOCKS))
    assert one.remark == remark and (one.kept_bytes is None) == bool(remark)


@pytest.mark.parametrize("counts", ROUTED, ids=str)
def test_a_routing_has_the_counts_that_it_is_made_of(counts):
    routing = measure.routing_of(counts, 2)
    assert torch.bincount(routing.flatten(), minlength=5).tolist() == list(counts)
    assert (routing[:, 0] != routing[:, 1]).all() and routing.dtype == torch.int32


def test_measurements_are_shown_beside_the_formulas():
    found = accounts(SMALL, ["megablocks_published", "capacity"], BLOCKS)
    measurements = [Measured(found[0], 1_502, ""), Measured(found[1], None, "not run")]
    data = report.as_json("small", SMALL, found, [], measurements)
    assert [one["measured_bytes"] for one in data["systems"]] == [1_502, None]
    words = [line.split() for line in printed(SMALL, found, [], measurements).splitlines()]
    formulas = [one.kept_bytes for one in found]
    assert [found[0].label, f"{formulas[0]:,}", "1,502", f"{1_502 - formulas[0]:+,}"] in words
    assert [found[1].label, f"{formulas[1]:,}", "not", "run", "-"] in words


# The measurement itself -----------------------------------------------------------------------------------------------


def test_kept_bytes_counts_a_storage_once_and_whole():
    x = torch.randn(10, 3, requires_grad=True)

    def twice(x):
        return x * x, x[:1] * x[:1]  # four saved tensors, two of them views of one row

    assert measure.kept_storages(twice, x) == [measure.KeptStorage((10, 3), "float32", 120)]
    assert measure.kept_bytes(lambda x: x[:1].exp() * 2, x) == 12  # exp saves its result, not its input


def test_kept_bytes_excludes_parameters_alone():
    linear = torch.nn.Linear(4, 5)
    x = torch.randn(7, 4, requires_grad=True)
    assert measure.kept_bytes(linear, x) == 7 * 4 * 4
    assert measure.kept_bytes(lambda x: linear(x), x) == 7 * 4 * 4 + 5 * 4 * 4
    assert measure.kept_bytes(linear, x, exclude=[x]) == 5 * 4 * 4


def test_kept_bytes_never_merges_storages_that_share_an_address_in_turn():
    x = torch.randn(1000, requires_grad=True)

    def dropping(x):
        for _ in range(8):
            x.exp()  # its result is saved and dropped at once: the next one could take its address
        return x

    assert measure.kept_bytes(dropping, x) == 8 * 4000


def test_watching_changes_no_gradient():
    module, x = oracle(MoEConfig(*ODD, "relu2", "float64"))
    with measure.SavedStorages(module.parameters()):
        out, _ = module(x)
    watched = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    plain = torch.autograd.grad(module(x)[0].sum(), [x, *module.parameters()])
    assert all(torch.equal(one, other) and one.norm() > 0 for one, other in zip(watched, plain, strict=True))


def test_watching_leaks_nothing():
    x = torch.randn(10, requires_grad=True)
    with measure.SavedStorages() as saved:
        result = x.exp()  # saves its own result
    storage = StorageWeakRef(result.untyped_storage())
    assert not storage.expired()
    del result, saved
    assert storage.expired()


def test_nothing_is_kept_without_gradients():
    module, x = oracle(SMALL)
    with torch.no_grad():
        assert measure.kept_bytes(module, x) == 0


def test_peak_bytes_sees_what_is_freed():
    x = torch.randn(1000)
    assert measure.peak_bytes(lambda x: (x + 1).sum(), x) == 8004  # x, x + 1, the sum
    assert measure.peak_bytes(lambda x: ((x + 1) + 1) + 1, x) == 12_000  # x and two of the three at a time
    assert measure.peak_bytes(lambda x: x.view(10, 100).t()[1:], x) == 4000


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: account(SMALL, "megablock"), "unknown system 'megablock'. Did you mean 'megablocks'?"),
        (lambda: account(SMALL, "moeblaze", "minimum"), "unknown policy 'minimum'. Did you mean 'minimal'?"),
        (lambda: account(SMALL, "moeblaze"), "unknown policy None"),
        (lambda: account(SMALL, "capacity", "paper"), "capacity has no save policies"),
        (lambda: accounts(SMALL, ["moeblaze", "capacty"]), "Did you mean 'capacity'?"),
        (lambda: Assumptions(capacity_factor=0), "capacity_factor is 0.0, but it must be above 0"),
        (lambda: Assumptions(capacity_factor=-1.0), "capacity_factor is -1.0"),
        (lambda: Assumptions(block=0), "block is 0, but it must be >= 1"),
        (lambda: account(SMALL, "megablocks"), "h is 8, but it must be a multiple of the block size 128"),
        (lambda: Assumptions(capacity_factor=math.nan), "capacity_factor is nan"),
        (lambda: account(SMALL, "capacity", None, Assumptions((6, 6))), "counts has 2 entries, but there are 3"),
        (lambda: account(SMALL, "capacity", None, Assumptions((7, 4, 1))), r"counts[0] is 7, but it must be 0..6"),
        (lambda: account(SMALL, "megablocks", None, Assumptions((6, 7, -1))), r"counts[1] is 7"),
        (lambda: account(SMALL, "megablocks", None, Assumptions((6, 4, 1))), "counts add up to 11, but L * k = 6 * 2"),
        (lambda: largest_tokens(SMALL, "moeblaze", "paper", 0), "capacity_bytes is 0, but it must be >= 1"),
        (lambda: largest_tokens(SMALL, "moeblaze", "paper", 3), "capacity_bytes is 3, but even L = 0 needs"),
        (lambda: report.preset_notes("conf33"), "unknown preset 'conf33'. Did you mean 'conf3'?"),
        (lambda: plots.stacked_bars([]), "accounts is empty"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Assumptions(capacity_factor="big"), "capacity_factor is 'big' (str)"),
        (lambda: Assumptions(block=8.0), "block is 8.0 (float)"),
        (lambda: account(SMALL, "capacity", None, Assumptions((6, 4.0, 2))), "counts[1] is 4.0 (float)"),
        (lambda: largest_tokens(SMALL, "moeblaze", "paper", 8e10), "capacity_bytes is 80000000000.0 (float)"),
    ],
)
def test_bad_types(call, message):
    with pytest.raises(TypeError) as error:
        call()
    assert message in str(error.value)


def test_counts_may_be_arrays():
    for counts in (np.array(COUNTS, dtype=np.int32), torch.tensor(COUNTS)):
        one = account(SMALL, "megablocks", assumptions=Assumptions(counts, block=4))
        assert one.tensors == account(SMALL, "megablocks", assumptions=Assumptions(COUNTS, block=4)).tensors
        json.dumps(report.as_json("small", SMALL, [one], []))


# JSON and tables ------------------------------------------------------------------------------------------------------


def test_json_has_the_promised_shape():
    found = accounts(SMALL, assumptions=BLOCKS)
    data = json.loads(json.dumps(report.as_json("small", SMALL, found, ["a note"])))
    assert data.keys() == {"preset", "tokens", "notes", "systems"}
    assert (data["preset"], data["tokens"], data["notes"][0]) == ("small", 6, "a note")
    notes = [note for one in found for note in one.notes]
    assert sorted(data["notes"][1:]) == sorted(set(notes)) and len(set(notes)) == len(SYSTEMS)
    assert [(one["system"], one["policy"]) for one in data["systems"]] == list(VARIANTS)
    for one, system in zip(found, data["systems"], strict=True):
        assert system.keys() == {
            "system", "policy", "kept_bytes", "measured_bytes", "transient_bytes", "tensors"
        }  # fmt: skip
        assert (system["kept_bytes"], system["transient_bytes"]) == (one.kept_bytes, one.transient_bytes)
        for tensor, row in zip(one.tensors, system["tensors"], strict=True):
            fields = {name: getattr(tensor, name) for name in ("name", "dtype", "formula", "bytes", "kept")}
            assert row == fields | {"shape": list(tensor.shape)}


def test_notes_say_what_the_paper_prints():
    routed, hidden = report.preset_notes("paper-deepseek")[1:]
    assert "98,304,000,000 bytes = 98.304 GB = 91.553 GiB; the paper prints about 94 GB" in routed
    assert "L*h*2 = 98,304,000,000 bytes = 98.304 GB = 91.553 GiB; the paper prints about 98 GB" in hidden
    assert "k = 4 rows per token" in hidden and "L*k*h*2 = 393,216,000,000 bytes = 393.216 GB" in hidden
    conf3 = " ".join(report.preset_notes("conf3"))
    assert "6,442,450,944 bytes" in conf3 and "about 10,000 MB" in conf3 and "more than 40,000 MB" in conf3
    conf4 = " ".join(report.preset_notes("conf4"))
    assert "6,100 MB" in conf4 and "22,000 MB" in conf4
    assert report.preset_notes("mixtral") == [PRESETS["mixtral"].note]


def printed(*arguments):
    console = Console(width=100, file=io.StringIO())
    console.print(report.tables(*arguments))
    return console.file.getvalue()


@pytest.mark.parametrize("name", PRESETS)
def test_tables_fit_100_columns_and_hold_every_row(name):
    config = preset(name).config
    assumptions = whole_blocks(config)
    found = accounts(config, assumptions=assumptions)
    text = printed(config, found, report.preset_notes(name))
    lines = text.splitlines()
    assert "…" not in text and max(map(len, lines)) <= 100
    words = [line.split() for line in lines]
    unit = unit_for(max(one.peak_bytes for one in found))
    for one in found:
        for tensor in one.tensors:
            shape = " x ".join(map(str, tensor.shape)).split()
            life = "kept" if tensor.kept else "transient"
            assert [tensor.name, *shape, tensor.dtype, *tensor.formula.split(), f"{tensor.bytes:,}", life] in words
        most = (largest_tokens(config, one.system, one.policy, size, assumptions) for size in GPU_CAPACITIES.values())
        limits = [f"{tokens:,}" for tokens in most]
        totals = [unit.text(total) for total in (one.kept_bytes, one.transient_bytes, one.peak_bytes)]
        share = ratio(one, account(config, "conventional"))
        assert [one.label, *totals, f"{share:.3f}", *limits] in words


def test_tables_of_no_tokens():
    config = SMALL.replace(L=0)
    assert "conventional 0.000" in " ".join(printed(config, accounts(config, assumptions=BLOCKS), []).split())


def test_a_unit_keeps_three_digits_and_suits_the_largest_number():
    gib = UNITS[0].text
    assert [gib(n) for n in (0, GIB, 3 * GIB // 2000, 2000 * GIB)] == ["0.000", "1.000", "0.0015", "2,000.000"]
    assert [unit_for(n).name for n in (0, KIB, 200 * KIB, 99 * MIB, 200 * MIB, 5000 * GIB)] == [
        "KiB", "KiB", "MiB", "MiB", "GiB", "GiB"
    ]  # fmt: skip


# Plots ----------------------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_the_kept_bytes():
    found = accounts(preset("conf3").config)
    figure = plots.stacked_bars(found)
    (axes,) = figure.axes
    bars = {container.get_label(): container for container in axes.containers if container.get_label() != ""}
    for row, one in enumerate(found):
        kept = kept_sizes(one)
        for name in set(plots.TENSOR_COLORS) - {plots.REST}:
            assert bars[name][row].get_width() * GIB == pytest.approx(kept.get(name, 0))
            assert to_hex(bars[name][row].get_facecolor()).upper() == plots.TENSOR_COLORS[name]
        assert bars[plots.REST][row].get_x() + bars[plots.REST][row].get_width() == pytest.approx(one.kept_bytes / GIB)
    assert [label.get_text() for label in axes.get_yticklabels()] == [one.label for one in found]
    ticks = list(axes.collections[1].get_offsets()[:, 0])
    assert ticks == pytest.approx([one.peak_bytes / GIB for one in found])
    assert "GiB" in axes.get_xlabel()
    texts = {text.get_text() for text in axes.texts}
    text = UNITS[0].text
    assert {f"{text(one.kept_bytes)} kept, {text(one.peak_bytes)} peak" for one in found} <= texts


def test_lines_are_the_peaks_and_dots_are_the_largest_tokens():
    config = preset("fine-grained").config
    (axes,) = plots.bytes_against_tokens(config).axes
    lines = {line.get_label(): line for line in axes.lines}
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    labels = " ".join(text.get_text() for text in axes.texts)
    for (system, policy), found in zip(VARIANTS, dots, strict=True):
        line = lines["/".join(filter(None, (system, policy)))]
        for tokens, gigabytes in zip(*line.get_data(), strict=True):
            assert gigabytes == account(config.replace(L=int(tokens)), system, policy).peak_bytes / GB
        limits = [largest_tokens(config, system, policy, capacity) for capacity in GPU_CAPACITIES.values()]
        assert (list(found.get_xdata()), list(found.get_ydata())) == (limits, [80, 141])
        assert line.get_color() == found.get_color() == plots.SYSTEM_COLORS[system]
        assert f"{limits[0]:,} tokens in 80 GB" in labels
    levels = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    assert levels == [80, 141] and "141 GB" in labels
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_every_system_and_policy_has_its_style_and_tensors_are_told_apart_in_grey():
    assert plots.SYSTEM_COLORS.keys() == SYSTEMS.keys()
    assert plots.POLICY_LINES.keys() == {None, *POLICIES}
    assert len(set(plots.TENSOR_COLORS.values())) == len(plots.TENSOR_COLORS)
    assert_told_apart_in_grey(plots.stacked_bars(accounts(preset("conf4").config)))


@pytest.mark.parametrize("tokens", [0, 1, 512])
def test_plots_of_few_tokens_render(tokens):
    config = MoEConfig(L=tokens, d=64, h=128, E=8, k=2, dtype="float32")
    for figure in (plots.stacked_bars(accounts(config)), plots.bytes_against_tokens(config)):
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        assert picture.getbuffer().nbytes > 10_000
