"""The SIMT executor: what it runs, what it counts, and the faults that it must name."""

import os
import re
import shutil
import sys
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
import processes
import pytest

from moeblaze_ref.runtime.poison import POISON
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.simt.executor import (
    KernelFault,
    SharedTraffic,
    SimtExecutor,
    Staged,
    Traffic,
    Work,
    _without_overlap,
)
from moeblaze_ref.runtime.source import kernel_text

SIMT = SimtExecutor()
LANES = np.arange(32)


def run(text, kernel, grid=1, block=32, executor=SIMT, shared_bytes=0, constants=None, **arguments):
    """Compile a kernel text, launch it once, and return its report."""
    module = executor.load("test.cu", text='#include "common.cuh"\n' + text, **constants or {})
    with executor.recording() as launches:
        module.launch(kernel, grid, block, shared_bytes, **arguments)
    return launches[0]


def ints(size, fill=-1):
    return np.full(size, fill, np.int32)


# ---- threads and blocks -----------------------------------------------------------------


def test_three_dimensional_grids_and_blocks_number_every_thread_once():
    out = ints((2 * 3 * 2) * (4 * 3 * 2))
    text = """
    extern "C" __global__ void number(int* out) {
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
    }"""
    run(text, "number", grid=(2, 3, 2), block=(4, 3, 2), out=out)
    np.testing.assert_array_equal(out, (1000 * np.arange(12)[:, None] + np.arange(24)).ravel())


BLOCK_REVERSE = """
extern "C" __global__ void reverse(int* data) {
    __shared__ int tile[96];
    tile[threadIdx.x] = data[blockIdx.x * 96 + threadIdx.x];
    __syncthreads();
    data[blockIdx.x * 96 + threadIdx.x] = tile[95 - threadIdx.x];
}"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shared_memory_and_barriers_work_in_every_order_of_threads(seed, workers):
    data = np.arange(7 * 96, dtype=np.int32)
    expected = data.reshape(7, 96)[:, ::-1].ravel()
    run(BLOCK_REVERSE, "reverse", grid=7, block=96, executor=SimtExecutor(workers=workers, seed=seed), data=data)
    np.testing.assert_array_equal(data, expected)


def test_barriers_that_vote():
    out = ints(6)
    text = """
    extern "C" __global__ void vote(int* out) {
        const int t = threadIdx.x;
        const int any = __syncthreads_or(t == 40), none = __syncthreads_or(0);
        const int all = __syncthreads_and(1), not_all = __syncthreads_and(t != 40);
        const int odd = __syncthreads_count(t & 1), zero = __syncthreads_count(0);
        if (t == 50) { out[0] = any; out[1] = none; out[2] = all; out[3] = not_all; out[4] = odd; out[5] = zero; }
    }"""
    run(text, "vote", block=64, out=out)
    np.testing.assert_array_equal(out, [1, 0, 1, 0, 32, 0])


def test_shared_memory_starts_poisoned_as_outputs_do():
    out = np.zeros(64, np.float32)
    text = """
    extern "C" __global__ void peek(float* out) {
        DYNAMIC_SHARED(float, memory);
        __shared__ float fixed[32];
        out[threadIdx.x] = memory[threadIdx.x];
        out[32 + threadIdx.x] = fixed[threadIdx.x];
        memory[threadIdx.x] = fixed[threadIdx.x] = 1.0f;  // must not be seen by the next block
    }"""
    run(text, "peek", grid=3, shared_bytes=128, out=out)
    assert np.isnan(out).all()
    np.testing.assert_array_equal(out.view(np.uint16), POISON)


# ---- warps ------------------------------------------------------------------------------

SHUFFLES = """
extern "C" __global__ void shuffles(int* out, int width) {
    const int lane = threadIdx.x % 32;
    int* row = out + lane;
    row[0] = __shfl_sync(FULL_WARP, 10 * lane, lane + 3, width);
    row[32] = __shfl_up_sync(FULL_WARP, 10 * lane, 3, width);
    row[64] = __shfl_down_sync(FULL_WARP, 10 * lane, 3, width);
    row[96] = __shfl_xor_sync(FULL_WARP, 10 * lane, 5, width);
}"""


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles_stay_inside_their_segment(width):
    out = ints(128)
    run(SHUFFLES, "shuffles", out=out, width=width)
    segment, place = LANES // width * width, LANES % width
    np.testing.assert_array_equal(out[:32], 10 * (segment + (place + 3) % width))
    np.testing.assert_array_equal(out[32:64], 10 * np.where(place >= 3, LANES - 3, LANES))
    np.testing.assert_array_equal(out[64:96], 10 * np.where(place + 3 < width, LANES + 3, LANES))
    np.testing.assert_array_equal(out[96:], 10 * (LANES ^ 5))


def test_a_shuffle_moves_eight_bytes():
    out = np.zeros(32)
    moved = "out[threadIdx.x] = __shfl_xor_sync(FULL_WARP, threadIdx.x + 0.5, 1);"
    text = f'extern "C" __global__ void f(double* out) {{ {moved} }}'
    run(text, "f", out=out)
    np.testing.assert_array_equal(out, (LANES ^ 1) + 0.5)


def test_votes_and_matches():
    out = np.zeros((4, 32), np.uint32)
    text = """
    extern "C" __global__ void votes(unsigned* out) {
        const int lane = threadIdx.x;
        out[lane] = __ballot_sync(FULL_WARP, lane % 3 == 0);
        out[32 + lane] = __any_sync(FULL_WARP, lane == 7) + 2 * __any_sync(FULL_WARP, 0);
        out[64 + lane] = __all_sync(FULL_WARP, 1) + 2 * __all_sync(FULL_WARP, lane != 7);
        out[96 + lane] = __match_any_sync(FULL_WARP, lane % 5);
    }"""
    run(text, "votes", out=out)
    assert (out[0] == sum(1 << lane for lane in range(0, 32, 3))).all()
    assert (out[1] == 1).all() and (out[2] == 1).all()
    same = [sum(1 << other for other in range(32) if other % 5 == lane % 5) for lane in range(32)]
    np.testing.assert_array_equal(out[3], same)


def test_matches_compare_bits():
    x, out = np.full(32, 1.0, np.float32), np.zeros(32, np.uint32)
    x[[0, 5]], x[[1, 6]], x[2], x[3] = np.nan, -0.0, 0.0, -np.nan
    text = """
    extern "C" __global__ void match(const float* x, unsigned* out) {
        out[threadIdx.x] = __match_any_sync(FULL_WARP, x[threadIdx.x]);
    }"""
    run(text, "match", x=x, out=out)
    bits = x.view(np.uint32)
    same = [sum(1 << other for other in range(32) if bits[other] == bits[lane]) for lane in range(32)]
    np.testing.assert_array_equal(out, same)


def test_reductions():
    out = np.zeros((4, 32), np.int32)
    text = """
    extern "C" __global__ void reductions(int* out) {
        const int lane = threadIdx.x, value = (lane * 7) % 32 - 16;  // -16 to 15, in disorder
        out[lane] = __reduce_max_sync(FULL_WARP, value);
        out[32 + lane] = __reduce_min_sync(FULL_WARP, value);
        out[64 + lane] = __reduce_max_sync(FULL_WARP, unsigned(value));
        const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
        out[96 + lane] = lane < 16 ? __reduce_min_sync(half, unsigned(lane)) : __reduce_min_sync(half, unsigned(lane));
    }"""
    run(text, "reductions", out=out)
    assert (out[0] == 15).all() and (out[1] == -16).all() and (out[2] == -1).all()
    np.testing.assert_array_equal(out[3], LANES // 16 * 16)


def test_halves_of_a_warp_exchange_separately():
    out = ints(32)
    text = """
    extern "C" __global__ void halves(int* out) {
        const int lane = threadIdx.x;
        if (lane < 16) out[lane] = __shfl_sync(0x0000ffffu, lane, 15);
        else out[lane] = __shfl_sync(0xffff0000u, lane, 31);
    }"""
    run(text, "halves", out=out)
    np.testing.assert_array_equal(out, np.where(LANES < 16, 15, 31))


def test_integer_built_ins():
    out = ints(6)
    text = """
    extern "C" __global__ void bits(const int* in, int* out) {
        out[0] = __popc(0xf0f1u); out[1] = __ffs(8); out[2] = __ffs(0);
        out[3] = __clz(1); out[4] = __clz(0); out[5] = __ldg(in + 1);
    }"""
    run(text, "bits", block=1, **{"in": np.array([3, 9], np.int32)}, out=out)
    np.testing.assert_array_equal(out, [9, 4, 0, 31, 32, 9])


# ---- atomics ----------------------------------------------------------------------------


def test_atomics_add_up_across_blocks_and_count_once_each():
    total, largest, real, first = ints(1, 0), ints(1, 0), np.zeros(1, np.float32), ints(1)
    text = """
    extern "C" __global__ void count(int* total, int* largest, float* real, int* first) {
        const int id = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(total, 2);
        atomicMax(largest, id);
        atomicAdd(real, 0.5f);
        atomicCAS(first, -1, 77);
    }"""
    report = run(text, "count", grid=8, block=64, total=total, largest=largest, real=real, first=first)
    assert (total[0], largest[0], real[0], first[0]) == (1024, 511, 256.0, 77)
    for name in ("total", "largest", "real", "first"):
        assert (report.buffers[name].read_bytes, report.buffers[name].written_bytes) == (2048, 2048)


# ---- types ------------------------------------------------------------------------------


def test_a_float4_is_one_access_of_sixteen_bytes():
    x, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    text = """
    extern "C" __global__ void copy(const float* x, float* out) {
        float4 v = reinterpret_cast<const float4*>(x)[threadIdx.x];
        v.x += 1.0f;
        reinterpret_cast<float4*>(out)[threadIdx.x] = v;
    }"""
    report = run(text, "copy", x=x, out=out)
    np.testing.assert_array_equal(out, x + (np.arange(128) % 4 == 0))
    assert report.buffers == {"x": Traffic(512, 0, 16, 0), "out": Traffic(0, 512, 0, 16)}


# ---- counting ---------------------------------------------------------------------------


def test_read_modify_write_is_counted_both_ways():
    data = np.arange(1000, dtype=np.int32)
    text = """
    extern "C" __global__ void increment(int* data, int n) {
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) data[i] += 1;
    }"""
    report = run(text, "increment", grid=4, block=256, data=data, n=1000)
    np.testing.assert_array_equal(data, np.arange(1, 1001))
    assert report.buffers == {"data": Traffic(4000, 4000, 125, 125)}


def test_in_place_through_two_arguments_is_one_buffer():
    data = np.arange(64, dtype=np.float32)
    text = 'extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2.0f * x[threadIdx.x]; }'
    report = run(text, "twice", block=64, x=data, y=data)
    np.testing.assert_array_equal(data, 2 * np.arange(64))
    assert report.buffers == {"x = y": Traffic(256, 256, 8, 8)}
    halves = np.zeros((2, 64), np.float32)
    for x, y in (halves, halves[::-1]):  # whichever lies first in memory
        assert list(run(text, "twice", block=64, x=x, y=y).buffers) == ["x", "y"]


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (16, 32)])
def test_sectors_of_a_strided_read(stride, sectors):
    strided = "out[threadIdx.x] = x[threadIdx.x * stride];"
    text = f'extern "C" __global__ void read(const int* x, int* out, int stride) {{ {strided} }}'
    report = run(text, "read", x=ints(32 * stride, 5), out=ints(32), stride=stride)
    assert report.buffers == {"x": Traffic(128, 0, sectors, 0), "out": Traffic(0, 128, 0, 4)}


def test_lanes_that_loop_longer_do_not_disturb_the_grouping():
    text = """
    extern "C" __global__ void ragged(const int* x, int* out) {
        int sum = 0;
        for (int i = 0; i <= int(threadIdx.x) % 2; ++i) sum += x[32 * i + threadIdx.x];
        __syncwarp();
        out[threadIdx.x] = sum;
    }"""
    report = run(text, "ragged", x=ints(64, 1), out=ints(32))
    assert report.buffers == {"x": Traffic(192, 0, 8, 0), "out": Traffic(0, 128, 0, 4)}


@pytest.mark.parametrize(
    ("type", "stride", "wavefronts", "conflicts"),
    [
        ("float", 1, 1, 0),
        ("float", 2, 2, 1),
        ("float", 32, 32, 31),
        ("float", 33, 1, 0),
        ("double", 1, 2, 0),
        ("float4", 1, 4, 0),
    ],
)
def test_bank_conflicts_of_a_strided_write(type, stride, wavefronts, conflicts):
    size = {"float": 4, "double": 8, "float4": 16}[type]
    text = """
    extern "C" __global__ void strided(int* out, int stride) {
        DYNAMIC_SHARED(TYPE, memory);
        memory[threadIdx.x * stride] = TYPE{};
    }"""
    shared_bytes = 32 * stride * size
    report = run(text, "strided", shared_bytes=shared_bytes, constants={"TYPE": type}, out=ints(1), stride=stride)
    assert report.shared == SharedTraffic(0, 32 * size, wavefronts, conflicts)


def test_a_broadcast_has_no_conflict():
    text = """
    extern "C" __global__ void broadcast(int* out) {
        __shared__ int word[32];
        word[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = word[9];
    }"""
    out = ints(32)
    report = run(text, "broadcast", out=out)
    assert (out == 9).all()
    assert report.shared == SharedTraffic(read_bytes=128, written_bytes=128, wavefronts=2, bank_conflicts=0)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_work_of_threads_is_that_of_the_busiest_and_of_all_that_write(seed):
    """Thread t of two adds up t numbers in global memory and one in shared memory; the even ones write the sum."""
    text = """
    extern "C" __global__ void uneven(const int* x, int* out) {
        __shared__ int first[1];
        if (threadIdx.x == 0 && blockIdx.x == 0) first[0] = 1;
        __syncthreads();
        int sum = 0;
        for (int i = 0; i < threadIdx.x; ++i) sum += x[i];
        __syncthreads();
        for (int i = 0; i < blockIdx.x; ++i) __syncthreads();
        if (threadIdx.x % 2 == 0) out[40 * blockIdx.x + threadIdx.x] = sum;
    }"""
    report = run(text, "uneven", grid=3, block=40, executor=SimtExecutor(seed=seed), x=ints(40, 1), out=ints(120))
    assert report.work == Work(accesses=39, barriers=4, threads=60, exchanges=0, waits=0, copied=0, under_way=0)


@pytest.mark.parametrize("seed", [0, 3])
def test_exchanges_waits_and_copies_are_counted(seed):
    """Thread 0 of a block waits at an mbarrier; one warp takes part in two exchanges, the other in one."""
    text = """
    #include "hopper/barrier.cuh"
    #include "ptx.cuh"
    extern "C" __global__ void meets(const int* x, int* out) {
        __shared__ int4 copied[64];
        __shared__ Barrier barrier;
        if (threadIdx.x == 0) barrier_init(&barrier, 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            barrier_arrive(&barrier);
            barrier_wait(&barrier, 0);
        }
        cp_async_or_zero(&copied[threadIdx.x], x + 4 * threadIdx.x, threadIdx.x % 2 == 0);
        cp_async_commit();
        cp_async_wait<1>();
        cp_async_wait<0>();
        int sum = __shfl_xor_sync(0xffffffff, copied[threadIdx.x].x, 1);
        if (threadIdx.x >= 32) sum += __any_sync(0xffffffff, sum > 0);
        __syncwarp();
        out[64 * blockIdx.x + threadIdx.x] = sum;
    }"""
    report = run(text, "meets", grid=3, block=64, executor=SimtExecutor(seed=seed), x=ints(256, 1), out=ints(192))
    assert (report.work.exchanges, report.work.waits, report.work.copied) == (2, 3, 3 * 64 * 16)
    assert report.work.under_way == 3 * 64 * 16  # after the first wait; none after the second


@pytest.mark.parametrize(("seed", "reads_too_late"), [(0, False), (1, False), (2, True)])
def test_an_even_seed_shows_that_a_copy_replaces_what_is_still_read(seed, reads_too_late):
    """Both copies of a thread go to one place, and the first is read while the second is under way."""
    text = """
    #include "ptx.cuh"
    extern "C" __global__ void overtakes(const int* x, int* out) {
        __shared__ int4 stage[32];
        for (int step = 0; step < 3; ++step) {
            cp_async_or_zero(&stage[threadIdx.x], x + 4 * (32 * step + threadIdx.x), true);
            cp_async_commit();
            cp_async_wait<1>();
            if (step > 0) out[32 * (step - 1) + threadIdx.x] = stage[threadIdx.x].x;
        }
        cp_async_wait<0>();
    }"""
    x, out = np.arange(4 * 96, dtype=np.int32), ints(64)
    run(text, "overtakes", grid=1, block=32, executor=SimtExecutor(seed=seed), x=x, out=out)
    assert (out.tolist() != x[: 4 * 64 : 4].tolist()) == reads_too_late


def test_counts_do_not_depend_on_workers_or_order():
    def count(executor):
        return run(BLOCK_REVERSE, "reverse", grid=9, block=96, executor=executor, data=ints(9 * 96, 3))

    expected = count(SimtExecutor(workers=1))
    assert expected.read_bytes == expected.written_bytes == 4 * 9 * 96
    for executor in (SimtExecutor(workers=3), SimtExecutor(workers=2, seed=5)):
        assert count(executor) == expected


# ---- faults -----------------------------------------------------------------------------

COPY = """
extern "C" __global__ void copy(const int* x, int* out, int shift) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i + shift];
}"""


@pytest.mark.parametrize(
    ("size", "shift", "block", "thread", "access"),
    [
        (64, 1, 1, 31, "read of 4 bytes at byte offset 256 of x, which has 256 bytes"),
        (64, -1, 0, 0, "read of 4 bytes at byte offset -4 of x"),
        (60, 0, 1, 28, "write of 4 bytes at byte offset 240 of out, which has 240 bytes"),
        (64, 100_000, 0, 0, "read of 4 bytes at byte offset 400000 of x"),
    ],
)
def test_an_access_outside_its_buffer_is_named(size, shift, block, thread, access):
    place = rf"kernel copy, block \({block}, 0, 0\), thread \({thread}, 0, 0\)"
    with pytest.raises(KernelFault, match=f"{place}: out-of-bounds {access}"):
        run(COPY, "copy", grid=2, x=ints(64), out=ints(size), shift=shift)


def test_an_access_to_an_empty_array_is_named():
    with pytest.raises(KernelFault, match=r"write of 4 bytes at byte offset 0 of out, which has 0 bytes"):
        run(COPY, "copy", x=ints(32), out=ints(0), shift=0)
    with pytest.raises(KernelFault, match=r"read of 4 bytes at byte offset 12 of x, which has 0 bytes"):
        run(COPY, "copy", x=ints(0), out=ints(32), shift=3)
    both = ints(64)  # an empty view has the address of what it is a view of
    with pytest.raises(KernelFault, match=r"read of 4 bytes at byte offset 0 of x, which has 0 bytes"):
        run(COPY, "copy", x=both[:0], out=both, shift=0)


def test_empty_arrays_that_nobody_touches_are_fine():
    text = 'extern "C" __global__ void some(const int* x, const int* y, int* out) { out[threadIdx.x] = 7; }'
    out = ints(32)
    report = run(text, "some", x=np.empty((0, 5), np.int32), y=out[9:9], out=out)
    assert (out == 7).all()
    assert report.buffers["y"] == Traffic(0, 0, 0, 0) and report.written_bytes == 128


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("fixed[threadIdx.x + 8]", "write of 4 bytes at byte offset 128 of static shared memory, which has 128 bytes"),
        ("((char*)fixed)[128]", "write of 1 bytes at byte offset 128 of static shared memory, which has 128 bytes"),
        ("moving[threadIdx.x]", "write of 4 bytes at byte offset 32 of dynamic shared memory, which has 32 bytes"),
        ("((int*)nullptr)[threadIdx.x]", "write of 4 bytes at byte offset 0 of null, which has 0 bytes"),
    ],
)
def test_shared_memory_and_null_are_named(access, message):
    text = f"""
    extern "C" __global__ void wild(int* out) {{
        __shared__ int fixed[32];
        DYNAMIC_SHARED(int, moving);
        {access} = 1;
        out[threadIdx.x] = fixed[0] + moving[0];
    }}"""
    with pytest.raises(KernelFault, match=message):
        run(text, "wild", shared_bytes=32, out=ints(32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "float2 v = *(const float2*)(x + 7 * threadIdx.x); x[0] = v.x + v.y;",
            r"thread \(1, 0, 0\): misaligned access of 8 bytes",
        ),
        ("float4 v = ((const float4*)(x + 1))[0]; x[0] = v.x;", "misaligned access of 16 bytes"),
        ("atomicAdd((int*)((char*)x + 2), 1);", "misaligned access of 4 bytes"),
        ("memset(x, 0, n);", "out-of-bounds write of 16 bytes at byte offset 2048 of x"),
        ("memcpy(x, x + 256, n);", "out-of-bounds read of 16 bytes at byte offset 2048 of x"),
    ],
)
def test_misaligned_and_library_accesses_are_named(body, message):
    text = f'extern "C" __global__ void wild(float* x, int n) {{ {body} }}'
    with pytest.raises(KernelFault, match=message):
        run(text, "wild", x=np.zeros(512, np.float32), n=4096)


def test_large_structs_and_library_calls_are_counted_to_the_byte():
    text = """
    struct Large { float values[33]; };
    extern "C" __global__ void move(float* x, unsigned char* y, int n) {
        __shared__ Large copies[2];
        copies[0] = *(Large*)x;
        copies[1] = copies[0];
        ((Large*)x)[1] = copies[1];
        memset(y, 7, n);
    }"""
    x, y = np.arange(66, dtype=np.float32), np.zeros(50, np.uint8)
    report = run(text, "move", block=1, x=x, y=y, n=50)
    np.testing.assert_array_equal(x[33:], x[:33])
    assert (y == 7).all()
    assert (report.read_bytes, report.written_bytes) == (132, 132 + 50)
    assert (report.shared.read_bytes, report.shared.written_bytes) == (264, 264)


def test_shared_memory_that_nobody_writes_is_poisoned():
    out = np.zeros(32, np.float32)
    text = """
    extern "C" __global__ void peek(float* out) {
        __shared__ float never[32];
        out[threadIdx.x] = never[threadIdx.x];
    }"""
    report = run(text, "peek", out=out)
    assert np.isnan(out).all() and report.shared.read_bytes == 128


def test_recordings_nest():
    with SIMT.recording() as outer:
        with SIMT.recording() as inner:
            run(COPY, "copy", x=ints(32), out=ints(32), shift=0)
        run(COPY, "copy", x=ints(32), out=ints(32), shift=0)
    assert (len(outer), len(inner)) == (2, 1)


def test_the_fault_of_the_lowest_block_is_reported():
    for _ in range(5):
        with pytest.raises(KernelFault, match=r"block \(3, 0, 0\), thread \(4, 0, 0\)"):
            run(COPY, "copy", grid=64, executor=SimtExecutor(workers=2), x=ints(2048), out=ints(100), shift=0)


def test_atomics_are_bounds_checked():
    text = 'extern "C" __global__ void add(int* out) { atomicAdd(out + threadIdx.x, 1); }'
    with pytest.raises(
        KernelFault, match=r"thread \(8, 0, 0\): out-of-bounds atomic access of 4 bytes at byte offset 32 of out"
    ):
        run(text, "add", out=ints(8))


WAITS = {
    "if (threadIdx.x < 16) __syncthreads();": (
        r"thread \(0, 0, 0\): waits at __syncthreads at test.cu:\d+ for thread \(16, 0, 0\), which has exited"
    ),
    "if (threadIdx.x < 16) __syncthreads();\nelse __syncthreads();": (
        r"waits at __syncthreads at test.cu:(\d+) for thread \(16, 0, 0\), which waits at __syncthreads at "
        r"test.cu:(?!\1)"
    ),
    "if (threadIdx.x < 16) __syncthreads();\nelse __syncwarp();": (
        r"waits at __syncthreads at test.cu:\d+ for thread \(16, 0, 0\), which waits at __syncwarp"
    ),
    "if (threadIdx.x == 3) return;\nout[threadIdx.x] = __shfl_sync(FULL_WARP, 1, 3);": (
        r"thread \(0, 0, 0\): __shfl_sync at test.cu:\d+ reads lane 3, which has exited"
    ),
    "out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0);": (
        r"thread \(16, 0, 0\): __shfl_sync at test.cu:\d+ has mask 0x0000ffff, which leaves out the calling lane 16"
    ),
    "if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20);": (
        r"reads lane 20, which is not in the mask"
    ),
    "__syncwarp(threadIdx.x == 0 ? 0xffffffffu : 0xfffffffeu);": r"has mask 0xfffffffe here and 0xffffffff in lane 0",
    "if (threadIdx.x == 9) __trap();": r"thread \(9, 0, 0\): __trap at test.cu",
}


@pytest.mark.parametrize("body", WAITS)
@pytest.mark.parametrize("seed", [0, 3])
def test_waits_that_never_end_and_misused_warps_are_named(body, seed):
    text = f'extern "C" __global__ void waits(int* out) {{\n{body}\n}}'
    with pytest.raises(KernelFault, match=WAITS[body] if seed == 0 else "kernel waits, block"):
        run(text, "waits", executor=SimtExecutor(seed=seed), out=ints(32))


def test_the_executor_works_after_a_fault_which_leaves_the_outputs_alone():
    out = ints(60)
    with pytest.raises(KernelFault):
        run(COPY, "copy", grid=2, x=ints(64, 7), out=out, shift=0)
    assert (out == -1).all()
    out = ints(64)
    report = run(COPY, "copy", grid=2, x=np.arange(64, dtype=np.int32), out=out, shift=0)
    np.testing.assert_array_equal(out, np.arange(64))
    assert report.buffers == {"x": Traffic(256, 0, 8, 0), "out": Traffic(0, 256, 0, 8)}


# A barrier is missing between the write and the neighbour's read: right in the natural order
# of threads for a read of the left neighbour, wrong in others.
UNSYNCHRONISED = """
extern "C" __global__ void left(const int* x, int* out) {
    __shared__ int tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    BARRIER
    out[threadIdx.x] = threadIdx.x ? tile[threadIdx.x - 1] : 0;
}"""


def left(barrier, seed):
    """What each thread finds at its left neighbour's place; that neighbour's number, if it is right."""
    out, text = ints(128), UNSYNCHRONISED.replace("BARRIER", barrier)
    run(text, "left", block=128, executor=SimtExecutor(seed=seed), x=np.arange(128, dtype=np.int32), out=out)
    return out


def shifted(barrier, seed):
    return np.array_equal(left(barrier, seed)[1:], np.arange(127))


def test_a_random_order_of_threads_finds_a_missing_barrier():
    assert shifted("", seed=0), "the natural order hides this fault"
    assert not any(shifted("", seed) for seed in (1, 2, 3))
    assert all(shifted("__syncthreads();", seed) for seed in (0, 1, 2, 3))


def test_a_seed_decides_the_order():
    assert np.array_equal(left("", 11), left("", 11)) and not np.array_equal(left("", 11), left("", 12))


# ---- builds and arguments ---------------------------------------------------------------


def test_the_plain_build_computes_the_same():
    plain = SimtExecutor(instrumented=False)
    data = np.arange(4 * 96, dtype=np.int32)
    module = plain.load("test.cu", text='#include "common.cuh"\n' + BLOCK_REVERSE)
    module.launch("reverse", 4, 96, data=data)
    np.testing.assert_array_equal(data, np.arange(4 * 96).reshape(4, 96)[:, ::-1].ravel())
    with pytest.raises(ValueError, match="not instrumented, so it counts nothing"), plain.recording():
        pass


def test_builds_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBLAZE_CACHE", str(tmp_path))
    headers, copies = tmp_path / "headers", tmp_path / "copies"
    for folder in (headers, copies):
        folder.mkdir()
        (folder / "value.cuh").write_text("constexpr int VALUE = 1;")

    def built(source='#include "value.cuh"\n', headers=headers, **constants):
        build.build_kernels("test.cu", source, [], [headers], constants)
        return len(list((tmp_path / "simt").glob("*.so")))

    first = built()
    assert built() == built(headers=copies) == first
    assert built(SIZE=3) == first + 1
    (headers / "value.cuh").write_text("constexpr int VALUE = 2;")
    assert built() == first + 2
    assert not list((tmp_path / "simt").glob("tmp*")), "no half-built files stay behind"


def test_clang_builds_kernels_too(tmp_path):
    """From nothing, in a process of its own: which compiler it is, is asked once."""
    assert shutil.which("clang++"), "clang++ is missing. On Debian and Ubuntu: sudo apt install clang"
    environment = os.environ | {"CXX": "clang++", "MOEBLAZE_CACHE": str(tmp_path)}
    test = f"{__file__}::{test_shared_memory_and_barriers_work_in_every_order_of_threads.__name__}"
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    done = processes.run(pytest, env=environment)
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout


def test_an_edited_file_or_header_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr("moeblaze_ref.runtime.source.kernels_dir", lambda: tmp_path)
    file, header = tmp_path / "lesson" / "1_sum.cu", tmp_path / "include" / "value.cuh"
    for path in (file, header):
        path.parent.mkdir()
    kernel = '#include "value.cuh"\nextern "C" __global__ void f(int* out) { out[0] = VALUE + 1; }'
    file.write_text(kernel)
    header.write_text("constexpr int VALUE = 10;")

    def result(text=None):
        out = ints(1)
        SIMT.load("lesson/1_sum.cu", text=text).launch("f", 1, 1, out=out)
        return out[0]

    assert result() == result(text=kernel) == 11
    file.write_text(kernel.replace("+ 1", "+ 2"))
    assert result() == 12
    header.write_text("constexpr int VALUE = 20;")
    assert result() == 22
    assert result(text=kernel) == 21


def test_an_unchanged_file_is_compiled_once(monkeypatch):
    COPIES = '#include "common.cuh"\n' + COPY
    SIMT.load("test.cu", text=COPIES)
    built = []
    monkeypatch.setattr(build, "build_kernels", lambda *arguments: built.append(arguments))
    SIMT.load("test.cu", text=COPIES)
    assert not built


def test_an_executor_that_follows_no_edits_looks_at_no_file_again(monkeypatch):
    executor = SimtExecutor(follows_edits=False)
    first = executor.load("dispatch/1_dense_map.cu", THREADS=32)
    monkeypatch.setattr(Path, "stat", None)
    monkeypatch.setattr(Path, "read_text", None)
    assert executor.load("dispatch/1_dense_map.cu", THREADS=32).source is first.source


def test_a_function_that_is_nowhere_defined_is_named():
    text = '__device__ void later(int* x);\nextern "C" __global__ void f(int* x) { later(x); }\n'
    with pytest.raises(
        build.SimtCompileError, match=r"\ntest\.cu: error: later is declared and used, but nowhere defined"
    ):
        build.build_kernels("test.cu", text, ["f"], [], {}, True)


@pytest.mark.parametrize(
    "message",
    [
        "/x.so: undefined symbol: _Z5laterPi",
        "dlopen(/x.so, 0x0006): symbol not found in flat namespace '__Z5laterPi'",  # of macOS
    ],
)
def test_the_message_at_loading_names_the_function_that_is_missing(message):
    error = build._kernels_not_loaded("test.cu", OSError(message))
    assert str(error).splitlines()[-1] == "test.cu: error: later is declared and used, but nowhere defined"


def test_a_compile_error_shows_the_line_of_the_kernel_file():
    with pytest.raises(build.SimtCompileError, match=r"test\.cu:3:\d+: error: .*nonsense"):
        run('\nextern "C" __global__ void broken(int* out) { out[0] = nonsense; }', "broken", out=ints(1))


def test_a_brace_that_is_missing_is_missed_in_the_kernel_file():
    with pytest.raises(build.SimtCompileError) as error:
        run('extern "C" __global__ void broken(int* out) {\n    out[0] = 1;\n', "broken", out=ints(1))
    _, *lines = str(error.value).splitlines()
    first = next(line for line in lines if "error:" in line)
    assert lines[0].startswith("test.cu:") and re.match(r"test\.cu:[34]:\d+: error: expected .}.", first)
    assert not any("simt.hpp" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shift": None}, ValueError, r"kernel copy takes \(x, out, shift\), but was given \(x, out\)"),
        ({"extra": 1}, ValueError, r"kernel copy takes \(x, out, shift\), but was given \(x, out, shift, extra\)"),
        ({"shift": 1.5}, TypeError, r"argument shift of kernel copy is 1.5 \(float\), but it must be an integer"),
        (
            {"shift": 2**31},
            ValueError,
            "^argument shift of kernel copy is 2147483648, but it must be -2147483648..2147483647",
        ),
        ({"x": np.zeros(32)}, TypeError, r"argument x of kernel copy has dtype float64, but it must be int32"),
        ({"x": [1, 2]}, TypeError, r"argument x of kernel copy is a list, but it must be an array of int32"),
        ({"x": np.zeros(64, np.int32)[::2]}, ValueError, r"argument x of kernel copy is not C-contiguous"),
    ],
)
def test_arguments_are_checked_against_the_declaration(change, error, message):
    arguments = {"x": ints(32), "out": ints(32), "shift": 0} | change
    with pytest.raises(error, match=message):
        run(COPY, "copy", **{name: value for name, value in arguments.items() if value is not None})


HALVES = (("a", slice(0, 2)), ("b", slice(2, 4)))


def test_outputs_must_be_writable_and_must_not_overlap():
    fixed = ints(32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="argument out of kernel copy is read-only"):
        run(COPY, "copy", x=ints(32), out=fixed, shift=0)
    run(COPY, "copy", x=fixed, out=ints(32), shift=0)  # reading it is fine
    both = ints(48)
    with pytest.raises(ValueError, match="arguments x and out of kernel copy overlap in memory"):
        run(COPY, "copy", x=both[:32], out=both[16:], shift=0)


def test_arrays_that_lie_in_the_gaps_of_each_other_do_not_overlap():
    both = np.arange(12).reshape(3, 4)
    halves, whole = (
        [Staged([name], both[:, part], False, both) for name, part in HALVES],
        Staged(["c"], both, True, both),
    )
    assert _without_overlap("copy", halves) == halves
    with pytest.raises(ValueError, match="arguments a and c of kernel copy overlap in memory without"):
        _without_overlap("copy", [halves[0], whole])


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 32, "grid.x of kernel copy is 0, but it must be 1..2147483647"),
        ((1, 70_000), 32, "grid.y of kernel copy is 70000, but it must be 1..65535"),
        (1, 2048, "block.x of kernel copy is 2048, but it must be 1..1024"),
        ((1, 1, 1, 9), 32, "a grid or block has 4 dimensions, but it must have 1 to 3"),
        (1, (64, 64), "threads per block of kernel copy is 4096, but it must be 1..1024"),
    ],
)
def test_sizes_that_no_gpu_accepts(grid, block, message):
    with pytest.raises(ValueError, match=message):
        run(COPY, "copy", grid=grid, block=block, x=ints(32), out=ints(32), shift=0)


ARRAYS = """
extern "C" __global__ void first(int* out) {{
    __shared__ int tile[{static} / 4];
    DYNAMIC_SHARED(int, more);
    tile[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = tile[threadIdx.x];
}}
extern "C" __global__ void second(int* out) {{
    __shared__ int other[10000];
    other[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = other[threadIdx.x];
}}"""


@pytest.mark.parametrize(
    ("static", "dynamic", "message"),
    [
        (
            48 * 1024 + 4,
            0,
            "kernel first of test.cu declares 49156 bytes of static shared memory, but .* at most 49152",
        ),
        (4096, 224 * 1024, "4096 bytes of static and 229376 of dynamic shared memory, but .* at most 232448 together"),
    ],
)
@pytest.mark.parametrize("instrumented", [True, False])
def test_more_shared_memory_than_a_gpu_has_is_refused(instrumented, static, dynamic, message):
    module = SimtExecutor(instrumented).load("test.cu", text='#include "common.cuh"\n' + ARRAYS.format(static=static))
    with pytest.raises(ValueError, match=message):
        module.launch("first", 1, 32, dynamic, out=ints(32))
    module.launch("second", 1, 32, out=ints(32))  # has 40,000 bytes: each kernel counts for itself


@pytest.mark.parametrize("dynamic", [0, 179 * 1024])
def test_all_the_shared_memory_that_a_gpu_has_is_fine(dynamic):
    out = ints(32)
    run(ARRAYS.format(static=48 * 1024), "first", shared_bytes=dynamic, out=out)
    np.testing.assert_array_equal(out, LANES)


def test_unknown_files_and_kernels_name_the_nearest():
    with pytest.raises(
        ValueError, match="unknown kernel file 'dispatch/1_dense.cu'. Did you mean 'dispatch/1_dense_map.cu'"
    ):
        SIMT.load("dispatch/1_dense.cu")
    with pytest.raises(ValueError, match="unknown kernel 'cpy'. Did you mean 'copy'"):
        run(COPY, "cpy", x=ints(32), out=ints(32), shift=0)


@pytest.mark.parametrize("file", ["../pyproject.toml", "/etc/hostname", "gating/../combine/1_gather.cu", "dispatch"])
def test_only_kernel_files_are_read(file):
    with pytest.raises(ValueError, match="unknown kernel file"):
        kernel_text(file)


@pytest.fixture
def found_anew():
    """The compiler is looked for again, during the test and after it."""
    build.compiler.cache_clear()
    yield
    build.compiler.cache_clear()


def test_a_compiler_that_is_missing_is_named(monkeypatch, found_anew):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.SimtUnavailable, match=r"with no-such-compiler, .*; install g\+\+"):
        build.compiler()


def test_options_of_the_compiler_stand_behind_its_name(monkeypatch, found_anew):
    monkeypatch.setenv("CXX", "g++ -DNAME='two words'")
    assert build.compiler() == (shutil.which("g++"), "-DNAME=two words")


def test_the_compiler_of_pypi_serves_where_no_other_is(monkeypatch, found_anew, tmp_path):
    """Only there: not in place of g++, nor of a compiler that $CXX names."""
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "ziglang.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert build.compiler() == (shutil.which("g++"),)
    build.compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.compiler() == (sys.executable, "-m", "ziglang", "c++")
    build.compiler.cache_clear()
    monkeypatch.setenv("CXX", "g++")
    with pytest.raises(build.SimtUnavailable):
        build.compiler()


def test_a_compiler_that_does_not_know_the_processor_is_asked_for_none(monkeypatch):
    def called(*arguments):
        if arguments[0] in known:
            return processes.run(["echo", *arguments])
        raise CalledProcessError(1, arguments)

    monkeypatch.setattr(build, "_called", called)
    known = {"-mcpu=native", "-dM"}
    assert build._native.__wrapped__() == (("-mcpu=native",), f"-mcpu=native -dM -E -x c++ {os.devnull}\n")
    known = {"-dM"}
    assert build._native.__wrapped__() == ((), f"-dM -E -x c++ {os.devnull}\n")


def test_macos_links_by_its_own_flags(monkeypatch, tmp_path):
    """Only the commands: no Mac has run them."""
    commands = []

    def run(*arguments):
        commands.append(arguments)
        Path(arguments[arguments.index("-o") + 1]).touch()

    monkeypatch.setenv("MOEBLAZE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(build, "_defines", {"__APPLE__": True, "__clang__": True, "__aarch64__": True}.__getitem__)
    build.compile_kernels("test.cu", "", [], [], {})
    *_, (output, built, *rest) = commands
    assert output == "-o" and built.suffix == ".so"
    assert tuple(rest[1:]) == build.MACOS_LINK_FLAGS


def test_a_compiler_may_be_a_command_of_several_words(tmp_path):
    """From nothing: the runtime and a kernel."""
    words = (sys.executable, "-c", "import os, sys; os.execvp('g++', ['g++', *sys.argv[1:]])")
    program = f"""
from moeblaze_ref.runtime.simt import build
build.compiler = lambda: {words!r}
built = build.build_kernels("test.cu", 'extern "C" __global__ void f() {{}}', ["f"], [], {{}})
assert build.entry(built, "f") and not build.is_clang()
"""
    environment = os.environ | {"MOEBLAZE_CACHE": str(tmp_path)}
    done = processes.run([sys.executable, "-c", program], env=environment)
    assert done.returncode == 0, done.stderr
