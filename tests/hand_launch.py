"""A pretended CuPy: its kernels are the same files, run by the SIMT executor; arguments must be as a GPU needs them."""

import types

import numpy as np

from moeblaze_ref.runtime.poison import poison
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import KernelSource


class OnDevice(np.ndarray):
    """An array of the pretended GPU; a host array is none."""


class RawModule:
    """A compiled text: options give the constants and the folder of the headers."""

    def __init__(self, code, options=(), backend="nvcc"):
        assert backend == "nvrtc" and "-std=c++17" in options
        folders = [option[2:] for option in options if option.startswith("-I")]
        assert folders == [str(folder) for folder in KernelSource.read("combine/1_gather.cu", {}).include_dirs]
        defined = dict(option[2:].split("=") for option in options if option.startswith("-D"))
        self._module = SimtExecutor().load("combine/1_gather.cu", text=code, **defined)

    def get_function(self, name):
        """The kernel as a function of (grid, block, arguments), all of them by position."""
        parameters = self._module.source.kernels[name]

        def launch(grid, block, arguments):
            for parameter, value in zip(parameters, arguments, strict=True):
                kind = OnDevice if parameter.pointer else np.generic
                assert isinstance(value, kind), f"{parameter.name} is a {type(value)}, not {kind}"
                assert value.dtype == parameter.dtype, f"{parameter.name} is {value.dtype}, not {parameter.dtype}"
            names = (parameter.name for parameter in parameters)
            self._module.launch(name, grid, block, **dict(zip(names, arguments, strict=True)))

        return launch


def pretended_cupy():
    """A module to import as cupy."""
    properties = {"major": 9, "minor": 0, "name": b"a pretended GPU"}
    runtime = types.SimpleNamespace(getDeviceProperties=lambda device: properties)
    cupy = types.ModuleType("cupy")
    cupy.__version__ = "0"
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    cupy.RawModule = RawModule
    cupy.asarray = lambda array: np.array(array).view(OnDevice)
    cupy.empty = lambda shape, dtype: poison(np.empty(shape, dtype)).view(OnDevice)
    cupy.asnumpy = np.array
    return cupy
