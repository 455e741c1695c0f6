"""The numpy specification of every router: autograd in float64 gives the same choice, gates and gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers_routers import ROUTERS_OF, E, K

from moeblaze_ref.backends.numpy_ref import gating
from moeblaze_ref.backends.numpy_ref import routers as reference
from moeblaze_ref.core.routers import ROUTERS, Router
from moeblaze_ref.nn import routers as of_torch
from moeblaze_ref.verify.cases import relative_error

L = 50
MORE = {  # what no family has
    "softmax and a selection bias": Router(renormalize=True, epsilon=0.3, selection_bias=True, scale=0.5),
    "softmax and the two best of a group": Router(groups=4, groups_kept=3, group_score="top2"),
    "sigmoid and the best of a group": Router("sigmoid", groups=8, groups_kept=2, renormalize=True),
    "all groups": Router("sigmoid", groups=4, groups_kept=4, group_score="top2", selection_bias=True),
}
EVERY = {**ROUTERS_OF, **MORE}
every_router = pytest.mark.parametrize("router", EVERY.values(), ids=EVERY)


def make_inputs(router, dtype=np.float64):
    """Logits (L, E), the selection bias (E,) or None, and the gradient (L, K) of the gates."""
    random = np.random.default_rng(11)
    logits, d_gates = random.standard_normal((L, E)), random.standard_normal((L, K))
    bias = 0.2 * random.standard_normal(E) if router.selection_bias else None
    return logits.astype(dtype), None if bias is None else bias.astype(dtype), d_gates.astype(dtype)


def results(router, dtype=np.float64):
    logits, bias, d_gates = make_inputs(router, dtype)
    chosen = reference.choose(logits, K, router, bias)
    return chosen, reference.weigh(logits, chosen, router), reference.backward(d_gates, logits, chosen, router)


@every_router
def test_choice_gates_and_gradient_are_those_of_autograd(router):
    logits, bias, d_gates = make_inputs(router)
    leaf = torch.tensor(logits, requires_grad=True)
    routing = of_torch.choose(leaf, K, router, None if bias is None else torch.tensor(bias))
    routing.gates.backward(torch.tensor(d_gates))
    chosen, gates, d_logits = results(router)
    assert chosen.dtype == np.int32 and np.array_equal(chosen, routing.topk_experts)
    assert relative_error(gates, routing.gates.detach()) < 1e-14
    assert relative_error(d_logits, leaf.grad) < 1e-12


@every_router
def test_float32_stays_float32_and_near(router):
    narrow, wide = results(router, np.float32), results(router)
    assert np.array_equal(narrow[0], wide[0])
    for found, exact in zip(narrow[1:], wide[1:], strict=True):
        assert found.dtype == np.float32
        assert relative_error(found, exact) < 1e-5


@every_router
def test_a_choice_of_one_expert_and_of_no_token(router):
    logits, bias, _ = make_inputs(router)
    chosen = reference.choose(logits[:0], K, router, bias)
    assert chosen.shape == reference.weigh(logits[:0], chosen, router).shape == (0, K)
    first = reference.choose(logits, 1, router, bias)
    assert np.array_equal(first, reference.choose(logits, K, router, bias)[:, :1])


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_plain_router_is_that_of_the_kernels(renormalize):
    logits, _, d_gates = make_inputs(Router())
    chosen, gates, d_logits = results(Router(renormalize=renormalize))
    _, expected, expected_gates = gating.forward(logits, K, renormalize)
    assert np.array_equal(chosen, expected) and relative_error(gates, expected_gates) < 1e-14
    assert relative_error(d_logits, gating.backward(d_gates, logits, chosen, renormalize)) < 1e-12


def test_the_groups_are_chosen_by_hand():
    scores = np.array([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]])  # groups of two: best 0.9, 0.6, 0.3; sums 1.0, 1.1, 0.5
    logits = np.log(scores / (1 - scores))
    of_best = Router("sigmoid", groups=3, groups_kept=1)
    of_sums = replace(of_best, group_score="top2")
    assert reference.choose(logits, 2, of_best).tolist() == [[0, 1]]
    assert reference.choose(logits, 2, of_sums).tolist() == [[2, 3]]
    assert reference.choose(logits, 2, replace(of_sums, groups_kept=2)).tolist() == [[0, 2]]
    np.testing.assert_allclose(reference.weigh(logits, np.array([[0, 2]], np.int32), of_sums), [[0.9, 0.6]])


def test_ties_go_to_the_lower_expert_and_to_the_lower_group():
    router = Router("sigmoid", groups=3, groups_kept=2, group_score="top2")
    logits = np.array([[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 6])
    assert reference.choose(logits, 3, router).tolist() == [[2, 3, 4], [0, 1, 2]]


def test_huge_logits_do_not_overflow():
    logits = np.array([[3e4, -3e4, 0.0]], np.float32)
    chosen = np.array([[0, 1]], np.int32)
    with np.errstate(over="raise", invalid="raise"):
        assert reference.weigh(logits, chosen, Router("sigmoid")).tolist() == [[1.0, 0.0]]
        assert reference.backward(np.ones((1, 2), np.float32), logits, chosen, Router("sigmoid")).tolist() == [[0] * 3]


def test_the_gradient_of_the_logit_bias_is_that_of_autograd():
    logits, _, d_gates = make_inputs(ROUTERS["gpt_oss"])
    bias = torch.randn(E, dtype=torch.float64, requires_grad=True)
    routing = of_torch.choose(torch.tensor(logits) + bias, K, ROUTERS["gpt_oss"])
    routing.gates.backward(torch.tensor(d_gates))
    chosen = routing.topk_experts.int().numpy()
    d_logits = reference.backward(d_gates, logits + bias.detach().numpy(), chosen, ROUTERS["gpt_oss"])
    assert relative_error(reference.logit_bias_gradient(d_logits), bias.grad) < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loads", [[9, 3, 4, 0], [5, 5, 5, 5], [0, 0, 0, 1]], ids=str)
def test_the_selection_bias_is_updated_as_in_torch(loads, dtype):
    bias = np.array([0.5, 0.0, -0.5, 0.25], dtype)
    found = reference.update_selection_bias(bias, np.array(loads), 0.001)
    expected = of_torch.update_selection_bias(torch.tensor(bias), torch.tensor(loads), 0.001)
    assert found.dtype == dtype and np.array_equal(found, expected)
    assert np.array_equal(found - bias > 0, np.array(loads) < np.mean(loads))
    assert np.array_equal(found - bias < 0, np.array(loads) > np.mean(loads))


LOGITS, CHOSEN = np.zeros((2, 6)), np.zeros((2, 1), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: reference.choose(LOGITS, 2, "mixtral"), TypeError, "router is a str, but it must be a Router"),
        (lambda: reference.choose(LOGITS, 2, Router(groups=4)), ValueError, "groups is 4, but it must divide the 6"),
        (
            lambda: reference.choose(LOGITS, 2, Router(), np.zeros(6)),
            ValueError,
            "selection_bias is given, but the router has selection_bias=False",
        ),
        (
            lambda: reference.choose(LOGITS, 2, Router(selection_bias=True), np.zeros(5)),
            ValueError,
            r"selection_bias has shape \(5,\), but it must be \(E=6\)",
        ),
        (
            lambda: reference.choose(LOGITS, 2, ROUTERS["deepseek_v3"]),
            ValueError,
            "groups is 8, but it must divide the 6 experts",
        ),
        (lambda: reference.weigh(LOGITS, CHOSEN + 6, Router()), ValueError, r"topk_experts\[0, 0\] is 6"),
        (
            lambda: reference.backward(np.zeros((2, 1)), LOGITS + np.nan, CHOSEN, Router()),
            ValueError,
            r"logits\[0, 0\] is nan",
        ),
        (
            lambda: reference.update_selection_bias(np.zeros(4), np.zeros(3, int), 0.1),
            ValueError,
            r"loads has shape \(3,\), but it must be \(E=4\)",
        ),
        (
            lambda: reference.update_selection_bias(np.zeros(4), np.zeros(4), 0.1),
            TypeError,
            "loads has dtype float64, but it must be int32 or int64",
        ),
        (
            lambda: reference.update_selection_bias(np.zeros(4), np.zeros(4, int), -1),
            ValueError,
            "rate is -1.0, but it must be >= 0.0",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
