"""The claims of MegaBlocks (arXiv 2211.15841): its models, its metadata, its products, its capacity factors."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from moeblaze_ref.core.config import MODELS
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.papers import block_products, capacities, squares
from moeblaze_ref.papers.claims import (
    PrintedNumber,
    Row,
    at_least,
    compared,
    exactly,
    measured,
    more_than,
    not_measured,
    not_reproduced,
    observed,
)
from moeblaze_ref.papers.results import Recorded, Rows, Run, Source
from moeblaze_ref.papers.traced import MISSING, needed_factors, our_trace, traced_at

# Tables 1 and 2: millions of weights, GFLOPs of a sequence.
TABLE_1 = {
    "transformer-XS": (46, 316),
    "transformer-Small": (125, 879),
    "transformer-Medium": (356, 2_487),
    "transformer-Large": (760, 5_122),
    "transformer-XL": (1_316, 8_684),
}
TABLE_2 = {"moe-XS": (839, 316), "moe-Small": (3_693, 879), "moe-Medium": (13_041, 2_487)}


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


METADATA = ("row_offsets", "column_indices", "row_indices", "column_offsets", "transpose_indices")


def metadata(_: Recorded) -> Iterator[Row]:
    """Section 5.1: the bytes of the hybrid blocked-CSR-COO format and of the transpose indices."""
    for model in block_products.MICRO_BATCHES:
        tensors = account(block_products.local_layer(model), "megablocks_published").tensors
        indices = sum(tensor.bytes for tensor in tensors if tensor.name in METADATA)
        (values,) = (tensor.bytes for tensor in tensors if tensor.name == "y_swi")
        yield compared(
            f"{model}, one GPU of table 3: metadata over one sparse matrix's values",
            PrintedNumber("below 0.1%", 0, 0.1),
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


FIGURE_9 = {
    "mean": exactly(98.6, "98.6%", 0.1),
    "deviation": exactly(4, "4%"),
    "least": exactly(91, "91%"),
    "most": exactly(104, "104%"),
}
LOSES_MOST = "the product that loses most against cuBLAS batched, mean of three models"
LOSS, UNDER_10 = "what DS^T D loses against it", PrintedNumber("under 10%", 0, 10)


def _of_18(statistic: str) -> str:
    return f"18 products, % of cuBLAS batched: {statistic}"


def figure_9(recorded: Recorded) -> Iterator[Row]:
    """Eighteen block-sparse products beside cuBLAS batched."""
    runs = list(recorded.finished("megablocks-fig9"))
    for run in runs:
        yield from (row.by([run.source]) for row in _figure_9(run.source.device, run.rows))
    if not runs:
        yield from (not_measured(_of_18(name), printed.text) for name, printed in FIGURE_9.items())
        yield not_measured(LOSES_MOST, "DS^T D")
        yield not_measured(LOSS, UNDER_10.text)


def _figure_9(device: str, rows: Rows) -> Iterator[Row]:
    found = block_products.summary(rows)
    for name, printed in FIGURE_9.items():
        where = f" ({found[f'{name}_at']})" if f"{name}_at" in found else ""
        yield measured(_of_18(name), printed, [found[name]], f"{device}: {found[name]:.1f}%{where}", ANOTHER_GPU)
    yield from _losses_of_products(device, rows)


def _losses_of_products(device: str, rows: Rows) -> Iterator[Row]:
    """Return the loss of speed of each of the six products against batched cuBLAS, the mean of the three models."""
    names = dict.fromkeys(row["product"] for row in rows)
    losses = {name: 100 - fmean(row["pct_of_bmm"] for row in rows if row["product"] == name) for name in names}
    most = max(losses, key=losses.__getitem__)
    ours = f"{device}: {most} loses {losses[most]:.1f}%"
    yield observed(LOSES_MOST, "DS^T D", most == "DS^TD", ours, ANOTHER_GPU)
    yield measured(LOSS, UNDER_10, [losses["DS^TD"]], f"{device}: {losses['DS^TD']:.1f}%", ANOTHER_GPU)


def order_of_tiles(recorded: Recorded) -> Iterator[Row]:
    """Bands of tiles beside tiles row by row, through the L2 cache: of dense products, as figure 5 has them."""
    what = "time that tiles of 128x128 in bands of 8 rows save beside tiles row by row, dense squares of 512 to 16,384"
    printed = PrintedNumber("up to 10%", -10, 10)
    runs = list(recorded.finished("megablocks-order"))
    for source, rows in runs:
        gains = {n: 100 * gain for n, gain in squares.gains_by_order(rows).items()}
        ours = f"{source.device}: " + ", ".join(f"{n:,}: {gain:+.1f}%" for n, gain in gains.items())
        yield measured(what, printed, list(gains.values()), ours, ANOTHER_GPU).by([source])
    if not runs:
        yield not_measured(what, printed.text)


def figure_10(recorded: Recorded) -> Iterator[Row]:
    """Six products of E experts beside one expert after another."""
    what = "times as fast as one expert after another"
    printed = PrintedNumber("about 1.15x to 20x, growing with E", 1.1, 21)
    runs = list(recorded.finished("megablocks-fig10"))
    for source, rows in runs:
        for model in dict.fromkeys(row["model"] for row in rows):
            times = {row["E"]: row["sequential_ms"] / row["ms"] for row in rows if row["model"] == model}
            ours = f"{source.device}: " + ", ".join(f"E = {E} {ratio:.2f}x" for E, ratio in times.items())
            yield measured(f"{model}, {what}", printed, list(times.values()), ours, ANOTHER_GPU).by([source])
    if not runs:
        yield not_measured(what, printed.text)


def figure_5(recorded: Recorded) -> Iterator[Row]:
    """Dense square products: 128 x 128 tiles beside the other tiles."""
    what = "rate of 128x128 tiles over that of the fastest tile, dense squares of 512 to 16,384"
    printed = PrintedNumber("on a par or better throughout (we ask for 0.95)", 0.95, 1.0)
    runs = list(recorded.finished("megablocks-fig5"))
    for source, rows in runs:
        shares = squares.summary(rows)
        ours = f"{source.device}: " + ", ".join(f"{n:,}: {share:.2f}" for n, share in shares.items())
        yield measured(what, printed, list(shares.values()), ours, ANOTHER_GPU).by([source])
    if not runs:
        yield not_measured(what, printed.text)


OTHER_MODELS = "our models are far smaller than the paper's, and train on another text"
STEPS = tuple(pairwise(capacities.FACTORS))
LARGER = "gain in held-out loss of capacity factor max over the larger dense model"
GAINS_LESS = "more than dense Medium gains"
GAINS = (("1.0", exactly(0.15, "0.15", 0.01)), ("max", exactly(0.26, "0.26", 0.01)))


def figure_2(recorded: Recorded) -> Iterator[Row]:
    """The loss of capacity factors 1, 1.5, 2 and max and of a dense model; what a capacity without drops costs."""
    runs = list(recorded.finished(capacities.ITEM))
    yield from (_step(_Gains.of(runs, *factors), *factors) for factors in STEPS)
    yield from (_gain(_Gains.of(runs, "dense", factor), factor, printed) for factor, printed in GAINS)
    yield _gain_over_the_larger(_Gains.of(runs, "larger dense", "max"))
    yield from _capacity_without_drops()


class _Gains(NamedTuple):
    """The gain of one variant over another on each device, and the runs that it comes from."""

    pools: list[list[Run]]
    gains: list[capacities.Gain]

    @classmethod
    def of(cls, runs: Sequence[Run], before: str, after: str) -> "_Gains":
        pools = capacities.pools(runs, before, after)
        return cls(pools, [capacities.gain((run.rows for run in pool), before, after) for pool in pools])

    @property
    def sources(self) -> list[Source]:
        return [run.source for pool in self.pools for run in pool]

    def ours(self, sign: int) -> str:
        """Each gain with its device, or with the sign -1 each change of the loss."""
        return "; ".join(_nats(pool, gain, sign) for pool, gain in zip(self.pools, self.gains, strict=True))

    @property
    def all_fall(self) -> bool:
        """Return True if the loss falls on every device."""
        return all(gain.resolved and gain.mean > 0 for gain in self.gains)

    @property
    def unresolved(self) -> list[str]:
        """The devices on which the seeds do not tell the gain from 0."""
        return [pool[0].source.device for pool, gain in zip(self.pools, self.gains, strict=True) if not gain.resolved]


def _nats(pool: Sequence[Run], gain: capacities.Gain, sign: int) -> str:
    trained = f"{gain.seeds} seeds, {_steps(pool)}"
    return f"{pool[0].source.device}: {sign * gain.mean:+.4f} +- {gain.error:.4f} nats a byte ({trained})"


def _steps(runs: Sequence[Run]) -> str:
    """Return the training steps of these runs."""
    lengths = dict.fromkeys(f"{run.rows[0]['steps'][-1]:,}" for run in runs)
    return f"{' and '.join(lengths)} steps"


def _step(found: _Gains, before: str, after: str) -> Row:
    what, printed = f"held-out loss from capacity factor {before} to {after}", "falls with capacity"
    if not found.gains:
        return not_measured(what, printed)
    unresolved = f"not resolved on {' and '.join(found.unresolved)}: {capacities.RESOLVED} standard errors are more"
    why = f"{unresolved} than the step" if found.unresolved else OTHER_MODELS
    return observed(what, printed, found.all_fall, found.ours(-1), why).by(found.sources)


def _gain(found: _Gains, factor: str, printed: PrintedNumber) -> Row:
    what = f"gain in held-out loss of capacity factor {factor} over dense"
    gains = [gain.mean for gain in found.gains]
    return measured(what, printed, gains, found.ours(1), OTHER_MODELS).by(found.sources)


def _gain_over_the_larger(found: _Gains) -> Row:
    """Section 3: the mixture of the largest capacity gains more over a dense model than the next dense model does."""
    if not found.gains:
        return not_measured(LARGER, GAINS_LESS, why="no recorded run trains a dense model of the next size")
    return observed(LARGER, GAINS_LESS, found.all_fall, found.ours(1), OTHER_MODELS).by(found.sources)


def _capacity_without_drops() -> Iterator[Row]:
    """Section 3: the arithmetic of the smallest capacity that drops nothing, and the largest factor that is needed."""
    trace = our_trace()
    claims = (
        ("capacity factor max: rows computed over rows routed", more_than(2, "over 2x the MoE arithmetic"), "mean"),
        ("the largest capacity factor that is needed to drop nothing", at_least(11, "as high as 11"), "max"),
    )
    for what, printed, statistic in claims:
        if trace is None:
            yield not_measured(what, printed.text, why=MISSING)
        else:
            value = float(getattr(needed_factors(trace), statistic)())
            ours = f"our trace: {value:.2f}x"
            yield measured(what, printed, [value], ours, OTHER_MODELS).by([traced_at(trace)])


# Figure 8: speed over the best capacity factor.
FIGURE_8 = {"MoE-XS": 1.38, "MoE-Small": 1.37, "MoE-Medium": 1.18}


def figure_8(recorded: Recorded) -> Iterator[Row]:
    """The time of the dropless model beside the best capacity factor, at equal loss, from the runs of figure 2."""
    runs = [run for run in recorded.finished(capacities.ITEM) if run.rows[0]["seconds"] is not None]
    found = [capacities.equal_loss(run.rows) for run in runs]
    for model, times in FIGURE_8.items():
        what = f"{model}: speed over the best capacity factor, at equal loss"
        printed = exactly(times, f"{times}x", 0.01)
        if not runs:
            yield not_measured(what, printed.text, why=f"no recorded run of {capacities.ITEM} on a GPU")
            continue
        ours = "; ".join(map(_speed, runs, found))
        speeds = [one.speed for one in found]
        yield measured(what, printed, speeds, ours, OTHER_MODELS).by(run.source for run in runs)


def _speed(run: Run, found: capacities.EqualLoss) -> str:
    there = f"over factor {found.best_factor}, at {found.loss:.3f} nats a byte"
    return f"{run.source.device}: {found.speed:.2f}x {there} ({_steps([run])})"
