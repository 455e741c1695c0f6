"""MegaBlocks' stage in every backend: structures written out by hand, products against dense ones, the layer."""

import weakref
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import Shape, changed, routings
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Planted, Quick, numba_with_fault, opened_raw, without_barrier
from simulator import counted_launches, kernels_as_stated, only_simulated
from sparse_cases import (
    GOLDEN,
    MASK,
    PRODUCTS,
    TOPOLOGY,
    Run,
    as_given,
    assert_activation,
    assert_any_mask,
    assert_golden,
    assert_layer,
    assert_layer_as_specified,
    assert_round_trip,
    assert_rows,
    assert_same,
    assert_structures,
    backward,
    checks_of,
    forward,
    in_parts,
    int32,
    mask_of,
    masks,
    matrix,
    positive,
    run_layer,
    sparse_matrices,
    sparse_of,
    with_activation,
)
from stages import all_zeros, alter, without_the_last

from moeblaze_ref.backends.numba_cuda import block_sparse as numba_block_sparse
from moeblaze_ref.backends.numba_cuda import combine, runtime
from moeblaze_ref.backends.numba_cuda import dispatch as numba_dispatch
from moeblaze_ref.backends.numpy_ref import block_sparse as reference
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import block_sparse as raw
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import sparse_contracts
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.core.kernel_headers import evaluate, table
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.core.structures import EMPTY, IndexArrays
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.systems import megablocks
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case, random_topk, relative_error, standard_cases

RUNS = [  # what needs no GPU; the executor compiles anew for every block size
    Run("numpy", None, "float64", (1, 2, 3, 8)),
    Run("numpy", None, "float32", (1, 2, 3, 8)),
    Run("simt", "1_naive", "float32", (1, 8)),
    Run("simt", "2_tiled", "float32", (1, 3, 8)),
    Run("simt", "3_mma", "bfloat16", (8,), step=8),
    Run("simt", "3_mma", "float16", (8,), step=8),
    Run("simt", "7_persistent", "bfloat16", (128,), step=8),
    Run("simt", "7_persistent", "float16", (128,), step=8),
    Run("numba", None, "float32", (1, 2)),
]
SPECIFICATION, TILED, NUMBA = RUNS[0], RUNS[3], RUNS[-1]
ROOMS = [SPECIFICATION, TILED, NUMBA]  # for what all versions share: the structures and the checks

every_run = pytest.mark.parametrize("run", RUNS, ids=str)
every_room = pytest.mark.parametrize("run", ROOMS, ids=str)
specification = pytest.mark.parametrize("run", RUNS[:2], ids=str)


@every_room
@pytest.mark.parametrize("name", GOLDEN)
def test_structures_of_routings_by_hand(name, run):
    assert_golden(run.open(), GOLDEN[name])


def test_the_topology_of_a_mask_by_hand():
    assert_same(reference.topology_of(MASK, 2), TOPOLOGY)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_checks_let_right_structures_pass(name):
    bins, topology = GOLDEN[name].expected()
    sparse_contracts.check_bins(bins)
    sparse_contracts.check_topology(topology)


@every_room
@pytest.mark.parametrize("integer", [np.int64, np.int8, np.uint8])
def test_a_block_size_may_be_an_integer_of_numpy(integer, run):
    stage, golden = run.open(), GOLDEN["k = E"]
    bins = stage.pad(golden.dispatch, integer(2))
    assert type(bins.block) is int
    assert_same(stage.build_topology(bins, np.int32(4)), golden.expected()[1])


# ---- random structures ---------------------------------------------------------------------


@SPECIFICATION.examples
@given(mask=masks(), block=st.sampled_from(SPECIFICATION.blocks))
def test_transpose_indices_visit_the_blocks_of_the_transpose_row_by_row(mask, block):
    topology = reference.topology_of(mask, block)
    sparse_contracts.check_topology(topology)
    of_transpose = np.argwhere(mask.T)  # (nnz, 2), row by row
    order = topology.transpose_indices
    visited = np.stack([topology.column_indices[order], topology.row_indices[order]], axis=1)
    np.testing.assert_array_equal(visited, of_transpose)
    np.testing.assert_array_equal(np.diff(topology.column_offsets), mask.sum(axis=0))
    np.testing.assert_array_equal(np.diff(topology.row_offsets), mask.sum(axis=1))
    np.testing.assert_array_equal(np.stack([topology.row_indices, topology.column_indices], axis=1), np.argwhere(mask))


@every_room
def test_bins_and_topology_of_random_routings(run):
    @run.examples
    @given(routings(40, 7), st.sampled_from(run.blocks), st.integers(1, 3))
    def check(routing, block, wide):
        assert_structures(run.open(), routing, block, wide)

    check()


# ---- products ------------------------------------------------------------------------------


@specification
@SPECIFICATION.examples
@given(data=st.data())
def test_a_matrix_comes_back_from_its_dense_form(run, data):
    assert_round_trip(run.open(), data.draw(sparse_matrices(run)))


@every_run
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("parts", [1, 4], ids=["whole", "in parts"])
def test_every_product_is_the_dense_one(parts, product, run):
    assert_any_mask(product, run, parts)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "run",
    [
        Run("simt", "1_naive", "bfloat16", (20,)),
        Run("simt", "2_tiled", "float16", (72,)),
        Run("simt", "3_mma", "bfloat16", (136,), step=8),
        Run("simt", "7_persistent", "bfloat16", (256,), step=8),
    ],
    ids=str,
)
def test_blocks_larger_than_a_tile(product, run):
    PRODUCTS[product](run.open(), sparse_of(MASK, run.blocks[0], run.blocks[0], run.dtype), 2)


@every_run
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (0, 0)], ids=str)
def test_a_matrix_that_stores_nothing(product, shape, run):
    PRODUCTS[product](run.open(), sparse_of(np.zeros(shape, bool), run.blocks[-1], run.step, run.dtype))


# ---- rows into bins and back -----------------------------------------------------------------


@every_run
def test_gather_scatter_and_the_gradient_of_the_gates(run):
    @run.examples
    @given(routings(30, 7), st.sampled_from(run.blocks), st.integers(1, 9))
    def check(routing, block, d):
        assert_rows(run.open(), build_by_sort(*routing), block, run.step * d, run.dtype)

    check()


# ---- activation and layer --------------------------------------------------------------------


@every_run
@pytest.mark.parametrize("nnz", [0, 1, 7])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_of_every_stored_value(activation, nnz, run):
    assert_activation(run.open(), activation, nnz, run.blocks[-1], run.dtype)


EXTREMES = [
    make_case(13, 8, 16, 4, 2, "zipf", "several experts"),
    make_case(5, 1, 1, 1, 1, name="E = d = h = 1"),
    make_case(1, 1, 3, 2, 2, name="one token, d = 1"),
    make_case(0, 1, 1, 1, 1, name="no tokens, E = d = h = 1"),
    make_case(7, 3, 5, 3, 3, name="odd widths"),
]


def layers():
    """Yield (run, case, block size) of each layer to compare with autograd."""
    for run, case in product(RUNS[:2], standard_cases()):
        yield from ((run, case, block) for block in (4, 8, case.weights.w1.shape[2]))
    small = [case for case in standard_cases() if case.L < 20]  # the cross-check runs the others
    for run in (run for run in RUNS if run.backend == "simt"):
        cases = comparisons.extended("block_sparse", run.version, small)
        yield from ((run, case, comparisons.block_of(case)) for case in cases)
    ragged = make_case(37, 8, 16, 5, 3, "empty", "ragged groups")
    for activation in ACTIVATIONS:
        yield TILED, with_activation(ragged, activation), 8
        for case in standard_cases():
            yield SPECIFICATION, with_activation(case, activation), case.weights.w1.shape[2]
    yield from ((run, case, 1) for run in RUNS if 1 in run.blocks for case in EXTREMES)


@pytest.mark.parametrize(
    ("run", "case", "block"),
    [
        pytest.param(run, case, block, id=f"{run}-{case.name}-{case.activation}-blocks of {block}")
        for run, case, block in layers()
    ],
)
def test_the_layer_agrees_with_autograd(run, case, block):
    assert_layer(run.open(), case, block, run.dtype)


@every_run
def test_a_second_backward_gives_the_same_bits_from_what_the_first_left_as_it_was(run):
    stage, block = run.open(), run.blocks[-1]
    case = make_case(37, 8, 2 * block, 5, 3, "zipf").astype(run.dtype)
    _, saved = forward(stage, case, block)
    kept = {name: np.array(tensor) for name, tensor in saved.tensors().items()}
    assert {"gates", "x_rows", "a", "b", "y_swi", "y", "slots", "transpose_indices"} <= kept.keys()
    first, second = (backward(stage, case, saved) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    for name, tensor in saved.tensors().items():
        np.testing.assert_array_equal(np.array(tensor), kept[name], err_msg=name)


def release(case, saved, stage=reference):
    return megablocks.backward(stage, case.d_out, saved, *case.weights[1:], release=True)


def test_giving_up_changes_no_bit_and_a_second_backward_raises():
    case = make_case(37, 8, 16, 5, 3, "zipf")
    _, saved = forward(reference, case, 8)
    expected, found = backward(reference, case, saved), release(case, saved)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(RuntimeError, match="an earlier backward has released what the forward kept"):
        backward(reference, case, saved)
    assert saved.tensors().keys() == saved.bins.arrays().keys() | saved.topology.arrays().keys()


# What is alive as each step of a backward begins; x_rows is read to the end.
ALIVE = {
    "gate_gradient": ("gates", "x_rows", "a", "b", "y_swi", "y"),
    "padded_gather": ("gates", "x_rows", "a", "b", "y_swi"),
    "dsd of d_w3": ("x_rows", "a", "b", "y_swi", "d_y"),
    "sdd": ("x_rows", "a", "b", "d_y"),
    "activate_backward": ("x_rows", "a", "b", "d_y_swi"),
    "dsd of d_x through d_a": ("x_rows", "d_a", "d_b"),
    "dsd of d_x through d_b": ("x_rows", "d_a", "d_b"),
    "padded_scatter": ("x_rows", "d_a", "d_b"),
    "dds of d_w1": ("x_rows", "d_a", "d_b"),
    "dds of d_w2": ("x_rows", "d_b"),
}
BORN = {"padded_gather": ("d_y",), "sdd": ("d_y_swi",), "activate_backward": ("d_a", "d_b")}


def test_every_buffer_dies_after_its_last_use():
    case, seen = make_case(37, 8, 16, 5, 3, "zipf"), []
    _, saved = forward(reference, case, 8)
    born = {name: weakref.ref(array) for name, array in saved.floats().items()}

    def watched(name):
        def step(*arguments, **options):
            seen.append((name, {each for each, array in born.items() if array() is not None}))
            result = getattr(reference, name)(*arguments, **options)
            results = result if isinstance(result, tuple) else (result,)
            born.update(zip(BORN.get(name, ()), map(weakref.ref, results), strict=False))
            return result

        return step

    names = dict.fromkeys(name.split()[0] for name in ALIVE)
    gradients = release(case, saved, SimpleNamespace(**{name: watched(name) for name in names}))
    assert seen == [(name.split()[0], set(alive)) for name, alive in ALIVE.items()]
    assert all(array() is None for array in born.values()) and len(gradients) == 5


# ---- structures that contradict themselves ---------------------------------------------------

BINS = GOLDEN["ragged groups, an empty expert in the middle"].expected()[0]
# Of BINS: row             0  1  2  3  4  5  6  7
#          slots           1  2  4  .  0  .  3  .    padded_offsets 0 4 4 6 8
#          rows            4  0  1  6  2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padded_offsets": {0: 2}}, r"padded_offsets\[0\] is 2, but it must be 0 \(P is 8\)"),
        ({"padded_offsets": {4: 6}}, r"padded_offsets\[4\] is 6, but it must be 8 \(P is 8\)"),
        ({"padded_offsets": {1: 6}}, r"padded_offsets\[2\] is 4, but padded_offsets\[1\] is 6 and offsets never"),
        ({"padded_offsets": {3: 7}}, r"padded_offsets\[3\] is 7, but it must be a multiple of the block size 2"),
        ({"padded_offsets": {2: 8}}, r"padded_offsets\[3\] is 6, but padded_offsets\[2\] is 8"),
        ({"rows": {0: 8}}, r"rows\[0\] is 8, but there are only 8 padded rows \(valid: 0..7\)"),
        ({"rows": {3: -1}}, r"rows\[3\] is -1, but there are only 8 padded rows"),
        ({"rows": {2: 0}}, r"rows\[2\] is 0, but slots\[0\] is 1: it must be 2"),
        ({"rows": {0: 3}}, r"rows\[0\] is 3, but slots\[3\] is -1: it must be 0"),
        ({"slots": {0: -1}}, r"rows\[1\] is 0, but slots\[0\] is -1: it must be 1"),
        ({"slots": {3: 0}}, r"slots\[3\] is 0, but rows leads no slot there: it must be -1"),
        ({"slots": {7: 99}}, r"slots\[7\] is 99, but rows leads no slot there: it must be -1"),
        ({"slots": {5: -2}}, r"slots\[5\] is -2, but rows leads no slot there"),
        ({"slots": {0: 2, 1: 1}, "rows": {1: 1, 2: 0}}, r"slots\[1\] is 1, but slots\[0\] is 2 of the same expert"),
        ({"slots": {2: -1, 3: 4}, "rows": {4: 3}}, r"slots\[3\] is 4, but slots\[2\] is -1 .* padding \(-1\) last"),
    ],
)
def test_bins_that_contradict_themselves(changes, message):
    with pytest.raises(ValueError, match=message):
        sparse_contracts.check_bins(changed(BINS, changes))


@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"rows": BINS.rows[:-1]}, ValueError, r"slots\[2\] is 4, but rows leads no slot there"),
        ({"slots": BINS.slots[:-1]}, ValueError, r"padded_offsets\[4\] is 8, but it must be 7 \(P is 7\)"),
        ({"slots": BINS.slots[:0]}, ValueError, r"padded_offsets\[4\] is 8, but it must be 0 \(P is 0\)"),
        ({"padded_offsets": int32([])}, ValueError, "E, one less than the padded_offsets, is -1"),
        ({"padded_offsets": int32([0])}, ValueError, "E, one less than the padded_offsets, is 0"),
        ({"rows": BINS.rows.astype(np.int64)}, TypeError, "rows has dtype int64, but it must be int32"),
        ({"slots": BINS.slots.tolist()}, TypeError, "slots is a list, but it must be an array of int32"),
        ({"slots": BINS.slots[:, None]}, ValueError, r"slots has shape \(8, 1\), but it must have 1 dimensions"),
        ({"rows": BINS.rows[::-1]}, ValueError, "rows is not C-contiguous"),
        ({"k": 2}, ValueError, "R = 5 routed rows, but R must be a multiple of k = 2"),
        ({"k": 0}, ValueError, "bins.k is 0, but it must be >= 1"),
        ({"block": 0}, ValueError, "block is 0, but it must be >= 1"),
        ({"block": 2.0}, TypeError, r"block is 2.0 \(float\), but it must be an integer"),
        ({"block": 4}, ValueError, r"padded_offsets\[3\] is 6, but it must be a multiple of the block size 4"),
    ],
)
def test_bins_of_a_wrong_kind(replaced, error, message):
    with pytest.raises(error, match=message):
        sparse_contracts.check_bins(replace(BINS, **replaced))


# Of TOPOLOGY: block               0  1  2  3  4
#                     column_indices      1  3  0  1  3    column_offsets 0 1 3 3 5
#                     row_indices         0  0  2  2  2    row_offsets    0 2 2 5
#                     transpose_indices   2  0  3  1  4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_offsets": {0: 1}}, r"row_offsets\[0\] is 1, but it must be 0 \(nnz is 5\)"),
        ({"row_offsets": {3: 4}}, r"row_offsets\[3\] is 4, but it must be 5 \(nnz is 5\)"),
        ({"row_offsets": {1: 3}}, r"row_offsets\[2\] is 2, but row_offsets\[1\] is 3 and offsets never decrease"),
        ({"row_offsets": {1: 1}}, r"row_indices\[1\] is 0, but by row_offsets the blocks of block row 0 are 0..0"),
        ({"row_offsets": {1: 0}}, r"row_indices\[0\] is 0, but by row_offsets the blocks of block row 0 are none"),
        ({"row_indices": {4: 3}}, r"row_indices\[4\] is 3, but there are only 3 block rows \(valid: 0..2\)"),
        ({"row_indices": {0: -1}}, r"row_indices\[0\] is -1, but there are only 3 block rows"),
        ({"row_indices": {1: 1}}, r"row_indices\[1\] is 1, but by row_offsets the blocks of block row 1 are none"),
        ({"column_indices": {4: 4}}, r"column_indices\[4\] is 4, but there are only 4 block columns \(valid: 0..3\)"),
        ({"column_indices": {0: -1}}, r"column_indices\[0\] is -1, but there are only 4 block columns"),
        ({"column_indices": {2: 1, 3: 0}}, r"column_indices\[3\] is 0, but column_indices\[2\] is 1 in the same block"),
        ({"column_indices": {3: 3}}, r"column_indices\[4\] is 3, but column_indices\[3\] is 3 in the same block row"),
        (
            {"column_indices": {3: 2}},
            r"transpose_indices\[2\] is 3, a block of block column 2, .* that column are none",
        ),
        ({"column_offsets": {0: 1}}, r"column_offsets\[0\] is 1, but it must be 0 \(nnz is 5\)"),
        ({"column_offsets": {4: 6}}, r"column_offsets\[4\] is 6, but it must be 5 \(nnz is 5\)"),
        ({"column_offsets": {1: 4}}, r"column_offsets\[2\] is 3, but column_offsets\[1\] is 4"),
        ({"column_offsets": {1: 0}}, r"transpose_indices\[0\] is 2, .* column 0, but .* that column are none"),
        ({"column_offsets": {3: 4}}, r"transpose_indices\[3\] is 1, .* column 3, but .* that column are 4..4"),
        ({"transpose_indices": {1: 5}}, r"transpose_indices\[1\] is 5, but there are only 5 blocks \(valid: 0..4\)"),
        ({"transpose_indices": {1: -1}}, r"transpose_indices\[1\] is -1, but there are only 5 blocks"),
        ({"transpose_indices": {0: 0}}, r"transpose_indices\[0\] is 0, a block of block column 1, .* are 1..2"),
        ({"transpose_indices": {2: 1, 3: 3}}, r"transpose_indices\[2\] is 1, a block of block column 3, .* are 3..4"),
        (
            {"transpose_indices": {1: 3, 2: 0}},
            r"transpose_indices\[2\] is 0, a block of block row 0, but transpose_indices\[1\] is 3, of block row 2",
        ),
        (
            {"transpose_indices": {2: 0}},
            r"transpose_indices\[2\] is 0, .* but transpose_indices\[1\] is 0, of block row 0",
        ),
    ],
)
def test_a_topology_that_contradicts_itself(changes, message):
    with pytest.raises(ValueError, match=message):
        sparse_contracts.check_topology(changed(TOPOLOGY, changes))


@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"row_indices": int32([0, 0, 2, 2])}, ValueError, r"row_indices has shape \(4,\), but it must be \(nnz=5\)"),
        ({"transpose_indices": int32([0])}, ValueError, r"transpose_indices has shape \(1,\), .* \(nnz=5\)"),
        ({"column_indices": int32([1, 3, 0, 1])}, ValueError, r"row_offsets\[3\] is 5, but it must be 4 \(nnz is 4\)"),
        ({"row_offsets": int32([])}, ValueError, "the length of row_offsets is 0, but it must be >= 1"),
        ({"column_offsets": int32([])}, ValueError, "the length of column_offsets is 0, but it must be >= 1"),
        ({"row_offsets": int32([0])}, ValueError, r"row_offsets\[0\] is 0, but it must be 5 \(nnz is 5\)"),
        ({"row_offsets": np.array([0.0, 2, 2, 5])}, TypeError, "row_offsets has dtype float64, but it must be int32"),
        ({"column_indices": [1, 3, 0, 1, 3]}, TypeError, "column_indices is a list, but it must be an array of int32"),
        ({"column_indices": None}, TypeError, "column_indices is None, but it must be an array of int32"),
        ({"row_indices": int32([[0, 0, 2, 2, 2]])}, ValueError, r"row_indices has shape \(1, 5\), .* 1 dimensions"),
        ({"block": 0}, ValueError, "block is 0, but it must be >= 1"),
        ({"block": -2}, ValueError, "block is -2, but it must be >= 1"),
        ({"block": "2"}, TypeError, r"block is '2' \(str\), but it must be an integer"),
    ],
)
def test_a_topology_of_a_wrong_kind(replaced, error, message):
    with pytest.raises(error, match=message):
        sparse_contracts.check_topology(replace(TOPOLOGY, **replaced))


@st.composite
def corruptions(draw, structure):
    """A structure with up to three entries replaced, some far out of range."""
    names = st.sampled_from([name for name, array in structure.arrays().items() if array.size])
    corrupted = {}
    for name in draw(st.lists(names, min_size=1, max_size=3)):
        index = draw(st.integers(0, getattr(structure, name).size - 1))
        value = draw(st.one_of(st.integers(-2, 9), st.sampled_from([-(2**31), 2**31 - 1])))
        corrupted.setdefault(name, {})[index] = value
    return changed(structure, corrupted)


def refused(check, structure):
    """Whether a check names what is wrong; no other exception is an answer."""
    try:
        check(structure)
    except ValueError as error:
        assert "is" in str(error) and "[" in str(error)
        return True
    return False


@settings(deadline=None, max_examples=300)
@given(corruptions(TOPOLOGY))
def test_a_topology_that_passes_is_that_of_its_own_mask(topology):
    if not refused(sparse_contracts.check_topology, topology):
        assert_same(topology, reference.topology_of(mask_of(topology), topology.block))


@settings(deadline=None, max_examples=300)
@given(corruptions(BINS))
def test_bins_that_pass_hold_every_slot_once(bins):
    """An offset moved to another block is no contradiction: the bins of another routing are like that."""
    if not refused(sparse_contracts.check_bins, bins):
        assert_same(replace(bins, padded_offsets=BINS.padded_offsets), BINS)
        assert (np.diff(bins.padded_offsets) >= 0).all() and (bins.padded_offsets % bins.block == 0).all()


# ---- bad input of every function -------------------------------------------------------------

LAYER = make_case(5, 3, 4, 4, 1, "zipf")


def arguments(run, function):
    """What a function of the stage takes, by name and in order."""
    case, dtype, topology = LAYER.astype(run.dtype), run.dtype, TOPOLOGY  # (6, 8), of 5 blocks
    _, w1, w2, w3 = case.weights
    gates = positive(0, (BINS.L, BINS.k), np.promote_types(dtype, np.float32))
    values, a, b, d_y_swi = positive(0, (4, 5, 2, 2), dtype)
    dispatch = GOLDEN["ragged groups, an empty expert in the middle"].dispatch
    layer = {"x": case.x, "w1": w1, "w2": w2, "w3": w3, "dispatch": dispatch, "gates": gates}
    taken = {
        "pad": {"dispatch": dispatch, "block": 2},
        "build_topology": {"bins": BINS, "h": 4},
        "topology_of": {"mask": MASK, "block": 2},
        "to_dense": {"values": values, "topology": topology},
        "from_dense": {"dense": positive(0, (6, 8), dtype), "topology": topology},
        "padded_gather": {"x": positive(0, (5, 3), dtype), "bins": BINS, "gates": gates},
        "padded_scatter": {"y": positive(0, (8, 3), dtype), "bins": BINS, "gates": gates},
        "gate_gradient": {"d_out": positive(0, (5, 3), dtype), "y": positive(0, (8, 3), dtype), "bins": BINS},
        "sdd": {"lhs": positive(0, (6, 3), dtype), "rhs": positive(0, (3, 8), dtype), "topology": topology}
        | {"transpose_rhs": False},
        "dsd": {"values": values, "topology": topology, "rhs": positive(0, (8, 3), dtype)}
        | {"transpose_lhs": False, "transpose_rhs": False},
        "dds": {"lhs": positive(0, (3, 6), dtype), "values": values, "topology": topology}
        | {"transpose_lhs": False, "parts": 2},
        "activate": {"a": a, "b": b, "activation": "swiglu"},
        "activate_backward": {"d_y_swi": d_y_swi, "a": a, "b": b, "activation": "swiglu"},
        "forward": layer | {"activation": "swiglu", "block": 2},
    }
    if function == "backward":
        _, saved = run.open().forward(*layer.values(), "swiglu", 2)
        return {"d_out": case.d_out, "saved": saved, "w1": w1, "w2": w2, "w3": w3}
    return taken[function]


def with_nan(array):
    """The array with NaN in its last element."""
    broken = array.copy()
    broken[(-1,) * array.ndim] = np.nan
    return broken


FALLING = changed(TOPOLOGY, {"row_offsets": {1: 3}})
STRAY = changed(BINS, {"slots": {3: 0}})
UNALIGNED = changed(BINS, {"padded_offsets": {3: 7}})
OUTSIDE = changed(TOPOLOGY, {"column_indices": {4: 4}})
MISLED = changed(TOPOLOGY, {"transpose_indices": {0: 0}})

OF_THE_SPECIFICATION = ("topology_of", "to_dense", "from_dense")
FUNCTIONS = ("pad", "build_topology", "padded_gather", "padded_scatter", "gate_gradient", "sdd", "dsd", "dds")
FUNCTIONS += ("activate", "activate_backward", "forward", "backward")
IN_ROOMS = [(run, function) for run in ROOMS for function in FUNCTIONS]
IN_ROOMS += [(SPECIFICATION, function) for function in OF_THE_SPECIFICATION]
BAD_INPUT = [
    ("pad", {"block": 0}, ValueError, "block is 0, but it must be >= 1"),
    ("pad", {"block": 2.0}, TypeError, r"block is 2.0 \(float\), but it must be an integer"),
    ("pad", {"block": None}, TypeError, "block is None"),
    ("pad", {"block": 2**29 + 1}, ValueError, r"block is 536870913, but R \+ E \(block - 1\) = 2147483653 padded"),
    ("pad", {"block": 2**31}, ValueError, r"block is 2147483648, but R \+ E"),
    ("pad", {"dispatch": BINS}, TypeError, "dispatch is a PaddedBins, but it must be a Dispatch"),
    ("build_topology", {"h": 5}, ValueError, "h is 5, but it must be a multiple of the block size 2"),
    ("build_topology", {"h": 1}, ValueError, "h is 1, but it must be a multiple of the block size 2"),
    ("build_topology", {"h": 0}, ValueError, "h is 0, but it must be >= 1"),
    ("build_topology", {"h": 4.0}, TypeError, r"h is 4.0 \(float\), but it must be an integer"),
    ("build_topology", {"h": 2**30}, ValueError, r"h is 1073741824, but P h / block\*\*2 = 2147483648 blocks"),
    ("build_topology", {"bins": STRAY}, ValueError, r"slots\[3\] is 0"),
    ("build_topology", {"bins": UNALIGNED}, ValueError, r"padded_offsets\[3\] is 7, but it must be a multiple of the"),
    ("build_topology", {"bins": TOPOLOGY}, TypeError, "bins is a Topology, but it must be a PaddedBins"),
    ("topology_of", {"block": 0}, ValueError, "block is 0"),
    ("topology_of", {"mask": MASK.astype(int)}, TypeError, "mask has dtype int64, but it must be bool"),
    ("topology_of", {"mask": MASK[0]}, ValueError, "mask has shape .* 2 dimensions"),
    ("to_dense", {"values": np.ones((4, 2, 2))}, ValueError, r"values has shape \(4, 2, 2\), .* \(nnz=5, block=2"),
    ("to_dense", {"values": np.ones((5, 2, 3))}, ValueError, r"values has shape \(5, 2, 3\), .* \(nnz=5, block=2"),
    ("to_dense", {"values": with_nan}, ValueError, r"values\[4, 1, 1\] is nan, but values must be finite"),
    ("to_dense", {"topology": FALLING}, ValueError, r"row_offsets\[2\] is 2, but row_offsets\[1\] is 3"),
    ("from_dense", {"dense": np.ones((6, 6))}, ValueError, r"dense has shape \(6, 6\), but .* \(M=6, N=8\)"),
    ("from_dense", {"dense": np.ones((6, 8), int)}, TypeError, "dense has dtype int64"),
    ("from_dense", {"topology": BINS}, TypeError, "topology is a PaddedBins, but it must be a Topology"),
    ("padded_gather", {"x": np.ones((4, 3))}, ValueError, r"x has shape \(4, 3\), but it must be \(L=5, d\)"),
    ("padded_gather", {"x": with_nan}, ValueError, r"x\[4, 2\] is nan, but x must be finite"),
    ("padded_gather", {"x": [1.0]}, TypeError, "x is a list"),
    ("padded_gather", {"gates": np.ones((5, 2))}, ValueError, r"gates has shape \(5, 2\), but .* \(L=5, k=1\)"),
    ("padded_gather", {"gates": np.ones((5, 1), int)}, TypeError, "gates has dtype int64"),
    ("padded_gather", {"bins": STRAY}, ValueError, r"slots\[3\] is 0"),
    ("padded_gather", {"bins": changed(BINS, {"rows": {0: 8}})}, ValueError, r"rows\[0\] is 8"),
    ("padded_scatter", {"y": np.ones((7, 3))}, ValueError, r"y has shape \(7, 3\), but it must be \(P=8, d\)"),
    ("padded_scatter", {"y": with_nan}, ValueError, r"y\[7, 2\] is nan"),
    ("padded_scatter", {"gates": with_nan}, ValueError, r"gates\[4, 0\] is nan, but gates must be finite"),
    ("padded_scatter", {"bins": STRAY}, ValueError, r"slots\[3\] is 0"),
    ("gate_gradient", {"d_out": np.ones((5, 4))}, ValueError, r"d_out has shape \(5, 4\), but .* \(L=5, d=3\)"),
    ("gate_gradient", {"y": np.ones((5, 3))}, ValueError, r"y has shape \(5, 3\), but it must be \(P=8, d\)"),
    ("gate_gradient", {"bins": STRAY}, ValueError, r"slots\[3\] is 0"),
    ("sdd", {"lhs": np.ones((5, 3))}, ValueError, r"lhs has shape \(5, 3\), but it must be \(M=6, K\)"),
    ("sdd", {"lhs": np.ones((2, 6, 3))}, ValueError, r"lhs has shape \(2, 6, 3\), but it must have 2 dimensions"),
    ("sdd", {"lhs": [[1.0]]}, TypeError, "lhs is a list"),
    ("sdd", {"rhs": [[1.0]]}, TypeError, "rhs is a list"),
    ("sdd", {"rhs": None}, TypeError, "rhs is None"),
    ("sdd", {"rhs": np.ones((4, 8))}, ValueError, r"rhs has shape \(4, 8\), but .* \(rows=3, N=8\)"),
    ("sdd", {"rhs": np.ones((3, 7))}, ValueError, r"rhs has shape \(3, 7\), but .* \(rows=3, N=8\)"),
    ("sdd", {"rhs": np.ones((3, 3, 3))}, ValueError, "rhs has 3 parts of 3 columns, but 8 columns are needed"),
    ("sdd", {"rhs": np.ones((0, 3, 8))}, ValueError, "rhs has 0 parts of 8 columns, but 8 columns are needed"),
    ("sdd", {"rhs": np.ones((2, 5, 4))}, ValueError, r"rhs has shape \(2, 5, 4\), but .* \(parts=2, rows=3"),
    ("sdd", {"rhs": np.ones((3, 8), int)}, TypeError, "rhs has dtype int64, but it must be float"),
    ("sdd", {"rhs": with_nan}, ValueError, r"rhs\[2, 7\] is nan"),
    ("sdd", {"transpose_rhs": True}, ValueError, r"rhs has shape \(3, 8\), but .* \(N=8, K=3\)"),
    ("sdd", {"topology": FALLING}, ValueError, r"row_offsets\[2\] is 2"),
    ("dsd", {"rhs": np.ones((6, 3))}, ValueError, r"rhs has shape \(6, 3\), but it must be \(depth=8, K\)"),
    ("dsd", {"transpose_lhs": True}, ValueError, r"rhs has shape \(8, 3\), but it must be \(depth=6, K\)"),
    ("dsd", {"transpose_rhs": True}, ValueError, r"rhs has shape \(8, 3\), but it must be \(rows, N=8\)"),
    ("dsd", {"rhs": None}, TypeError, "rhs is None"),
    ("dsd", {"values": np.ones((6, 2, 2))}, ValueError, r"values has shape \(6, 2, 2\), but .* \(nnz=5"),
    ("dsd", {"values": with_nan}, ValueError, r"values\[4, 1, 1\] is nan"),
    ("dsd", {"topology": FALLING}, ValueError, r"row_offsets\[2\] is 2"),
    ("dsd", {"topology": OUTSIDE}, ValueError, r"column_indices\[4\] is 4, but there are only 4 block columns"),
    ("dsd", {"topology": MISLED, "transpose_lhs": True}, ValueError, r"transpose_indices\[0\] is 0, a block of block"),
    ("dds", {"lhs": np.ones((3, 8))}, ValueError, r"lhs has shape \(3, 8\), but it must be \(K, M=6\)"),
    ("dds", {"lhs": np.ones((1, 3, 6))}, ValueError, r"lhs has shape \(1, 3, 6\), but it must have 2 dimensions"),
    ("dds", {"transpose_lhs": True}, ValueError, r"lhs has shape \(3, 6\), but it must be \(M=6, K\)"),
    ("dds", {"parts": 3}, ValueError, "parts is 3, but 4 block columns do not fall into 3 equal parts"),
    ("dds", {"parts": 8}, ValueError, "parts is 8, but 4 block columns do not fall into 8 equal parts"),
    ("dds", {"parts": 0}, ValueError, "parts is 0, but it must be >= 1"),
    ("dds", {"parts": 2.0}, TypeError, "parts is 2.0"),
    ("dds", {"lhs": with_nan}, ValueError, r"lhs\[2, 5\] is nan"),
    ("dds", {"topology": FALLING}, ValueError, r"row_offsets\[2\] is 2"),
    ("activate", {"a": np.ones((2, 4))}, ValueError, r"a has shape \(2, 4\), but it must have 3 dimensions"),
    ("activate", {"a": np.ones((5, 2, 3))}, ValueError, r"a has shape \(5, 2, 3\), but it must be \(nnz, block=3"),
    ("activate", {"a": [1.0]}, TypeError, "a is a list"),
    ("activate", {"a": with_nan}, ValueError, r"a\[4, 1, 1\] is nan"),
    (
        "activate",
        {"b": np.ones((10, 1, 2))},
        ValueError,
        r"b has shape \(10, 1, 2\), but it must be \(nnz=5, block=2",
    ),
    ("activate", {"b": None}, ValueError, "b is None, but swiglu is gated: pass b"),
    ("activate", {"activation": "relu"}, ValueError, "relu is not gated: b must be None"),
    ("activate", {"activation": "SwiGlu"}, ValueError, "unknown activation 'SwiGlu'. Did you mean 'swiglu'"),
    ("activate_backward", {"d_y_swi": np.ones((4, 2, 2))}, ValueError, r"d_y_swi has shape \(4, 2, 2\), .*\(nnz=5"),
    ("activate_backward", {"d_y_swi": None}, TypeError, "d_y_swi is None"),
    ("activate_backward", {"d_y_swi": with_nan}, ValueError, r"d_y_swi\[4, 1, 1\] is nan"),
    ("activate_backward", {"b": None}, ValueError, "b is None, but swiglu is gated"),
    ("forward", {"block": 0}, ValueError, "block is 0, but it must be >= 1"),
    ("forward", {"block": 2.5}, TypeError, "block is 2.5"),
    ("forward", {"block": True}, TypeError, r"block is True \(bool\), but it must be an integer"),
    ("pad", {"block": True}, TypeError, r"block is True \(bool\), but it must be an integer"),
    ("topology_of", {"block": True}, TypeError, r"block is True \(bool\), but it must be an integer"),
    ("forward", {"block": 3}, ValueError, "h is 4, but it must be a multiple of the block size 3"),
    ("forward", {"block": 8}, ValueError, "h is 4, but it must be a multiple of the block size 8"),
    ("forward", {"x": with_nan}, ValueError, r"x\[4, 2\] is nan"),
    ("forward", {"x": np.ones((6, 3))}, ValueError, r"x has shape \(6, 3\), but it must be \(L=5, d\)"),
    (
        "forward",
        {"w1": np.ones((3, 3, 4))},
        ValueError,
        r"w1 has shape \(3, 3, 4\), but it must be \(E=4, d=3, h\)",
    ),
    ("forward", {"w2": None}, ValueError, "w2 is None, but swiglu is gated"),
    ("forward", {"w3": np.ones((4, 3, 4))}, ValueError, r"w3 has shape \(4, 3, 4\), .* \(E=4, h=4, d=3\)"),
    ("forward", {"w3": with_nan}, ValueError, r"w3\[3, 3, 2\] is nan"),
    ("forward", {"gates": np.ones((5, 2))}, ValueError, r"gates has shape \(5, 2\), but it must be \(L=5, k=1\)"),
    ("forward", {"activation": "silu"}, ValueError, "silu is not gated: w2 must be None"),
    ("forward", {"dispatch": BINS}, TypeError, "dispatch is a PaddedBins, but it must be a Dispatch"),
    ("backward", {"d_out": with_nan}, ValueError, r"d_out\[4, 2\] is nan"),
    ("backward", {"d_out": np.ones((5, 4))}, ValueError, r"d_out has shape \(5, 4\), but it must be \(L=5, d=3\)"),
    ("backward", {"saved": BINS}, TypeError, "saved is a PaddedBins, but it must be a Saved"),
    ("backward", {"w1": None}, TypeError, "w1 is None"),
    ("backward", {"w1": np.ones((4, 3, 6))}, ValueError, r"w1 has shape \(4, 3, 6\), .* \(E=4, d=3, h=4\)"),
    ("backward", {"w2": None}, ValueError, "w2 is None, but swiglu is gated"),
    ("backward", {"w2": np.ones((4, 4, 3))}, ValueError, r"w2 has shape \(4, 4, 3\), .* \(E=4, d=3, h=4\)"),
    ("backward", {"w3": np.ones((4, 3, 4))}, ValueError, r"w3 has shape \(4, 3, 4\), .* \(E=4, h=4, d=3\)"),
    ("backward", {"w3": with_nan}, ValueError, r"w3\[3, 3, 2\] is nan"),
]


@pytest.mark.parametrize(
    ("run", "function", "change", "error", "message"),
    [(run, *bad) for bad in BAD_INPUT for run, function in IN_ROOMS if function == bad[0]],
)
def test_bad_input(run, function, change, error, message):
    taken = arguments(run, function)
    for name, value in change.items():
        if callable(value):
            value = value(taken[name])
        elif isinstance(value, np.ndarray) and value.dtype == np.float64:
            value = value.astype(run.dtype)
        taken[name] = value
    with pytest.raises(error, match=message):
        getattr(run.open(), function)(*taken.values())


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in ("pad", "build_topology", "backward")])
@pytest.mark.parametrize("run", [TILED, NUMBA], ids=str)
def test_the_kernels_take_no_float64(run, function):
    with pytest.raises(TypeError, match="has dtype float64, but it must be float32"):
        getattr(run.open(), function)(*arguments(SPECIFICATION, function).values())


@pytest.mark.parametrize(("run", "function"), IN_ROOMS, ids=str)
def test_what_bad_input_differs_from_is_accepted(function, run):
    getattr(run.open(), function)(*arguments(run, function).values())


# ---- planted faults -----------------------------------------------------------------------------------


def with_the_first_rhs(sdd):
    """Every product of the same shapes is that by the first operand."""
    firsts = {}

    def faulty(lhs, rhs, topology, **options):
        return sdd(lhs, firsts.setdefault((lhs.shape, rhs.shape), rhs), topology, **options)

    return faulty


def with_stored_order(_):
    """Values in the order in which they lie, at the coordinates of the transposed order."""

    def visit(topology, by_column):
        order = topology.transpose_indices if by_column else range(topology.nnz)
        for place, number in enumerate(order):
            yield place, topology.row_indices[number], topology.column_indices[number]

    return visit


def with_next_column_block(sdd):
    return lambda lhs, rhs, topology, **options: sdd(lhs, np.roll(rhs, topology.block, axis=-1), topology, **options)


def with_blocks_not_transposed(dsd):
    def faulty(values, topology, rhs, transpose_lhs=False, transpose_rhs=False):
        return dsd(values.transpose(0, 2, 1) if transpose_lhs else values, topology, rhs, transpose_lhs, transpose_rhs)

    return faulty


def with_parts_below_each_other(dds):
    def faulty(lhs, values, topology, transpose_lhs=False, parts=1):
        return dds(lhs, values, topology, transpose_lhs).reshape(parts, -1, topology.shape[1] // parts)

    return faulty


def with_unpadded_rows(pad):
    return lambda dispatch, block: replace(pad(dispatch, block), rows=dispatch.token_index_map)


def with_padding_of_ones(padded_gather):
    def faulty(x, bins, gates=None):
        rows = padded_gather(x, bins, gates)
        rows[bins.slots == EMPTY] = 1.0
        return rows

    return faulty


def with_transpose_indices_as_they_lie(build):
    def faulty(*args):
        topology = build(*args)
        return replace(topology, transpose_indices=np.sort(topology.transpose_indices))

    return faulty


def with_row_for_column(build):
    def faulty(*args):
        topology = build(*args)
        return replace(topology, row_indices=topology.column_indices, column_indices=topology.row_indices)

    return faulty


SAMPLE = sparse_of(np.tile(MASK, 2), 3, 5, "float64")
FAULT_CASE = make_case(37, 12, 20, 5, 3, "zipf")
CHECKS = {
    "golden": lambda stage: [assert_golden(stage, golden) for golden in GOLDEN.values()],
    "mask": lambda stage: assert_same(stage.topology_of(MASK, 2), TOPOLOGY),
    "round trip": lambda stage: assert_round_trip(stage, SAMPLE),
    **{name: lambda stage, check=check: check(stage, SAMPLE) for name, check in PRODUCTS.items()},
    **{f"{name} in parts": lambda stage, check=check: check(stage, SAMPLE, 2) for name, check in PRODUCTS.items()},
    "rows": lambda stage: assert_rows(stage, build_by_sort(FAULT_CASE.topk_experts, 5), 4, 3, "float64"),
    "activation": lambda stage: assert_activation(stage, "swiglu", 7, 4, "float64"),
    "layer": lambda stage: assert_layer(stage, FAULT_CASE, 4, "float64"),
}


def checks_that_fail(stage):
    """Names of the checks that a stage does not pass; one that refuses what it made sees it, too."""
    failed = set()
    for name, check in CHECKS.items():
        try:
            check(stage)
        except (AssertionError, ValueError):
            failed.add(name)
    return failed


OF_ROWS, OF_ACTIVATION = {"rows", "layer"}, {"activation", "layer"}
FAULTS = {  # what goes wrong: (function, what takes its place, checks that must see it)
    "zeros: sdd": ("sdd", all_zeros, {"sdd", "sdd in parts", "layer"}),
    "zeros: dsd": ("dsd", all_zeros, {"dsd", "dsd in parts", "layer"}),
    "zeros: dds": ("dds", all_zeros, {"dds", "dds in parts", "layer"}),
    "zeros: gather": ("padded_gather", all_zeros, OF_ROWS),
    "zeros: scatter": ("padded_scatter", all_zeros, OF_ROWS),
    "zeros: gate gradient": ("gate_gradient", all_zeros, OF_ROWS),
    "zeros: activation": ("activate", all_zeros, OF_ACTIVATION),
    "zeros: activation backward": ("activate_backward", all_zeros, OF_ACTIVATION),
    "zeros: to_dense": ("to_dense", all_zeros, {"round trip"}),
    "zeros: from_dense": ("from_dense", all_zeros, {"round trip"}),
    "last block never computed": ("sdd", without_the_last, {"sdd", "sdd in parts", "layer"}),
    "last row never computed": ("dsd", without_the_last, {"dsd", "dsd in parts", "layer"}),
    "last part never computed": ("dds", without_the_last, {"dds", "dds in parts", "layer"}),
    "last token never summed": ("padded_scatter", without_the_last, OF_ROWS),
    "last token without gate gradient": ("gate_gradient", without_the_last, OF_ROWS),
    "last block never activated": ("activate", without_the_last, OF_ACTIVATION),
    "last block without gradient": ("activate_backward", without_the_last, OF_ACTIVATION),
    "last block not stored": ("from_dense", without_the_last, {"round trip"}),
    "w2's product is w1's": ("sdd", with_the_first_rhs, {"layer"}),
    "transposed order ignored": ("_visit", with_stored_order, {"dsd", "dds", "dsd in parts", "dds in parts", "layer"}),
    "blocks not transposed": ("dsd", with_blocks_not_transposed, {"dsd", "dsd in parts", "layer"}),
    "wrong column block": ("sdd", with_next_column_block, {"sdd", "sdd in parts", "layer"}),
    "parts below each other": ("dds", with_parts_below_each_other, {"dds in parts", "layer"}),
    "unpadded offset": ("pad", with_unpadded_rows, {"golden", "layer"}),
    "padding not cleared": ("padded_gather", with_padding_of_ones, OF_ROWS),
    "gate forgotten": ("padded_scatter", lambda scatter: lambda y, bins, gates=None: scatter(y, bins), OF_ROWS),
    "gate forgotten, backward": ("padded_gather", lambda gather: lambda x, bins, gates=None: gather(x, bins), OF_ROWS),
    "gates of another slot": (
        "padded_scatter",
        lambda scatter: lambda y, bins, gates=None: scatter(y, bins, None if gates is None else gates[:, ::-1]),
        OF_ROWS,
    ),
    "another token's row": (
        "padded_gather",
        lambda gather: lambda x, bins, gates=None: gather(np.roll(x, 1, axis=0), bins, gates),
        OF_ROWS,
    ),
    "gradients of a and b exchanged": (
        "activate_backward",
        lambda backward: lambda *args: backward(*args)[::-1],
        OF_ACTIVATION,
    ),
    "transpose indices as they lie": ("build_topology", with_transpose_indices_as_they_lie, {"golden"}),
    "transpose indices of a mask as they lie": ("topology_of", with_transpose_indices_as_they_lie, {"mask"}),
    "row for column": ("build_topology", with_row_for_column, {"golden", "layer"}),
}


def test_the_specification_passes_every_check():
    assert not checks_that_fail(SPECIFICATION.open())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_a_check(fault, monkeypatch):
    name, plant, seen_by = FAULTS[fault]
    if hasattr(getattr(reference, name), "unchecked"):
        alter(monkeypatch, "numpy", f"block_sparse.{name}", plant)
    else:
        monkeypatch.setattr(reference, name, plant(getattr(reference, name)))
    assert seen_by <= checks_that_fail(SPECIFICATION.open())


# ---- the raw kernels: bytes --------------------------------------------------------------------

# More rows than a band of tiles has, and none is the widest.
TALL_MASK = np.vstack([MASK, MASK[:, ::-1], MASK, ~MASK])


on = partial(opened_raw, raw)


def stated(file):
    """{kernel: {column: formula}} of a file."""
    return table((kernels_dir() / file).read_text())


def assert_as_stated(launch, file, symbols):
    """The grid, and the bytes that the threads ask for."""
    header, symbols = stated(file)[launch.kernel], symbols | {"blocks": int(np.prod(launch.grid))}
    grid = evaluate(header["grid"], symbols)
    assert launch.grid == (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3], header["grid"]
    assert launch.read_bytes == evaluate(header["bytes read"], symbols), f"{launch.kernel} reads {header['bytes read']}"
    assert launch.written_bytes == evaluate(header["bytes written"], symbols), header["bytes written"]


def product_symbols(one, version, transpose_lhs=False, transpose_rhs=False):
    """What the headers of the products call a matrix, its operand and its tiles."""
    (M, N, K), block, n, s = one.extents, one.topology.block, one.topology.nnz, one.values.dtype.itemsize
    symbols = {"M": M, "N": N, "K": K, "BLOCK": block, "n": n, "H": n * block, "V": n * block**2, "s": s}
    symbols |= {"rows": N if transpose_lhs else M, "I": 1 + transpose_lhs, "THREADS": gemm.THREADS}
    if version == "2_tiled":
        symbols |= {"T": -(-block // 64), "C": -(-K // 64)}
    if version == "3_mma":
        tile = raw.tile_of(version, block)
        A, B = s * tile.rows // 16, s * tile.columns // 16
        Y, X = -(-block // tile.rows), -(-block // tile.columns)
        R, C = -(-K // tile.rows), -(-K // tile.columns)
        symbols |= tile.constants(s) | {"A": A, "B": B, "Y": Y, "X": X, "R": R, "C": C}
    if version == gemm.HOPPER:
        symbols |= stored_tiles(one.topology) | {"P": block // 128, "C": -(-K // 256)}
        symbols |= {"multiprocessors": SimtExecutor.multiprocessors}
    return symbols


def stored_tiles(topology):
    """Tiles of 7_persistent that hold stored blocks, and their places: bands of 8 rows, as wide as the widest."""
    wide = np.repeat(-(-np.diff(topology.row_offsets) * topology.block // 256), topology.block // 128)
    bands = [wide[top : top + 8] for top in range(0, len(wide), 8)]
    return {"tiles": int(wide.sum()), "Q": sum(len(band) * int(band.max()) for band in bands)}


def operands(product, one, transpose_lhs=False, transpose_rhs=False):
    """What a product takes of a sparse matrix and dense numbers."""
    (M, N, K), dtype = one.extents, one.dtype
    if product == "sdd":
        return matrix(1, M, K, dtype), as_given(matrix(2, K, N, dtype), transpose_rhs), one.topology
    if product == "dsd":
        return one.values, one.topology, as_given(matrix(2, M if transpose_lhs else N, K, dtype), transpose_rhs)
    return as_given(matrix(1, K, M, dtype), transpose_lhs), one.values, one.topology


OR_NOT = (False, True)
EVERY_WAY = [
    *(("sdd", {"transpose_rhs": right}) for right in OR_NOT),
    *(("dsd", {"transpose_lhs": left, "transpose_rhs": right}) for left in OR_NOT for right in OR_NOT),
    *(("dds", {"transpose_lhs": left}) for left in OR_NOT),
]


def multiply_every_way(stage, one):
    """Every product with every transpose: yields (kernel, transposes, result) after each."""
    for kernel, transposes in EVERY_WAY:
        in_parts = {"parts": 2} if kernel == "dds" else {}
        taken = operands(kernel, one, **transposes)
        yield kernel, transposes, getattr(stage, kernel)(*taken, **transposes, **in_parts)


def met(kernel, symbols, transpose_lhs=False, transpose_rhs=False):
    """G of 3_mma: 16-byte places of the dense operand that meet a line of a block."""
    of_data = symbols["s"] * symbols["K"] // 16
    if kernel == "dds":
        return symbols["X"] * (symbols["A"] * symbols["R"] if transpose_lhs else of_data)
    return symbols["Y"] * (of_data if transpose_rhs else symbols["B"] * symbols["C"])


@pytest.mark.parametrize(
    ("version", "dtype", "block", "K"),
    [
        ("1_naive", "float32", 3, 5),
        ("2_tiled", "float32", 3, 70),
        ("2_tiled", "bfloat16", 72, 9),
        ("3_mma", "float16", 8, 136),
        ("3_mma", "bfloat16", 40, 72),
        ("3_mma", "bfloat16", 136, 24),
        ("7_persistent", "float16", 128, 264),
        ("7_persistent", "bfloat16", 256, 72),
    ],
)
def test_the_products_ask_for_the_bytes_that_their_headers_state(version, dtype, block, K):
    one, executor = sparse_of(TALL_MASK if version == gemm.HOPPER else MASK, block, K, dtype), SimtExecutor()
    with executor.recording() as launches:
        for kernel, transposes, _ in multiply_every_way(on(executor, version), one):
            symbols = product_symbols(one, version, **transposes)
            if version == "3_mma":
                symbols["G"] = met(kernel, symbols, **transposes)
            assert launches[-1].kernel == kernel
            assert_as_stated(launches[-1], gemm.file_of("block_sparse", version), symbols)


@pytest.mark.parametrize("version", ["2_tiled", "3_mma"])
def test_a_block_of_threads_has_the_shared_memory_that_the_header_states(version):
    tile = raw.tile_of(version, 8)
    constants = gemm.constants("float16", tile=tile) | {"BLOCK": 8, "TRANSPOSE_LHS": 1, "TRANSPOSE_RHS": 0}
    file = gemm.file_of("block_sparse", version)
    source, dynamic = KernelSource.read(file, constants), 0 if tile is None else tile.shared_bytes
    sizes = {name: value for name, value in constants.items() if isinstance(value, int)} | {"s": 2}
    for kernel, header in stated(file).items():
        assert evaluate(header["shared bytes"], sizes) == _static_shared_bytes(source, kernel) + dynamic, kernel


def test_blocks_that_stay_have_the_shared_memory_that_their_header_states():
    launch = gemm.persistent(SimtExecutor.multiprocessors, crowded=True)
    for header in stated(f"block_sparse/{gemm.HOPPER}.cu").values():
        assert evaluate(header["shared bytes"], {}) == launch["shared_bytes"]
        assert evaluate(header["block"], {}) == launch["block"]


def steps_of_search(padded_offsets, row):
    """How many entries a search for the expert of a row reads."""
    low, high, steps = 0, len(padded_offsets) - 2, 0
    while low < high:
        middle, steps = (low + high + 1) // 2, steps + 1
        low, high = (middle, high) if padded_offsets[middle] <= row else (low, middle - 1)
    return steps


@pytest.mark.parametrize(("L", "E", "k", "wide", "routing"), [(97, 11, 3, 2, "empty"), (600, 300, 4, 1, "zipf")])
def test_the_structures_ask_for_the_bytes_that_their_header_states(L, E, k, wide, routing):
    dispatch, executor, block = build_by_sort(random_topk(L, E, k, routing), E), SimtExecutor(), 8
    stage = on(executor, "2_tiled")
    with executor.recording() as launches:
        bins = stage.pad(dispatch, block)
        topology = stage.build_topology(bins, wide * block)
    steps = sum(steps_of_search(bins.padded_offsets, row * block) for row in topology.row_indices)
    symbols = {"E": E, "R": L * k, "n": topology.nnz, "S": steps, "THREADS": gemm.THREADS}
    symbols |= {"M": bins.P // block, "N": E * wide}
    assert [launch.kernel for launch in launches] == ["pad_offsets", "pad_slots", "offsets", "blocks"]
    for launch in launches:
        assert_as_stated(launch, "block_sparse/structures.cu", symbols)


@pytest.mark.parametrize(
    ("L", "E", "wide", "routing"),
    [(40, 64, 16, "uniform"), (600, 4, 2, "hot")],
    ids=["many block columns", "many block rows"],
)
def test_a_side_of_the_matrix_may_have_many_more_blocks_than_the_other(L, E, wide, routing):
    dispatch, stage, block = build_by_sort(random_topk(L, E, 1, routing), E), on(SimtExecutor(), "2_tiled"), 2
    bins, expected = stage.pad(dispatch, block), reference.pad(dispatch, block)
    assert_same(bins, expected)
    sides = bins.P // block + 1, E * wide + 1  # ends
    assert -(-min(sides) // gemm.THREADS) < -(-max(sides) // gemm.THREADS)
    assert_same(stage.build_topology(bins, wide * block), reference.build_topology(expected, wide * block))


@pytest.mark.parametrize("d", [5, 24])
@pytest.mark.parametrize("dtype", gemm.WIDE)
def test_the_rows_ask_for_the_bytes_that_their_header_states(dtype, d):
    bins, executor = reference.pad(build_by_sort(random_topk(53, 7, 3, "empty"), 7), 8), SimtExecutor()
    stage, x, y = on(executor, "2_tiled"), positive(1, (bins.L, d), dtype), positive(2, (bins.P, d), dtype)
    gates, s = positive(3, (bins.L, bins.k), "float32"), x.itemsize
    pack = 1 if d % 2 else 16 // s
    symbols = {"L": bins.L, "P": bins.P, "R": bins.R, "k": bins.k, "d": d, "s": s, "PACK": pack, "W": 0}
    symbols |= {"THREADS": gemm.THREADS, "h": d}
    with executor.recording() as launches:
        stage.padded_gather(x, bins)
        stage.padded_gather(x, bins, gates)
        stage.gate_gradient(x, y, bins)
        stage.padded_scatter(y, bins)
        stage.padded_scatter(y, bins, gates)
    plain, weighted, gradient, summed, combined = launches
    assert_as_stated(plain, "block_sparse/rows.cu", symbols)
    assert_as_stated(weighted, "block_sparse/rows.cu", symbols | {"W": 1})
    assert_as_stated(gradient, "block_sparse/rows.cu", symbols)
    assert_as_stated(summed, "expert_up/sum_rows.cu", symbols)
    assert_as_stated(combined, "combine/2_vector.cu", symbols)


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize(("dtype", "block"), [("float32", 3), ("bfloat16", 8)])
def test_the_activation_asks_for_the_bytes_that_its_header_states(dtype, block, activation):
    a, b, d_y_swi = positive(1, (3, 37, block, block), dtype)
    b = b if is_gated(activation) else None
    executor = SimtExecutor()
    with executor.recording() as launches:
        on(executor, "2_tiled").activate(a, b, activation)
        on(executor, "2_tiled").activate_backward(d_y_swi, a, b, activation)
    symbols = {"V": a.size, "s": a.itemsize, "G": 1 + is_gated(activation), "THREADS": gemm.THREADS}
    for launch in launches:
        assert_as_stated(launch, "block_sparse/hidden.cu", symbols | {"PACK": 1 if block == 3 else 16 // a.itemsize})


# ---- the raw kernels: bits ---------------------------------------------------------------------


@pytest.mark.parametrize(("version", "dtype"), [(version, able[-1]) for version, able in raw.VERSIONS.items()])
def test_every_order_of_threads_gives_the_same_bits(version, dtype):
    block = raw.BLOCK if version == gemm.HOPPER else 8
    case = make_case(21, 8, 2 * block, 5, 3, "zipf").astype(dtype)
    first, second = (run_layer(on(SimtExecutor(seed=seed), version), case, block) for seed in (0, 7))
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)


@pytest.mark.parametrize("blocks", [1, 3, 50])
def test_any_number_of_blocks_that_stay_gives_the_same_bits(blocks):
    one, other = SimtExecutor(), SimtExecutor(seed=blocks)
    other.multiprocessors = blocks
    sparse = sparse_of(TALL_MASK, 128, 264, "bfloat16")
    first, second = ([*multiply_every_way(on(executor, gemm.HOPPER), sparse)] for executor in (one, other))
    for (*way, found), (*_, expected) in zip(second, first, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=str(way))


# ---- the raw kernels: checks -------------------------------------------------------------------

DENSE = sparse_of(MASK, 8, 8, "float32")


def test_a_version_says_which_dtypes_it_takes():
    x = positive(0, (DENSE.extents[0], 8), "float32")
    with pytest.raises(TypeError, match="3_mma of block_sparse computes in float16 or bfloat16, but x is float32"):
        raw.sdd(x, positive(1, (8, DENSE.extents[1]), "float32"), DENSE.topology, version="3_mma")
    with pytest.raises(TypeError, match="versions for it: 1_naive, 2_tiled"):
        raw.activate(DENSE.values, None, "relu", version="3_mma")
    with pytest.raises(TypeError, match="lhs has dtype float64, but it must be float32 or float16 or bfloat16"):
        raw.sdd(x.astype(float), positive(1, (8, DENSE.extents[1]), "float64"), DENSE.topology)


@pytest.mark.parametrize(
    ("version", "block", "K", "message"),
    [
        ("3_mma", 8, 12, "K is 12, but 3_mma needs a multiple of 8; use 2_tiled"),
        ("3_mma", 12, 8, "block is 12, but 3_mma needs a multiple of 8; use 2_tiled"),
        ("7_persistent", 8, 8, "block is 8, but 7_persistent needs a multiple of 128; use 3_mma"),
        ("7_persistent", 64, 8, "block is 64, but 7_persistent needs a multiple of 128; use 3_mma"),
        ("7_persistent", 136, 8, "block is 136, but 7_persistent needs a multiple of 128; use 3_mma"),
    ],
)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_a_version_says_which_extents_it_takes(kernel, version, block, K, message):
    with pytest.raises(ValueError, match=message):
        getattr(raw, kernel)(*operands(kernel, sparse_of(MASK, block, K, "float16")), version=version)


def test_a_layer_takes_the_version_that_it_can():
    ampere, hopper, blackwell = (SimpleNamespace(capability=(major, 0)) for major in (8, 9, 10))
    assert raw.default_version("bfloat16", 64, 128, hopper) == "7_persistent"
    for block, executor in ((128, ampere), (128, blackwell), (64, hopper)):
        assert raw.default_version("float16", 64, block, executor) == "3_mma"
    for dtype, d, block in (("float32", 64, 128), ("bfloat16", 60, 128), ("bfloat16", 64, 12)):
        assert raw.default_version(dtype, d, block, hopper) == "2_tiled"


@pytest.mark.parametrize("version", ["2_tiled", "3_mma"])
def test_block_columns_beyond_a_grid_are_refused_before_a_forward_needs_them(version):
    bins = reference.pad(build_by_sort(random_topk(3, 256, 1, "uniform"), 256), 8)
    message = f"65536 block columns have 65536 tiles, but {version} of block_sparse takes at most 65535; use a larger"
    with pytest.raises(ValueError, match=message):
        raw.build_topology(bins, 2048, version=version)
    topology = reference.build_topology(bins, 2048)
    values, lhs = positive(0, (topology.nnz, 8, 8), "float16"), positive(1, (8, bins.P), "float16")
    with pytest.raises(ValueError, match=message):
        raw.dds(lhs, values, topology, version=version)
    assert_same(raw.build_topology(bins, 2048, version="1_naive"), topology)
    assert_same(raw.build_topology(bins, 2040, version=version), reference.build_topology(bins, 2040))


def test_an_unknown_version_is_refused():
    dispatch = build_by_sort(random_topk(5, 3, 2, "uniform"), 3)
    bins, message = reference.pad(dispatch, 8), "unknown version of block_sparse '2_tile'. Did you mean '2_tiled'"
    for call in (
        lambda: raw.pad(dispatch, 8, version="2_tile"),
        lambda: raw.build_topology(bins, 8, version="2_tile"),
        lambda: raw.padded_gather(positive(0, (5, 8), "float32"), bins, version="2_tile"),
        lambda: raw.dds(positive(0, (8, 24), "float32"), DENSE.values, DENSE.topology, version="2_tile"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_gates_are_float32_and_a_token_has_no_more_slots_than_lanes():
    bins = reference.pad(build_by_sort(random_topk(3, 40, 33, "uniform"), 40), 8)
    x, y, gates = positive(0, (3, 8), "float32"), positive(1, (bins.P, 8), "float32"), positive(2, (3, 33), "float64")
    with pytest.raises(TypeError, match="gates has dtype float64, but it must be float32"):
        raw.padded_gather(x, bins, gates)
    with pytest.raises(ValueError, match=r"bins.k is 33, but it must be 1..32"):
        raw.padded_scatter(y, bins)
    np.testing.assert_array_equal(raw.padded_gather(x, bins), reference.padded_gather(x, bins))


# ---- the raw kernels: planted faults -----------------------------------------------------------

FEW = make_case(29, 8, 16, 5, 3, "empty")
OF_FEW = checks_of(build_by_sort(FEW.topk_experts, FEW.E), 8, 8, 16, "float32")
structures, rows, hidden = (OF_FEW[name] for name in ("structures", "rows", "activation"))


def multiplied(kernel, dtype, block, K, mask=MASK, **options):
    """A check of one product alone: with one transpose of its operands a fault is compiled once."""

    def check(stage):
        transposes = {name: value for name, value in options.items() if name != "parts"}
        taken = operands(kernel, sparse_of(mask, block, K, dtype), **transposes)
        exact = (each.astype(np.float64) if isinstance(each, np.ndarray) else each for each in taken)
        found, expected = getattr(stage, kernel)(*taken, **options), getattr(reference, kernel)(*exact, **options)
        assert relative_error(found, expected) <= {"float32": 1e-6, "float16": 2.0**-11}[dtype]

    return check


NAIVE_FILE, TILED_FILE, MMA_FILE, HOPPER_FILE = (f"block_sparse/{version}.cu" for version in raw.VERSIONS)
STRUCTURES, ROWS, HIDDEN = (f"block_sparse/{name}.cu" for name in ("structures", "rows", "hidden"))
SUMS, COMBINE = "expert_up/sum_rows.cu", "combine/2_vector.cu"
TURNED = {"transpose_lhs": True}
ODD, EVEN = ("float32", 3, 5), ("float32", 8, 20)
SMALL = ("float16", 8, 16)  # blocks smaller than a tile
TALL = ("float16", 40, 72)  # several tiles along K
WHOLE = ("float16", 128, 264, TALL_MASK)  # several tiles each way
HALVED = ("float16", 256, 72)  # two tiles down a block


def parts(kernel):
    """A check of a product whose dense operand, or result, comes in parts."""
    return lambda stage: PRODUCTS[kernel](stage, sparse_of(np.tile(MASK, 2), 128, 72, "float16"), parts=2)


IN_STORED_ORDER = "BY_COLUMN ? order[first + i] : first + i;", "first + i;"
FAULTS_IN_RAW_CUDA = {  # file: {what goes wrong: (text that stands there, text in its place, what must see it)}
    STRUCTURES: {
        "bins: not padded": ("(rows + BLOCK - 1) / BLOCK * BLOCK", "rows", structures),
        "bins: last one left out": ("padded_offsets[E] = before;", "padded_offsets[E] = before - BLOCK;", structures),
        "bins: unpadded offset": ("+ padded_offsets[expert];", "+ expert_token_offsets[expert];", structures),
        "bins: last slot left out": ("if (slot >= R) return;", "if (slot >= R - 1) return;", structures),
        "topology: an empty expert's bin": ("[middle] <= row)", "[middle] < row)", structures),
        "topology: last block left out": ("(number >= nnz) return;", "(number >= nnz - 1) return;", structures),
        "topology: transpose indices as they lie": (
            "column * high + row - first] =", "(row - first) * wide + column] =", structures,
        ),
        "topology: column within its expert": ("= expert * wide + column;", "= column;", structures),
        "topology: last column offset": ("if (index > E * wide)", "if (index >= E * wide)", structures),
        "topology: last row offset": ("if (index <= block_rows)", "if (index < block_rows)", structures),
    },
    ROWS: {
        "rows: padding not cleared": ("if (slot < 0) {", "if (P < 0) {", rows),
        "rows: padding not zero": ("from_float<Scalar>(0.0f);", "from_float<Scalar>(1.0f);", rows),
        "rows: of the slot, not of its token": ("(long long)(slot / k) * d", "(long long)(slot % k) * d", rows),
        "rows: unscaled gate": ("(gate * to_float(", "(to_float(", rows),
        "rows: gate of the token's first slot": ("gate = gates[slot];", "gate = gates[slot / k * k];", rows),
        "rows: last pack left out": ("if (at >= (long long)P * d)", "if (at >= (long long)P * d - PACK)", rows),
        "gate gradient: of the next row": ("(long long)rows[slot] * d;", "(long long)(rows[slot] ^ 1) * d;", rows),
        "gate gradient: of another token": ("d_out + slot / k * d;", "d_out + slot % k * d;", rows),
        "gate gradient: of one lane": ("sum = warp_sum(sum);", ";", rows),
        "gate gradient: last slot left out": ("if (slot >= R) return;\n", "if (slot >= R - 1) return;\n", rows),
    },
    COMBINE: {
        "scatter: unscaled gate": ("return gates[slot];", "return 1.0f;", rows),
    },
    SUMS: {
        "scatter: zeros": ("return 1.0f;", "return 0.0f;", rows),
    },
    HIDDEN: {
        "activation: without b": (".elements[i]), to_float(b_pack.elements[i]))", ".elements[i]), 1.0f)", hidden),
        "activation: gradient of b not stored": ("if (GATED) store_pack(d_b + at, d_b_pack);", "", hidden),
        "activation: last pack left out": ("if (at >= values) return;", "if (at >= values - PACK) return;", hidden),
    },
    NAIVE_FILE: {
        "last block left out": ("i < blocks.count;", "i < blocks.count - 1;", multiplied("dsd", *ODD)),
        "transpose indices ignored": (*IN_STORED_ORDER, multiplied("dsd", *ODD, **TURNED)),
        "block not transposed": ("TRANSPOSE_LHS ? p * BLOCK + line : line", "line", multiplied("dsd", *ODD, **TURNED)),
        "last of the depth left out": ("p < K; ++p", "p < K - 1; ++p", multiplied("sdd", *ODD)),
        "last block never computed": ("(long long)nnz *", "(long long)(nnz - 1) *", multiplied("sdd", *ODD)),
        "parts below each other": (
            "result[Dense{nullptr, K, width}.at(row, column)]", "result[index]", multiplied("dds", *ODD, parts=2),
        ),
    },
    TILED_FILE: {
        "no barrier before the product": (");\n        __syncthreads();", ");", multiplied("sdd", *EVEN)),
        "no barrier after the product": (*without_barrier("all have read"), multiplied("dsd", *EVEN)),
        "transpose indices ignored": (*IN_STORED_ORDER, multiplied("dds", *EVEN)),
        "columns beyond the block stored": ("if (i < BLOCK && j < BLOCK)", "if (i < BLOCK)", multiplied("sdd", *EVEN)),
        "lines beyond the block stored": ("(i < BLOCK && j < K) result", "(j < K) result", multiplied("dsd", *EVEN)),
        "second part of a block is the first": (
            "blockIdx.y % PARTS * TILE;\n    const long long row",
            "0;\n    const long long row", multiplied("sdd", "float32", 72, 5),
        ),
        "last block left out": ("n < blocks.count;", "n < blocks.count - 1;", multiplied("dsd", *EVEN)),
    },
    MMA_FILE: {
        "columns beyond the block stored": (", columns, BLOCK", ", TILE_COLUMNS, BLOCK", multiplied("sdd", *SMALL)),
        "lines beyond the block stored": (", lines, columns, K", ", TILE_ROWS, columns, K", multiplied("dsd", *SMALL)),
        "columns beyond the block of dds stored": ("columns, width", "TILE_COLUMNS, width", multiplied("dds", *SMALL)),
        "last block left out": ("= blocks.count * BLOCK,", "= (blocks.count - 1) * BLOCK,", multiplied("dsd", *SMALL)),
        "transpose indices ignored": (*IN_STORED_ORDER, multiplied("dsd", *SMALL, **TURNED)),
        "first block for all": ("? blocks.other(i) : blocks", "? blocks.other(0) : blocks", multiplied("dsd", *SMALL)),
        "place in the block forgotten": ("BLOCK + at % BLOCK) : nullptr", "BLOCK) : nullptr", multiplied("dds", *TALL)),
        "next line of a block row": ("* BLOCK + number", "* BLOCK + number / 2", multiplied("dsd", *SMALL)),
        "copies not awaited": ("cp_async_wait<STAGES - 2>()", "cp_async_wait<STAGES - 1>()", multiplied("sdd", *TALL)),
        "missing barrier": (*without_barrier("the next stage has arrived"), multiplied("sdd", *TALL)),
        "second tile of K is the first": ("= blockIdx.y * TILE_COLUMNS;", "= 0;", multiplied("dsd", *TALL)),
    },
    HOPPER_FILE: {
        "last block left out": (
            "blocks.count * STEPS_OF_BLOCK}", "(blocks.count - 1) * STEPS_OF_BLOCK}", multiplied("dsd", *WHOLE),
        ),
        "a block again in place of the next": ("(p == 0) read(i + 1);", "(p == 0) read(i);", multiplied("dsd", *WHOLE)),
        "next block too early": ("if (p == 0) number =", "number =", multiplied("dsd", *WHOLE)),
        "transpose indices ignored": (*IN_STORED_ORDER, multiplied("dsd", *WHOLE, **TURNED)),
        "what a block meets by its number": (
            "tile.blocks.others[next_number];", "next_number;", multiplied("dds", *WHOLE),
        ),
        "block not transposed": (
            "tma_load(panels + at / PANEL * PANEL_BYTES, &map, full, ALONG_SIDE ? side + at : depth,\n                 "
            "ALONG_SIDE ? depth : side + at, matrix);",
            "tma_load(panels + at / PANEL * PANEL_BYTES, &map, full, depth, side + at, matrix);",
            multiplied("dsd", *WHOLE, **TURNED),
        ),
        "expects A alone": ("A_BYTES + B_BYTES);", "A_BYTES);", multiplied("sdd", *WHOLE)),
        "second half as the first": ("= tile.column + half * HALF;", "= tile.column;", multiplied("sdd", *WHOLE)),
        "a block beyond the row stored": ("i < tile.blocks.count ? HALF : 0", "HALF", multiplied("sdd", *WHOLE)),
        "columns beyond K stored": (", TILE_ROWS, width - column", ", TILE_ROWS, HALF", multiplied("dsd", *WHOLE)),
        "every band begins anew": ("number -= high * wide;", ";", multiplied("dsd", *WHOLE)),
        "band as wide as its first row": ("= max(wide, width(top + i));", "= width(top);", multiplied("sdd", *WHOLE)),
        "a short row ends the walk": (
            "if (tile.column < blocks.count * SIDE) return true;",
            "return tile.column < blocks.count * SIDE;", multiplied("sdd", *WHOLE),
        ),
        "last step of the depth left out": ("(K + TILE_DEPTH - 1) /", "K /", multiplied("sdd", *WHOLE)),
        "not turned": ("stmatrix_x4_transposed(&finished", "stmatrix_x4(&finished", multiplied("dds", *WHOLE)),
        "turned beyond K": (", width, K - column, TILE_ROWS", ", width, HALF, TILE_ROWS", multiplied("dds", *WHOLE)),
        "upper half of a block twice": (
            "row % TILES_DOWN * TILE_ROWS, column * TILE_COLUMNS,\n",
            "0, column * TILE_COLUMNS,\n", multiplied("dsd", *HALVED),
        ),
        "upper half of a stored block twice": ("* SIDE + tile.line", "* SIDE", multiplied("sdd", *HALVED)),
        "first part of rhs for all": ("parts[half] = column / part;", "parts[half] = 0;", parts("sdd")),
        "first part of the depth for all": ("depth % part, depth / part);", "depth % part, 0);", parts("dsd")),
        "parts of the result below each other": (
            "result + Dense{nullptr, K, width}.at(column, tile.row)",
            "result + (long long)column * width + tile.row", parts("dds"),
        ),
    },
}  # fmt: skip


def version_of(file):
    """The version that runs a file; what all share runs under the default."""
    name = file.removeprefix("block_sparse/").removesuffix(".cu")
    return name if name in raw.VERSIONS else "2_tiled"


def test_the_checks_of_the_faults_pass_without_them():
    for file, check in {(file, fault[-1]) for file, faults in FAULTS_IN_RAW_CUDA.items() for fault in faults.values()}:
        check(on(Quick(seed=3), version_of(file)))


@pytest.mark.parametrize(
    ("file", "fault"), [(file, fault) for file, faults in FAULTS_IN_RAW_CUDA.items() for fault in faults]
)
def test_a_fault_planted_in_the_raw_kernels_is_caught(file, fault):
    """A kernel stops, a check refuses what it left, or the result is wrong."""
    right, wrong, check = FAULTS_IN_RAW_CUDA[file][fault]
    stage = on(Planted(file, right, wrong, seed=3), version_of(file))
    with pytest.raises((AssertionError, KernelFault, ValueError)):
        check(stage)


# ---- Numba -------------------------------------------------------------------------------------

SHAPE = Shape(9, 3, 4, 3, 2)  # experts of 6, 5 and 7 rows: whole blocks of 2, and padded ones
SHAPES = [  # (shape, block)
    (SHAPE, 2),
    (SHAPE._replace(L=0), 2),
    (SHAPE._replace(L=1), 2),
    (SHAPE._replace(L=5, k=3), 4),  # k = E, and one block column an expert
    (SHAPE._replace(L=5, E=1, k=1), 2),
    (SHAPE._replace(L=6, k=1, routing="hot"), 2),  # one expert gets every token, two get none
    (SHAPE._replace(L=6, E=4, routing="empty"), 2),
    (SHAPE._replace(L=4, d=1, h=1), 1),
    (SHAPE._replace(L=4, h=6, E=11), 3),  # more experts than the simulator's blocks have threads
]


def checks_at(shape, block):
    return checks_of(build_by_sort(shape.topk_experts(), shape.E), block, shape.d, shape.h, "float32")


OF_SHAPE = checks_at(SHAPE, 2)


@pytest.mark.parametrize("check", OF_SHAPE)
@pytest.mark.parametrize(("shape", "block"), SHAPES, ids=str)
def test_the_numba_kernels_at_every_shape(shape, block, check):
    checks_at(shape, block)[check](NUMBA.open())


@pytest.mark.parametrize(
    ("shape", "block", "activation"),
    [*((*each, "swiglu") for each in SHAPES), *((SHAPE, 2, each) for each in ACTIVATIONS if each != "swiglu")],
    ids=str,
)
def test_the_numba_layer_gives_and_saves_what_the_specification_does(shape, block, activation):
    assert_layer_as_specified(NUMBA.open(), shape.case(activation), block, "float32")


def strange(value):
    """The same numbers, read-only and with strides that no copy of a block of memory has."""
    if not isinstance(value, np.ndarray):
        return value
    spread = np.repeat(value, 2, axis=-1)[..., ::2]
    spread.flags.writeable = False
    return spread


def called_twice(function):
    """``function``, which must give the same bits of strange operands."""

    def checked(*arguments, **options):
        found, again = function(*arguments, **options), function(*map(strange, arguments), **options)
        if isinstance(found, IndexArrays):
            assert_same(again, found)
            return found
        results = (each if isinstance(each, tuple) else (each,) for each in (found, again))
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
        return found

    return checked


@pytest.mark.parametrize("check", OF_SHAPE)
def test_numba_gives_the_same_bits_every_time_even_of_strided_operands(check):
    functions = {name: called_twice(one) for name, one in vars(NUMBA.open()).items() if not name.startswith("_")}
    OF_SHAPE[check](SimpleNamespace(**functions))


@pytest.mark.parametrize("kernel", ["sdd", "dsd"])
def test_numba_addresses_parts_where_they_lie(kernel, monkeypatch):
    one, passed, move = sparse_of(np.tile(MASK, 2), 2, 3, "float32"), [], runtime.all_to_device
    monkeypatch.setattr(runtime, "all_to_device", lambda *arrays: passed.extend(arrays) or move(*arrays))
    of_parts = in_parts(matrix(1, one.K, one.extents[1], "float32"), 2)
    if kernel == "sdd":
        numba_block_sparse.sdd(matrix(2, one.extents[0], one.K, "float32"), of_parts, one.topology)
    else:
        numba_block_sparse.dsd(one.values, one.topology, of_parts, transpose_rhs=True)
    assert any(array is of_parts for array in passed)


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@only_simulated
def test_the_numba_kernels_move_the_bytes_that_their_headers_state(activation, monkeypatch):
    stage, (L, d, h, E, k, _), block = numba_block_sparse, SHAPE, 2
    dispatch = build_by_sort(SHAPE.topk_experts(), E)
    bins = reference.pad(dispatch, block)
    topology = reference.build_topology(bins, h)
    x, y, gates = (positive(0, shape, "float32") for shape in ((L, d), (bins.P, d), (L, k)))
    one = sparse_of(mask_of(topology), block, d, "float32")
    a, b, d_y_swi = positive(1, (3, *one.values.shape), "float32")
    b = b if is_gated(activation) else None
    sizes = {"L": L, "d": d, "h": h, "E": E, "k": k, "R": L * k, "P": bins.P, "nnz": topology.nnz, "block": block}
    sizes |= {"THREADS": runtime.THREADS, "G": 1 if b is None else 2, "W": 0, "K": d, "N": E * h}
    launches = counted_launches(monkeypatch, stage, numba_dispatch)

    def launched(*kernels, **more):
        assert kernels_as_stated(launches, sizes | more) == list(kernels)

    stage.pad(dispatch, block)
    offsets = numba_dispatch.expert_offsets_kernel
    launched(stage.padded_lengths_kernel, offsets, stage.mark_padding_kernel, stage.place_rows_kernel)
    stage.build_topology(bins, h)
    launched(stage.topology_blocks_kernel, stage.topology_offsets_kernel)
    stage.padded_gather(x, bins)
    launched(stage.padded_gather_kernel(False))
    stage.padded_gather(x, bins, gates)
    launched(stage.padded_gather_kernel(True), W=1)
    stage.padded_scatter(y, bins)
    launched(stage.sum_rows_kernel)
    stage.padded_scatter(y, bins, gates)
    launched(combine.combine_kernel, W=1)
    stage.gate_gradient(x, y, bins)
    launched(combine.d_gates_kernel)
    for kernel, transposes, found in multiply_every_way(stage, one):
        transposed = transposes.get("transpose_lhs", False)
        launched(getattr(stage, f"{kernel}_kernel")(*transposes.values()), M=len(found), T=int(transposed))
    lhs, rhs, _ = operands("sdd", one)
    stage.sdd(lhs, in_parts(rhs, E), topology)
    launched(stage.sdd_kernel(False))
    stage.dsd(a, topology, in_parts(rhs, E), transpose_rhs=True)
    launched(stage.dsd_kernel(False, True), M=bins.P, T=0)
    stage.activate(a, b, activation)
    launched(stage.activate_kernel(activation))
    stage.activate_backward(d_y_swi, a, b, activation)
    launched(stage.activate_backward_kernel(activation))


FAULTS_IN_NUMBA = {  # what sees it: {what goes wrong: (text in the module, what takes its place)}
    "structures": {
        "pad: one block too many": ("(rows + block - 1) // block", "(rows + block) // block"),
        "pad: no padding": ("(rows + block - 1) // block * block", "rows"),
        "pad: padding not marked": ("slots[row] = EMPTY", "pass"),
        "pad: last padding row left out": (", padded_offsets[expert + 1],", ", padded_offsets[expert + 1] - 1,"),
        "pad: wrong expert": ("token_expert_indices[slot]", "padded_offsets.shape[0] - 2 - token_expert_indices[slot]"),
        "pad: rows stale": ("rows[slot] = row", "pass"),
        "pad: slots of tokens": ("slots[row] = slot", "slots[row] = slot // 2"),
        "pad: last slot dropped": ("if slot < rows.shape[0]:", "if slot < rows.shape[0] - 1:"),
        "topology: columns of the first expert": ("[first + here] = expert * wide + column", "[first + here] = column"),
        "topology: rows of the expert": ("= first_row + row\n", "= row\n"),
        "topology: blocks not transposed": ("[first + column * rows + row]", "[first + here]"),
        "topology: transposed without the experts before": ("* rows + row] = first + here", "* rows + row] = here"),
        "topology: first blocks only": ("rows * wide, THREADS)", "min(rows * wide, 2), THREADS)"),
        "topology: no first offsets": ("column_offsets[0] = 0", "pass"),
        "topology: offsets of rows off by one": ("= (row + 1) * wide", "= row * wide"),
        "topology: offsets of columns of the expert": ("first_row * wide + (column + 1) *", "(column + 1) *"),
    },
    "rows": {
        "gather: padding stale": ("rows[row, column] =", "if slot != EMPTY:\n                rows[row, column] ="),
        "gather: zeros": ("value = x[slot // k, column]", "value = ZERO"),
        "gather: slot for token": ("x[slot // k, column]", "x[slot % x.shape[0], column]"),
        "gather: last row dropped": ("if row < num_rows:", "if row < num_rows - 2:"),
        "gather: gate left out": ("if weighted:", "if False:"),
        "gather: gate of another slot": ("gates[slot // k, slot % k]", "gates[slot // k, k - 1 - slot % k]"),
        "scatter: last slot dropped": ("range(token * k, (token + 1) * k)", "range(token * k, (token + 1) * k - 1)"),
        "scatter: rows in token order": ("y[rows[slot], column]", "y[slot, column]"),
        "scatter: last token dropped": ("if token < num_tokens:", "if token < num_tokens - 1:"),
        "scatter: gates left out": ("if gates is None:", "if True:"),
        "scatter: slots for rows": ("y, gates, bins.rows)", "y, gates, bins.slots)"),
        "gate gradient: slots for rows": ("d_out, y, bins.rows)", "d_out, y, bins.slots)"),
    },
    "sdd": {
        "sdd: zeros": ("total += lhs[row, t] * rhs_at(rhs, t, column)", "total += ZERO"),
        "sdd: last term dropped": ("range(lhs.shape[1])", "range(lhs.shape[1] - 1)"),
        "sdd: last block dropped": ("if number < nnz:\n            row, ", "if number < nnz - 1:\n            row, "),
        "sdd: wrong block row": ("row_indices[number] * block + i", "row_indices[0] * block + i"),
        "sdd: wrong expert": ("column_indices[number] * block + j", "column_indices[nnz - 1 - number] * block + j"),
        "sdd: blocks transposed": ("values[number, i, j] = total", "values[number, j, i] = total"),
        "dense: first part only": ("[column // columns, row, column % columns]", "[0, row, column % columns]"),
        "dense: wrong columns of a transpose": ("row, column = column, row", "row, column = column, row // 2"),
    },
    "dsd": {
        "dense: parts of a transpose": ("[column // columns, row, column % columns]", "[0, row, column % columns]"),
        "dot: last block dropped": ("(offsets[line], offsets[line + 1])", "(offsets[line], offsets[line + 1] - 1)"),
        "dot: half a block": ("for t in range(block):", "for t in range(block // 2):"),
        "dot: blocks transposed": ("else values[number, i, t]", "else values[number, t, i]"),
        "dot: blocks of the transpose as they lie": ("values[number, t, i] if", "values[number, i, t] if"),
        "dot: no transpose indices": ("transpose_indices[place] if transpose_sparse", "place if transpose_sparse"),
        "dot: wrong rows of the dense matrix": ("first = indices[number] * block", "first = line % 2 * block"),
        "dsd: last row dropped": ("if row < rows:", "if row < rows - 1:"),
        "dsd: rows for columns": ("_by_column(topology) if transpose_lhs", "_by_row(topology) if transpose_lhs"),
    },
    "dds": {
        "dds: last part dropped": ("if part < parts:", "if part < parts - 1:"),
        "dds: first part everywhere": ("place = part * columns + column", "place = column"),
        "dds: no transpose indices": ("transpose_indices[place] if transpose_sparse", "place if transpose_sparse"),
    },
    "activation": {
        "activate: no gate": ("y *= b[number, i, j]", "pass"),
        "activate: last block dropped": ("if number < nnz:\n            y =", "if number < nnz - 1:\n            y ="),
        "activate backward: d_b stale": ("d_b[number, i, j] = d_value * act(a_value)", "pass"),
        "activate backward: d_b without act": ("d_value * act(a_value)", "d_value"),
        "activate backward: slope left out": ("b[number, i, j] * slope(a_value)", "b[number, i, j]"),
        "activate backward: d_a without b": ("d_value * b[number, i, j] * slope", "d_value * slope"),
    },
}


@pytest.mark.parametrize(
    ("seen_by", "fault"), [(seen_by, fault) for seen_by, faults in FAULTS_IN_NUMBA.items() for fault in faults]
)
def test_a_fault_planted_in_the_numba_kernels_is_caught(seen_by, fault):
    stage = numba_with_fault("block_sparse", *FAULTS_IN_NUMBA[seen_by][fault])
    with pytest.raises(AssertionError):
        OF_SHAPE[seen_by](stage)
