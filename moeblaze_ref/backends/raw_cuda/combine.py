"""The combine in raw CUDA: launches kernels_cuda/combine/."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.arrays import dtype_of
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, KernelArguments, executor_for

VERSIONS = {"1_gather": gemm.WIDE, "2_vector": gemm.WIDE}
DEFAULT_VERSION = "2_vector"
GATE_DTYPES = ("float32",)


@implements(stage_contracts.COMBINE, gemm.ARRAYS)
def forward(
    y: Array, gates: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """Rows are summed in float32 in the order of the slots, and rounded once."""
    executor, dtype = executor or executor_for(y), gemm.check_version("combine", version, VERSIONS, y)
    L, d, k = dispatch.L, y.shape[1], dispatch.k
    out = executor.empty((L, d), dtype)
    if version == "2_vector":
        gemm.check_slots(dispatch)
        gemm.sum_rows(executor, y, dispatch.token_index_map, k, out, gates)
    elif L * d:
        slots: KernelArguments = {"gates": gates, "token_index_map": dispatch.token_index_map}
        module = executor.load(f"combine/{version}.cu", **gemm.constants(dtype))
        module.launch("combine", **gemm.per_element(L * d), y=y, **slots, out=out, L=L, d=d, k=k)
    return out


@implements(stage_contracts.COMBINE_IN_PARTS, gemm.ARRAYS)
def forward_in_parts(
    parts: tuple[Array, ...],
    gates: Array | None,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array:
    """The layer sums so where `gemm.parts_of_y` divides the columns. Only 2_vector writes some columns of out."""
    checks.check_name("version of combine in parts", version, (DEFAULT_VERSION,))
    gemm.check_slots(dispatch)
    executor = executor or executor_for(parts[0])
    out = executor.empty((dispatch.L, sum(part.shape[1] for part in parts)), dtype_of(parts[0]))
    first = 0
    for part in parts:
        gemm.sum_rows(executor, part, dispatch.token_index_map, dispatch.k, out, gates, first)
        first += part.shape[1]
    return out


@implements(stage_contracts.COMBINE_BACKWARD, gemm.ARRAYS)
def backward(
    d_out: Array,
    y: Array,
    gates: Array,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> tuple[Array, Array]:
    executor, dtype, d = executor or executor_for(y), gemm.check_version("combine", version, VERSIONS, y), y.shape[1]
    d_y, d_gates = executor.empty(y.shape, dtype), executor.empty(gates.shape, "float32")
    if dispatch.R:
        slots: KernelArguments = {"token_index_map": dispatch.token_index_map, "R": dispatch.R, "d": d, "k": dispatch.k}
        module = executor.load("combine/1_gather.cu", **gemm.constants(dtype))
        module.launch("d_y", **gemm.per_element(dispatch.R * d), d_out=d_out, gates=gates, d_y=d_y, **slots)
        module.launch("d_gates", **gemm.per_element(dispatch.R), d_out=d_out, y=y, d_gates=d_gates, **slots)
    return d_y, d_gates


@implements(stage_contracts.COMBINE_ATOMIC, gemm.ARRAYS._replace(dtypes=GATE_DTYPES))
def scatter(y: Array, gates: Array, dispatch: Dispatch, executor: Executor | None = None) -> Array:
    """A lesson, used by nothing: atomic additions. A token's rows are added in the order in which the threads come, so
    the bits differ from run to run.
    """
    executor = executor or executor_for(y)
    d = y.shape[1]
    out = executor.full((dispatch.L, d), "float32", 0)
    if dispatch.R * d:
        slots: KernelArguments = {"gates": gates, "token_index_map": dispatch.token_index_map}
        sizes = {"R": dispatch.R, "d": d, "k": dispatch.k}
        module = executor.load("combine/lesson_atomic.cu", THREADS=gemm.THREADS)
        module.launch("scatter", **gemm.per_element(dispatch.R * d), y=y, **slots, out=out, **sizes)
    return out
