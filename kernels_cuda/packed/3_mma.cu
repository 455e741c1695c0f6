// packed, version 3: tensor cores.
//
// Purpose      Of weights as models store them, the two kernels that those of expert_up and expert_down cannot stand
//              for: ab = x gate_up and y_swi; and d_ab, gate * y_swi and the gates' gradients from d_out down^T.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without any kept expert
//              output: SonicMoE (arXiv 2512.14080).
// Idea         The kernels expert_up and d_hidden of version 3, with their operands where LAYOUT says. A weight whose
//              neighbours lie along the depth comes in lines of the depth, and ldmatrix transposes none of its
//              fragments. Where columns of a and b alternate, a tile is one product of neighbouring pairs of a and b.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar of s bytes: __half, __nv_bfloat16, or float, which is multiplied as tf32; ACTIVATION; LAYOUT;
//              BIASED; TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, STAGES, WARP_ROWS, WARP_COLUMNS and BAND, see
//              mma_matmul.cuh; THREADS, a warp for each of its parts of a tile. d and h are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel     grid                                                 block
//            shared bytes
//            bytes read                                                        bytes written
// expert_up  R / TILE_ROWS + min(E, R), ceil(G h / TILE_COLUMNS)  THREADS
//            12 + s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//            8 E blocks + 4 K R C + s R d C + s d h G tiles + s R h G U        s R h (G P + Y)
// d_hidden   R / TILE_ROWS + min(E, R), ceil(h / TILE_COLUMNS)    THREADS
//            12 + s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS) + 4 TILE_ROWS TILE_COLUMNS / WARP_COLUMNS
//            8 E blocks + 4 K R J + s R d J + s d h tiles + s R h G + R h / 2  s R h (1 + G) + 4 R J
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; U is BIASED; G is 2 with a
// gated activation, else 1. C = ceil(G h / TILE_COLUMNS), J = ceil(h / TILE_COLUMNS). A line's number in a list is read
// for each 16 bytes of it: K = s TILE_DEPTH / 16 of a stage; a gate for each eight elements of its row. tiles is the
// sum over the experts of ceil(rows / TILE_ROWS); blocks is the whole grid. 2 R d h G FLOPs in expert_up, 2 R d h in
// d_hidden. Bound: tensor cores; on Hopper, shared memory.
#include "expert_rows.cuh"
#include "mma_hidden.cuh"
#include "packed.cuh"

// ---- ab = x gate_up ------------------------------------------------------------------------

constexpr int RESULTS = LAYOUT::INTERLEAVED ? 1 : PROJECTIONS;  // products that share their rows
constexpr int MERGED = PROJECTIONS / RESULTS;                   // projections that alternate in one product
constexpr Along UP_ALONG = LAYOUT::TRANSPOSED ? Along::DEPTH : Along::SIDE;

// The columns of gate_up that a tile of a product begins with, as lines along UP_ALONG.
__device__ __forceinline__ Lines<false> up_lines(const Scalar* gate_up, int expert, int result, int first_column, int d,
                                                 int h) {
    const int columns = PROJECTIONS * h, count = MERGED * h - first_column;
    const Scalar* const begin = gate_up + up_weight_at(expert, 0, result * h + first_column, d, h);
    if (LAYOUT::TRANSPOSED) return {begin, d, count, d};
    return {begin, columns, d, count};
}

// Adds the biases, if there are any, to sums of eight neighbouring columns; `column` of an expert's is the first.
__device__ __forceinline__ void add_biases(float (&sums)[8], const Scalar* bias, int expert, int column, int h) {
    if (!BIASED) return;
    const Eight biases(bias + packed_at(expert, 0, 0, h) + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += to_float(biases.values[i]);
}

// Eight neighbours of a and of b, rounded and stored; `j` of the row's h elements is the first.
__device__ __forceinline__ void store_side_by_side(Scalar* ab, Scalar* y_swi, int row, int j, int h, const float* a,
                                                   const float* b) {
    Eight a_values, b_values, y_values;
#pragma unroll
    for (int i = 0; i < 8; ++i) store_hidden(a_values.values, b_values.values, y_values.values, i, a[i], b[i]);
    if (STORE_PROJECTIONS) {
        a_values.store(ab + packed_at(row, 0, j, h));
        if (GATED) b_values.store(ab + packed_at(row, 1, j, h));
    }
    if (STORE_Y_SWI) y_values.store(y_swi + (long long)row * h + j);
}

// Four neighbours of a and of b that alternate.
__device__ __forceinline__ void store_alternating(Scalar* ab, Scalar* y_swi, int row, int j, int h,
                                                  const float* pairs) {
    Eight values;
    Pack<Scalar, 4> y;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        store_hidden(values.values + 2 * i, values.values + 2 * i + 1, y.elements + i, 0, pairs[2 * i],
                     pairs[2 * i + 1]);
    if (STORE_PROJECTIONS) values.store(ab + packed_at(row, 0, j, h));
    if (STORE_Y_SWI) store_pack(y_swi + (long long)row * h + j, y);
}

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_up(const Scalar* x, const Scalar* gate_up, const int* expert_token_indices, const int* expert_token_offsets,
              Scalar* ab, Scalar* y_swi, int d, int h, int E, const Scalar* bias) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * WarpResults<RESULTS>::WIDTH;
    const Lines<true> rows = {x, d, tile.rows, d, expert_token_indices + tile.first};
    Lines<false> weights[RESULTS];
#pragma unroll
    for (int result = 0; result < RESULTS; ++result)
        weights[result] = up_lines(gate_up, tile.expert, result, first_column, d, h);
    WarpResults<RESULTS> sums;
    mma_matmul<Along::DEPTH, UP_ALONG>(sums, d, rows, weights);
    sums.each(load_nothing, [&](int, int row, int column, float (&values)[RESULTS][8], Nothing) {
        const int j = (first_column + column) / MERGED;
        if (row >= tile.rows || j >= h) return;
#pragma unroll
        for (int r = 0; r < RESULTS; ++r) add_biases(values[r], bias, tile.expert, r * h + first_column + column, h);
        if constexpr (LAYOUT::INTERLEAVED)
            store_alternating(ab, y_swi, tile.first + row, j, h, values[0]);
        else
            store_side_by_side(ab, y_swi, tile.first + row, j, h, values[0], values[RESULTS - 1]);
    });
}

// ---- d_ab from d_out down^T ------------------------------------------------------------------------

constexpr Along DOWN_ALONG = LAYOUT::TRANSPOSED ? Along::SIDE : Along::DEPTH;

// Eight elements of a and of b, from `j` of a row on, as they lie in ab.
struct PackedEight {
    Eight first, second;

    __device__ __forceinline__ PackedEight() {}
    __device__ __forceinline__ PackedEight(const Scalar* ab, int row, int j, int h)
        : first(ab + packed_at(row, 0, j, h)) {
        if (GATED) second = Eight(ab + second_at(row, j, h));
    }
    __device__ __forceinline__ void store(Scalar* ab, int row, int j, int h) const {
        first.store(ab + packed_at(row, 0, j, h));
        if (GATED) second.store(ab + second_at(row, j, h));
    }
    static __device__ __forceinline__ long long second_at(int row, int j, int h) {
        return LAYOUT::INTERLEAVED ? packed_at(row, 0, j + 4, h) : packed_at(row, 1, j, h);
    }
    __device__ __forceinline__ Scalar* a(int i) {
        return LAYOUT::INTERLEAVED ? (i < 4 ? first : second).values + i % 4 * 2 : first.values + i;
    }
    __device__ __forceinline__ Scalar* b(int i) { return LAYOUT::INTERLEAVED ? a(i) + 1 : second.values + i; }
};

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_hidden(const Scalar* d_out, const float* gate_of_row, const Scalar* ab, const Scalar* down,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_ab, Scalar* gated_y,
             float* gate_terms, int d, int h, int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * TILE_COLUMNS;
    const Lines<true> rows = {d_out, d, tile.rows, d, expert_token_indices + tile.first};
    const Scalar* const begin = down + down_weight_at(tile.expert, first_column, 0, d, h);
    const Lines<false> weights =
        LAYOUT::TRANSPOSED ? Lines<false>{begin, h, d, h - first_column} : Lines<false>{begin, d, h - first_column, d};
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, DOWN_ALONG>(sums, d, rows, &weights);
    auto read = [&](int row, int j) { return PackedEight(ab, row, j, h); };
    auto store = [&](const PackedEight& gradients, int row, int j) { gradients.store(d_ab, row, j, h); };
    store_hidden_tile<PackedEight>(sums, tile, place, h, gate_of_row, gated_y, gate_terms, read, store);
}
