// A ring of stages with its barriers, the state of a role in it, and rows that are gathered into a stage. sm_90a.
#pragma once
#include "hopper/barrier.cuh"
#include "hopper/stage.cuh"

// Initialises the barriers of a ring, for one thread; a barrier_init_fence() and a __syncthreads() follow. A stage is
// full after so many arrivals, and empty after so many.
template <int COUNT>
__device__ __forceinline__ void open_ring(Barrier (&full)[COUNT], Barrier (&empty)[COUNT], int arrivals_full,
                                          int arrivals_empty) {
    for (int stage = 0; stage < COUNT; ++stage) {
        barrier_init(&full[stage], arrivals_full);
        barrier_init(&empty[stage], arrivals_empty);
    }
}

// The pipeline state of a role: its stage in the ring, and the parity of that stage's phase.
template <int COUNT>
struct PipelineState {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// Operand A whose 128 rows lie anywhere in x, `pitch` elements from one row to the next. Threads bring them from FIRST
// on: thread t of these brings chunk t % 8 of rows t / 8, t / 8 + AT_ONCE, ...
template <int COPIERS, int FIRST = 0>
struct GatheredRows {
    static constexpr int AT_ONCE = COPIERS / 8, COUNT = TILE_ROWS / AT_ONCE;
    unsigned chunks[COUNT];  // where the thread's chunks of each row begin, in 16 bytes
    const Chunk* x;
    int target;  // of the first, in the stage

    __device__ __forceinline__ GatheredRows(const Scalar* x, int pitch, const int* tokens, int rows)
        : x(reinterpret_cast<const Chunk*>(x)), target(swizzled((threadIdx.x - FIRST) / 8, threadIdx.x % 8)) {
        static_assert(FIRST % 8 == 0, "chunk t % 8 of all threads is that of these");
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {  // rows beyond the last are read again: no one stores their results
            const int token = tokens[min(int(threadIdx.x - FIRST) / 8 + i * AT_ONCE, rows - 1)];
            chunks[i] = unsigned(token) * unsigned(pitch / CHUNK) + threadIdx.x % 8;
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
