"""The up-projection in raw CUDA: launches kernels_cuda/expert_up/."""

from collections.abc import Collection

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import HIDDEN, Array, Dispatch
from moeblaze_ref.runtime import Executor, executor_for

VERSIONS = gemm.VERSIONS
# Of the forward: those and the teaching versions, in the order of the series.
FORWARD_VERSIONS = dict(sorted((VERSIONS | dict.fromkeys(gemm.TEACHING, gemm.NARROW)).items()))
DEFAULT_VERSION = "2_tiled"
_STORE = {"STORE_PROJECTIONS": "a", "STORE_Y_SWI": "y_swi"}


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
    """Both projections of every routed row and its hidden activation, in expert order.

    Parameters
    ----------
    x : array (L, d), float32, float16 or bfloat16
        Tokens, never permuted: rows are gathered inside the kernel.
    w1 : array (E, d, h)
    w2 : array (E, d, h) or None
        None exactly for the ungated activations.
    dispatch : Dispatch
    activation : str
        One of ``config.ACTIVATIONS``; a compile-time constant of the kernel.
    stores : collection of str
        Which of a (and b with it) and y_swi to write, also at compile time; the others are None.
    executor : Executor, optional
        Default: by where ``x`` lives.
    version : str
        One of ``FORWARD_VERSIONS``. ``3_mma_tf32`` rounds its operands to 10 bits of mantissa; nothing chooses it by
        itself, nor the versions between ``3_mma`` and Hopper's, which have no backward.

    Returns
    -------
    a, b, y_swi : array (R, h)
        b is None for the ungated activations. Sums are float32, rounded once.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_up_forward`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, sections 3.1 and 5 (Algorithm 1).
    """
    stage_contracts.check_expert_up_forward(x, w1, w2, dispatch, activation, stores, gemm.WIDE)
    _, d, h = w1.shape
    dtype = gemm.check_version("expert_up", version, FORWARD_VERSIONS, x, ("x", x), d=d, h=h)
    executor = executor or executor_for(x)
    stored = {"a": "a" in stores, "b": "a" in stores and w2 is not None, "y_swi": "y_swi" in stores}
    a, b, y_swi = [executor.empty((dispatch.R, h), dtype) if stored[name] else None for name in HIDDEN]
    if dispatch.R:
        left_out = {macro: 0 for macro, name in _STORE.items() if not stored[name]}
        tile = tiles.choose(executor, version, "expert_up", dispatch.R, dispatch.E, d, h)
        module = executor.load(
            gemm.file_of("expert_up", version), **gemm.constants(dtype, activation, tile), **left_out
        )
        module.launch(
            "expert_up",
            **gemm.rows_launch(executor, version, dispatch, h, tile, results=1 if w2 is None else 2, crowded=False),
            x=x,
            w1=gemm.operand(executor, version, w1, gemm.WEIGHTS_BOX),
            w2=gemm.second_operand(executor, version, w2, w1, gemm.WEIGHTS_BOX),
            expert_token_indices=dispatch.expert_token_indices,
            expert_token_offsets=dispatch.expert_token_offsets,
            a=gemm.or_nothing(executor, a, x),
            b=gemm.or_nothing(executor, b, x),
            y_swi=gemm.or_nothing(executor, y_swi, x),
            d=d,
            h=h,
        )
    return a, b, y_swi


def input_gradient(
    d_a: Array,
    d_b: Array | None,
    w1: Array,
    w2: Array | None,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """Gradient of x, summed over the experts of each token.

    Parameters
    ----------
    d_a : array (R, h), float32, float16 or bfloat16
        Gradient of a, in expert order.
    d_b : array (R, h) or None
        Gradient of b; None exactly if w2 is None.
    w1, w2, dispatch, executor
        As in `forward`.
    version : str
        One of ``VERSIONS``.

    Returns
    -------
    d_x : array (L, d)
        Summed over the slots of a token in their order. The tiled versions write the R rows first, (R, d) or one half
        of the columns after the other (`gemm.parts_of_rows`), and sum them in a second kernel; the rows are freed on
        return.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_up_input_gradient`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, sections 3.2 and 5.
    """
    stage_contracts.check_expert_up_input_gradient(d_a, d_b, w1, w2, dispatch, gemm.WIDE)
    _, d, h = w1.shape
    dtype = gemm.check_version("expert_up", version, VERSIONS, d_a, d=d, h=h)
    executor = executor or executor_for(d_a)
    d_x = executor.empty((dispatch.L, d), dtype)
    if dispatch.R == 0:
        return d_x
    tile = tiles.choose(executor, version, "d_x_rows", dispatch.R, dispatch.E, d, h)
    # The kernels depend on whether there is a gate, not on the activation.
    module = executor.load(
        gemm.file_of("expert_up", version), **gemm.constants(dtype, "silu" if w2 is None else "swiglu", tile)
    )
    if version == "1_naive":
        _sum_on_the_fly(executor, module, (d_a, d_b, w1, w2), dispatch, d_x)
        return d_x
    gemm.check_slots(dispatch)
    for first, width in gemm.parts_of_rows(version, dispatch.R, d, h):
        _sum_stored_rows(executor, module, version, tile, (d_a, d_b, w1, w2), dispatch, d_x, first, width)
    return d_x


def _sum_on_the_fly(executor, module, operands, dispatch, d_x):
    """d_x by one kernel, a thread for each of its elements."""
    d_a, d_b, w1, w2 = operands
    _, d, h = w1.shape
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


def _sum_stored_rows(executor, module, version, tile, operands, dispatch, d_x, first, width):
    """``width`` columns of d_x, from ``first`` on, by a product of tiles and a sum; its rows are freed on return."""
    d_a, d_b, w1, w2 = operands
    dtype, pitch = checks.dtype_of(d_a), d_x.shape[1]
    if width < pitch:
        w1, w2 = [w if w is None else w[:, first : first + width] for w in (w1, w2)]  # (E, width, h)
    rows = executor.empty((dispatch.R, width), dtype)
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
        h=w1.shape[2],
    )
    gemm.sum_rows(executor, rows, dispatch.token_index_map, dispatch.k, d_x, first=first)


def weight_gradient(
    d_hidden: Array, x: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """Gradient of w1 from that of a, or of w2 from that of b; x is gathered again.

    Parameters
    ----------
    d_hidden : array (R, h), float32, float16 or bfloat16
        d_a or d_b, in expert order.
    x, dispatch, executor
        As in `forward`.
    version : str
        One of ``VERSIONS``.

    Returns
    -------
    d_w : array (E, d, h)
        d_w1 or d_w2; zeros for an expert without rows.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_up_weight_gradient`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, section 5. One launch for each weight, so that d_a can be freed before d_w2 is born.
    """
    stage_contracts.check_expert_up_weight_gradient(d_hidden, x, dispatch, gemm.WIDE)
    E, d, h = dispatch.E, x.shape[1], d_hidden.shape[1]
    dtype = gemm.check_version("expert_up", version, VERSIONS, x, d=d, h=h)
    executor = executor or executor_for(x)
    if dispatch.R == 0:
        return executor.full((E, d, h), dtype, 0)
    d_w = executor.empty((E, d, h), dtype)
    tile = tiles.choose(executor, version, "d_w", dispatch.R, E, d, h)
    # The kernel does not depend on the activation.
    module = executor.load(gemm.file_of("expert_up", version), **gemm.constants(dtype, "swiglu", tile))
    module.launch(
        "d_w",
        **gemm.weights_launch(executor, version, E, d, h, tile),
        **gemm.mapped_too(executor, version, "d_hidden", d_hidden),
        d_hidden=d_hidden,
        x=x,
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        d_w=d_w,
        d=d,
        h=h,
    )
    return d_w
