"""The cross-check: it passes what is right, and nothing that is wrong, missing or NaN."""

import contextlib
import dataclasses
import functools
import itertools
import json
import types

import numpy as np
import pytest
import torch
from checked import dispatch_as_json
from planted import plant, with_fault
from stages import alter

from moeblaze_ref.backends.numpy_ref import block_sparse, gating
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.backends.raw_cuda.block_sparse import BLOCK, HOPPER_BLOCK
from moeblaze_ref.backends.raw_cuda.gemm import HOPPER, HOPPER_COLUMNS, file_of
from moeblaze_ref.backends.registry import BACKENDS, ORACLE, STAGES, OpenStage, Status
from moeblaze_ref.backends.step_memory import StepMemory
from moeblaze_ref.cli.terminal import verdict
from moeblaze_ref.core.structures import Gating
from moeblaze_ref.nn import torch_layer
from moeblaze_ref.nn.systems import SYSTEMS
from moeblaze_ref.nn.torch_capacity import CapacityMoE
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import KernelSource
from moeblaze_ref.systems.capacity import MAX
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.verify import cases, check, comparisons
from moeblaze_ref.verify.cases import make_case, option_cases, standard_cases
from moeblaze_ref.verify.check import Row

CASES = [make_case(37, 8, 12, 5, 2), make_case(11, 8, 12, 6, 2, "empty")]
SMALL = next(case for case in standard_cases() if case.name == "small")
FLOATING = [stage for stage in STAGES if stage != "dispatch"]


def rows_of(stage, backend, version=None, case=SMALL):
    """The rows of one case on a version, by default the first."""
    version = version or next(iter(BACKENDS[backend].versions(stage)))
    return list(check.check_of(stage)(BACKENDS[backend], version, case))


def opened(module):
    """A stage whose functions take numpy arrays as they are."""
    return OpenStage(module, contextlib.nullcontext, np.asarray, np.asarray, {})


def rows_of_faulty(monkeypatch, stage, function, change):
    """Replace a function of a numpy stage by one whose result is changed; returns the rows of that stage."""
    module = BACKENDS["numpy"].stage(stage)
    right = getattr(module, function)
    wrong = types.SimpleNamespace(**vars(module))
    setattr(wrong, function, lambda *arguments, **options: change(right(*arguments, **options)))
    monkeypatch.setattr(check.Backend, "open", lambda self, name, version: opened(wrong))
    return check.run([stage], ["numpy"], CASES)


def each(change):
    """Apply ``change`` to every array of a result, whatever holds it."""

    def apply(value):
        if isinstance(value, np.ndarray):
            return change(value)
        if dataclasses.is_dataclass(value) and hasattr(value, "map"):
            return value.map(change)
        if isinstance(value, tuple):
            parts = [apply(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    return apply


def without_last_row(array):
    changed = array.copy()
    changed[-1:] = 0
    return changed


def test_every_stage_of_the_specification_passes():
    rows = check.run(backends=["numpy"])
    assert check.passed(rows) and {row.stage for row in rows} == set(STAGES)
    found = {(row.direction, row.dtype) for row in rows if row.stage == "layer"}
    assert found == {*itertools.product(("forward", "backward"), ("float64", "float32"))}


def test_dispatch_passes_in_every_backend_that_needs_no_gpu(tmp_path_factory):
    found = [Row(**row) for row in dispatch_as_json(tmp_path_factory)[1]]
    rows = [row for row in found if row.backend in ("numpy", "numba", "simt")]
    assert check.passed(rows) and {row.backend for row in rows} == {"numpy", "numba", "simt"}
    assert {row.version for row in rows if row.backend == "simt"} == set(raw_dispatch.VERSIONS)
    assert {row.error for row in rows} == {0.0}


GRADIENTS = {
    "expert_up": ("input_gradient", "weight_gradient"),
    "expert_down": ("hidden_gradients", "weight_gradient"),
}


@pytest.mark.parametrize(
    ("stage", "function"),
    [(stage, function) for stage in FLOATING for function in ("forward", *GRADIENTS.get(stage, ("backward",)))],
)
@pytest.mark.parametrize(
    "fault",
    [
        np.zeros_like,
        without_last_row,
        lambda array: array[::-1].copy(),
        lambda array: np.full_like(array, np.nan, dtype=float),
    ],
    ids=["zeros", "last row dropped", "rows in the wrong order", "NaN"],
)
def test_a_faulty_stage_fails(monkeypatch, stage, function, fault):
    rows = rows_of_faulty(monkeypatch, stage, function, each(fault))
    failed = {(row.direction, row.shape) for row in rows if not row.ok}
    direction = "forward" if function == "forward" else "backward"
    assert not check.passed(rows)
    for case in CASES:  # a stage that is given the fault of another may refuse it
        of_case = [(way, shape) for way, shape in failed if shape.startswith(case.shape.removesuffix(")"))]
        assert any(way == direction or "): Value" in shape for way, shape in of_case)


@pytest.mark.parametrize(
    "fault", [np.zeros_like, without_last_row, lambda array: array + 1, lambda array: array.astype(np.int64)]
)
def test_a_faulty_dispatch_fails(monkeypatch, fault):
    rows = rows_of_faulty(monkeypatch, "dispatch", "build", each(fault))
    assert [row.ok for row in rows] == [False] * len(CASES) and all(row.error >= 1 for row in rows)


def test_a_stage_that_raises_is_a_failed_row_that_says_why(monkeypatch):
    def fault(*arguments):
        raise RuntimeError("kernel k, block (0, 0, 0): out-of-bounds write")

    monkeypatch.setattr(check.Backend, "open", lambda self, name, version: opened(types.SimpleNamespace(build=fault)))
    rows = check.run(["dispatch"], ["numpy"], CASES)
    assert not check.passed(rows) and len(rows) == len(CASES)
    assert all("RuntimeError: kernel k" in row.shape and not row.ok and row.available for row in rows)
    json.dumps([row.as_dict() for row in rows], allow_nan=False)


@pytest.mark.parametrize(
    ("activation", "change"),
    [("gelu", np.zeros_like), ("relu2", np.sqrt), ("relu", np.zeros_like), ("geglu", np.zeros_like)],
)
def test_a_wrong_activation_of_the_specification_is_found(monkeypatch, activation, change):
    from moeblaze_ref.backends.numpy_ref import activation as stage

    right = dict(stage._NONLINEARITY)
    act, slope = right[activation]
    wrong = (lambda a: change(act(a)), slope) if activation != "relu" else (act, lambda a: change(slope(a)))
    monkeypatch.setitem(stage._NONLINEARITY, activation, wrong)
    rows = check.run(["expert_up", "expert_down", "layer"], ["numpy"], option_cases())
    assert any(not row.ok and activation in row.shape for row in rows)


def cases_of(jobs):
    """The cases of planned checks, without the sums whose order is checked."""
    return [job.args[4] for job in jobs if isinstance(job.args[4], cases.Case)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_list_of_cases_stays_as_it_is_given(stage):
    """In its order, and with nothing added; without a list, the check adds its own."""
    given = [make_case(37, 8, 16, 5, 2), make_case(1, 8, 16, 6, 2), make_case(11, 8, 16, 6, 2, "empty")]
    assert cases_of(check.plan([stage], ["numpy"], given)) == given
    assert len(cases_of(check.plan([stage], ["numpy"]))) >= len(standard_cases() + option_cases())


VERSIONS = [(stage, version) for stage in BACKENDS["simt"].stages for version in BACKENDS["simt"].versions(stage)]


def planned_cases(stage, version):
    return cases_of(job for job in check.plan([stage], ["simt"]) if job.args[3] == version)


@pytest.mark.parametrize(("stage", "version"), VERSIONS)
def test_cheap_cases_follow_those_that_run_first(stage, version):
    planned = planned_cases(stage, version)
    places = [comparisons.turn(stage, version, case) for case in planned]
    assert places == sorted(places)
    others = [case for case, place in zip(planned, places, strict=True) if place == max(places)]
    usual = [case.L * case.k for case in others if case.activation == "swiglu"]
    tokens = [rows for rows in usual if rows]
    assert len(tokens) < len(usual) and usual == sorted(tokens) + [0] * (len(usual) - len(tokens))
    assert all(case.activation == "swiglu" for case in others[: len(usual)])


@pytest.mark.parametrize("of", comparisons.FIRST_CASES)
def test_the_cases_that_run_first_are_cases_of_the_stage(of):
    stage, _, file = of.partition("/")
    of_versions = [
        planned_cases(stage, version) for version in BACKENDS["simt"].versions(stage) if version == file or not file
    ]
    assert {case.name for planned in of_versions for case in planned} >= set(comparisons.FIRST_CASES[of])


def test_the_dispatch_gets_more_tokens_than_a_pass_over_a_bitmap():
    assert all(
        max(case.L for case in planned_cases("dispatch", version)) > 8_192
        for version in BACKENDS["simt"].versions("dispatch")
    )


def without_the_peak(logits):
    weights = np.exp(logits)
    return weights / weights.sum(axis=1, keepdims=True)


def ties_to_the_higher_expert(logits, k):
    worst_first = np.argsort(logits, axis=1, kind="stable")  # equal ones by their id
    return worst_first[:, ::-1][:, :k].astype(np.int32, order="C")


def router_of(softmax=gating.softmax, top_k=gating.top_k):
    """The forward of the gating, made of these."""

    def forward(logits, k, renormalize=False):
        probs, topk_experts = softmax(logits), top_k(logits, k)
        gates = np.take_along_axis(probs, topk_experts, axis=1)
        return Gating(probs, topk_experts, gates / gates.sum(axis=1, keepdims=True) if renormalize else gates)

    return forward


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("parts", "case"),
    [
        ({"softmax": without_the_peak}, "logits far from 0"),
        ({"top_k": ties_to_the_higher_expert}, "equal logits"),
    ],
)
def test_a_router_that_is_wrong_on_hard_logits_alone_fails(parts, case, monkeypatch):
    monkeypatch.setattr(gating, "forward", router_of())
    assert check.passed(check.run(["gating"], ["numpy"]))
    monkeypatch.setattr(gating, "forward", router_of(**parts))
    failed = [row.shape for row in check.run(["gating"], ["numpy"]) if not row.ok]
    assert failed and all(f"({case}" in shape for shape in failed)


def test_losses_and_renormalisation_of_the_layer_are_compared(monkeypatch):
    alter(monkeypatch, "numpy", "gating.router_z_loss", lambda loss: lambda logits: np.float64(0.0))
    assert not check.passed(check.run(["layer"], ["numpy"], CASES))
    monkeypatch.undo()
    alter(monkeypatch, "numpy", "gating.forward", lambda right: lambda logits, k, renormalize: right(logits, k, False))
    assert not check.passed(check.run(["layer"], ["numpy"], option_cases()))


ALL_CASES = [
    *standard_cases(),
    *option_cases(),
    *cases.telling_cases(),
    *cases.wide_cases(),
    *cases.whole_block_cases(),
    *cases.every_choice(),
    *cases.every_activation(),
    *cases.single_gradients(),
    cases.equal_gates_case(),
    cases.many_tokens_case(8_448),
    cases.many_choices_case(),
    cases.many_terms_case(),
    cases.many_passes_case(),
    *cases.wide_block_cases(),
    cases.whole_block_case(),
    cases.many_tiles_case(8),
    cases.many_blocks_case(8),
]


# Sizes that leave the longest queue no choice: one token, or so many experts a token that one expert has every token.
ONE_LONGEST_QUEUE = (
    "one token",
    "k = E",
    "more experts a token than lanes of a warp",
    "as many experts a token as lanes of a warp",
)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.shape)
def test_nothing_of_the_first_step_is_right_in_the_second(case):
    """Both have the same shapes; all else differs, but what the sizes alone decide."""
    first, second = case.steps()
    assert first is case and second.name == f"{case.name}, second step"
    arrays = [(step.x, *step.weights, step.d_out) for step in (first, second)]
    for one, other in zip(*arrays, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.shape == other.shape and one.dtype == other.dtype)
        assert one is None or one.size == 0 or not np.array_equal(one, other)
    for one, other in zip(first.d_losses, second.d_losses, strict=True):
        assert (one == other) == (one == 0.0 == other)  # a loss that is off stays off
    if case.L == 0:
        return
    assert not np.array_equal(first.topk_experts, second.topk_experts)
    # With the longest queue a dynamic capacity differs.
    assert (first.longest_queue == second.longest_queue) == (case.name in ONE_LONGEST_QUEUE)
    losses = [comparisons.expect_layer(step, torch.float64)["forward"] for step in (first, second)]
    balanced = case.k == case.E  # any routing to all experts has the same balance
    assert (losses[0]["load_balancing_loss"] == pytest.approx(losses[1]["load_balancing_loss"])) == balanced
    assert losses[0]["router_z_loss"] != pytest.approx(losses[1]["router_z_loss"], rel=1e-3)


def test_the_second_step_keeps_the_dtype_and_the_activation():
    for activation in ("swiglu", "relu"):
        _, second = make_case(5, 8, 16, 4, 2, activation=activation).astype("bfloat16").steps()
        assert second.activation == activation and (second.weights.w2 is None) == (activation == "relu")
        assert str(second.x.dtype) == str(second.weights.w1.dtype) == "bfloat16"


def kept_by(key, function):
    """A function that returns, for ever, its first result for each key of its arguments."""
    kept = {}

    def faulty(*arguments, **options):
        place = key(*arguments)
        if place not in kept:
            kept[place] = function(*arguments, **options)
        return kept[place]

    return faulty


def keeping(place, function):
    """A function one of whose results is for ever the first for each dtype of its first argument."""
    kept = {}

    def faulty(array, *arguments, **options):
        values = [*function(array, *arguments, **options)]
        values[place] = kept.setdefault(str(array.dtype), values[place])
        return values

    return faulty


kept_once = functools.partial(kept_by, lambda *_: None)
kept_by_dtype = functools.partial(kept_by, lambda array, *_: str(array.dtype))
kept_by_shape = functools.partial(kept_by, lambda topk_experts, num_experts, *_: (topk_experts.shape, num_experts))


def rows_of_layer(layer, **options):
    case = make_case(37, 16, 24, 5, 3)
    first, second = case.steps()
    assert first.longest_queue < second.longest_queue  # a capacity that is kept is too small
    backend = ORACLE if comparisons.TORCH_LAYERS[layer].backends == comparisons.PLAIN else BACKENDS["simt"]
    return list(check.check_gradients(backend, None, dataclasses.replace(case, **options), "float32", layer))


@pytest.mark.parametrize(
    ("layer", "options"), [("torch_capacity", {"capacity_factor": MAX}), ("torch_dynamic_capacity", {})]
)
def test_a_capacity_kept_on_the_module_fails(layer, options, monkeypatch):
    assert check.passed(rows_of_layer(layer, **options))
    monkeypatch.setattr(CapacityMoE, "_rows_of_expert", kept_once(CapacityMoE._rows_of_expert))
    assert not check.passed(rows_of_layer(layer, **options))


@pytest.mark.parametrize("loss", ["load_balancing_loss", "router_z_loss"])
@pytest.mark.parametrize("backend", ["numpy", "simt"])
@pytest.mark.parametrize("stage", ["gating", "layer"])
def test_a_loss_kept_from_the_first_step_fails(stage, backend, loss, monkeypatch):
    if (stage, backend) == ("layer", "simt"):  # whose choice and losses are one function's
        place = ("load_balancing_loss", "router_z_loss").index(loss) + 2
        alter(monkeypatch, backend, "gating.forward_with_losses", functools.partial(keeping, place))
    else:
        alter(monkeypatch, backend, f"gating.{loss}", kept_by_dtype)
    assert {row.ok for row in rows_of(stage, backend) if row.direction == "forward"} == {False}


@pytest.mark.parametrize("loss", ["load_balancing_loss", "router_z_loss"])
@pytest.mark.parametrize("layer", ["torch_layer", "torch_sequential"])
def test_a_loss_that_a_torch_layer_keeps_fails(layer, loss, monkeypatch):
    kind = SYSTEMS[comparisons.TORCH_LAYERS[layer].system]
    launch, kept = kind.launch, []

    def faulty(self, *arguments):
        result = launch(self, *arguments)
        kept.append(getattr(result, loss).detach())
        return result._replace(**{loss: kept[0] + 0.0 * getattr(result, loss)})

    monkeypatch.setattr(kind, "launch", faulty)
    forward, _ = rows_of_layer(layer)
    assert not forward.ok


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_kept_in_one_dtype_alone_fails(dtype, monkeypatch):
    module = BACKENDS["simt"].stage("combine")
    forward, faulty = module.forward, kept_once(module.forward)
    change = lambda y, *rest, **how: (faulty if str(y.dtype) == dtype else forward)(y, *rest, **how)
    monkeypatch.setattr(module, "forward", change)
    assert {row.dtype for row in rows_of("combine", "simt", "1_gather") if not row.ok} == {dtype}


@pytest.mark.parametrize("wanted", cases.GRADIENTS)
def test_a_gradient_that_is_wanted_alone_is_compared(wanted, monkeypatch):
    module = BACKENDS["numpy"].stage("layer")
    backward = module.backward

    def faulty(*arguments):
        found = backward(*arguments)
        alone = arguments[-1] == (wanted, "d_gates")
        return found._replace(**{wanted: 0 * getattr(found, wanted)}) if alone else found

    monkeypatch.setattr(module, "backward", faulty)
    rows = check.run(["layer"], ["numpy"])
    failed = {name for name in cases.GRADIENTS if any(f"({name} alone" in row.shape for row in rows if not row.ok)}
    assert failed == {wanted}


def test_a_routing_that_is_given_and_ignored_fails(monkeypatch):
    module = BACKENDS["numpy"].stage("layer")
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda *arguments: forward(*arguments[:-1], None))
    rows = check.run(["layer"], ["numpy"], option_cases())
    failed = {row.shape for row in rows if not row.ok}
    replayed = {step.shape for case in option_cases() if case.replay for step in case.steps()}
    assert failed and failed <= replayed


def test_a_backward_that_needs_what_was_overwritten_fails(monkeypatch):
    """A backward that may overwrite, and then reads what it overwrote."""

    def faulty(gradients, d_out, gates, a, b, w3, dispatch, activation, y_swi=None, overwrite=False):
        if overwrite:
            a.fill(0)
        return gradients(d_out, gates, a, b, w3, dispatch, activation, y_swi, overwrite)

    alter(monkeypatch, "numpy", "expert_down.hidden_gradients", lambda gradients: functools.partial(faulty, gradients))
    for stage in ("expert_down", "layer"):
        assert not check.passed(check.run([stage], ["numpy"], option_cases())), stage


@pytest.mark.parametrize("name", ["topk_experts", "autocast", "keep_routing"])
@pytest.mark.parametrize("layer", ["torch_layer", "torch_dynamic_capacity"])
def test_a_torch_layer_is_called_as_the_case_says(layer, name, monkeypatch):
    """The layer is called with the one option and with no other, and its rows pass."""
    kind, seen = SYSTEMS[comparisons.TORCH_LAYERS[layer].system], []
    forward = kind.forward

    def watched(self, x, topk_experts=None):
        autocast, kept = torch.is_autocast_enabled("cpu"), bool(torch_layer._tapes.get())
        seen.append({"topk_experts": topk_experts is not None, "autocast": autocast, "keep_routing": kept})
        return forward(self, x, topk_experts)

    monkeypatch.setattr(kind, "forward", watched)
    field = {"topk_experts": "replay"}.get(name, name)
    backend = BACKENDS["simt"] if layer == "torch_layer" else ORACLE
    case = dataclasses.replace(make_case(13, 8, 16, 4, 2), **{field: True})
    assert check.passed(list(check.check_gradients(backend, None, case, "bfloat16", layer)))
    assert seen[0] == {"topk_experts": False, "autocast": False, "keep_routing": False} | {name: True}


@pytest.mark.parametrize("backend", ["numpy", "numba", "simt"])
@pytest.mark.parametrize("stage", ["layer", "dispatch"])
def test_a_dispatch_kept_by_shape_fails(backend, stage, monkeypatch):
    alter(monkeypatch, backend, "dispatch.build", kept_by_shape)
    first, *_ = rows = rows_of(stage, backend)
    for row in (row for row in rows if row.dtype == first.dtype):
        assert not row.ok and row.shape.endswith("(small, second step)"), row


def test_a_dispatch_kept_by_shape_fails_in_the_torch_layer(monkeypatch):
    alter(monkeypatch, "simt", "dispatch.build", kept_by_shape)
    rows = list(check.check_gradients(BACKENDS["simt"], None, CASES[0], "float32"))
    assert len(rows) == 2 and all(not row.ok and "second step" in row.shape for row in rows)


def stale(packed, array):
    """What was packed of the first array at this address, of this shape and dtype, as of weights that never change."""
    if array is None:
        return None
    key = array.__array_interface__["data"][0], array.shape, str(array.dtype)
    return packed.setdefault(key, (array.copy(), array))[0]  # the array keeps its address its own


@pytest.mark.parametrize("backend", ["numpy", "simt"])
@pytest.mark.parametrize(
    ("function", "position"),
    [
        ("forward", "x"),
        ("forward", "weights"),
        ("forward", "topk_experts"),
        ("backward", "d_out"),
        ("backward", "weights"),
    ],
)
def test_what_a_layer_packs_by_its_address_and_shape_fails(backend, function, position, monkeypatch):
    """A step's arrays overwrite those of the step before, as an optimizer overwrites the weights."""
    module = BACKENDS[backend].stage("layer")
    right, packed = getattr(module, function), {}
    place = ["x", "weights", 2, 3, 4, 5, "topk_experts"] if function == "forward" else ["d_out", 1, "weights"]

    def faulty(*arguments, **options):
        number = place.index(position)
        given = arguments[number]
        parts = MoEWeights(*(stale(packed, part) for part in given)) if position == "weights" else stale(packed, given)
        return right(*arguments[:number], parts, *arguments[number + 1 :], **options)

    case = make_case(13, 8, 16, 4, 2)
    case = dataclasses.replace(case, replay=position == "topk_experts")
    assert check.passed(rows_of("layer", backend, case=case))
    monkeypatch.setattr(module, function, faulty)
    wrong = [
        row for row in rows_of("layer", backend, case=case) if row.direction == "backward" or function == "forward"
    ]
    assert wrong and all(not row.ok and "second step" in row.shape for row in wrong)


def stale_tensor(packed, tensor):
    """As `stale`, of a tensor; its gradient is the given one's."""
    first, _ = packed.setdefault((tensor.data_ptr(), tensor.shape), (tensor.detach().clone(), tensor))
    return tensor + (first - tensor).detach()


@pytest.mark.parametrize("what", ["x", "topk_experts", "d_out", "w1"])
@pytest.mark.parametrize("layer", ["torch_layer", "torch_sequential"])
def test_what_a_torch_layer_packs_by_its_address_and_shape_fails(layer, what, monkeypatch):
    kind, packed = SYSTEMS[comparisons.TORCH_LAYERS[layer].system], {}
    forward = kind.forward

    def faulty(self, x, topk_experts=None):
        x = stale_tensor(packed, x) if what == "x" else x
        topk_experts = stale_tensor(packed, topk_experts) if what == "topk_experts" else topk_experts
        if what == "w1":
            self.w1.data.copy_(stale_tensor(packed, self.w1.data))
        result = forward(self, x, topk_experts)
        if what == "d_out":
            result.out.register_hook(lambda d_out: stale_tensor(packed, d_out))
        return result

    options = {"replay": what == "topk_experts"}
    assert check.passed(rows_of_layer(layer, **options))
    monkeypatch.setattr(kind, "forward", faulty)
    found = rows_of_layer(layer, **options)
    assert [row.ok for row in found] == [what == "d_out", False]
    assert all("second step" in row.shape for row in found if not row.ok)


class OnDevice:
    """An array that is filled as one of CuPy is."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array.copy(), array.shape, array.dtype

    def set(self, array):
        self.array[...] = array


@pytest.mark.parametrize("kind", [np.asarray, OnDevice])
def test_the_memory_of_steps_is_overwritten_in_the_order_in_which_arrays_come(kind):
    memory = StepMemory(kind)
    numbers = lambda held: (held if kind is np.asarray else held.array).tolist()
    one, two, wide = np.zeros(2), np.ones(2), np.ones(3)
    first = [memory.place(array) for array in (one, two, one)]
    assert first[0] is first[2] is not first[1] and [numbers(held) for held in first] == [[0, 0], [1, 1], [0, 0]]
    memory.begin_step()
    assert memory.place(two) is first[0] and numbers(first[0]) == [1, 1]
    assert memory.place(wide) is not first[1] and numbers(first[1]) == [1, 1]  # another shape has other memory
    assert one.tolist() == [0, 0]  # what the caller has stays as it is


def test_an_unavailable_backend_is_listed_and_never_ok(monkeypatch):
    absent = dataclasses.replace(BACKENDS["cuda"], status=lambda: Status(False, "no CUDA device"))
    monkeypatch.setitem(check.BACKENDS, "cuda", absent)
    rows = check.run(["dispatch"], ["numpy", "cuda"], CASES)
    assert [(row.backend, row.available, row.ok) for row in rows][-1] == ("cuda", False, False)
    assert check.passed(rows)
    assert not check.passed(check.run(["dispatch"], ["cuda"], CASES)), "nothing was checked"
    assert not check.passed([])


def test_a_version_that_needs_another_gpu_is_left_out_with_a_word(monkeypatch):
    def check_as_an_a100(self, file):
        KernelSource.read(file, {}).check_gpu((8, 0), "NVIDIA A100")

    monkeypatch.setattr(SimtExecutor, "check", check_as_an_a100)
    rows = check.run(["expert_down", "layer"], ["simt"], [make_case(33, 8, 16, 4, 2)])
    (down, layer) = [row for row in rows if row.version == "7_persistent"]
    needs = "needs compute capability 9.0 exactly, but NVIDIA A100 has 8.0"
    assert down.shape == layer.shape == f"expert_down/7_persistent.cu {needs}"
    assert not (down.available or down.ok or layer.available or layer.ok)
    assert check.passed(rows) and {row.version for row in rows if row.ok} >= {"1_naive", "2_tiled", "3_mma"}
    assert str(verdict(rows)).endswith("; not for this GPU: simt 7_persistent")


def test_a_failure_of_one_row_fails_the_whole():
    good = Row("dispatch", "forward", "numpy", None, "int32", "L=1", 0.0, 0.0, True, True)
    assert check.passed([good])
    assert not check.passed([good, dataclasses.replace(good, error=1.0, ok=False)])


def test_rows_are_json_even_with_nan():
    row = Row("layer", "forward", "numpy", None, "float64", "L=1", float("nan"), 1e-12, False, True)
    text = json.dumps(row.as_dict(), allow_nan=False)
    assert list(json.loads(text)) == [
        "stage", "direction", "backend", "version", "dtype", "shape", "error", "bound", "ok", "available"
    ]  # fmt: skip


def test_the_simulator_gets_small_cases_only(monkeypatch):
    monkeypatch.setattr("moeblaze_ref.backends.numba_cuda.runtime.EXECUTOR", "simulator")
    in_reach = check.in_reach(BACKENDS["numba"], "layer", standard_cases())
    assert 5 < len(in_reach) and all(case.L * case.k <= check.SIMULATOR_ROWS for case in in_reach)
    monkeypatch.setattr("moeblaze_ref.backends.numba_cuda.runtime.EXECUTOR", "cuda")
    assert len(check.in_reach(BACKENDS["numba"], "layer", standard_cases())) == len(standard_cases())


def cases_on_a_gpu(monkeypatch, version, multiprocessors):
    """What block_sparse is checked with on a GPU of this size."""
    monkeypatch.setattr(check, "multiprocessors", lambda: multiprocessors)
    return check.chosen(BACKENDS["cuda"], "block_sparse", version, standard_cases() + option_cases())


def test_every_version_is_checked_in_blocks_of_megablocks_own_size(monkeypatch):
    monkeypatch.setattr("moeblaze_ref.backends.numba_cuda.runtime.EXECUTOR", "cuda")
    monkeypatch.setattr(check, "multiprocessors", lambda: 132)
    for backend in BACKENDS.values():
        for version in backend.versions("block_sparse"):
            cases = check.chosen(backend, "block_sparse", version, standard_cases())
            blocks = {comparisons.block_of(case) for case in cases if case.L}
            assert blocks == ({BLOCK, 256} if version == HOPPER else {8, BLOCK, 136, 256}), (backend.name, version)


@pytest.mark.parametrize("multiprocessors", [16, 108, 132, 148])
def test_blocks_that_stay_are_given_a_second_tile_of_every_product(multiprocessors, monkeypatch):
    largest = max(cases_on_a_gpu(monkeypatch, HOPPER, multiprocessors), key=lambda case: case.L * case.k)
    (_, d, h), E = largest.weights.w1.shape, largest.E
    bins = block_sparse.pad(build_by_sort(largest.topk_experts, E), BLOCK)
    tiles = {"sdd": bins.P // HOPPER_BLOCK * -(-h // HOPPER_COLUMNS)}
    tiles["dsd"] = bins.P // HOPPER_BLOCK * -(-d // HOPPER_COLUMNS)
    tiles["dds, and dsd of the transpose"] = E * h // HOPPER_BLOCK * -(-d // HOPPER_COLUMNS)
    assert min(tiles.values()) > multiprocessors, tiles
    assert min(d, h) > 4 * 64, "deeper than the stages of a ring"


def test_a_kernel_whose_blocks_leave_after_a_tile_fails_on_a_gpu_of_any_size(monkeypatch):
    file = file_of("block_sparse", HOPPER)
    monkeypatch.setattr(SimtExecutor, "multiprocessors", 8)
    largest = max(cases_on_a_gpu(monkeypatch, HOPPER, 8), key=lambda case: case.L * case.k)
    plant(monkeypatch, file, with_fault(file, "number += gridDim.x;", "number = 1 << 30;"))
    structures, *rows = check.check_of("block_sparse")(BACKENDS["simt"], HOPPER, largest)
    found = {(row.dtype, row.direction) for row in rows}
    assert structures.ok and not any(row.ok for row in rows)
    assert found == {*itertools.product(("float16", "bfloat16"), ("forward", "backward"))}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check.plan(["dispach"], ["numpy"]), "unknown stage 'dispach'. Did you mean 'dispatch'"),
        (lambda: check.plan(["dispatch"], ["nunpy"]), "unknown backend 'nunpy'. Did you mean 'numpy'"),
        (lambda: BACKENDS["simt"].stage("layers"), "unknown stage of backend simt 'layers'. Did you mean 'layer'"),
    ],
)
def test_unknown_names_propose_the_nearest(call, message):
    with pytest.raises(ValueError, match=message):
        call()
