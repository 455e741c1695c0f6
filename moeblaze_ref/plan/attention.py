"""Attention: what each kernel keeps, and what it needs for a while.

Symbols as in `parts`: n query heads, m heads of keys and values, w and v the widths of a head of keys and of values.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from moeblaze_ref.memory.accounting import Size, Tensor
from moeblaze_ref.plan.parts import Moment, Norm, Step, Weight, divided, rows_of

# Numbers that a kernel keeps for dropout, also where there is none.
RANDOM_STATES: dict[str, dict[str, int]] = {
    "flash": {"random_state": 2, "unused": 1},
    "cudnn": {"random_seed": 1, "random_offset": 1},
    "efficient": {"random_seed": 1, "random_offset": 1},
    "cpu-flash": {},
}
EFFICIENT_ROWS = 32  # the memory-efficient kernel keeps its sums for a multiple of so many tokens


@dataclass(frozen=True)
class Heads:
    """The heads of an attention, as a kernel sees them."""

    queries: int
    keys: int  #: heads of keys and values, which query heads share
    width: int  #: of a head of queries and keys
    values: int  #: width of a head of values
    #: Numbers of a head in the tensor that the values are a view of: it is kept whole.
    values_within: int
    masked: bool = False  #: whether some tokens see less than all tokens before them

    def kernel(self, step: Step) -> str:
        """Return the kernel that torch runs: not every one serves every attention.

        Raises
        ------
        ValueError
            If the step asks for the memory-efficient kernel, and there are fewer heads of keys than of queries.
        """
        asked = step.attention
        if asked == "efficient" and self.keys < self.queries:
            raise ValueError(
                f"attention is {asked!r}, but it does not serve {self.keys} heads of keys for {self.queries} of queries"
            )
        if asked == "cpu-flash" and self.values != self.width:
            return "cpu-math"
        if step.dtype == "float32" and asked in ("flash", "cudnn"):
            return "efficient" if self.keys == self.queries else "math"
        return "efficient" if asked == "flash" and (self.values != self.width or self.masked) else asked

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return what is kept between the projections; the output projection multiplies ``attended``.

        With a mask each query head gets its own keys and values, and the mask is kept as numbers.
        """
        kernel = self.kernel(step)
        if kernel in STEPWISE:
            return self._stepwise(step)
        n, w = Size("n", self.queries), Size("w", self.width)
        m = Size("m", self.queries if self.masked else self.keys)
        tokens = math.ceil(step.sequence / EFFICIENT_ROWS) * EFFICIENT_ROWS if kernel == "efficient" else step.sequence
        return (
            *((Tensor("mask", (step.L, step.S), step.dtype),) if self.masked else ()),
            Tensor("q", (step.L, n, w), step.dtype),
            Tensor("k", (step.L, m, w), step.dtype),
            Tensor("v", (step.L, m, self.values_within), step.dtype),
            Tensor("log_sum_exp", (step.B, tokens, n), "float32"),
            Tensor("attended", (step.L, n, Size("v", self.values)), step.dtype),
            *(Tensor(name, (Size("1", 1), numbers), "int64") for name, numbers in RANDOM_STATES[kernel].items()),
        )

    def _stepwise(self, step: Step) -> tuple[Tensor, ...]:
        n, w, v = Size("n", self.queries), Size("w", self.width), Size("v", self.values)
        return (
            Tensor("q", (step.L, n, w), "float32"),
            Tensor("k", (step.L, n, w), "float32"),
            Tensor("v", (step.L, n, v), "float32"),
            self._logits(step, "probabilities"),
            Tensor("attended", (step.L, n, v), step.dtype),
        )

    def _logits(self, step: Step, name: str) -> Tensor:
        return Tensor(name, (step.L, Size("n", self.queries), step.S), "float32")

    def forward(self, step: Step) -> Moment:
        """Return the moment of the forward: queries and keys without positions, or the logits and their inputs."""
        q, k, v = self.queries * self.width, self.keys * self.width, self.queries * self.values
        if self.kernel(step) not in STEPWISE:
            return Moment(rows_of(step, ("queries", q), ("keys", k)))
        wide = rows_of(replace(step, dtype="float32"), ("queries_float32", q), ("keys_float32", q))
        return Moment((self._logits(step, "logits"), *rows_of(step, ("queries", q), ("keys", q), ("values", v)), *wide))

    def backward(self, step: Step) -> Moment:
        """Return the moment of the backward: the gradients of the inputs, or of the probabilities and the logits."""
        if self.kernel(step) in STEPWISE:
            return Moment(tuple(self._logits(step, name) for name in softmax_gradients(step)))
        q, k = self.queries * self.width, self.keys * self.width
        return Moment(rows_of(step, ("d_attended", self.queries * self.values), ("d_q", q), ("d_k", k), ("d_v", k)))

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return the outputs of a fused kernel; step by step they are computed again."""
        if self.kernel(step) in STEPWISE:
            return ()
        inputs = ("mask", "q", "k", "v")
        return tuple(tensor for tensor in self.kept(step) if tensor.name not in inputs)

    def names(self, step: Step) -> tuple[str, ...]:
        """Return the names of what is kept."""
        return tuple(tensor.name for tensor in self.kept(step))


STEPWISE = ("math", "cpu-math")  # kernels that keep all probabilities


def softmax_gradients(step: Step) -> tuple[str, ...]:
    """Return the names of tensors as large as the probabilities in a softmax's backward; a GPU has one more."""
    return ("d_probabilities", "d_logits", *(("d_product",) if step.on_gpu else ()))


def shared_keys(kv_heads: int, tensor: int) -> int:
    """Return the heads of keys and values that a GPU has; ValueError if neither number divides the other."""
    return 1 if tensor > kv_heads and tensor % kv_heads == 0 else divided("the heads of keys", kv_heads, tensor)


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
    chunk: int | None = None  #: tokens that see each other, and no others (Llama 4's layers with positions)
    kind: ClassVar[str] = "attention"
    by_token: ClassVar[bool] = False

    def weights(self) -> tuple[Weight, ...]:
        """Return the four projections, their biases, and the weights of the norms."""
        q, kv = self.heads * self.width, self.kv_heads * self.width
        inner = (("wq", q), ("wk", kv), ("wv", kv))
        products = [Weight(name, (columns, self.d)) for name, columns in inner] + [Weight("wo", (self.d, q))]
        biases = [Weight(f"{name}_bias", (columns,)) for name, columns in inner if self.bias]
        biases += [Weight("wo_bias", (self.d,))] if self.out_bias else []
        return (*products, *biases, *(weight for norm in self.norms for weight in norm.weights()))

    def _heads(self, step: Step) -> Heads:
        masked = self.chunk is not None and step.S >= self.chunk
        return Heads(self.heads, self.kv_heads, self.width, self.width, self.width, masked)

    def _copies(self, step: Step) -> bool:
        return self.partly_turned and self._heads(step).kernel(step) not in STEPWISE

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input of the projections, and what the norms and the kernel keep."""
        return (
            Tensor("attention_input", (step.L, Size("d", self.d)), step.dtype),
            *(tensor for norm in self.norms for tensor in norm.kept(step)),
            *((Tensor("query_scales", (step.S,), "float32"),) if self.scales else ()),
            *self._heads(step).kept(step),
            *(rows_of(step, ("attended_rows", self.heads * self.width)) if self._copies(step) else ()),
        )

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment, in the kernel."""
        return (self._heads(step).forward(step),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return two moments: in the kernel, and in the norm of the queries, if there is one."""
        heads = self._heads(step)
        gone = (*heads.names(step), "attended_rows")
        norms = [replace(moment, freed=(*moment.freed, *gone)) for norm in self.norms for moment in norm.backward(step)]
        return (heads.backward(step), *norms[:1])

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return queries, keys and values, the kernel's outputs, and the output."""
        q, kv = self.heads * self.width, self.kv_heads * self.width
        inner = rows_of(step, ("queries", q), ("keys", kv), ("values", kv), ("out", self.d))
        return (*inner, *self._heads(step).products(step))

    def share(self, tensor: int, expert: int) -> "Attention":
        """Return some of the heads, with their norms; where GPUs outnumber heads of keys, several have the same."""
        heads, kv_heads = divided("the heads of queries", self.heads, tensor), shared_keys(self.kv_heads, tensor)
        norms = tuple(self._norm(norm, of) for norm, of in zip(self.norms, (heads, kv_heads), strict=False))
        return replace(self, heads=heads, kv_heads=kv_heads, norms=norms)

    def _norm(self, norm: Norm, heads: int) -> Norm:
        """Return a norm for some heads: one for each, or one of them all."""
        return replace(norm, groups=heads) if norm.width == self.width else replace(norm, width=heads * self.width)


@dataclass(frozen=True)
class SinkAttention:
    """gpt-oss's attention: a learned logit for each head takes its part of the softmax; in plain torch."""

    d: int
    heads: int
    kv_heads: int
    width: int
    kind: ClassVar[str] = "attention"
    by_token: ClassVar[bool] = False

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
            self._logits(step, "probabilities"),
            Tensor("attended", (step.L, n, w), step.dtype),
        )

    def _logits(self, step: Step, name: str) -> Tensor:
        return Tensor(name, (step.L, Size("n", self.heads), step.S + 1), step.dtype)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the logits with the sinks, the same less the largest of each row, and two masks."""
        masks = (Tensor(name, (step.L, step.S), step.dtype) for name in ("causal_mask", "window_mask"))
        return (Moment((self._logits(step, "logits"), self._logits(step, "logits_shifted"), *masks)),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of the probabilities and of the logits."""
        return (Moment(tuple(self._logits(step, name) for name in softmax_gradients(step))),)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return queries, keys and values, and the output; the probabilities are computed again."""
        q, kv = self.heads * self.width, self.kv_heads * self.width
        return rows_of(step, ("queries", q), ("keys", kv), ("values", kv), ("out", self.d))

    def share(self, tensor: int, expert: int) -> "SinkAttention":
        """Return some of the heads."""
        heads = divided("the heads of queries", self.heads, tensor)
        return replace(self, heads=heads, kv_heads=shared_keys(self.kv_heads, tensor))


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
    by_token: ClassVar[bool] = False

    @property
    def _width(self) -> int:
        return self.plain_width + self.rotary_width

    @property
    def _heads(self) -> Heads:
        n, v = self.heads, self.value_width
        return Heads(n, n, self._width, v, self.plain_width + v)

    def _norms(self) -> tuple[Norm, ...]:
        ranks = {"q_latent": self.q_rank, "kv_latent": self.kv_rank}
        return tuple(Norm(rank, name=name) for name, rank in ranks.items() if rank)

    def weights(self) -> tuple[Weight, ...]:
        """Return the products to the latent vectors and from them, and the norms between."""
        d, n, q = self.d, self.heads, self.heads * self._width
        queries = (
            (Weight("wq_down", (self.q_rank, d)), Weight("wq_up", (q, self.q_rank)))
            if self.q_rank
            else (Weight("wq", (q, d)),)
        )
        return (
            *queries,
            Weight("wkv_down", (self.kv_rank + self.rotary_width, d)),
            Weight("wkv_up", (n * (self.plain_width + self.value_width), self.kv_rank)),
            Weight("wo", (d, n * self.value_width)),
            *(weight for norm in self._norms() for weight in norm.weights()),
        )

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, the latent vectors before and after their norms, and what the kernel keeps.

        cuDNN's output lies head by head, and the last product gets a copy.
        """
        latents = [
            tensor
            for norm in self._norms()
            for tensor in (*self._normed(norm, step), Tensor(norm.name, (step.L, norm.width), step.dtype))
        ]
        copied = self._heads.kernel(step) == "cudnn"
        return (
            Tensor("attention_input", (step.L, Size("d", self.d)), step.dtype),
            *latents,
            *self._heads.kept(step),
            *(rows_of(step, ("attended_rows", self.heads * self.value_width)) if copied else ()),
        )

    def _normed(self, norm: Norm, step: Step) -> tuple[Tensor, ...]:
        """Return what a norm keeps; its input in float32 is a copy, or, if it was so before, the whole product."""
        first, *rest = norm.kept(step)
        if norm.name == "kv_latent" and step.dtype == "float32":
            first = replace(first, dims=(step.L, self.kv_rank + self.rotary_width))
        return (first, *rest)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment, in the kernel."""
        return (self._heads.forward(step),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment, in the kernel."""
        return (self._heads.backward(step),)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return the latent vectors, what is made of them, the kernel's outputs, and the output."""
        down = (("q_down", self.q_rank),) if self.q_rank else ()
        up = self.heads * (self.plain_width + self.value_width)
        inner = (("queries", self.heads * self._width), ("kv_down", self.kv_rank + self.rotary_width), ("kv_up", up))
        return (*rows_of(step, *down, *inner, ("out", self.d)), *self._heads.products(step))

    def share(self, tensor: int, expert: int) -> "LatentAttention":
        """Return some of the heads; each GPU computes all latent vectors."""
        return replace(self, heads=divided("the heads of queries", self.heads, tensor))
