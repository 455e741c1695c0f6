"""The claims of MegaBlocks (arXiv 2211.15841): its models, its metadata, its products, its capacity factors."""

from collections.abc import Iterator
from itertools import pairwise

from moeblaze_ref.config import MODELS
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.papers import block_products, capacities, squares
from moeblaze_ref.papers.claims import (
    Printed,
    Row,
    compared,
    exactly,
    measured,
    more_than,
    not_measured,
    not_reproduced,
)
from moeblaze_ref.papers.results import Recorded

# Tables 1 and 2: millions of weights, GFLOPs of a sequence.
TABLE_1 = {
    "transformer-XS": (46, 316),
    "transformer-Small": (125, 879),
    "transformer-Medium": (356, 2_487),
    "transformer-Large": (760, 5_122),
    "transformer-XL": (1_316, 8_684),
}
TABLE_2 = {"moe-XS": (839, 316), "moe-Small": (3_693, 879), "moe-Medium": (13_041, 2_487)}

# Table 3: the largest micro batch of each system, in sequences.
TABLE_3 = {
    "Megatron-LM": {"XS": 64, "Small": 32, "Medium": 16, "Large": 16, "XL": 8},
    "dMoE": {model.removeprefix("moe-"): batch for model, batch in block_products.MICRO_BATCHES.items()},
    "Tutel's dropless MoE": {"XS": 32, "Small": 8, "Medium": 1},
}


def table_1(_: Recorded) -> Iterator[Row]:
    """Dense Transformers."""
    yield from _models(TABLE_1)


def table_2(_: Recorded) -> Iterator[Row]:
    """The same with 64 experts in place of each FFN."""
    yield from _models(TABLE_2)


def _models(printed: dict[str, tuple[int, int]]) -> Iterator[Row]:
    for name, (millions, gflops) in printed.items():
        model = MODELS[name]
        yield compared(f"{name}: weights", exactly(millions, f"{millions:,}M"), model.weights / 1e6, "{:,.1f}M".format)
        flops = model.flops_per_sequence / 1e9
        yield compared(
            f"{name}: FLOPs of a sequence", exactly(gflops, f"{gflops:,} GFLOPs"), flops, "{:,.1f} GFLOPs".format
        )


def table_3(_: Recorded) -> Iterator[Row]:
    """Largest micro batches."""
    why = "a whole model in memory is not accounted here yet: only its MoE layers are"
    for system, sizes in TABLE_3.items():
        printed = ", ".join(f"{size} {batch}" for size, batch in sizes.items())
        yield not_reproduced(f"largest micro batch, {system}", printed, why)


METADATA = ("row_offsets", "column_indices", "row_indices", "column_offsets", "transpose_indices")


def metadata(_: Recorded) -> Iterator[Row]:
    """Section 5.1: the bytes of the hybrid blocked-CSR-COO format and of the transpose indices."""
    for model in block_products.MICRO_BATCHES:
        tensors = account(block_products.local_layer(model), "megablocks_published").tensors
        indices = sum(tensor.bytes for tensor in tensors if tensor.name in METADATA)
        (values,) = (tensor.bytes for tensor in tensors if tensor.name == "y_swi")
        yield compared(
            f"{model}, one GPU of table 3: metadata over one sparse matrix's values",
            Printed("below 0.1%", 0, 0.1),
            100 * indices / values,
            "{:.3f}%".format,
        )


# Figures that are measured --------------------------------------------------------------------------------------------


def figure_7(_: Recorded) -> Iterator[Row]:
    """End-to-end training."""
    why = "end-to-end training of these models on eight A100s is not run here"
    for size, times in (("XS", "1.38x"), ("Small", "2.0x"), ("Medium", "4.35x")):
        yield not_reproduced(f"MoE-{size}: speed over Tutel's dropless MoE", times, why)
    yield not_reproduced("speed over dense Megatron-LM at equal loss", "1.8x to 2.4x", why)


ANOTHER_GPU = "other kernels on another GPU: the paper's ran on an A100"


def figure_9(recorded: Recorded) -> Iterator[Row]:
    """Eighteen block-sparse products beside cuBLAS batched."""
    what, runs = "18 products, % of cuBLAS batched", list(recorded.runs("megablocks-fig9"))
    for device, rows in runs:
        found = block_products.summary(rows)
        for name, printed in (
            ("mean", exactly(98.6, "98.6%", 0.1)),
            ("deviation", exactly(4, "4%")),
            ("least", exactly(91, "91%")),
            ("most", exactly(104, "104%")),
        ):
            where = f" ({found[f'{name}_at']})" if f"{name}_at" in found else ""
            ours = f"{device}: {found[name]:.1f}%{where}"
            yield measured(f"{what}: {name}", printed, [found[name]], ours, ANOTHER_GPU)
    if not runs:
        yield not_measured(f"{what}: mean, deviation, least, most", "98.6%, 4%, 91%, 104%")


def figure_10(recorded: Recorded) -> Iterator[Row]:
    """Six products of E experts beside one expert after another."""
    what, printed = "times as fast as one expert after another", Printed("about 1.15x to 20x, growing with E", 1.1, 21)
    runs = list(recorded.runs("megablocks-fig10"))
    for device, rows in runs:
        for model in dict.fromkeys(row["model"] for row in rows):
            times = {row["E"]: row["sequential_ms"] / row["ms"] for row in rows if row["model"] == model}
            ours = f"{device}: " + ", ".join(f"E = {E} {ratio:.2f}x" for E, ratio in times.items())
            yield measured(f"{model}, {what}", printed, list(times.values()), ours, ANOTHER_GPU)
    if not runs:
        yield not_measured(what, printed.text)


def figure_5(recorded: Recorded) -> Iterator[Row]:
    """Dense square products: 128 x 128 tiles beside the other tiles."""
    what = "rate of 128x128 tiles over that of the fastest tile, dense squares of 512 to 16,384"
    printed = Printed("on a par or better throughout (we ask for 0.95)", 0.95, 1.0)
    runs = list(recorded.runs("megablocks-fig5"))
    for device, rows in runs:
        shares = squares.summary(rows)
        ours = ", ".join(f"{n:,}: {share:.2f}" for n, share in shares.items())
        yield measured(what, printed, list(shares.values()), f"{device}: {ours}", ANOTHER_GPU)
    if not runs:
        yield not_measured(what, printed.text)


OTHER_MODELS = "our models are far smaller than the paper's, and train on another text"


def figure_2(recorded: Recorded) -> Iterator[Row]:
    """Figures 2 and 8: the loss of capacity factors 1, 1.5, 2 and max, of a dense model and of a dropless one."""
    claims = (
        ("held-out loss: the least step from one capacity factor to the next", more_than(0, "falls with capacity")),
        ("capacity factor 1: gain over dense", exactly(0.15, "0.15", 0.01)),
        ("capacity factor max: gain over dense", exactly(0.26, "0.26", 0.01)),
    )
    runs = list(recorded.runs("megablocks-fig2"))
    for device, rows in runs:
        found = capacities.summary(rows)
        mean = {variant: of_variant["mean"] for variant, of_variant in found.items()}
        steps = [before - after for before, after in pairwise(mean[factor] for factor in capacities.FACTORS)]
        values = (min(steps), mean["dense"] - mean["1.0"], mean["dense"] - mean["max"])
        spread = ", ".join(f"{name} {one['mean']:.3f} +- {one['deviation']:.3f}" for name, one in found.items())
        for (what, printed), value in zip(claims, values, strict=True):
            ours = f"{device}: {value:+.3f} nats a byte"
            yield measured(what, printed, [value], ours, f"{OTHER_MODELS}; held-out losses: {spread}")
    if not runs:
        for what, printed in claims:
            yield not_measured(what, printed.text)
