"""The SIMT executor's C++ side: lets g++ compile a .cu file and the CPU run it."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
