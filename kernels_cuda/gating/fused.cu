// gating, fused: everything that a layer's forward takes of its router, and no probability in memory.
//
// Purpose      logits (L, E) -> topk_experts and gates (L, k), and both auxiliary losses.
// Source       MoEBlaze (arXiv 2601.05296), section 2; Switch Transformer (arXiv 2101.03961), 2.2;
//              ST-MoE (arXiv 2202.08906), router z-loss.
// Idea         A loss needs no probability of a token, only their sums over the tokens. A warp adds up the
//              rows of its tokens in registers, and a block leaves one row of sums and counts. A second
//              kernel, of one block, adds up the rows of all blocks. So nothing must be zero before, and no
//              block waits for another. A warp asks for its next row before it works on the one it has.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); PER_LANE columns of a lane, at least E / 32; PACK, which
//              divides E and PER_LANE; RENORMALIZE, 1 if gates are divided by their sum; SUM_THREADS per block
//              of router_losses.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order. Atomics
//              count whole numbers, whose sum is the same in any order.
//
// kernel          grid    block        shared bytes
//                 bytes read        bytes written
// choose_experts  BLOCKS  THREADS      8 THREADS (PER_LANE + 2) + 4 E + 4 THREADS / 32
//                 4 L E             8 R + (8 E + 4) BLOCKS
// router_losses   1       SUM_THREADS  8 SUM_THREADS + 4 SUM_THREADS / 32
//                 (8 E + 4) BLOCKS  8
// BLOCKS = min(256, ceil(32 L / THREADS)): more would leave more rows of sums. Bytes are those that threads ask
// for. Bound: memory, 4 L E + 8 R bytes; that of router_losses is the latency of a few reads. At L = 65,536,
// E = 16, k = 4: 6.3 MB, 1.5 us at 4.2 TB/s, and 0.03 MB of sums, which the second kernel finds in the cache.
#include "gating.cuh"

constexpr int WARPS = THREADS / WARP;

// The sum over the warps of what each has for every expert, added up warp by warp; `rows` is (WARPS, E).
__device__ __forceinline__ void store_sums(const float* rows, float* sums, int E) {
    for (int e = threadIdx.x; e < E; e += THREADS) {
        float sum = 0.0f;
#pragma unroll 8
        for (int warp = 0; warp < WARPS; ++warp) sum += rows[warp * E + e];
        sums[e] = sum;
    }
}

// Reads nothing past the last token.
__device__ __forceinline__ void load_token(const float* logits, unsigned token, unsigned L, int E, Row& row) {
    load_row(logits + first_of(token, E), token < L ? E : 0, -infinity(), row);
}

// Each warp of the grid takes every so many-th token as there are warps. Block b leaves row b of counts and
// prob_sums (BLOCKS, E), and of z_sums (BLOCKS,), the sum of logsumexp(logits) squared.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_experts(const float* logits, int* topk_experts, float* gates, int* counts, float* prob_sums, float* z_sums,
                   unsigned L, int E, int k) {
    DYNAMIC_SHARED(Lists, lists_of_warps);                                      // (WARPS,)
    int* const experts_count = reinterpret_cast<int*>(lists_of_warps + WARPS);  // (E,)
    for (int e = threadIdx.x; e < E; e += THREADS) experts_count[e] = 0;
    __syncthreads();  // the counts are zeros

    const unsigned stride = gridDim.x * WARPS;
    Row next, sums = {};
    float z_sum = 0.0f;
    unsigned token = blockIdx.x * WARPS + warp_id();
    load_token(logits, token, L, E, next);
    for (; token < L; token += stride) {
        Row row;
        for (int i = 0; i < PER_LANE; ++i) row[i] = next[i];
        load_token(logits, token + stride, L, E, next);
        const Routed routed = route(row, E, k, lists_of_warps[warp_id()]);
        store_choice(routed, token, k, topk_experts, gates);
        if (lane_id() < k) atomicAdd(&experts_count[routed.expert], 1);
        for (int i = 0; i < PER_LANE; ++i) sums[i] += row[i];
        z_sum += routed.logsumexp * routed.logsumexp;
        __syncwarp();  // the next token's lists are written where these are
    }

    const float z = block_sum<THREADS>(lane_id() == 0 ? z_sum : 0.0f);  // every warp is done with its lists
    float* const rows = reinterpret_cast<float*>(lists_of_warps);       // (WARPS, E), in their place
    store_row(rows + warp_id() * E, E, sums);
    __syncthreads();  // the rows are complete
    store_sums(rows, prob_sums + blockIdx.x * E, E);
    for (int e = threadIdx.x; e < E; e += THREADS) counts[blockIdx.x * E + e] = experts_count[e];
    if (threadIdx.x == 0) z_sums[blockIdx.x] = z;
}

// The load-balancing loss E sum_e f_e P_e and the router z-loss from the rows of all blocks. A warp takes every
// SUM_WARPS-th row, a lane an expert of 32.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    router_losses(const int* counts, const float* prob_sums, const float* z_sums, float* load_balancing_loss,
                  float* router_z_loss, int blocks, int L, int E, int R) {
    constexpr int SUM_WARPS = SUM_THREADS / WARP;
    __shared__ int rows_of_warps[SUM_WARPS][WARP];
    __shared__ float probs_of_warps[SUM_WARPS][WARP];
    float part = 0.0f;  // of sum_e f_e P_e L, in the first warp
    for (int first = 0; first < E; first += WARP) {
        const int e = first + lane_id();
        int rows = 0;
        float probs = 0.0f;
#pragma unroll 8
        for (int block = warp_id(); block < blocks; block += SUM_WARPS)
            if (e < E) {
                rows += counts[block * E + e];
                probs += prob_sums[block * E + e];
            }
        rows_of_warps[warp_id()][lane_id()] = rows;
        probs_of_warps[warp_id()][lane_id()] = probs;
        __syncthreads();  // every warp has added up its rows
        if (warp_id() == 0) {
            int all_rows = 0;
            float all_probs = 0.0f;
            for (int warp = 0; warp < SUM_WARPS; ++warp) {
                all_rows += rows_of_warps[warp][lane_id()];
                all_probs += probs_of_warps[warp][lane_id()];
            }
            part += float(all_rows) / R * all_probs;
        }
        __syncthreads();  // the sums of the next experts are written where these are
    }
    float z = 0.0f;
    for (int block = threadIdx.x; block < blocks; block += SUM_THREADS) z += z_sums[block];
    const float z_sum = block_sum<SUM_THREADS>(z), balance = warp_sum(part);
    if (threadIdx.x == 0) {
        load_balancing_loss[0] = float(E) / L * balance;
        router_z_loss[0] = z_sum / L;
    }
}
