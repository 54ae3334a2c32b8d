// Low-latency calls over nodes: what crosses between ranks with the same index in their nodes, and what is launched for it.
// docs/design/low_latency_nodes.md has the protocol.
//
// Symmetric memory of a rank, at the same offsets on all ranks; [kTurns] is indexed by the call, as in common/low_latency.h:
//
//   entered u64[kTurns][num_nodes] | weighed, likewise | returned u64[num_nodes] | resumed u64[num_ranks] |
//   arrived u64[kTurns][num_nodes][num_max_tokens] | messages in [kTurns][num_nodes] | messages out, likewise |
//   inbox [kTurns][num_nodes - 1] boxes | outbox, likewise
//
// Row `node` of each array but those of what goes out is written by that node's rank only, and read by all ranks of the owner's node. Words
// are flags as LowLatencyWhat makes them. A box has a row for each token of the rank whose tokens they are; not all rows cross.
#pragma once

#include "cuda/low_latency.h"
#include "cuda/workspace.h"

namespace deepep_moe {

// What a message has; one of a refusal has a LowLatencyReason instead.
//   dispatch: counts i32[experts of the node] | lanes LowLatencyLane[num_tokens][num_topk], whose experts are numbers within the node
//   combine: nothing
// A combine with weights of its own has these behind it, f32[num_tokens][num_topk], which cross ahead of it with a word in `weighed`.
struct LowLatencyRailLayout {
    int64_t entered, weighed, returned, resumed, arrived, in, out, inbox, outbox, total_bytes;
    int64_t lanes, weights, message_bytes, box_bytes;  // in a message: of a dispatch, of a combine
    int64_t num_tokens;
    int num_nodes;

    LowLatencyRailLayout() = default;
    DEEPEP_MOE_HD LowLatencyRailLayout(const LowLatencyConfig& c, int num_nodes)
        : entered(0), weights(round_up(kMaxReasonBytes, 128)), num_tokens(c.num_max_tokens), num_nodes(num_nodes) {
        const int64_t num_lanes = c.num_max_tokens * c.num_topk, lane_bytes = static_cast<int64_t>(sizeof(LowLatencyLane));
        lanes = round_up(int64_t{4} * (c.num_experts / num_nodes), 16);
        const int64_t routing_bytes = lanes + lane_bytes * num_lanes, weights_end = weights + 4 * num_lanes;
        message_bytes = round_up(routing_bytes > weights_end ? routing_bytes : weights_end, 128);
        box_bytes = round_up(c.num_max_tokens * 4 * c.hidden, 128);
        weighed = int64_t{8} * kTurns * num_nodes;
        returned = 2 * weighed;
        resumed = returned + int64_t{8} * num_nodes;
        arrived = round_up(resumed + int64_t{8} * c.num_ranks, 128);
        in = arrived + round_up(int64_t{8} * kTurns * num_nodes * num_tokens, 128);
        out = in + kTurns * num_nodes * message_bytes;
        inbox = out + kTurns * num_nodes * message_bytes;
        outbox = inbox + kTurns * (num_nodes - 1) * box_bytes;
        total_bytes = outbox + kTurns * (num_nodes - 1) * box_bytes;
    }

    DEEPEP_MOE_HD int64_t nth(unsigned long long call, int node) const { return static_cast<int64_t>(call % kTurns) * num_nodes + node; }
    DEEPEP_MOE_HD int64_t entered_of(unsigned long long call, int node) const { return entered + 8 * nth(call, node); }
    DEEPEP_MOE_HD int64_t weighed_of(unsigned long long call, int node) const { return weighed + 8 * nth(call, node); }
    DEEPEP_MOE_HD int64_t arrived_of(unsigned long long call, int node, int64_t token) const {
        return arrived + 8 * (nth(call, node) * num_tokens + token);
    }
    DEEPEP_MOE_HD int64_t in_of(unsigned long long call, int node) const { return in + nth(call, node) * message_bytes; }
    DEEPEP_MOE_HD int64_t out_of(unsigned long long call, int node) const { return out + nth(call, node) * message_bytes; }
    DEEPEP_MOE_HD int64_t returned_of(int node) const { return returned + 8 * node; }
    DEEPEP_MOE_HD int64_t resumed_of(int rank) const { return resumed + 8 * rank; }
    // Of a box that a rank of `owner` has for `other`, in its inbox or outbox. A dispatch keeps each row once, for all nodes: in the box
    // for the next node.
    DEEPEP_MOE_HD int64_t box_of(unsigned long long call, int owner, int other) const {
        return (static_cast<int64_t>(call % kTurns) * (num_nodes - 1) + other - (other > owner)) * box_bytes;
    }
};

// What a handle has besides, over nodes: rank masks u32[num_nodes][num_max_tokens], of each token of the rail's rank there. Bit i: rank i
// of this node has it; 0: it has not crossed.
struct LowLatencyRailHandle {
    int64_t in_ranks, total_bytes;
    DEEPEP_MOE_HD LowLatencyRailHandle(const LowLatencyConfig& c, int num_nodes)
        : in_ranks(LowLatencyHandleLayout(c).total_bytes), total_bytes(in_ranks + round_up(4 * num_nodes * c.num_max_tokens, 16)) {}
};

// Ranks have their numbers in the group everywhere: rank `index` of node `node` is node * ranks_per_node + index.
struct LowLatencyRailContext {
    LowLatencyContext context;  // `workspaces` of the ranks of other nodes are null
    LowLatencyRailLayout layout;
    std::byte* bases[kLowLatencyMaxHostRanks];  // symmetric memory of the ranks of this node, by index, mapped here
    int num_nodes, ranks_per_node, node, index;
    int pes[kMaxGpuNodes];  // NVSHMEM's numbers of the ranks of the rail, by node
};

template <class Params>
struct LowLatencyRailLaunch {
    LowLatencyRailContext rail;
    Params call;
    int num_blocks;
};
using LowLatencyRailDispatch = LowLatencyRailLaunch<LowLatencyDispatchParams>;
using LowLatencyRailCombine = LowLatencyRailLaunch<LowLatencyCombineParams>;
using LowLatencyRailControl = LowLatencyRailLaunch<LowLatencyControlParams>;  // one block

// What the module that links NVSHMEM, which puts, hands to the one that does not. Functions return nullptr, or why a kernel could not be
// launched.
struct LowLatencyRailShim {
    int64_t bytes;  // of the params: both modules are of one build
    const char* (*send)(const LowLatencyRailDispatch&, void* stream) noexcept;
    const char* (*weigh)(const LowLatencyRailCombine&, void* stream) noexcept;
    const char* (*sum)(const LowLatencyRailCombine&, void* stream) noexcept;
    const char* (*control)(const LowLatencyRailControl&, void* stream) noexcept;
};
constexpr const char* kLowLatencyRailShimName = "deepep_moe.LowLatencyRailShim";
constexpr int64_t kLowLatencyRailShimBytes = sizeof(LowLatencyRailDispatch) + sizeof(LowLatencyRailCombine) + sizeof(LowLatencyRailControl);

}  // namespace deepep_moe
