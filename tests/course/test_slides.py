"""The slides of the lecture: made from the notebooks, whole on a screen of 1280 x 720, and without a network."""

import json
import re

import browser
import nbformat
import pytest
from test_cli import moeblaze

from moeblaze_ref.core.paths import DOCS, ROOT
from moeblaze_ref.course.teaching import slides
from moeblaze_ref.course.teaching.outline import LECTURE, Part

MADE = list(slides.lecture())
NOTEBOOKS = list(dict.fromkeys(part.notebook for part in LECTURE if part.notebook))
SMALLEST_SCALE = 0.55  # below it, a table of 22 pixels a line is hard to read

# What is cut or missing on the slide that is shown, and how far it was made smaller.
SEEN = """() => {
    const slide = document.querySelector("section.now"), body = slide.querySelector(".body");
    const place = body.getBoundingClientRect(), fit = slide.querySelector(".fit");
    const outside = [...fit.querySelectorAll("*")].filter(part => {
        const {left, right, top, bottom} = part.getBoundingClientRect();
        return left < place.left - 2 || right > place.right + 2 || top < place.top - 2 || bottom > place.bottom + 2;
    });
    const pictures = [...fit.querySelectorAll("img")];
    return {
        heading: slide.querySelector("h2").textContent,
        outside: outside.map(part => part.outerHTML.slice(0, 80)),
        unseen: pictures.filter(picture => !picture.naturalWidth || picture.clientHeight < 12).length,
        heights: pictures.filter(picture => picture.className !== "formula").map(picture => picture.clientHeight),
        scale: Number((fit.style.transform.match(/[\\d.]+/) ?? [1])[0]),
        header: slide.querySelector("header").getBoundingClientRect().height,
    };
}"""


def test_the_outline_takes_the_minutes_that_the_path_gives_the_lecture():
    plan = (DOCS / "path.md").read_text().partition("### A lecture of two hours")[2].partition("###")[0]
    rows = re.findall(r"^\| (\d+) \| .*? \| (?:\[.*?\]\(\.\./notebooks/(\w+)\.ipynb\))?", plan, re.MULTILINE)
    stated = {notebook: int(minutes) for minutes, notebook in rows}
    assert stated == {name: sum(part.minutes for part in LECTURE if part.notebook == name) for name in (*NOTEBOOKS, "")}
    assert sum(stated.values()) == 120


@pytest.mark.parametrize("part", [part for part in LECTURE if part.notebook], ids=lambda part: part.heading)
def test_every_part_is_a_section_with_slides_that_its_notebook_has(part):
    text = (ROOT / "notebooks" / f"{part.notebook}.ipynb").read_text()
    shown = "".join("".join(one.shown) for one in MADE if one.part == part)
    pictures = re.findall(r"image/png;base64,([^\"]{80})", shown)
    assert [one for one in MADE if one.part == part]
    assert all(picture in text.replace("\\n", "") for picture in pictures)


def test_a_heading_that_the_notebook_lacks_is_named():
    with pytest.raises(ValueError, match="00_memory_wall: the notebook has 0 headings 'The answer'"):
        list(slides.lecture([Part("00_memory_wall", "The answer", 1)]))


def cell(source="", *outputs):
    """A cell of Markdown, or a cell of code with these outputs."""
    if not outputs:
        return nbformat.v4.new_markdown_cell(source)
    shown = [nbformat.v4.new_output("display_data", data) for data in outputs]
    return nbformat.v4.new_code_cell(source, outputs=shown)


def shown_of(*cells):
    return slides.slides_of(Part("", "", 1), cells)


def test_paragraphs_are_shown_by_their_first_sentence_and_noted_whole():
    (one,) = shown_of(cell("## 1. A heading\n\nFirst `a. B`, then. Second.\n\n- an item\n- another. Whole."))
    assert one.shown[0] == "<p>First <code>a. B</code>, then.</p>\n" and "Second" in one.notes[0]
    assert "another. Whole." in one.shown[1] and "heading" not in "".join(one.shown)


def test_questions_get_a_slide_and_their_answers_are_notes():
    folded = "<details>\n<summary><b>Question.</b> Why <code>k</code>?</summary>\n\nBecause *so*.\n\n</details>"
    text, asked = shown_of(cell(f"## A heading\n\nText.\n\n{folded}"))
    assert "Why <code>k</code>?" in asked.shown[0] and "Because" not in asked.shown[0]
    assert "Because <em>so</em>." in asked.notes[0] and text.shown == ["<p>Text.</p>\n"]


def test_a_picture_ends_a_slide_and_leaves_one_with_a_table():
    table = "| a |\n|---|\n| 1 |"
    picture = {"image/png": "AAAA"}
    one, two = shown_of(cell(f"{table}\n\nIt shows."), cell("", picture), cell("Last."))
    assert "<table>" in one.shown[0] and len(one.shown) == 1
    assert two.shown[0] == "<p>It shows.</p>\n" and two.shown[1].startswith("<img")
    assert two.shown[2] == "<p>Last.</p>\n", "a single paragraph has no slide of its own"


def test_a_table_that_is_too_long_goes_with_what_announces_it():
    long = {"text/markdown": "| a |\n|---|\n" + "| 1 |\n" * 40}
    assert [one.shown for one in shown_of(cell("Text.\n\nA table:"), cell("", long))] == [["<p>Text.</p>\n"]]
    assert len(shown_of(cell("", {"image/png": "AAAA"}), cell("", long))) == 1, "a picture before it stays"


def test_long_code_and_words_on_sliders_are_left_out():
    long = {"text/markdown": "```python\n" + "x = 1\n" * 40 + "```"}
    note = {"text/markdown": "*Run the notebook to move this: L = 1.*"}
    assert [one.shown for one in shown_of(cell("Text."), cell("", long, note))] == [["<p>Text.</p>\n"]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A sum $a_b + c_d$ here.", 'class="formula" alt="a_b + c_d"'),
        ("$$\n\\frac{1}{2}\n$$", 'alt="\\frac{1}{2}" src="data:image/svg'),
        ("`$a$` is code", "<code>$a$</code>"),
        ("A $\\nosuchcommand{x}$ here.", "<code>\\nosuchcommand{x}</code>"),
        ("[a link](of.md) is words", "<p>a link is words</p>"),
    ],
)
def test_formulas_are_pictures_and_links_are_words(text, found):
    assert found in slides.rendered(text)


def test_a_slide_says_the_minutes_of_its_part():
    page = slides.page(MADE)
    assert "minute 0 to 4" in page and "minute 112 to 120" in page
    assert page.count("<section") == len(MADE)


def test_the_file_loads_nothing_and_every_slide_is_whole(tmp_path):
    file = tmp_path / "slides.html"
    done = moeblaze("course", "slides", file)
    assert done.exit_code == 0 and f"{len(MADE)} slides" in done.stdout
    assert not re.search(r"""(?:src|href)=["'](?!data:)|url\(|@import""", file.read_text())
    with browser.opened(tmp_path) as page:
        complaints = browser.complaints(page)
        page.context.set_offline(True)
        page.set_viewport_size({"width": 1280, "height": 720})
        page.goto(file.as_uri())
        for number, slide in enumerate(MADE):
            page.wait_for_function("() => [...document.images].every(image => image.complete)")
            seen = page.evaluate(SEEN)
            assert not seen["outside"] and not seen["unseen"] and seen["header"] < 140, json.dumps(seen)
            assert seen["scale"] >= SMALLEST_SCALE and min(seen["heights"], default=720) >= 240, json.dumps(seen)
            assert seen["heading"] == re.sub("[`*]", "", slide.part.heading)
            assert page.url.endswith(f"#{number + 1}")
            page.keyboard.press("ArrowRight")
        assert page.evaluate("location.hash") == f"#{len(MADE)}", "the last slide stays"
        page.keyboard.press("n")
        assert page.locator("section.now aside").is_visible()
        page.keyboard.press("Home")
        assert page.evaluate("location.hash") == "#1" and not complaints
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(prefer_css_page_size=True))) == len(MADE)
