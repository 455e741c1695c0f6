"""What makes the project's prose hard to read: long sentences, refused turns of phrase, and fragments."""

import ast
import re
from collections.abc import Iterator

MOST_WORDS = 25  # of a sentence outside lists, tables and formulas
REFUSED = {
    "Given is": r"\bGiven (?:is|are)\b",
    "Wanted is": r"\bWanted (?:is|are)\b",
    "held against": r"\bh(?:e|o)ld(?:s|ing)?\s+against\b",
    "whoever": r"\b[Ww]hoever\b",
    "all that": r"\b[Aa]ll that\b",
    "nobody": r"\b[Nn]obody\b",
    "it is ... that": r"\b[Ii]t is (?!clear|true|known|possible|likely|important)[^.,;:?]{1,60}?\bthat\b",
    "stands open": r"\bstands? open\b",
    "asks of": r"\basks? of\b",
}
_FRAGMENT = re.compile(r"(?:Of|As|That|Those)\b")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s|\s*\||\[[^]]+\]: ")
_ENDS = re.compile(r"(?<=[.!?])(?:\*\*|[\"')*])*\s+(?=[A-Z`*\[(0-9])")


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a Markdown text, without headings, lists, tables, code, formulas and what is generated."""
    for pattern in (r"^```.*?^```", r"\$\$.*?\$\$", r"<!-- begin .*?<!-- end .*?-->", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"</?(?:details|summary)>", "\n\n", text)
    for block in re.split(r"\n\s*\n", re.sub(r"</?[a-z][^>]*>", "", text)):
        lines = block.strip().splitlines()
        items = [number for number, line in enumerate(lines) if _ITEM.match(line)]
        prose = " ".join(lines[: items[0]] if items else lines)
        if prose and not prose.startswith("#"):
            yield prose


def sentences(paragraph: str) -> list[str]:
    """Its sentences; code, a formula and the text of a link count as words."""
    for pattern, word in ((r"`[^`]*`", "`code`"), (r"\$[^$]*\$", "formula"), (r"\[([^]]*)\]\([^)]*\)", r"\1")):
        paragraph = re.sub(pattern, word, paragraph)
    return [part for part in _ENDS.split(paragraph) if part.strip()]


def findings(text: str) -> Iterator[str]:
    """In words, each sentence that is too long and each refused turn of phrase."""
    for paragraph in paragraphs(text):
        for sentence in sentences(paragraph):
            if (words := len(sentence.split())) > MOST_WORDS:
                yield f"{words} words: {sentence}"
        plain = re.sub(r"`[^`]*`", "`code`", paragraph)
        yield from (f"{name!r}: {plain}" for name, pattern in REFUSED.items() if re.search(pattern, plain))


def fragments(source: str) -> Iterator[str]:
    """Docstrings and help texts of Python source that begin in the middle of a sentence, such as "Of capacity."."""
    for node in ast.walk(ast.parse(source)):
        for text in (_docstring(node), _help(node)):
            if _FRAGMENT.match(text):
                yield f"line {getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def _docstring(node: ast.AST) -> str:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (ast.get_docstring(node) or "") if isinstance(node, owners) else ""


def _help(node: ast.AST) -> str:
    """The text of an argument ``help``, as far as it is fixed."""
    if not (isinstance(node, ast.keyword) and node.arg == "help"):
        return ""
    first = node.value.values[0] if isinstance(node.value, ast.JoinedStr) else node.value
    return str(first.value) if isinstance(first, ast.Constant) else ""
