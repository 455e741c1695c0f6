"""Check an MoE layer: hard routings, every gradient, and ways of running a step in which layers go wrong."""

import math
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch._dynamo

from moeblaze_ref.nn.routed_experts import either
from moeblaze_ref.verify.layers import adapter as adapters
from moeblaze_ref.verify.layers import cases, diagnosis, ways
from moeblaze_ref.verify.layers import large as large_cases
from moeblaze_ref.verify.layers.adapter import Adapter, Factory, Sizes
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.deviations import Deviation, wanted
from moeblaze_ref.verify.layers.diagnosis import Evidence
from moeblaze_ref.verify.layers.faults import LayerFault, is_out_of_memory
from moeblaze_ref.verify.layers.large import Large
from moeblaze_ref.verify.layers.layer import CheckedLayer
from moeblaze_ref.verify.layers.reference import Spec
from moeblaze_ref.verify.layers.ways import Found, Way

# With which a factory is called to learn what it makes. d and h differ: a layout that exchanges them is refused.
PROBE = Sizes(8, 128, 256, 8, 2)
UNKNOWN = "class unknown"
PLAIN = "a step"  #: the way of a plain step
# Of one function in a check: its cases have other sizes, and want other gradients. Torch allows eight.
COMPILATIONS = 256


class Finding(NamedTuple):
    """Result of one way of running one case."""

    way: str  #: "a step", or one of `ways.WAYS`
    case: str
    how: str  #: what of the way it is, or nothing
    units: float  #: the largest error in units of its bound; infinite if an error was raised
    wrong: tuple[Deviation, ...]
    raised: str  #: the error that the layer raised, or what it did that no layer may; or nothing
    fault: str = ""  #: the same in a few words, such as "raises RuntimeError"
    sizes: Sizes | None = None  #: of the step that was compared; None if it is not known which step went wrong

    @property
    def ok(self) -> bool:
        """True if everything is right."""
        return not self.wrong and not self.raised

    def __str__(self) -> str:
        return f"{self._where}{self._ran}: {self.raised or '; '.join(map(str, self.wrong)) or 'right'}"

    @property
    def _where(self) -> str:
        return f"{self.way}{f' ({self.how})' if self.how else ''}, {self.case}"

    @property
    def _ran(self) -> str:
        """The step that ran, in words that explain ways and cases; empty if the step is not known."""
        if self.sizes is None:
            return ""
        L, d, h, E, k = self.sizes
        tokens = f"{L} token{'s' * (L != 1)}, {E} experts, {k} for each token, d = {d}, h = {h}"
        return f" ({'one forward and one backward of ' * (self.way == PLAIN)}{tokens})"

    @property
    def first(self) -> str:
        """The error that was raised, or the first tensor that is wrong."""
        return f"{self._where}: {self.raised or self.wrong[0]}"


class Verdict(NamedTuple):
    """The verdict on a layer in one dtype."""

    dtype: str
    findings: tuple[Finding, ...]
    bug_class: str  #: the name of a `diagnosis.BugClass`, `UNKNOWN`, or nothing if the layer is right
    deterministic: bool | None  #: the same bits in a second run; None if the layer raised an error
    claims_determinism: bool
    not_supported: tuple[str, ...] = ()  #: of `ways.WAYS`, what the layer refuses, as its adapter says or as it shows

    @property
    def ok(self) -> bool:
        """True if everything is right."""
        return all(finding.ok for finding in self.findings) and not (
            self.claims_determinism and self.deterministic is False
        )

    @property
    def graphs(self) -> bool:
        """True if a CUDA graph captured the layer's step; always False on a CPU."""
        return any(finding.way == ways.GRAPH and not finding.raised for finding in self.findings)

    @property
    def large(self) -> tuple[str, ...]:
        """The cases of more than 2**31 elements that were run."""
        return tuple(finding.case for finding in self.findings if finding.way == large_cases.WAY)

    @property
    def units(self) -> float:
        """The largest error in units of its bound."""
        return max(finding.units for finding in self.findings)

    @property
    def first(self) -> Finding | None:
        """The first finding that is wrong."""
        return next((finding for finding in self.findings if not finding.ok), None)

    @property
    def _first_of_ways(self) -> list[Finding]:
        """The first finding that is wrong of each way, in their order."""
        first: dict[str, Finding] = {}
        for finding in self.findings:
            if not finding.ok:
                first.setdefault(finding.way, finding)
        return list(first.values())

    @property
    def what(self) -> str:
        """The error in a few words: the class of the bug, or what the layer did in place of computing."""
        if self.bug_class == UNKNOWN and self.first:
            return self.first.fault or UNKNOWN
        return self.bug_class or "not deterministic"

    def __str__(self) -> str:
        if self.ok:
            return f"{self.dtype}: right; the largest error is {self.units:.2f} times its bound"
        first = self.first or "two runs of a step differ in their bits, and the layer claims that they do not"
        lines = [f"{self.dtype}: wrong ({self.what})", str(first)]
        lines += [f"also wrong: {other.first}" for other in self._first_of_ways[1:]]
        if self.bug_class in diagnosis.ADAPTER:
            lines.append(f"The adapter may be wrong instead: {diagnosis.ADAPTER[self.bug_class]}.")
        return "\n".join(lines)


def check_layer(
    factory: Factory,
    dtypes: Iterable[torch.dtype] | None = None,
    device: str = "cpu",
    seeds: int = 1,
    large: bool = False,
) -> Iterator[Verdict]:
    """Compare a layer with the specification in every hard case: the output, every gradient, every way of running it.

    Parameters
    ----------
    factory : callable
        Returns an `Adapter` for keywords d, h, E, k, dtype and device.
    dtypes : iterable of torch.dtype, optional
        Default: the dtypes of the adapter.
    device : str
    seeds : int
        How many times each case is run with other numbers. The ways of running a step have the first numbers alone.
    large : bool
        Also run steps whose tensors have more than 2**31 elements, if the device has room for them: 80 GB for most.

    Yields
    ------
    Verdict
        One for each dtype.

    Raises
    ------
    TypeError
        If the factory returns no adapter, or the layer cannot be called with what it is given.
    ValueError
        If the factory raises an error, the adapter's weights do not fit its layouts, it does not compute in a dtype, or
        large steps should run on a CPU.
    """
    return (event for event in check_in_steps(factory, dtypes, device, seeds, large) if isinstance(event, Verdict))


def check_in_steps(
    factory: Factory,
    dtypes: Iterable[torch.dtype] | None = None,
    device: str = "cpu",
    seeds: int = 1,
    large: bool = False,
) -> Iterator[str | Verdict]:
    """Yield what `check_layer` yields, and the dtype, way and case of each step before it begins."""
    if large and torch.device(device).type == "cpu":
        raise ValueError("layers of more than 2^31 elements run on a GPU alone: the device is cpu, but it must be cuda")
    adapter = adapters.make(factory, PROBE, torch.float32, device)
    adapter.check_call()
    adapter.places(PROBE)
    chosen = tuple(dtypes or adapter.dtypes)
    if refused := set(chosen) - set(adapter.dtypes):
        raise ValueError(f"the layer computes in {either(adapter.dtypes)}, not in {either(refused)}")
    for dtype in chosen:
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            verdict = yield from _Check(factory, adapter, dtype, device).verdict(seeds, large)
        yield verdict


Begun = Generator[str, None, list[Finding]]  # yields what begins, and returns what was found


class _Check(NamedTuple):
    """A check in one dtype."""

    factory: Factory
    adapter: Adapter
    dtype: torch.dtype
    device: str

    def verdict(self, seeds: int, large: bool) -> Generator[str, None, Verdict]:
        """Run everything, and name what is wrong. A layer that is wrong in a plain step runs in one other way alone."""
        patterns = cases.patterns_for(self.adapter)
        evidence: list[Evidence] = []
        steps: list[Finding] = []
        for pattern in patterns:
            for seed in range(seeds):
                steps += yield from self._run(PLAIN, ways.plain, pattern, seed, evidence)
        of_ways: list[Evidence] = []
        refused = ways.refused(self.adapter)
        if _right(steps):
            others = yield from self._ways(patterns, refused, of_ways, large)
        else:
            others = yield from self._changed(steps, patterns)
        yield self._begun("the same step twice", patterns[0].name)
        same = self._is_deterministic(patterns[0])
        bug_class = _class_of_ways(others, of_ways) if _right(steps) else _class_of(steps, evidence)
        if _right(steps) and _lacks(others, ways.EMPTY):
            refused = (*refused, ways.EMPTY)
        return Verdict(self._name, (*steps, *others), bug_class, same, self.adapter.deterministic, refused)

    @property
    def _name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def _begun(self, way: str, case: str) -> str:
        return f"{self._name}, {way}, {case}"

    def _ways(
        self, patterns: Sequence[Pattern], refused: Collection[str], evidence: list[Evidence], large: bool
    ) -> Begun:
        found: list[Finding] = []
        in_all_ways = [pattern for pattern in patterns if pattern.in_all_ways]
        for name, way in ways.WAYS.items():
            for pattern in in_all_ways[: 1 if name in ways.ONCE else None]:
                if name not in refused:
                    found += yield from self._run(name, way, pattern, 0, evidence)
        found += yield from self._sizes_alone(found, in_all_ways, evidence)
        if large:
            found += yield from self._large_steps()
        return found

    def _changed(self, steps: Sequence[Finding], patterns: Sequence[Pattern]) -> Begun:
        """A finding if a layer that is wrong in plain steps changes what it is given: that may be why it is wrong."""
        wrong = {finding.case for finding in steps if not finding.ok}
        pattern = next(pattern for pattern in patterns if pattern.name in wrong)
        found = yield from self._run(ways.UNCHANGED, ways.unchanged, pattern, 0, [])
        return [finding for finding in found if finding.fault.startswith("changes ")]

    def _sizes_alone(self, found: Sequence[Finding], patterns: Sequence[Pattern], evidence: list[Evidence]) -> Begun:
        """If other sizes are wrong, plain steps of these sizes in new layers: is it the size, or what came before?"""
        wrong = {finding.case for finding in found if finding.way == ways.SIZES and not finding.ok}
        alone: list[Finding] = []
        for pattern in patterns:
            for other in ways.resized(pattern) if pattern.name in wrong else ():
                alone += yield from self._run(PLAIN, ways.plain, other, 0, evidence)
        return alone

    def _run(self, name: str, way: Way, pattern: Pattern, seed: int, evidence: list[Evidence]) -> Begun:
        """Run a way, and compare everything that it yields; an error that the layer raises is a finding."""
        yield self._begun(name, pattern.name)
        found: list[Finding] = []
        try:
            layer = CheckedLayer.make(self.factory, pattern.sizes, self.dtype, self.device)
            for one in _compared(layer, way(layer, pattern, seed), cases.spec_of(layer.adapter, pattern.sizes.k)):
                evidence.append(one.evidence)
                found.append(_finding(name, one))
        except LayerFault as fault:
            sizes = pattern.sizes if name == PLAIN else None
            found.append(Finding(name, pattern.name, "", math.inf, (), str(fault), fault.kind, sizes))
        return found

    def _large_steps(self) -> Begun:
        """Steps of large layers; one for which the device has no room is no finding."""
        found: list[Finding] = []
        with large_cases.alone():
            for case in large_cases.cases_for(self.adapter):
                yield self._begun(large_cases.WAY, case.pattern.name)
                found += self._large_step(case)
        return found

    def _large_step(self, case: Large) -> Iterator[Finding]:
        name = case.pattern.name
        try:
            layer = CheckedLayer.make(self.factory, case.sizes, self.dtype, self.device)
            found = large_cases.run(layer, case)
            yield Finding(large_cases.WAY, name, "", found.units, found.wrong, "")
        except LayerFault as fault:
            if not is_out_of_memory(fault):
                yield Finding(large_cases.WAY, name, "", math.inf, (), str(fault), fault.kind)

    def _is_deterministic(self, pattern: Pattern) -> bool | None:
        """Return True if two runs of a step give the same bits; None if the layer raises, which is a finding."""
        try:
            layer = CheckedLayer.make(self.factory, pattern.sizes, self.dtype, self.device)
            case = cases.make(layer.adapter, pattern, self.dtype)
            first, second = layer.step(case), layer.step(case)
        except LayerFault:
            return None
        return all(torch.equal(first[name], second[name]) for name in first)


def _right(findings: Iterable[Finding]) -> bool:
    return all(finding.ok for finding in findings)


def _lacks(findings: Sequence[Finding], way: str) -> bool:
    """Return True if this way has no finding, because the layer refused it."""
    return all(finding.way != way for finding in findings)


def _class_of(steps: Iterable[Finding], evidence: Sequence[Evidence]) -> str:
    if any(finding.raised for finding in steps):
        return UNKNOWN
    return _only(diagnosis.of_steps(evidence))


def _class_of_ways(findings: Iterable[Finding], evidence: Sequence[Evidence]) -> str:
    failed = [finding for finding in findings if not finding.ok]
    raised = {finding.way for finding in failed if finding.raised}
    return _only(diagnosis.of_ways({finding.way for finding in failed}, raised, evidence)) if failed else ""


def _only(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else UNKNOWN


def evidence_of(factory: Factory, pattern: Pattern, dtype: torch.dtype) -> Evidence:
    """Run a step of one case on the CPU: what the layer computes, and what is right.

    Raises
    ------
    LayerFault
        If the factory or the layer raises an error.
    """
    layer = CheckedLayer.make(factory, pattern.sizes, dtype, "cpu")
    (compared,) = _compared(layer, ways.plain(layer, pattern, 0), cases.spec_of(layer.adapter, pattern.sizes.k))
    return compared.evidence


class _Compared(NamedTuple):
    how: str
    evidence: Evidence


def _finding(way: str, compared: _Compared) -> Finding:
    """Return what a comparison found."""
    one = compared.evidence
    return Finding(way, one.case.name, compared.how, one.units, tuple(one.wrong), "", sizes=one.case.sizes)


def _compared(layer: CheckedLayer, all_found: Iterable[Found], spec: Spec) -> Iterator[_Compared]:
    """Each result beside its reference."""
    for found in all_found:
        dtype = found.dtype or layer.dtype
        right = wanted(spec, found.case, dtype, layer.gate_dtype)
        evidence = Evidence(spec, found.case, found.results, right, dtype, found.rerun or layer.step)
        yield _Compared(found.how, evidence)
