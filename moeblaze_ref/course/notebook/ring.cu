// A ring of stages in shared memory, and nothing else: one warpgroup loads, another one multiplies. c = a b of a single
// tile, (64, K) by (K, 256); who does what when is written into a log.
//
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; STAGES.
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

constexpr int COLUMNS = 256, DEPTH = 64;  // of the tile, and of a step
constexpr int PANEL = 64, PANEL_BYTES = 64 * 128;
enum Event { LOADS, MULTIPLIES, RELEASES };

struct Stage {
    unsigned char a[PANEL_BYTES], b[COLUMNS / PANEL * PANEL_BYTES];
};
struct Shared {
    Stage stages[STAGES];
    Barrier full[STAGES], empty[STAGES];
};

// The swizzle counts from a multiple of 1024 bytes.
__device__ __forceinline__ Shared& shared_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    return *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
}

__device__ __forceinline__ void note(int* log, Event event, int step) {
    const int line = atomicAdd(log, 1);
    log[1 + 2 * line] = event;
    log[2 + 2 * line] = step;
}

// One thread asks for the operands of step after step, as long as there is a stage to put them into.
__device__ __forceinline__ void load(Shared& shared, const TensorMap& a, const TensorMap& b, int steps, int* log) {
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES, parity = step / STAGES % 2;
        barrier_wait(&shared.empty[stage], parity ^ 1);  // in the first round there is nothing to wait for
        note(log, LOADS, step);
        barrier_arrive_expecting(&shared.full[stage], sizeof(Stage));
        tma_load(shared.stages[stage].a, &a, &shared.full[stage], step * DEPTH, 0);
        for (int panel = 0; panel < COLUMNS / PANEL; ++panel)
            tma_load(shared.stages[stage].b + panel * PANEL_BYTES, &b, &shared.full[stage], panel * PANEL,
                     step * DEPTH);
    }
}

// 128 threads multiply what has arrived, and give the stage back.
__device__ __forceinline__ void multiply(Shared& shared, float (&sums)[128], int steps, int* log) {
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES, parity = step / STAGES % 2;
        barrier_wait(&shared.full[stage], parity);
        if (threadIdx.x == WARPGROUP) note(log, MULTIPLIES, step);
        const unsigned long long a = wgmma_operand(shared.stages[stage].a, PANEL_BYTES);
        const unsigned long long b = wgmma_operand(shared.stages[stage].b, PANEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k)
            wgmma_m64n256k16<Scalar, false, true>(sums, wgmma_advance(a, k * 32), wgmma_advance(b, k * 16 * 128), true);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x == WARPGROUP) note(log, RELEASES, step);
        if (lane_id() == 0) barrier_arrive(&shared.empty[stage]);
    }
}

extern "C" __global__ void __launch_bounds__(2 * WARPGROUP)
    ring(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* c, int* log, int steps) {
    Shared& shared = shared_memory();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared.full[stage], 1);                  // the loading thread, and its bytes
            barrier_init(&shared.empty[stage], WARPGROUP / WARP);  // the multiplying warps
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) load(shared, a, b, steps, log);
    if (threadIdx.x < WARPGROUP) return;
    float sums[128] = {};
    multiply(shared, sums, steps, log);
    const int t = threadIdx.x % WARPGROUP, row = t / 32 * 16 + t % 32 / 4;
    for (int i = 0; i < 128; ++i) c[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + t % 4 * 2 + i % 2] = sums[i];
}
