"""The tables of docs/check_a_layer.md, from ``verify.layers``.

``python -m moeblaze_ref.course.site.bug_classes`` writes them.
"""

import inspect

from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.verify.layers import cases, diagnosis, layouts, ways

DOCUMENT = DOCS / "check_a_layer.md"


def classes() -> str:
    """Return a row for each class of bugs."""
    rows = [[bug.name, bug.sentence, bug.reference or "no public reference"] for bug in diagnosis.CLASSES]
    return documents.table(["class", "what such a layer does", "public reference"], rows, words=3)


def patterns() -> str:
    """Return a row for each hard case."""
    rows = [[pattern.name, *map(str, pattern.sizes)] for pattern in cases.PATTERNS]
    return documents.table(["case", *"LdhEk"], rows, words=1)


def ways_of_running() -> str:
    """Return a row for each way of running a step."""
    rows = [[name, inspect.getdoc(way) or ""] for name, way in ways.WAYS.items()]
    return documents.table(["way", "what happens"], rows, words=2)


def roles() -> str:
    """Return a row for each weight that a layout can name."""
    rows = [[f"`{name}`", " ".join(axes)] for name, axes in layouts.ROLES.items()]
    rows += [[f"`{name}`", f"{' and '.join(parts)} in one tensor"] for name, parts in layouts.FUSED.items()]
    return documents.table(["weight", "axes in the reference"], rows, words=2)


def page(text: str) -> str:
    """Return the page with its tables written anew."""
    tables = {"classes": classes, "cases": patterns, "ways": ways_of_running, "weights": roles}
    return documents.fill(text, tables)


if __name__ == "__main__":
    DOCUMENT.write_text(page(DOCUMENT.read_text()))
