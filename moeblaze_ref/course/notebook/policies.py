"""Save policies: the work that each makes, counted and then scaled by formula, and pictures of bytes against time."""

import functools
import gc
import tracemalloc
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from IPython.display import Markdown
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor, nn

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.bench import results
from moeblaze_ref.bench.timed_systems import OURS
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import POLICIES, MoEConfig, is_gated, preset
from moeblaze_ref.core.drawing import heading, panels
from moeblaze_ref.core.units import GB, GIB
from moeblaze_ref.course.notebook.gemm import (
    HBM_BYTES_PER_SECOND,
    PEAK_FLOPS,
    UNIT_COLORS,
    header_symbols,
    ridge,
)
from moeblaze_ref.course.notebook.markdown import bullets
from moeblaze_ref.course.notebook.sources import evaluate, stated_bytes
from moeblaze_ref.memory.accounting import account, uniform_counts
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, dotted, drawn
from moeblaze_ref.nn.torch_layer import MoELayer, MoEOutput
from moeblaze_ref.runtime import ceil_div, simt_executor
from moeblaze_ref.runtime.simt.executor import LaunchReport, SimtExecutor
from moeblaze_ref.systems.layer import intermediates
from moeblaze_ref.verify.cases import make_case

POLICY_COLORS = dict(zip(POLICIES, (PURPLE, ORANGE, BLUE, GREEN), strict=True))

# A layer under each policy -------------------------------------------------------------------------------------------


def seeded_layer(config: MoEConfig, policy: str) -> MoELayer:
    """A torch layer of these sizes, with the same weights under every policy."""
    torch.manual_seed(0)
    return MoELayer(config.d, config.h, config.E, config.k, policy=policy)


def gradients(module: nn.Module, x: Tensor, run: Callable[[Tensor], MoEOutput] | None = None) -> tuple[Tensor, ...]:
    """Gradients of x and of the parameters, of one number that all outputs decide.

    ``run`` calls the module in its own way, such as under a checkpoint; by default it is called as it is.
    """
    result = (run or module)(x)
    weights = torch.linspace(-1, 1, result.out.numel()).reshape(result.out.shape)
    loss = (result.out * weights).sum() + result.load_balancing_loss + result.router_z_loss
    return torch.autograd.grad(loss, [x, *module.parameters()])


# Bytes that survive a call ------------------------------------------------------------------------------------------


def surviving_bytes(fn: Callable, *args) -> list[int]:
    """The sizes of the numpy arrays that ``fn(*args)`` allocates and its result keeps alive, from large to small.

    It does not matter what holds them: autograd, a closure, or a list. On a CPU the layer allocates numpy arrays alone,
    and torch's tensors are views of them. What torch allocates itself, such as x, is not seen.

    Source: ``numpy.lib.tracemalloc_domain``, by which numpy reports its arrays.
    """
    fn(*args)  # a first call leaves what is compiled and cached
    gc.collect()
    tracemalloc.start()
    try:
        result = fn(*args)
        numpys = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([numpys]).traces
        del result  # not earlier: it holds what is looked for
        return sorted((trace.size for trace in traces), reverse=True)
    finally:
        tracemalloc.stop()


# Work, counted and scaled -------------------------------------------------------------------------------------------

VERSION = "3_mma"
TILE = tiles.DEFAULTS[VERSION]
FILES = {  # of the kernels between x and out, forward and backward
    **dict.fromkeys(("expert_up", "d_x_rows", "d_w"), f"expert_up/{VERSION}.cu"),
    **dict.fromkeys(("expert_down", "d_hidden", "d_w3"), f"expert_down/{VERSION}.cu"),
    **dict.fromkeys(("gate_rows", "d_gates"), "expert_down/gates.cu"),
    "act": "activation/1_elementwise.cu",
    "combine": "combine/2_vector.cu",
    "sum_rows": "expert_up/sum_rows.cu",
}
PRODUCTS = {"expert_up": "G", "expert_down": "1", "d_hidden": "1", "d_w3": "1", "d_x_rows": "G", "d_w": "1"}
TENSORS = {  # bytes of what the kernels are given, by the names of their parameters
    **dict.fromkeys(("x", "d_x", "out", "d_out"), "s L d"),
    **dict.fromkeys(("rows", "y"), "s R d"),
    **dict.fromkeys(("a", "b", "act_a", "y_swi", "d_a", "d_b", "d_hidden", "gated_y"), "s R h"),
    **dict.fromkeys(("w1", "w2", "w3", "d_w", "d_w3"), "s E d h"),
    **dict.fromkeys(("gates", "d_gates", "gate_of_row", "token_index_map", "expert_token_indices"), "4 R"),
    "expert_token_offsets": "4 E + 4",
    "gate_terms": "4 R terms",
}
TINY = {"L": 150, "d": 16, "h": 24, "E": 4, "k": 2}  # of a layer that is run to see its launches


def count_layer(config: MoEConfig, policy: str) -> dict[str, list[LaunchReport]]:
    """Forward and backward of `raw_cuda.layer` on the CPU, counted: the launches between x and out.

    Parameters
    ----------
    config : MoEConfig
        A small layer in bfloat16 or float16; its routing is skewed (Zipf).
    policy : str
        One of ``config.POLICIES``.

    Returns
    -------
    dict
        "forward" and "backward": the launches in order. The router, the gates and the dispatch, whose work is the
        same under every policy, are left out, and so is the routed copy of x, which a library makes.
    """
    checks.check_name("dtype of 3_mma", config.dtype, gemm.NARROW)
    sizes = {name: getattr(config, name) for name in "LdhEk"}
    case = make_case(**sizes, routing="zipf", activation=config.activation).astype(config.dtype)
    executor = SimtExecutor()
    with executor.recording() as forward:
        made = raw_layer.forward(
            case.x, case.weights, config.k, config.activation, policy, executor=executor, version=VERSION
        )
    with executor.recording() as backward:
        raw_layer.backward(case.d_out, made.saved, case.weights, executor=executor, version=VERSION)
    passes = {"forward": forward, "backward": backward}
    return {name: [launch for launch in launches if launch.kernel in FILES] for name, launches in passes.items()}


class Step(NamedTuple):
    """FLOPs and bytes of one kernel in a layer."""

    kernel: str
    flops: int  #: of matrix products, padding not counted
    asked: int  #: bytes that its threads ask of global memory
    once: int  #: bytes of the tensors that it reads or writes, each once


def steps(config: MoEConfig, policy: str, lengths: Sequence[int] | None = None) -> list[Step]:
    """The kernels of forward and backward at any size, from the launches of a tiny layer and the headers' formulas.

    Parameters
    ----------
    config : MoEConfig
        In bfloat16 or float16, d and h multiples of 8.
    policy : str
    lengths : sequence of int, optional
        Rows of each expert. Default: even routing.
    """
    lengths = uniform_counts(config) if lengths is None else lengths
    launches = _tiny_launches(config.activation, config.dtype, checks.check_name("policy", policy, POLICIES))
    found = [_step(launch, config, lengths) for launch in launches]
    return [_routed_copy(config), *found] if "routed_x" in intermediates(policy, config.activation) else found


@functools.cache
def _tiny_launches(activation: str, dtype: str, policy: str) -> list[LaunchReport]:
    passes = count_layer(MoEConfig(**TINY, activation=activation, dtype=dtype), policy)
    return [*passes["forward"], *passes["backward"]]


def _step(launch, config, lengths):
    symbols = _symbols(launch, config, lengths)
    products = evaluate(PRODUCTS.get(launch.kernel, "0"), symbols)
    asked = _stated(launch.kernel)
    touched = [TENSORS[name] for name in _touched(launch)]
    return Step(
        launch.kernel,
        2 * config.R * config.d * config.h * products,
        *(int(sum(evaluate(formula, symbols) for formula in formulas)) for formulas in (asked, touched)),
    )


@functools.cache
def _stated(kernel):
    """Formulas of the bytes that a kernel's header states."""
    return stated_bytes(FILES[kernel])[kernel].values()


def _touched(launch):
    """Names of the tensors that a launch reads or writes; two that share a buffer, one of them written, are two."""
    buffers = (name for name, traffic in launch.buffers.items() if traffic.read_bytes + traffic.written_bytes)
    return [name for buffer in buffers for name in buffer.split(" = ")]


def _symbols(launch, config, lengths):
    """Values of every symbol of the headers' formulas, for a kernel that stores what it stored in this launch."""
    written = {name for name, traffic in launch.buffers.items() if traffic.written_bytes}
    return header_symbols(VERSION, config, lengths) | {
        "P": int("a" in written),
        "Y": int("y_swi" in written),
        "k": config.k,
        "terms": gemm.gate_terms(VERSION, config.h, TILE),
        "more": 0,
        "blocks": _blocks(launch.kernel, config),
    }


def _blocks(kernel, config):
    """Blocks of a kernel's grid, where its formula has them."""
    weights = {"d_w": (config.d, config.h), "d_w3": (config.h, config.d)}
    if kernel in weights:
        return prod(gemm.weights_launch(simt_executor(), VERSION, config.E, *weights[kernel], TILE)["grid"])
    width = config.d if kernel in ("expert_down", "d_x_rows") else config.h
    results = 1 + is_gated(config.activation) if kernel == "expert_up" else 1
    return prod(gemm.rows_launch(simt_executor(), VERSION, config, width, TILE, results)["grid"])


def _routed_copy(config):
    """routed_x, made by the array library: rows are read by index and written."""
    copy = config.R * config.d * config.itemsize
    return Step("routed copy", 0, 2 * copy + 4 * config.R, copy + config.L * config.d * config.itemsize + 4 * config.R)


def seconds(work: Sequence[Step], traffic: str) -> float:
    """A model: kernel after kernel, each as long as its FLOPs or its bytes need at the peaks of an H200.

    Parameters
    ----------
    work : sequence of Step
    traffic : str
        "once": every tensor moves once for each kernel, as if caches were perfect. "asked": every byte that threads
        ask for comes from HBM, as if there were no cache.
    """
    checks.check_name("traffic", traffic, TRAFFIC)
    peak = PEAK_FLOPS["bf16 tensor cores"]
    return sum(max(step.flops / peak, getattr(step, traffic) / HBM_BYTES_PER_SECOND) for step in work)


TRAFFIC = {"once": "model, perfect caches", "asked": "model, no caches"}

# Bytes against time -------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Cost of a policy for one layer and step."""

    policy: str
    kept_bytes: int
    seconds: float  #: forward and backward


def on_front(costs: Sequence[Cost]) -> list[Cost]:
    """Return the Pareto front, from fast to slow."""

    def beaten(one):
        return any(
            other.kept_bytes <= one.kept_bytes and other.seconds <= one.seconds and other[1:] != one[1:]
            for other in costs
        )

    return sorted((one for one in costs if not beaten(one)), key=lambda one: one.seconds)


def modelled(config: MoEConfig) -> dict[str, list[Cost]]:
    """Every policy's `Cost` under both kinds of ``TRAFFIC``, by its description."""
    work = {policy: steps(config, policy) for policy in POLICIES}
    kept = {policy: account(config, "moeblaze", policy).kept_bytes for policy in POLICIES}
    return {
        label: [Cost(policy, kept[policy], seconds(work[policy], traffic)) for policy in POLICIES]
        for traffic, label in TRAFFIC.items()
    }


FILLED = (True, False)  # marks of a panel's first series, and of its second


def pareto_picture(layers: Mapping[str, Mapping[str, Sequence[Cost]]]) -> Figure:
    """Kept bytes against time, a panel a layer: down and left is better, and the line joins the Pareto front.

    ``layers`` maps a title to {series: costs}, one or two series; the first has filled marks, the second hollow ones.
    Time is given beyond the fastest policy of the same series, so that series can be compared; the fastest's own
    time stands in the panel's title.
    """
    columns = min(2, len(layers))
    rows = ceil_div(len(layers), columns)
    figure, places = panels(5.5 * columns, 3.4 * rows + 0.8, rows, columns, squeeze=False)
    for axes in places.flat[len(layers) :]:
        axes.set_visible(False)
    for axes, (title, series) in zip(places.flat, layers.items(), strict=False):
        fastest = [min(cost.seconds for cost in costs) for costs in series.values()]
        for costs, base, filled in zip(series.values(), fastest, FILLED, strict=False):
            _draw_series(axes, costs, base, filled)
        times = ", ".join(f"{_milliseconds(base)} ({label})" for label, base in zip(series, fastest, strict=True))
        axes.set_title(f"{title}\n0% is {times}", loc="left", fontsize="small")
        axes.set(ylim=(0, None), xlabel="time beyond the fastest, %", ylabel="kept, GiB")
        axes.margins(x=0.12)
    _pareto_legend(figure, layers)
    return figure


def _milliseconds(seconds):
    return f"{np.format_float_positional(seconds * 1e3, 3, fractional=False, trim='-')} ms"


def _draw_series(axes, costs, base, filled):
    def place(cost):
        return 100 * (cost.seconds / base - 1), cost.kept_bytes / GIB

    axes.plot(*zip(*map(place, on_front(costs)), strict=True), color=GREY, linewidth=1, zorder=1)
    for cost in costs:
        look = dotted(POLICY_COLORS[cost.policy])
        face = look["color"] if filled else "none"
        axes.plot(*place(cost), markersize=9, markerfacecolor=face, clip_on=False, zorder=3, **look)


def _pareto_legend(figure, layers):
    """The policies that some panel shows, and the series, of which every panel has the same, if there are several."""
    (axes, *_), (series, *_) = figure.axes, layers.values()
    shown = {cost.policy for one in layers.values() for costs in one.values() for cost in costs}
    look = {"linestyle": "", "marker": "o", "markersize": 9}
    colors = {policy: color for policy, color in POLICY_COLORS.items() if policy in shown}
    marks = [axes.plot([], [], label=policy, **look | dotted(color))[0] for policy, color in colors.items()]
    for label, filled in zip(series if len(series) > 1 else (), FILLED, strict=False):
        face = BLACK if filled else "none"
        marks += axes.plot([], [], markeredgecolor=BLACK, markerfacecolor=face, label=label, **look)
    marks += axes.plot([], [], color=GREY, label="Pareto front")
    figure.legend(handles=marks, loc="outside lower center", ncols=4 if len(figure.axes) > 1 else 3, frameon=False)


def modelled_pareto(L: int, d: int, h: int, E: int, k: int, activation: str) -> Figure:
    """`pareto_picture` of one layer in bfloat16 by the model."""
    config = MoEConfig(L, d, h, E, k, activation)
    title = f"L = {L:,}, d = {d:,}, h = {h:,}, E = {E}, k = {k}, {activation}"
    return pareto_picture({title: modelled(config)})


# When recomputing pays ----------------------------------------------------------------------------------------------


class Price(NamedTuple):
    """Cost to recompute a tensor instead of saving it."""

    tensor: str
    flops_per_byte: float  #: FLOPs for each byte that need not be kept
    unit: str  #: of ``PEAK_FLOPS``


SILU_FLOPS = 4  # exp, add, divide, multiply: one each, as if each were one FLOP


def prices(d: int, h: int, itemsize: int = 2) -> list[Price]:
    """The tensors between x and out, and the router's probabilities, by what a byte of each costs to make again."""
    elementwise, product = "float32 units", "bf16 tensor cores"
    return [
        Price("y_swi, from act(a) and b", 1 / itemsize, elementwise),
        Price("act(a), from a", SILU_FLOPS / itemsize, elementwise),
        Price("probs, from x", 2 * d / 4, product),
        Price("a and b, from x", 2 * d / itemsize, product),
        Price("y, from y_swi", 2 * h / itemsize, product),
    ]


def price_picture(d: int, h: int) -> Figure:
    """`prices` on a logarithmic axis, beside what each unit computes while HBM moves a byte."""
    figure, axes = panels(9, 3.2)
    listed = prices(d, h)
    for row, price in enumerate(listed):
        axes.plot(price.flops_per_byte, row, "o", color=UNIT_COLORS[price.unit], markersize=9)
        where: dict[str, Any] = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
        number = f"{price.flops_per_byte:,.0f}" if price.flops_per_byte >= 10 else f"{price.flops_per_byte:g}"
        axes.annotate(number, (price.flops_per_byte, row), **where)
    for unit, color in UNIT_COLORS.items():
        axes.axvline(ridge(unit), color=color, linewidth=1, label=f"{unit}: {ridge(unit):,.0f} FLOPs a byte of HBM")
    axes.set(xscale="log", xlim=(0.2, 1e5), ylim=(len(listed) - 0.4, -0.6))
    axes.set_yticks(range(len(listed)), [price.tensor for price in listed])
    axes.set_xlabel("FLOPs to make again, for each byte that is not kept")
    heading(axes, f"d = {d:,}, h = {h:,}, bfloat16")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def stack_tokens(config: MoEConfig, policy: str, layers: int, capacity_bytes: int) -> int:
    """The largest L of a stack of layers: all keep their share, and the last one is at its forward's peak.

    `accounting.largest_tokens` is the case of one layer; what it leaves out is left out here.

    Raises
    ------
    ValueError
        If not even L = 0 fits, layers is below 1, or the policy is unknown.
    """
    checks.check_int("layers", layers, at_least=1)
    checks.check_int("capacity_bytes", capacity_bytes, at_least=1)

    def needed(tokens):
        one = account(config.replace(L=tokens), "moeblaze", policy)
        return (layers - 1) * one.kept_bytes + one.peak_bytes

    fitting = bisect_right(range(checks.MAX_ROUTED_ROWS // config.k + 1), capacity_bytes, key=needed)
    if fitting == 0:
        raise ValueError(f"capacity_bytes is {capacity_bytes}, but even L = 0 needs {needed(0)} bytes")
    return fitting - 1


def budget_picture(name: str, layers: int) -> Figure:
    """A token's modelled time in a layer, against the bytes that a stack of such layers has for activations.

    The layer is a preset's, but for its L: every policy runs with the largest that fits, and a larger batch is run in
    microbatches of that size, as gradient accumulation does. Small ones are slow: each reads the weights again.
    """
    config = preset(name).config
    figure, axes = panels(9, 4.2)
    budgets = np.geomspace(0.5, 128, 17)  # GB
    for policy, color in POLICY_COLORS.items():
        times = [token_seconds(config, policy, layers, int(budget * GB)) * 1e6 for budget in budgets]
        axes.loglog(budgets, times, label=policy, linewidth=2 if policy != "paper" else 1, **drawn(color))
    axes.set(xlabel=f"bytes for the activations of {layers} layers, GB (1e9)", ylabel="microseconds a token and layer")
    for axis, base, subs in ((axes.xaxis, 2, (1,)), (axes.yaxis, 10, (1, 2, 5))):
        axis.set_major_locator(LogLocator(base, subs))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,.3g}")
    heading(axes, f"{name}, a model with perfect caches, not a measurement")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def token_seconds(config: MoEConfig, policy: str, layers: int, budget_bytes: int) -> float:
    """A token's modelled seconds in one layer, forward and backward, at the largest L that fits; infinite if none does.

    The configuration's own L is not used; ``layers`` and ``budget_bytes`` are those of `stack_tokens`.
    """
    L = stack_tokens(config, policy, layers, budget_bytes)
    return seconds(steps(config.replace(L=L), policy), "once") / L if L else inf


def break_even(config: MoEConfig, layers: int) -> float:
    """GB (1e9) for a stack's activations below which `inputs` has the faster token and above which `minimal` has.

    To a tenth; infinite if `minimal` is not faster with 1,000 GB. By the model, as `token_seconds`.
    """

    def minimal_is_faster(tenths):
        budget = tenths * GB // 10
        return token_seconds(config, "minimal", layers, budget) < token_seconds(config, "inputs", layers, budget)

    first = bisect_left(range(1, 10_001), True, key=minimal_is_faster) + 1
    return first / 10 if first <= 10_000 else inf


# Measured on a GPU --------------------------------------------------------------------------------------------------


def read_measured(path: Path = results.RECORDED) -> dict[str, Any]:
    """Times of the policies that were measured on a GPU: what `bench.results.load` gives, with our layer's rows alone.

    Each row is one of `bench.layer.Row`, on uniform routing.

    Raises
    ------
    FileNotFoundError
        If nothing was measured yet.
    ValueError
        If the file is not of this kind, or holds no such row.
    """
    measured = results.load(path)
    rows = [row for row in results.rows_of(measured, "layer") if row["system"] == OURS and row["routing"] == "uniform"]
    if not rows:
        raise ValueError(f"{path.name} must hold at least one row of the layer under a policy")
    return measured | {"rows": rows}


def provenance(measured: Mapping[str, Any]) -> Markdown:
    """Return the provenance of `read_measured`: device, versions and commit."""
    names = {"clocks": "clocks (SM, memory, and their maxima)"}
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    place = {name: value for name, value in measured.items() if name not in ("code", "runs", "rows")}
    shown = place | {"versions": versions}
    return bullets(f"{names.get(name, name)}: {value}" for name, value in shown.items())


def measured_pareto(measured: Mapping[str, Any]) -> Figure:
    """`pareto_picture` of measured times, a panel for each shape and dtype; of several runs, the first."""
    layers: dict[str, dict[str, list[Cost]]] = {}
    first = min(row["run"] for row in measured["rows"])
    for row in measured["rows"]:
        if row["run"] == first:
            sizes = ", ".join([*(f"{name} = {size:,}" for name, size in row["shape"].items()), row["dtype"]])
            title = f"{row['preset']}: {sizes}" if row["preset"] else sizes
            cost = Cost(row["policy"], row["kept_bytes"], row["step_ms"] / 1e3)
            layers.setdefault(title, {"measured": []})["measured"].append(cost)
    return pareto_picture(layers)
