"""``moeblaze course``: what a reader has solved; for a lecturer grades, slides, a quiz and the format of nbgrader."""

import csv
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import (
    MOST_SECONDS,
    AsJson,
    Force,
    file,
    print_text,
    show,
    stdout,
    to_file,
    user_errors,
)

course = typer.Typer(
    help="The exercises: what is solved, a fresh start, grades. For lecturers: slides, a quiz, nbgrader's format.",
    no_args_is_help=True,
)

OPEN_NETWORK = (
    "this system does not keep submissions from the network: its kernel has no seccomp. "
    "Grade on Linux, or accept it with --allow-network"
)


@course.command("list")
def list_(as_json: AsJson = False):
    """List the exercises with their difficulty from 1 to 3, and the day on which you solved each."""
    from rich.table import Table

    from moeblaze_ref.course.exercises import progress
    from moeblaze_ref.course.exercises.sheets import SHEETS

    with user_errors():
        days, levels = progress.solved(), progress.levels()
    rows = [
        {
            "sheet": sheet.course,
            "exercise": one.name,
            "kind": one.kind,
            "difficulty": one.difficulty,
            "solved": days.get(one.name),
            "level": levels.get(one.name),
        }
        for sheet in SHEETS
        for one in sheet.exercises
    ]

    def table() -> Table:
        shown = Table(*rows[0], caption=f"{len(days)} of {len(rows)} solved")
        for row in rows:
            shown.add_row(*(str(value or "") for value in row.values()))
        return shown

    show(as_json, rows, table)


@course.command()
def reset(
    exercise: Annotated[str, typer.Argument(help="Name of the exercise, from `moeblaze course list`.")],
    folder: Annotated[Path, typer.Option(help="Folder of your notebooks of exercises.")] = Path(
        "moeblaze_course/notebooks/exercises"
    ),
):
    """Give an exercise's cell and editor their first text again, and forget that you solved it."""
    from moeblaze_ref.core import checks
    from moeblaze_ref.course.exercises import drafts, notebooks, progress
    from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS

    with user_errors():
        checks.check_name("exercise", exercise, EXERCISES)
        (sheet,) = (sheet for sheet in SHEETS if exercise in {one.name for one in sheet.exercises})
        path = folder / f"{sheet.course}.ipynb"
        notebooks.reset(exercise, path)
        drafts.forget(exercise)
        progress.forget(exercise)
    print_text(f"{exercise} is as it was found: {path}")


def _as_text(value: str) -> str:
    """The value on one line; a spreadsheet would take one that begins with an operator for a formula."""
    line = " ".join(value.split())
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


@course.command()
def grade(
    folder: Annotated[Path, typer.Argument(help="Folder of solved notebooks, in any folders of their own.")],
    out: Annotated[Path, to_file(help="CSV to write: submission, exercise, kind, verdict, level, message.")],
    limit: Annotated[
        int, typer.Option(help="Seconds of one kernel, or of one process of a torch project.", min=1, max=MOST_SECONDS)
    ] = 120,
    memory: Annotated[float, typer.Option(help="GiB that one submission may hold.", min=0.5, max=2**20)] = 2,
    jobs: Annotated[
        int | None, typer.Option(help="Submissions at once; by default one a core, if memory allows.", min=1)
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Grade even where submissions can reach the network.")
    ] = False,
    force: Force = False,
):
    """Check every answer of every notebook in a confined process, and write a CSV."""
    from rich.table import Table
    from rich.text import Text

    from moeblaze_ref.core import records
    from moeblaze_ref.core.units import GIB
    from moeblaze_ref.course.exercises import grading
    from moeblaze_ref.verify.guard import Limits

    limits = Limits(limit, resident_bytes=int(memory * GIB))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(grading.Grade._fields)
    begins = _begins_with(text.getvalue())
    with user_errors():
        found = grading.submissions(folder)
        records.check_writable(out, begins, force)
        if not allow_network and grading.open_network():
            raise ValueError(OPEN_NETWORK)
        grades = [*grading.grade(folder, limits, jobs or grading.jobs_of(limits))]
        writer.writerows(map(_as_text, one) for one in grades)
        records.replace(out, lambda part: part.write_text(text.getvalue(), "utf-8", newline=""), begins, force)
    table = Table("submission", *grading.VERDICTS)
    for name, counts in grading.totals(grades).items():
        table.add_row(Text(name), *map(str, counts.values()))
    stdout().print(table)
    print_text(f"{len(found)} submissions, {len(grades)} answers: {out}")


@course.command()
def export(folder: Annotated[Path, typer.Argument(help="Folder of the course; it may be new.")]):
    """Write the exercises as a course of nbgrader, for `nbgrader generate_assignment` and `nbgrader autograde`."""
    from moeblaze_ref.course.teaching import nbgrader

    with user_errors():
        written = nbgrader.export(folder)
    print_text(f"{len(written) - 1} assignments and {written[-1].name}: {folder}")


@course.command("slides")
def slides_(out: Annotated[Path, typer.Argument(parser=file, help="HTML file to write.")], force: Force = False):
    """Write the slides of a lecture of two hours, made from the notebooks: one file that needs no network."""
    from moeblaze_ref.core import records
    from moeblaze_ref.course.teaching import slides

    begins = _begins_with(slides.FIRST_LINE)
    with user_errors():
        records.check_writable(out, begins, force)
        made = list(slides.lecture())
        records.replace(out, lambda part: part.write_text(slides.page(made)), begins, force)
    print_text(f"{len(made)} slides: {out}")


def _begins_with(first: str) -> Callable[[Path], None]:
    """The check that a file has the first line of those that a command writes."""

    def check(path: Path) -> None:
        if not path.read_text().startswith(first.strip()):
            raise ValueError(f"its first line is not {first.strip()!r}")

    return check


@course.command("quiz")
def quiz_(
    out: Annotated[Path | None, to_file(help="Markdown file of the questions.")] = None,
    answers: Annotated[Path | None, to_file(help="Markdown file of the answers, for the lecturer.")] = None,
    force: Force = False,
):
    """Write the quiz of 44 questions, its answers, or both, each into a file of its own."""
    from moeblaze_ref.core import records
    from moeblaze_ref.course.teaching import quiz

    with user_errors():
        if out is None and answers is None:
            raise ValueError("nothing to write: name a file with --out, with --answers, or both")
        records.check_distinct({"--out": [out], "--answers": [answers]})
        pages = [(out, quiz.TITLE, quiz.sheet), (answers, quiz.KEY_TITLE, quiz.key)]
        wanted = [(path, _begins_with(title), page) for path, title, page in pages if path]
        for path, begins, _ in wanted:
            records.check_writable(path, begins, force)
        for path, begins, page in wanted:
            records.replace(path, functools.partial(Path.write_text, data=page()), begins, force)
    print_text(f"{len(quiz.questions())} questions: {', '.join(map(str, filter(None, (out, answers))))}")
