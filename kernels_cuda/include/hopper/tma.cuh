// The copy engine (TMA), and cp.async copies that arrive at an mbarrier.
//
// sm_90a; the SIMT executor takes the plain C++ branch. Source: PTX ISA, "cp.async.bulk.tensor".
#pragma once
#include "hopper/barrier.cuh"

// Made by cuTensorMapEncodeTiled on the host: a matrix in global memory and the box that one copy moves.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

#ifndef MOEBLAZE_SIMT

// One box of the matrix, from element (c0, c1, c2) on, innermost first; beyond the matrix it reads zeros.
__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(shared)),
        "l"(map), "r"(c0), "r"(c1), "r"(shared_address(barrier))
        : "memory");
}
__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(barrier))
        : "memory");
}

// Arrives once every cp.async copy that this thread has issued so far is complete.
__device__ __forceinline__ void cp_async_arrive(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

#else

inline void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1, SIMT_HERE) {
    simt_tma_load(shared, map, barrier, 2, {c0, c1, 0}, SIMT_AT("tma_load"));
}
inline void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1, int c2, SIMT_HERE) {
    simt_tma_load(shared, map, barrier, 3, {c0, c1, c2}, SIMT_AT("tma_load"));
}
inline void cp_async_arrive(Barrier* barrier, SIMT_HERE) { simt_async_arrive(barrier, SIMT_AT("cp_async_arrive")); }

#endif
