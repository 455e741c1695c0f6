"""The activation between the two GEMMs: y_swi = act(a) * b, or act(a) without a gate; clamped_swiglu changes b too.

Source: MoEBlaze (arXiv 2601.05296), section 5, for SwiGLU and its derivative. Each
nonlinearity is written beside its slope; the gated names reuse them.
"""

import math

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.config import CLAMPED_ALPHA, CLAMPED_LIMIT, CLAMPED_SWIGLU, GELU_CUBIC
from moeblaze_ref.core.contract import implements

_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # otypes: without it, empty arrays raise


def _sigmoid(a):
    decay = np.exp(-np.abs(a))  # in (0, 1]: cannot overflow, and stays exact far below zero
    return np.where(a >= 0, 1.0, decay) / (1.0 + decay)


def _silu(a):
    return a * _sigmoid(a)


def _silu_slope(a):
    s = _sigmoid(a)
    return s * (1.0 + a * (1.0 - s))


def _normal_cdf(a):
    return 0.5 * _erfc(a * -math.sqrt(0.5)).astype(a.dtype)


def _gelu(a):
    return a * _normal_cdf(a)


def _gelu_slope(a):
    density = np.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
    return _normal_cdf(a) + a * density


# 0.5 (1 + tanh u) is the sigmoid of 2u: the tanh form of GELU is a SiLU of a bent argument.
def _gelu_tanh_argument(a):
    return math.sqrt(8.0 / math.pi) * (a + GELU_CUBIC * a * a * a)


def _gelu_tanh(a):
    return a * _sigmoid(_gelu_tanh_argument(a))


def _gelu_tanh_slope(a):
    s = _sigmoid(_gelu_tanh_argument(a))
    argument_slope = math.sqrt(8.0 / math.pi) * (1.0 + 3.0 * GELU_CUBIC * a * a)
    return s * (1.0 + a * (1.0 - s) * argument_slope)


def _relu(a):
    return np.maximum(a, 0.0)


def _relu_slope(a):
    return (a > 0).astype(a.dtype)  # 0 at the kink, as in torch


def _relu2(a):
    return np.square(_relu(a))


def _relu2_slope(a):
    return 2.0 * _relu(a)


# gpt-oss: a gradient passes at a limit, as in torch.
def _clamped_silu(a):
    clamped = np.minimum(a, CLAMPED_LIMIT)
    return clamped * _sigmoid(CLAMPED_ALPHA * clamped)


def _clamped_silu_slope(a):
    s = _sigmoid(CLAMPED_ALPHA * a)
    return np.where(a > CLAMPED_LIMIT, 0.0, s * (1.0 + CLAMPED_ALPHA * a * (1.0 - s))).astype(a.dtype)


def _factor(b, activation):
    """Return the factor of act(a)."""
    return np.clip(b, -CLAMPED_LIMIT, CLAMPED_LIMIT) + 1.0 if activation == CLAMPED_SWIGLU else b


def _factor_slope(b, activation):
    return (np.abs(b) <= CLAMPED_LIMIT).astype(b.dtype) if activation == CLAMPED_SWIGLU else np.ones_like(b)


_NONLINEARITY = {  # name: (act, its slope)
    "silu": (_silu, _silu_slope),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "relu": (_relu, _relu_slope),
    "relu2": (_relu2, _relu2_slope),
    "swiglu": (_silu, _silu_slope),
    "geglu": (_gelu, _gelu_slope),
    "reglu": (_relu, _relu_slope),
    CLAMPED_SWIGLU: (_clamped_silu, _clamped_silu_slope),
}


@implements(stage_contracts.ACT, ARRAYS)
def act(a, activation):
    return _NONLINEARITY[activation][0](a)


@implements(stage_contracts.ACTIVATE, ARRAYS)
def forward(a, b, activation):
    act_a = _NONLINEARITY[activation][0](a)  # (R, h)
    return act_a if b is None else act_a * _factor(b, activation)


@implements(stage_contracts.ACTIVATE_BACKWARD, ARRAYS)
def backward(d_y_swi, a, b, activation):
    nonlinearity, slope = _NONLINEARITY[activation]
    if b is None:
        return d_y_swi * slope(a), None
    d_a = d_y_swi * _factor(b, activation) * slope(a)  # (R, h)
    return d_a, d_y_swi * nonlinearity(a) * _factor_slope(b, activation)  # (R, h), (R, h)
