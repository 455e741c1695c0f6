"""Bytes alive over a training step of a model without memory."""

import functools
import gc
from collections import Counter
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from moeblaze_ref.plan.torch_models import loss_of

aten = torch.ops.aten
PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Alive(TorchDispatchMode):
    """Storages that are alive, looked at after every operator; those that are given count from the start."""

    def __init__(self, tensors):
        super().__init__()
        self._alive, self.bytes, self.peak = {}, 0, 0
        self._note(tensors)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.sweep()
        self._note(one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor))
        return result

    def sweep(self):
        """Forget what is dead."""
        for reference, size in list(self._alive.items()):
            if reference.expired():
                del self._alive[reference]
                self.bytes -= size

    def _note(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (reference := StorageWeakRef(storage)) not in self._alive:
                self._alive[reference] = storage.nbytes()
                self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def sizes(self, without):
        """How many storages there are of each size, but for those of some tensors."""
        own = {StorageWeakRef(tensor.untyped_storage()) for tensor in without}
        return Counter(size for reference, size in self._alive.items() if reference not in own)

    def take_peak(self):
        """The most bytes since this was asked last."""
        found, self.peak = self.peak, self.bytes
        return found


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
    with Alive(own) as alive:
        loss = loss_of(model, batch, sequence)
        gc.collect()
        alive.sweep()
        kept = alive.sizes((*own, loss))
        forward = alive.take_peak()
        loss.backward()
        del loss
        backward = alive.take_peak()
        optimizer.step()
        return Step(forward, backward, alive.take_peak(), kept)
