"""A reader's combine past 2**31 elements, for the checker: the first and the last block of its launch.

Which elements these blocks have to write is the kernel's own affair. So they run at two smaller sizes first. What they
write of the first and of the last token there, they must write at the large size. If they write other elements at the
second size than at the first, the number of blocks decides what a block writes, and nothing follows for the large size.
"""

import math
from typing import Any

import numpy as np

from moeblaze_ref.runtime.poison import poison
from moeblaze_ref.runtime.simt.executor import KernelFault
from moeblaze_ref.runtime.source import Size
from moeblaze_ref.runtime.sparse import ZEROS, Launch, SparseExecutor, error
from moeblaze_ref.verify.checker.contracts import dtype_of
from moeblaze_ref.verify.checker.kernels import CudaKernel
from moeblaze_ref.verify.checker.report import never_written
from moeblaze_ref.verify.checker.runners import RUNNERS
from moeblaze_ref.verify.checker.trial import Answer, Terms, Trial
from moeblaze_ref.verify.large.cases import ALL, BOUNDS, exactly, values

L, k, d = 2**21 + 1, 2, 1024  # L d > 2**31
SHAPE = f"L={L}, d={d}, k={k}: L d and R d past 2**31, the first and the last block alone"
TASK = "combine"
MOST_TOKENS = 64  # of a block, on average: with more it would take long
MEMORY = (3, 2, d)  # at two smaller sizes and at the large one, the output of the first and of the last token


def refusal(terms: Terms) -> str:
    """Return why a kernel is not checked at this size; empty if it may be."""
    if terms.backend != "simt":
        return "only the SIMT executor has arrays of such a size"
    return "" if terms.contract.task == TASK else f"only the task {TASK} has a case of such a size"


def launch(trial: Trial, memory: np.ndarray) -> Answer:
    """Launch the first and the last block of a combine, at two smaller sizes and at the large one.

    Each token has a row of both experts. y and the gates are zeros but for the first and the last token's.

    Parameters
    ----------
    trial : Trial
        Of terms that `refusal` does not refuse.
    memory : ndarray (3, 2, d), float32, float16 or bfloat16
        Gets the outputs. It stays as it is if the launch has few blocks.

    Returns
    -------
    Answer
        Without counts: two blocks say nothing of a launch.
    """
    answer = Answer("", {quantity: {} for quantity in RUNNERS[trial.runner].quantities}, {}, _parameters(trial))
    if _has_few_blocks(trial):
        return answer
    try:
        for tokens, out in zip((*_fewer_tokens(trial), L), memory, strict=True):
            out[:] = _run(trial, tokens)
    except KernelFault as fault:
        return Answer(str(fault), {}, {}, ())
    return answer


def problem(trial: Trial, memory: np.ndarray) -> str:
    """Return what is wrong in the outputs that `launch` gave; empty if nothing is."""
    rows, gates = _values(trial.dtype)
    expected = [exactly(gates[i]) @ exactly(rows[i]) for i in range(2)]
    must_write = ~never_written(memory[0]) if _writes_the_same(memory) else np.zeros((2, d), bool)
    return next(filter(None, map(_wrong, (0, L - 1), must_write, memory[-1], expected)), "")


def unchecked(trial: Trial, memory: np.ndarray) -> str:
    """Return why the outputs that `launch` gave say nothing of sizes past 2**31; empty if they do."""
    if _has_few_blocks(trial):
        grid, *_ = _launch(trial, L)
        return f"a block of its launch sums more than {MOST_TOKENS} tokens (blocks: {math.prod(grid):,}; tokens: {L:,})"
    fewer, more = _fewer_tokens(trial)
    if not _writes_the_same(memory):
        return f"which elements its first and last block write depends on L (seen with L={fewer} and L={more}, d={d})"
    if never_written(memory[0, -1]).all():
        return f"its first and last block write nothing of the last token (seen with L={fewer}, d={d})"
    return ""


def _writes_the_same(memory: np.ndarray) -> bool:
    """Return True if the two blocks write the same elements at both smaller sizes."""
    return bool((never_written(memory[0]) == never_written(memory[1])).all())


def _sizes(tokens: int) -> dict[str, int]:
    return {"L": tokens, "d": d, "h": d, "E": k, "k": k, "R": tokens * k}


def _launch(trial: Trial, tokens: int) -> tuple[Size, Size, int]:
    return trial.launch.at(trial.kernel.name, trial.symbols_of(_constants(trial), _sizes(tokens)))


def _constants(trial: Trial) -> dict:
    return trial.constants_of(renormalize=False)


def _parameters(trial: Trial) -> tuple[str, ...]:
    return trial.kernel.fit(trial.contract, trial.dtype, _constants(trial))


def _has_few_blocks(trial: Trial) -> bool:
    grid, *_ = _launch(trial, L)
    return math.prod(grid) * MOST_TOKENS < L


def _fewer_tokens(trial: Trial) -> tuple[int, int]:
    """Two numbers of tokens of which the last block has as many, and as many elements, as of L."""
    _, block, _ = _launch(trial, L)
    step = math.lcm(math.prod(block), MOST_TOKENS)
    return L % step + step, L % step + 2 * step


def _run(trial: Trial, tokens: int) -> np.ndarray:
    """The output of the first and of the last token, as the first and the last block leave it."""
    kernel = trial.kernel
    if not isinstance(kernel, CudaKernel):
        raise TypeError(f"{kernel.label} is of no .cu file")
    given = _given(trial.dtype, tokens)
    names = _parameters(trial)
    chosen = Launch(kernel.name, _first_and_last, {name: given[name] for name in names if name in given}, {})
    executor = SparseExecutor(chosen)
    arrays = {name: executor.empty(shape, dtype_of(name, trial.dtype)) for name, shape in _shapes(tokens).items()}
    module = executor.load(kernel.file, text=kernel.text, **_constants(trial))
    arguments: dict[str, Any] = {name: (arrays | _sizes(tokens))[name] for name in names}
    module.launch(kernel.name, *_launch(trial, tokens), **arguments)
    return arrays["out"][[0, tokens - 1]]


def _first_and_last(grid: Size) -> list[Size]:
    x, y, z = grid
    return sorted({(0, 0, 0), (x - 1, y - 1, z - 1)})


def _shapes(tokens: int) -> dict[str, tuple[int, ...]]:
    return {
        "y": (tokens * k, d),
        "gates": (tokens, k),
        "out": (tokens, d),
        "expert_token_indices": (tokens * k,),
        "token_expert_indices": (tokens * k,),
        "token_index_map": (tokens * k,),
        "expert_token_offsets": (k + 1,),
    }


def _values(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows (2, k, d) and the gates (2, k) of the first and the last token."""
    return values(2, k, d, dtype=dtype), values(2, k)


def _given(dtype: str, num_tokens: int) -> dict[str, list]:
    """Return the contents of the arrays."""
    rows, gates = _values(dtype)
    tokens = np.arange(num_tokens, dtype=np.int32)
    y: list[tuple[Any, Any]] = [(ALL, ZEROS)]
    out, weights = y.copy(), y.copy()
    for i, token in enumerate((0, num_tokens - 1)):
        y += [(np.s_[token + j * num_tokens : token + j * num_tokens + 1], rows[i, j]) for j in range(k)]
        weights.append((np.s_[token : token + 1], gates[i]))
        out.append((np.s_[token : token + 1], poison(np.empty((), rows.dtype))))
    return {
        "y": y,
        "gates": weights,
        "out": out,
        "expert_token_indices": [(ALL, np.tile(tokens, k))],
        "token_expert_indices": [(ALL, np.tile(np.arange(k, dtype=np.int32), num_tokens))],
        "token_index_map": [(ALL, (tokens[:, None] + num_tokens * np.arange(k, dtype=np.int32)).ravel())],
        "expert_token_offsets": [(ALL, num_tokens * np.arange(k + 1))],
    }


def _wrong(token: int, must_write: np.ndarray, out: np.ndarray, expected: np.ndarray) -> str:
    """Return what is wrong in a token's elements, which two blocks have or must have written, or an empty text."""
    written = ~never_written(out)
    missing = must_write & ~written
    if missing.any():
        return f"out[{token}, {np.argmax(missing)}] is never written, as it is with fewer tokens"
    if not written.any() or error(out[written], expected[written]) <= BOUNDS[str(out.dtype)]:
        return ""
    column = int(np.argmax(np.abs(np.where(written, out.astype(np.float64) - expected, 0.0))))
    return f"out[{token}, {column}] is {float(out[column]):.7g}, but must be {expected[column]:.7g}"
