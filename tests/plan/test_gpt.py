"""GPT-2-like models: what is counted is what transformers' GPT-2 keeps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moeblaze_ref.core.config import MODELS, ModelConfig
from moeblaze_ref.plan import account
from moeblaze_ref.plan.gpt import Dropout, GeluMlp, LayerNorm, LocalExperts, SelfAttention, gpt
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.torch_models import kept_storages

DENSE = {name: size for name, size in MODELS.items() if size.E == 1}


def gpt2(size, dropout=0.0):
    """Transformers' model of the same sizes, whose GELU is one operator."""
    from transformers import GPT2Config, GPT2LMHeadModel  # two seconds

    config = GPT2Config(
        n_embd=size.d,
        n_layer=size.layers,
        n_head=size.d // 64,
        vocab_size=size.vocabulary,
        n_positions=size.sequence,
        activation_function="gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    config._attn_implementation = "eager"
    return GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16).train()


def kept(model, step):
    return sorted(tensor.bytes for _, tensor in account.kept(model, step))


@pytest.mark.parametrize("name", ["transformer-XS", "transformer-Medium"])
def test_a_dense_model_keeps_what_autograd_keeps(name):
    model = gpt(name, MODELS[name], dropout=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        theirs = gpt2(MODELS[name])
        assert account.parameters(model) == sum(weight.numel() for weight in theirs.parameters())
        found = kept_storages(theirs, 2, 1024)
    assert kept(model, Step(2, 1024, attention="cpu-math")) == found


@pytest.mark.parametrize("name", DENSE)
def test_parameters_are_those_that_make_the_papers_table(name):
    assert account.parameters(gpt(name, DENSE[name])) == DENSE[name].weights


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DENSE])
def test_all_experts_together_are_those_of_the_papers_table(name):
    size = MODELS[name]
    model = gpt(name, size, LocalExperts(size.d, size.E, "megablocks_published"))
    # The table counts biases of one expert of each layer; the layers here have none.
    assert account.parameters(model) == size.weights - size.layers * 5 * size.d


def test_a_layer_keeps_34_bytes_a_number_and_5_a_probability():
    d, S = 768, 1024
    step = Step(4, S)
    layer = (LayerNorm(d), SelfAttention(d), Dropout(d), LayerNorm(d), GeluMlp(d), Dropout(d))
    rows = [row for part in layer for row in part.kept(step) if row.name not in ("mean", "scale")]
    L, n = 4 * S, d // 64
    assert sum(row.bytes for row in rows) == 34 * L * d + 5 * n * S * L


def test_dropout_keeps_a_mask_and_what_it_leaves():
    """On a CPU a mask has the step's dtype; counted is a byte, as on a GPU."""
    size = ModelConfig(128, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = [sum(kept_storages(gpt2(size, dropout), 1, 256)) for dropout in (0.0, 0.1)]
    numbers, pairs = 3 * 256 * 128, 2 * 256 * 256
    assert found[1] - found[0] == 2 * (numbers + pairs) + 2 * pairs
    step = Step(1, 256)
    counted = [sum(kept(gpt("tiny", size, dropout=dropout), step)) for dropout in (False, True)]
    assert counted[1] - counted[0] == numbers + pairs + 2 * pairs
