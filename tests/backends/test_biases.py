"""Experts with biases and a clamped activation: the specification against autograd, and the kernels against it."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expert_stages import SMALL, blocks_that_stay, header_symbols
from headers import assert_as_stated, evaluate, stated
from planted import Planted, Quick

from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref import biased_experts
from moeblaze_ref.backends.numpy_ref.biased_experts import Parameters
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import biases, gemm, packed, tiles
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.raw_cuda.biases import Biases
from moeblaze_ref.core.config import CLAMPED_LIMIT, CLAMPED_SWIGLU, is_gated
from moeblaze_ref.core.layouts import LAYOUTS, Layout
from moeblaze_ref.core.structures import Dispatch
from moeblaze_ref.nn.activations import activate
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.verify import comparisons, orders
from moeblaze_ref.verify.cases import relative_error

NAMES = ("out", "d_x", *(f"d_{name}" for name in Parameters._fields), "d_gates")
CELLS = [(layout, activation) for layout in LAYOUTS.values() for activation in (CLAMPED_SWIGLU, "swiglu")]
CELLS += [(layout, "silu") for layout in LAYOUTS.values() if not layout.interleaved]
every_cell = pytest.mark.parametrize(("layout", "activation"), CELLS, ids=lambda one: getattr(one, "name", one))
every_version = pytest.mark.parametrize("version", packed.VERSIONS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
INTERLEAVED = LAYOUTS["interleaved"]


@dataclass(frozen=True, eq=False)
class Step:
    """Experts, tokens that run through them, and the gradient of the output."""

    x: np.ndarray
    weights: Parameters
    dispatch: Dispatch
    gates: np.ndarray
    d_out: np.ndarray
    activation: str
    layout: Layout


@cache
def rounded(one, dtype):
    """The step in a dtype; the gates are float32 at least."""
    x, d_out, *weights = [w if w is None else w.astype(dtype) for w in (one.x, one.d_out, *one.weights)]
    gates = one.gates.astype("float64" if dtype == "float64" else "float32")
    return replace(one, x=x, d_out=d_out, weights=Parameters(*weights), gates=gates)


@cache
def step(layout, activation=CLAMPED_SWIGLU, L=70, d=24, h=40, E=5, k=2, up=True, down=True):
    """Float64 numbers. The last expert has no rows. Biases clamp half of a and of b, and leave none near the limit."""
    rng = np.random.default_rng(7)
    of_up, of_down = layout.shapes(E, d, h, is_gated(activation))
    columns = h * (1 + is_gated(activation))
    ids = np.array([rng.permutation(E - 1)[:k] for _ in range(L)], np.int32)
    far = rng.choice([0.0, 0.0, 16.0, -16.0], (E, columns)) + rng.standard_normal((E, columns)) / 8
    weights = Parameters(
        rng.standard_normal(of_up) * d**-0.5,
        rng.standard_normal(of_down) * h**-0.5,
        far if up else None,
        rng.standard_normal((E, d)) if down else None,
    )
    x, d_out = rng.standard_normal((2, L, d))
    return Step(x, weights, build_by_sort(ids, E), rng.standard_normal((L, k)), d_out, activation, layout)


@cache
def exact(one):
    """The results of the specification in float64, by name."""
    wide = rounded(one, "float64")
    inputs = wide.weights, wide.dispatch, wide.gates, wide.activation, wide.layout
    found = biased_experts.backward(wide.d_out, wide.x, *inputs)
    return named(biased_experts.forward(wide.x, *inputs), found.d_x, found.parameters, found.d_gates)


def named(out, d_x, parameters, d_gates):
    """Results by name, without those of biases that are not there."""
    results = dict(zip(NAMES, (out, d_x, *parameters, d_gates), strict=True))
    return {name: array for name, array in results.items() if array is not None}


def plain(x, gate_up, down, gate_up_bias, down_bias, gates, one):
    """The definition in torch, slot by slot: the weights are those of each token's expert."""
    lies, out = one.layout, torch.zeros_like(x)
    ids = torch.from_numpy(one.dispatch.token_expert_indices).reshape(one.gates.shape).long()
    for j in range(ids.shape[1]):
        up, w3 = [w[ids[:, j]].mT if lies.transposed else w[ids[:, j]] for w in (gate_up, down)]
        sums = (x[:, None] @ up)[:, 0]
        if gate_up_bias is not None:
            sums = sums + gate_up_bias[ids[:, j]]
        a, b = sums, None
        if is_gated(one.activation):
            a, b = (sums[:, 0::2], sums[:, 1::2]) if lies.interleaved else sums.chunk(2, 1)
        y = (activate(a, b, one.activation)[:, None] @ w3)[:, 0]
        if down_bias is not None:
            y = y + down_bias[ids[:, j]]
        out = out + gates[:, j, None].to(y.dtype) * y
    return out


@cache
def by_autograd(one, dtype):
    """The results of plain torch in a dtype, as float64."""

    def leaf(array, dtype):
        return None if array is None else torch.tensor(array.astype(np.float64)).to(dtype).requires_grad_()

    gates = leaf(one.gates, torch.float64 if dtype == torch.float64 else torch.float32)
    leaves = [leaf(one.x, dtype), *(leaf(w, dtype) for w in one.weights), gates]
    out = plain(*leaves, one)
    present = [one for one in leaves if one is not None]
    gradients = iter(torch.autograd.grad(out, present, torch.tensor(one.d_out.astype(np.float64)).to(dtype)))
    d_x, *of_weights, d_gates = [None if one is None else next(gradients).double().numpy() for one in leaves]
    return named(out.detach().double().numpy(), d_x, of_weights, d_gates)


def run(version, executor, one, policy="minimal"):
    """The results of the kernels."""
    weights = MoEWeights(None, one.weights.gate_up, None, one.weights.down)
    present = [name for name, bias in zip(("up", "down"), one.weights[2:], strict=True) if bias is not None]
    of_call = Biases(*one.weights[2:], present)
    how = one.activation, one.layout, executor, version, of_call
    stages = raw_layer.packed_stages_for(one.x, weights, *how)
    out, kept = layer.run_experts(stages, one.x, weights, one.dispatch, one.gates, one.activation, policy)
    saved = layer.Saved(one.x, one.dispatch, one.gates, kept, one.activation, policy, renormalize=False)
    d_x, _, d_gate_up, none, d_down, d_gates = layer.expert_gradients(stages, one.d_out, saved, weights)
    assert none is None and sorted(of_call.gradients) == sorted(present)
    d_biases = of_call.gradients.get("up"), of_call.gradients.get("down")
    return named(out, d_x, (d_gate_up, d_down, *d_biases), d_gates)


def assert_right(found, one, dtype):
    """The results are near to float64, and of the right dtypes."""
    assert_near(found, one, dtype)
    for name, array in found.items():
        assert array.dtype == (np.float32 if name == "d_gates" else one.x.dtype), name


def assert_near(found, one, dtype):
    """Each result is as near to float64 as the bound of what the kernels compute in says."""
    wanted, baseline = exact(one), by_autograd(one, getattr(torch, dtype.split()[0].replace("tf32", "float32")))
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        error, bound = relative_error(array, wanted[name]), comparisons.bound_of(name, wanted, dtype, baseline)
        assert error <= bound, (name, error, bound)


def assert_same(found, wanted):
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# ---- the specification ---------------------------------------------------------------------------


@every_cell
@pytest.mark.parametrize(("up", "down"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_specification_has_the_gradients_of_autograd(layout, activation, up, down):
    one = step(layout, activation, up=up, down=down)
    found, wanted = exact(one), by_autograd(one, torch.float64)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert relative_error(found[name], array) < 1e-12, name


def test_the_cases_clamp_some_and_none_near_the_limit():
    one = step(INTERLEAVED)
    tokens = one.dispatch.expert_token_indices
    experts = np.repeat(np.arange(5), np.diff(one.dispatch.expert_token_offsets))
    ab = np.einsum("rd,rdc->rc", one.x[tokens], one.weights.gate_up[experts]) + one.weights.gate_up_bias[experts]
    for projection in (ab[:, 0::2], ab[:, 1::2]):
        assert 0.1 < (projection > CLAMPED_LIMIT).mean() < 0.4 and 0.1 < (projection < -CLAMPED_LIMIT).mean() < 0.4
        assert np.abs(np.abs(projection) - CLAMPED_LIMIT).min() > 0.2
    assert not one.dispatch.expert_token_offsets[-1] - one.dispatch.expert_token_offsets[-2]


def at_the_limits():
    """a and b that are a limit, or the next float32 on either side of it, or far from all."""
    limit = np.float32(CLAMPED_LIMIT)
    ends = [sign * end for sign in (1, -1) for end in (limit, np.nextafter(limit, 8), np.nextafter(limit, 0))]
    a, b = np.meshgrid(*[np.array([*ends, 0.5, -16.0], np.float32)] * 2)
    return a.reshape(1, -1), b.reshape(1, -1)


def torch_at_the_limits():
    a, b = [torch.tensor(array).requires_grad_() for array in at_the_limits()]
    y = activate(a, b, CLAMPED_SWIGLU)
    return [array.detach().numpy() for array in (y, *torch.autograd.grad(y.sum(), (a, b)))]


def test_a_gradient_passes_at_a_limit_and_not_beyond():
    a, b = at_the_limits()
    found = activation_stage.forward.unchecked(a, b, CLAMPED_SWIGLU)
    gradients = activation_stage.backward.unchecked(np.ones_like(a), a, b, CLAMPED_SWIGLU)
    for mine, theirs in zip((found, *gradients), torch_at_the_limits(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
        assert np.array_equal(mine == 0, theirs == 0)


def assert_limits(executor):
    """The gradients of a and b where these are the biases of a token's only expert, and all else is 1 or 0."""
    a, b = at_the_limits()
    n = 8 * -(-a.size // 8)
    ab = np.zeros((1, 2 * n), np.float32)
    ab[0, 0 : 2 * a.size : 2], ab[0, 1 : 2 * a.size : 2] = a, b
    weights = Parameters(np.zeros((1, 8, 2 * n)), np.ones((1, n, 8)), ab, None)
    x, d_out, gates = np.ones((1, 8)), np.full((1, 8), 1 / 8), np.ones((1, 1), np.float32)
    one = Step(x, weights, build_by_sort(np.zeros((1, 1), np.int32), 1), gates, d_out, CLAMPED_SWIGLU, INTERLEAVED)
    d_ab = run("2_tiled", executor, rounded(one, "float32"))["d_gate_up_bias"][0, : 2 * a.size].reshape(-1, 2)
    _, *wanted = torch_at_the_limits()
    for mine, gradient in zip(d_ab.T, wanted, strict=True):
        np.testing.assert_allclose(mine, gradient[0], rtol=1e-4)
        assert np.array_equal(mine == 0, gradient[0] == 0)


def test_the_kernels_pass_a_gradient_at_a_limit_and_not_beyond():
    assert_limits(Quick())


# ---- the kernels ---------------------------------------------------------------------------------

TYPED = [
    pytest.param(version, dtype, *cell, id=f"{version}, {dtype}, {cell[0].name}, {cell[1]}")
    for version, (first, *others) in packed.VERSIONS.items()
    for dtype, cells in ((first, CELLS), *((other, [(INTERLEAVED, CLAMPED_SWIGLU)]) for other in others))
    for cell in cells
]


@pytest.mark.parametrize(("version", "dtype", "layout", "activation"), TYPED)
def test_the_kernels_compute_what_is_specified(version, dtype, layout, activation):
    one = rounded(step(layout, activation), dtype)
    precision = "tf32 twice" if version == gemm.TF32 else dtype
    assert_right(run(version, Quick(), one), one, precision)


@pytest.mark.parametrize(("up", "down"), [(True, False), (False, True)])
@every_version
def test_one_bias_alone(version, up, down):
    dtype = packed.VERSIONS[version][0]
    one = rounded(step(INTERLEAVED, up=up, down=down), dtype)
    if not up:  # a and b are then on one side of the limits
        assert np.abs(one.x).max() < 5
    assert_right(run(version, Quick(), one), one, "tf32 twice" if version == gemm.TF32 else dtype)


@pytest.mark.parametrize("policy", ["conventional", "paper", "inputs"])
@every_layout
def test_every_policy_gives_the_same_bits(policy, layout):
    one = rounded(step(layout), "float32")
    assert_same(run("2_tiled", Quick(), one, policy), run("2_tiled", Quick(), one))


def test_an_expert_without_rows_has_gradients_of_zero():
    found = run("2_tiled", Quick(), rounded(step(INTERLEAVED), "float32"))
    for name in NAMES[2:6]:
        assert not found[name][-1].any() and found[name][:-1].any(axis=tuple(range(1, found[name].ndim))).all()


@every_layout
def test_several_small_tiles(layout):
    one = rounded(step(layout, L=150, d=136, h=136), "float16")
    with tiles.trying(SMALL):
        assert_right(run("3_mma", Quick(), one), one, "float16")


@every_layout
def test_several_tiles_of_blocks_that_stay(layout):
    """Also where their number differs."""
    one = rounded(step(layout, L=300, d=136, h=264), "float16")
    found = run("7_persistent", Quick(), one)
    assert_right(found, one, "float16")
    assert_same(run("7_persistent", blocks_that_stay(2, seed=2), one), found)


@every_version
def test_every_order_of_threads_gives_the_same_bits(version):
    one = rounded(step(INTERLEAVED), packed.VERSIONS[version][0])
    assert_same(run(version, Quick(seed=7), one), run(version, Quick(seed=0), one))


def test_in_parts_the_bits_are_the_same(monkeypatch):
    one = rounded(step(INTERLEAVED, d=304, h=16), "bfloat16")
    whole = run("7_persistent", Quick(), one)
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    assert len(gemm.parts_of_rows("7_persistent", one.dispatch.R, 304, 16)) == 2
    assert_same(run("7_persistent", Quick(), one), whole)


def test_widths_that_no_pack_divides():
    one = rounded(step(INTERLEAVED, d=13, h=7), "float32")
    assert_right(run("2_tiled", Quick(), one), one, "float32")


# ---- bytes ---------------------------------------------------------------------------------------


def symbols_of(version, one):
    """What the formulas of the headers mean for a step."""
    E, d = one.weights.down_bias.shape
    h = one.weights.gate_up_bias.shape[1] // (1 + is_gated(one.activation))
    (L, k), weights = one.gates.shape, SimpleNamespace(w1=np.empty((E, d, h)))
    ids = one.dispatch.token_expert_indices.reshape(L, k)
    case = SimpleNamespace(L=L, E=E, k=k, x=one.x, weights=weights, activation=one.activation, topk_experts=ids)
    return header_symbols(version, case) | {"U": 1, "n": one.weights.gate_up_bias.shape[1]}


@pytest.mark.parametrize(("version", "dtype", "layout", "activation"), TYPED)
def test_the_kernels_ask_for_the_bytes_that_their_headers_state(version, dtype, layout, activation):
    one, executor = rounded(step(layout, activation), dtype), SimtExecutor()
    with executor.recording() as launches:
        run(version, executor, one)
    symbols, terms = symbols_of(version, one), -(-one.x.shape[1] // 128)
    of_biases = {"PACK": 4, "THREADS": 1024, "D": terms, "W": 1024 // gemm.WARP}
    versions, own, gates = map(stated, (gemm.file_of("packed", version), "packed/biases.cu", "expert_down/gates.cu"))
    del own["d_up_bias" if version == gemm.HOPPER else "d_up_bias_of_tiles"]
    assert versions.keys() | own.keys() | gates.keys() <= {launch.kernel for launch in launches}
    for launch in launches:
        if launch.kernel in versions:
            assert_as_stated(launch, versions, symbols)
        elif launch.kernel in own:
            assert_as_stated(launch, own, symbols | of_biases)
        elif launch.kernel in gates:
            assert_as_stated(launch, gates, symbols | {"more": terms})


def test_a_block_has_the_shared_memory_that_its_header_states():
    constants = {"Scalar": "float", "THREADS": 1024, "PACK": 4}
    source = KernelSource.read("packed/biases.cu", constants)
    for kernel, header in stated("packed/biases.cu").items():
        assert evaluate(header.shared, constants) == _static_shared_bytes(source, kernel), kernel


# ---- the order of the sums -----------------------------------------------------------------------

ROWS, WARPS = 1100, 32  # of a block; more rows than a warp looks up at once


def by_warps(terms):
    """The sums over the first axis as the header states them."""
    return orders.in_order(np.stack([orders.in_order(terms[warp::WARPS]) for warp in range(WARPS)]))


def of_one_expert(rows):
    """All tokens choose one expert of two."""
    return build_by_sort(np.ones((rows, 1), np.int32), 2)


def test_a_bias_of_the_up_projection_sums_rows_by_warps():
    terms = orders.telling_terms(ROWS, (264,), seed=1)
    found = biases.up_gradient(Quick(), terms, of_one_expert(ROWS))
    np.testing.assert_array_equal(found, np.stack([np.zeros_like(terms[0]), by_warps(terms)]))
    assert (found[1] != orders.in_order(terms)).mean() > 0.5  # the order tells


def test_a_bias_of_the_down_projection_sums_rows_by_warps():
    terms, gates = orders.telling_terms(ROWS, (264,), seed=2), orders.powers_of_two(ROWS)
    bias = np.zeros((2, 264), np.float32)
    found, _ = biases.down_gradients(Quick(), terms / gates[:, None], bias, gates, of_one_expert(ROWS))
    np.testing.assert_array_equal(found[1], by_warps(terms))


def test_a_token_sums_its_rows_and_then_their_biases_in_the_order_of_the_slots():
    L, d, k = 10, 264, 7
    rng = np.random.default_rng(3)
    dispatch = build_by_sort(np.array([rng.permutation(k) for _ in range(L)], np.int32), k)
    ids, rows = [array.reshape(L, k) for array in (dispatch.token_expert_indices, dispatch.token_index_map)]
    y, bias = orders.telling_terms(L * k, (d,), seed=4), orders.telling_terms(k, (d,), seed=5)
    gates, out = orders.powers_of_two(L, k), np.empty((L, d), np.float32)
    biases.sum_rows(Quick(), y, bias, gates, dispatch, out)
    terms = np.concatenate([gates[..., None] * y[rows], gates[..., None] * bias[ids]], axis=1)
    np.testing.assert_array_equal(out, orders.in_order(terms.swapaxes(0, 1)))
    swapped = np.concatenate([terms[:, k:], terms[:, :k]], axis=1)
    assert (out != orders.in_order(swapped.swapaxes(0, 1))).any()  # the order tells


# ---- planted faults ------------------------------------------------------------------------------

UP_FAULTS = {
    "2_tiled": {
        "bias of the next expert": ("packed_at(tile.expert, 0, 0, h)", "packed_at((tile.expert + 1) % 4, 0, 0, h)"),
        "bias of a for b": ("with_bias(b_sum, biases, 1,", "with_bias(b_sum, biases, 0,"),
        "bias left out of b": ("with_bias(b_sum, biases, 1, j, h)", "b_sum"),
        "bias subtracted": ("? sum + to_float(biases", "? sum - to_float(biases"),
    },
    "3_mma": {
        "bias of the first expert": ("bias + packed_at(expert, 0,", "bias + packed_at(0, 0,"),
        "bias of the first columns": ("tile.expert, r * h + first_column + column", "tile.expert, r * h + column"),
        "one bias for eight columns": ("to_float(biases.values[i])", "to_float(biases.values[0])"),
    },
    "7_persistent": {
        "bias of the first expert": ("bias + packed_at(tile.expert, 0,", "bias + packed_at(0, 0,"),
        "bias of the first tile": ("0, 0, h), tile.column, columns);", "0, 0, h), 0, columns);"),
        "bias of the neighbour": ("threadIdx.x * COUNT + i;", "threadIdx.x * COUNT + (i ^ 1);"),
        "bias in two steps of the depth": ("if (k > 0) chunk_at(", "if (k > 1) chunk_at("),
        "biases twice": ("from_float<Scalar>(1)", "from_float<Scalar>(2)"),
        "short step not awaited": (
            "barrier_wait(&shared.empty[state.stage], state.parity ^ 1);\n            fill.short",
            "fill.short",
        ),
        "sums of the tile before": ("Sums sums = of_tile;", "Sums& sums = const_cast<Sums&>(of_tile);"),
        "sums of one warp": ("for (int of = 0; of < EPILOGUE_WARPS", "for (int of = 0; of < 1"),
        "warps do not meet": ("        meet(0);\n", ""),
        "sums of a for b": ("sums[LAYOUT::INTERLEAVED ? 2 * element + 1", "sums[LAYOUT::INTERLEAVED ? 2 * element"),
    },
}
ACTIVATION_FAULTS = {
    "gate not clamped": ("return at_most(a) *", "return a *"),
    "gate clamped below, too": ("return min_or_nan(a, LIMIT)", "return max_or_nan(min_or_nan(a, LIMIT), -LIMIT)"),
    "no 1 more": ("-LIMIT) + 1.0f", "-LIMIT)"),
    "b not clamped below": ("max_or_nan(at_most(b), -LIMIT)", "at_most(b)"),
    "alpha is 1": ("sigmoid(ALPHA * at_most(a))", "sigmoid(at_most(a))"),
    "gradient of a clamped gate": ("a > LIMIT ? 0.0f : s +", "s +"),
    "gradient of a clamped b": ("fabsf(b) > LIMIT ? 0.0f : 1.0f", "1.0f"),
    "gradient of b clamped above alone": ("fabsf(b) > LIMIT", "b > LIMIT"),
    "slope without alpha": ("s + ALPHA * (s * a)", "s + (s * a)"),
    "gradient of a without 1 more": ("d_y * ACTIVATION::factor(b) * slope", "d_y * b * slope"),
}
BIAS_FAULTS = {
    "bias of another slot": ("token_expert_indices[token * k + lane_id()] :", "token_expert_indices[token * k] :"),
    "biases of four slots alone": ("slot < k; slot += IN_FLIGHT", "slot < 1; slot += IN_FLIGHT"),
    "bias not times the gate": ("expert_of_lane, gate, slot,", "expert_of_lane, 1, slot,"),
    "part of the bias that begins elsewhere": ("add_rows(bias + first,", "add_rows(bias,"),
    "gates by the first expert's bias": ("expert_of_block(E) * d + column", "0 * d + column"),
    "gates by one lane's columns": ("term = warp_sums(of_rows);", "term = of_rows[0];"),
    "gates of half the lanes": ("lanes < WARP; lanes *= 2", "lanes < COUNT; lanes *= 2"),
    "gates in the next row": ("(rows.begin + i) * terms", "(rows.begin + (i ^ 1)) * terms"),
    "bias gradient not times the gate": ("sums[p] += gate * d_value", "sums[p] += d_value"),
    "bias gradient by rows in token order": ("{expert_token_indices[rows.begin + i],", "{(rows.begin + i) / 8,"),
    "bias gradient of one warp": ("for (int warp = 0; warp < WARPS", "for (int warp = 0; warp < 1"),
    "bias gradient of too many rows": ("- begin) {}", "- begin + 1) {}"),
    "bias gradient without the first row": (
        "return WeightedRow{rows.begin + i};",
        "return WeightedRow{rows.begin + i + !i};",
    ),
    "warps do not wait": ("__syncthreads();  // every warp's part is there", ""),
}
FAULTY = [
    pytest.param(version, change, id=f"{version}: {name}")
    for version, faults in UP_FAULTS.items()
    for name, change in faults.items()
]


@pytest.mark.parametrize(("version", "change"), FAULTY)
def test_a_planted_fault_is_caught(version, change):
    sizes = {"2_tiled": {}, "3_mma": {"d": 72, "h": 136}, "7_persistent": {"d": 72, "h": 264}}[version]
    dtype = packed.VERSIONS[version][0]
    one = rounded(step(INTERLEAVED, **sizes), dtype)
    executor = Planted(gemm.file_of("packed", version), *change, seed=3)
    executor.multiprocessors = 2  # so that a block of 7_persistent has several tiles
    with tiles.trying(SMALL) if version == "3_mma" else nullcontext(), pytest.raises((AssertionError, KernelFault)):
        assert_right(run(version, executor, one), one, dtype)


@pytest.mark.parametrize("change", ACTIVATION_FAULTS.values(), ids=ACTIVATION_FAULTS)
def test_a_planted_fault_of_the_activation_is_caught(change):
    one, executor = rounded(step(INTERLEAVED), "float32"), Planted("packed/2_tiled.cu", *change, seed=3)
    with pytest.raises((AssertionError, KernelFault)):
        assert_right(run("2_tiled", executor, one), one, "float32")
        assert_limits(executor)


def of_biases(executor):
    """What each function of `biases` returns, for tokens with more slots than are read at a time; and what is right."""
    rng = np.random.default_rng(9)
    L, d, E, k, n, first = 20, 40, 8, 6, 72, 8
    dispatch = build_by_sort(np.array([rng.permutation(E)[:k] for _ in range(L)], np.int32), E)
    ids, rows = [array.reshape(L, k) for array in (dispatch.token_expert_indices, dispatch.token_index_map)]
    y, bias, gates = [rng.random(shape, np.float32) for shape in ((L * k, d - first), (E, d), (L, k))]
    d_out, d_ab = [rng.random(shape, np.float32) for shape in ((L, d), (L * k, n))]
    out, gate_of_row = np.zeros((L, d), np.float32), np.empty(L * k, np.float32)
    gate_of_row[rows] = gates
    biases.sum_rows(executor, y, bias, gates, dispatch, out, first)
    of_up = biases.up_gradient(executor, d_ab, dispatch)
    of_down, gate_terms = biases.down_gradients(executor, d_out, bias, gate_of_row, dispatch)
    weighted = gate_of_row[:, None] * d_out[dispatch.expert_token_indices]
    yield out[:, first:], (gates[..., None] * (y[rows] + bias[ids][..., first:])).sum(1)
    yield gate_terms.sum(1)[rows], np.einsum("ld,lkd->lk", d_out, bias[ids])
    for sums, of_rows in ((of_up, d_ab), (of_down, weighted)):
        yield sums, np.stack([of_rows[rows[ids == expert]].sum(0) for expert in range(E)])


def assert_biases(executor):
    for found, wanted in of_biases(executor):
        assert relative_error(found, wanted) < 1e-5


def test_the_functions_of_biases_add_and_sum_what_they_say():
    assert_biases(SimtExecutor(seed=3))


@pytest.mark.parametrize("change", BIAS_FAULTS.values(), ids=BIAS_FAULTS)
def test_a_planted_fault_of_the_biases_is_caught(change):
    with pytest.raises((AssertionError, KernelFault)):
        assert_biases(Planted("packed/biases.cu", *change, seed=3))
