// Every wait for a peer goes through this.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/errors.h"
#include "common/types.h"

namespace deepep_moe {

// Describes an unfinished wait: for a counter of `peer` in `phase`, `expected` and last `seen`.
struct Lack {
    int peer;
    const char* phase;
    int64_t expected, seen;
};

// Knows the peers' state. `suspect` returns whether the wait looks hopeless: the peer is gone, or has left or failed this call. After a
// second look at the data, `give_up` throws. `fail` throws for a passed deadline.
class PeerMonitor {
public:
    virtual ~PeerMonitor() = default;
    virtual int num_ranks() const = 0;
    virtual double timeout_s() const = 0;
    virtual uint64_t beat(int peer) const = 0;
    virtual void beat_self() = 0;  // shows the peers that this rank waits
    virtual void poll() = 0;       // throws when the caller wants to stop
    virtual bool suspect(const Lack& lack) = 0;
    [[noreturn]] virtual void give_up(const Lack& lack) = 0;
    [[noreturn]] virtual void fail(const Lack& lack) = 0;
};

// While this process ends, this is set, and a wait fails after kHurriedTimeout seconds without progress, whatever its deadline.
inline std::atomic<bool> waits_hurry{false};
constexpr double kHurriedTimeout = 1.0;

inline void relax_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Call `idle` whenever nothing could be done and `progress` whenever something was. It spins, then yields, then sleeps, and checks the
// peers every few milliseconds. It fails if nothing was done within the monitor's deadline, nor at one more look. `lacks(report)` must call
// `report(Lack)` for everything that is waited for; the first peer that is not itself waiting is blamed.
class Waiter {
public:
    explicit Waiter(PeerMonitor& monitor) : monitor_(monitor) {}

    void progress() {
        rounds_ = 0;
        suspected_ = is_overdue_ = lacks_nothing_ = false;
    }

    template <class Lacks>
    void idle(Lacks&& lacks) {
        ++rounds_;
        if (rounds_ <= kSpins) return relax_cpu();
        if (rounds_ == kSpins + 1) begin();
        if (rounds_ <= kSpins + kYields) {
            sched_yield();
        } else {
            const timespec nap{0, 50'000};
            nanosleep(&nap, nullptr);
        }
        if (rounds_ % kRoundsPerLook == 0) look(lacks);
    }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr int64_t kSpins = 200, kYields = 2000, kRoundsPerLook = 64;

    void begin() {
        began_ = Clock::now();
        for (int peer = 0; peer < monitor_.num_ranks(); ++peer) beats_[peer] = monitor_.beat(peer);
    }

    template <class Lacks>
    void look(Lacks&& lacks) {
        monitor_.beat_self();
        monitor_.poll();
        // A peer may deliver and leave between our look at the data and our look at it: only a second look counts.
        const bool confirmed = suspected_;
        lacks([&](const Lack& lack) {
            if (!monitor_.suspect(lack)) return;
            if (confirmed) monitor_.give_up(lack);
            suspected_ = true;
        });
        const bool hurries = waits_hurry.load(std::memory_order_relaxed);
        const double deadline = hurries ? std::min(kHurriedTimeout, monitor_.timeout_s()) : monitor_.timeout_s();
        if (std::chrono::duration<double>(Clock::now() - began_).count() < deadline) return;
        // The time may have passed while this process was stopped or in a signal handler, so first take what has come meanwhile.
        if (!std::exchange(is_overdue_, true)) return;
        Lack first{}, stuck{};
        lacks([&](const Lack& lack) {
            if (!first.phase) first = lack;
            if (!stuck.phase && beats_[lack.peer] == monitor_.beat(lack.peer)) stuck = lack;
        });
        if (!first.phase) {  // nothing is lacking: it came at the last moment, if the caller finds it in its next look
            if (!std::exchange(lacks_nothing_, true)) return;
            throw std::logic_error("a call waits for nothing: its handle was changed after its dispatch");
        }
        const Lack& blamed = stuck.phase ? stuck : first;
        if (hurries) throw_hurried(blamed);
        monitor_.fail(blamed);
    }

    // It leaves no failure record: peers must blame this process, which ends, and not the one that it waits for.
    [[noreturn]] static void throw_hurried(const Lack& lack) {
        throw CallError("this process ends, and rank " + std::to_string(lack.peer) + " is late in phase '" + lack.phase +
                        "'; wait for the event of an asynchronous call before the process ends");
    }

    PeerMonitor& monitor_;
    int64_t rounds_ = 0;
    bool suspected_ = false, is_overdue_ = false, lacks_nothing_ = false;
    Clock::time_point began_{};
    uint64_t beats_[kMaxRanks] = {};
};

}  // namespace deepep_moe
