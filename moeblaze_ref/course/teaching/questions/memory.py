"""Questions of notebooks 00 and 05: what is kept, and what is computed again."""

from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.teaching.question import Choice, Number, Question
from moeblaze_ref.memory.accounting import account

WALL, POLICIES = "00_memory_wall", "05_smart_checkpoint"
CONF1, CONF3, CONF4 = (preset(name).config for name in ("conf1", "conf3", "conf4"))
FIRST, SECOND = (
    "The first wall: the routed-token buffer",
    "The second wall: four tensors between the two matrix products",
)


def _bytes(config, *names):
    sizes = {tensor.name: tensor.bytes for tensor in account(config, "conventional").tensors}
    return sum(sizes[name] for name in names)


def _walls():
    return _bytes(CONF4, "a", "act_a", "b", "y_swi") / _bytes(CONF4, "routed_x")


def _freed(config):
    kept = [account(config, "moeblaze", policy).kept_bytes for policy in ("minimal", "inputs")]
    return kept[0] - kept[1]


def _price():
    return roofline.cost_of("expert_up", CONF1).flops / _freed(CONF1)


def _more_flops():
    return 100 * roofline.cost_of("expert_up", CONF4).flops / roofline.layer_flops(CONF4)


QUESTIONS: tuple[Question, ...] = (
    Number(
        name="routed-copy",
        notebook=WALL,
        heading=FIRST,
        paper="MoEBlaze, section 2.1",
        ask="A layer has `L = 32_768` tokens, `d = 2048` and `k = 4`, in bfloat16. How large is its routed copy of "
        "`x`?",
        unit="bytes",
        compute=lambda: _bytes(CONF4, "routed_x"),
        computed_by="moeblaze_ref.memory.accounting.account",
        why="The copy has `L * k` rows of `d` elements, 2 bytes each.",
        slips={
            134_217_728: "That is `x` itself, which has one row for each token.",
            268_435_456: "That counts elements; an element of bfloat16 has 2 bytes.",
        },
    ),
    Number(
        name="two-walls",
        notebook=WALL,
        heading=SECOND,
        paper="MoEBlaze, section 2.2",
        ask="The experts of a SwiGLU layer in plain torch have `h = 4 * d`. How many times as large as the routed "
        "copy are the four kept tensors between the products, together?",
        unit="times",
        compute=_walls,
        computed_by="moeblaze_ref.memory.accounting.account",
        why="Each of the four tensors has as many rows as the copy, and `h / d = 4` times its columns.",
        slips={
            4: "That is one of the four tensors.",
            12: "That counts three tensors: plain torch also keeps `silu(a)`.",
        },
    ),
    Choice(
        name="more-experts",
        notebook=WALL,
        heading="Move the walls",
        ask="You double the number of experts `E` and leave `L`, `d`, `h` and `k` as they are. What becomes of the "
        "two memory walls of activations?",
        right="Neither changes.",
        wrong={
            "Both double.": "A token still goes through `k` experts, so the number of routed rows is the same.",
            "The first doubles, the second stays.": "The routed copy has `L * k` rows, whatever `E` is.",
            "Both become half, because each expert gets fewer rows.": "The rows of all experts together stay `L * k`.",
        },
        why="Both walls have `L * k` rows. More experts cost weights, router logits and a larger dense map.",
    ),
    Choice(
        name="two-printed-sizes",
        notebook=WALL,
        heading="What the paper prints",
        paper="MoEBlaze, sections 2.1 and 2.2",
        ask="The paper prints about 94 GB for the routed buffer and about 98 GB for an intermediate of the same "
        "example. What do its own two formulas give?",
        right="The same number for both, 98.3 GB, because `k * d = h` there.",
        wrong={
            "94 GB is the same number in GiB.": "98.3 GB are 91.6 GiB, so neither unit gives 94.",
            "94 GB leaves out the factor `k`.": "Without `k = 4` the buffer would be a quarter of it, 24.6 GB.",
            "Both are right: `d` and `h` differ there.": "They differ by the factor `k`, which the buffer has instead.",
        },
        why="`2 * L * k * d` and `2 * L * h` are equal if `k * d = h`, as for `k = 4`, `d = 6144`, `h = 24576`.",
    ),
    Number(
        name="kept-minimal",
        notebook=POLICIES,
        heading="The formula",
        ask="A gated layer in bfloat16 has `L = 65_536`, `d = 1024`, `h = 4096`, `E = 16` and `k = 4`. How many "
        "bytes does policy `minimal` keep, gates in float32 and indices in int32 included?",
        unit="bytes",
        compute=lambda: account(CONF3, "moeblaze", "minimal").kept_bytes,
        computed_by="moeblaze_ref.memory.accounting.account",
        why="It keeps `x`, `a`, `b`, a gate of 4 bytes and 12 bytes of indices for each row, and `E + 1` offsets.",
        slips={
            6_580_863_044: "That is policy `paper`, which keeps `y_swi` too.",
            4_294_967_296: "Those are `a` and `b` alone, without `x`, gates and indices.",
        },
    ),
    Number(
        name="price-of-a-byte",
        notebook=POLICIES,
        heading="The price of a byte",
        ask="A layer in bfloat16 has `d = 512`. Policy `inputs` computes `a` and `b` again, and `minimal` keeps "
        "them. How many FLOPs does each freed byte cost?",
        unit="FLOPs",
        compute=_price,
        computed_by="moeblaze_ref.bench.roofline.cost_of",
        why="Two products of `2 * R * d * h` FLOPs make `2 * R * h` elements of 2 bytes, so a byte costs `d` FLOPs.",
        slips={
            1024: "That is the price of an element; an element has 2 bytes.",
            256: "That counts a multiplication and its addition as one FLOP.",
        },
    ),
    Number(
        name="two-ninths",
        notebook=POLICIES,
        heading="FLOPs",
        ask="By how many percent does policy `inputs` raise the FLOPs of the products in a step of a SwiGLU layer?",
        unit="percent",
        compute=_more_flops,
        computed_by="moeblaze_ref.bench.roofline.layer_flops",
        why="A step has nine products of one size, and `inputs` repeats two of them.",
        slips={
            66.67: "That compares two products with the three of the forward alone.",
            33.33: "A third would be all three products again, as torch's own checkpoint runs them.",
        },
    ),
    Choice(
        name="written-but-not-kept",
        notebook=POLICIES,
        heading="What each policy does",
        ask="Policy `minimal` does not keep `y_swi`. Why does its forward write `y_swi` to global memory all the same?",
        right="The second product reads whole rows of `y_swi`, and a block has only some of their columns.",
        wrong={
            "The backward reads it.": "The backward rebuilds `y_swi` from `a` and `b`, which it has in registers.",
            "A kernel cannot free what it computes.": "Registers and shared memory are freed with their block.",
            "The gates must multiply it first.": "The gates multiply the experts' outputs, in the combine.",
        },
        why="Not keeping a tensor shortens the time for which it occupies memory; it saves no traffic.",
    ),
    Choice(
        name="when-to-recompute",
        notebook=POLICIES,
        heading="When recomputing pays",
        ask="By the notebook's model of a stack of layers: when does recomputing `a` and `b` give more tokens a "
        "second?",
        right="If the tokens that fit leave an expert fewer rows than the machine's balance.",
        wrong={
            "Always, because memory is slower than tensor cores.": "With many rows the two products cost more time.",
            "If `h` is larger than `d`.": "The price of a byte is `d` FLOPs and does not contain `h`.",
            "If the layer has no more than 16 experts.": "Few experts mean many rows for each, which favours keeping.",
        },
        why="With few rows an expert's product waits for its weights, so more tokens at once make it faster.",
    ),
)
