"""``moeblaze place`` from a runtime's record to a runtime's map."""

import json

import numpy as np
import pytest
import torch
from runtime_records import of_sglang, of_vllm, saved_as_responses
from test_cli import moeblaze

from moeblaze_ref.placement import maps, targets

FAST = ("--gpus", 2, "--method", "greedy,contiguous")


@pytest.fixture
def routed(tmp_path):
    """Responses of vLLM to two requests of a model with 5 layers; those without experts are 0 and 3."""
    saved_as_responses(tmp_path / "routed.jsonl", of_vllm()[0])
    return tmp_path / "routed.jsonl"


def placed(*arguments):
    result = moeblaze("place", *FAST, *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def refused(*arguments):
    result = moeblaze("place", *FAST, *arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_record_becomes_a_map_for_a_runtime(target, routed, tmp_path):
    out = tmp_path / f"map{targets.TARGETS[target].suffixes[0]}"
    of_routing = ("--trace", routed, "--from", "vllm")
    placed(*of_routing, "--out", tmp_path / "map.npz")
    placed(*of_routing, "--to", target, "--out", out)
    placed(*of_routing, "--to", target, "--out", out)  # its own kind is replaced
    dense = (0, 3) if target == "sglang" else ()
    found = targets.load(out, target, 2, dense).assignment
    np.testing.assert_array_equal(found, maps.load(tmp_path / "map.npz").assignment)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_record_becomes_a_map_with_copies_for_a_runtime(target, routed, tmp_path):
    out = tmp_path / f"map{targets.TARGETS[target].suffixes[0]}"
    of_routing = ("--trace", routed, "--from", "vllm", "--gpus", 2, "--method", "dedup-copies", "--budget", 5)
    for options in (("--out", tmp_path / "map.npz"), ("--to", target, "--out", out)):
        result = moeblaze("place", *of_routing, *options)
        assert result.exit_code == 0, result.stderr
    found = targets.load(out, target, 2, (0, 3) if target == "sglang" else ())
    np.testing.assert_array_equal(found.held, maps.load(tmp_path / "map.npz").held)
    assert (found.sizes() == 5).all()


@pytest.mark.parametrize("target", targets.TARGETS)
def test_copies_fill_gpus_on_which_experts_do_not_go_evenly(target, tmp_path):
    """Nine experts on two GPUs: packing is uneven, and the map with copies is written in its place."""
    out = tmp_path / f"map{targets.TARGETS[target].suffixes[0]}"
    asked = ("--synthetic", "4x9x2", "--splits", 0, "--method", "dedup-copies", "--budget", 5)
    placed(*asked, "--to", target, "--out", out)
    found = targets.load(out, target, 2)
    assert found.held.shape == (4, 9, 2) and (found.sizes() == 5).all() and found.held.any(axis=2).all()


def test_layers_without_experts_can_be_named(tmp_path):
    placed(
        "--synthetic", "4x8x2", "--splits", 0, "--to", "sglang", "--dense-layers", "0-1,4", "--out", tmp_path / "m.json"
    )
    rows = json.loads((tmp_path / "m.json").read_text())["physical_to_logical_map"]
    assert len(rows) == 7 and rows[0] == rows[1] == rows[4] == list(range(8))


def test_what_is_left_out_of_a_record_is_said(tmp_path):
    torch.save(of_sglang()[0], tmp_path / "record.pt")
    result = placed("--trace", tmp_path / "record.pt", "--from", "sglang")
    assert "note: 6 recorded tokens are left out: padding, or decodes of unknown requests" in result.stderr


SYNTHETIC = ("--synthetic", "4x8x2", "--splits", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SYNTHETIC, "--from", "vllm"), "--from vllm reads a recorded trace: give --trace"),
        (
            (*SYNTHETIC, "--expand", "8x16x4", "--to", "eplb", "--out", "m.pt"),
            "--to eplb writes a map for a runtime, but none has the model that --expand makes up",
        ),
        (("--from", "vllm"), "--from vllm reads a recorded trace: give --trace"),
        ((*SYNTHETIC, "--to", "sglang"), "a map for sglang needs a file to be written to: name it by --out"),
        (
            (*SYNTHETIC, "--out", "m.json"),
            "m.json does not end in .npz: without --to, --out takes .npz or no ending. A runtime's map needs --to: "
            "sglang, ascend, eplb",
        ),
        ((*SYNTHETIC, "--to", "vllm", "--out", "m.json"), "vllm is not a target: vLLM 0.33.0 reads no map from a file"),
        ((*SYNTHETIC, "--to", "sglang", "--out", "m.npz"), "m.npz does not end in .json, as sglang needs it"),
        ((*SYNTHETIC, "--to", "ascend", "--dense-layers", "0", "--out", "m.json"), "only a map for sglang counts them"),
        ((*SYNTHETIC, "--dense-layers", "0", "--out", "m.npz"), "only a map for sglang counts them"),
        ((*SYNTHETIC, "--to", "sglang", "--dense-layers", "2-1", "--out", "m.json"), "such as 0-2 or 0,3"),
        ((*SYNTHETIC, "--to", "sglang", "--dense-layers", "x", "--out", "m.json"), "such as 0-2 or 0,3"),
        (
            ("--synthetic", "4x9x2", "--splits", 0, "--to", "eplb", "--out", "m.pt"),
            "9 experts do not go evenly on 2 GPUs, but the runtimes need as many places on each: copies can fill them",
        ),
        (
            (*SYNTHETIC, "--to", "eplb", "--out", "m.pt", "--experts-per-gpu", "1:8"),
            "1 to 8 experts on a GPU are allowed, but the runtimes need as many on each: leave --experts-per-gpu out, "
            "or name 4:4",
        ),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)
    assert not list(tmp_path.iterdir())


def test_text_is_no_record_of_sglang_and_no_map_of_eplb(tmp_path):
    path = tmp_path / "notes.pt"
    path.write_text("hello world")
    message = "it must be a dictionary of tensors, numbers, text and lists that torch.save wrote"
    assert f"notes.pt is no file of SGLang's recorder: {message}" in refused("--trace", path, "--from", "sglang")
    assert f"notes.pt is no file of EPLB's tensors: {message}" in refused(*SYNTHETIC, "--to", "eplb", "--out", path)
    assert path.read_text() == "hello world"


def test_a_list_in_place_of_a_tensor_is_no_map_of_eplb(tmp_path):
    path = tmp_path / "mine.pt"
    torch.save(dict.fromkeys(targets.EPLB_TENSORS, [[0, 1]]), path)
    before = path.read_bytes()
    assert "phy2log of mine.pt is a list" in refused(*SYNTHETIC, "--to", "eplb", "--out", path)
    assert path.read_bytes() == before


def test_a_record_that_names_other_dense_layers_is_refused(routed, tmp_path):
    message = refused(
        "--trace", routed, "--from", "vllm", "--to", "sglang", "--dense-layers", "0", "--out", tmp_path / "map.json"
    )
    assert "dense layers are 0, but the record has none of the layers [0, 3]" in message


def test_a_dense_layer_beyond_the_model_is_refused_before_any_work(tmp_path):
    out = tmp_path / "m.json"
    assert "a dense layer is 9" in refused(*SYNTHETIC, "--to", "sglang", "--dense-layers", "9", "--out", out)
