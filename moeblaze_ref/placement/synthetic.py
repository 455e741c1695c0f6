"""Traces whose skew and whose dependency between layers are known, because they were made so."""

import re
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks, traces
from moeblaze_ref.core.traces import RoutingTrace

TOKENS, SKEW = 16_384, 0.5  # of a trace that is asked for by its size: the busiest expert is no GPU of its own
MAX_LAYERS = 128  # with as many experts as there may be, a profile of neighbouring layers then has 1 GiB

FOLLOWS = 1e6  # added to a score, it outweighs every other


def synthetic_trace(
    tokens: int,
    layers: int,
    num_experts: int,
    k: int,
    skew: float = 1.0,
    dependency: float = 0.5,
    sequences: int = 16,
    seed: int = 0,
) -> RoutingTrace:
    """Zipf load and Markov transitions.

    In every layer a random order ranks the experts, and the one of rank i is chosen in proportion to 1 / (i + 1)**skew:
    0 is uniform, 1 is Zipf's law. Each of a token's choices leads, with probability ``dependency``, to the expert of
    the same rank in the next layer; what is left to choose is drawn afresh. Following ranks keeps the load as skewed as
    it was. Neighbouring tokens share one of so many ``sequences``; the seed is of the ranks and of every draw.

    There are at most ``MAX_LAYERS`` layers of ``checks.MAX_EXPERTS`` experts, and ``checks.MAX_TOP_K`` choices a token.

    Raises
    ------
    ValueError, TypeError
        If a size or a probability is out of range.
    """
    for name, size, least in (("tokens", tokens, 0), ("sequences", sequences, 1)):
        checks.check_int(name, size, least)
    for name, size, most in (("layers", layers, MAX_LAYERS), ("k", k, checks.MAX_TOP_K)):
        checks.check_int(name, size, 1, most)
    checks.check_k(k, checks.check_int("num_experts", num_experts, 1, checks.MAX_EXPERTS))
    if not 0 <= checks.check_number("dependency", dependency) <= 1:
        raise ValueError(f"dependency is {dependency}, but it must be between 0 and 1")
    rng = np.random.default_rng(seed)
    popularity = -skew * np.log(np.arange(1, num_experts + 1))  # (E,) by rank, as a logarithm
    topk = np.empty((tokens, layers, k), np.int16)  # (tokens, layers, k)
    ranks = np.empty((tokens, 0), np.int64)
    for layer in range(layers):
        score = popularity + rng.gumbel(size=(tokens, num_experts))
        followed = rng.random(ranks.shape) < dependency
        np.put_along_axis(score, ranks, np.take_along_axis(score, ranks, axis=1) + FOLLOWS * followed, axis=1)
        ranks = np.argsort(-score, axis=1, kind="stable")[:, :k]
        topk[:, layer] = rng.permutation(num_experts)[ranks]
    seq = np.arange(tokens) * sequences // max(tokens, 1)
    return RoutingTrace(topk, num_experts, seq, model=f"synthetic-{layers}x{num_experts}")


def counted_trace(counts: np.ndarray, k: int, tokens: int, seed: int = 0, model: str = "") -> RoutingTrace:
    """Tokens drawn as often as each expert was counted, where the choices themselves were not recorded.

    A token's k experts are drawn one after the other in proportion to the counts of its sequence and layer, without
    putting back. So layers depend on each other by the sequence alone, less than a model's do.

    Parameters
    ----------
    counts : array (sequences, layers, E)
        Of each expert, such as by subject; none negative, and at least k of every layer above 0.
    k : int
        Experts of a token.
    tokens : int
        Of each sequence.
    seed : int
    model : str
        Whose counts they are.

    Raises
    ------
    ValueError, TypeError
        If a size or a count is not allowed.
    """
    checks.check_shape("counts", counts, {"sequences": None, "layers": None, "E": None})
    checks.check_not_negative("counts", counts)
    sequences, layers, E = counts.shape
    for name, size in (("k", k), ("tokens", tokens)):
        checks.check_int(name, size, 1)
    short = (counts > 0).sum(axis=2) < k
    if short.any():
        sequence, layer = checks.first(short)
        raise ValueError(f"counts[{sequence}, {layer}] has fewer than k = {k} experts above 0")
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):
        popularity = np.log(counts)  # (sequences, layers, E)
    score = popularity[:, None] + rng.gumbel(size=(sequences, tokens, layers, E))
    topk = np.argsort(-score, axis=3, kind="stable")[..., :k].reshape(-1, layers, k)
    return RoutingTrace(topk.astype(np.int16), E, np.repeat(np.arange(sequences), tokens), model=model)


def trace_or_synthetic(
    path: Path | None, size: str | None, num_experts: int | None = None, model: str | None = None
) -> RoutingTrace:
    """Load a trace from a file, or make one from "LAYERSxExK", such as "58x256x8", with ``TOKENS`` tokens and ``SKEW``.

    The number of experts and the model are of a file: as in `traces.load`.

    Raises
    ------
    ValueError, TypeError, OSError
        If none or both are given, the size is not so, or as in `traces.load` and `synthetic_trace`.
    """
    if path is not None and size is None:
        return traces.load(path, num_experts, model)
    if path is not None or size is None:
        raise ValueError("name either a trace or the size of a synthetic one, LAYERSxExK")
    if num_experts is not None:
        raise ValueError(f"the synthetic trace {size} names its experts itself: leave the number of experts out")
    layers, E, k = sizes_of(size)
    return synthetic_trace(TOKENS, layers, E, k, skew=SKEW)


def sizes_of(text: str) -> tuple[int, int, int]:
    """Layers, E and k, from text such as "58x256x8".

    Raises
    ------
    ValueError
        If the text is not so.
    """
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise ValueError(f"{text!r} must be LAYERSxExK, three whole numbers, such as 58x256x8")
    layers, E, k = map(int, text.split("x"))
    return layers, E, k
