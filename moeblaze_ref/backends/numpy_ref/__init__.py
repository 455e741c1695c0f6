"""The specification: the MoE layer, stage by stage, in numpy alone.

Everything works in float64 or float32 and keeps the dtype that it is given; one call takes
one dtype. All of it is deterministic: sums run in a fixed order.
"""

from moeblaze_ref.core.contract import Arrays
from moeblaze_ref.core.on_demand import import_on_demand

DTYPES = ("float64", "float32")
ARRAYS = Arrays("ndarray", DTYPES)

import_on_demand(__name__)
