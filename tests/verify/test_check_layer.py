"""Layers that are right, and layers with a bug of each class."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from mutants import MUTANTS

from moeblaze_ref.verify.layers import cases, diagnosis, large
from moeblaze_ref.verify.layers.adapter import Adapter, make
from moeblaze_ref.verify.layers.adapters import factories, grouped, plain
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts
from moeblaze_ref.verify.layers.check import PROBE, UNKNOWN, check_layer
from moeblaze_ref.verify.layers.reference import differentiated, layer

FACTORIES = factories()


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny products are slower in two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def verdict_on(factory, dtype=torch.float32):
    (verdict,) = check_layer(factory, [dtype])
    return verdict


def dtypes_of(name):
    return make(FACTORIES[name], PROBE, torch.float32, "cpu").dtypes


@pytest.mark.parametrize("name", FACTORIES)
def test_a_right_layer_is_called_right(name):
    verdict = verdict_on(FACTORIES[name], dtypes_of(name)[0])
    assert verdict.ok, str(verdict)
    assert verdict.bug_class == "" and 0 < verdict.units < 1


NARROW = [
    (name, dtype)
    for name in FACTORIES
    if name.startswith(("torch/", "moeblaze_ref/experts/"))
    for dtype in dtypes_of(name)[1:]
]


@pytest.mark.parametrize(("name", "dtype"), NARROW, ids=str)
def test_a_right_layer_is_called_right_in_few_bits(name, dtype):
    verdict = verdict_on(FACTORIES[name], dtype)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_is_named_by_its_class(name):
    factory, bug_class = MUTANTS[name]
    verdict = verdict_on(factory)
    assert not verdict.ok and verdict.bug_class == bug_class, str(verdict)
    assert verdict.first is not None and verdict.units > 1


def test_every_class_has_a_mutant():
    """The names are unique; a class that no mutant has cannot be believed. Large layers have tests of their own."""
    names = [bug.name for bug in diagnosis.CLASSES if bug.ways != {large.WAY}]
    assert len(set(names)) == len(names) and {mutant.bug_class for mutant in MUTANTS.values()} == set(names)


# Layers that are wrong everywhere -------------------------------------------------------------------------------------


class Zeros(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return 0 * super().forward(x, topk_index, topk_weights)


class NoGradients(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index, topk_weights)
        return out.detach() + 0 * out


class NextExpert(plain.PlainExperts):
    """The right answer of the wrong experts."""

    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, (topk_index + 1) % len(self.down), topk_weights)


GRADIENTS = {"x", "topk_weights", "gate", "up", "down"}


@pytest.mark.parametrize(
    ("kind", "wrong"), [(Zeros, GRADIENTS | {"out"}), (NoGradients, GRADIENTS), (NextExpert, GRADIENTS | {"out"})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_wrong_tensor_is_found(kind, wrong, dtype):
    verdict = verdict_on(lambda **sizes: plain.experts(kind=kind, **sizes), dtype)
    steps = [finding for finding in verdict.findings if finding.way == "a step" and finding.case == "random"]
    assert {deviation.tensor for finding in steps for deviation in finding.wrong} == wrong


class OneToken(plain.PlainExperts):
    """Off by a tenth at one token."""

    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index, topk_weights)
        scale = torch.ones(len(x), 1, dtype=x.dtype)
        scale[5:6] = 1.1
        return out * scale


def test_the_first_wrong_token_is_named():
    verdict = verdict_on(lambda **sizes: plain.experts(kind=OneToken, **sizes))
    first = verdict.first.wrong[0]
    assert (first.tensor, first.part) == ("out", "token 5") and 0.05 < first.error < 0.1001  # beside the usual token
    assert first.units == pytest.approx(first.error / first.bound) and verdict.bug_class == UNKNOWN


class Raising(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        if len(x) == 1:
            raise RuntimeError("cannot squeeze\nmore lines")
        return super().forward(x, topk_index, topk_weights)


def test_an_error_is_a_finding():
    verdict = verdict_on(lambda **sizes: plain.experts(kind=Raising, **sizes))
    assert verdict.first.raised == "RuntimeError: cannot squeeze" and verdict.first.case == "one token"
    assert verdict.units == math.inf and verdict.bug_class == UNKNOWN


class AlwaysRaising(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        raise RuntimeError("no kernel")


def test_a_layer_that_never_runs_has_no_bits():
    verdict = verdict_on(lambda **sizes: plain.experts(kind=AlwaysRaising, **sizes))
    assert verdict.deterministic is None and not any(finding.ok for finding in verdict.findings)


class OffAndDoubled(plain.PlainExperts):
    """Two bugs: rows at wrong tokens, and a gradient twice as large."""

    def combine(self, out, token, y):
        return super().combine(out, token, y).roll(1, 0)

    def up(self, e, rows):
        weight = self.gate_up[e]
        return list((rows @ (2 * weight - weight.detach()).mT).chunk(2, -1))


def test_a_class_that_explains_the_output_alone_is_not_named():
    assert verdict_on(lambda **sizes: plain.experts(kind=OffAndDoubled, **sizes)).bug_class == UNKNOWN


class Random(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights) * (1 + 2e-6 * torch.rand(()))


@pytest.mark.parametrize("claims", [False, True])
def test_other_bits_in_a_second_run_are_a_fault_of_layers_that_claim_the_same(claims):
    torch.manual_seed(0)
    verdict = verdict_on(lambda **s: replace(plain.experts(kind=Random, **s), deterministic=claims))
    assert not verdict.deterministic and verdict.ok is not claims


# Cases ----------------------------------------------------------------------------------------------------------------


def adapters():
    yield plain.experts(d=24, h=40, E=8, k=2, dtype=torch.float32, device="cpu")
    yield plain.moe(d=24, h=40, E=8, k=2, dtype=torch.float32, device="cpu", family="deepseek_v3")


@pytest.mark.parametrize("adapter", list(adapters()), ids=["given", "inside"])
def test_cases_have_the_routing_that_they_name(adapter):
    """A router inside makes the choice that a pattern wants, unless its groups forbid it."""
    if adapter.router:
        adapter = replace(adapter, router=replace(adapter.router_inside, groups=1, groups_kept=1))
    for pattern in cases.patterns_for(adapter):
        case = cases.make(adapter, pattern, torch.float32)
        wanted = case.topk_index.sort(1).values
        again = cases.make(adapter, pattern, torch.float32).topk_index.sort(1).values
        assert torch.equal(wanted, again) and case.topk_index.shape == (pattern.sizes.L, pattern.sizes.k)
        used = wanted.unique().tolist()
        if pattern.name == "all tokens to one expert":
            assert used == [pattern.sizes.E // 2]
        if pattern.name == "experts without tokens":
            assert used == [1, 3, 6]
        if pattern.name == "one row past a tile":
            assert (wanted == 0).sum() == 129
        if pattern.repeats:
            assert torch.equal(wanted[:, 0], wanted[:, 1])


def test_a_second_step_has_other_numbers():
    adapter = next(adapters())
    first, second, same_weights = (
        cases.make(adapter, cases.PATTERNS[0], torch.float32, step=step, weights_of=weights)
        for step, weights in ((0, None), (1, None), (1, 0))
    )
    assert not torch.equal(first.topk_index, second.topk_index) and not torch.equal(first.x, second.x)
    assert not torch.equal(first.weights["down"], second.weights["down"])
    assert torch.equal(first.weights["down"], same_weights.weights["down"])
    assert torch.equal(second.x, same_weights.x)


def test_numbers_are_those_that_the_dtype_has():
    case = cases.make(next(adapters()), cases.PATTERNS[0], torch.bfloat16)
    for values in (case.x, case.d_out, *case.weights.values()):
        assert torch.equal(values, values.bfloat16().double())


def test_the_reference_differentiates_all_inputs():
    """Its gradients are those of finite differences."""
    adapter = next(adapters())
    case = cases.make(adapter, cases.PATTERNS[4], torch.float32)
    spec = cases.spec_of(adapter, case.sizes.k)
    found = differentiated(case, lambda inputs: layer(spec, inputs, case.topk_index))
    inputs = case.inputs()
    for name, value in inputs.items():
        direction = torch.randn_like(value)

        def loss(step, name=name, value=value, direction=direction):
            moved = inputs | {name: value + step * direction}
            return (layer(spec, moved, case.topk_index) * case.d_out).sum()

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert float((found[name] * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------


def made(**changes):
    def factory(**sizes):
        return replace(plain.experts(**sizes), **changes)

    return factory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"gate_up": "gate_up: E 2h d"}}, "weights lacks a layout of down, which the layer trains"),
        (
            {"weights": plain.LAYOUTS | {"gate_up": "gate_up: E d 2h"}},
            "gate_up has shape (8, 256, 128), but (E d 2h) with L = 8, d = 128, h = 128, E = 8, k = 2 is (8, 128, 256)",
        ),
        ({"weights": {"up": "gate_up: E 2h d"}}, "weights names 'up', but the layer has gate_up, down"),
        ({"activation": "swish"}, "activation is 'swish', but it must be one of swiglu, geglu"),
        ({"router": "mixtrall"}, "unknown router 'mixtrall'. Did you mean 'mixtral'?"),
    ],
)
def test_an_adapter_that_does_not_fit(changes, message):
    with pytest.raises(ValueError) as raised:
        list(check_layer(made(**changes)))
    assert message in str(raised.value)


class WrongIfCompiled(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index, topk_weights)
        return 2 * out if torch.compiler.is_compiling() else out


def test_a_layer_that_is_wrong_under_torch_compile_alone():
    verdict = verdict_on(partial(plain.experts, kind=WrongIfCompiled))
    assert not verdict.ok and verdict.bug_class == UNKNOWN
    assert {finding.way for finding in verdict.findings if not finding.ok} == {"torch.compile"}


@pytest.mark.parametrize("compiles", [True, False])
def test_a_layer_that_refuses_torch_compile(compiles):
    """As torch's grouped_mm does in float32."""

    def factory(**sizes):
        return replace(grouped.moe("gather_sum", **sizes), dtypes=(torch.float32,), compiles=compiles)

    verdict = verdict_on(factory)
    assert verdict.ok is not compiles
    assert ("torch.compile" in str(verdict)) is compiles


def test_a_dtype_that_the_layer_does_not_take():
    with pytest.raises(ValueError, match=r"the layer computes in .*bfloat16, not in .*float16"):
        verdict_on(FACTORIES["torch/grouped_mm"], torch.float16)


def test_a_factory_that_makes_no_adapter():
    with pytest.raises(TypeError, match="returns a Linear, but it must return a verify.layers.Adapter"):
        list(check_layer(lambda **sizes: torch.nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="module is a int, but it must be an nn.Module or a function"):
        Adapter(3, {})


def test_a_function_is_checked_as_a_module():
    """Its parameters are given by name; this one has the layout of one matrix an expert."""

    def factory(d, h, E, k, dtype, device):
        shapes = {"a": (h, d), "b": (h, d), "c": (d, h)}
        tensors = {
            f"{name}{e}": torch.zeros(shape, dtype=dtype, requires_grad=True)
            for name, shape in shapes.items()
            for e in range(E)
        }

        def run(x, topk_index, topk_weights):
            out = torch.zeros_like(x)
            for e in range(E):
                token, choice = (topk_index == e).nonzero(as_tuple=True)
                hidden = plain.swiglu(x[token] @ tensors[f"a{e}"].mT, x[token] @ tensors[f"b{e}"].mT)
                y = hidden @ tensors[f"c{e}"].mT * topk_weights[token, choice, None].to(x.dtype)
                out = out.index_add(0, token, y)
            return out

        return Adapter(run, {"a*": "gate: h d", "b*": "up: h d", "c*": "down: d h"}, tensors=tensors)

    assert verdict_on(factory).ok
