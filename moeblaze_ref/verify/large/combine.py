"""Large cases of the combine, and of the sum that is the gradient of x."""

import numpy as np

from moeblaze_ref.backends.raw_cuda import combine, gemm
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.sparse import Launch, Parts
from moeblaze_ref.verify.large.cases import Case, dispatch_of, exactly, last_block, values

L, k, d = 2**22 + 1, 2, 1024
R = L * k
SHAPE = f"L={L}, k={k}, d={d}"
ROWS = np.array([R - 1, R - 3])  # of the last token
COLUMNS = slice(d - gemm.THREADS, d)  # of the last block, if each element has a thread
EVERY = slice(0, d)


def cases() -> list[Case]:
    """Every kernel of the stage."""
    backward = [_case("1_gather", launch, _backward) for launch in (d_y(COLUMNS), d_gates())]
    return [_combine("1_gather", COLUMNS), _combine("2_vector", EVERY), *backward, _scatter(), _sum_rows()]


def _case(version: str, launch: Launch, call, stage: str = "combine") -> Case:
    return Case(stage, version, f"R d and L d: {SHAPE}", "float32", launch, call)


def _rows(array: np.ndarray, columns: slice) -> list:
    """Parts of y: rows of the last token."""
    return [(np.s_[row : row + 1, columns], each) for row, each in zip(ROWS, array, strict=True)]


def _inputs(columns: slice):
    """Rows of y and gates of the last token, and what a launch is given of them."""
    y, gates = values(k, columns.stop - columns.start), values(k)
    given = {"gates": [(np.s_[-1:], gates)], "token_index_map": [(np.s_[-k:], ROWS)]}
    return y, gates, given


def _arguments(executor: Executor) -> tuple[Array, Array, Dispatch]:
    """y, gates and dispatch, without values."""
    return executor.empty((R, d), "float32"), executor.empty((L, k), "float32"), dispatch_of(executor, L, 1, k)


def gather(columns: slice) -> Launch:
    """Return the launch whose last block has these columns of the last token."""
    y, gates, given = _inputs(columns)
    expected = {"out": [(np.s_[-1:, columns], exactly(gates) @ exactly(y))]}
    return Launch("combine", last_block, given | {"y": _rows(y, columns)}, expected)


def _combine(version: str, columns: slice) -> Case:
    call = lambda executor: combine.forward.unchecked(*_arguments(executor), executor, version)
    return _case(version, gather(columns), call)


def _scatter() -> Case:
    y, gates, given = _inputs(COLUMNS)
    before, last = values(d)[COLUMNS], slice(1, 2)  # the last block has the last slot
    given = {"gates": [(np.s_[-1:], gates)], "token_index_map": [(np.s_[-1:], ROWS[last])]}
    given |= {"y": _rows(y, COLUMNS)[last], "out": [(np.s_[-1:, COLUMNS], before)]}
    expected = {"out": [(np.s_[-1:, COLUMNS], before + exactly(gates[1]) * exactly(y[1]))]}
    call = lambda executor: combine.scatter.unchecked(*_arguments(executor), executor)
    return _case("lesson_atomic", Launch("scatter", last_block, given, expected), call)


def _backward(executor):
    y, gates, dispatch = _arguments(executor)
    return combine.backward.unchecked(executor.empty((L, d), "float32"), y, gates, dispatch, executor)


def d_y(columns: slice) -> Launch:
    """Return the launch whose last block has these columns of the last slot."""
    d_out, gates = values(columns.stop - columns.start), values(k)
    given: dict[str, Parts] = {"d_out": [(np.s_[-1:, columns], d_out)], "gates": [(np.s_[-1:], gates)]}
    given |= {"token_index_map": [(np.s_[-1:], ROWS[1:])]}
    expected = {"d_y": [(np.s_[ROWS[1] : ROWS[1] + 1, columns], exactly(gates[1]) * exactly(d_out))]}
    return Launch("d_y", last_block, given, expected)


def d_gates() -> Launch:
    """Return the launch whose last block has the last R % THREADS slots: one token's."""
    d_out, y = values(d), values(k, d)
    given = {"d_out": [(np.s_[-1:], d_out)], "y": _rows(y, EVERY), "token_index_map": [(np.s_[-k:], ROWS)]}
    expected = {"d_gates": [(np.s_[-1:], exactly(y) @ exactly(d_out))]}
    return Launch("d_gates", last_block, given, expected)


def _sum_rows() -> Case:
    y, _, given = _inputs(EVERY)
    given = {"rows": _rows(y, EVERY), "token_index_map": given["token_index_map"]}
    expected = {"d_x": [(np.s_[-1:], exactly(y).sum(axis=0))]}

    def call(executor):
        rows, _, dispatch = _arguments(executor)
        gemm.sum_rows(executor, rows, dispatch.token_index_map, k, executor.empty((L, d), "float32"))

    return _case("sum_rows", Launch("sum_rows", last_block, given, expected), call, stage="expert_up")
