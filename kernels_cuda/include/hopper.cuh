// Every Hopper instruction that the kernels use, wrapped once: mbarriers, TMA, wgmma, register reallocation.
//
// sm_90a; the SIMT executor takes the plain C++ branch. Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions", "mbarrier", "cp.async.bulk.tensor".
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr int WARPGROUP = 128;  // threads that issue one wgmma together

// What cuTensorMapEncodeTiled makes on the host: a matrix in global memory and the box that one copy moves.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

using Barrier = unsigned long long;  // an mbarrier

template <class Element>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

// An operand in shared memory, in rows of 128 bytes with the 128-byte swizzle. Along K the rows are the operand's own
// and `leading` plays no part; along M or N a row is one k, and `leading` is the bytes from one 64 elements to the
// next.
__device__ __forceinline__ unsigned long long wgmma_operand(const void* shared, int leading) {
    constexpr unsigned long long EIGHT_ROWS = 1024, SWIZZLE_128 = 1;
    return (shared_address(shared) & 0x3ffff) >> 4 | (leading >> 4) << 16 | EIGHT_ROWS >> 4 << 32 |
           SWIZZLE_128 << 62;
}
// The same operand, some bytes further on.
__device__ __forceinline__ unsigned long long wgmma_advance(unsigned long long operand, int bytes) {
    return operand + (bytes >> 4);
}

#ifndef MOEBLAZE_SIMT

// ---- mbarrier: arrivals and bytes that a phase waits for ----

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

// ---- copies into shared memory ----

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

// Arrives once all that this thread has copied by cp.async so far is there.
__device__ __forceinline__ void cp_async_arrive(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Orders shared memory written by threads (cp.async too) before what tensor cores and TMA read next.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements, the reverse of ldmatrix_x4: lane i brings the address of row i % 8 of matrix
// i / 8 and, of each matrix, two neighbours of row i / 4.
__device__ __forceinline__ void stmatrix_x4(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}
// The same, each matrix transposed: lane i brings the address of what was column i % 8.
__device__ __forceinline__ void stmatrix_x4_transposed(void* column, unsigned r0, unsigned r1, unsigned r2,
                                                       unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// ---- wgmma ----

// Orders registers and shared memory before the next wgmma of the warpgroup.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the newest groups are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After the last wait: nothing that reads the sums may be moved before it. (To the compiler a wgmma's results are there
// as soon as it is issued.)
template <int COUNT>
__device__ __forceinline__ void wgmma_results(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define MOEBLAZE_D8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
        "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOEBLAZE_D64(i)                                                                                      \
    MOEBLAZE_D8(i), MOEBLAZE_D8(i + 8), MOEBLAZE_D8(i + 16), MOEBLAZE_D8(i + 24), MOEBLAZE_D8(i + 32), \
        MOEBLAZE_D8(i + 40), MOEBLAZE_D8(i + 48), MOEBLAZE_D8(i + 56)
#define MOEBLAZE_WGMMA_128(TYPE)                                                             \
    asm volatile(                                                                            \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                     \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"             \
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"   \
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"   \
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "%64, %65, p, 1, 1, %67, %68;\n}"                                                    \
        : MOEBLAZE_D64(0)                                                                    \
        : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(A_ALONG_M)), "n"(int(B_ALONG_N)))
#define MOEBLAZE_WGMMA_256(TYPE)                                                                             \
    asm volatile(                                                                                            \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                                     \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                             \
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                   \
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                   \
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"                   \
        " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"                   \
        " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"                   \
        " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"       \
        " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
        "%128, %129, p, 1, 1, %131, %132;\n}"                                                                \
        : MOEBLAZE_D64(0), MOEBLAZE_D64(64)                                                                  \
        : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(A_ALONG_M)), "n"(int(B_ALONG_N)))

// d = a b, plus d if `accumulate`: (64, 16) by (16, 128 or 256), sums in float32. Thread t of the warpgroup holds rows
// t / 32 * 16 + t % 32 / 4 (d[4j], d[4j + 1]) and 8 below (d[4j + 2], d[4j + 3]), columns 8 j + t % 4 * 2 and the next.
// A_ALONG_M, B_ALONG_N: neighbours in memory are neighbours along M or N, not along K.
template <class Element, bool A_ALONG_M, bool B_ALONG_N>
__device__ __forceinline__ void wgmma_m64n128k16(float* d, unsigned long long a, unsigned long long b,
                                                 bool accumulate) {
    if constexpr (IS_BFLOAT16<Element>)
        MOEBLAZE_WGMMA_128("bf16");
    else
        MOEBLAZE_WGMMA_128("f16");
}
template <class Element, bool A_ALONG_M, bool B_ALONG_N>
__device__ __forceinline__ void wgmma_m64n256k16(float* d, unsigned long long a, unsigned long long b,
                                                 bool accumulate) {
    if constexpr (IS_BFLOAT16<Element>)
        MOEBLAZE_WGMMA_256("bf16");
    else
        MOEBLAZE_WGMMA_256("f16");
}

// ---- registers ----

template <int REGISTERS>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
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

inline void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1, SIMT_HERE) {
    simt_tma_load(shared, map, barrier, 2, {c0, c1, 0}, SIMT_AT("tma_load"));
}
inline void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1, int c2, SIMT_HERE) {
    simt_tma_load(shared, map, barrier, 3, {c0, c1, c2}, SIMT_AT("tma_load"));
}
inline void cp_async_arrive(Barrier* barrier, SIMT_HERE) { simt_async_arrive(barrier, SIMT_AT("cp_async_arrive")); }
inline void fence_async_proxy() { simt_fence_async_proxy(); }

struct SimtStmatrix {
    unsigned short* line;
    unsigned registers[4];
    bool transposed;

    static void exchange(void* const* lanes) {
        simt_each_lane<SimtStmatrix>(lanes, [lanes](unsigned lane, SimtStmatrix& mine) {
            const unsigned g = lane / 4, t = lane % 4;
            for (unsigned matrix = 0; matrix < 4; ++matrix)
                for (unsigned i = 0; i < 2; ++i) {
                    const unsigned row = g, column = 2 * t + i, line = mine.transposed ? column : row;
                    static_cast<SimtStmatrix*>(lanes[8 * matrix + line])->line[row + column - line] =
                        mine.registers[matrix] >> 16 * i;
                }
        });
    }
};
inline void simt_stmatrix(SimtStmatrix mine, SimtSite site) {
    simt_access(mine.line, 16, SIMT_WRITE);
    simt_warp(0xffffffffu, SimtStmatrix::exchange, &mine, site);
}
inline void stmatrix_x4(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3, SIMT_HERE) {
    simt_stmatrix({static_cast<unsigned short*>(row), {r0, r1, r2, r3}, false}, SIMT_AT("stmatrix_x4"));
}
inline void stmatrix_x4_transposed(void* column, unsigned r0, unsigned r1, unsigned r2, unsigned r3, SIMT_HERE) {
    simt_stmatrix({static_cast<unsigned short*>(column), {r0, r1, r2, r3}, true}, SIMT_AT("stmatrix_x4_transposed"));
}

inline void wgmma_fence() {}
inline void wgmma_commit() { simt_wgmma_commit(); }
template <int PENDING>
inline void wgmma_wait(SIMT_HERE) {
    simt_wgmma_wait(PENDING, SIMT_AT("wgmma_wait"));
}
template <int COUNT>
inline void wgmma_results(float (&)[COUNT]) {}
template <class Element, bool A_ALONG_M, bool B_ALONG_N>
inline void wgmma_m64n128k16(float* d, unsigned long long a, unsigned long long b, bool accumulate, SIMT_HERE) {
    const SimtWgmma step = {a, b, d, 128, IS_BFLOAT16<Element>, A_ALONG_M, B_ALONG_N, accumulate};
    simt_wgmma(&step, SIMT_AT("wgmma_m64n128k16"));
}
template <class Element, bool A_ALONG_M, bool B_ALONG_N>
inline void wgmma_m64n256k16(float* d, unsigned long long a, unsigned long long b, bool accumulate, SIMT_HERE) {
    const SimtWgmma step = {a, b, d, 256, IS_BFLOAT16<Element>, A_ALONG_M, B_ALONG_N, accumulate};
    simt_wgmma(&step, SIMT_AT("wgmma_m64n256k16"));
}

template <int REGISTERS>
inline void registers_down() {}
template <int REGISTERS>
inline void registers_up() {}

#endif
