"""The choice of the bridge between torch tensors and arrays of the stages, by the device of the tensors."""

import functools

import torch

from moeblaze_ref.runtime.torch_bridge import Bridge, CpuBridge


@functools.cache
def bridge_to(device: torch.device) -> Bridge:
    """The bridge of a device.

    Raises
    ------
    RuntimeError
        If the device is a GPU and CuPy is missing.
    """
    if device.type == "cpu":
        return CpuBridge()
    try:
        from moeblaze_ref.runtime.torch_gpu import GpuBridge
    except ImportError as error:
        raise RuntimeError(
            f"x is on {device}, but CuPy, which launches the kernels there, cannot be imported: {error}; "
            f"pip install 'moeblaze_ref[gpu]'"
        ) from error
    return GpuBridge(device)
