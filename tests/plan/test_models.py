"""Whole models: what is counted is what transformers and autograd have, storage by storage."""

import pytest
from fake_models import fake

from moeblaze_ref.plan import account, configs
from moeblaze_ref.plan.configs import fields_of
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.torch_models import built, kept_storages

NAMES = sorted(path.stem for path in configs.MODELS.glob("*.json"))
PARAMETERS = {  # published, or as transformers counts them
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-4-scout": 107_769_861_120,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5": 352_797_814_784,
}
# One of each family; others differ in numbers alone.
FAMILIES = {
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm-4.5",
    "gpt-oss-20b",
    "llama-4-scout",
    "mixtral-8x7b",
    "olmoe-1b-7b",
    "qwen3-30b-a3b",
}


def cut(name, layers=4):
    return configs.cut(fields_of(name), layers)


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 112,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 200,
}


def tiny(name):
    """A model of the family that fits into memory, with other sizes in the same fields."""
    fields = cut(name, 3)
    sizes = TINY | ({"num_key_value_heads": 4} if "kv_lora_rank" in fields else {})  # latent: as many as of queries
    return fields | {field: size for field, size in sizes.items() if fields.get(field)}


def kept_by(model, step):
    return sorted(tensor.bytes for _, tensor in account.kept(model, step))


def test_every_model_has_a_number_of_parameters_and_every_family_is_there():
    assert set(NAMES) == set(PARAMETERS)
    assert {fields_of(name)["model_type"] for name in NAMES} == {fields_of(name)["model_type"] for name in FAMILIES}


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model_keeps_what_autograd_keeps(name):
    model, step = configs.read(fields_of(name), name), Step(1, 4096, attention="cpu-flash")
    with fake(fields_of(name)) as theirs:
        assert account.parameters(model) == PARAMETERS[name] == sum(weight.numel() for weight in theirs.parameters())
        found = kept_storages(theirs, 1, 4096)
    assert sum(account.kept_bytes(model, step).values()) == sum(found)
    assert kept_by(model, step) == found


def test_qwen3_keeps_the_bytes_that_are_known():
    model = configs.read(fields_of("qwen3-30b-a3b"), "qwen3-30b-a3b")
    assert sum(account.kept_bytes(model, Step(1, 4096, attention="cpu-flash")).values()) == 40_825_626_636


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_batch_keeps_what_autograd_keeps(name):
    model = configs.read(cut(name), name)
    with fake(cut(name)) as theirs:
        assert kept_by(model, Step(3, 256, attention="cpu-flash")) == kept_storages(theirs, 3, 256)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_with_memory_keeps_what_one_without_keeps(name):
    with built(tiny(name)) as theirs:
        found = kept_storages(theirs, 2, 32)
    with fake(tiny(name)) as theirs:
        assert kept_storages(theirs, 2, 32) == found
    assert kept_by(configs.read(tiny(name), name), Step(2, 32, attention="cpu-flash")) == found


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_in_float32_keeps_what_autograd_keeps(name):
    with built(tiny(name)) as theirs:
        found = kept_storages(theirs.float(), 2, 32)
    assert kept_by(configs.read(tiny(name), name), Step(2, 32, "float32", "cpu-flash")) == found


def rows():
    """Each row of each part of each family: the family, the part's class, and the row's name."""
    for name in sorted(FAMILIES):
        parts = {type(part): part for part in configs.read(cut(name), name).parts}
        yield from (
            (name, kind, row.name)
            for kind, part in parts.items()
            for row in part.kept(Step(1, 64, attention="cpu-flash"))
        )


def test_a_formula_without_one_of_its_rows_is_seen(monkeypatch):
    step, found = Step(1, 64, attention="cpu-flash"), {}
    for name in FAMILIES:
        with fake(cut(name)) as theirs:
            found[name] = kept_storages(theirs, 1, 64)
    tried = list(rows())
    assert len(tried) > 200
    for name, kind, row in tried:
        with monkeypatch.context() as patch:
            whole = kind.kept
            patch.setattr(
                kind,
                "kept",
                lambda part, step, whole=whole, row=row: tuple(t for t in whole(part, step) if t.name != row),
            )
            assert kept_by(configs.read(cut(name), name), step) != found[name], (name, kind, row)
