"""Events of a recorded call, and the memory that they use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.runtime.declarations import Parameter
from moeblaze_ref.runtime.tensor_map import Layout

BLOCK = 512  # bytes: torch's allocator gives multiples of it on a GPU, and a plan cuts its arenas alike


def in_blocks(nbytes: int) -> int:
    """Bytes that the allocator takes for so many."""
    return -(-nbytes // BLOCK) * BLOCK


@dataclass(eq=False)
class Buffer:
    """Memory that a call was given or has allocated.

    Parameters
    ----------
    number : int
        Its place among the buffers of the call; the inputs come first.
    nbytes : int
    make : callable or None
        Allocates it again. None: an input, a constant, or what an operation returns.
    shape, strides : tuple of int
        Of the tensor that it was born as; strides in elements.
    dtype : torch.dtype
    constant : Tensor or None
        Each step takes this tensor: a number that nothing overwrites, or one of the call's own.
    """

    number: int
    nbytes: int
    make: Callable[[], Tensor] | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    constant: Tensor | None = None


class Pointer(NamedTuple):
    """An address: bytes from where a buffer begins."""

    buffer: int
    offset: int


class View(NamedTuple):
    """A tensor over a buffer; None in place of a layout if it is the tensor that the buffer was born as."""

    buffer: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None  # shape, strides and first element
    dtype: torch.dtype | None = None  # if it is not the buffer's

    def of(self, tensors: list[Tensor | None]) -> Tensor:
        """The tensor, over the buffers of this step."""
        number, layout, dtype = self
        tensor: Any = tensors[number]
        if dtype is not None:
            tensor = tensor.view(dtype)
        found: Tensor = tensor if layout is None else tensor.as_strided(*layout)
        return found


class MapOf(NamedTuple):
    """A tensor map of what lies at a pointer; the address in the layout is that of the recorded call."""

    pointer: Pointer
    layout: Layout
    box: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One launch; an argument is a `Pointer`, a `MapOf` or a number."""

    name: str  # of the kernel
    function: int  # the driver's handle
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    arguments: tuple[Any, ...]

    def buffers(self) -> Iterator[int]:
        """Numbers of the buffers that the kernel reads or writes."""
        for argument in self.arguments:
            if isinstance(argument, Pointer):
                yield argument.buffer
            elif isinstance(argument, MapOf):
                yield argument.pointer.buffer


class Matrix(NamedTuple):
    """A matrix of a product: its rows follow one another in memory, or its columns do."""

    pointer: Pointer
    columns: bool  # its columns follow one another
    leading: int  # elements of one row, or of one column
    dtype: str


@dataclass(frozen=True)
class Product:
    """One dense product, by cuBLAS: out (M, N) is left (M, K) times right (K, N), or grows by it."""

    left: Matrix
    right: Matrix
    out: Matrix
    sizes: tuple[int, int, int]  # M, N and K
    grows: bool

    name = "cublasGemmEx"

    def buffers(self) -> Iterator[int]:
        """Numbers of the buffers that it reads or writes."""
        yield from (matrix.pointer.buffer for matrix in (self.left, self.right, self.out))


@dataclass(frozen=True)
class Operation:
    """One operation of torch's, or one call of another library; tensors among the arguments are `View`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]  # the buffer of each result that it allocates

    def buffers(self) -> Iterator[int]:
        """Numbers of the buffers that it reads, writes or allocates."""
        yield from (number for number in self.results if number is not None)
        yield from (view.buffer for view in _views((self.args, tuple(self.kwargs.values()))))


Sent = Launch | Product  # by the C function
Event = Sent | Operation


def _views(value: Any) -> Iterator[View]:
    if isinstance(value, View):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _views(item)


def over(value: Any, tensors: list[Tensor | None]) -> Any:
    """An operation's argument, each `View` in it as a tensor of this step."""
    if isinstance(value, View):
        return value.of(tensors)
    if isinstance(value, list | tuple):
        return type(value)(over(item, tensors) for item in value)
    return value
