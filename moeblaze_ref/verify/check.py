"""The cross-check: every stage of every backend against the specification and against autograd.

Index structures must match bit for bit. Floating-point results are compared with plain
torch in float64 on the same, already rounded inputs: ||out - ref|| / ||ref|| per tensor,
and a row shows the worst of them. Outputs are poisoned before every launch. Every check runs
two training steps of one shape on different numbers (`cases.Case.steps`) in every dtype, so that
nothing may be kept from the first; a row shows the worse of the two. The arrays of the second step overwrite
those of the first, so that nothing may be found again by its address either.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from moeblaze_ref.backends.numpy_ref import block_sparse as reference_sparse
from moeblaze_ref.backends.registry import BACKENDS, CHECKED, ORACLE, STAGES, Backend, OpenStage
from moeblaze_ref.core import checks
from moeblaze_ref.verify import comparisons, orders
from moeblaze_ref.verify.cases import (
    Case,
    option_cases,
    standard_cases,
)

# Numba's simulator runs this many routed rows, and elements of w1 (a thread each), in a second or two.
SIMULATOR_ROWS, SIMULATOR_WEIGHTS = 32, 1024
LAYER_DEVICES = {"simt": "cpu", "cuda": "cuda", ORACLE.name: "cpu"}  # where each backend runs the torch layers

Found = TypeVar("Found")


@dataclass(frozen=True)
class Row:
    """One line of the cross-check table."""

    stage: str
    direction: str
    backend: str
    version: str | None  #: kernel file of a raw CUDA stage, without its ending
    dtype: str
    shape: str | None  #: sizes of the case and what is hard about it; of an unavailable version, what it needs
    error: float | None  #: worst relative error over the tensors (for int32: elements that differ)
    bound: float | None  #: the limit of the error
    ok: bool
    available: bool  #: an unavailable backend or version is never ok

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON; a NaN error becomes a string."""
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


def check_dispatch(backend: Backend, version: str | None, case: Case) -> Iterator[Row]:
    """One row: the four index structures, bit for bit against a stable sort."""
    stage = backend.open("dispatch", version)
    errors = _step_by_step(stage, _differing_dispatch, case.steps())
    yield _row_of_bits(backend, "dispatch", version, "forward", case, errors)


def _differing_dispatch(stage: OpenStage, case: Case) -> int:
    return differing_elements(stage.build(case.topk_experts, case.E), comparisons.dispatch_of(case))


def _step_by_step(stage: OpenStage, run: Callable[[OpenStage, Case], Found], steps: Iterable[Case]) -> Iterator[Found]:
    """Yield what ``run`` finds of the stage on each step, whose arrays overwrite those of the step before."""
    for step in steps:
        stage.begin_step()
        yield run(stage, step)


def check_stage(backend: Backend, version: str | None, case: Case, stage: str) -> Iterator[Row]:
    """Forward and backward rows of a floating-point stage, in every dtype that the version has."""
    opened = backend.open(stage, version)
    run, expect = comparisons.comparison(stage, version)
    for dtype in backend.versions(stage)[version]:
        steps = _rounded_steps(case, dtype)
        found = _step_by_step(opened, run, steps)
        yield from _rows_of(backend, stage, version, dtype, steps, found, expect)


def check_with_structures(backend: Backend, version: str | None, case: Case, stage: str) -> Iterator[Row]:
    """The stage's index structures bit for bit, then its experts as any floating-point stage."""
    opened = backend.open(stage, version)
    errors = _step_by_step(opened, _DIFFERING_STRUCTURES[stage], case.steps())
    yield _row_of_bits(backend, stage, version, "structures", case, errors)
    yield from check_stage(backend, version, case, stage)


def _differing_blocks(stage, case: Case) -> int:
    """The elements that differ in the bins and in the topology."""
    h, dispatch = case.weights.w1.shape[2], comparisons.dispatch_of(case)
    bins = reference_sparse.pad(dispatch, comparisons.block_of(case))
    error = differing_elements(stage.pad(dispatch, bins.block), bins)
    return error + differing_elements(stage.build_topology(bins, h), reference_sparse.build_topology(bins, h))


def _differing_bins(stage, case: Case) -> int:
    """The elements that differ in kept and dropped rows."""
    gates, dispatch = comparisons.gates_of(case), comparisons.dispatch_of(case)
    bins, mask = comparisons.kept(case, case.topk_experts, gates)
    found = stage.fill(dispatch, gates, bins.C, case.drop_policy)
    losses = zip(stage.dropped(bins, dispatch), comparisons.dropped_by_definition(case, mask), strict=True)
    return differing_elements(found, bins) + sum(int(np.sum(lost != wanted)) for lost, wanted in losses)


_DIFFERING_STRUCTURES = {"block_sparse": _differing_blocks, "capacity": _differing_bins}


def check_gradients(
    backend: Backend, version: str | None, case: Case, dtype: str, layer: str = "torch_layer"
) -> Iterator[Row]:
    """Forward and backward rows of a torch layer on the backend's device, against the oracle."""
    module = comparisons.torch_layer_of(LAYER_DEVICES[backend.name], case.astype(dtype), layer)
    steps, memory = _rounded_steps(case, dtype), comparisons.TensorMemory()
    found = (comparisons.step_of_torch_layer(module, step, memory) for step in steps)
    yield from _rows_of(backend, layer, version, dtype, steps, found, comparisons.TORCH_LAYERS[layer].expect)


@functools.lru_cache(maxsize=8)
def _rounded_steps(case: Case, dtype: str) -> tuple[Case, ...]:
    """Both training steps of a case in a dtype: the same objects for every version, so that `_expected` knows them."""
    return tuple(step.astype(dtype) for step in case.steps())


@functools.lru_cache(maxsize=32)
def _expected(expect: comparisons.Expect, step: Case, dtype: str) -> comparisons.Results:
    """Return the oracle's results for a training step; cached for all versions with the same numbers."""
    return expect(step, getattr(torch, dtype))


def check_order(backend: Backend, version: str | None, case: orders.Sum) -> Iterator[Row]:
    """A row for each dtype: a sum whose order is stated, bit for bit, at the sizes where most elements differ."""
    stage = backend.open(case.stage, version)
    for dtype in orders.dtypes_that_tell(backend.versions(case.stage)[version]):
        errors = [orders.differing_bits(case, stage, dtype, sizes) for sizes in case.sizes]
        error, sizes = max(zip(errors, case.sizes, strict=True), key=lambda pair: pair[0])
        shape, bound = case.shape_at(sizes), comparisons.BOUNDS["int32"]
        yield _row(backend, case.stage, version, "order", dtype, shape, float(error), bound)


def _rows_of(backend, stage, version, dtype, steps, found, expect) -> Iterator[Row]:
    """A row for each direction: of the worse of the steps, which run one after the other."""
    found = [  # a step may overwrite what the one before returned
        {way: {name: np.array(array) for name, array in arrays.items()} for way, arrays in results.items()}
        for results in found
    ]
    exact = [_expected(expect, step, "float64") for step in steps]
    baselines = [{} if dtype in comparisons.BOUNDS else _expected(expect, step, dtype) for step in steps]
    precision = comparisons.precision(stage, version, dtype)
    for direction in exact[0]:
        of_steps = ([results.get(direction) for results in kind] for kind in (found, exact, baselines))
        verdicts = [
            comparisons.compare(ours, right, precision, baseline)
            for ours, right, baseline in zip(*of_steps, strict=True)
        ]
        worst, step = max(zip(verdicts, steps, strict=True), key=lambda pair: comparisons.badness(pair[0]))
        yield _row(backend, stage, version, direction, dtype, step.shape, *worst)


def _row_of_bits(backend, stage, version, direction, case, errors: Iterable[int]) -> Row:
    """The row of what must match bit for bit: of the step in which more elements differ."""
    error, step = max(zip(errors, case.steps(), strict=True), key=lambda pair: pair[0])
    return _row(backend, stage, version, direction, "int32", step.shape, float(error), comparisons.BOUNDS["int32"])


def _row(backend, stage, version, direction, dtype, shape, error, bound) -> Row:
    return Row(stage, direction, backend.name, version, dtype, shape, error, bound, error <= bound, True)


def unavailable(backend: Backend, stage: str, version: str | None = None, reason: str | None = None) -> Row:
    """Return the row of an unavailable backend or version, with the reason in place of the shape."""
    return Row(stage, "forward", backend.name, version, "-", reason, None, None, False, False)


def in_reach(backend: Backend, stage: str, cases: Iterable[Case], version: str | None = None) -> list[Case]:
    """The cases that the backend can run in reasonable time.

    The SIMT executor compiles anew for every activation and save policy: the layer's first version gets all
    activations, its others the usual one (the stages of the experts check the rest). Numba's simulator gets small
    cases, cut to size.
    """
    if backend.name == "simt" and stage == "layer":
        return [case for case in cases if case.activation == "swiglu" or version == comparisons.FIRST_VERSION]
    return cut_to_size(cases) if is_simulated(backend) else list(cases)


def is_simulated(backend: Backend) -> bool:
    """Return True if Numba's simulator runs the backend, because there is no GPU."""
    if backend.name != "numba":
        return False
    from moeblaze_ref.backends.numba_cuda.runtime import EXECUTOR

    return EXECUTOR != "cuda"


def cut_to_size(cases: Iterable[Case]) -> list[Case]:
    """Cases for a simulator: those of few weights, with no more tokens than it can run in reasonable time."""
    small = [case.head(SIMULATOR_ROWS // case.k) for case in cases if case.weights.w1.size <= SIMULATOR_WEIGHTS]
    return [case for case in small if case.L * case.k <= SIMULATOR_ROWS]


def plan(
    stages: Iterable[str] = STAGES, backends: Iterable[str] = CHECKED, cases: list[Case] | None = None
) -> list[Callable[[], Iterable[Row]]]:
    """The checks to run, one thunk for each stage, backend and case.

    Without a list of cases, each stage gets the cases of `chosen`; a given list is not changed.

    Raises
    ------
    ValueError
        If a stage or backend is unknown (the message proposes the nearest name), or no backend has any of the stages.
    """
    stages = [checks.check_name("stage", stage, STAGES) for stage in stages]
    asked = [_backend(checks.check_name("backend", name, CHECKED)) for name in backends]
    choose = functools.partial(chosen, cases=standard_cases() + option_cases())
    if cases is not None:
        choose = functools.partial(reachable, cases=cases)
    jobs: list[Callable[[], Iterable[Row]]] = []
    for backend in asked:
        available = backend.status().available
        for stage in (stage for stage in stages if stage in backend.stages):
            if not available:
                jobs.append(functools.partial(list, [unavailable(backend, stage)]))
            elif backend is ORACLE:
                jobs += _plan_layer(backend, f"torch_{stage}")
            else:
                of_versions = [_plan_version(backend, stage, version, choose) for version in backend.versions(stage)]
                # Case by case, so that all versions share what is expected of it.
                jobs += [job for of_case in itertools.zip_longest(*of_versions) for job in of_case if job]
    if not jobs:
        has = "; ".join(f"{backend.name} has {', '.join(backend.stages)}" for backend in asked)
        raise ValueError(f"nothing to check: no stage of {', '.join(stages)} in these backends ({has})")
    return jobs


def _backend(name: str) -> Backend:
    return ORACLE if name == ORACLE.name else BACKENDS[name]


def check_of(stage: str) -> Callable[[Backend, str | None, Case], Iterator[Row]]:
    """Return the check of a stage: index structures bit for bit, everything else by relative error."""
    if stage == "dispatch":
        return check_dispatch
    return functools.partial(check_with_structures if stage in _DIFFERING_STRUCTURES else check_stage, stage=stage)


def _plan_version(
    backend: Backend, stage: str, version: str | None, choose: Callable[..., list[Case]]
) -> list[Callable[[], Iterable[Row]]]:
    """Return one thunk for each case, or a single thunk that says why the version does not run here."""
    if reason := backend.refusal(stage, version):
        return [lambda: [unavailable(backend, stage, version, reason)]]
    check = check_of(stage)
    cases, sums = choose(backend, stage, version), orders.promises(stage, backend.name, version)
    return [
        *(functools.partial(_run, check, backend, stage, version, case) for case in cases),
        *(functools.partial(_run, check_order, backend, stage, version, one) for one in sums),
    ]


def chosen(backend: Backend, stage: str, version: str | None, cases: list[Case]) -> list[Case]:
    """The cases, and what the check adds for a version on a backend, such as more tiles than a GPU has blocks.

    `comparisons.FIRST_CASES` come first and cheap cases follow, so that a kernel that is wrong fails soon.
    """
    if backend.name == "cuda":
        cases = [*cases, *comparisons.overflowing(stage, multiprocessors())]
    found = reachable(backend, stage, version, comparisons.extended(stage, version, cases))
    return sorted(found, key=lambda case: (comparisons.turn(stage, version, case), cost(case)))


def cost(case: Case) -> tuple[bool, bool, int]:
    """Order cases from the cheapest to the dearest, by their routed rows.

    An activation but the usual one comes later, since the SIMT executor compiles kernels anew for it; so does a case
    without tokens, which shows hardly any fault.
    """
    return case.activation != "swiglu", case.L == 0, case.L * case.k


def reachable(backend: Backend, stage: str, version: str | None, cases: list[Case]) -> list[Case]:
    """The cases that fit the version and are in reach of the backend; no device is asked."""
    return in_reach(backend, stage, comparisons.fitting(stage, version, cases), version)


def multiprocessors() -> int:
    """Return the number of multiprocessors of the current GPU."""
    from moeblaze_ref.runtime.cupy import CupyExecutor

    return CupyExecutor().multiprocessors


def plan_gradients(backends: Iterable[str] = tuple(LAYER_DEVICES)) -> list[Callable[[], Iterable[Row]]]:
    """The checks of the torch layers that these backends run, each in every dtype that it computes in.

    Raises
    ------
    ValueError
        If a backend is unknown or no torch layer runs on it.
    """
    asked = [_backend(checks.check_name("backend of the torch layer", name, LAYER_DEVICES)) for name in backends]
    jobs: list[Callable[[], Iterable[Row]]] = []
    for backend in asked:
        for layer in (name for name, one in comparisons.TORCH_LAYERS.items() if backend.name in one.backends):
            if not backend.status().available:
                jobs.append(functools.partial(list, [unavailable(backend, layer)]))
            else:
                jobs += _plan_layer(backend, layer)
    return jobs


def _plan_layer(backend: Backend, layer: str) -> list[Callable[[], Iterable[Row]]]:
    """One thunk for each dtype and case of a torch layer."""
    of_kind = comparisons.TORCH_LAYERS[layer]
    in_dtypes = [functools.partial(check_gradients, dtype=dtype, layer=layer) for dtype in of_kind.dtypes]
    return [functools.partial(_run, check, backend, layer, None, one) for check in in_dtypes for one in of_kind.cases()]


def _run(check, backend: Backend, stage: str, version: str | None, case: Case | orders.Sum) -> Iterator[Row]:
    """The rows of one check; a kernel that faults or raises is a failed row that says so, not the end of the others."""
    try:
        yield from check(backend=backend, version=version, case=case)
    except Exception as error:
        shape = f"{case.shape}: {type(error).__name__}: {error}"
        yield Row(stage, "forward", backend.name, version, "-", shape, math.nan, None, False, True)


def run(*arguments, **options) -> list[Row]:
    """Every row of `plan`, in order."""
    return [row for job in plan(*arguments, **options) for row in job()]


def passed(rows: list[Row]) -> bool:
    """Return True if at least one row was checked and none failed. Unavailable backends and versions are ignored."""
    checked = [row for row in rows if row.available]
    return bool(checked) and all(row.ok for row in checked)
