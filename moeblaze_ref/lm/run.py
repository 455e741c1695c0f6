"""A training run in a folder: steps, a log of them, checkpoints, and going on where a run was cut off."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moeblaze_ref import doors
from moeblaze_ref.lm import checkpoint
from moeblaze_ref.lm.log import Log
from moeblaze_ref.lm.train import NonFinite, Trainer
from moeblaze_ref.torch_capacity import CapacityMoE

CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"  # of a run's folder


def run(
    trainer: Trainer,
    folder: Path,
    resume: bool = False,
    every: int = 50,
    validation_batches: int = 8,
    on_line: Callable[[dict[str, Any]], None] | None = None,
    checkpoint_every: int | None = None,
) -> list[dict[str, Any]]:
    """Train to the last step.

    Parameters
    ----------
    trainer : Trainer
        A fresh one.
    folder : Path
        Where the run keeps ``LOG`` and ``CHECKPOINT``; made if need be.
    resume : bool
        Go on from the folder's checkpoint; without one, a run that was cut off early begins again.
    every : int
        Steps from one validation to the next; the last step has one.
    validation_batches : int
        Of each validation.
    on_line : callable, optional
        Called with every new line of the log.
    checkpoint_every : int, optional
        Steps from one checkpoint to the next, in place of ``every``; the last step has one.

    Returns
    -------
    list of dict
        The log: a line for each step (step, loss, learning_rate, gradient_norm, tokens_per_second; on a GPU peak_bytes;
        of the layer ``capacity`` dropped_share, of the routed rows), and lines of step and validation_loss, before the
        first step too.

    Raises
    ------
    ValueError
        If the folder holds a run, and it is not to be resumed.
    CheckpointError
        If its checkpoint is truncated or of another run; nothing is overwritten.
    NonFinite
        If a loss or a gradient is; the last checkpoint stays.
    """
    doors.check_int("every", every, at_least=1)
    checkpoint_every = every if checkpoint_every is None else checkpoint_every
    doors.check_int("checkpoint_every", checkpoint_every, at_least=1)
    doors.check_int("validation_batches", validation_batches, at_least=1)
    log = _open(trainer, folder, resume)

    def note(line: dict[str, Any]):
        log.add(line)
        if on_line is not None:
            on_line(line)

    try:
        _train(trainer, note, folder / CHECKPOINT, every, checkpoint_every, validation_batches)
    except NonFinite as error:
        raise NonFinite(f"{error}. {_what_is_kept(folder / CHECKPOINT)}") from None
    return log.lines


def _open(trainer: Trainer, folder: Path, resume: bool) -> Log:
    """The log of a run that begins, or of one that goes on with its trainer restored."""
    held = [name for name in (CHECKPOINT, LOG) if (folder / name).exists()]
    if held and not resume:
        raise ValueError(f"{folder} holds a run already ({', '.join(held)}): resume it, or name another folder")
    if CHECKPOINT in held:
        checkpoint.load(folder / CHECKPOINT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    return Log(folder / LOG, through=trainer.step or -1)


def _train(trainer: Trainer, note: Callable, path: Path, every: int, checkpoint_every: int, batches: int):
    def due(period: int) -> bool:
        return trainer.step % period == 0 or trainer.step == trainer.settings.steps

    if trainer.step == 0:
        note({"step": 0, "validation_loss": trainer.validate(batches)})
    while trainer.step < trainer.settings.steps:
        note(_timed_step(trainer))
        if due(every):
            note({"step": trainer.step, "validation_loss": trainer.validate(batches)})
        if due(checkpoint_every):
            checkpoint.save(path, trainer)  # last: what it says is done is in the log


def _timed_step(trainer: Trainer) -> dict[str, Any]:
    began = time.perf_counter()
    done = trainer.advance()
    seconds = time.perf_counter() - began
    tokens = trainer.settings.batch * trainer.settings.config.sequence
    line = done._asdict() | {"tokens_per_second": round(tokens / seconds, 1)}
    if trainer.device.type == "cuda":
        line["peak_bytes"] = torch.cuda.max_memory_allocated(trainer.device)
    return line | _dropped(trainer)


def _dropped(trainer: Trainer) -> dict[str, float]:
    """The share of the last step's routed rows, over all layers, that were dropped; nothing where none can be."""
    layers = [block.moe for block in trainer.model.blocks if isinstance(block.moe, CapacityMoE)]
    if not layers:
        return {}
    dropped = torch.stack([layer.dropped_slots for layer in layers]).sum().item()
    return {"dropped_share": dropped / sum(chosen.numel() for chosen in trainer.chosen)}


def _what_is_kept(path: Path) -> str:
    return f"{path} keeps step {checkpoint.step_of(path)}" if path.exists() else "No checkpoint was written yet"
