"""The checker on a GPU: the same files, the same verdicts, and no counts."""

import sys

import processes
import pytest
from test_checker import COMBINE, LENGTHS, OWN, TILE, changed, last_row_kernel, own, right_kernel

from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify import in_subprocess
from moeblaze_ref.verify.cases import standard_cases
from moeblaze_ref.verify.checker import CONTRACTS, Wrong, check_kernel, examine

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="there is no CUDA device")


@pytest.mark.parametrize("task", [task for task in OWN if CONTRACTS[task].stage != "block_sparse"])
def test_the_projects_own_kernel_of_every_task_is_right(task):
    report = check_kernel(own(*OWN[task]), task, backend="cuda")
    assert (
        len(report.results) >= len(standard_cases())
        and report.quantities == ()
        and "nothing is counted on cuda" in str(report)
    )
    assert "not checked past 2**31 elements, because only the SIMT executor has arrays of such a size" in str(report)


def test_tensor_cores_are_right():
    how = {"backend": "cuda", "dtype": "bfloat16", "constants": TILE}
    assert check_kernel(own("expert_up/3_mma", "expert_up"), "expert_up", **how).ok


def test_a_row_that_is_never_written():
    report = examine(changed(COMBINE, "index >= L * d", "index >= L * d - d"), "combine", backend="cuda")
    assert report.results[0].difference.index == (12, 0) and report.results[0].difference.found is None


def test_a_compile_error_is_the_readers():
    with pytest.raises(ValueError, match="does not compile"):
        check_kernel(changed(LENGTHS, "int count = 0;", "int count = zero;"), "dispatch.expert_lengths", backend="cuda")


def test_a_budget_needs_counts():
    with pytest.raises(ValueError, match="on cuda nothing is counted"):
        check_kernel(COMBINE, "combine", backend="cuda", budgets=["read <= 1"])


def test_numba_kernels():
    assert check_kernel(right_kernel, "combine").ok
    with pytest.raises(Wrong, match="never written"):
        check_kernel(last_row_kernel, "combine")


def test_kernels_run_in_a_subprocess(tmp_path):
    """In the fork of a process that has not looked for a GPU, without capabilities: CUDA starts there all the same."""
    cuda, numba = tmp_path / "mine.cu", tmp_path / "mine.py"
    cuda.write_text(COMBINE)
    assert not in_subprocess.examine(f"{cuda}:mine", "combine", backend="cuda").first_problem
    cuda.write_text(changed(COMBINE, "index >= L * d", "index >= L * d - d"))
    assert "never written" in in_subprocess.examine(f"{cuda}:mine", "combine", backend="cuda").first_problem
    numba.write_text(NUMBA)
    verdict = in_subprocess.examine(f"{numba}:mine", "combine")
    assert not verdict.first_problem and len(verdict.document["results"]) >= len(standard_cases())


def test_cuda_starts_under_each_part_of_the_confinement(tmp_path):
    """If it does not, the output says which part, and which call or path of it, is in the way."""
    done = processes.run([sys.executable, "-c", PARTS, str(tmp_path)])
    assert done.returncode == 0 and done.stdout.endswith("all: 0\n"), done.stdout + done.stderr


def test_a_result_that_is_kept_by_shape_is_wrong():
    report = examine(KEPT_ON_A_GPU, "dispatch.expert_lengths", backend="cuda", grid="E", block="1")
    assert "in the next step of the same shape" in report.first_problem


# Starts CUDA in a fork under each part of the confinement, and prints what cuInit and cuCtxCreate return.
PARTS = """
import ctypes, os, sys
from moeblaze_ref.verify import guard, landlock, seccomp

folder = sys.argv[1]
os.environ["CUDA_CACHE_PATH"] = folder
OPENED = landlock.opened(folder)
MORE = "/dev/shm", "/dev", "/proc", "/sys", "/run", "/var", "/tmp", os.path.expanduser("~"), "/"

def cuda():
    driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    error = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    return error or driver.cuCtxCreate_v2(ctypes.byref(context), 0, device)

def files(*more):
    return lambda: landlock.keep_files([*OPENED, *(landlock.Opened(path, "") for path in more)])

def under(*steps):
    "The error of CUDA in a process that takes these steps; 255 if it was ended."
    child = os.fork()
    if child == 0:
        guard._prctl(guard._PR_SET_NO_NEW_PRIVS, 1)
        for step in steps:
            if not step():
                print("    the system refuses a step", flush=True)
        error = cuda()
        print("    error", error, flush=True)
        os._exit(min(error, 254))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 255

def show(name, *steps):
    error = under(*steps)
    print(f"{name}: {error}", flush=True)
    return error

show("none")
show("no capabilities", guard._drop_capabilities)
if show("files", files()):
    for path in MORE:
        show(f"  files, {path} opened", files(path))
show("signals", landlock.keep_signals_inside)
if show("calls", seccomp.refuse_calls):
    for name in seccomp.CALLS:
        if not under(lambda: seccomp.refuse_calls([other for other in seccomp.CALLS if other != name])):
            print(f"  the call in the way is {name}")
    for name in seccomp.CALLS:
        if under(lambda: seccomp.refuse_calls([name])):
            print(f"  {name} alone is in the way")
show("files and calls", files(), seccomp.refuse_calls)
show("all", guard._drop_capabilities, files(), landlock.keep_signals_inside, seccomp.refuse_calls)
"""

NUMBA = """
from numba import cuda, float32


@cuda.jit
def mine(y, gates, token_index_map, out, L, d, k):
    element = cuda.grid(1)
    if element < L * d:
        total = float32(0.0)
        for j in range(k):
            total += gates[element // d, j] * y[token_index_map[element // d * k + j], element % d]
        out[element // d, element % d] = total
"""

KEPT_ON_A_GPU = """
__device__ int kept[1 << 16], filled[1 << 16];
extern "C" __global__ void mine(const int* dense_map, int* lengths, int L, int E) {
    const int expert = blockIdx.x, place = (L * 331 + E * 17 + expert) % (1 << 16);
    if (!filled[place]) {
        int count = 0;
        for (int token = 0; token < L; ++token) count += dense_map[token * E + expert] >= 0;
        kept[place] = count;
        filled[place] = 1;
    }
    lengths[expert] = kept[place];
}
"""
