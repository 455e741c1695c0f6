"""The gate-weighted sum of each token's expert outputs: a loop over slots, autograd, sums in parts, atomics, faults."""

import numpy as np
import pytest
import torch
from expert_stages import (
    RAGGED,
    assert_caught,
    assert_right,
    dispatch_of,
    every_fault,
    header_symbols,
    refusals,
    run,
)
from headers import assert_as_stated, stated
from helpers import RAGGED as RAGGED_SHAPE
from helpers import SHAPES
from planted import Quick

from moeblaze_ref.backends.numpy_ref import combine as stage
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import combine, expert_up, gemm
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case, relative_error


def make_inputs(shape):
    """y, gates and the Dispatch of a random choice with the shape's routing."""
    rng = np.random.default_rng(4)
    dispatch = build_by_sort(shape.topk_experts(), shape.E)
    y, gates = rng.standard_normal((dispatch.R, shape.d)), rng.uniform(0.1, 1.0, (shape.L, shape.k))
    return y, gates, dispatch


def token_and_gate(gates, dispatch):
    """The token (R,) and the gate (R,) of every row in expert order, found by walking the experts' groups."""
    tokens, row_gates = [], []
    for position, token in enumerate(dispatch.expert_token_indices):
        expert = np.searchsorted(dispatch.expert_token_offsets, position, side="right") - 1
        chosen = dispatch.token_expert_indices[token * dispatch.k : (token + 1) * dispatch.k]
        tokens.append(token)
        row_gates.append(gates[token, np.flatnonzero(chosen == expert)[0]])
    return np.array(tokens), np.array(row_gates)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_sums_every_row_into_its_token(shape):
    y, gates, dispatch = make_inputs(shape)
    truth = np.zeros((shape.L, shape.d))
    tokens, row_gates = token_and_gate(gates, dispatch)
    np.add.at(truth, tokens, row_gates[:, None] * y)
    assert relative_error(stage.forward(y, gates, dispatch), truth) < 1e-14


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_agrees_with_autograd(shape):
    y, gates, dispatch = make_inputs(shape)
    d_out = np.random.default_rng(5).standard_normal((shape.L, shape.d))
    ty, tgates = (torch.tensor(t, requires_grad=True) for t in (y, gates))
    slots = torch.tensor(dispatch.token_index_map.reshape(gates.shape)).long()
    (tgates[..., None] * ty[slots]).sum(dim=1).backward(torch.tensor(d_out))
    d_y, d_gates = stage.backward(d_out, y, gates, dispatch)
    assert relative_error(d_y, ty.grad) < 1e-14
    assert relative_error(d_gates, tgates.grad) < 1e-14


def test_float32_stays_float32_and_near():
    y, gates, dispatch = make_inputs(RAGGED_SHAPE)
    narrow = y.astype(np.float32), gates.astype(np.float32)
    truth = stage.forward(*(t.astype(np.float64) for t in narrow), dispatch)
    out = stage.forward(*narrow, dispatch)
    assert out.dtype == np.float32 and relative_error(out, truth) < 1e-6


# ---- the raw kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 3, 34, 100, 264])  # packs of 1, 1, 2, 4 and 8 narrow elements
@pytest.mark.parametrize("dtype", gemm.WIDE)
def test_simt_sums_the_rows_of_a_token_at_every_width(d, dtype):
    case = make_case(21, d, 8, 7, 6, "zipf")
    assert_right("combine", "2_vector", case, dtype)
    assert_right("expert_up", "2_tiled", case, dtype)
    rounded = case.astype(dtype)
    first, second = (run("combine", version, Quick(), rounded) for version in combine.VERSIONS)
    np.testing.assert_array_equal(first["forward"]["out"], second["forward"]["out"])


def test_simt_refuses_a_token_of_more_slots_than_lanes():
    case = make_case(3, 8, 8, 40, 33).astype("float32")
    dispatch, (_, w1, w2, _) = dispatch_of(case), case.weights
    rows = np.ones((dispatch.R, 8), np.float32)
    with pytest.raises(ValueError, match="dispatch.k is 33, but it must be 1..32"):
        combine.forward(rows, np.ones((3, 33), np.float32), dispatch)
    with pytest.raises(ValueError, match="dispatch.k is 33, but it must be 1..32"):
        expert_up.input_gradient(rows, rows, w1, w2, dispatch)


def parts_of_combine(widths=(4, 12), dtypes=("float32", "float32")):
    """Parts of y, the gates and the Dispatch of a small case."""
    case = RAGGED.astype("float32")
    dispatch = dispatch_of(case)
    rng = np.random.default_rng(0)
    parts = tuple(
        rng.standard_normal((dispatch.R, width)).astype(dtype) for width, dtype in zip(widths, dtypes, strict=False)
    )
    return parts, comparisons.gates_of(case), dispatch


@pytest.mark.parametrize("widths", [(4, 12), (0, 8), (8, 0), (3, 5)])
def test_a_combine_in_parts_has_the_bits_of_the_whole_on_simt(widths):
    parts, gates, dispatch = parts_of_combine(widths)
    y, executor = np.concatenate(parts, axis=1), Quick()
    np.testing.assert_array_equal(
        combine.forward_in_parts(parts, gates, dispatch, executor=executor),
        combine.forward(y, gates, dispatch, executor=executor),
    )
    ones = np.ones_like(gates)
    np.testing.assert_array_equal(
        combine.forward_in_parts(parts, None, dispatch, executor=executor),
        combine.forward(y, ones, dispatch, executor=executor),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"parts": ()}, ValueError, "parts is empty, but it must have at least one array"),
        ({"parts": parts_of_combine(dtypes=("float32", "float16"))[0]}, TypeError, r"parts\[1\] has dtype float16"),
        ({"parts": (np.ones((5, 8), np.float32),)}, ValueError, r"parts\[0\] has shape \(5, 8\)"),
        ({"gates": np.ones((2, 2), np.float32)}, ValueError, "gates has shape"),
        ({"dispatch": None}, TypeError, "dispatch is None"),
        ({"version": "1_gather"}, ValueError, "unknown version of combine in parts '1_gather'"),
    ],
)
def test_a_combine_in_parts_of_wrong_operands_raises_on_simt(change, error, message):
    parts, gates, dispatch = parts_of_combine()
    with pytest.raises(error, match=message):
        combine.forward_in_parts(**{"parts": parts, "gates": gates, "dispatch": dispatch} | change)


def scattered(case, **options):
    """(out by atomics, out by gathering, the launches of the first)."""
    executor = SimtExecutor(workers=1, **options)
    y = np.random.default_rng(0).standard_normal((case.L * case.k, case.x.shape[1])).astype(np.float32)
    gates = np.random.default_rng(1).random((case.L, case.k), np.float32)
    dispatch = dispatch_of(case)
    with executor.recording() as launches:
        found = combine.scatter(y, gates, dispatch, executor=executor)
    return found, combine.forward(y, gates, dispatch, executor=executor), launches


def test_atomic_additions_on_simt_are_right_but_their_bits_depend_on_the_order_of_threads():
    outputs = []
    for seed in range(6):
        out, gathered, _ = scattered(RAGGED, seed=seed)
        assert relative_error(out, gathered) <= comparisons.BOUNDS["float32"]
        outputs.append(out.tobytes())
    assert len(set(outputs)) > 1
    assert len({scattered(RAGGED, seed=seed)[1].tobytes() for seed in range(6)}) == 1


def test_atomic_additions_on_simt_ask_for_what_the_header_states():
    _, _, launches = scattered(RAGGED)
    assert_as_stated(*launches, stated("combine/lesson_atomic.cu"), header_symbols("1_gather", RAGGED))


# ---- wrong operands ------------------------------------------------------------------------------

Y, GATES, DISPATCH = make_inputs(RAGGED_SHAPE)
Y, GATES = Y.astype(np.float32), GATES.astype(np.float32)
D_OUT = np.ones((RAGGED_SHAPE.L, RAGGED_SHAPE.d), np.float32)
OPERANDS = {
    "forward": dict(y=Y, gates=GATES, dispatch=DISPATCH),
    "backward": dict(d_out=D_OUT, y=Y, gates=GATES, dispatch=DISPATCH),
}
WRONG = [
    (dict(y=Y[:-1]), ValueError, r"y has shape \(110, 12\), but it must be \(R=111, d\)"),
    (dict(y=np.full_like(Y, np.nan)), ValueError, r"y\[0, 0\] is nan"),
    (dict(y=Y.astype(np.float16)), TypeError, "y has dtype float16", ("numpy", "numba")),
    (dict(y=Y[:, 0]), ValueError, "must have 2 dimensions"),
    (dict(gates=GATES[:, :2]), ValueError, r"gates has shape \(37, 2\), but it must be \(L=37, k=3\)"),
    (dict(gates=GATES.astype(np.float64)), TypeError, "gates has dtype float64, but it must be float32"),
    (dict(gates=np.full_like(GATES, np.inf)), ValueError, r"gates\[0, 0\] is inf"),
    (dict(dispatch="sorted"), TypeError, "dispatch is a str, but it must be a Dispatch"),
    (dict(dispatch=None), TypeError, "dispatch is None, but it must be a Dispatch"),
    (dict(d_out=D_OUT[:-1]), ValueError, r"d_out has shape \(36, 12\), but it must be \(L=37, d=12\)"),
    (dict(d_out=D_OUT[:, 1:]), ValueError, r"d_out has shape \(37, 11\)"),
    (dict(d_out=np.full_like(D_OUT, np.nan)), ValueError, r"d_out\[0, 0\] is nan"),
]


@refusals("combine", OPERANDS, WRONG)
def test_wrong_operands_are_refused(refused, error, message):
    with pytest.raises(error, match=message):
        refused()


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = {
    "numba": {
        "combine: gate left out": ("gates[token, j] * y[", "y["),
        "combine: last slot dropped": ("for j in range(k):", "for j in range(k - 1):"),
        "combine: rows in token order": ("y[token_index_map[token * k + j], column]", "y[token * k + j, column]"),
        "combine: last token dropped": ("if token < num_tokens:", "if token < num_tokens - 1:"),
        "d_y: gate left out": ("gates[token, j] * d_out[token, column]", "d_out[token, column]"),
        "d_y: rows in token order": ("d_y[token_index_map[slot], column]", "d_y[slot, column]"),
        "d_gates: rows in token order": ("slot // k, token_index_map[slot]", "slot // k, slot"),
        "d_gates: last column dropped": ("for column in range(y.shape[1]):", "for column in range(y.shape[1] - 1):"),
    },
    "1_gather": {
        "unscaled gate": ("sum += gates[slot] * to_float(", "sum += to_float("),
        "one slot": ("for (int j = 0; j < k; ++j)", "for (int j = 0; j < 1; ++j)"),
        "zeros": ("out[index] = from_float<Scalar>(sum);", "out[index] = from_float<Scalar>(0.0f);"),
        "d_y unscaled": ("gates[slot] * to_float(d_out[", "to_float(d_out["),
    },
    "2_vector": {
        "unscaled gate": ("return gates[slot];", "return 1.0f;"),
        "last token": ("token >= L", "token >= L - 1"),
        "first rows alone": ("first < k; first", "first < min(k, IN_FLIGHT); first"),
        "first columns alone": ("first_column < d;", "first_column < WARP * PACK;"),
        "rows in the order of slots": ("has_slot ? token_index_map[slot] :", "has_slot ? int(slot) :"),
        "one weight for several rows": ("weight_of_lane, first + i)", "weight_of_lane, first)"),
        "past the row": ("if (column < d) {", "if (column <= d) {"),
    },
}


@every_fault(FAULTS)
def test_a_planted_fault_is_caught(file, change):
    assert_caught("combine", file, change)


@pytest.mark.parametrize(
    ("stage", "file"),
    [("expert_up", "1_naive"), ("expert_down", "1_naive"), ("combine", "1_gather"), ("combine", "2_vector")],
)
def test_a_kernel_without_a_fault_is_not_caught(stage, file):
    """Its forward is not taken for a wrong one, after which no backward runs, and its backward is right."""
    with pytest.raises(AssertionError, match="no error exceeds its bound"):
        assert_caught(stage, file, ('extern "C"', 'extern  "C"'))
