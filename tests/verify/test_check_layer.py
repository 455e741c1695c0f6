"""Layers that are right, and layers with a bug of each class."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import returned
from mutants import MUTANTS, Contiguous, Destroying, DivisorDetached, GatedShared, gated_shared
from torch.nn.functional import gelu

from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.routers import ROUTERS, Router, Shared
from moeblaze_ref.nn import routers
from moeblaze_ref.nn.torch_sequential import SequentialMoE
from moeblaze_ref.verify.layers import cases, deviations, diagnosis, large, layouts, reference, ways
from moeblaze_ref.verify.layers.activations import ClampedSwiglu
from moeblaze_ref.verify.layers.adapter import Adapter, leaves, load, make
from moeblaze_ref.verify.layers.adapters import factories, grouped, plain, transformers
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts
from moeblaze_ref.verify.layers.check import PROBE, UNKNOWN, _Check, check_in_steps, check_layer, evidence_of
from moeblaze_ref.verify.layers.reference import differentiated, layer

FACTORIES = factories()


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny products are slower in two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _guards_not_timed(monkeypatch):
    """torch.compile writes past the caches of the processor to time its guards: a fifth of a second for each layer."""
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)


def verdict_on(factory, dtype=torch.float32):
    (verdict,) = check_layer(factory, [dtype])
    return verdict


def experts_of(kind):
    return partial(plain.experts, kind=kind)


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


def with_shared(*, d, h, E, k, dtype, device, activation):
    made = SequentialMoE(d, h, E, k, activation=activation, shared=Shared(width=8), dtype=dtype, device=device)
    first, second = ("gate", "up") if is_gated(activation) else ("up", "")
    layouts = {"wg": "router: d E", "w1": f"{first}: E d h", "w3": "down: E h d"}
    layouts |= {"shared_expert.w1": f"shared_{first}: d s", "shared_expert.w3": "shared_down: s d"}
    if second:
        layouts |= {"w2": f"{second}: E d h", "shared_expert.w2": f"shared_{second}: d s"}
    return Adapter(made, layouts, Router(), activation, shared=8)


@pytest.mark.parametrize("activation", ["swiglu", "reglu", "gelu"])
def test_a_shared_expert_has_the_activation_of_the_others(activation):
    verdict = verdict_on(partial(with_shared, activation=activation))
    assert verdict.ok, str(verdict)


def qwen2_moe(*, d, h, E, k, dtype, device):
    """A block of transformers whose shared expert has a gate."""
    from transformers.models.qwen2_moe import configuration_qwen2_moe, modeling_qwen2_moe

    sizes = {"hidden_size": d, "moe_intermediate_size": h, "shared_expert_intermediate_size": h}
    sizes |= {"num_experts": E, "num_experts_per_tok": k, "norm_topk_prob": True}
    config = configuration_qwen2_moe.Qwen2MoeConfig(**sizes)
    config._experts_implementation = "eager"
    block = modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config).to(device, dtype)
    layouts = {"block.gate.weight": "router: E d", "block.shared_expert_gate.weight": "shared_expert_gate: 1 d"}
    layouts |= {f"block.experts.{name}": layout for name, layout in transformers.EXPERTS.items()}
    layouts |= {f"block.shared_expert.{name}": layout for name, layout in transformers.SHARED.items()}
    return Adapter(transformers.Flat(block), layouts, "mixtral", shared=h)


@pytest.mark.parametrize("factory", [qwen2_moe, partial(gated_shared, GatedShared)], ids=["qwen2_moe", "plain"])
def test_a_shared_expert_may_have_a_gate(factory):
    verdict = verdict_on(factory)
    assert verdict.ok, str(verdict)


def test_a_gate_of_a_shared_expert_whose_gradient_nearly_cancels():
    """Of one token it is a scalar product, which the numbers of seed 117 make small."""
    factory = partial(gated_shared, GatedShared)
    adapter = make(factory, PROBE, torch.float32, "cpu")
    (pattern,) = (one for one in cases.patterns_for(adapter) if one.name == "one token")
    (finding,) = returned(_Check(factory, adapter, torch.float32, "cpu")._run("a step", ways.plain, pattern, 117, []))
    assert finding.ok, str(finding)


def test_a_divisor_that_no_layer_needs_is_another_bug_than_its_gradient():
    """A router that must not divide: its gates are wrong, too, so that no class explains its gradients."""
    verdict = verdict_on(partial(plain.moe, kind=DivisorDetached, family="olmoe"))
    assert verdict.first.wrong[0].tensor == "out" and verdict.bug_class == UNKNOWN


class TwoBugs(Contiguous, Destroying):
    pass


class BugAndRefusal(Contiguous):
    def forward(self, x, topk_index, topk_weights):
        if not torch.is_grad_enabled():
            raise RuntimeError("it trains alone")
        return super().forward(x, topk_index, topk_weights)


def test_two_bugs_of_one_layer_are_both_named():
    verdict = verdict_on(partial(plain.experts, kind=TwoBugs))
    assert verdict.bug_class == "backward destroys what it needs and strides ignored"
    others = re.findall(r"^also wrong: (.*), random: the (?:output|gradient)", str(verdict), re.MULTILINE)
    assert others == ["a strided x", "a transposed x", "an expanded x"]


def test_an_error_that_no_class_explains_leaves_the_name_of_a_bug():
    verdict = verdict_on(partial(plain.experts, kind=BugAndRefusal))
    raised = {finding.way for finding in verdict.findings if finding.raised}
    assert "no gradients wanted" in raised and verdict.bug_class == "strides ignored"


class Doubling(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        x.data.mul_(2)
        return super().forward(x, topk_index, topk_weights)


def test_a_layer_that_is_wrong_because_it_changes_x_says_that_it_does():
    verdict = verdict_on(partial(plain.experts, kind=Doubling))
    assert verdict.bug_class == UNKNOWN and "also wrong: inputs after a step, random: it changes x" in str(verdict)
    assert verdict.not_supported == ()


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


def test_a_verdict_says_what_the_wrong_step_was():
    """Also one that raised an error; of another way of running the names are enough."""
    wrong = str(verdict_on(experts_of(OneToken)).first)
    step = "one forward and one backward of 61 tokens, 7 experts, 2 for each token, d = 24, h = 40"
    assert wrong.startswith(f"a step, random ({step}): the output, token 5: error ")
    raised = str(verdict_on(experts_of(Raising)).first)
    step = "one forward and one backward of 1 token, 4 experts, 2 for each token, d = 16, h = 24"
    assert raised.startswith(f"a step, one token ({step}): RuntimeError: cannot squeeze (")
    way = str(findings_on(Contiguous, "random", ways.STRIDED)[0])
    assert way.startswith("a strided x, random (61 tokens, 7 experts, 2 for each token, d = 24, h = 40): the output, ")
    (unknown,) = findings_on(Raising, "one token", ways.SIZES)
    assert str(unknown).startswith("other sizes, one token: RuntimeError: cannot squeeze (")


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
    assert verdict.first.raised.startswith("RuntimeError: cannot squeeze (") and verdict.first.case == "one token"
    assert verdict.units == math.inf and verdict.bug_class == UNKNOWN
    assert str(verdict).startswith("float32: wrong (raises RuntimeError)\n")


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


# Layers that are wrong in one case or one way -------------------------------------------------------------------------


def findings_on(kind, case, way="a step", **options):
    """What one way of running one case finds."""
    factory = partial(plain.experts, kind=kind, **options)
    adapter = make(factory, PROBE, torch.float32, "cpu")
    (pattern,) = (pattern for pattern in cases.PATTERNS if pattern.name == case)
    run = ways.plain if way == "a step" else ways.WAYS[way]
    return returned(_Check(factory, adapter, torch.float32, "cpu")._run(way, run, pattern, 0, []))


class FourChoices(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index[:, :4], topk_weights[:, :4])


class ByteOfAnId(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index.to(self.narrow).long() % len(self.down), topk_weights)

    narrow = torch.uint8


class SignedByteOfAnId(ByteOfAnId):
    narrow = torch.int8


class ByteOfAPlace(plain.PlainExperts):
    """Counts an expert's rows in a byte, so that later rows overwrite earlier ones."""

    def expert(self, e, rows, gate):
        return super().expert(e, rows, gate * (torch.arange(len(gate)) >= len(gate) - 256)[:, None])


class RowsOfZeroGatesSkipped(plain.PlainExperts):
    """Leaves out rows whose gate is zero, and so their gates' gradients."""

    def forward(self, x, topk_index, topk_weights):
        kept = torch.where(topk_weights == 0, topk_weights.detach(), topk_weights)
        return super().forward(x, topk_index, kept)


class GatesCut(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights.clamp(min=0))


class TwoTilesOfColumns(plain.PlainExperts):
    def up(self, e, rows):
        return [part * (torch.arange(part.shape[1]) < 256) for part in super().up(e, rows)]


class WholeTilesLost(plain.PlainExperts):
    def expert(self, e, rows, gate):
        return super().expert(e, rows, gate * (len(rows) % 64 != 0))


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (FourChoices, "many experts"),
        (TwoTilesOfColumns, "wider than two tiles"),
        (WholeTilesLost, "whole tiles"),
        (ByteOfAnId, "more experts than a byte counts"),
        (SignedByteOfAnId, "more experts than a byte counts"),
        (ByteOfAPlace, "more rows than a byte counts"),
        (GatesCut, "gates of zero and below"),
    ],
)
def test_a_case_that_shows_a_bug(kind, case):
    (right,), (wrong,) = findings_on(kind, "random"), findings_on(kind, case)
    assert right.ok and wrong.wrong[0].tensor == "out"


def test_gates_of_zero_have_gradients():
    (finding,) = findings_on(RowsOfZeroGatesSkipped, "gates of zero and below")
    assert {deviation.tensor for deviation in finding.wrong} == {"topk_weights"}


class NotShifted(plain.PlainMoE):
    """A softmax of the dtype of x, without the largest logit subtracted."""

    def route(self, x):
        scores = self.gate(x).exp()
        values, index = (scores / scores.sum(-1, keepdim=True)).topk(self.k)
        return index, values / values.sum(-1, keepdim=True)


def test_large_logits_show_an_exponential_that_overflows():
    sizes = {"d": 24, "h": 16, "E": 6, "k": 2, "dtype": torch.float16, "device": "cpu"}
    factory = partial(plain.moe, kind=NotShifted)
    found = {one.name: evidence_of(factory, one, torch.float16) for one in cases.patterns_for(factory(**sizes))}
    assert [name for name, one in found.items() if one.wrong] == ["large logits"]
    assert found["large logits"].units == math.inf


class Renormalizing(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        sums = topk_weights.sum(-1, keepdim=True)
        return super().forward(x, topk_index, topk_weights / sums.detach())


class Clamping(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights.clamp(max=1.0))


@pytest.mark.parametrize("kind", [Renormalizing, Clamping])
def test_given_gates_are_not_those_of_a_softmax(kind):
    (finding,) = findings_on(kind, "random")
    assert finding.wrong[0].tensor == "out"


class WrongAfterInference(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        self.inferred = getattr(self, "inferred", False) or not torch.is_grad_enabled()
        return super().forward(x, topk_index, topk_weights) * (2.0 if self.inferred else 1.0)


def test_a_step_after_inference():
    findings = findings_on(WrongAfterInference, "random", "a step after inference")
    assert [(one.how, one.wrong[0].tensor) for one in findings] == [("inference_mode", "out"), ("no_grad", "out")]
    assert findings_on(WrongAfterInference, "random")[0].ok


class RefusingInference(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        if torch.is_inference_mode_enabled():
            raise RuntimeError("no inference mode")
        return super().forward(x, topk_index, topk_weights)


def test_inference_mode_is_a_way_of_its_own():
    findings = findings_on(RefusingInference, "random", "no gradients wanted")
    assert [one.raised.partition(" (")[0] for one in findings] == ["RuntimeError: no inference mode"]


class MadeInInference(plain.PlainExperts):
    """Keeps a factor that it makes in its first call."""

    def forward(self, x, topk_index, topk_weights):
        self.factor = getattr(self, "factor", torch.ones(1, dtype=x.dtype))
        return super().forward(x * self.factor, topk_index, topk_weights)


def test_what_inference_mode_made_is_no_use_in_training():
    (finding,) = findings_on(MadeInInference, "random", "a step after inference")
    assert finding.raised.startswith("RuntimeError: Inference tensors cannot be saved for backward.")


class WrongAtOneSize(plain.PlainExperts):
    def combine(self, out, token, y):
        return super().combine(out, token, y * (0.5 if len(out) == 305 else 1.0))


def test_a_layer_that_is_wrong_at_a_size_keeps_nothing_of_another():
    verdict = verdict_on(experts_of(WrongAtOneSize))
    assert verdict.bug_class == UNKNOWN
    wrong = {(finding.way, finding.case) for finding in verdict.findings if not finding.ok}
    assert wrong == {("other sizes", "random"), ("a step", "random")}


class DetachedInEvaluation(plain.PlainExperts):
    factor = 1.0

    def combine(self, out, token, y):
        found = super().combine(out, token, y)
        return found if self.training else self.factor * found.detach()


class WrongInEvaluation(DetachedInEvaluation):
    factor = 0.5


def test_a_layer_after_eval_may_have_no_backward():
    assert all(finding.ok for finding in findings_on(DetachedInEvaluation, "random", "evaluation"))
    first, second, trained = findings_on(WrongInEvaluation, "random", "evaluation")
    assert [one.wrong[0].tensor for one in (first, second)] == ["out", "out"] and trained.ok


class NoTokens(plain.PlainExperts):
    """Does something else if there is no token."""

    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights) if len(x) else self.without_tokens(x)


class RefusesNoTokens(NoTokens):
    def without_tokens(self, x):
        raise RuntimeError("no token")


class GradientsOfNothing(NoTokens):
    def without_tokens(self, x):
        weight = self.down * 1
        weight.register_hook(torch.ones_like)
        return x + weight.sum() * torch.zeros(0, 1)


def test_a_step_without_tokens_may_be_refused():
    assert verdict_on(experts_of(plain.PlainExperts)).not_supported == ()
    verdict = verdict_on(experts_of(RefusesNoTokens))
    assert verdict.ok and verdict.not_supported == (ways.EMPTY,)


class BrokenByNoTokens(NoTokens):
    def without_tokens(self, x):
        self.down.data.zero_()
        self.forward = lambda x, *_: 0 * x
        return x


def test_a_step_after_one_without_tokens():
    verdict = verdict_on(experts_of(BrokenByNoTokens))
    (wrong,) = (finding for finding in verdict.findings if not finding.ok)
    assert (wrong.way, wrong.how, wrong.wrong[0].tensor) == (ways.EMPTY, "the step after it", "out")


def test_a_step_without_tokens_has_gradients_of_zero():
    verdict = verdict_on(experts_of(GradientsOfNothing))
    assert not verdict.ok and verdict.what == "not zero" and verdict.not_supported == ()
    assert verdict.first.raised == "a step without tokens has a gradient of down that is not zero"


def test_ways_have_experts_without_tokens_and_a_single_token():
    verdict = verdict_on(experts_of(plain.PlainExperts))
    for way in ways.WAYS.keys() - ways.ONCE:
        found = {finding.case for finding in verdict.findings if finding.way == way}
        assert found == {"random", "experts without tokens", "one token"}, way


def returns(change):
    """Experts whose output is changed by a function."""

    class Changed(plain.PlainExperts):
        def forward(self, x, topk_index, topk_weights):
            return change(super().forward(x, topk_index, topk_weights))

    return Changed


def with_setting(change):
    def changed(out):
        change()
        return out

    return returns(changed)


NO_TENSOR = "but it must be a tensor, or a tuple that begins with it"


@pytest.mark.parametrize(
    ("kind", "raised", "fault"),
    [
        (returns(lambda out: None), f"the output is None, {NO_TENSOR}", "type of the output"),
        (returns(lambda out: [out]), f"the output is a list, {NO_TENSOR}", "type of the output"),
        (
            returns(lambda out: out[:-1]),
            "the output has shape (60, 24), but it must be (61, 24)",
            "shape of the output",
        ),
        (
            returns(lambda out: out.double()),
            "the output has torch.float64, but x has torch.float32",
            "dtype of the output",
        ),
        (
            returns(lambda out: out.detach()),
            "the output has no gradient: it is detached from x and from the weights",
            "no gradient",
        ),
        (
            with_setting(lambda: torch.set_default_dtype(torch.float64)),
            "it changes torch's default dtype from torch.float32 to torch.float64",
            "changes torch's default dtype",
        ),
        (
            with_setting(lambda: torch.set_grad_enabled(False)),
            "it changes torch's gradient mode from True to False",
            "changes torch's gradient mode",
        ),
        (
            with_setting(lambda: torch.set_num_threads(2)),
            "it changes torch's number of threads from 1 to 2",
            "changes torch's number of threads",
        ),
    ],
)
def test_what_no_layer_may_do(kind, raised, fault):
    (finding,) = findings_on(kind, "random")
    assert (finding.raised, finding.fault) == (raised, fault) and not finding.ok
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled() and torch.get_num_threads() == 1


def test_an_error_of_the_check_is_not_one_of_the_layer(monkeypatch):
    def broken(spec, case):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(reference, "exact", broken)
    monkeypatch.setattr(deviations, "_known", {})
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        findings_on(plain.PlainExperts, "random")


class NanOfOneToken(plain.PlainExperts):
    """The variance of a sample of one."""

    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights) + 0 * (x - x.mean(0)).square().sum(0) / (len(x) - 1)


def test_nan_of_one_token_is_not_that_of_experts_without_tokens():
    verdict = verdict_on(partial(plain.experts, kind=NanOfOneToken))
    assert {f.case for f in verdict.findings if not f.ok} == {"one token", "one token, one choice"}
    assert verdict.bug_class == UNKNOWN


# Small errors ---------------------------------------------------------------------------------------------------------


class Noisy(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index, topk_weights)
        return out * (1 + 1e-3 * torch.randn_like(out))


def changes_gradient(change):
    """Experts whose gradient of down is changed by a function, as that of a sum of many rows may be by rounding."""

    class Changed(plain.PlainExperts):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.down.register_hook(change)

    return Changed


SMALL = {
    "1.01": returns(lambda out: 1.01 * out),
    "1.001": returns(lambda out: 1.001 * out),
    "noise": Noisy,
    "1.01 in a gradient": changes_gradient(lambda gradient: 1.01 * gradient),
    "noise in a gradient": changes_gradient(lambda gradient: gradient * (1 + 1e-3 * torch.randn_like(gradient))),
}


@pytest.mark.parametrize("kind", SMALL.values(), ids=SMALL)
def test_a_small_error_is_not_taken_for_rounding(kind):
    torch.manual_seed(0)
    verdict = verdict_on(experts_of(kind))
    assert verdict.bug_class == UNKNOWN and verdict.units < 2e3


@pytest.mark.parametrize("error", [0.03, 0.2])
def test_a_larger_error_is_that_of_rounding_only_in_a_sum_of_many_rows(error):
    """A row is rounded once; the sum over 600 tokens 600 times."""
    made = evidence_of(FACTORIES["torch/experts"], next(p for p in cases.PATTERNS if p.sizes.L == 600), torch.float32)
    largest = {
        name: diagnosis._most_of_rounding(made, deviations.Deviation(name, None, error, 1e-5)) for name in made.found
    }
    assert {name for name, most in largest.items() if error < most} == (
        {"gate", "up", "down"} if error < 0.1 else set()
    )


def refuse(tensor):
    if not tensor.is_contiguous():
        raise RuntimeError("x must be contiguous")


class Refusing(plain.PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        refuse(x)
        return super().forward(x, topk_index, topk_weights)


def test_an_error_does_not_show_that_strides_are_ignored():
    verdict = verdict_on(partial(plain.experts, kind=Refusing))
    assert verdict.first.raised.startswith("RuntimeError: x must be contiguous (") and verdict.bug_class == UNKNOWN


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


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_no_token_is_near_a_tie(family):
    """A router that multiplies in bfloat16, as under autocast, chooses what the float64 one does."""
    for pattern, seed in itertools.product(cases.PATTERNS, range(10)):
        sizes = pattern.sizes
        adapter = plain.moe(
            d=sizes.d, h=sizes.h, E=sizes.E, k=sizes.k, dtype=torch.float32, device="cpu", family=family
        )
        if not cases._takes(adapter, pattern) or sizes.L > 200 or sizes.E > 64:
            continue  # these take long
        case, spec = cases.make(adapter, pattern, torch.float32, seed), cases.spec_of(adapter, sizes.k)
        logits = (case.x.bfloat16() @ case.weights["router"].bfloat16()).double()
        chosen = routers.choose(logits, spec.k, spec.router, case.weights.get("selection_bias")).topk_experts
        assert torch.equal(chosen.sort(1).values, case.topk_index.sort(1).values), (pattern.name, seed)


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


def test_equal_tokens_are_few_rows(monkeypatch):
    """Their errors are equal, so the bound of what they sum to is that of a single row."""
    adapter = next(adapters())
    case = cases.make(adapter, cases.PATTERNS[0], torch.bfloat16)
    of = cases.spec_of(adapter, 2), torch.bfloat16, torch.float32, reference.PLAIN_WAYS
    equal = ways._with_equal_tokens(case)

    def bounds(case):
        return deviations._computed(of[0], case, *of[1:]).bounds["down"][0]

    few, many = bounds(equal), bounds(case)
    monkeypatch.setattr(deviations, "FEW_ROWS", 0)
    assert few == pytest.approx(2 * bounds(equal)) and many == bounds(case)


def test_an_expert_with_few_rows_has_the_bound_of_few_numbers():
    """The rounding of a row is in all numbers of its expert's gradient."""
    adapter = next(adapters())
    pattern = cases.PATTERNS[0]._replace(choose=lambda sizes, _: torch.tensor([[0, 1]] * 58 + [[0, 2]] * 3))
    case = cases.make(adapter, pattern, torch.bfloat16)
    of = torch.bfloat16, torch.float32, reference.PLAIN_WAYS
    whole, of_experts = deviations._computed(cases.spec_of(adapter, 2), case, *of).bounds["gate"]
    assert of_experts[0] == of_experts[1] and of_experts[2] == 2 * of_experts[0]
    repeated = case._replace(x=case.x[:1].expand_as(case.x).contiguous())
    _, equal = deviations._computed(cases.spec_of(adapter, 2), repeated, *of).bounds["gate"]
    assert equal[0] == equal[1] == equal[2], "the rows of each expert are all alike"


def test_the_gradient_of_a_router_has_the_bound_of_as_many_numbers_as_there_are_choices():
    adapter = plain.moe(d=64, h=40, E=8, k=2, dtype=torch.float32, device="cpu")
    bounds = {}
    for L in (100, 200):
        pattern = cases.PATTERNS[0]._replace(sizes=cases.PATTERNS[0].sizes._replace(L=L, d=64))
        case, spec = cases.make(adapter, pattern, torch.bfloat16), cases.spec_of(adapter, 2)
        of = torch.bfloat16, torch.float32
        lost = max(
            deviations._errors("router", reference.results(spec, case, *of, way)["router"], exact, size)[0]
            for exact, size in [(reference.exact(spec, case)["router"], reference.sizes(spec, case)["router"])]
            for way in reference.PLAIN_WAYS
        )
        bounds[L] = deviations._computed(spec, case, *of, reference.PLAIN_WAYS).bounds["router"][0] / lost
    assert bounds[100] >= 4 and bounds[200] == pytest.approx(2)


def test_numbers_much_larger_than_the_others_count_alone():
    generator = torch.Generator().manual_seed(0)
    normal, counted = torch.randn(3000, 10, generator=generator).double(), deviations._numbers_that_count
    assert 27_000 < counted(normal) <= 30_000 and counted(torch.ones(7)) == 7 and counted(torch.zeros(5)) == 0
    normal[:20] *= 1000
    assert 150 < counted(normal) < 250


def with_numbers_at_a_limit(at):
    """Experts with one hidden number, whose gate and up are 7 for every token, times ``at``."""
    sizes = cases.Sizes(40, 16, 1, 2, 1)
    adapter = plain.experts(
        d=16, h=1, E=2, k=1, dtype=torch.float32, device="cpu", biases=True, activation=ClampedSwiglu()
    )
    pattern = cases.PATTERNS[0]._replace(sizes=sizes)
    case = cases.make(adapter, pattern, torch.bfloat16)
    weights = case.weights | {role: torch.zeros_like(case.weights[role]) for role in ("gate", "up")}
    weights |= {role: torch.full_like(case.weights[role], 7.0 * at) for role in ("gate_bias", "up_bias")}
    return cases.spec_of(adapter, 1), case._replace(weights=weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_a_rounding_error_clamps_is_within_the_bound(dtype):
    """And only that: the bound of a case whose numbers are elsewhere does not change."""
    eps = max(torch.finfo(dtype).eps, deviations.LEAST_MOVE)
    for at, near in ((1 - eps / 2, True), (1 + eps / 2, True), (1 - 3 * eps, False), (1 + 3 * eps, False)):
        spec, case = with_numbers_at_a_limit(at)
        found = deviations._computed(spec, case, dtype, dtype, reference.PLAIN_WAYS).bounds
        unlimited = spec._replace(activation=lambda gate, up: ClampedSwiglu()(gate, up))
        without = deviations._computed(unlimited, case, dtype, dtype, reference.PLAIN_WAYS).bounds
        assert found["out"][0] == without["out"][0] and found["down"][0] == without["down"][0]
        assert (found["up_bias"][0] > 0.5) == near and (near or found["up_bias"][0] == without["up_bias"][0])


def test_moved_limits_change_no_value():
    gate, up = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).double() * 8
    activation = ClampedSwiglu(least=-5.0)
    for relative in (2.0**-7, -(2.0**-7)):
        assert torch.equal(activation.with_limits_moved(relative)(gate, up), activation(gate, up))


@pytest.mark.parametrize(("family", "rounds"), [("deepseek_v2", False), ("deepseek_v3", False), ("olmoe", True)])
def test_a_plain_router_multiplies_in_the_dtype_of_its_family(family, rounds):
    adapter = plain.moe(d=24, h=16, E=8, k=2, dtype=torch.bfloat16, device="cpu", family=family)
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.float() @ adapter.module.gate.weight.float().T
    assert torch.equal(adapter.module.logits(x), exact) != rounds


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


WITH_A_ROUTER = {"gate_up": torch.zeros(8, 512, 128), "down": torch.zeros(8, 128, 256), "r": torch.zeros(128, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"gate_up": "gate_up: E 2h d"}}, "weights lacks a layout of down, which the layer trains"),
        (
            {"weights": plain.LAYOUTS | {"gate_up": "gate_up: E d 2h"}},
            "gate_up has shape (8, 512, 128), but (E d 2h) with E = 8, d = 128, h = 256 is (8, 128, 512): "
            "(E 2h d) would fit",
        ),
        ({"weights": {"up": "gate_up: E 2h d"}}, "weights names 'up', but the layer has gate_up, down"),
        ({"activation": "swish"}, "activation is 'swish', but it must be one of swiglu, geglu"),
        (
            {"weights": {}, "tensors": {}},
            "weights has no layout of gate, up, down, which a layer with activation 'swiglu'",
        ),
        (
            {"weights": plain.LAYOUTS | {"r": "router: d E"}, "tensors": WITH_A_ROUTER},
            "weights has a layout of router, which a layer with activation 'swiglu' and no router inside does not use: "
            "give router, such as router='mixtral', or remove it",
        ),
        ({"index_dtype": torch.float32}, "index_dtype is torch.float32, but it must be torch.int32 or torch.int64"),
        ({"index_dtype": "int64"}, "index_dtype is 'int64', but it must be torch.int32 or torch.int64"),
        ({"gate_dtype": torch.int64}, "gate_dtype is torch.int64, but it must be torch.float64 or torch.float32"),
        ({"gate_dtype": "float32"}, "gate_dtype is 'float32', but it must be torch.float64 or torch.float32"),
        ({"weighs": "ouput"}, "weighs is 'ouput', but it must be one of output, input"),
        ({"multiple": 0}, "multiple is 0, but it must be >= 1"),
        ({"multiple": "8"}, "multiple is '8' (str), but it must be an integer"),
        ({"shared": -1}, "shared is -1, but it must be >= 0"),
        ({"deterministic": "yes"}, "deterministic is a str, but it must be"),
        ({"dtypes": ()}, "dtypes is (), but it must be a tuple of one or more of torch.float32"),
        ({"dtypes": torch.float32}, "dtypes is torch.float32, but it must be a tuple of one or more of torch.float32"),
        ({"dtypes": ("float32",)}, "dtypes[0] is 'float32', but it must be torch.float32 or torch.bfloat16"),
        ({"weights": None}, "weights is None, but it must be a mapping of str to str"),
        ({"weights": {"gate_up": 3}}, "weights['gate_up'] is an int, but it must be a str"),
        ({"tensors": [1]}, "tensors is a list, but it must be a mapping of str to Tensor"),
        ({"tensors": {"down": 3}}, "tensors['down'] is an int, but it must be a Tensor"),
        ({"activation": 3}, "activation is 3, but it must be one of swiglu, geglu"),
        (
            {"activation": gelu},
            "but 2 were given: a function is called with gate and up; that of an ungated layer is a name, one of silu,",
        ),
        ({"activation": lambda gate, up: 3}, "activation returns an int, but it must return a tensor (R, h)"),
        ({"router": "mixtrall"}, "unknown router 'mixtrall'. Did you mean 'mixtral'?"),
        ({"router": "sigmoid"}, "unknown router 'sigmoid': it says how to score, so write Router(scores='sigmoid')"),
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
    assert verdict.not_supported == (() if compiles else ("torch.compile",))


def test_a_layer_that_torch_compiles_anew_for_each_size_and_choice_of_gradients():
    """As those in plain torch do on a GPU: each is compiled whole, or raises an error."""

    def dense(gate_up, down, x, topk_index, topk_weights):
        gate, up = torch.einsum("ld,ehd->elh", x, gate_up).chunk(2, -1)
        y = torch.einsum("elh,edh->led", torch.nn.functional.silu(gate) * up, down)
        of_experts = torch.zeros_like(y[..., 0]).scatter(1, topk_index, topk_weights.to(y.dtype))
        return torch.einsum("le,led->ld", of_experts, y)

    def factory(*, d, h, E, k, dtype, device):
        weights = leaves(dtype, device, gate_up=(E, 2 * h, d), down=(E, d, h))
        layouts = {"gate_up": "gate_up: E 2h d", "down": "down: E d h"}
        compiled = torch.compile(dense, backend="eager", fullgraph=True, dynamic=False)
        return Adapter(partial(compiled, *weights.values()), layouts, tensors=weights, compiles=False)

    verdict = verdict_on(factory)
    assert verdict.ok, verdict


class RefusingAutocast(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no autocast")
        return super().forward(x, topk_index, topk_weights)


@pytest.mark.parametrize("autocasts", [True, False])
def test_a_layer_that_refuses_autocast(autocasts):
    verdict = verdict_on(lambda **sizes: replace(plain.experts(**sizes, kind=RefusingAutocast), autocasts=autocasts))
    assert verdict.ok is not autocasts
    assert {finding.way for finding in verdict.findings if not finding.ok} == ({"autocast"} if autocasts else set())
    assert verdict.not_supported == (() if autocasts else ("autocast",))
    assert {finding.way for finding in verdict.findings} >= ways.WAYS.keys() - {"autocast", ways.GRAPH}


class RefusingStrides(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        if x.stride(1) != 1:
            raise RuntimeError("columns are not neighbours")
        return super().forward(x, topk_index, topk_weights)


@pytest.mark.parametrize("strides", [True, False])
def test_a_layer_that_refuses_columns_which_are_not_neighbours(strides):
    verdict = verdict_on(lambda **sizes: replace(plain.experts(**sizes, kind=RefusingStrides), strides=strides))
    refused = ("a strided x", "a transposed x")
    assert verdict.ok is not strides
    assert {finding.way for finding in verdict.findings if not finding.ok} == (set(refused) if strides else set())
    assert verdict.not_supported == (() if strides else refused)


class OneBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("retain_graph is not supported")
        return d_out


class RefusingSecondBackward(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return OneBackward.apply(super().forward(x, topk_index, topk_weights))


@pytest.mark.parametrize("retains", [True, False])
def test_a_layer_that_refuses_a_second_backward(retains):
    verdict = verdict_on(
        lambda **sizes: replace(plain.experts(**sizes, kind=RefusingSecondBackward), retains=retains, compiles=False)
    )
    refused = ("a second backward",)
    assert verdict.ok is not retains
    assert {finding.way for finding in verdict.findings if not finding.ok} == (set(refused) if retains else set())
    assert verdict.not_supported == ("torch.compile", *(() if retains else refused))


def test_compiled_layers_say_that_they_have_one_backward():
    sizes = {"d": 16, "h": 16, "E": 2, "k": 1, "dtype": torch.bfloat16, "device": "cpu"}
    made = {name: factory(**sizes) for name, factory in (grouped.factories() | grouped.compiled()).items()}
    assert {name for name, adapter in made.items() if not adapter.retains} == grouped.compiled().keys()


@pytest.mark.parametrize(("multiple", "widths"), [(1, (24, 40)), (8, (24, 40)), (16, (48, 80)), (32, (96, 160))])
def test_widths_are_the_least_that_a_layer_takes(multiple, widths):
    sizes = cases.widened(cases.PATTERNS[0].sizes, multiple)
    assert (sizes.d, sizes.h) == widths
    prime = cases.widened(next(one for one in cases.PATTERNS if one.name == "prime sizes").sizes, multiple)
    assert (prime.d, prime.h) == (29 * multiple, 31 * multiple)


def test_a_dtype_that_the_layer_does_not_take():
    with pytest.raises(ValueError, match=r"the layer computes in .*bfloat16, not in .*float16"):
        verdict_on(FACTORIES["torch/grouped_mm"], torch.float16)


def test_a_factory_that_raises():
    def factory(**sizes):
        raise KeyError("gate")

    with pytest.raises(
        ValueError, match=r"the factory raised KeyError: 'gate' \(test_check_layer.py, line \d+, in factory\)"
    ):
        list(check_layer(factory))


def test_a_factory_that_takes_something_else():
    said = r"the factory takes \(d, h\), but it is called with d, h, E, k, dtype, device by name"
    with pytest.raises(TypeError, match=said):
        list(check_layer(lambda d, h: None))


PROBE_SIZES = {"d": 16, "h": 24, "E": 16, "k": 2, "dtype": torch.float32, "device": "cpu"}


def of_deepseek(*, d, h, E, k, dtype, device):
    router = ROUTERS["deepseek_v3"]
    made = plain.PlainMoE(PlainExperts(d, h, E, dtype, device), k, router)
    layouts = {"experts.gate_up": "gate_up: E 2h d", "experts.down": "down: E d h", "gate.weight": "router: E d"}
    return Adapter(made, layouts | {"selection_bias": "selection_bias: E"}, "deepseek_v3")


def test_a_router_by_its_name_has_as_many_experts_as_its_groups_need():
    verdict = verdict_on(of_deepseek)
    assert verdict.ok, str(verdict)
    sizes = [pattern.sizes for pattern in cases.patterns_for(of_deepseek(**PROBE_SIZES))]
    assert all(one.E % 8 == 0 and one.E >= 16 for one in sizes)


def test_an_unknown_router_is_said_with_the_line_that_names_it():
    def factory(**sizes):
        return Adapter(plain.experts(**sizes).module, plain.LAYOUTS, router="mixtrall")

    place = r"\(test_check_layer.py, line \d+, in factory\)$"
    with pytest.raises(ValueError, match=f"unknown router 'mixtrall'.* {place}"):
        list(check_layer(factory))


@pytest.mark.parametrize(
    ("router", "module", "message"),
    [
        (
            None,
            lambda x: x,
            r"the layer takes \(x\), but it is called with x, topk_index, topk_weights: does it have a router inside\? "
            "Then give router, such as router='mixtral'",
        ),
        (
            "mixtral",
            PlainExperts(8, 8, 2, torch.float32, "cpu"),
            r"the layer takes \(x.*, topk_index.*, topk_weights.*\).*, but it is called with x: "
            "router says that its router is inside",
        ),
    ],
    ids=["router forgotten", "no router inside"],
)
def test_a_layer_that_cannot_be_called_so(router, module, message):
    """The description is wrong, not the layer."""
    with pytest.raises(TypeError, match=message):
        list(check_layer(made(module=module, router=router)))


def test_another_order_of_the_same_axes_is_proposed():
    found = layouts.Layout.parse("gate_up: E d h2").orders()
    assert {order.text for order in found} == {"E d h2", "E h2 d", "d E h2", "d h2 E", "h2 E d", "h2 d E"}
    assert {order.text for order in layouts.Layout.parse("down: E*h d").orders()} == {"E*h d", "E*d h"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gate and up exchanged", "up_gate"), ("interleaved", "2h where the layer has h2"), ("transposed", "")],
)
def test_a_verdict_that_the_layout_may_explain_says_so(name, hint):
    text = str(verdict_on(MUTANTS[name].factory))
    assert ("The adapter may be wrong instead" in text) is bool(hint) and hint in text


def test_hints_on_the_adapter_are_of_classes():
    assert set(diagnosis.ADAPTER) <= {bug.name for bug in diagnosis.CLASSES}


def test_a_right_layer_whose_adapter_names_another_router():
    verdict = verdict_on(lambda **sizes: replace(plain.moe(**sizes, family="mixtral"), router="olmoe"))
    assert verdict.bug_class == "gates renormalized"
    assert str(verdict).endswith("The adapter may be wrong instead: its router may not be the layer's.")


def test_each_step_is_announced():
    """If the process ends, its caller knows in which dtype and case."""
    *begun, verdict = check_in_steps(FACTORIES["torch/experts"], [torch.bfloat16])
    assert begun[0] == "bfloat16, a step, random" and begun[-1] == "bfloat16, the same step twice, random"
    steps = [f"bfloat16, {finding.way}, {finding.case}" for finding in verdict.findings]
    assert [one for one in begun if one in steps] == list(dict.fromkeys(steps))


def test_an_error_is_said_with_its_place_in_the_layers_own_code():
    class Raising(PlainExperts):
        def forward(self, x, topk_index, topk_weights):
            return torch.cat([x, x[:, 1:]])

    verdict = verdict_on(partial(plain.experts, kind=Raising))
    assert re.search(r"RuntimeError: .* \(test_check_layer.py, line \d+, in forward\)$", str(verdict))


def test_a_layout_that_exchanges_two_widths_is_refused():
    def factory(**sizes):
        made = plain.experts(**sizes)
        return replace(made, weights={**made.weights, "down": "down: E h d"})

    with pytest.raises(ValueError, match=r"down has shape \(8, 128, 256\), but \(E h d\) with .* is \(8, 256, 128\)"):
        list(check_layer(factory))


BROKEN = {"syntax": "x = = 1", "raising": "raise RuntimeError('no GPU')", "attribute": "import math; math.nothing"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("syntax", "syntax cannot be imported: SyntaxError: invalid syntax"),
        ("raising", "raising cannot be imported: RuntimeError: no GPU"),
        ("attribute", "attribute cannot be imported: AttributeError: module 'math' has no attribute 'nothing'"),
        ("json:__name__", "json:__name__ is a str, but it must be a factory"),
    ],
)
def test_a_module_without_a_factory(name, message, tmp_path, monkeypatch):
    for module, text in BROKEN.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as raised:
        load(name if ":" in name else f"{name}:make")
    assert message in str(raised.value)


def test_a_factory_that_makes_no_adapter():
    with pytest.raises(TypeError, match="returns a Linear, but it must return a verify.layers.Adapter"):
        list(check_layer(lambda **sizes: torch.nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="module is an int, but it must be an nn.Module or a function"):
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
