"""Compare training with a layer and with the oracle, step by step, from the same weights on the same text.

Two layers that compute the same function in float32 still round differently, and training carries the difference on.
With the oracle's choice of experts replayed nothing else can part them. With free routing, rounding makes a token
choose another expert at some step, and from there on the two are different runs. Their gap is compared with that of
oracles that only sum in another order.

The loss alone is blunt: early in training a layer whose output is a ten-thousandth too large hardly moves it. So the
gradients of each weight must be the same too, in the first step and, with the choices replayed, from the oracle's
weights at every tenth.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.lm.data import Corpus
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.nn import oracle
from moeblaze_ref.nn.systems import MoEFactory

EVERY = 10  # steps from one comparison at the same weights to the next
BOUND = 1e-5  # of what is relative to the oracle's, while nothing but rounding parts two runs
ORDERS = ("d", "h", "dh")  # axes that an oracle may sum backwards
ORACLES = ("oracle", *(f"oracle, {axes} backwards" for axes in ORDERS))  # runs that differ in summation order alone
OTHERS = ("moeblaze", *ORACLES[1:])  # runs that are compared with the oracle's

OnStep = Callable[[int, float], None]  # told the step, from 1, and the oracle's loss
Layers = str | MoEFactory  # as `model.MoETransformer` takes them


class ReorderedOracle(oracle.OracleMoE):
    """The oracle's function with sums over d, over h or over both from the last term to the first.

    ``axes`` is one of ``ORDERS``; sizes and other options are those of `RoutedExperts`.

    Raises
    ------
    ValueError
        As `RoutedExperts`, or if there is no such order.
    """

    def __init__(self, *sizes, axes: str = "dh", **options):
        super().__init__(*sizes, **options)
        self.axes = checks.check_name("axes", axes, ORDERS)

    def forward(self, x: Tensor, topk_experts: Tensor | None = None) -> tuple[Tensor, oracle.Routing]:
        """Run the oracle's layer with its sums in reversed order."""
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


def gaps(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|loss - reference| / reference at each step."""
    return [abs(loss - other) / other for loss, other in zip(losses, reference, strict=True)]


def compare_losses(found: Sequence[float]) -> dict[str, Any]:
    """Check that every one of `gaps` is within ``BOUND``; no step passes.

    Returns
    -------
    dict
        {worst, at, bound, passed}: the worst gap, and its step, from 1 (0.0 and None of no steps).
    """
    worst, at = max(((gap, step) for step, gap in enumerate(found, start=1)), default=(0.0, None))
    return {"worst": worst, "at": at, "bound": BOUND, "passed": all(gap <= BOUND for gap in found)}


def compare_gradients(model: nn.Module, reference: nn.Module) -> dict[str, Any]:
    """Check that each weight has the same gradient in two models.

    Returns
    -------
    dict
        {worst, at, bound, passed}: the largest ||d_w - reference|| / ||reference||, and the weight's name.
    """
    worst, at = worst_gap(_gradients(model), _gradients(reference))
    return {"worst": worst, "at": at, "bound": BOUND, "passed": worst <= BOUND}


def _gradients(model: nn.Module) -> dict[str, Any]:
    """Return each weight's gradient by the weight's name; None before a backward."""
    return {name: one.grad for name, one in model.named_parameters()}


def worst_gap(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest ||d_w - reference|| / ||reference|| of any weight, and the weight's name; NaN is the largest."""
    found = {name: ((gradients[name] - other).norm() / other.norm()).item() for name, other in reference.items()}
    at = max(found, key=lambda name: (math.isnan(found[name]), found[name]))
    return found[at], at


def compare_same_weights(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Check that a layer computes the oracle's loss and gradients from the oracle's weights, throughout the run.

    Each row, {step, loss, gradients, at} as `replayed` has it, begins with the same weights, so no rounding of earlier
    steps adds up, and the bound asks the same of every step, however fast a run amplifies rounding.

    Returns
    -------
    dict
        {worst, at, bound, passed} of ``same_weights_loss`` and of ``same_weights_gradients``; empty without rows.
    """
    if not found:
        return {}
    return {f"same_weights_{of}": _compare_rows(found, of) for of in ("loss", "gradients")}


def _compare_rows(found: Sequence[Mapping[str, Any]], of: str) -> dict[str, Any]:
    row = max(found, key=lambda row: (math.isnan(row[of]), row[of]))
    at = row["step"] if of == "loss" else f"step {row['step']}, {row['at']}"
    return {"worst": row[of], "at": at, "bound": BOUND, "passed": row[of] <= BOUND}


def _from_same_weights(reference: Trainer, others: Mapping[str, Trainer]) -> dict[str, dict[str, Any]]:
    """Return the gap of each run's next step to the oracle's, computed at the oracle's weights; no run advances."""
    weights = dict(reference.model.named_parameters())
    expected = reference.look_ahead(weights)
    found = {}
    for name, run in others.items():
        ahead = run.look_ahead(weights, expected.chosen)
        worst, at = worst_gap(ahead.gradients, expected.gradients)
        found[name] = {"loss": gaps([ahead.loss], [expected.loss])[0], "gradients": worst, "at": at}
    return found


# With the oracle's choices --------------------------------------------------------------------------------------------


def replayed(
    settings: TrainSettings,
    corpus: Corpus,
    steps: int,
    device: str | torch.device = "cpu",
    moe: Layers = "moeblaze",
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train a model with the oracle's layers, and others that replay its choice of experts at every step.

    The others are one with the layers in question, and the oracle in three other orders of summation, which shows how
    far rounding alone leads. Before every step of a number that `EVERY` divides, each of them also computes the loss
    and the gradients of that step from the oracle's weights, and then goes on from its own.

    The settings are of all runs, in float32; their layer is not looked at. ``steps`` is how far to go into the run that
    they describe, ``moe`` the layers that are compared with the oracle's, as `model.MoETransformer` takes them.
    ``on_step`` is called after every step with its number, from 1, and the oracle's loss.

    Returns
    -------
    dict
        ``loss`` of each run at each step; ``same_weights`` of each run but the oracle, a row {step, loss, gradients,
        at} for every `EVERY` steps: the relative gap of the loss, the largest of any weight's gradient, and the
        weight's name; ``verdict`` on the losses of ``moeblaze``, `compare_losses`, on its gradients of the first step,
        `compare_gradients`, and on its rows, `compare_same_weights`; whether all ``passed``; and ``oracles``, the worst
        gap of each of the reordered oracles.

    Raises
    ------
    ValueError, TypeError
        If steps is no integer, below 1 or beyond the settings', or the settings are not in float32.
    NonFinite
        If a loss or a gradient is.
    """
    same_weights: dict[str, list[dict[str, Any]]] = {name: [] for name in OTHERS}

    def advance(step: int, reference: Trainer, others: Mapping[str, Trainer]):
        for name, found in (_from_same_weights(reference, others) if step % EVERY == 0 else {}).items():
            same_weights[name].append({"step": step, **found})
        reference.advance()
        for run in others.values():
            run.advance(reference.chosen)

    losses, gradients = _side_by_side(settings, corpus, steps, device, moe, on_step, advance)
    verdict = {"loss": compare_losses(gaps(losses["moeblaze"], losses["oracle"])), "first_gradients": gradients}
    verdict |= compare_same_weights(same_weights["moeblaze"])
    worst = {name: max(gaps(losses[name], losses["oracle"])) for name in ORACLES[1:]}
    passed = all(one["passed"] for one in verdict.values())
    return {"loss": losses, "same_weights": same_weights, "verdict": verdict, "oracles": worst, "passed": passed}


# With free routing ----------------------------------------------------------------------------------------------------


def free(
    settings: TrainSettings,
    corpus: Corpus,
    steps: int,
    device: str | torch.device = "cpu",
    moe: Layers = "moeblaze",
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train the same models as `replayed`, each with its own routers' choice; parameters and errors are the same.

    Returns
    -------
    dict
        ``loss`` of each run at each step; ``changed``, for each run but the oracle, how many tokens, over all layers,
        had other experts than in the oracle at each step; ``first_change``, for the same runs, {step, tokens}: the
        first step with such a token and how many in each layer (None if there was none); and what `compare_free` says.
    """
    by_layer: dict[str, list[list[int]]] = {name: [] for name in OTHERS}

    def advance(step: int, reference: Trainer, others: Mapping[str, Trainer]):
        reference.advance()
        for name, run in others.items():
            run.advance()
            by_layer[name].append(changed_tokens(run.chosen, reference.chosen))

    losses, gradients = _side_by_side(settings, corpus, steps, device, moe, on_step, advance)
    changed = {name: [sum(counts) for counts in found] for name, found in by_layer.items()}
    first = {name: _first_change(found) for name, found in by_layer.items()}
    compared = compare_free(losses, changed["moeblaze"], gradients)
    return {"loss": losses, "changed": changed, "first_change": first, **compared}


def changed_tokens(chosen: Sequence[Tensor], reference: Sequence[Tensor]) -> list[int]:
    """Count the tokens with other experts, in each layer; the order of a token's experts does not count.

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


def compare_free(
    losses: Mapping[str, Sequence[float]], changed: Sequence[int], gradients: Mapping[str, Any]
) -> dict[str, Any]:
    """Check that a run with free routing stays as near to the oracle as rounding allows.

    Until its first token has other experts, each of its losses must be within ``BOUND`` of the oracle's, and so must
    the first step's gradients, as `compare_gradients` says. From that step on it must be a run like ``ORACLES``, which
    differ in summation order alone: nearer to one of them than two of them are to each other. That is, to at least one
    of them, both its mean gap over these steps and its worst one are at most the largest of any two of them. Which one
    does not matter: each of them might have been the first.

    ``losses`` has a number a step of ``moeblaze`` and of each of ``ORACLES``, ``changed`` the tokens of ``moeblaze``
    with other experts than in the oracle.

    Returns
    -------
    dict
        {verdict, after, after_oracles, passed}. ``verdict`` is that on what comes before the first change, as
        `replayed` has it. ``after`` is {mean, worst} of the loss's gap to each oracle from that step on, and
        ``after_oracles`` the same for each pair of oracles (both None without a change).
    """
    same = next((step for step, tokens in enumerate(changed) if tokens), len(changed))
    verdict = {"loss": compare_losses(gaps(losses["moeblaze"][:same], losses["oracle"][:same]))}
    if same:
        verdict["first_gradients"] = dict(gradients)
    later = {name: run[same:] for name, run in losses.items()}
    after = {name: _size(later["moeblaze"], later[name]) for name in ORACLES} if later["oracle"] else None
    pairs = {f"{a} | {b}": _size(later[b], later[a]) for a, b in combinations(ORACLES, 2)} if after else None
    return {
        "verdict": verdict,
        "after": after,
        "after_oracles": pairs,
        "passed": all(one["passed"] for one in verdict.values())
        and (after is None or pairs is None or is_among(after, pairs)),
    }


def is_among(after: Mapping[str, Mapping[str, float]], pairs: Mapping[str, Mapping[str, float]]) -> bool:
    """Return True if one of the gaps, {mean, worst} each, is at most the pairs' largest in both."""
    largest = {size: max(pair[size] for pair in pairs.values()) for size in ("mean", "worst")}
    return any(all(gap[size] <= largest[size] for size in largest) for gap in after.values())


def _size(losses: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    found = gaps(losses, reference)
    return {"mean": fmean(found), "worst": max(found)}


def _side_by_side(
    settings, corpus, steps, device, moe, on_step, advance
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the losses of each run, and the verdict on the first gradients of ``moe``, which has the name of ours.

    ``advance`` takes all runs a step further: it gets the step, from 1, the oracle's run, and ``OTHERS`` by name.
    """
    checks.check_int("steps", steps, at_least=1, at_most=settings.steps)
    if settings.precision != "float32":
        raise ValueError(f"precision is {settings.precision}, but losses are compared step by step in float32 alone")
    layers = dict(zip(OTHERS, (moe, *(partial(ReorderedOracle, axes=axes) for axes in ORDERS)), strict=True))
    with exact_products():
        reference = Trainer(settings, corpus, device, "oracle")
        others = {name: Trainer(settings, corpus, device, made) for name, made in layers.items()}
        for step in range(1, steps + 1):
            advance(step, reference, others)
            if step == 1:
                gradients = compare_gradients(others["moeblaze"].model, reference.model)
            if on_step is not None:
                on_step(step, reference.losses[-1])
    return {"oracle": reference.losses} | {name: run.losses for name, run in others.items()}, gradients
