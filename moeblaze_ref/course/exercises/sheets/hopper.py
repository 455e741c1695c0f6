"""Exercises of notebook 06: a tile of the Hopper version, and what limits whole stages."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, Prediction
from moeblaze_ref.course.exercises.roofline import GPU, LIMITS, limit
from moeblaze_ref.runtime.ceilings import Cost
from moeblaze_ref.runtime.source import MAX_SHARED_BYTES

ROWS, COLUMNS, DEPTH, ITEMSIZE = gemm.ROWS_BOX[1], gemm.HOPPER_COLUMNS, gemm.ROWS_BOX[0], 2


def _stage(rows, columns, depth, itemsize, shared_bytes):
    cost = Cost(flops=2 * rows * columns * depth, bytes=(rows + columns) * depth * itemsize)
    return {
        "stage": cost.bytes,
        "stages": shared_bytes // cost.bytes,
        "flops_per_byte": cost.flops / cost.bytes,
    }


def _limits(layer, tflops, tb_per_s):
    stages = ("expert_down", "combine", "d_w3")
    return {stage: limit(roofline.cost_of(stage, layer), tflops, tb_per_s) for stage in stages}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="ring-stages",
        title="Stages of the ring",
        question="""A tile of the result has `rows` rows and `columns` columns. A stage of the ring holds `depth`
            columns of one operand of the tile and `depth` rows of the other. How many bytes is a stage? How many stages
            would fit into the shared memory of a block? How many FLOPs does the tile do for each byte that arrives?""",
        given={
            "rows": ROWS,
            "columns": COLUMNS,
            "depth": DEPTH,
            "itemsize": ITEMSIZE,
            "shared_bytes": MAX_SHARED_BYTES,
        },
        steps=("stage = (rows + columns) * depth * itemsize",),
        asked={
            "stage": Asked("bytes", "stage"),
            "stages": Asked("stages", "shared_bytes // stage"),
            "flops_per_byte": Asked("FLOPs for each byte", "2 * rows * columns * depth / stage"),
        },
        truth=_stage,
        computed_by="moeblaze_ref.backends.raw_cuda.gemm",
        hint="""One operand is `(rows, depth)`, the other `(depth, columns)`. A step of the tile has `2 * rows * columns
            * depth` FLOPs.""",
        why="""The depth cancels in the last number: a deeper stage makes fewer steps, not fewer bytes. Only a larger
            tile needs fewer bytes.""",
    ),
    Prediction(
        name="which-limit",
        title="Which limit binds?",
        question="""Each stage reads every input once and writes every output once. Which limit binds then, the GPU's
            FLOPs or its bytes? The `combine` sums the `k` rows of each token; `d_w3` is the product that gives the
            gradient of `w3`.""",
        given={"layer": preset("mixtral").config, **GPU},
        asked={
            "expert_down": Asked(LIMITS, '"flops"'),
            "combine": Asked(LIMITS, '"bytes"'),
            "d_w3": Asked(LIMITS, '"flops"'),
        },
        truth=_limits,
        computed_by="moeblaze_ref.runtime.ceilings.Ceilings.bound",
        hint="""A product does `2 * d * h` FLOPs for a row of `d + h` elements. A sum does one or two for each element
            that it reads.""",
        why="""Tensor cores speed up the products. The sums in between only ever wait for memory, so it is better to
            fuse them, or to have fewer.""",
    ),
)
