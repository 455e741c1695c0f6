"""The kernels that a .cu file declares: their names, and the names and types of their parameters.

This reads declarations, not C++: what it cannot read it keeps, with the reason, for who asks for that kernel.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import dtype_of
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime.tensor_map import TensorMap

TENSOR_MAP = "TensorMap"  # hopper/tma.cuh
DTYPE_OF_C = {  # as `_canonical` writes the types
    "bool": "bool",
    "char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "long long": "int64",
    "unsigned char": "uint8",
    "unsigned short": "uint16",
    "unsigned": "uint32",
    "unsigned long": "uint64",
    "unsigned long long": "uint64",
    "int8_t": "int8",
    "int16_t": "int16",
    "int32_t": "int32",
    "int64_t": "int64",
    "uint8_t": "uint8",
    "uint16_t": "uint16",
    "uint32_t": "uint32",
    "uint64_t": "uint64",
    "size_t": "uint64",
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "__half": "float16",
    "nv_bfloat16": "bfloat16",
    "__nv_bfloat16": "bfloat16",
}

# Comments, and literals that may hold braces.
_NO_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_PART = re.compile(r"[^;{}]+")  # a declaration, or the head of one
_EXTERN_C = re.compile(r'\bextern\s+"C"')
_ATTRIBUTE = re.compile(
    r"\b__(?:launch_bounds|cluster_dims|attribute|maxnreg)__\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
)
_SPECIFIER = re.compile(r'\bextern\s+"C"|\b(?:__global__|static|inline|__inline__|__forceinline__)\b')
_SIGNATURE = re.compile(r"\s*void\s+(\w+)\s*\(([^()]*)\)\s*")
_NAME = re.compile(r"(\w+)\s*\(")
_QUALIFIERS = {"const", "volatile", "__restrict__", "__restrict", "__grid_constant__"}
_NO_NAMES = _QUALIFIERS | {"int", "char", "short", "long"}  # what may end a parameter that has no name


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a kernel; its dtype is numpy's name, or `TENSOR_MAP`."""

    name: str
    dtype: str
    pointer: bool
    writable: bool

    def bind(self, kernel: str, value: Any) -> Any:
        """``value`` as this parameter takes it: an array or a `TensorMap` unchanged, a scalar as its C type."""
        if self.dtype == TENSOR_MAP:
            checks.check_type(f"argument {self.name} of kernel {kernel}", value, TensorMap)
            return value
        return self._bind_array(kernel, value) if self.pointer else self._bind_scalar(kernel, value)

    def _bind_array(self, kernel: str, array: Array) -> Array:
        flags = getattr(array, "flags", None)
        plain = flags is not None and flags.c_contiguous and dtype_of(array) == self.dtype
        if not plain or (self.writable and not getattr(flags, "writeable", True)):
            self._refuse(kernel, array)
        return array

    def _refuse(self, kernel: str, array: Array) -> None:
        """Say what is wrong with an array: in a launch that is right, no sentence is made."""
        name = f"argument {self.name} of kernel {kernel}"
        checks.check_array(name, array, rank=getattr(array, "ndim", 0), dtypes=(self.dtype,))
        checks.check_writable(name, array)

    def _bind_scalar(self, kernel: str, value: Any) -> Any:
        convert, limits = _scalar(self.dtype)
        plain = bool if self.dtype == "bool" else int  # of Python's, what needs no check
        if type(value) is plain and limits is not None and limits[0] <= value <= limits[1]:
            return convert(value)
        name = f"argument {self.name} of kernel {kernel}"
        return convert(checks.check_float(name, value) if limits is None else checks.check_int(name, value, *limits))


@functools.cache
def _scalar(dtype: str) -> tuple[type, tuple[int, int] | None]:
    """The type of a C scalar, and the least and greatest value of an integer."""
    convert = np.dtype(dtype).type
    if np.dtype(dtype).kind == "b":
        return convert, (0, 1)
    limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None
    return convert, (int(limits.min), int(limits.max)) if limits else None


@dataclass(frozen=True)
class Declarations:
    """The ``__global__`` declarations of a file.

    Parameters
    ----------
    kernels : dict
        The parameters of each kernel that can be launched, by its name.
    refused : dict
        Why a kernel cannot be launched, by its name, or by its declaration where no name can be read.
    """

    kernels: dict[str, tuple[Parameter, ...]]
    refused: dict[str, str]

    @classmethod
    def read(cls, text: str, constants: dict[str, Any]) -> "Declarations":
        """Read the declarations in the text of a .cu file; ``constants`` may stand for types."""
        code = _NO_CODE.sub(lambda match: match[0] if match[0] == '"C"' else " ", text)
        kernels: dict[str, tuple[Parameter, ...]] = {}
        refused: dict[str, str] = {}
        for declaration, has_c_linkage in _declarations(code):
            name = _name(declaration)
            try:
                if not has_c_linkage:
                    raise ValueError('it is not declared extern "C", so its name is no plain one')
                parameters = _parameters(declaration, constants)
                if kernels.setdefault(name, parameters) != parameters:
                    del kernels[name]
                    raise ValueError("it is declared twice, with different parameters")
            except ValueError as error:
                refused[name] = f"cannot launch {declaration!r}: {error}"
        return cls(kernels, {name: why for name, why in refused.items() if name not in kernels})

    def parameters(self, kernel: str) -> tuple[Parameter, ...]:
        """The parameters of one kernel.

        Raises
        ------
        ValueError
            If there is no such kernel, or it cannot be launched; the message holds its declaration.
        """
        if kernel in self.refused:
            raise ValueError(self.refused[kernel])
        try:
            checks.check_name("kernel", kernel, self.kernels)
        except ValueError as error:
            raise ValueError(". ".join((str(error), *self.refused.values()))) from None
        return self.kernels[kernel]


def _declarations(code: str) -> Iterator[tuple[str, bool]]:
    """Every declaration with ``__global__`` on one line, and whether its name has C linkage."""
    for directive in _DIRECTIVE.findall(code):
        if "__global__" in directive:  # a macro that makes kernels
            yield _one_line(directive), True
    code = _DIRECTIVE.sub("", code)
    blocks = list(_extern_c_blocks(code))
    for part in _PART.finditer(code):
        if "__global__" in part[0]:
            inside = any(part.start() in block for block in blocks)
            yield _one_line(part[0]), inside or bool(_EXTERN_C.search(part[0]))


def _one_line(text: str) -> str:
    return " ".join(text.replace("\\\n", " ").split())


def _extern_c_blocks(code: str) -> Iterator[range]:
    """Where the insides of ``extern "C" { ... }`` lie."""
    for match in re.finditer(_EXTERN_C.pattern + r"\s*\{", code):
        depth = 1
        for brace in re.finditer(r"[{}]", code[match.end() :]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                yield range(match.end(), match.end() + brace.start())
                break


def _name(declaration: str) -> str:
    """The kernel's name, or the whole declaration if it shows none."""
    match = _NAME.search(_without_specifiers(declaration))
    return match[1] if match else declaration


def _without_specifiers(declaration: str) -> str:
    return _SPECIFIER.sub(" ", _ATTRIBUTE.sub(" ", declaration))


def _parameters(declaration: str, constants: dict[str, Any]) -> tuple[Parameter, ...]:
    signature = _SIGNATURE.fullmatch(_without_specifiers(declaration))
    if not signature:
        raise ValueError("its declaration cannot be read as void name(parameters)")
    declared = signature[2].strip()
    if declared in ("", "void"):
        return ()
    return tuple(_parameter(words, constants) for words in declared.split(","))


def _parameter(declared: str, constants: dict[str, Any]) -> Parameter:
    """One parameter: a type, perhaps a star, and a name."""
    pointee, star, pointer = declared.partition("*")
    *type_words, name = re.findall(r"\w+", f"{pointee} {pointer}") or [""]
    c_type = _canonical([word for word in type_words if word not in _QUALIFIERS], constants)
    if not c_type or re.search(r"[^\w\s]", pointee + pointer) or name in _NO_NAMES:
        raise ValueError(f"cannot read the parameter {declared.strip()!r}")
    const = "const" in pointee.split()
    if c_type == TENSOR_MAP:
        if star or not const or "__grid_constant__" not in pointee.split():
            raise ValueError(f"parameter {name} must be declared const __grid_constant__ TensorMap {name}")
        return Parameter(name, TENSOR_MAP, pointer=False, writable=False)
    dtype = DTYPE_OF_C[checks.check_name(f"type of parameter {name}", c_type, DTYPE_OF_C)]
    return Parameter(name, dtype, pointer=bool(star), writable=bool(star) and not const)


def _canonical(words: list[str], constants: dict[str, Any]) -> str:
    """A type as `DTYPE_OF_C` has it: constants in the place of their names, no signed, no int beside other words."""
    words = " ".join(str(constants.get(word, word)) for word in words).split()
    if not words:
        return ""
    bare = [word for word in words if word not in ("signed", "int")] or ["int"]
    return " ".join(sorted(bare, key=lambda word: word != "unsigned"))
