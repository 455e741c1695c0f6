"""Expert parallelism on torch.distributed: every rank holds some of a layer's experts, and tokens travel to them.

One MoE layer (`layer`) over what ranks send each other (`ranks`), watched so that a rank that is lost ends the run
(`watch`), and timed under placements against the model of `placement.simulate` (`bench`).
"""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
