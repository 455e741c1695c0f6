"""Writes docs/results.md: what each file of docs/results holds, on what it was taken, and which page shows it.

``python -m moeblaze_ref.course.site.records`` writes it again.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeblaze_ref.core import checks, documents, source_hashes
from moeblaze_ref.core.paths import DOCS

DOCUMENT = DOCS / "results.md"
# By the first word of a file's name: (what it holds, the page that shows it).
KINDS = {
    "bench": ("times of the layer, of stages, dispatch, gating and combine", "[performance](performance.md)"),
    "counters": ("hardware counters of the kernels", "[performance](kernel_tables.md#counters)"),
    "ladder": (
        "the versions of each product, one idea more in each",
        "[performance](kernel_tables.md#the-last-version-idea-by-idea)",
    ),
    "systems": ("times of the other systems", "[performance](layer_tables.md#other-systems)"),
    "layer": (
        "times of every preset beside the baselines",
        "[performance](layer_tables.md#the-best-baseline-of-each-layer)",
    ),
    "growth": ("a step against L, E, h, k and skew", "[how the cost grows](growth.md)"),
    "host": ("what a step costs the host, beside CUDA graphs", "[launch plans](launch_plans.md#measure-it)"),
    "trials": (
        "what was tried on the Hopper kernels",
        "[performance](optimisation_log.md#single-trials)",
    ),
    "train": ("a language model trained with each layer", "[training](training.md)"),
    "paper": ("figures of the papers, measured", "[the papers' figures, measured](paper_measurements.md)"),
    "place": ("placements of experts on GPUs", "[placement](placement.md)"),
    "ep": ("layers whose experts are on several GPUs, under maps", "[experts on several GPUs](parallel_measured.md)"),
    "plan": ("plans of whole models beside a GPU", "[will it fit?](plan.md#how-it-is-checked)"),
    "experts": (
        "models cut to two layers, with each implementation of their experts",
        "[inside Hugging Face](huggingface.md#what-it-costs-on-a-gpu)",
    ),
    "layouts": (
        "experts without a router, by the layout of their weights",
        "[layouts of the weights](layer_tables.md#layouts-of-the-weights)",
    ),
    "layers": ("verdicts of every layer that a CPU can check", "[check a layer](check_a_layer.md#what-is-compared)"),
    "league": ("layers of several projects, checked and timed", "[the league](league.md#results)"),
    "cupy": ("what a kernel launched by hand prints", "[launch a kernel by hand](cupy_by_hand.md#the-launch)"),
    "course": ("how long the notebooks take", "[path](path.md#how-long-it-takes)"),
    "check": ("every stage compared with the oracle", "[below](#correctness-on-a-gpu)"),
    "gradients": ("the torch layer compared with autograd", "[below](#correctness-on-a-gpu)"),
    "tests": ("tests of the layers on a GPU, many times in a row", "[below](#correctness-on-a-gpu)"),
    "sanitize": ("every kernel under compute-sanitizer's tools", "[below](#correctness-on-a-gpu)"),
}
_PAGE = """# Results

Every measured number of these pages comes from a file in `docs/results/`. The command that measured it wrote the file,
except for `tests_*.json`, whose notes say how they were made. `make docs` writes this page from those files.

Each file stores hashes of the code that it measured. *Code changed since* follows a commit if the text
of that code has changed, comments and docstrings aside. It does not mean that a number would change.

{files}

## Correctness on a GPU

The table has the results of `moeblaze check`, without and with `--gradients`. It has the cases of a stage in a dtype,
and how many of them were right. The last column is the largest error as a share of the bound. Index structures match
bit for bit, so they have no error.

{checks}

The tools of compute-sanitizer report this for every kernel:

{tools}

The GPU tests of the layers ran many times in a row, each time in a new process:

{tests}
"""


def page(folder: Path = DOCUMENT.with_suffix("")) -> str:
    """The page in Markdown.

    Raises
    ------
    ValueError
        If the name of a file begins with none of ``KINDS``.
    """
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    files = [_file(name, record) for name, record in found.items()]

    def of(*kinds: str) -> list[dict[str, Any]]:
        return [record for name, record in found.items() if kind_of(name) in kinds]

    of_checks = [row for record in of("check", "gradients") for row in _checks(record)]
    said = [(tool["tool"], tool["report"][-1].strip("= ")) for record in of("sanitize") for tool in record["tools"]]
    tools = dict.fromkeys(said)  # of all parts of the kernels each once
    repeated = map(_repeated, of("tests"))
    columns = ["device", "backend", "stage", "dtype", "cases", "right", "largest error / allowed"]
    return _PAGE.format(
        files=documents.table(["file", "what", "device", "commit", "shown in"], files, words=5),
        checks=documents.table(columns, of_checks, words=4),
        tools=documents.table(["tool", "said"], tools, words=2),
        tests=documents.table(
            ["device", "command", "runs", "tests in each run, at least", "runs with a failure"], repeated, words=2
        ),
    )


def kind_of(name: str) -> str:
    """The first word of a file's name, one of ``KINDS``."""
    return checks.check_name("kind of results", name.partition("_")[0], KINDS)


def _file(name: str, record: dict[str, Any]) -> list[str]:
    what, shown = KINDS[kind_of(name)]
    commit = record.get("commit", "noted with each")[:15] + source_hashes.mark_of_all(record)
    return [f"`{name}`", what, documents.device(record), commit, shown]


def _checks(record: dict[str, Any]) -> Iterator[list[str]]:
    """A line for each backend, stage and dtype of a record of `moeblaze check`."""
    groups = defaultdict(list)
    for row in record["rows"]:
        if row["available"]:
            groups[row["backend"], row["stage"], row["dtype"]].append(row)
    for group, rows in groups.items():
        shares = [row["error"] / row["bound"] for row in rows if row["bound"]]
        right, largest = sum(row["ok"] for row in rows), f"{max(shares):.2f}" if shares else ""
        yield [documents.device(record), *group, str(len(rows)), str(right), largest]


def _repeated(record: dict[str, Any]) -> list[str]:
    """A line for tests that ran many times; a skipped test does not count."""
    runs = record["runs"]
    least = min(run["tests"] - run["skipped"] for run in runs)
    failed = sum(bool(run["returncode"] or run["failures"] or run["errors"]) for run in runs)
    return [documents.device(record), f"`{record['command']}`", str(len(runs)), str(least), str(failed)]


if __name__ == "__main__":
    DOCUMENT.write_text(page())
