"""Check a reader's own kernel against the specification: poisoned outputs, counts, and the first wrong element.

    from moeblaze_ref.verify.checker import check_kernel
    check_kernel("mine.cu:mine", "combine", budgets=["written <= 4 L d"])

`docs/check_your_kernel.md` works through an example; `contracts.CONTRACTS` lists the tasks.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import (
    Case,
    deep_case,
    many_tokens_case,
    odd_block_case,
    renormalised,
    simulator_cases,
    standard_cases,
    telling_cases,
    wide_cases,
)
from moeblaze_ref.verify.checker.budgets import QUANTITIES, Budget
from moeblaze_ref.verify.checker.contracts import CONTRACTS, Contract, find_contract
from moeblaze_ref.verify.checker.exam import Exam
from moeblaze_ref.verify.checker.kernels import CudaKernel, find
from moeblaze_ref.verify.checker.report import Report, Wrong
from moeblaze_ref.verify.checker.runners import runner_of
from moeblaze_ref.verify.checker.trial import Terms
from moeblaze_ref.verify.large import readers

TOKENS = 33 * 256  # a little more than the 8,192 that a bitmap's pass takes

__all__ = ["CONTRACTS", "QUANTITIES", "Exam", "Report", "Wrong", "check_kernel", "examine", "prepare"]


def check_kernel(kernel: Any, task: str, **options: Any) -> Report:
    """Check a kernel as `examine` does, and raise if it is wrong.

    Raises
    ------
    Wrong
        An AssertionError, with the first element that differs.
    """
    report = examine(kernel, task, **options)
    if not report.ok:
        raise Wrong(report)
    return report


def examine(kernel: str | Path | Any, task: str, **options: Any) -> Report:
    """Compare a kernel with the specification, case by case, and report what is wrong.

    Every output is poisoned before the launch. A case is right if the outputs are the specification's
    within the project's bounds, if further runs on the same input give the same bits (on the SIMT
    executor in random orders of the threads), if the next step of the same shape is right as well, and
    if no budget is exceeded.

    The kernel runs in this process: use this for kernels that you wrote. `in_subprocess.examine` runs a kernel in a
    process from which it cannot reach the comparison, and ends what it leaves behind. `prepare` says what the arguments
    are.

    Raises
    ------
    ValueError, TypeError, OSError
        As `prepare`, or if the kernel does not compile or does not fit the task, or the backend does not run here.
    """
    exam = prepare(kernel, task, **options)
    trial = exam.terms.open()
    return exam.report(trial.description, [*exam.answers(trial)])


def prepare(
    kernel: str | Path | Any,
    task: str,
    *,
    backend: str | None = None,
    grid: str | None = None,
    block: str | None = None,
    shared_bytes: str | None = None,
    budgets: Iterable[str] = (),
    levels: Mapping[str, Iterable[str]] = MappingProxyType({}),
    activation: str = "swiglu",
    dtype: str = "float32",
    constants: dict[str, Any] | None = None,
    rounded_once: bool = False,
    cases: Iterable[Case] | None = None,
    small: bool = False,
    numba_runner: Callable[[], str] = partial(runner_of, "numba"),
) -> Exam:
    """Prepare the inputs of every case for a kernel, without running it.

    Parameters
    ----------
    kernel : str, Path or Numba kernel
        ``FILE.cu``, ``FILE.cu:name``, the text of such a file, ``module:function``,
        ``FILE.py:function``, or a function under ``numba.cuda.jit``.
    task : str
        One of ``CONTRACTS``.
    backend : str, optional
        ``simt`` (the default of .cu files) or ``cuda``; ``numba`` for a Numba kernel.
    grid, block, shared_bytes : str, optional
        Formulas, such as "ceil(h / 16), E"; by default those in the kernel's header, or else the task's
        grid of THREADS threads.
    budgets : iterable of str
        Such as "written <= 4 R h" or "read of x <= 4 R d"; the quantities are in ``QUANTITIES``.
    levels : mapping of str to iterable of str
        More budgets, by the name of a level. A kernel that exceeds them is right all the same: the report's
        ``missed`` says so.
    activation : str
        One of ``config.ACTIVATIONS``; the constant ACTIVATION of a .cu file.
    dtype : str
        float32, float16 or bfloat16, the type Scalar of a .cu file; Numba kernels have float32.
    constants : dict, optional
        More preprocessor constants of a .cu file.
    rounded_once : bool
        Compare bits with the exact results, rounded to float32 and then to the dtype. Only for outputs whose elements
        are one product each: a sum depends on its order.
    cases : iterable of Case, optional
        Default: `cases.standard_cases`, `cases.telling_cases` and `cases.wide_cases`, and of the dispatch
        ``TOKENS`` tokens, except in Numba's simulator; of block_sparse in float32 `cases.odd_block_case`; for a .cu
        file that uses the constant RENORMALIZE, each with k > 1 again with renormalised gates.
    small : bool
        Leave out, or cut to size, what of the standard cases is too large for a simulator, as Numba's always does, and
        leave out the wide ones. Numba's simulator gets `cases.simulator_cases` in place of the telling ones.
    numba_runner : callable
        Says where Numba's kernels run. By default it looks for a GPU in this process.

    Raises
    ------
    ValueError, TypeError, OSError
        If there is no case, the kernel is not found or its file is refused, the backend does not take it, or a name or
        budget cannot be read.
    """
    contract, found = find_contract(task), find(kernel)
    terms = Terms(
        contract=contract,
        kernel=found,
        backend=backend or found.backends[0],
        asked={"grid": grid, "block": block, "shared bytes": shared_bytes},
        budgets=_read(budgets, contract),
        levels={name: _read(of_level, contract) for name, of_level in levels.items()},
        activation=activation,
        dtype=dtype,
        constants=constants or {},
        rounded_once=rounded_once,
    )
    runner = numba_runner() if terms.backend == "numba" else terms.backend
    if cases is not None or small:
        return Exam.of(terms, runner, _cases(terms, runner, small) if cases is None else cases)
    refusal = readers.refusal(terms)
    return Exam.of(terms, runner, _cases(terms, runner, small), large=not refusal, unchecked=refusal)


def _read(budgets: Iterable[str], contract: Contract) -> tuple[Budget, ...]:
    return tuple(Budget.read(budget, contract) for budget in budgets)


def _cases(terms: Terms, runner: str, small: bool) -> list[Case]:
    """The standard, telling and wide cases, and those with renormalised gates if a .cu file knows of these."""
    standard, telling, wide = standard_cases(), telling_cases(terms.dtype), wide_cases()
    if terms.contract.stage == "dispatch":
        wide.append(many_tokens_case(TOKENS))
    if runner == "simulator":
        standard, wide = check.cut_to_size(standard), wide_cases(width=1)
    if small:
        standard, wide = check.cut_to_size(standard), [] if runner == "simulator" else [deep_case()]
        telling = simulator_cases() if runner == "simulator" else telling
    if terms.contract.stage == "block_sparse" and terms.dtype == "float32":  # narrow types need multiples of 8
        telling = [*telling, odd_block_case()]
    cases = standard + telling + wide
    if not isinstance(terms.kernel, CudaKernel) or "RENORMALIZE" not in terms.kernel.text:
        return cases
    return cases + renormalised([case for case in cases if case.k > 1])
