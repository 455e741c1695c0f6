"""The whole layer: every gradient against autograd and central differences, what each policy keeps, its checks."""

import functools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import RAGGED, SHAPES
from stages import all_zeros, alter, without_the_last

from moeblaze_ref.backends.numpy_ref import combine, layer
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, MoEConfig, is_gated
from moeblaze_ref.nn import oracle
from moeblaze_ref.systems.layer import Gradients, MoEWeights
from moeblaze_ref.verify.cases import relative_error

LOSSES = {"no losses": (0.0, 0.0), "both losses": (0.7, 0.3)}  # gradients of load-balancing loss and z-loss


def as_torch(case):
    """x and the four weights as leaves that collect gradients; w2 may be None."""
    return [None if t is None else torch.tensor(t, requires_grad=True) for t in (case.x, *case.weights)]


def truths_of(case, k, activation, renormalize, losses):
    """What torch says: routing, out, both losses, and the gradients by name."""
    x, wg, w1, w2, w3 = leaves = as_torch(case)
    routing = oracle.route(x, wg, k, renormalize)
    routing.gates.retain_grad()
    out = oracle.experts(x, routing, w1, w2, w3, activation)
    values = out, oracle.load_balancing_loss(routing), oracle.router_z_loss(routing)
    cotangents = torch.tensor(case.d_out), *losses
    sum((value * cotangent).sum() for value, cotangent in zip(values, cotangents, strict=True)).backward()
    gradients = [None if leaf is None else leaf.grad for leaf in (*leaves, routing.gates)]
    return routing, [value.detach() for value in values], Gradients(*gradients)


def run(case, k, activation="swiglu", policy="minimal", renormalize=False, losses=(0.0, 0.0)):
    """Output and gradients of the layer under test."""
    output = layer.forward(case.x, case.weights, k, activation, policy, renormalize)
    return output, layer.backward(case.d_out, output.saved, case.weights, *losses)


def errors(results, truths):
    """Relative error of each result whose truth exists; a result without truth must be None."""
    for result, truth in zip(results, truths, strict=True):
        assert (result is None) == (truth is None)
    return [relative_error(result, truth) for result, truth in zip(results, truths, strict=True) if truth is not None]


def same_bits(found, expected):
    """Whether both have the same arrays, and None in the same places."""
    return all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def router_has_gradient(shape, renormalize, losses):
    """Gates that are constantly 1 send no gradient to the router: then only the losses do."""
    constant_gates = shape.E == 1 or (renormalize and shape.k == 1)
    return not constant_gates or any(losses)


def assert_agrees_with_autograd(shape, activation, policy, renormalize, losses):
    case = shape.case(activation)
    routing, values, truths = truths_of(case, shape.k, activation, renormalize, losses)
    output, gradients = run(case, shape.k, activation, policy, renormalize, losses)
    chosen = output.saved.dispatch.token_expert_indices.reshape(shape.L, shape.k)
    assert np.array_equal(chosen, routing.topk_experts)
    assert max(errors(output[:3], values)) < 1e-12
    if not router_has_gradient(shape, renormalize, losses):
        assert not gradients.d_wg.any()
        gradients, truths = gradients._replace(d_wg=None), truths._replace(d_wg=None)
    assert max(errors(gradients, truths)) < 1e-12


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalize"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_autograd_for_every_activation_and_policy(activation, policy, renormalize, losses):
    assert_agrees_with_autograd(RAGGED, activation, policy, renormalize, losses)


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalize"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_autograd_for_every_shape(shape, activation, renormalize, losses):
    assert_agrees_with_autograd(shape, activation, "minimal", renormalize, losses)


def objective(x, weights, case, k, activation, renormalize, losses):
    """The scalar whose gradients the backward returns."""
    output = layer.forward(x, weights, k, activation, "inputs", renormalize)
    weighted = losses[0] * output.load_balancing_loss + losses[1] * output.router_z_loss
    return (output.out * case.d_out).sum() + weighted


def central_differences(function, point, step=1e-6):
    """The gradient of a scalar function at an array, one element at a time."""
    gradient = np.empty_like(point)
    for index in np.ndindex(point.shape):
        sides = [point.copy(), point.copy()]
        sides[0][index] -= step
        sides[1][index] += step
        gradient[index] = (function(sides[1]) - function(sides[0])) / (2 * step)
    return gradient


@pytest.mark.parametrize(
    ("activation", "renormalize"), [(activation, False) for activation in ACTIVATIONS] + [("swiglu", True)]
)
def test_agrees_with_central_differences(activation, renormalize):
    shape, losses = RAGGED._replace(L=5, d=4, h=3, E=4, k=2), LOSSES["both losses"]
    case = shape.case(activation)
    output, gradients = run(case, shape.k, activation, "conventional", renormalize, losses)
    options = case, shape.k, activation, renormalize, losses
    y, dispatch = output.saved.intermediates["y"], output.saved.dispatch

    def of_weight(name, weight):
        if weight is None:
            return None
        return central_differences(
            lambda value: objective(case.x, case.weights._replace(**{name: value}), *options), weight
        )

    truths = [
        central_differences(lambda x: objective(x, case.weights, *options), case.x),
        *(of_weight(name, weight) for name, weight in case.weights._asdict().items()),
        central_differences(lambda g: (combine.forward(y, g, dispatch) * case.d_out).sum(), output.saved.gates),
    ]
    assert max(errors(gradients, truths)) < 1e-7


@pytest.mark.parametrize("shape", [RAGGED, *SHAPES[5:]], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_stays_float32_and_near(shape, activation):
    narrow = shape.case(activation).astype(np.float32)
    output, gradients = run(narrow, shape.k, activation, losses=LOSSES["both losses"])
    truth, true_gradients = run(narrow.astype(np.float64), shape.k, activation, losses=LOSSES["both losses"])
    assert np.array_equal(output.saved.dispatch.token_expert_indices, truth.saved.dispatch.token_expert_indices)
    for result in (*output[:3], *gradients):
        assert result is None or result.dtype == np.float32
    assert max(errors((*output[:3], *gradients), (*truth[:3], *true_gradients))) < 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_policies_agree_to_the_bit(activation, dtype):
    case = RAGGED.case(activation).astype(dtype)
    (first, first_gradients), *others = (run(case, RAGGED.k, activation, policy) for policy in POLICIES)
    for output, gradients in others:
        assert same_bits((output.out, *gradients), (first.out, *first_gradients))


ALWAYS = {
    "x",
    "gates",
    "expert_token_indices",
    "expert_token_offsets",
    "token_expert_indices",
    "token_index_map",
}
KEPT_BETWEEN_GEMMS = {  # policy: (gated, not gated)
    "conventional": ({"routed_x", "a", "b", "act_a", "y_swi", "y"}, {"routed_x", "a", "y_swi", "y"}),
    "paper": ({"a", "b", "y_swi"}, {"a", "y_swi"}),
    "minimal": ({"a", "b"}, {"a"}),
    "inputs": (set(), set()),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_policy_keeps_what_it_says_and_nothing_else(activation, policy):
    case = RAGGED.case(activation).astype(np.float32)
    saved = layer.forward(case.x, case.weights, RAGGED.k, activation, policy).saved
    gated, ungated = KEPT_BETWEEN_GEMMS[policy]
    if activation == "relu" and policy in ("paper", "minimal"):
        ungated = {"y_swi"}
    tensors = saved.tensors()
    assert tensors.keys() == ALWAYS | (gated if is_gated(activation) else ungated)
    c = MoEConfig(*RAGGED[:5], activation, "float32")
    wide = sum(tensors.get(name) is not None for name in ("routed_x", "y")) * c.R * c.d * c.itemsize
    hidden = sum(tensors.get(name) is not None for name in ("a", "b", "act_a", "y_swi")) * c.R * c.h * c.itemsize
    always = c.L * c.d * c.itemsize + c.R * c.itemsize + (3 * c.R + c.E + 1) * 4
    assert sum(tensor.nbytes for tensor in tensors.values()) == always + wide + hidden
    arrays = {name for name, value in vars(saved).items() if isinstance(value, np.ndarray)}
    assert arrays == {"x", "gates"}  # nothing is kept beside what tensors() lists
    assert all(tensor.base is None or tensor.base.nbytes == tensor.nbytes for tensor in tensors.values())


def test_kept_tensors_hold_what_their_names_say():
    case = RAGGED.case()
    saved = layer.forward(case.x, case.weights, RAGGED.k, policy="conventional").saved
    kept = saved.intermediates
    assert np.array_equal(kept["routed_x"], case.x[saved.dispatch.expert_token_indices])
    assert np.array_equal(kept["act_a"] * kept["b"], kept["y_swi"])
    first = saved.dispatch.token_expert_indices[saved.dispatch.token_index_map == 0][0]
    assert relative_error(kept["a"][0], kept["routed_x"][0] @ case.weights.w1[first]) < 1e-14
    assert relative_error(kept["y"][0], kept["y_swi"][0] @ case.weights.w3[first]) < 1e-14


@pytest.mark.parametrize("policy", ["conventional", "paper"])
def test_a_kept_y_swi_is_read_and_not_rebuilt(policy):
    case = RAGGED.case()
    output, expected = run(case, RAGGED.k, policy=policy)
    output.saved.intermediates["y_swi"] *= 2.0
    gradients = layer.backward(case.d_out, output.saved, case.weights)
    assert relative_error(gradients.d_w3, 2.0 * expected.d_w3) < 1e-14
    assert relative_error(gradients.d_gates, 2.0 * expected.d_gates) < 1e-14


def test_what_only_the_conventional_policy_keeps_is_never_read():
    case = RAGGED.case()
    output, expected = run(case, RAGGED.k, policy="conventional")
    for name in ("routed_x", "act_a", "y"):
        output.saved.intermediates[name].fill(np.nan)
    assert same_bits(layer.backward(case.d_out, output.saved, case.weights), expected)


def test_a_second_backward_gives_the_same_again():
    case = RAGGED.case()
    output, first = run(case, RAGGED.k)
    assert same_bits(layer.backward(case.d_out, output.saved, case.weights), first)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ["swiglu", "silu", "relu"])
def test_overwriting_changes_no_bit_and_a_second_backward_raises(activation, policy):
    case = RAGGED.case(activation)
    output, expected = run(case, RAGGED.k, activation, policy)
    assert same_bits(layer.backward(case.d_out, output.saved, case.weights, overwrite=True), expected)
    assert not output.saved.intermediates
    if policy == "inputs":  # nothing was kept, so nothing is gone
        layer.backward(case.d_out, output.saved, case.weights, overwrite=True)
        return
    for overwrite in (False, True):
        with pytest.raises(RuntimeError, match="an earlier backward has overwritten what the forward kept"):
            layer.backward(case.d_out, output.saved, case.weights, overwrite=overwrite)


def test_buffers_are_freed_as_soon_as_they_are_dead(monkeypatch):
    """Which of the (R, h) arrays live when each stage of the backward begins."""
    case, alive, arrays = RAGGED.case(), [], {}

    def watch(name, *results):
        def watched(function, *args):
            alive.append((name.split(".")[1], {label for label, array in arrays.items() if array() is not None}))
            values = function(*args)
            found = values if isinstance(values, tuple) else (values,)
            arrays.update((label, weakref.ref(value)) for label, value in zip(results, found, strict=False))
            return values

        alter(monkeypatch, "numpy", name, lambda function: functools.partial(watched, function))

    saved = layer.forward(case.x, case.weights, RAGGED.k, policy="conventional").saved
    arrays.update((name, weakref.ref(array)) for name, array in saved.intermediates.items())
    watch("expert_down.hidden_gradients", "d_a", "d_b", "gated_y")
    for name in ("expert_down.weight_gradient", "expert_up.input_gradient", "expert_up.weight_gradient"):
        watch(name)
    watch("router.weight_gradient")
    layer.backward(case.d_out, saved, case.weights, overwrite=True)
    in_place = {"a", "b", "d_a", "d_b"}
    assert alive == [
        ("hidden_gradients", {"a", "b", "y_swi"}),
        ("weight_gradient", in_place | {"gated_y"}),
        ("input_gradient", in_place),
        ("weight_gradient", in_place),
        ("weight_gradient", {"b", "d_b"}),
        ("weight_gradient", set()),
    ]


STAGES_OF = {  # what must run for a gradient, beside hidden_gradients and what it takes to come to d_logits
    "d_x": {"expert_up.input_gradient", "gating.backward", "router.input_gradient"},
    "d_wg": {"gating.backward", "router.weight_gradient"},
    "d_w1": {"expert_up.weight_gradient of a"},
    "d_w2": {"expert_up.weight_gradient of b"},
    "d_w3": {"expert_down.weight_gradient"},
    "d_gates": set(),
}


@pytest.mark.parametrize(
    "wanted", [(), *((name,) for name in STAGES_OF), ("d_x", "d_w2"), tuple(STAGES_OF)], ids="+".join
)
def test_what_nobody_wants_is_not_computed(wanted, monkeypatch):
    case, ran = RAGGED.case(), set()
    output, expected = run(case, RAGGED.k)

    def watch(name):
        def watched(function, *args):
            values = function(*args)
            which = f" of {'a' if np.array_equal(values, expected.d_w1) else 'b'}" if values.shape == W.w1.shape else ""
            ran.add(name + which)
            return values

        alter(monkeypatch, "numpy", name, lambda function: functools.partial(watched, function))

    for name in {name.partition(" of ")[0] for names in STAGES_OF.values() for name in names}:
        watch(name)
    found = layer.backward(case.d_out, output.saved, case.weights, wanted=wanted)
    for name, gradient, truth in zip(Gradients._fields, found, expected, strict=True):
        assert (gradient is not None) == (name in wanted or name == "d_gates")
        assert gradient is None or np.array_equal(gradient, truth)
    assert ran == set().union(*(STAGES_OF[name] for name in wanted))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_no_tokens(activation, policy):
    case = RAGGED._replace(L=0).case(activation)
    output, gradients = run(case, RAGGED.k, activation, policy, True, LOSSES["both losses"])
    assert output.out.shape == (0, RAGGED.d)
    assert output.load_balancing_loss == output.router_z_loss == 0.0
    expected = (case.x, *case.weights, output.saved.gates)
    for gradient, tensor in zip(gradients, expected, strict=True):
        assert (gradient is None) == (tensor is None)
        assert gradient is None or (gradient.shape == tensor.shape and not gradient.any())


def test_strided_inputs_give_the_same():
    case = RAGGED.case()
    strided = replace(
        case, x=np.asfortranarray(case.x), weights=MoEWeights(*(np.asfortranarray(w) for w in case.weights))
    )
    (expected, expected_gradients), (output, gradients) = run(case, RAGGED.k), run(strided, RAGGED.k)
    assert max(errors((output.out, *gradients), (expected.out, *expected_gradients))) < 1e-14


def of_the_first_call(function):
    """``function`` that is given the arguments of its first call every time."""
    calls = []

    def faulty(*args):
        calls.append(args)
        return function(*calls[0])

    return faulty


PLANTED_FAULTS = {
    "zeros: up": ("expert_up.forward", all_zeros),
    "zeros: down": ("expert_down.forward", all_zeros),
    "zeros: combine": ("combine.forward", all_zeros),
    "zeros: input gradient": ("expert_up.input_gradient", all_zeros),
    "zeros: up weight gradient": ("expert_up.weight_gradient", all_zeros),
    "zeros: hidden gradients": ("expert_down.hidden_gradients", all_zeros),
    "zeros: down weight gradient": ("expert_down.weight_gradient", all_zeros),
    "zeros: gate gradient": ("gating.backward", all_zeros),
    "zeros: balancing loss": ("gating.load_balancing_loss_backward", all_zeros),
    "zeros: z-loss": ("gating.router_z_loss_backward", all_zeros),
    "dropped row: a": ("expert_up.forward", without_the_last),
    "dropped row: y": ("expert_down.forward", without_the_last),
    "dropped row: out": ("combine.forward", without_the_last),
    "dropped row: d_a": ("expert_down.hidden_gradients", without_the_last),
    "dropped row: gated_y": ("expert_down.hidden_gradients", lambda f: without_the_last(f, 2)),
    "dropped row: d_gates": ("expert_down.hidden_gradients", lambda f: without_the_last(f, 3)),
    "dropped row: d_x": ("expert_up.input_gradient", without_the_last),
    "d_w2 from d_a": ("expert_up.weight_gradient", of_the_first_call),
    "wrong expert": ("expert_down.forward", lambda f: lambda y_swi, w3, *rest: f(y_swi, np.roll(w3, 1, 0), *rest)),
    "unscaled gate": ("combine.forward", lambda f: lambda y, gates, *rest: f(y, np.ones_like(gates), *rest)),
    "gates of another slot": ("combine.forward", lambda f: lambda y, gates, *rest: f(y, gates[:, ::-1], *rest)),
    "unscaled gate, backward": (
        "expert_down.hidden_gradients",
        lambda f: lambda d_out, gates, *rest: f(d_out, np.ones_like(gates), *rest),
    ),
    "not renormalised, backward": ("gating.backward", lambda f: lambda *args: f(*args[:3], False, *args[4:])),
}


@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_a_planted_fault_fails_the_comparison(fault, monkeypatch):
    name, plant = PLANTED_FAULTS[fault]
    alter(monkeypatch, "numpy", name, plant)
    with pytest.raises(AssertionError):
        assert_agrees_with_autograd(RAGGED, "swiglu", "minimal", True, LOSSES["both losses"])


CASE = RAGGED.case()
X, W = CASE.x, CASE.weights
NAN_X = np.where(np.arange(X.size).reshape(X.shape) == 13, np.nan, X)  # x[1, 1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=X[0]), ValueError, "x has shape .* 2 dimensions"),
        (dict(x=NAN_X), ValueError, r"x\[1, 1\] is nan, but x must be finite"),
        (dict(x=X.astype(np.float16)), TypeError, "x has dtype float16, but it must be float64 or float32"),
        (dict(x=X.tolist()), TypeError, "x is a list"),
        (dict(x=X[:, 1:]), ValueError, r"wg has shape \(12, 5\), but it must be \(d=11, E\)"),
        (dict(weights=tuple(W)), TypeError, "weights is a tuple, but it must be a MoEWeights"),
        (dict(weights=W._replace(wg=W.wg[:, 1:])), ValueError, r"w1 has shape .*, but it must be \(E=4, d=12, h\)"),
        (dict(weights=W._replace(wg=np.full_like(W.wg, 1e308))), ValueError, r"logits\[\d+, \d+\] is -?(inf|nan)"),
        (dict(weights=W._replace(w1=W.w1[0])), ValueError, "w1 has shape .* 3 dimensions"),
        (dict(weights=W._replace(w2=W.w2[:, :, 1:])), ValueError, r"w2 has shape .* \(E=5, d=12, h=20\)"),
        (dict(weights=W._replace(w3=W.w1)), ValueError, r"w3 has shape \(5, 12, 20\), .* \(E=5, h=20, d=12\)"),
        (dict(weights=W._replace(w3=W.w3.astype(np.float32))), TypeError, "w3 has dtype float32"),
        (dict(weights=W._replace(w2=None)), ValueError, "w2 is None, but swiglu is gated"),
        (dict(activation="relu"), ValueError, "relu is not gated: w2 must be None"),
        (dict(activation="SwiGLU"), ValueError, "unknown activation 'SwiGLU'"),
        (dict(activation="gelu_tahn"), ValueError, "Did you mean 'gelu_tanh'"),
        (dict(policy="minimum"), ValueError, "unknown policy 'minimum'. Did you mean 'minimal'"),
        (dict(k=6), ValueError, "k is 6, but there are only 5 experts"),
        (dict(k=0), ValueError, "k is 0, but it must be >= 1"),
        (dict(k=2.0), TypeError, "k is 2.0"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_bad_input_of_forward(change, error, message):
    with pytest.raises(error, match=message):
        layer.forward(**(dict(x=X, weights=W, k=3) | change))


SAVED = layer.forward(X, W, RAGGED.k).saved


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(d_out=np.ones((36, 12))), ValueError, r"d_out has shape \(36, 12\), but it must be \(L=37, d=12\)"),
        (dict(d_out=np.full((37, 12), np.nan)), ValueError, r"d_out\[0, 0\] is nan"),
        (dict(d_out=np.ones((37, 12), np.float32)), TypeError, "d_out has dtype float32"),
        (dict(saved=SAVED.tensors()), TypeError, "saved is a dict, but it must be a Saved"),
        (dict(weights=W._replace(wg=W.wg[:, 1:])), ValueError, "w1 has shape"),
        (dict(weights=W._replace(w2=None)), ValueError, "w2 is None, but swiglu is gated"),
        (dict(d_load_balancing_loss=float("inf")), ValueError, "d_load_balancing_loss is inf"),
        (dict(d_router_z_loss=np.array(np.nan)), ValueError, "d_router_z_loss is nan, but it must be finite"),
        (dict(wanted=["d_w4"]), ValueError, "unknown gradient 'd_w4'. Did you mean"),
        (dict(d_router_z_loss="1e-3 of it"), TypeError, "d_router_z_loss is '1e-3 of it'"),
    ],
)
def test_bad_input_of_backward(change, error, message):
    with pytest.raises(error, match=message):
        layer.backward(**(dict(d_out=np.ones((37, 12)), saved=SAVED, weights=W) | change))
