// What a kernel needs to wait for a peer, and to say that it waited in vain.
#pragma once

#include "common/types.h"

namespace deepep_moe {

enum class GpuPhase : int { kNone = 0, kEntry, kCounts, kPlan, kLanes, kDispatchRows, kReducedRows, kCombineRows, kRejoin };

constexpr const char* name_of(GpuPhase phase) {
    switch (phase) {
        case GpuPhase::kEntry: return "entry into the call";
        case GpuPhase::kCounts: return "counts";
        case GpuPhase::kPlan: return "own plan";
        case GpuPhase::kLanes: return "targets and weights";
        case GpuPhase::kDispatchRows: return "dispatch rows";
        case GpuPhase::kReducedRows: return "own sums";
        case GpuPhase::kCombineRows: return "combine rows";
        case GpuPhase::kRejoin: return "rejoining";
        default: return "";
    }
}

enum GpuFailureKind : int {
    kNoFailure = 0,
    kTimeout,
    kIndexOutOfRange,
    kDuplicateExpert,
    kBoundExceeded,
    kPeerRefused,
    kMismatch,
    kOvertaken
};

// The first failure of a rank's kernels; lies in host memory that the device sees.
struct GpuFailure {
    int kind;  // a GpuFailureKind, written last
    int peer, phase;
    long long expected, seen;
};

struct GpuWaits {
    int rank;
    unsigned long long timeout_ns;
    GpuFailure* failure;  // host memory
    int* gave_up;         // set with a failure: all waits of this rank end
};

}  // namespace deepep_moe
