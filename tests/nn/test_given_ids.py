"""Expert ids that a caller gives, on a device whose tensors the host does not read: here a CPU, pretended to be one."""

import pytest
import torch
from pretended_graphs import pretended_graphs
from test_torch_experts import E, K, L, make, replace, step
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layers import all_equal

from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.nn import check_given_ids, given_ids
from moeblaze_ref.runtime.torch_capture import capture

TOKEN = 4
WRONG = {
    "too high": [0, E, 1],
    "below zero": [0, -1, 1],
    "past 32 bits": [0, 2**32, 1],
    "the lowest": [-(2**63), 0, 1],
    "twice": [2, 0, 2],
}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The CPU as a device whose tensors the host must wait for; without the notes of other tests."""
    monkeypatch.setattr(given_ids, "_is_read_at_once", lambda device: False)
    monkeypatch.setattr(given_ids, "_NOTES", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def with_ids(row, token=TOKEN):
    ids = make().topk_index.clone()
    ids[token] = torch.tensor(row)
    return replace(make(), topk_index=ids)


def message_of(row, token=TOKEN):
    return (
        f"topk_index[{token}] of an earlier call on cpu is {row}, but the ids of a token must be distinct and in "
        f"0..{E - 1}"
    )


def raised_by(call):
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


# What a token with wrong ids gets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", WRONG.values(), ids=WRONG)
def test_a_token_with_wrong_ids_gets_no_expert_and_all_others_are_right(row):
    wrong, right = with_ids(row), make()
    out, d_x, *d_weights, d_gates = step(wrong.call(), wrong.leaves())
    assert raised_by(make().call) == message_of(row)
    with torch.no_grad():
        right.topk_weights[TOKEN] = 0.0
    expected = step(right.call(), right.leaves())
    others = torch.arange(L) != TOKEN
    assert not out[TOKEN].any() and not d_x[TOKEN].any() and not d_gates[TOKEN].any()
    assert torch.equal(out[others], expected[0][others]) and torch.equal(d_x[others], expected[1][others])
    assert torch.equal(d_gates[others], expected[-1][others])
    for found, known in zip(d_weights, expected[2:-1], strict=True):
        torch.testing.assert_close(found, known)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("first", [None, 0, 3])
def test_whatever_the_ids_are_the_dispatch_gets_ids_that_it_can_take(first, dtype):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-4, 9, (300, K), generator=generator, dtype=dtype)
    x = torch.ones(300, 1)
    local = given_ids.local_ids(ids, x, K, E, first)
    assert local.dtype == torch.int32 and local.is_contiguous()
    for given, found in zip(ids.tolist(), local.tolist(), strict=True):
        here = [one - (first or 0) for one in given]
        here = [one if 0 <= one < E else EMPTY for one in here]
        there = [one for one in here if one != EMPTY]
        allowed = len(set(there)) == len(there) and (first is not None or len(there) == K)
        assert found == (here if allowed else [EMPTY] * K)
    assert raised_by(check_given_ids).startswith("topk_index[")


# Who hears of it ------------------------------------------------------------------------------------------------------


def test_the_next_call_raises_and_the_one_after_it_runs():
    with_ids(WRONG["too high"]).call()
    assert raised_by(make().call) == message_of([0, E, 1])
    make().call()
    check_given_ids()


def test_who_asks_is_told_once():
    check_given_ids()
    with_ids(WRONG["twice"], token=L - 1).call()
    assert raised_by(check_given_ids) == message_of([2, 0, 2], token=L - 1)
    check_given_ids()


def test_the_first_wrong_token_of_a_call_is_named():
    inputs = with_ids(WRONG["too high"])
    inputs.topk_index[TOKEN + 3] = torch.tensor(WRONG["twice"])
    inputs.call()
    assert raised_by(check_given_ids) == message_of([0, E, 1])


def test_a_right_call_does_not_take_back_what_the_device_found():
    """As when the host looks before the device has come so far."""
    note = given_ids._note_for(torch.device("cpu"), K, E, None)
    wrong = torch.arange(L) == TOKEN
    note.take(make().topk_index, wrong)
    note.take(make().topk_index, torch.zeros_like(wrong))
    assert raised_by(check_given_ids) == message_of(make().topk_index[TOKEN].tolist())


def test_the_host_reads_a_note_whatever_torchs_default_device_is():
    ids = make().topk_index
    with torch.device("meta"):
        note = given_ids._Note(torch.device("cpu"), K, "no more is allowed")
        note.take(ids, torch.arange(L, device="cpu") == TOKEN)
        with pytest.raises(
            ValueError, match=rf"topk_index\[{TOKEN}\] of an earlier call on cpu is .* no more is allowed"
        ):
            note.look()


def test_calls_of_all_sizes_are_heard_of():
    ids = make(k=2).topk_index.clone()
    ids[1] = torch.tensor([7, 7])
    replace(make(k=2), topk_index=ids).call()
    assert raised_by(make().call).startswith(
        "topk_index[1] of an earlier call on cpu is [7, 7], but the ids of a token"
    )


def test_on_a_rank_other_ids_are_skipped_and_its_own_must_be_distinct():
    with_ids([E + 3, -1, E + 3]).call(first=0)
    check_given_ids()
    with_ids([2, E, 2]).call(first=0)
    assert raised_by(check_given_ids) == (
        f"topk_index[{TOKEN}] of an earlier call on cpu is [2, {E}, 2], but its ids in 0..{E - 1} must be distinct"
    )


def test_no_tokens_have_no_wrong_ids():
    make(tokens=0).call()
    check_given_ids()


def test_right_ids_give_the_bits_that_they_give_where_they_are_read(monkeypatch):
    inputs = make()
    found = step(inputs.call(), inputs.leaves())
    monkeypatch.setattr(given_ids, "_is_read_at_once", lambda device: True)
    inputs = make()
    assert all_equal(found, step(inputs.call(), inputs.leaves()))


# The host does not wait -----------------------------------------------------------------------------------------------


class Impatient(TorchDispatchMode):
    """Refuses operators that give the host a number or a shape that depends on data."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        waiting = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        assert not waiting & {*operator.tags}, operator
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("row", [[0, 1, 2], WRONG["too high"]], ids=str)
def test_no_operator_gives_the_host_a_number(row, first):
    ids, x = with_ids(row).topk_index, torch.ones(L, 1)
    with Impatient():
        given_ids.local_ids(ids, x, K, E, first)


def test_an_operator_that_does_is_seen():
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Impatient():
        bool((make().topk_index < E).all())


def test_a_capture_goes_on_and_the_call_after_it_raises():
    with pretended_graphs():
        with_ids(WRONG["too high"]).call()
        with capture(torch.cuda.CUDAGraph()):
            make().call()
        assert raised_by(make().call) == message_of([0, E, 1])
