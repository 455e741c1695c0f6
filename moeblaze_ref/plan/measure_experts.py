"""Time models with each implementation of their experts: ``python -m moeblaze_ref.plan.measure_experts --record FILE``.

Each model is cut to two layers of full width. All implementations run on its very weights, interleaved: transformers'
own, ours under two policies, and Liger-Kernel's, if it is installed. The tokens are random, and so is the router.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.core import source_hashes
from moeblaze_ref.nn import hf
from moeblaze_ref.plan import configs, recorded
from moeblaze_ref.plan.torch_models import built
from moeblaze_ref.runtime.clock import Lap, interleave
from moeblaze_ref.runtime.device import Device, Gpu
from moeblaze_ref.verify.layers.faults import in_a_line

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b")
LAYERS = 2
SEQUENCES = (4096, 16384)
REPETITIONS, RUNS = 7, 2
COMMAND = "plan.measure_experts"


@dataclass(frozen=True)
class Row:
    """A model with one implementation of its experts."""

    model: str
    sequence: int  #: tokens of its one sequence
    experts: str  #: what transformers calls the implementation
    loss: float | None = None
    step_ms: tuple[float, ...] = ()  #: the median of each run; none if the implementation failed
    peak_bytes: int | None = None  #: the most that a step allocates, weights excluded and gradients included
    problem: str = ""


class Model:
    """A model, its tokens (1, L), and a step with an implementation of the experts."""

    def __init__(self, model: Any, ids: Tensor):
        self._model, self._ids = model, ids

    def step(self, experts: str, number: int = 0, lap: Lap = lambda: None) -> Tensor:
        """Run a forward, a lap and a backward; return the loss."""
        if self._model.config._experts_implementation != experts:
            self._model.set_experts_implementation(experts)
        loss: Tensor = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        lap()
        loss.backward()
        self._model.zero_grad()
        return loss.detach()


def measured(subject: Model, rows: Sequence[Row], device: Device) -> list[Row]:
    """Fill in rows: what fails in its first step gets a problem, the others are timed interleaved."""
    first = [_first_step(subject, row, device) for row in rows]
    contenders = {row.experts: partial(subject.step, row.experts) for row in first if not row.problem}
    runs = [interleave(contenders, REPETITIONS, device) for _ in range(RUNS)]
    return [
        row if row.problem else replace(row, step_ms=tuple(run[row.experts].median for run in runs)) for row in first
    ]


def _first_step(subject: Model, row: Row, device: Device) -> Row:
    step = partial(subject.step, row.experts)
    try:
        loss = float(step())  # compiles, and takes workspaces
        return replace(row, loss=loss, peak_bytes=device.peak_bytes(step))
    except Exception as error:  # implementations of other projects have exceptions of their own
        return replace(row, problem=in_a_line(error))


def implementations() -> list[str]:
    """Return the names of all implementations; ours and Liger-Kernel's are entered into transformers' registry."""
    return ["eager", "grouped_mm", *map(hf.register, ("minimal", "inputs")), *_liger()]


def _liger() -> list[str]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    try:
        from liger_kernel.ops import LigerFusedMoEFunction
    except ImportError:
        return []

    def run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = module.gate_up_proj, module.down_proj
        out: Tensor = LigerFusedMoEFunction.apply(hidden_states, *weights, top_k_index.int(), top_k_weights)
        return out

    ALL_EXPERTS_FUNCTIONS.register("liger", run)
    return ["liger"]


def measure(case: tuple[str, int]) -> list[dict[str, Any]]:
    """Return a `Row` as dict for each implementation on a model and a sequence."""
    name, sequence = case
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    fields = configs.cut(configs.fields_of(name), LAYERS)
    with built(fields) as model:
        subject = Model(model, torch.randint(fields["vocab_size"], (1, sequence)))
        rows = [Row(name, sequence, experts) for experts in implementations()]
        return [asdict(row) for row in measured(subject, rows, Gpu())]


def main() -> None:
    """The command."""
    cases = [(name, sequence) for name in MODELS for sequence in SEQUENCES]
    description = "Time models with each implementation of their experts on a GPU."
    recorded.run(COMMAND, description, measure, cases, source_hashes.MEASURED)


if __name__ == "__main__":
    main()
