// A block's part of a grouped matrix product on Hopper: a ring of stages between one warpgroup that loads and two
// that multiply. sm_90a.
//
// A tile of the result is (128, 256), 64 of the depth at a time; each consumer owns 64 rows in 128 float32 registers
// a thread. The loader runs ahead through the stages, over the ends of tiles: while the consumers store one tile, the
// next one's operands arrive. Blocks are persistent: block b takes tiles b, b + gridDim.x, ...
#pragma once
#include "hopper.cuh"
#include "scalar.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = 2;                               // warpgroups
constexpr int BLOCK = (1 + CONSUMERS) * WARPGROUP;         // threads
constexpr int CHUNK = 8;                                   // elements of 16 bytes
constexpr int PANEL = 64;                                  // elements of 128 bytes, a row of the swizzle
constexpr int PANEL_BYTES = 64 * 128;                      // 64 rows of it
constexpr int A_BYTES = TILE_ROWS * TILE_DEPTH * 2, B_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;
constexpr int LOADER_REGISTERS = 72, CONSUMER_REGISTERS = 216;  // 3 x 168 at the start
constexpr int BAND = 16;                                   // row tiles that are worked on side by side, for the L2 cache

struct Stage {
    unsigned char a[A_BYTES], b[B_BYTES];
};

// A warp's scratch memory, twice 8 rows of 32 narrow elements, in which a result's pairs become 16 bytes a lane.
struct Scratch {
    Chunk lines[2][8 * 4];

    static __device__ __forceinline__ int place(int row, int chunk) { return row * 4 + (chunk ^ row / 2 % 4); }

    // pairs[j]: columns 8 j + lane % 4 * 2 and the next of row lane / 4. Returns columns lane % 4 * 8 on of that row.
    // Calls take turns with `slot`, so that one barrier is enough.
    __device__ __forceinline__ Chunk regroup(const unsigned (&pairs)[4], int slot) {
        stmatrix_x4(&lines[slot][place(lane_id() % 8, lane_id() / 8)], pairs);
        __syncwarp();
        return lines[slot][place(lane_id() / 4, lane_id() % 4)];
    }
};

// The block's shared memory: stages on a boundary of 1024 bytes, which the swizzle counts from.
struct Shared {
    Stage stages[STAGES];
    Scratch scratch[CONSUMERS * WARPGROUP / WARP];
    Barrier full[STAGES], empty[STAGES];
};
constexpr int ALIGNMENT = 1024;

// Where a role stands in the ring: the stage, and the parity of its phase.
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ Shared* shared_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    return reinterpret_cast<Shared*>(memory + (ALIGNMENT - shared_address(memory) % ALIGNMENT) % ALIGNMENT);
}

// `copying`: the loader's threads also bring elements by cp.async, and each says when they have arrived.
__device__ __forceinline__ void open_ring(Shared* shared, bool copying) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared->full[stage], 1 + (copying ? WARPGROUP : 0));
            barrier_init(&shared->empty[stage], CONSUMERS * WARPGROUP / WARP);
        }
        barrier_init_fence();
    }
}

// ---- the loader's side ----

// Fills `steps` stages, each by load(step, stage, barrier), which arrives at the barrier.
template <class Load>
__device__ __forceinline__ void fill(Shared* shared, Turn& turn, int steps, Load load) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step, turn.next()) {
        barrier_wait(&shared->empty[turn.stage], turn.parity ^ 1);
        load(step, shared->stages[turn.stage], &shared->full[turn.stage]);
    }
}

// Where 16 bytes lie in rows of 128: the 128-byte swizzle of TMA and wgmma.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// ---- the consumers' side ----

struct Sums {
    float values[TILE_COLUMNS / 2];
};

// sums = the product over `steps` stages.
// COPIED: threads wrote a part of the stages.
template <bool COPIED, bool A_ALONG_M, bool B_ALONG_N>
__device__ __forceinline__ void multiply(Sums& sums, Shared* shared, Turn& turn, int steps) {
    const int consumer = threadIdx.x / WARPGROUP - 1;
    auto release = [&](int stage) {
        if (lane_id() == 0) barrier_arrive(&shared->empty[stage]);
    };
    // 64 rows of A are one panel further, along either axis. 16 of the depth are 32 bytes along K, 16 rows otherwise.
    constexpr int A_STEP = A_ALONG_M ? 16 * 128 : 32, B_STEP = B_ALONG_N ? 16 * 128 : 32;
    if (steps == 0)
        for (float& value : sums.values) value = 0.0f;
    int before = 0;
    for (int step = 0; step < steps; ++step, turn.next()) {
        Stage& stage = shared->stages[turn.stage];
        barrier_wait(&shared->full[turn.stage], turn.parity);
        if (COPIED) fence_async_proxy();
        const unsigned long long a = wgmma_operand(stage.a + consumer * PANEL_BYTES, PANEL_BYTES);
        const unsigned long long b = wgmma_operand(stage.b, PANEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_DEPTH / 16; ++i)
            wgmma_m64n256k16<Scalar, A_ALONG_M, B_ALONG_N>(sums.values, wgmma_advance(a, i * A_STEP),
                                                           wgmma_advance(b, i * B_STEP), step > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();  // the step before has been read
        if (step > 0) release(before);
        before = turn.stage;
    }
    wgmma_wait<0>();
    if (steps > 0) release(before);
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    const Scalar pair[2] = {from_float<Scalar>(low), from_float<Scalar>(high)};
    return reinterpret_cast<const unsigned&>(pair);
}

// The thread's row in the tile, of those 8 rows apart that it holds.
__device__ __forceinline__ int row_of(int half) {
    return (threadIdx.x / WARP - WARPGROUP / WARP) * 16 + half * 8 + lane_id() / 4;
}
// The thread's eight columns among 32.
__device__ __forceinline__ int column_of(int group) { return group * 32 + lane_id() % 4 * CHUNK; }

// Where the sums of a group's j-th pair lie: columns group * 32 + 8 j + lane % 4 * 2 and the next.
__device__ __forceinline__ int place_of(int group, int j, int half) { return (group * 4 + j) * 4 + half * 2; }

// Eight neighbouring columns of one row, rounded: columns column_of(group) on.
__device__ __forceinline__ Chunk rounded(const Sums& sums, Scratch& scratch, int group, int half, int slot) {
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int at = place_of(group, j, half);
        pairs[j] = pack(sums.values[at], sums.values[at + 1]);
    }
    return scratch.regroup(pairs, slot);
}

__device__ __forceinline__ Scratch& my_scratch(Shared* shared) { return shared->scratch[warp_id() - WARPGROUP / WARP]; }

// ---- which tile is whose ----

struct Tile {
    int expert, row, column;  // of the result: the first row inside the expert's group, the first column
};

// The tile with this number among (row tiles, column tiles), in bands of row tiles, down each column of a band.
__device__ __forceinline__ Tile tile_in_bands(int expert, int number, int row_tiles, int column_tiles, int width) {
    const int band = number / (BAND * column_tiles), inside = number - band * BAND * column_tiles;
    const int rows = min(BAND, row_tiles - band * BAND);
    return {expert, (band * BAND + inside % rows) * TILE_ROWS, inside / rows * width};
}

// The tiles of all experts' rows, expert after expert: a list that every block makes for itself in shared memory.
struct RowTiles {
    const int* first;  // (E + 1) the number of each expert's first tile
    const int* begin;  // (E + 1) its first row, in expert order
    int E, column_tiles, width;
    int number = blockIdx.x, expert = 0;

    // Whether there is another tile for this block; steps on to the one after.
    __device__ __forceinline__ bool next(Tile& tile) {
        if (number >= first[E]) return false;
        while (number >= first[expert + 1]) ++expert;
        const int row_tiles = (rows() + TILE_ROWS - 1) / TILE_ROWS;
        tile = tile_in_bands(expert, number - first[expert], row_tiles, column_tiles, width);
        number += gridDim.x;
        return true;
    }
    __device__ __forceinline__ int rows() const { return begin[expert + 1] - begin[expert]; }
};

// One warp makes the list; a __syncthreads() must follow.
__device__ __forceinline__ RowTiles list_row_tiles(int* memory, const int* expert_token_offsets, int E, int columns, int width) {
    int *const first = memory, *const begin = memory + E + 1;
    const int column_tiles = (columns + width - 1) / width;
    if (warp_id() == 0) {
        int before = 0;
        for (int base = 0; base <= E; base += WARP) {
            const int expert = base + lane_id();
            const int start = expert_token_offsets[min(expert, E)], end = expert_token_offsets[min(expert + 1, E)];
            const int tiles = (end - start + TILE_ROWS - 1) / TILE_ROWS * column_tiles;
            const int below = warp_exclusive_sum(tiles);
            if (expert <= E) first[expert] = before + below, begin[expert] = start;
            before += warp_sum(tiles);
        }
    }
    return {first, begin, E, column_tiles, width};
}

// ---- operands that the loader's threads copy: rows that lie anywhere ----

// PANELS panels side by side, 64 rows each... the rows of one panel are `Rows::ROWS` gathered rows of 64 elements of the
// depth: thread t brings chunk t % 8 of rows t / 8, t / 8 + 16, ...
struct GatheredRows {
    static constexpr int EACH = TILE_ROWS * 8 / WARPGROUP;  // chunks a thread
    const Scalar* sources[EACH];

    // source(row): where a row of the tile begins.
    template <class Source>
    __device__ __forceinline__ void find(Source source) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) sources[i] = source(threadIdx.x / 8 + i * 16) + threadIdx.x % 8 * CHUNK;
    }
    // 64 of the depth, from p on; zeros beyond `depth`.
    __device__ __forceinline__ void load(unsigned char* panel, int p, int depth) const {
        const bool inside = p + int(threadIdx.x) % 8 * CHUNK < depth;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            cp_async_or_zero(panel + swizzled(threadIdx.x / 8 + i * 16, threadIdx.x % 8), inside ? sources[i] + p : sources[i], inside);
    }
};

// 64 rows that are the depth, WIDTH columns wide: panel after panel of 64 columns. row_at(i): the matrix's row that is
// the tile's i-th, or a negative number for zeros.
template <int WIDTH>
struct DepthRows {
    static constexpr int CHUNKS = WIDTH / CHUNK, AT_ONCE = WARPGROUP / CHUNKS, EACH = TILE_DEPTH / AT_ONCE;
    static __device__ __forceinline__ int first_row() { return threadIdx.x / CHUNKS; }

    // rows: lane l of the warp holds, for l < 16 * ..., see row_number
    template <class RowAt>
    static __device__ __forceinline__ void load(unsigned char* panels, const Scalar* matrix, int width, int column, RowAt row_at) {
        const int chunk = threadIdx.x % CHUNKS;
        const int at = column + chunk * CHUNK;
        unsigned char* const panel = panels + chunk / 8 * PANEL_BYTES;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int row = first_row() + i * AT_ONCE;
            const int source = row_at(i, row);
            const bool inside = source >= 0 && at < width;
            cp_async_or_zero(panel + swizzled(row, chunk % 8), matrix + (inside ? (long long)source * width + at : 0), inside);
        }
    }
};

// The tokens of the rows that a warp copies: for two steps at a time, one a lane, read two steps before their use.
// ROW_OF(i): the i-th of 16 rows of a step.
template <class RowOf>
struct Tokens {
    const int* tokens;  // of the expert
    int rows;           // of the expert
    RowOf row_of;
    int now = 0, later = 0;

    __device__ __forceinline__ Tokens(const int* tokens, int rows, RowOf row_of) : tokens(tokens), rows(rows), row_of(row_of) { later = read(0); }
    __device__ __forceinline__ int read(int step) const {
        const int row = (step + lane_id() / 16) * TILE_DEPTH + row_of(lane_id() % 16);
        return row < rows ? tokens[row] : -1;
    }
    __device__ __forceinline__ void begin(int step) {
        if (step % 2 == 0) {
            now = later;
            later = read(step + 2);
        }
    }
    __device__ __forceinline__ int at(int step, int i) const { return __shfl_sync(FULL_WARP, now, step % 2 * 16 + i); }
};
