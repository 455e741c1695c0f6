"""A measurement that writes its record after each case, and goes on with one that it began."""

import json
import sys

import pytest

from moeblaze_ref.plan import recorded

CASES = ["a", "b", "c"]


def measured(case):
    return [{"case": case, "row": row} for row in range(2)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command with options and functions of a case; return its record and the cases that it measured."""

    def run(*options, measure=measured):
        seen = []

        def rows(_, cases):
            for case in cases:
                seen.append(case)
                yield measure(case)

        monkeypatch.setattr(recorded, "_rows", rows)
        monkeypatch.setattr(sys, "argv", ["measure", "--record", str(tmp_path / "record.json"), *options])
        try:
            recorded.run("measure", "Measure.", measured, CASES, ())
        finally:
            monkeypatch.undo()
        return json.loads((tmp_path / "record.json").read_text()), seen

    return run


def fails_at_the_second(case):
    if case == "b":
        raise KeyboardInterrupt
    return measured(case)


def test_what_was_measured_before_an_interruption_is_kept(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(measure=fails_at_the_second)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["rows"] == measured("a") and record["measured"] == 1


def test_resume_measures_what_is_left(run):
    with pytest.raises(KeyboardInterrupt):
        run(measure=fails_at_the_second)
    record, seen = run("--resume")
    assert seen == ["b", "c"] and record["rows"] == [*measured("a"), *measured("b"), *measured("c")]
    again, seen = run("--resume")
    assert seen == [] and again == record


def test_without_resume_all_is_measured_anew(run):
    run()
    record, seen = run()
    assert seen == CASES and len(record["rows"]) == 6


def test_resume_refuses_a_record_of_other_cases(run, monkeypatch, capsys):
    run()
    monkeypatch.setitem(globals(), "CASES", ["a", "c"])
    with pytest.raises(SystemExit):
        run("--resume")
    said = capsys.readouterr().err
    assert "record.json cannot be resumed: its cases is ['a', 'b', 'c'], but it must be ['a', 'c']" in said


def test_each_case_has_a_process_of_its_own(capsys):
    found = list(recorded._rows(measured, CASES[:2]))
    assert found == [measured("a"), measured("b")]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [*measured("a"), *measured("b")]


def test_resume_needs_a_record(run, capsys):
    with pytest.raises(SystemExit):
        run("--resume")
    assert "--resume goes on with the record that --record names, but there is none" in capsys.readouterr().err
