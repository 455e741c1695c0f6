"""The pictures of MegaBlocks' figures: everything measured is in them, and they are told apart in grey."""

from statistics import fmean

import pytest
from helpers import assert_told_apart_in_grey

from moeblaze_ref.core.config import PAPER_PRESETS
from moeblaze_ref.papers import capacities, items, megablocks_plots, moeblaze, plots, squares
from moeblaze_ref.papers.block_products import EXPERTS, MICRO_BATCHES, PRODUCTS
from moeblaze_ref.papers.item import function


def squares_rows():
    tiles = [None, *map(list, squares.WARPS)]
    return [
        {"n": n, "tile": tile, "tflops": n / 100 + place} for n in squares.SIZES for place, tile in enumerate(tiles)
    ]


def products_rows():
    return [
        {"model": model, "product": name, "pct_of_bmm": 90.0 + number + 3 * place}
        for place, model in enumerate(MICRO_BATCHES)
        for number, name in enumerate(PRODUCTS)
    ]


def experts_rows():
    return [
        {"model": model, "E": E, "ms": 2.0, "sequential_ms": E * factor, "graph_ms": 1.0, "sequential_graph_ms": 2.0}
        for factor, model in enumerate(MICRO_BATCHES, start=1)
        for E in EXPERTS
    ]


def capacities_rows():
    steps = list(range(0, 1100, 100))
    return [
        {
            "variant": name,
            "steps": steps,
            "seconds_at": [step / 10 for step in steps],
            "loss": (loss := [5 - step / 400 - place / 10 + seed / 50 for step in steps]),
            "held_out_loss": loss[-1],
        }
        for place, name in enumerate(capacities.VARIANTS)
        for seed in range(5)
    ]


ROWS = {
    megablocks_plots.squares: squares_rows,
    megablocks_plots.products: products_rows,
    megablocks_plots.experts: experts_rows,
    megablocks_plots.capacities: capacities_rows,
}
drawing = pytest.mark.parametrize("draw", ROWS, ids=lambda draw: draw.__name__)


def shown(figure):
    """The numbers in every panel."""
    lines = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines]
    return lines, [bar.get_height() for axes in figure.axes for bar in axes.patches]


def lines_of(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_every_measured_picture_of_megablocks_is_tested():
    drawn = {item.drawn_by for item in items.ITEMS.values() if item.drawn_by and "megablocks" in item.drawn_by}
    assert {function(name) for name in drawn} == {*ROWS}


@drawing
def test_a_picture_is_told_apart_in_grey(draw):
    assert_told_apart_in_grey(draw(ROWS[draw]()))


@drawing
def test_there_is_no_picture_of_nothing(draw):
    with pytest.raises(ValueError, match="rows is empty, but it must hold at least one"):
        draw([])


@drawing
def test_of_several_runs_the_last_is_drawn(draw):
    rows = ROWS[draw]()
    assert shown(draw(rows[: len(rows) // 2], rows)) == shown(draw(rows)) != shown(draw(rows, rows[: len(rows) // 2]))


def test_figure_5_has_a_line_for_each_tile_and_cublas():
    (axes,) = megablocks_plots.squares(rows := squares_rows()).axes
    lines = lines_of(axes)
    assert len(lines) == len(squares.WARPS) + 1 and set(megablocks_plots.TILE_LOOKS) == {None, *squares.WARPS}
    assert lines["cuBLAS"] == [(row["n"], row["tflops"]) for row in rows if row["tile"] is None]
    assert lines["Triton, 256x128"] == [(row["n"], row["tflops"]) for row in rows if row["tile"] == [256, 128]]


def test_figure_9_has_a_bar_for_each_problem_and_a_line_at_100():
    (axes,) = megablocks_plots.products(rows := products_rows()).axes
    assert sorted(bar.get_height() for bar in axes.patches) == sorted(row["pct_of_bmm"] for row in rows)
    assert [list(line.get_ydata()) for line in axes.lines] == [[100, 100]]
    by_place = [bar.get_height() for bar in sorted(axes.patches, key=lambda bar: bar.get_x())]
    assert by_place == [row["pct_of_bmm"] for row in rows]  # model after model, product after product
    assert len(axes.texts) == 18


def test_figure_10_has_the_ratio_of_each_model_with_and_without_the_host():
    launched, graphs = map(lines_of, megablocks_plots.experts(experts_rows()).axes)
    assert launched["moe-Small"] == [(E, E * 2 / 2) for E in EXPERTS]
    assert graphs["moe-Small"] == [(E, 2.0) for E in EXPERTS]
    assert launched.keys() >= set(MICRO_BATCHES) and graphs.keys() >= set(MICRO_BATCHES)


def test_figures_2_and_8_have_means_with_their_spread_and_every_seed():
    by_step, by_time, ends = megablocks_plots.capacities(rows := capacities_rows()).axes
    one = [row for row in rows if row["variant"] == "1.5"]
    first = megablocks_plots.FIRST_POINT
    means = [fmean(losses) for losses in zip(*(row["loss"] for row in one), strict=True)][first:]
    assert lines_of(by_step)["1.5"] == list(zip(one[0]["steps"][first:], means, strict=True))
    assert lines_of(by_time)["1.5"] == list(zip(one[0]["seconds_at"][first:], means, strict=True))
    assert len(by_step.collections) == len(by_time.collections) == len(capacities.VARIANTS)
    drawn = [loss for line in ends.lines for loss in line.get_ydata()]
    assert drawn == [row["held_out_loss"] for row in rows]


def test_rows_without_times_have_no_panel_against_time():
    rows = [row | capacities.NO_TIMES for row in capacities_rows()]
    by_step, ends = megablocks_plots.capacities(rows).axes
    assert (by_step.get_xlabel(), ends.get_xlabel()) == ("steps", "capacity factor, or none")


# MoEBlaze's figures 3 to 6 --------------------------------------------------------------------------------------------


def speed_rows(activation, without=(), **factors):
    """Every system on every configuration; ``factors`` slow some of them down."""
    systems = [system for system in moeblaze.TIMED_NAMES if moeblaze.TIMED_NAMES[system] not in without]
    return [
        {"preset": preset, "activation": activation, "system": system, "policy": policy}
        | {"step_ms": (1 + place / 10) * factors.get(policy or system, 1.0)}
        for place, (system, policy) in enumerate(systems)
        for preset in PAPER_PRESETS
    ] + [{"preset": "conf1", "activation": activation, "system": "sonicmoe", "policy": None, "message": "no"}]


RELU = speed_rows("relu", without=("torch.compile", moeblaze.SONICMOE))


def bars_of(axes):
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}


def test_the_picture_of_speed_has_both_activations_and_the_worst_run():
    first = [*speed_rows("silu", minimal=4.0), *RELU]
    last = [*speed_rows("silu", inputs=5.0), *RELU]
    silu, relu = plots.speed(first, last).axes
    places = {name: place for place, name in enumerate(moeblaze.TIMED_NAMES.values())}
    factors = {"minimal": 4.0, "inputs": 5.0}
    for name, heights in bars_of(silu).items():
        assert heights == pytest.approx([1 / (1 + places[name] / 10) / factors.get(name, 1)] * 7), name
    assert silu.get_title(loc="left").startswith("SiLU: ") and relu.get_title(loc="left").startswith("ReLU: ")
    assert bars_of(silu).keys() == {*moeblaze.TIMED_NAMES.values()} - {moeblaze.PUBLISHED}


def test_what_was_not_timed_has_no_bar_and_is_named():
    _, relu = plots.speed([*speed_rows("silu"), *RELU]).axes
    assert bars_of(relu).keys().isdisjoint({"torch.compile", moeblaze.SONICMOE})
    assert relu.get_title(loc="left").endswith("without a time: torch.compile; SonicMoE")


def test_a_system_has_one_colour_and_one_name_in_every_picture():
    figures = (plots.figure_3(), plots.figure_5(), plots.speed([*speed_rows("silu"), *RELU]))
    looks = [
        (text.get_text(), handle.patches[0].get_facecolor())
        for figure in figures
        for legend in figure.legends
        for text, handle in zip(legend.texts, figure.axes[0].containers, strict=True)
    ]
    assert len({name for name, _ in looks}) == len(set(looks)) == len(plots.COLORS)


@pytest.mark.parametrize("figure", [plots.figure_3, plots.figure_5, lambda: plots.speed(speed_rows("swiglu"))])
def test_the_systems_are_told_apart_in_grey(figure):
    assert_told_apart_in_grey(figure())
