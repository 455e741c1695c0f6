"""Turn a user's request into jobs; each job times one layer and returns its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moeblaze_ref.backends.raw_cuda import expert_up
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.bench import (
    KINDS,
    LAYER_PRESETS,
    counters,
    first_step,
    growth,
    host,
    ladder,
    launched,
    layouts,
    roofline,
    routing,
    stages,
    timed_systems,
)
from moeblaze_ref.bench import layer as whole_layer
from moeblaze_ref.bench.timed_systems import OWN
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import POLICIES, PRESETS, MoEConfig, preset
from moeblaze_ref.core.units import MIB
from moeblaze_ref.runtime.device import Gpu
from moeblaze_ref.systems.capacity import check_factor

Job = Callable[..., list[dict[str, Any]]]

ALL = tuple((name, None) for name in LAYER_PRESETS)
LADDERS = tuple((name, None) for name in ladder.PRESETS)
LAYOUTS = tuple((name, None) for name in layouts.PRESETS)
HOSTS = tuple((name, None) for name in host.PRESETS)
FIRST_STEPS = tuple((name, None) for name in first_step.PRESETS)
GROWN = ((growth.PRESET, growth.TOKENS),)
COUNTED = tuple((name, None) for name in counters.PRESETS)
WHERE_POSSIBLE = ("sonicmoe",)  # is timed beside a layer, unless the user names the systems
# Presets, some with another L, of the stages that are timed beside torch: where index work and memory traffic show.
SHAPES = {
    "dispatch": (("qwen3", 2**20), ("conf4", None)),
    "gating": (("qwen3", 2**18),),
    "combine": (("qwen3", None), ("conf3", None)),
}
# The one kind that takes an option which not all of them take.
TAKEN_BY = dict.fromkeys(("policies", "systems", "routing", "capacity_factor"), "layer") | {
    "stages": "stage",
    "axes": "growth",
    "seconds": "growth",
}


@dataclass(frozen=True)
class Request:
    """A user's request; None or an empty sequence stands for the default.

    Policies, systems, routing and capacity_factor are of a layer, see `layer.Choice`; stages are of a step; axes and
    seconds are of `growth`.
    """

    presets: Sequence[str] = ()  #: names, or "all" for ``LAYER_PRESETS``
    tokens: int | None = None  #: L, in place of that of each preset
    policies: Sequence[str] = ()
    systems: Sequence[str] = ()  #: as `timed_systems.named` knows them
    routing: str | None = None
    capacity_factor: float | None = None
    stages: Sequence[str] = ()  #: of `roofline.stages_of`
    axes: Sequence[str] = ()  #: of ``growth.AXES``
    seconds: float | None = None  #: of all points of all axes, for what is timed
    versions: Sequence[str] = ()  #: of the kernels; of a layer at most one
    repetitions: int = 15  #: of each row


def jobs(kind: str, request: Request) -> list[Job]:
    """One job for each layer, or for each stage of each layer: it takes the keyword ``device`` and returns rows.

    Raises
    ------
    ValueError
        If a name is unknown, an option has no place in this kind, or a number is out of range.
    """
    checks.check_name("kind of benchmark", kind, KINDS)
    for option, taker in TAKEN_BY.items():
        if getattr(request, option) not in (None, ()) and kind != taker:
            raise ValueError(f"{_said(option, getattr(request, option))}: only bench {taker} takes it")
    checks.check_int("repetitions", request.repetitions, at_least=1)
    if request.tokens is not None:
        checks.check_int("L", request.tokens, at_least=1)
    makers = {
        "layer": _layer_jobs,
        "stage": _stage_jobs,
        "ladder": _ladder_jobs,
        "host": _host_jobs,
        "launched": _launched_jobs,
        "first_step": _first_step_jobs,
        "layouts": _layout_jobs,
        "growth": _growth_jobs,
        "counters": _counter_jobs,
    }
    return makers.get(kind, partial(_jobs_beside_torch, kind))(request)


def repetitions(kind: str, request: Request) -> int:
    """Return the repetitions of each row: 1 for counters."""
    return 1 if kind == "counters" else request.repetitions


def gpu() -> Gpu:
    """The device to time.

    Raises
    ------
    ValueError
        If there is no GPU, or nothing to launch kernels with.
    """
    status = BACKENDS["cuda"].status()
    if not status.available:
        raise ValueError(f"only a GPU is timed: {status.detail}")
    return Gpu()


# Options of `moeblaze bench` for the fields of a request.
OPTIONS = {
    "policies": "--policy",
    "systems": "--system",
    "routing": "--routing",
    "capacity_factor": "--capacity-factor",
    "stages": "--stage",
    "axes": "--of",
    "seconds": "--seconds",
    "versions": "--kernel",
}


def _said(option: str, value: str | float | Sequence[str]) -> str:
    """Return an option as it is typed, with its value."""
    return f"{OPTIONS[option]} {', '.join(value) if isinstance(value, tuple | list) else value}"


def layers(request: Request, default: Sequence[tuple[str, int | None]]) -> list[tuple[str, MoEConfig]]:
    """Names and configurations of the layers that are asked for; the default is presets, each with an L or None."""
    asked = [name for given in request.presets for name in (LAYER_PRESETS if given == "all" else (given,))]
    shapes = [(name, None) for name in asked] or default
    return [_layer(name, request.tokens or tokens) for name, tokens in shapes]


def _layer(name: str, tokens: int | None) -> tuple[str, MoEConfig]:
    checks.check_name("preset", name, (*PRESETS, "all"))
    config = preset(name).config
    if tokens in (None, config.L):
        return name, config
    return f"{name}, L={tokens:,}", config.replace(L=tokens)


def _layer_jobs(request: Request) -> list[Job]:
    for name in request.policies:
        checks.check_name("policy", name, POLICIES)
    systems = tuple(dict.fromkeys(map(timed_systems.named, request.systems)))
    if len(request.versions) > 1:
        raise ValueError(f"{_said('versions', request.versions)}: a layer runs on one version")
    _check_owners(request, systems or whole_layer.Choice.systems)
    given: dict[str, Any] = {
        "systems": systems,
        "where_possible": () if systems else WHERE_POSSIBLE,
        "policies": request.policies,
        "version": next(iter(request.versions), None),
        "routing": request.routing,
        "capacity_factor": request.capacity_factor,
    }
    choice = whole_layer.Choice(
        **{name: value for name, value in given.items() if value}, repetitions=request.repetitions
    )
    if choice.version:
        checks.check_name("version of layer", choice.version, raw_layer.VERSIONS)
    routing.exponent_of(choice.routing)
    timed = [(name, config) for name, config in layers(request, ALL) if whole_layer.systems_to_time(config, choice)]
    if not timed:
        raise ValueError(f"{_said('systems', choice.systems)}: no layer that is asked for is small enough for graphs")
    return [partial(whole_layer.time_layer, name, config, choice) for name, config in timed]


def _check_owners(request: Request, systems: Sequence[str]):
    """The options that only some systems have are given where one of those is."""
    for option, owners in (("policies", OWN), ("versions", OWN), ("capacity_factor", ("capacity",))):
        asked = getattr(request, option)
        if asked not in (None, ()) and not set(owners).intersection(systems):
            raise ValueError(f"{_said(option, asked)}: only {' or '.join(owners)} takes it; name one by --system")
    if request.capacity_factor is not None:
        check_factor(request.capacity_factor)


def _stage_jobs(request: Request) -> list[Job]:
    jobs = []
    for name, config in layers(request, ALL):
        for stage in request.stages or roofline.stages_of(config):
            checks.check_name("stage of a step", stage, roofline.stages_of(config))
            if versions := _versions(request, stage, config):
                jobs.append(_stage_job(name, config, stage, versions, request))
    if not jobs:
        raise ValueError(f"{_said('versions', request.versions)}: no stage that is asked for has such a version")
    return jobs


def _versions(request: Request, stage: str, config: MoEConfig) -> list[str | None]:
    """Return the requested versions that the stage has, by default the one that the layer runs."""
    if not request.versions:
        return [stages.default_version(stage, config)]
    return [version for version in stages.versions_of(stage, config.dtype) if version in request.versions]


def _jobs_beside_torch(stage: str, request: Request) -> list[Job]:
    jobs = []
    for name, config in layers(request, SHAPES[stage]):
        able = stages.versions_of(stage, config.dtype)
        for version in request.versions:
            checks.check_name(f"version of {stage}", version, list(filter(None, able)))
        jobs.append(_stage_job(name, config, stage, request.versions or able, request, beside_torch=True))
    return jobs


def _ladder_jobs(request: Request) -> list[Job]:
    for version in request.versions:
        checks.check_name("version of the series", version, expert_up.FORWARD_VERSIONS)
    return [
        partial(ladder.time_ladder, name, config, ladder.steps_of(config, request.versions), request.repetitions)
        for name, config in layers(request, LADDERS)
    ]


def _own_version(kind: str, request: Request) -> None:
    """Check that the user asks for no version of the kernels."""
    if request.versions:
        raise ValueError(f"{_said('versions', request.versions)}: bench {kind} has the layer's own version")


def _host_jobs(request: Request) -> list[Job]:
    """The host's time, and if the user names no layer, what else of a step is the host's."""
    _own_version("host", request)
    timed = layers(replace(request, tokens=request.tokens or host.TOKENS), HOSTS)
    jobs: list[Job] = [partial(host.time_host, name, config, request.repetitions) for name, config in timed]
    if request.presets or request.tokens:
        return jobs
    return [*jobs, *_launched_jobs(request), *_first_step_jobs(request)]


def _launched_jobs(request: Request) -> list[Job]:
    _own_version("launched", request)
    timed = layers(request, launched.PRESETS)
    for name, config in timed:
        if not whole_layer.is_small(config):
            most = whole_layer.GRAPH_BYTES // MIB
            raise ValueError(f"{name} is too large for graphs: a hidden tensor may have at most {most} MiB")
    return [partial(launched.time_launched, name, config, request.repetitions) for name, config in timed]


def _first_step_jobs(request: Request) -> list[Job]:
    _own_version("first_step", request)
    return [partial(first_step.time_first_step, name, config) for name, config in layers(request, FIRST_STEPS)]


def _layout_jobs(request: Request) -> list[Job]:
    _own_version("layouts", request)
    return [
        partial(layouts.time_layouts, name, config, request.repetitions) for name, config in layers(request, LAYOUTS)
    ]


def _growth_jobs(request: Request) -> list[Job]:
    _own_version("growth", request)
    seconds = growth.SECONDS if request.seconds is None else checks.check_positive("seconds", request.seconds)
    for axis in request.axes:
        checks.check_name("axis", axis, growth.AXES)
    bases = layers(request, GROWN)
    axes = request.axes or tuple(growth.AXES)
    found = [point for base in bases for axis in axes for point in growth.points(*base, axis)]
    return [partial(growth.time_point, point, seconds / len(found), request.repetitions) for point in found]


def _counter_jobs(request: Request) -> list[Job]:
    if request.versions:
        raise ValueError(f"{_said('versions', request.versions)}: bench counters has all of them")
    return [partial(counters.count, name, config) for name, config in layers(request, COUNTED)]


def _stage_job(name, config, stage, versions, request, beside_torch=False) -> Job:
    options = {"versions": versions, "repetitions": request.repetitions, "beside_torch": beside_torch}
    return partial(stages.time_stage, name, config, stage, **options)
