"""Pictures of the measurements for MegaBlocks' figures. A function draws the last of the runs that it is given.

Source: MegaBlocks (arXiv 2211.15841), figures 2, 5, 8, 9 and 10.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from moeblaze_ref.core.drawing import dress, panels
from moeblaze_ref.memory.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    dotted,
    drawn,
    filled,
)
from moeblaze_ref.papers.block_products import PRODUCTS
from moeblaze_ref.papers.capacities import VARIANTS
from moeblaze_ref.papers.results import Rows

# cuBLAS and the paper's tile have the plain lines.
TILE_LOOKS = {
    None: {"color": BLACK, "linestyle": "-", "linewidth": 1},
    (128, 128): {"color": BLUE, "linestyle": "-", "linewidth": 3},
    (64, 64): {**drawn(VERMILLION), "marker": "X"},
    (64, 128): {**drawn(ORANGE), "marker": "s"},
    (128, 64): {**drawn(SKY), "marker": "^"},
    (64, 256): {**drawn(GREEN), "marker": "P"},
    (256, 64): {**drawn(PURPLE), "marker": "d"},
    (128, 256): {"color": GREY, "linestyle": "--", "marker": "v"},
    (256, 128): {"color": YELLOW, "linestyle": "-", "marker": "o", "markeredgecolor": BLACK},
}
PRODUCT_COLORS = dict(zip(PRODUCTS, (BLUE, VERMILLION, ORANGE, SKY, YELLOW, PURPLE), strict=True))
MODEL_COLORS = dict(zip(("moe-XS", "moe-Small", "moe-Medium"), (BLUE, VERMILLION, GREEN), strict=True))
VARIANT_COLORS = dict(zip(VARIANTS, (GREY, SKY, VERMILLION, ORANGE, GREEN, BLACK, BLUE), strict=True))
BAND = 0.15  # opacity of a spread
FIRST_POINT = 5  # validations in the first half of a run: their losses would flatten the rest


def squares(*runs: Rows) -> Figure:
    """Draw figure 5: the rate of every tile and of cuBLAS against the size of square products.

    The rows are those of `squares.time_square`.
    """
    rows = _of_the_last(runs)
    figure, axes = panels(8, 4.5)
    for tile, look in TILE_LOOKS.items():
        found = sorted((row["n"], row["tflops"]) for row in rows if tuple(row["tile"] or ()) == (tile or ()))
        if found:
            axes.plot(*zip(*found, strict=True), label=_tile_name(tile), markersize=5, **look)
    _powers_of_two(axes, sorted({row["n"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("n, rows, columns and depth")
    dress(axes, "TFLOPS", "dense products n x n x n in bfloat16, by the tile of a thread block")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, handlelength=4)
    return figure


def _tile_name(tile: tuple[int, int] | None) -> str:
    return "cuBLAS" if tile is None else f"Triton, {tile[0]}x{tile[1]}"


def products(*runs: Rows) -> Figure:
    """Draw figure 9: every block-sparse product in percent of the rate of cuBLAS batched.

    The rows are those of `block_products.time_product`.
    """
    rows = _of_the_last(runs)
    figure, axes = panels(9, 4)
    models = list(dict.fromkeys(row["model"] for row in rows))
    width = 0.9 / len(PRODUCTS)
    for number, (name, color) in enumerate(PRODUCT_COLORS.items()):
        found = {row["model"]: row["pct_of_bmm"] for row in rows if row["product"] == name}
        places = [models.index(model) + (number + 0.5) * width - 0.45 for model in found]
        bars = axes.bar(places, list(found.values()), width, label=name, **filled(color))
        axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.axhline(100, color=BLACK, linewidth=1)
    axes.set_xticks(range(len(models)), models)
    axes.tick_params(axis="x", length=0)
    dress(axes, "percent of torch.bmm's rate", "block-sparse products of a step, 8 experts, uniform routing")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def experts(*runs: Rows) -> Figure:
    """Draw figure 10: how many times as fast the block-sparse products are as one expert after another.

    The rows are those of `block_products.time_experts`.
    """
    rows = _of_the_last(runs)
    figure, shown = panels(9, 4, 1, 2, sharey=True)
    ways = {"launched by the host": ("ms", "sequential_ms"), "as CUDA graphs": ("graph_ms", "sequential_graph_ms")}
    for axes, (way, (ours, theirs)) in zip(shown, ways.items(), strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            found = sorted((row["E"], row[theirs] / row[ours]) for row in rows if row["model"] == model)
            color = MODEL_COLORS.get(model, BLACK)
            axes.plot(*zip(*found, strict=True), label=model, marker=MARKERS.get(color, "o"), **drawn(color))
        axes.axhline(1, color=GREY, linewidth=0.8)
        _powers_of_two(axes, sorted({row["E"] for row in rows}))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}x")
        axes.set_xlabel("E, experts")
        dress(axes, "", way)
    shown[0].set_ylabel("times as fast as one expert after another")
    shown[0].legend(frameon=False, handlelength=4)
    return figure


def capacities(*runs: Rows) -> Figure:
    """Draw figures 2 and 8: validation loss by capacity factor against steps and time, and at the end of each seed.

    Lines are means over the seeds, bands one sample deviation on either side. The rows are those of
    `capacities.row_of`; those of a CPU have no times, nor a panel against time.
    """
    rows = _of_the_last(runs)
    of_variant = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    of_variant = {name: found for name, found in of_variant.items() if found}
    timed = all(row["seconds_at"] for row in rows)
    alongs = {"steps": "steps", "seconds_at": "seconds of training"} if timed else {"steps": "steps"}
    figure, (*curves, ends) = panels(4 + 4 * len(alongs), 4.5, 1, 1 + len(alongs), sharey=True)
    for axes, (along, xlabel) in zip(curves, alongs.items(), strict=True):
        for name, found in of_variant.items():
            _band(axes, name, found, along)
        axes.set_xlabel(xlabel)
        dress(axes, "", "the second half of training")
    _ends(ends, of_variant)
    curves[0].set_ylabel("held-out loss, nats per byte")
    names = curves[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(of_variant), frameon=False, handlelength=4)
    return figure


def _band(axes: Axes, name: str, runs: Rows, along: str):
    """One variant's mean loss, and a deviation on either side."""
    color = VARIANT_COLORS[name]
    places = [fmean(at) for at in zip(*(row[along] for row in runs), strict=True)][FIRST_POINT:]
    losses = list(zip(*(row["loss"] for row in runs), strict=True))[FIRST_POINT:]
    means, spreads = [fmean(loss) for loss in losses], [stdev(loss) if len(loss) > 1 else 0.0 for loss in losses]
    axes.plot(places, means, label=name, marker=MARKERS.get(color, ""), markersize=4, **drawn(color))
    low, high = ([mean + sign * spread for mean, spread in zip(means, spreads, strict=True)] for sign in (-1, 1))
    axes.fill_between(places, low, high, color=color, alpha=BAND, linewidth=0)


def _ends(axes: Axes, runs: Mapping[str, Rows]):
    """The last loss of every seed, and each variant's mean."""
    for place, (name, found) in enumerate(runs.items()):
        losses = [row["held_out_loss"] for row in found]
        axes.plot([place] * len(losses), losses, markerfacecolor="none", **dotted(VARIANT_COLORS[name]))
        axes.hlines(fmean(losses), place - 0.3, place + 0.3, color=BLACK, linewidth=1.5)
    axes.set_xticks(range(len(runs)), list(runs))
    axes.set_xlabel("capacity factor, or none")
    dress(axes, "", "at the end: each seed, and the mean")


def _of_the_last(runs: Sequence[Rows]) -> Rows:
    """The rows of the last run.

    Raises
    ------
    ValueError
        If it has none.
    """
    if not runs[-1]:
        raise ValueError("rows is empty, but it must hold at least one")
    return runs[-1]


def _powers_of_two(axes: Axes, values: Sequence[int]):
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
