"""A model in parts, from the config.json that Hugging Face's transformers reads.

Field names and defaults are those of transformers 5.23; a field without a default there must be in the file.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeblaze_ref.core import checks, records
from moeblaze_ref.plan.attention import Attention, LatentAttention, SinkAttention
from moeblaze_ref.plan.experts import DenseExperts, GroupedExperts, MoEBlock, Router
from moeblaze_ref.plan.fields import Fields
from moeblaze_ref.plan.parts import Embedding, Head, Mlp, Norm, Part, Rotary
from moeblaze_ref.plan.towers import next_token_parameters, vision_parameters

MODELS = Path(__file__).parent / "models"
MOST_LAYERS = 10_000
CHUNKED, FULL, SLIDING = "chunked_attention", "full_attention", "sliding_attention"
NEXT_TOKENS = "modules that predict further tokens (num_nextn_predict_layers)"
VISION = "vision tower (vision_config)"
QUANTIZED = "The file has a quantization_config; counted are the bytes of the recipe, not those of the file's weights."


@dataclass(frozen=True)
class Model:
    """A transformer in parts."""

    name: str
    before: tuple[Part, ...]  #: of the layers
    layers: tuple[tuple[Part, ...], ...]
    after: tuple[Part, ...]
    longest: int  #: sequence that positions are made for
    d: int  #: width of the residual stream
    #: Parameters of what stands beside the language model and is not planned, by its name.
    beside: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()  #: what a reader must know

    @property
    def everywhere(self) -> tuple[Part, ...]:
        """The parts before the layers that each stage of a pipeline has: positions, and what layers know of them."""
        return tuple(part for part in self.before if part.kind == "positions")

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order of the forward."""
        return (*self.before, *(part for layer in self.layers for part in layer), *self.after)

    def in_system(self, system: str, policy: str | None = None) -> "Model":
        """The model after `nn.replace_moe_blocks` with a layer of this system.

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


def _heads(config: Fields, kv_heads: int | None = None) -> tuple[int, int]:
    """Return the number of query heads, and of key and value heads, which divides it; by default all, or as given."""
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise ValueError(
            f"{config.where}: num_key_value_heads is {kv_heads}, but it must divide num_attention_heads, {heads}"
        )
    return heads, kv_heads


def _choice(config: Fields, name: str) -> tuple[int, int]:
    """Experts, and experts per token."""
    E = config.size(name)
    return E, config.size("num_experts_per_tok", at_most=E)


def _layers(config: Fields, at_least: int = 1) -> int:
    """Layers of the model."""
    return config.size("num_hidden_layers", at_least=at_least, at_most=MOST_LAYERS)


def _width(config: Fields, d: int) -> int:
    """Width of a head: stated, or d divided by the heads."""
    return config.size("head_dim", d // config.size("num_attention_heads"))


def _model(config: Fields, name: str, rotary: Part | None, layers: list[tuple[Part, ...]], norm: Norm) -> Model:
    d, vocabulary = norm.width, config.size("vocab_size")
    tied = config.flag("tie_word_embeddings", False)
    head, embedding = Head(d, vocabulary, tied), Embedding(d, vocabulary, tied)
    modules = config.size("num_nextn_predict_layers", 0, at_least=0)
    beside = ((NEXT_TOKENS, next_token_parameters(layers[-1], d, modules)),) if modules else ()
    before = (embedding, rotary) if rotary else (embedding,)
    return Model(name, before, tuple(layers), (norm, head), config.size("max_position_embeddings"), d, beside)


def _mixtral(config: Fields, name: str) -> Model:
    config.only(sliding_window=None, router_jitter_noise=0.0)
    d = config.size("hidden_size")
    width, norm = _width(config, d), Norm(d)
    E, k = _choice(config, "num_local_experts")
    router = Router(d, E, k, renormalize=True)
    experts = GroupedExperts(d, config.size("intermediate_size"), E, k, "float32")
    layer = norm, Attention(d, *_heads(config, 8), width), norm, router, experts
    return _model(config, name, Rotary(width), [layer] * _layers(config), norm)


def _qwen3(config: Fields, name: str) -> Model:
    config.only(decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False)
    d, count = config.size("hidden_size"), _layers(config)
    width, norm = _width(config, d), Norm(d)
    heads, kv_heads = _heads(config)
    norms = Norm(width, heads, name="q_norm"), Norm(width, kv_heads, name="k_norm")
    bias = config.flag("attention_bias", False)
    attention = Attention(d, heads, kv_heads, width, bias, bias, norms)
    E, k = _choice(config, "num_local_experts" if config.has("num_local_experts") else "num_experts")
    router = Router(d, E, k, renormalize=config.flag("norm_topk_prob", False))
    experts = GroupedExperts(d, config.size("moe_intermediate_size"), E, k)
    layer = norm, attention, norm, router, experts
    return _model(config, name, Rotary(width), [layer] * count, norm)


def _olmoe(config: Fields, name: str) -> Model:
    config.only(clip_qkv=None)
    d = config.size("hidden_size")
    width, norm = _width(config, d), Norm(d)
    heads, kv_heads = _heads(config)
    norms = Norm(heads * width, name="q_norm"), Norm(kv_heads * width, name="k_norm")
    bias = config.flag("attention_bias", False)
    attention = Attention(d, heads, kv_heads, width, bias, bias, norms)
    E, k = _choice(config, "num_experts")
    router = Router(d, E, k, renormalize=config.flag("norm_topk_prob", False))
    experts = GroupedExperts(d, config.size("intermediate_size"), E, k)
    layer = norm, attention, norm, router, experts
    return _model(config, name, Rotary(width), [layer] * _layers(config), norm)


def _latent_attention(config: Fields, d: int) -> LatentAttention:
    config.only(attention_bias=False)
    heads, kv_heads = _heads(config)
    if kv_heads != heads:
        raise ValueError(
            f"{config.where}: num_key_value_heads is {kv_heads}, but latent attention has one for each of {heads} heads"
        )
    plain, turned, values = (config.size(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    if values == plain + turned:
        raise ValueError(
            f"{config.where}: v_head_dim is {values}, but only another width than that of the keys, qk_nope_head_dim + "
            "qk_rope_head_dim, is counted"
        )
    return LatentAttention(
        d,
        heads,
        config.size("q_lora_rank") if config.has("q_lora_rank") else None,
        config.size("kv_lora_rank"),
        plain,
        turned,
        values,
    )


def _with_shared_experts(config: Fields, d: int, router: Router) -> tuple[Part, ...]:
    """The parts of an MoE layer whose router multiplies in float32, and whose shared experts are one MLP."""
    h = config.size("moe_intermediate_size")
    experts = GroupedExperts(d, h, router.E, router.k, "float32")
    shared = config.size("n_shared_experts")
    return router, experts, Mlp(d, shared * h, "shared", router_dtype="float32")


def _first_dense(config: Fields, d: int, attention: Part, moe: tuple[Part, ...]) -> list[tuple[Part, ...]]:
    """Layers of which the first ones are dense."""
    norm, mlp = Norm(d), Mlp(d, config.size("intermediate_size"))
    dense = config.size("first_k_dense_replace", 0, at_least=0)
    count = _layers(config, at_least=max(1, dense))
    dense_layer: tuple[Part, ...] = (norm, attention, norm, mlp)
    return [dense_layer] * dense + [(norm, attention, norm, *moe)] * (count - dense)


def _deepseek_v2(config: Fields, name: str) -> Model:
    config.only(mlp_bias=False, norm_topk_prob=False)
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
    rope = config.within_object("rope_parameters")
    turned = int(width * rope.within("partial_rotary_factor", config.within("partial_rotary_factor", 0.5, 1), 1))
    attention = Attention(
        d,
        heads,
        kv_heads,
        width,
        config.flag("attention_bias", False),
        norms=norms if config.flag("use_qk_norm", False) else (),
        partly_turned=True,  # joined even if all columns have positions
    )
    moe = _with_shared_experts(config, d, _sigmoid_router(config, d))
    return _model(config, name, Rotary(turned), _first_dense(config, d, attention, moe), Norm(d))


def _gpt_oss(config: Fields, name: str) -> Model:
    config.only(attention_bias=True)
    d = config.size("hidden_size")
    width, norm = config.size("head_dim", 64), Norm(d, scaled_in_float32=True)
    attention = SinkAttention(d, *_heads(config, 8), width)
    E, k = _choice(config, "num_local_experts")
    router = Router(d, E, k, "softmax of k", bias=True)
    experts = GroupedExperts(d, config.size("intermediate_size"), E, k, clamped=True)
    layer = norm, attention, norm, router, experts
    return _model(config, name, Rotary(width // 2), [layer] * _layers(config), norm)


def _llama4(config: Fields, name: str) -> Model:
    d, count = config.size("hidden_size"), _layers(config)
    width, norm, (heads, kv_heads) = _width(config, d), Norm(d), _heads(config)
    norms = tuple(
        Norm(width, groups, has_weight=False, name=f"{of}_norm") for of, groups in (("q", heads), ("k", kv_heads))
    )
    bias, chunk = config.flag("attention_bias", False), config.size("attention_chunk_size", 8192)

    def attention(turned: bool, kind: str) -> Attention:
        return Attention(
            d,
            heads,
            kv_heads,
            width,
            bias,
            bias,
            norms if turned and config.flag("use_qk_norm", True) else (),
            scales=not turned and config.flag("attn_temperature_tuning", True),
            chunk=chunk if kind == CHUNKED else None,
        )

    (E, k), h = _choice(config, "num_local_experts"), config.size("intermediate_size")
    router = Router(d, E, k, "sigmoid of k")
    moe = router, DenseExperts(d, h, E), Mlp(d, h, "shared", router_dtype="")
    dense = (Mlp(d, config.size("intermediate_size_mlp")),)
    every = config.size("no_rope_layer_interval", 4)
    turned = config.switches("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(count)])
    kinds = config.names("layer_types", LAYER_TYPES["llama4_text"], [CHUNKED if one else FULL for one in turned])
    step = config.size("interleave_moe_layer_step", 1)
    sparse = config.some("moe_layers", count, list(range(step - 1, count, step)))
    layers: list[tuple[Part, ...]] = [
        (norm, attention(bool(turned[layer]), kinds[layer]), norm, *(moe if layer in sparse else dense))
        for layer in range(count)
    ]
    rotary = Rotary(width // 2, as_complex=True) if any(turned) else None
    return _model(config, name, rotary, layers, norm)


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
#: Of models whose layers differ; gpt-oss's two kinds keep the same tensors.
LAYER_TYPES = {"gpt_oss": (SLIDING, FULL), "llama4_text": (CHUNKED, FULL)}


def read(fields: dict[str, Any], name: str, where: str = "") -> Model:
    """A model from the fields of its config.json, which stand ``where``; by default the model's name says it.

    Raises
    ------
    ValueError
        If the model's type is unknown, or a field is missing or is not what it must be.
    """
    outer = Fields(fields, where or name)
    text = _text_of(outer, fields)
    config = Fields(text, where or name)
    config.only(hidden_act="silu", attention_dropout=0.0, output_router_logits=False)
    kind = config.name("model_type", tuple(READERS))
    config.names("layer_types", LAYER_TYPES.get(kind, (FULL,)), [FULL] * _layers(config))
    model = READERS[kind](config, name)
    if outer.has("quantization_config") or config.has("quantization_config"):
        model = replace(model, notes=(QUANTIZED,))
    return _with_tower(model, fields["vision_config"]) if fields.get("vision_config") else model


def _text_of(outer: Fields, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model: of the whole file, or of its part for text."""
    if not outer.has("text_config"):
        return fields
    if not isinstance(fields["text_config"], dict):
        raise ValueError(f"{outer.where}: text_config is {fields['text_config']!r}, but it must be an object")
    outer.name("model_type", ("llama4",))
    tied = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
    return tied | fields["text_config"]


def _with_tower(model: Model, vision: Any) -> Model:
    if not isinstance(vision, dict):
        raise ValueError(f"{model.name}: vision_config is {vision!r}, but it must be an object")
    count = vision_parameters(Fields(vision, f"{model.name}: vision_config"), model.d)
    return replace(model, beside=(*model.beside, (VISION, count)))


def find(config: str) -> Model:
    """The model of a config.json, or of one of those that the package carries, by its name.

    Raises
    ------
    ValueError
        If there is neither such a file nor such a name, or as `read`.
    OSError
        If the file cannot be read.
    """
    path = Path(config)
    if path.is_file():
        return read_file(path)
    if config.lower() in carried():
        return read(fields_of(config.lower()), config.lower())
    if path.is_dir() and (path / "config.json").is_file():
        return read_file(path / "config.json")
    there = bool(config) and path.exists()  # Path("") is the current folder
    if there and path.is_dir():
        raise ValueError(f"{config} is a folder without a config.json")
    if there or path.suffix == ".json" or not config:
        what = "is not a regular file" if there else "does not exist"
        raise ValueError(f"{config!r} {what}; give a config.json, or one of {', '.join(carried())}")
    return read(fields_of(config.lower()), config.lower())


def with_experts(model: Model, experts: str) -> Model:
    """The model with its experts in plain torch, or in a system, with its policy behind a slash.

    Raises
    ------
    ValueError
        As `Model.in_system`.
    """
    if experts == "torch":
        return model
    system, _, policy = experts.partition("/")
    return model.in_system(system, policy or None)


def fields_of(name: str) -> dict[str, Any]:
    """The fields of a carried model's config.json; ValueError if there is no such model."""
    fields: dict[str, Any] = json.loads((MODELS / f"{checks.check_name('model', name, carried())}.json").read_text())
    return fields


def cut(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The fields of the same model with a few layers: the first is dense where the model has dense ones."""
    shorter = fields | {"num_hidden_layers": layers}
    return shorter | ({"first_k_dense_replace": 1} if "first_k_dense_replace" in fields else {})


def carried() -> tuple[str, ...]:
    """The names of the models that the package carries."""
    return tuple(sorted(path.stem for path in MODELS.glob("*.json")))


def read_file(path: Path) -> Model:
    """The same from a file; raises also OSError, and ValueError for what is not JSON."""
    fields = records.check_object(str(path), records.parse(str(path), path.read_bytes()), ())
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return read(fields, name, str(path))
