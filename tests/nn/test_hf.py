"""Our experts inside models of transformers: the same losses, gradients and files."""

import copy
import importlib
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moeblaze_ref.nn import hf

SIZES = {
    "hidden_size": 64,
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
}
MORE = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": {},
    "deepseek_v3": {
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
    },
    "glm4_moe": {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "llama4_text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16, "num_experts_per_tok": 1},
    "gpt_oss": {},
}


def model_of(family, dtype=torch.float32, seed=0):
    """A tiny model whose experts run one after another."""
    config = AutoConfig.for_model(family)
    for name, value in (SIZES | MORE.get(family, {})).items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):  # of experts: they begin as 0
            torch.nn.init.normal_(parameter, std=5.0)
    return model


def tokens(seed=0, length=11):
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(seed))


def step(model, ids):
    """The loss and every gradient."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_in_bfloat16_a_model_is_as_near_to_float32_as_with_its_own_experts(family):
    """The loss, and the gradients of all parameters together: the same weights, rounded."""
    rounded, ids = model_of(family, torch.bfloat16), tokens()
    exact, gradients = step(copy.deepcopy(rounded).float(), ids)

    def errors():
        loss, found = step(rounded, ids)
        squares = [(found[name].float() - gradient).square().sum() for name, gradient in gradients.items()]
        return abs(loss - exact), sum(squares).sqrt().item()

    theirs = errors()
    with hf.use(rounded):
        ours = errors()
    size = sum(gradient.square().sum() for gradient in gradients.values()).sqrt().item()
    assert ours[0] <= 2 * theirs[0] + 1e-3 and ours[1] <= 1.5 * theirs[1] < 0.2 * size


def calls_counted(monkeypatch):
    """How often our experts run."""
    calls = []
    real = hf.experts
    monkeypatch.setattr(hf, "experts", lambda *given, **named: calls.append(given[6]) or real(*given, **named))
    return calls


@pytest.mark.parametrize("family", MORE)
def test_a_model_has_the_loss_and_gradients_of_its_own_experts(family, monkeypatch):
    calls = calls_counted(monkeypatch)
    model, ids = model_of(family), tokens()
    loss, gradients = step(model, ids)
    assert not calls
    with hf.use(model, "inputs") as used:
        ours, found = step(model, ids)
        assert calls == ["inputs"] * 2 and len(used.modules) == 2
    assert ours == pytest.approx(loss, rel=1e-5) and found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    again, _ = step(model, ids)
    assert again == loss and len(calls) == 2  # undone


def test_two_models_have_two_policies(monkeypatch):
    """Also where they were made of one configuration."""
    calls = calls_counted(monkeypatch)
    first = model_of("qwen3_moe")
    second = copy.deepcopy(first)
    untouched = model_of("qwen3_moe")
    used = hf.use(first, "minimal"), hf.use(second, "conventional")
    for model, policy in ((first, "minimal"), (second, "conventional")):
        calls.clear()
        step(model, tokens())
        assert calls == [policy] * 2
    calls.clear()
    step(untouched, tokens())
    used[0].undo()
    step(first, tokens())
    assert not calls
    step(second, tokens())
    assert calls == ["conventional"] * 2


def implementation(model):
    (found,) = {module.config._experts_implementation for module in hf._switchable(model)}
    return found


def test_models_of_one_config_object_are_switched_alone():
    config = model_of("qwen3_moe").config
    first, second = type(model_of("qwen3_moe"))(config), type(model_of("qwen3_moe"))(config)
    assert first.config is second.config
    used = hf.use(first)
    assert (implementation(first), implementation(second)) == ("moeblaze_minimal", "eager")
    hf.use(second, "inputs")
    assert implementation(first) == "moeblaze_minimal"
    used.undo()
    assert (implementation(first), implementation(second)) == ("eager", "moeblaze_inputs")


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_uses_end_in_any_order(family, order, monkeypatch):
    calls, model = calls_counted(monkeypatch), model_of(family)
    used = hf.use(model, "minimal"), hf.use(model, "inputs")
    used[order[0]].undo()
    step(model, tokens())
    assert calls == [("inputs", "minimal")[order[0]]] * 2
    calls.clear()
    used[order[1]].undo()
    step(model, tokens())
    assert not calls and not any("forward" in vars(module) for module in model.modules())


def test_what_was_chosen_since_stays():
    model = model_of("qwen3_moe")
    used = hf.use(model)
    used.undo()
    model.set_experts_implementation("grouped_mm")
    used.undo()
    assert implementation(model) == "grouped_mm"
    with hf.use(model):
        model.set_experts_implementation("eager")
    assert implementation(model) == "eager"


def test_what_was_chosen_between_two_uses_is_restored():
    model = model_of("qwen3_moe")
    first = hf.use(model)
    model.set_experts_implementation("grouped_mm")
    second = hf.use(model, "inputs")
    first.undo()
    second.undo()
    assert implementation(model) == "grouped_mm"


def test_a_block_on_which_other_code_has_set_a_forward_is_refused():
    model = model_of("llama4_text")
    block = next(hf._llama4_blocks(model))
    block.forward = partial(type(block).forward, block)
    with pytest.raises(ValueError, match="Llama4TextMoe has a forward that was set on it"):
        hf.use(model)
    del block.forward
    hf.use(model).undo()


def test_fifty_steps_are_those_of_eager():
    """Of 64 tokens, in float32: the same routing, and a loss within 1e-4 at every step."""
    models = model_of("qwen3_moe"), model_of("qwen3_moe")
    chosen = {id(model): [] for model in models}
    for model in models:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(
                lambda module, given, out, kept=chosen[id(model)]: kept.append(out[2].sort(-1).values)
            )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4) for model in models]
    with hf.use(models[1]):
        for number in range(50):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                loss, _ = step(model, tokens(number % 4, length=32))
                optimizer.step()
                losses.append(loss)
            assert losses[1] == pytest.approx(losses[0], abs=1e-4), number
    assert all(map(torch.equal, *chosen.values())) and losses[0] < 3.8


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_checkpoints_are_the_same_files(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path / "before")
    with hf.use(model):
        model.save_pretrained(tmp_path / "in use")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "in use")
        assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "in use" / name).read_bytes()


@pytest.mark.parametrize("frozen", ["proj_bias", "proj"])
def test_biases_train_alone_or_not_at_all(frozen):
    """Of gpt-oss: the other gradients stay those of its own experts."""
    model, ids = model_of("gpt_oss"), tokens()
    for name, parameter in model.named_parameters():
        if ".experts." in name and name.endswith(frozen):
            parameter.requires_grad_(False)
    _, gradients = step(model, ids)
    with hf.use(model):
        _, found = step(model, ids)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


OTHERS_OF_THIS_ACTIVATION = {
    "minimax_m3_vl": ("MiniMaxM3VLExperts", "MiniMaxM3VLTextConfig", "linear"),
    "openai_privacy_filter": ("OpenAIPrivacyFilterExperts", "OpenAIPrivacyFilterConfig", "matmul"),
}


def experts_of(family, name, config):
    """An experts module with random weights and tokens for it, of which the activation clamps some."""
    place = f"transformers.models.{family}"
    modeling, configuration = [
        importlib.import_module(f"{place}.{kind}_{family}") for kind in ("modeling", "configuration")
    ]
    config = getattr(configuration, config)()
    for size, value in SIZES.items():
        if hasattr(config, size):
            setattr(config, size, value)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = getattr(modeling, name)(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, torch.randn(11, 64), torch.rand(11, 4).argsort(1)[:, :2], torch.rand(11, 2)


@pytest.mark.parametrize("family", OTHERS_OF_THIS_ACTIVATION)
def test_other_experts_with_this_activation(family):
    """Where columns do not alternate, with biases and without."""
    name, config, layout = OTHERS_OF_THIS_ACTIVATION[family]
    module, *inputs = experts_of(family, name, config)
    assert hf._layout(module) == layout and hf._activation(module) == "clamped_swiglu"
    theirs = module(*inputs)
    off = hf._run("minimal", module, *inputs) - theirs
    assert (off.norm(dim=1) <= 1e-5 * theirs.norm(dim=1)).all()  # each token by its own size


def test_an_activation_that_clamps_otherwise_is_refused():
    """DeepSeek-V4's: a SiLU of a clamped gate."""
    module, *_ = experts_of("deepseek_v4", "DeepseekV4Experts", "DeepseekV4Config")
    with pytest.raises(ValueError, match="DeepseekV4Experts has an activation of its own"):
        hf._activation(module)


# What is refused ------------------------------------------------------------------------------------------------------


def _norm(model):
    model.model.layers[0].mlp.experts.has_post_expert_norm = True


def _activation(model):
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()


def _limit(model):
    model.model.layers[1].mlp.experts.limit = 10.0


def _rows(model):
    model.model.layers[1].mlp.experts.is_transposed = False


def _quantised(model):
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "change", "error", "message"),
    [
        (partial(model_of, "gpt_oss"), _limit, ValueError, "GptOssExperts has an activation of its own, other than"),
        (partial(model_of, "gpt_oss"), _rows, ValueError, "GptOssExperts has alternating rows of gate and up"),
        (partial(model_of, "qwen3_moe"), _norm, ValueError, "has has_post_expert_norm=True"),
        (partial(model_of, "qwen3_moe"), _activation, ValueError, "has the activation Tanh"),
        (partial(model_of, "qwen3_moe"), _quantised, TypeError, "down_proj has dtype torch.float8_e4m3fn"),
        (lambda: model_of("llama"), None, ValueError, "LlamaForCausalLM has no experts that transformers can switch"),
        (lambda: torch.nn.Linear(1, 1), None, TypeError, "model is a Linear, but it must be a transformers.PreTrained"),
        (lambda: model_of("qwen3_moe").model.layers[0].mlp, None, TypeError, "model is a Qwen3MoeSparseMoeBlock, but"),
    ],
)
def test_a_model_whose_experts_are_not_ours(make, change, error, message):
    model = make()
    if change:
        change(model)
    with pytest.raises(error) as raised:
        hf.use(model)
    assert message in str(raised.value)


def test_an_unknown_policy():
    with pytest.raises(ValueError, match="unknown policy 'minimum'"):
        hf.use(torch.nn.Linear(1, 1), "minimum")
