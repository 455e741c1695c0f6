"""The backends by name: where each one's stages live, whether it runs here, and what it lacks."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from moeblaze_ref.backends.raw_cuda.gemm import file_of
from moeblaze_ref.backends.step_memory import StepMemory
from moeblaze_ref.core import checks
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.structures import IndexArrays
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.simt.cache import SimtUnavailable
from moeblaze_ref.runtime.simt.executor import SimtExecutor

STAGES = ("gating", "dispatch", "expert_up", "expert_down", "combine", "layer", "block_sparse", "capacity")
KERNEL_STAGES = STAGES[:-1]  # a fixed capacity has no kernels: it is what the others do without


@dataclass(frozen=True)
class Status:
    """Availability of a backend on this machine.

    Parameters
    ----------
    available : bool
    detail : str
        The device or program that runs it, or what is missing.
    remedy : str
        What to install; empty if nothing is missing or nothing would help.
    """

    available: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Backend:
    """One implementation of the stages.

    Parameters
    ----------
    name, description : str
    package : str
        Package whose modules are named after the stages.
    stages : tuple of str
        The stages that it implements.
    dtypes : tuple of str
        The dtypes of its floating-point stages, unless a stage has versions with dtypes of their own.
    status : callable
        Looks at the machine and returns a `Status`.
    """

    name: str
    description: str
    package: str
    stages: tuple[str, ...]
    dtypes: tuple[str, ...]
    status: Callable[[], Status]

    def stage(self, name: str) -> ModuleType:
        """The module of one stage.

        Raises
        ------
        ValueError
            If the backend has no such stage.
        """
        checks.check_name(f"stage of backend {self.name}", name, self.stages)
        return importlib.import_module(f"{self.package}.{name}")

    def versions(self, stage: str) -> dict[str | None, tuple[str, ...]]:
        """Return the dtypes of each version of a stage. A stage without versions has one entry, named None."""
        module = self.stage(stage)
        versions = getattr(module, "FORWARD_VERSIONS", getattr(module, "VERSIONS", {None: self.dtypes}))
        return versions | getattr(module, "SUMMED_VERSIONS", {})

    def refusal(self, stage: str, version: str | None) -> str:
        """Why a version does not run here although the backend does, as Hopper's on another GPU; empty if it does."""
        options = _SURROUNDINGS[self.name](version)[-1]
        return refusal(options["executor"], stage, version) if "executor" in options else ""

    def open(self, stage: str, version: str | None = None) -> "OpenStage":
        """The stage as functions of numpy arrays, with every output poisoned before a kernel writes it."""
        return OpenStage(self.stage(stage), *_SURROUNDINGS[self.name](version))


def refusal(executor: Any, stage: str, version: str | None) -> str:
    """Why an executor of raw CUDA does not run a version, by its file's header; empty if it does."""
    folder = "expert_down" if stage == "layer" else stage  # the layer's versions are its projections', and as printed
    try:
        executor.check(file_of(folder, version))
    except ValueError as error:
        return str(error)
    return ""


class OpenStage(SimpleNamespace):
    """The functions of a stage, which take and return numpy arrays, wherever they run.

    Arrays are moved to the backend and back, inside tuples and structures too; anything else
    (names, numbers, what a forward saved for its backward) passes as it is.

    Parameters
    ----------
    module : module or namespace
        Whose public functions these are.
    context : callable
        Makes what each call runs in.
    to_backend, to_numpy : callable
        Move an array.
    options : dict
        Of every call, by name.
    """

    def __init__(self, module: Any, context, to_backend: Callable, to_numpy: Callable, options: dict[str, Any]):
        self._context, self._options = context, options
        self._to_backend, self._to_numpy = to_backend, to_numpy
        self._memory: StepMemory | None = None
        functions = {name: one for name, one in vars(module).items() if isfunction(one) and not name.startswith("_")}
        super().__init__(**{name: partial(self._call, function) for name, function in functions.items()})

    def with_functions(self, module: Any) -> "OpenStage":
        """Open the functions of another module, in the same surroundings and with the same options."""
        return OpenStage(module, self._context, self._to_backend, self._to_numpy, self._options)

    def begin_step(self):
        """Let the arrays of the calls from here on overwrite those of the step before, in the memory where they lay."""
        if self._memory is None:
            self._memory = StepMemory(self._to_backend)
        self._memory.begin_step()

    def to_numpy(self, result: Any) -> Any:
        """Return a result with each array as numpy: what a forward saved for its backward is still the backend's."""
        return _each_array(result, self._to_numpy)

    def _moved(self, array: Any) -> Any:
        if self._memory is not None and isinstance(array, np.ndarray):
            return self._memory.place(array)
        return self._to_backend(array)

    def _call(self, function: Callable, *arguments, **options):
        moved = (_each_array(argument, self._moved) for argument in arguments)
        with self._context():
            result = function(*moved, **options, **self._options)
        return self.to_numpy(result)


def _each_array(value: Any, move: Callable) -> Any:
    """``value`` with every array moved, inside tuples and structures too."""
    if isinstance(value, IndexArrays):
        return value.map(move)
    if isinstance(value, tuple):
        parts = (_each_array(part, move) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return move(value) if isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__") else value


def _as_it_is(value: Any) -> Any:
    return value


def _on_numpy(version):
    return nullcontext, _as_it_is, _as_it_is, {}


def _on_numba(version):
    from moeblaze_ref.backends.numba_cuda.runtime import poisoned_outputs

    return poisoned_outputs, _as_it_is, _as_it_is, {}


def _on_simt(version):
    # In a seeded order a missing barrier shows, which threads in their own order would hide.
    return nullcontext, _as_it_is, _as_it_is, {"executor": SimtExecutor(seed=1), "version": version}


def _on_cuda(version):
    from moeblaze_ref.runtime.cupy import CupyExecutor

    executor = CupyExecutor(poisoned=True)
    return nullcontext, executor.from_numpy, executor.to_numpy, {"executor": executor, "version": version}


# (context of a call, numpy to backend, backend to numpy, options of every call)
_SURROUNDINGS = {"numpy": _on_numpy, "numba": _on_numba, "simt": _on_simt, "cuda": _on_cuda}


def _numpy_status() -> Status:
    return Status(True, f"numpy {np.__version__}")


def _torch_status() -> Status:
    import torch

    where = "CPU and GPU" if torch.cuda.is_available() else "CPU"
    return Status(True, f"torch {torch.__version__} on the {where}")


def _numba_status() -> Status:
    try:
        from moeblaze_ref.backends.numba_cuda.runtime import EXECUTOR, EXECUTOR_REASON
    except ImportError as error:
        return Status(False, f"numba-cuda cannot be imported: {error}", "pip install numba-cuda==0.30.4 'numpy<2.5'")
    except RuntimeError as error:  # numba.cuda was imported before, for the other executor
        return Status(False, str(error))
    kind = "on the GPU" if EXECUTOR == "cuda" else "in Numba's simulator (slow: tiny cases only)"
    return Status(True, f"{kind}; {EXECUTOR_REASON}")


def _simt_status() -> Status:
    try:
        compiled_by = " ".join(build.compiler())
        build.runtime_library()  # the part that every kernel needs: built if need be, and loaded
    except SimtUnavailable as error:
        detail, _, remedy = str(error).partition("; ")
        return Status(False, detail, remedy)
    except build.SimtCompileError as error:
        first = next((line for line in str(error).splitlines() if "error" in line), "no error is named")
        return Status(False, f"{compiled_by} does not compile the executor: {first}", "name another compiler by CXX")
    return Status(True, f"compiled by {compiled_by}")


def _cuda_status() -> Status:
    if cuda_device_count() == 0:
        return Status(False, "no CUDA device, or no NVIDIA driver")
    try:
        import cupy
    except ImportError as error:
        return Status(False, f"CuPy cannot be imported: {error}", "pip install 'moeblaze_ref[gpu]'")
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    capability = f"{properties['major']}.{properties['minor']}"
    return Status(True, f"{properties['name'].decode()}, compute capability {capability}, CuPy {cupy.__version__}")


# Its one stage is a whole layer, ``torch_capacity``, which `check` runs as it runs the other torch layers.
ORACLE = Backend(
    "torch",
    "plain torch, the oracle of gradients",
    "moeblaze_ref.nn.oracle",
    ("capacity",),
    ("float64", "float32"),
    _torch_status,
)

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "numpy",
            "the specification",
            "moeblaze_ref.backends.numpy_ref",
            STAGES,
            ("float64", "float32"),
            _numpy_status,
        ),
        Backend(
            "numba",
            "Numba CUDA kernels",
            "moeblaze_ref.backends.numba_cuda",
            KERNEL_STAGES,
            ("float32",),
            _numba_status,
        ),
        Backend("simt", "raw CUDA on the CPU", "moeblaze_ref.backends.raw_cuda", KERNEL_STAGES, (), _simt_status),
        Backend("cuda", "raw CUDA on a GPU", "moeblaze_ref.backends.raw_cuda", KERNEL_STAGES, (), _cuda_status),
    )
}

CHECKED = (*BACKENDS, ORACLE.name)  # the backends that `moeblaze check` takes
