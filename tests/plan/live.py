"""Bytes alive over a training step of a model without memory."""

import functools
import gc
from collections import Counter
from typing import NamedTuple

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from moeblaze_ref.memory.measure import LiveStorages
from moeblaze_ref.plan.torch_models import loss_of

aten = torch.ops.aten
PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Step(NamedTuple):
    """What torch has alive in one step."""

    forward: int  #: the most bytes
    backward: int
    optimizer: int
    kept: Counter[int]  #: storages when the loss is there, by their size, but for weights and states


def checkpoint(model, how):
    """Let a model's layers keep little, as one of ``checkpoints.CHECKPOINTS`` says."""
    if how != "none":
        chosen = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        settings = {"context_fn": chosen} if how == "selective" else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **settings})
        model.train()


def one_step(model, batch, sequence):
    """A step with AdamW in one kernel, whose states are there before."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    states = [state for of_one in optimizer.state.values() for state in of_one.values() if state.ndim]
    own = (*model.parameters(), *model.buffers(), *states)
    resident = sum(tensor.untyped_storage().nbytes() for tensor in own)
    with LiveStorages(own) as alive:
        loss = loss_of(model, batch, sequence)
        gc.collect()
        kept = Counter(alive.sizes) - Counter([loss.untyped_storage().nbytes()])
        forward = most(alive)
        loss.backward()
        del loss
        backward = most(alive)
        optimizer.step()
        return Step(resident + forward, resident + backward, resident + most(alive), kept)


def most(alive):
    """The most bytes alive since this was asked last."""
    found = max(alive.bytes, default=0)
    alive.bytes[:] = [sum(alive.sizes)]
    return found
