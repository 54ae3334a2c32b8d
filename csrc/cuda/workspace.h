// Lays out one rank's workspace in GPU memory, which its peers map and write. Every offset into it comes from here.
//
//   entered u64[2][num_ranks] | bounds u64[2][num_ranks] | lanes_ready u64[num_ranks] | left u64[num_ranks] |
//   stamps GpuStamp[kStamps][num_ranks] | arrived u64[num_ranks][num_chunks][16] | counts u64[2][num_sources][columns] |
//   lanes GpuLane[num_ranks][num_max_tokens][num_topk] | inbox [num_ranks - 1][num_slots] slots |
//   outbox [num_ranks - 1][num_max_tokens] slots | expert slots [expert_slot_bytes]
//
// With several nodes, this describes the ranks of one node. Each of them also serves the tokens that came from the ranks of its index in
// other nodes. It is the *source* of num_nodes shares of tokens; share node * num_ranks + rank has its own part of the slots.
//
// Only rank `source` writes row `source` of every array except the outbox, which belongs to this rank. Flags hold the sequence number of
// their call, so nothing is cleared between calls. Index [2] is its parity, because a peer may enter the next call before this rank
// has read what the peer wrote for the last one. Words of `entered` also hold a digest of what the rank does in the call. Words of
// `bounds` and `counts` also hold a number of rows or tokens, so that each value arrives with its flag.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/waits.h"

namespace deepep_moe {

constexpr int kMaxGpuRanks = 8;  // ranks of one node
constexpr int kMaxGpuNodes = 32;
constexpr int kMaxGpuSources = kMaxGpuNodes * kMaxGpuRanks;
constexpr int kChunkSlots = 4;            // rows that a warp sends at a time and one flag announces
constexpr int kReducedSlots = 8;          // rows of the outbox that a sending warp waits for at a time
constexpr int kRailSlots = 8;             // rows that cross to another node at a time, announced by one word
constexpr int kArrivedStride = 16;        // words from one flag of `arrived` to the next: many warps poll them, so each has its own line
constexpr int kStamps = 8;                // calls whose stamps a rank keeps for its peers
constexpr int kMaxExpertSlots = 32;       // copies of experts that a rank holds
constexpr int kStaticSharedBytes = 1024;  // upper bound of a kernel's static shared memory

struct GpuWorkspaceConfig {
    int num_ranks, num_experts, num_topk, hidden;  // ranks and experts of one node
    int64_t num_max_tokens;                        // tokens that a rank serves, over all nodes
    int num_nodes = 1, node = 0;                   // node: this rank's
    bool is_by_lane = false;        // a combine sends the rows of a token one by one, and the token's rank adds them; with one node
    int64_t expert_slot_bytes = 0;  // for copies of the peers' experts and their gradients

    DEEPEP_MOE_HD int num_sources() const { return num_nodes * num_ranks; }
    // Returns the number of slots of one source in an inbox. With sums by lanes, slot * num_topk + n is for the n-th row of the token in
    // `slot`.
    DEEPEP_MOE_HD int64_t num_slots() const { return is_by_lane ? num_max_tokens * num_topk : num_max_tokens; }
    // Tokens of one node's share, and slots to each rank for it. With several nodes this is a multiple of kReducedSlots.
    DEEPEP_MOE_HD int node_tokens() const { return static_cast<int>(num_max_tokens / num_nodes); }
};

constexpr unsigned long long kRefusedByGpu = 1ull << 62;  // a bit that no packed Signature has

// A stamp says what a rank does in a call. The hosts of its peers read it for their error messages.
struct GpuStamp {
    unsigned long long what;       // a packed Signature; with kRefusedByGpu: this rank's GPU refuses, within a node; 0: its host refuses
    GpuFailure why;                // set where the GPU refuses
    char reason[kMaxReasonBytes];  // set where the host refuses, with its cause in why.seen

    // Returns the deepep_moe.errors.Cause of the rank that refused first: this one, or a peer that its GPU has met.
    DEEPEP_MOE_HD long long cause() const { return reason[0] != '\0' || why.kind == kPeerRefused ? why.seen : 0; }
};

// Describes one top-k entry of a token on its way: its target (a row of recv_x, a local expert, or -1) and its weight.
struct alignas(8) GpuLane {
    int32_t target;
    float weight;
};

// Words of `entered`, `bounds` and `counts` hold the sequence number of the call above kValueBits bits of a value.
constexpr int kValueBits = 24;
constexpr unsigned long long kRefused = (1u << kValueBits) - 1;  // this count says that the rank refuses its indices

constexpr int kNoBound = (1 << kValueBits) - 1;  // this bound says that the rank has none, or one that is too large for a word

// Returns the value with which a rank enters a call. Ranks with different digests are in different calls; 0 is a refusal.
DEEPEP_MOE_HD constexpr unsigned long long digest(unsigned long long what) {
    const unsigned long long mixed = what * 0x9e3779b97f4a7c15ull >> (64 - kValueBits);
    return what == 0 ? 0 : mixed == 0 ? 1 : mixed;
}

template <class Int, class Divisor>
DEEPEP_MOE_HD constexpr auto divide_up(Int value, Divisor divisor) {
    return (value + divisor - 1) / divisor;
}

// Lays out one row on its way: the row, then its tail (scales in a dispatch, values of the top-k entries in a combine).
struct GpuSlotLayout {
    int64_t row_bytes, tail_bytes, bytes;
    DEEPEP_MOE_HD GpuSlotLayout(int64_t row_bytes, int64_t tail_bytes)
        : row_bytes(row_bytes), tail_bytes(tail_bytes), bytes(divide_up(row_bytes + tail_bytes, 128) * 128) {}
};

struct GpuWorkspaceLayout {
    int64_t entered, bounds, lanes_ready, left, stamps, arrived, counts, lanes, inbox, outbox, expert_slots, total_bytes;
    int64_t inbox_bytes, outbox_bytes;  // slots of one peer
    int num_ranks, num_sources;
    int columns, num_chunks, num_reduced;  // columns: experts, then ranks

    GpuWorkspaceLayout() = default;
    DEEPEP_MOE_HD explicit GpuWorkspaceLayout(const GpuWorkspaceConfig& c)
        : entered(0),
          bounds(entered + 2 * 8 * c.num_ranks),
          lanes_ready(bounds + 2 * 8 * c.num_ranks),
          left(lanes_ready + 8 * c.num_ranks),
          stamps(left + 8 * c.num_ranks),
          arrived(divide_up(stamps + kStamps * static_cast<int64_t>(sizeof(GpuStamp)) * c.num_ranks, 128) * 128),
          num_ranks(c.num_ranks),
          num_sources(c.num_sources()),
          columns(c.num_experts + c.num_ranks),
          num_chunks(static_cast<int>(divide_up(c.num_slots(), kChunkSlots))),
          num_reduced(static_cast<int>(divide_up(c.num_max_tokens, kReducedSlots))) {
        counts = arrived + int64_t{8} * kArrivedStride * c.num_ranks * num_chunks;
        lanes = divide_up(counts + int64_t{2 * 8} * num_sources * columns, 128) * 128;
        inbox = divide_up(lanes + static_cast<int64_t>(sizeof(GpuLane)) * c.num_ranks * c.num_max_tokens * c.num_topk, 128) * 128;
        const int64_t slot_bytes = GpuSlotLayout(4 * static_cast<int64_t>(c.hidden), 4 * c.num_topk).bytes;
        inbox_bytes = c.num_slots() * slot_bytes;
        outbox_bytes = c.num_max_tokens * slot_bytes;
        outbox = inbox + (c.num_ranks - 1) * inbox_bytes;
        expert_slots = outbox + (c.num_ranks - 1) * outbox_bytes;
        total_bytes = expert_slots + c.expert_slot_bytes;
    }

    // The next functions return offsets of words that `source` writes in the workspace of another rank. parity: that of the call.
    DEEPEP_MOE_HD int64_t entered_of(int parity, int source) const { return entered + 8 * (parity * num_ranks + source); }
    DEEPEP_MOE_HD int64_t bound_of(int parity, int source) const { return bounds + 8 * (parity * num_ranks + source); }
    DEEPEP_MOE_HD int64_t stamp_of(unsigned long long call, int source) const {
        return stamps + static_cast<int64_t>(sizeof(GpuStamp)) * (static_cast<int64_t>(call % kStamps) * num_ranks + source);
    }
    // Return the offsets of slots that come from a peer of the owner, and of those that go to one.
    DEEPEP_MOE_HD int64_t inbox_of(int owner, int peer) const { return inbox + (peer - (peer > owner)) * inbox_bytes; }
    DEEPEP_MOE_HD int64_t outbox_of(int owner, int peer) const { return outbox + (peer - (peer > owner)) * outbox_bytes; }
};

}  // namespace deepep_moe
