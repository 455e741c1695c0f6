"""Torch tensors on a GPU as CuPy arrays, on torch's stream and out of torch's allocator."""

import functools
from contextlib import AbstractContextManager, contextmanager, nullcontext

import cupy
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import torch

from moeblaze_ref.raw_cuda.runtime.cupy import CupyExecutor
from moeblaze_ref.torch_bridge import Bridge


@functools.cache
def _allocator(stream: int) -> cupy.cuda.PythonFunctionAllocator:
    """CuPy's way to torch's allocator, for arrays that are first used on a stream of torch's."""

    def allocate(size: int, device: int) -> int:
        return torch.cuda.caching_allocator_alloc(size, device, stream) if size else 0

    return cupy.cuda.PythonFunctionAllocator(allocate, _free)


def _free(address: int, device: int):
    if address:
        torch.cuda.caching_allocator_delete(address)


class TorchCupyExecutor(CupyExecutor):
    """The CuPy executor, with dense products by torch: narrow operands, float32 sums."""

    def matmul(self, left: cupy.ndarray, right: cupy.ndarray, dtype: str) -> cupy.ndarray:
        """The dense product, summed in float32 and rounded once."""
        left, right = to_tensor(left), to_tensor(right)
        wide = {} if left.dtype == torch.float32 else {"out_dtype": torch.float32}
        with _without_autocast():
            return to_array(torch.mm(left, right, **wide).to(getattr(torch, dtype)))


def _without_autocast() -> AbstractContextManager:
    """Within it products keep their operands' dtype; to turn off what is off would cost as much as a launch."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()


def to_array(tensor: torch.Tensor) -> cupy.ndarray:
    """The tensor's own memory as an array, which keeps it alive.

    The same as ``cupy.from_dlpack(tensor)`` on torch's own stream, at a fraction of its cost to the host.
    """
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), tensor.nbytes, tensor, tensor.device.index)
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    return cupy.ndarray(tuple(tensor.shape), _dtype(tensor.dtype), cupy.cuda.MemoryPointer(memory, 0), strides)


@functools.cache
def _dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def to_tensor(array: cupy.ndarray) -> torch.Tensor:
    """The array's own memory as a tensor, which keeps it alive."""
    return torch.from_dlpack(array)


class GpuBridge(Bridge):
    """CuPy arrays on one CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device
        self.executor = TorchCupyExecutor(follows_edits=False)

    @contextmanager
    def running(self):
        """On the tensors' device and torch's current stream, allocating as torch does."""
        stream = torch.cuda.current_stream(self._device)
        with (
            super().running(),
            torch.cuda.device(self._device),
            cupy.cuda.Device(stream.device.index),
            cupy.cuda.Stream.from_external(stream),
            cupy.cuda.using_allocator(_allocator(stream.cuda_stream).malloc),
        ):
            yield

    def _array(self, tensor):
        return to_array(tensor)

    def _tensor(self, array):
        return to_tensor(array)
