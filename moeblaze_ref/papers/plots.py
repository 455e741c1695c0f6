"""Pictures of MoEBlaze's figures 3 to 6: saved bytes and speed on its seven configurations."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeblaze_ref.config import PAPER_PRESETS
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, filled
from moeblaze_ref.papers import moeblaze
from moeblaze_ref.papers.results import Rows
from moeblaze_ref.units import GB

COLORS = (SKY, GREEN, PURPLE, ORANGE, BLUE, VERMILLION, YELLOW, BLACK)


def figure_3() -> Figure:
    """Draw the saved bytes with SiLU and with ReLU, by the account."""
    return _memory(("silu", "relu"))


def figure_5() -> Figure:
    """Draw the saved bytes with SwiGLU, by the account."""
    return _memory(("swiglu",))


def _memory(activations: Sequence[str]) -> Figure:
    """A panel an activation: a bar for each configuration and system, and a line where the paper prints a number."""
    figure = Figure(figsize=(9, 3.2 * len(activations)), layout="constrained")
    panels = figure.subplots(len(activations), 1, sharex=True, squeeze=False)[:, 0]
    for axes, activation in zip(panels, activations, strict=True):
        _bars(axes, list(moeblaze.KEPT), lambda name, label, a=activation: moeblaze.kept_bytes(name, a, label) / GB)
        for (of, name, label), number in moeblaze.PRINTED_MEMORY.items():
            if of == activation:
                _mark(axes, name, list(moeblaze.KEPT).index(label), moeblaze.centre(number) / GB)
        axes.set_title(f"saved for backward, {moeblaze.NAMES[activation]}, bfloat16", loc="left", fontsize="medium")
        axes.set_ylabel("GB (10^9 bytes)")
    return _with_legend(figure, panels[0])


def speed(rows: Rows) -> Figure:
    """Draw how many times as fast as published MegaBlocks each system is, in one run; of its first activation."""
    activation = rows[0]["activation"]
    timed = [row for row in rows if row.get("step_ms") and row["activation"] == activation]
    ms = {(row["preset"], _label(row)): row["step_ms"] for row in timed}
    baseline = moeblaze.KEPT[moeblaze.PUBLISHED][0]
    labels = [label for label in dict.fromkeys(label for _, label in ms) if label != baseline]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    _bars(axes, labels, lambda name, label: ms.get((name, baseline), 0.0) / ms.get((name, label), float("inf")))
    axes.axhline(1, color=BLACK, linewidth=1)
    title = f"{moeblaze.NAMES[activation]}: step time of published MegaBlocks over that of each system"
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_ylabel("times as fast")
    return _with_legend(figure, axes)


def _label(row) -> str:
    return f"{row['system']}/{row['policy']}" if row.get("policy") else row["system"]


def _bars(axes: Axes, labels: Sequence[str], height: Callable[[str, str], float]):
    """A group of bars for each configuration, a bar for each label."""
    width = 0.8 / max(len(labels), 1)
    for number, (label, color) in enumerate(zip(labels, COLORS, strict=False)):
        places = [group + _offset(number, width) for group in range(len(PAPER_PRESETS))]
        heights = [height(name, label) for name in PAPER_PRESETS]
        axes.bar(places, heights, width, label=label, **filled(color), linewidth=0)
    axes.set_xticks(range(len(PAPER_PRESETS)), PAPER_PRESETS)
    axes.spines[["top", "right"]].set_visible(False)


def _offset(number: int, width: float) -> float:
    """The centre of a bar in its group."""
    return (number + 0.5) * width - 0.4


def _mark(axes: Axes, name: str, number: int, height: float):
    """A line at what the paper prints of one bar."""
    width = 0.8 / len(moeblaze.KEPT)
    left = PAPER_PRESETS.index(name) + _offset(number, width) - width / 2
    axes.hlines(height, left, left + width, color=BLACK, linewidth=2)
    axes.annotate("printed", (left + width, height), fontsize="small", va="center")


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
