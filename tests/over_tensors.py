"""The layers as on a GPU, over torch's own tensors, with the kernels on the SIMT executor."""

from types import SimpleNamespace

import numpy as np
import torch

from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.tensor_map import TensorMap
from moeblaze_ref.runtime.torch_bridge import to_numpy
from moeblaze_ref.runtime.torch_executor import TensorBridge, TorchExecutor


class SimtOverTensors(TorchExecutor):
    """What a GPU has, torch's own tensors and products, with the kernels on the SIMT executor."""

    name, capability, multiprocessors = SimtExecutor.name, SimtExecutor.capability, SimtExecutor.multiprocessors

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self._simt = SimtExecutor(instrumented=False)

    def load(self, file, **constants):
        module = self._simt.load(file, **constants)

        def launch(kernel, **arguments):
            tensors = {name: to_numpy(value) for name, value in arguments.items() if torch.is_tensor(value)}
            module.launch(kernel, **arguments | tensors)

        return SimpleNamespace(launch=launch)

    def tensor_map(self, tensor, box):
        return TensorMap(to_numpy(tensor), box)

    def wide_product(self, left, right):
        product = self.empty((left.shape[0], right.shape[1]), "float32")
        np.matmul(*(to_numpy(operand).astype(np.float32) for operand in (left, right)), out=to_numpy(product))
        return product


class BridgeOverTensors(TensorBridge):
    """To a `SimtOverTensors`."""

    executor = SimtOverTensors()
