// Holds the state with which a thread exchanges rows with its counterparts on all other ranks.
//
// A call's tokens are split into channels, the same way on every rank; channel c of rank s feeds ring (s, c) of every peer, in token
// order. Threads own whole channels, so no two threads share a counter, and positions need no atomics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/wait.h"
#include "cpu/workspace.h"

namespace deepep_moe {

// ---- a ring of slots in shared memory, which has one producer and one consumer, and lives for one call ----

struct Ring {
    RingControl* control = nullptr;
    std::byte* data = nullptr;
};

inline uint64_t ring_position(uint32_t sequence, uint32_t count) { return uint64_t{sequence} << 32 | count; }
inline uint32_t ring_count(uint64_t position, uint32_t sequence) {
    return static_cast<uint32_t>(position >> 32) == sequence ? static_cast<uint32_t>(position) : 0;
}

// One end of a ring, which counts the slots that it knows to be filled and drained.
class RingEnd {
public:
    RingEnd() = default;
    RingEnd(Ring ring, uint32_t sequence, uint32_t num_slots, size_t slot_bytes)
        : ring_(ring), sequence_(sequence), num_slots_(num_slots), slot_bytes_(slot_bytes) {}

protected:
    uint32_t read(const std::atomic<uint64_t>& position) const { return ring_count(position.load(std::memory_order_acquire), sequence_); }
    void write(std::atomic<uint64_t>& position, uint32_t count) const {
        position.store(ring_position(sequence_, count), std::memory_order_release);
    }
    std::byte* slot(uint32_t count) const { return ring_.data + (count % num_slots_) * slot_bytes_; }

    Ring ring_;
    uint32_t sequence_ = 0, num_slots_ = 0, filled_ = 0, drained_ = 0;
    size_t slot_bytes_ = 0;
};

class RingSender : public RingEnd {
public:
    using RingEnd::RingEnd;

    // Returns the next slot to fill, or nullptr while the ring is full.
    std::byte* next() {
        if (filled_ - drained_ == num_slots_ && filled_ - (drained_ = drained()) == num_slots_) return nullptr;
        return slot(filled_);
    }
    void push() { ++filled_; }
    void publish() { write(ring_.control->head, filled_); }
    uint32_t filled() const { return filled_; }
    uint32_t drained() const { return read(ring_.control->tail); }
    bool is_full() const { return filled_ - drained() == num_slots_; }
};

class RingReceiver : public RingEnd {
public:
    using RingEnd::RingEnd;

    // Returns the next filled slot, or nullptr while there is none.
    const std::byte* next() {
        if (drained_ == filled_ && drained_ == (filled_ = filled())) return nullptr;
        return slot(drained_);
    }
    void pop() { ++drained_; }
    void publish() { write(ring_.control->tail, drained_); }
    uint32_t filled() const { return read(ring_.control->head); }
    uint32_t drained() const { return drained_; }
    bool is_empty() const { return filled() == drained_; }
};

// ---- a channel ----

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
