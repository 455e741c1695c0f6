"""Experts on GPUs: recorded load and affinity, a toy whose every clustering fits on the page, what a step waits for.

Source: MoETuner (arXiv 2502.06643).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from IPython.display import Markdown
from matplotlib.figure import Figure

from moeblaze_ref.core.drawing import cell, heading, panels
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.memory.plots import BLUE, GREY, ORANGE, SKY, VERMILLION, filled
from moeblaze_ref.placement import baselines, document, findings, joint, simulate, trace
from moeblaze_ref.placement.ilp import moetuner
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.synthetic import synthetic_trace
from moeblaze_ref.placement.trace import Profile

GPU_COLORS = (SKY, ORANGE)

# Sixteen tokens, two layers of four experts, one expert a token: {(expert before, expert after): tokens}.
PATHS = {(0, 0): 3, (0, 1): 2, (1, 2): 3, (2, 1): 3, (2, 0): 1, (3, 3): 4}


def toy() -> Profile:
    """P and R of ``PATHS``."""
    topk = np.array([path for path, tokens in PATHS.items() for _ in range(tokens)], np.int16)  # (tokens, layers)
    return trace.profile(RoutingTrace(topk[:, :, None], 4))


# Recorded routing -----------------------------------------------------------------------------------------------------


def loads_picture(counts: Mapping[str, np.ndarray]) -> Figure:
    """Tokens of every expert over the layer's mean, a panel for each recording; the busier, the darker.

    Parameters
    ----------
    counts : mapping of str to array (layers, E)
        P of each recording, by its name.
    """
    figure, shown = panels(11, 4, 1, len(counts), framed=True, squeeze=False)
    for axes, (name, P) in zip(shown[0], counts.items(), strict=True):
        over_mean = P / P.mean(axis=1, keepdims=True)
        image = axes.imshow(over_mean, vmin=0, vmax=4, cmap="cividis_r", aspect="auto", interpolation="nearest")
        heading(axes, f"{name}: busiest expert {over_mean.max():.1f} times the mean")
        axes.set(xlabel="expert", ylabel="layer")
    figure.colorbar(image, ax=shown, label="tokens / mean of the layer", extend="max")
    return figure


def affinity_picture(profile: Profile, layer: int) -> Figure:
    """R between a layer and the next, counted, and over what independent layers would give."""
    assert profile.R is not None  # a trace gave it
    R = profile.R[layer]
    independent = np.outer(R.sum(axis=1), R.sum(axis=0)) / max(R.sum(), 1)
    figure, (counted, over) = panels(10, 4.4, 1, 2, framed=True)
    tokens = counted.imshow(R, cmap="Blues")
    heading(counted, "R: tokens that use both")
    figure.colorbar(tokens, ax=counted, label="tokens")
    ratio = np.divide(R, independent, out=np.ones_like(independent), where=independent > 0)
    shades = over.imshow(ratio, vmin=0, vmax=4, cmap="cividis_r")
    heading(over, "R / what independent layers would give")
    figure.colorbar(shades, ax=over, label="ratio", extend="max")
    for axes in (counted, over):
        axes.set(ylabel=f"expert in layer {layer}", xlabel=f"expert in layer {layer + 1}")
    return figure


# The toy --------------------------------------------------------------------------------------------------------------


def flows_picture(profile: Profile, placements: Mapping[str, Placement]) -> Figure:
    """Two layers of few experts on two GPUs, a panel a placement.

    Boxes are as tall as their tokens and coloured by GPU; bands are R.
    """
    assert profile.R is not None  # a trace gave it
    figure, shown = panels(3.7 * len(placements), 4, 1, len(placements), squeeze=False)
    for axes, (name, placement) in zip(shown[0], placements.items(), strict=True):
        tops = [_draw_layer(axes, profile.P[layer], placement.assignment[layer], layer) for layer in (0, 1)]
        _draw_bands(axes, profile.R[0], placement.assignment, tops)
        shares = placement.shares()
        T, C = simulate.loads(profile, shares), simulate.transitions(profile, shares)
        crossing = C.sum() - np.trace(C[0])
        heading(axes, f"{name}\nfullest GPU: {T[0].max():.0f}, then {T[1].max():.0f}; crossing: {crossing:.0f}")
        axes.set(xlim=(-0.35, 1.35), ylim=(profile.tokens + 2.2, -0.2))
        axes.set_axis_off()
    return figure


def _draw_layer(axes, load, gpus, layer):
    """Boxes of one layer, those of GPU 0 above; the top of each expert's."""
    top, tops = 0.0, {}
    for gpu in range(2):
        for expert in np.flatnonzero(gpus == gpu):
            left = layer - 0.3 * (1 - layer)
            look = {"facecolor": GPU_COLORS[gpu], "edgecolor": "white"}
            cell(axes, (left, top), (0.3, load[expert]), look, f"expert {expert}", fontsize="small")
            tops[int(expert)] = top
            top += load[expert]
        top += 1.5 * (gpu == 0)
    return tops


def _draw_bands(axes, R, gpus, tops):
    """A band from box to box for every count of R: grey where it stays on its GPU, vermilion where it changes."""
    leaves, arrives = dict(tops[0]), dict(tops[1])
    for before, after in zip(*R.nonzero(), strict=True):
        tokens, stays = R[before, after], gpus[0, before] == gpus[1, after]
        start, end = leaves[int(before)], arrives[int(after)]
        color = GREY if stays else VERMILLION
        axes.fill_between([0, 1], [start, end], [start + tokens, end + tokens], color=color, alpha=0.55, lw=0)
        leaves[int(before)] += tokens
        arrives[int(after)] += tokens


# The slowest parts of a step ------------------------------------------------------------------------------------------


def tails_picture(steps: Mapping[str, simulate.Step], title: str = "") -> Figure:
    """Two bars a method: what the slowest GPUs compute and what the slowest pairs transfer, over all layers."""
    figure, axes = panels(8, 0.9 + 0.42 * len(steps))
    compute = np.array([1e3 * step.compute_s.sum() for step in steps.values()])
    transfer = np.array([1e3 * step.transfer_s.sum() for step in steps.values()])
    axes.barh(list(steps), compute, label="slowest GPU computes", **filled(BLUE))
    axes.barh(list(steps), transfer, left=compute, label="slowest pair transfers", **filled(VERMILLION))
    for at, whole in enumerate(compute + transfer):
        axes.text(whole, at, f" {whole:.3g}", va="center")
    heading(axes, title)
    axes.set_xlabel("modelled step, ms")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.25 - 0.35 / len(steps)))
    return figure


def what_if(skew: float, gigabytes: float, steps: int = 300_000) -> Figure:
    """Four placements of a synthetic trace on four GPUs, and their tails.

    A skew of 0 is even, one of 1 is Zipf's; each pair of GPUs has ``gigabytes`` GB/s; annealing takes ``steps``.
    """
    counted = trace.profile(synthetic_trace(3000, 6, 16, 2, skew=skew, dependency=0.7, seed=1))
    node = simulate.cluster("nvlink", 4, d=2048, h=1024)
    on = simulate.Cluster(np.full((4, 4), 1e9 * gigabytes), node.row_bytes, node.token_s)
    found = joint.search(counted, on, limit=1.05, steps=steps)
    placements = {
        "contiguous": baselines.contiguous(counted, 4),
        "greedy": baselines.greedy(counted, 4),
        "moetuner": moetuner(counted, on, time_limit=2).placement,
        "joint": joint.fastest(counted, on, [found, baselines.greedy(counted, 4)]),
    }
    return tails_picture(
        {name: simulate.step(counted, placement.shares(), on) for name, placement in placements.items()},
        f"skew {skew:g}, {gigabytes:g} GB/s between two GPUs",
    )


def recorded(kind: str) -> tuple[Markdown, Figure]:
    """A record that the repository holds: its tables and its picture.

    Raises
    ------
    FileNotFoundError
        If it holds none; the message says which page names the command that makes it.
    """
    path = document.RECORDS[kind]
    if not path.exists():
        raise FileNotFoundError(f"No {path.name} yet: docs/placement.md says how it is made.")
    found = document.load(path)
    return Markdown(findings.summary(found)), document.picture(found)


def clusterings(E: int) -> Sequence[np.ndarray]:
    """Every way to split E experts between two GPUs, none empty, up to the names of the GPUs; (E,) each."""
    return [np.array([0, *(number >> bit & 1 for bit in range(E - 1))]) for number in range(1, 2 ** (E - 1))]
