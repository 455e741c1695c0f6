"""Exercises of notebook 11: the bytes of a whole training step."""

from moeblaze_ref.core import checks
from moeblaze_ref.core.units import GB
from moeblaze_ref.course.exercises.exercise import Asked, Construction, Exercise, Prediction, TorchExercise
from moeblaze_ref.course.exercises.forms import whole_numbers
from moeblaze_ref.plan import account, configs
from moeblaze_ref.plan.flops import forward_flops, part_flops
from moeblaze_ref.plan.parts import Head, Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.shares import ZERO, Parallel

OLMOE, QWEN = configs.find("olmoe-1b-7b"), configs.find("qwen3-30b-a3b")
STEP = Step(1, 4096)
HEAD_FLOPS = part_flops(QWEN.parts[-1], STEP)
LAYERS_FLOPS = forward_flops(QWEN, STEP) - HEAD_FLOPS


def _states(parameters, gpus):
    """Bytes of weights, gradients and optimizer of OLMoE on one of the GPUs, by stage of ZeRO."""
    stages = {zero: Run(OLMOE, Step(1, 1), parallel=Parallel(data=gpus, zero=zero)).worst for zero in ZERO}
    held = {zero: one.resident.total() + sum(work.gradients for work in one.work) for zero, one in stages.items()}
    return {"zero_0": held[0], "zero_1": held[1], "zero_3": held[3]}


def _logits(batch, sequence, d, vocabulary):
    head, step = Head(d, vocabulary), Step(batch, sequence)
    kept = {tensor.name: tensor.bytes for tensor in head.kept(step)}["log_probabilities"]
    return {"kept": kept, "at_once": kept + sum(tensor.bytes for tensor in head.forward(step)[0].beside)}


def _checkpoint(layers, L, d, layers_flops, head_flops):
    stage = Run(QWEN, Step(1, L), checkpoint="layer").worst
    again = sum(part_flops(part, stage.step) for layer in QWEN.layers for part in layer)
    return {"kept": stage.kept["checkpoints"], "repeated": again / (3 * forward_flops(QWEN, stage.step))}


def _fits(gpus, capacity, division):
    expert, zero = map(int, whole_numbers("division", division, (2,)))
    checks.check_int("zero", zero, at_least=0, at_most=max(ZERO))
    if expert < 1 or gpus % expert:
        raise ValueError(f"expert is {expert}, but it must be a divisor of the {gpus} GPUs")
    stage = Run(QWEN, STEP, parallel=Parallel(data=gpus, expert=expert, zero=zero), checkpoint="layer").worst
    if zero == max(ZERO):
        return "ZeRO 3 gathers all weights in each forward and each backward: find a division without it"
    peak = stage.peak.bytes
    if peak > capacity:
        return (
            f"the peak is {peak / GB:,.1f} GB, in the {stage.peak.phase}, but it must be at most {capacity / GB:,.0f}"
        )
    return ""


LOSS = '''\
import torch


class Loss(torch.autograd.Function):
    """The cross-entropy of each row: -log softmax(x head^T) at the row's label."""

    @staticmethod
    def forward(ctx, x, head, labels):
        logits = x @ head.T  # (L, V)
        log_sum_exp = torch.logsumexp(logits, dim=1)  # (L,)
        ctx.save_for_backward(x, head, labels, log_sum_exp)
        return log_sum_exp - logits.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, d_loss):
        x, head, labels, log_sum_exp = ctx.saved_tensors
        probabilities = torch.exp(x @ head.T - log_sum_exp[:, None])
        probabilities[torch.arange(len(x)), labels] -= 1
        d_logits = d_loss[:, None] * probabilities
        return d_logits @ head, d_logits.T @ x, None
'''
LOSS_CHANGES = (
    (
        """\
        log_sum_exp = torch.logsumexp(logits, dim=1)  # (L,)
        ctx.save_for_backward(x, head, labels, log_sum_exp)
        return log_sum_exp - logits.gather(1, labels[:, None])[:, 0]""",
        """\
        log_probabilities = torch.log_softmax(logits, dim=1)  # (L, V): what is your part?
        ctx.save_for_backward(x, head, labels, log_probabilities)
        return -log_probabilities.gather(1, labels[:, None])[:, 0]""",
    ),
    (
        """\
        x, head, labels, log_sum_exp = ctx.saved_tensors
        probabilities = torch.exp(x @ head.T - log_sum_exp[:, None])""",
        """\
        x, head, labels, log_probabilities = ctx.saved_tensors
        probabilities = torch.exp(log_probabilities)""",
    ),
)

EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="states-of-eight",
        title="The states on one of eight GPUs",
        difficulty=1,
        question="""OLMoE trains in mixed precision: weights and gradients in bfloat16, and AdamW on a float32 copy.
            Eight data-parallel GPUs hold copies of it. How many bytes of weights, gradients and optimizer are on one of
            them without ZeRO, with ZeRO 1, and with ZeRO 3?""",
        given={"parameters": account.parameters(OLMOE), "gpus": 8},
        asked={
            "zero_0": Asked("bytes", "16 * parameters"),
            "zero_1": Asked("bytes", "4 * parameters + 12 * parameters // gpus"),
            "zero_3": Asked("bytes", "16 * parameters // gpus"),
        },
        truth=_states,
        computed_by="moeblaze_ref.plan.run.Run",
        hints=(
            "A parameter costs 2 bytes for its weight and 2 for its gradient. What does AdamW hold, in float32?",
            """AdamW holds a copy and two moments, 12 bytes. ZeRO 1 divides these 12 by the number of GPUs, and ZeRO 3
            divides all 16.""",
        ),
        why="""The first stage of ZeRO divides three quarters of the bytes. The other two divide the last quarter, and
            the third pays for its part with weights that travel.""",
    ),
    Prediction(
        name="logits-at-once",
        title="The logits, kept and at once",
        difficulty=1,
        question="""A loss keeps its log-probabilities in float32, one row of `vocabulary` numbers a token. While the
            forward computes them, the logits are there too, once in bfloat16 and once in float32. How many bytes of
            log-probabilities are kept, and how many bytes are there at once?""",
        given={"batch": 4, "sequence": 4096, "d": 2048, "vocabulary": 151_936},
        steps=("L = batch * sequence",),
        asked={
            "kept": Asked("bytes", "4 * L * vocabulary"),
            "at_once": Asked("bytes", "(4 + 2 + 4) * L * vocabulary"),
        },
        truth=_logits,
        computed_by="moeblaze_ref.plan.parts.Head",
        hints=(
            "Count the tokens first. A float32 number has 4 bytes. Does `d` matter?",
            "Three tensors of `L * vocabulary` numbers are there at once: 4, 2 and 4 bytes a number.",
        ),
        why="""One tensor of the loss may be larger than all layers keep under a checkpoint. Its bytes do not depend on
            the experts, so no save policy changes them.""",
    ),
    Prediction(
        name="once-more",
        title="One more forward",
        difficulty=2,
        question="""Each layer of Qwen3-30B-A3B is under a checkpoint. It keeps its input `(L, d)` in bfloat16, and its
            backward begins with its forward once more. The head is under none. A backward has twice the FLOPs of its
            forward; `layers_flops` and `head_flops` are those of one forward. How many bytes of inputs do the layers
            keep? By which share does a step's work grow?""",
        given={
            "layers": len(QWEN.layers),
            "L": STEP.sequence,
            "d": QWEN.d,
            "layers_flops": LAYERS_FLOPS,
            "head_flops": HEAD_FLOPS,
        },
        asked={
            "kept": Asked("bytes", "layers * L * d * 2"),
            "repeated": Asked("of a step", "layers_flops / (3 * (layers_flops + head_flops))"),
        },
        truth=_checkpoint,
        computed_by="moeblaze_ref.plan.run.Run",
        hints=(
            "A step is one forward and a backward of twice its FLOPs: three forwards of everything.",
            "The layers' forward is repeated once, so divide `layers_flops` by three forwards of layers and head.",
        ),
        why="""The share is below a third, because the head is not repeated. The bytes fall to a small part, since one
            input stands for all tensors of a layer.""",
    ),
    Construction(
        name="fit-it",
        title="Make it fit",
        difficulty=2,
        question="""Qwen3-30B-A3B trains on `gpus` data-parallel GPUs with one sequence of 4,096 tokens each, in mixed
            precision, with each layer under a checkpoint. Find `[expert, zero]`: how many of the GPUs divide the
            experts, and the stage of ZeRO. The peak of a GPU must be at most `capacity` bytes, and ZeRO 3 is not
            allowed.""",
        given={"gpus": 8, "capacity": 80 * GB},
        asked={"division": Asked("[expert, zero]", "[4, 2]")},
        check=_fits,
        checked_by="moeblaze_ref.plan.run.Run",
        hints=(
            "Most parameters are in experts. What does each of the two numbers divide, and what is left undivided?",
            """With `expert = 8` each expert is there once. The rest of the model has eight copies, and ZeRO 1 divides
            what the optimizer holds of them.""",
        ),
        why="""Expert parallelism divides the experts and ZeRO the copies, so together they divide nearly everything.
            Neither alone is enough here without ZeRO 3.""",
    ),
    TorchExercise(
        name="loss-without-logits",
        title="A loss that does not keep its logits",
        difficulty=3,
        question="""The loss below is right, and saves the log-probabilities `(L, V)`. Let it save a number a row
            instead, besides `x`, the head's weight and the labels, and compute the probabilities again in the backward.
            Forward and backward run in two processes, and the bytes between them are counted. The backward is by hand:
            autograd cannot do it for you.""",
        project="function.LOSS",
        changes=LOSS_CHANGES,
        solution=LOSS,
        hints=(
            "The log-probability at a label is its logit less one number a row. Which number is it?",
            "Save `torch.logsumexp(logits, dim=1)`. The backward multiplies `x @ head.T` once more.",
            "The probabilities are `exp(logits - log_sum_exp)`. The gradient of the logits has 1 less at the label.",
        ),
        why="""The backward repeats one product, and `L` numbers stand for `L V`. Flash attention does the same with the
            log-sum-exp of its rows. Here the logits still exist once in each pass; a kernel that handles some columns
            at a time would never hold them all.""",
    ),
)
