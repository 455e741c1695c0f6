"""What the stages accept, in every backend: shapes that agree, one dtype, finite values.

A layer checks its own arguments, and its stages make the rest: it calls the functions behind these checks.
"""

from dataclasses import replace

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import copy_of
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.core.contract import INT32, ROUTING, Arguments, Contract, Structure, Tensor, Value
from moeblaze_ref.core.routers import Router
from moeblaze_ref.core.structures import EMPTY, HIDDEN, Array, Dispatch

Dtypes = tuple[str, ...]  # those that a tensor may have

# ---- declared ------------------------------------------------------------------------------------

DISPATCH = Structure("dispatch", "Dispatch", checks.check_dispatch, "L E R k", "The routing")
TOKENS, WG = Tensor("x", "L d", text="Tokens"), Tensor("wg", "d E", text="The router's weights")
D_LOGITS = Tensor("d_logits", "L E", ROUTING, "Gradient of the logits")

ROUTER = Contract(
    "Return the router's logits, x wg.",
    (TOKENS, WG),
    (Tensor("logits", "L E", ROUTING),),
    "MoEBlaze, section 2",
)
ROUTER_D_X = Contract(
    "Return the gradient of x through the router, added to that through the experts where that is given.",
    (
        D_LOGITS,
        WG,
        Tensor("d_x", "L d", text="The gradient through the experts, which is overwritten", optional="for none"),
    ),
    (Tensor("d_x", "L d"),),
    "MoEBlaze, section 2",
    first="wg",
)
ROUTER_D_WG = Contract(
    "Return the gradient of wg.",
    (D_LOGITS, TOKENS),
    (Tensor("d_wg", "d E"),),
    "MoEBlaze, section 2",
    first="x",
)

Y = Tensor("y", "R d", text="The experts' outputs, in expert order")
GATES = Tensor("gates", "L k", ROUTING, "The weight of each slot")
COMBINE = Contract(
    "Return the layer's output: the gate-weighted sum of each token's expert outputs.",
    (Y, GATES, DISPATCH),
    (Tensor("out", "L d"),),
    "MoEBlaze, section 3.1; gather and sum as in SonicMoE (arXiv 2512.14080)",
)
COMBINE_ATOMIC = replace(COMBINE, results=(Tensor("out", "L d", text="Not the same bits from run to run"),))
COMBINE_IN_PARTS = Contract(
    "Return the combine of expert outputs of which some columns come after the others; without gates, their sum.",
    (
        Value("parts", "tuple of arrays (R, width)", "All columns of y, or of the rows that sum to the gradient of x"),
        replace(GATES, optional="for the sum"),
        DISPATCH,
    ),
    (Tensor("out", "L d", text="d is the sum of the widths"),),
    "MoEBlaze, sections 3.1 and 3.2",
    whole=lambda **given: check_parts_of_rows(**given),
)
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


# ---- the router ----------------------------------------------------------------------------------


def _check_k(given: Arguments) -> None:
    _check_experts(given)
    checks.check_k(checks.check_int("k", given["k"], at_least=1), given["logits"].shape[1])


def _check_experts(given: Arguments) -> None:
    checks.check_int("E", given["logits"].shape[1], at_least=1)


def _check_loss_gradients(given: Arguments) -> None:
    for name in ("d_load_balancing_loss", "d_router_z_loss"):
        checks.check_scalar(name, given[name])


def _check_loss_gradient(given: Arguments) -> None:
    checks.check_number("d_loss", given["d_loss"])


LOGITS = Tensor("logits", "L E", ROUTING, "x wg")
PROBS = Tensor("probs", "L E", ROUTING, "Softmax of the logits")
CHOICE = Tensor(
    "topk_experts",
    "L k",
    INT32,
    "Expert ids of each token, distinct in a row",
    values=lambda array, sizes: checks.check_topk_experts(array, sizes["E"]),
)
CHOSEN = Tensor("topk_experts", "L k", INT32, "Best first, ties to the lower expert id")
K = Value("k", "int", "Experts per token, 1..E")
RENORMALIZE = Value("renormalize", "bool", "Divide the chosen gates of a token by their sum")

TOP_K = Contract(
    "Return the ids of the k largest logits of every token.",
    (LOGITS, K),
    (CHOSEN,),
    "MoEBlaze, section 2",
    after=_check_k,
    errors=", k > E",
)
SOFTMAX = Contract(
    "Return the probabilities of the experts; each row sums to one.",
    (LOGITS,),
    (PROBS,),
    "MoEBlaze, section 2",
    after=_check_experts,
)
SOFTMAX_BACKWARD = Contract(
    "Return the gradient of the logits from that of their softmax.",
    (Tensor("d_probs", "L E", ROUTING, "Gradient of the probabilities"), PROBS),
    (Tensor("d_logits", "L E", ROUTING),),
    "MoEBlaze, section 2. Renormalised gates are a softmax of the k chosen logits, (L, k) in place of (L, E)",
    first="probs",
)
GATING = Contract(
    "Return the probabilities, the chosen experts and the gates of every token.",
    (LOGITS, K, RENORMALIZE),
    (PROBS, CHOSEN, replace(GATES, text="The chosen probabilities, or those over their sum")),
    "MoEBlaze, section 2: TopK(softmax(x Wg)), Wg of shape (d, E)",
    after=_check_k,
    errors=", k > E",
)
GATING_WITH_LOSSES = Contract(
    "Return the chosen experts and the gates of every token, and both losses of the router.",
    (LOGITS, K, RENORMALIZE),
    (
        CHOSEN,
        replace(GATES, text="The chosen probabilities, or those over their sum"),
        Tensor("load_balancing_loss", "", ROUTING, "E * sum_e f_e P_e; 0 for no tokens"),
        Tensor("router_z_loss", "", ROUTING, "The mean of logsumexp(logits)**2; 0 for no tokens"),
    ),
    "MoEBlaze, section 2; Switch Transformer (arXiv 2101.03961), section 2.2; ST-MoE (arXiv 2202.08906)",
    after=_check_k,
    errors=", k > E",
)
GATING_BACKWARD = Contract(
    "Return the gradient of the logits from those of the gates and of both losses.",
    (
        Tensor("d_gates", "L k", ROUTING, "Gradient of the gates"),
        LOGITS,
        CHOICE,
        RENORMALIZE,
        Value("d_load_balancing_loss", "float or array ()", "Gradient of the load-balancing loss"),
        Value("d_router_z_loss", "float or array ()", "Gradient of the router z-loss"),
    ),
    (Tensor("d_logits", "L E", ROUTING, "The choice of experts itself has no gradient"),),
    "MoEBlaze, section 2. Renormalised gates are a softmax over the chosen logits alone: the other experts get no "
    "gradient from them",
    first="logits topk_experts d_gates",
    after=_check_loss_gradients,
    errors=", an expert id is out of range or doubled",
)
LOAD_BALANCING_LOSS = Contract(
    "Return the Switch loss E * sum_e f_e P_e: f_e is the share of routed rows, P_e the mean probability.",
    (PROBS, CHOICE),
    (Tensor("loss", "", ROUTING, "1 for a perfectly balanced router, 0 for no tokens"),),
    "Switch Transformer's auxiliary loss, with the R = L * k routed rows of a top-k router in place of its L",
    errors=", an expert id is out of range or doubled",
)
D_LOSS = Value("d_loss", "float", "Gradient of the loss")
LOAD_BALANCING_LOSS_BACKWARD = Contract(
    "Return the gradient of the logits from that of the load-balancing loss; the shares f_e are constants.",
    (PROBS, CHOICE, D_LOSS),
    (Tensor("d_logits", "L E", ROUTING),),
    "Switch Transformer (arXiv 2101.03961)",
    after=_check_loss_gradient,
    errors=", an expert id is out of range or doubled, d_loss",
)
ROUTER_Z_LOSS = Contract(
    "Return ST-MoE's mean over tokens of logsumexp(logits)**2, which keeps the logits small.",
    (LOGITS,),
    (Tensor("loss", "", ROUTING, "0 for no tokens"),),
    "ST-MoE (arXiv 2202.08906)",
    after=_check_experts,
)
ROUTER_Z_LOSS_BACKWARD = Contract(
    "Return the gradient of the logits from that of the router z-loss.",
    (LOGITS, D_LOSS),
    (Tensor("d_logits", "L E", ROUTING),),
    "ST-MoE (arXiv 2202.08906)",
    before=_check_loss_gradient,
    after=_check_experts,
    errors=", d_loss",
)

ROUTER_KIND = Value("router", "Router", "One of ``core.routers``")


def _check_router(given: Arguments) -> None:
    checks.check_type("router", given["router"], Router)
    k = given["k"] if "k" in given else given["topk_experts"].shape[1]
    given["router"].check_sizes(given["logits"].shape[1], checks.check_int("k", k, at_least=1))


def _check_rate(given: Arguments) -> None:
    checks.check_within("rate", given["rate"], at_least=0.0)


def _check_choose(given: Arguments) -> None:
    _check_router(given)
    given["router"].check_bias("selection_bias", given["selection_bias"])


CHOOSE = Contract(
    "Return the ids of the experts that a router chooses for every token.",
    (
        LOGITS,
        K,
        ROUTER_KIND,
        Tensor(
            "selection_bias",
            "E",
            ROUTING,
            "Added to the scores for the choice alone",
            optional="if the router adds none",
        ),
    ),
    (CHOSEN,),
    "MoEBlaze, section 2; groups and selection bias as in DeepSeek-V3 (arXiv 2412.19437), section 2.1.2",
    after=_check_choose,
    errors=", k of the experts cannot be chosen, selection_bias is missing or superfluous",
)
WEIGH = Contract(
    "Return the gates of the experts that were chosen.",
    (LOGITS, CHOICE, ROUTER_KIND),
    (replace(GATES, text="The chosen scores, over their sum if renormalised, times the scale"),),
    "MoEBlaze, section 2; sigmoids as in DeepSeek-V3 (arXiv 2412.19437), section 2.1.2",
    after=_check_router,
    errors=", an expert id is out of range or doubled, k of the experts cannot be chosen",
)
WEIGH_BACKWARD = Contract(
    "Return the gradient of the logits from that of the gates.",
    (Tensor("d_gates", "L k", ROUTING, "Gradient of the gates"), LOGITS, CHOICE, ROUTER_KIND),
    (Tensor("d_logits", "L E", ROUTING, "Neither the choice nor the selection bias has a gradient"),),
    "MoEBlaze, section 2",
    first="logits topk_experts d_gates",
    after=_check_router,
    errors=", an expert id is out of range or doubled, k of the experts cannot be chosen",
)
LOGIT_BIAS_GRADIENT = Contract(
    "Return the gradient of the logit bias, the sum of d_logits over the tokens.",
    (Tensor("d_logits", "L E", ROUTING, "Gradient of the logits"),),
    (Tensor("d_logit_bias", "E", ROUTING),),
    "MoEBlaze, section 2, with the bias of gpt-oss's router",
)
UPDATE_SELECTION_BIAS = Contract(
    "Return the selection bias of the next step, higher for experts below the mean load and lower above.",
    (
        Tensor("selection_bias", "E", ROUTING, "Of this step"),
        Tensor(
            "loads",
            "E",
            INT32,
            "Tokens of each expert in the whole batch",
            values=lambda array, sizes: checks.check_array("loads", array, 1, ("int32", "int64")),
        ),
        Value("rate", "float", "The bias update speed, 0 or more"),
    ),
    (Tensor("updated", "E", ROUTING),),
    "Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1: b + rate * sign(mean load - load)",
    after=_check_rate,
    errors=", the rate is negative",
)

# ---- dispatch ------------------------------------------------------------------------------------


CHOICES = Tensor("topk_experts", "L k", INT32, "Expert ids of each token, distinct within a row; C-contiguous")
SLOTS = replace(CHOICES, text="Tells which of its k slots a token used for an expert; C-contiguous")
NUM_EXPERTS = Value("num_experts", "int", "E")
BAD_CHOICES = "an id is out of range or doubled, k > E, or R = L * k exceeds 2**31 - 1024"
MAP = Tensor("dense_map", "L E", INT32, "From step 1")
OFFSETS = Tensor("offsets", "E+1", INT32, "From step 2")
LOCATIONS = Tensor("location_map", "L E", INT32, "From the first phase")
POSITIONS = (
    Tensor("expert_token_indices", "R", INT32, "Token ids grouped by expert, ascending inside an expert"),
    Tensor("token_index_map", "R", INT32, "Position of slot (token, j) in expert_token_indices, row-major (L, k)"),
)
STEP_1, STEP_2, STEP_3 = (f"MoEBlaze, section 4.2, step {step}" for step in (1, 2, 3))
MADE = Structure("dispatch", "Dispatch", checks.check_dispatch, "L E R k")

DENSE_MAP = Contract(
    "Return step 1: a row for each token, a column for each expert.",
    (CHOICES, NUM_EXPERTS),
    (replace(MAP, text="Entry (i, e) is i if token i goes to expert e, else ``EMPTY``: L * E * 4 bytes"),),
    STEP_1,
    whole=lambda dtypes, **given: checks.check_topk_experts(**given),
    errors=BAD_CHOICES,
)
EXPERT_LENGTHS = Contract(
    "Return step 2a: how many tokens each expert gets.",
    (replace(MAP, text="As made by the function of that name"),),
    (Tensor("lengths", "E", INT32),),
    STEP_2,
    whole=lambda dtypes, **given: check_dense_map(**given),
    errors="the rank is not 2",
)
EXPERT_OFFSETS = Contract(
    "Return step 2b, where each expert's group begins: the exclusive prefix sum of the lengths, and R at its end.",
    (Tensor("lengths", "E", INT32),),
    (Tensor("offsets", "E+1", INT32),),
    STEP_2,
    whole=lambda dtypes, **given: check_lengths(**given),
    errors="a length is negative or their sum R exceeds 2**31 - 1024",
)
ROUTE_INDICES = Contract(
    "Return step 3: the final position of every routed row.",
    (MAP, OFFSETS, SLOTS),
    POSITIONS,
    STEP_3,
    whole=lambda dtypes, **given: check_route_indices(**given),
    errors="topk_experts is not valid, or the map or the offsets are not what steps 1 and 2 make of it",
)
LOCATION_MAP = Contract(
    "Return step 3 as printed, first phase: where each token goes in the order of each expert.",
    (MAP, OFFSETS),
    (
        replace(
            LOCATIONS,
            text="Entry (i, e) is offsets[e] plus the number of tokens before i that go to expert e: the position of "
            "token i if it goes there too. The dense map says whether it does",
        ),
    ),
    f"{STEP_3}: the exclusive scan of each column, plus the expert's offset. `route_indices` does both phases at once",
    whole=lambda dtypes, **given: check_location_map(**given),
    errors="the rank of the map is not 2, or the offsets are not what step 2 makes of it",
)
WRITE_INDICES = Contract(
    "Return step 3 as printed, second phase: every routed entry of the map writes its token id to its location.",
    (MAP, LOCATIONS, SLOTS),
    POSITIONS,
    STEP_3,
    whole=lambda dtypes, **given: check_write_indices(**given),
    errors="topk_experts is not valid, or a map is not what the steps before make of it",
)
BUILD = Contract(
    "Return the four index structures, made without sorting.",
    (replace(CHOICES, text=f"{CHOICES.text}; L = 0 is valid"), NUM_EXPERTS),
    (MADE,),
    "MoEBlaze, sections 4.1 and 4.2",
    whole=lambda dtypes, **given: checks.check_topk_experts(**given),
    errors=BAD_CHOICES,
)
BUILD_BY_SORT = replace(BUILD, summary="Return the same structures by a stable sort of the R expert ids.")
BUILD_PART = Contract(
    "Return the structures where some experts of a token are elsewhere: of the rows that are here.",
    (
        replace(CHOICES, text=f"{CHOICES.text}. ``EMPTY`` stands in the place of one that is elsewhere"),
        Value("num_experts", "int", "E; 0 if every expert is elsewhere"),
        Value("num_routed", "int", "R, the ids that are not ``EMPTY``"),
    ),
    (replace(MADE, text="A partial one"),),
    "MoEBlaze, section 4.2, for the part of a layer's experts that a rank has",
    whole=lambda dtypes, **given: checks.check_part(**given),
    errors="an id is out of range or doubled, num_routed is another number, or R or a size is out of range",
)

# ---- the experts ---------------------------------------------------------------------------------


def _check_stores_and_w2(given: Arguments) -> None:
    for name in given["stores"]:
        checks.check_name("result of expert_up", name, HIDDEN)
    checks.check_second_projection("w2", given["w2"], is_gated(given["activation"]), given["activation"])


def _check_d_b(given: Arguments) -> None:
    checks.check_second_projection("d_b", given["d_b"], given["w2"] is not None)


def _check_b(given: Arguments) -> None:
    checks.check_second_projection("b", given["b"], is_gated(given["activation"]), given["activation"])


def _check_writable(given: Arguments) -> None:
    for name in ("a", "b") if given["overwrite"] else ():
        if given[name] is not None:
            checks.check_writable(name, given[name])


X = Tensor("x", "L d", text="Tokens, never permuted: rows are gathered by index")
W1, W3 = Tensor("w1", "E d h"), Tensor("w3", "E h d")
UNGATED = "exactly for the ungated activations"
W2 = Tensor("w2", "E d h", optional=UNGATED)
A = Tensor("a", "R h", text="x w1, in expert order")
B = Tensor("b", "R h", text="x w2, in expert order", optional=UNGATED)
Y_SWI = Tensor("y_swi", "R h", text="act(a) * b, or act(a) for the ungated activations, in expert order")
D_OUT = Tensor("d_out", "L d", text="Gradient of the layer's output; gathered by index, never expanded to (R, d)")
ACTIVATION = Value("activation", "str", "One of ``config.ACTIVATIONS``")
NO_GATE = ", the activation is unknown, the second projection is missing or superfluous"

EXPERT_UP = Contract(
    "Return both projections of every routed row and its hidden activation, in expert order.",
    (
        X,
        W1,
        W2,
        DISPATCH,
        ACTIVATION,
        Value("stores", "collection of str", "Which of a (and b with it) and y_swi to return; the others are None"),
    ),
    (A, B, Y_SWI),
    "MoEBlaze, sections 3.1 and 5 (Algorithm 1)",
    before=_check_stores_and_w2,
    errors=NO_GATE,
)
EXPERT_UP_D_X = Contract(
    "Return the gradient of x, summed over the experts of each token.",
    (
        Tensor("d_a", "R h", text="Gradient of a"),
        Tensor("d_b", "R h", text="Gradient of b", optional="exactly if w2 is None"),
        W1,
        W2,
        DISPATCH,
    ),
    (Tensor("d_x", "L d"),),
    "MoEBlaze, sections 3.2 and 5: dX = dA W1^T + dB W2^T",
    first="d_a w1 w2",
    before=_check_d_b,
    errors=", the second projection is missing or superfluous",
)
EXPERT_UP_D_W = Contract(
    "Return the gradient of w1 from that of a, or of w2 from that of b; x is gathered again.",
    (Tensor("d_hidden", "R h", text="d_a or d_b"), X, DISPATCH),
    (Tensor("d_w", "E d h", text="d_w1 or d_w2; zeros for an expert without rows"),),
    "MoEBlaze, section 5: dW1 = X^T dA, dW2 = X^T dB. One call for each, so that d_a is freed before d_w2 is allocated",
    first="x",
)
EXPERT_DOWN = Contract(
    "Return every routed row's expert output, not yet weighted by its gate, in expert order.",
    (Y_SWI, W3, DISPATCH),
    (Y,),
    "MoEBlaze, section 5: Y_swi W3. The sum into (L, d) is the combine stage",
)
EXPERT_DOWN_SUMMED = Contract(
    "Return the layer's output with the sum over a token's experts fused into the product, as the paper prints it.",
    (Y_SWI, W3, GATES, DISPATCH),
    (Tensor("out", "L d"),),
    "MoEBlaze, section 3.1: no array (R, d) of the tokens' dtype exists. A token has at most one row of an expert",
)
EXPERT_DOWN_ATOMIC = replace(
    EXPERT_DOWN_SUMMED, results=(Tensor("out", "L d", text="Not the same bits from run to run"),)
)
EXPERT_DOWN_IN_PARTS = replace(
    EXPERT_DOWN_SUMMED,
    summary="Return the layer's output, so that y never exists whole.",
    results=(Tensor("out", "L d", optional="where `gemm.parts_of_y` does not divide it; then nothing is computed"),),
    source="MoEBlaze, sections 3.1 and 5",
)
EXPERT_DOWN_D_HIDDEN = Contract(
    "Return the gradients from the layer's output back through gates, w3 and the activation.",
    (
        D_OUT,
        GATES,
        Tensor("a", "R h", text="x w1. For relu y_swi may take its place, with the same results"),
        B,
        W3,
        DISPATCH,
        ACTIVATION,
        Tensor("y_swi", "R h", text="The hidden activations", optional="if they were not saved"),
        Value("overwrite", "bool", "Write d_a and d_b over a and b, which must be writable, and return those arrays"),
    ),
    (
        Tensor("d_a", "R h"),
        Tensor("d_b", "R h", optional=UNGATED),
        Tensor("gated_y", "R h", text="gate * y_swi, which ``weight_gradient`` takes"),
        Tensor("d_gates", "L k", ROUTING),
    ),
    "With dY' = dOut_gathered W3^T, SonicMoE's dA': dgate = <dY', Y_swi> per row, dY_swi = gate * dY' (MoEBlaze, "
    "section 5; SonicMoE for dgate and the operand gate * Y_swi of dW3)",
    first="a w3 d_out gates b y_swi",
    before=_check_b,
    after=_check_writable,
    errors=NO_GATE + ", an array to write over is read-only",
)
EXPERT_DOWN_D_W3 = Contract(
    "Return the gradient of w3; d_out is gathered again.",
    (Tensor("gated_y", "R h", text="gate * y_swi, from ``hidden_gradients``"), D_OUT, DISPATCH),
    (Tensor("d_w3", "E h d", text="Zeros for an expert without rows"),),
    "MoEBlaze, section 5: dW3 = (gate * Y_swi)^T dOut_gathered",
)


def _check_name(given: Arguments) -> None:
    checks.check_name("activation", given["activation"], ACTIVATIONS)


BETWEEN = "MoEBlaze, section 5: "
ACT = Contract(
    "Return the nonlinearity alone, without the product by b.",
    (
        Tensor("a", "R h", text="Pre-activations x w1"),
        Value("activation", "str", "One of ``config.ACTIVATIONS``; a gated name stands for the nonlinearity inside it"),
    ),
    (Tensor("act_a", "R h"),),
    f"{BETWEEN}SiLU(A)",
    before=_check_name,
    errors=", the name is unknown",
)
ACTIVATE = Contract(
    "Return the hidden activation of every routed row: act(a) * b if gated, else act(a).",
    (A, B, ACTIVATION),
    (Y_SWI,),
    f"{BETWEEN}Y_swi = SiLU(A) * B",
    before=_check_b,
    errors=NO_GATE,
)
ACTIVATE_BACKWARD = Contract(
    "Return the gradients of a and b, with act(a) computed again instead of kept.",
    (Tensor("d_y_swi", "R h", text="Gradient of y_swi"), A, B, ACTIVATION),
    (Tensor("d_a", "R h"), Tensor("d_b", "R h", optional=UNGATED)),
    f"{BETWEEN}dB = dY * SiLU(A), dA = dY * B * SiLU'(A)",
    first="a b d_y_swi",
    before=_check_b,
    errors=NO_GATE,
)

# ---- in the kernels ------------------------------------------------------------------------------


def _limited(contract: Contract) -> Contract:
    """The contract of kernels, which were built for so many experts."""

    def after(given: Arguments) -> None:
        if contract.after is not None:
            contract.after(given)
        scores = given.get("logits", given.get("probs"))
        num_experts = given["num_experts"] if scores is None else scores.shape[1]
        k = given["topk_experts"].shape[1] if "topk_experts" in given else given.get("k", 1)
        checks.check_kernel_limits(num_experts, k)

    return replace(
        contract, after=after, errors=f"{contract.errors}, E > {checks.MAX_EXPERTS} or k > {checks.MAX_TOP_K}"
    )


GATING_IN_KERNELS = _limited(GATING)
GATING_WITH_LOSSES_IN_KERNELS = _limited(GATING_WITH_LOSSES)
GATING_BACKWARD_IN_KERNELS = _limited(GATING_BACKWARD)
LOAD_BALANCING_LOSS_IN_KERNELS = _limited(LOAD_BALANCING_LOSS)
ROUTER_Z_LOSS_IN_KERNELS = _limited(ROUTER_Z_LOSS)
DENSE_MAP_IN_KERNELS = _limited(DENSE_MAP)
BUILD_IN_KERNELS = _limited(BUILD)

# ---- as functions --------------------------------------------------------------------------------


def check_parts_of_rows(parts: tuple[Array, ...], gates: Array | None, dispatch: Dispatch, dtypes: Dtypes) -> None:
    """The parts (R, width) and, if there are any, the gates (L, k) belong to the Dispatch."""
    checks.check_dispatch(dispatch)
    if not parts:
        raise ValueError("parts is empty, but it must have at least one array")
    if gates is not None:
        checks.check_tensor("gates", gates, {"L": dispatch.L, "k": dispatch.k}, ("float32",))
    for number, part in enumerate(parts):
        checks.check_tensor(f"parts[{number}]", part, {"R": dispatch.R, "width": None}, dtypes)
        dtypes = (checks.dtype_of(part),)


def check_dense_map(dense_map: Array) -> None:
    """dense_map (L, E) int32."""
    checks.check_array("dense_map", dense_map, rank=2, dtypes=("int32",), contiguous=False)


def check_lengths(lengths: Array) -> None:
    """lengths (E,) int32, none negative, whose sum R fits the index structures."""
    checks.check_array("lengths", lengths, rank=1, dtypes=("int32",), contiguous=False)
    checks.check_not_negative("lengths", lengths)
    num_routed = int(lengths.sum(dtype="int64"))
    checks.check_int("R, the sum of the lengths,", num_routed, at_least=0, at_most=checks.MAX_ROUTED_ROWS)


def check_route_indices(dense_map: Array, offsets: Array, topk_experts: Array) -> None:
    """dense_map (L, E) and offsets (E + 1,) are those that the first two steps make of topk_experts (L, k)."""
    _check_map_of(dense_map, topk_experts)
    _check_offsets_of(offsets, dense_map)


def check_location_map(dense_map: Array, offsets: Array) -> None:
    """dense_map (L, E), and offsets (E + 1,) are those that the second step makes of it."""
    check_dense_map(dense_map)
    _check_offsets_of(offsets, dense_map)


def check_write_indices(dense_map: Array, location_map: Array, topk_experts: Array) -> None:
    """dense_map and location_map (L, E) are those that the steps before make of topk_experts (L, k)."""
    _check_map_of(dense_map, topk_experts)
    checks.check_array("location_map", location_map, rank=2, dtypes=("int32",), contiguous=False)
    checks.check_shape("location_map", location_map, {"L": dense_map.shape[0], "E": dense_map.shape[1]})
    routed = dense_map != EMPTY
    lengths = routed.sum(axis=0)
    valid_locations = copy_of(location_map)
    valid_locations[...] = lengths.cumsum() - lengths + routed.cumsum(axis=0) - routed
    checks.check_equal("location_map", location_map, valid_locations)


def _check_map_of(dense_map: Array, topk_experts: Array) -> None:
    """dense_map (L, E) is the one that the first step makes of topk_experts (L, k)."""
    check_dense_map(dense_map)
    num_tokens, num_experts = dense_map.shape
    checks.check_topk_experts(topk_experts, num_experts)
    checks.check_shape("topk_experts", topk_experts, {"L": num_tokens, "k": None})
    tokens = checks.numbers_of(topk_experts[:, 0])[:, None]  # (L, 1)
    valid_map = copy_of(dense_map)
    valid_map.fill(EMPTY)
    valid_map[tokens, topk_experts] = tokens
    checks.check_equal("dense_map", dense_map, valid_map)


def _check_offsets_of(offsets: Array, dense_map: Array) -> None:
    """offsets (E + 1,) are those that the second step makes of dense_map (L, E)."""
    checks.check_array("offsets", offsets, rank=1, dtypes=("int32",), contiguous=False)
    checks.check_shape("offsets", offsets, {"E + 1": dense_map.shape[1] + 1})
    valid_offsets = copy_of(offsets)
    valid_offsets[:1] = 0
    valid_offsets[1:] = (dense_map != EMPTY).sum(axis=0).cumsum()
    checks.check_equal("offsets", offsets, valid_offsets)


def tensors() -> dict[str, Tensor]:
    """Return every tensor of the stages by its name, which has the same axes and kind in all contracts."""
    contracts = [one for one in globals().values() if isinstance(one, Contract)]
    found = [one for contract in contracts for one in (*contract.arguments, *contract.results)]
    return {one.name: one for one in found if isinstance(one, Tensor)}
