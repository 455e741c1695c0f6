"""Models of transformers from a config.json, and what torch itself says of their memory."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# As transformers chooses where it can: gpt-oss's attention has no other form, Llama 4's experts neither.
ATTENTION = {"gpt_oss": "eager"}
OWN_EXPERTS = ("llama4_text",)


@contextlib.contextmanager
def built(fields: dict[str, Any]) -> Iterator[nn.Module]:
    """The model of a config.json, in bfloat16, with grouped products for its experts and torch's attention.

    While the context is open its forward does not look into the positions for sequences that are packed together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils  # two seconds, which only a model costs

    config = AutoConfig.for_model(**fields)
    config._attn_implementation = ATTENTION.get(config.model_type, "sdpa")
    if config.model_type not in OWN_EXPERTS:
        config._experts_implementation = "grouped_mm"
    config.pad_token_id = None  # may lie outside a vocabulary that was cut
    with contextlib.ExitStack() as stack:
        looks = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = lambda *_: None
        stack.callback(setattr, masking_utils, "find_packed_sequence_indices", looks)
        before = torch.get_default_dtype()
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(before)
        yield model


class _Saved:
    """A tensor that autograd saves, without its place in the graph; lives as long as the node that saved it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


def here(tensor: Tensor) -> Tensor:
    """Return a tensor, or this rank's part of one that several ranks have."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loss_of(model: nn.Module, batch: int, sequence: int) -> Tensor:
    """The loss of ``batch`` sequences of ``sequence`` equal tokens."""
    ids = torch.zeros(batch, sequence, dtype=torch.long, device=next(model.parameters()).device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def kept_storages(model: nn.Module, batch: int, sequence: int) -> list[int]:
    """Bytes of each storage that the forward with its loss keeps for the backward, but for parameters and buffers."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        one = _Saved(tensor)
        saved.add(one)
        return one

    with saved_tensors_hooks(pack, lambda one: one.tensor):
        loss = loss_of(model, batch, sequence)
    gc.collect()
    own = {StorageWeakRef(here(tensor).untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
    found = {}
    for one in saved:
        storage = here(one.tensor).untyped_storage()
        if StorageWeakRef(storage) not in own:
            found[storage._cdata] = storage.nbytes()
    del loss
    return sorted(found.values())
