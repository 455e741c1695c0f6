"""MegaBlocks' figures 2 and 8 on models that train in no time: variants, rows, summary."""

import functools
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from pretended import PretendedDevice
from small_lm import CONFIG, SETTINGS

from moeblaze_ref.lm import data
from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.lm.train import Trainer, evaluate
from moeblaze_ref.nn.systems import system
from moeblaze_ref.papers import capacities
from moeblaze_ref.papers.capacities import FACTORS, VARIANTS
from moeblaze_ref.papers.items import ITEMS
from moeblaze_ref.papers.results import Run, Source

CPU = torch.device("cpu")
TINY = replace(SETTINGS, config=replace(CONFIG, k=1, activation="gelu"), steps=20)


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    """Two batches a validation, in place of those that make its loss a number to report."""
    monkeypatch.setattr(capacities, "VALIDATION_BATCHES", 2)


OTHER_SHAPES = {"dense": {"E": 1}, "larger dense": {"d": 20, "h": 20, "E": 1, "layers": 4}}


@functools.cache
def rows_of(name, seed=0):
    return capacities.train(name, seed, TINY, data.python_help(), CPU)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_and_says_what_it_is(name):
    (row,) = rows_of(name)
    assert (row["variant"], row["seed"], row["capacity_factor"]) == (name, 0, VARIANTS[name].capacity_factor)
    shape = {"d": 16, "h": 16, "E": 4, "k": 1, "layers": 2, "sequence": 16}
    assert row["shape"] == shape | OTHER_SHAPES.get(name, {})
    assert row["steps"] == list(range(0, 21, 2)) and len(row["loss"]) == 11
    assert row["held_out_loss"] == row["loss"][-1] < row["loss"][0]
    assert row["seconds_at"] is row["seconds"] is None  # of a CPU


def test_the_time_of_a_run_is_that_of_its_steps():
    settings = capacities.settings_of("1.0", 0, TINY, "cuda")  # 32 tokens a step
    lines = [{"step": 0, "validation_loss": 5.0}]
    for step, speed in ((1, 8.0), (2, 16.0), (3, 64.0)):
        lines.append({"step": step, "loss": 4.0, "tokens_per_second": speed, "dropped_share": step / 10})
        lines.append({"step": step, "validation_loss": 4.0 - step})
    row = capacities.row_of("1.0", settings, lines)
    assert (row["steps"], row["loss"]) == ([0, 1, 2, 3], [5.0, 3.0, 2.0, 1.0])
    assert (row["seconds_at"], row["seconds"]) == ([0.0, 4.0, 6.0, 6.5], 6.5)
    assert (row["held_out_loss"], row["tokens_of_step"]) == (1.0, 32) and row["dropped_share"] == pytest.approx(0.2)


@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_loss_of_the_trained_model():
    (row,) = rows_of("1.5", seed=3)
    trainer = Trainer(capacities.settings_of("1.5", 3, TINY, "cpu"), data.python_help())
    while trainer.step < TINY.steps:
        trainer.advance()
    held_out = data.python_help().validation
    assert row["held_out_loss"] == evaluate(trainer.model, held_out, TINY.batch, batches=capacities.VALIDATION_BATCHES)


@pytest.mark.usefixtures("one_thread")
def test_fewer_rows_are_dropped_as_the_factor_grows_and_none_at_last():
    shares = [rows_of(name)[0]["dropped_share"] for name in FACTORS]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[1] > 0 == shares[-1]
    assert rows_of("dense")[0]["dropped_share"] == 0 and rows_of("dropless")[0]["dropped_share"] is None


def output_of(name, tokens):
    settings = capacities.settings_of(name, 0, TINY, "cpu")
    torch.manual_seed(0)
    return MoETransformer(settings.config, system(settings.layer, **settings.layer_options))(tokens).logits


def test_the_largest_capacity_is_dropless_and_a_small_one_is_not():
    tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    dropless, most, least = (output_of(name, tokens) for name in ("dropless", "max", "1.0"))
    assert (most - dropless).norm() / dropless.norm() < 1e-5
    assert (least - dropless).norm() / dropless.norm() > 1e-3


def test_a_dense_model_has_the_active_weights_of_the_others():
    dense, sparse = (MoETransformer(capacities.settings_of(name, 0, TINY, "cpu").config) for name in ("dense", "1.0"))
    experts = {"w1", "w2", "w3", "wg"}

    def others(model):
        return {name: tensor.shape for name, tensor in model.named_parameters() if name.split(".")[-1] not in experts}

    assert others(dense) == others(sparse)
    for one, many in zip(dense.blocks, sparse.blocks, strict=True):
        assert one.moe.w1.shape == (1, *many.moe.w1.shape[1:]) and one.moe.w3.shape == (1, *many.moe.w3.shape[1:])


@pytest.mark.parametrize("place", capacities.SIZES)
def test_the_larger_dense_model_is_larger_as_medium_is_larger_than_small(place):
    base = capacities.SIZES[place].config
    larger = capacities.larger_dense(base)
    assert (larger.E, larger.h, larger.layers / base.layers) == (1, 4 * larger.d, 24 / 12)
    assert larger.d / base.d == pytest.approx(1024 / 768, rel=0.05) and larger.d % larger.heads == 0


def test_a_seed_has_one_start_whatever_the_factor():
    starts = [Trainer(capacities.settings_of(name, 1, TINY, "cpu"), data.python_help()) for name in ("1.0", "dropless")]
    first, second = (dict(trainer.model.named_parameters()) for trainer in starts)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    other = Trainer(capacities.settings_of("1.0", 2, TINY, "cpu"), data.python_help())
    assert not torch.equal(other.model.head.weight, starts[0].model.head.weight)
    assert torch.equal(starts[0].windows.get_state(), starts[1].windows.get_state())
    assert not torch.equal(starts[0].windows.get_state(), other.windows.get_state())


def test_the_block_sparse_layer_runs_where_there_is_a_gpu():
    assert capacities.settings_of("dropless", 0, TINY, "cuda").layer == "megablocks"
    assert capacities.settings_of("dropless", 0, TINY, "cpu").layer == "oracle"
    with pytest.raises(ValueError, match="unknown variant 'maximum'"):
        capacities.settings_of("maximum", 0, TINY, "cpu")


@pytest.mark.parametrize("place", capacities.SIZES)
def test_all_sizes_are_top_1_and_ungated(place):
    config = capacities.SIZES[place].config
    assert isinstance(config, LMConfig) and (config.k, config.activation, config.h) == (1, "gelu", 4 * config.d)
    assert config.h % 128 == 0 and capacities.SIZES[place].steps % capacities.POINTS == 0


def test_there_is_a_job_for_each_variant_and_seed_and_a_further_run_has_the_seeds_that_follow():
    jobs = capacities.jobs(PretendedDevice())
    assert [job.args[:2] for job in jobs] == [(name, seed) for seed in range(5) for name in VARIANTS]
    assert all(job.args[2] == capacities.SIZES["cpu"] and job.args[4] == CPU for job in jobs)
    jobs = ITEMS[capacities.ITEM].jobs(PretendedDevice(), [{"seed": 7}, {"seed": 3}])
    assert [job.args[:2] for job in jobs] == [(name, seed) for seed in range(8, 13) for name in VARIANTS]


@pytest.mark.usefixtures("one_thread")
def test_each_variant_takes_one_step_before_its_first_run(monkeypatch):
    steps = []

    class Counted(Trainer):
        def advance(self):
            steps.append((self.settings.layer_options.get("capacity_factor"), self.settings.seed, self.step))
            return super().advance()

    monkeypatch.setattr(capacities, "Trainer", Counted)
    monkeypatch.setattr(capacities, "SIZES", {"cpu": replace(TINY, steps=2)})
    monkeypatch.setattr(capacities.data, "standard_library", data.python_help)
    jobs = capacities.jobs(PretendedDevice())
    for job in jobs[2:4] + jobs[9:10]:  # factors 1.0 and 1.5 of the first seed, then 1.0 of the second
        job()
    assert [step for *run, step in steps if run == [1.0, 0]] == [0, 0, 1]
    assert [step for *run, step in steps if run == [1.5, 0]] == [0, 0, 1]
    assert [step for *run, step in steps if run == [1.0, 1]] == [0, 1]


def test_the_runs_of_a_gpu_have_steps_for_ten_minutes():
    """Of 16.4 seconds a run of 400 steps took 9.6; the rest was validations and set-up, of the larger model twice."""
    seconds = 9.6 * capacities.SIZES["cuda"].steps / 400 + 6.8
    runs = [2 if job.args[0] == "larger dense" else 1 for job in capacities.jobs(PretendedDevice())]
    assert sum(runs) * seconds < 600


def losses_of(**losses):
    return [
        {"variant": name.replace("_", "."), "seed": seed, "held_out_loss": loss}
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]


def test_a_gain_is_paired_over_the_seeds():
    runs = [losses_of(dense=[2.0, 4.0, 6.0], max=[1.5, 3.6, 5.4], dropless=[1.0])]
    gain = capacities.gain(runs, "dense", "max")
    assert gain == (pytest.approx(0.5), pytest.approx(0.1 / 3**0.5), 3) and gain.resolved
    assert not capacities.gain(runs, "dense", "dropless").resolved, "one seed says nothing"
    assert not capacities.gain(runs, "dense", "dense").resolved, "no difference is no gain"
    with pytest.raises(ValueError, match="variants dense and 2.0 have no seed in common"):
        capacities.gain(runs, "dense", "2.0")


def test_a_seed_counts_once_however_often_it_runs():
    first = losses_of(dense=[2.0, 4.0, 6.0], max=[1.5, 3.6, 5.4])  # gains 0.5, 0.4, 0.6
    assert capacities.gain([first] * 4, "dense", "max") == capacities.gain([first], "dense", "max")
    second = losses_of(dense=[1.0, 1.0, 1.0], max=[0.7, 1.0, 0.8])  # a longer one: gains 0.3, 0, 0.2
    means = [0.4, 0.2, 0.4]
    expected = (pytest.approx(fmean(means)), pytest.approx(stdev(means) / 3**0.5), 3)
    assert capacities.gain([first, second], "dense", "max") == expected


def test_new_seeds_count_as_more_of_them():
    first = losses_of(dense=[2.0, 4.0, 6.0], max=[1.5, 3.6, 5.4])
    others = [row | {"seed": row["seed"] + 3} for row in first]
    gains = [0.5, 0.4, 0.6] * 2
    expected = (pytest.approx(0.5), pytest.approx(stdev(gains) / 6**0.5), 6)
    assert capacities.gain([first, others], "dense", "max") == expected


def test_losses_are_never_paired_across_runs():
    separate = [losses_of(dense=[2.0, 2.0]), losses_of(max=[1.0, 1.0])]
    with pytest.raises(ValueError, match="variants dense and max have no seed in common"):
        capacities.gain(separate, "dense", "max")


def run_of(device="H100", variants=("dense", "max"), **changes):
    """A finished run with one seed of these variants."""
    model = {"shape": {"d": 8}, "precision": "float32", "tokens_of_step": 4} | changes
    return Run(Source(device, "c"), [{"variant": name, "seed": 0, "held_out_loss": 1.0} | model for name in variants])


def test_runs_of_one_device_and_model_are_pooled():
    here, other_commit = run_of(), run_of()._replace(source=Source("H100", "d"))
    separate = [run_of("H200"), run_of(shape={"d": 16}), run_of(precision="bfloat16"), run_of(tokens_of_step=8)]
    found = capacities.pools([here, *separate, other_commit, run_of(variants=("dense", "1.0"))], "dense", "max")
    assert found == [[here, other_commit], *([run] for run in separate)]


def test_a_gain_within_three_standard_errors_is_not_resolved():
    differences = [0.01, -0.02, 0.015, 0.0, 0.01]
    rows = losses_of(dense=[2 + difference for difference in differences], max=[2.0] * 5)
    gain = capacities.gain([rows], "dense", "max")
    assert 0 < gain.mean < capacities.RESOLVED * gain.error and not gain.resolved


def test_times_are_taken_at_a_loss_that_all_reach():
    curves = {"1.0": ([0, 1, 2], [5, 4, 3.2]), "1.5": ([0, 2, 4], [5, 4, 3]), "2.0": ([0, 3, 6], [5, 3.1, 3.3])}
    curves["dropless"] = ([0, 0.5, 1.5], [5, 4, 2])
    rows = [
        {"variant": name, "seed": seed, "seconds_at": [at * (1 + sign) for at in seconds], "loss": losses}
        for name, (seconds, losses) in curves.items()
        for seed, sign in enumerate((0.5, -0.5))
    ]
    found = capacities.equal_loss(rows)
    assert found.loss == 3.2 and found.best_factor == "1.0"
    assert found.seconds["1.0"] == 2 and found.seconds["dropless"] == pytest.approx(0.5 + 0.8 / 2)
    assert found.seconds["1.5"] == pytest.approx(2 + 2 * 0.8) and found.seconds["2.0"] == pytest.approx(3 * 1.8 / 1.9)
    assert found.speed == pytest.approx(2 / 0.9)
