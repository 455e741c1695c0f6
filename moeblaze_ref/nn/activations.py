"""The activations in plain torch."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.core.config import ACTIVATIONS

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
    """act(a) * b, or act(a): (R, h)."""
    act_a = ACTIVATION[activation](a)
    return act_a if b is None else act_a * b
