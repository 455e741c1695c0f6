"""MegaBlocks in raw CUDA: launches kernels_cuda/block_sparse/."""

import functools
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.core.arrays import size_of
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.structures import EMPTY, Array, Dispatch, PaddedBins, Topology
from moeblaze_ref.runtime import Executor, ceil_div, executor_for, widest_pack
from moeblaze_ref.runtime.source import Module
from moeblaze_ref.systems import megablocks

VERSIONS = {version: gemm.VERSIONS[version] for version in ("1_naive", "2_tiled", "3_mma", gemm.HOPPER)}
DEFAULT_VERSION = "2_tiled"
BLOCK = 128  # of MegaBlocks, section 5.1.2: a tile of its products
GATE_DTYPES = ("float32",)
HOPPER_BLOCK = gemm.ROWS_BOX[1]  # 7_persistent takes multiples of it: the rows of a tile are those of one block
MAX_COLUMN_TILES = 65_535  # a launch's extent along y, where versions 2_tiled and 3_mma number the column tiles of dds
# Of 3_mma, by the block: what a tile has beyond its block is computed for nothing.
TILES = (
    tiles.MmaTile(32, 32, warp_rows=32, warp_columns=32),
    tiles.MmaTile(64, 64, warp_rows=32, warp_columns=32),
    tiles.DEFAULTS["3_mma"],
)

# The structures -------------------------------------------------------------------------------------------------------


def pad(
    dispatch: Dispatch, block: int = BLOCK, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> PaddedBins:
    """Bins of whole blocks: where every routed row lies once each expert's group is padded.

    Parameters
    ----------
    dispatch : Dispatch
    block : int
        Rows of a block.
    executor : Executor, optional
        Default: by where the dispatch lives.
    version : str
        One of ``VERSIONS``; all build the same.

    Returns
    -------
    PaddedBins
        P, the sum of the padded groups, is known to the device alone: the host waits for it once, as MegaBlocks does.

    Raises
    ------
    ValueError, TypeError
        If block is no integer of at least 1, the padded rows could exceed what int32 counts, or as
        `checks.check_dispatch`.

    Notes
    -----
    MegaBlocks, section 5.2.
    """
    sparse_contracts.check_pad(dispatch, block)
    block = int(block)  # a narrow integer of numpy would overflow
    checks.check_name("version of block_sparse", version, VERSIONS)
    executor = executor or executor_for(dispatch.expert_token_offsets)
    module = _structures(executor, block)
    padded_offsets = executor.empty((dispatch.E + 1,), "int32")
    groups = {"expert_token_offsets": dispatch.expert_token_offsets, "padded_offsets": padded_offsets}
    module.launch("pad_offsets", grid=1, block=gemm.THREADS, **groups, E=dispatch.E)
    P = int(padded_offsets[-1])
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


def build_topology(
    bins: PaddedBins, h: int, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Topology:
    """The block-sparse matrix (P, E h) of the bins: a block row stores the h columns of its rows' expert.

    Parameters
    ----------
    bins : PaddedBins
    h : int
        Expert width, a multiple of the block size.
    executor, version
        As in `pad`.

    Returns
    -------
    Topology

    Raises
    ------
    ValueError, TypeError
        If the block size does not divide h, rows, columns or blocks exceed what int32 counts, or as
        `sparse_contracts.check_bins`. Also if there are more block columns than the version's `dds` takes: at most
        ``MAX_COLUMN_TILES`` tiles of 2_tiled or 3_mma. A layer would find out in its backward.

    Notes
    -----
    MegaBlocks, sections 5.1.3 and 5.1.4.
    """
    sparse_contracts.check_build_topology(bins, h)
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
    module, written = _structures(executor, bins.block), topology.arrays()
    sizes = {"padded_offsets": bins.padded_offsets, "E": bins.E, "wide": wide}
    offsets = {name: written.pop(name) for name in ("row_offsets", "column_offsets")}
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
    return executor.load("block_sparse/0_structures.cu", BLOCK=block, THREADS=gemm.THREADS)


# Rows into bins and back ----------------------------------------------------------------------------------------------


def padded_gather(
    x: Array,
    bins: PaddedBins,
    gates: Array | None = None,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Rows of x copied into the bins, times their gates if there are any; padding is zero.

    Parameters
    ----------
    x : array (L, d), float32, float16 or bfloat16
    bins : PaddedBins
    gates : array (L, k), float32, optional
    executor, version
        As in `pad`.

    Returns
    -------
    rows : array (P, d)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_gather`, or if the version does not compute in this dtype.

    Notes
    -----
    MegaBlocks, section 5.2.
    """
    sparse_contracts.check_gather(x, bins, gates, gemm.WIDE, GATE_DTYPES)
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


def padded_scatter(
    y: Array,
    bins: PaddedBins,
    gates: Array | None = None,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Each token's sum of its rows in the bins, times its gates if there are any.

    Parameters
    ----------
    y : array (P, d), float32, float16 or bfloat16
    bins : PaddedBins
    gates : array (L, k), float32, optional
    executor, version
        As in `pad`.

    Returns
    -------
    out : array (L, d)
        Summed in float32 in the order of the slots, rounded once: the kernels are those of the combine and of d_x, by
        the bins' rows.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_scatter`, or if the version does not compute in this dtype.

    Notes
    -----
    MegaBlocks, section 5.2.
    """
    sparse_contracts.check_scatter(y, bins, gates, gemm.WIDE, GATE_DTYPES)
    checks.check_int("bins.k", bins.k, at_least=1, at_most=checks.MAX_TOP_K)  # a lane keeps a slot
    d, dtype = y.shape[1], gemm.check_version("block_sparse", version, VERSIONS, y)
    executor = executor or executor_for(y)
    out = executor.empty((bins.L, d), dtype)
    gemm.sum_rows(executor, y, bins.rows, bins.k, out, gates)
    return out


def gate_gradient(
    d_out: Array, y: Array, bins: PaddedBins, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """Gradient of the gates: <d_out, y> of each slot.

    Parameters
    ----------
    d_out : array (L, d), float32, float16 or bfloat16
    y : array (P, d)
        As it went into `padded_scatter`.
    bins, executor, version
        As there.

    Returns
    -------
    d_gates : array (L, k), float32

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_gate_gradient`, or if the version does not compute in this dtype.
    """
    sparse_contracts.check_gate_gradient(d_out, y, bins, gemm.WIDE)
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
    return executor.load("block_sparse/0_rows.cu", **gemm.constants(dtype), PACK=pack)


# The three products ---------------------------------------------------------------------------------------------------


def sdd(
    lhs: Array,
    rhs: Array,
    topology: Topology,
    transpose_rhs: bool = False,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """S = D D: the stored blocks of lhs rhs, and no others.

    Parameters
    ----------
    lhs : array (M, K), float32, float16 or bfloat16
    rhs : array (K, N), or its parts (E, K, N / E) side by side
        (N, K) with ``transpose_rhs``.
    topology : Topology
        Of a matrix (M, N).
    transpose_rhs : bool
        Multiply by the transpose of rhs: a constant of the kernel, which reads other neighbours.
    executor, version
        As in `pad`.

    Returns
    -------
    values : array (nnz, block, block)
        Sums are float32, rounded once.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_sdd`, or if the version does not compute in this dtype, these widths or these blocks.

    Notes
    -----
    MegaBlocks, sections 5.1 and 5.1.3.
    """
    sparse_contracts.check_sdd(lhs, rhs, topology, transpose_rhs, gemm.WIDE)
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


def dsd(
    values: Array,
    topology: Topology,
    rhs: Array,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """D = S D: a block-sparse matrix, or its transpose, times a dense one.

    Parameters
    ----------
    values : array (nnz, block, block), float32, float16 or bfloat16
    topology : Topology
        Of a matrix (M, N).
    rhs : array (N, K)
        With ``transpose_rhs`` (K, N), or its parts (E, K, N / E) side by side. With ``transpose_lhs`` M for N.
    transpose_lhs : bool
        Multiply the transpose of the sparse matrix: its blocks are visited by the transpose indices.
    transpose_rhs : bool
        Multiply by the transpose of rhs.
    executor, version
        As in `pad`.

    Returns
    -------
    array (M, K)
        (N, K) with ``transpose_lhs``; zeros in block rows that store nothing.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_dsd`, or if the version does not compute in this dtype, these widths or these blocks.

    Notes
    -----
    MegaBlocks, sections 5.1 and 5.1.4.
    """
    sparse_contracts.check_dsd(values, topology, rhs, transpose_lhs, transpose_rhs, gemm.WIDE)
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


def dds(
    lhs: Array,
    values: Array,
    topology: Topology,
    transpose_lhs: bool = False,
    parts: int = 1,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """D = D S: a dense matrix, or its transpose, times a block-sparse one.

    Parameters
    ----------
    lhs : array (K, M), float32, float16 or bfloat16
        (M, K) with ``transpose_lhs``.
    values : array (nnz, block, block)
    topology : Topology
        Of a matrix (M, N).
    transpose_lhs : bool
        Multiply the transpose of lhs.
    parts : int
        How many parts the result comes in.
    executor, version
        As in `pad`.

    Returns
    -------
    array (parts, K, N / parts)
        The result (K, N), its parts side by side; zeros in block columns that store nothing.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_dds`, or if the version does not compute in this dtype, these widths or these blocks,
        or as `build_topology` if there are too many block columns.

    Notes
    -----
    MegaBlocks, sections 5.1 and 5.1.4.
    """
    sparse_contracts.check_dds(lhs, values, topology, transpose_lhs, parts, gemm.WIDE)
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


def activate(
    a: Array, b: Array | None, activation: str, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """The activation of every stored value: act(a) * b if gated, else act(a).

    Parameters
    ----------
    a : array (nnz, block, block), float32, float16 or bfloat16
    b : array (nnz, block, block) or None
        None exactly for the ungated activations.
    activation : str
        One of ``config.ACTIVATIONS``.
    executor, version
        As in `pad`.

    Returns
    -------
    y_swi : array (nnz, block, block)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_activate`, or if the version does not compute in this dtype.
    """
    sparse_contracts.check_activate(a, b, activation, gemm.WIDE)
    dtype, executor = gemm.check_version("block_sparse", version, VERSIONS, a), executor or executor_for(a)
    y_swi = executor.empty(a.shape, dtype)
    if size_of(a):
        values = {"a": a, "b": gemm.or_nothing(executor, b, a)}
        _between(executor, dtype, activation, "activate", a.shape, **values, y_swi=y_swi)
    return y_swi


def activate_backward(
    d_y: Array,
    a: Array,
    b: Array | None,
    activation: str,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> tuple[Array, Array | None]:
    """Gradients of a and b, with act(a) computed again.

    Parameters
    ----------
    d_y : array (nnz, block, block)
        Gradient of y_swi.
    a, b, activation, executor, version
        As in `activate`.

    Returns
    -------
    d_a : array (nnz, block, block)
    d_b : array (nnz, block, block) or None

    Raises
    ------
    ValueError, TypeError
        As `activate`.
    """
    sparse_contracts.check_activate_backward(d_y, a, b, activation, gemm.WIDE)
    dtype, executor = gemm.check_version("block_sparse", version, VERSIONS, a), executor or executor_for(a)
    d_a = executor.empty(a.shape, dtype)
    d_b = executor.empty(a.shape, dtype) if is_gated(activation) else None
    if size_of(a):
        values = {"d_y": d_y, "a": a, "b": gemm.or_nothing(executor, b, a)}
        gradients = {"d_a": d_a, "d_b": gemm.or_nothing(executor, d_b, a)}
        _between(executor, dtype, activation, "activate_backward", a.shape, **values, **gradients)
    return d_a, d_b


def _between(executor: Executor, dtype: str, activation: str, kernel: str, shape: tuple[int, ...], **values: Array):
    nnz, block, _ = shape
    pack = widest_pack(values["a"], block * block)
    module = executor.load("block_sparse/0_hidden.cu", **gemm.constants(dtype, activation), PACK=pack)
    count = nnz * block * block
    module.launch(kernel, **gemm.per_element(count // pack), **values, values=count)


# The layer ------------------------------------------------------------------------------------------------------------


def default_version(dtype: str, d: int, block: int, executor: Executor) -> str:
    """The fastest version that computes in this dtype at these widths on this executor's device."""
    if dtype not in gemm.NARROW or d % 8 or block % 8:
        return "2_tiled"
    return gemm.HOPPER if executor.capability == (9, 0) and block % HOPPER_BLOCK == 0 else "3_mma"


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
    """Run all experts of the layer, as `megablocks.forward`; executor as in `pad`, the version `default_version`."""
    stage = _stage(x, executor, version, block)
    return megablocks.forward(stage, gemm.WIDE, x, w1, w2, w3, dispatch, gates, activation, block)


def backward(
    d_out: Array,
    saved: megablocks.Saved,
    w1: Array,
    w2: Array | None,
    w3: Array,
    wanted: Collection[str] = megablocks.Gradients._fields,
    give_up: bool = False,
    executor: Executor | None = None,
    version: str | None = None,
) -> megablocks.Gradients:
    """Every gradient, as `megablocks.backward`; executor and version as in `forward`."""
    checks.check_type("saved", saved, megablocks.Saved)
    stage = _stage(d_out, executor, version, saved.bins.block)
    return megablocks.backward(stage, gemm.WIDE, d_out, saved, w1, w2, w3, wanted, give_up)


def _stage(like: Array, executor: Executor | None, version: str | None, block: int) -> SimpleNamespace:
    """This module's functions with the executor and the version already chosen."""
    executor = executor or executor_for(like)
    version = version or default_version(checks.dtype_of(like), like.shape[1], block, executor)
    options = {"executor": executor, "version": version}
    functions = (
        pad,
        build_topology,
        padded_gather,
        padded_scatter,
        gate_gradient,
        sdd,
        dsd,
        dds,
        activate,
        activate_backward,
    )
    return SimpleNamespace(**{each.__name__: functools.partial(each, **options) for each in functions})
