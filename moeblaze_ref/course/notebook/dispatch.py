"""Pictures of the dispatch: its arrays step by step, its counted traffic, the size of its dense map."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from moeblaze_ref.backends.numpy_ref import dispatch as reference
from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.drawing import cell, heading, panels
from moeblaze_ref.core.units import MIB
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, LINES, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, drawn
from moeblaze_ref.memory.traffic import SECTOR_BYTES
from moeblaze_ref.runtime import ceil_div
from moeblaze_ref.runtime.simt.executor import LaunchReport, SimtExecutor
from moeblaze_ref.verify.cases import random_topk

EXPERT_COLORS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, VERMILLION, BLUE)
PALE = "#EEEEEE"
CELL_INCHES = 0.42

STEPS = (
    "The router's choice: k experts for each token. Read row by row, it is token_expert_indices.",
    "Step 1, the dense map: entry (i, e) is token i where expert e was chosen, else empty.",
    "Step 2, lengths: how many tokens each column holds.",
    "Step 2, offsets: where each expert's group begins, the lengths of all experts before it added up.",
    "Step 3, positions: the expert's offset + the tokens above in its column.",
    "Step 3, the write: each token goes to its position; the map keeps the position for the way back.",
)


def dispatch_steps(topk_experts: np.ndarray, num_experts: int, step: int) -> Figure:
    """The arrays of a small dispatch as they stand after ``STEPS[step]``, coloured by expert, grey until then.

    Parameters
    ----------
    topk_experts : ndarray (L, k), int32
    num_experts : int
    step : int
        0..5.
    """
    checks.check_int("step", step, at_least=0, at_most=len(STEPS) - 1)
    width, height = board_size(topk_experts, num_experts)
    figure, axes = panels(CELL_INCHES * width, CELL_INCHES * height)
    draw_arrays(axes, topk_experts, num_experts, STEPS[step], step, positions=step >= 4)
    return figure


def board_size(topk_experts: np.ndarray, num_experts: int) -> tuple[float, float]:
    """Width and height in cells of what `draw_arrays` draws."""
    num_tokens, k = topk_experts.shape
    return max(_right_of(k, num_experts) + max(k, num_experts + 1), k + 2 + num_tokens * k) + 3, num_tokens + 9.7


def _right_of(k, num_experts):
    """Return the column at which the arrays right of the map begin."""
    return k + num_experts + 4


def draw_arrays(axes: Axes, topk_experts: np.ndarray, num_experts: int, title: str, step: int, positions: bool):
    """The arrays of a small dispatch after a step; the map holds tokens, or the positions of `route_indices`."""
    found = reference.build(topk_experts, num_experts)
    num_tokens, k = topk_experts.shape
    middle, right, below = k + 2, _right_of(k, num_experts), num_tokens + 1.5
    width, height = board_size(topk_experts, num_experts)
    axes.set(xlim=(-2, width - 2), ylim=(height - 2.5, -2.5), aspect="equal")
    axes.set_axis_off()
    _text(axes, -2, -2, title, ha="left", weight="bold")
    for token in range(num_tokens):
        _text(axes, -0.3, token + 0.5, f"token {token}", ha="right")
    for expert in range(num_experts):
        _text(axes, middle + expert + 0.5, num_tokens + 0.4, f"e{expert}", ha="center")
    by_token = _by_token(found, topk_experts, middle, right, below, positions)
    for name, place, values, experts, first in (*by_token, *_by_expert(found, middle, right, below)):
        _array(axes, place, name, values, experts, known=step >= first)


def _array(axes, place, name, values, experts, known):
    """Cells of ``values`` (rows, columns), -1 for empty, from ``place`` on; coloured by ``experts``, -1 for none."""
    left, top = place
    for (row, column), value in np.ndenumerate(values):
        shown, expert = known and value >= 0, experts[row, column]
        color = EXPERT_COLORS[expert % len(EXPERT_COLORS)] if shown and expert >= 0 else PALE
        look, text = {"facecolor": color, "edgecolor": "white"}, value if shown else ""
        cell(axes, (left + column, top + row), (1, 1), look, text, fontsize="small")
    _text(axes, left, top - 0.35, name, ha="left", color=BLACK if known else GREY)


def _text(axes, x, y, text, **look):
    axes.text(x, y, text, va="center", fontsize="small", **look)


def _by_token(found, topk_experts, middle, right, below, with_positions):
    """(name, place, values, experts, first step) of the arrays whose rows, or runs of k, are tokens."""
    chosen = found.token_expert_indices[None]  # (1, R)
    positions = found.token_index_map.reshape(topk_experts.shape)  # (L, k)
    in_map = reference.dense_map(topk_experts, found.E)  # (L, E)
    if with_positions:
        np.put_along_axis(in_map, topk_experts, positions, axis=1)
    columns = np.broadcast_to(np.arange(found.E), in_map.shape)
    yield "topk_experts", (0, 0), topk_experts, topk_experts, 0
    yield "token_expert_indices", (middle, below + 2.2), chosen, chosen, 0
    yield "positions" if with_positions else "dense map", (middle, 0), in_map, columns, 1
    yield "token_index_map", (right, 0), positions, topk_experts, 5


def _by_expert(found, middle, right, below):
    """(name, place, values, experts, first step) of the arrays that follow the order of the experts."""
    offsets = found.expert_token_offsets[None]  # (1, E + 1)
    lengths = np.diff(offsets)  # (1, E)
    experts = np.arange(found.E)[None]  # (1, E)
    owner = np.repeat(experts, lengths[0], axis=1)  # (1, R)
    yield "lengths", (middle, below), lengths, experts, 2
    yield "expert_token_offsets", (right, below), offsets, np.append(experts, [[-1]], axis=1), 3
    yield "expert_token_indices", (middle, below + 4.4), found.expert_token_indices[None], owner, 5


# Memory traffic of the raw kernels -----------------------------------------------------------------------------------


def count_dispatch(L: int, E: int, k: int, routing: str = "uniform") -> list[LaunchReport]:
    """The launches of the paper's three steps on random choices, in raw CUDA, counted on the CPU."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        raw_dispatch.build(random_topk(L, E, k, routing), E, executor=executor, version="1_dense_map")
    return launches


def sector_cost(launch: LaunchReport) -> float:
    """Bytes of the 32-byte sectors that a launch touches over the bytes that its threads ask for."""
    return launch.sectors * SECTOR_BYTES / (launch.read_bytes + launch.written_bytes)


def sectors_against_experts(L: int = 2048, k: int = 2, experts: Sequence[int] = (2, 4, 8, 16, 32, 64)) -> Figure:
    """The sector cost against E of each kernel that touches the dense map.

    Beside them min(E, 8): what a walk down a column of 4-byte entries costs.
    """
    costs: dict[str, list[float]] = {}
    for E in experts:
        for launch in count_dispatch(L, E, k):
            if "dense_map" in launch.buffers:
                costs.setdefault(launch.kernel, []).append(sector_cost(launch))
    figure, axes = panels(8, 3.6)
    for (kernel, cost), color in zip(costs.items(), (BLUE, VERMILLION, ORANGE), strict=True):
        axes.plot(experts, cost, marker="o", label=kernel, **drawn(color))
    axes.plot(experts, [min(E, SECTOR_BYTES // 4) for E in experts], color=BLACK, linestyle=":", label="min(E, 8)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(experts, experts)
    axes.set(xlabel="E, experts", ylabel="sector bytes / bytes asked for", ylim=(0, None))
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def dense_map_by(text: str, topk_experts: np.ndarray, num_experts: int, seed: int = 0) -> np.ndarray:
    """The dense map (L, E) that the dense_map kernel of a .cu text makes on the CPU, one thread order per seed."""
    executor, (L, k) = SimtExecutor(seed=seed), topk_experts.shape
    dense_map = executor.empty((L, num_experts), "int32")
    executor.load("dispatch/1_dense_map.cu", text, THREADS=raw_dispatch.THREADS).launch(
        "dense_map",
        grid=ceil_div(L, raw_dispatch.THREADS),
        block=raw_dispatch.THREADS,
        topk_experts=topk_experts,
        dense_map=dense_map,
        token_expert_indices=executor.empty((L * k,), "int32"),
        L=L,
        E=num_experts,
        k=k,
    )
    return dense_map


# The size of the map -------------------------------------------------------------------------------------------------


def map_against_experts(L: int, k: int) -> Figure:
    """Bytes against E of the dense map, of the same map as bits, and of the four structures that remain."""
    experts = [E for E in (4, 8, 16, 32, 64, 128, 256, 512, 1024) if E >= k]
    sizes = [_map_and_structures(L, E, k) for E in experts]
    lines = {
        "dense map, int32: L*E*4": ([dense for dense, _ in sizes], VERMILLION, LINES[VERMILLION]),
        "the same as a bitmap: L*E/8": ([dense / 32 for dense, _ in sizes], VERMILLION, ":"),
        "the four structures": ([kept for _, kept in sizes], BLUE, "-"),
    }
    figure, axes = panels(8, 3.6)
    for label, (heights, color, style) in lines.items():
        axes.plot(experts, [height / MIB for height in heights], linestyle=style, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(experts, experts)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="E, experts", ylabel="MiB (2**20 bytes)")
    heading(axes, f"L = {L:,}, k = {k}")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _map_and_structures(L, E, k):
    """Bytes of the dense map, and of the four index structures together."""
    rows = account(MoEConfig(L, d=1, h=1, E=E, k=k), "moeblaze", "minimal").tensors
    sizes = {tensor.name: tensor.bytes for tensor in rows}
    structures = ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map")
    return sizes["dense_map"], sum(sizes[name] for name in structures)
