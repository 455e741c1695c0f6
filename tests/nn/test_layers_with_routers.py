"""Layers with the routers and shared experts of today's models equal transformers' blocks, in values and gradients."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers_routers import ROUTERS_OF, THEIRS, D, E, K, Theirs

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.routers import FAMILIES, ROUTERS, Router, Shared
from moeblaze_ref.nn import SYSTEMS, MoELayer, OracleMoE, keep_routing, systems
from moeblaze_ref.verify.cases import relative_error

H, L = 8, 40
BLOCKS = [family for family in ROUTERS if family != "gpt_oss"]  # whose experts have biases
ROUTED = [name for name in SYSTEMS if name != "capacity"]  # which drops rows
QWEN2 = Theirs(
    "qwen2_moe",
    "Qwen2Moe",
    "TopKRouter",
    "SparseMoeBlock",
    "Config",
    {"num_experts": E, "moe_intermediate_size": H, "shared_expert_intermediate_size": 10},
)


def takes(system, router):
    return router.weighs == "output" or "capacity" not in system


def shared_of(block):
    """The shared expert of a block of transformers, and the `Shared` that describes it; None twice without one."""
    theirs = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
    gated = hasattr(block, "shared_expert_gate")
    return theirs, None if theirs is None else Shared(theirs.up_proj.weight.shape[0], gated)


def with_weights_of(block, system, router):
    """A layer of a system with the weights of a block of transformers."""
    theirs, shared = shared_of(block)
    blocks = {"block": H} if "megablocks" in system else {}
    layer = systems.system(system, router=router, shared=shared, **blocks)(D, H, E, K, "swiglu")
    layer.load_state_dict({name: tensor.detach() for name, tensor in state_of(block, theirs, layer).items()})
    return layer


def state_of(block, theirs, layer):
    """The tensors of a block, or of its gradients, by our names and in our layout."""
    gate = block.router if hasattr(block, "router") else block.gate
    up, down = block.experts.gate_up_proj, block.experts.down_proj
    of_llama = up.shape[1] == D  # which stores (E, d, 2h) and (E, h, d)
    up, down = (up, down) if of_llama else (up.mT, down.mT)
    state = {"wg": gate.weight.T, "w1": up[..., :H], "w2": up[..., H:], "w3": down}
    if layer.selection_bias is not None:
        state["selection_bias"] = getattr(gate, "e_score_correction_bias", getattr(block, "expert_bias", None))
    if theirs is not None:
        of_shared = {"w1": theirs.gate_proj, "w2": theirs.up_proj, "w3": theirs.down_proj}
        state |= {f"shared_expert.{name}": linear.weight.T for name, linear in of_shared.items()}
    if hasattr(block, "shared_expert_gate"):
        state["shared_expert.gate"] = block.shared_expert_gate.weight.T
    return state


def errors(block, layer):
    """Relative errors of the output and of every gradient, by name. The block's parameters become their gradients."""
    generator = torch.Generator().manual_seed(7)
    x, d_out = torch.randn(2, L, D, generator=generator)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    returned = block(leaves[0][None])
    expected = (returned[0] if isinstance(returned, tuple) else returned).reshape(L, D)
    out = systems.run(layer, leaves[1]).out
    expected.backward(d_out)
    out.backward(d_out)
    pairs = {"out": (out.detach(), expected.detach()), "x": (leaves[1].grad, leaves[0].grad)}
    for parameter in block.parameters():
        parameter.data = parameter.grad
    gradients = state_of(block, shared_of(block)[0], layer)
    pairs |= {name: (parameter.grad, gradients[name].detach()) for name, parameter in layer.named_parameters()}
    return {name: relative_error(*pair) for name, pair in pairs.items()}


# ---- equal to transformers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "system"),
    [(family, system) for system in ROUTED for family in BLOCKS if takes(system, ROUTERS_OF[family])],
)
def test_output_and_gradients_are_those_of_transformers(family, system):
    block = THEIRS[family].made("block")
    layer = with_weights_of(block, system, ROUTERS_OF[family])
    found = errors(block, layer)
    assert len(found) == (6 if FAMILIES[family].shared == "none" else 9)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("system", ROUTED)
def test_a_shared_expert_behind_a_sigmoid_is_that_of_qwen2(system):
    block = QWEN2.made("block")
    layer = with_weights_of(block, system, Router())
    assert layer.shared_expert.gate is not None
    found = errors(block, layer)
    assert len(found) == 10 and max(found.values()) < 1e-5, found


@pytest.mark.parametrize("wrong", ["ungated", "no shared expert"])
def test_another_shared_expert_is_found(wrong):
    block = QWEN2.made("block")
    layer = with_weights_of(block, "oracle", Router())
    if wrong == "ungated":
        layer.shared_expert.gate = None
    else:
        layer.shared_expert = None
    assert errors(block, layer)["out"] > 1e-2


@pytest.mark.parametrize("family", ["llama4", "deepseek_v3"])
@pytest.mark.parametrize("system", [name for name in ROUTED if "capacity" not in name])
def test_where_the_gate_multiplies_matters(family, system):
    block = THEIRS[family].made("block")
    router = ROUTERS_OF[family]
    other = replace(router, weighs="output" if router.weighs == "input" else "input")
    assert errors(block, with_weights_of(block, system, other))["out"] > 1e-2


# ---- our layer ------------------------------------------------------------------------------


def twins(**options):
    """The oracle and our layer with the same weights."""
    torch.manual_seed(2)
    plain, ours = OracleMoE(D, H, E, K, **options), MoELayer(D, H, E, K, **options)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def ramp():
    """Tokens (L, D), all of them different."""
    return torch.linspace(-1, 1, L * D).reshape(D, L).T.contiguous()


def step(layer, x):
    """Output, both losses and every gradient of a layer, to all of which its outputs contribute."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    result = systems.run(layer, x)
    (result.out.square().sum() + 3.0 * result.load_balancing_loss + 2.0 * result.router_z_loss).backward()
    return [*result[:3], x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("router", ["gpt_oss", "deepseek_v3", "llama4"])
def test_losses_and_their_gradients_are_those_of_the_oracle(router):
    plain, ours = twins(router=router, shared=Shared(10, gated=True))
    pairs = zip(step(ours, ramp()), step(plain, ramp()), strict=True)
    assert max(relative_error(found.detach(), expected.detach()) for found, expected in pairs) < 1e-5


@pytest.mark.parametrize("router", ["deepseek_v3", "llama4"])
def test_the_policy_changes_no_bit(router):
    results = []
    for policy in POLICIES:
        torch.manual_seed(2)
        results.append(
            step(MoELayer(D, H, E, K, policy=policy, router=router), torch.linspace(-1, 1, L * D).view(L, D))
        )
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


def test_a_softmax_router_by_its_name_has_the_bits_of_the_option():
    _, by_name = twins(router="mixtral")
    _, by_option = twins(renormalize=True)
    assert all(torch.equal(*pair) for pair in zip(step(by_name, ramp()), step(by_option, ramp()), strict=True))


@pytest.mark.parametrize("router", ["gpt_oss", "lfm2_moe", "llama4"])
def test_no_token_is_valid(router):
    _, ours = twins(router=router, shared=Shared(10))
    out, balance, z, *gradients = step(ours, torch.zeros(0, D))
    assert out.shape == (0, D) and balance == z == 0.0
    assert not any(gradient.any() for gradient in gradients)


def test_autocast_leaves_a_float32_product_as_it_is():
    _, ours = twins(router="deepseek_v3", shared=Shared(10))
    x, given = ramp(), torch.arange(K, dtype=torch.int32).repeat(L, 1)
    exact = ours(x, given).out.detach()
    rounded, wg = x.bfloat16(), ours.wg.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        logits, narrow = ours.route(rounded, wg).logits, ours(x, given).out.detach()
    torch.testing.assert_close(logits, rounded.float() @ wg.float())
    assert narrow.dtype == torch.bfloat16 and 0.0 < relative_error(narrow.float(), exact) < 0.02


def test_a_recomputation_replays_the_choice():
    _, ours = twins(router="deepseek_v3")
    x = ramp().requires_grad_()
    (expected,) = torch.autograd.grad(ours(x).out.square().sum(), x)
    out = checkpoint(lambda rows: ours(rows).out, x, use_reentrant=False, context_fn=keep_routing)
    ours.selection_bias += torch.linspace(-1, 1, E)  # another choice, were it made again
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected)


# ---- the parameters -------------------------------------------------------------------------


def test_a_layer_has_the_biases_that_its_router_adds():
    of_gpt_oss = OracleMoE(D, H, E, K, router="gpt_oss")
    assert of_gpt_oss.logit_bias.shape == (E,) and "logit_bias" in dict(of_gpt_oss.named_parameters())
    assert of_gpt_oss.selection_bias is None
    of_deepseek = OracleMoE(D, H, E, K, router="deepseek_v3", dtype=torch.bfloat16)
    assert of_deepseek.selection_bias.dtype == torch.float32 and not of_deepseek.selection_bias.any()
    assert {*of_deepseek.state_dict()} == {"wg", "w1", "w2", "w3", "selection_bias"}
    assert "selection_bias" not in dict(of_deepseek.named_parameters())


def test_a_layer_without_options_has_the_state_that_it_had():
    assert [*OracleMoE(D, H, E, K, renormalize=True).state_dict()] == ["wg", "w1", "w2", "w3"]


def test_an_ungated_shared_expert_has_two_matrices():
    layer = OracleMoE(D, H, E, K, "relu", shared=Shared(10))
    assert {*layer.shared_expert.state_dict()} == {"w1", "w3"}


def test_the_choice_can_be_replayed():
    layer = OracleMoE(D, H, E, K, router="deepseek_v3")
    x, given = torch.randn(L, D), torch.arange(K).expand(L, K).int()
    _, routing = layer(x, given)
    assert torch.equal(routing.topk_experts, given.long())


def test_print_shows_the_router_that_is_not_plain():
    assert "renormalize=False" in repr(OracleMoE(D, H, E, K))
    assert "router=Router(scores='sigmoid'" in repr(OracleMoE(D, H, E, K, router="lfm2_moe"))


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        ("oracle", {"router": "mixtrall"}, "unknown router 'mixtrall'. Did you mean 'mixtral'"),
        ("oracle", {"router": "olmoe", "renormalize": True}, "renormalize is True, but a router is given"),
        ("oracle", {"router": Router(groups=3)}, "groups is 3, but it must divide the 16 experts"),
        ("capacity", {"router": "llama4"}, "weighs is 'input', but CapacityMoE takes 'output' alone"),
    ],
)
def test_what_a_layer_does_not_compute_is_named(system, options, message):
    with pytest.raises(ValueError, match=message):
        SYSTEMS[system](D, H, E, K, "swiglu", **options)


def test_a_shared_expert_needs_a_width():
    with pytest.raises(ValueError, match="width is 0, but it must be >= 1"):
        Shared(0)
