"""Record launch plans of a layer's node, and replay them: see `runtime.launch_plan`.

A plan belongs to a key: the system with its options and its own tensors, the device and its stream, and the layout of
every input of the call. The first call with a key runs the stages, the second is recorded, and each later call
replays. Some calls cannot be replayed and run the stages each time: calls that wait for the device, calls without a
C++ compiler, calls under a dispatch mode of torch such as FakeTensorMode, and calls that a CUDA graph captures.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor, nn

from moeblaze_ref.core.structures import Array
from moeblaze_ref.nn.torch_node import Backward, Forward, Operands, System
from moeblaze_ref.nn.torch_operands import layouts_of
from moeblaze_ref.runtime.launch_plan import NoPlan, Plan, Recorder, recording, without_overlap
from moeblaze_ref.runtime.simt.build import SimtCompileError
from moeblaze_ref.runtime.simt.cache import SimtUnavailable
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.runtime.torch_executor import TorchExecutor

CAPACITY = 1024  # plans that are kept, those used last
log = logging.getLogger(__name__)

Inputs = list[Any]  # tensors or None
Results = Sequence[Any]  # tensors or None
Form = Callable[[Results], Any]  # makes of a plan's results what the call returns


class Counts(NamedTuple):
    """Calls of layers that might have plans; a forward and a backward are one each."""

    replayed: int  # by a plan
    launched: int  # by the stages


class _Ready(NamedTuple):
    """A plan, and what makes of its results what the call returns."""

    plan: Plan
    form: Form


class _State(Enum):
    """State of a key without a plan."""

    SEEN = auto()  # the next call is recorded
    REFUSED = auto()  # no call is


class _Cache:
    """The plans by their keys, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all plans, and count from zero."""
        with self._lock:
            self._found: OrderedDict[Any, _Ready | _State] = OrderedDict()
            self._replayed, self._launched = 0, 0

    @property
    def counts(self) -> Counts:
        """The calls since the last `clear`."""
        return Counts(self._replayed, self._launched)

    def find(self, key: Any) -> _Ready | _State | None:
        """Return what is known of a key, for a call that is counted."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            if type(found) is _Ready:
                self._replayed += 1
            else:
                self._launched += 1
            return found

    def put(self, key: Any, found: _Ready | _State) -> None:
        """Store the plan or state of a key, and remove the least recently used key if there are too many."""
        with self._lock:
            self._found[key] = found
            self._found.move_to_end(key)
            if len(self._found) > CAPACITY:
                self._found.popitem(last=False)
                log.info("more than %d calls of layers may have a launch plan: the oldest is forgotten", CAPACITY)

    def __len__(self) -> int:
        return len(self._found)


_cache = _Cache()
_in_use = True
_allowed: ContextVar[bool] = ContextVar("allowed", default=True)


def use_launch_plans(wanted: bool = True) -> bool:
    """Let the layers of all threads replay launch plans, as they do at first, or no longer; return whether they did."""
    global _in_use
    before, _in_use = _in_use, wanted
    return before


def launch_plan_counts() -> Counts:
    """Return how many calls have replayed a launch plan, and how many that might have did not, since the last clear."""
    return _cache.counts


def clear_launch_plans() -> None:
    """Forget all launch plans and set the counts to zero."""
    _cache.clear()


@contextmanager
def without_launch_plans() -> Iterator[None]:
    """Context in which the layers that this thread calls have no launch plans.

    The backward of a layer does as its forward did.
    """
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def planned(system: System[Operands], layouts: Any = None) -> System[Operands]:
    """Return the system with launch plans if they are in use, and this thread does not go without them.

    ``layouts`` are those of what its forward will be given, if they are known: `torch_operands.layouts_of`.
    """
    return Planned(system, layouts) if _in_use and _allowed.get() else system


class Planned(NamedTuple, Generic[Operands]):
    """A system whose calls replay plans where there are any."""

    system: System[Operands]
    layouts: Any

    def forward(self, bridge: Bridge, x: Array, weights: Operands, topk_experts: Array | None) -> Forward:
        """Run the system's forward, or replay it."""
        executor, system, kind = _planner(bridge), self.system, type(weights)
        if executor is None:
            return system.forward(bridge, x, weights, topk_experts)
        inputs = [x, *weights, topk_experts]

        def run(inputs: Inputs) -> Forward:
            x, *operands, topk_experts = inputs
            return system.forward(bridge, x, kind(*operands), topk_experts)

        found: Forward = _call(executor, system, (kind, self.layouts or layouts_of(inputs)), inputs, run, _flat)
        return found

    def backward(self, bridge: Bridge, given: Backward[Operands]) -> Results:
        """Run the system's backward, or replay it."""
        executor, system = _planner(bridge), self.system
        kind: Any = type(given.weights)
        if executor is None or given.counts is not None:
            return system.backward(bridge, given)
        losses, names = tuple(given.d_losses), tuple(given.arrays)
        inputs = [given.d_out, *given.d_losses.values(), given.x, *given.weights, *given.arrays.values()]
        given.arrays.clear()  # so that the call alone has them, and frees them

        def run(inputs: Inputs) -> Results:
            rest = iter(inputs)
            d_out, d_losses, x = next(rest), {name: next(rest) for name in losses}, next(rest)
            weights = kind(*[next(rest) for _ in kind._fields])
            given.arrays.update(zip(names, rest, strict=True))
            inputs.clear()
            return system.backward(bridge, given._replace(d_out=d_out, d_losses=d_losses, x=x, weights=weights))

        how = kind, losses, names, given.last, frozenset(given.wanted), layouts_of(inputs)
        found: Results = _call(executor, system, how, inputs, run, lambda gradients: (gradients, list))
        return found


def _flat(forward: Forward) -> tuple[Results, Form] | None:
    """Return a forward's results as a list, and the function that reverses this; None if no plan can hold them."""
    if forward.counts is not None:
        return None
    names = tuple(forward.saved)

    def form(results: Results) -> Forward:
        out, balance, z, chosen, *saved = cast(list[Any], results)
        return Forward(out, balance, z, chosen, dict(zip(names, saved, strict=True)))

    return [*forward[:4], *forward.saved.values()], form


def _planner(bridge: Bridge) -> TorchExecutor | None:
    """The executor, if it has plans and neither a mode of torch's nor a CUDA graph must see each operation."""
    executor = bridge.executor
    if not isinstance(executor, TorchExecutor) or executor.driver is None:
        return None
    return None if torch._C._len_torch_dispatch_stack() or executor.capturing() else executor


def _call(
    executor: TorchExecutor,
    system: System[Any],
    how: tuple[Any, ...],
    inputs: Inputs,
    run: Callable[[Inputs], Any],
    flat: Callable[[Any], tuple[Results, Form] | None],
) -> Any:
    """Return the result of ``run``, or replay its plan. ``flat`` turns a result into a list of tensors."""
    key = executor, executor.stream(), system, how
    found = _cache.find(key)
    if type(found) is _Ready:
        present: Inputs = [tensor for tensor in inputs if tensor is not None]
        inputs.clear()
        return found.form(found.plan.run(present, executor.stream()))
    if found is None:
        _cache.put(key, _State.SEEN)
    return _record(executor, system, key, inputs, run, flat) if found is _State.SEEN else run(inputs)


def _record(
    executor: TorchExecutor,
    system: System[Any],
    key: Any,
    inputs: Inputs,
    run: Callable[[Inputs], Any],
    flat: Callable[[Any], tuple[Results, Form] | None],
) -> Any:
    """Return the result of ``run``, and store a plan of the call if it can be replayed."""
    alone = iter(without_overlap([tensor for tensor in inputs if tensor is not None]))
    inputs[:] = [None if tensor is None else next(alone) for tensor in inputs]
    del alone
    with recording([tensor for tensor in inputs if tensor is not None], _own_tensors(system)) as recorder:
        value = run(inputs)
    flattened = flat(value)
    _cache.put(key, _State.REFUSED if flattened is None else _plan(executor, recorder, *flattened))
    return value


def _own_tensors(system: System[Any]) -> list[Tensor]:
    """Return the tensors of a system besides the call's inputs: its fields, and the buffers of fields that are modules.

    Such a buffer is written in place: a plan keeps the tensor, and its key has the module.
    """
    fields: tuple[Any, ...] = tuple(cast(Any, system))
    buffers = [tensor for field in fields if isinstance(field, nn.Module) for tensor in field.buffers()]
    return [field for field in fields if isinstance(field, Tensor)] + buffers


def _plan(executor: TorchExecutor, recorder: Recorder, results: Results, form: Form) -> _Ready | _State:
    try:
        assert executor.driver is not None
        return _Ready(Plan(recorder, results, executor.device, executor.driver), form)
    except (NoPlan, SimtUnavailable, SimtCompileError) as why:
        log.info("a call of a layer has no launch plan: %s", why)
        return _State.REFUSED
