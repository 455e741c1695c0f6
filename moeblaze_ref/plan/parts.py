"""The parts of a transformer: the weights of each, and the tensors that autograd keeps for its backward.

A part keeps what the modules of transformers 5.23 keep, written as rows of a `memory.accounting` account. A tensor that
two parts use is a row of the one that saves it first. Weights are no rows: they are there anyway.

Symbols: B sequences of S tokens, L = B * S tokens, d model width, h expert width, f width of a dense MLP, E experts,
k experts per token, R = L * k routed rows, n query heads, m heads of keys and values, w head width, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

from moeblaze_ref.core import checks
from moeblaze_ref.memory.accounting import Size, Tensor

MOST_TOKENS = 10**9  # of a sequence, and sequences
DTYPES = ("bfloat16", "float32")  # of activations and weights: those that are compared with torch
KERNELS = {
    "flash": "flash attention, on a GPU, or memory-efficient where flash does not serve",
    "cudnn": "cuDNN's, on a GPU",
    "efficient": "memory-efficient, on a GPU; not for fewer heads of keys than of queries",
    "math": "one operation after another, on a GPU: keeps all probabilities, in float32",
    "cpu-flash": "torch's choice on a CPU: flash attention, or math where values are narrower than keys",
    "cpu-math": "one operation after another, on a CPU",
}


@dataclass(frozen=True)
class Step:
    """Sequences that go through the model at once.

    Parameters
    ----------
    batch, sequence : int
        Sequences, and tokens of each.
    dtype : str
        Of activations and weights, one of ``DTYPES``.
    attention : str
        The kernel of torch's ``scaled_dot_product_attention``, one of ``KERNELS``.

    Raises
    ------
    ValueError, TypeError
        If a number is no integer of at least 1, or a name is unknown.
    """

    batch: int
    sequence: int
    dtype: str = "bfloat16"
    attention: str = "flash"

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            checks.check_int(name, getattr(self, name), at_least=1, at_most=MOST_TOKENS)
        checks.check_name("dtype", self.dtype, DTYPES)
        checks.check_name("attention", self.attention, KERNELS)

    def divided(self, gpus: int) -> "Step":
        """Return the step with a share of each sequence; ValueError if the GPUs do not divide it."""
        return replace(self, sequence=divided("sequence", self.sequence, gpus))

    @property
    def on_gpu(self) -> bool:
        """True if the step runs on a GPU, as its attention does."""
        return not self.attention.startswith("cpu")

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
    dims: tuple[int, ...]  #: its shape in torch: a linear layer's are outputs, inputs
    trained: bool = True
    of_experts: bool = False  #: whether expert parallelism divides it

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.dims)


@dataclass(frozen=True)
class Moment:
    """A moment of a part's forward or backward at which memory may be highest."""

    beside: tuple[Tensor, ...] = ()  #: tensors that are there for a while, beside what the part keeps
    freed: tuple[str, ...] = ()  #: kept tensors that are gone by now
    gradients: float = 1.0  #: how much of the gradients of the part's weights is there already


class Part(Protocol):
    """A module of the model, or several that save tensors for each other."""

    kind: ClassVar[str]  #: what a reader looks for: "attention", "experts", ...
    by_token: ClassVar[bool]  #: whether tensor parallelism divides its tokens, and not its weights

    def __hash__(self) -> int:
        """Return the same number for equal parts."""

    def weights(self) -> tuple[Weight, ...]:
        """Return its weights."""

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return what it keeps from the forward to the backward."""

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return the moments of its forward at which memory may be highest; all its kept tensors are there then."""

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return the moments of its backward at which memory may be highest, in their order."""

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return the outputs of its matrix products and of its attention kernel."""

    def share(self, tensor: int, expert: int) -> "Part":
        """Return the part that one of ``tensor`` GPUs has, or one of ``expert``; ValueError if it can't be divided."""


def divided(name: str, number: int, gpus: int, group: str = "tensor") -> int:
    """Return the share of each GPU; ValueError if the GPUs do not divide the number."""
    if number % gpus:
        raise ValueError(f"{group} is {gpus}, but it must divide {name}, {number}")
    return number // gpus


@dataclass(frozen=True)
class Embedding:
    """Token ids to vectors."""

    d: int
    vocabulary: int
    tied: bool = False  #: its table is the head's weight too
    kind: ClassVar[str] = "embedding"
    by_token: ClassVar[bool] = False

    def weights(self) -> tuple[Weight, ...]:
        """Return the table of vectors, (V, d)."""
        return (Weight("embedding", (self.vocabulary, self.d)),)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the token ids."""
        return (Tensor("token_ids", (step.L,), "int64"),)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the vectors go on as the residual stream."""
        return (Moment(),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradient of the whole table, beside the head's if the two are one."""
        table = Tensor("d_embedding", (Size("V", self.vocabulary), Size("d", self.d)), step.dtype)
        return (Moment((table,) if self.tied else ()),)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: it looks up."""
        return ()

    def share(self, tensor: int, expert: int) -> "Embedding":
        """Return a part of the vocabulary."""
        return replace(self, vocabulary=divided("the vocabulary", self.vocabulary, tensor))


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: the angles of a sequence, once for all layers."""

    width: int  #: angles of a token
    as_complex: bool = False  #: complex numbers in float32, in place of cosines and sines in the step's dtype
    kind: ClassVar[str] = "positions"
    by_token: ClassVar[bool] = False

    def weights(self) -> tuple[Weight, ...]:
        """Return nothing: the angles are computed."""
        return ()

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return two numbers an angle, for one sequence: all sequences share them."""
        if self.as_complex:
            return (Tensor("angles", (step.S, self.width, 2), "float32"),)
        return tuple(Tensor(name, (step.S, self.width), step.dtype) for name in ("cosines", "sines"))

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: nothing that counts beside what is kept."""
        return (Moment(),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return nothing: angles have no gradient."""
        return ()

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: it multiplies numbers one by one."""
        return ()

    def share(self, tensor: int, expert: int) -> "Rotary":
        """Return the same."""
        return self


@dataclass(frozen=True)
class Norm:
    """RMSNorm of ``groups`` vectors a token, each of ``width`` numbers, in float32."""

    width: int
    groups: int = 1
    scaled_in_float32: bool = False  #: multiplied by its weight before it is rounded to the step's dtype
    has_weight: bool = True
    name: str = "norm"
    kind: ClassVar[str] = "norms"
    by_token: ClassVar[bool] = True

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

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the rows in float32 before they are rounded."""
        return (Moment(_wide(step, f"{self.name}_float32", self.groups * self.width, 1)),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of the square and of the quotient, and what they are computed from."""
        return (Moment(_wide(step, f"d_{self.name}", self.groups * self.width, 4), (f"{self.name}_normalised",)),)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: it multiplies numbers one by one."""
        return ()

    def share(self, tensor: int, expert: int) -> "Norm":
        """Return the same: each GPU has some of the tokens."""
        return self


def _wide(step: Step, name: str, width: int, count: int) -> tuple[Tensor, ...]:
    """Return ``count`` tensors of rows in float32."""
    return tuple(Tensor(f"{name}_{i}", (step.L, width), "float32") for i in range(count))


def rows_of(step: Step, *named: tuple[str, int]) -> tuple[Tensor, ...]:
    """Return tensors of rows in the step's dtype, each with a name and a width."""
    return tuple(Tensor(name, (step.L, width), step.dtype) for name, width in named)


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
    router_dtype: str | None = None  #: in which a router has kept the same input; "": the step's
    kind: ClassVar[str] = "dense MLP"
    by_token: ClassVar[bool] = False

    def weights(self) -> tuple[Weight, ...]:
        """Return w1, w2 (f, d) and w3 (d, f)."""
        shapes = {"w1": (self.width, self.d), "w2": (self.width, self.d), "w3": (self.d, self.width)}
        return tuple(Weight(f"{self.name}_{name}", shape) for name, shape in shapes.items())

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, and all tensors between the products."""
        is_kept = self.router_dtype is not None and (self.router_dtype or step.dtype) == step.dtype
        own = () if is_kept else (Tensor(f"{self.name}_input", (step.L, Size("d", self.d)), step.dtype),)
        return (*own, *_gated(step, step.L, self.width, self.name))

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the output."""
        return (Moment(rows_of(step, ("out", self.d))),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of the product and of its factors."""
        names = ("d_product", "d_a", "d_b")
        return (Moment(rows_of(step, *((f"{self.name}_{name}", self.width) for name in names))),)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return a, b and the output."""
        return rows_of(step, (f"{self.name}_a", self.width), (f"{self.name}_b", self.width), ("out", self.d))

    def share(self, tensor: int, expert: int) -> "Mlp":
        """Return some of the columns, for tokens of which a router here has a part only."""
        width = divided(f"the width of the {self.name} MLP", self.width, tensor)
        return replace(self, width=width, router_dtype=self.router_dtype if tensor == 1 else None)


@dataclass(frozen=True)
class Head:
    """The product with the vocabulary, and the loss."""

    d: int
    vocabulary: int
    tied: bool = False  #: its weight is the embedding's
    kind: ClassVar[str] = "logits and loss"
    by_token: ClassVar[bool] = False

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

    def _logits(self, step: Step, dtype: str, *names: str) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, (step.L, Size("V", self.vocabulary)), dtype) for name in names)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the logits in the step's dtype and in float32."""
        return (Moment(self._logits(step, step.dtype, "logits") + self._logits(step, "float32", "logits_float32")),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return two moments: in the softmax, and in the products with the head's weight."""
        softmax = self._logits(step, "float32", "d_log_probabilities", "d_logits_float32")
        products = self._logits(step, step.dtype, "d_logits")
        return (Moment(softmax, gradients=0.0), Moment(products, ("log_probabilities",)))

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: it is in no layer."""
        return ()

    def share(self, tensor: int, expert: int) -> "Head":
        """Return a part of the vocabulary, whose softmax the GPUs compute together."""
        return replace(self, vocabulary=divided("the vocabulary", self.vocabulary, tensor))
