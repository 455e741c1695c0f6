"""Races of a recorded launch: found where nothing orders two accesses, and not where something does."""

from dataclasses import replace

import numpy as np
import pytest

from moeblaze_ref.runtime.races import races
from moeblaze_ref.runtime.record import RecordingExecutor

KERNELS = """
extern "C" __global__ void reads_a_neighbour(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;                           // fill
    out[threadIdx.x] = tile[63 - threadIdx.x];       // read back
}
extern "C" __global__ void reads_behind_a_barrier(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
extern "C" __global__ void lanes_meet(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;
    __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}
extern "C" __global__ void lanes_meet_but_warps_do_not(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;                           // write
    __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 32];       // other warp
}
extern "C" __global__ void all_write_one(int* out) {
    out[3] = threadIdx.x;                            // all
}
extern "C" __global__ void blocks_write_one(int* out) {
    if (threadIdx.x == 0) out[5] = blockIdx.x;       // each block
}
extern "C" __global__ void blocks_have_memory_of_their_own(int* out) {
    __shared__ int own;
    if (threadIdx.x == 0) own = blockIdx.x;
}
extern "C" __global__ void atomics(int* out) {
    atomicAdd(&out[0], 1);
}
extern "C" __global__ void atomics_and_a_store(int* out) {
    if (threadIdx.x == 0) out[0] = 0;                // store
    atomicAdd(&out[0], 1);                           // add
}
extern "C" __global__ void reads(const int* x, int* out) {
    out[blockIdx.x * 64 + threadIdx.x] = x[0];
}
extern "C" __global__ void wide_and_narrow(int* out) {
    if (threadIdx.x == 0) *(int4*)out = make_int4(1, 2, 3, 4);  // wide
    if (threadIdx.x == 1) out[2] = 5;                // narrow
}
"""
FOUND = {
    "reads_a_neighbour": [("tile[0]", "fill", "read back")],
    "reads_behind_a_barrier": [],
    "lanes_meet": [],
    "lanes_meet_but_warps_do_not": [("tile[0]", "write", "other warp")],
    "all_write_one": [("out[3]", "all", "all")],
    "blocks_write_one": [("out[5]", "each block", "each block")],
    "blocks_have_memory_of_their_own": [],
    "atomics": [],
    "atomics_and_a_store": [("out[0]", "store", "add")],
    "reads": [],
    "wide_and_narrow": [("out[2]", "wide", "narrow")],
}
GRIDS = {"blocks_write_one": 2, "blocks_have_memory_of_their_own": 2, "atomics": 2, "reads": 2}


def record(kernel):
    executor = RecordingExecutor()
    arrays = {"out": np.zeros(128, np.int32)} | ({"x": np.zeros(1, np.int32)} if kernel == "reads" else {})
    executor.load("races.cu", text=KERNELS).launch(kernel, grid=GRIDS.get(kernel, 1), block=64, **arrays)
    return executor.launches[-1]


def mark(frames):
    """The comment of the line of the kernel, which calls what is inlined there."""
    return KERNELS.splitlines()[frames[-1].line - 1].rpartition("// ")[2]


@pytest.mark.parametrize("kernel", FOUND)
def test_a_race_has_its_element_and_both_lines(kernel):
    found = races(record(kernel))
    assert [(race.element, *map(mark, race.frames)) for race in found] == FOUND[kernel]


def test_a_race_says_who_does_what():
    (race,) = races(record("atomics_and_a_store"))
    assert race.sentence() == (
        "race on out[0]: thread 0 of block 0 (store) and thread 1 of block 0 (atomic) access it, and no barrier orders "
        "them"
    )


@pytest.mark.parametrize("other", ["__threadfence();", "mbarrier_wait(full, 0);", "volatile int* flag;"])
def test_where_something_else_orders_threads_nothing_is_called_a_race(other):
    found = record("all_write_one")
    assert races(found) and not races(replace(found, sources={"races.cu": KERNELS + other}))
