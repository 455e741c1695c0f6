"""The expert stages in raw CUDA: each version, dtype and activation on the CPU, their memory, planted faults."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from headers import evaluate, stated
from planted import Planted, Quick

from moeblaze_ref.backends.numpy_ref import activation as reference_activation
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort, expert_groups
from moeblaze_ref.backends.raw_cuda import activation, combine, expert_down, expert_up, gemm, layer, tiles
from moeblaze_ref.backends.registry import OpenStage
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, is_gated
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case, relative_error

STAGES = {"expert_up": expert_up, "expert_down": expert_down, "combine": combine}
VERSIONS = {stage: getattr(module, "FORWARD_VERSIONS", module.VERSIONS) for stage, module in STAGES.items()}
EVERY = [
    (stage, version, dtype)
    for stage, versions in VERSIONS.items()
    for version, able in versions.items()
    for dtype in able
]
RAGGED = make_case(137, 24, 72, 5, 3, "zipf", "no tile divides it")
IN_PARTS_SIZES = 70, 304, 16, 3, 2
IN_PARTS = make_case(*IN_PARTS_SIZES)
SMALL = tiles.MmaTile(64, 128, 32, 3, 32, 64, band=3)  # of which RAGGED has several, and bands that do not fill up
SEVERAL_TILES = make_case(333, 136, 264, 5, 2, "empty", "several tiles of the Hopper kernels, two experts without rows")
DEEP = make_case(150, 328, 136, 3, 2, "empty", "more steps than a ring has stages")


def opened(stage, version, seed=0):
    """The stage as numpy functions on the SIMT executor."""
    return on(stage, version, Quick(seed=seed))


def on(stage, version, executor):
    """The stage as numpy functions on a given executor."""
    options = {"executor": executor, "version": version}
    return OpenStage(STAGES[stage], nullcontext, executor.from_numpy, executor.to_numpy, options)


# What the teaching versions have: the forward alone.
FORWARD = dict.fromkeys(gemm.TEACHING, comparisons.run_forward)
EXPECT = dict.fromkeys(gemm.TEACHING, comparisons.expect_forward)


def run(stage, version, executor, case):
    """Results of a version on a given executor."""
    return FORWARD.get(version, comparisons.RUN[stage])(on(stage, version, executor), case)


def verdicts(stage, version, case, dtype, executor=None):
    """{direction: (error, bound)} of a version on a case in a dtype."""
    rounded = case.astype(dtype)
    found = run(stage, version, executor or Quick(), rounded)
    expect = EXPECT.get(version, comparisons.EXPECT[stage])
    exact, baseline = (expect(rounded, t) for t in (torch.float64, getattr(torch, dtype)))
    return {
        d: comparisons.compare(found[d], exact[d], comparisons.precision(stage, version, dtype), baseline[d])
        for d in exact
    }


def assert_right(*arguments, **options):
    for direction, (error, bound) in verdicts(*arguments, **options).items():
        assert error <= bound, direction


def assert_same_bits(found, expected):
    """Equal arrays in each direction."""
    for direction in expected:
        for name, array in expected[direction].items():
            np.testing.assert_array_equal(found[direction][name], array, err_msg=name)


@pytest.mark.parametrize(("stage", "version", "dtype"), EVERY)
def test_a_ragged_shape(stage, version, dtype):
    assert_right(stage, version, RAGGED, dtype)


@pytest.mark.parametrize("d", [1, 3, 34, 100, 264])  # packs of 1, 1, 2, 4 and 8 narrow elements
@pytest.mark.parametrize("dtype", gemm.WIDE)
def test_the_rows_of_a_token_are_summed_at_every_width(d, dtype):
    case = make_case(21, d, 8, 7, 6, "zipf")
    assert_right("combine", "2_vector", case, dtype)
    assert_right("expert_up", "2_tiled", case, dtype)
    rounded = case.astype(dtype)
    first, second = (comparisons.run_combine(opened("combine", version), rounded) for version in combine.VERSIONS)
    np.testing.assert_array_equal(first["forward"]["out"], second["forward"]["out"])


def test_a_token_of_more_slots_than_lanes_is_refused():
    case = make_case(3, 8, 8, 40, 33).astype("float32")
    dispatch, (_, w1, w2, _) = build_by_sort(case.topk_experts, case.E), case.weights
    rows = np.ones((dispatch.R, 8), np.float32)
    with pytest.raises(ValueError, match="dispatch.k is 33, but it must be 1..32"):
        combine.forward(rows, np.ones((3, 33), np.float32), dispatch)
    with pytest.raises(ValueError, match="dispatch.k is 33, but it must be 1..32"):
        expert_up.input_gradient(rows, rows, w1, w2, dispatch)


@pytest.mark.parametrize(
    ("stage", "version"), [(stage, version) for stage, versions in VERSIONS.items() for version in versions]
)
@pytest.mark.parametrize(
    "case",
    [
        make_case(1, 8, 16, 4, 2, name="one token"),
        make_case(9, 8, 16, 4, 4, name="k = E"),
        make_case(150, 16, 8, 5, 1, "hot", "one expert gets all"),
        make_case(41, 8, 16, 8, 2, "empty", "empty experts"),
        make_case(0, 8, 16, 4, 2, name="no tokens"),
        make_case(40, 8, 8, 70, 8, name="more experts than a warp"),
        make_case(33, 80, 136, 3, 2, name="several tiles each way"),
    ],
    ids=lambda case: case.name,
)
def test_hard_shapes(stage, version, case):
    assert_right(stage, version, case, VERSIONS[stage][version][-1])


def blocks_that_stay(blocks, seed):
    """An executor of a device with so many multiprocessors, each of which keeps a block of 7_persistent."""
    executor = SimtExecutor(seed=seed)
    executor.multiprocessors = blocks
    return executor


@pytest.mark.parametrize("blocks", [1, 2, 17])
@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_any_number_of_blocks_that_stay_gives_the_same_bits(stage, blocks):
    case = SEVERAL_TILES.astype("bfloat16")
    first, second = (
        comparisons.RUN[stage](on(stage, "7_persistent", executor), case)
        for executor in (SimtExecutor(), blocks_that_stay(blocks, seed=blocks))
    )
    assert_same_bits(second, first)


@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_the_plain_build_of_the_hopper_kernels_is_right_too(stage):
    assert_right(stage, "7_persistent", RAGGED, "float16", executor=SimtExecutor(instrumented=False))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("stage", "version"), [(stage, version) for stage in ("expert_up", "expert_down") for version in VERSIONS[stage]]
)
def test_every_activation(stage, version, activation):
    case = make_case(37, 16, 24, 5, 2, activation=activation)
    assert_right(stage, version, case, VERSIONS[stage][version][0])


@pytest.mark.parametrize(("stage", "version", "dtype"), EVERY)
def test_every_order_of_threads_gives_the_same_bits(stage, version, dtype):
    case = make_case(70, 16, 24, 3, 2).astype(dtype)
    first, second = (run(stage, version, Quick(seed=seed), case) for seed in (0, 7))
    assert_same_bits(second, first)


@pytest.mark.parametrize("dtype", gemm.NARROW)
@pytest.mark.parametrize("version", gemm.TEACHING)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_teaching_versions_have_the_bits_of_the_hopper_kernel(version, dtype, activation):
    """Each result is the same chain of products, 16 of the depth at a time."""
    case = make_case(150, 328, 264, 3, 2, "empty", activation=activation).astype(dtype)
    found, expected = (run_forward_on(version, case) for version in (version, gemm.HOPPER))
    assert_same_bits(found, expected)


def run_forward_on(version, case):
    return comparisons.run_forward(opened("expert_up", version, seed=2), case)


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_what_a_teaching_version_stores_depends_on_no_policy(version):
    case = RAGGED.astype("bfloat16")
    arguments = case.x, *case.weights[1:3], build_by_sort(case.topk_experts, case.E), case.activation
    whole = expert_up.forward(*arguments, executor=Quick(), version=version)
    for stores in (("a",), ("y_swi",)):
        part = expert_up.forward(*arguments, stores, executor=Quick(), version=version)
        kept = [array is not None for array in part]
        assert kept == ([True, True, False] if stores == ("a",) else [False, False, True])
        for found, expected in zip(part, whole, strict=True):
            assert found is None or np.array_equal(found, expected)


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_a_teaching_version_has_no_backward(version):
    case = RAGGED.astype("bfloat16")
    dispatch, (d_a, d_b) = build_by_sort(case.topk_experts, case.E), comparisons.d_hidden(case)
    with pytest.raises(ValueError, match=f"unknown version of expert_up '{version}'"):
        expert_up.input_gradient(d_a, d_b, *case.weights[1:3], dispatch, version=version)
    with pytest.raises(ValueError, match=f"unknown version of expert_up '{version}'"):
        expert_up.weight_gradient(d_a, case.x, dispatch, version=version)
    assert version not in layer.VERSIONS and version not in expert_down.VERSIONS


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(("version", "dtype"), [(version, dtype) for s, version, dtype in EVERY if s == "expert_down"])
def test_the_gradients_of_a_and_b_may_take_their_places(version, dtype, activation):
    case = make_case(137, 24, 72, 5, 3, "zipf", activation=activation).astype(dtype)
    a, b, _, gates = comparisons.hidden(case)
    dispatch, how = build_by_sort(case.topk_experts, case.E), {"executor": SimtExecutor(seed=5), "version": version}

    def gradients(a, b, **options):
        operands = case.d_out, gates, a, b, case.weights.w3, dispatch, activation
        return expert_down.hidden_gradients(*operands, **options, **how)

    expected = gradients(a, b)
    found = gradients(a, b, overwrite=True)
    assert found[0] is a and found[1] is b
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or np.array_equal(one, other)


# ---- bytes -----------------------------------------------------------------------------------


def counted(stage, version, case):
    """The launches of a stage's forward and backward."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        run(stage, version, executor, case)
    return launches


def header_symbols(version, case, tile=None):
    """What the formulas of a header mean for a case."""
    offsets = build_by_sort(case.topk_experts, case.E).expert_token_offsets
    lengths = np.diff(offsets)
    d, h = case.weights.w1.shape[1:]
    rows, columns = {"2_tiled": (64, 64), "7_persistent": (128, 256)}.get(version, (1, 64))
    s, G = np.dtype(case.x.dtype).itemsize, 1 + is_gated(case.activation)
    symbols = {
        **{"L": case.L, "d": d, "h": h, "E": case.E, "k": case.k, "R": case.L * case.k, "THREADS": 256},
        **{"s": s, "G": G, "P": 1, "Y": 1},
        **{"C": -(-h // columns), "D": -(-d // columns), "W": -(-d // 128)},
    }
    if version in gemm.TEACHING:
        tile = tiles.FIXED[version]
        rows = tile.rows
        symbols |= tile.constants(s) | {"C": -(-G * h // tile.columns)}
    elif "mma" in version:
        tile = tile or tiles.DEFAULTS[version]
        rows, columns = tile.rows, tile.columns
        symbols |= tile.symbols(s, d, h, G)
    return symbols | {
        **{"tiles": int((-(-lengths // rows)).sum()), "terms": h if version == "1_naive" else -(-h // columns)},
        **{"X": int((lengths > 0).sum()), "boxes": rows_in_boxes(offsets, rows)},
    }


def rows_in_boxes(offsets, height):
    """Rows that boxes of this height find in the whole matrix, one from the first row of each tile on."""
    begins = [begin for first, end in itertools.pairwise(offsets) for begin in range(first, end, height)]
    return sum(min(height, int(offsets[-1]) - begin) for begin in begins)


def assert_as_stated(launch, header, symbols):
    symbols |= {"blocks": int(np.prod(launch.grid))}
    assert launch.read_bytes == evaluate(header.read, symbols), f"{launch.kernel} reads {header.read}"
    assert launch.written_bytes == evaluate(header.written, symbols), f"{launch.kernel} writes {header.written}"


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize(("stage", "version", "dtype"), EVERY)
def test_the_kernels_ask_for_the_bytes_that_their_headers_state(stage, version, dtype, activation):
    case = make_case(137, 24, 72, 5, 3, "zipf", activation=activation).astype(dtype)
    headers = stated(gemm.file_of(stage, version))
    if stage == "expert_down":
        headers |= stated("expert_down/0_gates.cu")
    if stage == "expert_up" and version != "1_naive" and version not in gemm.TEACHING:
        headers |= stated("expert_up/0_sum_rows.cu")
    if version == "2_vector":  # its backward is the first version's
        headers = stated("combine/1_gather.cu") | headers
    launches = counted(stage, version, case)
    assert {launch.kernel for launch in launches} == headers.keys()
    for launch in launches:
        assert_as_stated(launch, headers[launch.kernel], header_symbols(version, case))


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_the_teaching_versions_launch_what_their_headers_state(version):
    case = SEVERAL_TILES.astype("float16")
    (launch,), symbols = counted("expert_up", version, case), header_symbols(version, case)
    header = stated(f"expert_up/{version}.cu")["expert_up"]
    assert_as_stated(launch, header, symbols)
    assert launch.block == (tiles.FIXED[version].threads, 1, 1)
    static = _static_shared_bytes(KernelSource.read(f"expert_up/{version}.cu", CONSTANTS_OF[version]), "expert_up")
    assert 0 <= static + tiles.FIXED[version].shared_bytes - evaluate(header.shared, symbols) < 16
    assert launch.shared.bank_conflicts == 0


CONSTANTS_OF = {version: gemm.constants("float16", "swiglu", tile) for version, tile in tiles.FIXED.items()}


@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_blocks_that_stay_ask_for_what_their_headers_state(stage):
    case, headers = SEVERAL_TILES.astype("float16"), stated(f"{stage}/7_persistent.cu")
    dispatch, symbols = build_by_sort(case.topk_experts, case.E), header_symbols("7_persistent", case)
    launches = [launch for launch in counted(stage, "7_persistent", case) if launch.kernel in headers]
    assert {launch.kernel for launch in launches} == headers.keys()
    for launch in launches:
        assert_as_stated(launch, headers[launch.kernel], symbols)
        assert launch.grid == (SimtExecutor.multiprocessors, 1, 1) and launch.block[0] in gemm.HOPPER_THREADS.values()
    of_rows = gemm.rows_launch(SimtExecutor(), "7_persistent", dispatch, 0)["shared_bytes"]
    of_weights = gemm.weights_launch(SimtExecutor(), "7_persistent", case.E, 0, 0)["shared_bytes"]
    for kernel, header in headers.items():
        asked = of_weights if kernel in ("d_w", "d_w3") else of_rows
        assert evaluate(header.shared, symbols) == asked


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("dtype", gemm.NARROW)
def test_d_x_in_parts_of_its_columns_is_the_same_from_half_the_rows(dtype, activation, monkeypatch):
    case = make_case(*IN_PARTS_SIZES, activation=activation).astype(dtype)
    assert gemm.parts_of_rows("7_persistent", case.L * case.k, 304, 16) == [(0, 304)]  # too few rows
    whole = comparisons.RUN["expert_up"](opened("expert_up", "7_persistent"), case)
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    executor = SimtExecutor(seed=1)
    with executor.recording() as launches:
        parts = comparisons.RUN["expert_up"](on("expert_up", "7_persistent", executor), case)
    assert_same_bits(parts, whole)
    headers = stated("expert_up/7_persistent.cu") | stated("expert_up/0_sum_rows.cu")
    launches = [launch for launch in launches if launch.kernel in ("d_x_rows", "sum_rows")]
    assert [launch.kernel for launch in launches] == ["d_x_rows", "sum_rows"] * 2
    for launch, width in zip(launches, (256, 256, 48, 48), strict=True):
        symbols = header_symbols("7_persistent", case) | {"d": width, "D": 1}
        assert_as_stated(launch, headers[launch.kernel], symbols)
        rows = launch.buffers["rows"]
        assert rows.read_bytes + rows.written_bytes == 2 * case.L * case.k * width


def output_in_parts(executor, dtype):
    """The output of a case in one part, and in two."""
    case = IN_PARTS.astype(dtype)
    dispatch, (*_, y_swi, gates), w3 = (
        build_by_sort(case.topk_experts, case.E),
        comparisons.hidden(case),
        case.weights.w3,
    )
    options = {"executor": executor, "version": "7_persistent"}
    y = expert_down.forward(y_swi, w3, dispatch, **options)
    whole = combine.forward(y, gates, dispatch, executor=executor)
    return whole, expert_down.output_in_parts(y_swi, w3, gates, dispatch, **options)


@pytest.mark.parametrize("dtype", gemm.NARROW)
def test_the_output_in_parts_of_its_columns_is_the_same_from_half_the_rows(dtype, monkeypatch):
    executor = SimtExecutor(seed=1)
    assert output_in_parts(executor, dtype)[1] is None  # too few rows
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    with executor.recording() as launches:
        whole, parts = output_in_parts(executor, dtype)
    np.testing.assert_array_equal(parts, whole)
    headers = stated("expert_down/7_persistent.cu") | stated("combine/2_vector.cu")
    launches = launches[2:]
    assert [launch.kernel for launch in launches] == ["expert_down", "combine"] * 2
    for launch, width in zip(launches, (256, 256, 48, 48), strict=True):
        symbols = header_symbols("7_persistent", IN_PARTS.astype(dtype)) | {"d": width, "D": 1}
        assert_as_stated(launch, headers[launch.kernel], symbols)
        y = launch.buffers["y"]
        assert y.read_bytes + y.written_bytes == 2 * IN_PARTS.L * IN_PARTS.k * width


def parts_of_combine(widths=(4, 12), dtypes=("float32", "float32")):
    """Parts of y, the gates and the Dispatch of a small case."""
    case = RAGGED.astype("float32")
    dispatch = build_by_sort(case.topk_experts, case.E)
    rng = np.random.default_rng(0)
    parts = tuple(
        rng.standard_normal((dispatch.R, width)).astype(dtype) for width, dtype in zip(widths, dtypes, strict=False)
    )
    return parts, comparisons.gates_of(case), dispatch


@pytest.mark.parametrize("widths", [(4, 12), (0, 8), (8, 0), (3, 5)])
def test_a_combine_in_parts_has_the_bits_of_the_whole(widths):
    parts, gates, dispatch = parts_of_combine(widths)
    y, executor = np.concatenate(parts, axis=1), Quick()
    np.testing.assert_array_equal(
        combine.forward_in_parts(parts, gates, dispatch, executor=executor),
        combine.forward(y, gates, dispatch, executor=executor),
    )
    ones = np.ones_like(gates)
    np.testing.assert_array_equal(
        combine.forward_in_parts(parts, None, dispatch, executor=executor),
        combine.forward(y, ones, dispatch, executor=executor),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"parts": ()}, ValueError, "parts is empty, but it must have at least one array"),
        ({"parts": parts_of_combine(dtypes=("float32", "float16"))[0]}, TypeError, r"parts\[1\] has dtype float16"),
        ({"parts": (np.ones((5, 8), np.float32),)}, ValueError, r"parts\[0\] has shape \(5, 8\)"),
        ({"gates": np.ones((2, 2), np.float32)}, ValueError, "gates has shape"),
        ({"dispatch": None}, TypeError, "dispatch is a NoneType"),
        ({"version": "1_gather"}, ValueError, "unknown version of combine in parts '1_gather'"),
    ],
)
def test_a_combine_in_parts_of_wrong_operands_raises(change, error, message):
    parts, gates, dispatch = parts_of_combine()
    with pytest.raises(error, match=message):
        combine.forward_in_parts(**{"parts": parts, "gates": gates, "dispatch": dispatch} | change)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_in_parts_of_its_columns_is_the_same(policy, monkeypatch):
    case = IN_PARTS.astype("bfloat16")

    def outcome():
        executor = Quick()
        with executor.recording() as launches:
            out, *_, saved = layer.forward(
                case.x, case.weights, case.k, policy=policy, executor=executor, version="7_persistent"
            )
        return out, saved.tensors(), [launch.kernel for launch in launches].count("combine")

    out, kept, sums = outcome()
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    found, kept_in_parts, sums_in_parts = outcome()
    np.testing.assert_array_equal(found, out)
    assert_same_bits({"kept": kept_in_parts}, {"kept": kept})
    assert (sums, sums_in_parts) == (1, 1 if policy == "conventional" else 2)  # that one keeps y


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": np.ones((70, 3), np.float32)}, ValueError, "gates"),
        ({"w3": np.ones((3, 8, 304), np.float16)}, ValueError, "w3"),
        ({"w3": np.ones((3, 16, 304), np.float32)}, TypeError, "w3"),
        ({"y_swi": np.ones((140, 17), np.float16), "w3": np.ones((3, 17, 304), np.float16)}, ValueError, "h is 17"),
    ],
)
def test_an_output_in_parts_of_wrong_operands_raises(change, error, message, monkeypatch):
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    case = IN_PARTS.astype("float16")
    *_, y_swi, gates = comparisons.hidden(case)
    operands = {"y_swi": y_swi, "w3": case.weights.w3, "gates": gates, "version": "7_persistent"} | change
    with pytest.raises(error, match=message):
        expert_down.output_in_parts(**operands, dispatch=build_by_sort(case.topk_experts, case.E))


@pytest.mark.parametrize(
    ("version", "sizes", "parts"),
    [
        ("7_persistent", (2**18, 2048, 768), [(0, 1024), (1024, 1024)]),  # qwen3
        ("7_persistent", (2**18, 1536, 256), [(0, 768), (768, 768)]),
        ("7_persistent", (2**18, 1280, 256), [(0, 768), (768, 512)]),  # whole tiles
        ("7_persistent", (2**18, 1024, 4096), [(0, 1024)]),  # no wider than a and b
        ("7_persistent", (2**18, 256, 64), [(0, 256)]),  # one tile
        ("7_persistent", (2**14, 2048, 768), [(0, 2048)]),  # few rows
        ("3_mma", (2**18, 2048, 768), [(0, 2048)]),
        ("7_persistent", (0, 2048, 768), [(0, 2048)]),
    ],
)
def test_which_columns_of_the_rows_exist_together(version, sizes, parts):
    assert gemm.parts_of_rows(version, *sizes) == parts


def assert_tile(stage, version, tile, case):
    """Right in this tile; its kernels ask for what their headers state, and no banks conflict."""
    executor, headers = SimtExecutor(seed=2), stated(gemm.file_of(stage, version))
    with tiles.trying(tile), executor.recording() as launches:
        assert_right(stage, version, case, STAGES[stage].VERSIONS[version][-1], executor=executor)
    symbols = header_symbols(version, case.astype(STAGES[stage].VERSIONS[version][-1]), tile)
    launches = [launch for launch in launches if launch.kernel in headers]
    assert {launch.kernel for launch in launches} == headers.keys()
    for launch in launches:
        assert_as_stated(launch, headers[launch.kernel], symbols)
        assert launch.block == (tile.threads, 1, 1)
        assert launch.shared.bank_conflicts == 0


@pytest.mark.parametrize("version", ["3_mma", gemm.TF32])
@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_several_small_tiles(stage, version):
    assert_tile(stage, version, SMALL, RAGGED)


@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_a_block_in_tiles_has_the_shared_memory_that_its_header_states(stage):
    constants = {"Scalar": "__half", "ACTIVATION": "swiglu"} | SMALL.constants(itemsize=2)
    source = KernelSource.read(f"{stage}/3_mma.cu", constants)
    for kernel, header in stated(f"{stage}/3_mma.cu").items():
        static = _static_shared_bytes(source, kernel)
        dynamic = (
            evaluate(header.shared, {name: v for name, v in constants.items() if isinstance(v, int)} | {"s": 2})
            - static
        )
        assert dynamic == SMALL.shared_bytes, kernel


OTHER_TILES = [  # than the defaults, which every other test runs; bands alone change no code
    (version, tile)
    for version in ("3_mma", gemm.TF32)
    for tile in dict.fromkeys(replace(tile, band=2) for tile in tiles.CANDIDATES[version][1:])
]


@pytest.mark.parametrize(("version", "tile"), OTHER_TILES)
def test_every_tile_that_may_be_chosen(version, tile):
    case = make_case(150, 40, 264, 3, 2, "zipf", "several tiles each way")
    for stage in ("expert_up", "expert_down"):
        assert_tile(stage, version, tile, case)


def conflicts(executor):
    """{kernel: bank conflicts} of the Hopper kernels that leave a tile in shared memory and store it as it is."""
    case = SEVERAL_TILES.astype("float16")
    with executor.recording() as launches:
        for stage in ("expert_up", "expert_down"):
            comparisons.RUN[stage](on(stage, "7_persistent", executor), case)
    found = {launch.kernel: launch.shared.bank_conflicts for launch in launches}
    return {kernel: found[kernel] for kernel in ("expert_up", "d_x_rows", "expert_down")}


def test_finished_tiles_are_handed_over_without_bank_conflicts():
    assert not any(conflicts(SimtExecutor()).values())


def test_finished_tiles_in_plain_rows_would_meet_bank_conflicts(monkeypatch):
    plain = "expert_up", "7_persistent", "lines[row][chunk ^ row % 8]", "lines[row][chunk]"
    monkeypatch.setitem(FAULTS, "plain rows", plain)
    monkeypatch.setattr("planted.quick_builds", nullcontext)  # conflicts are counted
    found = conflicts(planted("plain rows"))
    assert found["expert_up"] and found["d_x_rows"]


@pytest.mark.parametrize("stores", [("a", "b"), ("y_swi",)], ids="+".join)
@pytest.mark.parametrize(("version", "dtype"), [(version, able[0]) for version, able in expert_up.VERSIONS.items()])
def test_the_up_projection_writes_what_the_policy_stores_and_nothing_else(version, dtype, stores):
    case, executor = RAGGED.astype(dtype), SimtExecutor()
    inputs = case.x, *case.weights[1:3], build_by_sort(case.topk_experts, case.E), case.activation
    everything = expert_up.forward(*inputs, executor=executor, version=version)
    with executor.recording() as launches:
        found = expert_up.forward(*inputs, stores=stores, executor=executor, version=version)
    for name, array, expected in zip(("a", "b", "y_swi"), found, everything, strict=True):
        assert (array is not None) == (name in stores)
        assert array is None or np.array_equal(array, expected)
    symbols = header_symbols(version, case) | {"P": int("a" in stores), "Y": int("y_swi" in stores)}
    assert_as_stated(*launches, stated(gemm.file_of("expert_up", version))["expert_up"], symbols)


@pytest.mark.parametrize("dtype", gemm.WIDE)
@pytest.mark.parametrize("function", ACTIVATIONS)
def test_the_activation_alone(function, dtype):
    case, executor = RAGGED.astype(dtype), SimtExecutor()
    a = case.x
    with executor.recording() as launches:
        found = activation.act(a, function, executor=executor)
    expected = reference_activation.act(a.astype(np.float64), function)
    assert relative_error(found, expected) <= {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    symbols = {"R": a.shape[0], "h": a.shape[1], "s": a.dtype.itemsize}
    assert_as_stated(*launches, stated("activation/1_elementwise.cu")["act"], symbols)


# ---- pairs -------------------------------------------------------------------------------------

PAIRS = """
extern "C" __global__ void pairs(const unsigned* words, float* values, unsigned* again, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float pair[2];
    unpack<Scalar>(words[i], pair);
    values[2 * i] = pair[0];
    values[2 * i + 1] = pair[1];
    again[i] = packed<Scalar>(pair[0], pair[1]);
}"""


def assert_pairs(dtype, right="", wrong=""):
    """Every number of the dtype is found in its half of a word, and comes back to it."""
    scalar = (kernels_dir() / "include/scalar.cuh").read_text()
    assert right in scalar
    numbers = np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(dtype)
    numbers = numbers[~np.isnan(numbers.astype(np.float32))]
    words, executor = numbers.view(np.uint32), SimtExecutor()
    values, again = executor.empty(numbers.shape, "float32"), executor.empty(words.shape, "uint32")
    module = executor.load("pairs.cu", text=scalar.replace(right, wrong) + PAIRS, Scalar=gemm.C_TYPE[dtype])
    module.launch("pairs", len(words) // 256 + 1, 256, words=words, values=values, again=again, n=len(words))
    np.testing.assert_array_equal(values, numbers.astype(np.float32))
    np.testing.assert_array_equal(again, words)


@pytest.mark.parametrize("dtype", gemm.NARROW)
def test_a_pair_is_unpacked_and_packed_again(dtype):
    assert_pairs(dtype)


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("float16", "to_float(values[0])", "to_float(values[1])"),
        ("bfloat16", "word << 16", "word & 0xffff0000u"),
        ("bfloat16", "word & 0xffff0000u", "word"),  # the first's bits below the second's
        ("float16", "from_float<T>(first), from_float<T>(second)", "from_float<T>(second), from_float<T>(first)"),
    ],
)
def test_a_pair_of_wrong_halves_is_seen(dtype, right, wrong):
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_pairs(dtype, right, wrong)


# ---- the atomic lesson -------------------------------------------------------------------------


def scattered(case, **options):
    """(out by atomics, out by gathering, the launches of the first)."""
    executor = SimtExecutor(workers=1, **options)
    y = np.random.default_rng(0).standard_normal((case.L * case.k, case.x.shape[1])).astype(np.float32)
    gates = np.random.default_rng(1).random((case.L, case.k), np.float32)
    dispatch = build_by_sort(case.topk_experts, case.E)
    with executor.recording() as launches:
        found = combine.scatter(y, gates, dispatch, executor=executor)
    return found, combine.forward(y, gates, dispatch, executor=executor), launches


def test_atomic_additions_are_right_but_their_bits_depend_on_the_order_of_threads():
    outputs = []
    for seed in range(6):
        out, gathered, _ = scattered(RAGGED, seed=seed)
        assert relative_error(out, gathered) <= comparisons.BOUNDS["float32"]
        outputs.append(out.tobytes())
    assert len(set(outputs)) > 1
    assert len({scattered(RAGGED, seed=seed)[1].tobytes() for seed in range(6)}) == 1


def test_atomic_additions_ask_for_what_the_header_states():
    _, _, launches = scattered(RAGGED)
    assert_as_stated(*launches, stated("combine/lesson_atomic.cu")["scatter"], header_symbols("1_gather", RAGGED))


# ---- sums in the epilogue of the product -------------------------------------------------------

SUMS = {"as_printed": expert_down.summed_forward, "lesson_atomic": expert_down.atomic_forward}
ODD_WIDTHS = make_case(137, 35, 71, 5, 3, "zipf", "widths that tensor cores do not take")


def summed(case, executor, file="as_printed"):
    """The output of a case by one of ``SUMS``."""
    *_, y_swi, gates = comparisons.hidden(case)
    return SUMS[file](y_swi, case.weights.w3, gates, build_by_sort(case.topk_experts, case.E), executor=executor)


def assert_sums_right(case, dtype, executor=None, file="as_printed"):
    rounded = case.astype(dtype)
    found = {"out": summed(rounded, executor or Quick(), file)}
    exact, baseline = (comparisons.expect_summed(rounded, t)["forward"] for t in (torch.float64, getattr(torch, dtype)))
    error, bound = comparisons.compare(found, exact, dtype, baseline)
    assert error <= bound


@pytest.mark.parametrize("case", [RAGGED, ODD_WIDTHS], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", gemm.WIDE)
@pytest.mark.parametrize("file", SUMS)
def test_a_product_that_sums_is_right(file, dtype, case):
    assert_sums_right(case, dtype, file=file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        make_case(1, 8, 16, 4, 2, name="one token"),
        make_case(9, 8, 16, 4, 4, name="k = E"),
        make_case(150, 16, 8, 5, 1, "hot", "one expert gets all"),
        make_case(41, 8, 16, 8, 2, "empty", "empty experts"),
        make_case(0, 8, 16, 4, 2, name="no tokens"),
        make_case(40, 8, 8, 70, 8, name="more experts than a warp"),
        make_case(333, 136, 264, 5, 2, "empty", "several tiles each way"),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("file", SUMS)
def test_hard_shapes_of_a_product_that_sums(file, case, dtype):
    assert_sums_right(case, dtype, file=file)


@pytest.mark.parametrize("dtype", gemm.WIDE)
def test_every_order_of_threads_gives_the_same_sums(dtype):
    case = make_case(70, 16, 24, 3, 2).astype(dtype)
    assert len({summed(case, Quick(seed=seed)).tobytes() for seed in range(4)}) == 1


@pytest.mark.parametrize(("file", "same"), [("as_printed", True), ("lesson_atomic", False)])
def test_sums_by_atomics_alone_depend_on_the_order_of_blocks(file, same):
    turned = "place = {int(gridDim.x) - 1 - place_of_block().row_tile, place_of_block().column_tile};"
    others = Planted(f"expert_down/{file}.cu", "place = place_of_block();", turned, seed=1)
    others.workers = 1
    case = make_case(137, 24, 72, 6, 4).astype("float32")
    assert_sums_right(case, "float32", others, file)
    assert np.array_equal(summed(case, Quick(workers=1, seed=1), file), summed(case, others, file)) == same


def test_a_tokens_rows_are_added_in_the_order_of_its_experts():
    case = RAGGED.astype("float32")
    dispatch, (*_, y_swi, gates) = build_by_sort(case.topk_experts, case.E), comparisons.hidden(case)
    y = expert_down.forward(y_swi, case.weights.w3, dispatch, executor=SimtExecutor())
    gate_of_row = np.empty(dispatch.R, np.float32)
    gate_of_row[dispatch.token_index_map] = gates.ravel()
    expected = np.zeros_like(case.x)
    for _, group, tokens in expert_groups(dispatch):
        expected[tokens] += gate_of_row[group, None] * y[group]
    np.testing.assert_array_equal(summed(case, SimtExecutor(seed=3)), expected)


def sum_symbols(case, tile=None):
    """Those of the headers of both files."""
    version = gemm.portable_version(str(case.x.dtype), *case.weights.w1.shape[1:])
    return header_symbols(version, case, tile)


def assert_sums_as_stated(launches, file, symbols):
    """The launches of each kernel together ask for what the header states."""
    headers = stated(f"expert_down/{file}.cu") | stated("expert_down/as_printed.cu") | stated("expert_down/0_gates.cu")
    for kernel in {launch.kernel for launch in launches}:
        together = [launch for launch in launches if launch.kernel == kernel]
        of_kernel = symbols | {"blocks": sum(int(np.prod(launch.grid)) for launch in together)}
        for found, formula in (("read_bytes", headers[kernel].read), ("written_bytes", headers[kernel].written)):
            counted = sum(getattr(launch, found) for launch in together)
            assert counted == evaluate(formula, of_kernel), f"{kernel}: {found} is not {formula}"


@pytest.mark.parametrize("case", [RAGGED, ODD_WIDTHS], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", gemm.WIDE)
@pytest.mark.parametrize("file", SUMS)
def test_a_product_that_sums_asks_for_the_bytes_that_its_header_states(file, dtype, case):
    executor, case = SimtExecutor(), case.astype(dtype)
    with executor.recording() as launches:
        summed(case, executor, file)
    adds = ["add_expert"] * case.E if file == "as_printed" else ["add_rows"]
    rounds = [] if dtype == "float32" else ["round_sums"]
    assert [launch.kernel for launch in launches] == ["gate_rows", *adds, *rounds]
    assert_sums_as_stated(launches, file, sum_symbols(case))


@pytest.mark.parametrize("file", SUMS)
def test_small_tiles_of_a_product_that_sums(file):
    executor, case = SimtExecutor(seed=2), RAGGED.astype("bfloat16")
    with tiles.trying(SMALL), executor.recording() as launches:
        assert_sums_right(RAGGED, "bfloat16", executor, file)
    assert_sums_as_stated(launches, file, sum_symbols(case, SMALL))
    of_product = [launch for launch in launches if launch.kernel in ("add_expert", "add_rows")]
    assert {launch.block for launch in of_product} == {(SMALL.threads, 1, 1)}
    assert not any(launch.shared.bank_conflicts for launch in of_product)


@pytest.mark.parametrize("tile", [None, SMALL])
@pytest.mark.parametrize("file", SUMS)
def test_a_product_that_sums_has_the_shared_memory_that_its_header_states(file, tile):
    constants = {"Scalar": "__half", "THREADS": 256} | (tile.constants(itemsize=2) if tile else {})
    source = KernelSource.read(f"expert_down/{file}.cu", constants)
    product = tile.shared_bytes if tile else 8704
    for kernel, header in stated(source.file).items():
        asked = evaluate(header.shared, {"TILE_ROWS": tile.rows if tile else 64, "Q": product})
        static = _static_shared_bytes(source, kernel)
        padding = static + (tile.shared_bytes if tile and asked else 0) - asked
        assert 0 <= padding < 16  # an array may begin at a multiple of 16 bytes


@pytest.mark.parametrize(("dtype", "rounded_bytes"), [("float32", 0), ("bfloat16", 2)])
def test_no_row_of_an_expert_is_stored(dtype, rounded_bytes):
    executor, case = SimtExecutor(), RAGGED.astype(dtype)
    made = []
    for make in ("empty", "full"):
        allocate = getattr(executor, make)
        setattr(executor, make, lambda *arguments, allocate=allocate: made.append(allocate(*arguments)) or made[-1])
    summed(case, executor)
    L, d = case.x.shape
    assert sum(array.nbytes for array in made) == 4 * L * case.k + (4 + rounded_bytes) * L * d


SUM_FAULTS = {
    "unscaled gate": ("as_printed", "so_far.add(targets.gates[row], values)", "so_far.add(1.0f, values)"),
    "last expert alone": ("as_printed", "so_far.load(sums_at(row, column));", "so_far = {};"),
    "last row": ("as_printed", "return row < tile.rows &&", "return row < tile.rows - 1 &&"),
    "rows of the next expert": ("as_printed", "return row < tile.rows &&", "return row < TILE_ROWS &&"),
    "past the row": ("as_printed", "first_column + column < d;", "first_column + column < d + 8;"),
    "earlier tiles forgotten": ("as_printed", "begin + before, min", "begin, min"),
    "next expert's weights": ("as_printed", "tile = {expert, begin", "tile = {0, begin"),
    "rows in token order": ("as_printed", "= expert_token_indices[tile.first + row];", "= tile.first + row;"),
    "gate of the first row": ("as_printed", "= gate_of_row[tile.first + row];", "= gate_of_row[tile.first];"),
    "zeros": ("as_printed", "so_far.store(sums_at(row, column));", ""),
    "atomic: unscaled gate": ("lesson_atomic", "targets.gates[row] * values[n]", "values[n]"),
    "atomic: written, not added": ("lesson_atomic", "atomicAdd(&sums_of_row[n], targets.gates[row] * values[n]);",
                                   "sums_of_row[n] = targets.gates[row] * values[n];"),
    "atomic: last row": ("lesson_atomic", "row >= tile.rows ||", "row >= tile.rows - 1 ||"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_a_planted_fault_of_the_sums_is_caught(fault, dtype):
    file, right, wrong = SUM_FAULTS[fault]
    with tiles.trying(SMALL), pytest.raises((AssertionError, KernelFault)):
        assert_sums_right(RAGGED, dtype, Planted(f"expert_down/{file}.cu", right, wrong, seed=3), file)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": np.ones((137, 2), np.float32)}, ValueError, "gates"),
        ({"gates": np.ones((137, 3))}, TypeError, "gates has dtype float64, but it must be float32"),
        ({"w3": np.ones((5, 71, 24), np.float32)}, ValueError, "w3"),
        ({"version": "2_tiled"}, ValueError, "unknown version of expert_down '2_tiled'.*as_printed"),
    ],
)
def test_a_sum_of_wrong_operands_raises(change, error, message):
    case = RAGGED.astype("float32")
    *_, y_swi, gates = comparisons.hidden(case)
    operands = {"y_swi": y_swi, "w3": case.weights.w3, "gates": gates} | change
    with pytest.raises(error, match=message):
        expert_down.summed_forward(**operands, dispatch=build_by_sort(case.topk_experts, case.E))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_papers_forward_keeps_what_the_policy_says_and_never_has_y(policy):
    case, executor = RAGGED.astype("bfloat16"), Quick()
    arguments = case.x, case.weights, case.k, case.activation, policy
    expected = layer.forward(*arguments, executor=executor)
    with executor.recording() as launches:
        found = layer.forward(*arguments, executor=executor, version="as_printed")
    kernels = [launch.kernel for launch in launches]
    assert kernels[-case.E - 2 :] == ["gate_rows", *["add_expert"] * case.E, "round_sums"]
    assert not {"expert_down", "combine"} & {*kernels}
    kept = {name: array for name, array in expected.saved.tensors().items() if name != "y"}
    assert_same_bits({"kept": found.saved.tensors()}, {"kept": kept})
    assert found.saved.tensors().keys() == kept.keys()
    assert 0 < relative_error(found.out.astype(float), expected.out.astype(float)) < 2.0**-7  # y is not rounded


# ---- checks ----------------------------------------------------------------------------------


def test_a_version_says_which_dtypes_and_widths_it_takes():
    case = make_case(5, 12, 16, 3, 2)
    dispatch, (_, w1, w2, _) = build_by_sort(case.topk_experts, case.E), case.astype("float32").weights
    x = case.x.astype("float32")
    with pytest.raises(TypeError, match="3_mma of expert_up computes in float16 or bfloat16, but x is float32"):
        expert_up.forward(x, w1, w2, dispatch, "swiglu", version="3_mma")
    narrow = [array.astype(ml_dtypes.bfloat16) for array in (x, w1, w2)]
    with pytest.raises(ValueError, match="d is 12, but 3_mma needs a multiple of 8; use 2_tiled"):
        expert_up.forward(*narrow, dispatch, "swiglu", version="3_mma")
    with pytest.raises(ValueError, match="unknown version of expert_up '2_tile'. Did you mean '2_tiled'"):
        expert_up.forward(x, w1, w2, dispatch, "swiglu", version="2_tile")
    with pytest.raises(TypeError, match="w1 has dtype float32, but it must be bfloat16"):
        expert_up.forward(narrow[0], w1, w2, dispatch, "swiglu")


def test_gates_are_float32():
    y, gates = np.ones((2, 8), np.float32), np.ones((1, 2))
    dispatch = build_by_sort(np.array([[0, 1]], np.int32), 2)
    with pytest.raises(TypeError, match="gates has dtype float64, but it must be float32"):
        combine.forward(y, gates, dispatch)


# ---- tf32 ------------------------------------------------------------------------------------


def to_tf32(array):
    """The floats whose mantissas have 10 bits that are nearest to the array's, the larger magnitude of two."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.copysign(np.floor(np.abs(mantissa) * 2**11 + 0.5), mantissa), exponent - 11)


ROUND = """#include "ptx.cuh"
extern "C" __global__ void round_all(const float* x, float* out) {
    out[threadIdx.x] = __int_as_float(to_tf32(unsigned(__float_as_int(x[threadIdx.x]))));
}"""


def test_floats_are_rounded_to_the_nearest_of_tf32_and_ties_away_from_zero():
    ulp = 2.0**-10
    halves = [1 + (n + 0.5) * ulp for n in (0, 1, 2, 1023)]
    exact = [0.0, 1.0, 1 + ulp, 2.0**-126, 3.0e38, np.inf]
    x = np.array([*halves, *exact, *np.random.default_rng(0).standard_normal(54)], np.float32)
    x = np.concatenate([x, -x, np.nextafter(x[:4], 0), np.nextafter(x[:4], 2), [np.nan, 0.0]]).astype(np.float32)
    executor = SimtExecutor()
    out = executor.empty(x.shape, "float32")
    executor.load("round.cu", text=ROUND).launch("round_all", grid=1, block=x.size, x=x, out=out)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(out[finite], to_tf32(x[finite]).astype(np.float32))
    np.testing.assert_array_equal(out[~finite], x[~finite])
    np.testing.assert_array_equal(out[:4], np.float32([1 + ulp, 1 + 2 * ulp, 1 + 3 * ulp, 2.0]))


def products(case, round_to):
    """Every result of both stages that is one product, in float64, from rounded operands: {name: array}."""
    dispatch, (_, w1, w2, w3) = build_by_sort(case.topk_experts, case.E), case.weights
    rows = np.repeat(np.arange(case.E), np.diff(dispatch.expert_token_offsets))
    x, d_out = (array[dispatch.expert_token_indices] for array in (case.x, case.d_out))
    y_swi, (d_a, d_b) = comparisons.hidden(case)[2], comparisons.d_hidden(case)

    def times(left, right):
        return np.einsum("ri,rij->rj", round_to(left), round_to(right)[rows])

    def summed(left, right):
        outer = np.zeros((case.E, left.shape[1], right.shape[1]))
        np.add.at(outer, rows, round_to(left)[:, :, None] * round_to(right)[:, None])
        return outer

    d_x = np.zeros(case.x.shape)
    turned = [w.transpose(0, 2, 1) for w in (w1, w2)]
    np.add.at(d_x, dispatch.expert_token_indices, times(d_a, turned[0]) + times(d_b, turned[1]))
    up = {"a": times(x, w1), "b": times(x, w2), "d_x": d_x, "d_w1": summed(x, d_a), "d_w2": summed(x, d_b)}
    return up | {"y": times(y_swi, w3)}


def test_tf32_products_are_those_of_rounded_operands_to_the_last_bits():
    case, found = RAGGED.astype("float32"), {}
    for stage in ("expert_up", "expert_down"):
        for results in comparisons.RUN[stage](opened(stage, gemm.TF32), case).values():
            found |= results
    rounded, exact = products(case, to_tf32), products(case, lambda array: array.astype(np.float64))
    for name in rounded:
        assert relative_error(found[name], rounded[name]) < 1e-6, name
        assert 1e-4 < relative_error(found[name], exact[name]) < comparisons.TF32_PRODUCT, name


@pytest.mark.parametrize("bits", [7, 8])
def test_the_bound_of_tf32_tells_it_from_fewer_bits(bits):
    case = RAGGED.astype("float32")

    def coarser(array):
        mantissa, exponent = np.frexp(array.astype(np.float64))
        return np.ldexp(np.round(mantissa * 2 ** (bits + 1)), exponent - bits - 1)

    found, exact = products(case, coarser), products(case, lambda array: array.astype(np.float64))
    assert all(relative_error(found[name], exact[name]) > comparisons.TF32_PRODUCT for name in exact)


# ---- planted faults --------------------------------------------------------------------------

FAULTS = {
    "up naive: unscaled row": ("expert_up", "1_naive", "expert_token_indices[at.row] * d", "at.row % 7 * d"),
    "up naive: wrong expert": ("expert_up", "1_naive", "(long long)blockIdx.y * d * h + at.column", "at.column"),
    "up naive: drops the last input": (
        "expert_up",
        "1_naive",
        "for (int p = 0; p < d; ++p)",
        "for (int p = 0; p < d - 1; ++p)",
    ),
    "up naive: drops a slot": ("expert_up", "1_naive", "for (int j = 0; j < k; ++j)", "for (int j = 1; j < k; ++j)"),
    "up naive: drops a row": (
        "expert_up",
        "1_naive",
        "for (int row = begin; row < end; ++row)",
        "for (int row = begin + 1; row < end; ++row)",
    ),
    "up tiled: no barrier after the tokens": (
        "expert_up",
        "2_tiled",
        "tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];\n    __syncthreads();",
        "tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];",
    ),
    "up tiled: row of another expert": (
        "expert_up",
        "2_tiled",
        "if (row < tile.rows && j < h) store_hidden",
        "if (j < h) store_hidden",
    ),
    "up tiled: tiles read too early": (
        "expert_up",
        "2_tiled",
        "[&](int side, int p) { return b(r, side, p); });\n        __syncthreads();",
        "[&](int side, int p) { return b(r, side, p); });",
    ),
    "up tiled: tiles written too early": (
        "expert_up",
        "2_tiled",
        "        __syncthreads();  // all have read",
        "        // all have read",
    ),
    "up mma: does not wait": ("expert_up", "3_mma", "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
    "up mma: no barrier after waiting": (
        "expert_up",
        "3_mma",
        "        __syncthreads();  // the next stage has arrived",
        "        // the next stage has arrived",
    ),
    "up mma: stale stage": ("expert_up", "3_mma", "cp_async_or_zero(stage +", "if (begin) cp_async_or_zero(stage +"),
    "up mma: past the end of the depth": ("expert_up", "3_mma", "number >= 0 && at < width", "number >= 0"),
    "up mma: fragments of the stage before": ("expert_up", "3_mma", "(last ? step + 1 : step)", "step"),
    "up mma: lines of the step before": ("expert_up", "3_mma", "look_up(first + TILE_DEPTH);", "look_up(first);"),
    "up mma: first matrix twice": ("expert_up", "3_mma", "chosen.matrix = second, ", ""),
    "up mma: B not transposed": ("expert_up", "3_mma", "ldmatrix_x4_transposed(registers,", "ldmatrix_x4(registers,"),
    "up mma: halves of B swapped": ("expert_up", "3_mma", "{both[0], both[1]}", "{both[1], both[0]}"),
    "up mma: every band the first": ("expert_up", "3_mma", "{band * BAND + inside", "{inside"),
    "up mma: lanes keep what they should send": ("expert_up", "3_mma", "upper ? low : high", "upper ? high : low"),
    "up tf32: depths swapped": ("expert_up", "3_mma_tf32", "m / 2 : m % 2) * CHUNK;", "m % 2 : m / 2) * CHUNK;"),
    "up: activation of b": ("expert_up", "2_tiled", "GATED ? act_a * b : act_a", "act_a"),
    "down naive: unscaled gate": ("expert_down", "1_naive", "d_y = gate * d;", "d_y = d;"),
    "down naive: gradient not gathered": (
        "expert_down",
        "1_naive",
        "const long long token = (long long)expert_token_indices[at.row] * d;",
        "const long long token = at.row % 7 * d;",
    ),
    "down naive: slope left out": ("expert_down", "1_naive", "d_y * b * slope", "d_y * b"),
    "down tiled: gate term of one column": (
        "expert_down",
        "2_tiled",
        "column < TILE; ++column) term +=",
        "column < 1; ++column) term +=",
    ),
    "down tiled: no barrier before the terms": (
        "expert_down",
        "2_tiled",
        "    });\n    __syncthreads();\n    if (threadIdx.x < tile.rows)",
        "    });\n    if (threadIdx.x < tile.rows)",
    ),
    "down mma: last columns": ("expert_down", "3_mma", "d, h, d - first_column}", "d, h, d - first_column - 8}"),
    "down mma: row tail stored": ("expert_down", "3_mma", "row >= rows || column >= columns", "column >= columns"),
    "down mma: gate term of every second lane": (
        "expert_down",
        "3_mma",
        "terms[line] += __shfl_xor_sync(FULL_WARP, terms[line], 2);",
        "",
    ),
    "down mma: gate term of one warp": ("expert_down", "3_mma", "part < TILE_COLUMNS / WARP_COLUMNS", "part < 1"),
    "down mma: no barrier before the terms": (
        "expert_down",
        "3_mma",
        "    __syncthreads();\n    for (int row = threadIdx.x",
        "    for (int row = threadIdx.x",
    ),
    "down gates: order of slots": (
        "expert_down",
        "0_gates",
        "gate_of_row[row] = gates[slot];",
        "gate_of_row[slot] = gates[slot];",
    ),
    "down gates: gradient of a neighbour": (
        "expert_down",
        "0_gates",
        "(long long)row * terms",
        "slot * terms",
    ),
    "hopper: no wait for the operands": (
        "expert_up",
        "7_persistent",
        "barrier_wait(&shared.full[now], state.parity);",
        ";",
    ),
    "hopper: no wait for a free stage": (
        "expert_down",
        "7_persistent",
        "barrier_wait(&shared.empty[state.stage], state.parity ^ 1);",
        ";",
    ),
    "hopper: wrong parity": (
        "expert_up",
        "7_persistent",
        "barrier_wait(&shared.full[now], state.parity);",
        "barrier_wait(&shared.full[now], state.parity ^ 1);",
    ),
    "hopper: stage free before it is read": ("expert_up", "7_persistent", "wgmma_wait<BEHIND>();", ";"),
    "hopper: stage free while it is read": (
        "expert_down",
        "7_persistent",
        (
            "            if (step >= BEHIND && lane_id() == 0) barrier_arrive(&shared.empty[BEHIND ? read : now]);\n"
            "            read = now;\n"
            "        }\n"
            "        wgmma_wait<0>();\n"
            "        wgmma_results(sums);\n"
            "        if (BEHIND && tile.steps > 0 && lane_id() == 0) barrier_arrive(&shared.empty[read]);\n"
        ),
        ("            if (lane_id() == 0) barrier_arrive(&shared.empty[now]);\n        }\n        wgmma_wait<0>();\n"),
    ),
    "hopper: every lane frees the stage": (
        "expert_up",
        "7_persistent",
        "if (step >= BEHIND && lane_id() == 0) barrier_arrive",
        "if (step >= BEHIND) barrier_arrive",
    ),
    "hopper: last stage of a tile never free": (
        "expert_down",
        "7_persistent",
        "if (BEHIND && tile.steps > 0 && lane_id() == 0) barrier_arrive(&shared.empty[read]);",
        ";",
    ),
    "hopper: a tile without steps frees a stage": (
        "expert_up",
        "7_persistent",
        "if (BEHIND && tile.steps > 0 && lane_id() == 0)",
        "if (BEHIND && lane_id() == 0)",
    ),
    "hopper: no last wait": ("expert_down", "7_persistent", "wgmma_wait<0>();", ";"),
    "hopper: products in no group": ("expert_up", "7_persistent", "wgmma_commit();\n", ";\n"),
    "hopper: no fence before the product": (
        "expert_up",
        "7_persistent",
        "if (Roles::COPIERS) fence_async_proxy();",
        ";",
    ),
    "hopper: copies never arrive": ("expert_up", "7_persistent", "if (Roles::COPIERS) cp_async_arrive(full);", ";"),
    "hopper: arrives without its copies": (
        "expert_down",
        "7_persistent",
        "if (Roles::COPIERS) cp_async_arrive(full);",
        "if (Roles::COPIERS) barrier_arrive(full);",
    ),
    "hopper: arrives before its copies": (
        "expert_up",
        "7_persistent",
        (
            "            fill(step, shared.stages[state.stage], full);\n"
            "            if (Roles::COPIERS) cp_async_arrive(full);"
        ),
        (
            "            if (Roles::COPIERS) cp_async_arrive(full);\n"
            "            fill(step, shared.stages[state.stage], full);"
        ),
    ),
    "hopper: waits for one arrival only": ("expert_up", "7_persistent", "1 + Roles::COPIERS", "1"),
    "hopper: waits for one arrival too few": (
        "expert_down",
        "7_persistent",
        "1 + Roles::COPIERS",
        "Roles::COPIERS ? Roles::COPIERS : 1",
    ),
    "hopper: waits for producers that are not there": (
        "expert_up",
        "7_persistent",
        "1 + Roles::COPIERS",
        "1 + (Roles::COPIERS ? WARPGROUP : 0)",
    ),
    "hopper: one lane copies for all": (
        "expert_down",
        "7_persistent",
        "if (Roles::COPIERS || threadIdx.x == 0)",
        "if (threadIdx.x == 0)",
    ),
    "hopper: expects no bytes": (
        "expert_up",
        "7_persistent",
        "barrier_arrive_expecting(full, B_BYTES);",
        "barrier_arrive(full);",
    ),
    "hopper: expects half": (
        "expert_down",
        "7_persistent",
        "barrier_arrive_expecting(full, A_BYTES + B_BYTES);",
        "barrier_arrive_expecting(full, B_BYTES);",
    ),
    "hopper: expects boxes that do not come": (
        "expert_up",
        "7_persistent",
        "whole ? B_BYTES : 0",
        "B_BYTES",
    ),
    "hopper: no barrier after the ring is made": (
        "expert_down",
        "7_persistent",
        "        barrier_init_fence();\n    }\n    __syncthreads();",
        "        barrier_init_fence();\n    }",
    ),
    "hopper: copies not swizzled": ("expert_up", "7_persistent", "(chunk ^ row % 8) * 16", "chunk * 16"),
    "hopper: half of the swizzle": ("expert_down", "7_persistent", "(chunk ^ row % 8) * 16", "(chunk ^ row % 4) * 16"),
    "hopper: stages begin anywhere": ("expert_up", "7_persistent", "SHARED_ALIGNMENT = 1024", "SHARED_ALIGNMENT = 128"),
    "hopper: along the wrong axis": (
        "expert_up",
        "7_persistent",
        "WarpRoles<4, 4, false, false, false>",
        "WarpRoles<4, 4, false, false, true>",
    ),
    "hopper: wrong place in the depth": (
        "expert_down",
        "7_persistent",
        "B_STEP = Roles::B_ALONG_N ? 16 * 128 : 32",
        "B_STEP = Roles::B_ALONG_N ? 8 * 128 : 32",
    ),
    "hopper: wrong distance of panels": (
        "expert_up",
        "7_persistent",
        "wgmma_operand(stage.b, PANEL_BYTES)",
        "wgmma_operand(stage.b, PANEL_BYTES / 2)",
    ),
    "hopper: both consumers multiply the same rows": (
        "expert_down",
        "7_persistent",
        "stage.a + consumer * PANEL_BYTES",
        "stage.a",
    ),
    "hopper: half of the columns twice": ("expert_up", "7_persistent", "wgmma_advance(b_now, HALF_BYTES)", "b_now"),
    "hopper: half of the sums twice": ("expert_down", "7_persistent", "sums + HALF / 2, a_now", "sums, a_now"),
    "hopper: half of the columns left out": (
        "expert_up",
        "7_persistent",
        "wgmma_m64n256k16<Scalar, Roles",
        "wgmma_m64n128k16<Scalar, Roles",
    ),
    "hopper: last step dropped": (
        "expert_up",
        "7_persistent",
        "steps((depth + TILE_DEPTH - 1) / TILE_DEPTH)",
        "steps(depth / TILE_DEPTH)",
    ),
    "hopper: last step of the rows dropped": (
        "expert_down",
        "7_persistent",
        "(end - begin + TILE_DEPTH - 1) / TILE_DEPTH",
        "(end - begin) / TILE_DEPTH",
    ),
    "hopper: depth not cut off": ("expert_up", "7_persistent", "% 8 * CHUNK < d;", "% 8 * CHUNK < d + 64;"),
    "hopper: depth has the next expert's rows": ("expert_up", "7_persistent", "inside && row(i) < rows", "inside"),
    "hopper: rows of other tokens": (
        "expert_up",
        "7_persistent",
        "/ 8 + i * AT_ONCE, rows - 1)",
        "/ 8 + i * 16, rows - 1)",
    ),
    "hopper: rows not gathered": (
        "expert_down",
        "7_persistent",
        "return tokens[min(row, tile.end - tile.begin - 1)];",
        "return min(row, tile.end - tile.begin - 1);",
    ),
    "hopper: tokens of the step before": (
        "expert_up",
        "7_persistent",
        "now = __shfl_down_sync(FULL_WARP, now, 16);",
        ";",
    ),
    "hopper: tokens not read ahead": ("expert_down", "7_persistent", "later = read(step + 2);", "later = read(step);"),
    "hopper: weights of another expert": ("expert_down", "7_persistent", "p, tile.expert);", "p, 0);"),
    "hopper: second weights are the first": (
        "expert_up",
        "7_persistent",
        "second ? &w2 : &w1, full, p",
        "&w1, full, p",
    ),
    "hopper: columns of w1 for those of w2": (
        "expert_up",
        "7_persistent",
        "second ? &w2 : &w1, full,\n",
        "&w1, full,\n",
    ),
    "hopper: panels of w1 and w2 with a tile between": (
        "expert_up",
        "7_persistent",
        "tile.column + panel / PROJECTIONS * PANEL",
        "tile.column + panel * PANEL",
    ),
    "hopper: sums of the tile before": (
        "expert_up",
        "7_persistent",
        "    while (tiles.next(tile)) {\n        float sums[TILE_COLUMNS / 2] = {};",
        "    float sums[TILE_COLUMNS / 2] = {};\n    while (tiles.next(tile)) {",
    ),
    "hopper: every second tile of a block dropped": (
        "expert_up",
        "7_persistent",
        "number += gridDim.x;",
        "number += 2 * gridDim.x;",
    ),
    "hopper: last expert dropped": (
        "expert_down",
        "7_persistent",
        "if (++expert == E) return false;",
        "if (++expert == E - 1) return false;",
    ),
    "hopper: expert without rows has no gradient": (
        "expert_up",
        "7_persistent",
        "if (expert >= E) return false;",
        "if (expert >= E || expert_token_offsets[expert] == expert_token_offsets[expert + 1]) return false;",
    ),
    "hopper: tiles of the experts before counted again": (
        "expert_down",
        "7_persistent",
        "            first += tiles;",
        ";",
    ),
    "hopper: rows of the experts before": ("expert_up", "7_persistent", "            begin = end;", ";"),
    "hopper: turns of more blocks than there are": (
        "expert_down",
        "7_persistent",
        "taken * gridDim.x;",
        "taken * (gridDim.x + 1);",
    ),
    "hopper: a band always full": (
        "expert_down",
        "7_persistent",
        "high = min(BAND, row_tiles() - band * BAND)",
        "high = BAND",
    ),
    "hopper: the epilogue does not wait": (
        "expert_down",
        "7_persistent",
        "barrier_wait(&shared.done[number(i)], parity);",
        ";",
    ),
    "hopper: the epilogue waits for the first consumer alone": (
        "expert_up",
        "7_persistent",
        "barrier_wait(&shared.done[number(i)], parity);",
        "barrier_wait(&shared.done[number(i) % 4], parity);",
    ),
    "hopper: the epilogue waits for the first part alone": (
        "expert_down",
        "7_persistent",
        "++part, parity ^= 1)\n            store(",
        "++part)\n            store(",
    ),
    "hopper: consumer does not wait for the epilogue": (
        "expert_down",
        "7_persistent",
        "barrier_wait(&shared.stored[warp], parity);",
        ";",
    ),
    "hopper: consumer waits for the first part alone": (
        "expert_up",
        "7_persistent",
        "++part, parity ^= 1) {\n            barrier_wait(&shared.stored",
        "++part) {\n            barrier_wait(&shared.stored",
    ),
    "hopper: consumer waits before there is a part": (
        "expert_down",
        "7_persistent",
        "unsigned parity = 1;  // of the part before",
        "unsigned parity = 0;",
    ),
    "hopper: consumer never done": (
        "expert_up",
        "7_persistent",
        "if (lane_id() == 0) barrier_arrive(&shared.done[warp]);",
        ";",
    ),
    "hopper: every lane is done": (
        "expert_down",
        "7_persistent",
        "if (lane_id() == 0) barrier_arrive(&shared.done[warp]);",
        "barrier_arrive(&shared.done[warp]);",
    ),
    "hopper: piece done before it is there": (
        "expert_up",
        "7_persistent",
        (
            "            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);\n"
            "            __syncwarp();\n"
            "            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);\n"
        ),
        (
            "            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);\n"
            "            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);\n"
        ),
    ),
    "hopper: piece never given back": (
        "expert_down",
        "7_persistent",
        "if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);",
        ";",
    ),
    "hopper: every lane gives the piece back": (
        "expert_up",
        "7_persistent",
        "if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);",
        "barrier_arrive(&shared.stored[number(i)]);",
    ),
    "hopper: piece given back before it is stored": (
        "expert_down",
        "7_persistent",
        (
            "        barrier_wait(&shared.done[number(i)], parity);\n"
            "        return shared.finished[number(i)];\n"
            "    }\n"
            "    __device__ __forceinline__ void give_back(int i) const {\n"
            "        __syncwarp();\n"
            "        if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);\n"
            "    }\n"
        ),
        (
            "        barrier_wait(&shared.done[number(i)], parity);\n"
            "        if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);\n"
            "        return shared.finished[number(i)];\n"
            "    }\n"
            "    __device__ __forceinline__ void give_back(int i) const {}\n"
        ),
    ),
    "hopper: piece given back before every lane has stored": (
        "expert_up",
        "7_persistent",
        "void give_back(int i) const {\n        __syncwarp();",
        "void give_back(int i) const {",
    ),
    "hopper: rows of the second consumer not stored": (
        "expert_up",
        "7_persistent",
        "COUNT = EPILOGUE_TILES / Roles::EPILOGUE_WARPS",
        "COUNT = EPILOGUE_TILES / Roles::EPILOGUE_WARPS / 2",
    ),
    "hopper: part taken by two epilogue warps": ("expert_down", "7_persistent", "+ i * Roles::EPILOGUE_WARPS;", "+ i;"),
    "hopper: piece of another consumer": (
        "expert_up",
        "7_persistent",
        "return shared.finished[number(i)];",
        "return shared.finished[(number(i) + 4) % EPILOGUE_TILES];",
    ),
    "hopper: piece stored as if it were the first": (
        "expert_down",
        "7_persistent",
        "return number(i) * WARP_ROWS;",
        "return i * WARP_ROWS;",
    ),
    "hopper: another piece given back": (
        "expert_up",
        "7_persistent",
        "barrier_arrive(&shared.stored[number(i)]);",
        "barrier_arrive(&shared.stored[i]);",
    ),
    "hopper: second part is the first": (
        "expert_down",
        "7_persistent",
        "sums + part * TILE_COLUMNS / 2 / Shared::PARTS",
        "sums",
    ),
    "hopper: second part in the first one's place": (
        "expert_up",
        "7_persistent",
        "store(tile, part * TILE_COLUMNS / Shared::PARTS,",
        "store(tile, 0,",
    ),
    "hopper: lower rows in the place of the upper": (
        "expert_down",
        "7_persistent",
        "half * 8 + lane_id() % 8",
        "lane_id() % 8",
    ),
    "hopper: upper rows in the place of the lower": (
        "expert_up",
        "7_persistent",
        "const int i = (first + j) * 4 + half * 2;",
        "const int i = (first + j) * 4;",
    ),
    "hopper: finished rows where no one looks": (
        "expert_down",
        "7_persistent",
        "lane_id() % 8, first + lane_id() / 8)",
        "lane_id() % 8, first + (lane_id() / 8 ^ 1))",
    ),
    "hopper: pair packed the other way round": (
        "expert_up",
        "7_persistent",
        "{from_float<T>(first), from_float<T>(second)}",
        "{from_float<T>(second), from_float<T>(first)}",
    ),
    "hopper: pair unpacked the other way round": (
        "expert_up",
        "7_persistent",
        "    pair[0] = to_float(values[0]);\n    pair[1] = to_float(values[1]);\n",
        "    pair[0] = to_float(values[1]);\n    pair[1] = to_float(values[0]);\n",
    ),
    "hopper: row tail stored": (
        "expert_down",
        "7_persistent",
        "width, tile.rows, width - column);",
        "width, TILE_ROWS, width - column);",
    ),
    "hopper: transposed piece not transposed": (
        "expert_down",
        "7_persistent",
        "stmatrix_x4_transposed(&finished",
        "stmatrix_x4(&finished",
    ),
    "hopper: halves of a transposed piece alike": (
        "expert_down",
        "7_persistent",
        "at(first * CHUNK + lane_id(), half)",
        "at(first * CHUNK + lane_id(), 0)",
    ),
    "hopper: transposed, tail of the columns stored": (
        "expert_down",
        "7_persistent",
        "width, rows - column, width - tile.row);",
        "width, TILE_COLUMNS, width - tile.row);",
    ),
    "hopper: transposed, tail of the rows stored": ("expert_down", "7_persistent", "if (row < rows)\n", "if (true)\n"),
    "hopper: column tail stored": (
        "expert_up",
        "7_persistent",
        "tile.rows, width - column);",
        "tile.rows, TILE_COLUMNS);",
    ),
    "hopper: row tail of weights stored": (
        "expert_up",
        "7_persistent",
        "width, rows - tile.row, width - column);",
        "width, TILE_ROWS, width - column);",
    ),
    "hopper: column tail of weights stored": (
        "expert_up",
        "7_persistent",
        "rows - tile.row, width - column);",
        "rows - tile.row, TILE_COLUMNS);",
    ),
    "hopper: row tail of y_swi stored": (
        "expert_up",
        "7_persistent",
        "row < min(WARP_ROWS, tile.rows - first);",
        "row < WARP_ROWS;",
    ),
    "hopper: column tail of y_swi stored": ("expert_up", "7_persistent", "if (column < h)\n", "\n"),
    "hopper: a stored as b": ("expert_up", "7_persistent", "chunk + PANEL_CHUNKS * (PROJECTIONS - 1)", "chunk"),
    "hopper: y_swi of its first element twice": (
        "expert_up",
        "7_persistent",
        "hidden_activation(a_pair[1], b_pair[1])",
        "hidden_activation(a_pair[0], b_pair[0])",
    ),
    "hopper: row tail of hidden gradients stored": (
        "expert_down",
        "7_persistent",
        "count = min(WARP_ROWS, tile.rows - first)",
        "count = WARP_ROWS",
    ),
    "hopper: column tail of hidden gradients stored": (
        "expert_down",
        "7_persistent",
        "present = column < h ? count : 0;",
        "present = count;",
    ),
    "hopper: a and b not awaited": ("expert_down", "7_persistent", "cp_async_wait<ROWS_AHEAD - 1>();", ";"),
    "hopper: one row of a and b too many under way": (
        "expert_down",
        "7_persistent",
        "cp_async_wait<ROWS_AHEAD - 1>();",
        "cp_async_wait<ROWS_AHEAD>();",
    ),
    "hopper: a and b in no group": ("expert_down", "7_persistent", "        cp_async_commit();\n    }\n", "    }\n"),
    "hopper: a and b of the row before": (
        "expert_down",
        "7_persistent",
        "a + begin + (long long)row * h",
        "a + begin + (long long)max(row - 1, 0) * h",
    ),
    "hopper: a and b of no row": ("expert_down", "7_persistent", "if (row < present) {", "if (present > 0) {"),
    "hopper: a and b in the next row's slot": (
        "expert_down",
        "7_persistent",
        "now = ahead[row % ROWS_AHEAD];",
        "now = ahead[(row + 1) % ROWS_AHEAD];",
    ),
    "hopper: warps share a and b": (
        "expert_down",
        "7_persistent",
        "return threadIdx.x % WARPGROUP;",
        "return lane_id();",
    ),
    "hopper: unscaled gate": (
        "expert_down",
        "7_persistent",
        "gate_of_row[tile.first + first + lane_id()] : 0.0f",
        "1.0f : 0.0f",
    ),
    "hopper: gate of another row": (
        "expert_down",
        "7_persistent",
        "__shfl_sync(FULL_WARP, gates, row)",
        "__shfl_sync(FULL_WARP, gates, 0)",
    ),
    "hopper: gradient of its first element twice": (
        "expert_down",
        "7_persistent",
        "hidden_gradient(a_pair[1], b_pair[1], d_pair[1], gate)",
        "hidden_gradient(a_pair[0], b_pair[0], d_pair[0], gate)",
    ),
    "hopper: gate term of every second element": (
        "expert_down",
        "7_persistent",
        "term += low.gate + high.gate;",
        "term += low.gate;",
    ),
    "hopper: gate term not left": ("expert_down", "7_persistent", "d.words[0] = __float_as_int(term);", ";"),
    "hopper: gate term without the last lane": (
        "expert_down",
        "7_persistent",
        "lane < WARP; ++lane) sum",
        "lane < WARP - 1; ++lane) sum",
    ),
    "hopper: gate term before every lane has left its own": (
        "expert_down",
        "7_persistent",
        "            __syncwarp();\n            const int column_tiles",
        "            const int column_tiles",
    ),
    "hopper: gate terms of all tiles in one place": (
        "expert_down",
        "7_persistent",
        "gate_terms[place + tile.column / TILE_COLUMNS]",
        "gate_terms[place]",
    ),
    "combine: unscaled gate": ("combine", "1_gather", "sum += gates[slot] * to_float(", "sum += to_float("),
    "combine: one slot": ("combine", "1_gather", "for (int j = 0; j < k; ++j)", "for (int j = 0; j < 1; ++j)"),
    "combine: zeros": (
        "combine",
        "1_gather",
        "out[index] = from_float<Scalar>(sum);",
        "out[index] = from_float<Scalar>(0.0f);",
    ),
    "combine: d_y unscaled": ("combine", "1_gather", "gates[slot] * to_float(d_out[", "to_float(d_out["),
    "combine vector: unscaled gate": ("combine", "2_vector", "return gates[slot];", "return 1.0f;"),
    "combine vector: last token": ("combine", "2_vector", "token >= L", "token >= L - 1"),
    "combine vector: first rows alone": ("combine", "2_vector", "first < k; first", "first < min(k, IN_FLIGHT); first"),
    "combine vector: first columns alone": ("combine", "2_vector", "first_column < d;", "first_column < WARP * PACK;"),
    "combine vector: rows in the order of slots": (
        "combine",
        "2_vector",
        "has_slot ? token_index_map[slot] :",
        "has_slot ? int(slot) :",
    ),
    "combine vector: one weight for several rows": (
        "combine",
        "2_vector",
        "weight_of_lane, first + i)",
        "weight_of_lane, first)",
    ),
    "combine vector: past the row": ("combine", "2_vector", "if (column < d) {", "if (column <= d) {"),
    "sum rows: zeros": ("expert_up", "0_sum_rows", "return 1.0f;", "return 0.0f;"),
    "sum rows: last slot": ("expert_up", "0_sum_rows", "has_slot = lane_id() < k;", "has_slot = lane_id() < k - 1;"),
    "sum rows: stale sums": ("expert_up", "0_sum_rows", "float sums[PACK] = {};", "static float sums[PACK];"),
}
TEACHING_FAULTS = {
    "4_wgmma": {
        "does not wait": ("cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
        "no barrier": ("        __syncthreads();      // this stage", "        // this stage"),
        "no fence": ("fence_async_proxy();  // what", "// what"),
        "stage filled too early": ("load(step + STAGES - 1);", "load(step + STAGES);"),
        "product not awaited": ("wgmma_wait<0>();", ";"),
        "product in no group": ("wgmma_commit();\n", ";\n"),
        "upper half twice": ("half * PANEL_BYTES + i * 32", "i * 32"),
        "depth of rows stands still": ("half * PANEL_BYTES + i * 32", "half * PANEL_BYTES"),
        "depth of weights stands still": ("i * 16 * 128", "0"),
        "every product begins anew": ("step + i > 0", "i > 0"),
        "the first product adds": ("step + i > 0", "true"),
        "last step dropped": ("(d + TILE_DEPTH - 1) / TILE_DEPTH", "d / TILE_DEPTH"),
        "w1 for w2": ("panel % RESULTS ? w2 : w1", "w1"),
        "weights of the first expert": ("(long long)tile.expert * d * h;", "0;"),
        "weights beyond the last column": ("h - column}", "h}"),
        "rows of another expert stored": ("if (row >= tile.rows || j >= h) return;", "if (j >= h) return;"),
        "columns of the next row stored": ("if (row >= tile.rows || j >= h) return;", "if (row >= tile.rows) return;"),
        "rows not gathered": ("expert_token_indices + tile.first}", "expert_token_indices}"),
    },
    "5_tma": {
        "no wait for a full stage": ("barrier_wait(&shared.full[state.stage], state.parity);", ";"),
        "no wait for an empty stage": ("barrier_wait(&shared.empty[filling.stage], filling.parity ^ 1);", ";"),
        "no fence": ("fence_async_proxy();  // what", "// what"),
        "stage free before it is read": ("        wgmma_wait<0>();\n", ""),
        "every lane frees a stage": ("if (lane_id() == 0) barrier_arrive", "barrier_arrive"),
        "rows do not arrive": ("cp_async_arrive(full);", "barrier_arrive(full);"),
        "full without the rows": ("1 + THREADS, THREADS / WARP", "1, THREADS / WARP"),
        "empty after one warp": ("1 + THREADS, THREADS / WARP", "1 + THREADS, 1"),
        "too few bytes": ("expecting(full, B_BYTES)", "expecting(full, B_BYTES / 2)"),
        "the same stage again": ("        filling.next();\n", ""),
        "w1 for w2": ("panel % RESULTS ? &w2 : &w1", "&w1"),
        "weights of the first expert": ("step * TILE_DEPTH, tile.expert);", "step * TILE_DEPTH, 0);"),
        "depth not cut off": ("% 8 * CHUNK < d;", "% 8 * CHUNK < d + 64;"),
        "one step ahead of the stages": ("load(step + STAGES);", "load(step + STAGES + 1);"),
    },
    "6_specialized": {
        "no wait for a full stage": ("barrier_wait(&shared.full[state.stage], state.parity);", ";"),
        "no wait for an empty stage": ("barrier_wait(&shared.empty[state.stage], state.parity ^ 1);", ";"),
        "no fence": ("fence_async_proxy();  // what", "// what"),
        "stage free while it is read": ("wgmma_wait<1>();", ";"),
        "stage free before it is read": (
            "if (step > 0 && lane_id() == 0) barrier_arrive(read);",
            "if (lane_id() == 0) barrier_arrive(&shared.empty[state.stage]);",
        ),
        "last product not awaited": ("    wgmma_wait<0>();\n", ""),
        "no stage is freed": ("if (step > 0 && lane_id() == 0) barrier_arrive(read);", ";"),
        "rows of the consumer's threads": ("(threadIdx.x - FIRST)", "(threadIdx.x)"),
        "full without the rows": ("1 + PRODUCERS, WARPGROUP", "1, WARPGROUP"),
        "nobody asks for the weights": ("if (threadIdx.x == WARPGROUP)", "if (threadIdx.x == 0)"),
        "quads not transposed": ("low = upper ? other : low;", "low = other;"),
        "b for a": ("(quad + QUADS * (RESULTS - 1)) * 16", "quad * 16"),
        "lower rows twice": ("+ row % 2 * 2;", ";"),
    },
}
FAULTS |= {
    f"{version}: {fault}": ("expert_up", version, *change)
    for version, faults in TEACHING_FAULTS.items()
    for fault, change in faults.items()
}
# Where d_x is made in two parts, the second of 48 columns.
PART_FAULTS = {
    "sum rows: the first columns twice": ("pitch + first", "pitch"),
    "sum rows: a row of d_x is as long as the rows": ("token * pitch", "token * d"),
}
FAULTS |= {fault: ("expert_up", "0_sum_rows", *change) for fault, change in PART_FAULTS.items()}
OUTPUT_PART_FAULTS = {
    "combine: the first columns twice": ("pitch + first", "pitch"),
    "combine: a row of out is as long as the rows": ("token * pitch", "token * d"),
}
FAULTS |= {fault: ("combine", "2_vector", *change) for fault, change in OUTPUT_PART_FAULTS.items()}
# Where the ring has one stage alone: it is free as soon as it is read, not a step later.
ONE_STAGE_FAULTS = {
    "hopper: only stage free a step late": ("BEHIND = Shared::STAGES > 1;", "BEHIND = 1;"),
    "hopper: only stage free after the first step alone": ("if (step >= BEHIND &&", "if (step < 1 &&"),
    "hopper: only stage free while it is read": ("wgmma_wait<BEHIND>();", "wgmma_wait<1>();"),
    "hopper: only stage free once more at the end": ("if (BEHIND && tile.steps > 0 &&", "if (tile.steps > 0 &&"),
}
FAULTS |= {fault: ("expert_up", "7_persistent", *change) for fault, change in ONE_STAGE_FAULTS.items()}
SEVERAL_TURNS = make_case(21, 264, 8, 7, 6, "zipf")  # of packs and of rows in flight, where a token's rows are summed


def planted(fault, **constants):
    """An executor with this fault."""
    stage, version, right, wrong = FAULTS[fault]
    executor = Planted(gemm.file_of(stage, version), right, wrong, seed=3, **constants)
    executor.multiprocessors = 2  # so that a block of 7_persistent has several tiles
    return executor


def assert_caught(fault, stage, version, case, dtype, **constants):
    """A kernel stops, the next one's check finds no number in what this one left, or an error exceeds its bound."""
    try:
        found_errors = verdicts(stage, version, case, dtype, planted(fault, **constants))
    except KernelFault:
        return
    except ValueError as refused:
        assert "is nan, but" in str(refused)
        return
    assert any(not error <= bound for error, bound in found_errors.values())


@pytest.mark.parametrize("fault", PART_FAULTS)
def test_a_planted_fault_of_parts_is_caught(fault, monkeypatch):
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    assert_caught(fault, "expert_up", "7_persistent", IN_PARTS, "bfloat16")


@pytest.mark.parametrize("fault", OUTPUT_PART_FAULTS)
def test_a_planted_fault_of_the_outputs_parts_is_caught(fault, monkeypatch):
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    whole, parts = output_in_parts(planted(fault), "bfloat16")
    assert not np.array_equal(whole, parts)


@pytest.mark.parametrize("fault", ONE_STAGE_FAULTS)
def test_a_planted_fault_of_one_stage_is_caught(fault):
    assert_caught(fault, "expert_up", "7_persistent", SEVERAL_TILES, "float16", RING_STAGES=1)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault not in PART_FAULTS | OUTPUT_PART_FAULTS | ONE_STAGE_FAULTS]
)
def test_a_planted_fault_is_caught(fault):
    stage, version = FAULTS[fault][:2]
    case = {"2_vector": SEVERAL_TURNS, "0_sum_rows": SEVERAL_TURNS}.get(version, RAGGED)
    if version == gemm.HOPPER:
        case = SEVERAL_TILES
    if version in gemm.TEACHING:
        case = DEEP
    version = {"0_gates": "1_naive", "0_sum_rows": "2_tiled"}.get(version, version)
    with tiles.trying(SMALL) if version in tiles.CANDIDATES and "mma" in version else nullcontext():
        assert_caught(fault, stage, version, case, VERSIONS[stage][version][0])
