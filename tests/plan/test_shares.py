"""What one GPU of several holds: the plan's bytes are those of torch on each rank.

Most ranks are of torch's fake group, whose collectives move nothing: it stands for as many ranks as one likes. A few
are processes with gloo.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fake_models import fake
from test_models import FAMILIES, cut, tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.local import begin, free_port, start
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.plan import configs, recipes
from moeblaze_ref.plan.experts import MoEBlock
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import MASTER, STATES, WEIGHTS, Run, Stage
from moeblaze_ref.plan.shares import Parallel, rows_of, uneven
from moeblaze_ref.plan.torch_models import built, here, kept_storages, loss_of

# Ranks -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a group whose others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def forked(_, size, *arguments):
    """Ranks that are forks of this process, which has imported for all of them what a model needs."""
    with built(EVEN):
        pass
    mp.start_processes(begin, (size, *arguments), size, start_method="fork")


def with_gloo(work, size):
    """What ``work()`` returns on each of ``size`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        start(forked, (size, free_port(), Path(folder), "gloo", work, ()), 1)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


# What torch holds ----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Bytes on one rank after a training step."""

    weights: int
    gradients: int
    states: int


def in_storages(tensors):
    """Bytes of the storages of some tensors, each counted once."""
    storages = [here(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def in_states(optimizer):
    """Bytes of an optimizer's states, without its counters of steps."""
    states = (state for of_one in optimizer.state.values() for name, state in of_one.items() if name != "step")
    return sum(here(state).nbytes for state in states)


def after_a_step(model, optimizer):
    """Train for one step, and say what is held then."""
    loss_of(model, 1, 16).backward()
    optimizer.step()
    gradients = [weight.grad for weight in model.parameters()]
    return Held(in_storages(model.parameters()), in_storages(gradients), in_states(optimizer))


def fully_sharded(fields, mesh, in_float32=False):
    """What this rank holds with FSDP2 on each layer and on the root; weights in float32 are gathered in bfloat16."""
    with built(fields) as model:
        if in_float32:
            model.float()
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return after_a_step(model, torch.optim.AdamW(model.parameters()))


def flatly_sharded(fields):
    """What this rank holds with FSDP1, which divides all numbers in a row, and gathers the weights for a step."""
    with built(fields) as model:
        model = FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, device_id=torch.device("cpu")
        )
        return after_a_step(model, torch.optim.AdamW(model.parameters()))


def with_divided_states(fields, group):
    """What this rank holds with torch's ZeRO 1, which gives whole tensors to ranks."""
    with built(fields) as model:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group)
        weights, gradients, _ = after_a_step(model, optimizer)
        return Held(weights, gradients, in_states(optimizer.optim))


# What the plan says ---------------------------------------------------------------------------------------------------


def stage_of(fields, recipe="bf16", **parallel) -> Stage:
    """The only stage of a run."""
    run = Run(configs.read(fields, "model"), Step(1, 16, attention="cpu-flash"), recipe, Parallel(**parallel))
    (stage,) = run.stages
    return stage


def planned(stage: Stage, rank: int = 0) -> Held:
    """What a rank holds; those after the first may have less of the states than the plan says of the first."""
    recipe, parallel = recipes.RECIPES[stage.run.recipe], stage.run.parallel
    trained = [weight for weight in stage.weights if weight.trained]
    buffers = recipes.weight_bytes(recipe, sum(weight.count for weight in stage.weights if not weight.trained))
    less = 0
    if parallel.zero == 3:
        less = sum(
            recipes.state_bytes(recipe, weight, rows_of(weight, parallel.copies(weight)))
            - recipes.state_bytes(recipe, weight, rows_of(weight, parallel.copies(weight), rank))
            for weight in trained
        )
    gradients = sum(work.gradients for work in stage.work)
    return Held(stage.resident[WEIGHTS] - buffers, gradients, stage.resident[STATES] - less)


# Weights, gradients and states ---------------------------------------------------------------------------------------

EVEN = tiny("olmoe-1b-7b")
UNEVEN = EVEN | {"vocab_size": 201, "num_experts": 7}


def test_one_gpu_holds_what_is_planned():
    with built(UNEVEN) as model:
        assert after_a_step(model, torch.optim.AdamW(model.parameters())) == planned(stage_of(UNEVEN))


def test_a_float32_copy_and_its_states_are_those_of_torch():
    with built(UNEVEN) as model:
        copies = [nn.Parameter(weight.detach().float()) for weight in model.parameters()]
    for one in copies:
        one.grad = torch.zeros_like(one)
    optimizer = torch.optim.AdamW(copies)
    optimizer.step()
    stage = stage_of(UNEVEN, "bf16-master")
    assert (in_storages(copies), in_states(optimizer)) == (stage.resident[MASTER], stage.resident[STATES])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_weights_have_the_shapes_of_torch(name):
    with fake(tiny(name)) as model:
        shapes = sorted(tuple(weight.shape) for weight in model.parameters())
    weights = (weight for part in configs.read(tiny(name), name).parts for weight in part.weights())
    assert sorted(weight.dims for weight in weights if weight.trained) == shapes


@pytest.mark.parametrize(("name", "rank", "size"), [*((name, 9, 64) for name in sorted(FAMILIES)), ("glm-4.5", 2, 3)])
def test_fsdp2_holds_what_zero_3_plans(name, rank, size):
    with fake_group(rank, size):
        found = fully_sharded(tiny(name), init_device_mesh("cpu", (size,)))
    stage = stage_of(tiny(name), data=size, zero=3)
    assert found == planned(stage, rank)
    assert found.states < planned(stage).states, "the plan is of the first rank, which has most"


def test_64_gpus_hold_what_zero_3_plans_of_qwen3():
    fields = cut("qwen3-30b-a3b")
    with fake_group(0, 64):
        mesh = init_device_mesh("cpu", (64,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = fully_sharded(fields, mesh)
    assert found == planned(stage_of(fields, data=64, zero=3))
    assert found.weights == 97_337_952


@pytest.mark.parametrize("size", [2, 4])
def test_zero_2_divides_gradients_and_states_as_fsdp1_does(size):
    with fake_group(size - 1, size):
        found = flatly_sharded(EVEN)
    stage = planned(stage_of(EVEN, data=size, zero=2))
    assert found[1:] == stage[1:]
    assert stage.weights == size * found.weights, "between steps FSDP1 divides the weights too"


def test_zero_2_plans_a_number_more_of_each_weight_that_gpus_do_not_divide():
    with fake_group(0, 3):
        found = flatly_sharded(EVEN)
    stage = stage_of(EVEN, data=3, zero=2)
    assert 0 < planned(stage).gradients - found.gradients < 2 * len(stage.weights)
    assert 0 < planned(stage).states - found.states < 4 * len(stage.weights)


def test_zero_2_has_whole_weights_from_the_forward_to_the_backward():
    with fake_group(0, 4), built(EVEN) as model:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=False)
        loss = loss_of(model, 1, 16)
        weights = in_storages(model.parameters())
        loss.backward()
        found = Held(weights, in_storages(weight.grad for weight in model.parameters()), 0)
    assert found[:2] == planned(stage_of(EVEN, data=4, zero=2))[:2]


# Four processes ------------------------------------------------------------------------------------------------------


TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 12, 32, 24, 8, 3  # of each rank's layer


def routing(size, crowded):
    """The experts of a rank's tokens, on as many ranks as can be: all ranks get as many, or the first gets most."""
    tokens, choices = torch.arange(TOKENS)[:, None], torch.arange(CHOSEN)
    after = torch.where(choices > 0, 1 + (tokens + choices) % (size - 1), 0) if crowded else tokens + choices
    return (after % size * (EXPERTS // size) + choices // size).int()


class OneLayer(nn.Module):
    """A layer with a part of its experts, on tokens of this rank's own."""

    def __init__(self, mesh, policy, crowded):
        super().__init__()
        size = mesh.size()
        owners = np.arange(EXPERTS, dtype=np.int32)[None] // (EXPERTS // size)
        options = {"policy": policy, "ranks": Ranks(mesh.get_group()), "dtype": torch.bfloat16}
        self.layer = ExpertParallelMoE(WIDTH, HIDDEN, EXPERTS, CHOSEN, Placement(owners, size), **options)
        self.routing = routing(size, crowded)

    def forward(self, **_):
        """Return the output in the place of a loss."""
        x = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return SimpleNamespace(loss=self.layer(x, self.routing).out)


def held_by_layer(*arguments):
    """The shapes of the layer's weights on this rank, and bytes of each storage that it keeps."""
    layer = OneLayer(*arguments)
    return sorted(tuple(weight.shape) for weight in layer.parameters()), kept_storages(layer, 1, TOKENS)


def on_a_rank():
    """What this rank of four holds in each way of sharing, alone or in a pair with another."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))["rank"]
    meshes = {2: pairs, 4: init_device_mesh("cpu", (4,))}
    return {
        "zero 3": {size: fully_sharded(UNEVEN, mesh) for size, mesh in meshes.items()},
        "float32": fully_sharded(UNEVEN, meshes[4], in_float32=True),
        "zero 1": {size: with_divided_states(EVEN, mesh.get_group()) for size, mesh in meshes.items()},
        "experts": {policy: held_by_layer(meshes[4], policy, False) for policy in POLICIES},
        "experts of pairs": held_by_layer(pairs, "minimal", False),
        "crowded": held_by_layer(meshes[4], "minimal", True),
    }


@pytest.fixture(scope="module")
def ranks():
    """What each of four ranks holds."""
    return with_gloo(on_a_rank, 4)


@pytest.mark.parametrize("size", [2, 4])
def test_zero_3_is_fsdp2_on_every_rank(ranks, size):
    stage = stage_of(UNEVEN, data=size, zero=3)
    assert [rank["zero 3"][size] for rank in ranks] == [planned(stage, rank % size) for rank in range(4)]
    assert planned(stage, size - 1) != planned(stage)


def test_a_float32_copy_costs_what_fsdp2_needs_with_weights_in_float32(ranks):
    """FSDP2 holds weights and gradients in float32, and casts what it gathers: the sum is the same."""
    assert ranks[0]["float32"] == planned(stage_of(UNEVEN, "fp32", data=4, zero=3))
    stage = stage_of(UNEVEN, "bf16-master", data=4, zero=3)
    assert sum(ranks[0]["float32"]) == sum(planned(stage)) + stage.resident[MASTER]


@pytest.mark.parametrize("size", [2, 4])
def test_zero_1_divides_the_same_states_as_torch(ranks, size):
    """torch gives whole tensors to ranks: the sum is the same, and the fullest rank has more."""
    found, stage = [rank["zero 1"][size] for rank in ranks[:size]], planned(stage_of(EVEN, data=size, zero=1))
    assert {rank[:2] for rank in found} == {stage[:2]}
    assert sum(rank.states for rank in found) == size * stage.states
    assert max(rank.states for rank in found) > stage.states


def planned_of_layer(size, policy, imbalance=1.0):
    """The same as the plan has it."""
    whole = MoEBlock(WIDTH, HIDDEN, EXPERTS, CHOSEN, "moeblaze", policy)
    rank = uneven(whole.share(1, size), imbalance)
    shapes = sorted(weight.dims for weight in rank.weights())
    return shapes, sorted(tensor.bytes for tensor in rank.kept(Step(1, TOKENS)))


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_with_some_of_the_experts_hold_what_is_planned(ranks, policy):
    assert [rank["experts"][policy] for rank in ranks] == [planned_of_layer(4, policy)] * 4


def test_ranks_that_all_tokens_visit_hold_what_is_planned(ranks):
    assert [rank["experts of pairs"] for rank in ranks] == [planned_of_layer(2, "minimal")] * 4


def test_the_fullest_rank_keeps_what_is_planned_for_its_imbalance(ranks):
    crowded = [rank["crowded"] for rank in ranks]
    assert crowded[0] == planned_of_layer(4, "minimal", imbalance=4 / 3)
    assert sum(crowded[0][1]) > max(sum(kept) for _, kept in crowded[1:])


def test_rows_of_experts_on_one_gpu_are_never_uneven():
    model = configs.read(EVEN, "model")
    for expert, grows in ((1, False), (2, True)):
        parallel = Parallel(data=2, expert=expert)
        fewest, most = (
            Run(model, Step(1, 16), parallel=parallel, imbalances=(one,)).stages[0].kept for one in (1, 1.5)
        )
        assert (most["experts"] > fewest["experts"]) == grows
