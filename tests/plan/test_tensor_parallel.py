"""Tensor parallelism with sequence parallelism: what a rank holds in torch is what the plan says.

Each rank has all experts, for its own tokens.
"""

from types import SimpleNamespace

import pytest
import torch
from test_models import FAMILIES, tiny
from test_shares import fake_group, in_storages
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from moeblaze_ref.plan import configs
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.shares import Parallel
from moeblaze_ref.plan.torch_models import built, kept_storages

SIZE, STEP = 2, Step(2, 32, attention="cpu-flash")
DIVIDED = sorted(FAMILIES - {"olmoe-1b-7b"})  # torch does not divide OLMoE's norms of all heads
COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def divide(model, mesh):
    """Divide heads, widths and the vocabulary among ranks, and the tokens where nothing else is divided."""
    tokens, whole = Shard(1), Replicate()
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    attention_input = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": tokens},
        desired_input_kwarg_layouts={"hidden_states": whole},
        use_local_output=True,
    )
    for layer in model.model.layers:
        names = dict(layer.named_modules())
        layout = {name: ColwiseParallel() for name in names if name.endswith(COLUMNS)}
        layout |= {name: RowwiseParallel(output_layouts=Shard(-2)) for name in names if name.endswith(ROWS)}
        layout |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        parallelize_module(layer, mesh, layout | {"self_attn": attention_input} | inputs_of_mlps(names))
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks = nn.Parameter(layer.self_attn.sinks.data.chunk(SIZE)[0].clone())
        for name in filter(is_shared, names):  # Llama 4 adds to the output in place
            names[name].register_forward_hook(lambda _, inputs, output: output.clone())


def is_shared(name):
    """Whether a module is the shared experts of a layer."""
    return name.endswith(("shared_expert", "shared_experts"))


def inputs_of_mlps(names):
    """Gather the tokens for a dense MLP, or for shared experts; routed experts see this rank's tokens."""
    mlp = "feed_forward" if "feed_forward" in names else "mlp"
    routed = f"{mlp}.experts" in names
    of_layer = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1) if routed else Replicate(),), use_local_output=True
    )
    of_shared = PrepareModuleInput(
        input_layouts=(Shard(-2),), desired_input_layouts=(Replicate(),), use_local_output=True
    )
    return {mlp: of_layer} | {name: of_shared for name in filter(is_shared, names)}


class OneRank(nn.Module):
    """A model on one of several ranks that divide it."""

    def __init__(self, model):
        super().__init__()
        divide(model, init_device_mesh("cpu", (SIZE,)))
        self.model, self.width = model, model.config.hidden_size

    def forward(self, input_ids, labels, **_):
        """Return the loss, as transformers computes it; between the layers a rank has its tokens alone."""
        body = self.model.model
        whole = torch.empty(*input_ids.shape, self.width, dtype=torch.bfloat16)
        angles = body.rotary_emb(whole, torch.arange(input_ids.shape[1])[None])
        rows = body.embed_tokens(input_ids)
        for layer in body.layers:
            rows = layer(rows, position_embeddings=angles, attention_mask=None)
        logits = self.model.lm_head(body.norm(rows)).float().flatten(0, 1)
        following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, following))


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("name", DIVIDED)
def test_a_rank_holds_what_is_planned(name, rank):
    fields = tiny(name)
    (stage,) = Run(configs.read(fields, name), STEP, "bf16", Parallel(tensor=SIZE)).stages
    with fake_group(rank, SIZE), loss_parallel(), built(fields) as model:
        one = OneRank(model)
        assert in_storages(model.parameters()) == sum(work.gradients for work in stage.work)
        kept = kept_storages(one, STEP.batch, STEP.sequence)
    assert kept == sorted(tensor.bytes for work in stage.work for tensor in work.kept)
