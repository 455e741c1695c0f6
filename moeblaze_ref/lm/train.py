"""Training of the language model, and the capture of what its MoE layers see."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref import doors
from moeblaze_ref.lm import data
from moeblaze_ref.lm.model import LMConfig, LMOutput, MoETransformer
from moeblaze_ref.oracle import load_balancing_loss, router_z_loss
from moeblaze_ref.systems import MoEFactory

BALANCE_WEIGHT = 1e-2  # Switch Transformers (arXiv 2101.03961), section 2.2
Z_WEIGHT = 1e-3  # ST-MoE (arXiv 2202.08906), the weight of its router z-loss
GRADIENT_NORM = 1.0  # longer gradients are cut to it


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and how it got there.

    Parameters
    ----------
    model : MoETransformer
    losses : list of float
        Cross entropy of each step's training windows, before the step, in nats per token.
    validation_loss : float
        Cross entropy on validation windows after the last step.
    """

    model: MoETransformer
    losses: list[float]
    validation_loss: float


def language_loss(output: LMOutput, targets: Tensor) -> Tensor:
    """Mean cross entropy of the predictions, in nats per token, for targets (batch, length)."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def router_loss(output: LMOutput) -> Tensor:
    """Both router losses with their weights, summed over the layers."""
    return sum(
        BALANCE_WEIGHT * load_balancing_loss(trace.routing) + Z_WEIGHT * router_z_loss(trace.routing)
        for trace in output.traces
    )


def train(
    config: LMConfig,
    steps: int,
    on_step: Callable[[int, float], None] | None = None,
    seed: int = 0,
    *,
    batch: int = 16,
    learning_rate: float = 3e-3,
    moe: str | MoEFactory = "oracle",
) -> TrainResult:
    """Train a fresh model on Python's help text.

    On one machine, the same arguments give the same bits; the global random state is left alone.

    Parameters
    ----------
    config : LMConfig
    steps : int
        Optimizer steps.
    on_step : callable, optional
        Called after each step with its number (from 1) and its loss.
    seed : int
        Of the weights and of the training windows.
    batch : int
        Windows of a step.
    learning_rate : float
        AdamW's.
    moe : str or callable
        The system of the MoE layers, as in `model.MoETransformer`.

    Raises
    ------
    ValueError, TypeError
        If config is no LMConfig or its vocabulary lacks a byte, steps or batch is no integer or
        below 1, the text is shorter than a window, or there is no such system.
    """
    doors.check_type("config", config, LMConfig)
    doors.check_int("config.vocab", config.vocab, at_least=256)  # every byte
    doors.check_int("steps", steps, at_least=1)
    doors.check_int("batch", batch, at_least=1)
    corpus = data.python_help()
    windows = torch.Generator().manual_seed(seed)
    model = _fresh_model(config, moe, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = data.sample_windows(corpus.training, batch, config.sequence, windows)
        losses.append(_step(model, optimizer, inputs, targets))
        if on_step is not None:
            on_step(step, losses[-1])
    return TrainResult(model, losses, evaluate(model, corpus.validation, batch))


def _fresh_model(config: LMConfig, moe: str | MoEFactory, seed: int) -> MoETransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoETransformer(config, moe)


def _step(model: MoETransformer, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    """One optimizer step; the cross entropy before it."""
    output = model(inputs)
    loss = language_loss(output, targets)
    optimizer.zero_grad()
    (loss + router_loss(output)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: MoETransformer, text: Tensor, batch: int = 16, seed: int = 0) -> float:
    """Cross entropy of the model on random windows of a text (bytes,) uint8, in nats per token."""
    windows = torch.Generator().manual_seed(seed)
    inputs, targets = data.sample_windows(text, batch, model.config.sequence, windows)
    return language_loss(model(inputs), targets).item()


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """What one MoE layer saw and decided, for the kernels' doors.

    Parameters
    ----------
    x : ndarray (L, d) float32
    logits : ndarray (L, E) float32
    topk_experts : ndarray (L, k) int32, C-contiguous
    gates : ndarray (L, k) float32
    """

    x: np.ndarray
    logits: np.ndarray
    topk_experts: np.ndarray
    gates: np.ndarray


@torch.no_grad()
def capture(model: MoETransformer, tokens: Tensor) -> list[CapturedLayer]:
    """Run the model and keep each MoE layer's input and routing.

    Parameters
    ----------
    model : MoETransformer
    tokens : Tensor (batch, length) int64

    Returns
    -------
    list of CapturedLayer
        One a block, L = batch * length.

    Raises
    ------
    TypeError, ValueError
        If tokens has the wrong dtype or rank, or a token is outside the vocabulary.
    """
    doors.check_array("tokens", tokens, rank=2, dtypes=("int64",), contiguous=False)
    doors.check_index("tokens", tokens.numpy(force=True), model.config.vocab, "token ids")
    return [
        CapturedLayer(
            _numpy(trace.x, np.float32),
            _numpy(trace.routing.logits, np.float32),
            _numpy(trace.routing.topk_experts, np.int32),
            _numpy(trace.routing.gates, np.float32),
        )
        for trace in model(tokens).traces
    ]


def _numpy(tensor: Tensor, dtype) -> np.ndarray:
    """A contiguous copy that shares nothing with torch."""
    return np.array(tensor.numpy(force=True), dtype=dtype, order="C")
