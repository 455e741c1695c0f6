"""Experts and whole MoE blocks of Hugging Face's transformers, tiny and with random weights."""

import importlib
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moeblaze_ref.core import routers
from moeblaze_ref.nn import hf
from moeblaze_ref.verify.layers.activations import ClampedSwiglu
from moeblaze_ref.verify.layers.adapter import Activation, Adapter, Factory

_MULTIPLES = {"eager": 1, "grouped_mm": 8, "batched_mm": 1}  #: of widths: torch's grouped_mm wants rows of 16 bytes
EXPERTS = {"gate_up_proj": "gate_up: E 2h d", "down_proj": "down: E d h"}
GPT_OSS = {
    "gate_up_proj": "gate_up: E d h2",
    "gate_up_proj_bias": "gate_up_bias: E h2",
    "down_proj": "down: E h d",
    "down_proj_bias": "down_bias: E d",
}
LLAMA4 = {"gate_up_proj": "gate_up: E d 2h", "down_proj": "down: E h d"}
SHARED = {
    "gate_proj.weight": "shared_gate: s d",
    "up_proj.weight": "shared_up: s d",
    "down_proj.weight": "shared_down: d s",
}


class Block(NamedTuple):
    """Where a family's MoE block is, and what its parts are called."""

    module: str  #: of transformers.models
    name: str
    gate: str = "gate"
    experts: dict[str, str] = EXPERTS
    shared: str = ""
    activation: Activation = "swiglu"
    extra: dict[str, str] = {}
    config: str = "Config"


BLOCKS = {
    "mixtral": Block("mixtral", "Mixtral:SparseMoeBlock"),
    "qwen3_moe": Block("qwen3_moe", "Qwen3Moe:SparseMoeBlock"),
    "olmoe": Block("olmoe", "Olmoe:SparseMoeBlock"),
    "deepseek_v3": Block("deepseek_v3", "DeepseekV3:MoE", shared="shared_experts"),
    "glm4_moe": Block("glm4_moe", "Glm4Moe:MoE", shared="shared_experts"),
    "gpt_oss": Block("gpt_oss", "GptOss:MLP", "router", GPT_OSS, activation=ClampedSwiglu()),
    "llama4": Block("llama4", "Llama4Text:Moe", "router", LLAMA4, shared="shared_expert"),
}


def _config(family: str, d: int, h: int, E: int, k: int, implementation: str) -> Any:
    """A configuration of these sizes; groups of experts where the family has them, if E can be halved."""
    prefix = BLOCKS[family].name.partition(":")[0]
    config = _of_family(family, f"{prefix}Config")()
    grouped = family in ("deepseek_v3", "glm4_moe") and E % 2 == 0 and E >= 4 and k <= E // 2
    sizes = {
        "hidden_size": d,
        "num_experts_per_tok": k,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 2 if grouped else 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), E),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), h),
    }
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._experts_implementation = implementation
    return config


def _of_family(family: str, name: str) -> Any:
    module = BLOCKS[family].module
    kind = "configuration" if name.endswith("Config") else "modeling"
    try:
        found = importlib.import_module(f"transformers.models.{module}.{kind}_{module}")
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: pip install transformers") from None
    return getattr(found, name)


class Flat(nn.Module):
    """A block that takes and returns (L, d)."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The output (L, d) for x (L, d)."""
        out = self.block(x[None])
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


def block(
    family: str, implementation: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str
) -> Adapter:
    """Return a family's whole MoE block, its router and shared expert included."""
    about = BLOCKS[family]
    config = _config(family, d, h, E, k, implementation)
    made = _of_family(family, about.name.replace(":", ""))(config).to(device, dtype)
    router = routers.of_config(config)
    gate = f"block.{about.gate}"
    weights = {f"block.experts.{name}": layout for name, layout in about.experts.items()}
    weights |= {f"{gate}.weight": "router: E d"}
    weights |= {f"{gate}.bias": "router_bias: E"} if router.logit_bias else {}
    weights |= {f"{gate}.e_score_correction_bias": "selection_bias: E"} if router.selection_bias else {}
    weights |= {f"block.{about.shared}.{name}": layout for name, layout in SHARED.items()} if about.shared else {}
    shared = h if about.shared else 0
    return Adapter(
        Flat(made), weights, router, about.activation, shared=shared, multiple=_MULTIPLES.get(implementation, 8)
    )


def block_with_ours(
    family: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str, policy: str = "minimal"
) -> Adapter:
    """Return a family's block whose experts are run by our kernels."""
    made = block(family, hf.register(policy), d=d, h=h, E=E, k=k, dtype=dtype, device=device)
    if family == "llama4":  # whose block asks no registry
        hf.use(made.module, policy)
    return made


def experts(
    family: str, implementation: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str
) -> Adapter:
    """Return a family's experts alone, which are called with a routing."""
    about = BLOCKS[family]
    made = _of_family(family, f"{about.name.partition(':')[0]}Experts")(_config(family, d, h, E, k, implementation))
    multiple = _MULTIPLES[implementation]
    return Adapter(made.to(device, dtype), about.experts, activation=about.activation, multiple=multiple)


def factories() -> dict[str, Factory]:
    """Every block and experts module by name; Llama 4's experts run inside its block alone."""
    found: dict[str, Factory] = {"transformers/llama4/block": partial(block, "llama4", "eager")}
    for family in ("mixtral", "deepseek_v3", "gpt_oss"):
        found[f"transformers/{family}/block/moeblaze_ref"] = partial(block_with_ours, family)
    found["transformers/llama4/block/moeblaze_ref"] = partial(block_with_ours, "llama4")
    for family in BLOCKS:
        for implementation in _MULTIPLES if family != "llama4" else ():
            found[f"transformers/{family}/{implementation}"] = partial(experts, family, implementation)
            found[f"transformers/{family}/block/{implementation}"] = partial(block, family, implementation)
    return found
