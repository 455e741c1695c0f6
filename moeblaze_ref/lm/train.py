"""Training of the language model, and the capture of what its MoE layers see."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.core import checks
from moeblaze_ref.lm import data, finite
from moeblaze_ref.lm.model import LMConfig, LMOutput, MoETrace, MoETransformer
from moeblaze_ref.nn.oracle import route
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.systems import SYSTEMS, MoEFactory, system

BALANCE_WEIGHT = 1e-2  # Switch Transformers (arXiv 2101.03961), section 2.2
Z_WEIGHT = 1e-3  # ST-MoE (arXiv 2202.08906), the weight of its router z-loss
GRADIENT_NORM = 1.0  # longer gradients are cut to it
MAX_SEED = 2**63 - 1  # that torch takes
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # the second by autocast


@dataclass(frozen=True)
class TrainSettings:
    """Settings that decide a run's losses, besides the text and the device.

    Raises
    ------
    ValueError, TypeError
        If a setting is not allowed, or the vocabulary lacks a byte.
    """

    config: LMConfig
    steps: int  #: of the optimizer; 0 trains nothing
    layer: str = "oracle"  #: the system of the MoE layers, one of ``systems.SYSTEMS``
    layer_options: Mapping[str, Any] = field(default_factory=dict)  #: of its constructor, such as ``policy``
    batch: int = 16  #: windows of a step
    learning_rate: float = 3e-3  #: AdamW's, at its peak
    warmup: int = 0  #: steps in which it rises to the peak, linearly
    #: Fraction of the learning rate that is left at the last step, after half a cosine that begins where the warm-up
    #: ends; 1 keeps the rate. The rate of a run of no more steps than the warm-up never falls.
    final_fraction: float = 1.0
    #: AdamW's, of every parameter alike: norms, embedding, head and routers too, not the matrices of the blocks alone.
    weight_decay: float = 1e-2
    gradient_norm: float = GRADIENT_NORM  #: longer gradients are cut to it
    balance_weight: float = BALANCE_WEIGHT  #: this and the next of the two router losses
    z_weight: float = Z_WEIGHT
    precision: str = "float32"  #: one of ``PRECISIONS``; the weights are float32 in either
    seed: int = 0  #: of the weights and of the training windows
    order_seed: int | None = None  #: of the windows, in place of seed: the same weights on another order of the text

    def __post_init__(self):
        checks.check_type("config", self.config, LMConfig)
        checks.check_int("config.vocab", self.config.vocab, at_least=256)  # every byte
        for name, least in (("steps", 0), ("batch", 1), ("warmup", 0)):
            checks.check_int(name, getattr(self, name), at_least=least)
        checks.check_int("seed", self.seed, 0, MAX_SEED)
        if self.order_seed is not None:
            checks.check_int("order_seed", self.order_seed, 0, MAX_SEED)
        for name in ("learning_rate", "weight_decay", "balance_weight", "z_weight"):
            checks.check_within(name, getattr(self, name), at_least=0)
        checks.check_within("final_fraction", self.final_fraction, at_least=0, at_most=1)
        checks.check_positive("gradient_norm", self.gradient_norm)
        checks.check_name("precision", self.precision, PRECISIONS)
        checks.check_name("system", self.layer, SYSTEMS)

    def learning_rate_at(self, step: int) -> float:
        """Rate of a step, counted from 1: linear warm-up, then half a cosine (SGDR, arXiv 1608.03983, equation 5)."""
        risen = min(1.0, step / max(1, self.warmup))
        progress = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
        fallen = (1 + math.cos(math.pi * progress)) / 2  # 1 to 0
        return self.learning_rate * risen * (self.final_fraction + (1 - self.final_fraction) * fallen)


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Return the autocast context of a precision: products in bfloat16, or nothing for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=PRECISIONS[precision] != torch.float32)


class NonFinite(FloatingPointError):
    """Raised for a NaN or infinite loss or gradient; the message names the step and the first module."""


class Step(NamedTuple):
    """Losses and measurements of one optimizer step, before its update."""

    step: int  #: from 1
    loss: float  #: cross entropy, nats per token
    learning_rate: float
    gradient_norm: float  #: before it is cut


class Ahead(NamedTuple):
    """Loss, gradients and chosen experts of a step, before its update."""

    loss: float  #: cross entropy, nats per token
    gradients: dict[str, Tensor]  #: by the weights' names, before they are cut
    chosen: tuple[Tensor, ...]  #: the experts of every token in each block, (L, k) int32


class Trainer:
    """A training run between two steps.

    `tensors` holds its whole state, except its settings and its text. A run that is restored from them goes on bit for
    bit, where torch itself gives the same bits twice: on a CPU with as many threads, for every system. ``moe`` makes
    the MoE layers, in place of the system that the settings name; as in `model.MoETransformer`.

    Attributes
    ----------
    model : MoETransformer
    losses : list of float
        Of the steps done.
    chosen : tuple of Tensor (L, k) int32
        The experts of every token in each block, in the last step; empty before the first.

    Raises
    ------
    ValueError
        If a part of the text is shorter than a window and its next byte.
    """

    def __init__(
        self,
        settings: TrainSettings,
        corpus: data.Corpus,
        device: str | torch.device = "cpu",
        moe: str | MoEFactory | None = None,
    ):
        self.settings, self.corpus, self.device = settings, corpus, torch.device(device)
        _check_length("training", corpus.training, settings.config.sequence)
        _check_length("validation", corpus.validation, settings.config.sequence)
        moe = system(settings.layer, **settings.layer_options) if moe is None else moe
        self.model = _fresh_model(settings.config, moe, settings.seed).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        order_seed = settings.seed if settings.order_seed is None else settings.order_seed
        self.windows = torch.Generator().manual_seed(order_seed)
        self.losses: list[float] = []
        self.chosen: tuple[Tensor, ...] = ()

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def advance(self, replayed: Sequence[Tensor] | None = None) -> Step:
        """One optimizer step.

        Parameters
        ----------
        replayed : sequence of Tensor (L, k) int32, optional
            The experts of every token in each block, such as another run's `chosen`, in place of the routers' choice.

        Raises
        ------
        NonFinite
            If the loss or the gradient is; the weights are then those before the step.
        """
        settings, step = self.settings, self.step + 1
        inputs, targets = self._next_windows()
        with autocast(self.settings.precision, self.device):
            output = self.model(inputs, replayed)
            loss, total = self._losses(output, targets)
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)
        seen = torch.stack([loss.detach(), total.detach(), norm]).tolist()  # one wait for the device
        if not all(map(math.isfinite, seen)):
            raise NonFinite(self._blame(step, seen, lambda: self.model(inputs, replayed)))
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), settings.gradient_norm, norm)
        rate = settings.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.losses.append(seen[0])
        self.chosen = tuple(trace.topk_experts for trace in output.traces)
        return Step(step, seen[0], rate, seen[2])

    def look_ahead(self, weights: Mapping[str, Tensor], replayed: Sequence[Tensor] | None = None) -> Ahead:
        """Compute the next step at other weights; the run itself does not advance and stays the same to the bit.

        Parameters
        ----------
        weights : mapping
            Parameters by their names, such as another run's.
        replayed : sequence of Tensor (L, k) int32, optional
            As in `advance`.
        """
        state = self.windows.get_state()
        inputs, targets = self._next_windows()
        self.windows.set_state(state)
        with autocast(self.settings.precision, self.device):
            output = torch.func.functional_call(self.model, dict(weights), (inputs, replayed))
            loss, total = self._losses(output, targets)
        gradients = torch.autograd.grad(total, list(weights.values()))
        chosen = tuple(trace.topk_experts for trace in output.traces)
        return Ahead(loss.item(), dict(zip(weights, gradients, strict=True)), chosen)

    def _next_windows(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, each (batch, length)."""
        drawn = data.sample_windows(
            self.corpus.training, self.settings.batch, self.settings.config.sequence, self.windows
        )
        inputs, targets = (one.to(self.device) for one in drawn)
        return inputs, targets

    def _losses(self, output: LMOutput, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy, and with both router losses what is minimised."""
        loss = language_loss(output, targets)
        return loss, loss + router_loss(output, self.settings.balance_weight, self.settings.z_weight)

    def _blame(self, step: int, seen: list[float], forward: Callable[[], Any]) -> str:
        loss, total, norm = seen
        where = self._first_module(forward)
        cause = _cause(where)
        if where is None and math.isfinite(total):
            cause = f"the loss is finite, but the gradient of {finite.last_gradient(self.model)} is not"
        return f"step {step}: loss {loss}, with the router's {total}, gradient norm {norm}; {cause}"

    def _first_module(self, forward: Callable[[], Any]) -> str | None:
        with autocast(self.settings.precision, self.device):
            return finite.first_module(self.model, forward)

    def validate(self, batches: int = 1) -> float:
        """Cross entropy on held-out text, the same windows every time, in nats per token.

        Raises
        ------
        NonFinite
            If it is not finite; the message names the first module whose output is not.
        """

        def held_out() -> float:
            return evaluate(self.model, self.corpus.validation, self.settings.batch, batches=batches)

        with autocast(self.settings.precision, self.device):
            loss = held_out()
        if not math.isfinite(loss):
            cause = _cause(self._first_module(held_out))
            raise NonFinite(f"step {self.step}: the validation loss after it is {loss}; {cause}")
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name: weights, AdamW's moments, the generator of the windows, the losses."""
        return self._named(self.optimizer.state, torch.tensor(self.losses, dtype=torch.float64))

    def form(self, steps: int) -> dict[str, Tensor]:
        """Tensors of the names, shapes and dtypes that `tensors` has after so many steps; not of its values."""
        moments = {one: {"step": torch.zeros(()), "exp_avg": one, "exp_avg_sq": one} for one in self.model.parameters()}
        return self._named(moments if steps else {}, torch.zeros(steps, dtype=torch.float64))

    def _named(self, moments: Mapping[Any, Mapping[str, Tensor]], losses: Tensor) -> dict[str, Tensor]:
        """The state by name, with AdamW's moments of each parameter."""
        named = {"windows": self.windows.get_state(), "losses": losses}
        for name, parameter in self.model.named_parameters():
            named[f"model.{name}"] = parameter.detach()
            named |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments.get(parameter, {}).items()}
        return named

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]):
        """Become the run whose `tensors` these are; it had the same settings and the same text."""
        names = [name for name, _ in self.model.named_parameters()]
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
        moments = {number: _below(f"optimizer.{name}.", tensors) for number, name in enumerate(names)}
        state = {number: moment for number, moment in moments.items() if moment}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.windows.set_state(tensors["windows"])
        self.losses = tensors["losses"].tolist()


def _cause(module: str | None) -> str:
    """Describe the cause of a non-finite loss: the first module with a non-finite output."""
    if module is None:
        return "every activation is finite, but a loss is not"
    return f"the activations of {module} are the first that are not finite"


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by what follows."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_length(part: str, text: Tensor, sequence: int):
    if len(text) <= sequence:
        raise ValueError(
            f"the {part} text has {len(text)} bytes, but a window of {sequence} and its next byte need {sequence + 1}"
        )


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and how it got there."""

    model: MoETransformer
    losses: list[float]  #: cross entropy of each step's training windows, before the step, in nats per token
    validation_loss: float  #: cross entropy on validation windows after the last step


def language_loss(output: LMOutput, targets: Tensor) -> Tensor:
    """Mean cross entropy of the predictions, in nats per token, for targets (batch, length)."""
    logits = output.logits.flatten(0, 1)  # (L, vocab)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def router_loss(output: LMOutput, balance_weight: float = BALANCE_WEIGHT, z_weight: float = Z_WEIGHT) -> Tensor:
    """Both router losses with their weights, summed over the layers."""
    first, *others = (balance_weight * one.load_balancing_loss + z_weight * one.router_z_loss for one in output.traces)
    return sum(others, start=first)


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
    """Train a fresh model on Python's help text, as `TrainSettings` and `MoETransformer` say.

    On one machine, the same arguments give the same bits; the global random state is left alone. ``on_step`` is called
    after each step with its number (from 1) and its loss.

    Raises
    ------
    ValueError, TypeError
        If config is no LMConfig or its vocabulary lacks a byte, steps or batch is no integer or
        below 1, the text is shorter than a window, or there is no such system.
    """
    checks.check_int("steps", steps, at_least=1)
    settings = TrainSettings(config, steps, batch=batch, learning_rate=learning_rate, seed=seed)
    trainer = Trainer(settings, data.python_help(), moe=moe)
    while trainer.step < steps:
        done = trainer.advance()
        if on_step is not None:
            on_step(done.step, done.loss)
    return TrainResult(trainer.model, trainer.losses, trainer.validate())


def _fresh_model(config: LMConfig, moe: str | MoEFactory, seed: int) -> MoETransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoETransformer(config, moe)


@torch.no_grad()
def evaluate(model: MoETransformer, text: Tensor, batch: int = 16, seed: int = 0, batches: int = 1) -> float:
    """Cross entropy of the model on random windows of a text (bytes,) uint8, in nats per token."""
    windows = torch.Generator().manual_seed(seed)
    device = model.head.weight.device
    total = 0.0
    for _ in range(batches):
        inputs, targets = data.sample_windows(text, batch, model.config.sequence, windows)
        total += language_loss(model(inputs.to(device)), targets.to(device)).item()
    return total / batches


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """Input and routing of one MoE layer, in the form that the kernels take.

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
    checks.check_array("tokens", tokens, rank=2, dtypes=("int64",), contiguous=False)
    checks.check_index("tokens", tokens.numpy(force=True), model.config.vocab, "token ids")
    layers: list[Any] = [block.moe for block in model.blocks]  # a ModuleList does not say of which class
    return [_captured(trace, layer) for trace, layer in zip(model(tokens).traces, layers, strict=True)]


def _captured(trace: MoETrace, moe: RoutedExperts) -> CapturedLayer:
    """A layer's choice with the logits and gates behind it, which a step need not keep: decided again."""
    routing = route(trace.x, moe.wg, moe.k, moe.renormalize, trace.topk_experts)
    return CapturedLayer(
        _numpy(trace.x, np.float32),
        _numpy(routing.logits, np.float32),
        _numpy(trace.topk_experts, np.int32),
        _numpy(routing.gates, np.float32),
    )


def _numpy(tensor: Tensor, dtype) -> np.ndarray:
    """A contiguous copy that shares nothing with torch."""
    return np.array(tensor.numpy(force=True), dtype=dtype, order="C")
