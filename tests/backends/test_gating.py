"""The router: choice, gates, both losses and their gradients, against torch autograd, and its checks."""

import numpy as np
import pytest
import torch

from moeblaze_ref.backends.numpy_ref import gating
from moeblaze_ref.nn import oracle
from moeblaze_ref.verify.cases import relative_error

SHAPES = [(1, 4, 2), (33, 4, 1), (29, 5, 5), (37, 7, 3), (64, 64, 8)]


def make_logits(num_tokens, num_experts, scale=1.5, seed=5):
    """Random logits (L, E) that favour the last experts."""
    noise = np.random.default_rng(seed).standard_normal((num_tokens, num_experts))
    return scale * noise + np.linspace(0.0, 1.0, num_experts)


def torch_routing(logits, k, renormalize):
    """The oracle's routing of these logits (an identity router), and the leaf that collects their gradient."""
    leaf = torch.tensor(logits, requires_grad=True)
    eye = torch.eye(logits.shape[1], dtype=torch.float64)
    return oracle.route(leaf, eye, k, renormalize), leaf


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
def test_forward_agrees_with_the_oracle(num_tokens, num_experts, k, renormalize):
    logits = make_logits(num_tokens, num_experts)
    probs, topk_experts, gates = gating.forward(logits, k, renormalize)
    routing, _ = torch_routing(logits, k, renormalize)
    assert topk_experts.dtype == np.int32 and topk_experts.flags.c_contiguous
    assert np.array_equal(topk_experts, routing.topk_experts)
    assert relative_error(probs, routing.probs.detach()) < 1e-14
    assert relative_error(gates, routing.gates.detach()) < 1e-14


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "renormalize"),
    [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in SHAPES if shape[2] > 1],
)
def test_gate_gradient_agrees_with_autograd(num_tokens, num_experts, k, renormalize):
    logits = make_logits(num_tokens, num_experts)
    d_gates = np.random.default_rng(6).standard_normal((num_tokens, k))
    routing, leaf = torch_routing(logits, k, renormalize)
    routing.gates.backward(torch.tensor(d_gates))
    topk_experts = gating.forward(logits, k, renormalize).topk_experts
    d_logits = gating.backward(d_gates, logits, topk_experts, renormalize)
    assert relative_error(d_logits, leaf.grad) < 1e-12


def test_a_renormalised_single_gate_is_one_whatever_the_logits():
    logits = make_logits(9, 5)
    _, topk_experts, gates = gating.forward(logits, 1, renormalize=True)
    assert np.array_equal(gates, np.ones((9, 1)))
    assert not gating.backward(np.full((9, 1), 3.0), logits, topk_experts, renormalize=True).any()


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
def test_losses_and_their_gradients_agree_with_autograd(num_tokens, num_experts, k):
    logits = make_logits(num_tokens, num_experts)
    probs, topk_experts, _ = gating.forward(logits, k)
    losses = {
        oracle.load_balancing_loss: (
            gating.load_balancing_loss(probs, topk_experts),
            gating.load_balancing_loss_backward(probs, topk_experts, 0.7),
        ),
        oracle.router_z_loss: (gating.router_z_loss(logits), gating.router_z_loss_backward(logits, 0.7)),
    }
    if k == num_experts:  # the shares are all 1 / E, so the balancing loss is constantly 1
        loss, d_logits = losses.pop(oracle.load_balancing_loss)
        assert abs(loss - 1.0) < 1e-14 and np.abs(d_logits).max() < 1e-16
    for true_loss, (loss, d_logits) in losses.items():
        routing, leaf = torch_routing(logits, k, False)
        truth = true_loss(routing)
        (0.7 * truth).backward()
        assert relative_error(loss, truth.detach()) < 1e-14
        assert relative_error(d_logits, leaf.grad) < 1e-12


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_backward_adds_up_what_reaches_the_logits(renormalize):
    logits, k = make_logits(37, 7), 3
    d_gates = np.random.default_rng(6).standard_normal((37, k))
    routing, leaf = torch_routing(logits, k, renormalize)
    of_gates = (routing.gates * torch.tensor(d_gates)).sum()
    (of_gates + 0.7 * oracle.load_balancing_loss(routing) - 0.2 * oracle.router_z_loss(routing)).backward()
    d_logits = gating.backward(d_gates, logits, gating.top_k(logits, k), renormalize, np.array(0.7), -0.2)
    assert relative_error(d_logits, leaf.grad) < 1e-12


def test_loss_gradients_are_of_one_unit_of_loss_unless_told():
    logits = make_logits(8, 4)
    probs, topk_experts, _ = gating.forward(logits, 2)
    twice = gating.load_balancing_loss_backward(probs, topk_experts, 2.0)
    assert np.array_equal(2.0 * gating.load_balancing_loss_backward(probs, topk_experts), twice)
    assert np.array_equal(2.0 * gating.router_z_loss_backward(logits), gating.router_z_loss_backward(logits, 2.0))


def test_balanced_routing_has_loss_one_and_collapsed_routing_has_loss_e():
    one_each = np.arange(8, dtype=np.int32)[:, None]
    assert gating.load_balancing_loss(np.full((8, 8), 1 / 8), one_each) == pytest.approx(1.0, rel=1e-15)
    all_on_first = np.zeros((8, 1), dtype=np.int32)
    assert gating.load_balancing_loss(np.eye(8)[np.zeros(8, int)], all_on_first) == pytest.approx(8.0, rel=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_go_to_the_lower_expert(dtype):
    logits = np.array([[1, 2, 2, 1], [0, 0, 0, 0], [-0.0, 0.0, 5, 5]], dtype=dtype)
    topk_experts = gating.forward(logits, 3).topk_experts
    assert topk_experts.tolist() == [[1, 2, 0], [0, 1, 2], [2, 3, 0]]
    assert np.array_equal(topk_experts, oracle.top_k(torch.tensor(logits), 3))


def test_the_choice_is_made_by_logits_where_probabilities_tie():
    logits = np.array([[0.0, -800.0, -799.0]])  # both probabilities round to zero
    probs, topk_experts, _ = gating.forward(logits, 2)
    assert probs[0, 1] == probs[0, 2] == 0.0
    assert topk_experts.tolist() == [[0, 2]]


def test_huge_logits_do_not_overflow():
    logits = np.array([[1e4, -1e4, 0.0]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        probs, topk_experts, gates = gating.forward(logits, 2)
        assert gating.router_z_loss(logits) == np.float32(1e8)
    assert probs.tolist() == [[1.0, 0.0, 0.0]] and gates.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("renormalize", [False, True])
def test_float32_stays_float32_and_near(renormalize):
    narrow = make_logits(37, 7).astype(np.float32)
    d_narrow = np.random.default_rng(7).standard_normal((37, 3)).astype(np.float32)

    def results(logits, d_gates):
        probs, topk_experts, gates = gating.forward(logits, 3, renormalize)
        return [
            probs,
            gates,
            gating.backward(d_gates, logits, topk_experts, renormalize, np.float64(0.7), np.array(0.3)),
            gating.load_balancing_loss(probs, topk_experts),
            gating.load_balancing_loss_backward(probs, topk_experts, np.float64(1.0)),
            gating.router_z_loss(logits),
            gating.router_z_loss_backward(logits, np.float64(1.0)),
        ]

    wide = results(narrow.astype(np.float64), d_narrow.astype(np.float64))
    for result, truth in zip(results(narrow, d_narrow), wide, strict=True):
        assert result.dtype == np.float32
        assert relative_error(result, truth) < 1e-5


@pytest.mark.parametrize("renormalize", [False, True])
def test_no_tokens(renormalize):
    logits = np.empty((0, 4))
    probs, topk_experts, gates = gating.forward(logits, 2, renormalize)
    assert (probs.shape, topk_experts.shape, gates.shape) == ((0, 4), (0, 2), (0, 2))
    assert gating.load_balancing_loss(probs, topk_experts) == 0.0 and gating.router_z_loss(logits) == 0.0
    assert gating.backward(gates, logits, topk_experts, renormalize, 1.0, 1.0).shape == (0, 4)
    assert gating.load_balancing_loss_backward(probs, topk_experts).shape == (0, 4)
    assert gating.router_z_loss_backward(logits).shape == (0, 4)


LOGITS = np.zeros((3, 4))
PROBS = np.full((3, 4), 0.25)
TOPK = np.array([[0, 1], [1, 2], [2, 3]], dtype=np.int32)


def with_value(array, index, value):
    """A copy of ``array`` with one element changed."""
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("logits", "k", "error", "message"),
    [
        (with_value(LOGITS, (2, 3), np.nan), 2, ValueError, r"logits\[2, 3\] is nan"),
        (with_value(LOGITS, (1, 0), -np.inf), 2, ValueError, r"logits\[1, 0\] is -inf"),
        (LOGITS, 5, ValueError, "k is 5, but there are only 4 experts"),
        (LOGITS, 0, ValueError, "k is 0, but it must be >= 1"),
        (LOGITS, 1.5, TypeError, "k is 1.5"),
        (LOGITS[0], 2, ValueError, "must have 2 dimensions"),
        (LOGITS.astype(np.float16), 2, TypeError, "logits has dtype float16"),
        (LOGITS[:, :0], 1, ValueError, "E is 0, but it must be >= 1"),
    ],
)
def test_bad_logits(logits, k, error, message):
    with pytest.raises(error, match=message):
        gating.forward(logits, k)
    with pytest.raises(error, match=message):
        gating.top_k(logits, k)


@pytest.mark.parametrize("function", [gating.softmax, gating.router_z_loss, gating.router_z_loss_backward])
def test_bad_logits_of_the_functions_without_k(function):
    with pytest.raises(ValueError, match=r"logits\[2, 3\] is inf"):
        function(with_value(LOGITS, (2, 3), np.inf))
    with pytest.raises(TypeError, match="logits has dtype int64"):
        function(LOGITS.astype(int))
    with pytest.raises(ValueError, match="must have 2 dimensions"):
        function(LOGITS[0])


BAD_CHOICES = [
    (with_value(TOPK, (1, 0), 4), ValueError, r"topk_experts\[1, 0\] is 4, but there are only 4 experts"),
    (with_value(TOPK, (2, 1), -1), ValueError, r"topk_experts\[2, 1\] is -1"),
    (with_value(TOPK, (0, 0), 1), ValueError, r"topk_experts\[0\] names expert 1 twice"),
    (TOPK[:2], ValueError, r"topk_experts has shape \(2, 2\), but it must be \(L=3, k\)"),
    (TOPK.astype(np.int64), TypeError, "topk_experts has dtype int64"),
]


@pytest.mark.parametrize(("topk_experts", "error", "message"), BAD_CHOICES)
def test_bad_choices(topk_experts, error, message):
    with pytest.raises(error, match=message):
        gating.backward(np.ones((3, 2)), LOGITS, topk_experts)
    for function in (gating.load_balancing_loss, gating.load_balancing_loss_backward):
        with pytest.raises(error, match=message):
            function(PROBS, topk_experts)


@pytest.mark.parametrize(
    ("d_gates", "error", "message"),
    [
        (np.ones((3, 3)), ValueError, r"d_gates has shape \(3, 3\), but it must be \(L=3, k=2\)"),
        (np.ones((3, 2), np.float32), TypeError, "d_gates has dtype float32, but it must be float64"),
        (with_value(np.ones((3, 2)), (0, 1), np.nan), ValueError, r"d_gates\[0, 1\] is nan"),
    ],
)
def test_bad_gate_gradients(d_gates, error, message):
    with pytest.raises(error, match=message):
        gating.backward(d_gates, LOGITS, TOPK)


def test_bad_loss_gradients():
    for call in (
        lambda d_loss: gating.load_balancing_loss_backward(PROBS, TOPK, d_loss),
        lambda d_loss: gating.router_z_loss_backward(LOGITS, d_loss),
    ):
        with pytest.raises(ValueError, match="d_loss is nan, but it must be finite"):
            call(float("nan"))
        with pytest.raises(TypeError, match="d_loss is 'much'"):
            call("much")


def test_bad_probabilities():
    with pytest.raises(ValueError, match=r"probs\[1, 1\] is nan"):
        gating.load_balancing_loss(with_value(PROBS, (1, 1), np.nan), TOPK)
    with pytest.raises(TypeError, match="probs has dtype float16"):
        gating.load_balancing_loss(PROBS.astype(np.float16), TOPK)
