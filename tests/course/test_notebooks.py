"""The notebooks run from top to bottom, say nothing that does not exist, and hold what a course promises.

Executed ones are looked into: no errors, none inside a slider's picture either, and nothing on standard error.
"""

import ast
import base64
import functools
import html
import io
import itertools
import json
import math
import pkgutil
import re
import sys
from dataclasses import fields
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from helpers import assert_told_apart_in_grey
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from once import made_once
from PIL import Image
from test_browser import DRIVEN
from torch.utils.checkpoint import checkpoint

from moeblaze_ref.backends.numba_cuda import dispatch as numba_dispatch
from moeblaze_ref.backends.numpy_ref import block_sparse, gating, layer
from moeblaze_ref.backends.numpy_ref import dispatch as reference
from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.backends.raw_cuda import expert_down, expert_up, tiles
from moeblaze_ref.backends.raw_cuda import gemm as raw_gemm
from moeblaze_ref.bench import document, ladder
from moeblaze_ref.bench import layer as bench_layer
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, MoEConfig, preset
from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.core.units import GB, GIB, MIB
from moeblaze_ref.course.notebook import (
    backward,
    bullets,
    dispatch,
    doubling,
    gemm,
    hopper,
    megablocks,
    memory,
    outputs,
    parallel,
    pictures,
    placement,
    policies,
    routing,
    show_kernel,
    show_source,
    sources,
    table,
)
from moeblaze_ref.course.notebook.execution import METADATA, execute
from moeblaze_ref.memory.accounting import account, dropped_and_padded, largest_tokens
from moeblaze_ref.memory.plots import VERMILLION
from moeblaze_ref.memory.rows import megablocks_rows
from moeblaze_ref.nn.torch_layer import MoELayer, keep_routing
from moeblaze_ref.placement import simulate
from moeblaze_ref.placement.ilp import moetuner
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.source import inlined, kernel_text
from moeblaze_ref.systems import layer as layer_system
from moeblaze_ref.systems.capacity import expert_capacity
from moeblaze_ref.verify.cases import (
    GOLDEN_DISPATCH,
    GOLDEN_NUM_EXPERTS,
    GOLDEN_TOPK_EXPERTS,
    make_case,
    random_topk,
    relative_error,
)

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEED_EXTRAS = ("09_expert_placement", "10_expert_parallel", "12_is_your_layer_right")
KERNELS = "dispatch/1_dense_map.cu"


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    """Every notebook of the course."""
    return request.param


@pytest.fixture
def prose(path):
    """The Markdown of a notebook."""
    return "\n".join(cell.source for cell in cells(path, "markdown"))


@functools.cache
def notebook(path):
    return nbformat.read(path, as_version=4)


def cells(path, kind):
    return [cell for cell in notebook(path).cells if cell.cell_type == kind]


# Execution -----------------------------------------------------------------------------------------------------------


def run_of(path, host):
    """A notebook's run as text: by the wheel on a host, or here if it needs one of the extras, which hosts lack."""
    if path.stem in NEED_EXTRAS:
        return nbformat.writes(execute(notebook(path), FOLDER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(host.bin / "python"))
        patch.delenv("PYTHONPATH", raising=False)
        return nbformat.writes(execute(nbformat.read(host.notebooks / path.name, as_version=4), host.notebooks))


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request, tmp_path_factory, host):
    """A notebook's path and its run, which one process makes for all."""
    return request.param, run_once(tmp_path_factory, request.param, host)


def run_once(tmp_path_factory, path, host):
    ran = made_once(tmp_path_factory, path.name, lambda: run_of(path, host))
    return nbformat.reads(ran, as_version=4)


def widgets(ran):
    """The models of all widgets at the end."""
    return ran.metadata.get("widgets", {}).get(outputs.WIDGET_STATE, {}).get("state", {}).values()


def slider_outputs(ran):
    """What every Output widget, which is where a slider draws, showed at the end."""
    return [model["state"]["outputs"] for model in widgets(ran) if model["model_name"] == "OutputModel"]


def test_its_widgets_are_of_kinds_that_are_driven_in_a_browser(executed, tmp_path_factory, host):
    in_browser = run_once(tmp_path_factory, DRIVEN, host)
    kinds, driven = ({model["model_name"] for model in widgets(ran)} for ran in (executed[1], in_browser))
    assert driven and kinds <= driven


def test_it_runs_from_top_to_bottom(executed):
    _, ran = executed
    code = [cell for cell in ran.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell.outputs]
    assert not [output.text for output in shown if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in shown)


def test_it_says_again_what_is_committed(executed):
    path, ran = executed
    assert list(outputs.differences(notebook(path), outputs.settled(ran))) == []


def test_every_slider_has_drawn_its_picture(executed):
    path, ran = executed
    drawn = slider_outputs(ran)
    assert len(drawn) == sum(cell.source.count("explore(") for cell in cells(path, "code")) > 0
    for shown in drawn:
        assert ["image/png" in output.get("data", {}) for output in shown] == [True], shown


def test_a_text_is_of_one_picture(path):
    """Two pictures that say the same are the same: a slider that begins where the picture above it stands."""
    shown = [output for cell in cells(path, "code") for output in cell.outputs if "image/png" in output.get("data", {})]
    found = {}
    for output in shown:
        text, png = output["metadata"]["image/png"]["alt"], output["data"]["image/png"]
        assert found.setdefault(text, png) == png, text


def test_every_picture_is_said_in_words(executed):
    _, ran = executed
    shown = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    for output in [*shown, *sum(slider_outputs(ran), [])]:
        if "image/png" in output.get("data", {}):
            text = output["metadata"]["image/png"]["alt"]
            assert len(text) > 20 and f' alt="{html.escape(text)}">' in output["data"]["text/html"], text


def test_pictures_are_on_paper_that_does_not_glare(executed):
    _, ran = executed
    shown = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    pngs = [output["data"]["image/png"] for output in shown if "image/png" in output.get("data", {})]
    corners = {Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").getpixel((0, 0)) for png in pngs}
    assert corners == {tuple(round(255 * part) for part in to_rgb(pictures.PAPER))}


def test_the_kernel_is_this_very_python():
    asks = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import sys; print(sys.executable)")])
    (output,) = execute(asks, FOLDER).cells[0].outputs
    assert output.text.strip() == sys.executable


def test_an_error_in_a_cell_fails():
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(broken, FOLDER)


# The files -----------------------------------------------------------------------------------------------------------


def test_the_reading_order_has_no_gap():
    numbers = [int(path.stem[:2]) for path in NOTEBOOKS]
    assert numbers == list(range(len(numbers))) and len(numbers) >= 3
    for path, number in zip(NOTEBOOKS, numbers, strict=True):
        assert cells(path, "markdown")[0].source.startswith(f"# {number}. ")


def test_the_file_is_canonical(path):
    assert path.read_text() == outputs.text(nbformat.from_dict(notebook(path)))
    assert notebook(path).metadata == METADATA and notebook(path).nbformat_minor == 5
    assert path.stat().st_size <= outputs.MAX_BYTES
    nbformat.validate(notebook(path))
    assert outputs.settled(notebook(path)) == notebook(path)
    code = cells(path, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run `make notebooks`"


def test_cell_ids_are_names(path):
    ids = [cell.id for cell in notebook(path).cells]
    assert len(set(ids)) == len(ids)
    assert not [name for name in ids if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)]


# Large numbers and units with decimals belong into output; definitions and hand arithmetic are smaller.
UNWANTED = {
    "code": r".{89,}|__global__|cuda\.jit",  # it fits the page; source is shown, not pasted
    "markdown": r"\d\.\d+ ?(?:GB|GiB|MiB|MB|x\b|times)",
}


@pytest.mark.parametrize("kind", UNWANTED)
def test_no_cell_holds_what_is_unwanted(path, kind):
    assert not [cell.id for cell in cells(path, kind) if re.search(UNWANTED[kind], cell.source)]


# What a course promises ----------------------------------------------------------------------------------------------


def test_it_begins_with_what_one_learns_and_ends_with_what_is_open(path):
    first, *_, last = cells(path, "markdown")
    _, _, promised = first.source.partition("**You will learn**\n")
    assert len(re.findall(r"^- ", promised, re.MULTILINE)) == 3
    assert last.source.startswith("## What the paper leaves open\n")


SECTIONS = ("The question", "What surprised us", "Exercises", "What the paper leaves open", "Further reading")


def test_it_has_every_section(prose):
    headings = re.findall(r"^###? (?:\d+\. )?(.+)$", prose, re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == sorted(SECTIONS, key=headings.index)
    assert headings[0] == "The question" and headings[-1] == "Further reading"
    assert len(re.findall(r"^- \*\*", prose.partition("What surprised us\n")[2].partition("\n#")[0], re.MULTILINE)) >= 3
    assert PAPER.findall(prose.partition("### Further reading\n")[2])
    numbers = re.findall(r"^## (\d+)\. ", prose, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)] and len(numbers) > 4


PAPER = re.compile(r"\[arXiv (\d{4}\.\d{5})\]\(https://arxiv\.org/abs/\1\)")


def test_papers_are_links(prose):
    """Each is one that the documents name, too, and leads where it says; nothing is fetched."""
    known = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert not re.search(r"arXiv \d|https?://", PAPER.sub("", prose))
    assert not [paper for paper in PAPER.findall(prose) if paper not in known]


def test_answers_are_folded_under_their_questions(prose):
    folded = re.findall(
        r"<details>\n<summary><b>(?:Question|Try)\.</b> ([^\n]+)</summary>\n\n(.+?)\n\n</details>", prose, re.DOTALL
    )
    assert len(folded) == prose.count("<details>") == prose.count("</details>") >= 5
    assert all("<" not in answer for _, answer in folded)


def citations(path):
    """(section, name) of every "Section ... -> name" in the notebook's code."""
    lines = [line for cell in cells(path, "code") for line in cell.source.splitlines() if line.startswith("#")]
    return [tuple(line.removeprefix("# ").split(" -> ")) for line in lines if "->" in line]


def test_every_citation_leads_to_code(path):
    found = citations(path)
    assert len(found) >= 5
    for section, name in found:
        assert re.match(r"Section \d|Evaluation, conf\d|(?:MoETuner|ST-MoE|Switch), ", section), section
        if "/" in name:
            assert (ROOT / name).is_file(), name
        else:
            assert name.startswith("moeblaze_ref.")
            pkgutil.resolve_name(name)  # raises if there is no such thing
    for cell in cells(path, "code"):
        lines = cell.source.splitlines()
        cited = [number for number, line in enumerate(lines) if line.startswith("#") and "->" in line]
        assert cited == list(range(len(cited))), f"{cell.id}: citations stand at the top"


def test_every_link_and_path_exists(path):
    text = "\n".join(cell.source for cell in notebook(path).cells)
    for target in re.findall(r"\]\(([^)]+)\)", PAPER.sub("", text)):
        assert (path.parent / target).is_file(), target
    for named in re.findall(r"\b(?:moeblaze_ref|kernels_cuda|notebooks|docs|tests)/[\w./-]*\w", text):
        assert (ROOT / named).exists(), named
    for command in re.findall(r"`moeblaze (\w+)", text):
        assert command in ("doctor", "check", "memory", "demo", "bench", "train", "evidence", "trace", "place", "plan")


SHEETS = sorted([*(FOLDER / "exercises").glob("*.ipynb"), *(FOLDER / "solutions").glob("*.ipynb")])
FOLDERS = "home|root|tmp|usr|var|opt|work|mnt|content|data|kaggle|srv|Users"  # of somebody's machine
OF_ONE_MACHINE = re.compile(rf"(?<![\w./*)}}\]])/(?:{FOLDERS})(?:/|\b(?!\s*[*(]))|file://|\b[A-Z]:[\\/]+\w")


@pytest.mark.parametrize("path", NOTEBOOKS + SHEETS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_path_of_one_machine_is_named(path):
    said = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
    assert not (found := OF_ONE_MACHINE.search(said)), found


@pytest.mark.parametrize(
    "path",
    "/home/me `/tmp/a` (/mnt/disk) /content/x '/data/set' file:///home/me C:/Users/me C:\\me /root /Users/me".split(),
)
def test_a_path_of_one_machine_is_found(path):
    assert OF_ONE_MACHINE.search(f"it lies in {path} there")
    assert not OF_ONE_MACHINE.search("notebooks/data/x.json https://a.b/home d/content docs/results ../tmp x[0]/work")


# Ideas: the one exception to "notebooks import and never redefine" ---------------------------------------------------

MOST_LINES = 10  # of a function in a notebook
MOST_IMPORT_LINES = 12
IDEAS = 3  # of a notebook, at least


def python(cell):
    """The syntax tree of a cell, without magics."""
    return ast.parse("\n".join("" if line.startswith("%") else line for line in cell.source.splitlines()))


def names_defined(tree):
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def names_of_the_package(tree):
    """The names that an import cell binds to parts of the package which compute, and do not display."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    return {
        alias.asname or alias.name
        for node in imports
        for alias in node.names
        if "moeblaze_ref" in (getattr(node, "module", None) or alias.name)
    } - {"Markdown", "doubling", "explore", "play", "table", "track"}


def compared_in(tree):
    """The names that the assertions of a cell depend on, through the cell's assignments."""
    made = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.For | ast.comprehension):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
            for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                made.setdefault(name, []).append(value)
    waiting = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    found = set()
    while waiting:
        for name in names_read(waiting.pop()) - found:
            found.add(name)
            waiting += made.get(name, [])
    return found


def names_read(tree):
    """The names in an expression, without the module of ``relative_error``, which compares anything."""
    parts = list(ast.walk(tree))
    tools = [part.value for part in parts if isinstance(part, ast.Attribute) and part.attr == "relative_error"]
    return {part.id for part in parts if isinstance(part, ast.Name) and part not in tools}


@functools.cache
def package_names():
    files = (ROOT / "moeblaze_ref").rglob("*.py")
    return set().union(*(names_defined(ast.parse(file.read_text())) for file in files))


def ideas(path):
    """The cells of a notebook that define a function."""
    return [cell for cell in cells(path, "code") if names_defined(python(cell))]


def wrong_idea(cell, package):
    """Say what is wrong with a cell that defines a function; None if it is an idea, compared with the package."""
    tree = python(cell)
    compared = compared_in(tree)
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]:
        lines = node.end_lineno - node.lineno + 1
        if node.name in package_names():
            return f"{node.name} is a name of the package"
        if lines > MOST_LINES:
            return f"{node.name} has {lines} lines, but an idea has at most {MOST_LINES}"
        if node.name not in compared or not compared & package:
            return f"no assertion of this cell compares {node.name} with the package"
    return None


def test_it_imports_and_redefines_only_to_compare(path):
    setup, *others = cells(path, "code")
    package = names_of_the_package(python(setup))
    assert not [wrong for cell in others if (wrong := wrong_idea(cell, package))]
    assert len(ideas(path)) >= IDEAS


IDEA = "def mine(x):\n    return x\n"
UNCOMPARED = "no assertion of this cell compares mine with the package"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (IDEA + "assert np.array_equal(mine(3), ref.f(3))", None),
        (IDEA + "found = mine(3)\nright = ref.f(3)\nassert found == right", None),
        (IDEA + "for one in range(3):\n    row = mine(one)\n    assert row == ref.f(one)", None),
        (IDEA + "mine(3)", UNCOMPARED),
        (IDEA + "assert ref.relative_error(mine(3), 3) < 1", UNCOMPARED),
        (IDEA + "assert mine(3) == 3", UNCOMPARED),
        (IDEA + "assert ref.f(3) == 3", UNCOMPARED),
        (IDEA + "mine(ref.f(3))\nassert np.array_equal(3, 3)", UNCOMPARED),
        (IDEA.replace("mine", "dense_map") + "assert dense_map(3) == ref.f(3)", "dense_map is a name of the package"),
        (IDEA + "    x += 1\n" * 9 + "assert mine(3) == ref.f(3)", "mine has 11 lines, but an idea has at most 10"),
    ],
)
def test_an_idea_must_be_compared(source, wrong):
    assert wrong_idea(nbformat.v4.new_code_cell(source), {"ref"}) == wrong


def test_it_imports_in_one_short_cell(path):
    setup, *others = cells(path, "code")
    assert len(setup.source.splitlines()) <= MOST_IMPORT_LINES
    assert {type(node) for node in python(setup).body} == {ast.Import, ast.ImportFrom}
    for cell in others:
        assert not [node for node in python(cell).body if isinstance(node, ast.Import | ast.ImportFrom)], cell.id
    assert "*" not in setup.source


def zeroed(function):
    """The function with zeros in place of every number that it returns."""

    def zeros(found):
        if isinstance(found, tuple | list):
            return type(found)(map(zeros, found))
        if isinstance(found, torch.Tensor):
            return torch.zeros_like(found)
        return np.zeros_like(found)

    return functools.wraps(function)(lambda *args, **options: zeros(function(*args, **options)))


def run_cell(cell, names, decorate=None):
    """Run a cell; return the names afterwards. ``decorate`` is put on each function that the cell defines."""
    tree, scope = python(cell), names | {"decorate": decorate}
    for node in tree.body:
        if decorate and isinstance(node, ast.FunctionDef):
            node.decorator_list = [ast.Name("decorate", ast.Load())]
    exec(compile(ast.fix_missing_locations(tree), cell.id, "exec"), scope)
    return scope


def test_zeros_in_place_of_an_idea_are_caught(path):
    """By the comparison in its own cell, which needs the cell of the imports alone and what it defines itself."""
    names = run_cell(cells(path, "code")[0], {})
    for cell in ideas(path):
        run_cell(cell, names)
        with pytest.raises(AssertionError):
            run_cell(cell, names, zeroed)
            pytest.fail(f"{cell.id} accepts zeros", pytrace=False)


def test_it_begins_with_a_drawing_of_the_layer(path):
    first = [cell.source for cell in cells(path, "code")][1]
    assert first.startswith("nb.layer_picture("), first


@pytest.mark.parametrize("shown", [(), *((name,) for name in pictures.LAYER), ("backward",)])
def test_the_drawing_highlights_its_stages(shown):
    figure = drawn(pictures.layer_picture(*shown, note="what it asks"))
    colored = [patch for patch in figure.axes[0].patches if patch.get_facecolor() == to_rgba(pictures.SKY)]
    written = sum(bool(stage.gradients) for stage in pictures.LAYER.values())
    assert len(colored) == {(): 0, ("backward",): written}.get(shown, 1)
    said = pictures.alt_text(figure)
    assert said.startswith("One MoE layer. Here: what it asks") and all(name in said for name in pictures.LAYER)


# Outputs -------------------------------------------------------------------------------------------------------------


def said(line, **metadata):
    """A notebook of a cell that printed this line, or nothing."""
    stream = nbformat.v4.new_output("stream", name="stdout", text=line)
    cell = nbformat.v4.new_code_cell("say()", id="say", outputs=[stream] if line else [], metadata=metadata)
    return nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,024 bytes of conf4", "1,024 bytes of conf4", True),
        ("1,024 bytes", "1,025 bytes", False),
        ("loss 2.138", "loss 2.137", True),
        ("loss 2.138", "loss 2.238", False),
        ("error 1.2e-07", "error 9.9e-08", True),
        ("error 1.2e-07", "error 1.2e-02", False),
        ("step 7: 0.5", "step 8: 0.5", False),
        ("right", "wrong", False),
        ("a b 1.0", "a b 1.0 2.0", False),
        ("anything", "", False),
    ],
)
def test_what_another_run_says_is_compared(one, other, same):
    found = list(outputs.differences(said(one), said(other)))
    saying = [[line] if line else [] for line in (one, other)]
    assert found == ([] if same else ["cell say said {}, and says {}; run `make notebooks`".format(*saying)])


def test_rounding_that_depends_on_the_processor_is_passed_over():
    assert not list(outputs.differences(said("step 15", tags=[outputs.VARIES]), said("step 21")))


def test_a_line_that_comes_in_two_parts_is_one():
    """Parts of another stream, and what is shown between two lines, stay where they are."""
    whole, parts = said("one\ntwo\n"), said("one")
    stream, shown = parts.cells[0].outputs[0], nbformat.v4.new_output("display_data", {"text/plain": "picture"})
    error = stream | {"name": "stderr"}
    parts.cells[0].outputs += [stream | {"text": "\ntwo"}, stream | {"text": "\n"}]
    assert outputs.settled(parts).cells[0].outputs == whole.cells[0].outputs
    parts.cells[0].outputs = [stream, shown, stream, error, error, stream]
    texts = [output.get("text") for output in outputs.settled(parts).cells[0].outputs]
    assert texts == ["one", None, "one", "oneone", "one"]


def test_a_settled_notebook_stays_as_it_is():
    once = outputs.settled(said("1", tags=[outputs.VARIES], execution={"started": "now"}))
    assert once.metadata == METADATA and once.cells[0].metadata == {"tags": [outputs.VARIES]}
    assert outputs.settled(once) == once


def test_the_style_of_shown_source_is_for_the_screen_alone():
    shown = nbformat.v4.new_output("display_data", {"text/markdown": show_source(reference.route_indices).data})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[shown])])
    (kept,) = outputs.settled(notebook).cells[0].outputs
    assert kept.data["text/markdown"] + sources.STYLE == shown.data["text/markdown"]
    assert kept.data["text/markdown"].endswith("```")


def test_pictures_are_made_small_once():
    large = with_a_picture()
    small = outputs.settled(large)
    before, after = (base64.b64decode(one.cells[0].outputs[0].data["image/png"]) for one in (large, small))
    assert len(after) < len(before) / 2 and outputs.settled(small) == small
    shown = [np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"), float) for png in (before, after)]
    assert shown[0].shape == shown[1].shape and abs(shown[0] - shown[1]).mean() < 4


def with_a_picture():
    """A notebook with a figure, as matplotlib writes it."""
    file = io.BytesIO()
    figure = memory.memory_bars(L=1024, d=256, h=512, E=4, k=2, activation="swiglu", policy="paper")
    figure.savefig(file, format="png")
    picture = base64.b64encode(file.getvalue()).decode()
    shown = nbformat.v4.new_output("display_data", {"image/png": picture}, metadata={"image/png": {"alt": "bars"}})
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[shown])])


def test_a_notebook_that_is_too_large_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "00_large.ipynb"
    path.write_text(outputs.text(said("before")))
    monkeypatch.setattr(outputs, "execute", lambda notebook, folder: said("x" * outputs.MAX_BYTES))
    with pytest.raises(
        ValueError, match="00_large.ipynb would have 1,000,.* but a notebook may have 1,000,000 at most"
    ):
        outputs.remake(path)
    assert "before" in path.read_text()
    monkeypatch.setattr(outputs, "execute", lambda notebook, folder: said("after"))
    outputs.remake(path)
    assert "after" in path.read_text() and "widgets" not in path.read_text()


# Source from the files -----------------------------------------------------------------------------------------------


def code_of(markdown):
    return re.findall(r"```[\w+]+\n(.*?)\n```", markdown.data, re.DOTALL)


def test_python_is_shown_as_it_stands_without_the_sections_of_its_docstring():
    (code,) = code_of(show_source(layer_system.intermediates))
    head = ["@functools.cache", "def intermediates(policy: str, activation: str) -> tuple[str, ...]:"]
    first = '    """Names of the tensors between x and out that a policy saves for the backward."""'
    assert code.splitlines()[:3] == [*head, first] and "Parameters" not in code
    body = code.rpartition('"""\n')[2]
    assert "is_gated" in body and body in Path(layer_system.__file__).read_text()
    (code,) = code_of(show_source(reference.route_indices))
    assert "Down each expert's column" in code and "Parameters" not in code and "Section" not in code


def test_a_function_with_a_contract_is_shown_with_it():
    (code,) = code_of(show_source(gating.top_k))
    assert code.startswith("@implements(stage_contracts.TOP_K, ARRAYS)\ndef top_k(logits, k):\n")
    assert "argsort" in code and code in Path(gating.__file__).read_text()
    assert show_source(gating.top_k).data.startswith("`moeblaze_ref/backends/numpy_ref/gating.py`\n")


def test_numba_kernels_and_methods_are_shown_too():
    kernel, method = code_of(show_source(numba_dispatch.dense_map_kernel, MoEConfig.replace))
    assert kernel.startswith("@cuda.jit\ndef dense_map_kernel(") and "Global bytes" in kernel
    assert method.startswith("def replace(self")


def functions_in(code):
    """Names of the CUDA functions that a text defines; a loop has a space before its parenthesis."""
    return re.findall(r"(\w+)\([^()]*\) \{", re.sub(r"//[^\n]*", "", code))


@pytest.mark.parametrize("file", [KERNELS, "include/common.cuh"])
def test_cuda_functions_are_whole(file):
    names = functions_in(kernel_text(file))
    blocks = code_of(show_kernel(file, *names))
    assert len(blocks) == len(names) > 3
    for name, code in zip(names, blocks, strict=True):
        assert code in kernel_text(file) and code.count("{") == code.count("}") > 0
        assert f"{name}(" in code and code.endswith("}")
        assert functions_in(code) == [name], "one function, not its neighbours"


def test_the_comment_and_the_template_above_a_function_belong_to_it():
    assert code_of(show_kernel("include/dispatch.cuh", "slot_of"))[0].startswith("// Which of a token's k slots")
    assert "template <int SIZE>\n__device__" in code_of(show_kernel("include/common.cuh", "block_exclusive_sum"))[0]


def test_without_names_the_header_is_shown():
    (code,) = code_of(show_kernel(KERNELS))
    assert code.startswith("// dispatch, version 1") and "bytes written" in code and "#include" not in code


def test_formulas_of_a_header_are_read_from_its_table():
    stated = sources.stated_bytes(KERNELS)
    assert list(stated) == ["dense_map", "expert_lengths", "expert_offsets", "route_indices"]
    assert stated["route_indices"] == {"read": "4 L E + 4 E THREADS + 2 R (k + 1)", "written": "8 R"}


@pytest.mark.parametrize(("L", "E", "k"), [(1000, 16, 4), (513, 8, 1)])
def test_what_is_stated_is_what_is_counted(L, E, k):
    symbols = {"L": L, "E": E, "k": k, "R": L * k, "THREADS": raw_dispatch.THREADS}
    rows = sources.stated_beside_counted(KERNELS, dispatch.count_dispatch(L, E, k), **symbols)
    assert len(rows) == 8 and all(row["its value"] == row["counted"] > 0 for row in rows)
    wrong = sources.stated_beside_counted(KERNELS, dispatch.count_dispatch(L + 1, E, k), **symbols)
    assert any(row["its value"] != row["counted"] for row in wrong)


# Tables, lists, sliders ----------------------------------------------------------------------------------------------


def test_tables_align_numbers_and_keep_text():
    first = {"name": "a_b", "bytes": 12_345, "share": 0.123456, "ok": False}
    second = {"name": "c", "bytes": np.int64(7), "share": 2, "ok": True}
    assert table([first, second]).data.splitlines() == [
        "| name | bytes | share | ok |",
        "| --- | ---: | ---: | --- |",
        "| a_b | 12,345 | 0.1235 | False |",
        "| c | 7 | 2 | True |",
    ]


def test_stars_in_a_list_are_stars():
    assert bullets(["L*k*d", "y_swi"]).data == "- L\\*k\\*d\n- y\\_swi"


def test_a_doubling_slider_doubles():
    slider = doubling(256, 2000, 512)
    assert [size for _, size in slider.options] == [256, 512, 1024] and slider.value == 512


MOVES = """
from IPython.display import Markdown
from ipywidgets import IntSlider
from moeblaze_ref.core import checks
from moeblaze_ref.course.notebook import explore, progress, track

def draw(k):
    checks.check_k(k, 4)
    return Markdown(f"drawn for {k}")

slider = IntSlider(value=1, max=8)
explore(draw, k=slider)
slider.value = VALUE
progress(3, "apples")(2, 0.5)
assert list(track(range(5))) == [0, 1, 2, 3, 4]
"""


@pytest.mark.parametrize(
    ("value", "shown"), [(3, "drawn for 3"), (8, "**k is 8, but there are only 4 experts (k must be 1..4)**")]
)
def test_a_moved_slider_redraws_and_what_is_not_allowed_is_said(value, shown):
    source = MOVES.replace("VALUE", str(value))
    ran = execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), FOLDER)
    assert [output["data"]["text/markdown"] for (output,) in slider_outputs(ran)] == [shown]
    states = [model["state"] for model in ran.metadata.widgets[outputs.WIDGET_STATE]["state"].values()]
    assert {"2 of 3: 0.50 apples", "5 of 5"} <= {state.get("description") for state in states}
    assert [state["continuous_update"] for state in states if "continuous_update" in state] == [False]
    note = f"*Run the notebook to move this: k = {value}.*"
    kept = [output.data["text/markdown"] for output in outputs.settled(ran).cells[0].outputs]
    assert kept == [note, shown], "the setting, what it shows, and no progress bar"


# Pictures, at several positions of their sliders ---------------------------------------------------------------------


def texts(figure):
    """Every text inside a figure's axes, in the order in which it was drawn."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def drawn(figure):
    """The figure, after it was really drawn; its axes are labelled."""
    assert isinstance(figure, Figure)
    FigureCanvasAgg(figure).draw()  # a figure's own canvas draws nothing
    assert not list(unlabelled(figure)), figure
    return figure


def unlabelled(figure):
    """Axes with numbers and without a label; panels of a row share that of y, those of a column that of x."""
    shown = [axes for axes in figure.axes if axes.get_visible() and axes.axison]
    places = {axes: axes.get_subplotspec() for axes in shown}  # a colour bar has none
    for axes, place in places.items():
        panels = [(other, at) for other, at in places.items() if place and at]
        row = [other for other, at in panels if at.rowspan == place.rowspan] or [axes]
        column = [other for other, at in panels if at.colspan == place.colspan] or [axes]
        if numbers(axes.get_yticklabels()) and not any(other.get_ylabel() for other in row):
            yield axes, "y"
        if numbers(axes.get_xticklabels()) and not any(other.get_xlabel() for other in column):
            yield axes, "x"


def numbers(ticks):
    said = [tick.get_text() for tick in ticks if tick.get_visible()]
    return [text for text in said if text.startswith("$") or re.fullmatch(r"[−-]?[\d.,]+", text)]


SHAPES = [
    (1024, 256, 256, 1, 1, "relu", "inputs"),
    (32_768, 2048, 8192, 16, 4, "swiglu", "paper"),
    (2**20, 8192, 32_768, 256, 16, "geglu", "conventional"),
    (65_536, 1024, 256, 128, 8, "gelu", "minimal"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_memory_bars_are_as_long_as_the_bytes_and_lines_name_their_layer(shape):
    *sizes, activation, policy = shape
    (axes,) = drawn(memory.memory_bars(*shape)).axes
    ends = np.zeros(4)
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        ends[row] = max(ends[row], bar.get_x() + bar.get_width())
    config = MoEConfig(*sizes, activation)
    kept = [account(config, system).kept_bytes for system in ("conventional", "capacity", "megablocks_published")]
    kept.append(account(config, "moeblaze", policy).kept_bytes)
    np.testing.assert_allclose(ends / ends[0], np.array(kept) / kept[0])
    right = axes.get_xlim()[1]
    assert np.log2(right) % 2 == 0 and right / 8 < max(ends) < right
    _, d, h, E, k = sizes
    title = drawn(memory.memory_lines(d, h, E, k, activation)).axes[0].get_title(loc="left")
    assert title == f"d = {d:,}, h = {h:,}, E = {E}, k = {k}, {activation}, bfloat16"


def test_gpu_capacities_appear_when_they_come_into_reach():
    small, large = (memory.memory_bars(L, 2048, 8192, 16, 4, "swiglu", "paper") for L in (4096, 2**18))
    assert not {"80 GB", "141 GB"} & set(texts(small)) and {"80 GB", "141 GB"} <= set(texts(large))
    (axes,) = drawn(memory.memory_bars(2**20, 8192, 32_768, 256, 16, "geglu", "paper")).axes
    less, more = (text.get_window_extent() for text in axes.texts if text.get_text() in ("80 GB", "141 GB"))
    assert less.x1 < more.x0, "their names do not meet where the axis is longest"


def test_areas_of_the_tensors_are_their_bytes():
    config = MoEConfig(L=1024, d=64, h=96, E=8, k=2)
    shown = [account(config, "conventional"), account(config, "moeblaze", "minimal")]
    panels = drawn(memory.tensors_to_scale(shown)).axes
    for axes, one in zip(panels, shown, strict=True):
        areas = sorted(patch.get_width() * patch.get_height() * 2 for patch in axes.patches)
        assert areas == sorted(tensor.bytes for tensor in one.tensors if tensor.name in memory.plots.TENSOR_COLORS)
        filled = [patch for patch in axes.patches if patch.get_facecolor()[3] > 0]
        small = memory.plots.kept_by_tensor(one)[memory.plots.REST]
        assert sum(patch.get_width() * patch.get_height() * 2 for patch in filled) == one.kept_bytes - small
        assert f"{one.kept_bytes / GIB:,.3g} GiB kept" in axes.get_ylabel()


def test_the_choice_map_frames_the_chosen_experts():
    case = make_case(5, 8, 4, 6, 2)
    seen = gating.forward(case.logits, 2)
    axes = drawn(routing.choice_map(seen.probs, seen.topk_experts, "ab c\n")).axes[0]
    frames = {(patch.get_x() + 0.5, patch.get_y() + 0.5) for patch in axes.patches}
    assert frames == {(token, expert) for token in range(5) for expert in seen.topk_experts[token]}
    np.testing.assert_array_equal(axes.images[0].get_array(), seen.probs.T)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "␣", "c", "¶"]


SKEWED = make_case(256, 16, 8, 8, 2, "zipf")


def test_descent_evens_out_the_load_by_the_balance_loss_alone():
    before = SKEWED.weights.wg.copy()
    balanced = routing.descend(SKEWED.x, SKEWED.weights.wg, 2, balance_weight=1.0, z_weight=0.0)
    small = routing.descend(SKEWED.x, SKEWED.weights.wg, 2, balance_weight=0.0, z_weight=0.3)
    np.testing.assert_array_equal(SKEWED.weights.wg, before)
    assert balanced.loads[0].max() > 3 > 1.2 > balanced.loads[-1].max() and balanced.balance[-1] < balanced.balance[0]
    assert small.loads[-1].max() > 3 and small.z[-1] < 0.1 * small.z[0]
    assert balanced.loads.shape == (100, 8) and np.allclose(balanced.loads.sum(axis=1), 8)


@pytest.mark.parametrize(("balance_weight", "z_weight"), [(0.0, 0.0), (0.3, 0.01), (1.0, 0.3)])
def test_the_picture_of_a_descent(balance_weight, z_weight):
    path = routing.descend(SKEWED.x, SKEWED.weights.wg, 2, balance_weight, z_weight, steps=10)
    loads, balance, z = drawn(routing.descent_picture(path)).axes
    np.testing.assert_array_equal([line.get_ydata() for line in loads.lines[:8]], path.loads.T)
    np.testing.assert_array_equal(balance.lines[0].get_ydata(), path.balance)
    np.testing.assert_array_equal(z.lines[0].get_ydata(), path.z)


def test_zipf_counts():
    even, steep = (routing.zipf_counts(exponent, E=8, k=1, L=20_000) for exponent in (0.0, 1.0))
    assert even.sum() == steep.sum() == 20_000
    np.testing.assert_allclose(even / 20_000, 1 / 8, rtol=0.1)
    shares = 1 / np.arange(1, 9)
    np.testing.assert_allclose(steep / 20_000, shares / shares.sum(), rtol=0.1)


@pytest.mark.parametrize(
    ("exponent", "factor", "E", "k"), [(0.0, 1.0, 4, 4), (0.8, 1.25, 16, 2), (2.0, 0.25, 64, 1), (2.0, 4.0, 2, 1)]
)
def test_the_capacity_picture_adds_up(exponent, factor, E, k):
    figure = drawn(routing.capacity_picture(exponent, factor, E, k))
    (axes,) = figure.axes
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(3, E)
    counts = routing.zipf_counts(exponent, E, k)
    capacity = expert_capacity(int(counts.sum()), E, factor)
    computed, dropped, padded = heights
    np.testing.assert_array_equal(computed + dropped, counts)
    np.testing.assert_array_equal(computed + padded, capacity)
    assert (dropped.sum(), padded.sum()) == dropped_and_padded(counts.tolist(), capacity)
    assert f"{dropped.sum() / counts.sum():.1%} of the rows are dropped" in axes.get_title(loc="left")


def test_skew_drops_and_pads():
    dropped, padded = drawn(routing.skew_picture(E=8, k=2)).axes
    for axes in (dropped, padded):
        for line in axes.lines:
            shares = line.get_ydata()
            assert shares[-1] > shares[0] and 0 <= shares.min() <= shares.max() <= 100
    ends = [line.get_ydata()[-1] for line in dropped.lines]
    assert ends == sorted(ends, reverse=True), "a larger factor drops less"


def shown_numbers(figure):
    return [int(text) for text in texts(figure) if text.isdigit()]


def test_the_steps_of_the_papers_example_appear_one_by_one():
    steps = [drawn(dispatch.dispatch_steps(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS, step)) for step in range(6)]
    assert [len(shown_numbers(figure)) for figure in steps] == [20, 30, 34, 39, 39, 59]
    assert [texts(figure)[0] for figure in steps] == list(dispatch.STEPS)
    chosen = [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]
    assert shown_numbers(steps[0]) == chosen * 2
    assert shown_numbers(steps[1])[20:] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # By columns these are 0, 1, 2, then 3, 4, ...: here row by row.
    assert shown_numbers(steps[4])[20:30] == [5, 7, 0, 3, 1, 8, 4, 6, 2, 9]
    arrays = [5, 7, 0, 3, 1, 8, 4, 6, 2, 9], [3, 2, 2, 3], [0, 3, 5, 7, 10], [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert shown_numbers(steps[5])[30:] == sum(arrays, [])
    assert len(shown_numbers(drawn(dispatch.dispatch_steps(random_topk(3, 9, 1), 9, 5)))) == 3 * 5 + 9 + 10


def test_sectors_against_experts_are_counted_and_follow_the_prediction():
    (axes,) = drawn(dispatch.sectors_against_experts(L=512, k=1, experts=(2, 4, 8, 16))).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert list(lines) == ["dense_map", "expert_lengths", "route_indices", "min(E, 8)"]
    assert lines["min(E, 8)"] == [2, 4, 8, 8]
    np.testing.assert_allclose(lines["expert_lengths"], lines["min(E, 8)"], rtol=0.02)
    assert max(lines["dense_map"]) < 2


@pytest.mark.parametrize(("L", "k"), [(2**14, 1), (2**20, 8), (2**22, 32)])
def test_the_map_grows_with_the_experts_and_the_structures_do_not(L, k):
    (axes,) = drawn(dispatch.map_against_experts(L, k)).axes
    experts, dense = axes.lines[0].get_data()
    np.testing.assert_allclose(dense, L * np.asarray(experts) * 4 / MIB)
    np.testing.assert_allclose(axes.lines[1].get_ydata(), L * np.asarray(experts) / 8 / MIB)
    np.testing.assert_allclose(axes.lines[2].get_ydata(), (12 * L * k + 4 * np.asarray(experts) + 4) / MIB)


def test_a_planted_fault_in_a_kernels_text_is_found():
    text, choices = kernel_text(KERNELS), random_topk(200, 8, 2)
    expected = reference.dense_map(choices, 8)
    np.testing.assert_array_equal(dispatch.dense_map_by(text, choices, 8, seed=3), expected)
    assert (dispatch.dense_map_by(text.replace("__syncwarp();", ""), choices, 8, seed=3) != expected).any()
    with pytest.raises(KernelFault, match="out-of-bounds write of 4 bytes at byte offset 6400 of dense_map"):
        dispatch.dense_map_by(text.replace("min((long long)WARP, L - first_token)", "WARP"), choices, 8)


# The backward by hand ------------------------------------------------------------------------------------------------

SMALL_LAYER = make_case(11, 6, 10, 4, 2, "zipf")


def test_the_tape_differentiates_the_layer():
    tape = backward.Tape(SMALL_LAYER, d_balance=0.7, d_z=0.3)
    made = layer.forward(SMALL_LAYER.x, SMALL_LAYER.weights, SMALL_LAYER.k)
    S = (SMALL_LAYER.d_out * made.out).sum() + 0.7 * made.load_balancing_loss + 0.3 * made.router_z_loss
    assert relative_error(tape.S.detach(), S) < 1e-12
    gradients = layer.backward(SMALL_LAYER.d_out, made.saved, SMALL_LAYER.weights, 0.7, 0.3)
    lines = tape.check(**gradients._asdict()).data.splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == list(gradients._fields)
    assert relative_error(tape.gradient("x_experts") + tape.gradient("x_router"), gradients.d_x) < 1e-12


@pytest.mark.parametrize("spoil", [lambda d: d * (1 + 1e-9), np.zeros_like, lambda d: d * np.nan])
def test_the_tape_refuses_a_wrong_gradient(spoil):
    tape = backward.Tape(SMALL_LAYER)
    with pytest.raises(AssertionError, match="d_w1 has a relative error of .*, but the bound is 1e-12"):
        tape.check(d_w1=spoil(tape.gradient("w1")))


@pytest.mark.parametrize("leaf", ["x", "wg", "w1", "w2", "w3"])
def test_difference_quotients_meet_autograd(leaf):
    tape = backward.Tape(SMALL_LAYER, 0.7, 0.3)
    found = backward.quotients(tape, leaf)
    assert found.slope == tape.gradient(leaf)[found.index] and abs(found.slope) == abs(tape.gradient(leaf)).max()
    assert found.central.min() < 1e-8 and found.one_sided.min() < 1e-6
    linear = leaf in ("w2", "w3")  # S is linear in each of them, so the largest step is the best
    assert (found.central.argmin() == 0) == linear
    one_sided, central = drawn(backward.quotients_picture(tape, leaf)).axes[0].lines
    np.testing.assert_array_equal([one_sided.get_ydata(), central.get_ydata()], [found.one_sided, found.central])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_differences_of_an_activation_lie_on_its_slope(activation):
    act, slope, dots, _ = drawn(backward.slope_picture(activation)).axes[0].lines
    at = np.searchsorted(slope.get_xdata().ravel(), dots.get_xdata().ravel())
    np.testing.assert_allclose(slope.get_ydata()[at], dots.get_ydata(), atol=1e-8)
    assert act.get_ydata()[-1] > 4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_map_of_the_backward_keeps_what_the_policy_keeps(policy):
    fates = backward.fates(policy)
    case = SMALL_LAYER
    kept = layer.forward(case.x, case.weights, case.k, policy=policy).saved.tensors()
    parts = {name: name.split(", ") for name in ("x", "gates", "a, b", "y_swi", "y")}
    assert {name for name, fate in fates.items() if fate == backward.KEPT} == {
        name for name, tensors in parts.items() if kept.keys() >= set(tensors)
    }
    shown = texts(drawn(backward.flow_picture(policy)))
    assert set(fates) == set(backward.PLACES) <= set(shown) and fates["d_y"] == backward.NEVER


def test_arrows_of_the_map_join_tensors():
    arrows = [*backward.BY_INDEX, *backward.IN_PLACE, *backward.READS]
    assert {name for arrow in arrows for name in arrow} == backward.PLACES.keys() - {"d_y"}


def test_the_gap_shows_every_error():
    axes = drawn(backward.gap_picture({"d_x": 1e-16}, {"d_x: a mistake": 0.5, "d_w1: another": 0.1})).axes[0]
    right, wrong, bound = axes.lines
    assert list(right.get_xdata()) == [1e-16] and list(wrong.get_xdata()) == [0.5, 0.1]
    assert set(bound.get_xdata()) == {1e-12}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["d_x", "d_x: a mistake", "d_w1: another"]


# Gather, multiply, activate ------------------------------------------------------------------------------------------

VERSIONS = gemm.VERSIONS
LADDER = MoEConfig(L=137, d=24, h=72, E=5, k=3, dtype="bfloat16")
LADDER_CASE = make_case(LADDER.L, LADDER.d, LADDER.h, LADDER.E, LADDER.k, "zipf").astype("bfloat16")
LADDER_DISPATCH = reference.build(LADDER_CASE.topk_experts, LADDER.E)
LENGTHS = np.diff(LADDER_DISPATCH.expert_token_offsets).tolist()
UP = (LADDER_CASE.x, LADDER_CASE.weights.w1, LADDER_CASE.weights.w2, LADDER_DISPATCH)


def test_structs_and_functions_of_array_references_are_shown():
    (struct,) = code_of(show_kernel("include/stages.cuh", "Operand"))
    (function,) = code_of(show_kernel("include/mma_matmul.cuh", "mma_matmul"))
    assert struct.startswith("// An operand's stage") and struct.endswith("\n};") and "int place(" in struct
    assert "multiply<Scalar>" in function and function.endswith("\n}")
    (function,) = code_of(show_kernel("include/tiled_matmul.cuh", "load_tile"))
    assert functions_in(function.replace("(&tile)", "tile")) == ["load_tile"]


VERSION_FILES = ("expert_up/2_tiled.cu", "expert_up/3_mma.cu")


def test_a_difference_holds_both_functions():
    (code,) = code_of(sources.show_difference("expert_up", *VERSION_FILES))
    for file, mark in zip(VERSION_FILES, "-+", strict=True):
        side = [line[1:] for line in code.splitlines() if line[0] in (" ", mark)]
        assert "\n".join(side) == code_of(show_kernel(file, "expert_up"))[0]
    assert 4 < sum(line[0] == "+" for line in code.splitlines()) < 24


def test_an_inlined_kernel_holds_each_header_once():
    text = inlined("expert_up/3_mma.cu")
    assert '#include "' not in text and "#pragma once" not in text
    for line in ("enum class Along", "struct GroupElement", "struct alignas(16) Chunk", "constexpr bool GATED"):
        assert text.count(line) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_expert_stages_state_is_what_is_counted(version):
    y_swi = np.random.default_rng(0).standard_normal((LADDER.R, LADDER.h)).astype("bfloat16")
    up, down = gemm.count_up(version, *UP), gemm.count_down(version, y_swi, LADDER_CASE.weights.w3, LADDER_DISPATCH)
    for stage, launch in (("expert_up", up), ("expert_down", down)):
        for lengths, right in ((LENGTHS, True), ([10 * n for n in LENGTHS], version == "1_naive")):
            symbols = gemm.header_symbols(version, LADDER, lengths, stage)
            rows = sources.stated_beside_counted(f"{stage}/{version}.cu", [launch], **symbols)
            assert [row["its value"] == row["counted"] > 0 for row in rows] == [right, True]


def test_products_are_counted_with_their_zeros():
    """R d h for each of two projections, or whole tiles of rows, of 64 columns and of the depth of a step."""
    widths = {"1_naive": LADDER.d * LADDER.h, "2_tiled": 32 * 128, "3_mma": 32 * 128}  # 24 and 72, rounded up
    for version in VERSIONS:
        rows = {"2_tiled": raw_gemm.TILE, "3_mma": tiles.DEFAULTS["3_mma"].rows}.get(version, 1)
        padded = sum(math.ceil(length / rows) * rows for length in LENGTHS)
        for _ in range(2):
            assert gemm.count_products(version, *UP) == 2 * padded * widths[version]


def test_an_edit_changes_the_kernel_and_must_find_its_text():
    first_row = gemm.EditedExecutor({"expert_token_indices[at.row] * d": "0"})
    edited, right = (expert_up.forward(*UP, "swiglu", executor=e, version="1_naive")[0] for e in (first_row, None))
    expected = np.repeat(right[LADDER_DISPATCH.token_index_map[:1]], len(right), axis=0)
    owner = np.repeat(np.arange(LADDER.E), LENGTHS)
    same = owner == LADDER_CASE.topk_experts[0, 0]
    np.testing.assert_array_equal(edited[same], expected[same])
    assert (right[same] != expected[same]).any()


FRAGMENTS = """#include "ptx.cuh"
extern "C" __global__ void multiply(const __half* a, const __half* b, float* d) {
    unsigned a_words[4], b_words[2];
    for (int i = 0; i < 8; ++i) reinterpret_cast<__half*>(a_words)[i] = a[threadIdx.x * 8 + i];
    for (int i = 0; i < 4; ++i) reinterpret_cast<__half*>(b_words)[i] = b[threadIdx.x * 4 + i];
    float sums[4] = {};
    mma_m16n8k16<__half>(sums, a_words, b_words);
    for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = sums[i];
}"""


def test_fragments_are_those_of_the_instruction():
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-4, 5, size).astype(np.float16) for size in ((16, 16), (16, 8)))
    a, b = np.full((32, 8), np.nan, np.float16), np.full((32, 4), np.nan, np.float16)
    a[*gemm.fragment("A")], b[*gemm.fragment("B")] = A, B
    executor = SimtExecutor()
    d = executor.empty((32, 4), "float32")
    executor.load("fragments.cu", text=FRAGMENTS).launch("multiply", grid=1, block=32, a=a, b=b, d=d)
    np.testing.assert_array_equal(d[*gemm.fragment("D")], A.astype(np.float32) @ B.astype(np.float32))


@pytest.mark.parametrize("lane", [0, 5, 31])
def test_the_picture_of_fragments_names_one_lanes_elements(lane):
    shown = texts(drawn(gemm.fragment_picture(lane)))
    assert {text for text in shown if re.fullmatch(r"[abd]\d", text)} == {
        *(f"a{i}" for i in range(8)), *(f"b{i}" for i in range(4)), *(f"d{i}" for i in range(4))
    }  # fmt: skip
    assert len([text for text in shown if text.isdigit()]) == 16 * 16 + 2 * 16 * 8 - 16


@pytest.mark.parametrize("expert", range(4))
def test_the_picture_of_the_gather_joins_an_experts_rows(expert):
    (axes,) = drawn(gemm.gather_picture(GOLDEN_DISPATCH, expert)).axes
    begin, end = GOLDEN_DISPATCH.expert_token_offsets[expert : expert + 2]
    assert len(axes.lines) == 2 * (end - begin)
    tile = [text.get_text() for text in axes.texts if text.get_position()[0] == 11.5]
    assert tile == [f"x[{token}]" for token in GOLDEN_DISPATCH.expert_token_indices[begin:end]]


def test_the_roofline_puts_points_on_their_roofs():
    points = [gemm.Point("low", 2.0, "float32 units"), gemm.Point("high", 1000.0, "bf16 tensor cores")]
    (axes,) = drawn(gemm.roofline(points)).axes
    marks = [line.get_xydata()[0].tolist() for line in axes.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(marks, [[2.0, 9.6], [1000.0, 989.0]])
    assert texts(axes.figure) == ["low\n2 FLOP/byte", "high\n1,000 FLOP/byte"]
    for unit, peak in gemm.PEAK_FLOPS.items():
        at = gemm.ridge(unit)
        np.testing.assert_allclose(gemm.attainable(np.array([at / 2, at, at * 2]), unit), [peak / 2, peak, peak])


@pytest.mark.parametrize(("version", "rows"), [("2_tiled", 64), ("3_mma", 128)])
def test_the_intensity_of_a_tile_is_the_headers(version, rows):
    config = MoEConfig(L=2**12, d=2**20, h=512, E=4, k=1, dtype="bfloat16")
    symbols = gemm.header_symbols(version, config, [config.R // config.E] * config.E)
    read = sources.evaluate(sources.stated_bytes(f"expert_up/{version}.cu")["expert_up"]["read"], symbols)
    flops = 2 * config.R * config.d * config.h * 2
    assert flops / read == pytest.approx(gemm.tile_intensity(rows, 64), rel=1e-4)
    (axes,) = drawn(gemm.tile_roofline(128, 64)).axes
    assert axes.get_title(loc="left").startswith("sums: 128 registers a thread (of 255), stages: 64 KiB")


# Save policies -------------------------------------------------------------------------------------------------------

NARROW = MoEConfig(L=137, d=40, h=72, E=5, k=3)
NARROW_ROUTING = make_case(NARROW.L, NARROW.d, NARROW.h, NARROW.E, NARROW.k, "zipf").astype("bfloat16").topk_experts
NARROW_LENGTHS = np.diff(reference.build(NARROW_ROUTING, NARROW.E).expert_token_offsets).tolist()


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_work_of_a_policy_is_what_is_counted_at_another_size(policy, activation):
    config = NARROW.replace(activation=activation)
    passes = policies.count_layer(config, policy)
    launches = [*passes["forward"], *passes["backward"]]
    by_formula = [s for s in policies.steps(config, policy, NARROW_LENGTHS) if s.kernel != "routed copy"]
    assert [step.kernel for step in by_formula] == [launch.kernel for launch in launches]
    assert [s.asked for s in by_formula] == [launch.read_bytes + launch.written_bytes for launch in launches]
    assert all(0 < step.once <= step.asked for step in by_formula)
    other = policies.steps(config.replace(L=2 * config.L), policy, NARROW_LENGTHS)
    assert all(one.asked != two.asked for one, two in zip(by_formula, other[-len(by_formula) :], strict=True))


def test_policies_differ_in_the_work_that_they_should():
    work = {policy: policies.steps(NARROW, policy) for policy in POLICIES}
    product, hidden = 2 * NARROW.R * NARROW.d * NARROW.h, NARROW.R * NARROW.h * 2
    flops = {policy: sum(step.flops for step in done) / product for policy, done in work.items()}
    assert flops == {"conventional": 9, "paper": 9, "minimal": 9, "inputs": 11}
    assert work["paper"] == work["minimal"]
    up, *rest = work["minimal"]
    assert (up.kernel, up.once) == ("expert_up", work["inputs"][0].once + 2 * hidden)
    assert [step for step in work["inputs"] if step.kernel != "expert_up"] == rest
    extra = [step for step in work["conventional"] if step not in work["paper"]]
    assert [(step.kernel, step.flops) for step in extra] == [("routed copy", 0), ("act", 0)]
    copy = NARROW.R * (NARROW.d * 2 + 4) + NARROW.L * NARROW.d * 2
    assert [step.once for step in extra] == [copy, 2 * hidden]


def test_modelled_time_is_the_slower_of_both_peaks_kernel_by_kernel():
    work = [
        policies.Step("bound by FLOPs", 989 * 10**12, 48 * 10**11, 1),
        policies.Step("bound by bytes", 1, 96 * 10**11, 0),
    ]
    assert policies.seconds(work, "asked") == pytest.approx(1 + 2)
    assert policies.seconds(work, "once") == pytest.approx(1)


def test_what_survives_a_call_is_found_whoever_holds_it():
    layer = MoELayer(16, 24, 5, 3, policy="minimal")
    x = torch.randn(37, 16, requires_grad=True)
    result, losses = 37 * 16 * 4, [4, 4]
    config = MoEConfig(37, 16, 24, 5, 3, dtype="float32")
    kept = [tensor.bytes for tensor in account(config, "moeblaze", "minimal").tensors if tensor.kept]
    assert policies.surviving_bytes(layer, x) == sorted([*kept[1:], result, *losses], reverse=True), "all but x"

    def region(x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=keep_routing)

    assert policies.surviving_bytes(region, x) == [result, 4 * 37 * 3, *losses]
    assert policies.surviving_bytes(lambda: None) == []


FAST, SMALL, DEARER, SLOWER = (
    policies.Cost("minimal", 40, 1.0),
    policies.Cost("inputs", 1, 1.2),
    policies.Cost("paper", 60, 1.0),
    policies.Cost("conventional", 90, 1.1),
)


def test_the_front_holds_what_nothing_beats():
    assert policies.on_front([SMALL, SLOWER, DEARER, FAST]) == [FAST, SMALL]
    twin = policies.Cost("paper", 40, 1.0)
    assert policies.on_front([FAST, twin]) == [FAST, twin]


def marks(axes):
    """(policy's colour, filled, x, y) of every mark that was drawn at a place."""
    dots = [line for line in axes.lines if line.get_marker() != "None" and len(line.get_xdata())]
    return [
        (line.get_markeredgecolor(), line.get_markerfacecolor() != "none", *map(float, line.get_xydata()[0]))
        for line in dots
    ]


def test_the_pareto_picture_puts_costs_in_their_places():
    double = [cost._replace(seconds=2 * cost.seconds) for cost in (SLOWER, DEARER, FAST, SMALL)]
    series = {"one": [SLOWER, DEARER, FAST, SMALL], "two": double}
    figure = drawn(policies.pareto_picture({"a layer": series, "another": series, "a third": series}))
    axes, _, _, unused = figure.axes
    expected = [(10, 90), (0, 60), (0, 40), (20, 1)]
    colors = [policies.POLICY_COLORS[cost.policy] for cost in series["one"]]
    found = marks(axes)
    assert [(color, filled) for color, filled, _, _ in found[:8]] == [
        *((color, True) for color in colors),
        *((color, False) for color in colors),
    ]
    np.testing.assert_allclose([place[2:] for place in found[:8]], [(x, y / GIB) for x, y in expected * 2], atol=1e-9)
    assert axes.get_title(loc="left") == "a layer\n0% is 1000 ms (one), 2000 ms (two)" and not unused.get_visible()
    front = next(line for line in axes.lines if len(line.get_xdata()) == 2)
    np.testing.assert_allclose(front.get_xydata(), [(0, 40 / GIB), (20, 1 / GIB)], atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_every_layer_the_model_has_two_policies_on_the_front(shape):
    *sizes, activation, _ = shape
    config = MoEConfig(*sizes, activation)
    for costs in policies.modelled(config).values():
        same = ["paper"] if activation == "relu" else []  # of ReLU it keeps what minimal keeps
        assert [cost.policy for cost in policies.on_front(costs)] == [*same, "minimal", "inputs"]
        assert [cost.kept_bytes for cost in costs] == [
            account(config, "moeblaze", policy).kept_bytes for policy in POLICIES
        ]
    drawn(policies.modelled_pareto(*sizes, activation))


@pytest.mark.parametrize(("d", "h"), [(64, 64), (2048, 8192)])
def test_prices_are_flops_over_bytes(d, h):
    R, listed = 10, {price.tensor.split(",")[0]: price.flops_per_byte for price in policies.prices(d, h)}
    assert listed["a and b"] == 2 * (2 * R * d * h) / (2 * R * h * 2) == d
    assert listed["y"] == 2 * R * h * d / (R * d * 2) and listed["probs"] == 2 * R * d / (R * 4)
    (axes,) = drawn(policies.price_picture(d, h)).axes
    assert [x for *_, x, _ in marks(axes)] == [price.flops_per_byte for price in policies.prices(d, h)]
    assert [line.get_xdata()[0] for line in axes.lines[-2:]] == [gemm.ridge(unit) for unit in gemm.PEAK_FLOPS]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stack_of_one_layer_is_the_accounts_largest_step(policy):
    config = preset("olmoe").config
    assert policies.stack_tokens(config, policy, 1, 80 * GB) == largest_tokens(config, "moeblaze", policy, 80 * GB)
    L = policies.stack_tokens(config, policy, 3, GB)

    def needed(tokens):
        one = account(config.replace(L=tokens), "moeblaze", policy)
        return 2 * one.kept_bytes + one.peak_bytes

    assert needed(L) <= GB < needed(L + 1)
    with pytest.raises(ValueError, match="capacity_bytes is 1, but even L = 0 needs"):
        policies.stack_tokens(config, policy, 3, 1)


def test_recomputing_pays_below_the_break_even_and_not_above():
    config = preset("conf4").config
    at = int(policies.break_even(config, 24) * GB)
    for budget, faster in ((at - GB // 10, "inputs"), (at, "minimal")):
        times = {policy: policies.token_seconds(config, policy, 24, budget) for policy in ("minimal", "inputs")}
        assert min(times, key=times.get) == faster
    assert policies.token_seconds(config, "minimal", 24, 20_000) == math.inf
    assert policies.break_even(config, 10**6) == math.inf
    (axes,) = drawn(policies.budget_picture("conf4", 24)).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(lines) == list(POLICIES)
    assert lines["inputs"][0] < lines["minimal"][0] < lines["paper"][0] < lines["conventional"][0]
    assert lines["minimal"][-1] < lines["inputs"][-1]


MEASURED_SHAPE = {"L": 64, "d": 16, "h": 24, "E": 4, "k": 2}
RUNS = [{"kind": "layer", "clocks": None, "repetitions": 5}] * 2
PACKAGES = {"numpy": "2.4.6", "torch": "2.11.0"}
PLACE = {"device": "a GPU", "clocks": None, "versions": PACKAGES, "commit": "abc_def", "runs": RUNS}


def measured_row(policy, kept_bytes, step_ms, **changes):
    row = dict.fromkeys(field.name for field in fields(bench_layer.Row)) | {"kind": "layer", "run": 0}
    row |= {"system": "moeblaze", "policy": policy, "shape": MEASURED_SHAPE, "dtype": "bfloat16", "routing": "uniform"}
    return row | {"kept_bytes": kept_bytes, "step_ms": step_ms} | changes


def test_measured_times_are_read_with_where_they_come_from(tmp_path):
    file = tmp_path / "bench.json"
    with pytest.raises(FileNotFoundError, match=r"bench.json is not among the results"):
        policies.read_measured(file)
    other = MEASURED_SHAPE | {"L": 128}
    rows = [
        measured_row("minimal", 4 * GIB, 3.0),
        measured_row("inputs", GIB, 3.6),
        measured_row(None, GIB, 1.0, system="grouped_mm"),
        measured_row("minimal", None, 1.0, system="moeblaze_graphed"),
        measured_row("minimal", GIB, 1.0, routing="zipf"),
        measured_row("minimal", GIB, 1.0, run=1),
        measured_row("paper", GIB, 3, shape=other, preset="small"),
    ]
    file.write_text(json.dumps(PLACE | {"rows": rows}))
    measured = policies.read_measured(file)
    device = "- device: a GPU\n- clocks (SM, memory, and their maxima): None\n"
    said = f"{device}- versions: numpy 2.4.6, torch 2.11.0\n- commit: abc\\_def"
    assert policies.provenance(measured).data == said
    first, second = drawn(policies.measured_pareto(measured)).axes
    assert first.get_title(loc="left") == "L = 64, d = 16, h = 24, E = 4, k = 2, bfloat16\n0% is 3 ms (measured)"
    assert second.get_title(loc="left").startswith("small: L = 128, ")
    assert len(marks(first)) == 2
    names = [text.get_text() for text in first.figure.legends[0].get_texts()]
    assert names == ["paper", "minimal", "inputs", "Pareto front"], "no policy that was not measured, and no black mark"
    np.testing.assert_allclose([place[2:] for place in marks(first)], [(0, 4), (20, 1)], atol=1e-9)


def test_a_file_without_our_rows_is_refused(tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(PLACE | {"rows": [measured_row(None, 1, 1, system="grouped_mm")]}))
    with pytest.raises(ValueError, match="at least one row of the layer under a policy"):
        policies.read_measured(file)


# Hopper --------------------------------------------------------------------------------------------------------------


def test_a_box_lies_in_shared_memory_as_the_kernels_place_it():
    """hopper/stage.cuh's `swizzled`, by which cp.async puts rows where TMA would."""
    rows, chunks = np.indices((16, 8))
    expected = np.empty((16, 8), int)
    expected[rows, chunks ^ rows % 8] = 8 * rows + chunks
    np.testing.assert_array_equal(hopper.box_in_shared_memory(16), expected)


@pytest.mark.parametrize("chunk", range(8))
def test_the_swizzle_picture_spreads_a_column_over_the_banks(chunk):
    matrix, shared = drawn(hopper.swizzle_picture(chunk)).axes
    places = {text.get_text(): text.get_position()[0] - 0.5 for text in shared.texts}
    assert places == {f"row {row}": chunk ^ row % 8 for row in range(16)}
    assert {text.get_position()[0] for text in matrix.texts} == {chunk + 0.5}
    reads = hopper.column_reads(chunk)
    assert {name: read.wavefronts for name, read in reads.items()} == {"plain lines": 8, "swizzled": 1}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_ring_multiplies_and_keeps_within_its_stages(stages, seed):
    run = hopper.run_ring(stages, steps=7, seed=seed)
    assert hopper.ring_error(run) < 2**-9
    released = {("releases", step) for step in range(6)}  # the last stage is not given back
    assert sorted(run.log) == sorted({(event, step) for event in hopper.EVENTS[:2] for step in range(7)} | released)
    assert 1 <= hopper.most_ahead(run.log) <= stages
    assert seed or hopper.most_ahead(run.log) == stages
    at = {event: number for number, event in enumerate(run.log)}
    for step in range(7):
        assert at["loads", step] < at["multiplies", step] < at.get(("releases", step), len(run.log))
        if step >= stages:
            assert at["releases", step - stages] < at["loads", step]


@pytest.mark.parametrize("stages", [2, 3])
def test_the_ring_picture_has_a_bar_for_each_of_a_steps_phases(stages):
    axes = drawn(hopper.ring_picture(stages)).axes[0]
    bars = [patch for patch in axes.patches if patch.get_width() > 0]
    assert len(bars) == 2 * hopper.RING_STEPS
    lines = {round(bar.get_y() + 0.4) for bar in bars}
    assert lines == set(range(stages))
    for line in lines:
        ends = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars if round(bar.get_y() + 0.4) == line)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), "a stage has one user at a time"


def test_mistakes_of_the_ring_are_said_and_end_alike_only_where_no_one_waits():
    said = [hopper.ring_fault(name) for name in hopper.RING_FAULTS]
    assert all(fault.startswith(("barrier_", "wgmma_", "a wrong result")) for fault in said), said
    unordered = [fault for fault in said if fault.endswith("no fence_async_proxy has come between")]
    assert unordered == said[:3] and len(set(said[3:])) == len(said) - 3
    assert len({fault.why for fault in hopper.RING_FAULTS.values()}) == len(said)


def test_a_ring_without_a_mistake_says_nothing(monkeypatch):
    monkeypatch.setitem(hopper.RING_FAULTS, "none", hopper.RingFault("wgmma_commit();", "wgmma_commit();", ""))
    assert hopper.ring_fault("none") == "nothing is said"
    monkeypatch.setitem(hopper.RING_FAULTS, "gone", hopper.RingFault("no such line", "", ""))
    with pytest.raises(ValueError, match="6_specialized.cu does not hold 'no such line'"):
        hopper.ring_fault("gone")


def test_the_log_of_the_ring_moves_no_line():
    """The executor's messages name lines of the file."""
    assert hopper._logged(kernel_text(hopper.RING)).count("\n") == kernel_text(hopper.RING).count("\n")
    assert all(right in kernel_text(hopper.RING) for right in hopper.LOGGED)


PRODUCT = """
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

extern "C" __global__ void __launch_bounds__(128)
    product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out) {
    DYNAMIC_SHARED(unsigned char, memory);
    unsigned char* const panels = memory + (1024 - shared_address(memory) % 1024) % 1024;
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_fence();
        barrier_arrive_expecting(&full, 5 * 8192);
        tma_load(panels, &a, &full, 0, 0);
        for (int panel = 0; panel < 4; ++panel) tma_load(panels + (1 + panel) * 8192, &b, &full, panel * 64, 0);
    }
    __syncthreads();
    barrier_wait(&full, 0);
    float sums[128] = {};
    wgmma_fence();
    wgmma_m64n256k16<Scalar, false, true>(sums, wgmma_operand(panels, 8192), wgmma_operand(panels + 8192, 8192), true);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 128; ++i) out[threadIdx.x * 128 + i] = sums[i];
}
"""


def test_holders_are_those_of_the_instruction():
    """The product of (row, 1) and (256, column) numbers the elements."""
    executor = SimtExecutor()
    a, b = np.zeros((64, 64), "bfloat16"), np.zeros((64, 256), "bfloat16")
    a[:, 0], a[:, 1], b[0], b[1] = np.arange(64), 1, 256, np.arange(256)
    out = executor.empty((128, 128), "float32")
    maps = {"a": executor.tensor_map(a, (64, 64)), "b": executor.tensor_map(b, (64, 64))}
    executor.load("product.cu", text=PRODUCT, Scalar="__nv_bfloat16").launch(
        "product", 1, 128, 6 * 8192, **maps, out=out
    )
    holders = np.empty(64 * 256, int)
    holders[out.astype(int)] = np.arange(128)[:, None]
    np.testing.assert_array_equal(holders.reshape(64, 256), hopper.holders())
    counts = np.unique(hopper.holders(), return_counts=True)
    assert counts[0].tolist() == list(range(128)) and set(counts[1]) == {128}


@pytest.mark.parametrize("thread", [0, 37, 127])
def test_the_picture_of_holders_shows_one_threads_sums(thread):
    axes = drawn(hopper.holders_picture(thread)).axes[0]
    cells = {(patch.get_y(), patch.get_x()) for patch in axes.patches if patch.get_width() == 1}
    assert cells == {tuple(place) for place in np.argwhere(hopper.holders() == thread)}


PLACES = """
__device__ int places[4096][4], placed;
inline void place(int c0, int c1, int c2) {
    const int seen[4] = {int(blockIdx.x), c0, c1, c2};
    for (int i = 0; i < 4; ++i) places[placed][i] = seen[i];
    ++placed;
}
"""
TAKE_PLACES = """
extern "C" __global__ void take_places(int* found) {
    for (int i = 0; i < 4 * placed; ++i) found[1 + i] = places[i / 4][i % 4];
    found[0] = placed;
    placed = 0;
}
"""
COPIES = {
    load: f"place({seen}), {load}"
    for load, seen in (
        ("simt_tma_load(shared, map, barrier, 2, {c0, c1, 0}", "c0, c1, -1"),
        ("simt_tma_load(shared, map, barrier, 3, {c0, c1, c2}", "c0, c1, c2"),
    )
}


class Placing(gemm.EditedExecutor):
    """Writes down the coordinates of every copy by TMA, block after block."""

    def __init__(self, band, blocks):
        super().__init__(COPIES, TAKE_PLACES, PLACES, workers=1)
        self.band, self.multiprocessors = band, blocks

    def load(self, file, text=None, **constants):
        return super().load(file, **constants | {"BAND": self.band})

    def take(self):
        found = np.zeros(1 + 4 * 4096, np.int32)
        self.module.launch("take_places", grid=1, block=1, found=found)
        return found[1 : 1 + 4 * found[0]].reshape(-1, 4).tolist()


@pytest.mark.parametrize(("band", "blocks"), [(1, 3), (2, 4), (8, 1)])
def test_tiles_come_in_the_kernels_own_order(band, blocks):
    """By where expert_down's blocks copy their operands from: a tile's rows, then its columns of the weights."""
    lengths, width = [300, 0, 128, 400], 520
    chosen = np.repeat(np.arange(4, dtype=np.int32), lengths)[:, None]
    y_swi, w3 = np.zeros((sum(lengths), 64), "float16"), np.zeros((4, 64, width), "float16")
    executor = Placing(band, blocks)
    expert_down.forward(y_swi, w3, reference.build(chosen, 4), executor=executor, version="7_persistent")
    offsets = np.cumsum([0, *lengths])
    found = {block: [] for block in range(blocks)}
    for block, c0, c1, expert in executor.take():
        if expert < 0:
            row = c1
        elif c0 % hopper.TILE_COLUMNS == 0:
            found[block].append((expert, (row - offsets[expert]) // hopper.TILE_ROWS, c0 // hopper.TILE_COLUMNS))
    order = list(hopper.tiles(lengths, 3, band))
    assert len(order) == 3 * (3 + 1 + 4)
    assert [tuple(tile) for block in range(blocks) for tile in order[block::blocks]] == [
        tile for block in found.values() for tile in block
    ]


def test_waves_are_whole_but_for_the_last_and_count_each_operand_once():
    order = list(hopper.tiles([256, 128], 4, 1))
    first, second, last = hopper.waves(order, 5)
    assert [*first, *second, *last] == order and len(last) == 2
    assert hopper.wave_bytes(first, 64) == (2 * 128 + 4 * 256) * 64 * 2  # a row of four columns and one more
    assert hopper.wave_bytes(second, 64) == (2 * 128 + 5 * 256) * 64 * 2  # and a column of another expert
    (row, _) = hopper.wave_table({name: preset(name).config for name in ladder.PRESETS}, (1, 8))
    assert row["tiles"] == 65_536 // 128 * 4 * 4096 // 128 and row["MB a wave, band 8"] < row["MB a wave, band 1"]


@pytest.mark.parametrize("band", [1, 8, 16])
def test_the_picture_of_the_schedule_colours_every_tile(band):
    tiles, reads = drawn(hopper.schedule_picture(band)).axes
    assert len(tiles.patches) == 512 and tiles.get_title(loc="left") == f"512 tiles, bands of {band}"
    order = list(hopper.tiles(hopper.PICTURED["lengths"], hopper.PICTURED["columns"], band))
    waves = hopper.waves(order, hopper.MULTIPROCESSORS)
    heights = [hopper.wave_bytes(wave, hopper.PICTURED["depth"]) / 1e6 for wave in waves]
    assert [bar.get_height() for bar in reads.patches] == heights and max(heights) < reads.get_ylim()[1]


MEASURED = hopper.read_measured()


def test_the_series_picture_shows_the_first_run():
    for axes, name in zip(drawn(hopper.series_picture(MEASURED)).axes, ladder.PRESETS, strict=True):
        rows = [row for row in hopper.first_of(MEASURED.ladder["rows"]) if row["preset"] == name]
        above = [row for row in rows if ladder.WHOLE not in row["ratio_to"]]
        assert [bar.get_width() for bar in axes.patches] == [row["tflops"] for row in above]
        assert axes.lines[0].get_xdata()[0] == rows[0]["cublas_tflops"] and axes.get_title(loc="left") == name


def test_steps_are_shown_with_their_counters():
    lines = hopper.step_table(MEASURED, "two stages", ladder.TOP.idea).data.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {name}", idea] for name in ladder.PRESETS for idea in ("two stages", ladder.TOP.idea)
    ]
    timed = {(row["preset"], row["idea"]): row for row in MEASURED.ladder["rows"]}
    counted = {(row["preset"], row["idea"]): row for row in MEASURED.counters["rows"]}
    key = ("conf3", "two stages")
    assert f"{timed[key]['step_ms']:.4g} | {counted[key]['duration_ms']:.4g}" in lines[0]
    assert f"| {counted[key]['tensor_pct']:.0f} | {counted[key]['sm_clock_ghz']:.4g} |" in lines[0]
    assert "times as fast as the step before" in hopper.step_table(MEASURED, "two stages").data
    assert "times as fast as the whole" in hopper.step_table(MEASURED, ladder.LADDER[-1].idea).data


def test_the_step_to_another_idea_is_said_for_each_layer():
    before, after = ("persistent blocks", "bands of tiles")
    said = hopper.from_step_to_step(MEASURED, before, after).data.splitlines()
    counted = {(row["preset"], row["idea"]): row for row in hopper.first_of(MEASURED.counters["rows"])}
    assert len(said) == len({preset for preset, _ in counted})
    for line in said:
        first, second = (counted[line.removeprefix("- ").partition(":")[0], idea] for idea in (before, after))
        assert f"busy {first['l2_pct']:.0f}% before and {second['l2_pct']:.0f}% after" in line
        assert document.signed(100 * (second["dram_read_bytes"] / first["dram_read_bytes"] - 1)) in line


def test_products_are_shown_beside_cublas():
    rows = hopper.products(MEASURED)
    lines = hopper.product_table(MEASURED).data.splitlines()[2:]
    assert len(lines) == len(rows)
    names = ["expert_up", "expert_down", "d_hidden", "d_w3", "d_x_rows", "d_w"]
    presets = list(dict.fromkeys(row["preset"] for row in MEASURED.counters["rows"]))
    panels = drawn(hopper.busy_picture(MEASURED)).axes
    for axes, preset_name in zip(panels, presets, strict=True):
        mine = [row for row in rows if row["preset"] == preset_name]
        assert [row["kernel"] for row in mine[:-1]] == names and not mine[-1]["version"]
        assert [label.get_text() for label in axes.get_yticklabels()] == [*names, "cuBLAS, dense"]
        widths = [row[column] for column in hopper.BUSY for row in mine]
        assert [bar.get_width() for bar in axes.patches] == widths


def test_panels_of_any_number_of_layers_are_drawn():
    rows = [row for row in MEASURED.counters["rows"] if row["preset"] == "conf3"]
    three = [row | {"preset": name} for name in ("a", "b", "c") for row in rows]
    measured = MEASURED._replace(counters=MEASURED.counters | {"rows": three})
    assert [axes.get_title(loc="left") for axes in drawn(hopper.busy_picture(measured)).axes] == ["a", "b", "c"]


def test_of_several_runs_the_first_is_shown():
    rows = [{"preset": "a", "run": 1}, {"preset": "b", "run": 0}, {"preset": "a", "run": 2}, {"preset": "a", "run": 1}]
    assert hopper.first_of(rows) == [rows[0], rows[1], rows[3]]


def test_every_trial_has_a_bar_in_one_picture():
    shown = []
    for which in hopper.TRIALS:
        found = [trial for idea in hopper.trials_of(which) for trial in idea]
        axes = drawn(hopper.trials_picture(which)).axes[0]
        assert [bar.get_width() for bar in axes.patches] == [document.change_of(trial) for trial in found]
        assert 0 < len(found) <= 20 and all(text.get_fontsize() >= 9 for text in axes.texts)
        shown += found
    assert sorted(map(str, shown)) == sorted(map(str, document.trials()))


def test_a_change_of_nothing_has_no_sign():
    assert [document.signed(percent) for percent in (-0.4, 0.4, -0.6, 12.0)] == ["0%", "0%", "-1%", "+12%"]


# Drop, pad or block-sparse -------------------------------------------------------------------------------------------


def test_recordings_add_up_and_name_their_source():
    for recording in megablocks.recordings().values():
        assert recording.counts.shape == (24, 32)
        assert set(recording.counts.sum(axis=1)) == {recording.tokens * recording.k}
        assert recording.counts.max() <= recording.tokens
    assert "Apache-2.0" in megablocks.recorded_source() and "gpt-oss-20b" in megablocks.recorded_source()


def test_skew_one_is_the_recording_and_zero_is_even():
    recording = megablocks.recordings()["79 answers"]
    for counts in recording.counts:
        np.testing.assert_array_equal(megablocks.steeper(counts, 1.0, recording.tokens, recording.k), counts)
    assert set(megablocks.steeper(recording.counts[3], 0.0, 800, 4)) == {100}


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("L", [0, 7, 1000])
def test_a_steeper_routing_is_still_one(skew, L):
    for counts in megablocks.recordings()["one answer"].counts[::6]:
        rows = megablocks.steeper(counts, skew, L, 4)
        assert rows.sum() == 4 * L and 0 <= rows.min() and rows.max() <= L
        assert L < 1000 or rows.max() >= megablocks.steeper(counts, skew / 2, L, 4).max()


@pytest.mark.parametrize(("factor", "block"), [(0.5, 16), (1.25, 128), (6.0, 1)])
def test_fates_of_rows_add_up(factor, block):
    counts = megablocks.recordings()["one answer"].counts[4]
    upper, lower = drawn(megablocks.fates_picture(counts, factor, block)).axes
    capacity = expert_capacity(int(counts.sum()), 32, factor)
    computed, dropped, padded = np.array([bar.get_height() for bar in upper.patches]).reshape(3, 32)
    np.testing.assert_array_equal(computed + dropped, np.sort(counts)[::-1])
    np.testing.assert_array_equal(computed + padded, capacity)
    assert f"{dropped.sum() / counts.sum():.1%} of the rows dropped" in upper.get_title(loc="left")
    computed, dropped, padded = np.array([bar.get_height() for bar in lower.patches]).reshape(3, 32)
    np.testing.assert_array_equal(computed, np.sort(counts)[::-1])
    assert not dropped.any() and not ((computed + padded) % block).any() and padded.max() < block
    assert f"{padded.sum() / (computed + padded).sum():.1%} of the work is padding" in lower.get_title(loc="left")


def test_shares_of_no_rows_are_zero():
    none = megablocks_rows([0, 0], 16)
    assert megablocks.dropped_share(none) == megablocks.padding_share(none) == 0


def test_the_factor_picture_has_a_line_for_each_layer():
    recording = megablocks.recordings()["79 answers"]
    dropped, padded = drawn(megablocks.factor_picture(recording, recording.tokens)).axes
    assert len(dropped.lines) == len(padded.lines) == 25
    rows, factor = recording.tokens * recording.k, megablocks.FACTORS.index(1.25)
    for counts, lost, empty in zip(recording.counts, dropped.lines, padded.lines, strict=False):
        capacity = expert_capacity(rows, 32, 1.25)
        fates = dropped_and_padded(counts.tolist(), capacity)
        found = lost.get_ydata()[factor] / 100 * rows, empty.get_ydata()[factor] / 100 * 32 * capacity
        np.testing.assert_allclose(found, fates)
    assert set(dropped.lines[-1].get_ydata()) == {0} and 0 < padded.lines[-1].get_ydata()[0] < 10


def test_larger_blocks_and_smaller_steps_pad_more():
    axes = drawn(megablocks.tokens_picture(megablocks.recordings()["79 answers"], 10)).axes[0]
    heights = np.array([line.get_ydata() for line in axes.lines])
    assert heights.shape == (4, 11) and (np.diff(heights, axis=0) > 0).all() and (np.diff(heights, axis=1) < 0).all()


@pytest.mark.parametrize("policy", ["by_gate", "by_arrival"])
def test_letters_stand_on_what_they_lost(policy):
    case = make_case(24, 8, 8, 4, 2, "zipf")
    chosen = gating.forward(case.logits, 2)
    loss = megablocks.drop(chosen.topk_experts, chosen.gates, 4, 0.5, policy)
    assert loss.slots == loss.lost.sum() > loss.tokens == loss.lost.all(axis=1).sum() > 0
    axes = drawn(megablocks.lost_picture([b"abcdefgh", b"ijkl\nnop", "qr→uvx".encode()], loss, shown=8)).axes[0]
    assert "".join(texts(axes.figure)) == "abcdefghijkl¶nopqr···uvx"
    (cells_of_bytes,) = axes.collections
    assert [path.vertices[0].tolist() for path in cells_of_bytes.get_paths()] == [[i % 8, i // 8] for i in range(24)]
    names = {(0, 0, 0, 0): 0, to_rgba(memory.plots.ORANGE): 1, to_rgba(memory.plots.VERMILLION): 2}
    assert [names[tuple(color)] for color in cells_of_bytes.get_facecolors()] == loss.lost.sum(axis=1).tolist()
    part = drawn(megablocks.lost_picture([b"abcdefgh"] * 3, loss, shown=5)).axes[0]
    assert "".join(texts(part.figure)) == "abcde" * 3
    every = f"{loss.slots / 48:.1%} of the slots dropped, {loss.tokens / 24:.1%} of the tokens lost"
    assert part.get_title("left") == f"{every} (drawn: 5 of 8 bytes a window)"


@pytest.mark.parametrize(("factor", "block"), [(0.5, 1), (1.0, 4), (2.0, 8)])
def test_the_tiny_rows_are_all_there(factor, block):
    shown = texts(drawn(megablocks.bins_picture(factor, block)))
    assert len([text for text in shown if text.isdigit()]) == 3 * megablocks.TINY_CHOICES.size
    rows = expert_capacity(16, 4, factor)
    dropped, padding = dropped_and_padded([7, 0, 4, 5], rows)
    assert f"capacity: E*C = 4 * {rows} rows; {dropped} dropped, {padding} padding" in shown
    assert ("dropped" in shown) == (dropped > 0)
    stored = sum(megablocks_rows([7, 0, 4, 5], block).stored)
    assert f"MegaBlocks: P = {stored} rows in blocks of {block}; {stored - 16} padding" in shown


TINY = megablocks.tiny_topology()


def test_the_topology_picture_shows_the_five_arrays():
    shown = texts(drawn(megablocks.topology_picture(TINY, megablocks.TINY_EXPERTS)))
    for name, array in TINY.arrays().items():
        at = shown.index(name) + 1
        assert shown[at : at + array.size] == [str(number) for number in array]


def test_lines_lead_from_a_block_to_its_place_in_the_transpose():
    axes = drawn(megablocks.transpose_picture(TINY, megablocks.TINY_EXPERTS)).axes[0]
    lines = {int(line.get_xdata()[1]): int(line.get_xdata()[0]) for line in axes.lines}
    assert [lines[place] for place in range(TINY.nnz)] == TINY.transpose_indices.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_blocks_meet_as_the_topology_says(seed):
    mask = np.random.default_rng(seed).random((5, 7)) < 0.4
    topology = block_sparse.topology_of(mask, 2)
    numbers, (rows, columns) = np.zeros(mask.shape, int), mask.nonzero()
    numbers[rows, columns] = np.arange(rows.size)
    places = list(zip(rows.tolist(), columns.tolist(), strict=True))
    steps = megablocks.product_steps("SDD", topology)
    assert [(step.result, step.numbers, step.dense) for step in steps] == [
        (place, (number,), place) for number, place in enumerate(places)
    ]
    for product, stored, named in (("DSD", mask, numbers), ("DSD of the transpose", mask.T, numbers.T)):
        expected = [(row, tuple(named[row][line]), tuple(line.nonzero()[0])) for row, line in enumerate(stored)]
        assert megablocks.product_steps(product, topology) == expected


def test_who_meets_whom_is_found_and_not_assumed(monkeypatch):
    right = megablocks.product_steps("DSD", TINY)
    other = block_sparse.topology_of(np.roll(block_sparse.to_dense(np.ones((15, 4, 4)), TINY)[::4, ::4] > 0, 1, 1), 4)
    dsd = block_sparse.dsd
    monkeypatch.setattr(block_sparse, "dsd", lambda values, _, *args, **options: dsd(values, other, *args, **options))
    assert megablocks.product_steps("DSD", TINY) != right


@pytest.mark.parametrize(("product", "last"), [("SDD", 14), ("DSD", 4), ("DSD of the transpose", 11)])
def test_a_step_frames_the_blocks_that_meet(product, last):
    for step, found in enumerate(megablocks.product_steps(product, TINY)):
        axes = drawn(megablocks.product_picture(product, step)).axes[0]
        frames = [patch for patch in axes.patches if patch.get_linewidth() == 2]
        assert len(frames) == (3 if product == "SDD" else 1 + 2 * len(found.numbers))
        bright = [patch for patch in axes.patches if patch.get_width() == 1 and patch.get_alpha() == 1]
        assert len(bright) == len(frames)
        assert all(f"S{number}" in axes.get_title("left") for number in found.numbers if product != "SDD")
    with pytest.raises(ValueError, match=f"step is {last + 1}, but it must be 0..{last}"):
        megablocks.product_picture(product, last + 1)


def test_both_layers_run_and_all_their_work_is_told():
    case = make_case(40, 16, 128, 2, 1, "zipf").astype("bfloat16")
    exact = case.astype("float64")
    made = layer.forward(exact.x, exact.weights, exact.k)
    gradients = layer.backward(exact.d_out, made.saved, exact.weights)
    expected = {"out": made.out, "d_w1": gradients.d_w1, "d_w2": gradients.d_w2, "d_w3": gradients.d_w3}
    for run in (megablocks.run_megablocks(case), megablocks.run_moeblaze(case)):
        for name, right in expected.items():
            assert relative_error(run.results[name].astype(float), right) < 2**-6, name
        work = megablocks.work_by_part(run)
        assert sum(number for number, _ in work.values()) == len(run.launches)
        total = sum(launch.read_bytes + launch.written_bytes for launch in run.launches)
        assert sum(size for _, size in work.values()) == total > 0
        assert work["products"][0] >= 7


@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_the_bars_of_the_systems_are_their_kept_bytes(activation):
    axes = drawn(megablocks.systems_bars("conf1", activation)).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["conventional", "capacity", "megablocks", "moeblaze/paper", "moeblaze/minimal"]
    ends = [
        max(bar.get_x() + bar.get_width() for bar in axes.patches if round(bar.get_y() + 0.4) == i) for i in range(5)
    ]
    config = preset("conf1").config.replace(activation=activation)
    kept = [account(config, *variant).kept_bytes / GIB for variant in megablocks.COMPARED]
    np.testing.assert_allclose(ends, kept)


# What there is not ---------------------------------------------------------------------------------------------------

FEW_EXPERTS = "k is 8, but there are only 4 experts"
EDITED = gemm.EditedExecutor({"no such line": ""})
MANY_BLOCKS = block_sparse.topology_of(np.ones((6, 9), bool), 1)
REFUSED = [
    (lambda: pictures.layer_picture("dispatchh"), "unknown stage 'dispatchh'. Did you mean 'dispatch'"),
    (lambda: show_kernel("dispatch/1_dense_mapp.cu"), "Did you mean 'dispatch/1_dense_map.cu'"),
    (lambda: show_kernel(KERNELS, "dense_mup"), "unknown CUDA function 'dense_mup'. Did you mean 'dense_map'"),
    (
        lambda: sources.show_difference("expert_upp", *VERSION_FILES),
        "unknown CUDA function 'expert_upp'. Did you mean 'expert_up'",
    ),
    (lambda: table([]), "rows is empty"),
    (lambda: memory.memory_bars(1024, 256, 256, 4, 8, "relu", "paper"), FEW_EXPERTS),
    (lambda: memory.memory_lines(256, 256, 4, 8, "relu"), FEW_EXPERTS),
    (lambda: routing.capacity_picture(1.0, 1.0, 4, 8), FEW_EXPERTS),
    (lambda: dispatch.dispatch_steps(GOLDEN_TOPK_EXPERTS, 4, 6), "step is 6, but it must be 0..5"),
    (lambda: backward.Tape(SMALL_LAYER).check(d_w4=SMALL_LAYER.x), "unknown tensor 'w4'. Did you mean 'w"),
    (lambda: backward.flow_picture("minimum"), "unknown policy 'minimum'. Did you mean 'minimal'"),
    (lambda: gemm.count_up("1_naive", *UP, executor=EDITED), "expert_up/1_naive.cu does not hold 'no such line'"),
    (lambda: gemm.fragment_picture(32), "lane is 32, but it must be 0..31"),
    (lambda: gemm.gather_picture(GOLDEN_DISPATCH, 4), "expert is 4, but it must be 0..3"),
    (lambda: policies.seconds([], "onse"), "unknown traffic 'onse'. Did you mean 'once'"),
    (lambda: hopper.swizzle_picture(8), "chunk is 8, but it must be 0..7"),
    (lambda: hopper.ring_picture(6), "stages is 6, but it must be 2..5"),
    (lambda: hopper.ring_picture(1), "stages is 1, but it must be 2..5"),
    (lambda: hopper.ring_fault("no fault"), "unknown fault 'no fault'"),
    (lambda: hopper.holders_picture(128), "thread is 128, but it must be 0..127"),
    (lambda: hopper.schedule_picture(0), "band is 0, but it must be >= 1"),
    (lambda: hopper.step_table(MEASURED, "too stages"), "unknown idea 'too stages'. Did you mean 'two stages'"),
    (lambda: hopper.trials_picture("adapted"), "unknown kind of trials 'adapted'. Did you mean 'adopted'"),
    (lambda: megablocks.steeper(np.ones(4), -1, 8, 2), "skew is -1, but it must be at least 0"),
    (lambda: megablocks.steeper(np.array([5, 0, 5, 0]), 1.0, 8, 3), "k is 3, but there are only 2 experts"),
    (lambda: megablocks.product_steps("DSD", MANY_BLOCKS), "the largest of nnz, block rows and block columns is 54"),
    (lambda: megablocks.product_picture("DSS", 0), "unknown product 'DSS'"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_there_is_not_is_refused(ask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ask()


# Pictures in words ---------------------------------------------------------------------------------------------------


def test_a_picture_is_said_by_its_titles_axes_and_legends():
    fates = pictures.alt_text(megablocks.fates_picture([300, 100], 1.0, 128))
    assert "fixed capacity, C = 200: 25.0% of the rows dropped" in fates and "y: rows" in fates
    assert "legend: computed, dropped, padding" in fates
    assert "MegaBlocks: P = 20 rows in blocks of 4; 4 padding" in pictures.alt_text(megablocks.bins_picture(1.0, 4))
    assert pictures.alt_text(Figure()) == "a drawing"


def test_names_on_an_axis_and_words_beside_marks_are_said():
    changes = [pictures.alt_text(hopper.trials_picture(which)) for which in hopper.TRIALS]
    assert len(set(changes)) == len(changes) and all("y: " in said for said in changes)
    steps = {name: simulate.Step(*np.ones((2, 3))) for name in ("packed", "in order")}
    said = pictures.alt_text(placement.tails_picture(steps, "a title"))
    assert said.startswith("a title, x: modelled step, ms, y: packed, in order")


def test_shades_are_told_apart_without_colour():
    """Every colour map that is named grows lighter, or darker, from end to end."""
    sources = [file.read_text() for file in (ROOT / "moeblaze_ref").rglob("*.py")]
    names = {name for source in sources for name in re.findall(r'cmap="(\w+)"', source)}
    assert len(names) > 1
    for name in names:
        grey = colormaps[name](np.linspace(0, 1, 64))[:, :3] @ [0.299, 0.587, 0.114]
        steps = np.diff(grey)
        assert (steps > 0).all() or (steps < 0).all(), name


@pytest.mark.parametrize(
    "picture",
    [
        lambda: routing.capacity_picture(1.0, 1.25, E=8, k=2),
        lambda: routing.skew_picture(E=8, k=2),
        lambda: dispatch.sectors_against_experts(L=64, k=1, experts=(2, 4)),
        lambda: dispatch.map_against_experts(L=64, k=1),
        lambda: backward.slope_picture("swiglu"),
        lambda: backward.flow_picture("minimal"),
        lambda: policies.modelled_pareto(64, 8, 16, 4, 2, "swiglu"),
        lambda: policies.budget_picture("conf4", 24),
        lambda: hopper.ring_picture(3),
        lambda: hopper.series_picture(MEASURED),
        lambda: hopper.busy_picture(MEASURED),
        lambda: megablocks.fates_picture([300, 100], 1.0, 128),
        lambda: megablocks.tokens_picture(megablocks.recordings()["79 answers"], 10),
        lambda: placement.tails_picture({"packed": simulate.Step(*np.ones((2, 3)))}),
        lambda: parallel.measured_picture([json.loads((ROOT / "docs/results/ep_h200x2_gptoss.json").read_text())]),
    ],
)
def test_what_a_legend_names_is_told_apart_without_colour(picture):
    assert_told_apart_in_grey(picture())


def test_every_picture_that_a_run_shows_is_said():
    source = "%matplotlib inline\nfrom moeblaze_ref.course.notebook import megablocks\nmegablocks.bins_picture(1.0, 4)"
    (output,) = execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), FOLDER).cells[0].outputs
    assert output["metadata"]["image/png"]["alt"].startswith("capacity: E*C = 4 * 4 rows")


# Placement -----------------------------------------------------------------------------------------------------------


def test_the_toy_is_what_the_notebook_says_of_it():
    """Both programs balance it; one token less even, half of the crossings are gone."""
    small = placement.toy()
    both = moetuner(small, simulate.cluster("nvlink", 2, d=2048, h=1024)).placement
    paired = Placement(np.array([[0, 0, 1, 1], [0, 1, 0, 1]], np.int32), 2)
    figure = placement.flows_picture(small, {"both": both, "paired": paired})
    said = [axes.get_title(loc="left").splitlines()[1] for axes in figure.axes]
    assert said == ["fullest GPU: 8, then 8; crossing: 6", "fullest GPU: 8, then 9; crossing: 3"]
    for axes, crossing in zip(figure.axes, (3 + 3, 2 + 1), strict=True):
        red = [band for band in axes.collections if tuple(band.get_facecolor()[0][:3]) == to_rgba(VERMILLION)[:3]]
        heights = [band.get_paths()[0].vertices[:, 1] for band in red]
        assert sum(abs(tall[1] - tall[-2]) for tall in heights) == pytest.approx(crossing), "by the bands' left edges"


def test_every_clustering_of_four_experts_is_tried_once():
    found = {tuple(clustering) for clustering in placement.clusterings(4)}
    assert len(found) == len(placement.clusterings(4)) == 7
    assert all(clustering[0] == 0 and 1 in clustering for clustering in found)
