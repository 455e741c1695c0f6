"""For each kernel exercise a kernel that cheats: changes of the solution that some cases of the checker do not show.

Most leave out work that small sizes do not need: experts beyond the first, tokens beyond a block, columns beyond a
tile. Others write a number that is right in the first step alone, or leave out what only an order of the threads shows.
"""

CHEATING = {
    "next-best": (
        (
            "for (int e = 0; e < E; ++e) {\n        const int ordered",
            "for (int e = 0; e < min(E, 16); ++e) {\n        const int ordered",
        ),
    ),
    "gates-of-all": (("RENORMALIZE ? 1.0f / sum_of_chosen : prob_scale", "RENORMALIZE ? 1.0f : prob_scale"),),
    "dense-map": (("for j in range(k):", "for j in range(min(k, 2)):"),),
    "tree-sum": (
        ("range(thread, dense_map.shape[0], THREADS)", "range(thread, min(dense_map.shape[0], THREADS), THREADS)"),
    ),
    "rank-and-write": (("        base += rank.total;\n", ""),),
    "missing-barrier": (
        ("for (int token = threadIdx.x; token < L; token += THREADS)", "if (const int token = threadIdx.x; token < L)"),
    ),
    "in-order": (("if (dense_map[entry] != EMPTY)", "if (dense_map[entry] > 0)"),),
    "gather-rows": (("(long long)expert_token_indices[at.row] * d", "(long long)(at.row / 2) * d"),),
    "share-the-row": (("for (int p = threadIdx.x; p < d; p += THREADS)", "if (const int p = threadIdx.x; p < d)"),),
    "whose-weights": (("(long long)blockIdx.y * h * d", "(long long)min(blockIdx.y, 1u) * h * d"),),
    "combine": (("for j in range(k):", "for j in range(min(k, 2)):"),),
    "slot-order": (("y[position, column] = total", "y[position, column] = total if expert < 4 else ZERO"),),
    "gate-gradient": (("range(y.shape[1])", "range(min(y.shape[1], 8))"),),
    "expert-sums": (
        (
            "        d_w[expert, row, column] = total\n",
            "        if expert_token_offsets[expert] < expert_token_offsets[expert + 1]:\n"
            "            d_w[expert, row, column] = total\n",
        ),
    ),
    "sum-on-the-fly": (("for (int p = 0; p < h; ++p) {", "for (int p = 0; p < min(h, 16); ++p) {"),),
    "whose-gate": (("gate_of_row[at.row]", "gate_of_row[expert_token_offsets[blockIdx.y]]"),),
    "rebuild-y": (("gate * d_ungated * b_value * slope", "gate * d_ungated * b_value"),),
    "loss-is-a-mean": (("2.0f * per_token * d_router_z_loss[0]", "2.0f * per_token * -0.2f"),),
    "softmax-mean": (("mean += (d_gates[token * k + j] - shift)", "mean += d_gates[token * k + j]"),),
    "stable-softmax": (
        ("total += math.exp(logits[token, e] - peak)", "total += math.exp(logits[token, e])"),
        ("= math.exp(logits[token, e] - peak) / total", "= math.exp(logits[token, e]) / total"),
        ("math.exp(logit - peak)", "math.exp(logit)"),
    ),
    "butterfly": ((" || (ordered == best.ordered && expert < best.expert)", ""),),
    "prefix-rounds": (("        cuda.syncthreads()  # all have read before one writes\n", ""),),
    "own-counters": (("    cuda.syncthreads()\n", ""),),
    "ballot-rank": (("        base += total;\n", ""),),
    "four-columns": (
        (
            "            x_p = x[token, p]\n            for c in range(columns):\n",
            "            for c in range(columns):\n                x_p = x[token, p]\n",
        ),
    ),
    "tile-by-tile": (("            cuda.syncthreads()\n        if position", "        if position"),),
    "corners": (("sums[i][j] += left[i] * right[j]", "sums[i][j] += rows[p][row + i] * weights[p][column + j]"),),
    "grid-stride": (("num_routed * d, cuda.gridsize(1)", "min(num_routed * d, cuda.gridsize(1)), cuda.gridsize(1)"),),
    "sixteen-bytes": (
        (
            "    Pack<Scalar, PACK> pack = load_pack<PACK>(d_out + from);\n",
            "    Pack<Scalar, PACK> pack;\n    for (int i = 0; i < PACK; ++i) pack.elements[i] = d_out[from + i];\n",
        ),
    ),
    "warp-a-row": (
        (
            "    for (int p = lane_id(); p < d; p += WARP) sum",
            "    const int each = (d + WARP - 1) / WARP, begin = lane_id() * each;\n"
            "    for (int p = begin; p < min(d, begin + each); ++p) sum",
        ),
    ),
    "padded-tile": (
        ("tile[i * (WARP + 1) + lane]", "tile[i * WARP + lane]"),
        ("tile[lane * (WARP + 1) + p]", "tile[lane * WARP + p]"),
    ),
    "two-buffers": (("buffer = first // THREADS % 2 * THREADS", "buffer = 0"),),
    "async-copies": (("cp_async_wait<STAGES - 1>();", "cp_async_wait<STAGES>();"),),
    "phases": (("barrier_wait(&empty[step % STAGES], (step / STAGES + 1) % 2);", ""),),
    "warpgroup-product": (("        fence_async_proxy();\n", ""),),
    "persistent-tiles": (("inside % column_tiles, d, h", "0, d, h"),),
    "whole-blocks": (("(rows + side - 1) // side * side", "(rows // side + 1) * side"),),
    "transposed-blocks": (("first + column * rows + row", "first + row * wide + column"),),
    "stored-only": (("row_offsets[line + 1])", "row_offsets[line] + 1)"),),
    "block-column": (("const int number = transpose_indices[place];", "const int number = place;"),),
    "balance-gradient": (("balance * (shares[e] - mean_share)", "balance * shares[e]"),),
}

# Right kernels that do the work by other means than the exercise is about.
BY_OTHER_MEANS = {
    "butterfly": (
        (
            "__device__ Candidate best_of_warp(Candidate best) {",
            "__device__ Candidate best_of_warp(Candidate best) {\n    const Candidate own = best;",
        ),
        ("for (int step = WARP / 2; step > 0; step /= 2) {", "for (int lane = 0; lane < WARP; ++lane) {"),
        ("__shfl_xor_sync(FULL_WARP, best.ordered, step)", "__shfl_sync(FULL_WARP, own.ordered, lane)"),
        ("__shfl_xor_sync(FULL_WARP, best.expert, step)", "__shfl_sync(FULL_WARP, own.expert, lane)"),
    ),
    "ballot-rank": (
        (
            "        const unsigned votes = __ballot_sync(FULL_WARP, routed);\n"
            "        const int rank = __popc(votes & ((1u << lane_id()) - 1)), total = __popc(votes);",
            "        int rank = 0, total = 0;\n"
            "        for (int lane = 0; lane < WARP; ++lane) {\n"
            "            const int one = __shfl_sync(FULL_WARP, (int)routed, lane);\n"
            "            total += one;\n"
            "            if (lane < lane_id()) rank += one;\n"
            "        }",
        ),
    ),
    "warp-a-row": (
        (
            "sum = warp_sum(sum);",
            "float of_all = 0.0f;\n"
            "    for (int lane = 0; lane < WARP; ++lane) of_all += __shfl_sync(FULL_WARP, sum, lane);\n"
            "    sum = of_all;",
        ),
    ),
    "phases": (
        (
            "    if (warp_id() == 1) {\n"
            "        for (int step = 0; step < steps; ++step) {\n"
            "            const int p = step * WARP + lane_id();\n"
            "            ring.wait_until_empty(step);\n"
            "            ring.stages[step % STAGES][lane_id()] = p < h ? y_swi[row * h + p] : 0.0f;\n"
            "            barrier_arrive(&ring.full[step % STAGES]);\n"
            "        }\n"
            "        return;\n"
            "    }\n",
            "    if (warp_id() == 1) return;\n",
        ),
        (
            "        ring.wait_until_full(step);\n",
            "        const int p = step * WARP + lane_id();\n"
            "        __syncwarp();\n"
            "        ring.stages[step % STAGES][lane_id()] = p < h ? y_swi[row * h + p] : 0.0f;\n"
            "        __syncwarp();\n",
        ),
        ("        barrier_arrive(&ring.empty[step % STAGES]);\n", ""),
    ),
    "async-copies": (
        (
            "cp_async_or_zero(&stages[step % STAGES][threadIdx.x], weights + step * d, true);\n"
            "        cp_async_commit();",
            "stages[step % STAGES][threadIdx.x] = *reinterpret_cast<const Pack<Scalar, PACK>*>(weights + step * d);",
        ),
        ("        cp_async_wait<STAGES - 1>();\n", ""),
    ),
}


# Wrong for a reason that the exercise is about, and what the check says of it.
ALMOST = {
    "whole-blocks": (
        ("(rows + side - 1) // side * side", "(rows + side - 1) & ~(side - 1)"),
        r"\(blocks of 3\): padded_offsets\[1\] is \d+, but must be",
    ),
    "sixteen-bytes": (
        ("gate * to_float(pack", "to_float(from_float<Scalar>(gate)) * to_float(pack"),
        r"d_y\[\d+, \d\] is .*, but must be",
    ),
    "stable-softmax": (
        (
            "            total += math.exp(logits[token, e] - peak)\n        for e in range(num_experts):\n"
            "            probs[token, e] = math.exp(logits[token, e] - peak) / total\n",
            "            total += math.exp(logits[token, e])\n        for e in range(num_experts):\n"
            "            probs[token, e] = math.exp(logits[token, e]) / total\n"
            "        total /= math.exp(peak)\n",
        ),
        r"probs\[0, 0\] is nan",
    ),
    "in-order": (("atomicAdd(&counts[entry % E], 1)", "counts[entry % E] += 1"), "depends on the order of threads"),
    "async-copies": (
        (
            "    for (int step = 0; step < STAGES - 1; ++step) copy(step);\n"
            "    for (int step = 0; step < h; ++step) {\n        copy(step + STAGES - 1);\n"
            "        cp_async_wait<STAGES - 1>();\n",
            "    for (int step = 0; step < h; ++step) {\n        copy(step);\n        cp_async_wait<0>();\n",
        ),
        "by other means: under_way is 0, .*; later copies must be under way",
    ),
    "phases": (
        ("step / STAGES % 2); }", "step / STAGES); }"),
        "barrier_wait at phases.cu:.* has the parity 2, but that of a phase is 0 or 1",
    ),
}

# Right, with other words than the solution's.
RIGHT_TOO = {
    "own-counters": (
        (
            """    for expert in range(num_experts):
        counts[mine + expert] = 0
    for token in range(thread, num_tokens, THREADS):
        for expert in range(num_experts):
            if dense_map[token, expert] != EMPTY:
                counts[mine + expert] += 1
""",
            """    for expert in range(num_experts):
        seen = 0
        for token in range(thread, num_tokens, THREADS):
            if dense_map[token, expert] != EMPTY:
                seen += 1
        counts[mine + expert] = seen
""",
        ),
    ),
    "slot-order": (("y[position, column] = total", "y[token_index_map[slot], column] = total"),),
    "sixteen-bytes": (
        (
            "from_float<Scalar>(gate * to_float(pack.elements[i]))",
            "from_float<Scalar>(to_float(pack.elements[i]) * gate)",
        ),
    ),
    "softmax-mean": (
        (
            "(d_gates[token * k + j] - shift) * share_of(of_gates, row[chosen[j]])",
            "share_of(of_gates, row[chosen[j]]) * (d_gates[token * k + j] - shift)",
        ),
    ),
    "gate-gradient": (
        ("token, position = slot // k, token_index_map[slot]", "token = slot // k"),
        ("y[position, ", "y[token_index_map[slot], "),
    ),
    "stored-only": (
        ("            first = column_indices[number] * side", "            #"),
        ("range(side):\n", "range(side):\n                first = column_indices[number] * side\n"),
    ),
    "persistent-tiles": (
        (
            "        while (number >= first + tiles) {\n",
            "        tiles = row_tiles_of(expert_token_offsets, expert) * column_tiles;\n"
            "        while (number >= first + tiles) {\n",
        ),
    ),
}
