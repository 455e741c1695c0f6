// The SIMT runtime: runs a grid of CUDA blocks on the CPU, counts what the threads ask of
// memory, and turns faults into messages.
//
// A block runs on one operating-system thread; its CUDA threads are fibers that run until they
// exit, wait (barrier, warp exchange) or fault. Kernel files are compiled with
// -fsanitize=thread, whose callbacks (__tsan_*, at the end of this file) report every access
// before it happens; this file is not.
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fiber.hpp"
#include "hopper.hpp"
#include "kernel_file.hpp"
#include "shared_memory.hpp"
#include "simt_abi.h"
#include "traffic.hpp"

namespace {

constexpr unsigned WARP = 32;

enum State { READY, AT_BARRIER, AT_WARP, AT_MBARRIER, EXITED, NUM_STATES };

struct AsyncCopy {
    void* to;
    const void* from;  // null: zeros
    unsigned bytes;
    unsigned group;
    unsigned number;  // among its thread's
    bool landed = false;

    void land() {
        if (!std::exchange(landed, true)) from ? (void)memcpy(to, from, bytes) : (void)memset(to, 0, bytes);
    }
};

struct PendingWgmma {
    SimtWgmma step;
    SimtSite site;
    unsigned group;
    uint64_t last_fence;  // of its thread

    bool same_as(const PendingWgmma& other) const {
        const SimtWgmma &one = step, &two = other.step;
        return one.a == two.a && one.b == two.b && one.accumulate == two.accumulate && site.line == other.site.line;
    }
};

struct Thread {
    Fiber fiber;
    SimtDim index;
    unsigned number, lane, warp;
    State state;
    SimtSite site;  // where it waits
    int block_op;
    int predicate;
    int result;
    unsigned mask;
    SimtExchange exchange;
    void* brought;                  // to the exchange
    std::vector<AsyncCopy> copies;  // not yet done
    unsigned group, asked;          // of the next copy: its group, and how many came before
    std::vector<PendingWgmma> products;
    unsigned product_group;
    const Mbarrier* awaited;
    uint64_t accesses, exchanges;  // in this block
    bool has_written;              // in this block

    void begin_block() {
        state = EXITED;
        accesses = exchanges = 0;
        has_written = false;
        copies.clear();
        products.clear();
        group = asked = product_group = 0;
    }

    template <class Due, class Written>
    void finish_copies(Due due, Written written) {
        std::erase_if(copies, [&](AsyncCopy& copy) {
            if (!due(copy)) return false;
            copy.land();
            written(copy);
            return true;
        });
    }

    bool waits_with(const Thread& other) const {
        return site.line == other.site.line && site.operation == other.site.operation && site.file == other.site.file;
    }
};

struct Warp {
    WarpLog log;
    uint32_t lanes[NUM_STATES];  // in each state; those that no thread has count as exited

    void begin_block() {
        std::fill_n(lanes, NUM_STATES, 0);
        lanes[EXITED] = ~0u;
    }
};

// What comes to a barrier later: a box, or a thread's copies and then its arrival.
struct Transfer {
    Mbarrier* barrier;
    SimtSite site;
    TensorBox box;
    uint32_t shared;  // address
    Thread* copier = nullptr;
    unsigned copies = 0;  // of the thread's, those before this number
};

class Random {  // splitmix64
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

  private:
    uint64_t state_;
};

struct Worker;
__attribute__((tls_model("initial-exec"))) thread_local Worker* worker = nullptr;

// Accesses that are not looked at: all, or those to the stack of the thread that runs. Most accesses are to it (a GPU
// has registers for them), so this test alone stands before each.
constexpr Range EVERYTHING{0, ~0ull};
__attribute__((tls_model("initial-exec"))) thread_local Range unseen = EVERYTHING;

void thread_body();

// The file of a kernel. It is looked up once: the search goes through all libraries of the process, and none is ever
// unloaded.
const KernelFile& file_of(SimtEntry entry) {
    static std::mutex mutex;
    static auto& files = *new std::map<SimtEntry, KernelFile>;  // never destroyed: a thread may launch until the end
    const std::lock_guard<std::mutex> lock(mutex);
    return files.try_emplace(entry, entry).first->second;
}

// One operating-system thread's share of a launch: runs blocks one after another.
struct Worker {
    const SimtLaunch* launch;
    std::vector<SimtBuffer> buffers;  // this worker's counters
    SimtShared shared;
    SimtWork work;
    uint64_t barriers_passed = 0;  // in this block
    Range image;
    SharedMemory block_memory;
    std::vector<char> dynamic_memory;
    std::map<uint64_t, Mbarrier> barriers;  // of the block, by address
    std::vector<Transfer> transfers;        // not yet done, in order

    std::vector<std::unique_ptr<Thread>> pool;
    unsigned num_threads = 0;
    std::vector<Warp> warps;
    SimtDim block;
    uint64_t block_number = 0;
    Thread* current = nullptr;
    const Thread* meeting = nullptr;  // one of the lanes that exchange
    Random random{0};
    unsigned favourite = 0;
    size_t last_buffer = 0;
    bool failed = false;
    bool observed = false;  // recorded, or in a random order
    char fault[sizeof(SimtLaunch::fault)];

    // ---- faults --------------------------------------------------------------------------

    __attribute__((format(printf, 3, 4))) void fail(const Thread& thread, const char* format, ...) {
        if (failed) return;
        failed = true;
        int used = snprintf(fault, sizeof fault, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u): ", launch->kernel,
                            block.x, block.y, block.z, thread.index.x, thread.index.y, thread.index.z);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(fault + used, sizeof fault - size_t(used), format, arguments);
        va_end(arguments);
    }

    // The same, of an operation at its line of the source.
    __attribute__((format(printf, 4, 5))) void fail_at(const Thread& thread, const SimtSite& site, const char* format,
                                                       ...) {
        char what[256];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(what, sizeof what, format, arguments);
        va_end(arguments);
        fail(thread, "%s at %s:%d %s", site.operation, site.file, site.line, what);
    }

    // The faulting thread never runs again; its stack is abandoned, not unwound.
    [[noreturn]] void stop() {
        yield();
        __builtin_unreachable();  // a launch that failed resumes no thread
    }

    void yield() { current->fiber.yield(); }

    // ---- a launch and its blocks ---------------------------------------------------------

    void prepare(const SimtLaunch* next) {
        launch = next;
        buffers.clear();
        for (const SimtBuffer* b = next->buffers; b < next->buffers + next->num_buffers; ++b)
            buffers.push_back({b->name, b->address, b->bytes, 0, 0, 0, 0});
        shared = {};
        work = {};
        last_buffer = 0;
        failed = false;
        observed = next->recorder || next->seed;
        dynamic_memory.resize(next->dynamic_shared_bytes + 128);
        const uint64_t start = (uint64_t(dynamic_memory.data()) + 127) / 128 * 128;
        const KernelFile& file = file_of(next->entry);
        image = file.image;
        num_threads = next->block.x * next->block.y * next->block.z;
        block_memory.place(file.static_shared(), {start, next->dynamic_shared_bytes}, num_threads);

        while (pool.size() < num_threads) pool.push_back(std::make_unique<Thread>());
        for (unsigned i = 0; i < num_threads; ++i) {
            Thread& thread = *pool[i];
            thread.index = {i % next->block.x, i / next->block.x % next->block.y, i / (next->block.x * next->block.y)};
            thread.number = i;
            thread.lane = i % WARP;
            thread.warp = i / WARP;
            thread.fiber.restart(thread_body);
        }
        warps.resize((num_threads + WARP - 1) / WARP);
    }

    void run_block(uint64_t number) {
        const SimtDim& grid = launch->grid;
        block_number = number;
        block = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
        random = Random(launch->seed + 0x632be59bd9b4e019u * (number + 1));
        block_memory.begin_block(uint16_t(launch->poison));
        barriers.clear();
        transfers.clear();
        barriers_passed = 0;
        for (Warp& warp : warps) warp.begin_block();
        for (unsigned i = 0; i < num_threads; ++i) {
            pool[i]->begin_block();
            enter(*pool[i], READY);
        }
        favourite = launch->seed ? unsigned(random.next() % warps.size()) : 0;
        while (!failed && run_round()) {
        }
        if (failed) warps.clear();
        count_work();
    }

    void enter(Thread& thread, State state) {
        Warp& warp = warps[thread.warp];
        warp.lanes[thread.state] &= ~(1u << thread.lane);
        warp.lanes[state] |= 1u << thread.lane;
        thread.state = state;
    }

    void count_work() {
        work.barriers = std::max(work.barriers, barriers_passed);
        for (unsigned i = 0; i < num_threads; ++i) {
            work.accesses = std::max(work.accesses, pool[i]->accesses);
            work.threads += pool[i]->has_written;
            work.exchanges = std::max(work.exchanges, pool[i]->exchanges);
        }
    }

    // Lets warps run until their lanes wait or exit, then opens the barrier that all wait at, then
    // does what comes to an mbarrier. False when the block has ended.
    bool run_round() {
        bool ran = false;
        if (launch->seed && !transfers.empty() && random.next() % 8 == 0)
            finish_transfer(random.next() % transfers.size());
        if (!launch->seed)
            for (unsigned warp = 0; warp < warps.size() && !failed; ++warp) ran |= run_warp(warp);
        else if (find_random_warp())
            ran = run_warp(favourite);
        if (failed) return false;
        if (ran || release_barrier() || finish_transfers()) return true;
        explain_deadlock();
        return false;
    }

    // Runs the warp's ready lanes and completes its exchanges; false if it had none to run.
    bool run_warp(unsigned warp) {
        unsigned lanes[WARP], ready = 0;
        each_lane(warps[warp].lanes[READY], [&](unsigned lane) { lanes[ready++] = warp_begin(warp) + lane; });
        if (launch->seed) shuffle(lanes, ready);
        for (unsigned i = 0; i < ready && !failed; ++i) {
            current = pool[lanes[i]].get();
            unseen = launch->checked ? current->fiber.stack() : EVERYTHING;
            current->fiber.resume();
        }
        if (failed || !ready) return false;
        if (!warps[warp].lanes[READY]) warps[warp].log.flush(buffers.data(), shared);
        release_warp(warp);
        return true;
    }

    void shuffle(unsigned* lanes, unsigned count) {
        for (unsigned i = count; i > 1; --i) std::swap(lanes[i - 1], lanes[random.next() % i]);
    }

    // One warp runs far ahead of the others until chance or a barrier stops it: the order in
    // which a missing barrier does most harm. False if no warp can run.
    bool find_random_warp() {
        const unsigned count = unsigned(warps.size());
        if (random.next() % 16 == 0) favourite = unsigned(random.next() % count);
        for (unsigned step = 0; step < count; ++step) {
            if (warps[favourite].lanes[READY]) return true;
            favourite = step ? (favourite + 1) % count : unsigned(random.next() % count);
        }
        return warps[favourite].lanes[READY];
    }

    unsigned warp_begin(unsigned warp) const { return warp * WARP; }
    unsigned warp_end(unsigned warp) const { return std::min(num_threads, (warp + 1) * WARP); }

    // ---- warp exchanges ------------------------------------------------------------------

    // The current thread waits for the lanes of its mask, and then exchange runs once.
    void meet(unsigned mask, SimtExchange exchange, void* mine, SimtSite site) {
        Thread& self = *current;
        self.site = site;
        self.mask = mask;
        self.exchange = exchange;
        self.brought = mine;
        if (!(mask >> self.lane & 1)) {
            fail_at(self, site, "has mask 0x%08x, which leaves out the calling lane %u", mask, self.lane);
            stop();
        }
        enter(self, AT_WARP);
        yield();
    }

    // Completes every exchange of the warp for which all live lanes of its mask have arrived.
    void release_warp(unsigned warp) {
        each_lane(warps[warp].lanes[AT_WARP], [&](unsigned lane) {
            Thread& first = *pool[warp_begin(warp) + lane];
            if (!failed && first.state == AT_WARP && all_arrived(first)) exchange(first);
        });
    }

    uint32_t live_lanes(const Thread& of) const { return of.mask & ~warps[of.warp].lanes[EXITED]; }

    template <class Visit>
    void each_live_lane(const Thread& of, Visit visit) {
        each_lane(live_lanes(of), [&](unsigned lane) { visit(*pool[warp_begin(of.warp) + lane]); });
    }

    bool all_arrived(const Thread& first) {
        bool arrived = !(live_lanes(first) & ~warps[first.warp].lanes[AT_WARP]);
        if (arrived) each_live_lane(first, [&](const Thread& other) { arrived &= other.waits_with(first); });
        if (!arrived) return false;
        each_live_lane(first, [&](const Thread& other) {
            if (other.mask != first.mask)
                fail_at(other, other.site, "has mask 0x%08x here and 0x%08x in lane %u", other.mask, first.mask,
                        first.lane);
        });
        return !failed;
    }

    void exchange(Thread& first) {
        void* lanes[WARP] = {};
        each_live_lane(first, [&](Thread& lane) { lanes[lane.lane] = lane.brought; });
        meeting = &first;
        unseen = EVERYTHING;  // what an exchange reads and writes is not the kernel's
        if (first.exchange) first.exchange(lanes);
        each_live_lane(first, [&](Thread& lane) { enter(lane, READY); });
    }

    void absent(unsigned lane, unsigned source) {
        const Thread& reader = *pool[warp_begin(meeting->warp) + lane];
        fail_at(reader, reader.site, "reads lane %u, which %s", source,
                reader.mask >> source & 1 ? "has exited" : "is not in the mask");
    }

    // ---- the block barrier ---------------------------------------------------------------

    bool release_barrier() {
        unsigned votes = 0;
        for (unsigned i = 0; i < num_threads; ++i) {
            if (pool[i]->state != AT_BARRIER || !pool[i]->waits_with(*pool[0])) return false;
            votes += pool[i]->predicate != 0;
        }
        for (unsigned i = 0; i < num_threads; ++i) {
            pool[i]->result = barrier_result(pool[i]->block_op, votes);
            enter(*pool[i], READY);
        }
        ++barriers_passed;
        return true;
    }

    int barrier_result(int op, unsigned votes) const {
        switch (op) {
            case SIMT_BARRIER_OR:
                return votes > 0;
            case SIMT_BARRIER_AND:
                return votes == num_threads;
            case SIMT_BARRIER_COUNT:
                return int(votes);
            default:
                return 0;
        }
    }

    // ---- mbarriers, and what comes to them -------------------------------------------------

    Mbarrier& barrier_at(void* address, SimtAccess kind, SimtSite site, const void* instruction) {
        aligned_access(uint64_t(address), sizeof(uint64_t), kind, instruction);
        const auto found = barriers.find(uint64_t(address));
        if (found != barriers.end()) return found->second;
        fail_at(*current, site, "meets no initialised barrier");
        stop();
    }

    void arrive(Mbarrier& barrier, const Thread& thread, SimtSite site) {
        if (barrier.missing == 0)
            return fail_at(thread, site, "is an arrival too many: the phase has had its %u", barrier.arrivals);
        --barrier.missing;
        turn(barrier);
    }

    // Others may overtake the thread here; or the arrival was one too many.
    void after_asynchronous() {
        if (failed) stop();
        if (launch->seed && random.next() % 4 == 0) yield();
    }

    void turn(Mbarrier& barrier) {
        if (!barrier.turn()) return;
        const bool overtakes = launch->seed && random.next() % 2;  // who waited goes before who arrived
        for (unsigned i = 0; i < num_threads; ++i) {
            if (pool[i]->state != AT_MBARRIER || pool[i]->awaited != &barrier) continue;
            enter(*pool[i], READY);
            if (overtakes) favourite = pool[i]->warp;
        }
    }

    // Nobody can run: does what comes to the barrier of the oldest transfer, or of any, until its phase is complete.
    bool finish_transfers() {
        if (transfers.empty() || !has_live_thread()) return false;
        const Mbarrier* barrier = transfers[launch->seed ? random.next() % transfers.size() : 0].barrier;
        const unsigned phase = barrier->phase;
        for (size_t i = 0; i < transfers.size() && barrier->phase == phase;)
            if (transfers[i].barrier == barrier)
                finish_transfer(i);
            else
                ++i;
        return !failed;
    }

    void finish_transfer(size_t number) {
        const Transfer transfer = transfers[number];
        transfers.erase(transfers.begin() + std::ptrdiff_t(number));
        if (transfer.copier) {
            finish_copies(*transfer.copier, [&](const AsyncCopy& copy) { return copy.number < transfer.copies; });
            return arrive(*transfer.barrier, *transfer.copier, transfer.site);
        }
        transfer.box.copy(transfer.shared, [this](uint32_t address, uint64_t) {
            block_memory.forget_write(address);
            return block_memory.at(address, 16);
        });
        transfer.barrier->bytes -= int64_t(transfer.box.bytes());
        turn(*transfer.barrier);
    }

    template <class Due>
    void finish_copies(Thread& thread, Due due) {
        thread.finish_copies(
            due, [&](const AsyncCopy& copy) { block_memory.note_write(uint64_t(copy.to), copy.bytes, thread.number); });
    }

    bool has_live_thread() const {
        for (unsigned i = 0; i < num_threads; ++i)
            if (pool[i]->state != EXITED) return true;
        return false;
    }

    void count_box(const TensorBox& box) {
        box.each_row([this](uint64_t, uint64_t, uint64_t from, uint64_t bytes) {
            if (!bytes) return;
            const int buffer = find_buffer(from, unsigned(bytes));
            if (buffer < 0) out_of_bounds(from, unsigned(bytes), SIMT_READ);
            buffers[size_t(buffer)].read_bytes += bytes;
            buffers[size_t(buffer)].read_sectors += (from + bytes - 1) / 32 - from / 32 + 1;
        });
        shared.written_bytes += box.bytes();
        shared.wavefronts += box.bytes() / TensorBox::ROW_BYTES;
    }

    uint32_t shared_address(const void* shared) {
        const uint32_t number = block_memory.number(uint64_t(shared));
        if (number != SharedMemory::NOWHERE) return number;
        fail(*current, "the address %p is not one of shared memory", shared);
        stop();
    }

    // ---- wgmma -----------------------------------------------------------------------------

    struct WgmmaWait {
        Thread* thread;
        unsigned pending;
    };

    // Does what all lanes of the warp wait for.
    void finish_products(void* const* lanes) {
        const WgmmaWait& first = *static_cast<const WgmmaWait*>(lanes[meeting->lane]);
        if (num_threads / WARP / 4 <= meeting->warp / 4)
            return fail_at(*meeting, meeting->site, "needs a whole warpgroup, four warps");
        for (unsigned lane = 0; lane < WARP; ++lane)
            if (!lanes[lane]) return fail_at(*meeting, meeting->site, "lacks lane %u", lane);
        while (!failed && !first.thread->products.empty() &&
               first.thread->products[0].group + first.pending < first.thread->product_group)
            finish_product(lanes, first.thread->products[0]);
    }

    void finish_product(void* const* lanes, const PendingWgmma product) {
        if (!Operand(product.step.a, false).readable() || !Operand(product.step.b, false).readable())
            return fail_at(*meeting, product.site, "has descriptors of another swizzle than that of 128 bytes");
        const WarpProduct result(product.step, meeting->warp % 4, [&](uint32_t address, uint64_t bytes) {
            return product_operand(product, address, bytes);
        });
        for (unsigned lane = 0; lane < WARP; ++lane) {
            auto& products = static_cast<const WgmmaWait*>(lanes[lane])->thread->products;
            const Thread& thread = *pool[warp_begin(meeting->warp) + lane];
            if (products.empty() || !products[0].same_as(product))
                return fail_at(thread, product.site, "is not the same for all lanes of the warp");
            result.store(products[0].step, lane);
            products.erase(products.begin());
        }
        count_product(product.step);
    }

    const void* product_operand(const PendingWgmma& product, uint32_t address, uint64_t bytes) {
        static constexpr char nothing[16] = {};
        const void* memory = block_memory.at(address, bytes);
        if (!memory) {
            fail_at(*meeting, product.site, "reads shared memory at address %u, where there is none", address);
            return nothing;
        }
        const int writer = block_memory.unfenced_writer(address, product.last_fence);
        if (writer != SharedMemory::NOBODY) {
            const SimtDim& index = pool[size_t(writer)]->index;
            fail_at(*meeting, product.site,
                    "reads what thread (%u, %u, %u) wrote, and no fence_async_proxy has come between", index.x, index.y,
                    index.z);
        }
        return memory;
    }

    // A warp's quarter of the operands, which the warpgroup reads once.
    void count_product(const SimtWgmma& step) {
        const uint64_t bytes = (64 + step.columns) * WarpProduct::DEPTH * sizeof(uint16_t) / 4;
        shared.read_bytes += bytes;
        shared.wavefronts += bytes / 128;
    }

    // Nobody can run: the block has ended, or some thread waits for one that will never come.
    void explain_deadlock() {
        if (const Thread* waits = most_telling()) return explain_wait(*waits);
        if (!transfers.empty()) fail_at(*pool[0], transfers[0].site, "is not done when the block ends");
    }

    // Who waits for bytes that do not come tells more than who waits for those who wait; else the first who waits.
    const Thread* most_telling() const {
        const Thread* found = nullptr;
        for (unsigned i = 0; i < num_threads; ++i) {
            const Thread* thread = pool[i].get();
            if (thread->state == AT_MBARRIER && thread->awaited->bytes) return thread;
            if (!found && thread->state != EXITED) found = thread;
        }
        return found;
    }

    void explain_wait(const Thread& waits) {
        if (waits.state == AT_MBARRIER) return explain_mbarrier(waits);
        const bool in_warp = waits.state == AT_WARP;
        const unsigned begin = in_warp ? warp_begin(waits.warp) : 0, end = in_warp ? warp_end(waits.warp) : num_threads;
        for (unsigned i = begin; i < end; ++i) {
            const Thread& absent = *pool[i];
            const bool awaited = !in_warp || (waits.mask >> absent.lane & 1 && absent.state != EXITED);
            if (!awaited || (absent.state == waits.state && absent.waits_with(waits))) continue;
            char elsewhere[256] = "has exited";
            if (absent.state != EXITED)
                snprintf(elsewhere, sizeof elsewhere, "waits at %s at %s:%d", absent.site.operation, absent.site.file,
                         absent.site.line);
            return fail(waits, "waits at %s at %s:%d for thread (%u, %u, %u), which %s", waits.site.operation,
                        waits.site.file, waits.site.line, absent.index.x, absent.index.y, absent.index.z, elsewhere);
        }
    }

    // What lacks at the barrier that a thread waits for, and who waits at another line: either may be the cause.
    void explain_mbarrier(const Thread& waits) {
        const Mbarrier* barrier = waits.awaited;
        char elsewhere[256] = "";
        for (unsigned i = 0; i < num_threads && !*elsewhere; ++i) {
            const Thread& other = *pool[i];
            if (other.state == AT_MBARRIER && !other.waits_with(waits))
                snprintf(elsewhere, sizeof elsewhere,
                         "; thread (%u, %u, %u) waits at %s:%d for phase %u of one that lacks %u of %u arrivals",
                         other.index.x, other.index.y, other.index.z, other.site.file, other.site.line,
                         other.awaited->phase, other.awaited->missing, other.awaited->arrivals);
        }
        fail_at(waits, waits.site, "waits for phase %u of a barrier that lacks %u of %u arrivals and %ld bytes%s",
                barrier->phase, barrier->missing, barrier->arrivals, long(barrier->bytes), elsewhere);
    }

    // ---- memory accesses -----------------------------------------------------------------

    void access(uint64_t address, unsigned bytes, SimtAccess kind, const void* instruction) {
        if (!unseen.holds(address)) check(address, bytes, kind, instruction);
    }

    __attribute__((noinline)) void check(uint64_t address, unsigned bytes, SimtAccess kind, const void* instruction) {
        int buffer = WarpAccess::SHARED;
        if (block_memory.holds(address, bytes)) {
            if (kind & SIMT_WRITE) block_memory.note_write(address, bytes, current->number);
        } else if ((buffer = find_buffer(address, bytes)) < 0) {
            if (image.holds(address, bytes)) return;
            if (launch->recorder) record(address, bytes, kind, instruction);
            out_of_bounds(address, bytes, kind);
        }
        if (launch->counted) count(address, bytes, kind, instruction, buffer);
        if (observed) after_access(address, bytes, kind, instruction);
    }

    __attribute__((noinline)) void count(uint64_t address, unsigned bytes, SimtAccess kind, const void* instruction,
                                         int buffer) {
        if (buffer == WarpAccess::SHARED) {
            if (kind & SIMT_READ) shared.read_bytes += bytes;
            if (kind & SIMT_WRITE) shared.written_bytes += bytes;
        } else {
            if (kind & SIMT_READ) buffers[size_t(buffer)].read_bytes += bytes;
            if (kind & SIMT_WRITE) buffers[size_t(buffer)].written_bytes += bytes;
        }
        ++current->accesses;
        current->has_written |= (kind & SIMT_WRITE) != 0;
        if (!warps[current->warp].log.add(instruction, current->lane, address, bytes, kind, buffer)) endless();
    }

    // A loop without an end would fill all memory with its accesses long before anybody loses patience.
    [[noreturn]] __attribute__((noinline)) void endless() {
        fail(*current, "makes one access more than %u times while its warp waits for it: does a loop never end?",
             WarpLog::MOST_TURNS);
        stop();
    }

    // What only some launches ask for, so that all others pay for one test.
    void after_access(uint64_t address, unsigned bytes, SimtAccess kind, const void* instruction) {
        if (launch->recorder) record(address, bytes, kind, instruction);
        if (launch->seed && random.next() % 64 == 0) yield();  // an order that only preemption gives
    }

    // A GPU faults where the address is no multiple of the access's width, a power of two.
    void aligned_access(uint64_t address, unsigned bytes, SimtAccess kind, const void* instruction) {
        if (unseen.holds(address)) return;
        if (address & (bytes - 1)) misaligned(address, bytes, kind, instruction);
        check(address, bytes, kind, instruction);
    }

    [[noreturn]] __attribute__((noinline)) void misaligned(uint64_t address, unsigned bytes, SimtAccess kind,
                                                           const void* instruction) {
        if (launch->recorder) record(address, bytes, kind, instruction);
        fail(*current, "misaligned access of %u bytes at address %p", bytes, (void*)address);
        stop();
    }

    // A struct of any size is moved in pieces that a GPU has instructions for.
    void range_access(uint64_t address, uint64_t bytes, SimtAccess kind, const void* instruction) {
        if (unseen.holds(address, bytes)) return;
        while (bytes) {
            unsigned piece = 16;
            while (address & (piece - 1) || piece > bytes) piece /= 2;
            access(address, piece, kind, instruction);
            address += piece;
            bytes -= piece;
        }
    }

    // ---- records ---------------------------------------------------------------------------

    // What the current thread is about to do; it accesses no memory if bytes is 0.
    void record(uint64_t address, unsigned bytes, unsigned access, const void* instruction) {
        SimtRecorder& to = *launch->recorder;
        if (to.block >= 0 && uint64_t(to.block) != block_number) return;
        if (to.warp >= 0 && uint64_t(to.warp) != current->warp) return;
        if (to.seen++ >= to.capacity) return;
        const auto [where, begin] = place(address, bytes);
        to.records[to.seen - 1] = {
            block_number, address - begin, uint64_t(instruction) - image.begin, current->number, bytes,
            access,       where,           warps[current->warp].log.meetings()};
    }

    void record_operation(const void* instruction) {
        if (launch->recorder) record(0, 0, 0, instruction);
    }

    struct Place {
        int where;
        uint64_t begin;
    };
    Place place(uint64_t address, unsigned bytes) {
        if (!bytes) return {SIMT_NOWHERE, 0};
        const int buffer = find_buffer(address, bytes);
        if (buffer >= 0) return {buffer, buffers[size_t(buffer)].address};
        if (block_memory.fixed.holds(address, bytes)) return {SIMT_STATIC_SHARED, block_memory.fixed.begin};
        if (block_memory.dynamic.holds(address, bytes)) return {SIMT_DYNAMIC_SHARED, block_memory.dynamic.begin};
        return {SIMT_NOWHERE, 0};
    }

    int find_buffer(uint64_t address, unsigned bytes) {
        const auto holds = [&](const SimtBuffer& buffer) {
            return Range{buffer.address, buffer.bytes}.holds(address, bytes);
        };
        if (last_buffer < buffers.size() && holds(buffers[last_buffer])) return int(last_buffer);
        const auto begins_after = [](uint64_t place, const SimtBuffer& buffer) { return place < buffer.address; };
        const auto next = std::upper_bound(buffers.begin(), buffers.end(), address, begins_after);
        if (next == buffers.begin() || !holds(next[-1])) return -1;
        return int(last_buffer = size_t(next - buffers.begin()) - 1);
    }

    [[noreturn]] void out_of_bounds(uint64_t address, unsigned bytes, SimtAccess kind) {
        const char* verb = kind == SIMT_ATOMIC ? "atomic access" : kind == SIMT_WRITE ? "write" : "read";
        const char* near = "null";
        Range closest{0, 0};
        auto consider = [&](const char* name, Range range) {
            if (range.begin && range.distance(address) < closest.distance(address)) {
                near = name;
                closest = range;
            }
        };
        for (const SimtBuffer& buffer : buffers) consider(buffer.name, {buffer.address, buffer.bytes});
        consider("static shared memory", block_memory.fixed);
        consider("dynamic shared memory", block_memory.dynamic);
        fail(*current, "out-of-bounds %s of %u bytes at byte offset %lld of %s, which has %llu bytes", verb, bytes,
             (long long)(address - closest.begin), near, (unsigned long long)closest.bytes);
        stop();
    }
};

// A fiber's life: the kernel once a block.
void thread_body() {
    for (;;) {
        worker->launch->entry(worker->launch->arguments);
        worker->enter(*worker->current, EXITED);
        worker->yield();
    }
}

// Stacks are costly to map, so workers outlive a launch.
class WorkerPool {
  public:
    std::unique_ptr<Worker> take() {
        std::lock_guard lock(mutex_);
        if (idle_.empty()) return std::make_unique<Worker>();
        auto result = std::move(idle_.back());
        idle_.pop_back();
        return result;
    }
    void give_back(std::unique_ptr<Worker> w) {
        std::lock_guard lock(mutex_);
        idle_.push_back(std::move(w));
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> idle_;
};
WorkerPool& workers() {
    static auto* pool = new WorkerPool;  // never destroyed: exit need not unmap stacks
    return *pool;
}

// What the workers of one launch share.
struct Grid {
    SimtLaunch* launch;
    uint64_t num_blocks;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    uint64_t first_fault = ~0ull;

    explicit Grid(SimtLaunch* l)
        : launch(l), num_blocks(l->blocks ? l->num_blocks : uint64_t(l->grid.x) * l->grid.y * l->grid.z) {}

    // Blocks start in order, so the fault of the lowest block is always among those reported.
    void run() {
        auto mine = workers().take();
        worker = mine.get();
        mine->prepare(launch);
        while (!failed && !mine->failed) {
            const uint64_t number = next++;
            if (number >= num_blocks) break;
            mine->run_block(launch->blocks ? launch->blocks[number] : number);
        }
        worker = nullptr;
        unseen = EVERYTHING;
        merge(*mine);
        workers().give_back(std::move(mine));
    }

    void merge(const Worker& w) {
        std::lock_guard lock(mutex);
        for (size_t i = 0; i < w.buffers.size(); ++i) {
            launch->buffers[i].read_bytes += w.buffers[i].read_bytes;
            launch->buffers[i].written_bytes += w.buffers[i].written_bytes;
            launch->buffers[i].read_sectors += w.buffers[i].read_sectors;
            launch->buffers[i].written_sectors += w.buffers[i].written_sectors;
        }
        launch->shared.read_bytes += w.shared.read_bytes;
        launch->shared.written_bytes += w.shared.written_bytes;
        launch->shared.wavefronts += w.shared.wavefronts;
        launch->shared.bank_conflicts += w.shared.bank_conflicts;
        launch->work.accesses = std::max(launch->work.accesses, w.work.accesses);
        launch->work.barriers = std::max(launch->work.barriers, w.work.barriers);
        launch->work.threads += w.work.threads;
        launch->work.exchanges = std::max(launch->work.exchanges, w.work.exchanges);
        launch->work.waits += w.work.waits;
        launch->work.copied += w.work.copied;
        launch->work.under_way += w.work.under_way;
        if (w.failed && w.block_number < first_fault) {
            first_fault = w.block_number;
            memcpy(launch->fault, w.fault, sizeof w.fault);
        }
        if (w.failed) failed = true;
    }
};

}  // namespace

// ---- what compiled kernel files call -------------------------------------------------------

extern "C" {

SimtDim simt_thread_idx() { return worker->current->index; }
SimtDim simt_block_idx() { return worker->block; }
SimtDim simt_block_dim() { return worker->launch->block; }
SimtDim simt_grid_dim() { return worker->launch->grid; }
unsigned simt_lane() { return worker->current->lane; }
void* simt_dynamic_shared() { return reinterpret_cast<void*>(worker->block_memory.dynamic.begin); }

void simt_warp(unsigned mask, SimtExchange exchange, void* mine, SimtSite site) {
    worker->record_operation(__builtin_return_address(0));
    worker->current->exchanges += exchange != nullptr;
    worker->meet(mask, exchange, mine, site);
}

void simt_absent(unsigned lane, unsigned source) { worker->absent(lane, source); }

int simt_barrier(SimtBlockOp op, int predicate, SimtSite site) {
    worker->record_operation(__builtin_return_address(0));
    Thread& self = *worker->current;
    self.site = site;
    self.block_op = op;
    self.predicate = predicate;
    worker->enter(self, AT_BARRIER);
    worker->yield();
    return self.result;
}

void simt_access(const volatile void* address, unsigned bytes, SimtAccess access) {
    worker->aligned_access(uint64_t(address), bytes, access, __builtin_return_address(0));
}

void simt_access_range(const void* address, uint64_t bytes, SimtAccess access, const void* instruction) {
    worker->range_access(uint64_t(address), bytes, access, instruction);
}

void simt_async_copy(void* shared, const void* global, unsigned bytes) {
    const char* const after = static_cast<const char*>(__builtin_return_address(0));
    // Two accesses under two names, both inside the call: lanes without a source would else write with those that read.
    if (global) worker->aligned_access(uint64_t(global), bytes, SIMT_READ, after - 1);
    worker->aligned_access(uint64_t(shared), bytes, SIMT_WRITE, after);
    worker->shared_address(shared);  // or a fault
    Thread& self = *worker->current;
    self.copies.push_back({shared, global, bytes, self.group, self.asked++});
    worker->work.copied += bytes;
}

// With an even seed every second group lands at once: a thread that still reads what a copy replaces reads what it
// brings. Other seeds land none, so that a wait that is too short shows.
void simt_async_commit() {
    Thread& self = *worker->current;
    if (worker->launch->seed && worker->launch->seed % 2 == 0 && self.group % 2)
        for (AsyncCopy& copy : self.copies) copy.land();
    ++self.group;
}

void simt_async_wait(unsigned pending_groups) {
    Thread& self = *worker->current;
    worker->finish_copies(self, [&](const AsyncCopy& copy) { return copy.group + pending_groups < self.group; });
    for (const AsyncCopy& copy : self.copies) worker->work.under_way += copy.bytes;
}

void simt_async_arrive(void* barrier, SimtSite site) {
    Thread& self = *worker->current;
    Mbarrier& found = worker->barrier_at(barrier, SIMT_ATOMIC, site, __builtin_return_address(0));
    worker->transfers.push_back({&found, site, {}, 0, &self, self.asked});
    worker->after_asynchronous();
}

unsigned simt_shared_address(const void* shared) { return worker->shared_address(shared); }

void simt_mbarrier_init(void* barrier, unsigned arrivals) {
    worker->aligned_access(uint64_t(barrier), sizeof(uint64_t), SIMT_WRITE, __builtin_return_address(0));
    worker->barriers[uint64_t(barrier)] = {arrivals, arrivals, 0, 0};
}

void simt_mbarrier_arrive(void* barrier, unsigned expected_bytes, SimtSite site) {
    Mbarrier& found = worker->barrier_at(barrier, SIMT_ATOMIC, site, __builtin_return_address(0));
    found.bytes += expected_bytes;
    worker->arrive(found, *worker->current, site);
    worker->after_asynchronous();
}

void simt_mbarrier_wait(void* barrier, unsigned parity, SimtSite site) {
    Mbarrier& found = worker->barrier_at(barrier, SIMT_READ, site, __builtin_return_address(0));
    if (parity > 1) {
        worker->fail_at(*worker->current, site, "has the parity %u, but that of a phase is 0 or 1", parity);
        worker->stop();
    }
    ++worker->work.waits;
    if ((found.phase & 1) != parity) return;  // the phase before has another parity than this one
    worker->record_operation(__builtin_return_address(0));
    Thread& self = *worker->current;
    self.site = site;
    self.awaited = &found;
    worker->enter(self, AT_MBARRIER);
    worker->yield();
}

void simt_tma_load(void* shared, const void* map, void* barrier, unsigned dimensions, const int (&begin)[3],
                   SimtSite site) {
    worker->record_operation(__builtin_return_address(0));
    const Thread& self = *worker->current;
    Mbarrier& found = worker->barrier_at(barrier, SIMT_READ, site, __builtin_return_address(0));
    Transfer transfer{&found, site, {{}, {begin[0], begin[1], begin[2]}}, worker->shared_address(shared)};
    memcpy(&transfer.box.map, map, sizeof transfer.box.map);
    if (transfer.box.map.dimensions != dimensions)
        worker->fail_at(self, site, "has %u coordinates, but its tensor has %llu", dimensions,
                        (unsigned long long)transfer.box.map.dimensions);
    else if (transfer.shared % TensorBox::ROW_BYTES)
        worker->fail_at(self, site, "writes to shared address %u, which is no multiple of 128", transfer.shared);
    else if (begin[0] * int64_t(transfer.box.map.strides[0]) % 16)  // an illegal instruction on an H100
        worker->fail_at(self, site, "begins at column %d, which is no multiple of 16 bytes", begin[0]);
    if (worker->failed) worker->stop();
    if (!worker->block_memory.at(transfer.shared, transfer.box.bytes()))
        worker->out_of_bounds(uint64_t(shared), unsigned(transfer.box.bytes()), SIMT_WRITE);
    if (worker->launch->checked) worker->count_box(transfer.box);
    worker->transfers.push_back(transfer);
    worker->after_asynchronous();
}

void simt_fence_async_proxy() { worker->block_memory.fence(worker->current->number); }

void simt_wgmma(const SimtWgmma* step, SimtSite site) {
    worker->record_operation(__builtin_return_address(0));
    Thread& self = *worker->current;
    self.products.push_back({*step, site, self.product_group, worker->block_memory.last_fence(self.number)});
}

void simt_wgmma_commit() { ++worker->current->product_group; }

void simt_wgmma_wait(unsigned pending_groups, SimtSite site) {
    Worker::WgmmaWait mine{worker->current, pending_groups};
    worker->record_operation(__builtin_return_address(0));
    worker->meet(0xffffffffu, [](void* const* lanes) { worker->finish_products(lanes); }, &mine, site);
}

void simt_trap(SimtSite site) {
    worker->record_operation(__builtin_return_address(0));
    worker->fail(*worker->current, "%s at %s:%d", site.operation, site.file, site.line);
    worker->stop();
}

uint64_t simt_static_shared_bytes(SimtEntry entry) { return file_of(entry).shared_bytes; }

int simt_launch(SimtLaunch* launch) {
    Grid grid(launch);
    const uint64_t helpers = std::min(launch->workers, grid.num_blocks);
    std::vector<std::thread> threads;
    for (uint64_t i = 1; i < helpers; ++i) threads.emplace_back([&] { grid.run(); });
    grid.run();
    for (auto& thread : threads) thread.join();
    return grid.failed;
}

// ---- the thread sanitizer's callbacks ------------------------------------------------------

// Each callback's return address names the instruction that accesses memory.
#define REPORT(bytes, kind) worker->access(uint64_t(p), unsigned(bytes), kind, __builtin_return_address(0))
#define REPORT_ALIGNED(bytes, kind) worker->aligned_access(uint64_t(p), bytes, kind, __builtin_return_address(0))
#define REPORT_RANGE(kind) worker->range_access(uint64_t(p), bytes, kind, __builtin_return_address(0))
#define TSAN_CALLBACKS(bytes)                                                \
    void __tsan_read##bytes(void* p) { REPORT_ALIGNED(bytes, SIMT_READ); }   \
    void __tsan_write##bytes(void* p) { REPORT_ALIGNED(bytes, SIMT_WRITE); } \
    void __tsan_unaligned_read##bytes(void* p) { REPORT(bytes, SIMT_READ); } \
    void __tsan_unaligned_write##bytes(void* p) { REPORT(bytes, SIMT_WRITE); }
TSAN_CALLBACKS(1)
TSAN_CALLBACKS(2)
TSAN_CALLBACKS(4)
TSAN_CALLBACKS(8)
TSAN_CALLBACKS(16)
void __tsan_read_range(void* p, unsigned long bytes) { REPORT_RANGE(SIMT_READ); }
void __tsan_write_range(void* p, unsigned long bytes) { REPORT_RANGE(SIMT_WRITE); }
// What newer versions of Clang call in place of memset, memcpy and memmove. A copy reads, then writes, inside the call.
#define TSAN_COPY(name)                                                                  \
    void* __tsan_##name(void* to, const void* from, unsigned long bytes) {               \
        const char* const after = static_cast<const char*>(__builtin_return_address(0)); \
        worker->range_access(uint64_t(from), bytes, SIMT_READ, after - 1);               \
        worker->range_access(uint64_t(to), bytes, SIMT_WRITE, after);                    \
        return name(to, from, bytes);                                                    \
    }
TSAN_COPY(memcpy)
TSAN_COPY(memmove)
void* __tsan_memset(void* p, int value, unsigned long bytes) {
    REPORT_RANGE(SIMT_WRITE);
    return memset(p, value, bytes);
}
#undef TSAN_COPY
#undef TSAN_CALLBACKS
#undef REPORT
#undef REPORT_ALIGNED
#undef REPORT_RANGE
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
