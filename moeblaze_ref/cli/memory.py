"""``moeblaze memory``: where the activation bytes of a layer go."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import AsJson, Force, Tokens, print_plots, show, user_errors
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import PRESETS
from moeblaze_ref.core.config import preset as find_preset
from moeblaze_ref.core.routers import ROUTERS, Router, Shared

PLOTS = ("memory_by_tensor", "memory_against_tokens")


def memory(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "conf4",
    tokens: Tokens = None,
    system: Annotated[list[str] | None, typer.Option(help="Only this system; repeatable.")] = None,
    activation: Annotated[str | None, typer.Option(help="Activation, in place of the preset's.")] = None,
    capacity_factor: Annotated[
        float, typer.Option(help="Capacity factor, for the system capacity.", max=checks.MAX_EXPERTS)
    ] = 1.25,
    router: Annotated[
        str | None, typer.Option(help=f"A model family's router, in place of a softmax: {', '.join(ROUTERS)}.")
    ] = None,
    shared: Annotated[int | None, typer.Option(help="Hidden width of an expert that sees every token.")] = None,
    shared_gate: Annotated[
        bool, typer.Option("--shared-gate", help="A sigmoid multiplies the shared expert's output.")
    ] = False,
    block: Annotated[int, typer.Option(help="Rows and columns of a block, for megablocks.")] = 128,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the layers, on a GPU if there is one, and see what is kept.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Write the two plots into this folder.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Show where the activation bytes of one MoE layer go, tensor by tensor, for every system."""
    from moeblaze_ref.core import figures
    from moeblaze_ref.memory import measured, report
    from moeblaze_ref.memory.accounting import Assumptions, accounts, systems_with

    with user_errors():
        config = find_preset(preset).config
        changes = {"L": tokens, "activation": activation}
        config = config.replace(**{name: value for name, value in changes.items() if value is not None})
        assumptions = Assumptions(
            capacity_factor=capacity_factor,
            router=router or Router(),
            shared=_shared(shared, shared_gate),
            block=block,
        )
        found = accounts(config, system or systems_with(assumptions), assumptions)
        notes = [*report.preset_notes(preset), *report.layer_notes(assumptions)]
        if plots:
            figures.check(plots, PLOTS, force)
    measurements = measured.measure_here(found) if measure else ()
    data = report.as_json(preset, config, found, notes, measurements)
    show(as_json, data, functools.partial(report.tables, config, found, notes, measurements), indent=2)
    if plots:
        with user_errors():
            written = figures.save_all(drawn(config, found, assumptions), plots, force)
        print_plots(written)


def _shared(width, gated):
    if gated and width is None:
        raise ValueError("--shared-gate is given, but there is no shared expert: give its width with --shared")
    return None if width is None else Shared(checks.check_int("shared", width, 1), gated)


def drawn(config, accounts, assumptions) -> dict:
    """Return both plots of a configuration, Matplotlib's figures, by their names."""
    from moeblaze_ref.memory import plots

    figures = plots.stacked_bars(accounts), plots.bytes_against_tokens(config, assumptions)
    return dict(zip(PLOTS, figures, strict=True))
