// What the low-latency kernels are launched with, besides the params of common/low_latency.h.
#pragma once

#include "common/gpu_wait.h"
#include "common/low_latency.h"

namespace deepep_moe {

constexpr int kLowLatencyMaxBlocks = 1024;

// In device memory, of one rank.
struct LowLatencyState {
    unsigned long long num_sent[kLowLatencyMaxBlocks];                  // calls, as each block of the next one reads it and counts it for itself
    unsigned long long verdicts[kTurns][kLowLatencyMaxRanks];           // 2 * call + 1 where its blocks have agreed that the rank came, + 0 that it did not
    unsigned masks;                                                     // bit r: rank r is masked
    int gave_up;
};

struct LowLatencyContext : GpuWaits {
    LowLatencyConfig config;
    LowLatencyLayout layout;
    LowLatencyState* state;
    unsigned* seen_masks;  // host memory: of the state
    bool masks_stalled;
    std::byte* workspaces[kLowLatencyMaxRanks];  // of all ranks, mapped here
};

// What a rank tells a peer of its refusal, in place of the peer's `reasons`.
struct LowLatencyReason {
    GpuFailure why;  // where its GPU has refused topk_idx: kind, peer the lane, expected the token, seen the value
    char text[kMaxReasonBytes - sizeof(GpuFailure)];
};

template <class Params>
struct LowLatencyLaunch {
    LowLatencyContext context;
    Params call;
    bool sends, receives;
    int num_blocks;
};

void launch_low_latency_dispatch(LowLatencyLaunch<LowLatencyDispatchParams> launch, void* stream);
void launch_low_latency_combine(LowLatencyLaunch<LowLatencyCombineParams> launch, void* stream);
int64_t low_latency_shared_bytes(const LowLatencyConfig& config);
// Blocks of either kernel that a multiprocessor of the current device holds at once, two at most.
int low_latency_blocks_per_multiprocessor(const LowLatencyConfig& config);
int low_latency_combine_blocks_per_multiprocessor();

// What a rank does between calls.
struct LowLatencyControlParams {
    enum Action { kMask, kUnmask, kRejoin, kRefuse, kCatchUp } action;
    LowLatencyContext context;
    int rank;                        // to mask or take back
    char reason[kMaxReasonBytes];    // of a refusal
};
void launch_low_latency_control(const LowLatencyControlParams& params, void* stream);

}  // namespace deepep_moe
