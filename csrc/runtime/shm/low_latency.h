// The ranks of one host and their low-latency calls: numbers, waits, masks. Protocol: common/low_latency.h.
//
// The rows themselves are moved by `LowLatencyRows`: what a rank writes into the turns of the others, and reads from its own.
//
// One thread sends while others receive. The fate of a call decides when the call after next may be sent. Its turn may be overwritten only
// once all ranks are known to have entered it. A call that was received shows that; a call that failed or was refused does not.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/errors.h"
#include "common/low_latency.h"
#include "runtime/shm/peers.h"

namespace deepep_moe {

// Rows of a turn: arrived u64[num_ranks] | areas [num_ranks] of area_bytes, each: experts i32[num_max_tokens][num_topk] |
// weights f32[num_max_tokens][num_topk] | slots [num_max_tokens] of slot_bytes.
struct HostLowLatencyLayout : LowLatencyLayout {
    int64_t slot_bytes, slots, area_bytes;  // slots: in an area
    int64_t arrived, areas;                 // in a turn

    explicit HostLowLatencyLayout(const LowLatencyConfig& c)
        : LowLatencyLayout(c, round_up(8 * c.num_ranks, 128) + c.num_ranks * bytes_of_area(c)),
          slot_bytes(bytes_of_slot(c)),
          slots(bytes_of_lanes(c)),
          area_bytes(bytes_of_area(c)),
          arrived(rows),
          areas(rows + round_up(8 * c.num_ranks, 128)) {}

private:
    static int64_t bytes_of_lanes(const LowLatencyConfig& c) { return round_up(8 * c.num_max_tokens * c.num_topk, 128); }
    static int64_t bytes_of_slot(const LowLatencyConfig& c) { return round_up(4 * static_cast<int64_t>(c.hidden), 128); }
    static int64_t bytes_of_area(const LowLatencyConfig& c) { return bytes_of_lanes(c) + c.num_max_tokens * bytes_of_slot(c); }
};

// A set of ranks, bit r for rank r.
using RankSet = uint32_t;
constexpr bool contains(RankSet ranks, int rank) { return ranks >> rank & 1; }

inline std::atomic_ref<uint64_t> shared_word(std::byte* address) { return std::atomic_ref(*reinterpret_cast<uint64_t*>(address)); }

// One call's turn of one rank's workspace. Rank `source` writes the words of `source`.
class LowLatencyTurn {
public:
    LowLatencyTurn(const HostLowLatencyLayout& layout, std::byte* workspace, uint64_t number)
        : layout_(layout), base_(workspace + layout.turns + static_cast<int64_t>(number % kTurns) * layout.turn_bytes) {}

    std::atomic_ref<uint64_t> entered(int source) const { return shared_word(base_ + layout_.entered + 8 * source); }
    std::atomic_ref<uint64_t> arrived(int source) const { return shared_word(base_ + layout_.arrived + 8 * source); }  // its rows

private:
    const HostLowLatencyLayout& layout_;
    std::byte* base_;
};

// Moves the rows of one call, in this rank's areas of the others' turns and in its own turn.
class LowLatencyRows {
public:
    virtual ~LowLatencyRows() = default;
    // Write what `ranks` read once this rank has entered the call. Throws std::invalid_argument for bad arguments.
    virtual void write(uint64_t number, RankSet ranks) = 0;
    // Write the rows of a combine that brings weights, for ranks whose weights have come.
    virtual void write_weighted(uint64_t number, RankSet ranks) = 0;
    // Read the rows. `values` are those of the ranks' flags. Ranks that entered but not `arrived` were masked; they send no rows.
    virtual void read(uint64_t number, RankSet entered, RankSet arrived, const std::vector<int>& values) = 0;
    virtual bool is_interrupted() const = 0;  // by an error that cannot be reported to the peers here
};

// One call of one rank.
struct ShmLowLatencyCall {
    LowLatencyWhat what;
    int value;         // of its flag
    uint64_t number;   // for a receiving half
    int64_t* wait_ns;  // [num_ranks] waits are added here
    LowLatencyRows& rows;

    uint64_t flag(uint64_t of) const { return what.flag(of, value); }
    uint64_t arrived(uint64_t of) const { return what.flag(of, 1); }
};

class ShmLowLatency {
public:
    ShmLowLatency(const LowLatencyConfig& config, int rank, double timeout_s, bool mask_stalled);
    ~ShmLowLatency();

    uint64_t num_calls() const { return num_sent_; }  // sent or refused so far
    // Whether `poll` or the rows interrupted call `number`, one of the last calls. If ranks lack the rows of the latest call, `refuse`
    // tells them so, and is not a new call.
    bool is_interrupted(uint64_t number) const { return interrupted_[number % kTurns] == number; }
    int64_t workspace_bytes() const { return layout_.total_bytes; }
    int64_t handle_bytes() const { return LowLatencyHandleLayout(config_).total_bytes; }
    std::string path() const { return peers_.path(); }
    // `paths[r]`, `pids[r]` of every rank. Afterwards, once all ranks are connected, call `seal`.
    void connect(const std::vector<std::string>& paths, const std::vector<int>& pids);
    void seal() { peers_.seal(); }
    int64_t free() const;  // as that of ShmExchange; all calls must be received before

    // Run a half of a call, or both. Throws std::invalid_argument for bad arguments, and tells the peers.
    void run(ShmLowLatencyCall call, bool sends, bool receives);
    const HostLowLatencyLayout& layout() const { return layout_; }
    // The address that `source` writes to in call `number`, in the memory of `owner`.
    std::byte* area(int owner, int source, uint64_t number) const {
        const int64_t turn = layout_.turns + static_cast<int64_t>(number % kTurns) * layout_.turn_bytes;
        return workspaces_[owner] + turn + layout_.areas + source * layout_.area_bytes;
    }
    // Enter a call whose arguments were refused, so that the peers learn why instead of waiting.
    void refuse(const std::string& reason);

    void mask(int rank, bool masked);  // not `masked`: the rank takes part again from this rank's next call on
    void rejoin();                     // waits until all peers have taken this rank back
    RankSet masks() const { return masks_.load(std::memory_order_acquire); }

    // A waiting call calls `poll` now and then; an exception from it ends the call.
    void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }

private:
    enum class Fate : uint64_t { kOpen, kFailed, kHeard };  // kFailed: or refused; kHeard: all ranks have entered the call
    class Sending;
    class Waits;

    void send(ShmLowLatencyCall& call);
    void send_rows(const ShmLowLatencyCall& call, RankSet ranks, Waits& waits, RankSet& served);
    void receive(const ShmLowLatencyCall& call);
    bool note_interrupt(const ShmLowLatencyCall& call, const Waits& waits);
    uint64_t begin();
    void publish_refusal(uint64_t number, RankSet ranks, const std::string& reason);
    void check_refusal(int peer, uint64_t entered) const;
    void check_entries(uint64_t number, RankSet ranks, const LowLatencyWhat& own) const;

    Fate fate(uint64_t number) const;
    void set_fate(uint64_t number, Fate fate) { fates_[number % kTurns] = number << 2 | static_cast<uint64_t>(fate); }
    bool takes_part(int rank, uint64_t number) const {
        return !contains(masks(), rank) && number >= first_calls_[rank].load(std::memory_order_acquire);
    }
    RankSet ranks_in(uint64_t number) const;
    LowLatencyTurn turn(uint64_t number) const { return turn(rank_, number); }
    LowLatencyTurn turn(int owner, uint64_t number) const { return {layout_, workspaces_[owner], number}; }
    template <class Visit>
    void visit(RankSet ranks, const Visit& visit_rank) const {
        for (int rank = 0; rank < config_.num_ranks; ++rank)
            if (contains(ranks, rank)) visit_rank(rank);
    }
    std::atomic_ref<uint64_t> resumed(int owner, int source) const { return shared_word(workspaces_[owner] + layout_.resumed_of(source)); }
    std::atomic_ref<uint64_t> left(int owner, int source) const { return shared_word(workspaces_[owner] + layout_.left_of(source)); }
    char* reason(int owner, int source, uint64_t number) const {
        return reinterpret_cast<char*>(workspaces_[owner] + layout_.reason_of(source, number));
    }
    void forget_flags(int source);

    const LowLatencyConfig config_;
    const HostLowLatencyLayout layout_;
    const int rank_;
    const double timeout_s_;
    const bool mask_stalled_;
    HostPeers peers_;
    std::array<std::byte*, kLowLatencyMaxHostRanks> workspaces_{};
    std::function<void()> poll_;

    std::mutex sending_;                     // guards sending and the counts of calls
    std::atomic<std::thread::id> sender_{};  // the thread that holds it
    std::atomic<uint64_t> num_sent_ = 0;
    std::atomic<RankSet> unserved_ = 0;                        // ranks that have yet to learn why the latest call was broken off
    std::array<std::atomic<uint64_t>, kTurns> fates_{};        // number << 2 | Fate, by turn
    std::array<std::atomic<uint64_t>, kTurns> interrupted_{};  // numbers of calls, by turn
    std::atomic<RankSet> masks_ = 0;
    std::array<std::atomic<uint64_t>, kLowLatencyMaxHostRanks> first_calls_{};  // first call of each rank since it was last masked
};

}  // namespace deepep_moe
