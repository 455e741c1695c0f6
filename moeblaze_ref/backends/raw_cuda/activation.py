"""The activation alone in raw CUDA: launches kernels_cuda/activation/."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import size_of
from moeblaze_ref.core.config import ACTIVATIONS
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor, executor_for


def act(a: Array, activation: str, executor: Executor | None = None) -> Array:
    """The nonlinearity alone, without the product by b, as a tensor of its own: the expert kernels never need it.

    Parameters
    ----------
    a : array (R, h), float32, float16 or bfloat16
        Pre-activations x w1, finite.
    activation : str
        One of ``config.ACTIVATIONS``; a gated name stands for the nonlinearity inside it.
    executor : Executor, optional
        Default: by where ``a`` lives.

    Returns
    -------
    act_a : array (R, h)
        act(a), an array of the same kind.

    Raises
    ------
    ValueError
        If the name is unknown, the rank is not 2, or a value is not finite.
    TypeError
        If the dtype is not allowed.
    """
    checks.check_name("activation", activation, ACTIVATIONS)
    checks.check_tensor("a", a, {"R": None, "h": None}, gemm.WIDE)
    executor, dtype = executor or executor_for(a), checks.dtype_of(a)
    act_a = executor.empty(a.shape, dtype)  # (R, h)
    if elements := size_of(a):
        module = executor.load("activation/1_elementwise.cu", **gemm.constants(dtype, activation))
        module.launch("act", **gemm.per_element(elements), a=a, act_a=act_a, R=a.shape[0], h=a.shape[1])
    return act_a
