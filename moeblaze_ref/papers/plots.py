"""Pictures of MoEBlaze's figures 3 to 6: saved bytes and speed on its seven configurations."""

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeblaze_ref.core.config import PAPER_PRESETS
from moeblaze_ref.core.drawing import dress, panels
from moeblaze_ref.core.units import GB
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, filled
from moeblaze_ref.papers import moeblaze
from moeblaze_ref.papers.results import Rows

COLORS = {  # of a system in every picture
    moeblaze.PUBLISHED: SKY,
    moeblaze.OPTIMIZED: GREEN,
    "our MegaBlocks": PURPLE,
    moeblaze.ALGORITHM_1: ORANGE,
    moeblaze.MINIMAL: BLUE,
    "inputs": VERMILLION,
    "plain PyTorch": YELLOW,
    "torch.compile": BLACK,
    moeblaze.SONICMOE: GREY,
}


def figure_3() -> Figure:
    """Draw the saved bytes with SiLU and with ReLU, by the account."""
    return _memory(("silu", "relu"))


def figure_5() -> Figure:
    """Draw the saved bytes with SwiGLU, by the account."""
    return _memory(("swiglu",))


def _memory(activations: Sequence[str]) -> Figure:
    """A panel an activation: a bar for each configuration and system, and a line where the paper prints a number."""
    figure, shown = panels(9, 3.2 * len(activations), len(activations), sharex=True, squeeze=False)
    for axes, activation in zip(shown[:, 0], activations, strict=True):
        _bars(axes, {label: [_kept_gb(name, activation, label) for name in PAPER_PRESETS] for label in moeblaze.KEPT})
        for (of, name, label), number in moeblaze.PRINTED_MEMORY.items():
            if of == activation:
                _mark(axes, name, list(moeblaze.KEPT).index(label), moeblaze.centre(number) / GB)
        dress(axes, "GB (10^9 bytes)", f"saved for backward, {moeblaze.NAMES[activation]}, bfloat16")
    return _with_legend(figure, shown[0, 0])


def speed(*runs: Rows) -> Figure:
    """Draw how many times as fast as published MegaBlocks each system is in its worst run, a panel an activation.

    Each run on one device has the rows of `speed.time_systems`.
    """
    activations = dict.fromkeys(row["activation"] for rows in runs for row in rows)
    ratios = {activation: _worst_ratios(runs, activation) for activation in activations}
    names = [name for name in COLORS if any(name == found for of in ratios.values() for _, found in of)]
    figure, shown = panels(9, 0.6 + 3 * len(ratios), len(ratios), sharex=True, sharey=True, squeeze=False)
    for axes, (activation, found) in zip(shown[:, 0], ratios.items(), strict=True):
        timed = [name for name in names if any(name == of for _, of in found)]
        _bars(axes, {name: [found.get((preset, name), 0.0) for preset in PAPER_PRESETS] for name in timed})
        axes.axhline(1, color=BLACK, linewidth=1)
        missing = [name for name in names if name not in timed]
        title = f"{moeblaze.NAMES[activation]}: step time of published MegaBlocks over that of each system, worst run"
        without = f"\nwithout a time: {'; '.join(missing)}" if missing else ""
        dress(axes, "times as fast", f"{title}{without}")
    return _with_legend(figure, *shown[:, 0])


def _worst_ratios(runs: Sequence[Rows], activation: str) -> dict[tuple[str, str], float]:
    """The least of all runs, by configuration and name."""
    worst: dict[tuple[str, str], float] = {}
    for rows in runs:
        timed = [row for row in rows if row.get("step_ms") and row["activation"] == activation]
        ms = {(row["preset"], moeblaze.timed_name(row)): row["step_ms"] for row in timed}
        for (preset, name), time in ms.items():
            if name in COLORS and name != moeblaze.PUBLISHED and (preset, moeblaze.PUBLISHED) in ms:
                ratio = ms[preset, moeblaze.PUBLISHED] / time
                worst[preset, name] = min(ratio, worst.get((preset, name), ratio))
    return worst


def _kept_gb(name: str, activation: str, label: str) -> float:
    return moeblaze.kept_bytes(name, activation, label) / GB


def _bars(axes: Axes, heights_of: Mapping[str, Sequence[float]]):
    """A group of bars for each configuration, a bar for each label."""
    width = 0.8 / max(len(heights_of), 1)
    for number, (label, heights) in enumerate(heights_of.items()):
        places = [group + _offset(number, width) for group in range(len(PAPER_PRESETS))]
        axes.bar(places, heights, width, label=label, **filled(COLORS[label]), linewidth=0)
    axes.set_xticks(range(len(PAPER_PRESETS)), PAPER_PRESETS)


def _offset(number: int, width: float) -> float:
    """The centre of a bar in its group."""
    return (number + 0.5) * width - 0.4


def _mark(axes: Axes, name: str, number: int, height: float):
    """A line at what the paper prints of one bar."""
    width = 0.8 / len(moeblaze.KEPT)
    left = PAPER_PRESETS.index(name) + _offset(number, width) - width / 2
    axes.hlines(height, left, left + width, color=BLACK, linewidth=2)
    axes.annotate("printed", (left + width, height), fontsize="small", va="center")


def _with_legend(figure: Figure, *panels: Axes) -> Figure:
    """Add a legend with each name in any panel once; return the figure."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        drawn, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, drawn, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure
