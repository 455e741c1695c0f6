"""The kernels on a GPU over torch's own tensors, on torch's stream."""

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import cupy
import torch
from cuda.bindings import driver

from moeblaze_ref.runtime.cupy import CupyModule, check_gpu, encode, gpu_of, source_for
from moeblaze_ref.runtime.launch_plan.sender import Driver
from moeblaze_ref.runtime.parameters import ParameterMemory
from moeblaze_ref.runtime.source import KernelSource, Size
from moeblaze_ref.runtime.tensor_map import Layout
from moeblaze_ref.runtime.torch_capture import without_collector_if_capturing
from moeblaze_ref.runtime.torch_executor import TensorBridge, TensorModule, TorchExecutor, without_autocast

Ready = tuple[driver.CUfunction, ParameterMemory]  # what a launch of one kernel needs


class GpuModule(TensorModule, CupyModule):
    """A compiled kernel file, of CuPy's making, that the driver launches on torch's current stream.

    CuPy would make an object of each argument, which costs the host more than the launch itself.
    """

    def __init__(self, source: KernelSource, device: int):
        super().__init__(source)
        self._device = device
        self._ready: dict[tuple[str, int], Ready] = {}

    def _run(self, kernel: str, grid: Size, block: Size, shared_bytes: int, values: Sequence[Any]) -> None:
        function, parameters = self._ready.get((kernel, shared_bytes)) or self._make_ready(kernel, shared_bytes)
        stream = _stream(torch._C._cuda_getCurrentRawStream(self._device))
        with parameters.lock:
            parameters.pack(*values)
            (status,) = driver.cuLaunchKernel(function, *grid, *block, shared_bytes, stream, parameters.address, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver refused kernel {kernel} of {self.source.file}: {status.name}")

    def _make_ready(self, kernel: str, shared_bytes: int) -> Ready:
        function = driver.CUfunction(self.function(kernel, shared_bytes).kernel.ptr)
        self._ready[kernel, shared_bytes] = function, ParameterMemory(self.source.kernels[kernel])
        return self._ready[kernel, shared_bytes]

    def handle(self, kernel: str, shared_bytes: int) -> int:
        """The driver's handle of a kernel that may have so much dynamic shared memory."""
        handle: int = self.function(kernel, shared_bytes).kernel.ptr
        return handle


_stream = functools.cache(driver.CUstream)  # from the address of one


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

    def encode(self, layout: Layout, box: tuple[int, ...]) -> bytes:
        """The words of a map of what lies so."""
        return encode(layout, box).tobytes()

    @functools.cached_property
    def driver(self) -> Driver | None:
        """The functions of the CUDA driver and of cuBLAS that send a launch plan; None without torch's cuBLAS."""
        library = ctypes.CDLL("libcuda.so.1")
        try:
            blas = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")  # torch has loaded it
        except OSError:
            return None
        functions = library.cuLaunchKernel, library.cuTensorMapEncodeTiled, blas.cublasGemmEx
        launch, encode_tiled, multiply = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return Driver(launch, encode_tiled, multiply, torch.cuda.current_blas_handle)

    def stream(self) -> int:
        """Address of torch's current stream."""
        address: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return address

    def capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def check(self, file: str) -> None:
        """``kernels_cuda/<file>`` runs on the device; otherwise a ValueError says what it needs."""
        check_gpu(file, self.device.index)

    def _load(self, file: str, text: str | None = None, **constants: Any) -> GpuModule:
        """Compile ``kernels_cuda/<file>`` (or ``text`` in its place) with these constants, once."""
        return GpuModule(source_for(file, text, constants, self.device.index), self.device.index)


_NOTHING = nullcontext()


class GpuBridge(TensorBridge):
    """Tensors on one CUDA device."""

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.executor: GpuExecutor = GpuExecutor(self._device)
        self._threads = threading.local()

    def running(self) -> AbstractContextManager[None]:
        """Context on the tensors' device and torch's current stream; while that captures, no garbage collector runs."""
        return _NOTHING if self._is_ready() else self._prepared()

    def _is_ready(self) -> bool:
        """Whether the thread is as `_prepared` would make it."""
        index = self._device.index
        return (
            hasattr(self._threads, "bound")
            and torch._C._cuda_getDevice() == index == cupy.cuda.runtime.getDevice()
            and not torch.is_autocast_enabled("cuda")
            and not self.executor.capturing()
        )

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        with without_autocast("cuda"), cupy.cuda.Device(self._device.index):
            self._bind_thread()
            with without_collector_if_capturing():
                yield

    def _bind_thread(self) -> None:
        """Whoever calls the driver must be bound to the device, as a thread is by its first call of the runtime."""
        if not hasattr(self._threads, "bound"):
            cupy.cuda.runtime.memGetInfo()
            self._threads.bound = True
