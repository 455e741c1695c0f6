"""Hopper's kernels where no tile divides the widths: the same bits, fewer products, and faults of what is left out."""

from dataclasses import replace

import numpy as np
import pytest
from expert_stages import assert_caught, blocks_that_stay, dispatch_of, every_fault, run
from planted import Quick

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.verify.cases import make_case

STAGES = ("expert_up", "expert_down")
# The last tile of columns has 1, 2 or 3 panels of 64, the last step 1, 3 or 4 products of 16; once one tile is all.
WIDTHS = [(328, 264), (440, 304), (48, 424)]
CROWDED = {4: (128, 128), 3: (128, 64), 2: (128,), 1: (64,)}  # columns of the products for so many panels
ALONE = {4: (256,), 3: (256,), 2: (128,), 1: (128,)}  # of consumers with few warps beside them

SMALLEST = (64 + 64) * 16 * 2  # bytes that a product reads


def case_of(widths, activation="swiglu"):
    """Experts whose last tile has more than 64 rows, fewer, or none."""
    return make_case(190, *widths, 4, 2, "zipf", activation=activation).astype("bfloat16")


def with_signed_zeros(case):
    """The case with tokens and gradients of zeros of either sign: sums of such products are zeros, too."""
    x, d_out = case.x.copy(), case.d_out.copy()
    x[3], x[5], x[7, ::2], d_out[3], d_out[9], d_out[11, 1::2] = -0.0, 0.0, -0.0, -0.0, -0.0, -0.0
    return replace(case, x=x, d_out=d_out)


def bits(array):
    """The array's elements as integers."""
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_ragged_tiles_give_the_bits_of_whole_ones(stage, widths, activation):
    case = with_signed_zeros(case_of(widths, activation))
    found = run(stage, gemm.HOPPER, Quick(seed=1), case)
    with tiles.trying(tiles.HopperTile()):
        expected = run(stage, gemm.HOPPER, Quick(seed=2), case)
    for direction, arrays in expected.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(bits(found[direction][name]), bits(array), err_msg=name)


# ---- how much is multiplied -----------------------------------------------------------------------


def panels_of(left, results=1):
    """Panels of B where so many columns are left."""
    return min(4, -(-left // 64) * results)


def products_of(depth):
    """Products of 16 of each step of 64."""
    return [-(-min(64, depth - p) // 16) for p in range(0, depth, 64)]


def read_by_products(columns, rows, depths, width=256, sizes=CROWDED, ragged=True):
    """Bytes of shared memory that products of a group's tiles read: (64 + columns) lines of 16 elements each."""
    bytes_read = 0
    for consumer in range(0, 128 * -(-rows // 128), 64):
        for column in range(0, columns, width):
            panels = panels_of(columns - column, 256 // width) if ragged else 4
            steps = [n if ragged else 4 for depth in depths for n in products_of(depth)]
            if consumer < rows or not ragged:
                bytes_read += sum(steps) * sum((64 + size) * 32 for size in sizes[panels])
    return bytes_read


def read_by_kernel(case, ragged):
    """{kernel: the same of all groups}."""
    d, h = case.weights.w1.shape[1:]
    matrices = 1 + is_gated(case.activation)
    lengths = [int(n) for n in np.diff(dispatch_of(case).expert_token_offsets)]

    def every(columns, depths, **options):
        return sum(read_by_products(columns, rows, depths, ragged=ragged, **options) for rows in lengths)

    weights = sum(read_by_products(h, d, [rows], ragged=ragged) for rows in lengths)
    return {
        "expert_up": every(h, [d], width=256 // matrices, sizes=ALONE),
        "d_x_rows": every(d, [h] * matrices),
        "d_w": weights,
        "expert_down": every(d, [h]),
        "d_hidden": every(h, [d]),
        "d_w3": weights,
    }


def read_from_shared(case):
    """{kernel: counted bytes read from shared memory}, whatever reads them."""
    executor = blocks_that_stay(3, seed=0)
    with executor.recording() as launches:
        for stage in STAGES:
            run(stage, gemm.HOPPER, executor, case)
    return {launch.kernel: launch.shared.read_bytes for launch in launches}


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_only_what_is_there_is_multiplied(activation):
    case = case_of(WIDTHS[1], activation)
    ragged = read_from_shared(case)
    with tiles.trying(tiles.HopperTile()):
        whole = read_from_shared(case)
    expected, of_whole = read_by_kernel(case, ragged=True), read_by_kernel(case, ragged=False)
    for kernel, bytes_read in expected.items():
        assert bytes_read < 0.8 * of_whole[kernel]
        left_out = of_whole[kernel] - bytes_read
        # Those who wait at barriers read them as often as it takes: less than one product all together.
        assert whole[kernel] - ragged[kernel] == pytest.approx(left_out, abs=SMALLEST - 1), kernel


# ---- planted faults -------------------------------------------------------------------------------

FAULTS = {
    "7_persistent": {
        "the last panel left out": ("(left + PANEL - 1) / PANEL * results", "left / PANEL * results"),
        "fewer panels than there are": ("if (panels > LESS)", "if (panels > MOST)"),
        "the last product left out": ("(min(left, TILE_DEPTH) + 15) / 16", "min(left, TILE_DEPTH) / 16"),
        "the first product again": ("(sums, stage, consumer, i)", "(sums, stage, consumer, 0)"),
        "the second consumer multiplies nothing": ("consumer * PANEL < tiles.rows_of(tile) ?", "consumer == 0 ?"),
        "more bytes than come": ("panels * PANEL_BYTES", "B_BYTES"),
        "columns from 128 on in the place of the first": ("FIRST>(sums + FIRST / 2", "FIRST>(sums"),
    }
}
IN_EXPERT_UP = {"7_persistent": {"the second depth ends as the first begins": ("step - of_matrix)", "step)")}}


@pytest.mark.parametrize("stage", STAGES)
@every_fault(FAULTS)
def test_a_planted_fault_is_caught(stage, file, change):
    assert_caught(stage, file, change, case_of(WIDTHS[1]), "bfloat16")


@every_fault(IN_EXPERT_UP)
def test_a_planted_fault_of_two_depths_is_caught(file, change):
    assert_caught("expert_up", file, change, case_of(WIDTHS[1]), "bfloat16")
