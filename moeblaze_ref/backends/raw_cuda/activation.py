"""The activation alone in raw CUDA: launches kernels_cuda/activation/."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.arrays import dtype_of, pitch_of, size_of, whole_rows
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for


@implements(stage_contracts.ACT, gemm.ARRAYS)
def act(a: Array, activation: str, executor: Executor | None = None) -> Array:
    """Return act(a) as a tensor of its own, which the expert kernels never need."""
    executor, dtype = executor or executor_for(a), dtype_of(a)
    act_a = gemm.like(executor, a)  # (R, h)
    if size_of(a):
        module = executor.load("activation/1_elementwise.cu", **gemm.constants(dtype, activation))
        (R, h), rows, act_rows = a.shape, whole_rows(a), whole_rows(act_a)
        module.launch("act", **gemm.per_element(R * h), a=rows, act_a=act_rows, R=R, h=h, pitch=pitch_of(a))
    return act_a
