"""Expert parallelism over NCCL, on as many GPUs as there are; on one, a group of one."""

import pytest
import torch
from ranks import run_to_the_end
from test_parallel import Case, assert_as_on_one_device, ending, killed, on_a_rank, outcome
from test_parallel_copies import CopiesCase, assert_holders_have_the_same_bits

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.nn import clear_launch_plans, launch_plan_counts
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.local import run
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.parallel.trip import Capacity
from moeblaze_ref.parallel.watch import Watch

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

GPUS = min(cuda_device_count(), 4)
EXPERTS = 9
SKEWED = tuple(min(expert * expert // 8, GPUS - 1) for expert in range(EXPERTS))  # later GPUs have more
TOKENS = (301, 0, 77, 130)[:GPUS]
WIDE = {"d": 128, "h": 192}
CASES = [
    *(Case(policy, SKEWED, TOKENS, 3, options={"policy": policy}, **WIDE) for policy in POLICIES),
    Case("bfloat16", SKEWED, TOKENS, 3, dtype=torch.bfloat16, **WIDE),  # by 7_persistent on an H200
    Case("ungated", SKEWED, TOKENS, 2, options={"activation": "relu2", "renormalize": True}, **WIDE),
    Case("one rank has all", (GPUS - 1,) * EXPERTS, TOKENS, 4, **WIDE),
    Case("no token at all", SKEWED, (0,) * GPUS, 2, **WIDE),
    CopiesCase("copies", (tuple(range(GPUS)), *((rank,) for rank in SKEWED[1:])), TOKENS, 3, **WIDE),
]
WATCHED = 10.0  # seconds


def test_all_is_as_on_one_gpu():
    found = run(on_a_rank, GPUS, CASES, "cuda", backend="nccl")
    for case in CASES:
        of_ranks = [each[case.name] for each in found]
        assert_as_on_one_device(case, of_ranks, "cuda")
        assert_holders_have_the_same_bits(of_ranks)


def without_a_wait(case):
    """The outcome of a case with room for all rows, whose second step may not wait for the device, and without."""
    rows = max(case.tokens)
    room = Capacity(rows, rows * GPUS * case.k)
    found = []
    for capacity in (None, room):
        sizes = {**case.sizes, "capacity": capacity}
        layer = ExpertParallelMoE(placement=case.placement(), layer=1, ranks=Ranks(), device="cuda", **sizes)
        layer.take(case.whole("cuda"))
        inputs = [None if each is None else each.split(case.tokens)[layer.ranks.rank] for each in case.inputs("cuda")]
        outcome(layer, *inputs)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if capacity is None else "error")
        try:
            result = outcome(layer, *inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append({name: tensor.cpu() for name, tensor in result.items()})
    return found


def test_with_a_capacity_the_host_does_not_wait_and_the_bits_are_the_same():
    for case in CASES[0], next(case for case in CASES if case.name == "copies"):
        for exact, found in run(without_a_wait, GPUS, case, backend="nccl"):
            for name, expected in exact.items():
                assert torch.equal(found[name], expected), (case.name, name)


def replayed(case):
    """The outcome of a case with room by its stages, the outcomes of its replays, and how many calls they were."""
    rows = max(case.tokens)
    room = {"capacity": Capacity(rows, rows * GPUS * case.k)}
    layer = ExpertParallelMoE(placement=case.placement(), layer=1, ranks=Ranks(), device="cuda", **case.sizes, **room)
    layer.take(case.whole("cuda"))
    inputs = [None if each is None else each.split(case.tokens)[layer.ranks.rank] for each in case.inputs("cuda")]
    clear_launch_plans()
    found = [{name: tensor.cpu() for name, tensor in outcome(layer, *inputs).items()} for _ in range(5)]
    return found, tuple(launch_plan_counts())


def test_a_replay_calls_the_exchanges_again_and_has_the_bits_of_the_stages():
    for case in CASES[0], CASES[-1], next(case for case in CASES if case.name == "bfloat16"):
        for (first, *others), counts in run(replayed, GPUS, case, backend="nccl"):
            assert counts == (6, 4), case.name  # a forward and a backward each
            for found in others:
                assert all(torch.equal(found[name], expected) for name, expected in first.items()), case.name


def step_until_killed():
    """Steps under watch, in the second of which the last rank dies between its exchanges."""
    case, ranks = CASES[0], Ranks()
    layer = ExpertParallelMoE(placement=case.placement(), layer=1, ranks=ranks, device="cuda", **case.sizes)
    inputs = case.inputs("cuda")
    with Watch(WATCHED):
        outcome(layer, *inputs)  # compiles
        if ranks.rank == GPUS - 1:
            ranks.exchange = ending(ranks.exchange, 2, killed)
        outcome(layer, *inputs)
        torch.cuda.synchronize()


def test_a_killed_rank_ends_all_by_name():
    """On one GPU the killed rank is alone, and there is nobody to say so."""
    *others, (status, _) = run_to_the_end(step_until_killed, GPUS, backend="nccl")
    assert status != 0
    for status, output in others:
        assert status != 0 and f"rank {GPUS - 1} has died" in output
