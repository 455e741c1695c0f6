"""The benchmark without a GPU: its clock, roofline, routings, baselines and rows, on a device with made-up time."""

import json
import math
from dataclasses import fields
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers import assert_told_apart_in_grey, unmarked
from pretended import BYTES_PER_MS, FLOPS_PER_MS, HOT_FLOPS_PER_MS, PEAK, PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.backends.raw_cuda import block_sparse
from moeblaze_ref.bench import (
    accuracy,
    document,
    findings,
    foreign,
    layer,
    league,
    plan,
    plots,
    report,
    results,
    roofline,
    routing,
    stages,
    timed_systems,
)
from moeblaze_ref.cli.app import app
from moeblaze_ref.core import documents, provenance
from moeblaze_ref.core.config import MoEConfig, preset
from moeblaze_ref.core.structures import Dispatch
from moeblaze_ref.memory.accounting import Assumptions, account
from moeblaze_ref.nn import oracle, systems, torch_grouped
from moeblaze_ref.nn.activations import ACTIVATION
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.runtime.ceilings import Ceilings, Cost
from moeblaze_ref.runtime.clock import WARM_UP, Samples, interleave
from moeblaze_ref.runtime.device import NoGraph
from moeblaze_ref.verify.cases import random_topk, relative_error

TINY = MoEConfig(L=37, d=16, h=24, E=5, k=2)
UNGATED = TINY.replace(activation="relu2")

# Rounds ---------------------------------------------------------------------------------------------------------------


def work(device, *laps_of_round):
    """A contender whose laps take what the list of this round says."""

    def contend(number, lap):
        first, *others = laps_of_round[number % len(laps_of_round)]
        device.now += first
        for duration in others:
            lap()
            device.now += duration

    return contend


def test_medians_and_quartiles_are_of_the_rounds_after_the_warm_up():
    device = PretendedDevice()
    rounds = [(100.0, 100.0)] * WARM_UP + [(1.0, 2.0), (1.0, 6.0), (3.0, 2.0), (1.0, 3.0), (5.0, 4.0)]
    taken = interleave({"two laps": work(device, *rounds), "one": work(device, (7.0,))}, 5, device)
    assert taken["one"] == Samples(((7.0,),) * 5)
    both = taken["two laps"]
    assert both.totals == [3.0, 7.0, 5.0, 4.0, 9.0]
    assert (both.median, both.quartiles, both.part(0), both.part(1)) == (5.0, (4.0, 7.0), 1.0, 3.0)
    assert both.shared_by(2).totals == [1.5, 3.5, 2.5, 2.0, 4.5]
    assert Samples(((2.0, 1.0),)).quartiles == (3.0, 3.0)


def test_every_round_begins_with_another_contender():
    device, seen = PretendedDevice(), []
    contenders = {name: lambda number, lap, name=name: seen.append((number, name)) for name in "abc"}
    interleave(contenders, 2, device)
    assert "".join(name for _, name in seen[1::2]) == "abcbcacababc"
    assert [number for number, _ in seen[1::2]] == [number for number in range(WARM_UP + 2) for _ in "abc"]
    assert seen[::2] == [(number + 1, name) for number, name in seen[1::2]]  # each one's run-up, on other inputs


class Queue:
    """A device that works behind the host."""

    def __init__(self):
        self.host = self.device = 0.0

    def launch(self, host, device):
        self.host += host
        self.device = max(self.device, self.host) + device

    def settle(self):
        self.host = max(self.host, self.device)

    def mark(self):
        return max(self.host, self.device)

    def milliseconds(self, start, end):
        return end - start


@pytest.mark.parametrize("order", [("long", "short"), ("short", "long")])
def test_nobody_inherits_a_lead_of_the_host(order):
    queue = Queue()
    costs = {"long": (1.0, 100.0), "short": (4.0, 0.5)}  # of the host and of the device
    contenders = {name: lambda number, lap, name=name: queue.launch(*costs[name]) for name in order}
    taken = interleave(contenders, 3, queue)
    assert taken["long"].median == 100.0 and taken["short"].median == 4.0


# Roofline -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, UNGATED])
def test_the_products_of_the_stages_are_those_of_the_layer(config):
    experts = [stage for stage in roofline.stages_of(config) if stage not in ("router", "router_backward")]
    assert sum(roofline.cost_of(stage, config).flops for stage in experts) == roofline.layer_flops(config)
    assert roofline.layer_flops(config) == (18 if config.gated else 12) * config.R * config.d * config.h
    assert ("d_w2" in experts) == config.gated and set(roofline.stages_of(config)) <= stages.RUN.keys()


def _bytes_of(value):
    if isinstance(value, Dispatch):
        value = tuple(value.arrays().values())
    return sum(map(_bytes_of, value)) if isinstance(value, tuple) else 0 if value is None else value.nbytes


@pytest.mark.parametrize("config", [TINY, UNGATED])
@pytest.mark.parametrize("stage", roofline.stages_of(TINY))
def test_the_bytes_are_those_of_the_arrays_that_go_in_and_come_out(stage, config):
    if stage not in roofline.stages_of(config):
        return
    inputs = stages.Inputs(config, bridge := stages.bridge_to(torch.device("cpu")), torch.device("cpu"))
    (result,) = stages.run_ours(stage, stages.default_version(stage, config), [inputs], bridge)
    assert roofline.cost_of(stage, config).bytes == _bytes_of(result) + sum(
        (inputs.dispatch.arrays()[name] if name in LISTS else getattr(inputs, name)).nbytes
        for name in READ[stage]
        if name in LISTS or getattr(inputs, name) is not None
    )


LISTS = ("expert_token_indices", "token_index_map")
READ = {
    "router": ("x", "wg"),
    "gating": ("logits",),
    "dispatch": ("topk_experts",),
    "expert_up": ("x", "w1", "w2", "expert_token_indices"),
    "expert_down": ("y_swi", "w3"),
    "combine": ("y", "gates", "token_index_map"),
    "d_hidden": ("d_out", "gates", "a", "b", "w3", "expert_token_indices"),
    "d_w3": ("y_swi", "d_out", "expert_token_indices"),
    "d_x": ("a", "b", "w1", "w2", "token_index_map"),
    "d_w1": ("a", "x", "expert_token_indices"),
    "d_w2": ("b", "x", "expert_token_indices"),
    "gating_backward": ("gates", "logits", "topk_experts"),
    "router_backward": ("logits", "x", "wg"),
}


def test_the_longer_time_is_the_roofline():
    ceilings = Ceilings(flops_per_ms=100.0, bytes_per_ms=10.0)
    assert (ceilings.roofline_ms(Cost(500, 20)), ceilings.bound(Cost(500, 20))) == (5.0, "flops")
    assert (ceilings.roofline_ms(Cost(50, 20)), ceilings.bound(Cost(50, 20))) == (2.0, "bytes")
    said = roofline.columns(Ceilings(790e9, 4.2e9), Ceilings(660e9, 4.1e9))
    assert said == {"cublas_tflops": 790.0, "copy_gb_s": 4200.0, "hot_cublas_tflops": 660.0}
    million = preset("qwen3").config.replace(L=2**20)
    copied = Ceilings(1.0, 4.2e9).roofline_ms(roofline.cost_of("dispatch", million))
    assert copied == pytest.approx(0.032, rel=0.01)


# Routings -------------------------------------------------------------------------------------------------------------


def test_steered_tokens_have_the_wanted_logits_and_are_moved_by_the_least():
    torch.manual_seed(0)
    x, wg = torch.randn(50, 32), torch.randn(32, 6) * 32**-0.5
    wanted = routing.wanted_logits(50, 6, "zipf")
    steered = routing.steer(x, wg, wanted)
    assert relative_error(steered @ wg, wanted) < 1e-5
    across = torch.eye(32) - wg @ torch.linalg.pinv(wg)  # what no logit sees
    assert relative_error(steered @ across, x @ across) < 1e-5
    assert routing.steer(x.bfloat16(), wg.bfloat16(), wanted).dtype == torch.bfloat16


def test_popularity_is_uniform_or_falls_with_the_rank():
    torch.manual_seed(0)
    rank = torch.arange(1.0, 9.0)
    for name, popularity in (("uniform", torch.ones(8)), ("zipf", 1 / rank), ("zipf:1.5", rank**-1.5)):
        first = routing.wanted_logits(200_000, 8, name).argmax(dim=1).bincount(minlength=8)
        assert relative_error(first / 200_000, popularity / popularity.sum()) < 0.02


def test_impossible_routings_are_refused():
    with pytest.raises(ValueError, match=r"E is 9, but tokens of width d=8 have only 8 logits to choose"):
        routing.steer(torch.zeros(3, 8), torch.zeros(8, 9), torch.zeros(3, 9))
    with pytest.raises(ValueError, match="unknown routing 'zip'"):
        routing.wanted_logits(3, 4, "zip")
    for text in ("zipf:", "zipf:-1", "zipf:inf", "zipf:nan", "zipf:one"):
        with pytest.raises(
            ValueError, match=f"routing is '{text}', but what follows 'zipf:' must be a finite number >= 0"
        ):
            routing.wanted_logits(3, 4, text)


# Baselines ------------------------------------------------------------------------------------------------------------


def accepted(error):
    return report.wrong([error.columns]) == []


def make_parameters(config, dtype=torch.float32):
    torch.manual_seed(0)
    c = config
    return RoutedExperts(c.d, c.h, c.E, c.k, c.activation, dtype=dtype)


def make_tokens(config, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(2, config.L, config.d, dtype=dtype).unbind()


@pytest.mark.parametrize("config", [TINY, UNGATED, TINY.replace(L=1, k=1), TINY.replace(L=600, E=40, k=8)], ids=str)
@pytest.mark.parametrize("system", ["grouped_mm", "gather_sum"])
def test_the_baselines_are_the_oracle(system, config):
    parameters = make_parameters(config)
    assert max(accuracy.worst_error(torch_grouped.build(system, parameters), parameters, *make_tokens(config))) < 1e-5


@pytest.mark.parametrize("system", ["grouped_mm_compiled", "gather_sum_compiled"])
def test_the_compiled_baselines_are_the_oracle(system):
    parameters, tokens = make_parameters(TINY, torch.bfloat16), make_tokens(TINY, torch.bfloat16)
    assert accepted(accuracy.worst_error(torch_grouped.build(system, parameters), parameters, *tokens))


def test_sorted_rows_know_their_tokens_slots_and_groups():
    topk_experts = torch.from_numpy(random_topk(53, 7, 3, "empty"))
    order, expected = torch_grouped.sort_rows(topk_experts, 7), oracle.expert_order(topk_experts.long(), 7)
    assert torch.equal(order.slot, expected.slot) and torch.equal(order.token, expected.token)
    assert torch.equal(order.slot[order.row], torch.arange(53 * 3))
    assert order.ends.dtype == torch.int32 and order.ends.diff(prepend=torch.zeros(1)).tolist() == expected.lengths


# Accuracy -------------------------------------------------------------------------------------------------------------


def spoiled(change, parameters):
    """A right layer whose output, or whose weights' part in it, is changed."""

    def forward(x):
        out, chosen = torch_grouped.build("gather_sum", parameters)(x)
        return change(x, out, parameters), chosen

    return forward


FAULTS = {
    "zeros": lambda x, out, p: 0 * out,
    "the last token is left out": lambda x, out, p: out * (torch.arange(len(out)) < len(out) - 1)[:, None],
    "NaN in one element": lambda x, out, p: out + torch.nan * (torch.arange(out.numel()) == 5).view_as(out),
    "a gradient of x too much": lambda x, out, p: out + x - x.detach(),
    "a gradient of the last expert too much": lambda x, out, p: out + (p.w3[-1].sum() - p.w3[-1].sum().detach()),
    "a router without a gradient": lambda x, out, p: out.detach() + out.detach().sum() * 0 + 0 * (p.wg.sum() + x.sum()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_with_a_fault_is_found(fault):
    parameters = make_parameters(TINY)
    spoil = FAULTS[fault]
    whole = lambda x, out, p: spoil(x, out, p) + 0 * sum(w.sum() for w in p.parameters())  # every gradient exists
    assert not accepted(accuracy.worst_error(spoiled(whole, parameters), parameters, *make_tokens(TINY)))


LARGE = TINY.replace(L=4096)


def error_of(alter, large):
    """Of a large step by the oracle in bfloat16, with its routing and weights altered on the way."""
    parameters, tokens = large

    def forward(x):
        routing, *weights = alter(oracle.route(x, parameters.wg, parameters.k), *parameters.weights[1:])
        return oracle.experts(x, routing, *weights), routing.topk_experts

    return accuracy.worst_error(forward, parameters, *tokens)


def one_dropped(routing, *weights):
    """The row of a token's second expert is lost, as if its gate were zero."""
    kept = torch.ones_like(routing.gates)
    kept[2900, 1] = 0
    return routing._replace(gates=routing.gates * kept), *weights


def without_gradient(*names):
    """The gradients of these weights are zero: of one expert if a name ends in its number, else of all."""

    def detached(name, weight):
        lost = [expert for expert in range(LARGE.E) if f"{name}[{expert}]" in names or name in names]
        is_lost = torch.tensor([expert in lost for expert in range(LARGE.E)])[:, None, None]
        return torch.where(is_lost, weight.detach(), weight)

    return lambda routing, *weights: (routing, *map(detached, ("w1", "w2", "w3"), weights))


def badly_chosen(routing, *weights):
    """One token goes to the last of all experts in place of its second."""
    chosen = oracle.top_k(routing.logits, LARGE.E)
    chosen[2900, 1] = chosen[2900, -1]
    chosen = chosen[:, : LARGE.k].clone()
    return routing._replace(topk_experts=chosen, gates=routing.probs.gather(1, chosen)), *weights


def of_tokens(keeps):
    """The output of the other tokens is zero."""
    return lambda routing, *weights: (routing._replace(gates=routing.gates * keeps[:, None]), *weights)


AT_SIZE = {
    "every weight's gradient is zero": without_gradient("w1", "w2", "w3"),
    "w2 has no gradient": without_gradient("w2"),
    "one expert's gradient is missing": without_gradient("w3[4]"),
    "zeros behind token 1,024": of_tokens(torch.arange(LARGE.L) < 1024),
    "the last token is left out": of_tokens(torch.arange(LARGE.L) < LARGE.L - 1),
    "one routed row is dropped": one_dropped,
    "a token goes to an expert that it did not choose": badly_chosen,
}


@pytest.fixture(scope="module")
def large():
    return make_parameters(LARGE, torch.bfloat16), make_tokens(LARGE, torch.bfloat16)


@pytest.mark.parametrize("fault", AT_SIZE)
def test_a_fault_in_a_large_step_is_found(fault, large):
    assert not accepted(error_of(AT_SIZE[fault], large))


def test_a_large_step_by_plain_torch_is_right(large):
    error = error_of(lambda *same: same, large)
    assert accepted(error) and error.row > error.whole > 2**-9


def test_a_dropped_row_shows_in_its_row_alone(large):
    error = error_of(one_dropped, large)
    assert error.whole <= accuracy.BOUND < accuracy.ROW_BOUND < error.row


def test_the_reference_does_not_depend_on_its_chunks(large, monkeypatch):
    parameters, tokens = large
    layer = torch_grouped.build("gather_sum", parameters)
    whole = accuracy.worst_error(layer, parameters, *tokens)
    monkeypatch.setattr(accuracy, "ROWS", 100)
    monkeypatch.setattr(accuracy, "ELEMENTS", 1000)
    assert accuracy.worst_error(layer, parameters, *tokens) == pytest.approx(whole, rel=1e-3)


class SteepAtZero(torch.autograd.Function):
    """ReLU with slope 1 from minus a threshold on."""

    @staticmethod
    def forward(context, a, threshold):
        context.save_for_backward(a)
        context.threshold = threshold
        return a.clamp(min=0)

    @staticmethod
    def backward(context, d_y):
        (a,) = context.saved_tensors
        return d_y * (a >= -context.threshold), None


@pytest.mark.parametrize("activation", accuracy.KINKED)
@pytest.mark.parametrize(("a", "right"), [(-(2.0**-22), True), (-(2.0**-10), False)])
def test_either_slope_is_right_where_rounding_decides_a_sign(activation, a, right, monkeypatch):
    """A layer that takes the slope of the other side for one pre-activation of the first token."""
    config = LARGE.replace(activation=activation)
    parameters, (x, d_out) = make_parameters(config), make_tokens(config)
    x[0, 2:], x[0, :2] = 0, 8
    size = parameters.w1.std().item()
    with torch.no_grad():
        parameters.w1[:, 0, 0] = size
        parameters.w1[:, 1, 0] = (a - 1) * size

    def layer(tokens):
        monkeypatch.setitem(ACTIVATION, activation, lambda rows: SteepAtZero.apply(rows, -9 * a * size))
        routing = oracle.route(tokens, parameters.wg, parameters.k)
        out = oracle.experts(tokens, routing, *parameters.weights[1:], activation)
        monkeypatch.undo()
        return out, routing.topk_experts

    assert accepted(accuracy.worst_error(layer, parameters, x, d_out)) == right


def test_a_row_is_held_to_its_own_norm_or_that_of_most():
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.1], [0.0, 1.0], [0.0, 1.0]])
    mean = (25 + 0.01 + 1 + 1) / 4
    for row, norm in ((0, 5.0), (1, mean**0.5)):
        found = expected.clone()
        found[row, 0] += 0.5
        whole, of_row = accuracy.worst([found], [expected])
        assert whole == pytest.approx(0.5 / (4 * mean) ** 0.5) and of_row == pytest.approx(0.5 / norm)


def test_only_equal_integers_are_right():
    numbers = torch.arange(5)
    assert accuracy.worst([numbers], [numbers.int()]) == (0.0, 0.0)
    assert accuracy.worst([numbers, numbers], [numbers, numbers.flip(0)]) == (float("inf"), float("inf"))
    with pytest.raises(ValueError, match=r"has shape \(5,\), but it must be \(4,\)"):
        accuracy.worst([numbers], [numbers[:4]])


# Rows of a layer ------------------------------------------------------------------------------------------------------

SYSTEMS = ("moeblaze", "grouped_mm", "gather_sum")
POLICIES = ("minimal", "inputs")


@pytest.fixture(scope="module")
def layer_rows():
    choice = layer.Choice(SYSTEMS, POLICIES, routing="zipf", repetitions=2)
    return layer.time_layer("tiny", TINY, choice, PretendedDevice())


def test_a_row_has_the_columns_that_it_should(layer_rows):
    names = {field.name for field in fields(layer.Row)}
    assert all(row.keys() == names for row in layer_rows)
    assert json.loads(json.dumps(layer_rows)) == [
        row | {"quartiles_ms": list(row["quartiles_ms"])} for row in layer_rows
    ]
    subjects = [(row["system"], row["policy"], row["routing"]) for row in layer_rows]
    timed = [*(("moeblaze", policy) for policy in POLICIES), ("grouped_mm", None), ("gather_sum", None)]
    assert subjects == [(*system, name) for name in ("uniform", "zipf") for system in timed]
    assert {row["version"] for row in layer_rows if row["system"] == "moeblaze"} == {"3_mma"}
    assert all(row["shape"] == {"L": 37, "d": 16, "h": 24, "E": 5, "k": 2} for row in layer_rows)


def test_ratios_and_rooflines_follow_from_the_times(layer_rows):
    steps = {(row["system"], row["policy"], row["routing"]): row["step_ms"] for row in layer_rows}
    ceilings = Ceilings(FLOPS_PER_MS, BYTES_PER_MS)
    lower_bound = sum(ceilings.roofline_ms(roofline.cost_of(stage, TINY)) for stage in roofline.stages_of(TINY))
    for row in layer_rows:
        step = row["step_ms"]
        assert step == pytest.approx(row["fwd_ms"] + row["bwd_ms"])  # the pretended laps grow evenly
        others = set(SYSTEMS) - {"moeblaze", row["system"]}
        assert row["ratio_to"] == {baseline: steps[baseline, None, row["routing"]] / step for baseline in others}
        assert row["pct_of_roofline"] == pytest.approx(100 * lower_bound / step)
        assert row["roofline_ms"] == pytest.approx(lower_bound)
        assert row["pct_of_cublas"] == pytest.approx(100 * 18 * TINY.R * TINY.d * TINY.h / FLOPS_PER_MS / step)
        over = None if row["routing"] == "uniform" else step / steps[row["system"], row["policy"], "uniform"]
        assert row["time_over_uniform"] == (over if over is None else pytest.approx(over))
        assert row["graph_ms"] > 0
        assert row["pct_of_hot_cublas"] == pytest.approx(row["pct_of_cublas"] * FLOPS_PER_MS / HOT_FLOPS_PER_MS)
        assert (row["cublas_tflops"], row["copy_gb_s"]) == (FLOPS_PER_MS / 1e9, BYTES_PER_MS / 1e6)


def test_the_best_baseline_is_the_fastest_other_system(layer_rows):
    for row in layer_rows:
        assert row["times_as_fast"] == min(row["ratio_to"].values()) == row["ratio_to"][row["best_baseline"]]


def test_bytes_are_measured_and_what_is_timed_is_right(layer_rows):
    x_and_d_out = 2 * TINY.L * TINY.d * TINY.itemsize
    assert {row["peak_bytes"] for row in layer_rows} == {PEAK + x_and_d_out}
    for row in layer_rows:
        if row["system"] == "moeblaze":
            assert row["kept_bytes"] == account(TINY, "moeblaze", row["policy"]).kept_bytes
    kept = {row["system"]: row["kept_bytes"] for row in layer_rows}
    assert kept["grouped_mm"] > kept["gather_sum"] > kept["moeblaze"] > 0
    assert all(0 < row["error"] < row["row_error"] for row in layer_rows) and report.wrong(layer_rows) == []


def test_a_layer_is_timed_beside_plain_torch_as_it_is_and_compiled():
    (job, *_) = plan.jobs("layer", plan.Request())
    baselines_of_ours = ("grouped_mm", "grouped_mm_compiled", "gather_sum_compiled")
    assert job.args[2].systems == ("moeblaze", "moeblaze_graphed", *baselines_of_ours)
    assert job.args[2].where_possible == ("sonicmoe",)
    (job,) = plan.jobs("layer", plan.Request(presets=("conf1",), systems=("grouped_mm",)))
    assert job.args[2].where_possible == ()


def test_what_is_slower_does_not_read_as_equal():
    shown = {1.0: "1.00", 1.004: "1.00", 1.237: "1.24", 0.9996: "0.999", 0.9971: "0.997", 0.15: "0.150"}
    assert {value: report.ratio(value) for value in shown} == shown
    row = {"ratio_to": {"torch": 0.9998}}
    assert report._ratio_to("torch")(row) == "0.999" and report._ratio_to("another")(row) == ""


def test_a_layer_that_no_graph_holds_has_no_time_as_one(monkeypatch):
    device = PretendedDevice()
    monkeypatch.setattr(device, "captured", Mock(side_effect=NoGraph("it waits for the device")))
    (row,) = layer.time_layer("tiny", TINY, layer.Choice(("gather_sum",), repetitions=1), device)
    assert row["graph_ms"] is None and row["step_ms"] > 0 and row["ratio_to"] == {}
    assert layer.graph_times(None, [None], LARGE_HIDDEN, 1, device) == {}


# Layers of other projects, where they run -----------------------------------------------------------------------------


@pytest.fixture
def beside_sonicmoe(monkeypatch):
    """Rows of our layer and of what stands for another project's, which runs as ``layer`` does."""

    def rows(build, preset_name="tiny"):
        monkeypatch.setitem(foreign.SYSTEMS, "sonicmoe", build)
        choice = layer.Choice(("moeblaze", "grouped_mm"), where_possible=("sonicmoe",), repetitions=1)
        return layer.time_layer(preset_name, TINY, choice, PretendedDevice())

    return rows


def as_baseline(run):
    """What makes a baseline of a function on our own weights."""

    def build(parameters):
        inner = torch_grouped.build("gather_sum", parameters)
        return foreign.Baseline(lambda x: run(inner, x), accuracy.weights_of(parameters))

    return build


def fails(inner, x):
    raise RuntimeError("no kernel for h = 24\nsecond line")


def missing(parameters):
    raise ImportError("sonicmoe cannot be imported: pip install sonic-moe")


def test_another_projects_layer_is_timed_where_it_runs(beside_sonicmoe):
    rows = beside_sonicmoe(as_baseline(lambda inner, x: inner(x)))
    assert [row["system"] for row in rows] == ["moeblaze", "grouped_mm", "sonicmoe"] and report.wrong(rows) == []
    assert rows[0]["ratio_to"].keys() == {"grouped_mm", "sonicmoe"} and rows[0]["left_out"] is None
    assert report.left_out(rows) == []


@pytest.mark.parametrize(
    ("build", "why"),
    [(missing, "sonicmoe cannot be imported: pip install sonic-moe"), (as_baseline(fails), "no kernel for h = 24")],
    ids=["missing", "failing"],
)
def test_what_does_not_run_is_left_out_by_name(build, why, beside_sonicmoe):
    rows = beside_sonicmoe(build)
    assert [row["system"] for row in rows] == ["moeblaze", "grouped_mm"]
    assert all(why in row["left_out"]["sonicmoe"] for row in rows)
    (said,) = report.left_out(rows)
    assert said.startswith("tiny: sonicmoe is left out: ") and why in said and "\n" not in said


def test_the_best_baseline_is_of_the_run_that_is_worst_for_ours(beside_sonicmoe, tmp_path, monkeypatch):
    rows = beside_sonicmoe(missing)
    for run, (ratio, step) in enumerate([(1.3, 2.0), (1.1, 3.0)]):
        changed = [row | {"step_ms": step, "times_as_fast": ratio, "best_baseline": "grouped_mm"} for row in rows]
        results.add(tmp_path / "results" / "layer_h100.json", results.result("layer", changed, None, run + 1))
    monkeypatch.setattr(results, "DOCS", tmp_path)
    said = document.fill("<!-- begin best -->\n<!-- end best -->", None)
    assert "| tiny | minimal | `grouped_mm` | 2 | 3.00 | 3.30 | 1.10 |" in said
    assert "- tiny: sonicmoe is left out: " in said and "- device: " in said
    assert findings.best({"rows": []}) == ""


def test_the_command_shows_the_best_baseline_and_what_is_left_out(beside_sonicmoe, monkeypatch):
    rows = beside_sonicmoe(missing, "conf1")
    monkeypatch.setattr(plan, "gpu", PretendedDevice)
    monkeypatch.setattr(plan, "jobs", lambda *of: [lambda device: rows])
    shown = CliRunner().invoke(app, ["bench", "layer"], env={"COLUMNS": "250"})
    assert shown.exit_code == 0 and "best baseline" in shown.stdout and "its ms" in shown.stdout
    assert "note: conf1: sonicmoe is left out: " in shown.stderr


# Ours as graphs -------------------------------------------------------------------------------------------------------

LARGE_HIDDEN = TINY.replace(L=1, h=2**28)


@pytest.fixture(scope="module")
def graphed():
    """A device, and the rows of our layer as launched and graphed, beside a baseline."""
    device = PretendedDevice()
    choice = layer.Choice(("moeblaze", "moeblaze_graphed", "grouped_mm"), POLICIES, repetitions=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "graphed", device.graphed)
        return device, layer.time_layer("tiny", TINY, choice, device)


def test_a_graphed_layer_has_rows_of_its_own_and_is_no_baseline(graphed):
    device, rows = graphed
    launched, replayed, (baseline,) = rows[:2], rows[2:4], rows[4:]
    assert device.replays > 0 and report.wrong(rows) == []
    assert [report.label(row) for row in replayed] == [f"moeblaze_graphed, {policy}" for policy in POLICIES]
    for row, other in zip(replayed, launched, strict=True):
        assert row["ratio_to"] == {"grouped_mm": baseline["step_ms"] / row["step_ms"]}
        assert all(row[name] == other[name] for name in ("policy", "version", "error", "row_error"))
        assert {row[name] for name in ("graph_ms", "kept_bytes", "peak_bytes")} == {None}
        assert other["ratio_to"].keys() == {"grouped_mm"} and other["graph_ms"] > 0 < other["kept_bytes"]
    pictured = plots.pictured([row | {"run": 0} for row in rows])
    assert baseline["ratio_to"] == {} and [row["system"] for row in pictured] == ["moeblaze"] * 2 + ["grouped_mm"]


def test_a_large_layer_is_not_graphed():
    chosen = layer.Choice(("moeblaze", "moeblaze_graphed"))
    assert layer.systems_to_time(TINY, chosen) == ["moeblaze", "moeblaze_graphed"]
    assert layer.systems_to_time(LARGE_HIDDEN, chosen) == ["moeblaze"]
    only_graphed = plan.Request(presets=("conf1", "conf3"), systems=("moeblaze_graphed",), policies=("inputs",))
    assert [job.args[0] for job in plan.jobs("layer", only_graphed)] == ["conf1"]


def of_conf1(rows, **changes):
    """A file of results with these rows of one run, as of the preset."""
    return {"rows": [row | {"preset": "conf1", "run": 0} | changes for row in rows]}


def test_a_graphed_layer_stands_beside_baselines_as_launched(graphed):
    _, rows = graphed
    found = of_conf1(rows)
    ratio = rows[2]["ratio_to"]["grouped_mm"]
    assert findings.beside_baselines(found, "moeblaze_graphed")["conf1", "minimal", "grouped_mm"] == [ratio]
    policies = [line.split(" | ")[0].removeprefix("| ") for line in findings.summary(found).splitlines()[2:8]]
    assert policies == [policy + way for way in findings.WAYS for policy in POLICIES]
    slow = findings.summary(of_conf1(rows, ratio_to={"grouped_mm": 0.5}))
    assert "under minimal, ours graphed, than `grouped_mm` on conf1" in " ".join(slow.split())
    assert "graphed" not in findings.summary(of_conf1(rows[:2] + rows[4:]))


# Other systems --------------------------------------------------------------------------------------------------------

WIDE = TINY.replace(h=128)  # which MegaBlocks' blocks divide
FACTOR = 0.4


def capacity_of(factor, policy="by_gate", dtype=torch.float32):
    """A fixed capacity over the weights of `make_parameters`, which it is returned with."""
    parameters = make_parameters(TINY, dtype)
    module = timed_systems.module_of("capacity", parameters, capacity_factor=factor, drop_policy=policy)
    return module, parameters


@pytest.mark.parametrize("config", [WIDE, WIDE.replace(activation="gelu"), WIDE.replace(L=1, k=1)], ids=str)
@pytest.mark.parametrize("system", [name for name in systems.SYSTEMS if name != "capacity"])
def test_the_systems_that_drop_nothing_are_the_oracle(system, config):
    parameters = make_parameters(config)
    module = timed_systems.module_of(system, parameters)
    assert all(mine is of_all for mine, of_all in zip(module.parameters(), parameters.parameters(), strict=True))
    assert max(accuracy.worst_error(timed_systems.layer_of(module), parameters, *make_tokens(config))) < 1e-5


@pytest.mark.parametrize("policy", ["by_gate", "by_arrival"])
@pytest.mark.parametrize("factor", [FACTOR, 0.9, TINY.E / TINY.k])
def test_a_fixed_capacity_is_the_oracle_over_what_it_keeps(factor, policy):
    (module, parameters), (x, d_out) = capacity_of(factor, policy), make_tokens(TINY)
    keeps = partial(timed_systems.kept_choices, module, x)
    layer_of_module = timed_systems.layer_of(module)
    assert max(accuracy.worst_error(layer_of_module, parameters, x, d_out, keeps)) < 1e-5
    kept = keeps(layer_of_module(x)[1])
    assert int((~kept).sum()) == int(module.dropped_slots) and bool(kept.all()) == (factor * TINY.k >= TINY.E)
    if not kept.all():
        assert not accepted(accuracy.worst_error(layer_of_module, parameters, x, d_out))


@pytest.mark.parametrize("expected", [True, False], ids=["one_more", "one_less"])
def test_a_capacity_that_drops_one_choice_too_many_or_too_few_is_found(expected):
    """The last choice that is dropped is expected after all, or the last that is kept is not."""
    (module, parameters), (x, d_out) = capacity_of(FACTOR), make_tokens(TINY)

    def keeps(chosen):
        kept = timed_systems.kept_choices(module, x, chosen)
        kept[tuple((kept != expected).nonzero()[-1])] = expected
        return kept

    assert not accepted(accuracy.worst_error(timed_systems.layer_of(module), parameters, x, d_out, keeps))


def test_a_capacity_that_drops_others_is_found():
    (module, parameters), (x, d_out) = capacity_of(FACTOR, "by_arrival"), make_tokens(TINY)
    keeps = partial(timed_systems.kept_choices, capacity_of(FACTOR, "by_gate")[0], x)
    assert not accepted(accuracy.worst_error(timed_systems.layer_of(module), parameters, x, d_out, keeps))


OTHERS = ("moeblaze", *(name for name in reversed(systems.SYSTEMS) if name != "moeblaze"), "grouped_mm")


@pytest.fixture(scope="module")
def rows_of_systems():
    choice = layer.Choice(OTHERS, capacity_factor=FACTOR, repetitions=1)
    return layer.time_layer("wide", WIDE, choice, PretendedDevice())


@pytest.fixture(scope="module")
def counts():
    """Rows of each expert in what `rows_of_systems` compares."""
    scene = layer.Scene(WIDE, layer.Choice(OTHERS), PretendedDevice())
    subject = scene.subjects()[0]
    return scene.run(subject, scene.tokens(subject))[1].flatten().bincount(minlength=WIDE.E).tolist()


def test_every_system_has_a_row_and_is_right(rows_of_systems):
    assert [row["system"] for row in rows_of_systems] == list(OTHERS) and report.wrong(rows_of_systems) == []
    assert all(0 < row["error"] <= row["row_error"] for row in rows_of_systems)
    cpu = stages.bridge_to(torch.device("cpu"))
    assert {row["system"]: row["version"] for row in rows_of_systems} == {
        "moeblaze": "3_mma",
        **dict.fromkeys(
            ("megablocks", "megablocks_memory_optimized"),
            block_sparse.default_version("bfloat16", WIDE.d, block_sparse.BLOCK, cpu.executor),
        ),
        **dict.fromkeys(("capacity", "dynamic_capacity", "sequential", "oracle", "grouped_mm")),
    }
    ours, *others = rows_of_systems
    for row in others:
        assert ours["ratio_to"][row["system"]] == row["step_ms"] / ours["step_ms"]
        assert row["ratio_to"].keys() == set(OTHERS) - {"moeblaze", row["system"]}


def test_what_is_dropped_and_padded_is_counted(rows_of_systems, counts):
    C = math.ceil(FACTOR * WIDE.R / WIDE.E)
    dropped = sum(max(count - C, 0) for count in counts)
    by_system = {row["system"]: row for row in rows_of_systems}
    losses = {name: tuple(row[field] for field in timed_systems.Losses._fields) for name, row in by_system.items()}
    lost_tokens = losses["capacity"][1]
    assert losses == {
        "capacity": (dropped, lost_tokens, WIDE.E * C - (WIDE.R - dropped)),
        "dynamic_capacity": (0, 0, WIDE.E * max(counts) - WIDE.R),
        **dict.fromkeys(("megablocks", "megablocks_memory_optimized"), (0, 0, sum(-count % 128 for count in counts))),
        **dict.fromkeys(("moeblaze", "sequential", "oracle", "grouped_mm"), (None, None, None)),
    }
    assert 0 < lost_tokens <= dropped // WIDE.k
    for row in rows_of_systems:
        kept = WIDE.R - (row["dropped_rows"] or 0)
        flops = 18 * kept * WIDE.d * WIDE.h
        assert row["pct_of_cublas"] == pytest.approx(100 * flops / FLOPS_PER_MS / row["step_ms"])
        assert row["capacity_factor"] == (FACTOR if row["system"] == "capacity" else None)


def test_every_system_keeps_what_its_account_says(rows_of_systems, counts):
    found = {row["system"]: row["kept_bytes"] for row in rows_of_systems}
    for system in set(systems.SYSTEMS) - {"moeblaze", "oracle"}:
        one = account(WIDE, system, assumptions=Assumptions(counts, capacity_factor=FACTOR))
        assert found[system] == one.kept_bytes
    assert found["moeblaze"] == account(WIDE, "moeblaze", "minimal").kept_bytes
    assert found["oracle"] == account(WIDE, "conventional").kept_bytes


def test_a_table_says_what_is_lost_only_where_something_may_be(rows_of_systems, layer_rows):
    shown = report.markdown(rows_of_systems)
    assert "| dropped rows | lost tokens | padding % |" in shown and "| capacity, factor 0.4 |" in shown
    assert "dropped" not in report.markdown(layer_rows) and "padding" not in report.markdown(layer_rows)
    row = {"shape": {"L": 10, "k": 2}, "dropped_rows": 4, "padding_rows": 2}
    assert report._padding(row) == "12.5" and report._padding(row | {"dropped_rows": 20}) == "all"


def test_a_system_is_named_once():
    (job,) = plan.jobs("layer", plan.Request(presets=("conf1",), systems=("torch_grouped", "megablocks", "grouped_mm")))
    assert job.args[2].systems == ("grouped_mm", "megablocks")
    assert timed_systems.SYSTEMS[: len(systems.SYSTEMS)] == tuple(reversed(systems.SYSTEMS))
    assert set(timed_systems.SYSTEMS) >= {*torch_grouped.SYSTEMS, *layer.Choice.systems}
    (job,) = plan.jobs("layer", plan.Request(presets=("conf1",), systems=("capacity",), capacity_factor=2.0))
    assert job.args[2].capacity_factor == 2.0


# Documents of the other systems ---------------------------------------------------------------------------------------


def test_the_other_systems_have_blocks_of_their_own(tmp_path, rows_of_systems, recorded, monkeypatch):
    file = tmp_path / "systems.json"
    results.add(file, results.result("layer", rows_of_systems, None, 1))
    monkeypatch.setitem(document.OF_OTHER_FILES, "systems", document._of_file(file, document._with_place("layer")))
    of_systems = document.fill("<!-- begin systems -->\nold\n<!-- end systems -->\n", recorded)
    assert "Run 0, wide:" in of_systems and "| wide | megablocks | 3_mma |" in of_systems and "old" not in of_systems
    assert "run 0, layer, once" in of_systems


# Rows of stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", stages.WITH_TORCH)
def test_stages_are_timed_beside_torch(stage):
    versions = stages.versions_of(stage, "bfloat16")
    rows = stages.time_stage("tiny", TINY, stage, versions, 3, PretendedDevice(), beside_torch=True)
    assert all(row.keys() == {field.name for field in fields(stages.Row)} for row in rows)
    assert [(row["system"], row["version"]) for row in rows] == [
        *(("moeblaze", version) for version in versions),
        ("torch", None),
    ]
    cost = roofline.cost_of(stage, TINY)
    *ours, torchs = rows
    for row in ours:
        assert row["kind"] == row["stage"] == stage and row["error"] <= 2**-7
        assert row["ratio_to"] == {"torch": torchs["step_ms"] / row["step_ms"]}
        assert (row["flops"], row["bytes"], row["bound"]) == (0, cost.bytes, "bytes")
        assert row["roofline_ms"] == pytest.approx(cost.bytes / BYTES_PER_MS)
        assert row["pct_of_roofline"] == pytest.approx(100 * row["roofline_ms"] / row["step_ms"])
    assert torchs["ratio_to"] == {} and torchs["error"] is torchs["row_error"] is None


@pytest.mark.parametrize("config", [TINY, UNGATED], ids=["gated", "ungated"])
@pytest.mark.parametrize("stage", roofline.stages_of(TINY))
def test_every_stage_is_timed_and_compared(stage, config):
    if stage not in roofline.stages_of(config):
        return
    version = stages.default_version(stage, config)
    (row,) = stages.time_stage("tiny", config, stage, [version], 1, PretendedDevice())
    assert (row["kind"], row["stage"], row["version"]) == ("stage", stage, version)
    assert row["flops"] == roofline.cost_of(stage, config).flops and row["step_ms"] > 0
    # Of rows below the mean the error is one of the mean: all rows together may be off by up to the root of 2 more.
    assert 0 <= row["error"] <= 2**0.5 * row["row_error"] and report.wrong([row]) == []


def test_the_time_is_that_of_one_call_among_the_inputs():
    assert [stages.input_sets(moved, 100) for moved in (1000, 200, 199, 50, 1)] == [1, 1, 2, 4, 200]
    assert stages.input_sets(1, 10**9) == stages.MOST_SETS
    device = PretendedDevice()
    device.cache_bytes = 2 * roofline.cost_of("gating", TINY).bytes  # four inputs fill it twice
    assert stages.time_stage("tiny", TINY, "gating", ["2_warp"], 1, device)[0]["step_ms"] == pytest.approx(
        stages.time_stage("tiny", TINY, "gating", ["2_warp"], 1, PretendedDevice(cache_bytes=1))[0]["step_ms"] / 4
    )


def arrays_of(result):
    """Those of a stage's result that are compared and written to: the last element of each is spoiled."""
    if isinstance(result, Dispatch):
        return [result.token_index_map]
    return [array for array in (result if isinstance(result, tuple) else (result,)) if array is not None]


@pytest.mark.parametrize("stage", roofline.stages_of(TINY))
def test_a_wrong_stage_is_found(stage, monkeypatch):
    """One of its results after another is wrong in its last row, or an expert's matrix."""
    torch.manual_seed(0)  # whose last rows are not so small that nobody would miss them
    run, version = stages.RUN[stage], stages.default_version(stage, TINY)
    inputs = stages.Inputs(TINY, stages.bridge_to(torch.device("cpu")), torch.device("cpu"))
    (right,) = stages.run_ours(stage, version, [inputs], stages.bridge_to(torch.device("cpu")))
    for number in range(len(arrays_of(right))):

        def spoil(inputs, number=number, **options):
            result = run(inputs, **options)
            arrays_of(result)[number][-1] = 0
            return result

        monkeypatch.setitem(stages.RUN, stage, spoil)
        rows = stages.time_stage("tiny", TINY, stage, [version], 1, PretendedDevice())
        assert [row["system"] for row in report.wrong(rows)] == ["moeblaze"], number


# What a user asks for -------------------------------------------------------------------------------------------------


def test_all_means_the_leagues_six_layers_and_four_more():
    names = [job.args[0] for job in plan.jobs("layer", plan.Request(presets=("all",)))]
    assert names[:6] == ["conf3", "conf4", "conf1", "qwen3", "mixtral", "fine-grained"] == list(league.SHAPES)
    assert names[6:] == ["llama4-like", "olmoe", "deepseek-v2-lite", "odd"]
    assert names == [job.args[0] for job in plan.jobs("layer", plan.Request())]
    (job,) = plan.jobs("layer", plan.Request(presets=("conf1",), tokens=64, policies=("inputs",), routing="zipf"))
    name, config, choice = job.args
    assert (name, config) == ("conf1, L=64", preset("conf1").config.replace(L=64))
    assert (choice.policies, choice.routing, choice.repetitions) == (("inputs",), "zipf", 15)


def test_the_shapes_of_the_stages_beside_torch():
    shapes = {
        kind: [tuple(job.args[1].sizes[s] for s in "LEk") for job in plan.jobs(kind, plan.Request())]
        for kind in stages.WITH_TORCH
    }
    assert shapes["dispatch"] == [(1_048_576, 128, 8), (32_768, 16, 4)]
    assert shapes["gating"] == [(262_144, 128, 8)]
    assert all(job.keywords["beside_torch"] for job in plan.jobs("combine", plan.Request()))


def test_versions_are_those_of_the_stages_that_have_them():
    asked = plan.Request(presets=("conf1",), versions=("2_tiled", "3_mma"))
    found = {job.args[2]: job.keywords["versions"] for job in plan.jobs("stage", asked)}
    products = ("expert_up", "expert_down", "d_hidden", "d_w3", "d_x", "d_w1", "d_w2")
    assert found == {product: ["2_tiled", "3_mma"] for product in products}
    (job,) = plan.jobs("stage", plan.Request(presets=("conf1",), stages=("gating",)))
    assert job.keywords["versions"] == ["2_warp"]


OF_OURS_ALONE = "only moeblaze or moeblaze_graphed takes it; name one by --system"


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        ("layers", {}, "unknown kind of benchmark 'layers'. Did you mean 'layer'?"),
        ("layer", {"presets": ("conf9",)}, "unknown preset 'conf9'"),
        ("layer", {"policies": ("minimum",)}, "unknown policy 'minimum'. Did you mean 'minimal'?"),
        (
            "layer",
            {"systems": ("groupedmm",)},
            "unknown system 'groupedmm'. Did you mean 'grouped_mm'? Valid: moeblaze, ",
        ),
        (
            "layer",
            {"systems": ("megablocks", "")},
            "unknown system ''. Valid: moeblaze, megablocks_memory_optimized, megablocks, dynamic_capacity, capacity, ",
        ),
        ("layer", {"systems": ("capacity",), "capacity_factor": 0.0}, "capacity_factor is 0.0, but it must be"),
        (
            "layer",
            {"capacity_factor": 2.0},
            "--capacity-factor 2.0: only capacity takes it; name one by --system",
        ),
        ("stage", {"capacity_factor": 2.0}, "--capacity-factor 2.0: only bench layer takes it"),
        ("stage", {"systems": ("oracle",)}, "--system oracle: only bench layer takes it"),
        ("layer", {"systems": ("megablocks",), "versions": ("3_mma",)}, f"--kernel 3_mma: {OF_OURS_ALONE}"),
        ("layer", {"routing": "zip"}, "unknown routing 'zip'"),
        ("layer", {"versions": ("5_more",)}, "unknown version of layer '5_more'"),
        ("layer", {"versions": ("2_tiled", "3_mma")}, "--kernel 2_tiled, 3_mma: a layer runs on one version"),
        ("layer", {"systems": ("gather_sum",), "policies": ("paper",)}, f"--policy paper: {OF_OURS_ALONE}"),
        (
            "layer",
            {"presets": ("conf3",), "systems": ("moeblaze_graphed",)},
            "--system moeblaze_graphed: no layer that is asked for is small enough for graphs",
        ),
        ("layer", {"repetitions": 0}, "repetitions is 0, but it must be >= 1"),
        ("layer", {"tokens": 0}, "L is 0, but it must be >= 1"),
        ("layer", {"stages": ("gating",)}, "--stage gating: only bench stage takes it"),
        ("stage", {"policies": ("minimal",)}, "--policy minimal: only bench layer takes it"),
        ("stage", {"stages": ("expert",)}, "unknown stage of a step 'expert'"),
        ("stage", {"versions": ("5_more",)}, "--kernel 5_more: no stage that is asked for has such a version"),
        ("gating", {"routing": "zipf"}, "--routing zipf: only bench layer takes it"),
        ("dispatch", {"versions": ("2_tiled",)}, "unknown version of dispatch '2_tiled'"),
    ],
)
def test_what_cannot_be_timed_is_refused(kind, request_, message):
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        plan.jobs(kind, plan.Request(**request_))


# Files, documents, pictures -------------------------------------------------------------------------------------------


def test_runs_of_one_place_are_added(tmp_path, layer_rows, monkeypatch):
    file = tmp_path / "results" / "bench.json"
    results.check_place(file)
    results.add(file, results.result("layer", layer_rows, "1 MHz", 2))
    results.check_place(file)
    results.add(file, results.result("layer", layer_rows[:1], "2 MHz", 3))
    found = results.load(file)
    assert found.keys() == {"device", "clocks", "versions", "commit", "code", "runs", "rows"}
    assert found["clocks"] == "1 MHz"
    assert [run["repetitions"] for run in found["runs"]] == [2, 3]
    assert [row["run"] for row in found["rows"]] == [0] * len(layer_rows) + [1]
    assert results.rows_of(found, "layer") == found["rows"] and results.rows_of(found, "stage") == []
    monkeypatch.setattr(provenance, "_commit", lambda: "another")
    with pytest.raises(ValueError, match="holds runs with commit .*, but here it is another: name another file"):
        results.check_place(file)


WHOLE = {"device": "a GPU", "clocks": None, "versions": {}, "commit": "none", "runs": [], "rows": []}
RUN = {"kind": "gating", "clocks": None, "repetitions": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "bench.json is not JSON: Expecting property name"),
        ("\xff", "bench.json is not JSON: "),
        ([], "bench.json is not a JSON object, but it must have clocks, commit, device, rows, runs, versions"),
        (7, "bench.json is not a JSON object"),
        ({}, "bench.json has no clocks, commit, device, rows, runs, versions"),
        (WHOLE | {"rows": 7}, "bench.json: rows is not a list"),
        (WHOLE | {"runs": {}}, "bench.json: runs is not a list"),
        (WHOLE | {"runs": [RUN, 7]}, r"bench.json: runs\[1\] is not a JSON object"),
        (WHOLE | {"rows": [[]]}, r"bench.json: rows\[0\] is not a JSON object"),
        (WHOLE | {"rows": [{"run": 0}]}, r"bench.json: rows\[0\] has no kind"),
        (WHOLE | {"rows": [{"kind": "layers", "run": 0}]}, r"unknown kind of bench.json: rows\[0\] 'layers'"),
        (WHOLE | {"rows": [{"kind": [], "run": 0}]}, r"unknown kind of bench.json: rows\[0\]"),
        (
            WHOLE | {"runs": [RUN], "rows": [{"kind": "gating", "run": 1}]},
            r"bench.json: rows\[0\] is of run 1, but the file has 1 runs",
        ),
        (
            WHOLE | {"runs": [RUN], "rows": [{"kind": "gating", "run": 0}]},
            r"bench.json: rows\[0\] has no bound, bytes, ",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(content, message, tmp_path):
    file = tmp_path / "bench.json"
    file.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        results.load(file)
    with pytest.raises(ValueError, match=message):
        results.check_place(file)


LATER = (
    "row_error",
    "best_baseline",
    "times_as_fast",
    "left_out",
    "activation",
    "capacity_factor",
    *timed_systems.Losses._fields,
)


def test_a_row_from_before_a_column_has_none_there(tmp_path, layer_rows):
    file = tmp_path / "bench.json"
    older = [{name: value for name, value in row.items() if name not in LATER} for row in layer_rows]
    results.add(file, results.result("layer", older, None, 2))
    rows = results.load(file)["rows"]
    assert {row["row_error"] for row in rows} == {None} and report.wrong(rows) == []
    assert {row["activation"] for row in rows} == {"swiglu"} and {row["dropped_rows"] for row in rows} == {None}
    assert "row error" not in report.markdown(rows) and "row error" in report.markdown(layer_rows)


@pytest.mark.parametrize("page", document.PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_results_give(page):
    text = page.read_text()
    assert unmarked(document.fill(text, document.recorded())) == unmarked(text)


def test_every_block_is_in_a_page():
    """Once, but for the headline, which leads several pages."""
    text = "".join(page.read_text() for page in document.PAGES)
    counts = {name: text.count(f"<!-- begin {name} -->") for name in document.BLOCKS | document.OF_OTHER_FILES}
    assert counts.pop("headline") > 1 and counts.pop("inputs") > 1
    assert set(counts.values()) == {1}, counts


@pytest.fixture
def recorded(layer_rows):
    """Two runs of a layer on uniform routing, the second a tenth slower, and one on both routings."""
    uniform = [row for row in layer_rows if row["routing"] == "uniform"]
    slower = [row | {"ratio_to": {name: r / 1.1 for name, r in row["ratio_to"].items()}} for row in uniform]
    runs = [{"kind": "layer", "clocks": "1 MHz", "repetitions": 2}] * 3
    rows = [{"run": run} | row for run, of_run in enumerate((uniform, slower, layer_rows)) for row in of_run]
    return provenance.environment() | {"clocks": None, "runs": runs, "rows": rows}


def test_a_block_is_written_from_the_rows(recorded):
    blocks = "".join(
        f"<!-- begin {name} -->\nold\n<!-- end {name} -->\n" for name in ("spread", "layer", "skew", "gating")
    )
    spread, uniform, skew, gating = document.fill(f"{blocks}", recorded).split("<!-- begin ")[1:]
    ratio = recorded["rows"][0]["ratio_to"]["grouped_mm"]
    assert f"| tiny | minimal | grouped_mm | 3 | {report.ratio(ratio / 1.1)} | {report.ratio(ratio)} |" in spread
    assert uniform.count("Run ") == 2 and "Run 2" not in uniform and "zipf" not in uniform
    assert "Run 2" in skew and "over uniform" in skew and documents.NOTHING in gating
    step = recorded["rows"][0]["step_ms"]
    assert f"| tiny | moeblaze, minimal | 3_mma | uniform | {step:.2f} |" in uniform and "old" not in uniform
    with pytest.raises(ValueError, match="unknown block 'layers'"):
        document.fill("<!-- begin layers -->\n<!-- end layers -->", recorded)


def test_the_summary_is_the_worst_run_of_ours_and_says_where_it_loses(recorded):
    ours = [row for row in recorded["rows"] if row["system"] == layer.OURS]
    for row in ours:
        row["ratio_to"] = {
            "grouped_mm": 1.3 - 0.1 * row["run"],
            "gather_sum": 0.9985 + 0.1 * (row["policy"] == "inputs"),
        }
        row["graph_ms"] = None
    said = findings.summary(recorded)
    assert "| minimal | `grouped_mm` | 1.10 |" in said and "| minimal | `gather_sum` | 0.999 |" in said
    assert said.endswith("in at least one of these runs: under minimal, than `gather_sum` on tiny.")
    for row in ours:
        row["ratio_to"] = {"grouped_mm": 1.2}
    assert findings.summary(recorded).endswith("Ours is the faster one in each of these runs.")
    assert findings.summary(recorded | {"rows": []}) == ""


def test_the_summary_is_of_every_run_with_all_of_its_baselines():
    """As docs/layer_tables.md says: beside other systems ours meets one of them alone."""
    benchmark, systems = (
        [{*row["ratio_to"]} for row in results.rows_of(results.load(file), "layer") if row["system"] == layer.OURS]
        for file in (results.RECORDED, results.SYSTEMS)
    )
    others = set.union(*benchmark)
    assert len(others) == 3 and all(met in (others, set()) for met in benchmark)
    assert all(met & others == {"grouped_mm"} for met in systems if met)


def as_preset(recorded, name, **changes):
    """The rows on uniform routing as if they were those of a preset."""
    rows = [row | {"preset": name} for row in recorded["rows"] if row["routing"] == "uniform"]
    return {"rows": [row | changes if row["system"] == layer.OURS else row for row in rows]}


def test_the_headline_has_the_worst_run_and_the_accounted_bytes(recorded):
    found = as_preset(recorded, "conf3", ratio_to={"grouped_mm_compiled": 1.2, "gather_sum_compiled": 1.1})
    ours = next(row for row in found["rows"] if row["system"] == layer.OURS and row["policy"] == "minimal")
    ours["ratio_to"] = {"grouped_mm_compiled": 0.9996, "gather_sum_compiled": 1.05}
    config = preset("conf3").config
    systems_shown = (("conventional", None), ("megablocks_published", None), ("moeblaze", "minimal"))
    kept = [account(config, *system).kept_bytes / 2**30 for system in systems_shown]
    last = findings.headline(found).splitlines()[-1]
    assert last == f"| conf3 | {' | '.join(f'{gib:.2f}' for gib in kept)} | 1.000 | 1.05 |"
    assert findings.headline({"rows": []}) == ""


@pytest.mark.parametrize(
    ("ratio", "said"), [(0.8, "0.80 to 0.80 times as fast as"), (0.8, "slower on conf3."), (1.2, "compiled`.")]
)
def test_the_cost_of_recomputing_is_one_sentence(recorded, ratio, said):
    found = as_preset(recorded, "conf3", policy="inputs", ratio_to={"gather_sum_compiled": ratio})
    assert said in findings.inputs(found) and findings.inputs({"rows": []}) == ""


def test_a_peak_is_that_of_the_worst_run_without_the_gradient_of_the_output(recorded):
    shape = {"L": 1024, "d": 512}
    found = as_preset(recorded, "conf3", policy="minimal", shape=shape, dtype="bfloat16", peak_bytes=2**30)
    found["rows"][0]["peak_bytes"] = 2**31 + 2**20
    assert found["rows"][0]["system"] == layer.OURS
    assert findings.peaks(found) == "conf3 2.00." and findings.peaks({"rows": []}) == ""


def test_the_summary_has_graphs_beside_graphs(recorded):
    for row in recorded["rows"]:
        row["graph_ms"] = 2.0 + 0.1 * row["run"] if row["system"] == layer.OURS else 1.9
        row["ratio_to"] = {"grouped_mm": 1.2} if row["system"] == layer.OURS else {}
    others = {row["system"] for row in recorded["rows"]} - {layer.OURS}
    last = max(row["run"] for row in recorded["rows"])
    said = findings.summary(recorded)
    for baseline in others:
        assert f"| minimal, as CUDA graphs | `{baseline}` | {1.9 / (2.0 + 0.1 * last):.2f} |" in said
    assert f"under minimal, as CUDA graphs, than `{min(others)}` on tiny" in " ".join(said.split())


def test_steps_stand_beside_their_graphs(recorded):
    for row in recorded["rows"]:
        row |= {"step_ms": 2.0, "quartiles_ms": [1.9, 2.1], "graph_ms": 1.75 if row["system"] == layer.OURS else None}
    lines = findings.host(recorded).splitlines()[2:]
    assert len(lines) == sum(row["system"] == layer.OURS for row in recorded["rows"])
    assert lines[0] == "| tiny | minimal | uniform | 0 | 2.00 | 5.0 | 1.75 | 0.25 |"


def test_every_trial_has_a_verdict():
    found = document.trials()
    assert {trial["verdict"] for trial in found} == set(document.VERDICTS)
    slower = [trial for trial in found if trial["verdict"] == "adopted" and document.change_of(trial) > 0]
    assert slower == []


def test_the_picture_shows_every_system_in_its_worst_run(recorded):
    rows = plots.pictured(recorded["rows"])
    assert [row["run"] for row in rows] == [0] * 4 + [1] * 4
    first, slower = rows[:4], [row | {"pct_of_cublas": row["pct_of_cublas"] / 1.1} for row in rows[4:]]
    times, memory = plots.time_and_memory(first + slower).axes
    assert [bars.get_label() for bars in times.containers] == [report.label(row) for row in first]
    assert [bars[0].get_width() for bars in times.containers] == [row["pct_of_cublas"] for row in slower]
    lines = [lines.get_segments()[0][:, 0].tolist() for lines in times.collections]
    assert lines == [[bad["pct_of_cublas"], good["pct_of_cublas"]] for bad, good in zip(slower, first, strict=True)]
    assert [bars[0].get_width() for bars in memory.containers] == [row["kept_bytes"] / 2**30 for row in first]
    assert [axes.get_xlabel() for axes in (times, memory)] == [
        "percent of the dense product's rate", "kept for the backward, GiB"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="rows is empty"):
        plots.time_and_memory([])


def test_the_picture_is_told_apart_in_grey():
    rows = plots.pictured(results.rows_of(document.recorded(), "layer"))
    assert_told_apart_in_grey(plots.time_and_memory(rows))
