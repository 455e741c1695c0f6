// parallel, a layer over ranks: the router's losses of all ranks' tokens together.
//
// Purpose      Each expert's part of the rows of all ranks, from those of each. Losses times a rank's part of the
//              tokens.
// Source       Switch Transformer (arXiv 2101.03961), 2.2, for a batch that is spread over ranks.
// Idea         Between them the ranks add up what the first kernel makes: all_reduce.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block.
// Determinism  Same input, same bits: each output element has one writer.
//
// kernel        grid                     block    shared bytes  bytes read    bytes written
// batch_rows    ceil((E + 1) / THREADS)  THREADS  0             4 E T         8 E + 8
// batch_shares  ceil((E + 1) / THREADS)  THREADS  0             16 E + 8      4 E + 4
// weigh_losses  1                        THREADS  0             16            8
// The last entry of the rows is the number of tokens. T is 1 if this rank has tokens, else 0. Bound: latency.
#include "common.cuh"

// This rank's rows of each expert, and its tokens.
extern "C" __global__ void __launch_bounds__(THREADS) batch_rows(const float* shares, double* rows, int tokens, int E) {
    const int expert = blockIdx.x * THREADS + threadIdx.x;
    if (expert < E) {
        rows[expert] = tokens ? double(shares[expert]) * tokens : 0.0;
    } else if (expert == E) {
        rows[E] = tokens;
    }
}

// Each expert's part of all ranks' rows, and this rank's part of their tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_shares(const double* rows, float* shares, float* part, int tokens, int E) {
    const int expert = blockIdx.x * THREADS + threadIdx.x;
    if (expert > E) return;
    const double all = rows[E] < 1.0 ? 1.0 : rows[E];
    if (expert < E) {
        shares[expert] = float(rows[expert] / all);
    } else {
        part[0] = float(tokens / all);
    }
}

// Both losses times this rank's part.
extern "C" __global__ void __launch_bounds__(THREADS)
    weigh_losses(const float* load_balancing_loss, const float* router_z_loss, const float* part, float* losses) {
    if (threadIdx.x < 2) losses[threadIdx.x] = (threadIdx.x ? router_z_loss : load_balancing_loss)[0] * part[0];
}
