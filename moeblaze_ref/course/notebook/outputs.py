"""Write the outputs of notebooks, and compare them with another run.

``python -m moeblaze_ref.course.notebook.outputs``, which is ``make notebooks``, runs every notebook and writes it with
its outputs. What differs from run to run is left out: execution times, the state of widgets, progress bars. Where a
slider stands, its first picture does, under a line that says so. A cell with the tag ``VARIES`` shows rounding errors,
or where training goes after some of them: what it says depends on the processor, and is not compared.
"""

import argparse
import base64
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from PIL import Image

from moeblaze_ref.core import records
from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course.notebook import sources
from moeblaze_ref.course.notebook.execution import METADATA, execute

NOTEBOOKS = ROOT / "notebooks"
MAX_BYTES = 1_000_000  # of a file
VARIES = "varies"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
NOTE = "Run the notebook to move this: "
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
# Another processor adds in another order: decimals may differ by this share of themselves, or be both as small as that.
_RELATIVE, _ROUNDING = 0.01, 1e-5


def settled(ran: NotebookNode) -> NotebookNode:
    """A copy of a notebook that `execution.execute` returned, with the outputs that every run of it has."""
    copy = nbformat.from_dict(ran)
    models = copy.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    copy.metadata = nbformat.from_dict(METADATA)
    for cell in copy.cells:
        cell.metadata = NotebookNode({name: value for name, value in cell.metadata.items() if name == "tags"})
        if cell.cell_type == "code":
            outputs = _joined([part for output in cell.outputs for part in _without_widgets(output, models)])
            for shown in (output.data for output in outputs if "data" in output):
                if "image/png" in shown:
                    shown.pop("text/html", None)  # the same picture once more
                    shown["image/png"] = base64.b64encode(small(base64.b64decode(shown["image/png"]))).decode()
                if "text/markdown" in shown:
                    shown["text/markdown"] = shown["text/markdown"].removesuffix(sources.STYLE)
            cell.outputs = outputs
    return copy


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs, with one for all neighbouring parts of a stream: a busy kernel may send a line in two parts."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and "text" in output and joined[-1].get("name") == output.name:
            joined[-1] = nbformat.from_dict(joined[-1] | {"text": joined[-1].text + output.text})
        else:
            joined.append(output)
    return joined


def text(notebook: NotebookNode) -> str:
    """A notebook's file: canonical JSON."""
    return nbformat.writes(notebook) + "\n"


# Widgets -------------------------------------------------------------------------------------------------------------


def _without_widgets(output: NotebookNode, models: dict[str, Any]) -> Iterator[NotebookNode]:
    """The output itself; of a widget what it shows, under a line with its controls; of a progress bar nothing."""
    view = output.get("data", {}).get(_WIDGET_VIEW)
    if view is None:
        yield output
        return
    tree = list(_tree(view["model_id"], models))
    shown = [nbformat.from_dict(drawn) for model in tree for drawn in _shown(model)]
    if shown:
        controls = ", ".join(filter(None, map(_setting, tree)))
        note = f"*{NOTE}{controls}.*"
        yield nbformat.v4.new_output("display_data", {"text/markdown": note, "text/plain": note})
        yield from shown


def _tree(model_id: str, models: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a widget and every widget inside it, in the order of the screen."""
    model = models[model_id]
    yield model
    for child in model["state"].get("children", []):
        yield from _tree(child.removeprefix("IPY_MODEL_"), models)


def _shown(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Outputs that a widget shows by itself."""
    if model["model_name"] == "OutputModel":
        return model["state"]["outputs"]
    if model["model_name"] == "HTMLModel" and (html := model["state"]["value"]):
        return [nbformat.v4.new_output("display_data", {"text/html": html})]
    return []


def _setting(model: dict[str, Any]) -> str:
    """``name = value`` of a control, as it stands at the end of a run; nothing of another widget."""
    state = model["state"]
    if not state.get("description") or not {"value", "index"} & state.keys():
        return ""
    value = state["_options_labels"][state["index"]] if "index" in state else state["value"]
    return f"{state['description']} = {value}"


# Pictures ------------------------------------------------------------------------------------------------------------


def small(png: bytes, effort: int = 9) -> bytes:
    """A picture in at most 256 colours, compressed with an effort from 0 to 9; a transparent one keeps its alpha."""
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "P":  # it has been here before
        return png
    whole = picture.convert("RGBA")
    opaque = whole.getchannel("A").getextrema()[0] == 255
    # FASTOCTREE alone takes an alpha; it makes of light blues the grey of the page.
    colours, method = (picture.convert("RGB"), "MAXCOVERAGE") if opaque else (whole, "FASTOCTREE")
    few = colours.quantize(method=Image.Quantize[method], dither=Image.Dither.NONE)
    file = io.BytesIO()
    few.save(file, "PNG", compress_level=effort)
    return file.getvalue()


# The same again ------------------------------------------------------------------------------------------------------


def differences(committed: NotebookNode, again: NotebookNode) -> Iterator[str]:
    """Return a sentence for each cell that another run shows differently; pictures are compared by their texts.

    Both notebooks are `settled`. Words and whole numbers must be equal. Decimals may differ by a hundredth, or be both
    below 1e-5: another processor adds in another order. Cells with the tag ``VARIES`` are passed over.
    """
    for one, other in zip(committed.cells, again.cells, strict=True):
        if one.cell_type == "code" and VARIES not in one.metadata.get("tags", []):
            said, says = list(_words(one)), list(_words(other))
            if len(said) != len(says) or not all(map(same, said, says)):
                yield f"cell {one.id} said {said}, and says {says}; run `make notebooks`"


def _words(cell: NotebookNode) -> Iterator[str]:
    """Yield every text in a cell's outputs, and the alt texts of its pictures."""
    for output in cell.outputs:
        data = output.get("data", {})
        yield from (output.text for _ in range("text" in output))
        yield from (data[kind] for kind in sorted(data) if kind.startswith("text/"))
        if "image/png" in data:
            yield output.metadata["image/png"]["alt"]


def same(one: str, other: str) -> bool:
    """Return True if two texts are equal up to the rounding of their decimals."""
    numbers, others = _NUMBER.findall(one), _NUMBER.findall(other)
    return _NUMBER.sub("#", one) == _NUMBER.sub("#", other) and all(map(_close, numbers, others))


def _close(one: str, other: str) -> bool:
    if one == other:
        return True
    if "." not in one + other and "e" not in one + other:
        return False
    first, second = (float(number.replace(",", "")) for number in (one, other))
    return math.isclose(first, second, rel_tol=_RELATIVE, abs_tol=_ROUNDING)


# The command ---------------------------------------------------------------------------------------------------------


def remake(path: Path) -> None:
    """Run a notebook where it lies, and write it with its outputs.

    Raises
    ------
    ValueError
        If the path is no notebook, or the file would be larger than ``MAX_BYTES``.
    """
    records.check_regular(path)
    made = text(settled(execute(nbformat.read(path, as_version=4), path.parent)))
    if len(made) > MAX_BYTES:
        raise ValueError(f"{path.name} would have {len(made):,} bytes, but a notebook may have {MAX_BYTES:,} at most")
    records.replace(path, lambda part: part.write_text(made), lambda found: nbformat.read(found, as_version=4))


def main():
    """The command."""
    parser = argparse.ArgumentParser(description="Run notebooks and write them with their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="files (default: the whole course)")
    for path in parser.parse_args().notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        print(path.name, flush=True)
        remake(path)


if __name__ == "__main__":
    main()
