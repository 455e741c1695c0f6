"""Hard routings and sizes, and the numbers of a step for each.

If the routing is given, it is the pattern. If the router is inside, x is chosen such that the router's logits lead to
the pattern. Tokens whose choice a rounding error could change are drawn again, so every right layer makes the same
choice.
"""

import itertools
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.core.routers import Router, named
from moeblaze_ref.nn import routers
from moeblaze_ref.verify.layers import layouts
from moeblaze_ref.verify.layers.adapter import Adapter, Sizes
from moeblaze_ref.verify.layers.layouts import ROLES, Layout, Weights
from moeblaze_ref.verify.layers.reference import Case, Spec, route

Generator = torch.Generator
# Scales of the selection bias: the small one changes the choice of groups alone, so patterns have their routing.
SMALL_BIAS, LARGE_BIAS = 0.05, 0.5
LARGE_LOGITS = 4.0  # times what they are elsewhere: the largest have an exponential that float16 does not hold


def _gates(shape: torch.Size, generator: Generator) -> Tensor:
    """Routing weights whose sum is another for each token: from 0.5 to 2.5, as a scaling factor makes them."""
    sums = 0.5 + 2 * torch.rand(shape[0], 1, generator=generator, dtype=torch.float64)
    return sums * torch.softmax(_normal(shape, generator), 1)


def _zero_and_below(shape: torch.Size, generator: Generator) -> Tensor:
    """Routing weights some of which are zero, and some below; the first of a token makes their sum positive."""
    gates = _gates(shape, generator)
    others = gates[:, 1:] * torch.randint(-1, 2, gates[:, 1:].shape, generator=generator)
    return torch.cat([gates[:, :1] + others.abs().sum(1, keepdim=True), others], 1)


class Pattern(NamedTuple):
    """Which experts the tokens of a case choose, and how they weigh them."""

    name: str
    sizes: Sizes
    choose: Callable[[Sizes, Generator], Tensor]  # (L, k) int64
    repeats: bool = False  #: a token chooses an expert twice
    scale: float = 1.0  #: of the weights of gate and up
    selection_bias: float = SMALL_BIAS
    logits: float = 1.0  #: scale of the logits of a router inside
    gates: Callable[[torch.Size, Generator], Tensor] = _gates  # (L, k), if the routing is given
    in_all_ways: bool = False  #: runs in every way of `ways`, not as a plain step alone


def distinct(sizes: Sizes, generator: Generator, among: int | None = None) -> Tensor:
    """Each token's experts at random, none twice: (L, k) of the first ``among`` experts."""
    scores = torch.rand(sizes.L, among or sizes.E, generator=generator)
    return scores.argsort(dim=1)[:, : sizes.k]


def _all_to_one(sizes: Sizes, generator: Generator) -> Tensor:
    return torch.full((sizes.L, sizes.k), sizes.E // 2)


def _one_in_all(sizes: Sizes, generator: Generator) -> Tensor:
    others = 1 + distinct(sizes._replace(E=sizes.E - 1, k=sizes.k - 1), generator)
    return torch.cat([others, torch.zeros(sizes.L, 1, dtype=torch.int64)], 1)


def three_used(sizes: Sizes, generator: Generator) -> Tensor:
    """Three experts have all tokens."""
    return torch.tensor([1, 3, sizes.E - 2])[distinct(sizes, generator, among=3)]


def _zipf(sizes: Sizes, generator: Generator) -> Tensor:
    frequency = 1 / torch.arange(1, sizes.E + 1)
    return torch.multinomial(frequency.expand(sizes.L, -1), sizes.k, generator=generator)


def _one_past_a_tile(sizes: Sizes, generator: Generator) -> Tensor:
    return (torch.arange(sizes.L) >= 129).long()[:, None]


def _whole_tiles(sizes: Sizes, generator: Generator) -> Tensor:
    return (torch.arange(sizes.L) >= 128).long()[:, None]


def _twice(sizes: Sizes, generator: Generator) -> Tensor:
    first = distinct(sizes._replace(k=1), generator)
    return first.expand(-1, sizes.k).contiguous()


PATTERNS = (
    Pattern("random", Sizes(61, 24, 40, 7, 2), distinct, in_all_ways=True),
    Pattern("all tokens to one expert", Sizes(33, 16, 24, 4, 1), _all_to_one),
    Pattern("one expert in every token", Sizes(48, 16, 24, 8, 3), _one_in_all),
    Pattern("experts without tokens", Sizes(37, 24, 16, 8, 2), three_used, in_all_ways=True),
    Pattern("one token", Sizes(1, 16, 24, 4, 2), distinct, in_all_ways=True),
    Pattern("one token, one choice", Sizes(1, 16, 16, 4, 1), distinct),
    Pattern("k = 1", Sizes(41, 24, 32, 6, 1), distinct),
    Pattern("k = E", Sizes(19, 16, 24, 4, 4), distinct),
    Pattern("Zipf", Sizes(97, 32, 24, 16, 4), _zipf),
    Pattern("prime sizes", Sizes(67, 29, 31, 7, 3), distinct),
    Pattern("one row past a tile", Sizes(131, 16, 24, 2, 1), _one_past_a_tile),
    Pattern("whole tiles", Sizes(192, 16, 24, 2, 1), _whole_tiles),
    Pattern("wider than two tiles", Sizes(21, 136, 264, 3, 2), distinct),
    Pattern("many experts", Sizes(29, 72, 24, 64, 8), distinct),
    Pattern("more experts than a byte counts", Sizes(43, 24, 16, 264, 2), distinct),
    Pattern("more rows than a byte counts", Sizes(600, 16, 16, 4, 2), _one_in_all),
    Pattern("large activations", Sizes(29, 24, 16, 5, 2), distinct, scale=8.0),
    Pattern("an expert twice in a token", Sizes(23, 16, 24, 4, 2), _twice, repeats=True),
    Pattern("gates of zero and below", Sizes(31, 24, 16, 6, 3), distinct, gates=_zero_and_below),
    Pattern("large logits", Sizes(45, 24, 16, 6, 2), distinct, logits=LARGE_LOGITS),
    Pattern("the selection bias decides", Sizes(43, 24, 16, 8, 2), distinct, selection_bias=LARGE_BIAS),
)


def spec_of(adapter: Adapter, k: int) -> Spec:
    """Return the specification that the reference computes for this layer."""
    router = adapter.router_inside
    return Spec(k, router, adapter.activation, router.weighs if router else adapter.weighs)


def patterns_for(adapter: Adapter) -> list[Pattern]:
    """The patterns that the layer takes, in widths and numbers of experts that it takes."""
    taken = [pattern for pattern in PATTERNS if _takes(adapter, pattern)]
    widths = [pattern._replace(sizes=widened(pattern.sizes, adapter.multiple)) for pattern in taken]
    return [pattern._replace(sizes=_grouped(pattern.sizes, adapter.router)) for pattern in widths]


def _takes(adapter: Adapter, pattern: Pattern) -> bool:
    router = adapter.router_inside
    if pattern.repeats:
        return adapter.duplicates and router is None
    if pattern.gates is not _gates:
        return router is None
    if pattern.logits != 1.0:  # a sigmoid of them is 1, and has no gradient
        return router is not None and router.scores.startswith("softmax")
    return pattern.selection_bias == SMALL_BIAS or (router is not None and router.selection_bias)


def _grouped(sizes: Sizes, router: Router | str | None) -> Sizes:
    """The same sizes, with the fewest more experts that form the groups of a router that is given by its name.

    A layer with a `Router` of its own says for each number of experts which groups there are.
    """
    if not isinstance(router, str):
        return sizes
    E = next(E for E in itertools.count(sizes.E) if _has_groups(named(router), E, sizes.k))
    return sizes._replace(E=E)


def _has_groups(router: Router, E: int, k: int) -> bool:
    try:
        router.check_sizes(E, k)
    except ValueError:
        return False
    return True


def widened(sizes: Sizes, multiple: int) -> Sizes:
    """The same sizes, with widths that are the least multiples of what they were and of what the layer needs."""
    return sizes._replace(d=math.lcm(sizes.d, multiple), h=math.lcm(sizes.h, multiple))


def make(
    adapter: Adapter, pattern: Pattern, dtype: torch.dtype, seed: int = 0, step: int = 0, weights_of: int | None = None
) -> Case:
    """Return the numbers of a step: the same for the same arguments. ``weights_of``: whose weights it has."""
    sizes, spec = pattern.sizes, spec_of(adapter, pattern.sizes.k)
    drawn = _weights(adapter, pattern, _generator(pattern, "weights", seed, step if weights_of is None else weights_of))
    weights = {role: value.to(dtype).double() for role, value in drawn.items()}
    generator = _generator(pattern, "inputs", seed, step)
    wanted = pattern.choose(sizes, generator)
    d_out = _normal((sizes.L, sizes.d), generator).to(dtype).double()
    if spec.router is None:
        x = _normal((sizes.L, sizes.d), generator).to(dtype).double()
        gates = pattern.gates(wanted.shape, generator).to(adapter.gate_dtype or dtype).double()
        return Case(pattern.name, sizes, x, weights, wanted, gates, d_out)
    x, chosen = _routed_input(spec, pattern, weights, wanted, dtype, generator)
    return Case(pattern.name, sizes, x, weights, chosen, None, d_out)


def _generator(pattern: Pattern, *key: object) -> Generator:
    return Generator().manual_seed(zlib.crc32(repr((pattern.name, *key)).encode()))


def _normal(shape: tuple[int, ...] | torch.Size, generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _weights(adapter: Adapter, pattern: Pattern, generator: Generator) -> Weights:
    """Random weights of each role that the layer has; outputs and gradients are then of order 1."""
    lengths = layouts.lengths(pattern.sizes._asdict(), adapter.shared)
    roles = {role for text in adapter.weights.values() for role in Layout.parse(text).roles}
    shapes = {role: tuple(lengths[axis] for axis in ROLES[role]) for role in ROLES if role in roles}
    scales = dict.fromkeys(("gate", "up"), pattern.scale) | {"selection_bias": pattern.selection_bias}
    return {
        role: scales.get(role, 1.0) * _scale(role, shape) * _normal(shape, generator) for role, shape in shapes.items()
    }


def _scale(role: str, shape: tuple[int, ...]) -> float:
    if role == "selection_bias":
        return 1.0
    return 0.5 if role.endswith("bias") else float(shape[-2]) ** -0.5


TRIES = 64  # draws of a token whose choice is a near tie
DISTURBANCES = 64
RELATIVE = 0.02  # a disturbance, of 1 + |logit|: bfloat16 rounds by 0.004


def nearby(spec: Spec, case: Case, dtype: torch.dtype, seed: int = 0) -> Case:
    """Return a case whose numbers are each off by a few percent: more than numbers of few bits are rounded by."""
    generator = Generator().manual_seed(seed)

    def moved(values: Tensor) -> Tensor:
        return (values * (1 + 0.03 * _normal(values.shape, generator))).to(dtype).double()

    weights = {role: moved(w) for role, w in case.weights.items()}
    x, gates = moved(case.x), None if case.topk_weights is None else moved(case.topk_weights)
    index = case.topk_index if spec.router is None else route(spec, weights | {"x": x}).topk_experts
    return Case(case.name, case.sizes, x, weights, index, gates, moved(case.d_out))


def _routed_input(
    spec: Spec, pattern: Pattern, weights: Weights, wanted: Tensor, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Return x whose logits are large at the experts that are wanted, and what the router then chooses."""
    sizes = pattern.sizes
    x = torch.zeros(sizes.L, sizes.d, dtype=torch.float64)
    open_rows = torch.arange(sizes.L)
    for _ in range(TRIES):
        rows = _input_for(wanted[open_rows], pattern.logits, weights, generator).to(dtype).double()
        x[open_rows] = rows
        open_rows = open_rows[~_is_settled(spec, rows, weights, generator)]
        if len(open_rows) == 0:
            return x, route(spec, weights | {"x": x}).topk_experts
    raise ValueError(f"{sizes}: the router comes near a tie for {len(open_rows)} tokens, whatever x is")


def _input_for(wanted: Tensor, scale: float, weights: Weights, generator: Generator) -> Tensor:
    """Random rows (n, d) whose logits are those of random rows, times a scale, but for the experts that are wanted."""
    d, E = weights["router"].shape
    logits = torch.rand(len(wanted), E, generator=generator, dtype=torch.float64) * 1.9 - 1.5
    logits.scatter_add_(1, wanted, torch.full(wanted.shape, 2.8, dtype=torch.float64))
    noise = _normal((len(wanted), d), generator)
    change = scale * logits - weights.get("router_bias", torch.zeros(E, dtype=torch.float64))
    return noise + (change - noise @ weights["router"]) @ torch.linalg.pinv(weights["router"])


def _is_settled(spec: Spec, x: Tensor, weights: Weights, generator: Generator) -> Tensor:
    """Return True for each row whose disturbed logits lead to the same choice: (n,) bool."""
    assert spec.router is not None
    logits, _, chosen, _ = route(spec, weights | {"x": x})
    noise = 2 * torch.rand(DISTURBANCES, *logits.shape, generator=generator, dtype=torch.float64) - 1
    moved = (logits + RELATIVE * (1 + logits.abs()) * noise).flatten(0, 1)
    disturbed = routers.choose(moved, spec.k, spec.router, weights.get("selection_bias")).topk_experts
    same = disturbed.unflatten(0, (DISTURBANCES, -1)).sort(2).values == chosen.sort(1).values
    return same.all(2).all(0)
