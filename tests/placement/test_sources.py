"""Records of serving runtimes as traces: every choice comes over, and what is no choice is left out and counted."""

import pickle
import re

import numpy as np
import pytest
import torch
from runtime_records import E, of_sglang, of_vllm, saved_as_npz, saved_as_responses

from moeblaze_ref.placement import sources

# vLLM ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "save"), [("routed.npz", saved_as_npz), ("routed.jsonl", saved_as_responses)])
def test_vllm_gives_a_sequence_for_each_request(name, save, tmp_path):
    full, real = of_vllm()
    save(tmp_path / name, full)
    found = sources.read(tmp_path / name, "vllm", model="a model")
    np.testing.assert_array_equal(found.trace.topk, real)
    assert found.trace.seq.tolist() == [0] * 5 + [1] * 7
    assert (found.dense, found.left_out, found.trace.num_experts, found.trace.model) == ((0, 3), 0, E, "a model")
    assert sources.read(tmp_path / name, "vllm", num_experts=64).trace.num_experts == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "line 1 of routed.jsonl has no choices"),
        ('{"choices": [{}]}', "line 1 of routed.jsonl, choice 0 has no routed_experts"),
        ('{"choices": [{"routed_experts": null}]}', "start the server with --enable-return-routed-experts"),
        ('{"choices": [{"routed_experts": "abc"}]}', "line 1 of routed.jsonl, choice 0 is not an npy file in base64"),
        ('{"choices": [{"routed_experts": 5}]}', "line 1 of routed.jsonl, choice 0 is not an npy file in base64"),
        ("no JSON", "line 1 of routed.jsonl is not JSON: Expecting value"),
        pytest.param("[" * 100_000, "line 1 of routed.jsonl is not JSON: ", id="nested too deep"),
        ("", "routed.jsonl holds no request"),
        ('{"choices": []}', "routed.jsonl holds no request"),
    ],
)
def test_responses_without_routing_are_refused(content, message, tmp_path):
    path = tmp_path / "routed.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        sources.read(path, "vllm")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros((3, 5), np.uint8)], "arr_0 has shape (3, 5), but it must have 3 dimensions"),
        ([np.zeros((3, 5, 2))], "arr_0 has dtype float64"),
        ([np.ones((3, 5, 2), np.uint8), np.ones((3, 4, 2), np.uint8)], "arr_1"),
        ([np.zeros((3, 5, 2), np.uint8)], "holds no choice of experts: every id is 0 or -1"),
        ([np.zeros((0, 5, 2), np.uint8)], "holds no token"),
        ([np.full((3, 5, 2), 7, np.uint8)], "names expert 7 twice"),
    ],
)
def test_arrays_that_are_no_routing_are_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "routed.npz", *arrays)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        sources.read(tmp_path / "routed.npz", "vllm")


def test_a_damaged_npz_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "routed.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(ValueError, match="routed.npz is not an npz of plain arrays"):
        sources.read(tmp_path / "routed.npz", "vllm")
    with pytest.raises(FileNotFoundError):
        sources.read(tmp_path / "none.npz", "vllm")


def test_an_unknown_source_and_an_id_beyond_the_experts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown source 'tensorrt'"):
        sources.read(tmp_path / "none", "tensorrt")
    saved_as_npz(tmp_path / "routed.npz", of_vllm()[0])
    with pytest.raises(ValueError, match=re.escape("(valid: 0..3)")):
        sources.read(tmp_path / "routed.npz", "vllm", num_experts=4)


# SGLang --------------------------------------------------------------------------------------------------------------


def test_sglang_gives_a_sequence_for_each_prompt_of_a_prefill(tmp_path):
    record, real = of_sglang()
    torch.save(record, tmp_path / "record.pt")
    found = sources.read(tmp_path / "record.pt", "sglang", num_experts=E)
    np.testing.assert_array_equal(found.trace.topk, real)
    assert found.trace.seq.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert (found.dense, found.left_out) == ((0,), 5 + 1)


def test_layers_of_which_one_pass_alone_names_expert_0_are_not_dense(tmp_path):
    """In a short pass an expert layer may name place 0 alone in one of its columns."""
    ids = torch.tensor([[[0, 1]], [[1, 0]]], dtype=torch.int32)  # 2 layers, a token
    record = {"topk_ids_of_layer": ids, "extend_seq_lens": [1]}
    torch.save({"records": [record], "last_physical_to_logical_map": torch.arange(4).repeat(2, 1)}, tmp_path / "r.pt")
    found = sources.read(tmp_path / "r.pt", "sglang")
    assert found.trace.topk.tolist() == [[[0, 1], [1, 0]]] and found.dense == ()


IDS, PLACES = "records[0].topk_ids_of_layer", "last_physical_to_logical_map"


def broken(**changes):
    record, _ = of_sglang()
    record["records"][0] |= changes
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"logical_count": torch.ones(2, 8)}, "holds counts, not choices"),
        ({"records": []}, "has no last_physical_to_logical_map, as SGLang's records of mode per_token have"),
        ({"records": [], "last_physical_to_logical_map": torch.zeros(2, 8, dtype=int)}, "holds no prefill"),
        ([1], "record.pt is no file of SGLang's recorder: it must be a dictionary"),
        (broken(extend_seq_lens=[2, 3]), "records[0] has 6 tokens, but extend_seq_lens add up to 5"),
        (broken(topk_ids_of_layer=torch.full((3, 6, 8), 9)), f"{IDS}[0, 0, 0] is 9, but there are only 9 physical"),
        (broken(topk_ids_of_layer=torch.zeros(2, 6, 8, dtype=int)), f"{IDS} has shape (2, 6, 8)"),
        (broken(topk_ids_of_layer=torch.zeros(6, 8, dtype=int)), f"{IDS} has shape (6, 8), but it must have 3 dim"),
        (broken(topk_ids_of_layer=torch.zeros(3, 6, 8)), f"{IDS} has dtype torch.float32"),
        (broken(topk_ids_of_layer=None), f"{IDS} is None, but it must be an array"),
        (broken(topk_ids_of_layer=[[1, 2], [3]]), f"{IDS} is a list, but it must be an array"),
        (broken(extend_seq_lens=["6"]), "records[0].extend_seq_lens[0] is '6' (str), but it must be an integer"),
        (broken(extend_seq_lens=[7, -1]), "records[0].extend_seq_lens[1] is -1, but it must be >= 0"),
        (broken(extend_seq_lens=6), "records[0].extend_seq_lens is not a list"),
        ({"records": [], PLACES: "text"}, f"{PLACES} is a str, but it must be an array"),
        ({"records": [], PLACES: torch.zeros(2, 8)}, f"{PLACES} has dtype torch.float32"),
        ({"records": [], PLACES: torch.full((2, 8), -1)}, f"{PLACES}[0, 0] is -1"),
    ],
)
def test_other_records_are_refused(record, message, tmp_path):
    torch.save(record, tmp_path / "record.pt")
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        sources.read(tmp_path / "record.pt", "sglang")


class Mine:
    """A class of which torch.load makes no object."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("source", ["sglang", "counts"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello world\n",
        b'{"records": []}',
        b"PK\x03\x04 cut",
        bytes(range(256)),
        pickle.dumps({"records": Mine()}),
    ],
    ids=["empty", "text", "JSON", "cut", "bytes", "pickle"],
)
def test_a_file_that_torch_does_not_load_is_refused_without_its_advice(content, source, tmp_path):
    (tmp_path / "record.pt").write_bytes(content)
    with pytest.raises(ValueError) as raised:
        sources.read(tmp_path / "record.pt", source)
    assert str(raised.value) == (
        "record.pt is no file of SGLang's recorder: it must be a dictionary of tensors, numbers, text and lists that "
        "torch.save wrote"
    )


def test_a_missing_record_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        sources.read(tmp_path / "none.pt", "sglang")


# Our own traces ------------------------------------------------------------------------------------------------------


def test_a_trace_without_tokens_is_not_said_to_lack_experts(tmp_path):
    np.savez(tmp_path / "empty.npz", topk=np.zeros((0, 2, 4), np.int16))
    with pytest.raises(ValueError, match=r"^empty.npz has no tokens: there is nothing to place by$"):
        sources.recorded_or_synthetic(tmp_path / "empty.npz", None, None)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [({"topk": np.zeros((3, 2, 4), np.int16)}, "k is 4, but there are only 1 experts"), ({"seq": [0]}, "has no topk")],
)
def test_other_faults_of_a_trace_keep_their_message(arrays, message, tmp_path):
    np.savez(tmp_path / "trace.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        sources.recorded_or_synthetic(tmp_path / "trace.npz", None, None)
