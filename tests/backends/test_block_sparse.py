"""MegaBlocks' stage in every backend: structures written out by hand, products against dense ones, the layer."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import routings
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import (
    GOLDEN,
    GOLDEN_MASK,
    GOLDEN_TOPOLOGY,
    PRODUCTS,
    Run,
    assert_activation,
    assert_any_mask,
    assert_any_parts,
    assert_golden,
    assert_layer,
    assert_round_trip,
    assert_rows,
    assert_same,
    assert_structures,
    int32,
    mask_of,
    masks,
    positive,
    sparse_matrices,
    sparse_of,
    with_activation,
)
from stages import alter

from moeblaze_ref.backends.numpy_ref import block_sparse
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.core import sparse_contracts
from moeblaze_ref.core.config import ACTIVATIONS
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.systems import megablocks
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case, standard_cases

RUNS = [  # what needs no GPU; the executor compiles anew for every block size
    Run("numpy", None, "float64", (1, 2, 3, 8)),
    Run("numpy", None, "float32", (1, 2, 3, 8)),
    Run("simt", "1_naive", "float32", (1, 8)),
    Run("simt", "2_tiled", "float32", (1, 3, 8)),
    Run("simt", "3_mma", "bfloat16", (8,), step=8),
    Run("simt", "3_mma", "float16", (8,), step=8),
    Run("simt", "7_persistent", "bfloat16", (128,), step=8),
    Run("simt", "7_persistent", "float16", (128,), step=8),
]
SPECIFICATION, TILED = RUNS[0], RUNS[3]
ROOMS = [SPECIFICATION, TILED]  # for what all versions share: the structures and the checks

every_run = pytest.mark.parametrize("run", RUNS, ids=str)
every_room = pytest.mark.parametrize("run", ROOMS, ids=str)
specification = pytest.mark.parametrize("run", RUNS[:2], ids=str)


@every_room
@pytest.mark.parametrize("name", GOLDEN)
def test_structures_of_routings_by_hand(name, run):
    assert_golden(run.open(), GOLDEN[name])


def test_the_topology_of_a_mask_by_hand():
    assert_same(block_sparse.topology_of(GOLDEN_MASK, 2), GOLDEN_TOPOLOGY)


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
    topology = block_sparse.topology_of(mask, block)
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
def test_every_product_is_the_dense_one(product, run):
    assert_any_mask(product, run)


@every_run
@pytest.mark.parametrize("product", PRODUCTS)
def test_parts_side_by_side_are_one_matrix(product, run):
    assert_any_parts(product, run)


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
    PRODUCTS[product](run.open(), sparse_of(GOLDEN_MASK, run.blocks[0], run.blocks[0], run.dtype), 2)


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


every_case = pytest.mark.parametrize("case", standard_cases(), ids=lambda case: case.name)


@specification
@pytest.mark.parametrize("block", [4, 8, "h"])
@every_case
def test_the_layer_agrees_with_autograd(case, block, run):
    assert_layer(run.open(), case, case.weights.w1.shape[2] if block == "h" else block, run.dtype)


SMALL = [case for case in standard_cases() if case.L < 20]


@pytest.mark.parametrize(
    ("case", "run"),
    [
        pytest.param(case, run, id=f"{case.name}-{run}")
        for run in RUNS
        if run.backend == "simt"
        for case in comparisons.extended("block_sparse", run.version, SMALL)
    ],
)
def test_the_raw_layer_agrees_with_autograd(case, run):
    """On small cases: the cross-check runs all of them."""
    assert_layer(run.open(), case, comparisons.block_of(case), run.dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_case
def test_the_layer_agrees_with_autograd_under_every_activation(case, activation):
    assert_layer(SPECIFICATION.open(), with_activation(case, activation), case.weights.w1.shape[2], "float64")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_raw_layer_agrees_with_autograd_under_every_activation(activation):
    assert_layer(TILED.open(), with_activation(make_case(37, 8, 16, 5, 3, "empty"), activation), 8, TILED.dtype)


EXTREMES = [
    make_case(13, 8, 16, 4, 2, "zipf", "several experts"),
    make_case(5, 1, 1, 1, 1, name="E = d = h = 1"),
    make_case(1, 1, 3, 2, 2, name="one token, d = 1"),
    make_case(0, 1, 1, 1, 1, name="no tokens, E = d = h = 1"),
    make_case(7, 3, 5, 3, 3, name="odd widths"),
]


@pytest.mark.parametrize("run", [run for run in RUNS if 1 in run.blocks], ids=str)
@pytest.mark.parametrize("case", EXTREMES, ids=lambda case: case.name)
def test_blocks_of_a_single_value(case, run):
    assert_layer(run.open(), case, 1, run.dtype)


@every_run
def test_a_second_backward_gives_the_same_bits_from_what_the_first_left_as_it_was(run):
    stage, block = run.open(), run.blocks[-1]
    case = make_case(37, 8, 2 * block, 5, 3, "zipf").astype(run.dtype)
    _, w1, w2, w3 = case.weights
    dispatch, gates = build_by_sort(case.topk_experts, case.E), comparisons.hidden(case)[-1]
    _, saved = stage.forward(case.x, w1, w2, w3, dispatch, gates, "swiglu", block)
    kept = {name: np.array(tensor) for name, tensor in saved.tensors().items()}
    assert {"gates", "x_rows", "a", "b", "y_swi", "y", "slots", "transpose_indices"} <= kept.keys()
    first, second = (stage.backward(case.d_out, saved, w1, w2, w3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    for name, tensor in saved.tensors().items():
        np.testing.assert_array_equal(np.array(tensor), kept[name], err_msg=name)


def forward_of(case):
    """What the specification keeps of a case, and the arguments of its backward behind the gradient and that."""
    _, w1, w2, w3 = case.weights
    dispatch, gates = build_by_sort(case.topk_experts, case.E), comparisons.hidden(case)[-1]
    _, saved = block_sparse.forward(case.x, w1, w2, w3, dispatch, gates, "swiglu", 8)
    return saved, (w1, w2, w3)


def release(case, saved, weights, stage=block_sparse):
    return megablocks.backward(stage, case.d_out, saved, *weights, release=True)


def test_giving_up_changes_no_bit_and_a_second_backward_raises():
    case = make_case(37, 8, 16, 5, 3, "zipf")
    saved, weights = forward_of(case)
    expected, found = block_sparse.backward(case.d_out, saved, *weights), release(case, saved, weights)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(RuntimeError, match="an earlier backward has released what the forward kept"):
        block_sparse.backward(case.d_out, saved, *weights)
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
    saved, weights = forward_of(case)
    born = {name: weakref.ref(array) for name, array in saved.floats().items()}

    def watched(name):
        def step(*arguments, **options):
            seen.append((name, {each for each, array in born.items() if array() is not None}))
            result = getattr(block_sparse, name)(*arguments, **options)
            results = result if isinstance(result, tuple) else (result,)
            born.update(zip(BORN.get(name, ()), map(weakref.ref, results), strict=False))
            return result

        return step

    names = dict.fromkeys(name.split()[0] for name in ALIVE)
    gradients = release(case, saved, weights, SimpleNamespace(**{name: watched(name) for name in names}))
    assert seen == [(name.split()[0], set(alive)) for name, alive in ALIVE.items()]
    assert all(array() is None for array in born.values()) and len(gradients) == 5


# ---- structures that contradict themselves ---------------------------------------------------

BINS = GOLDEN["ragged groups, an empty expert in the middle"].expected()[0]
# Of BINS: row             0  1  2  3  4  5  6  7
#          slots           1  2  4  .  0  .  3  .    padded_offsets 0 4 4 6 8
#          rows            4  0  1  6  2


def changed(structure, changes):
    """The structure with some elements of its arrays replaced: {array: {index: value}}."""
    arrays = {name: getattr(structure, name).copy() for name in changes}
    for name, array in arrays.items():
        for index, value in changes[name].items():
            array[index] = value
    return replace(structure, **arrays)


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


# Of GOLDEN_TOPOLOGY: block               0  1  2  3  4
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
        sparse_contracts.check_topology(changed(GOLDEN_TOPOLOGY, changes))


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
        ({"column_indices": None}, TypeError, "column_indices is a NoneType, but it must be an array of int32"),
        ({"row_indices": int32([[0, 0, 2, 2, 2]])}, ValueError, r"row_indices has shape \(1, 5\), .* 1 dimensions"),
        ({"block": 0}, ValueError, "block is 0, but it must be >= 1"),
        ({"block": -2}, ValueError, "block is -2, but it must be >= 1"),
        ({"block": "2"}, TypeError, r"block is '2' \(str\), but it must be an integer"),
    ],
)
def test_a_topology_of_a_wrong_kind(replaced, error, message):
    with pytest.raises(error, match=message):
        sparse_contracts.check_topology(replace(GOLDEN_TOPOLOGY, **replaced))


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
@given(corruptions(GOLDEN_TOPOLOGY))
def test_a_topology_that_passes_is_that_of_its_own_mask(topology):
    if not refused(sparse_contracts.check_topology, topology):
        assert_same(topology, block_sparse.topology_of(mask_of(topology), topology.block))


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
    case, dtype, topology = LAYER.astype(run.dtype), run.dtype, GOLDEN_TOPOLOGY  # (6, 8), of 5 blocks
    _, w1, w2, w3 = case.weights
    gates = positive(0, (BINS.L, BINS.k), np.promote_types(dtype, np.float32))
    values, a, b, d_y = positive(0, (4, 5, 2, 2), dtype)
    dispatch = GOLDEN["ragged groups, an empty expert in the middle"].dispatch
    layer = {"x": case.x, "w1": w1, "w2": w2, "w3": w3, "dispatch": dispatch, "gates": gates}
    taken = {
        "pad": {"dispatch": dispatch, "block": 2},
        "build_topology": {"bins": BINS, "h": 4},
        "topology_of": {"mask": GOLDEN_MASK, "block": 2},
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
        "activate_backward": {"d_y": d_y, "a": a, "b": b, "activation": "swiglu"},
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


FALLING = changed(GOLDEN_TOPOLOGY, {"row_offsets": {1: 3}})
STRAY = changed(BINS, {"slots": {3: 0}})


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
    ("build_topology", {"bins": GOLDEN_TOPOLOGY}, TypeError, "bins is a Topology, but it must be a PaddedBins"),
    ("topology_of", {"block": 0}, ValueError, "block is 0"),
    ("topology_of", {"mask": GOLDEN_MASK.astype(int)}, TypeError, "mask has dtype int64, but it must be bool"),
    ("topology_of", {"mask": GOLDEN_MASK[0]}, ValueError, "mask has shape .* 2 dimensions"),
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
    ("sdd", {"rhs": None}, TypeError, "rhs is a NoneType"),
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
    ("dsd", {"rhs": None}, TypeError, "rhs is a NoneType"),
    ("dsd", {"values": np.ones((6, 2, 2))}, ValueError, r"values has shape \(6, 2, 2\), but .* \(nnz=5"),
    ("dsd", {"values": with_nan}, ValueError, r"values\[4, 1, 1\] is nan"),
    ("dsd", {"topology": FALLING}, ValueError, r"row_offsets\[2\] is 2"),
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
    ("activate_backward", {"d_y": np.ones((4, 2, 2))}, ValueError, r"d_y has shape \(4, 2, 2\), but .* \(nnz=5"),
    ("activate_backward", {"d_y": None}, TypeError, "d_y is a NoneType"),
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
    ("backward", {"w1": None}, TypeError, "w1 is a NoneType"),
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


@pytest.mark.parametrize(("run", "function"), IN_ROOMS, ids=str)
def test_what_bad_input_differs_from_is_accepted(function, run):
    getattr(run.open(), function)(*arguments(run, function).values())


# ---- planted faults -----------------------------------------------------------------------------------


def all_zeros(function):
    """``function`` that returns zeros of the right shapes."""

    def faulty(*args, **options):
        values = function(*args, **options)
        return tuple(map(np.zeros_like, values)) if isinstance(values, tuple) else np.zeros_like(values)

    return faulty


def without_the_last(function):
    """``function`` that never computes the last block, row or token of its result."""

    def faulty(*args, **options):
        values = function(*args, **options)
        (values[0] if isinstance(values, tuple) else values)[-1] = 0.0
        return values

    return faulty


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


SAMPLE = sparse_of(np.tile(GOLDEN_MASK, 2), 3, 5, "float64")
FAULT_CASE = make_case(37, 12, 20, 5, 3, "zipf")
CHECKS = {
    "golden": lambda stage: [assert_golden(stage, golden) for golden in GOLDEN.values()],
    "mask": lambda stage: assert_same(stage.topology_of(GOLDEN_MASK, 2), GOLDEN_TOPOLOGY),
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


FAULTS = {  # what goes wrong: (function, what takes its place, checks that must see it)
    "zeros: sdd": ("sdd", all_zeros, {"sdd", "sdd in parts", "layer"}),
    "zeros: dsd": ("dsd", all_zeros, {"dsd", "dsd in parts", "layer"}),
    "zeros: dds": ("dds", all_zeros, {"dds", "dds in parts", "layer"}),
    "zeros: gather": ("padded_gather", all_zeros, {"rows", "layer"}),
    "zeros: scatter": ("padded_scatter", all_zeros, {"rows", "layer"}),
    "zeros: gate gradient": ("gate_gradient", all_zeros, {"rows", "layer"}),
    "zeros: activation": ("activate", all_zeros, {"activation", "layer"}),
    "zeros: activation backward": ("activate_backward", all_zeros, {"activation", "layer"}),
    "zeros: to_dense": ("to_dense", all_zeros, {"round trip"}),
    "zeros: from_dense": ("from_dense", all_zeros, {"round trip"}),
    "last block never computed": ("sdd", without_the_last, {"sdd", "sdd in parts", "layer"}),
    "last row never computed": ("dsd", without_the_last, {"dsd", "dsd in parts", "layer"}),
    "last part never computed": ("dds", without_the_last, {"dds", "dds in parts", "layer"}),
    "last token never summed": ("padded_scatter", without_the_last, {"rows", "layer"}),
    "last token without gate gradient": ("gate_gradient", without_the_last, {"rows", "layer"}),
    "last block never activated": ("activate", without_the_last, {"activation", "layer"}),
    "last block without gradient": ("activate_backward", without_the_last, {"activation", "layer"}),
    "last block not stored": ("from_dense", without_the_last, {"round trip"}),
    "w2's product is w1's": ("sdd", with_the_first_rhs, {"layer"}),
    "transposed order ignored": ("_visit", with_stored_order, {"dsd", "dds", "dsd in parts", "dds in parts", "layer"}),
    "blocks not transposed": ("dsd", with_blocks_not_transposed, {"dsd", "dsd in parts", "layer"}),
    "wrong column block": ("sdd", with_next_column_block, {"sdd", "sdd in parts", "layer"}),
    "parts below each other": ("dds", with_parts_below_each_other, {"dds in parts", "layer"}),
    "unpadded offset": ("pad", with_unpadded_rows, {"golden", "layer"}),
    "padding not cleared": ("padded_gather", with_padding_of_ones, {"rows", "layer"}),
    "gate forgotten": (
        "padded_scatter",
        lambda scatter: lambda y, bins, gates=None: scatter(y, bins),
        {"rows", "layer"},
    ),
    "gate forgotten, backward": (
        "padded_gather",
        lambda gather: lambda x, bins, gates=None: gather(x, bins),
        {"rows", "layer"},
    ),
    "gates of another slot": (
        "padded_scatter",
        lambda scatter: lambda y, bins, gates=None: scatter(y, bins, None if gates is None else gates[:, ::-1]),
        {"rows", "layer"},
    ),
    "another token's row": (
        "padded_gather",
        lambda gather: lambda x, bins, gates=None: gather(np.roll(x, 1, axis=0), bins, gates),
        {"rows", "layer"},
    ),
    "gradients of a and b exchanged": (
        "activate_backward",
        lambda backward: lambda *args: backward(*args)[::-1],
        {"activation", "layer"},
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
    if hasattr(getattr(block_sparse, name), "unchecked"):
        alter(monkeypatch, "numpy", f"block_sparse.{name}", plant)
    else:
        monkeypatch.setattr(block_sparse, name, plant(getattr(block_sparse, name)))
    assert seen_by <= checks_that_fail(SPECIFICATION.open())
