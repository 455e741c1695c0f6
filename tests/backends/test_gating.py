"""The router in every backend: choice, gates, both losses and their gradients, its checks, and planted faults."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from headers import assert_as_stated, stated
from helpers import with_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import Planted, Quick, numba_with_fault, opened_raw, without_barrier
from simulator import counted_launches, kernels_as_stated, only_simulated

from moeblaze_ref.backends.numpy_ref import gating as reference
from moeblaze_ref.backends.raw_cuda import gating as raw_gating
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.structures import Gating
from moeblaze_ref.nn import oracle
from moeblaze_ref.runtime import widest_pack
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import relative_error

on = partial(opened_raw, raw_gating)
VERSIONS = tuple(raw_gating.VERSIONS)
KERNELS = [("numba", None), *(("simt", version) for version in VERSIONS)]  # which need no GPU
BOUND = 1e-5
D_LOSS = 0.7

everywhere = pytest.mark.parametrize(("backend", "version"), [("numpy", None), *KERNELS])
every_kernel = pytest.mark.parametrize(("backend", "version"), KERNELS)
every_version = pytest.mark.parametrize("version", VERSIONS, ids="simt-{}".format)
renormalized_or_not = pytest.mark.parametrize("renormalize", [False, True])


@pytest.fixture
def stage(backend, version):
    """The stage of a backend, its outputs poisoned before they are written."""
    return BACKENDS[backend].open("gating", version)


def make_logits(num_tokens, num_experts, step=0.0, dtype=np.float32):
    """Random logits (L, E) that favour the last experts; a ``step`` to round to makes ties and -0."""
    noise = 1.5 * np.random.default_rng(5).standard_normal((num_tokens, num_experts))
    logits = noise + np.linspace(-1.0, 1.0, num_experts)
    return (np.round(logits / step) * step if step else logits).astype(dtype)


def errors(stage, logits, k, renormalize=False):
    """(what, relative error) of every result, against the specification in float64 on the same float32 numbers."""
    exact = reference.forward(logits.astype(np.float64), k, renormalize)
    found = stage.forward(logits, k, renormalize)
    yield "choices", float((found.topk_experts != reference.top_k(logits, k)).sum())
    yield "probs", relative_error(found.probs, exact.probs)
    yield "gates", relative_error(found.gates, exact.gates)
    yield from _errors_of_losses(stage, logits, exact)
    yield from _errors_of_gradients(stage, logits, exact, renormalize)


def _errors_of_losses(stage, logits, exact):
    chosen, probs = exact.topk_experts, exact.probs.astype(np.float32)
    expected = reference.load_balancing_loss(probs.astype(np.float64), chosen)
    yield "load_balancing_loss", relative_error(stage.load_balancing_loss(probs, chosen), expected)
    yield "router_z_loss", relative_error(stage.router_z_loss(logits), reference.router_z_loss(logits.astype(float)))


def _errors_of_gradients(stage, logits, exact, renormalize):
    """Of the gates alone, of each loss alone, and of all three; the losses' gradients as numbers and as arrays."""
    chosen, wide = exact.topk_experts, logits.astype(np.float64)
    d_gates = np.random.default_rng(6).standard_normal(chosen.shape).astype(np.float32)
    no_gates, one, two = np.zeros_like(d_gates), np.array(D_LOSS, np.float32), np.array(-0.3 * D_LOSS, np.float32)

    def found_and_expected(d_gates, *d_losses):
        expected = reference.backward(d_gates.astype(np.float64), wide, chosen, renormalize, *map(float, d_losses))
        return stage.backward(d_gates, logits, chosen, renormalize, *d_losses), expected

    found, of_gates = found_and_expected(d_gates, 0.0, 0.0)
    yield "d_logits of the gates", relative_error(found, of_gates)
    found, of_z = found_and_expected(no_gates, 0.0, D_LOSS)
    yield "d_logits of the z-loss", relative_error(found, of_z)
    # Two parts, p f_e and p times the mean share, may cancel, and so may the three: the error is that of the parts.
    shares = np.bincount(chosen.ravel(), minlength=logits.shape[1]) / max(chosen.size, 1)
    part = D_LOSS * logits.shape[1] / max(len(logits), 1) * exact.probs * shares
    found, of_balance = found_and_expected(no_gates, D_LOSS, 0.0)
    yield "d_logits of the balancing loss", relative_error(part + (found - of_balance), part)
    found, of_all = found_and_expected(d_gates, one, two)
    parts = np.abs(of_gates) + np.abs(of_z) + part
    yield "d_logits of all", relative_error(parts + (found - of_all), parts)


def assert_right(*arguments, **options):
    for what, error in errors(*arguments, **options):
        assert error <= (0.0 if what == "choices" else BOUND), what


def is_wrong(stage, logits, k, renormalize):
    """Whether any result is out of its bound, or the kernel does what a GPU would not survive."""
    try:
        assert_right(stage, logits, k, renormalize)
    except (AssertionError, KernelFault):
        return True
    return False


# ---- the specification ---------------------------------------------------------------------

SHAPES = [(1, 4, 2), (33, 4, 1), (29, 5, 5), (37, 7, 3), (64, 64, 8)]


def torch_routing(logits, k, renormalize):
    """The oracle's routing of these logits (an identity router), and the leaf that collects their gradient."""
    leaf = torch.tensor(logits, requires_grad=True)
    eye = torch.eye(logits.shape[1], dtype=torch.float64)
    return oracle.route(leaf, eye, k, renormalize), leaf


@renormalized_or_not
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
def test_forward_agrees_with_the_oracle(num_tokens, num_experts, k, renormalize):
    logits = make_logits(num_tokens, num_experts, dtype=np.float64)
    probs, topk_experts, gates = reference.forward(logits, k, renormalize)
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
    logits = make_logits(num_tokens, num_experts, dtype=np.float64)
    d_gates = np.random.default_rng(6).standard_normal((num_tokens, k))
    routing, leaf = torch_routing(logits, k, renormalize)
    routing.gates.backward(torch.tensor(d_gates))
    topk_experts = reference.forward(logits, k, renormalize).topk_experts
    d_logits = reference.backward(d_gates, logits, topk_experts, renormalize)
    assert relative_error(d_logits, leaf.grad) < 1e-12


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
def test_losses_and_their_gradients_agree_with_autograd(num_tokens, num_experts, k):
    logits = make_logits(num_tokens, num_experts, dtype=np.float64)
    probs, topk_experts, _ = reference.forward(logits, k)
    losses = {
        oracle.load_balancing_loss: (
            reference.load_balancing_loss(probs, topk_experts),
            reference.load_balancing_loss_backward(probs, topk_experts, 0.7),
        ),
        oracle.router_z_loss: (reference.router_z_loss(logits), reference.router_z_loss_backward(logits, 0.7)),
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


@renormalized_or_not
def test_the_backward_adds_up_what_reaches_the_logits(renormalize):
    logits, k = make_logits(37, 7, dtype=np.float64), 3
    d_gates = np.random.default_rng(6).standard_normal((37, k))
    routing, leaf = torch_routing(logits, k, renormalize)
    of_gates = (routing.gates * torch.tensor(d_gates)).sum()
    (of_gates + 0.7 * oracle.load_balancing_loss(routing) - 0.2 * oracle.router_z_loss(routing)).backward()
    d_logits = reference.backward(d_gates, logits, reference.top_k(logits, k), renormalize, np.array(0.7), -0.2)
    assert relative_error(d_logits, leaf.grad) < 1e-12


def test_loss_gradients_are_of_one_unit_of_loss_unless_told():
    logits = make_logits(8, 4, dtype=np.float64)
    probs, topk_experts, _ = reference.forward(logits, 2)
    twice = reference.load_balancing_loss_backward(probs, topk_experts, 2.0)
    assert np.array_equal(2.0 * reference.load_balancing_loss_backward(probs, topk_experts), twice)
    assert np.array_equal(2.0 * reference.router_z_loss_backward(logits), reference.router_z_loss_backward(logits, 2.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_go_to_the_lower_expert(dtype):
    logits = np.array([[1, 2, 2, 1], [0, 0, 0, 0], [-0.0, 0.0, 5, 5]], dtype=dtype)
    topk_experts = reference.forward(logits, 3).topk_experts
    assert topk_experts.tolist() == [[1, 2, 0], [0, 1, 2], [2, 3, 0]]
    assert np.array_equal(topk_experts, oracle.top_k(torch.tensor(logits), 3))


def test_the_choice_is_made_by_logits_where_probabilities_tie():
    logits = np.array([[0.0, -800.0, -799.0]])  # both probabilities round to zero
    probs, topk_experts, _ = reference.forward(logits, 2)
    assert probs[0, 1] == probs[0, 2] == 0.0
    assert topk_experts.tolist() == [[0, 2]]


def test_huge_logits_do_not_overflow():
    logits = np.array([[1e4, -1e4, 0.0]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        probs, topk_experts, gates = reference.forward(logits, 2)
        assert reference.router_z_loss(logits) == np.float32(1e8)
    assert probs.tolist() == [[1.0, 0.0, 0.0]] and gates.tolist() == [[1.0, 0.0]]


@renormalized_or_not
def test_float32_stays_float32_and_near(renormalize):
    narrow = make_logits(37, 7)
    d_narrow = np.random.default_rng(7).standard_normal((37, 3)).astype(np.float32)

    def results(logits, d_gates):
        probs, topk_experts, gates = reference.forward(logits, 3, renormalize)
        return [
            probs,
            gates,
            reference.backward(d_gates, logits, topk_experts, renormalize, np.float64(0.7), np.array(0.3)),
            reference.load_balancing_loss(probs, topk_experts),
            reference.load_balancing_loss_backward(probs, topk_experts, np.float64(1.0)),
            reference.router_z_loss(logits),
            reference.router_z_loss_backward(logits, np.float64(1.0)),
        ]

    wide = results(narrow.astype(np.float64), d_narrow.astype(np.float64))
    for result, truth in zip(results(narrow, d_narrow), wide, strict=True):
        assert result.dtype == np.float32
        assert relative_error(result, truth) < 1e-5


# ---- the kernels, and what all backends share -------------------------------------------------

SMALL = [(1, 1, 1), (1, 4, 2), (9, 4, 1), (9, 5, 5), (19, 7, 3)]  # Numba's simulator has 8 threads a block
LARGE = [
    (33, 32, 32),  # k = E, a lane a column
    (300, 33, 4),  # more than a block of threads; one lane has two columns
    (64, 64, 8),
    (257, 128, 8),
    (41, 130, 6),  # no warp divides it
    (13, 1024, 32),  # the kernels' limits
    (1, 1000, 17),
]


@renormalized_or_not
@pytest.mark.parametrize(
    ("backend", "version", "num_tokens", "num_experts", "k"),
    [(*where, *shape) for where in KERNELS for shape in (SMALL if where[0] == "numba" else SMALL + LARGE)],
)
def test_the_specification_is_met(stage, num_tokens, num_experts, k, renormalize):
    assert_right(stage, make_logits(num_tokens, num_experts), k, renormalize)


@every_kernel
@pytest.mark.parametrize("step", [0.5, 2.0])
def test_many_ties_are_broken_as_the_specification_does(stage, backend, step):
    num_tokens, num_experts, k = (19, 7, 4) if backend == "numba" else (70, 150, 20)
    logits = make_logits(num_tokens, num_experts, step)
    assert (logits == 0).any() and np.signbit(logits[logits == 0]).any()
    assert_right(stage, logits, k)


def hard_rows(num_experts):
    """Rows of logits (L, E) at which a choice, or a softmax, may go wrong."""
    zeros = np.zeros(num_experts)
    zeros[1::2] = -0.0
    rows = {
        "all equal": np.full(num_experts, -2.5),
        "zeros of both signs": zeros,
        "the last and the first are equal": np.where(np.arange(num_experts) % (num_experts - 1) == 0, 1.0, 0.5),
        "huge": np.linspace(-3e38, 3e38, num_experts),
        "huge and equal": np.full(num_experts, 3e38),
        "huge and negative": np.linspace(-3e38, -2e38, num_experts),
        "below the normal numbers": np.arange(num_experts) * 1e-45,
        "probabilities that round to the same": -800.0 - 1e-3 * np.arange(num_experts)[::-1] + 800.0 * (zeros == 9),
    }
    rows["probabilities that round to the same"][0] = 0.0
    return np.array(list(rows.values()), np.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # a difference may be -inf, whose exp is 0
@every_kernel
def test_hard_logits_are_chosen_from_exactly_and_nothing_overflows(stage, backend):
    logits = hard_rows(5 if backend == "numba" else 64)
    for k in (1, 3, logits.shape[1] // 2):
        found = stage.forward(logits, k)
        exact = reference.forward(logits.astype(np.float64), k)
        np.testing.assert_array_equal(found.topk_experts, reference.top_k(logits, k))
        for row in range(len(logits)):
            assert relative_error(found.probs[row], exact.probs[row]) < BOUND
            assert relative_error(found.gates[row], exact.gates[row]) < BOUND


def launch_unchecked(version, logits, k, renormalize):
    """softmax_top_k without its checks: a Gating, poisoned where the kernel wrote nothing."""
    executor = SimtExecutor()
    E = logits.shape[1]
    gating = Gating(
        executor.empty(logits.shape, "float32"),
        executor.empty((len(logits), k), "int32"),
        executor.empty((len(logits), k), "float32"),
    )
    module = executor.load(f"gating/{version}.cu", **raw_gating.constants(version, E, renormalize))
    grid = -(-len(logits) // raw_gating.TOKENS[version])
    sizes = {"shared_bytes": raw_gating.list_bytes(version, E), "L": len(logits), "E": E, "k": k}
    module.launch("softmax_top_k", grid, raw_gating.THREADS, logits=logits, **gating._asdict(), **sizes)
    return gating


def spoiled_logits(num_experts):
    """Rows of random logits with ever more of them replaced by NaN (of both signs and any bits) and infinities."""
    rng = np.random.default_rng(7)
    logits = make_logits(60, num_experts)
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000, 0xFF800000])
    share = np.linspace(0.0, 1.0, len(logits))[:, None]
    spoiled = np.where(rng.random(logits.shape) < share, rng.choice(bits, logits.shape).view(np.float32), logits)
    whole_rows = np.repeat(bits[:, None], num_experts, axis=1).view(np.float32)
    return np.concatenate([spoiled, whole_rows])


@every_version
@renormalized_or_not
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (5, 5), (33, 4), (40, 32), (128, 8)])
def test_logits_that_are_no_numbers_still_choose_k_experts(version, renormalize, num_experts, k):
    logits = spoiled_logits(num_experts)
    found = launch_unchecked(version, logits, k, renormalize)
    ids = np.broadcast_to(np.arange(num_experts), logits.shape)
    best_first = np.lexsort((ids, -logits, ~np.isnan(logits)))  # NaN before infinity, then by logit and id
    np.testing.assert_array_equal(found.topk_experts, best_first[:, :k])
    hopeless = np.isnan(logits).any(1) | (logits == np.inf).any(1) | (logits == -np.inf).all(1)
    assert 0 < hopeless.sum() < len(logits)
    assert np.isnan(found.probs[hopeless]).all() and np.isnan(found.gates[hopeless]).all()
    with np.errstate(under="ignore"):
        weights = np.exp(logits[~hopeless].astype(np.float64))  # of -inf: 0
    chosen = np.take_along_axis(weights, best_first[~hopeless, :k], 1)
    total = (chosen if renormalize else weights).sum(1, keepdims=True)
    assert relative_error(found.probs[~hopeless], weights / weights.sum(1, keepdims=True)) <= BOUND
    assert relative_error(found.gates[~hopeless], chosen / total) <= BOUND


@everywhere
def test_a_renormalised_single_gate_is_one_and_has_no_gradient(stage):
    logits = make_logits(9, 5)
    found = stage.forward(logits, 1, renormalize=True)
    assert np.array_equal(found.gates, np.ones((9, 1)))
    assert not stage.backward(np.full((9, 1), 3.0, np.float32), logits, found.topk_experts, renormalize=True).any()


@everywhere
def test_balanced_routing_has_loss_one_and_collapsed_routing_has_loss_e(stage, backend):
    one_each, all_on_first = np.arange(8, dtype=np.int32)[:, None], np.zeros((8, 1), np.int32)
    for dtype in BACKENDS[backend].dtypes:
        assert stage.load_balancing_loss(np.full((8, 8), 1 / 8, dtype), one_each) == 1.0
        assert stage.load_balancing_loss(np.eye(8, dtype=dtype)[np.zeros(8, int)], all_on_first) == 8.0


@everywhere
def test_kinds_and_shapes_of_the_results(stage):
    logits = make_logits(9, 5)
    gating = stage.forward(logits, 2)
    d_gates = np.ones((9, 2), np.float32)
    chosen = gating.probs, gating.topk_experts
    assert (gating.topk_experts.shape, gating.topk_experts.dtype) == ((9, 2), np.int32)
    for array, shape in [
        (gating.probs, (9, 5)),
        (gating.gates, (9, 2)),
        (stage.backward(d_gates, logits, gating.topk_experts), (9, 5)),
        (stage.backward(d_gates, logits, gating.topk_experts, True, 1.0, np.array(0.5)), (9, 5)),
        (stage.load_balancing_loss(*chosen), ()),
        (stage.router_z_loss(logits), ()),
    ]:
        assert (array.shape, array.dtype) == (shape, np.float32)


@everywhere
@renormalized_or_not
def test_no_tokens(stage, renormalize):
    assert_no_tokens(stage, renormalize)


def assert_no_tokens(stage, renormalize):
    logits = np.empty((0, 4), np.float32)
    probs, topk_experts, gates = stage.forward(logits, 2, renormalize)
    assert (probs.shape, topk_experts.shape, gates.shape) == ((0, 4), (0, 2), (0, 2))
    assert stage.load_balancing_loss(probs, topk_experts) == 0.0 and stage.router_z_loss(logits) == 0.0
    assert stage.backward(gates, logits, topk_experts, renormalize, 1.0, 1.0).shape == (0, 4)


def test_no_tokens_for_each_loss_alone():
    logits = np.empty((0, 4))
    probs, topk_experts, _ = reference.forward(logits, 2)
    assert reference.load_balancing_loss_backward(probs, topk_experts).shape == (0, 4)
    assert reference.router_z_loss_backward(logits).shape == (0, 4)


@every_kernel
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_shapes(backend, version, data):
    most_tokens, most_experts = (11, 6) if backend == "numba" else (280, 200)
    num_tokens, num_experts = data.draw(st.integers(0, most_tokens)), data.draw(st.integers(1, most_experts))
    k = data.draw(st.integers(1, min(num_experts, 32)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.uniform(0.5, 4.5, (num_tokens, num_experts))  # logsumexp keeps away from 0
    if data.draw(st.booleans()):
        logits = np.ceil(logits)  # five values: ties nearly everywhere
    assert_right(BACKENDS[backend].open("gating", version), logits.astype(np.float32), k, data.draw(st.booleans()))


@pytest.mark.parametrize("backend", ["numba", "simt"])
def test_the_cross_check_passes(backend):
    rows = check.run(["gating"], [backend])
    assert {row.version for row in rows} == {version for name, version in KERNELS if name == backend}
    assert {row.direction for row in rows} == {"forward", "backward"} and check.passed(rows)


# ---- the raw kernels -------------------------------------------------------------------------


def results(stage, logits, k):
    """Every array that the stage can make of these logits."""
    gating = stage.forward(logits, k)
    chosen = gating.probs, gating.topk_experts
    return [
        *gating,
        stage.backward(gating.gates, logits, gating.topk_experts),
        stage.backward(gating.gates, logits, gating.topk_experts, True, D_LOSS, D_LOSS),
        stage.load_balancing_loss(*chosen),
        stage.router_z_loss(logits),
    ]


@every_version
@pytest.mark.parametrize("seed", range(1, 4))
def test_every_order_of_threads_gives_the_same_bits(version, seed):
    logits = make_logits(280, 70, step=0.5)
    for array, expected in zip(
        *(results(on(SimtExecutor(seed=s), version), logits, 5) for s in (seed, 0)), strict=True
    ):
        np.testing.assert_array_equal(array, expected)


@every_version
@renormalized_or_not
def test_the_plain_build_is_right_too(version, renormalize):
    assert_right(on(SimtExecutor(instrumented=False), version), make_logits(2000, 70, step=0.5), 5, renormalize)


def test_the_default_of_simt_is_a_warp():
    logits = make_logits(9, 5)
    assert raw_gating.DEFAULT_VERSION == "2_warp"
    np.testing.assert_array_equal(raw_gating.forward(logits, 2).topk_experts, reference.top_k(logits, 2))


@pytest.mark.parametrize(
    ("num_experts", "columns"), [(1, 1), (32, 1), (33, 2), (65, 4), (128, 4), (129, 8), (1024, 32)]
)
def test_the_lanes_have_a_place_for_every_column(num_experts, columns):
    assert raw_gating.constants("2_warp", num_experts)["PER_LANE"] == columns


@every_version
@renormalized_or_not
@pytest.mark.parametrize(
    ("d_balance", "d_z", "dtype"), [(0.0, 0.0, "bfloat16"), (0.5, 0.0, "float32"), (0.5, 0.5, "float16")]
)
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(300, 16, 4), (1, 33, 32), (257, 130, 1)])
def test_the_kernels_ask_for_the_bytes_that_their_headers_state(
    version, num_tokens, num_experts, k, d_balance, d_z, dtype, renormalize
):
    executor = SimtExecutor()
    stage, logits = on(executor, version), make_logits(num_tokens, num_experts)
    with executor.recording() as launches:
        gating = stage.forward(logits, k, renormalize)
        stage.load_balancing_loss(*gating[:2])
        stage.router_z_loss(logits)
        stage.backward(gating.gates, logits, gating.topk_experts, renormalize, d_balance, d_z, dtype=dtype)
    headers = stated(f"gating/{version}.cu") | stated("gating/sums.cu")
    assert {launch.kernel for launch in launches} == headers.keys()
    symbols = {"L": num_tokens, "E": num_experts, "k": k, "R": num_tokens * k, "RENORMALIZE": int(renormalize)}
    symbols |= {"BALANCE": int(d_balance != 0), "Z_LOSS": int(d_z != 0), "s": np.dtype(dtype).itemsize}
    symbols |= {"PER_LANE": raw_gating.columns_per_lane(num_experts)}
    symbols |= {"THREADS": raw_gating.THREADS, "TILES": -(-num_tokens // raw_gating.THREADS)}
    symbols |= {"N": -(-num_tokens // raw_gating.TOKENS[version])}
    for launch in launches:
        symbols["blocks"] = launch.grid[0]
        assert_as_stated(launch, headers, symbols)


@every_version
@renormalized_or_not
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_gradient_is_the_wide_one_rounded_once(version, renormalize, dtype):
    stage, logits = on(SimtExecutor(), version), make_logits(37, 70)
    routed = stage.forward(logits, 5, renormalize)
    operands = routed.gates, logits, routed.topk_experts, renormalize, D_LOSS, D_LOSS
    narrow = stage.backward(*operands, dtype=dtype)
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(narrow, stage.backward(*operands).astype(dtype))


@pytest.mark.parametrize(
    ("num_experts", "pack"), [(1, 1), (33, 1), (32, 1), (62, 2), (64, 2), (96, 4), (130, 2), (1024, 4)]
)
def test_a_pack_divides_the_row_and_the_columns_of_a_lane(num_experts, pack):
    constants = raw_gating.constants("2_warp", num_experts)
    assert constants["PACK"] == pack
    assert num_experts % pack == 0 and constants["PER_LANE"] % pack == 0


@every_version
def test_a_warp_uses_its_sectors_whole_and_a_thread_does_not(version):
    """Both versions ask for rows of 512 bytes; a thread asks for every 4 of them alone."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        on(executor, version).forward(make_logits(64, 128), 8)
    (launch,) = launches
    bytes_of_a_sector = 32 if version == "2_warp" else 4
    assert launch.buffers["logits"].read_bytes == bytes_of_a_sector * launch.buffers["logits"].read_sectors
    assert launch.buffers["probs"].written_bytes == bytes_of_a_sector * launch.buffers["probs"].written_sectors


@pytest.mark.parametrize(
    ("dtype", "width", "address", "pack"),
    [
        (np.float32, 128, 256, 4),
        (np.float32, 126, 256, 2),
        (np.float32, 128, 264, 2),
        (np.float32, 128, 260, 1),
        (np.float16, 24, 272, 8),
        (np.float16, 12, 272, 4),
        (np.float16, 24, 258, 1),
        (np.float16, 7, 256, 1),
    ],
)
def test_a_pack_never_crosses_a_row_nor_begins_between_its_bytes(dtype, width, address, pack):
    on_a_gpu = SimpleNamespace(dtype=np.dtype(dtype), data=SimpleNamespace(ptr=address))
    assert widest_pack(on_a_gpu, width) == pack
    assert widest_pack(np.empty((3, width), dtype), width) == widest_pack(on_a_gpu, width) or address % 16


# ---- planted faults --------------------------------------------------------------------------

# file: {name: (text in it or in common.cuh, what takes its place)}
FAULTS = {
    "1_naive": {
        "writes zeros": ("= choice.expert;", "= 0;"),
        "writes nothing": ("gates[token * k + j] = weight;", ";"),
        "drops the last token": ("if (token >= L) return;", "if (token >= L - 1) return;"),
        "overlooks the last expert": ("e < E; ++e) {", "e < E - 1; ++e) {"),
        "ties to the higher expert": ("ordered > best.ordered", "ordered >= best.ordered"),
        "no ties": ("(ordered == last.ordered && e > last.expert)", "false"),
        "chooses again what it chose": ("e > last.expert", "e >= last.expert"),
        "sums what was not shifted by the peak": ("sum += expf(row[e] - peak);", "sum += expf(row[e]);"),
        "gates are never renormalised": ("RENORMALIZE ? 1.0f / sum_of_chosen : prob_scale", "prob_scale"),
        "gradient to the wrong expert": ("token * E + expert]", "token * E + (expert + 1) % E]"),
        "gradient without its mean": (" - shift - mean)", ")"),
        "nothing for who was not chosen": ("RENORMALIZE ? z : z - mean", "z"),
        "renormalised gates are those of the whole row": (
            "RENORMALIZE ? exponentials_of_chosen(row, chosen, k)",
            "false ? all",
        ),
        "the chosen get nothing of the losses": ("of_losses + of_gate", "of_gate"),
        "a term too few": ("token < L ? dot", "token < L - 1 ? dot"),
        "unscaled balancing gradient": ("E * per_token * ", ""),
        "balancing gradient without its mean": ("(shares[e] - mean_share)", "shares[e]"),
        "unscaled z-gradient": ("2.0f * per_token * ", ""),
        "losses change places": ("per_token * d_load_balancing_loss[0]", "per_token * d_router_z_loss[0]"),
        "logsumexp without its sum": ("row.peak + logf(row.sum)", "row.peak"),
        "z is not squared": ("(z * z)", "(z)"),
        "writes past its buffer": ("terms[blockIdx.x]", "terms[blockIdx.x + 1]"),
    },
    "2_warp": {
        "writes zeros": ("topk_experts[slot] = routed.expert;", "topk_experts[slot] = 0;"),
        "writes nothing": ("gates[slot] = routed.gate;", ";"),
        "drops the last token": ("if (token >= L) return;", "if (token >= L - 1) return;"),
        "reads the next column": ("load_pack<PACK>(source + column(i))", "load_pack<PACK>(source + column(i) + PACK)"),
        "writes a pack too many": ("(column(i) < E) store_pack", "(column(i) <= E) store_pack"),
        "packs are half written": ("p < PACK; ++p) pack", "p < (PACK + 1) / 2; ++p) pack"),
        "lists are not sorted": ("if (list[i].ordered < list[i + 1].ordered) {", "if (false) {"),
        "lists are half sorted": ("pass < PER_LANE; ++pass", "pass < PER_LANE / 2; ++pass"),
        "equal neighbours change places": ("list[i].ordered < list[i", "list[i].ordered <= list[i"),
        "ties to the higher expert": ("(best & lower_lanes) == 0", "(best & ~lower_lanes) == 1u << lane_id()"),
        "ties to every lane": ("is_best && (best & lower_lanes) == 0", "is_best"),
        "lists do not move up": ("next += WARP;", ""),
        "a list has no end": ("lists.sorted[PER_LANE][lane_id()] = {EXHAUSTED, 0};", ""),
        "every lane takes the head of its own list": ("== warp_max(head.ordered);", "== head.ordered;"),
        "every choice in the same place": ("lists.chosen[j] = head;", "lists.chosen[0] = head;"),
        "missing barrier after the choices": without_barrier("the choices", "__syncwarp()"),
        "every warp has the same lists": ("lists_of_warps[warp_id()]", "lists_of_warps[0]"),
        "gates are never renormalised": ("RENORMALIZE ? 1.0f / warp_sum(weight) : scale", "scale"),
        "peak of a lane alone": ("return warp_max(peak);", "return peak;"),
        "sum of a lane alone": ("return warp_sum(sum);", "return sum;"),
        "gradient without its mean": ("gate * (d_gate - mean)", "gate * d_gate"),
        "nothing for who was not chosen": ("RENORMALIZE ? z : z - mean", "z"),
        "renormalised gates are those of the whole row": ("gate = weight / warp_sum(weight);", ""),
        "the chosen get nothing of the losses": ("(of_losses + gate", "(gate"),
        "missing barrier before the chosen are written": without_barrier("the chosen", "__syncwarp()"),
        "mean of a lane alone": ("warp_sum(lane_dot(row, share))", "lane_dot(row, share)"),
        "unscaled balancing gradient": ("E * per_token * ", ""),
        "unscaled z-gradient": ("2.0f * per_token * ", ""),
        "losses change places": ("per_token * d_load_balancing_loss[0]", "per_token * d_router_z_loss[0]"),
        "z without the peak": ("(peak + __logf(sum))", "__logf(sum)"),
        "every lane adds its token": ("lane_id() == 0 ? z * z : 0.0f", "z * z"),
        "negative logits in the wrong order": (": bits ^ ((bits >> 31) & 0x7fffffff);", ": bits;"),
        "zeros of two kinds": ("__float_as_int(value + 0.0f)", "__float_as_int(value)"),
        "half of the lanes are not summed": ("step > 0; step /= 2) value +=", "step > 1; step /= 2) value +="),
    },
    "sums": {
        "histograms not cleared": ("histogram[e] = 0;", ";"),
        "missing barrier after clearing": ("    __syncwarp();\n    const", "    const"),
        "missing barrier between tokens": without_barrier("the next", "__syncwarp()"),
        "missing barrier before adding up": ("    __syncthreads();\n    for (int e", "    for (int e"),
        "a choice too few": ("if (lane_id() < k)", "if (lane_id() < k - 1)"),
        "drops the last token": ("token < end; ++token", "token < end - 1; ++token"),
        "forgets the last warp": ("warp < THREADS / WARP; ++warp", "warp < THREADS / WARP - 1; ++warp"),
        "forgets the last tile": ("tile < tiles;", "tile < tiles - 1;"),
        "counts instead of shares": ("float(rows) / R", "float(rows)"),
        "the wrong expert's count": ("tile * E + expert]", "tile * E + (expert + 1) % E]"),
        "forgets the last term": ("i < num_terms;", "i < num_terms - 1;"),
        "unscaled sum": ("= scale * sum;", "= sum;"),
    },
}


# Two tiles of tokens, and more experts than two per lane; then lists that are taken to their ends.
TRIALS = [((270, 70), 5, False), ((270, 70), 5, True), ((37, 40), 32, False)]


@pytest.mark.parametrize(
    ("file", "fault"),
    [pytest.param(file, fault, id=f"simt-{file}-{fault}") for file, faults in FAULTS.items() for fault in faults],
)
def test_a_planted_fault_is_caught(file, fault):
    planted = Planted(f"gating/{file}.cu", *FAULTS[file][fault], seed=1)
    stage = on(planted, raw_gating.DEFAULT_VERSION if file == "sums" else file)
    assert any(is_wrong(stage, make_logits(*shape, step=0.5), k, renormalize) for shape, k, renormalize in TRIALS)


@every_version
def test_the_same_inputs_without_a_fault_pass(version):
    for shape, k, renormalize in TRIALS:
        assert_right(on(Quick(seed=1), version), make_logits(*shape, step=0.5), k, renormalize)


NUMBA_FAULTS = {
    "writes zeros": ("topk_experts[token, j] = expert", "topk_experts[token, j] = 0"),
    "writes nothing": ("            gates[token, j] = weight\n", ""),
    "drops the last token": ("token < num_tokens", "token < num_tokens - 1"),
    "overlooks the last expert": ("(logits.shape[1]):\n        logit", "(logits.shape[1] - 1):\n        logit"),
    "ties to the higher expert": ("logit > best:", "logit >= best:"),
    "no ties": (" or (logit == last_logit and e > last_expert)", ""),
    "gates are never renormalised": ("(sum_of_chosen if renormalize else total)", "total"),
    "gradient to the wrong expert": ("d_logits[token, expert] +=", "d_logits[token, (expert + 1) % num_experts] +="),
    "gradient without its mean": (" - (mean if renormalize else ZERO)", ""),
    "nothing for who was not chosen": ("- (ZERO if renormalize else mean)", ""),
    "renormalised gates are those of the whole row": ("        if renormalize:\n", "        if False:\n"),
    "half of the block is not summed": ("half = THREADS // 2", "half = THREADS // 4"),
    "counts the first tile only": ("cuda.threadIdx.x, num_tokens * k, THREADS", "cuda.threadIdx.x, THREADS, THREADS"),
    "the last block's term is forgotten": ("cuda.threadIdx.x, terms.shape[0]", "cuda.threadIdx.x, terms.shape[0] - 1"),
    "unscaled sum": ("total[0] = scale * part", "total[0] = part"),
    "unscaled balancing gradient": ("d_losses[0] * scales[0]", "d_losses[0]"),
    "losses change places": ("d_losses[0] * scales", "d_losses[1] * scales"),
    "balancing gradient without its mean": ("(shares[e] - mean_share)", "shares[e]"),
    "unscaled z-gradient": ("d_losses[1] * scales[1]", "d_losses[1]"),
    "logsumexp without its sum": ("z = peak + math.log(total)", "z = peak"),
}


@pytest.mark.parametrize("fault", NUMBA_FAULTS)
def test_a_fault_planted_in_the_numba_kernels_is_caught(fault):
    stage = numba_with_fault("gating", *NUMBA_FAULTS[fault])
    logits = make_logits(2 * BACKENDS["numba"].stage("gating").THREADS + 3, 5, step=0.5)
    assert any(is_wrong(stage, logits, 3, renormalize) for renormalize in (False, True))


@only_simulated
def test_the_numba_kernels_move_the_bytes_that_their_headers_state(monkeypatch):
    module = BACKENDS["numba"].stage("gating")
    L, E, k = 2 * module.THREADS + 3, 5, 3
    sizes = {"L": L, "E": E, "k": k, "R": L * k, "N": 3, "THREADS": module.THREADS}
    launches = counted_launches(monkeypatch, module)
    assert_right(BACKENDS["numba"].open("gating"), make_logits(L, E), k)
    launched = set(kernels_as_stated(launches, sizes))
    assert launched == {kernel for name, kernel in vars(module).items() if name.endswith("_kernel")}


# ---- the forward of a layer: fused.cu ---------------------------------------------------------

MANY = raw_gating.FUSED_BLOCKS * raw_gating.fused_threads(8) // raw_gating.WARP  # tokens of which each has a warp


def assert_fused_right(executor, logits, k, renormalize=False):
    """The bits of `forward`, and the losses of the specification."""
    chosen, gates, balance, z = raw_gating.forward_with_losses(logits, k, renormalize, executor=executor)
    expected = raw_gating.forward(logits, k, renormalize, executor=Quick())
    np.testing.assert_array_equal(chosen, expected.topk_experts)
    np.testing.assert_array_equal(gates, expected.gates)
    wide = logits.astype(np.float64)
    assert relative_error(balance, reference.load_balancing_loss(reference.softmax(wide), chosen)) <= BOUND
    assert relative_error(z, reference.router_z_loss(wide)) <= BOUND


def fused_is_wrong(executor, logits, k, renormalize):
    try:
        assert_fused_right(executor, logits, k, renormalize)
    except (AssertionError, KernelFault):
        return True
    return False


@renormalized_or_not
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SMALL + LARGE)
def test_the_forward_with_losses_is_that_of_the_steps(num_tokens, num_experts, k, renormalize):
    assert_fused_right(SimtExecutor(), make_logits(num_tokens, num_experts, step=0.5), k, renormalize)


@pytest.mark.parametrize("num_tokens", [MANY - 1, MANY + 1, 2 * MANY + 37])
def test_a_warp_takes_several_tokens_once_each_has_one(num_tokens):
    logits = make_logits(num_tokens, 8)
    executor = SimtExecutor(instrumented=False)
    assert_fused_right(executor, logits, 2)


@pytest.mark.parametrize("seed", range(1, 4))
def test_every_order_of_threads_gives_the_same_bits_of_the_losses(seed):
    logits = make_logits(280, 70, step=0.5)
    found, expected = (raw_gating.forward_with_losses(logits, 5, executor=SimtExecutor(seed=s)) for s in (seed, 0))
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, other)


@renormalized_or_not
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(300, 16, 4), (1, 33, 32), (257, 130, 1), (MANY + 3, 8, 2)]
)
def test_the_fused_kernels_ask_for_the_bytes_that_their_headers_state(num_tokens, num_experts, k, renormalize):
    executor = SimtExecutor()
    with executor.recording() as launches:
        raw_gating.forward_with_losses(make_logits(num_tokens, num_experts), k, renormalize, executor=executor)
    headers = stated("gating/fused.cu")
    assert [launch.kernel for launch in launches] == [*headers]
    sizes = {"L": num_tokens, "E": num_experts, "k": k, "R": num_tokens * k, "BLOCKS": launches[0].grid[0]}
    assert sizes["BLOCKS"] == min(256, -(-32 * num_tokens // raw_gating.fused_threads(num_experts)))
    for launch in launches:
        assert_as_stated(launch, headers, sizes)


def test_a_fused_forward_of_nothing_has_losses_of_nothing():
    chosen, gates, balance, z = raw_gating.forward_with_losses(np.empty((0, 4), np.float32), 2)
    assert chosen.shape == gates.shape == (0, 2) and balance == z == 0.0


def test_a_fused_forward_refuses_what_the_steps_refuse():
    for logits, k, error, message in BAD_LOGITS + BEYOND_THE_KERNELS:
        with pytest.raises(error, match=message):
            raw_gating.forward_with_losses(logits, k)


@renormalized_or_not
def test_fused_kernels_choose_k_experts_among_logits_that_are_no_numbers(renormalize):
    logits = spoiled_logits(33)
    chosen, gates, balance, z = raw_gating.forward_with_losses.unchecked(logits, 4, renormalize)
    expected = launch_unchecked("2_warp", logits, 4, renormalize)
    np.testing.assert_array_equal(chosen, expected.topk_experts)
    np.testing.assert_array_equal(gates, expected.gates)
    assert np.isnan(balance) and not np.isfinite(z)


FUSED_FAULTS = {
    "counts not cleared": ("experts_count[e] = 0;", ";"),
    "missing barrier after clearing": without_barrier("the counts are zeros"),
    "a choice is not counted": ("if (lane_id() < k) atomicAdd", "if (lane_id() < k - 1) atomicAdd"),
    "every choice counted twice": ("[routed.expert], 1)", "[routed.expert], 2)"),
    "counts that others overwrite": (
        "atomicAdd(&experts_count[routed.expert], 1)",
        "experts_count[routed.expert] += 1",
    ),
    "a choice for another slot": ("first_of(token, k) + lane_id();", "first_of(token, k) + (lane_id() + 1) % k;"),
    "gates never written": ("gates[slot] = routed.gate;", ";"),
    "drops the last token": ("token < L; token += stride", "token < L - 1; token += stride"),
    "reads past the last token": ("token < L ? E : 0", "E"),
    "the next row is the last": ("load_token(logits, token + stride, L, E, next);", ""),
    "tokens without their probabilities": ("sums[i] += row[i];", "sums[i] = row[i];"),
    "z is not squared": ("routed.logsumexp * routed.logsumexp", "routed.logsumexp"),
    "every lane adds its token": ("lane_id() == 0 ? z_sum : 0.0f", "z_sum"),
    "z without the peak": ("peak + __logf(sum)}", "__logf(sum)}"),
    "every warp has the same lists": ("lists_of_warps[warp_id()]", "lists_of_warps[0]"),
    "missing barrier before the rows are added up": without_barrier("the rows are complete"),
    "forgets the last warp": ("warp < WARPS; ++warp", "warp < WARPS - 1; ++warp"),
    "forgets the last block": ("block < blocks; block += SUM_WARPS", "block < blocks - 1; block += SUM_WARPS"),
    "forgets the last block's z": ("block < blocks; block += SUM_THREADS", "block < blocks - 1; block += SUM_THREADS"),
    "missing barrier before the warps are added up": without_barrier("every warp has added up its rows"),
    "missing barrier before the next experts": without_barrier("the sums of the next experts"),
    "experts beyond the first 32 are forgotten": ("part += float", "part = float"),
    "counts instead of shares": ("float(all_rows) / R", "float(all_rows)"),
    "unscaled balance": ("float(E) / L * balance", "balance"),
    "unscaled z": ("z_sum / L", "z_sum"),
    "losses change places": ("load_balancing_loss[0] = float(E) / L * balance", "load_balancing_loss[0] = z_sum / L"),
}
FUSED_TRIALS = [*TRIALS, ((MANY + 37, 8), 2, False)]


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_fault_planted_in_the_fused_kernels_is_caught(fault):
    planted = Planted("gating/fused.cu", *FUSED_FAULTS[fault], seed=1)
    trials = ((make_logits(*shape, step=0.5), k, renormalize) for shape, k, renormalize in FUSED_TRIALS)
    assert any(fused_is_wrong(planted, *trial) for trial in trials)


# ---- bad input -------------------------------------------------------------------------------

LOGITS = np.zeros((3, 4), np.float32)
PROBS = np.full((3, 4), 0.25, np.float32)
TOPK = np.array([[0, 1], [1, 2], [2, 3]], np.int32)
D_GATES = np.ones((3, 2), np.float32)


BAD_LOGITS = [
    (with_value(LOGITS, (2, 3), np.nan), 2, ValueError, r"logits\[2, 3\] is nan"),
    (with_value(LOGITS, (1, 0), -np.inf), 2, ValueError, r"logits\[1, 0\] is -inf"),
    (LOGITS, 5, ValueError, "k is 5, but there are only 4 experts"),
    (LOGITS, 0, ValueError, "k is 0, but it must be >= 1"),
    (LOGITS, 1.5, TypeError, "k is 1.5"),
    (LOGITS[0], 2, ValueError, "must have 2 dimensions"),
    (LOGITS.astype(np.float16), 2, TypeError, "logits has dtype float16"),
    (LOGITS[:, :0], 1, ValueError, "E is 0, but it must be >= 1"),
]
BEYOND_THE_KERNELS = [
    (LOGITS.astype(np.float64), 2, TypeError, "logits has dtype float64, but it must be float32"),
    (np.zeros((2, 1025), np.float32), 2, ValueError, "num_experts is 1025, but it must be 1..1024"),
    (np.zeros((2, 64), np.float32), 33, ValueError, "k is 33, but it must be 1..32"),
]


@everywhere
@pytest.mark.parametrize(("logits", "k", "error", "message"), BAD_LOGITS)
def test_bad_logits(stage, backend, logits, k, error, message):
    for function in (stage.forward, stage.top_k) if backend == "numpy" else (stage.forward,):
        with pytest.raises(error, match=message):
            function(logits, k)


@every_kernel
@pytest.mark.parametrize(("logits", "k", "error", "message"), BEYOND_THE_KERNELS)
def test_logits_beyond_the_kernels_limits(stage, logits, k, error, message):
    with pytest.raises(error, match=message):
        stage.forward(logits, k)


@everywhere
def test_bad_logits_of_the_functions_without_k(stage, backend):
    names = ("router_z_loss", "softmax", "router_z_loss_backward")
    for function in (getattr(stage, name) for name in (names if backend == "numpy" else names[:1])):
        with pytest.raises(ValueError, match=r"logits\[2, 3\] is inf"):
            function(with_value(LOGITS, (2, 3), np.inf))
        with pytest.raises(TypeError, match="logits has dtype int64"):
            function(LOGITS.astype(int))
        with pytest.raises(ValueError, match="must have 2 dimensions"):
            function(LOGITS[0])
    if backend != "numpy":
        with pytest.raises(ValueError, match="num_experts is 1025"):
            stage.router_z_loss(np.zeros((2, 1025), np.float32))


@everywhere
@pytest.mark.parametrize(
    ("topk_experts", "error", "message"),
    [
        (with_value(TOPK, (1, 0), 4), ValueError, r"topk_experts\[1, 0\] is 4, but there are only 4 experts"),
        (with_value(TOPK, (2, 1), -1), ValueError, r"topk_experts\[2, 1\] is -1"),
        (with_value(TOPK, (0, 0), 1), ValueError, r"topk_experts\[0\] names expert 1 twice"),
        (TOPK[:2].copy(), ValueError, r"topk_experts has shape \(2, 2\), but it must be \(L=3, k\)"),
        (TOPK.astype(np.int64), TypeError, "topk_experts has dtype int64"),
    ],
)
def test_bad_choices(stage, backend, topk_experts, error, message):
    with pytest.raises(error, match=message):
        stage.backward(D_GATES, LOGITS, topk_experts)
    names = ("load_balancing_loss", "load_balancing_loss_backward")
    for name in names if backend == "numpy" else names[:1]:
        with pytest.raises(error, match=message):
            getattr(stage, name)(PROBS, topk_experts)


@everywhere
@pytest.mark.parametrize(
    ("d_gates", "error", "message"),
    [
        (np.ones((3, 3), np.float32), ValueError, r"d_gates has shape \(3, 3\), but it must be \(L=3, k=2\)"),
        (np.ones((3, 2)), TypeError, "d_gates has dtype float64, but it must be float32"),
        (with_value(D_GATES, (0, 1), np.nan), ValueError, r"d_gates\[0, 1\] is nan"),
    ],
)
def test_bad_gate_gradients(stage, d_gates, error, message):
    with pytest.raises(error, match=message):
        stage.backward(d_gates, LOGITS, TOPK)


@everywhere
def test_gates_of_the_unlikeliest_are_renormalised_right(stage):
    """A replayed choice may have probabilities that round to 0; their ratios do not."""
    logits, chosen = np.float32([[0.0, 1.0, -200.0, -200.0 + np.log(3.0)]]), np.int32([[2, 3]])
    found = stage.backward(np.float32([[1.0, -2.0]]), logits, chosen, True)
    slope = 3.0 * 0.25 * 0.75
    assert relative_error(found, np.array([[0.0, 0.0, slope, -slope]])) <= BOUND


@everywhere
def test_bad_loss_gradients_and_probabilities(stage, backend):
    for name in ("d_load_balancing_loss", "d_router_z_loss"):
        with pytest.raises(ValueError, match=f"{name} is nan, but it must be finite"):
            stage.backward(D_GATES, LOGITS, TOPK, **{name: float("nan")})
        with pytest.raises(TypeError, match=f"{name} is 'much'"):
            stage.backward(D_GATES, LOGITS, TOPK, **{name: "much"})
        with pytest.raises(ValueError, match=f"{name} has shape"):
            stage.backward(D_GATES, LOGITS, TOPK, **{name: np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=r"logits\[1, 1\] is nan"):
        stage.backward(D_GATES, with_value(LOGITS, (1, 1), np.nan), TOPK)
    with pytest.raises(ValueError, match=r"probs\[1, 1\] is nan"):
        stage.load_balancing_loss(with_value(PROBS, (1, 1), np.nan), TOPK)
    unknown = np.float16 if backend == "numpy" else np.float64
    with pytest.raises(TypeError, match=f"probs has dtype {unknown.__name__}"):
        stage.load_balancing_loss(PROBS.astype(unknown), TOPK)


def test_bad_gradients_of_a_loss_alone():
    for call in (
        lambda d_loss: reference.load_balancing_loss_backward(PROBS, TOPK, d_loss),
        lambda d_loss: reference.router_z_loss_backward(LOGITS, d_loss),
    ):
        with pytest.raises(ValueError, match="d_loss is nan, but it must be finite"):
            call(float("nan"))
        with pytest.raises(TypeError, match="d_loss is 'much'"):
            call("much")


@every_version
def test_raw_kernels_take_contiguous_rows_only(version):
    with pytest.raises(ValueError, match="argument logits of kernel softmax_top_k is not C-contiguous"):
        BACKENDS["simt"].open("gating", version).forward(np.asfortranarray(make_logits(9, 5)), 2)


def test_numba_takes_rows_of_any_strides():
    assert_right(BACKENDS["numba"].open("gating"), np.asfortranarray(make_logits(9, 5)), 2)


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="unknown version of gating '2_warps'. Did you mean '2_warp'"):
        BACKENDS["simt"].open("gating", "2_warps").forward(LOGITS, 2)
