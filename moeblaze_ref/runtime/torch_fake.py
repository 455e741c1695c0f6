"""The kernels over tensors of torch's FakeTensorMode, which have a shape, a dtype and a device, but no memory.

The stages' own code runs: it allocates what it allocates on a GPU, and launches what it launches there. A launch checks
its arguments and does nothing. So an allocation is stated once, in the stage that makes it.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import KernelSource, Module, Size
from moeblaze_ref.runtime.tensor_map import TensorMap
from moeblaze_ref.runtime.torch_executor import TensorBridge, TorchExecutor, without_autocast


class FakeModule(Module):
    """A kernel file that is read, and not compiled."""

    def _run(self, kernel: str, grid: Size, block: Size, shared_bytes: int, values: Sequence[Any]) -> None:
        """Do nothing: no tensor has memory to write."""


H100 = (9, 0), 132  # compute capability and multiprocessors


def _stood_for(device: torch.device) -> tuple[str, tuple[int, int], int]:
    """Return name, compute capability and multiprocessors of a device's executor."""
    if device.type != "cuda":
        return SimtExecutor.name, SimtExecutor.capability, SimtExecutor.multiprocessors
    if not torch.cuda.is_available():
        return "cuda", *H100
    gpu = torch.cuda.get_device_properties(device)
    return "cuda", (gpu.major, gpu.minor), gpu.multi_processor_count


class FakeExecutor(TorchExecutor):
    """Stands for the executor of a device, whose versions and tiles the stages then choose.

    On "cpu" that is the SIMT executor, on "cuda" that of the GPU, or of an H100 where there is none.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.name, self.capability, self.multiprocessors = _stood_for(device)
        self.instrumented = False  # as the executor of a CPU's layers
        self.load = functools.cache(self._load)

    def tensor_map(self, tensor: Tensor, box: tuple[int, ...]) -> TensorMap:
        """Boxes of the tensor, checked and not encoded."""
        return TensorMap(tensor, box)

    def assign(self, target: Tensor, source: Tensor) -> None:
        """Do nothing: there are no elements."""

    def check(self, file: str) -> None:
        """Accept any file: none runs."""

    def _load(self, file: str, text: str | None = None, **constants: Any) -> FakeModule:
        """Read ``kernels_cuda/<file>`` (or ``text`` in its place), once."""
        return FakeModule(KernelSource.read(file, constants, text))


_executor_for = functools.cache(FakeExecutor)  # of a device


class FakeBridge(TensorBridge):
    """Bridge to a `FakeExecutor`.

    Parameters
    ----------
    like : torch._subclasses.FakeTensor
        A tensor of the mode and on the device.
    """

    def __init__(self, like: Any):
        self.executor = _executor_for(like.device)
        self._device, self._mode = like.device, like.fake_mode

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which new tensors have no memory either, in a backward outside the mode too."""
        with without_autocast(self._device.type), self._mode:
            yield
