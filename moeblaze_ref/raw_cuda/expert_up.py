"""The up-projection in raw CUDA: launches kernels_cuda/expert_up/."""

from collections.abc import Collection

from moeblaze_ref import stage_doors
from moeblaze_ref.raw_cuda import gemm
from moeblaze_ref.raw_cuda.runtime import Executor, executor_for
from moeblaze_ref.structures import HIDDEN, Array, Dispatch

RUNGS = {"1_naive": gemm.WIDE, "2_tiled": gemm.WIDE, "3_mma": gemm.NARROW}
DEFAULT_RUNG = "2_tiled"
_STORE = {"STORE_PROJECTIONS": "a", "STORE_Y_SWI": "y_swi"}


def forward(
    x: Array,
    w1: Array,
    w2: Array | None,
    dispatch: Dispatch,
    activation: str,
    stores: Collection[str] = HIDDEN,
    executor: Executor | None = None,
    rung: str = DEFAULT_RUNG,
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
    rung : str
        One of ``RUNGS``.

    Returns
    -------
    a, b, y_swi : array (R, h)
        b is None for the ungated activations. Sums are float32, rounded once.

    Raises
    ------
    ValueError, TypeError
        As `stage_doors.check_expert_up_forward`, or if the rung does not compute in this dtype.

    Notes
    -----
    MoEBlaze, sections 3.1 and 5 (Algorithm 1).
    """
    stage_doors.check_expert_up_forward(x, w1, w2, dispatch, activation, stores, gemm.WIDE)
    gemm.check_rung("expert_up", rung, RUNGS, x)
    executor = executor or executor_for(x)
    _, d, h = w1.shape
    gemm.check_widths(rung, d=d, h=h)
    stored = {"a": "a" in stores, "b": "a" in stores and w2 is not None, "y_swi": "y_swi" in stores}
    a, b, y_swi = (executor.empty((dispatch.R, h), str(x.dtype)) if stored[name] else None for name in HIDDEN)
    if dispatch.R:
        left_out = {macro: 0 for macro, name in _STORE.items() if not stored[name]}
        module = executor.load(f"expert_up/{rung}.cu", **gemm.constants(x, activation), **left_out)
        module.launch(
            "expert_up",
            **gemm.rows_launch(rung, dispatch, h, results=1 if w2 is None else 2),
            x=x,
            w1=w1,
            w2=gemm.or_nothing(executor, w2, x),
            expert_token_indices=dispatch.expert_token_indices,
            expert_token_offsets=dispatch.expert_token_offsets,
            a=gemm.or_nothing(executor, a, x),
            b=gemm.or_nothing(executor, b, x),
            y_swi=gemm.or_nothing(executor, y_swi, x),
            d=d,
            h=h,
        )
    return a, b, y_swi


def backward(
    d_a: Array,
    d_b: Array | None,
    x: Array,
    w1: Array,
    w2: Array | None,
    dispatch: Dispatch,
    executor: Executor | None = None,
    rung: str = DEFAULT_RUNG,
) -> tuple[Array, Array, Array | None]:
    """Gradients of x and of both weights; x is gathered again.

    Parameters
    ----------
    d_a : array (R, h)
        Gradient of a, in expert order.
    d_b : array (R, h) or None
        Gradient of b; None exactly if w2 is None.
    x, w1, w2, dispatch, executor, rung
        As in `forward`.

    Returns
    -------
    d_x : array (L, d)
        Summed over the slots of a token in their order. The tiled rungs write the R rows
        first, (R, d), and sum them in a second kernel.
    d_w1, d_w2 : array (E, d, h)
        d_w2 is None if w2 is None.

    Raises
    ------
    ValueError, TypeError
        As `stage_doors.check_expert_up_backward`, or if the rung does not compute in this dtype.

    Notes
    -----
    MoEBlaze, sections 3.2 and 5.
    """
    stage_doors.check_expert_up_backward(d_a, d_b, x, w1, w2, dispatch, gemm.WIDE)
    gemm.check_rung("expert_up", rung, RUNGS, x)
    gemm.check_widths(rung, d=w1.shape[1], h=w1.shape[2])
    if rung != "1_naive":
        gemm.check_slots(dispatch)
    executor = executor or executor_for(x)
    # These kernels depend on whether there is a gate, not on the activation.
    module = executor.load(f"expert_up/{rung}.cu", **gemm.constants(x, "silu" if w2 is None else "swiglu"))
    d_hidden = {"d_a": d_a, "d_b": gemm.or_nothing(executor, d_b, x)}
    d_x = _input_gradient(executor, module, rung, d_hidden, x, w1, w2, dispatch)
    return d_x, *_weight_gradients(executor, module, rung, d_hidden, x, w1, w2, dispatch)


def _input_gradient(executor, module, rung, d_hidden, x, w1, w2, dispatch):
    """d_x (L, d)."""
    _, d, h = w1.shape
    d_x = executor.empty(x.shape, str(x.dtype))
    if dispatch.R == 0:
        return d_x
    weights = {"w1": w1, "w2": gemm.or_nothing(executor, w2, x)}
    sizes = {"L": dispatch.L, "d": d, "k": dispatch.k}
    if rung == "1_naive":
        slots = {"token_expert_indices": dispatch.token_expert_indices, "token_index_map": dispatch.token_index_map}
        module.launch("d_x", **gemm.per_element(d_x.size), **d_hidden, **weights, **slots, d_x=d_x, h=h, **sizes)
        return d_x
    rows = executor.empty((dispatch.R, d), str(x.dtype))
    offsets = {"expert_token_offsets": dispatch.expert_token_offsets}
    module.launch(
        "d_x_rows", **gemm.rows_launch(rung, dispatch, d), **d_hidden, **weights, **offsets, rows=rows, d=d, h=h
    )
    sum_constants, warps = gemm.row_sums(rows, dispatch.L)
    sums = executor.load("expert_up/0_sum_rows.cu", **sum_constants)
    sums.launch("sum_rows", **warps, rows=rows, token_index_map=dispatch.token_index_map, d_x=d_x, **sizes)
    return d_x


def _weight_gradients(executor, module, rung, d_hidden, x, w1, w2, dispatch):
    """d_w1 and d_w2 (E, d, h); experts without rows get zeros."""
    E, d, h = w1.shape
    d_w1 = executor.empty(w1.shape, str(x.dtype))
    d_w2 = None if w2 is None else executor.empty(w2.shape, str(x.dtype))
    module.launch(
        "d_w",
        **gemm.weights_launch(rung, E, d, h, results=1 if w2 is None else 2),
        **d_hidden,
        x=x,
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        d_w1=d_w1,
        d_w2=gemm.or_nothing(executor, d_w2, x),
        d=d,
        h=h,
    )
    return d_w1, d_w2
