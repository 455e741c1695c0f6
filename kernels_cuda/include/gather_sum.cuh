// The sum of a token's k rows: the combine, and with weights of 1 the gradient of x. Runs everywhere.
//
// A slot whose row is EMPTY adds nothing.
//
// Constants    Scalar storage type; PACK neighbouring columns that a lane moves at once, which divides d.
#pragma once
#include "common.cuh"
#include "pack.cuh"
#include "scalar.cuh"

// Rows that are asked for before the first is awaited.
constexpr int IN_FLIGHT = 4;

// sums += the rows first, first + 1, ... of the token's, IN_FLIGHT of them or as many as there are, each
// times its weight. Lane j knows where row j lies, and its weight. `pitch` is from one row to the next.
__device__ __forceinline__ void add_rows(const Scalar* rows, int row_of_lane, float weight_of_lane, int first,
                                         int column, int d, int pitch, float (&sums)[PACK]) {
    Pack<Scalar, PACK> packs[IN_FLIGHT];
    bool present[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
        const long long row = __shfl_sync(FULL_WARP, row_of_lane, first + i);
        present[i] = row != EMPTY && column < d;
        if (present[i]) packs[i] = load_pack<PACK>(rows + row * pitch + column);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
        const float weight = __shfl_sync(FULL_WARP, weight_of_lane, first + i);
        if (present[i])
#pragma unroll
            for (int p = 0; p < PACK; ++p) sums[p] += weight * to_float(packs[i].elements[p]);
    }
}

// The default finish: adds nothing to the sums of a token's rows.
struct NothingMore {
    __device__ __forceinline__ void operator()(float, int, float (&)[PACK]) const {}
};

// out (d,) of one token = the sum of its rows, each times weight_of(slot); k is at most 32. For a warp: a lane takes
// every 32nd pack of columns, and all of a token's rows of them in the order of the slots. Then
// finish(weight of the lane's slot, column, sums) may add to the sums.
template <class WeightOf, class Finish = NothingMore>
__device__ __forceinline__ void sum_rows_of_token(const Scalar* rows, const int* token_index_map, Scalar* out,
                                                  long long token, int d, int k, WeightOf weight_of,
                                                  Finish finish = Finish()) {
    const bool has_slot = lane_id() < k;
    const long long slot = token * k + lane_id();
    const int row_of_lane = has_slot ? token_index_map[slot] : EMPTY;
    const float weight_of_lane = has_slot ? weight_of(slot) : 0.0f;
    for (int first_column = 0; first_column < d; first_column += WARP * PACK) {
        const int column = first_column + lane_id() * PACK;
        float sums[PACK] = {};
        for (int first = 0; first < k; first += IN_FLIGHT)
            add_rows(rows, row_of_lane, weight_of_lane, first, column, d, d, sums);
        finish(weight_of_lane, column, sums);
        if (column < d) {
            Pack<Scalar, PACK> pack;
#pragma unroll
            for (int p = 0; p < PACK; ++p) pack.elements[p] = from_float<Scalar>(sums[p]);
            store_pack(out + column, pack);
        }
    }
}
