"""The changes that would help most: ranked by what a run that has them really frees."""

from dataclasses import replace

import pytest

from moeblaze_ref.plan import configs
from moeblaze_ref.plan.advice import changes
from moeblaze_ref.plan.flops import forward_flops
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.shares import Parallel


def run(name="qwen3-30b-a3b", **fields):
    return Run(configs.find(name), Step(2, 4096), **fields)


def test_the_best_comes_first_and_each_saves_what_it_says():
    before = run(parallel=Parallel(data=4))
    found = changes(before, most=99)
    assert [one.saved for one in found] == sorted((one.saved for one in found), reverse=True)
    assert len(changes(before)) == 5 and changes(before) == found[:5]
    saved = {one.what: one.saved for one in found}
    made = {
        "--checkpoint layer": replace(before, checkpoint="layer"),
        "--zero 1": replace(before, parallel=replace(before.parallel, zero=1)),
        "--recipe adamw8bit": replace(before, recipe="adamw8bit"),
        "--offload optimizer": replace(before, offload=("optimizer",)),
    }
    for what, other in made.items():
        assert saved.get(what, 0) == max(0, before.worst.peak.bytes - other.worst.peak.bytes), what


def test_more_gpus_are_advised_as_stages_and_by_zero_3():
    before = run()
    saved = {one.what: one.saved for one in changes(before, most=99)}
    for what, fields in {"--pipeline 2": {"pipeline": 2}, "--data 2 --zero 3": {"data": 2, "zero": 3}}.items():
        other = replace(before, parallel=Parallel(**fields))
        assert saved[what] == before.worst.peak.bytes - other.worst.peak.bytes > 0


def test_what_is_there_already_is_not_advised():
    found = changes(run(checkpoint="layer", recipe="bf16", offload=("optimizer",)), most=99)
    names = {one.what for one in found}
    assert not names & {"--checkpoint layer", "--recipe bf16", "--offload optimizer"}


def test_experts_elsewhere_cost_the_rows_that_travel():
    """By hand: 48 layers, 2 * 4,096 tokens, 8 rows of 2,048 numbers. Half of the rows leave; then a quarter more."""
    trip = 48 * 8192 * 8 * 2048 * 2 / 1e9
    for before, option, more in (
        (run(), "--data 2 --expert 2", 4 * trip / 2),
        (run(checkpoint="layer"), "--data 2 --expert 2", 6 * trip / 2),
        (run(parallel=Parallel(data=2, expert=2)), "--data 4 --expert 4", 4 * trip / 4),
    ):
        (cost,) = (one.cost for one in changes(before, most=99) if one.what == option)
        assert f"{more:,.1f} GB more of routed rows sent" in cost
    ours = replace(run(checkpoint="layer"), model=run().model.in_system("moeblaze", "minimal"))
    assert "--data 2 --expert 2" in {one.what for one in changes(ours, most=99)}


def test_stages_and_zero_3_cost_what_a_gpu_sends_and_receives():
    """By hand: a stream of 2 * 4,096 vectors of 2,048 numbers to one neighbour; half of the weights, twice."""
    before = run()
    costs = {one.what: one.cost for one in changes(before, most=99)}
    assert f"{8192 * 2048 * 2 / 1e9:,.2f} GB more sent; each stage waits 50%" in costs["--pipeline 2"]
    assert f"{before.worst.whole_weights / 1e9:,.1f} GB of weights received" in costs["--data 2 --zero 3"]


def test_what_a_selective_checkpoint_does_not_keep_is_written_again():
    """At least what it frees, since it also keeps products that no backward needs; without those of the experts."""
    before = run()
    kept = [replace(before, checkpoint=how).worst.kept.total() for how in ("none", "selective")]
    products = 48 * 8192 * 8 * (2 * 768 + 2048) * 2  # (a, b) and y of the experts, alone
    (cost,) = (one.cost for one in changes(before, most=99) if one.what == "--checkpoint selective")
    again = float(cost.split(" GB of norms")[0].replace(",", "")) * 1e9
    assert kept[0] - kept[1] < again < kept[0] - products


def test_smaller_batches_and_more_copies_move_weights():
    before = run(parallel=Parallel(data=2, zero=1))
    whole = before.worst.whole_weights / 1e9
    costs = {one.what: one.cost for one in changes(before, most=99)}
    assert f"{2 * whole:,.1f} GB more of weights read" in costs["--batch 1"]
    assert f"{2 * whole / 4:,.1f} GB more of gradients and weights received" in costs["--data 4"]
    gathering = changes(run(parallel=Parallel(data=2, zero=3, micro_batches=4)), most=99)
    (cost,) = (one.cost for one in gathering if one.what == "--data 4")
    assert f"{9 * whole / 4:,.1f} GB more of gradients and weights received" in cost  # 8 times weights, once gradients


def test_a_checkpoint_costs_the_forward_of_the_layers():
    before = run("deepseek-v3", parallel=Parallel(data=64, expert=64, pipeline=16, micro_batches=16))
    (cost,) = (one.cost for one in changes(before, most=99) if one.what == "--checkpoint layer")
    tera, part = (float(number) for number in cost.replace(",", "").replace("%", "").split() if number[0].isdigit())
    layers = forward_flops(replace(before.model, before=(), after=()), before.step)
    assert tera == pytest.approx(layers * 16 / 16 / 10**12, rel=1e-2)
    assert part == pytest.approx(100 * layers / (3 * forward_flops(before.model, before.step)), abs=0.5)


def test_a_token_costs_two_flops_for_each_weight_that_it_meets():
    model, step = configs.find("mixtral-8x7b"), Step(1, 128)
    d, h, k, layers, vocabulary = 4096, 14_336, 2, 32, 32_000
    attention = 2 * d * d + 2 * d * 1024
    per_token = layers * (attention + d * 8 + k * 3 * d * h) + d * vocabulary
    pairs = layers * 128 * 128 * 2 * d
    assert forward_flops(model, step) == 2 * 128 * per_token + pairs
