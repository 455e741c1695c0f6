"""The expert stages in every backend, version, dtype and activation: the oracle's results, and the same bits again."""

import numpy as np
import pytest
from expert_stages import (
    EVERY,
    HARD,
    NUMBA,
    NUMPY,
    PRODUCTS,
    RAGGED,
    SEVERAL_TILES,
    assert_right,
    assert_same_bits,
    blocks_that_stay,
    dtypes_of,
    quick,
    ragged,
    run,
)
from planted import opened_numba, stage_module

from moeblaze_ref.core.config import ACTIVATIONS
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.verify.cases import make_case


@pytest.mark.parametrize(("stage", "version", "dtype"), NUMPY + NUMBA + EVERY)
def test_a_ragged_shape(stage, version, dtype):
    assert_right(stage, version, ragged(version), dtype)


HARD_ON_NUMBA = [
    make_case(0, 7, 6, 3, 2, name="no tokens"),
    make_case(1, 7, 6, 3, 2, name="one token"),
    make_case(7, 7, 6, 3, 1, name="k = 1"),
    make_case(5, 7, 6, 3, 3, name="k = E"),
    make_case(7, 7, 6, 1, 1, name="one expert"),
    make_case(11, 7, 6, 3, 1, "hot", "one expert gets all, two get none"),
    make_case(6, 7, 6, 4, 2, "empty", "empty experts"),
    make_case(3, 1, 1, 3, 2, name="widths of 1"),
]


HARD_ON_SIMT = [*HARD, make_case(33, 80, 136, 3, 2, name="several tiles each way")]
ONE_DTYPE = {(stage, version): dtype for stage, version, dtype in NUMPY + NUMBA + EVERY}  # the last of each version


@pytest.mark.parametrize(
    ("stage", "version", "dtype", "case"),
    [
        pytest.param(stage, version, dtype, case, id=f"{case.name}-{stage}-{version}")
        for (stage, version), dtype in ONE_DTYPE.items()
        for case in (HARD_ON_NUMBA if version == "numba" else HARD_ON_SIMT)
    ],
)
def test_hard_shapes(stage, version, dtype, case):
    assert_right(stage, version, case, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("stage", "version"), [one for one in ONE_DTYPE if one[0] != "combine"])
def test_every_activation(stage, version, activation):
    sizes = (5, 7, 6, 3, 2) if version == "numba" else (37, 16, 24, 5, 2)
    assert_right(stage, version, make_case(*sizes, activation=activation), dtypes_of(stage, version)[0])


@pytest.mark.parametrize(("stage", "version", "dtype"), NUMPY + NUMBA + EVERY)
def test_every_order_of_threads_gives_the_same_bits(stage, version, dtype):
    case = (ragged(version) if version == "numba" else make_case(70, 16, 24, 3, 2)).astype(dtype)
    first, second = (run(stage, version, quick(version, seed), case) for seed in (0, 7))
    assert_same_bits(second, first)


@pytest.mark.parametrize("blocks", [1, 2, 17])
@pytest.mark.parametrize("stage", PRODUCTS)
def test_any_number_of_blocks_that_stay_gives_the_same_bits(stage, blocks):
    case = SEVERAL_TILES.astype("bfloat16")
    first, second = (
        run(stage, "7_persistent", executor, case)
        for executor in (SimtExecutor(), blocks_that_stay(blocks, seed=blocks))
    )
    assert_same_bits(second, first)


@pytest.mark.parametrize("stage", PRODUCTS)
def test_the_plain_build_of_the_hopper_kernels_is_right_too(stage):
    assert_right(stage, "7_persistent", RAGGED, "float16", executor=SimtExecutor(instrumented=False))


def strange(array):
    """The same numbers, read-only and with strides that no copy of a block of memory has."""
    spread = np.repeat(array, 2, axis=-1)[..., ::2]
    spread.flags.writeable = False
    return spread


@pytest.mark.parametrize("stage", [stage for stage, *_ in NUMBA])
def test_operands_of_the_numba_kernels_may_be_strided_and_read_only(stage):
    odd = opened_numba(
        stage_module("numba", stage), lambda array: strange(array) if array.dtype == np.float32 else array
    )
    case = ragged("numba").astype("float32")
    assert_same_bits(run(stage, "numba", odd, case), run(stage, "numba", None, case))
