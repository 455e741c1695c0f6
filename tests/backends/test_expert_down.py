"""The down-projection and its backward without a kept output: torch and the textbook combine, sums, parts, faults."""

import numpy as np
import pytest
import torch
from expert_stages import (
    EVERY,
    HARD,
    IN_PARTS,
    RAGGED,
    SEVERAL_TILES,
    SMALL,
    assert_caught,
    dispatch_of,
    every_fault,
    header_symbols,
    planted,
    refusals,
    verdicts,
)
from headers import assert_as_stated, evaluate, stated
from helpers import RAGGED as RAGGED_SHAPE
from helpers import SHAPES
from planted import Planted, Quick, stage_module

from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref import combine as textbook
from moeblaze_ref.backends.numpy_ref import expert_down as stage
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort, expert_groups
from moeblaze_ref.backends.raw_cuda import combine, expert_down, gemm, tiles
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.nn.activations import ACTIVATION
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case, relative_error


def make_inputs(shape, activation="swiglu"):
    """Operands of backward by name, in its order."""
    rng = np.random.default_rng(2)
    dispatch = build_by_sort(shape.topk_experts(), shape.E)
    a, b = rng.standard_normal((2, dispatch.R, shape.h))
    case = shape.case(activation)
    return dict(
        d_out=case.d_out,
        gates=rng.uniform(0.1, 1.0, (shape.L, shape.k)),
        a=a,
        b=b if is_gated(activation) else None,
        w3=case.weights.w3,
        dispatch=dispatch,
        activation=activation,
    )


def torch_down(gates, a, b, w3, dispatch, activation):
    """y and out in torch with one matrix per routed row, and the leaves (a, b, gates, w3) that collect gradients."""
    leaves = [None if t is None else torch.tensor(t, requires_grad=True) for t in (a, b, gates, w3)]
    ta, tb, tgates, tw3 = leaves
    slot = torch.tensor(dispatch.token_index_map.argsort())  # (R,) which (token, j) each position holds
    expert = torch.tensor(dispatch.token_expert_indices).long()[slot]
    y_swi = ACTIVATION[activation](ta)
    y = torch.einsum("rh,rhd->rd", y_swi if tb is None else y_swi * tb, tw3[expert])
    weighted = tgates.flatten()[slot, None] * y
    out = torch.zeros(dispatch.L, tw3.shape[2], dtype=y.dtype).index_add(0, slot // dispatch.k, weighted)
    return y, out, leaves


def backward(**inputs):
    """d_a, d_b, d_gates and d_w3, as the layer asks for them."""
    d_a, d_b, gated_y, d_gates = stage.hidden_gradients(**inputs)
    return d_a, d_b, d_gates, stage.weight_gradient(gated_y, inputs["d_out"], inputs["dispatch"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_agrees_with_torch(shape, activation):
    inputs = make_inputs(shape, activation)
    ty, tout, leaves = torch_down(**{name: inputs[name] for name in inputs if name != "d_out"})
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], activation)
    assert relative_error(stage.forward(y_swi, inputs["w3"], inputs["dispatch"]), ty.detach()) < 1e-12
    out = stage.summed_forward(y_swi, inputs["w3"], inputs["gates"], inputs["dispatch"])
    assert relative_error(out, tout.detach()) < 1e-12
    tout.backward(torch.tensor(inputs["d_out"]))
    for result, leaf in zip(backward(**inputs), leaves, strict=True):
        assert (result is None) == (leaf is None)
        if leaf is not None:
            assert relative_error(result, leaf.grad) < 1e-12


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_gradients_need_no_kept_output(activation):
    inputs = make_inputs(RAGGED_SHAPE, activation)
    dispatch = inputs["dispatch"]
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], activation)
    y = stage.forward(y_swi, inputs["w3"], dispatch)
    _, gradients = textbook.backward(inputs["d_out"], y, inputs["gates"], dispatch)
    assert relative_error(backward(**inputs)[2], gradients) < 1e-14


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_kept_y_swi_changes_no_bit(activation):
    inputs = make_inputs(RAGGED_SHAPE, activation)
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], activation)
    for kept, rebuilt in zip(backward(**inputs, y_swi=y_swi), backward(**inputs), strict=True):
        assert (kept is None and rebuilt is None) or np.array_equal(kept, rebuilt)


def test_a_kept_y_swi_is_read():
    inputs = make_inputs(RAGGED_SHAPE)
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], "swiglu")
    assert relative_error(backward(**inputs, y_swi=2.0 * y_swi)[3], 2.0 * backward(**inputs)[3]) < 1e-15


def test_the_numba_kernels_do_not_read_a_kept_y_swi():
    inputs = {
        name: np.float32(value) if isinstance(value, np.ndarray) else value
        for name, value in make_inputs(RAGGED_SHAPE).items()
    }
    function = stage_module("numba", "expert_down").hidden_gradients
    for kept, rebuilt in zip(function(**inputs, y_swi=inputs["a"]), function(**inputs), strict=True):
        np.testing.assert_array_equal(kept, rebuilt)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("backend", "version", "dtype"),
    [("numpy", None, "float64"), ("numba", None, "float32")]
    + [("simt", version, dtype) for of, version, dtype in EVERY if of == "expert_down"],
)
def test_the_gradients_of_a_and_b_may_take_their_places(backend, version, dtype, activation):
    sizes = (13, 7, 6, 3, 2) if backend == "numba" else (137, 24, 72, 5, 3, "zipf")
    case = make_case(*sizes, activation=activation).astype(dtype)
    a, b, _, gates = comparisons.hidden(case)
    how = {"executor": SimtExecutor(seed=5), "version": version} if version else {}

    def gradients(**options):
        operands = case.d_out, gates, a, b, case.weights.w3, dispatch_of(case), activation
        return stage_module(backend, "expert_down").hidden_gradients(*operands, **options, **how)

    expected, found = gradients(), gradients(overwrite=True)
    assert found[0] is a and found[1] is b
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or np.array_equal(one, other)


def test_what_is_read_only_is_not_overwritten():
    inputs = make_inputs(RAGGED_SHAPE)
    inputs["b"].flags.writeable = False
    with pytest.raises(ValueError, match="b is read-only, but it is written to"):
        stage.hidden_gradients(**inputs, overwrite=True)


# ---- the output in parts, and sums in the epilogue of the product --------------------------------


def output_in_parts(executor, dtype):
    """The output of a case in one part, and in two."""
    case = IN_PARTS.astype(dtype)
    dispatch, (*_, y_swi, gates), w3 = dispatch_of(case), comparisons.hidden(case), case.weights.w3
    options = {"executor": executor, "version": "7_persistent"}
    y = expert_down.forward(y_swi, w3, dispatch, **options)
    whole = combine.forward(y, gates, dispatch, executor=executor)
    return whole, expert_down.output_in_parts(y_swi, w3, gates, dispatch, **options)


@pytest.mark.parametrize("dtype", gemm.NARROW)
def test_the_output_in_parts_of_its_columns_is_the_same_from_half_the_rows(dtype, monkeypatch):
    executor = SimtExecutor(seed=1)
    assert output_in_parts(executor, dtype)[1] is None  # too few rows
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    with executor.recording() as launches:
        whole, parts = output_in_parts(executor, dtype)
    np.testing.assert_array_equal(parts, whole)
    headers = stated("expert_down/7_persistent.cu") | stated("combine/2_vector.cu")
    launches = launches[2:]
    assert [launch.kernel for launch in launches] == ["expert_down", "combine"] * 2
    for launch, width in zip(launches, (256, 256, 48, 48), strict=True):
        symbols = header_symbols("7_persistent", IN_PARTS.astype(dtype)) | {"d": width, "D": 1}
        assert_as_stated(launch, headers, symbols)
        y = launch.buffers["y"]
        assert y.read_bytes + y.written_bytes == 2 * IN_PARTS.L * IN_PARTS.k * width


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": np.ones((70, 3), np.float32)}, ValueError, "gates"),
        ({"w3": np.ones((3, 8, 304), np.float16)}, ValueError, "w3"),
        ({"w3": np.ones((3, 16, 304), np.float32)}, TypeError, "w3"),
        ({"y_swi": np.ones((140, 17), np.float16), "w3": np.ones((3, 17, 304), np.float16)}, ValueError, "h is 17"),
    ],
)
def test_an_output_in_parts_of_wrong_operands_raises(change, error, message, monkeypatch):
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    case = IN_PARTS.astype("float16")
    *_, y_swi, gates = comparisons.hidden(case)
    operands = {"y_swi": y_swi, "w3": case.weights.w3, "gates": gates, "version": "7_persistent"} | change
    with pytest.raises(error, match=message):
        expert_down.output_in_parts(**operands, dispatch=dispatch_of(case))


SUMS = {"as_printed": expert_down.summed_forward, "lesson_atomic": expert_down.atomic_forward}
ODD_WIDTHS = make_case(137, 35, 71, 5, 3, "zipf", "widths that tensor cores do not take")


def summed(case, executor, file="as_printed"):
    """The output of a case by one of ``SUMS``."""
    *_, y_swi, gates = comparisons.hidden(case)
    return SUMS[file](y_swi, case.weights.w3, gates, dispatch_of(case), executor=executor)


def assert_sums_right(case, dtype, executor=None, file="as_printed"):
    rounded = case.astype(dtype)
    found = {"out": summed(rounded, executor or Quick(), file)}
    exact, baseline = (comparisons.expect_summed(rounded, t)["forward"] for t in (torch.float64, getattr(torch, dtype)))
    error, bound = comparisons.compare(found, exact, dtype, baseline)
    assert error <= bound


@pytest.mark.parametrize("case", [RAGGED, ODD_WIDTHS], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", gemm.WIDE)
@pytest.mark.parametrize("file", SUMS)
def test_a_product_that_sums_is_right(file, dtype, case):
    assert_sums_right(case, dtype, file=file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*HARD, SEVERAL_TILES], ids=lambda case: case.name)
@pytest.mark.parametrize("file", SUMS)
def test_hard_shapes_of_a_product_that_sums(file, case, dtype):
    assert_sums_right(case, dtype, file=file)


@pytest.mark.parametrize("dtype", gemm.WIDE)
def test_every_order_of_threads_gives_the_same_sums(dtype):
    case = make_case(70, 16, 24, 3, 2).astype(dtype)
    assert len({summed(case, Quick(seed=seed)).tobytes() for seed in range(4)}) == 1


@pytest.mark.parametrize(("file", "same"), [("as_printed", True), ("lesson_atomic", False)])
def test_sums_by_atomics_alone_depend_on_the_order_of_blocks(file, same):
    turned = "place = {int(gridDim.x) - 1 - place_of_block().row_tile, place_of_block().column_tile};"
    others = Planted(f"expert_down/{file}.cu", "place = place_of_block();", turned, seed=1)
    others.workers = 1
    case = make_case(137, 24, 72, 6, 4).astype("float32")
    assert_sums_right(case, "float32", others, file)
    assert np.array_equal(summed(case, Quick(workers=1, seed=1), file), summed(case, others, file)) == same


def test_a_tokens_rows_are_added_in_the_order_of_its_experts():
    case = RAGGED.astype("float32")
    dispatch, (*_, y_swi, gates) = dispatch_of(case), comparisons.hidden(case)
    y = expert_down.forward(y_swi, case.weights.w3, dispatch, executor=SimtExecutor())
    gate_of_row = np.empty(dispatch.R, np.float32)
    gate_of_row[dispatch.token_index_map] = gates.ravel()
    expected = np.zeros_like(case.x)
    for _, group, tokens in expert_groups(dispatch):
        expected[tokens] += gate_of_row[group, None] * y[group]
    np.testing.assert_array_equal(summed(case, SimtExecutor(seed=3)), expected)


def sum_symbols(case, tile=None):
    """Those of the headers of both files."""
    version = gemm.portable_version(str(case.x.dtype), *case.weights.w1.shape[1:])
    return header_symbols(version, case, tile)


def assert_sums_as_stated(launches, file, symbols):
    """The launches of each kernel together ask for what the header states."""
    headers = stated(f"expert_down/{file}.cu") | stated("expert_down/as_printed.cu") | stated("expert_down/gates.cu")
    for kernel in {launch.kernel for launch in launches}:
        together = [launch for launch in launches if launch.kernel == kernel]
        of_kernel = symbols | {"blocks": sum(int(np.prod(launch.grid)) for launch in together)}
        for found, formula in (("read_bytes", headers[kernel].read), ("written_bytes", headers[kernel].written)):
            counted = sum(getattr(launch, found) for launch in together)
            assert counted == evaluate(formula, of_kernel), f"{kernel}: {found} is not {formula}"


@pytest.mark.parametrize("case", [RAGGED, ODD_WIDTHS], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", gemm.WIDE)
@pytest.mark.parametrize("file", SUMS)
def test_a_product_that_sums_asks_for_the_bytes_that_its_header_states(file, dtype, case):
    executor, case = SimtExecutor(), case.astype(dtype)
    with executor.recording() as launches:
        summed(case, executor, file)
    adds = ["add_expert"] * case.E if file == "as_printed" else ["add_rows"]
    rounds = [] if dtype == "float32" else ["round_sums"]
    assert [launch.kernel for launch in launches] == ["gate_rows", *adds, *rounds]
    assert_sums_as_stated(launches, file, sum_symbols(case))


@pytest.mark.parametrize("file", SUMS)
def test_small_tiles_of_a_product_that_sums(file):
    executor, case = SimtExecutor(seed=2), RAGGED.astype("bfloat16")
    with tiles.trying(SMALL), executor.recording() as launches:
        assert_sums_right(RAGGED, "bfloat16", executor, file)
    assert_sums_as_stated(launches, file, sum_symbols(case, SMALL))
    of_product = [launch for launch in launches if launch.kernel in ("add_expert", "add_rows")]
    assert {launch.block for launch in of_product} == {(SMALL.threads, 1, 1)}
    assert not any(launch.shared.bank_conflicts for launch in of_product)


@pytest.mark.parametrize("tile", [None, SMALL])
@pytest.mark.parametrize("file", SUMS)
def test_a_product_that_sums_has_the_shared_memory_that_its_header_states(file, tile):
    constants = {"Scalar": "__half", "THREADS": 256} | (tile.constants(itemsize=2) if tile else {})
    source = KernelSource.read(f"expert_down/{file}.cu", constants)
    product = tile.shared_bytes if tile else 8704
    for kernel, header in stated(source.file).items():
        asked = evaluate(header.shared, {"TILE_ROWS": tile.rows if tile else 64, "Q": product})
        static = _static_shared_bytes(source, kernel)
        padding = static + (tile.shared_bytes if tile and asked else 0) - asked
        assert 0 <= padding < 16  # an array may begin at a multiple of 16 bytes


@pytest.mark.parametrize(("dtype", "rounded_bytes"), [("float32", 0), ("bfloat16", 2)])
def test_no_row_of_an_expert_is_stored(dtype, rounded_bytes):
    executor, case = SimtExecutor(), RAGGED.astype(dtype)
    made = []
    for make in ("empty", "full"):
        allocate = getattr(executor, make)
        setattr(executor, make, lambda *arguments, allocate=allocate: made.append(allocate(*arguments)) or made[-1])
    summed(case, executor)
    L, d = case.x.shape
    assert sum(array.nbytes for array in made) == 4 * L * case.k + (4 + rounded_bytes) * L * d


SUM_FAULTS = {
    "unscaled gate": ("as_printed", "so_far.add(targets.gates[row], values)", "so_far.add(1.0f, values)"),
    "last expert alone": ("as_printed", "so_far.load(sums_at(row, column));", "so_far = {};"),
    "last row": ("as_printed", "return row < tile.rows &&", "return row < tile.rows - 1 &&"),
    "rows of the next expert": ("as_printed", "return row < tile.rows &&", "return row < TILE_ROWS &&"),
    "past the row": ("as_printed", "first_column + column < d;", "first_column + column < d + 8;"),
    "earlier tiles forgotten": ("as_printed", "begin + before, min", "begin, min"),
    "next expert's weights": ("as_printed", "tile = {expert, begin", "tile = {0, begin"),
    "rows in token order": ("as_printed", "= expert_token_indices[tile.first + row];", "= tile.first + row;"),
    "gate of the first row": ("as_printed", "= gate_of_row[tile.first + row];", "= gate_of_row[tile.first];"),
    "zeros": ("as_printed", "so_far.store(sums_at(row, column));", ""),
    "atomic: unscaled gate": ("lesson_atomic", "targets.gates[row] * values[n]", "values[n]"),
    "atomic: written, not added": ("lesson_atomic", "atomicAdd(&sums_of_row[n], targets.gates[row] * values[n]);",
                                   "sums_of_row[n] = targets.gates[row] * values[n];"),
    "atomic: last row": ("lesson_atomic", "row >= tile.rows ||", "row >= tile.rows - 1 ||"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_a_planted_fault_of_the_sums_is_caught(fault, dtype):
    file, right, wrong = SUM_FAULTS[fault]
    with tiles.trying(SMALL), pytest.raises((AssertionError, KernelFault)):
        assert_sums_right(RAGGED, dtype, Planted(f"expert_down/{file}.cu", right, wrong, seed=3), file)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": np.ones((137, 2), np.float32)}, ValueError, "gates"),
        ({"gates": np.ones((137, 3))}, TypeError, "gates has dtype float64, but it must be float32"),
        ({"w3": np.ones((5, 71, 24), np.float32)}, ValueError, "w3"),
        ({"version": "2_tiled"}, ValueError, "unknown version of expert_down '2_tiled'.*as_printed"),
    ],
)
def test_a_sum_of_wrong_operands_raises(change, error, message):
    case = RAGGED.astype("float32")
    *_, y_swi, gates = comparisons.hidden(case)
    operands = {"y_swi": y_swi, "w3": case.weights.w3, "gates": gates} | change
    with pytest.raises(error, match=message):
        expert_down.summed_forward(**operands, dispatch=dispatch_of(case))


# ---- wrong operands ------------------------------------------------------------------------------

ROWS = np.ones((RAGGED_SHAPE.L * RAGGED_SHAPE.k, RAGGED_SHAPE.h), np.float32)
OUT = np.ones((RAGGED_SHAPE.L, RAGGED_SHAPE.d), np.float32)
GATES = np.ones((RAGGED_SHAPE.L, RAGGED_SHAPE.k), np.float32)
W3 = np.ones((RAGGED_SHAPE.E, RAGGED_SHAPE.h, RAGGED_SHAPE.d), np.float32)
DISPATCH = build_by_sort(RAGGED_SHAPE.topk_experts(), RAGGED_SHAPE.E)
OF_BACKWARD = dict(d_out=OUT, gates=GATES, a=ROWS, b=ROWS, w3=W3, dispatch=DISPATCH, activation="swiglu", y_swi=None)
OPERANDS = {
    "forward": dict(y_swi=ROWS, w3=W3, dispatch=DISPATCH),
    "hidden_gradients": OF_BACKWARD,
    "weight_gradient": dict(gated_y=ROWS, d_out=OUT, dispatch=DISPATCH),
}
WRONG = [
    (dict(y_swi=ROWS[1:]), ValueError, r"y_swi has shape \(110, 20\), but it must be \(R=111, h(=20)?\)"),
    (dict(y_swi=ROWS * np.float32(np.nan)), ValueError, r"y_swi\[0, 0\] is nan"),
    (dict(y_swi=ROWS.astype(int)), TypeError, "y_swi has dtype int64"),
    (dict(y_swi=ROWS[:, 1:], a=ROWS), ValueError, r"y_swi has shape \(111, 19\), but it must be \(R=111, h=20\)"),
    (dict(w3=W3[1:]), ValueError, r"w3 has shape \(4, 20, 12\), but it must be \(E=5, h=20, d(=12)?\)"),
    (dict(w3=W3.astype(np.float64)), TypeError, "w3 has dtype float64"),
    (dict(w3=W3[0]), ValueError, "w3 has shape .* 3 dimensions"),
    (dict(dispatch=7), TypeError, "dispatch is an int, but it must be a Dispatch"),
    (dict(dispatch=None), TypeError, "dispatch is None"),
    (dict(d_out=OUT[:, 1:], a=ROWS), ValueError, r"d_out has shape \(37, 11\), but it must be \(L=37, d=12\)"),
    (dict(d_out=OUT * np.float32(np.inf)), ValueError, r"d_out\[0, 0\] is inf"),
    (dict(d_out=OUT.astype(np.float64)), TypeError, "d_out has dtype float64"),
    (dict(gates=GATES[:, 1:]), ValueError, r"gates has shape \(37, 2\), but it must be \(L=37, k=3\)"),
    (dict(gates=GATES.astype(np.float64)), TypeError, "gates has dtype float64"),
    (dict(a=ROWS[:, 1:]), ValueError, r"w3 has shape \(5, 20, 12\), but it must be \(E=5, h=19, d\)"),
    (dict(a=ROWS[1:]), ValueError, r"a has shape \(110, 20\), but it must be \(R=111, h\)"),
    (dict(b=None), ValueError, "b is None, but swiglu is gated"),
    (dict(b=ROWS[:, :2]), ValueError, r"b has shape \(111, 2\)"),
    (dict(activation="silu"), ValueError, "silu is not gated: b must be None"),
    (dict(activation="siwglu"), ValueError, "Did you mean 'swiglu'"),
    (dict(gated_y=ROWS[1:]), ValueError, r"gated_y has shape \(110, 20\), but it must be \(R=111, h\)"),
    (dict(gated_y=ROWS.astype(np.float64)), TypeError, "d_out has dtype float32, but it must be float64", ["numpy"]),
    (dict(gated_y=ROWS * np.float32(np.nan)), ValueError, r"gated_y\[0, 0\] is nan"),
]


@refusals("expert_down", OPERANDS, WRONG)
def test_wrong_operands_are_refused(refused, error, message):
    with pytest.raises(error, match=message):
        refused()


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = {
    "numba": {
        "down: wrong expert": ("w3[expert, i, column]", "w3[w3.shape[0] - 1 - expert, i, column]"),
        "down: rows in token order": ("y[position, column] = total", "y[slot, column] = total"),
        "down: last input dropped": ("range(y_swi.shape[1])", "range(y_swi.shape[1] - 1)"),
        "down: last row dropped": ("if slot < num_routed:", "if slot < num_routed - 1:"),
        "hidden: gate left out of d_a": ("d_y = gate * d_ungated", "d_y = d_ungated"),
        "hidden: gate left out of gate * y_swi": ("= gate * y", "= y"),
        "hidden: gate of another slot": ("gate = gates[token, j]", "gate = gates[token, gates.shape[1] - 1 - j]"),
        "hidden: gate's gradient with the gate": ("share += d_ungated * y", "share += d_y * y"),
        "hidden: gate's gradient of one thread": ("half = THREADS // 2", "half = 0"),
        "hidden: gate's gradient without its last threads": ("half = THREADS // 2", "half = THREADS // 4"),
        "hidden: d_out not gathered": ("d_out[token, i]", "d_out[position % d_out.shape[0], i]"),
        "hidden: wrong expert": ("w3[expert, hidden, i]", "w3[w3.shape[0] - 1 - expert, hidden, i]"),
        "hidden: slope left out": ("d_y * b_value * slope(a_value)", "d_y * b_value"),
        "hidden: y_swi without b": ("y *= b_value", "pass"),
        "hidden: one block of columns": ("thread, a.shape[1],", "thread, min(a.shape[1], THREADS - 3),"),
        "hidden: rows in token order": ("[slot], token_index_map[slot]\n        gate", "[slot], slot\n        gate"),
        "hidden: d_b stale": ("d_b[position, hidden] = d_y * y", "pass"),
        "d_w3: d_out not gathered": ("expert_token_indices[position], column", "position % d_out.shape[0], column"),
        "d_w3: last row dropped": ("expert_token_offsets[expert + 1]", "expert_token_offsets[expert + 1] - 1"),
    },
    "1_naive": {
        "unscaled gate": ("d_y = gate * d;", "d_y = d;"),
        "gradient not gathered": ("long token = (long long)expert_token_indices[at.row]", "long token = at.row % 7"),
        "slope left out": ("d_y * ACTIVATION::factor(b) * slope", "d_y * ACTIVATION::factor(b)"),
    },
    "2_tiled": {
        "gate term of one column": ("column < TILE; ++column) term +=", "column < 1; ++column) term +="),
        "no barrier before the terms": (");\n    __syncthreads();\n    if (threadIdx.x <", ");\n    if (threadIdx.x <"),
    },
    "3_mma": {
        "last columns": ("d, h, d - first_column}", "d, h, d - first_column - 8}"),
        "row tail stored": ("row >= rows || column >= columns", "column >= columns"),
        "gate term of every second lane": ("terms[line] += __shfl_xor_sync(FULL_WARP, terms[line], 2);", ""),
        "gate term of one warp": ("part < TILE_COLUMNS / WARP_COLUMNS", "part < 1"),
        "no barrier before the terms": ("__syncthreads();\n    for (int row = threadIdx", "for (int row = threadIdx"),
    },
    "gates": {
        "order of slots": ("gate_of_row[row] = gates[slot];", "gate_of_row[slot] = gates[slot];"),
        "gradient of a neighbour": ("(long long)row * terms", "slot * terms"),
    },
    "7_persistent": {
        "no wait for a free stage": ("barrier_wait(&shared.empty[state.stage], state.parity ^ 1);", ";"),
        "stage free while it is read": ("wgmma_wait<BEHIND>();", ";"),
        "last stage of a tile never free": (
            "if (Shared::STAGES > 1 && tile.steps > 0 && lane_id() == 0) barrier_arrive(&shared.empty[read]);",
            ";",
        ),
        "no last wait": ("wgmma_wait<0>();", ";"),
        "arrives without its copies": ("Roles::COPIERS) cp_async_arrive(full", "Roles::COPIERS) barrier_arrive(full"),
        "waits for one arrival too few": ("1 + Roles::COPIERS", "Roles::COPIERS ? Roles::COPIERS : 1"),
        "one lane copies for all": ("if (Roles::COPIERS || threadIdx.x == 0)", "if (threadIdx.x == 0)"),
        "expects half": ("barrier_arrive_expecting(full, A_BYTES + B_BYTES", "barrier_arrive_expecting(full, B_BYTES"),
        "no barrier after the ring is made": ("();\n    }\n    __syncthreads();", "();\n    }"),
        "half of the swizzle": ("(chunk ^ row % 8) * 16", "(chunk ^ row % 4) * 16"),
        "wrong place in the depth": ("B_STEP = Roles::B_ALONG_N ? 16 * 128 :", "B_STEP = Roles::B_ALONG_N ? 8 * 128 :"),
        "both consumers multiply the same rows": ("stage.a + consumer * PANEL_BYTES", "stage.a"),
        "half of the sums twice": ("sums + HALF / 2, a_now", "sums, a_now"),
        "last step of the rows dropped": ("(end - begin + TILE_DEPTH - 1) / TILE_DEPTH", "(end - begin) / TILE_DEPTH"),
        "rows not gathered": ("tokens[min(row, tile.end - tile.begin - 1)];", "min(row, tile.end - tile.begin - 1);"),
        "tokens not read ahead": ("later = read(step + 2);", "later = read(step);"),
        "weights of another expert": ("p, tile.expert);", "p, 0);"),
        "last expert dropped": ("if (++expert == E) return false;", "if (++expert == E - 1) return false;"),
        "tiles of the experts before counted again": ("            first += tiles;", ";"),
        "stride of more blocks than there are": ("taken * gridDim.x;", "taken * (gridDim.x + 1);"),
        "a band always full": ("high = min(BAND, row_tiles() - band * BAND)", "high = BAND"),
        "the epilogue does not wait": ("barrier_wait(&shared.done[number(i)], parity);", ";"),
        "the epilogue waits for the first part alone": (", parity ^= 1)\n            store(", ")\n            store("),
        "consumer does not wait for the epilogue": ("barrier_wait(&shared.stored[warp], parity);", ";"),
        "consumer waits before there is a part": ("parity = 1;  // of the part before", "parity = 0;"),
        "every lane is done": ("if (lane_id() == 0) barrier_arrive(&shared.done", "barrier_arrive(&shared.done"),
        "epilogue tile never given back": ("if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);", ";"),
        "epilogue tile given back before it is stored": (
            (
                "        barrier_wait(&shared.done[number(i)], parity);\n"
                "        return shared.finished[number(i)];\n"
                "    }\n"
                "    __device__ __forceinline__ void give_back(int i) const {\n"
                "        __syncwarp();\n"
                "        if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);\n"
                "    }\n"
            ),
            (
                "        barrier_wait(&shared.done[number(i)], parity);\n"
                "        if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);\n"
                "        return shared.finished[number(i)];\n"
                "    }\n"
                "    __device__ __forceinline__ void give_back(int i) const {}\n"
            ),
        ),
        "part taken by two epilogue warps": ("+ i * Roles::EPILOGUE_WARPS;", "+ i;"),
        "epilogue tile stored as if it were the first": ("return number(i) * WARP_ROWS;", "return i * WARP_ROWS;"),
        "second part is the first": ("sums + part * TILE_COLUMNS / 2 / Shared::PARTS", "sums"),
        "lower rows in the place of the upper": ("half * 8 + lane_id() % 8", "lane_id() % 8"),
        "finished rows where no one looks": ("() % 8, first + lane_id() / 8", "() % 8, first + (lane_id() / 8 ^ 1)"),
        "row tail stored": ("width, tile.rows, width - column);", "width, TILE_ROWS, width - column);"),
        "transposed epilogue tile not transposed": ("stmatrix_x4_transposed(&finished", "stmatrix_x4(&finished"),
        "halves of a transposed epilogue tile alike": (
            "first * CHUNK + lane_id(), half",
            "first * CHUNK + lane_id(), 0",
        ),
        "transposed, tail of the columns stored": ("rows - column, width - tile.row", "TILE_COLUMNS, width - tile.row"),
        "transposed, tail of the rows stored": ("if (row < rows)\n", "if (true)\n"),
        "row tail of hidden gradients stored": ("count = min(WARP_ROWS, tile.rows - first)", "count = WARP_ROWS"),
        "column tail of hidden gradients stored": ("present = column < h ? count : 0;", "present = count;"),
        "a and b not awaited": ("cp_async_wait<ROWS_AHEAD - 1>();", ";"),
        "one row of a and b too many under way": ("cp_async_wait<ROWS_AHEAD - 1>();", "cp_async_wait<ROWS_AHEAD>();"),
        "a and b in no group": ("        cp_async_commit();\n    }\n", "    }\n"),
        "a and b of the row before": (
            "a + begin + (long long)row * pitch",
            "a + begin + (long long)max(row - 1, 0) * pitch",
        ),
        "a and b of no row": ("if (row < present) {", "if (present > 0) {"),
        "a and b in the next row's slot": ("now = ahead[row % ROWS_AHEAD];", "now = ahead[(row + 1) % ROWS_AHEAD];"),
        "warps share a and b": ("return threadIdx.x % WARPGROUP;", "return lane_id();"),
        "unscaled gate": ("gate_of_row[tile.first + first + lane_id()] : 0.0f", "1.0f : 0.0f"),
        "gate of another row": ("__shfl_sync(FULL_WARP, gates, row)", "__shfl_sync(FULL_WARP, gates, 0)"),
        "gradient of its first element twice": (
            "pairs.a[1], pairs.b[1], d_pair[1],",
            "pairs.a[0], pairs.b[0], d_pair[0],",
        ),
        "gate term of every second element": ("term += low.gate + high.gate;", "term += low.gate;"),
        "gate term not left": ("d.words[0] = __float_as_int(term);", ";"),
        "gate term without the last lane": ("lane < WARP; ++lane) sum", "lane < WARP - 1; ++lane) sum"),
        "gate term before every lane has left its own": ("__syncwarp();\n            const int", "const int"),
        "gate terms of all tiles in one place": ("gate_terms[place + tile.column / TILE_COLUMNS]", "gate_terms[place]"),
    },
}


@every_fault(FAULTS)
def test_a_planted_fault_is_caught(file, change):
    assert_caught("expert_down", file, change)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_slope_of_another_activation_in_the_numba_kernels_is_caught(activation, monkeypatch):
    numba = stage_module("numba", "expert_down")
    act, _ = numba.NONLINEARITY[activation]
    _, other = numba.NONLINEARITY["relu" if activation in ("silu", "swiglu") else "silu"]
    monkeypatch.setitem(numba.NONLINEARITY, activation, (act, other))
    numba.d_hidden_kernel.cache_clear()
    try:
        error, bound = verdicts("expert_down", "numba", make_case(5, 7, 6, 3, 2, activation=activation), "float32")[
            "backward"
        ]
        assert not error <= bound
    finally:
        numba.d_hidden_kernel.cache_clear()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("pitch + first", "pitch"), ("token * pitch", "token * d")],
    ids=["the first columns twice", "a row of out is as long as the rows"],
)
def test_a_planted_fault_of_the_outputs_parts_is_caught(right, wrong, monkeypatch):
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    whole, parts = output_in_parts(planted("combine", "2_vector", right, wrong), "bfloat16")
    assert not np.array_equal(whole, parts)
