"""Models of transformers without memory: torch knows each tensor's shape and dtype, and has no numbers."""

import contextlib
import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moeblaze_ref.plan import configs

# As transformers chooses where it can: gpt-oss's attention has no other form, Llama 4's experts neither.
ATTENTION = {"gpt_oss": "eager"}
OWN_EXPERTS = ("llama4_text",)


def fields_of(name: str) -> dict[str, Any]:
    """The config.json of a carried model."""
    return json.loads((configs.MODELS / f"{name}.json").read_text())


@contextlib.contextmanager
def fake(fields: dict[str, Any]) -> Iterator[Any]:
    """The model of a config.json, while none of its tensors has memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), real(fields) as model:
        yield model


@contextlib.contextmanager
def real(fields: dict[str, Any]) -> Iterator[Any]:
    """The model of a config.json, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils  # seconds, which few processes need

    config = AutoConfig.for_model(**fields)
    config._attn_implementation = ATTENTION.get(config.model_type, "sdpa")
    if config.model_type not in OWN_EXPERTS:
        config._experts_implementation = "grouped_mm"
    config.pad_token_id = None  # may lie outside a vocabulary that a test has cut
    with contextlib.ExitStack() as stack:
        # It would look at the numbers of the positions, to see whether several texts are packed into one sequence.
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
    """A tensor that autograd saves; lives as long as the node of the graph that saved it."""

    def __init__(self, tensor):
        self.tensor = tensor


def kept_storages(model, batch: int, sequence: int) -> list[int]:
    """Bytes of each storage that the forward with its loss keeps for the backward, but for parameters and buffers."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor):
        one = _Saved(tensor)
        saved.add(one)
        return one

    ids = torch.zeros(batch, sequence, dtype=torch.long)
    with saved_tensors_hooks(pack, lambda one: one.tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    gc.collect()
    own = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
    found = {}
    for one in saved:
        storage = one.tensor.untyped_storage()
        if StorageWeakRef(storage) not in own:
            found[storage._cdata] = storage.nbytes()
    assert loss.requires_grad
    return sorted(found.values())
