"""Descriptions of routers: what they refuse, and where the numbers of the families come from."""

import json
from types import SimpleNamespace

import pytest

from moeblaze_ref.core import routers
from moeblaze_ref.core.paths import PACKAGE
from moeblaze_ref.core.routers import FAMILIES, ROUTERS, Router

MODELS = PACKAGE / "plan" / "models"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"scores": "softmac"}, ValueError, "unknown scores 'softmac'. Did you mean 'softmax'"),
        ({"group_score": "sum"}, ValueError, "unknown group_score 'sum'.* Valid: max, top2"),
        ({"weighs": "both"}, ValueError, "unknown weighs 'both'.* Valid: output, input"),
        ({"scale": 0.0}, ValueError, "scale is 0.0, but it must be above 0"),
        ({"scale": float("nan")}, ValueError, "scale is nan, but it must be finite"),
        ({"scale": "2"}, TypeError, "scale is '2' .str., but it must be a number"),
        ({"epsilon": -1e-9, "renormalize": True}, ValueError, "epsilon is -1e-09, but it must be >= 0.0"),
        ({"epsilon": 1e-6}, ValueError, "epsilon is 1e-06, but without renormalize there is no sum: it must be 0"),
        ({"groups": 0}, ValueError, "groups is 0, but it must be >= 1"),
        ({"groups": 2.5}, TypeError, "groups is 2.5 .float., but it must be an integer"),
        ({"groups": 2, "groups_kept": 3}, ValueError, r"groups_kept is 3, but it must be 1\.\.2"),
        (
            {"scores": "softmax_of_chosen", "renormalize": True},
            ValueError,
            "renormalize is True, but with scores 'softmax_of_chosen' it must be False",
        ),
        (
            {"scores": "softmax_of_chosen", "selection_bias": True},
            ValueError,
            "selection_bias is True, but with scores 'softmax_of_chosen' it must be False",
        ),
        (
            {"scores": "softmax_of_chosen", "groups": 2},
            ValueError,
            "groups is 2, but with scores 'softmax_of_chosen' it must be 1",
        ),
    ],
)
def test_a_wrong_field_is_named(fields, error, message):
    with pytest.raises(error, match=message) as caught:
        Router(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "E", "k", "message"),
    [
        ({}, 4, 5, "k is 5, but there are only 4 experts"),
        ({"groups": 3}, 8, 1, "groups is 3, but it must divide the 8 experts"),
        ({"groups": 4, "group_score": "top2"}, 4, 1, "group_score is 'top2', but a group has 1 expert"),
        ({"groups": 4, "groups_kept": 2}, 8, 5, r"k is 5, but groups_kept = 2 groups have 4 experts: k must be 1\.\.4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(fields, E, k, message):
    with pytest.raises(ValueError, match=message) as caught:
        Router(**fields).check_sizes(E, k)
    assert "\n" not in str(caught.value)


def test_sizes_that_just_fit_pass():
    Router(groups=4, groups_kept=2, group_score="top2").check_sizes(8, 4)
    Router().check_sizes(1, 1)


def test_the_kernels_router_is_the_plain_one():
    plain = {name for name, router in ROUTERS.items() if router.plain}
    assert plain == {"mixtral", "qwen3_moe", "olmoe"}


def test_a_name_stands_for_its_router():
    assert routers.named("olmoe") == Router() == routers.named(Router())
    with pytest.raises(ValueError, match="unknown router 'deepseek'. Did you mean 'deepseek_v"):
        routers.named("deepseek")


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("mixtral", "mixtral-8x7b"),
        ("qwen3_moe", "qwen3-30b-a3b"),
        ("olmoe", "olmoe-1b-7b"),
        ("gpt_oss", "gpt-oss-20b"),
        ("deepseek_v3", "deepseek-v3"),
        ("glm4_moe", "glm-4.5"),
        ("kimi_k2", "kimi-k2"),
        ("llama4", "llama-4-scout"),
    ],
)
def test_the_numbers_are_those_of_the_model_that_is_named(family, model):
    config = SimpleNamespace(**json.loads((MODELS / f"{model}.json").read_text()))
    assert FAMILIES[family].model.lower() == model.lower()
    assert routers.of_config(config) == ROUTERS[family]


def test_groups_play_no_part_in_the_small_deepseek_v2():
    config = SimpleNamespace(**json.loads((MODELS / "deepseek-v2-lite.json").read_text()))
    assert routers.of_config(config) == Router(float32_product=True)


def test_a_sum_that_is_not_divided_by_has_no_epsilon():
    config = SimpleNamespace(
        model_type="lfm2_moe", norm_topk_prob=False, routed_scaling_factor=2.0, use_expert_bias=False
    )
    assert routers.of_config(config) == Router("sigmoid", scale=2.0)


def test_another_family_is_refused():
    with pytest.raises(ValueError, match="unknown model_type 'gpt2'"):
        routers.of_config(SimpleNamespace(model_type="gpt2"))
