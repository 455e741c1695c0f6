"""Inputs that are hard on purpose, and the one measure of error: what `check` and the tests share."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moeblaze_ref.backends.numpy_ref import gating
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, is_gated
from moeblaze_ref.core.structures import Dispatch
from moeblaze_ref.systems import capacity
from moeblaze_ref.systems.layer import Gradients, MoEWeights

ROUTINGS = ("uniform", "zipf", "hot", "empty")
OVERWHELMING = 50.0  # log-popularity that no noise overcomes
D_LOSSES = (0.7, 0.3)  # gradients of the two router losses where they are on: of the order of those of the output
D_LOSSES_CHANGE = -0.6  # from the first step to the second
SECOND_SEED = 2024  # of the second step's numbers; no first step has it
GRADIENTS = tuple(name for name in Gradients._fields if name != "d_gates")  # those of a layer's inputs
WIDE_BLOCKS = (136, 256)  # of block_sparse: no tile is as wide; the last tile of the first is nearly empty
FAR = 200.0  # a logit whose exponential no float32 holds, and whose negative's is 0 there
MANY_TOKENS = 256 * 257  # blocks of 256 tokens are more than a block has threads; a bitmap's pass takes 8,192 tokens
# Most cases drop rows; some do; none does.
CAPACITY_FACTORS = (0.5, capacity.DEFAULT_FACTOR, capacity.MAX)

# The example of MoEBlaze's figure 2, its misprints corrected: five tokens, four experts, two each.
GOLDEN_TOPK_EXPERTS = np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32)
GOLDEN_NUM_EXPERTS = 4
GOLDEN_DISPATCH = Dispatch(
    expert_token_indices=np.array([1, 2, 4, 1, 3, 0, 3, 0, 2, 4], np.int32),
    expert_token_offsets=np.array([0, 3, 5, 7, 10], np.int32),
    token_expert_indices=np.array([2, 3, 0, 1, 0, 3, 1, 2, 0, 3], np.int32),
    token_index_map=np.array([5, 7, 0, 3, 1, 8, 4, 6, 2, 9], np.int32),
    k=2,
)


class Printed(NamedTuple):
    """One item of MoEBlaze's figure 2, as the paper prints it."""

    values: int | list  #: a number; the experts of each token; the elements of an array
    misprint: str  #: what is wrong with it; empty if nothing is


PRINTED_EXAMPLE = {
    "L": Printed(6, "six tokens are announced, five are listed"),
    "topk_experts": Printed([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], ""),
    "expert_token_indices": Printed([1, 2, 4, 1, 3, 0, 3, 0, 2, 4], ""),
    "expert_token_offsets": Printed([0, 3, 5, 7, 10], ""),
    "token_expert_indices": Printed([2, 3, 0, 1, 1, 2, 0, 3], "the pair 0, 3 of token 2 is missing"),
    "token_index_map": Printed([5, 7], "only the pair of token 0 is printed"),
}


def example_in_three_columns() -> list[dict[str, str]]:
    """MoEBlaze's figure 2, a row for each item: as printed, its misprint, and what the five tokens give.

    The columns are ``item``, ``as printed``, ``misprint`` and ``what the five tokens give``.

    Notes
    -----
    MoEBlaze (arXiv 2601.05296), section 4.1, figure 2.
    """
    right = {"L": GOLDEN_DISPATCH.L, "topk_experts": GOLDEN_TOPK_EXPERTS.tolist()}
    right |= {name: np.asarray(array).tolist() for name, array in GOLDEN_DISPATCH.arrays().items()}
    return [
        {
            "item": f"`{name}`",
            "as printed": str(printed.values),
            "misprint": printed.misprint or "none",
            "what the five tokens give": str(right[name]),
        }
        for name, printed in PRINTED_EXAMPLE.items()
    ]


def relative_error(out, ref) -> float:
    """||out - ref|| / ||ref|| in float64.

    NaN stays NaN, which passes no bound; any difference from an all-zero reference is infinite.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    checks.check_shape("the result", out, {f"axis {i}": size for i, size in enumerate(ref.shape)})
    difference, size = np.linalg.norm(out - ref), np.linalg.norm(ref)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / size)


def log_popularity(routing: str, num_experts: int, k: int, margin: float = OVERWHELMING) -> np.ndarray:
    """Return the log-popularity of every expert, (E,) float64.

    ``zipf`` falls with the rank, ``hot`` prefers the last expert, ``empty`` shuns the first
    ones and leaves at least k that tokens may go to.

    Raises
    ------
    ValueError
        If the routing is unknown.
    """
    checks.check_name("routing", routing, ROUTINGS)
    bias = np.zeros(num_experts)
    if routing == "zipf":
        bias = -1.2 * np.log(np.arange(1, num_experts + 1))
    elif routing == "hot":
        bias[-1] = margin
    elif routing == "empty":
        bias[: min(num_experts // 2, num_experts - k)] = -margin
    return bias


def random_topk(num_tokens: int, num_experts: int, k: int, routing: str = "uniform", seed: int = 0) -> np.ndarray:
    """Distinct experts for every token, (L, k) int32, drawn by popularity (Gumbel top k).

    Raises
    ------
    ValueError, TypeError
        If k > E, a size is out of range, or the routing is unknown.
    """
    checks.check_k(checks.check_int("k", k, at_least=1), num_experts)
    noise = np.random.default_rng(seed).gumbel(size=(num_tokens, num_experts))
    preference = log_popularity(routing, num_experts, k) + noise  # (L, E)
    return np.argsort(-preference, axis=1)[:, :k].astype(np.int32, order="C")


@dataclass(frozen=True, eq=False)
class Case:
    """One layer and the tokens that run through it; outputs and gradients are of order 1."""

    name: str  #: what is hard about it
    x: np.ndarray  #: (L, d)
    weights: MoEWeights[np.ndarray]
    d_out: np.ndarray  #: (L, d): gradient of the layer's output
    k: int  #: experts per token
    activation: str = "swiglu"
    policy: str = "minimal"  #: what the layer keeps; it must change no result
    renormalize: bool = False  #: whether the chosen gates are divided by their sum
    #: Gradients of the load-balancing loss and of the router z-loss; 0 for a loss that is off.
    d_losses: tuple[float, float] = D_LOSSES
    capacity_factor: float | str = capacity.DEFAULT_FACTOR  #: of the stage ``capacity``, one of ``CAPACITY_FACTORS``
    drop_policy: str = "by_gate"  #: of the stage ``capacity``, one of ``capacity.DROP_POLICIES``
    replay: bool = False  #: whether the layer is given its routing, ``topk_experts``, in place of its router's choice
    wanted: tuple[str, ...] = GRADIENTS  #: the gradients that are asked for, of ``GRADIENTS``
    #: True if the backward may overwrite tensors that the forward saved; for a torch layer, if it is the last backward.
    overwrite: bool = False
    #: For the torch layers in a narrow dtype: True if x and the weights are float32 and ``torch.autocast`` casts them.
    autocast: bool = False
    #: For the torch layers: True if activation checkpointing computes the forward twice, with one routing.
    keep_routing: bool = False
    block: int | None = None  #: of the stage ``block_sparse``, a divisor of h; by default `comparisons.sparse_block`
    #: Steps of the same shape that came before. Rows and gradients that a single stage is given differ in each.
    step: int = 0

    @property
    def L(self) -> int:
        """Tokens."""
        return self.x.shape[0]

    @property
    def E(self) -> int:
        """Experts."""
        return self.weights.wg.shape[1]

    @property
    def shape(self) -> str:
        """The sizes in the paper's symbols, and the name."""
        _, d, h = self.weights.w1.shape
        return f"L={self.L} d={d} h={h} E={self.E} k={self.k} ({self.name})"

    @property
    def logits(self) -> np.ndarray:
        """Router logits (L, E), x wg; never narrower than float32, as in the kernels' argument checks."""
        wide = np.promote_types(self.x.dtype, np.float32)
        return self.x.astype(wide) @ self.weights.wg.astype(wide)

    @property
    def replayed(self) -> np.ndarray | None:
        """The routing (L, k) int32 that the layer is given; None if its router chooses."""
        if not self.replay:
            return None
        return random_topk(self.L, self.E, self.k, "hot" if self.step else "zipf", seed=self.step)

    @property
    def topk_experts(self) -> np.ndarray:
        """Chosen experts (L, k) int32: the router's choice, unless the routing is given."""
        return gating.top_k(self.logits, self.k) if self.replayed is None else self.replayed

    @property
    def longest_queue(self) -> int:
        """Routed rows of the expert that has most: the capacity C that drops nothing."""
        return int(np.bincount(self.topk_experts.ravel(), minlength=self.E).max())

    def astype(self, dtype) -> "Case":
        """The same numbers rounded to ``dtype``."""
        wg, w1, w2, w3 = self.weights
        w2 = None if w2 is None else w2.astype(dtype)
        weights = MoEWeights(wg.astype(dtype), w1.astype(dtype), w2, w3.astype(dtype))
        return replace(self, x=self.x.astype(dtype), weights=weights, d_out=self.d_out.astype(dtype))

    def head(self, tokens: int) -> "Case":
        """The same layer with the first ``tokens`` tokens only."""
        return replace(self, x=self.x[:tokens], d_out=self.d_out[:tokens])

    def steps(self) -> tuple["Case", "Case"]:
        """Return this case and a second step of the same shapes: other tokens, weights, routing and gradients.

        The second step sends all tokens to one expert, unless the first does. So the longest queue differs, and with
        it the capacity C where that is dynamic. A stage that keeps anything from the first step gets the second wrong.
        """
        _, d, h = self.weights.w1.shape
        routing = "uniform" if self.longest_queue == self.L else "hot"
        other = make_case(self.L, d, h, self.E, self.k, routing, activation=self.activation, seed=SECOND_SEED)
        other = other.astype(self.x.dtype)
        load_balancing, router_z = self.d_losses
        second = replace(
            self,
            name=f"{self.name}, second step",
            x=other.x,
            weights=other.weights,
            d_out=other.d_out,
            d_losses=(D_LOSSES_CHANGE * load_balancing, D_LOSSES_CHANGE * router_z),
            step=self.step + 1,
        )
        return self, second


def make_case(
    L: int,
    d: int,
    h: int,
    E: int,
    k: int,
    routing: str = "uniform",
    name: str | None = None,
    activation: str = "swiglu",
    seed: int = 0,
) -> Case:
    """Random float64 numbers; x carries a constant feature, by which wg biases the routing.

    Raises
    ------
    ValueError
        If the routing or the activation is unknown.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((L, d))  # (L, d)
    x[:, 0] = 1.0
    wg = 0.7 * rng.standard_normal((d, E)) * d**-0.5  # (d, E)
    wg[0] = log_popularity(routing, E, k, margin=5.0)  # wins, and leaves the losers gradients above rounding
    w1, w2 = rng.standard_normal((2, E, d, h)) * d**-0.5  # (E, d, h) each
    w3 = rng.standard_normal((E, h, d)) * h**-0.5  # (E, h, d)
    weights = MoEWeights(wg, w1, w2 if is_gated(activation) else None, w3)
    return Case(name or routing, x, weights, rng.standard_normal((L, d)), k, activation)


def standard_cases() -> list[Case]:
    """Return the cases that every stage of every backend must pass; the first ones are small enough for a simulator.

    Widths are multiples of 8, which tensor cores need; the tests of the other versions have odd ones too.
    """
    return [
        make_case(13, 8, 16, 4, 2, "zipf", "small"),
        # Two tiles, of 256 columns or 256 experts at most, the last not full. "hot expert" has two along its rows.
        make_case(9, 8, 264, 3, 2, name="two tiles along h"),
        make_case(9, 264, 8, 3, 2, name="two tiles along d"),
        make_case(9, 8, 8, 264, 2, name="two tiles along E"),
        make_case(1, 8, 16, 4, 2, name="one token"),
        make_case(9, 8, 16, 4, 4, name="k = E"),
        make_case(11, 8, 16, 5, 1, "hot", "one expert gets all"),
        make_case(11, 8, 16, 6, 2, "empty", "empty experts"),
        make_case(0, 8, 16, 4, 2, name="no tokens"),
        make_case(331, 24, 40, 7, 3, name="no tile divides it"),
        make_case(600, 16, 24, 16, 4, "zipf", "skewed"),
        make_case(300, 8, 16, 16, 2, "hot", "hot expert"),
        make_case(70, 16, 8, 130, 8, "empty", "many experts, half of them empty"),
    ]


def telling_cases(dtype: str = "float32") -> list[Case]:
    """Small, with what the small standard ones lack: more tokens and wider rows than a block of two warps has threads,
    more experts than a warp has lanes, `logit_cases`, and `with_kinks`; in float32 odd widths, too, while the narrow
    types are those of tensor cores, which need multiples of 8.
    """
    odd = [make_case(13, 13, 11, 4, 2, name="odd widths")] if dtype == "float32" else []
    return [
        make_case(70, 8, 16, 3, 1, name="more tokens than threads of two warps"),
        make_case(5, 72, 80, 2, 1, name="wider than two warps"),
        make_case(9, 8, 8, 33, 2, name="more experts than lanes of a warp"),
        *logit_cases(),
        with_kinks(make_case(12, 8, 16, 4, 2, "zipf", "pre-activations of 0")),
        *odd,
    ]


def simulator_cases() -> list[Case]:
    """Return what `telling_cases` show, on so few elements that Numba's simulator takes a second for each.

    It starts a thread of Python for each element, and its blocks have 8 threads.
    """
    return [
        make_case(40, 4, 4, 3, 1, name="more tokens than threads of a warp"),
        make_case(3, 12, 20, 2, 1, name="wider than a block"),
        make_case(5, 2, 2, 33, 2, name="more experts than lanes of a warp"),
        _with_equal_logits(make_case(13, 8, 2, 6, 3, name="equal logits")),
        _with_equal_logits(make_case(13, 8, 2, 40, 3, name="equal logits of 40 experts")),
        _with_far_logits(make_case(13, 8, 2, 6, 3, name="logits far from 0")),
        make_case(7, 5, 3, 4, 2, name="odd widths"),
    ]


def logit_cases() -> list[Case]:
    """Return small cases that are hard for the router alone: logits that are equal, and logits far from 0.

    A warp that holds a token's logits has one a lane of the first case's, and two a lane of the second's.
    """
    return [
        _with_equal_logits(make_case(13, 8, 16, 6, 3, name="equal logits")),
        _with_equal_logits(make_case(13, 8, 8, 40, 3, name="equal logits of 40 experts")),
        _with_far_logits(make_case(13, 8, 16, 6, 3, name="logits far from 0")),
    ]


def _with_equal_logits(case: Case) -> Case:
    """Return the case with logits that are sums of few whole numbers."""
    return replace(case, x=np.round(case.x), weights=case.weights._replace(wg=np.round(3 * case.weights.wg)))


def _with_far_logits(case: Case) -> Case:
    """Return the case with logits around ``FAR`` and around ``-FAR``, alternately, and differences of every size."""
    x, wg = case.x.copy(), 10 * case.weights.wg
    x[:, 1] = (-1.0) ** np.arange(case.L)
    wg[1] = FAR
    return replace(case, x=x, weights=case.weights._replace(wg=wg))


def with_kinks(case: Case) -> Case:
    """Return the case with pre-activations of exactly 0 in every second column, where the slope of ReLU jumps."""
    w1 = case.weights.w1.copy()
    w1[..., ::2] = 0.0
    return replace(case, weights=case.weights._replace(w1=w1))


def kink_cases(h: int = 16) -> list[Case]:
    """Return a small case of `with_kinks` for each activation that is made of ReLU."""
    return [
        with_kinks(make_case(12, 8, h, 4, 2, "zipf", f"{activation} of zeros", activation))
        for activation in ("relu", "relu2", "reglu")
    ]


def many_tokens_case(L: int = MANY_TOKENS) -> Case:
    """Return more tokens than a pass over a bitmap takes, in a layer of more weights than a simulator is given."""
    return make_case(L, 8, 48, 3, 2, "zipf", "more tokens than a bitmap's pass")


def many_choices_case() -> Case:
    """A case with the most experts a token that the kernels take: one for each lane of a warp."""
    return make_case(5, 8, 8, 40, 32, name="as many experts a token as lanes of a warp")


def many_terms_case() -> Case:
    """More terms of the losses than the block that sums them has threads: a term for every 8 tokens, or for more.

    The layer has more weights than a simulator is given.
    """
    return make_case(2057, 8, 48, 3, 2, "zipf", "more terms of the losses than threads of a block")


def many_passes_case() -> Case:
    """More tokens than the warps of the fused gating's whole grid take in one pass: 256 blocks of 32 warps."""
    return make_case(256 * 32 + 8, 8, 8, 3, 1, "zipf", "more tokens than a pass of the fused gating")


def wide_cases(width: int = 8) -> list[Case]:
    """Each with one size beyond what the other cases have: more tokens than a block can have threads, more experts a
    token than a warp has lanes, rows of more elements than a block of 256 threads. Other rows have ``width`` elements.
    """
    return [
        make_case(1030, width, width, 3, 1, name="more tokens than threads of any block"),
        make_case(5, width, width, 48, 40, name="more experts a token than lanes of a warp"),
        make_case(2, 264, width, 2, 1, name="rows wider than 256 threads"),
        deep_case(width),
    ]


def deep_case(width: int = 8) -> Case:
    """Few tokens, whose hidden rows are longer than a block has threads, and deeper than any ring of stages."""
    return make_case(2, width, 264, 2, 1, name="hidden rows wider than 256 threads")


def many_tiles_case(blocks: int) -> Case:
    """More tiles of every product than a GPU with so many multiprocessors has blocks, deeper than a ring of stages.

    So that blocks that stay for tile after tile do. On the tiles of 7_persistent: 128 rows, at most 256
    columns, 64 of the depth.
    """
    E, k = max(4, blocks // 4), 3
    return make_case(128 * blocks // k + 1, 328, 328, E, k, "zipf", "more tiles than blocks")


def many_blocks_case(blocks: int) -> Case:
    """The same of the products of block_sparse, in whole blocks of MegaBlocks' own size: an odd number in h.

    Rows in bins, an expert's columns and d each have two tiles of columns or more, of which the last is not full.
    """
    E, k = max(4, blocks // 6 + 1), 3
    return make_case(64 * blocks // k + 1, 264, 384, E, k, "zipf", "more tiles than blocks, whole ones")


def whole_block_case() -> Case:
    """A small layer whose h is a multiple of MegaBlocks' block size; a simulator can run it on every version."""
    return make_case(20, 8, 256, 3, 2, "empty", "whole blocks, few tokens")


def wide_block_cases() -> list[Case]:
    """Return layers whose blocks are wider than any tile; one expert has more rows than a tile."""
    return [replace(make_case(140, 8, block, 2, 1, "hot", f"blocks of {block}"), block=block) for block in WIDE_BLOCKS]


def odd_block_case() -> Case:
    """Return a small layer whose blocks have a side that is no power of two."""
    return replace(make_case(13, 8, 12, 4, 2, "zipf", "blocks of 3"), block=3)


def whole_block_cases() -> list[Case]:
    """Layers of whole blocks, for tiles that take no others: every activation, odd and even numbers of blocks in h."""
    return [
        *kink_cases(h=128),
        *(make_case(20, 8, 128, 3, 2, "zipf", f"whole blocks, {name}", name) for name in ACTIVATIONS),
        whole_block_case(),
        make_case(150, 24, 384, 3, 2, "zipf", "whole blocks"),
        make_case(140, 264, 256, 4, 1, "empty", "whole blocks, empty experts"),
        make_case(0, 8, 128, 4, 2, name="whole blocks, no tokens"),
    ]


def option_cases() -> list[Case]:
    """Every activation, in small cases, `kink_cases`, two tiles along h where a and b do not share a tile's columns,
    then other options: `paired_options`.
    """
    policies = itertools.cycle(POLICIES)
    activations = [
        replace(
            make_case(12, 8, 16, 4, 2, "zipf", f"{activation}, {policy}", activation, seed),
            policy=policy,
            renormalize=seed % 2 == 1,
        )
        for seed, (activation, policy) in enumerate(zip(ACTIVATIONS, policies, strict=False))
    ]
    ungated = make_case(9, 8, 264, 3, 2, name="two tiles along h, ungated", activation="silu")
    return [*activations, *kink_cases(), ungated, *paired_options()]


# Each switch of `paired_options` differs from ``renormalize`` under the policies that have a 1 here. No two rows are
# equal or opposite, so both values of a switch meet both of any other, and every policy.
_DIFFERS = {
    "renormalize": (0, 0, 0, 0),
    "load_balancing_loss": (0, 1, 0, 1),
    "router_z_loss": (0, 0, 1, 1),
    "replay": (0, 1, 1, 0),
    "overwrite": (0, 0, 0, 1),
    "autocast": (0, 0, 1, 0),
    "keep_routing": (0, 1, 0, 0),
}


def paired_options() -> list[Case]:
    """Small cases in which any two values of two different options meet, be they policies or switches."""
    return [
        _with_options(policy, {name: bool(differs[number]) != renormalize for name, differs in _DIFFERS.items()}, seed)
        for seed, (renormalize, (number, policy)) in enumerate(
            itertools.product((False, True), enumerate(POLICIES)), start=10
        )
    ]


def _with_options(policy: str, switches: dict[str, Any], seed: int) -> Case:
    bits = "".join(str(int(is_on)) for is_on in switches.values())  # in the order of `_DIFFERS`
    case = make_case(12, 8, 16, 4, 2, "zipf", f"{policy}, switches {bits}", seed=seed)
    d_losses = switches.pop("load_balancing_loss") * D_LOSSES[0], switches.pop("router_z_loss") * D_LOSSES[1]
    return replace(case, policy=policy, d_losses=d_losses, **switches)


def single_gradients() -> list[Case]:
    """Small cases that each ask for one gradient of a layer alone."""
    case = make_case(12, 8, 16, 4, 2, "zipf")
    return [replace(case, name=f"{name} alone", wanted=(name,)) for name in GRADIENTS]


def renormalised(cases: list[Case]) -> list[Case]:
    """Return the cases without renormalised gates again, with renormalised gates."""
    return [
        replace(case, name=f"{case.name}, renormalised", renormalize=True) for case in cases if not case.renormalize
    ]


def equal_gates_case() -> Case:
    """A router of zeros: all tokens choose the lowest experts, by gates that are equal."""
    case = make_case(11, 8, 16, 4, 2, name="equal gates")
    return replace(case, weights=case.weights._replace(wg=np.zeros_like(case.weights.wg)))


def capacities(case: Case) -> list[Case]:
    """Return the case under every drop policy and every capacity factor."""
    return [
        replace(case, name=f"{case.name}, C by {factor}, {policy}", capacity_factor=factor, drop_policy=policy)
        for policy in capacity.DROP_POLICIES
        for factor in CAPACITY_FACTORS
    ]


def every_activation(**sizes: int) -> list[Case]:
    """Every activation, with renormalisation and both losses, then without, on one shape that no tile divides.

    ``sizes`` are L, d, h, E and k, where they are to be others.
    """
    return [
        replace(_switched(activation, on, **sizes), name=f"{activation}, {'all on' if on else 'all off'}")
        for activation in ACTIVATIONS
        for on in (True, False)
    ]


def every_choice(**sizes: int) -> list[Case]:
    """Every activation under every save policy: with the rest on for two of them, off for two; sizes as there."""
    return [
        replace(_switched(activation, number % 2 == 0, **sizes), name=f"{activation}, {policy}", policy=policy)
        for activation in ACTIVATIONS
        for number, policy in enumerate(POLICIES)
    ]


def _switched(activation: str, on: bool, L: int = 37, d: int = 16, h: int = 24, E: int = 5, k: int = 3) -> Case:
    case = make_case(L, d, h, E, k, "zipf", activation=activation)
    return replace(case, renormalize=on, d_losses=D_LOSSES if on else (0.0, 0.0), overwrite=True)
