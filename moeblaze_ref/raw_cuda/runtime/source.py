"""A .cu file as the executors see it: its text, its constants and its kernels' parameters.

Arguments are passed by name and converted to the declared C type here, once for both
executors, so that a Python float can never arrive as a double.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeblaze_ref import doors
from moeblaze_ref.paths import kernels_dir

DTYPE_OF_C = {
    "int": "int32",
    "unsigned": "uint32",
    "unsigned char": "uint8",
    "unsigned short": "uint16",
    "long long": "int64",
    "unsigned long long": "uint64",
    "float": "float32",
    "double": "float64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
}
MAX_BLOCK_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024  # a block's limit on sm_90, static and dynamic
MAX_STATIC_SHARED_BYTES = 48 * 1024  # of declared arrays, on every GPU

Size = tuple[int, int, int]  # x, y, z

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s*)?(\w+)\s*\(([^()]*)\)')
_PARAMETER = re.compile(r"^(const\s+)?([\w\s]+?)\s*(\*)?\s*(?:const\s+)?(?:__restrict__\s+)?(\w+)$")


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a kernel."""

    name: str
    dtype: str
    pointer: bool
    writable: bool

    def bind(self, kernel: str, value: Any) -> Any:
        """``value`` as this parameter takes it: an array unchanged, a scalar as its C type."""
        return self._bind_array(kernel, value) if self.pointer else self._bind_scalar(kernel, value)

    def _bind_array(self, kernel, array):
        name = f"argument {self.name} of kernel {kernel}"
        doors.check_array(name, array, rank=getattr(array, "ndim", 0), dtypes=(self.dtype,))
        if self.writable and isinstance(array, np.ndarray):
            doors.check_writable(name, array)
        return array

    def _bind_scalar(self, kernel, value):
        dtype = np.dtype(self.dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            value = doors.check_int(f"argument {self.name} of kernel {kernel}", value, limits.min, limits.max)
            return dtype.type(value)
        return dtype.type(doors.check_float(f"argument {self.name} of kernel {kernel}", value))


@dataclass(frozen=True)
class KernelSource:
    """A kernel file ready to compile."""

    file: str
    text: str
    constants: dict[str, Any]
    kernels: dict[str, tuple[Parameter, ...]]

    @classmethod
    def read(cls, file: str, constants: dict[str, Any], text: str | None = None) -> "KernelSource":
        """The file ``kernels_cuda/<file>``, or ``text`` in its place.

        Raises
        ------
        ValueError
            If there is no such file, or a kernel has a parameter of an unknown type.
        """
        if text is None:
            text = _path(file).read_text()
        kernels = {
            name: tuple(_parse(parameter, name, constants) for parameter in declared.split(","))
            for name, declared in _KERNEL.findall(_without_comments(text))
        }
        return cls(file, text, constants, kernels)

    @property
    def include_dirs(self) -> list[Path]:
        """Folders of the headers that kernel files include."""
        return [_include_dir()]

    @property
    def headers(self) -> str:
        """The text of all headers that kernel files can include."""
        return "".join(path.read_text() for path in _headers())

    def bind(self, kernel: str, arguments: dict[str, Any]) -> list[Any]:
        """Arguments in declared order and type.

        Raises
        ------
        ValueError, TypeError
            If the kernel or a name is unknown, an argument is missing, or a type disagrees.
        """
        doors.check_name("kernel", kernel, self.kernels)
        parameters = self.kernels[kernel]
        names = [parameter.name for parameter in parameters]
        if sorted(names) != sorted(arguments):
            raise ValueError(f"kernel {kernel} takes ({', '.join(names)}), but was given ({', '.join(arguments)})")
        return [parameter.bind(kernel, arguments[parameter.name]) for parameter in parameters]


def edition(file: str, text: str | None = None) -> tuple[tuple[str, int, int], ...]:
    """What tells one edition of a kernel file and its headers from the next: path, time of change and size of each.

    A part of the key of compiled modules, so that an edited file is compiled again in a running session.

    Parameters
    ----------
    file : str
        Its place in ``kernels_cuda/``.
    text : str, optional
        What is compiled in the file's place.

    Raises
    ------
    ValueError
        If there is no such file.
    """
    paths = _headers() if text is not None else [_path(file), *_headers()]
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path in paths for stat in (path.stat(),))


def _path(file: str) -> Path:
    path = kernels_dir() / file
    if not path.is_file():
        known = sorted(other.relative_to(kernels_dir()).as_posix() for other in kernels_dir().glob("*/*.cu"))
        doors.check_name("kernel file", file, known)
    return path


def _include_dir() -> Path:
    return kernels_dir() / "include"


def _headers() -> list[Path]:
    return sorted(_include_dir().glob("*.cuh"))


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def _parse(declaration: str, kernel: str, constants: dict[str, Any]) -> Parameter:
    match = _PARAMETER.match(" ".join(declaration.split()))
    if not match:
        raise ValueError(f"kernel {kernel}: cannot read the parameter {declaration.strip()!r}")
    const, c_type, star, name = match.groups()
    c_type = str(constants.get(c_type, c_type))  # a type may be a preprocessor constant
    dtype = DTYPE_OF_C[doors.check_name(f"type of parameter {name} of kernel {kernel}", c_type, DTYPE_OF_C)]
    return Parameter(name, dtype, pointer=bool(star), writable=bool(star) and not const)


class Module(ABC):
    """A compiled kernel file; executors differ in how they run a kernel of it."""

    source: KernelSource

    def launch(
        self,
        kernel: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int = 0,
        **arguments: Any,
    ) -> None:
        """Run ``kernel`` over the grid.

        Parameters
        ----------
        kernel : str
            One of the file's ``extern "C"`` kernels.
        grid, block : int or tuple of up to three ints
            Blocks, and threads in a block.
        shared_bytes : int
            Dynamic shared memory of a block.
        **arguments
            The kernel's arguments by the names that it declares: arrays of the executor's kind, and numbers.

        Raises
        ------
        ValueError, TypeError
            If an argument or a size is not what the kernel takes.
        KernelFault
            On the SIMT executor: if a thread leaves its buffers, waits for one that never comes, or traps.
        """
        grid, block = three(grid), three(block)
        check_launch(kernel, grid, block, shared_bytes)
        self._run(kernel, grid, block, shared_bytes, self.source.bind(kernel, arguments))

    @abstractmethod
    def _run(self, kernel: str, grid: Size, block: Size, shared_bytes: int, values: list[Any]) -> None:
        """Run a checked launch; ``values`` are in declared order and type."""


def three(size: int | tuple[int, ...]) -> Size:
    """A grid or block size in three dimensions."""
    sizes = size if isinstance(size, tuple) else (size,)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"a grid or block has {len(sizes)} dimensions, but it must have 1 to 3")
    x, y, z = (*(doors.check_int("a grid or block size", extent, at_least=0) for extent in sizes), 1, 1)[:3]
    return x, y, z


def check_launch(kernel: str, grid: Size, block: Size, shared_bytes: int):
    """A grid, block and dynamic shared memory that a GPU would accept."""
    for axis, blocks, most in zip("xyz", grid, (2**31 - 1, 65_535, 65_535), strict=True):
        doors.check_int(f"grid.{axis} of kernel {kernel}", blocks, at_least=1, at_most=most)
    for axis, threads, most in zip("xyz", block, (1024, 1024, 64), strict=True):
        doors.check_int(f"block.{axis} of kernel {kernel}", threads, at_least=1, at_most=most)
    threads = block[0] * block[1] * block[2]
    doors.check_int(f"threads per block of kernel {kernel}", threads, at_least=1, at_most=MAX_BLOCK_THREADS)
    doors.check_int(f"shared bytes of kernel {kernel}", shared_bytes, at_least=0, at_most=MAX_SHARED_BYTES)


def check_shared(file: str, kernel: str, static_bytes: int, dynamic_bytes: int):
    """Static and dynamic shared memory of a block that a GPU would accept."""
    if static_bytes > MAX_STATIC_SHARED_BYTES:
        raise ValueError(
            f"kernel {kernel} of {file} declares {static_bytes} bytes of static shared memory, but a GPU gives at most "
            f"{MAX_STATIC_SHARED_BYTES}; more is there as dynamic shared memory alone"
        )
    if static_bytes + dynamic_bytes > MAX_SHARED_BYTES:
        raise ValueError(
            f"kernel {kernel} of {file} has {static_bytes} bytes of static and {dynamic_bytes} of dynamic shared "
            f"memory, but a block gets at most {MAX_SHARED_BYTES} together"
        )
