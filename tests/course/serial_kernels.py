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
EVERY_CHOICE = (
    "        d_logits[token * E + expert] = of_losses + gate * (d_gates[token * k + j] - shift - mean);\n    }\n"
)

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
    "rebuild-y": _group("h", "    gate_terms[index] = d_y * act_a * b_value;\n"),
    "loss-is-a-mean": ((ONE_TOKEN, EVERY_TOKEN), (EVERY_CHOICE, EVERY_CHOICE + "    }\n")),
    "softmax-mean": ((ONE_TOKEN, EVERY_TOKEN), (EVERY_CHOICE, EVERY_CHOICE + "    }\n")),
}
