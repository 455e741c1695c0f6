"""States by the ids of experts: they load into another map, another number of ranks, and a single-device layer."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn

from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.parallel import local, threads
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.parallel.state import by_expert, stacked
from moeblaze_ref.placement.maps import Copies, Placement, from_hosts

SIZES = {"d": 8, "h": 6, "E": 6, "k": 2}
ON_FOUR = Copies(
    np.array([[[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0]]], dtype=bool), 2
)
ON_TWO = from_hosts([[[5, 2], [0, 1, 3, 4]]], 6)
ON_THREE = Placement(np.array([[2, 2, 0, 0, 2, 2]], np.int32), 3)  # rank 1 has no expert


def whole(activation="swiglu"):
    """A layer with all experts, alike wherever it is made."""
    torch.manual_seed(3)
    return MoELayer(**SIZES, activation=activation)


def taken(ranks, placement, activation="swiglu"):
    """A model with this rank's part of the whole layer."""
    layer = empty(ranks, placement, activation)
    layer.moe.take(whole(activation))
    return layer


def empty(ranks, placement, activation="swiglu"):
    """A model whose layer has weights of its own."""
    torch.manual_seed(50 + ranks.rank)
    return nn.ModuleDict({"moe": ExpertParallelMoE(placement=placement, ranks=ranks, activation=activation, **SIZES)})


def assert_is_part_of_the_whole(layer, activation="swiglu"):
    for (name, weight), (_, expected) in zip(
        layer.named_parameters(), whole(activation).named_parameters(), strict=True
    ):
        assert torch.equal(weight, expected if name == "wg" else expected[layer.experts]), name


# Over processes, by torch.distributed.checkpoint ------------------------------------------------------------------


def save(folder, placement):
    checkpoint.save(taken(Ranks(), placement).state_dict(), checkpoint_id=folder)


def load(*folders):
    """Load what was saved in each folder, and compare it with the whole layer."""
    for folder in folders:
        load_one(folder)
    return dist.get_world_size()


def load_one(folder):
    model = empty(Ranks(), ON_TWO)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_is_part_of_the_whole(model.moe)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """A checkpoint of four ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    local.run(save, 4, folder, ON_FOUR)
    return folder


def test_what_four_ranks_or_one_device_save_two_ranks_load(of_four, tmp_path):
    state = nn.ModuleDict({"moe": whole()}).state_dict()
    checkpoint.save(by_expert(state, prefix="moe."), checkpoint_id=tmp_path)
    assert local.run(load, 2, of_four, tmp_path) == [2, 2]


def test_what_four_ranks_save_one_device_loads(of_four):
    one = nn.ModuleDict({"moe": MoELayer(**SIZES)})
    rows = by_expert(one.state_dict(), prefix="moe.")  # views of the layer
    checkpoint.load(rows, checkpoint_id=of_four)
    for weight, expected in zip(one.moe.parameters(), whole().parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_an_expert_that_was_not_saved_is_named(tmp_path):
    state = by_expert(whole().state_dict())
    saved = {key: row for key, row in state.items() if key != "experts.3.w1"}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    with pytest.raises(checkpoint.CheckpointException, match=r"Missing key in checkpoint state_dict: experts\.3\.w1\."):
        checkpoint.load(state, checkpoint_id=tmp_path)


# States in memory -----------------------------------------------------------------------------------------------------


def states(ranks, placement, activation):
    return taken(ranks, placement, activation).state_dict()


def loaded(ranks, placement, state, activation):
    model = empty(ranks, placement, activation)
    model.load_state_dict(state)
    assert_is_part_of_the_whole(model.moe, activation)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_state_has_this_ranks_experts_under_their_ids(activation):
    names = ("w1", "w3") if activation == "gelu" else ("w1", "w2", "w3")
    for rank, state in enumerate(threads.run(states, 4, ON_FOUR, activation)):
        experts = ON_FOUR.hosts(0)[rank]
        assert state.keys() == {"moe.wg", *(f"moe.experts.{e}.{name}" for e in experts for name in names)}
        for expert in experts:
            for name in names:
                assert torch.equal(state[f"moe.experts.{expert}.{name}"], getattr(whole(activation), name)[expert])


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("placement", [ON_TWO, ON_THREE, ON_FOUR], ids=["2 ranks", "3 ranks", "4 ranks"])
def test_states_of_ranks_load_anywhere(placement, activation):
    together = {key: row for state in threads.run(states, 4, ON_FOUR, activation) for key, row in state.items()}
    threads.run(loaded, placement.num_gpus, placement, together, activation)
    one = nn.ModuleDict({"moe": MoELayer(**SIZES, activation=activation)})
    one.load_state_dict(stacked(together, "moe."))
    for weight, expected in zip(one.moe.parameters(), whole(activation).parameters(), strict=True):
        assert torch.equal(weight, expected)
    threads.run(loaded, placement.num_gpus, placement, one.state_dict(), activation)  # a stacked one, as it is


def test_ids_and_stacks_are_inverse():
    state = whole().state_dict()
    again = stacked(by_expert(state))
    assert again.keys() == state.keys() and all(torch.equal(again[key], state[key]) for key in state)
    assert by_expert(state)["experts.4.w3"].data_ptr() == state["w3"][4].data_ptr()


def test_other_ids_than_experts_are_refused():
    with pytest.raises(ValueError, match="w1 has 6 experts, but 2 ids are given"):
        by_expert(whole().state_dict(), [3, 4])


def refused(ranks, change, strict):
    """What loading a changed state says, or whether it left the rest as it is."""
    model = empty(ranks, ON_TWO)
    state = by_expert(whole().state_dict())
    state = {f"moe.{key}": row for key, row in state.items()}
    change(state)
    before = model.moe.w1.detach().clone()
    try:
        model.load_state_dict(state, strict=strict)
    except (ValueError, RuntimeError) as error:
        return str(error)
    places = [place for place, expert in enumerate(model.moe.experts) if expert == 3]
    return bool(torch.equal(model.moe.w1[places], before[places]))


def without_expert_3(state):
    for name in ("w1", "w2", "w3"):
        del state[f"moe.experts.3.{name}"]


def test_a_missing_expert_is_named_where_it_is_needed():
    here, there = threads.run(refused, 2, without_expert_3, True)
    assert here is True  # rank 0 has no part in it
    assert all(f'"moe.experts.3.{name}"' in there for name in ("w1", "w2", "w3")) and "experts.4" not in there
    assert threads.run(refused, 2, without_expert_3, False) == [True, True]
    with pytest.raises(ValueError, match="the state has no experts.3.w1, but all 6 experts must be there"):
        state = by_expert(whole().state_dict())
        del state["experts.3.w1"]
        stacked(state)


def test_an_expert_of_another_shape_is_named():
    def change(state):
        state["moe.experts.4.w3"] = torch.zeros(7, 8)

    _, said = threads.run(refused, 2, change, True)
    assert said.splitlines()[1:] == ["\tmoe.experts.4.w3 has shape (7, 8), but the layer's experts need (6, 8)"]


def test_an_expert_that_no_map_has_is_unexpected():
    def change(state):
        state["moe.experts.6.w1"] = torch.zeros(8, 6)

    for said in threads.run(refused, 2, change, True):
        assert re.search(r"Unexpected key\(s\) in state_dict: \"moe\.experts\.6\.w1\"", said)
