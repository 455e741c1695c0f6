"""The torch layer: gradients against the oracle, what autograd keeps, and the company of torch's own machinery."""

import itertools
import os
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import processes
import pytest
import torch
from stages import alter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch_layers import SIZES, L, all_equal, gradients, loss_of, make_layer, make_x, same_bits

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import address_of
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, MoEConfig
from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.nn import oracle
from moeblaze_ref.nn.oracle import OracleMoE
from moeblaze_ref.nn.torch_layer import keep_routing
from moeblaze_ref.runtime.simt.executor import SimtExecutor, SimtModule
from moeblaze_ref.verify import check, comparisons
from moeblaze_ref.verify.cases import every_choice, paired_options, relative_error, single_gradients, wide_block_cases

# Against the oracle


def rows_of(case, dtype):
    return list(check.check_gradients(BACKENDS["simt"], None, case, dtype))


@pytest.mark.parametrize("case", every_choice(), ids=lambda case: case.name)
def test_every_activation_and_policy_agrees_with_autograd(case):
    rows = rows_of(case, "float32")
    assert [row.direction for row in rows] == ["forward", "backward"]
    assert check.passed(rows), rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_narrow_types_agree_with_autograd(dtype, policy):
    (case,) = (case for case in every_choice() if case.name == f"swiglu, {policy}")
    assert check.passed(rows_of(case, dtype))


def test_tf32_is_chosen_by_name_and_by_nothing_else():
    x = make_x()
    plain, named = make_layer(), make_layer(version="3_mma_tf32")
    exact, rounded = gradients(plain, x) | {"out": plain(x).out}, gradients(named, x) | {"out": named(x).out}
    for name in ("out", "x", "w1", "w2", "w3"):
        error = relative_error(rounded[name].detach().numpy(), exact[name].detach().numpy())
        assert 1e-4 < error < comparisons.BOUNDS["tf32 twice"], name
    for capability in ((8, 0), (9, 0), (10, 0)):
        executor = SimpleNamespace(capability=capability)
        assert raw_layer.default_version("float32", 16, 24, executor) == "2_tiled"


ZEROS = {
    "d_a": ("expert_down.hidden_gradients", 0),
    "d_b": ("expert_down.hidden_gradients", 1),
    "d_gates": ("expert_down.hidden_gradients", 3),
    "d_w3": ("expert_down.weight_gradient", None),
    "d_x": ("expert_up.input_gradient", None),
    "d_w1 and d_w2": ("expert_up.weight_gradient", None),
    "d_logits": ("gating.backward", None),
}


@pytest.mark.parametrize("fault", ZEROS)
def test_a_gradient_that_is_zero_is_caught(fault, monkeypatch):
    name, part = ZEROS[fault]

    def faulty(function, *arguments, **options):
        result = function(*arguments, **options)
        (result if part is None else result[part]).fill(0)
        return result

    alter(monkeypatch, "simt", name, lambda function: partial(faulty, function))
    assert not check.passed(rows_of(every_choice()[0], "float32"))


@pytest.mark.parametrize("lost", [4, 5])  # d_load_balancing_loss, d_router_z_loss
def test_a_loss_that_sends_no_gradient_is_caught(lost, monkeypatch):
    def faulty(backward, *arguments, **options):
        return backward(*arguments[:lost], 0.0, *arguments[lost + 1 :], **options)

    alter(monkeypatch, "simt", "gating.backward", lambda backward: partial(faulty, backward))
    assert not check.passed(rows_of(every_choice()[0], "float32"))


def job_layer(job):
    """The name of the layer of a job; of one that cannot run here, of its row."""
    return [job.args[2]] if len(job.args) > 2 else [row.stage for row in job()]


def test_the_plan_has_every_activation_policy_and_dtype():
    jobs = check.plan_gradients(["simt"])
    # MegaBlocks' two layers have no policies, but cases of whole and of wide blocks; all have the paired options and
    # each gradient
    of_activations = len(ACTIVATIONS) * len(POLICIES) + 2 * (2 * len(ACTIVATIONS) + 1 + len(wide_block_cases()))
    assert len(jobs) == (of_activations + 3 * len([*paired_options(), *single_gradients()])) * 3
    assert {layer for job in check.plan_gradients() for layer in job_layer(job)} == {*comparisons.TORCH_LAYERS}
    with pytest.raises(ValueError, match="unknown backend of the torch layer 'numpy'"):
        check.plan_gradients(["numpy"])


# What is kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("activation", "policy"), list(itertools.product(["swiglu", "gelu"], POLICIES)))
def test_autograd_keeps_what_the_accounting_says(activation, policy, dtype):
    layer = make_layer(activation=activation, policy=policy, dtype=getattr(torch, dtype))
    config = MoEConfig(L, **SIZES, activation=activation, dtype=dtype)
    one = account(config, "moeblaze", policy)
    kept = measure.kept_storages(layer, make_x(dtype=getattr(torch, dtype)))
    assert sorted(storage.bytes for storage in kept) == sorted(tensor.bytes for tensor in one.tensors if tensor.kept)


@pytest.mark.parametrize("retain", [True, False], ids=["graph retained", "graph used up"])
def test_the_backward_frees_what_the_forward_kept(retain, monkeypatch):
    """By the time of the router's gradient, unless the graph is retained for another backward."""
    layer, x, alive = make_layer(policy="conventional"), make_x(), []
    out = layer(x).out
    rows = L * SIZES["k"]
    kept = [StorageWeakRef(t.untyped_storage()) for t in saved_by(out) if t.ndim == 2 and len(t) == rows]
    assert len(kept) == 6

    def watched(gradient, *arguments, **options):
        alive.append(sum(not storage.expired() for storage in kept))
        return gradient(*arguments, **options)

    alter(monkeypatch, "simt", "router.weight_gradient", lambda gradient: partial(watched, gradient))
    out.sum().backward(retain_graph=retain)
    assert alive == [6 if retain else 0]


def saved_by(out):
    """What the layer's node in autograd's graph holds."""
    node = out.grad_fn
    while not hasattr(node, "saved_tensors"):
        ((node, _),) = node.next_functions
    return node.saved_tensors


# Torch's machinery


def test_negated_views_and_strided_weights():
    layer, x = make_layer(), make_x().detach()
    expected = layer(x).out
    layer.w1 = torch.nn.Parameter(layer.w1.detach().mT.contiguous().mT)
    assert torch.equal(layer(torch._neg_view(-x)).out, expected)


def test_tensors_that_begin_anywhere_reach_the_kernels_where_they_can_move_16_bytes(monkeypatch):
    layer, x = make_layer(), make_x(6, 16)
    expected = gradients(layer, x)
    buffer = torch.empty(x.numel() + 1)
    buffer[1:] = x.detach().flatten()
    shifted, begins = buffer[1:].view(x.shape).requires_grad_(), []

    def watched(forward, x, *arguments, **options):
        begins.append(address_of(x))
        return forward(x, *arguments, **options)

    alter(monkeypatch, "simt", "router.forward", lambda forward: partial(watched, forward))
    assert same_bits(gradients(layer, shifted), expected)
    assert shifted.data_ptr() % 16 and not any(begin % 16 for begin in begins) and begins


def test_more_routed_rows_than_int32_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(checks, "MAX_ROUTED_ROWS", 4 * SIZES["k"] - 1)
    make_layer()(make_x(3, 16))
    with pytest.raises(
        ValueError, match=r"R = L \* k = 4 \* 3 = 12, but int32 indices allow at most .* 11 routed rows"
    ):
        make_layer()(make_x(4, 16))


def test_one_loss_alone_reaches_the_router_only():
    layer, x = make_layer(), make_x()
    layer(x).load_balancing_loss.backward()
    assert layer.wg.grad.any() and x.grad.any()
    assert not layer.w1.grad.any() and not layer.w3.grad.any()


def test_gradients_accumulate():
    layer, x = make_layer(), make_x()
    once = gradients(layer, x)
    for _ in range(2):
        loss_of(layer(x)).backward()
    assert all(torch.equal(parameter.grad, 2 * once[name]) for name, parameter in layer.named_parameters())


def test_frozen_weights_get_no_gradient():
    layer, x = make_layer(), make_x()
    expected = gradients(layer, x)
    layer.w1.requires_grad_(False)
    loss_of(layer(x)).backward()
    assert layer.w1.grad is None
    assert torch.equal(layer.w3.grad, expected["w3"])


# What a step launches in its backward, by what needs a gradient: its own kernels, and products by a library ("matmul").
EVERY_LAUNCH = Counter(
    ["gate_rows", "d_hidden", "d_gates", "d_w3", "d_x_rows", "sum_rows", "d_w", "d_w"]
    + ["d_logits", "matmul", "matmul", "matmul"]
)
NOT_WITHOUT = {
    "x": Counter(["d_x_rows", "sum_rows", "matmul"]),
    "wg": Counter(["matmul"]),
    "w1": Counter(["d_w"]),
    "w2": Counter(["d_w"]),
    "w3": Counter(["d_w3"]),
    "x and wg": Counter(["d_x_rows", "sum_rows", "d_logits", "matmul", "matmul", "matmul"]),
}


@pytest.mark.parametrize("frozen", NOT_WITHOUT)
def test_what_is_frozen_costs_no_launch(frozen, monkeypatch):
    layer, x, launched = make_layer(), make_x(), Counter()
    expected = torch.autograd.grad(layer(x).out.sum(), [x, *layer.parameters()])
    leaves = {"x": x, **dict(layer.named_parameters())}
    for name in frozen.split(" and "):
        leaves[name].requires_grad_(False)
    out = layer(x).out
    launch, matmul = SimtModule.launch, SimtExecutor.matmul

    def counted_launch(module, kernel, *arguments, **options):
        launched.update([kernel])
        launch(module, kernel, *arguments, **options)

    def counted_matmul(*arguments):
        launched.update(["matmul"])
        return matmul(*arguments)

    monkeypatch.setattr(SimtModule, "launch", counted_launch)
    monkeypatch.setattr(SimtExecutor, "matmul", counted_matmul)
    out.sum().backward()
    assert launched == EVERY_LAUNCH - NOT_WITHOUT[frozen]
    for (name, leaf), gradient in zip(leaves.items(), expected, strict=True):
        assert (leaf.grad is None) == (name in frozen.split(" and "))
        assert leaf.grad is None or torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.bool])
def test_autocast_casts_no_other_kind_of_number(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=f"x has dtype {dtype}, but"):
        make_layer()(torch.ones(4, 16).to(dtype))


def test_the_recomputation_replays_the_routing_of_both_layers():
    first, second, chosen = make_layer(seed=0), make_layer(seed=1), []

    def region(x):
        """A recomputation that sees other inputs: what dropout without its random state would do."""
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(chosen)))
        one = first(x + noise)
        two = second(one.out)
        chosen.extend([one.topk_experts, two.topk_experts])
        return two.out.sum()

    with set_checkpoint_early_stop(False):
        checkpoint(region, make_x(), use_reentrant=False, context_fn=keep_routing).backward()
        assert len(chosen) == 4
        assert all_equal(chosen[:2], chosen[2:])
        chosen.clear()
        checkpoint(region, make_x(), use_reentrant=False).backward()
        assert not torch.equal(chosen[0], chosen[2])


GIVEN = torch.tensor([[4, 2, 0]] * L, dtype=torch.int32)


@pytest.mark.parametrize("inner", [{}, {"context_fn": keep_routing}], ids=["inner plain", "inner keeps"])
@pytest.mark.parametrize("outer", [{}, {"context_fn": keep_routing}], ids=["outer plain", "outer keeps"])
def test_checkpoints_nest_and_take_given_routings(inner, outer):
    first, second, third = (make_layer(seed=seed) for seed in range(3))
    x = make_x()

    def region(x, nested):
        given = first(x, GIVEN).out
        return third(nested(given).out)

    leaves = [x, *first.parameters(), *second.parameters(), *third.parameters()]
    expected = torch.autograd.grad(loss_of(region(x, second)), leaves)

    def nested(x):
        return checkpoint(second, x, use_reentrant=False, **inner)

    loss = loss_of(checkpoint(region, x, nested, use_reentrant=False, **outer))
    for retain in (True, False):  # the second backward recomputes once more
        found = torch.autograd.grad(loss, leaves, retain_graph=retain)
        assert all_equal(found, expected)


def test_a_recomputation_that_is_another_says_so():
    layer, calls = make_layer(), []

    def grows(x):
        calls.append(x)
        for _ in calls:
            x = layer(x).out
        return x.sum()

    def shrinks(x):
        calls.append(x)
        return layer(x[len(calls) :]).out.sum()

    for region, message in (
        (grows, "calls more MoE layers than the forward"),
        (shrinks, "routes 35 tokens to 3 experts"),
    ):
        calls.clear()
        with set_checkpoint_early_stop(False):
            out = checkpoint(region, make_x(), use_reentrant=False, context_fn=keep_routing)
        with pytest.raises(RuntimeError, match=message):
            out.backward()


def test_a_given_routing_is_replayed():
    layer, x = make_layer(renormalize=True), make_x()
    given = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(L)]).int()
    found = layer(x, given)
    assert torch.equal(found.topk_experts, given)
    routing = oracle.route(x, layer.wg, 3, True, given)
    expected = oracle.experts(x, routing, layer.w1, layer.w2, layer.w3)
    assert relative_error(found.out.detach(), expected.detach()) <= 1e-5
    weighted = torch.linspace(-1.0, 1.0, expected.numel()).reshape(expected.shape)
    (d_wg,), (truth,) = (torch.autograd.grad((out * weighted).sum(), layer.wg) for out in (found.out, expected))
    assert relative_error(d_wg, truth) <= 1e-5


def test_who_compiles_nothing_waits_for_no_compiler():
    source = "import sys, moeblaze_ref.nn.torch_layer; sys.exit('torch._dynamo' in sys.modules)"
    assert processes.run([sys.executable, "-c", source]).returncode == 0


def test_it_learns():
    layer, x = make_layer(), make_x().detach()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = (layer(x).out - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# Which layer it is


def test_without_an_executor_it_raises_and_plain_torch_does_not_step_in():
    program = "import torch; from moeblaze_ref.nn.torch_layer import MoELayer; MoELayer(8, 8, 2, 1)(torch.zeros(4, 8))"
    environment = os.environ | {"CXX": "no-such-compiler"}
    result = processes.run([sys.executable, "-c", program], env=environment)
    assert result.returncode == 1
    assert "SimtUnavailable: the SIMT executor compiles kernels with no-such-compiler" in result.stderr


def test_the_state_is_the_oracles():
    layer, plain = make_layer(seed=3), OracleMoE(**SIZES)
    plain.load_state_dict(layer.state_dict())
    torch.manual_seed(3)
    assert all_equal(layer.parameters(), OracleMoE(**SIZES).parameters())
    assert repr(layer) == (
        "MoELayer(d=16, h=24, E=5, k=3, activation=swiglu, renormalize=False, policy=minimal, version=default)"
    )
