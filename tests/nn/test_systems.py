"""The systems beside MoEBlaze: what their layers keep, what they compute, and what the account makes of the papers."""

import numpy as np
import pytest
import torch
from helpers import SHAPES, Shape
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layers import gradients, make_layer, make_x, same_bits

from moeblaze_ref.backends.numpy_ref import capacity as specification
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.bench import timed_systems
from moeblaze_ref.core.config import ACTIVATIONS, PAPER_PRESETS, MoEConfig, preset
from moeblaze_ref.core.routers import Router
from moeblaze_ref.memory import measure, waste
from moeblaze_ref.memory.accounting import Assumptions, account
from moeblaze_ref.memory.measured import measured
from moeblaze_ref.nn import systems
from moeblaze_ref.nn.torch_capacity import CapacityMoE, DynamicCapacityMoE
from moeblaze_ref.nn.torch_memory_optimized import MemoryOptimizedMoE
from moeblaze_ref.nn.torch_sequential import SequentialMoE
from moeblaze_ref.systems import capacity
from moeblaze_ref.verify import check, comparisons
from moeblaze_ref.verify.cases import make_case, relative_error

NEW = {  # by the name of the system: that of its check
    "sequential": "torch_sequential",
    "dynamic_capacity": "torch_dynamic_capacity",
    "megablocks_memory_optimized": "torch_memory_optimized",
}
BLOCK = 8  # divides every h of the small layers


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_memory_optimized_megablocks_keeps_no_activation(activation):
    """Beside the published one it lacks act(a) and y_swi, and has a of the relus."""
    config = preset("conf4").config.replace(activation=activation)
    sizes = [
        {tensor.name: tensor.bytes for tensor in account(config, system).tensors if tensor.kept}
        for system in ("megablocks_published", "megablocks_memory_optimized")
    ]
    published, optimized = sizes
    assert published.keys() - optimized.keys() == {"y_swi"} | ({"act_a"} & published.keys())
    assert optimized.keys() - published.keys() == ({"a"} if "relu" in activation or activation == "reglu" else set())
    assert all(optimized[name] == published[name] for name in optimized.keys() & published.keys())


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_sonicmoe_keeps_x_and_both_projections(activation):
    config = preset("conf3").config.replace(activation=activation)
    sizes = {tensor.name: tensor.bytes for tensor in account(config, "sonicmoe").tensors if tensor.kept}
    values = sum(sizes.pop(name, 0) for name in ("x", "a", "b"))
    assert values == 2 * config.L * config.d + (4 if config.gated else 2) * config.R * config.h
    assert sum(sizes.values()) < 0.01 * values


def test_the_dynamic_capacity_is_the_longest_queue():
    config, counts = MoEConfig(L=20, d=4, h=8, E=4, k=2), (20, 11, 9, 0)
    one = account(config, "dynamic_capacity", assumptions=Assumptions(counts))
    assert one.symbols["C"] == 20
    assert "C = the most rows of an expert = 20" in one.notes[0]
    assert "0 of 40 routed rows are dropped, and 40 rows are padding" in one.notes[0]
    named = account(config, "capacity", assumptions=Assumptions(counts, capacity_factor="max"))
    assert named.tensors == one.tensors
    assert account(config, "dynamic_capacity").symbols["C"] == 10  # uniform routing


# What the layers keep


def scaled_down(name, activation, dtype):
    """A configuration of the paper's Table 1 with its E and k, small, and the counts of a skewed routing."""
    full = preset(name).config
    sizes = {"L": full.L // 1024, "d": full.d // 64, "h": full.h // 64, "E": full.E, "k": full.k}
    chosen = make_case(**sizes, routing="zipf").topk_experts
    counts = np.bincount(chosen.ravel(), minlength=full.E).tolist()
    assert len(set(counts)) > 1
    return MoEConfig(**sizes, activation=activation, dtype=dtype), Assumptions(counts, block=BLOCK)


@pytest.mark.parametrize("system", NEW)
@pytest.mark.parametrize("activation", ["relu", "silu", "swiglu"])
@pytest.mark.parametrize("name", PAPER_PRESETS)
def test_a_layer_keeps_what_its_account_says(name, activation, system):
    for dtype in ("bfloat16", "float32"):
        config, assumptions = scaled_down(name, activation, dtype)
        one = account(config, system, assumptions=assumptions)
        found = measured(one)
        assert found.kept_bytes == one.kept_bytes > 0


@pytest.mark.parametrize("policy", ["paper", "minimal"])
@pytest.mark.parametrize("name", PAPER_PRESETS)
def test_relu_keeps_y_swi_alone(name, policy):
    config, assumptions = scaled_down(name, "relu", "bfloat16")
    one = account(config, "moeblaze", policy, assumptions)
    assert [tensor.name for tensor in one.tensors if tensor.kept and "h" in tensor.formula.split("*")] == ["y_swi"]
    assert measured(one).kept_bytes == one.kept_bytes


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_torch_keeps_what_its_account_says(activation, dtype, renormalize):
    for tokens in (0, 1, 37):
        config = MoEConfig(tokens, 16, 24, 5, 2, activation, dtype)
        for system in ("sequential", "dynamic_capacity"):
            counts = make_case(tokens, 16, 24, 5, 2, "zipf").topk_experts.ravel()
            routing = np.bincount(counts, minlength=5).tolist()
            one = account(config, system, assumptions=Assumptions(routing, router=Router(renormalize=renormalize)))
            assert measured(one).kept_bytes == one.kept_bytes


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_every_tensor_of_the_memory_optimized_megablocks(activation):
    config, assumptions = scaled_down("conf5", activation, "bfloat16")
    layer = MemoryOptimizedMoE(config.d, config.h, config.E, config.k, activation, block=BLOCK, dtype=torch.bfloat16)
    x = torch.randn(config.L, config.d, dtype=torch.bfloat16, requires_grad=True)
    found = measure.kept_storages(layer, x, measure.routing_of(assumptions.counts, config.k))
    one = account(config, "megablocks_memory_optimized", assumptions=assumptions)
    expected = sorted((tensor.dtype, tensor.bytes) for tensor in one.tensors if tensor.kept)
    assert sorted((storage.dtype, storage.bytes) for storage in found) == expected


# What the layers compute


def rows_of(system, case, dtype):
    return list(check.check_gradients(BACKENDS["simt"], None, case, dtype, NEW[system]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("system", NEW)
def test_output_and_gradients_are_the_oracles(system, activation, dtype):
    rows = rows_of(system, Shape(37, 16, 24, 5, 3, "zipf").case(activation), dtype)
    assert [(row.stage, row.direction) for row in rows] == [(NEW[system], "forward"), (NEW[system], "backward")]
    assert check.passed(rows), rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("system", NEW)
def test_every_shape_agrees_with_the_oracle(system, shape):
    rows = rows_of(system, shape.case(), "float32")
    assert check.passed(rows), rows


def skips_the_last_row(rows):
    rows = rows.clone()
    rows[-1:] = 0.0
    return rows


# A fault: where it is planted, and what takes the function's place, given the function.
FAULTS = {
    "sequential": ("moeblaze_ref.nn.oracle.activate", lambda right: lambda *given: skips_the_last_row(right(*given))),
    "dynamic_capacity": (
        "moeblaze_ref.nn.torch_capacity.DynamicCapacityMoE._rows_of_expert",
        lambda right: lambda *given: right(*given) - 1,
    ),
    "megablocks_memory_optimized": (
        "moeblaze_ref.nn.torch_memory_optimized._bins",
        lambda right: lambda *tables, rows: _in_another_order(right(*tables, rows)),
    ),
}


def _in_another_order(bins):
    """The first two routed rows have each other's slot."""
    rows = bins["rows"].clone()
    rows[[0, 1]] = rows[[1, 0]]
    return bins | {"rows": rows}


@pytest.mark.parametrize("system", NEW)
def test_a_planted_fault_is_caught(system, monkeypatch):
    case = Shape(37, 16, 24, 5, 3, "zipf").case()
    steps = [step.astype("float32") for step in case.steps()]
    expected = {step.name: comparisons.expect_torch_layer(step, torch.float64) for step in steps}
    place, damage = FAULTS[system]
    owner, name = place.rsplit(".", 1)
    monkeypatch.setattr(place, damage(getattr(_resolved(owner), name)))
    layer = comparisons.TORCH_LAYERS[NEW[system]]._replace(expect=lambda case, dtype: expected[case.name])
    monkeypatch.setitem(comparisons.TORCH_LAYERS, NEW[system], layer)  # the fault may be in both
    assert not check.passed(rows_of(system, case, "float32"))


def _resolved(path):
    """A module or a class, by its full name."""
    module, _, name = path.rpartition(".")
    return __import__(path, fromlist=["_"]) if name.islower() else getattr(__import__(module, fromlist=["_"]), name)


def out_and_gradients(layer, x):
    return {"out": layer(x).out, **gradients(layer, x)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computing_the_activation_again_changes_no_bit(dtype):
    x = make_x(dtype=dtype)
    layers = [make_layer(system, dtype=dtype) for system in ("megablocks_memory_optimized", "megablocks")]
    found, expected = (out_and_gradients(layer, x) for layer in layers)
    assert same_bits(found, expected) and all(tensor.any() for tensor in found.values())


@pytest.mark.parametrize("system", ["sequential", "dynamic_capacity"])
def test_the_same_input_gives_the_same_bits(system):
    layer, x = make_layer(system), make_x()
    assert same_bits(out_and_gradients(layer, x), out_and_gradients(layer, x))


class Waits(TorchDispatchMode):
    """Counts the operators for which a host waits: those whose result is a number, or has a size that data decide."""

    WAITING = ("aten._local_scalar_dense.default", "aten.nonzero.default")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += str(operator) in self.WAITING
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("system", "times"), [("capacity", 0), ("dynamic_capacity", 1), ("sequential", 5)])
def test_how_often_the_host_waits(system, times):
    layer, x = make_layer(system), make_x()
    with Waits() as waits:
        layer(x)
    assert waits.count == times


# Dynamic capacity


def test_the_dynamic_capacity_drops_nothing_where_a_fixed_one_does():
    case = Shape(37, 16, 24, 5, 2, "zipf").case()
    chosen = torch.from_numpy(case.topk_experts).int()
    x = torch.tensor(case.x, dtype=torch.float32)
    dynamic, sequential = (make_layer(system, k=2) for system in ("dynamic_capacity", "sequential"))
    fixed = make_layer("capacity", k=2, capacity_factor=1.0)
    found, dropping, expected = (module(x, chosen).out.detach() for module in (dynamic, fixed, sequential))
    assert relative_error(found, expected) < 1e-5 < relative_error(dropping, expected)
    assert dynamic.dropped_slots == dynamic.lost_tokens == 0 < fixed.dropped_slots
    counts = np.bincount(case.topk_experts.ravel(), minlength=5).tolist()
    config = MoEConfig(37, 16, 24, 5, 2)
    lost = timed_systems.losses(dynamic, config, chosen)
    assert lost == timed_systems.Losses(0, 0, 5 * max(counts) - 74) and lost.padding_rows > 0
    assert timed_systems.kept_choices(dynamic, x, chosen).all()
    assert timed_systems.losses(sequential, config, chosen) == timed_systems.Losses()


def test_the_specification_takes_the_longest_queue_too():
    case = Shape(37, 16, 24, 5, 2, "zipf").case()
    dispatch, gates = build_by_sort(case.topk_experts, 5), np.full((37, 2), 0.5)
    operands = (case.x, *case.weights[1:], dispatch, gates, case.activation)
    out, saved = specification.forward(*operands, "max")
    all_rows, roomy = specification.forward(*operands, 5 / 2)  # E / k
    assert saved.bins.C == np.bincount(case.topk_experts.ravel()).max() < roomy.bins.C == 37
    assert relative_error(out, all_rows) < 1e-14
    counts = np.diff(dispatch.expert_token_offsets)
    assert waste.capacity_waste(MoEConfig(37, 16, 24, 5, 2), counts, "max").dropped_rows == 0


NUMBER_OR_MAX = "but it must be a number or 'max'"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: CapacityMoE(8, 16, 4, 2, capacity_factor="most"), TypeError, "'most' .str., " + NUMBER_OR_MAX),
        (lambda: Assumptions(capacity_factor="MAX"), TypeError, "'MAX' .str., " + NUMBER_OR_MAX),
        (lambda: capacity.capacity_for((3, 1), "min"), TypeError, "'min' .str., " + NUMBER_OR_MAX),
        (lambda: capacity.expert_capacity(8, 4, "max"), ValueError, "needs the experts' counts: use capacity_for"),
        (lambda: DynamicCapacityMoE(8, 16, 4, 2, capacity_factor=2.0), TypeError, "unexpected keyword argument"),
        (lambda: DynamicCapacityMoE(8, 16, 4, 5), ValueError, "k is 5, but there are only 4 experts"),
        (lambda: SequentialMoE(8, 16, 4, 5), ValueError, "k is 5, but there are only 4 experts"),
        (lambda: SequentialMoE(8, 16, 4, 2, "swish"), ValueError, "unknown activation 'swish'. Did you mean 'swiglu'"),
        (lambda: SequentialMoE(8, 16, 4, 2, dtype=torch.int32), TypeError, "dtype is torch.int32, but it must be"),
        (lambda: MemoryOptimizedMoE(8, 24, 4, 2, block=16), ValueError, "h is 24, but it must be a multiple"),
        (lambda: SequentialMoE(8, 16, 4, 2)(torch.zeros(3, 9)), ValueError, "x has shape .3, 9., but it must be"),
        (lambda: account(preset("conf1").config, "sonicmoe", "minimal"), ValueError, "sonicmoe has no save policies"),
        (lambda: account(preset("conf1").config, "sequentail"), ValueError, "Did you mean 'sequential'?"),
        (lambda: systems.system("dynamic-capacity"), ValueError, "Did you mean 'dynamic_capacity'?"),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
