// The epilogue of d_hidden: from <d_out, w3> of a tile everything that hangs on it. sm_90a.
//
// Section 5 of MoEBlaze and SonicMoE. Eight elements of a and of b lie in two chunks: eight of a and eight of b.
// Or they are ALTERNATING: each chunk has four of a and four of b. The gradients go where a and b lie.
#pragma once
#include "hidden.cuh"
#include "hopper/grouped_matmul.cuh"

// ---- two chunks ------------------------------------------------------------------------

// Two neighbours of a and of b.
struct HiddenPairs {
    float a[2], b[2];
};

// The i-th two of the elements that the chunks hold.
template <bool ALTERNATING>
__device__ __forceinline__ HiddenPairs pairs_of(const Chunk& a_chunk, const Chunk& b_chunk, int i) {
    HiddenPairs pairs;
    if constexpr (ALTERNATING) {
        const Chunk& both = i < 2 ? a_chunk : b_chunk;
        float low[2], high[2];
        unpack<Scalar>(both.words[i % 2 * 2], low);
        unpack<Scalar>(both.words[i % 2 * 2 + 1], high);
        pairs = {{low[0], high[0]}, {low[1], high[1]}};
    } else {
        unpack<Scalar>(a_chunk.words[i], pairs.a);
        unpack<Scalar>(b_chunk.words[i], pairs.b);
    }
    return pairs;
}

// Puts them there.
template <bool ALTERNATING>
__device__ __forceinline__ void put_pairs(Chunk& a_chunk, Chunk& b_chunk, int i, const HiddenPairs& pairs) {
    if constexpr (ALTERNATING) {
        Chunk& both = i < 2 ? a_chunk : b_chunk;
        both.words[i % 2 * 2] = packed<Scalar>(pairs.a[0], pairs.b[0]);
        both.words[i % 2 * 2 + 1] = packed<Scalar>(pairs.a[1], pairs.b[1]);
    } else {
        a_chunk.words[i] = packed<Scalar>(pairs.a[0], pairs.a[1]);
        b_chunk.words[i] = packed<Scalar>(pairs.b[0], pairs.b[1]);
    }
}

// ---- the epilogue ------------------------------------------------------------------------

// The elements that an epilogue warp reads ahead: of each row, a chunk of a and b a lane.
struct RowAhead {
    Chunk a[WARPGROUP], b[WARPGROUP];
};
constexpr int ROWS_AHEAD = 4;
struct HiddenShared : Shared<3, 1> {
    RowAhead ahead[ROWS_AHEAD];
    Barrier met;  // of ColumnSums
};

// No further use of the gradients of a tile's rows. For another use see hopper/column_sums.cuh.
struct NoSums {
    __device__ __forceinline__ void add(int, const HiddenPairs&) {}
    __device__ __forceinline__ void end(const RowTile&) const {}
};

// A warp a row, a chunk of <d_out, w3> a lane. `pitch` is from one row of a, b or their gradients to the
// next, `y_pitch` from one of gated_y.
template <bool ALTERNATING, class Sums = NoSums>
struct HiddenGradients {
    const float* gate_of_row;
    const Scalar *a, *b;
    Scalar *d_a, *d_b, *gated_y;
    float* gate_terms;
    int h, pitch, y_pitch;
    RowAhead* ahead;  // in shared memory
    Sums of_tile;     // of none of its rows yet

    template <class Epilogue>
    __device__ __forceinline__ void operator()(const RowTile& tile, int, const Epilogue& epilogue) const {
        Sums sums = of_tile;
#pragma unroll 1
        for (int i = 0; i < Epilogue::COUNT; ++i) {
            const int first = epilogue.row(i), count = min(WARP_ROWS, tile.rows - first);
            // Lane l has the gate of row l.
            const float gates = lane_id() < count ? gate_of_row[tile.first + first + lane_id()] : 0.0f;
            const int column = tile.column + lane_id() * CHUNK;
            const int present = column < h ? count : 0;  // rows of the lane
            const long long first_row = tile.first + first, y_begin = first_row * y_pitch + column;
            const long long begin = first_row * pitch + (ALTERNATING ? 2 : 1) * column;
#pragma unroll
            for (int row = 0; row < ROWS_AHEAD; ++row) read(row, begin, present);
            auto& finished = epilogue.take(i);
#pragma unroll 1
            for (int row = 0; row < count; ++row) {
                cp_async_wait<ROWS_AHEAD - 1>();
                const RowAhead& now = ahead[row % ROWS_AHEAD];
                const Chunk a_chunk = now.a[thread()], b_chunk = now.b[thread()];
                read(row + ROWS_AHEAD, begin, present);
                const float gate = __shfl_sync(FULL_WARP, gates, row);
                Chunk& d = finished.at(row, lane_id());
                const float term = row < present
                                       ? store(begin + (long long)row * pitch, y_begin + (long long)row * y_pitch,
                                               a_chunk, b_chunk, d, gate, sums)
                                       : 0.0f;
                d.words[0] = __float_as_int(term);  // where d was
            }
            __syncwarp();
            const int column_tiles = (h + TILE_COLUMNS - 1) / TILE_COLUMNS;
            const long long place = (long long)(tile.first + first + lane_id()) * column_tiles;
            if (lane_id() < count) gate_terms[place + tile.column / TILE_COLUMNS] = sum_of_terms(finished);
            epilogue.give_back(i);
        }
        sums.end(tile);
    }

    static __device__ __forceinline__ int thread() { return threadIdx.x % WARPGROUP; }

    // Begins to copy the lane's chunks of a row, if that is there.
    __device__ __forceinline__ void read(int row, long long begin, int present) const {
        RowAhead& to = ahead[row % ROWS_AHEAD];
        if (row < present) {
            cp_async_or_zero(&to.a[thread()], a + begin + (long long)row * pitch, true);
            if (GATED) cp_async_or_zero(&to.b[thread()], b + begin + (long long)row * pitch, true);
        }
        cp_async_commit();
    }

    // Eight elements: a and b from `at` on, gate * y_swi from `y_at` on. Returns their term of the gate's gradient.
    __device__ __forceinline__ float store(long long at, long long y_at, Chunk a_chunk, Chunk b_chunk, Chunk d_chunk,
                                           float gate, Sums& sums) const {
        Chunk d_a_chunk, d_b_chunk, y_chunk;
        float term = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float d_pair[2];
            const HiddenPairs pairs = pairs_of<ALTERNATING>(a_chunk, b_chunk, i);
            unpack<Scalar>(d_chunk.words[i], d_pair);
            const HiddenGradient low = hidden_gradient(pairs.a[0], pairs.b[0], d_pair[0], gate);
            const HiddenGradient high = hidden_gradient(pairs.a[1], pairs.b[1], d_pair[1], gate);
            const HiddenPairs gradients = {{low.d_a, high.d_a}, {low.d_b, high.d_b}};
            put_pairs<ALTERNATING>(d_a_chunk, d_b_chunk, i, gradients);
            sums.add(i, gradients);
            y_chunk.words[i] = packed<Scalar>(low.gated_y, high.gated_y);
            term += low.gate + high.gate;
        }
        *reinterpret_cast<Chunk*>(d_a + at) = d_a_chunk;
        if (GATED) *reinterpret_cast<Chunk*>(d_b + at) = d_b_chunk;
        *reinterpret_cast<Chunk*>(gated_y + y_at) = y_chunk;
        return term;
    }

    // The sum of the terms that the lanes have left in row lane_id().
    template <class Finished>
    static __device__ __forceinline__ float sum_of_terms(Finished& finished) {
        float sum = 0.0f;
#pragma unroll 4
        for (int lane = 0; lane < WARP; ++lane) sum += __int_as_float(finished.at(lane_id(), lane).words[0]);
        return sum;
    }
};
