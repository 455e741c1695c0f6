"""Models with each implementation of their experts, on a device with made-up time."""

import pytest
import torch
from pretended import PEAK, PretendedDevice
from transformers import AutoConfig, AutoModelForCausalLM

from moeblaze_ref.plan.measure_experts import Model, Row, implementations, measured

SIZES = {"hidden_size": 64, "vocab_size": 61, "num_hidden_layers": 1, "moe_intermediate_size": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def rows():
    config = AutoConfig.for_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, **SIZES, **HEADS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    subject = Model(model, torch.randint(61, (1, 11)))
    names = [*implementations(), "no such experts"]
    found = measured(subject, [Row("tiny", 11, experts) for experts in names], PretendedDevice())
    assert all(parameter.grad is None for parameter in model.parameters())
    return {row.experts: row for row in found}


def test_every_implementation_has_the_same_loss(rows):
    assert rows["eager"].loss > 0
    for name in ("grouped_mm", "moeblaze_minimal", "moeblaze_inputs"):
        assert rows[name].loss == pytest.approx(rows["eager"].loss, rel=1e-5)


def test_every_implementation_has_two_medians_and_a_peak(rows):
    for name, row in rows.items():
        if name != "no such experts":
            assert len(row.step_ms) == 2 and min(row.step_ms) > 0 and row.peak_bytes == PEAK and not row.problem


def test_one_that_fails_has_a_problem(rows):
    failed = rows["no such experts"]
    assert "no such experts" in failed.problem and not failed.step_ms and failed.loss is None
