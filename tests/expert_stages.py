"""The expert stages of every backend: run a version on a case, compare it with the oracle, plant a fault in its text.

``numpy`` and ``numba`` stand among the versions for these backends, which have no versions of their own.
"""

import itertools
from contextlib import nullcontext
from functools import cache, lru_cache, partial

import numpy as np
import pytest
import torch
from planted import Planted, Quick, numba_with_fault, opened_numba, opened_raw, stage_module

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import combine, expert_down, expert_up, gemm, tiles
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.nn import oracle
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case

STAGES = {"expert_up": expert_up, "expert_down": expert_down, "combine": combine}
PRODUCTS = ("expert_up", "expert_down")
VERSIONS = {stage: getattr(module, "FORWARD_VERSIONS", module.VERSIONS) for stage, module in STAGES.items()}
EVERY = [
    (stage, version, dtype)
    for stage, versions in VERSIONS.items()
    for version, able in versions.items()
    for dtype in able
]
NUMPY = [(stage, "numpy", dtype) for stage in STAGES for dtype in ("float32", "float64")]
NUMBA = [(stage, "numba", "float32") for stage in ("activation", *STAGES)]
RAGGED = make_case(137, 24, 72, 5, 3, "zipf", "no tile divides it")
IN_PARTS_SIZES = 70, 304, 16, 3, 2
IN_PARTS = make_case(*IN_PARTS_SIZES)
SMALL = tiles.MmaTile(64, 128, 32, 3, 32, 64, band=3)  # of which RAGGED has several, and bands that do not fill up
SEVERAL_TILES = make_case(333, 136, 264, 5, 2, "empty", "several tiles of the Hopper kernels, two experts without rows")
DEEP = make_case(150, 328, 136, 3, 2, "empty", "more steps than a ring has stages")
SEVERAL_TURNS = make_case(21, 264, 8, 7, 6, "zipf")  # of packs and of rows in flight, where a token's rows are summed

HARD = [
    make_case(1, 8, 16, 4, 2, name="one token"),
    make_case(9, 8, 16, 4, 4, name="k = E"),
    make_case(150, 16, 8, 5, 1, "hot", "one expert gets all"),
    make_case(41, 8, 16, 8, 2, "empty", "empty experts"),
    make_case(0, 8, 16, 4, 2, name="no tokens"),
    make_case(40, 8, 8, 70, 8, name="more experts than a warp"),
]


@cache
def ragged(version):
    """A case that no tile of a version divides; Numba's simulator takes a small one."""
    if version != "numba":
        return RAGGED
    from moeblaze_ref.backends.numba_cuda import runtime

    return make_case(*((1027, 97, 203, 7, 3, "zipf") if runtime.EXECUTOR == "cuda" else (13, 7, 6, 3, 2)))


def blocks_that_stay(blocks, seed):
    """An executor of a device with so many multiprocessors, each of which keeps a block of 7_persistent."""
    executor = SimtExecutor(seed=seed)
    executor.multiprocessors = blocks
    return executor


def dtypes_of(stage, version):
    return ("float32",) if version in BACKENDS else VERSIONS[stage][version]


def dispatch_of(case):
    return build_by_sort(case.topk_experts, case.E)


def on(stage, version, executor):
    """The stage as numpy functions on an executor. That of numpy and Numba is None, or a stage in place of theirs."""
    if version == "numpy":
        return executor or BACKENDS["numpy"].open(stage)
    if version == "numba":
        return executor or opened_numba(stage_module("numba", stage))
    return opened_raw(STAGES[stage], executor, version)


def quick(version, seed=0):
    """An executor for tests that ask for results alone."""
    return None if version in BACKENDS else Quick(seed=seed)


def run_act(stage, case):
    """The activation of a alone."""
    return {"forward": {"act": stage.act(comparisons.hidden(case)[0], case.activation)}}


def expect_act(case, dtype):
    """Expected results of `run_act`."""
    a = torch.tensor(comparisons.hidden(case)[0], dtype=dtype)
    return {"forward": {"act": oracle.activate(a, None, case.activation).numpy()}}


# What the teaching versions have: the forward alone.
RUN = comparisons.RUN | {"activation": run_act} | dict.fromkeys(gemm.TEACHING, comparisons.run_forward)
EXPECT = comparisons.EXPECT | {"activation": expect_act} | dict.fromkeys(gemm.TEACHING, comparisons.expect_forward)


def run(stage, version, executor, case):
    """Results of a version on a given executor."""
    return run_opened(on(stage, version, executor), stage, version, case)


def run_opened(opened, stage, version, case):
    """Results of a version that is open."""
    return RUN.get(version, RUN[stage])(opened, case)


@lru_cache(maxsize=16)
def rounded(case, dtype):
    """The case in a dtype: one for all versions and faults, which read it alone."""
    return case.astype(dtype)


@lru_cache(maxsize=64)
def wanted(stage, version, case, dtype):
    """Exact results of the rounded case, and those of torch in its dtype."""
    expect = EXPECT.get(version, EXPECT[stage])
    return tuple(expect(rounded(case, dtype), t) for t in (torch.float64, getattr(torch, dtype)))


def verdict(found, direction, stage, version, case, dtype):
    """(error, bound) of what a version returns in one direction."""
    exact, baseline = (results[direction] for results in wanted(stage, version, case, dtype))
    assert found.keys() == exact.keys()
    dtypes = {np.dtype(dtype), np.dtype("float32")}  # of gates and their gradients
    assert {array.dtype for array in found.values()} <= dtypes
    return comparisons.compare(found, exact, comparisons.precision(stage, version, dtype), baseline)


def verdicts(stage, version, case, dtype, executor=None):
    """{direction: (error, bound)} of a version on a case in a dtype."""
    return verdicts_of(on(stage, version, executor or quick(version)), stage, version, case, dtype)


def verdicts_of(opened, stage, version, case, dtype):
    """The same of a version that is open."""
    found = run_opened(opened, stage, version, rounded(case, dtype))
    directions = wanted(stage, version, case, dtype)[0]
    return {d: verdict(found[d], d, stage, version, case, dtype) for d in directions}


def assert_right(*arguments, **options):
    for direction, (error, bound) in verdicts(*arguments, **options).items():
        assert error <= bound, direction


def assert_same_bits(found, expected):
    """Equal arrays in each direction."""
    for direction in expected:
        for name, array in expected[direction].items():
            np.testing.assert_array_equal(found[direction][name], array, err_msg=name)


# ---- what the headers of the raw kernels mean for a case -----------------------------------------


def counted(stage, version, case):
    """The launches of a stage's forward and backward."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        run(stage, version, executor, case)
    return launches


def header_symbols(version, case, tile=None):
    """What the formulas of a header mean for a case."""
    offsets = dispatch_of(case).expert_token_offsets
    lengths = np.diff(offsets)
    d, h = case.weights.w1.shape[1:]
    rows, columns = {"2_tiled": (64, 64), "7_persistent": (128, 256)}.get(version, (1, 64))
    s, G = np.dtype(case.x.dtype).itemsize, 1 + is_gated(case.activation)
    symbols = {
        **{"L": case.L, "d": d, "h": h, "E": case.E, "k": case.k, "R": case.L * case.k, "THREADS": 256},
        **{"s": s, "G": G, "P": 1, "Y": 1, "U": 0},
        **{"C": -(-h // columns), "D": -(-d // columns), "W": -(-d // 128)},
    }
    if version in gemm.TEACHING:
        tile = tiles.FIXED[version]
        rows = tile.rows
        symbols |= tile.constants(s) | {"C": -(-G * h // tile.columns)}
    elif "mma" in version:
        tile = tile or tiles.DEFAULTS[version]
        rows, columns = tile.rows, tile.columns
        symbols |= tile.symbols(s, d, h, G)
    return symbols | {
        **{
            "tiles": int((-(-lengths // rows)).sum()),
            "terms": h if version == "1_naive" else -(-h // columns),
            "more": 0,
        },
        **{"X": int((lengths > 0).sum()), "boxes": rows_in_boxes(offsets, rows)},
    }


def rows_in_boxes(offsets, height):
    """Rows that boxes of this height find in the whole matrix, one from the first row of each tile on."""
    begins = [begin for first, end in itertools.pairwise(offsets) for begin in range(first, end, height)]
    return sum(min(height, int(offsets[-1]) - begin) for begin in begins)


# ---- planted faults ------------------------------------------------------------------------------


def planted(stage, version, right, wrong, **constants):
    """An executor of a version's kernel file with a fault in its text, or such a stage of the Numba kernels."""
    if version == "numba":
        return numba_with_fault(stage, right, wrong)
    executor = Planted(gemm.file_of(stage, version), right, wrong, seed=3, **constants)
    executor.multiprocessors = 2  # so that a block of 7_persistent has several tiles
    return executor


# What shows a fault, beside RAGGED; and the version that launches the kernels of a file.
SHOWN_BY = {"sum_rows": SEVERAL_TURNS, "2_vector": SEVERAL_TURNS, gemm.HOPPER: SEVERAL_TILES}
SHOWN_BY |= dict.fromkeys(gemm.TEACHING, DEEP)
LAUNCHED_BY = {"gates": "1_naive", "sum_rows": "2_tiled"}


class WrongForwardError(Exception):
    """What a forward returned exceeds its bound."""


class StopsWhenWrong:
    """A stage that is open, up to a forward with a wrong result: no backward need be run to see the fault."""

    def __init__(self, opened, *what):
        self.opened, self.what = opened, what

    def forward(self, *arguments, **options):
        returned = self.opened.forward(*arguments, **options)
        results = [array for array in (returned if isinstance(returned, tuple) else (returned,)) if array is not None]
        names = wanted(*self.what)[0]["forward"]
        error, bound = verdict(dict(zip(names, results, strict=True)), "forward", *self.what)
        if not error <= bound:
            raise WrongForwardError
        return returned

    def __getattr__(self, name):
        return getattr(self.opened, name)


def assert_caught(stage, file, change, case=None, dtype=None, version=None, **constants):
    """A kernel stops, the next one's check finds no number in what this one left, or an error exceeds its bound."""
    version = version or LAUNCHED_BY.get(file, file)
    dtype = dtype or dtypes_of(stage, version)[0]
    what = stage, version, case or SHOWN_BY.get(file, ragged(version)), dtype
    faulty = StopsWhenWrong(on(stage, version, planted(stage, file, *change, **constants)), *what)
    try:
        with tiles.trying(SMALL) if "mma" in version and version in tiles.CANDIDATES else nullcontext():
            errors = verdicts_of(faulty, *what)
    except (KernelFault, WrongForwardError):
        return
    except ValueError as refused:
        assert "is nan, but" in str(refused)
        return
    assert any(not error <= bound for error, bound in errors.values()), f"no error exceeds its bound: {errors}"


def every_fault(faults):
    """Parameters of a test that tries every fault of {file: {name: (right, wrong)}}."""
    parameters = [
        pytest.param(file, change, id=f"{file if file == 'numba' else f'simt {file}'}: {name}")
        for file, of_file in faults.items()
        for name, change in of_file.items()
    ]
    return pytest.mark.parametrize(("file", "change"), parameters)


# ---- wrong operands ------------------------------------------------------------------------------


def refusals(stage, operands, wrong):
    """Parameters of a test that a call raises: every wrong operand in each function that has it, in each backend.

    Parameters
    ----------
    operands : dict
        {function: its right operands by name}; they are float32, which every backend takes.
    wrong : list of tuple
        (wrong operands by name, error, message), and the backends if they are not all. Numba refuses float64, too.
    """
    for change, *_ in wrong:
        assert any(change.keys() <= right.keys() for right in operands.values()), change
    attempts = [
        (backend, function, right | change, error, message)
        for change, error, message, *only in wrong
        for function, right in operands.items()
        if change.keys() <= right.keys()
        for backend in (*only, ("numpy", "numba", "simt"))[0]
    ]
    no_float64 = TypeError, "has dtype float64, but it must be float32"
    attempts += [("numba", function, wide(right), *no_float64) for function, right in operands.items()]
    parameters = [
        pytest.param(partial(call, backend, stage, function, given), *refusal, id=f"{backend} {function}")
        for backend, function, given, *refusal in attempts
    ]
    return pytest.mark.parametrize(("refused", "error", "message"), parameters)


def call(backend, stage, function, operands):
    """A function of a stage, or of the activation."""
    return getattr(stage_module(backend, stage), function)(**operands)


def wide(operands):
    """Operands by name, their arrays of floats as float64."""
    return {name: as_float64(value) for name, value in operands.items()}


def as_float64(value):
    return value.astype(np.float64) if isinstance(value, np.ndarray) else value
