"""Performance targets that were set before the kernels existed, beside what was reached."""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from moeblaze_ref.bench import LAYER_PRESETS, findings, results
from moeblaze_ref.bench.roofline import INDEX
from moeblaze_ref.bench.timed_systems import GRAPHED, OURS
from moeblaze_ref.core.config import ITEMSIZE, MoEConfig, preset
from moeblaze_ref.core.units import GIB

BASELINE = "grouped_mm_compiled"
FASTER = {"conf3": 1.30, "conf4": 1.18, "conf1": 1.35, "qwen3": 1.65, "mixtral": 1.12, "fine-grained": 2.2}
PERCENT = {"conf3": 85, "conf4": 85, "mixtral": 85, "qwen3": 78, "fine-grained": 60}
PEAK_GIB = {"conf3": 7.0, "qwen3": 2.3, "mixtral": 4.1}
RECOMPUTED, SKEWED = 1.30, 1.10  # times as long as without
SPARSE, DENSE = "megablocks", "grouped_mm"
AS_LONG = {"conf4": 1.25}  # times as long as grouped_mm a step of MegaBlocks takes, at most
# Of stages beside torch, on their fastest version: the least percent of the roofline, and the most microseconds.
STAGES = {("dispatch", "qwen3, L=1,048,576"): 100 / 3, ("gating", "qwen3, L=262,144"): 60, ("combine", "qwen3"): 80}
MICROSECONDS = {("dispatch", "conf4"): 20}

Row = dict[str, Any]


class Target(NamedTuple):
    """A bound, and how near to it each run came."""

    what: str
    sign: int  # 1 if the bound is the least that was wanted, -1 if it is the most
    bound: float
    reached: list[float]  # empty if nothing was measured

    @property
    def worst(self) -> float | None:
        """The worst value over the runs; None without runs."""
        if not self.reached:
            return None
        return min(self.reached) if self.sign > 0 else max(self.reached)

    @property
    def missing(self) -> float | None:
        """Distance to the bound as a fraction of it; zero or less if the target is met."""
        return None if self.worst is None else self.sign * (self.bound - self.worst) / self.bound


def targets(found: results.Result, others: results.Result | None = None) -> list[Target]:
    """Every target, also those that no result file has a row for.

    Parameters
    ----------
    found : dict
        The benchmark's file.
    others : dict, optional
        That of the other systems, if there is one.
    """
    layers = _ours(found)
    minimal, inputs = (_under(policy, layers) for policy in ("minimal", "inputs"))
    listed = [
        *_of_presets(FASTER, f"times as fast as `{BASELINE}`", 1, minimal, lambda row: row["ratio_to"].get(BASELINE)),
        *_faster(findings.over_baselines(found, GRAPHED), " as launched, ours graphed"),
        *_faster(findings.over_baselines_as_graphs(found), ", both as CUDA graphs"),
        *_of_presets(PERCENT, "% of cuBLAS", 1, minimal, itemgetter("pct_of_cublas")),
        *_of_presets(PEAK_GIB, "peak, GiB", -1, minimal, lambda row: row["peak_bytes"] / GIB),
        *_of_presets(_kept_gib(hidden=2), "kept by `minimal`, GiB", -1, minimal, lambda row: row["kept_bytes"] / GIB),
        *_of_presets(_kept_gib(hidden=0), "kept by `inputs`, GiB", -1, inputs, lambda row: row["kept_bytes"] / GIB),
        *_recomputed([*minimal, *inputs], "step_ms"),
        *_recomputed([*minimal, *inputs], "graph_ms", ", both as CUDA graphs"),
        *_of_presets(
            dict.fromkeys(LAYER_PRESETS, SKEWED),
            "Zipf over uniform routing",
            -1,
            layers,
            itemgetter("time_over_uniform"),
        ),
        *_of_presets(AS_LONG, f"`{SPARSE}` over `{DENSE}`", -1, _sparse(found, others), _over_dense),
    ]
    for (stage, name), percent in STAGES.items():
        listed += _of_presets(
            {name: percent}, f"{stage}, % of its roofline", 1, _stage(found, stage), itemgetter("pct_of_roofline")
        )
    for (stage, name), most in MICROSECONDS.items():
        rows = _stage(found, stage)
        listed += _of_presets({name: most}, f"{stage}, microseconds", -1, rows, lambda row: 1e3 * row["step_ms"])
    return listed


def _ours(found: results.Result) -> list[Row]:
    return [row for row in results.rows_of(found, "layer") if row["system"] == OURS]


def _sparse(found: results.Result, others: results.Result | None) -> list[Row]:
    """The rows of MegaBlocks on uniform routing."""
    rows = [row for file in (found, others) if file for row in results.rows_of(file, "layer")]
    return [row for row in rows if row["system"] == SPARSE and row["routing"] == "uniform"]


def _over_dense(row: Row) -> float | None:
    return 1 / row["ratio_to"][DENSE] if DENSE in row["ratio_to"] else None


def _under(policy: str, rows: Iterable[Row]) -> list[Row]:
    """The rows of a policy on uniform routing."""
    return [row for row in rows if row["policy"] == policy and row["routing"] == "uniform"]


def _kept_gib(hidden: int) -> dict[str, float]:
    """GiB saved for backward, per preset: x, ``hidden`` hidden tensors, gates and lists."""
    return {name: _kept_bytes(preset(name).config, hidden) / GIB for name in LAYER_PRESETS}


def _kept_bytes(config: MoEConfig, hidden: int) -> int:
    tensors = config.L * config.d + hidden * config.R * config.h
    lists = 4 * config.R + config.E + 1  # the gates, three lists of the slots, and the offsets
    return tensors * config.itemsize + lists * INDEX


def _of_presets(
    bounds: dict[str, float], what: str, sign: int, rows: Iterable[Row], value: Callable[[Row], float | None]
) -> list[Target]:
    """A target for each preset; rows without a value do not count."""
    values = [(row["preset"], value(row)) for row in rows]
    return [
        Target(f"{name}: {what}", sign, bound, [number for other, number in values if other == name and number])
        for name, bound in bounds.items()
    ]


def _recomputed(rows: Iterable[Row], time_of: str, how: str = "") -> list[Target]:
    """The time of the policy `inputs` over that of `minimal`, in each run that has both; large layers have no graph."""
    times = {(row["run"], row["preset"], row["policy"]): row[time_of] for row in rows if row.get(time_of)}
    ratios: dict[str, list[float]] = {name: [] for name in LAYER_PRESETS}
    for (run, name, policy), time in times.items():
        if policy == "inputs" and name in ratios and (run, name, "minimal") in times:
            ratios[name].append(time / times[run, name, "minimal"])
    return [
        Target(f"{name}: `inputs` over `minimal`{how}", -1, RECOMPUTED, of_one)
        for name, of_one in ratios.items()
        if of_one or not how
    ]


def _faster(ratios: dict[tuple[str, str, str], list[float]], how: str) -> list[Target]:
    """The targets of `FASTER`, of the layers that were timed in this other way too."""
    return [
        Target(f"{name}: times as fast as `{BASELINE}`{how}", 1, bound, ratios[name, "minimal", BASELINE])
        for name, bound in FASTER.items()
        if (name, "minimal", BASELINE) in ratios
    ]


def _stage(found: results.Result, stage: str) -> list[Row]:
    """Return the rows of our fastest version of a stage, one a run and preset."""
    best: dict[tuple[int, str], Row] = {}
    for row in results.rows_of(found, stage):
        key = row["run"], row["preset"]
        if row["system"] == OURS:
            best[key] = min(row, best.get(key, row), key=itemgetter("step_ms"))
    return list(best.values())


def table(found: results.Result, others: results.Result | None = None) -> str:
    """Table of every target, its worst run and by how much that misses it, and notes on peaks and products.

    Those that are missed by most come first; those that were not measured stand before those that are reached.
    """
    lines = [
        f"| {target.what} | {'at least' if target.sign > 0 else 'at most'} {target.bound:.4g} | {_verdict(target)} |"
        for target in sorted(targets(found, others), key=_rank)
    ]
    head = ["| what | target | worst run | missed by |", "| --- | --- | ---: | ---: |"]
    return "\n".join([*head, *lines]) + _on_peaks(found) + _on_products(found)


def _rank(target: Target) -> tuple[int, float]:
    if target.missing is None:
        return 1, 0.0
    return (0 if target.missing > 0 else 2), -target.missing


def _verdict(target: Target) -> str:
    """The last two cells."""
    if target.worst is None:
        return " | not measured"
    return f"{target.worst:.4g} | {f'{target.missing:.1%}' if target.missing > 0 else 'reached'}"


def _on_peaks(found: results.Result) -> str:
    """Peak memory of the presets with a target, with and without the output gradient."""
    peaks: dict[str, int] = {}
    for row in _under("minimal", _ours(found)):
        if row["preset"] in PEAK_GIB:
            peak = row["peak_bytes"] - _bytes_of_output(row)
            peaks[row["preset"]] = max(peak, peaks.get(row["preset"], 0))
    if not peaks:
        return ""
    said = ", ".join(f"{name} {peak / GIB:.2f}" for name, peak in peaks.items())
    return (
        "\n\nA peak counts x, the output and the gradient of the output, which the benchmark holds to the end of the "
        f"step, and all gradients. Without the gradient of the output it is, in GiB: {said}. The account of a step "
        "(`memory.accounting.step_account`) has that gradient, but lets go of the output, as large, when the backward "
        "begins: in a model the next layer decides."
    )


def _on_products(found: results.Result) -> str:
    """The targets of `FASTER` as percentages of the interleaved cuBLAS rate, in the most demanding run."""
    asked: dict[str, float] = {}
    for row in results.rows_of(found, "layer"):
        if row["system"] == BASELINE and row["routing"] == "uniform" and row["preset"] in FASTER:
            percent = FASTER[row["preset"]] * row["pct_of_hot_cublas"]
            asked[row["preset"]] = max(percent, asked.get(row["preset"], 0))
    if not asked:
        return ""
    said = ", ".join(f"{name} {percent:.0f}%" for name, percent in asked.items())
    return (
        f"\n\nTo be so many times as fast as `{BASELINE}` asks for this much of the rate that "
        "cuBLAS's dense product had "
        f"interleaved with it, when the clocks had fallen: {said}. Beyond 100% a step, with all its gathers, "
        "activations and sums, would have to outrun the dense product."
    )


def _bytes_of_output(row: Row) -> int:
    return row["shape"]["L"] * row["shape"]["d"] * ITEMSIZE[row["dtype"]]
