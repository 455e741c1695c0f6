"""What a block-sparse stage must do, of any backend: structures written out by hand, products, rows, a layer."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeblaze_ref.backends.numpy_ref import block_sparse as reference
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import sparse_contracts
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.structures import PaddedBins, Topology
from moeblaze_ref.nn import oracle
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import relative_error


class Pace(NamedTuple):
    """How many random inputs a backend is given, and how large they are."""

    examples: int
    most: int  # block rows and columns
    steps: int  # of the extent that no block divides


PACES = {"numpy": Pace(40, 6, 20), "simt": Pace(8, 3, 5), "cuda": Pace(20, 6, 40)}
PACES["numba"] = PACES["cuda"] if cuda_device_count() else Pace(25, 3, 3)


class Run(NamedTuple):
    """A version of a backend, what it computes in, block sizes to try, and what every other extent is a multiple of."""

    backend: str
    version: str | None
    dtype: str
    blocks: tuple[int, ...]
    step: int = 1

    def __str__(self):
        return "-".join(filter(None, (self.backend, self.version, self.dtype)))

    def open(self):
        """The stage as functions of numpy arrays, its outputs poisoned before they are written."""
        return BACKENDS[self.backend].open("block_sparse", self.version)

    @property
    def pace(self):
        """That of the backend."""
        return PACES[self.backend]

    @property
    def examples(self):
        """Hypothesis settings: how many random inputs are tried."""
        return settings(deadline=None, max_examples=self.pace.examples)

    def extents(self):
        """Hypothesis strategy: an extent that no block divides."""
        return st.integers(1, self.pace.steps).map(lambda n: n * self.step)


def int32(values):
    return np.array(values, np.int32)


def assert_same(found, expected):
    """Structures of the same numbers, whose arrays are equal, of int32 and contiguous."""
    assert type(found) is type(expected) and found.block == expected.block
    for name, array in expected.arrays().items():
        built = found.arrays()[name]
        assert built.dtype == np.int32 and built.flags.c_contiguous, name
        np.testing.assert_array_equal(built, array, err_msg=name)


# ---- golden structures ---------------------------------------------------------------------
#
# Written out from the definition (MegaBlocks, sections 5.1 and 5.2). The block-sparse library of its authors says
# offsets for row_offsets, offsets_t for column_offsets, block_offsets_t for transpose_indices.


class Golden(NamedTuple):
    """A routing, a block size and a width, and the structures that belong to them."""

    topk_experts: list
    E: int
    block: int
    h: int
    padded_offsets: list
    slots: list
    rows: list
    row_offsets: list
    column_indices: list
    row_indices: list
    column_offsets: list
    transpose_indices: list

    @property
    def k(self):
        return np.shape(self.topk_experts)[1]

    @property
    def dispatch(self):
        return build_by_sort(int32(self.topk_experts).reshape(-1, self.k), self.E)

    def expected(self):
        """Bins and topology."""
        arrays = [(name, int32(value)) for name, value in self._asdict().items()]
        bins, topology = dict(arrays[4:7]), dict(arrays[7:])
        return PaddedBins(**bins, k=self.k, block=self.block), Topology(**topology, block=self.block)


GOLDEN = {
    "ragged groups, an empty expert in the middle": Golden(
        topk_experts=[[2], [0], [0], [3], [0]],
        E=4,
        block=2,
        h=4,
        padded_offsets=[0, 4, 4, 6, 8],
        slots=[1, 2, 4, -1, 0, -1, 3, -1],
        rows=[4, 0, 1, 6, 2],
        # expert    0     1     2     3
        #        [ 0 1 | . . | . . | . . ]
        #        [ 2 3 | . . | . . | . . ]
        #        [ . . | . . | 4 5 | . . ]
        #        [ . . | . . | . . | 6 7 ]
        row_offsets=[0, 2, 4, 6, 8],
        column_indices=[0, 1, 0, 1, 4, 5, 6, 7],
        row_indices=[0, 0, 1, 1, 2, 2, 3, 3],
        column_offsets=[0, 2, 4, 4, 4, 5, 6, 7, 8],
        transpose_indices=[0, 2, 1, 3, 4, 5, 6, 7],
    ),
    "three blocks wide, k = 1": Golden(
        topk_experts=[[0], [1], [0], [0], [1]],
        E=2,
        block=2,
        h=6,
        padded_offsets=[0, 4, 6],
        slots=[0, 2, 3, -1, 1, 4],
        rows=[0, 4, 1, 2, 5],
        # [ 0 1 2 | . . . ]
        # [ 3 4 5 | . . . ]
        # [ . . . | 6 7 8 ]
        row_offsets=[0, 3, 6, 9],
        column_indices=[0, 1, 2, 0, 1, 2, 3, 4, 5],
        row_indices=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        column_offsets=[0, 2, 4, 6, 7, 8, 9],
        transpose_indices=[0, 3, 1, 4, 2, 5, 6, 7, 8],
    ),
    "first and last expert empty": Golden(
        topk_experts=[[1, 2], [2, 1], [1, 2]],
        E=4,
        block=2,
        h=2,
        padded_offsets=[0, 0, 4, 8, 8],
        slots=[0, 3, 4, -1, 1, 2, 5, -1],
        rows=[0, 4, 5, 1, 2, 6],
        # [ . | 0 | . | . ]
        # [ . | 1 | . | . ]
        # [ . | . | 2 | . ]
        # [ . | . | 3 | . ]
        row_offsets=[0, 1, 2, 3, 4],
        column_indices=[1, 1, 2, 2],
        row_indices=[0, 1, 2, 3],
        column_offsets=[0, 0, 2, 4, 4],
        transpose_indices=[0, 1, 2, 3],
    ),
    "one expert with everything": Golden(
        topk_experts=[[2], [2], [2], [2], [2]],
        E=3,
        block=2,
        h=4,
        padded_offsets=[0, 0, 0, 6],
        slots=[0, 1, 2, 3, 4, -1],
        rows=[0, 1, 2, 3, 4],
        # [ . . | . . | 0 1 ]
        # [ . . | . . | 2 3 ]
        # [ . . | . . | 4 5 ]
        row_offsets=[0, 2, 4, 6],
        column_indices=[4, 5, 4, 5, 4, 5],
        row_indices=[0, 0, 1, 1, 2, 2],
        column_offsets=[0, 0, 0, 0, 0, 3, 6],
        transpose_indices=[0, 2, 4, 1, 3, 5],
    ),
    "groups of exactly one block": Golden(
        topk_experts=[[1], [0], [0], [1], [1], [0], [1], [0]],
        E=2,
        block=4,
        h=8,
        padded_offsets=[0, 4, 8],
        slots=[1, 2, 5, 7, 0, 3, 4, 6],
        rows=[4, 0, 1, 5, 6, 2, 7, 3],
        # [ 0 1 | . . ]
        # [ . . | 2 3 ]
        row_offsets=[0, 2, 4],
        column_indices=[0, 1, 2, 3],
        row_indices=[0, 0, 1, 1],
        column_offsets=[0, 1, 2, 3, 4],
        transpose_indices=[0, 1, 2, 3],
    ),
    "k = E": Golden(
        topk_experts=[[2, 0, 1], [0, 1, 2], [1, 2, 0]],
        E=3,
        block=2,
        h=4,
        padded_offsets=[0, 4, 8, 12],
        slots=[1, 3, 8, -1, 2, 4, 6, -1, 0, 5, 7, -1],
        rows=[8, 0, 4, 1, 5, 9, 6, 10, 2],
        # [ 0 1 | . . |  .  . ]
        # [ 2 3 | . . |  .  . ]
        # [ . . | 4 5 |  .  . ]
        # [ . . | 6 7 |  .  . ]
        # [ . . | . . |  8  9 ]
        # [ . . | . . | 10 11 ]
        row_offsets=[0, 2, 4, 6, 8, 10, 12],
        column_indices=[0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5],
        row_indices=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
        column_offsets=[0, 2, 4, 6, 8, 10, 12],
        transpose_indices=[0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11],
    ),
    "one expert, one block": Golden(
        topk_experts=[[0], [0], [0]],
        E=1,
        block=4,
        h=4,
        padded_offsets=[0, 4],
        slots=[0, 1, 2, -1],
        rows=[0, 1, 2],
        row_offsets=[0, 1],
        column_indices=[0],
        row_indices=[0],
        column_offsets=[0, 1],
        transpose_indices=[0],
    ),
    "no tokens": Golden(
        topk_experts=np.empty((0, 2)),
        E=3,
        block=2,
        h=4,
        padded_offsets=[0, 0, 0, 0],
        slots=[],
        rows=[],
        row_offsets=[0],
        column_indices=[],
        row_indices=[],
        column_offsets=[0, 0, 0, 0, 0, 0, 0],
        transpose_indices=[],
    ),
}

# Of no layer: an empty block row, an empty block column.
# [ . 0 . 1 ]
# [ . . . . ]
# [ 2 3 . 4 ]
MASK = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
TOPOLOGY = Topology(
    row_offsets=int32([0, 2, 2, 5]),
    column_indices=int32([1, 3, 0, 1, 3]),
    row_indices=int32([0, 0, 2, 2, 2]),
    column_offsets=int32([0, 1, 3, 3, 5]),
    transpose_indices=int32([2, 0, 3, 1, 4]),
    block=2,
)


def assert_golden(stage, golden):
    bins, topology = golden.expected()
    found = stage.pad(golden.dispatch, golden.block)
    assert found.k == golden.k
    assert_same(found, bins)
    assert_same(stage.build_topology(bins, golden.h), topology)


# ---- random structures ---------------------------------------------------------------------


@st.composite
def masks(draw, most=6):
    """Which blocks are stored: none, all or some, of matrices without rows or columns, too."""
    shape = draw(st.tuples(st.integers(0, most), st.integers(0, most)))
    density = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).random(shape) < density


def mask_of(topology):
    """Which blocks a topology stores."""
    mask = np.zeros([extent // topology.block for extent in topology.shape], bool)
    mask[topology.row_indices, topology.column_indices] = True
    return mask


def assert_structures(stage, routing, block, wide):
    """Bins and topology are what a routing, a block size and the blocks of an expert's width say."""
    topk_experts, E = routing
    bins = stage.pad(build_by_sort(topk_experts, E), block)
    sparse_contracts.check_bins(bins)
    lengths, padded = np.bincount(topk_experts.ravel(), minlength=E), np.diff(bins.padded_offsets)
    assert ((padded - lengths >= 0) & (padded - lengths < block)).all()
    expert_of_row = np.repeat(np.arange(E), padded)
    np.testing.assert_array_equal(expert_of_row[bins.rows], topk_experts.ravel())
    topology = stage.build_topology(bins, wide * block)
    assert_same(topology, reference.topology_of(mask_of(topology), block))
    expert_of_block_row, expert_of_column = expert_of_row[::block], np.repeat(np.arange(E), wide)
    np.testing.assert_array_equal(mask_of(topology), expert_of_block_row[:, None] == expert_of_column)


# ---- products ------------------------------------------------------------------------------


def positive(seed, shape, dtype):
    """Numbers in [0.5, 1.5], of which no sum cancels: an error is as small, relatively, in one as in many."""
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(dtype)


def matrix(seed, rows, columns, dtype):
    """A dense operand, so small that sums over its rows or columns are of order 1."""
    return (positive(seed, (rows, columns), np.float64) / max(rows, columns, 1)).astype(dtype)


def dense_of(values, topology):
    """The matrix of the blocks, one after the other."""
    block, dense = topology.block, np.zeros(topology.shape, values.dtype)
    for value, row, column in zip(values, topology.row_indices, topology.column_indices, strict=True):
        dense[row * block : (row + 1) * block, column * block : (column + 1) * block] = value
    return dense


def as_given(dense, transposed):
    """What a product that transposes its operand is given for a matrix."""
    return np.ascontiguousarray(dense.T) if transposed else dense


def in_parts(dense, parts):
    """(rows, parts n) as (parts, rows, n)."""
    return np.stack(np.split(dense, parts, axis=1))


def assert_agrees(dtype, found, product, *operands):
    """``found`` is what a function of torch tensors makes of the operands, in float64, within the dtype's bound."""
    assert found.dtype == dtype
    exact, baseline = (
        product(*(torch.tensor(np.asarray(operand, np.float64)).to(kind) for operand in operands)).double().numpy()
        for kind in (torch.float64, getattr(torch, dtype))
    )
    error, bound = comparisons.compare({"result": found}, {"result": exact}, dtype, {"result": baseline})
    assert error <= bound, (error, bound)


class Sparse(NamedTuple):
    """A block-sparse matrix (M, N), and the extent K of a product that it does not have."""

    topology: Topology
    values: np.ndarray
    K: int

    @property
    def dense(self):
        return dense_of(self.values, self.topology)

    @property
    def extents(self):
        return *self.topology.shape, self.K

    @property
    def dtype(self):
        return self.values.dtype.name


def sparse_of(mask, block, K, dtype):
    """A matrix that stores the blocks of a mask."""
    topology = reference.topology_of(mask, block)
    return Sparse(topology, positive(1, (topology.nnz, block, block), dtype), K)


@st.composite
def sparse_matrices(draw, run):
    """Any mask, in every block size of a run."""
    return sparse_of(draw(masks(run.pace.most)), draw(st.sampled_from(run.blocks)), draw(run.extents()), run.dtype)


def masked_product(lhs, rhs, stored):
    return lhs @ rhs * stored


def assert_round_trip(stage, one):
    dense = stage.to_dense(one.values, one.topology)
    assert dense.dtype == one.dtype
    np.testing.assert_array_equal(dense, one.dense)
    back = stage.from_dense(positive(2, dense.shape, one.dtype), one.topology)
    stored = dense_of(np.ones_like(one.values), one.topology)
    assert back.dtype == one.dtype and back.flags.c_contiguous
    np.testing.assert_array_equal(dense_of(back, one.topology), stored * positive(2, dense.shape, one.dtype))
    np.testing.assert_array_equal(stage.from_dense(dense, one.topology), one.values)


def assert_sdd(stage, one, parts=1):
    M, N, K = one.extents
    lhs, rhs = matrix(2, M, K, one.dtype), matrix(3, K, N, one.dtype)
    given = {False: [rhs, in_parts(rhs, parts)], True: [as_given(rhs, True)]}
    stored = dense_of(np.ones_like(one.values), one.topology)
    for transposed, forms in given.items():
        for form in forms:
            values = stage.sdd(lhs, form, one.topology, transpose_rhs=transposed)
            assert values.shape == one.values.shape
            assert_agrees(one.dtype, dense_of(values, one.topology), masked_product, lhs, rhs, stored)


def assert_dsd(stage, one, parts=1):
    for transpose_lhs in (False, True):
        lhs = as_given(one.dense, transpose_lhs)
        rhs = matrix(2, lhs.shape[1], one.K, one.dtype)
        for transpose_rhs in (False, True):
            given = as_given(rhs, transpose_rhs)
            has_the_columns = transpose_rhs and not transpose_lhs
            for form in [given, in_parts(given, parts)] if has_the_columns else [given]:
                found = stage.dsd(one.values, one.topology, form, transpose_lhs, transpose_rhs)
                assert_agrees(one.dtype, found, torch.matmul, lhs, rhs)


def assert_dds(stage, one, parts=1):
    M, _, K = one.extents
    lhs = matrix(2, K, M, one.dtype)
    for transpose_lhs in (False, True):
        found = stage.dds(as_given(lhs, transpose_lhs), one.values, one.topology, transpose_lhs, parts)
        assert found.shape[0] == parts and found.flags.c_contiguous
        assert_agrees(one.dtype, np.concatenate(found, axis=1), torch.matmul, lhs, one.dense)


PRODUCTS = {"sdd": assert_sdd, "dsd": assert_dsd, "dds": assert_dds}


def assert_any_mask(product, run, most_parts):
    """A product agrees with the dense one whatever is stored (of SDD, where it is), in up to so many parts."""

    @run.examples
    @given(masks(run.pace.most), st.sampled_from(run.blocks), st.integers(1, most_parts), run.extents())
    def check(mask, block, parts, K):
        PRODUCTS[product](run.open(), sparse_of(np.tile(mask, parts), block, K, run.dtype), parts)

    check()


# ---- rows into bins and back -----------------------------------------------------------------


def gather_in_torch(x, gates, selection):
    """(P, d) of x (L, d) and gates (L, k), by the matrix (R, P) that says which row holds which slot."""
    return selection.T @ (gates[:, :, None] * x[:, None, :]).reshape(-1, x.shape[1])


def scatter_in_torch(y, gates, selection):
    """(L, d) of y (P, d) and gates (L, k)."""
    return (gates[:, :, None] * (selection @ y).reshape(*gates.shape, y.shape[1])).sum(dim=1)


def gate_gradient_in_torch(d_out, y, selection, gates):
    """(L, k), by autograd."""
    leaf = gates.clone().requires_grad_()
    return torch.autograd.grad(scatter_in_torch(y, leaf, selection), leaf, d_out)[0]


def assert_rows(stage, dispatch, block, d, dtype):
    bins = reference.pad(dispatch, block)
    selection = bins.rows[:, None] == np.arange(bins.P)  # (R, P)
    x, y = positive(1, (bins.L, d), dtype), positive(2, (bins.P, d), dtype)
    gates, ones = positive(3, (bins.L, bins.k), np.promote_types(dtype, np.float32)), np.ones((bins.L, bins.k))
    assert_agrees(dtype, stage.padded_gather(x, bins), gather_in_torch, x, ones, selection)
    assert_agrees(dtype, stage.padded_gather(x, bins, gates), gather_in_torch, x, gates, selection)
    assert_agrees(dtype, stage.padded_scatter(y, bins), scatter_in_torch, y, ones, selection)
    assert_agrees(dtype, stage.padded_scatter(y, bins, gates), scatter_in_torch, y, gates, selection)
    found = stage.gate_gradient(x, y, bins)
    assert_agrees(gates.dtype.name, found, gate_gradient_in_torch, x, y, selection, gates)


# ---- activation and layer --------------------------------------------------------------------


def assert_activation(stage, activation, nnz, block, dtype):
    rng = np.random.default_rng(0)
    a, b, d_y_swi = rng.standard_normal((3, nnz, block, block)).astype(dtype)
    b = b if is_gated(activation) else None
    inputs = [a] if b is None else [a, b]

    def forward(a, b=None):
        return oracle.activate(a, b, activation)

    def gradient(which):
        def backward(d_y_swi, *inputs):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            return torch.autograd.grad(forward(*leaves), leaves, d_y_swi)[which]

        return backward

    assert_agrees(dtype, stage.activate(a, b, activation), forward, *inputs)
    found = stage.activate_backward(d_y_swi, a, b, activation)
    assert (found[1] is None) == (b is None)
    for which in range(len(inputs)):
        assert_agrees(dtype, found[which], gradient(which), d_y_swi, *inputs)


def forward(stage, case, block):
    """The output of a case's experts, and what the forward saved."""
    dispatch, gates = build_by_sort(case.topk_experts, case.E), comparisons.gates_of(case)
    return stage.forward(case.x, *case.weights[1:], dispatch, gates, case.activation, block)


def backward(stage, case, saved):
    """Every gradient."""
    return stage.backward(case.d_out, saved, *case.weights[1:])


def take_step(stage, case, block):
    """The experts' output and every gradient by name, and what the forward saved."""
    out, saved = forward(stage, case, block)
    return {"out": out} | backward(stage, case, saved)._asdict(), saved


def run_layer(stage, case, block):
    """The experts' output and every gradient by name."""
    return take_step(stage, case, block)[0]


def assert_layer_as_specified(stage, case, block, dtype):
    """The layer gives, and saves, what the specification does in float64."""
    case = case.astype(dtype)
    found, saved = take_step(stage, case, block)
    truth, expected = take_step(reference, case.astype(np.float64), block)
    assert_same(saved.bins, expected.bins)
    assert_same(saved.topology, expected.topology)
    found, truth = found | saved.floats(), truth | expected.floats()
    assert found.keys() == truth.keys()
    for name, exact in truth.items():
        assert (found[name] is None) == (exact is None), name
        if exact is not None:
            assert found[name].dtype == dtype, name
            assert relative_error(found[name], exact) <= comparisons.BOUNDS[dtype], name


def expect_layer(case, dtype):
    """As `run_layer`, by autograd; without what an ungated layer lacks."""
    expected = comparisons.expect_experts(case, dtype)
    return expected["forward"] | expected["backward"]


def assert_layer(stage, case, block, dtype):
    case = case.astype(dtype)
    found = run_layer(stage, case, block)
    assert (found["d_w2"] is None) != is_gated(case.activation)
    exact, baseline = (expect_layer(case, kind) for kind in (torch.float64, getattr(torch, dtype)))
    for name, truth in exact.items():
        error, bound = comparisons.compare({name: found[name]}, {name: truth}, dtype, baseline)
        assert error <= bound, (name, error, bound)


def with_activation(case, activation):
    """The same numbers under another activation."""
    weights = case.weights if is_gated(activation) else case.weights._replace(w2=None)
    return replace(case, activation=activation, weights=weights)


def checks_of(dispatch, block, d, h, dtype):
    """Checks of a stage with the structures of one dispatch, by what they check: {name: function of the stage}."""
    bins = reference.pad(dispatch, block)
    topology = reference.build_topology(bins, h)
    one = sparse_of(mask_of(topology), block, d, dtype)

    def structures(stage):
        assert_same(stage.pad(dispatch, block), bins)
        assert_same(stage.build_topology(bins, h), topology)

    return {
        "structures": structures,
        **{name: partial(check, one=one, parts=dispatch.E) for name, check in PRODUCTS.items()},
        "rows": partial(assert_rows, dispatch=dispatch, block=block, d=d, dtype=dtype),
        "activation": partial(assert_activation, activation="swiglu", nnz=topology.nnz, block=block, dtype=dtype),
    }
