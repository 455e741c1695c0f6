"""A kernel's parameters in memory, as the CUDA driver takes them."""

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence

from moeblaze_ref.runtime.declarations import TENSOR_MAP, Parameter
from moeblaze_ref.runtime.tensor_map import BYTES

ALIGNMENT = 64  # bytes, of every parameter: a tensor map needs so many
_POINTER = "Q"
_CODES = {  # struct's, of a parameter's dtype
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    TENSOR_MAP: f"{BYTES}s",
}


def layout_of(parameters: Sequence[Parameter]) -> tuple[str, list[int]]:
    """Return the layout of the parameters' memory, for struct, and where each of them begins in it."""
    layout, offsets = "=", []
    for parameter in parameters:
        layout += f"{-struct.calcsize(layout) % ALIGNMENT}x"
        offsets.append(struct.calcsize(layout))
        layout += _POINTER if parameter.pointer else _CODES[parameter.dtype]
    return layout, offsets


class ParameterMemory:
    """The memory from which the driver copies the parameters of a kernel at each launch.

    Parameters
    ----------
    parameters : sequence of Parameter
        Of the kernel, in declared order.

    Attributes
    ----------
    address : int
        Of the list of the parameters' addresses, which ``cuLaunchKernel`` calls kernelParams.
    lock : threading.Lock
        To be held from `pack` until the launch has returned.
    pack : callable
        Takes a value for each parameter: pointers as addresses, numbers, tensor maps as 128 bytes.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        layout, offsets = layout_of(parameters)
        packed = struct.Struct(layout)
        self._memory = ctypes.create_string_buffer(packed.size + ALIGNMENT)
        begin = ctypes.addressof(self._memory)
        start = -begin % ALIGNMENT
        self._addresses = (ctypes.c_void_p * len(offsets))(*[begin + start + offset for offset in offsets])
        self.address = ctypes.addressof(self._addresses)
        self.lock = threading.Lock()
        self.pack = functools.partial(packed.pack_into, self._memory, start)
