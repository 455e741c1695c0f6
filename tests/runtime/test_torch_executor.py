"""The executor over torch's own tensors: what a launch is given, and what a step costs the host."""

import ctypes
import functools
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from idle import IdleBridge, IdleExecutor
from stages import alter
from torch.multiprocessing.reductions import StorageWeakRef
from torch_layers import SIZES, make_layer, make_x

import moeblaze_ref
from moeblaze_ref.backends.raw_cuda import tiles
from moeblaze_ref.bench import stages
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn import torch_layer, torch_node
from moeblaze_ref.runtime.parameters import ParameterMemory
from moeblaze_ref.runtime.simt.executor import SimtExecutor, SimtModule
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.runtime.tensor_map import EncodedMap, Layout
from moeblaze_ref.runtime.torch_bridge import CpuBridge

PACKAGE = Path(moeblaze_ref.__file__).parent
FILE = """
extern "C" __global__ void f(const __nv_bfloat16* x, float* out, int n, float scale) {}
extern "C" __global__ void g(const __grid_constant__ TensorMap x) {}
"""


def make_step(dtype=torch.bfloat16, **options):
    """A forward and a backward through every output, to be called again and again."""
    layer, x = make_layer(dtype=dtype, **options), make_x(dtype=dtype)
    d_out = torch.randn_like(x, requires_grad=False)
    leaves = [x, *layer.parameters()]

    def step(with_losses=False):
        out, *losses, _ = layer(x)
        outputs, d_outputs = ([out, *losses], [d_out, *map(torch.ones_like, losses)]) if with_losses else (out, d_out)
        return torch.autograd.grad(outputs, leaves, d_outputs)

    return step


def idle(monkeypatch, **options):
    """The layer runs on an idle executor from now on."""
    executor = IdleExecutor(**options)
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: IdleBridge(executor))
    return executor


# What a launch is given


def plain(value):
    """A launch's argument, less the addresses: numbers with their types; of arrays and maps that they are some."""
    return (type(value), value.item()) if isinstance(value, np.generic) else "address"


@pytest.mark.parametrize("version", ["2_tiled", "3_mma", "7_persistent"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_step_launches_what_it_launches_on_numpy_arrays(version, activation, monkeypatch):
    launches, multiprocessors = [], IdleExecutor.multiprocessors
    monkeypatch.setattr(SimtModule, "_run", lambda module, *launch: launches.append(launch))
    monkeypatch.setattr(SimtExecutor, "multiprocessors", multiprocessors)
    bridge = CpuBridge()
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: bridge)
    make_step(version=version, activation=activation)(with_losses=True)
    executor = idle(monkeypatch)
    with tiles.trying(tiles.CPU_TILE) if version == "3_mma" else nullcontext():  # as arrays on a CPU have
        make_step(version=version, activation=activation)(with_losses=True)
    found = [launch for launch in executor.launches if launch[0] not in ("matmul", "add_product")]
    assert [launch[:4] for launch in found] == [launch[:4] for launch in launches]
    assert [[plain(v) for v in launch[4]] for launch in found] == [[plain(v) for v in launch[4]] for launch in launches]
    assert len(found) > 15


def test_tensors_arrive_as_addresses_and_numbers_as_their_types():
    executor = IdleExecutor()
    x, out = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)
    executor.load("test.cu", text=FILE).launch("f", 2, 32, scale=3, n=7, out=out, x=x)
    ((kernel, grid, block, shared_bytes, values),) = executor.launches
    assert (kernel, grid, block, shared_bytes) == ("f", (2, 1, 1), (32, 1, 1), 0)
    assert values == (x.data_ptr(), out.data_ptr(), 7, 3.0)
    assert [type(value) for value in values] == [int, int, np.int32, np.float32]


DECLARED = """
extern "C" __global__ void f(const float* x, bool flag, const __grid_constant__ TensorMap map, int n, long long many,
                             float scale, unsigned char small, double wide, int* out, unsigned last) {}
"""


def test_the_driver_finds_each_parameter_where_it_is_told():
    parameters = KernelSource.read("test.cu", {}, DECLARED).kernels["f"]
    memory, words = ParameterMemory(parameters), bytes(range(128))
    types = [ctypes.c_uint64, ctypes.c_bool, ctypes.c_char * 128, ctypes.c_int32, ctypes.c_int64]
    types += [ctypes.c_float, ctypes.c_uint8, ctypes.c_double, ctypes.c_uint64, ctypes.c_uint32]
    addresses = (ctypes.c_void_p * len(types)).from_address(memory.address)
    assert all(address % 64 == 0 for address in addresses)
    for sign in (1, -1):  # the second launch overwrites the first
        numbers = [np.int32(sign * 7), np.int64(sign * 2**40), np.float32(sign * 1.5), np.uint8(200)]
        values = [2**47 + 16, np.True_, words, *numbers, np.float64(sign * 0.1), 2**46, np.uint32(2**32 - 1)]
        memory.pack(*values)
        found = [kind.from_address(address) for kind, address in zip(types, addresses, strict=True)]
        assert [item.raw if hasattr(item, "raw") else item.value for item in found] == values
    assert memory.lock.acquire(blocking=False)


X, OUT = torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": OUT}, TypeError, "argument x of kernel f has dtype torch.float32, but it must be bfloat16"),
        ({"x": X.T}, ValueError, r"argument x of kernel f is not C-contiguous \(strides \(2, 4\)\)"),
        ({"x": None}, TypeError, "argument x of kernel f is None, but it must be a Tensor"),
        ({"out": np.zeros(4, np.float32)}, TypeError, "argument out of kernel f is a ndarray, but it must be a Tensor"),
        ({"n": 1.5}, TypeError, r"argument n of kernel f is 1.5 \(float\), but it must be an integer"),
        ({"n": 2**31}, ValueError, "argument n of kernel f is 2147483648, but it must be"),
        ({"scale": X}, TypeError, "argument scale of kernel f is tensor"),
        ({"m": 1}, ValueError, r"kernel f takes \(x, out, n, scale\), but was given"),
    ],
)
def test_a_launch_says_what_it_takes(change, error, message):
    executor = IdleExecutor()
    with pytest.raises(error, match=message):
        executor.load("test.cu", text=FILE).launch("f", 1, 32, **({"x": X, "out": OUT, "n": 1, "scale": 1.0} | change))
    assert not executor.launches


def test_a_tensor_map_is_of_the_place_and_the_layout_and_encoded_once(monkeypatch):
    executor, encoded = IdleExecutor(), []
    monkeypatch.setattr(executor, "encode", lambda *asked: encoded.append(asked) or len(encoded))
    memory = torch.zeros(64 * 64, dtype=torch.bfloat16)  # given out again and again, as an allocator does
    address, box = memory.data_ptr(), (64, 8)

    def words(tensor, box=box):
        executor.load("test.cu", text=FILE).launch("g", 1, 32, x=executor.tensor_map(tensor, box))
        return executor.launches[-1][4][0]

    assert [words(memory.view(64, 64)) for _ in range(3)] == [1, 1, 1]
    assert encoded == [(Layout(address, "bfloat16", (64, 64), (128, 2)), box)]
    others = [memory.view(32, 128), memory.view(torch.float16).view(64, 64), memory.view(64, 64)[8:]]
    assert [words(other) for other in others] == [2, 3, 4]
    assert words(memory.view(64, 64)[:, :32]) == 5 and encoded[-1][0].strides == (128, 2)
    assert words(memory.view(64, 64), (64, 16)) == 6
    assert words(memory.view(64, 64)) == 1


def test_a_tensor_map_is_checked_and_nothing_else_is_taken_in_its_place():
    executor = IdleExecutor()
    with pytest.raises(ValueError, match="row of the array of the TensorMap, in bytes, is 24"):
        executor.tensor_map(torch.zeros(8, 12, dtype=torch.float16), (64, 8))
    with pytest.raises(TypeError, match="argument x of kernel g is a Tensor, but it must be an EncodedMap"):
        executor.load("test.cu", text=FILE).launch("g", 1, 32, x=torch.zeros(8, 64, dtype=torch.float16))


# The layer and the stages on tensors


@pytest.mark.parametrize("stage", stages.RUN)
def test_every_stage_takes_tensors(stage):
    executor = IdleExecutor()
    bridge, config = IdleBridge(executor), MoEConfig(L=37, **SIZES)
    inputs = stages.Inputs(config, bridge, torch.device("cpu"))
    for version in stages.versions_of(stage, "bfloat16"):
        executor.launches.clear()
        with bridge.running():
            stages.RUN[stage](inputs, executor=executor, **({} if version is None else {"version": version}))
        assert executor.launches


def test_no_tokens_a_replayed_routing_and_losses_that_are_changed_in_place(monkeypatch):
    idle(monkeypatch)
    layer = make_layer(renormalize=True)
    assert layer(torch.zeros(0, SIZES["d"])).out.shape == (0, SIZES["d"])
    result = layer(torch.zeros(7, SIZES["d"]), torch.tensor([[4, 0, 2]] * 7, dtype=torch.int32))
    assert result.topk_experts.shape == (7, 3)
    for loss in (result.load_balancing_loss, result.router_z_loss):
        assert loss.shape == () and loss.mul_(0.01).requires_grad


def test_the_backward_frees_what_the_forward_kept(monkeypatch):
    """The tensors that the stages see are not those that autograd holds."""
    idle(monkeypatch)
    monkeypatch.setattr(torch_layer, "_passed", {})  # a call whose layouts have passed does not reshape its output
    layer, alive = make_layer(policy="paper"), []
    out = layer(make_x().detach()).out
    ((node, _),) = out.grad_fn.next_functions  # before the reshape
    kept = [StorageWeakRef(t.untyped_storage()) for t in node.saved_tensors if t.shape[:1] == (111,)]

    def watched(gradient, *arguments, **options):
        alive.append(sum(not storage.expired() for storage in kept))
        return gradient(*arguments, **options)

    alter(monkeypatch, "simt", "router.weight_gradient", lambda gradient: functools.partial(watched, gradient))
    out.sum().backward()
    assert len(kept) == 6 and alive == [3]  # of the index structures


# What a step costs the host


def test_a_step_takes_few_python_calls(monkeypatch):
    """Each costs well under a microsecond, and a launch about seven.

    Only the package's own are counted: how many torch and numpy make varies with what ran before.
    """
    executor, calls = idle(monkeypatch), []
    step = make_step()
    # On a GPU torch's allocator gives the same places in every step; the CPU's does not, and each new one is encoded.
    monkeypatch.setattr(
        IdleExecutor, "tensor_map", lambda executor, tensor, box: EncodedMap((tensor.data_ptr(), box), None, box)
    )

    def count(frame, event, argument):
        if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents:
            calls.append(frame.f_code.co_name)

    with torch.autograd.set_multithreading_enabled(False):
        step()  # reads the kernel files
        executor.launches.clear()
        previous = sys.getprofile()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(previous)
    assert {"launch", "hidden_gradients"} <= {*calls}
    assert len(executor.launches) == 21
    assert len(calls) < 380
