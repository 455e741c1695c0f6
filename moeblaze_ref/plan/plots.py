"""Pictures of a plan: memory over the time of a step, bytes by kind, and the peak against batch or sequence."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeblaze_ref.core.drawing import heading, panels
from moeblaze_ref.core.units import GB, MB
from moeblaze_ref.memory.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    HATCHES,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    drawn,
    filled,
)
from moeblaze_ref.plan.report import CAPACITIES
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.sweeps import Line
from moeblaze_ref.plan.timeline import PHASES, Instant

COLORS = {
    "weights": BLACK,
    "float32 weights": GREY,
    "optimizer states": BLUE,
    "gradients": SKY,
    "attention": ORANGE,
    "experts": VERMILLION,
    "activations": VERMILLION,  # of a recorded step, whose parts are not known
    "checkpoints": YELLOW,
    "logits and loss": GREEN,
    "passing tensors": PURPLE,
}
PALE = "#C4C4C4"
REST = "the rest"
LINES = (BLACK, VERMILLION, BLUE, GREEN, ORANGE)


def _by_color(held: dict[str, int], unit: int) -> dict[str, float]:
    """Bytes in a unit by the names of ``COLORS``, everything else under ``REST``."""
    found = dict.fromkeys((*COLORS, REST), 0.0)
    for kind, number in held.items():
        found[kind if kind in COLORS else REST] += number / unit
    return found


def over_time(run: Run) -> Figure:
    """Draw the bytes that the fullest GPU holds at each moment of a step, stacked, with the peak marked.

    Parameters
    ----------
    run : Run

    Returns
    -------
    Figure
    """
    return moments_picture(run.worst.timeline, f"{run.model.name}: memory of the fullest GPU over one step")


def moments_picture(moments: Sequence[Instant], title: str, unit: str = "GB") -> Figure:
    """Draw the bytes that are held at each moment of a step, stacked, with the peak marked.

    Parameters
    ----------
    moments : sequence of Instant
        With all ``PHASES``.
    title : str
    unit : str
        "GB" or "MB".

    Returns
    -------
    Figure
    """
    size = {"GB": GB, "MB": MB}[unit]
    figure, axes = panels(9, 4.5)
    rows = np.array([list(_by_color(moment.held, size).values()) for moment in moments]).T
    looks = {**COLORS, REST: PALE}
    used = [(name, row) for name, row in zip(looks, rows, strict=True) if row.max() > 0]
    axes.stackplot(
        range(len(moments)),
        [row for _, row in used],
        labels=[name for name, _ in used],
        colors=[looks[name] for name, _ in used],
        hatch=[HATCHES.get(looks[name]) for name, _ in used],
        edgecolor="white",
        step="mid",
        linewidth=0,
    )
    _mark_peak(axes, moments, size, unit)
    starts = [next(i for i, moment in enumerate(moments) if moment.phase == phase) for phase in PHASES]
    for start in starts[1:]:
        axes.axvline(start - 0.5, color=GREY, linewidth=0.8)
    axes.set_xticks(starts, PHASES, ha="left")
    axes.set_ylabel(unit)
    axes.legend(loc="lower left", bbox_to_anchor=(1.01, 0), frameon=False)
    heading(axes, title)
    return figure


def _mark_peak(axes: Axes, moments: Sequence[Instant], size: int, unit: str) -> None:
    """Mark the moment when most is held, and name it."""
    most = max(moments, key=lambda moment: moment.bytes)
    peak, height = moments.index(most), most.bytes / size
    axes.plot(peak, height, "v", color=BLACK)
    axes.annotate(
        f"{height:,.1f} {unit}: {most.phase}, {most.where}",
        (peak, height),
        xytext=(0, 8),
        textcoords="offset points",
        ha="right" if peak > len(moments) / 2 else "left",
    )
    axes.set_ylim(0, height * 1.15)


def by_kind(run: Run) -> Figure:
    """A bar for each kind of bytes on the fullest GPU, at the peak of the phase that has most of it.

    Parameters
    ----------
    run : Run

    Returns
    -------
    Figure
    """
    held = [(kind, number / GB) for kind, number in run.worst.by_kind.most_common()]
    figure, axes = panels(8, 0.45 * len(held) + 1.2)
    for row, (kind, number) in enumerate(held):
        axes.barh(row, number, **filled(COLORS.get(kind, PALE)))
        axes.annotate(f" {number:,.2f}", (number, row), va="center")
    axes.set_yticks(range(len(held)), [kind for kind, _ in held])
    axes.invert_yaxis()
    axes.set_xlim(0, max(number for _, number in held) * 1.15)
    axes.set_xlabel("GB")
    heading(axes, f"{run.model.name}: at the peak of a phase, by kind")
    return figure


def swept(axis: str, lines: Sequence[Line]) -> Figure:
    """The peak against the batch or the sequence, a line for each way to compute the experts.

    Parameters
    ----------
    axis : str
    lines : sequence of Line

    Returns
    -------
    Figure
    """
    figure, axes = panels(8, 4.5)
    for line, color in zip(lines, LINES, strict=False):
        axes.plot(line.sizes, [peak / GB for peak in line.peaks], label=line.experts, **drawn(color))
    most = max(peak for line in lines for peak in line.peaks) / GB
    for capacity in (one for one in CAPACITIES if one < most):
        axes.axhline(capacity, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(f"{capacity} GB", (lines[0].sizes[0], capacity), va="bottom", color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lines[0].sizes, [f"{size:,}" for size in lines[0].sizes])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.set_ylabel("peak, GB")
    axes.set_ylim(0)
    axes.legend(frameon=False)
    heading(axes, f"Peak of the fullest GPU against the {axis}")
    return figure
