"""Generates the tables of docs/what_the_papers_measured.md and docs/paper_measurements.md.

``python -m moeblaze_ref.papers.document`` writes them again, from the memory account and from docs/results. README
quotes `summary`; a test compares the two.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from moeblaze_ref.core import documents, source_hashes
from moeblaze_ref.core.config import PAPER_PRESETS, preset
from moeblaze_ref.core.units import MB
from moeblaze_ref.papers import items, moeblaze, results
from moeblaze_ref.papers.claims import Row
from moeblaze_ref.papers.item import Item
from moeblaze_ref.papers.moeblaze import ALGORITHM_1, MINIMAL, NAMES, OPTIMIZED, PUBLISHED, ratio, saving
from moeblaze_ref.papers.results import DOCS, Recorded

PAGE = DOCS / "what_the_papers_measured.md"
MEASUREMENTS = DOCS / "paper_measurements.md"
README = DOCS.parent / "README.md"
BASELINES = {
    "megablocks_published": "published MegaBlocks",
    "megablocks_published_memory_optimized": "with its flag `memory_optimized_mlp`",
    "megablocks": "our MegaBlocks",
    "sonicmoe": "SonicMoE",
    "grouped_mm": "plain PyTorch",
    "gather_sum_compiled": "torch.compile",
}
DEVICE_OF_THE_PAPERS = "H100"
# The three layers of which PAPERS' facts are quoted: configuration and activation.
QUOTED = (("conf4", "silu"), ("conf3", "swiglu"), ("conf4", "relu"))


def _mb(value: float) -> str:
    return f"{value / MB:,.0f}"


def ratios() -> str:
    """Published MegaBlocks over Algorithm 1, on all seven configurations."""
    head = ["preset", "k"]
    for activation in ("silu", "swiglu"):
        head += [f"{NAMES[activation]}: MegaBlocks, MB", "Algorithm 1, MB", "ratio"]
    lines = []
    for name in PAPER_PRESETS:
        cells = [name, f"{preset(name).config.k}"]
        for activation in ("silu", "swiglu"):
            cells += [_mb(moeblaze.kept_bytes(name, activation, label)) for label in (PUBLISHED, ALGORITHM_1)]
            cells.append(f"{ratio(name, activation, ALGORITHM_1):.2f}")
        lines.append(cells)
    return documents.table(head, lines)


def printed() -> str:
    """The four printed totals beside the account."""
    head = ["what", "printed", "account, MB", "printed / account", "printed / U"]
    lines = []
    for (activation, name, label), number in moeblaze.PRINTED_MEMORY.items():
        config, value = preset(name).config, moeblaze.centre(number)
        formula = moeblaze.kept_bytes(name, activation, label)
        unit = 2 * config.R * config.h
        what = f"{name}, {NAMES[activation]}, {label}"
        lines.append([what, number.text, _mb(formula), f"{value / formula:.2f}", f"{value / unit:.1f}"])
    return documents.table(head, lines, 2)


def savings() -> str:
    """Table of the bytes that minimal saves against both baselines, on the quoted layers and on all seven."""
    head = ["layer", "minimal, MB", *(f"against {label}" for label in (PUBLISHED, OPTIMIZED))]
    lines = [
        [
            f"{name}, {NAMES[activation]}",
            _mb(moeblaze.kept_bytes(name, activation, MINIMAL)),
            *(f"{saving(name, activation, baseline=label):.1f}% less" for label in (PUBLISHED, OPTIMIZED)),
        ]
        for name, activation in QUOTED
    ]
    for activation in ("silu", "swiglu", "relu"):
        spans = (_span(activation, label) for label in (PUBLISHED, OPTIMIZED))
        lines.append([f"all seven, {NAMES[activation]}", "", *spans])
    return documents.table(head, lines)


def _span(activation: str, baseline: str) -> str:
    found = [saving(name, activation, baseline=baseline) for name in PAPER_PRESETS]
    return f"{min(found):.1f}% to {max(found):.1f}% less"


class DispatchShare(NamedTuple):
    """The dispatch of one configuration beside its training step, in milliseconds."""

    ours: float
    printed: float  #: the paper's steps as printed
    step: float  #: with SwiGLU under policy ``minimal``, of the fastest recorded run

    @property
    def percents(self) -> tuple[float, float]:
        """Each dispatch as a percentage of the step."""
        return 100 * self.ours / self.step, 100 * self.printed / self.step


def dispatch_shares(recorded: Recorded) -> dict[str, DispatchShare]:
    """Return the share of each preset on the papers' device, in the last recorded run of the dispatch."""
    of_dispatch = _rows(recorded, "moeblaze-4.2", DEVICE_OF_THE_PAPERS)
    dispatches = {(row["preset"], row["kernel"]): row["ms"] for row in of_dispatch}
    steps = defaultdict(list)
    for row in _rows(recorded, "moeblaze-fig6", DEVICE_OF_THE_PAPERS):
        if (row["system"], row["policy"]) == ("moeblaze", MINIMAL):
            steps[row["preset"]].append(row["step_ms"])
    return {
        name: DispatchShare(dispatches[name, "3_single_pass"], dispatches[name, "as_printed"], min(steps[name]))
        for name in PAPER_PRESETS
    }


def _rows(recorded: Recorded, item: str, device: str) -> Iterator[Mapping[str, Any]]:
    return (row for name, row in recorded.rows(item) if name == device)


def dispatch(recorded: Recorded) -> str:
    """Both dispatches and the step of each configuration."""
    head = ["preset", "ours, ms", "as printed, ms", "step, ms", "share of ours", "share as printed"]
    lines = [
        [name, f"{found.ours:.3f}", f"{found.printed:.3f}", f"{found.step:.2f}", *map("{:.2f}%".format, found.percents)]
        for name, found in dispatch_shares(recorded).items()
    ]
    return documents.table(head, lines)


def speed(recorded: Recorded) -> str:
    """Return our speed-up over published MegaBlocks: the worst run of each device."""
    head = ["activation", "policy", "device", *PAPER_PRESETS]
    lines = []
    for item, activation in moeblaze.TIMED:
        for policy in ("paper", "minimal", "inputs"):
            found = moeblaze.speeds(recorded, item, activation, policy)
            lines += [[NAMES[activation], policy, *line] for line in _by_device(found)]
    return documents.table(head, lines, 3) if lines else ""


def baselines(recorded: Recorded) -> str:
    """Return our speed-up over each baseline, policy minimal, of each activation: the worst run of each device."""
    lines = []
    for item, activation in moeblaze.TIMED:
        for system, name in BASELINES.items():
            found = moeblaze.speeds(recorded, item, activation, MINIMAL, system)
            for device, *cells in _by_device(found):
                least = _least_runs(recorded, item, activation, system, device)
                lines.append([NAMES[activation], name, device, f"{least}", *cells])
    return documents.table(["activation", "baseline", "device", "runs", *PAPER_PRESETS], lines, 3) if lines else ""


def _least_runs(recorded: Recorded, item: str, activation: str, system: str, device: str) -> int:
    """Return the smallest number of runs of a system over its configurations."""
    timed = Counter(
        row["preset"]
        for row in _rows(recorded, item, device)
        if (row["system"], row["activation"]) == (system, activation) and "step_ms" in row
    )
    return min(timed[name] for name in PAPER_PRESETS)


def _by_device(ratios: Mapping[tuple[str, str], float]) -> Iterator[list[str]]:
    """Yield each device, and its ratio for each preset."""
    for device in sorted({device for device, _ in ratios}):
        cells = (ratios.get((device, name)) for name in PAPER_PRESETS)
        yield [device, *(f"{value:.2f}" if value else "" for value in cells)]


def summary() -> str:
    """README's sentences: what minimal saves, against both baselines, and what dispatch contributes."""
    silu, swiglu = ((saving(name, act), saving(name, act, baseline=OPTIMIZED)) for name, act in QUOTED[:2])
    ours, printed = zip(*(share.percents for share in dispatch_shares(Recorded()).values()), strict=True)
    return (
        f"Policy `minimal` keeps {silu[0]:.1f}% (conf4, SiLU) and {swiglu[0]:.1f}% (conf3, SwiGLU) fewer bytes than "
        f"published MegaBlocks. With the flag `memory_optimized_mlp` MegaBlocks keeps less, and `minimal` still keeps "
        f"{silu[1]:.1f}% and {swiglu[1]:.1f}% fewer bytes. On an H100 our dispatch takes {min(ours):.2f}% to "
        f"{max(ours):.2f}% of a SwiGLU training step of conf1 to conf7. The paper's steps as printed take "
        f"{min(printed):.1f}% to {max(printed):.1f}%. Dispatch by indices therefore saves memory, not time."
    )


def ranges(recorded: Recorded) -> str:
    """The least and the largest speed over published MegaBlocks of the seven configurations, policy minimal."""
    lines = []
    for item, activation in moeblaze.TIMED:
        found = moeblaze.speeds(recorded, item, activation, MINIMAL)
        for device, *cells in _by_device(found):
            values = [float(cell) for cell in cells if cell]
            printed_text = moeblaze.PRINTED_SPEED[item].text
            lines.append([NAMES[activation], printed_text, device, f"{min(values):.2f} to {max(values):.2f}"])
    return documents.table(["activation", "the paper prints", "device", "ours"], lines, 4) if lines else ""


def measured(recorded: Recorded) -> str:
    """Every item that is measured: its runs, and its claims beside what we measured."""
    return "\n\n".join(_section(item, recorded) for item in items.ITEMS.values() if item.measured_by)


def _section(item: Item, recorded: Recorded) -> str:
    rows = [_claim(row) for row in item.rows(recorded) if not row.detail]
    table = documents.table(["what", "the paper prints", "ours", "verdict"], rows, 4)
    assumed = f"Our assumption: {item.assumption}.\n\n" if item.assumption else ""
    return f"### {item.place}: {item.title}\n\n{assumed}{runs(item.id)}\n\n`moeblaze paper {item.id}`:\n\n{table}"


def _claim(row: Row) -> Sequence[str]:
    verdict = f"{row.verdict}: {row.why}" if row.why else str(row.verdict)
    return [cell.replace("|", "\\|") for cell in (row.what, row.printed, row.ours_with_runs, verdict)]


def runs(item: str) -> str:
    """A line for each finished run: its file, device and commit."""
    lines = [
        f"- `{path.name}`: {found['device']}; commit {run['commit'][:7]}{source_hashes.mark(run)}; {_versions(run)}"
        for path in results.recorded_files()
        for found in (results.load(path),)
        for run in found["items"].get(item, ())
        if run["finished"]
    ]
    return "\n".join(lines) or documents.NOTHING


def _versions(run: Mapping[str, Any]) -> str:
    """The versions that decide the numbers."""
    return ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "triton") if name in run["versions"])


BLOCKS: dict[str, Callable[[Recorded], str]] = {
    "ratios": lambda _: ratios(),
    "printed": lambda _: printed(),
    "savings": lambda _: savings(),
    "dispatch": dispatch,
    "ranges": ranges,
    "speed": speed,
    "baselines": baselines,
    "measured": measured,
}


def fill(text: str) -> str:
    """Return a page with its generated blocks written anew; raises ValueError as `documents.fill`."""
    recorded = Recorded()
    return documents.fill(text, {name: partial(block, recorded) for name, block in BLOCKS.items()})


def write():
    """Write both pages."""
    for page in (PAGE, MEASUREMENTS):
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    write()
