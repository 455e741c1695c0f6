"""``moeblaze evidence``: what training shows, from names and paths to a record."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import TextColumn

from moeblaze_ref.core import checks, progress, records
from moeblaze_ref.lm import command, curves, equal_loss, wall
from moeblaze_ref.lm.presets import preset
from moeblaze_ref.lm.run import FILES
from moeblaze_ref.lm.train import TrainSettings

STEPS = 200  # that are compared one by one
HEAD = {"device", "versions", "commit", "kind", "preset", "settings", "text", "steps", "passed"}  # of every record


@dataclass(frozen=True)
class Request:
    """A user's request for evidence."""

    preset: str = "tiny"  #: one of ``presets.SETTINGS``
    #: To compare, `STEPS` by default; of ``curves``, in place of the preset's, and at least ``curves.WINDOW``.
    steps: int | None = None
    device: str | None = None  #: cpu or cuda; by default a GPU if there is one
    data: Path | None = None  #: folder of text files, in place of Python's own text
    out: Path | None = None  #: of ``curves`` alone: the folder of the runs' folders
    runs: tuple[str, ...] = ()  #: of ``curves`` alone: the ``curves.RUNS`` to train first, or to go on with


def gather(kind: str, request: Request) -> dict[str, Any]:
    """Gather one kind of evidence, of ``KINDS``.

    Returns
    -------
    dict
        {kind, preset, settings, text, steps, passed} and what the kind adds; passed is None while that is open.

    Raises
    ------
    ValueError, TypeError
        If a name, a number, the device, the text or a folder is not allowed; the message says what is.
    NonFinite
        If a loss or a gradient is.
    """
    return {"kind": checks.check_name("kind of evidence", kind, KINDS)} | KINDS[kind](request)


def files(request: Request) -> list[Path]:
    """Return the files that the runs of a request are kept in, whether they are trained now or before."""
    return [request.out / run / name for run in curves.RUNS for name in FILES] if request.out else []


def load(path: Path, kind: str) -> dict[str, Any]:
    """A record of `gather`.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is no record, or one of another kind.
    """
    found = records.read(path, HEAD)
    if found["kind"] != kind:
        raise ValueError(f"{path.name} is a record of {found['kind']!r}, but it must be one of {kind!r}")
    return found


def _head(request: Request, settings: TrainSettings, text: str, steps: int) -> dict[str, Any]:
    return {"preset": request.preset, "settings": asdict(settings), "text": text, "steps": steps}


def _step_by_step(compare: Callable[..., dict[str, Any]]) -> Callable[[Request], dict[str, Any]]:
    """A kind that compares single steps: `equal_loss.replayed` or `equal_loss.free`."""

    def found(request: Request) -> dict[str, Any]:
        if request.out or request.runs:
            raise ValueError("--out and --run apply only to curves: leave them out")
        steps = checks.check_int("steps", STEPS if request.steps is None else request.steps, at_least=1)
        base = preset(request.preset)
        settings = replace(base, precision="float32", steps=max(steps, base.steps))
        device, corpus = command.prepare("moeblaze", request.data, request.device)
        with progress.bar(TextColumn("loss {task.fields[loss]:.2f}")) as shown:
            task = shown.add_task("training side by side", total=steps, loss=float("nan"))

            def show(step, loss):
                shown.update(task, completed=step, loss=loss)

            return _head(request, settings, corpus.fingerprint, steps) | compare(
                settings, corpus, steps, device, on_step=show
            )

    return found


def _curves(request: Request) -> dict[str, Any]:
    """Train the runs that are named, or go on with them; then collect every run that is there."""
    if request.out is None:
        raise ValueError("curves keeps its runs in a folder: name it with --out")
    base = preset(request.preset)
    steps = base.steps if request.steps is None else request.steps
    checks.check_int("steps", steps, at_least=curves.WINDOW)
    base = replace(base, steps=steps)
    for name, settings in {name: curves.settings_of(name, base) for name in request.runs}.items():
        out = request.out / name
        command.train(settings, out, request.data, request.device, True, curves.CHECKPOINT_EVERY)
    text = command.text(request.data).fingerprint
    return _head(request, base, text, steps) | curves.collect(base, text, request.out)


def _memory(request: Request) -> dict[str, Any]:
    """The largest step of every contender; a device that never runs out has no wall."""
    if request.out or request.runs or request.steps:
        raise ValueError("out, run and steps are of other kinds than memory: leave them out")
    base = preset(request.preset)
    device, corpus = command.prepare("moeblaze", request.data, request.device)
    if device == "cpu":
        raise ValueError("memory looks for the largest step that fits a GPU, but the device is cpu")
    with progress.bar(TextColumn("{task.fields[step]}")) as shown:
        task = shown.add_task("climbing", total=None, step="")
        rows = []
        for row in wall.rows(base, corpus, device, list(wall.CONTENDERS)):
            rows.append(row)
            shown.update(task, step=f"{row.contender}: L = {row.L:,} {'fits' if row.fits else 'does not fit'}")
    return _head(request, base, corpus.fingerprint, wall.TIMED_STEPS) | wall.summarise(rows)


KINDS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "replayed": _step_by_step(equal_loss.replayed),
    "free": _step_by_step(equal_loss.free),
    "curves": _curves,
    "memory": _memory,
}
