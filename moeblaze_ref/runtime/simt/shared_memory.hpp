// A block's shared memory: where it lies, also as a number, and which threads have written what since which fence.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "range.hpp"

class SharedMemory {
  public:
    static constexpr uint32_t NOWHERE = 0;
    static constexpr int NOBODY = -1;

    Range fixed, dynamic;  // what arrays declare, and what the launch asks for

    void place(Range declared, Range asked_for, unsigned threads) {
        fixed = declared;
        dynamic = asked_for;
        const uint64_t end = FIXED_START + fixed.bytes;
        dynamic_start_ = uint32_t((end + MODULUS - 1) / MODULUS * MODULUS + REMAINDER);
        writes_.resize((dynamic_start_ + dynamic.bytes) / WRITE_BYTES + 1);
        fenced_.resize(threads);
    }

    void begin_block(uint16_t poison) {
        fixed.fill(poison);
        dynamic.fill(poison);
        std::fill(fenced_.begin(), fenced_.end(), 0);
        block_began_ = ++clock_;
    }

    bool holds(uint64_t address, uint64_t bytes) const {
        return fixed.holds(address, bytes) || dynamic.holds(address, bytes);
    }

    // ---- addresses as instructions take them, 18 bits ----

    uint32_t number(uint64_t address) const {
        if (dynamic.holds(address, 0)) return dynamic_start_ + uint32_t(address - dynamic.begin);
        if (fixed.holds(address, 0)) return FIXED_START + uint32_t(address - fixed.begin);
        return NOWHERE;
    }

    // The memory of a number; null where the block has none.
    void* at(uint32_t number, uint64_t bytes) const {
        const bool is_dynamic = number >= dynamic_start_;
        const Range& range = is_dynamic ? dynamic : fixed;
        const uint64_t address = range.begin + number - (is_dynamic ? dynamic_start_ : FIXED_START);
        return number >= FIXED_START && range.holds(address, bytes) ? reinterpret_cast<void*>(address) : nullptr;
    }

    // ---- what threads have written, and no fence has ordered before the asynchronous engines ----

    void fence(unsigned thread) { fenced_[thread] = ++clock_; }
    uint64_t last_fence(unsigned thread) const { return fenced_[thread]; }

    void note_write(uint64_t address, uint64_t bytes, unsigned thread) {
        const uint64_t begin = number(address), last = begin + bytes - 1;
        for (uint64_t at = begin / WRITE_BYTES; at <= last / WRITE_BYTES; ++at) writes_[at] = {clock_, thread};
    }
    // The copy engine's writes need no fence.
    void forget_write(uint32_t number) { writes_[number / WRITE_BYTES] = {}; }

    // Who wrote there, if neither the writer nor the reader has had a fence since.
    int unfenced_writer(uint32_t number, uint64_t readers_fence) const {
        const Write& last = writes_[number / WRITE_BYTES];
        const uint64_t fence = std::max(fenced_[last.thread], readers_fence);
        return last.clock < block_began_ || fence > last.clock ? NOBODY : int(last.thread);
    }

  private:
    // Dynamic shared memory begins at no multiple of 1024: who needs one has to see to it.
    static constexpr uint32_t FIXED_START = 128, MODULUS = 1024, REMAINDER = 128;
    static constexpr uint32_t WRITE_BYTES = 16;

    struct Write {
        uint64_t clock = 0;
        unsigned thread = 0;
    };

    uint32_t dynamic_start_ = 0;
    std::vector<Write> writes_;  // the last one of each 16 bytes
    std::vector<uint64_t> fenced_;
    uint64_t clock_ = 0;  // goes on at every fence and block
    uint64_t block_began_ = 0;
};
