// Keeps the calls of the ranks of one host in step. Every call begins with an entry that all ranks publish and read. So they agree on the
// call, and learn of an error before any row moves.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "common/errors.h"
#include "cpu/workspace.h"
#include "cpu/combine.h"
#include "cpu/dispatch.h"
#include "runtime/shm/peers.h"

namespace deepep_moe {

class ShmExchange final : public PeerMonitor {
public:
    ShmExchange(const WorkspaceConfig& config, int rank, double timeout_s);
    ~ShmExchange() override;

    size_t workspace_bytes() const { return layout_.total_bytes(); }
    std::string path() const { return peers_.path(); }
    // Connect to the segments at `paths[r]` of the processes `pids[r]`. Once all ranks are connected, call `seal`.
    void connect(const std::vector<std::string>& paths, const std::vector<int>& pids);
    void seal() { peers_.seal(); }
    // Return the memory of rows to the system, between calls. The next call takes it again. Returns its bytes.
    int64_t free() const { return peers_.give_back(layout_.rings_offset(), layout_.total_bytes() - layout_.rings_offset()); }

    // A dispatch has two halves: `plan` exchanges the counts, the caller allocates, `dispatch` moves the rows. Each rank has
    // WorkspaceLayout::num_counts counts, and `all_counts` gets those of all ranks. Returns num_recv_rows of all ranks.
    std::vector<int64_t> plan(const Signature& signature, const int32_t* own_counts, int64_t num_recv_rows, int32_t* all_counts);
    void dispatch(const DispatchParams& params);
    template <class Params>  // DispatchParams of a cached dispatch, or CombineParams
    void make(const Signature& signature, const Params& params);
    uint64_t num_calls() const { return sequence_; }  // entered or refused so far
    // A waiting call calls `poll` now and then, on any of its threads; an exception from it ends the call.
    void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }
    // Enter a call whose arguments were refused, so that the peers learn why instead of waiting.
    void refuse(const std::string& message, int cause);
    // Leave the last call, which this rank has entered and cannot finish. Peers that are in it learn why. Peers that have ended it need
    // nothing more from it; for them this rank refuses the next call.
    void abandon(const std::string& reason);

    int num_ranks() const override { return config_.num_ranks; }
    double timeout_s() const override { return timeout_s_; }
    uint64_t beat(int peer) const override { return header(peer).beat.load(std::memory_order_relaxed); }
    void beat_self() override { header(rank_).beat.fetch_add(1, std::memory_order_relaxed); }
    void poll() override;
    bool suspect(const Lack& lack) override;
    [[noreturn]] void give_up(const Lack& lack) override;
    [[noreturn]] void fail(const Lack& lack) override;

private:
    SegmentHeader& header(int rank) const { return *reinterpret_cast<SegmentHeader*>(base(rank)); }
    Entry& entry(int rank) const { return *reinterpret_cast<Entry*>(base(rank) + layout_.entry(sequence_)); }
    int32_t* counts(int rank) const { return reinterpret_cast<int32_t*>(base(rank) + layout_.counts(sequence_)); }
    std::byte* base(int rank) const { return peers_.memory(rank); }
    Ring ring(int owner, int source, int channel) const;
    Channel channel(int index);
    template <class Params>
    void run_channels(const Params& params);
    void end_call();

    class Call;
    std::string where(const Lack& lack) const;  // text for a message; a rank's number follows
    [[noreturn]] void pass_on(const Lack& lack, int peer) const;
    template <class Write>
    void record_failure(const Write& write);
    Entry& begin_entry(const Signature& signature);
    void publish(Entry& own_entry);
    void publish_refusal(const std::string& message, int cause = 0);
    void enter(Entry& own_entry);  // publishes and waits for all ranks; throws PeerError, MismatchError
    void wait_entered();
    void check_entries() const;

    const WorkspaceConfig config_;
    const WorkspaceLayout layout_;
    const int rank_;
    const double timeout_s_;
    std::atomic<uint64_t> sequence_ = 0;  // number of the last call; any thread may ask for it
    std::atomic<bool> busy_ = false;      // a thread is in a call
    std::mutex failing_;                  // several channels may fail at once
    std::exception_ptr stopped_;          // exception of `poll_` in this call, on one of its threads
    std::function<void()> poll_;
    HostPeers peers_;
};

}  // namespace deepep_moe
