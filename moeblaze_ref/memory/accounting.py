"""Activation bytes of one MoE layer, tensor by tensor, for each way of writing it.

One row a tensor. Its formula and its bytes come from the same expression, a product of
`Size` objects, so the text that a reader sees cannot drift from the number beside it.
A row is *kept* when it lives until the backward, and *transient* when the forward frees it.

What is counted: the activations of one layer in one forward, its input x included. What is
not: weights, gradients, optimizer states, the backward's own buffers, what an allocator adds.
`step_account` and `megablocks_step_account` go on through the backward, with its buffers and all gradients.
Symbols as in the MoEBlaze paper: L, d, h, E, k. GiB is 2**30 bytes, GB is 1e9.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.raw_cuda.tiles import DEFAULTS
from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.core.config import POLICIES, MoEConfig, even_counts
from moeblaze_ref.core.routers import Router, Shared, named
from moeblaze_ref.core.structures import HIDDEN
from moeblaze_ref.core.units import GB
from moeblaze_ref.memory import router_tensors
from moeblaze_ref.memory.router_tensors import at_inputs, lives, of_inputs, of_router, of_x
from moeblaze_ref.memory.rows import capacity_rows
from moeblaze_ref.memory.tensors import Size as Size
from moeblaze_ref.memory.tensors import Tensor as Tensor
from moeblaze_ref.systems.capacity import DEFAULT_FACTOR, MAX, capacity_for, check_factor
from moeblaze_ref.systems.layer import intermediates

GPU_CAPACITIES = {"80 GB": 80 * GB, "141 GB": 141 * GB}  # H100 and H200, as their makers print them

BLOCK = 128  # MegaBlocks' paper pads every expert's rows to a multiple of this

SYSTEMS = {
    "conventional": "plain torch (oracle.py): a routed-token buffer and all that autograd keeps",
    "sequential": "plain torch, one expert after another (MegaBlocks, appendix A)",
    "capacity": "fixed capacity (GShard, Switch, Tutel): rows over it are dropped, gaps padded",
    "dynamic_capacity": "the smallest capacity that drops nothing (Tutel): gaps padded",
    "megablocks_published": "MegaBlocks as its paper has it, the activation left to autograd; from its paper",
    "megablocks_memory_optimized": "the published MegaBlocks with memory_optimized_mlp: the activation computed again",
    "megablocks": "padded bins, block-sparse products: nothing dropped, groups padded to whole blocks",
    "sonicmoe": "SonicMoE: x and (A, B), and index structures; from its paper",
    "moeblaze": "index structures in place of the routed-token buffer; the rest is kept by policy",
}

FROM_PAPERS = ("megablocks_published", "sonicmoe")  # of which no layer is here: they are as the paper has them
CAPACITIES = ("capacity", "dynamic_capacity")

# Every system with every policy that it has.
VARIANTS = tuple((system, policy) for system in SYSTEMS for policy in (POLICIES if system == "moeblaze" else (None,)))


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that the bytes depend on besides the configuration.

    Raises
    ------
    TypeError, ValueError
        If capacity_factor is neither a finite number above zero nor "max", block is no integer of at least 1, no router
        has this name, or shared is no Shared.
    """

    #: Routed rows of each expert (E entries that add up to L * k), which decide what is dropped and what is padded.
    #: Default: uniform routing.
    counts: Sequence[int] | None = None
    #: Rows that `capacity` reserves for an expert, as a multiple of L * k / E, or "max", as `dynamic_capacity` does.
    #: Default: Switch Transformer's 1.25.
    capacity_factor: float | str = DEFAULT_FACTOR
    #: How logits become gates, or a name in ``ROUTERS``. The layers compute each router but a plain softmax in torch,
    #: and autograd keeps what it needs. Default: a softmax, not renormalised.
    router: Router | str = Router()
    shared: Shared | None = None  #: an expert that sees every token, in plain torch
    block: int = BLOCK  #: rows and columns of a block of `megablocks` and `megablocks_memory_optimized`

    def __post_init__(self):
        check_factor(self.capacity_factor)
        object.__setattr__(self, "block", sparse_contracts.check_block(self.block))  # frozen
        object.__setattr__(self, "router", named(self.router))
        if self.shared is not None:
            checks.check_type("shared", self.shared, Shared)


@dataclass(frozen=True)
class Account:
    """The activation bytes of one system; `tensors` are in order of birth."""

    config: MoEConfig  #: the layer and the step
    system: str  #: with the policy one of ``VARIANTS``
    policy: str | None  #: None for systems that have none
    assumptions: Assumptions  #: what was assumed about the routing
    symbols: dict[str, int]  #: value of every symbol that the formulas use
    tensors: tuple[Tensor, ...]  #: one row a tensor
    notes: tuple[str, ...]  #: what a reader must know about these numbers

    @property
    def label(self) -> str:
        """``system`` or ``system/policy``."""
        return self.system if self.policy is None else f"{self.system}/{self.policy}"

    @property
    def kept_bytes(self) -> int:
        """Bytes that live until the backward."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.kept)

    @property
    def transient_bytes(self) -> int:
        """Bytes that the forward allocates and frees again, all of them added up; never all alive at once."""
        return sum(tensor.bytes for tensor in self.tensors if not tensor.kept)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at one time in the forward: kept so far, and the transients not yet freed."""
        alive = peak = 0
        last_used: Counter[str | None] = Counter()  # bytes, by the tensor whose birth is their last use
        for tensor in self.tensors:
            size = tensor.bytes
            alive += size
            last_used[tensor.until] += size
            peak = max(peak, alive)
            alive -= last_used[tensor.name]
        return peak


class _Case:
    """One question to answer: the configuration as sizes that remember their names, the policy, the routing."""

    def __init__(self, config: MoEConfig, policy: str | None, assumptions: Assumptions):
        self.symbols = tuple(Size(name, getattr(config, name)) for name in "LdhEk")
        self.L, self.d, self.h, self.E, self.k = self.symbols
        self.R = self.L * self.k
        self.activation, self.gated, self.dtype = config.activation, config.gated, config.dtype
        self.wide = "float64" if config.dtype == "float64" else "float32"  # of logits, probabilities and gates
        self.mixed = self.wide != self.dtype
        self.policy, self.assumptions = policy, assumptions
        self.router, self.shared = named(assumptions.router), assumptions.shared
        self.router.check_sizes(config.E, config.k)
        self.more = router_tensors.symbols_of(self.router, self.shared)
        self.saved = () if policy is None else intermediates(policy, config.activation)
        if assumptions.counts is None:
            self.counts, self.routing = uniform_counts(config), "uniform routing"
        else:
            self.counts = checks.check_counts(assumptions.counts, config.L, config.E, config.k)
            self.routing = "the given counts"


class _Draft(NamedTuple):
    """Draft of a system's account: its rows, its own symbols, and its notes."""

    tensors: Iterable[Tensor]
    symbols: tuple[Size, ...] = ()
    notes: tuple[str, ...] = ()


def account(
    config: MoEConfig, system: str, policy: str | None = None, assumptions: Assumptions = Assumptions()
) -> Account:
    """The activation bytes of ``system``, one of ``SYSTEMS``, for one layer and one step.

    There is a row for each tensor, in order of birth. ``assumptions`` are the routing, the capacity factor and the
    block size. The policy, one of ``config.POLICIES``, says what ``moeblaze`` keeps; the other systems have none. L = 0
    is valid. Those of ``moeblaze`` have y whole, as most versions do; where 7_persistent has half of it at a time,
    `step_account` says.

    Raises
    ------
    ValueError
        If a name is unknown (the message proposes the nearest), if a policy is missing or has no place, if counts or
        router do not fit the configuration, if h is no multiple of the block size of a system that has one, or if the
        system has no account with this router or shared expert (`obstacle` says why).
    TypeError
        If a count is not an integer.
    """
    checks.check_name("system", system, SYSTEMS)
    if system == "moeblaze":
        checks.check_name("policy", policy, POLICIES)
    elif policy is not None:
        raise ValueError(f"policy is {policy!r}, but {system} has no save policies (only moeblaze has); pass None")
    if reason := obstacle(system, assumptions):
        raise ValueError(reason)
    case = _Case(config, policy, assumptions)
    draft = _BUILD[system](case)
    symbols = {size.text: int(size) for size in (*case.symbols, *case.more.values(), *draft.symbols)}
    tensors = draft.tensors if case.shared is None else _with_shared(case, system, draft.tensors)
    return Account(config, system, policy, assumptions, symbols, tuple(tensors), draft.notes)


def obstacle(system: str, assumptions: Assumptions) -> str:
    """Why a system has no account under these assumptions; empty if it has one."""
    router = named(assumptions.router)
    if system in FROM_PAPERS and not router.plain:
        return f"{system} is counted from its paper, whose router is a softmax: it has no account with another router"
    if system in FROM_PAPERS and assumptions.shared:
        return f"{system} is counted from its paper, which has no shared expert: it has no account with one"
    if system in CAPACITIES and router.weighs != "output":
        return f"{system} has gates at the outputs: it has no account with a router that weighs the {router.weighs}"
    return ""


def systems_with(assumptions: Assumptions) -> tuple[str, ...]:
    """The systems that have an account under these assumptions."""
    return tuple(system for system in SYSTEMS if not obstacle(system, assumptions))


def _with_shared(s, system, tensors):
    """The rows of a layer with a shared expert; the oracle holds its routing to the end."""
    hidden = list(_intermediates(s, (s.L, s.more["s"]), a_until="y_swi"))
    until = "out" if system == "conventional" else "routed_out"
    return router_tensors.with_shared(s, tensors, hidden, until)


def accounts(
    config: MoEConfig, systems: Sequence[str] = tuple(SYSTEMS), assumptions: Assumptions = Assumptions()
) -> list[Account]:
    """One account for every variant of ``systems``, in the order of ``VARIANTS``; raises as `account` does."""
    for system in systems:
        checks.check_name("system", system, SYSTEMS)
    return [account(config, system, policy, assumptions) for system, policy in VARIANTS if system in systems]


def step_account(config: MoEConfig, policy: str, version: str = gemm.HOPPER) -> Account:
    """The bytes of a whole step of ``moeblaze``, forward and backward: `account`'s tensors, then the backward's.

    Gradients are counted, those of the weights included. Weights and optimizer states are not. The output is not
    counted once the backward begins: in a model the next layer decides how long it lives, but a caller of
    ``torch.autograd.grad(out, ...)`` holds it to the end. A kept tensor is freed where `layer.backward` frees it. So
    ``kept`` are the tensors that are alive when the step ends, and ``peak_bytes`` is the step's peak.

    The version, a tiled one of the expert stages, decides how many columns of y and of the rows of d_x exist at one
    time, and the pitch of hidden rows. Its tile is the default one: a GPU's own table of tiles may have another.
    Where d or h is no multiple of 16, 7_persistent may copy tokens or weights for one product; the copies are counted.
    A copy has the name of what it copies, with a star.

    Raises
    ------
    ValueError
        If the policy, one of ``config.POLICIES``, is unknown.
    """
    one, case = account(config, "moeblaze", policy), _Case(config, policy, Assumptions())
    # Tiles of columns, each of which leaves a part of the gates' gradients.
    C = Size("C", gemm.gate_terms(version, config.h, DEFAULTS.get(version)))
    where = version, config.R, config.d, config.h
    Y, W = Size("Y", gemm.parts_of_y(*where)[0][1]), Size("W", gemm.parts_of_rows(*where)[0][1])  # columns of y and d_x
    rows = _Rows(case, version)
    tensors = one.tensors if Y == config.d or "y" in case.saved else _y_in_parts(one.tensors, case.R, Y)
    tensors = _with_copies(_with_gaps(tensors, case.R, rows.H), rows)
    forward = _dying(tensors, _dies_at(case))
    symbols = one.symbols | {size.text: int(size) for size in (C, Y, W, rows.D, rows.H)}
    return replace(one, symbols=symbols, tensors=(*forward, *_backward(case, C, W, rows)), notes=())


class _Rows:
    """The rows of one step whose bytes follow from sectors of the L2 cache: pitches, and copies for one product."""

    def __init__(self, case: _Case, version: str):
        self.case = case
        portable = gemm.portable_version(case.dtype, case.d, case.h)
        self.version = version if portable == "3_mma" else portable  # 7_persistent runs where 3_mma does
        self.D, self.H = self._pitch("D", case.d), self._pitch("H", case.h)

    def _pitch(self, name: str, width: Size) -> Size:
        pitch = gemm.row_pitch(self.version, width)
        return width if pitch == width else Size(name, pitch)

    def of_tokens(self, name: str, until: str) -> list[Tensor]:
        """The copy of tokens (L, d), if there is one."""
        s = self.case
        copies = self.D != s.d and gemm.copies_tokens(self.version, s.L, s.d, s.R, s.E)
        return [Tensor(f"{name}*", (s.L, self.D), s.dtype, until=until)] if copies else []

    def of_first_product(self, until: str) -> list[Tensor]:
        """The copies of x, w1 and w2."""
        return [*self.of_tokens("x", until), *self.of_projections(self.case.d, until)]

    def of_projections(self, lines: Size, until: str) -> list[Tensor]:
        """The copies of so many lines (h) of each expert's w1 and w2."""
        names = ("w1", "w2")[: 1 + self.case.gated] if self.H != self.case.h else ()
        return [copy for name in names for copy in self._of(name, lines, self.H, until)]

    def of_w3(self, columns: Size, until: str) -> list[Tensor]:
        """The copy of so many columns of w3: of all, or of a part in whole tiles."""
        pitch = self.D if columns == self.case.d else columns
        return self._of("w3", self.case.h, pitch, until) if self.D != self.case.d else []

    def _of(self, name: str, lines: Size, pitch: Size, until: str) -> list[Tensor]:
        s = self.case
        copies = gemm.copies_weights(self.version, s.R, s.E * lines)
        return [Tensor(f"{name}*", (s.E, lines, pitch), s.dtype, until=until)] if copies else []


def _dying(tensors, dies_at):
    """The forward's tensors, of which each kept one is freed at the birth of the tensor that ``dies_at`` has for it."""
    return (replace(tensor, until=dies_at.get(tensor.name)) if tensor.kept else tensor for tensor in tensors)


def _y_in_parts(tensors, R, Y):
    """The forward's tensors, of y only Y columns at a time. y_swi then lives until the output."""
    changes: dict[str, dict[str, Any]] = {"y": {"dims": (R, Y)}, "y_swi": {"until": "out"}}
    return [tensor if tensor.kept else replace(tensor, **changes.get(tensor.name, {})) for tensor in tensors]


def _with_gaps(tensors, R, H):
    """The forward's tensors with the gaps between hidden rows, whose pitch is H."""
    return [replace(one, dims=(R, H)) if one.name in (*HIDDEN, "act_a") else one for one in tensors]


def _with_copies(tensors, rows):
    """The forward's tensors with what 7_persistent copies for the first product, and for the columns of y."""
    tensors = list(tensors)
    first = next(one.name for one in tensors if one.name in HIDDEN)
    act_a = any(one.name == "act_a" for one in tensors)  # is made of a once the product has stored y_swi
    for tensor in tensors:
        if tensor.name == first:
            yield from rows.of_first_product("act_a" if act_a else "y_swi")
        if tensor.name == "y":
            (_, columns), whole = tensor.dims, tensor.dims[1] == rows.case.d
            yield from rows.of_w3(columns, "y" if whole else "out")
        yield tensor


def megablocks_step_account(config: MoEConfig, assumptions: Assumptions = Assumptions()) -> Account:
    """The bytes of a whole step of `megablocks`: what `step_account` is for ``moeblaze``; raises as `account` does.

    A kept tensor is freed where `megablocks.backward` frees it. The router's backward is that of the kernels.

    Raises
    ------
    ValueError
        Also with a router that the kernels do not compute, or with a shared expert.
    """
    router = named(assumptions.router)
    if not router.plain or assumptions.shared:
        found = assumptions.shared if router.plain else router
        raise ValueError(f"the backward is counted with a softmax router and no shared expert, but not with {found}")
    one, case = account(config, "megablocks", assumptions=assumptions), _Case(config, None, assumptions)
    T, W, S = (Size(name, one.symbols[name]) for name in "TWS")
    last = "d_b" if case.gated else "d_a"  # to be born of a, b and d_y_swi
    dies_at = {"y": "d_gates", "gates": "d_y", "y_swi": "d_w3", "a": last, "b": last}
    dies_at["routed_x"] = "d_w2" if case.gated else "d_w1"
    backward = _megablocks_backward(case, (T * S, case.d), (T * W, S, S), last)
    return replace(one, tensors=(*_dying(one.tensors, dies_at), *backward), notes=())


def ratio(one: Account, conventional: Account) -> float:
    """Kept bytes of ``one`` over those of ``conventional``; NaN when nothing is kept at all (L = 0)."""
    return one.kept_bytes / conventional.kept_bytes if conventional.kept_bytes else math.nan


def largest_tokens(
    config: MoEConfig,
    system: str,
    policy: str | None,
    capacity_bytes: int,
    assumptions: Assumptions = Assumptions(),
) -> int:
    """The largest L whose forward fits ``capacity_bytes``, under uniform routing; config.L and counts are ignored.

    Counted is `Account.peak_bytes`: the activations of one layer at the worst moment of its forward. Weights,
    gradients, optimizer states and the backward's buffers are not, so a real step fits fewer tokens. L is also
    bounded by the int32 indices: L * k is at most 2**31 - 1024.

    Raises
    ------
    ValueError
        If not even L = 0 fits, or a name is unknown.
    TypeError
        If capacity_bytes is not an integer.
    """
    checks.check_int("capacity_bytes", capacity_bytes, at_least=1)
    uniform = replace(assumptions, counts=None)

    def peak(tokens):
        return account(config.replace(L=tokens), system, policy, uniform).peak_bytes

    fitting = bisect_right(range(checks.MAX_ROUTED_ROWS // config.k + 1), capacity_bytes, key=peak)
    if fitting == 0:
        raise ValueError(f"capacity_bytes is {capacity_bytes}, but even L = 0 needs {peak(0)} bytes")
    return fitting - 1


# How routed rows spread over the experts -----------------------------------------------------------------------------


def uniform_counts(config: MoEConfig) -> tuple[int, ...]:
    """The `even_counts` of the L * k routed rows."""
    return even_counts(config.R, config.E)


def dropped_and_padded(counts: Sequence[int], capacity: int) -> tuple[int, int]:
    """Return the dropped rows over the experts' capacity and the padding rows below it."""
    rows = capacity_rows(counts, capacity)
    return sum(rows.dropped), sum(rows.padding)


def tiles(rows: int, block: int = BLOCK) -> int:
    """Tiles of a block that cover so many rows or columns (MegaBlocks section 5)."""
    return -(-rows // block)


# The systems: rows in order of birth ---------------------------------------------------------------------------------


def _conventional(s: _Case) -> _Draft:
    """Every tensor of oracle.py (route and experts); memory/measure.py finds the same bytes, kept and at the peak.

    Not from a paper: it is what torch keeps of this project's oracle. Three habits of torch show: its indices are
    int64; it stores each expert's product and then their concatenation; and its index_add saves the
    source, `weighted`, merely to know its shape.
    """
    tensors = [
        of_x(s),
        *of_router(s),
        *(of_inputs(s) if at_inputs(s) else []),
        Tensor("sorted_experts", (s.R,), "int64", until="slot"),
        Tensor("slot", (s.R,), "int64", until="y_of_slot" if at_inputs(s) else None),
        Tensor("token", (s.R,), "int64"),
        Tensor("lengths", (s.E,), "int64", until="lengths"),
        Tensor("routed_x", (s.R, s.d), s.dtype),
        *_per_expert(_intermediates(s, (s.R, s.h))),
        *_per_expert([_y(s, "y_of_slot")]),
        *([Tensor("gate_rows_wide", (s.R, 1), s.wide, until="gate_rows")] if s.mixed else []),
        Tensor("gate_rows", (s.R, 1), s.dtype),
        Tensor("weighted", (s.R, s.d), s.dtype),
        *_sum_of_rows(s),
        _out(s),
    ]
    return _Draft(tensors, notes=("conventional: `weighted` is kept only because torch's index_add saves its source",))


def _sequential(s: _Case) -> _Draft:
    """One expert after another in plain torch; what `SequentialMoE` keeps, to the byte.

    From the paper: dense products, one expert at a time (MegaBlocks, appendix A). From torch: every tensor that
    autograd keeps. A row stands for one tensor an expert, all of them together: the sizes of the experts' groups add
    up to R. The peak leaves out what the expert at work holds besides.
    """
    tensors = [
        of_x(s),
        *_torch_router(s),
        *(of_inputs(s) if at_inputs(s) else []),
        *([Tensor("gates_narrow", (s.L, s.k), s.dtype, until="gate_rows")] if s.mixed else []),
        *_sum_of_rows(s),
        Tensor("token_and_choice", (s.R, 2), "int64"),
        Tensor("routed_x", (s.R, s.d), s.dtype),
        *_intermediates(s, (s.R, s.h), a_until="y"),
        _y(s, "weighted"),
        Tensor("gate_rows", (s.R, 1), s.dtype),
        Tensor("weighted", (s.R, s.d), s.dtype),
        _out(s),
        *_loss_terms(s),
    ]
    note = "sequential: a row has the tensors of all experts; as of conventional, index_add saves `weighted`"
    return _Draft(tensors, notes=(note,))


def _y(s, last_use):
    """The experts' outputs, which a product with gates of one does not save."""
    return Tensor("y", (s.R, s.d), s.dtype, until=last_use if at_inputs(s) else None)


def _sum_of_rows(s):
    """Return the zeros that index_add starts from; if gates multiply inputs, also its result, which is summed later."""
    if not at_inputs(s):
        return [Tensor("zeros", (s.L, s.d), s.dtype, until="out")]
    return [Tensor("zeros", (s.R, s.d), s.dtype, until="y_of_slot"), _y_of_slot(s)]


def _y_of_slot(s):
    return Tensor("y_of_slot", (s.R, s.d), s.dtype, until="out")


def _torch_router(s, *also_saved):
    """The router's rows of a layer that also returns the losses: the z-loss saves the logits."""
    return lives(of_router(s), ("logits", *also_saved), until=None)


def _loss_terms(s):
    """Tensors that autograd saves for the two losses."""
    return [Tensor("shares", (s.E,), s.wide), Tensor("logsumexp", (s.L,), s.wide)]


def _per_expert(tensors):
    """Tensors that come from a grouped product, each preceded by the products of the single experts."""
    for tensor in tensors:
        if tensor.name in ("a", "b", "y"):
            yield replace(tensor, name=f"{tensor.name}_pieces", until=tensor.name)
        yield tensor


def _intermediates(s: _Case, dims, a_until="out"):
    """Tensors that plain autograd saves between the GEMMs, each of shape ``dims``.

    silu and gelu save their input a; relu saves its result instead, so that a is only held by the forward's own
    variable, until the birth of ``a_until``. A gated product saves both factors, relu2's square saves relu(a), and the
    next GEMM saves y_swi.
    """
    saves_result = s.activation in ("relu", "relu2", "reglu")
    yield Tensor("a", dims, s.dtype, until=a_until if saves_result else None)
    if s.gated:
        yield Tensor("b", dims, s.dtype)
    if s.gated or s.activation == "relu2":
        yield Tensor("act_a", dims, s.dtype)
    yield Tensor("y_swi", dims, s.dtype)


def _products(s, hidden, rows, y_swi_until=None, y_until=None):
    """The results of the experts' products where no other is kept."""
    yield Tensor("a", hidden, s.dtype)
    if s.gated:
        yield Tensor("b", hidden, s.dtype)
    yield Tensor("y_swi", hidden, s.dtype, until=y_swi_until)
    yield Tensor("y", (rows, s.d), s.dtype, until=y_until)


def _out(s):
    """The layer's output; whether it is kept is the next layer's business."""
    return Tensor("out", (s.L, s.d), s.dtype, until="out")


def _routed_input(s, probs_until=None):
    """x and its routing, as three systems have them; softmax's backward needs every probability."""
    return [
        Tensor("x", (s.L, s.d), s.dtype),
        Tensor("logits", (s.L, s.E), s.wide, until="gates"),
        Tensor("probs", (s.L, s.E), s.wide, until=probs_until),
        Tensor("gates", (s.L, s.k), s.wide),
    ]


def _capacity(s: _Case, system: str = "capacity") -> _Draft:
    """Fixed expert capacity: padded buffers (E, C, ...), rows over C dropped; what `CapacityMoE` keeps, to the byte.

    C is that of the assumed factor, or in dynamic_capacity that of the fullest expert, as Tutel has it (MegaBlocks,
    section 3): what `DynamicCapacityMoE` keeps.

    From the papers: C and the padded dispatch buffer (GShard, Switch; MegaBlocks section 2), a row number per slot (as
    in Tutel) rather than GShard's one-hot (L, E, C) masks, which would cost more. Of torch: the intermediates that
    autograd keeps, masks of what is padding and what was dropped, and the outputs by slot, y, in place of `y_rows`.
    """
    factor = MAX if system == "dynamic_capacity" else s.assumptions.capacity_factor
    C = Size("C", capacity_for(s.counts, factor))
    dropped, padded = dropped_and_padded(s.counts, C)
    tensors = [
        of_x(s),
        *_torch_router(s, *([] if s.mixed else ["gates"])),
        Tensor("slots", (s.E, C), "int32", until="out"),
        Tensor("rows", (s.L, s.k), "int32", until="out"),
        Tensor("lengths", (s.E,), "int64", until="shares"),
        Tensor("token_of_row", (s.E, C), "int32"),
        Tensor("routed_x", (s.E, C, s.d), s.dtype),
        Tensor("is_padding", (s.E, C), "bool"),
        *_intermediates(s, (s.E, C, s.h), a_until="y_rows"),
        Tensor("y_rows", (s.E, C, s.d), s.dtype, until="out"),
        Tensor("row_of_slot", (s.L, s.k), "int32"),
        Tensor("y", (s.L, s.k, s.d), s.dtype),
        Tensor("is_dropped", (s.L, s.k), "bool"),
        *([Tensor("gates_narrow", (s.L, s.k), s.dtype)] if s.mixed else []),
        _out(s),
        *_loss_terms(s),
    ]
    rule = "the most rows of an expert" if factor == MAX else f"ceil({factor}*L*k/E)"
    note = (
        f"{system}: C = {rule} = {C:,} rows per expert; with {s.routing} {dropped:,} of "
        f"{s.R:,} routed rows are dropped, and {padded:,} rows are padding"
    )
    return _Draft(tensors, (C,), (note,))


def _megablocks_published(s: _Case) -> _Draft:
    """Padded bins: T tiles of 128 rows, W tiles of 128 columns per expert, T*W nonzero blocks.

    From the paper: padded gather and scatter, 128 x 128 blocks, hybrid blocked-CSR-COO (offsets, column and row
    indices) and transpose indices (MegaBlocks section 5). Our reading: everything int32, four tables of routing
    metadata, an expert width that 128 does not divide is padded too, and the intermediates that plain autograd
    keeps, each as block values. It is what MoEBlaze is compared with.
    """
    T, W = Size("T", sum(map(tiles, s.counts))), Size("W", tiles(s.h))
    tensors = [
        *_published_routing(s, T, W),
        Tensor("routed_x", (T * BLOCK, s.d), s.dtype),
        *_intermediates(s, (T * W, BLOCK, BLOCK)),
        Tensor("y", (T * BLOCK, s.d), s.dtype),
        _out(s),
    ]
    note = (
        f"megablocks_published: T = {T:,} tiles of 128 rows, W = ceil(h/128) = {W:,} tiles of 128 columns; "
        f"with {s.routing} no row is dropped, and {T * BLOCK - s.R:,} rows are padding"
    )
    return _Draft(tensors, (T, W), (note,))


def _published_routing(s, T, W):
    """x, the router as autograd keeps it, four tables of routing metadata, and the topology."""
    softmax = [*_routed_input(s), Tensor("topk_experts", (s.R,), "int32", until="padded_bins")]
    return [
        *(softmax if s.router.plain else _router_before_kernels(s)),
        Tensor("row_order", (s.R,), "int32"),
        Tensor("row_experts", (s.R,), "int32"),
        Tensor("bins", (s.E,), "int32"),
        Tensor("padded_bins", (s.E,), "int32"),
        *_topology(s.E, T, W),
    ]


def _megablocks_memory_optimized(s: _Case) -> _Draft:
    """The published MegaBlocks with its flag memory_optimized_mlp; what `MemoryOptimizedMoE` keeps, to the byte.

    From the published code: routed x, a, b and y are kept, and the activation is computed again. Of relu too a is kept.
    Our reading: the routing and the topology, as in `_megablocks_published`. The width is whole blocks.
    """
    T, W, S = _blocks(s)
    tensors = [
        *_published_routing(s, T, W),
        Tensor("routed_x", (T * S, s.d), s.dtype),
        *_products(s, (T * W, S, S), T * S, y_swi_until="y"),
        *_output_of_kernels(s),
    ]
    return _Draft(tensors, (T, W, S), (_blocks_note("megablocks_memory_optimized", s, T, W, S),))


def _blocks(s):
    """T blocks of rows and W of columns, of S each."""
    block, h = s.assumptions.block, s.h
    sparse_contracts.check_block(block, h)
    return Size("T", sum(tiles(rows, block) for rows in s.counts)), Size("W", h // block), Size("S", block)


def _blocks_note(system, s, T, W, S):
    return (
        f"{system}: T = {T:,} blocks of {S} rows, W = h/{S} = {W:,} blocks of columns; "
        f"with {s.routing} no row is dropped, and {T * S - s.R:,} rows are padding"
    )


def _megablocks(s: _Case) -> _Draft:
    """Padded bins, blocks of S rows and columns; what `BlockSparseMoE` keeps, to the byte.

    That is `megablocks.Saved`, where ``routed_x`` is called x_rows, beside x and the choice of experts.
    Its backward computes two kinds of tensors again that `_megablocks_published` keeps: act(a), which autograd keeps of
    a gated activation and of relu2, and the router's probabilities. It keeps ``a`` under every activation, where
    autograd does without that of relu: of relu ours keeps more.
    """
    T, W, S = _blocks(s)
    transient = ["expert_token_offsets", "expert_token_indices", "token_index_map"]
    if not s.router.plain:
        transient.append("token_expert_indices")  # which the kernels' router alone reads again
    tensors = [
        *_router_before_kernels(s),
        *lives(_dispatch(s), transient, until="out"),
        Tensor("padded_offsets", (s.E + 1,), "int32"),
        Tensor("slots", (T * S,), "int32"),
        Tensor("rows", (s.R,), "int32"),
        *_topology(s.E, T, W),
        Tensor("routed_x", (T * S, s.d), s.dtype),
        *_products(s, (T * W, S, S), T * S),
        *_output_of_kernels(s),
    ]
    return _Draft(tensors, (T, W, S), (_blocks_note("megablocks", s, T, W, S),))


def _topology(E, T, W):
    """Tensors of the topology: the T*W nonzero blocks in both orders (MegaBlocks section 5)."""
    return [
        Tensor("row_offsets", (T + 1,), "int32"),
        Tensor("column_indices", (T * W,), "int32"),
        Tensor("row_indices", (T * W,), "int32"),
        Tensor("column_offsets", (E * W + 1,), "int32"),
        Tensor("transpose_indices", (T * W,), "int32"),
    ]


def _sonicmoe(s: _Case) -> _Draft:
    """x, H = (A, B) and the routing: 2*L*d + 4*R*h bytes in bfloat16, and the metadata.

    From the paper: X and H are saved, and nothing else between the GEMMs (SonicMoE, arXiv 2512.14080). Our reading: of
    an ungated activation H is A alone; the metadata are the gates in float32 and index structures as large as ours;
    the probabilities are computed again; y is stored once, before it is summed per token.
    """
    products = _products(s, (s.R, s.h), s.R, y_swi_until="y", y_until="out")
    tensors = [*_routed_input(s, probs_until="gates"), *_dispatch(s), *products, _out(s)]
    note = "sonicmoe: X and (A, B) are the paper's; that its metadata are as large as ours is our reading"
    return _Draft(tensors, notes=(note,))


def _moeblaze(s: _Case) -> _Draft:
    """MoEBlaze has no routed-token buffer: x, the four index structures, the gates, and what the policy saves.

    From the paper: the index structures and the dense map that builds them (MoEBlaze sections 4.1 and 4.2), A, B
    and Y_swi under `paper` (section 5, Algorithm 1). Our reading: the expert outputs y are stored once before
    they are summed per token, as SonicMoE does it, and the backward recomputes the probabilities from x and the
    router, of which it keeps the choice and the gates only.
    """
    tensors = [*_router_before_kernels(s), *_dispatch(s), *_by_policy(s), *_output_of_kernels(s)]
    notes = [f"moeblaze: {_note_of_router(s)}"]
    if s.saved == ("y_swi",):
        notes.append("moeblaze: of relu y_swi alone is kept: the slope is 1 where y_swi > 0, and relu(y_swi) is y_swi")
    gap = 2 * (_Rows(s, gemm.HOPPER).H - s.h)
    if gap:
        notes.append(f"moeblaze: 7_persistent leaves {gap} bytes between the rows of a, b and y_swi, not counted here")
    (_, columns), *others = gemm.parts_of_y(gemm.HOPPER, s.R, s.d, s.h)
    if others and "y" not in s.saved:
        notes.append(f"moeblaze: y is counted whole; 7_persistent has {columns:,} of its {s.d:,} columns at one time")
    return _Draft(tensors, notes=tuple(notes))


def _router_before_kernels(s):
    """x and its routing. Kernels compute a plain softmax; torch computes others, and the experts' node saves gates.

    The probabilities are those of versions that store them; `raw_cuda.gating` keeps them in registers by default.
    """
    if s.router.plain:
        return _routed_input(s, probs_until="gates")
    x = Tensor("x", (s.L, s.d), s.dtype)
    given = Tensor("topk_int32", (s.L, s.k), "int32", until="out")
    if at_inputs(s):
        return [x, *_torch_router(s), *of_inputs(s, until=None), given]
    return [x, *_torch_router(s, "gates"), given]


def _output_of_kernels(s):
    """The output, and what the losses of a router in torch save."""
    return [*([_y_of_slot(s)] if at_inputs(s) else []), _out(s), *([] if s.router.plain else _loss_terms(s))]


def _note_of_router(s):
    if s.router.plain:
        return "the backward recomputes the router's probabilities from x; choice and gates are kept"
    return "torch computes this router, so autograd keeps what its backward needs"


def _dispatch(s):
    """The four index structures of `Dispatch` and the two tensors that build them (MoEBlaze section 4).

    The dense map is the paper's. `raw_cuda.dispatch` needs less by default: a count for each expert and tile of slots.
    """
    return [
        Tensor("token_expert_indices", (s.R,), "int32"),
        Tensor("dense_map", (s.L, s.E), "int32", until="token_index_map"),
        Tensor("expert_lengths", (s.E,), "int32", until="expert_token_offsets"),
        Tensor("expert_token_offsets", (s.E + 1,), "int32"),
        Tensor("expert_token_indices", (s.R,), "int32"),
        Tensor("token_index_map", (s.R,), "int32"),
    ]


def _by_policy(s):
    """Tensors that a policy stores between x and out; other values of the equations stay in registers."""
    width = {"routed_x": s.d, "y": s.d}
    freed = {"y_swi": "y", "y": "out"}  # the second GEMM reads the one and writes the other under every policy
    for name in intermediates("conventional", s.activation):
        if name in s.saved or name in freed:
            yield Tensor(name, (s.R, width.get(name, s.h)), s.dtype, until=None if name in s.saved else freed[name])


_BUILD: dict[str, Callable[[_Case], _Draft]] = {
    "conventional": _conventional,
    "sequential": _sequential,
    "capacity": _capacity,
    "dynamic_capacity": partial(_capacity, system="dynamic_capacity"),
    "megablocks_published": _megablocks_published,
    "megablocks_memory_optimized": _megablocks_memory_optimized,
    "megablocks": _megablocks,
    "sonicmoe": _sonicmoe,
    "moeblaze": _moeblaze,
}
assert _BUILD.keys() == SYSTEMS.keys()


# The backward: `layer.backward` and `megablocks.backward` over the raw CUDA stages ----------------------------------


def _dies_at(s):
    """The tensor whose birth is the last use of each kept one.

    a and b become d_a and d_b where they are, and so does y_swi where it is kept in place of a. routed_x, act_a and y
    are kept by a policy and never read.
    """
    y_swi_until = "gate_terms" if "a" in s.saved else "d_w1"
    return {"a": "d_w1", "b": "d_w2", "y_swi": y_swi_until} | dict.fromkeys(("routed_x", "act_a", "y"), "d_out")


def _backward(s, C, W, rows):
    """Tensors of the backward in the order of their allocation; a name with a prime is a recomputed tensor."""
    hidden = (s.R, rows.H)
    yield Tensor("d_out", (s.L, s.d), s.dtype)
    if not s.saved:
        yield from rows.of_first_product("b'" if s.gated else "a'")
        yield Tensor("a'", hidden, s.dtype, until="d_w1")
        if s.gated:
            yield Tensor("b'", hidden, s.dtype, until="d_w2")
    yield from rows.of_tokens("d_out", "d_w3")
    yield Tensor("gated_y", hidden, s.dtype, until="d_w3")
    yield Tensor("d_gates", (s.L, s.k), s.wide, until="d_logits")
    yield Tensor("gate_of_row", (s.R,), s.wide, until="gate_terms")
    yield from rows.of_w3(s.d, "gate_terms")
    yield Tensor("gate_terms", (s.R, C), s.wide, until="gate_terms")
    yield Tensor("d_w3", (s.E, s.h, s.d), s.dtype)
    yield Tensor("d_x", (s.L, s.d), s.dtype)
    yield from rows.of_projections(W, "d_x_rows")
    yield Tensor("d_x_rows", (s.R, W), s.dtype, until="d_x_rows")
    yield from rows.of_tokens("x", "d_w2" if s.gated else "d_w1")
    yield from _weights_and_router_backward(s)


def _megablocks_backward(s, rows, hidden, last):
    """The same of `megablocks.backward`; rows and hidden are the shapes of what is as large as y and as y_swi."""
    yield Tensor("d_out", (s.L, s.d), s.dtype)
    yield Tensor("d_gates", (s.L, s.k), s.wide, until="d_logits")
    yield Tensor("d_y", rows, s.dtype, until="d_y_swi")
    yield Tensor("d_w3", (s.E, s.h, s.d), s.dtype)
    yield Tensor("d_y_swi", hidden, s.dtype, until=last)
    yield Tensor("d_a", hidden, s.dtype, until="d_w1")
    if s.gated:
        yield Tensor("d_b", hidden, s.dtype, until="d_w2")
    yield Tensor("d_x_rows", rows, s.dtype, until="d_x")
    if s.gated:
        yield Tensor("d_x_rows_b", rows, s.dtype, until="d_x_rows_b")
    yield Tensor("d_x", (s.L, s.d), s.dtype)
    yield from _weights_and_router_backward(s)


def _weights_and_router_backward(s):
    """The end of the backward, the same in every system."""
    yield Tensor("d_w1", (s.E, s.d, s.h), s.dtype)
    if s.gated:
        yield Tensor("d_w2", (s.E, s.d, s.h), s.dtype)
    yield Tensor("logits'", (s.L, s.E), s.wide, until="d_logits")
    yield Tensor("probs'", (s.L, s.E), s.wide, until="d_logits")
    yield Tensor("d_logits", (s.L, s.E), s.dtype, until="d_wg")
    yield Tensor("d_wg", (s.d, s.E), s.dtype)
