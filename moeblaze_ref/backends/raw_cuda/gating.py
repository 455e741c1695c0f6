"""Gating in raw CUDA: launches kernels_cuda/gating/."""

import functools
import math
from numbers import Real
from typing import Any

from moeblaze_ref.backends.raw_cuda.gemm import C_TYPE
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.contract import Arrays, implements
from moeblaze_ref.core.structures import Array, Gating
from moeblaze_ref.runtime import Executor, KernelArguments, ceil_div, executor_for, widest_pack

DTYPES = ("float32",)
ARRAYS = Arrays("array", DTYPES)
VERSIONS = {"1_naive": DTYPES, "2_warp": DTYPES}
DEFAULT_VERSION = "2_warp"
THREADS = 256
WARP = 32
_NUMBERS: tuple[type[Any], ...] = (float, Real)  # an abstract class alone is slow to answer
FUSED_BLOCKS = 256  # of choose_experts at most: each leaves a row of sums, which one block adds up
SUM_THREADS = 1024  # of router_losses
TOKENS = {"1_naive": THREADS, "2_warp": THREADS // WARP}  # of a block


def constants(
    version: str,
    num_experts: int,
    renormalize: bool = False,
    balance: bool = False,
    z_loss: bool = False,
    dtype: str = "float32",
    pack: int = 4,
) -> dict[str, Any]:
    """Preprocessor constants of a version's file.

    Parameters
    ----------
    version : str
        One of ``VERSIONS``.
    num_experts : int
        E.
    renormalize : bool
        Whether gates are divided by their sum.
    balance, z_loss : bool
        Whether that loss has a gradient.
    dtype : str
        Of the logits' gradient.
    pack : int
        Columns that may be moved at once: 1, 2 or 4.
    """
    chosen: dict[str, Any] = {"THREADS": THREADS, "RENORMALIZE": int(bool(renormalize)), "Scalar": C_TYPE[dtype]}
    chosen |= {"BALANCE": int(balance), "Z_LOSS": int(z_loss)}
    if version == "2_warp":
        chosen["PER_LANE"] = columns_per_lane(num_experts)
        chosen["PACK"] = math.gcd(num_experts, chosen["PER_LANE"], pack)
    return chosen


@functools.cache
def columns_per_lane(num_experts: int) -> int:
    """Columns of a row that a lane of 2_warp holds: a power of two, so that few builds serve every E."""
    return 1 << (ceil_div(num_experts, WARP) - 1).bit_length()


def list_bytes(version: str, num_experts: int) -> int:
    """Shared memory of a block of softmax_top_k: 2_warp keeps every lane's columns there, in order, and the choices."""
    return 8 * THREADS * (columns_per_lane(num_experts) + 2) if version == "2_warp" else 0


def fused_constants(num_experts: int, renormalize: bool = False, pack: int = 4) -> dict[str, Any]:
    """Preprocessor constants of fused.cu; arguments as in `constants`."""
    per_lane = columns_per_lane(num_experts)
    chosen = {"THREADS": fused_threads(num_experts), "SUM_THREADS": SUM_THREADS, "PER_LANE": per_lane}
    return chosen | {"PACK": math.gcd(num_experts, per_lane, pack), "RENORMALIZE": int(bool(renormalize))}


@functools.cache
def fused_threads(num_experts: int) -> int:
    """Threads of a block of choose_experts: many, so that few blocks fill a GPU, but without spilled registers."""
    columns = columns_per_lane(num_experts)
    return 1024 if columns <= 2 else 512 if columns <= 16 else 256


def fused_blocks(num_tokens: int, num_experts: int) -> int:
    """Blocks of choose_experts for L tokens, a warp a token as far as `FUSED_BLOCKS` reach."""
    return min(FUSED_BLOCKS, ceil_div(WARP * num_tokens, fused_threads(num_experts)))


def fused_bytes(num_experts: int) -> int:
    """Dynamic shared memory of a block of choose_experts: the lists of its warps, and a count of each expert."""
    return 8 * fused_threads(num_experts) * (columns_per_lane(num_experts) + 2) + 4 * num_experts


def _prepare(executor: Executor | None, version: str, rows: Array) -> Executor:
    """The executor for an (L, E) array, once the version is known."""
    checks.check_name("version of gating", version, VERSIONS)
    return executor or executor_for(rows)


def _over_tokens(
    executor: Executor,
    version: str,
    kernel: str,
    rows: Array,
    shared_bytes: int = 0,
    chosen: dict[str, Any] | None = None,
    **arguments: Any,
):
    """Run a kernel of the version over every token of an (L, E) array; no token, no launch.

    ``chosen`` are options of `constants`.
    """
    L, E = rows.shape
    if L:
        options = constants(version, E, **chosen or {}, pack=widest_pack(rows, E))
        module = executor.load(f"gating/{version}.cu", **options)
        launch = {"grid": ceil_div(L, TOKENS[version]), "block": THREADS, "shared_bytes": shared_bytes}
        module.launch(kernel, **launch, L=L, E=E, **arguments)


def expert_shares(topk_experts: Array, num_experts: int, executor: Executor | None = None) -> Array:
    """The part of the R routed rows that each expert gets.

    Parameters
    ----------
    topk_experts : array (L, k), int32
    num_experts : int
        E.
    executor : Executor, optional
        Default: by where ``topk_experts`` lives.

    Returns
    -------
    shares : array (E,), float32
        Unwritten if there is no token.
    """
    executor = executor or executor_for(topk_experts)
    L, k = topk_experts.shape
    shares = executor.empty((num_experts,), "float32")
    if L == 0:
        return shares
    tiles = ceil_div(L, THREADS)
    counts = executor.empty((tiles, num_experts), "int32")
    module = executor.load("gating/sums.cu", THREADS=THREADS)
    module.launch(
        "expert_counts",
        grid=tiles,
        block=THREADS,
        shared_bytes=4 * num_experts * THREADS // WARP,
        topk_experts=topk_experts,
        counts=counts,
        L=L,
        E=num_experts,
        k=k,
    )
    module.launch(
        "expert_shares",
        grid=num_experts,
        block=THREADS,
        counts=counts,
        shares=shares,
        tiles=tiles,
        E=num_experts,
        R=L * k,
    )
    return shares


def _mean_of_terms(
    executor: Executor, version: str, kernel: str, rows: Array, factor: float = 1.0, **inputs: Any
) -> Array:
    """factor / L * the sum of the terms that the blocks of a kernel leave for an (L, E) array, 0-d."""
    terms = executor.empty((ceil_div(len(rows), TOKENS[version]),), "float32")
    _over_tokens(executor, version, kernel, rows, **inputs, terms=terms)
    total, scale = executor.empty((), "float32"), factor / max(len(rows), 1)
    module = executor.load("gating/sums.cu", THREADS=THREADS)
    module.launch("sum_terms", grid=1, block=THREADS, terms=terms, total=total, scale=scale, num_terms=terms.shape[0])
    return total


@implements(stage_contracts.GATING_IN_KERNELS, ARRAYS)
def forward(
    logits: Array, k: int, renormalize: bool = False, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Gating:
    """One kernel does it all. The logits must be C-contiguous."""
    executor = _prepare(executor, version, logits)
    L, E = logits.shape
    gating = Gating(
        probs=executor.empty((L, E), "float32"),
        topk_experts=executor.empty((L, k), "int32"),
        gates=executor.empty((L, k), "float32"),
    )
    arrays = {"logits": logits, **gating._asdict()}
    chosen = {"renormalize": renormalize}
    _over_tokens(executor, version, "softmax_top_k", logits, list_bytes(version, E), chosen, **arrays, k=k)
    return gating


@implements(stage_contracts.GATING_WITH_LOSSES_IN_KERNELS, ARRAYS)
def forward_with_losses(
    logits: Array, k: int, renormalize: bool = False, executor: Executor | None = None
) -> tuple[Array, Array, Array, Array]:
    """Two kernels do it all: the choice and the gates are those of `forward`, bit by bit, and the probabilities stay in
    registers.
    """
    executor = executor or executor_for(logits)
    L, E = logits.shape
    topk_experts, gates = executor.empty((L, k), "int32"), executor.empty((L, k), "float32")
    if L == 0:
        return topk_experts, gates, executor.full((), "float32", 0), executor.full((), "float32", 0)
    module = executor.load("gating/fused.cu", **fused_constants(E, renormalize, widest_pack(logits, E)))
    blocks = fused_blocks(L, E)
    sums: KernelArguments = {
        "counts": executor.empty((blocks, E), "int32"),
        "prob_sums": executor.empty((blocks, E), "float32"),
        "z_sums": executor.empty((blocks,), "float32"),
    }
    losses: KernelArguments = {name: executor.empty((), "float32") for name in ("load_balancing_loss", "router_z_loss")}
    module.launch(
        "choose_experts",
        grid=blocks,
        block=fused_threads(E),
        shared_bytes=fused_bytes(E),
        logits=logits,
        topk_experts=topk_experts,
        gates=gates,
        **sums,
        L=L,
        E=E,
        k=k,
    )
    module.launch("router_losses", grid=1, block=SUM_THREADS, **sums, **losses, blocks=blocks, L=L, E=E, R=L * k)
    return topk_experts, gates, losses["load_balancing_loss"], losses["router_z_loss"]


@implements(stage_contracts.GATING_BACKWARD_IN_KERNELS, ARRAYS)
def backward(
    d_gates: Array,
    logits: Array,
    topk_experts: Array,
    renormalize: bool = False,
    d_load_balancing_loss: float | Array = 0.0,
    d_router_z_loss: float | Array = 0.0,
    shares: Array | None = None,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
    dtype: str = "float32",
) -> Array:
    """One kernel over the rows, which computes the probabilities again in registers. A loss gradient on the GPU is read
    there: the host does not wait for its value.
    """
    k = topk_experts.shape[1]
    executor = _prepare(executor, version, logits)
    L, E = logits.shape
    d_logits = executor.empty((L, E), dtype)
    if L == 0:
        return d_logits
    balance, z_loss = not _is_zero(d_load_balancing_loss), not _is_zero(d_router_z_loss)
    nothing = executor.empty((0,), "float32")
    if not balance:
        shares = nothing
    elif shares is None:
        shares = expert_shares(topk_experts, E, executor)
    _over_tokens(
        executor,
        version,
        "d_logits",
        logits,
        chosen={"renormalize": renormalize, "balance": balance, "z_loss": z_loss, "dtype": dtype},
        d_gates=d_gates,
        logits=logits,
        topk_experts=topk_experts,
        shares=shares,
        d_load_balancing_loss=_on_device(executor, d_load_balancing_loss) if balance else nothing,
        d_router_z_loss=_on_device(executor, d_router_z_loss) if z_loss else nothing,
        d_logits=d_logits,
        k=k,
    )
    return d_logits


def _is_zero(value: float | Array) -> bool:
    """Return True if the value is the number 0. The elements of an array are not read."""
    return isinstance(value, _NUMBERS) and value == 0


def _on_device(executor: Executor, value: float | Array) -> Array:
    """A number as an array that a kernel can read; an array stays where it is."""
    if isinstance(value, _NUMBERS):
        return executor.full((1,), "float32", value)
    return executor.cast(value, "float32")


@implements(stage_contracts.LOAD_BALANCING_LOSS_IN_KERNELS, ARRAYS)
def load_balancing_loss(
    probs: Array,
    topk_experts: Array,
    shares: Array | None = None,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    executor = _prepare(executor, version, probs)
    E = probs.shape[1]
    if shares is None:
        shares = expert_shares(topk_experts, E, executor)
    return _mean_of_terms(executor, version, "load_balancing_terms", probs, E, probs=probs, shares=shares)


@implements(stage_contracts.ROUTER_Z_LOSS_IN_KERNELS, ARRAYS)
def router_z_loss(logits: Array, executor: Executor | None = None, version: str = DEFAULT_VERSION) -> Array:
    executor = _prepare(executor, version, logits)
    return _mean_of_terms(executor, version, "router_z_terms", logits, logits=logits)
