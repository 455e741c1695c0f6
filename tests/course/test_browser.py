"""Notebooks in JupyterLab, as a reader has them: run by the menu, their sliders moved, in a real browser."""

import re
import shutil

import browser
import nbformat
import processes
import pytest
from playwright.sync_api import expect

from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course.notebook import copies
from moeblaze_ref.course.notebook.execution import METADATA

# The notebook whose controls are driven. It has widgets of every kind that the others have, says test_notebooks.
DRIVEN = ROOT / "notebooks" / "02_dispatch_without_sorting.ipynb"
STATES = 10  # of each ``explore``
STEPPER = 2  # the number of the ``explore`` below the buttons that play it


def write_cleared(notebook, path):
    """Write a notebook without its outputs: what is seen later was made there."""
    cleared = nbformat.from_dict(notebook)
    for cell in cleared.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(cleared, path)


def pytest_generate_tests(metafunc):
    """One notebook is driven, or by ``--every-notebook`` all."""
    if "path" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_notebook")
        paths = sorted(DRIVEN.parent.glob("*.ipynb")) if every else [DRIVEN]
        metafunc.parametrize("path", paths, ids=lambda path: path.stem)


def test_a_notebook_runs_and_its_controls_move_their_pictures(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    write_cleared(notebook, tmp_path / "read.ipynb")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    with browser.jupyterlab(tmp_path) as lab, browser.opened(tmp_path) as page:
        browser.run_all(page, lab, "read.ipynb")
        browser.check_outputs(page, len(code), pictures)
        assert page.evaluate(browser.CUT) == []
        explorers = page.locator(".widget-interact")
        expect(explorers).to_have_count(sum(cell.source.count("explore(") for cell in code))
        with browser.asking_kernel(tmp_path) as ask:
            for number, explorer in enumerate(explorers.all()):
                browser.drive(explorer, number, ask, STATES)
            if path == DRIVEN:
                browser.play(page.locator(".widget-play"), explorers.nth(STEPPER), STEPPER, ask)
        browser.check_outputs(page, len(code), pictures)


def test_run_all_leaves_a_clone_clean_and_a_link_to_a_document_opens(tmp_path):
    """In copies, as `moeblaze lab` makes and opens them."""
    clone, own = tmp_path / "clone", tmp_path / "clone" / "moeblaze_course"
    for part in (".gitignore", "notebooks/00_memory_wall.ipynb", "notebooks/02_dispatch_without_sorting.ipynb"):
        (clone / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, clone / part)
    git = ["git", "-C", clone, "-c", "user.name=reader", "-c", "user.email=reader@example.com"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "cloned"]):
        processes.run([*git, *command]).check_returncode()
    assert copies.copy(own, clone / "notebooks") == 2
    copied = own / "notebooks" / "00_memory_wall.ipynb"
    before = copied.read_bytes()
    with browser.jupyterlab(own) as lab, browser.opened(tmp_path) as page:
        browser.run_all(page, lab, "notebooks/00_memory_wall.ipynb")
        page.keyboard.press("Control+s")
        page.get_by_text("Saving completed").wait_for()
        assert copied.read_bytes() != before
        browser.open_file(page, lab, "notebooks/02_dispatch_without_sorting.ipynb")
        browser.wait_for_kernel(page)
        page.get_by_role("link", name="CUDA in one page").first.click()
        expect(page.get_by_role("heading", name="CUDA in one page")).to_be_visible()
    assert processes.run([*git, "status", "--porcelain"]).stdout == ""


BROKEN = """
from ipywidgets import IntSlider
from matplotlib.figure import Figure
from moeblaze_ref.course.notebook import explore
%matplotlib inline
figure, other = Figure(), Figure()
figure.subplots()
axes = other.subplots()

explore(lambda length: figure, length=IntSlider(value=3, min=0, max=3))

explore(lambda length: axes.set_xlim(0, length) and other, length=IntSlider(value=1, min=0, max=9))

explore(lambda length: {3: figure}[length], length=IntSlider(value=3, min=0, max=3))

1 / 0

2 + 2
"""


def test_sliders_that_move_no_picture_and_a_cell_that_raises_are_seen(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in BROKEN.strip().split("\n\n")]
    write_cleared(nbformat.v4.new_notebook(cells=cells, metadata=METADATA), tmp_path / "broken.ipynb")
    with browser.jupyterlab(tmp_path) as lab, browser.opened(tmp_path) as page:
        browser.run_all(page, lab, "broken.ipynb")
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            browser.check_outputs(page, cells=6, pictures=3)
        explorers = page.locator(".widget-interact").all()
        with browser.asking_kernel(tmp_path) as ask:
            browser.drive(explorers[1], 1, ask, 1)
            for number, message in ((0, "no other picture"), (2, "KeyError")):
                with pytest.raises(AssertionError, match=message):
                    browser.drive(explorers[number], number, ask, 1)
        with pytest.raises(AssertionError, match="KeyError"):
            browser.check_outputs(page, cells=6, pictures=3)


EDITOR = """
%load_ext moeblaze_ref.course.exercises
from moeblaze_ref.course.exercises import edit

edit("missing-barrier")
"""


def test_a_kernel_is_written_checked_and_stepped_through_in_the_editor(tmp_path, monkeypatch):
    """With the network off: a wrong kernel, the verdict on its line, a step, the mended kernel."""
    monkeypatch.setenv("MOEBLAZE_PROGRESS", str(tmp_path / "progress.json"))
    cells = [nbformat.v4.new_code_cell(source) for source in EDITOR.strip().split("\n\n")]
    write_cleared(nbformat.v4.new_notebook(cells=cells, metadata=METADATA), tmp_path / "read.ipynb")
    with browser.jupyterlab(tmp_path) as lab, browser.opened(tmp_path) as page:
        asked_elsewhere = browser.without_network(page)
        browser.run_all(page, lab, "read.ipynb")
        editor = page.locator(".moeblaze-editor")
        verdict, marked = editor.locator(".moeblaze-verdict"), editor.locator(".cm-line:has(.cm-lintRange-error)")
        expect(editor.locator(".cm-content")).to_contain_text("extern")

        browser.write_below(editor, "__shared__ int counts", "int none = nothing;")
        editor.get_by_role("button", name="Run").click()
        expect(editor.locator("progress")).to_be_visible()
        expect(verdict).to_contain_text("was not declared")
        expect(marked).to_have_text("    int none = nothing;")

        browser.write_over(marked, "")
        editor.get_by_role("button", name="Step", exact=True).click()
        expect(verdict).to_contain_text("race on counts[")
        expect(marked).to_have_count(2)
        before, picture = editor.locator(".moeblaze-now").text_content(), editor.locator("img").get_attribute("src")
        editor.get_by_role("button", name="Next").click()
        expect(editor.locator(".moeblaze-stepper")).to_contain_text("step 2 of ")
        expect(editor.locator("img")).not_to_have_attribute("src", picture)
        expect(editor.locator("img")).to_have_attribute("alt", re.compile("^step 2 of .*block 0, warp 0"))
        expect(editor.locator(".moeblaze-now")).to_have_attribute("data-lanes", "32 lanes")
        assert editor.locator(".moeblaze-now").text_content() != before

        browser.write_below(editor, "counts[threadIdx.x] = count;", "__syncthreads();")
        page.keyboard.press("Control+Enter")
        expect(verdict).to_contain_text("Right, within budget.")
        expect(marked).to_have_count(0)
        expect(editor.locator("progress")).to_be_hidden()
        kept = (tmp_path / "drafts" / "missing-barrier.txt").read_text()
        barriers = editor.locator(".cm-line", has_text="__syncthreads();")
        editor.get_by_role("button", name="Start again").click()
        expect(barriers).to_have_count(kept.count("__syncthreads();") - 1)
        assert not asked_elsewhere, asked_elsewhere
        expect(page.locator(browser.FAULTS)).to_have_count(0)
    assert "missing-barrier" in (tmp_path / "progress.json").read_text()


def test_what_fails_names_a_screenshot(tmp_path):
    with pytest.raises(ZeroDivisionError) as found, browser.opened(tmp_path):
        raise ZeroDivisionError
    (note,) = found.value.__notes__
    assert note.endswith(str(tmp_path / "failed.png")) and (tmp_path / "failed.png").stat().st_size > 0


def test_a_missing_browser_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="sudo apt install chromium"):
        browser.chromium()
