"""Accounts of layers with today's routers and shared experts, against what autograd keeps, tensor by tensor."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from moeblaze_ref.core.config import ITEMSIZE, POLICIES, MoEConfig
from moeblaze_ref.core.routers import ROUTERS, Router, Shared
from moeblaze_ref.memory import measure, report
from moeblaze_ref.memory.accounting import (
    FROM_PAPERS,
    SYSTEMS,
    Assumptions,
    account,
    accounts,
    largest_tokens,
    megablocks_step_account,
    systems_with,
)
from moeblaze_ref.memory.measured import LAYERS
from moeblaze_ref.nn.systems import system as system_named

# Of no model: each has what no family combines.
MADE_UP = {
    "scaled softmax of the chosen": Router("softmax_of_chosen", logit_bias=True, scale=2.0),
    "softmax of the chosen, at inputs": Router("softmax_of_chosen", weighs="input"),
    "biased groups, narrow": Router("softmax", selection_bias=True, groups=4, groups_kept=2),
    "everything": Router(
        "sigmoid", True, 1e-6, 2.0, True, True, groups=4, groups_kept=3, group_score="top2", float32_product=True
    ),
    "scaled, at inputs, float32": Router("sigmoid", scale=2.0, weighs="input", float32_product=True),
}
EVERY = ROUTERS | MADE_UP
SHARED = [None, Shared(7), Shared(7, gated=True)]
IN_TORCH = ("sequential", "capacity", "dynamic_capacity")
SIZES = (31, 20, 24, 16, 4)  # no two tensors alike that should differ
MANY_EXPERTS = (9, 8, 4, 64, 2)  # the peak is in the router


def layer_of(one):
    """The layer of an account, and an input for it."""
    config, dtype = one.config, getattr(torch, one.config.dtype)
    name, options = LAYERS[one.system]
    assumed = {"router": one.assumptions.router, "shared": one.assumptions.shared}
    layer = system_named(name, dtype=dtype, **assumed, **options(one))(
        config.d, config.h, config.E, config.k, config.activation
    )
    return layer, torch.randn(config.L, config.d, dtype=dtype, requires_grad=True)


def found_storages(one):
    """Dtype and bytes of what autograd keeps, under the account's counts if it has any."""
    layer, x = layer_of(one)
    counts = one.assumptions.counts
    given = [] if counts is None else [measure.routing_of(counts, one.config.k)]
    lasting = [*layer.parameters(), *layer.buffers()]
    return sorted((s.dtype, s.bytes) for s in measure.kept_storages(layer, x, *given, exclude=lasting) if s.bytes)


def totals(storages):
    """Bytes by dtype."""
    sums = Counter()
    for dtype, size in storages:
        sums[dtype] += size
    return sums


def expected_storages(tensors):
    return sorted((tensor.dtype, tensor.bytes) for tensor in tensors if tensor.kept and tensor.bytes)


def check(config, system, policy=None, **assumed):
    one = account(config, system, policy, Assumptions(**assumed))
    found, expected = found_storages(one), expected_storages(one.tensors)
    if system == "sequential":  # a row has the tensors of all experts
        found, expected = totals(found), totals(expected)
    assert found == expected


# Equal to autograd, to the byte ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("router", EVERY)
def test_the_oracle_keeps_and_peaks_at_what_the_account_says(router, dtype):
    for shared in SHARED:
        for sizes, activation in ((SIZES, "swiglu"), (MANY_EXPERTS, "relu"), (SIZES, "relu2")):
            assumptions = Assumptions(router=EVERY[router], shared=shared)
            one = account(MoEConfig(*sizes, activation, dtype), "conventional", assumptions=assumptions)
            assert found_storages(one) == expected_storages(one.tensors), (shared, activation)
            layer, x = layer_of(one)
            lasting = [*layer.parameters(), *layer.buffers()]
            assert measure.peak_bytes(layer, x, exclude=lasting) == one.peak_bytes, (shared, activation)


def counts_of(config):
    """As uneven as 16 experts of 31 tokens can be with at least one row each."""
    counts = [1] * config.E
    for expert in range(config.E):
        counts[expert] += min(config.L - 1, config.R - sum(counts))
    return tuple(counts)


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("router", EVERY)
@pytest.mark.parametrize("system", IN_TORCH)
def test_layers_in_torch_keep_what_their_accounts_say(system, router, dtype):
    config = MoEConfig(*SIZES, "swiglu", dtype)
    for shared in SHARED:
        assumed = {"router": EVERY[router], "shared": shared, "counts": counts_of(config)}
        if system in systems_with(Assumptions(**assumed)):
            check(config, system, **assumed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("router", EVERY)
@pytest.mark.parametrize("policy", POLICIES)
def test_our_layer_keeps_what_its_account_says(policy, router, dtype):
    config = MoEConfig(*SIZES, "swiglu", dtype)
    check(config, "moeblaze", policy, router=EVERY[router])
    check(config.replace(activation="relu"), "moeblaze", policy, router=EVERY[router], shared=Shared(7, gated=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("router", EVERY)
@pytest.mark.parametrize("system", ["megablocks", "megablocks_memory_optimized"])
def test_layers_of_blocks_keep_what_their_accounts_say(system, router, dtype):
    config = MoEConfig(*SIZES, "swiglu", dtype)
    for shared in (None, Shared(7, gated=True)):
        check(config, system, router=EVERY[router], shared=shared, counts=counts_of(config), block=8)


@pytest.mark.parametrize("router", EVERY)
def test_no_token_and_one_token(router):
    for tokens in (0, 1):
        config = MoEConfig(tokens, *SIZES[1:], dtype="bfloat16")
        for one in accounts(config, ["conventional", "moeblaze"], Assumptions(router=EVERY[router], shared=Shared(7))):
            assert found_storages(one) == expected_storages(one.tensors)


@pytest.mark.parametrize("router", ["gpt_oss", "deepseek_v3", "llama4"])
def test_an_account_that_misses_one_tensor_or_keeps_one_more_is_found(router):
    for system, policy in (("conventional", None), ("moeblaze", "minimal")):
        assumptions = Assumptions(router=router, shared=Shared(7, gated=True))
        one = account(MoEConfig(*SIZES, dtype="bfloat16"), system, policy, assumptions)
        found = found_storages(one)
        for i, tensor in enumerate(one.tensors):
            other = replace(tensor, until="out" if tensor.kept else None)
            assert expected_storages([*one.tensors[:i], other, *one.tensors[i + 1 :]]) != found, tensor.name


# What the accounts say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", EVERY)
def test_every_formula_is_its_bytes_and_every_tensor_ends(router):
    for shared in SHARED:
        assumptions = Assumptions(router=EVERY[router], shared=shared, block=8)
        for one in accounts(MoEConfig(*SIZES), systems_with(assumptions), assumptions):
            names = [tensor.name for tensor in one.tensors]
            assert len(set(names)) == len(names)
            for i, tensor in enumerate(one.tensors):
                assert eval(tensor.formula, {"__builtins__": {}}, one.symbols) == tensor.bytes
                assert tensor.until is None or tensor.until in names[i:], tensor.name


def test_what_a_shared_expert_adds_is_the_same_in_every_policy():
    config = MoEConfig(*SIZES)
    for policy in POLICIES:
        plain, shared = (account(config, "moeblaze", policy, Assumptions(shared=s)) for s in (None, Shared(7, True)))
        L, d = 31, 20
        assert shared.kept_bytes - plain.kept_bytes == 4 * L * 7 * 2 + L * d * 2 + L * 2  # a, b, act_a, y_swi; y; gate


def test_a_softmax_by_its_name_is_the_option():
    config = MoEConfig(*SIZES)
    by_name, by_option = (accounts(config, assumptions=Assumptions(router=r, block=8)) for r in ("olmoe", Router()))
    assert [one.tensors for one in by_name] == [one.tensors for one in by_option]


def test_the_largest_l_is_that_of_the_router():
    config, assumptions = MoEConfig(*SIZES), Assumptions(router="deepseek_v3", shared=Shared(64))
    limit = largest_tokens(config, "moeblaze", "minimal", 10**6, assumptions)
    peaks = [account(config.replace(L=L), "moeblaze", "minimal", assumptions).peak_bytes for L in (limit, limit + 1)]
    assert peaks[0] <= 10**6 < peaks[1]
    assert limit < largest_tokens(config, "moeblaze", "minimal", 10**6)


def test_systems_of_papers_have_no_account_of_what_is_not_in_the_papers():
    assert set(SYSTEMS) - set(systems_with(Assumptions(router="deepseek_v3"))) >= {*FROM_PAPERS}
    assert set(SYSTEMS) - set(systems_with(Assumptions(shared=Shared(7)))) == {*FROM_PAPERS}
    assert not {"capacity", "dynamic_capacity"} & {*systems_with(Assumptions(router="llama4"))}
    assert systems_with(Assumptions(router="mixtral")) == tuple(SYSTEMS)


def test_notes_name_the_router_the_shared_expert_and_who_has_no_account():
    assert report.layer_notes(Assumptions()) == []
    notes = report.layer_notes(Assumptions(router="lfm2_moe", shared=Shared(7)))
    assert notes[0].startswith("router: Router(scores='sigmoid', renormalize=True, epsilon=1e-06")
    assert notes[1] == "shared expert: Shared(width=7, gated=False)"
    assert notes[2].startswith("megablocks_published is counted from its paper, whose router is a softmax")
    json.dumps(notes)


# Bad input ------------------------------------------------------------------------------------------------------------

CONFIG = MoEConfig(*SIZES)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: account(CONFIG, "sonicmoe", None, Assumptions(router="llama4")),
            ValueError,
            "sonicmoe is counted from its paper, whose router is a softmax: it has no account with another router",
        ),
        (
            lambda: account(CONFIG, "megablocks_published", None, Assumptions(shared=Shared(7))),
            ValueError,
            "megablocks_published is counted from its paper, which has no shared expert: it has no account with one",
        ),
        (
            lambda: account(CONFIG, "capacity", None, Assumptions(router="llama4")),
            ValueError,
            "capacity has gates at the outputs: it has no account with a router that weighs the input",
        ),
        (
            lambda: account(CONFIG, "moeblaze", "paper", Assumptions(router=Router(groups=3))),
            ValueError,
            "groups is 3, but it must divide the 16 experts",
        ),
        (
            lambda: megablocks_step_account(CONFIG.replace(h=128), Assumptions(shared=Shared(7))),
            ValueError,
            "the backward is counted with a softmax router and no shared expert, but not with Shared(width=7",
        ),
        (lambda: Assumptions(router="mixtrall"), ValueError, "unknown router 'mixtrall'. Did you mean 'mixtral'"),
        (lambda: Assumptions(shared=7), TypeError, "shared is an int, but it must be a Shared"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
