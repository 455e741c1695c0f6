"""A pretended CUDA device for launch plans: torch tensors on the CPU, and kernels that the SIMT executor runs.

Its driver is three C functions of Python's making: "cuLaunchKernel" runs the kernel, "cuTensorMapEncodeTiled" writes
the SIMT executor's map, and "cublasGemmEx" asks torch. So a plan is sent by the package's own C function, and gives
real results.
"""

import ctypes
import functools
import itertools
import threading

import torch

from moeblaze_ref.runtime.launch_plan.sender import DTYPES, PRODUCT_DTYPES, Driver
from moeblaze_ref.runtime.parameters import ParameterMemory
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.simt.executor import Dim, SimtLaunch, _array_type, _Buffer
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.runtime.tensor_map import ITEMSIZE
from moeblaze_ref.runtime.torch_executor import TensorBridge, TensorModule, TorchExecutor, without_autocast

_U, _P = ctypes.c_uint, ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _P, _U, _U, _U, _U, _U, _U, _U, _P, ctypes.POINTER(_P), _P)
_U64, _U32 = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, _P, ctypes.c_int, ctypes.c_uint32, _P, _U64, _U64, _U32, _U32, *[ctypes.c_int] * 4
)


MULTIPLY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _P,
    *[ctypes.c_int] * 5,
    _P,
    _P,
    *[ctypes.c_int] * 2,
    _P,
    *[ctypes.c_int] * 2,
    _P,
    _P,
    *[ctypes.c_int] * 4,
)
HANDLE = 4711
PRODUCT_TYPES = {code: getattr(torch, name) for name, code in PRODUCT_DTYPES.items()}


def multiply(handle, left_op, right_op, m, n, k, alpha, left, left_dtype, left_leading, right, *rest):
    """A "cublasGemmEx" that asks torch for the product: columns of the one are rows of the other."""
    right_dtype, right_leading, beta, out, out_dtype, out_leading, compute, algorithm = rest
    assert handle == HANDLE
    assert (ctypes.c_float.from_address(alpha).value, compute, algorithm, out_leading) == (1.0, 68, 99, m)
    assert (left_leading, right_leading) == (k if left_op else m, n if right_op else k)
    one = _tensor_at(left, left_dtype, (m, k) if left_op else (k, m))
    other = _tensor_at(right, right_dtype, (k, n) if right_op else (n, k))
    result = _tensor_at(out, out_dtype, (n, m))
    factors = other.T if right_op else other, one.T if left_op else one
    if ctypes.c_float.from_address(beta).value:
        result.addmm_(*factors)
    else:
        result.copy_(torch.mm(*factors))
    return 0


def _tensor_at(address, dtype, shape):
    dtype = PRODUCT_TYPES[dtype]
    memory = (ctypes.c_char * (shape[0] * shape[1] * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class SimtTensors(TorchExecutor):
    """Runs kernel files on tensors of the CPU.

    Attributes
    ----------
    sent : list of (str, int)
        The kernel and the stream of every launch that a plan has sent.
    launched : int
        Launches without a plan.
    fails : str or None
        A kernel that the driver refuses.
    """

    name, multiprocessors = "idle", 4

    def __init__(self, capability=(8, 0)):
        super().__init__(torch.device("cpu"))
        self.capability, self.sent, self.launched, self.encoded, self.fails = capability, [], 0, 0, None
        self.is_capturing, self.current_stream = False, threading.local()
        self.load = functools.cache(self._load)
        self._entries, self._numbers = {}, itertools.count(1)
        self._functions = LAUNCH(self._run_sent), ENCODE(self._encode_sent), MULTIPLY(multiply)
        addresses = (ctypes.cast(function, _P).value for function in self._functions)
        self._driver = Driver(*addresses, lambda: HANDLE)

    @property
    def driver(self):
        return self._driver

    def stream(self):
        return getattr(self.current_stream, "address", 0)

    def capturing(self):
        return self.is_capturing

    def wide_product(self, left, right):
        return left.float() @ right.float()

    def encode(self, layout, box):
        words = (ctypes.c_uint64 * 16)()
        _write_map(words, layout.address, len(layout.shape), layout.extents, layout.pitches, box)
        return bytes(words)

    def _load(self, file, text=None, **constants):
        return SimtTensorModule(KernelSource.read(file, constants, text), self)

    def handle(self, module, kernel):
        """A number for a kernel, as a driver's function has an address."""
        for number, known in self._entries.items():
            if known == (module, kernel):
                return number
        number = next(self._numbers)
        self._entries[number] = module, kernel
        return number

    def _run_sent(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra):
        module, kernel = self._entries[function]
        self.sent.append((kernel, stream or 0))
        if kernel == self.fails:
            return 719
        module.start(kernel, (gx, gy, gz), (bx, by, bz), shared_bytes, parameters)
        return 0

    def _encode_sent(self, into, dtype, rank, address, extents, pitches, box, steps, *how):
        assert dtype in DTYPES.values() and steps[:rank] == [1] * rank and how == (0, 3, 3, 0)
        self.encoded += 1
        words = (ctypes.c_uint64 * 16).from_address(into)
        _write_map(words, address, rank, extents[:rank], pitches[: rank - 1], box[:rank])
        return 0


def _write_map(words, address, rank, extents, pitches, box):
    """simt_abi.h, struct SimtTensorMap."""
    fields = [address, rank]
    for part in (extents, (ITEMSIZE, *pitches), box):
        fields += [*part, 1][:3]
    words[: len(fields)] = fields


class SimtTensorModule(TensorModule):
    """A kernel file as the SIMT executor runs it, without its checks."""

    def __init__(self, source, executor):
        super().__init__(source)
        self._executor, self._lock = executor, threading.Lock()
        kernels = list(source.kernels)
        self._built = build.build_kernels(
            source.file, source.text, kernels, source.include_dirs, source.constants, instrumented=False
        )

    def handle(self, kernel, shared_bytes):
        return self._executor.handle(self, kernel)

    def _run(self, kernel, grid, block, shared_bytes, values):
        self._executor.launched += 1
        memory = ParameterMemory(self.source.kernels[kernel])
        memory.pack(*values)
        pointers = ctypes.cast(memory.address, ctypes.POINTER(ctypes.c_void_p))
        self.start(kernel, grid, block, shared_bytes, pointers)

    def start(self, kernel, grid, block, shared_bytes, parameters):
        """Run a kernel on parameters as the driver takes them."""
        launch = SimtLaunch(
            kernel=kernel.encode(),
            entry=build.entry(self._built, kernel),
            arguments=parameters,
            grid=Dim(*grid),
            block=Dim(*block),
            dynamic_shared_bytes=shared_bytes,
            workers=1,
            poison=0,
            buffers=_array_type(_Buffer, 0)(),
        )
        assert not build.runtime_library().simt_launch(ctypes.byref(launch)), launch.fault.decode()


class SimtTensorBridge(TensorBridge):
    """To a `SimtTensors`."""

    def __init__(self, executor):
        self.executor = executor

    def running(self):
        return without_autocast("cpu")
