"""Expert parallelism on torch.distributed: every rank holds some of a layer's experts, and tokens travel to them.

One MoE layer (`layer`) over what ranks send each other (`ranks`), with copies of experts (`copies`) and states by the
ids of experts (`state`). With room for a fixed number of rows (`capacity`) the host does not wait, and a step that
needs more runs again (`overflow`). A watch ends the run when a rank is lost (`watch`). Placements are timed (`measure`)
and modelled (`costs`). Ranks are started as processes (`local`) or as threads of one process (`threads`).
"""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
