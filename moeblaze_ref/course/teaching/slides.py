"""The slides of the lecture, made from the notebooks: one HTML file that needs no network.

A slide shows the first sentence of each paragraph, and lists, tables and formulas whole. Its notes have the full text.
A picture or table that a cell has printed ends a slide. Folded questions get a slide of their own, with the answers in
the notes.
"""

import base64
import html
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from nbformat import NotebookNode

from moeblaze_ref.course.notebook.outputs import NOTEBOOKS
from moeblaze_ref.course.teaching.outline import LECTURE, Part

TEMPLATE = Path(__file__).with_name("slides.html")
FIRST_LINE = TEMPLATE.read_text().partition("\n")[0]
MOST_LINES = 24  # of code, or of a table, on a slide
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_HEADING = re.compile(r"^#+ (?:\d+\. )?(.*)$", re.MULTILINE)
_FOLDED = re.compile(r"<details>\s*<summary><b>(.*?)</b> (.*?)</summary>(.*?)</details>", re.DOTALL)
_MATH = re.compile(r"(```.*?```|`[^`]*`)|(\$\$.+?\$\$|\$[^$\n]+\$)", re.DOTALL)
_SENTENCE = re.compile(r"(?:`[^`]*`|[^`])+?(?:[.!?]\**(?=\s+[A-Z`*\[(0-9])|$)", re.DOTALL)
_LARGE = re.compile(r"<(?:table|ul|ol|pre)\b")  # what leaves no room for a picture
_WHOLE = re.compile(r"(?:[-*|]|\d+\. |```|\$\$)")  # how a list, a table, code and a formula begin


@dataclass
class Slide:
    """The content of one slide, and its speaker notes."""

    part: Part
    shown: list[str] = field(default_factory=list)  #: HTML
    notes: list[str] = field(default_factory=list)  #: HTML
    full: bool = False  #: a picture, a table or questions fill it


def section(notebook: NotebookNode, heading: str) -> list[NotebookNode]:
    """The cells of a section, from its heading to the next of any level.

    Raises
    ------
    ValueError
        If the notebook has not exactly one such heading.
    """
    starts = [number for number, cell in enumerate(notebook.cells) if _headings(cell)]
    places = [number for number in starts if heading in _headings(notebook.cells[number])]
    if len(places) != 1:
        raise ValueError(f"the notebook has {len(places)} headings {heading!r}, but the outline needs exactly one")
    ends = [number for number in starts if number > places[0]] + [len(notebook.cells)]
    return notebook.cells[places[0] : ends[0]]


def _headings(cell: NotebookNode) -> list[str]:
    return _HEADING.findall(cell.source) if cell.cell_type == "markdown" else []


# The slides of a section ---------------------------------------------------------------------------------------------


def slides_of(part: Part, cells: Iterable[NotebookNode]) -> list[Slide]:
    """The slides of a section, in order."""
    slides = [Slide(part)]
    for cell in cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                _add_output(slides, output)
        else:
            _add_text(slides, _FOLDED.sub("", cell.source))
            if asked := _FOLDED.findall(cell.source):
                slides.append(Slide(part, *_questions(asked), full=True))
    return _joined(slide for slide in slides if slide.shown)


def _joined(slides: Iterable[Slide]) -> list[Slide]:
    """The slides; one with a single paragraph is joined to the one before, unless that asks a question."""
    joined: list[Slide] = []
    for slide in slides:
        short = len(slide.shown) == 1 and slide.shown[0].startswith("<p") and not _LARGE.search(slide.shown[0])
        if short and joined and "ask" not in joined[-1].shown[0][:20]:
            joined[-1].shown += slide.shown
            joined[-1].notes += slide.notes
        else:
            joined.append(slide)
    return joined


def _last(slides: list[Slide]) -> Slide:
    """The slide to which the next part goes: a new one if the last is full."""
    if slides[-1].full:
        slides.append(Slide(slides[-1].part))
    return slides[-1]


def _add_text(slides: list[Slide], source: str) -> None:
    for block in filter(None, re.split(r"\n\s*\n(?! )", _HEADING.sub("", source).strip())):
        slide = _last(slides)
        whole = _WHOLE.match(block) and not block.startswith("**")
        slide.shown.append(rendered(block if whole else _sentences(block)[0]))
        slide.notes += [] if whole else [rendered(block)]


def _sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, or the whole paragraph if its code is not closed."""
    return _SENTENCE.findall(paragraph) or [paragraph]


def _add_output(slides: list[Slide], output: NotebookNode) -> None:
    shown = _output(output)
    if shown is None:
        table = output.get("data", {}).get("text/markdown", "").startswith("|")
        if table and slides[-1].shown and not slides[-1].full:
            slides[-1].shown.pop()  # what announces the table
        return
    slide, picture = _last(slides), shown.startswith("<img")
    if picture and any(_LARGE.search(one) for one in slide.shown):
        last = slide.shown.pop() if slide.shown[-1].startswith("<p") else ""
        slide = Slide(slide.part, [last] if last else [])
        slides.append(slide)
    slide.shown.append(shown)
    slide.full = picture or "<table" in shown or "<pre" in shown


def _output(output: NotebookNode) -> str | None:
    """Return an output as HTML; None if a slide has no room for it, or if it mentions sliders."""
    data = output.get("data", {})
    if "image/png" in data:
        alt = html.escape(output.metadata.get("image/png", {}).get("alt", ""), quote=True)
        return f'<img alt="{alt}" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return f'<div class="printed">{data["text/html"]}</div>'
    text = data.get("text/markdown", "")
    if not text or text.startswith("*Run the notebook") or text.count("\n") > MOST_LINES:
        return None
    return rendered(text)


def _questions(asked: Iterable[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    """Folded questions as a list, and their answers."""
    asked = list(asked)
    items = "".join(f"<li><b>{kind}</b> {question}</li>" for kind, question, _ in asked)
    answers = [f"<p><b>{question}</b></p>{rendered(answer.strip())}" for _, question, answer in asked]
    return [f'<ul class="ask">{items}</ul>'], answers


# Markdown and formulas -----------------------------------------------------------------------------------------------


def rendered(text: str) -> str:
    """Markdown as HTML: formulas are pictures, and links are words."""
    formulas: list[str] = []

    def kept(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        formulas.append(formula(match[2].strip("$")))
        return f"FORMULA{len(formulas) - 1}FORMULA"

    found = _MARKDOWN.render(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _MATH.sub(kept, text)))
    return re.sub(r"FORMULA(\d+)FORMULA", lambda match: formulas[int(match[1])], found)


def formula(tex: str) -> str:
    """A formula as a picture; as its source where Matplotlib does not know a command of it."""
    from matplotlib.mathtext import math_to_image

    source, file = html.escape(tex.strip(), quote=True), io.BytesIO()
    try:
        math_to_image(f"${' '.join(tex.split())}$", file, format="svg", dpi=72)
    except ValueError:
        return f"<code>{source}</code>"
    svg = base64.b64encode(file.getvalue()).decode()
    return f'<img class="formula" alt="{source}" src="data:image/svg+xml;base64,{svg}">'


# The file ------------------------------------------------------------------------------------------------------------


def lecture(parts: Iterable[Part] = LECTURE, folder: Path = NOTEBOOKS) -> Iterator[Slide]:
    """The slides of all parts; each notebook begins with its title and the text below it.

    Raises
    ------
    ValueError
        If a notebook has no section of a part's heading; the message names both.
    """
    notebook, read = "", nbformat.v4.new_notebook()
    for part in parts:
        if not part.notebook:
            yield Slide(part, [f"<p>{part.minutes} minutes</p>"])
            continue
        if part.notebook != notebook:
            notebook = part.notebook
            read = nbformat.read(folder / f"{notebook}.ipynb", as_version=4)
            yield _title(read, notebook)
        try:
            yield from slides_of(part, section(read, part.heading))
        except ValueError as error:
            raise ValueError(f"{notebook}: {error}") from None


def _title(notebook: NotebookNode, name: str) -> Slide:
    title, text = notebook.cells[0].source.split("\n\n")[:2]
    sentences = "\n\n".join(_sentences(text))
    return Slide(Part(name, _HEADING.findall(title)[0], 0), [rendered(sentences)])


def page(slides: Iterable[Slide]) -> str:
    """The whole file."""
    slides, sections, minute, seen = list(slides), [], 0, None
    for slide in slides:
        if slide.part != seen:
            seen, begins = slide.part, minute
            minute += slide.part.minutes
        time = f"minute {begins} to {minute}" if slide.part.minutes else ""
        sections.append(_section(slide, time, "title" if slide.part.notebook and not slide.part.minutes else ""))
    return TEMPLATE.read_text().replace("<!-- slides -->", "\n".join(sections))


def _section(slide: Slide, time: str, kind: str) -> str:
    heading = _MARKDOWN.renderInline(slide.part.heading)
    where = slide.part.notebook.replace("_", " ")
    return (
        f'<section class="{kind}"><header><h2>{heading}</h2><p>{where}</p><p>{time}</p></header>'
        f'<div class="body"><div class="fit">{"".join(slide.shown)}</div></div>'
        f"<aside>{''.join(slide.notes)}</aside></section>"
    )
