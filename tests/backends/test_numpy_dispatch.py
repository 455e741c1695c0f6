"""The specification of dispatch: the paper's golden example, the three steps against the sort, and their checks."""

import numpy as np
import pytest
from helpers import assert_same_dispatch, routings
from hypothesis import given, settings

from moeblaze_ref.backends.numpy_ref import dispatch as stage
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.verify.cases import GOLDEN_DISPATCH, ROUTINGS, random_topk
from moeblaze_ref.verify.cases import GOLDEN_TOPK_EXPERTS as GOLDEN_TOPK

GOLDEN = {name: array.tolist() for name, array in GOLDEN_DISPATCH.arrays().items()}
BUILDERS = [stage.build, stage.build_by_sort]


@pytest.mark.parametrize("build", BUILDERS)
def test_golden_example(build):
    dispatch = build(GOLDEN_TOPK, 4)
    assert {name: array.tolist() for name, array in dispatch.arrays().items()} == GOLDEN
    assert (dispatch.L, dispatch.E, dispatch.k, dispatch.R) == (5, 4, 2, 10)


def test_golden_example_step_by_step():
    routed = stage.dense_map(GOLDEN_TOPK, 4)
    assert routed.dtype == np.int32
    assert routed.tolist() == [[-1, -1, 0, 0], [1, 1, -1, -1], [2, -1, -1, 2], [-1, 3, 3, -1], [4, -1, -1, 4]]
    lengths = stage.expert_lengths(routed)
    assert lengths.dtype == np.int32 and lengths.tolist() == [3, 2, 2, 3]
    offsets = stage.expert_offsets(lengths)
    assert offsets.dtype == np.int32 and offsets.tolist() == GOLDEN["expert_token_offsets"]
    assert stage.exclusive_scan(routed[:, 0] != stage.EMPTY).tolist() == [0, 0, 1, 2, 2]
    expert_token_indices, token_index_map = stage.route_indices(routed, offsets, GOLDEN_TOPK)
    assert expert_token_indices.tolist() == GOLDEN["expert_token_indices"]
    assert token_index_map.tolist() == GOLDEN["token_index_map"]


def test_golden_example_as_printed():
    routed, offsets = stage.dense_map(GOLDEN_TOPK, 4), GOLDEN_DISPATCH.expert_token_offsets
    locations = stage.location_map(routed, offsets)
    assert locations.dtype == np.int32
    assert locations.tolist() == [[0, 3, 5, 7], [0, 3, 6, 8], [1, 4, 6, 8], [2, 4, 6, 9], [2, 5, 7, 9]]
    expert_token_indices, token_index_map = stage.write_indices(routed, locations, GOLDEN_TOPK)
    assert expert_token_indices.dtype == token_index_map.dtype == np.int32
    assert expert_token_indices.tolist() == GOLDEN["expert_token_indices"]
    assert token_index_map.tolist() == GOLDEN["token_index_map"]


@settings(deadline=None, max_examples=60)
@given(routings())
def test_both_phases_as_printed_equal_the_third_step(routing):
    routed, topk_experts = stage.dense_map(*routing), routing[0]
    offsets = stage.expert_offsets(stage.expert_lengths(routed))
    found = stage.write_indices(routed, stage.location_map(routed, offsets), topk_experts)
    for array, expected in zip(found, stage.route_indices(routed, offsets, topk_experts), strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


@settings(deadline=None, max_examples=60)
@given(routings())
def test_three_steps_equal_the_sort(routing):
    assert_same_dispatch(stage.build(*routing), stage.build_by_sort(*routing))


@settings(deadline=None, max_examples=60)
@given(routings())
def test_expert_groups_are_ascending_and_complete(routing):
    topk_experts, num_experts = routing
    dispatch = stage.build(topk_experts, num_experts)
    for expert, group, tokens in stage.expert_groups(dispatch):
        assert np.array_equal(tokens, np.flatnonzero((topk_experts == expert).any(axis=1)))
        assert group.stop - group.start == len(tokens)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [stage.TILE - 1, stage.TILE, stage.TILE + 1, 3 * stage.TILE + 17])
def test_scan_carries_over_tiles(num_tokens, routing):
    topk_experts = random_topk(num_tokens, 6, 3, routing)
    assert_same_dispatch(stage.build(topk_experts, 6), stage.build_by_sort(topk_experts, 6))


@pytest.mark.parametrize("tile", [1, 2, 7])
def test_the_tile_changes_nothing(tile, monkeypatch):
    topk_experts = random_topk(23, 5, 2, "zipf")
    expected = stage.build(topk_experts, 5)
    monkeypatch.setattr(stage, "TILE", tile)
    assert_same_dispatch(stage.build(topk_experts, 5), expected)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(0, 4, 2), (1, 1, 1), (1, 1500, 1500), (3, 1500, 40)])
def test_edges(build, num_tokens, num_experts, k):
    topk_experts = random_topk(num_tokens, num_experts, k)
    dispatch = build(topk_experts, num_experts)
    assert (dispatch.L, dispatch.E, dispatch.R) == (num_tokens, num_experts, num_tokens * k)
    assert_same_dispatch(dispatch, stage.build_by_sort(topk_experts, num_experts))


@pytest.mark.parametrize("build", BUILDERS)
def test_the_dispatch_outlives_its_input(build):
    topk_experts = GOLDEN_TOPK.copy()
    dispatch = build(topk_experts, 4)
    topk_experts[:] = 0
    assert {name: array.tolist() for name, array in dispatch.arrays().items()} == GOLDEN


PLANTED_FAULTS = {
    "zeros": lambda arrays: {name: np.zeros_like(array) for name, array in arrays.items()},
    "off-by-one offset": lambda arrays: {**arrays, "expert_token_offsets": arrays["expert_token_offsets"] + 1},
    "dropped last row": lambda arrays: {**arrays, "token_index_map": arrays["token_index_map"][:-1]},
    "expert order reversed": lambda arrays: {**arrays, "expert_token_indices": arrays["expert_token_indices"][::-1]},
    "int64": lambda arrays: {name: array.astype(np.int64) for name, array in arrays.items()},
}


@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_a_planted_fault_fails_the_comparison(fault):
    dispatch = stage.build(GOLDEN_TOPK, 4)
    faulty = type(dispatch)(**PLANTED_FAULTS[fault](dispatch.arrays()), k=dispatch.k)
    with pytest.raises(AssertionError):
        assert_same_dispatch(faulty, dispatch)


@pytest.mark.parametrize(
    ("topk_experts", "num_experts", "error", "message"),
    [
        (GOLDEN_TOPK, 3, ValueError, r"topk_experts\[0, 1\] is 3, but there are only 3 experts \(valid: 0..2\)"),
        (GOLDEN_TOPK - 1, 4, ValueError, r"topk_experts\[1, 0\] is -1"),
        (np.array([[0, 1], [2, 2]], np.int32), 4, ValueError, r"topk_experts\[1\] names expert 2 twice"),
        (GOLDEN_TOPK, 1, ValueError, "k is 2, but there are only 1 experts"),
        (GOLDEN_TOPK, 0, ValueError, "num_experts is 0, but it must be >= 1"),
        (GOLDEN_TOPK, 4.0, TypeError, "num_experts is 4.0"),
        (GOLDEN_TOPK[:, :0], 4, ValueError, "k is 0, but it must be >= 1"),
        (GOLDEN_TOPK[0], 4, ValueError, "must have 2 dimensions"),
        (GOLDEN_TOPK.astype(np.int64), 4, TypeError, "topk_experts has dtype int64, but it must be int32"),
        (GOLDEN_TOPK.tolist(), 4, TypeError, "topk_experts is a list"),
        (GOLDEN_TOPK[:, ::-1], 4, ValueError, "topk_experts is not C-contiguous"),
    ],
)
def test_bad_choices(topk_experts, num_experts, error, message):
    for function in (stage.build, stage.build_by_sort, stage.dense_map):
        with pytest.raises(error, match=message):
            function(topk_experts, num_experts)


@pytest.mark.parametrize("function", [stage.build, stage.build_by_sort, stage.dense_map])
def test_more_rows_than_int32_counts_are_refused_unread(function, tmp_path):
    sparse = np.memmap(tmp_path / "topk_experts", dtype=np.int32, mode="w+", shape=(2**30, 2))  # a file of holes
    with pytest.raises(ValueError, match=r"R = L \* k = 1073741824 \* 2 = 2147483648, but int32 indices allow"):
        function(sparse, 4)


DENSE = stage.dense_map(GOLDEN_TOPK, 4)
OFFSETS = np.array(GOLDEN["expert_token_offsets"], dtype=np.int32)
LOCATIONS = stage.location_map(DENSE, OFFSETS)


BAD_STEPS = [  # (a call of a room's dispatch module, the error, its message)
    (lambda room: room.dense_map(GOLDEN_TOPK, 3), ValueError, r"topk_experts\[0, 1\] is 3, .* \(valid: 0..2\)"),
    (lambda room: room.dense_map(GOLDEN_TOPK - 1, 4), ValueError, r"topk_experts\[1, 0\] is -1"),
    (lambda room: room.dense_map(GOLDEN_TOPK[0], 4), ValueError, "topk_experts has shape"),
    (lambda room: room.dense_map(GOLDEN_TOPK.astype(np.int64), 4), TypeError, "topk_experts has dtype int64"),
    (lambda room: room.dense_map(GOLDEN_TOPK.tolist(), 4), TypeError, "topk_experts is a list"),
    (lambda room: room.dense_map(GOLDEN_TOPK, 4.0), TypeError, "num_experts is 4.0"),
    (lambda room: room.dense_map(GOLDEN_TOPK, 0), ValueError, "num_experts is 0, but it must be >= 1"),
    (lambda room: room.dense_map(np.zeros((3, 2), np.int32), 4), ValueError, r"topk_experts\[0\] names expert 0 twice"),
    (lambda room: room.expert_lengths(DENSE.astype(np.int64)), TypeError, "dense_map has dtype int64"),
    (lambda room: room.expert_lengths(DENSE[0]), ValueError, "dense_map has shape"),
    (lambda room: room.expert_offsets(np.array([3, -2], np.int32)), ValueError, r"lengths\[1\] is -2"),
    (lambda room: room.expert_offsets(np.full(2, 2**30, np.int32)), ValueError, "sum of the lengths, is 2147483648"),
    (lambda room: room.expert_offsets(np.ones(2)), TypeError, "lengths has dtype float64"),
    (lambda room: room.expert_offsets(DENSE), ValueError, "must have 1 dimensions"),
    (lambda room: room.route_indices(DENSE, OFFSETS + 1, GOLDEN_TOPK), ValueError, r"offsets\[0\] is 1, .* must be 0"),
    (lambda room: room.route_indices(DENSE, OFFSETS // 2, GOLDEN_TOPK), ValueError, r"offsets\[1\] is 1, .* must be 3"),
    (lambda room: room.route_indices(DENSE + 1, OFFSETS, GOLDEN_TOPK), ValueError, r"dense_map\[0, 0\] is 0, .* -1"),
    (lambda room: room.route_indices(DENSE[0], OFFSETS, GOLDEN_TOPK), ValueError, "dense_map has shape"),
    (lambda room: room.route_indices(DENSE, OFFSETS.astype(np.int64), GOLDEN_TOPK), TypeError, "offsets has dtype"),
    (lambda room: room.route_indices(DENSE, OFFSETS, GOLDEN_TOPK - 1), ValueError, r"topk_experts\[1, 0\] is -1"),
    (lambda room: room.route_indices(DENSE[:4], OFFSETS, GOLDEN_TOPK), ValueError, r"must be \(L=4, k\)"),
    (lambda room: room.route_indices(DENSE, OFFSETS[[0, 1, 4]], GOLDEN_TOPK), ValueError, r"must be \(E \+ 1=5\)"),
    (lambda room: room.location_map(DENSE[0], OFFSETS), ValueError, "dense_map has shape"),
    (lambda room: room.location_map(DENSE, OFFSETS[:4]), ValueError, r"must be \(E \+ 1=5\)"),
    (lambda room: room.location_map(DENSE, OFFSETS + 1), ValueError, r"offsets\[0\] is 1, .* must be 0"),
    (lambda room: room.location_map(DENSE, OFFSETS / 1.0), TypeError, "offsets has dtype float64"),
    (lambda room: room.write_indices(DENSE + 1, LOCATIONS, GOLDEN_TOPK), ValueError, r"dense_map\[0, 0\] is 0, .* -1"),
    (
        lambda room: room.write_indices(DENSE, LOCATIONS + 1, GOLDEN_TOPK),
        ValueError,
        r"location_map\[0, 0\] is 1, .* 0",
    ),
    (lambda room: room.write_indices(DENSE, LOCATIONS[:4], GOLDEN_TOPK), ValueError, r"must be \(L=5, E=4\)"),
    (lambda room: room.write_indices(DENSE, LOCATIONS.astype(int), GOLDEN_TOPK), TypeError, "location_map has dtype"),
]


@pytest.mark.parametrize("room", ["numpy", "numba"])
@pytest.mark.parametrize(("call", "error", "message"), BAD_STEPS)
def test_bad_input_of_the_steps(room, call, error, message):
    with pytest.raises(error, match=message):
        call(BACKENDS[room].stage("dispatch"))


def test_bad_input_of_the_scan():
    with pytest.raises(TypeError, match="flags has dtype int32, but it must be bool"):
        stage.exclusive_scan(DENSE[:, 0])
