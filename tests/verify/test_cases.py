"""The measure of error and the cases themselves: what must fail every bound does, and nothing is tiny or huge."""

import math

import numpy as np
import pytest
from helpers import SHAPES

from moeblaze_ref.backends.numpy_ref import dispatch, layer
from moeblaze_ref.backends.raw_cuda import block_sparse as raw_sparse
from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.backends.raw_cuda import gating as raw_gating
from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.verify import check, comparisons
from moeblaze_ref.verify.cases import (
    GOLDEN_DISPATCH,
    GOLDEN_TOPK_EXPERTS,
    PRINTED_EXAMPLE,
    ROUTINGS,
    example_in_three_columns,
    option_cases,
    random_topk,
    relative_error,
    standard_cases,
)


def test_relative_error_is_relative():
    ref = 1e-30 * np.arange(1.0, 5.0)
    assert relative_error(ref, ref) == 0.0
    assert relative_error(np.zeros(4), ref) == pytest.approx(1.0)
    assert relative_error(2.0 * ref, ref) == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_and_anything_against_zero_fail_every_bound():
    assert not relative_error([np.nan, 1.0], [1.0, 1.0]) < math.inf
    assert not relative_error([1.0, 1.0], [np.nan, 1.0]) < math.inf
    assert not relative_error([np.inf, 1.0], [np.inf, 1.0]) < math.inf
    assert not relative_error([1e-100], [0.0]) < math.inf
    assert relative_error([0.0], [0.0]) == relative_error([], []) == 0.0


def test_shapes_are_never_broadcast():
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.ones((1, 3)), np.ones((2, 3)))


def test_routings_are_what_they_claim():
    counts = {name: np.bincount(random_topk(400, 8, 2, name).ravel(), minlength=8).tolist() for name in ROUTINGS}
    assert counts["hot"][-1] == 400
    assert counts["empty"][:4] == [0, 0, 0, 0] and min(counts["empty"][4:]) > 0
    assert counts["zipf"][0] > 4 * counts["zipf"][-1]
    assert min(counts["uniform"]) > 50


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cases_are_routed_as_they_claim(shape):
    case = shape.case()
    lengths = np.bincount(case.topk_experts.ravel(), minlength=shape.E)
    if shape.routing == "hot":
        assert lengths[-1] == shape.L
    elif shape.routing == "empty":
        assert not lengths[: shape.E // 2].any() and lengths[shape.E // 2 :].all()
    elif shape.routing == "zipf":
        assert lengths[0] > 3 * lengths[-1]
    elif shape.L > 1:
        assert lengths.all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_of_order_one(shape):
    case = shape.case()
    output = layer.forward(case.x, case.weights, shape.k)
    gradients = layer.backward(case.d_out, output.saved, case.weights, 1.0, 1.0)
    for tensor in (output.out, *gradients):
        assert 1e-2 < np.sqrt(np.mean(np.square(tensor))) < 1e2


# The example of MoEBlaze's figure 2 -----------------------------------------------------------------------------------


def test_what_the_paper_prints_of_its_example():
    """The misprints are in what is printed, each as it is described, and nowhere else."""
    printed = {name: item.values for name, item in PRINTED_EXAMPLE.items()}
    tokens = printed["topk_experts"]
    assert tokens == GOLDEN_TOPK_EXPERTS.tolist() and len(tokens) == 5 == printed["L"] - 1
    built = {name: array.tolist() for name, array in GOLDEN_DISPATCH.arrays().items()}
    assert printed["token_expert_indices"] == sum(tokens[:2] + tokens[3:], []) and tokens[2] == [0, 3]
    assert printed["token_index_map"] == built["token_index_map"][:2]
    right = {name for name, array in built.items() if printed[name] == array}
    assert right == {"expert_token_indices", "expert_token_offsets"}
    assert {name for name, item in PRINTED_EXAMPLE.items() if not item.misprint} == right | {"topk_experts"}


def test_the_three_columns_of_the_example():
    """The last column is what the code builds of the five tokens, not what the paper prints."""
    rows = {row["item"].strip("`"): row for row in example_in_three_columns()}
    assert list(rows) == list(PRINTED_EXAMPLE)
    for name, array in dispatch.build(GOLDEN_TOPK_EXPERTS, 4).arrays().items():
        assert rows[name]["what the five tokens give"] == str(array.tolist())
        assert (rows[name]["as printed"] == str(array.tolist())) == (rows[name]["misprint"] == "none")
    assert rows["L"]["as printed"] == "6" and rows["L"]["what the five tokens give"] == "5"
    assert rows["token_index_map"]["as printed"] == "[5, 7]"


# Tiles ----------------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = (
    {"2_tiled": gemm.TILE, "7_persistent": of_hopper}
    | {version: max(getattr(tile, name) for tile in tiles.CANDIDATES[version]) for version in ("3_mma", "3_mma_tf32")}
    for name, of_hopper in (("rows", gemm.ROWS_BOX[1]), ("columns", gemm.HOPPER_COLUMNS))
)
OF_BOTH_PROJECTIONS = [*COLUMNS]
ROWS |= {version: tiles.FIXED[version].rows for version in gemm.TEACHING}
COLUMNS |= {version: tiles.FIXED[version].columns for version in gemm.TEACHING}
WIDEST_BLOCK_TILE = max(max(tile.rows, tile.columns) for tile in raw_sparse.TILES)
TILED = [(stage, version) for stage in BACKENDS["simt"].stages for version in BACKENDS["simt"].versions(stage)]


def widest_tiles(stage, version):
    """The widest tile along every axis that a version of a stage cuts into tiles.

    Scans over the experts take THREADS at a time. A warp looks for a row tile among 32 experts. A warp of the combine
    takes 16 bytes a lane, 8 numbers of 16 bits.
    """
    if stage == "dispatch":
        return {"L": raw_dispatch.THREADS * gemm.WARP, "E": raw_dispatch.THREADS}
    if stage == "gating":
        return {"L": raw_gating.TOKENS[version], "E": gemm.WARP}
    if stage == "combine":
        return {"d": 8 * gemm.WARP}
    if version == "1_naive":
        return {"E": gemm.THREADS} if stage == "block_sparse" else {}
    of_product = "3_mma" if version == "as_printed" else version
    rows, widest = ROWS[of_product], max(ROWS[of_product], COLUMNS[of_product])
    of_experts = {"rows": rows, "d": widest, "h": widest}
    if stage == "block_sparse":
        return of_experts | {"block": ROWS["7_persistent"] if version == "7_persistent" else WIDEST_BLOCK_TILE}
    return of_experts | {"E": gemm.WARP}


@pytest.mark.parametrize("version", OF_BOTH_PROJECTIONS)
@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_two_tiles_along_h_are_checked_with_and_without_a_gate(stage, version):
    """Without one, all columns of a tile are of a."""
    found = check.chosen(BACKENDS["simt"], stage, version, standard_cases() + option_cases())
    assert {is_gated(case.activation) for case in found if sizes(case)["h"] > COLUMNS[version]} == {False, True}


def sizes(case):
    _, d, h = case.weights.w1.shape
    block = comparisons.block_of(case)
    return {"L": case.L, "rows": case.longest_queue, "d": d, "h": h, "E": case.E, "block": block}


@pytest.mark.parametrize(("stage", "version"), TILED)
def test_every_version_is_checked_on_a_second_tile_along_every_axis(stage, version):
    """The last tile is not full, except of a block: Hopper's tiles take no others."""
    found = check.chosen(BACKENDS["simt"], stage, version, standard_cases() + option_cases())
    for axis, width in widest_tiles(stage, version).items():
        of_cases = [sizes(case)[axis] for case in found if case.L]
        assert any(size > width and (size % width or axis == "block") for size in of_cases), (axis, width)
