// For low-latency calls over nodes: the memory by which the ranks of a rail (the same index in their nodes) exchange rows, and launch
// parameters. docs/design/low_latency_nodes.md has the protocol.
//
// Symmetric memory of a rank, at the same offsets on all ranks; [kTurns] is indexed by the call, as in common/low_latency.h:
//
//   entered u64[kTurns][num_nodes] | weighed, likewise | returned u64[num_nodes] | resumed u64[num_ranks] |
//   arrived u64[kTurns][num_nodes][num_max_tokens] | messages in [kTurns][num_nodes] | messages out, likewise |
//   inbox [kTurns][num_nodes - 1] boxes | outbox, likewise
//
// Only the rank of `node` writes row `node` of each array, except of the messages out and the outbox; all ranks of the owner's node read
// it. Words are flags as LowLatencyWhat builds them. A box has room for every token of its source rank; not all rows cross.
#pragma once

#include "cuda/low_latency.h"
#include "cuda/workspace.h"

namespace deepep_moe {

// A message has this content. The message of a refusal holds a LowLatencyReason instead.
//   dispatch: counts i32[experts of the node] | lanes LowLatencyLane[num_tokens][num_topk]. The lanes' experts are numbers within the node.
//   combine: nothing, or weights f32[num_tokens][num_topk], which cross ahead of the rows with a word in `weighed`.
struct LowLatencyRailLayout {
    int64_t entered, weighed, returned, resumed, arrived, in, out, inbox, outbox, total_bytes;
    int64_t lanes, weights, message_bytes, box_bytes;  // lanes, weights: offsets in the message of a dispatch, of a combine
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
    // Returns the box, in the inbox or outbox of a rank of node `owner`, for node `other`. A dispatch stores each outgoing row once, for
    // all nodes, in the box for the next node.
    DEEPEP_MOE_HD int64_t box_of(unsigned long long call, int owner, int other) const {
        return (static_cast<int64_t>(call % kTurns) * (num_nodes - 1) + other - (other > owner)) * box_bytes;
    }
};

// A handle has this part only over nodes: in_ranks u32[num_nodes][num_max_tokens], a bit mask for each token of the rail's rank of a node.
// Bit i: rank i of this node has the token. 0: the token has not crossed.
struct LowLatencyRailHandle {
    int64_t in_ranks, total_bytes;
    DEEPEP_MOE_HD LowLatencyRailHandle(const LowLatencyConfig& c, int num_nodes)
        : in_ranks(LowLatencyHandleLayout(c).total_bytes), total_bytes(in_ranks + round_up(4 * num_nodes * c.num_max_tokens, 16)) {}
};

// Ranks are numbered as in the group: rank `index` of node `node` is node * ranks_per_node + index.
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

}  // namespace deepep_moe
