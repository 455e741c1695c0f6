"""The block-sparse stage in raw CUDA: what its kernels ask of memory, what its checks refuse, and planted faults."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from planted import Planted, Quick
from sparse_cases import PRODUCTS, assert_activation, assert_rows, assert_same, matrix, run_layer, sparse_of

from moeblaze_ref.backends.numpy_ref import block_sparse as reference
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import block_sparse, gemm
from moeblaze_ref.backends.registry import OpenStage
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.kernel_headers import evaluate, table
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.verify.cases import make_case, random_topk, relative_error

MASK = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)  # an empty block row, an empty block column
TALL_MASK = np.vstack([MASK, MASK[:, ::-1], MASK, ~MASK])  # more rows than a band of tiles has, and none is the widest


def on(executor, version):
    """The stage as numpy functions on a given executor."""
    options = {"executor": executor, "version": version}
    return OpenStage(block_sparse, nullcontext, executor.from_numpy, executor.to_numpy, options)


def numbers(seed, shape, dtype):
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(dtype)


# ---- bytes -----------------------------------------------------------------------------------


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
        tile = block_sparse.tile_of(version, block)
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


def multiply_every_way(stage, one):
    """Every product with every transpose: yields (kernel, transpose_lhs, transpose_rhs, result) after each."""
    (M, N, K), dtype = one.extents, one.dtype
    for transposed in (False, True):
        lhs, rhs = numbers(1, (M, K), dtype), numbers(2, (N, K) if transposed else (K, N), dtype)
        yield "sdd", False, transposed, stage.sdd(lhs, rhs, one.topology, transposed)
    for transpose_lhs in (False, True):
        depth = M if transpose_lhs else N
        for transposed in (False, True):
            rhs = numbers(2, (K, depth) if transposed else (depth, K), dtype)
            yield "dsd", transpose_lhs, transposed, stage.dsd(one.values, one.topology, rhs, transpose_lhs, transposed)
    for transposed in (False, True):
        lhs = numbers(1, (M, K) if transposed else (K, M), dtype)
        yield "dds", transposed, False, stage.dds(lhs, one.values, one.topology, transposed, 2)


def met(kernel, symbols, transpose_lhs, transpose_rhs):
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
        for kernel, *transposes, _ in multiply_every_way(on(executor, version), one):
            symbols = product_symbols(one, version, *transposes)
            if version == "3_mma":
                symbols["G"] = met(kernel, symbols, *transposes)
            assert launches[-1].kernel == kernel
            assert_as_stated(launches[-1], gemm.file_of("block_sparse", version), symbols)


@pytest.mark.parametrize("version", ["2_tiled", "3_mma"])
def test_a_block_of_threads_has_the_shared_memory_that_the_header_states(version):
    tile = block_sparse.tile_of(version, 8)
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
        assert_as_stated(launch, "block_sparse/0_structures.cu", symbols)


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
    stage, x, y = on(executor, "2_tiled"), numbers(1, (bins.L, d), dtype), numbers(2, (bins.P, d), dtype)
    gates, s = numbers(3, (bins.L, bins.k), "float32"), x.itemsize
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
    assert_as_stated(plain, "block_sparse/0_rows.cu", symbols)
    assert_as_stated(weighted, "block_sparse/0_rows.cu", symbols | {"W": 1})
    assert_as_stated(gradient, "block_sparse/0_rows.cu", symbols)
    assert_as_stated(summed, "expert_up/0_sum_rows.cu", symbols)
    assert_as_stated(combined, "combine/2_vector.cu", symbols)


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize(("dtype", "block"), [("float32", 3), ("bfloat16", 8)])
def test_the_activation_asks_for_the_bytes_that_its_header_states(dtype, block, activation):
    a, b, d_y = numbers(1, (3, 37, block, block), dtype)
    b = b if is_gated(activation) else None
    executor = SimtExecutor()
    with executor.recording() as launches:
        on(executor, "2_tiled").activate(a, b, activation)
        on(executor, "2_tiled").activate_backward(d_y, a, b, activation)
    symbols = {"V": a.size, "s": a.itemsize, "G": 1 + is_gated(activation), "THREADS": gemm.THREADS}
    for launch in launches:
        assert_as_stated(launch, "block_sparse/0_hidden.cu", symbols | {"PACK": 1 if block == 3 else 16 // a.itemsize})


# ---- bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "dtype"), [(version, able[-1]) for version, able in block_sparse.VERSIONS.items()])
def test_every_order_of_threads_gives_the_same_bits(version, dtype):
    block = block_sparse.BLOCK if version == gemm.HOPPER else 8
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


# ---- checks ----------------------------------------------------------------------------------

DENSE = sparse_of(MASK, 8, 8, "float32")


def test_a_version_says_which_dtypes_it_takes():
    x = numbers(0, (DENSE.extents[0], 8), "float32")
    with pytest.raises(TypeError, match="3_mma of block_sparse computes in float16 or bfloat16, but x is float32"):
        block_sparse.sdd(x, numbers(1, (8, DENSE.extents[1]), "float32"), DENSE.topology, version="3_mma")
    with pytest.raises(TypeError, match="versions for it: 1_naive, 2_tiled"):
        block_sparse.activate(DENSE.values, None, "relu", version="3_mma")
    with pytest.raises(TypeError, match="lhs has dtype float64, but it must be float32 or float16 or bfloat16"):
        block_sparse.sdd(x.astype(float), numbers(1, (8, DENSE.extents[1]), "float64"), DENSE.topology)


@pytest.mark.parametrize(("block", "K", "message"), [(8, 12, "K is 12"), (12, 8, "block is 12")])
def test_tensor_cores_take_whole_eights(block, K, message):
    one = sparse_of(MASK, block, K, "float16")
    message += ", but 3_mma needs a multiple of 8; use 2_tiled"
    M, N, _ = one.extents
    with pytest.raises(ValueError, match=message):
        block_sparse.sdd(numbers(0, (M, K), "float16"), numbers(1, (K, N), "float16"), one.topology, version="3_mma")
    with pytest.raises(ValueError, match=message):
        block_sparse.dsd(one.values, one.topology, numbers(0, (N, K), "float16"), version="3_mma")
    with pytest.raises(ValueError, match=message):
        block_sparse.dds(numbers(0, (K, M), "float16"), one.values, one.topology, version="3_mma")


@pytest.mark.parametrize("block", [8, 64, 136])
def test_hopper_takes_blocks_as_high_as_its_tiles(block):
    one = sparse_of(MASK, block, 8, "float16")
    M, N, K = one.extents
    message = f"block is {block}, but 7_persistent needs a multiple of 128; use 3_mma"
    with pytest.raises(ValueError, match=message):
        block_sparse.sdd(
            numbers(0, (M, K), "float16"), numbers(1, (K, N), "float16"), one.topology, version="7_persistent"
        )
    with pytest.raises(ValueError, match=message):
        block_sparse.dsd(one.values, one.topology, numbers(0, (N, K), "float16"), version="7_persistent")
    with pytest.raises(ValueError, match=message):
        block_sparse.dds(numbers(0, (K, M), "float16"), one.values, one.topology, version="7_persistent")


def test_a_layer_takes_the_version_that_it_can():
    ampere, hopper, blackwell = (SimpleNamespace(capability=(major, 0)) for major in (8, 9, 10))
    assert block_sparse.default_version("bfloat16", 64, 128, hopper) == "7_persistent"
    for block, executor in ((128, ampere), (128, blackwell), (64, hopper)):
        assert block_sparse.default_version("float16", 64, block, executor) == "3_mma"
    for dtype, d, block in (("float32", 64, 128), ("bfloat16", 60, 128), ("bfloat16", 64, 12)):
        assert block_sparse.default_version(dtype, d, block, hopper) == "2_tiled"


@pytest.mark.parametrize("version", ["2_tiled", "3_mma"])
def test_block_columns_beyond_a_grid_are_refused_before_a_forward_needs_them(version):
    bins = reference.pad(build_by_sort(random_topk(3, 256, 1, "uniform"), 256), 8)
    message = f"65536 block columns have 65536 tiles, but {version} of block_sparse takes at most 65535; use a larger"
    with pytest.raises(ValueError, match=message):
        block_sparse.build_topology(bins, 2048, version=version)
    topology = reference.build_topology(bins, 2048)
    values, lhs = numbers(0, (topology.nnz, 8, 8), "float16"), numbers(1, (8, bins.P), "float16")
    with pytest.raises(ValueError, match=message):
        block_sparse.dds(lhs, values, topology, version=version)
    assert_same(block_sparse.build_topology(bins, 2048, version="1_naive"), topology)
    assert_same(block_sparse.build_topology(bins, 2040, version=version), reference.build_topology(bins, 2040))


def test_an_unknown_version_is_refused():
    dispatch = build_by_sort(random_topk(5, 3, 2, "uniform"), 3)
    bins, message = reference.pad(dispatch, 8), "unknown version of block_sparse '2_tile'. Did you mean '2_tiled'"
    for call in (
        lambda: block_sparse.pad(dispatch, 8, version="2_tile"),
        lambda: block_sparse.build_topology(bins, 8, version="2_tile"),
        lambda: block_sparse.padded_gather(numbers(0, (5, 8), "float32"), bins, version="2_tile"),
        lambda: block_sparse.dds(numbers(0, (8, 24), "float32"), DENSE.values, DENSE.topology, version="2_tile"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_gates_are_float32_and_a_token_has_no_more_slots_than_lanes():
    bins = reference.pad(build_by_sort(random_topk(3, 40, 33, "uniform"), 40), 8)
    x, y, gates = numbers(0, (3, 8), "float32"), numbers(1, (bins.P, 8), "float32"), numbers(2, (3, 33), "float64")
    with pytest.raises(TypeError, match="gates has dtype float64, but it must be float32"):
        block_sparse.padded_gather(x, bins, gates)
    with pytest.raises(ValueError, match=r"bins.k is 33, but it must be 1..32"):
        block_sparse.padded_scatter(y, bins)
    np.testing.assert_array_equal(block_sparse.padded_gather(x, bins), reference.padded_gather(x, bins))


# ---- planted faults --------------------------------------------------------------------------

FEW = make_case(29, 8, 16, 5, 3, "empty")
BINS_OF_FEW = reference.pad(build_by_sort(FEW.topk_experts, FEW.E), 8)


def structures(stage):
    dispatch = build_by_sort(FEW.topk_experts, FEW.E)
    bins = stage.pad(dispatch, 8)
    assert_same(bins, BINS_OF_FEW)
    assert_same(stage.build_topology(bins, 16), reference.build_topology(BINS_OF_FEW, 16))


def rows(stage):
    assert_rows(stage, build_by_sort(FEW.topk_experts, FEW.E), 8, 8, "float32")


def hidden(stage):
    assert_activation(stage, "swiglu", 7, 8, "float32")


def product(kernel, dtype, block, K, mask=MASK, **options):
    """A check of one product alone: with one transpose of its operands a fault is compiled once."""

    def check(stage):
        one = sparse_of(mask, block, K, dtype)
        M, N, _ = one.extents
        right = (K, N) if kernel == "sdd" else (M if "transpose_lhs" in options else N, K)
        left = (M, K) if kernel == "sdd" else (K, M)
        operands = {
            "sdd": (matrix(1, *left, dtype), matrix(2, *right, dtype), one.topology),
            "dsd": (one.values, one.topology, matrix(2, *right, dtype)),
            "dds": (matrix(1, *left, dtype), one.values, one.topology),
        }[kernel]
        exact = (each if each is one.topology else each.astype(np.float64) for each in operands)
        found, expected = getattr(stage, kernel)(*operands, **options), getattr(reference, kernel)(*exact, **options)
        assert relative_error(found, expected) <= {"float32": 1e-6, "float16": 2.0**-11}[dtype]

    return check


NAIVE, TILED, MMA, HOPPER = (f"block_sparse/{version}.cu" for version in block_sparse.VERSIONS)
STRUCTURES, ROWS, HIDDEN = (f"block_sparse/0_{name}.cu" for name in ("structures", "rows", "hidden"))
SUMS, COMBINE = "expert_up/0_sum_rows.cu", "combine/2_vector.cu"
TURNED = {"transpose_lhs": True}
SMALL = ("float16", 8, 16)  # blocks smaller than a tile
TALL = ("float16", 40, 72)  # several tiles along K
WHOLE = ("float16", 128, 264, TALL_MASK)  # several tiles each way
HALVED = ("float16", 256, 72)  # two tiles down a block


def parts(kernel):
    """A check of a product whose dense operand, or result, comes in parts."""
    return lambda stage: PRODUCTS[kernel](stage, sparse_of(np.tile(MASK, 2), 128, 72, "float16"), parts=2)


FAULTS = {  # what goes wrong: (file, text that stands there, text in its place, what must see it)
    "bins: not padded": (STRUCTURES, "(rows + BLOCK - 1) / BLOCK * BLOCK", "rows", structures),
    "bins: last one left out": (
        STRUCTURES, "padded_offsets[E] = before;", "padded_offsets[E] = before - BLOCK;", structures,
    ),
    "bins: unpadded offset": (STRUCTURES, "+ padded_offsets[expert];", "+ expert_token_offsets[expert];", structures),
    "bins: last slot left out": (STRUCTURES, "if (slot >= R) return;", "if (slot >= R - 1) return;", structures),
    "topology: an empty expert's bin": (STRUCTURES, "[middle] <= row)", "[middle] < row)", structures),
    "topology: last block left out": (STRUCTURES, "(number >= nnz) return;", "(number >= nnz - 1) return;", structures),
    "topology: transpose indices as they lie": (
        STRUCTURES, "column * high + row - first] =", "(row - first) * wide + column] =", structures,
    ),
    "topology: column within its expert": (STRUCTURES, "= expert * wide + column;", "= column;", structures),
    "topology: last column offset": (STRUCTURES, "if (index > E * wide)", "if (index >= E * wide)", structures),
    "topology: last row offset": (STRUCTURES, "if (index <= block_rows)", "if (index < block_rows)", structures),
    "rows: padding not cleared": (ROWS, "if (slot < 0) {", "if (P < 0) {", rows),
    "rows: padding not zero": (ROWS, "from_float<Scalar>(0.0f);", "from_float<Scalar>(1.0f);", rows),
    "rows: of the slot, not of its token": (ROWS, "(long long)(slot / k) * d", "(long long)(slot % k) * d", rows),
    "rows: unscaled gate": (ROWS, "(gate * to_float(", "(to_float(", rows),
    "rows: gate of the token's first slot": (ROWS, "gate = gates[slot];", "gate = gates[slot / k * k];", rows),
    "rows: last pack left out": (ROWS, "if (at >= (long long)P * d)", "if (at >= (long long)P * d - PACK)", rows),
    "gate gradient: of the next row": (ROWS, "(long long)rows[slot] * d;", "(long long)(rows[slot] ^ 1) * d;", rows),
    "gate gradient: of another token": (ROWS, "d_out + slot / k * d;", "d_out + slot % k * d;", rows),
    "gate gradient: of one lane": (ROWS, "sum = warp_sum(sum);", ";", rows),
    "gate gradient: last slot left out": (
        ROWS, "if (slot >= R) return;\n    const Scalar", "if (slot >= R - 1) return;\n    const Scalar", rows,
    ),
    "scatter: unscaled gate": (COMBINE, "return gates[slot];", "return 1.0f;", rows),
    "scatter: zeros": (SUMS, "return 1.0f;", "return 0.0f;", rows),
    "activation: without b": (HIDDEN, "hidden_activation(to_float(a_pack.elements[i]), to_float(b_pack.elements[i]))",
                              "hidden_activation(to_float(a_pack.elements[i]), 1.0f)", hidden),
    "activation: gradient of b not stored": (HIDDEN, "if (GATED) store_pack(d_b + at, d_b_pack);", "", hidden),
    "activation: last pack left out": (HIDDEN, "if (at >= values) return;", "if (at >= values - PACK) return;", hidden),
    "naive: last block left out": (
        NAIVE, "i < blocks.count;", "i < blocks.count - 1;", product("dsd", "float32", 3, 5),
    ),
    "naive: transpose indices ignored": (
        NAIVE, "return BY_COLUMN ? order[first + i] : first + i;", "return first + i;",
        product("dsd", "float32", 3, 5, **TURNED),
    ),
    "naive: block not transposed": (
        NAIVE, "TRANSPOSE_LHS ? p * BLOCK + line : line * BLOCK + p", "line * BLOCK + p",
        product("dsd", "float32", 3, 5, **TURNED),
    ),
    "naive: last of the depth left out": (NAIVE, "p < K; ++p", "p < K - 1; ++p", product("sdd", "float32", 3, 5)),
    "naive: last block never computed": (
        NAIVE, "(long long)nnz * BLOCK", "(long long)(nnz - 1) * BLOCK", product("sdd", "float32", 3, 5),
    ),
    "naive: parts below each other": (
        NAIVE, "result[Dense{nullptr, K, width}.at(row, column)]", "result[index]",
        product("dds", "float32", 3, 5, parts=2),
    ),
    "tiled: no barrier before the product": (
        TILED, "return b(r, side, p); });\n        __syncthreads();", "return b(r, side, p); });",
        product("sdd", "float32", 8, 20),
    ),
    "tiled: no barrier after the product": (
        TILED, "        __syncthreads();  // all have read", "        // all have read",
        product("dsd", "float32", 8, 20),
    ),
    "tiled: transpose indices ignored": (
        TILED, "return BY_COLUMN ? order[first + i] : first + i;", "return first + i;",
        product("dds", "float32", 8, 20),
    ),
    "tiled: columns beyond the block stored": (
        TILED, "if (i < BLOCK && j < BLOCK) block", "if (i < BLOCK) block", product("sdd", "float32", 8, 20),
    ),
    "tiled: lines beyond the block stored": (
        TILED, "if (i < BLOCK && j < K) result", "if (j < K) result", product("dsd", "float32", 8, 20),
    ),
    "tiled: second part of a block is the first": (
        TILED, "blockIdx.y % PARTS * TILE;\n    const long long row", "0;\n    const long long row",
        product("sdd", "float32", 72, 5),
    ),
    "tiled: last block left out": (
        TILED, "n < blocks.count;", "n < blocks.count - 1;", product("dsd", "float32", 8, 20),
    ),
    "mma: columns beyond the block stored": (
        MMA, "lines, columns, BLOCK);", "lines, TILE_COLUMNS, BLOCK);", product("sdd", *SMALL),
    ),
    "mma: lines beyond the block stored": (
        MMA, "+ first_column, lines, columns, K);", "+ first_column, TILE_ROWS, columns, K);", product("dsd", *SMALL),
    ),
    "mma: columns beyond the block of dds stored": (
        MMA, "store_tile(sums, target, lines, columns, width);",
        "store_tile(sums, target, lines, TILE_COLUMNS, width);", product("dds", *SMALL),
    ),
    "mma: last block left out": (
        MMA, "depth = blocks.count * BLOCK, count", "depth = (blocks.count - 1) * BLOCK, count", product("dsd", *SMALL),
    ),
    "mma: transpose indices ignored": (
        MMA, "return BY_COLUMN ? order[first + i] : first + i;", "return first + i;", product("dsd", *SMALL, **TURNED),
    ),
    "mma: first block for all": (
        MMA, "(OTHER ? blocks.other(i) : blocks.number(i))", "(OTHER ? blocks.other(0) : blocks.number(i))",
        product("dsd", *SMALL),
    ),
    "mma: place in the block forgotten": (
        MMA, "* BLOCK + at % BLOCK) : nullptr;", "* BLOCK) : nullptr;", product("dds", *TALL),
    ),
    "mma: next line of a block row": (
        MMA, "* BLOCK + number) * BLOCK + at", "* BLOCK + number / 2) * BLOCK + at", product("dsd", *SMALL),
    ),
    "mma: copies not awaited": (
        MMA, "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();", product("sdd", *TALL),
    ),
    "mma: missing barrier": (
        MMA, "        __syncthreads();  // the next stage has arrived", "        // the next stage has arrived",
        product("sdd", *TALL),
    ),
    "mma: second tile of K is the first": (
        MMA, "first_column = blockIdx.y * TILE_COLUMNS;", "first_column = 0;", product("dsd", *TALL),
    ),
    "hopper: last block left out": (
        HOPPER, "blocks.count * STEPS_OF_BLOCK}", "(blocks.count - 1) * STEPS_OF_BLOCK}", product("dsd", *WHOLE),
    ),
    "hopper: a block again in place of the next": (
        HOPPER, "if (p == 0) read(i + 1);", "if (p == 0) read(i);", product("dsd", *WHOLE),
    ),
    "hopper: next block too early": (HOPPER, "if (p == 0) number =", "number =", product("dsd", *WHOLE)),
    "hopper: transpose indices ignored": (
        HOPPER, "return BY_COLUMN ? order[first + i] : first + i;", "return first + i;",
        product("dsd", *WHOLE, **TURNED),
    ),
    "hopper: what a block meets by its number": (
        HOPPER, "tile.blocks.others[next_number];", "next_number;", product("dds", *WHOLE),
    ),
    "hopper: block not transposed": (
        HOPPER,
        ("tma_load(panels + at / PANEL * PANEL_BYTES, &map, full, ALONG_SIDE ? side + at : depth,\n                 "
         "ALONG_SIDE ? depth : side + at, matrix);"),
        "tma_load(panels + at / PANEL * PANEL_BYTES, &map, full, depth, side + at, matrix);",
        product("dsd", *WHOLE, **TURNED),
    ),
    "hopper: expects A alone": (HOPPER, "A_BYTES + B_BYTES);", "A_BYTES);", product("sdd", *WHOLE)),
    "hopper: second half as the first": (
        HOPPER, "= tile.column + half * HALF;", "= tile.column;", product("sdd", *WHOLE),
    ),
    "hopper: a block beyond the row stored": (
        HOPPER, "i < tile.blocks.count ? HALF : 0", "HALF", product("sdd", *WHOLE),
    ),
    "hopper: columns beyond K stored": (
        HOPPER, "width, TILE_ROWS, width - column);", "width, TILE_ROWS, HALF);", product("dsd", *WHOLE),
    ),
    "hopper: every band begins anew": (HOPPER, "number -= high * wide;", ";", product("dsd", *WHOLE)),
    "hopper: band as wide as its first row": (
        HOPPER, "wide = max(wide, width(top + i));", "wide = width(top);", product("sdd", *WHOLE),
    ),
    "hopper: a short row ends the walk": (
        HOPPER, "if (tile.column < blocks.count * SIDE) return true;", "return tile.column < blocks.count * SIDE;",
        product("sdd", *WHOLE),
    ),
    "hopper: last step of the depth left out": (
        HOPPER, "(K + TILE_DEPTH - 1) / TILE_DEPTH, {{row", "K / TILE_DEPTH, {{row", product("sdd", *WHOLE),
    ),
    "hopper: not turned": (HOPPER, "stmatrix_x4_transposed(&finished", "stmatrix_x4(&finished", product("dds", *WHOLE)),
    "hopper: turned beyond K": (
        HOPPER, "place, width, K - column, TILE_ROWS);", "place, width, HALF, TILE_ROWS);", product("dds", *WHOLE),
    ),
    "hopper: upper half of a block twice": (
        HOPPER, "row % TILES_DOWN * TILE_ROWS, column * TILE_COLUMNS,\n", "0, column * TILE_COLUMNS,\n",
        product("dsd", *HALVED),
    ),
    "hopper: upper half of a stored block twice": (
        HOPPER, "first + i) * SIDE + tile.line) * SIDE", "first + i) * SIDE) * SIDE", product("sdd", *HALVED),
    ),
    "hopper: first part of rhs for all": (HOPPER, "parts[half] = column / part;", "parts[half] = 0;", parts("sdd")),
    "hopper: first part of the depth for all": (
        HOPPER, "depth % part, depth / part);", "depth % part, 0);", parts("dsd"),
    ),
    "hopper: parts of the result below each other": (
        HOPPER, "result + Dense{nullptr, K, width}.at(column, tile.row)",
        "result + (long long)column * width + tile.row", parts("dds"),
    ),
}  # fmt: skip


def version_of(file):
    """The version that runs a file; what all share runs under the default."""
    name = file.removeprefix("block_sparse/").removesuffix(".cu")
    return name if name in block_sparse.VERSIONS else "2_tiled"


def test_the_checks_of_the_faults_pass_without_them():
    for file, check in {(file, check) for file, _, _, check in FAULTS.values()}:
        check(on(Quick(seed=3), version_of(file)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    """A kernel stops, a check refuses what it left, or the result is wrong."""
    file, right, wrong, check = FAULTS[fault]
    stage = on(Planted(file, right, wrong, seed=3), version_of(file))
    with pytest.raises((AssertionError, KernelFault, ValueError)):
        check(stage)
