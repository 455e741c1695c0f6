"""What a record of evidence says, in Markdown: for the terminal and for docs/training.md."""

from collections.abc import Mapping
from typing import Any

from moeblaze_ref.core.units import MIB
from moeblaze_ref.lm.curves import judge
from moeblaze_ref.lm.equal_loss import BOUND, gaps, is_among
from moeblaze_ref.lm.wall import met_wall

Found = Mapping[str, Any]
NAMES = {"loss": "loss", "first_gradients": "gradients of the first step, weight by weight"}


def summary(found: Found) -> str:
    """A record of `evidence.gather` in words and tables."""
    return REPORTS[found["kind"]](found)


def replayed(found: Found) -> str:
    """The worst gaps of the loss and of the first gradients, and of oracles that sum in another order."""
    oracles = "; ".join(f"{name}: {worst:.1e}" for name, worst in found["oracles"].items())
    return (
        f"{_run(found)} Of {found['steps']:,} steps, moeblaze beside the oracle:\n\n{_worst_gaps(found)}\n\n"
        f"Worst gap of the loss of oracles that sum in another order: {oracles}."
    )


def _run(found: Found) -> str:
    settings = found["settings"]
    config = settings["config"]
    return (
        f"Preset {found['preset']}: {config['layers']} layers, d = {config['d']:,}, h = {config['h']:,}, "
        f"E = {config['E']}, k = {config['k']}; {settings['batch']} windows of {config['sequence']:,} bytes a step; "
        f"{settings['precision']}."
    )


def _worst_gaps(found: Found) -> str:
    lines = ["| of | worst relative gap | at | bound | result |", "| --- | ---: | ---: | ---: | --- |"]
    for name, one in found["verdict"].items():
        at = f"step {one['at']}" if isinstance(one["at"], int) else f"`{one['at']}`"
        lines.append(f"| {NAMES[name]} | {one['worst']:.1e} | {at} | {one['bound']:.0e} | {_result(one)} |")
    return "\n".join(lines)


def _result(one: Found) -> str:
    return {True: "pass", False: "FAIL", None: "open"}[one["passed"]]


def free(found: Found) -> str:
    """When a token first chose other experts, the gaps before, and the gaps since beside those of oracles."""
    parts = [_run(found), _first_changes(found), _until_the_first_change(found)]
    if found["after"] is not None:
        since = found["first_change"]["moeblaze"]["step"]
        parts.append(f"From step {since:,} on, relative gaps of the loss:\n\n{_gaps_since(found)}")
    return "\n\n".join(parts)


def _first_changes(found: Found) -> str:
    lines = [
        f"| run | first step with other experts | tokens, layer by layer | first gap of the loss above {BOUND:.0e} |",
        "| --- | ---: | --- | ---: |",
    ]
    for run, first in found["first_change"].items():
        step, tokens = ("none", "") if first is None else (first["step"], ", ".join(map(str, first["tokens"])))
        lines.append(f"| {run} | {step} | {tokens} | {_first_beyond(found, run)} |")
    return "\n".join(lines)


def _first_beyond(found: Found, run: str) -> str:
    """The first step at which the loss is further from the oracle's than the bound."""
    beyond = (n for n, gap in enumerate(gaps(found["loss"][run], found["loss"]["oracle"]), start=1) if gap > BOUND)
    return next((f"step {n}" for n in beyond), "none")


def _until_the_first_change(found: Found) -> str:
    first = found["first_change"]["moeblaze"]
    if first is not None and first["step"] == 1:
        return "The first step already has a token with other experts: there is no step before it to judge."
    until = f"{found['steps']:,} steps" if first is None else f"the {first['step'] - 1:,} steps before"
    return f"Of {until}, moeblaze beside the oracle:\n\n{_worst_gaps(found)}"


def _gaps_since(found: Found) -> str:
    ours = {f"moeblaze | {oracle}": size for oracle, size in found["after"].items()}
    lines = ["| runs | mean | worst |", "| --- | ---: | ---: |"]
    for pair, size in {**ours, **found["after_oracles"]}.items():
        lines.append(f"| {pair.replace(' | ', ' and ')} | {size['mean']:.1e} | {size['worst']:.1e} |")
    verdict = "pass" if is_among(found["after"], found["after_oracles"]) else "FAIL"
    return "\n".join(lines) + f"\n\nmoeblaze nearer to one of the oracles than two of them to each other: {verdict}."


def curves(found: Found) -> str:
    """Where each run leads, and its gap to the oracle's."""
    judged = judge(found["runs"], found["steps"])
    parts = [_run(found), _runs(found, judged["ends"])]
    if judged["unfinished"]:
        parts.append(f"Not finished, or not begun: {', '.join(judged['unfinished'])}.")
    if judged["verdict"] is not None:
        parts.append(f"Gaps to the oracle's run, nats per byte:\n\n{_gaps_to_oracle(judged['verdict'])}")
    return "\n\n".join(parts)


def _runs(found: Found, ends: Found) -> str:
    lines = [
        "| run | steps | lowest validation loss | at step | last | mean of the second half | above oracle's "
        "| rows dropped | peak, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in found["runs"].items():
        dropped = "" if run["dropped_share"] is None else f"{run['dropped_share']:.1%}"
        peak = "" if run["peak_bytes"] is None else f"{run['peak_bytes'] / MIB:,.0f}"
        cells = [name, f"{run['steps']:,}", *_end(name, ends), dropped, peak]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _end(name: str, ends: Found) -> list[str]:
    """Where a finished run's validation loss leads, in nats per byte."""
    if name not in ends:
        return [""] * 5
    end, oracle = ends[name], ends.get("oracle")
    above = "" if oracle in (None, end) else f"{end['second_half'] - oracle['second_half']:+.4f}"
    return [f"{end['lowest']:.4f}", f"{end['at']:,}", f"{end['last']:.4f}", f"{end['second_half']:.4f}", above]


def _gaps_to_oracle(verdict: Found) -> str:
    lines = ["| loss | run | mean | worst | at step | within luck |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for loss, gaps_of in verdict.items():
        for run, gap in gaps_of.items():
            within = "is the measure" if run == "oracle-other-order" else "pass" if gap["within"] else "FAIL"
            lines.append(f"| {loss} | {run} | {gap['mean']:.4f} | {gap['worst']:.4f} | {gap['at']:,} | {within} |")
    return "\n".join(lines)


def memory(found: Found) -> str:
    """The largest step of each layer, and what the largest step that all can make costs it."""
    shared = max((row["L"] for row in found["rows"] if _all_make(found, row["L"])), default=None)
    lines = [
        "| layer | largest L | times the oracle's | kept, MiB | peak, MiB | step, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, L in found["largest"].items():
        times = f"{L / found['largest']['oracle']:.2f}" if found["largest"].get("oracle") else ""
        reached = f"{L:,}" if met_wall(found["rows"], name) else f"{L:,} or more"
        lines.append(f"| {' | '.join([name, reached, times, *_costs(found, name, shared)])} |")
    where = "" if shared is None else f" Kept, peak and time are those at L = {shared:,}, which every layer can make."
    verdict = f"moeblaze, minimal makes as large a step as any other system: {_result(found)}."
    return "\n\n".join([f"{_run(found)} Here a step has L tokens instead.{where}", "\n".join(lines), verdict])


def _all_make(found: Found, L: int) -> bool:
    makers = {row["contender"] for row in found["rows"] if row["L"] == L and row["step_ms"] is not None}
    return makers == set(found["largest"])


def _costs(found: Found, name: str, L: int | None) -> list[str]:
    """What autograd keeps, the peak and the time of a step of L tokens."""
    for row in found["rows"]:
        if (row["contender"], row["L"]) == (name, L):
            return [f"{row['kept_bytes'] / MIB:,.0f}", f"{row['peak_bytes'] / MIB:,.0f}", f"{row['step_ms']:,.0f}"]
    return ["", "", ""]


REPORTS = {"replayed": replayed, "free": free, "curves": curves, "memory": memory}
