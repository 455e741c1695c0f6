"""The stages three times over, numpy, Numba and raw CUDA, and the registry that finds them by name."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
