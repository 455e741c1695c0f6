"""The activations in plain torch."""

from collections.abc import Callable
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.core.config import ACTIVATIONS, CLAMPED_ALPHA, CLAMPED_LIMIT, CLAMPED_SWIGLU

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda a: F.relu(a).square(),
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
}
assert ACTIVATION.keys() == set(ACTIVATIONS)


def activate(a: Tensor, b: Tensor | None, activation: str) -> Tensor:
    """act(a) * b, or act(a), or `clamped_swiglu`: (R, h)."""
    if activation == CLAMPED_SWIGLU:
        assert b is not None
        return clamped_swiglu(a, b)
    act_a = ACTIVATION[activation](a)
    return act_a if b is None else act_a * b


def clamped_swiglu(
    gate: Tensor,
    up: Tensor,
    alpha: float = CLAMPED_ALPHA,
    limit: float = CLAMPED_LIMIT,
    summand: float = 1.0,
    least: float = -inf,
) -> Tensor:
    """gpt-oss's activation: g * sigmoid(alpha * g) * (u + summand), for g in least..limit and u in -limit..limit."""
    gate, up = gate.clamp(least, limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + summand)
