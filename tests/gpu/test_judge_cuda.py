"""The judge on a GPU: the same files, the same verdicts, and no counts."""

import pytest
from test_judge import COMBINE, LENGTHS, OWN, TILE, changed, last_row_kernel, own, right_kernel

from moeblaze_ref.cases import standard_cases
from moeblaze_ref.devices import cuda_device_count
from moeblaze_ref.judge import CONTRACTS, Wrong, examine, judge

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="there is no CUDA device")


@pytest.mark.parametrize("task", CONTRACTS)
def test_the_projects_own_kernel_of_every_task_is_right(task):
    report = judge(own(*OWN[task]), task, backend="cuda")
    assert (
        len(report.results) >= len(standard_cases())
        and report.quantities == ()
        and "nothing is counted on cuda" in str(report)
    )


def test_tensor_cores_are_right():
    how = {"backend": "cuda", "dtype": "bfloat16", "constants": TILE}
    assert judge(own("expert_up/3_mma", "expert_up"), "expert_up", **how).ok


def test_a_row_that_is_never_written():
    report = examine(changed(COMBINE, "index >= L * d", "index >= L * d - d"), "combine", backend="cuda")
    assert report.results[0].difference.index == (12, 0) and report.results[0].difference.found is None


def test_a_compile_error_is_the_readers():
    with pytest.raises(ValueError, match="does not compile"):
        judge(changed(LENGTHS, "int count = 0;", "int count = zero;"), "dispatch.expert_lengths", backend="cuda")


def test_a_budget_needs_counts():
    with pytest.raises(ValueError, match="on cuda nothing is counted"):
        judge(COMBINE, "combine", backend="cuda", budgets=["read <= 1"])


def test_numba_kernels():
    assert judge(right_kernel, "combine").ok
    with pytest.raises(Wrong, match="never written"):
        judge(last_row_kernel, "combine")
