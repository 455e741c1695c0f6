"""The stages as raw CUDA kernels, on a GPU or by the SIMT executor."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
