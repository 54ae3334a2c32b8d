// Defines errors besides a wrong argument (std::invalid_argument). The bindings turn them into deepep_moe.errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace deepep_moe {

// Messages about a peer that lives and does not come, or that has left, end in these.
constexpr const char* kIfSlow =
    "; ranks must make the same calls; one that is only slow has more time with timeout_s or DEEPEP_MOE_TIMEOUT_S";
constexpr const char* kHasLeft =
    " has destroyed its buffer or is exiting (if so, see that rank's output for its error); all ranks must make the same calls";
constexpr const char* kHandleFailed = "the dispatch of this handle has failed, so nothing goes along it; dispatch again";
constexpr const char* kTwoThreads = "two threads are in calls of one buffer; make its calls one after the other";

// A wait passed its deadline, or the peer it waited for is gone.
struct TimeoutError : std::runtime_error {
    TimeoutError(const std::string& message, int rank, std::string phase, int64_t expected, int64_t seen)
        : std::runtime_error(message), rank(rank), phase(std::move(phase)), expected(expected), seen(seen) {}
    int rank;
    std::string phase;
    int64_t expected, seen;
};

// An entry of topk_idx is no expert.
struct NoExpertError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

constexpr int kNoExpert = 2;  // deepep_moe.errors.Cause

// Another rank has left this call with an error of its own.
struct PeerError : std::runtime_error {
    PeerError(const std::string& message, int rank, int cause = 0) : std::runtime_error(message), rank(rank), cause(cause) {}
    int rank;
    int cause;  // why the first rank refused the call, a deepep_moe.errors.Cause
};

// Ranks are in the same call with different operations or settings.
struct MismatchError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A rank would receive more rows than the bound its caller gave.
struct CapacityError : std::runtime_error {
    CapacityError(const std::string& message, int rank) : std::runtime_error(message), rank(rank) {}
    int rank;
};

// Two threads are in calls of one buffer, or a wait was given up because this process ends.
struct CallError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A buffer was used after destroy() or in a process forked from its owner.
struct DestroyedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace deepep_moe
