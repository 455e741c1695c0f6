"""Judge a reader's own kernel: the specification's inputs in, poisoned outputs, and where the first element differs.

    from moeblaze_ref.judge import judge
    judge("mine.cu:mine", "combine", budgets=["written <= 4 L d"])

`docs/judge_your_kernel.md` works through an example; `contracts.CONTRACTS` lists the tasks.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeblaze_ref import check, doors
from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.cases import Case, standard_cases, telling_cases
from moeblaze_ref.judge.budgets import QUANTITIES, Budget
from moeblaze_ref.judge.contracts import CONTRACTS, find_contract
from moeblaze_ref.judge.kernels import choose_launch, find
from moeblaze_ref.judge.report import Report, Result, Wrong
from moeblaze_ref.judge.trial import Trial

__all__ = ["CONTRACTS", "QUANTITIES", "Report", "Wrong", "examine", "judge"]


def judge(kernel: Any, task: str, **options: Any) -> Report:
    """Hold a kernel against the specification, and raise if it is wrong.

    Parameters
    ----------
    kernel, task, **options
        As `examine` has them.

    Returns
    -------
    Report
        Every case, all of them right.

    Raises
    ------
    Wrong
        An AssertionError, with the first element that differs.
    ValueError, TypeError, OSError
        As `examine`.
    """
    report = examine(kernel, task, **options)
    if not report.ok:
        raise Wrong(report)
    return report


def examine(
    kernel: str | Path | Any,
    task: str,
    *,
    backend: str | None = None,
    grid: str | None = None,
    block: str | None = None,
    shared_bytes: str | None = None,
    budgets: Iterable[str] = (),
    activation: str = "swiglu",
    dtype: str = "float32",
    constants: dict[str, Any] | None = None,
    cases: Iterable[Case] | None = None,
    small: bool = False,
) -> Report:
    """Hold a kernel against the specification, case by case, and report what is wrong.

    Every output is poisoned before the launch. A case is right if the outputs are the specification's
    within the project's bounds, if further runs on the same input give the same bits (on the SIMT
    executor in random orders of the threads), and if no budget is exceeded.

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
    activation : str
        One of ``config.ACTIVATIONS``; the constant ACTIVATION of a .cu file.
    dtype : str
        float32, float16 or bfloat16, the type Scalar of a .cu file; Numba kernels have float32.
    constants : dict, optional
        More preprocessor constants of a .cu file.
    cases : iterable of Case, optional
        Default: `cases.standard_cases` and `cases.telling_cases`; for a .cu file that uses the constant RENORMALIZE, each
        with k > 1 again with renormalised gates.
    small : bool
        Leave out, or cut to size, what of the standard cases is too large for a simulator, as Numba's always does.

    Returns
    -------
    Report

    Raises
    ------
    ValueError, TypeError, OSError
        If there is no case, the kernel is not found, does not compile or does not fit the task, the backend does not run
        here, or a name, formula or budget cannot be read.
    """
    contract, found = find_contract(task), find(kernel)
    asked = {"grid": grid, "block": block, "shared bytes": shared_bytes}
    trial = Trial(
        contract=contract,
        kernel=found,
        backend=_open_backend(found, backend),
        launch=choose_launch(found.stated(), asked, contract, found.header),
        budgets=tuple(Budget.read(budget, contract) for budget in budgets),
        activation=activation,
        dtype=dtype,
        constants=constants or {},
    )
    results = list(trial.results(_cases(trial, small) if cases is None else cases))
    if not results:
        raise ValueError("cases is empty, but a kernel is judged by at least one case")
    if cases is None and not small and not any(result.problem for result in results):
        results += _large(trial)
    return Report(task, found.label, trial.backend, dtype, str(trial.launch), trial.quantities, results)


def _large(trial: Trial) -> list[Result]:
    """The case past 2**31 elements, if the kernel is wrong there."""
    from moeblaze_ref.large import readers

    fault = readers.fault(trial)
    return [Result(readers.SHAPE, fault, None, {})] if fault else []


def _open_backend(kernel: Any, name: str | None) -> str:
    """The backend to judge on, if it takes such a kernel and runs here."""
    name = doors.check_name("backend", name or kernel.backends[0], BACKENDS)
    if name not in kernel.backends:
        raise ValueError(f"backend {name} does not take {kernel.label}: it runs on {' or '.join(kernel.backends)}")
    status = BACKENDS[name].status()
    if not status.available:
        raise ValueError(f"backend {name} does not run here: {status.detail}{status.remedy and f'; {status.remedy}'}")
    return name


def _cases(trial: Trial, small: bool) -> list[Case]:
    """The standard and the telling cases, and those with renormalised gates if a .cu file knows of these."""
    standard = standard_cases()
    if small or trial.backend == "numba":
        standard = check.in_reach(BACKENDS["numba"], standard)
    cases = standard + telling_cases(trial.dtype)
    if trial.backend == "numba" or "RENORMALIZE" not in trial.kernel.text:
        return cases
    return cases + [replace(case, renormalize=True) for case in cases if case.k > 1]
