"""How the cost of a step grows, without a GPU: the points, the rows, and the page with its pictures."""

from dataclasses import fields
from unittest.mock import MagicMock, Mock

import pytest
import torch
from helpers import assert_told_apart_in_grey, unmarked
from pretended import BYTES_PER_MS, FLOPS_PER_MS, PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.bench import (
    document,
    findings,
    growth,
    growth_page,
    layer,
    plan,
    plots,
    report,
    results,
    roofline,
    routing,
)
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import MoEConfig, preset
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.runtime.ceilings import Ceilings

BASE = MoEConfig(L=16, d=16, h=24, E=8, k=3)
AXES = {
    "L": growth.Axis("tokens L", (1, 16)),
    "E": growth.Axis("experts E", (2, 4, 8, 64), {"k": 2}),
    "skew": growth.Axis("Zipf exponent of the experts' popularity", (0.0, 2.0)),
}
CEILINGS = Ceilings(FLOPS_PER_MS, BYTES_PER_MS)


@pytest.fixture
def tiny(monkeypatch):
    """A small base and few values, beside a baseline that is not compiled."""
    for module in (growth, growth_page):
        monkeypatch.setattr(module, "AXES", AXES)
        monkeypatch.setattr(module, "COMPILED", "gather_sum")
    monkeypatch.setattr(plan, "_layer", lambda name, tokens: ("tiny", BASE))
    monkeypatch.setattr(plan, "gpu", PretendedDevice)


def rows_of(axis, **options):
    found = growth.points("tiny", BASE, axis)
    return [row for point in found for row in growth.time_point(point, 9.0, 3, PretendedDevice(), **options)]


# Points ---------------------------------------------------------------------------------------------------------------


def sizes(axis):
    name, config = plan.layers(plan.Request(), plan.GROWN)[0]
    return {point.value: point for point in growth.points(name, config, axis)}


def test_the_axes_are_those_of_the_page():
    bounds = {"L": (1, 262_144), "E": (2, 512), "h": (128, 8192), "k": (1, 32), "skew": (0, 2)}
    assert {axis: (min(sizes(axis)), max(sizes(axis))) for axis in growth.AXES} == bounds
    assert all(7 <= len(sizes(axis)) <= 10 for axis in growth.AXES)


def test_one_size_changes_along_an_axis():
    base = preset("olmoe").config.replace(L=growth.TOKENS)
    for axis in ("L", "h", "k"):
        assert all(point.config == base.replace(**{axis: value}) for value, point in sizes(axis).items())
        assert base in [point.config for point in sizes(axis).values()]
    assert all(point.config == base.replace(E=value, k=2) for value, point in sizes("E").items())
    assert all(point.config == base for point in sizes("skew").values())
    exponents = {value: routing.exponent_of(point.routing) for value, point in sizes("skew").items()}
    assert all(value == exponent for value, exponent in exponents.items())


@pytest.mark.parametrize("axis", ["L", "E", "h", "k"])
def test_torch_compile_is_timed_at_every_second_shape_and_the_largest(axis):
    compiled = [len(point.systems) == 2 for point in sizes(axis).values()]
    assert compiled[-1] and all(compiled[::2]) and not any(compiled[1:-1:2])
    assert all(len(point.systems) == 2 for point in sizes("skew").values())


def test_points_are_layers_that_can_be(tiny):
    assert [point.value for point in growth.points("tiny", BASE, "E")] == [2, 4, 8]  # E is at most d
    wide = BASE.replace(d=128, k=1)
    assert [(point.value, point.config.k) for point in growth.points("", wide, "E")] == [
        (2, 1),
        (4, 1),
        (8, 1),
        (64, 1),
    ]


def test_no_more_experts_than_there_are_are_chosen(monkeypatch):
    monkeypatch.setattr(growth, "AXES", {"k": growth.Axis("", (1, 8, 32))})
    assert [point.value for point in growth.points("tiny", BASE, "k")] == [1, 8]


# Rows -----------------------------------------------------------------------------------------------------------------


def test_a_point_has_both_systems_beside_the_roofline_of_the_experts_with_tokens(tiny):
    few, many = (growth.time_point(point, 9.0, 3, PretendedDevice()) for point in growth.points("tiny", BASE, "L"))
    for rows, tokens in ((few, 1), (many, 16)):
        assert [row["system"] for row in rows] == ["moeblaze", "gather_sum"]
        for row in rows:
            assert row.keys() == {field.name for field in fields(growth.Row)}
            config = BASE.replace(L=tokens)
            assert (row["kind"], row["preset"], row["axis"], row["value"]) == ("growth", "tiny", "L", tokens)
            assert (row["shape"], row["routing"], row["problem"]) == (config.sizes, "uniform", "")
            assert row["roofline_ms"] == pytest.approx(roofline.layer_roofline_ms(config, CEILINGS, row["experts"]))
            assert row["step_ms"] > 0 and row["graph_ms"] > 0 and row["repetitions"] == 3
    assert few[0]["experts"] == BASE.k and BASE.k < many[0]["experts"] <= BASE.E
    assert len(few) == len(many) == 2 and report.wrong(few + many) == []


def test_the_input_that_chooses_the_fewest_experts_counts():
    scene = MagicMock(tokens=lambda subject, number: number, run=lambda subject, x: (None, torch.arange([5, 2, 7][x])))
    assert growth._experts_with_tokens(scene, ["ours", "another"]) == 2


def test_the_weights_of_experts_without_tokens_are_written_as_gradients_but_not_read():
    all_, one = (roofline.layer_roofline_ms(BASE, CEILINGS, experts) for experts in (None, 1))
    matrix = BASE.d * BASE.h * BASE.itemsize
    # w1 and w2 in the forward and in the backward, w3 in both, of 7 experts: none of these stages is bound by FLOPs
    assert (all_ - one) * BYTES_PER_MS == pytest.approx(7 * 6 * matrix)
    assert all_ == roofline.layer_roofline_ms(BASE, CEILINGS, BASE.E)


def test_skew_changes_the_routing_alone_and_compiles_nothing_anew(tiny, monkeypatch):
    reset = Mock()
    monkeypatch.setattr(growth.torch.compiler, "reset", reset)
    rows = rows_of("skew")
    assert {row["routing"] for row in rows} == {"zipf:0", "zipf:2"} and not reset.called
    assert len(rows) == 4 and all(row["shape"] == BASE.sizes for row in rows)
    rows_of("L")
    assert reset.call_count == 2


def test_a_step_that_does_not_fit_has_a_row_that_says_so(tiny, monkeypatch):
    def full(scene, subject):
        if subject.system == "gather_sum":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return error_of(scene, subject)

    error_of = layer.error_of
    monkeypatch.setattr(layer, "error_of", full)
    ours, other = rows_of("L")[-2:]
    assert ours["step_ms"] > 0 and (other["step_ms"], other["error"], other["repetitions"]) == (None, None, 0)
    assert other["problem"] == "a step does not fit into the device's memory" and report.wrong([other]) == []
    assert "does not fit" in report.markdown([ours, other])
    monkeypatch.setattr(layer, "error_of", Mock(side_effect=torch.OutOfMemoryError))
    assert [(row["step_ms"], row["experts"]) for row in rows_of("L")[-2:]] == [(None, BASE.E)] * 2


@pytest.mark.parametrize(("seconds", "count"), [(1e-9, growth.LEAST_REPETITIONS), (11.0, 6), (1e9, 15)])
def test_the_seconds_bound_the_repetitions(seconds, count, monkeypatch):
    device = PretendedDevice()
    monkeypatch.setattr(growth.time, "perf_counter", lambda: device.now)

    def work(number, lap):
        device.now += 0.5  # twice a round

    found, samples = growth._interleaved({"a": work}, seconds, 15, device)
    assert found == count == len(samples["a"].laps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ("d",)}, "unknown axis 'd'"),
        ({"seconds": 0.0}, "seconds is 0.0, but it must be above 0"),
        ({"versions": ("3_mma",)}, "--kernel 3_mma: bench growth has the layer's own version"),
        ({"routing": "zipf"}, "--routing zipf: only bench layer takes it"),
    ],
)
def test_what_cannot_be_timed_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan.jobs("growth", plan.Request(**options))


def test_the_options_are_of_growth_alone():
    with pytest.raises(ValueError, match="--of L: only bench growth takes it"):
        plan.jobs("layer", plan.Request(axes=("L",)))
    with pytest.raises(ValueError, match="--seconds 3: only bench growth takes it"):
        plan.jobs("host", plan.Request(seconds=3))
    jobs = plan.jobs("growth", plan.Request(axes=("skew", "h"), seconds=30))
    assert [job.args[0].axis for job in jobs] == ["skew"] * 8 + ["h"] * 7
    assert {job.args[1] for job in jobs} == {2.0}


# The page -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def docs(tiny, tmp_path):
    """A folder of documents with a record of the command."""
    record = tmp_path / "results" / "growth_h100.json"
    words = ["bench", "growth", "--of", "L,skew", "--repetitions", "1", "--record", str(record)]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "250"})
    assert shown.exit_code == 0 and "Zipf" not in shown.output and "experts with tokens" in shown.output, shown.output
    (tmp_path / "index.md").write_text((DOCS / "index.md").read_text())
    (tmp_path / "images").mkdir()
    return tmp_path


def test_the_page_has_a_picture_and_a_table_of_each_axis(docs):
    growth_page.write(docs)
    text = (docs / "growth.md").read_text()
    for axis in ("L", "skew"):
        assert f"(images/growth_h100_{axis}.png)" in text and (docs / "images" / f"growth_h100_{axis}.png").exists()
    assert "### Tokens L\n\nThe layer has d = 16, h = 24, E = 8, k = 3." in text and "### Experts E" not in text
    assert "- device: " in text and "- commit: " in text and "- versions: " in text
    index = (docs / "index.md").read_text()
    assert index.count("\ngrowth\n") == 1 and growth_page.listed(index) == index
    assert max(map(len, (line for line in text.splitlines() if not line.startswith(("|", "-", "!"))))) <= 120


def test_without_a_record_nothing_is_written(tmp_path):
    growth_page.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_what_the_records_give_and_there_is_none_without_them():
    page, paths = DOCS / "growth.md", growth_page.records()
    assert page.exists() == bool(paths) == ("\ngrowth\n" in (DOCS / "index.md").read_text())
    if paths:
        assert unmarked(page.read_text()) == unmarked(document.grown(paths))
        images = {path.stem for path in (DOCS / "images").glob("growth_*.png")}
        assert images == {growth_page.picture_name(p, axis) for p in paths for axis in _axes(p)}
    assert document.fill("<!-- begin growth -->\n<!-- end growth -->", None).count("growth.md") == bool(paths)


def _axes(path):
    return growth_page.measured(results.load(path))


def made(value, system, run=0, axis="L", **changes):
    row = {"kind": "growth", "run": run, "axis": axis, "value": value, "system": system, "shape": BASE.sizes}
    return row | {"step_ms": 4.0, "graph_ms": None, "roofline_ms": 1.0} | changes


def test_the_numbers_are_of_the_run_that_is_worst_for_ours():
    rows = [
        *(made(16, "moeblaze", run, step_ms=ms) for run, ms in enumerate((2.0, 5.0))),
        *(made(16, growth.COMPILED, run, step_ms=ms, graph_ms=7.5) for run, ms in enumerate((20.0, 8.0))),
        made(1, "moeblaze", graph_ms=2.0),
    ]
    (axis,) = growth_page.measured({"rows": rows}).values()
    assert [(one.value, one.ours["step_ms"]) for one in axis] == [(1, 4.0), (16, 5.0)]
    assert axis[0].compiled is None and axis[1].compiled["step_ms"] == 8.0
    assert growth_page._said(axis) == (
        "Ours reaches 20 to 25% of the roofline. It is 1.60 to 1.60 times as fast as torch.compile."
    )
    first, second = growth_page._table("L", axis).splitlines()[2:]
    assert first == "| 1 | 1 | 4 | 25 | 2 |  |  |  |  |" and second == "| 16 | 1 | 5 | 20 |  | 8 | 7.5 | 1.60 |  |"
    assert growth_page.curves(axis) == {
        "roofline": {1: 1.0, 16: 1.0},
        "ours": {1: 4.0, 16: 5.0},
        "ours as a CUDA graph": {1: 2.0},
        "torch.compile": {16: 8.0},
        "torch.compile as a CUDA graph": {16: 7.5},
    }


def test_the_page_leads_with_the_range_of_all_axes():
    rows = [
        *(made(16, system, step_ms=ms) for system, ms in (("moeblaze", 5.0), (growth.COMPILED, 8.0))),
        *(made(32, system, axis="k", step_ms=ms) for system, ms in (("moeblaze", 2.0), (growth.COMPILED, 2.5))),
        *(made(64, system, axis="k", step_ms=None) for system in ("moeblaze", growth.COMPILED)),
    ]
    assert findings.growth(growth_page.measured({"rows": rows}), "H100").replace("\n", " ") == (
        "On an H100, our layer is 1.25 to 1.60 times as fast as torch.compile, over all sizes that we timed with both. "
        "It reaches 20 to 50% of the roofline: least at L = 16, most at k = 32."
    )
    assert findings.growth(growth_page.measured({"rows": rows[-2:]}), "H100") == ""


def test_what_does_not_fit_has_no_point_and_says_so():
    rows = [made(1, "moeblaze"), made(4, "moeblaze", step_ms=None), made(4, growth.COMPILED, step_ms=None)]
    (axis,) = growth_page.measured({"rows": rows}).values()
    assert growth_page.curves(axis) == {"roofline": {1: 1.0, 4: 1.0}, "ours": {1: 4.0}}
    assert growth_page._table("L", axis).splitlines()[-1] == "| 4 | 1 | does not fit |  |  | does not fit |  |  |  |"
    assert growth_page._said(axis[1:]) == "No point fits."


def test_the_picture_draws_every_curve_on_its_axes():
    curves = {name: {1.0: 1.0 + number, 4.0: 2.0 + number} for number, name in enumerate(plots.CURVES)}
    figure = plots.growth(curves, "tokens L", True)
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[*curve.values()] for curve in curves.values()]
    assert [line.get_label() for line in axes.lines] == list(plots.CURVES)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens L", "milliseconds of a step")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4"]
    assert plots.growth(curves, "skew", False).axes[0].get_xscale() == "linear"
    assert_told_apart_in_grey(figure)
    with pytest.raises(ValueError, match="unknown curve 'mine'"):
        plots.growth({"mine": {}}, "", True)
