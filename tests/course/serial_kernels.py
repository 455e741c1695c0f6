"""For each kernel exercise a right kernel in which one thread does the work of many: changes of the solution."""

ONE_TOKEN = """\
    const long long token = token_of_thread();
    if (token >= L) return;
"""
EVERY_TOKEN = """\
    if (token_of_thread() != 0) return;
    for (long long token = 0; token < L; ++token) {
"""
ONE_ELEMENT = """\
    if (!at.inside) return;
"""


def _group_loop(columns):
    """In place of one element of a block's group of rows: all of them, by the first thread."""
    return f"""\
    if (blockIdx.x || threadIdx.x) return;
    const int expert = blockIdx.y;
    for (int element = expert_token_offsets[expert] * {columns}; element < expert_token_offsets[expert + 1] * {columns};
         ++element) {{
        const struct {{
            int row, column;
        }} at = {{element / {columns}, element % {columns}}};
"""


def _group(columns, last):
    """Changes of a kernel of which a thread has one element ``at`` of its expert's rows."""
    start = f"    const GroupElement at = group_element<THREADS>(expert_token_offsets, {columns});\n{ONE_ELEMENT}"
    return (start, _group_loop(columns)), (last, f"{last}    }}\n")


GATES = "    for (int j = 0; j < k; ++j) gates[token * k + j] *= gate_scale;\n"
EVERY_CHOICE = "        d_logits[token * E + expert] = from_float<Scalar>(of_losses + of_gate);\n    }\n"
ROUNDS = """\
    reach = 1
    while reach < THREADS:
        left = scratch[thread - reach] if thread >= reach else 0
        cuda.syncthreads()  # all have read before one writes
        scratch[thread] += left
        cuda.syncthreads()
        reach *= 2
"""
ONE_SCANS = """\
    if thread == 0:
        for other in range(1, THREADS):
            scratch[other] += scratch[other - 1]
    cuda.syncthreads()
"""
TOKEN_OF_NUMBA = "    token = cuda.grid(1)\n    if token < num_tokens:\n"
EVERY_TOKEN_OF_NUMBA = "    for token in range(num_tokens if cuda.grid(1) == 0 else 0):\n"
LOADS = """\
            rows[here] = y_swi[position, step + column] if position < end and step + column < h else ZERO
            weights[here] = w3[expert, step + row, i] if step + row < h and i < d else ZERO
"""
ONE_LOADS = """\
            for other in range(TILE * TILE if here == 0 else 0):
                r, c = other // TILE, other % TILE
                rows[other] = y_swi[first + r, step + c] if first + r < end and step + c < h else ZERO
                weights[other] = w3[expert, step + r, i + c] if step + r < h and i + c < d else ZERO
"""
STEP_OF_A_COLUMN = """\
        for (int i = 0; i < min(WARP, h - step * WARP) && column < d; ++i)
            sum += ring.stages[step % STAGES][i] * weights[(step * WARP + i) * d];
"""
STEP_OF_ALL_COLUMNS = """\
        for (int i = 0; i < min(WARP, h - step * WARP) && lane_id() == 0; ++i)
            for (int c = 0; c < min(WARP, d - column); ++c)
                sums[c] += ring.stages[step % STAGES][i] * weights[(step * WARP + i) * d + c];
"""

SERIAL = {
    "next-best": ((ONE_TOKEN, EVERY_TOKEN), (GATES, GATES + "    }\n")),
    "gates-of-all": ((ONE_TOKEN, EVERY_TOKEN), (GATES, GATES + "    }\n")),
    "dense-map": (
        (
            "    if thread < tile:\n        token = first + thread\n        for j in range(k):\n"
            "            dense_map[token, topk_experts[token, j]] = token\n",
            "    if thread == 0:\n        for token in range(first, first + tile):\n            for j in range(k):\n"
            "                dense_map[token, topk_experts[token, j]] = token\n",
        ),
    ),
    "tree-sum": (
        (
            "    half = THREADS // 2\n    while half > 0:\n        if thread < half:\n"
            "            counts[thread] += counts[thread + half]\n        cuda.syncthreads()\n        half //= 2\n",
            "    if thread == 0:\n        for other in range(1, THREADS):\n            count += counts[other]\n"
            "        counts[0] = count\n    cuda.syncthreads()\n",
        ),
    ),
    "rank-and-write": (
        ("    for (long long first = 0; first < L; first += THREADS) {\n", "    if (threadIdx.x) return;\n"),
        ("        const long long token = first + threadIdx.x;\n", "    for (int token = 0; token < L; ++token) {\n"),
        ("        const BlockScan rank = block_exclusive_sum<THREADS>(routed);\n", ""),
        ("base + rank.exclusive", "base++"),
        ("        base += rank.total;\n", ""),
    ),
    "missing-barrier": (
        (
            "    for (int token = threadIdx.x; token < L; token += THREADS) count",
            "    if (threadIdx.x) return;\n    for (int token = 0; token < L; ++token) count",
        ),
        (
            "    counts[threadIdx.x] = count;\n    __syncthreads();\n    if (threadIdx.x < THREADS - 1) return;\n"
            "    for (int thread = 0; thread < THREADS - 1; ++thread) count += counts[thread];\n",
            "    counts[0] = count;\n",
        ),
    ),
    "in-order": (
        (
            "    for (int entry = threadIdx.x; entry < L * E; entry += THREADS)\n",
            "    for (int entry = 0; entry < L * E && threadIdx.x == 0; ++entry)\n",
        ),
    ),
    "gather-rows": _group("h", "    store_hidden(a, b, y_swi, (long long)at.row * h + at.column, a_sum, b_sum);\n"),
    "share-the-row": (
        (
            "    for (int p = threadIdx.x; p < d; p += THREADS) x_row",
            "    if (threadIdx.x == 0)\n        for (int p = 0; p < d; ++p) x_row",
        ),
    ),
    "whose-weights": _group("d", "    y[(long long)at.row * d + at.column] = from_float<Scalar>(sum);\n"),
    "combine": (
        (
            "    element = cuda.grid(1)\n    token, column = element // d, element % d\n    if token < num_tokens:\n",
            "    for element in range(num_tokens * d if cuda.grid(1) == 0 else 0):\n"
            "        token, column = element // d, element % d\n",
        ),
    ),
    "slot-order": (
        (
            "    element = cuda.grid(1)\n    slot, column = element // d, element % d\n    if slot < num_routed:\n",
            "    for element in range(num_routed * d if cuda.grid(1) == 0 else 0):\n"
            "        slot, column = element // d, element % d\n",
        ),
    ),
    "gate-gradient": (
        (
            "    slot = cuda.grid(1)\n    if slot < num_tokens * k:\n",
            "    for slot in range(num_tokens * k if cuda.grid(1) == 0 else 0):\n",
        ),
    ),
    "expert-sums": (
        (
            "    element = cuda.grid(1)\n"
            "    expert, row, column = element // (d * h), element // h % d, element % h\n"
            "    if expert < num_experts:\n",
            "    for element in range(num_experts * d * h if cuda.grid(1) == 0 else 0):\n"
            "        expert, row, column = element // (d * h), element // h % d, element % h\n",
        ),
    ),
    "sum-on-the-fly": (
        (
            "    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;\n"
            "    if (index >= (long long)L * d) return;\n",
            "    if (blockIdx.x || threadIdx.x) return;\n    for (int index = 0; index < L * d; ++index) {\n",
        ),
        (
            "    d_x[index] = from_float<Scalar>(sum);\n",
            "    d_x[index] = from_float<Scalar>(sum);\n    }\n",
        ),
    ),
    "whose-gate": _group(
        "h",
        "    gate_terms[index] = store_hidden_gradients(a, b, d_a, d_b, gated_y, index, sum, gate_of_row[at.row]);\n",
    ),
    "rebuild-y": _group("h", "    gate_terms[index] = d_ungated * act_a * b_value;\n"),
    "loss-is-a-mean": ((ONE_TOKEN, EVERY_TOKEN), (EVERY_CHOICE, EVERY_CHOICE + "    }\n")),
    "softmax-mean": ((ONE_TOKEN, EVERY_TOKEN), (EVERY_CHOICE, EVERY_CHOICE + "    }\n")),
    "stable-softmax": ((TOKEN_OF_NUMBA, EVERY_TOKEN_OF_NUMBA),),
    "butterfly": (
        ("int e = lane_id(); e < E; e += WARP) {", "int e = lane_id() ? E : 0; e < E; ++e) {"),
        ("int e = lane_id(); e < E; e += WARP) sum", "int e = lane_id() ? E : 0; e < E; ++e) sum"),
        ("int e = lane_id(); e < E; e += WARP) probs", "int e = lane_id() ? E : 0; e < E; ++e) probs"),
    ),
    "prefix-rounds": ((ROUNDS, ONE_SCANS),),
    "own-counters": (
        (
            "    for token in range(thread, num_tokens, THREADS):\n",
            "    for token in range(num_tokens if thread == 0 else 0):\n",
        ),
    ),
    "ballot-rank": (
        ("if (expert >= E) return;", "if (expert >= E || lane_id()) return;"),
        (
            "first += WARP) {\n        const int token = first + lane_id();",
            "++first) {\n        const int token = first;",
        ),
        ("        const unsigned votes = __ballot_sync(FULL_WARP, routed);\n", ""),
        ("rank = __popc(votes & ((1u << lane_id()) - 1)), total = __popc(votes);", "rank = 0, total = routed;"),
    ),
    "four-columns": (
        (
            "    group = cuda.grid(1)\n    slot, first = group // groups, group % groups * COLUMNS\n"
            "    if slot < num_routed:\n",
            "    for group in range(num_routed * groups if cuda.grid(1) == 0 else 0):\n"
            "        slot, first = group // groups, group % groups * COLUMNS\n",
        ),
    ),
    "tile-by-tile": ((LOADS, ONE_LOADS),),
    "corners": (
        (
            "i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {\n            const int side",
            "i = threadIdx.x ? TILE * DEPTH : 0; i < TILE * DEPTH; ++i) {\n            const int side",
        ),
    ),
    "grid-stride": (
        (
            "range(cuda.grid(1), num_routed * d, cuda.gridsize(1))",
            "range(num_routed * d if cuda.grid(1) == 0 else 0)",
        ),
    ),
    "sixteen-bytes": (
        (
            "    const int at = (blockIdx.x * THREADS + threadIdx.x) * PACK;\n    if (at >= R * d) return;\n",
            "    if (blockIdx.x || threadIdx.x) return;\n    for (int at = 0; at < R * d; at += PACK) {\n",
        ),
        ("    store_pack(d_y + to, pack);\n", "    store_pack(d_y + to, pack);\n    }\n"),
    ),
    "warp-a-row": (("int p = lane_id(); p < d; p += WARP", "int p = lane_id() ? d : 0; p < d; ++p"),),
    "padded-tile": (
        (
            "            if (lane < columns) tile[i * (WARP + 1) + lane] = w3_rows[i * d + first + lane];\n",
            "            for (int c = 0; c < columns && lane == 0; ++c)\n"
            "                tile[i * (WARP + 1) + c] = w3_rows[i * d + first + c];\n",
        ),
    ),
    "two-buffers": (
        (
            "        if thread < count:\n            buffers[buffer + thread] = y_swi[position, first + thread]\n",
            "        for i in range(count if thread == 0 else 0):\n"
            "            buffers[buffer + i] = y_swi[position, first + i]\n",
        ),
    ),
    "async-copies": (
        (
            "    const int column = (blockIdx.y * THREADS + threadIdx.x) * PACK;\n    if (column >= d) return;\n",
            "    if (blockIdx.y || threadIdx.x) return;\n    for (int column = 0; column < d; column += PACK) {\n",
        ),
        ("    store_pack(y + row * d + column, result);\n", "    store_pack(y + row * d + column, result);\n    }\n"),
    ),
    "phases": (
        ("    float sum = 0.0f;\n", "    float sums[WARP] = {};\n"),
        (STEP_OF_A_COLUMN, STEP_OF_ALL_COLUMNS),
        (
            "    if (column < d) y[row * d + column] = sum;\n",
            "    for (int c = 0; c < min(WARP, d - column) && lane_id() == 0; ++c)\n"
            "        y[row * d + column + c] = sums[c];\n",
        ),
    ),
    "warpgroup-product": (
        ("i = threadIdx.x; i < 64 * 8; i += THREADS", "i = threadIdx.x ? 64 * 8 : 0; i < 64 * 8; ++i"),
    ),
    "persistent-tiles": (
        (
            "    const int column = column_tile * THREADS + threadIdx.x;\n",
            "    if (threadIdx.x) return;\n"
            "    for (int column = column_tile * THREADS; column < min(d, (column_tile + 1) * THREADS); ++column) {\n",
        ),
        ("        y[row * d + column] = sum;\n    }\n", "        y[row * d + column] = sum;\n    }\n    }\n"),
    ),
    "whole-blocks": ((ROUNDS, ONE_SCANS),),
    "transposed-blocks": (
        (
            "range(cuda.threadIdx.x, rows * wide, THREADS)",
            "range(rows * wide if cuda.threadIdx.x == 0 else 0)",
        ),
    ),
    "stored-only": (
        (
            "    element = cuda.grid(1)\n    row, column = element // d, element % d\n    if row < rows:\n",
            "    for element in range(rows * d if cuda.grid(1) == 0 else 0):\n"
            "        row, column = element // d, element % d\n",
        ),
    ),
    "block-column": (
        (
            "    const int index = blockIdx.x * THREADS + threadIdx.x;\n    if (index >= E * d * h) return;\n",
            "    if (blockIdx.x || threadIdx.x) return;\n    for (int index = 0; index < E * d * h; ++index) {\n",
        ),
        ("    d_w[index] = sum;\n", "    d_w[index] = sum;\n    }\n"),
    ),
    "balance-gradient": ((TOKEN_OF_NUMBA, EVERY_TOKEN_OF_NUMBA),),
}
