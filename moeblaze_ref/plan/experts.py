"""The MoE layer of a transformer in parts: its router, and its experts in plain torch as transformers 5.23 has them.

`MoEBlock` has a layer of `nn` in the place of both.

Symbols as in `parts`: L tokens, d model width, h expert width, E experts, k experts per token, R = L * k routed rows.
"""

from dataclasses import dataclass
from typing import ClassVar

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.memory.accounting import Account, Size, Tensor, account
from moeblaze_ref.plan.parts import Part, Step, Weight

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


# Of `memory.accounting`, those whose layers are compared with torch in a whole model.
SYSTEMS = ("moeblaze", "megablocks", "megablocks_memory_optimized")


@dataclass(frozen=True)
class MoEBlock:
    """A layer of `nn` in the place of router and experts (`nn.replace_moe_blocks`), as `memory.accounting` counts it.

    Raises
    ------
    ValueError
        If the system is not one of ``SYSTEMS``, or as `memory.accounting.account`.
    """

    d: int
    h: int
    E: int
    k: int
    system: str
    policy: str | None = None  #: what `moeblaze` saves, one of ``config.POLICIES``; the others have none
    kind: ClassVar[str] = "experts"

    def __post_init__(self) -> None:
        checks.check_name("system", self.system, SYSTEMS)
        self._account(tokens=1)  # raises

    def _account(self, tokens: int, dtype: str = "bfloat16") -> Account:
        """Return the account of a step, whose routed rows spread evenly: `megablocks` pads each expert's rows."""
        return account(MoEConfig(tokens, self.d, self.h, self.E, self.k, dtype=dtype), self.system, self.policy)

    @classmethod
    def of(cls, router: Router, experts: Part, system: str, policy: str | None) -> "MoEBlock":
        """Return the block of such a router and experts.

        Raises
        ------
        ValueError
            If they compute what no layer of `nn` does.
        """
        plain = Router(router.d, router.E, router.k, renormalize=router.renormalize)
        if router != plain or not isinstance(experts, GroupedExperts) or experts.clamped:
            raise ValueError(f"no layer here takes the place of {router} and {experts}")
        return cls(router.d, experts.h, router.E, router.k, system, policy)

    def weights(self) -> tuple[Weight, ...]:
        """Return wg (d, E), w1, w2 (E, d, h) and w3 (E, h, d)."""
        parts = Router(self.d, self.E, self.k), GroupedExperts(self.d, self.h, self.E, self.k)
        return tuple(weight for part in parts for weight in part.weights())

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return what the layer saves, its input and its routing included."""
        return tuple(tensor for tensor in self._account(int(step.L), step.dtype).tensors if tensor.kept)
