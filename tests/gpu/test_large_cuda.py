"""One case of every stage past 2**31 elements on a GPU, where the arrays are really there.

Arrays are zeros but for the last tokens, whose results are compared: with an index that loses its upper 32 bits a
kernel reads zeros in their place, or writes elsewhere. Values are not checked on the way, which would need as much
memory again.
"""

import numpy as np
import pytest

from moeblaze_ref.backends.numpy_ref import activation, gating
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import block_sparse, combine, dispatch, expert_down, expert_up, layer
from moeblaze_ref.backends.raw_cuda import gating as gating_stage
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.verify.cases import relative_error
from moeblaze_ref.verify.check import differing_elements

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

L = 2**21 + 64  # L d, R h and L E > 2**31
d = h = 1024
E, MANY = 8, 1024  # experts of a layer, and as many as dispatch takes
FEW = 8  # tokens whose results are compared
BOUNDS = {"float16": 2.0**-9, "float32": 1e-5}


def runs(stage: str, *left_out: str):
    """The versions of a stage that run on this GPU."""
    able = [
        version
        for version in BACKENDS["cuda"].versions(stage)
        if not (cuda_device_count() and BACKENDS["cuda"].refusal(stage, version))
    ]
    return pytest.mark.parametrize("version", [version for version in able if version not in left_out])


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Numbers of order ``scale``, rounded to float16."""
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float16)


def ended_by(last: np.ndarray, library, dtype: str = "float16", rows: int | None = None):
    """An array of zeros (L, ...) on the device, with these last rows."""
    array = library.zeros((rows or L, *last.shape[1:]), dtype)
    array[-len(last) :] = library.asarray(last.astype(dtype))
    return array


def assert_near(found, expected: np.ndarray, dtype: str):
    assert relative_error(np.asarray(found.get()), expected) <= BOUNDS[dtype]


def one_expert_a_token(experts: int) -> np.ndarray:
    """Uniform routing (L, 1), int32."""
    return np.random.default_rng(experts).integers(experts, size=(L, 1), dtype=np.int32)


class Experts:
    """Weights of E experts, a routing of one expert a token, and what the last tokens get of it."""

    def __init__(self, library):
        self.library = library
        self.w1, self.w2 = (random(E, d, h, seed=seed, scale=d**-0.5) for seed in (1, 2))
        self.w3 = random(E, h, d, seed=3, scale=h**-0.5)
        self.topk = one_expert_a_token(E)
        self.dispatch = build_by_sort(self.topk, E).map(library.asarray)
        self.experts = self.topk[-FEW:, 0]
        self.rows = self.dispatch.token_index_map[-FEW:]  # of the last tokens, in expert order

    def on_device(self, name: str):
        return self.library.asarray(getattr(self, name))

    def product(self, left: np.ndarray, name: str) -> np.ndarray:
        """Each of the last tokens' rows times its expert's weight, in float64."""
        weights = getattr(self, name)[self.experts].astype(np.float64)
        return np.einsum("td,tdh->th", left.astype(np.float64), weights)

    def hidden(self, x: np.ndarray) -> dict[str, np.ndarray]:
        a, b = self.product(x, "w1"), self.product(x, "w2")
        return {"a": a, "b": b, "y_swi": activation.forward(a, b, "swiglu")}

    def in_expert_order(self, rows: np.ndarray):
        """An array (R, ...) of zeros, with these rows for the last tokens."""
        array = self.library.zeros((L, *rows.shape[1:]), "float16")
        array[self.rows] = self.library.asarray(rows)
        return array


@pytest.fixture
def cupy():
    """The library, whose memory is given back after each test."""
    import cupy

    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()


@runs("gating")
def test_gating(cupy, version):
    logits = random(FEW, MANY).astype(np.float32)
    exact = gating.forward(logits.astype(np.float64), 2)
    found = gating_stage.forward.unchecked(ended_by(logits, cupy, "float32"), 2, version=version)
    np.testing.assert_array_equal(found.topk_experts[-FEW:].get(), exact.topk_experts)
    assert_near(found.probs[-FEW:], exact.probs, "float32")
    assert_near(found.gates[-FEW:], exact.gates, "float32")


@runs("dispatch")
def test_dispatch(cupy, version):
    topk_experts = one_expert_a_token(MANY)
    found = dispatch.build(cupy.asarray(topk_experts), MANY, version=version).map(cupy.asnumpy)
    assert differing_elements(found, build_by_sort(topk_experts, MANY)) == 0


@runs("expert_up", "1_naive", "3_mma_tf32")
def test_expert_up(cupy, version):
    experts, x = Experts(cupy), random(FEW, d)
    w1, w2 = experts.on_device("w1"), experts.on_device("w2")
    found = expert_up.forward.unchecked(ended_by(x, cupy), w1, w2, experts.dispatch, "swiglu", version=version)
    for array, expected in zip(found, experts.hidden(x).values(), strict=True):
        assert_near(array[experts.rows], expected, "float16")


@runs("expert_down", "1_naive", "3_mma_tf32", "as_printed")
def test_expert_down(cupy, version):
    experts, y_swi = Experts(cupy), random(FEW, h)
    rows = experts.in_expert_order(y_swi)
    found = expert_down.forward.unchecked(rows, experts.on_device("w3"), experts.dispatch, version=version)
    assert_near(found[experts.rows], experts.product(y_swi, "w3"), "float16")


@runs("combine")
def test_combine(cupy, version):
    experts, y, gates = Experts(cupy), random(FEW, d), random(FEW, 1).astype(np.float32)
    rows = experts.in_expert_order(y)
    found = combine.forward.unchecked(rows, ended_by(gates, cupy, "float32"), experts.dispatch, version=version)
    assert_near(found[-FEW:], gates.astype(np.float64) * y.astype(np.float64), "float16")


@runs("layer", "1_naive", "2_tiled", "3_mma_tf32")
def test_layer(cupy, version):
    """Each token has one expert, with the gate that the router's softmax gives it."""
    experts, x, wg = Experts(cupy), random(FEW, d), random(d, E, seed=4, scale=d**-0.5)
    logits = x.astype(np.float64) @ wg.astype(np.float64)
    routed = gating.forward(logits, 1)
    experts.experts = routed.topk_experts[:, 0]
    expected = routed.gates * experts.product(experts.hidden(x)["y_swi"], "w3")
    weights = MoEWeights(cupy.asarray(wg), *(experts.on_device(name) for name in ("w1", "w2", "w3")))
    found = layer.forward.unchecked(ended_by(x, cupy), weights, 1, version=version)
    assert_near(found.out[-FEW:], expected, "float16")


@runs("block_sparse", "1_naive", "2_tiled")
def test_block_sparse(cupy, version):
    experts, x, gates = Experts(cupy), random(FEW, d), random(FEW, 1).astype(np.float32)
    expected = gates.astype(np.float64) * experts.product(experts.hidden(x)["y_swi"], "w3")
    weights = [experts.on_device(name) for name in ("w1", "w2", "w3")]
    operands = experts.dispatch, ended_by(gates, cupy, "float32"), "swiglu"
    found, _ = block_sparse.forward.unchecked(ended_by(x, cupy), *weights, *operands, version=version)
    assert_near(found[-FEW:], expected, "float16")
