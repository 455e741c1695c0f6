"""The combine in raw CUDA: launches kernels_cuda/combine/."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, executor_for

RUNGS = {"1_gather": gemm.WIDE, "2_vector": gemm.WIDE}
DEFAULT_RUNG = "2_vector"
GATE_DTYPES = ("float32",)


def forward(
    y: Array, gates: Array, dispatch: Dispatch, executor: Executor | None = None, rung: str = DEFAULT_RUNG
) -> Array:
    """The layer's output: the gate-weighted sum of each token's expert outputs.

    Parameters
    ----------
    y : array (R, d), float32, float16 or bfloat16
        Expert outputs in expert order.
    gates : array (L, k), float32
    dispatch : Dispatch
    executor : Executor, optional
        Default: by where ``y`` lives.
    rung : str
        One of ``RUNGS``.

    Returns
    -------
    out : array (L, d)
        Summed in float32 in the order of the slots, rounded once.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_combine`, or if the rung does not compute in this dtype.

    Notes
    -----
    MoEBlaze, section 3.1; gather-and-sum as in SonicMoE.
    """
    executor, dtype = _checked(y, gates, dispatch, executor, rung)
    L, d, k = dispatch.L, y.shape[1], dispatch.k
    out = executor.empty((L, d), dtype)
    if rung == "2_vector":
        gemm.check_slots(dispatch)
        gemm.sum_rows(executor, y, dispatch.token_index_map, k, out, gates)
    elif L * d:
        slots = {"gates": gates, "token_index_map": dispatch.token_index_map}
        module = executor.load(f"combine/{rung}.cu", **gemm.constants(dtype))
        module.launch("combine", **gemm.per_element(L * d), y=y, **slots, out=out, L=L, d=d, k=k)
    return out


def backward(
    d_out: Array,
    y: Array,
    gates: Array,
    dispatch: Dispatch,
    executor: Executor | None = None,
    rung: str = DEFAULT_RUNG,
) -> tuple[Array, Array]:
    """Gradients of the expert outputs and the gates, the textbook way: it needs y kept, and has no second rung.

    Parameters
    ----------
    d_out : array (L, d)
    y, gates, dispatch, executor, rung
        As in `forward`.

    Returns
    -------
    d_y : array (R, d)
        gate * d_out of the row's token, in expert order.
    d_gates : array (L, k), float32
        <d_out, y> per slot.

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    executor, dtype = _checked(y, gates, dispatch, executor, rung)
    d = y.shape[1]
    checks.check_tensor("d_out", d_out, {"L": dispatch.L, "d": d}, (dtype,))
    d_y, d_gates = executor.empty(y.shape, dtype), executor.empty(gates.shape, "float32")
    if dispatch.R:
        slots = {"token_index_map": dispatch.token_index_map, "R": dispatch.R, "d": d, "k": dispatch.k}
        module = executor.load("combine/1_gather.cu", **gemm.constants(dtype))
        module.launch("d_y", **gemm.per_element(dispatch.R * d), d_out=d_out, gates=gates, d_y=d_y, **slots)
        module.launch("d_gates", **gemm.per_element(dispatch.R), d_out=d_out, y=y, d_gates=d_gates, **slots)
    return d_y, d_gates


def scatter(y: Array, gates: Array, dispatch: Dispatch, executor: Executor | None = None) -> Array:
    """`forward` by atomic additions: a lesson, used by nothing.

    Parameters
    ----------
    y : array (R, d), float32
    gates, dispatch, executor
        As in `forward`.

    Returns
    -------
    out : array (L, d), float32
        Not the same bits from run to run: a token's rows are added in the order in which threads come.

    Raises
    ------
    ValueError, TypeError
        As `forward`; the dtype is float32.
    """
    stage_contracts.check_combine(y, gates, dispatch, GATE_DTYPES)
    executor = executor or executor_for(y)
    d = y.shape[1]
    out = executor.full((dispatch.L, d), "float32", 0)
    if dispatch.R * d:
        slots = {"gates": gates, "token_index_map": dispatch.token_index_map}
        sizes = {"R": dispatch.R, "d": d, "k": dispatch.k}
        module = executor.load("combine/lesson_atomic.cu", THREADS=gemm.THREADS)
        module.launch("scatter", **gemm.per_element(dispatch.R * d), y=y, **slots, out=out, **sizes)
    return out


def _checked(y, gates, dispatch, executor, rung) -> tuple[Executor, str]:
    """The executor and the dtype of checked inputs."""
    stage_contracts.check_combine(y, gates, dispatch, gemm.WIDE, GATE_DTYPES)
    return executor or executor_for(y), gemm.check_rung("combine", rung, RUNGS, y)
