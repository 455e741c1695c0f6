"""Exercises of notebook 02: the index structures, built without sorting."""

from moeblaze_ref.backends.numba_cuda import dispatch
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, cuda_grid, cuda_kernel, numba_kernel
from moeblaze_ref.memory.accounting import account

FILE = "dispatch/1_dense_map.cu"
NUMBA = (
    "from moeblaze_ref.backends.numba_cuda.runtime import THREADS, cuda\nfrom moeblaze_ref.core.structures import EMPTY"
)
TREE_IMPORTS = """\
from numba import int32

from moeblaze_ref.backends.numba_cuda.runtime import cuda
from moeblaze_ref.core.structures import EMPTY

THREADS = 32"""
SCAN_IMPORTS = """\
from numba import int32

from moeblaze_ref.backends.numba_cuda.runtime import THREADS, cuda"""
INDICES = ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map")

LENGTHS = """\
#include "common.cuh"

// A block counts the tokens of its expert: each thread those of every THREADS-th row, the last thread all of them.
extern "C" __global__ void expert_lengths(const int* dense_map, int* lengths, int L, int E) {
    __shared__ int counts[THREADS];
    const int expert = blockIdx.x;
    int count = 0;
    for (int token = threadIdx.x; token < L; token += THREADS) count += dense_map[token * E + expert] != EMPTY;
    counts[threadIdx.x] = count;
    __syncthreads();
    if (threadIdx.x < THREADS - 1) return;
    for (int thread = 0; thread < THREADS - 1; ++thread) count += counts[thread];
    lengths[expert] = count;
}
"""

COALESCED = """\
#include "common.cuh"

// One block counts for all experts. Sums are kept in shared memory, one for each expert; E is at most 1024.
extern "C" __global__ void expert_lengths(const int* dense_map, int* lengths, int L, int E) {
    __shared__ int counts[1024];
    for (int expert = threadIdx.x; expert < E; expert += THREADS) counts[expert] = 0;
    __syncthreads();
    for (int entry = threadIdx.x; entry < L * E; entry += THREADS)
        if (dense_map[entry] != EMPTY) atomicAdd(&counts[entry % E], 1);
    __syncthreads();
    for (int expert = threadIdx.x; expert < E; expert += THREADS) lengths[expert] = counts[expert];
}
"""

OWN_COUNTERS = """\
from numba import int32

from moeblaze_ref.backends.numba_cuda.runtime import THREADS, cuda
from moeblaze_ref.core.structures import EMPTY


@cuda.jit
def expert_lengths(dense_map, lengths):
    \"\"\"Count for all experts in one block, whose threads have a counter each for every expert.

    Grid          1 block of THREADS threads
    Shared bytes  4 E THREADS
    \"\"\"
    counts = cuda.shared.array(0, int32)  # (THREADS, E)
    thread = cuda.threadIdx.x
    num_tokens, num_experts = dense_map.shape
    mine = thread * num_experts  # where the thread's counters begin
    for expert in range(num_experts):
        counts[mine + expert] = 0
    for token in range(thread, num_tokens, THREADS):
        for expert in range(num_experts):
            if dense_map[token, expert] != EMPTY:
                counts[mine + expert] += 1
    cuda.syncthreads()
    for expert in range(thread, num_experts, THREADS):
        total = 0
        for other in range(THREADS):
            total += counts[other * num_experts + expert]
        lengths[expert] = total
"""

BALLOT = """\
#include "dispatch.cuh"

// A warp has an expert, and walks down its column, 32 tokens at a time.
extern "C" __global__ void route_indices(const int* dense_map, const int* expert_token_offsets,
                                         const int* topk_experts, int* expert_token_indices, int* token_index_map,
                                         int L, int E, int k) {
    const int expert = blockIdx.x * (THREADS / WARP) + warp_id();
    if (expert >= E) return;
    int base = expert_token_offsets[expert];
    for (int first = 0; first < L; first += WARP) {
        const int token = first + lane_id();
        const bool routed = token < L && dense_map[token * E + expert] != EMPTY;
        const unsigned votes = __ballot_sync(FULL_WARP, routed);
        const int rank = __popc(votes & ((1u << lane_id()) - 1)), total = __popc(votes);
        if (routed) {
            const int position = base + rank;
            expert_token_indices[position] = token;
            token_index_map[token * k + slot_of(topk_experts + token * k, expert)] = position;
        }
        base += total;
    }
}
"""


def _index_bytes(layer):
    found = {tensor.name: tensor.bytes for tensor in account(layer, "moeblaze", "minimal").tensors}
    return {"dense_map": found["dense_map"], "indices": sum(found[name] for name in INDICES)}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="index-bytes",
        title="What replaces the routed copy",
        difficulty=1,
        question="""The four index structures are `expert_token_indices` `(R,)`, `expert_token_offsets` `(E + 1,)`,
            `token_expert_indices` `(R,)` and `token_index_map` `(R,)`, all int32. How many bytes do they take together?
            The dense map `(L, E)`, int32, builds them and is freed again. How many bytes does it take?""",
        given={"layer": preset("qwen3").config},
        asked={
            "indices": Asked("bytes", "4 * (3 * layer.R + layer.E + 1)"),
            "dense_map": Asked("bytes", "4 * layer.L * layer.E"),
        },
        truth=_index_bytes,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            "An int32 has 4 bytes. Count the elements of all four; do not forget the offset at the end.",
            "Three of the four have `R = L * k` elements, the offsets have `E + 1`. The dense map has `L * E`.",
        ),
        why="""The structures take twelve bytes for each routed row, in place of `2 * d`. The map is larger than the
            structures as soon as `E` exceeds `3 * k`.""",
    ),
    KernelExercise(
        name="dense-map",
        title="Step 1: who goes where",
        difficulty=1,
        kind="numba",
        question="""A block has a tile of tokens, and all its threads have cleared the tile's rows of the map. Now each
            thread that has a token enters it: `dense_map[token, e] = token` for every expert `e` that the token
            chose.""",
        task="dispatch.dense_map",
        kernel=numba_kernel(dispatch.dense_map_kernel, NUMBA),
        change=(
            "        token = first + thread\n...\n            dense_map[token, topk_experts[token, j]] = token\n",
            "        pass  # Your part: enter the thread's token under each of its k experts.\n",
        ),
        budgets=("read <= 4 R", "written <= 4 L E + 4 R"),
        division=("accesses <= E + 2 k", "barriers <= 1", "threads >= L"),
        hints=(
            "The `if` above says which threads have a token. Begin with the number of the thread's token.",
            """The thread's token is `first + thread`; its experts are `topk_experts[token, 0]` to `topk_experts[token,
            k - 1]`.""",
        ),
        why="No two threads write the same entry, so no thread needs an atomic.",
    ),
    KernelExercise(
        name="tree-sum",
        title="Step 2: add up in a tree",
        difficulty=2,
        kind="numba",
        question="""Each thread of a block has counted some of its expert's tokens, into `counts[thread]` in shared
            memory. Add the counts up into `counts[0]`, in rounds. In the first round, each thread of the lower half
            adds one number of the upper half to its own. In the next round a quarter of the threads does the same, and
            so on until one is left. `THREADS` is a power of two.""",
        task="dispatch.expert_lengths",
        kernel=numba_kernel(dispatch.expert_lengths_kernel, TREE_IMPORTS),
        change=(
            "    half = THREADS // 2\n...\n        half //= 2\n",
            "    # Your part: all rounds, with a barrier after each.\n",
        ),
        budgets=("read <= 4 L E", "written <= 4 E"),
        division=(
            "accesses <= ceil(L / THREADS) + 3 log2(THREADS) + 3",
            "barriers <= log2(THREADS) + 1",
            "threads >= E THREADS",
        ),
        hints=(
            "In the first round thread `t` adds `counts[t + THREADS // 2]` to its own number.",
            """`half` begins at `THREADS // 2` and is halved in each round. In a round, the threads below `half` add
            `counts[thread + half]`; then *all* threads meet at `cuda.syncthreads()`.""",
        ),
        why="""A tree takes `log2(THREADS)` rounds, in place of `THREADS` additions by one thread. The barrier is
            outside of the `if`, because all threads of the block must reach it.""",
    ),
    KernelExercise(
        name="rank-and-write",
        title="Step 3: every row's position",
        difficulty=2,
        kind="cuda",
        question="""A block walks down the column of its expert. `rank.exclusive` is the number of tokens of this tile
            before the thread's own; `base` is where the tile begins in expert order. Compute the row's position, and
            write both directions of the route: `expert_token_indices[position]` is the token, and
            `token_index_map[token * k + slot]` is the position.""",
        task="dispatch.route_indices",
        kernel=cuda_kernel(FILE, "route_indices"),
        change=(
            "            const int position = base + rank.exclusive;\n...\n"
            "            token_index_map[token * k + slot] = position;\n",
            "            // Your part: the row's position, its token's slot (slot_of), and both writes.\n",
        ),
        budgets=("written <= 8 R", "read of dense_map <= 4 L E", "read of topk_experts <= 4 R k"),
        division=(
            "accesses <= 1 + (5 + k) ceil(L / THREADS)",
            "barriers <= 2 ceil(L / THREADS)",
            "threads >= R / max(1, ceil(L / THREADS))",
        ),
        hints=(
            "The position counts three groups: rows of experts before, tokens of tiles before, and lower threads.",
            """`base` begins at the expert's offset and grows by each tile's total, so the position is `base +
            rank.exclusive`. `slot_of(topk_experts + token * k, expert)` returns the slot that the token used for this
            expert.""",
        ),
        why="""Inside an expert the tokens ascend, since ranks follow the column. A stable sort would give the same
            order.""",
    ),
    KernelExercise(
        name="missing-barrier",
        title="Right by luck",
        difficulty=1,
        kind="bug",
        question="""Each thread counts, and the last one adds up the counts. The kernel is right if threads happen to
            run one after another in the order of their numbers, which no GPU promises. The checker runs it in other
            orders, too. What is missing?""",
        task="dispatch.expert_lengths",
        kernel=Kernel("expert_lengths", LENGTHS, cuda_grid(FILE, "expert_lengths")),
        change=("    counts[threadIdx.x] = count;\n    __syncthreads();\n", "    counts[threadIdx.x] = count;\n"),
        budgets=("read <= 4 L E", "written <= 4 E"),
        division=("accesses <= ceil(L / THREADS) + THREADS + 1", "barriers <= 1", "threads >= E THREADS"),
        hints=(
            "Run the threads in reverse order in your head. What does the last one read?",
            "The last thread reads what all others wrote. How does it know that they have?",
        ),
        why="""A kernel whose result depends on the order of its threads is wrong, even if one run gives the right
            result. Every thread must reach the barrier, so it stands before the `return`.""",
    ),
    KernelExercise(
        name="in-order",
        title="Read the map as it lies",
        difficulty=2,
        kind="cuda",
        question="""The project's first version counts an expert's tokens down its column. Neighbouring threads read `4
            * E` bytes apart, and each entry may cost a sector of 32 bytes. Count all experts in *one* block that reads
            the map from its first entry to its last, so that neighbouring threads read neighbouring entries.
            `atomicAdd(&counts[e], 1)` lets threads add to one number in shared memory; the sum of integers is the same
            in any order.""",
        task="dispatch.expert_lengths",
        kernel=Kernel("expert_lengths", COALESCED, grid="1"),
        change=(
            "    for (int entry = threadIdx.x; entry < L * E; entry += THREADS)\n"
            "        if (dense_map[entry] != EMPTY) atomicAdd(&counts[entry % E], 1);\n",
            "    // Your part: walk over all L * E entries of the map; entry i belongs to expert i % E.\n",
        ),
        budgets=("read <= 4 L E", "sectors <= ceil(L E / 8) + ceil(E / 8)"),
        division=(
            "accesses <= 2 ceil(L E / THREADS) + 3 ceil(E / THREADS)",
            "barriers <= 2",
            "threads >= R / max(1, ceil(L E / THREADS))",
        ),
        hints=(
            """Neighbouring threads must read neighbouring entries in the same turn of the loop. Several threads may add
            to one counter at once, so each addition must be an `atomicAdd`.""",
            """Thread `t` reads the entries `t`, `t + THREADS`, `t + 2 * THREADS`, ...: in each round a warp reads 32
            neighbours, 128 bytes in four sectors.""",
        ),
        why="""The kernel asks for the same bytes, but in fewer sectors, because a warp reads neighbouring words.
            However, one block uses only one multiprocessor. The project's second version makes the map smaller
            instead.""",
    ),
    KernelExercise(
        name="prefix-rounds",
        title="Prefix sums in rounds",
        difficulty=2,
        kind="numba",
        question="""`scratch` has one number of each thread, in shared memory. Replace each number by its sum with all
            numbers of lower threads, in rounds. In the round with reach `r = 1, 2, 4, ...` a thread adds the number
            that lies `r` threads below it, if there is one. After the round, its number is the sum over the last `2 *
            r` threads.""",
        task="dispatch.expert_offsets",
        kernel=numba_kernel(
            dispatch.expert_offsets_kernel, SCAN_IMPORTS, dispatch.exclusive_scan, offsets="expert_token_offsets"
        ),
        change=(
            "    reach = 1\n...\n        reach *= 2\n",
            "    # Your part: all rounds. Think of who may still read the number that a thread replaces.\n",
        ),
        budgets=("read <= 4 E", "written <= 4 E + 4"),
        division=(
            "accesses <= (3 log2(THREADS) + 5) ceil(E / THREADS) + 1",
            "barriers <= (2 log2(THREADS) + 2) ceil(E / THREADS)",
            "threads >= THREADS",
        ),
        hints=(
            "A round has two parts: all threads read the number below them, then all threads write their own.",
            """Read `left = scratch[thread - reach] if thread >= reach else 0`, meet at a barrier, add `left` to
            `scratch[thread]`, and meet at a second barrier. Then double `reach` while it is below `THREADS`.""",
        ),
        why="""A scan takes `log2(THREADS)` rounds. Each round needs two barriers, since all threads read what other
            threads replace. In the tree of step 2 one is enough: there, no thread reads what another one replaces in
            the same round.""",
    ),
    KernelExercise(
        name="own-counters",
        title="Counters of your own",
        difficulty=2,
        kind="numba",
        question="""One block counts for all experts. Two threads that add to the same counter would need atomics. So
            each thread has a counter of its own for every expert: that of expert `e` is `counts[mine + e]`. Thread `t`
            counts the tokens `t`, `t + THREADS`, ... After that, the threads share the experts: each adds up all
            counters of some experts and writes their lengths. Write both parts.""",
        task="dispatch.expert_lengths",
        kernel=Kernel("expert_lengths", OWN_COUNTERS),
        change=(
            "    for token in range(thread, num_tokens, THREADS):\n...\n        lengths[expert] = total\n",
            "    # Your part: count the thread's tokens; then add up the counters of some experts.\n",
        ),
        budgets=("read <= 4 L E", "written <= 4 E"),
        division=(
            "accesses <= 3 E ceil(L / THREADS) + 2 E + (THREADS + 1) ceil(E / THREADS)",
            "barriers <= 1",
            "threads >= THREADS",
        ),
        hints=(
            "Between the two parts every thread must have counted.",
            """The counter of thread `other` for an expert is `counts[other * num_experts + expert]`. Thread `t` sums
            those of the experts `t`, `t + THREADS`, ...""",
        ),
        why="""Private counters turn a contended sum into two sums without a conflict, at the price of `THREADS` times
            the shared memory. For floats the result also has a fixed order, which atomics do not have.""",
    ),
    KernelExercise(
        name="ballot-rank",
        title="A rank by one vote",
        difficulty=2,
        kind="cuda",
        question="""Each lane of a warp knows whether its token is `routed` to the expert. `rank` is the number of lower
            lanes that are routed, and `total` the number of all of them. Compute both without shared memory.
            `__ballot_sync(FULL_WARP, routed)` gives every lane a word, whose bit `l` is set if lane `l` is routed.
            `__popc(word)` counts the bits of a word.""",
        task="dispatch.route_indices",
        kernel=Kernel("route_indices", BALLOT, grid="ceil(32 E / THREADS)"),
        change=(
            "        const unsigned votes = __ballot_sync(FULL_WARP, routed);\n"
            "        const int rank = __popc(votes & ((1u << lane_id()) - 1)), total = __popc(votes);\n",
            "        const int rank = 0, total = 0;  // Your part: one vote gives both.\n",
        ),
        budgets=(
            "written <= 8 R",
            "read of dense_map <= 4 L E",
            "read of topk_experts <= 4 R k",
            "exchanges <= ceil(L / 32)",
        ),
        division=(
            "accesses <= 1 + (3 + k) ceil(L / 32)",
            "barriers <= 0",
            "threads >= R / max(1, ceil(L / 32))",
        ),
        hints=(
            "All lanes must vote, also those without a token.",
            "The lower lanes of lane `l` are the bits of `(1u << l) - 1`. Mask the votes with them, and count.",
        ),
        why="""One vote and one count give each lane its prefix sum over the warp. The kernel has no barrier, and a
            warp that is done does not wait for the others. A vote waits for every named lane that has not left the
            kernel, on a GPU and here. So the check cannot see a lane that skips the vote and then leaves.""",
    ),
)
