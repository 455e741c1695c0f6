"""Notes what one call launches, computes by torch, and allocates."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from moeblaze_ref.runtime.declarations import TENSOR_MAP
from moeblaze_ref.runtime.launch_plan.events import (
    Buffer,
    Event,
    Launch,
    MapOf,
    Matrix,
    Operation,
    Pointer,
    Product,
    View,
    in_blocks,
)

aten = torch.ops.aten
# How many arguments stand before the two matrices of a product.
PRODUCTS = {aten.mm.default: 0, aten.mm.dtype: 0, aten.addmm_.default: 1}
NARROW = (torch.bfloat16, torch.float16)
ALLOCATIONS = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}


class NoPlan(Exception):
    """Raised if a recorded call cannot be replayed; the message says why."""


_weak: Any = StorageWeakRef


class _Place:
    """Where a buffer lies while the recorded call runs."""

    def __init__(self, buffer: Buffer, tensor: Tensor):
        self.buffer, self.begin, self.tensor = buffer, tensor.data_ptr(), _weak(tensor.untyped_storage())

    @property
    def gone(self) -> bool:
        """True if the memory has been freed."""
        expired: bool = self.tensor.expired()
        return expired

    def holds(self, address: int) -> bool:
        """Return True if an address lies in the buffer."""
        return self.begin <= address < self.begin + self.buffer.nbytes


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it, nor below
    """Record the events of a call, in order. The recorder does not change the call, and keeps no tensor alive.

    Parameters
    ----------
    inputs : sequence of Tensor
        The inputs of the call. No two share memory: see `without_overlap`.
    own : sequence of Tensor
        Other tensors that the call reads and writes: the same tensors in each step, which the plan keeps.

    Attributes
    ----------
    buffers : list of Buffer
        The inputs, the call's own tensors, then what it allocates.
    events : list of Event
    num_inputs : int
    peak : int
        The most bytes that the call's own allocations had at one time, less those of inputs that were freed.
    """

    def __init__(self, inputs: Sequence[Tensor], own: Sequence[Tensor] = ()):
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[Buffer] = []
        self.events: list[Event] = []
        self.peak, self._live, self._why = 0, 0, ""
        self.num_inputs, self._device = len(inputs), inputs[0].device
        self._places: list[_Place] = []
        for tensor in inputs:
            self._add(tensor)
        for tensor in own:
            self._add(tensor).constant = tensor
        self._own = {buffer.number for buffer in self.buffers[self.num_inputs :]}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._bury()
        found = function(*args, **(kwargs or {}))
        results, _ = tree_flatten(found)
        if all(isinstance(result, Tensor) and result.device == self._device for result in results):
            self._note(function, args, kwargs or {}, results)
        else:
            self._refuse(f"{function} has a result for the host")
        return found

    def _note(self, function: Any, args: Any, kwargs: Any, results: Sequence[Tensor]) -> None:
        """Note an operation, unless it makes a view."""
        new = [result for result in results if result.nbytes and self._place_of(result.data_ptr()) is None]
        if function in ALLOCATIONS:
            for tensor in new:
                self._add(tensor, _allocation(tensor))
        elif function is aten.full.default and all(tensor.numel() == 1 for tensor in new):
            for tensor in new:
                self._add(tensor).constant = tensor
        elif matrices := _matrices(function, args, kwargs, results):
            for tensor in new:
                self._add(tensor, _allocation(tensor))
            if self.is_number(matrices[2]):
                self._refuse(f"{function} writes over a number that each step reads")
            self._multiplied(*matrices, grows=not new)
        elif new or function._schema.is_mutable:
            self._operated(function, args, kwargs, results, new)
        self._grow(new)

    def _operated(
        self, function: Any, args: Any, kwargs: Any, results: Sequence[Tensor], new: Sequence[Tensor]
    ) -> None:
        """Note what torch has computed by one function, or another library has."""
        if any(self.is_number(tensor) for tensor in _written(function, args, kwargs)):
            self._refuse(f"{function} writes over a number that each step reads")
        args, kwargs = self._views((args, kwargs))
        fresh = {id(tensor) for tensor in new}
        numbers = tuple(self._add(result).number if id(result) in fresh else None for result in results)
        self.events.append(Operation(function, args, kwargs, numbers))

    def _grow(self, new: Sequence[Tensor]) -> None:
        """Count the bytes of new tensors."""
        self._live += sum(in_blocks(tensor.nbytes) for tensor in new)
        self.peak = max(self.peak, self._live)

    def _multiplied(self, left: Tensor, right: Tensor, out: Tensor, grows: bool) -> None:
        """Note a product of narrow matrices."""
        (M, K), N = left.shape, right.shape[1]
        product = Product(self._matrix(left), self._matrix(right), self._matrix(out), (M, N, K), grows)
        self.events.append(product)  # an address that lies nowhere has been refused

    def _matrix(self, tensor: Tensor) -> Matrix:
        columns = not tensor.is_contiguous()
        pointer: Any = self._pointer(tensor.data_ptr())
        return Matrix(pointer, columns, tensor.shape[0 if columns else 1], str(tensor.dtype).removeprefix("torch."))

    def called(self, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Call what is no operation of torch's, and note it: see `launch_plan.called`."""
        self._bury()
        with _disable_current_modes():
            result = function(*args)
        new = [result] if result.nbytes and self._place_of(result.data_ptr()) is None else []
        self._operated(function, args, {}, [result], new)
        self._grow(new)
        return result

    def launched(
        self,
        module: Any,
        kernel: str,
        sizes: tuple[tuple[int, int, int], tuple[int, int, int], int],
        arguments: dict[str, Any],
        values: Sequence[Any],
    ) -> None:
        """Note a launch: the ``arguments`` by name, and as the driver was given them."""
        self._bury()
        parameters = module.source.kernels[kernel]
        found: list[Any] = []
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.pointer:
                found.append(self._pointer(value, parameter.writable))
            elif parameter.dtype == TENSOR_MAP:
                encoded = arguments[parameter.name]
                pointer = self._pointer(encoded.layout.address)
                found.append(MapOf(pointer, encoded.layout, encoded.box) if isinstance(pointer, Pointer) else 0)
            else:
                found.append(value)
        function = module.handle(kernel, sizes[2])
        self.events.append(Launch(kernel, function, *sizes, parameters, tuple(found)))

    def view(self, tensor: Tensor) -> View:
        """Return what finds a tensor of the recorded call in a later step.

        Raises
        ------
        NoPlan
            If it lies in no buffer of the call.
        """
        if not tensor.numel():
            return self._view_of_nothing(tensor)
        place = self._place_of(tensor.data_ptr())
        if place is None or not _views_as(place.buffer, tensor.dtype):
            raise NoPlan(f"a tensor of shape {tuple(tensor.shape)} is neither an input nor allocated by the call")
        first, rest = divmod(tensor.data_ptr() - place.begin, tensor.itemsize)
        shape, strides = tuple(tensor.shape), tensor.stride()
        born = place.buffer
        if (first, shape, strides, tensor.dtype) == (0, born.shape, born.strides, born.dtype):
            return View(place.buffer.number, None)
        dtype = None if tensor.dtype == place.buffer.dtype else tensor.dtype
        return View(place.buffer.number, (shape, strides, first), dtype)

    def _view_of_nothing(self, tensor: Tensor) -> View:
        """Return a view of a new empty constant, for a tensor without elements, which has no address."""
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        buffer = self._add(nothing)
        buffer.constant = nothing
        return View(buffer.number, (tuple(tensor.shape), tensor.stride(), 0))

    def freed(self) -> set[int]:
        """Numbers of the buffers that have been freed."""
        self._bury()
        return {buffer.number for buffer in self.buffers} - {place.buffer.number for place in self._places}

    def check(self) -> None:
        """Raise NoPlan if something cannot be replayed."""
        if self._why:
            raise NoPlan(self._why)

    def _refuse(self, why: str) -> None:
        self._why = self._why or why

    def _views(self, value: Any) -> Any:
        """The arguments of an operation with a `View` in place of each tensor."""
        try:
            return tree_map_only(Tensor, self.view, value)
        except NoPlan as why:
            self._refuse(str(why))
            return (), {}

    def is_number(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a number that each step reads, so that nothing may overwrite it."""
        place = self._place_of(tensor.data_ptr())
        return place is not None and place.buffer.constant is not None and place.buffer.number not in self._own

    def _pointer(self, address: int, writable: bool = False) -> Pointer | int:
        """Where an address lies; that of an empty array, 0, stays as it is."""
        place = self._place_of(address)
        if place is not None:
            if writable and place.buffer.constant is not None and place.buffer.number not in self._own:
                self._refuse("a kernel writes to a constant")
            return Pointer(place.buffer.number, address - place.begin)
        if address:
            self._refuse(f"a kernel was given the address {address}, which the call neither was given nor allocated")
        return 0

    def _add(self, tensor: Tensor, make: Callable[[], Tensor] | None = None) -> Buffer:
        layout = tuple(tensor.shape), tensor.stride()
        buffer = Buffer(len(self.buffers), _span(tensor), make, *layout, tensor.dtype)
        self.buffers.append(buffer)
        self._places.append(_Place(buffer, tensor))
        return buffer

    def _place_of(self, address: int) -> _Place | None:
        return next((place for place in self._places if place.holds(address) and not place.gone), None)

    def _bury(self) -> None:
        """Take what was freed since the last look from the live bytes."""
        for place in self._places:
            if place.gone:
                self._live -= in_blocks(place.buffer.nbytes)
        self._places = [place for place in self._places if not place.gone]


def _views_as(buffer: Buffer, dtype: torch.dtype) -> bool:
    """Return True if a buffer can be viewed as elements of a dtype: torch requires whole elements in each row."""
    *steps, last = buffer.strides or (1,)
    rows = [step * buffer.dtype.itemsize for step in (*steps, *buffer.shape[-1:])]  # bytes
    return buffer.dtype == dtype or (last == 1 and all(row % dtype.itemsize == 0 for row in rows))


def _matrices(
    function: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The narrow factors of a product and its result, if they lie as cuBLAS takes them; None of another operation."""
    if function not in PRODUCTS or kwargs:
        return None
    (left, right), out = args[PRODUCTS[function] :][:2], results[0]
    narrow = left.dtype in NARROW and right.dtype in NARROW
    packed = out.is_contiguous() and all(each.is_contiguous() or each.T.is_contiguous() for each in (left, right))
    return (left, right, out) if narrow and packed else None


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensor arguments that a function may overwrite; all of them if the function has no schema."""
    schema = getattr(function, "_schema", None)
    if schema is not None:
        named = dict(zip((said.name for said in schema.arguments), args, strict=False)) | kwargs
        written = [said.name for said in schema.arguments if said.alias_info and said.alias_info.is_write]
        args, kwargs = [named.get(name) for name in written], {}
    leaves, _ = tree_flatten((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _allocation(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that allocates a tensor of the same shape, strides, dtype and device."""
    layout = tuple(tensor.shape), tensor.stride()
    return functools.partial(torch.empty_strided, *layout, dtype=tensor.dtype, device=tensor.device)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
current = _recorder.get  # the recorder of this thread, which each launch tells of itself


def called(owner: Any, method: str, *args: Any) -> Tensor:
    """Call a method that is no operation of torch's, such as a collective; a launch plan calls it again.

    Parameters
    ----------
    owner : object
    method : str
        Its name. It returns a tensor, which may be one of its arguments. It may overwrite its arguments. It has no
        other effect on tensors, and its result's shape and dtype are the same in each step.
    *args
        Tensors, numbers, and lists or tuples of them.
    """
    recorder = current()
    if recorder is None:
        return _called(owner, method, *args)
    return recorder.called(functools.partial(_called, owner, method), args)


def _called(owner: Any, method: str, *args: Any) -> Tensor:
    """Call the method that the owner has now."""
    found: Tensor = getattr(owner, method)(*args)
    return found


@contextmanager
def recording(inputs: Sequence[Tensor], own: Sequence[Tensor] = ()) -> Iterator[Recorder]:
    """Context in which this thread's launches and operations are recorded: see `Recorder`."""
    recorder = Recorder(inputs, own)
    del inputs  # which the call may free
    token = _recorder.set(recorder)
    try:
        with recorder:
            yield recorder
    finally:
        _recorder.reset(token)


def without_overlap(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, with copies of those that overlap an earlier one. An address then identifies its tensor."""
    found: list[Tensor] = []
    for tensor in tensors:
        begin, end = _ends(tensor)
        shared = any(begin < last and first < end for first, last in map(_ends, found))
        found.append(tensor.clone() if shared else tensor)
    return found


def _ends(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + _span(tensor)


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last, gaps between rows included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
