// Defines flags between GPUs, and the one way to wait for one.
#pragma once

#include "cuda/tuning.h"
#include "cuda/waits.h"
#include "cuda/device/ptx.cuh"

namespace deepep_moe {

constexpr unsigned kFullWarp = 0xffffffffu;
using tuning::kNsBetweenHostLooks, tuning::kPauseNs;
constexpr unsigned long long kNsToReport = 100'000'000;  // far above the microseconds that a failure takes to host memory

__device__ __forceinline__ bool gave_up(const GpuWaits& w) { return *static_cast<volatile int*>(w.gave_up) != 0; }

// Report a failure to the host. It ends this rank's part in the call; only the first failure is kept.
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

// Return the failure of a rank that gave up. The reporting thread writes it over PCIe, its kind last, so wait for the kind.
__device__ __noinline__ inline GpuFailure own_failure(const GpuWaits& w) {
    const volatile GpuFailure* failure = w.failure;
    const unsigned long long deadline = now_ns() + kNsToReport;
    while (failure->kind == kNoFailure && now_ns() < deadline) pause_ns(kPauseNs);
    __threadfence_system();
    return {failure->kind, failure->peer, failure->phase, failure->expected, failure->seen};
}

// Returns whether `peer` is here. Now and then the first waiting thread reads the host's mask for all. A rank that is not here writes
// nothing more, and when this function says so, all of its writes are visible.
__device__ __forceinline__ GpuPresence presence_of(const GpuWaits& w, int peer, unsigned long long now) {
    if (is_rail_peer(peer)) return GpuPresence::kHere;  // unknown for ranks of other nodes
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

// Wait until *word reaches `expected`, checking clock and peer every kLooks polls. Return a smaller value, the last one seen, past the
// deadline, if the peer is no longer here, or once another wait of this rank has failed.
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
        if (presence_of(w, peer, now) != GpuPresence::kHere) return load(word);  // the peer may have written since the last poll
    }
    return seen;
}

// Report that `peer` has not delivered what was waited for.
__device__ __noinline__ inline void report_lack(const GpuWaits& w, int peer, GpuPhase phase, unsigned long long expected,
                                                unsigned long long seen) {
    const auto kind = static_cast<GpuFailureKind>(kTimeout + static_cast<int>(presence_of(w, peer, now_ns())));
    report(w, kind, peer, phase, static_cast<long long>(expected), static_cast<long long>(seen));
}

// Wait until *word reaches `expected`, which is not 0, and return it. Return 0 with the failure reported if it does not. Waits for this
// rank's own blocks last twice as long, so that the block that waits for a peer can name that peer first.
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
