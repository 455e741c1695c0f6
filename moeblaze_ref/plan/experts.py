"""The MoE layer of a transformer in parts: its router, and its experts in plain torch as transformers 5.23 has them.

Symbols as in `parts`: L tokens, d model width, h expert width, E experts, k experts per token, R = L * k routed rows.
"""

from dataclasses import dataclass
from typing import ClassVar

from moeblaze_ref.memory.accounting import Size, Tensor
from moeblaze_ref.plan.parts import Step, Weight

# What a router makes of the logits.
SCORES = {
    "softmax": "probabilities of all experts, then the k largest (Mixtral, Qwen3, OLMoE, DeepSeek-V2)",
    "sigmoid": "a number for each expert by itself; a bias moves the choice (DeepSeek-V3, Kimi-K2, GLM-4.5)",
    "softmax of k": "the k largest logits, then their softmax (gpt-oss)",
    "sigmoid of k": "the k largest logits, then a sigmoid (Llama 4)",
}


@dataclass(frozen=True)
class Router:
    """From the input to k experts for each token, and their weights."""

    d: int
    E: int
    k: int
    scores: str = "softmax"  #: one of ``SCORES``
    renormalize: bool = False  #: the weights are divided by their sum
    in_float32: bool = False  #: the product: it keeps input and weight as float32
    bias: bool = False  #: of the logits
    kind: ClassVar[str] = "router"

    def weights(self) -> tuple[Weight, ...]:
        """Return wg (d, E), the bias of the logits, and that of the choice, which no gradient trains."""
        biases = [Weight("router_bias", (self.E,))] if self.bias else []
        biases += [Weight("choice_bias", (self.E,), trained=False)] if self.scores == "sigmoid" else []
        return (Weight("wg", (self.d, self.E)), *biases)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, the scores, the choice, and what the division by the sum keeps."""
        d, E, k = Size("d", self.d), Size("E", self.E), Size("k", self.k)
        dtype = "float32" if self.in_float32 else step.dtype
        product = [Tensor("router_input", (step.L, d), dtype)]
        if self.in_float32:
            product.append(Tensor("router_weight", (d, E), dtype))
        choice = (Tensor("topk_experts", (step.L, k), "int64"),)
        if self.scores == "softmax of k":
            return (*product, *choice, Tensor("topk_scores", (step.L, k), step.dtype))
        scores = (Tensor("scores", (step.L, E), "float32"),)
        if not self.renormalize:
            return (*product, *scores, *choice)
        divided = Tensor("topk_sum", (step.L,), "float32"), Tensor("topk_scores", (step.L, k), "float32")
        return (*product, *scores, *choice, *divided)


@dataclass(frozen=True)
class GroupedExperts:
    """Experts as three grouped products over rows in the order of their experts (transformers' ``grouped_mm``)."""

    d: int
    h: int
    E: int
    k: int
    weight_dtype: str | None = None  #: of the weights that rows are multiplied by; None: the step's
    #: gpt-oss: biases, and SwiGLU with a limit, whose steps torch keeps one by one
    clamped: bool = False
    kind: ClassVar[str] = "experts"

    def weights(self) -> tuple[Weight, ...]:
        """Return w1, w2 (E, d, h) and w3 (E, h, d); with ``clamped`` also their biases."""
        E, d, h = self.E, self.d, self.h
        products = Weight("w1", (E, d, h)), Weight("w2", (E, d, h)), Weight("w3", (E, h, d))
        if not self.clamped:
            return products
        return (*products, Weight("b1", (E, h)), Weight("b2", (E, h)), Weight("b3", (E, d)))

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the routed rows, all tensors between the products, the rows' weights, and int64 places of rows."""
        R = step.L * Size("k", self.k)
        d, h = Size("d", self.d), Size("h", self.h)
        # With biases also each row's expert.
        places = ("row_token", "row_order", "row_place", *(("row_expert",) if self.clamped else ()))
        between = ("sigmoid", "b_limited", "a_sigmoid", "b_plus_1", "y_swi") if self.clamped else ("act", "y_swi")
        return (
            *(Tensor(name, (R,), "int64") for name in places),
            Tensor("expert_ends", (Size("E", self.E),), "int32"),
            Tensor("x_routed", (R, d), step.dtype),
            Tensor("ab", (R, 2, h), step.dtype),
            *(Tensor(name, (R, h), step.dtype) for name in between),
            Tensor("row_weights", (R,), self.weight_dtype or step.dtype),
            Tensor("y", (R, d), step.dtype),
        )


@dataclass(frozen=True)
class DenseExperts:
    """Llama 4's experts: each sees every token, those of other experts multiplied by 0."""

    d: int
    h: int
    E: int
    kind: ClassVar[str] = "experts"

    def weights(self) -> tuple[Weight, ...]:
        """Return w1, w2 (E, d, h) and w3 (E, h, d)."""
        return GroupedExperts(self.d, self.h, self.E, 1).weights()

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return E copies of the tokens, before and after the weights, and all tensors between the products."""
        E, d, h = Size("E", self.E), Size("d", self.d), Size("h", self.h)
        rows = step.L * E
        return (
            Tensor("row_weights", (rows,), step.dtype),
            Tensor("x_repeated", (rows, d), step.dtype),
            Tensor("x_weighted", (rows, d), step.dtype),
            Tensor("ab", (rows, 2, h), step.dtype),
            Tensor("act", (rows, h), step.dtype),
            Tensor("y_swi", (rows, h), step.dtype),
        )
