"""A decoder-only transformer over bytes, whose feed-forward layers are Mixtures of Experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn.systems import MoEFactory, run, system


@dataclass(frozen=True)
class LMConfig:
    """The shape of the model; symbols as in `config.MoEConfig`.

    Raises
    ------
    ValueError, TypeError
        If a size is out of range or no integer, k > E, d does not fit the heads, or the
        activation is unknown.
    """

    d: int = 64  #: model width
    h: int = 128  #: expert width
    E: int = 8  #: experts of a layer
    k: int = 2  #: experts per token
    layers: int = 2  #: blocks
    heads: int = 4  #: attention heads of each block; d / heads must be even (RoPE turns pairs)
    sequence: int = 128  #: tokens of a training window
    vocab: int = 256  #: token ids: bytes
    activation: str = "swiglu"  #: of the experts, one of ``config.ACTIVATIONS``
    shared: int = 0  #: width of the expert that every token passes beside its own k; 0 for none

    def __post_init__(self):
        checks.check_int("shared", self.shared, at_least=0)
        for name in ("layers", "heads", "sequence", "vocab"):
            checks.check_int(name, getattr(self, name), at_least=1)
        self.moe_layer(L=0)  # checks d, h, E, k and the activation
        if self.d % (2 * self.heads):
            raise ValueError(
                f"d is {self.d}, but with {self.heads} heads it must be a multiple of {2 * self.heads}: "
                f"every head has an even width"
            )

    def moe_layer(self, L: int, dtype: str = "float32") -> MoEConfig:
        """The shape of one of the model's MoE layers in a step of L tokens."""
        return MoEConfig(L, self.d, self.h, self.E, self.k, self.activation, dtype)


class MoETrace(NamedTuple):
    """Input, routing and losses of one MoE layer; training keeps all of them anyway."""

    x: Tensor  #: (L, d), L = batch * length
    topk_experts: Tensor  #: (L, k) int32
    load_balancing_loss: Tensor  #: ()
    router_z_loss: Tensor  #: ()


class LMOutput(NamedTuple):
    """Predictions for the next token, and the trace of every MoE layer."""

    logits: Tensor  #: (batch, length, vocab)
    traces: tuple[MoETrace, ...]  #: one a block


def rotary_angles(length: int, width: int, base: float = 10_000.0) -> Tensor:
    """RoPE (arXiv 2104.09864, section 3.4.2): the angle of each position and pair, (length, width / 2)."""
    frequencies = base ** (-torch.arange(0, width, 2) / width)  # (width / 2,)
    return torch.outer(torch.arange(length), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + width / 2]) of x (..., length, width) by their angles."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # (length, width / 2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.project = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, d) to the same shape; position t sees positions 0 to t."""
        heads_last = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, length, 3, heads, width)
        q, k, v = heads_last.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width)
        angles = rotary_angles(q.shape[-2], q.shape[-1]).to(x.device)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class SharedExpert(nn.Module):
    """A SwiGLU expert that every token passes, unrouted: DeepSeekMoE (arXiv 2401.06066), section 3.2."""

    def __init__(self, d: int, h: int):
        super().__init__()
        self.up = nn.Linear(d, 2 * h, bias=False)
        self.down = nn.Linear(h, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(L, d) to (L, d)."""
        a, b = self.up(x).chunk(2, dim=-1)  # each (L, h)
        return self.down(F.silu(a) * b)


class Block(nn.Module):
    """Attention, then a Mixture of Experts; each normalised before and added to the residual stream.

    A shared expert, where the configuration has one, reads what the Mixture reads and is added to it.
    """

    def __init__(self, config: LMConfig, moe: MoEFactory):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d)
        self.attention = Attention(config.d, config.heads)
        self.moe_norm = nn.RMSNorm(config.d)
        self.moe = moe(config.d, config.h, config.E, config.k, config.activation)
        self.shared = SharedExpert(config.d, config.shared) if config.shared else None

    def forward(self, stream: Tensor, topk_experts: Tensor | None = None) -> tuple[Tensor, MoETrace]:
        """The residual stream (batch, length, d) after this block, and what its MoE layer saw or replayed."""
        stream = stream + self.attention(self.attention_norm(stream))
        x = self.moe_norm(stream).flatten(0, 1)  # (L, d)
        out, balance, z, chosen = run(self.moe, x, topk_experts)  # (L, d), (), (), (L, k)
        if self.shared is not None:
            out = out + self.shared(x)
        return stream + out.view_as(stream), MoETrace(x, chosen, balance, z)


class MoETransformer(nn.Module):
    """Embedding, blocks, final norm and head.

    ``moe`` is the system of the MoE layers: a name in ``systems.SYSTEMS``, or what `systems.system` returns, which is
    called as ``moe(d, h, E, k, activation)`` for each block.

    Raises
    ------
    ValueError
        If there is no such system; the message proposes the nearest name.
    """

    def __init__(self, config: LMConfig, moe: str | MoEFactory = "oracle"):
        super().__init__()
        self.config = config
        moe = system(moe) if isinstance(moe, str) else moe
        self.embedding = nn.Embedding(config.vocab, config.d)
        self.blocks = nn.ModuleList(Block(config, moe) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d)
        self.head = nn.Linear(config.d, config.vocab, bias=False)

    def forward(self, tokens: Tensor, replayed: Sequence[Tensor] | None = None) -> LMOutput:
        """Predictions and traces for tokens (batch, length) int64, at any length.

        Parameters
        ----------
        tokens : Tensor (batch, length) int64
        replayed : sequence of Tensor (L, k) int32, optional
            The experts of every token in each block, in place of its router's choice.

        Raises
        ------
        TypeError, ValueError
            If dtype or rank is wrong, or the replayed choices are not one a block.
        """
        checks.check_array("tokens", tokens, rank=2, dtypes=("int64",), contiguous=False)
        choices = [None] * len(self.blocks) if replayed is None else replayed
        if len(choices) != len(self.blocks):
            raise ValueError(f"replayed has {len(choices)} choices, but the model has {len(self.blocks)} blocks")
        stream = self.embedding(tokens)  # (batch, length, d)
        traces = []
        for block, chosen in zip(self.blocks, choices, strict=True):
            stream, trace = block(stream, chosen)
            traces.append(trace)
        return LMOutput(self.head(self.norm(stream)), tuple(traces))
