"""The layers in models of Hugging Face's transformers, each in the place of an MoE block, with its weights."""

from typing import Any

from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.nn import systems
from moeblaze_ref.nn.systems import MoEFactory

FAMILIES = ("mixtral", "olmoe", "qwen3_moe")  #: with our router: a softmax of all logits, then the k largest


class MoEBlock(nn.Module):
    """A layer that returns its output alone, as a block of a transformers model does.

    Parameters
    ----------
    layer : nn.Module
        Of one of ``systems.SYSTEMS``.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The output (B, S, d) for hidden_states (B, S, d)."""
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return systems.run(self.layer, rows).out.view(hidden_states.shape)


def replace_moe_blocks(model: nn.Module, make: MoEFactory) -> None:
    """Put a layer in the place of each MoE block of a model, one block after the other.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of one of ``FAMILIES``, with SwiGLU. Its blocks are replaced; auxiliary losses of their routers are lost.
    make : callable
        Takes d, h, E, k, the activation, ``renormalize``, ``device`` and ``dtype``, such as `system` returns it.

    Raises
    ------
    ValueError
        If the model is of another family, has another activation, or adds noise to what its routers see.
    """
    config: Any = model.config
    checks.check_name("family of models", config.model_type, FAMILIES)
    for name, value in {"hidden_act": "silu", "router_jitter_noise": 0.0}.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name} is {getattr(config, name)!r}, but the layers replace blocks with {value!r} alone")
    for decoder_layer in model.model.layers:  # type: ignore[union-attr]  # of PreTrainedModel
        if hasattr(decoder_layer.mlp, "experts"):
            decoder_layer.mlp = MoEBlock(_layer_of(decoder_layer.mlp, make))


def _layer_of(block: Any, make: MoEFactory) -> nn.Module:
    """Return a layer with the weights of a block: transformers has (E, 2h, d) of both up-projections, and (E, d, h)."""
    gate, up, down = block.gate, block.experts.gate_up_proj, block.experts.down_proj
    (E, d), h = gate.weight.shape, down.shape[2]
    renormalize = getattr(gate, "norm_topk_prob", True)  # Mixtral always does
    options = {"renormalize": renormalize, "device": down.device, "dtype": down.dtype}
    layer = make(d, h, E, gate.top_k, "swiglu", **options)
    weights = {"wg": gate.weight.mT, "w1": up[:, :h].mT, "w2": up[:, h:].mT, "w3": down.mT}
    layer.load_state_dict(weights)
    return layer
