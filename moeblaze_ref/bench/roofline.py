"""The least time that a stage could take: its FLOPs or its bytes over what the device was seen to do.

Counted is what no implementation can leave out: every input read once, every output written once, two FLOPs for each
multiply-add of a product. A stage's roofline is the longer of the two times, at the rates of a large dense product and
of a device copy that were measured in the same run, before anything heated the device. Symbols as in the MoEBlaze
paper.
"""

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime.ceilings import Ceilings, Cost

INDEX = 4  # bytes of an int32, and of a float32 gate, logit or probability


def columns(ceilings: Ceilings, hot: Ceilings) -> dict[str, float]:
    """Return the device's rates as columns of a row.

    The roofline uses ``ceilings``, measured on the idle device; ``hot`` is interleaved with what is timed.

    Returns
    -------
    dict
        cublas_tflops (1e12 FLOPs in a second), copy_gb_s (1e9 bytes in a second), hot_cublas_tflops.
    """
    return {
        "cublas_tflops": ceilings.flops_per_ms / 1e9,
        "copy_gb_s": ceilings.bytes_per_ms / 1e6,
        "hot_cublas_tflops": hot.flops_per_ms / 1e9,
    }


def _costs(c: MoEConfig, experts: int | None = None) -> dict[str, Cost]:
    """FLOPs and bytes of every stage of a layer, in the order of a step; so many experts have tokens, by default all.

    The weights of the others need not be read. Their gradients are written: they are zeros.
    """
    s, projections = c.itemsize, 1 + c.gated
    x = c.L * c.d * s  # as large: d_x, out, d_out
    hidden = c.R * c.h * s  # a, b, y_swi, ...
    rows = c.R * c.d * s
    matrix = c.d * c.h * s  # of one expert, in w1, w2 or w3
    weight = (c.E if experts is None else experts) * matrix  # w1, w2, w3 each, as read
    router = c.d * c.E * s
    logits = c.L * c.E * INDEX
    slots = c.R * INDEX  # gates, ids, and each list of the Dispatch
    product = 2 * c.R * c.d * c.h  # FLOPs of one projection
    up = x + projections * weight + slots + (projections + 1) * hidden  # a, b and y_swi out
    d_hidden = x + weight + projections * hidden + 2 * slots  # in
    d_hidden += (projections + 1) * hidden + slots  # d_a, d_b, gate * y_swi and d_gates out
    weight_gradient = Cost(product, hidden + x + slots + c.E * matrix)
    return {
        "router": Cost(2 * c.L * c.d * c.E, x + router + logits),
        "gating": Cost(0, 2 * logits + 2 * slots),  # logits in; probabilities, choice and gates out
        "dispatch": Cost(0, 4 * slots + (c.E + 1) * INDEX),  # ids in; three lists and the offsets out
        "expert_up": Cost(projections * product, up),
        "expert_down": Cost(product, hidden + weight + rows),
        "combine": Cost(0, rows + 2 * slots + x),  # y, gates and the map in; out
        "d_hidden": Cost(product, d_hidden),
        "d_w3": weight_gradient,
        "d_x": Cost(projections * product, projections * (hidden + weight) + slots + x),
        "d_w1": weight_gradient,
        **({"d_w2": weight_gradient} if c.gated else {}),
        "gating_backward": Cost(0, 2 * slots + 2 * logits),  # d_gates, choice and logits in; d_logits out
        "router_backward": Cost(4 * c.L * c.d * c.E, logits + 2 * x + 2 * router),
    }


def stages_of(config: MoEConfig) -> list[str]:
    """The stages of a layer in the order of a step; an ungated one has no d_w2."""
    return list(_costs(config))


def cost_of(stage: str, config: MoEConfig) -> Cost:
    """FLOPs and bytes of one of `stages_of`."""
    return _costs(config)[stage]


def layer_flops(config: MoEConfig) -> int:
    """FLOPs of the experts' products in a step, forward and backward: 18 L k d h for a gated layer, 12 L k d h else."""
    return 6 * (2 + config.gated) * config.R * config.d * config.h


def layer_roofline_ms(config: MoEConfig, ceilings: Ceilings, experts: int | None = None) -> float:
    """Milliseconds of a step whose every stage runs at its roofline.

    What a policy recomputes is no part of it: the roofline is that of the result, not of the way to it.

    Parameters
    ----------
    config : MoEConfig
    ceilings : Ceilings
    experts : int, optional
        How many experts have tokens. Default: all E.
    """
    return sum(map(ceilings.roofline_ms, _costs(config, experts).values()))
