"""Which devices this machine has, asked of the CUDA driver itself.

Importing this module costs nothing: no CUDA package, no torch.
"""

import ctypes
import functools


@functools.cache
def cuda_device_count() -> int:
    """Number of CUDA devices that this process may use; 0 without a driver.

    ``CUDA_VISIBLE_DEVICES`` is honoured, since the driver itself counts. The first answer
    is kept: the driver does not look again either.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
