// Low-latency calls over nodes: what crosses between ranks with the same index in their nodes, and what the kernels of
// csrc/nvshmem/low_latency_*.cu are launched with. docs/design/low_latency_nodes.md has the protocol.
//
// Symmetric memory of a rank, at the same offsets on all ranks; [kTurns] is indexed by the call, as in common/low_latency.h:
//
//   entered u64[kTurns][num_nodes] | arrived u64[kTurns][num_nodes][num_chunks] | messages in [kTurns][num_nodes] | messages out, likewise
//   | inbox [kTurns][num_nodes - 1] boxes | outbox, likewise
//
// Row `node` of each array but those of what goes out is written by that node's rank only. Words hold the number of the call.
#pragma once

#include "cuda/low_latency.h"
#include "cuda/workspace.h"

namespace deepep_moe {

constexpr int kLowLatencyRailRows = 2;  // of a put

// Of a rank, to another one of its rail. Behind that of a dispatch lie slots i32[num_tokens] (-1: the token does not cross), then
// topk_idx i32[num_tokens][num_topk], of which experts of other nodes are -1, and topk_weights f32, likewise.
struct alignas(16) LowLatencyRailMessage {
    unsigned long long flag;  // as LowLatencyWhat makes it
    int num_tokens, num_rows;
    LowLatencyReason reason;  // of a refusal
};

struct LowLatencyRailLayout {
    int64_t entered, arrived, in, out, inbox, outbox, total_bytes;
    int64_t message_bytes, box_bytes;
    int num_nodes, num_chunks;

    LowLatencyRailLayout() = default;
    DEEPEP_MOE_HD LowLatencyRailLayout(const LowLatencyConfig& c, int num_nodes)
        : entered(0), num_nodes(num_nodes), num_chunks(static_cast<int>(divide_up(c.num_max_tokens, kLowLatencyRailRows))) {
        message_bytes = round_up(static_cast<int64_t>(sizeof(LowLatencyRailMessage)) + c.num_max_tokens * (4 + 8 * c.num_topk), 128);
        box_bytes = round_up(c.num_max_tokens * 4 * c.hidden, 128);
        arrived = round_up(int64_t{8} * kTurns * num_nodes, 128);
        in = arrived + round_up(int64_t{8} * kTurns * num_nodes * num_chunks, 128);
        out = in + kTurns * num_nodes * message_bytes;
        inbox = out + kTurns * num_nodes * message_bytes;
        outbox = inbox + kTurns * (num_nodes - 1) * box_bytes;
        total_bytes = outbox + kTurns * (num_nodes - 1) * box_bytes;
    }

    DEEPEP_MOE_HD int64_t nth(unsigned long long call, int node) const { return static_cast<int64_t>(call % kTurns) * num_nodes + node; }
    DEEPEP_MOE_HD int64_t entered_of(unsigned long long call, int node) const { return entered + 8 * nth(call, node); }
    DEEPEP_MOE_HD int64_t arrived_of(unsigned long long call, int node, int chunk) const {
        return arrived + 8 * (nth(call, node) * num_chunks + chunk);
    }
    DEEPEP_MOE_HD int64_t in_of(unsigned long long call, int node) const { return in + nth(call, node) * message_bytes; }
    DEEPEP_MOE_HD int64_t out_of(unsigned long long call, int node) const { return out + nth(call, node) * message_bytes; }
    // Of a box that a rank of `owner` has for `other`, in its inbox or outbox.
    DEEPEP_MOE_HD int64_t box_of(unsigned long long call, int owner, int other) const {
        return (static_cast<int64_t>(call % kTurns) * (num_nodes - 1) + other - (other > owner)) * box_bytes;
    }
};

// What a handle has besides, over nodes; each i32[num_nodes][num_max_tokens] but the first, i32[num_nodes]:
//   num_in rows that have come from each node | in_tokens, in_ranks of each such row: its token, and bit i: rank i of this node has it; for
//   this node itself, of each own token | out_slots of each own token: its row in the box for a node, or -1
struct LowLatencyRailHandle {
    int64_t num_in, in_tokens, in_ranks, out_slots, total_bytes;
    DEEPEP_MOE_HD LowLatencyRailHandle(const LowLatencyConfig& c, int num_nodes) {
        const int64_t array = round_up(4 * num_nodes * c.num_max_tokens, 16);
        num_in = LowLatencyHandleLayout(c).total_bytes;
        in_tokens = num_in + round_up(4 * num_nodes, 16);
        in_ranks = in_tokens + array;
        out_slots = in_ranks + array;
        total_bytes = out_slots + array;
    }
};

// Ranks have their numbers in the group everywhere: rank `index` of node `node` is node * ranks_per_node + index.
struct LowLatencyRailContext {
    LowLatencyContext context;  // `workspaces` of the ranks of other nodes are null
    LowLatencyRailLayout layout;
    std::byte* base;  // this rank's symmetric memory
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
using LowLatencyRailControl = LowLatencyRailLaunch<LowLatencyControlParams>;  // one block; kRefuse, kCatchUp

// What the module that links NVSHMEM hands to the one that does not. Functions return nullptr, or why a kernel could not be launched.
struct LowLatencyRailShim {
    int64_t bytes;  // of the params: both modules are of one build
    const char* (*send)(const LowLatencyRailDispatch&, void* stream) noexcept;
    const char* (*forward)(const LowLatencyRailDispatch&, void* stream) noexcept;
    const char* (*sum)(const LowLatencyRailCombine&, void* stream) noexcept;
    const char* (*finish)(const LowLatencyRailCombine&, void* stream) noexcept;
    const char* (*control)(const LowLatencyRailControl&, void* stream) noexcept;
};
constexpr const char* kLowLatencyRailShimName = "deepep_moe.LowLatencyRailShim";
constexpr int64_t kLowLatencyRailShimBytes = sizeof(LowLatencyRailDispatch) + sizeof(LowLatencyRailCombine) + sizeof(LowLatencyRailControl);

}  // namespace deepep_moe
