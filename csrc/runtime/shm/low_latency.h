// The ranks of one host and their low-latency calls: numbers, waits, masks. Protocol: common/low_latency.h.
//
// One thread sends while others receive. What has become of a call decides when the call after next may be sent: its turn may be
// overwritten only once all ranks are known to have entered this one, which a call that was received tells, and one that failed or was
// refused does not.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "common/errors.h"
#include "cpu/low_latency.h"
#include "runtime/shm/peers.h"

namespace deepep_moe {

class ShmLowLatency {
public:
    ShmLowLatency(const LowLatencyConfig& config, int rank, double timeout_s, bool mask_stalled);
    ~ShmLowLatency();

    uint64_t num_calls() const { return num_sent_; }  // sent or refused so far
    // The latest call was interrupted before all ranks had its rows; `refuse` tells these ranks, instead of taking part in another call.
    bool is_broken_off() const { return unserved_ != 0; }
    int64_t workspace_bytes() const { return layout_.total_bytes; }
    int64_t handle_bytes() const { return LowLatencyHandleLayout(config_).total_bytes; }
    std::string path() const { return peers_.path(); }
    // `paths[r]`, `pids[r]` of every rank. Afterwards, once all ranks are connected, call `seal`.
    void connect(const std::vector<std::string>& paths, const std::vector<int>& pids);
    void seal() { peers_.seal(); }

    // Each half, or both. Throws std::invalid_argument for a bad routing, which the peers are told.
    void dispatch(LowLatencyDispatchParams params, bool sends, bool receives);
    void combine(LowLatencyCombineParams params, bool sends, bool receives);
    // Takes part in a call whose arguments were refused, so that the peers learn why instead of waiting.
    void refuse(const std::string& reason);

    void mask(int rank, bool masked);  // not `masked`: it comes back with this rank's next call
    void rejoin();                     // waits until all peers have taken this rank back
    RankSet masks() const { return masks_.load(std::memory_order_acquire); }

    // `poll` is called now and then while a call waits; what it throws ends the call.
    void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }

private:
    enum class Fate : uint64_t { kOpen, kFailed, kHeard };  // kFailed: or refused; kHeard: all ranks have entered the call
    class Waits;

    template <class Params>
    void run(Params params, uint64_t& number, bool sends, bool receives);
    template <class Params>
    void send_call(const Params& params, uint64_t& number);
    template <class Params>
    void receive_call(const Params& params, uint64_t number);
    // Return the ranks that are through with this half, also where it throws.
    void send_half(const LowLatencyCall& call, const LowLatencyDispatchParams& params, RankSet& served);
    void send_half(const LowLatencyCall& call, const LowLatencyCombineParams& params, RankSet& served);
    uint64_t begin();
    void publish_refusal(uint64_t number, RankSet ranks, const std::string& reason);
    void check_entries(uint64_t number, RankSet ranks, const LowLatencyWhat& own) const;

    Fate fate(uint64_t number) const;
    void set_fate(uint64_t number, Fate fate) { fates_[number % kTurns] = number << 2 | static_cast<uint64_t>(fate); }
    bool takes_part(int rank, uint64_t number) const {
        return !contains(masks(), rank) && number >= first_calls_[rank].load(std::memory_order_acquire);
    }
    RankSet ranks_in(uint64_t number) const;
    LowLatencyCall call(uint64_t number, RankSet ranks) const { return {config_, layout_, workspaces_.data(), rank_, number, ranks}; }
    LowLatencyTurn turn(uint64_t number) const { return {config_, layout_, workspaces_[rank_], number}; }
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

    std::mutex sending_;  // and all that counts calls
    std::atomic<uint64_t> num_sent_ = 0;
    std::atomic<RankSet> unserved_ = 0;                  // ranks that are still to learn why the latest call was broken off
    std::array<std::atomic<uint64_t>, kTurns> fates_{};  // number << 2 | Fate, by turn
    std::atomic<RankSet> masks_ = 0;
    std::array<std::atomic<uint64_t>, kLowLatencyMaxHostRanks> first_calls_{};  // in which the rank takes part, after it was masked
};

}  // namespace deepep_moe
