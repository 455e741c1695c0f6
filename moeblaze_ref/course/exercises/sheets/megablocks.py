"""Exercises of notebook 07: padding, and blocks."""

from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, Prediction
from moeblaze_ref.memory.accounting import tiles
from moeblaze_ref.memory.rows import megablocks_rows
from moeblaze_ref.memory.waste import step_flops_per_row


def _padding(counts, h, block):
    rows = megablocks_rows(counts, block)
    stored = sum(rows.stored)
    return {"padding": sum(rows.padding), "blocks": stored // block * tiles(h, block)}


def _wasted(layer, padding):
    return {"flops": padding * step_flops_per_row(layer)}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="padding-rows",
        title="Rows that fill up blocks",
        question="""MegaBlocks drops nothing. It pads each expert's group to whole blocks of `block` rows. With
            `counts[e]` rows for expert `e`, how many rows are padding? The hidden tensor is block-sparse, with `h`
            columns for each expert: how many blocks of `block` by `block` does it store?""",
        given={"counts": [300, 128, 0, 5, 1], "h": 512, "block": 128},
        asked={
            "padding": Asked("rows", "sum(-n % block for n in counts)"),
            "blocks": Asked("blocks", "sum(-(-n // block) for n in counts) * (h // block)"),
        },
        truth=_padding,
        computed_by="moeblaze_ref.memory.rows.megablocks_rows",
        hint="`ceil(n / block)` blocks of rows for an expert with `n` rows; none for an expert without rows.",
        why="""Padding is at most `block - 1` rows for each expert, whatever the skew. It hurts where experts have few
            rows each: many experts, few tokens.""",
    ),
    Prediction(
        name="wasted-work",
        title="What padding costs",
        question="""Each row of padding goes through the products of a whole step, forward and backward. How many FLOPs
            do `padding` rows waste in a SwiGLU layer?""",
        given={"layer": preset("olmoe").config, "padding": 4000},
        asked={"flops": Asked("FLOPs", "padding * 18 * layer.d * layer.h")},
        truth=_wasted,
        computed_by="moeblaze_ref.memory.waste.step_flops_per_row",
        hint="A step has nine products, each with `2 * d * h` FLOPs for a row.",
        why="""A product with zeros takes as long as any other. MoEBlaze stores no padding, but its last tiles compute
            on empty rows as well.""",
    ),
)
