"""Rows that begin with a sector of the L2 cache: how 7_persistent lays out and copies rows of odd widths."""

import weakref

import numpy as np
import pytest
import torch
from expert_stages import every_fault
from planted import Planted

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import expert_down, expert_up, gemm, layer, tiles
from moeblaze_ref.core.arrays import pitch_of, whole_rows
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.structures import HIDDEN
from moeblaze_ref.memory.accounting import account, step_account
from moeblaze_ref.runtime.launch_plan.recorder import Recorder
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.torch_executor import TorchExecutor
from moeblaze_ref.systems.layer import MoEWeights
from moeblaze_ref.verify.cases import make_case, relative_error

L, d, h, E, k = 50, 72, 136, 4, 2  # neither width is a multiple of 16


def problem(dtype="bfloat16", gated=True):
    rng = np.random.default_rng(0)

    def random(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(dtype)

    w1, w2, w3 = random(E, d, h), random(E, d, h), random(E, h, d)
    return random(L, d), MoEWeights(random(d, E), w1, w2 if gated else None, w3), random(L, d)


def step(x, weights, d_out, executor=None, policy="minimal", activation="swiglu", back="7_persistent"):
    """The output and every gradient, and what the forward kept."""
    forward = layer.forward(x, weights, k, activation, policy, executor=executor, version="7_persistent")
    gradients = layer.backward(d_out, forward.saved, weights, executor=executor, version=back)
    return [forward.out, *(found for found in gradients if found is not None)], forward.saved.intermediates


@pytest.fixture
def copying(monkeypatch):
    """Tokens and weights are copied however few rows read them, and rows of y and of d_x exist in parts."""
    monkeypatch.setattr(tiles, "LONG_GROUP", 0)
    monkeypatch.setattr(gemm, "COPIED_FOR", 0)
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", 0)


def without_sectors(monkeypatch):
    """Rows begin where the width lets them, as in the other versions."""
    monkeypatch.setattr(gemm, "SECTOR", gemm.ALIGNMENT)


@pytest.mark.parametrize("policy", ["conventional", "paper", "minimal", "inputs"])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_gaps_and_copies_change_no_bit(copying, monkeypatch, activation, policy):
    given = *problem(gated=activation == "swiglu"), SimtExecutor(seed=1), policy, activation
    with_gaps, kept = step(*given)
    assert all(pitch_of(kept[name]) == 144 for name in (*HIDDEN, "act_a") if name in kept)
    without_sectors(monkeypatch)
    plain, kept = step(*given)
    assert all(array.flags.c_contiguous for array in kept.values())
    assert len(plain) == len(with_gaps) and all(map(np.array_equal, with_gaps, plain))


FAULTS = {
    "expert_up": {
        "hidden rows without gaps": ("* pitch + column,", "* h + column,"),
        "tokens without gaps": ("rows(x, d_pitch, ", "rows(x, d, "),
        "gathered rows of a gradient without gaps": ("x, d, d_pitch, d_hidden_map", "x, d, d, d_hidden_map"),
        "hidden rows of a gradient without gaps": ("d_hidden, h, h_pitch, ", "d_hidden, h, h, "),
    },
    "expert_down": {
        "hidden rows without gaps": ("h, h_pitch, h_pitch,", "h, h, h_pitch,"),
        "rows of gated_y without gaps": ("h, h_pitch, h_pitch,", "h, h_pitch, h,"),
        "tokens without gaps": ("rows(d_out, d_pitch, ", "rows(d_out, d, "),
        "gathered rows of a gradient without gaps": ("d_out, d, d_pitch, ", "d_out, d, d, "),
        "hidden rows of a gradient without gaps": ("gated_y, h, h_pitch, ", "gated_y, h, h, "),
    },
}


@pytest.mark.usefixtures("copying")
@every_fault(FAULTS)
def test_a_planted_fault_of_pitches_shows(file, change):
    given = problem()
    right, _ = step(*given)
    try:
        found, _ = step(*given, Planted(f"{file}/7_persistent.cu", *change, seed=1))
    except KernelFault:
        return
    assert not all(map(np.array_equal, found, right))


def sectors(monkeypatch):
    """Sectors that the threads of each kernel ask for, of the gathered tokens and of hidden rows."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        step(*problem(), executor)
    monkeypatch.undo()
    return {
        (launch.kernel, name): traffic.read_sectors + traffic.written_sectors
        for launch in launches
        for name, traffic in launch.buffers.items()
    }


def test_rows_that_begin_with_a_sector_take_fewer(monkeypatch):
    monkeypatch.setattr(tiles, "LONG_GROUP", 0)
    found = sectors(monkeypatch)
    without_sectors(monkeypatch)
    plain = sectors(monkeypatch)
    rows = {"expert_up": ("x", "a", "b", "y_swi"), "expert_down": ("y_swi",), "d_hidden": ("d_out",)}
    for kernel, names in (rows | {"d_x_rows": ("d_a", "d_b")}).items():
        assert all(found[kernel, name] < plain[kernel, name] for name in names), kernel


@pytest.mark.parametrize(
    ("rows", "long", "copied"), [(4 * E * d, 1, {"x", "w1"}), (4 * E * d - 1, 1, {"x"}), (0, 2**20, set())]
)
def test_what_is_copied(monkeypatch, rows, long, copied):
    class Routed:
        pass

    dispatch = Routed()
    dispatch.R, dispatch.E = rows, E
    monkeypatch.setattr(tiles, "LONG_GROUP", long)
    x, weights, _ = problem()
    for version in (gemm.HOPPER, "3_mma"):
        tokens = gemm.tokens_in_sectors(SimtExecutor(), version, x, dispatch)
        w1 = gemm.weights_in_sectors(SimtExecutor(), version, weights.w1, dispatch)
        expected = copied if version == gemm.HOPPER else set()
        assert {name for name, one in (("x", tokens is not x), ("w1", w1 is not weights.w1)) if one} == expected
        assert np.array_equal(tokens, x) and np.array_equal(w1, weights.w1)


def test_nothing_is_copied_that_begins_with_a_sector(copying):
    case = make_case(9, 32, 48, 2, 2).astype("bfloat16")
    dispatch = build_by_sort(case.topk_experts, case.E)
    _, w1, w2, _ = case.weights
    a, b, y_swi = expert_up.forward(case.x, w1, w2, dispatch, "swiglu", version="7_persistent")
    assert all(array.flags.c_contiguous for array in (a, b, y_swi))
    assert gemm.tokens_in_sectors(SimtExecutor(), gemm.HOPPER, case.x, dispatch) is case.x
    assert gemm.weights_in_sectors(SimtExecutor(), gemm.HOPPER, w1, dispatch) is w1


def test_an_older_version_takes_what_7_persistent_kept():
    x, weights, d_out = problem()
    right, _ = step(x, weights, d_out)
    found, _ = step(x, weights, d_out, back="3_mma")
    assert all(relative_error(one, other) < 2**-6 for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_rows_that_a_hook_has_saved_without_gaps(name, overwrite):
    x, weights, d_out = problem()
    right, _ = step(x, weights, d_out)
    forward = layer.forward(x, weights, k, "swiglu", "minimal", version="7_persistent")
    kept = forward.saved.intermediates
    kept[name] = np.ascontiguousarray(kept[name])
    assert len({pitch_of(array) for array in kept.values()}) == 2
    found = layer.backward(d_out, forward.saved, weights, overwrite=overwrite, version="7_persistent")
    assert all(map(np.array_equal, [forward.out, *found], right))


def test_rows_and_their_gaps():
    whole = np.arange(12.0).reshape(3, 4)
    for array in (whole, torch.from_numpy(whole)):
        rows = array[:, :3]
        assert pitch_of(rows) == 4 and np.array_equal(whole_rows(rows), whole)
        assert whole_rows(array) is array


def test_the_memory_of_rows_with_gaps_can_be_freed_though_autograd_holds_them():
    rows = gemm.empty_rows(TorchExecutor(torch.device("cpu")), gemm.HOPPER, (5, 72), "bfloat16")
    assert pitch_of(rows) == 80 and whole_rows(rows).shape == (5, 80)
    memory = weakref.ref(rows.untyped_storage())
    rows.data = rows.new_empty(0)
    assert memory() is None


def test_rows_that_no_kernel_can_take_stay_as_they_are():
    whole = np.zeros((6, 24), np.float16)
    for array in (whole, torch.from_numpy(whole.copy())):
        beyond, crooked = array[:, 8:], array[:, ::2]  # the gap behind its last row would lie beyond the memory
        narrow = array[:, :20].reshape(-1)[:117].reshape(9, 13)[:, :8] if array is whole else array.T
        assert all(whole_rows(rows) is rows for rows in (beyond, crooked, narrow))
        assert whole_rows(array[:, :16]).shape == (6, 24)
        assert whole_rows(array[:5, 8:]).shape == (5, 24)


def test_a_hidden_tensor_that_is_laid_out_otherwise_is_refused():
    case = make_case(9, 24, 40, 2, 2).astype("bfloat16")
    dispatch = build_by_sort(case.topk_experts, case.E)
    hidden = np.asfortranarray(np.ones((dispatch.R, 40), case.x.dtype))
    with pytest.raises(ValueError, match="is not C-contiguous"):
        expert_up.weight_gradient(hidden, case.x, dispatch, version="7_persistent")


@pytest.mark.parametrize("version", [version for version in gemm.VERSIONS if version != gemm.HOPPER])
def test_an_older_version_refuses_tokens_with_gaps(version):
    dtype = gemm.VERSIONS[version][-1]
    case = make_case(9, 24, 40, 2, 2).astype(dtype)
    dispatch, (_, w1, w2, w3) = build_by_sort(case.topk_experts, case.E), case.weights
    wide = np.full((9, 48), 7, case.x.dtype)
    wide[:, :24] = case.x
    tokens, hidden, gates = wide[:, :24], np.ones((dispatch.R, 40), case.x.dtype), np.ones((9, 2), np.float32)
    for call in (
        lambda: expert_up.forward(tokens, w1, w2, dispatch, "swiglu", version=version),
        lambda: expert_up.weight_gradient(hidden, tokens, dispatch, version=version),
        lambda: expert_down.hidden_gradients(tokens, gates, hidden, hidden, w3, dispatch, "swiglu", version=version),
    ):
        with pytest.raises(ValueError, match="is not C-contiguous"):
            call()


def test_7_persistent_takes_tokens_with_gaps():
    x, weights, _ = problem()
    dispatch = build_by_sort(np.stack([np.arange(L) % E, (np.arange(L) + 1) % E], 1).astype(np.int32), E)
    wide = np.full((L, d + 16), np.nan, x.dtype)
    wide[:, :d] = x
    right, found = (
        expert_up.forward(tokens, weights.w1, weights.w2, dispatch, "swiglu", version="7_persistent")
        for tokens in (x, wide[:, :d])
    )
    assert all(map(np.array_equal, right, found))


class OnHopper(SimtExecutor):
    capability = (9, 0)


def test_the_papers_forward_takes_rows_with_gaps():
    x, weights, _ = problem()
    right = layer.forward(x, weights, k, "swiglu", "minimal", version="as_printed")
    found = layer.forward(x, weights, k, "swiglu", "minimal", executor=OnHopper(), version="as_printed")
    assert pitch_of(found.saved.intermediates["a"]) == 144 and relative_error(found.out, right.out) < 2**-6


def test_nothing_may_be_stored():
    x, weights, _ = problem()
    dispatch = build_by_sort(np.zeros((L, 1), np.int32), E)
    given = x, weights.w1, weights.w2, dispatch, "swiglu", ()
    assert expert_up.forward(*given, version="7_persistent") == (None, None, None)


def test_a_single_row_has_no_gap():
    for row in (np.arange(6.0)[None, :4], torch.arange(6.0)[None, :4], torch.arange(8.0).as_strided((1, 4), (1, 1))):
        assert pitch_of(row) == 4 and whole_rows(row) is row


@pytest.mark.parametrize("width", [8, 72, 75])
def test_a_copy_of_a_tensor_has_its_elements(width):
    source = torch.randn(3, 5, width).bfloat16()
    target = torch.full((3, 5, 80), 7.0).bfloat16()
    TorchExecutor(torch.device("cpu")).assign(target[..., :width], source)
    assert torch.equal(target[..., :width], source) and (target[..., width:] == 7).all()


@pytest.mark.parametrize(
    "source", [torch.randn(364).bfloat16()[4:].view(5, 72), torch.randn(5, 144).bfloat16()[:, ::2]]
)
def test_a_copy_of_what_cannot_be_viewed_in_wide_elements(source):
    target = torch.zeros(5, 80).bfloat16()[:, :72]
    TorchExecutor(torch.device("cpu")).assign(target, source)
    assert torch.equal(target, source)


def test_a_plan_knows_the_memory_of_rows_with_gaps():
    rows, other = torch.zeros(10, 144)[:, :136], torch.zeros(4)
    recorder = Recorder([rows, other])
    assert [buffer.nbytes for buffer in recorder.buffers] == [(9 * 144 + 136) * 4, 16]


def test_the_account_has_the_gaps():
    config = MoEConfig(L=1000, d=64, h=136, E=4, k=2)
    gaps = 16 * config.R
    step_of = {width: step_account(config.replace(h=width), "minimal") for width in (128, 136, 144)}
    rows = {tensor.name: tensor for tensor in step_of[136].tensors}
    wider = {tensor.name: tensor.bytes for tensor in step_of[144].tensors}
    assert all(rows[name].bytes == wider[name] for name in ("a", "b", "y_swi", "gated_y"))
    assert rows["a"].bytes == 2 * config.R * config.h + gaps and step_of[136].symbols["H"] == 144
    assert "H" not in step_of[128].symbols
    assert rows["a"].bytes - gaps == 2 * 1000 * 2 * 136
    older = {tensor.name: tensor.bytes for tensor in step_account(config, "minimal", "3_mma").tensors}
    assert older["a"] == 2 * config.R * config.h
    notes = [note for note in account(config, "moeblaze", "minimal").notes if "between the rows" in note]
    assert notes == ["moeblaze: 7_persistent leaves 16 bytes between the rows of a, b and y_swi, not counted here"]
