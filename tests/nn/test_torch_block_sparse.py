"""MegaBlocks' torch layer: gradients against the oracle, and the company of torch's own machinery."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from over_tensors import BridgeOverTensors
from stages import alter
from torch_layers import SIZES, L, gradients, loss_of, make_x, same_bits
from torch_layers import make_layer as make_system

from moeblaze_ref.backends.raw_cuda import block_sparse
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.lm.train import train
from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import Assumptions, megablocks_step_account
from moeblaze_ref.memory.waste import compare
from moeblaze_ref.nn import systems, torch_node
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.systems import megablocks
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import every_activation, relative_error

make_layer = partial(make_system, "megablocks")


# Against the oracle


def rows_of(case, dtype):
    return list(check.check_gradients(BACKENDS["simt"], None, case, dtype, "torch_block_sparse"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", every_activation(), ids=lambda case: case.name)
def test_every_activation_and_dtype_agrees_with_autograd(case, dtype):
    rows = rows_of(case, dtype)
    assert [(row.stage, row.direction) for row in rows] == [
        ("torch_block_sparse", "forward"),
        ("torch_block_sparse", "backward"),
    ]
    assert check.passed(rows), rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradients_of_7_persistent_are_checked_on_hopper(dtype, monkeypatch):
    load, loaded = SimtExecutor.load, []

    def witnessed(self, file, *arguments, **constants):
        loaded.append(file)
        return load(self, file, *arguments, **constants)

    monkeypatch.setattr(SimtExecutor, "capability", (9, 0))
    monkeypatch.setattr(SimtExecutor, "load", witnessed)
    jobs = [job for job in check.plan_gradients(["simt"]) if in_whole_blocks(job, dtype)]
    assert [job.args[-1].block for job in jobs] == [None, 256]  # blocks of a tile, and of two
    for job in jobs:
        loaded.clear()
        assert check.passed([*job()])
        assert "block_sparse/7_persistent.cu" in loaded


@pytest.mark.parametrize("integer", [np.int8, np.uint8])
def test_a_block_size_of_few_bits_is_an_integer(integer):
    layer = make_layer(h=256, block=integer(64))
    assert type(layer.block) is int and layer.block == 64
    config = MoEConfig(L, **(SIZES | {"h": 256}))
    assert compare(config, (23, 22, 22, 22, 22), block=integer(64)) == compare(config, (23, 22, 22, 22, 22), block=64)
    assert Assumptions(block=integer(64)) == Assumptions(block=64)


def test_a_truth_value_is_no_size():
    config = MoEConfig(L, **SIZES)
    for name, call in {
        "block": lambda: make_layer(block=True),
        "k": lambda: make_layer(k=True),
        "block ": lambda: Assumptions(block=True),
        "block is": lambda: compare(config, (23, 22, 22, 22, 22), block=True),
        "capacity_factor": lambda: compare(config, (23, 22, 22, 22, 22), True, 8),
    }.items():
        with pytest.raises(TypeError, match=name):
            call()


def in_whole_blocks(job, dtype):
    """Whether a job of the plan is MegaBlocks' layer in this dtype on a case that 7_persistent takes."""
    checks, _, layer, _, case = job.args
    whole = case.weights.w1.shape[2] % block_sparse.BLOCK == 0
    return layer == "torch_block_sparse" and checks.keywords["dtype"] == dtype and whole


def last_row_zero(array):
    array.reshape(-1, array.shape[-1])[-1] = 0


def all_zero(array):
    array.fill(0)


FAULTS = [
    *itertools.product(("d_x", "d_w1", "d_w2", "d_w3", "d_gates"), (all_zero, last_row_zero)),
    ("d_logits", all_zero),
]


@pytest.mark.parametrize(("name", "damage"), FAULTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_gradient_that_is_damaged_is_caught(name, damage, monkeypatch):
    def faulty(backward, *arguments, **options):
        found = backward(*arguments, **options)
        damage(found if name == "d_logits" else getattr(found, name))
        return found

    if name == "d_logits":
        alter(monkeypatch, "simt", "gating.backward", lambda backward: partial(faulty, backward))
    else:
        monkeypatch.setattr(megablocks, "backward", partial(faulty, megablocks.backward))
    assert not check.passed(rows_of(every_activation()[0], "float32"))


@pytest.mark.parametrize("options", [{}, {"renormalize": True}, {"activation": "gelu"}], ids=str)
def test_it_is_the_same_layer_as_moeblaze(options):
    ours, x = make_layer(**options), make_x()
    other = make_system(**options)
    other.load_state_dict(ours.state_dict())
    found, expected = gradients(ours, x), gradients(other, x)
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6, name
    assert torch.equal(ours(x).topk_experts, other(x).topk_experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_torchs_own_tensors_give_what_numpys_arrays_give(activation, dtype, monkeypatch):
    layer, x = make_layer(activation=activation, dtype=dtype), make_x(dtype=dtype)
    expected = gradients(layer, x) | {"out": layer(x).out}
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: BridgeOverTensors())
    found = gradients(layer, x) | {"out": layer(x).out}
    kept = measure.kept_storages(layer, x)
    monkeypatch.undo()
    for name in expected:  # the router's products are by another library
        error = relative_error(found[name].detach().double(), expected[name].detach().double())
        assert error < (1e-6 if dtype == torch.float32 else 2**-9), name
    assert kept == measure.kept_storages(layer, x)


# By what is largest where the peak is: what lies between the projections, padded rows, the weights.
PEAKS = {"hidden": {}, "rows": {"d": 64, "h": 8}, "weights": {"E": 40, "k": 1}}


@pytest.mark.parametrize("largest", PEAKS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_peak_of_a_step_is_the_accountings(activation, largest, monkeypatch):
    """To the 16 bytes that sums take: of the output, and of the two losses, which nobody uses."""
    sizes = SIZES | PEAKS[largest]
    layer, x = make_layer(activation=activation, **PEAKS[largest]), make_x(L, sizes["d"])
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: BridgeOverTensors())
    counts = layer(x).topk_experts.flatten().bincount(minlength=sizes["E"]).tolist()
    one = megablocks_step_account(
        MoEConfig(L, **sizes, activation=activation, dtype="float32"), Assumptions(counts, block=8)
    )

    def step(**options):
        return torch.autograd.grad(layer(x).out.sum(), [x, *layer.parameters()], **options)

    peak, of_all = (
        measure.peak_bytes(work, exclude=layer.parameters()) for work in (step, lambda: step(retain_graph=True))
    )
    assert one.peak_bytes <= peak <= one.peak_bytes + 16
    assert of_all > peak + layer(x).out.nbytes  # what is kept to the end would be seen


# Torch's machinery


def test_a_routing_that_is_given_is_replayed():
    layer, x = make_layer(renormalize=True), make_x()
    given = torch.tensor([[4, 2, 0], [3, 4, 1]] * L, dtype=torch.int32)[:L]
    other = make_system(renormalize=True)
    other.load_state_dict(layer.state_dict())
    found, expected = (gradients(one, x, lambda x, one=one: one(x, given)) for one in (layer, other))
    assert torch.equal(layer(x, given).topk_experts, given)
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6, name


# What the backward need not launch, by what needs no gradient.
NOT_WITHOUT = {
    "x": {"d_x"},
    "w1": {"d_w1"},
    "w2": {"d_w2"},
    "w3": {"d_w3"},
    "wg": set(),
    "x and wg": {"d_x", "d_gates"},
}


@pytest.mark.parametrize("frozen", NOT_WITHOUT)
def test_what_is_frozen_is_not_computed_and_changes_no_other_bit(frozen, monkeypatch):
    layer, x, seen = make_layer(), make_x(), []
    expected = gradients(layer, x)
    leaves = {"x": x, **dict(layer.named_parameters())}
    names = frozen.split(" and ")
    for name in names:
        leaves[name].requires_grad_(False)
    backward = megablocks.backward

    def watched(*arguments):
        seen.append(backward(*arguments))
        return seen[-1]

    monkeypatch.setattr(megablocks, "backward", watched)
    loss_of(layer(x)).backward()
    (found,) = seen
    assert {name for name, gradient in found._asdict().items() if gradient is None} == NOT_WITHOUT[frozen]
    for name, leaf in leaves.items():
        assert leaf.grad is None if name in names else torch.equal(leaf.grad, expected[name]), name


def test_what_autograd_keeps_is_what_hooks_give_back():
    """A hook that moves what is kept, as one that offloads it does, is asked for every tensor again."""
    layer, x = make_layer(), make_x()
    expected = gradients(layer, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        found = gradients(layer, x)
    assert same_bits(found, expected)


# In a model


def test_a_model_takes_it_by_name():
    tiny = LMConfig(d=16, h=128, E=4, k=2, layers=1, heads=2, sequence=8)
    assert train(tiny, 1, batch=1, moe="megablocks").losses == pytest.approx(train(tiny, 1, batch=1).losses, rel=1e-5)


def test_a_model_learns_with_it_as_with_plain_torch():
    tiny = LMConfig(d=16, h=16, E=4, k=2, layers=1, heads=2, sequence=8)
    blocks = systems.system("megablocks", block=8)
    assert isinstance(MoETransformer(tiny, blocks).blocks[0].moe, BlockSparseMoE)
    found, expected = (train(tiny, 2, batch=2, moe=moe).losses for moe in (blocks, "oracle"))
    assert found == pytest.approx(expected, rel=1e-5) and found[0] != found[1]


def test_it_says_what_it_is():
    assert repr(make_layer()) == (
        "BlockSparseMoE(d=16, h=24, E=5, k=3, activation=swiglu, renormalize=False, block=8, version=default)"
    )
