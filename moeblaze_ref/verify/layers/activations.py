"""Activations with parameters."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from math import inf

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

    def with_limits_moved(self, relative: float) -> Callable[[Tensor, Tensor], Tensor]:
        """The same function, whose derivative is that of one with other limits: what a rounding error may make of it.

        Only numbers between a limit and the moved one have another derivative.
        """
        factor = 1 + relative

        def clamped(number: Tensor, least: float, limit: float) -> Tensor:
            moved = number.clamp(least * factor, limit * factor)
            return moved + (number.clamp(least, limit) - moved).detach()

        def moved(gate: Tensor, up: Tensor) -> Tensor:
            inner = replace(self, limit=inf, least=-inf)
            return inner(clamped(gate, self.least, self.limit), clamped(up, -self.limit, self.limit))

        return moved

    def alternatives(self) -> Iterator["ClampedSwiglu"]:
        """Yield wrong variants of the activation: one constant is missing, or g is clamped on both sides."""
        yield replace(self, alpha=1.0)
        yield replace(self, limit=inf)
        yield replace(self, summand=0.0)
        yield replace(self, least=-self.limit)
        yield ClampedSwiglu(1.0, inf, 0.0)
