"""A .cu file as the executors see it: its text, its constants and its kernels' parameters.

Arguments are passed by name and converted to the declared C type here, once for both
executors, so that a Python float can never arrive as a double.
"""

import functools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeblaze_ref.core import checks
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.declarations import Declarations, Parameter

MAX_BLOCK_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024  # a block's limit on sm_90, static and dynamic
MAX_STATIC_SHARED_BYTES = 48 * 1024  # of declared arrays, on every GPU

_RUNS_ON = re.compile(r"^\s*// Runs on +(.*?)\.?$", re.MULTILINE)
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)(a?)")

Size = tuple[int, int, int]  # x, y, z
KernelArguments = dict[str, Any]  # arrays, tensor maps and numbers, by the names that the kernel declares
Edition = tuple[tuple[str, int, int], ...]  # of each file the path, the time of change and the size


@dataclass(frozen=True)
class KernelSource:
    """A kernel file ready to compile."""

    file: str
    text: str
    constants: dict[str, Any]
    declarations: Declarations

    @classmethod
    def read(cls, file: str, constants: dict[str, Any], text: str | None = None) -> "KernelSource":
        """The file ``kernels_cuda/<file>``, or ``text`` in its place.

        Raises
        ------
        ValueError
            If there is no such file.
        """
        if text is None:
            text = _path(file).read_text()
        return cls(file, text, constants, Declarations.read(text, constants))

    @property
    def kernels(self) -> dict[str, tuple[Parameter, ...]]:
        """The parameters of each kernel that can be launched, by its name."""
        return self.declarations.kernels

    @property
    def include_dirs(self) -> list[Path]:
        """Folders of the headers that kernel files include."""
        return [_include_dir()]

    @property
    def runs_on(self) -> str:
        """The text of "Runs on" in the file's header; empty if the header has none."""
        line = _RUNS_ON.search(self.text)
        return line[1] if line else ""

    def check_gpu(self, capability: tuple[int, int], device: str) -> None:
        """A GPU of this compute capability may run the file.

        Raises
        ------
        ValueError
            If its header asks for a newer one or, by an architecture such as sm_90a, for another one.
        """
        needed = _ARCHITECTURE.match(self.runs_on)
        if not needed:
            return
        named = int(needed[1]), int(needed[2])
        if capability < named or (needed[3] and capability != named):
            raise ValueError(
                f"{self.file} needs compute capability "
                f"{named[0]}.{named[1]}{' exactly' if needed[3] else ' or newer'}, "
                f"but {device} has {capability[0]}.{capability[1]}"
            )

    @property
    def gpu_options(self) -> tuple[str, ...]:
        """Options of NVRTC for an architecture such as sm_90a, whose instructions no other GPU has."""
        needed = _ARCHITECTURE.match(self.runs_on)
        return (f"-arch={needed[0]}",) if needed and needed[3] else ()

    def check_simt(self) -> None:
        """The SIMT executor may run the file.

        Raises
        ------
        ValueError
            If its header leaves the executor out.
        """
        if self.runs_on and "SIMT executor" not in self.runs_on:
            raise ValueError(f"{self.file} does not run on the SIMT executor: its header says {self.runs_on!r}")

    @property
    def headers(self) -> str:
        """The text of all headers that kernel files can include."""
        return "".join(Path(path).read_text() for path in _headers())

    def bind(self, kernel: str, arguments: KernelArguments) -> list[Any]:
        """Arguments in declared order and type.

        Raises
        ------
        ValueError, TypeError
            If the kernel or a name is unknown, the kernel's declaration cannot be read, an argument is missing, or a
            type disagrees.
        """
        parameters = self.declarations.parameters(kernel)
        names = [parameter.name for parameter in parameters]
        if arguments.keys() != {*names}:
            raise ValueError(f"kernel {kernel} takes ({', '.join(names)}), but was given ({', '.join(arguments)})")
        return [parameter.bind(kernel, arguments[parameter.name]) for parameter in parameters]


def edition(file: str, text: str | None = None) -> Edition:
    """Return path, time of change and size of a kernel file and its headers, which identify their edition.

    A part of the key of compiled modules, so that an edited file is compiled again in a running session.

    Parameters
    ----------
    file : str
        Its place in ``kernels_cuda/``.
    text : str, optional
        Text to compile in the file's place.

    Raises
    ------
    ValueError
        If there is no such file.
    """
    paths = _headers() if text is not None else [str(_path(file)), *_headers()]
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path in paths for stat in (os.stat(path),))


def kernel_text(file: str) -> str:
    """The text of ``kernels_cuda/<file>``; a ValueError if there is no such file."""
    return _path(file, "**/*.cu*").read_text()


def inlined(file: str) -> str:
    """``kernels_cuda/<file>`` with the project's own headers in it, so that any line of them can be replaced."""
    text, included = kernel_text(file), set()
    while match := re.search(r'#include "([\w./]+)"\n', text):
        name = match.group(1)
        body = "" if name in included else kernel_text(f"include/{name}").replace("#pragma once\n", "")
        text = text[: match.start()] + body + text[match.end() :]
        included.add(name)
    return text


def _path(file: str, kernels: str = "*/*.cu") -> Path:
    """The path of a file in ``kernels_cuda/``; the files are listed only for a message, since that takes far longer."""
    path = kernels_dir() / file
    inside = path.is_relative_to(kernels_dir()) and ".." not in path.parts
    if not (inside and path.suffix in (".cu", ".cuh") and path.is_file()):
        known = sorted(other.relative_to(kernels_dir()).as_posix() for other in kernels_dir().glob(kernels))
        checks.check_name("kernel file", file, known)
    return path


def _include_dir() -> Path:
    return kernels_dir() / "include"


def _headers() -> list[str]:
    """Paths of all headers. By os.walk, since every load of a kernel file asks and Path.rglob takes far longer."""
    found = os.walk(_include_dir())
    return sorted(os.path.join(folder, name) for folder, _, names in found for name in names if name.endswith(".cuh"))


class Module(ABC):
    """A compiled kernel file; executors differ in how they run a kernel of it."""

    def __init__(self, source: KernelSource):
        self.source = source

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
            The kernel's arguments by the names that it declares: arrays of the executor's kind, alone or in a
            `TensorMap`, and numbers.

        Raises
        ------
        ValueError, TypeError
            If an argument or a size is not what the kernel takes.
        KernelFault
            On the SIMT executor: if a thread leaves its buffers, waits for a thread that never comes, or traps.
        """
        grid, block = checked_sizes(kernel, grid, block, shared_bytes)
        self._run(kernel, grid, block, shared_bytes, self.bind(kernel, arguments))

    def bind(self, kernel: str, arguments: KernelArguments) -> Sequence[Any]:
        """Arguments in declared order and type, as `_run` takes them; raises as `KernelSource.bind`."""
        return self.source.bind(kernel, arguments)

    @abstractmethod
    def _run(self, kernel: str, grid: Size, block: Size, shared_bytes: int, values: Sequence[Any]) -> None:
        """Run a checked launch; ``values`` are those of `bind`."""


@functools.lru_cache(maxsize=4096, typed=True)  # a training loop launches the same sizes again and again
def checked_sizes(
    kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared_bytes: int
) -> tuple[Size, Size]:
    """Grid and block in three dimensions, once a GPU would accept them."""
    grid, block = three(grid), three(block)
    check_launch(kernel, grid, block, shared_bytes)
    return grid, block


def three(size: int | tuple[int, ...]) -> Size:
    """A grid or block size in three dimensions."""
    sizes = size if isinstance(size, tuple) else (size,)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"a grid or block has {len(sizes)} dimensions, but it must have 1 to 3")
    x, y, z = (*(checks.check_int("a grid or block size", extent, at_least=0) for extent in sizes), 1, 1)[:3]
    return x, y, z


def check_launch(kernel: str, grid: Size, block: Size, shared_bytes: int) -> None:
    """A grid, block and dynamic shared memory that a GPU would accept."""
    for axis, blocks, most in zip("xyz", grid, (2**31 - 1, 65_535, 65_535), strict=True):
        checks.check_int(f"grid.{axis} of kernel {kernel}", blocks, at_least=1, at_most=most)
    for axis, threads, most in zip("xyz", block, (1024, 1024, 64), strict=True):
        checks.check_int(f"block.{axis} of kernel {kernel}", threads, at_least=1, at_most=most)
    threads = block[0] * block[1] * block[2]
    checks.check_int(f"threads per block of kernel {kernel}", threads, at_least=1, at_most=MAX_BLOCK_THREADS)
    checks.check_int(f"shared bytes of kernel {kernel}", shared_bytes, at_least=0, at_most=MAX_SHARED_BYTES)


def check_shared(file: str, kernel: str, static_bytes: int, dynamic_bytes: int) -> None:
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
