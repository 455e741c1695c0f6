// expert_down, shared by all versions: gates between slot order and expert order.
//
// Purpose      Give every row in expert order its gate; add up each slot's gate gradient.
// Source       SonicMoE (arXiv 2512.14080): d_gate = <d_out w3^T, y_swi> per row.
// Idea         The row's kernel leaves partial sums (terms) of that product; they are summed here. A bias of the
//              experts leaves more of them. A slot whose row is EMPTY gives its gate to none, and has a gradient of 0.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel     grid               block    shared bytes  bytes read         bytes written
// gate_rows  ceil(R / THREADS)  THREADS  0             8 R                4 R
// d_gates    ceil(R / THREADS)  THREADS  0             4 R + 4 R (terms + more)  4 R
// R counts the slots. Bound: memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_rows(const float* gates, const int* token_index_map, float* gate_of_row, int R) {
    const long long slot = blockIdx.x * THREADS + threadIdx.x;
    if (slot >= R) return;
    const int row = token_index_map[slot];
    if (row != EMPTY) gate_of_row[row] = gates[slot];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    d_gates(const float* gate_terms, const float* more_terms, const int* token_index_map, float* d_gates, int R,
            int terms, int more) {
    const long long slot = blockIdx.x * THREADS + threadIdx.x;
    if (slot >= R) return;
    const int row = token_index_map[slot];
    float sum = 0.0f;
    if (row != EMPTY) {
        for (int term = 0; term < terms; ++term) sum += gate_terms[(long long)row * terms + term];
        for (int term = 0; term < more; ++term) sum += more_terms[(long long)row * more + term];
    }
    d_gates[slot] = sum;
}
