// A kernel needs this state to wait for a peer, and to report that it waited in vain.
#pragma once

#include "common/types.h"

namespace deepep_moe {

enum class GpuPhase : int {
    kNone = 0,
    kEntry,
    kCounts,
    kPlan,
    kLanes,
    kDispatchRows,
    kReducedRows,
    kCombineRows,
    kRejoin,
    kRailEntry,
    kRailRows,
    kExperts
};

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
        case GpuPhase::kRailEntry: return "entry into the call, between nodes";
        case GpuPhase::kRailRows: return "rows of another node";
        case GpuPhase::kExperts: return "copies of experts";
        default: return "";
    }
}

enum GpuFailureKind : int {
    kNoFailure = 0,
    kTimeout,    // the peer is here,
    kPeerLeft,   // or has left,
    kPeerEnded,  // or its process has ended, in this order
    kIndexOutOfRange,
    kDuplicateExpert,
    kPeerRefused,
    kMismatch,
    kOvertaken,
    kFailedHandle,
    kExceededBound,  // `peer` would receive `seen` rows and has room for `expected`
    kBadCopy         // slot `expected` of `peer` is said to hold expert `seen`
};

// Returns whether a failure of this kind ended a wait for a peer.
constexpr bool ends_wait(int kind) { return kind == kTimeout || kind == kPeerLeft || kind == kPeerEnded; }

// A rank is here, has left, or its process has ended.
enum class GpuPresence : int { kHere = 0, kLeft, kEnded };

// Device copy of the host's bit mask of ended processes. Reading the host's takes microseconds, so kernels do so only at `next_look`.
struct GpuEnded {
    unsigned long long next_look;
    unsigned ranks;  // bit r: the process of rank r has ended
};

// Describes the first failure of a rank's kernels. It lies in host memory that the device sees.
struct GpuFailure {
    int kind;  // a GpuFailureKind, written last
    int peer, phase;
    long long expected, seen;  // with kPeerRefused: the call, and the GpuStamp::cause (0 in low latency)
};

// Waits and failures name as `peer` the rank of another node that has this rank's index there.
constexpr int kFirstRailPeer = 64;
DEEPEP_MOE_HD constexpr int rail_peer(int node) { return kFirstRailPeer + node; }
DEEPEP_MOE_HD constexpr bool is_rail_peer(int peer) { return peer >= kFirstRailPeer; }

struct GpuWaits {
    int rank;
    unsigned long long timeout_ns;
    GpuFailure* failure;             // host memory
    int* gave_up;                    // set with a failure: all waits of this rank end
    const unsigned long long* left;  // [num_ranks] not 0: the rank has left
    const unsigned* ended_ranks;     // host memory; bit r: the process of rank r has ended
    GpuEnded* ended;
};

}  // namespace deepep_moe
