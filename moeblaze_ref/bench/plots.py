"""Plots of a benchmark: rates against the dense product's, bytes saved for backward, and steps against a size."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from moeblaze_ref.bench.report import grouped, label
from moeblaze_ref.core.checks import check_name
from moeblaze_ref.core.drawing import dress, heading, panels
from moeblaze_ref.core.units import GIB
from moeblaze_ref.memory.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LINES,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    filled,
)

# The curves of `growth` by their names; the first is a bound, without marks.
CURVES: dict[str, dict[str, Any]] = {
    "roofline": {"color": BLACK},
    "ours": {"color": BLUE, "marker": "o"},
    **{
        name: {"color": color, "marker": MARKERS[color], "linestyle": LINES[color]}
        for name, color in (
            ("ours as a CUDA graph", SKY),
            ("torch.compile", VERMILLION),
            ("torch.compile as a CUDA graph", ORANGE),
        )
    },
}
COLORS = (BLUE, SKY, VERMILLION, ORANGE, PURPLE, YELLOW, GREEN, BLACK, GREY)


def pictured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with kept bytes of runs on uniform routing, which have every baseline."""
    skewed = {row["run"] for row in rows if row["routing"] != "uniform"}
    return [row for row in rows if row["run"] not in skewed and row["kept_bytes"] is not None]


def time_and_memory(rows: Sequence[dict[str, Any]]) -> Figure:
    """Two panels of bars, a group for each preset and a bar for each system and policy.

    The rows are `layer.Row` s of any number of runs; see `pictured`.

    Returns
    -------
    Figure
        Left: percent of the dense product's rate in a system's worst run, with a line to its best one, and the worst
        run's milliseconds. Right: the most GiB (2**30 bytes) that it keeps for the backward.

    Raises
    ------
    ValueError
        If there is no row.
    """
    if not rows:
        raise ValueError("rows is empty, but it must hold at least one")
    presets, systems = (list(dict.fromkeys(map(of, rows))) for of in (lambda row: row["preset"], label))
    tall = 1.2 + len(presets) * max(0.9, 0.2 * len(systems))
    figure, (times, memory) = panels(11, tall, 1, 2, sharey=True)
    for number, (system, color) in enumerate(zip(systems, COLORS, strict=False)):
        runs = grouped((row for row in rows if label(row) == system), "preset")
        places = [presets.index(name) + 0.8 * (number + 0.5) / len(systems) - 0.4 for name in runs]
        style = {"height": 0.8 / len(systems), "label": system, **filled(color), "linewidth": 0}  # the shortest show
        worst, best = (
            [pick(of_one, key=itemgetter("pct_of_cublas")) for of_one in runs.values()] for pick in (min, max)
        )
        bars = times.barh(places, [row["pct_of_cublas"] for row in worst], **style)
        times.hlines(
            places, *([row["pct_of_cublas"] for row in ends] for ends in (worst, best)), color=BLACK, linewidth=1.5
        )
        _name_times(times, bars, worst, best)
        memory.barh(places, [max(row["kept_bytes"] for row in of_one) / GIB for of_one in runs.values()], **style)
    _dress(times, presets, "how fast: the worst run, a line to the best", "percent of the dense product's rate")
    times.margins(x=0.15)
    _dress(memory, presets, "what a layer keeps", "kept for the backward, GiB")
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _name_times(axes, bars, worst, best):
    """The worst run's milliseconds behind the line to the best."""
    for bar, row, other in zip(bars, worst, best, strict=True):
        end, middle = other["pct_of_cublas"] + 0.8, bar.get_y() + bar.get_height() / 2
        axes.text(end, middle, f"{row['step_ms']:.1f} ms", va="center", fontsize="small")


def _dress(axes, presets, title, xlabel):
    axes.set_yticks(range(len(presets)), presets)
    axes.set_ylim(len(presets) - 0.5, -0.5)  # the first preset on top
    heading(axes, title)
    axes.set_xlabel(xlabel)


def growth(curves: Mapping[str, Mapping[float, float]], xlabel: str, logarithmic: bool) -> Figure:
    """Draw curves of milliseconds against a size.

    Parameters
    ----------
    curves : mapping
        The milliseconds of each curve by the size, by its name: one of ``CURVES``.
    xlabel : str
    logarithmic : bool
        Whether the axes are; otherwise the milliseconds begin at 0.

    Raises
    ------
    ValueError
        If a curve has another name.
    """
    figure, axes = panels(7, 4.2)
    for name, curve in curves.items():
        look = CURVES[check_name("curve", name, CURVES)]
        axes.plot([*curve], [*curve.values()], label=name, markersize=5, **look)
    if logarithmic:
        sizes = sorted({size for curve in curves.values() for size in curve})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(xlabel)
    dress(axes, "milliseconds of a step", "forward and backward")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
