"""Questions of notebooks 01 and 02: the router's choice, and the dispatch."""

import numpy as np

from moeblaze_ref.backends.numpy_ref import dispatch
from moeblaze_ref.course.teaching.question import Choice, Number, Question
from moeblaze_ref.memory.accounting import dropped_and_padded
from moeblaze_ref.systems.capacity import capacity_for, expert_capacity
from moeblaze_ref.verify.cases import GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS

ROUTING, DISPATCH = "01_routing", "02_dispatch_without_sorting"
COUNTS = (40, 10, 10, 4)
SKEW = "Skew against a fixed capacity"


def _padding_percent():
    capacity = capacity_for(COUNTS, "max")
    return 100 * dropped_and_padded(COUNTS, capacity)[1] / (capacity * len(COUNTS))


def _index_bytes():
    found = dispatch.build(np.tile(np.array([0, 1], np.int32), (1000, 1)), 8)
    return sum(array.nbytes for array in found.arrays().values())


def _position():
    return int(dispatch.build(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS).token_index_map[4 * 2 + 1])


QUESTIONS: tuple[Question, ...] = (
    Choice(
        name="tie",
        notebook=ROUTING,
        heading="Ties",
        ask="Experts 3 and 5 have exactly the same logit, and only one place is left among a token's `k` choices. "
        "Which expert does this project choose?",
        right="Expert 3: the lower id wins.",
        wrong={
            "Expert 5: the higher id wins.": "The rule is the lower id, in every backend and in the oracle.",
            "Whichever `torch.topk` returns.": "`torch.topk` promises no order among equals.",
            "Both, with half of the gate each.": "A token has exactly `k` experts, and `k` gates.",
        },
        why="A rule for ties makes all backends equal in every bit; another choice is no rounding error.",
    ),
    Choice(
        name="one-renormalised-gate",
        notebook=ROUTING,
        heading="Gates, and dividing them by their sum",
        ask="A router has `k = 1` and divides its gates by their sum. What does it learn from the task's loss?",
        right="Nothing: the gate is 1 whatever the logits are.",
        wrong={
            "It learns as fast as without the division.": "Without it the gate is `p`, which moves; here it is 1.",
            "It learns the choice, but not the gate.": "The choice is an integer and has no gradient.",
            "It learns half as fast.": "The gradient is zero in every element, not half of another one.",
        },
        why="`p / p` is constant, so its gradient is zero. Only the router's own losses reach such a router.",
    ),
    Choice(
        name="which-factor-learns",
        notebook=ROUTING,
        heading="The load-balancing loss",
        paper="Switch Transformer, section 2.2",
        ask="The balancing loss is `E * sum of f_e * P_e`. Through which factor does its gradient flow?",
        right="Through `P_e`, the mean probability of the expert.",
        wrong={
            "Through `f_e`, the share of the rows.": "`f_e` counts rows, and a count does not move with the logits.",
            "Through both.": "`f_e` is a count and has no gradient.",
            "Through neither: it only measures.": "`P_e` is a mean of softmax probabilities, which have gradients.",
        },
        why="An expert with many rows has a large `f_e`, so its probability costs more, and descent lowers its logits.",
    ),
    Number(
        name="places",
        notebook=ROUTING,
        heading=SKEW,
        paper="MegaBlocks, section 2.2",
        ask="A step has `R = 1000` routed rows and 16 experts. How many places does a capacity factor of 1.25 "
        "reserve for each expert?",
        unit="rows",
        compute=lambda: expert_capacity(1000, 16, 1.25),
        computed_by="moeblaze_ref.systems.capacity.expert_capacity",
        why="`ceil(1.25 * 1000 / 16)` is the ceiling of 78.125.",
        slips={
            78: "The capacity is rounded up, so that the factor is reached.",
            63: "That leaves out the factor: it is the balanced share, rounded up.",
        },
    ),
    Number(
        name="padding-without-drops",
        notebook=ROUTING,
        heading=SKEW,
        ask="Four experts get 40, 10, 10 and 4 rows. The fixed capacity is the smallest that drops no row. How many "
        "percent of the reserved places are padding?",
        unit="percent",
        compute=_padding_percent,
        computed_by="moeblaze_ref.memory.accounting.dropped_and_padded",
        why="The busiest expert decides: 4 times 40 places hold 64 rows, so 96 of 160 stay empty.",
        slips={
            150: "That compares the padding with the rows, not with the places.",
            40: "That is the part that is filled.",
        },
    ),
    Number(
        name="bytes-of-indices",
        notebook=DISPATCH,
        heading="The four structures",
        paper="MoEBlaze, section 4.1",
        ask="A step has 1,000 tokens, `k = 2` and `E = 8`. How many bytes do the four index structures take "
        "together, in int32?",
        unit="bytes",
        compute=_index_bytes,
        computed_by="moeblaze_ref.backends.numpy_ref.dispatch.build",
        why="Three arrays have `R = 2000` entries, and the offsets have `E + 1`.",
        slips={
            24_032: "That gives the offsets `E` entries; the last one says where the last group ends.",
            12_036: "That counts rows by tokens, without the factor `k`.",
        },
    ),
    Number(
        name="position-of-a-slot",
        notebook=DISPATCH,
        heading="The four structures",
        paper="MoEBlaze, section 4.1, figure 2",
        ask="Tokens 0 to 4 choose the experts {2, 3}, {0, 1}, {0, 3}, {1, 2} and {0, 3}. At which place of the "
        "expert order, counted from 0, is token 4's row for expert 3?",
        unit="(a place)",
        compute=_position,
        computed_by="moeblaze_ref.backends.numpy_ref.dispatch.build",
        why="Expert 3 begins at place 7, and tokens 0 and 2 come before token 4.",
        slips={
            2: "That is the rank inside the group of expert 3; its offset is missing.",
            10: "That counts places from 1.",
        },
    ),
    Choice(
        name="without-atomics",
        notebook=DISPATCH,
        heading="Step 3, positions, and the one write",
        paper="MoEBlaze, section 4.2",
        ask="Why does no step of the dispatch need an atomic operation?",
        right="Every element has one writer, which computes the address before it writes.",
        wrong={
            "Atomic operations are slower than a sort.": "Their speed does not matter: nothing here has two writers.",
            "All writes go to shared memory first.": "Two writers of one element would collide in shared memory, too.",
            "A token has only `k` experts.": "With an atomic counter for each expert, `k` would be as small.",
        },
        why="A place is the expert's offset plus the number of earlier tokens. So the bits are the same in every run.",
    ),
    Choice(
        name="token-zero",
        notebook=DISPATCH,
        heading="The four structures",
        paper="MoEBlaze, section 4.2",
        ask="The paper's step 1 writes the token's id into a map that begins with zeros, and step 2 counts the "
        "non-zero entries. What goes wrong, taken literally?",
        right="Token 0 is not counted, because its id is zero.",
        wrong={
            "Expert 0 gets no rows.": "The ids in the map are those of tokens; expert 0 is a column like any other.",
            "The last token is counted twice.": "Each choice has one entry of the map, so none counts twice.",
            "Empty experts get a length of one.": "A column without marks has only zeros, and the count is zero.",
        },
        why="The groups of token 0's experts become one row too short. Here an empty entry is -1.",
    ),
    Choice(
        name="down-a-column",
        notebook=DISPATCH,
        heading="How many sectors the memory moves",
        ask="A warp reads 32 entries of one column of the int32 map, with `E = 16`. How many sectors of 32 bytes "
        "does it touch?",
        right="32: neighbouring entries of a column are 64 bytes apart in memory.",
        wrong={
            "4: the warp asks for 128 bytes.": "That holds for neighbouring words; these lie in different sectors.",
            "16: two entries share a sector.": "Entries 64 bytes apart never lie in one sector of 32 bytes.",
            "1: a warp has one access.": "One access costs as many sectors as its addresses touch.",
        },
        why="From `E = 8` on, each entry of a column costs a sector of its own, eight times its bytes.",
    ),
)
