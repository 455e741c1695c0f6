"""A whole training step: the most bytes alive in its forward, backward and optimizer step, as torch has them."""

from collections import Counter

import pytest
from fake_models import fake
from live import checkpoint, one_step
from test_models import FAMILIES, cut
from torch.nn.attention import SDPBackend, sdpa_kernel

from moeblaze_ref.plan import configs, sweeps
from moeblaze_ref.plan.checkpoints import CHECKPOINTS
from moeblaze_ref.plan.measure import planned_peaks
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.shares import Parallel
from moeblaze_ref.plan.timeline import PHASES

# Where weights decide, and where tokens do.
SEQUENCES = (512, 8192)
by_family = pytest.mark.parametrize("name", sorted(FAMILIES))


def planned(fields, name, step, how="none"):
    return Run(configs.read(fields, name), step, "bf16", checkpoint=how).worst


def sizes(stage):
    return Counter(tensor.bytes for one in stage.work for tensor in one.kept)


@by_family
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_the_peaks_of_a_step_are_within_one_percent(name, sequence):
    fields = cut(name, 2)
    with fake(fields) as model:
        theirs = one_step(model, 1, sequence)
    ours = planned_peaks(planned(fields, name, Step(1, sequence, attention="cpu-flash")))
    for phase in PHASES:
        assert ours[phase] == pytest.approx(getattr(theirs, phase), rel=0.01), phase


@by_family
@pytest.mark.parametrize("how", [how for how in CHECKPOINTS if how != "none"])
def test_checkpointed_layers_keep_what_torch_has_alive(name, how):
    if (name, how) == ("gpt-oss-20b", "selective"):
        with pytest.raises(ValueError, match="checkpoint is 'selective', but gpt-oss's experts add their biases"):
            planned(cut(name, 2), name, Step(1, 512), how)
        return
    fields = cut(name, 3)
    with fake(fields) as model:
        checkpoint(model, how)
        theirs = one_step(model, 2, 1024)
    stage = planned(fields, name, Step(2, 1024, attention="cpu-flash"), how)
    assert sizes(stage) == theirs.kept
    ours = planned_peaks(stage)
    for phase in PHASES:
        assert ours[phase] == pytest.approx(getattr(theirs, phase), rel=0.01), phase


def test_torch_refuses_to_keep_what_the_experts_of_gpt_oss_change():
    with fake(cut("gpt-oss-20b", 1)) as model:
        checkpoint(model, "selective")
        with pytest.raises(RuntimeError, match="has been mutated"):
            one_step(model, 1, 64)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "glm-4.5", "llama-4-scout"])
def test_attention_step_by_step_keeps_all_probabilities(name):
    fields = cut(name, 2)
    with fake(fields) as model, sdpa_kernel(SDPBackend.MATH):
        theirs = one_step(model, 1, 2048)
    stage = planned(fields, name, Step(1, 2048, attention="cpu-math"))
    assert sizes(stage) == theirs.kept
    ours = planned_peaks(stage)
    for phase in PHASES:
        assert ours[phase] == pytest.approx(getattr(theirs, phase), rel=0.01), phase


def test_a_sequence_longer_than_a_chunk_has_a_mask():
    fields = cut("llama-4-scout", 4) | {"attention_chunk_size": 200}
    with fake(fields) as model:
        theirs = one_step(model, 3, 256)
    stage = planned(fields, "llama-4-scout", Step(3, 256, attention="cpu-flash"))
    assert sizes(stage) == theirs.kept
    assert sum(row.bytes for one in stage.work for row in one.kept if row.name == "mask") == 3 * 3 * 256 * 256 * 2


def test_the_optimizer_runs_when_no_micro_batch_is_in_flight():
    run = Run(configs.find("mixtral-8x7b"), Step(1, 1024), "bf16", Parallel(pipeline=8, micro_batches=16))
    for stage in run.stages:
        last = stage.timeline[-1]
        assert last.phase == "optimizer" and not any(last.held[kind] for kind in stage.kept)
        waiting = (stage.in_flight - 1) * stage.kept.total()
        assert stage.timeline[0].bytes >= stage.resident.total() + waiting


def test_zero_gathers_what_other_gpus_have_copies_of():
    model, step = configs.find("mixtral-8x7b"), Step(1, 1024)
    alone = Run(model, step, "bf16", Parallel(data=8, expert=8, zero=3)).worst
    of_layer = [weight for part in alone.model.layers[0] for weight in part.weights()]
    beside = [weight for part in (*alone.model.before, *alone.model.after) for weight in part.weights()]
    shared = 2 * sum(one.count for one in of_layer if not one.of_experts) + sum(one.count for one in beside)
    assert alone.gathered == 2 * shared
    experts = sum(one.count for one in of_layer if one.of_experts)
    both = Run(model, step, "bf16", Parallel(data=16, expert=8, zero=3)).worst
    assert both.gathered == 2 * (shared + 2 * experts)
    kept_whole = Run(model, step, "bf16", Parallel(data=16, expert=8, zero=1)).worst
    passing = [
        max(one.held["passing tensors"] for one in stage.timeline if one.phase == "forward")
        for stage in (both, kept_whole)
    ]
    assert passing[0] - passing[1] == both.gathered


def test_buffers_hold_rows_to_and_from_experts_and_the_ends_of_stages():
    model, step = configs.find("mixtral-8x7b"), Step(1, 1024)
    rows = 1024 * 2 * 4096 * 2
    assert Run(model, step, "bf16", Parallel(data=8, expert=8)).worst.buffers == 2 * rows
    stages = Run(model, step, "bf16", Parallel(pipeline=4, micro_batches=8)).stages
    stream = 1024 * 4096 * 2
    assert [stage.buffers for stage in stages] == [5 * stream, 2 * 4 * stream, 2 * 3 * stream, 2 * stream]


def test_muon_has_one_momentum_for_a_matrix_and_adamw_the_rest():
    model = configs.find("gpt-oss-20b")
    weights = [weight for part in model.parts for weight in part.weights()]
    matrices = sum(one.count for one in weights if len(one.dims) > 1 and one.name[0] == "w")
    rest = sum(one.count for one in weights) - matrices
    found = Run(model, Step(1, 64), "muon").worst.optimizer["optimizer states"]
    assert found == 4 * matrices + 8 * rest


@pytest.mark.parametrize("axis", sweeps.AXES)
def test_a_sweep_has_the_peaks_of_its_runs(axis):
    run = Run(configs.find("olmoe-1b-7b"), Step(4, 512), "bf16")
    lines = {line.experts: line for line in sweeps.sweep(run, axis)}
    assert len(lines) == 5
    for name, line in lines.items():
        model = run.model if name == "as given" else configs.with_experts(run.model, name)
        for size, peak in zip(line.sizes, line.peaks, strict=True):
            step = Step(size, 512) if axis == "batch" else Step(4, size)
            assert Run(model, step, "bf16").worst.peak.bytes == peak


@pytest.mark.parametrize(("zero", "stay"), [(0, True), (1, True), (2, False), (3, False)])
def test_gradients_that_each_gpu_holds_whole_stay_in_their_buffers(zero, stay):
    """As in torch's DistributedDataParallel, whose buckets the gradients are views of."""
    run = Run(configs.find("olmoe-1b-7b"), Step(1, 512), "bf16", Parallel(data=2, zero=zero))
    held = run.worst.peaks["forward"].held["gradients"]
    assert held == (run.worst.whole_weights if stay else 0)


def test_gradients_of_experts_without_copies_are_in_no_bucket():
    run = Run(configs.find("olmoe-1b-7b"), Step(1, 512), "bf16", Parallel(data=2, expert=2))
    stage = run.worst
    alone = sum(weight.count * 2 for weight in stage.weights if weight.of_experts)
    assert stage.peaks["forward"].held["gradients"] == stage.whole_weights - alone
    assert stage.peaks["optimizer"].held["gradients"] == stage.whole_weights
