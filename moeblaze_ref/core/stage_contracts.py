"""What the stages accept, in every backend: shapes that agree, one dtype, finite values.

A layer checks its own arguments, and its stages make the rest. So inside a layer (`checks.trusted`) nothing is checked.
"""

from dataclasses import replace

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig, is_gated
from moeblaze_ref.core.contract import ROUTING, Contract, Structure, Tensor
from moeblaze_ref.core.structures import EMPTY, HIDDEN

# ---- declared ------------------------------------------------------------------------------------

DISPATCH = Structure("dispatch", "Dispatch", checks.check_dispatch, "L E R k", "The routing")

ROUTER = Contract(
    "Return the router's logits, x wg.",
    (Tensor("x", "L d", text="Tokens"), Tensor("wg", "d E", text="The router's weights")),
    (Tensor("logits", "L E", ROUTING),),
    "MoEBlaze, section 2",
)
ROUTER_D_X = Contract(
    "Return the gradient of x through the router alone.",
    (Tensor("d_logits", "L E", ROUTING, "Gradient of the logits"), Tensor("wg", "d E", text="The router's weights")),
    (Tensor("d_x", "L d"),),
    "MoEBlaze, section 2",
    first="wg",
)
ROUTER_D_WG = Contract(
    "Return the gradient of wg.",
    (Tensor("d_logits", "L E", ROUTING, "Gradient of the logits"), Tensor("x", "L d", text="Tokens")),
    (Tensor("d_wg", "d E"),),
    "MoEBlaze, section 2",
    first="x",
)

Y = Tensor("y", "R d", text="The experts' outputs, in expert order")
GATES = Tensor("gates", "L k", ROUTING, "The weight of each slot")
COMBINE = Contract(
    "Return the layer's output: the gate-weighted sum of each token's expert outputs.",
    (Y, GATES, DISPATCH),
    (Tensor("out", "L d", text="Summed in the order of the slots j = 0, ..., k - 1: always the same bits"),),
    "MoEBlaze, section 3.1; gather and sum as in SonicMoE (arXiv 2512.14080)",
)
COMBINE_ATOMIC = replace(COMBINE, results=(Tensor("out", "L d", text="Not the same bits from run to run"),))
COMBINE_BACKWARD = Contract(
    "Return the gradients of the expert outputs and of the gates, the textbook way: it needs y saved for backward.",
    (Tensor("d_out", "L d", text="Gradient of the output"), Y, GATES, DISPATCH),
    (
        Tensor("d_y", "R d", text="gate * d_out of the row's token, in expert order"),
        Tensor("d_gates", "L k", ROUTING, "<d_out, y> of each slot"),
    ),
    "MoEBlaze, section 3.2. The layer does without: ``expert_down.hidden_gradients`` finds the same gradients of the "
    "gates from y_swi, and never writes the (R, d) gradient that this function returns",
    first="y gates",
)

# ---- as functions --------------------------------------------------------------------------------


@checks.unless_trusted
def check_dense_map(dense_map):
    """dense_map (L, E) int32."""
    checks.check_array("dense_map", dense_map, rank=2, dtypes=("int32",), contiguous=False)


@checks.unless_trusted
def check_lengths(lengths):
    """lengths (E,) int32, none negative, whose sum R fits the index structures."""
    checks.check_array("lengths", lengths, rank=1, dtypes=("int32",), contiguous=False)
    checks.check_not_negative("lengths", lengths)
    num_routed = int(lengths.sum(dtype="int64"))
    checks.check_int("R, the sum of the lengths,", num_routed, at_least=0, at_most=checks.MAX_ROUTED_ROWS)


@checks.unless_trusted
def check_route_indices(dense_map, offsets, topk_experts):
    """dense_map (L, E) and offsets (E + 1,) are those that the first two steps make of topk_experts (L, k)."""
    _check_map_of(dense_map, topk_experts)
    _check_offsets_of(offsets, dense_map)


@checks.unless_trusted
def check_location_map(dense_map, offsets):
    """dense_map (L, E), and offsets (E + 1,) are those that the second step makes of it."""
    check_dense_map(dense_map)
    _check_offsets_of(offsets, dense_map)


@checks.unless_trusted
def check_write_indices(dense_map, location_map, topk_experts):
    """dense_map and location_map (L, E) are those that the steps before make of topk_experts (L, k)."""
    _check_map_of(dense_map, topk_experts)
    checks.check_array("location_map", location_map, rank=2, dtypes=("int32",), contiguous=False)
    checks.check_shape("location_map", location_map, {"L": dense_map.shape[0], "E": dense_map.shape[1]})
    routed = dense_map != EMPTY
    lengths = routed.sum(axis=0)
    valid_locations = location_map.copy()
    valid_locations[...] = lengths.cumsum() - lengths + routed.cumsum(axis=0) - routed
    checks.check_equal("location_map", location_map, valid_locations)


def _check_map_of(dense_map, topk_experts):
    """dense_map (L, E) is the one that the first step makes of topk_experts (L, k)."""
    check_dense_map(dense_map)
    num_tokens, num_experts = dense_map.shape
    checks.check_topk_experts(topk_experts, num_experts)
    checks.check_shape("topk_experts", topk_experts, {"L": num_tokens, "k": None})
    tokens = checks.numbers_of(topk_experts[:, 0])[:, None]  # (L, 1)
    valid_map = dense_map.copy()
    valid_map.fill(EMPTY)
    valid_map[tokens, topk_experts] = tokens
    checks.check_equal("dense_map", dense_map, valid_map)


def _check_offsets_of(offsets, dense_map):
    """offsets (E + 1,) are those that the second step makes of dense_map (L, E)."""
    checks.check_array("offsets", offsets, rank=1, dtypes=("int32",), contiguous=False)
    checks.check_shape("offsets", offsets, {"E + 1": dense_map.shape[1] + 1})
    valid_offsets = offsets.copy()
    valid_offsets[:1] = 0
    valid_offsets[1:] = (dense_map != EMPTY).sum(axis=0).cumsum()
    checks.check_equal("offsets", offsets, valid_offsets)


@checks.unless_trusted
def check_logits(logits, dtypes):
    """logits (L, E), at least one expert."""
    checks.check_tensor("logits", logits, {"L": None, "E": None}, dtypes)
    checks.check_int("E", logits.shape[1], at_least=1)


@checks.unless_trusted
def check_gating_forward(logits, k, dtypes):
    """As `check_logits`, and k experts can be chosen."""
    check_logits(logits, dtypes)
    checks.check_k(checks.check_int("k", k, at_least=1), logits.shape[1])


@checks.unless_trusted
def check_routing(probs, topk_experts, dtypes):
    """probs (L, E) and topk_experts (L, k) belong together."""
    checks.check_tensor("probs", probs, {"L": None, "E": None}, dtypes)
    _check_choice(probs, topk_experts)


def _check_choice(rows, topk_experts):
    """topk_experts (L, k) names columns of rows (L, E)."""
    num_tokens, num_experts = rows.shape
    checks.check_topk_experts(topk_experts, num_experts)
    checks.check_shape("topk_experts", topk_experts, {"L": num_tokens, "k": None})


@checks.unless_trusted
def check_gating_backward(d_gates, logits, topk_experts, d_load_balancing_loss, d_router_z_loss, dtypes):
    """logits (L, E), topk_experts (L, k) and d_gates (L, k), of the logits' dtype, belong together; losses are ()."""
    check_logits(logits, dtypes)
    _check_choice(logits, topk_experts)
    num_tokens, k = topk_experts.shape
    checks.check_tensor("d_gates", d_gates, {"L": num_tokens, "k": k}, (checks.dtype_of(logits),))
    checks.check_scalar("d_load_balancing_loss", d_load_balancing_loss)
    checks.check_scalar("d_router_z_loss", d_router_z_loss)


@checks.unless_trusted
def check_expert_up(x, w1, w2, dispatch, dtypes):
    """x (L, d), w1 and w2 (E, d, h) and the Dispatch belong together; w2 may be None."""
    checks.check_dispatch(dispatch)
    checks.check_tensor("x", x, {"L": dispatch.L, "d": None}, dtypes)
    same = (checks.dtype_of(x),)
    checks.check_tensor("w1", w1, {"E": dispatch.E, "d": x.shape[1], "h": None}, same)
    if w2 is not None:
        checks.check_tensor("w2", w2, {"E": dispatch.E, "d": x.shape[1], "h": w1.shape[2]}, same)


@checks.unless_trusted
def check_expert_up_forward(x, w1, w2, dispatch, activation, stores, dtypes):
    """As `check_expert_up`; w2 is there exactly if the activation is gated, and ``stores`` names results."""
    for name in stores:
        checks.check_name("result of expert_up", name, HIDDEN)
    checks.check_second_projection("w2", w2, is_gated(activation), activation)
    check_expert_up(x, w1, w2, dispatch, dtypes)


@checks.unless_trusted
def check_expert_up_input_gradient(d_a, d_b, w1, w2, dispatch, dtypes):
    """d_a and d_b (R, h), w1 and w2 (E, d, h) and the Dispatch belong together; d_b is there exactly if w2 is."""
    checks.check_second_projection("d_b", d_b, w2 is not None)
    checks.check_dispatch(dispatch)
    checks.check_tensor("d_a", d_a, {"R": dispatch.R, "h": None}, dtypes)
    same, h = (checks.dtype_of(d_a),), d_a.shape[1]
    checks.check_tensor("w1", w1, {"E": dispatch.E, "d": None, "h": h}, same)
    if w2 is not None:
        checks.check_tensor("w2", w2, {"E": dispatch.E, "d": w1.shape[1], "h": h}, same)
        checks.check_tensor("d_b", d_b, {"R": dispatch.R, "h": h}, same)


@checks.unless_trusted
def check_expert_up_weight_gradient(d_hidden, x, dispatch, dtypes):
    """d_hidden (R, h), x (L, d) and the Dispatch belong together."""
    checks.check_dispatch(dispatch)
    checks.check_tensor("x", x, {"L": dispatch.L, "d": None}, dtypes)
    checks.check_tensor("d_hidden", d_hidden, {"R": dispatch.R, "h": None}, (checks.dtype_of(x),))


@checks.unless_trusted
def check_expert_down_forward(y_swi, w3, dispatch, dtypes):
    """y_swi (R, h), w3 (E, h, d) and the Dispatch belong together."""
    checks.check_dispatch(dispatch)
    checks.check_tensor("y_swi", y_swi, {"R": dispatch.R, "h": None}, dtypes)
    checks.check_tensor("w3", w3, {"E": dispatch.E, "h": y_swi.shape[1], "d": None}, (checks.dtype_of(y_swi),))


@checks.unless_trusted
def check_expert_down_output(y_swi, w3, gates, dispatch, dtypes, gate_dtypes):
    """As `check_expert_down_forward`, and gates (L, k) belong to it."""
    check_expert_down_forward(y_swi, w3, dispatch, dtypes)
    checks.check_tensor("gates", gates, {"L": dispatch.L, "k": dispatch.k}, gate_dtypes)


@checks.unless_trusted
def check_expert_down_hidden_gradients(
    d_out, gates, a, b, y_swi, w3, dispatch, activation, overwrite, dtypes, gate_dtypes=None
):
    """d_out (L, d), gates (L, k), a, b and y_swi (R, h), w3 (E, h, d) and the Dispatch belong together.

    b is there exactly if the activation is gated; y_swi may be None; a and b may be written if ``overwrite``; gates
    have the dtype of a unless ``gate_dtypes`` names others.
    """
    checks.check_second_projection("b", b, is_gated(activation), activation)
    checks.check_dispatch(dispatch)
    checks.check_tensor("a", a, {"R": dispatch.R, "h": None}, dtypes)
    hidden, same = {"R": dispatch.R, "h": a.shape[1]}, (checks.dtype_of(a),)
    checks.check_tensor("w3", w3, {"E": dispatch.E, "h": a.shape[1], "d": None}, same)
    checks.check_tensor("d_out", d_out, {"L": dispatch.L, "d": w3.shape[2]}, same)
    checks.check_tensor("gates", gates, {"L": dispatch.L, "k": dispatch.k}, gate_dtypes or same)
    for name, array in (("b", b), ("y_swi", y_swi)):
        if array is not None:
            checks.check_tensor(name, array, hidden, same)
    if overwrite:
        for name, array in (("a", a), ("b", b)):
            if array is not None:
                checks.check_writable(name, array)


@checks.unless_trusted
def check_expert_down_weight_gradient(gated_y, d_out, dispatch, dtypes):
    """gated_y (R, h), d_out (L, d) and the Dispatch belong together."""
    checks.check_dispatch(dispatch)
    checks.check_tensor("gated_y", gated_y, {"R": dispatch.R, "h": None}, dtypes)
    checks.check_tensor("d_out", d_out, {"L": dispatch.L, "d": None}, (checks.dtype_of(gated_y),))


@checks.unless_trusted
def check_layer(x, weights, k, activation, dtypes):
    """x (L, d), the weights (wg, w1, w2, w3), k and the activation describe one layer."""
    gated = is_gated(activation)
    checks.check_second_projection("w2", weights.w2, gated, activation)
    checks.check_tensor("x", x, {"L": None, "d": None}, dtypes)
    num_tokens, d = x.shape
    same = (checks.dtype_of(x),)
    checks.check_tensor("wg", weights.wg, {"d": d, "E": None}, same)
    num_experts = weights.wg.shape[1]
    checks.check_tensor("w1", weights.w1, {"E": num_experts, "d": d, "h": None}, same)
    h = weights.w1.shape[2]
    if gated:
        checks.check_tensor("w2", weights.w2, {"E": num_experts, "d": d, "h": h}, same)
    checks.check_tensor("w3", weights.w3, {"E": num_experts, "h": h, "d": d}, same)
    # The configuration's own door checks the sizes, k and R.
    MoEConfig(L=num_tokens, d=d, h=h, E=num_experts, k=k, activation=activation, dtype=checks.dtype_of(x))


@checks.unless_trusted
def check_experts(x, w1, w2, w3, dispatch, gates, activation, dtypes):
    """x (L, d), the experts' weights, the Dispatch, the gates (L, k) and the activation belong together.

    Gates are float32, or float64 beside float64.
    """
    check_expert_up_forward(x, w1, w2, dispatch, activation, ("y_swi",), dtypes)
    E, d, h = w1.shape
    checks.check_tensor("w3", w3, {"E": E, "h": h, "d": d}, (checks.dtype_of(x),))
    wide = "float64" if checks.dtype_of(x) == "float64" else "float32"
    checks.check_tensor("gates", gates, {"L": dispatch.L, "k": dispatch.k}, (wide,))


def check_experts_backward(d_out, w1, w2, w3, saved, h):
    """d_out (L, d) and the experts' weights are of the sizes and the dtype of what a forward into bins has saved."""
    E, d, same = saved.bins.E, saved.x_rows.shape[-1], (checks.dtype_of(saved.x_rows),)
    checks.check_tensor("d_out", d_out, {"L": saved.bins.L, "d": d}, same)
    checks.check_tensor("w1", w1, {"E": E, "d": d, "h": h}, same)
    checks.check_second_projection("w2", w2, is_gated(saved.activation), saved.activation)
    if w2 is not None:
        checks.check_tensor("w2", w2, {"E": E, "d": d, "h": h}, same)
    checks.check_tensor("w3", w3, {"E": E, "h": h, "d": d}, same)
