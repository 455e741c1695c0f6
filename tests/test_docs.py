"""The documents are true: links lead somewhere, names exist, examples run, tables are the code's.

The first half reads any Markdown file and yields what is wrong with it as sentences; the second compares the tables of
docs/notation.md with the code. Both are shown to fail on documents with a mistake planted in them.
"""

import ast
import contextlib
import io
import json
import math
import os
import pkgutil
import re
import shlex
import traceback
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
import torch
import typer
from helpers import Shape

from moeblaze_ref.backends import registry
from moeblaze_ref.backends.numpy_ref import gating, layer
from moeblaze_ref.backends.registry import BACKENDS, ORACLE, STAGES
from moeblaze_ref.cli import app
from moeblaze_ref.core import config, units
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.routers import Router
from moeblaze_ref.memory import accounting, report
from moeblaze_ref.nn import oracle
from moeblaze_ref.placement import methods
from moeblaze_ref.plan import configs
from moeblaze_ref.plan import report as plan_report
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.systems import capacity
from moeblaze_ref.systems.layer import intermediates
from moeblaze_ref.verify import cases, check, comparisons, coverage
from moeblaze_ref.verify.checker import CONTRACTS
from moeblaze_ref.verify.checker.contracts import ROUTES

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
assert {"notation.md", "paper_map.md", "simt_executor.md"} <= {path.name for path in DOCS}
SOURCES = ("docs", "kernels_cuda", "moeblaze_ref", "notebooks", "tests")  # folders with files that documents may name

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(FENCE.pattern + r"(?:\n*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s]+)\)")
REFERENCE_LINK = re.compile(r"\[([^\]\n]+)\]\[([^\]\n]*)\]")
REFERENCE = re.compile(r"^\[([^\]\n]+)\]: (\S+)$", re.MULTILINE)
HTML_LINK = re.compile(r"""(?:src|href)="([^"]+)\"""")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
FILE_NAME = re.compile(r"[\w./-]+\.(?:cpp|cuh?|hpp|h|ipynb|json|lock|md|py|toml|yml)")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/")
USE = re.compile(rf"({DOTTED.pattern})(?:[(\[].*)?")  # a name alone, called or indexed
VALUE = re.compile(rf"({DOTTED.pattern}) = (.+)")
KERNEL = r"__global__\s+void\s+"


class Document:
    """A Markdown file, parsed."""

    def __init__(self, path: Path):
        self.path, self.text = path, path.read_text()

    @cached_property
    def prose(self):
        """The text without its code blocks."""
        return FENCE.sub("", self.text)

    @cached_property
    def spans(self):
        """What stands in backticks; the text of a link is checked by its target."""
        return SPAN.findall(REFERENCE_LINK.sub("", LINK.sub("", self.prose)))

    @cached_property
    def links(self):
        """(text, target) of every link and image; a reference that is not defined is its own target.

        A target is written as in a URL, where a space is %20; here it is as a path.
        """
        references = dict(REFERENCE.findall(self.prose))
        direct = LINK.findall(self.prose) + [("", target) for target in HTML_LINK.findall(self.prose)]
        by_reference = [(text, key or text) for text, key in REFERENCE_LINK.findall(self.prose)]
        links = direct + [(text, references.get(key, key)) for text, key in by_reference]
        return [(text, unquote(target)) for text, target in links]

    @cached_property
    def anchors(self):
        """Where a link may point inside the document, by GitHub's rule."""
        headings = HEADING.findall(self.prose.lower())
        return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}

    @cached_property
    def examples(self):
        """(language, code, what the text block right below it says that it prints) of every code block."""
        return EXAMPLE.findall(self.text)

    def tables(self, heading):
        """The tables between this heading and the next: each a list of rows, each a dict by column."""
        _, found, section = self.prose.partition(f"# {heading}\n")
        assert found, f"no heading {heading!r}"
        section = HEADING.split(section)[0]
        return [_rows(block) for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)]


def _rows(block):
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


# Links --------------------------------------------------------------------------------------------------------------


def wrong_links(document) -> Iterator[str]:
    """Targets without a file or an anchor, and code in a link's text that its file does not define."""
    for text, target in document.links:
        if re.match(r"[a-z]+:", target):
            continue  # another site's business
        path, _, anchor = target.partition("#")
        file = (document.path.parent / path).resolve() if path else document.path
        if not file.exists():
            yield f"{target}: there is no such file"
        elif anchor and file.suffix == ".md" and anchor not in Document(file).anchors:
            yield f"{target}: there is no such heading"
        else:
            yield from (f"{name} is not in {path}" for name in SPAN.findall(text) if not defines(file, name))


def defines(file, name):
    """Whether a name is the file's own, or that of something in it, such as build or dispatch.build."""
    if is_tail(name, file):
        return True
    if file.suffix == ".py":
        return name.removeprefix(f"{file.stem}.") in python_definitions(file)
    return file.suffix in (".cu", ".cuh", ".hpp", ".h", ".cpp") and name in cuda_functions(file)


def is_tail(name, path):
    """Whether a path ends with these components."""
    return f"/{path.as_posix()}".endswith(f"/{name.rstrip('/')}")


def python_definitions(file):
    """Functions, classes and constants of a Python file."""
    body = ast.parse(file.read_text()).body
    named = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return named | {target.id for target in targets if isinstance(target, ast.Name)}


def cuda_functions(file, kind=""):
    """Names that a CUDA file defines as functions; only those that follow ``kind``, such as KERNEL."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/|__launch_bounds__\([^()]*\)", "", file.read_text(), flags=re.DOTALL)
    return set(re.findall(kind + r"\b(\w+)\s*\((?:[^){};]|\(\))*\)\s*\{", code))  # a default may be a call: Finish()


# Names --------------------------------------------------------------------------------------------------------------


def wrong_names(document) -> Iterator[str]:
    """Names in backticks that do not exist: dotted paths, files, folders, constants with other values, commands."""
    for span in document.spans:
        problem = _problem(span)
        if problem:
            yield f"{span}: {problem}"


def _problem(span):
    if span.startswith("moeblaze "):
        return _command_problem(span)
    if FILE_NAME.fullmatch(span) or FOLDER.fullmatch(span):
        alike = (path for folder in SOURCES for path in (ROOT / folder).rglob(Path(span).name))
        known = (ROOT / span).exists() or any(is_tail(span, path) for path in alike)
        return "" if known else "there is no such file or folder"
    if match := VALUE.fullmatch(span):
        found = python_object(match[1])
        return "" if found == eval(match[2], {}) else f"{match[1]} is {found}"
    if match := USE.fullmatch(span):
        return "" if python_object(match[1]) is not None else "there is no such name"
    return ""


def python_object(dotted):
    """What a dotted path means inside the package, or anywhere; a field of a class as its annotation; or None."""
    owner, _, last = dotted.rpartition(".")
    for prefix in ("moeblaze_ref.", ""):
        with contextlib.suppress(ImportError, AttributeError):
            return pkgutil.resolve_name(prefix + dotted)
        with contextlib.suppress(ImportError, AttributeError, KeyError, ValueError):
            return pkgutil.resolve_name(prefix + owner).__annotations__[last]
    return None


def _command_problem(span):
    """What the command line itself says against a command, without running it."""
    _, name, *arguments = shlex.split(span)
    commands = typer.main.get_command(app.app).commands
    if name not in commands:
        return f"the commands are {', '.join(commands)}"
    try:
        commands[name].make_context(name, arguments)
    except Exception as error:  # the usage errors of whichever click typer carries
        return str(error)
    return ""


# Examples -----------------------------------------------------------------------------------------------------------


def wrong_examples(document) -> Iterator[str]:
    """Python blocks, run in order in one namespace, that raise or print something else; blocks that nothing runs."""
    namespace = {}
    for language, code, expected in document.examples:
        if language == "python":
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(code, "example", "exec"), namespace)
            except Exception as error:
                yield f"{''.join(traceback.format_exception_only(error))} in\n{code}"
            else:
                if printed.getvalue() != expected:
                    yield f"printed\n{printed.getvalue()}instead of\n{expected}by\n{code}"
        elif language != "text":
            yield f"a block of {language or 'no language'} is not run:\n{code}"


# Every document -----------------------------------------------------------------------------------------------------


FINDERS = (wrong_links, wrong_names, wrong_examples)
SEARCHED = [*((find, path) for find in FINDERS for path in DOCS), *((wrong_links, path) for path in ROOT.glob("*.md"))]


@pytest.mark.parametrize(("find", "path"), SEARCHED, ids=lambda one: getattr(one, "__name__", None) or one.name)
def test_nothing_in_a_document_is_wrong(find, path, monkeypatch):
    """What the examples print is printed without a GPU."""
    monkeypatch.setattr(registry, "cuda_device_count", lambda: 0)
    assert list(find(Document(path))) == []


# Length -------------------------------------------------------------------------------------------------------------

MOST_WORDS, README_WORDS = 1500, 900
BLOCK = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
TABLE_LINE = re.compile(r"^\s*\|.*\|$", re.MULTILINE)
ORIGIN = re.compile(r"^- (?:device:|versions:|commit:|run ).*\n", re.MULTILINE)  # where a block's record was measured


def prose_words(document) -> int:
    """Words of a document without code, tables, link targets by name, and the origins in its generated blocks."""
    text = BLOCK.sub(lambda block: ORIGIN.sub("", block[2]), document.text)
    text = REFERENCE.sub("", TABLE_LINE.sub("", FENCE.sub("", text)))
    return len(text.split())


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_a_page_answers_its_question_in_few_words(path):
    assert prose_words(Document(path)) <= MOST_WORDS


def test_words_are_counted_without_tables_code_and_origins(tmp_path):
    table = "| a | b |\n| --- | --- |"
    origin = "- device: a GPU\n- versions: numpy 2\n- commit: abc (code changed)\n- run 0, layer, once"
    block = f"<!-- begin x -->\nFour five.\n\n{table}\n\n- six\n{origin}\n<!-- end x -->"
    assert prose_words(planted(tmp_path, f"One two.\n\n{table}\n\n```text\nc d\n```\n\n{block}\n\nthree")) == 7
    assert prose_words(planted(tmp_path, "- device: a b")) == 4, "outside blocks such a line is prose"


# The paper map --------------------------------------------------------------------------------------------------------

PAPER_MAP = ROOT / "docs" / "paper_map.md"


def missing_from(paper_map) -> Iterator[str]:
    """Functions of the specification, kernels and notebooks that the paper map does not link to."""
    links = [((paper_map.path.parent / target).resolve(), text) for text, target in paper_map.links]
    linked = {(file, name.rpartition(".")[2]) for file, text in links for name in SPAN.findall(text)}
    yield from (f"{name} of {file.relative_to(ROOT)}" for file, name in what_to_link() if (file, name) not in linked)
    notebooks = set((ROOT / "notebooks").glob("*.ipynb")) - {file for file, _ in links}
    yield from (f"{file.relative_to(ROOT)}" for file in notebooks)


def what_to_link() -> Iterator[tuple[Path, str]]:
    """(file, name) of every public function of the specification, every Numba kernel and every raw CUDA kernel."""
    for file in (ROOT / "moeblaze_ref" / "backends" / "numpy_ref").glob("*.py"):
        functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
        yield from ((file, node.name) for node in functions if not node.name.startswith("_"))
    for file in (ROOT / "moeblaze_ref" / "backends" / "numba_cuda").glob("*.py"):
        yield from ((file, name) for name in python_definitions(file) if name.endswith("_kernel"))
    for file in (ROOT / "kernels_cuda").rglob("*.cu"):
        yield from ((file, name) for name in cuda_functions(file, KERNEL))


def test_the_paper_map_leaves_nothing_out():
    assert list(missing_from(Document(PAPER_MAP))) == []


@pytest.mark.parametrize(
    "name", ["expert_groups", "router_z_loss_backward", "route_indices_kernel", "expert_offsets", "00_memory"]
)
def test_what_the_paper_map_leaves_out_is_found(name, tmp_path):
    lines = [line for line in PAPER_MAP.read_text().replace(": ..", ": ROOT").splitlines() if name not in line]
    assert any(name in missing for missing in missing_from(planted(tmp_path, "\n".join(lines))))


STATUS = re.compile(r"faithful(?:: .+)?|(?:altered|missing): .+")
PAPERS = ("MoEBlaze", "SonicMoE", "MegaBlocks", "MoETuner")


def compared_with_papers(paper_map) -> Iterator[dict[str, str]]:
    """Every row that says what a paper says, other than those of what it says twice."""
    for block in re.findall(r"(?:^\|.*\n)+", paper_map.prose, re.MULTILINE):
        yield from (row for row in _rows(block) if {"section", "paper, section"} & row.keys())


def without_a_verdict(paper_map) -> Iterator[str]:
    """Rows that do not say whether the project is faithful, or has altered something, and what, or lacks it.

    A row that calls something missing and links to code is one of them.
    """
    for row in compared_with_papers(paper_map):
        status = row.get("in this project", "")
        if not STATUS.fullmatch(status) or (status.startswith("missing") and "][" in "".join(row.values())):
            yield row["what it says"]


def test_every_row_of_the_paper_map_says_how_faithful_it_is():
    paper_map = Document(PAPER_MAP)
    assert list(without_a_verdict(paper_map)) == []
    words = [row["in this project"].partition(":")[0] for row in compared_with_papers(paper_map)]
    assert set(words) == {"faithful", "altered", "missing"} and len(words) > 60


@pytest.mark.parametrize("wrong", ["", "true", "altered", "missing", "altered:", "faithfully", "Faithful"])
def test_a_row_without_a_verdict_is_found(wrong, tmp_path):
    text = PAPER_MAP.read_text().replace(": ..", ": ROOT")
    right = "| faithful: policy `paper` is line 11 of Algorithm 1; the other policies are ours |"
    assert text.count(right) == 1
    (found,) = without_a_verdict(planted(tmp_path, text.replace(right, f"| {wrong} |")))
    assert found.startswith("saved: A, B, Y_swi")


@pytest.mark.parametrize(
    ("papers", "ours"),
    [
        ("gates: TopK(softmax(Wg x)), Wg (E, d)", "x Wg, with Wg (d, E)"),
        ("logits: Wg x, a dense product", "x Wg"),
        ("second wall: every saved intermediate costs L h itemsize bytes", "L k h itemsize"),
        ("Y_swi = SiLU(A) * B", "are added"),
        ("out = Y_swi W3", "with gates"),
        ("dW3 = Y_swi^T dOut, dY_swi = dOut W3^T", "dW3 = (gate * Y_swi)^T dOut, dY_swi = gate * (dOut W3^T)"),
    ],
)
def test_what_is_altered_stands_beside_the_papers_own_formula(papers, ours):
    (row,) = (row for row in compared_with_papers(Document(PAPER_MAP)) if row["what it says"] == papers)
    assert row["in this project"].startswith("altered: ") and ours in row["in this project"]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_paper_has_a_section_on_what_it_says_twice(paper):
    section = Document(PAPER_MAP).prose.partition(f"### {paper}: what it says twice differently\n")[2]
    assert section
    rows = [row for table in Document(PAPER_MAP).tables(f"{paper}: what it says twice differently") for row in table]
    assert bool(rows) == (paper != "SonicMoE")
    for row in rows:
        assert list(row) == ["where", "what it says", "what it says elsewhere", "here"] and all(row.values())


# Notation: tables against the code ----------------------------------------------------------------------------------

SMALL = Shape(11, 3, 5, 6, 2)  # no two of L, d, h, E, k, R, E + 1 alike
ACCOUNT_CONFIG = MoEConfig(
    L=701, d=5, h=300, E=7, k=2
)  # as unlike: R is 1,402, C is 251, T is 14 or 21, W is 3, S is 100
ACCOUNTS = [
    account
    for changes in ({}, {"activation": "relu2"}, {"dtype": "float32"}, {"dtype": "float64"})
    for renormalize in (False, True)
    for account in accounting.accounts(
        ACCOUNT_CONFIG.replace(**changes),
        assumptions=accounting.Assumptions(router=Router(renormalize=renormalize), block=100),
    )
]


def bare(cell):
    """A cell without its backticks."""
    return cell.replace("`", "")


def column(rows, name):
    return [bare(row[name]) for row in rows]


def names_of(row):
    return SPAN.findall(row["name"])


def check_sizes(notation):
    (rows,) = notation.tables("Sizes")
    symbols = column(rows, "symbol")
    assert symbols[:5] == ["L", "d", "h", "E", "k"]
    assert set(symbols) == {"R"}.union(*(account.symbols for account in ACCOUNTS))


def check_vocabulary(notation):
    """Every name of the code is listed, in the code's order, and no other."""
    stages, registry = notation.tables("Stages and backends")
    assert column(stages, "stage") == list(STAGES)
    assert column(registry, "backend") == [*BACKENDS, ORACLE.name]
    for heading, name, known in (
        ("Activations", "name", config.ACTIVATIONS),
        ("Save policies", "policy", config.POLICIES),
        ("Drop policies", "policy", capacity.DROP_POLICIES),
        ("Systems", "system", accounting.SYSTEMS),
        ("Presets", "preset", config.PRESETS),
        ("Routings", "routing", cases.ROUTINGS),
    ):
        (rows,) = notation.tables(heading)
        assert column(rows, name) == list(known)


def check_backends_of_stages(notation):
    rows = notation.tables("Stages and backends")[0]
    for row in rows:
        for cell, names in {"numpy": ["numpy"], "numba": ["numba"], "simt, cuda": ["simt", "cuda"]}.items():
            assert {bare(row["stage"]) in BACKENDS[name].stages for name in names} == {row[cell] == "yes"}
            assert row[cell] in ("yes", "not yet", "no")


def check_presets(notation):
    (rows,) = notation.tables("Presets")
    for row in rows:
        sizes = {symbol: int(row[symbol].replace(",", "")) for symbol in "LdhEk"}
        assert MoEConfig(**sizes) == config.PRESETS[bare(row["preset"])].config


def check_golden_example(notation):
    """The three columns are those of the code, and the example below them runs like any other."""
    (rows,) = notation.tables("Golden example")
    assert rows == cases.example_in_three_columns()


# Notation: formulas -------------------------------------------------------------------------------------------------

FORMULA_NAMES = {
    "s": lambda a: 1 / (1 + math.exp(-a)),
    "Phi": lambda a: math.erfc(-a / math.sqrt(2)) / 2,
    "phi": lambda a: math.exp(-a * a / 2) / math.sqrt(2 * math.pi),
    "sqrt": math.sqrt,
    "max": max,
    "pi": math.pi,
}


def check_activations(notation):
    """The formulas, evaluated, are the oracle's values and autograd's slopes."""
    u = re.search(r"u\(a\) is `(.+?)`", notation.prose)[1]
    names = FORMULA_NAMES | {"u": lambda a: eval(u, FORMULA_NAMES | {"a": a})}
    (rows,) = notation.tables("Activations")
    for row in rows:
        activation = bare(row["name"])
        assert (row["gated"] == "yes") == config.is_gated(activation)
        for a in (-2.5, -0.3, 0.0, 0.4, 1.7):
            documented = [eval(bare(row[cell]), names | {"a": a, "b": 0.6}) for cell in list(row)[2:] if row[cell]]
            assert documented == pytest.approx(reference_activation(a, 0.6, activation), rel=1e-12, abs=1e-15)


def reference_activation(a, b, activation):
    """y_swi and its slopes by a and, if gated, by b, as torch has them."""
    gated = config.is_gated(activation)
    a, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (a, b))
    y = oracle.activate(a, b if gated else None, activation)
    return [value.item() for value in (y, *torch.autograd.grad(y, [a, b] if gated else [a]))]


def check_policies(notation):
    (rows,) = notation.tables("Save policies")
    for row in rows:
        policy = bare(row["policy"])
        assert tuple(SPAN.findall(row["keeps between x and out"])) == intermediates(policy, "swiglu")
        assert tuple(SPAN.findall(row["keeps of relu"])) == intermediates(policy, "relu")
        assert intermediates(policy, "relu2") == intermediates(policy, "silu")
        assert intermediates(policy, "reglu") == intermediates(policy, "swiglu")
        for activation, cell in (("swiglu", "elements a routed row, gated"), ("silu", "not gated")):
            case = SMALL.case(activation)
            kept = layer.forward(case.x, case.weights, SMALL.k, activation, policy).saved.intermediates
            elements = eval(bare(row[cell]), {"d": SMALL.d, "h": SMALL.h})
            assert sum(array.size for array in kept.values()) == elements * SMALL.L * SMALL.k


# Notation: tensors --------------------------------------------------------------------------------------------------


def shape_of(cell, symbols):
    """The sizes that a cell such as `(T * 128, d)` means."""
    return eval(cell, dict(symbols))


def check_tensors_of_the_specification(notation):
    """Every array that the layer and its router make has a row with its shape."""
    forward, backward = notation.tables("Tensors")
    (indices,) = notation.tables("Index structures")
    documented = {name: row["shape"] for row in (*forward, *backward, *indices) for name in names_of(row)}
    symbols = SMALL._asdict() | {"R": SMALL.L * SMALL.k}
    for name, array in specification_tensors().items():
        assert shape_of(documented[name], symbols) == array.shape, name
    case = SMALL.case()
    assert column(indices, "name") == list(layer.forward(case.x, case.weights, SMALL.k).saved.dispatch.arrays())


def specification_tensors():
    """Arrays of one forward and backward of the numpy layer, by name."""
    case = SMALL.case()
    result = layer.forward(case.x, case.weights, SMALL.k, policy="conventional")
    gradients = layer.backward(case.d_out, result.saved, case.weights)
    routing = gating.forward(case.logits, SMALL.k)
    return {
        "logits": case.logits,
        "out": result.out,
        "d_out": case.d_out,
        **routing._asdict(),
        **case.weights._asdict(),
        **result.saved.tensors(),
        **gradients._asdict(),
    }


def check_tensors_of_the_accounts(notation):
    """Every row of every system's account is documented with its shape and dtype; no row of some systems is idle."""
    (rows,) = notation.tables("Tensors of some systems only")
    own = {(system, name): row for row in rows for system in row["system"].split(", ") for name in names_of(row)}
    (indices,) = notation.tables("Index structures")
    common = {name: row for row in notation.tables("Tensors")[0] for name in names_of(row)}
    common |= {name: row | {"dtype": "int32"} for row in indices for name in names_of(row)}
    used = set()
    for account in ACCOUNTS:
        wide = "float64" if account.config.dtype == "float64" else "float32"
        dtypes = {"dtype": account.config.dtype, "wide": wide}
        symbols = account.symbols | {"R": account.config.R}
        for tensor in account.tensors:
            key = account.system, tensor.name
            row = own.get(key) or common[tensor.name]
            used.add(key)
            assert shape_of(row["shape"], symbols) == tensor.shape, key
            assert dtypes.get(row["dtype"], row["dtype"]) == tensor.dtype, key
    assert own.keys() <= used


# Notation: numbers, units, output -----------------------------------------------------------------------------------


def check_bounds(notation):
    rows = notation.tables("Numbers")[0]
    bounds = {bare(row["dtype"]): row["bound"] for row in rows}
    stated = {dtype: float(bound) for dtype, bound in bounds.items() if re.fullmatch(r"[\d.e-]+", bound)}
    once, twice, *small_tf32 = (2.0 ** int(power) for power in re.findall(r"2\*\*(-\d+)", bounds["tf32"]))
    assert stated | {"tf32": once, "tf32 twice": twice} == comparisons.BOUNDS
    assert bounds.keys() == {"int32", "tf32", *config.ITEMSIZE}
    narrow = bounds.keys() - stated.keys() - {"tf32"}
    small = {dtype: 2.0 ** int(re.search(r"2\*\*(-\d+)", bounds[dtype])[1]) for dtype in narrow}
    small |= dict(zip(("tf32", "tf32 twice"), small_tf32, strict=True))
    assert small == comparisons.SMALL_TENSOR_BOUNDS
    assert f"below {comparisons.FEW_ELEMENTS} output elements" in bounds["bfloat16"]


def check_units(notation):
    rows = notation.tables("Units")[0]
    names, powers = (", ".join(column(rows, name)).split(", ") for name in ("unit", "bytes"))
    values = {name: eval(power) for name, power in zip(names, powers, strict=True)}
    assert values == {"KiB": units.KIB, "MiB": units.MIB, "GiB": units.GIB, "MB": 10**6, "GB": units.GB}
    capacities = re.findall(r"(\d+ GB) is `(.+?)` bytes", " ".join(notation.prose.split()))
    assert {name: eval(number) for name, number in capacities} == accounting.GPU_CAPACITIES
    sizes = re.search(r"Element sizes in bytes: (.+?)\.", notation.prose)[1]
    documented = {name: int(size) for name, size in (item.split() for item in sizes.split(", "))}
    assert documented == config.ITEMSIZE | {"int32": 4, "int64": 8}


def check_output(notation):
    """The keys of the commands' JSON."""
    (rows,) = notation.tables("Machine-readable output")
    checks, counts, placed, memory, system, tensor, plan, stage = (row["keys"].split(", ") for row in rows)
    assert checks == [field.name for field in fields(check.Row)]
    assert counts == [field.name for field in fields(coverage.Line)]
    assert placed == [field.name for field in fields(methods.Row)]
    printed = json.loads(json.dumps(report.as_json("conf1", ACCOUNT_CONFIG, ACCOUNTS, [])))
    assert (memory, system) == (list(printed), list(printed["systems"][0]))
    assert tensor == list(printed["systems"][0]["tensors"][0])
    planned = plan_report.as_json(Run(configs.find("mixtral-8x7b"), Step(1, 128)), [])
    assert (plan, stage) == (list(planned), list(planned["stages"][0]))


def check_kernel_headers(notation):
    """Every kernel file opens with the fields that are listed, in their order."""
    (rows,) = notation.tables("Kernel files")
    files = sorted((ROOT / "kernels_cuda").rglob("*.cu"))
    assert files
    for file in files:
        assert re.findall(r"^// ([A-Z][\w ]*?)  +\S", file.read_text(), re.MULTILINE) == column(rows, "field"), file


CHECKS = [found for name, found in globals().items() if name.startswith("check_")]
assert len(CHECKS) == 13
NOTATION = ROOT / "docs" / "notation.md"


@pytest.mark.parametrize("compare", CHECKS, ids=lambda compare: compare.__name__)
def test_notation_is_the_codes(compare):
    compare(Document(NOTATION))


def test_the_checkers_page_lists_its_tasks():
    document = Document(ROOT / "docs" / "check_your_kernel_reference.md")
    ((*rows,),) = document.tables("The tasks")
    assert [bare(row["task"]) for row in rows] == list(CONTRACTS)
    for row, contract in zip(rows, CONTRACTS.values(), strict=True):
        inputs = ", ".join(
            name for name in contract.inputs if contract.stage in ("dispatch", "block_sparse") or name not in ROUTES
        )
        routes = "; routes" if ROUTES == contract.inputs[-4:] else ""
        extras = f" ({', '.join(contract.extras)})" if contract.extras else ""
        assert row["what it does"] == contract.purpose and row["inputs"] == inputs + routes
        assert row["outputs"] == ", ".join(contract.outputs) + extras
        assert bare(row["grid, unless stated"]) == contract.grid


# Mutation tests -----------------------------------------------------------------------------------------------------

WRONG = {  # a line of a document: what must be said against it
    "[a page](missing.md)": (wrong_links, "missing.md: there is no such file"),
    "![a picture](missing.png)": (wrong_links, "missing.png: there is no such file"),
    '<img src="missing.png">': (wrong_links, "missing.png: there is no such file"),
    "[a part](#nowhere)": (wrong_links, "#nowhere: there is no such heading"),
    "[a part](ROOT/docs/notation.md#nowhere)": (wrong_links, "#nowhere: there is no such heading"),
    "[`biuld`](ROOT/moeblaze_ref/backends/numpy_ref/dispatch.py)": (wrong_links, "biuld is not in"),
    "[`dense_mop`](ROOT/kernels_cuda/dispatch/1_dense_map.cu)": (wrong_links, "dense_mop is not in"),
    "[`Purpose`](ROOT/kernels_cuda/dispatch/1_dense_map.cu)": (wrong_links, "Purpose is not in"),
    "[`test_nothing`](ROOT/tests/runtime/test_simt.py)": (wrong_links, "test_nothing is not in"),
    "[`layer.build`](ROOT/moeblaze_ref/backends/numpy_ref/dispatch.py)": (wrong_links, "layer.build is not in"),
    "[a page][undefined]": (wrong_links, "undefined: there is no such file"),
    "[undefined][]": (wrong_links, "undefined: there is no such file"),
    "[a page][here]\n\n[here]: missing.md": (wrong_links, "missing.md: there is no such file"),
    "[`03_nothing`](ROOT/docs/notation.md)": (wrong_links, "03_nothing is not in"),
    "`backends.numpy_ref.dispatch.biuld`": (wrong_names, "there is no such name"),
    "`backends.numpy_ref.dispotch.build(topk_experts, 4)`": (wrong_names, "there is no such name"),
    "`core.structures.Dispatch.offsets`": (wrong_names, "there is no such name"),
    "`moeblaze_ref.nothing`": (wrong_names, "there is no such name"),
    "`core.checks.MAX_TOP_K = 33`": (wrong_names, "core.checks.MAX_TOP_K is 32"),
    "`2_bitmap_of_dreams.cu`": (wrong_names, "there is no such file"),
    "`kernels_cuda/dreams/`": (wrong_names, "there is no such file or folder"),
    "`notebooks/99_nothing.ipynb`": (wrong_names, "there is no such file"),
    "`moeblaze memroy`": (wrong_names, "the commands are"),
    "`moeblaze memory --presets conf1`": (wrong_names, "--presets"),
    "```python\n1 / 0\n```": (wrong_examples, "ZeroDivisionError"),
    "```python\nprint(1)\n```": (wrong_examples, "printed\n1\ninstead of"),
    "```python\nprint(1)\n```\n\n```text\n2\n```": (wrong_examples, "instead of\n2\n"),
    "```python\nx = 1\n```\n\n```python\nassert x == 2\n```": (wrong_examples, "AssertionError"),
    "```console\nmoeblaze demo\n```": (wrong_examples, "a block of console is not run"),
    "```\nanything\n```": (wrong_examples, "a block of no language is not run"),
}


def planted(tmp_path, text):
    """A document in a folder of its own; ROOT in it leads to the real files."""
    path = tmp_path / "planted.md"
    path.write_text(text.replace("ROOT", quote(os.path.relpath(ROOT, tmp_path))) + "\n")
    return Document(path)


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_found(line, tmp_path):
    find, message = WRONG[line]
    (problem,) = find(planted(tmp_path, f"# A heading\n\nSome words.\n\n{line}"))
    assert message in problem


RIGHT = """# A heading: with `code`

[itself](#a-heading-with-code) [a site](https://nowhere.invalid/page) [a part](ROOT/docs/notation.md#golden-example)
[`build`](ROOT/moeblaze_ref/backends/numpy_ref/dispatch.py)
[`block_exclusive_sum`](ROOT/kernels_cuda/include/common.cuh)
[`dense_map`, `1_dense_map.cu`](ROOT/kernels_cuda/dispatch/1_dense_map.cu)
[`EXPECT`](ROOT/moeblaze_ref/verify/comparisons.py)
[`TILE`, `dispatch.TILE`][numpy] [numpy][] [`dispatch.py`][numpy]
`backends.numpy_ref.dispatch.build(topk_experts, 4)` `core.structures.Dispatch.k` `torch.autograd.grad`
`core.checks.MAX_TOP_K = 32`
`dispatch/1_dense_map.cu` `kernels_cuda/` `pyproject.toml` `2 * d + 4 * h` `a.b + c`
`moeblaze memory --preset conf1 --json`

```python
x = 1
```

```python
print(x + 1)
```

```text
2
```

```text
a diagram
```

[numpy]: ROOT/moeblaze_ref/backends/numpy_ref/dispatch.py
"""


@pytest.mark.parametrize("find", FINDERS, ids=lambda find: find.__name__)
def test_a_right_document_passes(find, tmp_path):
    assert list(find(planted(tmp_path, RIGHT))) == []


def test_a_link_into_a_folder_with_a_space_is_followed(tmp_path):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "page.md").write_text("# A heading\n")
    assert list(wrong_links(planted(tmp_path, "[a page](a%20folder/page.md#a-heading)"))) == []
    assert list(wrong_links(planted(tmp_path, "[a page](a%20folder/pages.md)"))) == [
        "a folder/pages.md: there is no such file"
    ]


MISTAKES = [  # (the check that must find it, what stands in notation.md, what takes its place)
    (check_sizes, "| `W` |", "| `V` |"),
    (check_vocabulary, "| `relu2` |", "| `relu3` |"),
    (check_vocabulary, "| `inputs` | nothing", "| `input` | nothing"),
    (check_vocabulary, "| `cuda` | the same files", "| `gpu` | the same files"),
    (check_vocabulary, "| `hot` | every token chooses the last expert |\n", ""),
    (
        check_backends_of_stages,
        "d_out -> every gradient | yes | yes | yes",
        "d_out -> every gradient | yes | yes | not yet",
    ),
    (check_backends_of_stages, "no gradient | yes | yes | yes", "no gradient | yes | yes | not yet"),
    (check_presets, "| 65,536 | 1,024 |", "| 65,536 | 1,025 |"),
    (check_golden_example, "[2, 3, 0, 1, 1, 2, 0, 3]", "[2, 3, 0, 1, 0, 3, 1, 2, 0, 3]"),
    (check_golden_example, "six tokens are announced", "five tokens are announced"),
    (check_activations, "`a * Phi(a) * b`", "`a * phi(a) * b`"),
    (check_activations, "| `2 * max(a, 0)` |", "| `max(a, 0)` |"),
    (check_activations, "0.044715 * a**3", "0.044751 * a**3"),
    (check_policies, "| `paper` | `a`, `b`, `y_swi` |", "| `paper` | `a`, `b` |"),
    (check_policies, "`2 * d + 2 * h`", "`2 * d + 3 * h`"),
    (check_tensors_of_the_specification, "| `w3` | (E, h, d)", "| `w3` | (E, d, h)"),
    (check_tensors_of_the_specification, "| `d_wg` | (d, E)", "| `d_wg` | (E, d)"),
    (check_tensors_of_the_specification, "| `token_index_map` | (R,)", "| `token_index_map` | (L,)"),
    (check_tensors_of_the_accounts, "| (E * W + 1,) | int32", "| (T * W + 1,) | int32"),
    (check_tensors_of_the_accounts, "| `gate_rows` | (R, 1) | dtype", "| `gate_rows` | (R, 1) | wide"),
    (check_tensors_of_the_accounts, "| capacity, dynamic_capacity | `row_of_slot` |", "| capacity | `place_of_slot` |"),
    (check_tensors_of_the_accounts, "| conventional, sequential | `zeros` |", "| capacity | `zeros` |"),
    (check_bounds, "| `float32` | 1e-5 |", "| `float32` | 1e-4 |"),
    (check_bounds, "| `float16` | the same with", "| `float8` | the same with"),
    (check_units, "`10**6`", "`2**20`"),
    (check_units, "`141 * 10**9`", "`141 * 2**30`"),
    (check_units, "bfloat16 2, float16 2", "bfloat16 2, float16 4"),
    (check_output, "version, dtype, shape,", "version, shape, dtype,"),
    (check_output, "cross_share, step_ms,", "step_ms, cross_share,"),
    (check_output, "formula, bytes, kept |", "formula, bytes |"),
    (check_output, "worst, with_overhead_bytes,", "with_overhead_bytes, worst,"),
    (check_kernel_headers, "| `Idea` |", "| `Thought` |"),
]


@pytest.mark.parametrize(("compare", "right", "wrong"), MISTAKES)
def test_a_mistake_in_the_notation_is_found(compare, right, wrong, tmp_path):
    text = NOTATION.read_text()
    assert text.count(right) >= 1, f"notation.md no longer holds {right!r}: update the mistake"
    with pytest.raises((AssertionError, KeyError)):
        compare(planted(tmp_path, text.replace(right, wrong)))


def test_every_check_of_the_notation_has_a_mistake_to_find():
    assert {compare for compare, _, _ in MISTAKES} == set(CHECKS)
