"""The picture of a benchmark: how near each system comes to the dense product's rate, and what it keeps."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from moeblaze_ref.bench.report import label
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from moeblaze_ref.units import GIB

COLORS = (BLUE, SKY, VERMILLION, ORANGE, PURPLE, YELLOW, GREEN, BLACK, GREY)


def pictured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the first run of every preset on uniform routing."""
    chosen = [row for row in rows if row["routing"] == "uniform"]
    first = {}
    for row in chosen:
        first.setdefault(row["preset"], row["run"])
    return [row for row in chosen if row["run"] == first[row["preset"]]]


def time_and_memory(rows: Sequence[dict[str, Any]]) -> Figure:
    """Two panels of bars, a group for each preset and a bar for each system and policy.

    Parameters
    ----------
    rows : sequence of dict
        `layer.Row`, each system at most once for a preset; see `pictured`.

    Returns
    -------
    Figure
        Left: percent of the dense product's rate, the step's milliseconds at the bar's end. Right: GiB (2**30 bytes)
        kept for the backward.

    Raises
    ------
    ValueError
        If there is no row.
    """
    if not rows:
        raise ValueError("rows is empty, but it must hold at least one")
    presets, systems = (list(dict.fromkeys(map(of, rows))) for of in (lambda row: row["preset"], label))
    figure = Figure(figsize=(11, 1.2 + 0.9 * len(presets)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True)
    for number, (system, color) in enumerate(zip(systems, COLORS, strict=False)):
        mine = [row for row in rows if label(row) == system]
        places = [presets.index(row["preset"]) + 0.8 * (number + 0.5) / len(systems) - 0.4 for row in mine]
        style = {"height": 0.8 / len(systems), "color": color, "label": system}
        bars = times.barh(places, [row["pct_of_cublas"] for row in mine], **style)
        times.bar_label(bars, [f"{row['step_ms']:.1f} ms" for row in mine], padding=2, fontsize="x-small")
        memory.barh(places, [row["kept_bytes"] / GIB for row in mine], **style)
    _dress(times, presets, "percent of the dense product's rate, forward and backward")
    _dress(memory, presets, "GiB kept for the backward")
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _dress(axes, presets, title):
    axes.set_yticks(range(len(presets)), presets)
    axes.set_ylim(len(presets) - 0.5, -0.5)  # the first preset on top
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize="medium")
