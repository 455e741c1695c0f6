"""The project's main job on real input: train a tiny MoE language model, then check its own layers.

Its activations and its router's choices become the input of the cross-check on every
available backend, and of the memory account that autograd itself confirms.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import TextColumn

from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.cli import memory, terminal
from moeblaze_ref.core import figures, progress
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.lm import data, plots
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import TrainResult, capture, train
from moeblaze_ref.memory import measure, report, traffic
from moeblaze_ref.memory.accounting import Assumptions, account, accounts
from moeblaze_ref.nn import oracle
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import Case

STAGES = ("dispatch", "layer")  # the second runs all the others too
PLOTS = ("loss", "expert_load", "dispatch_traffic", *memory.PLOTS)
WINDOWS = 4  # of validation text that become the input of check and memory


def run(steps: int, out: Path, console: Console, force: bool = False) -> list[check.Row]:
    """Run the whole demonstration, and write its plots into the folder ``out``.

    Returns
    -------
    list of check.Row
        The cross-check of the trained layers, and whether formula and autograd agree on the bytes kept.

    Raises
    ------
    ValueError, OSError
        If a plot cannot be written; nothing was trained then.
    """
    figures.check(out, PLOTS, force)
    torch.set_num_threads(1)  # products this small lose more by waiting for other cores than they gain
    model_config = LMConfig()
    result = _train(model_config, steps, console)
    cases = _cases(result)
    layer = _layer_config(model_config, cases[0])
    _show_memory(layer, cases[0], console)
    reports = _count_dispatch(cases[0])
    _heading(console, f"Cross-check of both layers on {cases[0].L} tokens of text that it never trained on")
    console.print(
        f"(Numba's simulator, where there is no GPU, gets the first {check.SIMULATOR_ROWS} routed rows of each)"
    )
    rows = progress.run_with_bar("cross-checking", check.plan(STAGES, cases=cases))
    rows += [_compare_kept_bytes(layer, moe, case) for moe, case in zip(_layers(result), cases, strict=True)]
    written = figures.save_all(_figures(result, cases, layer, reports), out, force)
    console.print(terminal.check_table(rows))
    console.print(terminal.verdict(rows))
    console.print(f"plots in {out.resolve()}: {', '.join(path.name for path in written)}", soft_wrap=True)
    return rows


def _heading(console: Console, text: str):
    console.print(f"\n{text}", style="bold")


def _train(config: LMConfig, steps: int, console: Console) -> TrainResult:
    _heading(console, f"Training a byte-level language model of {config.layers} MoE blocks on Python's own help text")
    with progress.bar(TextColumn("loss {task.fields[loss]:.2f}")) as shown:
        task = shown.add_task("training", total=steps, loss=float("nan"))
        result = train(config, steps, on_step=lambda step, loss: shown.update(task, completed=step, loss=loss))
    console.print(
        f"{steps} steps: loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f} nats per byte "
        f"(uniform guess: {np.log(config.vocab):.2f}); {result.validation_loss:.2f} on unseen text"
    )
    return result


def _cases(result: TrainResult) -> list[Case]:
    """Return a case for each MoE layer: its input on unseen text, and its trained weights."""
    config = result.model.config
    generator = torch.Generator().manual_seed(0)
    tokens, _ = data.sample_windows(data.python_help().validation, WINDOWS, config.sequence, generator)
    layers = zip(_layers(result), capture(result.model, tokens), strict=True)
    return [
        case_of_layer(f"layer {number} of the trained model", moe, seen.x) for number, (moe, seen) in enumerate(layers)
    ]


def _layers(result: TrainResult) -> list[Any]:
    """Return the model's MoE layers; a ModuleList does not say of which class."""
    return [block.moe for block in result.model.blocks]


def case_of_layer(name: str, moe: oracle.OracleMoE, x: np.ndarray) -> Case:
    """A trained layer and real activations as a case, in float64."""

    def array(parameter):
        return None if parameter is None else parameter.detach().numpy().astype(np.float64)

    weights = MoEWeights(*(array(parameter) for parameter in (moe.wg, moe.w1, moe.w2, moe.w3)))
    d_out = np.random.default_rng(0).standard_normal(x.shape)
    return Case(name, x.astype(np.float64), weights, d_out, moe.k, moe.activation)


def _layer_config(model: LMConfig, case: Case) -> MoEConfig:
    return MoEConfig(case.L, model.d, model.h, model.E, model.k, model.activation, "float32")


def _show_memory(layer: MoEConfig, case: Case, console: Console):
    counts = np.bincount(case.topk_experts.ravel(), minlength=case.E).tolist()
    _heading(console, "Activation memory of its first MoE layer, under the routing that it learned")
    console.print(report.summary_table(layer, accounts(layer, assumptions=Assumptions(counts=counts))))


def _compare_kept_bytes(layer: MoEConfig, moe: oracle.OracleMoE, case: Case) -> check.Row:
    """The formula for the conventional layer against what autograd keeps of the trained one, in bytes."""
    x = torch.tensor(case.x, dtype=torch.float32, requires_grad=True)
    formula = account(layer, "conventional").kept_bytes
    error = float(abs(measure.kept_bytes(moe, x) - formula))
    return check.Row("kept bytes", "forward", "torch", None, "float32", case.shape, error, 0.0, error == 0.0, True)


def _count_dispatch(case: Case):
    """Every byte that the raw CUDA dispatch asks for on this routing; empty without the SIMT executor."""
    if not check.BACKENDS["simt"].status().available:
        return []
    executor = SimtExecutor()
    with executor.recording() as reports:
        raw_dispatch.build(case.topk_experts, case.E, executor=executor)
    return reports


def _figures(result: TrainResult, cases: list[Case], layer: MoEConfig, reports) -> dict[str, Figure]:
    """The plots by name, of `PLOTS`; without the SIMT executor there is no traffic to draw."""
    figures = {
        "loss": plots.loss_curve(result.losses),
        "expert_load": plots.expert_load([case.topk_experts for case in cases], layer.E),
    }
    if reports:
        figures["dispatch_traffic"] = traffic.traffic_bars(reports)
    return figures | memory.drawn(layer, accounts(layer), Assumptions())
