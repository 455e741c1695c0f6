"""A reader's combine past 2**31 elements, for the checker: the first and the last block of its launch."""

import math

import numpy as np

from moeblaze_ref.judge.contracts import dtype_of
from moeblaze_ref.judge.runners import RUNNERS
from moeblaze_ref.judge.trial import Answer, Terms, Trial
from moeblaze_ref.large.cases import ALL, BOUNDS, exactly, values
from moeblaze_ref.raw_cuda.runtime.simt import KernelFault
from moeblaze_ref.raw_cuda.runtime.source import Size
from moeblaze_ref.raw_cuda.runtime.sparse import ZEROS, Launch, SparseExecutor, error

L, k, d = 2**21 + 1, 2, 1024  # L d > 2**31
R = L * k
SIZES = {"L": L, "d": d, "h": d, "E": k, "k": k, "R": R}
SHAPE = f"L={L}, d={d}, k={k}: L d and R d past 2**31, the first and the last block alone"
TOKENS = (0, L - 1)
MOST_TOKENS = 64  # of a block, on average: with more it would take long
OUTPUT = (len(TOKENS), d)  # what is compared: the output of these tokens


def takes(terms: Terms) -> bool:
    """Return True if the case is one of the task: a combine of a .cu file on the SIMT executor."""
    return terms.contract.task == "combine" and terms.backend == "simt"


def launch(trial: Trial, out: np.ndarray) -> Answer:
    """Launch the first and the last block of a combine at this size.

    Each token has a row of both experts. y and the gates are zeros but for the first and the last token's.

    Parameters
    ----------
    trial : Trial
        Of terms that `takes` takes.
    out : ndarray (2, d), float32, float16 or bfloat16
        Gets the output of ``TOKENS``. It stays as it is if the launch has few blocks, which do too much each.

    Returns
    -------
    Answer
        Without counts: two blocks say nothing of a launch.
    """
    constants = trial.constants_of(renormalize=False)
    grid, block, shared_bytes = trial.launch.at(trial.kernel.name, trial.symbols_of(constants, SIZES))
    names = trial.kernel.fit(trial.contract, trial.dtype, constants)
    answer = Answer("", {quantity: {} for quantity in RUNNERS[trial.runner].quantities}, {}, tuple(names))
    if math.prod(grid) * MOST_TOKENS < L:
        return answer
    given = _given(trial.dtype)
    chosen = Launch(trial.kernel.name, _first_and_last, {name: given[name] for name in names if name in given}, {})
    executor = SparseExecutor(chosen)
    arrays = {name: executor.empty(shape, dtype_of(name, trial.dtype)) for name, shape in _shapes().items()}
    try:
        module = executor.load(trial.kernel.file, text=trial.kernel.text, **constants)
        arguments = {name: (arrays | SIZES)[name] for name in names}
        module.launch(trial.kernel.name, grid, block, shared_bytes, **arguments)
    except KernelFault as found:
        return Answer(str(found), {}, {}, ())
    for row, token in zip(out, TOKENS, strict=True):
        row[:] = arrays["out"][token]
    return answer


def problem(out: np.ndarray) -> str:
    """Return what is wrong in the outputs (2, d) that `launch` gave; empty if nothing is."""
    rows, gates = _values(str(out.dtype))
    expected = [exactly(gates[i]) @ exactly(rows[i]) for i in range(len(TOKENS))]
    return next(filter(None, map(_wrong, out, TOKENS, expected)), "")


def _first_and_last(grid: Size) -> list[Size]:
    x, y, z = grid
    return sorted({(0, 0, 0), (x - 1, y - 1, z - 1)})


def _shapes() -> dict[str, tuple[int, ...]]:
    return {
        "y": (R, d),
        "gates": (L, k),
        "out": (L, d),
        "expert_token_indices": (R,),
        "token_expert_indices": (R,),
        "token_index_map": (R,),
        "expert_token_offsets": (k + 1,),
    }


def _values(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows (2, k, d) and the gates (2, k) of the first and the last token."""
    return values(2, k, d, dtype=dtype), values(2, k)


def _given(dtype: str) -> dict[str, list]:
    """What the arrays hold."""
    rows, gates = _values(dtype)
    tokens = np.arange(L, dtype=np.int32)
    y, out, weights = [(ALL, ZEROS)], [(ALL, ZEROS)], [(ALL, ZEROS)]
    for i, token in enumerate(TOKENS):
        y += [(np.s_[token + j * L : token + j * L + 1], rows[i, j]) for j in range(k)]
        weights.append((np.s_[token : token + 1], gates[i]))
        out.append((np.s_[token : token + 1], np.nan))
    return {
        "y": y,
        "gates": weights,
        "out": out,
        "expert_token_indices": [(ALL, np.tile(tokens, k))],
        "token_expert_indices": [(ALL, np.tile(np.arange(k, dtype=np.int32), L))],
        "token_index_map": [(ALL, (tokens[:, None] + L * np.arange(k, dtype=np.int32)).ravel())],
        "expert_token_offsets": [(ALL, L * np.arange(k + 1))],
    }


def _wrong(out: np.ndarray, token: int, expected: np.ndarray) -> str:
    """What is wrong in the elements of a token that a block has written."""
    written = ~np.isnan(out)
    if not written.any() or error(out[written], expected[written]) <= BOUNDS[str(out.dtype)]:
        return ""
    column = int(np.argmax(np.abs(np.where(written, out.astype(np.float64) - expected, 0.0))))
    return f"out[{token}, {column}] is {float(out[column]):.7g}, but must be {expected[column]:.7g}"
