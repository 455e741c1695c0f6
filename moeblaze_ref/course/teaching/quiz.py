"""A quiz of 44 questions: the sheet that students get, and the key, which is computed when it is written."""

import string
from collections.abc import Callable, Iterator

from moeblaze_ref.course.exercises.sheets import SHEETS
from moeblaze_ref.course.notebook.markdown import cell_text
from moeblaze_ref.course.teaching.question import Choice, Number, Question
from moeblaze_ref.course.teaching.questions import kernels, memory, routing, systems

TITLE = "# Quiz: the Mixture-of-Experts memory wall"
KEY_TITLE = "# Quiz: the answers"
TITLES = {sheet.course: sheet.title for sheet in SHEETS}


def questions() -> tuple[Question, ...]:
    """All questions, in the order of the notebooks."""
    return tuple(
        sorted(
            (*memory.QUESTIONS, *routing.QUESTIONS, *kernels.QUESTIONS, *systems.QUESTIONS),
            key=lambda question: question.notebook,
        )
    )


def sheet() -> str:
    """The questions in Markdown, without any answer."""
    return _page(TITLE, "Mark one letter, or write a number with its unit.", _asked)


def key() -> str:
    """The answers in Markdown: right ones, why the others are wrong, and where to read it."""
    return _page(KEY_TITLE, "Numbers are computed by the functions that are named beside them.", _answered)


def _page(title: str, below: str, lines: Callable[[Question], Iterator[str]]) -> str:
    parts, notebook = [title, below], ""
    for number, question in enumerate(questions(), start=1):
        if question.notebook != notebook:
            notebook = question.notebook
            parts.append(f"## Notebook {int(notebook[:2])}: {TITLES[notebook]}")
        parts += [f"**{number}.** {question.ask}", "\n".join(lines(question))]
    return "\n\n".join(parts) + "\n"


def _asked(question: Question) -> Iterator[str]:
    if isinstance(question, Number):
        yield f"- ______ {question.unit}"
    else:
        yield from (f"- {letter}. {option}" for letter, option in _lettered(question))


def _lettered(question: Choice) -> Iterator[tuple[str, str]]:
    yield from zip(string.ascii_uppercase, question.options, strict=False)


def _answered(question: Question) -> Iterator[str]:
    if isinstance(question, Number):
        yield f"- **{cell_text(question.compute())} {question.unit}**, by `{question.computed_by}`. {question.why}"
        yield from (f"- Not {cell_text(slip)}. {why}" for slip, why in question.slips.items())
    else:
        letters = {option: letter for letter, option in _lettered(question)}
        yield f"- **{letters[question.right]}. {question.right}** {question.why}"
        yield from (f"- Not {letters[option]}. {option} {why}" for option, why in question.wrong.items())
    yield f"- Source: {question.source}."
