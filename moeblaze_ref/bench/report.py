"""Format benchmark rows as tables for the terminal and for Markdown, with one set of columns."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from moeblaze_ref.bench import accuracy
from moeblaze_ref.core.units import GB, KIB, MIB

Row = dict[str, Any]
Column = tuple[str, Callable[[Any], str]]

# Columns that are no numbers.
WORDS = (
    *("preset", "activation", "system", "stage", "version", "routing", "bound", "idea", "kernel", "warps wait for"),
    *("work", "launch plans", "best baseline"),
    *("axis", "groups", "weights", "tile", "remark", "way", "caches", "layout", "biases"),
)


def label(row: Row) -> str:
    """The system, with its policy or its capacity factor if it has one."""
    if row.get("capacity_factor") is not None:
        return f"{row['system']}, factor {row['capacity_factor']:g}"
    return row["system"] if row.get("policy") is None else f"{row['system']}, {row['policy']}"


def grouped(rows: Iterable[Row], *columns: str) -> dict[Any, list[Row]]:
    """Return the rows by what they have in a column, or in several."""
    groups = defaultdict(list)
    for row in rows:
        groups[itemgetter(*columns)(row)].append(row)
    return groups


def _number(key: str, digits: str, scale: float = 1.0) -> Callable[[Row], str]:
    """The cell of a number, empty where there is none."""
    return lambda row: "" if row[key] is None else format(row[key] / scale, digits)


def ratio(value: float) -> str:
    """Format with two decimals; below one with three and never as one, so that slower does not read as equal."""
    return f"{value:.2f}" if value >= 1 else f"{min(value, 0.999):.3f}"


def _ratio_to(baseline: str) -> Callable[[Row], str]:
    return lambda row: ratio(row["ratio_to"][baseline]) if baseline in row["ratio_to"] else ""


def _half_spread(row: Row) -> str:
    """Half the distance of the quartiles, in percent of the median."""
    first, third = row["quartiles_ms"]
    return f"{50 * (third - first) / row['step_ms']:.1f}"


def _padding(row: Row) -> str:
    """Rows of padding, in percent of the rows that are computed for a token."""
    if row["padding_rows"] is None:
        return ""
    kept = row["shape"]["L"] * row["shape"]["k"] - row["dropped_rows"]
    return f"{100 * row['padding_rows'] / kept:.1f}" if kept else "all"


LAYER_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("system", label),
    ("version", lambda row: row["version"] or ""),
    ("routing", lambda row: row["routing"]),
    ("step ms", _number("step_ms", ".2f")),
    ("± %", _half_spread),
    ("forward ms", _number("fwd_ms", ".2f")),
    ("as graph ms", _number("graph_ms", ".2f")),
    ("% of cuBLAS", _number("pct_of_cublas", ".0f")),
    ("% of hot cuBLAS", _number("pct_of_hot_cublas", ".0f")),
    ("% of roofline", _number("pct_of_roofline", ".0f")),
    ("over uniform", lambda row: "" if row["time_over_uniform"] is None else ratio(row["time_over_uniform"])),
    ("dropped rows", _number("dropped_rows", ",.0f")),
    ("lost tokens", _number("lost_tokens", ",.0f")),
    ("padding %", _padding),
    ("kept MiB", _number("kept_bytes", ",.0f", MIB)),
    ("peak MiB", _number("peak_bytes", ",.0f", MIB)),
    ("error", _number("error", ".1e")),
    ("row error", _number("row_error", ".1e")),
)
BEST_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("system", label),
    ("routing", lambda row: row["routing"]),
    ("step ms", _number("step_ms", ".2f")),
    ("best baseline", lambda row: row["best_baseline"]),
    ("its ms", lambda row: f"{row['step_ms'] * row['times_as_fast']:.2f}"),
    ("times as fast", lambda row: ratio(row["times_as_fast"])),
)
STAGE_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("stage", lambda row: row["stage"]),
    ("system", label),
    ("version", lambda row: row["version"] or ""),
    ("ms", _number("step_ms", ".4g")),
    ("± %", _half_spread),
    ("roofline ms", _number("roofline_ms", ".4g")),
    ("bound", lambda row: row["bound"]),
    ("% of roofline", _number("pct_of_roofline", ".0f")),
    ("error", _number("error", ".1e")),
    ("row error", _number("row_error", ".1e")),
)
LADDER_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("version", lambda row: row["version"]),
    ("idea", lambda row: row["idea"]),
    ("L", lambda row: f"{row['shape']['L']:,}"),
    ("ms", _number("step_ms", ".4g")),
    ("± %", _half_spread),
    ("TFLOP/s", _number("tflops", ".3g")),
    ("% of cuBLAS", _number("pct_of_cublas", ".3g")),
    ("error", _number("error", ".1e")),
    ("row error", _number("row_error", ".1e")),
)
COUNTER_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("version", lambda row: row["version"]),
    ("kernel", lambda row: row["kernel"]),
    ("idea", lambda row: row["idea"]),
    ("ms under ncu", _number("duration_ms", ".4g")),
    ("SM clock, GHz", _number("sm_clock_ghz", ".2f")),
    ("tensor pipe busy %", _number("tensor_pct", ".0f")),
    ("busy x clock, GHz", lambda row: f"{busy_ghz(row):.2f}"),
    ("issue slots used %", _number("issue_pct", ".0f")),
    ("DRAM %", _number("dram_pct", ".0f")),
    ("DRAM GB", lambda row: f"{(row['dram_read_bytes'] + row['dram_written_bytes']) / GB:.1f}"),
    ("L2 %", _number("l2_pct", ".0f")),
    ("L2 hits %", _number("l2_hit_pct", ".0f")),
    ("L2 link %", _number("l2_link_pct", ".0f")),
    ("sectors a load", _number("sectors_per_load", ".1f")),
    ("sectors a store", _number("sectors_per_store", ".1f")),
    ("registers", _number("registers", ".0f")),
    ("shared KiB", _number("shared_bytes", ".0f", KIB)),
    ("warps wait for", lambda row: waits(row)),
)
HOST_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("work", lambda row: row["work"]),
    ("launch plans", lambda row: "yes" if row["plans"] else "no"),
    ("L", lambda row: f"{row['shape']['L']:,}"),
    ("host us", _number("host_us", ".0f")),
    ("first quartile", lambda row: f"{row['quartiles_us'][0]:.0f}"),
    ("third quartile", lambda row: f"{row['quartiles_us'][1]:.0f}"),
    ("torch.add us", _number("unit_us", ".2f")),
    ("in torch.adds", _number("units", ".1f")),
)
GROWTH_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("axis", lambda row: row["axis"]),
    ("value", lambda row: f"{row['value']:,}"),
    ("system", label),
    ("step ms", _number("step_ms", ".4g")),
    ("± %", lambda row: "" if row["step_ms"] is None else _half_spread(row)),
    ("as graph ms", _number("graph_ms", ".4g")),
    ("roofline ms", _number("roofline_ms", ".4g")),
    ("% of roofline", lambda row: "" if row["step_ms"] is None else f"{100 * row['roofline_ms'] / row['step_ms']:.0f}"),
    ("experts with tokens", _number("experts", ",.0f")),
    ("repetitions", _number("repetitions", ",.0f")),
    ("error", _number("error", ".1e")),
    ("row error", _number("row_error", ".1e")),
    ("remark", lambda row: row["problem"]),
)
LAUNCHED_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("way", lambda row: row["way"]),
    ("step ms", _number("step_ms", ".4g")),
    ("± %", _half_spread),
    ("over graphed", _number("over_graphed", ".2f")),
    ("calls by plans", _number("plan_calls", ".0f")),
    ("error", _number("error", ".1e")),
    ("row error", _number("row_error", ".1e")),
)
LAYOUT_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("layout", lambda row: row["layout"]),
    ("activation", lambda row: row["activation"]),
    ("biases", lambda row: "yes" if row["biases"] else "no"),
    ("step ms", _number("step_ms", ".2f")),
    ("± %", _half_spread),
    ("over separate", lambda row: f"{row['over_separate']:.3f}"),
    ("peak MiB", _number("peak_bytes", ",.0f", MIB)),
    ("error", _number("error", ".1e")),
    ("row error", _number("row_error", ".1e")),
)
FIRST_STEP_COLUMNS: tuple[Column, ...] = (
    ("preset", lambda row: row["preset"]),
    ("caches", lambda row: row["caches"]),
    ("L", lambda row: f"{row['shape']['L']:,}"),
    ("forward s", _number("forward_s", ".2f")),
    ("backward s", _number("backward_s", ".2f")),
    ("step s", _number("step_s", ".2f")),
    ("process s", _number("process_s", ".1f")),
    ("processes", _number("processes", ".0f")),
)
COLUMNS = {
    "layer": LAYER_COLUMNS,
    "ladder": LADDER_COLUMNS,
    "host": HOST_COLUMNS,
    "launched": LAUNCHED_COLUMNS,
    "first_step": FIRST_STEP_COLUMNS,
    "layouts": LAYOUT_COLUMNS,
    "growth": GROWTH_COLUMNS,
    "counters": COUNTER_COLUMNS,
}


def busy_ghz(row: Row) -> float:
    """Cycles of a nanosecond in which a multiprocessor's tensor cores are busy: to this the rate is proportional."""
    return row["tensor_pct"] / 100 * row["sm_clock_ghz"]


def waits(row: Row) -> str:
    """Return the most frequent stall reasons of a kernel's warps, by ncu's names, with their parts of the time."""
    return ", ".join(f"{reason} {share:.0f}%" for reason, share in row["stalls"])


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns of rows of one kind: one more for each baseline, and no empty ones."""
    columns = COLUMNS.get(rows[0]["kind"], STAGE_COLUMNS)
    compared = dict.fromkeys(baseline for row in rows for baseline in row.get("ratio_to", ()))
    ratios = [(f"times as fast as {baseline}", _ratio_to(baseline)) for baseline in compared]
    return [column for column in (*columns, *ratios) if any(column[1](row) for row in rows)]


def table(rows: Sequence[Any], columns: Sequence[Column] = ()) -> Table:
    """Return the rows as a table for the terminal, by default with the columns of their kind."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = columns or columns_of(rows)
    for heading, _ in columns:
        shown.add_column(heading, justify="left" if heading in WORDS else "right")
    for row in rows:
        shown.add_row(*(cell(row) for _, cell in columns))
    return shown


def tables(rows: Sequence[Row]) -> Group:
    """Return a table for the terminal for each kind of row, and one of ours beside the best baselines if it has any."""
    best = [row for row in rows if row["kind"] == "layer" and row["policy"] and row["best_baseline"]]
    beside = [table(best, BEST_COLUMNS)] if best else []
    return Group(*map(table, grouped(rows, "kind").values()), *beside)


def left_out(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each system that could not be timed on a layer."""
    found = {(row["preset"], name): why for row in rows for name, why in (row.get("left_out") or {}).items()}
    return [f"{preset}: {name} is left out: {why}" for (preset, name), why in found.items()]


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    columns = columns_of(rows)
    lines = [[heading for heading, _ in columns], ["---" if name in WORDS else "---:" for name, _ in columns]]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wrong(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose result is wrong, NaN included."""
    bounds = (("error", accuracy.BOUND), ("row_error", accuracy.ROW_BOUND))
    return [row for row in rows if any(row.get(name) is not None and not row[name] <= bound for name, bound in bounds)]
