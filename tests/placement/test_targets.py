"""Maps in the files of serving runtimes, written and read again; tests/foreign has SGLang's own code read them."""

import json

import numpy as np
import pytest
import torch

from moeblaze_ref.placement import maps, targets

SUFFIX = {name: form.suffixes[0] for name, form in targets.TARGETS.items()}


@pytest.fixture
def placed():
    """3 layers of 8 experts on 4 GPUs, each layer in an order of its own."""
    order = np.random.default_rng(0).permuted(np.tile(np.arange(8), (3, 1)), axis=1)
    return maps.Placement((order // 2).astype(np.int32), 4, "a model")


@pytest.fixture
def copied():
    """3 layers of 6 experts on 4 GPUs, 2 on each: experts 0 and 1 or others have two copies."""
    rng, held = np.random.default_rng(1), np.zeros((3, 6, 4), bool)
    for layer in held:
        order = rng.permutation(6)
        for place, expert in enumerate([*order, *order[:2]]):
            layer[expert, place % 4] = True
    return maps.Copies(held, 2, "a model")


def test_the_places_of_a_gpu_stand_together(placed):
    places = targets.physical_experts(placed)
    assert places.shape == (3, 4, 2)
    for layer, gpus in enumerate(places):
        assert [gpu.tolist() for gpu in gpus] == placed.hosts(layer)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_map_comes_back(target, placed, tmp_path):
    path = tmp_path / f"map{SUFFIX[target]}"
    targets.save(path, target, placed)
    again = targets.load(path, target, 4, model="a model")
    np.testing.assert_array_equal(again.assignment, placed.assignment)
    assert (again.num_gpus, again.model) == (4, "a model")


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_map_with_copies_comes_back(target, copied, tmp_path):
    path = tmp_path / f"map{SUFFIX[target]}"
    targets.save(path, target, copied)
    again = targets.load(path, target, 4, model="a model", num_nodes=2)
    np.testing.assert_array_equal(again.held, copied.held)
    assert (again.num_nodes, again.model) == (2, "a model")


def test_the_tensors_of_eplb_name_every_copy(copied, tmp_path):
    targets.save(tmp_path / "map.pt", "eplb", copied)
    found = {name: tensor.numpy() for name, tensor in torch.load(tmp_path / "map.pt", weights_only=True).items()}
    assert found["phy2log"].shape == (3, 8) and found["log2phy"].shape == (3, 6, 2)
    np.testing.assert_array_equal(found["logcnt"], copied.held.sum(axis=2))
    for layer in range(3):
        for expert in range(6):
            places = found["log2phy"][layer, expert]
            number = found["logcnt"][layer, expert]
            assert (places[number:] == -1).all() and (found["phy2log"][layer, places[:number]] == expert).all()
            assert (places[:number] // 2).tolist() == np.flatnonzero(copied.held[layer, expert]).tolist()


def test_layers_without_experts_have_copies_too(copied, tmp_path):
    targets.save(tmp_path / "map.json", "sglang", copied, dense=(1,))
    rows = json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"]
    assert rows[1] == [0, 1, 2, 3, 4, 5, 0, 1] and len(rows) == 4


def test_sglang_has_a_row_for_each_layer_without_experts(placed, tmp_path):
    path = tmp_path / "map.json"
    targets.save(path, "sglang", placed, dense=(0, 3))
    rows = json.loads(path.read_text())["physical_to_logical_map"]
    assert rows[0] == rows[3] == list(range(8)) and len(rows) == 5
    assert [rows[1], rows[2], rows[4]] == targets.physical_experts(placed).reshape(3, 8).tolist()
    np.testing.assert_array_equal(targets.load(path, "sglang", 4, (0, 3)).assignment, placed.assignment)


def test_ascend_counts_layers_with_experts_alone(placed, tmp_path):
    path = tmp_path / "map.json"
    targets.save(path, "ascend", placed, dense=(0,))
    found = json.loads(path.read_text())
    assert found["moe_layer_count"] == 3
    for layer, content in enumerate(found["layer_list"]):
        assert (content["layer_id"], content["device_count"]) == (layer, 4)
        devices = content["device_list"]
        assert [device["device_id"] for device in devices] == [0, 1, 2, 3]
        assert [device["device_expert"] for device in devices] == placed.hosts(layer)


def test_the_tensors_of_eplb_lead_there_and_back(placed, tmp_path):
    path = tmp_path / "map.pt"
    targets.save(path, "eplb", placed)
    found = torch.load(path, weights_only=True)
    assert {tensor.dtype for tensor in found.values()} == {torch.int64}
    back = found["phy2log"].gather(1, found["log2phy"][:, :, 0])
    assert (back == torch.arange(8)).all() and found["log2phy"].shape == (3, 8, 1) and (found["logcnt"] == 1).all()


def test_every_target_says_what_reads_it():
    for name in targets.TARGETS:
        assert f"- ``{name}``: " in targets.__doc__


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        ("vllm", "map.json", "vllm is not a target: vLLM 0.33.0 reads no map from a file"),
        ("trt", "map.json", "unknown target 'trt'"),
        ("sglang", "map.npz", "map.npz does not end in .json, as sglang needs it"),
        ("eplb", "map.json", "map.json does not end in .pt, as eplb needs it"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(target, name, message, placed, tmp_path):
    with pytest.raises(ValueError, match=message):
        targets.save(tmp_path / name, target, placed)
    assert not list(tmp_path.iterdir())


def test_uneven_gpus_are_refused_with_their_numbers(tmp_path):
    uneven = maps.from_hosts([[[0, 1], [2, 3]], [[0], [1, 2, 3]]], 4)
    with pytest.raises(ValueError, match=r"layer 1 has \[1, 3\] experts on its GPUs, but the runtimes need as many"):
        targets.save(tmp_path / "map.json", "sglang", uneven)


def test_uneven_copies_are_refused_with_their_numbers(copied, tmp_path):
    held = copied.held.copy()
    held[1, :, 3] = True
    with pytest.raises(ValueError, match=r"layer 1 has \[2, 2, 2, 6\] experts on its GPUs, but .*: 12 places on 4"):
        targets.save(tmp_path / "map.json", "sglang", maps.Copies(held, 2))


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ((0, 0), r"the dense layers are \[0, 0\], but each may be named once"),
        ((9,), "a dense layer"),
        ((-1,), "a dense"),
    ],
)
def test_dense_layers_that_do_not_fit_are_refused(dense, message, placed, tmp_path):
    with pytest.raises(ValueError, match=message):
        targets.save(tmp_path / "map.json", "sglang", placed, dense)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1], [1, 1]], r"layer 1: expert 1 is on GPUs \[0, 1\]"),
        ([[0, 1, 2], [2, 1, 0]], "has 3 places, but 2 GPUs need a multiple of 2"),
        ([[0, 1, 0, 2], [1, 1, 0, 2]], "layer 1: expert 1 is 2 times on GPU 0, but may be there once"),
        ([[0, 1, 0, 2], [1, 0, 1, 0]], "layer 1: expert 2 is on no GPU"),
        ([[0, 1], [0]], r"rows of \[1, 2\] places"),
        ([], r"rows of \[\] places"),
        ([[0, "a"]], "layer 0, place 1"),
        ([[0, -1]], "layer 0, place 1 is -1"),
        ([[0, 10**30]], "layer 0, place 1 is 1000000000000000000000000000000, but it must be 0..32767"),
        ("text", "the map is not a list"),
    ],
)
def test_a_map_that_places_experts_wrongly_is_refused(rows, message, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": rows}))
    with pytest.raises((ValueError, TypeError), match=message):
        targets.load(path, "sglang", 2)


def test_another_file_is_kept(placed, tmp_path):
    path = tmp_path / "map.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="physical_to_logical_map"):
        targets.save(path, "sglang", placed)
    assert path.read_text() == '{"mine": 1}'
    targets.save(path, "sglang", placed, force=True)
    targets.save(path, "sglang", placed)  # its own kind


TENSORS = {name: torch.zeros(2, 8, dtype=int) for name in targets.EPLB_TENSORS}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TENSORS | {"phy2log": [[0, 1]]}, "phy2log of map.pt is a list, but it must be an array of int8"),
        (TENSORS | {"phy2log": torch.zeros(2, 8)}, "phy2log of map.pt has dtype torch.float32"),
        (TENSORS | {"phy2log": torch.tensor(3)}, r"phy2log of map.pt has shape \(\), but it must have 2 dimensions"),
        ({"phy2log": TENSORS["phy2log"]}, "map.pt has no log2phy, logcnt"),
        ([1], "map.pt is no file of EPLB's tensors: it must be a dictionary"),
    ],
)
def test_another_file_of_torch_is_kept(content, message, placed, tmp_path):
    path = tmp_path / "map.pt"
    torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"map.pt exists, and this command did not write it: {message}"):
        targets.save(path, "eplb", placed)
    assert path.read_bytes() == before
    targets.save(path, "eplb", placed, force=True)
    targets.save(path, "eplb", placed)  # its own kind


def test_notes_under_the_name_of_tensors_are_kept(placed, tmp_path):
    (tmp_path / "map.pt").write_text("hello world")
    with pytest.raises(
        ValueError, match=r"exists, and .*: map.pt is no file of EPLB's tensors: .*, or replace it by --"
    ):
        targets.save(tmp_path / "map.pt", "eplb", placed)
    assert (tmp_path / "map.pt").read_text() == "hello world"


@pytest.mark.parametrize("name", ["map.json", "map.pt", "map.v2"])
def test_our_own_map_has_the_ending_of_an_npz_or_none(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} does not end in .npz: without --to, --out takes .npz or no ending"):
        targets.planned(tmp_path / name, None)
    for allowed in ("map.npz", "map"):
        assert targets.planned(tmp_path / allowed, None).path == tmp_path / allowed
