"""Ways of running a step, beside the plain one, in which layers that are right otherwise go wrong."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from torch import nn
from torch.utils.checkpoint import checkpoint

from moeblaze_ref.runtime.torch_capture import capture
from moeblaze_ref.verify.layers import cases
from moeblaze_ref.verify.layers.adapter import Adapter
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.faults import LayerFault, faults_of_a_layer
from moeblaze_ref.verify.layers.layer import CheckedLayer, Inputs
from moeblaze_ref.verify.layers.reference import Case, Results, in_float64


class Found(NamedTuple):
    """Results of a layer for a case."""

    case: Case
    results: Results
    how: str = ""  #: which part of the way this is
    dtype: torch.dtype | None = None  #: in which it was computed, if not in the layer's
    rerun: Callable[[Case], Results] | None = None  #: runs it with other numbers, if that is no plain step


AUTOCAST, COMPILE, GRAPH = "autocast", "torch.compile", "a replayed CUDA graph"
STRIDED, TRANSPOSED = "a strided x", "a transposed x"
TWO_BACKWARDS, UNCHANGED = "a second backward", "inputs after a step"
FROZEN, EMPTY, SIZES = "frozen weights or inputs", "a step without tokens", "other sizes"
Way = Callable[[CheckedLayer, Pattern, int], Iterator[Found]]


def _make(layer: CheckedLayer, pattern: Pattern, seed: int, step: int = 0, weights_of: int | None = None) -> Case:
    return cases.make(layer.adapter, pattern, layer.dtype, seed, step, weights_of)


def plain(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """One step."""
    case = _make(layer, pattern, seed)
    yield Found(case, layer.step(case))


def second_step(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Steps of the same shape, one after another: other tokens, another routing, other weights; fewer experts."""
    layer.step(_make(layer, pattern, seed))
    case, idle = _make(layer, pattern, seed, step=1), _make(layer, _with_idle_experts(pattern), seed, step=2)
    yield Found(case, layer.step(case))
    yield Found(idle, layer.step(idle), IDLE)


IDLE = "experts without tokens"


def _with_idle_experts(pattern: Pattern) -> Pattern:
    return pattern._replace(choose=cases.three_used)


def two_in_flight(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Two forwards, then both backwards."""
    both = [_make(layer, pattern, seed, step, weights_of=0) for step in (0, 1)]
    inputs = [layer.load(case) for case in both]
    outs = [layer.forward(given) for given in inputs]
    for case, given, out in zip(both, inputs, outs, strict=True):
        found = in_float64({"out": out}) | layer.gradients(out, layer.d_out(case), given)
        yield Found(case, found)


def two_backwards(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """A backward of a graph that was kept, after another one."""
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    out = layer.forward(inputs)
    layer.gradients(out, layer.d_out(case), inputs, retain_graph=True)
    yield Found(case, layer.gradients(out, layer.d_out(case), inputs))


def accumulated(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Two steps whose gradients add up in ``.grad``; half of the sum."""
    case, run = _make(layer, pattern, seed), partial(_half_of_two, layer)
    yield Found(case, run(case), rerun=run)


def _half_of_two(layer: CheckedLayer, case: Case) -> Results:
    """Half of what two steps leave in ``.grad``."""
    inputs = layer.load(case)
    wanted = layer.wanted(inputs)
    for tensor in wanted.values():
        tensor.grad = None
    for _ in range(2):
        out = layer.forward(inputs)
        with faults_of_a_layer(layer.device):
            out.backward(layer.d_out(case))
    found = layer.by_role({name: tensor.grad for name, tensor in wanted.items()}, inputs)
    for tensor in wanted.values():
        tensor.grad = None
    return {name: total / 2 for name, total in found.items()}


def recomputed(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Under activation checkpointing: the backward runs the forward again."""
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    out = layer.forward(inputs, partial(checkpoint, layer.adapter.module, use_reentrant=False))
    yield Found(case, in_float64({"out": out}) | layer.gradients(out, layer.d_out(case), inputs))


INFERENCE = torch.inference_mode, torch.no_grad  # in this order: what is kept of the first is no use in a training step


def without_gradients(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Two forwards under ``torch.inference_mode()``, with other weights, and two under ``torch.no_grad()``."""
    for mode, step in itertools.product(INFERENCE, (0, 1)):
        case = _make(layer, pattern, seed, step)
        yield Found(case, in_float64({"out": _inferred(layer, case, mode)}), mode.__name__)


def _inferred(layer: CheckedLayer, case: Case, mode: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
    inputs = layer.load(case)
    with mode():
        return layer.forward(inputs)


def after_inference(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """A step after a forward under ``torch.inference_mode()``, and one after one under ``torch.no_grad()``."""
    for step, mode in enumerate(INFERENCE, 1):
        _inferred(layer, _make(layer, pattern, seed), mode)
        case = _make(layer, pattern, seed, step)
        yield Found(case, layer.step(case), mode.__name__)


def evaluated(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Two steps after ``eval()``, which may have no backward, and one after ``train()`` again, with other weights."""
    module = layer.adapter.module
    if isinstance(module, nn.Module):
        module.eval()
        for step in (0, 1):
            case = _make(layer, pattern, seed, step)
            yield Found(case, _with_gradients_if_any(layer, case), "after eval()")
        module.train()
        case = _make(layer, pattern, seed, step=2)
        yield Found(case, layer.step(case), "after train()")


def _with_gradients_if_any(layer: CheckedLayer, case: Case) -> Results:
    inputs = layer.load(case)
    out = layer.forward(inputs)
    gradients = layer.gradients(out, layer.d_out(case), inputs) if out.requires_grad else {}
    return in_float64({"out": out}) | gradients


def other_sizes(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Steps of other sizes, one after another: few tokens, then ten times as many, then fewer again."""
    for step, other in enumerate(resized(pattern)):
        case = _make(layer, other, seed, step)
        yield Found(case, layer.step(case), f"L = {other.sizes.L}")


def resized(pattern: Pattern) -> list[Pattern]:
    """The pattern with the numbers of tokens that `other_sizes` has."""
    L = pattern.sizes.L
    return [pattern._replace(sizes=pattern.sizes._replace(L=tokens)) for tokens in (L // 2 + 1, 5 * L, L)]


def without_tokens(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """A step of no token, whose weights have no gradient or zeros, between two others; a layer need not allow one."""
    first, case = (_make(layer, pattern, seed, step) for step in (0, 1))
    layer.step(first)
    try:
        found = _with_gradients_if_any(layer, first.of_tokens(0))
    except LayerFault as fault:
        if fault.kind.startswith("raises"):
            return
        raise
    for name, tensor in found.items():
        if tensor.any():  # so is NaN
            raise LayerFault(f"a step without tokens has a gradient of {name} that is not zero", "not zero")
    yield Found(case, layer.step(case), "the step after it")


def unchanged(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """What a step was given has the same bits after it: x, the routing, the weights, the gradient of the output."""
    case = _make(layer, pattern, seed)
    layer.check_unchanged(case)
    yield Found(case, {})


def again(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """A step with the very tensors of another one."""
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    layer.step(case, inputs)
    yield Found(case, layer.step(case, inputs))


def autocast(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Under autocast to bfloat16, with weights in float32."""
    if layer.dtype != torch.float32 or torch.bfloat16 not in layer.adapter.dtypes:
        return
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    with torch.autocast(layer.device, torch.bfloat16):
        out = layer.forward(inputs)
    gradients = layer.gradients(out, layer.d_out(case).to(out.dtype), inputs)
    yield Found(case, in_float64({"out": out}) | gradients, dtype=torch.bfloat16)


def frozen(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Every choice of what wants a gradient."""
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    groups = _groups(layer, inputs)
    for size in range(1, len(groups)):
        for chosen in itertools.combinations(groups, size):
            with layer.frozen(inputs, [name for group in chosen for name in groups[group]]):
                found = layer.step(case, inputs)
            yield Found(case, found, f"gradients of {', '.join(chosen)} alone")


def _groups(layer: CheckedLayer, inputs: Inputs) -> dict[str, list[str]]:
    """Return the tensors that want a gradient, grouped by role: parameters of single experts go together."""
    groups = {name: [name] for name in inputs.leaves()}
    for place, _ in layer.places:
        if place.name in layer.wanted(inputs):
            groups.setdefault(" and ".join(place.layout.roles), []).append(place.name)
    return groups


def strided(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Every other column of a wider x, and of a wider gradient of the output."""
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    wide = torch.stack([inputs.x.detach(), torch.full_like(inputs.x, torch.nan)], -1)  # (L, d, 2)
    given = inputs._replace(x=wide[..., 0].requires_grad_())
    out = layer.forward(given)
    d_out = torch.stack([layer.d_out(case)] * 2, -1)[..., 0]
    yield Found(case, in_float64({"out": out}) | layer.gradients(out, d_out, given))


def transposed(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """x as the transpose of a contiguous tensor, and the routing likewise."""
    case = _make(layer, pattern, seed)
    given = Inputs(*map(_column_major, layer.load(case).arguments()))
    yield Found(case, layer.step(case, given))


def _column_major(tensor: torch.Tensor) -> torch.Tensor:
    turned = tensor.detach().mT.contiguous().mT
    return turned.requires_grad_() if tensor.requires_grad else turned


def equal_tokens(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """One token for all, and the gradient of a sum: each is a tensor of its own."""
    case = _with_equal_tokens(_make(layer, pattern, seed))
    yield Found(case, layer.step(case))


def _with_equal_tokens(case: Case) -> Case:
    row, L = case.x[:1], case.sizes.L
    index = case.topk_index if case.topk_weights is not None else case.topk_index[:1].expand(L, -1)
    return case._replace(x=row.expand(L, -1), topk_index=index, d_out=torch.ones_like(case.d_out))


def expanded(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """One token for all, without a copy of it; and the gradient of a sum, which has one element."""
    case = _with_equal_tokens(_make(layer, pattern, seed))
    inputs = layer.load(case)
    given = inputs._replace(x=inputs.x.detach()[:1].expand_as(inputs.x).requires_grad_())
    out = layer.forward(given)
    one = torch.ones((), dtype=layer.dtype, device=layer.device)
    yield Found(case, in_float64({"out": out}) | layer.gradients(out, one.expand_as(out), given))


def deterministic(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Under ``torch.use_deterministic_algorithms``, under which some functions of torch choose other kernels."""
    yield from _with_deterministic_algorithms(layer, pattern, seed, poison=False)


def poisoned(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """New memory is full of NaN."""
    yield from _with_deterministic_algorithms(layer, pattern, seed, poison=True)


def _with_deterministic_algorithms(layer: CheckedLayer, pattern: Pattern, seed: int, poison: bool) -> Iterator[Found]:
    for routing, how in ((_with_idle_experts(pattern), IDLE), (pattern, "")):
        case = _make(layer, routing, seed)
        with _deterministic_algorithms(poison):
            found = layer.step(case)
        yield Found(case, found, how)


@contextmanager
def _deterministic_algorithms(poison: bool) -> Iterator[None]:
    """Torch's deterministic mode, in which ``torch.empty`` can fill new memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # of whose setting mypy knows nothing
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = poison
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills


def compiled(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """Under ``torch.compile``, which on a CPU generates no code."""
    torch.compiler.reset()
    module = torch.compile(layer.adapter.module, backend="aot_eager" if layer.device == "cpu" else "inductor")
    case = _make(layer, pattern, seed)
    inputs = layer.load(case)
    out = layer.forward(inputs, module)
    yield Found(case, in_float64({"out": out}) | layer.gradients(out, layer.d_out(case), inputs))


def replayed(layer: CheckedLayer, pattern: Pattern, seed: int) -> Iterator[Found]:
    """A CUDA graph of a step, replayed with other tokens and another routing; a layer need not allow one."""
    if layer.device == "cpu":
        return
    first, other = (_make(layer, pattern, seed, step) for step in (0, 1))
    inputs, d_out = layer.load(first), layer.d_out(first)

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        out = layer.forward(inputs)
        return out, layer.raw_gradients(out, d_out, inputs)

    _on_a_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    try:
        with faults_of_a_layer(layer.device), capture(graph):
            out, gradients = step()
    except LayerFault:
        if layer.adapter.graphs:
            raise
        return
    new = layer.load(other)  # writes the weights, too
    with torch.no_grad():
        for tensor, values in zip(inputs.arguments(), new.arguments(), strict=True):
            tensor.copy_(values)
        d_out.copy_(layer.d_out(other))
    with faults_of_a_layer(layer.device):
        graph.replay()
    yield Found(other, in_float64({"out": out}) | layer.by_role(gradients, inputs))


def _on_a_side_stream(work: Callable[[], object]) -> None:
    """Run it as often as torch advises before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)


def refused(adapter: Adapter) -> tuple[str, ...]:
    """Return the ways that a layer refuses, as its adapter says."""
    takes = {
        AUTOCAST: adapter.autocasts,
        COMPILE: adapter.compiles,
        STRIDED: adapter.strides,
        TRANSPOSED: adapter.strides,
        TWO_BACKWARDS: adapter.retains,
    }
    return tuple(way for way, taken in takes.items() if not taken)


#: each by what it is called in a verdict
WAYS: dict[str, Way] = {
    "a second step of the same shape": second_step,
    "two steps in flight": two_in_flight,
    TWO_BACKWARDS: two_backwards,
    "gradients that add up": accumulated,
    UNCHANGED: unchanged,
    "the same inputs again": again,
    "activation checkpointing": recomputed,
    "no gradients wanted": without_gradients,
    "a step after inference": after_inference,
    "evaluation": evaluated,
    SIZES: other_sizes,
    FROZEN: frozen,
    STRIDED: strided,
    TRANSPOSED: transposed,
    "equal tokens": equal_tokens,
    "an expanded x": expanded,
    "deterministic algorithms": deterministic,
    "memory full of NaN": poisoned,
    AUTOCAST: autocast,
    COMPILE: compiled,
    GRAPH: replayed,
    EMPTY: without_tokens,
}
#: ways in which the first pattern alone runs: they take long, or others would show no more
ONCE = frozenset({FROZEN, COMPILE, GRAPH, EMPTY})
