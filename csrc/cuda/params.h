// Launch parameters of the GPU kernels. Shapes stand in brackets. Pointers are device memory of this rank unless said otherwise.
#pragma once

#include <cstdint>

#include "common/combine_options.h"
#include "cuda/tuning.h"
#include "cuda/workspace.h"

namespace deepep_moe {

// Counts that the host polls; they lie in host memory that the device can write.
struct GpuCounts {
    // Numbers of plans (GpuContext::plan): the last that met its peers, the last that wrote these counts, the last that lacked room.
    unsigned long long met, ready, lacking;
    long long num_rows;
    int send_counts[kMaxGpuSources], recv_counts[kMaxGpuSources];
};

// The kernels of one rank share this state. The counters are back at 0 when a call's plan has ended.
struct GpuState {
    unsigned long long sequence;  // the last call whose plan has summed up this rank's tokens
    unsigned long long last_met;  // the last call that this rank and its peers have entered without a refusal
    // Numbers of plans (GpuContext::plan): the last that placed its tokens, the last that met its peers, the last that counted rows.
    unsigned long long placed, met, counted;
    int gave_up;  // set with a failure: all waits of this rank end
    GpuEnded ended;
    // Count blocks: those of the plan that have counted, those that have placed, and the lane blocks that have sent their lanes.
    int num_counted, num_placed, num_told;
    int next_send, next_reduce, next_receive;  // the next chunk or task that no warp has taken
    long long num_rows;                        // rows that this rank receives; set by a plan that exchanges counts
};

struct GpuContext : GpuWaits {
    GpuWorkspaceConfig config;
    GpuWorkspaceLayout layout;
    std::byte* workspaces[kMaxGpuRanks];  // workspaces of all ranks, mapped here
    GpuCounts* counts;                    // host memory
    int* expert_counts;                   // [num_local_experts] tokens received, host memory
    GpuState* state;
    unsigned long long plan;  // the number of this call's plan; the host counts the plans that it launches
};

// Holds the experts of tokens, as the caller has them. Strides are in entries.
struct GpuTopkIdx {
    const void* topk_idx;  // [num_tokens, num_topk] int64 or int32
    int64_t token_stride, lane_stride;
    bool is_int64;
    int num_tokens;

    DEEPEP_MOE_HD int64_t expert(int token, int k) const {
        const int64_t at = token * token_stride + k * lane_stride;
        return is_int64 ? static_cast<const int64_t*>(topk_idx)[at] : static_cast<const int32_t*>(topk_idx)[at];
    }
};

// Holds the weights of those experts likewise.
struct GpuTopkWeights {
    const float* values;  // [num_tokens, num_topk], or nullptr
    int64_t token_stride, lane_stride;

    DEEPEP_MOE_HD float of(int token, int k) const { return values[token * token_stride + k * lane_stride]; }
};

// Everything a call knows about where this rank's tokens go. Scratch of the buffer, valid until its next call. The tokens are those of this
// rank, or over nodes num_nodes * node_tokens, where unused places of a node's share have no expert.
struct GpuRouting : GpuTopkIdx {
    int tokens_per_warp;          // tokens of a warp of the plan
    int node_segments;            // segments (blocks of the plan) for the tokens of one node
    int32_t* segment_counts;      // [num_segments, columns] tokens for each expert, then rank; becomes the sum of the segments before
    int32_t* warp_counts;         // [num_segments, warps of the plan, columns] likewise, for the warps before in the same segment
    int32_t* index_in_warp;       // [num_tokens, num_topk] tokens before this one in its warp with the same expert
    int32_t* expert_row_base;     // [num_nodes, num_experts] first row of this rank's tokens of a node in the expert's group
    int32_t* send_slot;           // [num_tokens, num_ranks] slot of the token on its way to the rank, -1 = does not go there
    int32_t* send_token;          // [num_ranks, num_max_tokens] the token in each slot
    int32_t* send_counts;         // [num_sources] slots to each rank, for the tokens of each node
    int32_t* recv_first;          // [num_sources] tokens received from the sources before; only with several nodes
    unsigned long long* reduced;  // [num_ranks, num_reduced] in a combine: tiles of rows whose sums are in the outbox
    int32_t* narrow_topk_idx;     // [num_tokens, num_topk] int32 copy for the handle, or nullptr

    DEEPEP_MOE_HD int node_of(const GpuWorkspaceConfig& config, int token) const {
        return config.num_nodes == 1 ? 0 : token / config.node_tokens();
    }
};

// A plan divides tokens among its warps, and has one block for each segment.
constexpr int kPlanWarps = tuning::kPlanThreads / 32;
constexpr int tokens_per_warp(int num_tokens, int max_segments) {  // num_tokens: those of one node
    return divide_up(num_tokens, max_segments * kPlanWarps * tuning::kTokensAtOnce) * tuning::kTokensAtOnce;
}
constexpr int node_segments(int num_tokens, int max_segments) {
    return num_tokens == 0 ? 1 : divide_up(num_tokens, tokens_per_warp(num_tokens, max_segments) * kPlanWarps);
}

// A bit of recv_counts[0] that marks the handle of a failed dispatch: no call may use it.
constexpr int32_t kFailed = INT32_MIN;

// recv_row_idx has this value for a top-k entry of this rank whose row does not fit the bound, with sums by lanes. (-1: the entry is
// not this rank's.)
constexpr int32_t kLeftOut = -2;

struct GpuPlanParams {
    GpuContext context;
    GpuRouting routing;
    GpuStamp stamp;
    bool cached;          // counts are known, and not exchanged
    bool reports_counts;  // counts go to host memory
    bool is_expert_layout;
    int expert_alignment;
    long long num_recv_rows_bound;        // rows that this rank has room for; -1: no bound, or further rows are left out
    int32_t* recv_counts;                 // [num_sources], with kFailed; out unless cached; nullptr where no call is made
    int32_t* num_recv_tokens_per_expert;  // [num_local_experts]; out unless cached
};

// A call's kernels see rows that cross between nodes here (csrc/nvshmem moves them). Slots are as in the workspace, kRailSlots a chunk.
struct GpuRail {
    const std::byte* inbox;           // [num_nodes - 1, node_tokens] slots: tokens of the other nodes, or sums from there
    std::byte* outbox;                // same shape: sums for the other nodes
    const unsigned long long* ready;  // [num_nodes, chunks] the call's sequence number, once a chunk of the inbox has arrived
    unsigned long long* summed;       // [num_nodes, chunks] number of tiles summed so far in each chunk of the outbox
    int num_tokens;                   // tokens of this rank
    const int32_t* slots;             // [num_tokens, num_nodes] where a token is among those that cross to a node; -1: it does not
    const int32_t* topk_idx;          // [num_tokens, num_topk] experts of all nodes

    // Returns the slots that another node has in `box`.
    template <class Box>
    DEEPEP_MOE_HD Box* of_node(Box* box, const GpuWorkspaceConfig& config, int node, int64_t slot_bytes) const {
        return box + (node - (node > config.node)) * config.node_tokens() * slot_bytes;
    }
};

// Points to rows that lie in several tensors, one for each local expert. Row r is at rows[i] + r * row_bytes, where i is the last tensor
// whose first_row is r or less.
constexpr int kMaxExpertTensors = 32;
struct ExpertRows {
    int num_tensors;  // 0: rows lie in one tensor
    int first_row[kMaxExpertTensors];
    uintptr_t rows[kMaxExpertTensors];
};

// The rows are gradients of y = weight * x. They are converted into the gradients of x and of weight.
struct RowScaling {
    DType dtype;
    const float* weights;    // [num_rows], or nullptr: rows stay as they are
    const std::byte* x;      // [num_rows, hidden], unless they lie in expert_rows
    ExpertRows expert_rows;  // the rows of x, if they lie in several tensors
    float* grad_weights;     // [num_rows]
};

struct GpuDispatchParams {
    GpuContext context;
    GpuRouting routing;
    GpuRing ring;
    bool cached, has_lanes, is_expert_layout, recv_topk_idx_is_int64;
    bool to_outbox;  // senders leave rows in the outbox, for a copy engine
    bool is_guess;   // num_rows is a guess: if more rows come, this launch receives none, and a later launch receives them all
    int num_lane_blocks, num_send_blocks, num_receive_blocks, expert_alignment;
    int64_t row_bytes, scale_bytes, num_rows;
    int num_x_rows;             // token t's row of x is t % num_x_rows
    const std::byte* x;         // [num_x_rows, row_bytes]
    const std::byte* x_scales;  // [num_x_rows, scale_bytes], or nullptr
    GpuTopkWeights topk_weights;
    int32_t* recv_counts;                       // [num_sources]; out: kFailed
    const int32_t* num_recv_tokens_per_expert;  // [num_local_experts]
    std::byte* recv_x;                          // [num_rows, row_bytes]
    std::byte* recv_x_scales;                   // [num_rows, scale_bytes], or nullptr
    void* recv_topk_idx;                        // rank layout: [num_rows, num_topk], or nullptr
    float* recv_topk_weights;                   // expert layout: [num_rows]; rank layout: [num_rows, num_topk]; or nullptr
    int32_t* recv_row_idx;                      // expert layout: [num_recv_tokens, num_topk]; out unless cached
    RowScaling scaling;                         // scaling of the rows received; expert layout only
    GpuRail rail;                               // used with several nodes

    DEEPEP_MOE_HD int64_t x_row(int token) const { return token < num_x_rows || num_x_rows == 0 ? token : token % num_x_rows; }
};

struct GpuCombineParams {
    GpuContext context;
    GpuRouting routing;
    GpuRing ring;
    bool is_expert_layout, has_topk_weight_grads;
    bool direct;             // rows need no sum on their way: they leave from x, not from the outbox
    bool reduces, finishes;  // the work of the blocks that do not send
    DType dtype;
    int num_send_blocks, num_work_blocks;
    int max_tile_pieces;          // pieces of 16 bytes that a warp sums in one task
    int64_t num_rows;             // rows of x
    const int32_t* recv_counts;   // [num_sources]
    const int32_t* recv_row_idx;  // expert layout: [num_recv_tokens, num_topk]
    const std::byte* x;           // [num_rows, hidden], unless they lie in expert_rows
    ExpertRows expert_rows;
    const float* weights;            // [num_rows], or nullptr
    const float* topk_weight_grads;  // expert layout: [num_rows]; rank layout: [num_rows, num_topk]; or nullptr
    const std::byte* bias;           // [num_tokens, hidden], or nullptr
    // With num_topk 1, tokens may share a row: row i of combined_x sums the tokens t with t % (num_tokens / tokens_per_row) == i.
    int tokens_per_row;
    const float* source_weights;        // [num_tokens] weights of the tokens in that sum, or nullptr
    std::byte* combined_x;              // [num_tokens / tokens_per_row, hidden]
    float* combined_topk_weight_grads;  // [num_tokens, num_topk], or nullptr
    CombineOptions options;
    GpuRail rail;  // with several nodes; the five fields above are then about this rank's tokens

    // The next two are for sums by lanes.
    bool weights_are_sent;  // topk_weight_grads are the weights of the rows
    bool is_fused;          // a weight's product is not rounded before it is added

    DEEPEP_MOE_HD bool is_by_lane() const { return context.config.is_by_lane; }
    bool adds_single_rows() const { return is_by_lane() || tokens_per_row > 1 || source_weights != nullptr; }

    DEEPEP_MOE_HD int tail_values() const { return !has_topk_weight_grads ? 0 : is_by_lane() ? 1 : context.config.num_topk; }
    DEEPEP_MOE_HD int64_t tail_bytes() const { return 4 * tail_values(); }
};

// The kernel moves copies of experts between their homes and the workspaces' expert slots. A tensor has a contiguous entry for each local
// expert at home, and one for each slot. Entries of slots lie one behind the other.
constexpr int kMaxSlotTensors = 8;
struct GpuExpertSlotsParams {
    GpuContext context;
    GpuRing ring;
    bool returns;  // gradients go home, not weights to the copies
    int num_slots, num_local_experts, num_tensors, num_blocks;
    const int32_t* copies;         // [num_ranks, num_slots] the expert in each slot of each rank; -1: none
    DType slot_dtype, home_dtype;  // types of gradients: at home fp32, or as in the slots; weights are bytes
    int64_t unit;                  // elements of gradients, or bytes of weights, that a warp moves at a time; it divides every num_units
    struct Tensor {
        int64_t slots;      // offset in every workspace
        int64_t num_units;  // units of an expert
        std::byte* home;
        int64_t home_stride;  // bytes from an expert to the next
    } tensors[kMaxSlotTensors];
};

// A sum over lanes reads row (lane, token) at number lane * lane_stride + token * token_stride of num_topk * num_tokens rows.
struct GpuWeightedSumParams {
    int64_t num_tokens, hidden, lane_stride, token_stride;  // rows of whole 16 bytes
    int num_topk;
    bool is_fused;  // in the forward, a product is not rounded before it is added
    DType dtype;
    const std::byte* rows;  // [num_topk * num_tokens, hidden]
    const float* weights;   // [num_topk * num_tokens]
    std::byte* sums;        // [num_tokens, hidden], of the forward
    const std::byte* grad;  // [num_tokens, hidden]; this and the fields below are for the backward
    std::byte* grad_rows;   // [num_topk * num_tokens, hidden]
    float* grad_weights;    // [num_topk * num_tokens]
};

// The kernel writes zeros to the rows from the last of group_ends on.
struct GpuClearTailParams {
    int64_t num_rows, row_bytes;  // of values; row_bytes: a multiple of 16
    const int* group_ends;        // [num_groups] on the GPU
    int64_t num_groups;
    std::byte* values;
};

// Rows of `inner` are gate, then up. Rows from the last of `group_ends` on have no expert: only their grad_probs is set, to 0.
struct GpuSwigluParams {
    int64_t num_rows, num_columns;  // size of y; columns fill whole 16 bytes
    DType dtype;
    const int* group_ends;  // [num_groups] on the GPU, or null: all rows have an expert
    int64_t num_groups;
    const std::byte* inner;  // [num_rows, 2 * num_columns]
    const float* probs;      // [num_rows], or null for ones
    std::byte* y;            // [num_rows, num_columns]; the backward writes it too unless it is null
    const std::byte* grad;   // [num_rows, num_columns]; this and the fields below are for the backward
    std::byte* grad_inner;   // [num_rows, 2 * num_columns]
    float* grad_probs;       // [num_rows], or null
};

// The kernel computes gradients of grouped experts' weights. For each group it adds the transposed rows of a [num_rows, n] times those of
// b [num_rows, k], both bf16, to sums [num_groups, n, k]. Both n and k are multiples of 8; a, b and sums are aligned to 16 bytes.
struct GpuWeightGradientParams {
    int64_t num_rows;
    int n, k, num_groups;
    const std::byte *a, *b;
    const int* group_ends;  // [num_groups]
    float* sums;
};

// The kernel multiplies e4m3 rows in groups, with one fp32 scale for each 128 values of the depth. n and k are multiples of 128. A product
// has shape [num_rows, n], from a [num_rows, k] and b [num_groups, n, k]. a_scales is [num_rows, k / 128] and b_scales [num_groups, n /
// 128, k / 128]. A weight gradient has shape [num_groups, n, k], from a [n, num_rows] and b [k, num_rows]. a_scales is [num_rows / 128, n]
// and b_scales [num_rows / 128, k]. Groups end at multiples of 128.
struct GpuFp8ProductParams {
    int64_t num_rows;
    int n, k, num_groups;
    const std::byte *a, *b;
    const float *a_scales, *b_scales;
    const int* group_ends;  // [num_groups]
    void* out;              // bf16, or fp32 for a weight gradient with is_fp32
    bool is_fp32;
};

// ---- dense routing: a map of chosen experts, with a number for each, becomes top-k entries, and back; these are counted ----

struct DenseRouting {
    int64_t num_tokens;
    int64_t num_experts, num_topk;
};

// Write a token's experts, ascending, then -1. If it has more than num_topk, the first entry is num_experts, which dispatches refuse.
struct LanesOfMapParams {
    DenseRouting sizes;
    const uint8_t* routing_map;  // [num_tokens, num_experts] bool
    const float* values;         // [num_tokens, num_experts], or nullptr
    int64_t* topk_idx;           // [num_tokens, num_topk], out
    float* topk_values;          // [num_tokens, num_topk], out, with `values`: 0 in entries without an expert
};

// Write the value of each top-k entry in the column of its expert, and 0 elsewhere.
struct DenseOfLanesParams {
    DenseRouting sizes;
    const int64_t* topk_idx;   // [num_tokens, num_topk], -1 = no expert
    const float* topk_values;  // [num_tokens, num_topk]
    float* values;             // [num_tokens, num_experts], out
};

// Count the tokens of each rank and each expert, each token once, and write to which ranks it goes. Entries without expert do not count.
struct CountLanesParams {
    DenseRouting sizes;
    int64_t num_ranks;
    const void* topk_idx;  // [num_tokens, num_topk] int64, or int32
    bool is_int64;
    int32_t* counts;            // [num_ranks + num_experts], zeroed by the caller; out: of each rank, then of each expert
    uint8_t* is_token_in_rank;  // [num_tokens, num_ranks] bool, out
};

// ---- fp8 ----

struct GpuQuantizeParams {
    int64_t num_rows, hidden;  // hidden: a multiple of 8
    DType dtype;               // of x
    const std::byte* x;        // [num_rows, hidden]
    std::byte* y;              // [num_rows, hidden] e4m3
    float* scales;             // [num_rows, ceil(hidden / 128)]
    bool is_rounded;           // scales are powers of two, for small gradients too
};

struct GpuQuantizeWeightsParams {
    int64_t num_matrices, num_rows, num_columns;  // rows and columns: multiples of 128
    int64_t matrix_stride;                        // elements from one matrix to the next
    DType dtype;                                  // of w
    const std::byte* w;                           // [num_matrices, num_rows, num_columns]; every matrix contiguous
    std::byte* y;                                 // [num_matrices, num_rows, num_columns] e4m3, or null
    float* scales;                                // [num_matrices, num_rows / 128, num_columns / 128]
    std::byte* y_t;                               // [num_matrices, num_columns, num_rows], or null
    float* scales_t;                              // [num_matrices, num_columns / 128, num_rows / 128]
};

// ---- copies of hot experts ----

// The parameters of a plan of copies, and of the physical experts of top-k entries.
struct CopyPlanParams {
    int num_ranks, num_experts, num_slots, rank;
    int cost, capacity;       // both in rows; -1 means no capacity
    int64_t num_entries;      // num_tokens * num_topk
    bool is_int64;            // topk_idx is int64
    const int32_t* counts;    // [num_ranks, num_experts]
    const void* topk_idx;     // [num_entries] int64 or int32
    int32_t *copies, *rows;   // [num_ranks, num_slots], out
    void* physical_topk_idx;  // [num_entries], out

    DEEPEP_MOE_HD int num_local() const { return num_experts / num_ranks; }
    DEEPEP_MOE_HD int all_slots() const { return num_ranks * num_slots; }
    DEEPEP_MOE_HD int num_physical() const { return num_experts + all_slots(); }
    DEEPEP_MOE_HD int physical_home(int expert) const { return expert + expert / num_local() * num_slots; }
    DEEPEP_MOE_HD int physical_slot(int slot) const { return slot + (slot / num_slots + 1) * num_local(); }
};

struct RowsOfCopiesParams {
    int64_t num_rows, row_bytes;  // of both tensors; bytes: a multiple of 4
    const int32_t* group_ends;    // [num_groups] where the rows of each group end: those of experts at home first, then those of copies
    int num_home, num_groups;
    std::byte* rows;       // [num_rows, ...] all of a rank
    std::byte* of_copies;  // [num_rows, ...] those of copies from the begin on
    bool is_back;          // they move from `of_copies` to `rows`
};

}  // namespace deepep_moe
