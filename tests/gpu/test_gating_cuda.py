"""Gating on a CUDA device: raw CUDA through CuPy in every version, and the Numba kernels on the same device."""

import numpy as np
import pytest
from test_gating import assert_no_tokens, make_logits

from moeblaze_ref.backends.numpy_ref import gating as reference
from moeblaze_ref.backends.raw_cuda import gating
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify.cases import relative_error

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

BACKENDS_AND_VERSIONS = [("numba", None), *(("cuda", version) for version in gating.VERSIONS)]
SHAPES = [(1, 1, 1), (1, 1024, 32), (257, 33, 5), (3001, 130, 32), (4096, 64, 32), (65_536, 16, 4), (262_144, 128, 8)]

every_backend = pytest.mark.parametrize(("backend", "version"), BACKENDS_AND_VERSIONS)


def assert_near(found, expected):
    assert relative_error(found, expected) < 1e-5


@every_backend
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
def test_the_specification_is_met(backend, version, num_tokens, num_experts, k, renormalize):
    stage, logits = BACKENDS[backend].open("gating", version), make_logits(num_tokens, num_experts)
    wide = logits.astype(np.float64)
    exact = reference.forward(wide, k, renormalize)
    found = stage.forward(logits, k, renormalize)
    np.testing.assert_array_equal(found.topk_experts, exact.topk_experts)
    assert_near(found.probs, exact.probs)
    assert_near(found.gates, exact.gates)

    d_gates = np.random.default_rng(6).standard_normal((num_tokens, k)).astype(np.float32)
    chosen = exact.probs.astype(np.float32), exact.topk_experts
    wide_chosen = chosen[0].astype(np.float64), exact.topk_experts
    for d_losses in ((0.0, 0.0), (0.7, -0.2)):
        assert_near(
            stage.backward(d_gates, logits, exact.topk_experts, renormalize, *d_losses),
            reference.backward(d_gates.astype(np.float64), wide, exact.topk_experts, renormalize, *d_losses),
        )
    assert_near(stage.load_balancing_loss(*chosen), reference.load_balancing_loss(*wide_chosen))
    assert_near(stage.router_z_loss(logits), reference.router_z_loss(wide))


@every_backend
@pytest.mark.parametrize("step", [0.5, 4.0])
def test_ties_are_broken_as_the_specification_does(backend, version, step):
    logits = make_logits(5000, 150, step)
    found = BACKENDS[backend].open("gating", version).forward(logits, 20)
    np.testing.assert_array_equal(found.topk_experts, reference.top_k(logits, 20))


@every_backend
def test_no_tokens(backend, version):
    assert_no_tokens(BACKENDS[backend].open("gating", version), renormalize=False)


def results(logits, version):
    """Every array that the stage makes of logits (L, E) on the device."""
    routing = gating.forward(logits, 6, version=version)
    chosen = routing.probs, routing.topk_experts
    return [
        *routing,
        gating.backward(routing.gates, logits, routing.topk_experts, True, 0.7, 0.7, version=version),
        gating.load_balancing_loss(*chosen, version=version),
        gating.router_z_loss(logits, version=version),
    ]


@pytest.mark.parametrize("version", gating.VERSIONS)
def test_twenty_runs_give_the_same_bits_on_the_device(version):
    import cupy

    logits = cupy.asarray(make_logits(20_000, 64))
    first = results(logits, version)
    assert all(isinstance(array, cupy.ndarray) for array in first)
    for _ in range(20):
        for array, expected in zip(results(logits, version), first, strict=True):
            assert bool((array == expected).all())


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(1, 33, 32), (37, 7, 3), (20_000, 64, 8), (3_000, 1024, 8)]
)
def test_the_fused_forward_is_that_of_the_steps(num_tokens, num_experts, k, renormalize):
    import cupy

    logits = cupy.asarray(make_logits(num_tokens, num_experts))
    first = gating.forward_with_losses(logits, k, renormalize)
    steps = gating.forward(logits, k, renormalize)
    assert bool((first[0] == steps.topk_experts).all()) and bool((first[1] == steps.gates).all())
    for found, expected in (
        (first[2], gating.load_balancing_loss(steps.probs, steps.topk_experts)),
        (first[3], gating.router_z_loss(logits)),
    ):
        assert abs(float(found) / float(expected) - 1) <= 1e-5
    for _ in range(20):
        again = gating.forward_with_losses(logits, k, renormalize)
        assert all(bool((array == expected).all()) for array, expected in zip(again, first, strict=True))


def test_device_arrays_are_checked_before_the_launch():
    import cupy

    logits = cupy.zeros((3, 4), cupy.float32)
    logits[2, 3] = cupy.nan
    with pytest.raises(ValueError, match=r"logits\[2, 3\] is nan, but logits must be finite"):
        gating.forward(logits, 2)
    with pytest.raises(ValueError, match="k is 5, but there are only 4 experts"):
        gating.forward(cupy.zeros((3, 4), cupy.float32), 5)
    with pytest.raises(ValueError, match="not C-contiguous"):
        gating.forward(cupy.zeros((4, 3), cupy.float32).T, 2)
