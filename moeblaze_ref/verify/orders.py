"""Sums whose order a docstring or a kernel's header states, and inputs by which float32 shows the order.

A sum of float32 depends on its order, and the checks by relative error pass any. Here every product is exact, so that a
fused multiply-add rounds as a multiplication and an addition do, and each sum has a large number, its negative, and
small ones between and around them: what is added while the large one is in the sum is lost. Results must then
equal numpy's float32, added one by one in the stated order, bit for bit.

All inputs fit float16, bfloat16 and tf32 without rounding. Every token chooses every expert, each in its own order.

The sizes cross what the kernels tile or group, with a last part that is not full: `Sizes`. Sums over a token's slots
run for every k from 3 to 8, and for one k that is larger, on more tokens than a block handles. A sum of one or two
terms is the same in both orders, so k = 1 and k = 2 can show none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from moeblaze_ref.backends.numpy_ref import block_sparse as reference_sparse
from moeblaze_ref.backends.numpy_ref.capacity import fill
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.layouts import LAYOUTS, Layout
from moeblaze_ref.core.structures import Dispatch, PaddedBins, Topology
from moeblaze_ref.systems import capacity
from moeblaze_ref.verify.packed import PackedStage


class Sizes(NamedTuple):
    """Sizes of one layer; every token chooses all E experts, so k is E and each expert has L rows."""

    #: Tokens, width, expert width and experts.
    L: int
    d: int
    h: int
    E: int
    block: int = 8  #: rows and columns of a block of the block-sparse matrices

    @property
    def k(self) -> int:
        """Experts of each token."""
        return self.E


# A test compares each with the constants of the kernels that it runs.
WIDE = Sizes(L=10, d=264, h=8, E=31)  # sums over a token's slots, by warps that take some slots and columns at a time
SMALL_K = range(3, 9)  # of most layers; the order of fewer terms changes no sum
# The same in rows so narrow that 42 tokens are more than a block's.
NARROW = tuple(Sizes(L=42, d=8, h=8, E=k) for k in (*SMALL_K, WIDE.k))
TOKENS = (WIDE, *NARROW)
FUSED = (Sizes(L=264, d=264, h=72, E=3), *NARROW)  # sums over a token's experts, in the epilogue of a product of tiles
PRODUCT = (Sizes(L=72, d=72, h=136, E=2),)  # sums along the depth of products of tiles; three tiles along h
SPARSE = (Sizes(L=144, d=72, h=144, E=2, block=72),)  # two blocks each way, a block larger than a tile

LARGE, SMALL = 2.0**13, 2.0**-13  # a large number swallows a small one, and both fit float16


def telling_terms(n: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Terms (n, ...) float32 of sums over the first axis that differ in almost every other order."""
    rng = np.random.default_rng(seed)
    mantissa = 1 + rng.integers(0, 128, (n, *shape)) / 128  # 7 bits, as bfloat16 stores
    terms = SMALL * mantissa * rng.choice((-1, 1), mantissa.shape)  # so that a sum of many is not much larger than each
    terms[0], terms[1] = LARGE * mantissa[0], -LARGE * mantissa[0]
    return rng.permuted(terms, axis=0).astype(np.float32)


def in_order(terms: np.ndarray) -> np.ndarray:
    """The sum over the first axis in float32, one term after the other."""
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


def powers_of_two(*shape: int) -> np.ndarray:
    """1 and 1/2 alternating along the last axis, float32: products with them are exact."""
    return np.ones(shape, np.float32) * np.where(np.arange(shape[-1]) % 2, np.float32(0.5), np.float32(1.0))


@cache
def routing(sizes: Sizes) -> Dispatch:
    """Every token's experts in a random order, so that its slots are in no order of the experts."""
    rng = np.random.default_rng(0)
    return build_by_sort(np.array([rng.permutation(sizes.E) for _ in range(sizes.L)], np.int32), sizes.E)


def _rows(of_slots: np.ndarray, sizes: Sizes) -> np.ndarray:
    """(k, L, ...) by slot as (R, ...) in expert order."""
    rows = np.empty((sizes.L * sizes.k, *of_slots.shape[2:]), np.float32)
    rows[routing(sizes).token_index_map.reshape(sizes.L, sizes.k)] = np.swapaxes(of_slots, 0, 1)
    return rows


def _experts(sizes: Sizes) -> np.ndarray:
    """The experts (L, k) of the tokens."""
    return routing(sizes).token_expert_indices.reshape(sizes.L, sizes.k)


Found = tuple[Any, np.ndarray]  # what a stage returns, and the terms of each element in the stated order


# ---- in the order of the slots, and of the experts ----------------------------------------------


def _combine(stage, cast, sizes) -> Found:
    terms, gates = telling_terms(sizes.k, (sizes.L, sizes.d), seed=1), powers_of_two(sizes.L, sizes.k)
    y = _rows(terms / gates.T[..., None], sizes)
    return stage.forward(cast(y), gates, routing(sizes)), terms


def _scatter(stage, cast, sizes, weighted: bool) -> Found:
    bins = reference_sparse.pad(routing(sizes), sizes.block)
    y, gates, terms = _rows_in_bins(bins, bins.P, sizes, weighted)
    return stage.padded_scatter(cast(y), bins, *([gates] if weighted else [])), terms


def _capacity_scatter(stage, cast, sizes, weighted: bool) -> Found:
    C = capacity.capacity_for([sizes.L] * sizes.E, capacity.MAX)
    bins = fill(routing(sizes), powers_of_two(sizes.L, sizes.k), C)
    y, gates, terms = _rows_in_bins(bins, sizes.E * bins.C, sizes, weighted)
    return stage.scatter(cast(y.reshape(sizes.E, bins.C, sizes.d)), bins, *([gates] if weighted else [])), terms


def _rows_in_bins(bins, num_rows: int, sizes: Sizes, weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows (num_rows, d) of which the bins take each token's terms, its gates (L, k), and the terms (k, L, d)."""
    terms, gates = telling_terms(sizes.k, (sizes.L, sizes.d), seed=2), powers_of_two(sizes.L, sizes.k)
    y = np.zeros((num_rows, sizes.d), np.float32)
    y[bins.rows.reshape(sizes.L, sizes.k)] = np.swapaxes(terms / gates.T[..., None] if weighted else terms, 0, 1)
    return y, gates, terms


def _picks(sizes: Sizes) -> np.ndarray:
    """Hidden rows (R, h), in expert order, that each pick one row of a weight (E, h, d): that of `_picked`."""
    return np.eye(sizes.h, dtype=np.float32)[routing(sizes).expert_token_indices % sizes.h]


def _picked(of_experts: np.ndarray, sizes: Sizes) -> np.ndarray:
    """(E, h, d) as what each token gets of each expert, (E, L, d)."""
    return of_experts[:, np.arange(sizes.L) % sizes.h]


def _input_gradient(stage, cast, sizes) -> Found:
    """Terms of d_x by expert: a row of d_a or d_b picks the one column of w1 or w2 that holds the term of its token."""
    w = telling_terms(sizes.E, (sizes.h, sizes.d), seed=4)
    by_w1 = (np.arange(sizes.E)[:, None, None] + np.arange(sizes.h)[:, None]) % 2 == 0
    halves = [cast(np.swapaxes(np.where(half, w, 0), 1, 2)) for half in (by_w1, ~by_w1)]  # (E, d, h) each
    picks = cast(_picks(sizes))
    return stage.input_gradient(picks, picks, *halves, routing(sizes)), _picked(w, sizes)


def _input_gradient_by_slot(stage, cast, sizes) -> Found:
    found, terms = _input_gradient(stage, cast, sizes)
    return found, terms[_experts(sizes).T, np.arange(sizes.L)]


def _summed_output(stage, cast, sizes) -> Found:
    """Terms of the output by expert. A gate is one number an expert, so that each term is a power of two of w3."""
    w3, of_experts = telling_terms(sizes.E, (sizes.h, sizes.d), seed=5), powers_of_two(sizes.E)
    gates = of_experts[_experts(sizes)]
    found = stage.summed_forward(cast(_picks(sizes)), cast(w3 / of_experts[:, None, None]), gates, routing(sizes))
    return found, _picked(w3, sizes)


# ---- along the depth of a product ------------------------------------------------------------------


def _up_products(stage, cast, sizes) -> Found:
    """Terms of a and of b."""
    w1, w2 = w = [telling_terms(sizes.d, (sizes.E, sizes.h), seed) for seed in (6, 15)]
    x = powers_of_two(sizes.d, sizes.L).T  # (L, d): one number a token
    weights = [cast(np.moveaxis(half, 0, 1)) for half in (w1, w2)]
    a, b, _ = stage.forward(cast(x), *weights, routing(sizes), "swiglu")
    tokens = x[routing(sizes).expert_token_indices]  # (R, d)
    terms = [tokens.T[..., None] * np.repeat(half, sizes.L, axis=1) for half in w]
    return np.stack([a, b]), np.stack(terms, axis=1)


def _input_gradient_alternating(stage, cast, sizes) -> Found:
    """Terms of d_x over h: of each hidden element the product with w1, then that with w2."""
    w = telling_terms(2 * sizes.h, (sizes.E, sizes.d), seed=16)
    return _one_row_of_input_gradient(stage, cast, sizes, w[0::2], w[1::2]), _terms_of_one_row(w, sizes)


def _input_gradient_by_weight(stage, cast, sizes) -> Found:
    """Terms of d_x over h: all products with w1, then all with w2."""
    w = telling_terms(2 * sizes.h, (sizes.E, sizes.d), seed=16)
    return _one_row_of_input_gradient(stage, cast, sizes, *np.split(w, 2)), _terms_of_one_row(w, sizes)


def _one_row_of_input_gradient(stage, cast, sizes, w1, w2):
    """d_x by weights (h, E, d) of one row a token, that of expert token % E: the sum of its slots rounds nothing."""
    tokens, experts = routing(sizes).expert_token_indices, np.repeat(np.arange(sizes.E), sizes.L)
    rows = np.where(tokens % sizes.E == experts, powers_of_two(sizes.L)[tokens], np.float32(0))  # (R,)
    d_hidden = cast(np.tile(rows[:, None], (1, sizes.h)))
    weights = [cast(np.transpose(w, (1, 2, 0))) for w in (w1, w2)]  # (E, d, h) each
    return stage.input_gradient(d_hidden, d_hidden, *weights, routing(sizes))


def _terms_of_one_row(w: np.ndarray, sizes: Sizes) -> np.ndarray:
    """(n, E, d) as the terms (n, L, d) of that row, times its token's number."""
    return powers_of_two(sizes.L)[:, None] * w[:, np.arange(sizes.L) % sizes.E]


def _weight_gradient(stage, cast, sizes, axes: str) -> Found:
    """Terms over an expert's rows: rows (R, h) times one number a column of the tokens (L, d)."""
    rows, columns = telling_terms(sizes.L, (sizes.E, sizes.h), seed=7), powers_of_two(sizes.d)
    hidden = cast(np.swapaxes(rows, 0, 1).reshape(-1, sizes.h))
    found = stage.weight_gradient(hidden, cast(np.tile(columns, (sizes.L, 1))), routing(sizes))
    return found, np.einsum(f"tej,i->t{axes}", rows, columns)


def _down_product(stage, cast, sizes) -> Found:
    w3 = telling_terms(sizes.h, (sizes.E, sizes.d), seed=8)
    y_swi = powers_of_two(sizes.h, sizes.L * sizes.k).T  # (R, h): one number a row
    found = stage.forward(cast(y_swi), cast(np.moveaxis(w3, 0, 1)), routing(sizes))
    return found, y_swi.T[..., None] * np.repeat(w3, sizes.L, axis=1)


def _hidden_gradients(stage, cast, sizes) -> Found:
    """The gradients of a and of b, where both are 1: gate * <d_out, w3>."""
    w3, d_out = telling_terms(sizes.d, (sizes.E, sizes.h), seed=9), powers_of_two(sizes.d, sizes.L).T
    gates = powers_of_two(sizes.L, sizes.k)
    d_a, d_b, *_ = _backward_of_ones(stage, cast, sizes, d_out, np.moveaxis(w3, 0, 2), gates)
    d_rows = _rows(gates.T[..., None] * d_out, sizes)  # (R, d), times the gates
    terms = d_rows.T[..., None] * np.repeat(w3, sizes.L, axis=1)
    return np.stack([d_a, d_b]), np.stack([terms, terms], axis=1)


def _gate_gradient(stage, cast, sizes) -> Found:
    """Terms over h: each token's row of d_out picks the one column of w3 that holds its terms."""
    w3, gates = telling_terms(sizes.h, (sizes.E, sizes.d), seed=10), powers_of_two(sizes.L, sizes.k)
    columns = np.arange(sizes.L) % sizes.d
    d_out = np.eye(sizes.d, dtype=np.float32)[columns]
    *_, d_gates = _backward_of_ones(stage, cast, sizes, d_out, np.moveaxis(w3, 0, 1), gates)
    return d_gates, w3[:, _experts(sizes), columns[:, None]]


def _gate_gradient_by_tile(stage, cast, sizes) -> Found:
    """The terms are the sums of tiles of h, each in the order of its columns."""
    d_gates, terms = _gate_gradient(stage, cast, sizes)
    tiles = np.split(terms, range(gemm.TILE, sizes.h, gemm.TILE))
    return d_gates, np.stack([in_order(tile) for tile in tiles])


def _backward_of_ones(stage, cast, sizes, d_out, w3, gates):
    ones = cast(np.ones((sizes.L * sizes.k, sizes.h), np.float32))
    return stage.hidden_gradients(cast(d_out), gates, ones, ones, cast(w3), routing(sizes), "reglu")


def _gate_gradient_of_combine(stage, cast, sizes) -> Found:
    y, d_out = telling_terms(sizes.d, (sizes.L * sizes.k,), seed=11), powers_of_two(sizes.d, sizes.L).T
    _, d_gates = stage.backward(cast(d_out), cast(y.T), powers_of_two(sizes.L, sizes.k), routing(sizes))
    rows = routing(sizes).token_index_map.reshape(sizes.L, sizes.k)
    return d_gates, d_out.T[..., None] * y[:, rows]


# ---- of weights as models store them ----------------------------------------------------------------


def _of_layout(stage, cast, sizes, layout: Layout, run: Callable[..., Found]) -> Found:
    """Run what `run` does, by the kernels of a layout."""
    return run(PackedStage(stage, layout), cast, sizes)


# ---- block-sparse products -----------------------------------------------------------------------


@cache
def _bins(sizes: Sizes) -> PaddedBins:
    """Bins without padding: the block divides L."""
    return reference_sparse.pad(routing(sizes), sizes.block)


@cache
def _topology(sizes: Sizes) -> Topology:
    return reference_sparse.build_topology(_bins(sizes), sizes.h)


def _of_experts(terms: np.ndarray, sizes: Sizes) -> np.ndarray:
    """(n, E, ...) as (n, P, ...): each padded row has its expert's."""
    return np.repeat(terms, sizes.L, axis=1)


def _sparse(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Values of the block-sparse matrix whose row p has (P, h) at its expert's columns."""
    P = sizes.E * sizes.L
    dense = np.zeros((P, sizes.E, sizes.h), rows.dtype)
    dense[np.arange(P), np.repeat(np.arange(sizes.E), sizes.L)] = rows
    return reference_sparse.from_dense(dense.reshape(P, sizes.E * sizes.h), _topology(sizes))


def _sdd(stage, cast, sizes, transpose_rhs: bool) -> Found:
    w1, x = telling_terms(sizes.d, (sizes.E, sizes.h), seed=12), powers_of_two(sizes.d, sizes.E * sizes.L).T
    rhs = w1.reshape(sizes.d, -1).T if transpose_rhs else np.moveaxis(w1, 0, 1)  # (E h, d), or parts (E, d, h)
    found = stage.sdd(cast(x), cast(rhs), _topology(sizes), transpose_rhs)
    terms = x.T[..., None] * _of_experts(w1, sizes)  # (d, P, h)
    return found, np.stack([_sparse(term, sizes) for term in terms])


def _dsd(stage, cast, sizes, transpose_rhs: bool) -> Found:
    """Terms of a block-sparse product over h."""
    w3, rows = telling_terms(sizes.h, (sizes.E, sizes.d), seed=13), powers_of_two(sizes.h, sizes.E * sizes.L).T
    rhs = np.transpose(w3, (1, 2, 0)) if transpose_rhs else np.moveaxis(w3, 0, 1).reshape(-1, sizes.d)
    found = stage.dsd(cast(_sparse(rows, sizes)), _topology(sizes), cast(rhs), transpose_rhs=transpose_rhs)
    return found, rows.T[..., None] * _of_experts(w3, sizes)


def _transposed_dsd(stage, cast, sizes, transpose_rhs: bool) -> Found:
    values, dense, terms = _over_rows(sizes)
    rhs = dense.T if transpose_rhs else dense
    found = stage.dsd(cast(values), _topology(sizes), cast(rhs), transpose_lhs=True, transpose_rhs=transpose_rhs)
    return found, terms


def _dds(stage, cast, sizes, transpose_lhs: bool) -> Found:
    values, dense, terms = _over_rows(sizes)
    lhs = dense if transpose_lhs else dense.T
    (found,) = stage.dds(cast(lhs), cast(values), _topology(sizes), transpose_lhs=transpose_lhs)
    return found, np.swapaxes(terms, 1, 2)


def _over_rows(sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A sparse matrix, a dense one (P, d) of one number a column, and the terms (L, E h, d) over an expert's rows."""
    rows, columns = telling_terms(sizes.L, (sizes.E, sizes.h), seed=14), powers_of_two(sizes.d)
    values = _sparse(np.swapaxes(rows, 0, 1).reshape(-1, sizes.h), sizes)
    return values, np.tile(columns, (sizes.E * sizes.L, 1)), rows.reshape(sizes.L, -1, 1) * columns


# ---- who promises what ---------------------------------------------------------------------------

KERNELS = ("simt", "cuda")
ONE_BY_ONE = (KERNELS, ("1_naive", "2_tiled"))  # tensor cores add several products at once


@dataclass(frozen=True)
class Sum:
    """A sum whose order is stated."""

    #: Such as "combine", "out", "slots".
    stage: str
    result: str
    order: str
    #: Takes the stage, a cast to its dtype and the sizes; returns what it finds, and the terms in order.
    run: Callable[[Any, Callable[[np.ndarray], np.ndarray], Sizes], Found]
    sizes: tuple[Sizes, ...]  #: the check runs all of them
    backends: tuple[str, ...]
    versions: tuple[str, ...] | None = None  #: of raw CUDA; default: all
    kernels: str = ""  #: the folder of its kernels, if that is not the stage's

    @property
    def folder(self) -> str:
        """The folder of the kernels that state the order."""
        return self.kernels or self.stage

    @property
    def shape(self) -> str:
        """Text of all sizes, and of what is summed in which order."""
        return self.shape_at(*self.sizes)

    def shape_at(self, *sizes: Sizes) -> str:
        """Text of some sizes, and of what is summed in which order."""
        each = "; ".join(f"L={L} d={d} h={h} E={E} k={E}" for L, d, h, E, _ in sizes)
        return f"{each} ({self.result} in the order of the {self.order})"

    def promised(self, backend: str, version: str | None) -> bool:
        """Return True if a version of a backend keeps the order."""
        return backend in self.backends and (
            backend not in KERNELS or self.versions is None or version in self.versions
        )


ALL = ("numpy", "numba", *KERNELS)


def _sums_of_layout(layout: Layout) -> tuple[Sum, ...]:
    """The sums of the kernels for weights of a layout."""
    of = partial(partial, _of_layout, layout=layout)
    where = PRODUCT, KERNELS, ("2_tiled",), "packed"
    return (
        Sum("expert_up", f"ab of {layout.name}", "depth", of(run=_up_products), *where),
        Sum("expert_down", f"d_ab of {layout.name}", "columns", of(run=_hidden_gradients), *where),
        Sum("expert_down", f"d_gates of {layout.name}", "depth, tile by tile", of(run=_gate_gradient_by_tile), *where),
    )


SUMS = (
    Sum("combine", "out", "slots", _combine, TOKENS, ALL),
    Sum("combine", "d_gates", "columns", _gate_gradient_of_combine, TOKENS, KERNELS),
    Sum("expert_up", "d_x", "slots", _input_gradient_by_slot, TOKENS, ("numba", *KERNELS), tuple(gemm.VERSIONS)),
    Sum("expert_up", "d_x", "experts", _input_gradient, TOKENS, ("numpy",)),
    Sum(
        "expert_up", "d_x", "depth, w1 and w2 alternating", _input_gradient_alternating, PRODUCT, KERNELS, ("1_naive",)
    ),
    Sum("expert_up", "d_x", "depth, w1 before w2", _input_gradient_by_weight, PRODUCT, KERNELS, ("2_tiled",)),
    Sum("expert_up", "a, b", "depth", _up_products, PRODUCT, *ONE_BY_ONE),
    Sum("expert_up", "d_w1", "rows", partial(_weight_gradient, axes="eij"), PRODUCT, *ONE_BY_ONE),
    Sum("expert_down", "out", "experts", _summed_output, FUSED, ("numpy", *KERNELS), ("as_printed",)),
    Sum("expert_down", "y", "depth", _down_product, PRODUCT, *ONE_BY_ONE),
    Sum("expert_down", "d_a, d_b", "columns", _hidden_gradients, PRODUCT, *ONE_BY_ONE),
    Sum("expert_down", "d_gates", "depth", _gate_gradient, PRODUCT, KERNELS, ("1_naive",)),
    Sum("expert_down", "d_gates", "depth, tile by tile", _gate_gradient_by_tile, PRODUCT, KERNELS, ("2_tiled",)),
    Sum("expert_down", "d_w3", "rows", partial(_weight_gradient, axes="eji"), PRODUCT, *ONE_BY_ONE),
    *(one for layout in LAYOUTS.values() for one in _sums_of_layout(layout)),
    Sum("block_sparse", "out", "slots", partial(_scatter, weighted=True), TOKENS, ALL),
    Sum("block_sparse", "d_x", "slots", partial(_scatter, weighted=False), TOKENS, ALL),
    Sum("block_sparse", "sdd", "depth", partial(_sdd, transpose_rhs=False), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "sdd of D^T", "depth", partial(_sdd, transpose_rhs=True), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "dsd", "depth", partial(_dsd, transpose_rhs=False), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "dsd of D^T", "depth", partial(_dsd, transpose_rhs=True), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "dsd of S^T", "rows", partial(_transposed_dsd, transpose_rhs=False), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "dsd of S^T, D^T", "rows", partial(_transposed_dsd, transpose_rhs=True), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "dds", "rows", partial(_dds, transpose_lhs=False), SPARSE, *ONE_BY_ONE),
    Sum("block_sparse", "dds of D^T", "rows", partial(_dds, transpose_lhs=True), SPARSE, *ONE_BY_ONE),
    Sum("capacity", "out", "slots", partial(_capacity_scatter, weighted=True), TOKENS, ("numpy",)),
    Sum("capacity", "d_x", "slots", partial(_capacity_scatter, weighted=False), TOKENS, ("numpy",)),
)


def promises(stage: str, backend: str, version: str | None) -> list[Sum]:
    """The sums of a stage whose order a version of a backend keeps."""
    return [one for one in SUMS if one.stage == stage and one.promised(backend, version)]


def cast_to(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that makes contiguous arrays of a dtype."""
    return lambda array: np.ascontiguousarray(array, dtype)


def differing_bits(one: Sum, stage: Any, dtype: str, sizes: Sizes) -> int:
    """Elements of which a stage's bits are not those of the sum in its order."""
    found, terms = one.run(stage, cast_to(dtype), sizes)
    wanted = in_order(terms).astype(found.dtype)
    bits = f"u{found.dtype.itemsize}"
    return int((np.ascontiguousarray(found).view(bits) != wanted.view(bits)).sum())


def dtypes_that_tell(dtypes: tuple[str, ...]) -> Iterator[str]:
    """Return the dtypes in which a small number is lost beside a large one: not float64."""
    return (dtype for dtype in dtypes if dtype != "float64")
