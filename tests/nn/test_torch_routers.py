"""Each router equals that of transformers, in values and gradients, and every field of its description matters."""

from dataclasses import replace

import pytest
import torch
from transformers_routers import ROUTERS_OF, THEIRS, D, E, K

from moeblaze_ref.core.routers import ROUTERS, SCORES, Router, of_config
from moeblaze_ref.nn import routers
from moeblaze_ref.verify.cases import relative_error

L = 40
FAINT = 20  # tokens whose logits are so small that an epsilon beside their scores matters
FAINT_LOGIT = {1e-20: -46.0, 1e-6: -13.0}  # by epsilon
IN_ITS_DTYPE = ("gpt_oss", "lfm2_moe")  # transformers casts to float32 in the others
every_family = pytest.mark.parametrize("family", ROUTERS)


class Both:
    """The router of transformers and ours, with the same weights, on the same tokens."""

    def __init__(self, family, dtype=torch.float32):
        self.theirs = THEIRS[family].made("router").to(dtype)
        self.router = ROUTERS_OF[family]
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(L, D, generator=generator).to(dtype)
        self.biases = 0.1 * torch.randn(2, E, generator=generator).to(dtype)  # of the choice and of the logits
        self.d_dense = torch.randn(L, E, generator=generator)  # gradient of the weight of each expert
        with torch.no_grad():
            self.theirs.weight[:, 0] = 1.0
            self.x[:FAINT, 0] = FAINT_LOGIT.get(self.router.epsilon, 0.0)
            if hasattr(self.theirs, "e_score_correction_bias"):
                self.theirs.e_score_correction_bias.copy_(self.biases[0])
            if self.router.logit_bias:
                self.theirs.bias.copy_(self.biases[1])

    def expected(self):
        """Logits, the weights (L, E) of all experts, 0 where not chosen, and their gradients, of transformers."""
        x = self.x.clone().requires_grad_()
        returned = self.theirs(x, self.biases[0]) if hasattr(self.theirs, "use_expert_bias") else self.theirs(x)
        if len(returned) == 2:  # Llama 4: the weights of all experts, then the logits
            dense, logits = returned
        else:
            logits, weights, chosen = returned
            dense = torch.zeros(L, E, dtype=weights.dtype).scatter(1, chosen, weights)
        leaves = [x, self.theirs.weight] + ([self.theirs.bias] if self.router.logit_bias else [])
        return logits, dense, self._gradients(dense, leaves)

    def found(self, router=None):
        """The same of ours, under another router if one is given."""
        router = self.router if router is None else router
        x, wg = self.x.clone().requires_grad_(), self.theirs.weight.detach().T.clone().requires_grad_()
        selection_bias = self.biases[0] if router.selection_bias else None
        logit_bias = self.biases[1].clone().requires_grad_() if router.logit_bias else None
        routing = routers.route(x, wg, K, router, logit_bias, selection_bias)
        dense = torch.zeros(L, E, dtype=routing.gates.dtype).scatter(1, routing.topk_experts, routing.gates)
        d_x, d_wg, *d_bias = self._gradients(dense, [x, wg] + ([logit_bias] if router.logit_bias else []))
        return routing.logits, dense, [d_x, d_wg.T, *d_bias]

    def _gradients(self, dense, leaves):
        return torch.autograd.grad(dense, leaves, self.d_dense.to(dense.dtype))

    def errors(self, router=None):
        """Relative errors of the weights and of every gradient; infinite for a gradient that one side lacks."""
        (_, dense, gradients), (_, our_dense, our_gradients) = self.expected(), self.found(router)
        if len(gradients) != len(our_gradients):
            return [float("inf")]
        pairs = zip([our_dense, *our_gradients], [dense, *gradients], strict=True)
        return [relative_error(ours.detach(), theirs.detach()) for ours, theirs in pairs]


# ---- equal to transformers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in ROUTERS] + [(family, torch.float64) for family in IN_ITS_DTYPE],
)
def test_choice_weights_and_gradients_are_those_of_transformers(family, dtype):
    both = Both(family, dtype)
    chosen = both.expected()[1] != 0
    assert (chosen.sum(dim=1) == K).all()
    assert torch.equal(both.found()[1] != 0, chosen)
    assert max(both.errors()) < (1e-12 if dtype == torch.float64 else 1e-5)


@every_family
def test_a_configuration_has_the_numbers_and_the_family_the_rest(family):
    assert of_config(THEIRS[family].configuration()) == ROUTERS_OF[family]


@every_family
def test_a_narrow_product_is_rounded_as_in_transformers(family):
    both = Both(family, torch.bfloat16)
    logits = both.expected()[0].float()
    other = replace(both.router, float32_product=not both.router.float32_product)
    assert relative_error(both.found()[0].detach(), logits.detach()) < 1e-5
    assert relative_error(both.found(other)[0].detach(), logits.detach()) > 1e-4


@every_family
def test_our_weights_stay_in_float32_where_some_of_theirs_are_rounded(family):
    both = Both(family, torch.bfloat16)
    rounded = family in ("qwen3_moe", "olmoe", "gpt_oss", "lfm2_moe", "llama4")
    assert both.expected()[1].dtype == (torch.bfloat16 if rounded else torch.float32)
    assert both.found()[1].dtype == torch.float32


# ---- every field matters --------------------------------------------------------------------


def changes(router):
    """Other values of the fields that decide weights, one field at a time."""
    yield from ({"scores": scores} for scores in SCORES if scores != router.scores)
    yield {"renormalize": not router.renormalize, "epsilon": 0.0}
    yield {"epsilon": 0.0 if router.epsilon else 0.01}
    yield {"scale": 1.01 * router.scale}
    yield from ({name: not getattr(router, name)} for name in ("selection_bias", "logit_bias"))
    yield {"groups": 2} if router.groups == 1 else {"groups": 2 * router.groups}
    if router.groups > 1:
        yield {"groups_kept": router.groups_kept + 1}
        yield {"group_score": "max" if router.group_score == "top2" else "top2"}


def mutants():
    """Families with a change of one field, as far as a Router allows it."""
    for family in ROUTERS:
        router = ROUTERS_OF[family]
        for change in changes(router):
            try:
                yield family, replace(router, **change)
            except ValueError:
                continue


@pytest.mark.parametrize(("family", "router"), [*mutants()])
def test_a_change_of_one_field_is_found(family, router):
    assert max(Both(family).errors(router)) > 1e-4


def test_most_fields_of_most_families_can_change():
    assert len([*mutants()]) > 60


# ---- the choice, and what is refused --------------------------------------------------------


def test_ties_go_to_the_lower_expert_and_to_the_lower_group():
    router = Router("sigmoid", groups=3, groups_kept=2, group_score="top2")
    logits = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 6])
    assert routers.choose(logits, 3, router).topk_experts.tolist() == [[2, 3, 4], [0, 1, 2]]


def test_a_choice_can_be_replayed():
    logits, given = torch.randn(5, 4, dtype=torch.float64), torch.tensor([[3, 1]] * 5, dtype=torch.int32)
    router = Router("sigmoid", renormalize=True, selection_bias=True)
    routing = routers.choose(logits, 2, router, torch.zeros(4), given)
    scores = logits.sigmoid()[:, [3, 1]]
    assert torch.equal(routing.topk_experts, given.long())
    assert torch.equal(routing.gates, scores / scores.sum(dim=1, keepdim=True))


def test_probabilities_of_sigmoids_sum_to_one():
    probs = routers.choose(torch.randn(5, 4), 2, Router("sigmoid")).probs
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(5))


@pytest.mark.parametrize(
    ("router", "biases", "message"),
    [
        (
            Router(),
            {"selection_bias": torch.zeros(4)},
            "selection_bias is given, but the router has selection_bias=False",
        ),
        (Router(selection_bias=True), {}, "selection_bias is missing, but the router has selection_bias=True"),
        (Router(logit_bias=True), {}, "logit_bias is missing, but the router has logit_bias=True"),
        (
            Router(selection_bias=True),
            {"selection_bias": torch.zeros(3)},
            r"selection_bias has shape \(3,\), .* \(E=4\)",
        ),
        (Router(groups=3), {}, "groups is 3, but it must divide the 4 experts"),
    ],
)
def test_what_does_not_fit_is_named(router, biases, message):
    with pytest.raises(ValueError, match=message):
        routers.route(torch.zeros(2, 3), torch.zeros(3, 4), 2, router, **biases)


# ---- the selection bias ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_the_selection_bias_rises_below_the_mean_load_and_falls_above(dtype):
    bias, loads = torch.tensor([0.5, 0.0, -0.5, 0.25]), torch.tensor([9, 3, 4, 0], dtype=dtype)
    updated = routers.update_selection_bias(bias, loads, 0.125)
    assert updated.tolist() == [0.375, 0.125, -0.5, 0.375] and updated.dtype == torch.float32
    assert bias.tolist() == [0.5, 0.0, -0.5, 0.25]


def test_updates_of_the_selection_bias_balance_the_loads():
    logits = torch.randn(256, 8, generator=torch.Generator().manual_seed(1)) + torch.linspace(-1.0, 1.0, 8)
    bias, spreads = torch.zeros(8), []
    for _ in range(200):
        chosen = routers.choose(logits, 2, Router("sigmoid", selection_bias=True), bias).topk_experts
        loads = torch.bincount(chosen.flatten(), minlength=8)
        spreads.append(int(loads.max() - loads.min()))
        bias = routers.update_selection_bias(bias, loads, 0.005)
    assert spreads[0] > 80 and max(spreads[-20:]) < 16


@pytest.mark.parametrize(
    ("loads", "rate", "message"),
    [
        (torch.zeros(3), 0.1, r"loads has shape \(3,\), but it must be \(E=4\)"),
        (torch.zeros(4), -0.1, "rate is -0.1, but it must be >= 0.0"),
    ],
)
def test_a_wrong_update_is_refused(loads, rate, message):
    with pytest.raises(ValueError, match=message):
        routers.update_selection_bias(torch.zeros(4), loads, rate)
