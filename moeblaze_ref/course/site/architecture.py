"""The picture and the table of docs/architecture.md, from the contract of imports in pyproject.toml.

``python -m moeblaze_ref.course.site.architecture`` writes docs/images/architecture.svg and the table.
"""

import tomllib
from html import escape
from pathlib import Path

from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS, PACKAGE, ROOT

DOCUMENT, PICTURE = DOCS / "architecture.md", DOCS / "images" / "architecture.svg"
HOLDS = {
    "cli": "the commands",
    "course": "notebooks, exercises, site",
    "parallel": "experts on several GPUs",
    "papers": "the papers' claims",
    "bench": "times on a GPU",
    "placement": "which GPU holds an expert",
    "lm": "a small language model",
    "plan": "whole models, part by part",
    "verify": "checks, the checker",
    "memory": "bytes, by formula and measured",
    "nn": "torch modules, the oracle",
    "backends": "numpy, Numba, raw CUDA stages",
    "runtime": "launching kernels, on GPU or CPU",
    "systems": "layers over the stages",
    "core": "sizes, checks, records",
}
WIDTH, BOX, GAP, EDGE = 760, 44, 14, 10  # pixels


def layers() -> list[list[str]]:
    """Return the folders of each layer of the contract, the highest layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (of_package,) = (contract for contract in contracts if contract["containers"] == ["moeblaze_ref"])
    return [layer.split(" | ") for layer in of_package["layers"]]


def picture() -> str:
    """Return the picture as SVG: a row for each layer, which imports only from the rows below."""
    rows = layers()
    height = len(rows) * (BOX + GAP) - GAP + 2 * EDGE
    boxes = [box for number, row in enumerate(rows) for box in _row(row, EDGE + number * (BOX + GAP))]
    arrow = (
        f'<path d="M{WIDTH - 18} {EDGE} V{height - EDGE - 8}" stroke="#555" stroke-width="2" marker-end="url(#end)"/>'
    )
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *boxes,
        arrow,
        f'<text transform="translate({WIDTH - 26} {height // 2}) rotate(-90)" text-anchor="middle" font-size="12" '
        'fill="#333">may import</text>',
        "</svg>\n",
    ])  # fmt: skip


def _row(folders: list[str], top: int) -> list[str]:
    """Return the boxes of one layer."""
    room = WIDTH - 2 * EDGE - 40
    width = (room - GAP * (len(folders) - 1)) // len(folders)
    return [_box(folder, EDGE + number * (width + GAP), top, width) for number, folder in enumerate(folders)]


def _box(folder: str, left: int, top: int, width: int) -> str:
    middle = left + width // 2
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{BOX}" rx="5" fill="#eaf3fa" stroke="#0072B2"/>'
        f'<text x="{middle}" y="{top + 19}" text-anchor="middle" font-size="15" font-weight="bold" fill="#111">'
        f"{folder}</text>"
        f'<text x="{middle}" y="{top + 35}" text-anchor="middle" font-size="11" fill="#333">'
        f"{escape(HOLDS[folder])}</text>"
    )


def lines_in(folder: Path) -> int:
    """Return the lines of a folder's Python files and kernels, the folders in it included."""
    sources = (path for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".hpp", ".h"))
    return sum(len(path.read_text().splitlines()) for path in sources)


def table() -> str:
    """Return each folder with what it may import and its lines, the highest layer first."""
    rows, below = [], [folder for layer in layers() for folder in layer]
    for layer in layers():
        below = [folder for folder in below if folder not in layer]
        may_import = ", ".join(below) if len(below) < 4 else f"{below[0]} and below"
        rows += [[f"`{folder}/`", HOLDS[folder], may_import, _hundreds(PACKAGE / folder)] for folder in layer]
    rows.append(["`kernels_cuda/`", "the raw CUDA kernels", "", _hundreds(ROOT / "kernels_cuda")])
    rows.append(["`tests/`", "a folder for each folder above", "everything", _hundreds(ROOT / "tests")])
    return documents.table(["folder", "holds", "may import", "lines"], rows, words=3)


def _hundreds(folder: Path) -> str:
    """Return the lines of a folder, rounded to hundreds, so that not every change makes the page stale."""
    return f"{round(lines_in(folder), -2):,}"


def page(text: str) -> str:
    """Return the page with its table written anew."""
    return documents.fill(text, {"folders": table})


if __name__ == "__main__":
    PICTURE.write_text(picture())
    DOCUMENT.write_text(page(DOCUMENT.read_text()))
