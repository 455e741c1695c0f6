"""Kernels for tests that ask whether a result is right, not what it cost; and kernels with a planted fault."""

import importlib
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import numpy as np

from moeblaze_ref.backends.registry import BACKENDS, OpenStage
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.simt.executor import SimtExecutor, SimtModule
from moeblaze_ref.runtime.source import inlined, kernel_text

UNCHANGED = SimtExecutor.load


@contextmanager
def quick_builds():
    """g++ compiles kernels in less time, with fewer passes: they ask for more accesses than those that count."""
    level, reuse, *others = build.GCC_INSTRUMENTED_FLAGS
    assert (level, reuse) == ("-O1", "-ftree-pre")
    with mock.patch.object(build, "GCC_INSTRUMENTED_FLAGS", ("-Og", *others)):
        yield


class Quick(SimtExecutor):
    """An executor of such kernels. Their text differs by a comment: nobody who counts is given one of them."""

    def load(self, file, text=None, **constants):
        with quick_builds():
            return super().load(file, text=f"{text or kernel_text(file)}\n// compiled quickly\n", **constants)


def with_fault(file: str, right: str, wrong: str) -> str:
    """The text of a kernel file with a fault in it."""
    text = inlined(file)
    assert right in text, f"{file} no longer holds {right!r}: update the fault"
    return text.replace(right, wrong)


def plant(monkeypatch, file: str, faulty_text: str, **constants):
    """Compile this text in place of a kernel file's from now on."""

    def load(self, name, text=None, **given):
        if name != file:
            return UNCHANGED(self, name, text=text, **given)
        with quick_builds():
            return UNCHANGED(self, name, text=faulty_text, **constants, **given)

    monkeypatch.setattr(SimtExecutor, "load", load)


class Planted(Quick):
    """An executor with one fault in one kernel file."""

    def __init__(self, file: str, right: str, wrong: str, seed: int, **constants):
        super().__init__(seed=seed)
        self.file, self.faulty_text, self.constants = file, with_fault(file, right, wrong), constants

    def load(self, file, text=None, **constants):
        if file != self.file:
            return super().load(file, text=text, **constants)
        return super().load(file, text=self.faulty_text, **constants, **self.constants)


def without_barrier(comment: str, barrier: str = "__syncthreads()") -> tuple[str, str]:
    """The barrier before a comment, and what is left without it."""
    return f"{barrier};  // {comment}", f"// {comment}"


def faulty_module(module: ModuleType, right: str, wrong: str) -> ModuleType:
    """A module of Python with one fault in its text."""
    text = inspect.getsource(module)
    assert right in text, f"{module.__name__} no longer holds {right!r}: update the fault"
    faulty = ModuleType(module.__name__)
    exec(compile(text.replace(right, wrong), module.__name__, "exec"), vars(faulty))
    return faulty


def numba_with_fault(stage: str, right: str, wrong: str) -> OpenStage:
    """A stage of the Numba kernels with one fault in its text."""
    return opened_numba(faulty_module(stage_module("numba", stage), right, wrong))


def stage_module(backend: str, stage: str) -> ModuleType:
    """The module of a stage, or of the activation, in a backend's package."""
    return importlib.import_module(f"{BACKENDS[backend].package}.{stage}")


def opened_numba(module: ModuleType, moved=np.asarray) -> OpenStage:
    """Functions of Numba kernels, with every array moved first and every output poisoned before it is written."""
    from moeblaze_ref.backends.numba_cuda.runtime import poisoned_outputs

    return OpenStage(module, poisoned_outputs, moved, np.asarray, {})


def opened_raw(module: ModuleType, executor: SimtExecutor, version: str) -> OpenStage:
    """A raw CUDA stage as numpy functions on a given executor."""
    options = {"executor": executor, "version": version}
    return OpenStage(module, nullcontext, executor.from_numpy, executor.to_numpy, options)


@dataclass
class Effort:
    """What a check does until a row fails: it stands for the time, which depends on the machine."""

    rows: int = 0  # of the check, with the one that fails
    threads: int = 0  # CUDA threads that the executor simulates
    files: int = 0  # that it loads, once for each set of constants: it compiles as many if none is compiled yet

    def within(self, most: "Effort") -> bool:
        """Whether no count is larger than the other's."""
        return self.rows <= most.rows and self.threads <= most.threads and self.files <= most.files


@contextmanager
def counted_effort() -> Iterator[Effort]:
    """Count what the executor loads and simulates inside the ``with`` block; its user counts the rows."""
    effort, loaded, load, run = Effort(), set(), SimtExecutor.load, SimtModule._run

    def count_load(self, file, text=None, **constants):
        loaded.add((file, *sorted(constants.items())))
        effort.files = len(loaded)
        return load(self, file, text=text, **constants)

    def count_run(self, kernel, grid, block, *arguments):
        effort.threads += math.prod((*grid, *block))
        return run(self, kernel, grid, block, *arguments)

    with mock.patch.object(SimtExecutor, "load", count_load), mock.patch.object(SimtModule, "_run", count_run):
        yield effort
