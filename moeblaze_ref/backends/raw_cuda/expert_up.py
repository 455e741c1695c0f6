"""The up-projection in raw CUDA: launches kernels_cuda/expert_up/."""

from collections.abc import Collection
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.arrays import dtype_of, part_of
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import HIDDEN, Array, Dispatch
from moeblaze_ref.runtime import Executor, executor_for

VERSIONS = gemm.VERSIONS
# Of the forward: those and the teaching versions, in the order of the series.
FORWARD_VERSIONS = dict(sorted((VERSIONS | dict.fromkeys(gemm.TEACHING, gemm.NARROW)).items()))
DEFAULT_VERSION = "2_tiled"
_STORE = {"STORE_PROJECTIONS": "a", "STORE_Y_SWI": "y_swi"}


@implements(stage_contracts.EXPERT_UP, gemm.ARRAYS)
def forward(
    x: Array,
    w1: Array,
    w2: Array | None,
    dispatch: Dispatch,
    activation: str,
    stores: Collection[str] = HIDDEN,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> tuple[Array | None, Array | None, Array | None]:
    """Sums are float32, rounded once. The activation and ``stores`` are constants of the compilation. ``3_mma_tf32``
    rounds its operands to 10 bits of mantissa; nothing chooses it by itself, nor the versions between ``3_mma`` and
    Hopper's, which have no backward.
    """
    _, d, h = w1.shape
    dtype = gemm.check_version("expert_up", version, FORWARD_VERSIONS, x, ("x", x), d=d, h=h)
    executor = executor or executor_for(x)
    stored = {"a": "a" in stores, "b": "a" in stores and w2 is not None, "y_swi": "y_swi" in stores}
    a, b, y_swi = [
        gemm.empty_rows(executor, version, (dispatch.R, h), dtype) if stored[name] else None for name in HIDDEN
    ]
    if dispatch.R:
        left_out: dict[str, Any] = {macro: 0 for macro, name in _STORE.items() if not stored[name]}
        tile = tiles.choose(executor, version, "expert_up", dispatch.R, dispatch.E, d, h)
        w1 = gemm.weights_in_sectors(executor, version, w1, dispatch)
        w2 = None if w2 is None else gemm.weights_in_sectors(executor, version, w2, dispatch)
        module = executor.load(
            gemm.file_of("expert_up", version), **gemm.constants(dtype, activation, tile), **left_out
        )
        module.launch(
            "expert_up",
            **gemm.rows_launch(executor, version, dispatch, h, tile, results=1 if w2 is None else 2, crowded=False),
            x=gemm.gathered_rows(version, x),
            w1=gemm.operand(executor, version, w1, gemm.WEIGHTS_BOX),
            w2=gemm.second_operand(executor, version, w2, w1, gemm.WEIGHTS_BOX),
            expert_token_indices=dispatch.expert_token_indices,
            expert_token_offsets=dispatch.expert_token_offsets,
            a=gemm.rows_or_nothing(executor, a, x),
            b=gemm.rows_or_nothing(executor, b, x),
            y_swi=gemm.rows_or_nothing(executor, y_swi, x),
            d=d,
            h=h,
            **gemm.pitches(version, x, gemm.row_pitch(version, h)),
        )
    return a, b, y_swi


@implements(stage_contracts.EXPERT_UP_D_X, gemm.ARRAYS)
def input_gradient(
    d_a: Array,
    d_b: Array | None,
    w1: Array,
    w2: Array | None,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Rows are summed over the slots of a token in their order. The tiled versions write the R rows first, (R, d) or
    some columns after the others (`gemm.parts_of_rows`), and sum them in a second kernel; the rows are
    freed on return.
    """
    _, d, h = w1.shape
    dtype = gemm.check_version("expert_up", version, VERSIONS, d_a, d=d, h=h)
    executor = executor or executor_for(d_a)
    d_x = executor.empty((dispatch.L, d), dtype)
    if dispatch.R == 0:
        return d_x
    if version == "1_naive":
        _sum_on_the_fly(executor, (d_a, d_b, w1, w2), dispatch, d_x)
        return d_x
    gemm.check_slots(dispatch)
    for first, width in gemm.parts_of_rows(version, dispatch.R, d, h):
        part = (w1, w2) if width == d else [w if w is None else part_of(w, 1, first, width) for w in (w1, w2)]
        rows = rows_before_their_sum(executor, version, (d_a, d_b, *part), dispatch, d)
        gemm.sum_rows(executor, rows, dispatch.token_index_map, dispatch.k, d_x, first=first)
        del rows  # before the next part is born
    return d_x


def _module(executor, version, dtype, gated, tile=None):
    """The file for a gradient of x: its kernels depend on whether there is a gate, not on the activation."""
    constants = gemm.constants(dtype, "swiglu" if gated else "silu", tile)
    return executor.load(gemm.file_of("expert_up", version), **constants)


def _sum_on_the_fly(executor, operands, dispatch, d_x):
    """d_x by one kernel, a thread for each of its elements."""
    d_a, d_b, w1, w2 = operands
    _, d, h = w1.shape
    module = _module(executor, "1_naive", dtype_of(d_a), w2 is not None)
    module.launch(
        "d_x",
        **gemm.per_element(dispatch.L * d),
        d_a=d_a,
        d_b=gemm.or_nothing(executor, d_b, d_a),
        w1=w1,
        w2=gemm.or_nothing(executor, w2, w1),
        token_expert_indices=dispatch.token_expert_indices,
        token_index_map=dispatch.token_index_map,
        d_x=d_x,
        L=dispatch.L,
        d=d,
        h=h,
        k=dispatch.k,
    )


def rows_before_their_sum(
    executor: Executor,
    version: str,
    operands: tuple[Array, Array | None, Array, Array | None],
    dispatch: Dispatch,
    d: int,
) -> Array:
    """Rows d_a w1^T + d_b w2^T, in as many columns as w1 and w2 have lines: all d of them, or a part."""
    d_a, d_b, w1, w2 = operands
    _, width, h = w1.shape
    rows = executor.empty((dispatch.R, width), dtype_of(d_a))
    if dispatch.R == 0:
        return rows
    tile = tiles.choose(executor, version, "d_x_rows", dispatch.R, dispatch.E, d, h)
    d_a, w1 = gemm.hidden_rows(executor, version, d_a), gemm.weights_in_sectors(executor, version, w1, dispatch)
    d_b = None if d_b is None else gemm.hidden_rows(executor, version, d_b)
    w2 = None if w2 is None else gemm.weights_in_sectors(executor, version, w2, dispatch)
    module = _module(executor, version, dtype_of(d_a), w2 is not None, tile)
    module.launch(
        "d_x_rows",
        **gemm.rows_launch(executor, version, dispatch, width, tile),
        d_a=gemm.operand(executor, version, d_a, gemm.ROWS_BOX),
        d_b=gemm.second_operand(executor, version, d_b, d_a, gemm.ROWS_BOX),
        w1=gemm.operand(executor, version, w1, gemm.WEIGHTS_TRANSPOSED_BOX),
        w2=gemm.second_operand(executor, version, w2, w1, gemm.WEIGHTS_TRANSPOSED_BOX),
        expert_token_offsets=dispatch.expert_token_offsets,
        rows=rows,
        d=width,
        h=h,
    )
    return rows


@implements(stage_contracts.EXPERT_UP_D_W, gemm.ARRAYS)
def weight_gradient(
    d_hidden: Array, x: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    operands, shape = {"d_hidden": d_hidden, "x": x}, (x.shape[1], d_hidden.shape[1])
    return gemm.weight_gradient("expert_up", "d_w", operands, shape, dispatch, executor, version)
