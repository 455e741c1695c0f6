"""A GPU that is pretended on the CPU: torch's own tensors and every launch's arguments, but kernels that do nothing."""

import contextlib
import functools

import torch

from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.runtime.torch_executor import TensorBridge, TensorModule, TorchExecutor


class IdleExecutor(TorchExecutor):
    """``launches`` are the kernels that it was asked to run, with their arguments."""

    name, multiprocessors = "idle", 132

    def __init__(self, capability=(9, 0)):
        super().__init__(torch.device("cpu"))
        self.capability, self.launches = capability, []
        self.load = functools.cache(self._load)

    def encode(self, layout, box):
        return layout, box

    def matmul(self, left, right, dtype):  # torch has no product of narrow operands with wide results on the CPU
        self.launches.append(("matmul", left, right))
        return self.empty((left.shape[0], right.shape[1]), dtype)

    def add_product(self, total, left, right):
        self.launches.append(("add_product", left, right))
        return total

    def _load(self, file, text=None, **constants):
        return IdleModule(KernelSource.read(file, constants, text), self.launches)


class IdleModule(TensorModule):
    """A kernel file that is read, and not compiled."""

    def __init__(self, source, launches):
        super().__init__(source)
        self._launches = launches

    def _run(self, *launch):
        self._launches.append(launch)


class IdleBridge(TensorBridge):
    """To an `IdleExecutor`."""

    def __init__(self, executor):
        self.executor = executor

    def running(self):
        return contextlib.nullcontext()
