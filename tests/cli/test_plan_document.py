"""docs/plan.md: each command prints what stands there, and answers speak of numbers in it."""

import re

import pytest

from moeblaze_ref.cli import plan_document
from moeblaze_ref.cli.plan_document import PAGE

QUESTION = re.compile(r"## ([^\n]*\?)\n\n(.*?)```text\n.*?```text\n(.*?)```", re.DOTALL)


def test_the_page_has_the_output_of_its_commands():
    assert plan_document.page(PAGE.read_text()) == PAGE.read_text()


def test_there_are_ten_questions_with_an_answer_each():
    questions = QUESTION.findall(PAGE.read_text())
    assert len(questions) == 10
    assert all(answer.strip() and "GB" in output for _, answer, output in questions)


def test_a_command_that_fails_is_named():
    with pytest.raises(ValueError, match="moeblaze plan nope ended with status 2: error: unknown model 'nope'"):
        plan_document.output("plan nope")


def test_an_older_output_is_replaced():
    text = "```text\nmoeblaze plan mixtral-8x7b\n```\n\n<!-- begin one -->\nearlier\n<!-- end one -->\n"
    written = plan_document.page(text)
    assert "earlier" not in written and "46,702,792,704 parameters" in written


def test_a_row_says_how_far_a_peak_is():
    peaks = {"forward": 1000, "backward": 2000, "optimizer": 4000}
    row = {
        **{"model": "m", "layers": 2, "attention": "flash", "experts": "torch", "sequence": 4096, "kept_bytes": 10},
        **{"planned_kept_bytes": 12, "same_storages": False, "peaks": peaks},
        "planned_peaks": {"forward": 1010, "backward": 1990, "optimizer": 4000},
    }
    place = {"device": "a GPU, 1, 2", "versions": {"torch": "2"}, "commit": "abc", "clocks": None, "code": {}}
    last = plan_document.measured(place | {"rows": [row]}).splitlines()[-1]
    assert last == "| m | 2 | flash | torch | 4,096 | 10 | +2 bytes | +1.00% | -0.50% | +0.00% |"
    last = plan_document.measured(place | {"rows": [row | {"peaks": None}]}).splitlines()[-1]
    assert last.endswith("| out of memory | out of memory | out of memory |")
