"""One step of training, and the model under it, against their formulas: what a falling loss alone would not show."""

import math
from dataclasses import replace

import pytest
import torch
from small_lm import CONFIG, SETTINGS
from torch import nn

from moeblaze_ref.lm import data, finite, presets
from moeblaze_ref.lm import train as training
from moeblaze_ref.lm.model import LMOutput, MoETransformer, rotary_angles
from moeblaze_ref.lm.train import NonFinite, Trainer, evaluate, language_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(**changes):
    return Trainer(replace(SETTINGS, **changes), data.python_help())


# The optimizer --------------------------------------------------------------------------------------------------------


def adamw(parameter, gradients, rate, decay, beta1=0.9, beta2=0.999, eps=1e-8):
    """Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2, line by line."""
    m = v = torch.zeros_like(parameter)
    for t, gradient in enumerate(gradients, start=1):
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        moved = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        parameter = parameter - rate * (moved + decay * parameter)
    return parameter


def test_a_step_is_adamws_with_the_weight_decay_of_the_settings_on_every_parameter():
    run = trainer(learning_rate=0.03, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    gradients = {name: [] for name in before}
    for _ in range(2):
        run.advance()
        for name, parameter in run.model.named_parameters():
            gradients[name].append(parameter.grad.clone())
    for name, parameter in run.model.named_parameters():
        moved = parameter.detach() - before[name]
        expected = adamw(before[name], gradients[name], 0.03, 0.5) - before[name]
        assert float((moved - expected).norm() / expected.norm()) < 1e-4, name


def test_gradients_are_cut_to_the_norm_of_the_settings():
    run = trainer(gradient_norm=0.05)
    assert run.advance().gradient_norm > 0.05  # before it is cut
    left = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
    assert float(left.norm()) == pytest.approx(0.05, rel=1e-3)


# Precision ------------------------------------------------------------------------------------------------------------


def test_cross_entropy_is_taken_in_float32():
    """In bfloat16 two logits of order 100 that differ by 0.1 would be one."""
    logits = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)).mul(20).bfloat16()
    targets = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1))
    found = language_loss(LMOutput(logits, ()), targets)
    expected = nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert found.dtype == torch.float32 and float(found) == pytest.approx(float(expected), rel=1e-6)


def test_every_forward_is_in_the_precision_of_the_settings(monkeypatch):
    run = trainer(precision="bfloat16")
    seen = []
    run.model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run.advance()
    run.validate()
    monkeypatch.setattr(training.math, "isfinite", lambda value: False)
    with pytest.raises(NonFinite):
        run.advance()  # twice: the step, and the search for what was not finite in it
    assert seen == [torch.bfloat16] * 4


# Validation -----------------------------------------------------------------------------------------------------------


def test_a_validation_of_more_batches_reads_more_windows_and_is_their_mean(monkeypatch):
    read = []
    sample_windows = data.sample_windows
    monkeypatch.setattr(data, "sample_windows", lambda *args: read.append(sample_windows(*args)) or read[-1])
    model = trainer().model
    found = evaluate(model, data.python_help().validation, batch=2, batches=3)
    assert len(read) == 3 and not torch.equal(read[0][0], read[1][0]) and not torch.equal(read[1][0], read[2][0])
    with torch.no_grad():
        losses = [float(language_loss(model(inputs), targets)) for inputs, targets in read]
    assert found == pytest.approx(sum(losses) / 3, rel=1e-6) and len(set(losses)) == 3


# What is not finite ---------------------------------------------------------------------------------------------------


def test_a_router_loss_that_is_not_finite_is_not_laid_on_a_gradient(monkeypatch):
    real = training.router_loss
    monkeypatch.setattr(training, "router_loss", lambda *args: real(*args) * math.inf)
    with pytest.raises(NonFinite, match="with the router's inf, .*every activation is finite, but a loss is not"):
        trainer().advance()


def test_the_gradient_that_the_backward_reaches_first_is_named():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer, value in zip(model, (math.nan, math.inf, 1.0), strict=True):
        layer.weight.grad = torch.full((2, 2), value)
    assert finite.last_gradient(model) == "1.weight"


# The model ------------------------------------------------------------------------------------------------------------


def test_the_slowest_pair_turns_by_ropes_base():
    """RoFormer (arXiv 2104.09864), section 3.3: 10,000 to the power of -2 i / width."""
    angles = rotary_angles(length=3, width=8)
    assert angles[1].tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-5)
    assert angles[2].tolist() == pytest.approx([2.0, 0.2, 0.02, 0.002], rel=1e-5)


def test_norms_bring_even_small_rows_to_unit_size():
    """The epsilon is far below what any row holds: float32's own."""
    model = MoETransformer(CONFIG)
    for norm in (model.norm, model.blocks[1].moe_norm, model.blocks[1].attention_norm):
        rows = norm(1e-2 * torch.randn(5, CONFIG.d, generator=torch.Generator().manual_seed(0)))
        assert torch.allclose(rows.square().mean(dim=1), torch.ones(5), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("shared", "error", "message"),
    [(-1, ValueError, "shared is -1, but it must be >= 0"), (1.5, TypeError, "shared is 1.5")],
)
def test_a_shared_experts_width_is_checked(shared, error, message):
    with pytest.raises(error, match=message):
        replace(CONFIG, shared=shared)


# Presets --------------------------------------------------------------------------------------------------------------


def test_the_presets_train_as_their_records_say():
    tiny, small = presets.preset("tiny"), presets.preset("lm-small")
    assert (tiny.precision, small.precision) == ("float32", "bfloat16")
    assert (small.config.d, small.config.E, small.config.k, small.config.layers, small.steps) == (512, 16, 2, 8, 2000)


def test_tiny_learns_in_its_first_quarter():
    run = Trainer(presets.preset("tiny"), data.standard_library())
    for _ in range(run.settings.steps // 4):
        run.advance()
    assert run.validate(batches=4) < 2.6  # nats per byte
