"""What a record of ``moeblaze_ref.parallel.bench`` says, in words and in the cells of tables."""

from collections.abc import Mapping
from typing import Any

from moeblaze_ref import documents

HEADINGS = ("map", "step ms", "p99", "modelled", "simulated", "experts", "modelled", "exchange", "modelled")
GAINS = ("less than contiguous by", "step", "step, modelled", "step, simulated", "experts' tail", "exchange's tail")
CONTIGUOUS = "contiguous"


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of ``HEADINGS``: milliseconds of `bench.Found`, of the parts the sums over the layers."""
    experts, modelled_experts, exchange, modelled_exchange = (
        sum(row[name]) for name in ("experts_ms", "modelled_experts_ms", "exchange_ms", "modelled_exchange_ms")
    )
    return [
        row["name"],
        f"{row['step_ms']:.2f}",
        f"{row['step_p99_ms']:.2f}",
        beside(row["step_ms"], row["modelled_step_ms"]),
        f"{row['simulated_step_ms']:.2f}",
        f"{experts:.2f}",
        beside(experts, modelled_experts),
        f"{exchange:.2f}",
        beside(exchange, modelled_exchange),
    ]


def beside(measured: float, foretold: float) -> str:
    """What is foretold, and how far that is from what was measured, of the latter."""
    return f"{foretold:.2f} ({foretold / measured - 1:+.0%})"


def what(run: Mapping[str, Any]) -> str:
    """What was measured, and by which costs it is foretold."""
    return (
        f"{run['gpus']} GPUs, {run['tokens']:,} tokens each, {run['layers']} layers of {run['experts']} experts of "
        f"d={run['d']}, h={run['h']}, routed as {run['model'] or run['trace']}. Milliseconds of a step; experts and "
        f"exchange: the slowest rank of each layer, summed. Modelled by costs on even loads: "
        f"{1e9 * run['token_s']:.0f} ns a routed row, {run['bandwidth'][0][-1] / 1e9:.3g} GB/s a pair, and in each "
        f"layer {1e6 * run['exchange_s']:.0f} us of exchange and {1e6 * run['rest_s']:.0f} us of the rest; in brackets, "
        f"how far off. Simulated: MoETuner's model of a step, by which moeblaze place compares."
    )


def summary(found: Mapping[str, Any]) -> str:
    """A record in Markdown: what was measured, every map, and what maps gain over the contiguous one."""
    rows = {row["name"].rpartition("_")[2]: row for row in found["rows"]}
    measured = [[f"`{name}`", *cells(row)[1:]] for name, row in rows.items()]
    gains = [[f"`{name}`", *_gains(row, rows[CONTIGUOUS])] for name, row in rows.items() if name != CONTIGUOUS]
    return "\n\n".join([what(found), documents.table(HEADINGS, measured), documents.table(GAINS, gains)])


def _gains(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """How much less a map takes than the base: of ``GAINS``."""
    steps = [_less(row[name], base[name]) for name in ("step_ms", "modelled_step_ms", "simulated_step_ms")]
    return steps + [_less(sum(row[name]), sum(base[name])) for name in ("experts_ms", "exchange_ms")]


def _less(value: float, base: float) -> str:
    return f"{1 - value / base:+.1%}"
