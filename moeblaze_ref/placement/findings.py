"""Findings of a record of `moeblaze place`, in Markdown, for the pages on placement."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moeblaze_ref.core.documents import table
from moeblaze_ref.placement import simulate

Found = Mapping[str, Any]
PACKING, MEGATRON = "greedy", "contiguous"
OURS = "joint"
COPIED, REPLICAS = "dedup-copies", "eplb-replicas"
SEARCHED = ("moetuner", OURS)  # whose modelled times stand beside Megatron-LM's
CONSTANTS = ("token_s", "bandwidth", "exchange_s", "rest_s")  # that parallel.bench measures
TAILS = {
    "step_ms": "step",
    "token_tail_ms": "slowest GPUs, all layers",
    "transfer_tail_ms": "slowest pairs, all layers",
}


def summary(found: Found) -> str:
    """Medians, `joint`'s slowest split, who is faster than it, and the time saved beside Megatron-LM's placement."""
    return "\n\n".join([methods(found), slowest(found), beside_joint(found), saved(found)])


def methods(found: Found) -> str:
    """A line a method."""
    packing = _row(found, PACKING)["balance_mean"]
    columns = {
        "method": lambda row: f"`{row['method']}`",
        "load: mean": lambda row: f"{row['balance_mean']:.4f}",
        "over packing": lambda row: f"{row['balance_mean'] - packing:+.4f}",
        "worst layer": lambda row: f"{row['balance_worst']:.3f}",
        "cross-GPU": lambda row: f"{row['cross_share']:.1%}",
        "step, ms": lambda row: f"{row['step_ms']:#.5g}",
        "solved in s": lambda row: f"{row['solve_s']:.1f}",
        "gap": lambda row: _share(row["gap"]),
    }
    return _by_method(found, columns)


def home(found: Found, beside: str = PACKING) -> str:
    """A line a method, for a runtime that brings tokens home: medians over the splits, and the worst split's load.

    Loads and steps are compared with those of the method ``beside``, split by split.
    """
    others = _splits(found, beside)
    if not others:
        raise ValueError(f"the record has no {beside}, with which loads and steps are compared")

    def over(row, name="balance_mean"):
        return [trial[name] - others[seed][name] for seed, trial in _splits(found, row["method"]).items()]

    def slower(row):
        return sum(more > 0 for more in over(row, "runtime_ms"))

    columns = {
        "method": lambda row: f"`{row['method']}`",
        "D": lambda row: f"{row['distinct_gpus']:.3f}",
        "N": lambda row: f"{row['distinct_nodes']:.3f}",
        "load: mean": lambda row: f"{row['balance_mean']:.3f}",
        "worst layer": lambda row: f"{row['balance_worst']:.3f}",
        "batch of 256": lambda row: _load(row["batch_256"]),
        "of 16,384": lambda row: _load(row["batch_16384"]),
        f"over `{beside}`, median": lambda row: f"{statistics.median(over(row)):+.3f}",
        "worst split": lambda row: f"{max(over(row)):+.3f}",
        "cross-GPU": lambda row: f"{row['cross_share']:.1%}",
        "step, ms": lambda row: f"{row['runtime_ms']:#.5g}",
        f"slower than `{beside}` in splits": lambda row: f"{slower(row)} of {len(others)}",
        "solved in s": lambda row: f"{row['solve_s']:.1f}",
    }
    return _by_method(found, columns)


def copies(found: Found) -> str:
    """The table of `home` beside EPLB's replicas, and in how many splits our copies send less."""
    compared = home(found, REPLICAS)
    ours, theirs = (_splits(found, method) for method in (COPIED, REPLICAS))
    lower = {
        name: sum(trial[key] < theirs[seed][key] for seed, trial in ours.items())
        for name, key in (("D", "distinct_gpus"), ("N", "distinct_nodes"))
    }
    several = any(trial["distinct_nodes"] > 1 for trial in theirs.values())
    said = [f"{name} in {lower[name]} of {len(ours)} splits" for name in (("D", "N") if several else ("D",))]
    return f"{compared}\n\n`{COPIED}` has a lower {' and a lower '.join(said)} than `{REPLICAS}`."


def seeds(found: Found) -> str:
    """A line a method: the median, and in brackets the most by which two seeds of the search differ on a split."""
    columns = {"load": ("balance_mean", ".3f"), "D": ("distinct_gpus", ".3f"), "N": ("distinct_nodes", ".3f")}
    columns |= {
        "cross-GPU": ("cross_share", ".1%"),
        "step, ms": ("runtime_ms", ".2f"),
        "solved in s": ("solve_s", ".1f"),
    }
    lines = []
    for row in found["rows"]:
        spreads = {name: _spread(found, row["method"], name) for name, _ in columns.values()}
        cells = [f"{row[name]:{form}} ({spreads[name]:{form}})" for name, form in columns.values()]
        cut = sum(trial["cut"] for trial in found["splits"] if trial["method"] == row["method"])
        lines.append([f"`{row['method']}`", *cells, str(cut)])
    return table(["method", *columns, "cut"], lines)


def _spread(found: Found, method: str, name: str) -> float:
    """The most by which a number of a method differs between two seeds of the search, on any split."""
    of_split: dict[int, list[float]] = {}
    for trial in found["splits"]:
        if trial["method"] == method:
            of_split.setdefault(trial["seed"], []).append(trial[name])
    return max(max(numbers) - min(numbers) for numbers in of_split.values())


def growth(found: Sequence[Found]) -> str:
    """A line a record of a large model: what `dedup` took, beside EPLB's placement."""
    lines = []
    for one in found:
        ours, theirs = _row(one, "dedup"), _row(one, "eplb")
        less = [f"{1 - ours[name] / theirs[name]:.1%}" for name in ("distinct_gpus", "distinct_nodes")]
        over = f"{ours['balance_mean'] - theirs['balance_mean']:+.3f}"
        seconds, gigabytes = f"{ours['solve_s']:.1f}", f"{one['peak_bytes'] / 2**30:.2f}"
        lines.append([one["expand"], str(one["gpus"]), seconds, gigabytes, *less, over])
    names = ["layers x experts x k", "GPUs", "solved in s", "peak GiB", "D below `eplb`", "N below", "load over `eplb`"]
    return table(names, lines)


def _load(load: float | None) -> str:
    return "" if load is None else f"{load:.3f}"


def _by_method(found: Found, columns: Mapping[str, Callable[[Found], str]]) -> str:
    """A table of the medians, a column for each function of a row."""
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in found["rows"]])


def slowest(found: Found) -> str:
    """Return how long `joint` took on its slowest split: one sentence."""
    seconds = max(trial["solve_s"] for trial in _splits(found, OURS).values())
    return f"`{OURS}` took {seconds:.1f} seconds on its slowest split."


def beside_joint(found: Found) -> str:
    """How often each baseline's step is faster than `joint`'s on the held-out half, and which are by the medians."""
    ours, lines, faster = _splits(found, OURS), [], []
    for row in found["rows"]:
        if row["method"] == OURS:
            continue
        steps = [(trial["step_ms"], ours[seed]["step_ms"]) for seed, trial in _splits(found, row["method"]).items()]
        wins, ties = sum(theirs < step for theirs, step in steps), sum(theirs == step for theirs, step in steps)
        more = row["step_ms"] / _row(found, OURS)["step_ms"] - 1
        lines.append([f"`{row['method']}`", f"{more:+.2%}", f"{wins} of {len(steps)}", f"{ties}"])
        if more < 0:
            faster.append(f"`{row['method']}`")
    who = f"faster than `{OURS}`: {', '.join(faster)}" if faster else f"none is faster than `{OURS}`"
    names = ["held out", f"median step beside `{OURS}`'s", f"faster than `{OURS}` in splits", "as fast in"]
    return f"{table(names, lines)}\n\nBy the median step on the held-out halves, {who}."


def saved(found: Found, methods: Iterable[str] = SEARCHED) -> str:
    """The modelled times beside contiguous placement's: medians over the splits."""
    lines = [[f"`{method}`", *(f"{share:.1%}" for share in less(found, method).values())] for method in methods]
    return table(["by the model, less than contiguous by", *TAILS.values()], lines)


def saved_by_each(found: Found) -> str:
    """The table of `saved` for all other methods of a record."""
    return saved(found, [row["method"] for row in found["rows"] if row["method"] != MEGATRON])


def less(found: Found, method: str) -> dict[str, float]:
    """The share by which each modelled time is less than contiguous placement's, by its name in ``TAILS``."""
    return {name: 1 - _median(found, method, name) / _median(found, MEGATRON, name) for name in TAILS}


def scale(found: Found) -> str:
    """Table of the solving times at a size, and the gaps of the loads and the slowest pairs' times."""
    columns = {
        "method": lambda row: f"`{row['method']}`",
        "load: mean": lambda row: f"{row['balance_mean']:.4f}",
        "worst layer": lambda row: f"{row['balance_worst']:.4f}",
        "solved in s": lambda row: f"{row['solve_s']:.1f}",
        "load gap": lambda row: _share(row["load_gap"]),
        "gap: the larger of load's and pairs'": lambda row: _share(row["gap"]),
    }
    return _by_method(found, columns)


def constants(measured: Found) -> str:
    """Table of the model's constants in `moeblaze place`, beside those of a record of `parallel.bench`.

    Both are of experts of the same size.
    """
    gpus = measured["gpus"]
    four, as_many = (simulate.cluster("nvlink", G, measured["d"], measured["h"]) for G in (4, gpus))
    lines = [
        ["a routed row", f"{1e9 * four.token_s:.0f} ns", f"{1e9 * measured['token_s']:.0f} ns"],
        [f"a pair of {gpus} GPUs", _link(as_many.bandwidth), _link(measured["bandwidth"])],
        ["each pair of 4 GPUs, all at once", _link(four.bandwidth), "not here"],
        ["of an exchange, what no row adds to", "left out", f"{1e6 * measured['exchange_s']:.0f} us a layer"],
        ["router, dispatch, the host", "left out", f"{1e6 * measured['rest_s']:.0f} us a layer"],
    ]
    return table(["", "modelled", f"measured on {gpus} GPUs"], lines)


def allowed(found: Found) -> list[str]:
    """A line of a list on the time that a method had for a split, in records that say it."""
    return [f"- time limit: {found['time_limit']:g} s for a method on a split"] if "time_limit" in found else []


def _row(found: Found, method: str) -> Found:
    return next(row for row in found["rows"] if row["method"] == method)


def _splits(found: Found, method: str) -> dict[int, Found]:
    """A method's trials by their seeds."""
    return {trial["seed"]: trial for trial in found["splits"] if trial["method"] == method}


def _median(found: Found, method: str, name: str) -> float:
    return statistics.median(trial[name] for trial in _splits(found, method).values())


def _share(gap: float | None) -> str:
    return "" if gap is None else f"{gap:.3%}"


def _link(bandwidth) -> str:
    return f"{bandwidth[0][1] / 1e9:.0f} GB/s"
