"""A reader's kernel: where it is found, whether it fits a contract, and how it is launched."""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from moeblaze_ref.backends.raw_cuda.gemm import C_TYPE
from moeblaze_ref.core import checks, kernel_headers
from moeblaze_ref.runtime.declarations import Parameter
from moeblaze_ref.runtime.source import KernelSource, Size, check_launch, three
from moeblaze_ref.verify.checker.contracts import Contract, dtype_of
from moeblaze_ref.verify.checker.sources import check_source

THREADS = 256  # of a block, where a .cu file does not say
C_TYPES = C_TYPE | {"int32": "int"}

_NAMED = r"(?:#\s*define\s+(?P<macro>\w+)|\bconst(?:expr)?\s+[\w\s]+?\s+(?P<constant>\w+)\s*=)\s*"
_DEFINED = re.compile(_NAMED)
_NUMBER = re.compile(_NAMED + r"\(?(?P<value>\d+)\)?[ \t]*(?=[;,\n]|/[/*]|$)")


@dataclass(frozen=True)
class Launch:
    """Grid, block and dynamic shared bytes as formulas, and who stated them."""

    grid: str
    block: str
    shared_bytes: str
    stated_by: str

    def __str__(self):
        return f"grid {self.grid}; block {self.block}; shared bytes {self.shared_bytes} ({self.stated_by})"

    @property
    def threads(self) -> dict[str, int]:
        """The constant THREADS, if the block is stated as a number."""
        return {"THREADS": int(self.block)} if self.block.isdigit() else {}

    def at(self, kernel: str, symbols: dict[str, int]) -> tuple[Size, Size, int]:
        """Grid, block and shared bytes for these sizes; a grid without blocks is left to the caller.

        Raises
        ------
        ValueError
            If a formula cannot be read, or a GPU would refuse the launch.
        """
        block = three(kernel_headers.sizes(self.block, symbols))
        shared_bytes = math.floor(kernel_headers.number(self.shared_bytes, symbols))
        check_launch(kernel, (1, 1, 1), block, shared_bytes)  # first, since the grid is often divided by the block
        x, y, z = three(kernel_headers.sizes(self.grid, symbols))
        check_launch(kernel, (max(x, 1), max(y, 1), max(z, 1)), block, shared_bytes)
        return (x, y, z), block, shared_bytes


def choose_launch(stated: dict[str, str], asked: dict[str, str | None], contract: Contract, where: str) -> Launch:
    """Return the requested launch, else the one in the kernel's header, else one thread an element."""
    default = {"grid": contract.grid, "block": "THREADS", "shared bytes": "0"}
    given = {name: formula for name, formula in asked.items() if formula is not None}
    stated = {name: stated[name] for name in default if name in stated}
    by = [*(["as asked"] if given else []), *([f"by {where}"] if stated.keys() - given.keys() else [])]
    grid, block, shared_bytes = (default | stated | given).values()
    return Launch(grid, block, shared_bytes, " and ".join(by) or "the default of the task")


# ---- raw CUDA ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a .cu file."""

    file: str  #: the file's name, for messages
    text: str  #: what is in it
    name: str

    backends = ("simt", "cuda")  # the first is the default
    header = "the file's header"

    @property
    def label(self) -> str:
        """The kernel's name in reports."""
        return f"{self.name} in {self.file}"

    def open(self) -> "CudaKernel":
        """Return the kernel itself: nothing of it runs before a launch."""
        return self

    def constants(self, dtype: str, terms: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Preprocessor constants: Scalar, of the ``terms`` what the file does not define, and those given."""
        own = {match["macro"] or match["constant"] for match in _DEFINED.finditer(self.text)}
        ours = {name: value for name, value in ({"THREADS": THREADS} | terms).items() if name not in own}
        return {"Scalar": C_TYPE[dtype]} | ours | given

    def numbers(self, constants: dict[str, Any]) -> dict[str, int]:
        """Return the numbers for its formulas: the file's whole constants and those of the compilation."""
        matches = _NUMBER.finditer(self.text)
        own = {match["macro"] or match["constant"]: int(match["value"]) for match in matches}
        return own | {name: int(value) for name, value in constants.items() if str(value).isdigit()}

    def stated(self) -> dict[str, str]:
        """The kernel's row in the header's table.

        Raises
        ------
        ValueError
            If there is a row for it that the table does not reach.
        """
        rows = kernel_headers.table(self.text)
        row = re.search(rf"^// *{self.name} {{2,}}.*", self.text, re.MULTILINE)
        if row and self.name not in rows:
            raise ValueError(
                f"{self.file}: the header's row {row[0]!r} has no table around it, or not its number of cells "
                f"(columns: kernel, grid, block, shared bytes; cells are at least two blanks apart)"
            )
        return rows.get(self.name, {})

    def fit(self, contract: Contract, dtype: str, constants: dict[str, Any]) -> tuple[str, ...]:
        """The names of its parameters, if they are the contract's.

        Raises
        ------
        ValueError
            If a name, a type or a const is wrong, or an output is missing; the message ends with a declaration.
        """
        parameters = KernelSource.read(self.file, constants, self.text).kernels[self.name]
        wrong = next(filter(None, (_misfit(contract, dtype, parameter) for parameter in parameters)), "")
        names = tuple(parameter.name for parameter in parameters)
        _accept(self, contract, names, wrong, declaration(contract, dtype))
        return names


def _misfit(contract: Contract, dtype: str, parameter: Parameter) -> str:
    """Return what is wrong with one parameter, or an empty text."""
    name = parameter.name
    if name in contract.known_sizes:
        fits = not parameter.pointer and "int" in parameter.dtype
        return "" if fits else f"parameter {name} is a size: int {name}"
    if name not in contract.tensors:
        return ""  # named with the others that are unknown
    wanted, problem = dtype_of(name, dtype), ""
    if not parameter.pointer or parameter.dtype != wanted:
        problem = f"an array of {wanted}"
    elif parameter.writable and name in contract.inputs:
        problem = "an input"
    elif not parameter.writable and name in contract.writes:
        problem = "an output, which is not const"
    return problem and f"parameter {name} is {problem}: {_parameter(contract, name, dtype)}"


def _parameter(contract: Contract, name: str, dtype: str) -> str:
    const = "const " if name in contract.inputs else ""
    return f"{const}{C_TYPES[dtype_of(name, dtype)]}* {name}"


def declaration(contract: Contract, dtype: str = "float32") -> str:
    """Return the declaration of the task's kernel in CUDA, with every parameter that it may take."""
    tensors = [_parameter(contract, name, dtype) for name in contract.tensors]
    parameters = ", ".join([*tensors, *(f"int {size}" for size in contract.sizes)])
    return f'extern "C" __global__ void {contract.task.replace(".", "_")}({parameters})'


def _accept(kernel, contract: Contract, names: Iterable[str], wrong: str, declared: str):
    """Every name is known and every output is there."""
    known = (*contract.tensors, *contract.known_sizes)
    unknown = [_unknown(name, known) for name in names if name not in known]
    missing = [f"the output {name} is no parameter" for name in contract.outputs if name not in names]
    problem = next(filter(None, (*unknown[-1:], wrong, *missing)), "")
    if problem:
        extras = f", and so may {' and '.join(contract.extras)}" if contract.extras else ""
        raise ValueError(
            f"{kernel.label} is not a kernel for {contract.task}: {problem}.\nParameters are matched by name, in any "
            f"order; inputs and sizes may be left out{extras}:\n{declared}"
        )


def _unknown(name: str, known: tuple[str, ...]) -> str:
    try:
        checks.check_name("parameter", name, known)
    except ValueError as error:
        text = str(error).partition(" Valid:")[0].rstrip(".")
        return f"{text} That is no tensor and no size of the task" if text.endswith("?") else text
    return ""


def find_cuda(text: str, file: str, name: str | None) -> CudaKernel:
    """A kernel in the text of a .cu file; without a name, its only one.

    Raises
    ------
    ValueError
        If there is no such kernel, or there are several and none is named.
    """
    names = list(KernelSource.read(file, {"Scalar": "float"}, text).kernels)  # any type will do for the names
    if not names:
        raise ValueError(f'{file} has no kernel: it must be declared extern "C" __global__ void NAME(...)')
    if name is None and len(names) > 1:
        raise ValueError(f"{file} has the kernels {', '.join(names)}: name one, as in {file}:{names[0]}")
    return CudaKernel(file, text, _known(file, name or names[0], names, names))


# ---- Numba ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NumbaKernel:
    """A function under ``numba.cuda.jit``, and how a report names it."""

    kernel: Any
    label: str

    backends = ("numba",)
    header = "its docstring"

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.kernel.py_func.__name__

    def open(self) -> "NumbaKernel":
        """Return the kernel itself: it is imported already."""
        return self

    def constants(self, dtype: str, terms: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The threads of a block alone, for formulas: Python has no preprocessor.

        Raises
        ------
        ValueError
            If the dtype is not float32, or constants are given.
        """
        checks.check_name("dtype of Numba kernels", dtype, ("float32",))
        if given:
            raise ValueError(f"constants {', '.join(given)} are for .cu files; a Numba kernel has its module's")
        from moeblaze_ref.backends.numba_cuda.runtime import THREADS as threads

        return {"THREADS": terms.get("THREADS", threads)}

    def numbers(self, constants: dict[str, Any]) -> dict[str, int]:
        """Return the numbers for its formulas: the whole numbers among its module's globals."""
        own = self.kernel.py_func.__globals__
        return constants | {name: value for name, value in own.items() if type(value) is int}

    def stated(self) -> dict[str, str]:
        """Return the launch that its docstring states."""
        return kernel_headers.in_docstring(self.kernel.py_func.__doc__)

    def fit(self, contract: Contract, dtype: str, constants: dict[str, Any]) -> tuple[str, ...]:
        """The names of its parameters, if they are the contract's.

        Raises
        ------
        ValueError
            If a name is unknown, or an output is missing; the message ends with a declaration.
        """
        names = tuple(inspect.signature(self.kernel.py_func).parameters)
        parameters = ", ".join((*contract.tensors, *contract.sizes))
        declared = f"@cuda.jit\ndef {contract.task.replace('.', '_')}({parameters}):"
        _accept(self, contract, names, "", declared)
        return names


def find_numba(function: Any, where: str) -> NumbaKernel:
    """Return a function as a Numba kernel.

    Raises
    ------
    TypeError
        If ``numba.cuda.jit`` did not make the function, or made it as a device function.
    """
    module = type(function).__module__
    if not hasattr(function, "py_func") or "cuda" not in module:
        kind = type(function).__name__
        raise TypeError(f"{where} is a {kind}, but it must be a kernel: a function under @cuda.jit of numba.cuda")
    if getattr(function, "_device", False) or getattr(function, "targetoptions", {}).get("device", False):
        raise TypeError(f"{where} is a device function, but it must be a kernel: @cuda.jit without device=True")
    return NumbaKernel(function, where)


@dataclass(frozen=True)
class NumbaFile:
    """A Numba kernel whose module has not run yet."""

    place: str  #: the file or module
    name: str  #: the function in it
    text: bytes | None  #: the file, checked by `sources.check_source`; None of a module of the project

    backends = ("numba",)

    @property
    def label(self) -> str:
        """The kernel's name in reports."""
        return f"{self.place}:{self.name}"

    def open(self) -> NumbaKernel:
        """Run the module.

        Raises
        ------
        ValueError, TypeError
            If it does not run to its end, or has no such kernel.
        """
        functions = {known: value for known, value in vars(self._module()).items() if not known.startswith("__")}
        kernels = [known for known, value in functions.items() if hasattr(value, "py_func")]
        return find_numba(functions[_known(self.place, self.name, functions, kernels)], self.label)

    def _module(self) -> ModuleType:
        # It decides where Numba runs, before anyone imports Numba.
        from moeblaze_ref.backends.numba_cuda import runtime  # noqa: F401

        try:
            if self.text is None:
                return importlib.import_module(self.place)
            return _run(self.text, _source_file(self.place))
        except Exception as error:  # whatever a reader's module does when it is run
            raise ValueError(f"cannot import {self.place}: {type(error).__name__}: {error}") from error


def _run(text: bytes, file: Path) -> ModuleType:
    """Import a module from its text. A compiled file beside it, which Python would prefer, is not checked."""
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(text, file, "exec"), vars(module))
    return module


# ---- by name ----------------------------------------------------------------------------------


def find(kernel: Any) -> CudaKernel | NumbaKernel | NumbaFile:
    """A reader's kernel, however it is given. Nothing of a file runs.

    It is given as ``FILE.cu`` or ``FILE.cu:name``, as the text of such a file, with one kernel in it, as
    ``module:function`` or ``FILE.py:function``, or as the function itself.

    Raises
    ------
    ValueError, TypeError, OSError
        If there is no such file, module, function or kernel, or `sources.check_source` refuses the file.
    """
    if not isinstance(kernel, str | Path):
        return find_numba(kernel, f"{getattr(kernel, '__module__', '')}:{getattr(kernel, '__name__', kernel)}")
    if "__global__" in str(kernel):
        return find_cuda(str(kernel), "kernel.cu", None)
    place, _, name = str(kernel).partition(":")
    if place.endswith(".cu"):
        return find_cuda(_existing(place).read_text("utf-8-sig", errors="replace"), place, name or None)
    if not name or (Path(place).is_file() and not place.endswith(".py")):
        raise ValueError(f"kernel {place!r} must be FILE.cu, FILE.cu:name, FILE.py:function or module:function")
    if place.split(".")[0] == __package__.split(".")[0] and not place.endswith(".py"):
        return NumbaFile(place, name, None)
    text = _source_file(place).read_bytes()
    check_source(text, place)
    return NumbaFile(place, name, text)


def _known(place: str, name: str, names: Container[str], kernels: list[str]) -> str:
    """The name, if it is one of the file's or module's; else the message tells the kernels that there are."""
    if name in names:
        return name
    raise ValueError(f"{name!r} is wanted, but {place} has {', '.join(kernels) or 'no kernel'}")


def _existing(place: str) -> Path:
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {place}")
    return path


def _source_file(place: str) -> Path:
    """The file of a module, by its name, also from the current folder; or itself. No package on the way runs."""
    if place.endswith(".py"):
        return _existing(place)
    name, origin, folders = "", "", ["", *sys.path]
    for part in place.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            raise ValueError(f"cannot import {place}: ModuleNotFoundError: there is no module {name}")
        origin, folders = str(spec.origin), spec.submodule_search_locations or []
    if not origin.endswith(".py"):
        raise ValueError(f"cannot import {place}: it is not a Python file")
    return Path(origin)
