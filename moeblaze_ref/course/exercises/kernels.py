"""The right kernels of the exercises: the project's own as a file of their own, and texts that a sheet writes."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moeblaze_ref.core import kernel_headers
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.course.notebook.sources import defined, definition
from moeblaze_ref.runtime.source import kernel_text

THREADS = "64"  # of a block of the .cu exercises: two warps, and several blocks even in small cases
NUMBA_IMPORTS = "from moeblaze_ref.backends.numba_cuda.runtime import THREADS, ZERO, cuda"  # of a kernel that sums


@dataclass(frozen=True)
class Kernel:
    """A right kernel, and how the checker launches it."""

    name: str  #: of the function that is launched
    text: str  #: the whole file
    grid: str | None = None  #: in blocks; a Numba kernel states its launch itself
    shared_bytes: str = "0"  #: dynamic shared memory of a .cu kernel's block
    block: str = THREADS  #: threads of a .cu kernel's block
    dtype: str = "float32"  #: the type Scalar of a .cu kernel

    @property
    def language(self) -> str:
        """``c++`` or ``python``."""
        return "c++" if "__global__" in self.text else "python"

    @property
    def launch(self) -> dict[str, str | None]:
        """Options of the checker; none for a Numba kernel, which states its launch itself."""
        if self.language == "python":
            return {}
        return {"grid": self.grid, "block": self.block, "shared_bytes": self.shared_bytes, "dtype": self.dtype}


def cuda_kernel(file: str, name: str, *parts: str) -> Kernel:
    """A kernel of ``kernels_cuda/<file>`` below those functions, structs and constants that it needs."""
    return Kernel(name, cuda_source(file, *parts, name), cuda_grid(file, name))


def cuda_source(file: str, *names: str) -> str:
    """Functions, structs and constants of ``kernels_cuda/<file>`` as a file of their own, below its includes."""
    text = kernel_text(file)
    includes = "\n".join(line for line in text.splitlines() if line.startswith("#include"))
    return "\n\n".join([includes, *(_part(text, name) for name in names)]) + "\n"


def _part(text: str, name: str) -> str:
    constant = re.search(rf"^constexpr [^\n]*\b{name} = [^\n]*", text, re.MULTILINE)
    return constant[0] if constant else definition(text, name).rstrip()


def helpers(text: str) -> str:
    """Return the functions and structs that a CUDA text uses from its included headers, with their comments."""
    headers = _included(text)
    code = re.sub(r"//[^\n]*", "", text)
    used = [name for name in defined(headers) if re.search(rf"\b{name}\b", code) and name not in defined(text)]
    return "\n\n".join(definition(headers, name).rstrip() for name in used)


def _included(text: str) -> str:
    """Return the headers that a text includes, each behind the headers that it includes itself."""
    folder = kernels_dir() / "include"
    read = [(folder / name).read_text() for name in re.findall(r'#include "([\w/]+\.cuh)"', text)]
    return "".join(_included(header) + header for header in read)


def cuda_grid(file: str, kernel: str) -> str:
    """The grid, in blocks, that the header of ``kernels_cuda/<file>`` states."""
    return kernel_headers.table(kernel_text(file))[kernel]["grid"]


def numba_kernel(function: Any, imports: str = NUMBA_IMPORTS, *helpers: Any, **renamed: str) -> Kernel:
    """A kernel of `moeblaze_ref.backends.numba_cuda` as a file of its own, below its imports and device functions.

    ``renamed`` has new names, by the old ones: the checker matches parameters by name.
    """
    text = "\n\n\n".join([imports, *map(numba_source, (*helpers, function))])
    for old, new in renamed.items():
        text = _renamed(text, old, new)
    return Kernel(function.py_func.__name__, f"{text}\n")


def _renamed(text: str, old: str, new: str) -> str:
    """Python with another name for a variable; docstrings and comments stay."""
    parts = text.split('"""')
    parts[::2] = [
        "\n".join(re.sub(rf"\b{old}\b", new, code) + mark + comment for code, mark, comment in _lines(part))
        for part in parts[::2]
    ]
    return '"""'.join(parts)


def _lines(text: str) -> Iterator[tuple[str, str, str]]:
    """Each line as its code, ``#`` and its comment, the last two empty if it has none."""
    return (line.partition("#") for line in text.split("\n"))


def numba_source(function: Any) -> str:
    """The text of a kernel or device function of `moeblaze_ref.backends.numba_cuda`."""
    return inspect.getsource(function.py_func).rstrip()
