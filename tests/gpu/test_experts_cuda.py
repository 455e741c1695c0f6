"""Experts with biases on a CUDA device: every version against the specification, and the same bits each time."""

import numpy as np
import pytest
import test_biases
import torch

from moeblaze_ref.backends.raw_cuda import gemm, packed
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.nn import experts

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

SIZES = {"L": 3_000, "d": 520, "h": 264, "E": 9, "k": 4}  # several tiles, the last not full


def run(one, version, device="cuda"):
    """The results of `nn.experts`, by the names of `test_biases`."""

    def leaf(array):
        return torch.tensor(array.astype(np.float32), dtype=dtype, device=device).requires_grad_()

    dtype = getattr(torch, one.x.dtype.name)
    x, *weights = map(leaf, (one.x, *one.weights))
    ids = torch.from_numpy(one.dispatch.token_expert_indices).view(one.gates.shape).to(device)
    gates = torch.from_numpy(one.gates).to(device).requires_grad_()
    gate_up, down, *biases = weights
    out = experts(x, gate_up, down, ids, gates, one.activation, "minimal", one.layout.name, version, None, *biases)
    gradients = torch.autograd.grad(out, [x, *weights, gates], leaf(one.d_out).detach())
    d_x, *of_weights, d_gates = [tensor.float().cpu().numpy() for tensor in gradients]
    return test_biases.named(out.detach().float().cpu().numpy(), d_x, of_weights, d_gates)


CELLS = [(version, dtype) for version, dtypes in packed.VERSIONS.items() for dtype in dtypes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("version", "dtype"), CELLS)
def test_biases_agree_with_the_specification_and_twenty_runs_give_the_same_bits(version, dtype, layout):
    one = test_biases.rounded(test_biases.step(LAYOUTS[layout], **SIZES), dtype)
    first = run(one, version)
    test_biases.assert_near(first, one, "tf32 twice" if version == gemm.TF32 else dtype)
    for _ in range(20):
        test_biases.assert_same(run(one, version), first)
