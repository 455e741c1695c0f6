"""The site is built without a warning, none of its links leads nowhere, and its pages say what the code does."""

import ast
import functools
import html
import inspect
import io
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import matplotlib
import nbformat
import numpy as np
import processes
import pytest
from helpers import unmarked
from ipywidgets import FloatSlider, IntSlider
from matplotlib.colors import to_hex
from once import made_once
from PIL import Image
from playwright.sync_api import expect

from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.core.records import read
from moeblaze_ref.course.exercises.sheets import SHEETS
from moeblaze_ref.course.notebook import outputs
from moeblaze_ref.course.notebook.explorer import RoutingGrid, routing_picture
from moeblaze_ref.course.notebook.memory import memory_bars
from moeblaze_ref.course.notebook.pictures import PAPER, alt_text
from moeblaze_ref.course.site import extension, frames, glossary, mathml, records, sources
from moeblaze_ref.course.site import path as course_path
from moeblaze_ref.verify.cases import GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(exit status, what was complained of, the folder of the site), built once for all processes of the tests."""

    def build():  # by a process of its own, since Sphinx leaves it changed
        site = tmp_path_factory.mktemp("built") / "site"
        command = [sys.executable, "-m", "moeblaze_ref.course.site.build", site]
        run = processes.run(command, limit=1100, cwd=ROOT)  # it draws some 300 pictures
        return json.dumps([run.returncode, run.stderr, str(site)])

    status, complaints, site = json.loads(made_once(tmp_path_factory, "site.json", build))
    return status, complaints, Path(site)


ANCHOR = re.compile(r'\b(?:id|name)="([^"]*)"')
LINK = re.compile(r'<a\b[^>]*\bhref="([^"]*)"')
LOADED = re.compile(r'<(?:img|link|script)\b[^>]*\b(?:src|href)="([^"]*)"')


@functools.cache
def anchors(path):
    """Where a link may lead in a page."""
    return set(map(html.unescape, ANCHOR.findall(path.read_text())))


def broken(site: Path) -> Iterator[str]:
    """Links of the pages under a folder that lead to no file, or to no place in one."""
    for path in site.rglob("*.html"):
        for target in map(html.unescape, set(LINK.findall(path.read_text()))):
            link = urlsplit(target)
            if link.scheme or link.netloc:
                continue  # another site's business
            file = Path(path.parent, unquote(link.path)).resolve() if link.path else path
            if not file.is_file():
                yield f"{path.relative_to(site)}: {target}: there is no such file"
            elif link.fragment and unquote(link.fragment) not in anchors(file):
                yield f"{path.relative_to(site)}: {target}: there is no such place"


def test_it_is_built_without_a_warning(built):
    status, complaints, site = built
    assert status == 0 and not complaints, complaints
    assert (site / "index.html").is_file() and (site / "searchindex.js").is_file()


def test_the_side_of_the_home_page_folds_exercises_and_has_no_solutions(built):
    side = (built[2] / "docs" / "index.html").read_text().partition("sidebar-tree")[2].partition("</aside>")[0]
    levels = re.findall(r'<li class="toctree-l(\d)[^"]*"><a class="reference internal" href="([^"]+)"', side)
    sheets = [level for level, target in levels if "/exercises/" in target or "/solutions/" in target]
    assert len(sheets) == len(SHEETS) and set(sheets) == {"2"}
    assert {"exercises.html", "architecture.html"} <= {target for level, target in levels if level == "1"}
    assert not [target for _, target in levels if "solutions" in target]
    assert all((built[2] / "notebooks" / "solutions" / f"{sheet.course}.html").is_file() for sheet in SHEETS)


def test_no_link_is_broken(built):
    assert list(broken(built[2])) == []


def test_pages_load_nothing_from_elsewhere(built):
    loaded = [source for path in built[2].rglob("*.html") for source in LOADED.findall(path.read_text())]
    assert len(loaded) > 1000 and not [source for source in loaded if "//" in source]


FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![$`])\$([^$`\n]+)\$(?![$`])", re.DOTALL)


def test_formulas_are_drawn_by_the_browser_alone(built):
    page = (built[2] / "notebooks" / "04_backward_by_hand.html").read_text()
    assert page.count('<div class="math"><math') > 5 and "$$" not in page


def test_every_formula_of_the_notebooks_is_one_that_the_site_can_draw():
    cells = [
        cell.source
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "markdown"
    ]
    formulas = [block or inline for cell in cells for block, inline in FORMULA.findall(cell)]
    assert len(formulas) > 30
    for formula in formulas:
        assert mathml.tex2mathml(formula).startswith("<math")  # raises if it has a command that is unknown


def test_every_module_is_in_the_reference(built):
    shown = set().union(*map(anchors, (built[2] / "api").glob("*.html")))
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "moeblaze_ref").rglob("*.py")]
    names = {".".join(file.parts).removesuffix(".__init__") for file in files if file.name != "__main__"}
    assert {f"module-{name}" for name in names} <= shown
    assert "moeblaze_ref.backends.numpy_ref.dispatch.build" in shown and "moeblaze_ref.nn.torch_layer.MoELayer" in shown


def test_tables_in_outputs_are_tables(built):
    page = (built[2] / "notebooks" / "00_memory_wall.html").read_text()
    assert page.count("<table") > 5 and "<p>| " not in page


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.course)
def test_cells_with_cuda_kernels_are_coloured_as_cuda(built, sheet):
    page = (built[2] / "notebooks" / "exercises" / f"{sheet.course}.html").read_text()
    assert page.count("highlight-cuda ") == sum(exercise.language == "c++" for exercise in sheet.exercises)


def test_every_picture_has_a_text(built):
    """It is a phrase, and names no file."""
    found = [image for path in built[2].rglob("*.html") for image in re.findall(r"<img\b[^>]*>", path.read_text())]
    texts = [re.search(r'alt="([^"]*)"', image)[1] for image in found if "toggler" not in image]
    assert len(texts) > 100 and [text for text in texts if len(text) < 25 or re.search(r"\.(png|svg)$", text)] == []


def test_a_reader_finds_a_word_and_follows_every_link(built, tmp_path):
    with browser.served(built[2]) as site, browser.opened(tmp_path) as page:
        complaints = browser.complaints(page)
        page.goto(site)
        page.wait_for_url(f"{site}docs/index.html")
        opened, wrong = browser.follow_links(page, site)
        pages = [path for folder in ("api", "docs", "notebooks") for path in (built[2] / folder).rglob("*.html")]
        addresses = {site + path.relative_to(built[2]).as_posix() for path in pages}
        solutions = {address for address in addresses if "solutions" in address}
        assert addresses - opened == solutions and len(solutions) == len(SHEETS) + 1, "no page leads to a solution"
        wrong += [picture for address in sorted(solutions) for picture in browser.unseen_pictures(page, address)]
        assert not wrong and not complaints, "\n".join(wrong + complaints)
        page.goto(f"{site}notebooks/00_memory_wall.html")
        assert page.locator(".cell_output img").count() > 5
        browser.search(page, "dropless")
        expect(page.locator("article")).to_contain_text("dropless", ignore_case=True, timeout=browser.HANGS)
        page.goto(f"{site}source/moeblaze_ref/nn/torch_layer.py.html#line-1")
        expect(page.locator("pre")).to_contain_text("class MoELayer")
        assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_by_day_and_by_night(built, tmp_path, scheme):
    with browser.served(built[2]) as site, browser.opened(tmp_path) as page:
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{site}docs/index.html")
        found = page.evaluate(browser.CONTRAST)
        assert found["dark"] == (scheme == "dark") and found["ratio"] > 7, found


# Controls ------------------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
STATES = 10  # of the controls of each picture


def first_pictures(name):
    """The texts of the pictures below the notes of a committed notebook; None where they depend on the processor."""
    for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
        shown = cell.get("outputs", [])
        for note, picture in itertools.pairwise(shown):
            if note.get("data", {}).get("text/plain", "").startswith(f"*{outputs.NOTE}"):
                varies = outputs.VARIES in cell.metadata.get("tags", [])
                yield None if varies else picture.metadata["image/png"]["alt"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_frames_begin_with_the_committed_picture(built, name):
    listed = frames.listed(name, built[2] / frames.FOLDER)
    for data, text in zip(listed, first_pictures(name), strict=True):
        if "frames" in data and text is not None:
            start = ",".join(str(control["start"]) for control in data["controls"])
            assert outputs.same(data["frames"][start]["alt"], text)


def test_controls_move_their_pictures_from_the_disk(built, tmp_path):
    """Without a kernel, a server or a network: each shows the frame of the state that its controls have."""
    with browser.opened(tmp_path) as page:
        page.context.set_offline(True)
        complaints = browser.complaints(page)
        for name in NOTEBOOKS:
            page.goto((built[2] / "notebooks" / f"{name}.html").as_uri())
            expect(page.get_by_text(outputs.NOTE)).to_have_count(0)
            assert page.evaluate(browser.CUT) == []
            listed = frames.listed(name, built[2] / frames.FOLDER)
            for controls, data in zip(page.locator(".controls").all(), listed, strict=True):
                if "frames" in data:
                    seen = list(drive(controls, data))
                    assert len({shown["picture"] or shown["message"] for shown in seen}) > 1
        assert not complaints, "\n".join(complaints)


def drive(controls, data):
    """Move the controls of a picture, one after another; what is seen after each is the frame of what they say."""
    inputs = controls.locator("input, select").all()
    for turn in range(STATES):
        browser.move(inputs[turn % len(inputs)])
        seen = controls.evaluate(browser.FRAME)
        named = zip(data["controls"], seen["labels"], strict=True)
        state = ",".join(str(control["labels"].index(label)) for control, label in named)
        shown = {name: data["frames"][state].get(name) for name in ("picture", "alt", "message")}
        assert seen == shown | {"labels": seen["labels"]}
        yield seen


def test_a_frame_is_what_the_kernels_function_draws(built):
    folder = built[2] / frames.FOLDER
    names = list(inspect.signature(memory_bars).parameters)
    (data,) = (
        data
        for data in frames.listed("00_memory_wall", folder)
        if [control["name"] for control in data["controls"]] == names
    )
    assert len(data["frames"]) >= STATES
    for state, shown in itertools.islice(data["frames"].items(), STATES):
        labels = [control["labels"][int(at)] for control, at in zip(data["controls"], state.split(","), strict=True)]
        values = [label if re.search("[a-z]", label) else int(label.replace(",", "")) for label in labels]
        asked = dict(zip(names, values, strict=True))
        if "message" in shown:
            with pytest.raises(ValueError, match=re.escape(shown["message"])):
                memory_bars(**asked)
            continue
        again = io.BytesIO()
        with matplotlib.rc_context({"figure.facecolor": PAPER, "axes.facecolor": PAPER}):
            figure = memory_bars(**asked)
            figure.savefig(again, bbox_inches="tight")
        assert shown["alt"] == alt_text(figure)
        one, other = (
            np.asarray(Image.open(file).convert("RGBA"), float) for file in (again, folder / shown["picture"])
        )
        assert one.shape == other.shape and abs(one - other).mean() < 4


def test_the_explorer_is_the_kernels(built, tmp_path):
    """20 clicks and ten moves of sliders give the choices and the picture of a notebook, every cell and text of it."""
    chance = random.Random(0)
    grid = RoutingGrid(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
    sliders = {slider.description: slider for slider in grid.children[:-1]}
    sliders |= {"capacity_factor": FloatSlider(value=1.0), "block": IntSlider(value=2)}
    with browser.opened(tmp_path) as page:
        page.goto((built[2] / "notebooks" / f"{SECOND}.html").as_uri())
        explorer = page.locator(".controls:has(button)")
        pictures = page.locator(".cell_output:has(button) > svg").all()
        for turn in range(3 * STATES):
            free = [button for button in explorer.locator("button").all() if not button.text_content()]
            if free and turn % 3:
                button = chance.choice(free)
                grid.choose(*map(int, re.findall(r"\d+", button.get_attribute("title"))))
                button.click()
            else:
                label = explorer.locator("label").nth(turn // 3 % len(sliders))
                browser.move(label.locator("input"))
                *_, slider = (slider for name, slider in sliders.items() if label.text_content().startswith(name))
                slider.value = type(slider.value)(label.locator("output").text_content())
            figure = routing_picture(grid.value, sliders["capacity_factor"].value, sliders["block"].value)
            assert [in_order(picture.evaluate(browser.DRAWN)) for picture in pictures] == list(map(drawn, figure.axes))


def drawn(axes):
    """The cells and texts of a picture of matplotlib, and how many strokes lie over its cells."""
    cells = [
        [*cell.get_bbox().bounds, to_hex(cell.get_facecolor()), to_hex(cell.get_edgecolor())] for cell in axes.patches
    ]
    texts = [[*map(float, text.get_position()), text.get_text()] for text in axes.texts]
    strokes = len(axes.lines) + sum(bool(cell.get_hatch()) for cell in axes.patches)
    return in_order({"cells": cells, "texts": texts, "strokes": strokes})


def in_order(picture):
    """Cells and texts sorted, their places rounded: one program draws other ones first."""

    def rounded(part):
        return [round(value, 6) if isinstance(value, int | float) else value for value in part]

    return picture | {name: sorted(map(rounded, picture[name])) for name in ("cells", "texts")}


FAULTY = """
<a href="#here">here</a> <a href="#there">there</a> <a href="gone.html">gone</a> <a href="two.html#below">below</a>
<a href="file.txt">a file</a> <a href="gone.txt">another</a> <a href="https://elsewhere.invalid/">elsewhere</a>
<p id="here">Here.</p> <img src="gone.png"> <script>nothing()</script>
"""


def test_what_a_reader_stumbles_over_is_found(tmp_path):
    for name, text in {"one.html": FAULTY, "two.html": '<p id="below">', "file.txt": "a file"}.items():
        (tmp_path / name).write_text(text)
    with browser.served(tmp_path) as site, browser.opened(tmp_path) as page:
        complaints = browser.complaints(page)
        page.goto(f"{site}one.html")
        opened, wrong = browser.follow_links(page, site)
        assert any("nothing is not defined" in said for said in complaints)
        assert sorted(said.replace(site, "") for said in wrong) == [
            "one.html: gone.html: there is no such page",
            "one.html: gone.png is not shown",
            "one.html: gone.txt: there is no such page",
            "one.html: one.html#there: there is no such place",
        ]
        assert {f"{site}two.html", f"{site}file.txt"} <= opened


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "one.html").write_text('<p id="here"><a href="#here"><a href="two.html"><a href="https://a.invalid/b">')
    (tmp_path / "three.html").write_text('<a href="one.html#there"><a href="one.html#here">')
    assert sorted(broken(tmp_path)) == [
        "one.html: two.html: there is no such file",
        "three.html: one.html#there: there is no such place",
    ]


# Pages ---------------------------------------------------------------------------------------------------------------


def test_the_page_of_results_is_what_the_files_say():
    assert unmarked(records.DOCUMENT.read_text()) == unmarked(records.page())


def test_a_file_of_results_that_no_page_shows_is_found(tmp_path):
    (tmp_path / "bunch_h200.json").write_text("{}")
    with pytest.raises(ValueError, match="unknown kind of results 'bunch'. Did you mean 'bench'"):
        records.page(tmp_path)


def test_wrong_cases_are_counted(tmp_path):
    row = {"backend": "cuda", "stage": "combine", "dtype": "float32", "error": 3e-5, "bound": 1e-5, "available": True}
    rows = [row | {"ok": False}, row | {"error": 5e-6, "ok": True}, row | {"available": False, "ok": False}]
    (tmp_path / "check_gpu.json").write_text(json.dumps({"device": "a GPU", "commit": "abc", "rows": rows}))
    assert "| cuda | combine | float32 | 2 | 1 | 3.00 |" in records.page(tmp_path)


@pytest.mark.parametrize("bad", ["returncode", "failures", "errors"])
def test_runs_with_a_failure_are_counted(bad, tmp_path):
    run = {"returncode": 0, "tests": 9, "failures": 0, "errors": 0, "skipped": 0}
    record = {
        "device": "a GPU",
        "commit": "abc",
        "command": "pytest x",
        "runs": [run, run | {bad: 1}, run | {"skipped": 2}],
    }
    (tmp_path / "tests_gpu.json").write_text(json.dumps(record))
    assert "| a GPU | `pytest x` | 3 | 7 | 1 |" in records.page(tmp_path)


def test_the_glossary_has_the_words_of_all_documents():
    words = dict(glossary.entries())
    assert "roofline" in words and "](notation.md#save-policies)" in words["minimal"]
    assert "](cuda.md#words)" in words["warp"] and "blockDim, gridDim" not in words
    assert {"L", "expert_token_offsets", "slot", "megablocks", "by_gate", "KiB, MiB, GiB"} <= words.keys()
    listed = re.findall(r"^(\S.*)\n  ", glossary.page(), re.MULTILINE)
    assert listed == sorted(words, key=str.lower)
    text = (ROOT / "docs" / "notation.md").read_text()
    assert all(f"\n## {heading}\n" in text for heading in glossary.NOTATION)


def test_plans_without_a_teacher_have_the_page_on_cuda_before_notebook_2():
    plans = course_path.DOCUMENT.read_text().partition("## Syllabi")[2].split("### ")
    alone = [plan for plan in plans if re.match("An afternoon|A workshop|A week", plan)]
    assert len(alone) == 3
    for plan in alone:
        assert -1 < plan.find("](cuda.md)") < plan.find(f"](../notebooks/{SECOND}.ipynb)")


def test_the_path_has_every_notebook():
    text = course_path.DOCUMENT.read_text()
    notebooks = [path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    table = text.partition("## How long it takes")[0]
    assert re.findall(r"\(\.\./notebooks/(\S+\.ipynb)\)", table) == notebooks
    sheets = [f"../notebooks/exercises/{sheet.course}.ipynb" for sheet in SHEETS]
    week = text.partition("### A week alone")[2]
    assert re.findall(r"\((\.\./notebooks/exercises/\S+)\)", week) == sheets
    assert course_path.exercise_minutes("01_routing") == [5, 15, 10, 15, 15]
    assert all(course_path.exercise_minutes(sheet.course) for sheet in SHEETS)


def test_the_afternoon_takes_as_long_as_its_sheets():
    """Its lines about exercises add up to what the sheets of notebooks 0 and 2 are estimated at."""
    plan = course_path.DOCUMENT.read_text().partition("### An afternoon")[2].partition("###")[0]
    minutes = {line: int(number) for line, number in re.findall(r"^(\| (\d+) \|.*)$", plan, re.MULTILINE)}
    solved = [number for line, number in minutes.items() if "exercises/" in line or "the same |" in line]
    assert sum(solved) == sum(map(sum, map(course_path.exercise_minutes, ("00_memory_wall", SECOND))))
    assert 180 <= sum(minutes.values()) <= 300
    for number, name in ((1, "00_memory_wall"), (4, SECOND)):
        assert list(minutes.values())[number] == course_path.reading_minutes(ROOT / "notebooks" / f"{name}.ipynb")


SECOND = "02_dispatch_without_sorting"


def course(seconds):
    """A record of the path in which every notebook took so long."""
    rows = [{"notebook": file.name, "seconds": seconds} for file in (ROOT / "notebooks").glob("*.ipynb")]
    return {"rows": rows, "cores": 2, "device": "a processor", "versions": {"numpy": "2"}, "commit": "abc"}


def test_the_path_has_the_times_of_its_record():
    text = course_path.DOCUMENT.read_text()
    assert unmarked(course_path.fill(text, read(course_path.RECORD, course_path.KEYS))) == unmarked(text)


def test_times_are_rounded_and_summed():
    filled = course_path.fill("<!-- begin times -->\n<!-- end times -->", course(70.0))
    reading = course_path.reading_minutes(ROOT / "notebooks" / "00_memory_wall.ipynb")
    line = rf"\[0\. The memory wall\]\(\S+\) \| {reading} min \| 1 min 10 s \|"
    assert re.search(line, filled) and "- cores: 2" in filled
    assert re.search(r"\| all \| \d+ min \| 15 min 10 s \|", filled)  # thirteen notebooks
    assert "| 9 s |" in course_path.fill("<!-- begin times -->\n<!-- end times -->", course(9.4))


def test_a_record_without_a_notebook_is_refused():
    found = course(1.0)
    lost = found["rows"].pop()["notebook"]
    with pytest.raises(ValueError, match=f"the record has no time of {lost}"):
        course_path.fill("<!-- begin times -->\n<!-- end times -->", found)


def test_a_notebook_is_measured_with_nothing_compiled_before(tmp_path, monkeypatch):
    code = "import os\ncache = os.environ['MOEBLAZE_CACHE']\nassert cache != 'another' and os.listdir(cache) == []"
    cell = nbformat.v4.new_code_cell(code)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "00_empty.ipynb")
    monkeypatch.setattr(course_path, "NOTEBOOKS", tmp_path)
    monkeypatch.setenv("MOEBLAZE_CACHE", "another")
    (row,) = course_path.measure()["rows"]
    assert row["notebook"] == "00_empty.ipynb" and row["seconds"] > 0


PYTHON = """
TILE: int = 256
class Dispatch:
    def arrays(self): ...
def build(x): return arrays(x)
"""
CUDA = """
// dense_map( writes
__device__ int slot_of(const int* experts) { return experts[0]; }
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_map(const int* topk_experts,
              int k) { slot_of(topk_experts); }
"""


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        (PYTHON, "TILE", 2),
        (PYTHON, "Dispatch.arrays", 4),
        (PYTHON, "dispatch.build", 5),
        (PYTHON, "nothing", 1),
        (CUDA, "slot_of", 3),
        (CUDA, "dense_map", 5),
    ],
)
def test_a_link_finds_the_line_of_a_name(text, name, line):
    assert sources.line_of(text, name) == line


DOCSTRING = """One line, |x| of it.

    drawn   as
      typed

Grid   ceil(R / 4) blocks

Parameters
----------
x : int
    Any |x|."""


def test_docstrings_keep_drawings_and_kernel_headers():
    lines = DOCSTRING.splitlines()
    extension.keep_as_typed(None, "function", "f", None, None, lines)
    text = "\n".join(lines)
    assert "One line, \\|x| of it." in text and "\n::\n\n    drawn   as\n      typed\n" in text
    assert "| Grid   ceil(R / 4) blocks" in text and text.endswith("Any \\|x|.")


# Messages ------------------------------------------------------------------------------------------------------------


def said_by_python(path):
    """Every string of a Python file, what is filled in as ``...``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def said():
    """Whatever the code can say, one string a line; formats, variables and commands as ``...``."""
    package = ROOT / "moeblaze_ref"
    strings = [string for path in package.rglob("*.py") for string in said_by_python(path)]
    cpp = re.sub(r'"\s*\n\s*"', "", (package / "runtime" / "simt" / "runtime.cpp").read_text())  # neighbours are one
    strings += [re.sub(r"%l*[a-z]", "...", string) for string in re.findall(r'"((?:[^"\\\n]|\\.)*)"', cpp)]
    make = re.sub(r"\$\([^()]*(?:\([^()]*\))?\)", "...", (ROOT / "Makefile").read_text())
    strings += re.findall(r"echo '([^']*)'", make)
    lines = (ROOT / "scripts" / "system_packages.sh").read_text().splitlines()
    shell = "\n".join(line for line in lines if not line.startswith("#"))
    shell = re.sub(r"\$(?:\w+|\{[^}]*\}|\([^()]*\))", "...", shell)
    strings += [double or single for double, single in re.findall(r'"([^"]*)"|\'([^\']*)\'', shell)]
    return "\n".join(strings)


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^```text\n(.*?)\n```$", TROUBLES, re.MULTILINE)
assert len(QUOTED) > 20


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_code(message):
    assert message in said()
