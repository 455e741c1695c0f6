"""What is measured for the papers' figures on a CUDA device: right results, and rows that say what they are."""

from dataclasses import replace

import pytest
import torch

from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.lm import data
from moeblaze_ref.papers import block_products, capacities, squares

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")


@pytest.fixture(scope="module")
def gpu():
    from moeblaze_ref.runtime.device import Gpu

    return Gpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", (*squares.KERNELS, *squares.ORDERS[1::2]))
@pytest.mark.parametrize("n", [256, 768])
def test_the_triton_product_is_the_dense_one(kernel, n, dtype):
    from moeblaze_ref.papers import triton_matmul

    torch.manual_seed(0)
    left, right = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    result = torch.full_like(left, torch.nan)
    triton_matmul.multiply(left, right, result, *kernel)
    expected = left.double() @ right.double()
    error = (result - expected).norm(dim=1) / expected.norm(dim=1)  # of each row
    by_torch = ((left @ right) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) <= 2 * float(by_torch.max())


def test_a_size_that_the_tile_does_not_divide_is_refused():
    from moeblaze_ref.papers import triton_matmul

    matrix = torch.zeros(192, 192, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="n is 192, but a tile of 128x64 needs a multiple of 128, 64 and 64"):
        triton_matmul.multiply(matrix, matrix, torch.empty_like(matrix), (128, 64), warps=4, stages=3, band=8)


def test_every_tile_is_timed(gpu):
    rows = squares.time_square(512, gpu)
    assert len(rows) == len(squares.WARPS) + 1 and all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("name", block_products.PRODUCTS)
def test_every_product_is_timed_and_right(name, gpu):
    config = block_products.local_layer("moe-Medium").replace(L=2_048)
    (row,) = block_products.time_product("moe-Medium", name, config, gpu)
    assert row["ms"] > 0 and row["bmm_ms"] > 0


@pytest.mark.parametrize("E", [2, 32])
def test_all_products_are_timed_beside_one_expert_after_another(E, gpu):
    config = block_products.local_layer("moe-XS", E).replace(L=2_048)
    (row,) = block_products.time_experts("moe-XS", config, gpu)
    assert row["rows_of_expert"] == 2_048 // E and row["graph_ms"] > 0 and row["sequential_graph_ms"] > 0


@pytest.mark.parametrize("name", capacities.VARIANTS)
def test_every_variant_trains(name):
    base = replace(capacities.SIZES["cuda"], steps=20)
    (row,) = capacities.train(name, 0, base, data.standard_library(), torch.device("cuda"))
    assert row["steps"][-1] == 20 and row["held_out_loss"] < row["loss"][0] and row["seconds"] > 0
