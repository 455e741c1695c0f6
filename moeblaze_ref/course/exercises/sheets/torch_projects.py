"""A sheet of its own: six projects in torch."""

from moeblaze_ref.course.exercises.exercise import Exercise, TorchExercise

EXPERT = '''\
import torch


class Expert(torch.autograd.Function):
    """One expert: out = y_swi w3, where y_swi = silu(a) * b, a = x w1 and b = x w2."""

    @staticmethod
    def forward(ctx, x, w1, w2, w3):
        a, b = x @ w1, x @ w2  # (rows, h) each
        y_swi = a * torch.sigmoid(a) * b
        ctx.save_for_backward(x, w1, w2, w3, a, b)
        return y_swi @ w3  # (rows, d)

    @staticmethod
    def backward(ctx, d_out):
        x, w1, w2, w3, a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        act_a, slope = a * s, s * (1 + a * (1 - s))
        d_y = d_out @ w3.T  # (rows, h)
        d_a, d_b = d_y * b * slope, d_y * act_a
        d_x = d_a @ w1.T + d_b @ w2.T
        return d_x, x.T @ d_a, x.T @ d_b, (act_a * b).T @ d_out
'''
EXPERT_CHANGES = (
    (
        """\
        s = torch.sigmoid(a)
...
        return d_x, x.T @ d_a, x.T @ d_b, (act_a * b).T @ d_out""",
        """\
        # Your part: the gradients of x, w1, w2 and w3, in the order of the forward's arguments.
        return torch.zeros_like(x), torch.zeros_like(w1), torch.zeros_like(w2), torch.zeros_like(w3)""",
    ),
)

CHECKPOINT = '''\
import torch
import torch.nn.functional as F


def grouped(rows, expert_token_offsets, weights):
    """Each expert's rows times its matrix."""
    ends = expert_token_offsets.tolist()
    return torch.cat([rows[begin:end] @ w for begin, end, w in zip(ends, ends[1:], weights)])


def grouped_gradient(rows, expert_token_offsets, d_result):
    """The gradient of the weights: each expert's rows, transposed, times the result's gradient."""
    ends = expert_token_offsets.tolist()
    pairs = zip(ends, ends[1:])
    return torch.stack([rows[begin:end].T @ d_result[begin:end] for begin, end in pairs])


class Experts(torch.autograd.Function):
    """The experts of a layer: each token's sum of its rows, times their gates. It saves what Algorithm 1 saves."""

    @staticmethod
    def forward(
        ctx, x, gates, w1, w2, w3,
        expert_token_indices, expert_token_offsets, token_expert_indices, token_index_map,
    ):  # fmt: skip
        token, offsets = expert_token_indices.long(), expert_token_offsets
        gate = torch.empty(len(token)).index_copy(0, token_index_map.long(), gates.flatten())
        routed_x = x[token]  # (R, d)
        a, b = grouped(routed_x, offsets, w1), grouped(routed_x, offsets, w2)  # (R, h)
        act_a = F.silu(a)
        y_swi = act_a * b
        y = grouped(y_swi, offsets, w3)  # (R, d)
        ctx.save_for_backward(
            x, gates, w1, w2, w3, expert_token_indices, offsets, token_index_map, a, b, y_swi
        )
        return torch.zeros_like(x).index_add(0, token, gate[:, None] * y)

    @staticmethod
    def backward(ctx, d_out):
        x, gates, w1, w2, w3, expert_token_indices, offsets, token_index_map, *hidden = ctx.saved_tensors
        a, b, y_swi = hidden
        token, act_a = expert_token_indices.long(), F.silu(a)
        gate = torch.empty(len(token)).index_copy(0, token_index_map.long(), gates.flatten())
        routed_x, d_rows = x[token], d_out[token]  # (R, d)
        d_hidden = grouped(d_rows, offsets, w3.transpose(1, 2))  # (R, h)
        d_gate = (d_hidden * y_swi).sum(dim=1)  # (R,)
        d_gates = d_gate[token_index_map.long()].view_as(gates)
        d_y, d_y_swi = gate[:, None] * d_rows, gate[:, None] * d_hidden
        s = torch.sigmoid(a)
        d_a, d_b = d_y_swi * b * s * (1 + a * (1 - s)), d_y_swi * act_a
        d_routed = grouped(d_a, offsets, w1.transpose(1, 2))  # (R, d)
        d_routed += grouped(d_b, offsets, w2.transpose(1, 2))
        d_x = torch.zeros_like(d_out).index_add(0, token, d_routed)
        d_w1 = grouped_gradient(routed_x, offsets, d_a)
        d_w2 = grouped_gradient(routed_x, offsets, d_b)
        d_w3 = grouped_gradient(y_swi, offsets, d_y)
        return d_x, d_gates, d_w1, d_w2, d_w3, None, None, None, None
'''
CHECKPOINT_CHANGES = (
    ("It saves what Algorithm 1 saves.", "It saves all that it computes."),
    (
        """\
            x, gates, w1, w2, w3, expert_token_indices, offsets, token_index_map, a, b, y_swi""",
        """\
            gates, w1, w2, w3, token, offsets, token_index_map, gate, routed_x, a, b, act_a, y_swi, y""",
    ),
    (
        """\
        x, gates, w1, w2, w3, expert_token_indices, offsets, token_index_map, *hidden = ctx.saved_tensors
...
        d_gate = (d_hidden * y_swi).sum(dim=1)  # (R,)""",
        """\
        gates, w1, w2, w3, token, offsets, token_index_map, *computed = ctx.saved_tensors
        gate, routed_x, a, b, act_a, y_swi, y = computed
        d_rows = d_out[token]  # (R, d)
        d_hidden = grouped(d_rows, offsets, w3.transpose(1, 2))  # (R, h)
        d_gate = (d_rows * y).sum(dim=1)  # (R,)""",
    ),
)

COUNTER = '''\
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(layer, x):
    """The bytes that autograd keeps of layer(x) until the backward."""
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    kept = {}  # the storages themselves: a freed one's address could be given to the next

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in kept.values())
'''
COUNTER_CHANGES = (
    (
        """\
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
...
        return tensor.detach()""",
        """\
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.itemsize  # your part: what is counted twice, or should not be?
        return tensor""",
    ),
    ("return sum(storage.nbytes() for storage in kept.values())", "return total"),
)

GRAPH = '''\
import torch
import torch.nn.functional as F


def layer(x, wg, w1, w2, w3, k):
    """A Mixture-of-Experts layer, every expert for every token: (L, d)."""
    probs = torch.softmax(x @ wg, dim=-1)  # (L, E)
    gates, chosen = probs.topk(k)  # (L, k)
    weight = torch.zeros_like(probs).scatter(1, chosen, gates)  # (L, E), 0 where a token does not go
    y = (F.silu(x @ w1) * (x @ w2)) @ w3  # (E, L, d)
    return (weight.T[:, :, None] * y).sum(dim=0)
'''
GRAPH_CHANGES = (
    ("every expert for every token", "one expert after another"),
    (
        """\
    weight = torch.zeros_like(probs).scatter(1, chosen, gates)  # (L, E), 0 where a token does not go
...
    return (weight.T[:, :, None] * y).sum(dim=0)""",
        """\
    out = torch.zeros_like(x)
    for expert in range(wg.shape[1]):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        rows = x[token]
        y = (F.silu(rows @ w1[expert]) * (rows @ w2[expert])) @ w3[expert]
        out[token] += gates[token, slot, None] * y
    return out""",
    ),
)

ACTIVATION = '''\
import torch


class SquaredReGLU(torch.autograd.Function):
    """y = relu(a)**2 * b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.relu(a).square() * b

    @staticmethod
    def backward(ctx, d_y):
        a, b = ctx.saved_tensors
        positive = torch.relu(a)
        return d_y * b * 2 * positive, d_y * positive.square()
'''
ACTIVATION_CHANGES = (
    (
        """\
        ctx.save_for_backward(a, b)
        return torch.relu(a).square() * b""",
        """\
        act_a = torch.relu(a).square()
        y = act_a * b
        ctx.save_for_backward(a, b, act_a, y)
        return y""",
    ),
    (
        """\
        a, b = ctx.saved_tensors
        positive = torch.relu(a)
        return d_y * b * 2 * positive, d_y * positive.square()""",
        """\
        a, b, act_a, y = ctx.saved_tensors
        # Your part: the gradients of a and b, from fewer saved bytes.
        return torch.zeros_like(a), torch.zeros_like(b)""",
    ),
)

ROUTER = '''\
import torch


def update(bias, topk_experts):
    """The bias (E,) after a step in which the tokens chose topk_experts (L, k)."""
    counts = torch.bincount(topk_experts.flatten(), minlength=len(bias)).float()
    return bias - 0.03 * (counts / counts.mean() - 1).clamp(-1, 1)
'''
ROUTER_CHANGES = (
    (
        """\
    counts = torch.bincount(topk_experts.flatten(), minlength=len(bias)).float()
    return bias - 0.03 * (counts / counts.mean() - 1).clamp(-1, 1)""",
        """\
    return bias  # your part""",
    ),
)

EXERCISES: tuple[Exercise, ...] = (
    TorchExercise(
        name="expert-by-hand",
        title="The expert as one node of the graph",
        difficulty=2,
        question="""Autograd keeps five tensors of this expert between its products. A node of your own keeps what you
            save. Write the backward of the `autograd.Function` by hand. It may save `x`, `a` and `b`: `rows (d + 2 h)`
            elements, besides the weights.

            The forward and the backward run in two processes. Only what `ctx.save_for_backward` was given goes from one
            to the other, and its bytes are counted on the way. The backward runs in inference mode, so autograd cannot
            do it for you.""",
        project="function.SWIGLU",
        changes=EXPERT_CHANGES,
        solution=EXPERT,
        hints=(
            "Go backwards through the forward's lines: `d_y = d_out w3^T`, then `d_a` and `d_b`, then `d_x`.",
            "`silu(a) = a s` with `s = sigmoid(a)`, so its slope is `s + a s (1 - s)`.",
            "`d_w1 = x^T d_a`, `d_w2 = x^T d_b`, `d_w3 = y_swi^T d_out`; compute `y_swi` again from `a` and `b`.",
        ),
        why="""The backward computes `silu(a)` and `y_swi` again: a few operations for each element, in place of two
            tensors of `rows h` elements that autograd keeps.""",
    ),
    TorchExercise(
        name="smart-checkpoint",
        title="Save what Algorithm 1 saves",
        difficulty=2,
        question="""The function below is the experts' part of a layer. It is right, and saves every tensor that it
            computes. Let it save what MoEBlaze's Algorithm 1 saves, and compute the rest again in the backward. That is
            `x`, the gates, the four index structures, `a`, `b` and `y_swi`, besides the weights: what
            `account(layer, "moeblaze", "paper")` counts. The backward needs only three of the four structures. Forward
            and backward run in two processes, and the bytes between them are counted. Here the backward may use
            autograd.""",
        project="function.CHECKPOINT",
        changes=CHECKPOINT_CHANGES,
        solution=CHECKPOINT,
        hints=(
            "Three saved tensors are large and not among those: `routed_x`, `act_a` and `y`. What makes each again?",
            "`token` is int64; the structure that it is made of has half its bytes. `gate` is made of `gates`.",
            "The gate's gradient does not need `y`: `<d_out, y> = <d_out w3^T, y_swi>`.",
        ),
        why="""The routed rows are gathered again, and `silu(a)` is computed again. `y` is not needed at all: the
            product `d_out w3^T` serves the gates' gradient and that of `y_swi`.""",
    ),
    TorchExercise(
        name="saved-bytes",
        title="Count what autograd keeps",
        difficulty=2,
        question="""`saved_tensors_hooks` calls `pack` for every tensor that autograd saves. The function below adds up
            their bytes, and counts too much. Make it count what lives until the backward: every storage once, and no
            weights. A storage's address, `data_ptr()`, says which storage it is. The function must find the bytes of
            the account for five layers of plain torch, with gated and ungated activations, in float32 and bfloat16.""",
        project="counter.SAVED_BYTES",
        changes=COUNTER_CHANGES,
        solution=COUNTER,
        hints=(
            "Two operators may save the same tensor. And a view has its own size, but keeps the whole storage alive.",
            "`tensor.untyped_storage()` has `data_ptr()` and `nbytes()`. `layer.parameters()` live anyway.",
            "Keep the storages themselves in a dict by address: autograd may free one, and its address is used again.",
        ),
        why="""This is how the project measures its own accounts, in `moeblaze_ref.memory.measure`. A sum over tensors
            would count `a` twice: the activation saves it, and so does the product with `b`.""",
    ),
    TorchExercise(
        name="graph-safe",
        title="A layer for a CUDA graph",
        difficulty=2,
        question="""A CUDA graph replays the same kernels on the same shapes, and never asks the host. The layer below
            does not fit: `nonzero` has as many rows as the data say, and the host waits for that number. Write it with
            fixed shapes and no wait. It may compute more than it needs.

            The project traces the layer on tensors that have a shape and no elements. It then replays the trace for
            four routings, in a process without your code.""",
        project="graph.LAYER",
        changes=GRAPH_CHANGES,
        solution=GRAPH,
        hints=(
            "Shapes may depend on L, d, h, E and k. How many rows can an expert get at most?",
            "Every expert for every token is `(E, L, d)`. What must a token's row of an expert be multiplied by?",
            "Make a matrix `(L, E)` that holds the gate where a token goes and 0 elsewhere: `zeros.scatter(1, ...)`.",
        ),
        why="""Every expert computes every token, `E / k` times the work. The project's kernels keep the work and are
            safe too: a block reads from `expert_token_offsets` on the device which rows it has.""",
    ),
    TorchExercise(
        name="new-activation",
        title="An activation that the layer lacks",
        difficulty=1,
        question="""The project has the squared ReLU, `relu(a)**2`, without a gate. Add the gated one:
            `y = relu(a)**2 * b`. Write its derivative by hand, and save `a` and `b` only. The project calls the
            function between the products of an expert. It compares the output and all gradients, those of `x`, `w1`,
            `w2` and `w3`, with autograd's.""",
        project="function.SQUARED_REGLU",
        changes=ACTIVATION_CHANGES,
        solution=ACTIVATION,
        hints=(
            "The product rule: `d_a` is `d_y * b` times the slope of the activation at `a`.",
            "The slope of `relu(a)**2` is `2 relu(a)`: no case distinction, and 0 at the kink.",
        ),
        why="""The function saves two tensors where autograd keeps four. The slope of the square is continuous, so
            unlike ReLU it has no kink whose slope must be agreed on.""",
    ),
    TorchExercise(
        name="balance-router",
        title="Balance a router without a loss",
        difficulty=3,
        question="""A router prefers some experts so much that the fullest one gets several times the average. Each
            token chooses the top k of its logits plus a bias, which is the same for all tokens. Write the update of
            this bias after a step, from the experts that the tokens chose. It is called for 300 steps of 512 tokens.
            The bias starts at zeros.

            With the last bias the project chooses experts for new tokens. The fullest expert may then have 1.15 times
            the average. One bias for all tokens keeps top-k's own choice: an expert that must lose tokens loses those
            that want it least.""",
        project="router.BIAS",
        changes=ROUTER_CHANGES,
        solution=ROUTER,
        hints=(
            "Count the rows of each expert with `torch.bincount(..., minlength=len(bias))`.",
            "An expert with more rows than the average needs a lower bias, one with fewer a higher bias.",
            "A large step overshoots, a small one does not arrive in 300 steps: limit the step, and let it shrink near "
            "balance.",
        ),
        why="""The bias changes the choice and nothing else: gates are computed from the logits without it, so it sends
            no gradient. DeepSeek-V3 balances its experts by such a bias.""",
    ),
)
