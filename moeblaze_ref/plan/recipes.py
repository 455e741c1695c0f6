"""Recipes of training: in which dtypes weights, gradients and the optimizer's states are held."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeblaze_ref.core.config import ITEMSIZE
from moeblaze_ref.plan.parts import Weight

BLOCK = 256  # numbers that share a scale in an 8-bit state
SMALLEST = 4096  # numbers of the smallest weight whose states are held in 8 bits


@dataclass(frozen=True)
class Recipe:
    """Dtypes and optimizer of a run. Gradients have the dtype of the weights."""

    says: str  #: in words
    dtype: str  #: of weights and activations
    optimizer: str  #: "AdamW", "AdamW of 8 bits" or "Muon"
    master: bool = False  #: whether the optimizer works on a copy of the weights in float32

    @property
    def state_dtype(self) -> str:
        """Dtype of the optimizer's states, where they are not of 8 bits."""
        return "float32" if self.master else self.dtype


RECIPES = {
    "bf16-master": Recipe("weights and gradients in bfloat16; AdamW on a float32 copy", "bfloat16", "AdamW", True),
    "bf16": Recipe("weights, gradients and AdamW's moments in bfloat16", "bfloat16", "AdamW"),
    "fp32": Recipe("weights, gradients and AdamW's moments in float32", "float32", "AdamW"),
    "adamw8bit": Recipe("weights and gradients in bfloat16; AdamW's moments in 8 bits", "bfloat16", "AdamW of 8 bits"),
    "muon": Recipe("as bf16-master, but Muon for all matrices between embedding and head", "bfloat16", "Muon", True),
}


def weight_bytes(recipe: Recipe, count: int) -> int:
    """Bytes of ``count`` weights, or of their gradients."""
    return count * ITEMSIZE[recipe.dtype]


def master_bytes(recipe: Recipe, count: int) -> int:
    """Bytes of the float32 copy of ``count`` weights."""
    return count * ITEMSIZE["float32"] if recipe.master else 0


def state_bytes(recipe: Recipe, weight: Weight, count: int) -> int:
    """Bytes of the optimizer's states for ``count`` numbers of a weight; its counters of steps are not counted.

    AdamW has two moments. In 8 bits each number of a moment is a byte, and 256 numbers share a float32 scale; a weight
    of fewer than 4,096 numbers has float32 moments (bitsandbytes 0.50). Muon has one momentum for a matrix, and AdamW
    serves the rest (torch.optim.Muon, which takes each expert's matrix by itself).
    """
    if recipe.optimizer == "AdamW of 8 bits":
        if count < SMALLEST:
            return 2 * count * ITEMSIZE["float32"]
        return 2 * (count + ITEMSIZE["float32"] * math.ceil(count / BLOCK))
    moments = 1 if recipe.optimizer == "Muon" and is_matrix(weight) else 2
    return moments * count * ITEMSIZE[recipe.state_dtype]


def is_matrix(weight: Weight) -> bool:
    """Return True if Muon trains it: a matrix, or one for each expert, but neither the embedding nor the head."""
    is_bias = weight.name.startswith("b") or "bias" in weight.name
    return len(weight.dims) >= 2 and not is_bias and weight.name not in ("embedding", "head")


def work_bytes(recipe: Recipe, counts: Sequence[int]) -> int:
    """Bytes that the optimizer's step needs beside its states: the gradient of one weight at a time in float32."""
    return max(counts, default=0) * ITEMSIZE["float32"] if recipe.master else 0
