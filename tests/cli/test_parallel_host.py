"""The host's time of a layer over one rank: what is timed and profiled, what the command and the page show."""

import json

import pytest
import torch.distributed as dist
import typer
from over_simt import SimtTensorBridge, SimtTensors
from pretended import PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.bench import host
from moeblaze_ref.cli import parallel_host
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn import clear_launch_plans, launch_plan_counts, torch_node, use_launch_plans
from moeblaze_ref.parallel import document, findings

TINY = MoEConfig(L=5, d=16, h=24, E=4, k=2, dtype="float32")
app = typer.Typer()
app.command()(parallel_host.main)


@pytest.fixture
def rows(monkeypatch):
    """What is measured on a pretended GPU, by a group of one rank, and how many calls replayed a plan."""
    executor = SimtTensors()
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: SimtTensorBridge(executor))
    for module, name in ((host, "CALLS"), (host, "WARM_UP"), (parallel_host, "STEPS")):
        monkeypatch.setattr(module, name, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = use_launch_plans()
    clear_launch_plans()
    try:
        yield parallel_host.measure(TINY, 1, PretendedDevice()), launch_plan_counts().replayed
    finally:
        use_launch_plans(before)
        clear_launch_plans()
        dist.destroy_process_group()


def test_each_layer_is_timed_and_its_steps_are_profiled(rows):
    found, replayed = rows
    works = [(work, plans) for work in host.WORKS for plans in (False, True)]
    assert [(row["preset"], row["work"], row["plans"]) for row in found] == [
        (layer, *work) for layer in parallel_host.LAYERS for work in works
    ]
    assert replayed > 20
    steps = {(row["preset"], row["plans"]): row["torch_operations"] for row in found if row["work"] == "step"}
    assert all(("device_us" in row) == (row["work"] == "step") for row in found)
    assert steps["ExpertParallelMoE with room", True] < steps["ExpertParallelMoE with room", False]
    assert steps["ExpertParallelMoE with room", True] > steps["MoELayer", True] > 0
    lines = [findings.host_cells(row) for row in found]
    assert {len(line) for line in lines} == {len(findings.HOST_HEADINGS)}
    assert parallel_host.table(found).row_count == len(found)


def row(layer, work, plans, us, **more):
    shape = {"L": 64, "d": 16, "h": 24, "E": 4, "k": 2}
    return {
        **{"preset": layer, "shape": shape, "dtype": "bfloat16", "work": work, "plans": plans},
        **{"host_us": us, "units": us / 4, **more},
    }


def test_a_record_becomes_a_block(tmp_path):
    path, blank = tmp_path / "ep_host.json", "<!-- begin host -->\n<!-- end host -->"
    assert document.fill(blank, {"host": path}).count("Not measured") == 1
    profiled = {"device_us": 211.0, "kernels": 60.0, "torch_operations": 99.0}
    roomy = "ExpertParallelMoE with room"
    steps = (("MoELayer", True, 100.0), ("ExpertParallelMoE", False, 2400.0), (roomy, True, 800.0))
    rows = [row(roomy, "forward", True, 300.0), *(row(layer, "step", on, us, **profiled) for layer, on, us in steps)]
    place = {"device": "a GPU", "versions": {"numpy": "2"}, "commit": "abc", "preset": "conf3"}
    path.write_text(json.dumps(place | {"rows": rows}))
    text = document.fill(blank, {"host": path})
    assert "takes the host 2,300 us (575 torch.adds) more than" in text and "700 us (175 torch.adds) more." in text
    assert "- commit: abc" in text
    assert "| ExpertParallelMoE with room | forward | yes | 300 | 75 |  |  |  |" in text
    assert "| ExpertParallelMoE with room | step | yes | 800 | 200 | 211 | 60 | 99 |" in text


def test_without_a_gpu_or_with_another_preset_it_says_so(monkeypatch):
    monkeypatch.setattr(parallel_host.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2 and "there is no GPU here" in done.stderr
    monkeypatch.setattr(parallel_host.torch.cuda, "is_available", lambda: True)
    done = CliRunner().invoke(app, ["--preset", "conf33"])
    assert done.exit_code == 2 and "conf33" in done.stderr
