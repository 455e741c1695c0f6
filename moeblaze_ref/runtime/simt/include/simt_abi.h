// The seam between a compiled kernel file and the SIMT runtime: plain C, nothing of CUDA.
#pragma once
#include <cstdint>

extern "C" {

struct SimtDim {
    unsigned x, y, z;
};

// Where in the source a thread waits, for messages.
struct SimtSite {
    const char* operation;
    const char* file;
    int line;
};

enum SimtBlockOp { SIMT_BARRIER, SIMT_BARRIER_OR, SIMT_BARRIER_AND, SIMT_BARRIER_COUNT };
enum SimtAccess { SIMT_READ = 1, SIMT_WRITE = 2, SIMT_ATOMIC = 3 };

// The running thread's coordinates never change while it runs, so the calls may be merged.
SimtDim simt_thread_idx() __attribute__((const));
SimtDim simt_block_idx() __attribute__((const));
SimtDim simt_block_dim() __attribute__((const));
SimtDim simt_grid_dim() __attribute__((const));
unsigned simt_lane() __attribute__((const));
void* simt_dynamic_shared() __attribute__((const));

// Waits until every live lane of mask has arrived; then exchange runs once on what the lanes
// brought: lanes[i] is lane i's mine, or null if it has exited or is not in the mask.
typedef void (*SimtExchange)(void* const* lanes);
void simt_warp(unsigned mask, SimtExchange exchange, void* mine, SimtSite site);

// For an exchange to call: lane reads source, which is not there.
void simt_absent(unsigned lane, unsigned source);

// Waits until every thread of the block has arrived.
int simt_barrier(SimtBlockOp op, int predicate, SimtSite site);

// Reports an access before it happens (what compiled code does through __tsan_*); a range, by which instruction.
void simt_access(const volatile void* address, unsigned bytes, SimtAccess access);
void simt_access_range(const void* address, uint64_t bytes, SimtAccess access, const void* instruction);

// cp.async: a copy is checked and counted when it is asked for, and done when it is waited for; with an even seed, in
// every second group, when the group is committed. From null: zeros.
void simt_async_copy(void* shared, const void* global, unsigned bytes);
void simt_async_commit();
void simt_async_wait(unsigned pending_groups);
// Does all that the thread has asked for so far and then arrives at an mbarrier: as late as a wait allows, or with a
// seed at any time before.
void simt_async_arrive(void* barrier, SimtSite site);

// Where shared memory lies for the instructions that take its address as a number.
unsigned simt_shared_address(const void* shared);

// mbarrier: a phase is complete when all have arrived and all bytes that they expect are here.
void simt_mbarrier_init(void* barrier, unsigned arrivals);
void simt_mbarrier_arrive(void* barrier, unsigned expected_bytes, SimtSite site);
void simt_mbarrier_wait(void* barrier, unsigned parity, SimtSite site);

// What a kernel's TensorMap holds here; innermost axis first, strides in bytes.
struct SimtTensorMap {
    uint64_t address, dimensions;
    uint64_t extents[3], strides[3], box[3];
};
// Checked and counted when it is asked for, done as late as a wait allows; with a seed, at any time before.
void simt_tma_load(void* shared, const void* map, void* barrier, unsigned dimensions, const int (&begin)[3],
                   SimtSite site);

// Orders what threads have written to shared memory before what a wgmma reads there: by the writer, or by the reader.
void simt_fence_async_proxy();

// One wgmma, 64 rows and 16 of the depth: done when the warp waits for it.
struct SimtWgmma {
    uint64_t a, b;  // descriptors
    float* d;       // the lane's sums: columns / 2
    unsigned columns;
    bool bfloat16, a_along_rows, b_along_rows, accumulate;
};
void simt_wgmma(const SimtWgmma* step, SimtSite site);
void simt_wgmma_commit();
void simt_wgmma_wait(unsigned pending_groups, SimtSite site);

[[noreturn]] void simt_trap(SimtSite site);

// One registered global buffer: where it lies, and what the launch asked of it.
struct SimtBuffer {
    const char* name;
    uint64_t address;
    uint64_t bytes;
    uint64_t read_bytes, written_bytes;      // bytes that threads asked for
    uint64_t read_sectors, written_sectors;  // distinct 32-byte sectors of each warp access
};

struct SimtShared {
    uint64_t read_bytes, written_bytes;
    uint64_t wavefronts;      // passes over the 32 banks
    uint64_t bank_conflicts;  // wavefronts beyond the fewest that the access width allows
};

// How the threads divide a launch's work.
struct SimtWork {
    uint64_t accesses;  // to global and shared memory, by the thread that makes the most
    uint64_t barriers;  // that the threads of a block pass, of the block that has the most
    uint64_t threads;   // of the grid, that write to memory
    // By which means: exchanges between a warp's lanes, by the thread that takes part in the most of a block; waits at
    // mbarriers, by all threads; bytes of cp.async, by all threads, and those that had not arrived after a wait.
    uint64_t exchanges, waits, copied, under_way;
};

// One access of one thread, or an operation: a wait, an exchange, a copy by the engine, a trap.
struct SimtRecord {
    uint64_t block;        // number in the grid
    uint64_t offset;       // bytes from where what is accessed begins
    uint64_t instruction;  // bytes from where the kernel file begins to what follows the access
    uint32_t thread;       // number in the block
    uint32_t bytes;        // of the access; 0: an operation
    uint32_t access;       // SimtAccess; 0: an operation
    int32_t where;         // index of a global buffer, or a SimtSpace
    uint64_t meeting;      // how often the lanes of the warp had met before
};
enum SimtSpace { SIMT_STATIC_SHARED = -1, SIMT_DYNAMIC_SHARED = -2, SIMT_NOWHERE = -3 };

// What the threads of a launch do, in the order in which they run, as far as there is room.
struct SimtRecorder {
    int64_t block, warp;      // whose; -1: of all
    uint64_t capacity, seen;  // records that fit, and those that came
    SimtRecord* records;
};

typedef void (*SimtEntry)(void** arguments);

struct SimtLaunch {
    const char* kernel;
    SimtEntry entry;  // calls the kernel with its unpacked arguments
    void** arguments;
    SimtDim grid, block;
    uint64_t dynamic_shared_bytes;
    uint64_t workers;  // operating-system threads
    uint64_t poison;   // 16 bits, repeated: what shared memory holds when a block begins
    uint64_t seed;     // 0: threads run in order; otherwise a random order
    uint64_t checked;  // 0: the buffers are not registered, and no access is looked at
    uint64_t counted;  // 0: the launch makes no counts
    uint64_t num_buffers;
    SimtBuffer* buffers;  // sorted by address
    uint64_t num_blocks;
    const uint64_t* blocks;  // numbers of those that run, ascending; null: all of the grid
    SimtShared shared;
    SimtWork work;
    SimtRecorder* recorder;  // null: nothing is recorded; with one, workers is 1
    char fault[1024];        // empty unless the launch failed
};

// Bytes of static shared memory in the file of a kernel: that of all its kernels.
uint64_t simt_static_shared_bytes(SimtEntry entry);

// Runs the grid, or the chosen blocks of it; returns 0, or 1 with the first fault's message in launch->fault.
int simt_launch(SimtLaunch* launch);
}
