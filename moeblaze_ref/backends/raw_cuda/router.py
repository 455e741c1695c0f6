"""The router's matrix products beside the raw CUDA stages: plain dense products, which a library does best.

Source: MoEBlaze (arXiv 2601.05296), section 2: X Wg, with Wg of shape (d, E).
"""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.arrays import dtype_of
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for


@implements(stage_contracts.ROUTER, gemm.ARRAYS)
def forward(x: Array, wg: Array, executor: Executor | None = None) -> Array:
    """The logits are never rounded to a narrow dtype: two experts' logits may differ by less."""
    return (executor or executor_for(x)).matmul(x, wg, "float32")


@implements(stage_contracts.ROUTER_D_X, gemm.ARRAYS)
def input_gradient(d_logits: Array, wg: Array, d_x: Array | None = None, executor: Executor | None = None) -> Array:
    """d_logits is rounded to the dtype of wg for the product, whose sums are float32. The sum with d_x is rounded
    once.
    """
    executor, dtype = executor or executor_for(wg), dtype_of(wg)
    narrow = executor.cast(d_logits, dtype)
    return executor.matmul(narrow, wg.T, dtype) if d_x is None else executor.add_product(d_x, narrow, wg.T)


@implements(stage_contracts.ROUTER_D_WG, gemm.ARRAYS)
def weight_gradient(d_logits: Array, x: Array, executor: Executor | None = None) -> Array:
    """d_logits is rounded to the dtype of x for the product, whose sums are float32."""
    executor, dtype = executor or executor_for(x), dtype_of(x)
    return executor.matmul(x.T, executor.cast(d_logits, dtype), dtype)
