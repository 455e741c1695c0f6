"""Exercises of notebook 10: experts on several GPUs."""

import numpy as np

from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, Prediction

TOPK_EXPERTS = [[0, 1], [0, 2], [1, 3], [2, 3], [0, 3], [4, 5], [2, 4], [1, 0]]
RANK_OF_EXPERT = [0, 0, 1, 1, 2, 2]
ROWS = "sum(len({rank_of_expert[e] for e in t}) for t in topk_experts)"


def _visits(topk_experts, rank_of_expert):
    """The ranks (L, k) that get a token's row, ``EMPTY`` in slots that need none."""
    from moeblaze_ref.course.notebook.parallel import ranks_of  # which takes torch along

    return ranks_of(np.array(topk_experts), np.array(rank_of_expert, np.int32))


def _rows(topk_experts, rank_of_expert):
    sent = _visits(topk_experts, rank_of_expert)
    return {"rows": int((sent != EMPTY).sum()), "to_rank_1": int((sent == 1).sum())}


def _bytes(topk_experts, rank_of_expert, d, itemsize):
    rows, k = _rows(topk_experts, rank_of_expert)["rows"], len(topk_experts[0])
    return {"there": rows * (d * itemsize + 8 * k), "back": rows * d * itemsize}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="rows-sent",
        title="Rows that are sent",
        difficulty=2,
        question="""Eight tokens have two experts each: `topk_experts[i]` names those of token `i`, and
            `rank_of_expert[e]` is the rank of expert `e`. A row goes once to each rank that has one of its experts, its
            own rank too. How many rows are sent in all, and how many of them to rank 1?""",
        given={"topk_experts": TOPK_EXPERTS, "rank_of_expert": RANK_OF_EXPERT},
        asked={
            "rows": Asked("rows", ROWS),
            "to_rank_1": Asked("rows", "sum(1 in {rank_of_expert[e] for e in t} for t in topk_experts)"),
        },
        truth=_rows,
        computed_by="moeblaze_ref.parallel.specification.first_slots",
        hints=(
            "Write the ranks of both experts beside each token. Where they are equal, one row serves both.",
            "Each token sends one row or two. Add them up. Then count the tokens that have an expert on rank 1.",
        ),
        why="""Sixteen choices need fewer rows than that. A rank that has both experts of a token gets its row once, and
            sends one sum back.""",
    ),
    Prediction(
        name="bytes-of-a-trip",
        title="Bytes, there and back",
        difficulty=2,
        question="""The same tokens have rows of `d` numbers of `itemsize` bytes. Each row travels with its `k` expert
            ids and its `k` gates, four bytes each. One row of `d` numbers comes back, the weighted sum. How many bytes
            go there, and how many come back, those within a rank included?""",
        given={"topk_experts": TOPK_EXPERTS, "rank_of_expert": RANK_OF_EXPERT, "d": 512, "itemsize": 2},
        steps=(f"rows = {ROWS}", "k = len(topk_experts[0])"),
        asked={
            "there": Asked("bytes", "rows * (d * itemsize + 8 * k)"),
            "back": Asked("bytes", "rows * d * itemsize"),
        },
        truth=_bytes,
        computed_by="moeblaze_ref.parallel.specification.first_slots",
        hints=(
            "The number of rows is that of the previous exercise. Ids and gates are `8 * k` bytes beside each.",
            "A row that goes there has `d * itemsize + 8 * k` bytes, a row that comes back `d * itemsize`.",
        ),
        why="""The other rank builds its own index structures from the ids and gates, which are few bytes beside the
            rows. Buffers padded to the busiest pair of ranks would send as many rows for every pair.""",
    ),
)
