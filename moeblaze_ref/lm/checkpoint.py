"""Checkpoints of a training run: one safetensors file, tensors beside a JSON header, there whole or not at all.

A checkpoint is written under another name and renamed once it is on the disk: a kill at any moment leaves the last
whole one.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.systems import system

HEADER = "moeblaze_ref"  # the key of safetensors' metadata that holds the JSON header
FORMAT = 1


class CheckpointError(ValueError):
    """A file that is no whole checkpoint, or that of another run: the message says which, and what differs."""


def save(path: Path, trainer: Trainer):
    """Write a run's whole state, in place of the checkpoint that the path may hold.

    Raises
    ------
    OSError
        If it cannot be written; what was there before stays.
    """
    metadata = {HEADER: json.dumps(_header_of(trainer))}
    replace(path, lambda part: save_file(trainer.tensors(), part, metadata))


def replace(path: Path, write: Callable[[Path], Any]):
    """Let ``write`` fill a file beside ``path``, see it onto the disk, and give it that name."""
    part = path.with_name(f"{path.name}.part")  # of a run that was killed too: the next one writes over it
    write(part)
    _to_disk(part)
    os.replace(part, path)
    _to_disk(path.parent)


def _to_disk(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path, trainer: Trainer):
    """Make a fresh run the one that wrote a checkpoint.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    CheckpointError
        If it is no whole checkpoint, or that of other settings or of another text: the message names the first field
        that differs, and both values. The run is then as it was.
    """
    header, tensors = _read(path)
    _check_same_run(path, _flat(header), _flat(_header_of(trainer)))
    _check_shapes(path, tensors, trainer.model)
    trainer.restore(tensors)


def check(path: Path, settings: TrainSettings, text: str):
    """A run with these settings wrote this checkpoint, on the text with this fingerprint.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    CheckpointError
        If it is no whole checkpoint, or that of another run; as `load`.
    """
    with _opened(path) as file:
        _check_same_run(path, _flat(_read_header(path, file)), _flat(_header(settings, text)))


def step_of(path: Path) -> int:
    """Steps that the run of a checkpoint had done.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    CheckpointError
        If it is no whole checkpoint.
    """
    _, tensors = _read(path)
    return len(tensors["losses"])


def load_model(path: Path, device: str | torch.device = "cpu") -> tuple[MoETransformer, TrainSettings]:
    """The model of a checkpoint, and the settings that it was trained with.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    CheckpointError
        If it is no whole checkpoint.
    """
    header, tensors = _read(path)
    fields = header["settings"]
    settings = TrainSettings(**{**fields, "config": LMConfig(**fields["config"])})
    model = MoETransformer(settings.config, system(settings.layer, **settings.layer_options))
    _check_shapes(path, tensors, model)
    model.load_state_dict({name: tensors[f"model.{name}"] for name, _ in model.named_parameters()})
    return model.to(device), settings


def _header_of(trainer: Trainer) -> dict[str, Any]:
    return _header(trainer.settings, trainer.corpus.fingerprint)


def _header(settings: TrainSettings, text: str) -> dict[str, Any]:
    return {"format": FORMAT, "settings": asdict(settings), "text": text}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a checkpoint."""
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        return _read_header(path, file), tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated, or no checkpoint: {error}") from None


def _read_header(path: Path, file: Any) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if HEADER not in metadata:
        raise CheckpointError(f"{path} holds tensors, but no training run of this project wrote it")
    header = json.loads(metadata[HEADER])
    if header["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {header['format']}, but this version reads format {FORMAT}")
    return header


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names, as JSON has their values."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _check_same_run(path: Path, theirs: dict[str, Any], ours: dict[str, Any]):
    for name in [*ours, *(theirs.keys() - ours.keys())]:
        its, wanted = theirs.get(name, "absent"), ours.get(name, "absent")
        if its != wanted:
            raise CheckpointError(f"{path} is of another run: its {name} is {its!r}, but here it is {wanted!r}")


def _check_shapes(path: Path, tensors: dict[str, Tensor], model: MoETransformer):
    """Every weight is there, with its shape; the rest was written together with them."""
    for name, parameter in model.named_parameters():
        tensor = tensors.get(f"model.{name}")
        if tensor is None or tensor.shape != parameter.shape:
            found = "absent" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise CheckpointError(f"{path}: model.{name} is {found}, but it must be {tuple(parameter.shape)}")
