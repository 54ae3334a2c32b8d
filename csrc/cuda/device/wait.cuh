// Flags between GPUs, and the one way to wait for one.
#pragma once

#include "common/gpu_wait.h"
#include "cuda/device/ptx.cuh"

namespace deepep_moe {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr unsigned kPauseNs = 100;  // between two looks at a flag: what is on its way needs the memory too

__device__ __forceinline__ bool gave_up(const GpuWaits& w) { return *static_cast<volatile int*>(w.gave_up) != 0; }

// Tells the host. Every failure but an exceeded bound ends the rank's part in the call; the first one is kept.
__device__ __noinline__ inline void report(const GpuWaits& w, GpuFailureKind kind, int peer, GpuPhase phase, long long expected,
                                           long long seen) {
    if (kind != kBoundExceeded && atomicCAS(w.gave_up, 0, 1) != 0) return;
    volatile GpuFailure* failure = w.failure;
    failure->peer = peer;
    failure->phase = static_cast<int>(phase);
    failure->expected = expected;
    failure->seen = seen;
    __threadfence_system();
    failure->kind = kind;
}

// *word, which `load` loads, once it has reached `expected`, with a look at the clock every kLooks. Less, as it was last seen, past the
// deadline or once another wait of this rank has failed.
template <unsigned kPause, int kLooks = 256, class Load>
__device__ __forceinline__ unsigned long long watch_word(const GpuWaits& w, const unsigned long long* word, const Load& load,
                                                         unsigned long long expected, unsigned long long timeout_ns) {
    unsigned long long seen = load(word);
    if (seen >= expected) return seen;
    const unsigned long long deadline = now_ns() + timeout_ns;
    for (unsigned round = 0; (seen = load(word)) < expected; ++round) {
        pause_ns(kPause);
        if (round % kLooks == kLooks - 1 && (gave_up(w) || now_ns() >= deadline)) break;
    }
    return seen;
}

// *word once it has reached `expected`, which is not 0. 0, with the failure reported, past the deadline or once another wait of this
// rank has failed. Waits for this rank's own blocks have twice the time: they end when the block that waits for a peer has named it.
__device__ __noinline__ inline unsigned long long wait_word(const GpuWaits& w, const unsigned long long* word, unsigned long long expected,
                                                            int peer, GpuPhase phase) {
    const auto load = [](const unsigned long long* from) { return load_acquire(from); };
    const unsigned long long seen = watch_word<kPauseNs>(w, word, load, expected, w.timeout_ns * (peer == w.rank ? 2 : 1));
    if (seen >= expected) return seen;
    report(w, kTimeout, peer, phase, static_cast<long long>(expected), static_cast<long long>(seen));
    return 0;
}

__device__ __forceinline__ bool wait_flag(const GpuWaits& w, const unsigned long long* flag, unsigned long long expected, int peer,
                                          GpuPhase phase) {
    return wait_word(w, flag, expected, peer, phase) != 0;
}

}  // namespace deepep_moe
