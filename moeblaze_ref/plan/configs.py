"""A model in parts, from the config.json that Hugging Face's transformers reads.

Field names and defaults are those of transformers 5.23; a field without a default there must be in the file.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeblaze_ref.core import checks
from moeblaze_ref.plan.attention import Attention, LatentAttention, SinkAttention
from moeblaze_ref.plan.experts import DenseExperts, GroupedExperts, MoEBlock, Router
from moeblaze_ref.plan.parts import Embedding, Head, Mlp, Norm, Part, Rotary

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Model:
    """A transformer in parts."""

    name: str
    before: tuple[Part, ...]  #: of the layers
    layers: tuple[tuple[Part, ...], ...]
    after: tuple[Part, ...]
    longest: int  #: sequence that positions are made for
    d: int  #: width of the residual stream

    @property
    def everywhere(self) -> tuple[Part, ...]:
        """The parts before the layers that each stage of a pipeline has: positions, and what layers know of them."""
        return tuple(part for part in self.before if part.kind == "positions")

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order of the forward."""
        return (*self.before, *(part for layer in self.layers for part in layer), *self.after)

    def in_system(self, system: str, policy: str | None = None) -> "Model":
        """The model after `nn.replace_moe_blocks` with a layer of this system, one of ``experts.SYSTEMS``.

        Raises
        ------
        ValueError
            If the system or policy is unknown, or no layer of `nn` takes the place of the model's router and experts.
        """
        return replace(self, layers=tuple(tuple(_in_system(layer, system, policy)) for layer in self.layers))


def _in_system(layer: tuple[Part, ...], system: str, policy: str | None) -> Iterator[Part]:
    """A layer's parts, with a block for its router and the experts that follow."""
    parts = iter(layer)
    for part in parts:
        yield MoEBlock.of(part, next(parts), system, policy) if isinstance(part, Router) else part


class Fields:
    """The fields of a config.json, each checked when it is read.

    Raises
    ------
    ValueError
        If a field is missing or is not what it must be; the message names the file and the field.
    """

    def __init__(self, fields: dict[str, Any], where: str):
        self._fields, self.where = fields, where

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None and default is None:
            raise ValueError(f"{self.where}: {name} is missing")
        return default if value is None else value

    def size(self, name: str, default: int | None = None, at_least: int = 1, at_most: int | None = None) -> int:
        """A count."""
        try:
            return checks.check_int(f"{self.where}: {name}", self._get(name, default), at_least, at_most)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(name) is not None

    def only(self, **counted: Any) -> None:
        """Refuse a field with another value than the one whose tensors are counted; a missing field has that value."""
        for name, value in counted.items():
            if self._fields.get(name, value) != value:
                raise ValueError(f"{self.where}: {name} is {self._fields[name]!r}, but only {value!r} is counted")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be true or false")
        return value

    def name(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of some names."""
        return checks.check_name(f"{self.where}: {name}", self._get(name, default), allowed)

    def entries(self, name: str, count: int, default: list[Any]) -> list[Any]:
        """A list with an entry for each layer."""
        value = self._get(name, default)
        if not isinstance(value, list) or len(value) != count:
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be a list of {count}, one for each layer")
        return value

    def some(self, name: str, count: int, default: list[int]) -> list[int]:
        """The numbers of some layers."""
        value = self._get(name, default)
        if not isinstance(value, list) or not set(value) <= set(range(count)):
            raise ValueError(
                f"{self.where}: {name} is {value!r}, but it must be a list of layers, from 0 to {count - 1}"
            )
        return value

    def within(self, name: str, default: float, at_most: float) -> float:
        """A number from 0 on."""
        return checks.check_within(f"{self.where}: {name}", self._get(name, default), 0, at_most)


def _heads(config: Fields) -> tuple[int, int]:
    """Return the number of query heads, and of key and value heads, which divides it."""
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"{config.where}: num_key_value_heads is {kv_heads}, but it must divide num_attention_heads, {heads}"
        )
    return heads, kv_heads


def _choice(config: Fields, name: str) -> tuple[int, int]:
    """Experts, and experts per token."""
    E = config.size(name)
    return E, config.size("num_experts_per_tok", at_most=E)


def _width(config: Fields, d: int) -> int:
    """Width of a head: stated, or d divided by the heads."""
    return config.size("head_dim", d // config.size("num_attention_heads"))


def _model(config: Fields, name: str, rotary: Part, layers: list[tuple[Part, ...]], norm: Norm) -> Model:
    d, vocabulary = norm.width, config.size("vocab_size")
    tied = config.flag("tie_word_embeddings", False)
    head, embedding = Head(d, vocabulary, tied), Embedding(d, vocabulary, tied)
    return Model(name, (embedding, rotary), tuple(layers), (norm, head), config.size("max_position_embeddings"), d)


def _mixtral(config: Fields, name: str) -> Model:
    config.only(sliding_window=None)
    d = config.size("hidden_size")
    width, norm = _width(config, d), Norm(d)
    E, k = _choice(config, "num_local_experts")
    router = Router(d, E, k, renormalize=True)
    experts = GroupedExperts(d, config.size("intermediate_size"), E, k, "float32")
    layer = norm, Attention(d, *_heads(config), width), norm, router, experts
    return _model(config, name, Rotary(width), [layer] * config.size("num_hidden_layers"), norm)


def _qwen3(config: Fields, name: str) -> Model:
    config.only(decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False)
    d, count = config.size("hidden_size"), config.size("num_hidden_layers")
    width, norm = _width(config, d), Norm(d)
    heads, kv_heads = _heads(config)
    norms = Norm(width, heads, name="q_norm"), Norm(width, kv_heads, name="k_norm")
    attention = Attention(d, heads, kv_heads, width, config.flag("attention_bias", False), norms=norms)
    E, k = _choice(config, "num_experts" if config.has("num_experts") else "num_local_experts")
    router = Router(d, E, k, renormalize=config.flag("norm_topk_prob", False))
    experts = GroupedExperts(d, config.size("moe_intermediate_size"), E, k)
    layer = norm, attention, norm, router, experts
    return _model(config, name, Rotary(width), [layer] * count, norm)


def _olmoe(config: Fields, name: str) -> Model:
    d = config.size("hidden_size")
    width, norm = _width(config, d), Norm(d)
    heads, kv_heads = _heads(config)
    norms = Norm(heads * width, name="q_norm"), Norm(kv_heads * width, name="k_norm")
    attention = Attention(d, heads, kv_heads, width, config.flag("attention_bias", False), norms=norms)
    E, k = _choice(config, "num_experts")
    router = Router(d, E, k, renormalize=config.flag("norm_topk_prob", False))
    experts = GroupedExperts(d, config.size("intermediate_size"), E, k)
    layer = norm, attention, norm, router, experts
    return _model(config, name, Rotary(width), [layer] * config.size("num_hidden_layers"), norm)


def _latent_attention(config: Fields, d: int) -> LatentAttention:
    config.only(attention_bias=False)
    heads, kv_heads = _heads(config)
    if kv_heads != heads:
        raise ValueError(
            f"{config.where}: num_key_value_heads is {kv_heads}, but latent attention has one for each of {heads} heads"
        )
    return LatentAttention(
        d,
        heads,
        config.size("q_lora_rank") if config.has("q_lora_rank") else None,
        config.size("kv_lora_rank"),
        config.size("qk_nope_head_dim"),
        config.size("qk_rope_head_dim"),
        config.size("v_head_dim"),
    )


def _with_shared_experts(config: Fields, d: int, router: Router) -> tuple[Part, ...]:
    """The parts of an MoE layer whose router multiplies in float32, and whose shared experts are one MLP."""
    h = config.size("moe_intermediate_size")
    experts = GroupedExperts(d, h, router.E, router.k, "float32")
    shared = config.size("n_shared_experts", 0, at_least=0)
    return (router, experts, *((Mlp(d, shared * h, "shared", router_dtype="float32"),) if shared else ()))


def _first_dense(config: Fields, d: int, attention: Part, moe: tuple[Part, ...]) -> list[tuple[Part, ...]]:
    """Layers of which the first ones are dense."""
    norm, mlp = Norm(d), Mlp(d, config.size("intermediate_size"))
    dense = config.size("first_k_dense_replace", 0, at_least=0)
    count = config.size("num_hidden_layers", at_least=dense)
    dense_layer: tuple[Part, ...] = (norm, attention, norm, mlp)
    return [dense_layer] * dense + [(norm, attention, norm, *moe)] * (count - dense)


def _deepseek_v2(config: Fields, name: str) -> Model:
    config.only(mlp_bias=False)
    d = config.size("hidden_size")
    config.name("topk_method", ("greedy",), "greedy")
    E, k = _choice(config, "n_routed_experts")
    router = Router(d, E, k, renormalize=config.flag("norm_topk_prob", False), in_float32=True)
    moe = _with_shared_experts(config, d, router)
    rotary = Rotary(config.size("qk_rope_head_dim") // 2, as_complex=True)
    return _model(config, name, rotary, _first_dense(config, d, _latent_attention(config, d), moe), Norm(d))


def _deepseek_v3(config: Fields, name: str) -> Model:
    d = config.size("hidden_size")
    moe = _with_shared_experts(config, d, _sigmoid_router(config, d))
    rotary = Rotary(config.size("qk_rope_head_dim"))
    return _model(config, name, rotary, _first_dense(config, d, _latent_attention(config, d), moe), Norm(d))


def _sigmoid_router(config: Fields, d: int) -> Router:
    E, k = _choice(config, "n_routed_experts")
    return Router(d, E, k, "sigmoid", config.flag("norm_topk_prob", True), in_float32=True)


def _glm4(config: Fields, name: str) -> Model:
    d = config.size("hidden_size")
    width, (heads, kv_heads) = _width(config, d), _heads(config)
    norms = Norm(width, heads, name="q_norm"), Norm(width, kv_heads, name="k_norm")
    turned = int(width * config.within("partial_rotary_factor", 0.5, at_most=1))
    attention = Attention(
        d,
        heads,
        kv_heads,
        width,
        config.flag("attention_bias", False),
        norms=norms if config.flag("use_qk_norm", False) else (),
        partly_turned=turned < width,
    )
    moe = _with_shared_experts(config, d, _sigmoid_router(config, d))
    return _model(config, name, Rotary(turned), _first_dense(config, d, attention, moe), Norm(d))


def _gpt_oss(config: Fields, name: str) -> Model:
    config.only(attention_bias=True)
    d = config.size("hidden_size")
    width, norm = _width(config, d), Norm(d, scaled_in_float32=True)
    attention = SinkAttention(d, *_heads(config), width)
    E, k = _choice(config, "num_local_experts")
    router = Router(d, E, k, "softmax of k", bias=True)
    experts = GroupedExperts(d, config.size("intermediate_size"), E, k, clamped=True)
    layer = norm, attention, norm, router, experts
    return _model(config, name, Rotary(width // 2), [layer] * config.size("num_hidden_layers"), norm)


def _llama4(config: Fields, name: str) -> Model:
    d, count = config.size("hidden_size"), config.size("num_hidden_layers")
    width, norm, (heads, kv_heads) = _width(config, d), Norm(d), _heads(config)
    norms = tuple(
        Norm(width, groups, has_weight=False, name=f"{of}_norm") for of, groups in (("q", heads), ("k", kv_heads))
    )
    bias, chunk = config.flag("attention_bias", False), config.size("attention_chunk_size", 8192)

    def attention(turned: bool) -> Attention:
        return Attention(
            d,
            heads,
            kv_heads,
            width,
            bias,
            bias,
            norms if turned and config.flag("use_qk_norm", True) else (),
            scales=not turned and config.flag("attn_temperature_tuning", True),
            chunk=chunk if turned else None,
        )

    (E, k), h = _choice(config, "num_local_experts"), config.size("intermediate_size")
    router = Router(d, E, k, "sigmoid of k")
    moe = router, DenseExperts(d, h, E), Mlp(d, h, "shared", router_dtype="")
    dense = (Mlp(d, config.size("intermediate_size_mlp")),)
    every = config.size("no_rope_layer_interval", 4)
    turned = config.entries("no_rope_layers", count, [int((layer + 1) % every != 0) for layer in range(count)])
    step = config.size("interleave_moe_layer_step", 1)
    sparse = config.some("moe_layers", count, list(range(step - 1, count, step)))
    layers: list[tuple[Part, ...]] = [
        (norm, attention(bool(turned[layer])), norm, *(moe if layer in sparse else dense)) for layer in range(count)
    ]
    return _model(config, name, Rotary(width // 2, as_complex=True), layers, norm)


READERS: dict[str, Callable[[Fields, str], Model]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
}


def read(fields: dict[str, Any], name: str) -> Model:
    """A model from the fields of its config.json.

    Raises
    ------
    ValueError
        If the model's type is unknown, or a field is missing or is not what it must be.
    """
    text = fields.get("text_config", fields)
    if not isinstance(text, dict):
        raise ValueError(f"{name}: text_config is {text!r}, but it must be an object")
    config = Fields(text, name)
    config.only(hidden_act="silu", attention_dropout=0.0)
    return READERS[config.name("model_type", tuple(READERS))](config, name)


def read_file(path: Path) -> Model:
    """The same from a file; raises also OSError, and ValueError for what is no JSON."""
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, but a config.json is an object")
    return read(fields, path.stem)
