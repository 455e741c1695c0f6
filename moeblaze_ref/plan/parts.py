"""The parts of a transformer: the weights of each, and the tensors that autograd keeps for its backward.

A part keeps what the modules of transformers 5.23 keep, written as rows of a `memory.accounting` account. A tensor that
two parts use is a row of the one that saves it first. Weights are no rows: they are there anyway.

Symbols: B sequences of S tokens, L = B * S tokens, d model width, h expert width, f width of a dense MLP, E experts,
k experts per token, R = L * k routed rows, n query heads, m heads of keys and values, w head width, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from moeblaze_ref.core import checks
from moeblaze_ref.memory.accounting import Size, Tensor

DTYPES = ("bfloat16",)  # of activations and weights: those that are compared with torch


@dataclass(frozen=True)
class Step:
    """Sequences that go through the model at once.

    Parameters
    ----------
    batch, sequence : int
        Sequences, and tokens of each.
    dtype : str
        Of activations and weights, one of ``DTYPES``.

    Raises
    ------
    ValueError, TypeError
        If a number is no integer of at least 1, or the dtype is unknown.
    """

    batch: int
    sequence: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            checks.check_int(name, getattr(self, name), at_least=1)
        checks.check_name("dtype", self.dtype, DTYPES)

    @cached_property
    def B(self) -> Size:
        """Sequences."""
        return Size("B", self.batch)

    @cached_property
    def S(self) -> Size:
        """Tokens of a sequence."""
        return Size("S", self.sequence)

    @cached_property
    def L(self) -> Size:
        """Tokens."""
        return Size("L", self.batch * self.sequence)


@dataclass(frozen=True)
class Weight:
    """A tensor that is trained, or, as a router's selection bias, only kept up to date."""

    name: str
    dims: tuple[int, ...]
    trained: bool = True

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.dims)


class Part(Protocol):
    """A module of the model, or several that save tensors for each other."""

    kind: ClassVar[str]  #: what a reader looks for: "attention", "experts", ...

    def weights(self) -> tuple[Weight, ...]:
        """Return its weights."""

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return what it keeps from the forward to the backward."""


@dataclass(frozen=True)
class Embedding:
    """Token ids to vectors."""

    d: int
    vocabulary: int
    kind: ClassVar[str] = "embedding"

    def weights(self) -> tuple[Weight, ...]:
        """Return the table of vectors, (V, d)."""
        return (Weight("embedding", (self.vocabulary, self.d)),)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the token ids."""
        return (Tensor("token_ids", (step.L,), "int64"),)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: the angles of a sequence, once for all layers."""

    width: int  #: angles of a token
    as_complex: bool = False  #: complex numbers in float32, in place of cosines and sines in the step's dtype
    kind: ClassVar[str] = "positions"

    def weights(self) -> tuple[Weight, ...]:
        """Return nothing: the angles are computed."""
        return ()

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return two numbers an angle, for one sequence: all sequences share them."""
        if self.as_complex:
            return (Tensor("angles", (step.S, self.width, 2), "float32"),)
        return tuple(Tensor(name, (step.S, self.width), step.dtype) for name in ("cosines", "sines"))


@dataclass(frozen=True)
class Norm:
    """RMSNorm of ``groups`` vectors a token, each of ``width`` numbers, in float32."""

    width: int
    groups: int = 1
    scaled_in_float32: bool = False  #: multiplied by its weight before it is rounded to the step's dtype
    has_weight: bool = True
    name: str = "norm"
    kind: ClassVar[str] = "norms"

    def weights(self) -> tuple[Weight, ...]:
        """Return one number a column, which the groups share."""
        return (Weight(self.name, (self.width,)),) if self.has_weight else ()

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input in float32, 1 / rms and, if there is a weight, the normalised rows."""
        wide = step.L, self.groups * self.width
        rows = (
            Tensor(f"{self.name}_input", wide, "float32"),
            Tensor(f"{self.name}_scale", (step.L, self.groups), "float32"),
        )
        if not self.has_weight:
            return rows
        dtype = "float32" if self.scaled_in_float32 else step.dtype
        return (*rows, Tensor(f"{self.name}_normalised", wide, dtype))


def _flash(step: Step, heads: int, kv_heads: int, width: int) -> tuple[Tensor, ...]:
    """Return what torch's flash kernel for the CPU keeps; the output projection multiplies its output."""
    n, m, w = Size("n", heads), Size("m", kv_heads), Size("w", width)
    return (
        Tensor("q", (step.L, n, w), step.dtype),
        Tensor("k", (step.L, m, w), step.dtype),
        Tensor("v", (step.L, m, w), step.dtype),
        Tensor("log_sum_exp", (step.L, n), "float32"),
        Tensor("attended", (step.L, n, w), step.dtype),
    )


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: n heads of queries share m heads of keys and values."""

    d: int
    heads: int
    kv_heads: int
    width: int  #: of a head
    bias: bool = False  #: of the projections to q, k and v
    out_bias: bool = False
    norms: tuple[Norm, ...] = ()  #: of q and k
    scales: bool = False  #: q is multiplied by a number for each token (Llama 4's layers without positions)
    #: Only some columns of q and k have positions. Joined with the others they lie head by head, and so does the
    #: output, of which the last product gets a copy (GLM-4.5).
    partly_turned: bool = False
    kind: ClassVar[str] = "attention"

    def weights(self) -> tuple[Weight, ...]:
        """Return the four projections, their biases, and the weights of the norms."""
        q, kv = self.heads * self.width, self.kv_heads * self.width
        inner = (("wq", q), ("wk", kv), ("wv", kv))
        products = [Weight(name, (self.d, columns)) for name, columns in inner] + [Weight("wo", (q, self.d))]
        biases = [Weight(f"{name}_bias", (columns,)) for name, columns in inner if self.bias]
        biases += [Weight("wo_bias", (self.d,))] if self.out_bias else []
        return (*products, *biases, *(weight for norm in self.norms for weight in norm.weights()))

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input of the projections, and what the norms and the kernel keep."""
        return (
            Tensor("attention_input", (step.L, Size("d", self.d)), step.dtype),
            *(tensor for norm in self.norms for tensor in norm.kept(step)),
            *((Tensor("query_scales", (step.S,), "float32"),) if self.scales else ()),
            *_flash(step, self.heads, self.kv_heads, self.width),
            *((Tensor("attended_rows", (step.L, self.heads * self.width), step.dtype),) if self.partly_turned else ()),
        )


@dataclass(frozen=True)
class SinkAttention:
    """gpt-oss's attention: a learned logit for each head takes its part of the softmax; in plain torch."""

    d: int
    heads: int
    kv_heads: int
    width: int
    kind: ClassVar[str] = "attention"

    def weights(self) -> tuple[Weight, ...]:
        """Return the weights of `Attention` with all biases, and the sinks."""
        plain = Attention(self.d, self.heads, self.kv_heads, self.width, bias=True, out_bias=True)
        return (*plain.weights(), Weight("sinks", (self.heads,)))

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return copies of k and v for each query head, the place of each row's largest logit, all probabilities."""
        n, w = Size("n", self.heads), Size("w", self.width)
        of_heads = [Tensor(name, (step.L, n, w), step.dtype) for name in ("q", "k", "v")]
        return (
            Tensor("attention_input", (step.L, Size("d", self.d)), step.dtype),
            *of_heads,
            Tensor("largest_logit", (step.L, n), "int64"),
            Tensor("probabilities", (step.L, n, step.S + 1), step.dtype),
            Tensor("attended", (step.L, n, w), step.dtype),
        )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from a vector of a few hundred."""

    d: int
    heads: int
    q_rank: int | None  #: None: queries come from the input by one product
    kv_rank: int
    plain_width: int  #: of a head of queries and keys, without positions
    rotary_width: int  #: of a head of queries and keys, with positions
    value_width: int
    kind: ClassVar[str] = "attention"

    @property
    def width(self) -> int:
        """Width of a head of queries and keys."""
        return self.plain_width + self.rotary_width

    def _norms(self) -> tuple[Norm, ...]:
        ranks = {"q_latent": self.q_rank, "kv_latent": self.kv_rank}
        return tuple(Norm(rank, name=name) for name, rank in ranks.items() if rank)

    def weights(self) -> tuple[Weight, ...]:
        """Return the products to the latent vectors and from them, and the norms between."""
        d, n, q = self.d, self.heads, self.heads * self.width
        queries = (
            (Weight("wq_down", (d, self.q_rank)), Weight("wq_up", (self.q_rank, q)))
            if self.q_rank
            else (Weight("wq", (d, q)),)
        )
        return (
            *queries,
            Weight("wkv_down", (d, self.kv_rank + self.rotary_width)),
            Weight("wkv_up", (self.kv_rank, n * (self.plain_width + self.value_width))),
            Weight("wo", (n * self.value_width, d)),
            *(weight for norm in self._norms() for weight in norm.weights()),
        )

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, the latent vectors before and after their norms, and what plain torch keeps in float32.

        On a CPU no other kernel takes values of another width than the keys'.
        """
        n, w, v = Size("n", self.heads), Size("w", self.width), Size("v", self.value_width)
        latents = [
            tensor
            for norm in self._norms()
            for tensor in (*norm.kept(step), Tensor(norm.name, (step.L, norm.width), step.dtype))
        ]
        return (
            Tensor("attention_input", (step.L, Size("d", self.d)), step.dtype),
            *latents,
            Tensor("q", (step.L, n, w), "float32"),
            Tensor("k", (step.L, n, w), "float32"),
            Tensor("v", (step.L, n, v), "float32"),
            Tensor("probabilities", (step.L, n, step.S), "float32"),
            Tensor("attended", (step.L, n, v), step.dtype),
        )


def _gated(step: Step, rows: Size, width: int, name: str) -> tuple[Tensor, ...]:
    """Return a, b, act(a) and act(a) * b."""
    f = Size("f", width)
    return tuple(Tensor(f"{name}_{part}", (rows, f), step.dtype) for part in ("a", "b", "act", "product"))


@dataclass(frozen=True)
class Mlp:
    """A dense MLP with SwiGLU, or the shared experts of an MoE layer, which are one."""

    d: int
    width: int
    name: str = "mlp"
    #: Whether its input is a tensor that no other part has saved.
    saves_input: bool = True
    kind: ClassVar[str] = "dense MLP"

    def weights(self) -> tuple[Weight, ...]:
        """Return w1, w2 (d, f) and w3 (f, d)."""
        shapes = {"w1": (self.d, self.width), "w2": (self.d, self.width), "w3": (self.width, self.d)}
        return tuple(Weight(f"{self.name}_{name}", shape) for name, shape in shapes.items())

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, and all tensors between the products."""
        own = (Tensor(f"{self.name}_input", (step.L, Size("d", self.d)), step.dtype),) if self.saves_input else ()
        return (*own, *_gated(step, step.L, self.width, self.name))


@dataclass(frozen=True)
class Head:
    """The product with the vocabulary, and the loss."""

    d: int
    vocabulary: int
    tied: bool = False  #: its weight is the embedding's
    kind: ClassVar[str] = "logits and loss"

    def weights(self) -> tuple[Weight, ...]:
        """Return the matrix (V, d), or nothing if it is the embedding's."""
        return () if self.tied else (Weight("head", (self.vocabulary, self.d)),)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the head's input, the log-probabilities in float32, the labels, and their number."""
        # Labels are shifted by one: a view of one sequence with a place more, a copy of several.
        labels = step.S + 1 if step.batch == 1 else step.L
        return (
            Tensor("head_input", (step.L, Size("d", self.d)), step.dtype),
            Tensor("log_probabilities", (step.L, Size("V", self.vocabulary)), "float32"),
            Tensor("labels", (labels,), "int64"),
            Tensor("labels_counted", (Size("1", 1),), "float32"),
        )
