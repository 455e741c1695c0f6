"""Sizes past 2**31 elements: every kernel whose indices can get there, checked without the memory.

A case has arrays most of which are not there, and runs a few blocks of one launch. See docs/simt_executor.md.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator

from moeblaze_ref.backends.registry import BACKENDS, STAGES
from moeblaze_ref.core import checks
from moeblaze_ref.verify.check import Row, unavailable
from moeblaze_ref.verify.large.cases import BOUNDS, Case

PARTS = {
    "simt": ("gating", "dispatch", "combine", "experts", "corners", "packed", "block_sparse", "biases"),
    "numba": ("numba_kernels",),
}


def every_case(backend: str = "simt") -> list[Case]:
    """Every case of a backend, one of ``PARTS``."""
    modules = (importlib.import_module(f"{__name__}.{part}") for part in PARTS[backend])
    return [case for module in modules for case in module.cases()]


def plan(stages: Iterable[str] = STAGES, backends: Iterable[str] = tuple(PARTS)) -> list[Callable[[], Iterable[Row]]]:
    """The checks to run, one thunk for each case.

    Raises
    ------
    ValueError
        If a stage or backend is unknown, or no case is of these.
    """
    stages = [checks.check_name("stage", stage, STAGES) for stage in stages]
    jobs: list[Callable[[], Iterable[Row]]] = []
    for name in backends:
        backend = BACKENDS[checks.check_name("backend of --large", name, PARTS)]
        if reason := _refusal(name):
            jobs += [functools.partial(list, [unavailable(backend, stage, None, reason)]) for stage in stages]
        else:
            jobs += [functools.partial(_rows, name, case) for case in every_case(name) if case.stage in stages]
    if not jobs:
        raise ValueError(f"nothing to check: no large case is of stage {', '.join(stages)}")
    return jobs


def _refusal(backend: str) -> str:
    """Why the backend's cases do not run here, or nothing."""
    status = BACKENDS[backend].status()
    if not status.available:
        return status.detail
    if backend == "simt":
        return ""
    from moeblaze_ref.backends.numba_cuda.runtime import EXECUTOR

    return "" if EXECUTOR == "simulator" else "they need Numba's simulator: NUMBA_ENABLE_CUDASIM=1"


def _rows(backend: str, case: Case) -> Iterator[Row]:
    """Yield the row of a case. If the case faults, the row fails and names the fault."""
    shape, error, bound = case.passes, math.nan, BOUNDS[case.dtype]
    try:
        error = case.run().worst
    except Exception as fault:
        shape = f"{shape}: {type(fault).__name__}: {fault}"
    yield Row(case.stage, case.kernel, backend, case.version, case.dtype, shape, error, bound, error <= bound, True)
