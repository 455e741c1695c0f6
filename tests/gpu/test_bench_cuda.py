"""The benchmark on a CUDA device: rows of the layer and of every stage, and the device's own measures."""

import pytest
import torch

from moeblaze_ref.backends.raw_cuda import tiles
from moeblaze_ref.bench import layer, report, roofline, stages, tune
from moeblaze_ref.core.config import POLICIES, MoEConfig
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.papers import speed

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

CONFIG = MoEConfig(L=4_096, d=512, h=1_024, E=16, k=4)


@pytest.fixture(scope="module")
def gpu():
    from moeblaze_ref.runtime.device import Gpu

    return Gpu()


def test_every_policy_and_baseline_is_timed_and_right(gpu):
    choice = layer.Choice(("moeblaze", "grouped_mm", "gather_sum_compiled"), tuple(POLICIES), repetitions=3)
    rows = layer.time_layer("small", CONFIG, choice, gpu)
    ours = rows[: len(POLICIES)]
    assert [row["kept_bytes"] for row in ours] == [account(CONFIG, "moeblaze", name).kept_bytes for name in POLICIES]
    assert all(row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and row["graph_ms"] > 0 for row in rows)
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows) and report.wrong(rows) == []
    assert all(row["pct_of_cublas"] > 0 for row in rows)


def test_every_system_is_timed_and_right(gpu):
    systems = ("moeblaze", "megablocks", "capacity", "oracle", "grouped_mm")
    rows = layer.time_layer("small", CONFIG, layer.Choice(systems, routing="zipf", repetitions=3), gpu)
    assert [row["system"] for row in rows] == 2 * list(systems) and report.wrong(rows) == []
    assert all(row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and row["peak_bytes"] > row["kept_bytes"] for row in rows)
    megablocks, capacity = (next(row for row in rows[5:] if row["system"] == system) for system in systems[1:3])
    assert megablocks["graph_ms"] is None and megablocks["dropped_rows"] == 0 < megablocks["padding_rows"]
    assert capacity["dropped_rows"] > 0 and capacity["padding_rows"] > 0


def test_a_graphed_layer_is_timed_as_launched_and_right(gpu):
    systems = ("moeblaze", "moeblaze_graphed", "grouped_mm")
    choice = layer.Choice(systems, ("minimal", "inputs"), routing="zipf", repetitions=3)
    rows = layer.time_layer("small", CONFIG, choice, gpu)
    graphed = [row for row in rows if row["system"] == systems[1]]
    assert len(graphed) == 2 * 2 and report.wrong(rows) == []
    assert all(row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and row["ratio_to"].keys() == {"grouped_mm"} for row in graphed)


@pytest.mark.parametrize("activation", ["silu", "relu", "swiglu"])
def test_the_papers_comparison_is_timed_and_right(gpu, activation, monkeypatch):
    monkeypatch.setattr(speed, "BASELINES", ("megablocks", "grouped_mm"))
    rows = speed.time_systems("small", CONFIG.replace(activation=activation), gpu, lambda system, config: None)
    assert report.wrong(rows) == [] and [row["policy"] for row in rows] == [*speed.POLICIES, None, None]


@pytest.mark.parametrize("stage", roofline.stages_of(CONFIG))
def test_every_stage_is_timed_and_right(gpu, stage):
    versions = [stages.default_version(stage, CONFIG)]
    rows = stages.time_stage("small", CONFIG, stage, versions, 3, gpu, beside_torch=stage in stages.WITH_TORCH)
    assert all(row["pct_of_roofline"] > 0 for row in rows) and report.wrong(rows) == []


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_every_tile_is_timed(gpu, kernel):
    times = tune.time_tiles("small", CONFIG, "3_mma", kernel, 2, gpu)
    assert [time.tile for time in times] == list(tiles.CANDIDATES["3_mma"]) and all(time.ms > 0 for time in times)


def test_the_ceilings_are_those_of_a_gpu_and_measured_once(gpu):
    assert gpu.rested is gpu.rested
    assert 1e9 < gpu.rested.bytes_per_ms < 2e10 and 1e10 < gpu.rested.flops_per_ms < 1e13


def test_the_peak_is_what_the_work_allocates(gpu):
    assert gpu.peak_bytes(lambda: torch.empty(2**20, device="cuda")) == 2**22


def test_a_graph_repeats_the_work(gpu):
    total = torch.zeros(1, device="cuda")
    replay = gpu.captured(lambda: total.add_(1))
    before = total.item()
    replay()
    assert total.item() == before + 1


def test_work_that_waits_for_the_device_is_no_graph(gpu):
    from moeblaze_ref.runtime.device import NoGraph

    with pytest.raises(NoGraph):
        gpu.captured(lambda: torch.ones(1, device="cuda").item())
    assert torch.rand(1, device="cuda").item() < 1  # torch works on as before
