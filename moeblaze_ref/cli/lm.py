"""The commands of the small language model: ``train``, ``evidence``, ``trace`` and ``demo``."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moeblaze_ref.cli.shared import AsJson, Force, print_text, stdout, to_file, user_errors
from moeblaze_ref.core import provenance, records
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.lm import EVIDENCE, LAYERS, PRESETS

Data = Annotated[Path | None, typer.Option(help="Folder of text files, in place of Python's own.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU by default, if there is one.")]


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run: its checkpoint and its log.")],
    preset: Annotated[str, typer.Option(help="; ".join(f"{name}: {what}" for name, what in PRESETS.items()))] = "tiny",
    layer: Annotated[
        str, typer.Option(help=f"System that runs the MoE layers, one of {', '.join(LAYERS)}.")
    ] = "moeblaze",
    policy: Annotated[
        str | None, typer.Option(help=f"Save policy, for the layer moeblaze: one of {', '.join(POLICIES)}.")
    ] = None,
    capacity_factor: Annotated[float | None, typer.Option(help="Capacity factor, for the layer capacity.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, in place of the preset's.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision, float32 or bfloat16, in place of the preset's.")
    ] = None,
    data: Data = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")] = 0,
    device: Device = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's checkpoint, if it has one.")
    ] = False,
):
    """Train a MoE language model on bytes; exit with status 1 if a loss is not finite. After a kill, --resume."""
    from moeblaze_ref.lm import command

    options = {"policy": policy, "capacity_factor": capacity_factor}
    changes = {"steps": steps, "precision": precision, "seed": seed}
    with user_errors(), finite_numbers(), stopped_by_hand():
        settings = command.settings(preset, layer, options, changes)
        lines = command.train(settings, out, data, device, resume)
    print_text(command.summary(lines, out))


@contextmanager
def finite_numbers() -> Iterator[None]:
    """Training that meets NaN or infinity has failed: print where, and exit with status 1."""
    try:
        yield
    except FloatingPointError as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def stopped_by_hand() -> Iterator[None]:
    """Ctrl-C loses only what came after the last checkpoint: say so, and exit with its usual status."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped: --resume goes on from the last checkpoint", highlight=False)
        raise typer.Exit(130) from None


def evidence(
    kind: Annotated[str, typer.Argument(help="; ".join(f"{name}: {what}" for name, what in EVIDENCE.items()))],
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny",
    steps: Annotated[
        int | None, typer.Option(help="Training steps; by default 200, or the preset's for curves.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="With curves: train or resume this run first; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With curves: the folder that holds the runs' folders.")] = None,
    data: Data = None,
    device: Device = None,
    record: Annotated[Path | None, to_file(help="Also write it here, with GPU, versions, commit.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Compare training with our layer and training with plain torch; exit with status 1 if they differ."""
    from moeblaze_ref.lm import evidence as gathering
    from moeblaze_ref.lm import report

    request, command = gathering.Request(preset, steps, device, data, out, tuple(run or ())), f"evidence {kind}"
    with user_errors(), finite_numbers():
        records.check_distinct({"--record": [record], "--out": gathering.files(request)})
        if record:
            provenance.check_place(record, command, force)
        found = gathering.gather(kind, request)
        if record:
            provenance.record(record, command, found, force)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_text(report.summary(found))
    raise typer.Exit(1 if found["passed"] is False else 0)


def trace(
    checkpoint: Annotated[
        Path, typer.Option(help="Checkpoint of a training run: checkpoint.safetensors in its folder.")
    ],
    out: Annotated[Path, to_file(help="The npz file to write.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of text files, in place of Python's prose, code and tables; repeatable."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Most tokens to record of each kind of text; 40,960 by default.")
    ] = None,
    device: Device = None,
    force: Force = False,
):
    """Write which experts a trained model chose, token by token, on the part of a text that training holds out."""
    from moeblaze_ref.lm import command

    with user_errors():
        text = command.trace(checkpoint, out, data or [], tokens, device, force)
    print_text(text)


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 150,
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("demo_output"),
    force: Force = False,
):
    """Train a tiny MoE language model, then check and account for the layers that it really has."""
    from moeblaze_ref.cli import demo as show
    from moeblaze_ref.verify import check

    with user_errors():
        rows = show.run(steps, out, stdout(), force)
    raise typer.Exit(0 if check.passed(rows) else 1)
