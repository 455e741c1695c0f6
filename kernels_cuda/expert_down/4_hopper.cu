// expert_down, rung 4: Hopper.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without any kept
//              expert output, and the split into loader and consumers: SonicMoE (arXiv 2512.14080).
// Idea         The products of rung 3 on grouped_matmul: one warpgroup loads, by TMA and gathered
//              rows by cp.async, while two multiply by wgmma and a fourth stores what they have
//              finished; a block stays and takes tile after tile.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION. d and h are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel       grid             block  shared bytes  bytes read                                                                          bytes written
// expert_down  multiprocessors  512    230592        1540 E blocks + 2 h boxes D + 2 d h tiles                                           2 R d
// d_hidden     multiprocessors  512    230592        2048 E blocks + (4096 + 256 d) tiles C + 2 d h tiles + 4 R C + 2 R h G              2 R h (1 + G) + 4 R C
// d_w3         multiprocessors  512    230592        2048 E blocks + 512 (tiles + X) H D + 2 R d H + 2 R h D                             2 E h d
// G is 2 with a gated activation, else 1. D = ceil(d / 256), C = ceil(h / 256), H = ceil(h / 128).
// blocks is the whole grid; tiles is the sum over the experts of ceil(rows / 128), X the number of
// experts with rows, boxes the rows that a box of 128 from the first row of each tile on finds in the
// whole matrix. 2 R d h FLOPs a GEMM. Bound: tensor cores.
#include "hidden.cuh"
#include "hopper_gemm.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
using DownCrew = Crew<2, 2, false, false, true>;
extern "C" __global__ void __launch_bounds__(DownCrew::BLOCK, 1)
    expert_down(const __grid_constant__ TensorMap y_swi, const __grid_constant__ TensorMap w3,
                const int* expert_token_offsets, Scalar* y, int d, int h, int E) {
    auto& shared = shared_memory<Shared<3, 1>>();
    grouped_matmul<DownCrew>(
        shared, RowTiles(expert_token_offsets, E, d, TILE_COLUMNS, h),
        [&](const RowTile& tile) {
            return [=, &y_swi, &w3](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                barrier_arrive_expecting(full, A_BYTES + B_BYTES);
                tma_load(stage.a, &y_swi, full, p, tile.first);
#pragma unroll
                for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                    tma_load(stage.b + panel * PANEL_BYTES, &w3, full, tile.column + panel * PANEL, p, tile.expert);
            };
        },
        StoreRows{y, d});
}

// What a storer reads of some rows before it comes to them: a chunk of a and b a lane.
constexpr int BATCH = 2;  // rows
struct BatchAhead {
    Chunk a[BATCH][WARPGROUP], b[BATCH][WARPGROUP];  // of four storers
};
struct HiddenShared : Shared<3, 1> {
    BatchAhead ahead[2];
};

// The epilogue of d_hidden: a warp a row, a chunk a lane.
struct HiddenGradients {
    const float* gate_of_row;
    const Scalar *a, *b;
    Scalar *d_a, *d_b, *gated_y;
    float* gate_terms;
    int h;
    BatchAhead* ahead;  // in shared memory

    template <class Pieces>
    __device__ __forceinline__ void operator()(const RowTile& tile, int, const Pieces& pieces) const {
        constexpr int IN_PIECE = WARP_ROWS / BATCH, BATCHES = Pieces::COUNT * IN_PIECE;
        const int column = tile.column + lane_id() * CHUNK;
        auto first_row = [&](int batch) {
            return batch < BATCHES ? pieces.row(batch / IN_PIECE) + batch % IN_PIECE * BATCH : tile.rows;
        };
        // The gate of row lane_id() of the next batch, and of the one after it.
        float next_gate = read(0, tile, first_row(0), column), later_gate = read(1, tile, first_row(1), column);
#pragma unroll 1
        for (int batch = 0; batch < BATCHES; ++batch) {
            const int piece = batch / IN_PIECE, row = first_row(batch);
            auto& finished = pieces.take(piece);
            cp_async_wait<1>();
            Chunk a_chunks[BATCH], b_chunks[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                a_chunks[i] = ahead[batch % 2].a[i][thread()];
                b_chunks[i] = ahead[batch % 2].b[i][thread()];
            }
            const float gate = next_gate;
            next_gate = later_gate;
            later_gate = read(batch % 2, tile, first_row(batch + 2), column);
            store(finished, a_chunks, b_chunks, gate, tile, row, column);
            if (batch % IN_PIECE == IN_PIECE - 1) {
                __syncwarp();
                store_terms(finished, tile, pieces.row(piece));
                pieces.give_back(piece);
            }
        }
    }

    static __device__ __forceinline__ int thread() { return threadIdx.x % WARPGROUP; }
    __device__ __forceinline__ long long place(const RowTile& tile, int row, int column) const {
        return (long long)(tile.first + row) * h + column;
    }

    // Begins to copy the thread's chunks of a batch from `row` on, of rows that are there. Returns row lane_id()'s gate.
    __device__ __forceinline__ float read(int slot, const RowTile& tile, int row, int column) const {
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (row + i < tile.rows && column < h) {
                cp_async(&ahead[slot].a[i][thread()], a + place(tile, row + i, column));
                if (GATED) cp_async(&ahead[slot].b[i][thread()], b + place(tile, row + i, column));
            }
        cp_async_commit();
        const int mine = row + lane_id();
        return lane_id() < BATCH && mine < tile.rows ? gate_of_row[tile.first + mine] : 0.0f;
    }

    // A batch. Leaves each lane's term of a row's gate gradient where its chunk of d was.
    template <class Finished>
    __device__ __forceinline__ void store(Finished& finished, const Chunk (&a_chunks)[BATCH],
                                          const Chunk (&b_chunks)[BATCH], float gate, const RowTile& tile, int row,
                                          int column) const {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            Chunk &d = finished.at((row + i) % WARP_ROWS, lane_id()), d_a_chunk, d_b_chunk, y_chunk;
            const float gate_now = __shfl_sync(FULL_WARP, gate, i);
            float term = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float a_pair[2], b_pair[2], d_pair[2];
                unpack<Scalar>(a_chunks[i].words[j], a_pair);
                unpack<Scalar>(b_chunks[i].words[j], b_pair);
                unpack<Scalar>(d.words[j], d_pair);
                const HiddenGradient low = hidden_gradient(a_pair[0], b_pair[0], d_pair[0], gate_now);
                const HiddenGradient high = hidden_gradient(a_pair[1], b_pair[1], d_pair[1], gate_now);
                d_a_chunk.words[j] = packed<Scalar>(low.d_a, high.d_a);
                d_b_chunk.words[j] = packed<Scalar>(low.d_b, high.d_b);
                y_chunk.words[j] = packed<Scalar>(low.gated_y, high.gated_y);
                term += low.gate + high.gate;
            }
            d.words[0] = __float_as_int(column < h ? term : 0.0f);
            if (row + i >= tile.rows || column >= h) continue;
            const long long at = place(tile, row + i, column);
            *reinterpret_cast<Chunk*>(d_a + at) = d_a_chunk;
            if (GATED) *reinterpret_cast<Chunk*>(d_b + at) = d_b_chunk;
            *reinterpret_cast<Chunk*>(gated_y + at) = y_chunk;
        }
    }

    // Of a piece: lane l adds what the lanes have left in its row l.
    template <class Finished>
    __device__ __forceinline__ void store_terms(Finished& finished, const RowTile& tile, int first) const {
        if (lane_id() >= min(WARP_ROWS, tile.rows - first)) return;
        float sum = 0.0f;
#pragma unroll 4
        for (int lane = 0; lane < WARP; ++lane) sum += __int_as_float(finished.at(lane_id(), lane).words[0]);
        const int column_tiles = (h + TILE_COLUMNS - 1) / TILE_COLUMNS;
        gate_terms[(long long)(tile.first + first + lane_id()) * column_tiles + tile.column / TILE_COLUMNS] = sum;
    }
};

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
using HiddenCrew = Crew<4, 4, true, false, false>;
extern "C" __global__ void __launch_bounds__(HiddenCrew::BLOCK, 1)
    d_hidden(const Scalar* d_out, const __grid_constant__ TensorMap w3, const float* gate_of_row, const Scalar* a,
             const Scalar* b, const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a,
             Scalar* d_b, Scalar* gated_y, float* gate_terms, int d, int h, int E) {
    auto& shared = shared_memory<HiddenShared>();
    grouped_matmul<HiddenCrew>(
        shared, RowTiles(expert_token_offsets, E, h, TILE_COLUMNS, d),
        [&](const RowTile& tile) {
            const GatheredRows<HiddenCrew::COPIERS> rows(d_out, d, expert_token_indices + tile.first, tile.rows);
            return [=, &w3](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                rows.load(stage.a, p, d);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
                    tma_load(stage.b, &w3, full, p, tile.column, tile.expert);
                }
            };
        },
        HiddenGradients{gate_of_row, a, b, d_a, d_b, gated_y, gate_terms, h, shared.ahead});
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
using WeightCrew = Crew<4, 4, true, true, true>;
extern "C" __global__ void __launch_bounds__(WeightCrew::BLOCK, 1)
    d_w3(const __grid_constant__ TensorMap gated_y_map, const Scalar* gated_y, const Scalar* d_out,
         const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_w3, int d, int h, int E) {
    auto& shared = shared_memory<Shared<4, 2>>();
    grouped_matmul<WeightCrew>(
        shared, WeightTiles(expert_token_offsets, E, h, d),
        [&](const WeightTile& tile) {
            return GatheredAndPlain<TILE_COLUMNS, TILE_ROWS, false>(tile, d_out, d, tile.column, gated_y_map, gated_y,
                                                                    h, tile.row, expert_token_indices);
        },
        StoreWeights{d_w3, h, d});
}
