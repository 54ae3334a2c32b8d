// Stands for csrc/cuda/device/ptx.cuh. Bulk copies happen as late as they may: loads when their barrier is waited for, stores when they
// must have been read or written. So what forgets to wait sees that nothing has happened yet.
#pragma once

#include <chrono>

#include "cuda_runtime_api.h"

#define DEEPEP_MOE_BULK_COPIES 1

#pragma GCC visibility push(default)
namespace emulation {

void barrier_init(uint64_t* barrier);
void barrier_expect(uint64_t* barrier, uint32_t bytes);
void barrier_wait(uint64_t* barrier, uint32_t parity);
void bulk_load(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier);
void bulk_store(void* to, const void* from_shared, uint32_t bytes);
void bulk_commit();
void bulk_wait(int pending, bool written);
void copy_late(void* to_shared, const void* from);
void end_late_copies();

}  // namespace emulation
#pragma GCC visibility pop

namespace deepep_moe {

inline unsigned long long load_acquire(const unsigned long long* flag) {
    emulation::yield();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline unsigned long long load_relaxed(const unsigned long long* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void store_release(unsigned long long* flag, unsigned long long value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline void store_release_local(unsigned long long* flag, unsigned long long value) { store_release(flag, value); }
inline void add_release_local(unsigned long long* counter, unsigned long long value) {
    __atomic_fetch_add(counter, value, __ATOMIC_RELEASE);
}
inline unsigned long long exchange_acquire_block(unsigned long long* word, unsigned long long value) {
    emulation::yield();
    return __atomic_exchange_n(word, value, __ATOMIC_ACQUIRE);
}
inline bool replace_release_block(unsigned long long* word, unsigned long long expected, unsigned long long value) {
    emulation::yield();
    return __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}
inline void store_relaxed(unsigned long long* flag, unsigned long long value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }
// The last lane of eight, which has the flag in the second half of its part, is the last to store, that half last, and the first to load,
// that half first.
inline void store_part(uint4* to, const uint4& value, bool uses) {
    const bool is_last = threadIdx.x % 8 == 7;
    if (uses && !is_last) *to = value;
    __syncwarp();
    if (!uses || !is_last) return;
    auto* const halves = reinterpret_cast<unsigned long long*>(to);
    __atomic_store_n(halves, static_cast<unsigned long long>(value.y) << 32 | value.x, __ATOMIC_RELAXED);
    __atomic_store_n(halves + 1, static_cast<unsigned long long>(value.w) << 32 | value.z, __ATOMIC_RELEASE);
}
inline uint4 load_part(const uint4* from, bool uses) {
    const bool is_last = threadIdx.x % 8 == 7;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (uses && is_last) {
        const auto* const halves = reinterpret_cast<const unsigned long long*>(from);
        const unsigned long long flag = __atomic_load_n(halves + 1, __ATOMIC_ACQUIRE), rest = __atomic_load_n(halves, __ATOMIC_RELAXED);
        value = make_uint4(static_cast<unsigned>(rest), static_cast<unsigned>(rest >> 32), static_cast<unsigned>(flag),
                           static_cast<unsigned>(flag >> 32));
    }
    emulation::yield();
    __syncwarp();
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (uses && !is_last) value = *from;
    return value;
}
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned long long now_ns() {
    return static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

inline void pause_ns(unsigned) { emulation::pause(); }
inline void let_next_kernel_start() {}
inline void wait_for_kernel_before() {}

inline float max_or_nan(float a, float b) { return a != a || b != b ? a + b : a > b ? a : b; }
inline double approximate_reciprocal(double x) { return __longlong_as_double(__double_as_longlong(1.0 / x) & ~0xffffffffll); }

using emulation::barrier_expect;
using emulation::barrier_init;
using emulation::barrier_wait;
using emulation::bulk_commit;
using emulation::bulk_load;
using emulation::bulk_store;
inline void copy_async(void* to_shared, const void* from) { emulation::copy_late(to_shared, from); }
inline void wait_copies() { emulation::end_late_copies(); }
inline void barrier_publish() {}
template <int kPending>
void bulk_wait_read() {
    emulation::bulk_wait(kPending, false);
}
template <int kPending>
void bulk_wait_written() {
    emulation::bulk_wait(kPending, true);
}
inline void fence_bulk_copies() {}
inline void fence_bulk_copies_shared() {}

template <class T>
T* shared_memory() {
    size_t bytes = 0;
    return static_cast<T*>(emulation::shared_memory(bytes));
}

}  // namespace deepep_moe
