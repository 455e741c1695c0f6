"""Which calls of a layer's node replay a launch plan: see `runtime.launch_plan`.

A plan belongs to a key: the system with its options, the executor of the device, and the layout of every tensor that
the call is given. The first call with a key runs the stages, the second is recorded, and each later one replays. What
cannot be replayed runs the stages each time: a call that waits for the device, one without a C++ compiler, one under a
dispatch mode of torch's such as FakeTensorMode, and one that a CUDA graph captures.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.nn.torch_operands import layouts_of
from moeblaze_ref.nn.torch_node import Backward, Forward, System
from moeblaze_ref.runtime.launch_plan import NoPlan, Plan, Recorder, apart, recording
from moeblaze_ref.runtime.simt.build import SimtCompileError
from moeblaze_ref.runtime.simt.cache import SimtUnavailable
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.runtime.torch_executor import TorchExecutor

CAPACITY = 128  # plans that are kept, those used last
log = logging.getLogger(__name__)

Inputs = list[Tensor | None]
Results = Sequence[Tensor | None]
Form = Callable[[Results], Any]  # makes of a plan's results what the call returns


class Counts(NamedTuple):
    """How many calls of layers, forward and backward each being one, replayed a plan, and how many ran the stages."""

    replayed: int
    launched: int


@dataclass(frozen=True)
class _Ready:
    """A plan, and what makes of its results what the call returns."""

    plan: Plan
    form: Form


_SEEN, _REFUSED = object(), object()  # in the place of a plan: the next call is recorded; none is


class _Cache:
    """The plans by their keys, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Any, Any] = OrderedDict()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
            self.counts = Counts(0, 0)

    def find(self, key: Any) -> Any:
        """What is known of a key: None, `_SEEN`, `_REFUSED` or a `_Ready`."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            replayed, launched = self.counts
            is_plan = isinstance(found, _Ready)
            self.counts = Counts(replayed + is_plan, launched + (not is_plan))
            return found

    def put(self, key: Any, found: Any) -> None:
        with self._lock:
            self._found[key] = found
            self._found.move_to_end(key)
            if len(self._found) > CAPACITY:
                self._found.popitem(last=False)

    def __len__(self) -> int:
        return sum(isinstance(found, _Ready) for found in list(self._found.values()))


_cache = _Cache()
_allowed: ContextVar[bool] = ContextVar("allowed", default=True)


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


def planned(system: System, layouts: Any = None) -> System:
    """Return the system with launch plans, unless this thread goes without them.

    ``layouts`` are those of what its forward will be given, if they are known: `torch_operands.layouts_of`.
    """
    return Planned(system, layouts) if _allowed.get() else system


class Planned(NamedTuple):
    """A system whose calls replay plans where there are any."""

    system: System
    layouts: Any

    def forward(self, bridge: Bridge, x: Any, weights: Any, topk_experts: Any) -> Forward:
        """Run the system's forward, or replay it."""
        kind, system, inputs = type(weights), self.system, [x, *weights, topk_experts]

        def run(inputs: Inputs) -> Forward:
            x, *operands, topk_experts = inputs
            return system.forward(bridge, x, kind(*operands), topk_experts)

        if not _may_plan(bridge.executor):
            return run(inputs)
        key = "forward", system, kind, self.layouts or layouts_of(inputs)
        found: Forward = _call(bridge.executor, key, inputs, run, _flat)
        return found

    def backward(self, bridge: Bridge, given: Backward) -> Results:
        """Run the system's backward, or replay it."""
        if given.counts is not None or not _may_plan(bridge.executor):
            return self.system.backward(bridge, given)
        losses, names, kind = tuple(given.d_losses), tuple(given.arrays), type(given.weights)
        inputs = [given.d_out, *given.d_losses.values(), given.x, *given.weights, *given.arrays.values()]
        given.arrays.clear()  # so that the call alone has them, and frees them
        wanted = frozenset(given.wanted)
        key = "backward", self.system, kind, losses, names, given.last, wanted, layouts_of(inputs)

        def run(inputs: Inputs) -> Results:
            rest = iter(inputs)
            d_out, d_losses, x = next(rest), {name: next(rest) for name in losses}, next(rest)
            weights = kind(*[next(rest) for _ in kind._fields])
            given.arrays.update(zip(names, rest, strict=True))
            inputs.clear()
            return self.system.backward(bridge, given._replace(d_out=d_out, d_losses=d_losses, x=x, weights=weights))

        found: Results = _call(bridge.executor, key, inputs, run, lambda gradients: (gradients, list))
        return found


def _flat(forward: Forward) -> tuple[Results, Form] | None:
    """What a forward has returned as a list of tensors, and what makes it of such a list; None for what no plan has."""
    *outputs, saved, counts = forward
    if counts is not None:
        return None
    names, others = tuple(saved), len(outputs)

    def form(results: Results) -> Forward:
        return Forward(*results[:others], dict(zip(names, results[others:], strict=True)))

    return [*outputs, *saved.values()], form


def _may_plan(executor: Any) -> bool:
    """Whether the device has plans, and neither a mode of torch's nor a CUDA graph must see each operation."""
    return (
        isinstance(executor, TorchExecutor)
        and executor.driver is not None
        and not torch._C._len_torch_dispatch_stack()
        and not executor.capturing()
    )


def _call(
    executor: TorchExecutor,
    key: tuple[Any, ...],
    inputs: Inputs,
    run: Callable[[Inputs], Any],
    flat: Callable[[Any], tuple[Results, Form] | None],
) -> Any:
    """What ``run`` returns, or its plan in its place: ``flat`` makes a list of tensors of it."""
    key = executor, key
    found = _cache.find(key)
    if isinstance(found, _Ready):
        present = [tensor for tensor in inputs if tensor is not None]
        inputs.clear()
        return found.form(found.plan.run(present, executor.stream()))
    if found is None:
        _cache.put(key, _SEEN)
    return _record(executor, key, inputs, run, flat) if found is _SEEN else run(inputs)


def _record(
    executor: TorchExecutor,
    key: Any,
    inputs: Inputs,
    run: Callable[[Inputs], Any],
    flat: Callable[[Any], tuple[Results, Form] | None],
) -> Any:
    """What ``run`` returns; a plan of it joins the others if there can be one."""
    alone = iter(apart([tensor for tensor in inputs if tensor is not None]))
    inputs[:] = [None if tensor is None else next(alone) for tensor in inputs]
    del alone
    with recording([tensor for tensor in inputs if tensor is not None]) as recorder:
        value = run(inputs)
    _cache.put(key, _ready(executor, recorder, flat(value)))
    return value


def _ready(executor: TorchExecutor, recorder: Recorder, flattened: tuple[Results, Form] | None) -> Any:
    """A plan, or `_REFUSED`."""
    if flattened is None:
        return _REFUSED
    results, form = flattened
    try:
        assert executor.driver is not None
        return _Ready(Plan(recorder, results, executor.device, executor.driver), form)
    except (NoPlan, SimtUnavailable, SimtCompileError) as why:
        log.info("a call of a layer has no launch plan: %s", why)
        return _REFUSED
