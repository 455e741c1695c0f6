"""The pictures of MegaBlocks' figures: everything measured is in them, and they are told apart in grey."""

from statistics import fmean

import pytest
from helpers import assert_told_apart_in_grey

from moeblaze_ref.papers import capacities, megablocks_plots, squares
from moeblaze_ref.papers.block_products import EXPERTS, MICRO_BATCHES, PRODUCTS


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
    "megablocks-fig5": squares_rows,
    "megablocks-fig9": products_rows,
    "megablocks-fig10": experts_rows,
    "megablocks-fig2": capacities_rows,
}


def lines_of(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


@pytest.mark.parametrize("item", megablocks_plots.PICTURES)
def test_a_picture_is_told_apart_in_grey(item):
    assert_told_apart_in_grey(megablocks_plots.PICTURES[item](ROWS[item]()))


@pytest.mark.parametrize("item", megablocks_plots.PICTURES)
def test_there_is_no_picture_of_nothing(item):
    with pytest.raises(ValueError, match="rows is empty, but it must hold at least one"):
        megablocks_plots.PICTURES[item]([])


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
