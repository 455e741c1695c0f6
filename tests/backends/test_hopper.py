"""Hopper's instructions on the CPU, one by one against numpy, and the faults that must show."""

import numpy as np
import pytest

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, Traffic
from moeblaze_ref.runtime.tensor_map import TensorMap
from moeblaze_ref.verify.cases import relative_error

SIMT = SimtExecutor()
HEADER = """// Runs on      sm_90a; SIMT executor.
#include "hopper/stmatrix.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
"""
PANEL_BYTES = 64 * 128
both_dtypes = pytest.mark.parametrize("dtype", gemm.NARROW)
both_shapes = pytest.mark.parametrize("columns", [128, 256])
in_order_and_not = pytest.mark.parametrize("seed", [0, 1, 2])


def random(*shape, dtype="bfloat16", seed=0):
    """Random numbers of a narrow type."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def swizzled(rows):
    """Rows of 128 bytes (n, 64) as they lie in shared memory: 16 bytes change places inside their row."""
    chunks = rows.view(np.uint16).reshape(len(rows), 8, 8)
    numbers = np.arange(len(rows))[:, None]
    return chunks[numbers, np.arange(8) ^ numbers % 8].reshape(len(rows), 64).view(rows.dtype)


def run(executor, text, kernel, block=128, shared_bytes=0, constants=None, **arguments):
    """Launch one block of a kernel text."""
    module = executor.load("test.cu", text=HEADER + text, **(constants or {}))
    module.launch(kernel, 1, block, shared_bytes, **arguments)


def faulty(text, right, wrong):
    """A kernel text with a fault."""
    assert right in text
    return text.replace(right, wrong)


# ---- the copy engine --------------------------------------------------------------------------

ALIGNED = """
__device__ __forceinline__ unsigned char* aligned_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    return memory + (1024 - shared_address(memory) % 1024) % 1024;
}
"""
LOAD = (
    ALIGNED
    + """
extern "C" __global__ void load(const __grid_constant__ TensorMap tensor, unsigned* out, int c0, int c1, int c2) {
    __shared__ Barrier arrived;
    unsigned char* const memory = aligned_memory();
    if (threadIdx.x == 0) {
        barrier_init(&arrived, 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_expecting(&arrived, BYTES);
        if (DIMENSIONS == 2) tma_load(memory, &tensor, &arrived, c0, c1);
        else tma_load(memory, &tensor, &arrived, c0, c1, c2);
    }
    barrier_wait(&arrived, 0);
    for (int i = threadIdx.x; i < BYTES / 4; i += blockDim.x) out[i] = reinterpret_cast<const unsigned*>(memory)[i];
}"""
)


def box_of(array, box, begin):
    """(rows, 64) of the box: the array's elements, zeros beyond it."""
    result = np.zeros(box[::-1], array.dtype)
    for index in np.ndindex(result.shape):
        at = tuple(i + b for i, b in zip(index, begin[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
            result[index] = array[at]
    return result.reshape(-1, 64)


def loaded(executor, array, box, begin, text=LOAD):
    """What a load leaves in shared memory, (rows, 64)."""
    rows = int(np.prod(box[1:]))
    out = executor.empty((rows * 32,), "uint32")
    constants = {"BYTES": rows * 128, "DIMENSIONS": array.ndim}
    names = dict(zip(("c0", "c1", "c2"), (*begin, 0), strict=False))
    tensor = TensorMap(executor.from_numpy(array), box)
    run(executor, text, "load", shared_bytes=1024 + rows * 128, constants=constants, tensor=tensor, out=out, **names)
    return executor.to_numpy(out).view(array.dtype).reshape(rows, 64)


BOXES = {
    "inside": ((200, 136), (64, 8), (64, 16)),
    "beyond the last row and column": ((200, 136), (64, 32), (128, 190)),
    "before the first": ((20, 64), (64, 16), (-24, -3)),
    "wholly outside": ((20, 64), (64, 16), (64, 0)),
    "from the second chunk on": ((20, 200), (64, 8), (8, 2)),
    "one matrix of three": ((3, 70, 136), (64, 64, 1), (64, 0, 1)),
    "beyond a matrix's rows is no other matrix": ((3, 70, 72), (64, 64, 1), (64, 64, 1)),
    "two matrices, the second beyond": ((3, 12, 64), (64, 8, 2), (0, 8, 2)),
}


def assert_loaded(executor, array, box, begin):
    expected = swizzled(box_of(array, box, begin))
    np.testing.assert_array_equal(loaded(executor, array, box, begin).view(np.uint16), expected.view(np.uint16))


def assert_box_arrives(executor, name, dtype):
    shape, box, begin = BOXES[name]
    assert_loaded(executor, random(*shape, dtype=dtype), box, begin)


@both_dtypes
@in_order_and_not
@pytest.mark.parametrize("name", BOXES)
def test_a_box_arrives_swizzled_with_zeros_beyond_the_array(name, dtype, seed):
    assert_box_arrives(SimtExecutor(seed=seed), name, dtype)


@both_dtypes
@pytest.mark.parametrize("instrumented", [True, False], ids=["counted", "in place"])
def test_a_part_of_each_matrix_ends_where_it_ends(instrumented, dtype):
    executor, whole = SimtExecutor(instrumented=instrumented), random(3, 40, 136, dtype=dtype)
    for part in (whole[:, 8:30], whole[:, :, 64:], whole[1:, :20, 8:72]):
        for begin in ((0, 0, 1), (8, 10, 0)):
            assert_loaded(executor, part, (64, 32, 1), begin)


@pytest.mark.parametrize(("columns", "sectors"), [(64, 4), (72, 5)])
def test_a_box_counts_what_the_array_has_of_it(columns, sectors):
    array = random(20, columns)
    with SIMT.recording() as launches:
        loaded(SIMT, array, (64, 16), (0, 6))
    rows = 14  # of 16: two are beyond
    assert launches[0].buffers["tensor"].read_bytes == rows * 128
    assert launches[0].buffers["tensor"].read_sectors == sum(
        (row * columns * 2 % 32 + 128 + 31) // 32 for row in range(6, 20)
    )
    assert sectors * rows >= launches[0].buffers["tensor"].read_sectors >= 4 * rows
    barrier_bytes = 8 * 2  # one initialisation, one arrival
    assert launches[0].shared.written_bytes == 16 * 128 + barrier_bytes
    assert launches[0].shared.bank_conflicts == 0


def test_an_array_may_be_an_argument_twice():
    text = """
    extern "C" __global__ void twice(const __grid_constant__ TensorMap tensor, const __half* array,
                                     unsigned short* out) {
        out[threadIdx.x] = __half_as_ushort(array[threadIdx.x]);
    }"""
    array, out = random(2, 64, dtype="float16"), np.zeros(128, np.uint16)
    with SIMT.recording() as launches:
        run(SIMT, text, "twice", tensor=TensorMap(array, (64, 2)), array=array, out=out)
    np.testing.assert_array_equal(out, array.ravel().view(np.uint16))
    assert launches[0].buffers["tensor = array"] == Traffic(256, 0, 8, 0)


# ---- cp.async, and who waits for it ------------------------------------------------------------

COPIES = """
extern "C" __global__ void copies(const unsigned* x, unsigned* out, int present) {
    __shared__ Barrier arrived;
    __shared__ Chunk chunks[128];
    if (threadIdx.x == 0) barrier_init(&arrived, 4);
    __syncthreads();
    const int t = threadIdx.x;
    cp_async_or_zero(&chunks[t], x + (t < present ? t * 4 : 0), t < present);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    if (t % 32 == 0) barrier_arrive(&arrived);
    barrier_wait(&arrived, 0);
    for (int i = 0; i < 4; ++i) out[t * 4 + i] = chunks[127 - t].words[i];
}"""


def copied(executor, text=COPIES):
    """What the copies of 100 of 128 threads leave, and what they should."""
    x, out = np.arange(1, 513, dtype=np.uint32), executor.empty((512,), "uint32")
    run(executor, text, "copies", x=executor.from_numpy(x), out=out, present=100)
    return executor.to_numpy(out), np.where(np.arange(512) < 400, x, 0).reshape(128, 4)[::-1].ravel()


def assert_copies_arrive(executor):
    np.testing.assert_array_equal(*copied(executor))


@in_order_and_not
def test_copies_arrive_and_are_zeros_where_nothing_is(seed):
    assert_copies_arrive(SimtExecutor(seed=seed))


def test_zeros_are_read_from_nowhere():
    with SIMT.recording() as launches:
        assert_copies_arrive(SIMT)
    assert launches[0].buffers["x"].read_bytes == 1600


def test_copies_that_nobody_waits_for_are_not_there():
    found, expected = copied(SIMT, COPIES.replace("cp_async_wait<0>();", ""))
    assert not np.array_equal(found, expected)


# ---- copies that arrive at a barrier -------------------------------------------------------------

ARRIVALS = """
__device__ __forceinline__ void look(const Chunk (&chunks)[2][128], unsigned* out) {
    for (int i = 0; i < 2; ++i) out[i * 128 + threadIdx.x] = chunks[i][127 - threadIdx.x].words[3];
}
extern "C" __global__ void arrivals(const unsigned* x, unsigned* out) {
    __shared__ Barrier first, both;
    __shared__ Chunk chunks[2][128];
    const int t = threadIdx.x;
    if (t == 0) {
        barrier_init(&first, 128);
        barrier_init(&both, 128);
    }
    chunks[0][t] = chunks[1][t] = Chunk{};
    __syncthreads();
    cp_async_or_zero(&chunks[0][t], x + t * 4, true);
    cp_async_arrive(&first);
    cp_async_or_zero(&chunks[1][t], x + (128 + t) * 4, true);
    cp_async_arrive(&both);
    look(chunks, out);
    barrier_wait(&first, 0);
    look(chunks, out + 256);
    barrier_wait(&both, 0);
    look(chunks, out + 512);
}"""


def looked(executor, text=ARRIVALS):
    """(3, 2, 128): both copies of every thread before any wait, after the wait for the first, after that for both."""
    out = executor.empty((768,), "uint32")
    run(executor, text, "arrivals", x=executor.from_numpy(np.arange(1, 1025, dtype=np.uint32)), out=out)
    return executor.to_numpy(out).reshape(3, 2, 128)


ARRIVED = np.arange(4, 1025, 4).reshape(2, 128)[:, ::-1]


def assert_arrivals(executor):
    """What was waited for is there; of the rest, each is there or is not."""
    found = looked(executor)
    np.testing.assert_array_equal(found[1, 0], ARRIVED[0])
    np.testing.assert_array_equal(found[2], ARRIVED)
    assert ((found == 0) | (found == ARRIVED)).all()
    return found


def test_copies_arrive_as_late_as_the_waits_allow():
    found = assert_arrivals(SIMT)
    assert (found[0] == 0).all() and (found[1, 1] == 0).all()


def test_with_a_seed_copies_may_arrive_sooner():
    sooner = np.array([assert_arrivals(SimtExecutor(seed=seed))[0] != 0 for seed in range(1, 6)])
    assert sooner.any() and not sooner.all()


def test_an_arrival_ends_no_group_of_copies():
    """Two copies with an arrival between them are one group, of which the wait allows one to be under way."""
    waits = "cp_async_commit();\n    cp_async_wait<1>();\n    __syncthreads();\n"
    text = ARRIVALS.replace("look(chunks, out);", waits + "    look(chunks, out);")
    assert (looked(SIMT, text)[0] == 0).all()
    assert np.array_equal(looked(SIMT, text.replace("wait<1>", "wait<0>"))[0], ARRIVED)


SECOND = "    cp_async_or_zero(&chunks[1][t], x + (128 + t) * 4, true);\n"
ARRIVAL_FAULTS = {
    "no arrival": ("cp_async_arrive(&both);", "", "barrier_wait at test.cu:.* lacks 128 of 128 arrivals and 0 bytes"),
    "a thread less arrives": (
        "    cp_async_arrive(&both);", "    if (t != 9) cp_async_arrive(&both);", "lacks 1 of 128 arrivals",
    ),
    "twice": (
        "cp_async_arrive(&both);", "cp_async_arrive(&both); barrier_arrive(&both);",
        "arrival too many|not done when the block ends",
    ),
    "a barrier that counts a thread too many": (
        "barrier_init(&both, 128)", "barrier_init(&both, 129)", "lacks 1 of 129 arrivals",
    ),
    "a barrier that counts a thread too few": (
        "barrier_init(&both, 128)", "barrier_init(&both, 127)",
        "cp_async_arrive at test.cu:.* is not done when the block ends",
    ),
    "no barrier": ("barrier_init(&both, 128);", "", "cp_async_arrive at test.cu:.* meets no initialised barrier"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ARRIVAL_FAULTS)
def test_a_wrong_arrival_is_named(fault):
    *change, message = ARRIVAL_FAULTS[fault]
    with pytest.raises(KernelFault, match=message):
        looked(SIMT, faulty(ARRIVALS, *change))


@in_order_and_not
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (f"{SECOND}    cp_async_arrive(&both);\n", f"    cp_async_arrive(&both);\n{SECOND}"),
        ("cp_async_arrive(&both);", "barrier_arrive(&both);"),
    ],
    ids=["before the copies", "without the copies"],
)
def test_an_arrival_that_waits_for_no_copy_is_seen(right, wrong, seed):
    assert (looked(SimtExecutor(seed=seed), faulty(ARRIVALS, right, wrong))[2] != ARRIVED).any()


# ---- stores of matrices ------------------------------------------------------------------------

STORE_MATRICES = """
extern "C" __global__ void store(const unsigned* pairs, unsigned* out) {
    __shared__ Chunk rows[32];
    const int lane = threadIdx.x;
    STORE(&rows[ROW], pairs[lane], pairs[lane + 32], pairs[lane + 64], pairs[lane + 96]);
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[lane * 4 + i] = rows[lane].words[i];
}"""
STORES = [("stmatrix_x4", (0, 1, 2)), ("stmatrix_x4_transposed", (0, 2, 1))]


def assert_stored(executor, row="lane", store="stmatrix_x4", axes=(0, 1, 2)):
    """The line that a lane names gets that of matrix lane / 8: the lanes' pairs side by side, or what was a column."""
    elements = np.arange(1, 257, dtype=np.uint16).reshape(4, 8, 8)
    pairs, out = elements.reshape(-1).view(np.uint32), executor.empty((128,), "uint32")
    constants = {"ROW": row, "STORE": store}
    run(executor, STORE_MATRICES, "store", block=32, constants=constants, pairs=executor.from_numpy(pairs), out=out)
    np.testing.assert_array_equal(executor.to_numpy(out).view(np.uint16).reshape(4, 8, 8), elements.transpose(axes))


@in_order_and_not
@pytest.mark.parametrize(("store", "axes"), STORES)
def test_matrices_are_stored_row_by_row_or_column_by_column(store, axes, seed):
    assert_stored(SimtExecutor(seed=seed), store=store, axes=axes)


@pytest.mark.parametrize(("store", "axes"), STORES)
@pytest.mark.parametrize("row", ["lane / 8 * 8", "31 - lane"])
def test_rows_in_the_wrong_place_are_seen(row, store, axes):
    with pytest.raises(AssertionError):
        assert_stored(SIMT, row, store, axes)


def test_the_two_stores_of_matrices_differ():
    with pytest.raises(AssertionError):
        assert_stored(SIMT, store="stmatrix_x4_transposed")


# ---- barriers ----------------------------------------------------------------------------------

RELAY = """
extern "C" __global__ void relay(int* out, int rounds) {
    __shared__ Barrier full, empty;
    __shared__ int slot[32];
    if (threadIdx.x == 0) {
        barrier_init(&full, 32);
        barrier_init(&empty, 32);
        barrier_init_fence();
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < rounds; ++i) {
        if (threadIdx.x < 32) {
            barrier_wait(&empty, (i & 1) ^ 1);  // at first there is nothing to wait for
            slot[lane] = i * 100 + lane;
            barrier_arrive(&full);
        } else {
            barrier_wait(&full, i & 1);
            out[i * 32 + lane] = slot[31 - lane];
            barrier_arrive(&empty);
        }
    }
}"""


def assert_relayed(executor, text=RELAY, rounds=9):
    out = executor.empty((rounds * 32,), "int32")
    run(executor, text, "relay", block=64, out=out, rounds=rounds)
    expected = 100 * np.arange(rounds)[:, None] + np.arange(32)[::-1]
    np.testing.assert_array_equal(executor.to_numpy(out), expected.ravel())


@in_order_and_not
def test_phases_pass_a_slot_to_and_fro(seed):
    assert_relayed(SimtExecutor(seed=seed))


RELAY_FAULTS = {
    "no wait for full": ("barrier_wait(&full, i & 1);", ";"),
    "no wait for empty": ("barrier_wait(&empty, (i & 1) ^ 1);", ";"),
    "empty too early": (
        "out[i * 32 + lane] = slot[31 - lane];\n            barrier_arrive(&empty);",
        "barrier_arrive(&empty);\n            out[i * 32 + lane] = slot[31 - lane];",
    ),
    "one arrival is enough": ("barrier_init(&full, 32)", "barrier_init(&full, 1)"),
    "parity never changes": ("barrier_wait(&full, i & 1);", "barrier_wait(&full, 0);"),
    "no __syncthreads": ("__syncthreads();", ""),
}


@pytest.mark.parametrize("fault", RELAY_FAULTS)
def test_a_wrong_relay_is_caught(fault):
    text, caught = faulty(RELAY, *RELAY_FAULTS[fault]), 0
    for seed in range(1, 6):
        try:
            assert_relayed(SimtExecutor(seed=seed), text)
        except (AssertionError, KernelFault):
            caught += 1
    assert caught >= 4


# ---- matrix products ---------------------------------------------------------------------------

STORED = """
    for (int i = threadIdx.x; i < 2048; i += 128) words[i] = a[i];
    for (int i = threadIdx.x; i < 32 * COLUMNS; i += 128) words[2048 + i] = b[i];
    fence_async_proxy();
    __syncthreads();
"""
PRODUCT = (
    ALIGNED
    + """
extern "C" __global__ void __launch_bounds__(128)
    product(const unsigned* a, const unsigned* b, float* out, int accumulate) {
    unsigned char* const memory = aligned_memory();
    unsigned* const words = reinterpret_cast<unsigned*>(memory);
"""
    + STORED
    + """
    constexpr int A_STEP = ALONG_M ? 16 * 128 : 32, B_STEP = ALONG_N ? 16 * 128 : 32;
    float d[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = 1.0f;
    const unsigned long long a_operand = wgmma_operand(memory, 8192), b_operand = wgmma_operand(memory + 8192, 8192);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        WGMMA<Scalar, ALONG_M, ALONG_N>(d, wgmma_advance(a_operand, k * A_STEP), wgmma_advance(b_operand, k * B_STEP),
                                        accumulate || k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
        out[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
}"""
)
COPIED = PRODUCT.replace(
    STORED,
    """
    __shared__ Barrier arrived;
    if (threadIdx.x == 0) barrier_init(&arrived, 128);
    __syncthreads();
    for (int i = threadIdx.x * 4; i < 2048; i += 512) cp_async_or_zero(words + i, a + i, true);
    for (int i = threadIdx.x * 4; i < 32 * COLUMNS; i += 512) cp_async_or_zero(words + 2048 + i, b + i, true);
    cp_async_arrive(&arrived);
    barrier_wait(&arrived, 0);
    fence_async_proxy();
""",
)


def operand_memory(matrix, along_rows):
    """The words of an operand (rows, 64): neighbours along the depth, or along the rows in panels of 64."""
    if not along_rows:
        return swizzled(matrix).view(np.uint32).ravel()
    panels = [swizzled(np.ascontiguousarray(part.T)) for part in np.split(matrix, len(matrix) // 64)]
    return np.concatenate(panels).view(np.uint32).ravel()


def product(executor, a, b, a_along_m, b_along_n, accumulate=0, text=PRODUCT):
    """(64, columns): a (64, 64) times b (64, columns), plus 1 if it accumulates."""
    columns = b.shape[1]
    out = executor.empty((64, columns), "float32")
    constants = {"Scalar": gemm.C_TYPE[str(a.dtype)], "ALONG_M": int(a_along_m), "ALONG_N": int(b_along_n)}
    constants |= {"COLUMNS": columns, "WGMMA": f"wgmma_m64n{columns}k16"}
    words = {"a": operand_memory(a, a_along_m), "b": operand_memory(np.ascontiguousarray(b.T), b_along_n)}
    words = {name: executor.from_numpy(array) for name, array in words.items()}
    shared_bytes = 1024 + (1 + columns // 64) * PANEL_BYTES
    run(executor, text, "product", 128, shared_bytes, constants, **words, out=out, accumulate=accumulate)
    return executor.to_numpy(out)


def factors(columns, dtype="bfloat16"):
    """a (64, 64) and b (64, columns)."""
    return random(64, 64, dtype=dtype), random(64, columns, dtype=dtype, seed=1)


def assert_product(executor, columns, dtype, a_along_m, b_along_n, accumulate, text=PRODUCT):
    a, b = factors(columns, dtype)
    expected = a.astype(np.float64) @ b.astype(np.float64) + accumulate
    assert relative_error(product(executor, a, b, a_along_m, b_along_n, accumulate, text), expected) < 1e-6


@both_dtypes
@both_shapes
@pytest.mark.parametrize("b_along_n", [False, True])
@pytest.mark.parametrize("a_along_m", [False, True])
def test_a_product_of_either_layout(a_along_m, b_along_n, columns, dtype):
    assert_product(SIMT, columns, dtype, a_along_m, b_along_n, 0)
    assert_product(SimtExecutor(seed=3), columns, dtype, a_along_m, b_along_n, 1)


def test_half_of_the_columns_left_out_is_seen():
    with pytest.raises(AssertionError):
        assert_product(SIMT, 256, "bfloat16", False, False, 0, PRODUCT.replace("WGMMA<", "wgmma_m64n128k16<"))


@both_shapes
def test_halves_that_are_subnormal_infinite_or_nan(columns):
    a, b = np.zeros((64, 64), np.float16), np.zeros((64, columns), np.float16)
    a[:, 0], b[0, -5:] = 1.0, [6e-8, -6e-8, 65504.0, np.inf, np.nan]
    np.testing.assert_array_equal(product(SIMT, a, b, False, False)[7, -5:], b[0, -5:].astype(np.float32))


def overwritten(ordered):
    """PRODUCT with the first row of A overwritten between the product's start and the wait for it."""
    fence = "fence_async_proxy();" if ordered else ""
    overwrite = f"if (threadIdx.x < 32) words[threadIdx.x] = 0;\n    {fence}\n"
    return PRODUCT.replace("    wgmma_wait<0>();", f"    {overwrite}    wgmma_wait<0>();")


@both_shapes
def test_a_product_is_done_when_it_is_waited_for(columns):
    a, b = factors(columns)
    found, right = (product(SIMT, a, b, False, False, text=text) for text in (overwritten(ordered=True), PRODUCT))
    assert (found[0] == 0).all() and np.array_equal(found[1:], right[1:])


def test_to_overwrite_what_a_product_reads_is_a_fault():
    with pytest.raises(
        KernelFault, match=r"reads what thread \(\d+, 0, 0\) wrote, and no fence_async_proxy has come between"
    ):
        product(SIMT, *factors(128), False, False, text=overwritten(ordered=False))


@both_shapes
@in_order_and_not
def test_a_product_of_copies(columns, seed):
    assert_product(SimtExecutor(seed=seed), columns, "bfloat16", False, True, 0, COPIED)


@pytest.mark.parametrize(
    "wrong",
    ["barrier_wait(&arrived, 0);\n", "barrier_wait(&arrived, 0);\n    if (threadIdx.x < 96) fence_async_proxy();\n"],
    ids=["by nobody", "by three warps of four"],
)
def test_copies_need_a_fence_of_who_multiplies_them(wrong):
    right = "barrier_wait(&arrived, 0);\n    fence_async_proxy();\n"
    with pytest.raises(KernelFault, match="wrote, and no fence_async_proxy has come between"):
        product(SIMT, *factors(128), False, True, text=faulty(COPIED, right, wrong))


def test_a_fence_before_the_copies_have_arrived_is_none():
    early = COPIED.replace("    fence_async_proxy();\n", "").replace(
        "cp_async_arrive", "fence_async_proxy();\n    cp_async_arrive"
    )
    with pytest.raises(KernelFault, match="wrote, and no fence_async_proxy has come between"):
        product(SIMT, *factors(128), False, True, text=early)


@both_shapes
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "wgmma_operand(memory, 8192)", "wgmma_operand(memory + 16 * (threadIdx.x == 40), 8192)",
            r"thread \(40, 0, 0\): WGMMA at test.cu:\d+ is not the same for all lanes",
        ),
        (
            "wgmma_operand(memory, 8192)", "(wgmma_operand(memory, 8192) & ~(3ull << 62))",
            r"WGMMA at test.cu:\d+ has descriptors of another swizzle",
        ),
        (
            "wgmma_operand(memory + 8192, 8192)", "wgmma_operand(memory + 2 * 8192, 16384)",
            "reads shared memory at address .*, where there is none",
        ),
        ("wgmma_operand(memory, 8192)", "wgmma_operand(a, 8192)", r"the address 0x\w+ is not one of shared memory"),
        (
            "fence_async_proxy();", ";",
            r"WGMMA at test.cu:\d+ reads what thread \(\d+, 0, 0\) wrote, and no fence_async_proxy",
        ),
        (
            "    wgmma_wait<0>();", "    if (threadIdx.x % 32 != 5) wgmma_wait<0>();",
            "waits at wgmma_wait at test.cu|wgmma_wait at test.cu:.* lacks lane 5",
        ),
    ],
)  # fmt: skip
def test_a_wrong_product_is_named(right, wrong, message, columns):
    with pytest.raises(KernelFault, match=message.replace("WGMMA", f"wgmma_m64n{columns}k16")):
        product(SIMT, *factors(columns), True, True, text=faulty(PRODUCT, right, wrong))


# ---- waits that never end, and what is not there -----------------------------------------------

WRONG_LOADS = {
    "expects too much": (
        "(&arrived, BYTES)", "(&arrived, BYTES + 16)",
        (r"thread \(0, 0, 0\): barrier_wait at test.cu:\d+ waits for phase 0 of a barrier that lacks 0 of 1 arrivals "
         r"and 16 bytes"),
    ),
    "expects nothing": (
        "barrier_arrive_expecting(&arrived, BYTES)", "barrier_arrive(&arrived)",
        "tma_load at test.cu:.* is not done when the block ends",
    ),
    "never arrives": ("barrier_arrive_expecting(&arrived, BYTES);", "", "lacks 1 of 1 arrivals and -512 bytes"),
    "arrives twice": (
        "barrier_arrive_expecting(&arrived, BYTES);",
        "barrier_arrive_expecting(&arrived, BYTES); barrier_arrive(&arrived);",
        r"barrier_arrive at test.cu:\d+ is an arrival too many: the phase has had its 1",
    ),
    "a parity of 2": (
        "barrier_wait(&arrived, 0)", "barrier_wait(&arrived, 2)",
        r"barrier_wait at test.cu:\d+ has the parity 2, but that of a phase is 0 or 1",
    ),
    "no barrier": (
        "barrier_init(&arrived, 1);", "", r"barrier_arrive_expecting at test.cu:\d+ meets no initialised barrier",
    ),
    "one coordinate too few": (
        "DIMENSIONS == 2", "DIMENSIONS == 3", "tma_load at test.cu:.* has 3 coordinates, but its tensor has 2",
    ),
    "no row of 128 bytes": (
        "tma_load(memory,", "tma_load(memory + 64,",
        r"tma_load at test.cu:\d+ writes to shared address \d+, which is no multiple of 128",
    ),
    "beyond shared memory": (
        "tma_load(memory,", "tma_load(memory + 256,",
        "out-of-bounds write of 512 bytes at byte offset 1152 of dynamic shared memory, which has 1536 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_LOADS)
def test_a_wrong_load_is_named(fault):
    *change, message = WRONG_LOADS[fault]
    with pytest.raises(KernelFault, match=message):
        loaded(SIMT, random(8, 64), (64, 4), (0, 0), faulty(LOAD, *change))


def test_who_waits_at_another_line_is_named_too():
    """Two roles that wait for each other: the wrong wait may be that of either."""
    text = """
    #include "hopper/barrier.cuh"
    extern "C" __global__ void roles(int* out) {
        __shared__ Barrier full, empty;
        if (threadIdx.x == 0) barrier_init(&full, 32);
        if (threadIdx.x == 0) barrier_init(&empty, 32);
        __syncthreads();
        if (threadIdx.x < 32) {
            barrier_wait(&full, 0);
            barrier_arrive(&empty);
        } else {
            barrier_wait(&empty, 0);
            barrier_arrive(&full);
        }
        out[threadIdx.x] = 1;
    }"""
    both = (
        r"thread \(0, 0, 0\): barrier_wait at test.cu:13 waits for phase 0 of a barrier that lacks 32 of 32 arrivals "
        r"and 0 bytes; thread \(32, 0, 0\) waits at test.cu:16 for phase 0 of one that lacks 32 of 32 arrivals$"
    )
    with pytest.raises(KernelFault, match=both):
        run(SIMT, text, "roles", block=64, out=np.zeros(64, np.int32))


@pytest.mark.parametrize("column", [13, -4])
def test_a_box_begins_at_a_multiple_of_16_bytes(column):
    with pytest.raises(
        KernelFault, match=f"tma_load at test.cu:.* begins at column {column}, which is no multiple of 16"
    ):
        loaded(SIMT, random(20, 200), (64, 8), (column, 2))


def test_a_load_that_nobody_waits_for_is_not_there():
    text = faulty(LOAD, "barrier_wait(&arrived, 0);", "__syncthreads();")
    with pytest.raises(KernelFault, match="tma_load at .* is not done when the block ends"):
        loaded(SIMT, random(8, 64), (64, 4), (0, 0), text)


# ---- checks of tensor maps -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "box", "error", "message"),
    [
        (
            [1, 2], (64, 2), TypeError,
            "array of the TensorMap is a list, but it must be an array of float16 or bfloat16",
        ),
        (np.zeros((8, 64), np.float32), (64, 2), TypeError, "has dtype float32, but it must be float16 or bfloat16"),
        (np.zeros(64, np.float16), (64,), ValueError, r"has shape \(64,\), but it must have 2 or 3 dimensions"),
        (np.zeros((2, 2, 2, 64), np.float16), (64, 2, 1, 1), ValueError, "but it must have 2 or 3 dimensions"),
        (np.zeros((64, 8), np.float16).T, (64, 2), ValueError, "is not C-contiguous"),
        (
            np.zeros((0, 64), np.float16), (64, 2), ValueError,
            r"has shape \(0, 64\), but the copy engine takes no empty array",
        ),
        (
            np.zeros((8, 12), np.float16), (64, 2), ValueError,
            "row of the array of the TensorMap, in bytes, is 24, but the copy engine needs a multiple of 16",
        ),
        (
            np.zeros(1 + 8 * 64, np.float16)[1:].reshape(8, 64), (64, 2), ValueError,
            "address of the array of the TensorMap is .*, but the copy engine needs a multiple of 16",
        ),
        (
            np.zeros((8, 64), np.float16), (64, 2, 1), ValueError,
            r"box of the TensorMap is \(64, 2, 1\), but the array has 2 dimensions",
        ),
        (
            np.zeros((8, 64), np.float16), (64, 257), ValueError,
            r"box\[1\] of the TensorMap is 257, but it must be 1..256",
        ),
        (np.zeros((8, 64), np.float16), (64, 0), ValueError, r"box\[1\] of the TensorMap is 0"),
        (
            np.zeros((8, 64), np.float16), (32, 8), ValueError,
            r"box\[0\] of the TensorMap is 32, but a row of the 128-byte swizzle has 64 elements",
        ),
    ],
)  # fmt: skip
def test_a_tensor_map_says_what_it_takes(array, box, error, message):
    with pytest.raises(error, match=message):
        TensorMap(array, box)


def test_a_kernel_takes_a_tensor_map_and_nothing_else_in_its_place():
    with pytest.raises(TypeError, match="argument tensor of kernel load is a ndarray, but it must be a TensorMap"):
        arguments = {"tensor": random(8, 64), "out": np.zeros(32, np.uint32), "c0": 0, "c1": 0, "c2": 0}
        run(SIMT, LOAD, "load", constants={"BYTES": 128, "DIMENSIONS": 2}, **arguments)
