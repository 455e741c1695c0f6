"""The claims of MoETuner (arXiv 2502.06643): both integer programs as printed and as solved, and what it measures."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.papers.claims import (
    Mistake,
    PrintedNumber,
    Row,
    defect,
    measured,
    not_measured,
    not_reproduced,
    stated,
)
from moeblaze_ref.papers.results import Recorded, Source
from moeblaze_ref.papers.traced import MISSING, our_trace, traced_at
from moeblaze_ref.placement import bounds, ilp, simulate
from moeblaze_ref.placement.baselines import contiguous
from moeblaze_ref.placement.clusters import cluster_experts
from moeblaze_ref.placement.document import ITS_RECORDS
from moeblaze_ref.placement.document import load as load_record
from moeblaze_ref.placement.exact import best_clusters, best_gpu_assignment
from moeblaze_ref.placement.findings import less
from moeblaze_ref.placement.gpu_assignment import assign_gpus
from moeblaze_ref.placement.trace import Profile, profile, split

LOAD = np.array([9, 1, 1, 1])  # tokens of each expert of a layer in which one is hot
TRACED_GPUS = 4
STABLE = 10  # percent of a layer's load
LOADS = "modelled with Mixtral-8x7B's loads on MMLU"


def least_printed(load: np.ndarray, num_clusters: int) -> tuple[float, np.ndarray]:
    """Solve equations 1 to 7 as printed for one layer, by trying every x: nothing ties an expert to one cluster.

    Returns
    -------
    deviation : float
        The least sum over clusters of |T - mean T|.
    x : ndarray (clusters, E), int
        A solution; the first that is found.
    """
    best, found = float("inf"), np.zeros((num_clusters, len(load)), np.int64)
    for bits in product((0, 1), repeat=num_clusters * len(load)):
        x = np.reshape(bits, (num_clusters, len(load)))
        if x.sum(axis=1).min() >= 1:
            tokens = x @ load
            deviation = float(np.abs(tokens - tokens.mean()).sum())
            if deviation < best:
                best, found = deviation, x
    return best, found


def first_program(_: Recorded) -> Iterator[Row]:
    """Equations 1 to 7: clusters of equal load."""
    least, x = least_printed(LOAD, 2)
    at_least_one = bounds.printed(len(LOAD))
    meant = best_clusters(LOAD, 2, at_least_one)[0]
    solved = cluster_experts(LOAD[None].astype(np.int64), 2, at_least_one)
    times = x.sum(axis=0)
    yield stated(
        f"equations 1 to 7 on the load {LOAD.tolist()}, 2 clusters: least deviation",
        f"{least:g}",
        least == meant,
        f"{meant:g} with each expert in exactly one cluster",
        Mistake(
            "6 with each expert in exactly one cluster",
            f"as printed an expert may be in several clusters or in none: here they are in {times.tolist()} clusters",
        ),
    )
    yield stated(
        "the same by our solver, each expert in exactly one cluster",
        "",
        float(solved.objective[0]) == meant,
        f"{float(solved.objective[0]):g}; by exhaustive search {meant:g}",
    )
    formula = "T[c, l] = sum over e of P[e, l] x[c, e, l]"
    yield defect("equation 2: index t of its sum", "undefined", formula, "a misprint")
    yield defect("equation 3: what the mean is over", "undefined", "over clusters", "a misprint")


def second_program(_: Recorded) -> Iterator[Row]:
    """Equations 8 to 15: a GPU for each cluster."""
    generator = np.random.default_rng(0)
    C = generator.integers(1, 100, (3, 3, 3))
    cost = np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
    sizes = np.full((4, 3), 2)
    straight, solved = np.tile(np.arange(3), (4, 1)), assign_gpus(C, cost, sizes)
    printed, meant = (_objective(C, cost, straight, summed) for summed in (True, False))
    yield stated(
        "equation 8 for one assignment: sum over layers of the slowest pair",
        f"{printed:g}",
        printed == meant,
        f"{meant:g}",
        Mistake(
            "2097", "the sums stand inside the max, and leave it nothing to be taken over: every pair's time is added"
        ),
    )
    least, found = best_gpu_assignment(C, cost, sizes), _objective(C, cost, solved.gpus, False)
    yield stated("equations 8 to 15 by our solver", "", bool(np.isclose(found, least)), f"{found:g}; exact {least:g}")


def _objective(C: np.ndarray, cost: np.ndarray, gpus: np.ndarray, summed: bool) -> float:
    """Sum over layers of the slowest pair's time, or of all pairs' times."""
    layers = []
    for flow, here, there in zip(C, gpus, gpus[1:], strict=False):
        times = flow * cost[np.ix_(here, there)]
        layers.append(times.sum() if summed else times.max())
    return float(np.sum(layers))


# Its measurements -----------------------------------------------------------------------------------------------------

ELSEWHERE = "measured on Mixtral-8x7B inference in Megatron-LM, which is not run here"


def figure_8(_: Recorded) -> Iterator[Row]:
    """Routing statistics are stable from batch to batch of a task."""
    what = "load of the experts, two random halves of our trace: share of a layer's load that differs"
    printed = PrintedNumber(f"stable from batch to batch (we ask for at most {STABLE}%)", 0, STABLE)
    trace = our_trace()
    if trace is None:
        yield not_measured(what, printed.text, why=MISSING)
        return
    halves = split(trace, seed=0)
    first, second = (P / P.sum(axis=1, keepdims=True) for P in (profile(half).P for half in halves))
    moved = 50 * np.abs(first - second).sum(axis=1)  # (layers,) percent
    ours = f"{moved.mean():.1f}%, at most {moved.max():.1f}%"
    yield measured(what, printed, moved.tolist(), ours, "another model and text").by([traced_at(trace)])


def measured_claims(_: Recorded) -> Iterator[Row]:
    """End to end, tails, balance and memory."""
    trace = our_trace()
    on_trace = ({}, []) if trace is None else (_modelled(trace), [traced_at(trace)])
    on_loads = _with_its_loads()
    for what, printed, key, (found, sources) in (
        ("end to end, one node", "9.3%", "step_ms, one node", on_loads),
        ("end to end, two nodes", "17.5%", "step_ms, two nodes", on_loads),
        ("tail of token processing, one node, two nodes", "-36%, -27%", "slowest GPU", on_trace),
        ("the same tail, modelled for these nodes", "-36%, -27%", "token_tail_ms", on_loads),
        ("mean of token processing, one node, two nodes", "-34.8%, -22.5%", "mean of GPUs", on_trace),
        ("tail of all-to-all, one node, two nodes", "-36.3%, -30.5%", "slowest pair", on_trace),
        ("this tail, modelled for these nodes", "-36.3%, -30.5%", "transfer_tail_ms", on_loads),
        ("mean of all-to-all, one node, two nodes", "-35.4%, -24.7%", "mean of pairs", on_trace),
        ("GPU memory utilisation, one node", "+8.7%", "", on_trace),
        ("contiguous placement: most of a layer's tokens on one GPU", "up to 64%", "fullest", on_trace),
    ):
        ours = found.get(key, "")
        yield not_reproduced(what, printed, ELSEWHERE, ours).by(sources if ours else [])


def _with_its_loads() -> tuple[dict[str, str], list[Source]]:
    """MoETuner's map beside the contiguous one on its nodes, with the loads of its model: a record of the simulator."""
    if not all(path.exists() for path in ITS_RECORDS.values()):
        return {}, []
    records = [load_record(path) for path in ITS_RECORDS.values()]
    one, two = (less(found, "moetuner") for found in records)
    said = {name: f"{LOADS}: {-one[name]:+.1%}, {-two[name]:+.1%}" for name in one}
    said |= {
        "step_ms, one node": f"{LOADS}: {one['step_ms']:.1%}",
        "step_ms, two nodes": f"{LOADS}: {two['step_ms']:.1%}",
    }
    return said, [Source(found["device"], found["commit"]) for found in records]


def _modelled(trace: RoutingTrace) -> dict[str, str]:
    """MoETuner's map beside the contiguous one on our trace, by the simulator: one node of 4 GPUs."""
    of_trace, on = profile(trace), simulate.cluster("nvlink", TRACED_GPUS, 512, 1024)
    before, after = contiguous(of_trace, TRACED_GPUS).shares(), ilp.moetuner(of_trace, on).placement.shares()
    times = zip(_times(of_trace, before, on).items(), _times(of_trace, after, on).values(), strict=True)
    found = {name: _change(then, now) for (name, then), now in times}
    found["mean of GPUs"] += ", as every map distributes the same tokens"
    fullest = simulate.balance(simulate.loads(of_trace, before)).max() / TRACED_GPUS
    return found | {"fullest": f"our trace, {TRACED_GPUS} GPUs: {100 * fullest:.0f}%"}


def _times(of_trace: Profile, shares: np.ndarray, on: simulate.Cluster) -> dict[str, float]:
    """Seconds of all layers: of the slowest GPU and pair of GPUs, which are the tails, and of the mean ones."""
    step = simulate.step(of_trace, shares, on)
    of_gpus = simulate.loads(of_trace, shares) * on.token_s  # (layers, G)
    of_pairs = simulate.transitions(of_trace, shares) * simulate.slowness(on)  # (layers - 1, G, G)
    pairs = on.num_gpus * (on.num_gpus - 1)
    return {
        "slowest GPU": step.compute_s.sum(),
        "mean of GPUs": of_gpus.mean(axis=1).sum(),
        "slowest pair": step.transfer_s.sum(),
        "mean of pairs": of_pairs.sum() / pairs,
    }


def _change(before: float, after: float) -> str:
    return f"modelled on our trace, {TRACED_GPUS} GPUs of one node: {100 * (after / before - 1):+.1f}%"
