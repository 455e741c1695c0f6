"""The pictures that a reader moves: the stepper through a launch, and the routing by hand."""

import numpy as np
import pytest
from ipywidgets import Button
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba

from moeblaze_ref.course.notebook import controls, explorer, pictures, stepper
from moeblaze_ref.course.notebook.explorer import NO_SLOT, Routing, RoutingGrid
from moeblaze_ref.course.notebook.stepper import Stepper, record_dispatch, sentence
from moeblaze_ref.runtime.record import RecordingExecutor
from moeblaze_ref.runtime.simt.executor import KernelFault
from moeblaze_ref.verify.cases import GOLDEN_DISPATCH, GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS

FIRST = "block 0, warp 0"
WALK = """extern "C" __global__ void walk(const int* x, int* out, int stride) {
    __shared__ int tile[32 * 32];
    const int lane = threadIdx.x;
    tile[lane * stride] = x[lane * stride];
    if (lane < 4) out[lane] = tile[lane];
    out[lane] = 1;
}"""


def walk(stride, size=1024, executor=None):
    executor = executor or RecordingExecutor()
    x, out = np.zeros(size, np.int32), np.zeros(32, np.int32)
    executor.load("walk.cu", text=WALK).launch("walk", grid=1, block=32, x=x, out=out, stride=stride)
    return executor.launches[-1]


def drawn(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def words(axes):
    return [text.get_text() for text in axes.texts]


def cells(axes):
    """The cells of a panel: of memory those that stay, those that are moved unasked, and those that are asked for."""
    return [found for found in axes.collections if isinstance(found, PatchCollection)]


def colors(found):
    return [tuple(color) for color in found.get_facecolor()]


# ---- the stepper -----------------------------------------------------------------------------------


def test_a_sentence_says_what_a_step_costs():
    load, store, *_ = walk(stride=1).steps()
    assert sentence(load) == "load: 32 lanes ask for 128 bytes of x; 4 sectors (128 bytes) in 1 line: coalesced"
    assert sentence(store) == "store: 32 lanes ask for 128 bytes of tile; 1 pass over the banks, no bank conflict"
    load, store, *_ = walk(stride=16).steps()
    assert sentence(load).endswith("32 sectors (1,024 bytes) in 16 lines, where 4 would do: 8 times as many")
    assert sentence(store).endswith("16 passes over the banks, 15 of them bank conflicts")


def test_a_wait_is_no_access():
    launched = record_dispatch(L=40, E=4, k=2)["dense_map"]
    (wait,) = [step for step in launched.steps() if not step.is_access]
    assert sentence(wait) == "__syncwarp: 32 lanes"
    number = [step.operation for step in launched.steps()].index("__syncwarp") + 1
    memory = drawn(Stepper(launched).picture(FIRST, number)).axes[2]
    assert memory.get_title(loc="left") == "no array is touched in this step" and not memory.texts


def test_the_source_shows_where_lanes_are():
    """In the branch four lanes are at its line, and the others at the next one."""
    record = walk(stride=1)
    lines = [step.frame.line for step in record.steps()]
    source, lanes, _ = drawn(Stepper(record).picture(FIRST, lines.index(5) + 1)).axes
    assert source.get_title(loc="left") == "walk.cu, line 5, in walk"
    assert [word for word in words(source) if word.endswith(" lanes")] == ["4 lanes", "28 lanes"]
    below = {int(text.get_position()[0]): text.get_text() for text in lanes.texts if 1 < text.get_position()[1] < 2}
    assert [below[lane] for lane in range(32)] == ["5"] * 4 + ["6"] * 28
    shown = [word for word in words(source) if not word.endswith(" lanes")]
    assert shown == [f"{number:4d}  {line}" for number, line in enumerate(WALK.splitlines(), start=1)]


def test_cells_have_the_colour_of_their_sector():
    record = walk(stride=4)
    _, lanes, memory = drawn(Stepper(record).picture(FIRST, 1)).axes
    stay, moved, asked = cells(memory)
    assert [len(part.get_paths()) for part in (stay, moved, asked)] == [0, 96, 32], "four whole lines for a quarter"
    sectors = [to_rgba(stepper.COLORS[sector % len(stepper.COLORS)]) for sector in range(16)]
    assert colors(asked) == [color for color in sectors for _ in range(2)] == colors(cells(lanes)[0])
    assert moved.get_hatch() and not stay.get_hatch() and not asked.get_hatch()
    assert {f"x[{32 * row}]" for row in range(4)} | set(map(str, range(32))) <= set(words(memory))


def test_banks_in_conflict_are_marked():
    memory = drawn(Stepper(walk(stride=16)).picture(FIRST, 2)).axes[2]
    assert [text.get_text() for text in memory.texts if text.get_weight() == "bold"] == ["0", "16"]
    stay, moved, asked = cells(memory)
    assert [len(part.get_paths()) for part in (stay, moved, asked)] == [15 * 32, 0, 32]
    passes = [to_rgba(stepper.COLORS[number % len(stepper.COLORS)]) for number in range(16)]
    assert colors(asked) == [color for color in passes for _ in range(2)]
    assert f"passes, numbered above, have {len(set(passes))} colours by turns" in memory.get_title(loc="left")
    none = drawn(Stepper(walk(stride=1)).picture(FIRST, 2)).axes[2]
    assert not [text for text in none.texts if text.get_weight() == "bold"]


@pytest.mark.parametrize(("step", "name"), [(1, "asks for sector"), (2, "served in pass")])
def test_sectors_and_passes_are_numbered_below_the_lanes(step, name):
    """There are more of them than colours."""
    lanes = drawn(Stepper(walk(stride=16)).picture(FIRST, step)).axes[1]
    below = [text.get_text() for text in lanes.texts if text.get_position()[1] > 2]
    each = range(1, 33) if step == 1 else np.repeat(range(1, 17), 2)
    assert below == [name, *map(str, each)] and len(set(each)) > len(stepper.COLORS)


def test_lanes_that_share_a_word_are_named_together():
    memory = drawn(Stepper(walk(stride=0)).picture(FIRST, 1)).axes[2]
    assert "0-31" in words(memory)
    assert stepper._who([3]) == "3" and stepper._who([4, 5, 6]) == "4-6" and stepper._who([0, 2]) == "2x"


def test_the_picture_says_itself_in_words():
    said = pictures.alt_text(drawn(Stepper(walk(stride=1)).picture(FIRST, 1)))
    assert said.startswith("step 1 of ") and "4 sectors (128 bytes) in 1 line: coalesced" in said and "line 4" in said
    assert "threadIdx" not in said, "the source itself is too long to be read out"


def test_the_limit_and_the_fault_stand_below_the_picture():
    short = drawn(Stepper(walk(1, executor=RecordingExecutor(limit=40))).picture(FIRST, 1))
    assert any("only the first 40 of" in text.get_text() for text in short.texts)
    executor = RecordingExecutor()
    with pytest.raises(KernelFault):
        walk(1, size=24, executor=executor)
    steps = Stepper(executor.launches[0])
    figure = drawn(steps.picture(FIRST, 1))
    assert any("out-of-bounds read of 4 bytes at byte offset 96 of x" in text.get_text() for text in figure.texts)
    assert sentence(steps.record.steps()[0]).endswith("bytes of x and no array; lane 24 is out of bounds")
    lanes = cells(figure.axes[1])[0]
    assert [lane for lane, color in enumerate(colors(lanes)) if color == to_rgba(stepper.VERMILLION)] == [24]


def test_another_warp_has_its_own_steps(monkeypatch):
    monkeypatch.setattr(controls, "display", lambda widget: None)
    record = record_dispatch(L=40, E=4, k=2)["expert_lengths"]
    steps = Stepper(record)
    moved = steps.controls()
    warp, step = moved["warp"], moved["step"]
    assert list(warp.options) == [f"block {expert}, warp 0" for expert in range(4)]
    assert step.max == len(record.steps(0, 0))
    step.max = 10_000
    warp.value = "block 3, warp 0"
    assert step.max == len(record.steps(3, 0))


# ---- the routing by hand ------------------------------------------------------------------------------


def grid():
    return RoutingGrid(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)


def buttons(shown):
    return [cell for cell in shown.children[-1].children if isinstance(cell, Button)]


def test_a_click_takes_the_place_of_the_oldest_choice():
    shown = grid()
    assert [button.description for button in buttons(shown)[:4]] == [NO_SLOT, NO_SLOT, "0", "1"]
    buttons(shown)[0].click()  # token 0 had experts 2 and 3
    assert shown.value.topk_experts[0] == (3, 0)
    assert [button.description for button in buttons(shown)[:4]] == ["1", NO_SLOT, NO_SLOT, "0"]
    before = shown.value
    buttons(shown)[3].click()
    assert shown.value == before, "it has this expert already"
    assert shown.value.topk_experts[1:] == tuple(map(tuple, GOLDEN_TOPK_EXPERTS[1:].tolist()))


def test_slots_are_black_on_light_buttons_on_a_dark_page_too():
    assert {button.style.text_color for button in buttons(grid())} == {"black"}


def test_whoever_watches_is_told():
    shown, seen = grid(), []
    shown.observe(lambda change: seen.append(change.new), "value")
    shown.choose(token=4, expert=1)
    assert [routing.topk_experts[4] for routing in seen] == [(3, 1)]


def test_sliders_draw_anew():
    shown = grid()
    for slider, value in ((shown._tokens, 8), (shown._experts, 2), (shown._skew, 3.0)):
        slider.value = value
    assert shown.value.E == 2 and np.shape(shown.value.topk_experts) == (8, 2) and shown._k.max == 2
    shown._k.value, shown._experts.value = 1, 6
    chosen = np.ravel(shown.value.topk_experts)
    assert np.bincount(chosen)[0] > 4, "with much skew most tokens want the first expert"
    assert len(buttons(shown)) == 8 * 6


def test_the_picture_holds_the_structures_and_the_rows_of_every_system():
    arrays, bins = drawn(explorer.routing_picture(grid().value, capacity_factor=0.8, block=4)).axes
    numbers = [int(word) for word in words(arrays) if word.isdigit()]
    routed = GOLDEN_DISPATCH
    for array in routed.arrays().values():
        text = " ".join(map(str, array.tolist()))
        assert text in " ".join(map(str, numbers))
    mapped = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]  # each token under both of its experts
    assert numbers[20:30] == mapped and words(arrays)[0] == "R = 10 routed rows of 5 tokens and 4 experts"
    said = [word for word in words(bins) if ":" in word]
    assert said == [
        "capacity: E*C = 4 * 2 rows; 2 dropped, 0 padding",
        "MegaBlocks: P = 16 rows in blocks of 4; 6 padding",
        "MoEBlaze: no buffer; R = 10 indices into x",
    ]


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 6, 3)])
def test_the_smallest_and_the_largest_routing_are_drawn(shape):
    L, E, k = shape
    choices = tuple(tuple((token + slot) % E for slot in range(k)) for token in range(L))
    arrays, bins = drawn(explorer.routing_picture(Routing(choices, E), 1.0, 2)).axes
    assert words(arrays)[0] == f"R = {L * k} routed rows of {L} tokens and {E} experts"
    assert f"MoEBlaze: no buffer; R = {L * k} indices into x" in words(bins)


# ---- what there is not ---------------------------------------------------------------------------------


REFUSED = [
    (lambda: Stepper(walk(1)).picture("block 0, warp 9", 1), "unknown warp 'block 0, warp 9'. Did you mean 'block 0,"),
    (lambda: Stepper(walk(1)).picture(FIRST, 99), "step is 99, but it must be 1..5"),
    (lambda: Stepper(walk(1, executor=RecordingExecutor(block=3))), "kernel walk has no records"),
    (lambda: grid().choose(token=5, expert=0), "token is 5, but it must be 0..4"),
    (lambda: grid().choose(token=0, expert=4), "expert is 4"),
    (lambda: RoutingGrid(np.zeros((9, 1), np.int32), 2), "tokens is 9, but it must be 1..8"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_there_is_not_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()
