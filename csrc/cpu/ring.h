// A ring of slots in shared memory has one producer and one consumer, and lives for one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/workspace.h"

namespace deepep_moe {

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

}  // namespace deepep_moe
