"""A language model in training: whom its routers load as it learns, and what its experts read in the end."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from IPython.display import Markdown
from matplotlib.figure import Figure
from torch import Tensor

from moeblaze_ref.core import checks
from moeblaze_ref.core.drawing import centered, heading, panels
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.lm import checkpoint, document, evidence, evidence_plots, report
from moeblaze_ref.lm.data import Corpus
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.nn.systems import MoEFactory
from moeblaze_ref.nn.torch_layer import MoELayer

# Load over time -------------------------------------------------------------------------------------------------------


class Learned(NamedTuple):
    """A finished run, and how it loaded its experts."""

    trainer: Trainer
    loads: np.ndarray  #: (steps, layers, E) rows of each expert, as multiples of the balanced share
    validation_loss: float  #: nats per byte


def learn(settings: TrainSettings, corpus: Corpus, on_step: Callable[[int, float], None]) -> Learned:
    """Train to the last step, and count each step's rows."""
    trainer, loads = Trainer(settings, corpus), []
    while trainer.step < settings.steps:
        done = trainer.advance()
        loads.append([shares(chosen, settings.config.E) for chosen in trainer.chosen])
        on_step(done.step, done.loss)
    return Learned(trainer, np.array(loads), trainer.validate(batches=4))


def restored(run: Trainer, corpus: Corpus) -> Trainer:
    """Return another trainer that a checkpoint of this run has restored, as after a kill."""
    again = Trainer(run.settings, corpus)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        checkpoint.save(path, run)
        checkpoint.load(path, again)
    return again


def shares(topk_experts: Tensor, E: int) -> np.ndarray:
    """The rows of each expert (E,), as multiples of what it would have if all had as many."""
    counts = torch.bincount(topk_experts.flatten(), minlength=E).double()  # (E,)
    return (counts / counts.mean()).numpy()


def loads_picture(runs: Mapping[str, Learned], layer: int) -> Figure:
    """Each run's experts as bands over the steps: darker than the middle is more than the balanced share."""
    figure, shown = panels(10, 1.2 + 1.8 * len(runs), len(runs), framed=True, sharex=True, squeeze=False)
    for axes, (name, run) in zip(shown[:, 0], runs.items(), strict=True):
        loads = run.loads[:, layer].T  # (E, steps)
        shades = axes.imshow(loads, cmap="cividis_r", vmin=0, vmax=3, aspect="auto", interpolation="nearest")
        last = loads[:, -50:].mean(axis=1)
        heading(axes, f"{name}: over the last 50 steps {last.min():.2f} to {last.max():.2f} of the balanced share")
        axes.set(ylabel="expert", yticks=range(len(loads)))
    axes.set_xlabel("step")
    figure.suptitle(f"layer {layer}", x=0.01, ha="left", fontsize="medium")
    figure.colorbar(shades, ax=shown, label="rows / balanced share", extend="max")
    return figure


# Bytes that an expert reads -------------------------------------------------------------------------------------------

KINDS = {
    "space": b" ",
    "end of line": b"\n",
    "small letters": bytes(range(ord("a"), ord("z") + 1)),
    "capitals": bytes(range(ord("A"), ord("Z") + 1)),
    "digits": b"0123456789",
    "underscore": b"_",
    "brackets": b"()[]{}<>",
    "quotes, hashes": b"\"'#`",
    "other signs": b"!$%&*+,-./:;=?@\\^|~",
}


def reads(trace: RoutingTrace) -> np.ndarray:
    """Return how each kind of byte is spread over the experts, (layers, kinds, E): rows add up to 1, or are NaN."""
    assert trace.token is not None  # of a trace of bytes
    counts = np.zeros((trace.topk.shape[1], 256, trace.num_experts))
    for layer in range(len(counts)):
        for chosen in trace.topk[:, layer].T:  # (tokens,)
            np.add.at(counts[layer], (trace.token, chosen), 1)
    by_kind = np.stack([counts[:, list(held)].sum(axis=1) for held in KINDS.values()], axis=1)
    with np.errstate(invalid="ignore"):  # a kind that the text lacks
        return by_kind / by_kind.sum(axis=-1, keepdims=True)


def reads_picture(spread: np.ndarray, layer: int) -> Figure:
    """One layer of `reads`: a row for each kind of byte, a column for each expert, the share in each cell."""
    shown = spread[layer]  # (kinds, E)
    kinds, E = shown.shape
    figure, axes = panels(2.5 + 0.75 * E, 1.2 + 0.36 * kinds, framed=True)
    axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (kind, expert), share in np.ndenumerate(shown):
        if share >= 0.01:
            centered(axes, expert, kind, f"{share:.0%}", color="white" if share > 0.5 else "black")
    axes.set_yticks(range(kinds), list(KINDS))
    axes.set(xticks=range(E), xlabel="expert")
    axes.tick_params(length=0)
    heading(axes, f"layer {layer}: of all choices for a kind of byte, the share of each expert")
    return figure


# Measurements on a GPU ------------------------------------------------------------------------------------------------


def measured(kind: str) -> tuple[Markdown | Figure, ...]:
    """The records of a kind of evidence that the repository holds: their words, and the picture of each.

    Raises
    ------
    FileNotFoundError
        If it holds none; the message says which command makes one.
    """
    paths = document.RECORDS[checks.check_name("kind of evidence", kind, document.RECORDS)]
    found = [evidence.load(path, kind) for path in paths if path.exists()]
    if not found:
        raise FileNotFoundError(
            f"Not measured yet: `moeblaze evidence {kind} --preset lm-small --record docs/results/{paths[0].name}` "
            "on a GPU"
        )
    places = [f"Measured on {one['device']}, commit `{one['commit'][:7]}`." for one in found]
    words = Markdown("\n\n".join([report.summary(*found), *places]))
    return words, *map(evidence_plots.picture, found)


# Layers that are wrong ------------------------------------------------------------------------------------------------


class _Scaled(MoELayer):
    """A planted fault: the output is off by a ten-thousandth."""

    def _run(self, x, weights, topk_experts):
        result = super()._run(x, weights, topk_experts)
        return result._replace(out=result.out * (1 + 1e-4))


class _Forgetful(MoELayer):
    """The last token gets nothing from its experts."""

    def _run(self, x, weights, topk_experts):
        result = super()._run(x, weights, topk_experts)
        last = torch.arange(len(x), device=x.device)[:, None] == len(x) - 1  # (L, 1)
        return result._replace(out=result.out.masked_fill(last, 0.0))


class _Exchanged(MoELayer):
    """The first two experts have each other's down-projection."""

    def _run(self, x, weights, topk_experts):
        order = [1, 0, *range(2, len(weights.w3))]
        return super()._run(x, weights._replace(w3=weights.w3[order]), topk_experts)


FAULTS: dict[str, MoEFactory] = {
    "output 1.0001 times as large": _Scaled,
    "last token forgotten": _Forgetful,
    "two experts exchange `w3`": _Exchanged,
}
