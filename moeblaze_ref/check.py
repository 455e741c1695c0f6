"""The cross-check: every stage of every backend against the specification and against autograd.

Index structures must match bit for bit. Floating-point results are compared with plain
torch in float64 on the same, already rounded inputs: ||out - ref|| / ||ref|| per tensor,
and a row shows the worst of them. Outputs are poisoned before every launch.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from moeblaze_ref import comparisons, doors
from moeblaze_ref.backends import BACKENDS, STAGES, Backend
from moeblaze_ref.cases import Case, every_activation, every_choice, option_cases, standard_cases, whole_block_case
from moeblaze_ref.numpy_ref import block_sparse as reference_sparse
from moeblaze_ref.numpy_ref import dispatch as reference_dispatch
from moeblaze_ref.raw_cuda import gemm

# What Numba's simulator gets through in a second or two: routed rows, and elements of w1, each of which is a thread.
SIMULATOR_ROWS, SIMULATOR_WEIGHTS = 32, 1024
TORCH_DEVICES = {"simt": "cpu", "cuda": "cuda"}  # where each backend runs the torch layer


@dataclass(frozen=True)
class Row:
    """One line of the cross-check table.

    Parameters
    ----------
    stage, direction, backend : str
    rung : str or None
        Kernel file of a raw CUDA stage, without its ending.
    dtype : str
    shape : str or None
        Sizes of the case and what is hard about it; of an unavailable rung, what it needs.
    error, bound : float or None
        Worst relative error over the tensors (for int32: elements that differ), and its limit.
    ok, available : bool
        An unavailable backend or rung is never ok.
    """

    stage: str
    direction: str
    backend: str
    rung: str | None
    dtype: str
    shape: str | None
    error: float | None
    bound: float | None
    ok: bool
    available: bool

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON takes it; a NaN error, which JSON lacks, becomes a string."""
        row = asdict(self)
        if self.error is not None and not math.isfinite(self.error):
            row["error"] = str(self.error)
        return row


def differing_elements(found, wanted) -> int:
    """Elements in which two `IndexArrays` differ, over all their arrays."""
    total = 0
    for name, expected in wanted.arrays().items():
        array = np.asarray(getattr(found, name))
        same_kind = array.shape == expected.shape and array.dtype == expected.dtype
        total += int((array != expected).sum()) if same_kind else max(array.size, expected.size, 1)
    return total


def check_dispatch(backend: Backend, rung: str | None, case: Case) -> Iterator[Row]:
    """One row: the four index structures, bit for bit against a stable sort."""
    found = backend.open("dispatch", rung).build(case.topk_experts, case.E)
    error = differing_elements(found, reference_dispatch.build_by_sort(case.topk_experts, case.E))
    yield _row(backend, "dispatch", rung, "forward", "int32", case.shape, float(error), comparisons.BOUNDS["int32"])


def check_stage(backend: Backend, rung: str | None, case: Case, stage: str) -> Iterator[Row]:
    """Forward and backward rows of a floating-point stage, in every dtype that the rung has."""
    for dtype in backend.rungs(stage)[rung]:
        rounded = case.astype(dtype)
        found = comparisons.runner(stage, rung)(backend.open(stage, rung), rounded)
        yield from _judged(backend, stage, rung, dtype, rounded, found, comparisons.expectation(stage, rung))


def check_block_sparse(backend: Backend, rung: str | None, case: Case) -> Iterator[Row]:
    """The bins and the topology, bit for bit, then MegaBlocks' experts as any floating-point stage."""
    stage, dispatch = backend.open("block_sparse", rung), reference_dispatch.build_by_sort(case.topk_experts, case.E)
    h = case.weights.w1.shape[2]
    bins = reference_sparse.pad(dispatch, comparisons.sparse_block(h))
    error = differing_elements(stage.pad(dispatch, bins.block), bins)
    error += differing_elements(stage.build_topology(bins, h), reference_sparse.build_topology(bins, h))
    yield _row(
        backend, "block_sparse", rung, "structures", "int32", case.shape, float(error), comparisons.BOUNDS["int32"]
    )
    yield from check_stage(backend, rung, case, "block_sparse")


def check_gradients(
    backend: Backend, rung: str | None, case: Case, dtype: str, layer: str = "torch_layer"
) -> Iterator[Row]:
    """Forward and backward rows of a torch layer on the backend's device, against the oracle."""
    rounded = case.astype(dtype)
    found = comparisons.run_torch_layer(TORCH_DEVICES[backend.name], rounded, layer)
    yield from _judged(backend, layer, rung, dtype, rounded, found, comparisons.expect_torch_layer)


def _judged(backend, stage, rung, dtype, case, found, expect) -> Iterator[Row]:
    """A row for each direction of what was found."""
    exact = expect(case, torch.float64)
    peer = {} if dtype in comparisons.BOUNDS else expect(case, getattr(torch, dtype))
    for direction in exact:
        error, bound = comparisons.judge(
            found[direction], exact[direction], comparisons.precision(stage, rung, dtype), peer.get(direction)
        )
        yield _row(backend, stage, rung, direction, dtype, case.shape, error, bound)


def _row(backend, stage, rung, direction, dtype, shape, error, bound) -> Row:
    return Row(stage, direction, backend.name, rung, dtype, shape, error, bound, error <= bound, True)


def unavailable(backend: Backend, stage: str, rung: str | None = None, reason: str | None = None) -> Row:
    """The row of a backend that cannot run here, or of one of its rungs, which says why in the shape's place."""
    return Row(stage, "forward", backend.name, rung, "-", reason, None, None, False, False)


def in_reach(backend: Backend, cases: Iterable[Case]) -> list[Case]:
    """The cases that the backend can run in reasonable time.

    The SIMT executor compiles anew for every activation, so it gets the usual one (its tests cover the others); Numba's
    simulator gets small cases, cut to size.
    """
    if backend.name == "simt":
        return [case for case in cases if case.activation == "swiglu"]
    if backend.name != "numba":
        return list(cases)
    from moeblaze_ref.numba_cuda.runtime import EXECUTOR

    if EXECUTOR == "cuda":
        return list(cases)
    return cut_to_size(cases)


def cut_to_size(cases: Iterable[Case]) -> list[Case]:
    """Cases for a simulator: those of few weights, with no more tokens than it can run in reasonable time."""
    small = [case.head(SIMULATOR_ROWS // case.k) for case in cases if case.weights.w1.size <= SIMULATOR_WEIGHTS]
    return [case for case in small if case.L * case.k <= SIMULATOR_ROWS]


def plan(
    stages: Iterable[str] = STAGES, backends: Iterable[str] = tuple(BACKENDS), cases: list[Case] | None = None
) -> list[Callable[[], Iterable[Row]]]:
    """The checks to run, one thunk for each stage, backend and case.

    Raises
    ------
    ValueError
        If a stage or backend is unknown (the message proposes the nearest name), or no backend has any of the stages.
    """
    stages = [doors.check_name("stage", stage, STAGES) for stage in stages]
    asked = [BACKENDS[doors.check_name("backend", name, BACKENDS)] for name in backends]
    cases = standard_cases() + option_cases() if cases is None else cases
    jobs: list[Callable[[], Iterable[Row]]] = []
    for backend in asked:
        available = backend.status().available
        for stage in (stage for stage in stages if stage in backend.stages):
            if not available:
                jobs.append(lambda backend=backend, stage=stage: [unavailable(backend, stage)])
                continue
            for rung in backend.rungs(stage):
                jobs += _plan_rung(backend, stage, rung, cases)
    if not jobs:
        has = "; ".join(f"{backend.name} has {', '.join(backend.stages)}" for backend in asked)
        raise ValueError(f"nothing to check: no stage of {', '.join(stages)} in these backends ({has})")
    return jobs


def check_of(stage: str) -> Callable[[Backend, str | None, Case], Iterator[Row]]:
    """What compares a stage with its reference: index structures bit for bit, everything else by relative error."""
    special = {"dispatch": check_dispatch, "block_sparse": check_block_sparse}
    return special.get(stage) or functools.partial(check_stage, stage=stage)


def _plan_rung(backend: Backend, stage: str, rung: str | None, cases: list[Case]) -> list[Callable[[], Iterable[Row]]]:
    """One thunk for each case, or one that says why the rung does not run here."""
    if reason := backend.refusal(stage, rung):
        return [lambda: [unavailable(backend, stage, rung, reason)]]
    check = check_of(stage)
    return [functools.partial(_run, check, backend, stage, rung, case) for case in chosen(backend, stage, rung, cases)]


def chosen(backend: Backend, stage: str, rung: str | None, cases: list[Case]) -> list[Case]:
    """The cases of a rung on a backend: those that fit it and are in reach, and on a GPU more tiles than it has blocks."""
    if backend.name == "cuda":
        cases = [*cases, *comparisons.overflowing(stage, multiprocessors())]
    return in_reach(backend, comparisons.fitting(stage, rung, cases))


def multiprocessors() -> int:
    """How many the current GPU has."""
    from moeblaze_ref.raw_cuda.runtime.cupy import CupyExecutor

    return CupyExecutor().multiprocessors


def plan_gradients(backends: Iterable[str] = tuple(TORCH_DEVICES)) -> list[Callable[[], Iterable[Row]]]:
    """The checks of the torch layers: every activation under every policy, in every dtype, on every device there is.

    MegaBlocks has no policies: of each activation it gets one case, and one of whole blocks, which Hopper's tiles need.

    Raises
    ------
    ValueError
        If a backend is unknown or the torch layer does not run on it.
    """
    asked = [BACKENDS[doors.check_name("backend of the torch layer", name, TORCH_DEVICES)] for name in backends]
    jobs: list[Callable[[], Iterable[Row]]] = []
    layers = {"torch_layer": every_choice(), "torch_block_sparse": [*every_activation(), whole_block_case()]}
    for backend in asked:
        for layer, cases in layers.items():
            if not backend.status().available:
                jobs.append(lambda backend=backend, layer=layer: [unavailable(backend, layer)])
                continue
            for dtype, case in itertools.product(gemm.WIDE, cases):
                check = functools.partial(check_gradients, dtype=dtype, layer=layer)
                jobs.append(functools.partial(_run, check, backend, layer, None, case))
    return jobs


def _run(check, backend: Backend, stage: str, rung: str | None, case: Case) -> Iterator[Row]:
    """The rows of one check; a kernel that faults or raises is a failed row that says so, not the end of the others."""
    try:
        yield from check(backend=backend, rung=rung, case=case)
    except Exception as error:
        shape = f"{case.shape}: {type(error).__name__}: {error}"
        yield Row(stage, "forward", backend.name, rung, "-", shape, math.nan, None, False, True)


def run(*arguments, **options) -> list[Row]:
    """Every row of `plan`, in order."""
    return [row for job in plan(*arguments, **options) for row in job()]


def passed(rows: list[Row]) -> bool:
    """Whether something was checked and nothing failed; an unavailable backend or rung decides neither."""
    checked = [row for row in rows if row.available]
    return bool(checked) and all(row.ok for row in checked)
