"""The vocabulary of the project: shapes, activations, save policies and presets.

Symbols follow the MoEBlaze paper (arXiv 2601.05296): L tokens in a step, d model width,
h expert width, E experts, k experts per token, R = L * k routed rows.
"""

from dataclasses import dataclass, replace
from typing import Any

from moeblaze_ref.core import checks

GATED_ACTIVATIONS = ("swiglu", "geglu", "reglu")
UNGATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
ACTIVATIONS = GATED_ACTIVATIONS + UNGATED_ACTIVATIONS
CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss's: of `nn.experts` alone, since both projections go through a function
EXPERT_ACTIVATIONS = (*ACTIVATIONS, CLAMPED_SWIGLU)
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0  # its factor in the sigmoid, and where it clamps
GELU_CUBIC = 0.044715  # of the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415)

# Tensors saved for backward by each policy, besides x, the Dispatch and the gates.
POLICIES = {
    "conventional": "routed inputs and every intermediate",
    "paper": "A, B and Y_swi (MoEBlaze, Algorithm 1)",
    "minimal": "A and B; Y_swi is rebuilt in the backward's epilogue",
    "inputs": "nothing between the GEMMs; A and B are recomputed",
}

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def is_gated(activation: str) -> bool:
    """Return True if ``activation``, one of ``EXPERT_ACTIVATIONS``, has a second projection b = x w2.

    Raises
    ------
    ValueError
        If there is no such activation; the message proposes the nearest name.
    """
    return checks.check_name("activation", activation, EXPERT_ACTIVATIONS) in (*GATED_ACTIVATIONS, CLAMPED_SWIGLU)


def even_counts(rows: int, num_experts: int) -> tuple[int, ...]:
    """Rows of each expert when they spread as evenly as integers allow; the first experts get the rest."""
    share, rest = divmod(rows, num_experts)
    return (share + 1,) * rest + (share,) * (num_experts - rest)


@dataclass(frozen=True)
class MoEConfig:
    """The shape of one MoE layer and of the step that runs through it.

    Parameters
    ----------
    L : int
        Tokens in a step (batch x sequence); 0 is valid.
    d, h : int
        Model width and expert width.
    E, k : int
        Experts, and experts per token (k <= E).
    activation : str
        One of ``ACTIVATIONS``. The gated ones use w1, w2 and w3, the others w1 and w3.
    dtype : str
        Dtype of activations and weights, one of ``ITEMSIZE``.

    Raises
    ------
    ValueError
        If a size is out of range, k > E, R = L * k exceeds 2**31 - 1024, or a name is unknown.
    TypeError
        If a size is not an integer.
    """

    L: int
    d: int
    h: int
    E: int
    k: int
    activation: str = "swiglu"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        checks.check_int("L", self.L, at_least=0)
        for name in ("d", "h", "E", "k"):
            checks.check_int(name, getattr(self, name), at_least=1)
        checks.check_k(self.k, self.E)
        checks.check_routed_rows(self.L, self.k)
        checks.check_name("activation", self.activation, ACTIVATIONS)
        checks.check_name("dtype", self.dtype, ITEMSIZE)

    @property
    def R(self) -> int:
        """Routed rows, L * k."""
        return self.L * self.k

    @property
    def itemsize(self) -> int:
        """Bytes of one element of ``dtype``."""
        return ITEMSIZE[self.dtype]

    @property
    def gated(self) -> bool:
        """True if the layer has a second projection b = x w2."""
        return is_gated(self.activation)

    @property
    def sizes(self) -> dict[str, int]:
        """L, d, h, E and k by name."""
        return {name: getattr(self, name) for name in "LdhEk"}

    def replace(self, **changes: Any) -> "MoEConfig":
        """The same configuration with some fields changed (and checked again)."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Preset:
    """A configuration with a name, and what a reader must know about its numbers."""

    config: MoEConfig
    note: str


# MoEBlaze, Table 1: d, E, k, batch, sequence. h is 4 d.
_TABLE_1 = {
    "conf1": (512, 4, 1, 32, 2048),
    "conf2": (1024, 8, 2, 32, 2048),
    "conf3": (1024, 16, 4, 32, 2048),
    "conf4": (2048, 16, 4, 32, 1024),
    "conf5": (512, 16, 4, 32, 1024),
    "conf6": (1024, 16, 4, 16, 1024),
    "conf7": (2048, 8, 4, 16, 512),
}
PAPER_PRESETS = tuple(_TABLE_1)  # the seven configurations of MoEBlaze's evaluation


def _of_table_1(d: int, E: int, k: int, batch: int, sequence: int) -> Preset:
    config = MoEConfig(L=batch * sequence, d=d, h=4 * d, E=E, k=k)
    return Preset(config, f"MoEBlaze, Table 1: batch {batch} x sequence {sequence:,}")


_MODEL_LAYERS = {  # L, d, h, E, k
    "mixtral": ("one layer of Mixtral-8x7B", (16_384, 4096, 14_336, 8, 2)),
    "qwen3": ("one layer of Qwen3-30B-A3B", (32_768, 2048, 768, 128, 8)),
    "fine-grained": (
        "many narrow experts, the shape where index work and memory traffic dominate",
        (24_576, 1536, 256, 128, 8),
    ),
    "deepseek-v3": ("one layer of DeepSeek-V3, routed experts only", (16_384, 7168, 2048, 256, 8)),
    "olmoe": ("one layer of OLMoE-1B-7B", (32_768, 2048, 1024, 64, 8)),
    "llama4-like": ("one layer of Llama-4-Scout, routed experts only", (16_384, 5120, 8192, 16, 1)),
    "deepseek-v2-lite": ("one layer of DeepSeek-V2-Lite, routed experts only", (32_768, 2048, 1408, 64, 6)),
    "odd": ("widths that are multiples of 8 but of no tile, and an odd L", (100_003, 1032, 1544, 24, 3)),
}
PRESETS = {
    "paper-deepseek": Preset(
        MoEConfig(L=2_000_000, d=6144, h=24_576, E=256, k=4),
        "MoEBlaze section 2, its DeepSeek-scale example; E is not printed there, 256 is ours",
    ),
    **{name: _of_table_1(*row) for name, row in _TABLE_1.items()},
    **{name: Preset(MoEConfig(*sizes), f"{what}; L is ours") for name, (what, sizes) in _MODEL_LAYERS.items()},
}


def preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises
    ------
    ValueError
        If there is none; the message proposes the nearest name.
    """
    return PRESETS[checks.check_name("preset", name, PRESETS)]


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2-like language model of MegaBlocks' evaluation (arXiv 2211.15841, section 6, tables 1 and 2).

    Parameters
    ----------
    d, layers : int
        Model width and number of Transformer layers. The FFN width is 4 d.
    E : int
        Experts of each layer, of which a token uses one; 1 is a dense model.

    Notes
    -----
    `weights` and `flops_per_sequence` are our count; with it every printed digit of both tables comes out.
    """

    d: int
    layers: int
    E: int = 1

    vocabulary = 51_200
    sequence = 1_024

    @property
    def weights(self) -> int:
        """Parameters: embeddings, attention and FFN with biases, norms, routers. Experts 2 to E have no biases."""
        d, one_layer = self.d, 12 * self.d**2 + 13 * self.d
        further_experts = (self.E - 1) * 8 * d**2 + (d * self.E if self.E > 1 else 0)
        embeddings, last_norm = (self.vocabulary + self.sequence) * d, 2 * d
        return embeddings + self.layers * (one_layer + further_experts) + last_norm

    @property
    def flops_per_sequence(self) -> int:
        """FLOPs of a forward and a backward of one sequence: every product 3 times, 2 FLOPs a multiply-add.

        The same for a dense model and for one expert a token; the router is not counted.
        """
        s, d = self.sequence, self.d
        forward = self.layers * (24 * s * d**2 + 4 * s**2 * d) + 2 * s * d * self.vocabulary
        return 3 * forward


_SIZES = {"XS": (512, 6), "Small": (768, 12), "Medium": (1024, 24), "Large": (1536, 24), "XL": (2048, 24)}
MODELS = {
    **{f"transformer-{name}": ModelConfig(*size) for name, size in _SIZES.items()},
    **{f"moe-{name}": ModelConfig(*_SIZES[name], E=64) for name in ("XS", "Small", "Medium")},
}
