"""Helpers for the launches of the expert stages: C types, constants, and arguments that may be absent."""

import functools
import math
from math import gcd
from typing import Any

import ml_dtypes  # registers bfloat16 with numpy

from moeblaze_ref.backends.raw_cuda import tiles
from moeblaze_ref.backends.raw_cuda.tiles import Tile
from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import dtype_of, pitch_of, strides_of, whole_rows, with_gaps
from moeblaze_ref.core.contract import Arrays
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, KernelArguments, ceil_div, executor_for, widest_pack

THREADS = 256
WARP = 32
TILE = 64  # rows and columns of a block's result in tiled_matmul.cuh
TF32 = "3_mma_tf32"  # 3_mma on floats, rounded to 10 bits of mantissa before they are multiplied: by name alone
ALIGNMENT = 16  # bytes: their kernels move as many at a time
HOPPER = "7_persistent"  # the sizes below are those of hopper/grouped_matmul.cuh
HOPPER_THREADS = {False: 384, True: 512}  # of a block whose consumers are crowded or not
HOPPER_COLUMNS = 256
# Boundary, stages, finished part of a tile, barriers.
HOPPER_SHARED_BYTES = 1024 + 4 * (128 + 256) * 64 * 2 + 128 * 128 * 2 + (4 + 8) * 2 * 8
TILE_LIST_BYTES = (1 + 400) * 4  # of tile_lists.cuh: a block's tiles of a weight gradient
SECTOR = 32  # bytes that the L2 cache moves at a time: where rows begin between two sectors, copies take twice as many
COPIED_FOR = 4  # hidden rows for each row of weights: with so many, a copy of the weights costs little time and memory
MAX_WIDTH = 2**30  # of rows: kernels count the columns of two matrices in 32 bits
MAX_TILES = 2**30  # of a launch: kernels number them in 32 bits, and blocks that stay look one turn ahead
MAX_GATHERED = 2**35  # elements that versions of BY_TMA gather from: they count them by 8 in 32 bits
MANY_ELEMENTS = 2**26  # of all rows: with fewer, a second launch costs more than the memory is worth
# Boxes of tensor maps, innermost first: 64 elements of a row, and how many rows.
ROWS_BOX = (64, 128)  # rows of a tile, the depth along them
DEPTH_BOX = (64, 64)  # rows that are the depth
WEIGHTS_BOX = (64, 64, 1)  # of one expert's matrix, rows that are the depth
WEIGHTS_TRANSPOSED_BOX = (64, 256, 1)  # the depth along them
C_TYPE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
WIDE = tuple(C_TYPE)  # dtypes of the versions without tensor cores
ARRAYS = Arrays("array", WIDE, routing="float32")
NARROW = ("float16", "bfloat16")  # of tensor cores
TEACHING = ("4_wgmma", "5_tma", "6_specialized")  # between 3_mma and Hopper's: of expert_up's forward alone
TENSOR_CORES = ("3_mma", TF32, *TEACHING, HOPPER)
BY_TMA = ("5_tma", "6_specialized", HOPPER)  # weights come by TMA, gathered rows by `GatheredRows` of hopper/ring.cuh
BFLOAT16 = ml_dtypes.bfloat16
VERSIONS = {
    "1_naive": WIDE,
    "2_tiled": WIDE,
    "3_mma": NARROW,
    TF32: ("float32",),
    HOPPER: NARROW,
}  # of both projections


@functools.cache
def file_of(stage: str, version: str) -> str:
    """The kernel file of a version."""
    return f"{stage}/{'3_mma' if version == TF32 else version}.cu"


@functools.cache
def constants(dtype: str, activation: str | None = None, tile: Tile | None = None) -> dict[str, Any]:
    """Preprocessor constants of a kernel file for this dtype, activation and tile."""
    chosen = {"Scalar": C_TYPE[dtype], "THREADS": THREADS}
    if activation is not None:
        chosen |= {"ACTIVATION": activation}
    return chosen if tile is None else chosen | tile.constants(2 if dtype in NARROW else 4)


def sum_rows(
    executor: Executor,
    rows: Array,
    row_of_slot: Array,
    k: int,
    out: Array,
    gates: Array | None = None,
    first: int = 0,
):
    """Each token's sum of its k ``rows`` (R, width), times its gates if there are any, see gather_sum.cuh.

    It fills as many columns of ``out`` (L, d), from ``first`` on; the others stay as they are.
    """
    file, kernel, operands = "expert_up/sum_rows.cu", "sum_rows", {"rows": rows, "d_x": out}
    if gates is not None:
        file, kernel, operands = "combine/2_vector.cu", "combine", {"y": rows, "gates": gates, "out": out}
    launch_row_sums(executor, file, kernel, rows, out, first, **operands, token_index_map=row_of_slot, k=k)


def launch_row_sums(
    executor: Executor, file: str, kernel: str, rows: Array, out: Array, first: int, /, **operands: Any
) -> None:
    """Launch a kernel of which each warp sums a token's ``rows`` (R, width), as `sum_rows` describes."""
    (L, pitch), width = out.shape, rows.shape[1]
    if L * width == 0:
        return
    pack = widest_pack(rows, gcd(first, width, pitch))
    module = executor.load(file, **constants(dtype_of(rows)), PACK=pack)
    module.launch(kernel, **per_element(WARP * L), **operands, L=L, d=width, pitch=pitch, first=first)


def parts_of_rows(version: str, R: int, d: int, h: int, more: int = 0) -> list[tuple[int, int]]:
    """Which columns of the rows (R, d) that sum to d_x exist at one time: the first, and how many.

    All of them; but two parts, one after the other, where the rows are wider than the hidden tensors that live beside
    them and are many: whole, they would be the largest buffer of a step, and cost it its peak. 7_persistent
    alone takes a part of a weight: its tensor maps do. ``more`` says how many parts more to cut them into.
    """
    if version != HOPPER or R * d < MANY_ELEMENTS:
        return [(0, d)]
    parts = (2 if d > h else 1) + more
    width = HOPPER_COLUMNS * ceil_div(d, parts * HOPPER_COLUMNS)  # whole tiles
    return [(first, min(width, d - first)) for first in range(0, d, width)]


def parts_of_y(version: str, R: int, d: int, h: int) -> list[tuple[int, int]]:
    """`parts_of_rows` of y: two parts more make room for a copy of w3, if its own rows do not begin with a sector."""
    return parts_of_rows(version, R, d, h, more=2 if d * 2 % SECTOR else 0)


def row_pitch(version: str, width: int) -> int:
    """Elements from one hidden row of this width to the next: in 7_persistent each begins with a sector."""
    in_sector = SECTOR // 2  # elements of tensor cores
    return -(-width // in_sector) * in_sector if version == HOPPER else width


def empty_rows(executor: Executor, version: str, shape: tuple[int, ...], dtype: str) -> Array:
    """A new array of rows, `row_pitch` elements from one to the next."""
    return _with_pitch(executor, shape, row_pitch(version, shape[-1]), dtype)


def _with_pitch(executor: Executor, shape: tuple[int, ...], pitch: int, dtype: str) -> Array:
    """A new array, so many elements from one row to the next."""
    *others, width = shape
    whole = executor.empty((*others, pitch), dtype)
    return whole if pitch == width else with_gaps(whole, width)


def copies_tokens(version: str, L: int, d: int, R: int, E: int) -> bool:
    """Return True if tokens (L, d) whose rows begin inside a sector are copied: 7_persistent, with long groups."""
    return version == HOPPER and R >= tiles.LONG_GROUP * E and L * row_pitch(version, d) <= MAX_GATHERED


def copies_weights(version: str, R: int, lines: int) -> bool:
    """The same of weights with so many lines in all: copied if 7_persistent has far more hidden rows than lines."""
    return version == HOPPER and R >= COPIED_FOR * lines


def tokens_in_sectors(executor: Executor, version: str, tokens: Array, dispatch: Dispatch) -> Array:
    """Tokens (L, d) whose rows begin with a sector: a copy, if `copies_tokens`."""
    L, d = tokens.shape
    copies = copies_tokens(version, L, d, dispatch.R, dispatch.E)
    return _in_sectors(executor, tokens) if copies else tokens


def weights_in_sectors(executor: Executor, version: str, weights: Array, dispatch: Dispatch) -> Array:
    """Weights of all experts whose rows begin with a sector: a copy, if `copies_weights`."""
    if not copies_weights(version, dispatch.R, math.prod(weights.shape[:-1])):
        return weights
    return _in_sectors(executor, weights)


def _in_sectors(executor: Executor, array: Array) -> Array:
    """The array, or a copy of it whose rows begin with a sector."""
    if strides_of(array)[-2] % SECTOR == 0:
        return array
    copy = empty_rows(executor, HOPPER, tuple(array.shape), dtype_of(array))
    executor.assign(copy, array)
    return copy


def like(executor: Executor, rows: Array) -> Array:
    """A new matrix of the shape, dtype and pitch of these rows."""
    return _with_pitch(executor, tuple(rows.shape), pitch_of(rows), dtype_of(rows))


def hidden_rows(executor: Executor, version: str, rows: Array, beside: Array | None = None) -> Array:
    """Hidden rows as a version takes them, copied if they lie otherwise, as what a hook of autograd's has saved may.

    Those before 7_persistent take rows without gaps. It takes any, but all of one launch with the gaps of those
    ``beside`` them.
    """
    if version == HOPPER and beside is None:
        return rows
    width = rows.shape[1]
    pitch = width if version != HOPPER or beside is None else pitch_of(beside)
    if pitch_of(rows) == pitch:
        return rows
    copy = _with_pitch(executor, tuple(rows.shape), pitch, dtype_of(rows))
    executor.assign(copy, rows)
    return copy


def gathered_rows(version: str, tokens: Array) -> Array:
    """Tokens as a version takes them: those before 7_persistent know of no gaps, and refuse rows that have them."""
    return whole_rows(tokens) if version == HOPPER else tokens


def pitches(version: str, gathered: Array, hidden: int) -> dict[str, int]:
    """Arguments of 7_persistent: from one row to the next of what is gathered, and of hidden rows."""
    return {"d_pitch": pitch_of(gathered), "h_pitch": hidden} if version == HOPPER else {}


def or_nothing(executor: Executor, array: Array | None, first: Array) -> Array:
    """The array, or an empty one where an ungated activation has none: a pointer that no kernel follows."""
    return executor.empty((0,), dtype_of(first)) if array is None else array


def rows_or_nothing(executor: Executor, rows: Array | None, first: Array) -> Array:
    """`or_nothing` of rows, with the gaps between them."""
    return or_nothing(executor, rows, first) if rows is None else whole_rows(rows)


def operand(executor: Executor, version: str, array: Array, box: tuple[int, ...]) -> Any:
    """An operand as the version's kernel takes it: where it begins, or a tensor map of boxes."""
    return executor.tensor_map(array, box) if version in BY_TMA else array


def second_operand(executor: Executor, version: str, array: Array | None, first: Array, box: tuple[int, ...]):
    """The same of d_b or w2, which ungated activations do not have: then something that no kernel reads."""
    if version in BY_TMA:
        return executor.tensor_map(first if array is None else array, box)
    return or_nothing(executor, array, first)


@functools.cache
def portable_version(dtype: str, d: int, h: int) -> str:
    """The fastest version that runs on every GPU and computes in this dtype at these widths; never ``TF32``."""
    return "2_tiled" if dtype not in NARROW or d % 8 or h % 8 else "3_mma"


def check_version(
    stage: str,
    version: str,
    versions: dict[str, tuple[str, ...]],
    array: Array,
    gathered: tuple[str, Array] | None = None,
    **widths: int,
) -> str:
    """Return the array's dtype, in which the version computes.

    The version must take rows of these widths, and gather from an array.

    ``gathered`` has the name and the array. The checks call no function: each training step makes them.
    """
    dtype = dtype_of(array)
    if dtype not in versions.get(version, ()):
        checks.check_name(f"version of {stage}", version, versions)
        able = [name for name, dtypes in versions.items() if dtype in dtypes]
        raise TypeError(
            f"{version} of {stage} computes in {' or '.join(versions[version])}, but x is {array.dtype}"
            + (f"; versions for it: {', '.join(able)}" if able else "")
        )
    for name, width in widths.items():
        if width > MAX_WIDTH:
            raise ValueError(f"{name} is {width}, but must be at most 2**30 = {MAX_WIDTH}")
        if version in TENSOR_CORES and width % 8:  # they move 16 bytes at a time
            raise ValueError(f"{name} is {width}, but {version} needs a multiple of 8; use 2_tiled")
    if gathered and version in BY_TMA and (elements := math.prod(gathered[1].shape)) > MAX_GATHERED:
        raise ValueError(
            f"{gathered[0]} has {' * '.join(map(str, gathered[1].shape))} = {elements} elements, but {version} "
            f"gathers from at most 2**35 = {MAX_GATHERED}; use 3_mma"
        )
    return dtype


def check_slots(dispatch: Dispatch):
    """A lane keeps a slot: the kernels that sum a token's rows have 32."""
    checks.check_int("dispatch.k", dispatch.k, at_least=1, at_most=checks.MAX_TOP_K)


def rows_launch(
    executor: Executor,
    version: str,
    dispatch: Dispatch,
    width: int,
    tile: Tile | None = None,
    results: int = 1,
    crowded: bool = True,
) -> dict[str, Any]:
    """Launch over every routed row and ``width`` columns, each expert's rows by themselves.

    The naive version covers the longest group that there can be (L rows) for every expert; the
    tiled ones cover the most tiles that R rows in E groups can fill, since only the device
    knows the lengths. Threads or blocks beyond leave at once. Hopper's blocks stay, and find
    their tiles themselves. ``results`` is the number of products that share their rows;
    ``crowded`` says that Hopper's kernel has eight warps beside its consumer warps, else four.
    """
    if version == "1_naive":
        return {"grid": (ceil_div(dispatch.L * width, THREADS), dispatch.E), "block": THREADS}
    rows, columns = (ROWS_BOX[1], HOPPER_COLUMNS // results) if version == HOPPER else extent(tile, results)
    grid = dispatch.R // rows + min(dispatch.E, dispatch.R), -(-width // columns)
    if grid[0] * grid[1] > MAX_TILES:
        raise ValueError(
            f"R = {dispatch.R} rows of {width} columns are {grid[0] * grid[1]} tiles, but {version} numbers at most "
            f"2**30 = {MAX_TILES}"
        )
    if version == HOPPER:
        return persistent(executor.multiprocessors, crowded) | {"E": dispatch.E}
    return per_tile(tile, grid) | {"E": dispatch.E}


def extent(tile: Tile | None, results: int = 1) -> tuple[int, int]:
    """Rows and columns of a block's tile of each result: a tile's, or those of 2_tiled."""
    if tile is None:
        return TILE, TILE
    return tile.rows, tile.columns // results  # type: ignore[union-attr]  # never of HopperTile: see `persistent`


def weights_launch(
    executor: Executor, version: str, num_experts: int, rows: int, columns: int, tile: Tile | None = None
) -> dict[str, Any]:
    """Launch over every element of E matrices (rows, columns)."""
    if version == HOPPER:
        launch = persistent(executor.multiprocessors, crowded=True)
        return launch | {"shared_bytes": HOPPER_SHARED_BYTES + TILE_LIST_BYTES, "E": num_experts}
    if version == "1_naive":
        return {"grid": (ceil_div(rows * columns, THREADS), num_experts), "block": THREADS}
    tile_rows, tile_columns = extent(tile)
    return per_tile(tile, (ceil_div(rows, tile_rows), ceil_div(columns, tile_columns), num_experts))


def weight_gradient(
    stage: str,
    kernel: str,
    operands: dict[str, Array],
    shape: tuple[int, int],
    dispatch: Dispatch,
    executor: Executor | None,
    version: str,
) -> Array:
    """The gradients, ``(E, *shape)``, of every expert's weight, by a kernel whose result has its name.

    ``operands`` are the kernel's: hidden rows (R, h), then what is gathered, (L, d).
    """
    (name, hidden), (name_of_gathered, gathered) = operands.items()
    d, h = gathered.shape[1], hidden.shape[1]
    dtype = check_version(stage, version, VERSIONS, gathered, d=d, h=h)
    executor = executor or executor_for(gathered)
    if dispatch.R == 0:
        return executor.full((dispatch.E, *shape), dtype, 0)
    hidden = hidden_rows(executor, version, hidden)
    result = executor.empty((dispatch.E, *shape), dtype)
    tile = tiles.choose(executor, version, kernel, dispatch.R, dispatch.E, d, h)
    # The kernel does not depend on the activation.
    module = executor.load(file_of(stage, version), **constants(dtype, "swiglu", tile))
    # 7_persistent takes the hidden rows in boxes, too.
    boxes = {f"{name}_map": executor.tensor_map(hidden, DEPTH_BOX)} if version == HOPPER else {}
    rows: KernelArguments = {name: whole_rows(hidden), name_of_gathered: gathered_rows(version, gathered)}
    written: KernelArguments = {kernel: result}
    module.launch(
        kernel,
        **weights_launch(executor, version, dispatch.E, *shape, tile),
        **boxes,
        **rows,
        **pitches(version, gathered, pitch_of(hidden)),
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        **written,
        d=d,
        h=h,
    )
    return result


@functools.cache
def persistent(multiprocessors: int, crowded: bool) -> dict[str, Any]:
    """Launch of Hopper's kernels: a block for each multiprocessor."""
    return {"grid": multiprocessors, "block": HOPPER_THREADS[crowded], "shared_bytes": HOPPER_SHARED_BYTES}


def per_tile(tile: Tile | None, grid: tuple[int, ...]) -> dict[str, Any]:
    """Launch with a block for each tile: a tile's threads, or those of 2_tiled."""
    if tile is None:
        return {"grid": grid, "block": THREADS}
    threads, shared_bytes = tile.threads, tile.shared_bytes  # type: ignore[union-attr]  # never of HopperTile
    return {"grid": grid, "block": threads, "shared_bytes": shared_bytes}


def per_element(elements: int) -> dict[str, Any]:
    """Launch with one thread an element."""
    return {"grid": ceil_div(elements, THREADS), "block": THREADS}


def gate_terms(version: str, h: int, tile: Tile | None = None) -> int:
    """Partial sums of a row's gate gradient that the version leaves: one an element, or one a tile of columns."""
    return h if version == "1_naive" else ceil_div(h, HOPPER_COLUMNS if version == HOPPER else extent(tile)[1])
