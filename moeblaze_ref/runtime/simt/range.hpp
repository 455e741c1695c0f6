// A piece of memory.
#pragma once
#include <algorithm>
#include <cstdint>

struct Range {
    uint64_t begin = 0, bytes = 0;
    bool holds(uint64_t address, uint64_t size) const {
        return address >= begin && address - begin <= bytes && bytes - (address - begin) >= size;
    }
    bool holds(uint64_t address) const { return address - begin < bytes; }
    // Bytes between the address and the range; 0 inside.
    uint64_t distance(uint64_t address) const {
        return address < begin ? begin - address : address - std::min(address, begin + bytes);
    }
    void fill(uint16_t value) const { std::fill_n(reinterpret_cast<uint16_t*>(begin), bytes / sizeof value, value); }
};
