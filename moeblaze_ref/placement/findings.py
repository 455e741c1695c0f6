"""What a record of `moeblaze place` says, in Markdown, for docs/placement.md."""

import statistics
from collections.abc import Mapping
from typing import Any

from moeblaze_ref.documents import table

Found = Mapping[str, Any]
PACKING, MEGATRON = "greedy", "contiguous"
LOAD_OVER_PACKING = {"moetuner": 0.01, "joint": 0.03}  # what is aimed at: load at most this above packing's
CROSSINGS = 0.58  # and at most so many of joint's transitions change GPU
TAILS = {
    "step_ms": "step",
    "token_tail_ms": "slowest GPUs, all layers",
    "transfer_tail_ms": "slowest pairs, all layers",
}


def summary(found: Found) -> str:
    """Medians of every method, what was aimed at, and the time that is saved beside Megatron-LM's placement."""
    return "\n\n".join([methods(found), aims(found), saved(found)])


def methods(found: Found) -> str:
    """A line a method."""
    names = ["method", "load: mean", "over packing", "worst layer", "cross-GPU", "step, ms", "solved in s"]
    packing = _row(found, PACKING)["balance_mean"]
    lines = [
        [
            f"`{row['method']}`",
            f"{row['balance_mean']:.4f}",
            f"{row['balance_mean'] - packing:+.4f}",
            f"{row['balance_worst']:.3f}",
            f"{row['cross_share']:.1%}",
            f"{row['step_ms']:.3f}",
            f"{row['solve_s']:.1f}",
        ]
        for row in found["rows"]
    ]
    return table(names, lines)


def aims(found: Found) -> str:
    """Each aim, what was found, and whether it is met."""
    packing = _row(found, PACKING)
    lines = []
    for method, bound in LOAD_OVER_PACKING.items():
        over = _row(found, method)["balance_mean"] - packing["balance_mean"]
        lines.append([f"`{method}`: load over packing's", f"{over:+.4f}", f"{bound:+.2f}", _met(over <= bound)])
    bounds = {"moetuner": packing["cross_share"], "joint": CROSSINGS}
    for method, bound in bounds.items():
        share = _row(found, method)["cross_share"]
        lines.append([f"`{method}`: transitions that change GPU", f"{share:.1%}", f"{bound:.1%}", _met(share <= bound)])
    return table(["aim", "found", "at most", ""], lines)


def saved(found: Found) -> str:
    """The modelled times beside contiguous placement's: medians over the splits."""
    lines = []
    for method in LOAD_OVER_PACKING:
        shares = [1 - _median(found, method, name) / _median(found, MEGATRON, name) for name in TAILS]
        lines.append([f"`{method}`", *(f"{share:.1%}" for share in shares)])
    return table(["less than contiguous by", *TAILS.values()], lines)


def scale(found: Found) -> str:
    """What solving took at a large model's size, and how far the loads may be from the best."""
    names = ["method", "load: mean", "worst layer", "solved in s", "load gap", "gap of both programs"]
    lines = [
        [
            f"`{row['method']}`",
            f"{row['balance_mean']:.4f}",
            f"{row['balance_worst']:.4f}",
            f"{row['solve_s']:.1f}",
            _share(row["load_gap"]),
            _share(row["gap"]),
        ]
        for row in found["rows"]
    ]
    return table(names, lines)


def _row(found: Found, method: str) -> Found:
    return next(row for row in found["rows"] if row["method"] == method)


def _median(found: Found, method: str, name: str) -> float:
    return statistics.median(trial[name] for trial in found["splits"] if trial["method"] == method)


def _share(gap: float | None) -> str:
    return "" if gap is None else f"{gap:.3%}"


def _met(passed: bool) -> str:
    return "met" if passed else "MISSED"
