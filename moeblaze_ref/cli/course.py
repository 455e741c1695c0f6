"""``moeblaze course``: grade the solved notebooks of others."""

import csv
import os
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import Force, print_text, stdout, to_file, user_errors

course = typer.Typer(help="Grade the exercises of the course.", no_args_is_help=True)

OPEN_NETWORK = (
    "this system does not keep submissions from the network: its kernel has no seccomp. "
    "Grade on Linux, or accept it with --allow-network"
)


@course.callback()
def _group():
    """Keep ``grade`` a command of its own."""


@course.command()
def grade(
    folder: Annotated[Path, typer.Argument(help="Folder of solved notebooks, in any folders of their own.")],
    out: Annotated[Path, to_file(help="CSV to write: submission, exercise, kind, verdict, message.")],
    limit: Annotated[int, typer.Option(help="Seconds of one kernel.", min=1)] = 60,
    jobs: Annotated[int | None, typer.Option(help="Submissions at once; by default one a core.", min=1)] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Grade even where submissions can reach the network.")
    ] = False,
    force: Force = False,
):
    """Check every answer of every notebook in a confined process, and write a CSV."""
    from rich.table import Table

    from moeblaze_ref.course.exercises import grading

    with user_errors():
        found = grading.submissions(folder)
        if out.exists() and not force:
            raise ValueError(f"{out} is there already; --force replaces it")
        if not allow_network and grading.open_network():
            raise ValueError(OPEN_NETWORK)
    with user_errors():
        grades = [*grading.grade(folder, limit, jobs or os.cpu_count() or 1)]
    with open(out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(grading.Grade._fields)
        writer.writerows(grades)
    table = Table("submission", *grading.VERDICTS)
    for name, counts in grading.totals(grades).items():
        table.add_row(name, *map(str, counts.values()))
    stdout().print(table)
    print_text(f"{len(found)} submissions, {len(grades)} answers: {out}")
