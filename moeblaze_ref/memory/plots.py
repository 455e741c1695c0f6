"""Two pictures of the memory wall: what the bytes are made of, and where they hit a GPU's capacity.

Both functions return a matplotlib Figure of their own, without pyplot and its global state: a
notebook shows it after ``%matplotlib inline``, ``figure.savefig`` writes it. Tensors and systems
have the same colours in every picture, from the colour-blind-safe palette of Okabe and Ito.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from moeblaze_ref.core.checks import MAX_ROUTED_ROWS
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.drawing import heading, panels
from moeblaze_ref.core.units import GB, Unit, unit_for
from moeblaze_ref.memory.accounting import (
    GPU_CAPACITIES,
    VARIANTS,
    Account,
    Assumptions,
    account,
    largest_tokens,
    systems_with,
)

# Okabe and Ito's eight, by their names, and a grey.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#999999"
# Five of them look like another without colour: what tells them apart in grey too.
HATCHES = {VERMILLION: "////", ORANGE: "\\\\\\\\", SKY: "----", GREEN: "xxxx", PURPLE: "...."}
LINES = {VERMILLION: "--", ORANGE: "-.", SKY: ":", GREEN: (0, (8, 2)), PURPLE: (0, (4, 1, 1, 1, 1, 1))}
MARKERS = {VERMILLION: "X", ORANGE: "s", SKY: "^", GREEN: "P", PURPLE: "d"}

# The tensors that a reader must tell apart; those of routing and indexing, all small, share a colour.
REST = "routing, indices"
TENSOR_COLORS = {
    "x": BLACK,
    "routed_x": VERMILLION,
    "a": BLUE,
    "act_a": SKY,
    "b": GREEN,
    "y_swi": YELLOW,
    "y": ORANGE,
    "weighted": PURPLE,
    REST: GREY,
}

SYSTEM_COLORS = {
    "conventional": VERMILLION,
    "sequential": GREEN,
    "capacity": ORANGE,
    "dynamic_capacity": YELLOW,
    "megablocks_published": SKY,
    "megablocks_memory_optimized": GREY,
    "megablocks": PURPLE,
    "sonicmoe": BLACK,
    "moeblaze": BLUE,
}
POLICY_LINES = {None: "-", "conventional": ":", "paper": "-", "minimal": "--", "inputs": "-."}

DARK = {BLACK, VERMILLION, BLUE, GREEN}  # colours that need white letters

LABEL_GAP = 0.078  # between labels at the ends of lines, as a share of the axes' height
LABEL_WIDTH = 0.08  # of the axis: the narrowest part of a bar that its name fits into


def filled(color: str) -> dict[str, Any]:
    """The look of a bar in one of the colours."""
    return {"facecolor": color, "edgecolor": "white", "hatch": HATCHES.get(color)}


def behind(color: str) -> dict[str, Any]:
    """The box of a text on such a bar, so that no hatch goes through it."""
    return {"facecolor": color, "edgecolor": "none", "pad": 1.5}


def drawn(color: str) -> dict[str, Any]:
    """The look of a line in one of the colours."""
    return {"color": color, "linestyle": LINES.get(color, "-")}


def dotted(color: str) -> dict[str, Any]:
    """The look of a series of points in one of the colours."""
    return {"color": color, "linestyle": "", "marker": MARKERS.get(color, "o")}


def kept_by_tensor(one: Account) -> dict[str, int]:
    """Kept bytes by the names of ``TENSOR_COLORS``, everything else added up under ``REST``."""
    kept = dict.fromkeys(TENSOR_COLORS, 0)
    for tensor in one.tensors:
        if tensor.kept:
            kept[tensor.name if tensor.name in TENSOR_COLORS else REST] += tensor.bytes
    return kept


def stacked_bars(accounts: Sequence[Account]) -> Figure:
    """Kept bytes, one bar a system and policy, stacked by tensor; a tick shows the peak of the forward.

    The accounts are of one configuration; the first is drawn on top. The axis is in GiB (2**30 bytes), or in MiB or KiB
    for a small layer.

    Raises
    ------
    ValueError
        If there is no account.
    """
    if not accounts:
        raise ValueError("accounts is empty, but it must hold at least one account")
    figure, axes = panels(9, 2 + 0.5 * len(accounts))
    largest = max(one.peak_bytes for one in accounts)
    unit = unit_for(largest)
    axes.set_xlim(0, unit.of(largest) * 1.3 or 1)
    _stack(axes, [kept_by_tensor(one) for one in accounts], unit)
    _mark_peaks(axes, accounts, unit)
    axes.set_yticks(range(len(accounts)), [one.label for one in accounts])
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    heading(axes, f"L = {accounts[0].config.L:,}, {_layer(accounts[0].config)}")
    axes.set_xlabel("activations of one layer kept until the backward, " + unit.name)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure


def _layer(config):
    """The configuration without L, for a title."""
    return f"d = {config.d:,}, h = {config.h:,}, E = {config.E}, k = {config.k}, {config.activation}, {config.dtype}"


def _stack(axes, parts, unit: Unit):
    """One horizontal bar for each account's bytes by tensor, tensor after tensor."""
    left = [0.0] * len(parts)
    for name, color in TENSOR_COLORS.items():
        widths = [unit.of(part[name]) for part in parts]
        bars = axes.barh(range(len(parts)), widths, left=left, label=name, **filled(color))
        _name_parts(axes, bars, widths)
        left = [start + width for start, width in zip(left, widths, strict=True)]


def _name_parts(axes, bars, widths):
    """The tensor's name inside every part that is wide enough for it."""
    name = bars.get_label()
    fits = axes.get_xlim()[1] * LABEL_WIDTH
    labels = [name if width > fits else "" for width in widths]
    color = TENSOR_COLORS[name]
    letters = axes.bar_label(bars, labels, label_type="center", color="white" if color in DARK else "black")
    for text in filter(Text.get_text, letters):
        text.set_bbox(behind(color))


def _mark_peaks(axes, accounts, unit: Unit):
    """A tick at the peak of every forward, a line from the bar to it, and both totals in numbers."""
    rows, peaks = range(len(accounts)), [unit.of(one.peak_bytes) for one in accounts]
    axes.hlines(rows, [unit.of(one.kept_bytes) for one in accounts], peaks, color=BLACK, linewidth=0.8)
    axes.scatter(peaks, rows, marker="|", s=200, color=BLACK, label="peak of the forward")
    for row, (one, peak) in enumerate(zip(accounts, peaks, strict=True)):
        text = f"{unit.text(one.kept_bytes)} kept, {unit.text(one.peak_bytes)} peak"
        axes.annotate(text, (peak, row), xytext=(6, 0), textcoords="offset points", va="center")


def bytes_against_tokens(config: MoEConfig, assumptions: Assumptions = Assumptions()) -> Figure:
    """The forward's peak against L, log-log, for every system and policy, with two GPUs' capacities as lines.

    The layer's own L is marked where it lies in the picture. L varies, so routing is uniform: counts are ignored. Bytes
    are in GB (1e9), as capacities are printed. Every line is labelled at its right end, with the largest L that fits
    the smaller GPU; dots show where lines meet the capacities.
    """
    uniform = replace(assumptions, counts=None)
    figure, axes = panels(9, 5.5)
    fitting = {  # the largest L of a system and policy in each GPU
        variant: [largest_tokens(config, *variant, capacity, uniform) for capacity in GPU_CAPACITIES.values()]
        for variant in VARIANTS
        if variant[0] in systems_with(assumptions)
    }
    tokens = _token_range(config, [limit for limits in fitting.values() for limit in limits])
    ends = {}
    for variant, limits in fitting.items():
        system, policy = variant
        color = SYSTEM_COLORS[system]
        peaks = [account(config.replace(L=L), system, policy, uniform).peak_bytes / GB for L in tokens]
        label = "/".join(filter(None, variant))
        axes.loglog(tokens, peaks, color=color, linestyle=POLICY_LINES[policy], label=label)
        axes.plot(limits, [capacity / GB for capacity in GPU_CAPACITIES.values()], "o", color=color, markersize=4)
        ends[label] = (peaks[-1], color, limits[0])
    _dress_axes(axes, tokens)
    _draw_capacities(axes)
    _label_ends(axes, ends)
    _mark_tokens(axes, config.L)
    heading(axes, _layer(config))
    return figure


def _token_range(config, limits):
    """Values of L, evenly spaced on a logarithmic axis, around everything that fits some GPU."""
    first, last = max(1, min(limits) // 4), min(MAX_ROUTED_ROWS // config.k, max(limits) * 2)
    return [round(first * (last / first) ** (step / 40)) for step in range(41)]


def _dress_axes(axes, tokens):
    """Names and ticks: 1, 2 and 5 of every decade, in the units in which people say them."""
    axes.set_xlim(tokens[0], tokens[-1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.set_xlabel("L, tokens in a step")
    axes.set_ylabel("activations of one layer at the forward's peak, GB (1e9)")


def _draw_capacities(axes):
    """A horizontal line for each GPU's capacity, labelled on the line."""
    for name, capacity in GPU_CAPACITIES.items():
        axes.axhline(capacity / GB, color=BLACK, linewidth=0.8)
        where = {"xy": (0, capacity / GB), "xycoords": ("axes fraction", "data")}
        axes.annotate(name, **where, xytext=(4, 3), textcoords="offset points")


def _mark_tokens(axes, tokens):
    """A vertical line at the configuration's own L, if the axis reaches it."""
    first, last = axes.get_xlim()
    if first <= tokens <= last:
        axes.axvline(tokens, color=GREY, linewidth=0.8, linestyle=":")
        where = {"xy": (tokens, 0), "xycoords": ("data", "axes fraction")}
        axes.annotate(f"L = {tokens:,}", **where, xytext=(3, 4), textcoords="offset points")


def _label_ends(axes, ends):
    """Each line's label right of its end; ``ends`` maps the label to the end's y, its colour and the L that fits."""
    gpu = next(iter(GPU_CAPACITIES))
    right = axes.get_xlim()[1]
    to_axes = axes.transScale + axes.transLimits
    heights = _spaced({label: float(to_axes.transform((right, y))[1]) for label, (y, _, _) in ends.items()})
    for label, (y, color, limit) in ends.items():
        axes.annotate(
            f"{label}\n{limit:,} tokens in {gpu}",
            (right, y),
            xytext=(1.06, heights[label]),
            textcoords="axes fraction",
            va="center",
            fontsize="small",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkB": 0},
        )


def _spaced(heights):
    """The heights moved so that neighbours are LABEL_GAP apart and the highest is at most 1; order is kept."""
    ascending = sorted(heights, key=heights.get)
    moved, lowest = {}, -1.0
    for label in ascending:
        lowest = moved[label] = max(heights[label], lowest + LABEL_GAP)
    ceiling = 1.0 + LABEL_GAP
    for label in reversed(ascending):
        ceiling = moved[label] = min(moved[label], ceiling - LABEL_GAP)
    return moved
