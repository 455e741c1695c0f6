"""Hopper's instructions and kernels on the GPU that has them: the tests of the CPU, which prove its model."""

import shutil

import pytest
from expert_stages import SEVERAL_TILES, assert_right, assert_same_bits, on, run
from test_hopper import (
    BOXES,
    COPIED,
    assert_arrivals,
    assert_box_arrives,
    assert_copies_arrive,
    assert_product,
    assert_relayed,
    assert_stored,
    both_dtypes,
    both_shapes,
)

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.bench import counters, ladder, report
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")


@pytest.fixture(scope="module")
def cuda():
    """The CuPy executor, with poisoned outputs."""
    from moeblaze_ref.runtime.cupy import CupyExecutor

    executor = CupyExecutor(poisoned=True)
    if executor.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return executor


@both_dtypes
@pytest.mark.parametrize("name", BOXES)
def test_a_box_arrives_as_on_the_cpu(cuda, name, dtype):
    assert_box_arrives(cuda, name, dtype)


def test_copies_phases_and_stores(cuda):
    assert_copies_arrive(cuda)
    assert_arrivals(cuda)
    assert_relayed(cuda)
    assert_stored(cuda)


@both_dtypes
@both_shapes
@pytest.mark.parametrize("b_along_n", [False, True])
@pytest.mark.parametrize("a_along_m", [False, True])
def test_a_product_of_either_layout(cuda, a_along_m, b_along_n, columns, dtype):
    assert_product(cuda, columns, dtype, a_along_m, b_along_n, accumulate=1)


@both_shapes
def test_a_product_of_copies(cuda, columns):
    assert_product(cuda, columns, "bfloat16", False, True, 0, COPIED)


LARGE = make_case(3000, 520, 1096, 9, 3, "zipf", "many tiles")
every_stage = pytest.mark.parametrize("stage", ["expert_up", "expert_down"])


@both_dtypes
@pytest.mark.parametrize("case", [SEVERAL_TILES, LARGE], ids=lambda case: case.name)
@every_stage
def test_the_stages_are_right(cuda, stage, case, dtype):
    assert_right(stage, "7_persistent", case, dtype, executor=cuda)


@every_stage
def test_ten_runs_give_the_same_bits(cuda, stage):
    case = LARGE.astype("bfloat16")
    first = comparisons.RUN[stage](on(stage, "7_persistent", cuda), case)
    for _ in range(9):
        assert_same_bits(comparisons.RUN[stage](on(stage, "7_persistent", cuda), case), first)


@both_dtypes
@pytest.mark.parametrize("version", gemm.TEACHING)
def test_the_teaching_versions_are_right_and_have_the_bits_of_the_hopper_kernel(cuda, version, dtype):
    for case in (SEVERAL_TILES, LARGE):
        assert_right("expert_up", version, case, dtype, executor=cuda)
    rounded = LARGE.astype(dtype)
    expected = comparisons.run_forward(on("expert_up", gemm.HOPPER, cuda), rounded)
    for _ in range(5):
        assert_same_bits(run("expert_up", version, cuda, rounded), expected)


def test_every_step_of_the_ladder_is_timed_and_right(cuda):
    from moeblaze_ref.runtime.device import Gpu

    config = MoEConfig(L=2_048, d=512, h=384, E=8, k=2)
    rows = ladder.time_ladder("small", config, ladder.steps_of(config), 2, Gpu())
    assert len(rows) == len(ladder.LADDER) and report.wrong(rows) == []
    assert all(row["pct_of_cublas"] > 0 for row in rows)


@pytest.mark.skipif(shutil.which("ncu") is None, reason="no Nsight Compute")
def test_ncu_knows_every_metric(cuda):
    from moeblaze_ref.runtime.device import Gpu

    config = MoEConfig(L=512, d=256, h=128, E=4, k=2)
    rows = counters.count("small", config, Gpu())
    assert len(rows) == len(counters.launches(config))
    assert all(0 <= row["tensor_pct"] <= 100 and row["sm_clock_ghz"] > 0 for row in rows)
    assert all(len(row["stalls"]) == counters.SHOWN_STALLS for row in rows)
