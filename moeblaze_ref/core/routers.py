"""Descriptions of routers, which choose experts and gates from logits: one class, and an instance a model family.

The specification is ``numpy_ref.routers``, the torch version ``nn.routers``. What each family does was read in the
models of transformers 5.23; ``docs/routers.md`` has it as a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from moeblaze_ref.core import checks

SCORES = {
    "softmax": "probabilities of all experts",
    "softmax_of_chosen": "the k largest logits are chosen, then their softmax is the gates",
    "sigmoid": "a number for each expert by itself",
}
GROUP_SCORES = {"max": "its best expert", "top2": "the sum of its two best experts"}
WEIGHS = {"output": "gates multiply the experts' outputs", "input": "gates multiply the experts' inputs"}


@dataclass(frozen=True)
class Router:
    """How logits (L, E) become k experts for each token, and their gates.

    Parameters
    ----------
    scores : str
        One of ``SCORES``.
    renormalize : bool
        Divide the chosen scores of a token by their sum.
    epsilon : float
        Added to that sum.
    scale : float
        Multiplies the gates.
    selection_bias : bool
        A bias (E,), which no gradient trains, is added to the scores for the choice alone.
    logit_bias : bool
        A trained bias (E,) is added to the logits.
    groups, groups_kept : int
        Neighbouring experts form ``groups`` groups of equal size. A token's experts are all in its ``groups_kept`` best
        groups.
    group_score : str
        What makes a group good, one of ``GROUP_SCORES``.
    weighs : str
        Where the gate multiplies, one of ``WEIGHS``.
    float32_product : bool
        x and wg are cast to float32 before their product. Otherwise the product has their dtype.

    Raises
    ------
    ValueError
        If a field is not allowed, or does not fit another one.
    TypeError
        If a number is none.
    """

    scores: str = "softmax"
    renormalize: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    selection_bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_score: str = "max"
    weighs: str = "output"
    float32_product: bool = False

    def __post_init__(self) -> None:
        checks.check_name("scores", self.scores, SCORES)
        checks.check_name("group_score", self.group_score, GROUP_SCORES)
        checks.check_name("weighs", self.weighs, WEIGHS)
        checks.check_within("epsilon", self.epsilon, at_least=0.0)
        checks.check_positive("scale", self.scale)
        checks.check_int("groups", self.groups, at_least=1)
        checks.check_int("groups_kept", self.groups_kept, at_least=1, at_most=self.groups)
        if self.epsilon and not self.renormalize:
            raise ValueError(f"epsilon is {self.epsilon}, but without renormalize there is no sum: it must be 0")
        if self.scores == "softmax_of_chosen":
            self._check_softmax_of_chosen()

    def _check_softmax_of_chosen(self) -> None:
        """Check that a softmax over the chosen logits, which sums to one, has no option of scores of all experts."""
        allowed: dict[str, Any] = {"renormalize": False, "selection_bias": False, "groups": 1}
        for name, valid in allowed.items():
            if (value := getattr(self, name)) != valid:
                raise ValueError(f"{name} is {value}, but with scores 'softmax_of_chosen' it must be {valid}")

    def check_sizes(self, num_experts: int, k: int) -> None:
        """Check that k of E experts can be chosen in these groups.

        Raises
        ------
        ValueError
            If ``groups`` does not divide E, a group is too small for its score, or fewer than k experts are kept.
        """
        checks.check_k(k, num_experts)
        if num_experts % self.groups:
            raise ValueError(f"groups is {self.groups}, but it must divide the {num_experts} experts")
        per_group = num_experts // self.groups
        if self.group_score == "top2" and per_group < 2:
            raise ValueError(f"group_score is 'top2', but a group has {per_group} expert: it must have at least 2")
        if k > (available := self.groups_kept * per_group):
            raise ValueError(
                f"k is {k}, but groups_kept = {self.groups_kept} groups have {available} experts: k must be "
                f"1..{available}"
            )

    def check_bias(self, name: str, bias: object) -> None:
        """Check that ``logit_bias`` or ``selection_bias``, by ``name``, is there exactly if the router adds one.

        Raises
        ------
        ValueError
            If it is not.
        """
        added = getattr(self, name)
        if (bias is not None) != added:
            raise ValueError(f"{name} is {'missing' if added else 'given'}, but the router has {name}={added}")

    @cached_property
    def plain(self) -> bool:
        """True if this router is a softmax of all logits and the k largest, as the router's kernels compute it.

        They compute logits in float32, so ``float32_product`` makes no difference there.
        """
        return self == Router(renormalize=self.renormalize, float32_product=self.float32_product)

    @property
    def compares_logits(self) -> bool:
        """True if the logits decide the choice. Scores that order experts like the logits may round to ties."""
        return not self.selection_bias and (self.groups == 1 or self.group_score == "max")


@dataclass(frozen=True)
class Shared:
    """An expert that sees every token.

    Parameters
    ----------
    width : int
        Its hidden width.
    gated : bool
        A sigmoid of x times a vector multiplies its output.

    Raises
    ------
    ValueError, TypeError
        If the width is no positive integer.
    """

    width: int
    gated: bool = False

    def __post_init__(self) -> None:
        checks.check_int("width", self.width, at_least=1)


@dataclass(frozen=True)
class Family:
    """The router of a model family.

    Parameters
    ----------
    model : str
        The model whose numbers ``router`` has.
    router : Router
    shared : str
        Its shared expert: "none", "plain", or "gated" by a sigmoid.
    from_config : dict
        Fields of ``router`` that a model's config.json decides, with the name there. All others are in the code.
    """

    model: str
    router: Router
    shared: str = "none"
    from_config: Mapping[str, str] = field(default_factory=dict)


_GROUPS = {"groups": "n_group", "groups_kept": "topk_group"}
_SCALED = {"scale": "routed_scaling_factor"}
_RENORMALIZED = {"renormalize": "norm_topk_prob"}
_OF_DEEPSEEK_V3 = {**_RENORMALIZED, **_SCALED, **_GROUPS}
_DEEPSEEK_V3 = Router(
    "sigmoid",
    renormalize=True,
    epsilon=1e-20,
    scale=2.5,
    selection_bias=True,
    groups=8,
    groups_kept=4,
    group_score="top2",
    float32_product=True,
)
_ONE_GROUP: dict[str, Any] = {"groups": 1, "groups_kept": 1}

# The numbers of DeepSeek-V2 are those of config_236B.json in deepseek-ai/DeepSeek-V3 on GitHub, those of LFM2 are
# transformers' defaults. All other numbers from a config.json are those of plan/models: see SOURCES.md there.
FAMILIES = {
    "mixtral": Family("Mixtral-8x7B", Router(renormalize=True)),
    "qwen3_moe": Family("Qwen3-30B-A3B", Router(renormalize=True), from_config=_RENORMALIZED),
    "olmoe": Family("OLMoE-1B-7B", Router(), from_config=_RENORMALIZED),
    "gpt_oss": Family("gpt-oss-20b", Router("softmax_of_chosen", logit_bias=True)),
    "deepseek_v2": Family(
        "DeepSeek-V2",
        Router(scale=16.0, groups=8, groups_kept=3, float32_product=True),
        "plain",
        {**_SCALED, **_GROUPS},
    ),
    "deepseek_v3": Family("DeepSeek-V3", _DEEPSEEK_V3, "plain", _OF_DEEPSEEK_V3),
    "glm4_moe": Family("GLM-4.5", replace(_DEEPSEEK_V3, **_ONE_GROUP), "plain", _OF_DEEPSEEK_V3),
    "kimi_k2": Family("Kimi-K2", replace(_DEEPSEEK_V3, scale=2.827, **_ONE_GROUP), "plain", _OF_DEEPSEEK_V3),
    "lfm2_moe": Family(
        "LFM2-8B-A1B",
        Router("sigmoid", renormalize=True, epsilon=1e-6, selection_bias=True),
        from_config={**_RENORMALIZED, **_SCALED, "selection_bias": "use_expert_bias"},
    ),
    "llama4": Family("Llama-4-Scout", Router("sigmoid", weighs="input"), "plain"),
}
ROUTERS = {name: family.router for name, family in FAMILIES.items()}
_OTHER_NAMES = {"llama4_text": "llama4"}


def named(router: Router | str) -> Router:
    """Return a Router, or the one of this name in ``ROUTERS``.

    Raises
    ------
    ValueError
        If there is none; the message proposes the nearest name.
    """
    if isinstance(router, Router):
        return router
    if router in SCORES:
        raise ValueError(f"unknown router {router!r}: it says how to score, so write Router(scores={router!r})")
    return ROUTERS[checks.check_name("router", router, ROUTERS)]


def of_config(config: Any) -> Router:
    """Return the router of a model, with the numbers of its configuration.

    Parameters
    ----------
    config : object
        Has the names of a config.json as attributes, such as a configuration of transformers.

    Raises
    ------
    ValueError
        If ``config.model_type`` is of no family that is known.
    """
    name = _OTHER_NAMES.get(config.model_type, config.model_type)
    family = FAMILIES[checks.check_name("model_type", name, FAMILIES)]
    read = {mine: getattr(config, theirs) for mine, theirs in family.from_config.items()}
    if getattr(config, "topk_method", None) == "greedy":  # of DeepSeek-V2: the groups play no part
        read |= _ONE_GROUP
    if not read.get("renormalize", True):
        read["epsilon"] = 0.0
    return replace(family.router, **read)
