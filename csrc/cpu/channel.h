// Holds the state with which a thread exchanges rows with its counterparts on all other ranks.
//
// A call's tokens are split into channels, the same way on every rank; channel c of rank s feeds ring (s, c) of every peer, in token
// order. Threads own whole channels, so no two threads share a counter, and positions need no atomics.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/ring.h"
#include "cpu/wait.h"

namespace deepep_moe {

constexpr int kBatch = 16;  // rows moved for one peer before the next peer

template <class T>
const T* at(const T* optional, int64_t offset) {
    return optional != nullptr ? optional + offset : nullptr;
}

struct Channel : WorkspaceConfig {
    int rank, channel;
    uint32_t sequence;
    size_t ring_bytes;
    Ring outbox[kMaxRanks];  // in the peer's segment, filled by this rank
    Ring inbox[kMaxRanks];   // in this rank's segment, filled by the peer
    PeerMonitor* monitor;

    RingSender sender(int peer, const SlotLayout& slot) const {
        return {outbox[peer], sequence, static_cast<uint32_t>(ring_bytes / slot.bytes), slot.bytes};
    }
    RingReceiver receiver(int peer, const SlotLayout& slot) const {
        return {inbox[peer], sequence, static_cast<uint32_t>(ring_bytes / slot.bytes), slot.bytes};
    }
};

// Returns the ranks that each token of `range` goes to, as one bit a rank.
inline std::vector<uint64_t> rank_masks(const int32_t* topk_idx, Range range, int num_topk, int experts_per_rank) {
    std::vector<uint64_t> masks(range.end - range.begin, 0);
    for (int64_t token = range.begin; token < range.end; ++token)
        for (int k = 0; k < num_topk; ++k)
            if (const int32_t expert = topk_idx[token * num_topk + k]; expert >= 0)
                masks[token - range.begin] |= uint64_t{1} << (expert / experts_per_rank);
    return masks;
}

// Returns the first row, in rank order, that (source, channel) sent: rows lie by source, then channel. recv_counts: [num_ranks,
// num_channels].
inline int64_t first_slot(const int32_t* recv_counts, int source, int channel, int num_channels) {
    int64_t first = 0;
    for (int i = 0; i < source * num_channels + channel; ++i) first += recv_counts[i];
    return first;
}

}  // namespace deepep_moe
