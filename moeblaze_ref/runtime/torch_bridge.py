"""How torch tensors become arrays of the stages, and back, without a copy."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.simt.executor import SimtExecutor


class Bridge:
    """Converts between the tensors of one device and the arrays of its executor; None stays None."""

    executor: Executor

    def running(self) -> AbstractContextManager[None]:
        """Context in which the stages may run on these tensors."""
        return nullcontext()

    @overload
    def array(self, tensor: Tensor) -> Array: ...
    @overload
    def array(self, tensor: Tensor | None) -> Array | None: ...
    def array(self, tensor: Tensor | None) -> Array | None:
        """The tensor's own memory as an array."""
        array: Array | None = self.arrays([tensor])[0]
        return array

    def arrays(self, tensors: Iterable[Tensor | None]) -> list[Any]:
        """The same of several: an array or None of each."""
        return [None if tensor is None else self._array(tensor.detach().resolve_neg()) for tensor in tensors]

    def tensor(self, array: Array) -> Tensor:
        """The array's own memory as a tensor."""
        tensor: Tensor = self.tensors([array])[0]
        return tensor

    def tensors(self, arrays: Iterable[Array | None]) -> list[Any]:
        """The same of several: a tensor or None of each."""
        return [None if array is None else self._tensor(array) for array in arrays]

    def by_name(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """The same of several, by name."""
        return dict(zip(arrays, self.tensors(arrays.values()), strict=True))

    def _array(self, tensor: Tensor) -> Array:
        raise NotImplementedError

    def _tensor(self, array: Array) -> Tensor:
        raise NotImplementedError


class CpuBridge(Bridge):
    """numpy arrays, and the SIMT executor without its counts; numpy's bfloat16 comes from ml_dtypes."""

    def __init__(self) -> None:
        self.executor = SimtExecutor(instrumented=False, follows_edits=False)

    def _array(self, tensor: Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def _tensor(self, array: Any) -> Tensor:  # as `_array` returns it
        return from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU as an array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    """An array's memory as a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
