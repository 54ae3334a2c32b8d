// Flags between GPUs, and the one way to wait for one.
#pragma once

#include "cuda/tuning.h"
#include "cuda/waits.h"
#include "cuda/device/ptx.cuh"

namespace deepep_moe {

constexpr unsigned kFullWarp = 0xffffffffu;
using tuning::kNsBetweenHostLooks, tuning::kPauseNs;
constexpr unsigned long long kNsToReport = 100'000'000;  // a failure, to host memory; it takes microseconds

__device__ __forceinline__ bool gave_up(const GpuWaits& w) { return *static_cast<volatile int*>(w.gave_up) != 0; }

// Tells the host. A failure ends the rank's part in the call; the first one is kept.
__device__ __noinline__ inline void report(const GpuWaits& w, GpuFailureKind kind, int peer, GpuPhase phase, long long expected,
                                           long long seen) {
    if (atomicCAS(w.gave_up, 0, 1) != 0) return;
    volatile GpuFailure* failure = w.failure;
    failure->peer = peer;
    failure->phase = static_cast<int>(phase);
    failure->expected = expected;
    failure->seen = seen;
    __threadfence_system();
    failure->kind = kind;
}

// That failure, of a rank that gave up: whoever reports it writes it over PCIe, and its kind last.
__device__ __noinline__ inline GpuFailure own_failure(const GpuWaits& w) {
    const volatile GpuFailure* failure = w.failure;
    const unsigned long long deadline = now_ns() + kNsToReport;
    while (failure->kind == kNoFailure && now_ns() < deadline) pause_ns(kPauseNs);
    __threadfence_system();
    return {failure->kind, failure->peer, failure->phase, failure->expected, failure->seen};
}

// What became of `peer`. Threads that wait look at what the host knows now and then, the first one for all. A rank that is not here will
// write nothing more, and all that it has written can be seen by the time this says so.
__device__ __forceinline__ GpuPresence presence_of(const GpuWaits& w, int peer, unsigned long long now) {
    if (is_rail_peer(peer)) return GpuPresence::kHere;  // nobody knows
    volatile GpuEnded* ended = w.ended;
    if (now >= ended->next_look) {
        ended->next_look = now + kNsBetweenHostLooks;
        const unsigned ranks = *static_cast<const volatile unsigned*>(w.ended_ranks);
        if (ranks != 0) atomicOr(&w.ended->ranks, ranks);
    }
    const bool has_left = *static_cast<const volatile unsigned long long*>(w.left + peer) != 0, has_ended = (ended->ranks >> peer & 1) != 0;
    if (has_left || has_ended) __threadfence_system();
    return has_left ? GpuPresence::kLeft : has_ended ? GpuPresence::kEnded : GpuPresence::kHere;
}

// *word, which `load` loads, once it has reached `expected`, with a look at the clock and at the peer every kLooks. Less, as it was last
// seen, past the deadline, where the peer is not here any more, or once another wait of this rank has failed.
template <unsigned kPause, int kLooks = 256, class Load>
__device__ __forceinline__ unsigned long long watch_word(const GpuWaits& w, const unsigned long long* word, const Load& load,
                                                         unsigned long long expected, int peer, unsigned long long timeout_ns) {
    unsigned long long seen = load(word);
    if (seen >= expected) return seen;
    const unsigned long long deadline = now_ns() + timeout_ns;
    for (unsigned round = 0; (seen = load(word)) < expected; ++round) {
        pause_ns(kPause);
        if (round % kLooks != kLooks - 1) continue;
        const unsigned long long now = now_ns();
        if (gave_up(w) || now >= deadline) break;
        if (presence_of(w, peer, now) != GpuPresence::kHere) return load(word);  // it may have written since
    }
    return seen;
}

// Of `peer`, which has not delivered what was waited for.
__device__ __noinline__ inline void report_lack(const GpuWaits& w, int peer, GpuPhase phase, unsigned long long expected,
                                                unsigned long long seen) {
    const auto kind = static_cast<GpuFailureKind>(kTimeout + static_cast<int>(presence_of(w, peer, now_ns())));
    report(w, kind, peer, phase, static_cast<long long>(expected), static_cast<long long>(seen));
}

// *word once it has reached `expected`, which is not 0. 0, with the failure reported, where it will not. Waits for this rank's own blocks
// have twice the time: they end when the block that waits for a peer has named it.
__device__ __noinline__ inline unsigned long long wait_word(const GpuWaits& w, const unsigned long long* word, unsigned long long expected,
                                                            int peer, GpuPhase phase) {
    const auto load = [](const unsigned long long* from) { return load_acquire(from); };
    const unsigned long long seen = watch_word<kPauseNs>(w, word, load, expected, peer, w.timeout_ns * (peer == w.rank ? 2 : 1));
    if (seen >= expected) return seen;
    report_lack(w, peer, phase, expected, seen);
    return 0;
}

__device__ __forceinline__ bool wait_flag(const GpuWaits& w, const unsigned long long* flag, unsigned long long expected, int peer,
                                          GpuPhase phase) {
    return wait_word(w, flag, expected, peer, phase) != 0;
}

}  // namespace deepep_moe
