#include "runtime/shm/exchange.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>

namespace deepep_moe {
namespace {

constexpr char kWentOn[] = " left this call with an error and went on; see its output for the error";

// Calls run(index) for each index below `count`, the last one on the calling thread. Threads are started per call (some 20 us each):
// nothing is left behind for a fork to break. The first exception, by index, is rethrown.
template <typename Run>
void run_on_threads(int count, const Run& run) {
    std::vector<std::exception_ptr> errors(count);
    const auto guarded = [&](int index) {
        try {
            run(index);
        } catch (...) {
            errors[index] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(count - 1);
        for (int index = 0; index < count - 1; ++index) threads.emplace_back(guarded, index);
        guarded(count - 1);
    }
    for (const auto& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

std::string call_name(uint64_t sequence) { return "call " + std::to_string(sequence); }

}  // namespace

// Allows one call at a time, because two threads in one buffer would mix their sequence numbers.
class ShmExchange::Call {
public:
    explicit Call(ShmExchange& owner) : owner_(owner) {
        if (owner.busy_.exchange(true)) throw CallError(kTwoThreads);
        owner.stopped_ = nullptr;
    }
    ~Call() { owner_.busy_.store(false); }

private:
    ShmExchange& owner_;
};

ShmExchange::ShmExchange(const WorkspaceConfig& config, int rank, double timeout_s)
    : config_(config), layout_(config), rank_(rank), timeout_s_(timeout_s), peers_(config.num_ranks, rank, layout_.total_bytes()) {
    auto* header = new (base(rank)) SegmentHeader{};
    header->magic = kSegmentMagic;
    header->rank = rank;
    header->state.store(SegmentState::kAlive, std::memory_order_release);
}

ShmExchange::~ShmExchange() {
    if (peers_.is_owner()) header(rank_).state.store(SegmentState::kDestroyed, std::memory_order_release);
}

void ShmExchange::connect(const std::vector<std::string>& paths, const std::vector<int>& pids) {
    peers_.connect(paths, pids);
    for (int rank = 0; rank < config_.num_ranks; ++rank)
        if (header(rank).magic != kSegmentMagic || header(rank).rank != rank) throw_foreign_segment(paths[rank], rank);
}

// ---- entering a call ----

Entry& ShmExchange::begin_entry(const Signature& signature) {
    peers_.check_owner();
    ++sequence_;
    Entry& own_entry = entry(rank_);
    own_entry.sequence.store(0);  // so that late readers of the old entry notice
    std::atomic_thread_fence(std::memory_order_release);
    own_entry.refused = 0;
    own_entry.signature = signature;
    own_entry.num_recv_rows = -1;
    return own_entry;
}

void ShmExchange::publish(Entry& own_entry) {
    own_entry.sequence.store(sequence_, std::memory_order_release);
    header(rank_).entered.store(sequence_, std::memory_order_release);
}

void ShmExchange::publish_refusal(const std::string& message, int cause) {
    Entry& own_entry = begin_entry({});
    own_entry.refused = 1 + cause;
    copy_text(own_entry.message, kMessageBytes, message);
    publish(own_entry);
}

void ShmExchange::refuse(const std::string& message, int cause) {
    const Call call(*this);
    publish_refusal(message, cause);
}

void ShmExchange::enter(Entry& own_entry) {
    publish(own_entry);
    wait_entered();
    check_entries();
}

void ShmExchange::wait_entered() {
    Waiter waiter(*this);
    const auto report_lacks = [&](auto&& report) {
        for (int peer = 0; peer < config_.num_ranks; ++peer) {
            const uint64_t seen = header(peer).entered.load(std::memory_order_acquire);
            if (seen < sequence_) report(Lack{peer, "entry into the call", static_cast<int64_t>(sequence_), static_cast<int64_t>(seen)});
        }
    };
    const auto all_here = [&] {
        bool all = true;
        report_lacks([&](const Lack&) { all = false; });
        return all;
    };
    while (!all_here()) waiter.idle(report_lacks);
}

void ShmExchange::check_entries() const {
    std::string mismatch;
    for (int peer = 0; peer < config_.num_ranks; ++peer) {
        const Entry& theirs = entry(peer);
        // A rank that gave up on this call will not take part in it, although it has entered.
        if (header(peer).failure.sequence.load(std::memory_order_acquire) == sequence_) pass_on({peer, "entry into the call", 0, 0}, peer);
        const int refused = theirs.refused;
        const bool is_refused = refused != 0;
        const std::string message(theirs.message, is_refused ? strnlen(theirs.message, kMessageBytes) : 0);
        const Signature signature = theirs.signature;
        std::atomic_thread_fence(std::memory_order_acquire);
        if (theirs.sequence.load(std::memory_order_acquire) != sequence_)
            throw PeerError("rank " + std::to_string(peer) + " left " + call_name(sequence_) + " with an error and went on to " +
                                call_name(header(peer).entered) + "; see its output for the error",
                            peer);
        if (is_refused) throw PeerError("rank " + std::to_string(peer) + " did not make its call: " + message, peer, refused - 1);
        if (!(signature == entry(rank_).signature)) mismatch += "; rank " + std::to_string(peer) + ": " + describe(signature);
    }
    if (!mismatch.empty())
        throw MismatchError("ranks make different calls: rank " + std::to_string(rank_) + ": " + describe(entry(rank_).signature) +
                            mismatch);
}

// ---- checks during a wait ----

bool ShmExchange::suspect(const Lack& lack) {
    const SegmentHeader& theirs = header(lack.peer);
    if (theirs.state.load(std::memory_order_acquire) == SegmentState::kDestroyed) return true;
    if (theirs.entered.load(std::memory_order_acquire) > sequence_) return true;
    if (peers_.is_gone(lack.peer)) return true;
    // A peer that only waits for another rank is not to blame, but the failure that it has found can be passed on.
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (header(peer).failure.sequence.load(std::memory_order_acquire) == sequence_) return true;
    return false;
}

std::string ShmExchange::where(const Lack& lack) const {
    return "rank " + std::to_string(rank_) + " in " + call_name(sequence_) + ", waiting for " + lack.phase + ": rank ";
}

void ShmExchange::pass_on(const Lack& lack, int peer) const {
    const FailureRecord& theirs = header(peer).failure;
    const int culprit = theirs.culprit;
    const int64_t expected = theirs.expected, seen = theirs.seen;
    const std::string phase(theirs.phase, strnlen(theirs.phase, sizeof(theirs.phase)));
    const std::string reason(theirs.reason, strnlen(theirs.reason, kMessageBytes));
    std::atomic_thread_fence(std::memory_order_acquire);
    // The peer may have gone on meanwhile, and failed again.
    if (theirs.sequence.load(std::memory_order_acquire) != sequence_) throw PeerError(where(lack) + std::to_string(peer) + kWentOn, peer);
    if (culprit == peer) throw PeerError(where(lack) + std::to_string(peer) + " left its call: " + reason, peer);
    throw TimeoutError(where(lack) + std::to_string(peer) + " gave up on rank " + std::to_string(culprit) + " in phase '" + phase +
                           "' (expected " + std::to_string(expected) + ", seen " + std::to_string(seen) + ")",
                       culprit, phase, expected, seen);
}

void ShmExchange::give_up(const Lack& lack) {
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (header(peer).failure.sequence.load(std::memory_order_acquire) == sequence_) pass_on(lack, peer);
    const std::string who = where(lack) + std::to_string(lack.peer);
    if (header(lack.peer).state.load(std::memory_order_acquire) == SegmentState::kDestroyed) throw PeerError(who + kHasLeft, lack.peer);
    if (header(lack.peer).entered.load(std::memory_order_acquire) > sequence_) throw PeerError(who + kWentOn, lack.peer);
    fail(lack);
}

// Record a failure of this call. Only the first one counts.
template <class Write>
void ShmExchange::record_failure(const Write& write) {
    const std::lock_guard lock(failing_);
    FailureRecord& failure = header(rank_).failure;
    if (failure.sequence.load() == sequence_) return;
    failure.sequence.store(0);
    std::atomic_thread_fence(std::memory_order_release);
    write(failure);
    failure.sequence.store(sequence_);
}

void ShmExchange::fail(const Lack& lack) {
    record_failure([&](FailureRecord& failure) {
        failure.culprit = lack.peer;
        failure.expected = lack.expected;
        failure.seen = lack.seen;
        copy_text(failure.phase, sizeof(failure.phase), lack.phase);
    });
    const std::string why = peers_.why_silent(lack.peer, timeout_s_);
    throw TimeoutError("rank " + std::to_string(rank_) + " in " + call_name(sequence_) + ": rank " + std::to_string(lack.peer) +
                           " did not deliver, " + why + "; phase '" + lack.phase + "', expected " + std::to_string(lack.expected) +
                           ", seen " + std::to_string(lack.seen) + peers_.advice(lack.peer),
                       lack.peer, lack.phase, lack.expected, lack.seen);
}

void ShmExchange::abandon(const std::string& reason) {
    const Call call(*this);
    if (entry(rank_).refused != 0) return;  // the peers know already
    bool has_ended = header(rank_).ended.load() == sequence_;
    if (!has_ended) {
        record_failure([&](FailureRecord& failure) {
            failure.culprit = rank_;
            copy_text(failure.reason, kMessageBytes, reason);
        });
        for (int peer = 0; peer < config_.num_ranks; ++peer) has_ended |= header(peer).ended.load() >= sequence_;
    }
    if (has_ended) publish_refusal(reason);
}

// Let the caller interrupt a wait. An exception of `poll_` ends the waits of all threads of the call.
void ShmExchange::poll() {
    const std::lock_guard lock(failing_);
    if (stopped_) std::rethrow_exception(stopped_);
    if (!poll_) return;
    try {
        poll_();
    } catch (...) {
        stopped_ = std::current_exception();
        throw;
    }
}

// ---- calls ----

Ring ShmExchange::ring(int owner, int source, int channel) const {
    return {reinterpret_cast<RingControl*>(base(owner) + layout_.control(source, channel)), base(owner) + layout_.ring(source, channel)};
}

Channel ShmExchange::channel(int index) {
    Channel channel{config_, rank_, index, static_cast<uint32_t>(sequence_), layout_.ring_bytes(), {}, {}, this};
    for (int peer = 0; peer < config_.num_ranks; ++peer) {
        channel.outbox[peer] = ring(peer, rank_, index);
        channel.inbox[peer] = ring(rank_, peer, index);
    }
    return channel;
}

template <class Params>
void ShmExchange::run_channels(const Params& params) {
    run_on_threads(config_.num_channels, [&](int index) { move_channel(params, channel(index)); });
    end_call();
}

// A rank that leaves a call looks for peers that have ended it, and these look for such a rank, so at least one of them sees the other.
void ShmExchange::end_call() {
    header(rank_).ended.store(sequence_);
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (header(peer).failure.sequence.load() == sequence_) pass_on({peer, "the end of the call", 0, 0}, peer);
}

std::vector<int64_t> ShmExchange::plan(const Signature& signature, const int32_t* own_counts, int64_t num_recv_rows, int32_t* all_counts) {
    const Call call(*this);
    Entry& own_entry = begin_entry(signature);
    own_entry.num_recv_rows = num_recv_rows;
    std::copy_n(own_counts, layout_.num_counts(), counts(rank_));
    enter(own_entry);
    std::vector<int64_t> bounds;
    for (int rank = 0; rank < config_.num_ranks; ++rank) {
        all_counts = std::copy_n(counts(rank), layout_.num_counts(), all_counts);
        bounds.push_back(entry(rank).num_recv_rows);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    check_entries();  // again, to be sure that the values just read are of this call
    return bounds;
}

void ShmExchange::dispatch(const DispatchParams& params) {
    const Call call(*this);
    peers_.check_owner();
    run_channels(params);
}

template <class Params>
void ShmExchange::make(const Signature& signature, const Params& params) {
    const Call call(*this);
    enter(begin_entry(signature));
    run_channels(params);
}

template void ShmExchange::make(const Signature& signature, const DispatchParams& params);
template void ShmExchange::make(const Signature& signature, const CombineParams& params);

}  // namespace deepep_moe
