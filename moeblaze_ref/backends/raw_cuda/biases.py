"""Biases of the experts, in raw CUDA: launches kernels_cuda/packed/biases.cu."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.arrays import dtype_of
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, ceil_div, widest_pack

_FILE = "packed/biases.cu"
_SUMMING = 1024  # threads of a block that sums rows: it is alone with some columns of an expert, and waits for memory
_TILE_ROWS = gemm.ROWS_BOX[1]
_MANY_BLOCKS = 256  # with fewer a lane takes fewer columns, so that all multiprocessors have a block
_FEW_COLUMNS = 4


@dataclass(frozen=True)
class Biases:
    """The biases of one call, and after its backward their gradients.

    Parameters
    ----------
    up : array (E, G h), optional
        Of the up-projections, in the order of gate_up's columns.
    down : array (E, d), optional
        Of the down-projection.
    wanted : collection of str
        Of ``up`` and ``down``, those whose gradients a backward puts into ``gradients``.
    gradients : dict
        By the same names, each of the dtype and shape of its bias.
    """

    up: Array | None = None
    down: Array | None = None
    wanted: Collection[str] = ()
    gradients: dict[str, Array] = field(default_factory=dict)


NONE = Biases()


def sum_rows(
    executor: Executor, y: Array, bias: Array, gates: Array, dispatch: Dispatch, out: Array, first: int = 0
) -> None:
    """Fill columns of ``out`` (L, d) with each token's sum of gates * (y + bias), as `gemm.sum_rows` does.

    y (R, width) has the columns from ``first`` on; the bias (E, d) has all.
    """
    slots = {"token_index_map": dispatch.token_index_map, "token_expert_indices": dispatch.token_expert_indices}
    operands = {"y": y, "bias": bias, "gates": gates, **slots, "out": out, "k": dispatch.k}
    gemm.launch_row_sums(executor, _FILE, "combine_biased", y, out, first, **operands)


def leave_zeros(executor: Executor, biases: Biases) -> None:
    """Leave the wanted gradients of a call without rows."""
    for name in biases.wanted:
        bias: Array = getattr(biases, name)
        biases.gradients[name] = executor.full(bias.shape, dtype_of(bias), 0)


def up_gradient(executor: Executor, d_ab: Array, dispatch: Dispatch) -> Array:
    """Return the sums (E, n) of d_ab (R, n) over each expert's rows."""
    return _sums(executor, "d_up_bias", d_ab, dtype_of(d_ab), dispatch, d_ab=d_ab, n=d_ab.shape[1])


def empty_tile_sums(executor: Executor, dispatch: Dispatch, n: int) -> Array:
    """Room for the sums of d_ab (R, n) over the rows of each tile of 7_persistent."""
    return executor.empty((dispatch.R // _TILE_ROWS + dispatch.E, n), "float32")


def up_gradient_of_tiles(executor: Executor, tile_sums: Array, dtype: str, dispatch: Dispatch) -> Array:
    """Return what `up_gradient` does, from what d_hidden has left in `empty_tile_sums`."""
    operands = {"tile_sums": tile_sums, "n": tile_sums.shape[1], "tile_rows": _TILE_ROWS}
    return _sums(executor, "d_up_bias_of_tiles", tile_sums, dtype, dispatch, **operands)


def down_gradients(
    executor: Executor, d_out: Array, bias: Array, gate_of_row: Array, dispatch: Dispatch
) -> tuple[Array, Array]:
    """Return the sums (E, d) of gate * d_out over each expert's rows, and each row's <d_out, bias> in terms (R, terms).

    ``gate_of_row`` (R,) is in expert order, and so are the terms.
    """
    d = d_out.shape[1]
    terms = _blocks_of_columns(d_out, d, dispatch.E)[1]
    gate_terms = executor.empty((dispatch.R, terms), "float32")
    rows = {"gate_of_row": gate_of_row, "expert_token_indices": dispatch.expert_token_indices}
    operands = {"d_out": d_out, "bias": bias, **rows, "gate_terms": gate_terms, "d": d, "terms": terms}
    return _sums(executor, "d_down_bias", d_out, dtype_of(d_out), dispatch, **operands), gate_terms


def _sums(executor: Executor, kernel: str, rows: Array, dtype: str, dispatch: Dispatch, **operands: Any) -> Array:
    """Launch a kernel whose result has the width of the rows that it sums, for each expert."""
    width = rows.shape[1]
    d_bias = executor.empty((dispatch.E, width), dtype)
    pack, blocks = _blocks_of_columns(rows, width, dispatch.E)
    module = executor.load(_FILE, **gemm.constants(dtype) | {"THREADS": _SUMMING}, PACK=pack)
    module.launch(
        kernel,
        grid=dispatch.E * blocks,
        block=_SUMMING,
        **operands,
        expert_token_offsets=dispatch.expert_token_offsets,
        d_bias=d_bias,
        E=dispatch.E,
    )
    return d_bias


def _blocks_of_columns(rows: Array, width: int, E: int) -> tuple[int, int]:
    """The columns that a lane takes, and the blocks that take all columns of one of E experts."""
    pack = widest_pack(rows, width)
    if E * ceil_div(width, gemm.WARP * pack) < _MANY_BLOCKS:
        pack = min(pack, _FEW_COLUMNS)
    return pack, ceil_div(width, gemm.WARP * pack)
