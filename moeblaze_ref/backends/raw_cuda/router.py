"""The router's matrix products beside the raw CUDA stages: plain dense products, which a library does best.

Source: MoEBlaze (arXiv 2601.05296), section 2: X Wg, with Wg of shape (d, E).
"""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for

LOGIT_DTYPES = ("float32",)


def forward(x: Array, wg: Array, executor: Executor | None = None) -> Array:
    """Router logits.

    Parameters
    ----------
    x : array (L, d), float32, float16 or bfloat16
        Tokens, finite.
    wg : array (d, E)
    executor : Executor, optional
        Default: by where ``x`` lives.

    Returns
    -------
    logits : array (L, E), float32
        Never rounded to a narrow type: two experts' logits may differ by less.

    Raises
    ------
    ValueError
        If shapes disagree or a value is not finite.
    TypeError
        If a dtype is not allowed.
    """
    stage_contracts.check_router(x, wg, gemm.WIDE)
    return (executor or executor_for(x)).matmul(x, wg, "float32")


def input_gradient(d_logits: Array, wg: Array, executor: Executor | None = None) -> Array:
    """Gradient of x, through the router alone.

    Parameters
    ----------
    d_logits : array (L, E), float32
        Rounded to the dtype of wg for the product, whose sums are float32.
    wg : array (d, E), float32, float16 or bfloat16
    executor : Executor, optional
        Default: by where ``wg`` lives.

    Returns
    -------
    d_x : array (L, d)
        Of the dtype of wg.

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_router_input_gradient(d_logits, wg, gemm.WIDE, LOGIT_DTYPES)
    executor, dtype = executor or executor_for(wg), checks.dtype_of(wg)
    return executor.matmul(executor.cast(d_logits, dtype), wg.T, dtype)


def weight_gradient(d_logits: Array, x: Array, executor: Executor | None = None) -> Array:
    """Gradient of wg.

    Parameters
    ----------
    d_logits : array (L, E), float32
        Rounded to the dtype of x for the product, whose sums are float32.
    x, executor
        As in `forward`.

    Returns
    -------
    d_wg : array (d, E)
        Of the dtype of x.

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_router_weight_gradient(d_logits, x, gemm.WIDE, LOGIT_DTYPES)
    executor, dtype = executor or executor_for(x), checks.dtype_of(x)
    return executor.matmul(x.T, executor.cast(d_logits, dtype), dtype)
