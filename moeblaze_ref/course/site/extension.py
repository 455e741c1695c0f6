"""Sphinx extension of the site: pages of source files, texts and controls of pictures, plain text in docstrings."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from moeblaze_ref.course.notebook import outputs
from moeblaze_ref.course.site import frames, sources

_RULE = re.compile(r"-{3,}$")  # under the title of a numpydoc section
_KERNEL_HEADER = re.compile(r"[A-Z][\w ]+ {2,}\S")


def keep_as_typed(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Keep the line breaks of a docstring's text before its sections, for drawings and kernel headers.

    An indented part becomes a literal block, ``Grid   ceil(R / THREADS)`` a line of its own, and ``|x|`` is a norm.
    """
    rules = [number for number, line in enumerate(lines) if _RULE.match(line)]
    end = rules[0] - 1 if rules else len(lines)
    lines[:] = [*_as_typed(lines[:end]), *map(_norms, lines[end:])]


def _as_typed(prose):
    drawing = False
    for line in prose:
        indented = line.startswith("    ")
        if indented and not drawing:
            yield from ("", "::", "")
        elif drawing and line and not indented:
            yield ""
        drawing = indented or (drawing and not line)
        if drawing:
            yield line
        else:
            yield f"| {line}" if _KERNEL_HEADER.match(line) else _norms(line)


def _norms(line):
    return re.sub(r"(?<!\S)\|(?=\S)", r"\|", line)


def alternative_texts(notebook: dict[str, Any]) -> list[str]:
    """Return the alternative texts of a notebook's pictures, in their order."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    pictures = [output["metadata"] for output in outputs if "image/png" in output.get("data", {})]
    return [picture["image/png"]["alt"] for picture in pictures]


def describe_pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Pictures in outputs get the alternative texts that the notebook holds, which MyST-NB leaves out."""
    source = Path(app.env.doc2path(app.env.docname))
    if source.suffix != ".ipynb":
        return
    shown = [node for node in doctree.findall(nodes.image) if "jupyter_execute" in node["uri"]]
    for node, text in zip(shown, alternative_texts(json.loads(source.read_text())), strict=True):
        node["alt"] = text


def move_pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Give the scripts of the page what `frames` has drawn: below each note that a notebook moves a picture."""
    up = "../" * app.env.docname.count("/")
    notes = [node for node in doctree.findall(nodes.paragraph) if node.astext().startswith(outputs.NOTE)]
    if not notes:
        return
    shown = frames.listed(Path(app.env.docname).name, app.outdir / frames.FOLDER)
    for note, data in zip(notes, shown, strict=True):
        text = json.dumps({"folder": f"{up}{frames.FOLDER}/", **data}).replace("<", "\\u003c")
        kind = "frames" if "frames" in data else "routing"
        script = f'<script type="application/json" class="{kind}">{text}</script>'
        note.parent.insert(note.parent.index(note) + 1, nodes.raw("", script, format="html"))


def highlight_kernels(app: Sphinx, doctree: nodes.document) -> None:
    """A cell that holds a CUDA kernel to be checked is no Python."""
    for node in doctree.findall(nodes.literal_block):
        if node.astext().startswith("%%check") and "__global__" in node.astext():
            node["language"] = "cuda"


def unlink_bare_names(app: Sphinx, doctree: nodes.document) -> None:
    """``bytes`` in a signature is Python's, not the one attribute of that name which Sphinx would link it to."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node["refdomain"] == "py" and "." not in node["reftarget"]:
            node.replace_self(node.children)


def copy_titles_only(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give Sphinx pages' titles alone for the tree beside a page, since it copies every heading for each page."""
    whole = context["toctree"]

    def toctree(**options: Any) -> str:
        if not options.get("titles_only"):
            return whole(**options)
        tocs = app.env.tocs
        app.env.tocs = _titles(app)
        try:
            return whole(**options)
        finally:
            app.env.tocs = tocs

    context["toctree"] = toctree


@functools.cache
def _titles(app: Sphinx) -> dict[str, nodes.bullet_list]:
    """The contents of all pages without their headings, as Sphinx cuts its copies of them."""
    cut = {page: toc.deepcopy() for page, toc in app.env.tocs.items()}
    for title in (title for toc in cut.values() for title in toc.children if len(title.children) > 1):
        assert isinstance(title, nodes.list_item)
        trees = list(title.findall(addnodes.toctree))
        title[1:] = [nodes.bullet_list("", *trees)] if trees else []
    return cut


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this to load the extension."""
    app.connect("doctree-read", sources.link_documents)
    app.connect("build-finished", sources.write_pages)
    app.connect("doctree-read", unlink_bare_names)
    app.connect("doctree-read", describe_pictures)
    app.connect("doctree-read", move_pictures)
    app.connect("doctree-read", highlight_kernels)
    app.connect("html-page-context", copy_titles_only, priority=400)  # before the theme draws the tree
    app.connect("autodoc-process-docstring", keep_as_typed, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
