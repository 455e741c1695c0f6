"""MoETuner (arXiv 2502.06643): two integer programs, one after the other.

ILP 1 (`clusters`) makes clusters of experts whose loads are alike, layer by layer; ILP 2 (`gpu_assignment`) gives every
cluster a GPU, over all layers. Both are written once, for every solver of `solver`.
"""

from dataclasses import dataclass

import numpy as np

from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.clusters import Clusters, cluster_experts
from moeblaze_ref.placement.gpu_assignment import GpuAssignment, assign_gpus
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.simulate import Cluster
from moeblaze_ref.placement.solver import DEFAULT_SOLVER, TIME_LIMIT
from moeblaze_ref.placement.trace import Profile


@dataclass(frozen=True, eq=False)
class MoETuner:
    """Result of both programs: a placement, and its proven gap."""

    placement: Placement
    clusters: Clusters
    gpus: GpuAssignment

    @property
    def seconds(self) -> float:
        """Seconds of both programs."""
        return self.clusters.seconds + self.gpus.seconds

    @property
    def cut(self) -> bool:
        """True if the time limit ended one of the programs, so that another run may find another placement."""
        return self.clusters.cut or self.gpus.cut

    @property
    def gap(self) -> float:
        """The larger of two: of the fullest cluster's load, see `Clusters.gap`, and of ILP 2's objective."""
        return max(self.clusters.gap, self.gpus.gap)


def moetuner(
    profile: Profile,
    on: Cluster,
    bounds: Bounds | None = None,
    solver: str = DEFAULT_SOLVER,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
) -> MoETuner:
    """MoETuner's two stages: ILP 1, then ILP 2 on its clusters.

    The cluster's bandwidths count, not what a token costs an expert. Each program has half of ``time_limit``, in
    seconds; the other options are as in `cluster_experts`.

    Raises
    ------
    ValueError, TypeError
        As in `cluster_experts` and `assign_gpus`, or if the profile has no R.
    """
    R, G = profile.transitions(), on.num_gpus
    clusters = cluster_experts(profile.P, G, bounds, solver, time_limit / 2, seed)
    member = np.eye(G, dtype=np.int64)[clusters.of_expert]  # (layers, E, G)
    C = member[:-1].swapaxes(1, 2) @ R @ member[1:]  # (layers - 1, G, G)
    assigned = assign_gpus(C, on.cost, member.sum(axis=1), solver, time_limit / 2, seed)
    assignment = np.take_along_axis(assigned.gpus, clusters.of_expert, axis=1)
    return MoETuner(Placement(assignment, G, profile.model), clusters, assigned)
