"""The backends by name: where each one's stages live, whether it runs here, and what it lacks."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from moeblaze_ref import doors
from moeblaze_ref.devices import cuda_device_count

STAGES = ("gating", "dispatch", "expert_up", "expert_down", "combine", "layer")


@dataclass(frozen=True)
class Status:
    """Whether a backend runs on this machine.

    Parameters
    ----------
    available : bool
    detail : str
        What runs it, or what is missing.
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
        Those that it implements.
    status : callable
        Looks at the machine and returns a `Status`.
    """

    name: str
    description: str
    package: str
    stages: tuple[str, ...]
    status: Callable[[], Status]

    def stage(self, name: str) -> ModuleType:
        """The module of one stage.

        Raises
        ------
        ValueError
            If the backend has no such stage.
        """
        doors.check_name(f"stage of backend {self.name}", name, self.stages)
        return importlib.import_module(f"{self.package}.{name}")

    def executor(self) -> Any:
        """What raw CUDA stages run on, with poisoned outputs; None for the other backends."""
        if self.name == "simt":
            from moeblaze_ref.raw_cuda.runtime.simt import SimtExecutor

            return SimtExecutor()
        if self.name == "cuda":
            from moeblaze_ref.raw_cuda.runtime.cupy import CupyExecutor

            return CupyExecutor(poisoned=True)
        return None


def _numpy_status() -> Status:
    import numpy

    return Status(True, f"numpy {numpy.__version__}")


def _torch_status() -> Status:
    import torch

    where = "CPU and GPU" if torch.cuda.is_available() else "CPU"
    return Status(True, f"torch {torch.__version__} on the {where}")


def _numba_status() -> Status:
    try:
        from moeblaze_ref.numba_cuda.runtime import EXECUTOR, EXECUTOR_REASON
    except ImportError as error:
        return Status(False, f"numba-cuda cannot be imported: {error}", "pip install numba-cuda==0.30.4 'numpy<2.5'")
    kind = "on the GPU" if EXECUTOR == "cuda" else "in Numba's simulator (slow: tiny cases only)"
    return Status(True, f"{kind}; {EXECUTOR_REASON}")


def _simt_status() -> Status:
    from moeblaze_ref.simt import build

    try:
        build.cuda_include_dirs()
        return Status(True, f"compiled by {build.compiler()}, with CUDA's own headers")
    except build.SimtUnavailable as error:
        detail, _, remedy = str(error).partition("; ")
        return Status(False, detail, remedy)


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


JUDGE = Backend("torch", "plain torch, the judge of gradients", "moeblaze_ref.oracle", (), _torch_status)

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("numpy", "the specification", "moeblaze_ref.numpy_ref", STAGES, _numpy_status),
        Backend("numba", "Numba CUDA kernels", "moeblaze_ref.numba_cuda", ("dispatch",), _numba_status),
        Backend("simt", "raw CUDA on the CPU", "moeblaze_ref.raw_cuda", ("dispatch",), _simt_status),
        Backend("cuda", "raw CUDA on a GPU", "moeblaze_ref.raw_cuda", ("dispatch",), _cuda_status),
    )
}
