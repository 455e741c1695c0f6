"""``moeblaze train`` and ``moeblaze trace``: from names and paths to a training run, and to what its routers decide."""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import TextColumn
from torch import Tensor

from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import checks, progress, records, traces
from moeblaze_ref.core.units import MIB
from moeblaze_ref.lm import data, tracing
from moeblaze_ref.lm.checkpoint import load_model
from moeblaze_ref.lm.presets import preset
from moeblaze_ref.lm.run import run
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.nn.systems import SYSTEMS
from moeblaze_ref.nn.torch_layer import KernelMoE

OWNER = {"policy": "moeblaze", "capacity_factor": "capacity"}  # which layer an option is of


def settings(name: str, layer: str, options: Mapping[str, Any], changes: Mapping[str, Any]) -> TrainSettings:
    """Return a preset's settings with another layer; omits options that are None or the layer's default.

    Raises
    ------
    ValueError, TypeError
        If there is no such preset or layer, an option is not the layer's, or a value is not allowed.
    """
    checks.check_name("layer", layer, SYSTEMS)
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if OWNER[option] != layer:
            raise ValueError(f"{option} is an option of the layer {OWNER[option]}, but the layer is {layer}")
    defaults = inspect.signature(SYSTEMS[layer]).parameters
    given = {option: value for option, value in given.items() if value != defaults[option].default}
    changed = {field: value for field, value in changes.items() if value is not None}
    return replace(preset(name), layer=layer, layer_options=given, **changed)


def train(
    chosen: TrainSettings,
    out: Path,
    folder: Path | None = None,
    device: str | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
) -> list[dict[str, Any]]:
    """Train as `run.run` does, on Python's own text or a folder's, and show the progress on standard error.

    Returns
    -------
    list of dict
        The lines of the log.

    Raises
    ------
    ValueError
        If there is no such device, nothing there can run the layer, or as `run.run` and `data.folder`.
    """
    device, corpus = prepare(chosen.layer, folder, device)
    trainer = Trainer(chosen, corpus, device)
    columns = TextColumn("loss {task.fields[loss]:.2f}"), TextColumn("{task.fields[speed]}")
    with progress.bar(*columns) as shown:
        task = shown.add_task("training", total=chosen.steps, loss=float("nan"), speed="")

        def show(line):
            if "loss" in line:
                shown.update(task, completed=line["step"], loss=line["loss"], speed=_speed(line))

        return run(trainer, out, resume, on_line=show, checkpoint_every=checkpoint_every)


def trace(
    checkpoint: Path, out: Path, folders: list[Path], tokens: int | None, device: str | None, force: bool = False
) -> str:
    """Write the routing of a checkpoint's model to a file, and say in one sentence what it holds.

    A folder is a kind of text by its name; of its text that part is read that a training on it would hold out.

    Raises
    ------
    OSError
        If there is no checkpoint, or the file cannot be written; what was there before stays.
    ValueError
        If there is no such device, nothing there can run the layer, the file is the checkpoint, two folders have one
        name, a file is there that is no trace and ``force`` is not set, or as `tracing.trace` and `data.folder`.
    """
    device = _device(device)
    trained = load_model(checkpoint, device)
    settings = trained.settings
    _check_runs(settings.layer, device)
    texts, sources = _texts(folders)
    if out.exists() and out.samefile(checkpoint):
        raise ValueError(f"{out} is the checkpoint itself, but the trace needs a file of its own: name another one")
    records.check_writable(out, traces.load, force)
    info = tracing.origin(trained, texts, sources)
    found = tracing.trace(trained.model, settings, texts, info, tracing.TOKENS if tokens is None else tokens)
    traces.save(out, found, force)
    return f"{out}: {_what_it_holds(found)}"


def _texts(folders: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Held-out texts by kind, and of each the fingerprint of the corpus that it is held out of."""
    if not folders:
        texts = data.held_out_kinds()
        return texts, dict.fromkeys(texts, data.standard_library().fingerprint)
    for name, count in Counter(path.resolve().name for path in folders).items():
        if count > 1:
            raise ValueError(f"{count} folders are called {name}, but each kind of text needs a name of its own")
    corpora = {path.resolve().name: data.folder(path) for path in folders}
    texts = {name: corpus.validation for name, corpus in corpora.items()}
    return texts, {name: corpus.fingerprint for name, corpus in corpora.items()}


def _what_it_holds(trace: traces.RoutingTrace) -> str:
    assert trace.seq_kind is not None, "tracing.trace names the kind of every window"
    windows, length = Counter[str](trace.seq_kind.tolist()), trace.info["config"]["sequence"]
    kinds = ", ".join(f"{count * length:,} of {kind}" for kind, count in windows.items())
    layers, k = trace.topk.shape[1:]
    told = f"{trace.tokens:,} tokens ({kinds}), {layers} layers, {k} of {trace.num_experts} experts each"
    unsure = [kind for kind in windows if kind not in trace.info["held_out"]]
    return f"{told}; the model was trained on another text, and may have read {', '.join(unsure)}" if unsure else told


def prepare(layer: str, folder: Path | None, device: str | None) -> tuple[str, data.Corpus]:
    """Return the device and the text to train on; None means a GPU if there is one, and Python's own text.

    Raises
    ------
    ValueError
        If there is no such device, nothing there can run the layer, or as `data.folder`.
    """
    device = _device(device)
    _check_runs(layer, device)
    if device == "cpu":
        torch.set_num_threads(1)  # products this small lose more by waiting for other cores than they gain
    return device, text(folder)


def text(folder: Path | None) -> data.Corpus:
    """A folder's text, or Python's own."""
    return data.standard_library() if folder is None else data.folder(folder)


def _speed(line: Mapping[str, Any]) -> str:
    peak = f", {line['peak_bytes'] / MIB:,.0f} MiB at most" if "peak_bytes" in line else ""
    return f"{line['tokens_per_second']:,.0f} tokens/s{peak}"


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    checks.check_name("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU here (valid: cpu)")
    return name


def _check_runs(layer: str, device: str):
    """Kernels need an executor: CuPy on a GPU, the SIMT executor and its compiler on a CPU."""
    status = BACKENDS["cuda" if device == "cuda" else "simt"].status()
    system = SYSTEMS[layer]
    if isinstance(system, type) and issubclass(system, KernelMoE) and not status.available:
        raise ValueError(f"the layer {layer} cannot run on {device}: {status.detail}; {status.remedy}")


def summary(lines: list[dict[str, Any]], out: Path) -> str:
    """One sentence on a finished run."""
    held_out = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return (
        f"{lines[-1]['step']} steps: validation loss {held_out[0]:.3f} -> {held_out[-1]:.3f} nats per byte; "
        f"log and checkpoint in {out}"
    )
