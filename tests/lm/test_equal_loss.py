"""Equal loss: a model with our layers trains as one with the oracle's, and the verdict can tell when it does not."""

import json
import math
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import pytest
import small_lm
import torch
from helpers import assert_told_apart_in_grey, unmarked
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.legend import Legend
from small_lm import moeblaze
from torch import nn

from moeblaze_ref import lm
from moeblaze_ref.core import documents, provenance, source_hashes
from moeblaze_ref.core.units import MIB
from moeblaze_ref.lm import (
    checkpoint,
    curves,
    data,
    document,
    drift,
    equal_loss,
    evidence,
    evidence_plots,
    presets,
    report,
    wall,
)
from moeblaze_ref.lm.equal_loss import BOUND, ORACLES, ORDERS, ReorderedOracle
from moeblaze_ref.lm.evidence import Request
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.run import CHECKPOINT
from moeblaze_ref.lm.train import NonFinite, Trainer, TrainSettings
from moeblaze_ref.nn import oracle
from moeblaze_ref.nn.systems import system

CONFIG = replace(small_lm.CONFIG, h=128)  # as wide as a block of megablocks
SETTINGS = replace(small_lm.SETTINGS, config=CONFIG, steps=12)
STEPS = 5

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(kind, moe="moeblaze", **options):
    return getattr(equal_loss, kind)(SETTINGS, data.python_help(), STEPS, moe=moe, **options)


# The layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["replayed", "free"])
def test_our_layers_train_as_the_oracles(kind):
    seen, layers = [], []

    def ours(*sizes):
        layers.append(system("moeblaze")(*sizes))
        return layers[-1]

    found = compare(kind, ours, on_step=lambda step, loss: seen.append((step, loss)))
    assert found["passed"]
    assert seen == list(enumerate(found["loss"]["oracle"], start=1)) and len(seen) == STEPS
    # Losses need not differ: where torch multiplies in the order of our kernels, both round alike.
    assert [layer.executor for layer in layers] == ["simt"] * CONFIG.layers
    assert found["loss"]["oracle"][-1] < found["loss"]["oracle"][0]
    if kind == "replayed":
        reference = found["loss"]["oracle"]
        assert found["oracles"] == {name: max(equal_loss.gaps(found["loss"][name], reference)) for name in ORACLES[1:]}
        assert 0 < max(found["oracles"].values()) < BOUND


# So many tokens and such a learning rate that a token is nearly tied, and rounding decides on it, within some steps.
TIED = TrainSettings(
    LMConfig(d=16, h=16, E=8, k=2, layers=2, heads=2, sequence=32), 40, batch=16, learning_rate=0.1, final_fraction=0.1
)


def test_two_layers_of_one_function_part_where_rounding_first_changes_a_choice():
    """Beside the oracle, plain torch that reserves every expert as many rows as there are tokens: none is dropped."""
    roomy = system("capacity", capacity_factor=TIED.config.E / TIED.config.k)
    found = equal_loss.free(TIED, data.python_help(), TIED.steps, moe=roomy)
    for name, first in found["first_change"].items():
        changed = found["changed"][name]
        assert 1 < first["step"] <= TIED.steps and not any(changed[: first["step"] - 1])
        assert changed[first["step"] - 1] == sum(first["tokens"]) > 0 and len(first["tokens"]) == TIED.config.layers
    first = found["first_change"]["moeblaze"]["step"]
    assert found["verdict"]["loss"]["at"] < first and found["verdict"]["first_gradients"]["passed"]
    assert found["after"]["oracle"]["worst"] > found["verdict"]["loss"]["worst"]
    assert f"| moeblaze and oracle | {first} |" in report.summary(records()["free"] | found)


class Late(oracle.OracleMoE):
    """Right in the first step, a thousandth too large from then on."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.calls = 0

    def forward(self, x, topk_experts=None):
        out, routing = super().forward(x, topk_experts)
        self.calls += 1
        return out * (1 if self.calls == 1 else 1.001), routing


@pytest.mark.parametrize("kind", ["replayed", "free"])
def test_the_gradients_that_are_compared_are_the_first_steps(kind):
    assert compare(kind, moe=Late)["verdict"]["first_gradients"]["worst"] == 0


def test_later_steps_are_compared_from_the_oracles_weights(monkeypatch):
    """A fault that begins after the first step hardly moves the loss; the gradients at the same weights show it."""
    monkeypatch.setattr(equal_loss, "EVERY", 2)
    verdict = compare("replayed", moe=Late)["verdict"]
    assert verdict["loss"]["worst"] < 1e-4 and verdict["first_gradients"]["passed"]
    gradients = verdict["same_weights_gradients"]
    assert not gradients["passed"] and gradients["worst"] > 1e-4 and gradients["at"].startswith("step ")
    found = compare("replayed")
    assert [row["step"] for row in found["same_weights"]["moeblaze"]] == [2, 4]
    assert found["same_weights"].keys() == found["loss"].keys() - {"oracle"} and found["passed"]
    assert "same_weights_loss" in found["verdict"]
    shown = report.summary(records()["replayed"] | found)
    assert shown.count("gradients from the oracle's weights") == shown.count("loss from the oracle's weights") == 4


def test_the_comparison_at_the_same_weights_moves_no_run(monkeypatch):
    with_it, without = (
        (monkeypatch.setattr(equal_loss, "EVERY", every), compare("replayed", moe="oracle"))[1] for every in (1, 100)
    )
    assert with_it["loss"] == without["loss"] and not without["same_weights"]["moeblaze"]
    assert "same_weights_loss" not in without["verdict"] and "same_weights_loss" in with_it["verdict"]
    assert {row["gradients"] for row in with_it["same_weights"]["moeblaze"]} == {0.0}


def test_the_weights_of_the_comparison_are_the_oracles():
    """Two runs of other weights on the same windows: from the first one's weights they are one."""
    run, other = (Trainer(replace(SETTINGS, seed=seed, order_seed=0), data.python_help()) for seed in (0, 1))
    (found,) = equal_loss._from_same_weights(run, {"other": other}).values()
    assert found["loss"] == found["gradients"] == 0


def test_looking_ahead_sees_the_next_step_and_stays():
    run, other = (Trainer(replace(SETTINGS, seed=seed), data.python_help()) for seed in (0, 1))
    weights = dict(run.model.named_parameters())
    ahead = run.look_ahead(weights)
    assert all(one.grad is None for one in weights.values()) and run.step == 0
    elsewhere = run.look_ahead(dict(other.model.named_parameters()))
    assert elsewhere.loss != ahead.loss
    step = run.advance()
    assert step.loss == ahead.loss and all(map(torch.equal, run.chosen, ahead.chosen))
    cut = min(1, SETTINGS.gradient_norm / step.gradient_norm)
    for name, weight in run.model.named_parameters():
        torch.testing.assert_close(weight.grad, cut * ahead.gradients[name])


def test_a_gradient_that_is_no_number_is_the_worst():
    reference = {"a": torch.ones(2), "b": torch.ones(2)}
    worst, at = equal_loss.worst_gap({"a": torch.tensor([1.0, math.nan]), "b": torch.zeros(2)}, reference)
    assert math.isnan(worst) and at == "a"
    rows = [{"step": step, "loss": 0.0, "gradients": gap, "at": "a"} for step, gap in ((10, 1.0), (20, math.nan))]
    verdict = equal_loss.compare_same_weights(rows)
    assert verdict["same_weights_gradients"]["at"] == "step 20, a" and verdict["same_weights_loss"]["passed"]
    assert not verdict["same_weights_gradients"]["passed"]


class Spoiled(oracle.OracleMoE):
    """The oracle, whose output is what ``spoil`` makes of its experts and its routing."""

    def __init__(self, *sizes, spoil, **options):
        super().__init__(*sizes, **options)
        self.spoil = spoil

    def forward(self, x, topk_experts=None):
        routing = oracle.route(x, self.wg, self.k, self.renormalize, topk_experts)
        mixed = lambda routing: oracle.experts(x, routing, self.w1, self.w2, self.w3, self.activation)
        return self.spoil(mixed, routing), routing


class OtherChoice(oracle.OracleMoE):
    """The router of every layer takes the worst experts, and says so."""

    def forward(self, x, topk_experts=None):
        if topk_experts is None:
            topk_experts = oracle.top_k(-(x @ self.wg), self.k)
        return super().forward(x, topk_experts)


def wrong_expert(mixed, routing):
    chosen = routing.topk_experts.clone()
    chosen[0, 0] = next(e for e in range(routing.logits.shape[1]) if e not in chosen[0])
    return mixed(routing._replace(topk_experts=chosen))


def dropped_row(mixed, routing):
    gates = routing.gates.clone()
    gates[-1, -1] = 0
    return mixed(routing._replace(gates=gates))


FAULTS = {
    "an output that is a little too large": lambda mixed, routing: mixed(routing) * (1 + 1e-4),
    "one token's first choice is computed by the next expert": wrong_expert,
    "the last token's second expert is left out": dropped_row,
    "the gates send nothing back": lambda mixed, routing: mixed(routing._replace(gates=routing.gates.detach())),
    "a layer that does nothing": lambda mixed, routing: 0 * mixed(routing),
}


@pytest.mark.parametrize("kind", ["replayed", "free"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_that_is_a_little_wrong_is_caught(kind, fault):
    assert not compare(kind, moe=partial(Spoiled, spoil=FAULTS[fault]))["passed"]


def test_a_router_that_chooses_other_experts_is_caught():
    found = compare("free", moe=OtherChoice)
    assert found["first_change"]["moeblaze"]["step"] == 1 and not found["passed"]
    assert found["after"]["oracle"]["worst"] > BOUND
    assert compare("replayed", moe=OtherChoice)["passed"]  # its choice is not asked for there


# The oracle in another order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("axes", ORDERS)
def test_a_reordered_oracle_is_the_same_function_in_other_roundings(axes, activation):
    torch.manual_seed(0)
    layer, other = oracle.OracleMoE(48, 40, 4, 2, activation), ReorderedOracle(48, 40, 4, 2, activation, axes=axes)
    other.load_state_dict(layer.state_dict())
    x, d_out = torch.randn(2, 33, 48)
    results = []
    for one in (layer, other):
        given = x.clone().requires_grad_()
        out, _ = one(given)
        out.backward(d_out)
        results.append([out.detach(), given.grad, *(parameter.grad for parameter in one.parameters())])
    gaps = [float((mine - ref).norm() / ref.norm()) for ref, mine in zip(*results, strict=True)]
    assert max(gaps) < 1e-5 and max(gaps) > 0
    assert torch.equal(other(x)[1].topk_experts, layer(x)[1].topk_experts)


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="unknown axes 'k'"):
        ReorderedOracle(8, 8, 2, 1, axes="k")


# What is compared -----------------------------------------------------------------------------------------------------

GOOD = {"worst": 0.0, "at": "head.weight", "bound": BOUND, "passed": True}
LOSSES = {
    "oracle": [5.0, 4.0, 3.0, 2.0],
    "oracle, d backwards": [5.0, 4.0, 3.0, 2.002],
    "oracle, h backwards": [5.0, 4.0, 3.003, 2.0],
    "oracle, dh backwards": [5.0, 4.0, 3.0, 2.0],
}


def compared(ours, changed=(0, 0, 1, 7), gradients=GOOD):
    return equal_loss.compare_free(LOSSES | {"moeblaze": ours}, changed, gradients)


def test_after_the_first_change_all_gaps_are_known():
    found = compared([5.0, 4.0, 3.003, 2.001])
    assert found["passed"] and found["verdict"]["loss"]["worst"] == 0
    assert found["after"]["oracle"] == {"mean": pytest.approx(0.00075), "worst": pytest.approx(0.001)}
    assert found["after"]["oracle, h backwards"] == {"mean": pytest.approx(0.00025), "worst": pytest.approx(0.0005)}
    assert found["after"].keys() == set(ORACLES) and len(found["after_oracles"]) == 6
    between = found["after_oracles"]["oracle, d backwards | oracle, h backwards"]
    assert between == pytest.approx({"mean": 0.001, "worst": 0.001}, rel=1e-2)


@pytest.mark.parametrize(
    ("ours", "changed", "passed"),
    [
        ([5.0, 4.0, 3.0, 2.0], (0, 0, 0, 0), True),
        ([5.0, 4.0, 3.0, 2.0001], (0, 0, 0, 0), False),  # nothing but rounding parts them
        ([5.0, 4.0001, 3.0, 2.0], (0, 0, 1, 7), False),  # before the change
        ([5.0, 4.0, 2.9999, 2.0039], (0, 0, 1, 7), True),  # near one oracle alone
        ([5.0, 4.0, 3.0, 2.005], (0, 0, 1, 7), False),  # at worst further from each than any two of them
        ([5.0, 4.0, 3.006, 2.0039], (0, 0, 1, 7), False),  # not at worst, but in the mean
        ([5.0, 4.0, math.nan, 2.0], (0, 0, 1, 7), False),
        ([5.0, math.nan, 3.0, 2.0], (0, 0, 1, 7), False),
    ],
)
def test_the_verdict_on_free_routing(ours, changed, passed):
    assert compared(ours, changed)["passed"] == passed


def test_a_run_must_be_near_one_oracle_in_the_mean_and_at_worst():
    pairs = {"a | b": {"mean": 0.1, "worst": 0.5}, "a | c": {"mean": 0.2, "worst": 0.4}}
    near, far = {"mean": 0.2, "worst": 0.5}, {"mean": 9.0, "worst": 9.0}
    assert equal_loss.is_among({"a": far, "b": near}, pairs)
    assert not equal_loss.is_among({"a": near | {"mean": 0.21}, "b": near | {"worst": 0.51}}, pairs)


def test_gradients_of_the_first_step_are_compared_while_every_token_has_the_oracles_experts():
    bad = GOOD | {"worst": 1e-4, "passed": False}
    assert not compared([5.0, 4.0, 3.0, 2.0], gradients=bad)["passed"]
    found = compared([5.0, 4.0, 3.0, 2.0], changed=(1, 0, 0, 0), gradients=bad)
    assert found["passed"] and found["verdict"].keys() == {"loss"}


@pytest.mark.parametrize("wrong", [1 + 2e-5, 0.0, math.nan])
def test_one_wrong_gradient_is_found_by_name(wrong):
    model, other = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        one(torch.ones(5, 3)).square().sum().backward()
    assert equal_loss.compare_gradients(model, other)["passed"]
    model[1].weight.grad *= wrong
    found = equal_loss.compare_gradients(model, other)
    assert not found["passed"] and (found["at"] == "1.weight" or math.isnan(wrong))


def test_the_worst_step_is_named():
    assert equal_loss.compare_losses([0.0, 3e-6, 1e-6]) == {"worst": 3e-6, "at": 2, "bound": BOUND, "passed": True}
    assert not any(equal_loss.compare_losses(gaps)["passed"] for gaps in ([0.0, 1.1e-5], [math.nan, 0.0]))


def test_a_token_has_changed_if_its_set_of_experts_has():
    reference = [torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)] * 2
    chosen = [torch.tensor(ids) for ids in ([[1, 0], [2, 3], [2, 1]], [[0, 1], [3, 1], [0, 2]])]
    assert equal_loss.changed_tokens(chosen, reference) == [0, 2]


@pytest.mark.parametrize("kind", ["replayed", "free"])
@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        (SETTINGS, 0, "steps is 0, but it must be 1..12"),
        (SETTINGS, 13, "steps is 13, but it must be 1..12"),
        (replace(SETTINGS, precision="bfloat16"), 2, "precision is bfloat16, but"),
    ],
)
def test_what_cannot_be_compared_is_refused(kind, settings, steps, message):
    with pytest.raises(ValueError, match=message):
        getattr(equal_loss, kind)(settings, data.python_help(), steps)


def test_products_are_exact_and_the_precision_is_put_back():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with equal_loss.exact_products():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


# A trainer's choice ---------------------------------------------------------------------------------------------------


def test_a_trainer_hands_out_its_choice_and_takes_anothers():
    first, same, other = (Trainer(replace(SETTINGS, seed=seed), data.python_help()) for seed in (0, 0, 1))
    first.advance(), other.advance()
    assert [tuple(chosen.shape) for chosen in first.chosen] == [(32, 2)] * 2 and first.chosen[0].dtype == torch.int32
    assert equal_loss.changed_tokens(first.chosen, other.chosen) != [0, 0]
    same.advance(other.chosen)
    assert all(map(torch.equal, same.chosen, other.chosen)) and same.losses != first.losses


def test_the_order_of_the_text_has_a_seed_of_its_own():
    first, same, other = (
        Trainer(replace(SETTINGS, seed=3, order_seed=seed), data.python_help()) for seed in (None, 3, 4)
    )
    for one in (same, other):
        assert all(map(torch.equal, one.model.parameters(), first.model.parameters()))
    assert first.advance() == same.advance() != other.advance()
    with pytest.raises(ValueError, match="order_seed is -1"):
        replace(SETTINGS, order_seed=-1)


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A preset that trains in no time, and training losses averaged over few steps."""
    settings = replace(SETTINGS, config=replace(CONFIG, layers=1, E=3), precision="bfloat16", learning_rate=1e-3)
    monkeypatch.setitem(presets.SETTINGS, "tiny", settings)
    monkeypatch.setattr(curves, "WINDOW", 3)


def test_the_runs_differ_in_what_their_names_say(small):
    base = presets.preset("tiny")
    settings = {name: curves.settings_of(name, base) for name in curves.RUNS}
    assert settings["oracle"] == base and settings["moeblaze"] == replace(base, layer="moeblaze")
    assert settings["oracle-other-order"] == replace(base, order_seed=1) and base.seed != 1
    assert [settings[f"capacity-{factor}"].layer_options["capacity_factor"] for factor in (1.0, 1.25)] == [1.0, 1.25]
    with pytest.raises(ValueError, match="unknown run 'orcale'. Did you mean 'oracle'"):
        curves.settings_of("orcale", base)


def test_runs_are_trained_by_name_and_collected(small, texts, tmp_path):
    request = Request(device="cpu", data=texts, out=tmp_path / "runs", runs=("oracle", "capacity-1.0"), steps=6)
    begun = evidence.gather("curves", request)
    assert begun["passed"] is begun["verdict"] is None and begun["runs"].keys() == {"oracle", "capacity-1.0"}
    done = evidence.gather("curves", replace(request, runs=tuple(curves.RUNS)))
    assert done["runs"].keys() == curves.RUNS.keys() and done["unfinished"] == []
    assert {name: done["runs"][name] for name in begun["runs"]} == begun["runs"]  # they had come to their end
    assert evidence.gather("curves", replace(request, runs=())) == done
    for name, run in done["runs"].items():
        assert run["steps"] == 6 and run["training"]["step"] == [3, 6] and run["validation"]["step"] == [0, 6]
        assert run["validation"]["loss"][1] < run["validation"]["loss"][0] < 7
        assert (run["dropped_share"] is not None) == name.startswith("capacity")
    dropped = [done["runs"][f"capacity-{factor}"]["dropped_share"] for factor in (1.0, 1.25)]
    assert dropped[1] < dropped[0] < 0.5
    losses = {name: run["validation"]["loss"][-1] for name, run in done["runs"].items()}
    assert {name: end["last"] for name, end in done["ends"].items()} == losses
    assert len(set(losses.values())) >= 4
    assert report.summary(done).count("\n| moeblaze |") == 1


def test_a_folder_of_another_run_is_refused(small, texts, tmp_path):
    request = Request(device="cpu", data=texts, out=tmp_path, runs=("oracle",), steps=3)
    evidence.gather("curves", request)
    kept = (tmp_path / "oracle" / CHECKPOINT).read_bytes()
    (tmp_path / "oracle").rename(tmp_path / "moeblaze")
    message = "moeblaze/checkpoint.safetensors is of another run: its settings.layer is 'oracle', but here it is 'moeb"
    for runs in ((), ("moeblaze",)):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            evidence.gather("curves", replace(request, runs=runs))
    assert (tmp_path / "moeblaze" / CHECKPOINT).read_bytes() == kept
    (tmp_path / "moeblaze").rename(tmp_path / "oracle")
    with pytest.raises(checkpoint.CheckpointError, match="its settings.steps is 3, but here it is 4"):
        evidence.gather("curves", replace(request, runs=(), steps=4))
    (texts / "0.txt").write_text("another text")
    message = "oracle/checkpoint.safetensors is of another run: its text is"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        evidence.gather("curves", replace(request, runs=()))


def curve(*losses):
    return {"step": list(range(0, 10 * len(losses), 10)), "loss": list(losses)}


def run_of(*losses, steps=20):
    return {"steps": steps, "training": curve(*losses), "validation": curve(*losses)}


def logged(run):
    """A run with what else its log holds."""
    return run | {"tokens_per_second": 9.0, "peak_bytes": None, "dropped_share": None}


RUNS = {"oracle": run_of(5.0, 3.0, 2.0), "oracle-other-order": run_of(5.0, 3.2, 1.9), "moeblaze": run_of(5.0, 2.9, 2.1)}


def test_the_verdict_on_whole_runs():
    found = curves.compare_curves(RUNS, 20)
    assert found["passed"] and found["unfinished"] == ["megablocks", "capacity-1.0", "capacity-1.25"]
    assert found["verdict"]["validation"]["moeblaze"] == pytest.approx(
        {"mean": 0.1, "worst": 0.1, "at": 20, "within": True}
    )
    assert found["verdict"]["training"]["oracle-other-order"] == pytest.approx(
        {"mean": 0.15, "worst": 0.2, "at": 10, "within": True}
    )
    assert found["ends"]["moeblaze"] == {"lowest": 2.1, "at": 20, "last": 2.1, "second_half": 2.1}


def test_the_gap_of_every_finished_run_is_held_against_luck_and_ours_alone_decides():
    runs = RUNS | {"megablocks": run_of(5.0, 3.3, 2.0), "capacity-1.0": run_of(5.0, 9.0, steps=10)}
    verdict = curves.compare_curves(runs, 20)["verdict"]["validation"]
    assert {name: gap["within"] for name, gap in verdict.items()} == {
        "oracle-other-order": True, "moeblaze": True, "megablocks": False
    }  # fmt: skip
    assert curves.compare_curves(runs, 20)["passed"]
    rows = report.summary(records()["curves"] | {"runs": {name: logged(run) for name, run in runs.items()}})
    assert "| validation | megablocks | 0.1500 | 0.3000 | 10 | FAIL |" in rows
    assert "| validation | moeblaze | 0.1000 | 0.1000 | 20 | pass |" in rows
    assert "| validation | oracle-other-order | 0.1500 | 0.2000 | 10 | is the measure |" in rows


def test_a_run_that_overfits_has_its_lowest_loss_before_its_last():
    found = curves.end(run_of(5.0, 3.0, 2.0, 1.0, 2.5, steps=40))
    assert found == {"lowest": 1.0, "at": 30, "last": 2.5, "second_half": 1.75}
    runs = RUNS | {"moeblaze": run_of(5.0, 1.5, 2.25)}
    rows = report.summary(records()["curves"] | {"runs": {name: logged(run) for name, run in runs.items()}})
    assert "| moeblaze | 20 | 1.5000 | 10 | 2.2500 | 2.2500 | +0.2500 |  |  |" in rows
    assert "| oracle | 20 | 2.0000 | 20 | 2.0000 | 2.0000 |  |  |  |" in rows


def test_a_log_in_short_has_means_of_losses_the_median_speed_and_the_peak(monkeypatch):
    monkeypatch.setattr(curves, "WINDOW", 2)
    steps = [
        {"step": step, "loss": loss, "tokens_per_second": speed, "peak_bytes": peak, "dropped_share": share}
        for step, loss, speed, peak, share in [
            (1, 5.0, 1.0, 7, 0.5), (2, 4.0, 30.0, 9, 0.1), (3, 3.0, 20.0, 8, 0.1), (4, 1.0, 10.0, 8, 0.1),
            (5, 9, 15.0, 8, 0.2),
        ]
    ]  # fmt: skip
    held_out = [{"step": 0, "validation_loss": 6.0}, {"step": 4, "validation_loss": 3.5}]
    assert curves.summarise([held_out[0], *steps[:4], held_out[1], steps[4]]) == {
        "steps": 5,
        "training": {"step": [2, 4], "loss": [4.5, 2.0]},
        "validation": {"step": [0, 4], "loss": [6.0, 3.5]},
        "tokens_per_second": 15.0,
        "peak_bytes": 9,
        "dropped_share": pytest.approx(0.2),
    }


@pytest.mark.parametrize(
    ("losses", "wrong"),
    [((5.0, 2.75, 2.0), "worst"), ((5.0, 3.19, 2.19), "mean"), ((5.0, math.nan, 2.0), "mean")],
)
@pytest.mark.parametrize("loss", ["training", "validation"])
def test_a_run_further_from_the_oracle_than_another_order_of_text_is_caught(loss, losses, wrong):
    ours = RUNS["moeblaze"] | {loss: curve(*losses)}
    found = curves.compare_curves(RUNS | {"moeblaze": ours}, 20)
    of_loss = found["verdict"][loss]
    assert found["passed"] is False and not of_loss["moeblaze"]["within"]
    assert not of_loss["moeblaze"][wrong] <= of_loss["oracle-other-order"][wrong]


@pytest.mark.parametrize("missing", curves.COMPARED)
def test_the_verdict_waits_for_the_runs_that_it_needs(missing):
    halfway = RUNS | {missing: run_of(5.0, 3.0, steps=10)}
    for runs in (halfway, {name: run for name, run in RUNS.items() if name != missing}):
        found = curves.compare_curves(runs, 20)
        assert found["passed"] is found["verdict"] is None and missing in found["unfinished"]


# The command ----------------------------------------------------------------------------------------------------------


def test_the_names_that_the_command_lists_are_all_there_are():
    names = set(lm.EVIDENCE)
    for known in (evidence.KINDS, report.REPORTS, evidence_plots.PICTURES, document.PICTURED):
        assert set(known) == names
    assert {document.kind_of(block) for block in document.RECORDS} == names
    assert set(evidence_plots.COLORS) == {*curves.RUNS, *ORACLES}


def test_the_command_records_what_it_finds(small, texts, tmp_path):
    record = tmp_path / "new" / "record.json"
    known = ("--steps", 3, "--device", "cpu", "--data", texts)
    done = moeblaze("evidence", "free", *known, "--record", record, "--json")
    assert done.exit_code == 0, done.output
    found = evidence.load(record, "free")
    assert found["settings"]["precision"] == "float32" and found["settings"]["steps"] == 12 and found["steps"] == 3
    assert {name: found[name] for name in json.loads(done.stdout)} == json.loads(done.stdout)
    assert found["commit"] and len(found["text"]) == 16 and len(found["loss"]["moeblaze"]) == 3
    shown = moeblaze("evidence", "replayed", *known)
    assert shown.exit_code == 0 and "| loss | " in shown.stdout and " pass |" in shown.stdout


def test_the_command_fails_where_the_losses_differ(small, texts, monkeypatch):
    real, zeros = equal_loss.replayed, partial(Spoiled, spoil=FAULTS["a layer that does nothing"])
    monkeypatch.setitem(evidence.KINDS, "replayed", evidence._step_by_step(lambda *a, **o: real(*a, **o, moe=zeros)))
    done = moeblaze("evidence", "replayed", "--steps", 2, "--device", "cpu", "--data", texts)
    assert done.exit_code == 1 and "FAIL" in done.stdout


def test_the_command_stops_at_a_loss_that_is_not_finite(small, texts, monkeypatch):
    stop = Mock(side_effect=NonFinite("step 1: loss nan"))
    monkeypatch.setitem(evidence.KINDS, "free", evidence._step_by_step(stop))
    done = moeblaze("evidence", "free", "--device", "cpu", "--data", texts)
    assert done.exit_code == 1 and "error: step 1: loss nan" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fre",), "unknown kind of evidence 'fre'. Did you mean 'free'"),
        (("free", "--preset", "lm-smal"), "Did you mean 'lm-small'"),
        (("replayed", "--steps", 0), "steps is 0, but it must be >= 1"),
        (("curves", "--out", "OUT", "--steps", 2), "steps is 2, but it must be >= 3"),
        (("free", "--device", "gpu"), "unknown device 'gpu'"),
        (("free", "--data", "/nowhere"), "/nowhere is not a folder"),
        (("free", "--run", "oracle"), "--out and --run apply only to curves"),
        (("memory", "--steps", 3), "out, run and steps are of other kinds than memory"),
        (("memory", "--out", "OUT"), "out, run and steps are of other kinds than memory"),
        (("memory",), "the largest step that fits a GPU, but the device is cpu"),
        (("curves",), "curves keeps its runs in a folder: name it with --out"),
        (("curves", "--out", "OUT", "--run", "orcale"), "unknown run 'orcale'. Did you mean 'oracle'"),
        (("curves", "--out", "OUT"), "OUT holds no run yet, but it must have at least one of oracle, "),
        (("free", "--record", "/dev/null/file.json"), "/dev/null"),
    ],
)
def test_the_command_says_what_is_allowed_and_writes_nothing(arguments, message, small, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"--device": "cpu", "--data": texts, "--record": "record.json"}
    given = [part for name, value in options.items() if name not in arguments for part in (name, value)]
    done = moeblaze("evidence", *arguments, *given)
    assert done.exit_code == 2 and message in done.output, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"texts"}


# What is shown --------------------------------------------------------------------------------------------------------


def record_of(kind, **fields):
    """A record of ``kind`` as the command writes it."""
    head = {"kind": kind, "preset": "tiny", "settings": asdict(SETTINGS), "text": "0" * 16, "steps": 4}
    return provenance.environment() | head | fields


KEPT, PEAK = int(3.4 * MIB), int(3.75 * MIB)  # bytes of a token
ROWS = [wall.Row(name, L, 8, KEPT * L, PEAK * L, 1.0 * L) for name in wall.CONTENDERS for L in (8, 16)]
ROWS += [wall.Row(wall.OURS, 24, 8, KEPT * 24, PEAK * 24, 24.0)]
ROWS += [wall.Row(name, 32, 8) for name in wall.CONTENDERS if name != "moeblaze, inputs"]


def records():
    losses = LOSSES | {"moeblaze": [5.0, 4.0, 3.0029, 2.0]}
    near = [loss * (1 + 2e-7) for loss in losses["oracle"]]
    alike = dict.fromkeys(losses, near) | {"oracle": losses["oracle"]}
    verdict = {"loss": equal_loss.compare_losses([1e-7] * 4), "first_gradients": GOOD}
    changed = {name: [0, 0, 1, 7] for name in losses if name != "oracle"}
    first = {name: {"step": 3, "tokens": [0, 1]} for name in changed}
    runs = {name: logged(run) for name, run in RUNS.items()}
    return {
        "replayed": record_of(
            "replayed", loss=alike, verdict=verdict, oracles=dict.fromkeys(ORACLES[1:], 2e-7), passed=True
        ),
        "free": record_of("free", loss=losses, changed=changed, first_change=first, **compared(losses["moeblaze"])),
        "curves": record_of("curves", runs=runs, **curves.compare_curves(RUNS, 20)) | {"steps": 20},
        "memory": record_of("memory", **wall.summarise(ROWS)),
    }


def stored(folder, name, found):
    """The path of a file of results that holds a record."""
    path = folder / "results" / f"train_{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))
    return path


def block(name, paths):
    """A page of one block, filled from its records."""
    return document.fill(f"<!-- begin {name} -->\n<!-- end {name} -->", paths)


@pytest.mark.parametrize("kind", lm.EVIDENCE)
def test_a_record_becomes_a_block_and_a_picture(kind, tmp_path):
    assert documents.NOTHING in block(kind, {kind: [tmp_path / "absent.json"]})
    path = stored(tmp_path, kind, records()[kind])
    text = block(kind, {kind: [path]})
    assert f"](images/train_{kind}.png)" in text and "- device: " in text and " pass" in text and "FAIL" not in text
    written = evidence_plots.write(evidence.load(path, kind), documents.picture_of(path))
    assert written == tmp_path / "images" / f"train_{kind}.png" and written.stat().st_size > 10_000


def test_a_verdict_that_fails_is_said_to():
    failed = {"replayed": GOOD | {"passed": False, "worst": 1.0}}
    found = records()["replayed"] | {"verdict": {"loss": failed["replayed"], "first_gradients": GOOD}}
    assert report.summary(found).count("FAIL") == 1
    found = records()["free"] | {"after": {"oracle": {"mean": 1.0, "worst": 1.0}}}
    assert report.summary(found).endswith("to each other: FAIL.")
    found = records()["curves"]
    found["runs"]["moeblaze"] = logged(run_of(5.0, 9.0, 2.0))
    assert report.summary(found).count("FAIL") == 2
    found = records()["memory"] | wall.summarise([*ROWS, wall.Row("megablocks", 32, 8, 1, 1, 1.0)])
    assert report.summary(found).count("FAIL") == 1


def test_the_first_change_and_the_first_gap_beyond_the_bound_are_named():
    found = records()["free"]
    assert "| moeblaze | 3 | 0, 1 | step 3 |" in report.summary(found)
    assert "No token has other experts in the first 2 steps." in report.summary(found)
    at_once = {name: {"step": 1, "tokens": [0, 1]} for name in found["changed"]}
    summary = report.summary(found | {"first_change": at_once})
    assert "there is no step before it to compare" in summary and "worst relative gap" not in summary


def test_a_picture_without_a_change_has_room_for_one_token():
    found = records()["free"]
    found["changed"] = {name: [0] * 4 for name in found["changed"]}
    found["first_change"] = dict.fromkeys(found["changed"])
    _, tokens = evidence_plots.free(found).axes
    assert tokens.get_ylim() == (0, 1)


def test_the_first_change_is_named_inside_the_picture():
    for step in (1, 4):
        found = records()["free"]
        found["first_change"]["moeblaze"]["step"] = step
        figure = evidence_plots.free(found)
        FigureCanvasAgg(figure).draw()
        gap = figure.axes[0]
        (words,) = [text for text in gap.texts if "first token" in text.get_text()]
        left, right = words.get_window_extent().intervalx
        assert gap.bbox.x0 <= left and right <= gap.bbox.x1


def test_every_layer_has_its_largest_step_beside_its_costs_at_one_size():
    found = records()["memory"]
    lines = report.summary(found).splitlines()
    assert "This is the largest L that was tried with every layer and that all of them made." in lines[2]
    assert "| oracle | 16 | 1.00 | 54 | 60 | 16 | 16 |" in lines
    assert f"| {wall.OURS} | 24 | 1.50 | 54 | 60 | 16 | 16 |" in lines
    assert "| moeblaze, inputs | 16 or more | 1.00 | 54 | 60 | 16 | 16 |" in lines
    peaks, walls = evidence_plots.memory(found).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in peaks.lines}
    assert lines.keys() == wall.CONTENDERS.keys()
    assert lines[wall.OURS] == ([8, 16, 24], pytest.approx([PEAK * L / 2**30 for L in (8, 16, 24)]))
    assert [bar.get_width() for bar in walls.patches] == list(found["largest"].values())
    assert [text.get_text() for text in walls.get_yticklabels()] == list(wall.CONTENDERS)
    assert [text.get_text() for text in walls.texts] == ["16"] * 5 + ["24", "16 or more"]


def test_a_record_of_another_kind_is_refused(tmp_path):
    path = stored(tmp_path, "free", records()["replayed"])
    with pytest.raises(ValueError, match="train_free.json is a record of 'replayed', but it must be one of 'free'"):
        block("free", {"free": [path]})


@pytest.mark.parametrize("kind", lm.EVIDENCE)
def test_records_of_two_devices_share_their_tables(kind, tmp_path):
    paths = [
        stored(
            tmp_path, f"{kind}_{gpu.lower()}", records()[kind] | {"device": f"NVIDIA {gpu}, 580", "text": digit * 16}
        )
        for gpu, digit in (("H200", "0"), ("H100", "1"))
    ]
    text = block(kind, {kind: paths})
    rows = [line.split(" | ", 1) for line in text.splitlines() if line.startswith("| NVIDIA")]
    h200, h100 = ([row for device, row in rows if device == f"| NVIDIA {gpu}"] for gpu in ("H200", "H100"))
    assert h200 == h100 and len(h200) + len(h100) == len(rows) > 2
    assert all(f"(images/train_{kind}_{gpu}.png)" in text for gpu in ("h200", "h100"))
    assert text.count("\n- commit: ") == 2 and f"- text: {'0' * 16}" in text and f"- text: {'1' * 16}" in text
    assert (report.TEXTS_DIFFER in text) == (kind != "memory")
    verdicts = block("verdicts", {kind: paths})
    assert verdicts.count(f"| [{kind}](training") == verdicts.count("| pass |") == 2


def repeated_record(commit, losses, **fields):
    return records()["replayed"] | {"commit": commit * 40, "device": "NVIDIA H100, 580", "loss": losses} | fields


def test_two_records_of_a_device_are_told_apart_by_their_commits(tmp_path):
    losses = records()["replayed"]["loss"]
    h100 = [repeated_record(commit, losses) for commit in "ab"]
    found = {"h200": repeated_record("c", losses, device="NVIDIA H200, 580"), "h100": h100[0], "h100_2": h100[1]}
    paths = [stored(tmp_path, f"replayed_{name}", one) for name, one in found.items()]
    text = block("replayed", {"replayed": paths})
    named = {line.split(" | ")[0] for line in text.splitlines() if line.startswith("| NVIDIA")}
    assert named == {"| NVIDIA H200", f"| NVIDIA H100, {'a' * 7}", f"| NVIDIA H100, {'b' * 7}"}
    assert f"; NVIDIA H100, {'b' * 7}](images/train_replayed_h100_2.png)" in text
    assert "; NVIDIA H200](images/train_replayed_h200.png)" in text
    assert report._each(lambda one: one["commit"][0], h100) == (
        f"- NVIDIA H100, {'a' * 7}: a\n- NVIDIA H100, {'b' * 7}: b"
    )


def test_records_that_repeat_one_another_are_compared_run_by_run(monkeypatch):
    monkeypatch.setattr(report, "AT", (2, 4, 100))
    first = {name: [5.0, 4.0, 2.0, 2.0] for name in LOSSES | {"moeblaze": None}}
    other = first | {"oracle": [5.0, 4.0 + 2e-5, 2.0, 3.0]}
    one, two = repeated_record("a", first), repeated_record("b", other)
    shown = report.summary(one, two)
    assert f"between the same run of NVIDIA H100, {'a' * 7} and NVIDIA H100, {'b' * 7}:" in shown
    assert "| run | first other loss | first beyond the bound | at step 2 | at step 4 |\n" in shown
    assert "\n| oracle | step 2 | step 4 | 5.0e-06 | 5.0e-01 |\n" in shown
    assert shown.count(" | none | none | 0.0e+00 | 0.0e+00 |") == 4
    for name, value in (("text", "1" * 16), ("device", "NVIDIA H200, 580"), ("settings", asdict(TIED)), ("steps", 3)):
        assert "the same run of" not in report.summary(one, two | {name: value})


def test_every_record_of_training_is_on_the_page():
    shown = {path for paths in document.RECORDS.values() for path in paths if path.exists()}
    assert shown == set(document.RESULTS.glob("train_*.json"))


def test_a_weight_and_its_step_are_told_apart():
    at = [report._at({"at": at}) for at in (7, "blocks.7.moe.w3", "step 170, blocks.3.moe.w2")]
    assert at == ["step 7", "`blocks.7.moe.w3`", "step 170, `blocks.3.moe.w2`"]


def test_every_kind_has_its_section():
    assert document.SECTIONS.keys() == lm.EVIDENCE.keys()
    headings = {
        f"{page.name}#{line[3:].lower().replace(' ', '-')}"
        for page in document.PAGES
        for line in page.read_text().splitlines()
        if line[:3] == "## "
    }
    assert set(document.SECTIONS.values()) <= headings


def test_gaps_that_grow_alike_are_told_from_a_jump_of_one():
    """Two gaps that double every ten steps in one direction; a third that jumps halfway."""
    steps = range(60)
    oracle = [2.0 + math.cos(step) for step in steps]
    swing = [math.sin(7 * step) * 2 ** (step / 10) for step in steps]
    gaps = {
        "moeblaze": [2e-6 * one for one in swing],
        "alike": [5e-7 * one for one in swing],
        "jumps": [2e-6 * math.sin(3 * step) * (1 if step < 30 else 1000) for step in steps],
    }
    losses = {name: [o * (1 + gap) for o, gap in zip(oracle, own, strict=True)] for name, own in gaps.items()}
    found = drift.drifts(losses | {"oracle": oracle})
    assert found["moeblaze"].growth == pytest.approx(0.1, abs=0.01) and found["moeblaze"].since == 2
    assert found["alike"].size == pytest.approx(0.25) and found["alike"].correlation == pytest.approx(1)
    assert found["jumps"].correlation < 0.5


def test_gaps_within_the_last_bit_have_no_growth():
    oracle = [2.0] * 60
    assert drift.drifts({"oracle": oracle, "moeblaze": [2.0 + 1e-7] * 60}) == {}
    late = [2.0] * 45 + [2.1] * 15
    assert drift.drifts({"oracle": oracle, "moeblaze": late}) == {}
    at_once = [2.1, *[2.0 + 1e-5 * step for step in range(59)]]
    assert drift.drifts({"oracle": oracle, "moeblaze": at_once, "same": oracle}).keys() == {"moeblaze"}


@pytest.mark.parametrize("kind", ["replayed", "free", "curves"])
def test_every_run_has_a_line_with_its_name_and_the_axes_have_units(kind):
    found = records()[kind]
    figure = evidence_plots.picture(found)
    FigureCanvasAgg(figure).draw()
    legends = [text.get_text() for legend in figure.findobj(Legend) for text in legend.texts]
    shown = found["runs"] if kind == "curves" else found["loss"].keys() - ({"oracle"} if kind == "free" else set())
    assert set(legends) == set(shown)
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert figure.axes[-1].get_xlabel() == "step"


@pytest.mark.parametrize("name", document.RECORDS)
def test_what_is_recorded_is_told_apart_in_grey(name):
    for path in filter(Path.exists, document.RECORDS[name]):
        assert_told_apart_in_grey(evidence_plots.picture(evidence.load(path, document.kind_of(name))))


@pytest.mark.parametrize("kind", ["curves", "memory"])
def test_a_picture_of_whole_runs_names_its_device(kind):
    figure = evidence_plots.picture(records()[kind] | {"device": "NVIDIA H100, 580"})
    assert any(axes.get_title(loc="left").endswith(", NVIDIA H100") for axes in figure.axes)


def test_the_lines_are_the_records():
    found = records()
    gap, _ = evidence_plots.free(found["free"]).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in gap.lines}
    assert drawn["moeblaze"] == pytest.approx([1e-8, 1e-8, 0.0029 / 3, 1e-8])
    training, _, above, _ = evidence_plots.curves(found["curves"]).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in training.lines}
    assert drawn["oracle-other-order"] == [5.0, 3.2, 1.9]
    drawn = {line.get_label(): list(line.get_ydata()) for line in above.lines}
    assert drawn["moeblaze"] == pytest.approx([0.0, -0.1, 0.1])


def test_the_document_and_a_picture_of_every_record_are_written(tmp_path, monkeypatch):
    page, path = tmp_path / "training.md", stored(tmp_path, "free_h200", records()["free"])
    page.write_text("Before.\n<!-- begin free -->\n<!-- end free -->\n<!-- begin memory -->\n<!-- end memory -->\n")
    monkeypatch.setattr(document, "PAGES", [page])
    missing = tmp_path / "results" / "train_memory_h200.json"
    monkeypatch.setattr(document, "RECORDS", {"free": [path], "memory": [missing]})
    document.write()
    assert page.read_text() == document.fill(page.read_text(), document.RECORDS)
    assert "| moeblaze | 3 | 0, 1 | step 3 |" in page.read_text() and documents.NOTHING in page.read_text()
    assert [picture.name for picture in (tmp_path / "images").iterdir()] == ["train_free_h200.png"]


def recorded(block):
    """The records of a block by the end of their names: h200, h100, h100_2, cpu."""
    return {
        path.stem.removeprefix(f"train_{block}_"): evidence.load(path, document.kind_of(block))
        for path in filter(Path.exists, document.RECORDS[block])
    }


def test_what_the_page_says_of_all_records_is_what_they_hold():
    passed = {kind: {gpu: found["passed"] for gpu, found in recorded(kind).items()} for kind in lm.EVIDENCE}
    assert passed == {
        "replayed": {"h200": True, "h100": False, "h100_2": True},
        "free": {"h200": True, "h100": True},
        "curves": {"h200": True, "h100": False},
        "memory": {"h200": True, "h100": True},
    }
    for largest in (found["largest"] for found in recorded("memory").values()):
        assert largest["moeblaze, minimal"] > 1.5 * largest["oracle"]
    for kind in lm.EVIDENCE:
        h200, *h100 = recorded(kind).values()
        assert len({one["text"] for one in h100}) == 1 and h200["text"] != h100[0]["text"]


def test_what_the_page_says_of_replayed_choices_is_what_their_records_hold():
    """The sentences below the block follow from the figures."""
    h200, h100, again = recorded("replayed").values()
    assert h100["verdict"]["first_gradients"]["passed"] and not h100["verdict"]["loss"]["passed"]
    assert all(worst > BOUND for worst in h100["oracles"].values())
    assert sum(worst > h200["verdict"]["loss"]["worst"] for worst in h200["oracles"].values()) == 2
    assert not any("same_weights" in found for found in (h200, h100)) and "same_weights" in again
    assert not drift.drifts(h200["loss"])
    found = drift.drifts(h100["loss"])
    assert {one.since for one in found.values()} == {110}
    assert all(one.correlation > 0.99 for one in found.values())
    growths = [one.growth for one in found.values()]
    assert max(growths) < 1.2 * min(growths)
    d, h, dh = (found[name].size for name in ORACLES[1:])
    assert 1.4 < 1 / dh < 1.6 and 4.5 < dh / d < 6 and 4.5 < dh / h < 6
    for run in set(h100["loss"]) - {"oracle"}:
        before, after = (
            max(equal_loss.gaps(h100["loss"][run][a:b], h100["loss"]["oracle"][a:b]))
            for a, b in ((100, 107), (109, 110))
        )
        assert after > (8.5 if run == "moeblaze" else 1.5) * before


def worst_between(found, a, b):
    return max(equal_loss.gaps(found["loss"][a], found["loss"][b]))


def test_what_the_page_says_of_the_failing_run_is_what_its_record_holds():
    """Not the oracle's run alone went elsewhere: its gaps would be equal, and two reordered oracles stay together."""
    h100 = recorded("replayed")["h100"]
    d, h, _ = ORACLES[1:]
    assert worst_between(h100, d, h) < BOUND / 8
    pairs = combinations(h100["loss"], 2)
    assert all(worst_between(h100, *pair) > BOUND for pair in pairs if set(pair) != {d, h})


def test_what_the_page_says_of_the_passing_run_is_what_its_record_holds():
    again = recorded("replayed")["h100_2"]
    worst = {run: max(row["gradients"] for row in rows) for run, rows in again["same_weights"].items()}
    ours = worst.pop("moeblaze")
    assert max(worst.values()) < ours < 1.1 * max(worst.values()) and ours < BOUND / 6
    steps = [row["step"] for row in again["same_weights"]["moeblaze"]]
    assert steps == list(range(equal_loss.EVERY, 201, equal_loss.EVERY))
    loss = again["verdict"]["loss"]["worst"]
    assert max(again["oracles"].values()) < loss < 1.1 * max(again["oracles"].values()) and loss < BOUND / 6
    found = drift.drifts(again["loss"]).values()
    assert all(abs(one.growth) < 0.04 for one in found) and min(one.correlation for one in found) < 0


def test_what_the_page_says_of_both_runs_is_what_their_records_hold():
    """The same layer, text and settings; each run goes with the oracle of its record."""
    one, other = recorded("replayed")["h100"], recorded("replayed")["h100_2"]
    assert report._is_repeated(one, other) and one["versions"] == other["versions"]
    assert one["code"][source_hashes.LAYERS] == other["code"][source_hashes.LAYERS]
    assert one["code"][source_hashes.CUDA] != other["code"][source_hashes.CUDA]
    distances = {run: equal_loss.gaps(other["loss"][run], one["loss"][run]) for run in one["loss"]}
    for gaps in distances.values():
        assert not any(gaps[:5]) and gaps[5] and max(gaps[:23]) <= BOUND < gaps[23]
        assert gaps[99] > 300 * BOUND and gaps[99] == pytest.approx(distances["oracle"][99], rel=1e-3)


def test_what_the_page_says_of_free_routing_is_what_its_records_hold():
    first = {
        gpu: [change["step"] for change in found["first_change"].values()] for gpu, found in recorded("free").items()
    }
    assert set(first["h200"]) == {1} and max(first["h100"]) == 6
    assert recorded("free_tiny")["cpu"]["first_change"]["moeblaze"]["step"] > max(first["h100"])


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_what_the_page_says_of_overfitting_is_what_the_records_hold(gpu):
    found = recorded("curves")[gpu]
    for name, end in curves.compare_curves(found["runs"], found["steps"])["ends"].items():
        training = found["runs"][name]["training"]
        training = dict(zip(training["step"], training["loss"], strict=True))
        assert end["at"] < 0.75 * found["steps"] and end["last"] > end["lowest"]
        assert training[found["steps"]] < training[end["at"] // curves.WINDOW * curves.WINDOW]


def validations_above(found):
    """Of each run, how far above the oracle's each validation loss is."""
    runs = found["runs"]
    oracle = runs["oracle"]["validation"]["loss"]
    losses = {name: run["validation"]["loss"] for name, run in runs.items() if name != "oracle"}
    return {name: [loss - other for loss, other in zip(run, oracle, strict=True)] for name, run in losses.items()}


def test_what_the_page_says_of_whole_runs_on_the_h200_is_what_their_record_holds():
    """The sentences below the block name no figure, but they follow from the figures."""
    found = recorded("curves")["h200"]
    compared = curves.compare_curves(found["runs"], found["steps"])
    assert not compared["verdict"]["validation"]["megablocks"]["within"] and compared["passed"]
    at = compared["verdict"]["validation"]["moeblaze"]["at"]
    assert at == compared["verdict"]["validation"]["oracle-other-order"]["at"]
    point = found["runs"]["oracle"]["validation"]["step"].index(at)
    above = {name: gaps[point] for name, gaps in validations_above(found).items()}
    assert all(above[name] > 5 * above["capacity-1.25"] for name in above if name != "capacity-1.25")
    for name, side in (("capacity-1.0", 1), ("capacity-1.25", -1)):
        gaps = validations_above(found)[name]
        assert all(side * gap > 0 for gap in gaps[len(gaps) // 2 + 1 :])


def test_what_the_page_says_of_whole_runs_on_the_h100_is_what_their_record_holds():
    found = recorded("curves")["h100"]
    compared = curves.compare_curves(found["runs"], found["steps"])
    verdict = compared["verdict"]
    assert verdict["training"]["moeblaze"]["within"] and not verdict["validation"]["moeblaze"]["within"]
    assert verdict["validation"]["megablocks"]["within"]
    ends = {name: end["second_half"] for name, end in compared["ends"].items()}
    assert max(ends, key=ends.get) == "oracle"
    above = {name: abs(end - ends["oracle"]) for name, end in ends.items()}
    assert above["moeblaze"] > max(above["oracle-other-order"], above["megablocks"])
    dropless = ("oracle", "oracle-other-order", "moeblaze", "megablocks")
    assert max(ends["capacity-1.0"], ends["capacity-1.25"]) < min(ends[name] for name in dropless)


def test_what_the_page_says_of_the_runs_of_tiny_is_what_their_record_holds():
    found = recorded("curves_tiny")["cpu"]
    compared = curves.compare_curves(found["runs"], found["steps"])
    assert compared["unfinished"] == ["megablocks"] and found["settings"]["precision"] == "float32"
    for gaps in compared["verdict"].values():
        assert all(3 * gaps["moeblaze"][size] < gaps["oracle-other-order"][size] for size in curves.SIZES)
    last = {name: end["last"] for name, end in compared["ends"].items()}
    assert last["capacity-1.0"] < last["oracle"] < last["capacity-1.25"]
    assert found["runs"]["capacity-1.0"]["dropped_share"] > found["runs"]["capacity-1.25"]["dropped_share"]


def test_the_document_is_what_the_records_give():
    text = "".join(page.read_text() for page in document.PAGES)
    assert unmarked(document.fill(text)) == unmarked(text)
    assert all(text.count(f"<!-- begin {block} -->") == 1 for block in document.RECORDS)
