"""Growth of the gaps between runs with replayed choices: by one rate in every run, or by a jump in one."""

import math
from collections.abc import Mapping, Sequence
from statistics import correlation, linear_regression
from typing import NamedTuple

from moeblaze_ref.lm.equal_loss import BOUND

LEFT = BOUND / 10  # a gap that is no longer the last bit of the loss
LEAST = 20  # steps that a rate of growth is computed from


class Drift(NamedTuple):
    """The growth of one run's gap."""

    since: int  #: the step, from 1, at which the gap of moeblaze first was above `LEFT`
    growth: float  #: doublings of the gap in a step: least squares of its logarithm, without the steps of equal losses
    correlation: float  #: of its signed gaps with those of moeblaze
    size: float  #: of its signed gaps, as a multiple of those of moeblaze: least squares


def drifts(losses: Mapping[str, Sequence[float]]) -> dict[str, Drift]:
    """Compare the growth of every run's gap to the oracle with that of moeblaze.

    Rounding grows by a rate that belongs to the trajectory, in the direction that grows fastest: every run then has the
    same rate, and the gaps of two runs differ by a factor alone. ``losses`` has a loss for each step of each run,
    ``oracle`` and ``moeblaze`` among them.

    Returns
    -------
    dict
        Of each run but the oracle whose gap changes; empty if there are no `LEAST` steps from the first gap of moeblaze
        above `LEFT` on.
    """
    signed = {
        name: [(loss - other) / other for loss, other in zip(run, losses["oracle"], strict=True)]
        for name, run in losses.items()
        if name != "oracle"
    }
    ours = signed["moeblaze"]
    left = next((number for number, gap in enumerate(ours) if abs(gap) > LEFT), len(ours))
    if len(ours) - left < LEAST:
        return {}
    later = {name: gaps[left:] for name, gaps in signed.items()}
    return {name: _drift(left + 1, gaps, ours[left:]) for name, gaps in later.items() if len({*gaps} - {0}) > 1}


def _drift(since: int, gaps: Sequence[float], ours: Sequence[float]) -> Drift:
    points = [(step, math.log2(abs(gap))) for step, gap in enumerate(gaps, start=since) if gap]
    growth = linear_regression(*zip(*points, strict=True)).slope
    size = linear_regression(ours, gaps, proportional=True).slope
    return Drift(since, growth, correlation(gaps, ours), size)
