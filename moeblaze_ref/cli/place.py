"""``moeblaze place``: experts on GPUs."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import AsJson, Force, print_note, print_plots, show, to_file, user_errors
from moeblaze_ref.core import progress, provenance, records, source_hashes
from moeblaze_ref.core.checks import MAX_EXPERTS

MOST_WIDTH = 2**20
PLOTS = ("load_by_gpu", "load_against_crossings")


def place(
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", max=MAX_EXPERTS)],
    trace: Annotated[
        Path | None, typer.Option(help="npz with topk (tokens, layers, k) int16, and seq (tokens,) to split by.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Runtime that recorded the file of --trace: vllm or sglang.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Synthetic trace with Zipf's load: LAYERSxExK, such as 58x256x8, at most 128x1024x32."),
    ] = None,
    splits: Annotated[
        int,
        typer.Option(
            help="Random halves of the sequences to fit to and evaluate on; 0: the whole trace for both.", max=10_000
        ),
    ] = 1,
    method: Annotated[
        list[str] | None,
        typer.Option(help="all, or one of contiguous, greedy, eplb, exflow, moetuner, joint, ...; repeatable."),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="nvlink, two-nodes, or a .json with bandwidth (G, G) bytes/s and, measured, token_s.")
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
    time_limit: Annotated[float, typer.Option(help="Seconds for each of moetuner's two programs.")] = 60.0,
    limit: Annotated[
        float, typer.Option(help="Method joint: the most load a GPU may have, as a multiple of the mean.")
    ] = 1.02,
    out: Annotated[Path | None, to_file(help="Write the map of the fastest method, fitted to split 0.")] = None,
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
    """Place experts on GPUs by MoETuner and the baselines, fitted to one half of a trace and evaluated on the other.

    Whatever is repeatable may also be one list with commas.
    """
    from moeblaze_ref.core import figures
    from moeblaze_ref.placement import bounds, joint, methods, report, simulate, sources, targets

    with user_errors():
        pictures = figures.pictures(plots, PLOTS)
        records.check_distinct({"--out": [out], "--record": [record], "--plots": pictures})
        chosen = methods.named(method or ["all"])
        recorded = sources.recorded_or_synthetic(trace, source, synthetic, num_experts, model)
        routed = recorded.trace
        if recorded.left_out:
            print_note(f"{recorded.left_out} recorded tokens are left out: padding, or decodes of unknown requests")
        on = simulate.cluster(topology, gpus, d, h)
        options = methods.Options(bounds.parse(experts_per_gpu), solver, time_limit, limit)
        jobs = methods.jobs(routed, on, chosen, splits, options, tokens)
        shown = (plots or record) and splits and "joint" in chosen
        curve = methods.curve(routed, on, options, tokens=tokens) if shown else []
        dense = targets.dense_layers(dense_layers, target, routed.topk.shape[1], recorded.dense)
        output = targets.planned(out, target, dense)
        if target:
            targets.check_even(routed.num_experts, gpus, options.bounds)
        if output:
            records.check_writable(output.path, output.load, force)
        if record:
            provenance.check_place(record, "place", force)
        if plots:
            figures.check(plots, PLOTS, force)
        trials = progress.run_with_bar("placing", jobs)
        rows = methods.medians(trials)
        caption = report.evaluated_on(splits, gpus, tokens)
        show(as_json, [row.as_dict() for row in rows], functools.partial(report.table, rows, caption))
        if output:
            output.save(methods.fastest_map(trials), force)
        along = dict(zip(joint.LIMITS, progress.run_with_bar("the curve", curve), strict=False))
        if plots:
            written = figures.save_all(_drawn(trials, list(along.values())), plots, force)
            print_plots(written)
        if record:
            named = trace.name if trace else f"synthetic {synthetic}"
            asked = {"trace": named, "model": routed.model, "gpus": gpus, "topology": topology, "d": d, "h": h}
            asked |= {"solver": solver, "time_limit": time_limit, "limit": limit}
            content = asked | report.content(rows, trials, along, tokens)
            provenance.record(record, "place", content, force, (source_hashes.PLACEMENT,))


def _drawn(trials, curve) -> dict:
    """Return two figures of the first split: the load of every GPU, and load against crossings."""
    from moeblaze_ref.placement import plots

    first = [trial for trial in trials if trial.seed == trials[0].seed]
    figures = plots.heat_map(first), plots.load_against_crossings(first, curve)
    return dict(zip(PLOTS, figures, strict=True))
