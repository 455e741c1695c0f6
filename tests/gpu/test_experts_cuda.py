"""Experts whose routing is given on a CUDA device: biases in every version, and ids that the host does not wait for."""

import numpy as np
import pytest
import test_biases
import torch

from moeblaze_ref.backends.raw_cuda import gemm, packed
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.nn import check_given_ids, experts
from moeblaze_ref.runtime.torch_capture import capture

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

SIZES = {"L": 3_000, "d": 520, "h": 264, "E": 9, "k": 4}  # several tiles, the last not full


def run(one, version, device="cuda"):
    """The results of `nn.experts`, by the names of `test_biases`."""

    def leaf(array):
        return torch.tensor(array.astype(np.float32), dtype=dtype, device=device).requires_grad_()

    dtype = getattr(torch, one.x.dtype.name)
    x, *weights = map(leaf, (one.x, *one.weights))
    ids = torch.from_numpy(one.dispatch.token_expert_indices).view(one.gates.shape).to(device)
    gates = torch.from_numpy(one.gates).to(device).requires_grad_()
    gate_up, down, *biases = weights
    out = experts(x, gate_up, down, ids, gates, one.activation, "minimal", one.layout.name, version, None, *biases)
    gradients = torch.autograd.grad(out, [x, *weights, gates], leaf(one.d_out).detach())
    d_x, *of_weights, d_gates = [tensor.float().cpu().numpy() for tensor in gradients]
    return test_biases.named(out.detach().float().cpu().numpy(), d_x, of_weights, d_gates)


CELLS = [(version, dtype) for version, dtypes in packed.VERSIONS.items() for dtype in dtypes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("version", "dtype"), CELLS)
def test_biases_agree_with_the_specification_and_twenty_runs_give_the_same_bits(version, dtype, layout):
    one = test_biases.rounded(test_biases.step(LAYOUTS[layout], **SIZES), dtype)
    first = run(one, version)
    test_biases.assert_near(first, one, "tf32 twice" if version == gemm.TF32 else dtype)
    for _ in range(20):
        test_biases.assert_same(run(one, version), first)


# Given ids: the host does not wait, a graph captures them, wrong ones are reported ------------------------------------

GIVEN = {"L": 1_000, "d": 128, "h": 256, "E": 8, "k": 3}


class Given:
    """Operands in bfloat16 whose ids and x change in place, as a CUDA graph needs them."""

    def __init__(self):
        L, d, h, E, k = GIVEN.values()
        generator = torch.Generator("cuda").manual_seed(0)

        def leaf(*shape):
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16().requires_grad_()

        self.leaves = [leaf(L, d), leaf(E, 2 * h, d), leaf(E, d, h), leaf(L, k)]
        self.d_out = torch.randn(L, d, device="cuda", generator=generator).bfloat16()
        self.ids = torch.empty(L, k, dtype=torch.int64, device="cuda")
        self.route(1)

    def route(self, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        L, E, k = GIVEN["L"], GIVEN["E"], GIVEN["k"]
        self.ids.copy_(torch.rand(L, E, device="cuda", generator=generator).argsort(1)[:, :k])

    def step(self, **options):
        x, gate_up, down, weights = self.leaves
        out = experts(x, gate_up, down, self.ids, weights, **options)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.d_out)]


@pytest.fixture
def given():
    one = Given()
    one.step()  # compiles, and makes the note
    yield one
    one.route(1)
    try:
        check_given_ids()  # what a test left
    except ValueError:
        pass


@pytest.mark.parametrize("first", [None, 0])
def test_the_host_does_not_wait(given, first):
    given.step(first=first)
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        given.step(first=first)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(given):
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        results = given.step()
    return graph, results


def test_a_captured_step_replays_on_other_ids_with_the_same_bits(given):
    graph, results = captured(given)
    for seed in (2, 3, 1):
        given.route(seed)
        graph.replay()
        replayed = [tensor.clone() for tensor in results]
        assert all(torch.equal(*pair) for pair in zip(replayed, given.step(), strict=True))
    check_given_ids()


@pytest.mark.parametrize("row", [[0, 8, 1], [0, -1, 1], [2, 0, 2], [0, 2**40, 1]], ids=str)
def test_wrong_ids_of_a_replay_are_reported_and_harm_no_other_token(given, row):
    expected = given.step()
    graph, results = captured(given)
    given.ids[4] = torch.tensor(row, device="cuda")
    graph.replay()
    with pytest.raises(ValueError) as raised:
        check_given_ids()
    assert str(raised.value).startswith("topk_index[4] of an earlier call on cuda:0 is " + str(row))
    others = torch.arange(GIVEN["L"], device="cuda") != 4
    assert not results[0][4].any() and torch.equal(results[0][others], expected[0][others])
    assert not results[1][4].any() and torch.equal(results[1][others], expected[1][others])
    given.route(1)
    assert all(torch.equal(*pair) for pair in zip(given.step(), expected, strict=True))


def test_wrong_ids_are_reported_by_a_later_call(given):
    given.ids[7] = torch.tensor([5, 5, 5], device="cuda")
    given.step()
    torch.cuda.synchronize()
    given.route(1)
    with pytest.raises(ValueError, match=r"topk_index\[7\] of an earlier call on cuda:0 is \[5, 5, 5\], but the ids"):
        given.step()
    given.step()
