// What a .cu file sees when g++ compiles it: CUDA's keywords and built-ins on top of simt_abi.h.
//
// A CUDA thread is a fiber, a block runs on one operating-system thread, and static shared
// memory is that thread's thread_local storage. Warps have 32 lanes.
#pragma once
#include <bit>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "simt_abi.h"
#include "simt_math.h"
#include "vector_types.h"

#define MOEBLAZE_SIMT 1

#define __global__ __attribute__((noinline, used))
#define __device__
#define __host__
#define __shared__ static thread_local __attribute__((used))  // even if never written: poison must show
#define __constant__ static const
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

// Functions of the executor itself: their memory accesses are not the kernel's.
#define SIMT_UNSEEN __attribute__((no_sanitize("thread")))
#define SIMT_PLAIN __attribute__((noinline)) SIMT_UNSEEN
#define SIMT_EXPORT extern "C" __attribute__((visibility("default"))) SIMT_PLAIN

// Last parameters of a built-in, and what it passes on: where in the source it was called.
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_AT(name) (SimtSite{name, file, line})

#define threadIdx (simt_thread_idx())
#define blockIdx (simt_block_idx())
#define blockDim (simt_block_dim())
#define gridDim (simt_grid_dim())
constexpr int warpSize = 32;

// Dynamic shared memory: `extern __shared__` has no meaning for g++, so kernels write this macro.
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(simt_dynamic_shared())

// memcpy and memset of a size known at run time become calls, which the sanitizer leaves out. They access as who called
// them; reading and writing are two accesses, both inside the call.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define SIMT_LIBRARY extern "C" __attribute__((optimize("no-tree-loop-distribute-patterns"))) SIMT_PLAIN
SIMT_LIBRARY void* memcpy(void* to, const void* from, size_t bytes) noexcept {
    const char* const after = static_cast<const char*>(__builtin_return_address(0));
    simt_access_range(from, bytes, SIMT_READ, after - 1);
    simt_access_range(to, bytes, SIMT_WRITE, after);
    for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
    return to;
}
SIMT_LIBRARY void* memset(void* to, int value, size_t bytes) noexcept {
    simt_access_range(to, bytes, SIMT_WRITE, __builtin_return_address(0));
    for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = char(value);
    return to;
}
#endif

// ---- synchronisation ---------------------------------------------------------------------

inline void __syncthreads(SIMT_HERE) { simt_barrier(SIMT_BARRIER, 0, SIMT_AT("__syncthreads")); }
inline int __syncthreads_or(int predicate, SIMT_HERE) {
    return simt_barrier(SIMT_BARRIER_OR, predicate, SIMT_AT("__syncthreads_or"));
}
inline int __syncthreads_and(int predicate, SIMT_HERE) {
    return simt_barrier(SIMT_BARRIER_AND, predicate, SIMT_AT("__syncthreads_and"));
}
inline int __syncthreads_count(int predicate, SIMT_HERE) {
    return simt_barrier(SIMT_BARRIER_COUNT, predicate, SIMT_AT("__syncthreads_count"));
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_HERE) {
    simt_warp(mask, nullptr, nullptr, SIMT_AT("__syncwarp"));
}
inline void __threadfence() {
    __asm__ __volatile__("" ::: "memory");
    __sync_synchronize();
}
inline void __threadfence_block() { __asm__ __volatile__("" ::: "memory"); }

// ---- warp exchanges ----------------------------------------------------------------------
// What a lane brings and takes away is a struct on its own stack; the exchange sees all 32.

template <class Lane, class Visit>
SIMT_PLAIN void simt_each_lane(void* const* lanes, Visit visit) {
    for (unsigned i = 0; i < 32; ++i)
        if (lanes[i]) visit(i, *static_cast<Lane*>(lanes[i]));
}

template <class T>
struct SimtShuffle {
    T value;
    unsigned source;
    T result;

    static void exchange(void* const* lanes) {
        simt_each_lane<SimtShuffle>(lanes, [lanes](unsigned i, SimtShuffle& mine) {
            if (lanes[mine.source])
                mine.result = static_cast<SimtShuffle*>(lanes[mine.source])->value;
            else
                simt_absent(i, mine.source);
        });
    }
};
template <class T>
inline T simt_shuffle(unsigned mask, T value, unsigned source, SimtSite site) {
    SimtShuffle<T> mine{value, source, value};
    simt_warp(mask, SimtShuffle<T>::exchange, &mine, site);
    return mine.result;
}

// Lanes shuffle inside segments of `width`; a source outside the segment means the lane itself.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_HERE) {
    const unsigned segment = simt_lane() & ~(width - 1);
    return simt_shuffle(mask, value, segment + (source & (width - 1)), SIMT_AT("__shfl_sync"));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
    const unsigned lane = simt_lane(), place = lane & (width - 1);
    return simt_shuffle(mask, value, place < delta ? lane : lane - delta, SIMT_AT("__shfl_up_sync"));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
    const unsigned lane = simt_lane(), place = lane & (width - 1);
    const unsigned source = place + delta >= unsigned(width) ? lane : lane + delta;
    return simt_shuffle(mask, value, source, SIMT_AT("__shfl_down_sync"));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SIMT_HERE) {
    const unsigned lane = simt_lane(), target = lane ^ lane_mask;
    const unsigned source = (target & ~(width - 1)) > (lane & ~(width - 1)) ? lane : target;
    return simt_shuffle(mask, value, source, SIMT_AT("__shfl_xor_sync"));
}

struct SimtVote {
    bool predicate;
    unsigned ballot;

    static void exchange(void* const* lanes) {
        unsigned ballot = 0;
        simt_each_lane<SimtVote>(lanes, [&](unsigned i, SimtVote& mine) { ballot |= unsigned(mine.predicate) << i; });
        simt_each_lane<SimtVote>(lanes, [&](unsigned, SimtVote& mine) { mine.ballot = ballot; });
    }
};
inline unsigned simt_vote(unsigned mask, bool predicate, SimtSite site) {
    SimtVote mine{predicate, 0};
    simt_warp(mask, SimtVote::exchange, &mine, site);
    return mine.ballot;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_HERE) {
    return simt_vote(mask, predicate, SIMT_AT("__ballot_sync"));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_HERE) {
    return simt_vote(mask, predicate, SIMT_AT("__any_sync")) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_HERE) {
    return simt_vote(mask, !predicate, SIMT_AT("__all_sync")) == 0;
}

template <class T>
struct SimtMatch {
    T value;
    unsigned equal;

    static void exchange(void* const* lanes) {
        simt_each_lane<SimtMatch>(lanes, [lanes](unsigned, SimtMatch& mine) {
            simt_each_lane<SimtMatch>(lanes, [&mine](unsigned i, SimtMatch& other) {
                mine.equal |= unsigned(memcmp(&other.value, &mine.value, sizeof(T)) == 0) << i;  // -0 is not 0
            });
        });
    }
};
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, SIMT_HERE) {
    SimtMatch<T> mine{value, 0};
    simt_warp(mask, SimtMatch<T>::exchange, &mine, SIMT_AT("__match_any_sync"));
    return mine.equal;
}

template <class T>
struct SimtReduction {
    T value;
    T (*combine)(T, T);

    static void exchange(void* const* lanes) {
        T total{};
        bool empty = true;
        simt_each_lane<SimtReduction>(lanes, [&](unsigned, SimtReduction& mine) {
            total = empty ? mine.value : mine.combine(total, mine.value);
            empty = false;
        });
        simt_each_lane<SimtReduction>(lanes, [total](unsigned, SimtReduction& mine) { mine.value = total; });
    }
};
#define SIMT_REDUCTION(name, type, expression)                                              \
    inline type name(unsigned mask, type value, SIMT_HERE) {                                \
        SimtReduction<type> mine{value, [](type a, type b) -> type { return expression; }}; \
        simt_warp(mask, SimtReduction<type>::exchange, &mine, SIMT_AT(#name));              \
        return mine.value;                                                                  \
    }
SIMT_REDUCTION(__reduce_max_sync, int, a < b ? b : a)
SIMT_REDUCTION(__reduce_max_sync, unsigned, a < b ? b : a)
SIMT_REDUCTION(__reduce_min_sync, int, b < a ? b : a)
SIMT_REDUCTION(__reduce_min_sync, unsigned, b < a ? b : a)
#undef SIMT_REDUCTION

inline size_t __cvta_generic_to_shared(const void* shared) { return simt_shared_address(shared); }

// ---- integer and math built-ins ----------------------------------------------------------

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(unsigned(bits)) : 32; }
template <class T>
inline T __ldg(const T* address) {
    return *address;
}

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
constexpr const T& max(const T& a, const T& b) {
    return a < b ? b : a;
}
template <class T>
constexpr const T& min(const T& a, const T& b) {
    return b < a ? b : a;
}

// ---- atomics -----------------------------------------------------------------------------

template <class T, class Update>
SIMT_PLAIN T simt_update(T* address, Update update) {
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do {
        after = update(before);
    } while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return before;
}

// One atomic update, reported once however often the exchange is retried; inside its caller, whose line it then is.
template <class T, class Update>
__forceinline__ T simt_atomic(T* address, Update update) {
    simt_access(address, sizeof(T), SIMT_ATOMIC);
    return simt_update(address, update);
}
#define SIMT_ATOMIC_OP(name, expression)                                           \
    template <class T>                                                             \
    __forceinline__ T name(T* address, std::type_identity_t<T> operand) {          \
        return simt_atomic(address, [operand](T old) -> T { return expression; }); \
    }
SIMT_ATOMIC_OP(atomicAdd, old + operand)
SIMT_ATOMIC_OP(atomicSub, old - operand)
SIMT_ATOMIC_OP(atomicMax, old < operand ? operand : old)
SIMT_ATOMIC_OP(atomicMin, operand < old ? operand : old)
SIMT_ATOMIC_OP(atomicAnd, (old & operand))
SIMT_ATOMIC_OP(atomicOr, old | operand)
SIMT_ATOMIC_OP(atomicXor, old ^ operand)
SIMT_ATOMIC_OP(atomicExch, ((void)old, operand))
#undef SIMT_ATOMIC_OP
template <class T>
__forceinline__ T atomicCAS(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
    return simt_atomic(address, [=](T old) -> T { return old == compare ? value : old; });
}

// ---- faults ------------------------------------------------------------------------------

inline void __trap(SIMT_HERE) { simt_trap(SIMT_AT("__trap")); }
#undef assert
#define assert(condition) ((condition) ? void(0) : __trap())

// ---- how the runtime enters a kernel -------------------------------------------------------

template <class... Parameters, size_t... I>
SIMT_PLAIN void simt_call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}
template <class... Parameters>
SIMT_PLAIN void simt_enter(void (*kernel)(Parameters...), void** arguments) {
    simt_call(kernel, arguments, std::index_sequence_for<Parameters...>{});
}
#define SIMT_KERNEL(name) \
    SIMT_EXPORT void simt_entry_##name(void** arguments) { simt_enter(&name, arguments); }
