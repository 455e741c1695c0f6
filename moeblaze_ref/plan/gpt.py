"""GPT-2-like models as MegaBlocks trains them (arXiv 2211.15841, section 6): dense, or with experts in each layer.

Attention is computed step by step, with dropout, as before flash attention. A dense layer then keeps 34 L d + 5 n S L
bytes in 16 bits: d model width, n heads, L tokens, S of them in a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from moeblaze_ref.core.config import ModelConfig, MoEConfig
from moeblaze_ref.memory.accounting import Assumptions, Size, Tensor, account
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.parts import Embedding, Head, Moment, Part, Step, Weight, divided, rows_of

HEAD_WIDTH = 64  # of Megatron's GPT-2 models, and of GPT-2


class Whole:
    """Base class of parts that no tensor parallelism and no checkpoint divides."""

    by_token: ClassVar[bool] = False

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: no selective checkpoint is counted."""
        return ()

    def share(self, tensor: int, expert: int) -> Self:
        """Return the same; ValueError for tensor parallelism."""
        divided("a GPT-2-like layer, which counts as", 1, tensor)
        return self


@dataclass(frozen=True)
class LayerNorm(Whole):
    """Layer normalisation with weight and bias."""

    d: int
    kind: ClassVar[str] = "norms"

    def weights(self) -> tuple[Weight, ...]:
        """Return weight and bias."""
        return Weight("norm", (self.d,)), Weight("norm_bias", (self.d,))

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, and mean and 1 / deviation of each row, on a GPU in float32."""
        dtype = "float32" if step.on_gpu else step.dtype
        rows = (Tensor(name, (step.L,), dtype) for name in ("mean", "scale"))
        return (*rows_of(step, ("norm_input", self.d)), *rows)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment."""
        return (Moment(),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradient of the input."""
        return (Moment(rows_of(step, ("d_input", self.d))),)


@dataclass(frozen=True)
class Dropout(Whole):
    """Dropout of rows: a mask of a byte for each number."""

    d: int
    kind: ClassVar[str] = "dropout"

    def weights(self) -> tuple[Weight, ...]:
        """Return nothing."""
        return ()

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the mask."""
        return (Tensor("mask", (step.L, Size("d", self.d)), "bool"),)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment."""
        return (Moment(),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradient before the mask."""
        return (Moment(rows_of(step, ("d_dropped", self.d))),)


@dataclass(frozen=True)
class SelfAttention(Whole):
    """Attention with as many heads of keys as of queries, biases, and all probabilities in the step's dtype."""

    d: int
    dropout: bool = True  #: of the probabilities
    kind: ClassVar[str] = "attention"

    @property
    def heads(self) -> int:
        """Heads of 64 numbers."""
        return self.d // HEAD_WIDTH

    def weights(self) -> tuple[Weight, ...]:
        """Return the products to queries, keys and values in one, and from them, each with its bias."""
        d = self.d
        return Weight("wqkv", (d, 3 * d)), Weight("wqkv_bias", (3 * d,)), Weight("wo", (d, d)), Weight("wo_bias", (d,))

    def _table(self, step: Step, name: str, dtype: str) -> Tensor:
        return Tensor(name, (step.L, Size("n", self.heads), step.S), dtype)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, queries, keys and values, the probabilities before and after dropout, and the output."""
        dropped = (self._table(step, "mask", "bool"), self._table(step, "dropped", step.dtype))
        return (
            *rows_of(step, ("attention_input", self.d), ("q", self.d), ("k", self.d), ("v", self.d)),
            self._table(step, "probabilities", step.dtype),
            *(dropped if self.dropout else ()),
            *rows_of(step, ("attended", self.d)),
        )

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the logits."""
        return (Moment((self._table(step, "logits", step.dtype),)),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of probabilities and logits, and their product."""
        names = ("d_probabilities", "d_logits", "d_product")
        return (Moment(tuple(self._table(step, name, step.dtype) for name in names)),)


@dataclass(frozen=True)
class GeluMlp(Whole):
    """A dense MLP with GELU and biases."""

    d: int
    kind: ClassVar[str] = "dense MLP"

    def weights(self) -> tuple[Weight, ...]:
        """Return w1 (d, 4 d) and w3 (4 d, d), each with its bias."""
        d, h = self.d, 4 * self.d
        return Weight("w1", (d, h)), Weight("b1", (h,)), Weight("w3", (h, d)), Weight("b3", (d,))

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, a and gelu(a)."""
        return rows_of(step, ("mlp_input", self.d), ("a", 4 * self.d), ("act", 4 * self.d))

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the output."""
        return (Moment(rows_of(step, ("out", self.d))),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of act and a."""
        return (Moment(rows_of(step, ("d_act", 4 * self.d), ("d_a", 4 * self.d))),)


@dataclass(frozen=True)
class LocalExperts(Whole):
    """The MoE layer of one GPU that gets as many rows as it sends, in a system of `memory.accounting`."""

    d: int
    E: int  #: experts here
    system: str
    #: Rows that a fixed or dynamic capacity reserves, as a multiple of an even share.
    capacity_factor: float = 1.0
    kind: ClassVar[str] = "experts"

    def weights(self) -> tuple[Weight, ...]:
        """Return wg (E, d), w1 (E, d, 4 d) and w3 (E, 4 d, d)."""
        d, h, E = self.d, 4 * self.d, self.E
        experts = (Weight("w1", (E, d, h), of_experts=True), Weight("w3", (E, h, d), of_experts=True))
        return (Weight("wg", (E, d)), *experts)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return what the account of the layer keeps."""
        return tuple(tensor for tensor in self._tensors(step) if tensor.kept)

    def _tensors(self, step: Step) -> Sequence[Tensor]:
        layer = MoEConfig(int(step.L), self.d, 4 * self.d, self.E, 1, activation="gelu", dtype=step.dtype)
        return account(layer, self.system, assumptions=Assumptions(capacity_factor=self.capacity_factor)).tensors

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: what the forward frees again."""
        return (Moment(tuple(tensor for tensor in self._tensors(step) if not tensor.kept)),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of the largest kept tensors, those of h columns, and of the routed rows."""
        h = 4 * self.d
        wide = tuple(t for t in self.kept(step) if t.shape[-1] == h)
        return (Moment(tuple(replace(tensor, name=f"d_{tensor.name}") for tensor in wide[:2])),)


def gpt(name: str, size: ModelConfig, experts: Part | None = None, dropout: bool = True) -> Model:
    """A GPT-2-like model; if experts are given they take the place of each layer's MLP."""
    d = size.d
    norm: Part = LayerNorm(d)
    mask: tuple[Part, ...] = (Dropout(d),) if dropout else ()
    layer: tuple[Part, ...] = (norm, SelfAttention(d, dropout), *mask, norm, experts or GeluMlp(d), *mask)
    before: tuple[Part, ...] = (Embedding(d, size.vocabulary, tied=True), Positions(d, size.sequence), *mask)
    after: tuple[Part, ...] = (norm, Head(d, size.vocabulary, tied=True))
    return Model(name, before, (layer,) * size.layers, after, size.sequence, d)


@dataclass(frozen=True)
class Positions(Whole):
    """Learned vectors of positions."""

    d: int
    longest: int
    kind: ClassVar[str] = "positions"

    def weights(self) -> tuple[Weight, ...]:
        """Return a vector for each position."""
        return (Weight("positions", (self.longest, self.d)),)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the numbers of the positions."""
        return (Tensor("position_ids", (step.S,), "int64"),)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment."""
        return (Moment(),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment."""
        return (Moment(),)
