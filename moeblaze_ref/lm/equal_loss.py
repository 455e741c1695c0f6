"""Whether a layer trains as the oracle does: models that start with the same weights, on the same text, step by step.

Two layers that compute the same function in float32 still round differently, and training carries the difference on.
With the oracle's choice of experts replayed nothing else can part them. With free routing, rounding makes a token choose
another expert at some step, and from there on the two are different runs: as different as two oracles that only sum in
another order, which is what they are held against.

While nothing but rounding parts two runs, the gradient's norm must be the same too: early in training a layer whose
output is off by a ten-thousandth hardly shows in the loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref import doors, oracle
from moeblaze_ref.lm.data import Corpus
from moeblaze_ref.lm.train import Step, Trainer, TrainSettings
from moeblaze_ref.systems import MoEFactory

BOUND = 1e-5  # of the relative gap of two losses or gradient norms, while nothing but rounding parts them
ORDERS = ("d", "h", "dh")  # axes that an oracle may sum backwards
ORACLES = ("oracle", *(f"oracle, {axes} backwards" for axes in ORDERS))  # runs that differ in summation order alone

OnStep = Callable[[int, float], None]  # told the step, from 1, and the oracle's loss
Layers = str | MoEFactory  # as `model.MoETransformer` takes them


class ReorderedOracle(oracle.OracleMoE):
    """The oracle's function with sums over d, over h or over both from the last term to the first.

    Parameters
    ----------
    *sizes, **options
        As in `RoutedExperts`.
    axes : str
        One of ``ORDERS``.

    Raises
    ------
    ValueError
        As `RoutedExperts`, or if there is no such order.
    """

    def __init__(self, *sizes, axes: str = "dh", **options):
        super().__init__(*sizes, **options)
        self.axes = doors.check_name("axes", axes, ORDERS)

    def forward(self, x: Tensor, topk_experts: Tensor | None = None) -> tuple[Tensor, oracle.Routing]:
        """As the oracle's."""
        wg, w1, w2, w3 = self.weights
        if "d" in self.axes:
            x, wg, w1, w2 = x.flip(1), wg.flip(0), w1.flip(1), _flipped(w2, 1)
        if "h" in self.axes:
            w1, w2, w3 = w1.flip(2), _flipped(w2, 2), w3.flip(1)
        routing = oracle.route(x, wg, self.k, self.renormalize, topk_experts)
        return oracle.experts(x, routing, w1, w2, w3, self.activation), routing


def _flipped(weight: Tensor | None, axis: int) -> Tensor | None:
    return None if weight is None else weight.flip(axis)


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 matrices in float32: no TF32 on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gaps(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|value - reference| / reference at each step."""
    return [abs(value - other) / other for value, other in zip(values, reference, strict=True)]


# With the oracle's choices ----------------------------------------------------------------------------------------------


def replayed(
    settings: TrainSettings,
    corpus: Corpus,
    steps: int,
    device: str | torch.device = "cpu",
    moe: Layers = "moeblaze",
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train a model with the oracle's layers, and one with others that replay the oracle's choice of experts.

    Parameters
    ----------
    settings : TrainSettings
        Of both runs, in float32; ``moe`` takes the place of its layer.
    corpus : data.Corpus
    steps : int
        How far to go into the run that the settings describe.
    device : str or torch.device
    moe : str or callable
        The layers that are held against the oracle's, as `model.MoETransformer` takes them.
    on_step : callable, optional
        Called after every step with its number, from 1, and the oracle's loss.

    Returns
    -------
    dict
        ``loss`` and ``gradient_norm`` of both runs at each step, ``verdict`` of each, as `judge_steps` has it, and
        whether both ``passed``.

    Raises
    ------
    ValueError, TypeError
        If steps is no integer, below 1 or beyond the settings', or the settings are not in float32.
    NonFinite
        If a loss or a gradient is.
    """
    _check(settings, steps)
    done: dict[str, list[Step]] = {"oracle": [], "moeblaze": []}
    with exact_products():
        reference, tried = (Trainer(settings, corpus, device, layers) for layers in ("oracle", moe))
        for _ in range(steps):
            done["oracle"].append(reference.advance())
            done["moeblaze"].append(tried.advance(reference.chosen))
            _tell(on_step, done)
    seen = _series(done)
    verdict = {name: judge_steps(gaps(runs["moeblaze"], runs["oracle"])) for name, runs in seen.items()}
    return seen | {"verdict": verdict, "passed": all(one["passed"] for one in verdict.values())}


def judge_steps(found: Sequence[float]) -> dict[str, Any]:
    """Whether each of the gaps is within ``BOUND``.

    Parameters
    ----------
    found : sequence of float
        Relative gaps, one a step; none passes.

    Returns
    -------
    dict
        {worst, step, bound, passed}: the worst gap and its step, from 1 (0.0 and None of no steps).
    """
    worst, step = max(((gap, step) for step, gap in enumerate(found, start=1)), default=(0.0, None))
    return {"worst": worst, "step": step, "bound": BOUND, "passed": all(gap <= BOUND for gap in found)}


# With free routing ------------------------------------------------------------------------------------------------------


def free(
    settings: TrainSettings,
    corpus: Corpus,
    steps: int,
    device: str | torch.device = "cpu",
    moe: Layers = "moeblaze",
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train a model with the oracle's layers, one with others, and the oracle's in three other orders of summation.

    Parameters
    ----------
    settings, corpus, steps, device, moe, on_step
        As in `replayed`.

    Returns
    -------
    dict
        ``loss`` and ``gradient_norm`` of each run at each step; ``changed``, for each run but the oracle, how many
        tokens, over all layers, had other experts than in the oracle at each step; ``first_change``, for the same runs,
        {step, tokens}: the first step with such a token and how many in each layer (None if there was none); and what
        `judge_free` says.

    Raises
    ------
    ValueError, TypeError, NonFinite
        As `replayed`.
    """
    _check(settings, steps)
    layers = {"oracle": "oracle", "moeblaze": moe}
    layers |= {name: partial(ReorderedOracle, axes=axes) for name, axes in zip(ORACLES[1:], ORDERS, strict=True)}
    done: dict[str, list[Step]] = {name: [] for name in layers}
    by_layer: dict[str, list[list[int]]] = {name: [] for name in layers if name != "oracle"}
    with exact_products():
        runs = {name: Trainer(settings, corpus, device, made) for name, made in layers.items()}
        for _ in range(steps):
            for name, run in runs.items():
                done[name].append(run.advance())
            for name, found in by_layer.items():
                found.append(changed_tokens(runs[name].chosen, runs["oracle"].chosen))
            _tell(on_step, done)
    changed = {name: [sum(counts) for counts in found] for name, found in by_layer.items()}
    first = {name: _first_change(found) for name, found in by_layer.items()}
    seen = _series(done)
    return seen | {"changed": changed, "first_change": first} | judge_free(**seen, changed=changed["moeblaze"])


def changed_tokens(chosen: Sequence[Tensor], reference: Sequence[Tensor]) -> list[int]:
    """How many tokens have other experts, in each layer; the same experts in another order are the same.

    Parameters
    ----------
    chosen, reference : sequence of Tensor (L, k)
        One a layer.
    """
    differ = [
        (mine.sort(dim=1).values != other.sort(dim=1).values).any(dim=1).sum()
        for mine, other in zip(chosen, reference, strict=True)
    ]
    return torch.stack(differ).tolist()


def _first_change(by_layer: Sequence[list[int]]) -> dict[str, Any] | None:
    return next(
        ({"step": step, "tokens": counts} for step, counts in enumerate(by_layer, start=1) if any(counts)), None
    )


def judge_free(
    loss: Mapping[str, Sequence[float]], gradient_norm: Mapping[str, Sequence[float]], changed: Sequence[int]
) -> dict[str, Any]:
    """Whether a run stays as near to the oracle as rounding lets it.

    Until its first token has other experts, each of its losses and gradient norms must be within ``BOUND`` of the
    oracle's. From that step on the mean and the worst gap of its loss to the oracle's must each be at most the largest
    that two of ``ORACLES``, which differ in summation order alone, have to each other over the same steps.

    Parameters
    ----------
    loss, gradient_norm : mapping
        Of ``moeblaze`` and of each of ``ORACLES``, a number a step.
    changed : sequence of int
        Of ``moeblaze``, tokens with other experts than in the oracle at each step.

    Returns
    -------
    dict
        {verdict, after, after_oracles, passed}: ``verdict`` of loss and of gradient_norm before the first change, as
        `judge_steps` has it; {mean, worst} gap of the loss from that step on, of ``moeblaze`` and of each pair of
        oracles (None without a change).
    """
    same = next((step for step, tokens in enumerate(changed) if tokens), len(changed))
    verdict = {
        name: judge_steps(gaps(runs["moeblaze"][:same], runs["oracle"][:same]))
        for name, runs in (("loss", loss), ("gradient_norm", gradient_norm))
    }
    after = _size(loss["moeblaze"][same:], loss["oracle"][same:])
    pairs = {f"{one} | {other}": _size(loss[other][same:], loss[one][same:]) for one, other in combinations(ORACLES, 2)}
    within = after is None or all(after[size] <= max(pair[size] for pair in pairs.values()) for size in after)
    return {
        "verdict": verdict,
        "after": after,
        "after_oracles": None if after is None else pairs,
        "passed": within and all(one["passed"] for one in verdict.values()),
    }


def _size(values: Sequence[float], reference: Sequence[float]) -> dict[str, float] | None:
    """Mean and worst gap, None of no steps."""
    found = gaps(values, reference)
    return {"mean": fmean(found), "worst": max(found)} if found else None


def _check(settings: TrainSettings, steps: int):
    doors.check_int("steps", steps, at_least=1, at_most=settings.steps)
    if settings.precision != "float32":
        raise ValueError(f"precision is {settings.precision}, but losses are compared step by step in float32 alone")


def _series(done: Mapping[str, Sequence[Step]]) -> dict[str, dict[str, list[float]]]:
    """Loss and gradient norm of each run, a number a step."""
    return {
        name: {run: [getattr(step, name) for step in steps] for run, steps in done.items()}
        for name in ("loss", "gradient_norm")
    }


def _tell(on_step: OnStep | None, done: Mapping[str, Sequence[Step]]):
    if on_step is not None:
        last = done["oracle"][-1]
        on_step(last.step, last.loss)
