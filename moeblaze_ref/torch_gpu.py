"""Torch tensors on a GPU as CuPy arrays, on torch's stream and out of torch's allocator."""

from contextlib import contextmanager

import cupy
import torch

from moeblaze_ref.raw_cuda.runtime.cupy import CupyExecutor
from moeblaze_ref.torch_bridge import Bridge


def _allocate(size: int, device: int) -> int:
    return torch.cuda.caching_allocator_alloc(size, device, torch.cuda.current_stream(device)) if size else 0


def _free(address: int, device: int):
    if address:
        torch.cuda.caching_allocator_delete(address)


_ALLOCATOR = cupy.cuda.PythonFunctionAllocator(_allocate, _free)


class TorchCupyExecutor(CupyExecutor):
    """The CuPy executor, with dense products by torch: narrow operands, float32 sums."""

    def matmul(self, left: cupy.ndarray, right: cupy.ndarray, dtype: str) -> cupy.ndarray:
        """The dense product, summed in float32 and rounded once."""
        left, right = to_tensor(left), to_tensor(right)
        wide = {} if left.dtype == torch.float32 else {"out_dtype": torch.float32}
        with torch.autocast("cuda", enabled=False):
            return to_array(torch.mm(left, right, **wide).to(getattr(torch, dtype)))


def to_array(tensor: torch.Tensor) -> cupy.ndarray:
    """The tensor's own memory as an array."""
    return cupy.from_dlpack(tensor)


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
            cupy.cuda.using_allocator(_ALLOCATOR.malloc),
        ):
            yield

    def _array(self, tensor):
        return to_array(tensor)

    def _tensor(self, array):
        return to_tensor(array)
