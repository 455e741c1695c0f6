"""Two pictures of placements: the load of every GPU in every layer, and load against crossings.

Figures of their own, without pyplot, in the palette of `memory.plots`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from moeblaze_ref.core.drawing import heading, panels
from moeblaze_ref.memory.plots import BLUE, GREY, ORANGE, SKY, VERMILLION
from moeblaze_ref.placement.methods import Trial

WIDEST = 4  # heat maps in a row
COLORS = BLUE, VERMILLION, ORANGE, SKY
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a name, so that no line goes through it


def heat_map(trials: Sequence[Trial]) -> Figure:
    """Load over the layer's mean, a panel a trial: GPUs across, layers down; the busier, the darker.

    Raises
    ------
    ValueError
        If there is no trial.
    """
    if not trials:
        raise ValueError("trials is empty, but a picture needs at least one")
    columns = min(len(trials), WIDEST)
    rows = -(-len(trials) // columns)
    layers = len(trials[0].load)
    size = 1 + 2.2 * columns, 1 + rows * (1 + 0.14 * layers)
    figure, shown = panels(*size, rows, columns, framed=True, squeeze=False)
    over_mean = [trial.load / np.maximum(trial.load.mean(axis=1, keepdims=True), 1) for trial in trials]
    least = min(0.999, *(float(load.min()) for load in over_mean))
    most = max(1.001, *(float(load.max()) for load in over_mean))
    for axes, trial, load in zip(shown.flat, trials, over_mean, strict=False):
        image = axes.imshow(load, vmin=least, vmax=most, cmap="cividis_r", aspect="auto", interpolation="nearest")
        heading(axes, f"{trial.method}: {trial.balance_mean:.3f}")
        axes.set(xticks=range(load.shape[1]), xlabel="GPU", ylabel="layer")
    for axes in shown.flat[len(trials) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=shown, label="load over the layer's mean")
    return figure


class Point(Protocol):
    """A method on one split: a `Trial`, or what a record holds of one."""

    method: str
    balance_mean: float
    cross_share: float


def load_against_crossings(points: Sequence[Point], curve: Sequence[Point] = ()) -> Figure:
    """Every method on a split as a point, and the curve of `joint` by its limits: down and left is better."""
    figure, axes = panels(7.5, 5)
    if curve:
        crossings, load = [100 * point.cross_share for point in curve], [point.balance_mean for point in curve]
        axes.plot(crossings, load, "o-", color=BLUE, markersize=4, label="joint, by its limit on the load")
        axes.legend(frameon=False)
    names: dict[tuple[float, float], list[str]] = {}
    for point in points:
        names.setdefault((100 * point.cross_share, point.balance_mean), []).append(point.method)
    for at, methods in names.items():
        axes.plot(*at, "s", color=VERMILLION, markersize=5)
        axes.annotate(", ".join(methods), at, textcoords="offset points", zorder=1, bbox=BEHIND, **_aside(at, names))
    axes.axhline(1, color=GREY, linewidth=0.8, zorder=0.5)
    axes.set(xlabel="transitions that change GPU, %", ylabel="fullest GPU over the mean, mean of layers")
    return figure


def _aside(at, points):
    """Where a name meets no other: left of a point with a near one to its right, below one with a near one above."""
    near = [(x - at[0], y - at[1]) for x, y in points if (x, y) != at and abs(x - at[0]) < 3 and abs(y - at[1]) < 0.05]
    if any(x > 0 and y >= 0 for x, y in near):
        return {"xytext": (-5, 4), "ha": "right"}
    return {"xytext": (5, -12 if any(y > 0 for _, y in near) else 4)}


def growth(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Time of `dedup` and peak memory of records of `moeblaze place`, against GPUs: a line for each size of model."""
    figure, (seconds, memory) = panels(10, 4, 1, 2)
    for size, color in zip(dict.fromkeys(one["expand"] for one in found), COLORS, strict=False):
        of_size = [one for one in found if one["expand"] == size]
        gpus = [one["gpus"] for one in of_size]
        took = [next(row["solve_s"] for row in one["rows"] if row["method"] == "dedup") for one in of_size]
        seconds.plot(gpus, took, "o-", color=color, label=size)
        memory.plot(gpus, [one["peak_bytes"] / 2**30 for one in of_size], "o-", color=color, label=size)
    for axes, label in ((seconds, "time of dedup, s"), (memory, "peak memory of the command, GiB")):
        axes.set(xlabel="GPUs", ylabel=label, ylim=(0, 1.1 * axes.get_ylim()[1]))
        axes.set_xticks(sorted({one["gpus"] for one in found}))
    seconds.legend(frameon=False, title="layers x experts x k")
    return figure
