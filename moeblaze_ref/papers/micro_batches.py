"""MegaBlocks' table 3: the largest micro batch that fits into a GPU, by the bytes of a whole training step.

Source: MegaBlocks (arXiv 2211.15841), section 6, table 3. Batches are powers of two, at most a GPU's part of the batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache

from moeblaze_ref.core.config import MODELS
from moeblaze_ref.core.units import GB
from moeblaze_ref.papers import block_products
from moeblaze_ref.papers.claims import Row, Verdict
from moeblaze_ref.papers.results import Recorded
from moeblaze_ref.plan.gpt import LocalExperts, gpt
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run

DENSE, DROPLESS, TUTEL = "Megatron-LM", "dMoE", "Tutel's dropless MoE"
# The largest micro batch of each system, in sequences.
TABLE_3 = {
    DENSE: {"XS": 64, "Small": 32, "Medium": 16, "Large": 16, "XL": 8},
    DROPLESS: {model.removeprefix("moe-"): batch for model, batch in block_products.MICRO_BATCHES.items()},
    TUTEL: {"XS": 32, "Small": 8, "Medium": 1},
}
LAYERS = {DROPLESS: "megablocks_published", TUTEL: "capacity"}  # of `memory.accounting`
MEMORY = 80 * GB  # of the paper's GPUs
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # up to a GPU's part of the batch, 512 / 8
FACTORS = range(1, 65)  # capacities that are tried, as multiples of an even share


def table_3(_: Recorded) -> Iterator[Row]:
    """The largest micro batches of three systems."""
    reasons = {DENSE: _large_is_close, TUTEL: _capacity_needed}
    for system, printed in TABLE_3.items():
        found = {size: micro_batch(system, size) for size in printed}
        verdict, why = (Verdict.AGREES, "") if found == printed else (Verdict.DIFFERS, reasons[system]())
        what = f"largest micro batch, {system}"
        yield Row("", what, _listed(printed), _listed(found), verdict=verdict, why=why)


def _listed(batches: Mapping[str, int]) -> str:
    return ", ".join(f"{size} {batch}" for size, batch in batches.items())


def micro_batch(system: str, size: str, capacity_factor: float = 1.0) -> int:
    """The largest micro batch of a system, for a model of a size; 0 if not even one sequence fits.

    The capacity factor counts for Tutel's layer alone.
    """
    fitting = bisect_right(BATCHES, MEMORY, key=lambda batch: peak_bytes(system, size, batch, capacity_factor))
    return BATCHES[fitting - 1] if fitting else 0


@lru_cache(maxsize=1024)
def peak_bytes(system: str, size: str, batch: int, capacity_factor: float = 1.0) -> int:
    """The most bytes of a GPU in a step of a micro batch."""
    name = f"transformer-{size}" if system == DENSE else f"moe-{size}"
    model = MODELS[name]
    experts = None
    if system in LAYERS:
        experts = LocalExperts(model.d, block_products.LOCAL_EXPERTS, LAYERS[system], capacity_factor)
    return Run(gpt(name, model, experts), Step(batch, model.sequence)).worst.peak.bytes


def _large_is_close() -> str:
    needed = peak_bytes(DENSE, "Large", TABLE_3[DENSE]["Large"]) / GB
    return f"by our account Large with 16 needs {needed:.1f} GB"


def _capacity_needed() -> str:
    factors = {size: capacity_of(size) for size in TABLE_3[TUTEL]}
    needed = ", ".join(f"{size} {factor}" for size, factor in factors.items())
    return f"ours routes evenly; the printed ones follow where capacities are larger, from factors of {needed} on"


def capacity_of(size: str) -> int | None:
    """The least capacity factor, an integer, with which Tutel's layer fits no larger micro batch than is printed."""
    printed = TABLE_3[TUTEL][size]
    larger = bisect_left(FACTORS, True, key=lambda factor: micro_batch(TUTEL, size, factor) <= printed)
    return FACTORS[larger] if larger < len(FACTORS) else None
