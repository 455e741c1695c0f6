// A block's matrix product on tensor cores: mma.sync, ldmatrix, cp.async. sm_80 and newer; SIMT executor.
//
// A tile A (TILE_ROWS, depth) times a tile B (depth, TILE_COLUMNS), TILE_DEPTH at a time, through a ring of STAGES in
// shared memory: while one stage is multiplied the next ones arrive. A warp owns (WARP_ROWS, WARP_COLUMNS) of the
// result in float32 registers, and reads one step's fragments from shared memory while it multiplies the last ones.
// The larger its part, the less it reads: 64 x 64 takes 4 KiB for 32 instructions, 32 x 32 takes 2 KiB for 8. Two
// results that share A share the columns of the tile, too.
#pragma once
#include "pack.cuh"
#include "stages.cuh"

constexpr int PART = 2 * CHUNK;  // of the depth in one instruction: 32 bytes of each operand
static_assert(THREADS == (TILE_ROWS / WARP_ROWS) * (TILE_COLUMNS / WARP_COLUMNS) * WARP, "one warp a part");
static_assert(TILE_DEPTH % (2 * PART) == 0, "fragments are read into two sets of registers by turns");
static_assert(STAGES >= 2, "one stage is multiplied while another arrives");

// ---- results ---------------------------------------------------------------------------------

// Eight neighbours of a row, moved 16 bytes at a time.
union Eight {
    Pack<Scalar, CHUNK> packs[8 / CHUNK];
    Scalar values[8];

    __device__ __forceinline__ Eight() {}
    __device__ __forceinline__ explicit Eight(const Scalar* source) {
#pragma unroll
        for (int i = 0; i < 8 / CHUNK; ++i) packs[i] = load_pack<CHUNK>(source + i * CHUNK);
    }
    __device__ __forceinline__ void store(Scalar* target) const {
#pragma unroll
        for (int i = 0; i < 8 / CHUNK; ++i) store_pack(target + i * CHUNK, packs[i]);
    }
};

// Of four lanes, lane t has two neighbours of each of four groups of eight: it gets all eight of group t.
__device__ __forceinline__ void regroup_in_quad(float (&values)[8]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane_id() & step;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i & 2 * step) continue;
            float &low = values[i], &high = values[i + 2 * step];
            const float other = __shfl_xor_sync(FULL_WARP, upper ? low : high, step);
            low = upper ? other : low;
            high = upper ? high : other;
        }
    }
}

template <int RESULTS>
struct WarpResults {
    static constexpr int WIDTH = TILE_COLUMNS / RESULTS;       // of one result's tile
    static constexpr int WARP_WIDTH = WARP_COLUMNS / RESULTS;  // of the warp's part of it
    static constexpr int LINES = WARP_ROWS / 8;                // rows of one thread
    static_assert(WARP_WIDTH % 32 == 0, "four lanes own eight neighbours each");
    float values[RESULTS][WARP_ROWS / 16][WARP_WIDTH / 8][4] = {};

    static __device__ __forceinline__ int first_row() { return warp_id() / (TILE_COLUMNS / WARP_COLUMNS) * WARP_ROWS; }
    static __device__ __forceinline__ int first_column() {
        return warp_id() % (TILE_COLUMNS / WARP_COLUMNS) * WARP_WIDTH;
    }
    static __device__ __forceinline__ int row(int line) { return first_row() + lane_id() / 4 + 8 * line; }
    static __device__ __forceinline__ int column(int group) { return first_column() + 32 * group + lane_id() % 4 * 8; }

    // Calls visit(line, row, column, eight neighbours of every result, what was loaded) for the thread's part of the
    // tile. load(row, column) reads what else the visit needs, AHEAD visits before: with a large tile a multiprocessor
    // has no other block that could work while this one waits for memory.
    template <class Load, class Visit>
    __device__ __forceinline__ void each(Load load, Visit visit) const {
        constexpr int GROUPS = WARP_WIDTH / 32, VISITS = LINES * GROUPS, AHEAD = VISITS < 4 ? VISITS : 4;
        decltype(load(0, 0)) loaded[VISITS];
#pragma unroll
        for (int next = 0; next < VISITS + AHEAD; ++next) {
            if (next < VISITS) loaded[next] = load(row(next / GROUPS), column(next % GROUPS));
            const int now = next - AHEAD, line = now / GROUPS, group = now % GROUPS;
            if (now < 0) continue;
            float eights[RESULTS][8];
#pragma unroll
            for (int r = 0; r < RESULTS; ++r) {
#pragma unroll
                for (int i = 0; i < 8; ++i) eights[r][i] = values[r][line / 2][4 * group + i / 2][line % 2 * 2 + i % 2];
                regroup_in_quad(eights[r]);
            }
            visit(line, row(line), column(group), eights, loaded[now]);
        }
    }
};

struct Nothing {};
__device__ __forceinline__ Nothing load_nothing(int, int) { return {}; }

// Stores a tile, rounded, from where `target` points on: its rows and columns that lie inside; rows are `pitch` apart.
__device__ __forceinline__ void store_tile(const WarpResults<1>& results, Scalar* target, int rows, int columns,
                                           int pitch) {
    results.each(load_nothing, [&](int, int row, int column, const float (&values)[1][8], Nothing) {
        if (row >= rows || column >= columns) return;
        Eight rounded;
#pragma unroll
        for (int i = 0; i < 8; ++i) rounded.values[i] = from_float<Scalar>(values[0][i]);
        rounded.store(target + (long long)row * pitch + column);
    });
}

// ---- the product -----------------------------------------------------------------------------

// sums += A B for one instruction's 16 x PART by PART x 8.
template <class Element>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (sizeof(Element) == 4)
        mma_m16n8k8_tf32(sums, a, b);
    else
        mma_m16n8k16<Element>(sums, a, b);
}

// results += A B for every result; a and b, one for each result, are the `Lines` of the operands along their axes.
// Needs STAGES * TILE_DEPTH * (TILE_ROWS + TILE_COLUMNS) * sizeof(Scalar) bytes of dynamic shared memory, and leaves
// them in use: a block calls it once.
template <Along A_ALONG, Along B_ALONG, int RESULTS, class A, class B>
__device__ __forceinline__ void mma_matmul(WarpResults<RESULTS>& results, int depth, const A& a, const B* b) {
    using OperandA = Operand<TILE_ROWS, A_ALONG>;
    using OperandB = Operand<WarpResults<RESULTS>::WIDTH, B_ALONG>;
    constexpr int STAGE = OperandA::SIZE + RESULTS * OperandB::SIZE;
    constexpr int M = WARP_ROWS / 16, N = WarpResults<RESULTS>::WARP_WIDTH / 16, PARTS = TILE_DEPTH / PART;
    DYNAMIC_SHARED(Chunk, shared);
    const int steps = (depth + TILE_DEPTH - 1) / TILE_DEPTH;
    Copies<OperandA, A_ALONG, A> a_copies;
    Copies<OperandB, B_ALONG, B> b_copies[RESULTS];
    a_copies.open(a);
#pragma unroll
    for (int r = 0; r < RESULTS; ++r) b_copies[r].open(b[r]);

    auto start = [&](int step) {
        Chunk* const stage = shared + step % STAGES * STAGE;
        if (step < steps) {
            a_copies.start(stage, step * TILE_DEPTH);
#pragma unroll
            for (int r = 0; r < RESULTS; ++r)
                b_copies[r].start(stage + OperandA::SIZE + r * OperandB::SIZE, step * TILE_DEPTH);
        }
        cp_async_commit();  // a group for every step, so that counting them tells what has arrived
    };
    unsigned a_fragments[2][M][4], b_fragments[2][RESULTS][N][4];
    auto read = [&](int set, const Chunk* stage, int p) {
#pragma unroll
        for (int m = 0; m < M; ++m)
            OperandA::template fragments<true>(a_fragments[set][m], stage, results.first_row() + 16 * m, p);
#pragma unroll
        for (int r = 0; r < RESULTS; ++r)
#pragma unroll
            for (int n = 0; n < N; ++n)
                OperandB::template fragments<false>(b_fragments[set][r][n], stage + OperandA::SIZE + r * OperandB::SIZE,
                                                    results.first_column() + 16 * n, p);
    };
    auto arrived = [&] {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the next stage has arrived for all, and all have read the one before
    };

    for (int step = 0; step < STAGES - 1; ++step) start(step);
    arrived();
    read(0, shared, 0);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const bool last = part == PARTS - 1;
            if (last) arrived();
            read((part + 1) % 2, shared + (last ? step + 1 : step) % STAGES * STAGE, last ? 0 : (part + 1) * PART);
            if (part == 0) start(step + STAGES - 1);
#pragma unroll
            for (int r = 0; r < RESULTS; ++r)
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const unsigned (&both)[4] = b_fragments[part % 2][r][n];
                        multiply<Scalar>(results.values[r][m][2 * n], a_fragments[part % 2][m], {both[0], both[1]});
                        multiply<Scalar>(results.values[r][m][2 * n + 1], a_fragments[part % 2][m], {both[2], both[3]});
                    }
        }
    }
}
