"""Measure the bytes that torch saves for backward and allocates in a forward, on CPU or GPU.

The measurement that memory/accounting.py is compared with. It counts whole storages: a view of a tensor keeps all of
it alive, and two views of one storage cost it once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class KeptStorage:
    """A storage that lives until the backward, and the first tensor that autograd saved of it."""

    shape: tuple[int, ...]  #: of that tensor, which may be a view of a part of the storage
    dtype: str  #: of that tensor, such as "float32"
    bytes: int  #: of the whole storage


class SavedStorages(saved_tensors_hooks):
    """Context manager: every storage that autograd saves inside, each once, without those of the excluded tensors.

    The excluded tensors are the parameters, or other tensors that live on anyway.

    Notes
    -----
    A storage counts from the moment it is saved, even if the graph that saved it is dropped inside the context.
    Custom autograd functions are seen through ``save_for_backward`` alone, not through plain attributes.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()):
        # The storages themselves are held: a freed one's address could be given to the next.
        self._saved: dict[int, tuple[torch.UntypedStorage, KeptStorage]] = {}
        excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
        # No bound method: it would tie self, and with it the storages, into a reference cycle.
        super().__init__(partial(_record, self._saved, excluded), lambda tensor: tensor)

    def __enter__(self) -> "SavedStorages":  # type: ignore[override]  # torch's own returns None
        super().__enter__()
        return self

    @property
    def storages(self) -> list[KeptStorage]:
        """Return the storages saved so far, in order."""
        return [kept for _, kept in self._saved.values()]

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(kept.bytes for kept in self.storages)


def _record(saved, excluded, tensor):
    """The hook that autograd calls with every tensor that it saves."""
    storage = tensor.untyped_storage()
    place = storage._cdata  # also of a storage without memory
    if place not in excluded and place not in saved:
        dtype = str(tensor.dtype).removeprefix("torch.")
        saved[place] = storage, KeptStorage(tuple(tensor.shape), dtype, storage.nbytes())
    return tensor.detach()  # an operator that saves its own result would hold itself, and never be freed


def kept_storages(fn: Callable, *args, exclude: Iterable[Tensor] | None = None) -> list[KeptStorage]:
    """The storages that autograd keeps of ``fn(*args)``; see `kept_bytes`."""
    with SavedStorages(_parameters(fn) if exclude is None else exclude) as saved:
        fn(*args)
    return saved.storages


def kept_bytes(fn: Callable, *args, exclude: Iterable[Tensor] | None = None) -> int:
    """The bytes that autograd keeps of ``fn(*args)`` until the backward: of whole storages, each counted once.

    ``fn`` is a module, or any function of tensors. Gradients must be wanted somewhere, or nothing is kept. Tensors of
    ``exclude`` do not count; by default these are the parameters of a module.
    """
    return sum(kept.bytes for kept in kept_storages(fn, *args, exclude=exclude))


def routing_of(counts: Sequence[int], k: int) -> Tensor:
    """A choice of k distinct experts for each token that sends every expert this many rows, to be replayed.

    Parameters
    ----------
    counts : sequence of int
        Routed rows of each expert: L * k together, at most L each.
    k : int
        Experts per token.

    Returns
    -------
    topk_experts : Tensor (L, k), int32
    """
    experts = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))  # (R,)
    return experts.view(k, -1).T.contiguous()  # L rows apart are different experts: none has more than L


def peak_bytes(fn: Callable, *args, exclude: Iterable[Tensor] | None = None) -> int:
    """The most bytes of storages alive at one time while ``fn(*args)`` runs, looked at after every operator.

    The arguments are those of `kept_bytes`, and count from their first use. What an operator allocates and frees within
    itself is not seen, nor is what an allocator adds; on a GPU, torch.cuda.max_memory_allocated sees both.
    """
    return max(live_bytes(fn, *args, exclude=exclude), default=0)


def live_bytes(fn: Callable, *args, exclude: Iterable[Tensor] | None = None, device: str = "") -> list[int]:
    """The bytes of storages alive, after each operator of ``fn(*args)`` that made them more; see `peak_bytes`.

    If a device is named, such as "cuda", only tensors there count.
    """
    with LiveStorages(_parameters(fn) if exclude is None else exclude, device) as live:
        fn(*args)
    return live.bytes


def _parameters(fn):
    return fn.parameters() if isinstance(fn, nn.Module) else ()


class LiveStorages(TorchDispatchMode):
    """Context manager that watches every operator's tensors through weak references: watching keeps nothing alive.

    Those of the excluded tensors do not count, nor, if a device is named, those on others.
    """

    def __init__(self, exclude: Iterable[Tensor] = (), device: str = ""):
        super().__init__()
        self._excluded = {StorageWeakRef(tensor.untyped_storage()) for tensor in exclude}
        self._device = device
        self._alive: dict[StorageWeakRef, int] = {}
        self.bytes: list[int] = []  #: alive after each operator that made them more

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is alive now."""
        self._forget_freed()
        return sorted(self._alive.values())

    def _forget_freed(self):
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self._forget_freed()
        before = sum(self._alive.values())
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.device.type.startswith(self._device):
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage not in self._excluded:
                    self._alive[storage] = tensor.untyped_storage().nbytes()
        if (after := sum(self._alive.values())) > before:
            self.bytes.append(after)
        return result
