"""Kernels over torch's own tensors: what the stages allocate is torch's, and nothing is converted."""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeblaze_ref.core import checks
from moeblaze_ref.runtime import torch_bridge
from moeblaze_ref.runtime.declarations import TENSOR_MAP, Parameter
from moeblaze_ref.runtime.launch_plan.recorder import current
from moeblaze_ref.runtime.launch_plan.sender import Driver
from moeblaze_ref.runtime.source import KernelSource, Module, checked_sizes
from moeblaze_ref.runtime.tensor_map import EncodedMap, Layout, TensorMap, check_layout
from moeblaze_ref.runtime.torch_bridge import Bridge

WIDEST = torch.complex128  # the widest elements that torch copies
SHORT_DEPTH = 256  # of products that a library never splits into parts, whose narrow results it would then add


def _is_wide(tensor: Tensor) -> bool:
    """Whether torch can view a tensor as elements of ``WIDEST``."""
    *steps, last = tensor.stride()
    places = (tensor.shape[-1], tensor.storage_offset(), *steps)
    return last == 1 and all(place * tensor.itemsize % WIDEST.itemsize == 0 for place in places)


class TorchExecutor:
    """What an executor does with tensors of one device; who inherits says how kernels are loaded and run."""

    def __init__(self, device: torch.device):
        self.device = device

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A new tensor, not written."""
        return torch.empty(shape, dtype=_DTYPES[dtype], device=self.device)

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Tensor:
        """A new tensor of one value."""
        return torch.full(shape, value, dtype=_DTYPES[dtype], device=self.device)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype; itself if it has it."""
        return tensor.to(_DTYPES[dtype])

    def assign(self, target: Tensor, source: Tensor) -> None:
        """Write the elements of a tensor into another one of its shape and dtype, 16 bytes at a time where they can."""
        if _is_wide(target) and _is_wide(source):
            target, source = target.view(WIDEST), source.view(WIDEST)
        target.copy_(source)

    def from_numpy(self, array: np.ndarray) -> Tensor:
        """A copy on the device; on a CPU the array's own memory."""
        return torch_bridge.from_numpy(array).to(self.device)

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """A copy on the host; on a CPU the tensor's own memory."""
        return torch_bridge.to_numpy(tensor.cpu())

    def matmul(self, left: Tensor, right: Tensor, dtype: str) -> Tensor:
        """The dense product, summed in float32 and rounded once."""
        if left.dtype == _DTYPES[dtype] and (dtype == "float32" or left.shape[1] <= SHORT_DEPTH):
            return torch.mm(left, right)
        return self.wide_product(left, right).to(_DTYPES[dtype])

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Add the dense product to ``total`` in place; the sum is float32 and is rounded once."""
        if total.dtype == torch.float32 or left.shape[1] <= SHORT_DEPTH:
            return total.addmm_(left, right)
        return total.add_(self.wide_product(left, right))

    def wide_product(self, left: Tensor, right: Tensor) -> Tensor:
        """The dense product in float32, which torch has of narrow operands on a GPU alone."""
        return torch.mm(left, right, out_dtype=torch.float32)

    def tensor_map(self, tensor: Tensor, box: tuple[int, ...]) -> EncodedMap | TensorMap:
        """Boxes of the tensor as a kernel takes them, encoded once for each place and layout."""
        return self._tensor_map(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), box)

    @functools.cached_property
    def _tensor_map(self) -> Callable[..., EncodedMap]:
        """From all that an encoded map depends on, so that it is right whichever tensor lies there now."""
        return functools.lru_cache(maxsize=4096)(self._encoded)

    def _encoded(
        self, address: int, dtype: torch.dtype, shape: torch.Size, steps: tuple[int, ...], box: tuple[int, ...]
    ) -> EncodedMap:
        strides = tuple(step * dtype.itemsize for step in steps)
        layout = Layout(address, str(dtype).removeprefix("torch."), tuple(shape), strides)
        check_layout(layout, box)
        return EncodedMap(self.encode(layout, box), layout, box)

    def encode(self, layout: Layout, box: tuple[int, ...]) -> Any:
        """The words of a map of what lies so."""
        raise NotImplementedError

    @property
    def driver(self) -> Driver | None:
        """The functions that send a launch plan; None where plans do not run."""
        return None

    def stream(self) -> int:
        """Address of torch's current stream."""
        raise NotImplementedError

    def capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        return False


_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int32", "uint32", "int64", "uint64", "uint8", "bool")
}


# What a parameter takes: a tensor's dtype, `TENSOR_MAP`, or the name of a number's dtype; and what converts a value.
Taken = tuple[Any, Callable[[Any], Any]]


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Context in which products keep their operands' dtype; turning off what is off would cost as much as a launch."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class TensorBridge(Bridge):
    """Bridge to an executor whose arrays are tensors."""

    def arrays(self, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
        """The tensors' own memory as other tensors, which outlive what becomes of the first."""
        return [None if tensor is None else tensor.detach().resolve_neg() for tensor in tensors]

    def tensors(self, arrays: Iterable[Any]) -> list[Tensor | None]:
        """The arrays themselves."""
        return list(arrays)


class TensorModule(Module):
    """A compiled kernel file that is launched on tensors.

    Notes
    -----
    A step has dozens of launches, so what is known of a kernel is settled at its first: afterwards each argument
    costs one look.
    """

    def __init__(self, source: KernelSource):
        super().__init__(source)
        self._takes: dict[str, dict[str, Taken]] = {}

    def launch(
        self,
        kernel: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int = 0,
        **arguments: Any,
    ) -> None:
        """Launch a kernel as `Module.launch` does, on tensors or on `TorchExecutor.tensor_map`'s maps of them."""
        takes = self._takes.get(kernel) or self._prepare(kernel)
        if takes.keys() != arguments.keys():
            self.source.bind(kernel, arguments)  # says what is wrong
        values = []
        for name, (kind, convert) in takes.items():
            value = arguments[name]
            if isinstance(value, Tensor) and value.dtype is kind and value.is_contiguous():
                values.append(value.data_ptr())
            elif isinstance(value, EncodedMap) and kind == TENSOR_MAP:
                values.append(value.words)
            else:
                values.append(convert(value))  # a number, or an error
        grid, block = checked_sizes(kernel, grid, block, shared_bytes)
        self._run(kernel, grid, block, shared_bytes, tuple(values))
        if recorder := current():
            recorder.launched(self, kernel, (grid, block, shared_bytes), arguments, values)

    def handle(self, kernel: str, shared_bytes: int) -> int:
        """The driver's handle of a kernel that may have so much dynamic shared memory, for a launch plan."""
        raise NotImplementedError

    def _prepare(self, kernel: str) -> dict[str, Taken]:
        """Return for each parameter of a kernel what kind it takes, and what converts a number for it."""
        parameters = self.source.declarations.parameters(kernel)
        self._takes[kernel] = {parameter.name: _taken_by(parameter, kernel) for parameter in parameters}
        return self._takes[kernel]


def _taken_by(parameter: Parameter, kernel: str) -> Taken:
    """What a parameter takes."""
    if parameter.pointer:
        return _DTYPES[parameter.dtype], partial(_refuse, parameter, kernel, Tensor)
    if parameter.dtype == TENSOR_MAP:
        return TENSOR_MAP, partial(_refuse, parameter, kernel, EncodedMap)
    # A training loop passes the same numbers again and again.
    return parameter.dtype, functools.lru_cache(maxsize=256, typed=True)(partial(parameter.bind, kernel))


def _refuse(parameter: Parameter, kernel: str, expected: type, value: Any) -> None:
    """Say what is wrong with an argument."""
    name = f"argument {parameter.name} of kernel {kernel}"
    checks.check_type(name, value, expected)
    checks.check_array(name, value, value.ndim, (parameter.dtype,))
