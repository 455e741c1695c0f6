"""Stages of a pipeline: each keeps what its layers keep in torch, and together they have all that the model has."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fake_models import fake
from test_models import FAMILIES, tiny
from torch import nn
from torch.distributed.pipelining.schedules import Schedule1F1B

from moeblaze_ref.plan import account, configs
from moeblaze_ref.plan.configs import fields_of
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import MASTER, STATES, WEIGHTS, Run
from moeblaze_ref.plan.shares import Parallel
from moeblaze_ref.plan.torch_models import kept_storages

STEP = Step(2, 32, attention="cpu-flash")


class TorchStage(nn.Module):
    """Some layers of a model, after the embedding if they are the first, and before the head if the last."""

    def __init__(self, model, first, end):
        super().__init__()
        self.model, self.is_first, self.is_last = model, first == 0, end == len(model.model.layers)
        model.model.layers = model.model.layers[first:end]
        if not self.is_first:
            model.model.embed_tokens = nn.Identity()
        if not self.is_last:
            model.model.norm = model.lm_head = nn.Identity()

    def forward(self, input_ids, **options):
        """Return the loss, or, of a stage before the last, what goes on to the next."""
        inputs = {"input_ids": input_ids} if self.is_first else {"inputs_embeds": self._arrived(input_ids)}
        if self.is_last:
            return self.model(**inputs, **options)
        return SimpleNamespace(loss=self.model.model(**inputs, use_cache=False).last_hidden_state)

    def _arrived(self, input_ids):
        width = self.model.config.hidden_size
        return torch.zeros(*input_ids.shape, width, dtype=torch.bfloat16, requires_grad=True)


def held_by_torch(fields, stage, checkpoint="none"):
    """Bytes of the weights of a stage, and of each storage that it keeps."""
    with fake(fields) as model:
        if checkpoint == "layer":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        end = stage.first_layer + len(stage.model.layers)
        one = TorchStage(model.train(), stage.first_layer, end)
        return sum(weight.nbytes for weight in one.parameters()), kept_storages(one, STEP.batch, STEP.sequence)


def stages_of(fields, pipeline=3, checkpoint="none"):
    """The stages of a run."""
    run = Run(configs.read(fields, "model"), STEP, "bf16", Parallel(pipeline=pipeline), checkpoint)
    assert len(run.stages) == pipeline
    return run.stages


def planned(stage, but=()):
    """The same in the plan, but for what some kinds of parts keep."""
    kept = sorted(tensor.bytes for work in stage.work for tensor in work.kept if work.part.kind not in but)
    return sum(work.gradients for work in stage.work), kept


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_stage_holds_what_torch_holds(name):
    for stage in stages_of(tiny(name)):
        assert planned(stage) == held_by_torch(tiny(name), stage), stage.number


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_stage_of_checkpointed_layers_keeps_what_torch_keeps(name):
    """The arguments of layers are no part of the graph: a closure holds them, which autograd does not show."""
    (whole,) = stages_of(tiny(name), 1, "layer")
    for stage in stages_of(tiny(name), checkpoint="layer"):
        assert planned(stage, but=["positions"]) == held_by_torch(tiny(name), stage, "layer"), stage.number
        assert stage.kept["positions"] == whole.kept["positions"] > 0


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_stages_hold_together_what_the_model_holds(name):
    (whole,) = stages_of(tiny(name), 1)
    stages = stages_of(tiny(name))
    for kind in (WEIGHTS, STATES):
        assert sum(stage.resident[kind] for stage in stages) == whole.resident[kind]
    assert sum(work.gradients for stage in stages for work in stage.work) == sum(work.gradients for work in whole.work)
    again = 2 * whole.kept["positions"]  # each stage computes the angles of positions
    assert sum((stage.kept for stage in stages), Counter()).total() == whole.kept.total() + again


def test_the_last_stage_has_its_own_copy_of_a_tied_embedding():
    fields = tiny("olmoe-1b-7b") | {"tie_word_embeddings": True}
    (whole,), stages, table = stages_of(fields, 1), stages_of(fields), fields["vocab_size"] * fields["hidden_size"] * 2
    assert sum(stage.resident[WEIGHTS] for stage in stages) == whole.resident[WEIGHTS] + table
    assert stages[-1].resident[WEIGHTS] == stages_of(tiny("olmoe-1b-7b"))[-1].resident[WEIGHTS]


def test_deepseek_v3_on_2048_gpus_is_held_once_by_the_gpus_that_divide_it():
    model = configs.read(fields_of("deepseek-v3"), "deepseek-v3")
    parallel = Parallel(data=128, expert=64, pipeline=16, zero=1, micro_batches=32)
    stages = Run(model, Step(1, 4096), "bf16-master", parallel).stages
    experts = 58 * 256 * 3 * 7168 * 2048
    others = account.parameters(model) - experts
    assert parallel.gpus == 2048 and [len(stage.model.layers) for stage in stages] == [4] * 13 + [3] * 3
    buffers = 58 * 256 * 2  # of the routers
    assert sum(stage.resident[WEIGHTS] for stage in stages) == 2 * (experts // 64 + others) + buffers
    assert sum(work.gradients for stage in stages for work in stage.work) == 2 * (experts // 64 + others)
    # 2 GPUs have the same experts, 128 have the same of all else.
    assert sum(stage.resident[MASTER] for stage in stages) == 4 * (experts // 128 + others // 128)
    assert sum(stage.resident[STATES] for stage in stages) == 8 * (experts // 128 + others // 128)


TIME = {"forward_one_chunk": 1, "backward_one_chunk": 2}


def order_of(stage, stages, micro_batches):
    """Run torch's 1F1B with a stage that computes nothing: its forwards and backwards, with their micro batches."""
    idle = MagicMock(stage_index=stage)
    for way in ("fwd", "bwd"):
        for what in ("recv", "send"):
            getattr(idle, f"get_{way}_{what}_ops").return_value = []
    schedule = MagicMock(_stage=idle, _num_stages=stages, _n_microbatches=micro_batches)
    schedule._check_inputs.return_value = [None] * micro_batches, [None] * micro_batches
    Schedule1F1B._step_microbatches(schedule)
    return [(name, arguments[0]) for name, arguments, _ in idle.method_calls if name in TIME]


def time_of(orders):
    """The time that stages need: a forward begins after that of the stage before, a backward after the one behind."""
    ended, clocks, left = {}, [0] * len(orders), [list(order) for order in orders]
    while any(left):
        for stage, order in enumerate(left):
            while order:
                name = order[0][0]
                source = (stage - 1 if name == "forward_one_chunk" else stage + 1, *order[0])
                if source[0] in range(len(orders)) and source not in ended:
                    break
                clocks[stage] = ended[stage, *order.pop(0)] = max(clocks[stage], ended.get(source, 0)) + TIME[name]
    return max(clocks)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 4), (4, 9), (8, 3), (16, 32)])
def test_micro_batches_in_flight_and_the_bubble_are_those_of_1f1b(stages, micro_batches):
    parallel = Parallel(pipeline=stages, micro_batches=micro_batches)
    orders = [order_of(stage, stages, micro_batches) for stage in range(stages)]
    for stage, order in enumerate(orders):
        assert len(order) == 2 * micro_batches
        in_flight = accumulate(1 if name == "forward_one_chunk" else -1 for name, _ in order)
        assert max(in_flight) == parallel.in_flight(stage)
    assert 1 - micro_batches * sum(TIME.values()) / time_of(orders) == pytest.approx(parallel.bubble)


def test_what_the_stages_of_deepseek_v3_keep_is_what_the_whole_model_keeps():
    """On 2,048 GPUs; angles of positions are on each stage."""
    model, step = configs.find("deepseek-v3"), Step(1, 4096)
    parallel = Parallel(data=128, expert=64, pipeline=16, zero=1, micro_batches=64)
    stages = Run(model, step, parallel=parallel).stages
    (whole,) = Run(model, step, parallel=replace(parallel, pipeline=1)).stages
    together = sum((stage.kept for stage in stages), Counter())
    assert len(stages) == 16 and together.pop("positions") == 16 * whole.kept["positions"]
    assert together == whole.kept - Counter({"positions": whole.kept["positions"]})
