"""Compare plans with a GPU: ``python -m moeblaze_ref.plan.measure --record plan_GPU.json``.

Each case is a model cut to a few layers of full width. Its kept storages are compared with the plan's, and its peaks
with those of torch's allocator, in a process of its own.
"""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moeblaze_ref.core import source_hashes
from moeblaze_ref.nn import replace_moe_blocks, system
from moeblaze_ref.plan import configs, recorded
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run, Stage
from moeblaze_ref.plan.torch_models import built, kept_storages, loss_of

KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


@dataclass(frozen=True)
class Case:
    """A model, cut to some layers, and how it runs."""

    model: str
    layers: int = 2
    attention: str = "flash"
    experts: str = "torch"


CASES = (
    *(Case(name) for name in ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b")),
    *(Case("qwen3-30b-a3b", attention=kernel) for kernel in ("cudnn", "math")),
    Case("olmoe-1b-7b", attention="efficient"),
    *(Case("deepseek-v2-lite", attention=kernel) for kernel in ("flash", "cudnn", "math")),
    Case("glm-4.5"),
    Case("llama-4-scout", layers=1),
    *(Case("qwen3-30b-a3b", experts=f"moeblaze/{policy}") for policy in ("conventional", "paper", "minimal", "inputs")),
)
SEQUENCES = (1024, 4096, 8192)
COMMAND = "plan.measure"
PARTS = (source_hashes.PLAN, source_hashes.LAYERS)


def fields_of(case: Case) -> dict[str, Any]:
    """The config.json of a case."""
    return configs.cut(configs.fields_of(case.model), case.layers)


def measure(case: Case, sequences: Sequence[int] = SEQUENCES) -> list[dict[str, Any]]:
    """Measure torch's kept and peak bytes on the GPU, beside the plan's, for each sequence.

    Returns
    -------
    list of dict
        {model, layers, attention, experts, sequence, kept_bytes, planned_kept_bytes, same_storages, peaks,
        planned_peaks}; the peaks are None where memory was too small.
    """
    torch.set_default_device("cuda")
    with built(fields_of(case)) as model, sdpa_kernel(KERNELS[case.attention]):
        put(model, case.experts)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return [asdict(case) | _measured(case, model, optimizer, sequence) for sequence in sequences]


def _measured(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, sequence: int) -> dict[str, Any]:
    stage = planned(case, sequence)
    storages = sorted(tensor.bytes for work in stage.work for tensor in work.kept)
    found = kept_storages(model, 1, sequence)
    return {
        "sequence": sequence,
        "kept_bytes": sum(found),
        "planned_kept_bytes": sum(storages),
        "same_storages": Counter(found) == Counter(storages),
        "peaks": peaks(model, optimizer, sequence),
        "planned_peaks": planned_peaks(stage),
    }


def planned(case: Case, sequence: int) -> Stage:
    """The plan of a case, without a float32 copy of the weights."""
    model = configs.with_experts(configs.read(fields_of(case), case.model), case.experts)
    return Run(model, Step(1, sequence, attention=case.attention), "bf16").worst


def planned_peaks(stage: Stage) -> dict[str, int]:
    """The most bytes of each phase."""
    return {phase: instant.bytes for phase, instant in stage.peaks.items()}


def put(model: nn.Module, experts: str) -> None:
    """Put our layers in the place of a model's MoE blocks, if the case asks for them."""
    if experts != "torch":
        name, _, policy = experts.partition("/")
        replace_moe_blocks(model, system(name, **({"policy": policy} if policy else {})))


def peaks(model: nn.Module, optimizer: torch.optim.Optimizer, sequence: int) -> dict[str, int] | None:
    """The allocator's most bytes in each phase of the second step, or None if it ran out of memory."""
    try:
        _step(model, optimizer, sequence)
        return _step(model, optimizer, sequence)
    except torch.OutOfMemoryError:
        return None


def _step(model, optimizer, sequence):
    gc.collect()
    torch.cuda.empty_cache()
    found = {}
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model, 1, sequence)
    found["forward"] = _most()
    loss.backward()
    found["backward"] = _most()
    del loss
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    found["optimizer"] = _most()
    optimizer.zero_grad()
    return found


def _most() -> int:
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def main() -> None:
    """The command."""
    recorded.run(COMMAND, "Measure models on a GPU beside their plans.", measure, CASES, PARTS)


if __name__ == "__main__":
    main()
