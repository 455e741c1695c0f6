"""The table of `moeblaze place`."""

import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.table import Table

from moeblaze_ref.placement.methods import Row, Trial


def _known(number: float | None, form: str = ".3f") -> str:
    return "-" if number is None else format(number, form)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.method,
    "load": lambda row: _known(row.balance_mean),
    "worst layer": lambda row: _known(row.balance_worst),
    "D": lambda row: _known(row.distinct_gpus),
    "N": lambda row: _known(row.distinct_nodes),
    "cross-GPU": lambda row: _known(row.cross_share, ".1%"),
    "home ms": lambda row: _known(row.runtime_ms),
    "hops ms": lambda row: _known(row.step_ms),
    "batch of 256": lambda row: _known(row.batch_256),
    "solved in s": lambda row: f"{row.solve_s:.2f}{' cut' if row.cut else ''}",
    "gap": lambda row: f"{row.gap:.2%}" if row.status == "solved" else row.status,
}


def table(rows: list[Row], evaluated: str) -> Table:
    """A line a method: the fullest GPU over the mean, crossings, the modelled step, and what finding it took.

    The gap is `methods.Fitted.gap`, where a solver found it; ``evaluated`` is the caption.
    """
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=evaluated, caption_justify="left")
    for name in COLUMNS:
        found.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        found.add_row(*(cell(row) for cell in COLUMNS.values()))
    return found


def cut(method: str, time_limit: float) -> str:
    """Return the message about a method that the time limit ended."""
    return f"{method}: the time limit of {time_limit:g} s ended it, so another run may find another map"


def evaluated_on(splits: int, num_gpus: int, tokens: int) -> str:
    """The caption of `table`."""
    where = "the whole trace, on which they were fitted too"
    if splits:
        where = "the held-out half of the sequences" + (f", medians over {splits} splits" if splits > 1 else "")
    return (
        f"{num_gpus} GPUs, evaluated on {where}. Load: the fullest GPU over the mean. D, N: distinct GPUs and nodes of "
        f"a token in a layer. ms: modelled steps of {tokens:,} tokens that come home after every layer, or hop from "
        "layer to layer. Cut: the time limit ended a search. Gap: what the fullest GPU's load, and the slowest "
        "pairs' time, may be above the least where they were fitted. Heuristic: no solver found it."
    )


def content(rows: list[Row], trials: list[Trial], along: Mapping[float, Trial], tokens: int) -> dict[str, Any]:
    """Return a record's content: medians, every split of every method, and the curve by its limits."""
    every = [trial.as_dict() for trial in trials]
    curve = [{"limit": limit} | trial.as_dict() for limit, trial in along.items()]
    return {"tokens": tokens, "rows": [row.as_dict() for row in rows], "splits": every, "curve": curve}


def peak_bytes() -> int:
    """Return the most memory that this process, or a process that it started and ended, had at a time."""
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return most if sys.platform == "darwin" else 1024 * most
