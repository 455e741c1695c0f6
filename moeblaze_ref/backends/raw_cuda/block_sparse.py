"""MegaBlocks in raw CUDA: launches kernels_cuda/block_sparse/.

A function raises TypeError if its version does not compute in the dtype, and ValueError if it does not at these widths
or blocks. The structures are the same in all versions.
"""

import functools
import sys
from collections.abc import Collection
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.core.arrays import dtype_of, has_values, size_of
from moeblaze_ref.core.config import even_counts, is_gated
from moeblaze_ref.core.contract import bodies, implements
from moeblaze_ref.core.structures import EMPTY, Array, Dispatch, PaddedBins, Topology
from moeblaze_ref.runtime import Executor, KernelArguments, ceil_div, executor_for, widest_pack
from moeblaze_ref.runtime.source import Module
from moeblaze_ref.systems import megablocks

VERSIONS = {version: gemm.VERSIONS[version] for version in ("1_naive", "2_tiled", "3_mma", gemm.HOPPER)}
DEFAULT_VERSION = "2_tiled"
BLOCK = 128  # of MegaBlocks, section 5.1.2: a tile of its products
HOPPER_BLOCK = gemm.ROWS_BOX[1]  # 7_persistent takes multiples of it: the rows of a tile are those of one block
MAX_COLUMN_TILES = 65_535  # a launch's extent along y, where versions 2_tiled and 3_mma number the column tiles of dds
# Of 3_mma, by the block: what a tile has beyond its block is computed for nothing.
TILES = (
    tiles.MmaTile(32, 32, warp_rows=32, warp_columns=32),
    tiles.MmaTile(64, 64, warp_rows=32, warp_columns=32),
    tiles.MMA_TILES[0],
)

# The structures -------------------------------------------------------------------------------------------------------


@implements(sparse_contracts.PAD, gemm.ARRAYS)
def pad(
    dispatch: Dispatch, block: int = BLOCK, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> PaddedBins:
    """P, the sum of the padded groups, is known to the device alone: the host waits for it once, as MegaBlocks does.

    Arrays without memory have no groups: P is that of rows that spread over the experts as evenly as integers allow.
    """
    block = int(block)  # a narrow integer of numpy would overflow
    checks.check_name("version of block_sparse", version, VERSIONS)
    executor = executor or executor_for(dispatch.expert_token_offsets)
    module = _structures(executor, block)
    padded_offsets = executor.empty((dispatch.E + 1,), "int32")
    groups: KernelArguments = {"expert_token_offsets": dispatch.expert_token_offsets, "padded_offsets": padded_offsets}
    module.launch("pad_offsets", grid=1, block=gemm.THREADS, **groups, E=dispatch.E)
    P = int(padded_offsets[-1]) if has_values(padded_offsets) else _rows_if_even(dispatch, block)
    slots = executor.full((P,), "int32", EMPTY)
    rows = executor.empty((dispatch.R,), "int32")
    if dispatch.R:
        module.launch(
            "pad_slots",
            **gemm.per_element(dispatch.R),
            **groups,
            token_expert_indices=dispatch.token_expert_indices,
            token_index_map=dispatch.token_index_map,
            slots=slots,
            rows=rows,
            R=dispatch.R,
        )
    return PaddedBins(padded_offsets, slots, rows, dispatch.k, block)


def _rows_if_even(dispatch: Dispatch, block: int) -> int:
    """The padded rows of an even routing."""
    return block * sum(ceil_div(rows, block) for rows in even_counts(dispatch.R, dispatch.E))


@implements(sparse_contracts.BUILD_TOPOLOGY, gemm.ARRAYS)
def build_topology(
    bins: PaddedBins, h: int, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Topology:
    """Raise ValueError if there are more block columns than the version's `dds` takes, ``MAX_COLUMN_TILES`` tiles in
    2_tiled and 3_mma. A layer would find out in its backward.
    """
    checks.check_name("version of block_sparse", version, VERSIONS)
    _check_columns(bins.E * (h // bins.block), bins.block, version)
    executor = executor or executor_for(bins.padded_offsets)
    block_rows, wide = bins.P // bins.block, h // bins.block
    nnz = block_rows * wide
    topology = Topology(
        row_offsets=executor.empty((block_rows + 1,), "int32"),
        column_indices=executor.empty((nnz,), "int32"),
        row_indices=executor.empty((nnz,), "int32"),
        column_offsets=executor.empty((bins.E * wide + 1,), "int32"),
        transpose_indices=executor.empty((nnz,), "int32"),
        block=bins.block,
    )
    module = _structures(executor, bins.block)
    written: KernelArguments = topology.arrays()
    sizes: KernelArguments = {"padded_offsets": bins.padded_offsets, "E": bins.E, "wide": wide}
    offsets: KernelArguments = {name: written.pop(name) for name in ("row_offsets", "column_offsets")}
    ends = gemm.per_element(max(block_rows, bins.E * wide) + 1)
    module.launch("offsets", **ends, **sizes, **offsets, block_rows=block_rows)
    if nnz:
        module.launch("blocks", **gemm.per_element(nnz), **sizes, **written, nnz=nnz)
    return topology


def _check_columns(columns: int, block: int, version: str):
    """The version has a tile of `dds` for each of these block columns."""
    if version in ("1_naive", gemm.HOPPER):
        return
    tiles_of_columns = columns * ceil_div(block, gemm.extent(tile_of(version, block))[1])
    if tiles_of_columns > MAX_COLUMN_TILES:
        raise ValueError(
            f"{columns} block columns have {tiles_of_columns} tiles, but {version} of block_sparse takes at most "
            f"{MAX_COLUMN_TILES}; use a larger block or 1_naive"
        )


def _check_lines(topology: Topology, version: str):
    """The version can number the lines of all stored blocks, as it does to walk a block column."""
    lines = topology.nnz * topology.block
    if version == "3_mma" and lines > sparse_contracts.MAX_INT32:
        raise ValueError(
            f"{topology.nnz} blocks have {lines} lines, but {version} of block_sparse numbers at most 2**31 - 1024 = "
            f"{sparse_contracts.MAX_INT32}; use a larger block or 1_naive"
        )


def _structures(executor: Executor, block: int) -> Module:
    return executor.load("block_sparse/structures.cu", BLOCK=block, THREADS=gemm.THREADS)


# Rows into bins and back ----------------------------------------------------------------------------------------------


@implements(sparse_contracts.PADDED_GATHER, gemm.ARRAYS)
def padded_gather(
    x: Array,
    bins: PaddedBins,
    gates: Array | None = None,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    d, dtype = x.shape[1], gemm.check_version("block_sparse", version, VERSIONS, x)
    executor = executor or executor_for(x)
    rows = executor.empty((bins.P, d), dtype)
    if elements := size_of(rows):
        weights = executor.empty((0,), "float32") if gates is None else gates  # a pointer that no kernel follows
        pack = widest_pack(x, d)
        _rows(executor, dtype, pack).launch(
            "padded_gather",
            **gemm.per_element(elements // pack),
            x=x,
            gates=weights,
            slots=bins.slots,
            rows=rows,
            P=bins.P,
            d=d,
            k=bins.k,
            weighted=int(gates is not None),
        )
    return rows


@implements(sparse_contracts.PADDED_SCATTER, gemm.ARRAYS)
def padded_scatter(
    y: Array,
    bins: PaddedBins,
    gates: Array | None = None,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Rows are summed in float32 in the order of the slots, rounded once: the kernels are those of the combine and of
    d_x, by the bins' rows.
    """
    checks.check_int("bins.k", bins.k, at_least=1, at_most=checks.MAX_TOP_K)  # a lane keeps a slot
    d, dtype = y.shape[1], gemm.check_version("block_sparse", version, VERSIONS, y)
    executor = executor or executor_for(y)
    out = executor.empty((bins.L, d), dtype)
    gemm.sum_rows(executor, y, bins.rows, bins.k, out, gates)
    return out


@implements(sparse_contracts.GATE_GRADIENT, gemm.ARRAYS)
def gate_gradient(
    d_out: Array, y: Array, bins: PaddedBins, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    d, dtype = y.shape[1], gemm.check_version("block_sparse", version, VERSIONS, y)
    executor = executor or executor_for(y)
    d_gates = executor.empty((bins.L, bins.k), "float32")
    if bins.R:
        pack = min(widest_pack(array, d) for array in (d_out, y))
        warps = gemm.per_element(gemm.WARP * bins.R)
        _rows(executor, dtype, pack).launch(
            "gate_gradient", **warps, d_out=d_out, y=y, rows=bins.rows, d_gates=d_gates, R=bins.R, d=d, k=bins.k
        )
    return d_gates


def _rows(executor: Executor, dtype: str, pack: int) -> Module:
    return executor.load("block_sparse/rows.cu", **gemm.constants(dtype), PACK=pack)


# The three products ---------------------------------------------------------------------------------------------------


@implements(sparse_contracts.SDD, gemm.ARRAYS)
def sdd(
    lhs: Array,
    rhs: Array,
    topology: Topology,
    transpose_rhs: bool = False,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Sums are float32, rounded once. ``transpose_rhs`` is a constant of the kernel, which reads other neighbours."""
    K, block, nnz = lhs.shape[1], topology.block, topology.nnz
    product = _Product(lhs, K, block, executor, version, TRANSPOSE_RHS=transpose_rhs)
    if not (nnz and K):
        return product.zeros((nnz, block, block))
    values = product.executor.empty((nnz, block, block), product.dtype)
    if product.hopper:
        places = {
            "row_offsets": topology.row_offsets,
            "M": lhs.shape[0],
            "part": rhs.shape[-2 if transpose_rhs else -1],
        }
    else:
        places = {"row_indices": topology.row_indices, "nnz": nnz, **_parts("rhs", rhs)}
    product.launch(
        "sdd",
        elements=size_of(values),
        tiles=(nnz, product.high * product.wide),
        lhs=product.operand(lhs),
        rhs=product.operand(rhs),
        column_indices=topology.column_indices,
        values=values,
        K=K,
        **places,
    )
    return values


@implements(sparse_contracts.DSD, gemm.ARRAYS)
def dsd(
    values: Array,
    topology: Topology,
    rhs: Array,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    rows, K = topology.shape[1 if transpose_lhs else 0], rhs.shape[-2 if transpose_rhs else 1]
    if transpose_lhs:
        _check_lines(topology, version)
    transposes = {"TRANSPOSE_LHS": transpose_lhs, "TRANSPOSE_RHS": transpose_rhs}
    product = _Product(values, K, topology.block, executor, version, **transposes)
    if not (topology.nnz and K):
        return product.zeros((rows, K))
    result = product.executor.empty((rows, K), product.dtype)
    by_row = topology.row_offsets, topology.column_indices
    by_column = topology.column_offsets, topology.row_indices
    offsets, others = by_column if transpose_lhs else by_row
    product.launch(
        "dsd",
        elements=rows * K,
        tiles=(rows // topology.block * product.high, ceil_div(K, product.columns)),
        values=product.operand(values),
        rhs=product.operand(rhs),
        offsets=offsets,
        others=others,
        transpose_indices=topology.transpose_indices,
        result=result,
        rows=rows,
        K=K,
        **({"part": rhs.shape[-1 if transpose_rhs else -2]} if product.hopper else _parts("rhs", rhs)),
    )
    return result


@implements(sparse_contracts.DDS, gemm.ARRAYS)
def dds(
    lhs: Array,
    values: Array,
    topology: Topology,
    transpose_lhs: bool = False,
    parts: int = 1,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Raise ValueError, as `build_topology` does, if there are too many block columns."""
    (M, N), K = topology.shape, lhs.shape[1 if transpose_lhs else 0]
    _check_columns(N // topology.block, topology.block, version)
    _check_lines(topology, version)
    product = _Product(values, K, topology.block, executor, version, TRANSPOSE_LHS=transpose_lhs)
    if not (topology.nnz and K):
        return product.zeros((parts, K, N // parts))
    result = product.executor.empty((parts, K, N // parts), product.dtype)
    product.launch(
        "dds",
        elements=N * K,
        tiles=(ceil_div(K, product.rows), N // topology.block * product.wide),
        lhs=product.operand(lhs),
        values=product.operand(values),
        column_offsets=topology.column_offsets,
        row_indices=topology.row_indices,
        transpose_indices=topology.transpose_indices,
        result=result,
        M=M,
        K=K,
        N=N,
        width=N // parts,
    )
    return result


def _parts(name: str, dense: Array) -> dict[str, int]:
    """A dense operand's arguments: rows, and columns of a part."""
    return {f"{name}_rows": dense.shape[-2], f"{name}_width": dense.shape[-1]}


def tile_of(version: str, block: int) -> tiles.MmaTile | None:
    """The tile of a version's products: the smallest that covers a block, or the largest; None if it has one tile."""
    if version != "3_mma":
        return None
    return next((tile for tile in TILES if block <= tile.rows), TILES[-1])


class _Product:
    """How a version computes a product of blocks: its module, and how it cuts a result into tiles."""

    def __init__(self, operand: Array, K: int, block: int, executor: Executor | None, version: str, **transposes: bool):
        self.dtype = gemm.check_version("block_sparse", version, VERSIONS, operand, K=K, block=block)
        self.executor = executor or executor_for(operand)
        self.naive, self.hopper = version == "1_naive", version == gemm.HOPPER
        if self.hopper and block % HOPPER_BLOCK:
            raise ValueError(f"block is {block}, but {version} needs a multiple of {HOPPER_BLOCK}; use 3_mma")
        self._tile = tile_of(version, block)
        self.rows, self.columns = gemm.extent(self._tile)
        self.high, self.wide = ceil_div(block, self.rows), ceil_div(block, self.columns)  # tiles along a block's sides
        turned = {name: int(transposes.get(name, False)) for name in ("TRANSPOSE_LHS", "TRANSPOSE_RHS")}
        constants = gemm.constants(self.dtype, tile=self._tile) | turned | {"BLOCK": block}
        self._module = self.executor.load(gemm.file_of("block_sparse", version), **constants)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """The sum of nothing."""
        return self.executor.full(shape, self.dtype, 0)

    def operand(self, array: Array) -> Any:
        """An operand as the version's kernels take it: where it begins, or boxes of its blocks or parts."""
        if not self.hopper:
            return array
        return self.executor.tensor_map(array.reshape(-1, *array.shape[-2:]), gemm.WEIGHTS_BOX)

    def launch(self, kernel: str, elements: int, tiles: tuple[int, ...], **arguments: Any):
        """Run a kernel with a thread for each element of the result, a block for each tile, or blocks that stay."""
        if self.hopper:
            launch = gemm.persistent(self.executor.multiprocessors, crowded=True)
        elif self.naive:
            launch = gemm.per_element(elements)
        else:
            launch = gemm.per_tile(self._tile, tiles)
        self._module.launch(kernel, **launch, **arguments)


# Between the projections ----------------------------------------------------------------------------------------------


@implements(sparse_contracts.ACTIVATE, gemm.ARRAYS)
def activate(
    a: Array, b: Array | None, activation: str, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    dtype, executor = gemm.check_version("block_sparse", version, VERSIONS, a), executor or executor_for(a)
    y_swi = executor.empty(a.shape, dtype)
    if size_of(a):
        values = {"a": a, "b": gemm.or_nothing(executor, b, a)}
        _between(executor, dtype, activation, "activate", a.shape, **values, y_swi=y_swi)
    return y_swi


@implements(sparse_contracts.ACTIVATE_BACKWARD, gemm.ARRAYS)
def activate_backward(
    d_y_swi: Array,
    a: Array,
    b: Array | None,
    activation: str,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> tuple[Array, Array | None]:
    dtype, executor = gemm.check_version("block_sparse", version, VERSIONS, a), executor or executor_for(a)
    d_a = executor.empty(a.shape, dtype)
    d_b = executor.empty(a.shape, dtype) if is_gated(activation) else None
    if size_of(a):
        values = {"d_y_swi": d_y_swi, "a": a, "b": gemm.or_nothing(executor, b, a)}
        gradients = {"d_a": d_a, "d_b": gemm.or_nothing(executor, d_b, a)}
        _between(executor, dtype, activation, "activate_backward", a.shape, **values, **gradients)
    return d_a, d_b


def _between(executor: Executor, dtype: str, activation: str, kernel: str, shape: tuple[int, ...], **values: Any):
    nnz, block, _ = shape
    pack = widest_pack(values["a"], block * block)
    module = executor.load("block_sparse/hidden.cu", **gemm.constants(dtype, activation), PACK=pack)
    count = nnz * block * block
    module.launch(kernel, **gemm.per_element(count // pack), **values, values=count)


# The layer ------------------------------------------------------------------------------------------------------------


def default_version(dtype: str, d: int, block: int, executor: Executor) -> str:
    """The fastest version that computes in this dtype at these widths on this executor's device."""
    if dtype not in gemm.NARROW or d % 8 or block % 8:
        return "2_tiled"
    return gemm.HOPPER if executor.capability == (9, 0) and block % HOPPER_BLOCK == 0 else "3_mma"


@implements(megablocks.FORWARD, gemm.ARRAYS)
def forward(
    x: Array,
    w1: Array,
    w2: Array | None,
    w3: Array,
    dispatch: Dispatch,
    gates: Array,
    activation: str,
    block: int = BLOCK,
    executor: Executor | None = None,
    version: str | None = None,
) -> tuple[Array, megablocks.Saved]:
    """Without a ``version`` the layer runs that of `default_version`."""
    stages = stages_for(x, block, executor or executor_for(x), version)
    return megablocks.forward(stages, x, w1, w2, w3, dispatch, gates, activation, block)


@implements(megablocks.BACKWARD_OF_WANTED, gemm.ARRAYS)
def backward(
    d_out: Array,
    saved: megablocks.Saved,
    w1: Array,
    w2: Array | None,
    w3: Array,
    wanted: Collection[str] = megablocks.Gradients._fields,
    release: bool = False,
    executor: Executor | None = None,
    version: str | None = None,
) -> megablocks.Gradients:
    """Without a ``version`` the layer runs that of `default_version`."""
    stages = stages_for(d_out, saved.bins.block, executor or executor_for(d_out), version)
    return megablocks.backward(stages, d_out, saved, w1, w2, w3, wanted, release)


def stages_for(like: Array, block: int, executor: Executor, version: str | None = None) -> megablocks.SparseStages:
    """The functions without their checks, with the executor and the version already chosen."""
    return _stages(executor, version or default_version(dtype_of(like), like.shape[1], block, executor))


@functools.cache
def _stages(executor: Executor, version: str) -> megablocks.SparseStages:
    return bodies(megablocks.SparseStages, sys.modules[__name__], executor=executor, version=version)
