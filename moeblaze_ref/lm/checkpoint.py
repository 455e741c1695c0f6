"""Checkpoints of a training run: one safetensors file, tensors beside a JSON header, there whole or not at all.

The header says whose run it is, how far it is, and the digest of it all: what a disk or a hand has changed is refused.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeblaze_ref.core import records
from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.nn.systems import system

HEADER = "moeblaze_ref"  # the key of safetensors' metadata that holds the JSON header
FORMAT = 2
KEYS = {"format", "settings", "text", "steps", "digest"}  # of the header


class CheckpointError(ValueError):
    """Raised for an incomplete checkpoint or one of another run; the message names what differs."""


class Trained(NamedTuple):
    """The model of a checkpoint, and its origin."""

    model: MoETransformer
    settings: TrainSettings  #: that it was trained with
    text: str  #: `data.Corpus.fingerprint` of what it was trained on
    steps: int  #: that it was trained for
    digest: str  #: SHA-256 of the checkpoint, in hexadecimal


def save(path: Path, trainer: Trainer):
    """Write a run's whole state, in place of the checkpoint that the path may hold.

    Raises
    ------
    ValueError
        If another file is there.
    OSError
        If it cannot be written; what was there before stays.
    """
    tensors = {name: tensor.cpu() for name, tensor in trainer.tensors().items()}
    header = {"format": FORMAT, **_run_of(trainer.settings, trainer.corpus.fingerprint), "steps": trainer.step}
    metadata = {HEADER: json.dumps(header | {"digest": _digest(header, tensors)})}
    # Not by save_file: it would write under a name of its own, which outlives a kill, for the owner's eyes alone.
    records.replace(path, lambda part: part.write_bytes(safetensors.torch.save(tensors, metadata)), step_of)


def load(path: Path, trainer: Trainer):
    """Restore a fresh run to the state of the run that wrote a checkpoint.

    Raises
    ------
    OSError
        If there is no such file, or it may not be read.
    CheckpointError
        If it is no whole checkpoint, or that of other settings or of another text: the message names the first field
        or tensor that differs, and both values. The run is then as it was.
    """
    check(path, trainer.settings, trainer.corpus.fingerprint)
    header, tensors = _read(path)
    _check_tensors(path, tensors, trainer.form(header["steps"]))
    trainer.restore(tensors)


def check(path: Path, settings: TrainSettings, text: str):
    """A run with these settings wrote this checkpoint, on the text with this fingerprint.

    Raises
    ------
    OSError
        If there is no such file, or it may not be read.
    CheckpointError
        If it is no checkpoint, or that of another run: the message names the first field that differs.
    """
    header = _read_header(path)
    theirs, ours = _flat({name: header[name] for name in ("settings", "text")}), _flat(_run_of(settings, text))
    for name in [*ours, *(theirs.keys() - ours.keys())]:
        its, wanted = theirs.get(name, "absent"), ours.get(name, "absent")
        if its != wanted:
            raise CheckpointError(f"{path} is of another run: its {name} is {its!r}, but here it is {wanted!r}")


def step_of(path: Path) -> int:
    """Steps that the run of a checkpoint had done; errors as in `check`."""
    return _read_header(path)["steps"]


def load_model(path: Path, device: str | torch.device = "cpu") -> Trained:
    """The model of a checkpoint; an OSError as in `check`, a CheckpointError if it is no whole checkpoint."""
    header, tensors = _read(path)
    try:
        fields = header["settings"]
        settings = TrainSettings(**{**fields, "config": LMConfig(**fields["config"])})
        model = MoETransformer(settings.config, system(settings.layer, **settings.layer_options))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has settings that this version does not know: {error}") from None
    weights = {name: tensors[name] for name in tensors if name.startswith("model.")}
    _check_tensors(path, weights, {f"model.{name}": parameter for name, parameter in model.named_parameters()})
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    return Trained(model.to(device), settings, header["text"], header["steps"], header["digest"])


def name_of_run(trainer: Trainer) -> str:
    """The same for the same settings and text: 16 hexadecimal digits of SHA-256."""
    return _digest(_run_of(trainer.settings, trainer.corpus.fingerprint), {})[:16]


def _run_of(settings: TrainSettings, text: str) -> dict[str, Any]:
    return {"settings": asdict(settings), "text": text}


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a header and of every tensor's name, dtype, shape and bytes."""
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {_form(tensor)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a checkpoint, as they were written."""
    header = _read_header(path)
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if _digest({name: header[name] for name in header if name != "digest"}, tensors) != header["digest"]:
        raise CheckpointError(f"{path} is damaged: what it holds does not have the digest that it was written with")
    return header, tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    path.open("rb").close()  # a folder, or what may not be read, is named by the system
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated, or no checkpoint: {error}") from None


def _read_header(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        metadata = file.metadata() or {}
    if HEADER not in metadata:
        raise CheckpointError(f"{path} holds tensors, but no training run of this project wrote it")
    try:
        header = records.check_object("its header", records.parse("its header", metadata[HEADER]), {"format"})
        if header["format"] == FORMAT:
            return records.check_object("its header", header, KEYS)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    raise CheckpointError(f"{path} is of format {header['format']}, but this version reads format {FORMAT}")


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names, as JSON has their values."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]):
    """The names of the expected tensors and no others, of their dtypes and shapes, and every number finite."""
    for name in [*expected, *(found.keys() - expected.keys())]:
        its, wanted = _form(found.get(name)), _form(expected.get(name))
        if its != wanted:
            raise CheckpointError(f"{path}: {name} is {its}, but it must be {wanted}")
        if not torch.isfinite(found[name]).all():
            raise CheckpointError(f"{path}: {name} holds NaN or infinity, but every number must be finite")


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
