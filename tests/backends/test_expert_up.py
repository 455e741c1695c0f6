"""The up-projection and its gradients: torch row by row, no buffer of routed rows, faults, wrong operands."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from expert_stages import (
    IN_PARTS,
    IN_PARTS_SIZES,
    RAGGED,
    SEVERAL_TILES,
    assert_caught,
    assert_same_bits,
    counted,
    dispatch_of,
    every_fault,
    header_symbols,
    on,
    refusals,
    run,
)
from headers import assert_as_stated, evaluate, stated
from helpers import RAGGED as RAGGED_SHAPE
from helpers import SHAPES
from planted import Quick

from moeblaze_ref.backends.numpy_ref import expert_up as stage
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import expert_down, expert_up, gemm, layer, tiles
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.nn.activations import ACTIVATION
from moeblaze_ref.runtime.simt.executor import SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case, random_topk, relative_error


def make_inputs(shape, activation="swiglu"):
    """x, w1, w2 and the Dispatch of a random choice with the shape's routing."""
    case = shape.case(activation)
    dispatch = build_by_sort(shape.topk_experts(), shape.E)
    return case.x, case.weights.w1, case.weights.w2, dispatch


def torch_up(x, w1, w2, dispatch, activation):
    """a, b, y_swi in torch with one matrix per routed row, and the leaves that collect gradients."""
    leaves = [None if t is None else torch.tensor(t, requires_grad=True) for t in (x, w1, w2)]
    tx, tw1, tw2 = leaves
    slot = torch.tensor(dispatch.token_index_map.argsort())  # (R,) which (token, j) each position holds
    expert = torch.tensor(dispatch.token_expert_indices).long()[slot]
    routed = tx[slot // dispatch.k]
    a = torch.einsum("rd,rdh->rh", routed, tw1[expert])
    b = None if tw2 is None else torch.einsum("rd,rdh->rh", routed, tw2[expert])
    y_swi = ACTIVATION[activation](a)
    return a, b, y_swi if b is None else y_swi * b, leaves


def backward(d_a, d_b, x, w1, w2, dispatch):
    """d_x, d_w1 and d_w2, as the layer asks for them."""
    d_w1, d_w2 = (None if d is None else stage.weight_gradient(d, x, dispatch) for d in (d_a, d_b))
    return stage.input_gradient(d_a, d_b, w1, w2, dispatch), d_w1, d_w2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_agrees_with_torch(shape, activation):
    x, w1, w2, dispatch = make_inputs(shape, activation)
    a, b, y_swi = stage.forward(x, w1, w2, dispatch, activation)
    ta, tb, ty, leaves = torch_up(x, w1, w2, dispatch, activation)
    d_a, d_b = np.random.default_rng(1).standard_normal((2, dispatch.R, shape.h))
    ta.backward(torch.tensor(d_a), retain_graph=True)
    results, truths = [a, y_swi], [ta.detach(), ty.detach()]
    if is_gated(activation):
        tb.backward(torch.tensor(d_b))
        results.append(b)
        truths.append(tb.detach())
    else:
        assert b is None
        d_b = None
    gradients = backward(d_a, d_b, x, w1, w2, dispatch)
    assert (gradients[2] is None) == (w2 is None)
    results += [g for g in gradients if g is not None]
    truths += [leaf.grad for leaf in leaves if leaf is not None]
    for result, truth in zip(results, truths, strict=True):
        assert relative_error(result, truth) < 1e-12


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_tokens(activation):
    shape = RAGGED_SHAPE._replace(L=0)
    x, w1, w2, dispatch = make_inputs(shape, activation)
    a, b, y_swi = stage.forward(x, w1, w2, dispatch, activation)
    assert a.shape == y_swi.shape == (0, shape.h)
    d_x, d_w1, _ = backward(a, b, x, w1, w2, dispatch)
    assert d_x.shape == (0, shape.d) and d_w1.shape == w1.shape and not d_w1.any()


def test_an_expert_without_tokens_gets_zero_gradients():
    shape = RAGGED_SHAPE._replace(k=2, routing="empty")
    x, w1, w2, dispatch = make_inputs(shape)
    a, b, _ = stage.forward(x, w1, w2, dispatch, "swiglu")
    _, d_w1, d_w2 = backward(a, b, x, w1, w2, dispatch)
    assert not d_w1[:2].any() and not d_w2[:2].any()
    assert all(d_w1[e].any() and d_w2[e].any() for e in range(2, shape.E))


def test_no_buffer_of_routed_rows():
    """With wide rows, all that either pass allocates stays below half of one (R, d) array."""
    L, d, h, E, k = 1024, 256, 2, 16, 4
    rng = np.random.default_rng(0)
    x, (w1, w2) = rng.standard_normal((L, d)), rng.standard_normal((2, E, d, h))
    dispatch = build_by_sort(random_topk(L, E, k), E)
    tracemalloc.start()
    try:
        a, b, _ = stage.forward(x, w1, w2, dispatch, "swiglu")
        forward_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        backward(a, b, x, w1, w2, dispatch)
        backward_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    routed_bytes = L * k * d * x.itemsize
    assert 0 < forward_peak < routed_bytes / 2
    assert 0 < backward_peak < routed_bytes / 2


# ---- the raw kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gemm.NARROW)
@pytest.mark.parametrize("version", gemm.TEACHING)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_teaching_versions_have_the_bits_of_the_hopper_kernel(version, dtype, activation):
    """Each result is the same chain of products, 16 of the depth at a time."""
    case = make_case(150, 328, 264, 3, 2, "empty", activation=activation).astype(dtype)
    found = run("expert_up", version, Quick(seed=2), case)
    expected = comparisons.run_forward(on("expert_up", gemm.HOPPER, Quick(seed=2)), case)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_what_a_teaching_version_stores_depends_on_no_policy(version):
    case = RAGGED.astype("bfloat16")
    arguments = case.x, *case.weights[1:3], dispatch_of(case), case.activation
    whole = expert_up.forward(*arguments, executor=Quick(), version=version)
    for stores in (("a",), ("y_swi",)):
        part = expert_up.forward(*arguments, stores, executor=Quick(), version=version)
        kept = [array is not None for array in part]
        assert kept == ([True, True, False] if stores == ("a",) else [False, False, True])
        for found, expected in zip(part, whole, strict=True):
            assert found is None or np.array_equal(found, expected)


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_a_teaching_version_has_no_backward(version):
    case = RAGGED.astype("bfloat16")
    dispatch, (d_a, d_b) = dispatch_of(case), comparisons.d_hidden(case)
    with pytest.raises(ValueError, match=f"unknown version of expert_up '{version}'"):
        expert_up.input_gradient(d_a, d_b, *case.weights[1:3], dispatch, version=version)
    with pytest.raises(ValueError, match=f"unknown version of expert_up '{version}'"):
        expert_up.weight_gradient(d_a, case.x, dispatch, version=version)
    assert version not in layer.VERSIONS and version not in expert_down.VERSIONS


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_the_teaching_versions_launch_what_their_headers_state(version):
    case = SEVERAL_TILES.astype("float16")
    (launch,), symbols = counted("expert_up", version, case), header_symbols(version, case)
    headers = stated(f"expert_up/{version}.cu")
    assert_as_stated(launch, headers, symbols)
    assert launch.block == (tiles.FIXED[version].threads, 1, 1)
    constants = gemm.constants("float16", "swiglu", tiles.FIXED[version])
    static = _static_shared_bytes(KernelSource.read(f"expert_up/{version}.cu", constants), "expert_up")
    assert 0 <= static + tiles.FIXED[version].shared_bytes - evaluate(headers["expert_up"].shared, symbols) < 16
    assert launch.shared.bank_conflicts == 0


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("dtype", gemm.NARROW)
def test_d_x_in_parts_of_its_columns_is_the_same_from_half_the_rows(dtype, activation, monkeypatch):
    case = make_case(*IN_PARTS_SIZES, activation=activation).astype(dtype)
    assert gemm.parts_of_rows("7_persistent", case.L * case.k, 304, 16) == [(0, 304)]  # too few rows
    whole = run("expert_up", "7_persistent", Quick(), case)
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    executor = SimtExecutor(seed=1)
    with executor.recording() as launches:
        parts = run("expert_up", "7_persistent", executor, case)
    assert_same_bits(parts, whole)
    headers = stated("expert_up/7_persistent.cu") | stated("expert_up/sum_rows.cu")
    launches = [launch for launch in launches if launch.kernel in ("d_x_rows", "sum_rows")]
    assert [launch.kernel for launch in launches] == ["d_x_rows", "sum_rows"] * 2
    for launch, width in zip(launches, (256, 256, 48, 48), strict=True):
        symbols = header_symbols("7_persistent", case) | {"d": width, "D": 1}
        assert_as_stated(launch, headers, symbols)
        rows = launch.buffers["rows"]
        assert rows.read_bytes + rows.written_bytes == 2 * case.L * case.k * width


@pytest.mark.parametrize(
    ("version", "sizes", "parts"),
    [
        ("7_persistent", (2**18, 2048, 768), [(0, 1024), (1024, 1024)]),  # qwen3
        ("7_persistent", (2**18, 1536, 256), [(0, 768), (768, 768)]),
        ("7_persistent", (2**18, 1280, 256), [(0, 768), (768, 512)]),  # whole tiles
        ("7_persistent", (2**18, 1024, 4096), [(0, 1024)]),  # no wider than a and b
        ("7_persistent", (2**18, 256, 64), [(0, 256)]),  # one tile
        ("7_persistent", (2**14, 2048, 768), [(0, 2048)]),  # few rows
        ("3_mma", (2**18, 2048, 768), [(0, 2048)]),
        ("7_persistent", (0, 2048, 768), [(0, 2048)]),
    ],
)
def test_which_columns_of_the_rows_exist_together(version, sizes, parts):
    assert gemm.parts_of_rows(version, *sizes) == parts


@pytest.mark.parametrize("stores", [("a", "b"), ("y_swi",)], ids="+".join)
@pytest.mark.parametrize(("version", "dtype"), [(version, able[0]) for version, able in expert_up.VERSIONS.items()])
def test_the_up_projection_writes_what_the_policy_stores_and_nothing_else(version, dtype, stores):
    case, executor = RAGGED.astype(dtype), SimtExecutor()
    inputs = case.x, *case.weights[1:3], dispatch_of(case), case.activation
    everything = expert_up.forward(*inputs, executor=executor, version=version)
    with executor.recording() as launches:
        found = expert_up.forward(*inputs, stores=stores, executor=executor, version=version)
    for name, array, expected in zip(("a", "b", "y_swi"), found, everything, strict=True):
        assert (array is not None) == (name in stores)
        assert array is None or np.array_equal(array, expected)
    symbols = header_symbols(version, case) | {"P": int("a" in stores), "Y": int("y_swi" in stores)}
    assert_as_stated(*launches, stated(gemm.file_of("expert_up", version)), symbols)


def test_a_version_says_which_dtypes_and_widths_it_takes():
    case = make_case(5, 12, 16, 3, 2)
    dispatch, (_, w1, w2, _) = dispatch_of(case), case.astype("float32").weights
    x = case.x.astype("float32")
    with pytest.raises(TypeError, match="3_mma of expert_up computes in float16 or bfloat16, but x is float32"):
        expert_up.forward(x, w1, w2, dispatch, "swiglu", version="3_mma")
    narrow = [array.astype(ml_dtypes.bfloat16) for array in (x, w1, w2)]
    with pytest.raises(ValueError, match="d is 12, but 3_mma needs a multiple of 8; use 2_tiled"):
        expert_up.forward(*narrow, dispatch, "swiglu", version="3_mma")
    with pytest.raises(ValueError, match="unknown version of expert_up '2_tile'. Did you mean '2_tiled'"):
        expert_up.forward(x, w1, w2, dispatch, "swiglu", version="2_tile")
    with pytest.raises(TypeError, match="w1 has dtype float32, but it must be bfloat16"):
        expert_up.forward(narrow[0], w1, w2, dispatch, "swiglu")


# ---- wrong operands ------------------------------------------------------------------------------

X, W1, W2, DISPATCH = make_inputs(RAGGED_SHAPE)
X, W1, W2 = (array.astype(np.float32) for array in (X, W1, W2))
NAN_X = np.where(np.arange(X.size).reshape(X.shape) == 13, np.float32(np.nan), X)  # x[1, 1]
HIDDEN = np.ones((DISPATCH.R, RAGGED_SHAPE.h), np.float32)
NAN_HIDDEN = np.full_like(HIDDEN, np.nan)
OPERANDS = {
    "forward": dict(x=X, w1=W1, w2=W2, dispatch=DISPATCH, activation="swiglu"),
    "input_gradient": dict(d_a=HIDDEN, d_b=HIDDEN, w1=W1, w2=W2, dispatch=DISPATCH),
    "weight_gradient": dict(d_hidden=HIDDEN, x=X, dispatch=DISPATCH),
}


def damaged(field, change):
    """The Dispatch with a change of one field."""
    fields = DISPATCH.arrays() | {"k": DISPATCH.k}
    return dict(dispatch=type(DISPATCH)(**(fields | {field: change(fields[field])})))


WRONG = [
    (dict(x=X[:-1]), ValueError, r"x has shape \(36, 12\), but it must be \(L=37, d\)"),
    (dict(x=X[0]), ValueError, "x has shape .* 2 dimensions"),
    (dict(x=NAN_X), ValueError, r"x\[1, 1\] is nan"),
    (dict(x=X.astype(np.float16)), TypeError, "x has dtype float16", ("numpy", "numba")),
    (dict(w1=W1[:-1]), ValueError, r"w1 has shape \(4, 12, 20\), but it must be \(E=5, d(=12)?, h(=20)?\)"),
    (dict(w1=W1[..., 1:]), ValueError, r"w\d has shape \(5, 12, \d+\), but it must be \(E=5, d(=12)?, h=\d+\)"),
    (dict(w1=W1.astype(np.float64)), TypeError, "w1 has dtype float64, but it must be float32"),
    (dict(w2=W2[..., 1:]), ValueError, r"w2 has shape \(5, 12, 19\), but it must be \(E=5, d=12, h=20\)"),
    (dict(w2=np.full_like(W2, np.inf)), ValueError, r"w2\[0, 0, 0\] is inf"),
    (dict(dispatch=None), TypeError, "dispatch is None, but it must be a Dispatch"),
    (dict(activation="swigul"), ValueError, "Did you mean 'swiglu'"),
    (dict(activation="reglu", w2=None), ValueError, "w2 is None, but reglu is gated"),
    (dict(activation="relu2"), ValueError, "relu2 is not gated: w2 must be None"),
    (dict(d_b=None), ValueError, "d_b is None, but the layer is gated"),
    (dict(d_a=HIDDEN, w2=None), ValueError, "the layer is not gated: d_b must be None"),
    (dict(d_a=HIDDEN[1:]), ValueError, r"d_a has shape \(110, 20\), but it must be \(R=111, h\)"),
    (dict(d_b=HIDDEN[:, 1:]), ValueError, r"d_b has shape \(111, 19\), but it must be \(R=111, h=20\)"),
    (dict(d_b=HIDDEN.astype(np.float64)), TypeError, "d_b has dtype float64"),
    (dict(d_a=NAN_HIDDEN), ValueError, r"d_a\[0, 0\] is nan"),
    (dict(d_hidden=HIDDEN[1:]), ValueError, r"d_hidden has shape \(110, 20\), but it must be \(R=111, h\)"),
    (dict(d_hidden=HIDDEN.astype(np.float64)), TypeError, "d_hidden has dtype float64, but it must be float32"),
    (dict(d_hidden=NAN_HIDDEN), ValueError, r"d_hidden\[0, 0\] is nan"),
    *[
        (damaged(field, change), error, message)
        for field, change, error, message in [
            ("expert_token_indices", lambda v: v + 1, ValueError, r"but there are only 37 tokens \(valid: 0..36\)"),
            ("token_expert_indices", lambda v: v - 5, ValueError, "but there are only 5 experts"),
            ("token_index_map", lambda v: v - 1, ValueError, r"is -1, but there are only 111 routed rows"),
            ("token_index_map", lambda v: v[:-1], ValueError, r"token_index_map has shape \(110,\)"),
            ("expert_token_offsets", lambda v: v[::-1].copy(), ValueError, r"expert_token_offsets\[0\] is 111"),
            ("expert_token_offsets", lambda v: v[[0, 2, 1, 3, 4, 5]], ValueError, "offsets never decrease"),
            ("expert_token_offsets", lambda v: v[:1], ValueError, "expert_token_offsets, is 0"),
            ("token_index_map", lambda v: v.astype(np.int64), TypeError, "token_index_map has dtype int64"),
            ("k", lambda v: 2, ValueError, "must be a multiple of k = 2"),
            ("k", lambda v: 0, ValueError, "dispatch.k is 0"),
        ]
    ],
]


@refusals("expert_up", OPERANDS, WRONG)
def test_wrong_operands_are_refused(refused, error, message):
    with pytest.raises(error, match=message):
        refused()


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = {
    "numba": {
        "up: zeros": ("a_sum += x_value", "a_sum += ZERO"),
        "up: x not gathered": ("x[token, step + column]", "x[position % x.shape[0], step + column]"),
        "up: wrong expert": ("w1[expert, step + row, hidden]", "w1[w1.shape[0] - 1 - expert, step + row, hidden]"),
        "up: w1 for w2": ("w2[expert, step + row, hidden]", "w1[expert, step + row, hidden]"),
        "up: last row dropped": ("live = position < end", "live = position < end - 1"),
        "up: first tile of rows only": ("end, TILE", "min(end, expert_token_offsets[expert] + TILE), TILE"),
        "up: first tile of d only": ("range(0, d, TILE)", "range(0, TILE, TILE)"),
        "up: last column dropped": ("if live and hidden < h:", "if live and hidden < h - 1:"),
        "up: b never written": ("b[position, hidden] = b_sum", "pass"),
        "up: no gate": ("act(a_sum) * b_sum", "act(a_sum)"),
        "up: activation of b": ("act(a_sum) * b_sum", "a_sum * act(b_sum)"),
        "up: rows in token order": (
            "y_swi[position, hidden] = act(a_sum) * b_sum",
            "y_swi[(position + 1) % y_swi.shape[0], hidden] = act(a_sum) * b_sum",
        ),
        "d_x: stale": ("d_x[token, column] = total", "pass"),
        "d_x: last slot dropped": ("range(token * k, (token + 1) * k)", "range(token * k, (token + 1) * k - 1)"),
        "d_x: rows in token order": ("[slot], token_index_map[slot]", "[slot], slot"),
        "d_x: wrong expert": ("token_expert_indices[slot],", "token_expert_indices[token * k],"),
        "d_x: without d_b": ("total += d_b[position, i] * w2[expert, column, i]", "total += ZERO"),
        "d_w: first row dropped": ("expert], expert_token_offsets[expert", "expert] + 1, expert_token_offsets[expert"),
        "d_w: x not gathered": ("x[expert_token_indices[position], row]", "x[position % x.shape[0], row]"),
        "d_w: next expert's": ("d_w[expert, row, column] =", "d_w[(expert + 1) % num_experts, row, column] ="),
    },
    "1_naive": {
        "unscaled row": ("expert_token_indices[at.row] * d", "at.row % 7 * d"),
        "wrong expert": ("(long long)blockIdx.y * d * h + at.column", "at.column"),
        "drops the last input": ("for (int p = 0; p < d; ++p)", "for (int p = 0; p < d - 1; ++p)"),
        "drops a slot": ("for (int j = 0; j < k; ++j)", "for (int j = 1; j < k; ++j)"),
        "drops a row": ("for (int row = begin; row < end; ++row)", "for (int row = begin + 1; row < end; ++row)"),
    },
    "2_tiled": {
        "no barrier after the tokens": ("first + threadIdx.x];\n    __syncthreads();", "first + threadIdx.x];"),
        "row of another expert": ("if (row < tile.rows && j < h) store_hidden", "if (j < h) store_hidden"),
        "tiles read too early": ("return b(r, side, p); });\n        __syncthreads();", "return b(r, side, p); });"),
        "tiles written too early": ("        __syncthreads();  // all have read", "        // all have read"),
        "activation of b": ("GATED ? act_a * ACTIVATION::factor(b) : act_a", "act_a"),
    },
    "3_mma": {
        "does not wait": ("cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
        "no barrier after waiting": ("        __syncthreads();  // the next stage", "        // the next stage"),
        "stale stage": ("cp_async_or_zero(stage +", "if (begin) cp_async_or_zero(stage +"),
        "past the end of the depth": ("number >= 0 && at < width", "number >= 0"),
        "fragments of the stage before": ("(last ? step + 1 : step)", "step"),
        "lines of the step before": ("look_up(first + TILE_DEPTH);", "look_up(first);"),
        "first matrix twice": ("chosen.matrix = second, ", ""),
        "B not transposed": ("ldmatrix_x4_transposed(registers,", "ldmatrix_x4(registers,"),
        "halves of B swapped": ("{both[0], both[1]}", "{both[1], both[0]}"),
        "every band the first": ("{band * BAND + inside", "{inside"),
        "lanes keep what they should send": ("upper ? low : high", "upper ? high : low"),
    },
    "3_mma_tf32": {
        "depths swapped": ("m / 2 : m % 2) * CHUNK;", "m % 2 : m / 2) * CHUNK;"),
    },
    "7_persistent": {
        "no wait for the operands": ("barrier_wait(&shared.full[now], state.parity);", ";"),
        "wrong parity": ("&shared.full[now], state.parity", "&shared.full[now], state.parity ^ 1"),
        "stage free before it is read": ("wgmma_wait<BEHIND>();", ";"),
        "every lane frees the stage": ("if (step >= BEHIND && lane_id() == 0)", "if (step >= BEHIND)"),
        "a tile without steps frees a stage": ("> 1 && tile.steps > 0 && lane_id() ==", "> 1 && lane_id() =="),
        "products in no group": ("wgmma_commit();\n", ";\n"),
        "no fence before the product": ("if (Roles::COPIERS) fence_async_proxy();", ";"),
        "copies never arrive": ("if (Roles::COPIERS) cp_async_arrive(full);", ";"),
        "arrives before its copies": (
            (
                "            fill(step, shared.stages[state.stage], full);\n"
                "            if (Roles::COPIERS) cp_async_arrive(full);"
            ),
            (
                "            if (Roles::COPIERS) cp_async_arrive(full);\n"
                "            fill(step, shared.stages[state.stage], full);"
            ),
        ),
        "waits for one arrival only": ("1 + Roles::COPIERS", "1"),
        "waits for producers that are not there": ("1 + Roles::COPIERS", "1 + (Roles::COPIERS ? WARPGROUP : 0)"),
        "expects no bytes": ("barrier_arrive_expecting(full, B_BYTES);", "barrier_arrive(full);"),
        "expects boxes that do not come": ("whole ? B_BYTES : 0", "B_BYTES"),
        "copies not swizzled": ("(chunk ^ row % 8) * 16", "chunk * 16"),
        "stages begin anywhere": ("SHARED_ALIGNMENT = 1024", "SHARED_ALIGNMENT = 128"),
        "along the wrong axis": ("WarpRoles<4, 4, false, false, false>", "WarpRoles<4, 4, false, false, true>"),
        "wrong distance of panels": ("wgmma_operand(stage.b, PANEL_BYTES)", "wgmma_operand(stage.b, PANEL_BYTES / 2)"),
        "half of the columns twice": ("wgmma_advance(b_now, HALF_BYTES)", "b_now"),
        "half of the columns left out": ("wgmma_m64n256k16<Scalar, Roles", "wgmma_m64n128k16<Scalar, Roles"),
        "last step dropped": ("steps((depth + TILE_DEPTH - 1) / TILE_DEPTH)", "steps(depth / TILE_DEPTH)"),
        "depth not cut off": ("% 8 * CHUNK < d;", "% 8 * CHUNK < d + 64;"),
        "depth has the next expert's rows": ("inside && row(i) < rows", "inside"),
        "rows of other tokens": ("/ 8 + i * AT_ONCE, rows - 1)", "/ 8 + i * 16, rows - 1)"),
        "tokens of the step before": ("now = __shfl_down_sync(FULL_WARP, now, 16);", ";"),
        "second weights are the first": ("second ? &w2 : &w1, full, p", "&w1, full, p"),
        "columns of w1 for those of w2": ("second ? &w2 : &w1, full,\n", "&w1, full,\n"),
        "panels of w1 and w2 with a tile between": ("column + panel / PROJECTIONS * PANEL", "column + panel * PANEL"),
        "sums of the tile before": (
            "    while (tiles.next(tile)) {\n        float sums[TILE_COLUMNS / 2] = {};",
            "    float sums[TILE_COLUMNS / 2] = {};\n    while (tiles.next(tile)) {",
        ),
        "every second tile of a block dropped": ("number += gridDim.x;", "number += 2 * gridDim.x;"),
        "expert without rows has no gradient": (
            "if (expert >= E) return false;",
            "if (expert >= E || expert_token_offsets[expert] == expert_token_offsets[expert + 1]) return false;",
        ),
        "rows of the experts before": ("            begin = end;", ";"),
        "the epilogue waits for the first consumer alone": ("&shared.done[number(i)],", "&shared.done[number(i) % 4],"),
        "consumer waits for the first part alone": ("++part, parity ^= 1) {\n            ", "++part) {\n            "),
        "consumer never done": ("if (lane_id() == 0) barrier_arrive(&shared.done[warp]);", ";"),
        "epilogue tile done before it is there": (
            (
                "            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);\n"
                "            __syncwarp();\n"
                "            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);\n"
            ),
            (
                "            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);\n"
                "            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);\n"
            ),
        ),
        "every lane gives the epilogue tile back": (
            "if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);",
            "barrier_arrive(&shared.stored[number(i)]);",
        ),
        "epilogue tile given back before every lane has stored": (
            "(int i) const {\n        __syncwarp();",
            "(int i) const {",
        ),
        "rows of the second consumer not stored": (" / Roles::EPILOGUE_WARPS", " / Roles::EPILOGUE_WARPS / 2"),
        "epilogue tile of another consumer": ("finished[number(i)];", "finished[(number(i) + 4) % EPILOGUE_TILES];"),
        "another epilogue tile given back": (
            "barrier_arrive(&shared.stored[number(i)])",
            "barrier_arrive(&shared.stored[i])",
        ),
        "second part in the first one's place": ("store(tile, part * TILE_COLUMNS / Shared::PARTS,", "store(tile, 0,"),
        "upper rows in the place of the lower": ("int i = (first + j) * 4 + half * 2;", "int i = (first + j) * 4;"),
        "pair packed the other way round": ("T>(first), from_float<T>(second)}", "T>(second), from_float<T>(first)}"),
        "pair unpacked the other way round": (
            "    pair[0] = to_float(values[0]);\n    pair[1] = to_float(values[1]);\n",
            "    pair[0] = to_float(values[1]);\n    pair[1] = to_float(values[0]);\n",
        ),
        "column tail stored": ("tile.rows, width - column);", "tile.rows, TILE_COLUMNS);"),
        "row tail of weights stored": ("width, rows - tile.row, width - column", "width, TILE_ROWS, width - column"),
        "column tail of weights stored": ("rows - tile.row, width - column);", "rows - tile.row, TILE_COLUMNS);"),
        "row tail of y_swi stored": ("row < min(WARP_ROWS, tile.rows - first);", "row < WARP_ROWS;"),
        "column tail of y_swi stored": ("if (column < h)\n", "\n"),
        "a stored as b": ("chunk + PANEL_CHUNKS * (PROJECTIONS - 1)", "chunk"),
        "y_swi of its first element twice": ("a_pair[1], b_pair[1]", "a_pair[0], b_pair[0]"),
    },
    "sum_rows": {
        "zeros": ("return 1.0f;", "return 0.0f;"),
        "last slot": ("has_slot = lane_id() < k;", "has_slot = lane_id() < k - 1;"),
        "stale sums": ("float sums[PACK] = {};", "static float sums[PACK];"),
    },
    "4_wgmma": {
        "does not wait": ("cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
        "no barrier": ("        __syncthreads();      // this stage", "        // this stage"),
        "no fence": ("fence_async_proxy();  // what", "// what"),
        "stage filled too early": ("load(step + STAGES - 1);", "load(step + STAGES);"),
        "product not awaited": ("wgmma_wait<0>();", ";"),
        "product in no group": ("wgmma_commit();\n", ";\n"),
        "upper half twice": ("half * PANEL_BYTES + i * 32", "i * 32"),
        "depth of rows stands still": ("half * PANEL_BYTES + i * 32", "half * PANEL_BYTES"),
        "depth of weights stands still": ("i * 16 * 128", "0"),
        "every product begins anew": ("step + i > 0", "i > 0"),
        "the first product adds": ("step + i > 0", "true"),
        "last step dropped": ("(d + TILE_DEPTH - 1) / TILE_DEPTH", "d / TILE_DEPTH"),
        "w1 for w2": ("panel % RESULTS ? w2 : w1", "w1"),
        "weights of the first expert": ("(long long)tile.expert * d * h;", "0;"),
        "weights beyond the last column": ("h - column}", "h}"),
        "rows of another expert stored": ("if (row >= tile.rows || j >= h) return;", "if (j >= h) return;"),
        "columns of the next row stored": ("if (row >= tile.rows || j >= h) return;", "if (row >= tile.rows) return;"),
        "rows not gathered": ("expert_token_indices + tile.first}", "expert_token_indices}"),
    },
    "5_tma": {
        "no wait for a full stage": ("barrier_wait(&shared.full[state.stage], state.parity);", ";"),
        "no wait for an empty stage": ("barrier_wait(&shared.empty[filling.stage], filling.parity ^ 1);", ";"),
        "no fence": ("fence_async_proxy();  // what", "// what"),
        "stage free before it is read": ("        wgmma_wait<0>();\n", ""),
        "every lane frees a stage": ("if (lane_id() == 0) barrier_arrive", "barrier_arrive"),
        "rows do not arrive": ("cp_async_arrive(full);", "barrier_arrive(full);"),
        "full without the rows": ("1 + THREADS, THREADS / WARP", "1, THREADS / WARP"),
        "empty after one warp": ("1 + THREADS, THREADS / WARP", "1 + THREADS, 1"),
        "too few bytes": ("expecting(full, B_BYTES)", "expecting(full, B_BYTES / 2)"),
        "the same stage again": ("        filling.next();\n", ""),
        "w1 for w2": ("panel % RESULTS ? &w2 : &w1", "&w1"),
        "weights of the first expert": ("step * TILE_DEPTH, tile.expert);", "step * TILE_DEPTH, 0);"),
        "depth not cut off": ("% 8 * CHUNK < d;", "% 8 * CHUNK < d + 64;"),
        "one step ahead of the stages": ("load(step + STAGES);", "load(step + STAGES + 1);"),
    },
    "6_specialized": {
        "no wait for a full stage": ("barrier_wait(&shared.full[state.stage], state.parity);", ";"),
        "no wait for an empty stage": ("barrier_wait(&shared.empty[state.stage], state.parity ^ 1);", ";"),
        "no fence": ("fence_async_proxy();  // what", "// what"),
        "stage free while it is read": ("wgmma_wait<1>();", ";"),
        "stage free before it is read": (
            "if (step > 0 && lane_id() == 0) barrier_arrive(read);",
            "if (lane_id() == 0) barrier_arrive(&shared.empty[state.stage]);",
        ),
        "last product not awaited": ("    wgmma_wait<0>();\n", ""),
        "no stage is freed": ("if (step > 0 && lane_id() == 0) barrier_arrive(read);", ";"),
        "rows of the consumer's threads": ("(threadIdx.x - FIRST)", "(threadIdx.x)"),
        "full without the rows": ("1 + PRODUCERS, WARPGROUP", "1, WARPGROUP"),
        "nobody asks for the weights": ("if (threadIdx.x == WARPGROUP)", "if (threadIdx.x == 0)"),
        "quads not transposed": ("low = upper ? other : low;", "low = other;"),
        "b for a": ("(quad + QUADS * (RESULTS - 1)) * 16", "quad * 16"),
        "lower rows twice": ("+ row % 2 * 2;", ";"),
    },
}


@every_fault(FAULTS)
def test_a_planted_fault_is_caught(file, change):
    assert_caught("expert_up", file, change)


# Where d_x is made in two parts, the second of 48 columns.
PART_FAULTS = {
    "sum_rows": {
        "the first columns twice": ("pitch + first", "pitch"),
        "a row of d_x is as long as the rows": ("token * pitch", "token * d"),
    }
}


@every_fault(PART_FAULTS)
def test_a_planted_fault_of_parts_is_caught(file, change, monkeypatch):
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    assert_caught("expert_up", file, change, IN_PARTS, "bfloat16", version="7_persistent")


# Where the ring has one stage alone: it is free as soon as it is read, not a step later.
ONE_STAGE_FAULTS = {
    "7_persistent": {
        "only stage free a step late": ("BEHIND = Shared::STAGES > 1;", "BEHIND = 1;"),
        "only stage free after the first step alone": ("if (step >= BEHIND &&", "if (step < 1 &&"),
        "only stage free while it is read": ("wgmma_wait<BEHIND>();", "wgmma_wait<1>();"),
        "only stage free once more at the end": (
            "if (Shared::STAGES > 1 && tile.steps > 0 &&",
            "if (tile.steps > 0 &&",
        ),
    }
}


@every_fault(ONE_STAGE_FAULTS)
def test_a_planted_fault_of_one_stage_is_caught(file, change):
    assert_caught("expert_up", file, change, RING_STAGES=1)
