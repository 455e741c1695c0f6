"""A training run in a folder: steps, a log of them, checkpoints, and going on where a run was cut off."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moeblaze_ref.core import checks, records
from moeblaze_ref.lm import checkpoint, finite, log
from moeblaze_ref.lm.train import NonFinite, Trainer
from moeblaze_ref.nn.torch_capacity import CapacityMoE

FILES = CHECKPOINT, LOG, LOCK = "checkpoint.safetensors", "log.jsonl", "lock"  # of a run's folder


def run(
    trainer: Trainer,
    folder: Path,
    resume: bool = False,
    every: int = 50,
    validation_batches: int = 8,
    on_line: Callable[[dict[str, Any]], None] | None = None,
    checkpoint_every: int | None = None,
) -> list[dict[str, Any]]:
    """Train to the last step, in a folder that is made if need be.

    It holds ``LOG``, ``CHECKPOINT``, and ``LOCK``, which one process at a time holds. The trainer is a fresh one; with
    ``resume`` it goes on from the folder's checkpoint, and without one, a run that was cut off early begins again.
    There is a validation of ``validation_batches`` every ``every`` steps, a checkpoint as often, or every
    ``checkpoint_every`` steps, and both after the last step. ``on_line`` is called with every line that is added to the
    log.

    Returns
    -------
    list of dict
        The log: a line for each step (step, loss, learning_rate, gradient_norm, tokens_per_second; on a GPU peak_bytes;
        of the layer ``capacity`` dropped_share, of the routed rows), and lines of step and validation_loss, before the
        first step too: that line names the run.

    Raises
    ------
    OSError
        If the folder cannot be written, or a checkpoint's log is not there.
    ValueError
        If the folder is a file, one of its files is not a regular file, another process trains in it, it holds a run
        that is not to be resumed, or its log is not that of the run; nothing is overwritten.
    CheckpointError
        If its checkpoint is damaged or of another run; nothing is overwritten.
    NonFinite
        If a loss, a gradient or, at a checkpoint, a weight is; the last checkpoint stays.
    """
    checks.check_int("every", every, at_least=1)
    checkpoint_every = every if checkpoint_every is None else checkpoint_every
    checks.check_int("checkpoint_every", checkpoint_every, at_least=1)
    checks.check_int("validation_batches", validation_batches, at_least=1)
    with _alone_in(folder):
        kept = _restored(trainer, folder, resume)
        try:
            return _train(trainer, folder, kept, every, checkpoint_every, validation_batches, on_line)
        except NonFinite as error:
            raise NonFinite(f"{error}. {what_is_kept(folder)}") from None


def what_is_kept(folder: Path) -> str:
    """A sentence on the last checkpoint of a run's folder."""
    path = folder / CHECKPOINT
    return f"{path} keeps step {checkpoint.step_of(path)}" if path.exists() else "No checkpoint was written yet"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process trains in it; the system releases a killed process' lock."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but a run needs a folder: name another one")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        records.check_regular(folder / name)
    with (folder / LOCK).open("a") as file:  # what it holds, if it is another's file, stays
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process trains in {folder}: wait for it, or name another folder") from None
        yield


def _restored(trainer: Trainer, folder: Path, resume: bool) -> list[dict[str, Any]]:
    """The lines that a log goes on from, with the trainer where they end; none if the run begins."""
    held = [name for name in (CHECKPOINT, LOG) if (folder / name).exists()]
    if held and not resume:
        raise ValueError(f"{folder} holds a run already ({', '.join(held)}): resume it, or name another folder")
    if CHECKPOINT in held:
        checkpoint.load(folder / CHECKPOINT, trainer)
        return _lines_of(trainer, folder / LOG)
    if LOG in held:
        _check_name(trainer, folder / LOG, log.read(folder / LOG))
    return []


def _lines_of(trainer: Trainer, path: Path) -> list[dict[str, Any]]:
    """The lines of a restored run through its last step; later ones are of steps that no checkpoint has."""
    lines = log.read(path)
    _check_name(trainer, path, lines)
    kept = [line for line in lines if line["step"] <= trainer.step]
    if [line["loss"] for line in kept if "loss" in line] != trainer.losses:
        raise ValueError(f"{path} does not have the losses of the {trainer.step} steps that the checkpoint has done")
    return kept


def _check_name(trainer: Trainer, path: Path, lines: list[dict[str, Any]]):
    its, ours = lines[0].get("run"), checkpoint.name_of_run(trainer)
    if its != ours:
        raise ValueError(f"{path} is of the run {its}, but here it is {ours}: name another folder")


def _train(
    trainer: Trainer,
    folder: Path,
    kept: list[dict[str, Any]],
    every: int,
    checkpoint_every: int,
    batches: int,
    on_line: Callable[[dict[str, Any]], None] | None,
) -> list[dict[str, Any]]:
    def due(period: int) -> bool:
        return trainer.step % period == 0 or trainer.step == trainer.settings.steps

    def validated() -> dict[str, Any]:
        return {"step": trainer.step, "validation_loss": trainer.validate(batches)}

    # Before there is a file: a layer that cannot run leaves none.
    lines = log.Log(folder / LOG, kept or [validated() | {"run": checkpoint.name_of_run(trainer)}])
    if trainer.settings.steps == 0:
        _save(trainer, folder)
    while trainer.step < trainer.settings.steps:
        new = [_timed_step(trainer)]
        if due(every):
            new.append(validated())
        lines.add(*new)  # together: a log that has the last step has its validation
        if due(checkpoint_every):
            _save(trainer, folder)
        if on_line is not None:
            for line in new:
                on_line(line)
    return lines.lines


def _save(trainer: Trainer, folder: Path):
    """A checkpoint; what it says is done is in the log, on the disk too."""
    if (name := finite.first_weight(trainer.model)) is not None:
        raise NonFinite(f"step {trainer.step}: {name} holds NaN or infinity after it")
    records.to_disk(folder / LOG)
    checkpoint.save(folder / CHECKPOINT, trainer)


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
    dropped = torch.stack([slots for layer in layers if (slots := layer.dropped_slots) is not None]).sum().item()
    return {"dropped_share": dropped / sum(chosen.numel() for chosen in trainer.chosen)}
