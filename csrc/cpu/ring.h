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

class RingSender {
public:
    RingSender() = default;
    RingSender(Ring ring, uint32_t sequence, uint32_t num_slots, size_t slot_bytes)
        : ring_(ring), sequence_(sequence), num_slots_(num_slots), slot_bytes_(slot_bytes) {}

    // Returns the next slot to fill, or nullptr while the ring is full.
    std::byte* next() {
        if (filled_ - drained_ == num_slots_) {
            drained_ = ring_count(ring_.control->tail.load(std::memory_order_acquire), sequence_);
            if (filled_ - drained_ == num_slots_) return nullptr;
        }
        return ring_.data + (filled_ % num_slots_) * slot_bytes_;
    }
    void push() { ++filled_; }
    void publish() { ring_.control->head.store(ring_position(sequence_, filled_), std::memory_order_release); }
    uint32_t filled() const { return filled_; }
    uint32_t drained() const { return ring_count(ring_.control->tail.load(std::memory_order_acquire), sequence_); }
    bool is_full() const { return filled_ - drained() == num_slots_; }

private:
    Ring ring_;
    uint32_t sequence_ = 0, num_slots_ = 0, filled_ = 0, drained_ = 0;
    size_t slot_bytes_ = 0;
};

class RingReceiver {
public:
    RingReceiver() = default;
    RingReceiver(Ring ring, uint32_t sequence, uint32_t num_slots, size_t slot_bytes)
        : ring_(ring), sequence_(sequence), num_slots_(num_slots), slot_bytes_(slot_bytes) {}

    // Returns the next filled slot, or nullptr while there is none.
    const std::byte* next() {
        if (drained_ == filled_) {
            filled_ = ring_count(ring_.control->head.load(std::memory_order_acquire), sequence_);
            if (drained_ == filled_) return nullptr;
        }
        return ring_.data + (drained_ % num_slots_) * slot_bytes_;
    }
    void pop() { ++drained_; }
    void publish() { ring_.control->tail.store(ring_position(sequence_, drained_), std::memory_order_release); }
    uint32_t filled() const { return ring_count(ring_.control->head.load(std::memory_order_acquire), sequence_); }
    uint32_t drained() const { return drained_; }
    bool is_empty() const { return filled() == drained_; }

private:
    Ring ring_;
    uint32_t sequence_ = 0, num_slots_ = 0, filled_ = 0, drained_ = 0;
    size_t slot_bytes_ = 0;
};

}  // namespace deepep_moe
