"""What a config.json must be: each fault is named with the file, the field and what is allowed."""

from dataclasses import replace

import pytest

from moeblaze_ref.plan import account, configs
from moeblaze_ref.plan.configs import fields_of


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
        ("mixtral-8x7b", {"hidden_size": 0}, "^model: hidden_size is 0, but it must be >= 1$"),
        ("mixtral-8x7b", {"model_type": "gone"}, "^model: model_type is missing$"),
        ("mixtral-8x7b", {"model_type": "llama"}, "model: model_type .*llama"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "^model: num_experts_per_tok is 9, but it must be 1..8$"),
        ("mixtral-8x7b", {"num_key_value_heads": 5}, "model: num_key_value_heads is 5, .*32"),
        ("qwen3-30b-a3b", {"norm_topk_prob": 1}, "^model: norm_topk_prob is 1, but it must be true or false$"),
        ("deepseek-v2-lite", {"topk_method": "group_limited_greedy"}, "model: topk_method .*greedy"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "model: num_key_value_heads is 8, .*128"),
        ("deepseek-v3", {"first_k_dense_replace": 62}, "model: num_hidden_layers is 61, but it must be >= 62"),
        ("glm-4.5", {"partial_rotary_factor": 1.5}, "model: partial_rotary_factor is 1.5"),
        ("llama-4-scout", {"no_rope_layers": [1, 0]}, "model: no_rope_layers .* a list of 48, one for each layer"),
        ("mixtral-8x7b", {"sliding_window": 4096}, "^model: sliding_window is 4096, but only None is counted$"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, r"^model: mlp_only_layers is \[0\], but only \[\] is counted$"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "model: decoder_sparse_step is 2, but only 1"),
        ("deepseek-v3", {"attention_bias": True}, "model: attention_bias is True, but only False"),
        ("gpt-oss-20b", {"attention_bias": False}, "model: attention_bias is False, but only True"),
        ("olmoe-1b-7b", {"hidden_act": "relu"}, "model: hidden_act is 'relu', but only 'silu'"),
        ("llama-4-scout", {"text_config": 3}, "^model: text_config is 3, but it must be an object$"),
        ("llama-4-scout", {"moe_layers": [48]}, "model: moe_layers .* from 0 to 47"),
    ],
)
def test_a_field_that_is_wrong_is_named(name, changes, said):
    with pytest.raises(ValueError, match=said):
        configs.read(changed(name, **changes), "model")


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is no JSON"), ("[1]", "holds list, but a config.json is an object"), ("\0", "is no JSON")]
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
