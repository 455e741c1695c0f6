"""Pages of source files, and links to them from the documents, the notebooks and the API reference."""

import functools
import os
import re
from pathlib import Path
from string import Template

import pygments
from docutils import nodes
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from sphinx import addnodes
from sphinx.application import Sphinx

from moeblaze_ref.core.paths import ROOT

FOLDERS = ("kernels_cuda", "moeblaze_ref", "tests")
LEXERS = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".cpp": "cpp", ".hpp": "cpp", ".h": "cpp", ".json": "json"}

# A theme would draw its whole navigation beside each of these pages; they share its colours, light and dark.
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$name</title><link rel="stylesheet" href="$up/_static/pygments.css">
<style>
:root { color-scheme: light dark } body { margin: 0; font: 14px/1.4 monospace } p { margin: 1em }
.highlight { padding: 1em; overflow-x: auto } .highlight pre { margin: 0 } .linenos { opacity: .5; padding-right: 1em }
</style></head>
<body><script>document.body.dataset.theme = localStorage.getItem("theme") || "auto"</script>
<p><a href="$up/$home.html">moeblaze_ref</a> / $name</p>
$code</body></html>
""")


def files() -> list[Path]:
    """Every source file that has a page, relative to the root."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in LEXERS)
    return sorted(path.relative_to(ROOT) for path in found)


def page_of(file: Path) -> str:
    """Name of a file's page, without the ending that HTML pages have."""
    return f"source/{file.as_posix()}"


@functools.cache
def text_of(file: Path) -> str:
    """A file of the root."""
    return (ROOT / file).read_text()


def line_of(text: str, name: str) -> int:
    """Return the line, from 1, of a definition in a file's text; the first line if there is none.

    Of a qualified name such as ``Dispatch.arrays`` each part is looked for below the one before, if it is there.
    """
    position = 0
    for part in map(re.escape, name.split(".")):
        python = rf"^[ ]*(?:def|class) {part}\b|^[ ]*{part}(?:: [^=\n]+)?(?: = |$)"
        cuda = rf"^(?![ ]*//)[^\n=;]*\b{part}\([^;]*?\{{"
        found = re.compile(f"{python}|{cuda}", re.MULTILINE).search(text, position)
        position = found.start() if found else position
    return text.count("\n", 0, position) + 1


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The source of something in the API reference, as sphinx.ext.linkcode asks for it: seen from a page in api/."""
    if not info["module"]:
        return None
    path = Path(*info["module"].split("."))
    file = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
    return f"../{page_of(file)}.html#line-{line_of(text_of(file), info['fullname'])}"


def link_documents(app: Sphinx, doctree: nodes.document) -> None:
    """Links of a document to source files, which are no documents, lead to their pages and to what their text names."""
    document = app.env.docname
    for node in doctree.findall(lambda node: isinstance(node, addnodes.pending_xref) and node["reftype"] == "myst"):
        file = Path(os.path.normpath(Path(document).parent / node["reftarget"]))
        if file.parts[0] in FOLDERS and file.suffix in LEXERS and (ROOT / file).is_file():
            line = line_of(text_of(file), node.astext().partition(",")[0])
            uri = f"{app.builder.get_relative_uri(document, page_of(file))}#line-{line}"
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Every source file as a page, its lines numbered."""
    formatter = HtmlFormatter(linenos="inline", lineanchors="line", anchorlinenos=True)
    for file in files():
        page = Path(app.outdir, f"{page_of(file)}.html")
        page.parent.mkdir(parents=True, exist_ok=True)
        code = pygments.highlight(text_of(file), get_lexer_by_name(LEXERS[file.suffix]), formatter)
        up = "/".join([".."] * len(file.parts))
        page.write_text(_PAGE.substitute(name=file.as_posix(), up=up, home=app.config.root_doc, code=code))
