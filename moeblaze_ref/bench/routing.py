"""Tokens that a given router sends where a wanted routing sends them, so that the timed step is the same for each."""

import math

import torch
from torch import Tensor

from moeblaze_ref.core import checks

# The exponent of the popularity of the experts by rank: 0 is the same for all.
ROUTINGS = {"uniform": 0.0, "zipf": 1.0}
NUMBERED = "zipf:"  # before an exponent of the user's


def exponent_of(routing: str) -> float:
    """Return the exponent of a routing: one of ``ROUTINGS``, or such as "zipf:1.5".

    Raises
    ------
    ValueError
        If there is no such routing, or the exponent is below zero or no finite number.
    """
    if not routing.startswith(NUMBERED):
        return ROUTINGS[checks.check_name("routing", routing, ROUTINGS)]
    try:
        exponent = float(routing.removeprefix(NUMBERED))
    except ValueError:
        exponent = math.nan
    if not 0 <= exponent < math.inf:
        raise ValueError(f"routing is {routing!r}, but what follows {NUMBERED!r} must be a finite number >= 0")
    return exponent


def wanted_logits(num_tokens: int, num_experts: int, routing: str, device: torch.device | str = "cpu") -> Tensor:
    """Logits (L, E) float32 whose top k draw k distinct experts by their popularity (Gumbel top k).

    ``routing`` is as of `exponent_of`: expert e is popular in proportion to 1 / (e + 1) to that power. The logits are
    made on ``device``, from torch's generator.
    """
    exponent = exponent_of(routing)
    rank = torch.arange(1, num_experts + 1, device=device, dtype=torch.float32)  # (E,)
    noise = -torch.empty(num_tokens, num_experts, device=device).exponential_().clamp_min_(1e-30).log()  # (L, E) Gumbel
    return noise - exponent * rank.log()


def steer(x: Tensor, wg: Tensor, logits: Tensor) -> Tensor:
    """The tokens nearest to x that the router wg gives these logits.

    Parameters
    ----------
    x : Tensor (L, d)
    wg : Tensor (d, E)
        Of full column rank, so E <= d.
    logits : Tensor (L, E), float32

    Returns
    -------
    Tensor (L, d)
        In the dtype of x, to whose rounding the logits are right.

    Raises
    ------
    ValueError
        If E > d.
    """
    d, num_experts = wg.shape
    if num_experts > d:
        raise ValueError(f"E is {num_experts}, but tokens of width d={d} have only {d} logits to choose")
    wide_x, wide_wg = x.float(), wg.float()
    missing = logits - wide_x @ wide_wg  # (L, E)
    return (wide_x + missing @ torch.linalg.pinv(wide_wg)).to(x.dtype)
