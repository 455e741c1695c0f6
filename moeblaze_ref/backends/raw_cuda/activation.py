"""The activation alone in raw CUDA: launches kernels_cuda/activation/."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.arrays import dtype_of, size_of
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for


@implements(stage_contracts.ACT, gemm.ARRAYS)
def act(a: Array, activation: str, executor: Executor | None = None) -> Array:
    """Return act(a) as a tensor of its own, which the expert kernels never need."""
    executor, dtype = executor or executor_for(a), dtype_of(a)
    act_a = executor.empty(a.shape, dtype)  # (R, h)
    if elements := size_of(a):
        module = executor.load("activation/1_elementwise.cu", **gemm.constants(dtype, activation))
        module.launch("act", **gemm.per_element(elements), a=a, act_a=act_a, R=a.shape[0], h=a.shape[1])
    return act_a
