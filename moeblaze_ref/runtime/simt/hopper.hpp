// What Hopper's instructions do, apart from when they do it: phases of barriers, boxes of a tensor, matrix products.
//
// `locate(address, bytes)` gives the memory of a shared address, as the instructions count them.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "narrow_floats.h"
#include "simt_abi.h"

// The 128-byte swizzle: which 16 bytes of a row of 128 are meant depends on the row, of eight.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

struct Mbarrier {
    unsigned arrivals = 0;  // of every phase
    unsigned missing = 0;   // of this phase
    int64_t bytes = 0;      // expected, and not yet here; below zero if they came before they were expected
    unsigned phase = 0;

    // Goes on to the next phase if this one is complete.
    bool turn() {
        if (missing || bytes) return false;
        missing = arrivals;
        ++phase;
        return true;
    }
};

// One copy of the copy engine: a box of a tensor, from an element on.
struct TensorBox {
    static constexpr uint64_t ROW_BYTES = 128;

    SimtTensorMap map;
    int64_t begin[3];

    uint64_t bytes() const { return map.box[1] * map.box[2] * ROW_BYTES; }

    // visit(row of the box, bytes before those that the tensor has, where it has them, how many).
    template <class Visit>
    void each_row(Visit visit) const {
        const uint64_t first = elements_before(0), last = elements_before(int64_t(map.extents[0]));
        const uint64_t element = map.strides[0];
        for (uint64_t row = 0; row < map.box[1] * map.box[2]; ++row) {
            const int64_t at1 = begin[1] + int64_t(row % map.box[1]), at2 = begin[2] + int64_t(row / map.box[1]);
            const uint64_t elements = holds(1, at1) && holds(2, at2) && first < last ? last - first : 0;
            const uint64_t column = uint64_t(begin[0] + int64_t(first));
            const uint64_t line = map.address + uint64_t(at1) * map.strides[1] + uint64_t(at2) * map.strides[2];
            visit(row, first * element, line + column * element, elements * element);
        }
    }

    template <class Locate>
    void copy(uint32_t shared, Locate locate) const {
        each_row([&](uint64_t row, uint64_t before, uint64_t from, uint64_t bytes) {
            char whole[ROW_BYTES] = {};
            if (bytes) memcpy(whole + before, reinterpret_cast<const void*>(from), bytes);
            for (uint32_t at = 0; at < ROW_BYTES; at += 16)
                memcpy(locate(swizzled(shared + uint32_t(row * ROW_BYTES) + at), 16), whole + at, 16);
        });
    }

  private:
    bool holds(int axis, int64_t at) const { return at >= 0 && uint64_t(at) < map.extents[axis]; }
    // Elements of a row of the box that lie before this column of the tensor.
    uint64_t elements_before(int64_t column) const {
        return uint64_t(std::clamp<int64_t>(column - begin[0], 0, int64_t(map.box[0])));
    }
};

// An operand in shared memory as its descriptor says (PTX ISA, "Matrix Descriptor Format"), 16 deep. A row is one of
// A's or a column of B.
class Operand {
  public:
    Operand(uint64_t descriptor, bool along_rows) : descriptor_(descriptor), along_rows_(along_rows) {}

    // In rows of 128 bytes with their swizzle, which starts where the address is a multiple of 1024.
    bool readable() const { return descriptor_ >> 62 == 1 && (descriptor_ >> 49 & 7) == 0; }

    // visit(row, k, eight elements): of eight rows from this one on if they lie along rows, else of one row from k on.
    template <class Locate, class Visit>
    void each(unsigned first, unsigned rows, Locate locate, Visit visit) const {
        for (unsigned i = 0; i < rows * 16; i += 8) {
            const unsigned row = along_rows_ ? i % rows : i / 16, k = along_rows_ ? i / rows : i % 16;
            visit(row, k, static_cast<const uint16_t*>(locate(address(first + row, k), 16)));
        }
    }

  private:
    uint32_t field(unsigned shift) const { return uint32_t(descriptor_ >> shift & 0x3fff) << 4; }
    uint32_t address(unsigned row, unsigned k) const {
        const uint32_t start = field(0), leading = field(16), eight_rows = field(32);
        return swizzled(start + (along_rows_ ? row / 64 * leading + k / 8 * eight_rows + k % 8 * 128 + row % 64 * 2
                                             : row / 8 * eight_rows + row % 8 * 128 + k * 2));
    }

    uint64_t descriptor_;
    bool along_rows_;
};

inline std::array<float, 8> to_floats(const uint16_t* bits, bool bfloat16) {
    std::array<float, 8> floats;
    if (bfloat16)
        for (unsigned j = 0; j < 8; ++j) floats[j] = simt_bfloat16_to_float(bits[j]);
    else
        for (unsigned j = 0; j < 8; ++j) floats[j] = simt_half_to_float(bits[j]);
    return floats;
}

// A warp's 16 rows of a wgmma's product, in float32.
struct WarpProduct {
    static constexpr unsigned ROWS = 16, DEPTH = 16, MAX_COLUMNS = 256;

    float a[ROWS][DEPTH], b[DEPTH][MAX_COLUMNS], sums[ROWS][MAX_COLUMNS];

    // warp: of the warpgroup.
    template <class Locate>
    WarpProduct(const SimtWgmma& step, unsigned warp, Locate locate) : b{} {
        const Operand left(step.a, step.a_along_rows), right(step.b, step.b_along_rows);
        left.each(warp * ROWS, ROWS, locate, [&](unsigned row, unsigned k, const uint16_t* bits) {
            const auto eight = to_floats(bits, step.bfloat16);
            for (unsigned j = 0; j < 8; ++j) (step.a_along_rows ? a[row + j][k] : a[row][k + j]) = eight[j];
        });
        right.each(0, step.columns, locate, [&](unsigned column, unsigned k, const uint16_t* bits) {
            const auto eight = to_floats(bits, step.bfloat16);
            for (unsigned j = 0; j < 8; ++j) (step.b_along_rows ? b[k][column + j] : b[k + j][column]) = eight[j];
        });
        for (unsigned first = 0; first < step.columns; first += TILE)
            for (unsigned row = 0; row < ROWS; ++row) multiply(row, first);
    }

    // A lane's registers (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts", wgmma's D).
    void store(const SimtWgmma& step, unsigned lane) const {
        for (unsigned i = 0; i < step.columns / 2; ++i) {
            const float sum = sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
            step.d[i] = step.accumulate ? step.d[i] + sum : sum;
        }
    }

  private:
    static constexpr unsigned TILE = 32;

    // As many columns as the processor's registers hold, from the first on. The pointer to a line of b matters: where
    // the index is a sum, g++ 12 loads one element at a time.
    void multiply(unsigned row, unsigned first) {
        float tile[TILE] = {};
        for (unsigned k = 0; k < DEPTH; ++k) {
            const float factor = a[row][k], *const line = b[k] + first;
            for (unsigned i = 0; i < TILE; ++i) tile[i] += factor * line[i];
        }
        std::copy_n(tile, TILE, sums[row] + first);
    }
};
