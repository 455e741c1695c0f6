"""Sentences and short tables from the results, for the generated documents."""

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from moeblaze_ref.backends.raw_cuda import tiles
from moeblaze_ref.bench import counters, ladder, report, results
from moeblaze_ref.bench.timed_systems import GRAPHED, OURS
from moeblaze_ref.core import documents, source_hashes
from moeblaze_ref.core.config import ITEMSIZE, PRESETS
from moeblaze_ref.core.units import GIB
from moeblaze_ref.memory.accounting import account

LINE = 120
POLICIES = ("minimal", "inputs")
WAYS = (
    "",
    ", ours graphed",
    ", as CUDA graphs",
)  # of running ours and a baseline; in the first two the baseline is launched
# Kernels of the last version by what their producer warps do: rows gathered by cp.async, or boxes by TMA alone.
GATHERING, BOXES_ALONE = ("expert_up", "d_hidden", "d_w3", "d_w"), ("expert_down", "d_x_rows")
WAIT = "long_scoreboard"
SPREAD = dict(report.LAYER_COLUMNS)["± %"]
# The headline: the systems whose kept bytes it compares, by column, and the baselines whose speed it compares.
KEPT_BY = {
    "kept, GiB: plain torch": ("conventional", None),
    "MegaBlocks": ("megablocks_published", None),
    "`minimal`": ("moeblaze", "minimal"),
}
COMPILED = ("grouped_mm_compiled", "gather_sum_compiled")

Row = dict[str, Any]


def _lines(text: str) -> str:
    """Wrap a paragraph or an item of a list at ``LINE`` columns."""
    return textwrap.fill(
        text, LINE, subsequent_indent="  " * text.startswith("- "), break_on_hyphens=False, break_long_words=False
    )


# The series -----------------------------------------------------------------------------------------------------------


def speeds_of_series(found: results.Result) -> dict[str, dict[str, Row]]:
    """Return the row of each version of expert_up's forward as a whole, in their order: {preset: {version: row}}.

    Of the last version, which the benchmark takes step by step, it is the step that lacks nothing.
    """
    whole = {step.version: step.idea for step in ladder.LADDER if step.against != ladder.WHOLE}
    series: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in results.rows_of(found, "ladder"):
        if whole.get(row["version"]) == row["idea"]:
            series[row["preset"]][row["version"]] = row
    return dict(series)


def series(found: results.Result) -> str:
    """Return a table of expert_up's versions, each with its rate over that of the version below."""
    lines = []
    for preset, versions in speeds_of_series(found).items():
        below = None
        for version, row in versions.items():
            ratio = report.ratio(row["tflops"] / below["tflops"]) if below else ""
            tokens, rate, of_cublas = row["shape"]["L"], row["tflops"], row["pct_of_cublas"]
            lines.append(
                [preset, version, f"{tokens:,}", f"{row['step_ms']:.2f}", f"{rate:.3g}", f"{of_cublas:.3g}", ratio]
            )
            below = row
    columns = ["preset", "version", "L", "ms", "TFLOP/s", "% of cuBLAS", "times as fast as the version below"]
    return documents.table(columns, lines, words=2) if lines else ""


# The layer ------------------------------------------------------------------------------------------------------------


def beside_baselines(found: results.Result, system: str = OURS) -> dict[tuple[str, str, str], list[float]]:
    """Return the speed over each baseline in every run on uniform routing, by (preset, policy, baseline)."""
    ratios = defaultdict(list)
    for row in results.rows_of(found, "layer"):
        if row["system"] == system and row["routing"] == "uniform":
            for baseline, ratio in row["ratio_to"].items():
                ratios[row["preset"], row["policy"], baseline].append(ratio)
    return dict(ratios)


def beside_baselines_as_graphs(found: results.Result) -> dict[tuple[str, str, str], list[float]]:
    """Return the same for small layers whose steps, ours and the baseline's, are replayed as CUDA graphs."""
    rows = [row for row in results.rows_of(found, "layer") if row["routing"] == "uniform" and row.get("graph_ms")]
    baselines = [row for row in rows if row["system"] != OURS]
    ratios = defaultdict(list)
    for row in rows:
        if row["system"] == OURS:
            for baseline in baselines:
                if (baseline["run"], baseline["preset"]) == (row["run"], row["preset"]):
                    key = row["preset"], row["policy"], baseline["system"]
                    ratios[key].append(baseline["graph_ms"] / row["graph_ms"])
    return dict(ratios)


def headline(found: results.Result) -> str:
    """Return a row for each layer: GiB kept for the backward, and the speed of `minimal` in its worst run."""
    ratios = beside_baselines(found)
    presets = dict.fromkeys(name for name, policy, baseline in ratios if (policy, baseline) == ("minimal", COMPILED[0]))
    lines = []
    for name in presets:
        kept = [account(PRESETS[name].config, *of_system).kept_bytes / GIB for of_system in KEPT_BY.values()]
        worst = [min(ratios[name, "minimal", baseline]) for baseline in COMPILED]
        lines.append([name, *(f"{gib:.2f}" for gib in kept), *map(_ratio, worst)])
    speeds = [f"times as fast as `{COMPILED[0]}`", f"as `{COMPILED[1]}`"]
    return documents.table(["layer", *KEPT_BY, *speeds], lines) if lines else ""


def inputs(found: results.Result) -> str:
    """Return what policy `inputs` costs in time, beside the strongest baseline: one sentence."""
    worst = {
        name: min(ratios)
        for (name, policy, baseline), ratios in beside_baselines(found).items()
        if (policy, baseline) == ("inputs", COMPILED[1])
    }
    if not worst:
        return ""
    slower = [name for name, ratio in worst.items() if ratio < 1]
    said = f"Policy `inputs` is {_ratio(min(worst.values()))} to {_ratio(max(worst.values()))} times as fast as "
    said += f"`{COMPILED[1]}`"
    return _lines(f"{said}; it is slower on {', '.join(slower)}." if slower else f"{said}.")


def peaks(found: results.Result) -> str:
    """Return the peak of policy `minimal` on uniform routing without the output's gradient, GiB, the worst run."""
    worst: dict[str, int] = {}
    for row in results.rows_of(found, "layer"):
        if (row["system"], row["policy"], row["routing"]) == (OURS, "minimal", "uniform"):
            output = row["shape"]["L"] * row["shape"]["d"] * ITEMSIZE[row["dtype"]]
            worst[row["preset"]] = max(row["peak_bytes"] - output, worst.get(row["preset"], 0))
    return _lines(", ".join(f"{name} {peak / GIB:.2f}" for name, peak in worst.items()) + ".") if worst else ""


def summary(found: results.Result) -> str:
    """Return the speed over each baseline in the worst run, in each of ``WAYS``, and where ours is slower."""
    tables = zip(
        (beside_baselines(found), beside_baselines(found, GRAPHED), beside_baselines_as_graphs(found)),
        WAYS,
        strict=True,
    )
    worst = {
        (preset, policy + way, baseline): min(ratios)
        for ratios_of, way in tables
        for (preset, policy, baseline), ratios in ratios_of.items()
        if policy in POLICIES
    }
    if not worst:
        return ""
    presets, policies, baselines = (list(dict.fromkeys(key[i] for key in worst)) for i in range(3))
    lines = [
        [policy, f"`{baseline}`", *(_ratio(worst.get((preset, policy, baseline))) for preset in presets)]
        for policy in policies
        for baseline in baselines
    ]
    return f"{documents.table(['policy', 'times as fast as', *presets], lines, 2)}\n\n{_lines(_slower(worst))}"


def _ratio(ratio: float | None) -> str:
    """Format with two decimals, or three where two would hide which is faster."""
    if ratio is None:
        return ""
    return f"{ratio:.3f}" if ratio < 1 and round(ratio, 2) == 1 else f"{ratio:.2f}"


def _slower(worst: dict[tuple[str, str, str], float]) -> str:
    lost = defaultdict(list)
    for (preset, policy, baseline), ratio in worst.items():
        if ratio < 1:
            lost[policy, baseline].append(preset)
    if not lost:
        return "Ours is the faster one in each of these runs."
    places = [
        f"under {policy}, than `{baseline}` on {', '.join(lost[policy, baseline])}"
        for policy, baseline in sorted(lost, key=_order)
    ]
    return f"Ours is the slower one in at least one of these runs: {'; '.join(places)}."


def _order(key: tuple[str, str]) -> tuple[int, int]:
    """Sort key: by the order of ``WAYS``, then of ``POLICIES``."""
    policy, comma, way = key[0].partition(",")
    return WAYS.index(comma + way), POLICIES.index(policy)


def host(found: results.Result) -> str:
    """Return a table of small layers' steps, as launched and as a CUDA graph."""
    rows = [row for row in results.rows_of(found, "layer") if row["system"] == OURS and row["graph_ms"] is not None]
    cells = [
        (row["preset"], row["policy"], row["routing"], f"{row['run']}", f"{row['step_ms']:.2f}",
         SPREAD(row), f"{row['graph_ms']:.2f}", f"{row['step_ms'] - row['graph_ms']:.2f}")
        for row in sorted(rows, key=lambda row: row["step_ms"])
    ]  # fmt: skip
    names = ("preset", "policy", "routing", "run", "as launched, ms", "± %", "as graph, ms", "less by, ms")
    return documents.table(names, cells, 3) if cells else ""


def best(found: results.Result) -> str:
    """Return a table of each layer's step beside the best baseline, in the run that is worst for ours."""
    rows = [row for row in results.rows_of(found, "layer") if row["system"] == OURS and row["routing"] == "uniform"]
    lines = []
    for (preset, policy), runs in report.grouped(rows, "preset", "policy").items():
        if compared := [row for row in runs if row["best_baseline"]]:
            worst = min(compared, key=itemgetter("times_as_fast"))
            step, ratio = worst["step_ms"], worst["times_as_fast"]
            cells = [f"{len(compared)}", f"{step:.2f}", f"{step * ratio:.2f}", _ratio(ratio)]
            lines.append([preset, policy, f"`{worst['best_baseline']}`", *cells])
    names = ["preset", "policy", "best baseline", "runs", "ours, ms", "the baseline, ms", "times as fast"]
    table = documents.table(names, lines, 3)
    without = dict.fromkeys(said for row in rows for said in report.left_out([row]))
    return "\n\n".join([table, *(_lines(f"- {said}") for said in without)]) if lines else ""


# Tiles ----------------------------------------------------------------------------------------------------------------


def chosen_tiles() -> str:
    """Return how many entries the table of tiles has for each tuned GPU and version, as a list."""
    runs = json.loads(tiles.TABLE.read_text())["runs"]
    return "\n".join(
        _lines(f"- {run['device']}, at commit {run['commit'][:7]}{source_hashes.mark(run)}: {'; '.join(_entries(run))}")
        for run in runs
    )


def _entries(run: Row) -> Iterator[str]:
    for version in tiles.CANDIDATES:
        gains = [entry["gain"] for entry in run["entries"] if entry["version"] == version]
        said = f"{len(gains)}, with gains of {min(gains) - 1:.0%} to {max(gains) - 1:.0%}" if gains else "none"
        yield f"entries for `{version}`: {said}"


# Counters -------------------------------------------------------------------------------------------------------------


def _by_preset(found: results.Result) -> dict[str, tuple[list[Row], Row]]:
    """Return each preset's products on the last version, the furthest behind first, and cuBLAS's dense product."""
    by_run = report.grouped(results.rows_of(found, "counters"), "run", "preset")
    ideas = (*counters.PRODUCTS, ladder.TOP.idea)
    shown: dict[str, tuple[list[Row], Row]] = {}
    for (_, preset), rows in by_run.items():
        ours = [row for row in rows if row["version"] == ladder.HOPPER and row["idea"] in ideas]
        dense = [row for row in rows if not row["version"]]
        if ours and dense:
            shown.setdefault(preset, (sorted(ours, key=report.busy_ghz), dense[0]))
    return shown


def _behind_ms(row: Row, dense: Row) -> float:
    """Return by how many ms it would be shorter at cuBLAS's busy cycles in a nanosecond."""
    return row["duration_ms"] * (1 - report.busy_ghz(row) / report.busy_ghz(dense))


def why(found: results.Result) -> str:
    """Return a table of each product's busy share and clock relative to cuBLAS's, the furthest behind first."""
    names = ("preset", "kernel", *(f"{what}, % of cuBLAS's" for what in ("busy x clock", "busy", "clock")))
    names += ("ms under ncu", "ms lost", "DRAM %", "L2 %", "L2 link %")
    shown = _by_preset(found)
    launches = [
        (preset, name, row, dense)
        for preset, (rows, dense) in shown.items()
        for name, row in zip(_names(rows), rows, strict=True)
    ]
    launches += [(preset, "cuBLAS, dense", dense, dense) for preset, (_, dense) in list(shown.items())[:1]]
    compared = (report.busy_ghz, itemgetter("tensor_pct"), itemgetter("sm_clock_ghz"))
    cells = [
        (preset, name, *(f"{100 * value(row) / value(dense):.0f}" for value in compared),
         f"{row['duration_ms']:.2f}", f"{_behind_ms(row, dense):.2f}",
         *(f"{row[share]:.0f}" for share in ("dram_pct", "l2_pct", "l2_link_pct")))
        for preset, name, row, dense in launches
    ]  # fmt: skip
    return documents.table(names, cells, 2) if cells else ""


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the kernels' names, numbered where one is launched twice."""
    kernels = [row["kernel"] for row in rows]
    return [
        f"`{name}`" + (f", launch {kernels[:place].count(name) + 1}" if kernels.count(name) > 1 else "")
        for place, name in enumerate(kernels)
    ]


def facts(found: results.Result) -> str:
    """Return a list of what the counters say: an item for each layer, and one on the warps' waits."""
    shown = _by_preset(found)
    if not shown:
        return ""
    items = [f"- On {preset}, {_furthest(*of_one)} {_clocks(of_one[0])}" for preset, of_one in shown.items()]
    items.append(f"- {_waits([row for rows, _ in shown.values() for row in rows])}")
    return "\n".join(map(_lines, items))


def growth(axes: Mapping[str, Sequence[Any]], device: str) -> str:
    """Return the range of our speed over torch.compile's and of the roofline's share, of `growth_page.measured`."""
    points = [(axis, one) for axis, measured in axes.items() for one in measured if one.ours["step_ms"]]
    speeds = [
        one.compiled["step_ms"] / one.ours["step_ms"] for _, one in points if one.compiled and one.compiled["step_ms"]
    ]
    shares = [(100 * one.ours["roofline_ms"] / one.ours["step_ms"], f"{axis} = {one.value:,}") for axis, one in points]
    said = []
    if speeds:
        said.append(
            f"On an {device}, our layer is {report.ratio(min(speeds))} to {report.ratio(max(speeds))} times as fast as "
            "torch.compile, over all sizes that we timed with both."
        )
    if shares:
        (least, at_least), (most, at_most) = min(shares), max(shares)
        said.append(f"It reaches {least:.0f} to {most:.0f}% of the roofline: least at {at_least}, most at {at_most}.")
    return textwrap.fill(" ".join(said), LINE)


def _furthest(rows: Sequence[Row], dense: Row) -> str:
    first, *_ = rows
    behind = sum(max(0.0, _behind_ms(row, dense)) for row in rows)
    return (
        f"`{first['kernel']}` is furthest behind. It loses {_behind_ms(first, dense):.2f} of the {behind:.2f} ms that "
        f"these launches lose."
    )


def _clocks(rows: Sequence[Row]) -> str:
    busy = sorted(rows, key=lambda row: row["tensor_pct"])
    idlest, busiest, fastest = (
        f"`{row['kernel']}` ({row['tensor_pct']:.0f}% at {row['sm_clock_ghz']:.2f} GHz)"
        for row in (busy[0], busy[-1], max(rows, key=lambda row: row["sm_clock_ghz"]))
    )
    return f"The least busy is {idlest}, and the busiest is {busiest}. The clock is highest in {fastest}."


def _waits(rows: Sequence[Row]) -> str:
    first = sum(row["stalls"][0][0] == WAIT for row in rows)
    ranges = [
        f" In kernels that {what}, it takes {min(shares):.0f} to {max(shares):.0f}% of the warps' time."
        for what, kernels in (("gather rows", GATHERING), ("gather nothing", BOXES_ALONE))
        if (shares := [dict(row["stalls"]).get(WAIT, 0.0) for row in rows if row["kernel"] in kernels])
    ]
    return "".join([f"The most frequent wait is `{WAIT}` in {first} of {len(rows)} launches.", *ranges])
