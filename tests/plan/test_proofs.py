"""Which bytes of a plan are compared with torch: each rule names tests that are there."""

import re
from pathlib import Path

import pytest

from moeblaze_ref.plan import configs, proofs
from moeblaze_ref.plan.configs import fields_of
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.proofs import COMPARED, proof
from moeblaze_ref.plan.run import BUFFERS, MASTER, STATES, WEIGHTS, Run
from moeblaze_ref.plan.shares import Parallel
from moeblaze_ref.plan.timeline import GRADIENTS, PASSING

TESTS = Path(__file__).parents[1]
HELD = {WEIGHTS, GRADIENTS, STATES}
QWEN3, LLAMA4, OLMOE = "qwen3-30b-a3b", "llama-4-scout", "olmoe-1b-7b"


def test_the_tests_that_rules_name_are_there():
    named = set(re.findall(r"test_\w+", Path(proofs.__file__).read_text()))
    files = [*(TESTS / "plan").glob("test_*.py"), *(TESTS / "gpu").glob("test_plan*.py")]
    written = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert len(named) > 10 and named <= written, named - written


def compared(model, parallel=None, sequence=4096, experts="torch", recipe="bf16", **options):
    """The kinds of bytes of a run that are compared with torch, of those that the run has."""
    whole = configs.with_experts(configs.read(fields_of(model), model), experts)
    run = Run(whole, Step(1, sequence), recipe, Parallel(**(parallel or {})), **options)
    kinds = {kind for stage in run.stages for kind in (*stage.resident, *stage.kept, GRADIENTS, PASSING)}
    return {kind for kind in kinds if proof(run, kind) == COMPARED}, kinds


@pytest.mark.parametrize(
    ("missing", "run"),
    [
        ({BUFFERS}, {"model": QWEN3}),
        ({BUFFERS}, {"model": QWEN3, "experts": "moeblaze/paper"}),
        ({BUFFERS}, {"model": QWEN3, "checkpoint": "layer"}),
        ({BUFFERS}, {"model": LLAMA4}),
        ({BUFFERS, PASSING, "attention"}, {"model": LLAMA4, "sequence": 8192}),
        ({BUFFERS, PASSING}, {"model": QWEN3, "experts": "megablocks"}),
        ({BUFFERS, PASSING, "experts"}, {"model": QWEN3, "experts": "sonicmoe"}),
        ({BUFFERS, PASSING}, {"model": QWEN3, "recipe": "bf16-master"}),
        ({BUFFERS, PASSING, MASTER, STATES}, {"model": QWEN3, "recipe": "muon"}),
        ({BUFFERS, PASSING, STATES}, {"model": QWEN3, "recipe": "adamw8bit"}),
        ({BUFFERS, PASSING}, {"model": QWEN3, "parallel": {"data": 8, "zero": 3}}),
        (
            {BUFFERS, PASSING, MASTER, *HELD},
            {"model": QWEN3, "parallel": {"data": 8, "zero": 3}, "recipe": "bf16-master"},
        ),
        ({BUFFERS, PASSING}, {"model": QWEN3, "parallel": {"data": 8, "zero": 1}, "recipe": "bf16-master"}),
        ({BUFFERS, PASSING}, {"model": QWEN3, "parallel": {"pipeline": 4, "micro_batches": 8}}),
        ({BUFFERS, PASSING}, {"model": QWEN3, "parallel": {"tensor": 4}}),
        ({BUFFERS, PASSING, "attention", *HELD}, {"model": QWEN3, "parallel": {"tensor": 8}}),
        ({BUFFERS, PASSING, "attention", *HELD}, {"model": OLMOE, "parallel": {"tensor": 2}}),
        ({BUFFERS, PASSING, *HELD}, {"model": QWEN3, "parallel": {"data": 2, "tensor": 2, "zero": 1}}),
        (
            {BUFFERS, PASSING, "checkpoints", "positions", "norms", "embedding", "logits and loss"},
            {"model": QWEN3, "parallel": {"tensor": 2}, "checkpoint": "layer"},
        ),
        ({BUFFERS, PASSING, "experts"}, {"model": QWEN3, "parallel": {"tensor": 2}, "experts": "moeblaze/paper"}),
        ({BUFFERS, PASSING, "experts", *HELD}, {"model": QWEN3, "parallel": {"data": 8, "expert": 8}}),
        ({BUFFERS, PASSING}, {"model": QWEN3, "parallel": {"data": 8, "expert": 8}, "experts": "moeblaze/paper"}),
        (
            {BUFFERS, PASSING, *HELD},
            {"model": QWEN3, "parallel": {"data": 8, "expert": 8, "zero": 1}, "experts": "moeblaze/paper"},
        ),
        ({BUFFERS, PASSING}, {"model": QWEN3, "offload": ("optimizer",)}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_what_is_formula_only(missing, run):
    found, kinds = compared(**run)
    assert kinds - found == missing


def test_activations_on_the_host_and_in_float32_are_formulas():
    for options in ({"offload": ("activations",)}, {"recipe": "fp32"}):
        found, _ = compared(QWEN3, **options)
        assert found == HELD
