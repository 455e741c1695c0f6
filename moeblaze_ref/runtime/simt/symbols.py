"""Read source lines and symbols of a kernel file built with ``lines``. binutils reads them, which g++ requires."""

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from moeblaze_ref.runtime.simt.cache import SimtUnavailable


class Frame(NamedTuple):
    """A line of a source file, counted from 1, and the function that it stands in."""

    function: str
    file: str
    line: int


class SharedArray(NamedTuple):
    """An array of static shared memory: its name, and the bytes from where that memory begins."""

    name: str
    begin: int
    bytes: int


def frames(built: ctypes.CDLL, returns: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """Where in the source calls stand: of each first its own line, then those of the functions inlined around it.

    Parameters
    ----------
    built : ctypes.CDLL
        A kernel file, with ``lines``.
    returns : iterable of int
        Where the calls return to, in bytes from the beginning of the file.

    Raises
    ------
    SimtUnavailable
        If addr2line is missing.
    """
    returns = list(returns)
    calls = "".join(f"{place - 1:#x}\n" for place in returns)
    told = _tool("addr2line", "-e", built._name, "--inlines", "--functions", "--demangle", "--addresses", given=calls)
    blocks = re.split(r"^0x[0-9a-f]+\n", told, flags=re.MULTILINE)[1:]
    return {place: _frames(block.splitlines()) for place, block in zip(returns, blocks, strict=True)}


def _frames(told: list[str]) -> tuple[Frame, ...]:
    """Return the frames of one call, each told in two lines: the function, then its place."""
    return tuple(_frame(*pair) for pair in zip(told[::2], told[1::2], strict=True))


def _frame(function: str, place: str) -> Frame:
    file, _, line = re.sub(r" \(discriminator \d+\)$", "", place).rpartition(":")
    return Frame(_plain(function), file, int(line) if line.isdigit() else 0)


def _plain(function: str) -> str:
    """``block_sum`` of ``int block_sum<64, int>(int)``."""
    while (bare := re.sub(r"<[^<>]*>", "", function)) != function:
        function = bare
    return function.partition("(")[0].split()[-1]


@functools.cache
def shared_arrays(path: str) -> tuple[SharedArray, ...]:
    """The arrays of static shared memory of a built file, in the order in which they lie.

    Raises
    ------
    SimtUnavailable
        If nm is missing.
    """
    rows = (line.split("|") for line in _tool("nm", "--format=sysv", "--demangle", path).splitlines())
    found = [
        SharedArray(row[0].strip().rpartition("::")[2], int(row[1], 16), int(row[4], 16))
        for row in rows
        if len(row) == 7 and row[3].strip() == "TLS" and row[4].strip()
    ]
    return tuple(sorted(found, key=lambda array: array.begin))


def _tool(name: str, *arguments: str, given: str = "") -> str:
    path = shutil.which(name)
    if path is None:
        raise SimtUnavailable(f"lines of kernels are found with {name}, which is not on the PATH; install binutils")
    return subprocess.run([path, *arguments], input=given, capture_output=True, text=True, check=True).stdout
