"""The records of a launch: against the executor's own counts, and against kernels whose lines are known."""

import re

import numpy as np
import pytest

from moeblaze_ref.backends.numpy_ref.dispatch import build
from moeblaze_ref.backends.raw_cuda import dispatch, expert_up
from moeblaze_ref.runtime import record
from moeblaze_ref.runtime.record import LANES, RecordingExecutor, Step
from moeblaze_ref.runtime.simt import symbols
from moeblaze_ref.runtime.simt.build import SimtUnavailable
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.verify.cases import make_case, random_topk

KERNELS = """#include "common.cuh"
extern "C" {
__global__ void strided(const float* x, float* out, int stride) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    const float value = x[t * stride];  // load
    out[t] = value;  // store
}
__global__ void banks(float* out, int stride) {
    __shared__ float first[3];
    __shared__ float tile[32 * 33];
    if (threadIdx.x == 0) first[2] = 1;  // alone
    tile[threadIdx.x * stride] = threadIdx.x;  // fill
    __syncthreads();  // barrier
    out[threadIdx.x] = tile[threadIdx.x * stride] + first[2];  // read back
}
__global__ void branches(const int* x, int* out) {
    const int lane = threadIdx.x;
    int value = x[lane];  // all
    if (lane % 2)
        value += x[64 + lane];  // odd
    else
        value += x[32 + lane];  // even
    for (int turn = 0; turn < lane / 16; ++turn) value += x[96 + turn];  // upper half
    out[lane] = value;  // all again
}
__global__ void alternate(volatile int* a, volatile int* b) {
    for (int turn = 0; turn < 2; ++turn)
        if ((turn ^ threadIdx.x) & 1)
            a[threadIdx.x] = turn;  // to a
        else
            b[threadIdx.x] = turn;  // to b
}
__global__ void adds(int* low, int* high) {
    atomicAdd(low + threadIdx.x, 1);  // low
    atomicAdd(high, 1);  // high
    if (warp_sum(1) < 0) __trap();
}
}
"""
LINE = {mark: KERNELS[: KERNELS.index(f"// {mark}\n")].count("\n") + 1 for mark in re.findall(r"// (.+)\n", KERNELS)}


def launch(kernel, executor=None, grid=1, block=32, **arguments):
    """The record of one launch of `KERNELS`."""
    executor = executor or RecordingExecutor()
    executor.load("reader/own.cu", text=KERNELS).launch(kernel, grid, block, **arguments)
    return executor.launches[-1]


def floats(size):
    return np.zeros(size, np.float32)


def ints(size):
    return np.zeros(size, np.int32)


def all_steps(launched):
    return [step for place in launched.warps() for step in launched.steps(*place)]


def shown(steps):
    """(operation, line) of each step."""
    return [(step.operation, step.frame.line) for step in steps]


# ---- against the executor's own counts ----------------------------------------------------------


def counted(launched):
    """Sectors and bytes of each buffer, passes and conflicts of shared memory, added up from the records."""
    sums = {name: np.zeros(4, int) for name in (region.name for region in launched.regions.values())}
    for step in filter(lambda step: step.is_access, all_steps(launched)):
        reads, writes = step.operation in ("load", "atomic"), step.operation in ("store", "atomic")
        cost = (sum(step.passes), step.conflicts) if step.region.space == "shared" else (reads, writes)
        weights = cost if step.region.space == "shared" else (step.sectors * reads, step.sectors * writes)
        sums[step.region.name] += [step.bytes * reads, step.bytes * writes, *weights]
    return sums


def assert_counts_agree(launched, report):
    sums = counted(launched)
    for name, traffic in report.buffers.items():
        numbers = traffic.read_bytes, traffic.written_bytes, traffic.read_sectors, traffic.written_sectors
        assert tuple(sums[name]) == numbers, name
    shared = sums["shared memory"] + sums["dynamic shared memory"]
    assert tuple(shared) == tuple(vars(report.shared).values())


@pytest.mark.parametrize("seed", [0, 5])
def test_records_of_the_dispatch_add_up_to_the_counts(seed):
    executor = RecordingExecutor(seed=seed)
    with executor.recording() as reports:
        dispatch.build(random_topk(75, 5, 2), 5, executor=executor, version="1_dense_map")
    assert [one.kernel for one in executor.launches] == [report.kernel for report in reports]
    for launched, report in zip(executor.launches, reports, strict=True):
        assert launched.seen == len(launched.records) and launched.note == launched.fault == ""
        assert_counts_agree(launched, report)


def test_records_of_tensor_core_kernels_add_up_too():
    case = make_case(40, 16, 24, 3, 2, "zipf").astype("bfloat16")
    executor = RecordingExecutor()
    with executor.recording() as reports:
        routed = build(case.topk_experts, case.E)
        expert_up.forward(
            case.x, case.weights.w1, case.weights.w2, routed, "swiglu", executor=executor, version="3_mma"
        )
    (launched,), (report,) = executor.launches, reports
    assert report.shared.wavefronts > 0 and launched.note == ""
    assert_counts_agree(launched, report)
    steps = all_steps(launched)
    assert {step.frame.file for step in steps}.isdisjoint(record.WRAPPERS)
    assert {"ldmatrix_x4", "mma_m16n8k16"} <= {step.operation for step in steps}
    (matrices,) = {step.passes for step in steps if step.frame.function == "Operand::fragments" and step.is_access}
    assert matrices == (1, 1, 1, 1), "eight lanes of 16 bytes a pass"


def test_atomics_add_up_in_both_directions():
    executor = RecordingExecutor()
    with executor.recording() as reports:
        launched = launch("adds", executor, grid=3, block=64, low=ints(64), high=ints(1))
    assert reports[0].buffers["low"].written_bytes == reports[0].buffers["low"].read_bytes == 3 * 64 * 4
    assert_counts_agree(launched, reports[0])


def test_a_recorded_launch_computes_what_any_other_does():
    choices = random_topk(75, 5, 2)
    executor = RecordingExecutor(block=0, warp=0)
    recorded, plain = (
        dispatch.build(choices, 5, executor=one, version="1_dense_map") for one in (executor, SimtExecutor())
    )
    for name, array in plain.arrays().items():
        np.testing.assert_array_equal(recorded.arrays()[name], array)


# ---- lines, elements, sectors, banks -----------------------------------------------------------


def test_every_access_has_its_line_and_its_elements():
    launched = launch("strided", grid=2, block=48, x=floats((24, 8)), out=floats(96), stride=2)
    assert launched.warps() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    load, store = launched.steps(block=1, warp=1)
    assert shown([load, store]) == [("load", LINE["load"]), ("store", LINE["store"])]
    assert load.frame == ("strided", "reader/own.cu", LINE["load"])
    assert launched.sources["reader/own.cu"] == KERNELS
    assert list(load.lanes) == list(range(16))
    tokens = np.arange(80, 96)
    assert load.elements() == [f"x[{2 * t // 8}, {2 * t % 8}]" for t in tokens]
    assert store.elements() == [f"out[{t}]" for t in tokens]
    assert (load.region.space, load.region.shape, load.region.dtype) == ("global", (24, 8), np.float32)


@pytest.mark.parametrize(
    ("stride", "sectors", "lines"), [(0, 1, 1), (1, 4, 1), (2, 8, 2), (8, 32, 8), (32, 32, 32), (64, 32, 32)]
)
def test_coalesced_and_strided(stride, sectors, lines):
    load, store = launch("strided", x=floats(64 * 32), out=floats(32), stride=stride).steps()
    assert (load.sectors, load.lines, load.bytes) == (sectors, lines, 128)
    assert load.fewest_sectors == (4 if stride else 1)
    assert (store.sectors, store.fewest_sectors, store.lines) == (4, 4, 1)


@pytest.mark.parametrize(("stride", "conflicts"), [(1, 0), (2, 1), (4, 3), (32, 31), (33, 0), (0, 0)])
def test_bank_conflicts_of_a_stride(stride, conflicts):
    steps = launch("banks", out=floats(32), stride=stride).steps()
    names = [(step.operation, step.frame.line) for step in steps]
    loads = [("load", LINE["read back"])] * 2
    assert names[:3] == [("store", LINE["alone"]), ("store", LINE["fill"]), ("__syncthreads", LINE["barrier"])]
    assert names[3:] == [*loads, ("store", LINE["read back"])]
    alone, fill, barrier, *_ = steps
    assert (fill.conflicts, fill.passes) == (conflicts, (conflicts + 1,))
    assert alone.elements() == ["first[2]"] and list(alone.lanes) == [0] and alone.conflicts == 0
    assert fill.elements()[-1] == f"tile[{31 * stride}]" and fill.region.space == "shared"
    assert not barrier.is_access and len(barrier.lanes) == LANES


def test_words_are_served_in_passes():
    _, fill, *_ = launch("banks", out=floats(32), stride=8).steps()
    passes = [fill.pass_of_words()[record.STATIC_SHARED, word] for word in sorted(w for _, w in fill.pass_of_words())]
    assert passes == [number for number in range(8) for _ in range(4)]
    assert len(fill.busy_banks) == 4 and len({bank % 8 for bank in fill.busy_banks}) == 1


def test_the_lines_of_a_function_lead_to_its_caller():
    steps = launch("adds", low=ints(32), high=ints(1)).steps()
    operations = [step.operation for step in steps]
    assert operations == ["atomic", "atomic", *["__shfl_xor_sync"] * 5]
    assert [step.frame.line for step in steps[:2]] == [LINE["low"], LINE["high"]]
    inner, outer = steps[2].frames
    assert (inner.function, inner.file) == ("warp_sum", "include/common.cuh")
    assert (outer.function, outer.line) == ("adds", LINE["high"] + 1)
    assert steps[1].sectors == 1 and set(steps[1].elements()) == {"high[0]"}


# ---- the order of steps --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_branches_and_longer_loops_stand_where_their_lanes_run_them(seed):
    steps = launch("branches", RecordingExecutor(seed=seed), x=ints(128), out=ints(32)).steps()
    found = {LINE[mark]: mark for mark in ("all", "odd", "even", "upper half", "all again")}
    order = [found[step.frame.line] for step in steps]
    assert order[0] == "all" and set(order[1:3]) == {"odd", "even"} and order[3:] == ["upper half", "all again"]
    lanes = {mark: list(step.lanes) for mark, step in zip(order, steps, strict=True)}
    assert lanes["odd"] == list(range(1, 32, 2)) and lanes["upper half"] == list(range(16, 32))
    assert lanes["all"] == lanes["all again"] == list(range(32))


def test_lanes_that_disagree_on_an_order_lose_no_step():
    steps = launch("alternate", a=ints(32), b=ints(32)).steps()
    assert shown(steps) == [("store", LINE["to b"]), ("store", LINE["to a"])]  # as lane 0 came
    assert [len(step.lanes) for step in steps] == [32, 32]


def test_the_order_of_every_lane_is_kept():
    sequences = [["a", "c"], ["a", "b", "c", "d"], ["b", "d"]]
    assert list(record._merged(["a", "c", "b", "d"], sequences)) == ["a", "b", "c", "d"]


# ---- what is left out, and faults ------------------------------------------------------------------


def test_one_block_and_one_warp_alone():
    arguments = {"grid": 3, "block": 96, "x": floats(288), "out": floats(288), "stride": 1}
    launched = launch("strided", RecordingExecutor(block=2, warp=1), **arguments)
    assert launched.warps() == [(2, 1)] and launched.seen == len(launched.records) == 64
    with pytest.raises(ValueError, match=r"block 0, warp 0 of kernel strided is not recorded; .* = \(2, 1\)"):
        launched.steps()
    nothing = launch("strided", RecordingExecutor(block=7), **arguments)
    assert nothing.warps() == []
    with pytest.raises(ValueError, match="recorded are .* = none"):
        nothing.steps()


def test_a_limit_that_is_reached_is_named():
    launched = launch("strided", RecordingExecutor(limit=40), x=floats(32), out=floats(32), stride=1)
    assert len(launched.records) == 40 and launched.seen == 64
    assert launched.note.startswith("only the first 40 of 64 records of kernel strided are kept")
    load, store = launched.steps()
    assert len(load.lanes) + len(store.lanes) == 40
    exact = launch("strided", RecordingExecutor(limit=64), x=floats(32), out=floats(32), stride=1)
    assert exact.note == "" and len(exact.records) == 64


def test_records_go_up_to_the_fault():
    executor = RecordingExecutor()
    with pytest.raises(KernelFault) as fault:
        launch("strided", executor, x=floats(24), out=floats(32), stride=1)
    (launched,) = executor.launches
    assert launched.fault == str(fault.value) and "out-of-bounds read of 4 bytes" in launched.fault
    load, store = launched.steps()
    assert list(load.lanes) == list(range(25)) and list(store.lanes) == list(range(24))
    assert load.elements()[23:] == ["x[23]", "out of bounds"] and load.sectors == 3 and load.outside == [24]
    last = launched.records[-1]
    assert last["thread"] == 24 and launched.frames[int(last["instruction"])][0].line == LINE["load"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"block": -1}, "block is -1, but it must be >= 0"),
        ({"warp": 1.5}, "warp is 1.5"),
        ({"limit": 0}, "limit is 0, but it must be >= 1"),
    ],
)
def test_options_are_checked(option, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RecordingExecutor(**option)


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(symbols.shutil, "which", lambda name: None)
    with pytest.raises(SimtUnavailable, match="addr2line, which is not on the PATH; install binutils"):
        launch("strided", x=floats(32), out=floats(32), stride=1)


@pytest.mark.parametrize(
    ("demangled", "plain"),
    [
        ("dense_map", "dense_map"),
        ("int block_sum<64, int>(int)", "block_sum"),
        ("std::pair<int, Tile<2> > corner<Tile<4> >(int (*)(float))", "corner"),
    ],
)
def test_names_of_functions_are_plain(demangled, plain):
    assert symbols._plain(demangled) == plain


def test_memory_of_several_arrays_is_told_apart():
    """An instruction that takes a pointer by lane asks for sectors of each array."""
    records = np.zeros(2, record.RECORD)
    records["bytes"], records["where"], records["thread"] = 4, [0, 1], [0, 1]
    regions = {0: record.Region("a", "global"), 1: record.Region("b", "global")}
    step = Step("load", (symbols.Frame("f", "f.cu", 1),), records, regions)
    assert step.sectors == 2 and step.elements() == ["a[0]", "b[0]"]
