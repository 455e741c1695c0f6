"""Training on a CUDA device, step by step beside the oracle."""

from dataclasses import replace

import pytest
import torch

from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.lm import data, equal_loss
from moeblaze_ref.lm.presets import preset
from moeblaze_ref.lm.train import Trainer

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

STEPS = 20


@pytest.mark.parametrize("system", ["moeblaze", "megablocks"])
def test_the_loss_is_the_oracles_whatever_is_allowed_elsewhere(system):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = equal_loss.replayed(preset("tiny"), data.python_help(), STEPS, "cuda", system)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found["passed"], found["verdict"]


def test_free_routing_is_compared():
    found = equal_loss.free(preset("tiny"), data.python_help(), STEPS, "cuda")
    assert found["passed"], found["first_change"]


def test_a_choice_is_replayed_in_bfloat16():
    settings = replace(preset("tiny"), precision="bfloat16")
    oracle, ours = (
        Trainer(replace(settings, layer=layer), data.python_help(), "cuda") for layer in ("oracle", "moeblaze")
    )
    oracle.advance()
    ours.advance(oracle.chosen)
    assert all(map(torch.equal, ours.chosen, oracle.chosen)) and ours.chosen[0].is_cuda
    assert ours.losses == pytest.approx(oracle.losses, rel=1e-2)
