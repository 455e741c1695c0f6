"""Launch plans: the launches of a step are recorded once, and a C function sends them again.

The launches of a step are the same in every step of the same shapes, dtypes and options: only addresses differ. The
`Recorder` notes the launches, the operations of torch's and the allocations of one call. A `Plan` replays them: each
run of launches is one call of a C function, which writes this step's addresses among the parameters.
"""

from moeblaze_ref.runtime.launch_plan.plan import Plan
from moeblaze_ref.runtime.launch_plan.recorder import NoPlan, Recorder, called, recording, without_overlap

__all__ = ["NoPlan", "Plan", "Recorder", "called", "recording", "without_overlap"]
