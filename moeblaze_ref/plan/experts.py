"""The MoE layer of a transformer in parts: its router, and its experts in plain torch as transformers 5.23 has them.

`MoEBlock` has a layer of `nn` in the place of both.

Symbols as in `parts`: L tokens, d model width, h expert width, E experts, k experts per token, R = L * k routed rows.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ITEMSIZE, MoEConfig
from moeblaze_ref.memory.accounting import Account, Size, Tensor, account, megablocks_step_account, step_account
from moeblaze_ref.plan.parts import Moment, Part, Step, Weight, divided
from moeblaze_ref.systems.layer import intermediates

# The scores that a router makes of the logits.
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
    by_token: ClassVar[bool] = True

    def weights(self) -> tuple[Weight, ...]:
        """Return wg (E, d), the bias of the logits, and that of the choice, which no gradient trains."""
        biases = [Weight("router_bias", (self.E,))] if self.bias else []
        biases += [Weight("choice_bias", (self.E,), trained=False)] if self.scores == "sigmoid" else []
        return (Weight("wg", (self.E, self.d)), *biases)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input, the scores, the choice, and what the division by the sum keeps."""
        d, E, k = Size("d", self.d), Size("E", self.E), Size("k", self.k)
        dtype = "float32" if self.in_float32 else step.dtype
        product = [Tensor("router_input", (step.L, d), dtype)]
        if self.in_float32 and step.dtype != "float32":
            product.append(Tensor("router_weight", (d, E), dtype))
        choice = (Tensor("topk_experts", (step.L, k), "int64"),)
        if self.scores == "softmax of k":
            return (*product, *choice, Tensor("topk_scores", (step.L, k), step.dtype))
        scores = (Tensor("scores", (step.L, E), "float32"),)
        if not self.renormalize:
            return (*product, *scores, *choice)
        divided = Tensor("topk_sum", (step.L,), "float32"), Tensor("topk_scores", (step.L, k), "float32")
        return (*product, *scores, *choice, *divided)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the logits."""
        return (Moment((Tensor("logits", (step.L, Size("E", self.E)), "float32"),)),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the gradients of scores and logits, and of the input."""
        E = Size("E", self.E)
        of_scores = tuple(Tensor(name, (step.L, E), "float32") for name in ("d_scores", "d_logits"))
        return (Moment((*of_scores, Tensor("d_input", (step.L, Size("d", self.d)), step.dtype))),)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return the logits."""
        dtype = "float32" if self.in_float32 else step.dtype
        return (Tensor("logits", (step.L, Size("E", self.E)), dtype),)

    def share(self, tensor: int, expert: int) -> "Router":
        """Return the same: each GPU has some of the tokens."""
        return self


def _rows(even: Size, imbalance: float) -> Size:
    """Return an even share of rows, or so many times as many."""
    return even if imbalance == 1 else Size(f"({even.text} * {imbalance:.4g})", math.ceil(int(even) * imbalance))


def _of_experts(**shapes: tuple[int, ...]) -> tuple[Weight, ...]:
    return tuple(Weight(name, shape, of_experts=True) for name, shape in shapes.items())


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
    imbalance: float = 1.0  #: rows that come here from all GPUs, as a multiple of an even share
    kind: ClassVar[str] = "experts"
    by_token: ClassVar[bool] = True

    def weights(self) -> tuple[Weight, ...]:
        """Return w1 and w2 as one (E, 2h, d) and w3 (E, d, h); with ``clamped`` transposed, and their biases."""
        E, d, h = self.E, self.d, self.h
        if not self.clamped:
            return _of_experts(w12=(E, 2 * h, d), w3=(E, d, h))
        return _of_experts(w12=(E, d, 2 * h), w3=(E, h, d), b12=(E, 2 * h), b3=(E, d))

    def rows(self, step: Step) -> Size:
        """Return the routed rows of the experts here."""
        return _rows(step.L * Size("k", self.k), self.imbalance)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the routed rows, all tensors between the products, the rows' weights, and int64 places of rows."""
        R = self.rows(step)
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

    def _of_rows(self, step: Step, *names: str) -> tuple[Tensor, ...]:
        shape = self.rows(step), Size("d", self.d)
        return tuple(Tensor(name, shape, self.weight_dtype or step.dtype) for name in names)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the weighted rows in the order of experts and in that of tokens."""
        return (Moment(self._of_rows(step, "y_weighted", "y_in_order")),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return two moments: before the products, and after them, when the rows of the input have their gradient."""
        R, h = self.rows(step), Size("h", self.h)
        d_ab = Tensor("d_ab", (R, 2, h), step.dtype)
        d_x = Tensor("d_x_routed", (R, Size("d", self.d)), step.dtype)
        gone = tuple(tensor.name for tensor in self.kept(step) if tensor.name not in ("x_routed", "row_token"))
        before = self._of_rows(step, "d_y_in_order", "d_y_weighted", "d_y_products")
        return (Moment(before, gradients=0.0), Moment((d_ab, d_x), gone))

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return (a, b) and y."""
        return tuple(tensor for tensor in self.kept(step) if tensor.name in ("ab", "y"))

    def share(self, tensor: int, expert: int) -> "GroupedExperts":
        """Return some of the experts, which get as many rows as the tokens here send away."""
        return replace(self, E=divided("the experts", self.E, expert, "expert"))


@dataclass(frozen=True)
class DenseExperts:
    """Llama 4's experts: each sees every token, those of other experts multiplied by 0."""

    d: int
    h: int
    E: int
    kind: ClassVar[str] = "experts"
    by_token: ClassVar[bool] = True

    def weights(self) -> tuple[Weight, ...]:
        """Return w1 and w2 as one (E, d, 2h), and w3 (E, h, d)."""
        return _of_experts(w12=(self.E, self.d, 2 * self.h), w3=(self.E, self.h, self.d))

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

    def _of_rows(self, step: Step, *named: tuple[str, int]) -> tuple[Tensor, ...]:
        rows = step.L * Size("E", self.E)
        return tuple(Tensor(name, (rows, width), step.dtype) for name, width in named)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the experts' outputs."""
        return (Moment(self._of_rows(step, ("y", self.d))),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return two moments: in the activation, and after the products."""
        d, h = self.d, self.h
        activation = self._of_rows(step, ("d_y", d), ("d_y_swi", h), ("d_a", h), ("d_b", h))
        after = self._of_rows(step, ("d_ab", 2 * h), ("d_x_weighted", d))
        return (Moment(activation, gradients=0.0), Moment(after, ("ab", "act", "y_swi")))

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: batched products are computed again."""
        return ()

    def share(self, tensor: int, expert: int) -> "DenseExperts":
        """Return the same; ValueError for several GPUs: as transformers has them, each expert sees all tokens."""
        if expert > 1:
            raise ValueError(f"expert is {expert}, but Llama 4's experts in transformers see all tokens: it must be 1")
        return self


# Of `memory.accounting`, those whose layers are compared with torch in a whole model.
SYSTEMS = ("moeblaze", "megablocks", "megablocks_memory_optimized")
FORMULAS = ("sonicmoe", "megablocks_published")  # as their papers have them


@dataclass(frozen=True)
class MoEBlock:
    """A layer of `nn` in the place of router and experts (`nn.replace_moe_blocks`), as `memory.accounting` counts it.

    Raises
    ------
    ValueError
        If the system is not one of ``SYSTEMS`` or ``FORMULAS``, or as `memory.accounting.account`.
    """

    d: int
    h: int
    E: int
    k: int
    system: str
    policy: str | None = None  #: what `moeblaze` saves, one of ``config.POLICIES``; the others have none
    kind: ClassVar[str] = "experts"
    by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.check_name("system", self.system, SYSTEMS + FORMULAS)
        self._account(tokens=1)  # raises

    def _account(self, tokens: int, dtype: str = "bfloat16") -> Account:
        """Return the account of a step, whose routed rows spread evenly: `megablocks` pads each expert's rows."""
        return account(self._config(tokens, dtype), self.system, self.policy)

    def _config(self, tokens: int, dtype: str) -> MoEConfig:
        return MoEConfig(tokens, self.d, self.h, self.E, self.k, dtype=dtype)

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
            raise ValueError(
                f"experts is {system!r}, but no layer here has such a router ({router.scores}, in "
                f"{'float32' if router.in_float32 else 'its own dtype'}) and {type(experts).__name__}"
                f"{' with biases' * getattr(experts, 'clamped', False)}: it must be 'torch'"
            )
        return cls(router.d, experts.h, router.E, router.k, system, policy)

    def weights(self) -> tuple[Weight, ...]:
        """Return wg (d, E), w1, w2 (E, d, h) and w3 (E, h, d)."""
        E, d, h = self.E, self.d, self.h
        return Weight("wg", (d, E)), *_of_experts(w1=(E, d, h), w2=(E, d, h), w3=(E, h, d))

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return what the layer saves, its input and its routing included."""
        return tuple(tensor for tensor in self._account(int(step.L), step.dtype).tensors if tensor.kept)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the most that the forward has alive."""
        one = self._account(int(step.L), step.dtype)
        return (_alive("forward", one.peak_bytes - one.kept_bytes),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the most that the step has alive, but for the gradients of the weights.

        Where no account of a whole step is, it is taken to be y_swi and the gradients of a, b and the routed rows.
        """
        if self.system in FORMULAS:
            rows = int(step.L) * self.k * (3 * self.h + self.d)
            return (_alive("backward", rows * ITEMSIZE[step.dtype]),)
        kept = self._account(int(step.L), step.dtype).kept_bytes
        gradients = sum(weight.count for weight in self.weights()) * ITEMSIZE[step.dtype]
        return (_alive("backward", max(0, self._step_account(step).peak_bytes - kept - gradients)),)

    def _step_account(self, step: Step) -> Account:
        config = self._config(int(step.L), step.dtype)
        return megablocks_step_account(config) if self.policy is None else step_account(config, self.policy)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: torch does not see the products."""
        return ()

    def share(self, tensor: int, expert: int) -> "MoEBlock | ExpertParallelBlock":
        """Return the layer on one of the GPUs that divide the experts; ValueError if none is there for the system."""
        if expert == 1:
            return self
        if self.policy is None:
            raise ValueError(f"expert is {expert}, but a layer with {self.system} is counted on one GPU: it must be 1")
        return ExpertParallelBlock(self, divided("the experts", self.E, expert, "expert"), expert)


@dataclass(frozen=True)
class ExpertParallelBlock:
    """One rank of `parallel.layer.ExpertParallelMoE`.

    A token's row travels once to each rank that has one of its experts. Counted are tokens whose experts are on as many
    ranks as can be: others send fewer rows.
    """

    whole: MoEBlock  #: the layer with all experts
    E: int  #: experts here
    ranks: int
    imbalance: float = 1.0  #: rows that come here from all ranks, as a multiple of an even share
    kind: ClassVar[str] = "experts"
    by_token: ClassVar[bool] = True

    @property
    def _alone(self) -> MoEBlock:
        """A layer of one GPU whose tokens are the routed rows of the experts here."""
        return replace(self.whole, E=self.E, k=1)

    def weights(self) -> tuple[Weight, ...]:
        """Return wg (d, E) for all experts, and the weights of those here."""
        return (*self.whole.weights()[:1], *self._alone.weights()[1:])

    def sent(self, step: Step) -> Size:
        """Return the rows that leave: one for each token and rank."""
        return step.L * Size("min(k, ranks)", min(self.whole.k, self.ranks))

    def arrived(self, step: Step) -> Size:
        """Return the rows that come: at most all tokens of all ranks."""
        return min(_rows(self.sent(step), self.imbalance), step.L * Size("ranks", self.ranks))

    def routed(self, step: Step) -> Size:
        """Return the routed rows of the experts here."""
        return _rows(step.L * Size("k", self.whole.k), self.imbalance)

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input with its routing, the rows that came with theirs, and what the policy saves of them."""
        d, k, arrived = Size("d", self.whole.d), Size("k", self.whole.k), self.arrived(step)
        return (
            Tensor("x", (step.L, d), step.dtype),
            Tensor("topk_experts", (step.L, k), "int32"),
            Tensor("shares", (Size("E", self.whole.E),), "float32"),
            Tensor("part", (Size("1", 1),), "float32"),
            *_structures("trip", self.sent(step), Size("ranks", self.ranks), step.L * k),
            Tensor("rows", (arrived, d), step.dtype),
            Tensor("gates", (arrived, k), "float32"),
            *_structures("experts", self.routed(step), Size("E", self.E), arrived * k),
            *self._saved(step),
        )

    def _saved(self, step: Step) -> tuple[Tensor, ...]:
        widths, h = dict.fromkeys(("routed_x", "y"), Size("d", self.whole.d)), Size("h", self.whole.h)
        names = intermediates(self.whole.policy, "swiglu")
        return tuple(Tensor(name, (self.routed(step), widths.get(name, h)), step.dtype) for name in names)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the layer alone, beside the rows that were sent."""
        return self._travelling(step, self._alone.forward(self._routed_step(step)))

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment: the same of the backward."""
        return self._travelling(step, self._alone.backward(self._routed_step(step)))

    def _routed_step(self, step: Step) -> Step:
        return replace(step, batch=1, sequence=int(self.routed(step)))

    def _travelling(self, step: Step, moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
        rows = Tensor("rows_sent", (self.sent(step), Size("d", self.whole.d)), step.dtype)
        return tuple(replace(moment, beside=(*moment.beside, rows)) for moment in moments)

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: torch does not see the products."""
        return ()

    def share(self, tensor: int, expert: int) -> "ExpertParallelBlock":
        """Return the same: it is a share already."""
        return self


def _structures(of: str, rows: Size, groups: Size, slots: Size) -> tuple[Tensor, ...]:
    """Return the index structures of rows that go to some groups, of so many slots (`core.structures.Dispatch`)."""
    shapes = {
        "expert_token_indices": rows,
        "expert_token_offsets": groups + 1,
        "token_expert_indices": slots,
        "token_index_map": slots,
    }
    return tuple(Tensor(f"{of} {name}", (size,), "int32") for name, size in shapes.items())


def _alive(where: str, number: int) -> Moment:
    return Moment((Tensor(f"alive_in_{where}", (Size("bytes", number),), "bool"),))
