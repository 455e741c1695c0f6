"""Launch plans on a CUDA device: the bits, the memory and the peaks of the stages, streams, threads and graphs."""

import ctypes
import threading

import pytest
import torch
from over_simt import LAUNCH
from torch_layers import EACH_POLICY, all_equal, peak_of_step, settled, step
from torch_layers import make_layer as make_any_layer

from moeblaze_ref.core.config import POLICIES, MoEConfig
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.nn import (
    Experts,
    clear_launch_plans,
    graphed,
    launch_plan_counts,
    use_launch_plans,
    without_launch_plans,
)
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.declarations import TENSOR_MAP, Parameter
from moeblaze_ref.runtime.launch_plan.events import Launch, MapOf, Pointer
from moeblaze_ref.runtime.launch_plan.sender import Sender
from moeblaze_ref.runtime.tensor_map import BYTES, Layout
from moeblaze_ref.runtime.torch_capture import capture

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

CONFIG = MoEConfig(L=512, d=512, h=1_024, E=16, k=4)
SMALL = CONFIG.replace(L=64)
PARTS = MoEConfig(L=16_384, d=1_024, h=256, E=16, k=4)  # y and the rows of d_x exist in two parts
COPIED = MoEConfig(L=8_192, d=520, h=1_032, E=2, k=2)  # so that a copy of its odd rows pays
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def no_plans_of_others():
    clear_launch_plans()
    before = use_launch_plans()
    yield
    use_launch_plans(before)
    clear_launch_plans()


def make_layer(system="moeblaze", config=CONFIG, **options):
    sizes = {name: getattr(config, name) for name in ("d", "h", "E", "k")}
    return make_any_layer(system, device="cuda", **(sizes | {"dtype": torch.bfloat16} | options))


def make_x(config=CONFIG, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(config.L, config.d, device="cuda", generator=generator).to(dtype).requires_grad_()


def check_replays(work, at_least=2):
    """Calls of ``work`` give the bits of the stages, and those after the second are replays."""
    with without_launch_plans():
        expected = work()
    for _ in range(2):
        assert all_equal(work(), expected)
    before = launch_plan_counts().replayed
    for _ in range(3):
        assert all_equal(work(), expected)
    assert launch_plan_counts().replayed - before >= 3 * at_least


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("system", "options"), EACH_POLICY)
def test_a_replay_gives_the_bits_of_the_stages(system, options, dtype):
    options = options | ({"block": 128} if system != "moeblaze" else {})
    layer, x = make_layer(system, dtype=dtype, **options), make_x(dtype=dtype)
    check_replays(lambda: step(layer, x), at_least=2 if system == "moeblaze" else 1)


@pytest.mark.parametrize("config", [SMALL, PARTS, CONFIG.replace(d=520, h=1_032), COPIED], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_other_shapes_and_an_ungated_activation(config, activation):
    layer, x = make_layer(config=config, activation=activation, renormalize=True), make_x(config)
    check_replays(lambda: step(layer, x))


def test_inputs_and_weights_that_move():
    layer = make_layer()
    for seed in range(6):
        moved, x = make_layer(seed=seed), make_x(seed=seed)
        with without_launch_plans():
            expected = step(moved, x)
        assert all_equal(step(moved, x), expected)
    assert launch_plan_counts().replayed == 8 and layer.executor is None


def test_experts_without_a_router():
    torch.manual_seed(0)
    module = Experts(E=16, d=512, h=1_024, device="cuda", dtype=torch.bfloat16, bias=True)
    x, weights = make_x(), torch.rand(512, 4, device="cuda", requires_grad=True)
    ids = torch.rand(512, 16, device="cuda").topk(4).indices

    def work():
        out = module(x, ids, weights)
        return (out, *torch.autograd.grad(out.float().square().sum(), [x, weights, *module.parameters()]))

    check_replays(work)


def peak_with_plans(layer, x):
    """`peak_of_step`, once the plans are there."""
    for _ in range(3):
        peak = peak_of_step(layer, x)
    return peak


@pytest.mark.usefixtures("one_autograd_thread")
@pytest.mark.parametrize("config", [SMALL, CONFIG, PARTS], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_peak_of_a_step_is_not_above_that_of_the_stages(policy, config):
    layer, x = make_layer(config=config, policy=policy), make_x(config)
    with without_launch_plans():
        expected = peak_of_step(layer, x)
    assert peak_with_plans(layer, x) <= expected
    assert launch_plan_counts().replayed >= 6


@pytest.mark.usefixtures("one_autograd_thread")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_keeps_the_same_bytes(policy):
    layer, x = make_layer(policy=policy), make_x()

    def kept():
        before = settled()
        result = layer(x)
        return settled() - before, result

    with without_launch_plans():
        kept()
        expected, _ = kept()
    found = [kept()[0] for _ in range(4)]
    assert found[-1] == expected and launch_plan_counts().replayed == 2


@pytest.mark.parametrize(("part", "box"), [(slice(0, 128), (64, 64, 1)), (slice(0, 64), (64, 32, 1))], ids=str)
def test_a_map_that_a_plan_encodes_is_the_drivers_own(part, box):
    """Word for word: `encode` asks the driver by its Python binding, the plan by its C function."""
    tensor = torch.zeros(5, 64, 128, device="cuda", dtype=torch.bfloat16)
    of = tensor[:, :, part]
    layout = Layout(of.data_ptr(), "bfloat16", tuple(of.shape), tuple(step * 2 for step in of.stride()))
    from moeblaze_ref.runtime.cupy import encode

    words = []

    def launched(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra):
        words.append(ctypes.string_at(parameters[0], BYTES))
        return 0

    pretended = LAUNCH(launched)
    driver = bridge_to(torch.device("cuda", 0)).executor.driver
    driver = driver._replace(launch_kernel=ctypes.cast(pretended, ctypes.c_void_p).value)
    parameter = Parameter("x", TENSOR_MAP, pointer=False, writable=False)
    maps = (MapOf(Pointer(0, 0), layout, box),)
    Sender([Launch("f", 1, (1, 1, 1), (1, 1, 1), 0, (parameter,), maps)], {0: (0, 0)}, 1, driver).send(
        [of.data_ptr()], 0
    )
    assert words == [encode(layout, box).tobytes()]


def test_two_streams():
    layer, x = make_layer(), make_x()
    with without_launch_plans():
        expected = step(layer, x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # a step that does not wait for this stream reads x too early
                found = step(layer, (2 * x.detach() / 2).requires_grad_())
            stream.synchronize()
            assert all_equal(found, expected)
    assert launch_plan_counts().replayed == 8


def test_four_threads():
    layer, inputs = make_layer(), [make_x(seed=seed) for seed in range(4)]
    with without_launch_plans():
        expected = [step(layer, x) for x in inputs]
    found = [[] for _ in inputs]

    def work(number):
        found[number] += [step(layer, inputs[number]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert [len(each) for each in found] == [20] * 4
    assert all(all_equal(each, right) for of, right in zip(found, expected, strict=True) for each in of)


def test_memory_that_nothing_wrote_shows():
    """Torch fills new memory with NaN, that of the arenas too."""
    layer, x = make_layer(config=SMALL), make_x(SMALL)
    with without_launch_plans():
        expected = step(layer, x)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.isnan(torch.empty(7, device="cuda")).all()
        for _ in range(5):
            assert all_equal(step(layer, x), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launch_plan_counts().replayed == 6


def test_the_host_never_waits():
    layer, x = make_layer(), make_x()
    d_out = torch.randn_like(x)

    def work():
        return torch.autograd.grad(layer(x).out, [x, *layer.parameters()], d_out)

    expected = [work() for _ in range(3)][-1]
    settled()
    slept = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    slept.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = work()
        awake = slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake
    assert all_equal(found, expected) and launch_plan_counts().replayed == 4


def test_a_capture_after_replays_and_a_graphed_layer():
    layer, x = make_layer(config=SMALL), make_x(SMALL)
    d_out = torch.randn_like(x)

    def work():
        out = layer(x).out
        found = torch.autograd.grad(out, [x, *layer.parameters()], d_out)
        return (out.detach(), *found)  # no graph of another stream lives when a capture begins

    expected = [work() for _ in range(4)][-1]
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)
    with capture(graph):
        captured = work()
    graph.replay()
    assert all_equal(captured, expected)
    assert all_equal(work(), expected)
    replayed = graphed(make_layer(config=SMALL), x)
    out = replayed(x).out
    assert all_equal((out.clone(), *torch.autograd.grad(out, [x, *replayed.parameters()], d_out)), expected)
