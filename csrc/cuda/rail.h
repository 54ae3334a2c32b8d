// Exchanges rows between nodes. A *rail* is the ranks with the same index in their nodes. This file has the memory that they write to each
// other, and the parameters of the two kernels of csrc/nvshmem/rail.cu. docs/design/nvshmem.md has the protocol.
//
// Symmetric memory of a rank, at the same offsets on all ranks:
//
//   entered u64[2][num_nodes] | arrived u64[num_nodes][num_chunks] | messages in [2][num_nodes] | messages out [2][num_nodes] |
//   inbox [num_nodes - 1][node_tokens] slots | outbox [num_nodes - 1][node_tokens] slots
//
// Only the rank of `node` writes row `node` of each array, except of the messages out and the outbox. Words hold the sequence number of
// their call; [2] is indexed by its parity.
#pragma once

#include "cuda/low_latency_rail.h"
#include "cuda/params.h"

namespace deepep_moe {

// A rank sends this message to another of its rail, ahead of the rows. RailLane[num_tokens][num_topk] follows it if the call needs lanes.
struct alignas(16) RailMessage {
    GpuStamp stamp;
    int num_tokens;  // tokens that cross
};

// Names one top-k entry of a token that crosses: an expert of the node it goes to, or -1.
struct alignas(8) RailLane {
    int32_t expert;
    float weight;
};

struct RailLayout {
    int64_t entered, arrived, in, out, inbox, outbox, total_bytes;
    int64_t message_bytes, box_bytes;  // bytes of one message, and of one node's slots
    int num_nodes, num_chunks;         // num_chunks: of one node

    RailLayout() = default;
    DEEPEP_MOE_HD explicit RailLayout(const GpuWorkspaceConfig& c)
        : entered(0), arrived(divide_up(2 * 8 * c.num_nodes, 128) * 128), num_nodes(c.num_nodes), num_chunks(c.node_tokens() / kRailSlots) {
        const int64_t lanes = int64_t{c.node_tokens()} * c.num_topk * static_cast<int64_t>(sizeof(RailLane));
        message_bytes = divide_up(static_cast<int64_t>(sizeof(RailMessage)) + lanes, 128) * 128;
        box_bytes = c.node_tokens() * GpuSlotLayout(4 * static_cast<int64_t>(c.hidden), 4 * c.num_topk).bytes;
        in = arrived + divide_up(int64_t{8} * num_nodes * num_chunks, 128) * 128;
        out = in + 2 * num_nodes * message_bytes;
        inbox = out + 2 * num_nodes * message_bytes;
        outbox = inbox + (num_nodes - 1) * box_bytes;
        total_bytes = outbox + (num_nodes - 1) * box_bytes;
    }

    DEEPEP_MOE_HD int64_t entered_of(unsigned long long call, int node) const { return entered + 8 * (call % 2 * num_nodes + node); }
    DEEPEP_MOE_HD int64_t in_of(unsigned long long call, int node) const { return in + (call % 2 * num_nodes + node) * message_bytes; }
    DEEPEP_MOE_HD int64_t out_of(unsigned long long call, int node) const { return out + (call % 2 * num_nodes + node) * message_bytes; }
    DEEPEP_MOE_HD int64_t arrived_of(int node, int chunk) const { return arrived + 8 * (int64_t{node} * num_chunks + chunk); }
};

// The state of one rank's rail kernels, in its own memory. The counters are back at 0 when a call's first kernel has ended.
struct RailState {
    unsigned long long sequence;  // the current call
    unsigned long long last_met;  // the last call that this rank and all of its rail have entered without a refusal
    int num_done, num_met;        // blocks of the first kernel that have ended, and those that have met the rank of their node
    int next_send;                // the next chunk that no block has taken
    int has_lost;                 // a chunk of a dispatch did not come in time, so no other chunk is waited for
};

struct RailContext {
    GpuContext context;
    RailLayout layout;
    std::byte* base;        // this rank's symmetric memory
    int pes[kMaxGpuNodes];  // NVSHMEM's numbers of the ranks of the rail, by node
    RailState* state;
    unsigned long long* ready;   // [num_nodes, num_chunks], as GpuRail has them
    unsigned long long* summed;  // likewise
    int32_t* slots;              // [num_tokens, num_nodes] of a call's tokens, as GpuRail has them
    int32_t* tokens;             // [num_nodes, node_tokens] the token in each slot
    int32_t* out_counts;         // [num_nodes] tokens that cross to each node
};

// The first kernel has one block for each node, which announces the tokens that cross, enters the call, and reads that node's message.
struct RailMeeting {
    RailContext rail;
    GpuStamp stamp;  // what == 0: the host refuses the call
};
struct RailMeetCall {
    bool cached = true;  // the tokens that come are known from the handle
    GpuTopkIdx topk;     // experts of all nodes
    bool has_weights;    // topk_weights cross
    GpuTopkWeights topk_weights;
    int32_t* narrow_topk_idx;  // [num_tokens, num_topk] int32 copy for the handle; out unless cached
    int32_t* node_topk_idx;    // [num_nodes, node_tokens, num_topk] experts of this node, of the tokens that are here; out unless cached
    float* node_topk_weights;  // likewise; out with has_weights
    int32_t* in_counts;        // [num_nodes] tokens that come from each node; out unless cached
    const int32_t* handle_counts;  // recv_counts (with kFailed) of the handle that the call uses, or nullptr
};
struct RailMeetParams : RailMeeting, RailMeetCall {};

// The second kernel runs beside those of the node. It sends rows, a put for each chunk, and tells these which chunks have arrived.
struct RailMoving {
    RailContext rail;
    unsigned long long timeout_ns;  // for a chunk
};
struct RailMoveCall {
    bool is_combine;            // sums leave from the outbox as they are computed, and as many rows come back as tokens went
    int num_blocks, num_tiles;  // num_tiles: parts in which a row is summed
    int64_t row_bytes, tail_bytes;
    const std::byte* x;         // in a dispatch, [num_tokens, row_bytes]
    const std::byte* x_scales;  // [num_tokens, tail_bytes], or nullptr
    const int32_t* in_counts;   // in a combine, [num_nodes]
};
struct RailMoveParams : RailMoving, RailMoveCall {};

// The module that links NVSHMEM gives these functions to the one that does not. They return nullptr, or why a launch has failed.
struct RailShim {
    int64_t bytes;  // sizes of the parameters; they show that both modules come from the same build
    const char* (*meet)(const RailMeetParams&, void* stream) noexcept;
    const char* (*move)(const RailMoveParams&, void* stream) noexcept;
    const char* (*send)(const LowLatencyRailDispatch&, void* stream) noexcept;  // this and the functions below are for low-latency calls
    const char* (*weigh)(const LowLatencyRailCombine&, void* stream) noexcept;
    const char* (*sum)(const LowLatencyRailCombine&, void* stream) noexcept;
    const char* (*control)(const LowLatencyRailControl&, void* stream) noexcept;
};
constexpr const char* kRailShimName = "deepep_moe.RailShim";
constexpr int64_t kRailShimBytes = sizeof(RailMeetParams) + sizeof(RailMoveParams) + sizeof(LowLatencyRailDispatch) +
                                   sizeof(LowLatencyRailCombine) + sizeof(LowLatencyRailControl);

}  // namespace deepep_moe
