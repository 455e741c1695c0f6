"""The layers as torch modules: every system, the oracle, and what calls of a layer need.

Import them from here; ``from moeblaze_ref import MoELayer`` is the short way to the layer. The systems by name are
``SYSTEMS``; `system` fixes options of one.
"""

from moeblaze_ref.nn import hf, oracle, routers
from moeblaze_ref.nn.given_ids import check_given_ids
from moeblaze_ref.nn.launch_plans import (
    clear_launch_plans,
    launch_plan_counts,
    use_launch_plans,
    without_launch_plans,
)
from moeblaze_ref.nn.oracle import OracleMoE
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.systems import SYSTEMS, MoEFactory, system
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.nn.torch_capacity import CapacityMoE, DynamicCapacityMoE
from moeblaze_ref.nn.torch_experts import Experts, experts
from moeblaze_ref.nn.torch_graphs import graphed
from moeblaze_ref.nn.torch_layer import KernelMoE, MoELayer, MoEModule, MoEOutput, keep_routing
from moeblaze_ref.nn.torch_memory_optimized import MemoryOptimizedMoE
from moeblaze_ref.nn.torch_sequential import SequentialMoE
from moeblaze_ref.nn.transformers_models import replace_moe_blocks

__all__ = [
    "SYSTEMS",
    "BlockSparseMoE",
    "CapacityMoE",
    "DynamicCapacityMoE",
    "Experts",
    "KernelMoE",
    "MemoryOptimizedMoE",
    "MoEFactory",
    "MoELayer",
    "MoEModule",
    "MoEOutput",
    "OracleMoE",
    "RoutedExperts",
    "SequentialMoE",
    "check_given_ids",
    "clear_launch_plans",
    "experts",
    "graphed",
    "hf",
    "keep_routing",
    "launch_plan_counts",
    "oracle",
    "replace_moe_blocks",
    "routers",
    "system",
    "use_launch_plans",
    "without_launch_plans",
]
