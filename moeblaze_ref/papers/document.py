"""Fills what docs/what_the_papers_measured.md and README.md say of the papers, from the account and from the results.

``python -m moeblaze_ref.papers.document`` writes the generated blocks again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from moeblaze_ref import documents
from moeblaze_ref.bench import results as bench_results
from moeblaze_ref.config import PAPER_PRESETS, preset
from moeblaze_ref.papers import moeblaze
from moeblaze_ref.papers.moeblaze import ALGORITHM_1, MINIMAL, NAMES, OPTIMIZED, PUBLISHED, ratio, saving
from moeblaze_ref.papers.results import DOCS, Recorded
from moeblaze_ref.units import MB

PAGE = DOCS / "what_the_papers_measured.md"
README = DOCS.parent / "README.md"
BASELINES = {
    "megablocks_published": "published MegaBlocks",
    "megablocks_published_memory_optimized": "with its flag `memory_optimized_mlp`",
    "megablocks": "our MegaBlocks",
    "sonicmoe": "SonicMoE",
    "grouped_mm": "plain PyTorch",
    "gather_sum_compiled": "torch.compile",
}
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
    """What minimal saves against both baselines, on the quoted layers and on all seven."""
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


def dispatch_shares() -> dict[str, tuple[float, float]]:
    """Return each timed preset's dispatch and sum of all stages, milliseconds, from the benchmark's stages."""
    stages: dict[str, dict[str, float]] = defaultdict(dict)
    for row in bench_results.rows_of(bench_results.load(bench_results.RECORDED), "stage"):
        if row["system"] == "moeblaze":
            stages[row["preset"]][row["stage"]] = row["step_ms"]
    return {name: (times["dispatch"], sum(times.values())) for name, times in stages.items()}


def dispatch() -> str:
    """The share of dispatch in a step, of each preset whose stages were timed."""
    found = bench_results.load(bench_results.RECORDED)
    place = "\n".join(documents.place(found)[::2])
    head = ["preset", "dispatch, ms", "all stages, ms", "share"]
    lines = [
        [name, f"{ms:.3f}", f"{step:.2f}", f"{100 * ms / step:.2f}%"] for name, (ms, step) in dispatch_shares().items()
    ]
    return f"{place}\n\n{documents.table(head, lines)}"


def speed(recorded: Recorded) -> str:
    """How many times as fast as published MegaBlocks ours is: the worst run of each device."""
    head = ["activation", "policy", "device", *PAPER_PRESETS]
    lines = []
    for item, activation in moeblaze.TIMED:
        for policy in ("paper", "minimal", "inputs"):
            found = moeblaze.speeds(recorded, item, activation, policy)
            lines += [[NAMES[activation], policy, *line] for line in _by_device(found)]
    return documents.table(head, lines, 3) if lines else ""


def baselines(recorded: Recorded) -> str:
    """How many times as fast as each baseline ours is with SwiGLU and policy minimal: the worst run of each device."""
    lines = []
    for system, name in BASELINES.items():
        found = moeblaze.speeds(recorded, "moeblaze-fig6", "swiglu", MINIMAL, system)
        lines += [[name, *line] for line in _by_device(found)]
    return documents.table(["baseline", "device", *PAPER_PRESETS], lines, 2) if lines else ""


def _by_device(ratios: Mapping[tuple[str, str], float]) -> Iterator[list[str]]:
    """Yield each device, and its ratio for each preset."""
    for device in sorted({device for device, _ in ratios}):
        cells = (ratios.get((device, name)) for name in PAPER_PRESETS)
        yield [device, *(f"{value:.2f}" if value else "" for value in cells)]


def summary() -> str:
    """README's two sentences: what minimal saves, against both baselines, and what dispatch contributes."""
    silu, swiglu = ((saving(name, act), saving(name, act, baseline=OPTIMIZED)) for name, act in QUOTED[:2])
    shares = [100 * ms / step for ms, step in dispatch_shares().values()]
    return (
        f"Policy `minimal` saves {silu[0]:.1f}% (conf4, SiLU) and {swiglu[0]:.1f}% (conf3, SwiGLU) of what published "
        f"MegaBlocks keeps, and {silu[1]:.1f}% and {swiglu[1]:.1f}% of what it keeps with its flag "
        f"`memory_optimized_mlp`.\n"
        f"Dispatch takes {min(shares):.2f}% to {max(shares):.2f}% of a training step of ours on an H200, so the gain "
        f"of dispatch by indices is memory, not time."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "ratios": ratios,
    "printed": printed,
    "savings": savings,
    "dispatch": dispatch,
    "speed": lambda: speed(Recorded()),
    "baselines": lambda: baselines(Recorded()),
}


def fill(text: str) -> str:
    """Return the page with its generated blocks written anew; raises ValueError as `documents.fill`."""
    return documents.fill(text, BLOCKS)


def write():
    """Write the page."""
    PAGE.write_text(fill(PAGE.read_text()))


if __name__ == "__main__":
    write()
