"""The checker passes what is right, and says of what is wrong which element shows it, and why."""

import json
import re
import sys
import threading

import numpy as np
import processes
import pytest
from numba import float32, int32
from test_cli import moeblaze

from moeblaze_ref.backends.numba_cuda import combine as numba_combine
from moeblaze_ref.backends.numba_cuda import expert_down as numba_down
from moeblaze_ref.backends.numba_cuda import expert_up as numba_up
from moeblaze_ref.backends.numba_cuda.runtime import cuda
from moeblaze_ref.backends.raw_cuda import tiles
from moeblaze_ref.core import kernel_headers
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.source import inlined
from moeblaze_ref.verify.cases import (
    logit_cases,
    make_case,
    simulator_cases,
    standard_cases,
    telling_cases,
    wide_cases,
)
from moeblaze_ref.verify.check import SIMULATOR_WEIGHTS
from moeblaze_ref.verify.checker import CONTRACTS, QUANTITIES, Wrong, check_kernel, examine
from moeblaze_ref.verify.checker.budgets import DIVISION, MEANS
from moeblaze_ref.verify.checker.contracts import AXES, set_problem
from moeblaze_ref.verify.checker.kernels import declaration
from moeblaze_ref.verify.checker.report import place_of

# With one token, an empty expert, and no tokens.
SMALL = [case for case in standard_cases() if case.L < 20 and case.weights.w1.size <= SIMULATOR_WEIGHTS]
CASE = make_case(13, 8, 16, 4, 2, "zipf")
MANY_TOKENS = make_case(600, 16, 24, 16, 4, "zipf")
TINY = make_case(5, 4, 8, 4, 2)

COMBINE = """
extern "C" __global__ void mine(const float* y, const float* gates, const int* token_index_map, float* out, \
int L, int d, int k) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= L * d) return;
    const int token = index / d, column = index % d;
    float sum = 0.0f;
    for (int slot = token * k; slot < token * k + k; ++slot) sum += gates[slot] * y[token_index_map[slot] * d + column];
    out[index] = sum;
}
"""

# The same where L d and R d are past 2**31.
WIDE_COMBINE = (
    COMBINE.replace("const int index = blockIdx.x", "const long long index = (long long)blockIdx.x")
    .replace(">= L * d", ">= (long long)L * d")
    .replace("[slot] * d", "[slot] * (long long)d")
)

# The lengths by shared memory, one block an expert: what a missing barrier or a race spoils.
LENGTHS = """
extern "C" __global__ void mine(const int* dense_map, int* lengths, int L, int E) {
    __shared__ int counts[THREADS];
    int count = 0;
    for (int token = threadIdx.x; token < L; token += THREADS) count += dense_map[token * E + blockIdx.x] >= 0;
    counts[threadIdx.x] = count;
    __syncthreads();
    if (threadIdx.x != THREADS - 1) return;  // in natural order all others have written
    for (int i = 0; i < THREADS - 1; ++i) count += counts[i];
    lengths[blockIdx.x] = count;
}
"""


def own(file, name=""):
    return f"{kernels_dir() / file}.cu:{name}".rstrip(":")


@pytest.fixture
def written(tmp_path):
    """Writes the text of a file in a folder of the test, and returns its path."""

    def write(text, name="mine.cu", encoding="utf-8"):
        path = tmp_path / name
        path.write_text(text, encoding)
        return path

    return write


def changed(text, old, new):
    assert text.count(old) == 1
    return text.replace(old, new)


def problem_of(kernel, task, cases=(CASE,), **options):
    """The first result, which is wrong."""
    report = examine(kernel, task, cases=cases, **options)
    assert not report.ok and not report.results[0].ok and report.results[0].problem in report.first_problem
    return report.results[0]


# ---- what is right ------------------------------------------------------------------------------

FILES = {"dispatch": "dispatch/1_dense_map", "combine": "combine/1_gather", "block_sparse": "block_sparse/structures"}
NAMES = {"gating": "softmax_top_k", "gating.backward": "d_logits"}
PRODUCTS = ("block_sparse.dsd", "block_sparse.dds")  # whose kernels name their operands lhs and rhs; see the exercises
# By task, the file and the kernel.
OWN = {
    task: (FILES.get(contract.stage, f"{contract.stage}/1_naive"), NAMES.get(task, task.rpartition(".")[2]))
    for task, contract in CONTRACTS.items()
    if task not in PRODUCTS
}


@pytest.mark.parametrize("task", OWN)
def test_the_projects_own_kernel_of_every_task_is_right(task):
    # All these cases have blocks of 8. The header names their number n.
    of_blocks = {"constants": {"BLOCK": 8}, "grid": CONTRACTS[task].grid} if task.startswith("block_sparse") else {}
    report = check_kernel(own(*OWN[task]), task, cases=SMALL, **of_blocks)
    assert report.ok and len(report.results) == len(SMALL)
    written = report.results[0].totals["written"]
    assert written > 0 and report.results[0].totals["sectors"] * 32 >= written


def test_a_kernel_that_knows_of_renormalised_gates_is_checked_on_them_too(written):
    file, kernel = OWN["gating"]
    cases = standard_cases() + telling_cases() + wide_cases()
    more = sum(case.k > 1 for case in cases)
    assert len(check_kernel(own(file, kernel), "gating").results) == len(cases) + more
    never = changed(inlined(f"{file}.cu"), "RENORMALIZE ? 1.0f / sum_of_chosen : prob_scale", "prob_scale")
    report = examine(f"{written(never + '// RENORMALIZE')}:{kernel}", "gating")
    assert next(result.difference.tensor for result in report.results if not result.ok) == "gates"


TILE = tiles.DEFAULTS["3_mma"].constants(itemsize=2)


@pytest.mark.parametrize(
    ("file", "task", "options"),
    [
        ("expert_up/2_tiled", "expert_up", {}),
        ("expert_up/1_naive", "expert_up", {"activation": "relu2"}),
        ("expert_up/1_naive", "expert_up.d_w", {"activation": "gelu"}),
        ("expert_up/1_naive", "expert_up", {"dtype": "float16"}),
        ("expert_up/3_mma", "expert_up", {"dtype": "bfloat16", "constants": TILE}),
        ("expert_down/1_naive", "expert_down.d_hidden", {"dtype": "bfloat16"}),
        ("gating/2_warp", "gating", {"constants": {"PER_LANE": 5, "PACK": 1}}),
    ],
)
def test_other_versions_types_and_activations_are_right(file, task, options):
    assert check_kernel(own(file, OWN[task][1]), task, cases=SMALL, **options).ok


@pytest.mark.parametrize(
    ("kernel", "task", "options"),
    [
        ("moeblaze_ref.backends.numba_cuda.combine:combine_kernel", "combine", {}),
        (numba_combine.d_y_kernel, "combine.d_y", {}),
        (numba_combine.d_gates_kernel, "combine.d_gates", {}),
        ("moeblaze_ref.backends.numba_cuda.dispatch:expert_lengths_kernel", "dispatch.expert_lengths", {}),
        (numba_up.d_x_kernel(True), "expert_up.d_x", {}),
        (numba_up.expert_up_kernel("swiglu"), "expert_up", {"grid": "E ceil(h / TILE)"}),
        (numba_down.d_w3_kernel, "expert_down.d_w3", {}),
    ],
)
def test_numba_kernels_are_right_and_counted(kernel, task, options):
    report = check_kernel(kernel, task, cases=SMALL[:2] + SMALL[5:], **options)
    assert report.backend == "numba" and report.results[0].totals["written"] > 0
    assert report.results[0].totals.keys() == QUANTITIES.keys() - {"sectors", "conflicts"} - MEANS.keys()


def test_a_declared_signature_can_be_copied():
    for task, contract in CONTRACTS.items():
        text = declaration(contract) + " {}"
        result = problem_of(text, task)
        assert result.difference.found is None, "it fits the task, and writes nothing"


# ---- what is wrong --------------------------------------------------------------------------------


def test_a_row_that_is_never_written():
    result = problem_of(changed(COMBINE, "index >= L * d", "index >= L * d - d"), "combine")
    assert (result.difference.tensor, result.difference.index, result.difference.found) == ("out", (12, 0), None)
    assert result.difference.differing == 8 and result.difference.elements == 104
    experts = CASE.topk_experts[12].tolist()
    assert "out[12, 0] is never written (or made of what was not), but must be" in result.problem
    assert f"(token 12, experts {experts}); 8 of 104 elements differ" in result.problem


def test_weights_of_the_wrong_expert():
    text = (kernels_dir() / "expert_up/1_naive.cu").read_text()
    wrong = changed(text, "(long long)blockIdx.y * d * h + at.column", "at.column")
    result = problem_of(wrong.split("// Section 3.2")[0], "expert_up")  # one kernel alone
    first = set_problem(CONTRACTS["expert_up"], CASE).dispatch.expert_token_offsets[1]  # expert 0 is right
    assert result.difference.tensor == "a" and result.difference.index == (first, 0)
    assert result.difference.place["expert"] == 1 and "expert 1)" in result.problem


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("out[index] = sum;", "out[index] = 0.0f;", "out[0, 0] is 0, but must be"),
        ("out[index] = sum;", "", "out[0, 0] is never written"),
        ("out[index] = sum;", "out[index] += sum;", "out[0, 0] is never written (or made of what was not)"),
        ("out[index] = sum;", "if (index % 2) __syncthreads(); out[index] = sum;", "__syncthreads"),
        ("gates[slot] * y", "y", "out[0, 0] is"),
        ("float sum = 0.0f;", "float sum = 0.0f / (k - k);", "out[0, 0] is nan, but must be"),
        ("index >= L * d", "index > L * d", "out-of-bounds"),
        ("* d + column]", "* d + column + 1]", "mine"),
    ],
)
def test_planted_faults(old, new, message):
    assert message in problem_of(changed(COMBINE, old, new), "combine").problem


def test_a_fault_ends_the_check():
    report = examine(changed(COMBINE, "index >= L * d", "false"), "combine", cases=SMALL)
    assert len(report.results) == 1 and "kernel mine, block (0, 0, 0), thread (104, 0, 0)" in report.first_problem
    assert "out-of-bounds" in report.first_problem and "WRONG" in str(report)


def test_a_missing_barrier_depends_on_the_order_of_threads():
    assert check_kernel(LENGTHS, "dispatch.expert_lengths", cases=SMALL).ok
    result = problem_of(changed(LENGTHS, "    __syncthreads();\n", ""), "dispatch.expert_lengths")
    assert result.problem.startswith("depends on the order of threads (seed 1): lengths[0] is ")
    right = set_problem(CONTRACTS["dispatch.expert_lengths"], CASE).expected["lengths"]
    assert f"but in their natural order {right[0]} (expert 0)" in result.problem


def test_a_race_whose_every_result_is_within_the_bound_is_found_by_its_bits():
    racing = "__shared__ float last; last = sum; __syncwarp(); out[index] = sum + 1e-8f * last;"
    result = problem_of(changed(COMBINE, "out[index] = sum;", racing), "combine", block="32")
    assert result.problem.startswith("depends on the order of threads (seed 1): out[")
    difference = result.difference
    assert 0 < abs(difference.found - difference.expected) < 1e-6


def test_the_last_element_of_a_large_tensor():
    faulty = changed(COMBINE, "= sum;", "= sum * (index == L * d - 1 ? 1.01f : 1.0f);")
    result = problem_of(faulty, "combine", [MANY_TOKENS])
    assert result.difference.index == (599, 15) and result.difference.differing == 1


LIMITED = {
    "k": ("slot < token * k + k", "slot < token * k + (k < 9 ? k : 8)"),
    "d": ("out[index] = sum;", "out[index] = d > 72 ? 0.0f : sum;"),
    "L": ("out[index] = sum;", "out[index] = token < 1000 ? sum : 0.0f;"),
}


@pytest.mark.parametrize("size", LIMITED)
def test_a_kernel_that_is_right_for_small_sizes_only_is_wrong(size):
    """k up to 8, d up to 72, the first 1,000 tokens."""
    report = examine(changed(COMBINE, *LIMITED[size]), "combine")
    assert [result.case for result in report.results if not result.ok] == {
        "k": ["L=5 d=8 h=8 E=48 k=40 (more experts a token than lanes of a warp)"],
        "d": ["L=9 d=264 h=8 E=3 k=2 (two tiles along d)", "L=2 d=264 h=8 E=2 k=1 (rows wider than 256 threads)"],
        "L": ["L=1030 d=8 h=8 E=3 k=1 (more tokens than threads of any block)"],
    }[size]


def test_a_kernel_that_is_right_for_narrow_hidden_rows_only_is_wrong(written):
    narrow = changed(inlined("expert_down/1_naive.cu"), "p < h; ++p", "p < (h > 80 ? 80 : h); ++p")
    report = examine(f"{written(narrow)}:expert_down", "expert_down")
    assert [result.case for result in report.results if not result.ok] == [
        "L=9 d=8 h=264 E=3 k=2 (two tiles along h)",
        "L=2 d=8 h=264 E=2 k=1 (hidden rows wider than 256 threads)",
    ]


# A result that is kept between launches by the shape of its inputs: right in every first step.
KEPT_LENGTHS = """
static int kept[1 << 20], filled[1 << 20];
extern "C" __global__ void mine(const int* dense_map, int* lengths, int L, int E) {
    const int expert = blockIdx.x;
    if (threadIdx.x > 0) return;
    const int place = (L * 331 + E * 17 + expert) % (1 << 20);
    if (!filled[place]) {
        int count = 0;
        for (int token = 0; token < L; ++token) count += dense_map[token * E + expert] >= 0;
        kept[place] = count;
        filled[place] = 1;
    }
    lengths[expert] = kept[place];
}
"""
KEPT = {}


@cuda.jit
def keeping_kernel(y, gates, token_index_map, out, L, d, k):
    element = cuda.grid(1)
    if element < L * d:
        key = (L, d, k, element)
        if key not in KEPT:
            total = float32(0.0)
            for j in range(k):
                total += gates[element // d, j] * y[token_index_map[element // d * k + j], element % d]
            KEPT[key] = total
        out[element // d, element % d] = KEPT[key]


def test_what_is_kept_by_shape_from_launch_to_launch_is_wrong():
    stale = "in the next step of the same shape, with other routing, weights and gradients, "
    assert problem_of(KEPT_LENGTHS, "dispatch.expert_lengths").problem.startswith(f"{stale}lengths[0] is ")
    KEPT.clear()
    assert problem_of(keeping_kernel, "combine", [TINY]).problem.startswith(f"{stale}out[0, 0] is ")


def test_the_next_step_differs_in_all_that_a_kernel_reads():
    """For every task: no input has the same numbers in both steps, except where they can be no others."""
    for contract in CONTRACTS.values():
        first, following = (set_problem(contract, step) for step in CASE.astype("float32").steps())
        for name, array in first.inputs.items():
            assert not np.array_equal(array, following.inputs[name]), (contract.task, name)
        for name, array in first.expected.items():
            assert not differs_little(array, following.expected[name]), (contract.task, name)


def differs_little(array, other):
    """Whether two arrays are of one shape and close; those of blocks differ in shape, as the padding does."""
    return array.shape == other.shape and np.allclose(array, other)


# ---- budgets --------------------------------------------------------------------------------------


def test_budgets_that_hold():
    budgets = (
        "written <= 4 L d",
        "read of y <= s R d",
        "read of gates <= 4 R d",
        "sectors <= 2 (R + L) d",
        "conflicts <= 0",
        "accesses <= 3 k + 1",
        "barriers <= 0",
        "threads >= L d",
    )
    assert check_kernel(COMBINE, "combine", cases=SMALL, budgets=budgets).ok


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("read of y <= 4 R d - 4", "read of y is 832, but read of y <= 4 R d - 4 allows 828: 4 too many"),
        ("written <= 2 L d", "written is 416, but written <= 2 L d allows 208: 208 too many"),
        ("read <= min(R, 4) / 8", "read is 2,496, but read <= min(R, 4) / 8 allows 0.5: 2,495.5 too many"),
    ],
)
def test_budgets_that_are_exceeded(budget, message):
    assert f"over budget: {message}" in problem_of(COMBINE, "combine", budgets=[budget]).problem


ONE_THREAD = COMBINE.replace(
    "if (index >= L * d) return;", "if (index) return;\n    for (int index = 0; index < L * d; ++index) {"
)
ONE_THREAD = ONE_THREAD.replace("out[index] = sum;", "out[index] = sum;\n    }")
ONE_BARRIER = COMBINE.replace("    if (index >=", "    __syncthreads();\n    if (index >=")


def test_a_right_kernel_may_miss_the_budgets_of_a_level():
    levels = {"low": ["written <= 4 L d"], "high": ["written <= 2 L d", "read of gates <= 1"]}
    report = check_kernel(COMBINE, "combine", cases=[TINY], levels=levels)
    (missed,) = (result["missed"] for result in report.as_dict()["results"])
    assert missed["low"] == "" and re.fullmatch(
        "over budget: written is 80, but .*: 40 too many; over budget: read of gates is .*", missed["high"]
    )


@pytest.mark.parametrize(
    ("text", "budget", "message"),
    [
        (ONE_THREAD, "accesses <= 3 k + 1", "accesses <= 3 k + 1 allows 7: 721 too many; one thread does work that"),
        (ONE_THREAD, "threads >= L d", "threads >= L d asks for 104: 103 too few; the other threads do nothing"),
        (
            ONE_BARRIER,
            "barriers <= 0",
            "barriers <= 0 allows 0: 1 too many; the threads wait for each other more often",
        ),
    ],
)
def test_a_right_kernel_that_is_too_serial(text, budget, message):
    assert check_kernel(text, "combine", cases=[CASE]).ok
    assert re.fullmatch(
        rf"too serial: \w+ is \d+, but {re.escape(message)}.*", problem_of(text, "combine", budgets=[budget]).problem
    )


def test_a_wrong_result_is_told_before_an_exceeded_budget():
    wrong = changed(COMBINE, "out[index] = sum;", "out[index] = 0.0f;")
    assert "over budget" not in problem_of(wrong, "combine", budgets=["written <= 1"]).problem


# ---- the launch -----------------------------------------------------------------------------------


def test_the_launch_is_the_headers_unless_asked_otherwise():
    header = "// kernel  grid            block  shared bytes\n// mine    ceil(L d / 64)  64     0\n"
    assert examine(header + COMBINE, "combine", cases=[CASE]).launch == (
        "grid ceil(L d / 64); block 64; shared bytes 0 (by the file's header)"
    )
    assert check_kernel(COMBINE, "combine", cases=[CASE], block="32").ok, "THREADS is the block asked for"
    asked = examine(header + COMBINE, "combine", cases=[CASE], grid="L", block="d")
    assert asked.ok and asked.launch == "grid L; block d; shared bytes 0 (as asked and by the file's header)"
    assert examine(COMBINE, "combine", cases=[CASE]).launch.endswith("(the default of the task)")
    assert not examine(COMBINE, "combine", cases=[CASE], grid="1", block="32").ok, "too few threads"


def test_a_files_own_constants_go_into_formulas_and_are_not_defined_twice():
    for line in ("constexpr int THREADS = 32;", "#define THREADS (32)  // a warp", "const unsigned THREADS = 32;"):
        text = f"{line}\n" + COMBINE.replace("blockDim.x", "THREADS")
        assert check_kernel(text, "combine", cases=[CASE], budgets=["written <= L d THREADS / 8"]).ok
        with pytest.raises(Wrong):
            check_kernel(text, "combine", cases=[CASE], budgets=["written <= L d THREADS / 16"])


def test_a_kernel_in_a_comment_is_none():
    assert check_kernel(f"/* {COMBINE.replace('mine', 'ghost')} */" + COMBINE, "combine", cases=[CASE]).ok


def scalar_combine():
    """COMBINE for any storage type."""
    text = COMBINE.replace("const float* y", "const Scalar* y").replace("float* out", "Scalar* out")
    text = text.replace("* y[token_index_map[slot] * d + column]", "* to_float(y[token_index_map[slot] * d + column])")
    return '#include "scalar.cuh"\n' + text.replace("= sum;", "= from_float<Scalar>(sum);")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("index", [5, 1237, 9_599])
def test_one_wrong_element_among_thousands_is_found_in_every_type(index, dtype):
    faulty = changed(scalar_combine(), "(sum);", f"(index == {index} ? 0.0f : sum);")
    result = problem_of(faulty, "combine", [MANY_TOKENS], dtype=dtype)
    assert result.difference.index == divmod(index, 16) and result.difference.differing == 1


def test_a_kernel_for_scalar_takes_every_type():
    text = scalar_combine()
    for dtype in ("float32", "bfloat16"):
        assert check_kernel(text, "combine", cases=SMALL, dtype=dtype).ok


HEADER_ROW = "// kernel  grid            block  shared bytes\n// mine    ceil(L d / 64)  64\n"


@pytest.mark.parametrize(
    ("before", "options", "message"),
    [
        ("", {"budgets": ["written < 4"]}, 'must read like "written <= 4 R h"'),
        ("", {"budgets": ["writen <= 4"]}, "unknown quantity of a budget 'writen'. Did you mean 'written'?"),
        ("", {"budgets": ["read of w1 <= 4"]}, "unknown tensor of combine 'w1'"),
        ("", {"levels": {"gold": ["writen <= 4"]}}, "unknown quantity of a budget 'writen'. Did you mean 'written'?"),
        ("", {"budgets": ["accesses of y <= 4"]}, "names a tensor, but accesses are counted over all memory"),
        ("", {"budgets": ["threads <= 4"]}, "budget 'threads <= 4' must have >=: threads >= ..."),
        ("", {"budgets": ["read >= 4"]}, "budget 'read >= 4' must have <=: read <= ..."),
        ("", {"budgets": ["read <= 4 q"]}, "unknown symbol 'q'"),
        ("", {"budgets": ["read <= L.real"]}, "it has '.'"),
        ("", {"budgets": ["read <= L / (k - k)"]}, "cannot read the formula"),
        ("", {"budgets": ["read <= L, d"]}, "2 values"),
        ("", {"budgets": ["read <= __import__(L)"]}, "unknown symbol '__import__'"),
        ("", {"grid": "ceil(L q)"}, "unknown symbol 'q'"),
        ("", {"block": "2048"}, "block.x of kernel mine is 2048, but it must be 1..1024"),
        (
            "",
            {"grid": "ceil(L d / THREADS)", "block": "0"},
            "block.x of kernel mine is 0",
        ),  # before the grid is divided
        ("", {"grid": "L - 20"}, "must be >= 0"),
        ("", {"grid": "1, 1, 1, 1"}, "it must have 1 to 3"),
        ("", {"shared_bytes": "4, 4"}, "2 values"),
        ("", {"shared_bytes": "2000000"}, "shared bytes of kernel mine"),
        ("", {"backend": "numba"}, "backend numba does not take mine in kernel.cu: it runs on simt or cuda"),
        ("", {"dtype": "float64"}, "unknown dtype 'float64'"),
        ("", {"dtype": "bfloat16"}, "parameter y is an array of bfloat16: const __nv_bfloat16* y"),
        ("", {"activation": "swish"}, "unknown activation 'swish'"),
        ("", {"cases": []}, "at least one case"),
        ("constexpr int TILE = 4 * 4;\n", {"grid": "TILE"}, "unknown symbol 'TILE'"),  # more than a number
        (HEADER_ROW, {}, "the header's row '// mine"),  # which does not fit its table
    ],
)
def test_budgets_and_launches_that_there_are_not(before, options, message):
    with pytest.raises(ValueError) as error:
        examine(before + COMBINE, "combine", **{"cases": [CASE]} | options)
    assert message in str(error.value)


# ---- argument checks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("* token_index_map", "* token_index_mp", "'token_index_mp'. Did you mean 'token_index_map'?"),
        ("const float* y", "float* y", "parameter y is an input: const float* y"),
        ("float* out", "const float* out", "parameter out is an output, which is not const: float* out"),
        ("const float* gates", "const int* gates", "parameter gates is an array of float32: const float* gates"),
        ("int L", "float L", "parameter L is a size: int L"),
        ("float* out", "float* y_swi", "unknown parameter 'y_swi'"),
        ("float* out, ", "", "the output out is no parameter"),
        ('extern "C" ', "", 'kernel.cu has no kernel: it must be declared extern "C" __global__ void NAME(...)'),
    ],
)
def test_parameters_that_do_not_fit(old, new, message):
    with pytest.raises(ValueError) as error:
        examine(changed(COMBINE, old, new), "combine", cases=[CASE])
    assert message in str(error.value)
    if "extern" not in old:
        assert str(error.value).endswith(declaration(CONTRACTS["combine"]))


def test_a_compile_error_shows_the_readers_line(written):
    path = written(changed(COMBINE, "float sum = 0.0f;", "float sum = zero;"))
    with pytest.raises(ValueError) as error:
        examine(f"{path}:mine", "combine", cases=[CASE])
    assert f"{path}:6" in str(error.value) and "zero" in str(error.value) and "fsanitize" not in str(error.value)


def test_names_that_lead_nowhere(tmp_path, written):
    path, empty = written(COMBINE + COMBINE.replace("mine", "second")), written("// nothing\n", "empty.cu")
    broken, other = written("1 / 0\n", "broken.py"), written(COMBINE, "mine.cpp")
    for kernel, message in {
        f"{path}:mime": "'mime' is wanted, but " + f"{path} has mine, second",
        f"{path}": "has the kernels mine, second: name one",
        f"{empty}:mine": "has no kernel",
        f"{tmp_path}/none.cu:mine": "there is no file",
        f"{tmp_path}/none.py:mine": "there is no file",
        f"{broken}:mine": "cannot import",
        "no_such_module:mine": "cannot import no_such_module: ModuleNotFoundError",
        "moeblaze_ref.backends.numba_cuda.combine:combine_kernl": (
            "'combine_kernl' is wanted, but moeblaze_ref.backends.numba_cuda.combine has combine_kernel"
        ),
        "moeblaze_ref.backends.numba_cuda.combine": "must be FILE.cu",
        f"{other}:mine": "must be FILE.cu",
    }.items():
        with pytest.raises((ValueError, OSError)) as error:
            examine(kernel, "combine")
        assert message in str(error.value)
    for task, message in {"combin": "Did you mean 'combine'?", "dispatch": "check one of dispatch.dense_map"}.items():
        with pytest.raises(ValueError) as error:
            examine(COMBINE, task)
        assert message in str(error.value)


@pytest.mark.parametrize("function", ["forward", "stage_contracts", "ARRAYS"])
def test_what_is_no_numba_kernel(function):
    with pytest.raises(TypeError, match="must be a kernel: a function under @cuda.jit"):
        examine(f"moeblaze_ref.backends.numba_cuda.combine:{function}", "combine")


def test_the_division_of_work_is_counted_in_numba():
    """A block of eight threads meets once after the counts, and in each of three rounds; all of them write."""
    kernel = "moeblaze_ref.backends.numba_cuda.dispatch:expert_lengths_kernel"
    (result,) = check_kernel(kernel, "dispatch.expert_lengths", cases=[CASE]).results
    accesses = 2 + 1 + 3 * 3 + 2  # of thread 0: two tokens, its count, three rounds, the result
    assert [result.totals[name] for name in DIVISION] == [accesses, 4, 8 * CASE.E]


def test_a_device_function_is_no_kernel():
    with pytest.raises(TypeError, match="is a device function"):
        examine("moeblaze_ref.backends.numba_cuda.dispatch:exclusive_scan", "combine")


# ---- Numba kernels of a reader --------------------------------------------------------------------


@cuda.jit
def right_kernel(y, gates, token_index_map, out, L, d, k):
    element = cuda.grid(1)
    if element < L * d:
        total = float32(0.0)
        for j in range(k):
            total += gates[element // d, j] * y[token_index_map[element // d * k + j], element % d]
        out[element // d, element % d] = total


@cuda.jit
def last_row_kernel(y, gates, token_index_map, out, L, d, k):
    element = cuda.grid(1)
    if element < (L - 1) * d:
        total = float32(0.0)
        for j in range(k):
            total += gates[element // d, j] * y[token_index_map[element // d * k + j], element % d]
        out[element // d, element % d] = total


@cuda.jit
def wild_kernel(y, out, L, d):
    element = cuda.grid(1)
    out[element // d, element % d] = y[element // d, element % d]


@cuda.jit
def writes_input_kernel(y, out):
    y[0, 0] = out[0, 0] = 1.0


@cuda.jit
def misnamed_kernel(ys, out):
    pass


def test_a_numba_kernel_of_a_reader():
    report = check_kernel(right_kernel, "combine", cases=[TINY], budgets=["read of y <= 4 R d", "written <= 4 L d"])
    assert report.results[0].counts["read"]["y"] == 4 * 10 * 4
    with pytest.raises(Wrong, match="over budget: read is"):
        check_kernel(right_kernel, "combine", cases=[TINY], budgets=["read <= 4 R d"])
    with pytest.raises(Wrong, match="too serial: accesses is 7, but accesses <= 3 k allows 6"):
        check_kernel(right_kernel, "combine", cases=[TINY], budgets=["accesses <= 3 k", "threads >= L d"])
    with pytest.raises(ValueError, match="on numba only read, written, accesses, barriers and threads are counted"):
        check_kernel(right_kernel, "combine", cases=[TINY], budgets=["sectors <= 1"])


MARK = "    if (index >= (long long)L * d) return;\n"  # in combine, of which the following are faults


def combine_with(written, old, new, encoding="utf-8"):
    """The file of a changed combine."""
    text = inlined("combine/1_gather.cu")
    start = text.index("    combine(const Scalar* y")  # the first of its kernels
    assert old in text[start:]
    path = written(text[:start] + text[start:].replace(old, new, 1), "combine.cu", encoding)
    return f"{path}:combine"


def test_a_cuda_kernel_that_writes_over_its_input_is_told(written):
    kernel = combine_with(written, MARK, MARK + "    const_cast<float*>(gates)[0] = 0.25f;\n")
    assert "changes its input gates" in problem_of(kernel, "combine").problem


def test_widths_that_no_pack_divides_are_checked_in_float32(written):
    left_out = MARK + "    if (index % d >= d / 8 * 8) { if (d % 8 == 0) out[index] = 0.0f; return; }\n"
    kernel = combine_with(written, MARK, left_out)
    report = examine(kernel, "combine", small=True)
    assert [result.case.endswith("(odd widths)") for result in report.results if not result.ok] == [True]
    assert examine(kernel, "combine", small=True, dtype="float16").ok


def test_a_byte_order_mark_is_no_part_of_a_kernel(written):
    assert examine(combine_with(written, MARK, MARK, "utf-8-sig"), "combine", cases=[CASE]).ok


def test_a_function_that_is_nowhere_defined_is_no_fault_of_the_checker(written):
    kernel = combine_with(written, MARK, MARK + "    extern __device__ void later(); later();\n")
    message = r"does not compile:\n.*error: later is declared and used, but nowhere defined"
    with pytest.raises(ValueError, match=message):
        examine(kernel, "combine", cases=[CASE])


def test_a_read_outside_before_its_check_is_found():
    """Though nothing is done with it there: a compiler might read only where it is needed."""
    read = "    const float gate = gates[token * k];\n    if (index >= L * d) return;\n"
    text = changed(COMBINE, "    if (index >= L * d) return;\n", "")
    text = changed(text, "column = index % d;\n", "column = index % d;\n" + read)
    text = changed(text, "sum = 0.0f", "sum = gate * y[token_index_map[token * k] * d + column]")
    early = changed(text, "slot = token * k;", "slot = token * k + 1;")
    assert "out-of-bounds read of 4 bytes at byte offset 104 of gates" in problem_of(early, "combine").problem


@pytest.mark.parametrize(
    "loop",
    [
        "for (unsigned i = 0;; ++i) if (gates[i % (L * k)] > 2.0f) break;",  # without an effect, but without an end
        "for (unsigned i = 0; gates[i % (L * k)] < 2.0f; ++i) out[index] = i;",
    ],
)
def test_a_loop_without_an_end_is_found_before_it_fills_the_memory(loop):
    text = changed(COMBINE, "    out[index] = sum;", f"    {loop}\n    out[index] = sum;")
    problem = problem_of(text, "combine").problem
    assert "makes one access more than 1048576 times while its warp waits for it: does a loop never end?" in problem


def test_a_budget_may_be_by_blocks():
    assert check_kernel(COMBINE, "combine", cases=[CASE], budgets=["written <= 1024 blocks"]).ok
    blocks = -(-13 * 8 // 256)
    problem = problem_of(COMBINE, "combine", budgets=["written <= 4 blocks"]).problem
    allowed = f"{4 * blocks}: {416 - 4 * blocks} too many"
    assert problem == f"over budget: written is 416, but written <= 4 blocks allows {allowed}"


def test_faults_of_numba_kernels():
    result = problem_of(last_row_kernel, "combine", [TINY])
    assert result.difference.index == (4, 0) and result.difference.found is None
    wild = problem_of(wild_kernel, "combine", [TINY], grid="10 L").problem
    assert wild.startswith("block (") and "out-of-bounds access to " in wild and "has shape (" in wild
    assert "changes its input y" in problem_of(writes_input_kernel, "combine", [TINY], grid="1", block="1").problem
    with pytest.raises(ValueError, match=r"'ys'\. Did you mean 'y'\?[\s\S]*@cuda.jit\ndef combine\(y, gates,"):
        examine(misnamed_kernel, "combine", cases=[TINY])


@cuda.jit
def negative_kernel(y, out, L):
    out[cuda.blockIdx.x - L, cuda.threadIdx.x] = y[cuda.blockIdx.x, cuda.threadIdx.x]


@cuda.jit
def negative_shared_kernel(out):
    kept = cuda.shared.array(8, float32)
    kept[cuda.threadIdx.x - 1] = float32(0.0)
    cuda.syncthreads()
    out[0, 0] = kept[0]


@cuda.jit
def whole_rows_kernel(gates, out):
    out[0, 0] = np.dot(np.asarray(gates[0]), np.asarray(gates[0]))


@cuda.jit
def sum_of_a_row_kernel(gates, out):
    out[0, 0] = gates[0].sum()


@cuda.jit
def interrupted_kernel(out):
    raise KeyboardInterrupt


@cuda.jit
def warp_kernel(out):
    cuda.syncwarp()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (warp_kernel, "Numba's simulator has no cuda.syncwarp, nor any function of a warp: use cuda.syncthreads()"),
        (negative_kernel, "out, which has shape (5, 4): index -5 on axis 0 is negative (test_checker.py, line "),
        (negative_shared_kernel, "shared memory, which has shape (8): index -1 on axis 0 is negative"),
        (whole_rows_kernel, "gates is used as a whole"),
        (sum_of_a_row_kernel, "gates is used as a whole (sum), but a kernel reads and writes single elements"),
        (interrupted_kernel, "block (0, 0, 0), thread (0, 0, 0): RuntimeError: the kernel raises KeyboardInterrupt"),
    ],
)
def test_what_numbas_simulator_alone_would_accept(kernel, message):
    assert message in problem_of(kernel, "combine", [TINY], grid="L", block="d").problem


@cuda.jit
def summing_kernel(dense_map, lengths, L, E):
    """Thread LAST of a block adds up what all have counted.

    Grid  E blocks of 8 threads
    """
    counts, count = cuda.shared.array(8, int32), 0
    for token in range(cuda.threadIdx.x, L, 8):
        count += dense_map[token, cuda.blockIdx.x] >= 0
    counts[cuda.threadIdx.x] = count
    BARRIER()
    if cuda.threadIdx.x == LAST:
        total = 0
        for thread in range(8):
            total += counts[thread]
        lengths[cuda.blockIdx.x] = total


@cuda.jit
def adding_kernel(dense_map, lengths, L, E):
    """All threads of a block add to one number, by ADD.

    Grid  E blocks of 8 threads
    """
    counts, count = cuda.shared.array(1, int32), 0
    for token in range(cuda.threadIdx.x, L, 8):
        count += dense_map[token, cuda.blockIdx.x] >= 0
    if cuda.threadIdx.x == 0:
        counts[0] = 0
    cuda.syncthreads()
    ADD(counts, count)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        lengths[cuda.blockIdx.x] = counts[0]


@cuda.jit
def uncleared_kernel(dense_map, lengths, L, E):
    """The only thread of a block counts in MEMORY that nobody has cleared."""
    counts = MEMORY()
    for token in range(L):
        counts[0] += dense_map[token, cuda.blockIdx.x] >= 0
    lengths[cuda.blockIdx.x] = counts[0]


MEMORIES = (
    lambda: cuda.shared.array(0, int32),
    lambda: cuda.shared.array(1, int32),
    lambda: cuda.local.array(1, int32),
)


@pytest.mark.parametrize("memory", MEMORIES, ids=["dynamic", "shared", "local"])
def test_memory_of_numba_that_nobody_clears_holds_poison(monkeypatch, memory):
    monkeypatch.setitem(globals(), "MEMORY", memory)
    launch = {"grid": "E", "block": "1", "shared_bytes": "4"}
    problem = problem_of(uncleared_kernel, "dispatch.expert_lengths", **launch).problem
    assert problem.startswith("lengths[0] is -") and "order" not in problem


# What the kernels above call by these names.
LAST = 7
MEMORY = MEMORIES[-1]
BARRIER = lambda: cuda.syncthreads()  # which there is in a kernel alone
ADD = lambda counts, count: cuda.atomic.add(counts, 0, count)


def plain_add(counts, count):
    counts[0] += count


@pytest.mark.parametrize("last", [0, 3, 7])
def test_a_missing_barrier_of_numba_is_found_every_time(monkeypatch, last):
    monkeypatch.setitem(globals(), "LAST", last)
    assert check_kernel(summing_kernel, "dispatch.expert_lengths", cases=[CASE]).ok
    monkeypatch.setitem(globals(), "BARRIER", lambda: None)
    (problem,) = {problem_of(summing_kernel, "dispatch.expert_lengths").problem for _ in range(3)}
    assert "depends on the order of threads (their reverse order): lengths[0] is" in problem


@pytest.mark.parametrize(
    ("barrier", "order", "started"),
    [
        (BARRIER, "NATURAL", 2 * 8),  # each thread waits on a stack of its own
        (lambda: None, "NATURAL", 2),  # one for each block
        (lambda: None, "REVERSE", 2),
        (lambda: None, "TURNS", 2 * 8),  # all threads stop before they write
    ],
)
def test_threads_of_numba_that_never_wait_share_a_thread_of_python(monkeypatch, barrier, order, started):
    from moeblaze_ref.backends.numba_cuda import simulator

    monkeypatch.setitem(globals(), "BARRIER", barrier)
    begun = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), start(thread)))
    dense_map = np.full((5, 2), 1, np.int32)
    lengths = simulator.CountingArray(np.empty(2, np.int32))
    with simulator.watched(getattr(simulator, order)) as work:
        summing_kernel[2, 8](simulator.CountingArray(dense_map), lengths, 5, 2)
    assert len(begun) == started and work.threads == 2 * 8


def test_the_cases_of_the_exercises_are_few_elements_for_numbas_simulator():
    """And show what the others do: more tokens and experts than a block of 32 threads has, and equal logits."""
    small, others = simulator_cases(), telling_cases()
    sizes = [max(case.weights.w1.size for case in cases) for cases in (small, others)]
    assert sizes[0] <= SIMULATOR_WEIGHTS < sizes[1]
    assert max(case.L for case in small) > 32 and max(case.E for case in small) > 32
    assert {case.name for case in logit_cases()} <= {case.name for case in small}


def test_an_addition_of_numba_that_is_not_atomic_is_found(monkeypatch):
    assert check_kernel(adding_kernel, "dispatch.expert_lengths", cases=[CASE]).ok
    monkeypatch.setitem(globals(), "ADD", plain_add)
    problem = problem_of(adding_kernel, "dispatch.expert_lengths").problem
    assert "depends on the order of threads (alternating at every write): lengths[0] is" in problem


# ---- the report, and the command ------------------------------------------------------------------


def test_wrong_carries_the_report():
    with pytest.raises(Wrong) as error:
        check_kernel(changed(COMBINE, "out[index] = sum;", ""), "combine", cases=SMALL)
    report = error.value.report
    assert isinstance(error.value, AssertionError) and report.first_problem in str(error.value)
    assert [result.ok for result in report.results] == [False] * 5 + [True]  # no tokens, nothing to write
    assert "<pre>" in report._repr_html_() and "WRONG" in report._repr_html_()
    json.dumps(report.as_dict(), allow_nan=False)


def test_places_of_every_kind_of_element():
    problem = set_problem(CONTRACTS["expert_up"], CASE)
    routes = problem.dispatch
    row = int(routes.token_index_map[2 * 2 + 1])
    of_slot = {"token": 2, "slot": 1, "expert": int(CASE.topk_experts[2, 1])}
    assert place_of("gates", (2, 1), problem) == place_of("token_index_map", (5,), problem) == of_slot
    assert place_of("y", (row, 3), problem) == {"row": row, "token": 2, "expert": of_slot["expert"]}
    assert place_of("dense_map", (2, 3), problem) == {"token": 2, "expert": 3}
    assert place_of("d_w", (3, 0, 0), problem) == place_of("expert_token_offsets", (3,), problem) == {"expert": 3}
    assert place_of("x", (2, 0), problem) == {"token": 2, "experts": CASE.topk_experts[2].tolist()}


def test_every_tensor_of_a_contract_has_the_shape_that_it_says():
    for contract in CONTRACTS.values():
        problem = set_problem(contract, CASE.astype("float32"))
        for name, array in (problem.inputs | problem.expected).items():
            assert array.shape == tuple(problem.extents[axis] for axis in AXES[name]), (contract.task, name)
        assert problem.expected.keys() == set(contract.writes) and problem.inputs.keys() == set(contract.inputs)
        assert all(np.abs(array).sum() > 0 for array in problem.expected.values())


@pytest.mark.parametrize(
    ("old", "new"), [("[slot] * (long long)d", "[slot] * d"), ("const long long index", "const int index")]
)
def test_a_combine_with_an_index_of_32_bits_is_wrong(old, new):
    assert examine(WIDE_COMBINE, "combine").ok
    report = examine(changed(WIDE_COMBINE, old, new), "combine")
    assert not report.ok and "out-of-bounds read of 4 bytes at byte offset -" in report.results[-1].problem


# A combine of which the name `covered` says which elements a thread writes.
COVERS = changed(
    changed(WIDE_COMBINE, "    if (index >= (long long)L * d) return;\n", ""),
    "    const int token = index / d, column = index % d;\n",
    "    for (long long element = index; covered(element); element += stride) {\n"
    "    const int token = element / d, column = element % d;\n",
).replace("out[index] = sum;", "out[element] = sum; }")


def covering(stride, covered):
    return f"#define stride ({stride})\n#define covered(element) ({covered})\n{COVERS}"


NUM_ELEMENTS = "(long long)L * d"
ALL_ELEMENTS = f"element < {NUM_ELEMENTS}"


def past_2_to_31(kernel, **options):
    """What a report says of the large sizes, of a kernel that is right otherwise."""
    report = examine(kernel, "combine", **options)
    if report.ok:
        line = f"not checked past 2**31 elements, because {report.unchecked}"
        assert (line in str(report)) == bool(report.unchecked)
        assert report.as_dict()["unchecked"] == report.unchecked
        return report.unchecked
    *right, wrong = report.results
    assert all(result.ok for result in right) and "L d and R d past 2**31" in wrong.case and not report.unchecked
    return wrong.problem


@pytest.mark.parametrize("grid", ["1", "132", "min(132, ceil(L d / THREADS))", "ceil(d / THREADS)", "ceil(L / 65)"])
def test_a_launch_with_few_blocks_is_not_checked_past_2_to_31(grid):
    """Its blocks would do too much each: the verdict says so."""
    walks = covering("(long long)gridDim.x * blockDim.x", ALL_ELEMENTS)
    said = past_2_to_31(walks, grid=grid)
    assert said.startswith("a block of its launch sums more than 64 tokens (blocks: ")
    assert said.endswith("; tokens: 2,097,153)")


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("ceil(L d / THREADS)", ""),
        (
            "ceil(L / 64)",
            "which elements its first and last block write depends on L (seen with L=257 and L=513, d=1024)",
        ),
        (
            "ceil(L d / THREADS) + 7",
            "its first and last block write nothing of the last token (seen with L=257, d=1024)",
        ),
    ],
)
def test_a_grid_that_walks_with_many_blocks_is_not_wrong_past_2_to_31(grid, said):
    """The last block of the third has nothing to do."""
    assert past_2_to_31(covering("(long long)gridDim.x * blockDim.x", ALL_ELEMENTS), grid=grid) == said


@pytest.mark.parametrize("block", ["416", "1000", "1024"])
def test_a_block_with_any_number_of_threads_is_checked_past_2_to_31(block):
    assert not past_2_to_31(WIDE_COMBINE, block=block)


OF_AN_AXIS = "blockIdx.y * blockDim.x + threadIdx.x"


@pytest.mark.parametrize(
    ("grid", "index", "bound"),
    [
        ("L, ceil(d / THREADS)", f"blockIdx.x * (long long)d + {OF_AN_AXIS}", f"{OF_AN_AXIS} >= d"),
        (
            "ceil(L d / THREADS)",
            "(gridDim.x - 1LL - blockIdx.x) * blockDim.x + threadIdx.x",
            f"index >= {NUM_ELEMENTS}",
        ),
    ],
    ids=["two axes", "in reverse"],
)
def test_a_launch_of_another_order_is_checked_past_2_to_31(grid, index, bound):
    right = changed(WIDE_COMBINE, "(long long)blockIdx.x * blockDim.x + threadIdx.x", index)
    right = changed(right, "index >= (long long)L * d", bound)
    assert not past_2_to_31(right, grid=grid)
    assert "out-of-bounds" in past_2_to_31(changed(right, "[slot] * (long long)d", "[slot] * d"), grid=grid)


@pytest.mark.parametrize("bound", ["L * d", "(int)((long long)L * d)"])
def test_a_combine_that_writes_nothing_past_2_to_31_is_wrong(bound):
    """L d of 32 bits is negative there, so that every thread returns."""
    nothing = changed(WIDE_COMBINE, "index >= (long long)L * d", f"index >= {bound}")
    assert past_2_to_31(nothing) == "out[0, 0] is never written, as it is with fewer tokens"


def test_a_combine_that_leaves_the_last_token_out_past_2_to_31_is_wrong():
    some = changed(WIDE_COMBINE, "index >= (long long)L * d", "index >= min((long long)L * d, 1LL << 31)")
    assert past_2_to_31(some) == "out[2097152, 768] is never written, as it is with fewer tokens"


def test_a_combine_whose_two_blocks_write_nothing_is_not_checked_past_2_to_31():
    """The blocks between them write all."""
    right = changed(WIDE_COMBINE, "(long long)blockIdx.x * blockDim.x", "(blockIdx.x - 1LL) * blockDim.x")
    right = changed(right, "index >= (long long)L * d", "index < 0 || index >= (long long)L * d")
    said = past_2_to_31(right, grid="ceil(L d / THREADS) + 2")
    assert said.startswith("its first and last block write nothing of the last token (seen with L=")


def test_tasks_and_backends_without_a_large_case_say_so():
    assert (
        examine(own(*OWN["combine.d_gates"]), "combine.d_gates").unchecked
        == "only the task combine has a case of such a size"
    )
    report = examine(right_kernel, "combine")
    assert report.ok and report.unchecked == "only the SIMT executor has arrays of such a size"
    for chosen in ({"cases": SMALL}, {"small": True}):
        assert not examine(WIDE_COMBINE, "combine", **chosen).unchecked


@pytest.fixture
def mine(written):
    return written(COMBINE)


def test_the_command_checks(mine):
    mine.write_text(WIDE_COMBINE)
    result = moeblaze("check", "--stage", "combine", "--kernel", f"{mine}:mine", "--budget", "written <= 4 L d")
    assert result.exit_code == 0 and "right in all 25 cases" in result.stdout and "sectors" in result.stdout
    over = moeblaze("check", "--stage", "combine", "--kernel", mine, "--budget", "written <= 3 L d", "--json")
    report = json.loads(over.stdout)
    assert over.exit_code == 1 and not report["ok"]
    names = "ok", "task", "kernel", "backend", "dtype", "launch", "quantities", "results", "counted_by"
    assert report.keys() == {*names, "refused", "unchecked"} and "can forge these numbers" in report["counted_by"]
    assert report["results"][0].keys() == {"case", "problem", "difference", "counts", "missed"}


def test_the_command_checks_a_python_file_and_records(tmp_path, written):
    path = written("from numba import cuda\n\n\n@cuda.jit\ndef zeros(out):\n    out[0, 0] = 0\n", "mine.py")
    recorded, launch = tmp_path / "report.json", ("--grid", "1", "--block", "1")
    result = moeblaze("check", "--stage", "combine", "--kernel", f"{path}:zeros", *launch, "--record", recorded)
    assert result.exit_code == 1 and "out[0, 0] is 0, but must be" in result.stdout
    assert json.loads(recorded.read_text())["ok"] is False


def test_the_command_says_what_is_missing(mine):
    for arguments, message in {
        ("--kernel", mine): "--stage with one of gating,",
        ("--kernel", mine, "--stage", "combine", "--stage", "gating"): "--stage with one of gating,",
        ("--kernel", mine, "--stage", "combine", "--backend", "simt", "--backend", "cuda"): "2 are named",
        ("--kernel", mine, "--stage", "combine", "--define", "N"): "'N' must be NAME=VALUE",
        ("--kernel", f"{mine}:mien", "--stage", "combine"): f"'mien' is wanted, but {mine} has mine",
        ("--stage", "combine", "--budget", "read <= 1"): "only a check of one kernel takes --budget: add --kernel\n",
        (
            "--stage",
            "combine",
            "--timeout",
            "60",
        ): "only a check of one kernel or a layer takes --timeout: add --kernel or",
        ("--kernel", mine, "--stage", "combine", "--timeout", 10**10): "--timeout",
    }.items():
        result = moeblaze("check", *arguments)
        assert result.exit_code == 2 and message in result.stderr and not result.stdout


def test_the_command_checks_on_the_cases_of_the_exercises(written):
    file, kernel = OWN["gating"]
    path = written(changed(inlined(f"{file}.cu"), " || (ordered == last.ordered && e > last.expert)", ""))
    result = moeblaze("check", "--stage", "gating", "--kernel", f"{path}:{kernel}", "--json")
    wrong = [verdict["case"] for verdict in json.loads(result.stdout)["results"] if verdict["problem"]]
    assert result.exit_code == 1 and wrong and all("equal logits" in case for case in wrong)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("raise SystemExit(0)", "with status 0"),
        (changed(COMBINE, "/ d, column", "/ (d - d), column"), "by SIG"),
    ],
)
def test_the_command_names_what_could_not_be_checked(written, text, how):
    path = written(text, "mine.cu" if "__global__" in text else "mine.py")
    result = moeblaze("check", "--stage", "combine", "--kernel", f"{path}:mine", "--json")
    assert result.exit_code == 2 and not result.stdout
    assert f"error: the kernel ended the process that checked it, {how}" in result.stderr


def test_a_kernel_that_never_ends_is_ended(mine):
    mine.write_text(changed(COMBINE, "out[index] = sum;", "for (int i = 0; i < 1; i = 0) out[index] = sum;"))
    arguments = "-m moeblaze_ref check --stage combine --timeout 5 --kernel".split()
    done = processes.run([sys.executable, *arguments, str(mine)])
    assert done.returncode == 1 and "did not end within 5 seconds" in done.stderr


# ---- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("4 R + 2 s R d (1 + G)", 4 * 6 + 2 * 4 * 6 * 5 * 3),
        ("ceil(L d / 4)", 4),
        ("R // 4", 1),
        ("L L", 9),
        ("-L + 2(R)", 9),
        ("min(L, R) max(L, R)", 18),
        ("ceil(L / 2), R", (2, 6)),
    ],
)
def test_formulas(formula, value):
    assert kernel_headers.evaluate(formula, {"L": 3, "R": 6, "d": 5, "s": 4, "G": 2}) == value


@pytest.mark.parametrize(
    "formula", ["", "L / 0", "L ** R", "[L]", "L if R else L", "q", "L(R", "floor(q)", "'L'", "L; R", "min"]
)
def test_what_is_no_formula(formula):
    with pytest.raises(ValueError, match="formula"):
        kernel_headers.evaluate(formula, {"L": 3, "R": 6})
