"""Sizes past 2**31 elements: every kernel passes, and fails without any one of its 64-bit casts."""

import functools
import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from casts import CAST, UNCOMPILED, Switched, switched
from planted import quick_builds

from moeblaze_ref.backends.numpy_ref import block_sparse as reference_sparse
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import block_sparse, gemm, packed
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.core.structures import Topology
from moeblaze_ref.runtime.declarations import Declarations
from moeblaze_ref.runtime.simt.build import SimtCompileError
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.source import inlined, kernel_text
from moeblaze_ref.runtime.sparse import ZEROS, Launch, SparseExecutor, SparseModule
from moeblaze_ref.verify import large
from moeblaze_ref.verify.large.cases import BOUNDS, Case

CASES = large.every_case()
GIBIBYTE = 2**30
# Kernels of which no index can pass 2**31: they see experts, tokens, slots, blocks or their terms, one number for each.
# Those of parallel/ are given no more words than `raw_cuda.parallel.check_words` allows.
SMALL = {
    "block_sparse/structures.cu": {"pad_offsets", "pad_slots", "blocks", "offsets"},
    "dispatch/1_dense_map.cu": {"expert_offsets"},
    "dispatch/2_bitmap.cu": {"expert_offsets"},
    "expert_down/gates.cu": {"gate_rows"},
    "gating/fused.cu": {"router_losses"},
    "gating/sums.cu": {"sum_terms"},
    "parallel/batch.cu": {"batch_rows", "batch_shares", "weigh_losses"},
    "parallel/trip.cu": {
        *("choose_ranks", "make_room", "fill_rows", "move_slots", "find_places", "sum_counts", "withhold"),
    },
}
# Which files' cases are to need the casts of a header.
HOSTS = {
    "include/down_product.cuh": ["expert_down/as_printed.cu"],
    "include/expert_rows.cuh": ["expert_up/1_naive.cu"],
    "include/gating.cuh": ["gating/2_warp.cu"],
    "include/hopper/epilogue.cuh": ["expert_up/7_persistent.cu"],
    "include/hopper/gradients.cuh": ["expert_up/7_persistent.cu", "expert_down/7_persistent.cu"],
    "include/hopper/hidden_gradients.cuh": ["expert_down/7_persistent.cu"],
    "include/mma_hidden.cuh": ["expert_down/3_mma.cu"],
    "include/mma_matmul.cuh": ["expert_down/3_mma.cu"],
    "include/packed.cuh": ["packed/2_tiled.cu", "packed/3_mma.cu", "packed/7_persistent.cu", "packed/act.cu"],
    "include/stages.cuh": ["expert_down/3_mma.cu"],
    "include/sparse.cuh": ["block_sparse/1_naive.cu"],
}


def code_of(line: str) -> str:
    return line.partition("//")[0]


def casts_of(source: str) -> list[str]:
    """The lines of a file that hold a cast, once for each of them, but for those that the compiler insists on."""
    lines = [line.strip() for line in kernel_text(source).splitlines()]
    return [line for line in lines if not UNCOMPILED.search(code_of(line)) for _ in CAST.findall(code_of(line))]


def files_of(pattern: str) -> list[str]:
    """The kernel files of a pattern."""
    return sorted(path.relative_to(kernels_dir()).as_posix() for path in kernels_dir().glob(pattern))


KERNEL_FILES = files_of("*/*.cu")
HEADERS = files_of("include/**/*.cuh")


class Finder(SparseExecutor):
    """Runs nothing: notes the file whose kernel the case is about."""

    def load(self, file, text=None, **constants):
        def launch(kernel, grid, block, shared_bytes=0, **arguments):
            if self.launch.is_one(kernel, arguments):
                self.file = file
                self.errors[kernel] = 0.0

        return SimpleNamespace(launch=launch)


@functools.cache
def file_of(case: Case) -> str:
    """The kernel file of a case."""
    return case.run(Finder).file


CASES_OF = {file: [case for case in CASES if file_of(case) == file] for file in KERNEL_FILES}


def name_of(case: Case) -> str:
    return f"{file_of(case)}-{case.kernel}-{case.passes}"


def memory_peak(reset: bool = False) -> int:
    """Bytes of this process that have been in memory at once, since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_last_blocks_of_a_large_launch_are_right(case):
    before = memory_peak(reset=True)
    assert case.run().worst <= BOUNDS[case.dtype]
    assert memory_peak() - before < 2 * GIBIBYTE


@pytest.mark.parametrize("file", KERNEL_FILES)
def test_every_kernel_has_a_large_case_or_needs_none(file):
    names = set(Declarations.read(kernel_text(file), {"Scalar": "float"}).kernels)
    assert {case.kernel for case in CASES_OF[file]} | SMALL.get(file, set()) == names
    assert not {case.kernel for case in CASES_OF[file]} & SMALL.get(file, set())


@functools.cache
def needed(file: str) -> dict[int, Case]:
    """The casts of a kernel file that a case needs, by number, and the first case that does."""
    found: dict[int, Case] = {}
    for case in CASES_OF[file]:
        executor = case.run(Switched)
        assert executor.worst <= BOUNDS[case.dtype]
        found |= {number: case for number in executor.differing(file) if number not in found}
    return found


def passes_without(case: Case, number: int) -> bool:
    """Whether a case passes without a cast of its file."""
    try:
        error = case.run(functools.partial(Switched, removed=number)).worst
    except KernelFault:
        return False
    return error <= BOUNDS[case.dtype]


@pytest.mark.parametrize("source", [file for file in KERNEL_FILES + HEADERS if casts_of(file)])
def test_a_kernel_fails_without_any_one_of_its_casts(source):
    wanted, found = Counter(casts_of(source)), Counter()
    for file in HOSTS.get(source, [source]):
        _, lines = switched(file)
        here = {number: case for number, case in needed(file).items() if lines[number - 1] in wanted}
        for number, case in here.items():
            assert not passes_without(case, number), f"passes without cast {number}: {lines[number - 1]}"
        found |= Counter(lines[number - 1] for number in here)
    assert not wanted - found, "casts that no case needs"


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("combine/1_gather.cu", "[slot] * (long long)d + column]);", "[slot] * d + column]);"),
        ("expert_up/2_tiled.cu", "(long long)tokens[row] * d", "tokens[row] * d"),
        ("expert_up/2_tiled.cu", "w1 + (long long)tile.expert * d * h", "w1 + tile.expert * d * h"),
    ],
)
def test_a_kernel_fails_whose_text_lacks_a_cast(file, right, wrong):
    assert right in kernel_text(file)

    class Uncast(SparseExecutor):
        def load(self, name, text=None, **constants):
            return super().load(name, text=inlined(file).replace(right, wrong) if name == file else text, **constants)

    with pytest.raises(KernelFault, match="out-of-bounds"), quick_builds():
        for case in CASES_OF[file]:
            case.run(Uncast)


UNCOMPILED_LINES = [
    (file, line) for file in KERNEL_FILES for line in kernel_text(file).splitlines() if UNCOMPILED.search(code_of(line))
]


@pytest.mark.parametrize(("file", "line"), UNCOMPILED_LINES)
def test_the_compiler_refuses_the_other_lines_without_their_cast(file, line):
    text = inlined(file).replace(line, CAST.sub("", line))
    constants = {"THREADS": 256, "SCAN_THREADS": 256, "K": 1, "STEPS": 1, "EXPERT_BITS": 1}
    with pytest.raises(SimtCompileError, match="min"):
        SimtExecutor().load(file, text=text, **constants)


# ---- the executor ----

COPY = """
extern "C" __global__ void copy(const int* x, int* out, long long shift) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i + shift];
}
"""
SIZE = 2**32


def run_copy(given, expected, shift=0, blocks=((2**27 - 1, 0, 0),)):
    """The errors of a copy of 2**32 integers, of which some blocks of 32 run."""
    executor = SparseExecutor(Launch("copy", lambda grid: blocks, {"x": given}, {"out": expected}))
    x, out = (executor.empty((SIZE,), "int32") for _ in range(2))
    module = executor.load("copy.cu", text=COPY)
    module.launch("copy", grid=SIZE // 32, block=32, x=x, out=out, shift=shift)
    return executor.errors


LAST = np.s_[-32:]
VALUES = np.arange(32)


def test_chosen_blocks_run_and_no_others():
    assert run_copy([(LAST, VALUES)], [(LAST, VALUES)]) == {"out": 0}
    first = [(np.s_[:32], VALUES[::-1])]
    both = [*first, (LAST, VALUES)]
    assert run_copy(both, both, blocks=((2**27 - 1, 0, 0), (0, 0, 0))) == {"out": 0}


def test_an_element_that_no_block_writes_is_poison():
    assert run_copy([(LAST, VALUES)], [(np.s_[-33:], np.arange(-1, 32))]) == {"out": 1}


def test_zeros_need_no_memory():
    assert run_copy([(np.s_[:], ZEROS)], [(LAST, 0)]) == {"out": 0}


@pytest.mark.parametrize("shift", [-1, 1, -SIZE, 2**33])
def test_an_access_to_any_other_element_is_a_fault(shift):
    message = r"out-of-bounds read of 4 bytes at byte offset -?\d+ of x from element 42949672"
    with pytest.raises(KernelFault, match=message):
        run_copy([(LAST, VALUES)], [(LAST, VALUES)], shift)


def test_an_output_that_is_not_expected_is_a_fault():
    message = "out-of-bounds write .* of out from element 4294967280 on, which has 64 bytes"
    with pytest.raises(KernelFault, match=message):
        run_copy([(LAST, VALUES)], [(np.s_[-16:], VALUES[16:])])


def test_some_blocks_say_nothing_of_the_traffic():
    with pytest.raises(ValueError, match="it counts nothing"):
        SparseExecutor(Launch("copy", lambda grid: [], {}, {})).recording()


# ---- sizes that are refused ----


def of_shape(*shape, dtype="float16"):
    return np.broadcast_to(np.zeros((), dtype), shape)


def test_hopper_gathers_from_as_many_elements_as_it_can_number():
    def check(rows, version):
        x = of_shape(rows, 2**10)
        gemm.check_version("expert_up", version, gemm.VERSIONS, x, ("x", x), d=2**10, h=8)

    check(2**25, gemm.HOPPER)
    check(2**25 + 1, "3_mma")
    elements = r"x has 33554433 \* 1024 = 34359739392 elements"
    message = rf"{elements}, but 7_persistent gathers from at most 2\*\*35 = 34359738368"
    with pytest.raises(ValueError, match=message):
        check(2**25 + 1, gemm.HOPPER)


def test_rows_are_not_wider_than_kernels_count():
    with pytest.raises(ValueError, match=r"h is 1073741832, but must be at most 2\*\*30 = 1073741824"):
        gemm.check_version("expert_up", "1_naive", gemm.VERSIONS, of_shape(1, 8), d=8, h=2**30 + 8)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_rows_of_both_projections_are_not_wider_than_kernels_count(layout):
    h = 2**29 + 8
    gate_up, down = (of_shape(*shape) for shape in layout.shapes(1, 8, h, gated=True))
    experts = packed.Packed(layout, True, SimtExecutor(), gemm.HOPPER)
    x, ab, dispatch = of_shape(1, 8), of_shape(1, 2 * h), SimpleNamespace(R=0)
    message = r"G h is 1073741840, but must be at most 2\*\*30 = 1073741824"
    with pytest.raises(ValueError, match=message):
        experts.project(x, gate_up, None, dispatch, "swiglu")
    with pytest.raises(ValueError, match=message):
        experts.hidden_gradients(x, of_shape(1, 1), ab, None, down, dispatch, "swiglu")


def test_tiles_are_not_more_than_kernels_number():
    dispatch = SimpleNamespace(L=2**30, R=2**30, E=8)
    message = "R = 1073741824 rows of 4194304 columns are 1099512152064 tiles, but 2_tiled numbers at most"
    with pytest.raises(ValueError, match=message):
        gemm.rows_launch(SimpleNamespace(multiprocessors=4), "2_tiled", dispatch, 2**22)


def test_lines_of_blocks_are_not_more_than_version_3_mma_numbers():
    nnz, block = 2**28, 8
    indices = [of_shape(length, dtype="int32") for length in (2**20 + 1, nnz, nnz, 2**8 + 1, nnz)]
    topology = Topology(*indices, block=block)
    with pytest.raises(ValueError, match="268435456 blocks have 2147483648 lines, but 3_mma of block"):
        block_sparse.dsd.unchecked(of_shape(nnz, block, block), topology, of_shape(2**23, 8), True, version="3_mma")


def test_a_topology_has_as_many_columns_as_int32_can_number():
    bins = reference_sparse.pad(build_by_sort(np.zeros((1, 1), np.int32), 1024), block=1)
    message = "E h, the columns of the topology, is 2147483648, but it must be 1..2147482624"
    with pytest.raises(ValueError, match=message):
        reference_sparse.build_topology(bins, 2**21)


def test_a_large_check_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown stage 'combin'. Did you mean 'combine'"):
        large.plan(["combin"])
    with pytest.raises(ValueError, match="unknown backend of --large 'cuda'"):
        large.plan(["combine"], ["cuda"])


def test_a_fault_is_a_failed_row(monkeypatch):
    (job, *_) = large.plan(["combine"], ["simt"])
    monkeypatch.setattr(SparseModule, "launch", lambda *arguments, **options: 1 / 0)
    (row,) = job()
    assert not row.ok and math.isnan(row.error) and row.shape.endswith("ZeroDivisionError: division by zero")
