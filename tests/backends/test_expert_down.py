"""The down-projection and its backward without a kept output, against torch and the textbook combine; its checks."""

import numpy as np
import pytest
import torch
from helpers import RAGGED, SHAPES

from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.backends.numpy_ref import combine
from moeblaze_ref.backends.numpy_ref import expert_down as stage
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.nn import oracle
from moeblaze_ref.verify.cases import relative_error


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
    y_swi = oracle.ACTIVATION[activation](ta)
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
    inputs = make_inputs(RAGGED, activation)
    dispatch = inputs["dispatch"]
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], activation)
    y = stage.forward(y_swi, inputs["w3"], dispatch)
    _, textbook = combine.backward(inputs["d_out"], y, inputs["gates"], dispatch)
    assert relative_error(backward(**inputs)[2], textbook) < 1e-14


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_kept_y_swi_changes_no_bit(activation):
    inputs = make_inputs(RAGGED, activation)
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], activation)
    for kept, rebuilt in zip(backward(**inputs, y_swi=y_swi), backward(**inputs), strict=True):
        assert (kept is None and rebuilt is None) or np.array_equal(kept, rebuilt)


def test_a_kept_y_swi_is_read():
    inputs = make_inputs(RAGGED)
    y_swi = activation_stage.forward(inputs["a"], inputs["b"], "swiglu")
    assert relative_error(backward(**inputs, y_swi=2.0 * y_swi)[3], 2.0 * backward(**inputs)[3]) < 1e-15


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_gradients_of_a_and_b_may_take_their_places(activation):
    inputs = make_inputs(RAGGED, activation)
    expected = stage.hidden_gradients(**inputs)
    found = stage.hidden_gradients(**inputs, overwrite=True)
    assert found[0] is inputs["a"] and found[1] is inputs["b"]
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or np.array_equal(one, other)


def test_what_is_read_only_is_not_overwritten():
    inputs = make_inputs(RAGGED)
    inputs["b"].flags.writeable = False
    with pytest.raises(ValueError, match="b is read-only, but it is written to"):
        stage.hidden_gradients(**inputs, overwrite=True)


def test_no_tokens():
    inputs = make_inputs(RAGGED._replace(L=0))
    assert stage.forward(inputs["a"], inputs["w3"], inputs["dispatch"]).shape == (0, RAGGED.d)
    d_a, d_b, d_gates, d_w3 = backward(**inputs)
    assert d_a.shape == d_b.shape == (0, RAGGED.h) and d_gates.shape == (0, RAGGED.k)
    assert d_w3.shape == inputs["w3"].shape and not d_w3.any()


INPUTS = make_inputs(RAGGED)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(y_swi=np.ones((110, 20))), ValueError, r"y_swi has shape \(110, 20\), but it must be \(R=111, h\)"),
        (dict(y_swi=np.full((111, 20), np.nan)), ValueError, r"y_swi\[0, 0\] is nan"),
        (dict(y_swi=np.ones((111, 20), int)), TypeError, "y_swi has dtype int64"),
        (dict(w3=INPUTS["w3"][1:]), ValueError, r"w3 has shape \(4, 20, 12\), but it must be \(E=5, h=20, d\)"),
        (dict(w3=INPUTS["w3"].astype(np.float32)), TypeError, "w3 has dtype float32"),
        (dict(dispatch=7), TypeError, "dispatch is a int, but it must be a Dispatch"),
    ],
)
def test_bad_input_of_forward(change, error, message):
    with pytest.raises(error, match=message):
        stage.forward(**(dict(y_swi=INPUTS["a"], w3=INPUTS["w3"], dispatch=INPUTS["dispatch"]) | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(d_out=np.ones((37, 11))), ValueError, r"d_out has shape \(37, 11\), but it must be \(L=37, d=12\)"),
        (dict(d_out=np.full((37, 12), np.inf)), ValueError, r"d_out\[0, 0\] is inf"),
        (dict(d_out=np.ones((37, 12), np.float32)), TypeError, "d_out has dtype float32"),
        (dict(gates=np.ones((37, 2))), ValueError, r"gates has shape \(37, 2\), but it must be \(L=37, k=3\)"),
        (dict(gates=np.ones((37, 3), np.float32)), TypeError, "gates has dtype float32"),
        (dict(a=np.ones((111, 19))), ValueError, r"w3 has shape \(5, 20, 12\), but it must be \(E=5, h=19, d\)"),
        (dict(a=np.ones((110, 20))), ValueError, r"a has shape \(110, 20\), but it must be \(R=111, h\)"),
        (dict(b=None), ValueError, "b is None, but swiglu is gated"),
        (dict(b=np.ones((111, 2))), ValueError, r"b has shape \(111, 2\)"),
        (dict(activation="silu"), ValueError, "silu is not gated: b must be None"),
        (dict(activation="siwglu"), ValueError, "Did you mean 'swiglu'"),
        (dict(w3=INPUTS["w3"][0]), ValueError, "w3 has shape .* 3 dimensions"),
        (dict(y_swi=np.ones((111, 19))), ValueError, r"y_swi has shape \(111, 19\), but it must be \(R=111, h=20\)"),
        (dict(dispatch=None), TypeError, "dispatch is a NoneType"),
    ],
)
def test_bad_input_of_backward(change, error, message):
    with pytest.raises(error, match=message):
        stage.hidden_gradients(**(INPUTS | change))


@pytest.mark.parametrize(
    ("gated_y", "error", "message"),
    [
        (np.ones((110, 20)), ValueError, r"gated_y has shape \(110, 20\), but it must be \(R=111, h\)"),
        (np.ones((111, 20), np.float32), TypeError, "d_out has dtype float64, but it must be float32"),
        (np.full((111, 20), np.nan), ValueError, r"gated_y\[0, 0\] is nan"),
    ],
)
def test_bad_input_of_the_weight_gradient(gated_y, error, message):
    with pytest.raises(error, match=message):
        stage.weight_gradient(gated_y, INPUTS["d_out"], INPUTS["dispatch"])
