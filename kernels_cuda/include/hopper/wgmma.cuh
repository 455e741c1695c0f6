// wgmma: products of a warpgroup, from operands in shared memory; and the registers of a warp.
//
// sm_90a; the SIMT executor takes the plain C++ branch. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr int WARPGROUP = 128;  // threads that issue one wgmma together

template <class Element>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

// An operand in shared memory, in rows of 128 bytes with the 128-byte swizzle. Along K the rows are the operand's own
// and `leading` plays no part; along M or N a row is one k, and `leading` is the bytes from one 64 elements to the
// next.
__device__ __forceinline__ unsigned long long wgmma_operand(const void* shared, int leading) {
    constexpr unsigned long long EIGHT_ROWS = 1024, SWIZZLE_128 = 1;
    return (shared_address(shared) & 0x3ffff) >> 4 | (leading >> 4) << 16 | EIGHT_ROWS >> 4 << 32 | SWIZZLE_128 << 62;
}
// The same operand, some bytes further on.
__device__ __forceinline__ unsigned long long wgmma_advance(unsigned long long operand, int bytes) {
    return operand + (bytes >> 4);
}

#ifndef MOEBLAZE_SIMT

// Orders shared memory written by threads (cp.async too) before what tensor cores and TMA read next.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

#define MOEBLAZE_D8(i)                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define MOEBLAZE_D64(i)                                                                                \
    MOEBLAZE_D8(i), MOEBLAZE_D8(i + 8), MOEBLAZE_D8(i + 16), MOEBLAZE_D8(i + 24), MOEBLAZE_D8(i + 32), \
        MOEBLAZE_D8(i + 40), MOEBLAZE_D8(i + 48), MOEBLAZE_D8(i + 56)
#define MOEBLAZE_WGMMA_128(TYPE)                                                             \
    asm volatile(                                                                            \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                         \
        " "                                                                                  \
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
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                         \
        " "                                                                                                  \
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
__device__ __forceinline__ void wgmma_m64n64k16(float* d, unsigned long long a, unsigned long long b, bool accumulate) {
    if constexpr (IS_BFLOAT16<Element>)
        MOEBLAZE_WGMMA_64("bf16");
    else
        MOEBLAZE_WGMMA_64("f16");
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

inline void fence_async_proxy() { simt_fence_async_proxy(); }

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
