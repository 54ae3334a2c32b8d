// Low-latency dispatch and combine between processes: the rows of one call, in halves that send and that receive. Layout and protocol:
// common/low_latency.h. Here `entered` comes after the counts and all lanes, which tell which tokens come: only these have a flag.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/low_latency.h"

namespace deepep_moe {

// Rows of a turn: lanes LowLatencyLane[num_ranks][num_max_tokens][num_topk] | arrived u64[num_ranks][num_max_tokens][kArrivedWords] |
// slots [num_ranks][num_max_tokens] of slot_bytes.
struct HostLowLatencyLayout : LowLatencyLayout {
    static constexpr int kArrivedWords = 16;    // of one flag of `arrived`, of which the first is used: each has its own line of memory
    int64_t slot_bytes, lanes, arrived, slots;  // in a turn

    explicit HostLowLatencyLayout(const LowLatencyConfig& c)
        : LowLatencyLayout(c, bytes_of_lanes(c) + c.capacity() * (8 * kArrivedWords + bytes_of_slot(c))),
          slot_bytes(bytes_of_slot(c)),
          lanes(rows),
          arrived(lanes + bytes_of_lanes(c)),
          slots(arrived + c.capacity() * 8 * kArrivedWords) {}

private:
    static int64_t bytes_of_lanes(const LowLatencyConfig& c) {
        return round_up(static_cast<int64_t>(sizeof(LowLatencyLane)) * c.capacity() * c.num_topk, 128);
    }
    static int64_t bytes_of_slot(const LowLatencyConfig& c) { return round_up(4 * static_cast<int64_t>(c.hidden), 128); }
};

// A set of ranks, bit r for rank r.
using RankSet = uint32_t;
constexpr bool contains(RankSet ranks, int rank) { return ranks >> rank & 1; }

inline std::atomic_ref<uint64_t> shared_word(std::byte* address) { return std::atomic_ref(*reinterpret_cast<uint64_t*>(address)); }

// What one call finds in one rank's workspace; row `source` is written by that rank.
class LowLatencyTurn {
public:
    LowLatencyTurn(const LowLatencyConfig& config, const HostLowLatencyLayout& layout, std::byte* workspace, uint64_t number)
        : config_(config), layout_(layout), base_(workspace + layout.turns + static_cast<int64_t>(number % kTurns) * layout.turn_bytes) {}

    std::atomic_ref<uint64_t> entered(int source) const { return shared_word(base_ + layout_.entered + 8 * source); }
    std::atomic_ref<uint64_t> arrived(int source, int64_t token) const {
        return shared_word(base_ + layout_.arrived + 8 * layout_.kArrivedWords * slot_idx(source, token));
    }
    uint64_t& count(int source, int local_expert) const {
        return reinterpret_cast<uint64_t*>(base_ + layout_.counts)[source * config_.num_local_experts + local_expert];
    }
    LowLatencyLane* lanes(int source, int64_t token) const {
        return reinterpret_cast<LowLatencyLane*>(base_ + layout_.lanes) + slot_idx(source, token) * config_.num_topk;
    }
    std::byte* slot(int source, int64_t token) const { return base_ + layout_.slots + slot_idx(source, token) * layout_.slot_bytes; }

private:
    int64_t slot_idx(int source, int64_t token) const { return source * config_.num_max_tokens + token; }

    const LowLatencyConfig& config_;
    const HostLowLatencyLayout& layout_;
    std::byte* base_;
};

// One call of one rank.
struct LowLatencyCall {
    const LowLatencyConfig& config;
    const HostLowLatencyLayout& layout;
    std::byte* const* workspaces;  // of all ranks
    int rank;
    uint64_t number;
    RankSet ranks;  // to send to; to receive from: those that have entered the call

    LowLatencyTurn turn(int owner) const { return {config, layout, workspaces[owner], number}; }
    uint64_t arrived(const LowLatencyWhat& what) const { return what.flag(number, 1); }  // the flag of a row
};

// Waits of a half that receives.
class LowLatencyWaits {
public:
    virtual ~LowLatencyWaits() = default;
    // Until `flag`, which rank `peer` sets, is `wanted`: true. False where the peer is masked. Throws where it is given up.
    virtual bool wait(std::atomic_ref<uint64_t> flag, uint64_t wanted, int peer, const char* phase) = 0;
};

// Halves of a dispatch. The first throws std::invalid_argument for a bad routing before anything is sent. Rows that do not come, as their
// rank was masked meanwhile, are zeros.
void send(const LowLatencyCall& call, const LowLatencyDispatchParams& params);
void receive(const LowLatencyCall& call, const LowLatencyDispatchParams& params, LowLatencyWaits& waits);

// Halves of a combine. Rows that do not come are left out. `enter` begins the first, and throws std::invalid_argument where the dispatch
// was not received; `send_sums` ends it, for the ranks `to`: with weights of this call only once they have entered, as they bring these.
void enter(const LowLatencyCall& call, const LowLatencyCombineParams& params);
void send_sums(const LowLatencyCall& call, const LowLatencyCombineParams& params, RankSet to);
void receive(const LowLatencyCall& call, const LowLatencyCombineParams& params, LowLatencyWaits& waits);

}  // namespace deepep_moe
