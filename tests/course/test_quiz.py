"""The quiz: answers computed anew, options with their reasons, sources that are there, and no answer on the sheet."""

import pkgutil
import re

import nbformat
import pytest
from readability import findings
from test_cli import moeblaze

from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course.exercises.sheets import SHEETS
from moeblaze_ref.course.notebook.markdown import cell_text
from moeblaze_ref.course.teaching import quiz
from moeblaze_ref.course.teaching.question import Choice, Number
from moeblaze_ref.course.teaching.slides import section

QUESTIONS = {question.name: question for question in quiz.questions()}
CHOICES = [question for question in QUESTIONS.values() if isinstance(question, Choice)]
NUMBERS = [question for question in QUESTIONS.values() if isinstance(question, Number)]

# By hand, from the numbers that the questions state.
BY_HAND = {
    "routed-copy": 32_768 * 4 * 2048 * 2,
    "two-walls": 4 * 4,
    "kept-minimal": 65_536 * 1024 * 2 + 65_536 * 4 * (2 * 4096 * 2 + 4 + 12) + 4 * 17,
    "price-of-a-byte": 512,
    "two-ninths": 200 / 9,
    "places": 79,
    "padding-without-drops": 100 * (160 - 64) / 160,
    "bytes-of-indices": 3 * 4 * 2000 + 4 * 9,
    "position-of-a-slot": 7 + 2,
    "tile-of-one-result": 2 * 64 * 64 / (2 * (64 + 64)),
    "products-of-a-step": 3 + 6,
    "slope-at-zero": 1 / 2,
    "bytes-of-a-stage": (128 * 64 + 64 * 256) * 2,
    "rows-of-padding": (256 - 130) + (128 - 1),
    "collapse": 8,
    "pairs-of-a-token": 2 * 2,
    "ranks-of-a-token": 2 * (1 - 6 / 28),
    "one-of-four": 4 * 8 + 12 * 8 / 4,
    "times-its-bound": 0.012 / (2 * 0.004),
}


def test_there_are_44_questions_with_names_of_their_own():
    assert len(QUESTIONS) == len(quiz.questions()) == 44
    of_notebooks = {sheet.course for sheet in SHEETS if sheet.number is not None}
    assert {question.notebook for question in QUESTIONS.values()} == of_notebooks


@pytest.mark.parametrize("question", NUMBERS, ids=lambda question: question.name)
def test_a_number_is_computed_and_equals_the_one_by_hand(question):
    computed = question.compute()
    assert computed == pytest.approx(BY_HAND[question.name], rel=1e-12)
    assert pkgutil.resolve_name(question.computed_by)
    written = [cell_text(number) for number in (computed, *question.slips)]
    assert len({*written}) == len(written), "a slip must not look like the answer"


def test_every_number_is_done_by_hand():
    assert BY_HAND.keys() == {question.name for question in NUMBERS}


@pytest.mark.parametrize("question", CHOICES, ids=lambda question: question.name)
def test_a_choice_has_four_options_in_an_order_of_its_own(question):
    assert len(set(question.options)) == 4 and len(question.wrong) == 3
    assert question.right in question.options


def test_the_right_option_is_at_no_one_place():
    places = [question.options.index(question.right) for question in CHOICES]
    assert {*places} == {0, 1, 2, 3} and max(map(places.count, places)) <= len(CHOICES) / 2


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda question: question.name)
def test_every_reason_is_one_sentence_and_every_source_is_there(question):
    reasons = question.wrong if isinstance(question, Choice) else question.slips
    for text in reasons.values():
        assert text.endswith(".") and not re.search(r"[.?!] [A-Z]", text), text
    for text in (question.ask, question.why, *reasons.values(), *map(str, reasons)):
        assert not list(findings(text))
    section(nbformat.read(ROOT / "notebooks" / f"{question.notebook}.ipynb", as_version=4), question.heading)
    papers = [part.strip() for part in question.paper.split(";") if part]
    names = "MoEBlaze|MegaBlocks|MoETuner|SonicMoE|Switch Transformer"
    assert all(re.fullmatch(rf"({names})(, (sections?|Algorithm|equation|profiling).*)?", part) for part in papers)


def test_the_sheet_has_every_question_and_no_answer():
    text = quiz.sheet()
    for question in QUESTIONS.values():
        assert question.ask in text and question.why not in text and question.source not in text
        if isinstance(question, Number):
            assert cell_text(question.compute()) not in text.split(question.ask)[1].split("\n**")[0]
    assert not any(reason in text for question in CHOICES for reason in question.wrong.values())
    assert re.findall(r"^\*\*(\d+)\.\*\*", text, re.MULTILINE) == [str(number) for number in range(1, 45)]


def test_the_key_has_every_answer_with_its_letter_its_reasons_and_its_source():
    text, asked = quiz.key(), quiz.sheet()
    for question in CHOICES:
        (letter,) = re.findall(rf"^- ([A-D])\. {re.escape(question.right)}$", asked, re.MULTILINE)
        assert f"- **{letter}. {question.right}** {question.why}" in text
        assert all(f". {option} {reason}" in text for option, reason in question.wrong.items())
    for question in NUMBERS:
        assert f"- **{cell_text(question.compute())} {question.unit}**" in text
        assert all(f"- Not {cell_text(slip)}. {reason}" in text for slip, reason in question.slips.items())
    assert text.count("- Source: notebook ") == len(QUESTIONS)


def test_the_command_writes_either_or_both(tmp_path):
    both = moeblaze("course", "quiz", "--out", tmp_path / "quiz.md", "--answers", tmp_path / "key.md")
    assert both.exit_code == 0 and "44 questions" in both.stdout
    assert (tmp_path / "quiz.md").read_text() == quiz.sheet() and (tmp_path / "key.md").read_text() == quiz.key()
    assert moeblaze("course", "quiz", "--answers", tmp_path / "key.md").exit_code == 0, "its own file is replaced"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to write: name a file with --out, with --answers, or both"),
        (("--out", "one.md", "--answers", "one.md"), "--out"),
        (
            ("--answers", "mine.md"),
            "mine.md exists, and this command did not write it: its first line is not '# Quiz",
        ),
    ],
)
def test_what_is_not_written(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.md").write_text("mine")
    done = moeblaze("course", "quiz", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
    assert {path.name for path in tmp_path.iterdir()} == {"mine.md"} and (tmp_path / "mine.md").read_text() == "mine"


def test_no_answer_lies_among_the_notebooks_or_the_documents():
    paths = [*(ROOT / "notebooks").rglob("*.ipynb"), *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text() for path in paths]
    assert len(texts) > 50
    for question in QUESTIONS.values():
        assert not any(question.ask in text or question.why in text for text in texts)
