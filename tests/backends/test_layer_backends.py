"""The layer in every backend: each activation, what each policy keeps, relu's backward from y_swi alone, faults."""

from dataclasses import replace

import numpy as np
import pytest
from expert_stages import IN_PARTS, RAGGED, assert_same_bits
from helpers import Shape
from planted import Quick, faulty_module

from moeblaze_ref.backends.numba_cuda import layer, router, runtime
from moeblaze_ref.backends.numpy_ref import layer as numpy_layer
from moeblaze_ref.backends.raw_cuda import expert_down, expert_up, gemm
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES
from moeblaze_ref.core.contract import bodies
from moeblaze_ref.systems import layer as body
from moeblaze_ref.verify.cases import make_case, relative_error
from moeblaze_ref.verify.comparisons import BOUNDS

# ---- the Numba kernels -------------------------------------------------------------------------

SMALL = Shape(13, 7, 6, 3, 2)
LAYER = Shape(1027, 97, 203, 7, 3, "zipf") if runtime.EXECUTOR == "cuda" else Shape(6, 5, 6, 3, 2, "zipf")


def errors(found, truth):
    """Relative error of each tensor that there is; each is float32 and of the right shape, or None on both sides."""
    assert [array is None for array in found] == [array is None for array in truth]
    pairs = [pair for pair in zip(found, truth, strict=True) if pair[0] is not None]
    assert all(array.dtype == np.float32 for array, _ in pairs)
    return [relative_error(*pair) for pair in pairs]


def run_layer(version, case, policy="minimal", renormalize=False, overwrite=False):
    """(out, both losses and every gradient; what was saved) of the numpy layer, Numba's, or one of raw kernels."""
    others = {"numpy": numpy_layer, "numba": layer}
    how = {} if version in others else {"executor": Quick(), "version": version}
    stage = others.get(version, raw_layer)
    with runtime.poisoned_outputs():
        output = stage.forward(case.x, case.weights, case.k, case.activation, policy, renormalize, **how)
        saved = replace(output.saved, intermediates={**output.saved.intermediates})  # a backward may empty its own
        gradients = stage.backward(case.d_out, output.saved, case.weights, 0.7, 0.3, overwrite=overwrite, **how)
    return (*output[:3], *gradients), saved


def layer_errors(shape, activation="swiglu", renormalize=True):
    """Relative errors of Numba's layer, the choice of experts being the specification's."""
    case = shape.case(activation).astype(np.float32)
    found, saved = run_layer("numba", case, renormalize=renormalize)
    truth, expected = run_layer("numpy", case.astype(np.float64), renormalize=renormalize)
    np.testing.assert_array_equal(saved.dispatch.token_expert_indices, expected.dispatch.token_expert_indices)
    return errors(found, truth)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_with_every_activation(activation):
    assert np.max(layer_errors(LAYER, activation)) <= BOUNDS["float32"]


@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalize"])
@pytest.mark.parametrize("shape", [SMALL._replace(L=1), SMALL._replace(L=0), LAYER._replace(k=3)], ids=str)
def test_the_layer_with_every_shape(shape, renormalize):
    assert np.max(layer_errors(shape, renormalize=renormalize)) <= BOUNDS["float32"]


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh", "relu"])
def test_policies_agree_to_the_bit_and_keep_what_the_specification_keeps(activation):
    case = LAYER.case(activation).astype(np.float32)
    first, _ = run_layer("numba", case)
    for policy in POLICIES:
        found, saved = run_layer("numba", case, policy)
        for one, other in zip(found, first, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=policy)
        _, expected = run_layer("numpy", case, policy)
        assert saved.tensors().keys() == expected.tensors().keys()
        kept = errors(saved.intermediates.values(), expected.intermediates.values())
        assert max(kept, default=0.0) <= BOUNDS["float32"]


LAYER_FAULTS = {
    "d_x without the router's share": ("layer", "_gradient(d_logits, wg, d_x)", "_gradient(0 * d_logits, wg, d_x)"),
    "gates not renormalised in the backward": ("layer", "chosen, saved.renormalize,", "chosen, False,"),
    "no balancing loss": ("layer", "renormalize, *d_losses)", "renormalize, 1.0, d_router_z_loss)"),
    "no z-loss": ("layer", "renormalize, *d_losses)", "renormalize, d_load_balancing_loss, 1.0)"),
    "d_wg of other tokens": ("router", "_matmul(x.T, d_logits)", "_matmul(x.T, d_logits[::-1])"),
    "matmul: last row dropped": ("router", "if row < rows:", "if row < rows - 1:"),
    "matmul: last term dropped": ("router", "range(left.shape[1])", "range(left.shape[1] - 1)"),
}


@pytest.mark.parametrize("fault", LAYER_FAULTS)
def test_a_fault_planted_in_the_layer_is_caught(fault, monkeypatch):
    where, right, wrong = LAYER_FAULTS[fault]
    if where == "router":
        faulty = faulty_module(router, right, wrong)
        stages = layer._stages()._replace(router=bodies(body.RouterStage, faulty))
        monkeypatch.setattr(layer, "_stages", lambda: stages)
    else:
        faulty = faulty_module(body, right, wrong)
        faulty.Saved = body.Saved  # which the checks know
        monkeypatch.setattr(layer, "layer", faulty)
    try:
        error = np.max(layer_errors(LAYER))
    except (AssertionError, ValueError):  # another choice of experts; a poisoned value in a check
        return
    assert not error <= BOUNDS["float32"]


CASE = SMALL.case().astype(np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": CASE.x.astype(np.float64)}, TypeError, "x has dtype float64, but it must be float32"),
        ({"weights": tuple(CASE.weights)}, TypeError, "weights is a tuple, but it must be a MoEWeights"),
        ({"weights": CASE.weights._replace(w3=CASE.weights.w1)}, ValueError, r"w3 has shape \(3, 7, 6\)"),
        ({"policy": "minimum"}, ValueError, "unknown policy 'minimum'. Did you mean 'minimal'"),
        ({"activation": "relu"}, ValueError, "relu is not gated: w2 must be None"),
        ({"k": 4}, ValueError, "k is 4, but there are only 3 experts"),
    ],
)
def test_bad_input_of_the_layer(change, error, message):
    with pytest.raises(error, match=message):
        layer.forward(**({"x": CASE.x, "weights": CASE.weights, "k": 2} | change))


# ---- relu's backward from y_swi alone ------------------------------------------------------------

SIZES = {"L": 37, "d": 16, "h": 24, "E": 5, "k": 2}  # no tile divides the rows of an expert
WIDE = {"L": 70, "d": 128, "h": 128, "E": 3, "k": 2}  # what 7_persistent takes

# version of the expert kernels, or the backend that has none; dtype, sizes
VERSIONS = [
    ("numpy", "float64", SIZES),
    ("numpy", "float32", SIZES),
    ("numba", "float32", LAYER._asdict()),
    *((version, "float32", SIZES) for version in ("1_naive", "2_tiled", "3_mma_tf32")),
    *((version, "bfloat16", SIZES) for version in ("1_naive", "2_tiled", "3_mma")),
    ("7_persistent", "bfloat16", WIDE),
]


def zeros_and_signs(case):
    """The case with tokens whose a is 0 and -0: there the slope is 0 by definition."""
    case.x[:2] = [[0.0], [-0.0]]
    return case


def test_every_version_of_the_expert_kernels_is_in_the_list():
    versions = {version for version, *_ in VERSIONS} - {"numpy", "numba"}
    assert versions == {*expert_up.VERSIONS} == {*expert_down.VERSIONS}


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize(("version", "dtype", "sizes"), VERSIONS)
def test_y_swi_alone_gives_the_bits_of_a(version, dtype, sizes, overwrite):
    case = zeros_and_signs(make_case(**sizes | {"routing": "zipf"}, activation="relu")).astype(dtype)
    expected, saved = run_layer(version, case, "conventional", overwrite=overwrite)
    assert "a" in saved.intermediates
    for policy in POLICIES:
        found, saved = run_layer(version, case, policy, overwrite=overwrite)
        if policy in ("paper", "minimal"):
            assert tuple(saved.intermediates) == ("y_swi",)
        for one, other in zip(found, expected, strict=True):
            assert (one is None and other is None) or np.array_equal(one, other)
            assert one is None or np.asarray(one, dtype=np.float64).any()


def test_a_y_swi_that_is_damaged_is_seen():
    case = make_case(**SIZES, routing="zipf", activation="relu")
    output = numpy_layer.forward(case.x, case.weights, case.k, "relu", "minimal")
    expected = numpy_layer.backward(case.d_out, output.saved, case.weights)
    output.saved.intermediates["y_swi"][-1] = 0.0
    found = numpy_layer.backward(case.d_out, output.saved, case.weights)
    for name in ("d_x", "d_w1", "d_w3", "d_gates"):
        assert not np.array_equal(getattr(found, name), getattr(expected, name)), name


# ---- the raw kernels, as printed and in parts ----------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_in_parts_of_its_columns_is_the_same(policy, monkeypatch):
    case = IN_PARTS.astype("bfloat16")

    def outcome():
        executor = Quick()
        with executor.recording() as launches:
            out, *_, saved = raw_layer.forward(
                case.x, case.weights, case.k, policy=policy, executor=executor, version="7_persistent"
            )
        return out, saved.tensors(), [launch.kernel for launch in launches].count("combine")

    out, kept, sums = outcome()
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)
    found, kept_in_parts, sums_in_parts = outcome()
    np.testing.assert_array_equal(found, out)
    assert_same_bits({"kept": kept_in_parts}, {"kept": kept})
    assert (sums, sums_in_parts) == (1, 1 if policy == "conventional" else 2)  # that one keeps y


@pytest.mark.parametrize("policy", POLICIES)
def test_the_papers_forward_keeps_what_the_policy_says_and_never_has_y(policy):
    case, executor = RAGGED.astype("bfloat16"), Quick()
    arguments = case.x, case.weights, case.k, case.activation, policy
    expected = raw_layer.forward(*arguments, executor=executor)
    with executor.recording() as launches:
        found = raw_layer.forward(*arguments, executor=executor, version="as_printed")
    kernels = [launch.kernel for launch in launches]
    assert kernels[-case.E - 2 :] == ["gate_rows", *["add_expert"] * case.E, "round_sums"]
    assert not {"expert_down", "combine"} & {*kernels}
    kept = {name: array for name, array in expected.saved.tensors().items() if name != "y"}
    assert_same_bits({"kept": found.saved.tensors()}, {"kept": kept})
    assert found.saved.tensors().keys() == kept.keys()
    assert 0 < relative_error(found.out.astype(float), expected.out.astype(float)) < 2.0**-7  # y is not rounded
