"""Questions of notebooks 07 to 12: other systems, training, several GPUs, the whole step, and right layers."""

import numpy as np

from moeblaze_ref.backends.numpy_ref import gating
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.core.units import GB
from moeblaze_ref.course.teaching.question import Choice, Number, Question
from moeblaze_ref.memory.rows import megablocks_rows
from moeblaze_ref.placement import trace
from moeblaze_ref.plan import recipes
from moeblaze_ref.plan.parts import Weight

BLOCKS, TRAINING, PLACEMENT, PARALLEL, WHOLE, CHECKS = (
    "07_megablocks",
    "08_train_a_moe_lm",
    "09_expert_placement",
    "10_expert_parallel",
    "11_whole_wall",
    "12_is_your_layer_right",
)


def _padding():
    return sum(megablocks_rows((130, 1, 0, 256), 128).padding)


def _collapsed():
    probs = np.zeros((64, 8))
    probs[:, 0] = 1.0
    return float(gating.load_balancing_loss(probs, np.zeros((64, 1), np.int32)))


def _pairs():
    choices = np.array([[[0, 1], [2, 3]]], np.int16)  # one token, two layers, two experts in each
    return int(np.asarray(trace.profile(RoutingTrace(choices, 4)).R).sum())


def _ranks():
    from moeblaze_ref.course.notebook.parallel import copies_by_chance  # which takes torch along

    return copies_by_chance(E=8, k=2, num_ranks=2)


def _with_zero():
    recipe, weight = recipes.RECIPES["bf16-master"], Weight("w1", (8 * 10**9,))
    optimizer = recipes.master_bytes(recipe, weight.count // 4) + recipes.state_bytes(recipe, weight, weight.count // 4)
    return (2 * recipes.weight_bytes(recipe, weight.count) + optimizer) // GB


def _in_bounds():
    import torch

    from moeblaze_ref.verify.layers.deviations import Deviation, bound_for

    return Deviation("out", None, 0.012, bound_for(0.004, 10_000, torch.bfloat16)).units


QUESTIONS: tuple[Question, ...] = (
    Number(
        name="rows-of-padding",
        notebook=BLOCKS,
        heading="The question",
        paper="MegaBlocks, section 5.2",
        ask="Four experts get 130, 1, 0 and 256 rows. How many rows of padding do whole blocks of 128 rows store?",
        unit="rows",
        compute=_padding,
        computed_by="moeblaze_ref.memory.rows.megablocks_rows",
        why="The experts store 256, 128, 0 and 256 rows: 126 and 127 of these are padding.",
        slips={
            381: "That gives the expert without rows a block; it stores none.",
            125: "That rounds up the sum of all rows; each expert is padded by itself.",
        },
    ),
    Choice(
        name="where-it-is-sparse",
        notebook=BLOCKS,
        heading="The topology",
        paper="MegaBlocks, section 5.1",
        ask="The hidden activations of MegaBlocks are a block-sparse matrix. Which zeros are not stored?",
        right="Those of a row in the columns of experts that are not its own.",
        wrong={
            "The zeros that relu makes.": "Inside a block every value is stored, zero or not.",
            "The rows of padding.": "They are stored and multiplied like all others.",
            "Weights that were pruned.": "The weights are dense; the routing alone makes the sparsity.",
        },
        why="The matrix is block-diagonal: sparse between experts, dense inside each.",
    ),
    Choice(
        name="how-to-transpose",
        notebook=BLOCKS,
        heading="Transpose indices",
        paper="MegaBlocks, section 5.1.4",
        ask="The gradient of `w3` needs the block-sparse activations column by column. What does MegaBlocks move for "
        "it?",
        right="No value: an index array says in which order to visit the blocks.",
        wrong={
            "All values, into a transposed copy.": "A copy would read and write every value once.",
            "The row offsets, which it sorts.": "Offsets of columns come from the lengths; nothing is sorted.",
            "Only the blocks off the diagonal.": "Blocks off the diagonal of experts are not stored at all.",
        },
        why="Each block is transposed when it is loaded; the indices cost 4 bytes a block.",
    ),
    Choice(
        name="what-indices-remove",
        notebook=BLOCKS,
        heading="What MoEBlaze removes, and what that costs",
        paper="MoEBlaze, section 3.1; MegaBlocks, section 5.2",
        ask="Which of these does MoEBlaze not remove, in comparison with MegaBlocks?",
        right="The FLOPs on rows that fill up the last tile of each expert.",
        wrong={
            "The routed copy of the inputs.": "The products read rows of `x` through an index.",
            "The padded rows in global memory.": "Tensors have `R` rows, and padding exists only inside a tile.",
            "The host's wait for the number of stored rows.": "`R` is known before routing, so no wait is needed.",
        },
        why="A tile of the products has as many rows as a block, and is as seldom full.",
    ),
    Choice(
        name="train-alike",
        notebook=TRAINING,
        heading="The question",
        ask="Two layers train the same model with free routing, and their losses differ after some steps. When does "
        "that show a defect?",
        right="If they differ beyond rounding before the first token changes its expert.",
        wrong={
            "Always: the same function gives the same loss.": "Sums in another order round differently, in torch too.",
            "Never: training is random.": "With the choices replayed, the losses must agree within a bound.",
            "If a token's experts differ at any step.": "Some token is always near a tie, and rounding decides ties.",
        },
        why="One changed choice changes all later steps. Until then only rounding may separate the two. The paper "
        "shows no loss curve.",
    ),
    Number(
        name="collapse",
        notebook=TRAINING,
        heading="What is minimised",
        paper="Switch Transformer, section 2.2",
        ask="A router sends every token to one of 8 experts, with probability 1. What is the balancing loss, `E * "
        "sum of f_e * P_e`?",
        unit="(the loss)",
        compute=_collapsed,
        computed_by="moeblaze_ref.backends.numpy_ref.gating.load_balancing_loss",
        why="One term is left, with `f_e = P_e = 1`, and the factor is `E`.",
        slips={
            1: "That is the value of an even router; it also comes out if the factor `E` is left out.",
            64: "That has the factor `E` twice: `f_e` and `P_e` are parts of one, not counts.",
        },
    ),
    Number(
        name="pairs-of-a-token",
        notebook=PLACEMENT,
        heading="What a router does",
        paper="MoETuner, profiling",
        ask="A token has `k = 2` experts in each of two layers. How often does it count in the affinity `R` between "
        "them?",
        unit="times",
        compute=_pairs,
        computed_by="moeblaze_ref.placement.trace.profile",
        why="It counts once for each pair of an expert before and an expert after: `k * k`.",
        slips={
            2: "That is how often it counts in the load of one layer.",
            1: "`R` counts pairs of experts, not tokens.",
        },
    ),
    Choice(
        name="sum-in-the-maximum",
        notebook=PLACEMENT,
        heading="Second program: fast links",
        paper="MoETuner, equation 8",
        ask="As printed, the sums over clusters and GPUs stand inside the maximum of the second program. What does "
        "the printed form minimise?",
        right="The sum over all pairs of GPUs, because no index is left for the maximum.",
        wrong={
            "The slowest pair of GPUs.": "That is what the paper means: the maximum must be outside of the sums.",
            "The number of tokens that stay on their GPU.": "Tokens that stay cost nothing in either form.",
            "The load of the fullest GPU.": "Loads are the first program's concern.",
        },
        why="All pairs send at the same time, so a transition takes as long as its slowest pair.",
    ),
    Number(
        name="ranks-of-a-token",
        notebook=PARALLEL,
        heading="How often does a row travel?",
        ask="A token chooses 2 of 8 experts at random, and each of two ranks has four of them. How many ranks does "
        "its row go to on average, its own rank counted?",
        unit="ranks",
        compute=_ranks,
        computed_by="moeblaze_ref.course.notebook.parallel.copies_by_chance",
        why="A rank has none of the two experts with probability `6 / 28`, so a token visits `2 * (1 - 6 / 28)` ranks.",
        slips={
            1.5: "That draws the two experts independently, so that both may be the same one.",
            2: "That sends a copy for each expert, also where one copy serves both.",
        },
    ),
    Choice(
        name="once-to-a-rank",
        notebook=PARALLEL,
        heading="A dispatch whose experts are ranks",
        ask="Several of a token's experts are on one other rank. What must come back from that rank in the forward?",
        right="One row: the sum of their outputs, weighted there by the gates that came along.",
        wrong={
            "One row for each expert.": "The gates travel with the row, so the sum can be made on arrival.",
            "Nothing: the output stays where the experts are.": "The token's own rank continues with its output.",
            "The experts' weights.": "Weights stay; only rows, ids and gates travel.",
        },
        why="Ids and gates cost a few bytes for each choice, a row costs `d` elements.",
    ),
    Number(
        name="one-of-four",
        notebook=WHOLE,
        heading="What one of several GPUs holds",
        ask="A model of 8e9 parameters trains in mixed precision with AdamW on 4 data-parallel GPUs with ZeRO 1. How "
        "many GB (1e9) of weights, gradients and optimizer does one GPU hold?",
        unit="GB",
        compute=_with_zero,
        computed_by="moeblaze_ref.plan.recipes.state_bytes",
        why="Weights and gradients take 4 bytes a parameter, and a quarter of the optimizer's 12 bytes is 3.",
        slips={
            128: "That is a GPU without ZeRO.",
            32: "That divides weights and gradients, too, as ZeRO 3 does.",
        },
    ),
    Choice(
        name="square-of-the-sequence",
        notebook=WHOLE,
        heading="Long sequences and large vocabularies",
        ask="Attention runs without a flash kernel. Which kept tensor grows with the square of the sequence?",
        right="The probabilities, one for each head and pair of tokens.",
        wrong={
            "The logits, one for each token and word of the vocabulary.": "They grow with the tokens alone.",
            "The keys and values.": "They have one row for each token.",
            "The log-sum-exp, one for each row and head.": "That is what a flash kernel keeps in their place.",
        },
        why="A flash kernel computes the probabilities again in its backward, block by block.",
    ),
    Number(
        name="times-its-bound",
        notebook=CHECKS,
        heading="Where the bound comes from",
        ask="Plain torch computes an output of 10,000 bfloat16 numbers in two ways, with relative errors of 0.003 and "
        "0.004. The error of a layer is 0.012. How many times its bound is that?",
        unit="times the bound",
        compute=_in_bounds,
        computed_by="moeblaze_ref.verify.layers.deviations.bound_for",
        why="The bound is twice the larger error, `0.008`.",
        slips={
            3: "That divides by the error of plain torch, without the factor of two.",
            2: "That takes the smaller of the two errors.",
        },
    ),
    Choice(
        name="hidden-by-full-tiles",
        notebook=CHECKS,
        heading="Build a better test",
        ask="A test compares the output and all gradients of one step, and finds every error beyond rounding. In its "
        "routing every expert has 64 rows. Which layer passes?",
        right="One that leaves an old gradient in place for experts without tokens.",
        wrong={
            "One that exchanges gate and up.": "Its output differs for every token.",
            "One that multiplies an expert's input by the gate.": "The activation is not linear, so outputs differ.",
            "One that lets no gradient reach the router's gates.": "The test compares the gradients of the gates.",
        },
        why="The bug has an effect only if some expert has no token, and here each has some.",
    ),
)
