"""Texts are easy to read: short sentences, no refused turns of phrase, no fragments as docstrings and help texts."""

from pathlib import Path

import nbformat
import pytest
from readability import MOST_WORDS, REFUSED, findings, fragments

ROOT = Path(__file__).parents[1]
TEXTS = [
    *(path for pattern in ("*.ipynb", "*/*.ipynb") for path in sorted((ROOT / "notebooks").glob(pattern))),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
SOURCES = sorted((ROOT / "moeblaze_ref").rglob("*.py"))


def markdown(path):
    """The Markdown of a document, or of a notebook's cells."""
    if path.suffix == ".md":
        return path.read_text()
    return "\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_text_is_easy_to_read(path):
    assert not (found := list(findings(markdown(path)))), "\n".join(found)


LONG = " ".join(["word"] * (MOST_WORDS + 1))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"Short. {LONG}. Short.", 1),
        (f"{LONG[5:]}. Short.", 0),
        (f"**Claim.** {LONG} ([a link](of/many words)).", 1),
        (f"<details>\n<summary><b>Question.</b> Why?</summary>\n\n{LONG}.\n\n</details>", 1),
        (f"# {LONG}\n\n| {LONG} |\n\n- {LONG}\n\n```text\n{LONG}\n```\n\n<!-- begin x -->\n{LONG}\n<!-- end x -->", 0),
        (f"A list follows:\n- {LONG}\n- {LONG}", 0),
        ("The sum is $a + b + c$ and `a + b` is a part.", 0),
        (f"The formula is\n\n$${LONG}$$\n\nand ends here.", 0),
        ("Whoever reads all that finds nobody.", 3),
        ("It is the rows that count. Given is `x`. The question stands open.", 3),
        ("It is true that a row counts; it is clear that the layer asks for `nobody`.", 0),
    ],
)
def test_what_is_hard_to_read_is_found(text, found):
    assert len(list(findings(text))) == found


def test_every_refused_phrase_has_an_example():
    examples = {
        "Given is": "Given is x", "Wanted is": "Wanted is y", "held against": "it is held against the oracle",
        "whoever": "whoever asks", "all that": "all that remains", "nobody": "nobody waits",
        "it is ... that": "it is the gate that decides", "stands open": "a question stands open",
        "asks of": "what a kernel asks of memory",
    }  # fmt: skip
    assert examples.keys() == REFUSED.keys()
    for name, text in examples.items():
        assert [one for one in findings(text) if one.startswith(repr(name))], name


def test_docstrings_and_help_texts_of_the_package_are_understood_without_their_author():
    found = [f"{path.relative_to(ROOT)}, {one}" for path in SOURCES for one in fragments(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("beginning", ["Of", "As", "That", "Those"])
@pytest.mark.parametrize(
    "source",
    [
        '"""{} a file."""',
        'def median(self):\n    """{} the whole work."""',
        'async def median(self):\n    """\n    {} the whole work.\n    """',
        'class Layer:\n    """{} the oracle."""',
        'typer.Option(help="{} the layer.")',
        'typer.Option(help=f"{} the layers {{names}}.")',
    ],
)
def test_a_fragment_is_found(source, beginning):
    assert len(list(fragments(source.format(beginning)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        'def median(self):\n    """Median of the work.\n\n    As always.\n    """',
        'def median(self):\n    """Assert it."""',
        'def median(self):\n    return "Of this"',
        'typer.Option(help=f"{names} of the layer.")',
        'typer.Option("Of", help="Offset of the layer.")',
        "typer.Option(help=text)",
    ],
)
def test_what_is_no_fragment_is_not(source):
    assert not list(fragments(source))
