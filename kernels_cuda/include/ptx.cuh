// Every inline-PTX instruction that the kernels use, wrapped once.
//
// sm_80 and newer; the SIMT executor takes the plain C++ branch, which moves the same elements
// between the same lanes (PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix").
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct alignas(16) Chunk {  // 16 bytes, eight narrow elements
    unsigned words[4];
};

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

#ifndef MOEBLAZE_SIMT

// 2^x and 1 / x by one instruction each, to about 2^-22; results below 2^-126 are zero.
__device__ __forceinline__ float fast_exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
}

// The smaller and the larger of two, or NaN if one of them is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// d += a b for a 16 x 16 by 16 x 8 product of the warp, accumulated in float32.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same for a 16 x 8 by 8 x 8 product of floats that `to_tf32` has rounded.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The bits of a float rounded to the 10 bits of tf32's mantissa: to nearest, ties away from zero.
__device__ __forceinline__ unsigned to_tf32(unsigned bits) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

// Four 8 x 8 matrices of 16-bit elements: lane i brings the address of row i % 8 of matrix i / 8
// and gets, of each matrix, two neighbours of row i / 4.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&registers)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row)));
}

// The same of the transposed matrices: two neighbours of column i / 4.
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&registers)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row)));
}

// Copies 16 bytes from global to shared memory without passing through registers, or writes 16 zeros if they are not
// `present`.
__device__ __forceinline__ void cp_async_or_zero(void* shared, const void* global, bool present) {
    asm volatile(
        "{\n.reg .pred absent;\nsetp.eq.u32 absent, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, absent;\n}" ::"r"(shared_address(shared)),
        "l"(global), "r"(unsigned(present))
        : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else

inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline float min_or_nan(float a, float b) { return a != a ? a : b < a || b != b ? b : a; }
inline float max_or_nan(float a, float b) { return a != a ? a : b > a || b != b ? b : a; }

// A lane's four results of D += A B: it holds rows g and g + 8, columns 2 t and 2 t + 1.
template <unsigned DEPTH>
SIMT_PLAIN void simt_multiply(const float (&a)[16][DEPTH], const float (&b)[DEPTH][8], unsigned lane, float* d) {
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; ++i) {
        float sum = d[i];
        for (unsigned k = 0; k < DEPTH; ++k) sum += a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2];
        d[i] = sum;
    }
}

template <class Element>
struct SimtMma {
    unsigned a[4], b[2];
    float* d;

    SIMT_UNSEEN static float element(unsigned word, unsigned half) {
        return float(reinterpret_cast<const Element*>(&word)[half]);
    }
    // Lane 4 g + t holds rows g and g + 8 of A and D, column g of B; t says which neighbours.
    SIMT_UNSEEN static void exchange(void* const* lanes) {
        float a[16][16], b[16][8];
        simt_each_lane<SimtMma>(lanes, [&](unsigned lane, SimtMma& mine) SIMT_UNSEEN {
            const unsigned g = lane / 4, t = lane % 4;
            for (unsigned i = 0; i < 8; ++i)
                a[g + 8 * (i / 2 % 2)][2 * t + i % 2 + 8 * (i / 4)] = element(mine.a[i / 2], i % 2);
            for (unsigned i = 0; i < 4; ++i) b[2 * t + i % 2 + 8 * (i / 2)][g] = element(mine.b[i / 2], i % 2);
        });
        simt_each_lane<SimtMma>(lanes,
                                [&](unsigned lane, SimtMma& mine) SIMT_UNSEEN { simt_multiply(a, b, lane, mine.d); });
    }
};
template <class Element>
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], SIMT_HERE) {
    SimtMma<Element> mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, d};
    simt_warp(0xffffffffu, SimtMma<Element>::exchange, &mine, SIMT_AT("mma_m16n8k16"));
}

struct SimtMmaTf32 {
    unsigned a[4], b[2];
    float* d;

    // Lane 4 g + t holds rows g and g + 8 of A and D, column g of B; of the depth t and t + 4.
    SIMT_UNSEEN static void exchange(void* const* lanes) {
        float a[16][8], b[8][8];
        simt_each_lane<SimtMmaTf32>(lanes, [&](unsigned lane, SimtMmaTf32& mine) SIMT_UNSEEN {
            const unsigned g = lane / 4, t = lane % 4;
            for (unsigned i = 0; i < 4; ++i) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = __int_as_float(mine.a[i]);
            for (unsigned i = 0; i < 2; ++i) b[t + 4 * i][g] = __int_as_float(mine.b[i]);
        });
        simt_each_lane<SimtMmaTf32>(
            lanes, [&](unsigned lane, SimtMmaTf32& mine) SIMT_UNSEEN { simt_multiply(a, b, lane, mine.d); });
    }
};
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], SIMT_HERE) {
    SimtMmaTf32 mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, d};
    simt_warp(0xffffffffu, SimtMmaTf32::exchange, &mine, SIMT_AT("mma_m16n8k8_tf32"));
}

// Half of the last place that is kept is added to the magnitude, and the rest cut off.
inline unsigned to_tf32(unsigned bits) {
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return is_nan ? bits : (bits + 0x1000u) & ~0x1fffu;
}

template <bool TRANSPOSED>
struct SimtLdmatrix {
    const unsigned short* row;
    unsigned* registers;

    SIMT_UNSEEN static void exchange(void* const* lanes) {
        simt_each_lane<SimtLdmatrix>(lanes, [lanes](unsigned lane, SimtLdmatrix& mine) SIMT_UNSEEN {
            const unsigned g = lane / 4, t = lane % 4;
            for (unsigned matrix = 0; matrix < 4; ++matrix) {
                auto at = [&](unsigned r, unsigned c) SIMT_UNSEEN {
                    return unsigned(static_cast<SimtLdmatrix*>(lanes[8 * matrix + r])->row[c]);
                };
                mine.registers[matrix] =
                    TRANSPOSED ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
            }
        });
    }
};
template <bool TRANSPOSED>
inline void simt_ldmatrix(unsigned (&registers)[4], const void* row, SimtSite site) {
    simt_access(row, 16, SIMT_READ);
    SimtLdmatrix<TRANSPOSED> mine{static_cast<const unsigned short*>(row), registers};
    simt_warp(0xffffffffu, SimtLdmatrix<TRANSPOSED>::exchange, &mine, site);
}
inline void ldmatrix_x4(unsigned (&registers)[4], const void* row, SIMT_HERE) {
    simt_ldmatrix<false>(registers, row, SIMT_AT("ldmatrix_x4"));
}
inline void ldmatrix_x4_transposed(unsigned (&registers)[4], const void* row, SIMT_HERE) {
    simt_ldmatrix<true>(registers, row, SIMT_AT("ldmatrix_x4_transposed"));
}

inline void cp_async_or_zero(void* shared, const void* global, bool present) {
    simt_async_copy(shared, present ? global : nullptr, 16);
}
inline void cp_async_commit() { simt_async_commit(); }
template <int PENDING>
inline void cp_async_wait() {
    simt_async_wait(PENDING);
}

#endif
