// CUDA's vectors of one to four numbers: one instruction moves two or four of them. Written for this project.
#pragma once

#define SIMT_VECTORS(name, type)                                                           \
    struct name##1 { type x; };                                                            \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                               \
    struct name##3 { type x, y, z; };                                                      \
    struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
    inline name##1 make_##name##1(type x) { return {x}; }                                  \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                       \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }            \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

SIMT_VECTORS(char, signed char)
SIMT_VECTORS(uchar, unsigned char)
SIMT_VECTORS(short, short)
SIMT_VECTORS(ushort, unsigned short)
SIMT_VECTORS(int, int)
SIMT_VECTORS(uint, unsigned)
SIMT_VECTORS(long, long)
SIMT_VECTORS(ulong, unsigned long)
SIMT_VECTORS(longlong, long long)
SIMT_VECTORS(ulonglong, unsigned long long)
SIMT_VECTORS(float, float)
SIMT_VECTORS(double, double)
#undef SIMT_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
