// What a warp's memory accesses cost: 32-byte sectors of global memory, passes over the banks
// of shared memory.
//
// Lanes run one after another here, so the accesses that a GPU would issue together are put
// together again: the n-th execution of one instruction since the warp's lanes last met counts
// as one warp access.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "simt_abi.h"

template <class Visit>
void each_lane(uint32_t lanes, Visit visit) {
    for (uint32_t left = lanes; left; left &= left - 1) visit(unsigned(__builtin_ctz(left)));
}

struct WarpAccess {
    static constexpr int SHARED = -1;

    int buffer;  // index of the global buffer, or SHARED
    SimtAccess access;
    unsigned bytes;  // of one lane
    uint32_t lanes = 0;
    uint64_t address[32];

    void add(unsigned lane, uint64_t where) {
        lanes |= 1u << lane;
        address[lane] = where;
    }

    // Distinct 32-byte sectors that the lanes touch.
    unsigned sectors() const {
        Distinct<128> seen;
        each_lane(lanes, [&](unsigned lane) {
            for (uint64_t sector = address[lane] / 32; sector <= (address[lane] + bytes - 1) / 32; ++sector)
                seen.insert(sector);
        });
        return seen.size;
    }

    // A pass serves one word of each bank to at most 128 bytes of lanes: 32 lanes of 4 bytes,
    // 16 of 8, 8 of 16. conflicts are the passes beyond the one that each such group needs.
    void count_banks(SimtShared& shared) const {
        const unsigned group = std::min(32u, 128 / std::max(bytes, 4u));
        for (unsigned first = 0; first < 32; first += group) {
            const unsigned passes = bank_passes(first, first + group);
            shared.wavefronts += passes;
            shared.bank_conflicts += passes ? passes - 1 : 0;
        }
    }

  private:
    template <unsigned CAPACITY>
    struct Distinct {
        std::array<uint64_t, CAPACITY> values;
        unsigned size = 0;
        void insert(uint64_t value) {
            for (unsigned i = size; i-- > 0;)
                if (values[i] == value) return;
            values[size++] = value;
        }
    };

    unsigned bank_passes(unsigned first, unsigned last) const {
        std::array<Distinct<32>, 32> banks;  // the words of each
        unsigned passes = 0;
        each_lane(lanes, [&](unsigned lane) {
            if (lane < first || lane >= last) return;
            for (uint64_t word = address[lane] / 4; word <= (address[lane] + bytes - 1) / 4; ++word) {
                Distinct<32>& bank = banks[word % 32];
                bank.insert(word);
                passes = std::max(passes, bank.size);
            }
        });
        return passes;
    }
};

// The accesses of one warp since its lanes last met.
class WarpLog {
  public:
    WarpLog() : table_(SLOTS) {}

    // False: there is no room for more until the lanes meet.
    bool add(const void* instruction, unsigned lane, uint64_t address, unsigned bytes, SimtAccess access, int buffer) {
        Instruction& entry = find(instruction);
        const uint32_t turn = entry.turns[lane]++;
        if (turn == MOST_TURNS) return false;
        if (turn == entry.used) {
            if (turn == entry.accesses.size()) entry.accesses.emplace_back();
            entry.accesses[entry.used++] = WarpAccess{buffer, access, bytes, 0, {}};
        }
        entry.accesses[turn].add(lane, address);
        return true;
    }

    // Adds the costs to the counters and forgets the accesses: the lanes have met.
    void flush(SimtBuffer* buffers, SimtShared& shared) {
        ++meetings_;
        for (Instruction* entry : active_) {
            for (uint32_t turn = 0; turn < entry->used; ++turn) count(entry->accesses[turn], buffers, shared);
            entry->turns.fill(0);
            entry->used = 0;
            entry->address = nullptr;
        }
        active_.clear();
    }

    uint64_t meetings() const { return meetings_; }

    static constexpr uint32_t MOST_TURNS = 1 << 20;  // of an instruction: then its log has 300 MB

  private:
    struct Instruction {
        const void* address = nullptr;
        std::array<uint32_t, 32> turns{};  // executions by each lane
        uint32_t used = 0;
        std::vector<WarpAccess> accesses;
        size_t next = 0;  // slot of the instruction that came after it
    };

    static void count(const WarpAccess& access, SimtBuffer* buffers, SimtShared& shared) {
        if (access.buffer == WarpAccess::SHARED) return access.count_banks(shared);
        const unsigned sectors = access.sectors();
        if (access.access & SIMT_READ) buffers[access.buffer].read_sectors += sectors;
        if (access.access & SIMT_WRITE) buffers[access.buffer].written_sectors += sectors;
    }

    // Mostly the one that came next the last time.
    Instruction& find(const void* address) {
        size_t slot = table_[last_].next;
        if (table_[slot].address != address) {
            slot = slot_of(address);
            table_[last_].next = slot;
        }
        return table_[last_ = slot];
    }

    size_t slot_of(const void* address) {
        if (active_.size() >= table_.size() / 2) grow();
        size_t slot = hash(address);
        while (table_[slot].address && table_[slot].address != address) slot = (slot + 1) & (table_.size() - 1);
        if (!table_[slot].address) {
            table_[slot].address = address;
            active_.push_back(&table_[slot]);
        }
        return slot;
    }

    size_t hash(const void* address) const {
        return (uint64_t(address) * 0x9e3779b97f4a7c15u >> 32) & (table_.size() - 1);
    }

    void grow() {
        std::vector<Instruction> old(table_.size() * 2);
        old.swap(table_);
        active_.clear();
        for (Instruction& entry : old)
            if (entry.address) table_[slot_of(entry.address)] = std::move(entry);
    }

    static constexpr size_t SLOTS = 64;  // a power of two, as every later size
    uint64_t meetings_ = 0;
    std::vector<Instruction> table_;
    size_t last_ = 0;  // slot
    std::vector<Instruction*> active_;
};
