"""FLOPs of a forward, which a backward doubles: two for each weight and token that meet, and attention's own."""

from moeblaze_ref.plan.attention import Attention, LatentAttention, SinkAttention
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.experts import GroupedExperts, MoEBlock
from moeblaze_ref.plan.parts import Embedding, Head, Part, Step


def forward_flops(model: Model, step: Step) -> int:
    """FLOPs of one forward of the whole model; half of the pairs of a causal attention are computed."""
    return sum(part_flops(part, step) for part in model.parts)


def part_flops(part: Part, step: Step) -> int:
    """FLOPs of one part; norms and what is done number by number do not count."""
    if isinstance(part, Embedding):
        return 0
    if isinstance(part, Head):  # its weight may be the embedding's
        return 2 * int(step.L) * part.d * part.vocabulary
    products = sum(_active(part, weight.count) for weight in part.weights() if len(weight.dims) > 1)
    return 2 * int(step.L) * products + _attention(part, step)


def _active(part: Part, count: int) -> int:
    """The numbers of a weight that one token meets."""
    if isinstance(part, GroupedExperts | MoEBlock):
        return count * part.k // part.E
    return count


def _attention(part: Part, step: Step) -> int:
    if isinstance(part, LatentAttention):
        widths = part.heads * (part.plain_width + part.rotary_width + part.value_width)
    elif isinstance(part, Attention | SinkAttention):
        widths = 2 * part.heads * part.width
    else:
        return 0
    return int(step.L) * step.sequence * widths
