"""The claims of the papers: the list is whole, each verdict is computed, and each arithmetic claim holds."""

import json
import re

import numpy as np
import pytest
from helpers import unmarked
from typer.testing import CliRunner

from moeblaze_ref import provenance
from moeblaze_ref.cli import app
from moeblaze_ref.config import PAPER_PRESETS
from moeblaze_ref.papers import claims, command, document, items, moeblaze, moetuner, results, speed
from moeblaze_ref.papers.claims import Printed, Verdict, compared, exactly, measured, more_than, stated
from moeblaze_ref.papers.item import function
from moeblaze_ref.papers.results import Recorded

# Each equation with a number, each table and each figure of the three papers for which there is a number.
IDS = """
moeblaze-abstract moeblaze-2.1 moeblaze-2.2 moeblaze-3.1 moeblaze-fig2 moeblaze-4.2 moeblaze-alg1 moeblaze-table1
moeblaze-fig3 moeblaze-fig4 moeblaze-fig5 moeblaze-fig6
megablocks-fig2 megablocks-metadata megablocks-fig5 megablocks-table1 megablocks-table2 megablocks-table3
megablocks-fig7 megablocks-fig9 megablocks-fig10
moetuner-ilp1 moetuner-ilp2 moetuner-fig8 moetuner-measured
""".split()
ON_A_GPU = {
    "moeblaze-3.1", "moeblaze-4.2", "moeblaze-fig4", "moeblaze-fig6",
    "megablocks-fig2", "megablocks-fig5", "megablocks-fig9", "megablocks-fig10",
}  # fmt: skip
NOT_PRINTED = {"moeblaze-fig3", "moeblaze-fig4", "moeblaze-fig5", "moeblaze-fig6"}
NOT_REPRODUCED = {"megablocks-fig7", "megablocks-table3", "moetuner-measured"}


def paper(*arguments):
    """Run ``moeblaze paper``."""
    return CliRunner().invoke(app, ["paper", *map(str, arguments)])


@pytest.fixture(scope="module")
def rows():
    """Every claim, as recorded in docs/results."""
    recorded = Recorded()
    return [row for item in items.ITEMS.values() for row in item.rows(recorded)]


# The list -------------------------------------------------------------------------------------------------------------


def test_the_list_is_whole():
    assert list(items.ITEMS) == IDS


def test_each_item_has_claims(rows):
    assert {row.item for row in rows} == set(IDS)


def test_the_measured_items_are_those_that_need_a_gpu():
    assert set(command.measurable()) == ON_A_GPU


def test_each_function_of_an_item_is_there():
    for item in items.ITEMS.values():
        for name in filter(None, (item.claims, item.measured_by, item.drawn_by)):
            assert callable(function(name))


def test_no_claim_fails(rows):
    assert claims.failures(rows) == []


def test_verdicts_occur_only_where_they_may(rows):
    for row in rows:
        if row.verdict is Verdict.NOT_PRINTED:
            assert row.item in NOT_PRINTED and not row.printed, row
        if row.verdict is Verdict.NOT_REPRODUCED:
            assert row.item in NOT_REPRODUCED and row.printed, row
        if row.verdict is Verdict.NOT_MEASURED:
            assert row.item in ON_A_GPU | {"moeblaze-abstract"}, row
        assert row.why or row.verdict is Verdict.AGREES, row


def test_every_configuration_activation_and_system_has_its_bar(rows):
    for item, activations in (("moeblaze-fig3", ("ReLU", "SiLU")), ("moeblaze-fig5", ("SwiGLU",))):
        found = {row.what for row in rows if row.item == item}
        for name in PAPER_PRESETS:
            for activation in activations:
                assert {f"{name}, {activation}, {label}" for label in moeblaze.KEPT} <= found


# What the facts say, typed in once more: a changed formula is seen here -----------------------------------------------


@pytest.mark.parametrize(("activation", "low", "high"), [("silu", 1.22, 1.24), ("swiglu", 1.46, 1.49)])
def test_published_megablocks_over_algorithm_1(activation, low, high):
    ratios = [moeblaze.ratio(name, activation, moeblaze.ALGORITHM_1) for name in PAPER_PRESETS]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == (low, high)
    assert min(ratios) == ratios[0], "conf1 saves least"


@pytest.mark.parametrize(
    ("name", "activation", "published", "optimized"),
    [("conf4", "silu", 58.5, 32.0), ("conf3", "swiglu", 54.8, 19.6), ("conf4", "relu", 32.0, 32.0)],
)
def test_what_minimal_saves(name, activation, published, optimized):
    found = [moeblaze.saving(name, activation, baseline=label) for label in (moeblaze.PUBLISHED, moeblaze.OPTIMIZED)]
    assert [round(share, 1) for share in found] == [published, optimized]


@pytest.mark.parametrize(
    ("name", "activation", "label", "megabytes"),
    [
        ("conf4", "silu", moeblaze.OPTIMIZED, 3_360),
        ("conf3", "swiglu", moeblaze.OPTIMIZED, 5_511),
        ("conf4", "silu", moeblaze.ALGORITHM_1, 4_431),
        ("conf3", "swiglu", moeblaze.ALGORITHM_1, 6_581),
        ("conf4", "silu", moeblaze.MINIMAL, 2_284),
        ("conf3", "swiglu", moeblaze.MINIMAL, 4_433),
    ],
)
def test_saved_bytes_of_the_quoted_layers(name, activation, label, megabytes):
    assert round(moeblaze.kept_bytes(name, activation, label) / 1e6) == megabytes


def test_the_example_is_printed_wrong_in_two_places(rows):
    wrong = [row.what for row in rows if row.item == "moeblaze-fig2" and row.verdict is Verdict.PAPER_ERROR]
    assert wrong == ["tokens of the example", "token_expert_indices"]


def test_the_first_program_as_printed_balances_by_leaving_experts_out():
    deviation, x = moetuner.least_printed(np.array([9, 1, 1, 1]), 2)
    assert deviation == 0 and (x.sum(axis=1) >= 1).all() and (x.sum(axis=0) != 1).any()


# Verdicts are computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "verdict"),
    [
        (98.3, "", Verdict.AGREES),
        (98.3, "a reason that is stale", Verdict.FAILS),
        (97.4, "2 L h", Verdict.PAPER_ERROR),
        (97.4, "", Verdict.FAILS),
        (float("nan"), "", Verdict.FAILS),
    ],
)
def test_a_formula_is_compared_with_the_printed_digits(value, error, verdict):
    assert compared("x", exactly(98, "about 98 GB"), value, str, error).verdict is verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.4, 3.7], Verdict.AGREES),
        ([1.3, 2.0], Verdict.DIFFERS),
        ([2.0, 3.8], Verdict.DIFFERS),
        ([], Verdict.NOT_MEASURED),
    ],
)
def test_every_measured_value_must_lie_in_the_printed_range(values, verdict):
    assert measured("x", Printed("1.4x to 3.7x", 1.4, 3.7), values, "", "other kernels").verdict is verdict


def test_a_bound_and_a_sentence_have_verdicts_too():
    assert more_than(4, "over 4x").holds(4.1) and not more_than(4, "over 4x").holds(3.9)
    assert stated("x", "L = 6", False, "5").verdict is Verdict.FAILS
    assert stated("x", "L = 6", False, "5", "five tokens").verdict is Verdict.PAPER_ERROR
    assert stated("x", "L = 6", True, "6", "five tokens").verdict is Verdict.FAILS


def test_measured_bytes_that_are_not_the_formulas_fail():
    assert claims.not_printed("conf1, minimal", "604 MB", "H100: 605 MB", holds=False).verdict is Verdict.FAILS


# The command ----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_every_claim_is_shown():
    result = paper()
    assert result.exit_code == 0, result.output
    for name in IDS:
        assert f"{name}: " in result.output
    assert re.search(r"\d+ claims: \d+ agrees, \d+ the paper's error", result.output)


def test_json_has_every_row():
    found = json.loads(paper("moeblaze-fig3", "moeblaze-2.1", "--json").stdout)
    assert [item["item"] for item in found] == ["moeblaze-2.1", "moeblaze-fig3"]  # in the papers' order
    assert {"what", "printed", "formula", "ours", "verdict", "why", "arithmetic"} <= found[0]["rows"][0].keys()
    assert found[0]["rows"][0]["verdict"] == "the paper's error" and found[0]["rows"][0]["formula"] == "98.3 GB"
    assert len(found[1]["rows"]) == 2 * 7 * 6 + 1


def test_brackets_are_no_markup():
    assert "[1, 2, 4" in paper("moeblaze-fig2").output


def test_a_failing_claim_exits_with_1(monkeypatch):
    monkeypatch.setattr(moeblaze, "first_wall", lambda _: [compared("x", exactly(94, "94"), 98, str)])
    result = paper("moeblaze-2.1")
    assert result.exit_code == 1 and "FAILS" in result.output and "1 claims: 1 FAILS" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moeblaze-fig7",), "unknown item 'moeblaze-fig7'. Did you mean 'moeblaze-fig"),
        (("--gpu",), "--gpu measures items by name: moeblaze-3.1, moeblaze-4.2"),
        (("moeblaze-2.1", "--gpu"), "moeblaze-2.1 is not measured on a GPU. Measured are: moeblaze-3.1"),
        (("moeblaze-fig4", "--record", "x.json"), "--record takes what --gpu measures: add --gpu"),
        (("moeblaze-fig4", "--gpu"), "only a GPU is timed"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(arguments, message):
    result = paper(*arguments)
    assert result.exit_code == 2 and message in result.stderr.replace("\n", " ")


# The file of runs -----------------------------------------------------------------------------------------------------

HERE = {"device": "NVIDIA H100 80GB HBM3, 580, 81559 MiB", "clocks": None, "versions": {}, "commit": "c", "code": {}}


@pytest.fixture
def on_h100(monkeypatch):
    """Results are recorded as if on one GPU."""
    monkeypatch.setattr(provenance, "environment", lambda: dict(HERE))
    monkeypatch.setattr(provenance, "clocks", lambda: "1980 MHz")


def jobs_of(*numbers):
    """A job for each number, which gives one row with it."""
    return [lambda number=number: [{"ms": number}] for number in numbers]


def interrupted():
    raise KeyboardInterrupt


def test_runs_are_added_and_others_stay(tmp_path, on_h100):
    path = tmp_path / "paper.json"
    for item, numbers in (("a", (1, 2)), ("b", (3,)), ("a", (4, 5))):
        assert [row["ms"] for rows in results.record(path, item, jobs_of(*numbers)) for row in rows] == list(numbers)
    recorded = Recorded([path])
    assert [[row["ms"] for row in rows] for _, rows in recorded.runs("a")] == [[1, 2], [4, 5]]
    assert list(recorded.rows("b")) == [("H100", {"ms": 3})]


def test_an_interrupted_run_goes_on_and_shows_nothing_before(tmp_path, on_h100):
    path = tmp_path / "paper.json"
    with pytest.raises(KeyboardInterrupt):
        list(results.record(path, "a", [*jobs_of(1), interrupted]))
    assert list(Recorded([path]).runs("a")) == []
    started = []
    again = [lambda: started.append(1), lambda: [{"ms": 2}]]
    assert [rows for rows in results.record(path, "a", again)] == [[{"ms": 1}], [{"ms": 2}]]
    assert started == [] and len(list(Recorded([path]).runs("a"))) == 1


def test_another_commit_starts_a_run_of_its_own(tmp_path, on_h100, monkeypatch):
    path = tmp_path / "paper.json"
    with pytest.raises(KeyboardInterrupt):
        list(results.record(path, "a", [*jobs_of(1), interrupted]))
    monkeypatch.setattr(provenance, "environment", lambda: HERE | {"commit": "d"})
    assert [rows for rows in results.record(path, "a", jobs_of(7))] == [[{"ms": 7}]]
    assert [run["finished"] for run in results.load(path)["items"]["a"]] == [False, True]


def test_a_file_of_another_gpu_is_refused(tmp_path, on_h100, monkeypatch):
    path = tmp_path / "paper.json"
    list(results.record(path, "a", jobs_of(1)))
    results.check_place(path)
    monkeypatch.setattr(provenance, "environment", lambda: HERE | {"device": "NVIDIA H200, 1, 2"})
    with pytest.raises(ValueError, match="holds runs of NVIDIA H100.*here is NVIDIA H200.*name another file"):
        results.check_place(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is no object"),
        ("{}", "has no device, items"),
        ('{"device": "x", "items": {"a": [{}]}}', r"a\[0\] has no"),
        ("x", "no JSON"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, message):
    path = tmp_path / "paper_x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Recorded([path])


# The page -------------------------------------------------------------------------------------------------------------


def test_the_page_is_what_is_generated():
    text = document.PAGE.read_text()
    assert unmarked(document.fill(text)) == unmarked(text), "write it again by `make docs`"


def test_the_page_is_short():
    prose = re.sub(r"<!-- begin.*?<!-- end \w+ -->|```.*?```", "", document.PAGE.read_text(), flags=re.DOTALL)
    assert len(prose.split()) <= 1_200


def test_readme_says_what_minimal_saves_and_what_dispatch_takes():
    assert " ".join(document.summary().split()) in " ".join(document.README.read_text().split())


def speed_rows(system, policy, *ms):
    """A row for each configuration."""
    return [
        {"preset": name, "system": system, "policy": policy, "activation": "silu", "step_ms": time, "kept_bytes": None}
        for name, time in zip(PAPER_PRESETS, ms, strict=True)
    ]


def test_the_worse_of_two_runs_is_shown(tmp_path, on_h100):
    path = tmp_path / "paper.json"
    for ours in ((1, 1, 1, 1, 1, 1, 2), (2, 1, 1, 1, 1, 1, 1)):
        theirs = speed_rows("megablocks_published", None, 4, 3, 3, 3, 3, 3, 3)
        rows = theirs + speed_rows("moeblaze", "minimal", *ours)
        list(results.record(path, "moeblaze-fig4", [lambda rows=rows: rows]))
    worst = moeblaze.speeds(Recorded([path]), "moeblaze-fig4", "silu", "minimal")
    assert list(worst.values()) == [2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.5]
    assert "| SiLU | minimal | H100 | 2.00 | 3.00 |" in document.speed(Recorded([path]))


def test_every_baseline_of_figure_6_has_its_worse_run(tmp_path, on_h100):
    path = tmp_path / "paper.json"
    for ms in (1, 2):
        rows = [*speed_rows("sonicmoe", None, *[3] * 7), *speed_rows("moeblaze", "minimal", *[ms] * 7)]
        rows = [row | {"activation": "swiglu"} for row in rows]
        list(results.record(path, "moeblaze-fig6", [lambda rows=rows: rows]))
    assert document.baselines(Recorded([path])).splitlines()[2:] == ["| SonicMoE | H100 |" + " 1.50 |" * 7]
    assert {*document.BASELINES} >= {*speed.BASELINES["swiglu"]} - {"megablocks_published_block_sparse"}


def test_kept_bytes_that_were_measured_must_be_the_accounts(tmp_path, on_h100):
    path = tmp_path / "paper.json"
    kept = moeblaze.kept_bytes("conf2", "silu", "minimal")
    row = {"preset": "conf2", "system": "moeblaze", "policy": "minimal", "activation": "silu", "step_ms": 1.0}
    for number, verdict in ((kept, Verdict.NOT_PRINTED), (kept + 1, Verdict.FAILS)):
        list(results.record(path, "moeblaze-fig4", [lambda number=number: [row | {"kept_bytes": number}]]))
        shown = {found.what: found for found in items.ITEMS["moeblaze-fig3"].rows(Recorded([path]))}
        assert shown["conf2, SiLU, minimal"].verdict is verdict
        assert "H100: " in shown["conf2, SiLU, minimal"].ours
