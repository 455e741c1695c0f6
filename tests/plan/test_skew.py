"""How unevenly rows spread over GPUs: by hand, and by counting."""

from dataclasses import replace

import numpy as np
import pytest

from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.plan import configs, skew
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.run import Run
from moeblaze_ref.plan.shares import Parallel


def trace(topk, num_experts):
    return RoutingTrace(np.array(topk, np.int16), num_experts)


def test_the_shares_of_each_gpu_are_counted():
    # Four tokens, two layers, k = 2; GPU 0 has experts 0 and 1.
    topk = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[0, 2], [2, 3]], [[2, 3], [3, 2]]]
    found = skew.trace_imbalances(trace(topk, 4), gpus=2, tokens=2)
    assert found.tolist() == [[[2.0, 1.0], [0.0, 1.0]], [[0.5, 0.0], [1.5, 2.0]]]
    assert skew.trace_imbalances(trace(topk, 4), gpus=2, tokens=100).tolist() == [[[1.25, 0.5], [0.75, 1.5]]]
    assert skew.trace_imbalances(trace(topk, 4), gpus=1, tokens=4).tolist() == [[[1.0, 1.0]]]


@pytest.mark.parametrize("checkpoint", ["none", "layer"])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("depth", [4, 16])
def test_the_gpu_that_needs_most_is_found_on_each_stage(checkpoint, pipeline, depth):
    """Beside the peaks of every GPU in every batch."""
    parallel = Parallel(data=4, expert=4, pipeline=pipeline, micro_batches=2)
    run = Run(configs.find("olmoe-1b-7b"), Step(1, 4096), "bf16", parallel, checkpoint)
    shares = np.random.default_rng(0).exponential(size=(3, 4, depth))
    uneven = skew.Unevenness("drawn", shares)

    def peaks(batch):
        return [
            [stage.peak.bytes for stage in replace(run, imbalances=tuple(gpu)).stages] for gpu in shares[batch].tolist()
        ]

    of_batches = [np.max(peaks(batch), axis=0) for batch in range(3)]
    assert [stage.peak.bytes for stage in uneven.worst(run).stages] == np.max(of_batches, axis=0).tolist()
    assert uneven.peaks(run) == [one.max() for one in of_batches]


def test_zipfs_law_is_even_without_an_exponent_and_worse_with_a_larger_one():
    found = [skew.zipf_imbalance(64, 8, exponent) for exponent in (0, 0.5, 1, 2)]
    assert found[0] == 1 and found == sorted(found) and found[-1] < 8


def test_a_token_chooses_an_expert_once():
    """By hand: of 1, 1/4, 1/9 and 1/16 the first alone is above half of the sum, so all tokens choose it."""
    rest = np.array([1 / 4, 1 / 9, 1 / 16])
    expected = np.concatenate([[1], rest / rest.sum()])
    assert skew._chosen(1 / np.arange(1, 5) ** 2.0, 2) == pytest.approx(expected)
    for exponent in (0, 1, 3, 10):
        assert skew._chosen(1 / np.arange(1, 9) ** exponent, 3).sum() == pytest.approx(3)
        assert 1 <= skew.zipf_imbalance(8, 8, exponent, k=2) <= 4 * (1 + 1e-12)  # all tokens, of two rows each


def test_gpus_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="expert is 3, but it must divide the experts, 64"):
        skew.zipf_imbalance(64, 3, 1.0)
