"""Pictures of the memory wall: those that sliders move, and the tensors of a layer drawn to scale."""

from collections.abc import Sequence
from math import ceil, log, prod

from matplotlib.figure import Figure

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.drawing import cell, panels
from moeblaze_ref.core.units import GIB, unit_for
from moeblaze_ref.memory import plots
from moeblaze_ref.memory.accounting import GPU_CAPACITIES, Account, Tensor, account

GAP = 0.25  # between neighbours, as a share of d


def memory_bars(L: int, d: int, h: int, E: int, k: int, activation: str, policy: str) -> Figure:
    """`plots.stacked_bars` of four systems, MegaBlocks as published, moeblaze under one policy, in bfloat16.

    The axis ends at a power of four, so that lengths can be compared from one position of a slider to the next.
    GPU capacities are lines where the axis reaches them.
    """
    config = MoEConfig(L, d, h, E, k, activation)
    rows = [account(config, system) for system in ("conventional", "capacity", "megablocks_published")]
    rows.append(account(config, "moeblaze", policy))
    figure = plots.stacked_bars(rows)
    (axes,) = figure.axes
    axes.set_xlim(0, 4 ** ceil(log(axes.get_xlim()[1], 4)))
    for name in [text for text in axes.texts if text.get_text() in plots.TENSOR_COLORS]:
        name.remove()  # from inside a bar: it was placed for another axis, and the legend has it
    _mark_capacities(axes, unit_for(max(row.peak_bytes for row in rows)))
    return figure


def _mark_capacities(axes, unit):
    """Lines with their names: that of the smaller on its left, so that the two never meet."""
    for (gpu, capacity), (side, shift) in zip(GPU_CAPACITIES.items(), (("right", -3), ("left", 3)), strict=True):
        if unit.of(capacity) < axes.get_xlim()[1]:
            axes.axvline(unit.of(capacity), color=plots.BLACK, linewidth=0.8)
            where = {"xy": (unit.of(capacity), 0), "xycoords": ("data", "axes fraction")}
            axes.annotate(gpu, **where, xytext=(shift, 2), textcoords="offset points", ha=side)


def memory_lines(d: int, h: int, E: int, k: int, activation: str) -> Figure:
    """`plots.bytes_against_tokens` in bfloat16; L is its axis."""
    return plots.bytes_against_tokens(MoEConfig(0, d, h, E, k, activation))


def tensors_to_scale(accounts: Sequence[Account]) -> Figure:
    """A panel for each account: its tensors as rectangles, rows down and columns across, so that area is bytes.

    Filled is what lives until the backward; an outline is freed within the forward; what only the first account
    has leaves its place empty.

    The accounts are of one configuration; the first has every tensor that is drawn, and all are matrices.

    Raises
    ------
    ValueError
        If there is no account.
    """
    if not accounts:
        raise ValueError("accounts is empty, but it must hold at least one account")
    config = accounts[0].config
    places = _places(_drawn(accounts[0]), GAP * config.d)
    figure, shown = panels(11, 1.5 * len(accounts) + 0.6, len(accounts), squeeze=False)
    right = max(left + width for left, width in places.values())
    for axes, one in zip(shown[:, 0], accounts, strict=True):
        for tensor in _drawn(one):
            _draw_tensor(axes, tensor, places[tensor.name])
        axes.set(xlim=(0, right), ylim=(config.R, 0), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(f"{one.label}\n{one.kept_bytes / GIB:,.3g} GiB kept", rotation=0, ha="right", va="center")
    for tensor in _drawn(accounts[0]):
        left, width = places[tensor.name]
        shown[0, 0].annotate(tensor.name, (left + width / 2, 0), xytext=(0, 3), textcoords="offset points", ha="center")
    title = f"Each tensor in GiB. Height: rows, L or R = {config.k} L. Width: columns, d or h. So area is bytes."
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    return figure


def _drawn(one: Account) -> list[Tensor]:
    return [tensor for tensor in one.tensors if tensor.name in plots.TENSOR_COLORS]


def _places(tensors, gap):
    """(left, width) of each tensor's column, in elements, in order of birth."""
    places, left = {}, 0.0
    for tensor in tensors:
        places[tensor.name] = left, prod(tensor.shape[1:])
        left += places[tensor.name][1] + gap
    return places


def _draw_tensor(axes, tensor, place):
    left, width = place
    rows, color = tensor.shape[0], plots.TENSOR_COLORS[tensor.name]
    look = {"facecolor": color} if tensor.kept else {"facecolor": "none", "edgecolor": plots.GREY, "linestyle": "--"}
    ink = "white" if tensor.kept and color in plots.DARK else "black"
    cell(axes, (left, 0), (width, rows), look | {"clip_on": False}, f"{tensor.bytes / GIB:,.3g}", color=ink)
