"""A sheet of its own: find the papers' errors, and say what each would do to a program."""

import numpy as np

from moeblaze_ref.backends.numpy_ref import dispatch
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Construction, Exercise, Prediction
from moeblaze_ref.course.exercises.forms import whole_numbers
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.papers.moeblaze import literal_lengths
from moeblaze_ref.placement import bounds, exact, links
from moeblaze_ref.verify.cases import GOLDEN_DISPATCH, GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS, PRINTED_EXAMPLE

PRINTED_INDICES = PRINTED_EXAMPLE["expert_token_indices"].values
PRINTED_CHOICES = PRINTED_EXAMPLE["token_expert_indices"].values
TOKENS = GOLDEN_TOPK_EXPERTS.tolist()
FLOW = [[5, 3, 0], [3, 0, 0], [1, 1, 4]]
LOAD = [9, 4, 2]


# MoEBlaze, the example of figure 2 -----------------------------------------------------------------------------------


def _announced(expert_token_indices, k, announced):
    return {"tokens": GOLDEN_DISPATCH.L, "entries": announced * k}


def _missing_pair(tokens, printed, token_expert_indices):
    right = dispatch.build(np.array(tokens, np.int32), GOLDEN_NUM_EXPERTS).token_expert_indices
    found = whole_numbers("token_expert_indices", token_expert_indices, (None,))
    if len(found) != len(right):
        return f"token_expert_indices has {len(found)} entries, but five tokens with two experts each have {len(right)}"
    wrong = np.flatnonzero(found != right)
    if not wrong.size:
        return ""
    place = wrong[0]
    token, slot = divmod(int(place), 2)
    return f"token_expert_indices[{place}] is {found[place]}, which is not the expert of token {token} in slot {slot}"


def _uncounted(tokens):
    lengths = literal_lengths(np.array(tokens, np.int32), GOLDEN_NUM_EXPERTS).tolist()
    return {"expert_2": lengths[2], "expert_3": lengths[3], "rows": sum(lengths)}


def _lost_expert(E, k, topk_experts):
    ids = whole_numbers("topk_experts", topk_experts, (None, k))
    checks.check_index("topk_experts", ids, E, "experts")  # before int32 cuts an id
    if len(ids) < 2:
        return "topk_experts has one token, but the routing must have at least two"
    found = ids.astype(np.int32)
    right = dispatch.expert_lengths(dispatch.dense_map(found, E))
    literal = literal_lengths(found, E)
    if ((right > 0) & (literal == 0)).any():
        return ""
    return f"the literal count finds tokens of every expert that has some: it counts {literal.tolist()}"


# MoEBlaze, sizes and what is stored ----------------------------------------------------------------------------------


def _bytes_of(layer, system, policy=None):
    return {tensor.name: tensor.bytes for tensor in account(layer, system, policy).tensors}


def _d_for_h(layer):
    buffer = _bytes_of(layer.replace(d=layer.h), "conventional")["routed_x"]
    hidden = _bytes_of(layer, "conventional")["a"] // layer.k
    return {"buffer_if_d": buffer, "hidden_if_h": hidden, "symbol": "h" if hidden < 10**11 < buffer else "d"}


def _three_statements(layer):
    sizes = _bytes_of(layer, "moeblaze", "paper")
    stored = {
        "section_3_1": {"y_swi"},
        "section_5_2": {"a", "b", "y_swi"} - {"a", "b"},
        "algorithm_1": {name for name in ("a", "b", "y_swi") if name in sizes},
    }
    more = sum(sizes[name] for name in stored["algorithm_1"] - stored["section_3_1"])
    return {name: len(tensors) for name, tensors in stored.items()} | {"difference": more}


def _expanded_gradient(layer):
    sizes = _bytes_of(layer, "conventional")  # d_out has the size of out, its expansion that of routed_x
    return {"gathered": sizes["out"], "expanded": sizes["routed_x"]}


# MoETuner ------------------------------------------------------------------------------------------------------------


def _sum_and_slowest(flow, gpus):
    """Tokens that change the GPU: the sum over all pairs of GPUs, and the largest of one pair."""
    assigned = np.array([np.arange(len(flow)), gpus])
    cost = 1 - np.eye(len(flow))
    moved = links.on_gpus(np.array([flow]), assigned)[0] * cost
    return int(moved.sum()), int(links.slowest(np.array([flow]), assigned, cost)[0])


def _printed_maximum(flow, in_order, gpus):
    found = whole_numbers("gpus", gpus, (len(flow),))
    if sorted(found.tolist()) != list(range(len(flow))):
        return f"gpus is {found.tolist()}, but each of the GPUs 0, 1 and 2 must get exactly one cluster"
    (total, slowest), (known_total, known_slowest) = _sum_and_slowest(flow, found), _sum_and_slowest(flow, in_order)
    if total >= known_total:
        return f"the printed form gives {total}, but it must be less than {known_total}, what it gives for in_order"
    if slowest <= known_slowest:
        return f"the slowest pair moves {slowest} tokens, but it must be more than {known_slowest}, as for in_order"
    return ""


def _exactly_one(load, clusters, x):
    found = whole_numbers("x", x, (clusters, len(load)))
    if not np.isin(found, (0, 1)).all():
        return "x must hold 0 and 1 only: the program is binary"
    if not found.any(axis=1).all():
        empty = int(np.argmin(found.any(axis=1)))
        return f"cluster {empty} has no expert, but the printed program asks for at least one"
    if (found.sum(axis=0) == 1).all():
        return "every expert is in exactly one cluster: find an x that is allowed as printed and that no layer can use"
    loads = found @ load
    objective = float(np.abs(loads - loads.mean()).sum())
    best, _ = exact.best_clusters(np.array(load), clusters, bounds.printed(len(load)))
    if objective >= best:
        return f"the objective is {objective:g}, but it must be below {best:g}, the best with each expert in one place"
    return ""


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="announced-tokens",
        title="MoEBlaze, figure 2: how many tokens?",
        difficulty=1,
        question="""The paper announces an example of six tokens, each with two experts. It prints
            `expert_token_indices` as below. How many tokens does that array belong to? How many entries would six
            tokens need?""",
        given={"expert_token_indices": PRINTED_INDICES, "k": 2, "announced": PRINTED_EXAMPLE["L"].values},
        asked={
            "tokens": Asked("tokens", "len(expert_token_indices) // k"),
            "entries": Asked("entries", "announced * k"),
        },
        truth=_announced,
        computed_by="moeblaze_ref.verify.cases.GOLDEN_DISPATCH",
        hints=(
            "The array has an entry for each of the `R = L * k` routed rows.",
            "Divide the number of printed entries by `k`. Six tokens need `6 * k`.",
        ),
        why="""The figure lists five tokens, and the two arrays that it prints in expert order belong to five. So the
            announced `L = 6` is the misprint.""",
    ),
    Construction(
        name="missing-pair",
        title="MoEBlaze, figure 2: the missing pair",
        difficulty=1,
        question="""`tokens` are the experts of the five tokens, as the figure lists them. The figure prints their
            `token_expert_indices` with eight entries. Write the array that the five tokens give.""",
        given={"tokens": TOKENS, "printed": PRINTED_CHOICES},
        asked={"token_expert_indices": Asked("ten expert ids", "sum(tokens, [])")},
        check=_missing_pair,
        checked_by="moeblaze_ref.backends.numpy_ref.dispatch.build",
        hints=(
            "The array has the experts of token 0, then those of token 1, and so on. Compare it pair by pair.",
            "Five tokens with two experts each give ten entries: the figure leaves one pair out.",
        ),
        why="""The pair `0, 3` of token 2 is missing. Token 4 has the same pair, so the loss is easy to overlook. A
            program that reads the printed array gives token 2 the experts of token 3.""",
    ),
    Prediction(
        name="uncounted-token",
        title="MoEBlaze, section 4.2: non-zero entries",
        difficulty=2,
        question="""Step 1 writes `i` into entry `(i, e)` of a map if token `i` goes to expert `e`. Step 2 counts the
            *non-zero* entries of each column. Apply both literally to a map that begins with zeros. What lengths do
            experts 2 and 3 get, and how many rows do all four experts get together?""",
        given={"tokens": TOKENS},
        asked={
            "expert_2": Asked("tokens", "sum(i != 0 for i, chosen in enumerate(tokens) if 2 in chosen)"),
            "expert_3": Asked("tokens", "sum(i != 0 for i, chosen in enumerate(tokens) if 3 in chosen)"),
            "rows": Asked("rows", "sum(len(chosen) for chosen in tokens[1:])"),
        },
        truth=_uncounted,
        computed_by="moeblaze_ref.papers.moeblaze.literal_lengths",
        hints=(
            "Which token writes the number zero? In which two columns?",
            "Token 0 writes the number zero. Take one off the true length of each expert that it has.",
        ),
        why="""Token 0 writes zeros, so step 2 does not count it. Two of the ten rows are lost, and the groups of
            experts 2 and 3 are one row too short. The map needs a mark for *empty* that is no token id; here it is
            -1.""",
    ),
    Construction(
        name="lost-expert",
        title="MoEBlaze, section 4.2: an expert that vanishes",
        difficulty=2,
        question="""The count is the literal one of the previous exercise. Find a routing, `topk_experts`, in which some
            expert has a token and yet the literal length is zero. It has at least two tokens, each with `k = 2`
            different experts out of `E = 4`.""",
        given={"E": GOLDEN_NUM_EXPERTS, "k": 2},
        asked={"topk_experts": Asked("a row of k experts for each token", "[[0, 1], [1, 2]]")},
        check=_lost_expert,
        checked_by="moeblaze_ref.backends.numpy_ref.dispatch.expert_lengths",
        hints=(
            "Which token is not counted? Give it an expert that no other token has.",
            "Token 0 is not counted. Choose an expert of token 0, and leave it out of all other tokens.",
        ),
        why="""An expert that only token 0 chose gets no rows. The forward leaves its output out, and its weights get no
            gradient. A test that never checks token 0 passes.""",
    ),
    Prediction(
        name="d-for-h",
        title="MoEBlaze, section 2.2: which width?",
        difficulty=2,
        question="""The example of DeepSeek's scale has `L` = 2 million, `k = 4` and `d = 6144` for the routed buffer.
            The paper prints its size, `2 * L * k * d` bytes, as about 94 GB. For the intermediate, `2 * L * h` bytes,
            the paper prints a hidden dimension *d = 24576*, and about 98 GB. How large would the routed buffer be if
            24,576 were `d`? How large is the intermediate if 24,576 is `h`? Which symbol is meant?""",
        given={"layer": preset("paper-deepseek").config},
        asked={
            "buffer_if_d": Asked("bytes", "layer.R * 24_576 * layer.itemsize"),
            "hidden_if_h": Asked("bytes", "layer.L * 24_576 * layer.itemsize"),
            "symbol": Asked("'d' or 'h'", '"h"'),
        },
        truth=_d_for_h,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            "Put 24,576 into both formulas. Only one of the results is near a printed number.",
            "With `h = 24576` the intermediate has `2 * 2_000_000 * 24_576` bytes. Compare it with the printed 98 GB.",
        ),
        why="""Only `h` gives the printed 98 GB. Both formulas then give 98.3 GB, since `k * d = h` here. So the 94 GB
            of the buffer do not follow from its own formula. The example also counts one row for each token, but the
            experts compute `k` rows.""",
    ),
    Prediction(
        name="three-statements",
        title="MoEBlaze: what is stored, three times",
        difficulty=3,
        question="""Section 3.1 buffers only the result between the two MLPs. Section 5.2 says that `a` and `b` are
            never written. Line 11 of Algorithm 1 stores `A`, `B` and `Y_swi`. How many of these three `(R, h)` tensors
            does each statement leave stored, at most? By how many bytes does Algorithm 1 store more than section 3.1
            says, on conf3?""",
        given={"layer": preset("conf3").config},
        asked={
            "section_3_1": Asked("tensors", "1"),
            "section_5_2": Asked("tensors", "1"),
            "algorithm_1": Asked("tensors", "3"),
            "difference": Asked("bytes", "2 * layer.R * layer.h * layer.itemsize"),
        },
        truth=_three_statements,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            "Read each statement alone, and list what it stores.",
            "The result between the two MLPs is `Y_swi`. What does section 5.2 leave of the three?",
        ),
        why="""Algorithm 1 contradicts the text. It alone stores enough to compute the backward of SwiGLU without
            computing `A` and `B` again. So the policy `paper` is Algorithm 1. The paper has neither `minimal`, which
            keeps `A` and `B` as SonicMoE does, nor `inputs`, which keeps none of the three.""",
    ),
    Prediction(
        name="expanded-gradient",
        title="MoEBlaze, section 3.2: expanded or not?",
        difficulty=1,
        question="""Section 3.2 says in one place that the gradient of the output, `(L, d)`, is mapped to `(L * k, d)`
            rows in memory. In another it says that this expansion is avoided. How many bytes does the gradient have in
            each reading, on conf4?""",
        given={"layer": preset("conf4").config},
        asked={
            "gathered": Asked("bytes", "layer.L * layer.d * layer.itemsize"),
            "expanded": Asked("bytes", "layer.R * layer.d * layer.itemsize"),
        },
        truth=_expanded_gradient,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            "One reading has a row for each token, the other a row for each of a token's `k` experts.",
            "The rows are `L` or `L * k`, each of `d` numbers of `layer.itemsize` bytes.",
        ),
        why="""The expansion is the first memory wall again, `k` times the gradient, now in the backward. Our kernels
            gather rows of `d_out` by index, so they follow the second reading.""",
    ),
    Construction(
        name="printed-maximum",
        title="MoETuner, equation 8: sums inside the maximum",
        difficulty=3,
        question="""The second program places clusters on GPUs. It is meant to minimise the time of the *slowest* pair
            of GPUs. As printed, the sums over clusters and GPUs stand inside the maximum, and leave it no index to run
            over. So the value is the *sum* over all pairs.

            `flow[c1][c2]` tokens go from cluster `c1` in one layer to cluster `c2` in the next. Cluster `c1` is on GPU
            `c1`, and a token that changes the GPU costs 1. `in_order` puts cluster `c2` on GPU `c2`: 8 tokens move, 3
            of them between the slowest pair. Find `gpus`, the GPU of each `c2`, so that the printed form prefers it to
            `in_order`, although its slowest pair is slower.""",
        given={"flow": FLOW, "in_order": [0, 1, 2]},
        asked={"gpus": Asked("the GPU of each cluster c2", "[1, 0, 2]")},
        check=_printed_maximum,
        checked_by="moeblaze_ref.placement.links.slowest",
        hints=(
            "Write down the tokens that each pair of GPUs exchanges, for both orders.",
            "The sum is smallest where most tokens stay. Exchange the GPUs of clusters 0 and 1.",
        ),
        why="""The printed form moves 7 tokens instead of 8, but 5 of them over one link; in order, one link carries at
            most 3. All pairs send at the same time, so the step waits for the slowest. `assign_gpus` minimises the
            maximum over pairs of GPUs, summed over layers.""",
    ),
    Construction(
        name="exactly-one",
        title="MoETuner, the first program: no 'exactly one'",
        difficulty=3,
        question="""The first program puts the experts of a layer into clusters: `x[c][e]` is 1 if expert `e` is in
            cluster `c`. It minimises the sum over clusters of `|T_c - mean T|`, where `T_c` is the load of cluster `c`,
            and requires at least one expert in each cluster. The printed form does not say that an expert is in exactly
            one. Find an `x` that it allows, with a smaller objective than any real assignment. It puts some expert
            nowhere or in both clusters.""",
        given={"load": LOAD, "clusters": 2},
        asked={"x": Asked("0 or 1 for each cluster and expert", "[[0, 1, 0], [0, 1, 0]]")},
        check=_exactly_one,
        checked_by="moeblaze_ref.placement.exact.best_clusters",
        hints=(
            "Nothing in the printed program says that every expert has a cluster.",
            "Equal loads have the objective 0. What if both clusters hold the same expert, and nothing else?",
        ),
        why="""The printed program even has solutions with the objective 0. One puts the second expert into both
            clusters and drops the heaviest. A real assignment reaches 3 at best. `cluster_experts` adds the constraint:
            each expert is in exactly one cluster.""",
    ),
)
