"""The measurements of the steps as printed, without a GPU: their rows, their bytes, and results that are wrong."""

import json

import pytest
import torch
from pretended import PretendedDevice

from moeblaze_ref.bench import accuracy
from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.core.config import PAPER_PRESETS, MoEConfig
from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.papers import printed
from moeblaze_ref.papers.items import ITEMS
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.verify.cases import relative_error

TINY = MoEConfig(L=301, d=16, h=24, E=5, k=2)
ODD = TINY.replace(d=21, h=35)  # which tensor cores do not take
CONFIGS = [TINY, ODD, TINY.replace(dtype="float32")]
NAMES = {
    "moeblaze-4.2": ["as_printed", "1_dense_map", "2_bitmap", "3_single_pass"],
    "moeblaze-3.1": ["as_printed", "lesson_atomic", "3_mma + combine"],
}


class Counting(SimtExecutor):
    """Counts the bytes that kernels ask for, those that `full` writes, and those of the arrays that it makes."""

    def __init__(self):
        super().__init__()
        self.filled = self.allocated = 0

    def empty(self, shape, dtype):
        return self._counted(super().empty(shape, dtype))

    def full(self, shape, dtype, value):
        array = self._counted(super().full(shape, dtype, value))
        self.filled += array.nbytes
        return array

    def _counted(self, array):
        self.allocated += array.nbytes
        return array


def versions_of(item, config):
    if item == "moeblaze-4.2":
        return printed.dispatch_versions()
    executor = SimtExecutor()
    executor.capability = (9, 0)  # whose default version is 7_persistent, where dtype and widths allow
    return printed.sum_versions(config, executor)


def output_bytes(result):
    arrays = result.arrays().values() if hasattr(result, "arrays") else [result]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"d{config.d}-{config.dtype}")
@pytest.mark.parametrize("item", NAMES)
def test_the_bytes_of_every_version_are_counted_ones(item, config):
    bridge = bridge_to(PretendedDevice.torch_device)
    inputs = Inputs(config, bridge, PretendedDevice.torch_device)
    offsets = inputs.dispatch.expert_token_offsets.tolist()
    versions = versions_of(item, config)
    assert ("7_persistent + combine" in versions) == (item == "moeblaze-3.1" and config == TINY)
    for name, version in versions.items():
        if item == "moeblaze-3.1":
            assert (inputs.y_swi.shape, inputs.w3.shape) == ((config.R, config.h), (config.E, config.h, config.d))
        executor = Counting()
        with bridge.running(), executor.recording() as launches:
            result = version.run(inputs, executor)
        assert {launch.kernel for launch in launches} == {kernel for _, kernel in version.kernels}, name
        assert printed.moved(version, printed.symbols(config, offsets, version.version, executor)) == {
            "bytes_read": sum(launch.read_bytes for launch in launches),
            "bytes_written": sum(launch.written_bytes for launch in launches) + executor.filled,
            "extra_bytes": executor.allocated - output_bytes(result),
        }, name


@pytest.mark.parametrize("item", NAMES)
def test_every_version_is_timed_and_compared(item):
    time = {"moeblaze-4.2": printed.time_dispatch, "moeblaze-3.1": printed.time_sums}[item]
    rows = time("tiny", TINY, PretendedDevice())
    assert json.loads(json.dumps(rows)) == rows
    assert [row["kernel"] for row in rows] == NAMES[item]
    for row in rows:
        assert "message" not in row
        assert (row["preset"], row["shape"], row["dtype"]) == ("tiny", TINY.sizes, "bfloat16")
        first, third = row["quartiles_ms"]
        assert 0 < first <= row["ms"] <= third
        assert 0 <= row["error"] <= accuracy.BOUND and 0 <= row["row_error"] <= accuracy.ROW_BOUND
        assert min(row["bytes_read"], row["bytes_written"], row["extra_bytes"]) > 0


def test_what_is_printed_asks_for_more_bytes_than_ours():
    printed_dispatch, *_, ours = printed.time_dispatch("tiny", TINY, PretendedDevice())
    assert (
        printed_dispatch["bytes_read"] + printed_dispatch["bytes_written"] > ours["bytes_read"] + ours["bytes_written"]
    )
    assert printed_dispatch["extra_bytes"] == 8 * TINY.L * TINY.E + 4 * TINY.E


def test_a_float32_output_is_its_own_sum():
    (fused, *_) = printed.time_sums("tiny", TINY.replace(dtype="float32"), PretendedDevice())
    assert fused["extra_bytes"] == 4 * TINY.R


@pytest.mark.parametrize("item", NAMES)
@pytest.mark.parametrize("spoil", ["zeros", "last row", "raises"])
def test_a_version_that_fails_says_so_and_the_others_are_timed(item, spoil):
    versions = versions_of(item, TINY)
    right = versions["as_printed"]

    def wrong(inputs, executor):
        result = right.run(inputs, executor)
        if spoil == "raises":
            raise RuntimeError("out of memory\nand more")
        array = result.token_index_map if item == "moeblaze-4.2" else result
        array[slice(None) if spoil == "zeros" else slice(-1, None)] = 0
        return result

    versions["as_printed"] = right._replace(run=wrong)
    stage = {"moeblaze-4.2": "dispatch", "moeblaze-3.1": "expert_down"}[item]
    broken, *others = printed.time_versions(stage, "tiny", TINY, versions, PretendedDevice())
    assert broken["kernel"] == "as_printed" and "ms" not in broken
    assert broken["message"] == "out of memory" if spoil == "raises" else "the result is wrong" in broken["message"]
    assert others and all(row["ms"] > 0 for row in others)


def test_an_item_has_a_job_for_each_configuration_of_table_1(monkeypatch):
    for name, item in (("time_dispatch", "moeblaze-4.2"), ("time_sums", "moeblaze-3.1")):
        monkeypatch.setattr(printed, name, lambda name, config, device: [{"preset": name, "L": config.L}])
        rows = [row for job in ITEMS[item].jobs(PretendedDevice()) for row in job()]
        assert [row["preset"] for row in rows] == list(PAPER_PRESETS)
        assert rows[0]["L"] == 65_536


def test_the_papers_forward_is_differentiated_as_any_other():
    torch.manual_seed(0)
    x, d_out = torch.randn(37, 16), torch.randn(37, 16)
    default = MoELayer(16, 24, 5, 2)
    as_printed = MoELayer(16, 24, 5, 2, version="as_printed")
    as_printed.load_state_dict(default.state_dict())

    def step(module):
        leaf = x.clone().requires_grad_()
        out = module(leaf).out
        return out.detach().double().numpy(), torch.autograd.grad(out, [leaf, *module.parameters()], d_out)

    (out, gradients), (expected, expected_gradients) = map(step, (as_printed, default))
    assert relative_error(out, expected) < 1e-6
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert gradient.abs().sum() > 0 and torch.equal(gradient, other)
