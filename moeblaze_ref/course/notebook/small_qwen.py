"""A small Qwen3-MoE of Hugging Face's transformers, with its own experts or ours: notebook 12."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from moeblaze_ref.core.config import POLICIES, MoEConfig
from moeblaze_ref.core.drawing import heading, panels
from moeblaze_ref.core.units import MB
from moeblaze_ref.memory import accounting, measure
from moeblaze_ref.memory.plots import GREY, VERMILLION, filled
from moeblaze_ref.nn import hf

LAYERS, WIDTH, EXPERTS = 2, 64, 8
THEIRS = ("eager", "grouped_mm")  # transformers' own ways of running experts


class Missing(ValueError):
    """Raised if transformers is not installed. Notebooks show the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return [str(self)]


def small_qwen(k: int = 2, h: int = 128) -> Any:
    """Return a Qwen3-MoE of two layers with random weights.

    Raises
    ------
    Missing
        If transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # seconds, which only a model costs
    except ImportError:
        raise Missing("transformers is not installed: pip install 'moeblaze_ref[huggingface]'") from None
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=k,
        moe_intermediate_size=h,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def tokens(L: int = 256) -> Tensor:
    """Random tokens (1, L)."""
    return torch.randint(256, (1, L), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, text: Tensor) -> Tensor:
    """The loss of predicting each next token."""
    loss: Tensor = model(input_ids=text, labels=text).loss
    return loss


@contextmanager
def running(model: Any, experts: str) -> Iterator[None]:
    """Let the model run its experts by one of ``THEIRS``, or by our kernels under a policy."""
    if experts in POLICIES:
        with hf.use(model, policy=experts):
            yield
        return
    before = model.config._experts_implementation
    model.set_experts_implementation(experts)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


class Kept(NamedTuple):
    """Bytes that a forward keeps, without the weights."""

    loss: float
    model: int  #: of everything
    experts: int  #: of it, in the MoE layers' experts


def kept(k: int = 2, h: int = 128, L: int = 256) -> dict[str, Kept]:
    """Return the loss and the kept bytes of a forward for each way of running the experts, by its name.

    The account gives the experts' part under a policy. The rest of the model is the same in all ways.
    """
    model, text = small_qwen(k, h), tokens(L)
    found = {way: _measured(model, text, way) for way in (*THEIRS, *POLICIES)}
    layer = MoEConfig(L, WIDTH, h, EXPERTS, k, dtype="float32")
    ours = {policy: LAYERS * accounting.account(layer, "moeblaze", policy).kept_bytes for policy in POLICIES}
    (rest,) = {found[policy][1] - ours[policy] for policy in POLICIES}
    return {way: Kept(loss, kept, kept - rest) for way, (loss, kept) in found.items()}


def _measured(model: Any, text: Tensor, way: str) -> tuple[float, int]:
    """The loss, and the bytes that autograd keeps of it."""
    with running(model, way), measure.SavedStorages(exclude=model.parameters()) as saved:
        loss = float(loss_of(model, text).detach())
    return loss, saved.bytes


def kept_picture(k: int, h: int) -> Figure:
    """A bar for each way of running the experts: what a forward keeps, of the experts and of the rest."""
    found = kept(k, h)
    figure, axes = panels(9, 3.4)
    labels = [f"transformers, {way}" if way in THEIRS else f"ours, {way}" for way in found]
    experts = [one.experts / MB for one in found.values()]
    rest = [(one.model - one.experts) / MB for one in found.values()]
    axes.barh(labels, rest, label="the rest of the model", **filled(GREY))
    axes.barh(labels, experts, left=rest, label="experts", **filled(VERMILLION))
    for row, one in enumerate(found.values()):
        axes.text(one.model / MB, row, f" {one.model / MB:.2f}", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="MB kept for the backward", xlim=(0, 1.12 * max(one.model for one in found.values()) / MB))
    heading(axes, f"Qwen3-MoE, 2 layers, {tokens().numel()} tokens, k = {k}, h = {h}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
