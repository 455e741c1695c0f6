"""The stages as Numba CUDA kernels, without warp operations and without atomics.

Without a GPU the same kernels run on Numba's simulator, as Python: exact, and slow enough that inputs should be
tiny. ``EXECUTOR`` says which.
"""

from moeblaze_ref.backends.numba_cuda.runtime import EXECUTOR, EXECUTOR_REASON
from moeblaze_ref.core.on_demand import import_on_demand

__all__ = ["EXECUTOR", "EXECUTOR_REASON"]

import_on_demand(__name__)
