// packed, shared by all versions: biases of the experts.
//
// Purpose      What a bias of the down-projection adds to the output and to the gates' gradients, and the gradients of
//              both biases. The bias of the up-projection is added by expert_up. In version 7 d_hidden adds up the
//              rows of each tile for its gradient, of which d_up_bias_of_tiles adds up the tiles.
// Source       gpt-oss in transformers 5.23; the gates' gradients as in SonicMoE (arXiv 2512.14080).
// Idea         An expert's output y + bias is never stored. The sum of a token's rows gathers the rows of the bias as
//              it gathers those of y, and <d_out, y + bias> is <d_out, y>, which d_hidden finds, and <d_out, bias>.
//              That comes with the gradient of the bias, which reads d_out once more.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; THREADS per block (whole warps); PACK neighbouring columns that a lane
//              moves at once, which divides every width, pitch and first.
// Determinism  Same input, same bits. combine_biased adds a token's rows of y slot by slot, then their biases slot by
//              slot. Gradients: warp w adds rows w, w + W, ... of an expert, or its tiles, one by one, then the warps'
//              sums are added one by one; W is THREADS / 32. An expert without rows has a gradient of 0.
//
// kernel              grid                   block    shared bytes
//                     bytes read                                       bytes written
// combine_biased      ceil(32 L / THREADS)   THREADS  0
//                     12 R + 2 s R d                                   s L d
// d_up_bias           E ceil(n / (32 PACK))  THREADS  4 THREADS PACK
//                     8 THREADS blocks + s R n                         s E n
// d_up_bias_of_tiles  E ceil(n / (32 PACK))  THREADS  4 THREADS PACK
//                     8 THREADS blocks + 4 tiles n                     s E n
// d_down_bias         E ceil(d / (32 PACK))  THREADS  4 THREADS PACK
//                     8 THREADS blocks + 8 R D + s R d + s W E d       s E d + 4 R D
// In combine_biased d columns of y are those of out and bias from first on; a row of both has pitch. n is the width of
// the bias of the up-projection; tiles is the sum over the experts of ceil(rows / tile_rows). W = THREADS / 32, D =
// ceil(d / (32 PACK)). blocks is the whole grid. Bound: memory.
#include "gather_sum.cuh"

// out = sum over j of gates[token, j] * (y[row of (token, j)] + bias[its expert]).
extern "C" __global__ void __launch_bounds__(THREADS)
    combine_biased(const Scalar* y, const Scalar* bias, const float* gates, const int* token_index_map,
                   const int* token_expert_indices, Scalar* out, int L, int d, int k, int pitch, int first) {
    const long long token = blockIdx.x * (THREADS / WARP) + warp_id();
    if (token >= L) return;
    const int expert_of_lane = lane_id() < k ? token_expert_indices[token * k + lane_id()] : EMPTY;
    sum_rows_of_token(
        y, token_index_map, out + token * pitch + first, token, d, k, [&](long long slot) { return gates[slot]; },
        [&](float gate, int column, float (&sums)[PACK]) {
            for (int slot = 0; slot < k; slot += IN_FLIGHT)
                add_rows(bias + first, expert_of_lane, gate, slot, column, d, pitch, sums);
        });
}

// ---- gradients of the biases ---------------------------------------------------------------------

struct WeightedRow {
    int index;
    float weight;
};

constexpr int GROUP = 8;  // rows of a warp that it asks for at a time

// The block's expert of E, and which columns it has. So all experts read the same columns at about the same time: what
// they share is in the L2 cache.
__device__ __forceinline__ int expert_of_block(int E) { return blockIdx.x % E; }
__device__ __forceinline__ int columns_of_block(int E) { return blockIdx.x / E; }

// sums (n,) of an expert: add(row, weight, sums) adds PACK columns of row_of(i) for i from 0 to count, and returns a
// term. Of each GROUP of rows finish(i, stride, terms) gets the lane's terms, that of row i + stride j in place j.
template <class Element, class RowOf, class Add, class Finish>
__device__ __forceinline__ void sum_of_expert(const Element* rows, int count, Scalar* of_experts, int n, int E,
                                              RowOf row_of, Add add, Finish finish) {
    constexpr int WARPS = THREADS / WARP, COLUMNS = WARP * PACK;
    __shared__ float parts[WARPS][COLUMNS];
    const int first_column = columns_of_block(E) * COLUMNS, column = first_column + lane_id() * PACK;
    float sums[PACK] = {};
    for (int first = warp_id(); first < count; first += WARPS * WARP) {
        WeightedRow of_lane = {};
        if (const int i = first + lane_id() * WARPS; i < count) of_lane = row_of(i);
        for (int done = 0; done < WARP && first + done * WARPS < count; done += GROUP) {
            float terms[GROUP] = {};
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                const long long index = __shfl_sync(FULL_WARP, of_lane.index, done + j);
                const float weight = __shfl_sync(FULL_WARP, of_lane.weight, done + j);
                if (first + (done + j) * WARPS < count && column < n)
                    terms[j] = add(rows + index * n + column, weight, sums);
            }
            finish(first + done * WARPS, WARPS, terms);
        }
    }
#pragma unroll
    for (int p = 0; p < PACK; ++p) parts[warp_id()][lane_id() * PACK + p] = sums[p];
    __syncthreads();  // every warp's part is there
    for (int i = threadIdx.x; i < min(COLUMNS, n - first_column); i += THREADS) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp][i];
        of_experts[(long long)expert_of_block(E) * n + first_column + i] = from_float<Scalar>(sum);
    }
}

// Sums of rows as they are.
template <class Element, class RowOf>
__device__ __forceinline__ void sum_of_expert(const Element* rows, int count, Scalar* of_experts, int n, int E,
                                              RowOf row_of) {
    constexpr int MOST = 16 / sizeof(Element), SIZE = PACK < MOST ? PACK : MOST;
    const auto add = [](const Element* row, float, float (&sums)[PACK]) {
#pragma unroll
        for (int first = 0; first < PACK; first += SIZE) {
            const auto pack = load_pack<SIZE>(row + first);
#pragma unroll
            for (int p = 0; p < SIZE; ++p) sums[first + p] += to_float(pack.elements[p]);
        }
        return 0.0f;
    };
    sum_of_expert(rows, count, of_experts, n, E, row_of, add, [](int, int, float (&)[GROUP]) {});
}

// The sum over a warp's lanes of one of COUNT values, a power of two: lane l has that of value l % COUNT. At each step
// a lane keeps half of its values and adds another lane's to them, so there are few steps.
template <int COUNT>
__device__ __forceinline__ float warp_sums(float (&values)[COUNT]) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const bool upper = lane_id() & half;
            const float kept = upper ? values[i + half] : values[i], given = upper ? values[i] : values[i + half];
            values[i] = kept + __shfl_xor_sync(FULL_WARP, given, half);
        }
    float sum = values[0];
#pragma unroll
    for (int lanes = COUNT; lanes < WARP; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
    return sum;
}

// The rows of the block's expert, in expert order.
struct ExpertRows {
    int begin, count;

    __device__ __forceinline__ ExpertRows(const int* expert_token_offsets, int E)
        : begin(expert_token_offsets[expert_of_block(E)]),
          count(expert_token_offsets[expert_of_block(E) + 1] - begin) {}
};

// Sums of the rows of d_ab (R, n).
extern "C" __global__ void __launch_bounds__(THREADS)
    d_up_bias(const Scalar* d_ab, const int* expert_token_offsets, Scalar* d_bias, int n, int E) {
    const ExpertRows rows(expert_token_offsets, E);
    sum_of_expert(d_ab, rows.count, d_bias, n, E, [&](int i) { return WeightedRow{rows.begin + i}; });
}

// The same of sums over the rows of tiles, (tiles, n): those of an expert that begins at row r lie from
// r / tile_rows + expert on.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_up_bias_of_tiles(const float* tile_sums, const int* expert_token_offsets, Scalar* d_bias, int n, int E,
                       int tile_rows) {
    const ExpertRows rows(expert_token_offsets, E);
    const int first = rows.begin / tile_rows + expert_of_block(E), tiles = (rows.count + tile_rows - 1) / tile_rows;
    sum_of_expert(tile_sums, tiles, d_bias, n, E, [&](int i) { return WeightedRow{first + i}; });
}

// Sums of gate * d_out over an expert's rows. And <d_out, bias> of each row, in `terms` parts: one of each block.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_down_bias(const Scalar* d_out, const Scalar* bias, const float* gate_of_row, const int* expert_token_indices,
                const int* expert_token_offsets, Scalar* d_bias, float* gate_terms, int d, int E, int terms) {
    const ExpertRows rows(expert_token_offsets, E);
    const int column = (columns_of_block(E) * WARP + lane_id()) * PACK;
    Pack<Scalar, PACK> bias_pack = {};
    if (column < d) bias_pack = load_pack<PACK>(bias + (long long)expert_of_block(E) * d + column);
    sum_of_expert(
        d_out, rows.count, d_bias, d, E,
        [&](int i) { return WeightedRow{expert_token_indices[rows.begin + i], gate_of_row[rows.begin + i]}; },
        [&](const Scalar* row, float gate, float (&sums)[PACK]) {
            const auto pack = load_pack<PACK>(row);
            float term = 0.0f;
#pragma unroll
            for (int p = 0; p < PACK; ++p) {
                const float d_value = to_float(pack.elements[p]);
                sums[p] += gate * d_value;
                term += d_value * to_float(bias_pack.elements[p]);
            }
            return term;
        },
        [&](int first, int stride, float (&of_rows)[GROUP]) {
            const float term = warp_sums(of_rows);
            const int i = first + lane_id() * stride;
            if (lane_id() < GROUP && i < rows.count)
                gate_terms[(long long)(rows.begin + i) * terms + columns_of_block(E)] = term;
        });
}
