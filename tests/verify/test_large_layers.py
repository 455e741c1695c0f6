"""Cases of more than 2**31 elements, made smaller: a layer that goes wrong past a number of tokens, or of experts."""

from functools import partial

import pytest
import torch
from helpers import returned

from moeblaze_ref.verify.layers import adapter, cases, check, large
from moeblaze_ref.verify.layers.adapter import Sizes
from moeblaze_ref.verify.layers.adapters import factories, plain
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.large import LARGE, Large

FACTORIES = factories()
SMALL = (
    Large(Pattern("many tokens", Sizes(67, 16, 24, 4, 2), cases.distinct), times=12),
    Large(Pattern("many experts", Sizes(61, 16, 24, 4, 2), cases.distinct), unused=281),
)
NAMES = ("torch/experts", "torch/experts with biases", "torch/deepseek_v3", "moeblaze_ref/minimal")
MOST_TOKENS, MOST_EXPERTS = 700, 280  # which the layers below get right: more than the other cases have


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(large, "LARGE", SMALL)


def verdict_on(factory):
    """As of `check_layer`, which refuses the full sizes on a CPU."""
    made = adapter.make(factory, check.PROBE, torch.float32, "cpu")
    return returned(check._Check(factory, made, torch.float32, "cpu").verdict(seeds=1, large=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_right_layer(name):
    verdict = verdict_on(FACTORIES[name])
    assert verdict.ok, str(verdict)
    inside = name in ("torch/deepseek_v3", "moeblaze_ref/minimal")
    assert verdict.large == (("many tokens",) if inside else ("many tokens", "many experts"))


def test_the_full_sizes_pass_the_number():
    """Of hidden activations, of x, and of each weight."""
    hidden, x, weights = (one.sizes for one in LARGE)
    assert hidden.L * hidden.k * hidden.h > 2**31
    assert x.L * x.d > 2**31
    assert weights.E * weights.d * weights.h > 2**31


class LastTokensRepeatTheFirst(PlainExperts):
    """Reads rows past some number where they would be if the number wrapped."""

    def forward(self, x, topk_index, topk_weights):
        index = torch.arange(len(x)) % MOST_TOKENS
        return super().forward(x[index], topk_index, topk_weights)


class GradientOfAnotherExpert(PlainExperts):
    """Writes the gradient of late experts' weights to an early expert."""

    def up(self, e, rows):
        if e < MOST_EXPERTS:
            return super().up(e, rows)
        weight = self.gate_up[e].detach() + (self.gate_up[0] - self.gate_up[0].detach())
        return list((rows @ weight.mT).chunk(2, -1))


@pytest.mark.parametrize(
    ("kind", "case", "tensor", "part"),
    [
        (LastTokensRepeatTheFirst, "many tokens", "out", f"token {MOST_TOKENS}"),
        (GradientOfAnotherExpert, "many experts", "gate", "expert 0"),
    ],
)
def test_a_layer_that_is_wrong_when_it_is_large(kind, case, tensor, part):
    verdict = verdict_on(partial(plain.experts, kind=kind))
    assert not verdict.ok and verdict.bug_class == "indices past 2^31"
    (finding,) = [finding for finding in verdict.findings if not finding.ok]
    assert (finding.way, finding.case) == (large.WAY, case)
    assert (finding.wrong[0].tensor, finding.wrong[0].part) == (tensor, part)


def raising(error):
    class Raises(PlainExperts):
        def forward(self, x, topk_index, topk_weights):
            if len(x) > MOST_TOKENS:
                raise error
            return super().forward(x, topk_index, topk_weights)

    return partial(plain.experts, kind=Raises)


def test_a_device_without_room_is_no_fault():
    verdict = verdict_on(raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert verdict.ok and verdict.large == ("many experts",)


def test_a_device_without_room_for_the_weights_is_no_fault():
    def factory(**sizes):
        if sizes["E"] > MOST_EXPERTS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain.experts(**sizes)

    verdict = verdict_on(factory)
    assert verdict.ok and verdict.large == ("many tokens",)


def test_an_error_is_a_finding():
    verdict = verdict_on(raising(RuntimeError("an illegal memory access")))
    assert not verdict.ok and verdict.bug_class == "indices past 2^31"
    assert "RuntimeError: an illegal memory access" in str(verdict)
