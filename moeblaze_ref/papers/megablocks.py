"""The claims of MegaBlocks (arXiv 2211.15841): its models, its metadata, its products, its capacity factors."""

from collections.abc import Iterator, Sequence

from moeblaze_ref.config import MODELS, ModelConfig, MoEConfig
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.papers.claims import Printed, Row, compared, exactly, measured, more_than, not_measured, not_reproduced
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
    "dMoE": {"XS": 64, "Small": 32, "Medium": 8},
    "Tutel's dropless MoE": {"XS": 32, "Small": 8, "Medium": 1},
}
GPUS = 8  # of the evaluation: 64 experts over 8 GPUs are 8 local ones


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
        yield compared(f"{name}: FLOPs of a sequence", exactly(gflops, f"{gflops:,} GFLOPs"), flops, "{:,.1f} GFLOPs".format)


def table_3(_: Recorded) -> Iterator[Row]:
    """Largest micro batches."""
    why = "a whole model in memory is not accounted here yet: only its MoE layers are"
    for system, sizes in TABLE_3.items():
        printed = ", ".join(f"{size} {batch}" for size, batch in sizes.items())
        yield not_reproduced(f"largest micro batch, {system}", printed, why)


METADATA = ("row_offsets", "column_indices", "row_indices", "column_offsets", "transpose_indices")


def local_layer(size: str) -> MoEConfig:
    """Return the MoE layer of one GPU at table 3's micro batch: 8 local experts, top-1, float16, GELU.

    That each GPU holds 8 of the 64 experts and receives as many tokens as it sends is our assumption.
    """
    model: ModelConfig = MODELS[f"moe-{size}"]
    tokens = TABLE_3["dMoE"][size] * model.sequence
    return MoEConfig(L=tokens, d=model.d, h=4 * model.d, E=model.E // GPUS, k=1, activation="gelu", dtype="float16")


def metadata(_: Recorded) -> Iterator[Row]:
    """Section 5.1: the bytes of the hybrid blocked-CSR-COO format and of the transpose indices."""
    for size in TABLE_3["dMoE"]:
        tensors = account(local_layer(size), "megablocks_published").tensors
        indices = sum(tensor.bytes for tensor in tensors if tensor.name in METADATA)
        (values,) = (tensor.bytes for tensor in tensors if tensor.name == "y_swi")
        yield compared(
            f"MoE-{size}: metadata over one sparse matrix's values",
            Printed("below 0.1%", 0, 0.1),
            100 * indices / values,
            "{:.3f}%".format,
        )


# Figures that are measured ----------------------------------------------------------------------------------------------


def figure_7(_: Recorded) -> Iterator[Row]:
    """End-to-end training."""
    why = "end-to-end training of these models on eight A100s is not run here"
    for size, times in (("XS", "1.38x"), ("Small", "2.0x"), ("Medium", "4.35x")):
        yield not_reproduced(f"MoE-{size}: speed over Tutel's dropless MoE", times, why)
    yield not_reproduced("speed over dense Megatron-LM at equal loss", "1.8x to 2.4x", why)


SETTING = "other kernels on another GPU: the paper's ran on an A100"


def figure_9(recorded: Recorded) -> Iterator[Row]:
    """Eighteen block-sparse products beside cuBLAS batched."""
    for device, rows in recorded.runs("megablocks-fig9"):
        shares = [row["pct_of_bmm"] for row in rows]
        mean = sum(shares) / len(shares)
        deviation = (sum((share - mean) ** 2 for share in shares) / len(shares)) ** 0.5
        ours = f"{device}: {{:.1f}}%".format
        what = f"{len(shares)} products, % of cuBLAS batched"
        yield measured(f"{what}: mean", exactly(98.6, "98.6%", 0.1), [mean], ours(mean), SETTING)
        yield measured(f"{what}: standard deviation", exactly(4, "4%"), [deviation], ours(deviation), SETTING)
        yield measured(f"{what}: least", exactly(91, "91%"), [min(shares)], ours(min(shares)), SETTING)
        yield measured(f"{what}: most", exactly(104, "104%"), [max(shares)], ours(max(shares)), SETTING)
    if not any(True for _ in recorded.runs("megablocks-fig9")):
        yield not_measured("18 products, % of cuBLAS batched: mean, deviation, extremes", "98.6%, 4%, 91% to 104%")


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def figure_10(recorded: Recorded) -> Iterator[Row]:
    """Speed over one expert after another."""
    printed = Printed("about 1.15x to 20x, growing with E", 1.1, 21)
    runs = list(recorded.runs("megablocks-fig10"))
    for device, rows in runs:
        times = [row["sequential_ms"] / row["ms"] for row in rows]
        yield measured("E = 2 to 128: times as fast as one expert after another", printed, times, f"{device}: {_spread(times)}x", SETTING)
    if not runs:
        yield not_measured("E = 2 to 128: times as fast as one expert after another", printed.text)


def figure_5(recorded: Recorded) -> Iterator[Row]:
    """Dense square products: 128 x 128 tiles beside the other tiles."""
    runs = list(recorded.runs("megablocks-fig5"))
    what, text = "n = 512 to 16,384: 128x128 tiles over the best tile", "on a par or better throughout"
    for device, rows in runs:
        shares = [_of_best_tile(rows, n) for n in sorted({row["n"] for row in rows})]
        yield measured(what, Printed(text, 0.95, 1.0), shares, f"{device}: {_spread(shares)}", SETTING)
    if not runs:
        yield not_measured(what, text)


def _of_best_tile(rows, n: int) -> float:
    """The rate of 128 x 128 tiles over that of the fastest tile, for one size."""
    ms = {tuple(row["tile"]): row["ms"] for row in rows if row["n"] == n and row.get("tile")}
    return min(ms.values()) / ms[128, 128]


def figure_2(recorded: Recorded) -> Iterator[Row]:
    """Figures 2 and 8: capacity factors 1, 1.5, 2 and max, dense, dropless."""
    runs = list(recorded.runs("megablocks-fig2"))
    text = "loss falls with the capacity factor; max is best"
    for device, rows in runs:
        losses: dict[str, list[float]] = {}
        for row in rows:
            losses.setdefault(row["variant"], []).append(row["held_out_loss"])
        mean = {variant: sum(found) / len(found) for variant, found in losses.items()}
        ours = ", ".join(f"{variant} {value:.3f}" for variant, value in mean.items())
        yield measured("held-out loss, mean of the seeds", more_than(0, text), [_falls(mean)], f"{device}: {ours}", SMALL)
    if not runs:
        yield not_measured("held-out loss by capacity factor", text)


SMALL = "our models are far smaller than the paper's, and train on another text"
FACTORS = ("1.0", "1.5", "2.0", "max")


def _falls(mean: dict[str, float]) -> float:
    """Above zero if the loss falls from each capacity factor to the next: the least step."""
    losses = [mean[factor] for factor in FACTORS if factor in mean]
    return min(before - after for before, after in zip(losses, losses[1:], strict=False))
