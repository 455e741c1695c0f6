"""The whole MoE layer, forward and backward, from the Numba stages.

Source: MoEBlaze (arXiv 2601.05296), sections 3 and 5. As in the specification, the stages do the
work and this file decides what survives from forward to backward; the policies, the weights and
what is saved and returned are the specification's own. Only the router's products are made here.
"""

from moeblaze_ref import doors, stage_doors
from moeblaze_ref.config import POLICIES, is_gated
from moeblaze_ref.numba_cuda import activation as activation_stage
from moeblaze_ref.numba_cuda import combine, expert_down, expert_up, gating
from moeblaze_ref.numba_cuda import dispatch as dispatch_stage
from moeblaze_ref.numba_cuda.runtime import (
    DTYPES,
    THREADS,
    ZERO,
    all_to_device,
    blocks_for,
    cuda,
    float32_output,
    launch,
    to_caller,
)
from moeblaze_ref.numpy_ref.layer import INTERMEDIATES, Gradients, LayerOutput, MoEWeights, Saved


@cuda.jit
def matmul_kernel(left, right, product):
    """Multiply left (m, p) by right (p, n).

    Source        MoEBlaze, section 2: X Wg; and its gradients, by transposed operands
    Grid          ceil(m n / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 8 m n p; writes 4 m n
    """
    rows, columns = product.shape
    element = cuda.grid(1)
    row, column = element // columns, element % columns
    if row < rows:
        total = ZERO
        for i in range(left.shape[1]):
            total += left[row, i] * right[i, column]
        product[row, column] = total


def matmul(left, right):
    """The product (m, n) of two float32 arrays, (m, p) and (p, n), of the kind of ``left``; the caller checks them."""
    product = float32_output((left.shape[0], right.shape[1]))
    launch(matmul_kernel, blocks_for(product.size), THREADS, *all_to_device(left, right), product)
    (product,) = to_caller(left, product)
    return product


def _check(x, weights, k, activation):
    doors.check_type("weights", weights, MoEWeights)
    stage_doors.check_layer(x, weights, k, activation, DTYPES)


def _what_autograd_keeps(x, dispatch, a, activation):
    """The two tensors that the stages never write: the routed inputs, and act(a) unless it is y_swi itself."""
    routed_x = x[dispatch.expert_token_indices]  # (R, d): the first memory wall
    return {"routed_x": routed_x, "act_a": activation_stage.act(a, activation) if is_gated(activation) else None}


def forward(x, weights, k, activation="swiglu", policy="minimal", renormalize=False):
    """One MoE layer: route, dispatch, expert MLPs, combine.

    Parameters
    ----------
    x : array (L, d), float32
        Tokens, finite; L = 0 is valid. A numpy array, or on the GPU a CuPy array; with CuPy arrays
        nothing leaves the GPU between the stages.
    weights : MoEWeights
        float32 arrays of the kind of ``x``, finite.
    k : int
        Experts per token, 1..E.
    activation : str
        One of ``config.ACTIVATIONS``.
    policy : str
        What to keep for the backward, one of ``config.POLICIES``; it changes no result.
    renormalize : bool
        Divide the chosen gates of a token by their sum.

    Returns
    -------
    LayerOutput
        out (L, d), load_balancing_loss, router_z_loss, saved.

    Raises
    ------
    ValueError
        If shapes disagree, k > E, a value is not finite, an activation or policy is unknown, or w2 is missing
        or superfluous.
    TypeError
        If a dtype is not float32, or ``weights`` is no MoEWeights.

    Notes
    -----
    MoEBlaze, sections 2, 3.1 and 5 (Algorithm 1).
    """
    doors.check_name("policy", policy, POLICIES)
    _check(x, weights, k, activation)
    logits = matmul(x, weights.wg)  # (L, E)
    probs, topk_experts, gates = gating.forward(logits, k, renormalize)
    dispatch = dispatch_stage.build(topk_experts, weights.wg.shape[1])
    a, b, y_swi = expert_up.forward(x, weights.w1, weights.w2, dispatch, activation)  # each (R, h)
    y = expert_down.forward(y_swi, weights.w3, dispatch)  # (R, d)
    out = combine.forward(y, gates, dispatch)  # (L, d)
    intermediates = {"a": a, "b": b, "y_swi": y_swi, "y": y}
    if policy == "conventional":
        intermediates |= _what_autograd_keeps(x, dispatch, a, activation)
    kept = {name: intermediates[name] for name in INTERMEDIATES[policy] if intermediates[name] is not None}
    return LayerOutput(
        out,
        gating.load_balancing_loss(probs, topk_experts),
        gating.router_z_loss(logits),
        Saved(x, dispatch, gates, kept, activation, policy, renormalize),
    )


def _rebuild(saved, weights):
    """a and b: kept ones as they are, or computed again."""
    kept = saved.intermediates
    if "a" in kept:
        return kept["a"], kept.get("b")
    a, b, _ = expert_up.forward(saved.x, weights.w1, weights.w2, saved.dispatch, saved.activation)
    return a, b


def _router_backward(d_gates, saved, weights, d_load_balancing_loss, d_router_z_loss):
    """d_logits (L, E) from the gates and both losses; the (L, E) probabilities are computed again."""
    logits = matmul(saved.x, weights.wg)  # (L, E)
    probs = gating.forward(logits, saved.dispatch.k).probs  # (L, E); the choice stays the forward's
    topk_experts = saved.dispatch.token_expert_indices.reshape(saved.gates.shape)  # (L, k)
    return (
        gating.backward(d_gates, probs, topk_experts, saved.renormalize)
        + gating.load_balancing_loss_backward(probs, topk_experts, d_load_balancing_loss)
        + gating.router_z_loss_backward(logits, d_router_z_loss)
    )


def backward(d_out, saved, weights, d_load_balancing_loss=0.0, d_router_z_loss=0.0):
    """Every gradient of the layer, from those of its output and of its two losses.

    Parameters
    ----------
    d_out : array (L, d)
        float32, finite.
    saved : Saved
        From `forward`; it is not changed, so a second backward gives the same again.
    weights : MoEWeights
        Those of the forward, unchanged since.
    d_load_balancing_loss, d_router_z_loss : float
        Gradients of the two losses.

    Returns
    -------
    Gradients
        d_x, d_wg, d_w1, d_w2 (None if ungated), d_w3, d_gates: the same bits under every policy. d_gates is the
        gradient of the gates that `forward` returned in ``saved``, after renormalisation if there was one.

    Raises
    ------
    ValueError, TypeError
        As `forward`, and if a loss gradient is no finite number.

    Notes
    -----
    MoEBlaze, sections 3.2 and 5; the gates as in SonicMoE. Only a and b are read of what was kept
    between the GEMMs: the kernel of ``expert_down.backward`` rebuilds y_swi from them.
    """
    doors.check_type("saved", saved, Saved)
    _check(saved.x, weights, saved.dispatch.k, saved.activation)
    doors.check_number("d_load_balancing_loss", d_load_balancing_loss)
    doors.check_number("d_router_z_loss", d_router_z_loss)
    a, b = _rebuild(saved, weights)
    d_a, d_b, d_gates, d_w3 = expert_down.backward(
        d_out, saved.gates, a, b, weights.w3, saved.dispatch, saved.activation
    )
    d_x, d_w1, d_w2 = expert_up.backward(d_a, d_b, saved.x, weights.w1, weights.w2, saved.dispatch)
    d_logits = _router_backward(d_gates, saved, weights, d_load_balancing_loss, d_router_z_loss)  # (L, E)
    d_x += matmul(d_logits, weights.wg.T)
    return Gradients(d_x, matmul(saved.x.T, d_logits), d_w1, d_w2, d_w3, d_gates)
