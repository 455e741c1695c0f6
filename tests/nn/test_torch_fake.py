"""The layers on tensors without memory allocate, keep and free what they do where kernels run."""

import pytest
import torch
from over_tensors import BridgeOverTensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_layers import EACH_POLICY, SIZES, make_layer
from without_memory import (
    STEPS,
    kept,
    kept_without_memory,
    lifetimes,
    lifetimes_without_memory,
    make,
    make_fake,
    of_everything,
    of_the_output,
)

from moeblaze_ref.backends.raw_cuda import layer as raw_cuda_layer
from moeblaze_ref.core.config import ACTIVATIONS, MoEConfig, preset
from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import account, megablocks_step_account, step_account
from moeblaze_ref.nn import torch_node
from moeblaze_ref.runtime import torch_fake
from moeblaze_ref.runtime.simt.executor import SimtExecutor, SimtModule
from moeblaze_ref.runtime.torch_fake import FakeBridge, FakeExecutor, FakeModule
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import MoEWeights

of_each_policy = pytest.mark.parametrize(("system", "options"), EACH_POLICY, ids=str)
of_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
of_each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
STEP_ACCOUNTS = {
    "moeblaze": lambda config, version, policy: step_account(config, policy, version),
    "megablocks": lambda config, version: megablocks_step_account(config),
}


# What is kept


@pytest.mark.parametrize("renormalize", [False, True])
@of_each_activation
@of_each_policy
def test_the_same_storages_are_kept(system, options, activation, renormalize):
    options = options | {"activation": activation, "renormalize": renormalize}
    found = kept_without_memory(system, **options)
    assert found == kept(system, **options) and found


@of_each_dtype
@of_each_policy
def test_they_are_kept_in_each_dtype(system, options, dtype):
    assert kept_without_memory(system, dtype=dtype, **options) == kept(system, dtype=dtype, **options)


@of_each_policy
def test_of_no_tokens_as_little_is_kept(system, options):
    x = torch.empty(0, SIZES["d"], requires_grad=True)
    expected = measure.kept_storages(make_layer(system, **options), x)
    with FakeTensorMode():
        x = torch.empty(0, SIZES["d"], requires_grad=True)
        assert measure.kept_storages(make_layer(system, **options), x) == expected


def saved_names(system, monkeypatch, **options):
    """Names of what a system hands to autograd, besides x and the weights."""
    names = []
    by_name = FakeBridge.by_name
    with monkeypatch.context() as patch:
        patch.setattr(FakeBridge, "by_name", lambda bridge, arrays: names.extend(arrays) or by_name(bridge, arrays))
        kept_without_memory(system, **options)
    return names


@of_each_policy
def test_one_tensor_less_is_seen(system, options, monkeypatch):
    """But one that the system itself looks for by name; without it the forward raises."""
    expected, by_name = kept(system, **options), FakeBridge.by_name
    looked_for = {"x", "token_expert_indices"}
    if system == "megablocks_memory_optimized":
        looked_for |= {"rows", "padded_offsets", "slots", "y_swi"}
    lost = [name for name in saved_names(system, monkeypatch, **options) if name not in looked_for]
    assert len(lost) > 3
    for name in lost:
        with monkeypatch.context() as patch:
            patch.setattr(
                FakeBridge,
                "by_name",
                lambda bridge, arrays, name=name: by_name(bridge, {n: a for n, a in arrays.items() if n != name}),
            )
            assert kept_without_memory(system, **options) != expected, name


# What lives when


@pytest.fixture
def over_tensors(monkeypatch):
    """Torch allocates what the layer asks for, as on a GPU; a CPU's own bridge has numpy do it, which torch does not
    see.
    """
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: BridgeOverTensors())


@pytest.mark.usefixtures("over_tensors")
@pytest.mark.parametrize("step", STEPS)
@of_each_policy
def test_each_tensor_lives_as_long(system, options, step):
    found = lifetimes_without_memory(step, system, **options)
    assert found == lifetimes(step, *make(system, **options)) and len(found) > 10


@pytest.mark.usefixtures("over_tensors")
@pytest.mark.parametrize("renormalize", [False, True])
@of_each_activation
@of_each_policy
def test_it_lives_as_long_with_each_option(system, options, activation, renormalize):
    options = options | {"activation": activation, "renormalize": renormalize}
    found = lifetimes_without_memory(of_everything, system, **options)
    assert found == lifetimes(of_everything, *make(system, **options))


@pytest.mark.usefixtures("over_tensors")
@of_each_dtype
@of_each_policy
def test_it_lives_as_long_in_each_dtype(system, options, dtype):
    found = lifetimes_without_memory(of_everything, system, dtype=dtype, **options)
    assert found == lifetimes(of_everything, *make(system, dtype=dtype, **options))


@pytest.mark.usefixtures("over_tensors")
@of_each_policy
def test_a_temporary_that_is_smaller_or_that_lives_longer_is_seen(system, options, monkeypatch):
    expected = lifetimes(of_the_output, *make(system, **options))
    empty, longer = FakeExecutor.empty, []

    def smaller(executor, shape, dtype):
        of_tiles = len(shape) == 2 and shape[0] == SIZES["E"]
        return empty(executor, (1,) if of_tiles else shape, dtype)

    def held(executor, shape, dtype):
        longer.append(empty(executor, shape, dtype))
        return longer[-1]

    for fault in (smaller, held):
        monkeypatch.setattr(FakeExecutor, "empty", fault)
        monkeypatch.setattr(FakeModule, "launch", lambda *_, **__: None)  # it would refuse the smaller one
        assert lifetimes_without_memory(of_the_output, system, **options) != expected


def watched(monkeypatch, executor, module):
    """What such an executor is asked for from now on: arrays with shape and dtype, launches with grid and block."""
    asked = []

    def witness(owner, name, noted):
        function = getattr(owner, name)

        def call(self, *arguments):
            asked.append(noted(arguments))
            return function(self, *arguments)

        monkeypatch.setattr(owner, name, call)

    for name in ("empty", "full"):
        witness(executor, name, lambda arguments: (tuple(map(int, arguments[0])), *arguments[1:]))
    witness(module, "_run", lambda arguments: arguments[:4])
    return asked


@of_each_dtype
@of_each_policy
def test_the_executor_of_the_cpu_is_asked_for_the_same(system, options, dtype, monkeypatch):
    """Also where arrays are numpy's: the same arrays and launches in the same order, forward and backward."""
    expected = watched(monkeypatch, SimtExecutor, SimtModule)
    of_everything(*make(system, dtype=dtype, **options))
    with FakeTensorMode():
        operands = make_fake(system, dtype=dtype, **options)
        found = watched(monkeypatch, FakeExecutor, FakeModule)
        of_everything(*operands)
    assert found == expected and len(found) > 40


# At full size, where this machine has no memory for it


def at_full_size(name, system):
    """The configuration of a preset in bfloat16, and options for a layer of it."""
    config = preset(name).config.replace(dtype="bfloat16")
    sizes = {size: getattr(config, size) for size in SIZES} | {"activation": config.activation, "tokens": config.L}
    return config, sizes | {"dtype": torch.bfloat16} | ({} if system == "moeblaze" else {"block": 128})


@pytest.mark.parametrize("name", ["conf3", "mixtral", "qwen3"])
@of_each_policy
def test_at_full_size_a_layer_keeps_what_the_accounting_says(system, options, name):
    config, sizes = at_full_size(name, system)
    one = account(config, system, options.get("policy"))
    found = kept_without_memory(system, **sizes, **options)
    assert sorted(storage.bytes for storage in found) == sorted(tensor.bytes for tensor in one.tensors if tensor.kept)


@pytest.mark.parametrize("name", ["conf3", "mixtral", "qwen3"])
@pytest.mark.parametrize("version", ["3_mma", "7_persistent"])
@pytest.mark.parametrize(("system", "options"), [one for one in EACH_POLICY if one[0] in STEP_ACCOUNTS], ids=str)
def test_at_full_size_the_peak_of_a_step_is_the_accountings(system, options, version, name):
    """But for the 4 bytes of each sum: of the output, and of the two losses, which no one uses."""
    config, sizes = at_full_size(name, system)
    found = max(lifetimes_without_memory(of_the_output, system, version=version, **sizes, **options))
    beside_x = STEP_ACCOUNTS[system](config, version, **options).peak_bytes - 2 * config.L * config.d
    assert beside_x <= found <= beside_x + 12


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("policy", ["conventional", "paper", "minimal", "inputs"])
@pytest.mark.parametrize(
    "shape",
    [
        (100_003, 1_032, 1_544, 24, 3),  # everything is copied, and y exists in three parts
        (32_768, 2_056, 776, 64, 8),  # the rows of d_x exist in parts, too
        (32_768, 1_544, 4_096, 16, 4),  # w1 and w2 have no gaps, and w3 is too large to be copied
        (16_384, 1_024, 4_104, 16, 4),  # tokens have no gaps
        (16_384, 4_104, 1_032, 32, 4),  # weights are too large
        (300, 1_032, 1_544, 4, 2),  # there are too few tokens
        (32_768, 1_028, 1_548, 4, 2),  # 7_persistent does not run
    ],
)
def test_of_odd_widths_the_accounting_has_gaps_and_copies(shape, policy, activation):
    L, d, h, E, k = shape
    config = MoEConfig(L=L, d=d, h=h, E=E, k=k, dtype="bfloat16", activation=activation)
    sizes = {"tokens": L, "d": d, "h": h, "E": E, "k": k, "dtype": torch.bfloat16, "activation": activation}
    version = "7_persistent" if d % 8 == 0 else "2_tiled"
    found = max(lifetimes_without_memory(of_the_output, "moeblaze", version=version, policy=policy, **sizes))
    beside_x = step_account(config, policy, version).peak_bytes - 2 * L * d
    assert beside_x <= found <= beside_x + 12


# The layer's company


def test_a_backward_outside_the_mode_has_no_memory_either():
    with FakeTensorMode():
        layer, x, _ = make_fake("moeblaze")
        out = layer(x).out
    out.sum().backward()
    for leaf in (x, *layer.parameters()):
        assert hasattr(leaf.grad, "fake_mode") and leaf.grad.shape == leaf.shape


def test_the_versions_for_a_hopper_gpu_run_too():
    """On a CPU by name, where a GPU has them by default: y and the rows of d_x exist in two halves."""
    sizes = {"tokens": 16_384, "d": 1024, "h": 256, "E": 8, "k": 4, "dtype": torch.bfloat16}
    of_version = {
        version: max(lifetimes_without_memory(of_the_output, "moeblaze", version=version, **sizes))
        for version in ("7_persistent", "3_mma")
    }
    assert of_version["7_persistent"] < of_version["3_mma"] - 2 * sizes["tokens"] * sizes["d"]


def test_without_a_gpu_tensors_of_one_stand_for_an_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch_fake, "_executor_for", FakeExecutor)
    executor = FakeExecutor(torch.device("cuda"))
    assert (executor.name, executor.capability, executor.multiprocessors) == ("cuda", (9, 0), 132)
    with FakeTensorMode(), torch.no_grad():
        layer, x, _ = make_fake("moeblaze", device="cuda", dtype=torch.bfloat16)
        assert layer(x).out.device.type == layer.executor == "cuda"


@pytest.mark.parametrize("policy", ["paper", "minimal", "inputs"])
def test_odd_widths_without_a_gpu_have_the_gaps_of_an_h100(policy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    L, d, h, E, k = 100_003, 1_032, 1_544, 24, 3  # so many tokens that they and the weights are copied
    executor, copied = FakeExecutor(torch.device("cuda")), []
    monkeypatch.setattr(FakeExecutor, "assign", lambda _, target, source: copied.append((target.stride(), source)))

    def empty(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16)

    with FakeTensorMode(), torch.no_grad():
        x, weights = empty(L, d), MoEWeights(empty(d, E), empty(E, d, h), empty(E, d, h), empty(E, h, d))
        stages = raw_cuda_layer.stages_for(x, weights, executor)
        out, _, _, saved = layer.forward(stages, x, weights, k, "swiglu", policy)
        assert all(tensor.stride() == (1_552, 1) for tensor in saved.intermediates.values())
        gradients = layer.backward(stages, empty(L, d), saved, weights)
    for gradient, leaf in zip(gradients, (x, *weights), strict=False):
        assert gradient.shape == leaf.shape and gradient.is_contiguous()
    assert out.shape == x.shape and {strides[-2] for strides, _ in copied} == {1_040, 1_552, 512, 16}
    sources = [source for _, source in copied]
    times = 2 + (policy == "inputs")  # in the forward, in the backward, and in the forward that it repeats
    assert all(sum(source is one for source in sources) == times for one in (x, weights.w1, weights.w2))


def test_a_launch_checks_its_arguments_without_memory(monkeypatch):
    empty = FakeExecutor.empty
    with FakeTensorMode():
        layer, x, _ = make_fake("moeblaze")
        monkeypatch.setattr(FakeExecutor, "empty", lambda executor, shape, dtype: empty(executor, shape, "float16"))
        with pytest.raises(
            TypeError, match="argument topk_experts of kernel choose_experts has dtype torch.float16, but it"
        ):
            layer(x)


def test_a_layer_says_what_would_have_run_it():
    with FakeTensorMode():
        layer, x, _ = make_fake("megablocks")
        layer(x)
    assert layer.executor == "simt"
