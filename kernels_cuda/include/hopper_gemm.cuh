// A grouped matrix product on Hopper: one warpgroup loads tiles, two multiply and store them. sm_90a.
//
// A tile of the result is (128, 256), made from 64 of the depth at a time. The loader fills a ring of stages in shared
// memory and runs ahead of the consumers, over the ends of tiles: while they store one tile, the next one's operands
// arrive. Each consumer owns 64 rows, in 128 float32 registers a thread. Blocks are persistent: block b takes tiles b,
// b + gridDim.x, ...
#pragma once
#include "hopper.cuh"
#include "scalar.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = 2;                                    // warpgroups
constexpr int BLOCK = (1 + CONSUMERS) * WARPGROUP;              // threads
constexpr int LOADER_REGISTERS = 72, CONSUMER_REGISTERS = 216;  // of 3 x 168 at the start
constexpr int CHUNK = 8;                                        // elements of 16 bytes
constexpr int PANEL = 64;                                       // elements of 128 bytes: a row of the swizzle
constexpr int PANEL_BYTES = 64 * 128;                           // 64 such rows
constexpr int A_BYTES = TILE_ROWS * TILE_DEPTH * 2, B_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;
constexpr int GROUP = 32;  // columns that are stored together
#ifndef BAND
#define BAND 8  // row tiles that are worked on side by side: they share B in the L2 cache
#endif

// One step of the depth. Operands lie in panels: rows of 128 bytes under TMA's swizzle.
struct Stage {
    unsigned char a[A_BYTES], b[B_BYTES];
};

// A warp's scratch memory, in which pairs of a result become 16 bytes a lane.
struct Scratch {
    static constexpr int SLICES = 6;  // of 8 rows, 32 elements each
    Chunk lines[SLICES][8 * GROUP / CHUNK];

    static __device__ __forceinline__ int place(int row, int chunk) { return row * 4 + (chunk ^ row / 2 % 4); }

    // pairs[s][j]: columns 8 j + lane % 4 * 2 and the next, of row lane / 4 of slice s. chunks[s]: columns lane % 4 * 8
    // and on of that row. All slices together, so that they wait for the memory once.
    template <int COUNT>
    __device__ __forceinline__ void regroup(Chunk (&chunks)[COUNT], const unsigned (&pairs)[COUNT][4]) {
        static_assert(COUNT <= SLICES, "as many as there is room for");
#pragma unroll
        for (int s = 0; s < COUNT; ++s)
            stmatrix_x4(&lines[s][place(lane_id() % 8, lane_id() / 8)],  //
                        pairs[s][0], pairs[s][1], pairs[s][2], pairs[s][3]);
        __syncwarp();
#pragma unroll
        for (int s = 0; s < COUNT; ++s) chunks[s] = lines[s][place(lane_id() / 4, lane_id() % 4)];
        __syncwarp();  // the lines may be written again
    }
};

struct Shared {
    Stage stages[STAGES];  // on a boundary of 1024 bytes, from which the swizzle counts
    Scratch scratch[CONSUMERS * WARPGROUP / WARP];
    Barrier full[STAGES], empty[STAGES];
};
constexpr int SHARED_ALIGNMENT = 1024;

__device__ __forceinline__ Shared& shared_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    const unsigned beyond = shared_address(memory) % SHARED_ALIGNMENT;
    return *reinterpret_cast<Shared*>(memory + (SHARED_ALIGNMENT - beyond) % SHARED_ALIGNMENT);
}

// COPYING: the loader's threads bring elements by cp.async too, and each warp arrives when its own are there.
template <bool COPYING>
__device__ __forceinline__ void open_ring(Shared& shared) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared.full[stage], 1 + (COPYING ? WARPGROUP / WARP : 0));
            barrier_init(&shared.empty[stage], CONSUMERS * WARPGROUP / WARP);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

// Where a role stands in the ring: the stage, and the parity of its phase.
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// ---- tiles ----

// Part (128, width) of the rows of one expert and of the columns.
struct RowTile {
    int expert, first, rows, column;  // first row in expert order, and how many there are: fewer than 128 at the end
    int steps;
};

// The tiles of all experts, expert after expert: a list that every block makes for itself.
struct RowTiles {
    using Tile = RowTile;
    const int *numbers, *offsets;  // (E + 1) each, in shared memory: the expert's first tile and first row
    int E, column_tiles, width, steps;
    int number, expert;

    // One warp makes the list behind `shared`; a __syncthreads() must follow.
    __device__ __forceinline__ RowTiles(Shared& shared, const int* expert_token_offsets, int E, int columns, int width,
                                        int depth)
        : numbers(reinterpret_cast<int*>(&shared + 1)), offsets(numbers + E + 1), E(E),
          column_tiles((columns + width - 1) / width), width(width), steps((depth + TILE_DEPTH - 1) / TILE_DEPTH),
          number(blockIdx.x), expert(0) {
        if (warp_id() != 0) return;
        int before = 0;
        for (int base = 0; base <= E; base += WARP) {
            const int mine = base + lane_id();
            const int begin = expert_token_offsets[min(mine, E)], end = expert_token_offsets[min(mine + 1, E)];
            const int tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS * column_tiles;
            const int below = warp_exclusive_sum(tiles);
            if (mine <= E) {
                const_cast<int*>(numbers)[mine] = before + below;
                const_cast<int*>(offsets)[mine] = begin;
            }
            before += warp_sum(tiles);
        }
    }

    // The block's next tile, if there is one.
    __device__ __forceinline__ bool next(RowTile& tile) {
        if (number >= numbers[E]) return false;
        while (number >= numbers[expert + 1]) ++expert;
        const int begin = offsets[expert], rows = offsets[expert + 1] - begin;
        // In bands of row tiles, down each column of a band.
        const int inside = number - numbers[expert], band = inside / (BAND * column_tiles);
        const int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, high = min(BAND, row_tiles - band * BAND);
        const int at = inside - band * BAND * column_tiles, column = at / high;
        const int row = (band * BAND + at - column * high) * TILE_ROWS;
        tile = {expert, begin + row, min(TILE_ROWS, rows - row), column * width, steps};
        number += gridDim.x;
        return true;
    }
};

// Part (128, 256) of one expert's weight gradient; the depth is the expert's rows.
struct WeightTile {
    int expert, row, column;
    int begin, end;  // rows in expert order
    int steps;
};

struct WeightTiles {
    using Tile = WeightTile;
    const int* expert_token_offsets;
    int E, row_tiles, column_tiles;
    int number;

    __device__ __forceinline__ WeightTiles(const int* expert_token_offsets, int E, int rows, int columns)
        : expert_token_offsets(expert_token_offsets), E(E), row_tiles((rows + TILE_ROWS - 1) / TILE_ROWS),
          column_tiles((columns + TILE_COLUMNS - 1) / TILE_COLUMNS), number(blockIdx.x) {}

    __device__ __forceinline__ bool next(WeightTile& tile) {
        const int tiles = row_tiles * column_tiles, expert = number / tiles;
        if (expert >= E) return false;
        const int inside = number - expert * tiles, column = inside / row_tiles;
        const int begin = expert_token_offsets[expert], end = expert_token_offsets[expert + 1];
        tile = {expert, (inside - column * row_tiles) * TILE_ROWS, column * TILE_COLUMNS, begin, end,
                (end - begin + TILE_DEPTH - 1) / TILE_DEPTH};
        number += gridDim.x;
        return true;
    }
};

// ---- the loader's side ----

// Waits until at most PENDING of this warp's newest stages are being copied, and says at an older one's barrier that
// wgmma may read it.
template <int PENDING>
__device__ __forceinline__ void arrive_copied(Barrier* full) {
    cp_async_wait<PENDING>();
    fence_async_proxy();
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(full);
}

// Fills the ring: load(tile) returns what fills a stage, (step, stage, barrier): all threads may copy, and then one of
// them arrives at the barrier with the bytes of its TMA copies. (In that order: after a branch that one lane takes, a
// warp may go on in two parts, and its copies take twice as long.) After the steps of the product come EXTRA stages
// for what else the consumers want to read.
template <bool COPYING, int EXTRA, class Tiles, class Load>
__device__ __forceinline__ void load_tiles(Shared& shared, Tiles tiles, Load load) {
    Turn turn;
    typename Tiles::Tile tile;
    Barrier* copied = nullptr;  // of the stage before: its copies are waited for once the next ones are under way
    while (tiles.next(tile)) {
        auto fill = load(tile);
#pragma unroll 1
        for (int step = 0; step < tile.steps + EXTRA; ++step, turn.next()) {
            Barrier* const full = &shared.full[turn.stage];
            barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
            fill(step, shared.stages[turn.stage], full);
            if (COPYING) {
                cp_async_commit();
                if (copied) arrive_copied<1>(copied);
                copied = full;
            }
        }
    }
    if (copied) arrive_copied<0>(copied);
}

// Where 16 bytes lie in panels: TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// COUNT chunks, those of `targets` apart by a period of the swizzle. All addresses are there before the first copy: a
// copy holds on to the registers of its addresses.
template <int COUNT, int PERIOD>
__device__ __forceinline__ void copy_chunks(unsigned char* panels, const int (&targets)[PERIOD],
                                            const void* const (&sources)[COUNT], int first, bool present) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        cp_async_or_zero(panels + targets[(first + i) % PERIOD] + (first + i) / PERIOD * 1024, sources[i], present);
}

// Operand A whose 128 rows lie anywhere in x: thread t brings chunk t % 8 of rows t / 8, t / 8 + 16, ...
struct GatheredRows {
    static constexpr int AT_ONCE = WARPGROUP / 8, COUNT = TILE_ROWS / AT_ONCE;
    unsigned chunks[COUNT];  // where the thread's chunks of each row begin, in 16 bytes
    const Chunk* x;
    int target;  // of the first, in the stage

    __device__ __forceinline__ GatheredRows(const Scalar* x, int d, const int* tokens, int rows)
        : x(reinterpret_cast<const Chunk*>(x)), target(swizzled(threadIdx.x / 8, threadIdx.x % 8)) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {  // rows beyond the last are read again: no one stores their results
            const int token = tokens[min(int(threadIdx.x) / 8 + i * AT_ONCE, rows - 1)];
            chunks[i] = unsigned(token) * unsigned(d / CHUNK) + threadIdx.x % 8;
        }
    }
    // 64 of the depth d, from p on, zeros beyond its end.
    __device__ __forceinline__ void load(unsigned char* panel, int p, int d) const {
        const Chunk* const source = x + p / CHUNK;
        const bool inside = p + int(threadIdx.x) % 8 * CHUNK < d;
        const void* sources[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sources[i] = source + chunks[i];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) cp_async_or_zero(panel + target + i * AT_ONCE * 128, sources[i], inside);
    }
};

// An operand whose depth is rows of a matrix, WIDTH of their columns: a warp brings chunk t % CHUNKS of rows.
template <int WIDTH>
struct DepthRows {
    static constexpr int CHUNKS = WIDTH / CHUNK, AT_ONCE = WARPGROUP / CHUNKS, COUNT = TILE_DEPTH / AT_ONCE;
    static constexpr int PERIOD = 8 / AT_ONCE;  // rows this far apart are swizzled alike
    const char* source;
    unsigned row_bytes;
    int targets[PERIOD];
    bool inside;

    __device__ __forceinline__ DepthRows(const Scalar* matrix, int width, int column) {
        const int chunk = threadIdx.x % CHUNKS, at = column + chunk * CHUNK;
        inside = at < width;
        source = reinterpret_cast<const char*>(matrix + (inside ? at : 0));
        row_bytes = width * 2;
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) targets[i] = chunk / 8 * PANEL_BYTES + swizzled(row(i), chunk % 8);
    }
    // The thread's i-th row in the stage.
    static __device__ __forceinline__ int row(int i) { return threadIdx.x / CHUNKS + i * AT_ONCE; }

    // A step whose i-th row is row number(i) of the matrix.
    template <class Number>
    __device__ __forceinline__ void load(unsigned char* panels, Number number) const {
        constexpr int BATCH = 8;
#pragma unroll
        for (int first = 0; first < COUNT; first += BATCH) {
            const void* sources[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                sources[i] = source + (unsigned long long)(unsigned)number(first + i) * row_bytes;
            copy_chunks(panels, targets, sources, first, inside);
        }
    }
    // The same of the first `rows` rows, zeros below: an expert's last step, so it need not be fast.
    template <class Number>
    __device__ __forceinline__ void load(unsigned char* panels, int rows, Number number) const {
        const int chunk = threadIdx.x % CHUNKS;
#pragma unroll 1
        for (int i = 0; i < COUNT; ++i)
            cp_async_or_zero(panels + chunk / 8 * PANEL_BYTES + swizzled(row(i), chunk % 8),
                             source + (unsigned long long)(unsigned)number(i) * row_bytes, inside && row(i) < rows);
    }
};

// ---- the consumers' side ----

// What a consumer reads from the ring.
struct Ring {
    Shared& shared;
    Turn turn;

    __device__ __forceinline__ Stage& wait() {
        barrier_wait(&shared.full[turn.stage], turn.parity);
        return shared.stages[turn.stage];
    }
    // This warp needs the stage no more.
    __device__ __forceinline__ void release(int stage) {
        if (lane_id() == 0) barrier_arrive(&shared.empty[stage]);
    }
    __device__ __forceinline__ int before() const { return (turn.stage + STAGES - 1) % STAGES; }
};

// A consumer's 64 rows of a tile.
struct Results {
    float sums[TILE_COLUMNS / 2];
    Scratch& scratch;

    // The thread's row in the tile, one of those 8 apart that it holds.
    static __device__ __forceinline__ int row(int half) {
        return (warp_id() - WARPGROUP / WARP) * 16 + half * 8 + lane_id() / 4;
    }
    // The first of its eight columns in a group, once they are regrouped.
    static __device__ __forceinline__ int column(int group) { return group * GROUP + lane_id() % 4 * CHUNK; }
    // Its sums of row(half), columns 32 group + 8 j + lane % 4 * 2 and the next, are at(group, half, j) and the next.
    static __device__ __forceinline__ int at(int group, int half, int j) { return (group * 4 + j) * 4 + half * 2; }

    // Its pairs, rounded, in both rows.
    __device__ __forceinline__ void round(unsigned (&low)[4], unsigned (&high)[4], int group) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = at(group, half, j);
                const Scalar pair[2] = {from_float<Scalar>(sums[i]), from_float<Scalar>(sums[i + 1])};
                (half ? high : low)[j] = reinterpret_cast<const unsigned&>(pair);
            }
    }
    // The columns of two groups, rounded: chunks of rows row(0) and row(1) of the one, then of the other.
    __device__ __forceinline__ void rounded(Chunk (&chunks)[4], int group, int other) {
        unsigned pairs[4][4];
        round(pairs[0], pairs[1], group);
        round(pairs[2], pairs[3], other);
        scratch.regroup(chunks, pairs);
    }
};

// Multiplies every tile and calls store(tile, results, ring).
template <bool A_ALONG_M, bool B_ALONG_N, class Tiles, class Store>
__device__ __forceinline__ void multiply_tiles(Shared& shared, Tiles tiles, Store store) {
    // 64 rows of A are one panel further on. 16 of the depth are 32 bytes along K, 16 rows otherwise.
    constexpr int A_STEP = A_ALONG_M ? 16 * 128 : 32, B_STEP = B_ALONG_N ? 16 * 128 : 32;
    // One for the whole warp, as the compiler sees by the shuffle.
    const int consumer = __shfl_sync(FULL_WARP, int(threadIdx.x) / WARPGROUP, 0) - 1;
    Ring ring{shared, {}};
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        Results results{{}, shared.scratch[warp_id() - WARPGROUP / WARP]};
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Stage& stage = ring.wait();
            const unsigned long long a = wgmma_operand(stage.a + consumer * PANEL_BYTES, PANEL_BYTES);
            const unsigned long long b = wgmma_operand(stage.b, PANEL_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TILE_DEPTH / 16; ++i)
                wgmma_m64n256k16<Scalar, A_ALONG_M, B_ALONG_N>(results.sums, wgmma_advance(a, i * A_STEP),
                                                               wgmma_advance(b, i * B_STEP), true);
            wgmma_commit();
            wgmma_wait<1>();  // the step before has been read
            if (step > 0) ring.release(ring.before());
            ring.turn.next();
        }
        wgmma_wait<0>();
        if (tile.steps > 0) ring.release(ring.before());
        store(tile, results, ring);
    }
}

// The whole block: a loader and two consumers.
template <bool COPYING, bool A_ALONG_M, bool B_ALONG_N, int EXTRA, class Tiles, class Load, class Store>
__device__ __forceinline__ void grouped_matmul(Shared& shared, Tiles tiles, Load load, Store store) {
    open_ring<COPYING>(shared);
    if (threadIdx.x < WARPGROUP) {
        registers_down<LOADER_REGISTERS>();
        if (COPYING || threadIdx.x == 0) load_tiles<COPYING, EXTRA>(shared, tiles, load);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        multiply_tiles<A_ALONG_M, B_ALONG_N>(shared, tiles, store);
    }
}

// ---- what kernels do alike ----

// Eight elements in 16 bytes.
union Eight {
    Chunk chunk;
    Scalar values[CHUNK];

    __device__ __forceinline__ Eight() {}
    __device__ __forceinline__ explicit Eight(const Chunk& chunk) : chunk(chunk) {}
    __device__ __forceinline__ Scalar at(int i) const { return values[i]; }
    __device__ __forceinline__ void set(int i, float value) { values[i] = from_float<Scalar>(value); }
    __device__ __forceinline__ void store(Scalar* place) const { *reinterpret_cast<Chunk*>(place) = chunk; }
};

// Stores a tile, rounded: row_at(row) is where a row of the tile begins, null if it is not there.
template <class RowAt>
__device__ __forceinline__ void store_rounded(Results& results, int first_column, int width, RowAt row_at) {
#pragma unroll
    for (int group = 0; group < TILE_COLUMNS / GROUP; group += 2) {
        Chunk chunks[4];
        results.rounded(chunks, group, group + 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Scalar* const row = row_at(Results::row(i % 2));
            const int column = first_column + Results::column(group + i / 2);
            if (row && column < width) *reinterpret_cast<Chunk*>(row + column) = chunks[i];
        }
    }
}
__device__ __forceinline__ void store_rows(const RowTile& tile, Results& results, Scalar* rows, int width) {
    store_rounded(results, tile.column, width, [&](int row) {
        return row < tile.rows ? rows + (long long)(tile.first + row) * width : nullptr;
    });
}
__device__ __forceinline__ void store_weights(const WeightTile& tile, Results& results, Scalar* weights, int rows,
                                              int width) {
    store_rounded(results, tile.column, width, [&](int row) {
        return tile.row + row < rows ? weights + ((long long)tile.expert * rows + tile.row + row) * width : nullptr;
    });
}

// A step of a weight gradient: rows of one operand are gathered, those of the other lie in expert order and come by
// TMA, but for the last step, which must end where the expert does.
template <int GATHERED, int PLAIN, bool GATHERED_IS_A>
struct GatheredAndPlain {
    static constexpr int CHUNKS = DepthRows<GATHERED>::CHUNKS, TOGETHER = WARP / CHUNKS;  // rows at once in a warp

    const WeightTile tile;
    DepthRows<GATHERED> gathered;
    DepthRows<PLAIN> plain;
    const TensorMap& plain_map;
    int plain_column;
    const int* tokens;  // of the expert
    int now, later;     // a token a lane: of this step (and the next, if it is even), and of the two after them

    __device__ __forceinline__ GatheredAndPlain(const WeightTile& tile, const Scalar* gathered, int gathered_width,
                                                int gathered_column, const TensorMap& plain_map, const Scalar* plain,
                                                int plain_width, int plain_column, const int* expert_token_indices)
        : tile(tile), gathered(gathered, gathered_width, gathered_column), plain(plain, plain_width, plain_column),
          plain_map(plain_map), plain_column(plain_column), tokens(expert_token_indices + tile.begin), now(0),
          later(tile.steps > 0 ? read(0) : 0) {}

    // Of the 16 rows that this warp brings in a step: lane l reads the token of row l % 16 in step + l / 16.
    __device__ __forceinline__ int read(int step) const {
        const int i = lane_id() % 16;
        const int row = (step + lane_id() / 16) * TILE_DEPTH + warp_id() * TOGETHER + i % TOGETHER +
                        i / TOGETHER * DepthRows<GATHERED>::AT_ONCE;
        return tokens[min(row, tile.end - tile.begin - 1)];
    }

    __device__ __forceinline__ void operator()(int step, Stage& stage, Barrier* full) {
        const int left = tile.end - tile.begin - step * TILE_DEPTH;
        const bool whole = left >= TILE_DEPTH;
        unsigned char* const gathered_stage = GATHERED_IS_A ? stage.a : stage.b;
        unsigned char* const plain_stage = GATHERED_IS_A ? stage.b : stage.a;
        if (step % 2 == 0) {
            now = later;
            later = read(step + 2);
        } else
            now = __shfl_down_sync(FULL_WARP, now, 16);
        auto token = [&](int i) { return __shfl_sync(FULL_WARP, now, i * TOGETHER + lane_id() / CHUNKS); };
        if (whole)
            gathered.load(gathered_stage, token);
        else {
            gathered.load(gathered_stage, left, token);
            plain.load(plain_stage, left,
                       [&](int i) { return min(tile.begin + step * TILE_DEPTH + plain.row(i), tile.end - 1); });
        }
        if (threadIdx.x == 0) {
            barrier_arrive_expecting(full, whole ? PLAIN * TILE_DEPTH * 2 : 0);
            if (whole)
#pragma unroll
                for (int panel = 0; panel < PLAIN / PANEL; ++panel)
                    tma_load(plain_stage + panel * PANEL_BYTES, &plain_map, full, plain_column + panel * PANEL,
                             tile.begin + step * TILE_DEPTH);
        }
    }
};
