"""Questions of notebooks 03, 04 and 06: products, gradients, and the kernels for Hopper."""

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.teaching.question import Choice, Number, Question

PRODUCT, BACKWARD, HOPPER = "03_gather_gemm_swiglu", "04_backward_by_hand", "06_hopper"


def _tile_intensity():
    from moeblaze_ref.course.notebook.gemm import tile_intensity  # which takes Matplotlib along

    return tile_intensity(64, 64, results=1)


def _products():
    layer = preset("conf4").config
    return roofline.layer_flops(layer) / (2 * layer.R * layer.d * layer.h)


def _slope():
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    return float(activation.backward(one, zero, one, "swiglu")[0][0, 0])


def _stage_bytes():
    depth, rows = gemm.ROWS_BOX
    return (rows + gemm.HOPPER_COLUMNS) * depth * 2


QUESTIONS: tuple[Question, ...] = (
    Choice(
        name="price-of-the-gather",
        notebook=PRODUCT,
        heading="Does the gather cost anything?",
        paper="MoEBlaze, section 3.1",
        ask="A kernel gathers rows of `x`, and another reads a routed copy of the same rows. How do their sectors of "
        "32 bytes compare, if a row has thousands of bytes?",
        right="They are equal.",
        wrong={
            "The gather touches `k` times as many.": "Both read `R` rows for the products, wherever these lie.",
            "The gather touches more.": "Only rows are scattered; inside a row all bytes are neighbours.",
            "The copy touches more, as it is larger.": "Size does not matter: each kernel reads the same rows.",
        },
        why="A row fills whole sectors. Rows that begin at no multiple of 32 bytes would make a difference.",
    ),
    Number(
        name="tile-of-one-result",
        notebook=PRODUCT,
        heading="The roofline",
        ask="A block computes a tile of 64 x 64 results of one product in bfloat16, and loads every operand of the "
        "tile once. How many FLOPs does it do for each byte that it loads?",
        unit="FLOPs for each byte",
        compute=_tile_intensity,
        computed_by="moeblaze_ref.course.notebook.gemm.tile_intensity",
        why="A step of the depth has `2 * 64 * 64` FLOPs and loads `64 + 64` elements of 2 bytes.",
        slips={
            64: "That is for each element, not for each byte.",
            16: "That counts a multiplication and its addition as one FLOP.",
        },
    ),
    Choice(
        name="who-writes-worst",
        notebook=PRODUCT,
        heading="The series, counted",
        ask="Which version of `expert_up` touches the most sectors for each result that it writes?",
        right="`2_tiled`: a thread owns a corner of the tile and stores one element at every fourth column.",
        wrong={
            "`1_naive`: it does not use shared memory.": "Its neighbouring threads store neighbouring elements.",
            "`3_mma`: fragments are scattered over the warp.": "Lanes exchange them first, then store 16 bytes each.",
            "All write the same sectors.": "They write the same bytes, but `2_tiled` touches each sector four times.",
        },
        why="The bytes are equal in all versions, so only a count of sectors shows it.",
    ),
    Choice(
        name="where-zeros-are",
        notebook=PRODUCT,
        heading="Products, counted too",
        ask="The last tile of an expert's group is seldom full. What does that cost in this project's tiled kernels?",
        right="FLOPs on zeros in shared memory, and no byte of global memory.",
        wrong={
            "Rows of padding in global memory.": "MegaBlocks stores such rows; here a tile is filled in shared memory.",
            "Nothing: a short tile ends early.": "A tile multiplies all its rows, also those that are zeros.",
            "A second launch for short groups.": "One launch has tiles of all groups; blocks look for theirs.",
        },
        why="The waste is at most one tile less a row for each expert, and matters where groups are short.",
    ),
    Choice(
        name="gate-without-output",
        notebook=BACKWARD,
        heading="`d_gates`, without any expert output",
        paper="SonicMoE; MoEBlaze, Algorithm 1",
        ask="The gradient of a gate is `<d_out, y>` over a row. Why need no expert output `y` be kept for it?",
        right="It equals `<d_out w3^T, y_swi>`, and the backward computes both factors anyway.",
        wrong={
            "The gate's gradient is small and left out.": "Every gradient is computed and compared with autograd.",
            "`y` is computed again in the backward.": "That would repeat a product of `2 * R * d * h` FLOPs.",
            "`out` holds the sum of all `y`.": "The sum over `k` experts does not give the `y` of one of them.",
        },
        why="In a scalar product a matrix moves to the other side, transposed.",
    ),
    Choice(
        name="two-are-enough",
        notebook=BACKWARD,
        heading="Through the activation: `d_b` and `d_a`",
        paper="MoEBlaze, section 5",
        ask="Which tensors between the two products does the backward of a SwiGLU expert need at least?",
        right="`a` and `b`.",
        wrong={
            "`y_swi` alone.": "Neither `a` nor `b` follows from their product after silu.",
            "`a`, `b` and `y_swi`.": "`y_swi` is `silu(a) * b`, one multiplication on numbers in registers.",
            "`silu(a)` and `b`.": "The slope of silu needs `a`, and silu has no inverse: two `a` can have one value.",
        },
        why="`d_a`, `d_b`, `y_swi` and the slope all follow from `a` and `b`.",
    ),
    Number(
        name="products-of-a-step",
        notebook=BACKWARD,
        heading="What it costs",
        ask="How many matrix products of `2 * R * d * h` FLOPs do the experts of a gated layer take in a step, "
        "forward and backward?",
        unit="products",
        compute=_products,
        computed_by="moeblaze_ref.bench.roofline.layer_flops",
        why="The forward has three, and each has two gradients: of its input and of its weights.",
        slips={
            6: "That is the backward alone.",
            12: "That would repeat the whole forward, as torch's own checkpoint does.",
        },
    ),
    Number(
        name="slope-at-zero",
        notebook=BACKWARD,
        heading="Through the activation: `d_b` and `d_a`",
        paper="MoEBlaze, section 5",
        ask="What is the slope of silu, `a / (1 + exp(-a))`, at `a = 0`?",
        unit="(a slope)",
        compute=_slope,
        computed_by="moeblaze_ref.backends.numpy_ref.activation.backward",
        why="`silu'(a) = s * (1 + a * (1 - s))` with `s = 1 / 2` at zero.",
        slips={
            0: "That is silu itself at zero, and the slope that torch gives relu there.",
            0.25: "That is the slope of the sigmoid.",
        },
    ),
    Number(
        name="bytes-of-a-stage",
        notebook=HOPPER,
        heading="The formula",
        ask="A tile of `7_persistent` has 128 rows and 256 columns, and a step takes 64 of the depth. How many bytes "
        "of bfloat16 must arrive for a step?",
        unit="bytes",
        compute=_stage_bytes,
        computed_by="moeblaze_ref.backends.raw_cuda.gemm",
        why="One operand is 128 x 64, the other 64 x 256, with 2 bytes for each element.",
        slips={
            65_536: "That is the tile of results in bfloat16; results do not arrive, they leave.",
            24_576: "That counts elements.",
        },
    ),
    Choice(
        name="why-not-tma",
        notebook=HOPPER,
        heading="Asynchronous copies",
        ask="Weights come by the copy engine (TMA), but gathered rows of `x` by `cp.async`. Why?",
        right="The engine copies a box of a matrix, and the rows of a tile belong to tokens that are not neighbours.",
        wrong={
            "The engine cannot permute what it writes.": "It does: the swizzle is its own.",
            "The engine handles only weights of one expert.": "It copies any box, and clips it at the tensor's bounds.",
            "`cp.async` is faster for large boxes.": "It needs an instruction for every 16 bytes, a box needs one.",
        },
        why="A box for each row was tried, too: it is in the notebook's list of trials.",
    ),
    Choice(
        name="what-the-ring-gains",
        notebook=HOPPER,
        heading="Warps that load, warps that multiply",
        ask="With one stage in shared memory instead of several, what do the tensor cores of `7_persistent` do?",
        right="They wait in every step, because the next copy may begin only after the product has read the stage.",
        wrong={
            "The same, since `wgmma` is asynchronous.": "Its operands must have arrived, and one stage holds one step.",
            "They compute wrong sums.": "Barriers order copies and products for any number of stages.",
            "They do more work, since tiles are smaller.": "Stages change how many steps are in flight, not the tile.",
        },
        why="With more stages the producers load ahead while the consumers multiply.",
    ),
)
