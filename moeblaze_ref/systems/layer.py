"""The whole MoE layer, forward and backward, over the stages of any backend, and what is kept in between.

Source: MoEBlaze (arXiv 2601.05296), sections 3 and 5. The stages do the work; this file decides only
what survives from forward to backward, which is the memory wall. ``numpy_ref.layer``, ``numba_cuda.layer``
and ``raw_cuda.layer`` are this body with their own stages, behind the checks of `FORWARD` and `BACKWARD`.
The functions here check nothing, and call the functions of the stages that check nothing.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, NamedTuple, Protocol

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import take_columns
from moeblaze_ref.core.config import POLICIES, MoEConfig, is_gated
from moeblaze_ref.core.contract import INT32, Contract, Tensor, Value, bodies
from moeblaze_ref.core.stage_contracts import ACTIVATION, Dtypes
from moeblaze_ref.core.structures import HIDDEN, STRUCTURES, A_co, Array, Dispatch, Gating

# Tensors that each policy saves for a gated activation, besides x, the Dispatch and the gates. The
# backward reads a, b and y_swi and rebuilds the missing ones. `conventional` also saves tensors that
# plain autograd would save and this backward never reads: routed_x, act_a and y.
_OF_GATED = {
    "conventional": ("routed_x", "a", "b", "act_a", "y_swi", "y"),
    "paper": ("a", "b", "y_swi"),
    "minimal": ("a", "b"),
    "inputs": (),
}
assert _OF_GATED.keys() == POLICIES.keys()


@functools.cache
def intermediates(policy: str, activation: str) -> tuple[str, ...]:
    """Names of the tensors between x and out that a policy saves for the backward.

    Parameters
    ----------
    policy : str
        One of ``config.POLICIES``.
    activation : str
        One of ``config.ACTIVATIONS``.

    Returns
    -------
    tuple of str
        In order of birth, without x, the Dispatch and the gates. ``b`` and ``act_a`` are only saved of gated
        activations: without a gate, y_swi is act(a).

    Raises
    ------
    ValueError
        If there is no such policy or activation.

    Notes
    -----
    ``paper`` is MoEBlaze's Algorithm 1 for the gated activations, A, B and Y_swi, and A and Y_swi for the others. relu
    is the exception: ``paper`` and ``minimal`` save y_swi alone. Its slope is 1 where y_swi > 0 and 0 elsewhere, and
    relu(y_swi) = y_swi, so the backward takes y_swi for a and gives the same bits. relu2 saves a: its slope is
    2 relu(a), and y_swi would have to be rooted first.
    """
    kept = _OF_GATED[checks.check_name("policy", policy, POLICIES)]
    if activation == "relu" and policy in ("paper", "minimal"):
        return ("y_swi",)
    return kept if is_gated(activation) else tuple(name for name in kept if name not in ("b", "act_a"))


class MoEWeights(NamedTuple, Generic[A_co]):
    """The layer's parameters, all of one dtype."""

    wg: A_co  # (d, E) router
    w1: A_co  # (E, d, h)
    w2: A_co | None  # (E, d, h); None for the ungated activations
    w3: A_co  # (E, h, d)


class ExpertWeights(Protocol):
    """Weights that the experts' half of a layer needs, such as `MoEWeights`."""

    @property
    def w1(self) -> Array:
        """(E, d, h)."""

    @property
    def w2(self) -> Array | None:
        """(E, d, h); None for the ungated activations."""

    @property
    def w3(self) -> Array:
        """(E, h, d)."""


class RouterStage(NamedTuple):
    """The router's functions, without their checks. The classes below have no checks either."""

    forward: Callable[..., Array]
    input_gradient: Callable[..., Array]
    weight_gradient: Callable[..., Array]


class GatingStage(NamedTuple):
    """The functions of the stage gating."""

    forward: Callable[..., Gating]
    backward: Callable[..., Array]
    load_balancing_loss: Callable[..., Array]
    router_z_loss: Callable[..., Array]


class DispatchStage(NamedTuple):
    """The function of the stage dispatch."""

    build: Callable[..., Dispatch]


class ExpertUpStage(NamedTuple):
    """The functions of the stage expert_up."""

    forward: Callable[..., tuple[Array | None, Array | None, Array | None]]
    input_gradient: Callable[..., Array]
    weight_gradient: Callable[..., Array]


class ActivationStage(NamedTuple):
    """The nonlinearity alone, which only policy ``conventional`` stores."""

    act: Callable[..., Array]


class ExpertDownStage(NamedTuple):
    """The functions of the stage expert_down."""

    forward: Callable[..., Array]
    hidden_gradients: Callable[..., tuple[Array, Array | None, Array, Array]]
    weight_gradient: Callable[..., Array]


class CombineStage(NamedTuple):
    """The function of the stage combine that a layer calls."""

    forward: Callable[..., Array]


class Stages(NamedTuple):
    """A backend's stages as the layer calls them, and what lies between them."""

    router: RouterStage
    gating: GatingStage
    dispatch: DispatchStage
    expert_up: ExpertUpStage
    activation: ActivationStage
    expert_down: ExpertDownStage
    combine: CombineStage
    choice: "Choosing"
    output: "Output"
    gathered: "Gathered"

    def with_gating(self, **functions: Callable[..., Any]) -> "Stages":
        """Return the stages with other functions of gating, by name, such as a checking function."""
        return self._replace(gating=self.gating._replace(**functions))


# (stages, logits (L, E), k, renormalize, a routing (L, k) that is given or None) -> Choice
Choosing = Callable[[Stages, Array, int, bool, Array | None], "Choice"]

# (tokens (L, d), dispatch) -> the tokens as the experts' products gather them, which may be a copy
Gathered = Callable[[Array, Dispatch], Array]

# (stages, tensors, w3, dispatch, gates, kept) -> out (L, d)
Output = Callable[[Stages, dict[str, Array], Array, Dispatch, Array, tuple[str, ...]], Array]


def store_and_combine(
    stages: Stages, tensors: dict[str, Array], w3: Array, dispatch: Dispatch, gates: Array, kept: tuple[str, ...]
) -> Array:
    """The layer's output (L, d) from y_swi; y joins the ``tensors``, and y_swi leaves them unless it is kept."""
    tensors["y"] = stages.expert_down.forward(tensors["y_swi"], w3, dispatch)  # (R, d)
    if "y_swi" not in kept:
        del tensors["y_swi"]
    return stages.combine.forward(tensors["y"], gates, dispatch)


def as_they_are(tokens: Array, dispatch: Dispatch) -> Array:
    """The tokens themselves."""
    return tokens


def choose_in_steps(stages: Stages, logits: Array, k: int, renormalize: bool, topk_experts: Array | None) -> "Choice":
    """The choice and both losses, by the functions of gating one after the other."""
    probs, chosen, gates = stages.gating.forward(logits, k, renormalize)
    if topk_experts is not None:
        chosen, gates = topk_experts, _gates_of(probs, topk_experts, renormalize)
    losses = stages.gating.load_balancing_loss(probs, chosen), stages.gating.router_z_loss(logits)
    return Choice(chosen, gates, *losses)


def _gates_of(probs: Array, topk_experts: Array, renormalize: bool) -> Array:
    """The gates (L, k) of a choice that the router did not make."""
    gates = take_columns(probs, topk_experts)
    return gates / gates.sum(axis=1, keepdims=True) if renormalize else gates


_KINDS = (RouterStage, GatingStage, DispatchStage, ExpertUpStage, ActivationStage, ExpertDownStage, CombineStage)


def stages_of(*modules: ModuleType) -> Stages:
    """The stages of a backend whose modules need no options, in the order of `Stages`.

    The logits, which a router computes, are checked.
    """
    groups: Any = [bodies(kind, module) for kind, module in zip(_KINDS, modules, strict=True)]
    stages = Stages._make([*groups, choose_in_steps, store_and_combine, as_they_are])
    return stages.with_gating(forward=modules[1].forward)


@dataclass(frozen=True, eq=False)
class Saved:
    """Tensors that the forward saves for the backward: no weights, and no router probabilities.

    Parameters
    ----------
    x : array (L, d)
        The layer's input itself, not a copy.
    dispatch : Dispatch
        The routing; it is never decided again.
    gates : array (L, k)
    intermediates : dict of str to array
        The tensors that the policy saves, by the names of the function `intermediates`.
    activation, policy : str
    renormalize : bool
    """

    x: Array
    dispatch: Dispatch
    gates: Array
    intermediates: dict[str, Array]
    activation: str
    policy: str
    renormalize: bool

    def tensors(self) -> dict[str, Array]:
        """Every array that is kept, by name."""
        return {"x": self.x, **self.dispatch.arrays(), "gates": self.gates, **self.intermediates}

    @classmethod
    def of(
        cls, x: Array, tensors: dict[str, Array], k: int, activation: str, policy: str, renormalize: bool
    ) -> "Saved":
        """The inverse of `tensors`; of the ``tensors`` the intermediates are left."""
        dispatch = Dispatch(**{name: tensors.pop(name) for name in STRUCTURES}, k=k)
        return cls(x, dispatch, tensors.pop("gates"), tensors, activation, policy, renormalize)


class Choice(NamedTuple):
    """The router's choice of experts, its gates and its losses."""

    topk_experts: Array  # (L, k) int32
    gates: Array  # (L, k)
    load_balancing_loss: Array  # ()
    router_z_loss: Array  # ()


class Routed(NamedTuple):
    """The router's decision in the form that the experts take: a `Dispatch` and gates."""

    dispatch: Dispatch
    gates: Array  # (L, k)
    load_balancing_loss: Array  # ()
    router_z_loss: Array  # ()


class LayerOutput(NamedTuple):
    """Results of the forward."""

    out: Array  # (L, d)
    load_balancing_loss: Array  # ()
    router_z_loss: Array  # ()
    saved: Saved


class Gradients(NamedTuple):
    """Gradients from the backward; None for a gradient that was not wanted."""

    d_x: Array | None  # (L, d)
    d_wg: Array | None  # (d, E)
    d_w1: Array | None  # (E, d, h)
    d_w2: Array | None  # (E, d, h); None for the ungated activations too
    d_w3: Array | None  # (E, h, d)
    d_gates: Array  # (L, k); on the way to all others


# ---- what a layer takes --------------------------------------------------------------------------


def _check_forward(
    x: Array,
    weights: MoEWeights[Array],
    k: int,
    activation: str,
    policy: str,
    renormalize: bool,
    topk_experts: Array | None,
    dtypes: Dtypes,
) -> None:
    checks.check_name("policy", policy, POLICIES)
    _check_weights(x, weights, k, activation, dtypes)
    if topk_experts is not None:
        checks.check_topk_experts(topk_experts, weights.wg.shape[1])
        checks.check_shape("topk_experts", topk_experts, {"L": x.shape[0], "k": k})


def _check_backward(
    d_out: Array,
    saved: Saved,
    weights: MoEWeights[Array],
    overwrite: bool,
    wanted: Collection[str],
    dtypes: Dtypes,
    **d_losses: float | Array,
) -> None:
    checks.check_type("saved", saved, Saved)
    _check_weights(saved.x, weights, saved.dispatch.k, saved.activation, dtypes)
    L, d = saved.x.shape
    checks.check_tensor("d_out", d_out, {"L": L, "d": d}, (checks.dtype_of(saved.x),))
    for name, value in d_losses.items():
        checks.check_scalar(name, value)
    for name in wanted:
        checks.check_name("gradient", name, Gradients._fields)


def _check_weights(x: Array, weights: MoEWeights[Array], k: int, activation: str, dtypes: Dtypes) -> None:
    """x (L, d), the weights, k and the activation describe one layer."""
    checks.check_type("weights", weights, MoEWeights)
    checks.check_second_projection("w2", weights.w2, is_gated(activation), activation)
    checks.check_tensor("x", x, {"L": None, "d": None}, dtypes)
    num_tokens, d = x.shape
    same = (checks.dtype_of(x),)
    checks.check_tensor("wg", weights.wg, {"d": d, "E": None}, same)
    num_experts = weights.wg.shape[1]
    checks.check_tensor("w1", weights.w1, {"E": num_experts, "d": d, "h": None}, same)
    h = weights.w1.shape[2]
    if weights.w2 is not None:
        checks.check_tensor("w2", weights.w2, {"E": num_experts, "d": d, "h": h}, same)
    checks.check_tensor("w3", weights.w3, {"E": num_experts, "h": h, "d": d}, same)
    # The configuration checks the sizes, k and R.
    MoEConfig(L=num_tokens, d=d, h=h, E=num_experts, k=k, activation=activation, dtype=checks.dtype_of(x))


FORWARD = Contract(
    "Return the output of one MoE layer: route, dispatch, expert MLPs, combine.",
    (
        Tensor("x", "L d", text="Tokens; L = 0 is valid"),
        Value("weights", "MoEWeights", "Of the dtype of ``x``, finite"),
        Value("k", "int", "Experts per token, 1..E"),
        ACTIVATION,
        Value("policy", "str", "What to keep for the backward, one of ``config.POLICIES``; it changes no result"),
        Value("renormalize", "bool", "Divide the chosen gates of a token by their sum"),
        Tensor(
            "topk_experts",
            "L k",
            INT32,
            "A routing to replay in place of the router's own choice; the gates are still the router's",
            optional="for the router's choice",
        ),
    ),
    (Value("output", "LayerOutput", "out (L, d), load_balancing_loss, router_z_loss, saved"),),
    "MoEBlaze, sections 2, 3.1 and 5 (Algorithm 1)",
    whole=_check_forward,
    errors=", k > E, an activation or policy is unknown, w2 is missing or superfluous, a replayed expert is out of "
    "range or named twice by a token",
)
BACKWARD = Contract(
    "Return every gradient of the layer, from those of its output and of its two losses.",
    (
        Tensor("d_out", "L d", text="Gradient of the output, of the dtype of x"),
        Value(
            "saved",
            "Saved",
            "From ``forward``; it is not changed, so a second backward gives the same again, unless ``overwrite``",
        ),
        Value("weights", "MoEWeights", "Those of the forward, unchanged since"),
        Value("d_load_balancing_loss", "float or array ()", "Gradient of that loss"),
        Value("d_router_z_loss", "float or array ()", "Gradient of that loss"),
        Value(
            "overwrite",
            "bool",
            "The intermediates of ``saved`` are overwritten and released: a second backward "
            "with them raises RuntimeError",
        ),
        Value("wanted", "collection of str", "Names in `Gradients`; the others are not computed"),
    ),
    (
        Value(
            "gradients",
            "Gradients",
            "d_x, d_wg, d_w1, d_w2 (None if ungated), d_w3, d_gates: the same bits under every policy. d_gates is the "
            "gradient of the gates in ``saved``, after renormalisation if there was one",
        ),
    ),
    "MoEBlaze, sections 3.2 and 5; the gates as in SonicMoE",
    whole=_check_backward,
    errors=", a loss gradient is no finite number, a wanted gradient is unknown",
)

# ---- what it does --------------------------------------------------------------------------------


def forward(
    stages: Stages,
    x: Array,
    weights: MoEWeights[Array],
    k: int,
    activation: str,
    policy: str,
    renormalize: bool = False,
    topk_experts: Array | None = None,
) -> LayerOutput:
    """One MoE layer over a backend's stages, of checked arguments: see `FORWARD`."""
    dispatch, gates, load_balancing_loss, router_z_loss = route(stages, x, weights.wg, k, renormalize, topk_experts)
    out, kept = run_experts(stages, x, weights, dispatch, gates, activation, policy)
    saved = Saved(x, dispatch, gates, kept, activation, policy, renormalize)
    return LayerOutput(out, load_balancing_loss, router_z_loss, saved)


def route(
    stages: Stages, x: Array, wg: Array, k: int, renormalize: bool = False, topk_experts: Array | None = None
) -> Routed:
    """The half of the forward that every system shares: who goes where, by which gates.

    wg is (d, E); the other arguments are as in `FORWARD`. The probabilities (L, E) are not in the result:
    `router_gradients` computes them again.
    """
    chosen, *others = choose(stages, x, wg, k, renormalize, topk_experts)
    return Routed(stages.dispatch.build(chosen, wg.shape[1]), *others)


def choose(
    stages: Stages, x: Array, wg: Array, k: int, renormalize: bool = False, topk_experts: Array | None = None
) -> Choice:
    """The router alone: which experts, by which gates. Arguments as in `route`.

    The logits (L, E) are dropped here, and so are the probabilities where there are any.
    """
    return stages.choice(stages, stages.router.forward(x, wg), k, renormalize, topk_experts)


def run_experts(
    stages: Stages, x: Array, weights: ExpertWeights, dispatch: Dispatch, gates: Array, activation: str, policy: str
) -> tuple[Array, dict[str, Array]]:
    """The half of the forward after the router: every token through its experts.

    The weights are those of the Dispatch's experts. A partial Dispatch gives the sums of the rows that are here. The
    gates are (L, k) float32. The other arguments are as in `FORWARD`.

    Returns
    -------
    out : array (L, d)
    kept : dict of str to array
        The intermediates that the policy keeps; each other one is dropped after its last use.
    """
    kept = intermediates(policy, activation)
    tensors = {"routed_x": x[dispatch.expert_token_indices]} if "routed_x" in kept else {}  # the first memory wall
    stores = {*kept, "y_swi"} & {*HIDDEN}
    tokens = stages.gathered(x, dispatch)
    projections = stages.expert_up.forward(tokens, weights.w1, weights.w2, dispatch, activation, stores=stores)
    del tokens
    tensors |= dict(zip(HIDDEN, projections, strict=True))
    del projections
    if "act_a" in kept:
        tensors["act_a"] = stages.activation.act(tensors["a"], activation)
    out = stages.output(stages, tensors, weights.w3, dispatch, gates, kept)
    # There is no y where the product sums, and no b where a has both projections.
    return out, {name: tensors[name] for name in kept if tensors.get(name) is not None}


def backward(
    stages: Stages,
    d_out: Array,
    saved: Saved,
    weights: MoEWeights[Array],
    d_load_balancing_loss: float | Array = 0.0,
    d_router_z_loss: float | Array = 0.0,
    overwrite: bool = False,
    wanted: Collection[str] = Gradients._fields,
) -> Gradients:
    """Every gradient of the layer over a backend's stages, of checked arguments: see `BACKWARD`.

    Raises
    ------
    RuntimeError
        If an earlier backward has overwritten the intermediates of ``saved``.

    Notes
    -----
    Live tensors of size (R, h) or (R, d), step by step, and where they die; a weight gradient is born at each ``->``:

    1. a and b, saved or computed again, become d_a and d_b, in place if nothing else uses them; gate * y_swi is born.
       Saved routed_x, act_a, y_swi and y die here; where y_swi alone is saved, it stands for a, and becomes d_a.
    2. gate * y_swi -> d_w3, and dies.
    3. d_a, d_b -> d_x: the tiled versions store (R, d) rows, whole or some columns after the others, which
       die within.
    4. d_a -> d_w1, and dies; d_b -> d_w2, and dies.

    MoEBlaze, sections 3.2 and 5; the gates as in SonicMoE.
    """
    d_x, _, d_w1, d_w2, d_w3, d_gates = expert_gradients(stages, d_out, saved, weights, overwrite, wanted)
    chosen = saved.dispatch.token_expert_indices.reshape(saved.gates.shape)  # (L, k)
    d_losses = d_load_balancing_loss, d_router_z_loss
    d_x, d_wg = router_gradients(
        stages, d_x, d_gates, saved.x, weights.wg, chosen, saved.renormalize, *d_losses, wanted
    )
    return Gradients(d_x, d_wg, d_w1, d_w2, d_w3, d_gates)


def expert_gradients(
    stages: Stages,
    d_out: Array,
    saved: Saved,
    weights: ExpertWeights,
    overwrite: bool = False,
    wanted: Collection[str] = Gradients._fields,
) -> Gradients:
    """The half of the backward before the router: d_wg is None, and d_x that through the experts alone.

    The weights and a partial Dispatch are as in `run_experts`; the other arguments and the error are as in `backward`.
    """

    def if_wanted(name: str, gradient: Callable[..., Array], *operands: Any) -> Array | None:
        return gradient(*operands) if name in wanted else None

    up, down, dispatch = stages.expert_up, stages.expert_down, saved.dispatch
    private = overwrite or not intermediates(saved.policy, saved.activation)
    a, b, y_swi = _rebuild(stages, saved, weights)
    if overwrite:
        saved.intermediates.clear()
    d_out = stages.gathered(d_out, dispatch)
    d_a, d_b, gated_y, d_gates = down.hidden_gradients(
        d_out, saved.gates, a, b, weights.w3, dispatch, saved.activation, y_swi, private
    )
    del a, b, y_swi
    d_w3 = if_wanted("d_w3", down.weight_gradient, gated_y, d_out, dispatch)
    del gated_y, d_out
    d_x = if_wanted("d_x", up.input_gradient, d_a, d_b, weights.w1, weights.w2, dispatch)
    x = stages.gathered(saved.x, dispatch) if {"d_w1", "d_w2"} & {*wanted} else None
    d_w1 = if_wanted("d_w1", up.weight_gradient, d_a, x, dispatch)
    del d_a
    d_w2 = None if d_b is None else if_wanted("d_w2", up.weight_gradient, d_b, x, dispatch)
    return Gradients(d_x, None, d_w1, d_w2, d_w3, d_gates)


def _rebuild(stages: Stages, saved: Saved, weights: ExpertWeights) -> tuple[Array, Array | None, Array | None]:
    """a, b and y_swi: kept ones as they are, or a and b computed again; the backward rebuilds y_swi from those two."""
    kept, names = saved.intermediates, intermediates(saved.policy, saved.activation)
    if not names:
        tokens, dispatch = stages.gathered(saved.x, saved.dispatch), saved.dispatch
        up = stages.expert_up.forward
        a, b, y_swi = up(tokens, weights.w1, weights.w2, dispatch, saved.activation, stores=("a", "b"))
        assert a is not None  # `stores` names it
        return a, b, y_swi
    if not kept:
        raise RuntimeError("an earlier backward has overwritten what the forward kept: run the forward again")
    if "a" not in names:  # relu: its slope, and y_swi itself, follow from y_swi
        return kept["y_swi"], None, None
    return kept["a"], kept.get("b"), kept.get("y_swi")


def router_gradients(
    stages: Stages,
    d_x: Array | None,
    d_gates: Array | None,
    x: Array,
    wg: Array,
    topk_experts: Array,
    renormalize: bool = False,
    d_load_balancing_loss: float | Array = 0.0,
    d_router_z_loss: float | Array = 0.0,
    wanted: Collection[str] = Gradients._fields,
) -> tuple[Array | None, Array | None]:
    """Return the whole d_x (L, d) and d_wg (d, E), where wanted: the last step of every system's backward.

    ``d_x`` is the gradient through the experts, None where it is not wanted; it is overwritten. ``d_gates`` (L, k),
    which only d_x and d_wg need, is that of the gates that `route` returned for ``topk_experts`` (L, k): the logits are
    computed again, the choice is not. x is (L, d), wg (d, E); ``renormalize`` is as in `route`. The other arguments are
    as in `BACKWARD`. A gradient that is not wanted is None.
    """
    if "d_x" not in wanted and "d_wg" not in wanted:
        return None, None
    logits = stages.router.forward(x, wg)  # (L, E)
    d_losses = d_load_balancing_loss, d_router_z_loss
    d_logits = stages.gating.backward(d_gates, logits, topk_experts, renormalize, *d_losses)  # (L, E)
    del logits
    d_wg = stages.router.weight_gradient(d_logits, x) if "d_wg" in wanted else None
    return stages.router.input_gradient(d_logits, wg, d_x) if "d_x" in wanted else None, d_wg
