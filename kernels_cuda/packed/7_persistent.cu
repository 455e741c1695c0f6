// packed, version 7: persistent blocks.
//
// Purpose      Of weights as models store them, the two kernels that those of expert_up and expert_down cannot stand
//              for: ab = x gate_up and y_swi; and d_ab, gate * y_swi and the gates' gradients from d_out down^T.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without any kept expert
//              output, and the split into producer and consumers: SonicMoE (arXiv 2512.14080).
// Idea         The kernels expert_up and d_hidden of version 7, with their operands where LAYOUT says. A weight whose
//              neighbours lie along the depth comes in boxes along it, and wgmma reads it along K; the other one in
//              boxes along its columns, along N. Where columns alternate, a tile is one product. Biases are one more
//              row of gate_up, and x has a column of ones for it. For their gradient d_hidden's epilogue adds up the
//              rows of its tiles of d_ab, before they are rounded.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION; LAYOUT; BIASED; STORE_PROJECTIONS and STORE_Y_SWI;
//              BAND, see hopper/scheduler.cuh. d and h are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel     grid             block  shared bytes
//            bytes read
//            bytes written
// expert_up  multiprocessors  384    230592
//            1536 E blocks + (4096 + 256 d) tiles ceil(G h / 256) + 2 d h G tiles + 2 U h G tiles
//            2 R h (G P + Y)
// d_hidden   multiprocessors  512    230592
//            2048 E blocks + (4096 + 256 d) tiles C + 2 d h tiles + 4 R C + 2 R h G
//            2 R h (1 + G) + 4 R C + 4 U h G tiles
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; U is BIASED; G is 2 with a
// gated activation, else 1. C = ceil(h / 256). blocks is the whole grid; tiles is the sum over the experts of
// ceil(rows / 128). Threads that follow the tiles read all ends of the experts' rows, idle producers the first alone.
// 2 R d h G FLOPs in expert_up, 2 R d h in d_hidden. Bound: tensor cores.
#include "hopper/column_sums.cuh"
#include "hopper/grouped_matmul.cuh"
#include "hopper/hidden_gradients.cuh"
#include "packed.cuh"

constexpr bool ALTERNATING = LAYOUT::INTERLEAVED;

// ---- ab = x gate_up ------------------------------------------------------------------------

constexpr int RESULTS = ALTERNATING ? 1 : PROJECTIONS;  // matrices whose panels lie side by side in a tile
constexpr int WIDTH = TILE_COLUMNS / RESULTS;           // columns of a tile of each

// Eight neighbours of a and of b.
__device__ __forceinline__ void store_side_by_side(Scalar* ab, Scalar* y_swi, int row, int j, int h, Chunk a_chunk,
                                                   Chunk b_chunk) {
    store_hidden(ab + packed_at(row, 0, j, h), ab + packed_at(row, PROJECTIONS - 1, j, h),
                 y_swi + (long long)row * h + j, 0, a_chunk, b_chunk);
}

// Four neighbours of a and of b that alternate.
__device__ __forceinline__ void store_alternating(Scalar* ab, Scalar* y_swi, int row, int j, int h, Chunk chunk) {
    if (STORE_PROJECTIONS) *reinterpret_cast<Chunk*>(ab + packed_at(row, 0, j, h)) = chunk;
    if (!STORE_Y_SWI) return;
    uint2 y;
    float first[2], second[2], third[2], fourth[2];
    unpack<Scalar>(chunk.words[0], first);
    unpack<Scalar>(chunk.words[1], second);
    unpack<Scalar>(chunk.words[2], third);
    unpack<Scalar>(chunk.words[3], fourth);
    y.x = packed<Scalar>(hidden_activation(first[0], first[1]), hidden_activation(second[0], second[1]));
    y.y = packed<Scalar>(hidden_activation(third[0], third[1]), hidden_activation(fourth[0], fourth[1]));
    *reinterpret_cast<uint2*>(y_swi + (long long)row * h + j) = y;
}

// The epilogue of expert_up. Panels of a and b, 64 columns each, lie side by side in a tile, or columns alternate.
struct Hidden {
    Scalar *ab, *y_swi;
    int h;

    template <class Epilogue>
    __device__ __forceinline__ void operator()(const RowTile& tile, int, const Epilogue& epilogue) const {
        constexpr int PANEL_CHUNKS = PANEL / CHUNK, CHUNKS = WIDTH / CHUNK, AT_ONCE = WARP / CHUNKS;
        constexpr int MERGED = ALTERNATING ? 2 : 1;
        const int i = lane_id() % CHUNKS, j = (tile.column + i * CHUNK) / MERGED;
        const int a_chunk = i / PANEL_CHUNKS * RESULTS * PANEL_CHUNKS + i % PANEL_CHUNKS;
#pragma unroll 1
        for (int n = 0; n < Epilogue::COUNT; ++n) {
            auto& finished = epilogue.take(n);
            const int first = epilogue.row(n);
            if (j < h)
#pragma unroll(2 * MERGED)  // four chunks are under way
                for (int row = lane_id() / CHUNKS; row < min(WARP_ROWS, tile.rows - first); row += AT_ONCE) {
                    const int routed = tile.first + first + row;
                    const Chunk& chunk = finished.at(row, a_chunk);
                    if constexpr (ALTERNATING)
                        store_alternating(ab, y_swi, routed, j, h, chunk);
                    else
                        store_side_by_side(ab, y_swi, routed, j, h, chunk,
                                           finished.at(row, a_chunk + PANEL_CHUNKS * (RESULTS - 1)));
                }
            epilogue.give_back(n);
        }
    }
};

using UpRoles = WarpRoles<2, 2, true, false, !LAYOUT::TRANSPOSED, BIASED>;

// A tile's biases, as one more step of the depth: a column of ones times a row of biases. Each of the threads that copy
// has four of them in registers long before that step.
struct Biases {
    static constexpr int DEPTH = 16, COUNT = TILE_COLUMNS / UpRoles::COPIERS, CHUNKS = DEPTH / CHUNK;
    Scalar biases[COUNT];

    // Of an expert, in the order of ab's columns. A tile begins in `column` of each result, which has so many.
    __device__ __forceinline__ Biases(const Scalar* of_expert, int column, int columns) {
        if (!BIASED) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int panel = place(i) / PANEL, of_result = column + panel / RESULTS * PANEL + place(i) % PANEL;
            biases[i] = of_result < columns ? of_expert[panel % RESULTS * columns + of_result] : from_float<Scalar>(0);
        }
    }
    // In which of the tile's columns the thread's i-th bias is.
    static __device__ __forceinline__ int place(int i) {
        return LAYOUT::TRANSPOSED ? i * UpRoles::COPIERS + threadIdx.x : threadIdx.x * COUNT + i;
    }
    // 16 of the depth, of which the first alone is not 0.
    __device__ __forceinline__ void put(Stage& stage) const {
        const Chunk zeros = {};
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i += UpRoles::COPIERS) put_line(stage.a, i + threadIdx.x, from_float<Scalar>(1));
        if constexpr (LAYOUT::TRANSPOSED) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) put_line(stage.b, place(i), biases[i]);
        } else {
#pragma unroll
            for (int i = 0; i < TILE_COLUMNS * CHUNKS; i += UpRoles::COPIERS) {
                const int chunk = i + threadIdx.x, k = chunk / CHUNK % DEPTH;
                if (k > 0) chunk_at(stage.b, chunk / CHUNK / DEPTH, k, chunk % CHUNK) = zeros;
            }
            const int chunk = place(0) / CHUNK;
            reinterpret_cast<uint2*>(&chunk_at(stage.b, chunk / CHUNK, 0, chunk % CHUNK))[threadIdx.x % 2] =
                reinterpret_cast<const uint2&>(biases);
        }
    }
    // The depth of a row of an operand that lies along it.
    static __device__ __forceinline__ void put_line(unsigned char* operand, int row, Scalar first) {
        Chunk chunk = {};
        chunk.words[0] = packed<Scalar>(to_float(first), 0.0f);
        chunk_at(operand, 0, row, 0) = chunk;
        chunk_at(operand, 0, row, 1) = Chunk{};
    }
    static __device__ __forceinline__ Chunk& chunk_at(unsigned char* operand, int panel, int row, int chunk) {
        return *reinterpret_cast<Chunk*>(operand + panel * PANEL_BYTES + swizzled(row, chunk));
    }
};
static_assert(!BIASED || (Biases::COUNT * sizeof(Scalar) == sizeof(uint2) && PANEL == CHUNK * CHUNK));

// Fills the ring for a tile: rows of x, and columns of w1 and w2.
struct UpOperands {
    GatheredRows<UpRoles::COPIERS> rows;
    const TensorMap *w1, *w2;
    int d, column, expert;
    Biases biases;

    __device__ __forceinline__ void operator()(int step, Stage& stage, Barrier* full) const {
        const int p = step * TILE_DEPTH;
        rows.load(stage.a, p, d);
        if (threadIdx.x == 0) {
            barrier_arrive_expecting(full, B_BYTES);
#pragma unroll
            for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel) {
                const int at = column + panel / RESULTS * PANEL;
                tma_load(stage.b + panel * PANEL_BYTES, panel % RESULTS ? w2 : w1, full, LAYOUT::TRANSPOSED ? p : at,
                         LAYOUT::TRANSPOSED ? at : p, expert);
            }
        }
    }
    __device__ __forceinline__ void short_step(Stage& stage) const { biases.put(stage); }
};

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums. The maps are those of the
// columns of w1 and w2, or twice that of both.
extern "C" __global__ void __launch_bounds__(UpRoles::BLOCK, 1)
    expert_up(const Scalar* x, const __grid_constant__ TensorMap w1, const __grid_constant__ TensorMap w2,
              const int* expert_token_indices, const int* expert_token_offsets, Scalar* ab, Scalar* y_swi, int d, int h,
              int E, const Scalar* bias) {
    auto& shared = shared_memory<Shared<3, 1>>();
    const int columns = PROJECTIONS / RESULTS * h;
    grouped_matmul<UpRoles>(
        shared, RowTiles(expert_token_offsets, E, columns, WIDTH, d),
        [&](const RowTile& tile) {
            const Biases biases(bias + packed_at(tile.expert, 0, 0, h), tile.column, columns);
            return UpOperands{
                {x, d, expert_token_indices + tile.first, tile.rows}, &w1, &w2, d, tile.column, tile.expert, biases};
        },
        Hidden{ab, y_swi, h});
}

// ---- d_ab from d_out down^T ------------------------------------------------------------------------

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
// And, if it is BIASED, the sums over each tile's rows that d_up_bias_of_tiles adds up.
using HiddenRoles = WarpRoles<4, 4, true, false, LAYOUT::TRANSPOSED>;
extern "C" __global__ void __launch_bounds__(HiddenRoles::BLOCK, 1)
    d_hidden(const Scalar* d_out, const __grid_constant__ TensorMap down, const float* gate_of_row, const Scalar* ab,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_ab, Scalar* gated_y,
             float* gate_terms, int d, int h, int E, float* tile_sums) {
    auto& shared = shared_memory<HiddenShared>();
    const int second = ALTERNATING ? CHUNK : h;  // elements from the first chunk of a row to the second
    auto sums = [&] {
        if constexpr (BIASED)
            return ColumnSums<HiddenRoles::EPILOGUE_WARPS>(tile_sums, h, shared);
        else
            return NoSums();
    }();
    grouped_matmul<HiddenRoles>(
        shared, RowTiles(expert_token_offsets, E, h, TILE_COLUMNS, d),
        [&](const RowTile& tile) {
            const GatheredRows<HiddenRoles::COPIERS> rows(d_out, d, expert_token_indices + tile.first, tile.rows);
            return [=, &down](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                rows.load(stage.a, p, d);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
                    if constexpr (LAYOUT::TRANSPOSED)
#pragma unroll
                        for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                            tma_load(stage.b + panel * PANEL_BYTES, &down, full, tile.column + panel * PANEL, p,
                                     tile.expert);
                    else
                        tma_load(stage.b, &down, full, p, tile.column, tile.expert);
                }
            };
        },
        HiddenGradients<ALTERNATING, decltype(sums)>{gate_of_row, ab, ab + second, d_ab, d_ab + second, gated_y,
                                                     gate_terms, h, PROJECTIONS * h, h, shared.ahead, sums});
}
