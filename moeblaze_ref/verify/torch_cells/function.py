"""An ``autograd.Function`` whose forward and backward run in two processes.

Only what ``ctx.save_for_backward`` was given goes from the one to the other, through the process that asks. So that
process counts the bytes that are saved, and no code of the reader's can say otherwise.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moeblaze_ref.verify.guard import Send
from moeblaze_ref.verify.torch_cells import messages
from moeblaze_ref.verify.torch_cells.cell import Cell

Arrays = dict[str, np.ndarray]


class Backward(NamedTuple):
    """What one backward is given."""

    saved: list[np.ndarray]
    needs: list[bool]  #: of each argument of the forward
    d_out: np.ndarray


def forward(cell: Cell, inputs: list[Arrays], pipe: Send) -> None:
    """Apply the function to the inputs of each case; send its output and what it saves."""

    def steps(function: Any) -> Iterator[dict[str, Any]]:
        for arrays in inputs:
            out, saved = _applied(function, [torch.from_numpy(array) for array in arrays.values()])
            yield {
                "out": messages.encoded("the output", out),
                "saved": [messages.encoded(f"saved tensor {place}", one) for place, one in enumerate(saved)],
            }

    cell.answer(steps, pipe)


def _applied(function: Any, arguments: list[Tensor]) -> tuple[Any, list[Tensor]]:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        _check_whole(len(saved), tensor)
        saved.append(tensor.detach().clone())
        return len(saved) - 1

    for tensor in arguments:
        tensor.requires_grad_(tensor.is_floating_point())
    with saved_tensors_hooks(pack, lambda place: saved[place]):
        return function.apply(*arguments), saved


def _check_whole(place: int, tensor: Tensor) -> None:
    """A view keeps the whole storage alive, of which only its own elements would be counted."""
    storage, own = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize
    if storage > own:
        raise ValueError(
            f"saved tensor {place} is a view: it has {own:,} bytes, and keeps the {storage:,} of its storage alive; "
            f"save a tensor of its own (clone)"
        )


class Context:
    """The ``ctx`` of the backward: it has what was saved, and nothing else of the forward."""

    def __init__(self, saved_tensors: tuple[Tensor, ...], needs_input_grad: tuple[bool, ...]):
        self.saved_tensors, self.needs_input_grad = saved_tensors, needs_input_grad

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"ctx has no {name} here: the backward runs in another process than the forward, and finds "
            f"ctx.saved_tensors and ctx.needs_input_grad alone"
        )


def backward(cell: Cell, steps: list[Backward], by_hand: bool, pipe: Send) -> None:
    """Call the function's backward on what was saved of each case; send the gradients.

    ``by_hand``: in inference mode, in which autograd records nothing. The last message also says which gradients no
    longer have the numbers that were sent: a later backward has written into their memory.
    """
    given: list[tuple[str, Tensor, dict[str, Any]]] = []  # of all cases so far, with what was sent

    def gradients(function: Any) -> Iterator[dict[str, Any]]:
        for saved, needs, d_out in steps:
            ctx = Context(tuple(map(torch.from_numpy, saved)), tuple(needs))
            with torch.inference_mode(by_hand), torch.no_grad():
                found = function.backward(ctx, torch.from_numpy(d_out))
                found = found if isinstance(found, tuple) else (found,)
                if len(found) != len(needs):
                    raise ValueError(f"backward returns {len(found)} gradients, but forward has {len(needs)} inputs")
                sent = [
                    messages.encoded(f"gradient {place}", one) if needed else None
                    for place, (one, needed) in enumerate(zip(found, needs, strict=True))
                ]
                told = zip(found, sent, strict=True)
                given.extend((f"gradient {i}", one, data) for i, (one, data) in enumerate(told) if data is not None)
                yield {"gradients": sent, "changed": _changed(given)}

    cell.answer(gradients, pipe)


def _changed(given: list[tuple[str, Tensor, dict[str, Any]]]) -> str:
    """The first of the tensors that no longer has the numbers that were sent; empty if all have."""
    return next((name for name, tensor, sent in given if messages.encoded(name, tensor) != sent), "")
