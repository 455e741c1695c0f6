"""The least time that a stage could take: its FLOPs or its bytes over what the device was seen to do.

Counted is what no implementation can leave out: every input read once, every output written once, two FLOPs for each
multiply-add of a product. A stage's roofline is the longer of the two times, at the rates of a large dense product and
of a device copy that were measured in the same run, before anything heated the device. Symbols as in the MoEBlaze
paper.
"""

from collections.abc import Callable

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime.ceilings import Ceilings, Cost

INDEX = 4  # bytes of an int32, and of a float32 gate, logit or probability


def columns(ceilings: Ceilings, hot: Ceilings) -> dict[str, float]:
    """Return the device's rates as columns of a row: TFLOP/s and GB/s.

    Parameters
    ----------
    ceilings : Ceilings
        Measured on the idle device; the roofline uses these.
    hot : Ceilings
        Interleaved with what is timed.

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


def _sizes(config: MoEConfig) -> dict[str, int]:
    """Bytes of the tensors that stages share, by name."""
    s = config.itemsize
    return {
        "x": config.L * config.d * s,  # as large: d_x, out, d_out
        "hidden": config.R * config.h * s,  # a, b, y_swi, ...
        "rows": config.R * config.d * s,
        "weight": config.E * config.d * config.h * s,  # w1, w2, w3 each
        "router": config.d * config.E * s,
        "logits": config.L * config.E * INDEX,
        "slots": config.R * INDEX,  # gates, ids, and each list of the Dispatch
    }


def _router(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(2 * c.L * c.d * c.E, size["x"] + size["router"] + size["logits"])


def _gating(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(0, 2 * size["logits"] + 2 * size["slots"])  # logits in; probabilities, choice and gates out


def _dispatch(c: MoEConfig) -> Cost:
    return Cost(0, 4 * _sizes(c)["slots"] + (c.E + 1) * INDEX)  # ids in; three lists and the offsets out


def _expert_up(c: MoEConfig) -> Cost:
    size, projections = _sizes(c), 1 + c.gated
    written = (projections + 1) * size["hidden"]  # a, b and y_swi
    return Cost(2 * projections * c.R * c.d * c.h, size["x"] + projections * size["weight"] + size["slots"] + written)


def _expert_down(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(2 * c.R * c.d * c.h, size["hidden"] + size["weight"] + size["rows"])


def _combine(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(0, size["rows"] + 2 * size["slots"] + size["x"])  # y, gates and the map in; out


def _d_hidden(c: MoEConfig) -> Cost:
    size, projections = _sizes(c), 1 + c.gated
    read = size["x"] + size["weight"] + projections * size["hidden"] + 2 * size["slots"]
    written = (projections + 1) * size["hidden"] + size["slots"]  # d_a, d_b, gate * y_swi, d_gates
    return Cost(2 * c.R * c.d * c.h, read + written)


def _weight_gradient(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(2 * c.R * c.d * c.h, size["hidden"] + size["x"] + size["slots"] + size["weight"])


def _d_x(c: MoEConfig) -> Cost:
    size, projections = _sizes(c), 1 + c.gated
    moved = projections * (size["hidden"] + size["weight"]) + size["slots"] + size["x"]
    return Cost(2 * projections * c.R * c.d * c.h, moved)


def _gating_backward(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(0, 2 * size["slots"] + 2 * size["logits"])  # d_gates, choice and logits in; d_logits out


def _router_backward(c: MoEConfig) -> Cost:
    size = _sizes(c)
    return Cost(4 * c.L * c.d * c.E, size["logits"] + 2 * size["x"] + 2 * size["router"])


FORWARD: dict[str, Callable[[MoEConfig], Cost]] = {
    "router": _router,
    "gating": _gating,
    "dispatch": _dispatch,
    "expert_up": _expert_up,
    "expert_down": _expert_down,
    "combine": _combine,
}
BACKWARD: dict[str, Callable[[MoEConfig], Cost]] = {
    "d_hidden": _d_hidden,
    "d_w3": _weight_gradient,
    "d_x": _d_x,
    "d_w1": _weight_gradient,
    "d_w2": _weight_gradient,
    "gating_backward": _gating_backward,
    "router_backward": _router_backward,
}


def stages_of(config: MoEConfig) -> list[str]:
    """The stages of a layer in the order of a step; an ungated one has no d_w2."""
    return [name for name in (*FORWARD, *BACKWARD) if config.gated or name != "d_w2"]


def cost_of(stage: str, config: MoEConfig) -> Cost:
    """FLOPs and bytes of one of `stages_of`."""
    return (FORWARD | BACKWARD)[stage](config)


def layer_flops(config: MoEConfig) -> int:
    """FLOPs of the experts' products in a step, forward and backward: 18 L k d h for a gated layer, 12 L k d h else."""
    return 6 * (2 + config.gated) * config.R * config.d * config.h


def layer_roofline_ms(config: MoEConfig, ceilings: Ceilings) -> float:
    """Milliseconds of a step whose every stage runs at its roofline.

    What a policy recomputes is no part of it: the roofline is that of the result, not of the way to it.
    """
    return sum(ceilings.roofline_ms(cost_of(stage, config)) for stage in stages_of(config))
