"""Notebook 11's pictures: a step recorded on a small model, and what they draw of planned ones."""

import numpy as np
import pytest
import torch
from helpers import assert_told_apart_in_grey
from test_notebooks import drawn, texts

from moeblaze_ref.core.units import GB, MB
from moeblaze_ref.course.notebook import whole
from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.memory.measure import kept_bytes
from moeblaze_ref.plan import configs, plots
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.shares import ZERO, Parallel
from moeblaze_ref.plan.timeline import PHASES

QWEN = "qwen3-30b-a3b"

# A recorded step -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A small model, its tokens, and a step of it."""
    torch.manual_seed(0)
    small = MoETransformer(LMConfig(d=16, h=24, E=4, k=2, layers=2, heads=2, sequence=12))
    tokens = torch.randint(256, (3, 13), generator=torch.Generator().manual_seed(1))
    return small, tokens, whole.recorded_step(small, tokens)


def test_a_recorded_step_has_every_phase_in_its_order(model):
    found = [moment.phase for moment in model[2]]
    assert sorted(found, key=PHASES.index) == found and {*found} == {*PHASES}


def test_weights_gradients_and_moments_of_a_recorded_step_are_the_formulas(model):
    small, _, moments = model
    parameters = sum(weight.numel() for weight in small.parameters())
    held = moments[-1].held
    assert held["weights"] == held["gradients"] == 4 * parameters
    assert held["optimizer states"] == 8 * parameters + 4 * len(list(small.parameters()))
    assert moments[0].held["gradients"] == 0, "of the step before, which are freed"


def test_the_recorded_forward_ends_with_what_autograd_keeps_and_the_loss(model):
    small, tokens, moments = model
    hooks = kept_bytes(whole.step_loss, small, tokens, exclude=small.parameters())
    assert whole.last_of(moments, "forward").held["activations"] == hooks + 4
    assert whole.last_of(moments, "optimizer").held["activations"] < hooks / 10


def test_the_picture_of_moments_marks_the_highest(model):
    (axes,) = drawn(plots.moments_picture(model[2], "a step", "MB")).axes
    heights = [moment.bytes / MB for moment in model[2]]
    (mark,) = (line for line in axes.lines if line.get_marker() == "v")
    assert mark.get_ydata()[0] == max(heights) and mark.get_xdata()[0] == np.argmax(heights)
    assert any(text.startswith(f"{max(heights):,.1f} MB: ") for text in texts(axes.figure))


def test_the_picture_of_a_plan_is_as_high_as_its_moments():
    stage = whole.planned("olmoe-1b-7b", 2048)
    (axes,) = drawn(whole.planned_picture("olmoe-1b-7b", 2048, "none")).axes
    top = axes.collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(stage.peak.bytes / GB)


# Shares and lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_bars_of_shares_fill_the_hundred_and_dots_are_the_sums(attention):
    shares, sums = drawn(whole.shares_picture(2048, attention)).axes
    names = configs.carried()
    assert [label.get_text() for label in shares.get_yticklabels()] == list(names)
    widths = np.array([bar.get_width() for bar in shares.patches]).reshape(len(whole.SHARES), len(names))
    np.testing.assert_allclose(widths.sum(axis=0), 100)
    stages = [whole.planned(name, 2048, attention) for name in names]
    np.testing.assert_allclose(widths[0] / 100, [whole.share_of_experts(stage) for stage in stages])
    kept, states = (line.get_xdata() for line in sums.lines)
    np.testing.assert_allclose(kept, [stage.kept.total() / GB for stage in stages])
    np.testing.assert_allclose(states, [whole.state_bytes(stage) / GB for stage in stages])


@pytest.mark.parametrize("name", configs.carried())
def test_the_groups_are_all_that_is_kept(name):
    stage = whole.planned(name, 1024)
    assert sum(whole.kept_groups(stage).values()) == stage.kept.total()


def test_only_attention_without_flash_is_quadratic():
    (axes,) = drawn(whole.sequence_lines(QWEN)).axes
    powers = {line.get_label(): np.log2(line.get_ydata()[-1] / line.get_ydata()[-2]) for line in axes.lines}
    assert powers.pop("attention, math") > 1.9
    np.testing.assert_allclose(list(powers.values()), 1, atol=0.01)


# What one GPU holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("name", "expert"), [(QWEN, 1), (QWEN, 4), ("gpt-oss-20b", 8), ("deepseek-v2-lite", 2)])
def test_both_halves_are_the_states_of_the_whole_model(name, expert, zero):
    parallel = Parallel(data=8, expert=expert, zero=zero)
    stage = Run(configs.find(name), Step(1, 1), parallel=parallel).worst
    assert sum(whole.held_by_half(name, parallel).values()) == whole.state_bytes(stage)


def test_areas_of_the_rectangles_are_bytes():
    figure = drawn(whole.gpu_to_scale(QWEN, 8, 4))
    for zero, axes in zip(ZERO, figure.axes, strict=True):
        held = whole.held_by_half(QWEN, Parallel(data=8, expert=4, zero=zero))
        rectangles = [artist for artist in axes.get_children() if type(artist).__name__ == "Rectangle"]
        areas = [one.get_width() * one.get_height() for one in rectangles if one.get_facecolor()[3] > 0]
        assert sum(areas[: len(held)]) == pytest.approx(sum(held.values()) / GB)
        assert axes.get_title("left") == f"ZeRO {zero}: {sum(held.values()) / GB:,.1f} GB"


@pytest.mark.parametrize(
    ("name", "gpus", "expert", "message"),
    [
        (QWEN, 4, 8, "expert is 8, but it must divide data"),
        ("mixtral-8x7b", 16, 16, "expert is 16, but it must divide the experts, 8"),
    ],
)
def test_gpus_that_cannot_divide_a_model_are_refused(name, gpus, expert, message):
    with pytest.raises(ValueError, match=message):
        whole.gpu_to_scale(name, gpus, expert)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_ways_to_keep_less_and_what_they_repeat():
    found = {trade.way: trade for trade in whole.trades(QWEN, 4096)}
    none, layer = found["checkpoint: none"], found["checkpoint: layer"]
    assert (
        min(found.values(), key=lambda trade: trade.kept) == layer
        and max(trade.kept for trade in found.values()) == none.kept
    )
    assert [found[way].repeated for way in ("checkpoint: none", "checkpoint: selective", "moeblaze/minimal")] == [0] * 3
    assert 0.3 < layer.repeated < 1 / 3 and 0 < found["moeblaze/inputs"].repeated < layer.repeated
    assert all(trade.most > trade.kept for trade in found.values())


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("gpt-oss-20b", ["none", "layer"]),
        ("deepseek-v3", ["none", "layer", "selective"]),
        (QWEN, ["none", "layer", "selective", "minimal", "inputs"]),
    ],
)
def test_a_way_that_a_model_does_not_allow_is_left_out(name, ways):
    assert [trade.way.rpartition(" ")[2].rpartition("/")[2] for trade in whole.trades(name, 1024)] == ways
    (axes,) = drawn(whole.trade_picture(name, 1024)).axes
    assert len(axes.lines) == 2 * len(ways)


# The bandwidth wall and the proof ------------------------------------------------------------------------------------


def test_the_time_of_an_expert_is_flat_and_then_rises_with_its_rows():
    (axes,) = drawn(whole.expert_times([QWEN, "mixtral-8x7b"])).axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 1]
    for line in lines:
        times = line.get_ydata()
        assert times[4] / times[0] < 1.1 and times[-1] / times[-2] == pytest.approx(2)
    assert [whole.expert_widths(name) for name in (QWEN, "mixtral-8x7b")] == [(2048, 768), (4096, 14336)]
    assert (whole.router_of(QWEN).E, whole.router_of(QWEN).k) == (128, 8)


def test_a_peak_planned_too_low_has_a_negative_error():
    row = {"peaks": dict.fromkeys(PHASES, 100), "planned_peaks": dict(zip(PHASES, (99, 100, 110), strict=True))}
    assert whole.errors_of(row) == pytest.approx(dict(zip(PHASES, (-0.01, 0, 0.1), strict=True)))
    assert {"peaks", "planned_peaks", "same_storages"} <= whole.proof()["rows"][0].keys()


@pytest.mark.parametrize(
    "picture",
    [
        lambda: whole.planned_picture("olmoe-1b-7b", 4096, "none"),
        lambda: whole.planned_picture(QWEN, 4096, "selective"),
        lambda: whole.shares_picture(4096, "flash"),
        lambda: whole.sequence_lines(QWEN),
        lambda: whole.gpu_to_scale(QWEN, 8, 4),
        lambda: whole.trade_picture(QWEN, 4096),
        lambda: whole.expert_times(("mixtral-8x7b", QWEN, "deepseek-v3")),
    ],
)
def test_what_a_legend_names_is_told_apart_without_colour(picture):
    assert_told_apart_in_grey(picture())


def test_the_part_of_a_step_that_moe_layers_keep_is_said():
    """By hand: of each layer the experts' and the router's bytes, over those of all parts and of the peak."""
    stage = whole.planned("olmoe-1b-7b", 2048)
    moe = stage.kept["experts"] + stage.kept["router"]
    said = whole.part_of_a_step("olmoe-1b-7b", 2048).data
    assert f"keep {moe / 1e9:.1f} GB" in said and f"{moe / stage.kept.total():.0%} of what all layers keep" in said
    assert f"{moe / stage.peak.bytes:.0%} of the {stage.peak.bytes / 1e9:.0f} GB" in said
