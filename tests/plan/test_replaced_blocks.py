"""Whole models with our layers in the place of their MoE blocks: what they compute, and what they keep."""

import pytest
import torch
from fake_models import fake
from test_models import PARAMETERS, cut, kept_by, tiny

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.nn import replace_moe_blocks, system
from moeblaze_ref.nn.transformers_models import FAMILIES
from moeblaze_ref.plan import account, configs, experts
from moeblaze_ref.plan.configs import fields_of
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.torch_models import built, kept_storages

VARIANTS = [("moeblaze", policy) for policy in POLICIES]
VARIANTS += [(name, None) for name in experts.SYSTEMS if name != "moeblaze"]
of_each_variant = pytest.mark.parametrize(("name", "policy"), VARIANTS)
MODELS = {"mixtral": "mixtral-8x7b", "olmoe": "olmoe-1b-7b", "qwen3_moe": "qwen3-30b-a3b"}
QWEN3 = MODELS["qwen3_moe"]


def put_into(model, name, policy):
    replace_moe_blocks(model, system(name, **({} if policy is None else {"policy": policy})))
    return model


def small(name):
    """Fields of Qwen3; for block-sparse systems whole blocks, and all experts for each token: all routings are even."""
    blocks = {"moe_intermediate_size": 128, "num_experts_per_tok": 8}
    return tiny(QWEN3) | ({} if name == "moeblaze" else blocks)


def test_each_family_has_a_model():
    assert MODELS.keys() == {*FAMILIES}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_with_the_layer_is_the_same_function(family):
    ids = torch.arange(40).view(2, 20)
    with built(tiny(MODELS[family])) as model:
        expected = model.float()(input_ids=ids).logits
        found = put_into(model, "moeblaze", "minimal")(input_ids=ids).logits
        assert (found - expected).norm() < 1e-5 * expected.norm()
        model.model.layers[0].mlp.layer.w3.data.mul_(1.01)
        assert (model(input_ids=ids).logits - found).norm() > 1e-4 * expected.norm()


@of_each_variant
def test_a_model_with_memory_keeps_what_one_without_keeps_and_what_is_counted(name, policy):
    fields = small(name)
    with built(fields) as model:
        found = kept_storages(put_into(model, name, policy), 2, 32)
    with fake(fields) as model:
        assert kept_storages(put_into(model, name, policy), 2, 32) == found
    assert kept_by(configs.read(fields, QWEN3).in_system(name, policy), Step(2, 32, attention="cpu-flash")) == found


@pytest.mark.parametrize("family", MODELS)
def test_a_whole_model_has_the_parameters_that_it_had(family):
    model = configs.read(fields_of(MODELS[family]), family).in_system("moeblaze", "minimal")
    assert account.parameters(model) == PARAMETERS[MODELS[family]]


# Two layers of Qwen3-30B-A3B, 8,192 tokens: transformers' own experts, then ours.
LOGITS = 4_978_638_848
KEPT = {
    ("moeblaze", "conventional"): 8_294_794_260,
    ("moeblaze", "paper"): 7_019_725_844,
    ("moeblaze", "minimal"): 6_818_399_252,
    ("moeblaze", "inputs"): 6_415_746_068,
    ("megablocks", None): 8_093_551_652,
    ("megablocks_memory_optimized", None): 7_900_090_396,
}


def two_layers():
    return configs.read(cut(QWEN3, 2), QWEN3)


def test_two_layers_of_qwen3_keep_what_is_known():
    with fake(cut(QWEN3, 2)) as model:
        found = kept_storages(model, 1, 8192)
    assert kept_by(two_layers(), Step(1, 8192, attention="cpu-flash")) == found
    assert sum(found) == 8_306_131_980 and found[-1] == 8192 * 151_936 * 4 == LOGITS


@of_each_variant
def test_two_layers_of_qwen3_with_ours_keep_what_is_counted(name, policy):
    with fake(cut(QWEN3, 2)) as model:
        found = kept_storages(put_into(model, name, policy), 1, 8192)
    assert kept_by(two_layers().in_system(name, policy), Step(1, 8192, attention="cpu-flash")) == found
    assert sum(found) == KEPT[name, policy] and found[-1] == LOGITS


@of_each_variant
def test_a_formula_without_one_of_its_rows_is_seen(name, policy, monkeypatch):
    step, model = Step(1, 64, attention="cpu-flash"), two_layers().in_system(name, policy)
    with fake(cut(QWEN3, 2)) as theirs:
        found = kept_storages(put_into(theirs, name, policy), 1, 64)
    assert kept_by(model, step) == found
    (block,) = {part for part in model.parts if isinstance(part, experts.MoEBlock)}
    assert len(rows := block.kept(step)) >= 6
    for row in rows:
        with monkeypatch.context() as patch:
            others = tuple(tensor for tensor in rows if tensor.name != row.name)
            patch.setattr(experts.MoEBlock, "kept", lambda part, step, others=others: others)
            assert kept_by(model, step) != found, row.name


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("deepseek-v2-lite", ("moeblaze", "minimal"), r"no layer here has such a router \(softmax, in float32\)"),
        (
            "llama-4-scout",
            ("moeblaze", "minimal"),
            r"such a router \(sigmoid of k, in its own dtype\) and DenseExperts",
        ),
        ("gpt-oss-20b", ("megablocks",), "GroupedExperts with biases: it must be 'torch'"),
        (QWEN3, ("moeblase", "minimal"), "unknown system 'moeblase'. Did you mean 'moeblaze'"),
        (QWEN3, ("moeblaze",), "unknown policy None"),
        (QWEN3, ("megablocks", "minimal"), "megablocks has no save policies"),
    ],
)
def test_what_no_layer_takes_the_place_of_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        configs.read(fields_of(model), model).in_system(*arguments)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek-v3", {}, "unknown family of models 'deepseek_v3'"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act is 'gelu', but the layers replace blocks with 'silu' alone"),
        (MODELS["mixtral"], {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but the layers replace"),
    ],
)
def test_a_model_of_another_kind_is_refused(name, fields, message):
    with fake(tiny(name) | fields) as model, pytest.raises(ValueError, match=message):
        put_into(model, "moeblaze", "minimal")


def test_dense_layers_stay():
    with fake(tiny(QWEN3) | {"mlp_only_layers": [0]}) as model:
        dense = model.model.layers[0].mlp
        put_into(model, "moeblaze", "minimal")
        assert model.model.layers[0].mlp is dense
        assert [type(layer.mlp).__name__ for layer in model.model.layers[1:]] == ["MoEBlock", "MoEBlock"]
