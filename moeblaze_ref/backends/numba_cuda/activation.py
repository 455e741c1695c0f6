"""The activation between the two GEMMs: y_swi = act(a) * b, or act(a) without a gate, one element at a time.

Source: MoEBlaze (arXiv 2601.05296), section 5, for SwiGLU and its derivative. The functions below
run inside the expert kernels, on numbers that are in registers anyway. A kernel is compiled for
one of them, so no loop asks which activation it is.

Constants are float32 values. Numba takes a bare 1.0 as float64, and its products and sums become float64 too.
"""

import functools
import math

import numpy as np

from moeblaze_ref.backends.numba_cuda.runtime import ARRAYS, ZERO, cuda, per_element
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.config import GELU_CUBIC
from moeblaze_ref.core.contract import implements

HALF, ONE, TWO, THREE = (np.float32(value) for value in (0.5, 1.0, 2.0, 3.0))
CUBIC = np.float32(GELU_CUBIC)
ROOT_HALF = np.float32(math.sqrt(0.5))
DENSITY = np.float32(1.0 / math.sqrt(2.0 * math.pi))  # of the normal distribution at 0
STEEPNESS = np.float32(math.sqrt(8.0 / math.pi))


@cuda.jit(device=True)
def _sigmoid(a):
    decay = math.exp(-abs(a))  # in (0, 1]: cannot overflow
    return (ONE if a >= ZERO else decay) / (ONE + decay)


@cuda.jit(device=True)
def _silu(a):
    return a * _sigmoid(a)


@cuda.jit(device=True)
def _silu_slope(a):
    s = _sigmoid(a)
    return s * (ONE + a * (ONE - s))


@cuda.jit(device=True)
def _normal_cdf(a):
    return HALF * math.erfc(-ROOT_HALF * a)


@cuda.jit(device=True)
def _gelu(a):
    return a * _normal_cdf(a)


@cuda.jit(device=True)
def _gelu_slope(a):
    return _normal_cdf(a) + a * DENSITY * math.exp(-HALF * a * a)


# 0.5 (1 + tanh u) is the sigmoid of 2u: the tanh form of GELU is a SiLU of a bent argument.
@cuda.jit(device=True)
def _bent(a):
    return STEEPNESS * (a + CUBIC * a * a * a)


@cuda.jit(device=True)
def _gelu_tanh(a):
    return a * _sigmoid(_bent(a))


@cuda.jit(device=True)
def _gelu_tanh_slope(a):
    s = _sigmoid(_bent(a))
    return s * (ONE + a * (ONE - s) * STEEPNESS * (ONE + THREE * CUBIC * a * a))


@cuda.jit(device=True)
def _relu(a):
    return ZERO if a <= ZERO else a  # NaN stays NaN, as in torch


@cuda.jit(device=True)
def _relu_slope(a):
    return ONE if a > ZERO else ZERO  # 0 at the kink, as in torch


@cuda.jit(device=True)
def _relu2(a):
    return _relu(a) * _relu(a)


@cuda.jit(device=True)
def _relu2_slope(a):
    return TWO * _relu(a)


NONLINEARITY = {  # name: (act, its slope), device functions of one float32
    "silu": (_silu, _silu_slope),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "relu": (_relu, _relu_slope),
    "relu2": (_relu2, _relu2_slope),
    "swiglu": (_silu, _silu_slope),
    "geglu": (_gelu, _gelu_slope),
    "reglu": (_relu, _relu_slope),
}


@functools.cache
def act_kernel(activation):
    """The kernel of `act` for one activation, a constant in it."""
    nonlinearity, _ = NONLINEARITY[activation]

    @cuda.jit
    def kernel(a, act_a):
        """Apply the nonlinearity to every element.

        Source        MoEBlaze, section 5: SiLU(A)
        Grid          ceil(R h / THREADS) blocks of THREADS threads, a thread for each element
        Shared bytes  0
        Global bytes  reads 4 R h; writes 4 R h
        """
        element = cuda.grid(1)
        row, column = element // a.shape[1], element % a.shape[1]
        if row < a.shape[0]:
            act_a[row, column] = nonlinearity(a[row, column])

    return kernel


@implements(stage_contracts.ACT, ARRAYS)
def act(a, activation):
    """Return act(a) as a tensor of its own, which the expert kernels never need."""
    return per_element(act_kernel(activation), a, a.shape, a)
