"""A recorded call as parts that replay it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moeblaze_ref.runtime.launch_plan.events import Buffer, Operation, in_blocks, over
from moeblaze_ref.runtime.launch_plan.recorder import Recorder
from moeblaze_ref.runtime.launch_plan.schedule import Lives, Part, Scheduler
from moeblaze_ref.runtime.launch_plan.sender import Driver, Sender

Tensors = list[Tensor | None]  # one a buffer


class Plan:
    """Replays a recorded call on other inputs of the same shapes, dtypes and alignment. Threads may share it.

    Parameters
    ----------
    recorder : Recorder
        Of the call, which has returned.
    results : sequence of Tensor or None
        What it has returned.
    device : torch.device
    driver : Driver

    Raises
    ------
    NoPlan
        If the call did what cannot be replayed, such as to wait for the device.
    SimtUnavailable
        If there is no C++ compiler.
    """

    def __init__(self, recorder: Recorder, results: Sequence[Tensor | None], device: torch.device, driver: Driver):
        recorder.check()
        self._results = [None if tensor is None else recorder.view(tensor) for tensor in results]
        self._copied = [i for i, tensor in enumerate(results) if tensor is not None and recorder.is_number(tensor)]
        lasting = {view.buffer for view in self._results if view} | {*range(recorder.num_inputs)} - recorder.freed()
        lives = Lives(recorder.events, lasting)
        self._unread = [number for number in range(recorder.num_inputs) if number not in lives.last]
        peak = recorder.peak + sum(in_blocks(recorder.buffers[number].nbytes) for number in self._unread)
        parts = Scheduler(recorder.events, recorder.buffers, recorder.num_inputs, lives, peak).parts()
        self._parts = [_ready(part, recorder.buffers, device, driver) for part in parts]
        self._constants: Tensors = [buffer.constant for buffer in recorder.buffers[recorder.num_inputs :]]
        self._unused = _makers(lasting - lives.first.keys(), recorder.buffers)

    def run(self, inputs: Tensors, stream: int) -> list[Tensor | None]:
        """Replay the call on a stream. Returns its results.

        Parameters
        ----------
        inputs : list of Tensor
            Emptied, so that an input without another reference is freed where the recorded call freed it.
        stream : int
            Address of a CUDA stream.
        """
        tensors = inputs + self._constants
        inputs.clear()
        for number in self._unread:  # the recorded call freed it, and nothing reads it
            tensors[number] = None
        for part in self._parts:
            for number, make in part.makers:
                tensors[number] = make()
            part.work(tensors, stream)
            for number in part.dropped:
                tensors[number] = None
        for number, make in self._unused:
            tensors[number] = make()
        found = [view and view.of(tensors) for view in self._results]
        for place in self._copied:  # the next step reads the number, whatever its owner does to this one
            found[place] = cast(Tensor, found[place]).clone()
        return found


Makers = list[tuple[int, Callable[[], Tensor]]]


class _Ready(NamedTuple):
    """A part that is ready to run: what it allocates, does and frees."""

    makers: Makers
    work: Callable[[Tensors, int], None]
    dropped: tuple[int, ...]


def _makers(numbers: Iterable[int], buffers: Sequence[Buffer]) -> Makers:
    """Return the functions that allocate buffers, without the buffers that an operation allocates."""
    found = ((number, buffers[number].make) for number in numbers)
    return [(number, make) for number, make in found if make is not None]


def _ready(part: Part, buffers: Sequence[Buffer], device: torch.device, driver: Driver) -> _Ready:
    first = part.events[0]
    work = _operation(first) if isinstance(first, Operation) else _launches(part, device, driver)
    return _Ready(_makers(part.born, buffers), work, part.dropped)


def _launches(part: Part, device: torch.device, driver: Driver) -> Callable[[Tensors, int], None]:
    """Return the function that sends a part's launches and products. The last address is that of its arena."""
    events = [event for event in part.events if not isinstance(event, Operation)]
    outside = [*dict.fromkeys(number for event in events for number in event.buffers() if number not in part.arena)]
    slots = {number: (place, 0) for place, number in enumerate(outside)}
    slots |= {number: (len(outside), begin) for number, begin in part.arena.items()}
    send = Sender(events, slots, len(outside) + 1, driver).send
    empty = functools.partial(torch.empty, part.arena_bytes, dtype=torch.uint8, device=device)

    def work(tensors: Any, stream: int) -> None:
        arena = empty()
        send([*[tensors[number].data_ptr() for number in outside], arena.data_ptr()], stream)

    def work_without_arena(tensors: Any, stream: int) -> None:
        send([*[tensors[number].data_ptr() for number in outside], 0], stream)

    return work if part.arena else work_without_arena


# The same operations by torch's Python bindings, which cost the host 2 microseconds less than an overload. They take
# the same arguments.
_OF_TORCH = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "reciprocal.default", "clamp.default", "sum.default"),
    *("eq.Tensor", "eq.Scalar", "ne.Scalar", "gt.Scalar", "ge.Tensor", "bitwise_or.Tensor", "any.default", "any.dim"),
    *("arange.default", "cat.default", "clone.default", "constant_pad_nd.default", "masked_fill.Scalar", "mm.default"),
    *("ones.default", "stack.default", "tril.default"),
)
_OF_TENSORS = ("add_.Tensor", "addmm_.default", "logical_or_.default", "masked_fill_.Scalar")
_BINDINGS: dict[Any, Callable[..., Any]] = {
    getattr(getattr(torch.ops.aten, name), overload): getattr(owner, name)
    for owner, names in ((torch, _OF_TORCH), (Tensor, _OF_TENSORS))
    for name, overload in (each.split(".") for each in names)
} | {torch.ops.aten._to_copy.default: Tensor.to}


def _operation(operation: Operation) -> Callable[[Tensors, int], None]:
    """Return the function that runs one operation and stores the results among the tensors."""
    function = _BINDINGS.get(operation.function, operation.function)
    args, kwargs, results = operation.args, operation.kwargs, operation.results

    def work(tensors: Tensors, stream: int) -> None:
        named = {name: over(value, tensors) for name, value in kwargs.items()}
        found = function(*[over(value, tensors) for value in args], **named)
        for number, tensor in zip(results, found if isinstance(found, tuple | list) else [found], strict=True):
            if number is not None:
                tensors[number] = tensor

    return work
