"""The Hopper kernel: its instructions at work on the CPU, pictures of them, and measurements of each idea."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
from IPython.display import Markdown
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.raw_cuda.tiles import FIXED, WarpgroupTile
from moeblaze_ref.bench import ladder, report, results
from moeblaze_ref.bench.document import change_of, change_text, signed, trials
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.drawing import cell, heading, panels
from moeblaze_ref.core.units import GB
from moeblaze_ref.course.notebook.dispatch import PALE
from moeblaze_ref.course.notebook.gemm import edited
from moeblaze_ref.course.notebook.markdown import bullets, table
from moeblaze_ref.memory.accounting import uniform_counts
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, behind, filled
from moeblaze_ref.runtime import ceil_div
from moeblaze_ref.runtime.simt.executor import KernelFault, SharedTraffic, SimtExecutor
from moeblaze_ref.runtime.source import kernel_text
from moeblaze_ref.runtime.tensor_map import TensorMap

# An H200's, by its maker's figures.
MULTIPROCESSORS = 132
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = gemm.ROWS_BOX[1], gemm.HOPPER_COLUMNS, gemm.ROWS_BOX[0]
ITEMSIZE = 2  # bytes of an element, in all that follows

# A box in shared memory -----------------------------------------------------------------------------------------------

CHUNKS = 8  # of 16 bytes, in a row of 128
CHUNK_COLORS = (BLUE, ORANGE, GREEN, YELLOW, SKY, VERMILLION, PURPLE, GREY)
LOAD = """// Runs on      sm_90a; SIMT executor.
#include "common.cuh"
#include "hopper/tma.cuh"

extern "C" __global__ void load(const __grid_constant__ TensorMap matrix, unsigned short* out, int bytes) {
    DYNAMIC_SHARED(unsigned char, memory);
    __shared__ Barrier arrived;
    unsigned char* const box = memory + (1024 - shared_address(memory) % 1024) % 1024;
    if (threadIdx.x == 0) {
        barrier_init(&arrived, 1);
        barrier_init_fence();
        barrier_arrive_expecting(&arrived, bytes);
        tma_load(box, &matrix, &arrived, 0, 0);
    }
    __syncthreads();
    barrier_wait(&arrived, 0);
    for (int i = threadIdx.x; i < bytes / 2; i += blockDim.x)
        out[i] = reinterpret_cast<const unsigned short*>(box)[i];
}
"""


@functools.cache
def box_in_shared_memory(rows: int) -> np.ndarray:
    """Return where TMA puts each 16 bytes of a box of ``rows`` rows of 128 bytes.

    Returns
    -------
    array (rows, 8)
        Line by line of shared memory, the number 8 * row + chunk of the 16 bytes that lie there, as the SIMT executor
        left them.
    """
    numbers = np.repeat(np.arange(rows * CHUNKS, dtype=np.float16), 8).reshape(rows, 64)  # eight elements a chunk
    executor = SimtExecutor()
    out = executor.empty((rows * 64,), "uint16")
    matrix, shared_bytes = TensorMap(numbers, (64, rows)), 1024 + numbers.nbytes
    executor.load("load.cu", text=LOAD).launch(
        "load", 1, 32, shared_bytes, matrix=matrix, out=out, bytes=numbers.nbytes
    )
    return out.view(np.float16).reshape(rows, CHUNKS, 8)[:, :, 0].astype(int)


def swizzle_picture(chunk: int, rows: int = 16) -> Figure:
    """A box of a matrix, and the same box in shared memory: one of its eight columns of 16 bytes in strong colours."""
    checks.check_int("chunk", chunk, at_least=0, at_most=CHUNKS - 1)
    figure, (matrix, shared) = panels(10, 1.4 + 0.3 * rows, 1, 2, framed=True)
    plain = np.arange(rows * CHUNKS).reshape(rows, CHUNKS)
    for axes, numbers, title in ((matrix, plain, "the box, as the matrix has it"),
                                 (shared, box_in_shared_memory(rows), "in shared memory, as TMA left it")):  # fmt: skip
        _draw_chunks(axes, numbers, chunk)
        heading(axes, title)
        axes.set_ylabel("row of 128 bytes")
    matrix.set_xlabel("16 bytes: eight elements along a row")
    matrix.set_xticks(np.arange(CHUNKS) + 0.5, range(CHUNKS))
    shared.set_xlabel("banks of shared memory, 4 bytes each")
    shared.set_xticks(np.arange(CHUNKS) + 0.5, [f"{4 * c}-{4 * c + 3}" for c in range(CHUNKS)])
    return figure


def _draw_chunks(axes, numbers, chosen):
    for (line, place), number in np.ndenumerate(numbers):
        row, chunk = divmod(int(number), CHUNKS)
        mine = chunk == chosen
        color = CHUNK_COLORS[row % CHUNKS] if mine else PALE
        look, ink = {"facecolor": color, "edgecolor": "white"}, "white" if color == BLUE else BLACK
        cell(axes, (place, line), (1, 1), look, f"row {row}" if mine else "", color=ink, fontsize=9)
    axes.set(xlim=(0, CHUNKS), ylim=(len(numbers), 0), yticks=np.arange(len(numbers)) + 0.5)
    axes.set_yticklabels(range(len(numbers)), fontsize=10)
    axes.tick_params(length=0)


READ = """// Runs on      sm_90a; SIMT executor.
#include "ptx.cuh"

extern "C" __global__ void read(unsigned* out, int chunk) {
    __shared__ Chunk lines[8 * 8];
    const int row = threadIdx.x;  // of eight
    reinterpret_cast<Chunk*>(out)[row] = lines[row * 8 + (SWIZZLED ? chunk ^ row : chunk)];
}
"""


def column_reads(chunk: int) -> dict[str, SharedTraffic]:
    """Shared-memory accesses to read eight rows of one column of 16 bytes, from plain and from swizzled lines."""
    found, executor = {}, SimtExecutor()
    for name, swizzled in (("plain lines", 0), ("swizzled", 1)):
        with executor.recording() as launches:
            out = executor.empty((8 * 4,), "uint32")
            executor.load("read.cu", text=READ, SWIZZLED=swizzled).launch("read", 1, 8, out=out, chunk=chunk)
        found[name] = launches[0].shared
    return found


# The ring of stages ---------------------------------------------------------------------------------------------------

RING = "expert_up/6_specialized.cu"
RING_STEPS = 8
EVENTS = ("loads", "multiplies", "releases")
FULL = "barrier_wait(&shared.full[state.stage], state.parity);"
EMPTY = "barrier_wait(&shared.empty[state.stage], state.parity ^ 1);"
RELEASE = "if (step > 0 && lane_id() == 0) barrier_arrive(read);"
# Added to the kernel, in the lines that are there: one thread of each role writes its events into a log. The last stage
# is not given back.
LOGGED = {
    "int d, int h, int E) {": "int d, int h, int E, int* log) { auto note = [&](int event, int step) { "
    "const int line = atomicAdd(log, 1); log[1 + 2 * line] = event; log[2 + 2 * line] = step; };",
    EMPTY: f"{EMPTY} if (threadIdx.x == WARPGROUP) note(0, step);",
    FULL: f"{FULL} if (threadIdx.x == 0) note(1, step);",
    RELEASE: f"if (step > 0 && threadIdx.x == 0) note(2, step - 1); {RELEASE}",
}


class RingFault(NamedTuple):
    """A mistake in the ring."""

    right: str  #: what stands there
    wrong: str  #: what stands in its place
    why: str  #: it ends as it does


RING_FAULTS = {
    "multiplies before the data are there": RingFault(
        FULL,
        ";",
        "the consumer's fence comes before a producer's copy, so nothing orders the copy before the product",
    ),
    "loads into a stage that is being read": RingFault(
        EMPTY,
        ";",
        "the same from the other side: the producers write before the consumer has read",
    ),
    "forgets that rounds alternate": RingFault(
        "state.parity",
        "0",
        "the same once more: with parity 0 a wait is over at once in every second round, so no thread waits there",
    ),
    "arrives before its copies have landed": RingFault(
        "cp_async_arrive(full);",
        "barrier_arrive(full);",
        "a thread continues while `cp.async` copies: `cp_async_arrive` lets the copies arrive by themselves",
    ),
    "takes the sums before the product is done": RingFault(
        "    wgmma_wait<0>();\n",
        "",
        "barriers guard shared memory; the sums are in registers, which only this wait guards",
    ),
    "brings the same part of x for every step": RingFault(
        "step * TILE_DEPTH, d);",
        "0, d);",
        "barriers count arrivals and bytes, not which bytes: this mistake only the result shows",
    ),
    "never gives a stage back": RingFault(
        RELEASE, ";", "the producers wait for a phase of `empty` without one arrival; a GPU would hang without a word"
    ),
    "only one warp gives the stage back": RingFault(
        RELEASE,
        RELEASE.replace("lane_id() == 0", "threadIdx.x == 0"),
        "a phase ends when as many have arrived as the barrier was made for: a warp that is forgotten counts",
    ),
    "expects too few bytes": RingFault(
        "barrier_arrive_expecting(full, B_BYTES);",
        "barrier_arrive_expecting(full, B_BYTES - 16);",
        "more bytes arrive than were announced: what is missing falls below zero, and a phase ends at zero alone",
    ),
    "counts one stage more than there are": RingFault(
        "PipelineState<STAGES> state;",
        "PipelineState<STAGES + 1> state;",
        "what lies behind the last barrier is no barrier, though it is shared memory all the same",
    ),
}


class RingRun(NamedTuple):
    """Result and events of one launch of the ring."""

    log: list[tuple[str, int]]  #: (event, step), in the order in which they happened
    c: np.ndarray  #: (L, 2 * 64) bfloat16: x w1 beside x w2
    expected: np.ndarray  #: (L, 2 * 64) float64


def run_ring(stages: int, steps: int = RING_STEPS, fault: RingFault | None = None, seed: int = 0) -> RingRun:
    """Launch version 6 of ``expert_up`` on the SIMT executor, for one tile; the seed is that of the threads' order.

    The ring has ``stages``, and the depth has ``steps`` of 64.

    Raises
    ------
    KernelFault
        If the kernel does what a GPU would not survive.
    """
    checks.check_int("stages", stages, at_least=2, at_most=5)
    L, h, d, tile = 120, 64, 64 * steps, replace(cast(WarpgroupTile, FIXED["6_specialized"]), stages=stages)
    rng, executor = np.random.default_rng(0), SimtExecutor(seed=seed)
    x, w1, w2 = (rng.standard_normal(size).astype("bfloat16") for size in ((L, d), (1, d, h), (1, d, h)))
    dispatch = build_by_sort(np.zeros((L, 1), np.int32), 1)
    a, b, y_swi = (executor.empty((L, h), "bfloat16") for _ in range(3))
    log = np.zeros(1 + 2 * len(EVENTS) * steps, np.int32)
    text = edited(RING, kernel_text(RING), {fault.right: fault.wrong} if fault else {})
    executor.load(RING, text=_logged(text), **gemm.constants("bfloat16", "swiglu", tile)).launch(
        "expert_up",
        **gemm.rows_launch(executor, "6_specialized", dispatch, h, tile, results=2),
        x=x,
        w1=executor.tensor_map(w1, gemm.WEIGHTS_BOX),
        w2=executor.tensor_map(w2, gemm.WEIGHTS_BOX),
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        a=a,
        b=b,
        y_swi=y_swi,
        d=d,
        h=h,
        log=log,
    )
    events = [(EVENTS[event], int(step)) for event, step in log[1 : 1 + 2 * log[0]].reshape(-1, 2)]
    right = x.astype(float) @ np.concatenate([w1[0], w2[0]], axis=1).astype(float)
    return RingRun(events, np.concatenate([a, b], axis=1), right)


def _logged(text: str) -> str:
    """The kernel with its log; where a mistake has replaced a line, nothing is logged."""
    return edited(RING, text, {right: other for right, other in LOGGED.items() if right in text})


def ring_error(run: RingRun) -> float:
    """The relative error of a run's result, of which 2^-9 is the rounding to bfloat16."""
    return float(np.linalg.norm(run.c.astype(float) - run.expected) / np.linalg.norm(run.expected))


def ring_picture(stages: int) -> Figure:
    """Draw the events of one run of the ring from left to right, a line for each stage.

    The order is one that the kernel's own waits allow, the latest for every copy; it says nothing of time.
    """
    log = run_ring(stages).log
    at = {event: number for number, event in enumerate(log)}
    figure, axes = panels(10, 1.6 + 0.5 * stages)
    for step in range(RING_STEPS):
        begin, multiplied, end = (at.get((event, step), len(log)) for event in EVENTS)
        for left, right, color in ((begin, multiplied, SKY), (multiplied, end, ORANGE)):
            place, size = (left, step % stages - 0.4), (right - left, 0.8)
            cell(axes, place, size, filled(color), f"{step}", fontsize=10, bbox=behind(color))
    axes.set(xlim=(0, len(log)), ylim=(stages - 0.4, -0.6), xlabel="events, in the order in which they happened")
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    marks = [Patch(label="being filled, or full", **filled(SKY)), Patch(label="being multiplied", **filled(ORANGE))]
    title = "a number is the step; a gap is free"
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, title=title)
    return figure


def most_ahead(log: Sequence[tuple[str, int]]) -> int:
    """The most steps that were asked for and not yet given back at one time."""
    changes = {"loads": 1, "multiplies": 0, "releases": -1}
    return int(np.cumsum([changes[event] for event, _ in log]).max())


def ring_fault(name: str, stages: int = 3) -> str:
    """Run the ring with one of ``RING_FAULTS``; return the executor's message, or the result's error."""
    fault = RING_FAULTS[checks.check_name("fault", name, RING_FAULTS)]
    try:
        run = run_ring(stages, fault=fault)
    except KernelFault as raised:
        return str(raised).partition("): ")[2]
    error = ring_error(run)
    if np.isnan(error):
        return "a wrong result, which holds NaN: shared memory begins as poison"
    return "nothing is said" if error < 0.01 else f"a wrong result, relative error {error:.2g}"


# Who holds what of a product ------------------------------------------------------------------------------------------


def holders() -> np.ndarray:
    """(64, 256): the thread of a warpgroup that holds each element of wgmma.m64n256k16's result.

    PTX ISA, "Register Fragments and Shared Memory Matrix Layouts", D of wgmma.
    """
    row, column = np.indices((64, 256))
    return row // 16 * 32 + row % 8 * 4 + column % 8 // 2


def holders_picture(thread: int) -> Figure:
    """The result of one wgmma: the bands of the four warps, and the elements of one thread, 0..127."""
    checks.check_int("thread", thread, at_least=0, at_most=127)
    figure, axes = panels(10, 3.2, framed=True)
    held = holders()
    for warp, color in enumerate((SKY, YELLOW, GREEN, ORANGE)):
        cell(axes, (0, 16 * warp), (256, 16), {"facecolor": color, "alpha": 0.45})
        axes.text(258, 16 * warp + 8, f"warp {warp}", va="center", fontsize=10)
    for row, column in np.argwhere(held == thread):
        cell(axes, (column, row), (1, 1), {"facecolor": BLACK})
    axes.set(xlim=(0, 256), ylim=(64, 0), xticks=range(0, 257, 32), yticks=range(0, 65, 16))
    axes.set(xlabel="column of the result", ylabel="row of the result")
    heading(axes, f"thread {thread}: {(held == thread).sum()} sums, one register each")
    return figure


# Which tile when ------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A tile of a result: its expert, its row of tiles within it, and its column of tiles."""

    expert: int
    row: int
    column: int


def tiles(lengths: Sequence[int], columns: int, band: int) -> Iterator[Tile]:
    """The tiles of all experts in the order of `RowTiles` in include/hopper/scheduler.cuh: down each column of a band.

    ``lengths`` are the rows of each expert, ``columns`` those of tiles, and a band has ``band`` rows of tiles.
    """
    for expert, length in enumerate(lengths):
        rows = ceil_div(length, TILE_ROWS)
        for first in range(0, rows, band):
            for column in range(columns):
                for row in range(first, min(first + band, rows)):
                    yield Tile(expert, row, column)


def waves(order: Sequence[Tile], blocks: int) -> list[list[Tile]]:
    """The tiles that are worked on side by side: each persistent block's first one, each one's second, ..."""
    rest = iter(order)
    return list(iter(lambda: list(islice(rest, blocks)), []))


def wave_bytes(wave: Sequence[Tile], depth: int) -> int:
    """Bytes of the operands of a wave, each row and each column of tiles once, as if the L2 cache lost nothing."""
    rows, columns = {tile[:2] for tile in wave}, {(tile.expert, tile.column) for tile in wave}
    return (len(rows) * TILE_ROWS + len(columns) * TILE_COLUMNS) * depth * ITEMSIZE


WAVE_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
PICTURED: dict[str, Any] = {"lengths": (16 * TILE_ROWS,), "columns": 32, "depth": 1024}  # conf3's, fewer rows


def schedule_picture(band: int) -> Figure:
    """One expert's tiles by the wave in which an H200's blocks take them, and what each wave reads."""
    checks.check_int("band", band, at_least=1)
    order = list(tiles(PICTURED["lengths"], PICTURED["columns"], band))
    figure, (axes, reads) = panels(9, 4.6, 1, 2, width_ratios=(2, 1))
    axes.spines[:].set_visible(True)
    found = waves(order, MULTIPROCESSORS)
    for wave, color in zip(found, WAVE_COLORS, strict=False):
        for tile in wave:
            cell(axes, (tile.column, tile.row), (1, 1), {"facecolor": color, "edgecolor": "white"})
    rows = ceil_div(PICTURED["lengths"][0], TILE_ROWS)
    axes.set(xlim=(0, PICTURED["columns"]), ylim=(rows, 0), xlabel="column of tiles", ylabel="row of tiles")
    heading(axes, f"{len(order)} tiles, bands of {band}")
    numbers = [wave_bytes(wave, PICTURED["depth"]) / 1e6 for wave in found]
    bars = reads.bar(range(len(found)), numbers, color=WAVE_COLORS[: len(found)])
    reads.bar_label(bars, [f"{number:.1f}" for number in numbers], padding=2)
    reads.set(xticks=range(len(found)), xlabel=f"wave of {MULTIPROCESSORS} tiles", ylim=(0, 24))
    reads.set_ylabel("operands of a wave, MB (1e6 bytes)")
    return figure


def wave_table(configs: Mapping[str, MoEConfig], bands: Sequence[int]) -> list[dict[str, Any]]:
    """Rows for `table`: of expert_up's forward, even routing, tiles and waves, and what a wave reads by the band."""
    rows = []
    for name, config in configs.items():
        columns = ceil_div(config.h, TILE_COLUMNS // (1 + config.gated))
        orders = {band: list(tiles(uniform_counts(config), columns, band)) for band in bands}
        count = len(orders[bands[0]])
        row = {"layer": name, "tiles": count, "tiles a block": count / MULTIPROCESSORS}
        for band, order in orders.items():
            sizes = [wave_bytes(wave, config.d) for wave in waves(order, MULTIPROCESSORS)]
            row[f"MB a wave, band {band}"] = np.mean(sizes) / 1e6  # bytes
        rows.append(row)
    return rows


# Measured -------------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The series' times and its counters, as they are committed."""

    ladder: results.Result
    counters: results.Result


def read_measured() -> Measured:
    """Both files of results.

    Raises
    ------
    FileNotFoundError, ValueError
        As `bench.results.load`.
    """
    return Measured(results.load(results.LADDER), results.load(results.COUNTERS))


def first_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a preset's first run."""
    first: dict[str, int] = {}
    for row in rows:
        first.setdefault(row["preset"], row["run"])
    return [row for row in rows if row["run"] == first[row["preset"]]]


def step_table(measured: Measured, *ideas: str) -> Markdown:
    """Steps of the series by their ideas: time and rate of all that they launch, and counters of the product's kernel.

    Raises
    ------
    ValueError
        If an idea is none of the series'.
    """
    for idea in ideas:
        checks.check_name("idea", idea, [step.idea for step in ladder.LADDER])
    counted = {(row["preset"], row["idea"]): row for row in first_of(measured.counters["rows"])}
    timed = {(row["preset"], row["idea"]): row for row in first_of(measured.ladder["rows"]) if row["idea"] in ideas}
    return table([_step_row(timed[step], counted[step]) for step in timed if step in counted])


COMPARED = {
    ladder.ABOVE: "times as fast as the step before",
    ladder.BELOW: "times as fast as the version below",
    ladder.WHOLE: "times as fast as the whole",
}


def _step_row(row, counters):
    ratios = {COMPARED[against]: round(ratio, 2) for against, ratio in row["ratio_to"].items()}
    return {
        "preset": row["preset"],
        "step": row["idea"],
        "ms": row["step_ms"],
        "ms, product alone": counters["duration_ms"],
        "TFLOP/s": row["tflops"],
        **ratios,
        "tensor pipe busy, %": round(counters["tensor_pct"]),
        "SM clock, GHz": counters["sm_clock_ghz"],
        "issue slots used, %": round(counters["issue_pct"]),
        "DRAM read, GB": counters["dram_read_bytes"] / GB,
        "DRAM written, GB": counters["dram_written_bytes"] / GB,
        "L2 busy, %": round(counters["l2_pct"]),
        "L2 hits, %": round(counters["l2_hit_pct"]),
        "warps wait for": report.waits(counters),
    }


def from_step_to_step(measured: Measured, before: str, after: str) -> Markdown:
    """Compare the memory counters and the product's time of two steps of the series."""
    counted = {(row["preset"], row["idea"]): row for row in first_of(measured.counters["rows"])}
    presets = [preset for preset, idea in counted if idea == before and (preset, after) in counted]
    return bullets([_change_of_counters(name, counted[name, before], counted[name, after]) for name in presets])


def _change_of_counters(preset, before, after):
    keys = ("dram_read_bytes", "dram_written_bytes", "duration_ms")
    read, wrote, took = (signed(100 * (after[key] / before[key] - 1)) for key in keys)
    return (
        f"{preset}: bytes read from DRAM {read}, written {wrote}; L2 cache busy {before['l2_pct']:.0f}% before and "
        f"{after['l2_pct']:.0f}% after; time of the product alone {took}."
    )


VERSION_COLORS = {
    "1_naive": GREY,
    "2_tiled": PURPLE,
    "3_mma": ORANGE,
    "4_wgmma": YELLOW,
    "5_tma": GREEN,
    "6_specialized": SKY,
    gemm.HOPPER: BLUE,
}


def series_picture(measured: Measured) -> Figure:
    """Every step's rate, a panel for each preset, beside that of cuBLAS in the same run."""
    rows = [row for row in first_of(measured.ladder["rows"]) if ladder.WHOLE not in row["ratio_to"]]
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    most = max(sum(row["preset"] == name for row in rows) for name in presets)
    figure, found = panels(11, 1.4 + 0.42 * most, 1, len(presets), sharey=True, squeeze=False)
    for axes, name in zip(found[0], presets, strict=True):
        mine = [row for row in rows if row["preset"] == name]
        bars = axes.barh([row["idea"] for row in mine], [row["tflops"] for row in mine])
        for bar, row in zip(bars, mine, strict=True):
            bar.set(**filled(VERSION_COLORS[row["version"]]))
        axes.bar_label(bars, [f"{row['tflops']:.3g}" for row in mine], padding=2, fontsize=9)
        cublas = mine[0]["cublas_tflops"]
        axes.axvline(cublas, color=BLACK, linestyle="--", linewidth=1)
        axes.text(cublas, -0.75, "cuBLAS ", ha="right", va="center", fontsize=9)
        axes.set(xlim=(0, 1.12 * cublas), ylim=(len(mine) - 0.4, -1.1), xlabel="TFLOP/s (1e12 FLOPs a second)")
        heading(axes, name)
    shown = {row["version"] for row in rows}
    marks = [Patch(label=version, **filled(color)) for version, color in VERSION_COLORS.items() if version in shown]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    return figure


BUSY = {"tensor_pct": ("tensor pipe", BLUE), "l2_pct": ("L2 cache", ORANGE), "dram_pct": ("DRAM", GREEN)}


def busy_picture(measured: Measured) -> Figure:
    """Draw how busy three units are in each product of a step, ours and cuBLAS's, in percent of their peaks."""
    rows = products(measured)
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    lines = ceil_div(len(presets), 2)
    figure, found = panels(10, 0.8 + 4 * lines, lines, min(2, len(presets)), squeeze=False)
    for axes, name in zip(found.flat, presets, strict=False):
        _draw_busy(axes, [row for row in rows if row["preset"] == name])
        heading(axes, name)
    for axes in found.flat[len(presets) :]:
        axes.remove()
    figure.legend(*found[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_busy(axes, rows):
    for number, (column, (unit, color)) in enumerate(BUSY.items()):
        places = np.arange(len(rows)) + 0.29 * (number - 1)
        bars = axes.barh(places, [row[column] for row in rows], height=0.27, label=unit, **filled(color))
        axes.bar_label(bars, [f"{row[column]:.0f}" for row in rows], padding=2, fontsize=9)
    axes.set_yticks(range(len(rows)), [row["kernel"] if row["version"] else "cuBLAS, dense" for row in rows])
    axes.set(xlim=(0, 105), ylim=(len(rows) - 0.5, -0.5), xlabel="busy, percent of the unit's peak")


def product_table(measured: Measured) -> Markdown:
    """Counters of each product of a step on the last version, and of cuBLAS's dense one."""
    return table([_product_row(row) for row in products(measured)])


def products(measured: Measured) -> list[dict]:
    """Rows of the counters: each product of a step on the last version, and cuBLAS's; of one in halves, the first."""
    rows = first_of(measured.counters["rows"])
    found = [row for row in rows if row["idea"] == ladder.TOP.idea or row["kernel"] != "expert_up"]
    return list({(row["preset"], row["kernel"], row["idea"]): row for row in reversed(found)}.values())[::-1]


def _product_row(row):
    return {
        "preset": row["preset"],
        "kernel": f"`{row['kernel'].split('_sm90')[0]}`",
        "tensor pipe busy, %": round(row["tensor_pct"]),
        "SM clock, GHz": row["sm_clock_ghz"],
        "busy x clock, GHz": report.busy_ghz(row),
        "issue slots used, %": round(row["issue_pct"]),
        "registers": row["registers"],
        "shared, KiB": row["shared_bytes"] / 1024,
        "warps wait for": report.waits(row),
    }


# What `trials_picture` can show: which verdicts, and how many percent a change is at least and at most.
TRIALS = {
    "adopted": (("adopted", "replaced"), (-math.inf, math.inf)),
    "rejected, near nothing": (("rejected",), (-math.inf, 6)),
    "rejected, clearly slower": (("rejected",), (6, math.inf)),
    "measured": (("measured",), (-math.inf, math.inf)),
}
CHANGE_COLORS = {True: BLUE, False: VERMILLION}  # by whether it was faster


def trials_of(which: str) -> list[list[dict[str, Any]]]:
    """The trials of one of ``TRIALS``, those of one idea together: the best ideas first, and of each the best rows."""
    verdicts, (least, most) = TRIALS[checks.check_name("kind of trials", which, TRIALS)]
    ideas: dict[str, list[dict[str, Any]]] = {}
    for trial in sorted(trials(), key=change_of):
        if trial["verdict"] in verdicts and least <= change_of(trial) < most:
            ideas.setdefault(trial["trial"], []).append(trial)
    return list(ideas.values())


def trials_picture(which: str) -> Figure:
    """Draw the change of time of each trial of one of ``TRIALS`` in percent: left of zero is faster."""
    ideas = trials_of(which)
    lines = sum(len(idea) + 1 for idea in ideas)
    figure, axes = panels(10, 0.9 + 0.27 * lines)
    line, labels = 0, {}
    for idea in ideas:
        _name_idea(axes, line, idea[0])
        for place, trial in enumerate(idea, line + 1):
            labels[place] = f"{trial['kernel']}, {trial['preset']}"
            bar = axes.barh(place, change_of(trial), height=0.75, color=CHANGE_COLORS[change_of(trial) < 0])
            axes.bar_label(bar, [change_text(trial)], padding=3, fontsize=10)
        line += len(idea) + 1
    axes.axvline(0, color=BLACK, linewidth=1)
    axes.set_yticks(list(labels), list(labels.values()), fontsize=10)
    axes.set(ylim=(line - 0.4, -0.6), xlabel="change of the time, percent; left of zero is faster")
    axes.margins(x=0.2)
    axes.spines["left"].set_visible(False)
    return figure


def _name_idea(axes, line, trial):
    """Write an idea's name from the picture's left edge on, above its bars."""
    said = trial["trial"] + (" (since replaced)" if trial["verdict"] == "replaced" else "")
    place = blended_transform_factory(axes.figure.transFigure, axes.transData)
    style = {"va": "center", "fontsize": 10, "backgroundcolor": "white", "in_layout": False}
    axes.text(0.01, line, said, transform=place, **style)
