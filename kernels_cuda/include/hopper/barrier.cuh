// mbarriers: arrivals and bytes that a phase waits for.
//
// sm_90a; the SIMT executor takes the plain C++ branch. Source: PTX ISA, "mbarrier".
#pragma once
#include "ptx.cuh"

using Barrier = unsigned long long;  // an mbarrier

#ifndef MOEBLAZE_SIMT

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; a __syncthreads() makes them so to the block.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase wait for this many bytes of TMA copies too.
__device__ __forceinline__ void barrier_arrive_expecting(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Waits until the phase with this parity is complete.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

#else

inline void barrier_init(Barrier* barrier, int arrivals) { simt_mbarrier_init(barrier, arrivals); }
inline void barrier_init_fence() {}
inline void barrier_arrive(Barrier* barrier, SIMT_HERE) { simt_mbarrier_arrive(barrier, 0, SIMT_AT("barrier_arrive")); }
inline void barrier_arrive_expecting(Barrier* barrier, int bytes, SIMT_HERE) {
    simt_mbarrier_arrive(barrier, bytes, SIMT_AT("barrier_arrive_expecting"));
}
inline void barrier_wait(Barrier* barrier, unsigned parity, SIMT_HERE) {
    simt_mbarrier_wait(barrier, parity, SIMT_AT("barrier_wait"));
}

#endif
