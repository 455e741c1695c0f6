"""The kernels on a GPU over torch's own tensors, on torch's stream."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import cupy
import numpy as np
import torch

from moeblaze_ref import doors
from moeblaze_ref.raw_cuda.runtime.cupy import CupyModule, check_gpu, encoded, gpu_of, source_for
from moeblaze_ref.raw_cuda.runtime.tensor_map import Layout
from moeblaze_ref.torch_executor import TensorBridge, TensorModule, TorchExecutor


class GpuModule(TensorModule, CupyModule):
    """A compiled kernel file that CuPy launches on tensors."""


class GpuExecutor(TorchExecutor):
    """Runs kernel files on one CUDA device. Each is read once: edits are not followed.

    Parameters
    ----------
    device : torch.device
        With its index.
    """

    name = "cuda"

    def __init__(self, device: torch.device):
        super().__init__(device)
        _, self.capability, self.multiprocessors = gpu_of(device.index)
        self.load = functools.cache(self._load)

    def encode(self, layout: Layout, box: tuple[int, ...]) -> np.ndarray:
        """The words of a map of what lies so."""
        return encoded(layout, box)

    def check(self, file: str):
        """``kernels_cuda/<file>`` runs on the device; otherwise a ValueError says what it needs."""
        check_gpu(file, self.device.index)

    def _load(self, file: str, text: str | None = None, **constants) -> GpuModule:
        """Compile ``kernels_cuda/<file>`` (or ``text`` in its place) with these constants, once."""
        return GpuModule(source_for(file, text, constants, self.device.index))


class GpuBridge(TensorBridge):
    """Tensors on one CUDA device."""

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.executor = GpuExecutor(self._device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On the tensors' device and torch's current stream."""
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(self._device))
        with doors.trusted_values(), _without_autocast(), cupy.cuda.Device(self._device.index), stream:
            yield


def _without_autocast() -> AbstractContextManager:
    """Within it products keep their operands' dtype; to turn off what is off would cost as much as a launch."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()
