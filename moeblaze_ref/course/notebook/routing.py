"""Pictures of a router: whom it chooses, how its losses move it, what a fixed capacity makes of skew."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeblaze_ref.backends.numpy_ref import gating
from moeblaze_ref.core.drawing import cell, heading, panels
from moeblaze_ref.memory.plots import BLACK, BLUE, GREY, SKY, VERMILLION, drawn, filled
from moeblaze_ref.memory.rows import Rows, capacity_rows
from moeblaze_ref.systems.capacity import expert_capacity

VISIBLE = {" ": "␣", "\n": "¶"}  # characters that print no ink


def choice_map(probs: np.ndarray, topk_experts: np.ndarray, text: str) -> Figure:
    """Probabilities as shades, a column for each character of ``text``; a frame marks the chosen experts.

    Parameters
    ----------
    probs : ndarray (L, E)
    topk_experts : ndarray (L, k)
    text : str
        One character for each of the L tokens.
    """
    num_tokens, num_experts = probs.shape
    figure, axes = panels(1 + 0.22 * num_tokens, 1.3 + 0.28 * num_experts, framed=True)
    shades = axes.imshow(probs.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (token, _), expert in np.ndenumerate(topk_experts):
        cell(axes, (token - 0.5, expert - 0.5), (1, 1), {"fill": False, "edgecolor": VERMILLION})
    axes.set_xticks(range(num_tokens), [VISIBLE.get(character, character) for character in text])
    axes.set_yticks(range(num_experts))
    axes.set(xlabel="byte of the text", ylabel="expert")
    heading(axes, f"framed: the {topk_experts.shape[1]} experts of each byte")
    axes.tick_params(length=0)
    figure.colorbar(shades, label="probability")
    return figure


# The two losses ------------------------------------------------------------------------------------------------------


class Descent(NamedTuple):
    """Record of n steps in which the losses alone moved a router."""

    loads: np.ndarray  #: (n, E) routed rows of each expert, as multiples of the balanced share
    balance: np.ndarray  #: (n,) load-balancing loss
    z: np.ndarray  #: (n,) router z-loss


def descend(x, wg, k, balance_weight, z_weight, steps=100, rate=0.5) -> Descent:
    """Gradient descent of wg (d, E) on the two router losses of x (L, d), with no task to learn; wg is not changed."""
    wg, seen = wg.copy(), []
    for _ in range(steps):
        logits = x @ wg  # (L, E)
        chosen = gating.forward(logits, k)
        counts = np.bincount(chosen.topk_experts.ravel(), minlength=wg.shape[1])  # (E,)
        balance = gating.load_balancing_loss(chosen.probs, chosen.topk_experts)
        seen.append((counts / counts.mean(), balance, gating.router_z_loss(logits)))
        d_logits = gating.load_balancing_loss_backward(chosen.probs, chosen.topk_experts, balance_weight)
        d_logits += gating.router_z_loss_backward(logits, z_weight)
        wg -= rate * x.T @ d_logits  # (d, E)
    return Descent(*map(np.array, zip(*seen, strict=True)))


def descent_picture(descent: Descent) -> Figure:
    """Each expert's load over the steps, then both losses."""
    figure, (loads, balance, z) = panels(11, 3.2, 1, 3)
    loads.plot(descent.loads, color=BLUE, linewidth=1)
    loads.axhline(1, color=VERMILLION, linewidth=1)
    heading(loads, "load of each expert / balanced share")
    balance.plot(descent.balance, color=BLUE)
    balance.axhline(1, color=VERMILLION, linewidth=1)
    heading(balance, f"load-balancing loss: {descent.balance[-1]:.3f} at the end")
    z.plot(descent.z, color=BLUE)
    heading(z, f"router z-loss: {descent.z[-1]:.3f} at the end")
    for axes, name in ((loads, "load / balanced share"), (balance, "loss"), (z, "loss")):
        axes.set(xlabel="step", ylabel=name, ylim=(0, None))
    return figure


# Skew against a fixed capacity ---------------------------------------------------------------------------------------


def zipf_counts(exponent: float, E: int, k: int, L: int = 8192, seed: int = 0) -> np.ndarray:
    """Routed rows of each expert, (E,), when an expert's popularity is its rank to the power -exponent."""
    return np.bincount(zipf_choices(exponent, E, k, L, seed).ravel(), minlength=E)


def zipf_choices(exponent: float, E: int, k: int, L: int, seed: int = 0) -> np.ndarray:
    """Experts of each token, (L, k) int32, when an expert's popularity is its rank to the power -exponent."""
    noise = np.random.default_rng(seed).gumbel(size=(L, E))  # Gumbel noise makes top k a draw without replacement
    logits = noise - exponent * np.log(np.arange(1, E + 1))  # (L, E)
    return gating.top_k(logits, k)


def capacity_picture(exponent: float, capacity_factor: float, E: int, k: int) -> Figure:
    """Each expert's rows under Zipf routing: those that fit a fixed capacity, those over it, and the empty places."""
    counts = zipf_counts(exponent, E, k)
    capacity = expert_capacity(int(counts.sum()), E, capacity_factor)
    rows = capacity_rows(counts.tolist(), capacity)
    figure, axes = panels(9, 3.4)
    draw_fates(axes, rows, hatch="///")
    axes.axhline(capacity, color=BLACK, linewidth=0.8)
    axes.annotate(f"capacity {capacity:,}", (E - 0.4, capacity), xytext=(2, 3), textcoords="offset points", ha="right")
    shares = f"{dropped_share(rows):.1%} of the rows are dropped, {padding_share(rows):.1%} of the places are padding"
    heading(axes, shares)
    axes.set(xlabel="expert, by popularity", ylabel="routed rows")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def draw_fates(axes: Axes, rows: Rows, **outline: Any) -> None:
    """Bars of each expert's computed, dropped and padded rows; ``outline`` is the look of the last."""
    kept, experts = np.array(rows.kept), range(len(rows.kept))
    axes.bar(experts, kept, label="computed", **filled(BLUE))
    axes.bar(experts, rows.dropped, bottom=kept, label="dropped", **filled(VERMILLION))
    axes.bar(experts, rows.padding, bottom=kept, label="padding", facecolor="none", edgecolor=GREY, **outline)


def dropped_share(rows: Rows) -> float:
    """Dropped rows over the routed ones; 0 if there are none."""
    return sum(rows.dropped) / max(sum(rows.routed), 1)


def padding_share(rows: Rows) -> float:
    """Padding over all rows that are computed, which is its share of their FLOPs and bytes; 0 if there are none."""
    return sum(rows.padding) / max(sum(rows.stored), 1)


def skew_picture(E: int, k: int, factors: Sequence[float] = (1.0, 1.25, 2.0)) -> Figure:
    """Draw dropped rows and padding against the Zipf exponent, a line for each capacity factor."""
    exponents = np.linspace(0, 2, 11)
    counts = [zipf_counts(exponent, E, k).tolist() for exponent in exponents]
    figure, shares = panels(9, 3.2, 1, 2, sharey=True)
    for factor, color in zip(factors, (VERMILLION, BLUE, SKY), strict=True):
        fates = [capacity_rows(one, expert_capacity(sum(one), E, factor)) for one in counts]
        for axes, share in zip(shares, (dropped_share, padding_share), strict=True):
            heights = [100 * share(rows) for rows in fates]
            axes.plot(exponents, heights, label=f"capacity factor {factor:g}", **drawn(color))
    for axes, title in zip(shares, ("dropped, % of the rows", "padding, % of the places"), strict=True):
        heading(axes, title)
        axes.set(xlabel="Zipf exponent", ylim=(0, 100))
    shares[0].set_ylabel("share, %")
    shares[0].legend(frameon=False)
    return figure
