"""The small language model: its text, its transformer, its training, and the capture of its MoE layers."""

import math

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.lm import data, plots
from moeblaze_ref.lm import train as training
from moeblaze_ref.lm.model import Attention, LMConfig, LMOutput, MoETrace, MoETransformer, rotary_angles, rotate
from moeblaze_ref.lm.train import capture, evaluate, language_loss, router_loss, train
from moeblaze_ref.nn import oracle

TINY = LMConfig(d=32, h=32, E=4, k=2, layers=2, heads=2, sequence=32)


def relative_error(out, ref):
    error = float((out - ref).detach().norm() / ref.detach().norm())
    assert not math.isnan(error)
    return error


def random_tokens(batch, length, seed=0):
    return torch.randint(TINY.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_model(seed=0, moe=oracle.OracleMoE):
    torch.manual_seed(seed)
    return MoETransformer(TINY, moe)


# Text


def test_the_text_is_english_and_the_two_parts_share_no_paragraph():
    corpus = data.python_help()
    parts = [part.numpy().tobytes().decode().split("\n\n") for part in (corpus.training, corpus.validation)]
    assert corpus.training.dtype == corpus.validation.dtype == torch.uint8
    assert len(corpus.training) > 100_000 and len(corpus.validation) > 10_000
    assert sum(paragraph.count(" the ") for paragraph in parts[0]) > 1000
    assert len(set(parts[0])) == len(parts[0])
    assert not set(parts[0]) & set(parts[1])
    assert corpus.fingerprint == "93adb42145d8898f", "it is the same on every machine"


def test_a_window_is_text_and_its_target_is_the_next_byte():
    text = data.python_help().validation
    inputs, targets = data.sample_windows(text, 5, 40, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (5, 40)
    for window, following in zip(inputs, targets, strict=True):
        assert bytes([*window, following[-1]]) in text.numpy().tobytes()
        assert torch.equal(window[1:], following[:-1])


def test_the_generator_decides_the_windows():
    text = data.python_help().validation
    first, same, other = (
        data.sample_windows(text, 4, 16, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_windows_reach_both_ends_of_the_text():
    text = torch.arange(6, dtype=torch.uint8)
    inputs, targets = data.sample_windows(text, 200, 3, torch.Generator().manual_seed(0))
    assert set(inputs[:, 0].tolist()) == {0, 1, 2}
    assert int(targets.max()) == 5


@pytest.mark.parametrize(
    "batch, length, message",
    [(-1, 4, "batch is -1"), (2, 0, "length is 0, but it must be 1..9"), (2, 10, "length is 10, but it must be 1..9")],
)
def test_windows_that_do_not_exist_are_refused(batch, length, message):
    with pytest.raises(ValueError, match=message):
        data.sample_windows(torch.zeros(10, dtype=torch.uint8), batch, length, torch.Generator())


# Model


def test_rotation_turns_each_pair_by_position_times_frequency():
    x = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64).expand(3, 4)  # pairs (1, 0) and (2, 0)
    turned = rotate(x, rotary_angles(3, 4, base=100.0))
    for position in range(3):
        fast, slow = position, position / 10  # 100 ** (-2 / 4) = 1 / 10
        expected = [math.cos(fast), 2 * math.cos(slow), math.sin(fast), 2 * math.sin(slow)]
        assert relative_error(turned[position], torch.tensor(expected, dtype=torch.float64)) < 1e-6


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = rotary_angles(12, 8).double()
    products = rotate(q.expand(12, 8), angles) @ rotate(k.expand(12, 8), angles).T  # (12, 12)
    assert relative_error(products[2:, 5:].diagonal(), products[0, 3].expand(7)) < 1e-6
    assert abs(products[0, 3] - products[0, 4]) > 1e-3


def test_attention_is_a_causal_softmax_over_rotated_keys():
    torch.manual_seed(0)
    attention = Attention(d=16, heads=2).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    weights = attention.qkv.weight.view(3, 2, 8, 16)
    angles = rotary_angles(7, 8)
    heads = []
    for head in range(2):
        q, k, v = (x @ weights[part, head].T for part in range(3))  # each (3, 7, 8)
        scores = rotate(q, angles) @ rotate(k, angles).transpose(1, 2) / math.sqrt(8)
        future = torch.ones(7, 7, dtype=torch.bool).triu(diagonal=1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v)
    expected = torch.cat(heads, dim=-1) @ attention.project.weight.T
    assert relative_error(attention(x), expected) < 1e-12


@torch.no_grad()
def test_a_later_byte_does_not_change_earlier_predictions():
    model = tiny_model().double()
    tokens = random_tokens(2, 20)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % TINY.vocab
    before, after = model(tokens).logits, model(changed).logits
    assert relative_error(after[:, :12], before[:, :12]) < 1e-12
    for position in range(12, 20):
        assert relative_error(after[:, position], before[:, position]) > 1e-6


def test_every_parameter_gets_a_gradient():
    model = tiny_model()
    tokens = random_tokens(4, 33)
    output = model(tokens[:, :-1])
    (language_loss(output, tokens[:, 1:]) + router_loss(output)).backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.norm() > 0, name
    for block in model.blocks:
        assert (block.moe.w3.grad.flatten(1).norm(dim=1) > 0).all()  # of every expert


def test_the_moe_layer_is_made_from_the_configuration():
    calls = []

    def factory(*sizes):
        calls.append(sizes)
        return oracle.OracleMoE(*sizes)

    config = LMConfig(d=24, h=40, E=5, k=3, layers=3, heads=3, activation="relu2")
    MoETransformer(config, factory)
    assert calls == [(24, 40, 5, 3, "relu2")] * 3
    assert TINY.moe_layer(L=64) == MoEConfig(L=64, d=32, h=32, E=4, k=2, activation="swiglu", dtype="float32")


@torch.no_grad()
def test_blocks_add_to_the_residual_stream():
    model = tiny_model()
    for block in model.blocks:
        nn.init.zeros_(block.attention.project.weight)
        nn.init.zeros_(block.moe.w3)
    tokens = random_tokens(2, 9)
    expected = model.head(model.norm(model.embedding(tokens)))
    assert relative_error(model(tokens).logits, expected) < 1e-6


@torch.no_grad()
def test_moe_layers_see_tokens_of_unit_size():
    model = tiny_model()
    model.embedding.weight.mul_(20)
    for trace in model(random_tokens(2, 9)).traces:
        size = trace.x.square().mean(dim=1).sqrt()
        assert relative_error(size, torch.ones(18)) < 1e-3


@torch.no_grad()
def test_no_tokens_give_empty_results():
    model = tiny_model()
    output = model(torch.zeros((0, 8), dtype=torch.int64))
    assert output.logits.shape == (0, 8, TINY.vocab)
    layers = capture(model, torch.zeros((0, 8), dtype=torch.int64))
    assert [layer.topk_experts.shape for layer in layers] == [(0, TINY.k)] * TINY.layers


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"k": 9}, ValueError, "k is 9, but there are only 8 experts"),
        ({"d": 60}, ValueError, "d is 60, but with 4 heads it must be a multiple of 8"),
        ({"layers": 0}, ValueError, "layers is 0"),
        ({"heads": 2.0}, TypeError, "heads is 2.0"),
        ({"activation": "swiglo"}, ValueError, "Did you mean 'swiglu'"),
    ],
)
def test_a_bad_configuration_says_what_is_allowed(changes, error, message):
    with pytest.raises(error, match=message):
        LMConfig(**changes)


@pytest.mark.parametrize(
    "tokens, error, message",
    [
        (torch.zeros(8, dtype=torch.int64), ValueError, r"tokens has shape \(8,\), but it must have 2 dimensions"),
        (torch.zeros(2, 8), TypeError, "tokens has dtype torch.float32"),
        (torch.tensor([[7, 256]]), ValueError, r"tokens\[0, 1\] is 256, but there are only 256 token ids"),
    ],
)
def test_bad_tokens_say_what_is_allowed(tokens, error, message):
    with pytest.raises(error, match=message):
        capture(tiny_model(), tokens)


# Training


def test_the_losses_are_weighted_and_summed_over_the_layers():
    E, layers = 4, 3
    balanced = oracle.Routing(
        logits=torch.zeros(E, E),
        probs=torch.full((E, E), 1 / E),
        topk_experts=torch.arange(E)[:, None],
        gates=torch.full((E, 1), 1 / E),
    )
    losses = oracle.load_balancing_loss(balanced), oracle.router_z_loss(balanced)
    traces = tuple(MoETrace(torch.zeros(E, 8), balanced.topk_experts.int(), *losses) for _ in range(layers))
    output = LMOutput(torch.zeros(2, 2, 256), traces)
    assert float(router_loss(output)) == pytest.approx(layers * (0.01 + 0.001 * math.log(E) ** 2), rel=1e-6)
    assert float(language_loss(output, torch.zeros(2, 2, dtype=torch.int64))) == pytest.approx(math.log(256), rel=1e-6)


def test_the_loss_falls_to_less_than_two_thirds_in_thirty_steps():
    seen = []
    result = train(TINY, 30, lambda step, loss: seen.append((step, loss)), batch=8, learning_rate=1e-2)
    assert seen == list(enumerate(result.losses, start=1))
    assert 5 < result.losses[0] < 7  # a model that knows nothing: about log 256 = 5.5
    assert np.mean(result.losses[-5:]) < 2 / 3 * result.losses[0]
    assert result.validation_loss < 2 / 3 * result.losses[0]


def test_validation_text_is_kept_for_validation(monkeypatch):
    read = []
    sample_windows = data.sample_windows
    monkeypatch.setattr(data, "sample_windows", lambda text, *rest: read.append(text) or sample_windows(text, *rest))
    train(TINY, 2, batch=1)
    corpus = data.python_help()
    assert [id(text) for text in read] == [id(corpus.training), id(corpus.training), id(corpus.validation)]


def test_the_seed_decides_everything_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, same, other = (train(TINY, 3, seed=seed, batch=2) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.losses == same.losses and first.validation_loss == same.validation_loss
    assert first.losses != other.losses
    for mine, again in zip(first.model.parameters(), same.model.parameters(), strict=True):
        assert torch.equal(mine, again)


def test_a_step_follows_the_clipped_gradient_of_all_losses_on_its_own_windows(monkeypatch):
    read = []
    sample_windows = data.sample_windows
    monkeypatch.setattr(data, "sample_windows", lambda *args: read.append(sample_windows(*args)) or read[-1])
    model = train(TINY, 3, batch=2, learning_rate=0.0).model  # so the gradients left are those of the third step
    left = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    inputs, targets = read[2]
    output = model(inputs)
    model.zero_grad()
    (language_loss(output, targets) + router_loss(output)).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert gradient.norm() > training.GRADIENT_NORM  # clipping has something to do
    assert relative_error(left, gradient * training.GRADIENT_NORM / gradient.norm()) < 1e-5


def test_evaluation_of_a_model_that_favours_no_byte_is_log_256():
    model = tiny_model()
    nn.init.zeros_(model.head.weight)
    assert evaluate(model, data.python_help().validation, batch=2) == pytest.approx(math.log(256), rel=1e-6)


@pytest.mark.parametrize(
    "config, steps, batch, error, message",
    [
        (TINY, 0, 1, ValueError, "steps is 0, but it must be >= 1"),
        (TINY, 1.5, 1, TypeError, "steps is 1.5"),
        (TINY, 1, 0, ValueError, "batch is 0, but it must be >= 1"),
        (LMConfig(vocab=128), 1, 1, ValueError, "config.vocab is 128, but it must be >= 256"),
        (TINY.moe_layer(L=8), 1, 1, TypeError, "config is a MoEConfig, but it must be a LMConfig"),
        (LMConfig(sequence=10**9), 1, 1, ValueError, "the training text has .* bytes, but a window of 1000000000 and"),
    ],
)
def test_bad_training_says_what_is_allowed(config, steps, batch, error, message):
    with pytest.raises(error, match=message):
        train(config, steps, batch=batch)


# Capture


class Witness(oracle.OracleMoE):
    """The oracle, remembering its last call."""

    def forward(self, x, topk_experts=None):
        out, routing = super().forward(x, topk_experts)
        self.seen = x, routing
        return out, routing


def test_capture_is_what_each_layer_saw_and_decided():
    model = tiny_model(moe=Witness)
    layers = capture(model, random_tokens(3, 11))
    assert len(layers) == TINY.layers
    for layer, block in zip(layers, model.blocks, strict=True):
        x, routing = block.moe.seen
        for array, tensor, shape, dtype in [
            (layer.x, x, (33, TINY.d), np.float32),
            (layer.logits, routing.logits, (33, TINY.E), np.float32),
            (layer.topk_experts, routing.topk_experts, (33, TINY.k), np.int32),
            (layer.gates, routing.gates, (33, TINY.k), np.float32),
        ]:
            assert array.shape == shape and array.dtype == dtype
            assert array.flags.c_contiguous and array.flags.writeable
            assert np.array_equal(array, tensor.numpy(force=True))
            assert not np.shares_memory(array, tensor.numpy(force=True))
    assert not np.array_equal(layers[0].x, layers[1].x)


def test_captured_routing_can_be_replayed_from_captured_inputs():
    model = tiny_model()
    for layer, block in zip(capture(model, random_tokens(3, 11)), model.blocks, strict=True):
        routing = oracle.route(torch.from_numpy(layer.x), block.moe.wg, TINY.k)
        assert np.array_equal(routing.topk_experts.numpy(), layer.topk_experts)
        assert relative_error(torch.from_numpy(layer.gates), routing.gates.detach()) < 1e-6


@torch.no_grad()
def test_a_models_choices_can_be_replayed_in_another():
    tokens, model, other = random_tokens(3, 11), tiny_model(), tiny_model(seed=1)
    chosen = [trace.topk_experts for trace in model(tokens).traces]
    replayed = other(tokens, chosen)
    assert all(torch.equal(trace.topk_experts, own) for trace, own in zip(replayed.traces, chosen, strict=True))
    assert relative_error(replayed.logits, other(tokens).logits) > 1e-3
    assert torch.equal(model(tokens, chosen).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="replayed has 1 choices, but the model has 2 blocks"):
        other(tokens, chosen[:1])


def test_the_line_of_the_balanced_share_has_its_name():
    figure = plots.expert_load([np.array([[0, 1], [0, 2]]), np.array([[3, 1], [3, 2]])], 4)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    first, last = figure.axes
    assert [[bar.get_height() for bar in axes.patches] for axes in (first, last)] == [[2, 1, 1, 0], [0, 1, 1, 2]]
    (name,) = last.texts
    extent = name.get_tightbbox(canvas.get_renderer())  # null for what is not drawn
    assert name.get_text() == "balanced" and extent.width > 0 and extent.x0 > last.get_window_extent().x1
