"""Pictures of a training run: the loss, and how evenly the experts are used."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from moeblaze_ref.core.drawing import panels
from moeblaze_ref.memory.plots import BLUE, GREY, VERMILLION


def loss_curve(losses: Sequence[float], vocab: int = 256) -> Figure:
    """Cross entropy at each step, nats per token, with that of a uniform guess, ln(vocab), as a line.

    Raises
    ------
    ValueError
        If there is no loss.
    """
    if not losses:
        raise ValueError("losses is empty, but it must hold at least one step")
    figure, axes = panels(7, 3.5)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=BLUE)
    axes.axhline(math.log(vocab), color=GREY, linewidth=0.8)
    axes.annotate(f"uniform guess, ln {vocab}", (1, math.log(vocab)), xytext=(4, 3), textcoords="offset points")
    axes.annotate(f"{losses[-1]:.2f}", (len(losses), losses[-1]), xytext=(4, 0), textcoords="offset points", color=BLUE)
    axes.set(xlabel="step", ylabel="cross entropy, nats per byte", ylim=(0, math.log(vocab) * 1.15))
    return figure


def expert_load(topk_experts: Sequence[np.ndarray], num_experts: int) -> Figure:
    """Routed rows of each expert, one panel a layer, with the balanced share as a line.

    Parameters
    ----------
    topk_experts : sequence of ndarray (L, k)
        Choices of each layer.
    num_experts : int
        E.
    """
    layers = len(topk_experts)
    figure, shown = panels(3.5 * layers, 3, 1, layers, sharey=True, squeeze=False)
    for layer, (axes, chosen) in enumerate(zip(shown[0], topk_experts, strict=True)):
        counts = np.bincount(chosen.ravel(), minlength=num_experts)
        share = chosen.size / num_experts
        axes.bar(range(num_experts), counts, color=BLUE)
        axes.axhline(share, color=VERMILLION, linewidth=1)
        axes.set_title(f"layer {layer}: busiest expert {counts.max() / share:.2f} x its share", fontsize="medium")
        axes.set_xticks(range(0, num_experts, max(1, num_experts // 8)))
        axes.set_xlabel("expert")
    shown[0, 0].set_ylabel("routed rows")
    shown[0, -1].annotate(
        "balanced",
        (1, share),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        color=VERMILLION,
        va="center",
    )
    return figure
