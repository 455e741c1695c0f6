"""Fills what the pages on placement say of the records of ``moeblaze place``, and draws their pictures.

``python -m moeblaze_ref.placement.document`` writes everything again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from matplotlib.figure import Figure

from moeblaze_ref.core import documents, figures, records
from moeblaze_ref.core.drawing import heading
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.placement import findings, plots, time_document

PAGES = (
    DOCS / "placement.md",
    DOCS / "placement_programs.md",
    DOCS / "placement_dedup.md",
    DOCS / "placement_seeds.md",
    DOCS / "placement_copies.md",
    DOCS / "placement_sizes.md",
    DOCS / "placement_over_time.md",
)
KEYS = ("rows", "splits", "curve", "device", "versions", "commit")
RECORDS = {kind: DOCS / "results" / f"place_{kind}.json" for kind in ("gptoss20b", "lm_small", "32x8", "scale")}
# Of tokens that come home after every layer.
HOME = ("gptoss_2", "gptoss_4", "gptoss_8", "gptoss_2x4", "gptoss_2x8", "lm_2", "lm_4")
SIZES = tuple(f"{model}_{gpus}" for model in ("v3", "k2") for gpus in (64, 128, 256))
SMALLER = ("layers_64", "experts_64")  # half of DeepSeek-V3's layers, and of its experts
HOME_RECORDS = {kind: DOCS / "results" / f"place_dedup_{kind}.json" for kind in HOME + SIZES + SMALLER}
COPIES_RECORDS = {f"copies_{on}": DOCS / "results" / f"place_copies_gptoss_{on}.json" for on in ("8", "16", "2x8")}
LARGE_COPIES = tuple(f"copies_{model}_256" for model in ("v3", "k2"))
LARGE_COPIES_RECORDS = {kind: DOCS / "results" / f"place_{kind}.json" for kind in LARGE_COPIES}
# MoETuner's one node and two, as four ranks.
ITS_RECORDS = {f"its_{on}": DOCS / "results" / f"place_moetuner_{on}.json" for on in ("one_node", "two_nodes")}
# Several seeds of the search on each split.
SEEDS = ("gptoss_4", "gptoss_8", "gptoss_2x4", "gptoss_2x8", "lm_2", "lm_4")
SEEDS_RECORDS = {f"seeds_{on}": DOCS / "results" / f"place_seeds_{on}.json" for on in SEEDS}
GROWTH = "place_dedup_growth"
GROWN = "Two panels, time of the search and peak memory against GPUs, a line a model"
MEASURED = DOCS / "results" / "ep_h200x2_gptoss.json"  # of parallel.bench
# Text for a reader who does not see the pictures.
NOT_OF_CROSSINGS = ("eplb-nearest", "dedup", "dedup-copies")  # methods for other traffic; their names hide others
PICTURED = (
    "Load against transitions that change GPU, on the first random half: methods for few crossings as points, "
    "joint as a curve over its limits"
)


def fill(text: str, paths: Mapping[str, Path] = RECORDS) -> str:
    """Return the document with the block of each record, and that of the model's constants, regenerated.

    Records that are not there yet have empty blocks.

    Raises
    ------
    ValueError
        If there is no block of that name, or a file is no record of `moeblaze place`.
    """
    blocks: dict[str, Callable[[], str]] = {kind: partial(_block, path) for kind, path in paths.items()}
    blocks |= {kind: partial(_home, path, findings.home) for kind, path in HOME_RECORDS.items()}
    blocks |= {
        kind: partial(_home, path, findings.copies) for kind, path in (COPIES_RECORDS | LARGE_COPIES_RECORDS).items()
    }
    blocks |= {kind: partial(_home, path, findings.saved_by_each) for kind, path in ITS_RECORDS.items()}
    blocks |= {kind: partial(_home, path, findings.seeds) for kind, path in SEEDS_RECORDS.items()}
    blocks |= {"growth": _growth} | time_document.blocks()
    keys = ("gpus", "d", "h", *findings.CONSTANTS)
    return documents.fill(text, blocks | {"constants": lambda: findings.constants(records.read(MEASURED, keys))})


def load(path: Path) -> findings.Found:
    """A record of `moeblaze place`; errors as in `records.read`."""
    return records.read(path, KEYS)


def picture(found: findings.Found) -> Figure:
    """Load against crossings on the first split, whose curve the record holds; without `NOT_OF_CROSSINGS`."""
    seed = found["splits"][0]["seed"]
    first = [one for one in found["splits"] if one["seed"] == seed and one["method"] not in NOT_OF_CROSSINGS]
    points, curve = ([SimpleNamespace(**trial) for trial in trials] for trials in (first, found["curve"]))
    figure = plots.load_against_crossings(points, curve)
    halves = len({trial["seed"] for trial in found["splits"]})
    heading(figure.axes[0], f"the first of {halves} random halves")
    return figure


def _block(path: Path) -> str:
    """Return the summary of a record, its picture if it has a curve, and its origin; empty without a record."""
    if not path.exists():
        return ""
    found = load(path)
    where = "\n".join([*documents.place(found), *findings.allowed(found)])
    if not found["curve"]:
        return "\n\n".join([findings.scale(found), where])
    shown = f"![{PICTURED}](images/{documents.picture_of(path).name})"
    return "\n\n".join([findings.summary(found), shown, where])


def _home(path: Path, described: Callable[[findings.Found], str]) -> str:
    """Return what is said of a record, and its origin; empty without a record."""
    if not path.exists():
        return ""
    found = load(path)
    return "\n\n".join([described(found), "\n".join(documents.place(found))])


def _growth() -> str:
    """Return the picture of time and memory, and the numbers; empty without records."""
    found = sizes()
    return f"![{GROWN}](images/{GROWTH}.png)\n\n{findings.growth(found)}" if found else ""


def sizes() -> list[findings.Found]:
    """The records of large models that are there."""
    return [load(HOME_RECORDS[kind]) for kind in SIZES + SMALLER if HOME_RECORDS[kind].exists()]


def write():
    """Write both pages, and the picture of every record that has a curve."""
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    for path in RECORDS.values():
        if path.exists() and (found := load(path))["curve"]:
            figures.save(picture(found), documents.picture_of(path).parent, path.stem, force=True)
    if large := sizes():
        figures.save(plots.growth(large), DOCS / "images", GROWTH, force=True)
    time_document.draw()


if __name__ == "__main__":
    write()
