"""``moeblaze replay`` and ``moeblaze shift``: placement over time."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moeblaze_ref.cli.shared import AsJson, Force, each_name, print_plots, show, to_file, user_errors
from moeblaze_ref.core import progress, provenance, records, source_hashes
from moeblaze_ref.core.checks import MAX_EXPERTS

MOST_WIDTH = 2**20
METHODS = "greedy", "eplb", "dedup", "eplb-nearest", "dedup-copies"
PICTURE = "load_by_batch"

TraceFile = Annotated[Path, typer.Option(help="npz with topk (tokens, layers, k) int16.")]
Gpus = Annotated[int, typer.Option(help="Number of GPUs.", max=MAX_EXPERTS)]
Method = Annotated[
    list[str] | None, typer.Option(help=f"Methods of moeblaze place; {', '.join(METHODS)} by default; repeatable.")
]
Topology = Annotated[str, typer.Option(help="nvlink, two-nodes, nodes-of-8, or a .json, as in moeblaze place.")]
Width = Annotated[int, typer.Option("--d", help="Model width: what a token costs to move.", max=MOST_WIDTH)]
ExpertWidth = Annotated[int, typer.Option("--h", help="Expert width: what an expert costs to move.", max=MOST_WIDTH)]


def replay(
    trace: TraceFile,
    gpus: Gpus,
    method: Method = None,
    batch: Annotated[int, typer.Option(help="Tokens of a batch.")] = 1024,
    window: Annotated[
        int, typer.Option(help="Tokens that a map is fitted to: the first ones, then the last before a new map.")
    ] = 4096,
    rebalance: Annotated[
        list[str] | None, typer.Option(help="Fit a new map after so many tokens, beside never; repeatable.")
    ] = None,
    dispatch: Annotated[
        list[str] | None,
        typer.Option(help="Which copy a token uses: rule (the default), even or balanced; repeatable."),
    ] = None,
    topology: Topology = "nvlink",
    d: Width = 2880,
    h: ExpertWidth = 2880,
    plots: Annotated[Path | None, typer.Option(help="Write load_by_batch.png into this folder.")] = None,
    record: Annotated[Path | None, to_file(help="Also write every batch here, with versions and commit.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Replay a trace as a stream of batches: load, traffic and modelled time, with new maps on the way or without.

    Whatever is repeatable may also be one list with commas.
    """
    from moeblaze_ref.core import figures, traces
    from moeblaze_ref.placement import over_time, time_tables
    from moeblaze_ref.placement.replay import RULE, Stream

    with user_errors():
        records.check_distinct({"--record": [record], "--plots": figures.pictures(plots, [PICTURE])})
        routed, costs = traces.load(trace), _costs(topology, gpus, d, h)
        options = _options(routed, costs, method)
        stream = Stream(routed, costs, 3 * d * h * 2, batch, window)
        every = [_tokens(text) for text in each_name(rebalance)]
        work = over_time.stream_jobs(stream, method or METHODS, every, each_name(dispatch) or (RULE,), options)
        if record:
            provenance.check_place(record, "replay", force)
        if plots:
            figures.check(plots, [PICTURE], force)
        found = progress.run_with_bar("replaying", work)
        rows = [over_time.summary(one) for one in found]
        show(as_json, rows, functools.partial(time_tables.table, time_tables.STREAM, rows, _of_batches(batch, window)))
        content = _asked(trace, routed, gpus, topology, d, h) | {
            **{"batch": batch, "window": window, "changes": over_time.changes(routed)},
            "streams": [one.as_dict() for one in found],
        }
        if plots:
            print_plots([figures.save(time_tables.load_by_batch(content), plots, PICTURE, force)])
        if record:
            provenance.record(record, "replay", content, force, (source_hashes.PLACEMENT,))


def shift(
    trace: TraceFile,
    gpus: Gpus,
    by: Annotated[
        str, typer.Option(help="What tells traffic apart: kind (seq_kind), or third (of the tokens of a sequence).")
    ] = "kind",
    kinds: Annotated[
        list[str] | None, typer.Option(help="Kinds to compare; all by default, of thirds 'first third' and so on.")
    ] = None,
    method: Method = None,
    seeds: Annotated[int, typer.Option(help="Random halves of the sequences.", max=1000)] = 3,
    topology: Topology = "nvlink",
    d: Width = 2880,
    h: ExpertWidth = 2880,
    record: Annotated[Path | None, to_file(help="Also write every seed here, with versions and commit.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Fit maps to traffic of one kind, evaluate them on another, and compare with maps of the same kind.

    Each is fitted to one half of the sequences and evaluated on the other half.
    """
    from moeblaze_ref.core import traces
    from moeblaze_ref.placement import over_time, time_tables

    with user_errors():
        routed, costs = traces.load(trace), _costs(topology, gpus, d, h)
        options = _options(routed, costs, method)
        work = over_time.shift_jobs(routed, by, each_name(kinds), method or METHODS, seeds, costs, options)
        if record:
            provenance.check_place(record, "shift", force)
        found = progress.run_with_bar("fitting", work)
        rows = [asdict(row) for row in over_time.losses(found)]
        caption = f"Medians over {seeds} splits. Lost: beside the map that was fitted to what it is evaluated on."
        show(as_json, rows, functools.partial(time_tables.table, time_tables.SHIFT, rows, caption))
        if record:
            content = _asked(trace, routed, gpus, topology, d, h) | {
                **{"by": by, "seeds": seeds, "losses": rows},
                "trials": [asdict(row) for row in found],
            }
            provenance.record(record, "shift", content, force, (source_hashes.PLACEMENT,))


def _costs(topology, gpus, d, h):
    """The measured costs of a step on so many GPUs."""
    from moeblaze_ref.core import checks
    from moeblaze_ref.placement import traffic

    for name, size in (("gpus", gpus), ("d", d), ("h", h)):
        checks.check_int(name, size, 1)
    costs = traffic.runtime(topology, gpus, d, h)
    costs.on.check_size(gpus)
    return costs


def _options(routed, costs, method):
    """The methods' options, which fit the trace; no method is too large for it."""
    from moeblaze_ref.placement import maps, methods

    maps.check_gpus(costs.on.num_gpus, routed.num_experts)
    options = methods.Options(costs=costs)
    options.check_fits(routed.num_experts, costs.on.num_gpus)
    for reason in methods.not_tried(methods.named(method or METHODS), routed, costs.on.num_gpus).values():
        raise ValueError(reason)
    return options


def _tokens(text: str) -> int:
    """A number of tokens."""
    if not text.strip().isdecimal():
        raise ValueError(f"--rebalance is {text!r}, but it must be a number of tokens, such as 4096")
    return int(text)


def _asked(trace, routed, gpus, topology, d, h) -> dict[str, Any]:
    """Return the options of the command that a record stores."""
    named = {"trace": trace.name, "model": routed.model}
    return named | {"gpus": gpus, "topology": topology, "d": d, "h": h}


def _of_batches(batch: int, window: int) -> str:
    return (
        f"Means over batches of {batch:,} tokens, fitted to {window:,} tokens. Load: the fullest GPU over the mean. "
        "D, N: distinct GPUs and nodes of a token in a layer. ms: the modelled step of a batch, and what the experts "
        "that move add to it."
    )
