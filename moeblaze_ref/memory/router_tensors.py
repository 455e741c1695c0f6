"""Tensors of a router and of a shared expert in plain torch, as rows of an account in order of birth.

They are those of ``nn.routers`` and ``nn.shared_expert``. ``memory.measure`` finds the same bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from moeblaze_ref.core.routers import Router, Shared
from moeblaze_ref.memory.tensors import Size, Tensor

Case = Any  # `accounting._Case`, whose module imports this one


def symbols_of(router: Router, shared: Shared | None) -> dict[str, Size]:
    """The sizes that only some layers have: G groups, of which a token keeps M, and s, the shared expert's width."""
    groups = {"G": router.groups, "M": router.groups_kept} if router.groups > 1 else {}
    values = groups | ({} if shared is None else {"s": shared.width})
    return {name: Size(name, value) for name, value in values.items()}


def lives(tensors: Iterable[Tensor], names: Sequence[str], until: str | None) -> list[Tensor]:
    """The tensors, of which those with these names live otherwise than in the system that they are taken from."""
    return [replace(tensor, until=until) if tensor.name in names else tensor for tensor in tensors]


def of_x(s: Case) -> Tensor:
    """The layer's input. A float32 product saves a wide copy, so x itself is kept only if something else saves it."""
    saved = s.shared or at_inputs(s) or not _casts_x(s)
    return Tensor("x", (s.L, s.d), s.dtype, until=None if saved else "out")


def _casts_x(s: Case) -> bool:
    return s.mixed and s.router.float32_product


# The router: `nn.routers.route` ---------------------------------------------------------------------------------------


def of_router(s: Case) -> list[Tensor]:
    """Rows of the router. What it returns, a Routing, holds logits, probabilities and gates to the layer's end."""
    scores = Tensor(_scores(s), (s.L, s.E), s.wide)
    return [*_logits(s), scores, *_choice(s), *_probabilities(s), *_gates(s)]


def _scores(s: Case) -> str:
    return "scores" if s.router.scores == "sigmoid" else "probs"


def _logits(s: Case) -> Iterator[Tensor]:
    if _casts_x(s):
        yield Tensor("x_wide", (s.L, s.d), s.wide)
        yield Tensor("wg_wide", (s.d, s.E), s.wide)
    elif s.mixed:
        yield Tensor("logits_narrow", (s.L, s.E), s.dtype, until="gates")
    gathered = s.router.scores == "softmax_of_chosen"  # and a gather saves what it takes from
    yield Tensor("logits", (s.L, s.E), s.wide, until=None if gathered else "out")


def _choice(s: Case) -> Iterator[Tensor]:
    """The k largest of what is compared: logits, scores or biased scores, of all groups or of the best."""
    in_groups = s.router.groups > 1
    if s.router.selection_bias:
        yield Tensor("biased_scores", (s.L, s.E), s.wide, until="compared" if in_groups else "topk_experts")
    if in_groups:
        yield from _best_groups(s, s.more["G"], s.more["M"])
    compared = "logits" if s.router.compares_logits else "scores"
    yield Tensor(f"sorted_{compared}", (s.L, s.E), s.wide, until="sorted_ids")
    yield Tensor("sorted_ids", (s.L, s.E), "int64", until="topk_experts")
    yield Tensor("topk_experts", (s.L, s.k), "int64")


def _best_groups(s: Case, G: Size, M: Size) -> Iterator[Tensor]:
    """Yield the tensors that find the best groups, and the compared scores, which are -inf outside these groups."""
    if s.router.group_score == "top2":
        yield Tensor("best_two", (s.L, G, 2), s.wide, until="group_scores")
        yield Tensor("best_two_ids", (s.L, G, 2), "int64", until="group_scores")
    yield Tensor("group_scores", (s.L, G), s.wide, until="compared")
    yield Tensor("all_groups", (s.L, G), "bool", until="lost_groups")
    yield Tensor("sorted_groups", (s.L, G), s.wide, until="sorted_group_ids")
    yield Tensor("sorted_group_ids", (s.L, G), "int64", until="kept_groups")
    yield Tensor("kept_groups", (s.L, M), "int64", until="lost_groups")
    yield Tensor("lost_groups", (s.L, G), "bool", until="compared")
    yield Tensor("compared", (s.L, s.E), s.wide, until="topk_experts")


def _probabilities(s: Case) -> Iterator[Tensor]:
    """Sigmoids over their sum, for the losses. A softmax needs no sum."""
    if s.router.scores == "sigmoid":
        yield Tensor("score_sums", (s.L, 1), s.wide)
        yield Tensor("probs", (s.L, s.E), s.wide, until="out")


def _gates(s: Case) -> Iterator[Tensor]:
    """Autograd keeps what a softmax returns, and what a quotient takes."""
    scaled = s.router.scale != 1.0
    at_end = None if at_inputs(s) and not s.mixed else "out"  # x times the gates saves them, or their narrow copy
    name, until = ("unscaled_gates", "gates") if scaled else ("gates", at_end)
    chosen = (s.L, s.k)
    if s.router.scores == "softmax_of_chosen":
        yield Tensor("chosen_logits", chosen, s.wide, until=name)
        until = None
    elif s.router.renormalize:
        yield Tensor(f"chosen_{_scores(s)}", chosen, s.wide)
        yield from _gate_sums(s)
    yield Tensor(name, chosen, s.wide, until=until)
    if scaled:
        yield Tensor("gates", chosen, s.wide, until=at_end)


def _gate_sums(s: Case) -> Iterator[Tensor]:
    """The sum that the chosen scores are divided by; with epsilon, another tensor."""
    if s.router.epsilon:
        yield Tensor("gate_sums", (s.L, 1), s.wide, until="gates")
        yield Tensor("gate_divisors", (s.L, 1), s.wide)
    else:
        yield Tensor("gate_sums", (s.L, 1), s.wide)


# Gates that multiply the experts' inputs: `nn.routers.weighed` --------------------------------------------------------


def at_inputs(s: Case) -> bool:
    """Return True if gates multiply the experts' inputs."""
    return s.router.weighs == "input"


def of_inputs(s: Case, until: str | None = "out") -> Iterator[Tensor]:
    """Rows between the router and experts that get L * k weighted tokens, each with a gate of one."""
    if s.mixed:
        yield Tensor("gates_of_x", (s.L, s.k), s.dtype)
    yield Tensor("weighted_x", (s.R, s.d), s.dtype, until=until)
    yield Tensor("ones", (s.R, 1), s.wide, until=until)


# The shared expert: `nn.shared_expert` --------------------------------------------------------------------------------


def with_shared(s: Case, tensors: Iterable[Tensor], hidden: Sequence[Tensor], routing_until: str) -> list[Tensor]:
    """The rows of a layer whose output is the sum of the chosen experts' and of a shared one's.

    Parameters
    ----------
    s : Case
    tensors : iterable of Tensor
        Of the layer without the shared expert.
    hidden : sequence of Tensor
        Those that autograd saves between the shared expert's products.
    routing_until : str
        The birth until which the layer holds what its router returns: of "routed_out" or of "out".
    """
    before = [_before_shared(tensor, routing_until) for tensor in tensors]
    names = {tensor.name: f"shared_{tensor.name}" for tensor in hidden}
    renamed = [replace(t, name=names[t.name], until=t.until and names[t.until]) for t in hidden]
    return [*before, *renamed, *_shared_output(s), Tensor("out", (s.L, s.d), s.dtype, until="out")]


def _before_shared(tensor: Tensor, routing_until: str) -> Tensor:
    """A row of the layer without a shared expert, whose output is not yet the whole."""
    if tensor.name == "out":
        return replace(tensor, name="routed_out")
    if tensor.until != "out":
        return tensor
    return replace(tensor, until=routing_until if tensor.name in ("logits", "probs", "gates") else "routed_out")


def _shared_output(s: Case) -> Iterator[Tensor]:
    gated = s.shared.gated
    yield Tensor("shared_y", (s.L, s.d), s.dtype, until=None if gated else "out")
    if gated:
        yield Tensor("shared_gate_logits", (s.L, 1), s.dtype, until="shared_gate")
        yield Tensor("shared_gate", (s.L, 1), s.dtype)
        yield Tensor("shared_gated_y", (s.L, s.d), s.dtype, until="out")
