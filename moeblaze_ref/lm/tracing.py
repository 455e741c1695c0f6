"""Record the routing of a trained model on text."""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeblaze_ref.core import checks, provenance
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.lm.checkpoint import Trained
from moeblaze_ref.lm.model import MoETransformer
from moeblaze_ref.lm.train import TrainSettings, autocast

TOKENS = 40_960  # of each kind of text


def origin(trained: Trained, texts: Mapping[str, Tensor], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the origin of a trace for its ``info``; ``python`` and ``commit`` are those of the tracing.

    Parameters
    ----------
    trained : Trained
        The model is named by its checkpoint's digest.
    texts : mapping of str to Tensor (bytes,) uint8
        Kinds of text.
    sources : mapping of str to str
        Of each kind the fingerprint of the corpus that it is held out of: if the model was trained on that very one,
        ``held_out`` names the kind. Of any other it is not known whether the model has learned from it.
    """
    return {
        "model": f"byte-lm-{trained.digest[:16]}",
        "config": asdict(trained.settings.config),
        "layer": trained.settings.layer,
        "precision": trained.settings.precision,
        "steps": trained.steps,
        "trained_on": trained.text,
        "held_out": [kind for kind in texts if sources[kind] == trained.text],
        "text": {kind: hashlib.sha256(text.numpy().data).hexdigest()[:16] for kind, text in texts.items()},
        "python": platform.python_version(),
        "commit": provenance.environment()["commit"],
    }


def trace(
    model: MoETransformer,
    settings: TrainSettings,
    texts: Mapping[str, Tensor],
    info: Mapping[str, Any],
    tokens: int = TOKENS,
) -> RoutingTrace:
    """The routing of a model on windows of each text, evenly spaced over it.

    Parameters
    ----------
    model : MoETransformer
    settings : TrainSettings
        What it was trained with: the length of a window, and the precision.
    texts : mapping of str to Tensor (bytes,) uint8
        Kinds of text.
    info : mapping
        Of the trace; `origin` makes it of a checkpoint.
    tokens : int
        At most so many of each kind, in whole windows.

    Raises
    ------
    ValueError, TypeError
        If tokens is no integer, or if it or a text is less than a window.
    """
    length = settings.config.sequence
    checks.check_int("tokens", tokens, at_least=length)
    windows = {kind: _windows(kind, text, length, tokens // length) for kind, text in texts.items()}
    read = torch.cat(list(windows.values()))  # (sequences, length) int64
    kinds = [kind for kind, found in windows.items() for _ in found]
    return RoutingTrace(
        topk=_choices(model, settings, read),
        seq=np.repeat(np.arange(len(read), dtype=np.int32), length),
        pos=np.tile(np.arange(length, dtype=np.int32), len(read)),
        token=read.flatten().numpy().astype(np.uint8),
        seq_kind=np.array(kinds),
        num_experts=settings.config.E,
        model=info.get("model", ""),
        info=info,
    )


def _windows(kind: str, text: Tensor, length: int, at_most: int) -> Tensor:
    """Whole windows of a text that do not overlap, evenly spaced over it: (windows, length) int64."""
    whole = len(text) // length
    if whole == 0:
        raise ValueError(f"the text {kind} has {len(text)} bytes, but a window of the model has {length}")
    count = min(at_most, whole)
    chosen = torch.arange(count) * whole // count
    return text[: whole * length].view(whole, length)[chosen].long()


@torch.no_grad()
def _choices(model: MoETransformer, settings: TrainSettings, read: Tensor) -> np.ndarray:
    """The experts of every token in every block: (tokens, layers, k) int16."""
    device = model.head.weight.device
    found = []
    for batch in read.split(settings.batch):
        with autocast(settings.precision, device):
            traces = model(batch.to(device)).traces
        found.append(torch.stack([trace.topk_experts for trace in traces], dim=1).cpu())
    return torch.cat(found).numpy().astype(np.int16)
