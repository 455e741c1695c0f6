// A grouped matrix product on Hopper: some warps load tiles, two warpgroups multiply them, other warps store them.
// sm_90a.
//
// A tile of the result is (128, 256), made from 64 of the depth at a time. The loaders fill a ring of stages in shared
// memory and run ahead of the consumers, over the ends of tiles. Each consumer owns 64 rows, in 128 float32 registers a
// thread; a finished tile it leaves in shared memory, rounded, and goes on with the next one, while the storers bring
// it to global memory with all that hangs on it. Blocks are persistent: block b takes tiles b, b + gridDim.x, ..., or
// of a weight gradient what shares.cuh says.
#pragma once
#include "hopper.cuh"
#include "scalar.cuh"
#include "shares.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;
constexpr int CHUNK = 8;               // elements of 16 bytes
constexpr int PANEL = 64;              // elements of 128 bytes: a row of the swizzle
constexpr int PANEL_BYTES = 64 * 128;  // 64 such rows
constexpr int A_BYTES = TILE_ROWS * TILE_DEPTH * 2, B_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;
constexpr int WARP_ROWS = 16;  // of a tile, in a consumer's warp
constexpr int PIECES = TILE_ROWS / WARP_ROWS;
#ifndef BAND
#define BAND 8  // row tiles that are worked on side by side: they share B in the L2 cache
#endif

// Who does what in a block: warps that load, warps that store, and two warpgroups that multiply. COPYING: all lanes of
// the loaders copy, not one alone. A_ALONG_M, B_ALONG_N: as in wgmma.
template <int LOADERS_, int STORERS_, bool COPYING, bool A_ALONG_M_, bool B_ALONG_N_>
struct Crew {
    static constexpr int LOADERS = LOADERS_, STORERS = STORERS_, CONSUMERS = 2 * WARPGROUP / WARP;
    static constexpr int FIRST_CONSUMER = LOADERS + STORERS, BLOCK = (FIRST_CONSUMER + CONSUMERS) * WARP;
    static constexpr int COPIERS = COPYING ? LOADERS * WARP : 0;
    static constexpr bool A_ALONG_M = A_ALONG_M_, B_ALONG_N = B_ALONG_N_;
    // Up to four warps beside the consumers leave everyone the 168 registers that these need. Eight do not: then
    // registers are dealt out anew, 128 at first, too few for ptxas to take a wgmma of all columns.
    static constexpr bool CROWDED = FIRST_CONSUMER > WARPGROUP / WARP;
    static constexpr int LOADER_REGISTERS = 72, CONSUMER_REGISTERS = 168, STORER_REGISTERS = 104;  // if crowded
    static_assert(!CROWDED || LOADERS * LOADER_REGISTERS + STORERS * STORER_REGISTERS +
                                      CONSUMERS * CONSUMER_REGISTERS <= BLOCK / WARP * 128,
                  "who asks for more than the block began with waits for ever");
};

// One step of the depth. Operands lie in panels: rows of 128 bytes under TMA's swizzle.
struct Stage {
    unsigned char a[A_BYTES], b[B_BYTES];
};

// A piece of a tile, 16 rows that one warp of a consumer has finished. It writes them, a storer reads them.
template <int COLUMNS>
struct FinishedRows {
    Chunk lines[WARP_ROWS][COLUMNS / CHUNK];

    __device__ __forceinline__ Chunk& at(int row, int chunk) { return lines[row][chunk ^ row % 8]; }
};
// The same piece transposed: of each column the 16 rows side by side, in two chunks.
template <int COLUMNS>
struct FinishedColumns {
    Chunk lines[COLUMNS][WARP_ROWS / CHUNK];

    __device__ __forceinline__ Chunk& at(int column, int half) { return lines[column][half ^ column / 4 % 2]; }
};

// A block's shared memory. A finished tile is handed over in PARTS of its columns, one after another: whole if the
// storers are to work beside the product, in parts if that leaves room for a stage more.
template <int STAGES_, int PARTS_, template <int> class Finished = FinishedRows>
struct Shared {
    static constexpr int STAGES = STAGES_, PARTS = PARTS_;
    Stage stages[STAGES];  // on a boundary of 1024 bytes, from which the swizzle counts
    Finished<TILE_COLUMNS / PARTS> finished[PIECES];
    Barrier full[STAGES], empty[STAGES];
    Barrier done[PIECES], stored[PIECES];
};
// With the tiles of a weight gradient that the block takes.
template <template <int> class Finished = FinishedRows>
struct WeightShared : Shared<4, 2, Finished> {
    Shares shares;
};
constexpr int SHARED_ALIGNMENT = 1024;

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    const unsigned beyond = shared_address(memory) % SHARED_ALIGNMENT;
    return *reinterpret_cast<Shared*>(memory + (SHARED_ALIGNMENT - beyond) % SHARED_ALIGNMENT);
}

template <class Crew, class Shared>
__device__ __forceinline__ void open_ring(Shared& shared) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shared::STAGES; ++stage) {
            barrier_init(&shared.full[stage], 1 + Crew::COPIERS);  // each of these arrives when its copies are there
            barrier_init(&shared.empty[stage], Crew::CONSUMERS);
        }
        for (int piece = 0; piece < PIECES; ++piece) {
            barrier_init(&shared.done[piece], 1);
            barrier_init(&shared.stored[piece], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

// Where a role stands in the ring: the stage, and the parity of its phase.
template <int STAGES>
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

// Where a block stands in the tiles of all experts, expert after expert.
struct RowTiles {
    using Tile = RowTile;
    const int* expert_token_offsets;
    int E, column_tiles, width, steps;
    int number, expert = 0, first = 0;  // the next tile; its expert and that expert's first tile
    int begin, end;                     // the expert's rows in expert order

    __device__ __forceinline__ RowTiles(const int* expert_token_offsets, int E, int columns, int width, int depth)
        : expert_token_offsets(expert_token_offsets), E(E), column_tiles((columns + width - 1) / width), width(width),
          steps((depth + TILE_DEPTH - 1) / TILE_DEPTH), number(blockIdx.x), begin(0), end(expert_token_offsets[1]) {}

    __device__ __forceinline__ int row_tiles() const { return (end - begin + TILE_ROWS - 1) / TILE_ROWS; }

    // The block's next tile, if there is one.
    __device__ __forceinline__ bool next(RowTile& tile) {
        for (int tiles = row_tiles() * column_tiles; number >= first + tiles; tiles = row_tiles() * column_tiles) {
            if (++expert == E) return false;
            first += tiles;
            begin = end;
            end = expert_token_offsets[expert + 1];
        }
        // In bands of row tiles, down each column of a band.
        const int inside = number - first, band = inside / (BAND * column_tiles);
        const int high = min(BAND, row_tiles() - band * BAND);
        const int at = inside - band * BAND * column_tiles, column = at / high;
        const int row = (band * BAND + at - column * high) * TILE_ROWS;
        tile = {expert, begin + row, min(TILE_ROWS, end - begin - row), column * width, steps};
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

// The block's share of them. All its threads share them out together, where finished tiles are to lie.
struct WeightTiles {
    using Tile = WeightTile;
    const Shares* shares;
    const int* expert_token_offsets;
    int E, row_tiles, column_tiles, taken = 0;

    template <class Shared>
    __device__ __forceinline__ WeightTiles(Shared& shared, const int* expert_token_offsets, int E, int rows, int columns)
        : shares(&shared.shares), expert_token_offsets(expert_token_offsets), E(E),
          row_tiles((rows + TILE_ROWS - 1) / TILE_ROWS), column_tiles((columns + TILE_COLUMNS - 1) / TILE_COLUMNS) {
        static_assert(STEP == TILE_DEPTH && sizeof(Sharing) <= sizeof shared.finished, "as shares.cuh has it");
        Sharing& sharing = *reinterpret_cast<Sharing*>(shared.finished);
        share_out(shared.shares, sharing, expert_token_offsets, E, row_tiles * column_tiles);
    }

    __device__ __forceinline__ bool next(WeightTile& tile) {
        const int number = shares->tile(taken++), of_expert = row_tiles * column_tiles, expert = number / of_expert;
        if (expert >= E) return false;
        const int inside = number - expert * of_expert, column = inside / row_tiles;
        const int begin = expert_token_offsets[expert], end = expert_token_offsets[expert + 1];
        tile = {expert, (inside - column * row_tiles) * TILE_ROWS, column * TILE_COLUMNS, begin, end,
                (end - begin + TILE_DEPTH - 1) / TILE_DEPTH};
        return true;
    }
};

// ---- the loader's side ----

// Fills the ring: load(tile) returns what fills a stage, (step, stage, barrier): all threads may copy, and then one of
// them arrives at the barrier with the bytes of its TMA copies. (In that order: after a branch that one lane takes, a
// warp may go on in two parts, and its copies take twice as long.)
template <class Crew, class Shared, class Tiles, class Load>
__device__ __forceinline__ void load_tiles(Shared& shared, Tiles tiles, Load load) {
    Turn<Shared::STAGES> turn;
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        auto fill = load(tile);
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step, turn.next()) {
            Barrier* const full = &shared.full[turn.stage];
            barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
            fill(step, shared.stages[turn.stage], full);
            if (Crew::COPIERS) cp_async_arrive(full);
        }
    }
}

// Where 16 bytes lie in panels: TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// Operand A whose 128 rows lie anywhere in x: thread t brings chunk t % 8 of rows t / 8, t / 8 + AT_ONCE, ...
template <int COPIERS>
struct GatheredRows {
    static constexpr int AT_ONCE = COPIERS / 8, COUNT = TILE_ROWS / AT_ONCE;
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
    // 64 of the depth d, from p on, zeros beyond its end. All addresses are there before the first copy: a copy holds
    // on to the registers of its addresses.
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
#pragma unroll
            for (int i = 0; i < BATCH; ++i)  // a period of the swizzle is 8 rows of 128 bytes
                cp_async_or_zero(panels + targets[(first + i) % PERIOD] + (first + i) / PERIOD * 1024, sources[i],
                                 inside);
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

// One for the whole warp, as the compiler sees by the shuffle: what follows from it needs no register a lane.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(FULL_WARP, value, 0); }

constexpr int TOGETHER = 4;  // matrices of 8 x 8 that stmatrix writes

// Of half the rows of a piece, the upper or the lower one, TOGETHER chunks from `first` on, rounded.
struct RoundedPairs {
    unsigned pairs[TOGETHER];

    __device__ __forceinline__ RoundedPairs(const float* sums, int first, int half) {
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const int i = (first + j) * 4 + half * 2;
            pairs[j] = packed<Scalar>(sums[i], sums[i + 1]);
        }
    }
};

// Leaves a warp's sums of some columns, rounded, in shared memory.
template <int COLUMNS>
__device__ __forceinline__ void hand_over(FinishedRows<COLUMNS>& finished, const float* sums) {
#pragma unroll
    for (int first = 0; first < COLUMNS / CHUNK; first += TOGETHER)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto [pairs] = RoundedPairs(sums, first, half);
            stmatrix_x4(&finished.at(half * 8 + lane_id() % 8, first + lane_id() / 8),  //
                        pairs[0], pairs[1], pairs[2], pairs[3]);
        }
}
template <int COLUMNS>
__device__ __forceinline__ void hand_over(FinishedColumns<COLUMNS>& finished, const float* sums) {
#pragma unroll
    for (int first = 0; first < COLUMNS / CHUNK; first += TOGETHER)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto [pairs] = RoundedPairs(sums, first, half);
            stmatrix_x4_transposed(&finished.at(first * CHUNK + lane_id(), half),  //
                                   pairs[0], pairs[1], pairs[2], pairs[3]);
        }
}

// Adds one step's product to a consumer's sums.
template <class Crew>
__device__ __forceinline__ void multiply(float (&sums)[TILE_COLUMNS / 2], Stage& stage, int consumer) {
    // 64 rows of A are one panel further on. 16 of the depth are 32 bytes along K, 16 rows otherwise.
    constexpr int A_STEP = Crew::A_ALONG_M ? 16 * 128 : 32, B_STEP = Crew::B_ALONG_N ? 16 * 128 : 32;
    const unsigned long long a = wgmma_operand(stage.a + consumer * PANEL_BYTES, PANEL_BYTES);
    const unsigned long long b = wgmma_operand(stage.b, PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE_DEPTH / 16; ++i) {
        const unsigned long long a_now = wgmma_advance(a, i * A_STEP), b_now = wgmma_advance(b, i * B_STEP);
        if constexpr (Crew::CROWDED) {
            constexpr int HALF = TILE_COLUMNS / 2, HALF_BYTES = B_BYTES / 2;
            wgmma_m64n128k16<Scalar, Crew::A_ALONG_M, Crew::B_ALONG_N>(sums, a_now, b_now, true);
            wgmma_m64n128k16<Scalar, Crew::A_ALONG_M, Crew::B_ALONG_N>(sums + HALF / 2, a_now,
                                                                       wgmma_advance(b_now, HALF_BYTES), true);
        } else
            wgmma_m64n256k16<Scalar, Crew::A_ALONG_M, Crew::B_ALONG_N>(sums, a_now, b_now, true);
    }
    wgmma_commit();
}

// Multiplies every tile and hands it over.
template <class Crew, class Shared, class Tiles>
__device__ __forceinline__ void multiply_tiles(Shared& shared, Tiles tiles) {
    constexpr int BEHIND = Shared::STAGES > 1;  // steps that a stage is freed late, unless there is no other
    const int warp = uniform(warp_id()) - Crew::FIRST_CONSUMER;
    auto& finished = shared.finished[warp];
    Turn<Shared::STAGES> turn;
    unsigned parity = 1;  // of the part before
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        float sums[TILE_COLUMNS / 2] = {};
        int read = 0;  // the stage of the step before
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step, turn.next()) {
            const int now = uniform(turn.stage);
            barrier_wait(&shared.full[now], turn.parity);
            if (Crew::COPIERS) fence_async_proxy();
            multiply<Crew>(sums, shared.stages[now], warp / (WARPGROUP / WARP));
            wgmma_wait<BEHIND>();
            if (step >= BEHIND && lane_id() == 0) barrier_arrive(&shared.empty[BEHIND ? read : now]);
            read = now;
        }
        wgmma_wait<0>();
        wgmma_results(sums);
        if (BEHIND && tile.steps > 0 && lane_id() == 0) barrier_arrive(&shared.empty[read]);
#pragma unroll
        for (int part = 0; part < Shared::PARTS; ++part, parity ^= 1) {
            barrier_wait(&shared.stored[warp], parity);
            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);
            __syncwarp();
            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);
        }
    }
}

// ---- the storers' side ----

// What one of the storers takes over of a part of a tile: every STORERS-th piece.
template <class Crew, class Shared>
struct Pieces {
    static constexpr int COUNT = PIECES / Crew::STORERS;
    Shared& shared;
    unsigned parity;

    static __device__ __forceinline__ int number(int i) { return warp_id() - Crew::LOADERS + i * Crew::STORERS; }
    // The i-th piece's first row in the tile.
    static __device__ __forceinline__ int row(int i) { return number(i) * WARP_ROWS; }
    // Waits until the consumer has finished it.
    __device__ __forceinline__ auto& take(int i) const {
        barrier_wait(&shared.done[number(i)], parity);
        return shared.finished[number(i)];
    }
    __device__ __forceinline__ void give_back(int i) const {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);
    }
};

// Calls store(tile, column, pieces) for every part of every tile: its first column in the tile. Each piece must be
// taken and given back.
template <class Crew, class Shared, class Tiles, class Store>
__device__ __forceinline__ void store_tiles(Shared& shared, Tiles tiles, Store store) {
    unsigned parity = 0;
    typename Tiles::Tile tile;
    while (tiles.next(tile))
#pragma unroll 1
        for (int part = 0; part < Shared::PARTS; ++part, parity ^= 1)
            store(tile, part * TILE_COLUMNS / Shared::PARTS, Pieces<Crew, Shared>{shared, parity});
}

// The whole block.
template <class Crew, class Shared, class Tiles, class Load, class Store>
__device__ __forceinline__ void grouped_matmul(Shared& shared, Tiles tiles, Load load, Store store) {
    open_ring<Crew>(shared);
    if (warp_id() >= Crew::FIRST_CONSUMER) {
        if constexpr (Crew::CROWDED) registers_up<Crew::CONSUMER_REGISTERS>();
        multiply_tiles<Crew>(shared, tiles);
    } else if (warp_id() >= Crew::LOADERS) {
        if constexpr (Crew::CROWDED) registers_down<Crew::STORER_REGISTERS>();
        store_tiles<Crew>(shared, tiles, store);
    } else {
        if constexpr (Crew::CROWDED) registers_down<Crew::LOADER_REGISTERS>();
        if (Crew::COPIERS || threadIdx.x == 0) load_tiles<Crew>(shared, tiles, load);
    }
}

// ---- what kernels do alike ----

// Stores pieces as they are, a warp for some rows at once: row 0 of the tile begins at `place`; of its rows `count` are
// there, and so many columns.
template <class Pieces>
__device__ __forceinline__ void store_plain(const Pieces& pieces, Scalar* place, int width, int count, int columns) {
#pragma unroll 1
    for (int i = 0; i < Pieces::COUNT; ++i) {
        auto& finished = pieces.take(i);
        constexpr int CHUNKS = sizeof finished.lines[0] / sizeof(Chunk), AT_ONCE = WARP / CHUNKS;
        const int chunk = lane_id() % CHUNKS, first = pieces.row(i);
        if (chunk * CHUNK < columns)
#pragma unroll 4
            for (int row = lane_id() / CHUNKS; row < min(WARP_ROWS, count - first); row += AT_ONCE)
                *reinterpret_cast<Chunk*>(place + (long long)(first + row) * width + chunk * CHUNK) =
                    finished.at(row, chunk);
        pieces.give_back(i);
    }
}
// Stores pieces that are FinishedColumns, the tile's columns as rows: column 0 begins at `place`; so many columns are
// there, and so many of their rows.
template <class Pieces>
__device__ __forceinline__ void store_transposed(const Pieces& pieces, Scalar* place, int width, int columns,
                                                 int rows) {
#pragma unroll 1
    for (int i = 0; i < Pieces::COUNT; ++i) {
        auto& finished = pieces.take(i);
        constexpr int COLUMNS = sizeof finished.lines / sizeof finished.lines[0], CHUNKS = WARP_ROWS / CHUNK;
        const int chunk = lane_id() % CHUNKS, row = pieces.row(i) + chunk * CHUNK;
        if (row < rows)
#pragma unroll 4
            for (int column = lane_id() / CHUNKS; column < min(COLUMNS, columns); column += WARP / CHUNKS)
                *reinterpret_cast<Chunk*>(place + (long long)column * width + row) = finished.at(column, chunk);
        pieces.give_back(i);
    }
}
struct StoreRows {
    Scalar* rows;
    int width;
    template <class Pieces>
    __device__ __forceinline__ void operator()(const RowTile& tile, int column, const Pieces& pieces) const {
        column += tile.column;
        store_plain(pieces, rows + (long long)tile.first * width + column, width, tile.rows, width - column);
    }
};
struct StoreWeights {
    Scalar* weights;
    int rows, width;
    template <class Pieces>
    __device__ __forceinline__ void operator()(const WeightTile& tile, int column, const Pieces& pieces) const {
        column += tile.column;
        Scalar* const place = weights + ((long long)tile.expert * rows + tile.row) * width + column;
        store_plain(pieces, place, width, rows - tile.row, width - column);
    }
};
struct StoreTransposedWeights {
    Scalar* weights;
    int rows, width;
    template <class Pieces>
    __device__ __forceinline__ void operator()(const WeightTile& tile, int column, const Pieces& pieces) const {
        column += tile.column;
        Scalar* const place = weights + ((long long)tile.expert * rows + column) * width + tile.row;
        store_transposed(pieces, place, width, rows - column, width - tile.row);
    }
};

// A step of a weight gradient: rows of A are gathered, those of B lie in expert order and come by TMA, but for the last
// step, which must end where the expert does.
struct GatheredAndPlain {
    using Gathered = DepthRows<TILE_ROWS>;
    using Plain = DepthRows<TILE_COLUMNS>;
    static constexpr int TOGETHER = WARP / Gathered::CHUNKS;  // rows at once in a warp

    const WeightTile tile;
    Gathered gathered;
    Plain plain;
    const TensorMap& plain_map;
    const int* tokens;  // of the expert
    int now, later;     // a token a lane: of this step (and the next, if it is even), and of the two after them

    __device__ __forceinline__ GatheredAndPlain(const WeightTile& tile, const Scalar* gathered, int gathered_width,
                                                const TensorMap& plain_map, const Scalar* plain, int plain_width,
                                                const int* expert_token_indices)
        : tile(tile), gathered(gathered, gathered_width, tile.row), plain(plain, plain_width, tile.column),
          plain_map(plain_map), tokens(expert_token_indices + tile.begin), now(0),
          later(tile.steps > 0 ? read(0) : 0) {}

    // Of the 16 rows that this warp brings in a step: lane l reads the token of row l % 16 in step + l / 16.
    __device__ __forceinline__ int read(int step) const {
        const int i = lane_id() % 16;
        const int row = (step + lane_id() / 16) * TILE_DEPTH + warp_id() * TOGETHER + i % TOGETHER +
                        i / TOGETHER * Gathered::AT_ONCE;
        return tokens[min(row, tile.end - tile.begin - 1)];
    }

    __device__ __forceinline__ void operator()(int step, Stage& stage, Barrier* full) {
        const int left = tile.end - tile.begin - step * TILE_DEPTH;
        const bool whole = left >= TILE_DEPTH;
        if (step % 2 == 0) {
            now = later;
            later = read(step + 2);
        } else
            now = __shfl_down_sync(FULL_WARP, now, 16);
        auto token = [&](int i) { return __shfl_sync(FULL_WARP, now, i * TOGETHER + lane_id() / Gathered::CHUNKS); };
        if (whole)
            gathered.load(stage.a, token);
        else {
            gathered.load(stage.a, left, token);
            plain.load(stage.b, left,
                       [&](int i) { return min(tile.begin + step * TILE_DEPTH + plain.row(i), tile.end - 1); });
        }
        if (threadIdx.x == 0) {
            barrier_arrive_expecting(full, whole ? B_BYTES : 0);
            if (whole)
#pragma unroll
                for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                    tma_load(stage.b + panel * PANEL_BYTES, &plain_map, full, tile.column + panel * PANEL,
                             tile.begin + step * TILE_DEPTH);
        }
    }
};
