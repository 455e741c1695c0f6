"""The experts' kernels for weights as models store them: bytes as stated, bits of the other stages, faults caught."""

import functools
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from expert_stages import RAGGED, SEVERAL_TILES, SMALL, blocks_that_stay, dispatch_of, header_symbols
from headers import assert_as_stated, evaluate, stated
from planted import Planted, Quick

from moeblaze_ref.backends.raw_cuda import gemm, packed, tiles
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.raw_cuda.activation import act
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.verify.cases import make_case, relative_error
from moeblaze_ref.verify.packed import stored

NAMES = ("out", "d_x", "d_gate_up", "d_down", "d_gates")
CELLS = [(layout, "swiglu") for layout in LAYOUTS.values()] + [(LAYOUTS["linear"], "silu"), (LAYOUTS["matmul"], "silu")]
every_cell = pytest.mark.parametrize(("layout", "activation"), CELLS, ids=lambda one: getattr(one, "name", one))
# The first dtype of a version in every cell, the others in one.
TYPED = [
    pytest.param(version, dtype, *cell, id=f"{version}, {dtype}, {cell[0].name}, {cell[1]}")
    for version, (first, *others) in packed.VERSIONS.items()
    for dtype, cells in ((first, CELLS), *((other, CELLS[:1]) for other in others))
    for cell in cells
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)


def run_layer(stages, weights, case):
    """The output and every gradient of the experts, under gates that the case's tokens decide."""
    dispatch = dispatch_of(case)
    gates = np.random.default_rng(5).random((case.L, case.k), np.float32)
    out, kept = layer.run_experts(stages, case.x, weights, dispatch, gates, case.activation, "minimal")
    saved = layer.Saved(case.x, dispatch, gates, kept, case.activation, "minimal", renormalize=False)
    d_x, _, d_w1, d_w2, d_w3, d_gates = layer.expert_gradients(stages, case.d_out, saved, weights)
    return out, d_x, (d_w1, d_w2, d_w3), d_gates


def run(version, layout, executor, case):
    """The results by name, of weights in a layout."""
    gate_up, down = stored(*case.weights[1:], layout)
    weights = MoEWeights(None, gate_up, None, down)
    stages = raw_layer.packed_stages_for(case.x, weights, case.activation, layout, executor, version)
    out, d_x, (d_gate_up, none, d_down), d_gates = run_layer(stages, weights, case)
    assert none is None
    return dict(zip(NAMES, (out, d_x, d_gate_up, d_down, d_gates), strict=True))


@functools.cache
def separate(version, case, tile=None):
    """The results of weights in tensors of their own."""
    executor = Quick()
    with tiles.trying(tile) if tile else nullcontext():
        stages = raw_layer.stages_for(case.x, case.weights, executor, version)
        return run_layer(stages, case.weights, case)


def expected(version, layout, case, tile=None):
    """The same by name, as a layout stores the gradients of the weights."""
    out, d_x, of_weights, d_gates = separate(version, case, tile)
    return dict(zip(NAMES, (out, d_x, *stored(*of_weights, layout), d_gates), strict=True))


@functools.cache
def case_of(version, activation="swiglu", several=False):
    """A case of which a version has more than one tile, at least of rows; or several each way."""
    case = SEVERAL_TILES if several or version == "7_persistent" else RAGGED
    weights = case.weights if is_gated(activation) else case.weights._replace(w2=None)
    return replace(case, activation=activation, weights=weights).astype(packed.VERSIONS[version][0])


def assert_same(found, wanted):
    """The same bits; d_x is a sum in another order."""
    for name in NAMES:
        if name == "d_x":
            assert relative_error(found[name], wanted[name]) < 2.0**-8
        else:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


# ---- results -------------------------------------------------------------------------------------


@every_cell
@pytest.mark.parametrize("version", packed.VERSIONS)
def test_the_bits_are_those_of_weights_in_tensors_of_their_own(version, layout, activation):
    case = case_of(version, activation)
    assert_same(run(version, layout, Quick(), case), expected(version, layout, case))


@every_layout
@pytest.mark.parametrize("version", ["3_mma", gemm.TF32])
def test_several_small_tiles(version, layout):
    case = case_of(version)
    with tiles.trying(SMALL):
        assert_same(run(version, layout, Quick(), case), expected(version, layout, case, SMALL))


@every_layout
@pytest.mark.parametrize("version", packed.VERSIONS)
def test_every_order_of_threads_gives_the_same_bits(version, layout):
    case = make_case(70, 16, 24, 3, 2).astype(packed.VERSIONS[version][0])
    first, second = [run(version, layout, Quick(seed=seed), case) for seed in (0, 7)]
    for name in NAMES:
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)


@every_layout
def test_any_number_of_blocks_that_stay_gives_the_same_bits(layout):
    case = case_of("7_persistent")
    first, second = [run("7_persistent", layout, executor, case) for executor in (Quick(), blocks_that_stay(2, seed=2))]
    for name in NAMES:
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)


@every_layout
@pytest.mark.parametrize(("d", "h", "of_d_x"), [(304, 16, 2), (264, 272, 1)])
def test_in_parts_the_bits_are_the_same(layout, d, h, of_d_x, monkeypatch):
    """Of y, and of the rows that sum to d_x where d is larger, 7_persistent divides the columns."""
    case = make_case(70, d, h, 3, 2).astype("bfloat16")
    whole = run("7_persistent", layout, Quick(), case)
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    sizes = "7_persistent", case.L * case.k, d, h
    assert len(gemm.parts_of_y(*sizes)) == 2 and len(gemm.parts_of_rows(*sizes)) == of_d_x
    parts = run("7_persistent", layout, Quick(), case)
    for name in NAMES:
        np.testing.assert_array_equal(parts[name], whole[name], err_msg=name)


# ---- bytes ---------------------------------------------------------------------------------------

OF_STAGES = {"d_x_rows": "expert_up", "d_w": "expert_up", "expert_down": "expert_down", "d_w3": "expert_down"}
OF_AB = {True: {"expert_down", "d_w3"}, False: {"d_x_rows", "d_w"}}  # by layout.transposed: what has ab for a matrix


def one_matrix(case, columns):
    """The case as a kernel sees it that has one matrix of so many columns."""
    E, d, _ = case.weights.w1.shape
    weights = case.weights._replace(w1=np.empty((E, d, columns), case.x.dtype), w2=None)
    return replace(case, weights=weights, activation="silu")


@pytest.mark.parametrize(("version", "dtype", "layout", "activation"), TYPED)
def test_the_kernels_ask_for_the_bytes_that_their_headers_state(version, dtype, layout, activation):
    case = make_case(137, 24, 72, 5, 3, "zipf", activation=activation).astype(dtype)
    executor, h = SimtExecutor(), case.weights.w1.shape[2]
    with executor.recording() as launches:
        run(version, layout, executor, case)
    own = stated(gemm.file_of("packed", version))
    assert {*own, *OF_STAGES} <= {launch.kernel for launch in launches}
    for launch in launches:
        if launch.kernel in own:
            assert_as_stated(launch, own, header_symbols(version, case))
        elif stage := OF_STAGES.get(launch.kernel):
            columns = h * (1 + is_gated(activation)) if launch.kernel in OF_AB[layout.transposed] else h
            symbols = header_symbols(version, one_matrix(case, columns))
            assert_as_stated(launch, stated(gemm.file_of(stage, version)), symbols)


@every_layout
@pytest.mark.parametrize("stores", [("a", "b"), ("y_swi",)], ids="+".join)
@pytest.mark.parametrize("version", packed.VERSIONS)
def test_only_what_the_policy_stores_is_written(version, stores, layout):
    case, executor = RAGGED.astype(packed.VERSIONS[version][0]), SimtExecutor()
    stage = packed.Packed(layout, True, executor, version)
    gate_up, _ = stored(*case.weights[1:], layout)
    inputs = case.x, gate_up, None, dispatch_of(case), "swiglu"
    everything = stage.project(*inputs)
    with executor.recording() as launches:
        ab, none, y_swi = stage.project(*inputs, stores=stores)
    symbols = header_symbols(version, case) | {"P": int("a" in stores), "Y": int("y_swi" in stores)}
    assert_as_stated(launches[0], stated(gemm.file_of("packed", version)), symbols)
    assert none is None and (ab is None) == ("a" not in stores) and (y_swi is None) == ("y_swi" not in stores)
    for found, whole in ((ab, everything[0]), (y_swi, everything[2])):
        assert found is None or np.array_equal(found, whole)


@every_cell
def test_the_activation_alone(layout, activation):
    """As the policy ``conventional`` keeps it: of a, from where it lies in ab."""
    rows, executor = np.random.default_rng(3).standard_normal((7, 24)).astype(np.float32), SimtExecutor()
    gated = is_gated(activation)
    with executor.recording() as launches:
        found = packed.Packed(layout, gated, executor, "2_tiled").act(rows, activation)
    a = rows if not gated else rows[:, 0::2] if layout.interleaved else rows[:, :12]
    np.testing.assert_array_equal(found, act.unchecked(np.ascontiguousarray(a), activation, SimtExecutor()))
    assert_as_stated(launches[0], stated("packed/act.cu"), {"s": 4, "R": 7, "h": a.shape[1]})


@every_layout
def test_a_block_has_the_shared_memory_that_its_header_states(layout):
    constants = {"Scalar": "__half", "ACTIVATION": "swiglu", "LAYOUT": layout.name} | SMALL.constants(itemsize=2)
    source = KernelSource.read("packed/3_mma.cu", constants)
    for kernel, header in stated("packed/3_mma.cu").items():
        asked = evaluate(header.shared, SMALL.constants(itemsize=2) | {"s": 2})
        assert asked - _static_shared_bytes(source, kernel) == SMALL.shared_bytes, kernel
    tiled = KernelSource.read(
        "packed/2_tiled.cu",
        {"Scalar": "float", "THREADS": 256}
        | {
            "ACTIVATION": "swiglu",
            "LAYOUT": layout.name,
        },
    )
    for kernel, header in stated("packed/2_tiled.cu").items():
        assert evaluate(header.shared, {"G": 2}) == _static_shared_bytes(tiled, kernel), kernel
    for header in stated("packed/7_persistent.cu").values():
        assert evaluate(header.shared, {}) == gemm.HOPPER_SHARED_BYTES


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = {
    "2_tiled": {
        "b for a": ("store_hidden(ab + packed_at(routed, 0, j, h)", "store_hidden(ab + packed_at(routed, 1, j, h)"),
        "next expert's weights": ("up_weight_at(tile.expert,", "up_weight_at((tile.expert + 1) % E,"),
        "down of the first expert": ("down_weight_at(tile.expert,", "down_weight_at(0,"),
        "columns of one projection": ("packed_column(projection, j, h)", "packed_column(0, j, h)"),
        "row of another expert": ("if (row < tile.rows && j < h)\n            store", "if (j < h)\n            store"),
    },
    "3_mma": {
        "turned though along the depth": ("LAYOUT::TRANSPOSED ? Along::DEPTH", "LAYOUT::TRANSPOSED ? Along::SIDE"),
        "second tile of columns on the first": ("result * h + first_column, d, h", "result * h, d, h"),
        "first hidden elements alone": ("(tile.expert, first_column, 0, d, h)", "(tile.expert, 0, 0, d, h)"),
        "b where a is": ("return LAYOUT::INTERLEAVED ? a(i) + 1", "return LAYOUT::INTERLEAVED ? a(i)"),
        "gradients of b lost": ("if (GATED) second.store(ab", "if (false) second.store(ab"),
        "gate terms of one tile": ("gridDim.y + place.column_tile] = term", "gridDim.y] = term"),
    },
    "7_persistent": {
        "wrong major": ("false, !LAYOUT::TRANSPOSED, BIASED>", "false, LAYOUT::TRANSPOSED, BIASED>"),
        "w1 twice": ("panel % RESULTS ? w2 : w1", "w1"),
        "weights of the first expert": ("LAYOUT::TRANSPOSED ? at : p, expert);", "LAYOUT::TRANSPOSED ? at : p, 0);"),
        "one panel of down": ("&down, full, tile.column + panel * PANEL", "&down, full, tile.column"),
        "pairs of the first chunk twice": ("i < 2 ? a_chunk : b_chunk;\n        float", "a_chunk;\n        float"),
        "gate left out of gate * y_swi": ("packed<Scalar>(low.gated_y, high.gated_y)", "packed<Scalar>(0.0f, 0.0f)"),
        "last rows of a tile": ("min(WARP_ROWS, tile.rows - first); row += AT_ONCE", "WARP_ROWS; row += AT_ONCE"),
    },
}
SHOWN_IN = {  # the layouts that a fault spoils, if it is not every one
    "turned though along the depth": ("linear",),
    "b where a is": ("interleaved",),
    "w1 twice": ("linear", "matmul"),
    "one panel of down": ("linear",),
    "pairs of the first chunk twice": ("interleaved",),
}
BEYOND_ONE_TILE = {FAULTS["3_mma"][name] for name in ("first hidden elements alone", "gate terms of one tile")}
PLANTED = [
    pytest.param(version, change, layout, id=f"{version}: {name}, {layout}")
    for version, faults in FAULTS.items()
    for name, change in faults.items()
    for layout in SHOWN_IN.get(name, LAYOUTS)
]


@pytest.mark.parametrize(("version", "change", "layout"), PLANTED)
def test_a_planted_fault_is_caught(version, change, layout):
    several, tile = change in BEYOND_ONE_TILE, SMALL if version == "3_mma" else None
    case = case_of(version, several=several)
    executor = Planted(gemm.file_of("packed", version), *change, seed=3)
    executor.multiprocessors = 2
    with tiles.trying(tile) if tile else nullcontext(), pytest.raises((AssertionError, KernelFault)):
        assert_same(run(version, LAYOUTS[layout], executor, case), expected(version, LAYOUTS[layout], case, tile))
