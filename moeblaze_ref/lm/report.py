"""Summaries of evidence records in Markdown, for the terminal and for docs/training.md.

Records of one kind share their tables, which then begin with the device, and its commit where a device has two records.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from moeblaze_ref.core import documents
from moeblaze_ref.core.units import MIB
from moeblaze_ref.lm import drift
from moeblaze_ref.lm.curves import compare_curves
from moeblaze_ref.lm.equal_loss import BOUND, EVERY, OTHERS, compare_losses, compare_same_weights, gaps, is_among
from moeblaze_ref.lm.wall import met_wall

Found = Mapping[str, Any]
Rows = Iterator[list[str]]
NAMES = {
    "loss": "loss",
    "first_gradients": "gradients of the first step, weight by weight",
    "same_weights_loss": f"loss from the oracle's weights, every {EVERY}th step",
    "same_weights_gradients": f"gradients from the oracle's weights, every {EVERY}th step, weight by weight",
}
SAME = ("device", "text", "settings", "steps")  # in records of which one repeats the other
AT = (10, 50, 100, 110, 150, 200)  # steps at which such records are compared
RESULTS = {True: "pass", False: "FAIL", None: "open"}
TEXTS_DIFFER = (
    "The devices read different texts. Compare the runs of one device; do not compare losses between devices."
)


def summary(*found: Found) -> str:
    """Records of `evidence.gather`, all of one kind, in words and tables."""
    return "\n\n".join([_runs_and_texts(found), *REPORTS[found[0]["kind"]](found)])


def _runs_and_texts(found: Sequence[Found]) -> str:
    """Return what was trained, and whether all devices read the same text if losses are shown."""
    texts = {one["text"] for one in found if one["kind"] != "memory"}
    return "\n\n".join([*dict.fromkeys(map(_run, found)), *([TEXTS_DIFFER] if len(texts) > 1 else [])])


def _run(found: Found) -> str:
    settings = found["settings"]
    config = settings["config"]
    tokens = " Here a step has L tokens instead." if found["kind"] == "memory" else ""
    return (
        f"Preset {found['preset']}: {config['layers']} layers, d = {config['d']:,}, h = {config['h']:,}, "
        f"E = {config['E']}, k = {config['k']}; {settings['batch']} windows of {config['sequence']:,} bytes a step; "
        f"{settings['precision']}.{tokens}"
    )


def _table(columns: Sequence[str], rows: Callable[[Found], Rows], found: Sequence[Found], words: int = 1) -> str:
    """One table of several records; the first column tells them apart if there is more than one."""
    if len(found) == 1:
        return documents.table(columns, rows(found[0]), words)
    marked = ([device, *row] for device, one in zip(documents.devices(found), found, strict=True) for row in rows(one))
    return documents.table(["device", *columns], marked, words + 1)


def _each(sentence: Callable[[Found], str], found: Sequence[Found]) -> str:
    """A sentence about each record, with its device before it if there is more than one."""
    if len(found) == 1:
        return sentence(found[0])
    devices = documents.devices(found)
    return "\n".join(f"- {device}: {sentence(one)}" for device, one in zip(devices, found, strict=True))


# Losses step by step --------------------------------------------------------------------------------------------------


def replayed(found: Sequence[Found]) -> list[str]:
    """The worst gaps of the loss and of the first gradients, of oracles that sum in another order, and their growth."""
    columns = ["run", "of", "worst relative gap", "at", "first beyond the bound", "bound", "result"]
    steps = " and ".join(dict.fromkeys(f"{one['steps']:,}" for one in found))
    parts = [f"Of {steps} steps, each run beside the oracle:", _table(columns, _replayed_rows, found, words=2)]
    if any(drift.drifts(one["loss"]) for one in found):
        columns = [
            "run",
            "from step",
            "doublings in 100 steps",
            "correlation with moeblaze's",
            "size beside moeblaze's",
        ]
        parts += [f"Growth of the gaps, from the first of moeblaze above {drift.LEFT:.0e} on:"]
        parts += [_table(columns, _drift_rows, found)]
    return parts + [part for pair in combinations(found, 2) if _is_repeated(*pair) for part in _repeated(*pair)]


def _is_repeated(one: Found, other: Found) -> bool:
    return all(one[name] == other[name] for name in SAME)


def _repeated(one: Found, other: Found) -> list[str]:
    """Return the gap of each run to the same run of a repeated record."""
    records = " and ".join(documents.devices([one, other]))
    at = [step for step in AT if step <= one["steps"]]
    columns = ["run", "first other loss", "first beyond the bound", *(f"at step {step}" for step in at)]
    rows = []
    for run in one["loss"]:
        found = gaps(other["loss"][run], one["loss"][run])
        rows.append(
            [run, _first_above(0, found), _first_above(BOUND, found), *(f"{found[step - 1]:.1e}" for step in at)]
        )
    return [f"Relative gap of the loss between the same run of {records}:", documents.table(columns, rows)]


def _replayed_rows(found: Found) -> Rows:
    """Ours, on which the verdict is, and the reordered oracles under the same rules, as far as they were measured."""
    for run in OTHERS:
        for name, one in (found["verdict"] if run == "moeblaze" else _verdict_on(found, run)).items():
            first = _first_beyond(found, run) if name == "loss" else ""
            yield [run, NAMES[name], f"{one['worst']:.1e}", _at(one), first, f"{one['bound']:.0e}", _result(one)]


def _verdict_on(found: Found, run: str) -> Found:
    """Return the verdict on a run; older records lack the comparison at the same weights."""
    loss = compare_losses(gaps(found["loss"][run], found["loss"]["oracle"]))
    return {"loss": loss} | compare_same_weights(found.get("same_weights", {}).get(run, []))


def _drift_rows(found: Found) -> Rows:
    for run, one in drift.drifts(found["loss"]).items():
        cells = f"{one.since:,}", f"{100 * one.growth:.1f}", f"{one.correlation:.3f}", f"{one.size:.2f}"
        yield [run, *cells]


def _at(one: Found) -> str:
    """A step, a weight, or both."""
    if isinstance(one["at"], int):
        return f"step {one['at']}"
    step, comma, weight = one["at"].rpartition(", ")
    return f"{step}{comma}`{weight}`"


def _result(one: Found) -> str:
    return RESULTS[one["passed"]]


def _first_beyond(found: Found, run: str) -> str:
    """The first step at which the loss is further from the oracle's than the bound."""
    return _first_above(BOUND, gaps(found["loss"][run], found["loss"]["oracle"]))


def _first_above(least: float, found: Sequence[float]) -> str:
    return next((f"step {number}" for number, gap in enumerate(found, start=1) if gap > least), "none")


def free(found: Sequence[Found]) -> list[str]:
    """When a token first chose other experts, the gaps before, and the gaps since beside those of oracles."""
    columns = ["run", "first step with other experts", "tokens, layer by layer"]
    parts = [_table([*columns, f"first gap of the loss above {BOUND:.0e}"], _first_changes, found)]
    parts.append(_each(_before_the_first_change, found))
    if any(map(_same_steps, found)):
        parts.append(_table(["of", "worst relative gap", "at", "bound", "result"], _gaps_before, found))
    if changed := [one for one in found if one["after"] is not None]:
        parts.append("From the first token of moeblaze with other experts on, relative gaps of the loss:")
        parts.append(_table(["runs", "from step", "mean", "worst"], _gaps_since, found))
        parts.append(_each(_among, changed))
    return parts


def _first_changes(found: Found) -> Rows:
    for run, first in found["first_change"].items():
        step, tokens = ("none", "") if first is None else (str(first["step"]), ", ".join(map(str, first["tokens"])))
        yield [run, step, tokens, _first_beyond(found, run)]


def _same_steps(found: Found) -> int:
    """Steps before the first token of moeblaze that has other experts."""
    first = found["first_change"]["moeblaze"]
    return found["steps"] if first is None else first["step"] - 1


def _before_the_first_change(found: Found) -> str:
    steps = _same_steps(found)
    if not steps:
        return "The first step already has a token with other experts: there is no step before it to compare."
    return f"No token has other experts in the first {steps:,} steps. There, moeblaze beside the oracle:"


def _gaps_before(found: Found) -> Rows:
    for name, one in found["verdict"].items() if _same_steps(found) else ():
        yield [NAMES[name], f"{one['worst']:.1e}", _at(one), f"{one['bound']:.0e}", _result(one)]


def _gaps_since(found: Found) -> Rows:
    if found["after"] is None:
        return
    since = f"{found['first_change']['moeblaze']['step']:,}"
    ours = {f"moeblaze | {oracle}": size for oracle, size in found["after"].items()}
    for pair, size in {**ours, **found["after_oracles"]}.items():
        yield [pair.replace(" | ", " and "), since, f"{size['mean']:.1e}", f"{size['worst']:.1e}"]


def _among(found: Found) -> str:
    verdict = RESULTS[is_among(found["after"], found["after_oracles"])]
    return f"moeblaze nearer to one of the oracles than two of them to each other: {verdict}."


# Whole runs -----------------------------------------------------------------------------------------------------------


def curves(found: Sequence[Found]) -> list[str]:
    """Return the last losses of each run, and its gap to the oracle's."""
    columns = ["run", "steps", "lowest validation loss", "at step", "last", "mean of the second half"]
    parts = [_table([*columns, "above oracle's", "rows dropped", "peak, MiB"], _runs, found)]
    if unfinished := [one for one in found if _compared(one)["unfinished"]]:
        names = lambda one: ", ".join(_compared(one)["unfinished"])
        parts.append(_each(lambda one: f"Not finished, or not begun: {names(one)}.", unfinished))
    if any(_compared(one)["verdict"] is not None for one in found):
        columns = ["loss", "run", "mean", "worst", "at step", "within luck"]
        parts += ["Gaps to the oracle's run, nats per byte:", _table(columns, _gaps_to_oracle, found, words=2)]
    return parts


def _compared(found: Found) -> Found:
    return compare_curves(found["runs"], found["steps"])


def _runs(found: Found) -> Rows:
    ends = _compared(found)["ends"]
    for name, run in found["runs"].items():
        dropped = "" if run["dropped_share"] is None else f"{run['dropped_share']:.1%}"
        peak = "" if run["peak_bytes"] is None else f"{run['peak_bytes'] / MIB:,.0f}"
        yield [name, f"{run['steps']:,}", *_end(name, ends), dropped, peak]


def _end(name: str, ends: Found) -> list[str]:
    """Return the cells of a finished run's last validation losses, in nats per byte."""
    if name not in ends:
        return [""] * 5
    end, oracle = ends[name], ends.get("oracle")
    above = "" if oracle in (None, end) else f"{end['second_half'] - oracle['second_half']:+.4f}"
    return [f"{end['lowest']:.4f}", f"{end['at']:,}", f"{end['last']:.4f}", f"{end['second_half']:.4f}", above]


def _gaps_to_oracle(found: Found) -> Rows:
    for loss, gaps_of in (_compared(found)["verdict"] or {}).items():
        for run, gap in gaps_of.items():
            within = "is the measure" if run == "oracle-other-order" else RESULTS[gap["within"]]
            yield [loss, run, f"{gap['mean']:.4f}", f"{gap['worst']:.4f}", f"{gap['at']:,}", within]


# The memory wall ------------------------------------------------------------------------------------------------------


def memory(found: Sequence[Found]) -> list[str]:
    """The largest step of each layer, and what the largest step that was tried with all and that all made costs it."""
    columns = ["layer", "largest L", "times the oracle's", "kept, MiB", "peak, MiB", "step, ms", "at L"]
    where = (
        "Kept, peak and time are those at the L of the last column. "
        "This is the largest L that was tried with every layer and that all of them made."
    )
    verdict = lambda one: f"moeblaze, minimal makes as large a step as any other system: {_result(one)}."
    return [where, _table(columns, _walls, found), _each(verdict, found)]


def _walls(found: Found) -> Rows:
    shared = max((row["L"] for row in found["rows"] if _all_make(found, row["L"])), default=None)
    for name, L in found["largest"].items():
        times = f"{L / found['largest']['oracle']:.2f}" if found["largest"].get("oracle") else ""
        reached = f"{L:,}" if met_wall(found["rows"], name) else f"{L:,} or more"
        yield [name, reached, times, *_costs(found, name, shared)]


def _all_make(found: Found, L: int) -> bool:
    makers = {row["contender"] for row in found["rows"] if row["L"] == L and row["step_ms"] is not None}
    return makers == set(found["largest"])


def _costs(found: Found, name: str, L: int | None) -> list[str]:
    """Return the bytes that autograd keeps, the peak and the time of a step of L tokens, and L."""
    for row in found["rows"]:
        if (row["contender"], row["L"]) == (name, L):
            MiB = (f"{row[of] / MIB:,.0f}" for of in ("kept_bytes", "peak_bytes"))
            return [*MiB, f"{row['step_ms']:,.0f}", f"{L:,}"]
    return [""] * 4


REPORTS = {"replayed": replayed, "free": free, "curves": curves, "memory": memory}
