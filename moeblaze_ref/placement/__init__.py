"""MoETuner (arXiv 2502.06643): which GPU holds which expert, by integer programming, beside its baselines.

Profile a trace (`trace`), group experts into clusters and give clusters to GPUs (`ilp`), or use another method
(`baselines`) or both at once (`joint`), and model what a step takes then (`simulate`). numpy and OR-Tools alone: no GPU
is asked for.
"""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
