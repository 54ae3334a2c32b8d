// What the GPU kernels are launched with. Shapes in brackets; pointers are device memory of this rank unless said otherwise.
#pragma once

#include <cstdint>

#include "common/gpu_workspace.h"

namespace deepep_moe {

enum class GpuPhase : int { kNone = 0, kEntry, kCounts, kDispatchRows, kCombineRows };

enum GpuFailureKind : int { kNoFailure = 0, kTimeout, kIndexOutOfRange, kDuplicateExpert, kBoundExceeded, kPeerRefused };

// Written by the first kernel that fails, in host memory that the device sees.
struct GpuFailure {
    int kind;  // a GpuFailureKind, written last
    int peer, phase;
    long long expected, seen;
};

// What the host waits for, likewise.
struct GpuCounts {
    unsigned long long sequence;  // written last
    long long num_recv_tokens, num_rows;
};

struct GpuContext {
    int rank;
    GpuWorkspaceConfig config;
    unsigned long long sequence, timeout_ns;
    std::byte* workspaces[kMaxGpuRanks];  // of all ranks, mapped here
    GpuFailure* failure;                  // host memory
    GpuCounts* counts;                    // host memory
    int* gave_up;                         // set with `failure`: all waits of this rank end
};

// Everything a call knows about where this rank's tokens go. Scratch of the buffer, valid until its next call.
struct GpuRouting {
    const void* topk_idx;       // [num_tokens, num_topk] int64 or int32
    bool is_int64;
    int64_t num_tokens;
    int32_t* segment_counts;    // [num_segments, columns] tokens for each expert, then rank; becomes the sum of the segments before
    int32_t* index_in_segment;  // [num_tokens, num_topk] tokens before this one in its segment with the same expert
    int32_t* expert_row_base;   // [num_experts] first row of this rank's tokens in the expert's group, on the expert's rank
    int32_t* send_slot;         // [num_tokens, num_ranks] slot of the token on its way to the rank, -1 = does not go there
    int32_t* send_token;        // [num_ranks, num_max_tokens] the token in each slot
    int32_t* send_row_idx;      // [num_tokens, num_topk] row of recv_x there (expert layout) or local expert (rank layout), -1 = none
    int32_t* send_counts;       // [num_ranks] slots to each rank
    int32_t* narrow_topk_idx;   // [num_tokens, num_topk] int32 copy for the handle, or nullptr
};

struct GpuPlanParams {
    GpuContext context;
    GpuRouting routing;
    bool cached;                          // counts are known: only enter the call
    bool refuse;                          // enter the call only to tell the peers that this rank's arguments are wrong
    bool is_expert_layout;
    int expert_alignment;
    long long num_recv_rows_bound;        // -1: none
    int32_t* recv_counts;                 // [num_ranks]; out unless cached
    int32_t* num_recv_tokens_per_expert;  // [num_local_experts]; out unless cached
};

struct GpuDispatchParams {
    GpuContext context;
    GpuRouting routing;
    bool cached, is_expert_layout, recv_topk_idx_is_int64;
    int num_send_blocks, expert_alignment;
    int64_t row_bytes, scale_bytes, num_rows;
    const std::byte* x;         // [num_tokens, row_bytes]
    const std::byte* x_scales;  // [num_tokens, scale_bytes], or nullptr
    const float* topk_weights;  // [num_tokens, num_topk], or nullptr
    const int32_t* recv_counts;                 // [num_ranks]
    const int32_t* num_recv_tokens_per_expert;  // [num_local_experts]
    std::byte* recv_x;          // [num_rows, row_bytes]
    std::byte* recv_x_scales;   // [num_rows, scale_bytes], or nullptr
    void* recv_topk_idx;        // rank layout: [num_rows, num_topk], or nullptr
    float* recv_topk_weights;   // expert layout: [num_rows]; rank layout: [num_rows, num_topk]; or nullptr
    int32_t* recv_row_idx;      // expert layout: [num_recv_tokens, num_topk]
};

struct GpuCombineParams {
    GpuContext context;
    GpuRouting routing;
    bool is_expert_layout;
    DType dtype;
    int num_send_blocks;
    const int32_t* recv_counts;   // [num_ranks]
    const int32_t* recv_row_idx;  // expert layout: [num_recv_tokens, num_topk]
    const std::byte* x;           // [num_rows, hidden]
    const float* weights;         // [num_rows], or nullptr
    const float* lane_values;     // expert layout: [num_rows]; rank layout: [num_rows, num_topk]; or nullptr
    const std::byte* bias;        // [num_tokens, hidden], or nullptr
    std::byte* combined_x;        // [num_tokens, hidden]
    float* combined_lane_values;  // [num_tokens, num_topk], or nullptr
};

}  // namespace deepep_moe
