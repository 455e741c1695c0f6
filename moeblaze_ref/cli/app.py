"""The ``moeblaze`` command. Each group of its commands has a file of its own in this folder.

A command imports what it works with inside its function, so that ``moeblaze --help`` starts without torch and
Matplotlib.
"""

import typer

from moeblaze_ref.cli import bench, check, course, doctor, lab, league, lm, memory, paper, place, plan, replay

app = typer.Typer(
    help="The Mixture-of-Experts memory wall: a reference that proves itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

for command in (
    doctor.doctor,
    check.check,
    check.sanitize,
    bench.bench,
    paper.paper,
    bench.tune,
    league.league,
    memory.memory,
    plan.plan,
    lm.train,
    lm.evidence,
    lm.trace,
    place.place,
    replay.replay,
    replay.shift,
    lm.demo,
):
    app.command()(command)
app.command(context_settings=lab.PASSED_ON)(lab.lab)
app.add_typer(course.course, name="course")
