"""The expert stages' raw kernels: what they ask of memory, how they multiply, and pictures of both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.figure import Figure

from moeblaze_ref.backends.raw_cuda import expert_down, expert_up, gemm, tiles
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig, is_gated
from moeblaze_ref.core.drawing import board, cell, centered, heading, panels, squares
from moeblaze_ref.core.structures import Dispatch
from moeblaze_ref.course.notebook.dispatch import EXPERT_COLORS, PALE
from moeblaze_ref.memory.plots import BLUE, GREY, ORANGE
from moeblaze_ref.runtime import ceil_div, simt_executor
from moeblaze_ref.runtime.record import LaunchRecord, RecordingExecutor
from moeblaze_ref.runtime.simt.executor import LaunchReport, SimtExecutor, SimtModule
from moeblaze_ref.runtime.source import inlined

MMA_TILE = cast(tiles.MmaTile, tiles.DEFAULTS["3_mma"])

# Counts --------------------------------------------------------------------------------------------------------------


class EditedExecutor(SimtExecutor):
    """SIMT executor that changes the text of kernels and headers before it compiles them.

    ``edits`` says what stands in the text, and what takes its place everywhere; ``appended`` is added at the end,
    ``prepended`` at the beginning. ``module`` is what was loaded last.

    Raises
    ------
    ValueError
        From ``load``, if a file does not hold what an edit replaces.
    """

    module: SimtModule

    def __init__(self, edits: Mapping[str, str], appended: str = "", prepended: str = "", **options: Any):
        super().__init__(**options)
        self.edits, self.appended, self.prepended = edits, appended, prepended

    def load(self, file: str, text: str | None = None, **constants: Any) -> SimtModule:
        """Load a kernel file; see `SimtExecutor.load`."""
        text = edited(file, inlined(file) if text is None else text, self.edits)
        self.module = super().load(file, text=self.prepended + text + self.appended, **constants)
        return self.module


def edited(file: str, text: str, edits: Mapping[str, str]) -> str:
    """The text of a file with its edits; see `EditedExecutor`."""
    for right, other in edits.items():
        if right not in text:
            raise ValueError(f"{file} does not hold {right!r}")
        text = text.replace(right, other)
    return text


class EditedRecorder(EditedExecutor, RecordingExecutor):
    """Records what the threads of a changed kernel do; takes the options of both classes."""


def record_up(
    version: str,
    x: np.ndarray,
    w1: np.ndarray,
    w2: np.ndarray,
    dispatch: Dispatch,
    edits: Mapping[str, str] | None = None,
) -> LaunchRecord:
    """Record the accesses of the first block's first warp in ``expert_up.forward``, with edits to its text."""
    executor = EditedRecorder(edits or {}, block=0, warp=0)
    expert_up.forward(x, w1, w2, dispatch, "swiglu", executor=executor, version=version)
    return executor.launches[0]


def count_up(
    version: str,
    x: np.ndarray,
    w1: np.ndarray,
    w2: np.ndarray | None,
    dispatch: Dispatch,
    activation: str = "swiglu",
    executor: SimtExecutor | None = None,
) -> LaunchReport:
    """The launch of a version of ``expert_up.forward`` on the CPU, counted."""
    executor = executor or SimtExecutor()
    with executor.recording() as launches:
        expert_up.forward(x, w1, w2, dispatch, activation, executor=executor, version=version)
    return launches[0]


def count_one(version: str, x: np.ndarray, w: np.ndarray, dispatch: Dispatch) -> LaunchReport:
    """The launch of one projection by itself, in tiles as wide as each of two has in `count_up`."""
    with tiles.trying(replace(MMA_TILE, columns=MMA_TILE.columns // 2)):
        return count_up(version, x, w, None, dispatch, "silu")


def count_down(version: str, y_swi: np.ndarray, w3: np.ndarray, dispatch: Dispatch) -> LaunchReport:
    """The launch of a version of ``expert_down.forward`` on the CPU, counted."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        expert_down.forward(y_swi, w3, dispatch, executor=executor, version=version)
    return launches[0]


def by_version(launches: Mapping[str, LaunchReport], *versions: str) -> list[LaunchReport]:
    """Return the launches of some versions, each under its version in place of its kernel's name."""
    return [replace(launches[version], kernel=version) for version in versions]


def asked_for(launch: LaunchReport, *buffers: str) -> int:
    """Return the bytes that a launch reads and writes of some buffers; 0 for one that it does not have."""
    found = [launch.buffers[name] for name in buffers if name in launch.buffers]
    return sum(buffer.read_bytes + buffer.written_bytes for buffer in found)


def header_symbols(
    version: str, config: MoEConfig, lengths: Sequence[int], kernel: str = "expert_up"
) -> dict[str, int]:
    """Values of the symbols with which the headers of both stages state the bytes of their forward kernels.

    ``lengths`` are the rows of each expert; ``kernel`` is "expert_up" or "expert_down".
    """
    tile, projections = tiles.DEFAULTS.get(version), 1 + is_gated(config.activation)
    assert tile is None or isinstance(tile, tiles.MmaTile)  # of Hopper's versions are other stories
    rows, columns = (1, 1) if version == "1_naive" else gemm.extent(tile)
    width, results = (config.h, projections) if kernel == "expert_up" else (config.d, 1)
    sizes = {"L": config.L, "d": config.d, "h": config.h, "E": config.E, "R": config.R, "s": config.itemsize}
    # Of a dispatch the launch reads but L, R and E.
    launch = gemm.rows_launch(simt_executor(), version, config, width, tile, results)  # type: ignore[arg-type]
    return sizes | {
        "G": projections,
        "P": 1,  # STORE_PROJECTIONS and
        "Y": 1,  # STORE_Y_SWI: count_up stores everything
        "C": ceil_div(config.h, columns),
        "D": ceil_div(config.d, columns),
        "tiles": sum(ceil_div(length, rows) for length in lengths),
        "blocks": prod(launch["grid"]),
        "THREADS": gemm.THREADS,
        **(tile.symbols(config.itemsize, config.d, config.h, projections) if tile else {}),
    }


# The executor counts bytes and no arithmetic, so a counter is planted beside each product of expert_up.
PRODUCTS = {
    "1_naive": {
        "a_sum += x_p *": "++products, a_sum += x_p *",
        "b_sum += x_p *": "++products, b_sum += x_p *",
    },
    "2_tiled": {"corners.values[r][i][j] +=": "++products, corners.values[r][i][j] +="},
    # A warp's instruction is 16 * 8 * 16 products, and each of its 32 lanes comes by.
    "3_mma": {"multiply<Scalar>(results": "products += 16 * 8 * 16 / 32, multiply<Scalar>(results"},
}
VERSIONS = tuple(PRODUCTS)  # of the notebook; Hopper's is a story of its own
COUNTER = "__device__ unsigned long long products;\n"
TAKE = """
extern "C" __global__ void take_products(unsigned long long* found) {
    *found = products;
    products = 0;
}
"""


def count_products(version: str, x: np.ndarray, w1: np.ndarray, w2: np.ndarray, dispatch: Dispatch) -> int:
    """Products of elements that a version of ``expert_up.forward`` computes, those with padding zeros included."""
    executor = EditedExecutor(PRODUCTS[version], TAKE, COUNTER, workers=1)  # one, so that no count is lost
    expert_up.forward(x, w1, w2, dispatch, "swiglu", executor=executor, version=version)
    found = np.zeros(1, np.uint64)
    executor.module.launch("take_products", grid=1, block=1, found=found)
    return int(found[0])


# How rows find a tile ------------------------------------------------------------------------------------------------


def gather_picture(dispatch: Dispatch, expert: int) -> Figure:
    """Rows of x, the indices in expert order, and the tile that one expert's block reads through them.

    Beside them in outline the (R, d) buffer that a copy would be. The dispatch is a small one.
    """
    checks.check_int("expert", expert, at_least=0, at_most=dispatch.E - 1)
    figure, axes = board(10, 0.7 + 0.34 * dispatch.R, xlim=(-0.5, 19), ylim=(dispatch.R + 0.3, -1.4))
    begin, end = dispatch.expert_token_offsets[expert : expert + 2].tolist()
    tokens, color = np.asarray(dispatch.expert_token_indices).tolist(), EXPERT_COLORS[expert % len(EXPERT_COLORS)]
    owners = np.repeat(np.arange(dispatch.E), np.diff(dispatch.expert_token_offsets)).tolist()
    top = (dispatch.R - dispatch.L) / 2
    for token in range(dispatch.L):
        chosen = token in tokens[begin:end]
        _row(axes, 0, top + token, 4, color if chosen else PALE, f"x[{token}]")
    for position, (token, owner) in enumerate(zip(tokens, owners, strict=True)):
        _row(axes, 6.5, position, 1, EXPERT_COLORS[owner % len(EXPERT_COLORS)], str(token))
        _row(axes, 14.5, position, 4, "white", "", edgecolor=GREY, linestyle="--")
        if owner == expert:
            _row(axes, 9.5, position, 4, color, f"x[{token}]")
            line: dict[str, Any] = {"color": color, "linewidth": 1.5}
            axes.plot([4, 6.5], [top + token + 0.5, position + 0.5], **line)
            axes.plot([7.5, 9.5], [position + 0.5, position + 0.5], **line)
    for left, name in ((0, "x (L, d)"), (6.0, "indices (R,)"), (9.5, f"tile of expert {expert}")):
        axes.text(left, -0.5, name, weight="bold")
    axes.text(14.5, -0.5, "routed copy (R, d): not there", color=GREY)
    return figure


def _row(axes, left, top, width, color, text, **edge):
    cell(axes, (left, top + 0.06), (width, 0.88), {"facecolor": color} | edge, text, fontsize="small")


# Which lane holds what -----------------------------------------------------------------------------------------------

WARP = 32


class Fragment(NamedTuple):
    """The lane that holds each element of an mma.m16n8k16 operand, and the element's place there."""

    lane: np.ndarray  #: (rows, columns)
    element: np.ndarray  #: (rows, columns) 0..7 for A, 0..3 for B and D


def fragment(operand: str) -> Fragment:
    """The layout of A (16 x 16), B (16 x 8) or D (16 x 8), as `include/ptx.cuh` has it (PTX ISA, mma.m16n8k16).

    Raises
    ------
    ValueError
        If the operand is another.
    """
    checks.check_name("operand", operand, ("A", "B", "D"))
    shape, elements = ((16, 16), 8) if operand == "A" else ((16, 8), 4)
    held = Fragment(np.empty(shape, int), np.empty(shape, int))
    for lane in range(WARP):
        group, place = divmod(lane, 4)
        for i in range(elements):
            pair, half = divmod(i, 2)
            along = 2 * place + half
            where = {
                "A": (group + 8 * (pair % 2), along + 8 * (pair // 2)),
                "B": (along + 8 * pair, group),
                "D": (group + 8 * pair, along),
            }[operand]
            held.lane[where], held.element[where] = lane, i
    return held


def fragment_picture(lane: int) -> Figure:
    """D = A B of one mma.m16n8k16, laid out like the product.

    A number is a lane; the elements of one lane, 0..31, are filled.
    """
    checks.check_int("lane", lane, at_least=0, at_most=WARP - 1)
    figure, axes = board(9, 11.5, xlim=(-0.5, 26), ylim=(34.5, -1.5), aspect="equal")
    legend = f"Numbers are lanes. Filled: the elements of lane {lane}.\n"
    legend += "Neighbours, as a0 and a1, share a register of A or B."
    axes.text(0, 12, legend, linespacing=1.6)
    for operand, (left, top), name in (
        ("B", (17.5, 0), "B (16 x 8): from w1 or w2"),
        ("A", (0, 17.5), "A (16 x 16): rows of x"),
        ("D", (17.5, 17.5), "D (16 x 8): sums in float32"),
    ):
        axes.text(left, top - 0.4, name, weight="bold")
        held = fragment(operand)
        corners = [(left + column, top + row) for row, column in np.ndindex(held.lane.shape)]
        colors = [BLUE if owner == lane else (PALE if owner // 4 % 2 else "#DDEEF8") for owner in held.lane.flat]
        squares(axes, corners, colors, edgecolors="white")
        for (x, y), owner, element in zip(corners, held.lane.flat, held.element.flat, strict=True):
            mine = owner == lane
            text = f"{operand.lower()}{element}" if mine else str(owner)
            ink = {"color": "white", "weight": "bold"} if mine else {"color": "#666666"}
            centered(axes, x + 0.5, y + 0.5, text, fontsize="small", in_layout=False, **ink)
    return figure


# The roofline --------------------------------------------------------------------------------------------------------

# NVIDIA's own figures for the H200 (SXM), as its data sheet prints them: dense, at boost clock. Nothing here measured
# them.
HBM_BYTES_PER_SECOND = 4.8e12
PEAK_FLOPS = {"float32 units": 67e12, "bf16 tensor cores": 989e12}
UNIT_COLORS = {"float32 units": ORANGE, "bf16 tensor cores": BLUE}
LOWEST_TFLOPS = 1e-1  # of the picture
UNIT_OF_VERSION = {"1_naive": "float32 units", "2_tiled": "float32 units", "3_mma": "bf16 tensor cores"}


class Point(NamedTuple):
    """A kernel on the roofline."""

    name: str
    intensity: float  #: FLOPs for each byte
    unit: str  #: of ``PEAK_FLOPS``


def roofline(points: Sequence[Point]) -> Figure:
    """Draw the rooflines of an H200 from its data sheet, and the limit of each point if all its bytes came from HBM."""
    figure, axes = panels(9, 5)
    intensities = np.logspace(-1, 4, 200)
    for unit, peak in PEAK_FLOPS.items():
        roof = attainable(intensities, unit) / 1e12
        axes.loglog(intensities, roof, color=UNIT_COLORS[unit], label=f"{unit}, {peak / 1e12:.0f} TFLOP/s")
    for point in points:
        _mark(axes, point)
    axes.set(xlim=(intensities[0], intensities[-1]), xlabel="FLOPs for each byte that is asked of global memory")
    axes.set(ylim=(LOWEST_TFLOPS, 1e4), ylabel="TFLOP/s that the roof allows")
    title = f"H200, its vendor's figures: HBM {HBM_BYTES_PER_SECOND / 1e12:g} TB/s, dense peaks. Roofs, not timings."
    figure.legend(loc="outside lower center", ncols=2, frameon=False, title=title)
    return figure


def _mark(axes, point):
    """The point on its roof, its name above that of the tensor cores and below that of the other units."""
    height = attainable(point.intensity, point.unit) / 1e12
    axes.plot(point.intensity, height, "o", color=UNIT_COLORS[point.unit], markersize=8)
    axes.vlines(point.intensity, LOWEST_TFLOPS, height, color=GREY, linestyle=":", linewidth=0.8)
    number = f"{point.intensity:,.0f}" if point.intensity >= 100 else f"{point.intensity:.3g}"
    above = point.unit == "bf16 tensor cores"
    axes.annotate(
        f"{point.name}\n{number} FLOP/byte",
        (point.intensity, height),
        xytext=(-8, 8) if above else (8, -30),
        textcoords="offset points",
        ha="right" if above else "left",
        fontsize="small",
    )


def attainable(intensity, unit: str):
    """FLOP/s under the roof: bytes at the bandwidth of HBM, FLOPs at the unit's peak."""
    return np.minimum(intensity * HBM_BYTES_PER_SECOND, PEAK_FLOPS[unit])


def ridge(unit: str) -> float:
    """FLOPs for each byte from which on the unit, and not HBM, is the limit."""
    return PEAK_FLOPS[unit] / HBM_BYTES_PER_SECOND


def tile_intensity(rows: int, columns: int, results: int = 2, itemsize: int = 2) -> float:
    """FLOPs for each byte that a block loads: ``results`` tiles (rows, columns) from one operand of rows.

    For each step of the depth, 2 * rows * columns * results FLOPs and (rows + columns * results) elements.
    """
    return 2 * rows * columns * results / (itemsize * (rows + columns * results))


def tile_roofline(rows: int, columns: int) -> Figure:
    """`roofline` of version 3 with another tile, two results, in bf16; its title says what the tile takes."""
    tile = replace(MMA_TILE, rows=rows, columns=2 * columns)
    registers = 2 * rows * columns // MMA_TILE.threads
    figure = roofline([Point(f"tile {rows} x {columns}", tile_intensity(rows, columns), "bf16 tensor cores")])
    kib = tile.shared_bytes >> 10
    taken = f"sums: {registers} registers a thread (of 255), stages: {kib} KiB of shared memory (of 227)"
    heading(figure.axes[0], taken)
    return figure
