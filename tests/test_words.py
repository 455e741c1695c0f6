"""The project's text uses the field's words: each row forbids a word of its own that had stood for one of them.

An ordinary use of such a word, as in "a loader of shared libraries", stands in ``words_allowed.txt``.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SEARCHED = (
    ".github", ".pre-commit-config.yaml", "CITATION.cff", "CONTRIBUTING.md", "Dockerfile", "Makefile", "README.md",
    "docs", "environment-gpu.yml", "environment.yml", "kernels_cuda", "moeblaze_ref", "notebooks", "pyproject.toml",
    "scripts", "tests",
)  # fmt: skip
# Not searched: a text to train on, code of others, and the tests of words with their lists.
OTHERS = (
    "moeblaze_ref/course/editor/bundle.js", "moeblaze_ref/lm/python_help.txt", "tests/readability.py",
    "tests/test_readability.py", "tests/test_words.py", "tests/words_allowed.txt",
)  # fmt: skip
TEXTS = {
    ".cff", ".cpp", ".css", ".cu", ".cuh", ".h", ".hpp", ".html", ".ipynb", ".js", ".json", ".md", ".mjs", ".py", ".sh",
    ".toml", ".txt", ".yaml", ".yml", "",
}  # fmt: skip
HOPPER = (
    "kernels_cuda/include/hopper/", "kernels_cuda/include/tile_lists.cuh", "kernels_cuda/block_sparse/7_persistent.cu",
    "kernels_cuda/expert_down/7_persistent.cu", "kernels_cuda/expert_up/4_wgmma.cu", "kernels_cuda/expert_up/5_tma.cu",
    "kernels_cuda/expert_up/6_specialized.cu", "kernels_cuda/expert_up/7_persistent.cu",
    "moeblaze_ref/course/notebook/hopper.py", "notebooks/06_hopper.ipynb",
    "tests/backends/test_tile_lists.py",
)  # fmt: skip


class Word(NamedTuple):
    """A word of the project's own."""

    pattern: str
    instead: str  # what the field says
    folders: tuple[str, ...] = ("",)  # where the word has this meaning: beginnings of paths


def _word(words: str) -> str:
    """A pattern of whole words, also inside names such as ``beside_peers``."""
    return rf"(?<![A-Za-z])(?:{words})(?![a-z])"


WORDS = {
    "door": Word(_word("doors?"), "argument check"),
    "trusted": Word(_word("trusted"), "no word: such a switch must not exist"),
    "judge": Word("judg", "oracle (of gradients), checker, verdict, to check, to compare, to evaluate"),
    "held against": Word(r"\b(?:held|holds?|holding)\b.{0,40}\bagainst\b", "compared with"),
    "rung": Word(_word("rungs?"), "version, or the kernel's file name"),
    "ladder": Word(r"\b(?:the|a|this|our|each|every|whole) ladder\b", "series"),
    "peer": Word(_word("peers?|contestants?"), "baseline"),
    "floor": Word(_word("floors?") + r"(?!\()", "roofline, lower bound"),
    "aim": Word(_word("aims?|aimed"), "target"),
    "seat": Word(_word("seats?|seated|seating"), "GPU assignment"),
    "apart": Word(r"(?<!told[ _])(?<!tell )(?<!bytes )(?<!far[ _])(?<!further )" + _word("apart"), "in a subprocess"),
    "crew": Word(_word("crews?|loaders?|storers?"), "warp roles: producer, consumer and epilogue warps"),
    "piece": Word(_word("pieces?"), "epilogue tile, tile, chunk of bytes, microbatch"),
    "turn": Word(_word("turns?|shares?"), "pipeline state, tile scheduler", HOPPER),
    "take turns": Word(r"\btak(?:e|es|en|ing)[ _]turns\b|\bby turns\b", "interleaved, to alternate"),
    "share out": Word(r"\bshar(?:e|es|ing)(?:[ _]\w+){0,3}[ _]out\b|\bshared[ _]out\b", "to assign, to divide"),
    "heat": Word(_word("heat|heated") + "(?![ _]?map)|" + _word("in[ _]turns"), "interleaved; temperature"),
    "teeth": Word(_word("teeth|tooth"), "fault injection, mutation tests, planted faults"),
    "given up": Word(r"\b(?:given|gives?|giving) up\b", "who stops what: the check stops, the caller raises"),
}


def files():
    """The paths of the texts that are searched, relative to the root."""
    for name in SEARCHED:
        found = (ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name]
        for path in sorted(found):
            relative, below = path.relative_to(ROOT).as_posix(), path.relative_to(ROOT / name).parts
            hidden = any(part.startswith(".") or part in ("__pycache__", "_build") for part in below)
            if path.is_file() and path.suffix in TEXTS and not hidden and not relative.startswith(OTHERS):
                yield relative


def lines_of(file, text):
    """The lines that a reader sees: of a notebook, its sources and the texts of its outputs."""
    if not file.endswith(".ipynb"):
        return text.splitlines()
    return [line for part in _parts(json.loads(text)) for line in "".join(part).splitlines()]


def _parts(notebook):
    for cell in notebook["cells"]:
        yield cell["source"]
        for output in cell.get("outputs", ()):
            yield output.get("text", "")
            yield from (part for kind, part in output.get("data", {}).items() if kind.startswith("text/"))


def allowed():
    """``{file: phrases}`` of the list of ordinary uses."""
    found = {}
    for line in (ROOT / "tests" / "words_allowed.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            file, phrase = line.split(": ", 1)
            found.setdefault(file, []).append(phrase)
    return found


def found_in(file, lines, phrases=()):
    """``(word, line)`` of each forbidden word outside the phrases."""
    words = [name for name, word in WORDS.items() if file.startswith(word.folders)]
    for line in lines:
        rest = line
        for phrase in phrases:
            rest = rest.replace(phrase, "")
        for name in words:
            if re.search(WORDS[name].pattern, rest, re.IGNORECASE):
                yield name, line.strip()


ALLOWED = allowed()


@pytest.mark.parametrize("file", list(files()))
def test_a_text_uses_the_fields_words(file):
    lines = lines_of(file, (ROOT / file).read_text())
    wrong = [
        f"{name!r} (write: {WORDS[name].instead}): {line[:200]}"
        for name, line in found_in(file, lines, ALLOWED.get(file, ()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", ALLOWED)
def test_an_ordinary_use_still_occurs_and_needs_its_place_in_the_list(file):
    lines = lines_of(file, (ROOT / file).read_text())
    for phrase in ALLOWED[file]:
        assert any(found_in(file, [phrase])), f"{file}: {phrase!r} holds no word that is forbidden"
        assert any(phrase in line for line in lines), f"{file}: {phrase!r} does not occur"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("at the kernels' doors", "door"),
        ("with checks.trusted():", "trusted"),
        ("def _judged(row):", "judge"),
        ("the layer is held against autograd", "held against"),
        ("it holds every entry against the other arrays", "held against"),
        ("for rung in RUNGS:", "rung"),
        ("a step of the ladder", "ladder"),
        ("beside_peers(found)", "peer"),
        ("% of its floor", "floor"),
        ("AIM = 0.15", "aim"),
        ("seat_clusters(C)", "seat"),
        ("_run_apart(job)", "apart"),
        ("STORERS = 4", "crew"),
        ("def _in_pieces(tensors):", "piece"),
        ("samples = take_turns(contenders)", "take turns"),
        ("passes have four colours by turns", "take turns"),
        ("threads share the columns out", "share out"),
        ("in turns with the baseline", "heat"),
        ("the checks have teeth", "teeth"),
        ("after 60 seconds it is given up", "given up"),
    ],
)
def test_a_forbidden_word_is_found(text, word):
    assert [name for name, _ in found_in("moeblaze_ref/any.py", [text])] == [word]


@pytest.mark.parametrize(
    "text",
    [
        "raise TypeError",
        "arrivals appear",
        "np.floor(x)",
        "claims",
        "untrusted code",
        "moeblaze bench ladder",
        "told apart",
        "shared memory runs out",
    ],
)
def test_other_words_are_not(text):
    assert not list(found_in("kernels_cuda/include/hopper/any.cuh", [text]))


def test_a_word_of_the_hopper_kernels_is_found_there_alone():
    assert list(found_in("kernels_cuda/include/hopper/any.cuh", ["struct Turn {"])) == [("turn", "struct Turn {")]
    assert not list(found_in("moeblaze_ref/lm/model.py", ["struct Turn {"]))


@pytest.mark.parametrize(
    "file",
    [
        ".github/workflows/test.yml",
        "Dockerfile",
        "docs/_static/frames.js",
        "environment.yml",
        "moeblaze_ref/course/editor/build.mjs",
        "moeblaze_ref/course/teaching/slides.html",
    ],
)
def test_scripts_of_pages_and_settings_are_searched(file):
    assert file in set(files())


def test_a_notebooks_sources_and_outputs_are_searched():
    outputs = [{"text": ["a rung\n"]}, {"data": {"text/html": ["<b>peer</b>"], "image/png": "rung"}}]
    text = json.dumps({"cells": [{"source": ["the judge\n"], "outputs": outputs, "id": "rung"}]})
    assert [name for name, _ in found_in("a.ipynb", lines_of("a.ipynb", text))] == ["judge", "rung", "peer"]


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_that_says_kept_defines_it(path):
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert "saved for backward" in text or not re.search(r"\bkept\b", text)
