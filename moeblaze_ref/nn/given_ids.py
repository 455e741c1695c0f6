"""Expert ids that a caller gives: checked at once on a CPU, and on a GPU without waiting for it.

On a GPU a token with ids that are not allowed gets no expert, so no kernel reads or writes out of bounds. The device
notes the token and its ids. The host reads the note at a later call, or when `check_given_ids` is called.
"""

import torch
from torch import Tensor

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import has_values
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.nn import torch_operands

IDS = (torch.int64, torch.int32)
NAME = "topk_index"  # in messages


def local_ids(ids: Tensor, x: Tensor, k: int, num_experts: int, first: int | None) -> Tensor:
    """Return the ids as the dispatch takes them: from 0 on, ``EMPTY`` for experts that are not here.

    Parameters
    ----------
    ids : Tensor (L, k), int64 or int32
    x : Tensor (..., d)
        The L tokens.
    k, num_experts : int
    first : int or None
        The id of the first of the experts that are here. None: all are here, and no other id is allowed.

    Returns
    -------
    Tensor (L, k), int32
        Contiguous.

    Raises
    ------
    ValueError, TypeError
        If ids have another shape, dtype or device. On a CPU also if an id is not allowed; on a GPU if an earlier call
        was given an id that is not allowed.
    """
    torch_operands.check_routing_tensor(NAME, ids, x, k, IDS)
    checks.check_routed_rows(*ids.shape)
    if has_values(x) and _is_read_at_once(x.device):
        _check_now(ids, num_experts, first)
    local, wrong = _local(ids.long(), num_experts, first)
    if has_values(x) and not _is_read_at_once(x.device):
        _look_unless_capturing()
        _note_for(x.device, k, num_experts, first).take(ids, wrong)
    return local


def check_given_ids() -> None:
    """Wait for the GPUs, and raise if a call of `experts` was given expert ids that are not allowed.

    Call it where a step may wait, for example once an epoch. On a CPU `experts` itself raises.

    Raises
    ------
    ValueError
        If a call since the last error was given an id out of range, or one twice for a token. The message names the
        token and its ids. Replays of a CUDA graph count as calls.
    """
    for note in _NOTES.values():
        note.wait()
        note.look()


def _is_read_at_once(device: torch.device) -> bool:
    """Return True if the host reads a tensor of this device without waiting."""
    return device.type == "cpu"


def _check_now(ids: Tensor, num_experts: int, first: int | None) -> None:
    if first is None:
        checks.check_choice(NAME, ids.numpy(), num_experts)
    else:
        checks.check_distinct_rows(NAME, _from_first(ids.long(), num_experts, first).numpy())


def _from_first(ids: Tensor, num_experts: int, first: int) -> Tensor:
    """The ids counted from the first expert that is here; ``EMPTY`` for experts that are not."""
    counted = ids - first
    return counted.masked_fill(counted != counted.clamp(0, num_experts - 1), EMPTY)  # a scalar of `where` is copied


def _local(ids: Tensor, num_experts: int, first: int | None) -> tuple[Tensor, Tensor]:
    """The ids (L, k) for the dispatch, and the tokens (L,) whose ids are not allowed, which get no expert."""
    local = _from_first(ids, num_experts, first or 0)
    ordered = local.sort(dim=1).values
    wrong = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != EMPTY)).any(dim=1)
    if first is None:
        wrong |= (local == EMPTY).any(dim=1)
    return local.masked_fill(wrong[:, None], EMPTY).int(), wrong


class _Note:
    """The last token whose ids were not allowed, as a device wrote it down for the host.

    Parameters
    ----------
    device : torch.device
    k : int
    rule : str
        What is allowed, for the message.
    """

    def __init__(self, device: torch.device, k: int, rule: str):
        self._device, self._rule = device, rule
        self._found = torch.zeros(1 + k, dtype=torch.int64, device=device)  # the token's number + 1, its ids; or zeros
        self._read = torch.zeros(1 + k, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def take(self, ids: Tensor, wrong: Tensor) -> None:
        """Write down the first token that is wrong (L,), if one is, without waiting for the device."""
        if not len(wrong):
            return
        token = wrong.byte().argmax().reshape(1)  # of the first one
        found = torch.cat([token + 1, ids.index_select(0, token).flatten()])
        self._found.copy_(torch.where(wrong.index_select(0, token), found, self._found))
        self._read.copy_(self._found, non_blocking=True)

    def look(self) -> None:
        """Raise if the host can read of a token that is wrong, and forget it."""
        number, *ids = self._read.tolist()
        if number:
            self.wait()
            self._found.zero_()
            self._read.zero_()
            place = f"{NAME}[{number - 1}] of an earlier call on {self._device}"
            raise ValueError(f"{place} is {ids}, but {self._rule}")

    def wait(self) -> None:
        """Wait until the device has written down what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_NOTES: dict[tuple[torch.device, int, int, int | None], _Note] = {}


def _note_for(device: torch.device, k: int, num_experts: int, first: int | None) -> _Note:
    """The note of calls of these sizes. It stays: a CUDA graph writes to it at each replay."""
    key = device, k, num_experts, first
    if key not in _NOTES:
        start = first or 0
        here = f"{start}..{start + num_experts - 1}"
        distinct = f"the ids of a token must be distinct and in {here}"
        _NOTES[key] = _Note(device, k, distinct if first is None else f"its ids in {here} must be distinct")
    return _NOTES[key]


def _look_unless_capturing() -> None:
    """Look at all notes. A capture that raised would be lost, and its replays are looked at later."""
    if not torch.cuda.is_current_stream_capturing():
        for note in _NOTES.values():
            note.look()
