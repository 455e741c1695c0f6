"""Sums whose order a docstring or a kernel's header states, and inputs by which float32 shows the order.

A sum of float32 depends on its order, and the checks by relative error pass any. Here every product is exact, so that a
fused multiply-add rounds as a multiplication and an addition do, and each sum has a large number, its negative, and
small ones between and around them: what is added while the large one is in the sum is lost. Results must then
equal numpy's float32, added one by one in the stated order, bit for bit.

All inputs fit float16, bfloat16 and tf32 without rounding. Every token chooses every expert, each in its own order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from moeblaze_ref import capacity
from moeblaze_ref.numpy_ref import block_sparse as reference_sparse
from moeblaze_ref.numpy_ref.capacity import fill
from moeblaze_ref.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.structures import Dispatch

L, D, H, E = 8, 8, 16, 4  # as many columns as tokens: a token's product may have a column of its own
K = E
BLOCK = 8  # of the block-sparse matrices: an expert's rows fill one

LARGE, SMALL = 2.0**13, 2.0**-13  # a large number swallows a small one, and both fit float16


def telling_terms(n: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Terms (n, ...) float32 of sums over the first axis that differ in almost every other order."""
    rng = np.random.default_rng(seed)
    mantissa = 1 + rng.integers(0, 128, (n, *shape)) / 128  # 7 bits, as bfloat16 stores
    terms = SMALL * mantissa
    terms[0], terms[1] = LARGE * mantissa[0], -LARGE * mantissa[0]
    return rng.permuted(terms, axis=0).astype(np.float32)


def in_order(terms: np.ndarray) -> np.ndarray:
    """The sum over the first axis in float32, one term after the other."""
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


def powers_of_two(*shape: int) -> np.ndarray:
    """1 and 1/2 in turn along the last axis, float32: products with them are exact."""
    return np.ones(shape, np.float32) * np.where(np.arange(shape[-1]) % 2, np.float32(0.5), np.float32(1.0))


@cache
def routing() -> Dispatch:
    """Every token's experts in a random order, so that its slots are in no order of the experts."""
    rng = np.random.default_rng(0)
    return build_by_sort(np.array([rng.permutation(E) for _ in range(L)], np.int32), E)


def _rows(of_slots: np.ndarray) -> np.ndarray:
    """(K, L, ...) by slot as (R, ...) in expert order."""
    rows = np.empty((L * K, *of_slots.shape[2:]), np.float32)
    rows[routing().token_index_map.reshape(L, K)] = np.swapaxes(of_slots, 0, 1)
    return rows


def _by_expert(of_slots: np.ndarray) -> np.ndarray:
    """(K, L, ...) by slot as (E, L, ...) by expert."""
    return _rows(of_slots).reshape(E, L, *of_slots.shape[2:])


def _diagonal(of_experts: np.ndarray) -> np.ndarray:
    """(E, L, d) as weights (E, H, d) of which row i is that of token i; the other rows are 0."""
    return np.concatenate([of_experts, np.zeros((E, H - L, of_experts.shape[2]), np.float32)], axis=1)


def _one_of_each_token() -> np.ndarray:
    """Hidden rows (R, H) that pick their token's row of `_diagonal`."""
    return np.tile(np.eye(L, H, dtype=np.float32), (E, 1))


Found = tuple[Any, np.ndarray]  # what a stage returns, and the terms of each element in the stated order


# ---- in the order of the slots, and of the experts ----------------------------------------------


def _combine(stage, cast) -> Found:
    terms, gates = telling_terms(K, (L, D), seed=1), powers_of_two(L, K)
    y = _rows(terms / gates.T[..., None])
    return stage.forward(cast(y), gates, routing()), terms


def _scatter(stage, cast, weighted: bool) -> Found:
    bins, terms, gates = reference_sparse.pad(routing(), BLOCK), telling_terms(K, (L, D), seed=2), powers_of_two(L, K)
    y = np.zeros((bins.P, D), np.float32)
    y[bins.rows.reshape(L, K)] = np.swapaxes(terms / gates.T[..., None] if weighted else terms, 0, 1)
    return stage.padded_scatter(cast(y), bins, *([gates] if weighted else [])), terms


def _capacity_scatter(stage, cast) -> Found:
    terms, gates = telling_terms(K, (L, D), seed=3), powers_of_two(L, K)
    bins = fill(routing(), gates, capacity.capacity_for([L] * E, capacity.MAX))
    y = np.zeros((E * bins.C, D), np.float32)
    y[bins.rows.reshape(L, K)] = np.swapaxes(terms / gates.T[..., None], 0, 1)
    return stage.scatter(cast(y.reshape(E, bins.C, D)), bins, gates), terms


def _input_gradient(stage, cast) -> Found:
    """By slot: a row of d_a picks the one column of w1 that holds the term of its token."""
    terms = telling_terms(K, (L, D), seed=4)
    w1 = np.ascontiguousarray(np.swapaxes(_diagonal(_by_expert(terms)), 1, 2))  # (E, d, h)
    return stage.input_gradient(cast(_one_of_each_token()), None, cast(w1), None, routing()), terms


def _input_gradient_by_expert(stage, cast) -> Found:
    found, terms = _input_gradient(stage, cast)
    return found, _by_expert(terms)


def _summed_output(stage, cast) -> Found:
    terms, gates = telling_terms(K, (L, D), seed=5), powers_of_two(L, K)
    w3 = _diagonal(_by_expert(terms / gates.T[..., None]))
    return stage.summed_forward(cast(_one_of_each_token()), cast(w3), gates, routing()), _by_expert(terms)


# ---- along the depth of a product ------------------------------------------------------------------


def _up_product(stage, cast) -> Found:
    w1 = telling_terms(D, (E, H), seed=6)
    x = powers_of_two(D, L).T  # (L, d): one number a token
    a, *_ = stage.forward(cast(x), *[cast(np.moveaxis(w1, 0, 1))] * 2, routing(), "swiglu")
    tokens = x[routing().expert_token_indices]  # (R, d)
    return a, tokens.T[..., None] * np.repeat(w1, L, axis=1)


def _up_weights(stage, cast) -> Found:
    return _weight_gradient(lambda rows, tokens: stage.weight_gradient(rows, tokens, routing()), cast, "eij")


def _down_weights(stage, cast) -> Found:
    return _weight_gradient(lambda rows, tokens: stage.weight_gradient(rows, tokens, routing()), cast, "eji")


def _weight_gradient(gradient, cast, axes: str) -> Found:
    """Over an expert's rows: rows (R, h) times one number a column of the tokens (L, d)."""
    rows, columns = telling_terms(L, (E, H), seed=7), powers_of_two(D)
    found = gradient(cast(np.swapaxes(rows, 0, 1).reshape(-1, H)), cast(np.tile(columns, (L, 1))))
    return found, np.einsum(f"tej,i->t{axes}", rows, columns)


def _down_product(stage, cast) -> Found:
    w3 = telling_terms(H, (E, D), seed=8)
    y_swi = powers_of_two(H, L * K).T  # (R, h): one number a row
    found = stage.forward(cast(y_swi), cast(np.moveaxis(w3, 0, 1)), routing())
    return found, y_swi.T[..., None] * np.repeat(w3, L, axis=1)


def _hidden_gradient(stage, cast) -> Found:
    """Of a, under relu where a is 1: gate * <d_out, w3>."""
    w3, d_out, gates = telling_terms(D, (E, H), seed=9), powers_of_two(D, L).T, powers_of_two(L, K)
    found = _backward_of_ones(stage, cast, d_out, np.moveaxis(w3, 0, 2), gates)
    d_rows = _rows(gates.T[..., None] * d_out)  # (R, d), times the gates
    return found[0], d_rows.T[..., None] * np.repeat(w3, L, axis=1)


def _gate_gradient(stage, cast) -> Found:
    """Over h: each token's row of d_out picks the one column of w3 that holds its terms."""
    terms, gates = telling_terms(H, (L, K), seed=10), powers_of_two(L, K)
    w3 = np.transpose(_by_expert(np.transpose(terms, (2, 1, 0))), (0, 2, 1))  # (E, h, L)
    found = _backward_of_ones(stage, cast, np.eye(L, dtype=np.float32), w3, gates)
    return found[3], terms


def _backward_of_ones(stage, cast, d_out, w3, gates):
    ones = cast(np.ones((L * K, H), np.float32))
    return stage.hidden_gradients(cast(d_out), gates, ones, None, cast(w3), routing(), "relu")


def _gate_gradient_of_combine(stage, cast) -> Found:
    y, d_out = telling_terms(D, (L * K,), seed=11), powers_of_two(D, L).T
    _, d_gates = stage.backward(cast(d_out), cast(y.T), powers_of_two(L, K), routing())
    rows = routing().token_index_map.reshape(L, K)
    return d_gates, d_out.T[..., None] * y[:, rows]


# ---- block-sparse products -----------------------------------------------------------------------


@cache
def _topology():
    return reference_sparse.build_topology(reference_sparse.pad(routing(), BLOCK), H)


def _of_experts(terms: np.ndarray) -> np.ndarray:
    """(n, P, E, ...) of which each padded row keeps its own expert's: (n, P, ...)."""
    return terms[:, np.arange(E * L), np.repeat(np.arange(E), L)]


def _sparse(rows: np.ndarray) -> np.ndarray:
    """Values of the block-sparse matrix whose row p has (P, h) at its expert's columns."""
    dense = np.zeros((E * L, E, H), rows.dtype)
    dense[np.arange(E * L), np.repeat(np.arange(E), L)] = rows
    return reference_sparse.from_dense(dense.reshape(E * L, E * H), _topology())


def _sdd(stage, cast) -> Found:
    w1, x = telling_terms(D, (E, H), seed=12), powers_of_two(D, E * L).T
    terms = _of_experts(x.T[:, :, None, None] * w1[:, None])  # (d, P, h)
    found = stage.sdd(cast(x), cast(np.moveaxis(w1, 0, 1)), _topology())
    return found, np.stack([_sparse(term) for term in terms])


def _dsd(stage, cast) -> Found:
    w3, rows = telling_terms(H, (E, D), seed=13), powers_of_two(H, E * L).T
    found = stage.dsd(cast(_sparse(rows)), _topology(), cast(np.moveaxis(w3, 0, 1).reshape(E * H, D)))
    return found, _of_experts(rows.T[:, :, None, None] * w3[:, None])


def _dds(stage, cast) -> Found:
    rows, columns = telling_terms(L, (E, H), seed=14), powers_of_two(D)
    values = _sparse(np.swapaxes(rows, 0, 1).reshape(E * L, H))
    found = stage.dds(cast(np.tile(columns, (E * L, 1))), cast(values), _topology(), transpose_lhs=True)
    return found, np.einsum("tn,i->tin", rows.reshape(L, E * H), columns)


# ---- who promises what ---------------------------------------------------------------------------

KERNELS = ("simt", "cuda")
ONE_BY_ONE = ("1_naive", "2_tiled")  # tensor cores add several products at once


@dataclass(frozen=True)
class Sum:
    """A sum whose order is stated.

    Parameters
    ----------
    stage, result, order : str
        Such as "combine", "out", "slots".
    run : callable
        Takes the stage and a cast to its dtype; returns what it finds, and the terms in order.
    backends : tuple of str
    rungs : tuple of str, optional
        Of raw CUDA; default: all.
    """

    stage: str
    result: str
    order: str
    run: Callable[[Any, Callable[[np.ndarray], np.ndarray]], Found]
    backends: tuple[str, ...]
    rungs: tuple[str, ...] | None = None

    @property
    def shape(self) -> str:
        """The sizes, and what is summed in which order."""
        return f"L={L} d={D} h={H} E={E} k={K} ({self.result} in the order of the {self.order})"

    def promised(self, backend: str, rung: str | None) -> bool:
        """Whether a rung of a backend keeps the order."""
        return backend in self.backends and (backend not in KERNELS or self.rungs is None or rung in self.rungs)


ALL = ("numpy", "numba", *KERNELS)
SUMS = (
    Sum("combine", "out", "slots", _combine, ALL),
    Sum("combine", "d_gates", "columns", _gate_gradient_of_combine, KERNELS),
    Sum("expert_up", "d_x", "slots", _input_gradient, ("numba", *KERNELS)),
    Sum("expert_up", "d_x", "experts", _input_gradient_by_expert, ("numpy",)),
    Sum("expert_up", "a", "depth", _up_product, KERNELS, ONE_BY_ONE),
    Sum("expert_up", "d_w1", "rows", _up_weights, KERNELS, ONE_BY_ONE),
    Sum("expert_down", "out", "experts", _summed_output, ("numpy", *KERNELS), ("as_printed",)),
    Sum("expert_down", "y", "depth", _down_product, KERNELS, ONE_BY_ONE),
    Sum("expert_down", "d_a", "columns", _hidden_gradient, KERNELS, ONE_BY_ONE),
    Sum("expert_down", "d_gates", "depth", _gate_gradient, KERNELS, ONE_BY_ONE),
    Sum("expert_down", "d_w3", "rows", _down_weights, KERNELS, ONE_BY_ONE),
    Sum("block_sparse", "out", "slots", lambda *given: _scatter(*given, weighted=True), ALL),
    Sum("block_sparse", "d_x", "slots", lambda *given: _scatter(*given, weighted=False), ALL),
    Sum("block_sparse", "sdd", "depth", _sdd, KERNELS, ONE_BY_ONE),
    Sum("block_sparse", "dsd", "depth", _dsd, KERNELS, ONE_BY_ONE),
    Sum("block_sparse", "dds", "rows", _dds, KERNELS, ONE_BY_ONE),
    Sum("capacity", "out", "slots", _capacity_scatter, ("numpy",)),
)


def promises(stage: str, backend: str, rung: str | None) -> list[Sum]:
    """The sums of a stage whose order a rung of a backend keeps."""
    return [one for one in SUMS if one.stage == stage and one.promised(backend, rung)]


def cast_to(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """What gives contiguous arrays of a dtype, which kernels take."""
    return lambda array: np.ascontiguousarray(array, dtype)


def differing_bits(one: Sum, stage: Any, dtype: str) -> int:
    """Elements of which a stage's bits are not those of the sum in its order."""
    found, terms = one.run(stage, cast_to(dtype))
    wanted = in_order(terms).astype(found.dtype)
    bits = f"u{found.dtype.itemsize}"
    return int((np.ascontiguousarray(found).view(bits) != wanted.view(bits)).sum())


def dtypes_that_tell(dtypes: tuple[str, ...]) -> Iterator[str]:
    """Those in which a small number is lost beside a large one: not float64."""
    return (dtype for dtype in dtypes if dtype != "float64")
