"""The CuPy executor: the same kernel files, compiled by NVRTC and run on a GPU."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np

from moeblaze_ref.runtime.poison import poison
from moeblaze_ref.runtime.source import Edition, KernelSource, Module, Size, edition
from moeblaze_ref.runtime.tensor_map import BYTES, Layout, TensorMap


class CupyExecutor:
    """Runs kernel files on the current CUDA device and stream.

    Parameters
    ----------
    poisoned : bool
        Fill new arrays with `POISON`, so that an element that no kernel writes shows.
    follows_edits : bool
        Look at every `load` whether the file or a header has changed since it was compiled.
    """

    name = "cuda"

    def __init__(self, poisoned: bool = False, follows_edits: bool = True):
        self.poisoned, self.follows_edits = poisoned, follows_edits

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the current device."""
        return gpu_of(cupy.cuda.Device().id).capability

    @property
    def multiprocessors(self) -> int:
        """How many the current device has."""
        return gpu_of(cupy.cuda.Device().id).multiprocessors

    def empty(self, shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        """A new device array, poisoned if the executor is asked to."""
        array = cupy.empty(shape, dtype)
        return poison(array) if self.poisoned else array

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> cupy.ndarray:
        """A new device array of one value."""
        return cupy.full(shape, value, dtype)

    def cast(self, array: cupy.ndarray, dtype: str) -> cupy.ndarray:
        """The array in another dtype; itself if it has it."""
        return array.astype(dtype, copy=False)

    def assign(self, target: cupy.ndarray, source: cupy.ndarray) -> None:
        """Write the elements of an array into another one of its shape and dtype."""
        target[...] = source

    def from_numpy(self, array: np.ndarray) -> cupy.ndarray:
        """A copy on the device."""
        return cupy.asarray(array)

    def to_numpy(self, array: cupy.ndarray) -> np.ndarray:
        """A copy on the host."""
        host: np.ndarray = cupy.asnumpy(array)
        return host

    def matmul(self, left: cupy.ndarray, right: cupy.ndarray, dtype: str) -> cupy.ndarray:
        """The dense product, summed in float32 and rounded once, by cuBLAS."""
        return (left.astype(np.float32) @ right.astype(np.float32)).astype(dtype)

    def add_product(self, total: cupy.ndarray, left: cupy.ndarray, right: cupy.ndarray) -> cupy.ndarray:
        """Add the dense product to ``total`` in place; the sum is float32 and is rounded once."""
        total[...] = total.astype(np.float32) + self.matmul(left, right, "float32")
        return total

    def check(self, file: str) -> None:
        """``kernels_cuda/<file>`` runs on the current device; otherwise a ValueError says what it needs."""
        check_gpu(file, cupy.cuda.Device().id)

    def tensor_map(self, array: cupy.ndarray, box: tuple[int, ...]) -> TensorMap:
        """Boxes of the array as a kernel takes them."""
        return TensorMap(array, box)

    def load(self, file: str, text: str | None = None, **constants: Any) -> "CupyModule":
        """Compile ``kernels_cuda/<file>`` (or ``text`` in its place) with these constants."""
        key = file, text, tuple(sorted(constants.items())), cupy.cuda.Device().id
        return _compile(*key, edition(file, text) if self.follows_edits else None)


class Gpu(NamedTuple):
    """Properties of a device that the kernels need."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


@functools.cache
def gpu_of(device: int) -> Gpu:
    """Return the GPU with this device number."""
    found = cupy.cuda.runtime.getDeviceProperties(device)
    return Gpu(found["name"].decode(), (found["major"], found["minor"]), found["multiProcessorCount"])


def check_gpu(file: str, device: int) -> None:
    """``kernels_cuda/<file>`` runs on the device; otherwise a ValueError says what it needs."""
    _check_source(KernelSource.read(file, {}), device)


def _check_source(source: KernelSource, device: int) -> None:
    source.check_gpu(gpu_of(device).capability, gpu_of(device).name)


@functools.cache
def _compile(
    file: str, text: str | None, constants: tuple[tuple[str, Any], ...], device: int, edition: Edition | None
) -> "CupyModule":
    """The compiled file, once for each of its editions."""
    return CupyModule(source_for(file, text, dict(constants), device))


def source_for(file: str, text: str | None, constants: dict[str, Any], device: int) -> KernelSource:
    """The file with its constants, once it is known to run on the device."""
    source = KernelSource.read(file, constants, text)
    _check_source(source, device)
    return source


class CupyModule(Module):
    """A compiled kernel file."""

    def __init__(self, source: KernelSource):
        super().__init__(source)
        options = (
            "-std=c++17",
            *source.gpu_options,
            *(f"-D{name}={value}" for name, value in source.constants.items()),
            *(f"-I{path}" for path in source.include_dirs),
        )
        # CuPy keeps what it compiled by the text of the file alone: say in it which headers it is compiled with.
        headers = hashlib.sha256(source.headers.encode()).hexdigest()
        code = f"{source.text}\n// headers {headers}\n"
        self._module = cupy.RawModule(code=code, options=options, backend="nvrtc")
        self._functions: dict[str, cupy.RawKernel] = {}
        self._shared_bytes: dict[str, int] = {}  # dynamic shared memory that a kernel was allowed

    def bind(self, kernel: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Bind the arguments by `Module.bind`, and return them in a tuple, each as CuPy passes it."""
        return tuple(map(_argument, super().bind(kernel, arguments)))

    def _run(self, kernel: str, grid: Size, block: Size, shared_bytes: int, values: Sequence[Any]) -> None:
        """Queue the kernel on the current stream."""
        self.function(kernel, shared_bytes)(grid, block, values, shared_mem=shared_bytes)

    def function(self, kernel: str, shared_bytes: int) -> cupy.RawKernel:
        """The kernel, allowed so much dynamic shared memory."""
        if kernel not in self._functions:
            self._functions[kernel] = self._module.get_function(kernel)
        function = self._functions[kernel]
        if shared_bytes > self._shared_bytes.get(kernel, 0):
            function.max_dynamic_shared_size_bytes = shared_bytes  # with static memory it may pass the default 48 KiB
            self._shared_bytes[kernel] = shared_bytes
        return function


def _argument(value: Any) -> Any:
    """A value as CuPy passes it."""
    return _encoded(value.layout, value.box) if isinstance(value, TensorMap) else value


def encode(layout: Layout, box: tuple[int, ...]) -> np.ndarray:
    """The 128 bytes that the copy engine reads, as an array without dimensions."""
    from cuda.bindings import driver

    rank, types, kind = len(layout.shape), driver.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE_"
    status, words = driver.cuTensorMapEncodeTiled(
        getattr(types, f"{kind}{layout.dtype.upper()}"),
        rank,
        layout.address,
        [driver.cuuint64_t(extent) for extent in layout.extents],
        [driver.cuuint64_t(pitch) for pitch in layout.pitches],
        [driver.cuuint32_t(extent) for extent in box],
        [driver.cuuint32_t(1)] * rank,  # every element of the box
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled refused {layout} in boxes of {box}: {status}")
    whole = np.zeros((), [("opaque", np.uint64, BYTES // 8)])
    whole["opaque"] = [int(word) for word in words.opaque]
    return whole


# Encoding takes microseconds, and a training step asks for the same maps again.
_encoded = functools.lru_cache(maxsize=4096)(encode)
