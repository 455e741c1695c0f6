"""The block-sparse stage in raw CUDA: what its kernels ask of memory, what its doors refuse, and teeth."""

from contextlib import nullcontext

import numpy as np
import pytest
from test_block_sparse import sparse_of

from moeblaze_ref.backends import OpenStage
from moeblaze_ref.cases import random_topk
from moeblaze_ref.config import is_gated
from moeblaze_ref.kernel_headers import evaluate, table
from moeblaze_ref.numpy_ref import block_sparse as reference
from moeblaze_ref.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.paths import kernels_dir
from moeblaze_ref.raw_cuda import block_sparse, gemm
from moeblaze_ref.raw_cuda.runtime import simt
from moeblaze_ref.raw_cuda.runtime.simt import SimtExecutor
from moeblaze_ref.raw_cuda.runtime.source import KernelSource

EVERY = [(rung, dtype) for rung, able in block_sparse.RUNGS.items() for dtype in able]
every_rung = pytest.mark.parametrize(("rung", "dtype"), [(rung, able[-1]) for rung, able in block_sparse.RUNGS.items()])
MASK = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)  # an empty block row, an empty block column


def on(executor, rung):
    """The stage as numpy functions on a given executor."""
    options = {"executor": executor, "rung": rung}
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


def product_symbols(one, rung, transpose_lhs=False, transpose_rhs=False):
    """What the headers of the products call a matrix, its operand and its tiles."""
    (M, N, K), block, n, s = one.extents, one.topology.block, one.topology.nnz, one.values.dtype.itemsize
    symbols = {"M": M, "N": N, "K": K, "BLOCK": block, "n": n, "H": n * block, "V": n * block**2, "s": s}
    symbols |= {"rows": N if transpose_lhs else M, "I": 1 + transpose_lhs, "THREADS": gemm.THREADS}
    if rung == "2_tiled":
        symbols |= {"T": -(-block // 64), "C": -(-K // 64)}
    if rung == "3_mma":
        tile = block_sparse.tile_of(rung, block)
        A, B = s * tile.rows // 16, s * tile.columns // 16
        Y, X = -(-block // tile.rows), -(-block // tile.columns)
        R, C = -(-K // tile.rows), -(-K // tile.columns)
        symbols |= tile.constants(s) | {"A": A, "B": B, "Y": Y, "X": X, "R": R, "C": C}
    return symbols


def multiply_every_way(stage, one):
    """Every product with every transpose: yields (kernel, transpose_lhs, transpose_rhs) after each."""
    (M, N, K), dtype = one.extents, one.dtype
    for transposed in (False, True):
        stage.sdd(
            numbers(1, (M, K), dtype), numbers(2, (N, K) if transposed else (K, N), dtype), one.topology, transposed
        )
        yield "sdd", False, transposed
    for transpose_lhs in (False, True):
        depth = M if transpose_lhs else N
        for transposed in (False, True):
            rhs = numbers(2, (K, depth) if transposed else (depth, K), dtype)
            stage.dsd(one.values, one.topology, rhs, transpose_lhs, transposed)
            yield "dsd", transpose_lhs, transposed
    for transposed in (False, True):
        stage.dds(numbers(1, (M, K) if transposed else (K, M), dtype), one.values, one.topology, transposed, 2)
        yield "dds", transposed, False


def met(kernel, symbols, transpose_lhs, transpose_rhs):
    """G of rung 3_mma: 16-byte places of the dense operand that meet a line of a block."""
    of_data = symbols["s"] * symbols["K"] // 16
    if kernel == "dds":
        return symbols["X"] * (symbols["A"] * symbols["R"] if transpose_lhs else of_data)
    return symbols["Y"] * (of_data if transpose_rhs else symbols["B"] * symbols["C"])


@pytest.mark.parametrize(
    ("rung", "dtype", "block", "K"),
    [
        ("1_naive", "float32", 3, 5),
        ("2_tiled", "float32", 3, 70),
        ("2_tiled", "bfloat16", 72, 9),
        ("3_mma", "float16", 8, 136),
        ("3_mma", "bfloat16", 40, 72),
        ("3_mma", "bfloat16", 136, 24),
    ],
)
def test_the_products_ask_for_the_bytes_that_their_headers_state(rung, dtype, block, K):
    one, executor = sparse_of(MASK, block, K, dtype), SimtExecutor()
    with executor.recording() as launches:
        for kernel, *transposes in multiply_every_way(on(executor, rung), one):
            symbols = product_symbols(one, rung, *transposes)
            if rung == "3_mma":
                symbols["G"] = met(kernel, symbols, *transposes)
            assert launches[-1].kernel == kernel
            assert_as_stated(launches[-1], gemm.file_of("block_sparse", rung), symbols)


@pytest.mark.parametrize("rung", ["2_tiled", "3_mma"])
def test_a_block_of_threads_has_the_shared_memory_that_the_header_states(rung):
    tile = block_sparse.tile_of(rung, 8)
    constants = gemm.constants("float16", tile=tile) | {"BLOCK": 8, "TRANSPOSE_LHS": 1, "TRANSPOSE_RHS": 0}
    file = gemm.file_of("block_sparse", rung)
    source, dynamic = KernelSource.read(file, constants), 0 if tile is None else tile.shared_bytes
    sizes = {name: value for name, value in constants.items() if isinstance(value, int)} | {"s": 2}
    for kernel, header in stated(file).items():
        assert evaluate(header["shared bytes"], sizes) == simt._static_shared_bytes(source, kernel) + dynamic, kernel


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
