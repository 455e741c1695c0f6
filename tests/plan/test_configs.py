"""What a config.json must be: each fault is named with the file, the field and what is allowed."""

import json
from dataclasses import replace

import pytest
from test_models import kept_by, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from moeblaze_ref.plan import account, configs
from moeblaze_ref.plan.configs import fields_of
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.torch_models import built, kept_storages


def changed(name, **changes):
    return {field: value for field, value in (fields_of(name) | changes).items() if value != "gone"}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mixtral-8x7b", {"hidden_size": "gone"}, "^model: hidden_size is missing$"),
        ("mixtral-8x7b", {"hidden_size": None}, "^model: hidden_size is missing$"),
        (
            "mixtral-8x7b",
            {"hidden_size": 4096.5},
            r"^model: hidden_size is 4096.5 \(float\), but it must be an integer$",
        ),
        ("mixtral-8x7b", {"hidden_size": 0}, "^model: hidden_size is 0, but it must be 1..1000000000$"),
        ("mixtral-8x7b", {"model_type": "gone"}, "^model: model_type is missing$"),
        ("mixtral-8x7b", {"model_type": "llama"}, "model: model_type .*llama"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "^model: num_experts_per_tok is 9, but it must be 1..8$"),
        ("mixtral-8x7b", {"num_key_value_heads": 5}, "model: num_key_value_heads is 5, .*32"),
        ("qwen3-30b-a3b", {"norm_topk_prob": 1}, "^model: norm_topk_prob is 1, but it must be true or false$"),
        ("deepseek-v2-lite", {"topk_method": "group_limited_greedy"}, "model: topk_method .*greedy"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "model: num_key_value_heads is 8, .*128"),
        ("deepseek-v3", {"first_k_dense_replace": 62}, "model: num_hidden_layers is 61, but it must be 62..10000"),
        ("glm-4.5", {"partial_rotary_factor": 1.5}, "model: partial_rotary_factor is 1.5"),
        ("llama-4-scout", {"no_rope_layers": [1, 0]}, "model: no_rope_layers .* a list of 48, each 0 or 1"),
        ("llama-4-scout", {"no_rope_layers": ["a"] * 48}, "model: no_rope_layers .* a list of 48, each 0 or 1"),
        ("llama-4-scout", {"moe_layers": [[1]]}, "model: moe_layers is .* a list of layers, from 0 to 47"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "model: clip_qkv is 8.0, but only None is counted"),
        ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "model: router_jitter_noise is 0.1, but only 0.0 is counted"),
        ("mixtral-8x7b", {"output_router_logits": True}, "model: output_router_logits is True, but only False"),
        ("mixtral-8x7b", {"hidden_size": 10**400}, "model: hidden_size is 1000.*, but it must be 1..1000000000"),
        ("mixtral-8x7b", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but it must be 1..10000"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "model: norm_topk_prob is True, but only False is counted"),
        ("deepseek-v3", {"n_shared_experts": 0}, "model: n_shared_experts is 0, but it must be 1.."),
        ("glm-4.5", {"rope_parameters": 3}, "model: rope_parameters is 3, but it must be an object"),
        ("mixtral-8x7b", {"model_type": "llama"}, "model: model_type is 'llama', but it must be one of mixtral, "),
        ("mixtral-8x7b", {"sliding_window": 4096}, "^model: sliding_window is 4096, but only None is counted$"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, r"^model: mlp_only_layers is \[0\], but only \[\] is counted$"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "model: decoder_sparse_step is 2, but only 1"),
        ("deepseek-v3", {"attention_bias": True}, "model: attention_bias is True, but only False"),
        ("gpt-oss-20b", {"attention_bias": False}, "model: attention_bias is False, but only True"),
        ("olmoe-1b-7b", {"hidden_act": "relu"}, "model: hidden_act is 'relu', but only 'silu'"),
        ("llama-4-scout", {"text_config": 3}, "^model: text_config is 3, but it must be an object$"),
        ("llama-4-scout", {"moe_layers": [48]}, "model: moe_layers .* from 0 to 47"),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention"] * 23 + ["linear_attention"]},
            r"layer_types\[23\] is 'linear",
        ),
        (
            "llama-4-scout",
            {"layer_types": ["mamba"] * 48},
            r"layer_types\[0\] is 'mamba', but it must be one of chunked",
        ),
        ("qwen3-30b-a3b", {"layer_types": ["sliding_attention"] * 48}, "but it must be one of full_attention"),
        ("qwen3-30b-a3b", {"layer_types": ["full_attention"]}, "but it must be a list of 48 names"),
        ("qwen3-30b-a3b", {"num_experts": None}, "num_experts is missing"),
        ("deepseek-v3", {"v_head_dim": 192}, "v_head_dim is 192, but only another width than that of the keys"),
    ],
)
def test_a_field_that_is_wrong_is_named(name, changes, said):
    with pytest.raises(ValueError, match=said):
        configs.read(changed(name, **changes), "model")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object, but it must be one"),
        ("\0", "is not JSON"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said) as found:
        configs.read_file(tmp_path / "config.json")
    assert str(tmp_path / "config.json") in str(found.value)


def test_the_text_part_of_a_config_is_read():
    alone = fields_of("llama-4-scout")
    nested = {"model_type": "llama4", "text_config": alone, "vision_config": {"hidden_size": 1408}}
    found = configs.read(nested, "scout")
    assert replace(found, beside=()) == configs.read(alone, "scout") and len(found.beside) == 1


def test_tied_embeddings_count_once():
    untied, tied = (configs.read(changed("olmoe-1b-7b", tie_word_embeddings=tie), "olmoe") for tie in (False, True))
    assert account.parameters(untied) - account.parameters(tied) == 50_304 * 2048


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b"])
def test_biases_of_attention_are_those_of_torch(name):
    fields = tiny(name) | {"attention_bias": True}
    with built(fields) as theirs:
        count, found = sum(weight.numel() for weight in theirs.parameters()), kept_storages(theirs, 2, 32)
    model = configs.read(fields, name)
    assert account.parameters(model) == count
    assert kept_by(model, Step(2, 32, attention="cpu-flash")) == found


def test_layer_types_say_which_layers_of_llama_4_have_a_mask():
    fields = tiny("llama-4-scout")
    fields |= {"attention_chunk_size": 16, "layer_types": ["full_attention"] * fields["num_hidden_layers"]}
    with built(fields) as theirs:
        found = kept_storages(theirs, 2, 32)
    of_chunks = configs.read({name: value for name, value in fields.items() if name != "layer_types"}, "chunks")
    step = Step(2, 32, attention="cpu-flash")
    assert kept_by(configs.read(fields, "full"), step) == found != kept_by(of_chunks, step)


def test_llama_4_keeps_angles_only_if_a_layer_turns():
    fields = tiny("llama-4-scout")
    fields |= {"no_rope_layers": [0] * fields["num_hidden_layers"]}
    with built(fields) as theirs:
        found = kept_storages(theirs, 2, 32)
    model = configs.read(fields, "no layer turns")
    assert kept_by(model, Step(2, 32, attention="cpu-flash")) == found
    assert not any(part.kind == "positions" for part in model.before)


def test_a_nested_rotary_factor_counts():
    plain = tiny("glm-4.5")
    nested = {name: value for name, value in plain.items() if name != "partial_rotary_factor"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    with built(nested) as theirs:
        found = kept_storages(theirs, 2, 32)
    assert kept_by(configs.read(nested, "glm"), Step(2, 32, attention="cpu-flash")) == found
    assert kept_by(configs.read(plain, "glm"), Step(2, 32, attention="cpu-flash")) != found


def test_missing_fields_have_the_defaults_of_transformers():
    published = {"mixtral-8x7b": ("num_key_value_heads",), "gpt-oss-20b": ("head_dim", "num_key_value_heads")}
    for name, missing in published.items():
        fields = configs.fields_of(name)
        assert configs.read({key: fields[key] for key in fields if key not in missing}, name) == configs.read(
            fields, name
        )
    every_fourth = changed("llama-4-scout", no_rope_layers=[])
    assert configs.read(every_fourth, "scout") == configs.read(configs.fields_of("llama-4-scout"), "scout")


def test_null_is_as_if_the_field_were_missing():
    fields = configs.fields_of("qwen3-30b-a3b") | {
        "mlp_only_layers": None,
        "use_sliding_window": None,
        "text_config": None,
    }
    assert configs.read(fields, "qwen") == configs.read(configs.fields_of("qwen3-30b-a3b"), "qwen")


def test_what_stands_around_the_text_part_counts():
    text = configs.fields_of("llama-4-scout")
    del text["tie_word_embeddings"]
    whole = {"model_type": "llama4", "tie_word_embeddings": True, "text_config": text | {"quantization_config": {}}}
    model = configs.read(whole, "scout")
    untied = configs.read(configs.fields_of("llama-4-scout"), "scout")
    assert account.parameters(untied) - account.parameters(model) == 202_048 * 5120 and model.notes
    with pytest.raises(ValueError, match="scout: model_type is 'x', but it must be one of llama4"):
        configs.read(whole | {"model_type": "x"}, "scout")


def test_the_vision_tower_of_llama_4_has_torchs_parameters():
    from transformers import Llama4Config
    from transformers.models.llama4.modeling_llama4 import Llama4MultiModalProjector, Llama4VisionModel

    config = Llama4Config()
    with FakeTensorMode():
        tower = Llama4VisionModel(config.vision_config), Llama4MultiModalProjector(config)
        count = sum(weight.numel() for module in tower for weight in module.parameters())
    whole = {"model_type": "llama4", "text_config": configs.fields_of("llama-4-scout")}
    found = configs.read(whole | {"vision_config": config.vision_config.to_dict()}, "scout")
    assert found.beside == ((configs.VISION, count),)


def test_a_folder_is_read_by_its_config_and_names_the_model(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(configs.fields_of("olmoe-1b-7b")))
    assert configs.find(str(tmp_path / "mine")).name == "mine"
    (tmp_path / "mixtral-8x7b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert configs.find("mixtral-8x7b") == configs.find("Mixtral-8x7B")
