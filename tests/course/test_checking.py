"""Notebook 12: wrong layers and weak tests, and a model of transformers with our experts."""

import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from helpers import assert_told_apart_in_grey
from test_notebooks import drawn, texts

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.course.exercises import layer_runs
from moeblaze_ref.course.notebook import checking, small_qwen
from moeblaze_ref.memory.measure import kept_bytes
from moeblaze_ref.verify.layers import cases, check_layer, diagnosis
from moeblaze_ref.verify.layers.adapters import plain, wrong

TILES = partial(plain.experts, kind=wrong.WholeTiles)


def rows_of(markdown):
    """The cells of a table's rows, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.data.splitlines()[2:]]


# Verdicts ------------------------------------------------------------------------------------------------------------


def own_layer(x, topk_index, topk_weights, gate_up, down):
    """Every row with its own copy of an expert."""
    y = checking.expert(x[:, None, None], gate_up[topk_index], down[topk_index])[:, :, 0]
    return (y * topk_weights[..., None].to(y.dtype)).sum(1).to(x.dtype)


def test_a_function_is_checked_like_a_module():
    (right,) = check_layer(checking.of_function(own_layer), [torch.float32])
    assert right.ok
    doubled = checking.of_function(lambda *arguments, **weights: 2 * own_layer(*arguments, **weights))
    (verdict,) = check_layer(doubled, [torch.float32])
    assert not verdict.ok and verdict.first.units == pytest.approx(1e5, rel=1e-3), (
        "as far off as what is right is large"
    )


def test_the_table_of_a_verdict_is_its_first_finding():
    verdict = checking.checked("last tile lost")
    first, _, lines = checking.first_finding(verdict).data.partition("\n\n")
    assert first == "Class: **last tile lost**. First in: a step, random."
    rows = rows_of(checking.Markdown(lines))
    assert [row[0].removeprefix("gradient of ") for row in rows][1:] == [one.tensor for one in verdict.first.wrong][1:]
    assert rows[0][:2] == ["the output", verdict.first.wrong[0].part]
    assert [int(row[4].replace(",", "")) for row in rows] == [round(one.units) for one in verdict.first.wrong]
    assert checking.first_finding(checking.checked(checking.RIGHT)).data == "Nothing is wrong."


def test_every_wrong_layer_is_found_and_its_class_is_told():
    rows = rows_of(checking.classes({name: checking.checked(name) for name in checking.LAYERS}))
    assert rows[0] == ["right", "", "nowhere"] and [row[0] for row in rows[1:]] == list(checking.WRONG)
    known = {bug.name for bug in diagnosis.CLASSES}
    assert [row[0] for row in rows[1:] if row[1] not in known] == ["zeros"]
    where = {row[0]: row[2] for row in rows}
    assert where["stale gradient"] == where["NaN without tokens"] == "a step, all tokens to one expert"
    assert where["dispatch of step 1"] == "a second step of the same shape, random"


def test_a_public_bug_is_shown_as_the_check_has_it():
    (bug,) = (bug for bug in diagnosis.CLASSES if bug.name == "last tile lost")
    assert rows_of(checking.public_bugs([bug.name])) == [[bug.name, bug.sentence, bug.reference]]


def test_wrong_tokens_are_those_with_a_row_in_a_last_tile():
    bars, tokens = drawn(checking.lost_rows(TILES, 16)).axes
    index = checking.compared(TILES).case.topk_index
    rows = np.bincount(index.flatten(), minlength=7)
    heights = np.array([bar.get_height() for bar in bars.patches]).reshape(2, 7)
    np.testing.assert_array_equal(heights, [rows // 16 * 16, rows % 16])
    order = [0] * 7
    lost = set()
    for token, expert in ((token, int(expert)) for token, chosen in enumerate(index) for expert in chosen):
        if order[expert] >= heights[0, expert]:
            lost.add(token)
        order[expert] += 1
    assert [*tokens.lines[0].get_xdata()] == sorted(lost)
    assert tokens.get_title("left") == f"{len(lost)} of 61 tokens are wrong"


# Weak tests ----------------------------------------------------------------------------------------------------------


def test_zeros_are_off_by_the_largest_element_and_nan_by_infinity():
    zeros, right = checking.one_step("zeros").outputs
    assert not zeros.any() and checking.largest_error(checking.one_step("zeros")) == right.abs().max() < checking.LOOSE
    idle = checking.one_step("NaN without tokens", routing="experts without tokens")
    assert checking.largest_error(idle) == math.inf
    assert checking.largest_error(checking.one_step("stale gradient")) < 1e-8, "every expert has a token"


def test_weights_have_the_size_that_is_asked_for():
    adapter = checking.LAYERS["right"](d=24, h=40, E=7, k=2, dtype=torch.float32, device="cpu")
    case = cases.make(adapter, cases.PATTERNS[0], torch.float32)
    small = checking._resized(case, 0.02)
    assert all(float(w.std()) == pytest.approx(0.02) for w in small.weights.values())
    assert checking._resized(case, None) is case


def test_a_second_step_has_other_tokens_and_the_same_weights():
    first, second = (checking.one_step("right", steps=steps) for steps in (1, 2))
    assert not torch.equal(first.right["out"], second.right["out"])
    late = checking.largest_error(checking.one_step("dispatch of step 1", None, steps=2))
    assert late > 0.1 > checking.largest_error(checking.one_step("dispatch of step 1", None, steps=1))


def close(found, right):
    return (found - right).norm() < 0.02 * right.norm()


def test_a_guess_is_compared_with_what_the_test_passes():
    rows = rows_of(checking.guessed(close, {"zeros", "stale gradient"}))
    passes = {"gate and up untrained", "stale gradient", "NaN without tokens", "dispatch of step 1", "bfloat16 inside"}
    assert {row[0] for row in rows if row[1] == "passes it"} == passes
    wrongly = passes - {"stale gradient"} | {"zeros"}
    assert {row[0] for row in rows if row[2] == "wrong"} == wrongly
    with pytest.raises(ValueError, match="no wrong layer is called 'ones': they are zeros, gate"):
        checking.guessed(close, {"ones"})


@pytest.mark.parametrize(
    ("routing", "passing"),
    [
        ("random", ["stale gradient", "NaN without tokens"]),
        ("experts without tokens", ["last expert skipped"]),
        ("one token", ["last expert skipped"]),
    ],
)
def test_every_routing_of_the_notebook_hides_a_layer(routing, passing):
    figure = drawn(checking.weak_test(1e-3, "large", routing, checking.GRADIENTS, 2))
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert [names[row] for row in lines["wrong, and passes"].get_ydata()] == passing
    assert all(error <= 1e-3 for error in lines["wrong, and passes"].get_xdata())
    assert all(error > 1e-3 for error in lines["wrong, and fails"].get_xdata())
    assert axes.get_title("left").startswith(f"{len(passing)} of {len(checking.WRONG)} wrong layers pass")


def test_each_part_of_a_test_finds_what_those_before_it_do_not():
    found = checking.caught()
    assert list(found) == list(checking.WRONG)
    for tests in found.values():
        assert tests == sorted(tests) and tests[-1], "a test finds what the one before finds"
    assert [sum(column) for column in zip(*found.values(), strict=True)] == [0, 7, 8, 10, 11, 12]
    written = texts(drawn(checking.caught_picture()))
    assert written.count("passes") == sum(not one for tests in found.values() for one in tests)
    assert written.count("found") == sum(one for tests in found.values() for one in tests)


# The bound -----------------------------------------------------------------------------------------------------------


def test_a_layer_that_rounds_early_is_wrong_in_float32_alone():
    assert min(checking.units("bfloat16 inside", torch.float32).values()) > 100
    assert max(checking.units("bfloat16 inside", torch.bfloat16).values()) < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_picture_has_every_case_of_each_layer_in_units_of_its_bound(dtype):
    (axes,) = drawn(checking.units_picture(dtype)).axes
    lines = {line.get_label(): line for line in axes.lines}
    names = [label.get_text() for label in axes.get_xticklabels()]
    low, high = axes.get_ylim()
    for label in checking.SHOWN:
        expected = checking.units(label, getattr(torch, dtype))
        assert [names[round(place)] for place in lines[label].get_xdata()] == list(expected)
        np.testing.assert_allclose(lines[label].get_ydata(), list(expected.values()))
        assert low < min(expected.values()) and max(expected.values()) < high, "no mark is outside"
    assert max(lines["our kernels"].get_ydata()) < 1 and max(lines["plain torch"].get_ydata()) < 0.6


def test_plain_results_are_what_the_bound_is_made_of():
    one = checking.compared(checking.LAYERS["right"], dtype=torch.bfloat16)
    for name in ("out", "x", "gate"):
        exact = one.wanted.exact[name]
        errors = [(found[name] - exact).norm() / exact.norm() for found in checking.plain_results(one, torch.bfloat16)]
        assert one.wanted.bounds[name][0] == pytest.approx(2 * float(max(errors)), rel=1e-12)


# Routings that readers construct -------------------------------------------------------------------------------------


def test_a_routing_of_full_tiles_without_idle_experts_hides_two_layers():
    routing = np.array([[0, 1]] * 4 + [[2, 3]] * 4)
    assert layer_runs.passing(["zeros", "last tile lost", "stale gradient"], routing, 4) == [
        "last tile lost",
        "stale gradient",
    ]
    assert layer_runs.passing(layer_runs.KINDS, np.array([[0, 3]]), 4) == ["dispatch of step 1"]


# A model of transformers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept():
    return small_qwen.kept(k=2, h=32, L=24)


def test_the_loss_does_not_depend_on_who_runs_the_experts(kept):
    assert list(kept) == [*small_qwen.THEIRS, *POLICIES]
    np.testing.assert_allclose([one.loss for one in kept.values()], kept["eager"].loss, rtol=1e-6)


def test_kept_bytes_fall_from_policy_to_policy_and_the_rest_stays(kept):
    rows, layers = 2 * 24, small_qwen.LAYERS
    assert kept["paper"].model - kept["minimal"].model == layers * rows * 32 * 4
    assert kept["minimal"].model - kept["inputs"].model == layers * rows * 2 * 32 * 4
    assert len({one.model - one.experts for one in kept.values()}) == 1
    assert min(one.experts for one in kept.values()) > 0
    model = small_qwen.small_qwen(k=2, h=32)
    with small_qwen.running(model, "eager"):
        hooks = kept_bytes(small_qwen.loss_of, model, small_qwen.tokens(24), exclude=model.parameters())
    assert kept["eager"].model == hooks


def test_a_model_runs_its_own_experts_again_afterwards():
    model = small_qwen.small_qwen(h=16)
    before = model.config._experts_implementation
    for way in (*small_qwen.THEIRS, "minimal"):
        with small_qwen.running(model, way):
            inside = model.config._experts_implementation
        assert way in inside and model.config._experts_implementation == before


def test_bars_are_kept_bytes():
    figure = drawn(small_qwen.kept_picture(k=1, h=32))
    (axes,) = figure.axes
    found = small_qwen.kept(k=1, h=32)
    rest, experts = np.array([bar.get_width() for bar in axes.patches]).reshape(2, len(found))
    np.testing.assert_allclose((rest + experts) * 1e6, [one.model for one in found.values()])
    np.testing.assert_allclose(experts * 1e6, [one.experts for one in found.values()])


def test_without_transformers_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(small_qwen.Missing) as error:
        small_qwen.small_qwen()
    assert error.value._render_traceback_() == [
        "transformers is not installed: pip install 'moeblaze_ref[huggingface]'"
    ]


@pytest.mark.parametrize(
    "picture",
    [
        lambda: checking.lost_rows(TILES, 16),
        lambda: checking.weak_test(0.02, "large", "random", checking.OUTPUT, 1),
        lambda: checking.units_picture("float32"),
        lambda: small_qwen.kept_picture(k=2, h=32),
    ],
)
def test_what_a_legend_names_is_told_apart_without_colour(picture):
    assert_told_apart_in_grey(picture())
