"""Experts whose routing the caller gives: every gradient against plain torch in float64, and what they refuse."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from over_tensors import BridgeOverTensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch_layers import all_equal, make_layer, make_x

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, EXPERT_ACTIVATIONS, POLICIES, is_gated, preset
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.memory import measure
from moeblaze_ref.nn import Experts, MoELayer, experts, oracle, torch_node
from moeblaze_ref.runtime import torch_bridge
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import relative_error

D, H, E, K, L = 16, 24, 5, 3, 37  # no tile divides L


@dataclass
class Inputs:
    """What a call takes, its leaves ready for gradients."""

    x: torch.Tensor
    gate_up: tuple | torch.Tensor
    down: torch.Tensor
    topk_index: torch.Tensor
    topk_weights: torch.Tensor
    layout: str = "separate"
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def leaves(self):
        up = self.gate_up if isinstance(self.gate_up, tuple) else (self.gate_up,)
        biases = [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]
        return [self.x, *up, self.down, self.topk_weights, *biases]

    def call(self, **options):
        inputs = self.x, self.gate_up, self.down, self.topk_index, self.topk_weights
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return experts(*inputs, **{"layout": self.layout} | biases | options)

    def stored(self, layout):
        """The same values as a layout stores them, in leaves of their own."""
        lies = LAYOUTS[layout]
        up = [w.detach() for w in (self.gate_up if isinstance(self.gate_up, tuple) else (self.gate_up,))]
        gate_up = torch.stack(up, 3).flatten(2) if lies.interleaved else torch.cat(up, 2)  # (E, d, G h)
        packed = [w.mT if lies.transposed else w for w in (gate_up, self.down.detach())]
        gate_up, down = [w.clone(memory_format=torch.contiguous_format).requires_grad_() for w in packed]
        return replace(self, gate_up=gate_up, down=down, layout=layout)


def make_biased(layout="interleaved", **options):
    """The same in a layout, with biases that clamp some of gpt-oss's activation."""
    inputs = make("clamped_swiglu", **options).stored(layout)
    generator = torch.Generator().manual_seed(3)
    d = inputs.x.shape[-1]
    widths = (inputs.gate_up.numel() // (d * E), 4.0), (d, 1.0)
    biases = [
        (scale * torch.randn(E, width, generator=generator)).to(inputs.x.dtype).requires_grad_()
        for width, scale in widths
    ]
    return replace(inputs, gate_up_bias=biases[0], down_bias=biases[1])


def make(activation="swiglu", tokens=L, k=K, E=E, d=D, h=H, dtype=torch.float32, weights_dtype=torch.float32, ids=None):
    """Inputs of order one; every token has k experts at random, or the ids given."""
    generator = torch.Generator().manual_seed(tokens + 7 * k)

    def leaf(*shape, fan_in=1, dtype=dtype):
        return (torch.randn(*shape, generator=generator) * fan_in**-0.5).to(dtype).requires_grad_()

    chosen = torch.rand(tokens, E, generator=generator).argsort(1)[:, :k] if ids is None else ids
    up = tuple(leaf(E, d, h, fan_in=d) for _ in range(1 + is_gated(activation)))
    down, weights = leaf(E, h, d, fan_in=h), leaf(*chosen.shape, dtype=weights_dtype)
    return Inputs(leaf(tokens, d), up if len(up) == 2 else up[0], down, chosen, weights)


def plain(x, w1, w2, w3, topk_index, topk_weights, activation, biases=(None, None, None)):
    """The definition, token by token and slot by slot, in plain torch; w2 is None for the ungated activations."""

    def plus(sums, bias):
        return sums if bias is None else sums + bias[chosen]

    b1, b2, b3 = biases
    out = torch.zeros_like(x)
    for j in range(topk_index.shape[1]):
        chosen = topk_index[:, j].long()
        a = plus(torch.einsum("ld,ldh->lh", x, w1[chosen]), b1)
        b = None if w2 is None else plus(torch.einsum("ld,ldh->lh", x, w2[chosen]), b2)
        y = plus(torch.einsum("lh,lhd->ld", oracle.activate(a, b, activation), w3[chosen]), b3)
        out = out + topk_weights[:, j, None].to(y.dtype) * y
    return out


def step(out, leaves, d_out=None):
    """The output and every gradient, by the names of the leaves' order."""
    d_out = torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape).to(out.dtype) if d_out is None else d_out
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def expected(inputs, activation, dtype):
    """The same of plain torch in a dtype, of the same values."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in inputs.leaves()]
    biases = (None, None, None)
    if inputs.down_bias is not None:
        *_, up_bias, b3 = leaves
        biases = *((up_bias[:, 0::2], up_bias[:, 1::2]) if inputs.layout == "interleaved" else up_bias.chunk(2, 1)), b3
    x, *up, w3, weights = leaves if inputs.down_bias is None else leaves[:-2]
    if inputs.layout != "separate":
        lies = LAYOUTS[inputs.layout]
        up = lies.stored(up[0]) if is_gated(activation) else up
        up, w3 = ([w.mT for w in up], w3.mT) if lies.transposed else (up, w3)
    w1, w2 = up if len(up) == 2 else (up[0], None)
    return step(plain(x, w1, w2, w3, inputs.topk_index, weights, activation, biases), leaves)


def as_arrays(tensors):
    return {str(number): tensor.double().numpy() for number, tensor in enumerate(tensors)}


def assert_right(found, inputs, activation="swiglu"):
    """The output and each gradient are as near to float64 as the bound of x's dtype says, and of their leaf's dtype."""
    dtype = str(inputs.x.dtype).removeprefix("torch.")
    exact, baseline = [as_arrays(expected(inputs, activation, t)) for t in (torch.float64, inputs.x.dtype)]
    results = as_arrays(found)
    for name, array in results.items():
        error, bound = relative_error(array, exact[name]), comparisons.bound_of(name, exact, dtype, baseline)
        assert error <= bound, (name, error, bound)
    assert [t.dtype for t in found[1:]] == [leaf.dtype for leaf in inputs.leaves()]


def check(inputs, activation="swiglu", **options):
    found = step(inputs.call(activation=activation, **options), inputs.leaves())
    assert_right(found, inputs, activation)
    return found


# Against float64


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_policy_gives_the_right_gradients_and_the_same_bits(activation):
    inputs = make(activation)
    first, *others = [check(inputs, activation, policy=policy) for policy in POLICIES]
    for other in others:
        assert all_equal(other, first)


STORED = [("swiglu", layout) for layout in LAYOUTS] + [("gelu", "linear"), ("gelu", "matmul")]


@pytest.mark.parametrize(("activation", "layout"), STORED)
@pytest.mark.parametrize("version", ["2_tiled", "3_mma", "7_persistent"])
def test_every_layout_has_gradients_as_it_stores_its_weights(version, activation, layout):
    """Under every policy; the bits are those of weights in tensors of their own, but for the order of d_x's sums."""
    separate = make(activation, d=24, h=72, dtype=torch.bfloat16, weights_dtype=torch.bfloat16)
    inputs = separate.stored(layout)
    first, *others = [check(inputs, activation, policy=policy, version=version) for policy in POLICIES]
    for other in others:
        assert all_equal(other, first)
    out, _, *of_weights, d_weights = check(separate, activation, version=version)
    of_weights = [w.detach().requires_grad_() for w in of_weights]
    gathered = replace(separate, gate_up=tuple(of_weights[:-1]) if len(of_weights) == 3 else of_weights[0])
    gathered = replace(gathered, down=of_weights[-1]).stored(layout)
    assert all_equal([first[0], *first[2:]], [out, gathered.gate_up, gathered.down, d_weights])


def check_biased(inputs, **options):
    return check(inputs, "clamped_swiglu", **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_of_every_layout(layout):
    check_biased(make_biased(layout))
    check_biased(make_biased(layout, d=13, h=7))
    check_biased(make_biased(layout, tokens=1))


def test_biases_under_every_policy():
    inputs = make_biased()
    first, *others = [check_biased(inputs, policy=policy) for policy in POLICIES]
    assert all(all_equal(other, first) for other in others)


@pytest.mark.parametrize("layout", [*LAYOUTS, "separate"])
def test_the_clamped_activation_without_biases(layout):
    inputs = make("clamped_swiglu", d=24)
    with torch.no_grad():
        inputs.x.mul_(5.0)
    check_biased(inputs if layout == "separate" else inputs.stored(layout))


@pytest.mark.parametrize("activation", EXPERT_ACTIVATIONS)
def test_a_gate_that_is_nan_shows_in_the_output(activation):
    inputs = make(activation).stored("linear")
    bias = torch.zeros(E, inputs.gate_up.shape[1])
    bias[0, 0] = torch.nan
    out = replace(inputs, gate_up_bias=bias).call(activation=activation)
    assert torch.equal(out.isnan(), (inputs.topk_index == 0).any(1)[:, None].expand_as(out))


@pytest.mark.parametrize("gate", [-3e38, -2.2e38, 3e38])
def test_a_large_gate_of_the_clamped_activation_has_a_gradient_of_0(gate):
    inputs = make_biased()
    with torch.no_grad():
        inputs.gate_up_bias[:, ::2] = gate
    d_bias = step(inputs.call(activation="clamped_swiglu"), [inputs.gate_up_bias])[1]
    assert not d_bias[:, ::2].any() and d_bias.isfinite().all()
    assert bool(d_bias[:, 1::2].any()) == (gate > 0)  # those of the second projection pass where the gate is open


def test_biases_of_experts_without_tokens():
    *_, d_up_bias, d_down_bias = check_biased(make_biased(ids=torch.tensor([[4, 1]] * L)))
    for gradient in (d_up_bias, d_down_bias):
        assert not gradient[[0, 2, 3]].any() and gradient[[1, 4]].any(1).all()


def test_biases_without_tokens():
    inputs = make_biased(tokens=0)
    *_, d_up_bias, d_down_bias = step(inputs.call(activation="clamped_swiglu"), inputs.leaves())
    assert d_up_bias.shape == (E, 2 * H) and not d_up_bias.any() and not d_down_bias.any()


def test_biases_that_lie_anywhere():
    """A bias may be a transposed view, or begin where no kernel can: it is small enough to be copied."""
    inputs = make_biased()
    whole = step(inputs.call(activation="clamped_swiglu"), inputs.leaves())
    up_bias = inputs.gate_up_bias.detach().mT.contiguous().mT
    down_bias = torch.cat([torch.zeros(1), inputs.down_bias.detach().flatten()])[1:].view(E, D)
    moved = replace(inputs, gate_up_bias=up_bias.requires_grad_(), down_bias=down_bias.requires_grad_())
    assert all_equal(step(moved.call(activation="clamped_swiglu"), moved.leaves()), whole)


@pytest.mark.parametrize("frozen", range(6))
def test_each_leaf_beside_biases_may_be_frozen(frozen):
    inputs = make_biased()
    whole = step(inputs.call(activation="clamped_swiglu"), inputs.leaves())[1:]
    inputs.leaves()[frozen].requires_grad_(False)
    out = inputs.call(activation="clamped_swiglu")
    for _ in range(2):
        wanted = [leaf for leaf in inputs.leaves() if leaf.requires_grad]
        found = torch.autograd.grad(out, wanted, torch.linspace(-1.0, 1.0, out.numel()).view_as(out), retain_graph=True)
        assert all_equal(found, [gradient for number, gradient in enumerate(whole) if number != frozen])


@pytest.mark.parametrize("policy", POLICIES)
def test_biases_keep_nothing(policy):
    inputs = make_biased()
    parameters = [inputs.gate_up, inputs.down, inputs.gate_up_bias, inputs.down_bias]
    without = replace(inputs, gate_up_bias=None, down_bias=None)
    found, plain = [
        measure.kept_bytes(lambda one=one: one.call(policy=policy, activation="clamped_swiglu"), exclude=parameters)
        for one in (inputs, without)
    ]
    assert found == plain > 0


def test_biases_under_autocast():
    inputs = make_biased()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = inputs.call(activation="clamped_swiglu")
    assert out.dtype == torch.bfloat16
    assert [t.dtype for t in step(out, inputs.leaves())[1:]] == [torch.float32] * 6


@pytest.mark.parametrize("policy", POLICIES)
def test_biases_without_memory_and_over_torchs_own_tensors(policy, monkeypatch):
    inputs, options = make_biased(), {"policy": policy, "activation": "clamped_swiglu"}
    expected = step(inputs.call(**options), inputs.leaves())
    with FakeTensorMode():
        fake = replace(make_biased(), topk_index=torch.empty(L, K, dtype=torch.int64))
        found = step(fake.call(**options), fake.leaves())
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: BridgeOverTensors())
    assert all_equal(step(inputs.call(**options), inputs.leaves()), expected)


def test_biases_of_shards_add_up_to_the_whole():
    inputs, options = make_biased(), {"activation": "clamped_swiglu"}
    whole = step(inputs.call(**options), inputs.leaves())
    parts = []
    for first, count in ((0, 2), (2, 3)):
        of_experts = [leaf for leaf in inputs.leaves() if leaf.shape[0] == E]
        up, down, *biases = [leaf.detach()[first : first + count].requires_grad_() for leaf in of_experts]
        part = replace(inputs, gate_up=up, down=down, gate_up_bias=biases[0], down_bias=biases[1])
        parts.append(step(part.call(first=first, **options), part.leaves()))
    for number in (0, 1, 4):  # out, d_x, d_topk_weights
        assert relative_error(sum(results[number] for results in parts), whole[number]) < comparisons.BOUNDS["float32"]
    for number in (2, 3, 5, 6):
        gathered = torch.cat([results[number] for results in parts])
        assert relative_error(gathered, whole[number]) < comparisons.BOUNDS["float32"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_weights_of_every_layout(layout):
    check(make().stored(layout))
    check(make(d=13, h=7).stored(layout))
    check(make(tokens=1).stored(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_with_an_expert_without_tokens(layout):
    inputs = make(ids=torch.tensor([[4, 1]] * L)).stored(layout)
    _, _, d_gate_up, d_down, _ = check(inputs)
    assert not d_gate_up[[0, 2, 3]].any() and not d_down[[0, 2, 3]].any()
    assert d_gate_up.shape == inputs.gate_up.shape and d_down.shape == inputs.down.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_without_tokens(layout):
    inputs = make(tokens=0).stored(layout)
    out, _, d_gate_up, d_down, _ = step(inputs.call(), inputs.leaves())
    assert out.shape == (0, D) and not d_gate_up.any() and not d_down.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype, weights_dtype):
    check(make(dtype=dtype, weights_dtype=weights_dtype))


@pytest.mark.parametrize("version", ["1_naive", "2_tiled", "3_mma_tf32"])
def test_a_version_by_name(version):
    inputs = make()
    found = as_arrays(step(inputs.call(version=version), inputs.leaves()))
    exact = as_arrays(expected(inputs, "swiglu", torch.float64))
    bound = comparisons.BOUNDS["tf32 twice" if version == "3_mma_tf32" else "float32"]
    assert max(relative_error(found[name], exact[name]) for name in exact) <= bound


HARD = {
    "one token": {"tokens": 1},
    "one expert a token": {"k": 1},
    "every expert": {"k": E},
    "one expert": {"E": 1, "k": 1},
    "all to one expert": {"ids": torch.full((L, 1), 3)},
    "experts without tokens": {"ids": torch.tensor([[4, 1]] * L)},
    "prime widths": {"d": 13, "h": 7},
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hard_routings(name, dtype):
    check(make(dtype=dtype, **HARD[name]))


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    inputs = make(ids=torch.tensor([[4, 1]] * L))
    _, _, *of_weights, _ = check(inputs)
    for gradient in of_weights:
        assert not gradient[[0, 2, 3]].any() and gradient[[1, 4]].any()


def test_no_tokens():
    inputs = make(tokens=0)
    out, d_x, *of_weights, d_weights = step(inputs.call(), inputs.leaves())
    assert out.shape == d_x.shape == (0, D) and d_weights.shape == (0, K)
    assert not any(gradient.any() for gradient in of_weights)


def test_the_layer_is_its_router_and_these_experts():
    """Bit for bit, in the output and in each gradient of the experts."""
    layer, x = make_layer(), make_x()
    result = layer(x)
    gates = torch.softmax(x.detach() @ layer.wg.detach(), -1).gather(1, result.topk_experts.long())
    found = experts(x, (layer.w1, layer.w2), layer.w3, result.topk_experts, gates, layout="separate")
    weights = [layer.w1, layer.w2, layer.w3]
    gates_agree = torch.allclose(found, result.out, rtol=1e-5, atol=1e-6)  # torch's softmax has other roundings
    assert gates_agree
    of_layer, of_experts = [step(out, weights)[1:] for out in (result.out, found)]
    for mine, theirs in zip(of_experts, of_layer, strict=True):
        assert relative_error(mine, theirs) < 1e-6


def test_ids_of_both_widths_give_the_same():
    inputs = make()
    narrow = replace(inputs, topk_index=inputs.topk_index.int())
    assert all_equal(step(narrow.call(), inputs.leaves()), step(inputs.call(), inputs.leaves()))


# Torch's machinery


def test_two_backwards_of_one_graph_and_of_two():
    inputs = make()
    first = step(inputs.call(), inputs.leaves())
    out = inputs.call()
    d_out = torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape)
    for _ in range(2):
        assert all_equal(torch.autograd.grad(out, inputs.leaves(), d_out, retain_graph=True), first[1:])
    for _ in range(2):
        inputs.call().backward(d_out)
    assert all(torch.equal(leaf.grad, 2 * once) for leaf, once in zip(inputs.leaves(), first[1:], strict=True))


def test_a_used_up_graph_has_no_second_backward():
    out = make().call()
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.parametrize("frozen", range(5))
def test_each_leaf_may_be_frozen(frozen):
    inputs = make()
    whole = step(inputs.call(), inputs.leaves())[1:]
    inputs.leaves()[frozen].requires_grad_(False)
    out = inputs.call()
    out.backward(torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape))
    for number, (leaf, gradient) in enumerate(zip(inputs.leaves(), whole, strict=True)):
        assert leaf.grad is None if number == frozen else torch.equal(leaf.grad, gradient)


def test_nothing_wants_a_gradient():
    inputs = make()
    for leaf in inputs.leaves():
        leaf.requires_grad_(False)
    assert not inputs.call().requires_grad


def test_strided_and_expanded_inputs():
    inputs = make()
    whole = step(inputs.call(), inputs.leaves())[0]
    strided = replace(
        inputs,
        x=inputs.x.detach().mT.contiguous().mT,
        topk_index=inputs.topk_index.mT.contiguous().mT,
        topk_weights=inputs.topk_weights.detach().mT.contiguous().mT,
    )
    assert torch.equal(strided.call(), whole)
    check(replace(inputs, x=inputs.x[:1].detach().expand(L, D).requires_grad_()))
    check(replace(inputs, topk_weights=torch.full((1, 1), 0.25).expand(L, K).requires_grad_()))


def test_the_output_has_the_shape_of_x():
    inputs = make(tokens=12)
    folded = replace(inputs, x=inputs.x.detach().reshape(3, 4, D))
    assert torch.equal(folded.call(), inputs.call().reshape(3, 4, D))


def test_checkpointing_gives_the_same_bits():
    inputs = make()
    out = checkpoint(lambda x: replace(inputs, x=x).call(), inputs.x, use_reentrant=False)
    assert all_equal(step(out, inputs.leaves()), step(inputs.call(), inputs.leaves()))


def test_autocast_casts_x_and_the_weights():
    inputs = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = inputs.call()
    assert out.dtype == torch.bfloat16
    assert [t.dtype for t in step(out, inputs.leaves())[1:]] == [torch.float32] * 5


def test_a_second_derivative_is_refused():
    inputs = make()
    with pytest.raises(RuntimeError, match=r"moeblaze_ref.nn.experts has no second derivative"):
        torch.autograd.grad(inputs.call().sum(), inputs.x, create_graph=True)


# What is kept


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layout_keeps_as_many_bytes(layout, policy):
    separate = make()
    counts = []
    for inputs in (separate, separate.stored(layout)):
        weights = [leaf for leaf in inputs.leaves() if leaf.ndim == 3]
        counts.append(measure.kept_bytes(lambda inputs=inputs: inputs.call(policy=policy), exclude=weights))
    assert counts[0] == counts[1] > 0


def peak(step, *operands):
    return max(measure.live_bytes(step, *operands, exclude=operands))


def peaks_at_full_size(name, policy, version):
    """{layout: the most bytes alive in a step}, with `MoELayer` as "layer", and the bytes of half of gate_up."""
    config = preset(name).config
    L, d, h, E, k = (getattr(config, size) for size in "LdhEk")
    narrow = {"dtype": torch.bfloat16, "requires_grad": True}
    with FakeTensorMode():
        whole = MoELayer(d, h, E, k, config.activation, policy, dtype=torch.bfloat16, version=version)
        x, weights = torch.empty(L, d, **narrow), torch.empty(L, k, **narrow)
        ids = torch.empty(L, k, dtype=torch.int64)
        leaves = [x, *whole.parameters()]
        found = {"layer": peak(lambda *leaves: torch.autograd.grad(whole(leaves[0]).out.sum(), leaves), *leaves)}
        for layout, lies in LAYOUTS.items():
            up, down = [torch.empty(shape, **narrow) for shape in lies.shapes(E, d, h, True)]
            options = {"activation": config.activation, "policy": policy, "layout": layout, "version": version}
            found[layout] = peak(
                lambda x, up, down, weights, ids, options=options: torch.autograd.grad(
                    experts(x, up, down, ids, weights, **options).sum(), (x, up, down, weights)
                ),
                *(x, up, down, weights, ids),
            )
    return found, 2 * E * d * h


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["conf3", "mixtral", "qwen3"])
def test_no_weight_is_copied_at_full_size(name, policy):
    """The second half of gate_up's gradient is born with the first: a step may need its bytes more, and no others."""
    for version in ("3_mma", "7_persistent"):
        found, half = peaks_at_full_size(name, policy, version)
        for layout in LAYOUTS:
            assert found[layout] <= found["layer"] + half
            assert found[layout] == found["linear"]


def test_a_copy_of_a_weight_would_be_seen(monkeypatch):
    """Of gate_up, in the backward of a step whose peak has all gradients."""
    found, half = peaks_at_full_size("mixtral", "minimal", "7_persistent")
    gradient, copies = gemm.weight_gradient, []

    def copying(stage, kernel, operands, shape, dispatch, executor, version):
        copies.append(executor.empty((dispatch.E, *shape), "bfloat16"))
        return gradient(stage, kernel, operands, shape, dispatch, executor, version)

    monkeypatch.setattr(gemm, "weight_gradient", copying)
    copied, _ = peaks_at_full_size("mixtral", "minimal", "7_persistent")
    assert copied["linear"] > found["layer"] + half >= found["linear"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_is_what_the_layer_keeps_but_the_router(policy):
    inputs = make()
    of_layer = measure.kept_storages(make_layer(policy=policy), make_x())
    found = measure.kept_storages(lambda: inputs.call(policy=policy), exclude=[*inputs.gate_up, inputs.down])
    found, of_layer = [sorted(storage.bytes for storage in kept) for kept in (found, of_layer)]
    assert found == of_layer and found


def in_layout(layout, **options):
    inputs = make(**options)
    return inputs if layout == "separate" else inputs.stored(layout)


EVERY_LAYOUT = ("separate", *LAYOUTS)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("policy", POLICIES)
def test_without_memory_a_step_gives_tensors_of_the_same_kinds(policy, layout):
    inputs = in_layout(layout, weights_dtype=torch.bfloat16)
    expected = [(t.shape, t.dtype) for t in step(inputs.call(policy=policy), inputs.leaves())]
    with FakeTensorMode():
        fake = replace(in_layout(layout, weights_dtype=torch.bfloat16), topk_index=torch.empty(L, K, dtype=torch.int64))
        found = step(fake.call(policy=policy), fake.leaves())
    assert [(t.shape, t.dtype) for t in found] == expected


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("policy", ["minimal", "conventional"])
def test_over_torchs_own_tensors_the_bits_are_the_same(layout, policy, monkeypatch):
    inputs = in_layout(layout, weights_dtype=torch.bfloat16)
    expected = step(inputs.call(policy=policy), inputs.leaves())
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: BridgeOverTensors())
    assert all_equal(step(inputs.call(policy=policy), inputs.leaves()), expected)


# What is refused


def with_id(value, at=(2, 1)):
    ids = make().topk_index.clone()
    ids[at] = value
    return {"topk_index": ids}


def a_repeated_id():
    ids = make().topk_index.clone()
    ids[4] = torch.tensor([2, 0, 2])
    return {"topk_index": ids}


REFUSED = {
    "an id too high": (
        with_id(5),
        ValueError,
        r"topk_index\[2, 1\] is 5, but there are only 5 experts \(valid: 0..4\)",
    ),
    "an id below zero": (with_id(-1), ValueError, r"topk_index\[2, 1\] is -1, but there are only 5 experts"),
    "an id past 32 bits": (with_id(2**32), ValueError, r"topk_index\[2, 1\] is 4294967296, but"),
    "an id twice": (a_repeated_id(), ValueError, r"topk_index\[4\] names expert 2 twice, but the k = 3 experts of a"),
    "more than there are": (
        {"topk_index": torch.zeros(L, 6, dtype=torch.int64), "topk_weights": torch.ones(L, 6)},
        ValueError,
        r"k is 6, but there are only 5 experts \(k must be 1..5\)",
    ),
    "short ids": (
        {"topk_index": make().topk_index.short()},
        TypeError,
        "topk_index has dtype torch.int16, but it must",
    ),
    "ids that are no tensor": ({"topk_index": [[0]]}, TypeError, "topk_index is a list, but it must be a Tensor"),
    "ids of other tokens": ({"topk_index": make().topk_index[1:]}, ValueError, r"topk_index has shape \(36, 3\), but"),
    "weights of other slots": (
        {"topk_weights": torch.ones(L, 2)},
        ValueError,
        r"topk_index has shape \(37, 3\), but it must be \(L=37, k=2\)",
    ),
    "weights of other tokens": (
        {"topk_weights": torch.ones(3, 3)},
        ValueError,
        r"topk_weights has shape \(3, 3\), but",
    ),
    "wide weights": (
        {"topk_weights": torch.ones(L, 3).double()},
        TypeError,
        "topk_weights has dtype torch.float64, but",
    ),
    "x of another width": ({"x": torch.ones(L, 8)}, ValueError, r"x has shape \(37, 8\), but it must be \(..., d=16\)"),
    "x of another dtype": (
        {"x": torch.ones(L, D).half()},
        TypeError,
        r"gate_up\[0\] is torch.float32, but x is torch.f",
    ),
    "wide x": ({"x": torch.ones(L, D).double()}, TypeError, "x has dtype torch.float64, but it must be torch.float32"),
    "one projection": (
        {"gate_up": torch.ones(E, D, H)},
        TypeError,
        "gate_up is a Tensor, but in layout separate it m",
    ),
    "another shape": (
        {"gate_up": (torch.ones(E, D, H), torch.ones(E, D, 8))},
        ValueError,
        r"gate_up\[1\] has shape \(5, 16, 8\), but it must be \(E=5, d=16, h=24\)",
    ),
    "down as stored elsewhere": (
        {"down": torch.ones(E, D, H)},
        ValueError,
        r"down has shape \(5, 16, 24\), but it must be \(E=5, h=24, d=16\)",
    ),
    "no experts": (
        {"gate_up": (torch.ones(0, D, H),) * 2, "down": torch.ones(0, H, D)},
        ValueError,
        "E is 0, but it must be 1..1024",
    ),
    "more experts than a kernel takes": (
        {"gate_up": (torch.ones(1025, 1, 1),) * 2, "down": torch.ones(1025, 1, 1)},
        ValueError,
        "E is 1025, but it must be 1..1024",
    ),
    "no down": ({"down": None}, TypeError, "down is None, but it must be a Tensor"),
    "no gate": ({"gate_up": None}, TypeError, "gate_up is None, but in layout separate it must be a tuple of two"),
    "no up": ({"gate_up": (torch.ones(E, D, H), None)}, TypeError, r"gate_up\[1\] is None, but it must be a Tensor"),
    "a number for weights": ({"gate_up": 3}, TypeError, "gate_up is an int, but in layout separate it must be a"),
    "sparse ids": (
        {"topk_index": make().topk_index.to_sparse()},
        TypeError,
        "topk_index has layout torch.sparse_coo, but it must be torch.strided",
    ),
    "sparse routing weights": (
        {"topk_weights": torch.ones(L, 3).to_sparse()},
        TypeError,
        "topk_weights has layout torch.sparse_coo, but it must be torch.strided",
    ),
    "a weight that would be copied": (
        {"down": torch.ones(E, D, H).mT},
        ValueError,
        r"down is not contiguous \(strides \(384, 1, 24\)\), and no copy of a weight is made",
    ),
    "a weight that begins anywhere": (
        {"down": torch.ones(E * H * D + 1)[1:].view(E, H, D)},
        ValueError,
        "down begins at no multiple of 16 bytes, and no copy of a weight is made",
    ),
    "a tensor elsewhere": (
        {"down": torch.ones(E, H, D, device="meta")},
        ValueError,
        "down is on meta, but x is on cpu",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name):
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as refused:
        replace(make(), **changes).call()
    assert "\n" not in str(refused.value)


REFUSED_STORED = {
    "an odd width": (
        {"gate_up": torch.ones(E, 2 * H + 1, D)},
        ValueError,
        r"gate_up has shape \(5, 49, 16\), but 2h = 49 must be even: linear has both",
    ),
    "two tensors": ({"gate_up": (torch.ones(E, D, H),) * 2}, TypeError, "gate_up is a tuple, but it must be a Tensor"),
    "down as ours": (
        {"down": torch.ones(E, H, D)},
        ValueError,
        r"down has shape \(5, 24, 16\), but it must be \(E=5, d=16, h=24\)",
    ),
    "gate_up of two dimensions": ({"gate_up": torch.ones(E, D)}, ValueError, r"it must be \(E, 2h, d\)"),
    "gate_up of another layout": (
        {"layout": "matmul"},
        ValueError,
        r"down has shape \(5, 16, 24\), but it must be \(E=5, h=8, d=48\)",
    ),
    "a transposed view": (
        {"gate_up": torch.ones(E, D, 2 * H).mT},
        ValueError,
        r"gate_up is not contiguous \(strides \(768, 1, 48\)\), and no copy of a weight is made",
    ),
    "no gate_up": ({"gate_up": None}, TypeError, "gate_up is None, but it must be a Tensor"),
    "no down": ({"down": None}, TypeError, "down is None, but it must be a Tensor"),
    "no width": ({"gate_up": torch.ones(E, 0, D)}, ValueError, "h is 0, but it must be >= 1"),
}


REFUSED_BIASES = {
    "a row for each column": (
        {"gate_up_bias": torch.ones(2 * H, E)},
        ValueError,
        r"gate_up_bias has shape \(48, 5\), but it must be \(E=5, 2h=48\)",
    ),
    "of a wider model": (
        {"down_bias": torch.ones(E, H)},
        ValueError,
        r"down_bias has shape \(5, 24\), but it must be \(E=5, d=16\)",
    ),
    "of another dtype": (
        {"down_bias": torch.ones(E, D, dtype=torch.bfloat16)},
        TypeError,
        "down_bias is torch.bfloat16, but x is torch.float32",
    ),
    "of integers": ({"down_bias": torch.ones(E, D, dtype=torch.int32)}, TypeError, "down_bias has dtype torch.int32"),
    "elsewhere": ({"down_bias": torch.ones(E, D, device="meta")}, ValueError, "down_bias is on meta"),
    "sparse": (
        {"down_bias": torch.ones(E, D).to_sparse()},
        TypeError,
        "down_bias has layout torch.sparse_coo, but it must be torch.strided",
    ),
    "no tensor": ({"gate_up_bias": [0.0]}, TypeError, "gate_up_bias is a list, but it must be a Tensor"),
}


@pytest.mark.parametrize("name", REFUSED_BIASES)
def test_biases_that_do_not_fit_are_refused(name):
    changes, error, message = REFUSED_BIASES[name]
    with pytest.raises(error, match=message) as refused:
        replace(make_biased(), **changes).call()
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_bias_is_refused():
    nested = torch.nested.nested_tensor([torch.ones(D)] * E)
    with pytest.raises(TypeError, match="down_bias is a nested tensor, but it must be a plain one"):
        replace(make_biased(), down_bias=nested).call()


def test_weights_in_tensors_of_their_own_have_no_biases():
    with pytest.raises(ValueError, match="layout separate has no down_bias: the layouts with biases are linear"):
        make().call(down_bias=torch.ones(E, D))


@pytest.mark.parametrize("name", REFUSED_STORED)
def test_what_does_not_fit_the_layout_is_refused(name):
    changes, error, message = REFUSED_STORED[name]
    with pytest.raises(error, match=message) as refused:
        replace(make().stored("linear"), **changes).call()
    assert "\n" not in str(refused.value)


# Experts of other ranks


def shard(inputs, first, count):
    """The experts ``first``.. of the inputs, in leaves of their own."""
    part = slice(first, first + count)
    up, down = [w.detach()[part].clone().requires_grad_() for w in inputs.gate_up], inputs.down.detach()[part].clone()
    return replace(inputs, gate_up=tuple(up), down=down.requires_grad_())


@pytest.mark.parametrize("layout", ["separate", "linear"])
@pytest.mark.parametrize("policy", POLICIES)
def test_shards_add_up_to_the_whole(policy, layout):
    inputs = make()
    whole = step(inputs.call(), inputs.leaves())
    shards = [(first, shard(inputs, first, count)) for first, count in ((0, 2), (2, 3))]
    shards = [(first, one if layout == "separate" else one.stored(layout)) for first, one in shards]
    found = [step(one.call(first=first, policy=policy), one.leaves()) for first, one in shards]
    for number in (0, 1, -1):  # out, d_x, d_topk_weights
        total = sum(results[number] for results in found)
        assert relative_error(total, whole[number]) < comparisons.BOUNDS["float32"]
    d_down = torch.cat([results[-2] if layout == "separate" else results[-2].mT for results in found])
    assert torch.equal(d_down, whole[-2])


def test_slots_of_other_ranks_give_nothing_and_get_nothing():
    inputs = make()
    ids = torch.where(inputs.topk_index < 3, inputs.topk_index, 3)  # as transformers marks them
    ids[5] = 3
    here = replace(shard(inputs, 0, 3), topk_index=ids)
    out, d_x, *_, d_weights = step(here.call(first=0), here.leaves())
    assert not out[5].any() and not d_x[5].any() and not d_weights[ids == 3].any() and d_weights[ids < 3].all()
    strange = replace(here, topk_index=torch.where(ids == 3, torch.tensor([-7, 99, 2**40]), ids))
    assert all_equal(step(strange.call(first=0), strange.leaves()), step(here.call(first=0), here.leaves()))


def test_a_rank_may_have_no_row():
    inputs = make()
    out, *gradients = step(inputs.call(first=70), inputs.leaves())
    assert not any(tensor.any() for tensor in (out, *gradients))


@pytest.mark.parametrize("first", [2**31, 2**64 - 1, 2**64])
def test_a_first_expert_that_no_id_can_name_is_refused(first):
    with pytest.raises(ValueError, match=f"first is {first}, but it must be 0..2147483647"):
        make().call(first=first)


def test_ids_of_a_rank_must_be_distinct_too():
    with pytest.raises(ValueError, match=r"topk_index\[4\] names expert 2 twice"):
        replace(make(), **a_repeated_id()).call(first=0)
    with pytest.raises(ValueError, match="first is -1, but it must be 0..2147483647"):
        make().call(first=-1)


# The module


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_module_is_the_function_with_weights_of_its_own(layout):
    inputs, module = make(), Experts(E, D, H, layout=layout, policy="inputs")
    assert sorted(name for name, _ in module.named_parameters()) == ["down", "gate_up"]
    out = module(inputs.x, inputs.topk_index, inputs.topk_weights)
    same = replace(inputs, gate_up=module.gate_up, down=module.down, layout=layout)
    assert torch.equal(out, same.call())
    check(same)
    assert f"layout={layout}" in repr(module) and "E=5, d=16, h=24, bias=False" in repr(module)
    assert "version=2_tiled" in repr(Experts(E, D, H, layout=layout, version="2_tiled"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_module_with_biases_is_the_function(layout):
    inputs, module = make_biased(layout), Experts(E, D, H, "clamped_swiglu", layout=layout, bias=True)
    names = ["down", "down_bias", "gate_up", "gate_up_bias"]
    assert sorted(name for name, _ in module.named_parameters()) == names and "bias=True" in repr(module)
    assert not module.gate_up_bias.any() and not module.down_bias.any()
    module.load_state_dict({name: getattr(inputs, name) for name in names})
    out = module(inputs.x, inputs.topk_index, inputs.topk_weights)
    assert torch.equal(out, inputs.call(activation="clamped_swiglu"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"E": 0}, ValueError, "E is 0, but it must be 1..1024"),
        ({"E": 2000}, ValueError, "E is 2000, but it must be 1..1024"),
        ({"h": 2.5}, TypeError, "h is 2.5"),
        ({"layout": "separate"}, ValueError, "unknown layout 'separate'.* Valid: linear, matmul, interleaved"),
        ({"dtype": torch.float64}, TypeError, "dtype is torch.float64, but it must be torch.float32"),
        ({"activation": "gelu", "layout": "interleaved"}, ValueError, "gelu is not gated, so nothing alternates"),
    ],
)
def test_a_module_that_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Experts(**{"E": E, "d": D, "h": H} | options)


# Names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "swigl"}, "unknown activation 'swigl'. Did you mean 'swiglu'"),
        ({"policy": "minimum"}, "unknown policy 'minimum'. Did you mean 'minimal'"),
        ({"version": "8_none"}, "unknown version of experts in layout separate '8_none'"),
        ({"layout": "linear", "version": "1_naive"}, "unknown version of experts in layout linear '1_naive'"),
        ({"layout": "lines"}, "unknown layout 'lines'. Did you mean 'linear'"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make().call(**options)


def test_more_routed_rows_than_int32_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(checks, "MAX_ROUTED_ROWS", L * K - 1)
    with pytest.raises(ValueError, match=r"R = L \* k = 37 \* 3 = 111, but int32 indices allow at most"):
        make().call()


def test_more_experts_than_the_kernels_take_are_refused():
    count = checks.MAX_EXPERTS + 1
    with pytest.raises(ValueError, match="E is 1025, but it must be 1..1024"):
        make(tokens=2, E=count, d=8, h=8).call()


# The tests themselves


@pytest.mark.parametrize("number", range(6))
def test_a_result_that_is_wrong_is_seen(number):
    inputs = make()
    found = step(inputs.call(), inputs.leaves())
    found[number] = torch.zeros_like(found[number])
    with pytest.raises(AssertionError):
        assert_right(found, inputs)


def test_the_stages_read_the_tensors_themselves(monkeypatch):
    """No weight is copied on the way to the kernels: they get its own memory."""
    inputs, seen = make(dtype=torch.bfloat16), set()
    to_numpy = torch_bridge.to_numpy

    def watched(tensor):
        array = to_numpy(tensor)
        seen.add(array.__array_interface__["data"][0])
        return array

    monkeypatch.setattr(torch_bridge, "to_numpy", watched)
    inputs.call()
    assert {leaf.data_ptr() for leaf in inputs.leaves()} <= seen
    assert isinstance(torch_bridge.to_numpy(inputs.down.detach()), np.ndarray)
