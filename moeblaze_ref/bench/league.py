"""The league of MoE layers: each is timed as a whole layer, on the same numbers, by the same rules.

A layer that is called with a routing gets it from a router in plain torch: softmax, then the k largest. All layers of a
shape are timed interleaved in one process, twice; the worse of the two medians counts. If that process ends, the layer
whose first step ran then is left out, and the others are timed anew.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.bench import LEAGUE_PRESETS
from moeblaze_ref.core.config import MoEConfig, preset
from moeblaze_ref.runtime.clock import Lap, interleave
from moeblaze_ref.runtime.device import Device, Gpu
from moeblaze_ref.verify.layers import adapters, layouts
from moeblaze_ref.verify.layers.adapter import Adapter, Sizes
from moeblaze_ref.verify.layers.faults import in_a_line
from moeblaze_ref.verify.layers.isolated import isolated

#: adapters of ``verify.layers``; a maintainer adds a line
LAYERS = (
    "torch/experts",
    "torch/grouped_mm",
    "torch/grouped_mm_compiled",
    "torch/gather_sum_compiled",
    "transformers/qwen3_moe/eager",
    "transformers/qwen3_moe/grouped_mm",
    "liger/experts",
    "megablocks/dmoe",
    "megablocks/dmoe memory-optimized",
    "sonicmoe/moe",
    "torchtitan/moe",
    "moeblaze_ref/megablocks",
    "moeblaze_ref/minimal",
    "moeblaze_ref/inputs",
    "moeblaze_ref/experts/linear",
    "moeblaze_ref/experts/interleaved",
)
SHAPES = LEAGUE_PRESETS
RUNS = 2
INPUTS = 3  # used alternately, so that none is in the L2 cache when its step begins


@dataclass(frozen=True)
class Timed:
    """A layer on a shape."""

    layer: str
    preset: str
    step_ms: tuple[float, ...] = ()  #: the median of each run; none if the layer failed
    kept_bytes: int | None = None  #: that live from the forward to the backward, weights, x and the output excluded
    peak_bytes: int | None = None  #: the most that a step allocates, weights excluded; x and gradients included
    problem: str = ""  #: why there is no time


def timed_on(
    gpus: int,
    preset_names: Sequence[str],
    layers: Sequence[str],
    repetitions: int,
    seconds: float,
    tokens: int | None = None,
) -> Iterator[list[Timed]]:
    """Yield what `timed` finds of each shape, in their order; each of some GPUs has one shape at a time."""
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(gpus):
        free.put(gpu)

    def of_shape(name: str) -> list[Timed]:
        gpu = free.get()
        try:
            return timed(name, layers, repetitions, seconds, tokens, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(gpus) as pool:
        yield from pool.map(of_shape, preset_names)


def timed(
    preset_name: str, layers: Sequence[str], repetitions: int, seconds: float, tokens: int | None = None, gpu: int = 0
) -> list[Timed]:
    """Time layers on a shape, in processes of their own.

    Parameters
    ----------
    preset_name : str
        One of ``config.PRESETS``.
    layers : sequence of str
        Names of adapters.
    repetitions : int
        Of each run.
    seconds : float
        Until a process is ended.
    tokens : int, optional
        In place of the preset's.
    gpu : int
        Its number.

    Returns
    -------
    list of Timed
        In the order of the layers.
    """
    found: dict[str, Timed] = {}
    while left := [name for name in layers if name not in found]:
        first_step_of = left[0]
        try:
            for event in isolated(measured, preset_name, left, repetitions, tokens, gpu, seconds=seconds):
                if isinstance(event, Timed):
                    found[event.layer] = event
                else:
                    first_step_of = event
        except (TimeoutError, ChildProcessError, ValueError, TypeError) as error:
            found[first_step_of] = Timed(first_step_of, preset_name, problem=str(error))
    return [found[name] for name in layers]


def measured(
    preset_name: str, layers: Sequence[str], repetitions: int, tokens: int | None = None, gpu: int = 0
) -> Iterator[str | Timed]:
    """Yield the name of each layer before its first step, then what was measured."""
    torch.cuda.set_device(gpu)
    config = preset(preset_name).config
    config = config if tokens is None else config.replace(L=tokens)
    yield from _measured(preset_name, config, layers, repetitions, Gpu())


def _measured(
    preset_name: str, config: MoEConfig, layers: Sequence[str], repetitions: int, device: Device
) -> Iterator[str | Timed]:
    scene = Scene.make(config, device)
    steps: dict[str, Step] = {}
    used: dict[str, Bytes] = {}
    for name in layers:
        yield name
        try:
            steps[name] = scene.step_of(adapters.named(name))
            used[name] = scene.bytes_of(steps[name], device)
        except Exception as error:  # layers of other projects have exceptions of their own
            steps.pop(name, None)
            device.settle()  # a device that is out of order ends the process here
            yield Timed(name, preset_name, problem=in_a_line(error))
    runs = [interleave(steps, repetitions, device) for _ in range(RUNS)] if steps else []
    for name in steps:
        yield Timed(name, preset_name, tuple(run[name].median for run in runs), *used[name])


class Scene(NamedTuple):
    """The numbers of a shape, which all layers have."""

    config: MoEConfig
    weights: layouts.Weights  # by role
    tokens: list[Tensor]  # each (L, d), requires grad
    d_out: Tensor  # (L, d)

    @classmethod
    def make(cls, config: MoEConfig, device: Device) -> "Scene":
        """Draw the numbers of a shape."""
        c, like = config, {"device": device.torch_device, "dtype": getattr(torch, config.dtype)}
        torch.manual_seed(0)
        weights = {
            "router": torch.randn(c.d, c.E, **like) * c.d**-0.5,
            "gate": torch.randn(c.E, c.d, c.h, **like) * c.d**-0.5,
            "up": torch.randn(c.E, c.d, c.h, **like) * c.d**-0.5,
            "down": torch.randn(c.E, c.h, c.d, **like) * c.h**-0.5,
        }
        tokens = [torch.randn(c.L, c.d, **like).requires_grad_() for _ in range(INPUTS)]
        return cls(config, weights, tokens, torch.randn(c.L, c.d, **like))

    def step_of(self, factory: Callable[..., Adapter]) -> "Step":
        """Make a layer, and write the weights into it."""
        c, like = self.config, {"device": str(self.d_out.device), "dtype": self.d_out.dtype}
        adapter = factory(d=c.d, h=c.h, E=c.E, k=c.k, **like)
        places = adapter.places(Sizes(c.L, c.d, c.h, c.E, c.k))
        layouts.scatter(places, self.weights)
        leaves = [tensor for _, tensor in places]
        if adapter.router_inside is not None:
            return Step(self, adapter.module, leaves)
        router = self.weights["router"].clone().requires_grad_()
        return Step(self, partial(_routed, adapter, router, c.k), [*leaves, router])

    def bytes_of(self, step: "Step", device: Device) -> "Bytes":
        """Return kept and peak bytes; the first step compiles, and takes workspaces."""
        step(0)
        given = self.d_out.nbytes
        kept = device.left_bytes(step.forward) - given
        return Bytes(kept, device.peak_bytes(step) + 2 * given)


def _routed(adapter: Adapter, router: Tensor, k: int, x: Tensor) -> Any:
    """Route, and call a layer without a router."""
    topk_weights, topk_index = torch.topk(torch.softmax((x @ router).float(), -1), k)
    dtype = adapter.gate_dtype or x.dtype
    return adapter.module(x, topk_index.to(adapter.index_dtype), topk_weights.to(dtype))


class Bytes(NamedTuple):
    """Kept and peak bytes of a step, as `Timed` defines them."""

    kept: int
    peak: int


@dataclass(frozen=True)
class Step:
    """A training step of a layer."""

    scene: Scene
    layer: Callable[[Tensor], Any]
    leaves: list[Tensor]  # what is trained

    def forward(self, number: int = 0) -> Tensor:
        """Return the output (L, d)."""
        out = self.layer(self._tokens(number))
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    def __call__(self, number: int = 0, lap: Lap = lambda: None) -> tuple[Tensor, ...]:
        """Run the forward, a lap, and return the gradients of x and of every weight."""
        out = self.forward(number)
        lap()
        return torch.autograd.grad(out, [self._tokens(number), *self.leaves], self.scene.d_out)

    def _tokens(self, number: int) -> Tensor:
        return self.scene.tokens[number % INPUTS]


def as_rows(found: Sequence[Timed]) -> list[dict[str, Any]]:
    """Return what a record holds."""
    return [asdict(row) for row in found]
