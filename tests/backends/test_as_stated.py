"""What the headers of the expert stages' kernels state is what is counted, and Numba's kernels are plain."""

import ast
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_stages import (
    EVERY,
    NUMBA,
    PRODUCTS,
    RAGGED,
    SEVERAL_TILES,
    SMALL,
    STAGES,
    assert_right,
    counted,
    dispatch_of,
    header_symbols,
    planted,
    ragged,
    run,
)
from headers import assert_as_stated, evaluate, stated
from planted import stage_module
from simulator import counted_launches, kernels_as_stated, only_simulated

from moeblaze_ref.backends import numba_cuda
from moeblaze_ref.backends.numba_cuda import activation as numba_activation
from moeblaze_ref.backends.numba_cuda import combine, expert_down, expert_up, router, runtime
from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.runtime.simt.executor import SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.verify.cases import make_case, relative_error
from moeblaze_ref.verify.comparisons import BOUNDS


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize(("stage", "version", "dtype"), EVERY)
def test_the_kernels_ask_for_the_bytes_that_their_headers_state(stage, version, dtype, activation):
    case = make_case(137, 24, 72, 5, 3, "zipf", activation=activation).astype(dtype)
    headers = stated(gemm.file_of(stage, version))
    if stage == "expert_down":
        headers |= stated("expert_down/gates.cu")
    if stage == "expert_up" and version != "1_naive" and version not in gemm.TEACHING:
        headers |= stated("expert_up/sum_rows.cu")
    if version == "2_vector":  # its backward is the first version's
        headers = stated("combine/1_gather.cu") | headers
    launches = counted(stage, version, case)
    assert {launch.kernel for launch in launches} == headers.keys()
    for launch in launches:
        assert_as_stated(launch, headers, header_symbols(version, case))


@pytest.mark.parametrize("stage", PRODUCTS)
def test_blocks_that_stay_ask_for_what_their_headers_state(stage):
    case, headers = SEVERAL_TILES.astype("float16"), stated(f"{stage}/7_persistent.cu")
    dispatch, symbols = dispatch_of(case), header_symbols("7_persistent", case)
    launches = [launch for launch in counted(stage, "7_persistent", case) if launch.kernel in headers]
    assert {launch.kernel for launch in launches} == headers.keys()
    for launch in launches:
        assert_as_stated(launch, headers, symbols)
        assert launch.grid == (SimtExecutor.multiprocessors, 1, 1) and launch.block[0] in gemm.HOPPER_THREADS.values()
    of_rows = gemm.rows_launch(SimtExecutor(), "7_persistent", dispatch, 0)["shared_bytes"]
    of_weights = gemm.weights_launch(SimtExecutor(), "7_persistent", case.E, 0, 0)["shared_bytes"]
    for kernel, header in headers.items():
        asked = of_weights if kernel in ("d_w", "d_w3") else of_rows
        assert evaluate(header.shared, symbols) == asked


def assert_tile(stage, version, tile, case):
    """Right in this tile; its kernels ask for what their headers state, and no banks conflict."""
    executor, headers = SimtExecutor(seed=2), stated(gemm.file_of(stage, version))
    dtype = STAGES[stage].VERSIONS[version][-1]
    with tiles.trying(tile), executor.recording() as launches:
        assert_right(stage, version, case, dtype, executor=executor)
    symbols = header_symbols(version, case.astype(dtype), tile)
    launches = [launch for launch in launches if launch.kernel in headers]
    assert {launch.kernel for launch in launches} == headers.keys()
    for launch in launches:
        assert_as_stated(launch, headers, symbols)
        assert launch.block == (tile.threads, 1, 1)
        assert launch.shared.bank_conflicts == 0


@pytest.mark.parametrize("version", ["3_mma", gemm.TF32])
@pytest.mark.parametrize("stage", PRODUCTS)
def test_several_small_tiles(stage, version):
    assert_tile(stage, version, SMALL, RAGGED)


@pytest.mark.parametrize("stage", PRODUCTS)
def test_a_block_in_tiles_has_the_shared_memory_that_its_header_states(stage):
    constants = {"Scalar": "__half", "ACTIVATION": "swiglu"} | SMALL.constants(itemsize=2)
    source = KernelSource.read(f"{stage}/3_mma.cu", constants)
    for kernel, header in stated(f"{stage}/3_mma.cu").items():
        static = _static_shared_bytes(source, kernel)
        asked = evaluate(header.shared, SMALL.constants(itemsize=2) | {"s": 2})
        assert asked - static == SMALL.shared_bytes, kernel


OTHER_TILES = [  # than the defaults, which every other test runs; bands alone change no code
    (version, tile)
    for version, more in (("3_mma", [tiles.CPU_TILE]), (gemm.TF32, []))
    for tile in dict.fromkeys(replace(tile, band=2) for tile in [*tiles.CANDIDATES[version][1:], *more])
]


@pytest.mark.parametrize(("version", "tile"), OTHER_TILES)
def test_every_tile_that_may_be_chosen(version, tile):
    case = make_case(150, 40, 264, 3, 2, "zipf", "several tiles each way")
    for stage in PRODUCTS:
        assert_tile(stage, version, tile, case)


def conflicts(executor):
    """{kernel: bank conflicts} of the Hopper kernels that leave a tile in shared memory and store it as it is."""
    case = SEVERAL_TILES.astype("float16")
    with executor.recording() as launches:
        for stage in PRODUCTS:
            run(stage, "7_persistent", executor, case)
    found = {launch.kernel: launch.shared.bank_conflicts for launch in launches}
    return {kernel: found[kernel] for kernel in ("expert_up", "d_x_rows", "expert_down")}


def test_finished_tiles_are_handed_over_without_bank_conflicts():
    assert not any(conflicts(SimtExecutor()).values())


def test_finished_tiles_in_plain_rows_would_meet_bank_conflicts(monkeypatch):
    monkeypatch.setattr("planted.quick_builds", nullcontext)  # conflicts are counted
    found = conflicts(planted("expert_up", "7_persistent", "lines[row][chunk ^ row % 8]", "lines[row][chunk]"))
    assert found["expert_up"] and found["d_x_rows"]


# ---- the Numba kernels -------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@only_simulated
def test_the_numba_kernels_move_the_bytes_that_their_headers_state(monkeypatch, activation):
    L, d, h, E, k = 13, 7, 6, 3, 2
    case = make_case(L, d, h, E, k, activation=activation).astype("float32")
    sizes = {"L": L, "d": d, "h": h, "E": E, "k": k, "R": L * k, "THREADS": runtime.THREADS, "TILE": expert_up.TILE}
    sizes |= {"G": 1 + is_gated(activation), "C": -(-h // expert_up.TILE)}
    sizes["tiles"] = int((-(-np.diff(dispatch_of(case).expert_token_offsets) // expert_up.TILE)).sum())
    assert E < sizes["tiles"] and sizes["C"] == 2
    launches, found = counted_launches(monkeypatch, *(stage_module("numba", stage) for stage, *_ in NUMBA)), []
    for stage, *_ in NUMBA:
        run(stage, "numba", None, case)
        found.append(kernels_as_stated(launches, sizes))
    assert found == [
        [numba_activation.act_kernel(activation)],
        [
            expert_up.expert_up_kernel(activation),
            expert_up.d_x_kernel(is_gated(activation)),
            *[expert_up.d_w_kernel] * sizes["G"],
        ],
        [expert_down.expert_down_kernel, expert_down.d_hidden_kernel(activation), expert_down.d_w3_kernel],
        [combine.d_y_kernel, combine.d_gates_kernel, combine.combine_kernel],
    ]


@only_simulated
def test_the_matmul_moves_the_bytes_that_its_header_states(monkeypatch):
    launches = counted_launches(monkeypatch)
    left, right = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((5, 4), (4, 3)))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    assert relative_error(router.forward(left, right), exact) <= BOUNDS["float32"]
    (kernel,) = kernels_as_stated(launches, {"m": 5, "n": 3, "p": 4, "THREADS": runtime.THREADS})
    assert kernel is router.matmul_kernel


def test_the_numba_kernels_have_no_buffer_of_routed_tokens(monkeypatch):
    """Nothing that the expert stages allocate is (R, d), but for y, which the down-projection returns."""
    case, shapes = ragged("numba").astype("float32"), []
    (E, d, h), hidden = case.weights.w1.shape, (case.L * case.k, case.weights.w1.shape[2])
    make = runtime.float32_output
    for module in (runtime, *(stage_module("numba", stage) for stage in PRODUCTS)):
        monkeypatch.setattr(module, "float32_output", lambda shape: shapes.append(shape) or make(shape))
    for stage in PRODUCTS:
        run(stage, "numba", None, case)
    assert shapes == [
        *[*[hidden] * 3, (case.L, d), (E, d, h), (E, d, h)],
        *[(case.L * case.k, d), hidden, hidden, hidden, (case.L, case.k), (E, h, d)],
    ]


@pytest.mark.parametrize("path", sorted(Path(numba_cuda.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_kernels_are_plain(path):
    """No warp operations and no atomics: a reader needs threads, blocks, shared memory and barriers alone."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cuda"
    }
    assert not [
        name for name in used if re.match("atomic|shfl|syncwarp|ballot|vote|match|warp|lane|active|.*_sync", name)
    ]
