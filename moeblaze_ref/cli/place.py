"""``moeblaze place``: experts on GPUs."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from moeblaze_ref.cli.shared import AsJson, Force, print_note, print_plots, show, to_file, user_errors
from moeblaze_ref.core import checks, progress, provenance, records, source_hashes
from moeblaze_ref.core.checks import MAX_EXPERTS

MOST_WIDTH = 2**20
PLOTS = ("load_by_gpu", "load_against_crossings")
# Parameters of functions, as their messages name them, whose options have another name.
OPTIONS = {"num_gpus": "--gpus", "num_nodes": "--nodes", "num_groups": "--groups", "time_limit": "--time-limit"}


def place(
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", max=MAX_EXPERTS)],
    trace: Annotated[
        Path | None, typer.Option(help="npz with topk (tokens, layers, k) int16, and seq (tokens,) to split by.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="What recorded the file of --trace: vllm, sglang, or counts alone."),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Synthetic trace with Zipf's load: LAYERSxExK, such as 58x256x8, at most 128x1024x32."),
    ] = None,
    expand: Annotated[
        str | None,
        typer.Option(help="Make a larger model's trace from --trace: LAYERSxExK, with multiples of its E and k."),
    ] = None,
    splits: Annotated[
        int,
        typer.Option(
            help="Random halves of the sequences to fit to and evaluate on; 0: the whole trace for both.", max=10_000
        ),
    ] = 1,
    method: Annotated[
        list[str] | None,
        typer.Option(help="all, or one of contiguous, greedy, eplb, exflow, moetuner, joint, dedup, ...; repeatable."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="dedup (tokens come home after a layer) or hops (layer to layer): --out's step model.")
    ] = "dedup",
    topology: Annotated[
        str,
        typer.Option(
            help="nvlink, two-nodes, nodes-of-8, or a .json with bandwidth (G, G) bytes/s and, measured, token_s."
        ),
    ] = "nvlink",
    d: Annotated[
        int, typer.Option("--d", help="Model width: what a token's transfer and computation cost.", max=MOST_WIDTH)
    ] = 2880,
    h: Annotated[int, typer.Option("--h", help="Expert width.", max=MOST_WIDTH)] = 2880,
    tokens: Annotated[int, typer.Option(help="Tokens in the modelled step.", max=2**40)] = 16_384,
    num_experts: Annotated[
        int | None, typer.Option("--experts", help="Number of experts, if the trace does not state it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name to write into the map; the trace's by default.")] = None,
    experts_per_gpu: Annotated[
        str | None,
        typer.Option(
            help="MIN:MAX experts of a GPU in a layer; as equal as possible by default; 1:E is as MoETuner prints it."
        ),
    ] = None,
    solver: Annotated[str, typer.Option(help="Method moetuner: its solver, cp_sat, highs, scip or gurobi.")] = "cp_sat",
    time_limit: Annotated[float, typer.Option(help="Seconds for each method on each split.")] = 180.0,
    limit: Annotated[
        float, typer.Option(help="Method joint: the most load a GPU may have, as a multiple of the mean.")
    ] = 1.02,
    budget: Annotated[
        int | None,
        typer.Option(help="Experts of a layer on a GPU where they have copies, by default E / G and one more."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Methods eplb...: nodes; the topology's by default.")] = None,
    groups: Annotated[
        int | None, typer.Option(help="Methods eplb...: groups of experts, each on one node; E by default.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of every solver and search: the same seed gives the same map.", max=1_000_000)
    ] = 0,
    seeds: Annotated[
        int, typer.Option(help="Search with so many seeds, from --seed on; --out writes a map of the first.", max=1000)
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes among which methods and splits are spread.", min=1)] = 1,
    out: Annotated[
        Path | None, to_file(help="Write the map of the method that is fastest by the objective, fitted to split 0.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--to", help="Write --out as a runtime reads it: sglang, ascend or eplb.")
    ] = None,
    dense_layers: Annotated[
        str | None,
        typer.Option(help="With --to: the model's layers without experts, such as 0-2 or 0,3. A record names its own."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write load_by_gpu.png into this folder, and load_against_crossings.png.")
    ] = None,
    record: Annotated[Path | None, to_file(help="Also write every split here, with versions and commit.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Place experts on GPUs by our searches, MoETuner and the baselines, fitted to one half of a trace.

    All are evaluated on the other half.

    Whatever is repeatable may also be one list with commas.
    """
    from moeblaze_ref.core import figures
    from moeblaze_ref.placement import bounds, joint, methods, report, simulate, sources, targets, traffic
    from moeblaze_ref.placement.counted import Counted
    from moeblaze_ref.placement.expand import expanded

    with user_errors():
        pictures = figures.pictures(plots, PLOTS)
        records.check_distinct({"--out": [out], "--record": [record], "--plots": pictures})
        checks.check_name("objective", objective, methods.OBJECTIVES)
        asked = methods.named(method or ["all"])
        recorded = sources.recorded_or_synthetic(trace, source, synthetic, num_experts, model)
        if recorded.left_out:
            print_note(f"{recorded.left_out} recorded tokens are left out: padding, or decodes of unknown requests")
        routed = expanded(recorded.trace, expand)
        if plots and isinstance(routed, Counted):
            raise ValueError("--plots draws crossings, but of counts alone none are known")
        _check_budget(budget, routed.num_experts)
        skipped = methods.not_tried(asked, routed, gpus)
        chosen = [name for name in asked if name not in skipped] or asked
        with _naming_options():
            on, costs = simulate.cluster(topology, gpus, d, h), traffic.runtime(topology, gpus, d, h)
            options = methods.Options(
                bounds.parse(experts_per_gpu),
                solver,
                time_limit,
                limit,
                costs=costs,
                budget=budget,
                nodes=nodes,
                groups=groups,
                seed=seed,
            )
            work = methods.jobs(routed, on, chosen, splits, options, tokens, seeds)
        shown = (plots or record) and splits and "joint" in chosen
        curve = methods.curve(routed, on, options, tokens=tokens) if shown else []
        dense = targets.dense_layers(dense_layers, target, routed.layers, recorded.dense)
        output = targets.planned(out, target, dense)
        if target and expand:
            raise ValueError(f"--to {target} writes a map for a runtime, but none has the model that --expand makes up")
        if target and not set(chosen) & set(methods.COPYING):
            targets.check_even(routed.num_experts, gpus, options.bounds)
        if output:
            records.check_writable(output.path, output.load, force)
        if record:
            provenance.check_place(record, "place", force)
        if plots:
            figures.check(plots, PLOTS, force)
        for reason in skipped.values():
            print_note(reason)
        trials = progress.run_with_bar("placing", work, jobs)
        rows = methods.medians(trials)
        for row in rows:
            if row.skipped:
                print_note(f"{row.method}: {row.skipped}")
            if row.cut:
                print_note(report.cut(row.method, time_limit))
        caption = report.evaluated_on(splits, gpus, tokens)
        show(as_json, [row.as_dict() for row in rows], functools.partial(report.table, rows, caption))
        if output:
            output.save(methods.fastest_map(trials, objective, budget is not None, even=target is not None), force)
        along = dict(zip(joint.LIMITS, progress.run_with_bar("the curve", curve, jobs), strict=False))
        if plots:
            written = figures.save_all(_drawn(trials, list(along.values())), plots, force)
            print_plots(written)
        if record:
            named = trace.name if trace else f"synthetic {synthetic}"
            asked_for: dict[str, Any] = {
                **{"trace": named, "expand": expand, "model": routed.model, "gpus": gpus, "topology": topology},
                **{"d": d, "h": h, "solver": solver, "time_limit": time_limit, "limit": limit, "objective": objective},
                **{"budget": budget, "nodes": nodes, "groups": groups, "seed": seed, "seeds": seeds},
                **{"skipped": skipped, "jobs": jobs, "peak_bytes": report.peak_bytes()},
            }
            content = asked_for | report.content(rows, trials, along, tokens)
            provenance.record(record, "place", content, force, (source_hashes.PLACEMENT,))


def _check_budget(budget: int | None, num_experts: int) -> None:
    """A GPU holds an expert of a layer once."""
    if budget is not None and budget > num_experts:
        raise ValueError(f"--budget is {budget}, but a layer has only {num_experts} experts, and a GPU holds each once")


@contextmanager
def _naming_options() -> Iterator[None]:
    """Name the options of ``OPTIONS`` in a message of functions that take them."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        named = rf"\b({'|'.join(OPTIONS)})(?= (is|=) )"
        raise kind(re.sub(named, lambda found: OPTIONS[found[1]], str(error))) from None


def _drawn(trials, curve) -> dict:
    """Return two figures of the first split: the load of every GPU, and load against crossings."""
    from moeblaze_ref.placement import methods, plots

    first: list[Any] = methods.first_of(trials)
    figures = plots.heat_map(first), plots.load_against_crossings(first, curve)
    return dict(zip(PLOTS, figures, strict=True))
