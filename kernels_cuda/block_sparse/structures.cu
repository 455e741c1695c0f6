// block_sparse, shared by all versions: the bins and the topology.
//
// Purpose      Where each routed row lies once every expert's group is padded to whole blocks, and which blocks of the
//              matrix (P, E h) are stored: hybrid blocked-CSR-COO with transpose indices.
// Source       MegaBlocks (arXiv 2211.15841), sections 5.1.3, 5.1.4 and 5.2.
// Idea         The structure says it all: a block row stores the h / BLOCK blocks of its expert, a block column the
//              block rows of its expert. So every index is a formula of where the expert's bin begins, the transposed
//              order too: nothing is counted, and nothing is sorted.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    BLOCK rows and columns of a block, THREADS per block of threads.
// Determinism  Same input, same bits: each index has one writer.
//
// kernel       grid                            block    shared bytes  bytes read   bytes written
// pad_offsets  1                               THREADS  THREADS / 8   8 E          4 (E + 1)
// pad_slots    ceil(R / THREADS)               THREADS  0             16 R         8 R
// blocks       ceil(n / THREADS)               THREADS  0             8 n + 4 S    12 n
// offsets      ceil((max(M, N) + 1) / THREADS)  THREADS  0             8 N + 4      4 (M + 1) + 4 (N + 1)
// n stored blocks in M block rows and N = E h / BLOCK block columns; S steps that the searches of all n blocks for
// their experts take, at most ceil(log2(E)) each. Bound: latency.
#include "common.cuh"

// Section 5.2: where the bins begin. One block of threads.
extern "C" __global__ void __launch_bounds__(THREADS)
    pad_offsets(const int* expert_token_offsets, int* padded_offsets, int E) {
    int before = 0;
    for (int first = 0; first < E; first += THREADS) {
        const int expert = first + threadIdx.x;
        const int rows = expert < E ? expert_token_offsets[expert + 1] - expert_token_offsets[expert] : 0;
        const BlockScan scan = block_exclusive_sum<THREADS>((rows + BLOCK - 1) / BLOCK * BLOCK);
        if (expert < E) padded_offsets[expert] = before + scan.exclusive;
        before += scan.total;
    }
    if (threadIdx.x == 0) padded_offsets[E] = before;
}

// Where each slot's row lies, and back. Rows of padding keep what they hold.
extern "C" __global__ void __launch_bounds__(THREADS)
    pad_slots(const int* expert_token_offsets, const int* padded_offsets, const int* token_expert_indices,
              const int* token_index_map, int* slots, int* rows, int R) {
    const long long slot = blockIdx.x * THREADS + threadIdx.x;
    if (slot >= R) return;
    const int expert = token_expert_indices[slot];
    const int row = token_index_map[slot] - expert_token_offsets[expert] + padded_offsets[expert];
    rows[slot] = row;
    slots[row] = int(slot);
}

// The expert in whose bin a row lies: the last that begins at or before it, as empty bins begin where the next does.
__device__ __forceinline__ int expert_of_row(const int* padded_offsets, int E, int row) {
    int low = 0, high = E - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (padded_offsets[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Sections 5.1.3 and 5.1.4: a thread a stored block; an expert has `wide` block columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    blocks(const int* padded_offsets, int* column_indices, int* row_indices, int* transpose_indices, int E, int wide,
           int nnz) {
    const long long number = blockIdx.x * THREADS + threadIdx.x;
    if (number >= nnz) return;
    const int row = number / wide, column = number % wide;
    const int expert = expert_of_row(padded_offsets, E, row * BLOCK);
    const int first = padded_offsets[expert] / BLOCK, high = padded_offsets[expert + 1] / BLOCK - first;
    row_indices[number] = row;
    column_indices[number] = expert * wide + column;
    transpose_indices[first * wide + column * high + row - first] = int(number);
}

// Where each block row's blocks begin, and each block column's in the transposed order.
extern "C" __global__ void __launch_bounds__(THREADS)
    offsets(const int* padded_offsets, int* row_offsets, int* column_offsets, int block_rows, int E, int wide) {
    const int index = blockIdx.x * THREADS + threadIdx.x;
    if (index <= block_rows) row_offsets[index] = index * wide;
    if (index > E * wide) return;
    const int expert = index / wide, first = padded_offsets[expert] / BLOCK;
    const int high = expert < E ? padded_offsets[expert + 1] / BLOCK - first : 0;
    column_offsets[index] = first * wide + index % wide * high;
}
