"""Dispatch in raw CUDA: launches kernels_cuda/dispatch/."""

from moeblaze_ref import doors
from moeblaze_ref.raw_cuda.runtime import Executor, ceil_div, executor_for
from moeblaze_ref.structures import Array, Dispatch

RUNGS = {"1_dense_map": ("int32",)}
DEFAULT_RUNG = "1_dense_map"
THREADS = 256
CONSTANTS = {"THREADS": THREADS}


def build(
    topk_experts: Array, num_experts: int, executor: Executor | None = None, rung: str = DEFAULT_RUNG
) -> Dispatch:
    """The four index structures by the paper's three steps (MoEBlaze, section 4.2).

    Parameters
    ----------
    topk_experts : array (L, k), int32, C-contiguous
        Expert ids of each token, distinct inside a row. A numpy array runs on the SIMT
        executor, a CuPy array on the GPU.
    num_experts : int
        E, at most 1,024; k is at most 32.
    executor : Executor, optional
        Another executor for arrays of that kind.
    rung : str
        One of ``RUNGS``.

    Returns
    -------
    Dispatch
        Arrays of the same kind as ``topk_experts``.

    Raises
    ------
    TypeError, ValueError
        As `doors.check_topk_experts` and `doors.check_kernel_limits` say.
    """
    doors.check_topk_experts(topk_experts, num_experts)
    L, k = topk_experts.shape
    E = num_experts
    doors.check_kernel_limits(E, k)
    doors.check_name("rung of dispatch", rung, RUNGS)
    executor = executor or executor_for(topk_experts)

    dispatch = Dispatch(
        expert_token_indices=executor.empty((L * k,), "int32"),
        expert_token_offsets=executor.empty((E + 1,), "int32"),
        token_expert_indices=executor.empty((L * k,), "int32"),
        token_index_map=executor.empty((L * k,), "int32"),
        k=k,
    )
    if L == 0:
        dispatch.expert_token_offsets.fill(0)
        return dispatch

    dense_map = executor.empty((L, E), "int32")
    lengths = executor.empty((E,), "int32")
    module = executor.load(f"dispatch/{rung}.cu", **CONSTANTS)
    module.launch(
        "dense_map",
        grid=ceil_div(L, THREADS),
        block=THREADS,
        topk_experts=topk_experts,
        dense_map=dense_map,
        token_expert_indices=dispatch.token_expert_indices,
        L=L,
        E=E,
        k=k,
    )
    module.launch("expert_lengths", grid=E, block=THREADS, dense_map=dense_map, lengths=lengths, L=L, E=E)
    module.launch(
        "expert_offsets",
        grid=1,
        block=THREADS,
        lengths=lengths,
        expert_token_offsets=dispatch.expert_token_offsets,
        E=E,
    )
    module.launch(
        "route_indices",
        grid=E,
        block=THREADS,
        dense_map=dense_map,
        expert_token_offsets=dispatch.expert_token_offsets,
        topk_experts=topk_experts,
        expert_token_indices=dispatch.expert_token_indices,
        token_index_map=dispatch.token_index_map,
        L=L,
        E=E,
        k=k,
    )
    return dispatch
