"""Exercises of notebook 01: the router, and what a fixed capacity makes of its choice."""

from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import cuda_kernel
from moeblaze_ref.memory.accounting import dropped_and_padded
from moeblaze_ref.systems.capacity import expert_capacity

GATING = cuda_kernel("gating/1_naive.cu", "softmax_top_k", "token_of_thread", "Choice", "BEST", "next_best")


def _capacity(counts, factor):
    capacity = expert_capacity(sum(counts), len(counts), factor)
    dropped, padding = dropped_and_padded(counts, capacity)
    return {"capacity": capacity, "dropped": dropped, "padding": padding}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="capacity",
        title="A fixed capacity under skew",
        question="""The router sends `counts[e]` rows to expert `e`. A system with a fixed capacity reserves `C =
            ceil(factor * R / E)` rows for each expert. How large is `C`, how many rows does the system drop because
            their expert is full, and how many reserved rows stay empty?""",
        given={"counts": [70, 30, 8, 0, 12, 40], "factor": 1.25},
        steps=("C = math.ceil(factor * sum(counts) / len(counts))",),
        asked={
            "capacity": Asked("rows of each expert", "C"),
            "dropped": Asked("rows", "sum(max(n - C, 0) for n in counts)"),
            "padding": Asked("rows", "sum(max(C - n, 0) for n in counts)"),
        },
        truth=_capacity,
        computed_by="moeblaze_ref.memory.accounting.dropped_and_padded",
        hint="`R` is `sum(counts)`. An expert with `n` rows drops `max(n - C, 0)` and leaves `max(C - n, 0)` empty.",
        why="""The system drops rows of full experts, while reserved rows of other experts stay empty. One capacity
            cannot fit all experts.""",
    ),
    KernelExercise(
        name="next-best",
        title="The k best without sorting",
        kind="cuda",
        question="""A thread chooses the `k` best experts of its token, best first. It copies and sorts nothing:
            `next_best` walks along the row and finds the best of those experts that come *after* the last choice. Write
            the body of its loop. The kernel compares logits as integers in the same order (`to_ordered`); of equal
            logits the lower id comes first.""",
        task="gating",
        kernel=GATING,
        change=(
            "        const int ordered = to_ordered(logits[e]);\n...\n"
            "        if (after && ordered > best.ordered) best = {e, ordered};\n",
            "        // Your part: expert e is the best so far if it comes after `last`, before `best`.\n",
        ),
        budgets=("read of logits <= 4 L E (k + 2)", "written <= 4 L E + 12 R"),
        division=("accesses <= (k + 3) E + 4 k", "barriers <= 0", "threads >= L"),
        hint="""Expert `e` comes after `last` if its logit is smaller, or equal and its id higher. Among those, keep the
            largest: `best = {e, ordered}`.""",
        why="""The kernel reads the row once for each choice and twice for the softmax. It stores nothing in between, so
            `k` and `E` may be any size.""",
    ),
    KernelExercise(
        name="gates-of-all",
        title="Gates that always sum to one",
        kind="bug",
        question="""A gate is the softmax probability of its expert *among all experts*, so a token's `k` gates sum to
            less than one, unless `k = E`. In this kernel they always sum to one. Find the line and correct it. (With
            `RENORMALIZE = 1` the kernel divides gates by their sum; the checker tests a kernel that names it with both
            values.)""",
        task="gating",
        kernel=GATING,
        change=("RENORMALIZE ? 1.0f / sum_of_chosen : prob_scale", "1.0f / sum_of_chosen"),
        budgets=("read of logits <= 4 L E (k + 2)", "written <= 4 L E + 12 R"),
        division=("accesses <= (k + 3) E + 4 k", "barriers <= 0", "threads >= L"),
        hint="The report names `gates`, not `probs`. Which factor scales the gates, and which the probabilities?",
        why="""Renormalised gates are a choice of the model, not an error; Mixtral has them. But a kernel must not make
            that choice.""",
    ),
)
