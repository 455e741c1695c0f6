"""The glossary of the site: the words of docs/glossary.md, docs/cuda.md and docs/notation.md, one alphabetical list."""

import re
from collections import defaultdict
from collections.abc import Iterator

from moeblaze_ref.core.paths import DOCS

# Tables of docs/notation.md whose first column is a word or a symbol: (heading, column of the meaning).
NOTATION = {
    "Sizes": 1,
    "Index structures": 3,
    "Save policies": 1,
    "Drop policies": 1,
    "Systems": 1,
    "Placement": -1,
    "Units": 1,
    "Words": 1,
}


def page() -> str:
    """Return the glossary in Markdown: each word as a searchable term, followed by its meanings."""
    introduction = (DOCS / "glossary.md").read_text().partition("\n| ")[0]
    meanings = defaultdict(list)
    for word, meaning in entries():
        meanings[word].append(meaning)
    words = sorted(meanings, key=str.lower)
    listed = "\n\n".join(f"{word}\n  {'. Also: '.join(meanings[word])}" for word in words)
    return f"{introduction}\n\n:::{{glossary}}\n{listed}\n:::\n"


def entries() -> Iterator[tuple[str, str]]:
    """(word, meaning) of all documents; a word of CUDA or of the notation says where its table is."""
    for _, cells in _rows((DOCS / "glossary.md").read_text()):
        yield cells[0], cells[1]
    for heading, cells in _rows((DOCS / "cuda.md").read_text()):
        if heading == "Words":
            yield cells[0], f"{cells[1]} ([CUDA](cuda.md#words))"
    for heading, cells in _rows((DOCS / "notation.md").read_text()):
        if heading in NOTATION:
            anchor = heading.lower().replace(" ", "-")
            meaning = cells[NOTATION[heading]].replace("](#", "](notation.md#")
            yield cells[0].replace("`", ""), f"{meaning} ([notation](notation.md#{anchor}))"


def _rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """(heading above, cells) of every row of a document's tables, without their heads."""
    heading, in_body = "", False
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if in_body and line.startswith("|"):
            yield heading, [cell.strip() for cell in line.strip("|").split("|")]
        in_body = line.startswith("|") and (in_body or bool(re.match(r"\|\s*---", line)))
