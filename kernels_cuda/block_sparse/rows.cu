// block_sparse, shared by all versions: rows into the bins, and the gradient of the gates.
//
// Purpose      rows[p] = x of the row's token, times its gate if there are gates, or zero in padding; and
//              d_gates[slot] = <d_out, y> of every slot. The scatter back is the combine, or sum_rows, by the bins'
//              rows.
// Source       MegaBlocks (arXiv 2211.15841), section 5.2.
// Idea         The routed rows are copied: this is the buffer (P, d) that MoEBlaze does without.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; PACK neighbours that a thread moves, which divides d; THREADS per block,
//              whole warps.
// Determinism  Same input, same bits: each element has one writer, sums run in a fixed order.
//
// kernel         grid                        block    shared bytes
//                bytes read                             bytes written
// padded_gather  ceil(P d / PACK / THREADS)  THREADS  0
//                4 P d / PACK + s R d + 4 W R d / PACK  s P d
// gate_gradient  ceil(32 R / THREADS)        THREADS  0
//                128 R + 2 s R d                        4 R
// W is 1 if the rows are weighted by gates, else 0. Bound: memory.
#include "common.cuh"
#include "pack.cuh"
#include "scalar.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    padded_gather(const Scalar* x, const float* gates, const int* slots, Scalar* rows, int P, int d, int k,
                  int weighted) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (at >= (long long)P * d) return;
    const int slot = slots[at / d];
    Pack<Scalar, PACK> pack;
    if (slot < 0) {
#pragma unroll
        for (int i = 0; i < PACK; ++i) pack.elements[i] = from_float<Scalar>(0.0f);
    } else {
        pack = load_pack<PACK>(x + (long long)(slot / k) * d + at % d);
        if (weighted) {
            const float gate = gates[slot];
#pragma unroll
            for (int i = 0; i < PACK; ++i) pack.elements[i] = from_float<Scalar>(gate * to_float(pack.elements[i]));
        }
    }
    store_pack(rows + at, pack);
}

// A warp a slot.
extern "C" __global__ void __launch_bounds__(THREADS)
    gate_gradient(const Scalar* d_out, const Scalar* y, const int* rows, float* d_gates, int R, int d, int k) {
    const long long slot = blockIdx.x * (THREADS / WARP) + warp_id();
    if (slot >= R) return;
    const Scalar* const gradient = d_out + slot / k * d;
    const Scalar* const output = y + (long long)rows[slot] * d;
    float sum = 0.0f;
    for (int column = lane_id() * PACK; column < d; column += WARP * PACK) {
        const Pack<Scalar, PACK> left = load_pack<PACK>(gradient + column), right = load_pack<PACK>(output + column);
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum += to_float(left.elements[i]) * to_float(right.elements[i]);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) d_gates[slot] = sum;
}
