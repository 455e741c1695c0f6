"""A larger model's trace from a recorded one: each expert becomes several, and layers repeat in other forms.

It stands in for recordings of models that are not at hand. The loads of experts and the sequences are real. How an
expert's tokens are spread over its parts is made up from real choices: a part is chosen by the expert that the token
chose first in another layer. So tokens that are routed alike stay together, as they would in a larger model, and parts
have uneven loads.
"""

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement.counted import Counted
from moeblaze_ref.placement.synthetic import sizes_of


def expand(trace: RoutingTrace, layers: int, num_experts: int, k: int, seed: int = 0) -> RoutingTrace:
    """Return a trace of so many layers and experts, k a token, from a smaller one.

    Layer l repeats layer l mod the recorded layers. Each of its experts becomes E / E0 parts, each choice k / k0 of
    them: the first by a random table over the expert chosen first in a random other layer, the others follow it in the
    order of the parts. Tables and other layers differ from layer to layer; the seed is theirs.

    Parameters
    ----------
    trace : RoutingTrace
        E0 experts, k0 a token.
    layers, num_experts, k : int
        E is a multiple of E0, k of k0, and an expert has no fewer parts than a choice.
    seed : int

    Raises
    ------
    ValueError, TypeError
        If a size is not so.
    """
    recorded, k0 = trace.topk.shape[1:]
    checks.check_int("layers", layers, 1)
    for name, size, of in (("num_experts", num_experts, trace.num_experts), ("k", k, k0)):
        if checks.check_int(name, size, of) % of:
            raise ValueError(f"{name} is {size}, but it must be a multiple of the trace's {of}")
    parts, copies = num_experts // trace.num_experts, k // k0
    if copies > parts:
        raise ValueError(f"k is {k}, {copies} times the trace's, but an expert has only {parts} parts")
    rng = np.random.default_rng(seed)
    topk = np.empty((trace.tokens, layers, k), np.int16)
    for l in range(layers):
        chosen = trace.topk[:, l % recorded]  # (tokens, k0)
        other = trace.topk[:, rng.integers(recorded), :1]  # (tokens, 1)
        table = rng.integers(parts, size=(trace.num_experts, trace.num_experts))
        first = table[chosen, other]  # (tokens, k0)
        each = (first[:, :, None] + np.arange(copies)) % parts  # (tokens, k0, copies)
        topk[:, l] = (chosen[:, :, None].astype(np.int64) * parts + each).reshape(trace.tokens, k)
    model = f"{trace.model} expanded to {layers}x{num_experts}"
    return RoutingTrace(topk, num_experts, trace.seq, trace.pos, trace.token, trace.seq_kind, model=model)


def expanded(trace: RoutingTrace | Counted, size: str | None) -> RoutingTrace | Counted:
    """Return what was recorded, or with a size "LAYERSxExK", such as "58x256x8", what `expand` makes of a trace.

    Raises
    ------
    ValueError, TypeError
        As `expand`, or if a size is given for counts.
    """
    if size is None:
        return trace
    if isinstance(trace, Counted):
        raise ValueError("a larger model is made of the tokens of a trace, but the record has counts alone")
    return expand(trace, *sizes_of(size))
