"""``moeblaze paper``: the papers' claims beside formulas and measurements."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import AsJson, Force, print_plots, show, to_file, user_errors
from moeblaze_ref.core import progress


def paper(
    item: Annotated[list[str] | None, typer.Argument(help="Item, such as moeblaze-fig3; all items by default.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the items on this GPU first.")] = False,
    record: Annotated[Path | None, to_file(help="With --gpu: add the runs to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write the items' pictures into this folder.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Compare each claim of the papers with its formula and with our measurements; exit with status 1 if one fails."""
    from moeblaze_ref.papers import claims, command, report
    from moeblaze_ref.papers.results import Recorded

    with user_errors():
        items = command.chosen(item or [], gpu, record, plots)
        if plots:
            command.check_plots(items, plots, record, force)
        recorded = command.measure(items, record, progress.bar, force) if gpu else Recorded()
        rows = [row for one in items for row in one.rows(recorded)]
    show(as_json, report.as_json(items, rows), functools.partial(report.table, items, rows, details=bool(item)))
    if plots:
        with user_errors():
            written = command.write_plots(items, recorded, plots, force)
        print_plots(written, none="nothing is recorded")
    raise typer.Exit(1 if claims.failures(rows) else 0)
