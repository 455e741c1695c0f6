"""transformers' own routers and MoE blocks, each of a tiny configuration with random weights."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from moeblaze_ref.core.routers import ROUTERS

D, E, K = 12, 16, 4
_SIZES = {"hidden_size": D, "num_experts_per_tok": K, "num_attention_heads": 1}


@dataclass(frozen=True)
class Theirs:
    """Where transformers has a family's router, and the tiny configuration of it."""

    folder: str
    prefix: str  # of its classes
    router: str
    block: str
    config: str
    sizes: dict[str, Any]

    def made(self, kind: str, **changes: Any) -> torch.nn.Module:
        """Its ``router`` or ``block`` with random weights, in float32."""
        modeling = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        return randomized(getattr(modeling, self.prefix + getattr(self, kind))(self.configuration(**changes)))

    def configuration(self, **changes: Any) -> Any:
        """The tiny configuration."""
        module = importlib.import_module(f"transformers.models.{self.folder}.configuration_{self.folder}")
        return getattr(module, self.prefix + self.config)(**{**_SIZES, **self.sizes, **changes})


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """The module, with each parameter and buffer drawn anew: their own are zeros, or memory as it was."""
    generator = torch.Generator().manual_seed(3)
    for tensor in (*module.parameters(), *module.buffers()):
        scale = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
        tensor.data = torch.randn(tensor.shape, generator=generator) * scale
    return module


_OF_DEEPSEEK = {"n_routed_experts": E, "n_shared_experts": 2, "moe_intermediate_size": 8}
_GROUPED = {"n_group": 4, "topk_group": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_DEEPSEEK_V3 = ("deepseek_v3", "DeepseekV3", "TopkRouter", "MoE", "Config")
THEIRS = {
    "mixtral": Theirs(
        "mixtral",
        "Mixtral",
        "TopKRouter",
        "SparseMoeBlock",
        "Config",
        {"num_local_experts": E, "intermediate_size": 8},
    ),
    "qwen3_moe": Theirs(
        "qwen3_moe",
        "Qwen3Moe",
        "TopKRouter",
        "SparseMoeBlock",
        "Config",
        {"num_experts": E, "moe_intermediate_size": 8, "norm_topk_prob": True},
    ),
    "olmoe": Theirs(
        "olmoe", "Olmoe", "TopKRouter", "SparseMoeBlock", "Config", {"num_experts": E, "intermediate_size": 8}
    ),
    "gpt_oss": Theirs("gpt_oss", "GptOss", "TopKRouter", "MLP", "Config", {"num_local_experts": E}),
    "deepseek_v2": Theirs(
        "deepseek_v2",
        "DeepseekV2",
        "TopkRouter",
        "Moe",
        "Config",
        {**_OF_DEEPSEEK, **_GROUPED, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": Theirs(*_DEEPSEEK_V3, {**_OF_DEEPSEEK, **_GROUPED}),
    "glm4_moe": Theirs(
        "glm4_moe",
        "Glm4Moe",
        "TopkRouter",
        "MoE",
        "Config",
        {**_OF_DEEPSEEK, **_ONE_GROUP, "routed_scaling_factor": 2.5},
    ),
    "kimi_k2": Theirs(*_DEEPSEEK_V3, {**_OF_DEEPSEEK, **_ONE_GROUP, "routed_scaling_factor": 2.827}),
    "lfm2_moe": Theirs(
        "lfm2_moe",
        "Lfm2Moe",
        "TopKRouter",
        "SparseMoeBlock",
        "Config",
        {"num_experts": E, "moe_intermediate_size": 8},
    ),
    "llama4": Theirs(
        "llama4", "Llama4", "Router", "TextMoe", "TextConfig", {"num_local_experts": E, "intermediate_size": 8}
    ),
}
# The routers of those configurations: four experts a group, not 32.
ROUTERS_OF = {
    family: replace(router, groups=4, groups_kept=2) if router.groups > 1 else router
    for family, router in ROUTERS.items()
}
