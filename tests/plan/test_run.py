"""A whole training step: the most bytes alive in its forward, backward and optimizer step, as torch has them."""

from collections import Counter

import pytest
from fake_models import fake
from live import checkpoint, one_step
from test_models import FAMILIES, cut
from torch.nn.attention import SDPBackend, sdpa_kernel

from moeblaze_ref.plan import configs
from moeblaze_ref.plan.checkpoints import CHECKPOINTS
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.timeline import PHASES

# Where weights decide, and where tokens do.
SEQUENCES = (512, 8192)
by_family = pytest.mark.parametrize("name", sorted(FAMILIES))


def planned(fields, name, step, how="none"):
    return Run(configs.read(fields, name), step, "bf16", checkpoint=how).worst


def most(stage):
    """The most bytes of each phase."""
    found = {phase: 0 for phase in PHASES}
    for instant in stage.timeline:
        found[instant.phase] = max(found[instant.phase], instant.bytes)
    return found


def sizes(stage):
    return Counter(tensor.bytes for one in stage.work for tensor in one.kept)


@by_family
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_the_peaks_of_a_step_are_within_one_percent(name, sequence):
    fields = cut(name, 2)
    with fake(fields) as model:
        theirs = one_step(model, 1, sequence)
    ours = most(planned(fields, name, Step(1, sequence, attention="cpu-flash")))
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
    ours = most(stage)
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
    ours = most(stage)
    for phase in PHASES:
        assert ours[phase] == pytest.approx(getattr(theirs, phase), rel=0.01), phase


def test_a_sequence_longer_than_a_chunk_has_a_mask():
    fields = cut("llama-4-scout", 4) | {"attention_chunk_size": 200}
    with fake(fields) as model:
        theirs = one_step(model, 3, 256)
    stage = planned(fields, "llama-4-scout", Step(3, 256, attention="cpu-flash"))
    assert sizes(stage) == theirs.kept
    assert sum(row.bytes for one in stage.work for row in one.kept if row.name == "mask") == 3 * 3 * 256 * 256 * 2
