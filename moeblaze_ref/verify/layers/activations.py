"""Activations with parameters."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from moeblaze_ref.core.config import CLAMPED_ALPHA, CLAMPED_LIMIT
from moeblaze_ref.nn.activations import clamped_swiglu


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's activation: g * sigmoid(alpha * g) * (u + summand), for clamped g and u.

    Parameters
    ----------
    alpha : float
        Factor in the sigmoid.
    limit : float
        Largest g, and largest absolute u.
    summand : float
        Added to u.
    least : float
        Smallest g.

    Notes
    -----
    Read in ``models/gpt_oss/modeling_gpt_oss.py`` of transformers 5.23.
    """

    alpha: float = CLAMPED_ALPHA
    limit: float = CLAMPED_LIMIT
    summand: float = 1.0
    least: float = -inf

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The hidden rows (R, h) for gate (R, h) and up (R, h)."""
        return clamped_swiglu(gate, up, *astuple(self))

    def near_a_limit(self, gate: Tensor, up: Tensor, relative: float) -> Tensor:
        """Where a number is so close to a limit that a rounding error could clamp it or not: (R, h) bool."""
        limits = (gate, self.limit), (gate, self.least), (up.abs(), self.limit)
        near = [(number - limit).abs() <= relative * (1 + abs(limit)) for number, limit in limits if isfinite(limit)]
        return torch.stack(near).any(0) if near else torch.zeros_like(gate, dtype=torch.bool)

    def alternatives(self) -> Iterator["ClampedSwiglu"]:
        """What it is taken for: one constant is missing, or g is clamped on both sides."""
        yield replace(self, alpha=1.0)
        yield replace(self, limit=inf)
        yield replace(self, summand=0.0)
        yield replace(self, least=-self.limit)
        yield ClampedSwiglu(1.0, inf, 0.0)
