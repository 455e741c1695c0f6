"""MegaBlocks' stage on a device, in raw CUDA and in Numba: every dtype, real sizes, arrays that stay there."""

import numpy as np
import pytest
from sparse_cases import (
    GOLDEN,
    PRODUCTS,
    Run,
    assert_activation,
    assert_any_mask,
    assert_golden,
    assert_layer,
    assert_layer_as_specified,
    assert_rows,
    run_layer,
    sparse_of,
    with_activation,
)

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import block_sparse, gemm
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import ACTIVATIONS
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.runtime import cupy_executor
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

BLOCK = block_sparse.BLOCK
RUNS = [
    Run("cuda", version, dtype, (BLOCK,), step=8)
    for version, able in block_sparse.VERSIONS.items()
    if cuda_device_count() and not BACKENDS["cuda"].refusal("block_sparse", version)
    for dtype in able
]
NUMBA = Run("numba", None, "float32", (1, 8, BLOCK))
every_run = pytest.mark.parametrize("run", RUNS, ids=str)
CASES = [
    make_case(2048, 256, 512, 8, 2, "zipf", "skewed"),
    make_case(1000, 264, 384, 16, 4, "empty", "empty experts, ragged groups"),
    make_case(700, 128, 256, 5, 1, "hot", "one expert gets all"),
    make_case(0, 64, 128, 4, 2, name="no tokens"),
    make_case(1400, 520, 1280, 16, 4, name="more tiles than multiprocessors"),
]


@every_run
@pytest.mark.parametrize("name", GOLDEN)
def test_structures_of_routings_by_hand(name, run):
    assert_golden(run.open(), GOLDEN[name])


@pytest.mark.parametrize(
    ("block", "run"),
    [
        pytest.param(block, run, id=f"{block}-{run}")
        for run in RUNS
        for block in ((BLOCK, 2 * BLOCK) if run.version == gemm.HOPPER else (8, 40, BLOCK, 136))
    ],
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_is_the_dense_one(product, block, run):
    stored = np.random.default_rng(0).random((7, 6)) < 0.5
    PRODUCTS[product](run.open(), sparse_of(stored, block, 264, run.dtype), parts=3)


def with_other_blocks(run):
    """The run in blocks of a second size, too: smaller than a tile, or two of Hopper's."""
    return run._replace(blocks=(BLOCK, 2 * BLOCK) if run.version == gemm.HOPPER else (8, BLOCK))


@every_run
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_is_the_dense_one_whatever_is_stored(product, run):
    assert_any_mask(product, with_other_blocks(run), most_parts=1)


@every_run
@pytest.mark.parametrize("product", PRODUCTS)
def test_parts_side_by_side_are_one_matrix_whatever_is_stored(product, run):
    assert_any_mask(product, run, most_parts=4)


@every_run
def test_rows_into_bins_and_back(run):
    case = CASES[1]
    assert_rows(run.open(), build_by_sort(case.topk_experts, case.E), BLOCK, 264, run.dtype)


@every_run
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_of_every_stored_value(activation, run):
    assert_activation(run.open(), activation, 9, BLOCK, run.dtype)


@every_run
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_layer_agrees_with_autograd(case, run):
    assert_layer(run.open(), case, BLOCK, run.dtype)


@every_run
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_agrees_with_autograd_under_every_activation(activation, run):
    assert_layer(run.open(), with_activation(CASES[0], activation), BLOCK, run.dtype)


@every_run
def test_twenty_runs_give_the_same_bits(run):
    stage, case = run.open(), CASES[0].astype(run.dtype)
    first = run_layer(stage, case, BLOCK)
    for _ in range(20):
        for name, array in run_layer(stage, case, BLOCK).items():
            np.testing.assert_array_equal(array, first[name], err_msg=name)


@pytest.mark.parametrize("routing", ["zipf", "hot"])
def test_the_numba_layer_gives_and_saves_what_the_specification_does(routing):
    case = make_case(2048, 256, 512, 8, 2, routing)
    assert_layer_as_specified(NUMBA.open(), case, BLOCK, "float32")


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_of_numba_is_the_dense_one_whatever_is_stored(product, parts):
    assert_any_mask(product, NUMBA, parts)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("cuda", "float32"), ("cuda", "float16"), ("numba", "float32")], ids=str
)
def test_cupy_arrays_stay_on_the_device(backend, dtype):
    import cupy

    case, stage = CASES[0].astype(dtype), BACKENDS[backend].stage("block_sparse")
    _, w1, w2, w3 = map(cupy.asarray, case.weights)
    dispatch = build_by_sort(case.topk_experts, case.E).map(cupy.asarray)
    gates = cupy.asarray(comparisons.hidden(case)[-1])
    out, saved = stage.forward(cupy.asarray(case.x), w1, w2, w3, dispatch, gates, case.activation)
    found = stage.backward(cupy.asarray(case.d_out), saved, w1, w2, w3)
    assert all(isinstance(array, cupy.ndarray) for array in (out, *found, *saved.tensors().values()))
    version = None
    if backend == "cuda":
        version = block_sparse.default_version(dtype, case.x.shape[1], BLOCK, cupy_executor())
    expected = run_layer(Run(backend, version, dtype, (BLOCK,)).open(), case, BLOCK)
    for name, array in {"out": out, **found._asdict()}.items():
        np.testing.assert_array_equal(cupy.asnumpy(array), expected[name], err_msg=name)
