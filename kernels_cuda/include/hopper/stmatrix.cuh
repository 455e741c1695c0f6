// stmatrix: from registers, as products leave them, to rows in shared memory.
//
// sm_90; the SIMT executor takes the plain C++ branch. Source: PTX ISA, "stmatrix".
#pragma once
#include "ptx.cuh"

#ifndef MOEBLAZE_SIMT

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

#else

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

#endif
