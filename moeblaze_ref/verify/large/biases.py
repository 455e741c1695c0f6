"""Large cases of the biases of experts."""

import numpy as np

from moeblaze_ref.backends.raw_cuda import biases, gemm
from moeblaze_ref.core.structures import Dispatch
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.sparse import Launch, Parts
from moeblaze_ref.verify.large.cases import Case, dispatch_of, exactly, last_block, values

TALL, WIDTH = 2**22 + 1, 1024  # rows, and their elements
EXPERTS, WIDE = 1024, 2**21 + 2**13  # experts, and the width of a bias
MANY_ROWS = 2**28 + 4  # eight terms each
TILE_ROWS = gemm.ROWS_BOX[1]
COLUMNS = np.s_[-128:]  # of the last block, which takes 32 packs of float32


def cases() -> list[Case]:
    """Every kernel of the file."""
    sizes = (TALL, WIDTH, 2), (8, WIDE, EXPERTS)
    ups = [case(*of) for case in (_up_gradient, _up_gradient_of_tiles) for of in sizes]
    return [_combine(), *ups, *(_down_gradient(*of) for of in (*sizes, (MANY_ROWS, WIDTH, 2)))]


def _case(passes: str, launch: Launch, call) -> Case:
    return Case("expert_down", "biases", passes, "float32", launch, call)


def _combine() -> Case:
    L, k, d = TALL, 2, WIDTH
    rows, experts = np.array([L * k - 1, L * k - 3]), np.array([1, 0])
    y, bias, gates = values(k, d), values(2, d, seed=1), values(k)
    given = {"y": [(np.s_[row : row + 1], each) for row, each in zip(rows, y, strict=True)], "bias": [(np.s_[:], bias)]}
    given |= {"gates": [(np.s_[-1:], gates)], "token_index_map": [(np.s_[-k:], rows)]}
    given |= {"token_expert_indices": [(np.s_[-k:], experts)]}
    expected = {"out": [(np.s_[-1:], exactly(gates) @ (exactly(y) + exactly(bias)[experts]))]}

    def call(executor: Executor) -> None:
        y, bias, gates, out = [executor.empty(shape, "float32") for shape in ((L * k, d), (2, d), (L, k), (L, d))]
        biases.sum_rows(executor, y, bias, gates, dispatch_of(executor, L, 2, k), out)

    return _case(f"R d and L d: L={L}, k={k}, d={d}", Launch("combine_biased", last_block, given, expected), call)


def _of_last_expert(R: int) -> dict:
    """The last expert has three rows."""
    return {"expert_token_offsets": [(np.s_[-2:], np.array([R - 3, R]))]}


def _up_gradient(R: int, n: int, E: int) -> Case:
    d_ab = values(3, 128)
    expected = {"d_bias": [(np.s_[-1:, COLUMNS], exactly(d_ab).sum(axis=0))]}
    launch = Launch("d_up_bias", last_block, _of_last_expert(R) | {"d_ab": [(np.s_[-3:, COLUMNS], d_ab)]}, expected)
    call = lambda executor: biases.up_gradient(executor, executor.empty((R, n), "float32"), _dispatch(executor, R, E))
    return _case(f"R n or E n: R={R}, n={n}, E={E}", launch, call)


def _up_gradient_of_tiles(R: int, n: int, E: int) -> Case:
    """The last expert has one tile."""
    rows, sums = TILE_ROWS * R, values(1, 128)
    given = _of_last_expert(rows) | {"tile_sums": [(np.s_[(rows - 3) // TILE_ROWS + E - 1, COLUMNS], sums[0])]}
    launch = Launch("d_up_bias_of_tiles", last_block, given, {"d_bias": [(np.s_[-1:, COLUMNS], sums)]})

    def call(executor: Executor) -> None:
        dispatch = _dispatch(executor, rows, E)
        tile_sums = biases.empty_tile_sums(executor, dispatch, n)
        biases.up_gradient_of_tiles(executor, tile_sums, "float32", dispatch)

    return _case(f"tiles n or E n: R={rows}, n={n}, E={E}", launch, call)


def _down_gradient(L: int, d: int, E: int) -> Case:
    d_out, gates, bias = values(3, 128), values(3), values(128, seed=1)
    given = _of_last_expert(L) | {"d_out": [(np.s_[-3:, COLUMNS], d_out)], "gate_of_row": [(np.s_[-3:], gates)]}
    given |= {"expert_token_indices": [(np.s_[-3:], np.arange(L - 3, L))], "bias": [(np.s_[-1, COLUMNS], bias)]}
    expected: dict[str, Parts] = {
        "d_bias": [(np.s_[-1:, COLUMNS], exactly(gates) @ exactly(d_out))],
        "gate_terms": [(np.s_[-3:, -1], exactly(d_out) @ exactly(bias))],
    }

    def call(executor: Executor) -> None:
        d_out, bias, gate_of_row = [executor.empty(shape, "float32") for shape in ((L, d), (E, d), (L,))]
        biases.down_gradients(executor, d_out, bias, gate_of_row, _dispatch(executor, L, E))

    launch = Launch("d_down_bias", last_block, given, expected)
    return _case(f"L d, E d or R terms: L={L}, d={d}, E={E}", launch, call)


def _dispatch(executor: Executor, L: int, E: int) -> Dispatch:
    return dispatch_of(executor, L, E, 1)
