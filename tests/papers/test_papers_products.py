"""MegaBlocks' products for figures 5, 9 and 10 without a GPU: on a device whose time the test makes up."""

import sys
from types import SimpleNamespace

import pytest
import torch
from pretended import PretendedDevice

from moeblaze_ref.bench.stages import input_sets
from moeblaze_ref.core.config import MODELS, MoEConfig
from moeblaze_ref.papers import block_products, squares
from moeblaze_ref.papers.agreement import checked_errors
from moeblaze_ref.papers.block_products import PRODUCTS, BlockSparse, Experts
from moeblaze_ref.papers.items import ITEMS

CPU = torch.device("cpu")
TINY = MoEConfig(L=48, d=16, h=24, E=3, k=1, activation="gelu")  # 16 rows an expert: whole blocks of 8
RAGGED = TINY.replace(L=30)  # 10 rows an expert: padded to 16
BLOCK = 8

# Figure 9: the six products -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_each_experts_own(name, config):
    torch.manual_seed(0)
    experts = Experts.random(config.replace(dtype="float32"), CPU)
    blocks = BlockSparse(experts, BLOCK, CPU)
    (result,) = blocks.run([name])
    left, right = PRODUCTS[name].dense(experts)
    expected = torch.stack([left[e].double() @ right[e].double() for e in range(config.E)])
    found = blocks.dense(name, result)
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < 1e-5
    assert all((found[e] - expected[e]).norm() / expected[e].norm() < 1e-5 for e in range(config.E))


def test_the_products_are_those_of_both_layers_and_of_their_gradients():
    experts = Experts.random(TINY, CPU)
    shapes = {name: tuple(torch.bmm(*product.dense(experts)).shape) for name, product in PRODUCTS.items()}
    E, m, d, h = 3, 16, TINY.d, TINY.h
    assert shapes == {
        "SDD": (E, m, h),
        "DSD": (E, m, d),
        "SDD^T": (E, m, h),
        "DS^TD": (E, h, d),
        "DSD^T": (E, m, d),
        "DD^TS": (E, d, h),
    }
    assert [name for name, product in PRODUCTS.items() if product.sparse] == ["SDD", "SDD^T"]
    for product in PRODUCTS.values():
        left, right = product.dense(experts)
        assert 2 * left.numel() * right.shape[2] == block_products.product_flops(TINY)


def test_blocks_lie_block_row_by_block_row():
    matrices = torch.arange(2 * 4 * 6).view(2, 4, 6)
    blocks = block_products.blocks_of(matrices, 2)
    assert blocks.shape == (12, 2, 2) and torch.equal(blocks[1], matrices[0, :2, 2:4])
    assert torch.equal(blocks[3], matrices[0, 2:, :2]) and torch.equal(blocks[6], matrices[1, :2, :2])
    assert torch.equal(block_products.matrices_of(blocks, 2, 6), matrices)


def test_a_row_of_figure_9_says_what_it_is():
    (row,) = block_products.time_product("moe-tiny", "DS^TD", RAGGED, device := PretendedDevice(), BLOCK)
    assert (row["model"], row["product"], row["dtype"]) == ("moe-tiny", "DS^TD", "bfloat16")
    assert row["shape"] == RAGGED.sizes and row["kernel"] == "3_mma"
    assert row["pct_of_bmm"] == pytest.approx(100 * row["bmm_ms"] / row["ms"]) and device.now > 1
    assert row["quartiles_ms"][0] <= row["ms"] <= row["quartiles_ms"][1]
    assert row["tflops"] == pytest.approx(2 * 30 * 16 * 24 / row["ms"] / 1e9)
    assert 0 <= row["error"] < 2.0**-6 and row["error"] <= row["row_error"]


@pytest.mark.parametrize("fault", ["zeros", "last row", "wrong expert"])
def test_a_wrong_product_is_not_timed(fault, monkeypatch):
    right = PRODUCTS["DSD"]

    def wrong(blocks, **options):
        result = right.ours(blocks, **options).copy()
        if fault == "zeros":
            result[:] = 0
        elif fault == "last row":
            result[-1] = 0
        else:
            result[:16], result[16:32] = result[16:32].copy(), result[:16].copy()
        return result

    monkeypatch.setitem(PRODUCTS, "DSD", block_products.Product(wrong, right.dense))
    with pytest.raises(
        ArithmeticError, match=r"product DSD has an error of .*, but at most 0\.016 and 0\.047 are allowed"
    ):
        block_products.time_product("moe-tiny", "DSD", TINY, PretendedDevice(), BLOCK)


def test_the_summary_is_of_the_rows():
    rows = [{"model": "moe-XS", "product": name, "pct_of_bmm": share} for name, share in (("SDD", 98.0), ("DSD", 91.0))]
    rows.append({"model": "moe-Small", "product": "SDD", "pct_of_bmm": 102.0})
    found = block_products.summary(rows)
    assert (found["products"], found["mean"], found["deviation"]) == (3, 97.0, pytest.approx(31**0.5))
    assert (found["least"], found["least_at"]) == (91.0, "moe-XS DSD")
    assert (found["most"], found["most_at"]) == (102.0, "moe-Small SDD")
    assert block_products.summary(rows[:1])["deviation"] is None
    with pytest.raises(ValueError, match="rows is empty"):
        block_products.summary([])


def test_the_eighteen_problems_are_table_3s():
    jobs = ITEMS["megablocks-fig9"].jobs(PretendedDevice())
    assert len({job.args[:2] for job in jobs}) == len(jobs) == 18
    for model, sequences in {"moe-XS": 64, "moe-Small": 32, "moe-Medium": 8}.items():
        config = block_products.local_layer(model)
        assert config.L == sequences * 1024 and (config.E, config.k) == (8, 1)
        assert (config.d, config.h) == (MODELS[model].d, 4 * MODELS[model].d)
        assert config.L % (config.E * 128) == 0  # nothing is padded
        assert {job.args[2] for job in jobs if job.args[0] == model} == {config}


@pytest.mark.parametrize("model", block_products.MICRO_BATCHES)
def test_no_operand_is_in_the_cache_when_it_is_used_again(model):
    def moved(E):
        c = block_products.local_layer(model, E)
        return 2 * (c.R * c.d + c.R * c.h + c.E * c.d * c.h)  # bytes of any one of the six

    l2 = 60 * 2**20
    assert input_sets(moved(block_products.LOCAL_EXPERTS), l2) == 1
    assert all(input_sets(6 * moved(E), l2) == 1 for E in block_products.EXPERTS)


def test_uniform_routing_needs_equal_shares():
    with pytest.raises(ValueError, match="L is 50, but uniform routing needs a multiple of E = 3"):
        Experts.random(TINY.replace(L=50), CPU)


# Figure 10: one expert after another ----------------------------------------------------------------------------------


def test_one_expert_after_another_gives_all_six_products():
    experts = Experts.random(TINY.replace(dtype="float64"), CPU)
    found = block_products.one_after_another(experts)
    expected = [matrix for product in PRODUCTS.values() for matrix in torch.bmm(*product.dense(experts))]
    assert len(found) == 6 * TINY.E
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, expected, strict=True))


def test_a_row_of_figure_10_says_what_it_is():
    (row,) = block_products.time_experts("moe-tiny", RAGGED, PretendedDevice(), BLOCK)
    assert (row["model"], row["E"], row["rows_of_expert"]) == ("moe-tiny", 3, 10)
    assert all(row[name] > 0 for name in ("ms", "sequential_ms", "graph_ms", "sequential_graph_ms"))
    assert 0 <= row["error"] <= row["row_error"] < 3 * 2.0**-6


def test_the_experts_are_2_to_128_with_the_same_tokens():
    jobs = ITEMS["megablocks-fig10"].jobs(PretendedDevice())
    assert [job.args[1].E for job in jobs] == 3 * [2, 4, 8, 16, 32, 64, 128]
    assert {job.args[1].L for job in jobs} == {65_536, 32_768, 8_192}


# Figure 5: dense squares ----------------------------------------------------------------------------------------------


@pytest.fixture
def triton(monkeypatch):
    """In the place of the module that needs Triton: the same product by torch, and what it was asked for."""
    asked = []

    def multiply(left, right, result, *kernel):
        asked.append(kernel)
        torch.mm(left, right, out=result)

    monkeypatch.setitem(sys.modules, "moeblaze_ref.papers.triton_matmul", fake := SimpleNamespace(multiply=multiply))
    monkeypatch.setattr("moeblaze_ref.papers.triton_matmul", fake, raising=False)
    return SimpleNamespace(module=fake, asked=asked)


def test_every_tile_has_a_row_beside_cublas(triton):
    device = PretendedDevice(cache_bytes=2 * 6 * 64 * 64)
    rows = squares.time_square(64, device)
    assert [row["tile"] for row in rows] == [*map(list, squares.WARPS), None]
    assert {kernel for kernel in triton.asked} == set(squares.KERNELS)
    assert [row["system"] for row in rows] == ["triton"] * len(squares.WARPS) + ["cublas"]
    for row in rows:
        assert row["tflops"] == pytest.approx(2 * 64**3 / row["ms"] / 1e9)
        assert row["ms"] < 0.5  # of one of the four products of a graph, which takes a bit more than 1
    assert all(row["error"] == 0 for row in rows[:-1]) and rows[-1]["error"] is None


def test_the_row_of_a_tile_is_that_of_its_fastest_kernel(triton):
    device = PretendedDevice(cache_bytes=1)
    cost = {(4, 3): 9.0, (4, 4): 7.0, (8, 3): 3.0, (8, 4): 5.0}

    def slow(left, right, result, tile, warps, stages, band):
        device.now += cost[warps, stages]
        torch.mm(left, right, out=result)

    triton.module.multiply = slow
    rows = {tuple(row["tile"] or ()): row for row in squares.time_square(64, device)}
    assert (rows[128, 128]["warps"], rows[128, 128]["stages"], rows[128, 128]["ms"]) == (8, 3, 3.0)
    assert (rows[64, 64]["warps"], rows[64, 64]["stages"], rows[64, 64]["ms"]) == (4, 4, 7.0)


@pytest.mark.parametrize("fault", ["nothing", "zeros", "last row"])
def test_a_wrong_square_is_not_timed(fault, triton):
    def wrong(left, right, result, *kernel):
        if fault == "zeros":
            result.zero_()
        if fault == "last row":
            result[:-1] = torch.mm(left, right)[:-1]

    triton.module.multiply = wrong
    with pytest.raises(ArithmeticError, match="the product of size 64 by tiles of 64x64 in bands of 8 has an error of"):
        squares.time_square(64, PretendedDevice())


def test_the_sizes_and_the_tiles_are_the_papers():
    assert [job.args[0] for job in ITEMS["megablocks-fig5"].jobs(PretendedDevice())] == [
        *(512, 1_024, 2_048, 4_096, 8_192, 16_384)
    ]
    assert squares.PAPERS_TILE in squares.WARPS and (64, 64) in squares.WARPS and (256, 128) in squares.WARPS
    assert all(n % side == 0 for n in squares.SIZES for tile in squares.WARPS for side in tile)


def test_the_papers_tile_is_compared_with_the_fastest():
    rows = [
        {"n": 512, "tile": [128, 128], "ms": 2.0},
        {"n": 512, "tile": [64, 64], "ms": 1.5},
        {"n": 1024, "tile": [128, 128], "ms": 4.0},
        {"n": 1024, "tile": [64, 64], "ms": 8.0},
        {"n": 512, "tile": None, "ms": 0.1},
    ]
    assert squares.summary(rows) == {512: 0.75, 1024: 1.0}


def test_each_order_of_the_papers_tile_has_a_row(triton):
    device = PretendedDevice()

    def slow(left, right, result, tile, warps, stages, band):
        device.now += {squares.BAND: 3.0, squares.ROW_BY_ROW: 4.0}[band]
        torch.mm(left, right, out=result)

    triton.module.multiply = slow
    rows = squares.time_square(128, device, squares.ORDERS)
    assert [(row["tile"], row["band"]) for row in rows] == [([128, 128], 8), ([128, 128], 1), (None, None)]
    assert squares.gains_by_order(rows) == {128: pytest.approx(0.25, rel=0.01)}


def test_nan_is_not_right():
    expected = torch.ones(4, 4)
    assert checked_errors("ones", expected, expected) == {"error": 0.0, "row_error": 0.0}
    with pytest.raises(ArithmeticError, match="ones has an error of nan"):
        checked_errors("ones", expected.clone().fill_(torch.nan), expected)
