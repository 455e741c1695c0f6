"""Biases of the experts, in raw CUDA: launches kernels_cuda/packed/biases.cu."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.arrays import dtype_of
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, ceil_div, widest_pack
from moeblaze_ref.runtime.source import Module

_FILE = "packed/biases.cu"


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


def add_to_d_gates(executor: Executor, d_out: Array, bias: Array, dispatch: Dispatch, d_gates: Array) -> None:
    """Add to the gates' gradients what the bias adds to the output: <d_out, bias>."""
    d, slots = d_out.shape[1], dispatch.slots
    if slots:
        module, _ = _load(executor, d_out, d)
        module.launch(
            "add_to_d_gates",
            **gemm.per_element(gemm.WARP * slots),
            d_out=d_out,
            bias=bias,
            token_expert_indices=dispatch.token_expert_indices,
            d_gates=d_gates,
            R=slots,
            d=d,
            k=dispatch.k,
        )


def up_gradient(executor: Executor, d_ab: Array, dispatch: Dispatch) -> Array:
    """Return the sums (E, n) of d_ab (R, n) over each expert's rows."""
    return _sums(executor, "d_up_bias", d_ab, dispatch, d_ab=d_ab, n=d_ab.shape[1])


def down_gradient(executor: Executor, d_out: Array, gate_of_row: Array, dispatch: Dispatch) -> Array:
    """Return the sums (E, d) of gate * d_out over each expert's rows; the gates (R,) are in expert order."""
    rows = {"gate_of_row": gate_of_row, "expert_token_indices": dispatch.expert_token_indices}
    return _sums(executor, "d_down_bias", d_out, dispatch, d_out=d_out, **rows, d=d_out.shape[1])


def _sums(executor: Executor, kernel: str, rows: Array, dispatch: Dispatch, **operands: Any) -> Array:
    """Launch a kernel whose result has the width of the rows that it sums, for each expert."""
    width, dtype = rows.shape[1], dtype_of(rows)
    if dispatch.R == 0:
        return executor.full((dispatch.E, width), dtype, 0)
    d_bias = executor.empty((dispatch.E, width), dtype)
    module, pack = _load(executor, rows, width)
    module.launch(
        kernel,
        grid=(ceil_div(width, gemm.WARP * pack), dispatch.E),
        block=gemm.THREADS,
        **operands,
        expert_token_offsets=dispatch.expert_token_offsets,
        d_bias=d_bias,
    )
    return d_bias


def _load(executor: Executor, rows: Array, width: int) -> tuple[Module, int]:
    """The kernels for rows whose begins are multiples of the width, and the columns that a lane moves at once."""
    pack = widest_pack(rows, width)
    return executor.load(_FILE, **gemm.constants(dtype_of(rows)), PACK=pack), pack
