"""SGLang's own code reads our maps: the file comes from its wheel on PyPI, without the runtime around it."""

import sys
import types
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.placement import maps, targets

WHEELS = ROOT / "build" / "sglang"
READER = "sglang/srt/eplb/expert_location.py"


@pytest.fixture
def placed():
    """3 layers of 8 experts on 4 GPUs, each layer in an order of its own."""
    order = np.random.default_rng(0).permuted(np.tile(np.arange(8), (3, 1)), axis=1)
    return maps.Placement((order // 2).astype(np.int32), 4, "a model")


class Anything(types.ModuleType):
    """A module with every name, for what the reader imports and does not call here."""

    def __getattr__(self, name):
        return SimpleNamespace


@pytest.fixture
def reader(monkeypatch):
    """SGLang's ``expert_location.py``, without the runtime around it."""
    wheel = next(WHEELS.glob("sglang-0.5.23-*.whl"), None)
    if wheel is None:
        pytest.skip("the wheel of sglang 0.5.23 is not here: `make build/sglang` fetches it")
    with zipfile.ZipFile(wheel) as files:
        text = files.read(READER).decode()
    moe = SimpleNamespace(moe_a2a_backend="none", ep_dispatch_algorithm=None, ep_num_redundant_experts=0)
    context = Anything("sglang.srt.runtime_context")
    context.get_exec = lambda: SimpleNamespace(moe=moe)
    context.get_device = lambda: SimpleNamespace(device="cpu")
    context.get_parallel = lambda: SimpleNamespace(ep_size=4, elastic_ep_initial_size=None)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, Anything(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    module = types.ModuleType("expert_location")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, READER, "exec"), vars(module))
    module.moe = moe
    return module


def test_sglang_finds_every_expert_on_its_gpu(reader, placed, tmp_path, monkeypatch):
    """As the server begins with ``--init-expert-location map.json``, for a model whose first layer has no experts."""
    reader.moe.init_expert_location = str(tmp_path / "map.json")
    model = SimpleNamespace(num_layers=4, num_logical_experts=8, num_groups=None)
    of_model = SimpleNamespace(from_model_config=lambda config: model)
    monkeypatch.setattr(reader, "ModelConfigForExpertLocation", of_model)
    targets.save(tmp_path / "map.json", "sglang", placed, dense=(0,))
    metadata = reader.compute_initial_expert_location_metadata(None, moe_ep_rank=0)
    assert (metadata.num_layers, metadata.num_physical_experts, metadata.num_local_physical_experts) == (4, 8, 2)
    on = [[metadata.logical_to_all_physical(layer, expert) for expert in range(8)] for layer in range(4)]
    np.testing.assert_array_equal(np.array(on)[1:, :, 0] // 2, placed.assignment)


def test_sglang_finds_every_copy_on_its_gpu(reader, placed, tmp_path, monkeypatch):
    """As with ``--ep-num-redundant-experts 4``: every GPU has one expert more."""
    held = maps.Copies.of(placed).held.copy()
    for layer, experts in enumerate(held):
        for gpu in range(4):
            experts[np.flatnonzero(~experts[:, gpu])[layer + gpu], gpu] = True
    reader.moe.init_expert_location = str(tmp_path / "map.json")
    reader.moe.ep_num_redundant_experts = 4
    model = SimpleNamespace(num_layers=3, num_logical_experts=8, num_groups=None)
    of_model = SimpleNamespace(from_model_config=lambda config: model)
    monkeypatch.setattr(reader, "ModelConfigForExpertLocation", of_model)
    targets.save(tmp_path / "map.json", "sglang", maps.Copies(held))
    metadata = reader.compute_initial_expert_location_metadata(None, moe_ep_rank=0)
    assert (metadata.num_physical_experts, metadata.num_local_physical_experts) == (12, 3)
    for layer in range(3):
        for expert in range(8):
            on = [place // 3 for place in metadata.logical_to_all_physical(layer, expert)]
            assert sorted(on) == np.flatnonzero(held[layer, expert]).tolist()


def test_sglang_takes_the_tensors_of_eplb(reader, placed, tmp_path):
    path = tmp_path / "map.pt"
    targets.save(path, "eplb", placed)
    found = torch.load(path, weights_only=True)
    metadata = reader.ExpertLocationMetadata._init_raw(4, found["phy2log"], found["log2phy"], moe_ep_rank=0)
    assert (metadata.num_physical_experts, metadata.num_local_physical_experts, metadata.num_layers) == (8, 2, 3)
    on = [[metadata.logical_to_all_physical(layer, expert) for expert in range(8)] for layer in range(3)]
    np.testing.assert_array_equal(np.array(on)[:, :, 0] // 2, placed.assignment)
