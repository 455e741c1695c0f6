"""Launch plans in detail: what is recorded, when memory is allocated and freed, and what the C function sends."""

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from over_simt import ENCODE, HANDLE, LAUNCH, MULTIPLY, multiply
from torch.multiprocessing.reductions import StorageWeakRef

from moeblaze_ref.runtime.declarations import TENSOR_MAP, Parameter
from moeblaze_ref.runtime.launch_plan import NoPlan, Plan, called, recording, without_overlap
from moeblaze_ref.runtime.launch_plan.events import (
    Buffer,
    Launch,
    MapOf,
    Matrix,
    Operation,
    Pointer,
    Product,
    View,
    in_blocks,
)
from moeblaze_ref.runtime.launch_plan.recorder import current
from moeblaze_ref.runtime.launch_plan.schedule import Lives, Scheduler, packed
from moeblaze_ref.runtime.launch_plan.sender import Driver, Sender
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.runtime.tensor_map import Layout

ONE = (1, 1, 1)
ARRAY, OUTPUT = (Parameter(name, "float32", pointer=True, writable=name == "out") for name in ("x", "out"))


class PretendedDriver:
    """What a plan has sent: of each launch its sizes and its parameters' bytes, and the maps that were asked for."""

    def __init__(self, sizes, status=0):
        self.launches, self.maps, self._sizes, self._status = [], [], sizes, status
        self.products = 0
        self._functions = LAUNCH(self._launch), ENCODE(self._encode), MULTIPLY(self._multiply)

    @property
    def driver(self):
        return Driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in self._functions), lambda: HANDLE)

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra):
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self._sizes[len(self.launches)])]
        assert all(parameters[i] % 64 == 0 for i in range(len(values)))
        self.launches.append(((function, (gx, gy, gz), (bx, by, bz), shared_bytes, stream), values))
        return self._status

    def _multiply(self, *how):
        self.products += 1
        return multiply(*how) or self._status

    def _encode(self, into, dtype, rank, address, extents, pitches, box, steps, *how):
        asked = dtype, address, extents[:rank], pitches[: rank - 1], box[:rank], steps[:rank], how
        self.maps.append(asked)
        ctypes.memmove(into, bytes([len(self.maps)]) * 128, 128)
        return 0


FILE = """
extern "C" __global__ void f(const float* x, bool flag, const __grid_constant__ TensorMap map, int n, float* out) {}
extern "C" __global__ void g(const float* x, long long many) {}
"""


def test_the_c_function_writes_addresses_and_maps_and_leaves_numbers():
    kernels = KernelSource.read("test.cu", {}, FILE).kernels
    layout = Layout(0, "bfloat16", (3, 5, 64), (5 * 128, 128, 2))
    arguments = (Pointer(4, 8), np.True_, MapOf(Pointer(7, 256), layout, (64, 4, 1)), np.int32(-7), Pointer(9, 0))
    launches = [
        Launch("f", 11, (2, 3, 4), (32, 2, 1), 99, kernels["f"], arguments),
        Launch("g", 12, (5, 1, 1), (64, 1, 1), 0, kernels["g"], (Pointer(4, 0), np.int64(2**40))),
    ]
    pretended = PretendedDriver([[8, 1, 128, 4, 8], [8, 8]])
    slots = {4: (0, 0), 7: (2, 512), 9: (1, 0)}  # 7 lies in the arena, whose address is the last
    sender = Sender(launches, slots, 3, pretended.driver)
    for first in (1 << 20, 1 << 30):  # another step, other addresses
        pretended.launches.clear()
        pretended.maps.clear()
        sender.send([first, first + 1, first + 4096], 77)
        (how, values), (other, numbers) = pretended.launches
        assert how == (11, (2, 3, 4), (32, 2, 1), 99, 77) and other == (12, (5, 1, 1), (64, 1, 1), 0, 77)
        assert values[2] == b"\1" * 128 and values[1] == b"\1"
        assert [int.from_bytes(values[i], "little") for i in (0, 4)] == [first + 8, first + 1]
        assert int.from_bytes(values[3], "little", signed=True) == -7
        assert [int.from_bytes(value, "little") for value in numbers] == [first, 2**40]
        address = first + 4096 + 512 + 256
        assert pretended.maps == [(9, address, [64, 5, 3], [128, 640], [64, 4, 1], [1, 1, 1], (0, 3, 3, 0))]


def test_a_matrix_is_encoded_in_two_dimensions():
    parameter = Parameter("x", TENSOR_MAP, pointer=False, writable=False)
    map_of = MapOf(Pointer(0, 0), Layout(0, "float16", (6, 128), (256, 2)), (64, 3))
    pretended = PretendedDriver([[128]])
    Sender([Launch("f", 1, ONE, ONE, 0, (parameter,), (map_of,))], {0: (0, 0)}, 1, pretended.driver).send([64], 0)
    assert pretended.maps == [(6, 64, [128, 6], [256], [64, 3], [1, 1], (0, 3, 3, 0))]


def test_a_launch_that_is_refused_raises_and_the_next_is_not_sent():
    launch = Launch("f", 1, ONE, ONE, 0, (ARRAY,), (Pointer(0, 0),))
    pretended = PretendedDriver([[8], [8]], status=700)
    with pytest.raises(RuntimeError, match="the driver refused one of the kernels f, f: error 700"):
        Sender([launch, launch], {0: (0, 0)}, 1, pretended.driver).send([64], 0)
    assert len(pretended.launches) == 1


# Memory


def buffers_of(sizes):
    return [Buffer(number, size, None, (size,), (1,), torch.uint8) for number, size in enumerate(sizes)]


def launch_of(*buffers):
    return Launch("f", 1, ONE, ONE, 0, (), tuple(Pointer(number, 0) for number in buffers))


def test_buffers_that_live_at_the_same_time_do_not_overlap_and_others_share_memory():
    events = [launch_of(0, 1), launch_of(1, 2), launch_of(2, 3)]
    lives, buffers = Lives(events, ()), buffers_of([1000, 600, 900, 100])
    places, size = packed(range(4), buffers, lives)
    assert size == 1024 + 1024 and places[0] == places[2] == 0 and places[1] == 1024


def random_call(generator):
    """Events over buffers that are used in a row of them, the inputs, those that outlive the call, and its peak."""
    length = generator.randint(1, 12)
    num_inputs, count = generator.randint(0, 2), generator.randint(3, 14)
    buffers = buffers_of([generator.randint(1, 5000) for _ in range(count)])
    spans = {
        n: sorted(generator.choices(range(length), k=2)) if n >= num_inputs else [0, generator.randrange(length)]
        for n in range(count)
    }
    uses = [[n for n, (first, last) in spans.items() if at in (first, last)] for at in range(length)]
    events = [
        Operation(None, tuple(View(n, None) for n in used), {}, ()) if generator.random() < 0.25 else launch_of(*used)
        for used in uses
    ]
    lasting = {n for n in range(count) if generator.random() < 0.3}
    lives = Lives(events, lasting)
    return events, buffers, num_inputs, lives, _peak(events, buffers, num_inputs, lives)


def _peak(events, buffers, num_inputs, lives):
    """Bytes of the call where each buffer lives from its first to its last use alone."""
    at = [
        sum(
            in_blocks(buffers[n].nbytes) * ((lives.first[n] <= place <= lives.last[n]) - (n < num_inputs))
            for n in lives.first
        )
        for place in range(len(events))
    ]
    return max(at)


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_has_more_memory_than_the_call(seed):
    events, buffers, num_inputs, lives, peak = random_call(random.Random(seed))
    parts = Scheduler(events, buffers, num_inputs, lives, peak).parts()
    assert [event for part in parts for event in part.events] == events
    live, alive, done = 0, set(range(num_inputs)), 0
    for part in parts:
        assert len(part.events) == 1 or not any(isinstance(event, Operation) for event in part.events)
        alive |= set(part.born)
        live += part.arena_bytes + sum(in_blocks(buffers[n].nbytes) for n in part.born)
        assert live <= peak
        assert {n for event in part.events for n in event.buffers()} <= alive | part.arena.keys()
        alive -= set(part.dropped)
        live -= part.arena_bytes + sum(in_blocks(buffers[n].nbytes) for n in part.dropped)
        done += len(part.events)
        for number in part.arena:  # nothing outside reads it
            assert lives.last[number] < done and lives.first[number] >= done - len(part.events)
    assert alive == {n for n in lives.first if lives.last[n] == len(events)} | (alive - lives.first.keys())


def test_launches_are_one_part_where_memory_allows_it():
    events, buffers = [launch_of(0, 1), launch_of(1, 2), launch_of(2, 3)], buffers_of([512] * 4)
    lives = Lives(events, {0, 3})
    (whole,) = Scheduler(events, buffers, 1, lives, 3 * 512).parts()
    assert whole.born == (3,) and whole.arena.keys() == {1, 2} and whole.arena_bytes == 1024
    assert len(Scheduler(events, buffers, 1, lives, 2 * 512).parts()) > 1


# The recorder


class PretendedModule:
    """Records launches of a kernel that copies x to out, and runs none."""

    source = SimpleNamespace(kernels={"copy": (ARRAY, OUTPUT)})

    def handle(self, kernel, shared_bytes):
        return 5

    def launch(self, x, out):
        current().launched(self, "copy", (ONE, ONE, 0), {"x": x, "out": out}, [x.data_ptr(), out.data_ptr()])


COPY = PretendedModule()


class CopyDriver(PretendedDriver):
    """Runs that kernel on 4 floats."""

    def __init__(self):
        super().__init__([[8, 8]] * 100)

    def _launch(self, *launch):
        status = super()._launch(*launch)
        x, out = (int.from_bytes(value, "little") for value in self.launches[-1][1])
        ctypes.memmove(out, x, 16)
        return status


def recorded(call, *inputs, own=()):
    """The plan of a call, and its driver, which must live as long."""
    with recording(inputs, own) as recorder:
        results = call(*inputs)
    pretended = CopyDriver()
    return Plan(recorder, results, torch.device("cpu"), pretended.driver), pretended


def test_a_plan_replays_launches_and_operations_in_order():
    def call(x, y):
        first, second = torch.empty(4), torch.empty(4)
        COPY.launch(x, first)
        total = first + y.view(4)
        COPY.launch(total, second)
        total.add_(1.0)
        return [second, None, total[1:3], x]

    plan, _ = recorded(call, torch.zeros(4), torch.zeros(2, 2))
    for number in (1.0, 2.0):
        x, y = torch.full((4,), number), torch.arange(4.0).view(2, 2)
        inputs = [x, y]
        second, nothing, part, same = plan.run(inputs, 0)
        assert torch.equal(second, number + torch.arange(4.0)) and nothing is None and same is x and not inputs
        assert torch.equal(part, number + torch.tensor([2.0, 3.0]))


def test_what_is_no_operation_is_called_again():
    """With tensors of the step; what it does inside is not recorded, and it may write over what it is given."""
    seen = []

    class Library:
        def gathered(self, rows, counts):
            seen.append(rows[0].shape)
            return torch.cat([row * count for row, count in zip(*rows, counts, strict=True)])

        def grown(self, total):
            total.numpy()[:] += 1  # as another library would
            return total

    library = Library()

    def call(x):
        found = called(library, "gathered", (x.view(2, 2),), [2, 3])
        total = called(library, "grown", found + 1)
        (copied,) = launch_on(total)
        return [found, total[:3], copied]

    plan, _ = recorded(call, torch.zeros(4))
    assert torch.equal(called(library, "grown", torch.zeros(4)), torch.ones(4))  # without a recorder
    for number in (1.0, 2.0):
        found, total, copied = plan.run([torch.full((4,), number)], 0)
        expected = number * torch.tensor([2.0, 2.0, 3.0, 3.0])
        assert torch.equal(found, expected)
        assert torch.equal(total, expected[:3] + 2) and torch.equal(copied, expected + 2)
    assert len(seen) == 3 and len(plan._parts) == 4
    library.grown = torch.neg_  # a replay calls the method that there is now
    assert torch.equal(plan.run([torch.ones(4)], 0)[1], -torch.tensor([3.0, 3.0, 4.0]))


def test_a_call_reads_and_writes_its_own_tensors():
    """They are no inputs, and keep from step to step what was written to them."""
    scale, sums = torch.arange(4.0), torch.zeros(4)

    def call(x):
        sums.add_(x * scale)
        return [sums * 1]

    plan, _ = recorded(call, torch.ones(4), own=[scale, sums])
    (found,) = plan.run([torch.full((4,), 2.0)], 0)
    assert torch.equal(found, 3 * scale) and torch.equal(sums, 3 * scale)
    sums.zero_()
    plan.run([torch.ones(4)], 0)
    assert torch.equal(sums, scale)


def test_a_kernel_may_write_to_a_tensor_of_the_calls_own():
    kept = torch.zeros(4)

    def call(x):
        COPY.launch(x, kept)
        return []

    plan, _ = recorded(call, torch.zeros(4), own=[kept])
    plan.run([torch.arange(4.0)], 0)
    assert torch.equal(kept, torch.arange(4.0))


def test_a_tensor_without_elements_is_another_in_each_step():
    def call(x, nothing):
        return [torch.cat([x, nothing]), x[:0].view(0, 7), nothing * 2]

    plan, _ = recorded(call, torch.zeros(4), torch.zeros(0))
    first, second = (plan.run([torch.ones(4), torch.zeros(0)], 0) for _ in range(2))
    assert torch.equal(first[0], torch.ones(4)) and [tuple(each.shape) for each in first[1:]] == [(0, 7), (0,)]
    assert all(one is not other for one, other in zip(first, second, strict=True))


def products(x, y, copy):
    """Products of x (5, 4) and y (4, 3), with each factor as it lies or transposed, between two copies."""
    x_t, y_t = x.view(4, 5).T, y.view(3, 4).T
    found = [torch.mm(one, other) for one in (x, x_t) for other in (y, y_t)]
    first = copy(x.view(-1)[:8].view(torch.float32))
    grown = torch.mm(found[0].T, found[1])
    second = copy(first)
    return [*found, grown.addmm_(y.T, y.view(4, 3)), second]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_stand_among_the_launches_and_each_factor_may_be_transposed(dtype):
    def numbers(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 4), (4, 3))]

    plan, pretended = recorded(lambda x, y: products(x, y, lambda array: launch_on(array)[0]), *numbers(0))
    assert len(plan._parts) == 1
    for seed in (1, 2):
        found = plan.run(numbers(seed), 0)
        expected = products(*numbers(seed), torch.clone)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert pretended.products == 12 and len(pretended.launches) == 4


def test_a_product_that_cublas_refuses_raises():
    pretended = PretendedDriver([], status=13)
    matrix = Matrix(Pointer(0, 0), False, 8, "bfloat16")
    product = Product(matrix, matrix, matrix, (8, 8, 8), False)
    memory = torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="the driver refused one of the kernels cublasGemmEx: error 13"):
        Sender([product], {0: (0, 0)}, 1, pretended.driver).send([memory.data_ptr()], 0)


def test_a_result_that_no_launch_touches_is_allocated():
    plan, _ = recorded(lambda x: [torch.empty(3, 2)], torch.zeros(4))
    (result,) = plan.run([torch.zeros(4)], 0)
    assert result.shape == (3, 2)


def test_an_input_that_the_call_frees_and_never_reads_is_freed_before_the_first_launch():
    def call(tensors):
        x = tensors[0]
        tensors.clear()
        return launch_on(x)

    tensors = [torch.zeros(4), torch.zeros(1024)]
    with recording(tensors[:]) as recorder:
        results = call(tensors)
    found = []

    class Watching(CopyDriver):
        def _launch(self, *launch):
            found.append(unread.expired())
            return super()._launch(*launch)

    pretended = Watching()
    plan = Plan(recorder, results, torch.device("cpu"), pretended.driver)
    inputs = [torch.ones(4), torch.zeros(1024)]
    unread = StorageWeakRef(inputs[1].untyped_storage())
    (out,) = plan.run(inputs, 0)
    assert torch.equal(out, torch.ones(4)) and found == [True]


def test_inputs_that_share_memory_are_told_apart():
    x = torch.zeros(8)
    one, other, third = x[:5], x[4:], torch.zeros(8)
    found = without_overlap([one, other, one, third])
    assert found[0] is one and found[3] is third
    assert len({tensor.data_ptr() for tensor in found}) == 4 and torch.equal(found[1], other)


def launch_on(x):
    out = torch.empty(4)
    COPY.launch(x, out)
    return [out]


OUTSIDE = torch.zeros(4)


def with_a_constant(x):
    one = torch.full((1,), 0.5)
    COPY.launch(x, one)
    return [one]


def with_an_out(x, number):
    return torch.add(number, x[:1], out=number)


def grown_product(number):
    return number.addmm_(number, number)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x: [x.sum().item(), None][1:], "_local_scalar_dense.* has a result for the host"),
        (lambda x: launch_on(OUTSIDE), "a kernel was given the address .*, which the call neither was given"),
        (lambda x: [x + OUTSIDE], r"a tensor of shape \(4,\) is neither an input nor allocated by the call"),
        (lambda x: [OUTSIDE], r"a tensor of shape \(4,\) is neither an input nor allocated by the call"),
        (with_a_constant, "a kernel writes to a constant"),
        (lambda x: [torch.full((1,), 0.5).add_(x[:1])], "aten.add_.Tensor writes over a number that each step reads"),
        (lambda x: [called(torch, "neg_", torch.full((1,), 0.5)) + x], "writes over a number that each step reads"),
        (lambda x: [called(torch, "cat", [torch.full((1,), 0.5), x])], "writes over a number that each step reads"),
        (lambda x: [with_an_out(x, torch.full((1,), 0.5))], "writes over a number that each step reads"),
        (lambda x: [grown_product(torch.full((1, 1), 0.5, dtype=torch.bfloat16))], "writes over a number"),
    ],
)
def test_what_cannot_be_replayed_has_no_plan(call, why):
    with pytest.raises(NoPlan, match=why):
        recorded(call, torch.zeros(4))


def test_a_number_is_made_once():
    plan, _ = recorded(lambda x: [x * torch.full((1,), 0.5)], torch.zeros(4))
    assert len(plan._parts) == 1
    assert torch.equal(plan.run([torch.ones(4)], 0)[0], torch.full((4,), 0.5))


def test_a_number_that_is_a_result_belongs_to_the_step():
    plan, _ = recorded(lambda x: [torch.full((1,), 0.5), x * 1], torch.zeros(4))
    first, second = (plan.run([torch.ones(4)], 0)[0].mul_(factor) for factor in (2, 3))
    assert (float(first), float(second)) == (1.0, 1.5)


def test_the_peak_is_that_of_the_call_and_an_input_that_it_frees_counts():
    def call(tensors):
        first = torch.empty(512)  # 2048 bytes
        del first
        second = torch.empty(128)  # 512 bytes
        tensors.clear()  # frees 4096
        third = torch.empty(1024)  # 4096 bytes
        return [second, third]

    tensors = [torch.zeros(1024)]
    with recording(tensors[:]) as recorder:
        results = call(tensors)
    assert len(results) == 2 and recorder.peak == 2048 and recorder.freed() == {0, 1}
