"""Sentences and tables from the records of ``moeblaze_ref.cli.parallel_bench`` and ``parallel_host``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from moeblaze_ref.core import documents

HEADINGS = ("map", "step ms", "p99", "modelled", "simulated", "experts", "modelled", "exchange", "modelled")
GAINS = ("step", "step, modelled", "step, simulated", "experts' tail", "exchange's tail")
CONTIGUOUS = "contiguous"
HOST_HEADINGS = ("layer", "work", "plans", "host us", "torch.adds", "device us", "kernels", "torch operations")
HOST_WORDS = 3  # of these headings stand over words
MANY = 100  # steps, below which the 99th percentile lies between the slowest two

Row = Mapping[str, Any]  # of `bench.Found`


def cells(row: Row) -> list[str]:
    """A line of ``HEADINGS`` after the map's name: milliseconds, of the parts the sums over the layers."""
    experts, modelled_experts, exchange, modelled_exchange = (
        sum(row[name]) for name in ("experts_ms", "modelled_experts_ms", "exchange_ms", "modelled_exchange_ms")
    )
    return [
        f"{row['step_ms']:.2f}",
        f"{row['step_p99_ms']:.2f}",
        beside(row["step_ms"], row["modelled_step_ms"]),
        beside(row["step_ms"], row["simulated_step_ms"]),
        f"{experts:.2f}",
        beside(experts, modelled_experts),
        f"{exchange:.2f}",
        beside(exchange, modelled_exchange),
    ]


def beside(measured: float, foretold: float) -> str:
    """Return the modelled time, and its relative distance to the measured one."""
    return f"{foretold:.2f} ({off(measured, foretold):+.1%})"


def off(measured: float, foretold: float) -> float:
    """Return the relative distance of the modelled time to the measured one."""
    return foretold / measured - 1


def what(run: Mapping[str, Any]) -> str:
    """Describe the measurement and the costs of the model."""
    return (
        f"{run['gpus']} GPUs, {run['tokens']:,} tokens each, {run['layers']} layers of {run['experts']} experts of "
        f"d={run['d']}, h={run['h']}, routed as {run['model'] or run['trace']}. Milliseconds of a step; experts and "
        f"exchange: the slowest rank of each layer, summed. p99 of {run['steps']} steps"
        f"{' is practically the slowest of them' if run['steps'] < MANY else ''}. Modelled by costs on even loads: "
        f"{1e9 * run['token_s']:.0f} ns a routed row, {run['bandwidth'][0][-1] / 1e9:.3g} GB/s a pair, and in each "
        f"layer {1e6 * run['exchange_s']:.0f} us of exchange and {1e6 * run['rest_s']:.0f} us of the rest. Simulated: "
        f"MoETuner's model of a step, by which moeblaze place compares. In brackets, how far off."
    )


def doubts(run: Mapping[str, Any]) -> list[str]:
    """A warning for each fitted cost that is below zero."""
    costs = {"the exchange": run["exchange_s"], "the rest": run["rest_s"]}
    return [
        f"Warning: the fitted cost of {name} is negative ({1e6 * seconds:.0f} us in each layer): noise exceeded it, "
        f"and what is modelled with it means nothing."
        for name, seconds in costs.items()
        if seconds < 0
    ]


def summary(found: Mapping[str, Any]) -> str:
    """A record in Markdown: what was measured, every map, the models' errors, and gains over the contiguous map."""
    rows = found["rows"]
    names = [f"`{name}`" for name in short_names([row["name"] for row in rows])]
    measured = [[name, *cells(row)] for name, row in zip(names, rows, strict=True)]
    parts = [
        what(found),
        *doubts(found),
        documents.table(HEADINGS, measured),
        furthest(names, rows),
        _gains(names, rows),
    ]
    return "\n\n".join(parts + noise(names, rows))


def short_names(names: Sequence[str]) -> list[str]:
    """Return each map's method, the part of its name after the last ``_``; the whole name if two share a method."""
    times = Counter(map(_method, names))
    return [_method(name) if times[_method(name)] == 1 else name for name in names]


def _method(name):
    return name.rpartition("_")[2]


def furthest(names: Sequence[str], rows: Sequence[Row]) -> str:
    """Name the map whose measured step each of the two models misses by most: one sentence."""
    said = []
    for key in ("modelled_step_ms", "simulated_step_ms"):
        shares = [(name, off(row["step_ms"], row[key])) for name, row in zip(names, rows, strict=True)]
        name, share = max(shares, key=lambda one: abs(one[1]))
        said.append(f"for {name} ({share:+.1%})")
    modelled, simulated = said
    return f"The modelled step is furthest from the measured one {modelled}, and the simulated step {simulated}."


def _gains(names, rows):
    """Table of the time that each map saves over the first contiguous one."""
    base = next((number for number, row in enumerate(rows) if _method(row["name"]) == CONTIGUOUS), None)
    if base is None:
        return f"No `{CONTIGUOUS}` map was measured: there is none to compare with."
    others = [(name, row) for number, (name, row) in enumerate(zip(names, rows, strict=True)) if number != base]
    lines = [[name, *(f"{less:+.1%}" for less in _less(row, rows[base]))] for name, row in others]
    return documents.table((f"less than {names[base]} by", *GAINS), lines)


def _less(row, base):
    """Return the values of ``GAINS``."""
    steps = [1 - row[name] / base[name] for name in ("step_ms", "modelled_step_ms", "simulated_step_ms")]
    return steps + [1 - sum(row[name]) / sum(base[name]) for name in ("experts_ms", "exchange_ms")]


def noise(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the difference of the measurements of every two maps with the same model in every layer."""
    pairs = combinations(zip(names, rows, strict=True), 2)
    keys = ("modelled_experts_ms", "modelled_exchange_ms", "simulated_step_ms")
    return [
        _of_one_map((one, other), (row, twin))
        for (one, row), (other, twin) in pairs
        if all(row[key] == twin[key] for key in keys)
    ]


def _of_one_map(names, rows):
    """Compare the measurements of one map under two names."""
    times = [[np.sum(row[key]) for row in rows] for key in ("step_ms", "experts_ms", "exchange_ms")]
    steps, experts, exchanges = (1 - min(of_one) / max(of_one) for of_one in times)
    return (
        f"{' and '.join(names)} are one map here, except perhaps for the numbers of the GPUs: both have the same "
        f"predictions in every layer. Their measured steps are {steps:.1%} apart, their experts' tails {experts:.1%} "
        f"and their exchange's {exchanges:.1%}. Two measurements of one map differ by at least as much, so "
        "smaller gains mean nothing."
    )


# The host's time ------------------------------------------------------------------------------------------------------


def host(found: Mapping[str, Any]) -> str:
    """Return a sentence and a table: the cost of a step over one rank to host and device, beside one device."""
    rows = found["rows"]
    steps = {(row["preset"], row["plans"]): row for row in rows if row["work"] == "step"}
    alone = steps["MoELayer", True]
    exact, roomy = steps["ExpertParallelMoE", False], steps["ExpertParallelMoE with room", True]
    shape = ", ".join(f"{name} = {size:,}" for name, size in rows[0]["shape"].items())
    said = (
        f"A layer of {shape}, in {rows[0]['dtype']}. Over one rank, a step takes the host {_beyond(exact, alone)} more "
        f"than a step of MoELayer with launch plans. With room for a fixed number of rows and launch plans, it takes "
        f"the host {_beyond(roomy, alone)} more."
    )
    return f"{said}\n\n{documents.table(HOST_HEADINGS, [host_cells(row) for row in rows], HOST_WORDS)}"


def _beyond(row: Row, alone: Row) -> str:
    """Return the host's extra time for a step: in us, and in calls of torch.add."""
    return f"{row['host_us'] - alone['host_us']:,.0f} us ({row['units'] - alone['units']:.0f} torch.adds)"


def host_cells(row: Row) -> list[str]:
    """A line of ``HOST_HEADINGS``; the device's part is known of steps."""
    words = [
        row["preset"],
        row["work"],
        "yes" if row["plans"] else "no",
        f"{row['host_us']:.0f}",
        f"{row['units']:.0f}",
    ]
    if "device_us" not in row:
        return [*words, "", "", ""]
    return [*words, f"{row['device_us']:.0f}", f"{row['kernels']:.0f}", f"{row['torch_operations']:.0f}"]
