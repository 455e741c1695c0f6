"""Time the whole layer, forward and backward: ours under the save policies, other systems, and the baselines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import block_sparse
from moeblaze_ref.backends.raw_cuda.layer import default_version
from moeblaze_ref.bench import accuracy, foreign, roofline, routing, timed_systems
from moeblaze_ref.bench.rows import TimedRow
from moeblaze_ref.bench.timed_systems import GRAPHED, OURS, OWN
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.memory import measure
from moeblaze_ref.nn import torch_grouped
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.nn.torch_capacity import CapacityMoE
from moeblaze_ref.nn.torch_graphs import graphed
from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.ceilings import Ceilings
from moeblaze_ref.runtime.clock import Contender, Lap, Samples, interleave, replayed
from moeblaze_ref.runtime.device import Device, NoGraph
from moeblaze_ref.systems.capacity import DEFAULT_FACTOR
from moeblaze_ref.verify.layers.faults import in_a_line

INPUTS = 3  # used alternately, so that none is in the L2 cache when its step begins
GRAPH_BYTES = 2**29  # of a hidden tensor: above it launches cost a step nothing, and a graph's memory is too much


@dataclass(frozen=True)
class Choice:
    """Systems, policies and routings to time."""

    #: Of ``timed_systems.SYSTEMS``; `systems_to_time` says which of them a layer is timed on.
    systems: Sequence[str] = (OURS, GRAPHED, "grouped_mm", "grouped_mm_compiled", "gather_sum_compiled")
    policies: Sequence[str] = ("minimal",)  #: of ``config.POLICIES``: one row of each of `OWN` for each
    version: str | None = None  #: of `OWN`; by default the layer's own
    routing: str = "uniform"  #: as of `routing.exponent_of`; any other is timed interleaved with this one
    capacity_factor: float = DEFAULT_FACTOR  #: of the system ``capacity``
    repetitions: int = 15  #: of each row
    #: Of ``foreign.SYSTEMS``: each is timed too if its package is there and its first step runs.
    where_possible: Sequence[str] = ()


class Subject(NamedTuple):
    """System, policy and routing of one row."""

    system: str
    policy: str | None
    routing: str


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """One system on one layer, forward and backward. Its ratios are to each other system but `OWN` on its routing."""

    system: str
    policy: str | None  #: None of a system without policies; so is ``version``
    version: str | None
    routing: str  #: where the router sent the tokens
    fwd_ms: float  #: medians of both parts
    bwd_ms: float
    #: The same step replayed as a CUDA graph, without the host; None for large layers, where no graph can be made, and
    #: of `GRAPHED`, whose step launches graphs.
    graph_ms: float | None
    #: Bytes that autograd keeps for the backward, weights excluded. None for `GRAPHED`: its graphs hold what they need
    #: from their capture on, and a step keeps and allocates next to nothing.
    kept_bytes: int | None
    #: The most that is allocated at a time in a step, weights excluded; input and gradients included. None of
    #: `GRAPHED`.
    peak_bytes: int | None
    roofline_ms: float  #: of `roofline.layer_roofline_ms`
    pct_of_roofline: float  #: the roofline over the median
    #: FLOPs of the experts' products over the median, in percent of the dense product's rate: alone, and interleaved.
    #: Of rows that are dropped there are none, and those of padding do not count.
    pct_of_cublas: float
    pct_of_hot_cublas: float
    time_over_uniform: float | None  #: the median over that of the same system on uniform routing; None on that itself
    best_baseline: str | None = (
        None  #: the fastest system of ``ratio_to``, and how many times as fast as it this one is
    )
    times_as_fast: float | None = None
    left_out: dict[str, str] | None = None  #: systems that could not be timed, and why
    activation: str = "swiglu"  #: of every row from before this column
    capacity_factor: float | None = None  #: of ``capacity``, whose errors are over the choices that it should compute
    dropped_rows: int | None = None  #: this and the next two as `timed_systems.losses` of the input that is compared
    lost_tokens: int | None = None
    padding_rows: int | None = None


def is_small(config: MoEConfig) -> bool:
    """Return True if the layer is small enough to time its steps as CUDA graphs, too."""
    return config.R * config.h * config.itemsize <= GRAPH_BYTES


def systems_to_time(config: MoEConfig, choice: Choice) -> list[str]:
    """The chosen systems, without `GRAPHED` if the layer is large."""
    return [system for system in choice.systems if system != GRAPHED or is_small(config)]


class Scene:
    """The weights, tokens and systems of one layer; every timed step starts from them.

    The layer's dtype is float32, bfloat16 or float16, as the systems take it. All have the weights of ``layer``.
    ``modules`` are the chosen systems of ``moeblaze_ref.nn.systems``, ``baselines`` the layers of other projects.
    ``left_out`` says why a system of `Choice.where_possible` is not among them.

    Raises
    ------
    ValueError
        If the package of another chosen layer cannot be imported.
    """

    def __init__(self, config: MoEConfig, choice: Choice, device: Device):
        c, place = config, {"device": device.torch_device, "dtype": getattr(torch, config.dtype)}
        torch.manual_seed(0)
        self.layer = RoutedExperts(c.d, c.h, c.E, c.k, c.activation, **place)
        self.d_out = torch.randn(c.L, c.d, **place)  # (L, d)
        self._routings = tuple(dict.fromkeys(("uniform", choice.routing)))
        self._tokens = {name: [self._routed(c, name) for _ in range(INPUTS)] for name in self._routings}
        systems = systems_to_time(c, choice)
        own = [(system, policy) for system in OWN if system in systems for policy in choice.policies]
        others = [system for system in systems if system not in OWN]
        options = {"capacity": {"capacity_factor": choice.capacity_factor}}
        modules = [name for name in others if name in timed_systems.MODULES]
        self.modules = {name: timed_systems.module_of(name, self.layer, **options.get(name, {})) for name in modules}
        self.baselines = {name: foreign.baseline(name, self.layer) for name in others if name in foreign.SYSTEMS}
        self.left_out: dict[str, str] = {}
        for name in choice.where_possible:
            try:
                self.baselines[name] = foreign.baseline(name, self.layer)
                others.append(name)
            except ValueError as error:
                self.left_out[name] = str(error)
        self._layers: dict[tuple[str, str | None], timed_systems.Layer] = {}
        self._layers |= {row: self._own(*row, choice) for row in own}
        self._layers |= {(name, None): self._function(name) for name in others}

    def _own(self, system: str, policy: str, choice: Choice) -> timed_systems.Layer:
        module = timed_systems.module_of(OURS, self.layer, policy=policy, version=choice.version)
        if system == GRAPHED and isinstance(module, MoELayer):
            module = graphed(module, self._tokens["uniform"][0])
        return timed_systems.layer_of(module)

    def _function(self, system: str) -> timed_systems.Layer:
        if system in self.modules:
            return timed_systems.layer_of(self.modules[system])
        return self.baselines[system].layer if system in self.baselines else torch_grouped.build(system, self.layer)

    def _routed(self, config: MoEConfig, name: str) -> Tensor:
        """Tokens (L, d) that the router sends where this routing wants them."""
        x = torch.randn_like(self.d_out)
        logits = routing.wanted_logits(config.L, config.E, name, x.device)
        return routing.steer(x, self.layer.wg.detach(), logits).requires_grad_()

    def subjects(self) -> list[Subject]:
        """Return the subject of every row, ours first."""
        return [Subject(*system, name) for name in self._routings for system in self._layers]

    def leave_out(self, system: str, why: str) -> None:
        """Take a system out."""
        self.left_out[system] = why
        del self._layers[system, None], self.baselines[system]

    def run(self, subject: Subject, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output (L, d) and choice of experts (L, k) of one system's forward."""
        return self._layers[subject.system, subject.policy](x)

    def weights(self, subject: Subject) -> accuracy.Weights:
        """Return the system's weights: ours, or copies in another project's layout."""
        other = self.baselines.get(subject.system)
        return accuracy.weights_of(self.layer) if other is None else other.weights

    def tokens(self, subject: Subject, number: int = 0) -> Tensor:
        """The input (L, d) of this round."""
        return self._tokens[subject.routing][number % INPUTS]

    def step(self, subject: Subject, number: int = 0, lap: Lap = lambda: None) -> tuple[Tensor, ...]:
        """A forward, a lap, and the gradients of x and of every weight."""
        x = self.tokens(subject, number)
        out, _ = self.run(subject, x)
        lap()
        return torch.autograd.grad(out, [x, *self.weights(subject).leaves.values()], self.d_out)


def time_layer(preset: str, config: MoEConfig, choice: Choice, device: Device) -> list[dict[str, Any]]:
    """Time one layer with every chosen system, policy and routing, interleaved: a `Row` as dict for each.

    ``preset`` is the layer's name in the rows.
    """
    torch.compiler.reset()  # what was compiled for another layer would count against torch's limit of recompilations
    scene = Scene(config, choice, device)
    _leave_out_what_fails(scene, choice)
    subjects = scene.subjects()
    errors = {subject: error_of(scene, subject) for subject in subjects}
    contenders = {subject: partial(scene.step, subject) for subject in subjects}
    ceilings = device.rested
    samples = interleave(device.ceilings() | contenders, choice.repetitions, device)
    hot = device.rates(samples)
    graphs = graph_times(scene, subjects, config, choice.repetitions, device)
    head: dict[str, Any] = {"kind": "layer", "preset": preset, "shape": config.sizes}
    head |= {"dtype": config.dtype, "activation": config.activation}
    head |= {"roofline_ms": roofline.layer_roofline_ms(config, ceilings), **roofline.columns(ceilings, hot)}
    lost = {subject: _losses(scene, subject, config) for subject in subjects}
    versions = _versions(scene, config, choice, device)
    return [
        asdict(
            Row(
                **head,
                **subject._asdict(),
                version=versions.get(subject.system),
                capacity_factor=choice.capacity_factor if subject.system == "capacity" else None,
                **_times(subject, samples),
                left_out=scene.left_out or None,
                **_shares(samples[subject].median, config, lost[subject], ceilings, hot),
                **_memory(scene, subject, device),
                graph_ms=graphs.get(subject),
                **errors[subject].columns,
                **lost[subject]._asdict(),
            )
        )
        for subject in subjects
    ]


def _leave_out_what_fails(scene: Scene, choice: Choice) -> None:
    """Run the first step of each system that is timed where possible, and take it out if it fails."""
    for system in choice.where_possible:
        if system in scene.baselines:
            try:
                scene.step(Subject(system, None, "uniform"))
            except Exception as error:  # layers of other projects have exceptions of their own
                scene.leave_out(system, in_a_line(error))


def error_of(scene: Scene, subject: Subject) -> accuracy.Error:
    """Return the error of a step, which is its first if there was none: it compiles."""
    x = scene.tokens(subject).detach()
    module, keeps = scene.modules.get(subject.system), None
    if subject.system == "capacity" and isinstance(module, CapacityMoE):
        keeps = partial(timed_systems.kept_choices, module, x)
    return accuracy.worst_error(partial(scene.run, subject), scene.layer, x, scene.d_out, keeps, scene.weights(subject))


def _losses(scene: Scene, subject: Subject, config: MoEConfig) -> timed_systems.Losses:
    if subject.system not in scene.modules:
        return timed_systems.Losses()
    with torch.no_grad():
        _, chosen = scene.run(subject, scene.tokens(subject))
    return timed_systems.losses(scene.modules[subject.system], config, chosen)


def _versions(scene: Scene, config: MoEConfig, choice: Choice, device: Device) -> dict[str, str]:
    """Return the versions of the systems that have versions."""
    executor = bridge_to(device.torch_device).executor
    versions = dict.fromkeys(OWN, choice.version or default_version(config.dtype, config.d, config.h, executor))
    for name, module in scene.modules.items():
        if isinstance(module, BlockSparseMoE):
            versions[name] = block_sparse.default_version(config.dtype, config.d, module.block, executor)
    return versions


def _shares(
    step_ms: float, config: MoEConfig, lost: timed_systems.Losses, ceilings: Ceilings, hot: Ceilings
) -> dict[str, Any]:
    """The columns in percent."""
    kept = 1 - (lost.dropped_rows or 0) / config.R
    flops_per_ms = kept * roofline.layer_flops(config) / step_ms
    return {
        "pct_of_roofline": 100 * roofline.layer_roofline_ms(config, ceilings) / step_ms,
        "pct_of_cublas": 100 * flops_per_ms / ceilings.flops_per_ms,
        "pct_of_hot_cublas": 100 * flops_per_ms / hot.flops_per_ms,
    }


def _times(subject: Subject, samples: dict[Any, Samples]) -> dict[str, Any]:
    """The columns that come from the clock."""
    mine = samples[subject]
    beside = {other: taken.median / mine.median for other, taken in samples.items() if isinstance(other, Subject)}
    compared = [other for other in beside if other.system not in (*OWN, subject.system)]
    ratios = {other.system: beside[other] for other in compared if other.routing == subject.routing}
    best = min(ratios, key=ratios.__getitem__, default=None)
    uniform = subject._replace(routing="uniform")
    return {
        "step_ms": mine.median,
        "quartiles_ms": mine.quartiles,
        "fwd_ms": mine.part(0),
        "bwd_ms": mine.part(1),
        "ratio_to": ratios,
        "best_baseline": best,
        "times_as_fast": None if best is None else ratios[best],
        "time_over_uniform": None if subject == uniform else 1 / beside[uniform],
    }


def graph_times(
    scene: Scene, subjects: Sequence[Subject], config: MoEConfig, repetitions: int, device: Device
) -> dict[Subject, float]:
    """Median of each step as a graph, where the layer is small and a graph can be made; no graph holds other graphs."""
    if not is_small(config):
        return {}
    launched = [subject for subject in subjects if subject.system != GRAPHED]
    replays: dict[Subject, Contender] = {}
    for subject in launched:
        try:
            replays[subject] = replayed(device.captured(partial(scene.step, subject)))
        except NoGraph:
            continue
    samples = interleave(replays, repetitions, device) if replays else {}
    return {subject: taken.median for subject, taken in samples.items()}


def _memory(scene: Scene, subject: Subject, device: Device) -> dict[str, Any]:
    """Return the bytes that a step saves for backward, and its peak; input and output gradient live throughout."""
    if subject.system == GRAPHED:
        return {"kept_bytes": None, "peak_bytes": None}
    x = scene.tokens(subject)
    scene.step(subject)  # a workspace that was freed with its graph is taken again before the count
    peak = device.peak_bytes(partial(scene.step, subject)) + x.nbytes + scene.d_out.nbytes
    forward = partial(scene.run, subject)
    weights = scene.weights(subject).leaves.values()
    return {"kept_bytes": measure.kept_bytes(forward, x, exclude=weights), "peak_bytes": peak}
