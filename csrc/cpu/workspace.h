// Lays out the shared memory of one rank. Every offset into it comes from here.
//
//   SegmentHeader | Entry[kEntries] | counts[kEntries] | RingControl[num_ranks][num_channels] | ring bytes[num_ranks][num_channels]
//
// A rank owns one segment and writes its header, entries and counts. The rings in it are its inbox: only rank `source` writes ring
// (source, channel), and only the owner drains it. Every counter carries the sequence number of its call. So nothing is cleared between
// calls, and remains of an aborted call are never mistaken for data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/signature.h"
#include "common/types.h"

namespace deepep_moe {

constexpr size_t kCacheLine = 64;
constexpr size_t kMessageBytes = 512;
constexpr int kEntries = 16;  // calls whose entries are kept: a rank that refuses or gives up calls gets ahead of the others
constexpr size_t kRingBytes = size_t{1} << 20;  // bytes of all channels of one source together; more if rows are very long
constexpr size_t kMinRingSlots = 8;
constexpr uint64_t kSegmentMagic = 0x64656570'65700005;  // changes with this layout

enum class SegmentState : int { kAlive = 1, kDestroyed = 2 };

// Says why this rank has left a call that it had entered, for peers that wait in the same call.
struct FailureRecord {
    std::atomic<uint64_t> sequence;  // number of the call; 0 while the rest is written
    int culprit;                     // the rank it gave up on, in `phase`; or this rank, with its own `reason`
    int64_t expected, seen;
    char phase[64];
    char reason[kMessageBytes];
};

struct SegmentHeader {
    uint64_t magic;
    int rank;
    std::atomic<SegmentState> state;
    alignas(kCacheLine) std::atomic<uint64_t> entered;  // the last call the rank has entered
    std::atomic<uint64_t> ended;                        // the last call whose rows this rank has sent and received
    alignas(kCacheLine) std::atomic<uint64_t> beat;     // grows while the rank waits; a rank that is stuck elsewhere does not raise it
    alignas(kCacheLine) FailureRecord failure;
};

// A rank announces its call by this.
struct Entry {
    alignas(
        kCacheLine) std::atomic<uint64_t> sequence;  // number of the call; 0 while the rest, or the counts of the same place, are written
    int refused;                                     // not 0: 1 + Cause; the rank makes no call, and only `message`, the reason, is set
    Signature signature;
    int64_t num_recv_rows;  // the bound given by the caller, or -1
    char message[kMessageBytes];
};

// Positions are (sequence << 32 | count): a count of another call reads as zero.
struct RingControl {
    alignas(kCacheLine) std::atomic<uint64_t> head;  // slots filled, by the source
    alignas(kCacheLine) std::atomic<uint64_t> tail;  // slots drained, by the owner
};

struct WorkspaceConfig {
    int num_ranks, num_channels, num_experts, num_topk, hidden;
    int ranks_per_node = num_ranks;
};

// Lays out one ring slot: experts and values of the top-k entries, then the row, then its scales.
struct SlotLayout {
    size_t values_offset, row_offset, scales_offset, bytes;
    SlotLayout(int num_topk, size_t row_bytes, size_t scale_bytes)
        : values_offset(sizeof(int32_t) * num_topk),
          row_offset(align_up(values_offset + sizeof(float) * num_topk, kCacheLine)),
          scales_offset(row_offset + align_up(row_bytes, kRowAlignment)),
          bytes(align_up(scales_offset + scale_bytes, kCacheLine)) {}
};

class WorkspaceLayout {
public:
    explicit WorkspaceLayout(const WorkspaceConfig& config)
        : config_(config),
          entries_offset_(align_up(sizeof(SegmentHeader), kCacheLine)),
          counts_offset_(entries_offset_ + kEntries * sizeof(Entry)),
          counts_bytes_(align_up(sizeof(int32_t) * num_counts(), kCacheLine)),
          control_offset_(counts_offset_ + kEntries * counts_bytes_),
          rings_offset_(align_up(control_offset_ + sizeof(RingControl) * config.num_ranks * config.num_channels, 4096)) {
        const SlotLayout largest(config.num_topk, sizeof(float) * config.hidden, 0);
        const size_t share = kRingBytes / config.num_channels;
        ring_bytes_ = align_up(share > kMinRingSlots * largest.bytes ? share : kMinRingSlots * largest.bytes, 4096);
    }

    size_t entry(uint64_t sequence) const { return entries_offset_ + (sequence % kEntries) * sizeof(Entry); }
    // int32 [num_channels, num_ranks + num_experts]: tokens for each rank, then for each expert
    size_t counts(uint64_t sequence) const { return counts_offset_ + (sequence % kEntries) * counts_bytes_; }
    size_t num_counts() const { return size_t{1} * config_.num_channels * (config_.num_ranks + config_.num_experts); }
    size_t control(int source, int channel) const { return control_offset_ + sizeof(RingControl) * index(source, channel); }
    size_t ring(int source, int channel) const { return rings_offset_ + ring_bytes_ * index(source, channel); }
    size_t rings_offset() const { return rings_offset_; }
    size_t ring_bytes() const { return ring_bytes_; }
    size_t total_bytes() const { return rings_offset_ + ring_bytes_ * config_.num_ranks * config_.num_channels; }

private:
    size_t index(int source, int channel) const { return static_cast<size_t>(source) * config_.num_channels + channel; }

    WorkspaceConfig config_;
    size_t entries_offset_, counts_offset_, counts_bytes_, control_offset_, rings_offset_, ring_bytes_;
};

}  // namespace deepep_moe
